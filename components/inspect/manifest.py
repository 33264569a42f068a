"""How a table of pairs can be read: its options for the reader `pairs`, guessed from names and from the first row.

A guess is a suggestion, never taken without being shown. What cannot be guessed is a DataError that says what the table
holds, what is wrong with it, and what mends it.
"""

import os
import re
import shlex
from codecs import BOM_UTF8
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from components.datasets import pairs
from components.datasets.embedded import Embedded, rows_of
from components.datasets.files import parse_json, quoted, read_text
from components.datasets.tables import DELIMITERS, read_values, sep_line
from components.records import SPLITS, DataError

SUFFIXES = (".csv", ".tsv", ".jsonl", ".json", ".parquet")
IMAGES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm")
SEPARATORS = (",", ";", "\t", "|")
SIDES = (
    ("before", "after"),
    ("image1", "image2"),
    ("img1", "img2"),
    ("image0", "image1"),
    ("img0", "img1"),
    ("imagebefore", "imageafter"),
    ("beforeimage", "afterimage"),
    ("source", "target"),
    ("sourceimage", "targetimage"),
    ("sourceimg", "targetimg"),
    ("originalimage", "editedimage"),
    ("inputimage", "outputimage"),
    ("imagea", "imageb"),
    ("imga", "imgb"),
    ("first", "second"),
    ("left", "right"),
    ("old", "new"),
    ("a", "b"),
    ("bef", "aft"),
)
"""What columns and folders of both images are often called, in small letters and digits alone."""

NAMES = {
    "images": ("images", "image", "imgs", "imagepaths"),
    "captions": ("captions", "caption", "description", "sentences", "text", "conversations", "messages", "answer")
    + ("differences", "difference", "output", "response", "sents", "label", "value"),
    "split": ("split", "subset", "partition"),
}
ALIASES = {
    "train": ("train", "training", "restval"),
    "val": ("val", "valid", "validation", "dev", "development", "eval"),
    "test": ("test", "testing"),
}


class Guess(NamedTuple):
    """`options` for the reader `pairs`, and `notes` on what was found that is not as it is by default."""

    options: dict[str, Any]
    notes: list[str]


def guess(root: Path) -> Guess:
    """How the first manifest in a folder that is a table of pairs can be read.

    Raises:
        DataError: no manifest is; a line for each says why.
    """
    faults = []
    for path in manifests(root):
        try:
            return _guess(root, path)
        except DataError as error:
            faults.append(str(error))
    raise DataError("\n".join(faults))


def manifests(root: Path) -> list[Path]:
    """Files of a folder that could be a table, those that the system hides left out."""
    return sorted(path for path in root.iterdir() if path.suffix.lower() in SUFFIXES and path.name[0] not in "._")


def split_called(name: str) -> str | None:
    """train, val or test, as a name has it: `Train`, `validation`, `my_dev`; None where it says none, or several."""
    words = re.findall(r"[a-z]+", name.lower())
    found = {split for split, aliases in ALIASES.items() for alias in aliases if alias in words}
    return found.pop() if len(found) == 1 else None


def _guess(root: Path, path: Path) -> Guess:
    files = _of_splits(root, path)
    options: dict[str, Any] = {"manifest": files or path.name}
    notes = [f"{', '.join(files.values())}: a file for each split"] if files else []
    read = {path.name} if not files else {each.name for name in files.values() for each in root.glob(name)}
    if others := [each.name for each in manifests(root) if each.name not in read]:
        notes.append(f"not read: {', '.join(others)} (a pattern reads several: manifest: '*{path.suffix}')")
    reading, first = _first_row(path)
    if "delimiter" in reading:
        notes.append(f"{path.name}: its columns are separated by {reading['delimiter']!r}: option `delimiter`")
    if "rows" in reading:
        notes.append(f"{path.name}: its rows stand under {reading['rows']!r}: option `rows`")
    values = {name: value for name, value in _flat(first) if not set("{}") & set(name)}  # braces are of templates
    columns = _columns(root, path, values)
    if len({field: name for field, name in columns.items() if field == name}) < len(columns):
        named = ", ".join(f"{field} is {name}" for field, name in columns.items() if field != name)
        notes.append(f"{path.name}: has the columns {', '.join(first)}, read as: {named}")
    split = next((name for name in values if _plain(name.split(".")[-1]) in NAMES["split"]), None)
    if split not in (None, "split") and not files:
        columns["split"] = split
    if isinstance(values.get(str(columns.get("captions", "captions"))), list) and "images" in columns and "id" in first:
        columns["id"] = None
    if renamed := {field: name for field, name in columns.items() if field != name or field == "images"}:
        options["columns"] = renamed
    options |= reading
    if not split and not files:
        options["split"] = split_called(path.stem) or "train"
        notes.append(f"{path.name}: no column tells the split, so all pairs are {options['split']}: option `split`")
    if aliases := {} if files or "split" in options else _aliases(root, options):
        options["splits"] = aliases
        notes.append(f"{path.name}: its splits have other names: option `splits`")
    return Guess(options, notes)


def _of_splits(root: Path, path: Path) -> dict[str, str]:
    """The manifest and its siblings by split, where they are called train, dev, ...; a pattern for several of a split.
    Nothing where the manifest is alone."""
    found: dict[str, list[str]] = {}
    for each in manifests(root):
        if each.suffix == path.suffix and (split := split_called(each.stem)):
            found.setdefault(split, []).append(each.name)
    together = [name for names in found.values() for name in names]
    if len(together) < 2 or path.name not in together:
        return {}
    files = {split: _pattern(found[split]) for split in SPLITS if split in found}
    exact = all(sorted(each.name for each in root.glob(files[split])) == found[split] for split in files)
    return files if exact else {}


def _pattern(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{os.path.commonprefix(names)}*{Path(names[0]).suffix}"


def _first_row(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options that say how the file is cut into rows, and its first row that can be read; a header's names where none
    can."""
    suffix, reading, header = path.suffix.lower(), dict[str, Any](), list[str]()
    if suffix == ".parquet":
        return reading, _first_of_parquet(path)
    if suffix in DELIMITERS:
        named, text = sep_line(read_text(path))
        line = text.lstrip().splitlines()[0]
        best = named or max(SEPARATORS, key=line.count)
        if not named and line.count(best) and best != DELIMITERS[suffix]:
            reading["delimiter"] = best
        if comments := re.match(r"(#.*\n)+", text):
            _check_comments(path, comments[0].count("\n"), text)
        header = [name.strip().strip('"') for name in line.split(best)]
        _check_header(path, header, best)
    elif suffix == ".json":
        value = parse_json(read_text(path), str(path))
        lists = {key: rows for key, rows in value.items() if _is_rows(rows)} if isinstance(value, dict) else {}
        if lists:
            reading["rows"] = max(lists, key=lambda key: len(lists[key]))
    wrong = f"{path}: has no row that is an object with before, after, captions and split"
    for where, row in read_values(path, (), reading.get("delimiter"), reading.get("rows", "")):
        if isinstance(row, dict):
            return reading, row
        wrong = f"{path.parent / where}: {row}" if isinstance(row, DataError) else wrong
    if not header:
        raise DataError(wrong)
    return reading, dict.fromkeys(header)


def _first_of_parquet(path: Path) -> dict[str, Any]:
    try:
        return next(rows_of(path), None) or dict.fromkeys(pq.read_schema(path).names)
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path}: cannot be read as Parquet: {error}; write it again") from error


def _is_rows(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict)


def _check_comments(path: Path, count: int, text: str) -> None:
    """Refuse lines of comments above the header; one line with as many columns as the next is a header itself."""
    first, *rest = text.splitlines()
    if count > 1 or not any(first.count(each) and first.count(each) == rest[0].count(each) for each in SEPARATORS):
        raise DataError(f"{path}: begins with a comment; remove it: `sed -i.bak '1,{count}d' {quoted(path)}`")


def _check_header(path: Path, header: list[str], delimiter: str) -> None:
    """Refuse a table whose first line is a pair, with the command that writes a header above it."""
    sides = iter(("before", "after"))
    named = [
        next(sides, "unused") if is_image(name) else "split" if split_called(name) else "captions" for name in header
    ]
    if "after" in named:
        new, rest = quoted(f"{path}.new"), "tail -c +4" if path.read_bytes().startswith(BOM_UTF8) else "cat"
        header_line = shlex.quote(delimiter.join(named))
        raise DataError(
            f"{path}: has no header, its first line is a pair already; write one above it: "
            f"`(echo {header_line}; {rest} {quoted(path)}) > {new} && mv {new} {quoted(path)}`"
        )


def is_image(value: Any) -> bool:
    """Whether a value names an image, by its suffix."""
    return isinstance(value, str) and value.strip().lower().endswith(IMAGES)


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _flat(row: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The row's values by column, then those of its objects by path."""
    yield from row.items()
    for name, value in row.items():
        if isinstance(value, dict):
            yield from ((f"{name}.{key}", inner) for key, inner in value.items())


def _columns(root: Path, path: Path, values: Mapping[str, Any]) -> dict[str, Any]:
    """Which columns hold the images and the captions."""
    images = _images(values) or _templates(root, values)
    captions = _captions({name: value for name, value in values.items() if name not in images.values()})
    found = ", ".join(values) or "nothing"
    if not images:
        raise DataError(
            f"{path}: has the columns {found}; none names two images: add `before` and `after` with their paths, or "
            "say which columns do: options: {columns: {before: ..., after: ..., captions: ...}}"
        )
    if not captions:
        raise DataError(
            f"{path}: has the columns {found}; none holds captions: add a column `captions` with a text or a list of "
            "texts for each pair (captions that stand in another file belong in this one)"
        )
    return images | {"captions": captions}


def _images(values: Mapping[str, Any]) -> dict[str, str]:
    """The columns of both images: by their names, else one with a list of them, else by what stands in them."""
    plain = {_plain(name.split(".")[-1]): name for name in reversed(list(values))}
    for before, after in SIDES:
        if before in plain and after in plain:
            return {"before": plain[before], "after": plain[after]}
    for name in NAMES["images"]:
        if isinstance(values.get(plain.get(name, "")), list):
            return {"images": plain[name]}
    named = [name for name, value in values.items() if is_image(value) or isinstance(value, Embedded)]
    return dict(zip(("before", "after"), named, strict=True)) if len(named) == 2 else {}


def _templates(root: Path, values: Mapping[str, Any]) -> dict[str, str]:
    """`before/{name}.png` and `after/{name}.png`, where a column names an image in each of two folders."""
    folders = two_folders(root)
    for name, value in values.items():
        if folders and isinstance(value, str | int):
            for end in ("", *IMAGES):
                if all(os.path.isfile(root / folder / f"{value}{end}") for folder in folders):
                    return {
                        side: f"{folder}/{{{name}}}{end}"
                        for side, folder in zip(("before", "after"), folders, strict=True)
                    }
    return {}


def two_folders(root: Path) -> tuple[str, str] | None:
    """The two folders in `root` that are called as the sides of a pair are."""
    plain = {_plain(path.name): path.name for path in sorted(root.iterdir()) if path.is_dir()}
    return next(((plain[before], plain[after]) for before, after in SIDES if before in plain and after in plain), None)


def _captions(values: Mapping[str, Any]) -> str | None:
    """The column of captions: by its name, else the longest text of several words."""
    plain = {_plain(name.split(".")[-1]): name for name in reversed(list(values))}
    named = [plain[name] for name in NAMES["captions"] if name in plain]
    texts = [name for name, value in values.items() if isinstance(value, str) and " " in value.strip()]
    name = next(iter(named), max(texts, key=lambda name: len(values[name]), default=None))
    value = values.get(name or "")
    if _is_rows(value) and isinstance(value, list):  # sentences in objects of their own; a conversation stays as it is
        inside = next((key for key in ("raw", "text", "caption", "sentence") if key in value[0]), None)
        return f"{name}.*.{inside}" if inside else name
    return name


def _aliases(root: Path, options: dict[str, Any]) -> dict[str, str]:
    """The manifest's own names of splits that are none of train, val, test and that say which they are."""
    names = {row.split for row in pairs.read(root, **options) if isinstance(row.split, str)} - set(SPLITS)
    return {name: split for name in sorted(names) if (split := split_called(name))}
