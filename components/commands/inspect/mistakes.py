"""Typical mistakes in a dataset's folder: what was found, what is wrong with it, and what mends it, a line for each."""

import inspect
import json
import os
import re
import shlex
import tarfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any
from unicodedata import normalize
from urllib.parse import unquote

import yaml
from PIL import Image, UnidentifiedImageError

from m3diff.commands.inspect.manifest import is_image, manifests, two_folders
from m3diff.datasets import DATASETS
from m3diff.datasets.files import quoted, read_json
from m3diff.datasets.pairs import NO_PAIR
from m3diff.datasets.spec import Row
from m3diff.datasets.tables import read_values
from m3diff.images.open import known_formats
from m3diff.records.schemas import NO_CHANGE, SPLITS
from m3diff.stages.ingest.params import DatasetEntry

TAR = "tar -C {root} -xf {path}"
ARCHIVES = {
    ".zip": "unzip {path} -d {root}",
    ".gz": "gunzip {path}",
    ".bz2": "bunzip2 {path}",
    ".xz": "unxz {path}",
    ".zst": "unzstd --rm {path}",
    ".7z": "7z x -o{root} {path}",
    ".rar": "unrar x {path} {root}/",
} | dict.fromkeys((".tar", ".tgz", ".tbz2", ".txz"), TAR)
"""What unpacks a file, by its suffix."""

RENAMED = {".ndjson": ".jsonl", ".jl": ".jsonl", ".tab": ".tsv", ".pq": ".parquet", ".parq": ".parquet"}
"""Other suffixes of tables that are read."""

ARROW = (
    "import sys, pyarrow as a, pyarrow.parquet as q; p = sys.argv[1]; f = open(p, 'rb').read(6) == b'ARROW1'; "
    "q.write_table((a.ipc.open_file if f else a.ipc.open_stream)(p).read_all(), p + '.parquet')"
)
SHEETS = (".xlsx", ".xls", ".ods", ".numbers")
VIDEOS = (".mp4", ".avi", ".mov", ".mkv", ".webm")
HEADER = "before,after,captions,split"
LISTED = 200_000
"""Files below a root that are looked at for a missing image."""

LOOKED = 1_000
"""Images whose first bytes are looked at; ingest decodes every one."""


def foreign(root: Path) -> str | None:
    """What the folder is, where it holds pairs in a form that no reader takes for its own."""
    names = {path.name for path in root.iterdir()}
    if "change_multi_captions.json" in names:
        return (
            "this is CARD's folder of Spot-the-Diff, whose captions are joined and cut at 60 words; take the original, "
            "which is scored by CARD's protocol, too (multi-change): `git clone "
            "https://github.com/harsh19/spot-the-diff`, folder data, reader spot_the_diff"
        )
    if "dataset_info.json" in names and '"m3diff_' in (root / "dataset_info.json").read_text("utf-8", "replace"):
        return (
            "this is what `m3diff export-llava` wrote of datasets that are in ingest.datasets already; name the folder "
            "of one of these, or, in another project, the folder of the images as root with the file in it: "
            "options: {manifest: train.json, columns: {images: images, captions: conversations, "
            "split: metadata.split, id: null}}"
        )
    return None


def in_folder(root: Path) -> Iterator[str]:
    """Mistakes that the names of a folder's files tell, where no table of pairs can be read."""
    files = sorted(path for path in root.iterdir() if path.name[0] != ".")
    for path in files:
        suffix, name = path.suffix.lower(), quoted(path)
        if suffix in ARCHIVES:
            is_tar = ".tar." in path.name.lower() or (path.is_file() and tarfile.is_tarfile(path))
            command = (TAR if is_tar else ARCHIVES[suffix]).format(path=name, root=quoted(root))
            yield f"{path.name}: is an archive, which is not read; unpack it: `{command}`"
        elif suffix in RENAMED:
            yield f"{path.name}: call it as tables are called: `mv {name} {quoted(path.with_suffix(RENAMED[suffix]))}`"
        elif suffix in (".arrow", ".feather"):
            yield f"{path.name}: write it as Parquet: `python -c {shlex.quote(ARROW)} {name}`"
        elif suffix in SHEETS:
            yield f"{path.name}: is a spreadsheet, which is not read; save it as CSV (UTF-8) with the header {HEADER}"
        elif suffix in VIDEOS:
            yield (
                f"{path.name}: is a video, and pairs are images; take frames of it: "
                f"`ffmpeg -i {name} -vf fps=1 {quoted(root)}/%05d.png`, and write pairs.csv with the header {HEADER}"
            )
        elif suffix == ".dvc":
            yield f"{path.name}: is DVC's pointer to data that are not here; fetch them: `dvc pull {name}`"
        elif suffix in (".txt", ".xml", ".yaml", ".yml", ".ods", ".h5", ".pkl") and path.is_file():
            yield f"{path.name}: is no table that is read; write .csv, .tsv, .json, .jsonl or .parquet with {HEADER}"
    if not manifests(root):
        yield from _images_alone(root, [path for path in files if path.is_dir()], files)
    yield from _elsewhere(root, files)


def _images_alone(root: Path, folders: list[Path], files: list[Path]) -> Iterator[str]:
    """Images without a table: in one folder, or in two whose names do or do not match."""
    write = f"write {root / 'pairs.csv'} with the header {HEADER} and a line for each pair"
    holding = {folder.name: _images_in(folder) for folder in folders}
    holding = {name: images for name, images in holding.items() if images}
    sides = two_folders(root)
    if sides and all(side in holding for side in sides):
        before, after = (set(holding[side]) for side in sides)
        stems = {Path(name).stem for name in before} & {Path(name).stem for name in after}
        same = len(before & after)
        if same == len(before | after):
            yield f"{sides[0]}/ and {sides[1]}/ hold {same:,} pairs of images, but no file has captions; {write}"
        else:
            alone = sorted(before ^ after)[0]
            why = "under other suffixes" if len(stems) > same else "of the same name"
            yield (
                f"{sides[0]}/ and {sides[1]}/ hold {len(before):,} and {len(after):,} images, {same:,} of the same "
                f"name and {len(stems) - same:,} under other suffixes ({alone} has no partner {why}); {write}"
            )
    elif holding or any(is_image(path.name) for path in files):
        where = ", ".join(f"{name}/" for name in holding) or "the folder"
        yield f"{where}: holds images, but no file says which are a pair and what changed; {write}"


def _images_in(folder: Path) -> list[str]:
    try:
        return [path.name for path in folder.iterdir() if is_image(path.name)]
    except OSError:
        return []


def _elsewhere(root: Path, files: list[Path]) -> Iterator[str]:
    """A folder below, or the one above, that holds a table of pairs."""
    for folder in files:
        if folder.is_dir() and (found := _tables(folder)):
            yield f"{folder.name}/ holds {found[0].name}; perhaps you mean `m3diff data check {quoted(folder)}`"
    above = root.resolve().parent
    if any(is_image(path.name) for path in files) and (found := _tables(above)):
        yield f"the folder above holds {found[0].name}; name that one: `m3diff data check {quoted(above)}`"


def _tables(folder: Path) -> list[Path]:
    try:
        return manifests(folder)
    except OSError:
        return []


def of_images(entry: DatasetEntry, files: list[str], rows: list[Row], missing: list[str]) -> Iterator[str]:
    """Why images are not found where the rows name them, and the command or the option that mends it.

    Args:
        files: the dataset's annotation files, relative to the root.
        missing: paths of images that are not there.
    """
    gone = {*missing}
    values = _values(rows)
    lost = [value for value in values if os.path.join(entry.root, value) in gone or FAR.match(value)]
    if slashes := next((value for value in lost if "\\" in value), None):
        yield f"{slashes}: has backslashes; paths have slashes: {_replace(entry.root, files, chr(92), '/')}"
        return
    if blanks := next((value for value in lost if value != value.strip()), None):
        yield f"{blanks!r}: begins or ends in a blank; remove it: {_edit(entry.root, files, BLANKS)}"
        return
    far = next((value for value in lost if FAR.match(value)), None)
    if far:
        yield _from_afar(entry.root, files, far)
    if near := [value for value in lost if not FAR.match(value)]:
        yield _where_it_is(entry, files, rows, near)


def _values(rows: Iterable[Row]) -> list[str]:
    """Every path of an image once, in the rows' order."""
    found = (value for row in rows for value in (row.before, row.after))
    return list(dict.fromkeys(value for value in found if isinstance(value, str) and value))


FAR = re.compile(r"/|~|\$|\\\\|[A-Za-z]:\\|[A-Za-z][A-Za-z0-9+.-]*:/|\.\.[/\\]")
"""What a path begins with that does not lead into the root."""

START = r"^|[^[:alnum:]_./-]"
END = r"[,;|\"[:cntrl:]]"
NAME = r"[^,;|\"[:cntrl:]]*\.(png|PNG|jpe?g|JPE?G|webp|gif|tiff?|bmp)"
BLANKS = f"s/(^|{END}) +({NAME})/\\1\\2/g; s/({NAME}) +({END}|$)/\\1\\3/g"
"""For sed: blanks around the name of an image that fills its field."""


def _from_afar(root: Path, files: list[str], value: str) -> str:
    """Of an absolute path or an address: the part in front of what lies in the root, and how it is taken away."""
    parts = value.split("/")
    ends = ("/".join(parts[number:]) for number in range(1, len(parts)))
    end = next((end for end in ends if end and (root / unquote(end)).is_file()), None)
    if end:
        new = f"{root.absolute().as_uri()}/" if value.startswith("file:") else ""
        start = value.removesuffix(end)
        return f"{value}: is {end} in {root}; paths are relative to it: {_replace(root, files, start, new, START)}"
    if "://" in value and not value.startswith("file:"):
        return f"{value}: is an address; download the images into {root} and write their paths"
    return (
        f"{value}: leads out of the root; copy the images into {root} and write their paths, relative to it, or, where "
        "the file says the right place, name the images' folder in the entry: image_root"
    )


def _replace(root: Path, files: list[str], old: str, new: str, start: str = "") -> str:
    """The command that replaces a part of paths as it is written in the files; where it is not there, what to do.

    Args:
        start: a regular expression of what stands in front of it and stays.
    """
    ways: tuple[Callable[[str], str], ...] = (str,)
    if not files[0].lower().endswith((".csv", ".tsv")):  # JSON may escape letters, and slashes
        ways = tuple(partial(_escaped, ascii=ascii, slash=slash) for ascii in (True, False) for slash in ("/", "\\/"))
    texts = [(root / file).read_text("utf-8", "replace") for file in files if not file.endswith(".parquet")]
    way = next((way for way in ways if any(way(old) in text for text in texts)), None)
    if way is None:
        return f"write {new!r} for {old!r} in {', '.join(files)} or in the template of the column"
    pattern, by = re.sub(r"[][\\.*^$+?(){}|#]", r"\\\g<0>", way(old)), re.sub(r"[\\&#]", r"\\\g<0>", way(new))
    return _edit(root, files, f"s#({start}){pattern}#\\1{by}#g")


def _escaped(text: str, ascii: bool, slash: str) -> str:
    return json.dumps(text, ensure_ascii=ascii)[1:-1].replace("/", slash)


def _edit(root: Path, files: list[str], script: str) -> str:
    """The command that edits the files in place, by GNU's sed as by that of macOS."""
    return f"`sed -i.bak -E {shlex.quote(script)} {' '.join(quoted(root / file) for file in files)}`"


def options(**values: Any) -> str:
    """Options of an entry as one writes them in params.yaml."""
    line = yaml.safe_dump(values, default_flow_style=True, sort_keys=False, width=10_000, allow_unicode=True)
    return f"options: {line.strip()}"


def _where_it_is(entry: DatasetEntry, files: list[str], rows: list[Row], lost: list[str]) -> str:
    """What is there in place of the first missing image."""
    root, name, values = entry.root, lost[0], _values(rows)
    arguments = inspect.signature(DATASETS[entry.reader].read).parameters
    if os.path.islink(root / name):
        return f"{name}: is a symbolic link to {os.readlink(root / name)}, which leads to no file; copy the file there"
    above, to = root.resolve().parent, root.resolve().name
    if os.path.isfile(above / name) and "manifest" in arguments:
        file = entry.options.get("manifest", arguments["manifest"].default)
        moved = f"{to}/{file}" if isinstance(file, str) else {split: f"{to}/{each}" for split, each in file.items()}
        return f"{name}: is found from the folder above; take {above} as root: {options(manifest=moved)}"
    there = list(_below(root))
    same = [each for each in there if normalize("NFC", each) == normalize("NFC", name)]
    if same:
        return f"{name}: there is {same[0]}, the same letters in another Unicode form; {_rename(root, values)}"
    stem, suffix = os.path.splitext(name)
    other = next((each for each in there if os.path.splitext(each)[0] == stem and is_image(each)), None)
    command = ""
    if other and all(value in lost for value in values if value.endswith(suffix)):
        command = f": {_replace(root, files, suffix, os.path.splitext(other)[1])}"
    if case := next((each for each in there if each.lower() == name.lower()), None):
        return f"{name}: there is {case}; large and small letters differ, write names as the files have them{command}"
    if other:
        return f"{name}: there is {other}; write the suffix that the files have{command}"
    if deeper := next((each for each in there if each.endswith(f"/{name}")), None):
        return f"{name}: there is {deeper}; {_in_folder_below(entry, there, rows, lost)}"
    if number := re.fullmatch(r"(.*\D)?(\d+)\.0(\D*)", name):
        return f"{name}: {number[2]}.0 is a whole number that pandas made a float; write {{column:d}} in the template"
    return f"{name}: is nowhere below {root}; fetch the images and put them there"


def _rename(root: Path, values: list[str]) -> str:
    """The command that gives files the Unicode form that the table has."""
    forms = [form for form in ("NFC", "NFD") if all(normalize(form, value) == value for value in values)]
    if not forms:
        return "the table has names in both forms: write it in one"
    code = (
        "import os, sys, unicodedata as u; [os.rename(os.path.join(d, n), os.path.join(d, u.normalize(sys.argv[1], n)))"
        " for d, s, f in os.walk(sys.argv[2], topdown=False) for n in s + f]"
    )
    return f"rename the files: `python -c {shlex.quote(code)} {forms[0]} {quoted(root)}`"


def _in_folder_below(entry: DatasetEntry, there: list[str], rows: list[Row], lost: list[str]) -> str:
    """How the folder is named in which images lie that the rows name without it."""
    arguments = inspect.signature(DATASETS[entry.reader].read).parameters
    found = {
        value: each.removesuffix(value) for each in reversed(there) for value in lost if each.endswith(f"/{value}")
    }
    if "columns" not in arguments:
        folder = found[lost[0]]
        images = entry.options.get("images", getattr(arguments.get("images"), "default", None))
        command = f"`mv {quoted(entry.root / folder)}* {quoted(entry.root)}`"
        return f"name the folder: {options(images=folder + images)}" if images else f"move them: {command}"
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


def _below(root: Path) -> Iterator[str]:
    """Files below the root, relative to it: the first of them."""
    count = 0
    for folder, _, names in os.walk(root):
        for name in sorted(names):
            yield os.path.relpath(os.path.join(folder, name), root)
        if (count := count + len(names)) > LISTED:
            return


def of_rows(rows: Iterable[Row]) -> Iterator[str]:
    """What is wrong with captions, and with pairs of one image."""
    rows = list(rows)
    same = [row for row in rows if row.before and row.before == row.after and row.change_types != [NO_CHANGE]]
    if same:
        yield f"{same[0].source}: both images are {same[0].before} ({len(same):,} such pairs); name both"
    untyped = [row for row in rows if not isinstance(row.references, list) and row.references is not None]
    if untyped:
        yield f"{untyped[0].source}: captions are a text, a list of texts, or a JSON list in a field of a table"


FAULTS: dict[str, str] = {
    "has the same id": "one id is one pair: give each its own, or read without ids: options: {columns: {id: null}}",
    "quote fields that hold": "put captions between double quotes, or save the table as .tsv or .jsonl",
    "ends too early": "the file is cut off there: fetch or write it again",
    "is a symbolic link out of": "copy the images into the root, or set follow_links: true in the entry",
}
"""What mends the faults that hold these words."""


def of_faults(faults: list[str]) -> Iterator[str]:
    """What mends rows that cannot be read."""
    yield from (remedy for words, remedy in FAULTS.items() if any(words in fault for fault in faults))
    if found := counted(faults):
        yield f"{found} are no pair and cannot be read yet; take the others: {options(pairs_only=True)} (reader pairs)"


def counted(faults: Iterable[str]) -> str:
    """Rows with another number of images or answers than a pair has, by this number; empty where there is none."""
    found = Counter(
        f"{match[1] or match[2]} {'images' if match[1] else 'answers'}"
        for match in map(NO_PAIR.search, faults)
        if match
    )
    return ", ".join(f"{count:,} with {kind}" for kind, count in sorted(found.items()))


def of_splits(names: Iterable[str], known: Iterable[str]) -> str:
    """How splits are named that the table calls otherwise: an example, which the user corrects."""
    names, left = sorted(names), [split for split in SPLITS if split not in [*known]]
    example = {name: left[number] if number < len(left) else "train" for number, name in enumerate(names)}
    return f"say which splits {', '.join(names)} are, for example {options(splits=example)} (reader pairs)"


def of_flags(entry: DatasetEntry, rows: Iterable[Row]) -> Iterator[str]:
    """Pairs in LEVIR-CC's layout that `changeflag` calls unchanged, in sentences that LEVIR-CC does not have."""
    if entry.reader != "levir_cc":
        return
    file = "LevirCCcaptions.json"
    records = read_json(entry.root / file, dict)["images"]
    flagged = sum(isinstance(record, dict) and str(record.get("changeflag")) in ("0", "False") for record in records)
    same = sum(row.change_types == [NO_CHANGE] for row in rows)
    if flagged > 2 * same:
        sides = {side: f"images/{{split}}/{folder}/{{filename}}" for side, folder in (("before", "A"), ("after", "B"))}
        own = options(
            manifest=file,
            rows="images",
            columns=sides | {"captions": "sentences.*.raw"},
            no_change={"changeflag": [0, False]},
        )
        yield (
            f"{file}: changeflag calls {flagged:,} pairs unchanged, but {same:,} have LEVIR-CC's sentences for that; "
            f"the others are read as changed; read data of one's own by the reader pairs: {own}"
        )


def of_columns(entry: DatasetEntry, files: list[str], faults: Iterable[str]) -> Iterator[str]:
    """Files that call a column otherwise than the others, with the option that names both."""
    named = dict(entry.options.get("columns", {}))
    missing = {
        (match[1], column)
        for match in (re.match(r"(.+?), (?:line|record|row|header)[^:]*: (.+): is missing", fault) for fault in faults)
        if match and match[1] in files
        for column in match[2].split(", ")
    }
    firsts = {file: _first(entry, file) for file in files} if missing else {}
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


def _first(entry: DatasetEntry, file: str) -> Mapping[str, Any]:
    """The first row of a file."""
    values = read_values(entry.root / file, (), entry.options.get("delimiter"), entry.options.get("rows", ""))
    return next((value for _, value in values if isinstance(value, dict)), {})


def no_images(paths: Iterable[str]) -> Iterator[str]:
    """Of the first files, those that no image format begins like, with what they are instead."""
    for path in islice(paths, LOOKED):
        try:
            with Image.open(path, formats=known_formats()):
                pass
        except UnidentifiedImageError:
            data = Path(path).read_bytes()[:200]
            other = "is of no known image format; write PNG or JPEG"
            yield f"{path}: {next((told for fits, told in KINDS if fits(data)), other)}"
        except OSError as error:
            yield f"{path}: cannot be read: {error.strerror}; check its permissions"
        except Image.DecompressionBombError:
            pass  # validate has a limit of its own


KINDS: tuple[tuple[Callable[[bytes], bool], str], ...] = (
    (lambda data: data.startswith(b"version https://git-lfs"), "is a pointer of Git LFS; fetch it: `git lfs pull`"),
    (lambda data: b"<html" in data.lower() or b"<!doctype" in data.lower(), "is a web page; download the image again"),
    (lambda data: data[4:8] == b"ftyp", "is a video or HEIC; convert it to PNG or JPEG"),
)
