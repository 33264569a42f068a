"""Captions from pairs of images: batched greedy decoding with a checkpoint of any family."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from components.models.checkpoint import load_model
from components.models.family import Family, PairProcessor

if TYPE_CHECKING:
    from components.models.family import ImagePair

QUESTION = "What has changed from the first image to the second?"
"""What is asked where nothing else is: the first question of the task `difference` in convert's templates."""


class Captioner:
    """A model that describes pairs of images; `model` is put into evaluation mode."""

    def __init__(self, model: Any, processor: PairProcessor, family: Family, max_new_tokens: int) -> None:
        self.model, self.processor, self.family = model.eval(), processor, family
        self.max_new_tokens = max_new_tokens

    @torch.inference_mode()
    def caption(self, pairs: Sequence[ImagePair], question: str = QUESTION) -> list[str]:
        """One caption per pair of images (before, after). One question, so no padding: no pair changes another's."""
        inputs = self._moved(self.processor(list(pairs), [question] * len(pairs)))
        tokens = self.model.generate(
            **inputs,
            max_new_tokens=self.max_new_tokens,
            do_sample=False,
            eos_token_id=self.processor.end_id,
            pad_token_id=self.processor.pad_id,
        )
        return self.processor.decode(tokens[:, inputs["input_ids"].shape[1] :])

    @torch.inference_mode()
    def saliency_map(self, pairs: Sequence[ImagePair]) -> np.ndarray:
        """Where the model looks for the difference: [pairs, rows, columns] float16 over the patch grid, sums to 1."""
        prepared = np.stack([self.processor.prepare_image(image) for pair in pairs for image in pair])
        found = self.family.saliency_map(self.model, self._moved(self.processor.image_inputs(prepared)))
        return found.cpu().numpy().astype(np.float16)

    def _moved(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: value.to(self.model.device) for name, value in inputs.items()}


def load_captioner(checkpoint: Path, max_new_tokens: int = 64) -> Captioner:
    """Load a checkpoint folder of any family, on a GPU in bfloat16 where there is one.

    Raises:
        CheckpointError: the folder is incomplete or damaged; names the file.
    """
    gpu = torch.cuda.is_available()
    model, family = load_model(checkpoint, torch.bfloat16 if gpu else torch.float32)
    device = "cuda" if gpu else "cpu"
    return Captioner(model.to(device), family.load_processor(checkpoint), family, max_new_tokens)
