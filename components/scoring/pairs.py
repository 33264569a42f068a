"""Read and check the test pairs with their references and predictions.

A pair is a before-image and an after-image. A pair without a change is called a distractor. Besides the predictions,
predict may write captions for two controls: a sample of pairs with the after-image of another pair (shuffled) or with
swapped images (reversed).
"""

import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from m3diff.records.errors import DataError, data_error_if_unreadable
from m3diff.records.schemas import NO_CHANGE

ALL_PAIRS = "all"  # name of the group of all pairs of a protocol
Groups = dict[str, list[str]]  # group -> ids of its pairs. Groups are `ALL_PAIRS`, "change", "by_type/color", ...


@dataclass(frozen=True)
class EvalPair:
    """A test pair with its references and the model's prediction.

    Attributes:
        references: reference captions. A pair without any text has the single reference "".
        change_types: types of the changes. ["none"] for a distractor; empty if the changes are not known.
        shuffled_prediction: caption for the before-image with the after-image of another pair. None if the control does
            not include this pair.
        reversed_prediction: caption for the swapped images. None if the control does not include this pair.
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
        """Whether the pair is known to have no change."""
        return self.change_types == [NO_CHANGE]

    @property
    def changes(self) -> list[str]:
        """Types of the pair's changes. Empty if the pair is a distractor or its changes are not known."""
        return [] if self.is_distractor else self.change_types


class CaptionedPairs(NamedTuple):
    """The test pairs that have a prediction, in the order of the records, and the number of all test pairs."""

    pairs: list[EvalPair]
    test_pairs: int


def read_test_records(clean: Path) -> dict[str, EvalPair]:
    """Read the "test" split of the clean records. Return its pairs by id, in file order and without predictions.

    Raises:
        DataError: the file cannot be read or does not contain a record of the "test" split.
    """
    # imported here, so that modules that only need protocols do not import pyarrow
    from m3diff.records.tables import read_table

    path = clean / "records"
    rows = read_table(path, filters=[("split", "=", "test")]).to_pylist()
    if not rows:
        raise DataError("scoring.no_test_record", path=path)
    return {row["id"]: pair_of_record(row) for row in rows}


def pair_of_record(row: Mapping[str, Any]) -> EvalPair:
    """Convert a record to a pair without predictions."""
    before, after = row["images"]
    return EvalPair(
        id=row["id"],
        dataset=row["dataset"],
        before=Path(before["uri"]),
        after=Path(after["uri"]),
        before_sha256=before["sha256"],
        after_sha256=after["sha256"],
        references=row["references"] or [""],  # as in COCO files, where a pair without any text has one empty reference
        change_types=row["change_types"] or [],
    )


def load_pairs(clean: Path, predictions: Path) -> CaptionedPairs:
    """Read the test records and their predictions.

    predict may have captioned only some of the pairs, because of `predict.limit` or because a control needs only a
    sample. The number of predictions must then equal the count in predict's report.

    Raises:
        DataError: there are no test pairs, or a predictions file is truncated or has repeated, unknown or missing ids.
    """
    test_pairs = read_test_records(clean)
    path = predictions / "report.json"
    with data_error_if_unreadable(path):
        counts = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    captions = read_predictions(predictions / "predictions.json", test_pairs.keys(), counts.get("rows_out"))
    shuffled = read_control(predictions / "predictions_shuffled.json", captions.keys(), counts.get("control"))
    swapped = read_control(predictions / "predictions_reversed.json", captions.keys(), counts.get("reversed"))
    pairs = []
    for pair_id, pair in test_pairs.items():
        if pair_id in captions:
            captioned_pair = replace(
                pair,
                prediction=captions[pair_id],
                shuffled_prediction=shuffled.get(pair_id),
                reversed_prediction=swapped.get(pair_id),
            )
            pairs.append(captioned_pair)
    return CaptionedPairs(pairs, len(test_pairs))


def read_control(path: Path, ids: Collection[str], count: int | None) -> dict[str, str]:
    """Read the captions of a control and return them by pair id. Empty if predict did not run the control.

    Args:
        count: number of predictions in predict's report, or None if the report does not have it.

    Raises:
        DataError: see `read_predictions`.
    """
    if count == 0 or not path.is_file():
        return {}
    return read_predictions(path, ids, count)


def read_predictions(path: Path, ids: Collection[str], count: int | None) -> dict[str, str]:
    """Read captions by id from a file of the form [{"image_id": id, "caption": text}].

    Args:
        ids: ids that the file may contain. Some may be missing only if the file has exactly `count` rows.
        count: number of predictions in predict's report, or None if the report does not have it.

    Raises:
        DataError: the file cannot be read, or one of its rows or ids is invalid.
    """
    with data_error_if_unreadable(path, "files.unreadable_stage_output", writer="predict"):
        rows: Any = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(rows, list):
        raise DataError("scoring.predictions_no_list", path=path, value=type(rows).__name__)
    if not rows:
        raise DataError("scoring.predictions_empty", path=path)
    for number, row in enumerate(rows):
        if not (isinstance(row, dict) and isinstance(row.get("image_id"), str) and isinstance(row.get("caption"), str)):
            raise DataError("scoring.prediction_malformed", path=path, row=number, value=str(row)[:80])
    rows_of_id = Counter(row["image_id"] for row in rows)
    repeated_ids = sorted(pair_id for pair_id, times in rows_of_id.items() if times > 1)
    if repeated_ids:
        raise DataError("scoring.predictions_repeated", path=path, names=repeated_ids, excerpt=list_ids(repeated_ids))
    unknown_ids = sorted(rows_of_id.keys() - set(ids))
    if unknown_ids:
        raise DataError("scoring.predictions_unknown", path=path, names=unknown_ids, excerpt=list_ids(unknown_ids))
    missing_ids = sorted(set(ids) - rows_of_id.keys())
    if missing_ids and len(rows) != count:
        raise DataError("scoring.predictions_missing", path=path, names=missing_ids, excerpt=list_ids(missing_ids))
    return {row["image_id"]: without_surrogates(row["caption"]) for row in rows}


def without_surrogates(text: str) -> str:
    """Return the text with each lone surrogate replaced by "?", because it cannot be written to a file."""
    return text.encode("utf-8", "replace").decode()


def list_ids(ids: Sequence[str]) -> str:
    """Return a text with the first five ids and the number of further ids."""
    return ", ".join(ids[:5]) + (f" and {len(ids) - 5:,} more" if len(ids) > 5 else "")
