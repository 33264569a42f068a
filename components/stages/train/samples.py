"""The samples of a split as a worker holds them: on disk, mapped into memory, with the boundaries of the pairs beside.

Parquet is compressed, so it is written out once as an Arrow file that lies on disk as it is read. All workers of a
machine map that one file, and the kernel keeps of it what is in use. A million captions and worker take a few MB.
"""

import hashlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar, overload

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from m3diff.records.errors import DataError, readable
from m3diff.records.files import sha256
from m3diff.stages.train.phase import DatasetFilter

T = TypeVar("T")

TEXT, DIGEST = pa.dictionary(pa.int32(), pa.string()), pa.dictionary(pa.int32(), pa.binary())
"""Columns that repeat: a pair's samples share its name and images, a dataset's share their questions."""

SCHEMA = pa.schema(
    [
        ("pair", TEXT),
        ("dataset", TEXT),
        ("before", TEXT),
        ("after", TEXT),
        ("before_sha256", DIGEST),
        ("after_sha256", DIGEST),
        ("question", TEXT),
        ("reference", pa.string()),
    ]
)
"""The columns of a split that training reads (components/records/schemas.py), as they lie in the Arrow file."""

BATCH_ROWS = 1 << 16

ALL = DatasetFilter()


class Column(Sequence[T]):
    """One column, read value by value."""

    def __init__(self, values: pa.ChunkedArray) -> None:
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, row: Any) -> Any:
        return self.values[int(row)].as_py()


class RowGroups(Sequence[np.ndarray]):
    """Groups of row numbers in two flat arrays: group n is `rows[offsets[n] : offsets[n + 1]]`.

    A NumPy array for each of 160,000 pairs would take more memory than their row numbers.
    """

    def __init__(self, rows: np.ndarray, offsets: np.ndarray) -> None:
        self.rows, self.offsets = rows, offsets

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @overload
    def __getitem__(self, place: int) -> np.ndarray: ...
    @overload
    def __getitem__(self, place: slice) -> list[np.ndarray]: ...
    def __getitem__(self, place: int | slice) -> np.ndarray | list[np.ndarray]:
        if isinstance(place, slice):
            return [self[number] for number in range(*place.indices(len(self)))]
        number = range(len(self))[place]
        return self.rows[self.offsets[number] : self.offsets[number + 1]]

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self[number] for number in range(len(self)))


class Samples:
    """The samples of a split, column by column. Samples of one pair are neighbours.

    Args:
        table: the columns of SCHEMA, of these types or plain ones.
    """

    def __init__(self, table: pa.Table) -> None:
        self.pair: Column[str] = Column(table["pair"])
        self.dataset: Column[str] = Column(table["dataset"])
        self.before: Column[str] = Column(table["before"])
        self.after: Column[str] = Column(table["after"])
        self.before_sha256: Column[bytes] = Column(table["before_sha256"])
        self.after_sha256: Column[bytes] = Column(table["after_sha256"])
        self.question: Column[str] = Column(table["question"])
        self.reference: Column[str] = Column(table["reference"])
        self.offsets = _boundaries(table["pair"])

    def __len__(self) -> int:
        return len(self.pair)

    def pairs(self) -> RowGroups:
        """Row numbers of each pair, in order of appearance."""
        return RowGroups(np.arange(len(self), dtype=np.int32), self.offsets)

    def images(self, row: int) -> tuple[tuple[str, bytes], tuple[str, bytes]]:
        """Path and digest of the image before and of the image after."""
        return (self.before[row], self.before_sha256[row]), (self.after[row], self.after_sha256[row])


def _boundaries(names: pa.ChunkedArray) -> np.ndarray:
    """Where runs of one name begin, and the end of the last: int32 [runs + 1]."""
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
    """The samples of a split: every Parquet file of its folder, in the order of their names.

    Args:
        scratch: folder for the Arrow file, which is named by the content: who finds it there reads it, and several
            workers may write it at once.
        chosen: of which datasets; of all by default.
    """
    files = sorted(folder.glob("*.parquet"))
    facts = [SCHEMA.to_string(), str(chosen), *(f"{file.name} {sha256(file)}" for file in files)]
    mapped = scratch / f"{folder.name}-{hashlib.sha256(repr(facts).encode()).hexdigest()[:16]}.arrow"
    if not mapped.is_file():
        _write(files, mapped, chosen)
        pa.default_memory_pool().release_unused()
    return Samples(pa.ipc.open_stream(pa.memory_map(str(mapped))).read_all())


def _write(files: list[Path], out: Path, chosen: DatasetFilter) -> None:
    """All rows as one Arrow stream, some at a time, whole or not at all."""
    out.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=out.parent, prefix=f".{out.name}.")
    try:
        with os.fdopen(handle, "wb") as sink, pa.ipc.new_stream(sink, SCHEMA) as stream:
            for file in files:
                with readable(file):
                    table = pq.ParquetFile(file)
                for batch in table.iter_batches(BATCH_ROWS, columns=SCHEMA.names, use_threads=False):
                    stream.write_batch(_encoded(_taken(batch, chosen)))
            stream.close()
            sink.flush()
            os.fsync(sink.fileno())  # who finds the file takes it as it is
        os.chmod(temporary, 0o644)
        os.replace(temporary, out)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _taken(batch: pa.RecordBatch, chosen: DatasetFilter) -> pa.RecordBatch:
    """The rows that a phase takes."""
    if chosen.takes_all:
        return batch
    named = pc.is_in(batch.column("dataset").cast(pa.string()), pa.array(chosen.names, pa.string()))
    return batch.filter(pc.invert(named) if chosen.others else named)


def _encoded(batch: pa.RecordBatch) -> pa.RecordBatch:
    columns = [batch.column(name) for name in SCHEMA.names]
    plain = [
        column.cast(kind.value_type if pa.types.is_dictionary(kind) else kind)
        for column, kind in zip(columns, SCHEMA.types, strict=True)
    ]
    return pa.record_batch(
        [
            column.dictionary_encode() if pa.types.is_dictionary(kind) else column
            for column, kind in zip(plain, SCHEMA.types, strict=True)
        ],
        schema=SCHEMA,
    )


def read_training_samples(mixture: Path, scratch: Path, chosen: DatasetFilter = ALL) -> Samples:
    """The training split; `scratch` and `chosen` as in `read_samples`.

    Raises:
        DataError: it has no sample.
    """
    samples = read_samples(mixture / "train", scratch, chosen)
    if not len(samples):
        of = "" if chosen.takes_all else f" of {chosen}"
        raise DataError(
            f"{mixture / 'train'}: no sample of split 'train'{of}; run `m3diff convert` and read its report"
        )
    return samples
