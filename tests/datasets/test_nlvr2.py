"""NLVR2's sentences as questions. As captions, they are tested in test_readers.py.

The lines have the form of `lil-lab/nlvr:nlvr2/data/dev.json`. The sentences are ours.
"""

import json
from pathlib import Path

import polars as pl
import pytest

from m3diff.datasets import nlvr2
from m3diff.datasets.spec import Row
from m3diff.stages.convert.params import Convert
from m3diff.stages.convert.stage import convert
from m3diff.stages.evaluate.stage import evaluate
from tests import layouts
from tests.layouts import (
    judge_by_polars_alone,
    make_entry,
    nlvr_line,
    run_ingest,
    run_validate,
    save_picture,
    write_json,
)
from tests.scoring import bench


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a folder in whose test split one sentence is true of one pair of a set, and false of the other."""
    root = layouts.write_nlvr(tmp_path / "raw")
    add_lines(root, "test1", ("test1-0-2-0", "a cup", "False"))
    for number, side in enumerate((0, 1)):
        save_picture(root / f"images/test1/test1-0-2-img{side}.png", 20, 90 * number)
        save_picture(root / f"images/train/38/train-1-1-img{side}.png", 30, 90 * number)
    return root


def add_lines(root: Path, part: str, *lines: tuple[str, str, str]) -> None:
    with (root / f"data/{part}.json").open("a") as file:
        file.writelines(json.dumps(nlvr_line(*line)) + "\n" for line in lines)


def read(root: Path, **options) -> list[Row]:
    return list(nlvr2.read(root, **options))


def test_each_sentence_is_a_question_answered_by_its_label(root):
    rows = [row for row in read(root, questions=True) if row.split != "test"]
    assert [(row.name, row.image_set, row.scene, row.references) for row in rows] == [
        ("train-1-0-0", "train-1-0", "train-1", ["True"]),
        ("train-1-1-0", "train-1-1", "train-1", ["False"]),
        ("dev-850-0-0", "dev-850-0", "dev-850", ["True"]),
        ("dev-850-0-1", "dev-850-0", "dev-850", ["False"]),
    ]
    assert {row.kind for row in rows} == {"true/false"}
    assert rows[0].question == "Here is a statement describing these 2 images: two dogs Is it true or false?"
    assert rows[0].images == ("images/train/38/train-1-0-img0.png", "images/train/38/train-1-0-img1.png")


def test_captions_are_read_unless_questions_are_asked_for(root):
    rows = read(root)
    assert {row.question for row in rows} == {None}
    assert [row.name for row in rows] == ["train-1-0", "dev-850-0", "test1-0-1", "test1-7-0"]


def test_test2_is_read_into_the_test_split_if_asked_for(root):
    add_lines(root, "test2", ("test2-3-0-0", "a key", "True"))
    assert not any(row.name.startswith("test2") for row in read(root, questions=True))
    (question,) = [row for row in read(root, questions=True, test2=True) if row.name.startswith("test2")]
    assert question.split == "test"
    assert question.images[0] == "images/test2/test2-3-0-img0.png"
    (caption,) = [row for row in read(root, test2=True) if row.name.startswith("test2")]
    assert caption.references == ["a key"]


def test_a_line_that_cannot_be_read_is_a_fault_of_its_question(root):
    add_lines(root, "dev", ("dev-1-0-0", "a key", "true"), ("dev-1-0", "a key", "True"))
    faults = [(row.source, row.fault.fields["key"]) for row in read(root, questions=True) if row.fault]
    assert faults == [("dev.json, line 3", "label"), ("dev.json, line 4", "identifier")]


def test_questions_are_converted_and_scored_with_consistency(root, tmp_path, monkeypatch):
    judge_by_polars_alone(monkeypatch)
    run_ingest(root, "nlvr2", "nlvr2", questions=True)
    run_validate(tmp_path, near_duplicate_max_diff=None)
    entries = {"nlvr2": make_entry("nlvr2", root, questions=True)}
    convert(Convert(), entries, tmp_path / "clean", tmp_path / "mixture")
    train = pl.read_parquet(tmp_path / "mixture/train/*.parquet")
    assert sorted(train["answer"]) == ["False", "True"]

    answers = {"test1-0-1-0": "True", "test1-0-2-0": "true", "test1-0-1-1": "True", "test1-7-0-0": "False"}
    (tmp_path / "predictions").mkdir()
    predictions = bench.as_file({f"nlvr2/{name}": text for name, text in answers.items()})
    write_json(tmp_path / "predictions/predictions.json", predictions)
    cfg = bench.config(metrics=("change_accuracy",), allow_fewer_pairs=True)
    folders = (tmp_path / "records", tmp_path / "clean", tmp_path / "predictions")
    evaluate(cfg, bench.compute(), *folders, tmp_path / "report")
    protocols = json.loads((tmp_path / "report/metrics.json").read_text())["protocols"]
    assert list(protocols) == ["nlvr2/test", "nlvr2/test1_questions"]
    scores = protocols["nlvr2/test1_questions"]
    assert scores["pairs"] == 4
    assert scores["published_pairs"] == 6_967
    assert scores["exact_match"] == 2 / 4
    assert scores["yes_no_accuracy"] == 2 / 4
    assert scores["consistency"] == 1 / 3, "of three sentences, one is judged rightly about all of its pairs"
    assert scores["by_kind"]["true/false"]["consistency"] == 1 / 3
    assert "Statements right about all pairs" in (tmp_path / "report/report.html").read_text()
