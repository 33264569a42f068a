"""Features that two images are compared by, and each image's nearest others by their cosine. New features have their
settings in `params.py` and a line in `EMBEDDERS`.

A base's own encoder gives the features of all places, joined. Their mean would not do: on MiniChange it calls any two
scenes alike (cosine of the nearest other scene 0.93 in the mean), joined they are not (0.58), and OneDiff's band of
0.75 to 0.94 holds what has changed. CLIP and SigLIP give the embedding that they were trained for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import psutil
from numpy.typing import NDArray

from m3diff.images.open import load_image
from m3diff.records.progress import progress
from m3diff.settings.section import ParamsError
from m3diff.stages.augment.params import Clip, Encoder

if TYPE_CHECKING:
    from PIL import Image
    from torch import Tensor

    from m3diff.models.device import Device

    Embed = Callable[[list[Image.Image]], Tensor]

Matrix = NDArray[np.float32]
"""[images, width], rows of length 1."""

BATCH = 32
GIB = 2**30
BLOCK = 1024  # images whose similarities to all others are held at once, at most
CELLS = 2**25  # similarities that are held at once, of 12 bytes each
PROBED = 0.1  # share of FAISS's cells that are searched


class Features:
    """The features of a model in a folder. `identity` is the digest of what decides them.

    Raises:
        ParamsError: the model is not there or another one.
    """

    def __init__(self, cfg: Encoder | Clip, device: Device) -> None:
        self.cfg, self.device, self.identity = cfg, device, cfg.identity()

    def features(self, images: Sequence[Path]) -> Matrix:
        """[images, width], float32, rows of length 1.

        Raises:
            ImageError: an image cannot be read.
            ParamsError: the memory would not hold them, as is known after the first batch; or the model is of another
                kind.
        """
        import torch

        embed = EMBEDDERS[self.cfg.kind](str(self.cfg.model), self.device)
        found = np.empty((0, 0), np.float32)
        starts = range(0, len(images), BATCH)
        for start in progress(starts, "augment: features", len(starts), "batch"):
            with torch.inference_mode():
                batch = embed([load_image(path) for path in images[start : start + BATCH]]).flatten(1).float()
            if start == 0:
                found = _empty(len(images), batch.shape[1])
            found[start : start + BATCH] = torch.nn.functional.normalize(batch, dim=1).cpu().numpy()
        return found


def _empty(images: int, width: int) -> Matrix:
    """Raises ParamsError where the memory would not hold them."""
    needed, room = images * width * 4, psutil.virtual_memory().available
    if needed > room:
        raise ParamsError(
            f"augment: features: {images:,} images of a split, {width:,} numbers each, are {needed / GIB:.1f} GiB, and "
            f"{room / GIB:.1f} GiB of memory are free; write kind: clip, whose features are short, or make of fewer "
            "images (source.splits), or free memory"
        )
    return np.empty((images, width), np.float32)


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

    try:
        processor: Any = AutoImageProcessor.from_pretrained(folder, local_files_only=True)
        loaded: Any = AutoModelForZeroShotImageClassification.from_pretrained(
            folder, dtype=device.dtype, local_files_only=True, use_safetensors=True
        )
    except (OSError, ValueError) as error:
        why = str(error).partition("\n")[0]
        raise ParamsError(
            f"{folder}: is no CLIP or SigLIP of transformers with its weights as safetensors ({why}); name one, or "
            "take `kind: encoder` for a LLaVA-OneVision"
        ) from error
    model = loaded.to(device.torch).eval()

    def embed(images: list[Image.Image]) -> Tensor:
        pixels = processor(images=images, return_tensors="pt")["pixel_values"]
        found = model.get_image_features(pixel_values=pixels.to(device.torch, device.dtype))
        return getattr(found, "pooler_output", found)

    return embed


EMBEDDERS = {"encoder": _encoder, "clip": _clip}
"""Kind of features -> (folder, device) -> the model's function from images to their features, flattened afterwards."""


def nearest(features: Matrix, count: int, search: Literal["exact", "faiss"]) -> tuple[Matrix, NDArray[np.int64]]:
    """Each row's most similar others: cosines and row numbers, both [images, count or one less than there are], the
    most similar first. Equal settings and features give the same."""
    count = min(count, len(features) - 1)
    if count < 1:
        return np.empty((len(features), 0), np.float32), np.empty((len(features), 0), np.int64)
    return _faiss(features, count) if search == "faiss" else _exact(features, count)


def _exact(features: Matrix, count: int) -> tuple[Matrix, NDArray[np.int64]]:
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


def _faiss(features: Matrix, count: int) -> tuple[Matrix, NDArray[np.int64]]:
    """By an inverted file: cells of like images, the nearest tenth of which is searched. It may miss neighbours, and
    then gives farther ones."""
    import faiss

    cells = max(1, int(len(features) ** 0.5))
    index: Any = faiss.index_factory(features.shape[1], f"IVF{cells},Flat", faiss.METRIC_INNER_PRODUCT)
    index.train(features)
    index.add(features)
    index.nprobe = max(1, round(cells * PROBED))
    similarities, numbers = index.search(features, count + 1)
    others = numbers != np.arange(len(features))[:, None]
    others[others.all(axis=1), -1] = False  # where a row did not find itself, the farthest goes
    shape = (len(features), count)
    return similarities[others].reshape(shape), numbers[others].reshape(shape)
