"""Create checkpoints of the family `auto` on tiny bases, as training writes them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers.utils import is_num2words_available, is_torchvision_available

from m3diff.models import FAMILIES
from m3diff.models.checkpoint import folder_sha256, save_checkpoint
from m3diff.models.processing import pad_prompts
from m3diff.records.sample import Turn
from tests.auto_cases import auto_settings
from tests.tiny import tiny_trained
from tests.tiny_vlm import BASES, tiny_vlm

FAMILY = FAMILIES["auto"]
QUESTION = "What has changed from the first image to the second?"
# All samples that a tiny model of these tests can be asked about
ALL_SAMPLES = {"question": QUESTION, "images": [0, 1, 2], "turns": 2, "own_questions": True}


def loadable_bases() -> list[str]:
    """Return the bases whose processor can be loaded with the installed packages."""
    missing = set()
    if not is_torchvision_available():
        missing.add("lfm2_vl")
    if not is_num2words_available():
        missing.add("smolvlm")
    return [name for name in BASES if name not in missing]


def auto_checkpoint(name: str, folder: Path, trained_on: Mapping[str, Any] = ALL_SAMPLES) -> Path:
    """Write a base to `folder/base` and a checkpoint on it to `folder/model/checkpoint`, and return the checkpoint."""
    base = tiny_vlm(name, folder / "base")
    settings = auto_settings(name)
    processor = FAMILY.load_processor(base, settings=settings)
    model = tiny_trained(base, settings)
    checkpoint = folder / "model" / "checkpoint"
    digest = folder_sha256(base)
    save_checkpoint(
        model, processor, checkpoint, family="auto", base=base, base_sha256=digest, trained_on=dict(trained_on)
    )
    return checkpoint


def generated_tokens(
    model: Any,
    processor: Any,
    image_sets: Sequence[Sequence[Image.Image]],
    dialogues: Sequence[Sequence[Turn]],
    **decoding: Any,
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return the inputs of samples with prompts of one length, and the tokens that a model generates.

    Args:
        model: the model.
        processor: its processor.
        image_sets: the images of each sample.
        dialogues: the turns of each sample, of which the last asks the question.
        decoding: arguments of `generate`.
    """
    prepared = [processor.prepare(images) for images in image_sets]
    prompts = []
    for images, turns in zip(prepared, dialogues, strict=True):
        prompts.append(processor.encode_prompt(turns, images.marks))
    inputs = pad_prompts(prompts, processor.pad_id)
    inputs |= processor.token_types(inputs["input_ids"])
    inputs |= processor.image_inputs(processor.collate(prepared), torch.device("cpu"))
    end_tokens = {"eos_token_id": processor.end_id, "pad_token_id": processor.pad_id}
    with torch.inference_mode():
        tokens = model.generate(**inputs, do_sample=False, **end_tokens, **decoding)
    return inputs, tokens[:, inputs["input_ids"].shape[1] :]
