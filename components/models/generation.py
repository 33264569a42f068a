"""Captions from pairs of images: batched greedy decoding with a checkpoint of any family."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from m3diff.models.checkpoint import load_model, loading
from m3diff.models.device import Device
from m3diff.models.family import Family
from m3diff.models.processing import PairProcessor

if TYPE_CHECKING:
    from m3diff.models.family import ImagePair

# What is asked where nothing else is: the first question of the task `difference` in convert's templates
QUESTION = "What has changed from the first image to the second?"


class Captioner:
    """A model that describes pairs of images; `model` is put into evaluation mode."""

    def __init__(self, model: Any, processor: PairProcessor, family: Family, max_new_tokens: int) -> None:
        self.model, self.processor, self.family = model.eval(), processor, family
        self.max_new_tokens = max_new_tokens

    def caption(self, pairs: Sequence[ImagePair], question: str = QUESTION) -> list[str]:
        """A caption for each pair of images (before, after). One question, so no padding: no pair changes another's."""
        captions, _ = self.answer([self.processor.prepare_image(image) for pair in pairs for image in pair], question)
        return captions

    @torch.inference_mode()
    def answer(
        self, images: Sequence[np.ndarray], question: str = QUESTION, saliency: bool = False
    ) -> tuple[list[str], np.ndarray | None]:
        """The captions of pairs of prepared images, and where the model looks for their differences; the images are
        encoded once for both.

        Args:
            images: as the processor's `prepare_image` gives them: before, after, before, after, ...
            saliency: whether to give the maps.
        Returns: one caption per pair; the maps, [pairs, rows, columns] float16 over the patch grid, each with sum 1, or
            None where they are not asked for.
        """
        device = self.model.device
        prompts = self.processor.prompt_inputs([question] * (len(images) // 2))
        inputs = {name: value.to(device) for name, value in prompts.items()}
        inputs |= self.processor.image_inputs(torch.from_numpy(np.stack(images)).to(device))
        decoding = {
            "max_new_tokens": self.max_new_tokens,
            "do_sample": False,
            "eos_token_id": self.processor.end_id,
            "pad_token_id": self.processor.pad_id,
        }
        with self.model.recorded_maps() if saliency else nullcontext() as maps:
            tokens = self.model.generate(**inputs, **decoding)
        captions = self.processor.decode(tokens[:, inputs["input_ids"].shape[1] :])
        if maps is None:
            return captions, None
        # numpy knows no bfloat16
        return captions, self.model.mean_map(maps, len(tokens)).float().cpu().numpy().astype(np.float16)


def load_captioner(
    checkpoint: Path, max_new_tokens: int = 64, device: Device | None = None, base: Path | None = None
) -> Captioner:
    """Load a checkpoint, or a folder of adapters, of any family.

    Args:
        device: where it computes; by default a GPU in bfloat16 where there is one, else the CPU in float32.
        base: where the base of adapters is; by default where their manifest says.

    Raises:
        CheckpointError: the folder is incomplete or damaged, or the base is not there or another; names the file.
        DeviceError: a GPU is asked for and there is none.
    """
    if device is None:
        device = Device(gpu=True, precision="bf16") if torch.cuda.is_available() else Device(False, "fp32")
    model, family = load_model(checkpoint, device.dtype, base)
    with loading(checkpoint):
        processor = family.load_processor(checkpoint, model.config)
    return Captioner(model.to(device.torch), processor, family, max_new_tokens)
