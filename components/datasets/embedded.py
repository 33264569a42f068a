"""Images inside a Parquet file, as `datasets` writes them: {"bytes": ..., "path": ...} where others have a path.

A reader yields such an image as an `Embedded`, which knows where the bytes stand and does not hold them. ingest writes
them beside its records, by their digest, since later stages read images from files.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from m3diff.datasets.rows import Row

SUFFIXES = {b"\x89PNG": ".png", b"\xff\xd8\xff": ".jpg", b"GIF8": ".gif", b"RIFF": ".webp", b"BM": ".bmp"}
"""By the first bytes; of another format the file has no suffix."""


@dataclass(frozen=True)
class Embedded:
    """One image, by the place of its bytes; equal to another of the same bytes."""

    name: str  # the digest of the bytes, shortened, with a suffix
    manifest: Path = field(compare=False)
    group: int = field(compare=False)  # row group
    row: int = field(compare=False)  # in its group
    column: str = field(compare=False)
    item: int | None = field(compare=False)  # in a list of images

    def read(self) -> bytes:
        """The bytes."""
        value = _column(self.manifest, self.group, self.column)[self.row]
        image = value if self.item is None else value[self.item]
        found: bytes = image["bytes"] if isinstance(image, dict) else image
        return found


@lru_cache(maxsize=2)
def _column(manifest: Path, group: int, column: str) -> Any:
    """One column of a row group: images of a pair, and the pairs of a group, are asked for one after another."""
    return pq.ParquetFile(manifest).read_row_group(group, [column]).column(0).to_pylist()


def has_images(schema: pa.Schema) -> bool:
    """Whether a column holds images or other bytes, or lists of them, whatever kind of list."""
    types = [getattr(column.type, "value_type", column.type) for column in schema]
    return any(
        {part.name for part in each} == {"bytes", "path"} if pa.types.is_struct(each) else _is_binary(each)
        for each in types
    )


def _is_binary(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind))


def rows_of(path: Path, columns: Sequence[str] | None = None) -> Iterator[dict[str, Any]]:
    """Rows of a Parquet file by some or all of its columns, a row group at a time, each image as an `Embedded`."""
    file = pq.ParquetFile(path)
    for group in range(file.num_row_groups):
        for number, row in enumerate(file.read_row_group(group, columns and list(columns)).to_pylist()):
            yield {column: _detached(value, path, group, number, column) for column, value in row.items()}


def _detached(value: Any, path: Path, group: int, row: int, column: str, item: int | None = None) -> Any:
    """The place of an image in place of its bytes; its path where it has no bytes; other values as they are.

    Bytes without a path are an image, too, if they begin as one.
    """
    if isinstance(value, list):
        return [_detached(each, path, group, row, column, number) for number, each in enumerate(value)]
    image = isinstance(value, dict) and value.keys() == {"bytes", "path"}
    if image and value["bytes"] is None:
        return value["path"]
    data = value["bytes"] if image else value
    suffix = next((end for start, end in SUFFIXES.items() if isinstance(data, bytes) and data.startswith(start)), "")
    if not image and not suffix:
        return value
    return Embedded(hashlib.sha256(data).hexdigest()[:32] + suffix, path, group, row, column, item)


def unpacked(rows: Iterable[Row], folder: Path) -> Iterator[Row]:
    """The rows with each embedded image as the path of a file in `folder`, written where it is not there yet."""
    for row in rows:
        yield row._replace(before=_unpacked(row.before, folder), after=_unpacked(row.after, folder))


def _unpacked(image: Any, folder: Path) -> Any:
    if not isinstance(image, Embedded):
        return image
    path = folder / image.name
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        path.write_bytes(image.read())
    return path
