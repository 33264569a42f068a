"""Models for synthetic data: the editor InstructPix2Pix, and models whose features are used to find similar images.

InstructPix2Pix (Brooks et al., CVPR 2023) runs in diffusers' pipeline, without a safety checker.

For a base model's vision encoder, the features of an image are the concatenated features of all patches. The mean over
all patches does not work: on MiniChange, the average cosine similarity to the nearest other scene is then 0.93, so any
two scenes look alike. With concatenated features, this average is 0.58, and images with a similarity in OneDiff's band
of 0.75 to 0.94 show changed scenes. For CLIP and SigLIP, the features are the image embedding that the model was
trained for.
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
from m3diff.models.foreign_code import refuse_foreign_code
from m3diff.records.progress import progress
from m3diff.stages.augment.params import FeatureModel, InstructPix2Pix

if TYPE_CHECKING:
    from torch import Tensor

    from m3diff.models.device import Device

    Embed = Callable[[list[Image.Image]], Tensor]

FeatureMatrix = NDArray[np.float32]  # [images, width], rows of length 1

BATCH = 32
MAX_BLOCK_ROWS = 1024  # maximum number of images that are compared with all others at once
MAX_BLOCK_CELLS = 2**25  # maximum number of similarities in memory at once; each takes 12 bytes
SIDE_MULTIPLE_PX = 8  # a latent diffusion model requires sides that are a multiple of this


class Features:
    """Computes image features with a model on disk. `identity` is the digest of the model's folder.

    Raises:
        ParamsError: the folder does not contain a model, or its digest differs from `sha256` in the settings.
    """

    def __init__(self, cfg: FeatureModel, device: Device) -> None:
        self.cfg = cfg
        self.device = device
        self.identity = cfg.identity()

    def features(self, images: Sequence[Path]) -> FeatureMatrix:
        """Return the features of images as float32 [images, width], with rows of length 1.

        Raises:
            ForeignCodeError: the folder refers to code, a pickle or files outside the folder.
            ImageError: an image cannot be read.
            OSError, ValueError: the folder does not contain a model of this kind that transformers can load.
        """
        import torch

        refuse_foreign_code(Path(self.cfg.model))
        embed = EMBEDDERS[self.cfg.kind](str(self.cfg.model), self.device)
        all_features = np.empty((0, 0), np.float32)
        starts = range(0, len(images), BATCH)
        for start in progress(starts, "augment: features", len(starts), "batch"):
            batch_images = [load_image(path) for path in images[start : start + BATCH]]
            with torch.inference_mode():
                batch = embed(batch_images).flatten(1).float()
            if start == 0:
                all_features = np.empty((len(images), batch.shape[1]), np.float32)
            all_features[start : start + BATCH] = torch.nn.functional.normalize(batch, dim=1).cpu().numpy()
        return all_features


def _load_encoder(folder: str, device: Device) -> Embed:
    """Load a base model and return a function that computes patch features with its vision encoder.

    The function returns [images, patches, width]. The features come from the encoder layer that the base model's LLM
    reads.
    """
    from transformers import LlavaOnevisionForConditionalGeneration

    from m3diff.models.processing import M3DiffImageProcessor

    processor = M3DiffImageProcessor.from_pretrained(folder, trust_remote_code=False)
    model = LlavaOnevisionForConditionalGeneration.from_pretrained(
        folder, dtype=device.dtype, local_files_only=True, use_safetensors=True, trust_remote_code=False
    )
    layer: Any = model.config.vision_feature_layer
    encoder: Any = model.model.vision_tower.to(device.torch).eval()

    def embed(images: list[Image.Image]) -> Tensor:
        pixels = processor.preprocess(images)["pixel_values"].to(device.torch, device.dtype)
        return encoder(pixels, output_hidden_states=True).hidden_states[layer]

    return embed


def _load_clip(folder: str, device: Device) -> Embed:
    """Load a CLIP or SigLIP model and return a function that computes image embeddings, [images, width]."""
    from transformers import AutoImageProcessor, AutoModelForZeroShotImageClassification

    processor: Any = AutoImageProcessor.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    loaded: Any = AutoModelForZeroShotImageClassification.from_pretrained(
        folder, dtype=device.dtype, local_files_only=True, use_safetensors=True, trust_remote_code=False
    )
    model = loaded.to(device.torch).eval()

    def embed(images: list[Image.Image]) -> Tensor:
        pixels = processor(images=images, return_tensors="pt")["pixel_values"]
        output = model.get_image_features(pixel_values=pixels.to(device.torch, device.dtype))
        return getattr(output, "pooler_output", output)  # CLIP and SigLIP return different types

    return embed


# Kind of features -> function that loads a model from a folder to a device, and returns a function that embeds images
EMBEDDERS = {"encoder": _load_encoder, "clip": _load_clip}


def find_nearest(features: FeatureMatrix, count: int) -> tuple[FeatureMatrix, NDArray[np.int64]]:
    """For each row, find the most similar other rows. Return their cosine similarities and row numbers.

    Both arrays are [rows, count], or [rows, rows - 1] if there are fewer rows. The most similar row comes first. Equal
    features give equal results.
    """
    count = min(count, len(features) - 1)
    if count < 1:
        return np.empty((len(features), 0), np.float32), np.empty((len(features), 0), np.int64)
    all_similarities = []
    all_numbers = []
    block_rows = min(MAX_BLOCK_ROWS, max(1, MAX_BLOCK_CELLS // len(features)))
    for start in range(0, len(features), block_rows):
        block = features[start : start + block_rows]
        # The block is negated before the product, because argpartition finds the smallest values, and a negated copy of
        # the product would double the memory
        distances = -block @ features.T
        rows = np.arange(len(block))
        distances[rows, rows + start] = np.inf  # exclude the row itself
        nearest_numbers = np.argpartition(distances, count - 1, axis=1)[:, :count]
        nearest_distances = np.take_along_axis(distances, nearest_numbers, axis=1)
        order = np.lexsort((nearest_numbers, nearest_distances), axis=1)
        all_similarities.append(-np.take_along_axis(nearest_distances, order, axis=1))
        all_numbers.append(np.take_along_axis(nearest_numbers, order, axis=1))
    return np.concatenate(all_similarities), np.concatenate(all_numbers)


class Pix2PixEditor:
    """Edits images with InstructPix2Pix. The same seed gives the same edit, regardless of earlier edits."""

    def __init__(self, cfg: InstructPix2Pix, device: Device) -> None:
        self.cfg = cfg
        self.identity = cfg.identity()
        self.device = device

    def edit(self, image: Path, instruction: str, seed: int) -> Image.Image | None:
        """Return the edited image in RGB, scaled to the size of the original."""
        import torch

        original = load_image(image)
        size = size_for_editor(original.size, self.cfg.image_px)
        output = self.pipeline(
            instruction,
            image=original.resize(size, Image.Resampling.LANCZOS),
            num_inference_steps=self.cfg.steps,
            guidance_scale=self.cfg.guidance,
            image_guidance_scale=self.cfg.image_guidance,
            generator=torch.Generator("cpu").manual_seed(seed),  # gives the same random numbers on every device
        )
        edited_image = output.images[0].convert("RGB")
        return edited_image.resize(original.size, Image.Resampling.BICUBIC)

    @cached_property
    def pipeline(self) -> Any:
        """The loaded pipeline of diffusers. It is loaded by the first edit, because a resumed run may not need it."""
        import torch
        from diffusers import StableDiffusionInstructPix2PixPipeline

        refuse_foreign_code(Path(self.cfg.model))
        pipeline = StableDiffusionInstructPix2PixPipeline.from_pretrained(
            str(self.cfg.model),
            trust_remote_code=False,
            torch_dtype=torch.float16 if self.device.gpu else torch.float32,
            local_files_only=True,
            use_safetensors=True,
            safety_checker=None,
            requires_safety_checker=False,
        ).to(self.device.torch)
        pipeline.set_progress_bar_config(disable=True)
        return pipeline


def size_for_editor(size: tuple[int, int], longest_px: int) -> tuple[int, int]:
    """Return a width and height whose longer side is about `longest_px`, rounded to multiples of SIDE_MULTIPLE_PX."""
    scale = longest_px / max(size)
    multiples = [max(1, round(side * scale / SIDE_MULTIPLE_PX)) for side in size]
    return multiples[0] * SIDE_MULTIPLE_PX, multiples[1] * SIDE_MULTIPLE_PX
