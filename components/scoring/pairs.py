"""The test pairs: clean records beside the predictions, and those of shuffled pairs, checked."""

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from m3diff.records.errors import DataError, readable
from m3diff.records.schemas import NO_CHANGE


@dataclass(frozen=True)
class EvalPair:
    """A test pair, its references and the model's prediction.

    `shuffled_prediction` is the model's caption of its before-image with another pair's after-image,
    `reversed_prediction` that of its two images swapped; None outside these controls.
    """

    id: str
    dataset: str
    before: Path
    after: Path
    before_sha256: bytes
    after_sha256: bytes
    references: list[str]
    change_types: list[str]
    prediction: str
    shuffled_prediction: str | None
    reversed_prediction: str | None = None

    @property
    def is_distractor(self) -> bool:
        return self.change_types == [NO_CHANGE]

    @property
    def changes(self) -> list[str]:
        """Its change types; none of a distractor, nor where they are unknown."""
        return [] if self.is_distractor else self.change_types


def load_pairs(clean: Path, predictions: Path) -> tuple[list[EvalPair], int]:
    """The captioned test pairs in the records' order, and how many test pairs there are.

    There may be fewer predictions than test pairs, and fewer of shuffled and of swapped pairs, only where predict
    reports that it made so many (predict.limit, its controls).

    Raises:
        DataError: no test pair; a file of predictions that is truncated, or whose ids repeat, are unknown or missing.
    """
    rows = read_test_records(clean / "records.parquet")
    ids = {row["id"] for row in rows}
    found = read_predictions(predictions / "predictions.json", ids)
    told = _report(predictions / "report.json")
    if told.get("rows_out") != len(found):
        _refuse_missing(predictions / "predictions.json", ids - found.keys())
    shuffled = _control(predictions / "predictions_shuffled.json", set(found), told.get("control"))
    swapped = _control(predictions / "predictions_reversed.json", set(found), told.get("reversed"))
    pairs = [
        pair_of(row, found[row["id"]], shuffled.get(row["id"]), swapped.get(row["id"]))
        for row in rows
        if row["id"] in found
    ]
    return pairs, len(rows)


def _control(path: Path, ids: set[str], told: int | None) -> dict[str, str]:
    """The predictions of a control, of `told` pairs or of all `ids`; none without the file or where none were made."""
    if not path.is_file() or told == 0:
        return {}
    found = read_predictions(path, ids)
    if told != len(found):
        _refuse_missing(path, ids - found.keys())
    return found


def read_test_records(path: Path) -> list[dict[str, Any]]:
    """The records of the split "test", in their order.

    Raises:
        DataError: there is none.
    """
    import pyarrow.parquet as pq

    with readable(path):
        rows: list[dict[str, Any]] = pq.read_table(path, filters=[("split", "=", "test")]).to_pylist()
    if not rows:
        raise DataError(f"{path}: no record of the split 'test', so there is nothing to score")
    return rows


def pair_of(row: dict[str, Any], prediction: str, shuffled: str | None, swapped: str | None = None) -> EvalPair:
    """A row of records.parquet beside what the model said of it."""
    return EvalPair(
        id=row["id"],
        dataset=row["dataset"],
        before=Path(row["before"]),
        after=Path(row["after"]),
        before_sha256=row["before_sha256"],
        after_sha256=row["after_sha256"],
        references=row["references"] or [""],  # coco keeps a pair without words as one empty reference
        change_types=row["change_types"] or [],
        prediction=prediction,
        shuffled_prediction=shuffled,
        reversed_prediction=swapped,
    )


def read_predictions(path: Path, known: set[str]) -> dict[str, str]:
    """A file [{"image_id": id, "caption": text}] as id -> text, every id known and there once.

    Raises:
        DataError: naming the file and the rows or ids at fault.
    """
    try:
        rows = json.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise DataError(f"{path}: no such file; run `m3diff predict` first") from None
    except ValueError as error:
        raise DataError(f"{path}: not valid JSON ({error}); is the file whole? Run `m3diff predict` again") from error
    if not isinstance(rows, list) or not rows:
        raise DataError(f"{path}: expected a list of {{image_id, caption}}, found {type(rows).__name__} without rows")
    for number, row in enumerate(rows):
        if not (isinstance(row, dict) and isinstance(row.get("image_id"), str) and isinstance(row.get("caption"), str)):
            raise DataError(f"{path}: row {number}: expected {{image_id: text, caption: text}}, found {str(row)[:80]}")
    repeated = [i for i, count in Counter(row["image_id"] for row in rows).items() if count > 1]
    if repeated:
        raise DataError(f"{path}: captioned more than once: {_some(repeated)}; exactly one caption to a pair")
    predictions = {
        row["image_id"]: row["caption"].encode("utf-8", "replace").decode() for row in rows
    }  # no lone surrogates
    if unknown := predictions.keys() - known:
        raise DataError(f"{path}: not among the test pairs: {_some(unknown)}; were the records made anew since?")
    return predictions


def _report(path: Path) -> dict[str, Any]:
    """How many predictions predict says that it wrote, so that none was lost since; nothing without a report."""
    with readable(path):
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _refuse_missing(path: Path, ids: set[str]) -> None:
    if ids:
        raise DataError(f"{path}: no prediction for {_some(ids)}; run `m3diff predict` again")


def _some(ids: Iterable[str]) -> str:
    """The first five ids in order, and how many there are."""
    ordered = sorted(ids)
    return ", ".join(ordered[:5]) + (f" and {len(ordered) - 5} more" if len(ordered) > 5 else "")
