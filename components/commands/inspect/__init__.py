"""Check a dataset's folder before anything is run: `m3diff data check ROOT`.

The layout is known by the annotation files that are there, or given by `--reader`; how a table of one's own is read,
`guess.py` proposes. Then the dataset's own reader reads the folder, and what it finds is counted: pairs and references
by split next to the published counts, rows that cannot be read, missing images. Images are opened as ingest opens them,
and the records are judged as validate judges them, in a folder that is removed again: a folder without a problem here
passes both stages with the entry that is printed. Each mistake that is known has a line with its remedy.
"""

import inspect
import io
import os
import re
import tempfile
from collections.abc import Container, Iterator, Mapping
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass, replace
from itertools import chain, count, islice, repeat
from pathlib import Path
from typing import Any
from unicodedata import normalize
from urllib.parse import unquote

import polars as pl

from m3diff.commands.inspect.guess import Guess, guess, is_image, manifests
from m3diff.datasets import DATASETS, omnidiff
from m3diff.datasets.files import Embedded, quoted, read_json, require_utf8
from m3diff.datasets.pairs import files_called
from m3diff.datasets.spec import Row, read_with_notes
from m3diff.records.errors import DataError, is_utf8
from m3diff.records.schemas import NO_CHANGE, SPLITS
from m3diff.stages.ingest.params import DatasetEntry
from m3diff.stages.ingest.stage import Doubt, as_yaml, doubts, ingest, odd_captions_of, to_records
from m3diff.stages.validate.params import Validate
from m3diff.stages.validate.rules import LEAK, LOOKS_THE_SAME
from m3diff.stages.validate.stage import judge, refusals_of

COMPARED = 20  # pairs of each answer to a question whose files are compared

# Rules of validate that a row breaks by what is in another split
BETWEEN_SPLITS = (LEAK, "id_unique", "scene_in_one_split")
EXAMPLE_PAIRS = 8  # a folder of fewer shows a layout and trains nothing

FIRST = 5  # problems of one kind that are shown

# Between a manifest and the name of an image that it holds
INSIDE = "#bytes="

# Readers of one table whose columns are named in the options; their layout is known by the columns
TABLES = ("omnidiff", "pairs")

LEGACY = "windows-1252"  # the encoding of most names that are not UTF-8
LISTED = 200_000  # files below a root that are looked at for a missing image

HEADER = "before,after,captions,split"
OTHER_FILES = {  # what is wrong with a file that is no table, and the remedy, by the end of its name
    "is an archive; unpack it": (".tar", ".tgz", ".zip", ".gz", ".bz2", ".xz", ".zst", ".7z", ".rar"),
    f"is a video, and pairs are images; take frames of it (`ffmpeg -i VIDEO -vf fps=1 %05d.png`) and write {HEADER}": (
        (".mp4", ".avi", ".mov", ".mkv", ".webm")
    ),
    "is DVC's pointer to data that are not here; fetch them: `dvc pull`": (".dvc",),
    f"is no table that is read; write .csv, .tsv, .json, .jsonl or .parquet with {HEADER}": (
        *(".txt", ".xml", ".yaml", ".yml", ".h5", ".pkl", ".ndjson", ".tab", ".pq", ".arrow", ".feather"),
        *(".xlsx", ".xls", ".ods", ".numbers"),
    ),
}

REMEDIES = {  # the remedy of the faults that hold these words and name none themselves
    "has the same id": "one id is one pair: give each its own, or read without ids: options: {columns: {id: null}}",
    ": is missing": "name a column that differs by file by all its names: options: {columns: {captions: [one, other]}}",
    "two images, found": "pass over rows that are no pair: options: {pairs_only: true} (reader pairs)",
    "one answer, found": "pass over rows that are no pair: options: {pairs_only: true} (reader pairs)",
}

# What a path begins with that does not lead into the root
FAR = re.compile(r"/|~|\$|\\\\|[A-Za-z]:\\|[A-Za-z][A-Za-z0-9+.-]*:/|\.\.[/\\]")


@dataclass(frozen=True)
class StageLimits:
    """How the run would judge a dataset: `validate`'s limits, and the cache in which ingest finds the images again."""

    limits: Validate
    image_cache: Path | None = None  # None: nothing is kept


# The limits of profiles/embedded.yaml, for callers that have no parameters
EMBEDDED_LIMITS = StageLimits(
    Validate(
        max_quarantined_share=0.01,
        max_leaked_share=0.05,
        allow_lost_test_pairs=False,
        max_caption_chars=2000,
        max_image_pixels=100_000_000,
        allow_test_leakage=False,
        near_duplicate_max_diff=2,
        compare_px=100,
    )
)


def check(
    root: Path,
    entries: Mapping[str, DatasetEntry],
    reader: str | None = None,
    stage_limits: StageLimits = EMBEDDED_LIMITS,
) -> tuple[list[str], bool]:
    """Look at one dataset's folder. A dataset of `entries` (`ingest.datasets`) with this root is read as it says there.

    Args:
        reader: what the folder is, where that is not to be found out.
        stage_limits: what validate would refuse.

    Returns:
        Lines to show, and whether the folder can be used as it is.

    Raises:
        DataError: the folder is missing, or looks like none of the layouts.
    """
    if not root.is_dir():
        raise DataError(f"{root}: no such folder; name the folder that holds a dataset's annotation files")
    require_utf8(root)
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
    there = {file: _is_there(root, file) for file in _annotation_files(entry)}
    lines += [f"  {'found  ' if found else 'MISSING'} {file}" for file, found in there.items()]
    lines += [f"  {note}" for note in notes]
    if not all(there.values()):
        return [*lines, "  fetch the missing files again; nothing was read"], False
    found, sound, asked = ([], True, guessed) if guessed else _read(name, entry)
    if sound and not [doubt for doubt in asked if not doubt.sure]:
        judgement_lines, sound = _judged(name, _settled(entry, asked), stage_limits)
        found += judgement_lines
    open_ones = [doubt for doubt in asked if doubt.answers and (known or not doubt.sure)]
    lines += [*found, *(f"  ASK {line}" for doubt in open_ones for line in doubt.question.split("\n"))]
    if known:
        lines += [f"    options: {as_yaml(answer)}" for doubt in open_ones for answer in doubt.answers]
        return lines, sound and not open_ones
    answered = [doubt if doubt in open_ones else doubt._replace(answers=doubt.answers[:1]) for doubt in asked]
    possible = Guess({**entry.options}, [], [doubt for doubt in answered if doubt.answers]).entries()
    possible = [chosen for chosen in possible if not _pairs_copies(entry, chosen)] or possible
    lines.append(f"{'one of these is ' if len(possible) > 1 else ''}the entry for ingest.datasets in params.yaml:")
    for chosen in possible:
        own = {"reader": entry.reader, "root": str(entry.root)} | ({"options": chosen} if chosen else {})
        lines.append(f"    {as_yaml({name: own})[1:-1]}")  # a folder called `no` or `007` needs quotes
    if open_ones:
        lines.append("put the one that is right into params.yaml or into a profile, and check again")
    return lines, sound and not open_ones


def _pairs_copies(entry: DatasetEntry, options: dict[str, Any]) -> bool:
    """True if in each of the first pairs, read by these options, one image is a copy of the other."""
    try:
        rows = list(islice(DATASETS[entry.reader].read(entry.root, **options), COMPARED))
    except DataError:
        return False
    sides = [(row.before, row.after) for row in rows if isinstance(row.before, str) and isinstance(row.after, str)]
    paths = [(entry.root / before, entry.root / after) for before, after in sides if before != after]
    files = [(before, after) for before, after in paths if before.is_file() and after.is_file()]
    return bool(files) and all(before.read_bytes() == after.read_bytes() for before, after in files)


def _settled(entry: DatasetEntry, asked: list[Doubt]) -> DatasetEntry:
    """The entry with the first answer to each doubt, as `check` prints it."""
    options = dict(entry.options)
    for doubt in asked:
        options |= doubt.answers[0] if doubt.answers else {}
    return entry.model_copy(update={"options": options})


def _judged(name: str, entry: DatasetEntry, stage_limits: StageLimits) -> tuple[list[str], bool]:
    """What ingest and validate say of the dataset when it is the only one, and whether they accept it."""
    with tempfile.TemporaryDirectory() as folder:
        cache = stage_limits.image_cache or Path(folder) / "image_cache.parquet"
        records = Path(folder) / "records"
        unpacked = f"{records / name / 'images'}/"  # where no user finds them
        try:
            with redirect_stdout(io.StringIO()):  # which says what is passed over, as this module does
                ingest(name, entry, cache, records)
            judged = judge(stage_limits.limits, {name: entry}, cache, records)
        except DataError as error:
            return [f"  CANNOT BE USED {error}".replace(unpacked, "embedded image ")], False
        between_splits = _single_row_between_splits(judged.bad, judged.table.height)
        accepted = replace(judged, bad=judged.bad.join(between_splits, on="row", how="anti", maintain_order="left"))
        faults = refusals_of(stage_limits.limits, {name: entry}, accepted)
    lines = []
    for finding in judged.findings:
        lines += _shown(finding.sentence, finding.first, finding.count)
    lines += [f"  1 pair is left out; of a larger part validate stops: {reason}" for reason in between_splits["reason"]]
    lines += [f"  NOT ACCEPTED {fault}" for fault in faults]
    return [line.replace(unpacked, "embedded image ") for line in lines], not faults


def _single_row_between_splits(bad: pl.DataFrame, pairs: int) -> pl.DataFrame:
    """The only row of a few example pairs that is also in another split; none of a larger folder.

    One of so few pairs is more than any share that `validate` allows, and says nothing about the dataset itself.
    """
    is_between_splits = pl.col("rules").list.set_difference(list(BETWEEN_SPLITS)).list.len() == 0
    rows = bad.filter(is_between_splits, ~pl.col("reason").str.contains(LOOKS_THE_SAME, literal=True))
    return rows if rows.height == bad.height == 1 and pairs < EXAMPLE_PAIRS else rows.clear()


def _shown(sentence: str, first: list[str], count: int) -> list[str]:
    more = [f"    and {count - len(first):,} more"] if count > len(first) else []
    return [f"  {sentence}", *(f"    {place}" for place in first), *more]


def recognise(
    root: Path, taken: Container[str] = (), reader: str | None = None
) -> tuple[str, DatasetEntry, list[str], list[Doubt]]:
    """The layout with the largest share of its annotation files in `root`, of equals the one with more files; else a
    table of pairs.

    Args:
        taken: names that other datasets have.
        reader: the layout that it is.

    Returns:
        A name for the dataset, its entry for `ingest.datasets`, notes on how it was found, and what is to be asked.

    Raises:
        DataError: it is none.
    """
    if not reader:
        if (root / "change_multi_captions.json").exists():
            raise DataError(
                f"{root}: this is CARD's folder of Spot-the-Diff, whose captions are joined and cut at 60 words; take "
                "the original, which is scored by CARD's protocol, too (multi-change): `git clone "
                "https://github.com/harsh19/spot-the-diff`, folder data, reader spot_the_diff"
            )
        shares = {
            name: (sum(_is_there(root, file) for file in spec.files) / len(spec.files), len(spec.files))
            for name, spec in DATASETS.items()
        }
        best = max(shares, key=lambda name: shares[name])
        if shares[best][0] and best not in TABLES and not _is_own(root, best):
            reader = best
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
    return (root / file).is_file() or any(path.is_file() for path in root.glob(file))


def _is_own(root: Path, reader: str) -> bool:
    """True if files that are called as a layout's are a table of pairs: with the documented columns, or such that none
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


def _unknown(root: Path, reasons: str) -> str:
    """A message: what is in the folder, why it cannot be read, each layout's files, and a folder that has one."""
    paths = sorted(path for path in root.iterdir() if path.name[0] != ".")
    found = [reason for reason in reasons.split("\n") if reason]
    for path in paths:
        found += [f"{path.name}: {what}" for what, ends in OTHER_FILES.items() if path.name.lower().endswith(ends)]
    if not manifests(root) and any(is_image(path.name) for path in chain(paths, root.glob("*/*"))):
        found.append(f"images without a table: write {root / 'pairs.csv'} with the header {HEADER}, a line for a pair")
    near = [path for path in paths if path.is_dir()] + [root.resolve().parent]
    deeper = [folder / "annotations" if (folder / "annotations").is_dir() else folder for folder in near]
    found += [
        f"{each} holds {tables[0].name}; perhaps you mean `m3diff data check {quoted(folder)}`"
        for folder, each in zip(near, deeper, strict=True)
        if (tables := manifests(each))
    ]
    seen = ", ".join(path.name for path in paths[:8]) or "nothing"
    wanted = "; ".join(f"{reader}: {', '.join(spec.files)}" for reader, spec in DATASETS.items())
    listed = "".join(f"\n  {reason}" for reason in found)
    end = "\nOr say what it is by --reader." if found else ""
    return f"{root}: looks like none of the layouts; it holds {seen}.{listed}{end} Expected one of: {wanted}"


def _annotation_files(entry: DatasetEntry) -> list[str]:
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
    spec = DATASETS[entry.reader]
    try:
        own_splits = entry.model_copy(update={"train_on": ("train",)})
        read, option_notes = read_with_notes(spec, entry.root, entry.options)
        rows, _ = to_records(name, own_splits, map(_place, read))
    except DataError as error:
        return [f"  CANNOT BE READ {error}"], False, []
    faults = [f"{row['source']}: {row['fault']}" for row in rows if row["fault"]]
    images = dict.fromkeys(row[side] for row in rows for side in ("before", "after") if row[side])
    size = {path: os.path.getsize(path) if os.path.isfile(path) else None for path in images if INSIDE not in path}
    missing, empty = ([path for path, found in size.items() if found == wanted] for wanted in (None, 0))
    odd = odd_captions_of(entry, read)
    asked = list(doubts(read, entry.options, entry.reader == "pairs", odd))
    unknown = [row for row in rows if row["split"] and row["split"] not in SPLITS]
    same = [row for row in read if row.before and row.before == row.after and row.change_types != [NO_CHANGE]]
    problems = {
        "rows that cannot be read": faults,
        "splits that are none of train, val, test": [f"{row['source']}: split {row['split']!r}" for row in unknown],
        "missing images": missing,
        "images without a byte": empty,
        "pairs of one image": [f"{row.source}: both images are {_place(row).before}; name both" for row in same],
        "captions to look at": [doubt.question for doubt in asked if not doubt.answers],
        "pairs that changeflag calls unchanged, in other sentences than LEVIR-CC's": [*_flagged(entry, read)],
    }
    nearest = min(spec.published, key=lambda part: abs(sum(part.pairs().values()) - len(rows)), default=None)
    of_images = f"  images {len(images):,}, of them {len(missing):,} missing and {len(empty):,} empty"
    lines = [*_counts(spec.part(name) or nearest, rows), of_images, *(f"  {note}" for note in option_notes)]
    in_question = "\n".join(doubt.question for doubt in asked)
    lines += [f"  {captions}; {captions.remedy}" for captions in odd if str(captions) not in in_question]
    if entry.options.get("pairs_only"):
        every = list(spec.read(entry.root, **{**entry.options, "pairs_only": False}))
        lines.append(f"  passed over by pairs_only: {len(every) - len(read):,} rows")
    lines += [line for what, found in problems.items() for line in _first(what, found)]
    lines += [f"  {doubt.question}; the entry takes the first" for doubt in asked if doubt.sure]
    lines += _first(
        "pairs without a caption, which are passed over", [row.source for row in read if row.without_caption]
    )
    if wordless := sum(not str(text).strip() for row in rows for text in row["references"]):
        lines.append(f"  empty captions: {wordless:,}, which train nothing")
    remedies = [remedy for words, remedy in REMEDIES.items() if any(words in fault for fault in faults)]
    remedies += _of_images(entry.root, read, {*missing}) if faults or missing else ()
    if unknown:
        names = {str(row.split) for row in read} - {"None"}
        left = [split for split in SPLITS if split not in names]
        example = dict(zip(sorted(names - {*SPLITS}), chain(left, repeat("train")), strict=False))
        remedies.append(
            f"say which splits these are, for example options: {as_yaml({'splits': example})} (reader pairs)"
        )
    if remedies:
        lines += ["  what mends it:", *(f"    {remedy}" for remedy in dict.fromkeys(remedies))]
    if not rows:
        lines.append("  NO PAIR at all; fetch the dataset again")
    return lines, bool(rows) and not any(problems.values()), asked


def _flagged(entry: DatasetEntry, rows: list[Row]) -> Iterator[str]:
    """Pairs in LEVIR-CC's layout that are without a change by their flag alone: data of one's own."""
    if entry.reader != "levir_cc":
        return
    records = read_json(entry.root / "LevirCCcaptions.json", dict)["images"]
    flagged = [one for one in records if isinstance(one, dict) and str(one.get("changeflag")) in ("0", "False")]
    unchanged = sum(row.change_types == [NO_CHANGE] for row in rows)
    if len(flagged) > 2 * unchanged:
        yield (
            f"{flagged[0].get('filename')}: {len(flagged):,} such pairs, {unchanged:,} are read so; read them by "
            "--reader pairs, with no_change: {changeflag: [0, false]} in the options"
        )


def _place(row: Row) -> Row:
    before, after = (
        Path(f"{image.manifest}{INSIDE}{image.name}") if isinstance(image, Embedded) else image
        for image in (row.before, row.after)
    )
    return row._replace(before=before, after=after)


def _counts(published: Any, rows: list[dict[str, Any]]) -> list[str]:
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
    if not problems:
        return []
    more = [f"    and {len(problems) - FIRST:,} more"] if len(problems) > FIRST else []
    return [f"  {what}: {len(problems):,}", *(f"    {problem}" for problem in problems[:FIRST]), *more]


def _of_images(root: Path, rows: list[Row], missing: Container[str]) -> Iterator[str]:
    """Why the first image is not found where a row names it, and which file of the folder is called nearly so."""
    named = dict.fromkeys(side for row in rows for side in (row.before, row.after) if isinstance(side, str) and side)
    name = next((each for each in named if os.path.join(root, each) in missing or FAR.match(each)), None)
    if name is None:
        return
    walk = (os.path.relpath(os.path.join(folder, each), root) for folder, _, files in os.walk(root) for each in files)
    listed = list(islice(walk, LISTED))
    if foreign := [each for each in listed if not is_utf8(each)]:
        yield (
            f"{len(foreign):,} files have names that are not UTF-8, such as {os.fsencode(foreign[0])!r}; rename them: "
            f"`convmv -f {LEGACY} -t utf-8 -r --notest {quoted(root)}`, by another name of the encoding if needed"
        )
    alike = [each for each in listed if _words(each)[0] == _words(name)[0] and each != name]
    near = max(sorted(alike), key=lambda each: len(os.path.commonprefix([_words(each), _words(name)])), default=None)
    if near:
        form = " in another Unicode form" if normalize("NFC", near) == normalize("NFC", name) else ""
        yield (
            f"{name!r}: there is {near!r}{form}; write paths relative to {root} as the files are called, or "
            "complete them by a template: options: {columns: {before: 'folder/{before}', after: 'folder/{after}'}}"
        )
    elif "://" in name and not name.startswith("file:"):
        yield f"{name}: is an address; download the images into {root} and write their paths"
    elif FAR.match(name):
        yield (
            f"{name}: leads out of the root; copy the images into {root} and write their paths, relative to it, or, "
            "where the file says the right place, name the images' folder in the entry: image_root"
        )
    else:
        yield f"{name}: is no file below {root}; fetch the images and put them there"


def _words(path: str) -> list[str]:
    """The folders and the file of a path, the file first, without suffix, capitals and other ways to write a letter."""
    plain = normalize("NFC", unquote(path)).replace("\\", "/").lower()
    return [part.strip() for part in reversed(os.path.splitext(plain)[0].split("/"))]
