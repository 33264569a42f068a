import hashlib
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from m3diff.records.errors import DataError
from m3diff.records.schemas import RECORD_SCHEMA
from m3diff.scoring.pairs import _some, load_pairs
from tests.scoring import bench

GOOD = bench.as_file(bench.PREDICTIONS)


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    folders = bench.write(tmp_path)
    return folders.clean, folders.predictions


def test_pairs_come_with_prediction_and_every_reference_in_the_order_of_the_records(folders: tuple[Path, Path]):
    pairs, test_pairs = load_pairs(*folders)
    assert [pair.id for pair in pairs] == list(bench.PREDICTIONS)
    assert test_pairs == 6
    assert [pair.prediction for pair in pairs] == list(bench.PREDICTIONS.values())
    assert [(pair.references, pair.change_types) for pair in pairs] == [(r, types) for _, types, r in bench.RECORDS]
    assert {pair.dataset for pair in pairs} == {"toy"}
    assert pairs[0].shuffled_prediction == bench.PREDICTIONS["toy/1"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (json.dumps(GOOD)[:100], "not valid JSON.*is the file whole"),
        ("", "not valid JSON"),
        ("{}", "expected a list"),
        ("[]", "expected a list"),
        ('["a"]', "row 0: expected"),
        (json.dumps([*GOOD, {"image_id": "toy/0"}]), "row 6: expected"),
        (json.dumps([*GOOD, {"image_id": 7, "caption": "x"}]), "row 6: expected"),
        (json.dumps([*GOOD, {"image_id": "toy/9", "caption": None}]), "row 6: expected"),
        (json.dumps([*GOOD, GOOD[2]]), "captioned more than once: toy/2"),
        (json.dumps([*GOOD, {"image_id": "toy/77", "caption": "x"}]), "not among the test pairs: toy/77"),
        (json.dumps(GOOD[:-2]), "no prediction for toy/4, toy/5; run `m3diff predict` again"),
        ("\ufffe".encode("utf-16"), "not valid JSON"),
    ],
)
def test_a_bad_file_of_predictions_is_refused_by_name_and_id(
    content: str | bytes, said: str, folders: tuple[Path, Path]
):
    path = folders[1] / "predictions.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=said) as refused:
        load_pairs(*folders)
    assert str(path) in str(refused.value)


def test_no_file_of_predictions_names_the_command_that_makes_one(folders: tuple[Path, Path]):
    (folders[1] / "predictions.json").unlink()
    with pytest.raises(DataError, match="m3diff predict"):
        load_pairs(*folders)


def test_many_ids_at_fault_are_counted_and_five_are_named(folders: tuple[Path, Path]):
    strangers = [{"image_id": f"else/{number}", "caption": "x"} for number in range(8)]
    bench.write_json(folders[1] / "predictions.json", [*GOOD, *strangers])
    with pytest.raises(DataError, match="test pairs: else/0, else/1, else/2, else/3, else/4 and 3 more"):
        load_pairs(*folders)


def test_fewer_predictions_are_taken_where_predict_says_that_it_made_so_many(folders: tuple[Path, Path]):
    bench.write_json(folders[1] / "predictions.json", GOOD[:4])
    bench.write_json(folders[1] / "predictions_shuffled.json", GOOD[:4])
    bench.write_json(folders[1] / "report.json", {"stage": "predict", "rows_in": 4, "rows_out": 4})
    pairs, test_pairs = load_pairs(*folders)
    assert (len(pairs), test_pairs) == (4, 6)


def test_a_prediction_lost_after_predict_is_still_missed(folders: tuple[Path, Path]):
    bench.write_json(folders[1] / "predictions.json", GOOD[:3])
    bench.write_json(folders[1] / "report.json", {"stage": "predict", "rows_in": 4, "rows_out": 4})
    with pytest.raises(DataError, match="no prediction for toy/3, toy/4, toy/5"):
        load_pairs(*folders)


def test_a_pair_missing_among_the_shuffled_predictions_is_named(folders: tuple[Path, Path]):
    bench.write_json(folders[1] / "predictions_shuffled.json", GOOD[1:])
    with pytest.raises(DataError, match=r"predictions_shuffled.json: no prediction for toy/0"):
        load_pairs(*folders)


@pytest.mark.parametrize(("count", "told"), [(4, 4), (1, 1), (6, 6)])
def test_a_control_on_a_sample_is_taken_where_predict_says_that_it_made_so_many(
    count: int, told: int, folders: tuple[Path, Path]
):
    sample = GOOD[6 - count :]
    bench.write_json(folders[1] / "predictions_shuffled.json", sample)
    bench.write_json(folders[1] / "report.json", {"rows_in": 6, "rows_out": 6, "control": told})
    found = {pair.id: pair.shuffled_prediction for pair in load_pairs(*folders)[0]}
    assert found == {row["image_id"]: None for row in GOOD} | {row["image_id"]: row["caption"] for row in sample}


def test_a_pair_of_the_control_lost_after_predict_is_still_missed(folders: tuple[Path, Path]):
    bench.write_json(folders[1] / "predictions_shuffled.json", GOOD[2:])
    bench.write_json(folders[1] / "report.json", {"rows_in": 6, "rows_out": 6, "control": 5})
    with pytest.raises(DataError, match=r"predictions_shuffled.json: no prediction for toy/0, toy/1"):
        load_pairs(*folders)


def test_a_run_without_a_control_has_none(folders: tuple[Path, Path]):
    bench.write_json(folders[1] / "predictions_shuffled.json", [])
    bench.write_json(folders[1] / "report.json", {"rows_in": 6, "rows_out": 6, "control": 0})
    assert {pair.shuffled_prediction for pair in load_pairs(*folders)[0]} == {None}


def test_predictions_of_shuffled_pairs_are_optional(folders: tuple[Path, Path]):
    (folders[1] / "predictions_shuffled.json").unlink()
    assert {pair.shuffled_prediction for pair in load_pairs(*folders)[0]} == {None}


def test_captions_of_swapped_images_are_optional_and_of_as_many_pairs_as_predict_says(folders: tuple[Path, Path]):
    assert {pair.reversed_prediction for pair in load_pairs(*folders)[0]} == {None}
    bench.write_json(folders[1] / "predictions_reversed.json", GOOD[:2])
    bench.write_json(folders[1] / "report.json", {"rows_in": 6, "rows_out": 6, "control": 6, "reversed": 2})
    found = load_pairs(*folders)[0]
    assert [pair.reversed_prediction for pair in found] == [*(row["caption"] for row in GOOD[:2]), *[None] * 4]
    assert found[1].shuffled_prediction == bench.PREDICTIONS["toy/2"]
    bench.write_json(folders[1] / "report.json", {"rows_in": 6, "rows_out": 6, "control": 6, "reversed": 3})
    with pytest.raises(DataError, match=r"predictions_reversed.json: no prediction for toy/2, toy/3"):
        load_pairs(*folders)


def test_no_test_pair_is_refused(folders: tuple[Path, Path]):
    path = folders[0] / "records.parquet"
    pq.write_table(pq.read_table(path).slice(6), path)
    with pytest.raises(DataError, match="no record of the split 'test'"):
        load_pairs(*folders)


@pytest.mark.fault("17")
def test_a_lone_surrogate_does_not_reach_the_report(folders: tuple[Path, Path]):
    (folders[1] / "predictions.json").write_text(json.dumps(GOOD).replace("nothing changed", "a \\ud800 cube"))
    assert load_pairs(*folders)[0][4].prediction == "a ? cube"


def test_a_pair_knows_which_image_is_which_and_their_digests(folders: tuple[Path, Path], tmp_path: Path):
    pair = load_pairs(*folders)[0][3]
    assert (pair.before, pair.after) == (tmp_path / "3_before.png", tmp_path / "3_after.png")
    assert pair.before_sha256 == hashlib.sha256(pair.before.read_bytes()).digest()
    assert pair.after_sha256 == hashlib.sha256(pair.after.read_bytes()).digest()
    assert pair.before_sha256 != pair.after_sha256


def test_a_pair_without_references_has_one_that_is_empty_and_unknown_types_are_none(folders: tuple[Path, Path]):
    path = folders[0] / "records.parquet"
    rows = pq.read_table(path).to_pylist()
    rows[1] |= {"references": [], "change_types": None}
    pq.write_table(pa.Table.from_pylist(rows, schema=RECORD_SCHEMA), path)
    pair = load_pairs(*folders)[0][1]
    assert (pair.references, pair.change_types, pair.changes) == ([""], [], [])


@pytest.mark.parametrize(
    ("types", "distractor", "changes"),
    [
        (["none"], True, []),
        ([], False, []),
        (["color"], False, ["color"]),
        (["color", "none"], False, ["color", "none"]),
    ],
)
def test_a_distractor_is_a_pair_whose_only_type_is_none(types: list[str], distractor: bool, changes: list[str]):
    pair = bench.pair("x", ["y"], types)
    assert (pair.is_distractor, pair.changes) == (distractor, changes)


@pytest.mark.parametrize(("count", "text"), [(5, "0, 1, 2, 3, 4"), (6, "0, 1, 2, 3, 4 and 1 more"), (1, "0")])
def test_ids_are_listed_in_order_up_to_five(count: int, text: str):
    assert _some({str(number) for number in range(count)}) == text
