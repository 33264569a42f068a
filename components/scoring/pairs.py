"""The test pairs: clean records with the predictions, and those of shuffled and swapped pairs, checked."""

import json
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
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
    prediction: str = ""
    shuffled_prediction: str | None = None
    reversed_prediction: str | None = None

    @property
    def is_distractor(self) -> bool:
        return self.change_types == [NO_CHANGE]

    @property
    def changes(self) -> list[str]:
        """Its change types; none of a distractor, nor where they are unknown."""
        return [] if self.is_distractor else self.change_types


def read_test_records(clean: Path) -> dict[str, EvalPair]:
    """The records of the split "test" by id, in their order, without predictions.

    Raises:
        DataError: there is none.
    """
    import pyarrow.parquet as pq

    path = clean / "records.parquet"
    with readable(path):
        rows = pq.read_table(path, filters=[("split", "=", "test")]).to_pylist()
    if not rows:
        raise DataError(f"{path}: no record of the split 'test', so there is nothing to score")
    return {
        row["id"]: EvalPair(
            **{name: row[name] for name in ("id", "dataset", "before_sha256", "after_sha256")},
            before=Path(row["before"]),
            after=Path(row["after"]),
            references=row["references"] or [""],  # coco keeps a pair without words as one empty reference
            change_types=row["change_types"] or [],
        )
        for row in rows
    }


def load_pairs(clean: Path, predictions: Path) -> tuple[list[EvalPair], int]:
    """The captioned test pairs in the records' order, and how many test pairs there are.

    There may be fewer predictions than test pairs, and fewer of shuffled and of swapped pairs, only where predict
    reports that it made so many (predict.limit, its controls).

    Raises:
        DataError: no test pair; a file of predictions that is truncated, or whose ids repeat, are unknown or missing.
    """
    pairs = read_test_records(clean)
    path = predictions / "report.json"
    with readable(path):
        counts = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    found = read_predictions(predictions / "predictions.json", pairs.keys(), counts.get("rows_out"))
    controls: list[dict[str, str]] = []
    for name, count in (("shuffled", counts.get("control")), ("reversed", counts.get("reversed"))):
        path = predictions / f"predictions_{name}.json"
        controls.append(read_predictions(path, found.keys(), count) if path.is_file() and count != 0 else {})
    shuffled, swapped = controls
    captioned = [
        replace(pair, prediction=found[i], shuffled_prediction=shuffled.get(i), reversed_prediction=swapped.get(i))
        for i, pair in pairs.items()
        if i in found
    ]
    return captioned, len(pairs)


def read_predictions(path: Path, known: Collection[str], count: int | None) -> dict[str, str]:
    """A file [{"image_id": id, "caption": text}] as id -> text: every id is known and there once.

    Args:
        known: ids, each with a caption but where predict reported `count` of them.

    Raises:
        DataError: naming the file and the rows or ids at fault.
    """
    try:
        rows: Any = json.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise DataError(f"{path}: no such file; run `m3diff predict` first") from None
    except ValueError as error:
        raise DataError(f"{path}: not valid JSON ({error}); is the file whole? Run `m3diff predict` again") from error
    if not isinstance(rows, list) or not rows:
        raise DataError(f"{path}: expected a list of {{image_id, caption}}, found {type(rows).__name__} without rows")
    for number, row in enumerate(rows):
        if not (isinstance(row, dict) and isinstance(row.get("image_id"), str) and isinstance(row.get("caption"), str)):
            raise DataError(f"{path}: row {number}: expected {{image_id: text, caption: text}}, found {str(row)[:80]}")
    times = Counter(row["image_id"] for row in rows)
    if repeated := [i for i, number in times.items() if number > 1]:
        raise DataError(f"{path}: captioned more than once: {some(sorted(repeated))}; exactly one caption to a pair")
    if unknown := times.keys() - set(known):
        raise DataError(f"{path}: not among the test pairs: {some(sorted(unknown))}; were the records made anew since?")
    if len(rows) != count and (missing := set(known) - times.keys()):
        raise DataError(f"{path}: no prediction for {some(sorted(missing))}; run `m3diff predict` again")
    return {row["image_id"]: without_surrogates(row["caption"]) for row in rows}


def without_surrogates(text: str) -> str:
    """The text with "?" for each lone surrogate, which no file can hold."""
    return text.encode("utf-8", "replace").decode()


def some(ids: Sequence[str]) -> str:
    """The first five ids, and how many there are."""
    return ", ".join(ids[:5]) + (f" and {len(ids) - 5:,} more" if len(ids) > 5 else "")
