"""Features that two images are compared by, and each image's nearest others by their cosine. New features have their
settings in `params.py` and a line in `load_features`.

A base's own encoder gives the features of all places, joined. Their mean would not do: on MiniChange it calls any two
scenes alike (cosine of the nearest other scene 0.93 in the mean), joined they are not (0.58), and OneDiff's band of
0.75 to 0.94 holds what has changed. CLIP and SigLIP give the embedding that they were trained for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

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

Matrix = NDArray[np.float32]
"""[images, width], rows of length 1."""

BATCH = 32
GIB = 2**30
BLOCK = 1024  # images whose similarities to all others are held at once, at most
CELLS = 2**25  # similarities that are held at once, of 12 bytes each
PROBED = 0.1  # share of FAISS's cells that are searched


class Features(Protocol):
    @property
    def identity(self) -> str:
        """Digest of what decides the features."""

    def features(self, images: Sequence[Path]) -> Matrix:
        """[images, width], float32, rows of length 1.

        Raises:
            ImageError: an image cannot be read.
            ParamsError: the memory would not hold them.
        """


def load_features(cfg: Encoder | Clip, device: Device) -> Features:
    """Raises ParamsError where its model is not there or another one."""
    return EncoderFeatures(cfg, device) if isinstance(cfg, Encoder) else ClipFeatures(cfg, device)


class EncoderFeatures:
    def __init__(self, cfg: Encoder, device: Device) -> None:
        self.folder, self.device, self.identity = str(cfg.model), device, cfg.identity()

    def features(self, images: Sequence[Path]) -> Matrix:
        from transformers import LlavaOnevisionForConditionalGeneration

        from m3diff.models.processing import M3DiffImageProcessor

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
        self.folder, self.device, self.identity = str(cfg.model), device, cfg.identity()

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


def _in_batches(images: Sequence[Path], embed: Callable[[list[Image.Image]], Tensor]) -> Matrix:
    """The features of all images by `embed`, each flattened and of length 1.

    Raises:
        ParamsError: the memory would not hold them, as is known after the first batch.
    """
    import torch

    found: Matrix | None = None
    starts = range(0, len(images), BATCH)
    for start in progress(starts, "augment: features", len(starts), "batch"):
        with torch.inference_mode():
            batch = embed([load_image(path) for path in images[start : start + BATCH]]).flatten(1).float()
        if found is None:
            width = batch.shape[1]
            needed, room = len(images) * width * 4, psutil.virtual_memory().available
            if needed > room:
                raise ParamsError(
                    f"augment: features: {len(images):,} images of a split, {width:,} numbers each, are "
                    f"{needed / GIB:.1f} GiB, and {room / GIB:.1f} GiB of memory are free; write kind: clip, whose "
                    "features are short, or make of fewer images (source.splits), or free memory"
                )
            found = np.empty((len(images), width), np.float32)
        found[start : start + BATCH] = torch.nn.functional.normalize(batch, dim=1).cpu().numpy()
    assert found is not None, "features of no image"
    return found


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
