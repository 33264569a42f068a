"""Annotation files, read strictly: a file that cannot be trusted is a DataError naming file, place, rule and remedy.

Manifests in CSV, TSV, JSON, JSON Lines or Parquet are read row by row with their places; the suffix tells the format.
"""

import codecs
import csv
import hashlib
import io
import json
import os
import re
import string
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from m3diff.records.contents import CONTENTS
from m3diff.records.errors import DataError, is_utf8, shell_word
from m3diff.records.schemas import SPLITS

T = TypeVar("T")

KINDS = {dict: "an object", list: "a list", str: "text", int: "a whole number", float: "a number"}

ADDRESS = re.compile(r"(?!file:)([a-z][a-z0-9+.-]+://|data:)", re.IGNORECASE)
# What paths of Windows and of other forms begin with, or what no path holds
ELSEWHERE = re.compile(r"\\\\|[a-z]:[/\\]|file:|.*\0", re.IGNORECASE | re.DOTALL)


def fault_of_path(name: str, root: Path, opened: Iterable[Path] = (), option: str = "image_root") -> str | None:
    """The fault of an image's path in a data row, with the remedy; None where it stays inside its root.

    Args:
        opened: other folders that it may lead into. Links are not followed: see `is_inside`.
        option: by which the user names such a folder.
    """
    if ADDRESS.match(name):
        return f"is an address, and nothing is fetched; download the image into {root} and write its path"
    path = name.replace("\\", "/")
    climbs = path.startswith("/") or ".." in path.split("/")
    inside = (Path(os.path.abspath(root / path)).is_relative_to(os.path.abspath(each)) for each in opened)
    if ELSEWHERE.match(name) or (climbs and not any(inside)):
        return f"leads out of the dataset's root; copy the image into it, or name the image's folder by {option}"
    return None


def require_utf8(root: Path) -> None:
    """See that a dataset's folder has a name that tables and records can hold.

    Raises:
        DataError: the name is not UTF-8.
    """
    if not is_utf8(str(root)):
        raise DataError(
            f"{os.fsencode(root)!r}: the folder's name is not UTF-8; rename it: `mv {quoted(root)} NEW_NAME`"
        )


def is_inside(path: Path | str, *roots: Path) -> bool:
    """True if a path leads into one of the folders once every link is followed."""
    return any(Path(os.path.realpath(path)).is_relative_to(os.path.realpath(root)) for root in roots)


def read_text(path: Path) -> str:
    """The file's text, UTF-8 with or without a byte order mark.

    Raises:
        DataError: missing, unreadable, empty or not UTF-8; it says what the file is instead.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file; the dataset is incomplete, fetch it or correct the root") from error
    except OSError as error:
        raise DataError(
            f"{path}: cannot be read: {error.strerror}; check its permissions: `chmod u+r {quoted(path)}`"
        ) from error
    if not data.removeprefix(codecs.BOM_UTF8).strip():
        raise DataError(f"{path}: the file is empty; fetch it again")
    if what := next((what for start, what in CONTENTS.items() if data.startswith(start)), None):
        raise DataError(f"{path}: {what.format(name=quoted(path), folder=quoted(path.parent))}")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        is_utf16 = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        encoding, name, new = "UTF-16" if is_utf16 else "WINDOWS-1252", quoted(path), quoted(f"{path}.new")
        raise DataError(
            f"{path}: byte {error.start} is not UTF-8, probably {encoding}; "
            f"convert it: `iconv -f {encoding} -t UTF-8 {name} > {new} && mv {new} {name}`"
        ) from error


def quoted(path: Path | str) -> str:
    """A path as a word of a shell's command."""
    return shell_word(path)


def read_json(path: Path, kind: type[T]) -> T:
    """The file's JSON value, which must be a `kind`. Repeated keys and NaN, which json lets pass, are refused."""
    value = parse_json(read_text(path), str(path))
    if not isinstance(value, kind):
        raise DataError(f"{path}: expected {describe_kind(kind)} at the top, found {describe(value)}")
    return value


def read_splits(path: Path, names: Sequence[str] = SPLITS) -> dict[str, list[Any]]:
    """`{"train": [scene number, ...], "val": ..., "test": ...}`; every name must be there, an empty list is allowed."""
    splits = read_json(path, dict)
    if missing := [split for split in names if not isinstance(splits.get(split), list)]:
        raise DataError(f"{path}: no list {' or '.join(missing)}; expected {', '.join(names)} (one may be [])")
    return {split: splits[split] for split in names}


def parse_json(text: str, where: str) -> Any:
    """The JSON value of a text; `where` (a file, or a file and line) begins the message of a fault."""
    try:
        return json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno} column {error.colno}"
        raise DataError(f"{where}: {place}: not valid JSON: {error.msg}; correct it there or fetch it again") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not usable JSON: {error}") from error


def describe(value: Any) -> str:
    """A value for a message: its kind, and the value itself cut to 60 characters."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    shown = repr(value)
    return f"{describe_kind(type(value))} {shown if len(shown) <= 60 else shown[:57] + '...'}"


def describe_kind(kind: type) -> str:
    return KINDS.get(kind, kind.__name__)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"key {next(key for key in keys if keys.count(key) > 1)!r} occurs twice; keep one")
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON value; use null or remove it")


# By the first bytes; of another format the file has no suffix
SUFFIXES = {b"\x89PNG": ".png", b"\xff\xd8\xff": ".jpg", b"GIF8": ".gif", b"RIFF": ".webp", b"BM": ".bmp"}


@dataclass(frozen=True)
class Embedded:
    """An image, by the place of its bytes; equal to another of the same bytes."""

    name: str  # the digest of the bytes, shortened, with a suffix
    manifest: Path = field(compare=False)
    group: int = field(compare=False)  # row group
    row: int = field(compare=False)  # in its group
    column: str = field(compare=False)
    item: int | None = field(compare=False)  # in a list of images

    def read(self) -> bytes:
        value = _column(self.manifest, self.group, self.column)[self.row]
        image = value if self.item is None else value[self.item]
        return image["bytes"] if isinstance(image, dict) else image


@lru_cache(maxsize=2)
def _column(manifest: Path, group: int, column: str) -> Any:
    """A column of a row group: images of a pair, and the pairs of a group, are asked for one after another."""
    return pq.ParquetFile(manifest).read_row_group(group, [column]).column(0).to_pylist()


def _detached(value: Any, path: Path, group: int, row: int, column: str, item: int | None = None) -> Any:
    """The place of an image in place of its bytes; its path where it has no bytes; other values as they are.

    Bytes without a path are an image, too, if they begin as one.
    """
    if isinstance(value, list):
        return [_detached(each, path, group, row, column, number) for number, each in enumerate(value)]
    image = isinstance(value, dict) and value.keys() == {"bytes", "path"}
    if image and value["bytes"] is None:
        return value["path"]
    if not image and not isinstance(value, bytes):
        return value
    data = value["bytes"] if image else value
    suffix = next((end for start, end in SUFFIXES.items() if data.startswith(start)), "")
    if not image and not suffix:
        return value
    return Embedded(hashlib.sha256(data).hexdigest()[:32] + suffix, path, group, row, column, item)


DELIMITERS = {".csv": ",", ".tsv": "\t"}
# The line above the header by which Excel tells itself the delimiter
SEP_LINE = re.compile(r'"?sep=(.)"?[\r\n]', re.IGNORECASE)
# Of how many files a split of the Hugging Face hub lies in: data/train-00003-of-00032-<hash>.parquet
SHARD = re.compile(r"-\d{5}-of-(\d{5})\b")


def read_values(
    path: Path, required: Sequence[str], delimiter: str | None = None, rows: str = ""
) -> Iterator[tuple[str, Any]]:
    """The place and the value of every row; a DataError stands for a row that cannot be read.

    Args:
        required: columns that a header must have.
        delimiter: of a CSV or TSV file, where it is another than the suffix tells.
        rows: where in a JSON file the rows stand (a path, as of `pick`); they may be an object, too, whose keys are the
            column `key`.

    Raises:
        DataError: the file cannot be read, or a required column is missing from its header.
    """
    suffix = path.suffix.lower()
    if suffix in DELIMITERS:
        return _delimited(path, delimiter, required)
    if suffix == ".jsonl":
        return read_lines(path)
    if suffix == ".json":
        return _json_rows(path, rows)
    if suffix == ".parquet":
        return _parquet(path, required)
    raise DataError(f"{path}: unknown kind of manifest; use .csv, .tsv, .json, .jsonl or .parquet")


def numbered(file: str, values: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """The place and the value of every record of a list."""
    return ((f"{file}, record {number}", value) for number, value in enumerate(values))


def _json_rows(path: Path, rows: str) -> Iterator[tuple[str, Any]]:
    """The rows below `rows`: a list, or an object with a row per key, whose other values are `value` if they have no
    names of their own."""
    found = pick(parse_json(read_text(path), str(path)), rows)
    if isinstance(found, list):
        return numbered(path.name, found)
    if not isinstance(found, dict):
        raise DataError(f"{path}: rows: expected a list or an object at {rows!r}, found {describe(found)}")
    named = ((key, value if isinstance(value, dict) else {"value": value}) for key, value in found.items())
    return ((f"{path.name}, {key}", {"key": key} | value) for key, value in named)


def _delimited(path: Path, given: str | None, required: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Rows of a CSV or TSV file; the line is the one where the row ends."""
    csv.field_size_limit(2**31 - 1)
    text = read_text(path)
    named = SEP_LINE.match(text)
    delimiter = given or (named[1] if named else DELIMITERS[path.suffix.lower()])
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    rows = islice(reader, int(named is not None), None)
    try:
        header: list[str] = next(filter(None, rows), [])
        _check_header(path, header, required)
        for fields in rows:
            where = f"{path.name}, line {reader.line_num}"
            if len(fields) == len(header):
                yield where, dict(zip(header, fields, strict=True))
            elif fields:
                wrong = f"row: has {len(fields)} fields, the header {len(header)}; quote fields that hold {delimiter!r}"
                yield where, DataError(wrong)
    except csv.Error as error:
        raise DataError(f"{path}: line {reader.line_num}: not valid CSV: {error}; correct the quotes there") from error


def _check_header(path: Path, header: Sequence[str], required: Sequence[str]) -> None:
    if missing := [column for column in required if column not in header and column.split(".")[0] not in header]:
        raise DataError(f"{path}: no column {', '.join(missing)}; found {', '.join(header)[:200]}")
    if twice := [column for column in set(header) if header.count(column) > 1]:
        raise DataError(f"{path}: column {', '.join(sorted(twice))} occurs twice; rename one")


def read_lines(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the value of each line. Lines end at a line feed only: a caption may hold other separators."""
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if line.strip():
            try:
                yield f"{path.name}, line {number}", parse_json(line, "row")
            except DataError as error:
                yield f"{path.name}, line {number}", error


def read_shards(root: Path, pattern: str, columns: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """The place and the value of every row of a split of the Hugging Face hub, by these columns alone; each image as an
    `Embedded`.

    Raises:
        DataError: a file is missing or cannot be read, or has not the columns.
    """
    paths = sorted(root.glob(pattern))
    if not paths:
        raise DataError(f"{root / pattern}: no such file; the dataset is incomplete, fetch it or correct the root")
    totals = {int(part[1]) for path in paths if (part := SHARD.search(path.name))}
    if totals and totals != {len(paths)}:
        raise DataError(f"{root / pattern}: has {len(paths)} of {max(totals)} files of one release; fetch it again")
    for path in paths:
        yield from _parquet(path, columns, columns)


def column_names(path: Path) -> list[str]:
    """The columns of a Parquet file.

    Raises:
        DataError: it cannot be read.
    """
    try:
        return list(pq.read_schema(path).names)
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file; correct `manifest` or the root") from error
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path}: cannot be read as Parquet: {error}; write it again") from error


def _parquet(path: Path, required: Sequence[str], columns: Sequence[str] | None = None) -> Iterator[tuple[str, Any]]:
    """Rows by `columns`, or by all that there are, a row group at a time, each image as an `Embedded`."""
    _check_header(path, column_names(path), required)
    place = 0
    try:
        file = pq.ParquetFile(path)
        for group in range(file.num_row_groups):
            for number, row in enumerate(file.read_row_group(group, columns and list(columns)).to_pylist()):
                values = {column: _detached(value, path, group, number, column) for column, value in row.items()}
                yield f"{path.name}, row {place}", values
                place += 1
    except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read as Parquet: {error}; write it again") from error


def texts(value: Any) -> Any:
    """Captions of a manifest: a list as it is; text that is a JSON list as that list; other text as one caption."""
    if not isinstance(value, str):
        return value
    try:
        listed = json.loads(value) if value.lstrip().startswith("[") else None
    except ValueError:
        listed = None
    return listed if isinstance(listed, list) else [value]


def pick(value: Any, path: str) -> Any:
    """The value at a path, None where there is none: `meta.split`, `images.0`, `turns.-1.text`; `sentences.*.raw` is
    the list of each one's. A column whose whole name is the path comes first; an empty path is the value itself."""
    if not path or value is None:
        return value
    if isinstance(value, Mapping) and path in value:
        return value[path]
    head, _, rest = path.partition(".")
    if isinstance(value, Mapping):
        return pick(value.get(head), rest)
    if not isinstance(value, list):
        return None
    if head == "*":
        return [pick(each, rest) for each in value]
    place = int(head) if re.fullmatch(r"-?\d+", head) else len(value)
    return pick(value[place], rest) if -len(value) <= place < len(value) else None


def columns_in(column: str) -> list[str]:
    """The columns of a template such as `images/{split}/{name}.png`; a column without braces is itself."""
    fields = [field for _, field, _, _ in string.Formatter().parse(column) if field is not None]
    return fields if "{" in column else [column]


def look_up(row: Mapping[str, Any], column: str) -> Any:
    """A row's value of a column, a path or a template of them; None where one of these is missing.

    Raises:
        DataError: a value has not the form that the template asks for, such as `{number:06}`.
    """
    if "{" not in column or column in row:
        return pick(row, column)
    values = {field: pick(row, field) for field in columns_in(column)}
    if None in values.values():
        return None
    parts = string.Formatter().parse(column)
    return "".join(text + ("" if field is None else _formatted(values[field], form)) for text, field, form, _ in parts)


def _formatted(value: Any, form: str | None) -> str:
    whole = re.fullmatch(r"(\d+)(\.0+)?", str(value)) if form else None  # pandas writes 1.0 where a number is missing
    try:
        return format(int(whole[1]) if whole else value, form or "")
    except (TypeError, ValueError) as error:
        raise DataError(f"columns: {describe(value)} cannot be written as {{:{form}}}; correct the template") from error
