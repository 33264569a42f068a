"""What is wrong with a dataset's folder, before anything is run: `m3diff data check ROOT`.

The layout is known by the annotation files that are there, or said by `--reader`; how a table of one's own is read,
`manifest.py` guesses. Then the dataset's own reader reads the folder, and what it finds is counted: pairs and
references by split beside the published counts, rows that cannot be read, missing images. Images are looked for and
their first bytes read, not decoded; that is for ingest and validate. What mends a mistake says `mistakes.py`.
"""

import inspect
import os
import re
from collections import Counter
from collections.abc import Container, Mapping
from contextlib import suppress
from itertools import chain, count, islice
from pathlib import Path
from typing import Any, NamedTuple

from m3diff.commands.inspect import mistakes
from m3diff.commands.inspect.manifest import Guess, guess
from m3diff.datasets import DATASETS, omnidiff
from m3diff.datasets.files import quoted
from m3diff.datasets.pairs import files_called
from m3diff.datasets.spec import DatasetSpec, Published, Row
from m3diff.datasets.tables import Embedded
from m3diff.records.errors import DataError
from m3diff.records.schemas import SPLITS
from m3diff.stages.ingest.doubts import Doubt, as_yaml, doubts
from m3diff.stages.ingest.params import DatasetEntry
from m3diff.stages.ingest.stage import to_table

FIRST = 5
"""Problems of one kind that are shown."""

INSIDE = "#bytes="
"""Between a manifest and the name of an image that stands in it."""

TABLES = ("omnidiff", "pairs")
"""Readers of one table whose columns are named in the options; their layout is known by the columns."""


class Finding(NamedTuple):
    """`lines` to show, and whether the folder can be used as it is."""

    lines: list[str]
    sound: bool


def check(root: Path, entries: Mapping[str, DatasetEntry], reader: str | None = None) -> Finding:
    """Look at one dataset's folder. A dataset of `entries` (`ingest.datasets`) with this root is read as it says there.

    Args:
        reader: what the folder is, where that is not to be found out.

    Raises:
        DataError: the folder is missing, or looks like none of the layouts.
    """
    _check_folder(root)
    known = next(((name, entry) for name, entry in entries.items() if entry.root.resolve() == root.resolve()), None)
    if known and reader in (None, known[1].reader):
        (name, entry), notes, guessed = known, list[str](), list[Doubt]()
        lines = [f"{root} is {name} ({entry.reader})"]
    else:
        known = None
        name, entry, notes, guessed = recognise(root, entries, reader)
        lines = [f"{root} {'is read as' if reader else 'looks like'} {entry.reader}"]
    licence = DATASETS[entry.reader].licence
    uses = ", ".join(f"{use}: {getattr(licence, use).answer}" for use in ("train", "redistribute", "show"))
    lines.append(f"  licence: {licence.name} ({uses})")
    files = _annotation_files(entry)
    lines += [f"  {'found  ' if _is_there(root, file) else 'MISSING'} {file}" for file in files]
    lines += [f"  {note}" for note in notes]
    if not all(_is_there(root, file) for file in files):
        return Finding([*lines, "  fetch the missing files again; nothing was read"], sound=False)
    found, sound, asked = ([], True, guessed) if guessed else _read(name, entry)
    open_ones = [doubt for doubt in asked if doubt.answers and (known or not doubt.sure)]
    lines += [*found, *(f"  ASK {line}" for doubt in open_ones for line in doubt.question.split("\n"))]
    if known:
        lines += [f"    options: {as_yaml(answer)}" for doubt in open_ones for answer in doubt.answers]
        return Finding(lines, sound and not open_ones)
    answered = [doubt if doubt in open_ones else doubt._replace(answers=doubt.answers[:1]) for doubt in asked]
    possible = Guess(entry.options, [], [doubt for doubt in answered if doubt.answers]).entries()
    lines.append(f"{'one of these is ' if len(possible) > 1 else ''}the entry for ingest.datasets in params.yaml:")
    lines += [f"    {name}: {as_yaml(_plain(entry, options))}" for options in possible]
    if open_ones:
        lines.append("put the one that is right into params.yaml or into a profile, and check again")
    return Finding(lines, sound and not open_ones)


def _check_folder(root: Path) -> None:
    if root.is_file():
        raise DataError(f"{root}: is a file; name its folder: `m3diff data check {quoted(root.parent)}`")
    if not root.is_dir():
        raise DataError(f"{root}: no such folder; name the folder that holds a dataset's annotation files")
    try:
        list(root.iterdir())
    except OSError as error:
        raise DataError(
            f"{root}: cannot be read: {error.strerror}; check its rights: `chmod u+rx {quoted(root)}`"
        ) from error


class Recognised(NamedTuple):
    """An entry for `ingest.datasets`, a name for it, notes on how it was found, and what is to be asked before."""

    name: str
    entry: DatasetEntry
    notes: list[str]
    doubts: list[Doubt]


def recognise(root: Path, taken: Container[str] = (), reader: str | None = None) -> Recognised:
    """The layout with the largest share of its annotation files in `root`, of equals the one with more files; else a
    table of pairs.

    Args:
        taken: names that other datasets have.
        reader: the layout that it is.

    Raises:
        DataError: it is none.
    """
    if reader and reader not in TABLES:
        return Recognised(_free(reader, root, taken), DatasetEntry(reader=reader, root=root), [], [])
    if not reader and (other := mistakes.foreign(root)):
        raise DataError(f"{root}: {other}")
    present = {
        name: (sum(_is_there(root, file) for file in spec.files) / len(spec.files), len(spec.files))
        for name, spec in DATASETS.items()
    }
    best = max(present, key=lambda name: present[name])
    if not reader and best not in TABLES and present[best][0] and not _is_own(root, best):
        return Recognised(_free(best, root, taken), DatasetEntry(reader=best, root=root), [], [])
    return _recognise_manifest(root, taken, reader)


def _is_there(root: Path, file: str) -> bool:
    """Whether a file, or one of the files of a pattern, is there."""
    return (root / file).is_file() or any(path.is_file() for path in root.glob(file))


def _is_own(root: Path, reader: str) -> bool:
    """Whether files that are called as a layout's are a table of pairs: with the documented columns, or such that none
    of the first rows is one of the layout."""
    try:
        table = guess(root)
    except DataError:
        return False
    if not {"before", "after", "images"} & table.options.get("columns", {}).keys():
        return True
    rows: list[Row] = []
    with suppress(DataError):
        rows.extend(islice(DATASETS[reader].read(root), FIRST))
    return bool(rows) and all(row.fault for row in rows)


def _recognise_manifest(root: Path, taken: Container[str], reader: str | None) -> Recognised:
    """A table of one's own, or OmniDiff's, which has change types and one caption a row."""
    try:
        options, notes, doubts = guess(root)
    except DataError as error:
        raise DataError(_unknown(root, str(error))) from error
    more = [option for option in options if option not in inspect.signature(omnidiff.read).parameters]
    if reader is None:
        reader = "omnidiff" if options["manifest"] == "annotations.json" and more in ([], ["splits"]) else "pairs"
    if reader == "omnidiff":
        options = {option: value for option, value in options.items() if option not in more}
        notes.extend(f"the reader omnidiff has no option `{option}`; the reader pairs has" for option in more)
    name = _free(reader if reader != "pairs" else _word(root), root, taken)
    return Recognised(name, DatasetEntry(reader=reader, root=root, options=options), notes, doubts)


def _word(root: Path) -> str:
    """The folder's name as a dataset may be called."""
    return re.sub(r"[^A-Za-z0-9_-]+", "_", root.resolve().name).strip("_") or "pairs"


def _free(name: str, root: Path, taken: Container[str]) -> str:
    """The name, the folder's where it is taken, or that with a number."""
    folder = _word(root)
    numbered = (f"{folder}_{number}" for number in count(2))
    return next(each for each in chain((name, folder), numbered) if each not in taken)


def _unknown(root: Path, reasons: str) -> str:
    """What the folder holds, why it cannot be read, what the layouts want, and a folder below that looks like one."""
    deeper = [str(path.parent) for file in ("annotations/train.json", "train.json") for path in root.glob(f"*/{file}")]
    seen = ", ".join(sorted(entry.name for entry in root.iterdir())[:8]) or "nothing"
    wanted = "; ".join(f"{reader}: {', '.join(spec.files)}" for reader, spec in DATASETS.items())
    hint = f" Perhaps you mean {deeper[0].removesuffix('/annotations')}." if deeper else ""
    found = [*filter(None, reasons.split("\n")), *mistakes.in_folder(root)]
    listed = "".join(f"\n  {reason}" for reason in found)
    end = "\nOr say what it is by --reader." if found else ""
    return f"{root}: looks like none of the layouts; it holds {seen}.{hint}{listed}{end} Expected one of: {wanted}"


def _annotation_files(entry: DatasetEntry) -> list[str]:
    """The files that the reader reads; a pattern of `manifest` as what it stands for."""
    manifest = entry.options.get("manifest")
    if manifest is None:
        return list(DATASETS[entry.reader].files)
    names = [manifest] if isinstance(manifest, str) else [*manifest.values()]
    try:
        return [os.path.relpath(path, entry.root) for name in names for path in files_called(entry.root, name)]
    except DataError:
        return names


def _read(name: str, entry: DatasetEntry) -> tuple[list[str], bool, list[Doubt]]:
    """Counts and problems of a folder whose annotation files are all there, whether there are none, and doubts."""
    try:
        own_splits = entry.model_copy(update={"train_on": ("train",)})
        read = list(DATASETS[entry.reader].read(entry.root, **entry.options))
        table, _ = to_table(name, own_splits, map(_place, read))
    except DataError as error:
        header = re.fullmatch(r"(.+): no column (.+); found .*", str(error), re.DOTALL)
        fault = header and f"{os.path.relpath(header[1], entry.root)}, header: {header[2]}: is missing"
        return [f"  CANNOT BE READ {error}", *_remedies(entry, [], [fault] if fault else [], [], [])], False, []
    rows = table.select(["split", "references", "before", "after", "source", "fault"]).to_pylist()
    faults = [f"{row['source']}: {row['fault']}" for row in rows if row["fault"]]
    images = dict.fromkeys(row[side] for row in rows for side in ("before", "after") if row[side])
    files = [path for path in images if INSIDE not in path]
    missing = [path for path in files if not os.path.isfile(path)]
    empty = [path for path in files if os.path.isfile(path) and not os.path.getsize(path)]
    others = list(mistakes.no_images(path for path in files if path not in {*missing, *empty}))
    asked = list(doubts(read, entry.options, entry.reader == "pairs"))
    odd = [*mistakes.of_rows(read), *mistakes.of_flags(entry, read)]
    faulty = [*(doubt.question for doubt in asked if not doubt.answers), *odd]
    noted = [f"  {doubt.question}; the entry takes the first" for doubt in asked if doubt.sure]
    passed = [row.source for row in read if row.without_caption]
    empty_ones = sum(not str(text).strip() for row in rows for text in row["references"])
    unknown = [
        f"{row['source']}: split {row['split']!r}" for row in rows if row["split"] and row["split"] not in SPLITS
    ]
    lines = [
        *_counts(_nearest(name, DATASETS[entry.reader], len(rows)), rows),
        f"  images {len(images):,}, of them {len(missing):,} missing and {len(empty):,} empty",
        *_passed_over(entry),
        *_first("rows that cannot be read", faults),
        *_first("splits that are none of train, val, test", unknown),
        *_first("missing images", missing),
        *_first("images without a byte", empty),
        *_first("files that are no images", others),
        *_first("captions and pairs to look at", faulty),
        *noted,
        *_first("pairs without a caption, which are passed over", passed),
        *([f"  empty captions: {empty_ones:,}, which train nothing"] if empty_ones else []),
        *_remedies(entry, read, faults, missing, unknown),
    ]
    if not rows:
        lines.append("  NO PAIR at all; fetch the dataset again")
    return lines, bool(rows) and not (faults or unknown or missing or empty or others or faulty), asked


def _passed_over(entry: DatasetEntry) -> list[str]:
    """How many rows the option `pairs_only` leaves out, by what they have."""
    if not entry.options.get("pairs_only"):
        return []
    rows = DATASETS[entry.reader].read(entry.root, **(entry.options | {"pairs_only": False}))
    return [f"  passed over by pairs_only: {mistakes.counted(row.fault or '' for row in rows) or 'no row'}"]


def _place(row: Row) -> Row:
    """The row with embedded images as places in their manifest."""
    before, after = (
        Path(f"{image.manifest}{INSIDE}{image.name}") if isinstance(image, Embedded) else image
        for image in (row.before, row.after)
    )
    return row._replace(before=before, after=after)


def _remedies(
    entry: DatasetEntry, read: list[Row], faults: list[str], missing: list[str], unknown: list[str]
) -> list[str]:
    """What mends the problems, a line each."""
    files = _annotation_files(entry)
    found = [*mistakes.of_faults(faults), *mistakes.of_columns(entry, files, faults)]
    if faults or missing:
        found += mistakes.of_images(entry, files, read, missing)
    if unknown:
        names = {str(row.split) for row in read} - {"None"}
        found.append(mistakes.of_splits(names - {*SPLITS}, names & {*SPLITS}))
    return ["  what mends it:", *(f"    {line}" for line in found)] if found else []


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


def _plain(entry: DatasetEntry, options: Mapping[str, Any]) -> dict[str, Any]:
    """The entry with these options as it goes into `params.yaml`."""
    return {"reader": entry.reader, "root": str(entry.root)} | ({"options": options} if options else {})
