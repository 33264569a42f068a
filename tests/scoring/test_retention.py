"""Compare a model with its base on what the base could do: scores, intervals, files, the page, and faulty files."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from m3diff.commands.compare import read_run
from m3diff.datasets import DATASETS
from m3diff.datasets.spec import Protocol
from m3diff.records.errors import DataError
from m3diff.scoring import bootstrap, run
from m3diff.scoring.pairs import load_pairs
from m3diff.scoring.retention import compared_protocols, rows_with_base_answers
from m3diff.stages.evaluate.stage import evaluate
from tests.errors import raises
from tests.layouts import write_record_table
from tests.scoring import bench, questions
from tests.scoring.bench import Folders, text_of
from tests.scoring.questions import AnsweredRecord

# Record of the dataset `skills`, the model's answer, and the base's answer
RECORDS = {
    "a?0": (AnsweredRecord(1, ["yes"], "yes", "Is there a cube?", "yes/no"), "yes"),
    "a?1": (AnsweredRecord(1, ["2"], "the cube turned blue", "How many cubes are there?", "count"), "2"),
    "b?0": (AnsweredRecord(1, ["no"], "nothing changed", "Is there a ball?", "yes/no"), "no"),
    "b?1": (AnsweredRecord(1, ["3"], "3", "How many balls are there?", "count"), "4"),
    "c?1": (AnsweredRecord(1, ["5"], "a ball was added", "How many cones are there?", "count"), "6"),
}


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folders:
    """Write a test set of captions and questions, and a retention dataset with the answers of the model and its base.

    Its tokens are the words between spaces, so that no test starts Java.
    """
    monkeypatch.setattr(run, "tokenise", lambda texts, limit_s: {text: " ".join(text.split()) for text in texts})
    folders = questions.write(tmp_path)
    rows = [questions.make_row(tmp_path, name, item) for name, item in questions.RECORDS.items()]
    for name, (item, _) in RECORDS.items():
        row = questions.make_row(tmp_path, name, item)
        names = {key: row[key].replace("toy/", "skills/") for key in ("id", "image_set", "scene")}
        rows.append(row | names | {"dataset": "skills"})
    write_record_table(folders.clean / "records", rows)
    bench.write_json(folders.records / "skills.json", {"reader": "pairs"})
    write_answers(folders, "retention", {name: item.prediction for name, (item, _) in RECORDS.items()})
    write_answers(folders, "base", {name: answer for name, (_, answer) in RECORDS.items()})
    counts = {"rows_out": len(questions.RECORDS), "control": 5, "reversed": 5, "retention": len(RECORDS)}
    bench.write_json(folders.predictions / "report.json", counts)
    return folders


def write_answers(folders: Folders, name: str, answers: dict[str, str]) -> None:
    named_answers = {f"skills/{record}": answer for record, answer in answers.items()}
    bench.write_json(folders.predictions / f"predictions_{name}.json", bench.as_file(named_answers))


def run_evaluate(folders: Folders, out: Path) -> dict[str, Any]:
    evaluate(bench.config(metrics=("CIDEr", "ROUGE-L")), bench.compute(), *folders, out)
    return json.loads((out / "metrics.json").read_text())


def test_the_scores_of_the_model_and_its_base_stand_side_by_side(folders, tmp_path, monkeypatch):
    monkeypatch.setattr(bootstrap, "MIN_PAIRS", 5)
    scores = run_evaluate(folders, tmp_path / "out")["retention"]["skills/test"]
    assert scores["records"] == 5
    match = scores["exact_match"]
    assert match["model"] == pytest.approx(2 / 5)
    assert match["base"] == pytest.approx(3 / 5)
    assert match["change"] == pytest.approx(-1 / 5)
    assert match["low"] < -1 / 5 < match["high"]
    assert scores["by_kind"]["count"]["records"] == 3
    assert scores["by_kind"]["count"]["number_accuracy"]["change"] == pytest.approx(0)
    assert scores["by_kind"]["yes/no"]["yes_no_accuracy"]["model"] == pytest.approx(1 / 2)
    assert scores["by_kind"]["yes/no"]["yes_no_accuracy"]["base"] == 1.0
    assert "questions" not in scores, "a count is no score"


def test_the_interval_of_a_loss_is_below_zero(folders, tmp_path, monkeypatch):
    monkeypatch.setattr(bootstrap, "MIN_PAIRS", 5)
    write_answers(folders, "retention", dict.fromkeys(RECORDS, "a ball was added"))
    match = run_evaluate(folders, tmp_path / "out")["retention"]["skills/test"]["exact_match"]
    assert match["low"] < match["change"] < match["high"] < 0


def test_few_records_have_no_interval(folders, tmp_path):
    match = run_evaluate(folders, tmp_path / "out")["retention"]["skills/test"]["exact_match"]
    assert match["low"] is None
    assert match["high"] is None


def test_the_scores_of_the_task_are_those_of_a_run_without_retention(folders, tmp_path):
    scores = run_evaluate(folders, tmp_path / "both")
    plain_folders = questions.write(tmp_path / "plain")
    plain_scores = run_evaluate(plain_folders, tmp_path / "alone")
    assert plain_scores.pop("retention") == {}
    assert scores.pop("retention")
    assert scores == plain_scores
    assert (tmp_path / "both/headline.json").read_text() == (tmp_path / "alone/headline.json").read_text()


def test_the_table_has_rows_of_both_models_and_a_comparison_of_runs_ignores_the_base(folders, tmp_path):
    run_evaluate(folders, tmp_path / "out")
    table = pq.read_table(tmp_path / "out/scores.parquet")
    protocols = pc.unique(table["protocol"]).to_pylist()
    assert protocols == ["toy/test", "skills/test", "base:skills/test"]
    assert compared_protocols(protocols) == ["skills/test"]
    rows = rows_with_base_answers(table, "skills/test")
    assert set(rows["protocol"].to_pylist()) == {"skills/test"}
    assert rows["prediction"].to_pylist() == [answer for _, answer in RECORDS.values()]
    assert list(read_run(tmp_path / "out").rows) == ["toy/test", "skills/test"]


def test_the_page_shows_the_change_and_examples_of_lost_answers(folders, tmp_path):
    run_evaluate(folders, tmp_path / "out")
    page = (tmp_path / "out/report.html").read_text()
    section = page.partition('<section id="retention">')[2].partition("</section>")[0]
    text = text_of(section)
    assert "all records 5 exact match 60.0 40.0 -20.0" in text
    assert "count 3 exact match 33.3 33.3 0.0" in text
    assert text.count("count 3") == 1, "a kind has one row"
    assert "Of the 3 answers of the base that equal a reference, the model still gives 1." in text
    assert "How many cubes are there? base 2 this model the cube turned blue" in text
    assert "How many balls are there?" not in text, "the base did not know the answer"
    assert section.count("<img ") == 2


def test_the_page_counts_the_lost_answers_of_the_scored_protocol_alone(folders, tmp_path, monkeypatch):
    protocols = (Protocol("counts", None, kinds=("count",)), Protocol("all", None))
    monkeypatch.setitem(DATASETS, "pairs", replace(DATASETS["pairs"], protocols=protocols))
    assert "skills/counts" in run_evaluate(folders, tmp_path / "out")["retention"]
    text = text_of((tmp_path / "out/report.html").read_text())
    assert "Of the 1 answer of the base that equal a reference, the model still gives 0." in text


def test_without_a_retention_dataset_the_page_has_no_such_section(folders, tmp_path):
    plain_folders = questions.write(tmp_path / "plain")
    run_evaluate(plain_folders, tmp_path / "out")
    assert 'id="retention"' not in (tmp_path / "out/report.html").read_text()


def test_an_answer_of_the_base_that_is_missing_is_named(folders):
    write_answers(folders, "base", {name: answer for name, (_, answer) in RECORDS.items() if name != "b?0"})
    with raises(DataError, "scoring.predictions_missing", names=["skills/b?0"]):
        load_pairs(folders.clean, folders.predictions)


def test_an_answer_of_the_model_that_is_missing_is_named(folders):
    write_answers(folders, "retention", {"a?0": "yes"})
    with raises(DataError, "scoring.predictions_missing"):
        load_pairs(folders.clean, folders.predictions)
