"""The samples of a split as a worker holds them: on disk, mapped into memory, with the boundaries of the pairs.

Parquet is compressed, so it is written out once as an Arrow file that lies on disk as it is read. All workers of a
machine map that one file, and the kernel keeps of it what is in use. A million captions and worker take a few MB.
"""

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from m3diff.records.errors import DataError, readable
from m3diff.records.files import atomic, sha256
from m3diff.stages.train.job import DatasetFilter

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
