"""Check a dataset's folder before anything is run: `m3diff data check ROOT`.

The layout is known by the annotation files that are there, or given by `--reader`; how a table of one's own is read,
`guess.py` proposes. Then the dataset's own reader reads the folder, and what it finds is counted: pairs and references
by split next to the published counts, rows that cannot be read, missing images. Images are looked for and their first
bytes read, not decoded; that is for ingest and validate. Each mistake that is known has a line with its remedy.
"""

import inspect
import os
import re
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import chain, count, islice, repeat
from pathlib import Path
from typing import Any, NamedTuple
from unicodedata import normalize
from urllib.parse import unquote

from PIL import Image, UnidentifiedImageError

from m3diff.commands.inspect.guess import Guess, called_as_sides, guess, is_image, manifests
from m3diff.datasets import DATASETS, omnidiff
from m3diff.datasets.files import quoted, read_json
from m3diff.datasets.pairs import NO_PAIR, files_called
from m3diff.datasets.spec import Row
from m3diff.datasets.tables import Embedded, read_values
from m3diff.images.open import known_formats
from m3diff.records.errors import DataError
from m3diff.records.schemas import NO_CHANGE, SPLITS
from m3diff.stages.ingest.doubts import Doubt, as_yaml, doubts
from m3diff.stages.ingest.params import DatasetEntry
from m3diff.stages.ingest.stage import to_table

FIRST = 5
"""Problems of one kind that are shown."""

INSIDE = "#bytes="
"""Between a manifest and the name of an image that it holds."""

TABLES = ("omnidiff", "pairs")
"""Readers of one table whose columns are named in the options; their layout is known by the columns."""

LISTED = 200_000
"""Files below a root that are looked at for a missing image."""

LOOKED = 1_000
"""Images whose first bytes are looked at; ingest decodes every one."""

HEADER = "before,after,captions,split"
NO_TABLE = f"is no table that is read; write .csv, .tsv, .json, .jsonl or .parquet with {HEADER}"
TAR = "is an archive; unpack it: `tar -C {root} -xf {path}`"
BY_SUFFIX: dict[str, str] = {
    **dict.fromkeys((".tar", ".tgz", ".tbz2", ".txz", ".tar.gz", ".tar.bz2", ".tar.xz"), TAR),
    ".zip": "is an archive; unpack it: `unzip {path} -d {root}`",
    ".gz": "is compressed; unpack it: `gunzip {path}`",
    ".bz2": "is compressed; unpack it: `bunzip2 {path}`",
    ".xz": "is compressed; unpack it: `unxz {path}`",
    **dict.fromkeys((".zst", ".7z", ".rar"), "is an archive, which is not read; unpack it"),
    **dict.fromkeys((".ndjson", ".jl"), "call it as tables are called: `mv {path} {stem}.jsonl`"),
    ".tab": "call it as tables are called: `mv {path} {stem}.tsv`",
    **dict.fromkeys((".pq", ".parq"), "call it as tables are called: `mv {path} {stem}.parquet`"),
    **dict.fromkeys((".arrow", ".feather"), "is no table that is read; write it as Parquet (`Dataset.to_parquet`)"),
    **dict.fromkeys((".xlsx", ".xls", ".ods", ".numbers"), "is a spreadsheet; save it as CSV (UTF-8) with " + HEADER),
    **dict.fromkeys((".txt", ".xml", ".yaml", ".yml", ".h5", ".pkl"), NO_TABLE),
    **dict.fromkeys(
        (".mp4", ".avi", ".mov", ".mkv", ".webm"),
        f"is a video, and pairs are images; take frames of it: `ffmpeg -i {{path}} -vf fps=1 {{root}}/%05d.png`, and "
        f"write pairs.csv with the header {HEADER}",
    ),
    ".dvc": "is DVC's pointer to data that are not here; fetch them: `dvc pull {path}`",
}
"""A file that is no table, by the first of these ends of its name: what is wrong with it, and the remedy."""

FAULTS: dict[str, str] = {
    "has the same id": "one id is one pair: give each its own, or read without ids: options: {columns: {id: null}}",
    "quote fields that hold": "put captions between double quotes, or save the table as .tsv or .jsonl",
    "is a symbolic link out of": "copy the images into the root, or set follow_links: true in the entry",
}
"""The remedy of the faults that hold these words."""

CONTENTS: tuple[tuple[Callable[[bytes], bool], str], ...] = (
    (lambda data: data.startswith(b"version https://git-lfs"), "is a pointer of Git LFS; fetch it: `git lfs pull`"),
    (lambda data: b"<html" in data.lower() or b"<!doctype" in data.lower(), "is a web page; download the image again"),
    (lambda data: data[4:8] == b"ftyp", "is a video or HEIC; convert it to PNG or JPEG"),
    (lambda data: True, "is of no known image format; write PNG or JPEG"),
)
"""A file that is called as images are: by its first bytes, what it is instead, and the remedy."""

ALIKE: tuple[tuple[Callable[[str], str], str], ...] = (
    (lambda path: path.replace("\\", "/"), "paths have slashes and no backslashes"),
    (str.strip, "a blank at an end belongs to no path"),
    (lambda path: normalize("NFC", path), "the letters are the same in another Unicode form"),
    (str.lower, "large and small letters differ"),
    (lambda path: os.path.splitext(path)[0], "the suffix is another"),
)
"""By what a missing image is found under another name, and how the two names differ."""


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
    there = {file: _is_there(root, file) for file in _annotation_files(entry)}
    lines += [f"  {'found  ' if found else 'MISSING'} {file}" for file, found in there.items()]
    lines += [f"  {note}" for note in notes]
    if not all(there.values()):
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
    for chosen in possible:
        own = {"reader": entry.reader, "root": str(entry.root)} | ({"options": chosen} if chosen else {})
        lines.append(f"    {name}: {as_yaml(own)}")
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
        remedy = f"check its rights: `chmod u+rx {quoted(root)}`"
        raise DataError(f"{root}: cannot be read: {error.strerror}; {remedy}") from error


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
    if not reader:
        _refuse_foreign(root)
        shares = {
            name: (sum(_is_there(root, file) for file in spec.files) / len(spec.files), len(spec.files))
            for name, spec in DATASETS.items()
        }
        best = max(shares, key=lambda name: shares[name])
        if shares[best][0] and best not in TABLES and not _is_own(root, best):
            reader = best
    if reader and reader not in TABLES:
        return Recognised(_free(reader, root, taken), DatasetEntry(reader=reader, root=root), [], [])
    try:
        options, notes, doubts = guess(root)
    except DataError as error:
        raise DataError(_unknown(root, str(error))) from error
    more = [option for option in options if option not in inspect.signature(omnidiff.read).parameters]
    if reader is None:  # OmniDiff's table has change types and one caption a row
        reader = "omnidiff" if options["manifest"] == "annotations.json" and more in ([], ["splits"]) else "pairs"
    if reader == "omnidiff":
        options = {option: value for option, value in options.items() if option not in more}
        notes.extend(f"the reader omnidiff has no option `{option}`; the reader pairs has" for option in more)
    name = _free(reader if reader != "pairs" else None, root, taken)
    return Recognised(name, DatasetEntry(reader=reader, root=root, options=options), notes, doubts)


def _is_there(root: Path, file: str) -> bool:
    """True if a file, or one of the files of a pattern, is there."""
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


def _free(name: str | None, root: Path, taken: Container[str]) -> str:
    """The name, the folder's where there is none or it is taken, or that with a number."""
    folder = re.sub(r"[^A-Za-z0-9_-]+", "_", root.resolve().name).strip("_") or "pairs"
    numbered = (f"{folder}_{number}" for number in count(2))
    return next(each for each in chain((name or folder, folder), numbered) if each not in taken)


def _refuse_foreign(root: Path) -> None:
    """Refuse a folder with pairs in a form that no reader takes for its own, with the remedy."""
    info = root / "dataset_info.json"
    if (root / "change_multi_captions.json").exists():
        raise DataError(
            f"{root}: this is CARD's folder of Spot-the-Diff, whose captions are joined and cut at 60 words; take the "
            "original, which is scored by CARD's protocol, too (multi-change): `git clone "
            "https://github.com/harsh19/spot-the-diff`, folder data, reader spot_the_diff"
        )
    if info.exists() and '"m3diff_' in info.read_text("utf-8", "replace"):
        raise DataError(
            f"{root}: this is what `m3diff export-llava` wrote of datasets that are in ingest.datasets already; name "
            "the folder of one of these, or, in another project, the folder of the images as root with the file in "
            "it: options: {manifest: train.json, columns: {images: images, captions: conversations, "
            "split: metadata.split, id: null}}"
        )


def _unknown(root: Path, reasons: str) -> str:
    """A message: what is in the folder, why it cannot be read, each layout's files, and a folder below that has one."""
    deeper = [str(path.parent) for file in ("annotations/train.json", "train.json") for path in root.glob(f"*/{file}")]
    seen = ", ".join(sorted(entry.name for entry in root.iterdir())[:8]) or "nothing"
    wanted = "; ".join(f"{reader}: {', '.join(spec.files)}" for reader, spec in DATASETS.items())
    hint = f" Perhaps you mean {deeper[0].removesuffix('/annotations')}." if deeper else ""
    found = [*filter(None, reasons.split("\n")), *_in_folder(root)]
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
    spec = DATASETS[entry.reader]
    try:
        own_splits = entry.model_copy(update={"train_on": ("train",)})
        read = list(spec.read(entry.root, **entry.options))
        table, _ = to_table(name, own_splits, map(_place, read))
    except DataError as error:
        header = re.fullmatch(r"(.+): no column (.+); found .*", str(error), re.DOTALL)
        faults = [f"{os.path.relpath(header[1], entry.root)}, header: {header[2]}: is missing"] if header else []
        return [f"  CANNOT BE READ {error}", *_mended(_of_columns(entry, faults))], False, []
    rows = table.select(["split", "references", "before", "after", "source", "fault"]).to_pylist()
    faults = [f"{row['source']}: {row['fault']}" for row in rows if row["fault"]]
    images = dict.fromkeys(row[side] for row in rows for side in ("before", "after") if row[side])
    size = {path: os.path.getsize(path) if os.path.isfile(path) else None for path in images if INSIDE not in path}
    missing, empty = ([path for path, found in size.items() if found == wanted] for wanted in (None, 0))
    asked = list(doubts(read, entry.options, entry.reader == "pairs"))
    unknown = [row for row in rows if row["split"] and row["split"] not in SPLITS]
    problems = {
        "rows that cannot be read": faults,
        "splits that are none of train, val, test": [f"{row['source']}: split {row['split']!r}" for row in unknown],
        "missing images": missing,
        "images without a byte": empty,
        "files that are no images": list(_no_images(path for path, found in size.items() if found)),
        "captions and pairs to look at": [
            *(doubt.question for doubt in asked if not doubt.answers),
            *_of_rows(read),
            *_of_flags(entry, read),
        ],
    }
    nearest = min(spec.published, key=lambda part: abs(sum(part.pairs().values()) - len(rows)), default=None)
    lines = _counts(spec.part(name) or nearest, rows)
    lines.append(f"  images {len(images):,}, of them {len(missing):,} missing and {len(empty):,} empty")
    if entry.options.get("pairs_only"):
        every = spec.read(entry.root, **(entry.options | {"pairs_only": False}))
        lines.append(f"  passed over by pairs_only: {_counted(row.fault or '' for row in every) or 'no row'}")
    lines += [line for what, found in problems.items() for line in _first(what, found)]
    lines += [f"  {doubt.question}; the entry takes the first" for doubt in asked if doubt.sure]
    passed = [row.source for row in read if row.without_caption]
    lines += _first("pairs without a caption, which are passed over", passed)
    if wordless := sum(not str(text).strip() for row in rows for text in row["references"]):
        lines.append(f"  empty captions: {wordless:,}, which train nothing")
    remedies = [remedy for words, remedy in FAULTS.items() if any(words in fault for fault in faults)]
    if no_pair := _counted(faults):
        take = options(pairs_only=True)
        remedies.append(f"{no_pair} are no pair and cannot be read yet; take the others: {take} (reader pairs)")
    remedies += _of_columns(entry, faults)
    remedies += _of_images(entry, read, {*missing}) if faults or missing else ()
    remedies += _of_splits(read) if unknown else ()
    lines += _mended(remedies)
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


def _mended(remedies: Iterable[str]) -> list[str]:
    """The lines of remedies under their heading; none where there is no remedy."""
    lines = [f"    {remedy}" for remedy in remedies]
    return ["  what mends it:", *lines] if lines else []


def _counted(faults: Iterable[str]) -> str:
    """Rows with another number of images or answers than a pair has, by this number; empty where there is none."""
    matches = [match for fault in faults if (match := NO_PAIR.search(fault))]
    found = Counter(f"{match[1] or match[2]} {'images' if match[1] else 'answers'}" for match in matches)
    return ", ".join(f"{number:,} with {kind}" for kind, number in sorted(found.items()))


def options(**values: Any) -> str:
    """Options of an entry as one writes them in params.yaml."""
    return f"options: {as_yaml(values)}"


def _in_folder(root: Path) -> Iterator[str]:
    """Mistakes that the names of a folder's files tell, where no table of pairs can be read."""
    paths = sorted(path for path in root.iterdir() if path.name[0] != ".")
    folders = [path for path in paths if path.is_dir()]
    for path in paths:
        what = next((what for end, what in BY_SUFFIX.items() if path.name.lower().endswith(end)), None)
        if what and path.is_file():
            yield f"{path.name}: {what.format(path=quoted(path), root=quoted(root), stem=quoted(path.with_suffix('')))}"
    has_images = any(is_image(path.name) for path in paths)
    if not manifests(root):
        yield from _images_alone(root, folders, has_images)
    for folder in folders:
        if found := manifests(folder):
            yield f"{folder.name}/ holds {found[0].name}; perhaps you mean `m3diff data check {quoted(folder)}`"
    above = root.resolve().parent
    if has_images and (found := manifests(above)):
        yield f"the folder above holds {found[0].name}; name that one: `m3diff data check {quoted(above)}`"


def _images_alone(root: Path, folders: list[Path], has_images: bool) -> Iterator[str]:
    """Images without a table: in one folder, or in two whose names do or do not match."""
    write = f"write {root / 'pairs.csv'} with the header {HEADER} and a line for each pair"
    holding: dict[str, set[str]] = {}
    for folder in folders:
        with suppress(OSError):
            if images := {path.name for path in folder.iterdir() if is_image(path.name)}:
                holding[folder.name] = images
    pairs = called_as_sides([*holding])
    if len(pairs) == 1:
        before, after = (holding[side] for side in pairs[0])
        alone = "no file has captions" if before == after else f"{min(before ^ after)} has no partner of its name"
        counts = f"{len(before):,} and {len(after):,} images, {len(before & after):,} of them of the same name"
        yield f"{pairs[0][0]}/ and {pairs[0][1]}/ hold {counts}; {alone}; {write}"
    elif holding or has_images:
        where = ", ".join(f"{name}/" for name in holding) or "the folder"
        yield f"{where}: holds images, but no file says which are a pair and what changed; {write}"


FAR = re.compile(r"/|~|\$|\\\\|[A-Za-z]:\\|[A-Za-z][A-Za-z0-9+.-]*:/|\.\.[/\\]")
"""What a path begins with that does not lead into the root."""


def _of_images(entry: DatasetEntry, rows: list[Row], missing: Container[str]) -> Iterator[str]:
    """Why the first image is not found where a row names it, what it is called, and the option that mends it."""
    root, arguments = entry.root, inspect.signature(DATASETS[entry.reader].read).parameters
    named = dict.fromkeys(side for row in rows for side in (row.before, row.after) if isinstance(side, str) and side)
    lost = [name for name in named if os.path.join(root, name) in missing or FAR.match(name)]
    if not lost:
        return
    name, above = lost[0], root.resolve().parent
    parts = unquote(name).replace("\\", "/").split("/")
    ends = ["/".join(parts[number:]) for number in range(1, len(parts))]
    end = next((end for end in ends if end and (root / end).is_file()), None)
    walk = ((folder, each) for folder, _, files in os.walk(root) for each in sorted(files))
    there = [os.path.relpath(os.path.join(folder, each), root) for folder, each in islice(walk, LISTED)]
    alike = ((other, how) for key, how in ALIKE for other in there if key(other) == key(name))
    if FAR.match(name) and end:
        yield f"{name}: is {end} in {root}; paths are relative to it: write them without what stands in front"
    elif FAR.match(name) and "://" in name and not name.startswith("file:"):
        yield f"{name}: is an address; download the images into {root} and write their paths"
    elif FAR.match(name):
        yield (
            f"{name}: leads out of the root; copy the images into {root} and write their paths, relative to it, or, "
            "where the file says the right place, name the images' folder in the entry: image_root"
        )
    elif os.path.islink(root / name):
        yield f"{name}: is a symbolic link to {os.readlink(root / name)}, which leads to no file; copy the file there"
    elif os.path.isfile(above / name) and "manifest" in arguments:
        file, to = entry.options.get("manifest", arguments["manifest"].default), root.resolve().name
        moved = f"{to}/{file}" if isinstance(file, str) else {split: f"{to}/{each}" for split, each in file.items()}
        yield f"{name}: is found from the folder above; take {above} as root: {options(manifest=moved)}"
    elif found := next(alike, None):
        yield f"{name!r}: there is {found[0]!r}: {found[1]}; write names as the files have them"
    elif deeper := next((each for each in there if each.endswith(f"/{name}")), None):
        yield f"{name}: there is {deeper}; {_in_folder_below(entry, there, rows, lost)}"
    elif number := re.fullmatch(r"(.*\D)?(\d+)\.0(\D*)", name):
        yield f"{name}: {number[2]}.0 is a whole number that pandas made a float; write {{column:d}} in the template"
    else:
        yield f"{name}: is nowhere below {root}; fetch the images and put them there"


def _in_folder_below(entry: DatasetEntry, there: list[str], rows: list[Row], lost: list[str]) -> str:
    """The option that names the folder of images which the rows name without it."""
    arguments = inspect.signature(DATASETS[entry.reader].read).parameters
    found = {name: each.removesuffix(name) for each in reversed(there) for name in lost if each.endswith(f"/{name}")}
    if "columns" not in arguments:
        folder = found[lost[0]]
        images = entry.options.get("images", getattr(arguments.get("images"), "default", None))
        return f"name the folder: {options(images=folder + images)}" if images else f"move them out of {folder}"
    named = dict(entry.options.get("columns", {}))
    columns = {side: named.get(side, side) for side in ("before", "after")}
    if images := named.pop("images", None):
        columns = {"images": None, "before": f"{images}.0", "after": f"{images}.1"}
    for side in ("before", "after"):
        folder = next((found[value] for row in rows if (value := getattr(row, side)) in found), "")
        name, folder = columns[side], re.sub("[{}]", r"\g<0>\g<0>", folder)
        if not isinstance(name, str):
            return f"write it as {folder}{lost[0]}"
        columns[side] = folder + name if "{" in name else f"{folder}{{{name}}}"
    return f"name the folder: {options(columns=named | columns)}"


def _of_splits(rows: list[Row]) -> Iterator[str]:
    """The option that says what splits of other names are."""
    names = {str(row.split) for row in rows} - {"None"}
    others, left = sorted(names - {*SPLITS}), [split for split in SPLITS if split not in names]
    example = dict(zip(others, chain(left, repeat("train")), strict=False))
    yield f"say which splits {', '.join(others)} are, for example {options(splits=example)} (reader pairs)"


def _of_rows(rows: list[Row]) -> Iterator[str]:
    """Faults of captions, and of pairs of one image."""
    same = [row for row in rows if row.before and row.before == row.after and row.change_types != [NO_CHANGE]]
    if same:
        yield f"{same[0].source}: both images are {same[0].before} ({len(same):,} such pairs); name both"
    untyped = [row for row in rows if not isinstance(row.references, list) and row.references is not None]
    if untyped:
        yield f"{untyped[0].source}: captions are a text, a list of texts, or a JSON list in a field of a table"


def _of_flags(entry: DatasetEntry, rows: list[Row]) -> Iterator[str]:
    """Pairs in LEVIR-CC's layout that `changeflag` calls unchanged, in sentences that LEVIR-CC does not have."""
    if entry.reader != "levir_cc":
        return
    file = "LevirCCcaptions.json"
    records = read_json(entry.root / file, dict)["images"]
    flagged = sum(isinstance(record, dict) and str(record.get("changeflag")) in ("0", "False") for record in records)
    same = sum(row.change_types == [NO_CHANGE] for row in rows)
    if flagged > 2 * same:
        sides = {side: f"images/{{split}}/{folder}/{{filename}}" for side, folder in (("before", "A"), ("after", "B"))}
        columns, flags = sides | {"captions": "sentences.*.raw"}, {"changeflag": [0, False]}
        own = options(manifest=file, rows="images", columns=columns, no_change=flags)
        yield (
            f"{file}: changeflag calls {flagged:,} pairs unchanged, but {same:,} have LEVIR-CC's sentences for that; "
            f"the others are read as changed; read data of one's own by the reader pairs: {own}"
        )


def _of_columns(entry: DatasetEntry, faults: list[str]) -> Iterator[str]:
    """Files that call a column otherwise than the others, with the option that names both."""
    files, named = _annotation_files(entry), dict(entry.options.get("columns", {}))
    matches = (re.match(r"(.+?), (?:line|record|row|header)[^:]*: (.+): is missing", fault) for fault in faults)
    missing = {
        (match[1], column) for match in matches if match and match[1] in files for column in match[2].split(", ")
    }
    firsts: dict[str, Mapping[str, Any]] = {}
    for file in files if missing else ():
        values = read_values(entry.root / file, (), entry.options.get("delimiter"), entry.options.get("rows", ""))
        firsts[file] = next((value for _, value in values if isinstance(value, dict)), {})
    for file, column in sorted(missing):
        field = next((field for field, name in named.items() if name == column), column)
        if column in firsts[file] or field not in ("before", "after", "captions"):
            continue
        known = {name for other, first in firsts.items() if other != file and column in first for name in first}
        fits = is_image if field != "captions" else lambda value: isinstance(value, str) and " " in value.strip()
        others = [name for name, value in firsts[file].items() if fits(value) and name not in known]
        remedy = f"add the column {column}"
        if len(others) == 1:
            remedy = f"name both: {options(columns=named | {field: [column, *others]})}"
        yield f"{file}: has the columns {', '.join(firsts[file])}, of which none is {column}; {remedy}"


def _no_images(paths: Iterable[str]) -> Iterator[str]:
    """The first files that are no images, with what they are instead."""
    for path in islice(paths, LOOKED):
        try:
            with suppress(Image.DecompressionBombError), Image.open(path, formats=known_formats()):
                pass  # validate has a limit of size of its own
        except UnidentifiedImageError:
            data = Path(path).read_bytes()[:200]
            yield f"{path}: {next(told for fits, told in CONTENTS if fits(data))}"
        except OSError as error:
            yield f"{path}: cannot be read: {error.strerror}; check its permissions"
