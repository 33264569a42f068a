"""Samples to micro-batches: which reference trains when, packed how; decoded and tokenised ahead of the step.

The schedule follows from the seed alone, so a run that resumes at step n sees what an undisturbed one would, and any
number of workers or micro-batches sees the same global batches. Each reference comes once per epoch.
"""

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow.parquet as pq
import torch
from torch import Tensor

from components.models.images import ImageError, load_image
from components.records import DataError
from components.train.packing import Packed, pack

if TYPE_CHECKING:
    from PIL import Image

    from components.models.family import PairProcessor

CACHED_BYTES = 1 << 30
PREFETCHED = 4  # micro-batches decoded ahead
COLUMNS = ("pair", "dataset", "before", "after", "before_sha256", "after_sha256", "question", "reference")

Weighted = tuple[np.ndarray, int]
"""A sequence (row numbers of one pair) and its weight: 0 only fills up a batch."""


@dataclass(frozen=True)
class Samples:
    """The columns of a split that training reads (components/records.py); rows of one pair are neighbours."""

    pair: list[str]
    dataset: list[str]
    before: list[str]
    after: list[str]
    before_sha256: list[bytes]
    after_sha256: list[bytes]
    question: list[str]
    reference: list[str]

    def __len__(self) -> int:
        return len(self.pair)

    def pairs(self) -> list[np.ndarray]:
        """Row numbers of each pair, in order of appearance."""
        if not len(self):
            return []
        starts = [row for row in range(len(self)) if row == 0 or self.pair[row] != self.pair[row - 1]]
        return np.split(np.arange(len(self)), starts[1:])

    def images(self, row: int) -> tuple[tuple[str, bytes], tuple[str, bytes]]:
        """Path and digest of the image before and of the image after."""
        return (self.before[row], self.before_sha256[row]), (self.after[row], self.after_sha256[row])


def read_samples(folder: Path) -> Samples:
    """The samples of a split: every Parquet file of its folder, in the order of their names."""
    tables = [pq.read_table(file, columns=list(COLUMNS)) for file in sorted(folder.glob("*.parquet"))]
    return Samples(**{name: [value for t in tables for value in t[name].to_pylist()] for name in COLUMNS})


def read_training_samples(mixture: Path) -> Samples:
    """The training split.

    Raises:
        DataError: it has no sample.
    """
    samples = read_samples(mixture / "train")
    if not len(samples):
        raise DataError(f"{mixture / 'train'}: no sample of split 'train'; run `m3diff convert` and read its report")
    return samples


def plan_epoch(samples: Samples, max_captions: int | None, seed: int, epoch: int) -> list[np.ndarray]:
    """The sequences of one epoch in training order, each up to `max_captions` row numbers of one pair (None: all)."""
    rng = np.random.default_rng([seed, epoch])
    size = max_captions or len(samples)
    sequences: list[np.ndarray] = []
    for rows in samples.pairs():
        mixed = rng.permutation(rows)
        sequences += [mixed[start : start + size] for start in range(0, len(mixed), size)]
    return [sequences[number] for number in rng.permutation(len(sequences))]


@dataclass(frozen=True)
class Schedule:
    """Steps of a run: `global_batch` sequences a step, dealt to `ranks` workers in micro-batches."""

    samples: Samples
    max_captions: int | None
    seed: int
    global_batch: int
    micro_batch: int
    epochs: float
    ranks: int = 1

    @property
    def steps_per_epoch(self) -> int:
        return math.ceil(len(self.epoch(0)) / self.global_batch)

    @property
    def steps(self) -> int:
        return math.ceil(self.epochs * self.steps_per_epoch)

    def epoch(self, epoch: int) -> list[np.ndarray]:
        """Its sequences in training order."""
        return _planned(self, epoch)

    def global_sequences(self, step: int) -> list[np.ndarray]:
        """The sequences of one step over all workers; the last step of an epoch has fewer than `global_batch`."""
        epoch, batch = divmod(step, self.steps_per_epoch)
        return self.epoch(epoch)[batch * self.global_batch : (batch + 1) * self.global_batch]

    def captions(self, first: int, end: int) -> int:
        """References that the steps `first` to `end` (excluded) train on, over all workers."""
        return sum(len(rows) for step in range(first, end) for rows in self.global_sequences(step))

    def micro_batches(self, step: int, rank: int) -> list[list[Weighted]]:
        """One worker's part of a step; sequences of weight 0 fill up the last batch of an epoch."""
        chosen = self.global_sequences(step)
        weighted = [(rows, 1) for rows in chosen]
        weighted += [(chosen[0], 0)] * (self.global_batch - len(chosen))
        mine = weighted[rank :: self.ranks]
        return [mine[at : at + self.micro_batch] for at in range(0, len(mine), self.micro_batch)]

    def __hash__(self) -> int:
        return id(self)


@lru_cache(maxsize=4)  # the first for its length, the one that trains, and the next one decoded ahead
def _planned(schedule: Schedule, epoch: int) -> list[np.ndarray]:
    return plan_epoch(schedule.samples, schedule.max_captions, schedule.seed, epoch)


@dataclass(frozen=True)
class MicroBatch:
    """Model inputs of B sequences.

    Attributes:
        packed: the text.
        images: [2 B, side, side, 3] uint8, before and after by turns.
        weights: [supervised tokens]; 0 on sequences that only fill up the batch.
    """

    packed: Packed
    images: np.ndarray
    weights: Tensor

    @property
    def supervised_tokens(self) -> int:
        return int(self.weights.sum())


class Loader:
    """Builds micro-batches in threads ahead of the step; Pillow and the tokenizer release the interpreter's lock."""

    def __init__(self, samples: Samples, processor: "PairProcessor", threads: int) -> None:
        self.samples, self.processor = samples, processor
        self.pool = ThreadPoolExecutor(max_workers=max(1, threads), thread_name_prefix="load")
        bytes_each = self._prepared(*samples.images(0)[0]).nbytes if len(samples) else CACHED_BYTES
        self.prepared = lru_cache(maxsize=max(2, CACHED_BYTES // bytes_each))(self._prepared)
        self.reference = lru_cache(maxsize=100_000)(processor.encode_reference)

    def _prepared(self, path: str, sha256: bytes) -> np.ndarray:
        return self.processor.prepare_image(open_image(path, sha256))

    def pairs_of(self, rows: np.ndarray) -> list[tuple[Sequence[int], Sequence[int]]]:
        """(prompt, reference) token ids of each row."""
        samples, encode_prompt = self.samples, self.processor.encode_prompt
        return [(encode_prompt(samples.question[row]), self.reference(samples.reference[row])) for row in rows]

    def build(self, micro_batch: list[Weighted]) -> MicroBatch:
        groups = [self.pairs_of(rows) for rows, _ in micro_batch]
        weights: list[int] = []
        for group, (_, weight) in zip(groups, micro_batch, strict=True):
            weights += [weight] * sum(len(reference) for _, reference in group)
        files = [file for rows, _ in micro_batch for file in self.samples.images(int(rows[0]))]
        images = np.stack([self.prepared(*file) for file in files])
        return MicroBatch(pack(groups), images, torch.tensor(weights, dtype=torch.float32))

    def stream(self, schedule: Schedule, rank: int, first_step: int) -> Iterator[list[MicroBatch]]:
        """The micro-batches of each step from `first_step` to the end of the run."""
        waiting: list[list[Future[MicroBatch]]] = []
        ahead = max(1, PREFETCHED * schedule.micro_batch * schedule.ranks // schedule.global_batch)
        for step in range(first_step, schedule.steps + ahead):
            if step < schedule.steps:
                mine = schedule.micro_batches(step, rank)
                waiting.append([self.pool.submit(self.build, micro_batch) for micro_batch in mine])
            if step >= first_step + ahead and waiting:
                yield [future.result() for future in waiting.pop(0)]
        while waiting:
            yield [future.result() for future in waiting.pop(0)]


def open_image(path: str, sha256: bytes) -> "Image.Image":
    """An image file whose bytes are those that ingest saw.

    Raises:
        DataError: it cannot be read, or it changed.
    """
    try:
        return load_image(path, sha256)
    except ImageError as error:
        raise DataError(str(error)) from error
