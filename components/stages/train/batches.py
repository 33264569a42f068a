"""The samples of a split, and micro-batches of them: which reference trains when, packed how, made ahead of the step.

Samples lie on disk, mapped into memory. Parquet is compressed, so it is written out once as an Arrow file that lies on
disk as it is read. All workers of a machine map that one file, and the kernel keeps of it what is in use. A million
captions and worker take a few MB.

The schedule follows from the seed alone, so a run that resumes at step n sees what an undisturbed one would, and any
number of workers or micro-batches sees the same global batches. A family's augmentation of a pair's images follows from
seed, epoch and sequence in the same way. Each reference comes once per epoch. A micro-batch leaves the threads
complete: the step copies it to its device, and waits for nothing.
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from torch import Tensor

from m3diff.images.open import ImageError, load_image
from m3diff.models.attention import RECURRING, Layout
from m3diff.models.device import Device
from m3diff.records.ahead import ahead
from m3diff.records.errors import DataError, readable
from m3diff.records.files import atomic, sha256
from m3diff.stages.train.job import DatasetFilter
from m3diff.stages.train.packing import Packed, pack

if TYPE_CHECKING:
    from PIL import Image

    from m3diff.models.processing import PairProcessor

T = TypeVar("T")

TEXT, DIGEST = pa.dictionary(pa.int32(), pa.string()), pa.dictionary(pa.int32(), pa.binary())
"""Columns that repeat: a pair's samples share its name and images, a dataset's share their questions."""

SCHEMA = pa.schema(
    {name: TEXT for name in ("pair", "dataset", "before", "after")}
    | {"before_sha256": DIGEST, "after_sha256": DIGEST, "question": TEXT, "reference": pa.string()}
)
"""The columns of a split that training reads (components/records/schemas.py), as they lie in the Arrow file."""

PLAIN = pa.schema([(field.name, getattr(field.type, "value_type", field.type)) for field in SCHEMA])

BATCH_ROWS = 1 << 16

ALL = DatasetFilter()

CACHED_BYTES = 1 << 30
PREFETCHED = 4  # micro-batches made ahead

Weighted = tuple[np.ndarray, int]
"""A sequence (row numbers of one pair) and its weight: 0 only fills up a batch."""

Visit = tuple[int, int]
"""Seed and epoch: with a sequence's first row, the seed of the random numbers of its images."""

AUGMENTED = 1  # other random numbers than those of an epoch's order


class Column(Sequence[T]):
    """A column, read value by value."""

    def __init__(self, values: pa.ChunkedArray) -> None:
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, row: Any) -> Any:
        return self.values[int(row)].as_py()


class RowGroups:
    """Groups of row numbers in two flat arrays: group n is `rows[offsets[n] : offsets[n + 1]]`.

    A NumPy array for each of 160,000 pairs would take more memory than their row numbers.
    """

    def __init__(self, rows: np.ndarray, offsets: np.ndarray) -> None:
        self.rows, self.offsets = rows, offsets

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, number: int) -> np.ndarray:
        return self.rows[self.offsets[number] : self.offsets[number + 1]]

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self[number] for number in range(len(self)))

    def part(self, first: int, end: int) -> list[np.ndarray]:
        """Return the groups from `first` to before `end`; fewer where there are not so many."""
        return [self[number] for number in range(first, min(end, len(self)))]


class Samples:
    """The samples of a split, column by column. Samples of one pair are neighbours.

    Args:
        table: the columns of SCHEMA, of these types or plain ones.
    """

    pair: Column[str]
    dataset: Column[str]
    before: Column[str]
    after: Column[str]
    before_sha256: Column[bytes]
    after_sha256: Column[bytes]
    question: Column[str]
    reference: Column[str]

    def __init__(self, table: pa.Table) -> None:
        for name in SCHEMA.names:
            setattr(self, name, Column(table[name]))
        self.offsets = _boundaries(table["pair"])

    def __len__(self) -> int:
        return len(self.pair)

    def pairs(self) -> RowGroups:
        """Return the row numbers of each pair, in order of appearance."""
        return RowGroups(np.arange(len(self), dtype=np.int32), self.offsets)

    def images(self, row: int) -> tuple[tuple[str, bytes], tuple[str, bytes]]:
        """Return path and digest of the image before and of the image after."""
        return (self.before[row], self.before_sha256[row]), (self.after[row], self.after_sha256[row])


def _boundaries(names: pa.ChunkedArray) -> np.ndarray:
    """Return where runs of one name begin, and the end of the last: int32 [runs + 1]."""
    starts: list[np.ndarray] = []
    row, last = 0, None
    for chunk in names.chunks:
        if len(chunk):
            name = chunk.dictionary_decode() if pa.types.is_dictionary(chunk.type) else chunk
            changes = np.flatnonzero(pc.not_equal(name[1:], name[:-1]).to_numpy(zero_copy_only=False)) + 1
            starts += [row + np.flatnonzero([name[0].as_py() != last]), row + changes]
            row, last = row + len(chunk), name[-1].as_py()
    return np.concatenate([*starts, [row]]).astype(np.int32)


def read_samples(folder: Path, scratch: Path, chosen: DatasetFilter = ALL) -> Samples:
    """Return the samples of a split: every Parquet file of its folder, in the order of their names.

    Args:
        scratch: folder for the Arrow file, which is named by the content: a worker that finds it there reads it, and
            several workers may write it at once.
        chosen: the datasets; all by default.
    """
    files = sorted(folder.glob("*.parquet"))
    facts = [SCHEMA.to_string(), str(chosen), *(f"{file.name} {sha256(file)}" for file in files)]
    mapped = scratch / f"{folder.name}-{hashlib.sha256(repr(facts).encode()).hexdigest()[:16]}.arrow"
    if not mapped.is_file():
        with atomic(mapped) as sink, pa.ipc.new_stream(sink, SCHEMA) as stream:
            for batch in _batches(files, chosen):
                stream.write_batch(batch)
        pa.default_memory_pool().release_unused()
    return Samples(pa.ipc.open_stream(pa.memory_map(str(mapped))).read_all())


def _batches(files: list[Path], chosen: DatasetFilter) -> Iterator[pa.RecordBatch]:
    """Yield the rows of the chosen datasets, some at a time, as SCHEMA."""
    for file in files:
        with readable(file):
            table = pq.ParquetFile(file)
        for batch in table.iter_batches(BATCH_ROWS, columns=SCHEMA.names, use_threads=False):
            if not chosen.takes_all:
                named = pc.is_in(batch["dataset"].cast(pa.string()), pa.array(chosen.names, pa.string()))
                batch = batch.filter(pc.invert(named) if chosen.others else named)
            yield batch.select(SCHEMA.names).cast(PLAIN).cast(SCHEMA)


def read_training_samples(mixture: Path, scratch: Path, chosen: DatasetFilter = ALL) -> Samples:
    """Return the training split; `scratch` and `chosen` as in `read_samples`.

    Raises:
        DataError: it has no sample.
    """
    samples = read_samples(mixture / "train", scratch, chosen)
    if not len(samples):
        datasets = "" if chosen.takes_all else f" of {chosen}"
        raise DataError(
            f"{mixture / 'train'}: no sample of split 'train'{datasets}; run `m3diff convert` and read its report"
        )
    return samples


def sequence_starts(offsets: np.ndarray, max_captions: int | None) -> np.ndarray:
    """Return where each sequence starts, where pairs are cut every `max_captions` rows (None: not at all).

    Args:
        offsets: where each pair starts, and the end of the last.
    """
    if max_captions is None:
        return offsets[:-1]
    counts = -(-np.diff(offsets) // max_captions)
    first = np.cumsum(counts, dtype=np.int32) - counts  # sequences before each pair's
    within = np.arange(counts.sum(), dtype=np.int32) - np.repeat(first, counts)
    return np.repeat(offsets[:-1], counts) + within * np.int32(max_captions)


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
        return math.ceil(len(sequence_starts(self.samples.offsets, self.max_captions)) / self.global_batch)

    @property
    def steps(self) -> int:
        return math.ceil(self.epochs * self.steps_per_epoch)

    def epoch(self, epoch: int) -> RowGroups:
        """Return its sequences in training order, each up to `max_captions` rows of one pair (None: all)."""
        return _planned(self, epoch)

    def global_sequences(self, step: int) -> list[np.ndarray]:
        """Return the sequences of one step over all workers; an epoch's last step has fewer than `global_batch`."""
        epoch, batch = divmod(step, self.steps_per_epoch)
        return self.epoch(epoch).part(batch * self.global_batch, (batch + 1) * self.global_batch)

    def captions(self, steps: int) -> int:
        """Count the references that the first `steps` steps train on, over all workers."""
        epochs, rest = divmod(steps, self.steps_per_epoch)
        return epochs * len(self.samples) + (int(self.epoch(epochs).offsets[rest * self.global_batch]) if rest else 0)

    def micro_batches(self, step: int, rank: int) -> list[list[Weighted]]:
        """Return one worker's part of a step; sequences of weight 0 fill up the last batch of an epoch."""
        chosen = self.global_sequences(step)
        weighted = [(rows, 1) for rows in chosen]
        weighted += [(chosen[0], 0)] * (self.global_batch - len(chosen))
        mine = weighted[rank :: self.ranks]
        return [mine[at : at + self.micro_batch] for at in range(0, len(mine), self.micro_batch)]


@lru_cache(maxsize=2)  # the epoch that trains, and the next one decoded ahead
def _planned(schedule: Schedule, epoch: int) -> RowGroups:
    rng = np.random.default_rng([schedule.seed, epoch])
    pairs = schedule.samples.pairs()
    mixed = pairs.rows
    for rows in pairs:
        rng.shuffle(rows)  # in place, within its pair
    starts = sequence_starts(pairs.offsets, schedule.max_captions)
    order = rng.permutation(len(starts))
    lengths = np.diff(starts, append=np.int32(len(mixed)))[order]
    offsets = np.concatenate([np.zeros(1, np.int32), np.cumsum(lengths, dtype=np.int32)])
    source = np.repeat(starts[order] - offsets[:-1], lengths)  # how far from its place in the epoch a row was
    source += np.arange(len(mixed), dtype=np.int32)
    return RowGroups(mixed[source], offsets)


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
        processor: "PairProcessor",
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
        return self.processor.prepare_image(open_image(path, sha256))

    def pairs_of(self, rows: np.ndarray) -> list[tuple[Sequence[int], Sequence[int]]]:
        """Return (prompt, reference) token ids of each row."""
        samples, encode_prompt = self.samples, self.processor.encode_prompt
        return [(encode_prompt(samples.question[row]), self.reference(samples.reference[row])) for row in rows]

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

    def complete(self, batch: MicroBatch) -> MicroBatch:
        return complete(batch, self.device, self.processor.pad_id)

    def build(self, micro_batch: list[Weighted], visit: Visit | None = None) -> MicroBatch:
        """Return a complete micro-batch."""
        return self.complete(self.read(micro_batch, visit))

    def completed(self, batches: Iterable[MicroBatch]) -> Iterator[MicroBatch]:
        """Yield micro-batches that were read, made complete by the threads a few ahead."""
        for (batch,) in ahead(lambda batch: [self.pool.submit(self.complete, batch)], batches, PREFETCHED):
            yield batch

    def stream(self, schedule: Schedule, rank: int, first_step: int) -> Iterator[list[MicroBatch]]:
        """Return the micro-batches of each step from `first_step` to the end of the run."""

        def submit(step: int) -> list[Future[MicroBatch]]:
            visit = (schedule.seed, step // schedule.steps_per_epoch)
            return [self.pool.submit(self.build, each, visit) for each in schedule.micro_batches(step, rank)]

        steps = max(1, PREFETCHED * schedule.micro_batch * schedule.ranks // schedule.global_batch)
        return ahead(submit, range(first_step, schedule.steps), steps)


def open_image(path: str, sha256: bytes) -> "Image.Image":
    """Return an image whose file's bytes are those that ingest saw.

    Raises:
        DataError: it cannot be read, or it changed.
    """
    try:
        return load_image(path, sha256)
    except ImageError as error:
        raise DataError(str(error)) from error
