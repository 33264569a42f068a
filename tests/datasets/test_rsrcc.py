"""RSRCC: questions in the form of its metadata.csv and of the Parquet files of the `datasets` library.

https://huggingface.co/datasets/google/RSRCC and `Roie-k/RSRCC:README.md` show rows of this form. The texts are ours.
"""

from pathlib import Path

import polars as pl
import pytest

from m3diff.datasets import rsrcc
from m3diff.datasets.spec import SplitCount
from m3diff.records.errors import DataError
from m3diff.settings.rules import faults_of_options
from m3diff.stages.convert.params import Convert
from m3diff.stages.convert.stage import convert
from tests import layouts
from tests.errors import Message, raises
from tests.layouts import ROAD_OPTIONS, judge_by_polars_alone, make_entry, rsrcc_text, run_ingest, run_validate

QUESTION_WITH_OPTIONS = """What happened to the road?
A) It was paved.
B) It was dug up.
C) A tree fell on it.
D) Nothing."""


@pytest.mark.parametrize("line_break", [r"\n", "\n"], ids=["two characters", "one character"])
def test_line_breaks_of_either_kind_separate_question_options_and_answer(line_break):
    text = rsrcc_text("What happened to the road?", "C", *ROAD_OPTIONS, line_break=line_break)
    assert rsrcc.parse_text(text) == rsrcc.ParsedText(QUESTION_WITH_OPTIONS, "choice", "C")
    text = rsrcc_text("Was a house built?", "Yes", line_break=line_break)
    assert rsrcc.parse_text(text) == rsrcc.ParsedText("Was a house built?", "yes/no", "Yes")


@pytest.mark.parametrize(
    ("answer", "letter"),
    [("**Answer:** B", "B"), ("**Answer: B**", "B"), ("**Answer:** b)", "B"), ("**Answer:** (B)", "B")]
    + [("**Answer:** B) It was dug up.", "B"), ("**Answer:** **B**", "B")],
)
def test_a_letter_is_read_with_its_signs(answer, letter):
    text = rsrcc_text("What?", "", *ROAD_OPTIONS).replace("**Answer:** ", answer)
    assert rsrcc.parse_text(text).answer == letter


@pytest.mark.parametrize("answer", ["B lot of trees", "It was paved.", "AB"])
def test_a_text_that_only_begins_with_a_letter_is_no_answer(answer):
    with raises(DataError, "datasets.answer_of_other_kind", key="text", expected="the letter of an option"):
        rsrcc.parse_text(rsrcc_text("What?", answer, *ROAD_OPTIONS))


@pytest.mark.parametrize(("answer", "word"), [("yes", "Yes"), ("NO.", "No")])
def test_yes_and_no_are_read_in_any_case(answer, word):
    assert rsrcc.parse_text(rsrcc_text("Was a house built?", answer)).answer == word


def test_questions_about_a_pair_are_records_of_one_image_set(tmp_path):
    rows = [row for row in rsrcc.read(layouts.write_rsrcc(tmp_path)) if row.split == "train"]
    assert [row.kind for row in rows] == ["yes/no", "choice"]
    assert {row.image_set for row in rows} == {"1a_2b"}
    assert rows[1].question == QUESTION_WITH_OPTIONS


def test_two_files_of_other_names_name_their_pair_together(tmp_path):
    (tmp_path / "m.csv").write_text("before_file_name,after_file_name,text\na_before.png,b_after.png,\n")
    (row,) = rsrcc.read(tmp_path, manifest={"test": "m.csv"})
    assert row.name == "a|b?0"


def write_parquet(root: Path, split: str, rows: list[tuple[int, str]]) -> None:
    values = []
    for number, text in rows:
        values.append({"before": layouts.stored(number), "after": layouts.stored(number + 1), "text": text})
    layouts.write_shards(root, split, values, count=len(rows))


def test_parquet_files_give_the_same_questions_and_name_pairs_by_their_images(tmp_path):
    yes_text = rsrcc_text("Was a house built?", "Yes")
    write_parquet(tmp_path, "validation", [(1, yes_text), (1, rsrcc_text("What?", "A", *ROAD_OPTIONS)), (5, yes_text)])
    rows = list(rsrcc.read(tmp_path, manifest={"val": "data/validation-*.parquet"}))
    assert [row.references for row in rows] == [["Yes"], ["A"], ["Yes"]]
    assert [row.split for row in rows] == ["val"] * 3
    assert rows[0].image_set == rows[1].image_set != rows[2].image_set
    assert [row.name.rpartition("?")[2] for row in rows] == ["0", "1", "0"]
    assert rows[1].source == "validation-00001-of-00003-2f1a.parquet, row 0"


def test_a_row_of_a_parquet_file_without_an_image_is_a_fault(tmp_path):
    rows = [{"before": layouts.stored(1), "after": image, "text": "x"} for image in (None, layouts.stored(2))]
    layouts.write_shards(tmp_path, "test", rows)
    row = next(rsrcc.read(tmp_path, manifest={"test": "data/test-*.parquet"}))
    assert row.fault is not None
    assert row.fault.code == "datasets.missing_value"
    assert row.fault.fields["key"] == "after"


def test_parameters_take_a_file_for_each_split_and_no_other_split():
    assert list(faults_of_options("own", "rsrcc", {"manifest": {"test": "test/metadata.csv"}})) == []
    (fault,) = faults_of_options("own", "rsrcc", {"manifest": {"validation": "val/metadata.csv"}})
    assert fault.fields["key"] == "own.options.manifest.validation"


@pytest.mark.parametrize("header", ["before_file_name,after_file_name,text", "file_name,text", ""])
def test_the_folder_is_recognised_by_the_columns_of_a_metadata_file(tmp_path, header):
    (tmp_path / "test").mkdir()
    (tmp_path / "test/metadata.csv").write_text(f"{header}\n")
    assert rsrcc.recognise(tmp_path) is header.startswith("before")
    assert not rsrcc.recognise(tmp_path / "test")


def test_published_counts_add_up():
    splits = (rsrcc.PUBLISHED.train, rsrcc.PUBLISHED.val, rsrcc.PUBLISHED.test)
    assert sum(count.questions for count in splits) == 126_131
    assert sum(count.pairs for count in splits) == 9_503
    for count in splits:
        assert count == SplitCount(count.pairs, count.questions, records=count.questions, questions=count.questions), (
            "each question has one answer and is one row"
        )


@pytest.fixture
def validated(tmp_path, monkeypatch):
    """Return a function that ingests rows and validates them, and returns validate's report."""
    judge_by_polars_alone(monkeypatch)

    def validate(rows, **options):
        run_ingest(layouts.write_rsrcc(tmp_path / "raw", rows), "rsrcc", "rsrcc", **options)
        return run_validate(tmp_path)

    return validate


def test_good_rows_become_samples_of_their_own_question(validated, tmp_path):
    report = validated(layouts.RSRCC_ROWS, expected_pairs={"train": 1, "val": 1, "test": 2})
    assert report.datasets["rsrcc"].pairs == {"train": 1, "val": 1, "test": 2}
    assert report.datasets["rsrcc"].questions == {"train": 2, "val": 1, "test": 3}
    entries = {"rsrcc": make_entry("rsrcc", tmp_path / "raw")}
    convert(Convert(), entries, tmp_path / "clean", tmp_path / "mixture")
    samples = pl.read_parquet(tmp_path / "mixture/train/*.parquet")
    assert sorted(samples.select("question", "answer").rows()) == [
        ("Was a house built in the north?", "Yes"),
        (QUESTION_WITH_OPTIONS, "C"),
    ]
    assert set(samples["image_set"]) == {"rsrcc/1a_2b"}
    test_samples = pl.read_parquet(tmp_path / "mixture/test/*.parquet")
    assert sorted(test_samples["record"]) == ["rsrcc/5e_6f?0", "rsrcc/5e_6f?1", "rsrcc/7a_8b?0"]


def test_a_row_that_cannot_be_read_is_quarantined_with_its_file_line_and_field(validated, tmp_path):
    bad_text = rsrcc_text("What?", "E", *ROAD_OPTIONS)
    report = validated(layouts.RSRCC_ROWS | {"val": [*layouts.RSRCC_ROWS["val"], ("3c_4d", bad_text)]})
    assert report.datasets["rsrcc"].quarantined == 1
    (row,) = pl.read_parquet(tmp_path / "clean/quarantine").to_dicts()
    assert row["source"] == "val/metadata.csv, line 3"
    assert row["rules"][0] == "readable"
    message = Message("datasets.answer_names_no_option", key="text", value="E", names=["A", "B", "C", "D"])
    assert message == row["reason"]
    assert row["id"] == "rsrcc/3c_4d?1"


def test_the_same_images_under_other_questions_in_two_splits_are_a_leak(validated, tmp_path):
    train = [("5e_6f", rsrcc_text("Was a shed built?", "No")), *layouts.RSRCC_ROWS["train"]]
    validated(layouts.RSRCC_ROWS | {"train": train})
    (row,) = pl.read_parquet(tmp_path / "clean/quarantine").to_dicts()
    assert row["source"] == "train/metadata.csv, line 2"
    assert {"not_in_test", "scene_in_one_split"} <= set(row["rules"])
    assert "leak: test pair rsrcc/5e_6f?" in row["reason"]


def test_the_same_images_under_other_names_are_a_leak(validated, tmp_path):
    train = [("9d_0c", rsrcc_text("Was a shed built?", "No")), *layouts.RSRCC_ROWS["train"]]
    root = layouts.write_rsrcc(tmp_path / "raw", layouts.RSRCC_ROWS | {"train": train})
    for side in ("before", "after"):
        image = (root / f"test/images/0000/5e_6f_{side}.png").read_bytes()
        (root / f"train/images/0000/9d_0c_{side}.png").write_bytes(image)
    run_ingest(root, "rsrcc", "rsrcc")
    run_validate(tmp_path)
    (row,) = pl.read_parquet(tmp_path / "clean/quarantine").to_dicts()
    assert row["id"] == "rsrcc/9d_0c?0"
    assert row["rules"] == ["not_in_test"]
