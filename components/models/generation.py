"""Captions from pairs of images: batched greedy decoding with a checkpoint of any family."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from components.device import Device
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
        inputs = self.processor.image_inputs(torch.from_numpy(prepared))
        found = self.family.saliency_map(self.model, self._moved(inputs))
        return found.float().cpu().numpy().astype(np.float16)  # numpy knows no bfloat16

    def _moved(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: value.to(self.model.device) for name, value in inputs.items()}


def load_captioner(checkpoint: Path, max_new_tokens: int = 64, device: Device | None = None) -> Captioner:
    """Load a checkpoint folder of any family.

    Args:
        device: where it computes; by default a GPU in bfloat16 where there is one, else the CPU in float32.

    Raises:
        CheckpointError: the folder is incomplete or damaged; names the file.
        DeviceError: a GPU is asked for and there is none.
    """
    if device is None:
        device = Device(gpu=True, precision="bf16") if torch.cuda.is_available() else Device(False, "fp32")
    model, family = load_model(checkpoint, device.dtype)
    return Captioner(model.to(device.torch), family.load_processor(checkpoint), family, max_new_tokens)
