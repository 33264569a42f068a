"""A toy processor whose prepared images are large, and which counts those that exist."""

import threading
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from m3diff.models.prepared import Prepared
from m3diff.records.sample import Turn

SET_BYTES = 1_000_000


class PreparedSets:
    """Prepares image sets and counts the bytes of those that exist.

    Attributes:
        sizes: sizes of the first image sets in bytes. All further ones have SET_BYTES.
        held_bytes: bytes of the image sets that exist now.
        peak_bytes: maximum of `held_bytes`.
        prepared: number of image sets that were prepared.
    """

    def __init__(self, sizes: Sequence[int] = ()) -> None:
        self.sizes = list(sizes)
        self.held_bytes = 0
        self.peak_bytes = 0
        self.prepared = 0
        self.lock = threading.Lock()

    def prepare(self, images: Iterable[Any]) -> Prepared:
        marks = ("",) * len(list(images))
        with self.lock:
            size = self.sizes[self.prepared] if self.prepared < len(self.sizes) else SET_BYTES
            self.prepared += 1
        array = np.zeros(size, np.uint8).view(CountedArray)
        array.sets = self
        self.change(size)
        return Prepared({"pixels": torch.from_numpy(array)}, marks)

    def change(self, nbytes: int) -> None:
        with self.lock:
            self.held_bytes += nbytes
            self.peak_bytes = max(self.peak_bytes, self.held_bytes)

    def marks(self, images: int) -> tuple[str, ...]:
        return ("",) * images

    def encode_prompt(self, turns: Sequence[Turn], marks: Sequence[str]) -> tuple[int, ...]:
        return (0,)


class CountedArray(np.ndarray):
    """The array of an image set. A tensor keeps the array that it was made from."""

    sets: PreparedSets

    def __del__(self) -> None:
        self.sets.change(-self.nbytes)
