"""Read annotation files, and refuse invalid ones. A DataError says where the file is invalid, why, and how to fix it.

Tables in CSV, TSV, JSON, JSON Lines or Parquet are read row by row. Each row comes with its location for messages, such
as `pairs.csv, line 3`. The format is determined by the file's suffix.
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
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from m3diff.records.contents import CONTENTS
from m3diff.records.errors import DataError, Fault, ValueFault, is_utf8, shell_word
from m3diff.records.schemas import SPLITS

T = TypeVar("T")

NAMES_OF_TYPES = {dict: "an object", list: "a list", str: "text", int: "a whole number", float: "a number"}

ADDRESS = re.compile(r"(?!file:)([a-z][a-z0-9+.-]+://|data:)", re.IGNORECASE)
# The beginning of a Windows path or a file:// URL, or a null byte, which no path can contain
FOREIGN_PATH = re.compile(r"\\\\|[a-z]:[/\\]|file:|.*\0", re.IGNORECASE | re.DOTALL)
# The beginning of a list of texts, as JSON or as Python prints it, or the whole of an empty list
LIST_OF_TEXTS = re.compile(r"\s*\[\s*(?:[\"']|\]\s*$)")


def fault_of_path(
    name: str, root: Path, further_roots: Iterable[Path] = (), option: str = "image_root"
) -> Fault | None:
    """Return a fault if an image path is a URL or points outside the root, otherwise None.

    Symbolic links are not resolved; `is_inside` resolves them.

    Args:
        further_roots: other folders that the path may point into.
        option: the option that names such a folder, for the message.
    """
    if ADDRESS.match(name):
        return Fault("datasets.image_address", root=root)
    path = name.replace("\\", "/")
    may_leave_root = path.startswith("/") or ".." in path.split("/")
    absolute_path = Path(os.path.abspath(root / path))
    is_in_further_root = any(absolute_path.is_relative_to(os.path.abspath(folder)) for folder in further_roots)
    if FOREIGN_PATH.match(name) or (may_leave_root and not is_in_further_root):
        return Fault("datasets.image_outside_root", option=option)
    return None


def require_utf8(root: Path) -> None:
    """Check that the path of a dataset's folder is valid UTF-8. Otherwise, it cannot be written to records.

    Raises:
        DataError: the path is not valid UTF-8.
    """
    if not is_utf8(str(root)):
        command = f"mv {shell_word(root)} NEW_NAME"
        raise DataError("datasets.folder_name_not_utf8", value=os.fsencode(root), command=command)


def is_inside(path: Path | str, *roots: Path) -> bool:
    """Return True if a path points into one of the folders after symbolic links are resolved."""
    return any(Path(os.path.realpath(path)).is_relative_to(os.path.realpath(root)) for root in roots)


def read_text(path: Path) -> str:
    """Return the text of a UTF-8 file, with or without a byte order mark.

    Raises:
        DataError: the file is missing, unreadable, empty or not UTF-8. If the content is recognised, for example as an
            archive, the error code says so.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise DataError("datasets.missing_file", path=path) from error
    except OSError as error:
        raise DataError("datasets.unreadable_file", path=path, cause=error.strerror) from error
    if not data.removeprefix(codecs.BOM_UTF8).strip():
        raise DataError("datasets.empty_file", path=path)
    for signature, fault in CONTENTS.items():
        if data.startswith(signature):
            command = fault.fields.get("command", "").format(name=shell_word(path), folder=shell_word(path.parent))
            raise DataError(fault.code, path=path, command=command)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        is_utf16 = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        encoding = "UTF-16" if is_utf16 else "WINDOWS-1252"
        old_name = shell_word(path)
        new_name = shell_word(f"{path}.new")
        command = f"iconv -f {encoding} -t UTF-8 {old_name} > {new_name} && mv {new_name} {old_name}"
        raise DataError(
            "datasets.not_utf8", path=path, position=error.start, encoding=encoding, command=command
        ) from error


def read_json(path: Path, kind: type[T]) -> T:
    """Return the JSON value of a file.

    Raises:
        DataError: the file cannot be read, or its value does not have the type `kind`. Unlike `json`, this function
            also refuses repeated keys and NaN.
    """
    value = parse_json(read_text(path), path)
    if not isinstance(value, kind):
        raise DataError("datasets.other_json", path=path, expected=describe_kind(kind), value=describe(value))
    return value


def read_splits(path: Path, names: Sequence[str] = SPLITS) -> dict[str, list[Any]]:
    """Return the scenes of each split from a file such as `{"train": [scene number, ...], "val": [], "test": ...}`.

    Raises:
        DataError: the file cannot be read, or a split does not have a list. A list may be empty.
    """
    splits = read_json(path, dict)
    splits_without_list = [split for split in names if not isinstance(splits.get(split), list)]
    if splits_without_list:
        raise DataError("datasets.no_list_of_split", path=path, names=splits_without_list, expected=list(names))
    return {split: splits[split] for split in names}


def parse_json(text: str, path: Path | None = None, column: str | None = None) -> Any:
    """Return the JSON value of a text.

    Args:
        path: the file that contains only this text; None if the text is one line of a file, or a table cell, and the
            caller adds its location.
        column: the column of the table cell; None if the text is a file or a line.

    Raises:
        DataError: the text is not valid JSON, or contains repeated keys or NaN.
    """
    location: dict[str, Any] = {"key": column or "row"} if path is None else {"path": path}
    try:
        return json.loads(text, object_pairs_hook=_require_unique_keys, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        if column is not None:
            fault = Fault("datasets.invalid_json_in_cell", position=error.pos + 1, cause=error.msg)
        elif path is None:
            fault = Fault("datasets.invalid_json_in_row", column=error.colno, cause=error.msg)
        else:
            fault = Fault("datasets.invalid_json", line=error.lineno, column=error.colno, cause=error.msg)
        raise DataError(fault.at(**location)) from error
    except ValueFault as error:
        raise DataError(error.fault.at(**location)) from error
    except (ValueError, RecursionError) as error:
        raise DataError("datasets.unusable_json", **location, cause=str(error)) from error


def describe(value: Any) -> str:
    """Return a value's type, and the value shortened to 60 characters, for a message: "text 'abc'"."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    text = repr(value)
    if len(text) > 60:
        text = f"{text[:57]}..."
    return f"{describe_kind(type(value))} {text}"


def describe_kind(kind: type) -> str:
    """Return the name of a Python type in messages about JSON, such as "a list"."""
    return NAMES_OF_TYPES.get(kind, kind.__name__)


def _require_unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the pairs of a JSON object as a dictionary. Raise a ValueFault if a key occurs several times."""
    value = dict(pairs)
    if len(value) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueFault("datasets.repeated_json_key", value=next(key for key in keys if keys.count(key) > 1))
    return value


def _refuse_constant(name: str) -> NoReturn:
    """Refuse NaN, Infinity and -Infinity, which JSON does not allow, although Python reads them."""
    raise ValueFault("datasets.no_json_value", value=name)


# The suffix of an embedded image, by the image's first bytes. Images in other formats get no suffix
SUFFIX_OF_SIGNATURE = {b"\x89PNG": ".png", b"\xff\xd8\xff": ".jpg", b"GIF8": ".gif", b"RIFF": ".webp", b"BM": ".bmp"}


@dataclass(frozen=True)
class Embedded:
    """The position of an image inside a Parquet file. Two objects are equal if their images have the same bytes."""

    name: str  # shortened digest of the bytes, with a suffix
    manifest: Path = field(compare=False)  # the Parquet file
    group: int = field(compare=False)  # row group
    row: int = field(compare=False)  # position in the row group
    column: str = field(compare=False)
    item: int | None = field(compare=False)  # position in a list of images; None if the value is a single image

    def read(self) -> bytes:
        """Return the bytes of the image, read from the Parquet file."""
        value = _read_column(self.manifest, self.group, self.column)[self.row]
        image = value if self.item is None else value[self.item]
        return image["bytes"] if isinstance(image, dict) else image


# Cache two columns, because reading the pairs of a row group alternates between the columns with their two images
@lru_cache(maxsize=2)
def _read_column(manifest: Path, group: int, column: str) -> Any:
    """Return the values of a column in a row group."""
    return pq.ParquetFile(manifest).read_row_group(group, [column]).column(0).to_pylist()


def _detach_images(value: Any, path: Path, group: int, row: int, column: str, item: int | None = None) -> Any:
    """Replace each image in a value from a Parquet file by an `Embedded`.

    An image object without bytes becomes its path. Plain bytes count as an image if they begin with an image signature.
    """
    if isinstance(value, list):
        return [_detach_images(element, path, group, row, column, number) for number, element in enumerate(value)]
    is_image_object = isinstance(value, dict) and value.keys() == {"bytes", "path"}
    if is_image_object and value["bytes"] is None:
        return value["path"]
    if not is_image_object and not isinstance(value, bytes):
        return value
    data = value["bytes"] if is_image_object else value
    suffix = next((suffix for signature, suffix in SUFFIX_OF_SIGNATURE.items() if data.startswith(signature)), "")
    if not is_image_object and not suffix:
        return value
    return Embedded(hashlib.sha256(data).hexdigest()[:32] + suffix, path, group, row, column, item)


DELIMITERS = {".csv": ",", ".tsv": "\t"}
MAX_SHOWN_COLUMNS = 20  # maximum number of table columns in a message
# The line above the header in which Excel names the delimiter
SEP_LINE = re.compile(r'"?sep=(.)"?[\r\n]', re.IGNORECASE)
# The part of a file name on the Hugging Face Hub with the number of files: data/train-00003-of-00032-<hash>.parquet
SHARD_COUNT = re.compile(r"-\d{5}-of-(\d{5})\b")


def read_values(
    path: Path,
    required: Sequence[str],
    delimiter: str | None = None,
    rows: str = "",
    columns: Sequence[str] | None = None,
) -> Iterator[tuple[str, Any]]:
    """Yield the location and value of every row. If a row cannot be read, its value is a DataError.

    Args:
        required: columns that the header must contain.
        delimiter: delimiter of a CSV or TSV file; None if a line `sep=` or the suffix determines it.
        rows: path to the rows in a JSON file, as in `pick`. The rows are a list, or an object whose keys become the
            column `key`.
        columns: columns to read from a Parquet file; None reads all columns.

    Raises:
        DataError: the file cannot be read, or its header lacks a required column.
    """
    suffix = path.suffix.lower()
    if suffix in DELIMITERS:
        return _read_delimited(path, delimiter, required)
    if suffix == ".jsonl":
        return read_lines(path)
    if suffix == ".json":
        return rows_of_json(path, pick(parse_json(read_text(path), path), rows), rows)
    if suffix == ".parquet":
        return _read_parquet(path, required, columns)
    raise DataError("datasets.unknown_kind_of_table", path=path)


def enumerate_records(file: str, records: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Yield the location and value of every record in a list."""
    return ((f"{file}, record {number}", record) for number, record in enumerate(records))


def rows_of_json(path: Path, content: Any, rows: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the location and value of each row in the content of a JSON file: the items of a list, or one row per key.

    A row of an object has the column `key`. If its value is not an object, the row also has the column `value`.

    Args:
        rows: the path of the content within the file, for an error message.

    Raises:
        DataError: the content is neither a list nor an object.
    """
    if isinstance(content, list):
        return enumerate_records(path.name, content)
    if not isinstance(content, dict):
        raise DataError("datasets.no_rows_at_path", path=path, rows=rows, value=describe(content))
    return (
        (f"{path.name}, {key}", {"key": key} | (value if isinstance(value, dict) else {"value": value}))
        for key, value in content.items()
    )


def _read_delimited(path: Path, delimiter: str | None, required: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield the location and value of each row in a CSV or TSV file. A location names the last line of the row."""
    csv.field_size_limit(2**31 - 1)
    text = read_text(path)
    sep_line = SEP_LINE.match(text)
    if not delimiter:
        delimiter = sep_line[1] if sep_line else DELIMITERS[path.suffix.lower()]
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    try:
        if sep_line:
            next(reader, None)
        header: list[str] = next(filter(None, reader), [])
        _check_header(path, header, required)
        for fields in reader:
            location = f"{path.name}, line {reader.line_num}"
            if len(fields) == len(header):
                yield location, dict(zip(header, fields, strict=True))
            elif fields:
                fault = Fault(
                    "datasets.wrong_number_of_fields",
                    key="row",
                    value=len(fields),
                    expected=len(header),
                    delimiter=delimiter,
                )
                yield location, DataError(fault)
    except csv.Error as error:
        raise DataError("datasets.invalid_csv", path=path, line=reader.line_num, cause=str(error)) from error


def _check_header(path: Path, header: Sequence[str], required: Sequence[str]) -> None:
    """Check that a table has all required columns, or the columns that contain them, and no column twice."""
    missing_columns = [column for column in required if column not in header and column.split(".")[0] not in header]
    if missing_columns:
        columns = header[:MAX_SHOWN_COLUMNS]
        raise DataError("datasets.missing_columns", path=path, names=missing_columns, columns=columns)
    repeated_columns = sorted(column for column in set(header) if header.count(column) > 1)
    if repeated_columns:
        raise DataError("datasets.repeated_columns", path=path, names=repeated_columns)


def read_lines(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the location and the JSON value of each line, or a DataError for a line that is not valid JSON."""
    # Split only at line feeds, because captions may contain other characters at which splitlines() splits
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if line.strip():
            location = f"{path.name}, line {number}"
            try:
                yield location, parse_json(line)
            except DataError as error:
                yield location, error


def read_shards(root: Path, pattern: str, columns: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield the location and value of every row of a split from the Hugging Face Hub. Images become `Embedded`.

    Args:
        pattern: pattern of the split's Parquet files, relative to the root.
        columns: the columns to read.

    Raises:
        DataError: a file is missing, cannot be read, or lacks a column.
    """
    paths = sorted(root.glob(pattern))
    if not paths:
        raise DataError("datasets.missing_file", path=root / pattern)
    matches = [SHARD_COUNT.search(path.name) for path in paths]
    shard_counts = {int(match[1]) for match in matches if match}
    if shard_counts and shard_counts != {len(paths)}:
        raise DataError("datasets.missing_shards", path=root / pattern, value=len(paths), expected=max(shard_counts))
    for path in paths:
        yield from _read_parquet(path, columns, columns)


def column_names(path: Path) -> list[str]:
    """Return the column names of a Parquet file.

    Raises:
        DataError: the file cannot be read.
    """
    try:
        return list(pq.read_schema(path).names)
    except FileNotFoundError as error:
        raise DataError("datasets.missing_manifest", path=path) from error
    except (OSError, pa.ArrowException) as error:
        raise DataError("datasets.unreadable_parquet", path=path, cause=str(error)) from error


def _read_parquet(
    path: Path, required: Sequence[str], columns: Sequence[str] | None = None
) -> Iterator[tuple[str, Any]]:
    """Yield the location and value of each row of a Parquet file. Images become `Embedded`.

    The file is read one row group at a time.

    Args:
        columns: the columns to read; None reads all columns.
    """
    _check_header(path, column_names(path), required)
    row_in_file = 0
    try:
        file = pq.ParquetFile(path)
        for group in range(file.num_row_groups):
            rows = file.read_row_group(group, columns and list(columns)).to_pylist()
            for row_in_group, row in enumerate(rows):
                values = {
                    column: _detach_images(value, path, group, row_in_group, column) for column, value in row.items()
                }
                yield f"{path.name}, row {row_in_file}", values
                row_in_file += 1
    except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
        raise DataError("datasets.unreadable_parquet", path=path, cause=str(error)) from error


def parse_captions(value: Any) -> Any:
    """Return the captions in a table cell: the items if the text is a JSON list, otherwise the text as one caption.

    A value that is not a text is returned unchanged.
    """
    if not isinstance(value, str):
        return value
    if not value.lstrip().startswith("["):
        return [value]
    try:
        captions = json.loads(value)
    except ValueError:
        return [value]
    return captions if isinstance(captions, list) else [value]


def parse_images(cell: Any, column: str) -> Any:
    """Return the list of images that a table cell contains as JSON text, None for an empty text, or any other cell.

    A text that does not begin as a list of texts is the name of one image, even if it begins with a bracket.

    Raises:
        DataError: the text begins as a list, but is not valid JSON.
    """
    if not isinstance(cell, str):
        return cell
    if not cell.strip():
        return None
    return parse_json(cell, column=column) if LIST_OF_TEXTS.match(cell) else cell


def pick(value: Any, path: str) -> Any:
    """Return the value at a path such as `meta.split`, `images.0` or `turns.-1.text`, or None if it does not exist.

    `sentences.*.raw` returns a list with the `raw` of each sentence. If a column has the whole path as its name, the
    value of this column is returned. An empty path returns the value itself.
    """
    if not path or value is None:
        return value
    if isinstance(value, Mapping) and path in value:
        return value[path]
    step, _, inner_path = path.partition(".")
    if isinstance(value, Mapping):
        return pick(value.get(step), inner_path)
    if not isinstance(value, list):
        return None
    if step == "*":
        return [pick(element, inner_path) for element in value]
    if not re.fullmatch(r"-?\d+", step):
        return None
    index = int(step)
    return pick(value[index], inner_path) if -len(value) <= index < len(value) else None


def fault_of_images(images: Any, column: str) -> Fault | None:
    """Check that a value is a list of two images. Return None if it is, and otherwise a fault.

    Args:
        column: name of the column, for the message.
    """
    if isinstance(images, list) and len(images) == 2:
        return None
    count = len(images) if isinstance(images, list) else int(images is not None)
    return Fault("datasets.not_two_images", key=column, count=count, value=describe(images))


def columns_in(column: str) -> list[str]:
    """Return the columns in a template such as `images/{split}/{name}.png`. A name without braces is one column."""
    fields = [field for _, field, _, _ in string.Formatter().parse(column) if field is not None]
    return fields if "{" in column else [column]


def look_up(row: Mapping[str, Any], column: str) -> Any:
    """Return the value of a column, path or template in a row, or None if a value is missing.

    Raises:
        DataError: a value does not fit the format in the template, such as `{number:06}`.
    """
    if "{" not in column or column in row:
        return pick(row, column)
    values = {field: pick(row, field) for field in columns_in(column)}
    if None in values.values():
        return None
    text = ""
    for literal_text, path, format_spec, _ in string.Formatter().parse(column):
        text += literal_text
        if path is not None:
            text += _format(values[path], format_spec)
    return text


def _format(value: Any, format_spec: str | None) -> str:
    """Return a value in the format of a template.

    Raises:
        DataError: the value does not fit the format.
    """
    # pandas writes integers as floats such as 1.0 if the column has missing values
    whole_number = re.fullmatch(r"(\d+)(\.0+)?", str(value)) if format_spec else None
    value_to_format = int(whole_number[1]) if whole_number else value
    try:
        return format(value_to_format, format_spec or "")
    except (TypeError, ValueError) as error:
        raise DataError(
            "datasets.value_does_not_fit_template", key="columns", value=describe(value), format=format_spec
        ) from error
