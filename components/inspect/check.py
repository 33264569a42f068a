"""What is wrong with a dataset's folder, before anything is run: `m3diff data check ROOT`.

The layout is told by the annotation files that are there. Then the dataset's own reader reads the folder, and what it
finds is counted: pairs and captions by split beside the published counts, rows that cannot be read, images that lack.
Images are looked for, not decoded; that is for validate.
"""

import os
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet as pq

from components.ingest.rows import to_table
from components.ingest.stage import READERS
from components.datasets.tables import read_table
from components.ingest.params import DatasetEntry
from components.records import SPLITS, DataError

FIRST = 5
"""Problems of one kind that are told."""


class Layout(NamedTuple):
    """How a dataset is known: its annotation files, and the published pairs of train, val and test."""

    files: tuple[str, ...]
    published: dict[str, tuple[int, int, int]]  # by part; one entry for most


LAYOUTS = {
    "clevr_change": Layout(
        ("change_captions.json", "no_change_captions.json", "splits.json", "type_mapping.json"),
        {"CLEVR-Change": (67_660, 3_976, 7_970)},
    ),
    "clevr_dc": Layout(("captions.json", "split.json"), {"CLEVR-DC": (40_800, 2_400, 4_800)}),
    "spot_the_diff": Layout(
        ("annotations/train.json", "annotations/val.json", "annotations/test.json"),
        {"Spot-the-Diff": (8_566, 1_493, 1_270)},
    ),
    "iedit": Layout(("train.json", "valid.json", "test.json"), {"IEdit": (3_061, 383, 495)}),
    "birds_to_words": Layout(("birds-to-words-v1.0.tsv",), {"Birds-to-Words": (2_685, 325, 337)}),
    "omnidiff": Layout(
        ("annotations.json",), {"OmniDiff-Real": (7_007, 799, 803), "OmniDiff-Render": (5_445, 777, 767)}
    ),
    "pairs": Layout(("pairs.csv",), {}),
}
MANIFESTS = ("*.csv", "*.tsv", "*.jsonl", "*.json", "*.parquet")
COLUMNS = {
    "before": ("before", "image1", "img1", "image_before", "source", "a"),
    "after": ("after", "image2", "img2", "image_after", "target", "b"),
    "captions": ("captions", "caption", "description", "sentences", "text"),
    "split": ("split", "subset"),
}
"""What a manifest's columns are often called; a suggestion, never taken without being said."""


class Finding(NamedTuple):
    """`lines` to show, and whether the folder can be used as it is."""

    lines: list[str]
    sound: bool


def check(root: Path, configured: tuple[Dataset, ...] = ()) -> Finding:
    """Look at one dataset's folder. A dataset of `configured` with this root is read with its own options.

    Raises:
        DataError: the folder is missing, or looks like none of the layouts.
    """
    if not root.is_dir():
        raise DataError(f"{root}: no such folder; name the folder that holds a dataset's annotation files")
    known = next((one for one in configured if one.root.resolve() == root.resolve()), None)
    dataset = known or recognise(root)
    files = _annotation_files(dataset)
    lines = [f"{root} looks like {dataset.reader}" if not known else f"{root} is {dataset.name} ({dataset.reader})"]
    lines += [f"  {'found ' if (root / file).is_file() else 'LACKS '} {file}" for file in files]
    if any(not (root / file).is_file() for file in files):
        return Finding([*lines, "  fetch the missing files again; nothing was read"], sound=False)
    found, sound = _read(dataset)
    if not known:
        found += ["the entry for ingest.datasets in params.yaml:", f"  - {_entry(dataset)}"]
    return Finding(lines + found, sound)


def recognise(root: Path) -> Dataset:
    """The layout with most of its annotation files in `root`; else a manifest with columns that could be pairs'."""
    present = {
        reader: sum((root / file).is_file() for file in layout.files) / len(layout.files)
        for reader, layout in LAYOUTS.items()
    }
    best = max(present, key=lambda reader: present[reader])
    if best in ("omnidiff", "pairs") or not present[best]:
        return _recognise_manifest(root)
    return Dataset(name=best, reader=best, root=root)  # type: ignore[arg-type]


def _recognise_manifest(root: Path) -> Dataset:
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
        return Dataset(name=reader, reader=reader, root=root, options=options)  # type: ignore[arg-type]
    deeper = [str(path.parent) for file in ("annotations/train.json", "train.json") for path in root.glob(f"*/{file}")]
    seen = ", ".join(sorted(entry.name for entry in root.iterdir())[:8]) or "nothing"
    wanted = "; ".join(f"{reader}: {', '.join(layout.files)}" for reader, layout in LAYOUTS.items())
    hint = f" Perhaps you mean {deeper[0].removesuffix('/annotations')}." if deeper else ""
    raise DataError(f"{root}: looks like none of the layouts; it holds {seen}.{hint} Expected one of: {wanted}")


def _columns(path: Path) -> set[str]:
    """Column names of a manifest, from its first usable row; none where it cannot be read."""
    try:
        if path.suffix == ".parquet":
            return set(pq.read_schema(path).names)
        return set(next((row for _, row, fault in read_table(path, ()) if not fault and row), {}))
    except (DataError, OSError, ValueError):
        return set()


def _annotation_files(dataset: Dataset) -> tuple[str, ...]:
    manifest = dataset.options.get("manifest")
    return (manifest,) if manifest else LAYOUTS[dataset.reader].files


def _read(dataset: Dataset) -> tuple[list[str], bool]:
    """Counts and problems of a folder whose annotation files are all there."""
    try:
        own_splits = dataset.model_copy(update={"train_on": ["train"]})
        table, _ = to_table(own_splits, READERS[dataset.reader](dataset.root, **dataset.options))
    except DataError as error:
        return [f"  CANNOT BE READ {error}"], False
    rows = table.select(["split", "captions", "before", "after", "source", "fault"]).to_pylist()
    faults = [f"{row['source']}: {row['fault']}" for row in rows if row["fault"]]
    images = dict.fromkeys(row[side] for row in rows for side in ("before", "after") if row[side])
    missing = [path for path in images if not os.path.isfile(path)]
    empty = [path for path in images if os.path.isfile(path) and not os.path.getsize(path)]
    unknown = [
        f"{row['source']}: split {row['split']!r}" for row in rows if row["split"] and row["split"] not in SPLITS
    ]
    lines = [
        *_counts(dataset, rows),
        f"  images {len(images):,}, of them {len(missing):,} missing and {len(empty):,} empty",
        *_told("rows that cannot be read", faults),
        *_told("splits that are none of train, val, test", unknown),
        *_told("images that lack", missing),
        *_told("images without a byte", empty),
    ]
    if not rows:
        lines.append("  NO PAIR at all; fetch the dataset again")
    return lines, bool(rows) and not (faults or unknown or missing or empty)


def _counts(dataset: Dataset, rows: list[dict[str, Any]]) -> list[str]:
    """A line per split: pairs, captions and the published pairs. A difference is told, and no fault by itself."""
    pairs = Counter(row["split"] for row in rows)
    captions = Counter[str]()
    for row in rows:
        captions[row["split"]] += len(row["captions"])
    parts = LAYOUTS[dataset.reader].published
    near = min(parts, key=lambda part: abs(sum(parts[part]) - len(rows)), default=None)
    published = parts[near] if near else ()
    lines = [f"  {'split':6}{'pairs':>9}{'captions':>10}" + (f"{'published pairs':>18} ({near})" if near else "")]
    for number, split in enumerate(SPLITS):
        line = f"  {split:6}{pairs[split]:9,}{captions[split]:10,}"
        if published:
            line += f"{published[number]:18,}" + ("" if published[number] == pairs[split] else "  differs")
        lines.append(line)
    if published and [pairs[split] for split in SPLITS] != list(published):
        lines.append(f"  not the release of {near}: a part of it, another version, or other data in its layout")
    return lines


def _told(what: str, problems: list[str]) -> list[str]:
    if not problems:
        return []
    more = [f"    and {len(problems) - FIRST:,} more"] if len(problems) > FIRST else []
    return [f"  {what}: {len(problems):,}", *(f"    {problem}" for problem in problems[:FIRST]), *more]


def _entry(dataset: Dataset) -> str:
    options = f", options: {_flow(dataset.options)}" if dataset.options else ""
    return f"{{name: {dataset.name}, reader: {dataset.reader}, root: {dataset.root}{options}}}"


def _flow(options: dict[str, Any]) -> str:
    """Options in YAML's flow style."""
    told = (f"{key}: {_flow(value) if isinstance(value, dict) else value}" for key, value in options.items())
    return f"{{{', '.join(told)}}}"
