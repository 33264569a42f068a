"""Write and read the tables that stages pass on. A table is a folder of Parquet files, its *parts*.

    records/00000.parquet    the first rows
    records/00001.parquet    the next rows

A part has about `PART_ROWS` rows. All consecutive rows of an image set are in one part, so that a program that reads
one part has every question about its images. A new table replaces the old one as a whole: a stage that is killed while
it writes leaves no folder with this name, and never one that lacks some parts.
"""

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from m3diff.records.errors import DataError, data_error_if_unreadable
from m3diff.records.files import new_folder, open_atomically
from m3diff.records.progress import prefetch

PART_ROWS = 16_384
ROW_GROUP = 16_384  # rows per row group: few enough to read one pair quickly, enough to compress well
WRITERS = 2  # parts that are compressed at once, each in a thread


def part_paths(table: Path) -> list[Path]:
    """Return the files of a table in the order of its rows. The list is empty if the folder does not exist.

    A table that an earlier release wrote is a single file. It counts as its own only part.
    """
    return [table] if table.is_file() else sorted(table.glob("*.parquet"))


def write_table(rows: pa.Table, table: Path) -> None:
    """Write rows as a table, in parts of about PART_ROWS rows.

    A table without rows has one part without rows, so that any program finds its columns.

    Args:
        rows: rows with a column `image_set`.
        table: folder of the table. An existing table is replaced.
    """
    bounds = part_bounds(rows["image_set"], PART_ROWS) or [(0, 0)]
    write_parts((rows.slice(start, end - start) for start, end in bounds), table)


def write_parts(parts: Iterable[pa.Table], table: Path) -> None:
    """Write a table part by part. At most WRITERS parts are in memory, besides the one that is being computed.

    Args:
        parts: the rows of each part. Without parts, the table is an empty folder.
        table: folder of the table. An existing table is replaced.
    """
    with new_folder(table) as folder, ThreadPoolExecutor(WRITERS) as pool:
        folder.mkdir()

        def submit(numbered_part: tuple[int, pa.Table]) -> list[Future[None]]:
            number, part = numbered_part
            return [pool.submit(_write_part, part, folder / f"{number:05d}.parquet")]

        for _ in prefetch(submit, enumerate(parts), count=WRITERS - 1):
            pass  # raises the error of a writer


def _write_part(part: pa.Table, file: Path) -> None:
    # flushed to disk, because a rename may outlive a power failure that the content does not
    with open_atomically(file) as stream:
        pq.write_table(part, stream, compression="zstd", row_group_size=ROW_GROUP)


def part_bounds(image_sets: pa.ChunkedArray | pa.Array, part_rows: int) -> list[tuple[int, int]]:
    """Return the first row of each part and the row after its last, for parts of about `part_rows` rows.

    Args:
        image_sets: image set of each row. Consecutive rows with equal values stay in one part. A null differs from
            every value, so that rows that could not be read do not stay together.
        part_rows: number of rows after which a part ends, as soon as its last image set is complete.
    """
    rows = len(image_sets)
    if not rows:
        return []
    differs = pc.fill_null(pc.not_equal(image_sets.slice(1), image_sets.slice(0, rows - 1)), True)
    ends_of_image_sets = np.append(np.flatnonzero(np.asarray(differs)) + 1, rows)
    cuts = np.arange(part_rows, rows, part_rows)
    # Move each cut to the end of the image set that it would split
    cuts_between_image_sets = ends_of_image_sets[np.searchsorted(ends_of_image_sets, cuts)]
    return list(pairwise(np.unique([0, *cuts_between_image_sets, rows]).tolist()))


def iterate_parts(
    table: Path,
    columns: Sequence[str] | None = None,
    filters: Any = None,
    code: str = "files.unreadable_output",
    **fields: Any,
) -> Iterator[pa.Table]:
    """Yield the rows of each part.

    Args:
        table: folder of the table.
        columns: names of the columns to read; None reads all.
        filters: conditions on rows, as in `pyarrow.parquet.read_table`; None reads all.
        code: code of the error if the table cannot be read.
        fields: fields of that error besides `path` and `cause`.

    Raises:
        DataError: the table does not exist, or a part cannot be read.
    """
    paths = part_paths(table)
    if not paths:
        with data_error_if_unreadable(table, code, **fields):
            raise FileNotFoundError("it contains no part" if table.is_dir() else "No such file or directory")
    names = None if columns is None else list(columns)
    for path in paths:
        with data_error_if_unreadable(path, code, **fields):
            # no partitioning: a folder called `a=b` above the table is no column
            part = pq.read_table(path, columns=names, filters=filters, partitioning=None)
        yield part


def read_table(
    table: Path,
    columns: Sequence[str] | None = None,
    filters: Any = None,
    code: str = "files.unreadable_output",
    **fields: Any,
) -> pa.Table:
    """Read the rows of all parts in order. See `iterate_parts`.

    Raises:
        DataError: the table does not exist, or a part cannot be read.
    """
    return pa.concat_tables(iterate_parts(table, columns, filters, code, **fields))


def load_table(table: Path, schema: pa.Schema, writer: str, if_empty: str) -> pa.Table:
    """Read a table that a stage wrote, and check its columns.

    Args:
        table: folder of the table.
        schema: the columns that the table must have.
        writer: name of the stage that writes the table, for messages.
        if_empty: code of the error if the table has no rows.

    Raises:
        DataError: the table cannot be read, has unexpected columns, or has no rows.
    """
    parts = []
    for part in iterate_parts(table, code="files.unreadable_stage_output", writer=writer):
        if not part.schema.equals(schema):
            raise DataError("files.other_columns", path=table, writer=writer)
        parts.append(part)
    rows = pa.concat_tables(parts)
    if not rows.num_rows:
        raise DataError(if_empty, path=table)
    return rows
