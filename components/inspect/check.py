"""What is wrong with a dataset's folder, before anything is run: `m3diff data check ROOT`.

The layout is known by the annotation files that are there. Then the dataset's own reader reads the folder, and what it
finds is counted: pairs and references by split beside the published counts, rows that cannot be read, missing images.
Images are looked for, not decoded; that is for ingest and validate.
"""

import json
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet as pq
import yaml

from components.datasets import DATASETS
from components.datasets.spec import DatasetSpec, Published
from components.datasets.tables import read_table
from components.ingest.params import DatasetEntry
from components.ingest.table import to_table
from components.records import SPLITS, DataError

FIRST = 5
"""Problems of one kind that are shown."""

TABLES = ("omnidiff", "pairs")
"""Readers of one table whose columns are named in the options; their layout is known by the columns."""

MANIFESTS = ("*.csv", "*.tsv", "*.jsonl", "*.json", "*.parquet")
COLUMNS = {
    "before": ("before", "image1", "img1", "image_before", "source", "a"),
    "after": ("after", "image2", "img2", "image_after", "target", "b"),
    "captions": ("captions", "caption", "description", "sentences", "text"),
    "split": ("split", "subset"),
}
"""What a manifest's columns are often called; a suggestion, never taken without being shown."""


class Finding(NamedTuple):
    """`lines` to show, and whether the folder can be used as it is."""

    lines: list[str]
    sound: bool


def check(root: Path, entries: Mapping[str, DatasetEntry]) -> Finding:
    """Look at one dataset's folder. A dataset of `entries` (`ingest.datasets`) with this root is read as it says there.

    Raises:
        DataError: the folder is missing, or looks like none of the layouts.
    """
    if not root.is_dir():
        raise DataError(f"{root}: no such folder; name the folder that holds a dataset's annotation files")
    known = next(((name, entry) for name, entry in entries.items() if entry.root.resolve() == root.resolve()), None)
    name, entry = known or recognise(root)
    spec = DATASETS[entry.reader]
    files = _annotation_files(entry)
    lines = [f"{root} is {name} ({entry.reader})" if known else f"{root} looks like {entry.reader}"]
    lines.append(_licence(spec))
    lines += [f"  {'found  ' if _is_there(root, file) else 'MISSING'} {file}" for file in files]
    if not all(_is_there(root, file) for file in files):
        return Finding([*lines, "  fetch the missing files again; nothing was read"], sound=False)
    found, sound = _read(name, entry)
    if not known:
        found += ["the entry for ingest.datasets in params.yaml:", f"    {_as_yaml(name, entry)}"]
    return Finding(lines + found, sound)


def recognise(root: Path) -> tuple[str, DatasetEntry]:
    """Name and entry of the layout with the largest share of its annotation files in `root`, of equals the one with
    more files; else of a manifest with columns that could be pairs'."""
    present = {
        reader: (sum(_is_there(root, file) for file in spec.files) / len(spec.files), len(spec.files))
        for reader, spec in DATASETS.items()
    }
    best = max(present, key=lambda reader: present[reader])
    if best in TABLES or not present[best][0]:
        return _recognise_manifest(root)
    return best, DatasetEntry(reader=best, root=root)


def _is_there(root: Path, file: str) -> bool:
    """Whether a file, or one of the files of a pattern, is there."""
    return any(path.is_file() for path in root.glob(file))


def _recognise_manifest(root: Path) -> tuple[str, DatasetEntry]:
    """A table of one's own, or OmniDiff's, which has change types and one caption a row."""
    for path in sorted(path for pattern in MANIFESTS for path in root.glob(pattern)):
        columns = _columns(path)
        named = {field: next((name for name in names if name in columns), None) for field, names in COLUMNS.items()}
        if not all(named[field] for field in ("before", "after", "captions")):
            continue
        options: dict[str, Any] = {"manifest": path.name}
        if renamed := {field: name for field, name in named.items() if name and name != field}:
            options["columns"] = renamed
        if not named["split"]:
            options["split"] = "train"
        reader = "omnidiff" if path.name == "annotations.json" else "pairs"
        return reader, DatasetEntry(reader=reader, root=root, options=options)
    raise DataError(_unknown(root))


def _unknown(root: Path) -> str:
    """What the folder holds, what the layouts want, and a folder below that looks like one of them."""
    deeper = [str(path.parent) for file in ("annotations/train.json", "train.json") for path in root.glob(f"*/{file}")]
    seen = ", ".join(sorted(entry.name for entry in root.iterdir())[:8]) or "nothing"
    wanted = "; ".join(f"{reader}: {', '.join(spec.files)}" for reader, spec in DATASETS.items())
    hint = f" Perhaps you mean {deeper[0].removesuffix('/annotations')}." if deeper else ""
    return f"{root}: looks like none of the layouts; it holds {seen}.{hint} Expected one of: {wanted}"


def _columns(path: Path) -> set[str]:
    """Column names of a manifest, from its first usable row; none where it cannot be read."""
    try:
        if path.suffix == ".parquet":
            return set(pq.read_schema(path).names)
        return set(next((row for _, row, fault in read_table(path, ()) if not fault and row), {}))
    except (DataError, OSError, ValueError):
        return set()


def _annotation_files(entry: DatasetEntry) -> tuple[str, ...]:
    manifest = entry.options.get("manifest")
    return (manifest,) if manifest else DATASETS[entry.reader].files


def _licence(spec: DatasetSpec) -> str:
    """The licence and what it says of each use."""
    uses = ", ".join(f"{use}: {getattr(spec.licence, use).answer}" for use in ("train", "redistribute", "show"))
    return f"  licence: {spec.licence.name} ({uses})"


def _read(name: str, entry: DatasetEntry) -> tuple[list[str], bool]:
    """Counts and problems of a folder whose annotation files are all there."""
    try:
        own_splits = entry.model_copy(update={"train_on": ("train",)})
        table, _ = to_table(name, own_splits, DATASETS[entry.reader].read(entry.root, **entry.options))
    except DataError as error:
        return [f"  CANNOT BE READ {error}"], False
    rows = table.select(["split", "references", "before", "after", "source", "fault"]).to_pylist()
    faults = [f"{row['source']}: {row['fault']}" for row in rows if row["fault"]]
    images = dict.fromkeys(row[side] for row in rows for side in ("before", "after") if row[side])
    missing = [path for path in images if not os.path.isfile(path)]
    empty = [path for path in images if os.path.isfile(path) and not os.path.getsize(path)]
    unknown = [
        f"{row['source']}: split {row['split']!r}" for row in rows if row["split"] and row["split"] not in SPLITS
    ]
    lines = [
        *_counts(_nearest(name, DATASETS[entry.reader], len(rows)), rows),
        f"  images {len(images):,}, of them {len(missing):,} missing and {len(empty):,} empty",
        *_first("rows that cannot be read", faults),
        *_first("splits that are none of train, val, test", unknown),
        *_first("missing images", missing),
        *_first("images without a byte", empty),
    ]
    if not rows:
        lines.append("  NO PAIR at all; fetch the dataset again")
    return lines, bool(rows) and not (faults or unknown or missing or empty)


def _nearest(name: str, spec: DatasetSpec, pairs: int) -> Published | None:
    """The published part that is called so; else the one with about as many pairs."""
    return spec.part(name) or min(
        spec.published, key=lambda part: abs(sum(part.pairs().values()) - pairs), default=None
    )


def _counts(published: Published | None, rows: list[dict[str, Any]]) -> list[str]:
    """A line per split: pairs, references and the published ones. A difference is shown, and no fault by itself."""
    pairs = Counter(row["split"] for row in rows)
    references = Counter[str]()
    for row in rows:
        references[row["split"]] += len(row["references"])
    heading = f"  {'split':6}{'pairs':>9}{'references':>12}"
    lines = [heading + (f"   published: {'pairs':>8}{'references':>12} ({published.title})" if published else "")]
    differs = False
    for split in SPLITS:
        line = f"  {split:6}{pairs[split]:9,}{references[split]:12,}"
        if published:
            count = getattr(published, split)
            wrong = count.pairs != pairs[split] or count.references not in (None, references[split])
            given = "?" if count.references is None else f"{count.references:,}"
            line += f"{count.pairs:22,}{given:>12}{'  differs' if wrong else ''}"
            differs = differs or wrong
        lines.append(line)
    if published and differs:
        lines.append(f"  not the release of {published.title}: a part, another version, or other data in its layout")
    return lines


def _first(what: str, problems: list[str]) -> list[str]:
    """The number of problems and the first of them; nothing where there is none."""
    if not problems:
        return []
    more = [f"    and {len(problems) - FIRST:,} more"] if len(problems) > FIRST else []
    return [f"  {what}: {len(problems):,}", *(f"    {problem}" for problem in problems[:FIRST]), *more]


def _as_yaml(name: str, entry: DatasetEntry) -> str:
    """The entry on one line, as it goes into `params.yaml`."""
    options = {"options": json.loads(json.dumps(entry.options))} if entry.options else {}
    value = {"reader": entry.reader, "root": str(entry.root)} | options
    return f"{name}: {yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10_000).strip()}"
