"""Which pairs are meant: two images, two folders of images with the same names, or a table of paths."""

import csv
import io
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from m3diff.datasets.files import describe, fault_of_path, is_inside, read_text
from m3diff.records.errors import DataError

SIDES = ("before", "after")
SUFFIXES = {".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".heic", ".heif"}
MOST_NAMED = 5
WANTED = "give two images, two folders of images with the same names, or a CSV file with the columns before and after"


class AskedPair(NamedTuple):
    """One pair; `name` is unlike every other's."""

    name: str
    before: Path
    after: Path


def find_pairs(before: Path, after: Path | None, image_root: Path | None = None) -> list[AskedPair]:
    """The pairs that two paths, or one of a table, stand for.

    Args:
        image_root: a folder beside the table's own that paths in the table may lead into.

    Raises:
        DataError: a path is missing, the two do not fit each other, or a row of the table says too little.
    """
    for path in filter(None, (before, after)):
        if not path.exists():
            raise DataError(f"{path}: no such file or folder; {WANTED}")
    if after is None:
        if before.is_dir():
            raise DataError(f"{before}: one folder; {WANTED}")
        return list(_of_table(before, [before.parent, *([image_root] if image_root else [])]))
    if before.is_dir() and after.is_dir():
        return _of_folders(before, after)
    if before.is_dir() or after.is_dir():
        raise DataError(f"{before}, {after}: a folder and a file; {WANTED}")
    return [AskedPair(before.stem, before, after)]


def _of_folders(before: Path, after: Path) -> list[AskedPair]:
    one, other = (_images(folder) for folder in (before, after))
    if alone := sorted(one.keys() ^ other.keys()):
        named = ", ".join(alone[:MOST_NAMED]) + (", ..." if alone[MOST_NAMED:] else "")
        raise DataError(f"{before}, {after}: {len(alone)} image(s) in one folder alone: {named}; name both sides alike")
    if not one:
        raise DataError(f"{before}: no image ({', '.join(sorted(SUFFIXES))}); {WANTED}")
    return [AskedPair(name, one[name], other[name]) for name in sorted(one)]


def _images(folder: Path) -> dict[str, Path]:
    """Images by name without suffix; of one name in several formats, each by its whole name. Hidden files are none."""
    found: dict[str, list[Path]] = {}
    for path in sorted(folder.iterdir()):
        if path.name[0] != "." and path.suffix.lower() in SUFFIXES and path.is_file():
            found.setdefault(path.stem, []).append(path)
    return {(stem if len(paths) == 1 else path.name): path for stem, paths in found.items() for path in paths}


def _of_table(table: Path, roots: list[Path]) -> Iterator[AskedPair]:
    """Rows of a CSV file; paths are relative to its folder and stay in the roots."""
    rows = csv.DictReader(io.StringIO(read_text(table).removeprefix("\ufeff"), newline=""))
    columns = rows.fieldnames or []
    if missing := [side for side in SIDES if side not in columns]:
        raise DataError(f"{table}: no column {' and '.join(missing)} among {', '.join(columns) or 'none'}; {WANTED}")
    number = 0
    for number, row in enumerate(rows, 1):
        for side in SIDES:
            if not row[side]:
                raise DataError(f"{table} row {number}: {side} is empty; write the path of an image")
            fault = fault_of_path(row[side], table.parent, roots, "--image-root")
            if not fault and not is_inside(table.parent / row[side], *roots):
                fault = "is a symbolic link out of the table's folder; name the folder that it leads to by --image-root"
            if fault:
                raise DataError(f"{table} row {number}: {side}: {describe(row[side])} {fault}")
        yield AskedPair(f"{number:05}", *(table.parent / row[side] for side in SIDES))
    if not number:
        raise DataError(f"{table}: no row; {WANTED}")
