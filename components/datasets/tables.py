"""Manifests in CSV, TSV, JSON, JSON Lines or Parquet, row by row with their places; the suffix tells the format."""

import csv
import io
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from components.datasets.files import describe, parse_json, read_json, read_text
from components.records import DataError

Found = tuple[str, dict[str, Any], str | None]
"""Where a row stands, its values by column (None where absent), and what is wrong with it."""

DELIMITERS = {".csv": ",", ".tsv": "\t"}
SHARD = re.compile(r"-(\d{5})-of-(\d{5})\b")
"""Which of how many files a split of the Hugging Face hub lies in: data/train-00003-of-00032-<hash>.parquet."""


def read_table(path: Path, required: Sequence[str]) -> Iterator[Found]:
    """Every row of the manifest.

    Raises:
        DataError: the file cannot be read, or a required column is missing from its header.
    """
    suffix = path.suffix.lower()
    if suffix in DELIMITERS:
        rows = _delimited(path, DELIMITERS[suffix], required)
    elif suffix == ".jsonl":
        rows = _json_lines(path)
    elif suffix == ".json":
        rows = ((f"{path.name}, record {n}", value) for n, value in enumerate(read_json(path, list)))
    elif suffix == ".parquet":
        rows = _parquet(path, required)
    else:
        raise DataError(f"{path}: unknown kind of manifest; use .csv, .tsv, .json, .jsonl or .parquet")
    for where, value in rows:
        yield _row(where, value, required)


def read_json_lines(path: Path) -> Iterator[Found]:
    """Every line of a file of JSON objects that may be called otherwise than .jsonl."""
    for where, value in _json_lines(path):
        yield _row(where, value, ())


def _row(where: str, value: Any, required: Sequence[str]) -> Found:
    nothing: dict[str, Any] = dict.fromkeys(required)
    if isinstance(value, DataError):
        return where, nothing, str(value)
    if not isinstance(value, dict):
        return where, nothing, f"row: expected an object, found {describe(value)}"
    missing = [column for column in required if value.get(column) is None]
    return where, nothing | value, f"{', '.join(missing)}: is missing" if missing else None


def _delimited(path: Path, delimiter: str, required: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Rows of a CSV or TSV file; the line is the one where the row ends."""
    csv.field_size_limit(2**31 - 1)
    reader = csv.reader(io.StringIO(read_text(path), newline=""), delimiter=delimiter, strict=True)
    try:
        header = next(reader)
        _check_header(path, header, required)
        for fields in reader:
            where = f"{path.name}, line {reader.line_num}"
            if len(fields) == len(header):
                yield where, dict(zip(header, fields, strict=True))
            elif fields:
                wrong = f"row: has {len(fields)} fields, the header {len(header)}; quote fields that hold {delimiter!r}"
                yield where, DataError(wrong)
    except csv.Error as error:
        raise DataError(f"{path}: line {reader.line_num}: not valid CSV: {error}; correct the quotes there") from error


def _check_header(path: Path, header: Sequence[str], required: Sequence[str]) -> None:
    if missing := [column for column in required if column not in header]:
        raise DataError(f"{path}: no column {', '.join(missing)}; found {', '.join(header)[:200]}")
    if twice := [column for column in set(header) if header.count(column) > 1]:
        raise DataError(f"{path}: column {', '.join(sorted(twice))} occurs twice; rename one")


def _json_lines(path: Path) -> Iterator[tuple[str, Any]]:
    """One value a line. Lines end at a line feed only: a caption may hold other separators."""
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if line.strip():
            try:
                yield f"{path.name}, line {number}", parse_json(line, "row")
            except DataError as error:
                yield f"{path.name}, line {number}", error


def shards(root: Path, pattern: str) -> list[Path]:
    """The files of a split of the Hugging Face hub, in order.

    Raises:
        DataError: there is none, or one of them is missing.
    """
    paths = sorted(root.glob(pattern))
    if not paths:
        raise DataError(
            f"{root / pattern}: no such file; the dataset is incomplete, fetch it again or correct the root"
        )
    found = [SHARD.search(path.name) for path in paths]
    numbers = [(int(part[1]), int(part[2])) for part in found if part]
    if numbers and numbers != [(n, numbers[0][1]) for n in range(numbers[0][1])]:
        names = ", ".join(f"{number} of {total}" for number, total in numbers)
        raise DataError(f"{root / pattern}: not each file of one release is there once, but {names}; fetch it again")
    return paths


def read_shards(root: Path, pattern: str, columns: Sequence[str]) -> Iterator[Found]:
    """Every row of a split of the Hugging Face hub, by these columns alone: the others hold the images' bytes.

    Raises:
        DataError: a file is missing or cannot be read, or has not the columns.
    """
    for path in shards(root, pattern):
        for where, value in _parquet(path, columns, columns):
            yield _row(where, value, columns)


def column_names(path: Path) -> list[str]:
    """The columns of a Parquet file.

    Raises:
        DataError: it cannot be read.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return list(pq.read_schema(path).names)
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file; correct `manifest` or the root") from error
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path}: cannot be read as Parquet: {error}; write it again") from error


def _parquet(
    path: Path, required: Sequence[str], columns: Sequence[str] | None = None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Rows by `columns`, or by all that there are."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    _check_header(path, column_names(path), required)
    try:
        rows = pq.read_table(path, columns=columns and list(columns)).to_pylist()
    except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read as Parquet: {error}; write it again") from error
    yield from ((f"{path.name}, row {number}", row) for number, row in enumerate(rows))


def texts(value: Any) -> Any:
    """Captions of a manifest: a list as it is; text that is a JSON list as that list; other text as one caption."""
    if isinstance(value, str):
        if value.lstrip().startswith("["):
            try:
                listed = json.loads(value)
            except ValueError:
                return [value]
            return listed if isinstance(listed, list) else [value]
        return [value]
    return value
