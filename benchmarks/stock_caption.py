"""Caption a pair of images as a user's script would, with the model class, its processor, peft and Pillow.

    python benchmarks/stock_caption.py FOLDER BEFORE AFTER QUESTION MAX_NEW_TOKENS

This script prints the caption and its token IDs as JSON. benchmarks/caption.py compares the time of `m3diff caption`
with the time of this script. The script does not check files, and it does not support the registry, parameters, tables
or overlays.
"""

import json
import sys

import peft  # noqa: F401  # imported as in any script that may load adapters, even if this folder has none
import torch
from PIL import Image
from transformers import AutoConfig
from transformers.utils import logging

from m3diff.models.m3diff_model import M3DiffConfig, M3DiffForConditionalGeneration
from m3diff.models.processing import M3DiffProcessor, pad_prompts
from m3diff.records.sample import Turn


@torch.inference_mode()
def print_caption() -> None:
    """Caption the pair given on the command line. Print the caption and its token IDs as JSON."""
    folder, before, after, question, max_new_tokens = sys.argv[1:]
    logging.disable_progress_bar()
    AutoConfig.register(M3DiffConfig.model_type, M3DiffConfig, exist_ok=True)
    model = M3DiffForConditionalGeneration.from_pretrained(folder, trust_remote_code=False).eval()
    processor = M3DiffProcessor.of_folder(folder, model.config)
    prepared = processor.prepare(Image.open(path, formats=["PNG"]) for path in (before, after))
    inputs = pad_prompts([processor.encode_prompt([Turn(question)], prepared.marks)], processor.pad_id)
    inputs |= processor.image_inputs(processor.collate([prepared]), model.device)
    generated = model.generate(
        **inputs,
        max_new_tokens=int(max_new_tokens),
        do_sample=False,
        eos_token_id=processor.end_id,
        pad_token_id=processor.pad_id,
    )
    tokens = generated[:, inputs["input_ids"].shape[1] :]
    print(json.dumps({"caption": processor.decode(tokens)[0], "tokens": tokens[0].tolist()}))


if __name__ == "__main__":
    print_caption()
