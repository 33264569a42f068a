"""Read and check the test records with their references and predictions.

Most records are about a pair, a before-image and an after-image. A pair without a change is called a distractor. Other
records are about one image or none. A record may have a question of its own, which its references answer. Besides the
predictions, predict may write captions for two controls: a sample of pairs with the after-image of another pair
(shuffled) or with swapped images (reversed).

Records of datasets with the role `retention` are apart. They have a prediction of the model and one of its base.
"""

import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from m3diff.records.errors import DataError, data_error_if_unreadable
from m3diff.records.sample import ImageRef, Turn
from m3diff.records.schemas import NO_CHANGE

ALL_PAIRS = "all"  # name of the group of all pairs of a protocol
Groups = dict[str, list[str]]  # group -> ids of its pairs. Groups are `ALL_PAIRS`, "change", "by_type/color", ...
# Records that a metric scores. See `ProtocolPairs.select`
SelectedRecords = Literal["texts", "captions", "questions"]


@dataclass(frozen=True, kw_only=True)
class EvalPair:
    """A test record with its references and the model's prediction.

    Attributes:
        images: no image, one image, or the image before and the image after.
        references: right answers: captions, or answers to the record's own question. A record without any text has the
            single reference "".
        change_types: types of the changes. ["none"] for a distractor; empty if the changes are not known.
        prediction: the model's caption, or its answer to the record's own question.
        shuffled_prediction: caption for the before-image with the after-image of another pair. None if the control does
            not include this pair.
        reversed_prediction: caption for the swapped images. None if the control does not include this pair.
        question: question of the record. None if the question of the dataset's task is asked.
        history: turns before the question, with their true answers.
        kind: kind of the question, such as "count". None if it is unknown.
    """

    id: str
    dataset: str
    images: tuple[ImageRef, ...]
    references: list[str]
    change_types: list[str]
    prediction: str = ""
    shuffled_prediction: str | None = None
    reversed_prediction: str | None = None
    question: str | None = None
    history: tuple[Turn, ...] = ()
    kind: str | None = None

    @property
    def has_two_images(self) -> bool:
        """Whether the record is about an image before and an image after."""
        return len(self.images) == 2

    @property
    def is_distractor(self) -> bool:
        """Whether the pair is known to have no change."""
        return self.change_types == [NO_CHANGE]

    @property
    def changes(self) -> list[str]:
        """Types of the pair's changes. Empty if the pair is a distractor or its changes are not known."""
        return [] if self.is_distractor else self.change_types


class CaptionedPairs(NamedTuple):
    """The test pairs that have a prediction, in the order of the records.

    Attributes:
        pairs: the pairs of all datasets except retention datasets.
        test_pairs: number of all test pairs, also without retention datasets.
        retention: records of retention datasets, with the predictions of the model.
        retention_of_base: the same records, with the predictions of the base.
    """

    pairs: list[EvalPair]
    test_pairs: int
    retention: list[EvalPair]
    retention_of_base: list[EvalPair]


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
    return EvalPair(
        id=row["id"],
        dataset=row["dataset"],
        images=tuple(ImageRef(**image) for image in row["images"]),
        references=row["references"] or [""],  # as in COCO files, where a pair without any text has one empty reference
        change_types=row["change_types"] or [],
        question=row["question"],
        history=tuple(Turn(**turn) for turn in row["history"] or ()),
        kind=row["kind"],
    )


def load_pairs(clean: Path, predictions: Path) -> CaptionedPairs:
    """Read the test records and their predictions.

    predict may have captioned only some of the pairs, because of `predict.limit` or because a control needs only a
    sample. The number of predictions must then equal the count in predict's report. The controls contain only records
    of two images. A dataset has the role `retention` if predict wrote predictions of its base.

    Raises:
        DataError: there are no test pairs, or a predictions file is truncated or has repeated, unknown or missing ids.
    """
    test_records = read_test_records(clean)
    path = predictions / "report.json"
    with data_error_if_unreadable(path):
        counts = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    retention_count = counts.get("retention")
    answers = read_control(predictions / "predictions_retention.json", test_records.keys(), retention_count)
    answers_of_base = {}
    if answers:
        answers_of_base = read_predictions(predictions / "predictions_base.json", answers.keys(), None)
    retention_datasets = {test_records[record_id].dataset for record_id in answers}
    test_pairs = {name: pair for name, pair in test_records.items() if pair.dataset not in retention_datasets}
    captions = read_predictions(predictions / "predictions.json", test_pairs.keys(), counts.get("rows_out"))
    control_ids = [pair_id for pair_id in captions if test_pairs[pair_id].has_two_images]
    shuffled = read_control(predictions / "predictions_shuffled.json", control_ids, counts.get("control"))
    swapped = read_control(predictions / "predictions_reversed.json", control_ids, counts.get("reversed"))
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
    retention = [replace(test_records[name], prediction=answer) for name, answer in answers.items()]
    retention_of_base = [replace(pair, prediction=answers_of_base[pair.id]) for pair in retention]
    return CaptionedPairs(pairs, len(test_pairs), retention, retention_of_base)


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
