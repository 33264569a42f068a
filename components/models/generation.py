"""Captions from pairs of images: batched greedy decoding with a checkpoint of M3Diff."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from components.models.m3diff.tuning import verify_manifest
from components.models.m3diff.modeling import M3DiffForConditionalGeneration
from components.models.m3diff.processing import M3DiffProcessor

if TYPE_CHECKING:
    from PIL import Image

    Pair = tuple[Image.Image, Image.Image]

QUESTION = "What has changed from the first image to the second?"
"""What is asked where nothing else is: the first question of the task `difference` in convert's templates."""


class Captioner:
    """A loaded checkpoint. Batches hold one question each, so that the company a pair keeps changes no caption."""

    def __init__(self, model: M3DiffForConditionalGeneration, processor: M3DiffProcessor, max_new_tokens: int) -> None:
        self.model, self.processor, self.max_new_tokens = model.eval(), processor, max_new_tokens

    @torch.inference_mode()
    def caption(self, pairs: Sequence[Pair], question: str = QUESTION) -> list[str]:
        """One caption per pair of images (before, after)."""
        inputs = self.processor(list(pairs), [question] * len(pairs))
        moved = {name: value.to(self.model.device) for name, value in inputs.items()}
        tokens = self.model.generate(
            **moved,
            max_new_tokens=self.max_new_tokens,
            do_sample=False,
            eos_token_id=self.processor.end_id,
            pad_token_id=self.processor.tokenizer.pad_token_id,
        )
        answers = tokens[:, inputs["input_ids"].shape[1] :]
        return [text.strip() for text in self.processor.tokenizer.batch_decode(answers, skip_special_tokens=True)]

    def attended(self, pairs: Sequence[Pair]) -> np.ndarray:
        """Where the model looks for the difference: [pairs, rows, columns] float16 over the patch grid, sums to 1."""
        images = [image for pair in pairs for image in pair]
        pixels = self.processor.image_processor.preprocess(images)["pixel_values"]
        return self.model.attended(pixels.to(self.model.device)).cpu().numpy().astype(np.float16)


def load_captioner(checkpoint: Path, max_new_tokens: int = 64) -> Captioner:
    """Load a checkpoint folder, on a GPU in bfloat16 where there is one.

    Raises:
        CheckpointError: the folder is incomplete or damaged; names the file.
    """
    verify_manifest(checkpoint)
    gpu = torch.cuda.is_available()
    device: Any = "cuda" if gpu else "cpu"  # PreTrainedModel.to is annotated as if it took a model
    model = M3DiffForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.bfloat16 if gpu else torch.float32)
    return Captioner(model.to(device), M3DiffProcessor.from_pretrained(checkpoint), max_new_tokens)
