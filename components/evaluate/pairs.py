"""The test pairs with what was said of them: clean records, captions, and captions of shuffled images, checked."""

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pyarrow.parquet as pq

from components.records import NO_CHANGE, DataError


@dataclass(frozen=True)
class Pair:
    """A test pair, its references and the model's caption; `shuffled` is said of it with another pair's after-image."""

    id: str
    dataset: str
    before: Path
    after: Path
    references: list[str]
    change_types: list[str]
    caption: str
    shuffled: str | None

    @property
    def is_distractor(self) -> bool:
        return self.change_types == [NO_CHANGE]

    @property
    def changes(self) -> list[str]:
        """Its change types; none of a distractor, nor where they are unknown."""
        return [] if self.is_distractor else self.change_types


def load_pairs(clean: Path, captions: Path) -> tuple[list[Pair], int]:
    """The captioned test pairs in the records' order, and how many test pairs there are.

    There may be fewer captioned pairs than test pairs only where predict reports that it made so many (predict.limit).

    Raises:
        DataError: no test pair; a caption file that is truncated, or whose ids repeat, are unknown or lack.
    """
    path = clean / "records.parquet"
    table = pq.read_table(path)
    rows = table.filter(pc.equal(table["split"], "test")).to_pylist()
    if not rows:
        raise DataError(f"{path}: no record of the split 'test', so there is nothing to score")
    ids = {row["id"] for row in rows}
    said = read_captions(captions / "predictions.json", ids)
    if not _as_predicted(captions / "report.json", len(said)):
        _refuse_missing(captions / "predictions.json", ids - said.keys())
    shuffled = {}
    if (captions / "predictions_shuffled.json").is_file():
        shuffled = read_captions(captions / "predictions_shuffled.json", set(said))
        _refuse_missing(captions / "predictions_shuffled.json", said.keys() - shuffled.keys())
    pairs = [_pair(row, said[row["id"]], shuffled.get(row["id"])) for row in rows if row["id"] in said]
    return pairs, len(rows)


def _pair(row: dict[str, Any], caption: str, shuffled: str | None) -> Pair:
    return Pair(
        id=row["id"],
        dataset=row["dataset"],
        before=Path(row["before"]),
        after=Path(row["after"]),
        references=row["captions"] or [""],  # coco keeps a pair without words as one empty reference
        change_types=row["change_types"] or [],
        caption=caption,
        shuffled=shuffled,
    )


def read_captions(path: Path, known: set[str]) -> dict[str, str]:
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
    captions = {
        row["image_id"]: row["caption"].encode("utf-8", "replace").decode() for row in rows
    }  # no lone surrogates
    if unknown := captions.keys() - known:
        raise DataError(f"{path}: not among the test pairs: {_some(unknown)}; were the records made anew since?")
    return captions


def _as_predicted(report: Path, captioned: int) -> bool:
    """Does predict report that it wrote so many captions, so that none was lost since?"""
    return report.is_file() and json.loads(report.read_text(encoding="utf-8"))["rows_out"] == captioned


def _refuse_missing(path: Path, ids: set[str]) -> None:
    if ids:
        raise DataError(f"{path}: no caption of {_some(ids)}; run `m3diff predict` again")


def _some(ids: Iterable[str]) -> str:
    """The first five ids in order, and how many there are."""
    ordered = sorted(ids)
    return ", ".join(ordered[:5]) + (f" and {len(ordered) - 5} more" if len(ordered) > 5 else "")
