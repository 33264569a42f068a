"""Anyone's predictions: COCO results, {id: caption}, JSON Lines, CSV or TSV, as rows of an id and a caption."""

import csv
import io
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from m3diff.datasets.files import describe, read_text
from m3diff.records.errors import DataError

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
    "question_id",
)
"""Names of the id's field, the likeliest first."""

PREDICTIONS = (
    "prediction",
    "predictions",
    "predicted",
    "predicted_caption",
    "predicted_text",
    "pred",
    "preds",
    "pred_caption",
    "generated",
    "generated_caption",
    "generated_text",
    "generation",
    "hypothesis",
    "hyp",
    "output",
    "model_output",
    "response",
    "candidate",
)
"""Names of the caption's field that say that a model wrote it."""

CAPTIONS = (*PREDICTIONS, "caption", "captions", "text", "sentence", "description", "answer")
"""Names of the caption's field; the last ones may also name the references."""

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


class Row(NamedTuple):
    """A row's fields that may be the id and the caption, by their names."""

    where: str
    ids: Mapping[str, Any]
    captions: Mapping[str, Any]


def read_predictions(path: Path, known: Callable[[str], str | None] = lambda name: None) -> Predictions:
    """Every caption of the file with its id.

    Args:
        known: the references' id that an id means; of several fields it decides which one holds the ids.

    Raises:
        DataError: the file cannot be read, has no row, or one without an id or a caption, or with two of either.
    """
    if not path.is_file():
        raise DataError(f"{path}: no such file; name the file of captions: {KINDS}")
    if not path.stat().st_size:
        raise DataError(f"{path}: the file is empty; expected {KINDS}")
    found = list(_rows(path))
    if not found:
        raise DataError(f"{path}: holds no caption; expected {KINDS}")
    notes: Counter[str] = Counter()
    field = _id_field(found, known)
    rows = [
        Prediction(
            _id(row.ids[field] if field in row.ids else next(iter(row.ids.values())), row.where),
            _caption(_chosen(row, notes), row.where, notes),
        )
        for row in found
    ]
    return Predictions(rows, [note.format(n=count) for note, count in notes.items()])


def _rows(path: Path) -> Iterator[Row]:
    suffix = path.suffix.lower()
    if suffix in DELIMITERS:
        yield from _columns(path, DELIMITERS[suffix])
    elif suffix == ".jsonl":
        for number, line in enumerate(read_text(path).split("\n"), 1):
            if line.strip():
                yield _fields(_parse(line, f"{path}, line {number}"), f"{path}, line {number}")
    else:
        yield from _json_rows(_parse(read_text(path), str(path)), path)


def _json_rows(value: Any, path: Path) -> Iterator[Row]:
    if isinstance(value, list) and not isinstance(value, Repeated):
        for number, row in enumerate(value):
            yield _fields(row, f"{path}, row {number}")
    elif isinstance(value, dict) and all(_named(value, names) for names in (IDS, CAPTIONS)):
        yield _fields(value, str(path))
    elif isinstance(value, dict | Repeated):
        for name, caption in value.items() if isinstance(value, dict) else value:
            if isinstance(caption, list) and caption and isinstance(caption[0], dict):
                raise DataError(f"{path}: {name!r} is a list of rows; write that list alone, as {KINDS}")
            yield Row(f"{path}, {name!r}", {"": name}, {"": caption})
    else:
        raise DataError(f"{path}: expected {KINDS}; found {describe(value)}")


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_keep_repeated)
    except (ValueError, RecursionError) as error:
        lines = "; is it an object a line? Name it .jsonl" if str(error).startswith("Extra data") else ""
        raise DataError(f"{where}: not valid JSON: {error}{lines}; expected {KINDS}") from error


def _keep_repeated(items: list[tuple[str, Any]]) -> dict[str, Any] | Repeated:
    found = dict(items)
    return found if len(found) == len(items) else Repeated(items)


def _fields(row: Any, where: str) -> Row:
    if not isinstance(row, dict):
        raise DataError(f"{where}: expected an object with an id and a caption, found {describe(row)}")
    ids, captions = (_named(row, names) for names in (IDS, CAPTIONS))
    for found, names in ((ids, ("image_id", "id", "uid")), (captions, ("caption", "prediction", "output"))):
        if not found:
            raise DataError(
                f"{where}: no field {' or '.join(names)}; found {', '.join(map(str, row))[:120]}; rename the one that "
                f"holds it to {names[0]}"
            )
    return Row(where, ids, captions)


def _named(row: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """The fields of these names, in the names' order, whatever their case, spaces and hyphens."""
    known = {str(key).strip().lower().replace(" ", "_").replace("-", "_"): key for key in row}
    return {str(known[name]): row[known[name]] for name in names if name in known}


def _id_field(rows: Sequence[Row], known: Callable[[str], str | None]) -> str:
    """The field whose ids the references know best; the likeliest by its name where they know none.

    Raises:
        DataError: they know those of two fields, which mean different pairs.
    """
    fields = dict.fromkeys(field for row in rows for field in row.ids)
    if len(fields) == 1:
        return next(iter(fields))
    means = {
        field: [known(str(row.ids[field]).strip()) if field in row.ids else None for row in rows] for field in fields
    }
    right = {field: sum(name is not None for name in means[field]) for field in fields}
    first, *others = sorted(fields, key=lambda field: -right[field])
    for other in others:
        if right[other] == right[first] > 0 and means[other] != means[first] and first.lower() != "image_id":
            raise DataError(
                f"{rows[0].where}: {first!r} and {other!r} could both be the id; remove one, or rename the right one "
                "to image_id"
            )
    return first


def _chosen(row: Row, notes: Counter[str]) -> Any:
    """The field that holds the model's caption, by its name.

    Raises:
        DataError: several fields may be it, and differ.
    """
    likely = {name: text for name, text in row.captions.items() if name in _named(row.captions, PREDICTIONS)}
    chosen = likely or row.captions
    (name, caption), *others = chosen.items()
    if any(text != caption for _, text in others):
        raise DataError(
            f"{row.where}: {' and '.join(map(repr, chosen))} could each be the caption; remove all but one of them, or "
            "rename the model's to prediction"
        )
    if rest := [other for other in row.captions if other not in chosen]:
        notes[f"{name!r} was scored in {{n}} rows, and not {' and '.join(map(repr, rest))} beside it"] += 1
    return caption


def _columns(path: Path, delimiter: str) -> Iterator[Row]:
    """Rows of a table; without a header that names the columns, of two columns the first is the id."""
    csv.field_size_limit(2**31 - 1)
    reader = csv.reader(io.StringIO(read_text(path), newline=""), delimiter=delimiter, strict=True)
    try:
        lines = [(reader.line_num, fields) for fields in reader if fields]
    except csv.Error as error:
        raise DataError(f"{path}: line {reader.line_num}: not valid CSV: {error}; correct the quotes there") from error
    if not lines:
        raise DataError(f"{path}: holds no caption; expected {KINDS}")
    header = lines[0][1]
    named = [_named(dict.fromkeys(header), names) for names in (IDS, CAPTIONS)]
    if all(named):
        lines = lines[1:]
        if twice := [name for name in chain(*named) if header.count(name) > 1]:
            raise DataError(f"{path}: line 1 has {twice[0]!r} twice; rename one of the columns")
    elif any(named) or len(header) != 2:
        raise DataError(f"{path}: line 1 {_no_header(header, delimiter)}")
    for number, fields in lines:
        where = f"{path}, line {number}"
        if len(fields) != len(header):
            wrong = f"has {len(fields)} fields, the first line {len(header)}; quote captions that hold {delimiter!r}"
            raise DataError(f"{where}: {wrong}")
        yield (
            _fields(dict(zip(header, fields, strict=True)), where)
            if all(named)
            else Row(where, {"": fields[0]}, {"": fields[1]})
        )


def _no_header(header: Sequence[str], delimiter: str) -> str:
    for other in {";", "\t", ","} - {delimiter}:
        if len(header) == 1 and other in header[0]:
            return f"is separated by {other!r}; save the file with {delimiter!r} between its columns"
    if len(header) == 1:
        return f"has one column, and captions need an id; write image_id{delimiter}caption on it and both on each line"
    names = delimiter.join(["image_id", "caption", *(f"other{n}" for n in range(len(header) - 2))])
    return f"names no columns; write e.g. {names} there, in the columns' order, for ids and captions"


def _id(value: Any, where: str) -> str:
    if isinstance(value, float) and value.is_integer():
        raise DataError(f"{where}: id: {value} is a number with a point; write {int(value)}, as the references have it")
    if isinstance(value, str | int) and not isinstance(value, bool) and str(value).strip():
        return str(value).strip()
    raise DataError(f"{where}: id: expected text or a whole number, found {describe(value)}; write the pair's id")


def _caption(value: Any, where: str, notes: Counter[str]) -> str:
    """The caption as text. A list of one is that one, which is counted in `notes`."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str):
        notes["{n} captions are lists of one text; the text was taken"] += 1
        value = value[0]
    if not isinstance(value, str):
        raise DataError(f"{where}: caption: expected text, found {describe(value)}; {as_text(value)}")
    if value.startswith(("['", '["')) and value.endswith(("']", '"]')):
        raise DataError(f"{where}: caption: is a list printed as text, {describe(value)}; write what it holds")
    return value.encode("utf-8", "replace").decode()  # no lone surrogates


def as_text(value: Any) -> str:
    """How to write a caption that is no text."""
    if not value or value != value:
        return 'write "" where there is no caption'
    if isinstance(value, list) and all(isinstance(word, str) and len(word.split()) == 1 for word in value):
        return f"one caption to a pair, as text: join its {len(value)} words by spaces"
    return "one caption to a pair, as text"
