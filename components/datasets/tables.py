"""Manifests in CSV, TSV, JSON, JSON Lines or Parquet, row by row with their places; the suffix tells the format."""

import csv
import hashlib
import io
import json
import re
import string
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from m3diff.datasets.files import describe, parse_json, read_text
from m3diff.datasets.spec import Row
from m3diff.records.errors import DataError

SUFFIXES = {b"\x89PNG": ".png", b"\xff\xd8\xff": ".jpg", b"GIF8": ".gif", b"RIFF": ".webp", b"BM": ".bmp"}
"""By the first bytes; of another format the file has no suffix."""


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
        """The bytes."""
        value = _column(self.manifest, self.group, self.column)[self.row]
        image = value if self.item is None else value[self.item]
        found: bytes = image["bytes"] if isinstance(image, dict) else image
        return found


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


def unpacked(rows: Iterable[Row], folder: Path) -> Iterator[Row]:
    """The rows with each embedded image as the path of a file in `folder`, written where it is not there yet."""
    for row in rows:
        images = [folder / side.name if isinstance(side, Embedded) else side for side in (row.before, row.after)]
        for image, path in zip((row.before, row.after), images, strict=True):
            if isinstance(image, Embedded) and not path.exists():
                folder.mkdir(parents=True, exist_ok=True)
                path.write_bytes(image.read())
        yield row._replace(before=images[0], after=images[1])


DELIMITERS = {".csv": ",", ".tsv": "\t"}
SEP_LINE = re.compile(r'"?sep=(.)"?(\r\n|\r|\n)', re.IGNORECASE)
"""The line above the header by which Excel tells itself the delimiter."""

SHARD = re.compile(r"-\d{5}-of-(\d{5})\b")
"""Of how many files a split of the Hugging Face hub lies in: data/train-00003-of-00032-<hash>.parquet."""


def read_values(
    path: Path,
    required: Sequence[str],
    delimiter: str | None = None,
    rows: str = "",
    suffix: str | None = None,
) -> Iterator[tuple[str, Any]]:
    """The place and the value of every row; a DataError stands for a row that cannot be read.

    Args:
        required: columns that a header must have.
        delimiter: of a CSV or TSV file, where it is another than the suffix tells.
        rows: where in a JSON file the rows stand (a path, as of `pick`); they may be an object, too, whose keys are the
            column `key`.
        suffix: that tells the format, where it is not the file's own.

    Raises:
        DataError: the file cannot be read, or a required column is missing from its header.
    """
    suffix = suffix or path.suffix.lower()
    if suffix in DELIMITERS:
        return _delimited(path, delimiter, required)
    if suffix == ".jsonl":
        return _json_lines(path)
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


def sep_line(text: str) -> tuple[str | None, str]:
    """The delimiter that Excel's line `sep=;` names, None without that line, and the text below it."""
    line = SEP_LINE.match(text)
    return (line[1], text[line.end() :]) if line else (None, text)


def _delimited(path: Path, given: str | None, required: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Rows of a CSV or TSV file; the line is the one where the row ends."""
    csv.field_size_limit(2**31 - 1)
    named, text = sep_line(read_text(path))
    delimiter, above = given or named or DELIMITERS[path.suffix.lower()], int(named is not None)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    try:
        header: list[str] = next(filter(None, reader), [])
        _check_header(path, header, required)
        for fields in reader:
            where = f"{path.name}, line {reader.line_num + above}"
            if len(fields) == len(header):
                yield where, dict(zip(header, fields, strict=True))
            elif fields:
                wrong = f"row: has {len(fields)} fields, the header {len(header)}; quote fields that hold {delimiter!r}"
                yield where, DataError(wrong)
    except csv.Error as error:
        line = reader.line_num + above
        raise DataError(f"{path}: line {line}: not valid CSV: {error}; correct the quotes there") from error


def _check_header(path: Path, header: Sequence[str], required: Sequence[str]) -> None:
    if missing := [column for column in required if column not in header and column.split(".")[0] not in header]:
        raise DataError(f"{path}: no column {', '.join(missing)}; found {', '.join(header)[:200]}")
    if twice := [column for column in set(header) if header.count(column) > 1]:
        raise DataError(f"{path}: column {', '.join(sorted(twice))} occurs twice; rename one")


def _json_lines(path: Path) -> Iterator[tuple[str, Any]]:
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
    number = int(whole[1]) if whole else value
    try:
        return format(number, form or "")
    except (TypeError, ValueError) as error:
        raise DataError(f"columns: {describe(value)} cannot be written as {{:{form}}}; correct the template") from error
