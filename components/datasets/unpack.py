"""Images that lie inside Parquet files, as the Hugging Face hub stores them, written as files of their own."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from components.datasets.tables import shards
from components.files import write_atomic
from components.records import DataError

BATCH = 16
"""Rows in memory at once: a row may hold two images of a megabyte."""


def image_path(name: str, column: str) -> str:
    """Where the image of a pair's column is written, relative to the root. A file may hold another format than PNG."""
    return f"images/{name}-{column}.png"


def unpack_shards(
    root: Path, pattern: str, keys: Sequence[str], images: Sequence[str], name: Callable[[Mapping[str, Any]], str]
) -> int:
    """Write the images of every row of a split, but for those that are there; how many the split has.

    Args:
        keys: columns that `name` needs to name a row's pair.
        images: columns of images, each an object with `bytes`.

    Raises:
        DataError: a file is missing or cannot be read, or an image has no bytes.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    (root / "images").mkdir(exist_ok=True)
    count = 0
    for path in shards(root, pattern):
        try:
            for batch in pq.ParquetFile(path).iter_batches(BATCH, columns=[*keys, *images]):
                for row in batch.to_pylist():
                    count += sum(_write(root, path, name(row), column, row[column]) for column in images)
        except (OSError, pa.ArrowException, KeyError) as error:
            raise DataError(f"{path}: its images cannot be read: {error}; fetch it again") from error
    return count


def _write(root: Path, shard: Path, name: str, column: str, image: Mapping[str, Any] | None) -> int:
    if not image or not image.get("bytes"):
        raise DataError(f"{shard}: pair {name}, {column}: no bytes of an image; fetch it again")
    if Path(name).name != name or not name:
        raise DataError(f"{shard}: {name!r} would be a path and not the name of a file; fetch it again")
    target = root / image_path(name, column)
    if not target.exists():
        write_atomic(target, image["bytes"])
    return 1
