"""From the rows that a reader yields to the table of records. A row that cannot be read stays, with a `fault`."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa

from m3diff.datasets.files import describe, fault_of_path, is_inside
from m3diff.datasets.spec import Row
from m3diff.records.schemas import RAW_SCHEMA
from m3diff.stages.ingest.params import DatasetEntry


def to_table(name: str, entry: DatasetEntry, rows: Iterable[Row]) -> tuple[pa.Table, int]:
    """All rows as records, in the reader's order, and the number of annotation rows. Rows that have no caption by the
    dataset's entry are left out.

    The records have RAW_SCHEMA and no digests yet: images are read later, over all cores.
    """
    rows = list(rows)
    records = [_record(name, entry, row) for row in rows if not row.without_caption]
    if not entry.follow_links:
        _refuse_leaving(_roots(entry), records)
    return pa.Table.from_pylist(records, schema=RAW_SCHEMA), sum(row.raw_rows for row in rows)


def _record(dataset: str, entry: DatasetEntry, row: Row) -> dict[str, Any]:
    """Typed fields; what cannot be typed becomes null (or no references) and is named in `fault`."""
    faults = [row.fault] if row.fault else []
    name = _text("id", row.name, faults)
    scene = _text("scene", row.scene, faults)
    split = _text("split", row.split, faults)
    return {
        "id": name and f"{dataset}/{name}",
        "dataset": dataset,
        "split": "train" if split in entry.train_on else split,
        "own_split": split,
        "scene": scene and f"{dataset}/{scene}",
        "before": _image("before", entry, row.before, faults),
        "after": _image("after", entry, row.after, faults),
        "references": _references(row.references, faults),
        "change_types": row.change_types,
        "source": _printable(row.source),
        "fault": "; ".join(map(_printable, faults)) or None,
    }


def _text(field: str, value: Any, faults: list[str]) -> str | None:
    """The value where it is usable text. A null is no second fault where one is known: it follows from it."""
    if not isinstance(value, str):
        if value is not None or not faults:
            faults.append(f"{field}: expected text, found {describe(value)}")
    elif not value:
        faults.append(f"{field}: is empty")
    elif not value.isascii() and not _encodes(value):
        faults.append(f"{field}: holds half a surrogate pair, which is no character: {describe(value)}")
    else:
        return value
    return None


def _references(value: Any, faults: list[str]) -> list[str]:
    if not isinstance(value, list):
        if value is not None or not faults:
            faults.append(f"references: expected a list of text, found {describe(value)}")
        return []
    kept = []
    for number, text in enumerate(value):
        if not isinstance(text, str):
            faults.append(f"reference {number}: expected text, found {describe(text)}")
        elif not text.isascii() and not _encodes(text):
            faults.append(f"reference {number}: holds half a surrogate pair, which is no character: {describe(text)}")
        else:
            kept.append(text)
    return kept


def _image(field: str, entry: DatasetEntry, value: Any, faults: list[str]) -> str | None:
    """`root/value`, refused where it would lead out of the entry's roots; a path as it is, which ingest itself has
    written."""
    if isinstance(value, Path):
        return str(value)
    name = _text(field, value, faults)
    if name is None:
        return None
    if fault := fault_of_path(name, entry.root, _roots(entry)[1:]):
        faults.append(f"{field}: {describe(value)} {fault}")
        return None
    path = os.path.join(entry.root, name)
    return os.path.normpath(path) if entry.image_root else path


def _roots(entry: DatasetEntry) -> list[Path]:
    """The folders that images may lie in."""
    return [entry.root, *([entry.image_root] if entry.image_root else [])]


def _refuse_leaving(roots: list[Path], records: list[dict[str, Any]]) -> None:
    """Fault every record with an image that a symbolic link leads out of the roots. Each folder is listed once."""
    tops = [os.path.abspath(root) for root in roots]
    named = {os.path.dirname(record[side]) for record in records for side in ("before", "after") if record[side]}
    folders = [folder for folder in named if any(Path(os.path.abspath(folder)).is_relative_to(top) for top in tops)]
    leaving = {path for folder in folders for path in _links_out(folder, roots)}
    gone = {folder for folder in folders if not is_inside(folder, *roots)}
    if not leaving and not gone:
        return
    for record in records:
        for field in ("before", "after"):
            path = record[field]
            if path and (path in leaving or os.path.dirname(path) in gone):
                fault = (
                    f"{field}: {path} is a symbolic link out of the dataset's root; copy the file or set follow_links"
                )
                record["fault"] = "; ".join(filter(None, (record["fault"], fault)))
                record[field] = None


def _links_out(folder: str, roots: list[Path]) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            links = [entry.path for entry in entries if entry.is_symlink()]
    except OSError:
        return []  # a missing folder: validate names each missing image
    return [link for link in links if not is_inside(link, *roots)]


def _encodes(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _printable(value: str) -> str:
    return value if value.isascii() else value.encode("utf-8", "backslashreplace").decode()
