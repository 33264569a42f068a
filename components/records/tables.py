"""Parquet files that one stage writes and another reads, and tables for a terminal."""

from collections.abc import Sequence
from pathlib import Path

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from m3diff.records.errors import DataError, readable


def load_table(path: Path, schema: pa.Schema, writer: str, if_empty: str) -> pl.DataFrame:
    """The rows of a stage's Parquet file.

    Args:
        writer: the stage that writes it.
        if_empty: why it may hold no row, with the remedy.

    Raises:
        DataError: it cannot be read, has other columns, or holds no row.
    """
    with readable(path, f"run `m3diff {writer}` again"):
        found, table = pq.read_schema(path), pl.read_parquet(path)
    if not found.equals(schema):
        raise DataError(f"{path}: not the columns that {writer} writes; run `m3diff {writer}` again")
    if not table.height:
        raise DataError(f"{path}: holds no record{if_empty}")
    return table


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """A line for each row, its cells below each other."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
