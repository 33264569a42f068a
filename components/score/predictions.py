"""Anyone's predictions: COCO results, {id: caption}, JSON Lines, CSV or TSV, as rows of an id and a caption."""

import csv
import io
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from components.datasets.files import describe, read_text
from components.records import DataError

IDS = (
    "image_id",
    "id",
    "img_id",
    "uid",
    "pair_id",
    "pair",
    "image",
    "img",
    "file_name",
    "filename",
    "name",
)
CAPTIONS = ("caption", "prediction", "predicted_caption", "generated_caption", "pred", "hypothesis", "output", "text")
"""What the two columns are called, the likeliest first."""

DELIMITERS = {".csv": ",", ".tsv": "\t"}
KINDS = "[{image_id, caption}] or {id: caption} as .json, an object a line as .jsonl, or columns as .csv or .tsv"


class Prediction(NamedTuple):
    id: str
    caption: str


class Predictions(NamedTuple):
    """A file's rows in their order, an id perhaps several times, and what is to be said of how they were written."""

    rows: list[Prediction]
    notes: list[str]


class Repeated(list[tuple[str, Any]]):
    """A JSON object with a key that is written twice, as its items."""


def read_predictions(path: Path) -> Predictions:
    """Every caption of the file with its id.

    Raises:
        DataError: the file cannot be read, has no row, or one without an id or a caption.
    """
    notes: dict[str, int] = {}
    rows = [Prediction(_id(name, where), _caption(text, where, notes)) for where, name, text in _values(path)]
    if not rows:
        raise DataError(f"{path}: holds no caption; expected {KINDS}")
    return Predictions(rows, [note.format(n=count) for note, count in notes.items()])


def _values(path: Path) -> Iterator[tuple[str, Any, Any]]:
    """Place, id and caption of each row."""
    suffix = path.suffix.lower()
    if suffix in DELIMITERS:
        yield from _columns(path, DELIMITERS[suffix])
        return
    text = read_text(path)
    if suffix == ".jsonl":
        for number, line in enumerate(text.split("\n"), 1):
            if line.strip():
                yield _fields(_parse(line, f"{path}, line {number}"), f"{path}, line {number}")
        return
    value = _parse(text, str(path))
    if isinstance(value, list) and not isinstance(value, Repeated):
        for number, row in enumerate(value):
            yield _fields(row, f"{path}, row {number}")
    elif isinstance(value, dict | Repeated):
        for name, caption in value.items() if isinstance(value, dict) else value:
            yield f"{path}, {name!r}", name, caption
    else:
        raise DataError(f"{path}: expected {KINDS}; found {describe(value)}")


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_keep_repeated)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not valid JSON: {error}; expected {KINDS}") from error


def _keep_repeated(items: list[tuple[str, Any]]) -> dict[str, Any] | Repeated:
    found = dict(items)
    return found if len(found) == len(items) else Repeated(items)


def _fields(row: Any, where: str) -> tuple[str, Any, Any]:
    if not isinstance(row, dict):
        raise DataError(f"{where}: expected an object with an id and a caption, found {describe(row)}")
    return where, row[_named(row, IDS, where)], row[_named(row, CAPTIONS, where)]


def _named(row: Mapping[str, Any], names: tuple[str, ...], where: str) -> str:
    """The first of the names that the row has, whatever its case."""
    known = {str(key).strip().lower(): key for key in row}
    for name in names:
        if name in known:
            return str(known[name])
    raise DataError(f"{where}: no field {' or '.join(names[:4])}; found {', '.join(map(str, row))[:120]}")


def _columns(path: Path, delimiter: str) -> Iterator[tuple[str, Any, Any]]:
    """Rows of a table; without a header that names the columns, of two columns the first is the id."""
    csv.field_size_limit(2**31 - 1)
    reader = csv.reader(io.StringIO(read_text(path), newline=""), delimiter=delimiter, strict=True)
    try:
        lines = [(reader.line_num, fields) for fields in reader if fields]
    except csv.Error as error:
        raise DataError(f"{path}: line {reader.line_num}: not valid CSV: {error}; correct the quotes there") from error
    header = lines[0][1]
    names = {field.strip().lower() for field in header}
    if names & {*IDS} and names & {*CAPTIONS}:
        at = [header.index(_named(dict.fromkeys(header), of, f"{path}, line 1")) for of in (IDS, CAPTIONS)]
        lines = lines[1:]
    elif len(header) == 2:
        at = [0, 1]
    else:
        raise DataError(f"{path}: line 1 names no columns; write e.g. image_id{delimiter}caption there")
    for number, fields in lines:
        if len(fields) != len(header):
            wrong = f"has {len(fields)} fields, the first line {len(header)}; quote captions that hold {delimiter!r}"
            raise DataError(f"{path}, line {number}: {wrong}")
        yield f"{path}, line {number}", fields[at[0]], fields[at[1]]


def _id(value: Any, where: str) -> str:
    if isinstance(value, str | int) and not isinstance(value, bool) and str(value).strip():
        return str(value).strip()
    raise DataError(f"{where}: id: expected text or a whole number, found {describe(value)}")


def _caption(value: Any, where: str, notes: dict[str, int]) -> str:
    """The caption as text. A list of one is that one, which is counted in `notes`."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str):
        note = "{n} captions are lists of one text; the text was taken"
        notes[note] = notes.get(note, 0) + 1
        value = value[0]
    if not isinstance(value, str):
        remedy = "; one caption to a pair, as text" if isinstance(value, list) else ""
        raise DataError(f"{where}: caption: expected text, found {describe(value)}{remedy}")
    if value.startswith(("['", '["')) and value.endswith(("']", '"]')):
        raise DataError(f"{where}: caption: is a list printed as text, {describe(value)}; write what it holds")
    return value.encode("utf-8", "replace").decode()  # no lone surrogates
