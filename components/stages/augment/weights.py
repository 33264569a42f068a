"""Synthetic data by weights: InstructPix2Pix (Brooks et al., CVPR 2023), as diffusers has it and without a safety
checker; features that two images are compared by, and each image's nearest others by their cosine.

A base's own encoder gives the features of all places, joined. Their mean would not do: on MiniChange it calls any two
scenes alike (cosine of the nearest other scene 0.93 in the mean), joined they are not (0.58), and OneDiff's band of
0.75 to 0.94 holds what has changed. CLIP and SigLIP give the embedding that they were trained for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from m3diff.images.open import load_image
from m3diff.records.progress import progress
from m3diff.stages.augment.params import FeatureModel, InstructPix2Pix

if TYPE_CHECKING:
    from torch import Tensor

    from m3diff.models.device import Device

    Embed = Callable[[list[Image.Image]], Tensor]

Matrix = NDArray[np.float32]  # [images, width], rows of length 1

BATCH = 32
BLOCK = 1024  # images whose similarities to all others are held at once, at most
CELLS = 2**25  # similarities that are held at once, of 12 bytes each
MULTIPLE = 8  # of the sides that a latent diffusion model takes, in pixels


class Features:
    """The features of a model in a folder. `identity` is the digest of what decides them.

    Raises:
        ParamsError: the model is not there or another one.
    """

    def __init__(self, cfg: FeatureModel, device: Device) -> None:
        self.cfg, self.device, self.identity = cfg, device, cfg.identity()

    def features(self, images: Sequence[Path]) -> Matrix:
        """[images, width], float32, rows of length 1.

        Raises:
            ImageError: an image cannot be read.
            OSError, ValueError: transformers finds no model of the kind in the folder.
        """
        import torch

        embed = EMBEDDERS[self.cfg.kind](str(self.cfg.model), self.device)
        found = np.empty((0, 0), np.float32)
        starts = range(0, len(images), BATCH)
        for start in progress(starts, "augment: features", len(starts), "batch"):
            with torch.inference_mode():
                batch = embed([load_image(path) for path in images[start : start + BATCH]]).flatten(1).float()
            if start == 0:
                found = np.empty((len(images), batch.shape[1]), np.float32)
            found[start : start + BATCH] = torch.nn.functional.normalize(batch, dim=1).cpu().numpy()
        return found


def _encoder(folder: str, device: Device) -> Embed:
    """[images, places, width] of the layer that the base's LLM is shown."""
    from transformers import LlavaOnevisionForConditionalGeneration

    from m3diff.models.processing import M3DiffImageProcessor

    processor = M3DiffImageProcessor.from_pretrained(folder)
    model = LlavaOnevisionForConditionalGeneration.from_pretrained(
        folder, dtype=device.dtype, local_files_only=True, use_safetensors=True
    )
    layer: Any = model.config.vision_feature_layer
    encoder: Any = model.model.vision_tower.to(device.torch).eval()

    def embed(images: list[Image.Image]) -> Tensor:
        pixels = processor.preprocess(images)["pixel_values"].to(device.torch, device.dtype)
        return encoder(pixels, output_hidden_states=True).hidden_states[layer]

    return embed


def _clip(folder: str, device: Device) -> Embed:
    """[images, width] of the space that images and texts share."""
    from transformers import AutoImageProcessor, AutoModelForZeroShotImageClassification

    processor: Any = AutoImageProcessor.from_pretrained(folder, local_files_only=True)
    loaded: Any = AutoModelForZeroShotImageClassification.from_pretrained(
        folder, dtype=device.dtype, local_files_only=True, use_safetensors=True
    )
    model = loaded.to(device.torch).eval()

    def embed(images: list[Image.Image]) -> Tensor:
        pixels = processor(images=images, return_tensors="pt")["pixel_values"]
        found = model.get_image_features(pixel_values=pixels.to(device.torch, device.dtype))
        return getattr(found, "pooler_output", found)

    return embed


# Kind of features -> (folder, device) -> the model's function from images to their features, flattened afterwards
EMBEDDERS = {"encoder": _encoder, "clip": _clip}


def nearest(features: Matrix, count: int) -> tuple[Matrix, NDArray[np.int64]]:
    """Each row's most similar others: cosines and row numbers, both [images, count or one less than there are], the
    most similar first. Equal settings and features give the same."""
    count = min(count, len(features) - 1)
    if count < 1:
        return np.empty((len(features), 0), np.float32), np.empty((len(features), 0), np.int64)
    similarities, numbers = [], []
    size = min(BLOCK, max(1, CELLS // len(features)))
    for start in range(0, len(features), size):
        block = features[start : start + size]
        negative = -block @ features.T  # the nearest have the least, so that no copy of all is made
        rows = np.arange(len(block))
        negative[rows, rows + start] = np.inf
        best = np.argpartition(negative, count - 1, axis=1)[:, :count]
        found = np.take_along_axis(negative, best, axis=1)
        order = np.lexsort((best, found), axis=1)
        similarities.append(-np.take_along_axis(found, order, axis=1))
        numbers.append(np.take_along_axis(best, order, axis=1))
    return np.concatenate(similarities), np.concatenate(numbers)


class Pix2PixEditor:
    """Each edit has a random state of its own: the same seed gives the same edit, whatever was edited before."""

    def __init__(self, cfg: InstructPix2Pix, device: Device) -> None:
        self.cfg, self.identity, self.device = cfg, cfg.identity(), device

    def edit(self, image: Path, instruction: str, seed: int) -> Image.Image | None:
        import torch

        original = load_image(image)
        made = self.pipeline(
            instruction,
            image=original.resize(fitted(original.size, self.cfg.image_px), Image.Resampling.LANCZOS),
            num_inference_steps=self.cfg.steps,
            guidance_scale=self.cfg.guidance,
            image_guidance_scale=self.cfg.image_guidance,
            generator=torch.Generator("cpu").manual_seed(seed),  # the same numbers on every device
        )
        return made.images[0].convert("RGB").resize(original.size, Image.Resampling.BICUBIC)

    @cached_property
    def pipeline(self) -> Any:
        """It is loaded for the first edit, since a run that goes on may have none to make."""
        import torch
        from diffusers import StableDiffusionInstructPix2PixPipeline

        pipeline = StableDiffusionInstructPix2PixPipeline.from_pretrained(
            str(self.cfg.model),
            torch_dtype=torch.float16 if self.device.gpu else torch.float32,
            local_files_only=True,
            use_safetensors=True,
            safety_checker=None,
            requires_safety_checker=False,
        ).to(self.device.torch)
        pipeline.set_progress_bar_config(disable=True)
        return pipeline


def fitted(size: tuple[int, int], longer: int) -> tuple[int, int]:
    """Width and height with the longer side as given, both multiples of 8 and nearest to the shape."""
    scale = longer / max(size)
    width, height = (max(MULTIPLE, round(side * scale / MULTIPLE) * MULTIPLE) for side in size)
    return width, height
