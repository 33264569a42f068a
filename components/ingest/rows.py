"""What a reader yields, and its way into the table of records. A row that cannot be read stays, with a `fault`."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from components.datasets.files import describe, describe_kind
from components.ingest.params import DatasetEntry
from components.records import RAW_SCHEMA


class Row(NamedTuple):
    """One pair as the reader found it, unchecked. Image paths are relative to the dataset's root."""

    name: Any
    split: Any
    scene: Any  # pairs of one scene must share a split
    before: Any
    after: Any
    captions: Any
    change_types: list[str]
    source: str  # file and row or key, relative to the root
    fault: str | None = None  # what the reader itself found wrong
    raw_rows: int = 1  # rows of the annotation file that were merged into this one


def is_scene(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def fault_in(record: Any, fields: Mapping[str, type]) -> str | None:
    """What keeps an annotation record from having these fields with these types; None where it has them."""
    if not isinstance(record, dict):
        return f"record: expected an object, found {describe(record)}"
    for field, kind in fields.items():
        if field not in record:
            return f"{field}: is missing"
        if not isinstance(record[field], kind):
            return f"{field}: expected {describe_kind(kind)}, found {describe(record[field])}"
        if record[field] == "":
            return f"{field}: is empty"
    return None


def to_table(dataset: Dataset, rows: Iterable[Row]) -> tuple[pa.Table, int]:
    """All rows as records with RAW_SCHEMA, in the reader's order, and the number of annotation rows they came from."""
    rows = list(rows)
    records = [_record(dataset, row) for row in rows]
    if not dataset.follow_links:
        _refuse_leaving(dataset.root, records)
    return pa.Table.from_pylist(records, schema=RAW_SCHEMA), sum(row.raw_rows for row in rows)


def _record(dataset: Dataset, row: Row) -> dict[str, Any]:
    """Typed fields; what cannot be typed becomes null (or no captions) and is named in `fault`."""
    faults = [row.fault] if row.fault else []
    name = _text("id", row.name, faults)
    scene = _text("scene", row.scene, faults)
    return {
        "id": name and f"{dataset.name}/{name}",
        "dataset": dataset.name,
        "split": "train" if row.split in dataset.train_on else _text("split", row.split, faults),
        "scene": scene and f"{dataset.name}/{scene}",
        "before": _image("before", dataset.root, row.before, faults),
        "after": _image("after", dataset.root, row.after, faults),
        "captions": _captions(row.captions, faults),
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


def _captions(value: Any, faults: list[str]) -> list[str]:
    if not isinstance(value, list):
        if value is not None or not faults:
            faults.append(f"captions: expected a list of text, found {describe(value)}")
        return []
    kept = []
    for number, caption in enumerate(value):
        if not isinstance(caption, str):
            faults.append(f"caption {number}: expected text, found {describe(caption)}")
        elif not caption.isascii() and not _encodes(caption):
            faults.append(f"caption {number}: holds half a surrogate pair, which is no character: {describe(caption)}")
        else:
            kept.append(caption)
    return kept


def _image(field: str, root: Path, value: Any, faults: list[str]) -> str | None:
    """`root/value`, refused where it would lead out of the root."""
    name = _text(field, value, faults)
    if name is None:
        return None
    if name.startswith("/") or ".." in name.split("/") or "\0" in name:
        faults.append(f"{field}: {describe(value)} leads out of the dataset's root, which is refused")
        return None
    return os.path.join(root, name)


def _refuse_leaving(root: Path, records: list[dict[str, Any]]) -> None:
    """Fault every record with an image that a symbolic link leads out of the root. Each folder is listed once."""
    real_root = os.path.realpath(root)
    folders = {os.path.dirname(r[field]) for r in records for field in ("before", "after") if r[field]}
    leaving = {path for folder in folders for path in _links_out(folder, real_root)}
    gone = {folder for folder in folders if not _inside(folder, real_root)}
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


def _links_out(folder: str, real_root: str) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            links = [entry.path for entry in entries if entry.is_symlink()]
    except OSError:
        return []  # a missing folder: validate names each missing image
    return [link for link in links if not _inside(link, real_root)]


def _inside(path: str, real_root: str) -> bool:
    real = os.path.realpath(path)
    return real == real_root or real.startswith(real_root + os.sep)


def _encodes(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _printable(value: str) -> str:
    return value if value.isascii() else value.encode("utf-8", "backslashreplace").decode()
