"""The test pairs with their predictions, checked."""

import hashlib
import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from m3diff.records.errors import DataError
from m3diff.records.sample import ImageRef
from m3diff.records.tables import write_table
from m3diff.scoring.pairs import load_pairs
from tests.errors import raises
from tests.layouts import write_record_table
from tests.scoring import bench

GOOD = bench.as_file(bench.PREDICTIONS)


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    folders = bench.write(tmp_path)
    return folders.clean, folders.predictions


def test_pairs_come_with_prediction_images_and_references_in_the_order_of_records(folders, tmp_path):
    pairs, test_pairs, _, _ = load_pairs(*folders)
    assert [pair.id for pair in pairs] == list(bench.PREDICTIONS)
    assert test_pairs == 6
    assert [pair.prediction for pair in pairs] == list(bench.PREDICTIONS.values())
    assert [(pair.references, pair.change_types) for pair in pairs] == [(r, types) for _, types, r in bench.RECORDS]
    assert {pair.dataset for pair in pairs} == {"toy"}
    assert pairs[0].shuffled_prediction == bench.PREDICTIONS["toy/1"]
    paths = [tmp_path / f"3_{side}.png" for side in ("before", "after")]
    assert pairs[3].images == tuple(ImageRef(str(path), hashlib.sha256(path.read_bytes()).digest()) for path in paths)
    assert pairs[3].images[0].sha256 != pairs[3].images[1].sha256


@pytest.mark.fault("17")
@pytest.mark.parametrize(
    ("content", "code", "fields"),
    [
        (json.dumps(GOOD)[:100], "files.unreadable_stage_output", {"writer": "predict"}),
        ("{}", "scoring.predictions_no_list", {"value": "dict"}),
        ("[]", "scoring.predictions_empty", {}),
        ('["a"]', "scoring.prediction_malformed", {"row": 0, "value": "a"}),
        (json.dumps([*GOOD, {"image_id": "toy/0"}]), "scoring.prediction_malformed", {"row": 6}),
        (json.dumps([*GOOD, {"image_id": 7, "caption": "x"}]), "scoring.prediction_malformed", {"row": 6}),
        (json.dumps([*GOOD, GOOD[2]]), "scoring.predictions_repeated", {"names": ["toy/2"]}),
        (
            json.dumps([*GOOD, *bench.as_file({f"else/{n}": "x" for n in range(8)})]),
            "scoring.predictions_unknown",
            {"excerpt": "else/0, else/1, else/2, else/3, else/4 and 3 more"},
        ),
        (json.dumps(GOOD[:-2]), "scoring.predictions_missing", {"names": ["toy/4", "toy/5"]}),
        (None, "files.unreadable_stage_output", {"writer": "predict"}),
    ],
    ids=[
        "truncated",
        "no list",
        "an empty list",
        "no object",
        "no caption",
        "an id that is no text",
        "two captions of a pair",
        "unknown ids",
        "missing ids",
        "no file",
    ],
)
def test_a_bad_file_of_predictions_is_refused_by_name_and_id(content, code, fields, folders: tuple[Path, Path]):
    path = folders[1] / "predictions.json"
    path.unlink() if content is None else path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with raises(DataError, code, path=path, **fields):
        load_pairs(*folders)


CONTROLS = pytest.mark.parametrize(
    ("name", "count"),
    [("", "rows_out"), ("_shuffled", "control"), ("_reversed", "reversed")],
    ids=["predictions", "shuffled", "reversed"],
)


def write_fewer(folders: tuple[Path, Path], name: str, captions: list[dict[str, str]], **counts: int) -> Path:
    """Write a file of predictions without some pairs, and the counts of predict's report if there are any."""
    predictions = folders[1]
    (predictions / "predictions_shuffled.json").unlink()
    bench.write_json(predictions / f"predictions{name}.json", captions)
    if counts:
        bench.write_json(predictions / "report.json", {"rows_out": 6} | counts)
    return predictions / f"predictions{name}.json"


@CONTROLS
def test_missing_predictions_are_refused_without_predicts_report(name, count, folders):
    file = write_fewer(folders, name, GOOD[2:])
    with raises(DataError, "scoring.predictions_missing", path=file, names=["toy/0", "toy/1"]):
        load_pairs(*folders)


@CONTROLS
def test_fewer_predictions_are_taken_if_predict_reports_as_many(name, count, folders):
    write_fewer(folders, name, GOOD[2:], **{count: 4})
    pairs, test_pairs, _, _ = load_pairs(*folders)
    assert test_pairs == 6
    captions = {
        "": [pair.prediction for pair in pairs],
        "_shuffled": [pair.shuffled_prediction for pair in pairs],
        "_reversed": [pair.reversed_prediction for pair in pairs],
    }
    missing = [] if name == "" else [None, None]
    assert captions[name] == missing + [row["caption"] for row in GOOD[2:]]


@CONTROLS
def test_a_prediction_that_is_lost_after_predict_is_missed(name, count, folders):
    file = write_fewer(folders, name, GOOD[3:], **{count: 4})
    with raises(DataError, "scoring.predictions_missing", path=file, names=["toy/0", "toy/1", "toy/2"]):
        load_pairs(*folders)


def test_controls_are_optional(folders: tuple[Path, Path]):
    bench.write_json(folders[1] / "predictions_shuffled.json", [])
    bench.write_json(folders[1] / "report.json", {"rows_in": 6, "rows_out": 6, "control": 0})
    pairs = load_pairs(*folders).pairs
    assert [pair.shuffled_prediction for pair in pairs] == [None] * 6
    assert [pair.reversed_prediction for pair in pairs] == [None] * 6


@pytest.mark.fault("17")
def test_a_lone_surrogate_in_a_caption_becomes_a_question_mark(folders: tuple[Path, Path]):
    (folders[1] / "predictions.json").write_text(json.dumps(GOOD).replace("nothing changed", "a \\ud800 cube"))
    assert load_pairs(*folders).pairs[4].prediction == "a ? cube"


@pytest.mark.fault("17")
def test_a_record_without_references_and_change_types_is_read(folders: tuple[Path, Path]):
    path = folders[0] / "records"
    rows = pq.read_table(path).to_pylist()
    rows[1] |= {"references": [], "change_types": None}
    write_record_table(path, rows)
    pair = load_pairs(*folders).pairs[1]
    assert pair.references == [""]
    assert pair.change_types == []
    assert pair.changes == []


def test_records_without_a_test_pair_are_refused(folders: tuple[Path, Path]):
    path = folders[0] / "records"
    write_table(pq.read_table(path).slice(6), path)
    with raises(DataError, "scoring.no_test_record", path=path):
        load_pairs(*folders)
