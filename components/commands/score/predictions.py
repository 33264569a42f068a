"""Read files of captions in common formats: COCO results, {id: caption}, JSON Lines, CSV or TSV."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from m3diff.datasets.files import DELIMITERS, describe, parse_json, read_values, rows_of_json
from m3diff.datasets.files import read_text as read_file
from m3diff.datasets.tables import delimiter_of
from m3diff.records.errors import DataError, Fault
from m3diff.scoring.pairs import without_surrogates

# Fields that may hold an id, the most likely first. "key" is the key of {id: caption}. In a batch at OpenAI,
# "custom_id" is the user's id of a row, and "id" is the server's
ID_FIELDS = (
    "image_id", "custom_id", "id", "img_id", "uid", "pair_id", "image", "file_name", "filename", "name", "question_id",
    "key",
)  # fmt: skip
# Fields that may hold a caption or an answer. If a row also has "prediction", its "caption" or "answer" is a reference.
# "value" is the value of {id: caption}
CAPTION_FIELDS = ("prediction", "pred", "caption", "value", "answer")


@dataclass(frozen=True)
class Predictions:
    """The content of a file of captions.

    captions: ids and their captions, in file order. An id may occur several times.
    faults: one fault per pair that `m3diff caption --json` could not caption.
    """

    captions: list[tuple[str, str]]
    faults: list[Fault]


@dataclass(frozen=True)
class PredictionFields:
    """Names of the fields that may hold an id or a caption, the most likely first."""

    ids: Sequence[str] = ID_FIELDS
    captions: Sequence[str] = CAPTION_FIELDS


def read_predictions(path: Path) -> Predictions:
    """Read a file of captions.

    Raises:
        DataError: the file cannot be read, does not contain any captions, or has a row without an id or a caption.
    """
    if not path.is_file():
        raise DataError("score.captions_folder" if path.is_dir() else "score.captions_missing", path=path)
    captions: list[tuple[str, str]] = []
    faults: list[Fault] = []
    delimiter = delimiter_of(path).get("delimiter")
    fields = PredictionFields()
    for location, row in _read_rows(path, delimiter):
        where = str(path.parent / location)
        if isinstance(row, DataError):
            raise DataError(row.fault.at(path=where))
        if not captions and path.suffix.lower() in DELIMITERS:
            fields = find_prediction_columns(path, list(row), delimiter)
        pair_id = read_text(where, row, fields.ids).strip()
        if is_uncaptioned(row, fields.captions):
            faults.append(Fault("score.pair_not_captioned", path=where, name=pair_id, cause=row["error"]))
        else:
            captions.append((pair_id, read_text(where, row, fields.captions)))
    if not captions and faults:
        raise DataError("score.no_pair_captioned", path=path, cause=faults[0])
    if not captions:
        raise DataError("score.no_caption", path=path)
    return Predictions(captions=captions, faults=faults)


def _read_rows(path: Path, delimiter: str | None) -> Iterable[tuple[str, Any]]:
    if path.suffix.lower() != ".json":
        return read_values(path, (), delimiter)
    return rows_of_json(path, unwrap_captions(parse_json(read_file(path), path)))


def unwrap_captions(content: Any) -> Any:
    """Return the captions in a JSON object that wraps them, such as `{"results": [...]}`, or any other value unchanged.

    An object wraps either one list of objects with ids, or an object of captions by id, which is its only value.
    """
    if not isinstance(content, dict):
        return content
    candidates = []
    for value in content.values():
        has_ids = isinstance(value, list) and bool(value) and all(map(_has_id, value))
        is_only_object = len(content) == 1 and isinstance(value, dict) and not {*CAPTION_FIELDS, *ID_FIELDS} & {*value}
        if has_ids or is_only_object:
            candidates.append(value)
    return candidates[0] if len(candidates) == 1 else content


def _has_id(row: Any) -> bool:
    return isinstance(row, dict) and not row.keys().isdisjoint(ID_FIELDS)


def is_uncaptioned(row: Any, caption_fields: Sequence[str]) -> bool:
    """Return True for a line that `m3diff caption --json` writes for a pair whose images it could not read."""
    if not isinstance(row, dict) or not isinstance(row.get("error"), str):
        return False
    return not any(field in row for field in caption_fields)


def find_columns(header: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return the columns that have one of these names, ignoring case and punctuation, in the order of the names."""
    # reversed, so that the leftmost of several columns with the same normalised name is found
    by_spelling = {re.sub(r"[\W_]+", "", column).casefold(): column for column in reversed(header)}
    spellings = [name.replace("_", "") for name in names]
    return [by_spelling[spelling] for spelling in spellings if spelling in by_spelling]


def describe_columns(columns: Iterable[str], delimiter: str | None) -> Fault:
    """Return a fault that lists the columns of a table, for use in other faults.

    Args:
        delimiter: delimiter of the columns if it is not the usual one for the file's suffix.
    """
    if delimiter is None:
        return Fault("score.columns", names=list(columns))
    return Fault("score.columns_at_delimiter", names=list(columns), delimiter=delimiter)


def find_prediction_columns(path: Path, header: Sequence[str], delimiter: str | None) -> PredictionFields:
    """Find the columns of ids and captions in a table of predictions. For example, `Image ID` matches image_id.

    Args:
        delimiter: delimiter of the columns if it is not the usual one for the file's suffix.

    Raises:
        DataError: the table does not have a column of ids or a column of captions.
    """
    # prefer an exact name such as `image` to `ID`, which may be a row number. If there are both `Prediction` and
    # `caption`, `caption` is a reference
    id_columns = [name for name in ID_FIELDS if name in header] + find_columns(header, ID_FIELDS)
    caption_columns = find_columns(header, CAPTION_FIELDS)
    for kind, columns, names in (("ids", id_columns, ID_FIELDS), ("captions", caption_columns, CAPTION_FIELDS)):
        if not columns:
            raise DataError(
                "score.no_column",
                path=path,
                columns=describe_columns(header, delimiter),
                kind=kind,
                names=names,
                expected=names[0],
            )
    return PredictionFields(ids=id_columns[:1], captions=caption_columns[:1])


def read_text(where: str, row: Any, fields: Sequence[str]) -> str:
    """Return the text of the first of these fields that is present in a row.

    An integer, a list with a single text and an object with a caption are also accepted: pycocoevalcap's results are
    `{id: [{"caption": ...}]}`.

    Args:
        where: file and row, for error messages.

    Raises:
        DataError: none of the fields is present, or the value is not text.
    """
    present_fields = [field for field in fields if isinstance(row, dict) and field in row]
    if not present_fields:
        raise DataError("score.no_field", path=where, field=fields[0], value=describe(row))
    value = row[present_fields[0]]
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, dict) and "caption" in value:
        value = value["caption"]
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise DataError("score.no_text", path=where, field=present_fields[0], value=describe(value))
    return without_surrogates(str(value))
