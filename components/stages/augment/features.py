"""What two images are compared by.

A base's own encoder gives the features of all places, joined. Their mean would not do: on MiniChange it calls any two
scenes alike (cosine of the nearest other scene 0.93 in the mean), joined they are not (0.58), and OneDiff's band of
0.75 to 0.94 holds what has changed. CLIP and SigLIP give the embedding that they were trained for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil

from m3diff.images.open import load_image
from m3diff.records.progress import progress
from m3diff.settings.section import ParamsError
from m3diff.stages.augment.params import Clip, Encoder
from m3diff.stages.augment.search import Matrix
from m3diff.stages.augment.weights import identity

if TYPE_CHECKING:
    from PIL import Image
    from torch import Tensor

    from m3diff.models.device import Device

BATCH = 32
GIB = 2**30


def _in_batches(images: Sequence[Path], embed: Callable[[list[Image.Image]], Tensor]) -> Matrix:
    """What `embed` makes of all images, each flattened and of length 1."""
    import torch

    found: Matrix | None = None
    starts = range(0, len(images), BATCH)
    for start in progress(starts, "augment: features", len(starts), "batch"):
        with torch.inference_mode():
            batch = embed([load_image(path) for path in images[start : start + BATCH]]).flatten(1).float()
        if found is None:
            found = _room(len(images), batch.shape[1])
        found[start : start + BATCH] = torch.nn.functional.normalize(batch, dim=1).cpu().numpy()
    assert found is not None, "of no image nobody asks for features"
    return found


def _room(images: int, width: int) -> Matrix:
    """An empty matrix. Raises ParamsError where the memory would not hold it, as is known of the first batch."""
    needed, free = images * width * 4, psutil.virtual_memory().available
    if needed > free:
        raise ParamsError(
            f"augment: features: {images:,} images of a split, {width:,} numbers each, are {needed / GIB:.1f} GiB, and "
            f"{free / GIB:.1f} GiB of memory are free; write kind: clip, whose features are short, or make of fewer "
            "images (source.splits), or free memory"
        )
    return np.empty((images, width), np.float32)


class EncoderFeatures:
    def __init__(self, cfg: Encoder, device: Device) -> None:
        self.folder, self.device, self.identity = str(cfg.model), device, identity(cfg)

    def features(self, images: Sequence[Path]) -> Matrix:
        from transformers import LlavaOnevisionForConditionalGeneration

        from m3diff.models.m3diff.processing import M3DiffImageProcessor

        processor = M3DiffImageProcessor.from_pretrained(self.folder)
        model = LlavaOnevisionForConditionalGeneration.from_pretrained(
            self.folder, dtype=self.device.dtype, local_files_only=True, use_safetensors=True
        )
        layer: Any = model.config.vision_feature_layer
        encoder: Any = model.model.vision_tower.to(self.device.torch).eval()

        def embed(images: list[Image.Image]) -> Tensor:
            """[images, places, width] of the layer that the base's LLM is shown."""
            pixels = processor.preprocess(images)["pixel_values"].to(self.device.torch, self.device.dtype)
            return encoder(pixels, output_hidden_states=True).hidden_states[layer]

        return _in_batches(images, embed)


class ClipFeatures:
    def __init__(self, cfg: Clip, device: Device) -> None:
        self.folder, self.device, self.identity = str(cfg.model), device, identity(cfg)

    def features(self, images: Sequence[Path]) -> Matrix:
        from transformers import AutoImageProcessor, AutoModelForZeroShotImageClassification

        try:
            processor: Any = AutoImageProcessor.from_pretrained(self.folder, local_files_only=True)
            loaded: Any = AutoModelForZeroShotImageClassification.from_pretrained(
                self.folder, dtype=self.device.dtype, local_files_only=True, use_safetensors=True
            )
        except (OSError, ValueError) as error:
            why = str(error).partition("\n")[0]
            raise ParamsError(
                f"{self.folder}: is no CLIP or SigLIP of transformers with its weights as safetensors ({why}); name "
                "one, or take `kind: encoder` for a LLaVA-OneVision"
            ) from error
        model = loaded.to(self.device.torch).eval()

        def embed(images: list[Image.Image]) -> Tensor:
            """[images, width] of the space that images and texts share."""
            pixels = processor(images=images, return_tensors="pt")["pixel_values"]
            found = model.get_image_features(pixel_values=pixels.to(self.device.torch, self.device.dtype))
            return getattr(found, "pooler_output", found)

        return _in_batches(images, embed)
