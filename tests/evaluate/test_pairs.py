import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from components.evaluate.pairs import load_pairs
from components.records import DataError
from tests.evaluate import bench

GOOD = bench.said(bench.CAPTIONS)


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    clean, captions, _ = bench.write(tmp_path)
    return clean, captions


def test_test_pairs_come_with_caption_and_every_reference_in_the_order_of_the_records(folders: tuple[Path, Path]):
    pairs, test_pairs = load_pairs(*folders)
    assert [pair.id for pair in pairs] == list(bench.CAPTIONS)
    assert test_pairs == 6
    assert pairs[0].references == bench.RECORDS[0][2]
    assert pairs[0].shuffled == bench.CAPTIONS["toy/1"]


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
        (json.dumps(GOOD[:-2]), "no caption of toy/4, toy/5"),
        ("\ufffe".encode("utf-16"), "not valid JSON"),
    ],
)
def test_a_bad_caption_file_is_refused_by_name_and_id(content: str | bytes, said: str, folders: tuple[Path, Path]):
    path = folders[1] / "predictions.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=said) as refused:
        load_pairs(*folders)
    assert str(path) in str(refused.value)


def test_no_caption_file_names_the_command_that_makes_one(folders: tuple[Path, Path]):
    (folders[1] / "predictions.json").unlink()
    with pytest.raises(DataError, match="m3diff predict"):
        load_pairs(*folders)


def test_many_ids_at_fault_are_counted_and_five_are_named(folders: tuple[Path, Path]):
    strangers = [{"image_id": f"else/{number}", "caption": "x"} for number in range(8)]
    bench.write_json(folders[1] / "predictions.json", [*GOOD, *strangers])
    with pytest.raises(DataError, match="test pairs: else/0, else/1, else/2, else/3, else/4 and 3 more"):
        load_pairs(*folders)


def test_fewer_captions_are_taken_where_predict_says_that_it_made_so_many(folders: tuple[Path, Path]):
    bench.write_json(folders[1] / "predictions.json", GOOD[:4])
    bench.write_json(folders[1] / "predictions_shuffled.json", GOOD[:4])
    bench.write_json(folders[1] / "report.json", {"stage": "predict", "rows_in": 4, "rows_out": 4})
    pairs, test_pairs = load_pairs(*folders)
    assert (len(pairs), test_pairs) == (4, 6)


def test_a_caption_lost_after_predict_is_still_missed(folders: tuple[Path, Path]):
    bench.write_json(folders[1] / "predictions.json", GOOD[:3])
    bench.write_json(folders[1] / "report.json", {"stage": "predict", "rows_in": 4, "rows_out": 4})
    with pytest.raises(DataError, match="no caption of toy/3, toy/4, toy/5"):
        load_pairs(*folders)


def test_a_pair_missing_among_the_shuffled_captions_is_named(folders: tuple[Path, Path]):
    bench.write_json(folders[1] / "predictions_shuffled.json", GOOD[1:])
    with pytest.raises(DataError, match=r"predictions_shuffled.json: no caption of toy/0"):
        load_pairs(*folders)


def test_captions_of_other_images_are_optional(folders: tuple[Path, Path]):
    (folders[1] / "predictions_shuffled.json").unlink()
    assert {pair.shuffled for pair in load_pairs(*folders)[0]} == {None}


def test_no_test_pair_is_refused(folders: tuple[Path, Path]):
    path = folders[0] / "records.parquet"
    pq.write_table(pq.read_table(path).slice(6), path)
    with pytest.raises(DataError, match="no record of the split 'test'"):
        load_pairs(*folders)


def test_a_lone_surrogate_does_not_reach_the_report(folders: tuple[Path, Path]):
    (folders[1] / "predictions.json").write_text(json.dumps(GOOD).replace("nothing changed", "a \\ud800 cube"))
    assert load_pairs(*folders)[0][4].caption == "a ? cube"
