"""Read training samples, arrange them into optimizer steps, and prepare micro-batches ahead of the training loop.

A sample is one reference caption of an image pair. A sequence packs one or more references of the same pair behind its
images and question (see `packing.py`). Each worker keeps the columns of its split in memory.

The order of the sequences depends only on the seed. A resumed run therefore sees the same batches as an uninterrupted
run, and neither the number of workers nor the micro-batch size changes a global batch. Image augmentation depends only
on the seed, the epoch and the sequence. Each reference is used once per epoch. Threads prepare micro-batches ahead, so
that a training step only has to copy them to its device.
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
from m3diff.models.fused import FLEX_BLOCK, Layout
from m3diff.models.processing import PairProcessor
from m3diff.records.errors import DataError, data_error_if_unreadable
from m3diff.records.progress import prefetch
from m3diff.records.sample import ImageRef
from m3diff.records.tables import part_paths
from m3diff.stages.train.job import DatasetFilter
from m3diff.stages.train.packing import Packed, pack

SCHEMA = pl.Schema(  # columns of a split that training reads (components/records/schemas.py)
    dict.fromkeys(("record", "dataset", "question", "answer"), pl.String)
    | {"images": pl.List(pl.Struct({"uri": pl.String, "sha256": pl.Binary}))}
)

ALL = DatasetFilter()

CACHED_BYTES = 1 << 30
PREFETCHED = 4  # micro-batches prepared ahead of the current step

Weighted = tuple[np.ndarray, int]  # row numbers of a sequence, and its weight: 1, or 0 if it only pads a batch

Visit = tuple[int, int]  # seed and epoch; with a sequence's first row number, they seed its image augmentation

AUGMENTATION_SEED = 1  # extra seed, so that the augmentation does not reuse the random numbers of the epoch's order


class Samples:
    """The samples of a split as columns. Samples of the same pair are adjacent.

    Args:
        table: table with the columns of SCHEMA.

    Attributes:
        starts: first row of each pair.
    """

    def __init__(self, table: pl.DataFrame) -> None:
        self.table = table
        record = table["record"]
        self.starts = (record != record.shift()).fill_null(True).arg_true().to_numpy()

    def __len__(self) -> int:
        return len(self.table)

    def value(self, column: str, row: int) -> Any:
        """Return the value of a column of SCHEMA in one row."""
        return self.table[column][int(row)]

    def pairs(self) -> list[np.ndarray]:
        """Return the row numbers of each pair, in order of appearance."""
        rows = np.arange(len(self), dtype=np.int32)
        return [rows[start:end] for start, end in pairwise([*self.starts, len(self)])]

    def images(self, row: int) -> tuple[ImageRef, ...]:
        """Return the images of a sample: the image before, then the image after."""
        return tuple(ImageRef(**image) for image in self.value("images", row))


def read_samples(folder: Path, chosen: DatasetFilter = ALL) -> Samples:
    """Read a split's Parquet files in the order of their names and return the samples of the chosen datasets.

    The result is empty if there are no such samples.

    Raises:
        DataError: a file cannot be read.
    """
    tables = [SCHEMA.to_frame()]
    for file in part_paths(folder):
        with data_error_if_unreadable(file):
            tables.append(pl.read_parquet(file, columns=SCHEMA.names()).select(SCHEMA.names()))
    named = pl.col("dataset").is_in(chosen.names)
    return Samples(pl.concat(tables).filter(~named if chosen.excludes else named).rechunk())


def find_usual_question(*splits: Samples) -> str | None:
    """Return the most frequent question of the first split that has samples, or None if no split has any.

    If several questions are equally frequent, the first in alphabetical order is returned.
    """
    for samples in splits:
        if len(samples):
            counts = samples.table["question"].value_counts().sort("count", "question", descending=[True, False])
            return str(counts["question"][0])
    return None


def read_training_samples(mixture: Path, chosen: DatasetFilter = ALL) -> Samples:
    """Return the training samples of the chosen datasets.

    Raises:
        DataError: there are no such samples.
    """
    samples = read_samples(mixture / "train", chosen)
    if not len(samples):
        code = "train.no_sample"
        if chosen.names:
            code = "train.no_sample_of_other_datasets" if chosen.excludes else "train.no_sample_of_datasets"
        raise DataError(code, path=mixture / "train", names=chosen.names)
    return samples


@dataclass(frozen=True, eq=False)
class Schedule:
    """Assigns sequences to the optimizer steps of a run.

    Each step has `global_batch` sequences. They are distributed to `ranks` workers, which process them in
    micro-batches.

    Attributes:
        max_captions: maximum number of references per sequence; None allows all references of a pair.
        micro_batch: number of sequences per micro-batch.
        ranks: number of workers.
    """

    samples: Samples
    max_captions: int | None
    seed: int
    global_batch: int
    micro_batch: int
    epochs: float
    ranks: int = 1

    @cached_property
    def steps_per_epoch(self) -> int:
        """Number of optimizer steps per epoch. The last one may have fewer than `global_batch` sequences."""
        sizes = np.diff(self.samples.starts, append=len(self.samples))
        sequences = np.ceil(sizes / self.max_captions).sum() if self.max_captions else len(sizes)
        return math.ceil(sequences / self.global_batch)

    @property
    def steps(self) -> int:
        """Number of optimizer steps of the run, rounded up."""
        return math.ceil(self.epochs * self.steps_per_epoch)

    @lru_cache(maxsize=2)  # noqa: B019  # the current epoch, and the next one while it is prefetched
    def epoch(self, epoch: int) -> list[np.ndarray]:
        """Return the row numbers of each sequence of an epoch, in training order.

        A sequence has up to `max_captions` rows, all of the same pair.
        """
        rng = np.random.default_rng([self.seed, epoch])
        sequences: list[np.ndarray] = []
        for rows in self.samples.pairs():
            rng.shuffle(rows)
            most = self.max_captions or len(rows)
            sequences += [rows[at : at + most] for at in range(0, len(rows), most)]
        return [sequences[number] for number in rng.permutation(len(sequences))]

    def global_sequences(self, step: int) -> list[np.ndarray]:
        """Return the sequences of a step for all workers. An epoch's last step may have fewer than `global_batch`."""
        epoch, batch = divmod(step, self.steps_per_epoch)
        return self.epoch(epoch)[batch * self.global_batch : (batch + 1) * self.global_batch]

    def captions(self, steps: int) -> int:
        """Return the number of references that the first `steps` steps train on, over all workers."""
        epochs, rest = divmod(steps, self.steps_per_epoch)
        begun = self.epoch(epochs)[: rest * self.global_batch] if rest else []
        return epochs * len(self.samples) + sum(len(rows) for rows in begun)

    def micro_batches(self, step: int, rank: int) -> list[list[Weighted]]:
        """Return one worker's micro-batches of a step. Sequences of weight 0 pad the last batch of an epoch."""
        chosen = self.global_sequences(step)
        weighted = [(rows, 1) for rows in chosen]
        weighted += [(chosen[0], 0)] * (self.global_batch - len(chosen))
        mine = weighted[rank :: self.ranks]
        return [mine[at : at + self.micro_batch] for at in range(0, len(mine), self.micro_batch)]


@dataclass(frozen=True)
class MicroBatch:
    """Model inputs of B sequences.

    Attributes:
        packed: packed text of the sequences.
        images: [2 B, rows, columns, 3] uint8; before-images and after-images alternate.
        weights: [supervised tokens]; weight of each token in the loss: 0 in sequences that only pad the batch, else 1.
        layout: layout of the text for SDPA; None for FlexAttention, and before `complete` is called.
    """

    packed: Packed
    images: Tensor
    weights: Tensor
    layout: Layout | None = None

    @property
    def supervised_tokens(self) -> int:
        """Number of tokens that count in the loss. Sequences that only pad the batch have none."""
        return int(self.weights.sum())


def complete(batch: MicroBatch, device: Device, pad_id: int) -> MicroBatch:
    """Return a copy of the micro-batch that is ready for a training step on the device.

    The row of tokens is padded for FlexAttention or arranged in rectangles for SDPA. If the device is a GPU, all
    tensors are copied to pinned memory.
    """
    flex = device.attention == "flex"
    packed = batch.packed.rounded_up(FLEX_BLOCK, pad_id) if flex else batch.packed
    layout = None if flex else packed.layout().map_tensors(device.pin)
    return MicroBatch(packed.map_tensors(device.pin), device.pin(batch.images), device.pin(batch.weights), layout)


class Loader:
    """Prepares micro-batches in threads, because Pillow and the tokenizer release the global interpreter lock.

    Args:
        device: device for which the micro-batches are prepared.
        augment: function that randomly changes the images of a pair, [2, rows, columns, 3]; None disables augmentation.
    """

    def __init__(
        self,
        samples: Samples,
        processor: PairProcessor,
        threads: int,
        device: Device,
        augment: Callable[[np.ndarray, np.random.Generator], np.ndarray] | None = None,
    ) -> None:
        self.samples = samples
        self.processor = processor
        self.device = device
        self.augment = augment
        self.pool = ThreadPoolExecutor(max_workers=max(1, threads), thread_name_prefix="load")
        bytes_each = self._prepared(*samples.images(0)[0]).nbytes if len(samples) else CACHED_BYTES
        self.prepared = lru_cache(maxsize=max(2, CACHED_BYTES // bytes_each))(self._prepared)
        self.reference = lru_cache(maxsize=100_000)(processor.encode_reference)

    def _prepared(self, uri: str, sha256: bytes | None) -> np.ndarray:
        return self.processor.prepare_image(load_image(uri, sha256))

    def pairs_of(self, rows: np.ndarray) -> list[tuple[Sequence[int], Sequence[int]]]:
        """Return the token ids of the prompt and of the reference for each row."""
        value = self.samples.value
        encode_prompt = self.processor.encode_prompt
        return [(encode_prompt(value("question", row)), self.reference(value("answer", row))) for row in rows]

    def images_of(self, row: int, visit: Visit | None) -> list[np.ndarray]:
        """Return the before- and after-image of a row's pair. They are augmented only if `visit` is given."""
        pair = [self.prepared(*image) for image in self.samples.images(row)]
        if visit is None or self.augment is None:
            return pair
        return list(self.augment(np.stack(pair), np.random.default_rng([*visit, row, AUGMENTATION_SEED])))

    def read(self, micro_batch: list[Weighted], visit: Visit | None = None) -> MicroBatch:
        """Decode and tokenise a micro-batch. It takes less memory until `complete` prepares it for the device."""
        groups = [self.pairs_of(rows) for rows, _ in micro_batch]
        weights: list[int] = []
        for group, (_, weight) in zip(groups, micro_batch, strict=True):
            weights += [weight] * sum(len(reference) for _, reference in group)
        images = [image for rows, _ in micro_batch for image in self.images_of(int(rows[0]), visit)]
        return MicroBatch(pack(groups), torch.from_numpy(np.stack(images)), torch.tensor(weights, dtype=torch.float32))

    def build(self, micro_batch: list[Weighted], visit: Visit | None = None) -> MicroBatch:
        """Return a micro-batch that is ready for a training step: decoded, tokenised and prepared for the device."""
        return complete(self.read(micro_batch, visit), self.device, self.processor.pad_id)

    def stream(self, schedule: Schedule, rank: int, first_step: int) -> Iterator[list[MicroBatch]]:
        """Return an iterator over this worker's micro-batches: one list per step, starting with `first_step`."""

        def submit(step: int) -> list[Future[MicroBatch]]:
            visit = (schedule.seed, step // schedule.steps_per_epoch)
            return [self.pool.submit(self.build, each, visit) for each in schedule.micro_batches(step, rank)]

        steps = max(1, PREFETCHED * schedule.micro_batch * schedule.ranks // schedule.global_batch)
        return prefetch(submit, range(first_step, schedule.steps), steps)
