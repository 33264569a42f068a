"""Check a dataset's folder before anything is run: `m3diff data check ROOT`.

The layout is known by the annotation files that are there, or given by `--reader`; how a table of one's own is read,
`guess.py` proposes. Then the dataset's own reader reads the folder, and what it finds is counted: pairs and references
by split next to the published counts, rows that cannot be read, missing images. Images are looked for and not opened;
that is for ingest and validate.
"""

import inspect
import os
import re
from collections.abc import Container, Mapping
from contextlib import suppress
from glob import escape
from itertools import chain, count, islice
from pathlib import Path, PureWindowsPath
from typing import Any

from m3diff.commands.inspect.guess import combined, guess, manifests, split_called
from m3diff.datasets import DATASETS, omnidiff
from m3diff.datasets.files import Embedded, quoted
from m3diff.datasets.spec import Row
from m3diff.records.errors import DataError
from m3diff.records.schemas import NO_CHANGE, SPLITS
from m3diff.stages.ingest.params import DatasetEntry
from m3diff.stages.ingest.stage import Doubt, as_yaml, doubts, to_records

FIRST = 5  # problems of one kind that are shown
INSIDE = "#bytes="  # between a manifest and the name of an image that it holds
TABLES = ("omnidiff", "pairs")  # readers of one table, whose layout is known by the columns
HEADER = "before,after,captions,split"
REMEDIES = {
    "has the same id": "one id is one pair: give each its own, or read without ids: options: {columns: {id: null}}",
    "two images, found": "pass over rows that are no pair: options: {pairs_only: true} (reader pairs)",
    "one answer, found": "pass over rows that are no pair: options: {pairs_only: true} (reader pairs)",
}
"""The remedy of the faults that hold these words and name none themselves."""


def check(root: Path, entries: Mapping[str, DatasetEntry], reader: str | None = None) -> tuple[list[str], bool]:
    """Look at one dataset's folder. A dataset of `entries` (`ingest.datasets`) with this root is read as it says there.

    Args:
        reader: what the folder is, where that is not to be found out.

    Returns:
        Lines to show, and whether the folder can be used as it is.

    Raises:
        DataError: the folder is missing, or looks like none of the layouts.
    """
    if not root.is_dir():
        raise DataError(f"{root}: no such folder; name the folder that holds a dataset's annotation files")
    same = (item for item in entries.items() if item[1].root.resolve() == root.resolve())
    known = next((item for item in same if reader in (None, item[1].reader)), None)
    if known:
        (name, entry), notes, asked = known, list[str](), list[Doubt]()
        lines = [f"{root} is {name} ({entry.reader})"]
    else:
        name, entry, notes, asked = recognise(root, entries, reader)
        lines = [f"{root} {'is read as' if reader else 'looks like'} {entry.reader}"]
    licence = DATASETS[entry.reader].licence
    uses = ", ".join(f"{use}: {getattr(licence, use).answer}" for use in ("train", "redistribute", "show"))
    lines.append(f"  licence: {licence.name} ({uses})")
    manifest = entry.options.get("manifest", DATASETS[entry.reader].files)
    files = (
        [manifest] if isinstance(manifest, str) else manifest.values() if isinstance(manifest, Mapping) else manifest
    )
    there = {file: _is_there(root, file) for file in files}
    lines += [f"  {'found  ' if found else 'MISSING'} {file}" for file, found in there.items()]
    lines += [f"  {note}" for note in notes]
    if not all(there.values()):
        return [*lines, "  fetch the missing files again; nothing was read"], False
    sound = True
    if not asked:
        read, sound, asked = _read(name, entry)
        lines += read
    open_ones = [doubt for doubt in asked if doubt.answers and (known or not doubt.sure)]
    lines += [f"  ASK {line}" for doubt in open_ones for line in doubt.question.split("\n")]
    if known:
        lines += [f"    options: {as_yaml(answer)}" for doubt in open_ones for answer in doubt.answers]
        return lines, sound and not open_ones
    possible = combined(entry.options, asked)
    lines.append(f"{'one of these is ' if len(possible) > 1 else ''}the entry for ingest.datasets in params.yaml:")
    for chosen in possible:
        own = {"reader": entry.reader, "root": str(entry.root)} | ({"options": chosen} if chosen else {})
        lines.append(f"    {name}: {as_yaml(own)}")
    if open_ones:
        lines.append("put the one that is right into params.yaml or into a profile, and check again")
    return lines, sound and not open_ones


def recognise(
    root: Path, taken: Container[str] = (), reader: str | None = None
) -> tuple[str, DatasetEntry, list[str], list[Doubt]]:
    """The layout of a folder, else how its table of pairs is read.

    Args:
        taken: names that other datasets have.
        reader: the layout that it is.

    Returns:
        A name for the dataset, its entry for `ingest.datasets`, notes on how it was found, and what is to be asked.

    Raises:
        DataError: it is none.
    """
    reader = reader or _layout(root)
    notes, asked, options = list[str](), list[Doubt](), dict[str, Any]()
    if reader is None or reader in TABLES:
        try:
            options, notes, asked = guess(root)
        except DataError as error:
            raise DataError(_unknown(root, str(error))) from error
        known = inspect.signature(omnidiff.read).parameters
        if reader is None:  # OmniDiff's table has change types and one caption a row
            reader = "omnidiff" if options["manifest"] == "annotations.json" and {*options} <= {*known} else "pairs"
        if reader == "omnidiff":
            options = {option: value for option, value in options.items() if option in known}
    folder = re.sub(r"[^A-Za-z0-9_-]+", "_", root.resolve().name).strip("_") or "pairs"
    named = [reader] if reader != "pairs" else []
    numbered = (f"{folder}_{number}" for number in count(2))
    name = next(each for each in chain(named, [folder], numbered) if each not in taken)
    return name, DatasetEntry(reader=reader, root=root, options=options), notes, asked


def _is_there(root: Path, file: str) -> bool:
    """True if a file, or one of the files of a pattern, is there."""
    return (root / file).is_file() or any(path.is_file() for path in root.glob(file))


def _layout(root: Path) -> str | None:
    """The layout with the largest share of its annotation files in `root`, of equals the one with more files.

    None where that is a table of pairs, or none of the first rows can be read in it."""
    shares = {
        name: (sum(_is_there(root, file) for file in spec.files) / len(spec.files), len(spec.files))
        for name, spec in DATASETS.items()
    }
    best = max(shares, key=lambda name: shares[name])
    if best in TABLES or not shares[best][0]:
        return None
    rows: list[Row] = []
    with suppress(DataError):
        rows.extend(islice(DATASETS[best].read(root), FIRST))
    return None if rows and all(row.fault for row in rows) else best


def _unknown(root: Path, reasons: str) -> str:
    """A message: what is in the folder, why it cannot be read, each layout's files, and a folder in it that has one."""
    paths = sorted(path for path in root.iterdir() if path.name[0] != ".")
    inner = [path for path in paths if path.is_dir() and (manifests(path) or manifests(path / "annotations"))]
    listed = [reason for reason in reasons.split("\n") if reason]
    listed += [f"perhaps you mean `m3diff data check {quoted(path)}`" for path in inner]
    if not manifests(root):
        listed.append(f"no table: write {root / 'pairs.csv'} with the header {HEADER}, a line for a pair")
    seen = ", ".join(path.name for path in paths[:8]) or "nothing"
    wanted = "; ".join(f"{reader}: {', '.join(spec.files)}" for reader, spec in DATASETS.items())
    told = "".join(f"\n  {reason}" for reason in listed)
    return f"{root}: looks like none of the layouts; it holds {seen}.{told}\nSay what it is by --reader: {wanted}"


def _read(name: str, entry: DatasetEntry) -> tuple[list[str], bool, list[Doubt]]:
    """Counts and problems of a folder whose annotation files are all there, whether there are none, and doubts."""
    spec = DATASETS[entry.reader]
    try:
        own_splits = entry.model_copy(update={"train_on": ("train",)})
        read = list(spec.read(entry.root, **entry.options))
        rows, _ = to_records(name, own_splits, map(_place, read))
    except DataError as error:
        return [f"  CANNOT BE READ {error}"], False, []
    faults = [f"{row['source']}: {row['fault']}" for row in rows if row["fault"]]
    images = dict.fromkeys(row[side] for row in rows for side in ("before", "after") if row[side])
    size = {path: os.path.getsize(path) if os.path.isfile(path) else None for path in images if INSIDE not in path}
    missing, empty = ([path for path, found in size.items() if found == wanted] for wanted in (None, 0))
    asked = list(doubts(read, entry.options, entry.reader == "pairs"))
    unknown = [row for row in rows if row["split"] and row["split"] not in SPLITS]
    same = [row for row in read if row.before and row.before == row.after and row.change_types != [NO_CHANGE]]
    problems = {
        "rows that cannot be read": faults,
        "splits that are none of train, val, test": [f"{row['source']}: split {row['split']!r}" for row in unknown],
        "missing images": missing,
        "images without a byte": empty,
        "pairs of one image": [f"{row.source}: both images are {row.before}; name both" for row in same],
        "captions to look at": [doubt.question for doubt in asked if not doubt.answers],
    }
    nearest = min(spec.published, key=lambda part: abs(sum(part.pairs().values()) - len(rows)), default=None)
    lines = _counts(spec.part(name) or nearest, rows)
    lines.append(f"  images {len(images):,}, of them {len(missing):,} missing and {len(empty):,} empty")
    lines += [line for what, found in problems.items() for line in _first(what, found)]
    lines += [f"  {doubt.question}; the entry takes the first" for doubt in asked if doubt.sure]
    passed = [row.source for row in read if row.without_caption]
    lines += _first("pairs without a caption, which are passed over", passed)
    if wordless := sum(not str(text).strip() for row in rows for text in row["references"]):
        lines.append(f"  empty captions: {wordless:,}, which train nothing")
    remedies = [remedy for words, remedy in REMEDIES.items() if any(words in fault for fault in faults)]
    remedies += _of_images(entry.root, read) if faults or missing else []
    if unknown:
        names = {str(row.split) for row in read} - {"None"}
        example = {name: split_called(name) or "train" for name in sorted(names - {*SPLITS})}
        remedies.append(f"say which splits these are, such as options: {as_yaml({'splits': example})} (reader pairs)")
    if remedies:
        lines += ["  what mends it:", *(f"    {remedy}" for remedy in dict.fromkeys(remedies))]
    if not rows:
        lines.append("  NO PAIR at all; fetch the dataset again")
    return lines, bool(rows) and not any(problems.values()), asked


def _place(row: Row) -> Row:
    """The row with embedded images as places in their manifest."""
    before, after = (
        Path(f"{image.manifest}{INSIDE}{image.name}") if isinstance(image, Embedded) else image
        for image in (row.before, row.after)
    )
    return row._replace(before=before, after=after)


def _counts(published: Any, rows: list[dict[str, Any]]) -> list[str]:
    """A line per split: pairs, references and the published ones. A difference is shown, and no fault by itself."""
    heading = f"  {'split':6}{'pairs':>9}{'references':>12}"
    lines = [heading + (f"   published: {'pairs':>8}{'references':>12} ({published.title})" if published else "")]
    for split in SPLITS:
        own = [row for row in rows if row["split"] == split]
        references = sum(len(row["references"]) for row in own)
        line = f"  {split:6}{len(own):9,}{references:12,}"
        if published:
            known = getattr(published, split)
            wrong = known.pairs != len(own) or known.references not in (None, references)
            given = "?" if known.references is None else f"{known.references:,}"
            line += f"{known.pairs:22,}{given:>12}{'  differs' if wrong else ''}"
        lines.append(line)
    if any(line.endswith("  differs") for line in lines):
        lines.append(f"  not the release of {published.title}: a part, another version, or other data in its layout")
    return lines


def _first(what: str, problems: list[str]) -> list[str]:
    """The number of problems and the first of them; nothing where there is none."""
    if not problems:
        return []
    more = [f"    and {len(problems) - FIRST:,} more"] if len(problems) > FIRST else []
    return [f"  {what}: {len(problems):,}", *(f"    {problem}" for problem in problems[:FIRST]), *more]


def _of_images(root: Path, rows: list[Row]) -> list[str]:
    """What mends the first image that is not where a row names it: the file of the folder that is called so."""
    named = dict.fromkeys(side for row in rows for side in (row.before, row.after) if isinstance(side, str) and side)
    name = next((each for each in named if not os.path.isfile(os.path.join(root, each))), None)
    if name is None:
        return []
    parts = [part for part in PureWindowsPath(name).parts if part != ".."]  # whose paths have slashes of both kinds
    called = [escape("/".join(parts[start:])) for start in (-2, -1) if parts]
    near = next(chain.from_iterable(map(root.rglob, called)), None)
    found = f"there is {str(near.relative_to(root))!r}" if near else f"no file below {root} is called so"
    return [
        f"{name!r}: {found}; write paths relative to {root} as the files are called, or complete them by a template: "
        "options: {columns: {before: 'folder/{before}', after: 'folder/{after}'}}; of images elsewhere name the folder "
        "in the entry: image_root"
    ]
