"""The samples of a split, and micro-batches of them: which reference trains when, packed how, made ahead of the step.

Each worker holds the columns in memory.

The schedule follows from the seed alone, so a run that resumes at step n sees what an undisturbed one would, and any
number of workers or micro-batches sees the same global batches. A family's augmentation of a pair's images follows from
seed, epoch and sequence in the same way. Each reference comes once per epoch. A micro-batch leaves the threads
complete: the step copies it to its device, and waits for nothing.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch
from torch import Tensor

from m3diff.images.open import load_image
from m3diff.models.device import Device
from m3diff.models.fused import RECURRING, Layout
from m3diff.models.processing import PairProcessor
from m3diff.records.errors import DataError, readable
from m3diff.records.progress import ahead
from m3diff.stages.train.job import DatasetFilter
from m3diff.stages.train.packing import Packed, pack

SCHEMA = pl.Schema(  # the columns of a split that training reads (components/records/schemas.py)
    dict.fromkeys(("pair", "dataset", "before", "after", "question", "reference"), pl.String)
    | {"before_sha256": pl.Binary, "after_sha256": pl.Binary}
)

ALL = DatasetFilter()

CACHED_BYTES = 1 << 30
PREFETCHED = 4  # micro-batches made ahead

Weighted = tuple[np.ndarray, int]  # a sequence (row numbers of one pair) and its weight: 0 only fills up a batch

Visit = tuple[int, int]  # seed and epoch: with a sequence's first row, the seed of the random numbers of its images

AUGMENTED = 1  # other random numbers than those of an epoch's order


class Samples:
    """The samples of a split, column by column. Samples of one pair are neighbours.

    Args:
        table: the columns of SCHEMA.

    Attributes:
        starts: the first row of each pair.
    """

    def __init__(self, table: pl.DataFrame) -> None:
        self.table, pair = table, table["pair"]
        self.starts = (pair != pair.shift()).fill_null(True).arg_true().to_numpy()

    def __len__(self) -> int:
        return len(self.table)

    def value(self, column: str, row: int) -> Any:
        """Return one value of a column of SCHEMA."""
        return self.table[column][int(row)]

    def pairs(self) -> list[np.ndarray]:
        """Return the row numbers of each pair, in order of appearance."""
        rows = np.arange(len(self), dtype=np.int32)
        return [rows[start:end] for start, end in pairwise([*self.starts, len(self)])]

    def images(self, row: int) -> tuple[tuple[str, bytes], tuple[str, bytes]]:
        """Return path and digest of the image before and of the image after."""
        value = self.value
        return (
            (value("before", row), value("before_sha256", row)),
            (value("after", row), value("after_sha256", row)),
        )


def read_samples(folder: Path, chosen: DatasetFilter = ALL) -> Samples:
    """Return the samples of the chosen datasets of a split: every Parquet file of its folder, in the order of names.

    Raises:
        DataError: a file cannot be read.
    """
    tables = [SCHEMA.to_frame()]
    for file in sorted(folder.glob("*.parquet")):
        with readable(file):
            tables.append(pl.read_parquet(file, columns=SCHEMA.names()).select(SCHEMA.names()))
    named = pl.col("dataset").is_in(chosen.names)
    return Samples(pl.concat(tables).filter(~named if chosen.others else named).rechunk())


def read_training_samples(mixture: Path, chosen: DatasetFilter = ALL) -> Samples:
    """Return the training split of the chosen datasets.

    Raises:
        DataError: it has no sample.
    """
    samples = read_samples(mixture / "train", chosen)
    if not len(samples):
        raise DataError(
            f"{mixture / 'train'}: no sample of split 'train'{chosen}; run `m3diff convert` and read its report"
        )
    return samples


@dataclass(frozen=True, eq=False)
class Schedule:
    """Steps of a run: `global_batch` sequences a step, dealt to `ranks` workers in micro-batches."""

    samples: Samples
    max_captions: int | None
    seed: int
    global_batch: int
    micro_batch: int
    epochs: float
    ranks: int = 1

    @cached_property
    def steps_per_epoch(self) -> int:
        sizes = np.diff(self.samples.starts, append=len(self.samples))
        sequences = np.ceil(sizes / self.max_captions).sum() if self.max_captions else len(sizes)
        return math.ceil(sequences / self.global_batch)

    @property
    def steps(self) -> int:
        return math.ceil(self.epochs * self.steps_per_epoch)

    @lru_cache(maxsize=2)  # noqa: B019  # the epoch that trains, and the next one decoded ahead
    def epoch(self, epoch: int) -> list[np.ndarray]:
        """Return its sequences in training order, each up to `max_captions` rows of one pair (None: all)."""
        rng = np.random.default_rng([self.seed, epoch])
        sequences: list[np.ndarray] = []
        for rows in self.samples.pairs():
            rng.shuffle(rows)
            most = self.max_captions or len(rows)
            sequences += [rows[at : at + most] for at in range(0, len(rows), most)]
        return [sequences[number] for number in rng.permutation(len(sequences))]

    def global_sequences(self, step: int) -> list[np.ndarray]:
        """Return the sequences of one step over all workers; an epoch's last step has fewer than `global_batch`."""
        epoch, batch = divmod(step, self.steps_per_epoch)
        return self.epoch(epoch)[batch * self.global_batch : (batch + 1) * self.global_batch]

    def captions(self, steps: int) -> int:
        """Count the references that the first `steps` steps train on, over all workers."""
        epochs, rest = divmod(steps, self.steps_per_epoch)
        begun = self.epoch(epochs)[: rest * self.global_batch] if rest else []
        return epochs * len(self.samples) + sum(len(rows) for rows in begun)

    def micro_batches(self, step: int, rank: int) -> list[list[Weighted]]:
        """Return one worker's part of a step; sequences of weight 0 fill up the last batch of an epoch."""
        chosen = self.global_sequences(step)
        weighted = [(rows, 1) for rows in chosen]
        weighted += [(chosen[0], 0)] * (self.global_batch - len(chosen))
        mine = weighted[rank :: self.ranks]
        return [mine[at : at + self.micro_batch] for at in range(0, len(mine), self.micro_batch)]


@dataclass(frozen=True)
class MicroBatch:
    """Model inputs of B sequences.

    Attributes:
        packed: the text.
        images: [2 B, rows, columns, 3] uint8, before and after by turns.
        weights: [supervised tokens]; 0 on sequences that only fill up the batch.
        layout: of the text, for SDPA; None for FlexAttention, and before the micro-batch is complete.
    """

    packed: Packed
    images: Tensor
    weights: Tensor
    layout: Layout | None = None

    @property
    def supervised_tokens(self) -> int:
        return int(self.weights.sum())


def complete(batch: MicroBatch, device: Device, pad_id: int) -> MicroBatch:
    """Return the micro-batch as a step on the device takes it: its row rounded up for FlexAttention, laid out for SDPA,
    and every tensor in memory that a GPU copies from by itself."""
    flex = device.attention == "flex"
    packed = batch.packed.rounded_up(RECURRING, pad_id) if flex else batch.packed
    layout = None if flex else packed.layout().each(device.pinned)
    return MicroBatch(packed.each(device.pinned), device.pinned(batch.images), device.pinned(batch.weights), layout)


class Loader:
    """Builds micro-batches in threads ahead of the step; Pillow and the tokenizer release the interpreter's lock.

    Args:
        device: the device that the micro-batches are made complete for.
        augment: changes the images of a pair [2, rows, columns, 3] in a visit; None: they stay.
    """

    def __init__(
        self,
        samples: Samples,
        processor: PairProcessor,
        threads: int,
        device: Device,
        augment: Callable[[np.ndarray, np.random.Generator], np.ndarray] | None = None,
    ) -> None:
        self.samples, self.processor, self.device, self.augment = samples, processor, device, augment
        self.pool = ThreadPoolExecutor(max_workers=max(1, threads), thread_name_prefix="load")
        bytes_each = self._prepared(*samples.images(0)[0]).nbytes if len(samples) else CACHED_BYTES
        self.prepared = lru_cache(maxsize=max(2, CACHED_BYTES // bytes_each))(self._prepared)
        self.reference = lru_cache(maxsize=100_000)(processor.encode_reference)

    def _prepared(self, path: str, sha256: bytes) -> np.ndarray:
        return self.processor.prepare_image(load_image(path, sha256))

    def pairs_of(self, rows: np.ndarray) -> list[tuple[Sequence[int], Sequence[int]]]:
        """Return (prompt, reference) token ids of each row."""
        value, encode_prompt = self.samples.value, self.processor.encode_prompt
        return [(encode_prompt(value("question", row)), self.reference(value("reference", row))) for row in rows]

    def images_of(self, row: int, visit: Visit | None) -> list[np.ndarray]:
        """Return the images of a row's pair, before and after; without a visit as they are."""
        pair = [self.prepared(*file) for file in self.samples.images(row)]
        if visit is None or self.augment is None:
            return pair
        return list(self.augment(np.stack(pair), np.random.default_rng([*visit, row, AUGMENTED])))

    def read(self, micro_batch: list[Weighted], visit: Visit | None = None) -> MicroBatch:
        """Return it decoded and tokenised, not yet complete: the form that takes least memory to keep."""
        groups = [self.pairs_of(rows) for rows, _ in micro_batch]
        weights: list[int] = []
        for group, (_, weight) in zip(groups, micro_batch, strict=True):
            weights += [weight] * sum(len(reference) for _, reference in group)
        images = [image for rows, _ in micro_batch for image in self.images_of(int(rows[0]), visit)]
        return MicroBatch(pack(groups), torch.from_numpy(np.stack(images)), torch.tensor(weights, dtype=torch.float32))

    def build(self, micro_batch: list[Weighted], visit: Visit | None = None) -> MicroBatch:
        return complete(self.read(micro_batch, visit), self.device, self.processor.pad_id)

    def stream(self, schedule: Schedule, rank: int, first_step: int) -> Iterator[list[MicroBatch]]:
        """Return the micro-batches of each step from `first_step` to the end of the run."""

        def submit(step: int) -> list[Future[MicroBatch]]:
            visit = (schedule.seed, step // schedule.steps_per_epoch)
            return [self.pool.submit(self.build, each, visit) for each in schedule.micro_batches(step, rank)]

        steps = max(1, PREFETCHED * schedule.micro_batch * schedule.ranks // schedule.global_batch)
        return ahead(submit, range(first_step, schedule.steps), steps)
