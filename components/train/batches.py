"""Samples to micro-batches: which caption trains when, packed how; decoded and tokenised ahead of the step.

The plan follows from the seed alone, so a run that resumes at step n sees what an undisturbed one would, and any number
of workers or micro-batches sees the same global batches. Each caption comes once per epoch.
"""

import math
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import torch
from torch import Tensor

from components.models.packing import Packed, pack
from components.models.m3diff.processing import M3DiffProcessor, load_image
from components.records import DataError

CACHED_BYTES = 1 << 30
PREFETCHED = 4  # micro-batches decoded ahead


@dataclass(frozen=True)
class Samples:
    """The columns of a split that training reads; rows of one pair are neighbours."""

    pair: list[str]
    before: list[str]
    after: list[str]
    question: list[str]
    answer: list[str]

    def __len__(self) -> int:
        return len(self.pair)

    def pairs(self) -> list[np.ndarray]:
        """Row numbers of each pair, in order of appearance."""
        if not len(self):
            return []
        starts = [row for row in range(len(self)) if row == 0 or self.pair[row] != self.pair[row - 1]]
        return np.split(np.arange(len(self)), starts[1:])


def read_samples(mixture: Path, split: str) -> Samples:
    """The samples of a split; none where the mixture has no such split. Training needs some: DataError."""
    files = sorted((mixture / "samples").glob(f"{split}-*.parquet"))
    columns = ["pair", "before", "after", "question", "answer"]
    tables = [pq.read_table(file, columns=columns) for file in files]
    if split == "train" and not sum(table.num_rows for table in tables):
        raise DataError(
            f"{mixture / 'samples'}: no sample of split {split!r}; run `m3diff convert` and read its report"
        )
    return Samples(**{name: [value for t in tables for value in t[name].to_pylist()] for name in columns})


def plan_epoch(samples: Samples, packing: str, k: int, seed: int, epoch: int) -> list[np.ndarray]:
    """The sequences of one epoch in training order, each an array of row numbers of one pair."""
    rng = np.random.default_rng([seed, epoch])
    size = {"unpacked": 1, "k": k, "full": len(samples)}[packing]
    sequences: list[np.ndarray] = []
    for rows in samples.pairs():
        mixed = rng.permutation(rows)
        sequences += [mixed[start : start + size] for start in range(0, len(mixed), size)]
    return [sequences[number] for number in rng.permutation(len(sequences))]


@dataclass(frozen=True)
class Share:
    """One worker's part of a global batch: its micro-batches of (rows, weight); weight 0 fills up the last batch."""

    micro_batches: list[list[tuple[np.ndarray, int]]]


@dataclass(frozen=True)
class Schedule:
    """Steps of a run: `global_batch` sequences a step, dealt to `ranks` workers in micro-batches."""

    samples: Samples
    packing: str
    k: int
    seed: int
    global_batch: int
    micro_batch: int
    epochs: float
    ranks: int = 1

    @property
    def steps_per_epoch(self) -> int:
        return math.ceil(len(self._epoch(0)) / self.global_batch)

    @property
    def steps(self) -> int:
        return math.ceil(self.epochs * self.steps_per_epoch)

    def _epoch(self, epoch: int) -> list[np.ndarray]:
        return _planned(self, epoch)

    def share(self, step: int, rank: int) -> Share:
        epoch, batch = divmod(step, self.steps_per_epoch)
        sequences = self._epoch(epoch)
        chosen = sequences[batch * self.global_batch : (batch + 1) * self.global_batch]
        weighted = [(rows, 1) for rows in chosen]
        weighted += [(chosen[0], 0)] * (self.global_batch - len(chosen))
        mine = weighted[rank :: self.ranks]
        return Share([mine[at : at + self.micro_batch] for at in range(0, len(mine), self.micro_batch)])

    def __hash__(self) -> int:
        return id(self)


@lru_cache(maxsize=2)
def _planned(schedule: Schedule, epoch: int) -> list[np.ndarray]:
    return plan_epoch(schedule.samples, schedule.packing, schedule.k, schedule.seed, epoch)


@dataclass(frozen=True)
class MicroBatch:
    """Model inputs of B sequences: `packed` text, `squares` [2 B, side, side, 3] uint8, `weights` per label; `captions`
    is how many count."""

    packed: Packed
    squares: np.ndarray
    weights: Tensor
    captions: int

    @property
    def supervised_tokens(self) -> int:
        return int(self.weights.sum())


class Loader:
    """Builds micro-batches in threads ahead of the step; Pillow and the tokenizer release the interpreter's lock."""

    def __init__(self, samples: Samples, processor: M3DiffProcessor, threads: int) -> None:
        self.samples, self.processor = samples, processor
        self.pad_id = processor.tokenizer.pad_token_id
        self.pool = ThreadPoolExecutor(max_workers=max(1, threads), thread_name_prefix="load")
        side = processor.image_processor.side
        self.square = lru_cache(maxsize=max(2, CACHED_BYTES // (3 * side * side)))(self._square)
        self.answer = lru_cache(maxsize=100_000)(processor.encode_answer)

    def _square(self, path: str) -> np.ndarray:
        try:
            return self.processor.image_processor.square(load_image(path))
        except (OSError, ValueError) as error:
            raise DataError(f"{path}: cannot be read as an image ({error}); run `m3diff validate` again") from error

    def build(self, micro_batch: list[tuple[np.ndarray, int]]) -> MicroBatch:
        samples, groups, weights = self.samples, [], []
        for rows, weight in micro_batch:
            group = [(self.processor.encode_prompt(samples.question[r]), self.answer(samples.answer[r])) for r in rows]
            groups.append(group)
            weights += [weight] * sum(len(answer) for _, answer in group)
        first = [int(rows[0]) for rows, _ in micro_batch]
        paths = [path for row in first for path in (samples.before[row], samples.after[row])]
        squares = np.stack([self.square(path) for path in paths])
        captions = sum(len(rows) * weight for rows, weight in micro_batch)
        return MicroBatch(pack(groups, self.pad_id), squares, torch.tensor(weights, dtype=torch.float32), captions)

    def stream(self, schedule: Schedule, rank: int, first_step: int) -> Iterator[list[MicroBatch]]:
        """The micro-batches of each step from `first_step` to the end of the run."""
        waiting: list[list[Future[MicroBatch]]] = []
        ahead = max(1, PREFETCHED * schedule.micro_batch * schedule.ranks // schedule.global_batch)
        for step in range(first_step, schedule.steps + ahead):
            if step < schedule.steps:
                share = schedule.share(step, rank)
                waiting.append([self.pool.submit(self.build, micro_batch) for micro_batch in share.micro_batches])
            if step >= first_step + ahead and waiting:
                yield [future.result() for future in waiting.pop(0)]
        while waiting:
            yield [future.result() for future in waiting.pop(0)]
