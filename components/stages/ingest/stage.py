"""ingest: one dataset's own layout on disk -> records with the digest of every image.

Image bytes enter here and nowhere else: later stages depend on the records, which name the content of each image, and
not on the dataset's folder. Each dataset is a stage of its own in DVC, so that a new one leaves the others alone.
"""

import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from m3diff.datasets import DATASETS
from m3diff.datasets.files import describe, fault_of_path, is_inside
from m3diff.datasets.spec import Row, unpacked
from m3diff.images.check import check_images
from m3diff.records.errors import DataError
from m3diff.records.files import StageReport, write_atomic
from m3diff.records.schemas import RAW_SCHEMA
from m3diff.stages.ingest.doubts import as_yaml, doubts
from m3diff.stages.ingest.params import DatasetEntry

MAX_DECODED_PIXELS = 100_000_000
"""A larger image is hashed and not decoded here; validate decides with its own limit."""


class IngestReport(StageReport):
    """Counts of one dataset; pairs and references by split. `rows_in` are rows of its annotation files."""

    dataset: str
    reader: str
    pairs: dict[str, int]
    references: dict[str, int]  # empty ones are counted
    empty_references: int
    faults: int  # rows that could not be read; validate quarantines them
    images: int  # distinct paths
    unread_images: int  # missing or unreadable; validate quarantines their pairs


def ingest(name: str, entry: DatasetEntry, image_cache: Path, out: Path) -> IngestReport:
    """Write `out/<name>/records.parquet` (RAW_SCHEMA, every annotation row kept) and `out/<name>.json`, the report.

    A dataset with a grammar gets it as `out/<name>/grammar.json`, one whose images stand in its manifest gets them in
    `out/<name>/images`. The folder is made anew.

    Args:
        name: of the dataset in `params.yaml`; the namespace of its ids.
        image_cache: what is known of images by content; it changes no output.

    Raises:
        DataError: an annotation file cannot be used, there is no pair, or the meaning of captions is in doubt.
    """
    read = list(DATASETS[entry.reader].read(entry.root, **entry.options))
    _refuse_doubts(name, entry, read)
    folder = out / name
    shutil.rmtree(folder, ignore_errors=True)
    records, annotation_rows = to_records(name, entry, unpacked(read, folder / "images"))
    if not records:
        why = "no pair with a caption; see `no_caption` in its options" if read else "no pair; fetch the dataset again"
        raise DataError(f"ingest.datasets {name!r}: {entry.root} holds {why}")
    paths = pl.Series([record[side] for side in ("before", "after") for record in records], dtype=pl.String)
    images = check_images(paths, MAX_DECODED_PIXELS, image_cache, f"ingest {name}")
    digests = dict(images.select("path", "digest").iter_rows())
    for record in records:
        record |= {f"{side}_sha256": digests.get(record[side]) for side in ("before", "after")}
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(records, RAW_SCHEMA), folder / "records.parquet", compression="zstd")
    if grammar := DATASETS[entry.reader].grammar:
        write_atomic(folder / "grammar.json", json.dumps(grammar(entry.root), indent=1) + "\n")
    pairs, references = Counter[str](), Counter[str]()
    for record in sorted(records, key=lambda record: record["split"] or "?"):
        pairs[record["split"] or "?"] += 1
        references[record["split"] or "?"] += len(record["references"])
    report = IngestReport(
        stage="ingest",
        rows_in=annotation_rows,
        rows_out=len(records),
        dataset=name,
        reader=entry.reader,
        pairs=pairs,
        references=references,
        empty_references=sum(record["references"].count("") for record in records),
        faults=sum(record["fault"] is not None for record in records),
        images=images.height,
        unread_images=images["digest"].null_count(),
    )
    return report.write(out / f"{name}.json")


def _refuse_doubts(name: str, entry: DatasetEntry, rows: list[Row]) -> None:
    found = [
        doubt.question + "".join(f"\n    options: {as_yaml(answer)}" for answer in doubt.answers)
        for doubt in doubts(rows, entry.options, entry.reader == "pairs")
    ]
    if found:
        told = "\n  ".join(found)
        raise DataError(
            f"ingest.datasets {name!r}: {entry.root}: captions are in doubt:\n  {told}\n"
            f"put the right options into the entry, or mend the file; `m3diff data check {entry.root}` says more"
        )
    if left_out := [row for row in rows if row.without_caption]:
        print(f"ingest {name}: {len(left_out):,} pairs without a caption are passed over, first {left_out[0].source}")


def to_records(name: str, entry: DatasetEntry, rows: Iterable[Row]) -> tuple[list[dict[str, Any]], int]:
    """All rows as records of RAW_SCHEMA without digests, in the reader's order, and the number of annotation rows.

    Rows that have no caption by the dataset's entry are left out.
    """
    rows = list(rows)
    roots = [entry.root, *filter(None, [entry.image_root])]

    @cache
    def stays(path: str) -> bool:
        return entry.follow_links or is_inside(path, *roots)

    records = [_record(name, entry, row, stays) for row in rows if not row.without_caption]
    return records, sum(row.raw_rows for row in rows)


def _record(dataset: str, entry: DatasetEntry, row: Row, stays: Callable[[str], bool]) -> dict[str, Any]:
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
        "before": _image("before", entry, row.before, faults, stays),
        "after": _image("after", entry, row.after, faults, stays),
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
    elif not value.isascii() and value.encode(errors="ignore").decode() != value:
        faults.append(f"{field}: holds half a surrogate pair, which is no character: {describe(value)}")
    else:
        return value
    return None


def _references(value: Any, faults: list[str]) -> list[str]:
    if not isinstance(value, list):
        if value is not None or not faults:
            faults.append(f"references: expected a list of text, found {describe(value)}")
        return []
    return [text for number, text in enumerate(value) if text == "" or _text(f"reference {number}", text, faults)]


def _image(field: str, entry: DatasetEntry, value: Any, faults: list[str], stays: Callable[[str], bool]) -> str | None:
    """`root/value`, refused where it or a link on its way leads out of the entry's roots; a path as it is, which ingest
    itself has written.

    Args:
        stays: True for a path that no link leads out. It is asked for a folder once, and for files that are links.
    """
    if isinstance(value, Path):
        return str(value)
    name = _text(field, value, faults)
    if name is None:
        return None
    if fault := fault_of_path(name, entry.root, [*filter(None, [entry.image_root])]):
        faults.append(f"{field}: {describe(value)} {fault}")
        return None
    path = os.path.join(entry.root, name)
    path = os.path.normpath(path) if entry.image_root else path
    if stays(os.path.dirname(path)) and not (os.path.islink(path) and not stays(path)):
        return path
    faults.append(f"{field}: {path} is a symbolic link out of the dataset's root; copy the file or set follow_links")
    return None


def _printable(value: str) -> str:
    return value if value.isascii() else value.encode("utf-8", "backslashreplace").decode()
