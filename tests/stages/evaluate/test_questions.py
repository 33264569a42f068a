"""Evaluate a test set with captions and questions about two images, one image and none."""

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from m3diff.records.errors import DataError
from m3diff.scoring import bootstrap, run
from m3diff.scoring.pairs import load_pairs
from m3diff.scoring.results import EvaluateReport
from m3diff.stages.evaluate.stage import evaluate
from tests.errors import raises
from tests.layouts import write_record_table
from tests.scoring import bench, questions
from tests.scoring.bench import Folders, gallery_of, table, text_of

METRICS = ("CIDEr", "ROUGE-L", "change_accuracy", "pixel_threshold")


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folders:
    """Write the test set. Its tokens are the words between spaces, so that no test starts Java."""
    monkeypatch.setattr(run, "tokenise", lambda texts, limit_s: {text: " ".join(text.split()) for text in texts})
    return questions.write(tmp_path)


def run_evaluate(folders: Folders, out: Path, *metrics: str) -> EvaluateReport:
    return evaluate(bench.config(metrics=metrics or METRICS), bench.compute(), *folders, out)


def read_scores(out: Path) -> dict[str, Any]:
    return json.loads((out / "metrics.json").read_text())["protocols"]["toy/test"]


def keep(folders: Folders, root: Path, *names: str) -> None:
    """Keep only some of the records, and their predictions."""
    records = {name: questions.RECORDS[name] for name in names}
    write_record_table(
        folders.clean / "records", [questions.make_row(root, name, item) for name, item in records.items()]
    )
    for file in folders.predictions.iterdir():
        kept_rows = [row for row in json.loads(file.read_text()) if row["image_id"].removeprefix("toy/") in names]
        bench.write_json(file, kept_rows)


def test_records_have_the_metrics_of_their_texts(folders, tmp_path, monkeypatch):
    monkeypatch.setattr(bootstrap, "MIN_PAIRS", 2)
    run_evaluate(folders, tmp_path / "out")
    scores = read_scores(tmp_path / "out")
    assert scores["pairs"] == 8
    assert scores["exact_match"] == 2 / 6
    assert scores["yes_no_accuracy"] == 1 / 2
    assert scores["number_accuracy"] == 1 / 2
    assert scores["choice_accuracy"] == 1.0
    assert scores["exact_match_shuffled"] == 1 / 3
    assert scores["exact_match_unshuffled"] == 2 / 3
    assert scores["shuffled_questions"] == 3
    assert scores["questions"] == 6
    assert list(scores["by_kind"]) == ["colour", "count", "describe", "yes/no"]
    assert scores["by_kind"]["count"]["pairs"] == 2
    assert scores["by_kind"]["count"]["number_accuracy"] == 1 / 2
    assert scores["by_kind"]["count"]["intervals"]["number_accuracy"] == {"low": 0.0, "high": 1.0}
    assert scores["by_kind"]["yes/no"]["intervals"] == {}, "one question is too few"
    assert scores["by_kind"]["count"]["CIDEr"] is None
    assert scores["by_kind"]["describe"]["ROUGE-L"] == 1.0
    table_of_scores = pq.read_table(tmp_path / "out/scores.parquet")
    rows = {row["id"].removeprefix("toy/"): row for row in table_of_scores.to_pylist()}
    assert list(rows) == list(questions.RECORDS)
    for name, item in questions.RECORDS.items():
        assert rows[name]["question"] == item.question
        assert rows[name]["kind"] == item.kind
        assert (rows[name]["exact_match"] is None) == (item.question is None)
    assert {name for name, row in rows.items() if row["CIDEr"] is not None} == {"0", "0?2", "1"}
    assert rows["0?0"]["number_right"] is True
    assert rows["0?0"]["exact_match"] is False
    headline = json.loads((tmp_path / "out/headline.json").read_text())["toy/test"]
    assert headline["exact_match"] == 33.33
    assert headline["choice_accuracy"] == 100.0


def test_the_scores_of_captions_are_those_of_a_test_set_without_questions(folders, tmp_path):
    run_evaluate(folders, tmp_path / "mixed")
    keep(folders, tmp_path, "0", "0?2", "1")
    run_evaluate(folders, tmp_path / "texts")
    mixed = read_scores(tmp_path / "mixed")
    texts = read_scores(tmp_path / "texts")
    for name in ("CIDEr", "ROUGE-L", "CIDEr_shuffled"):
        assert mixed[name] == texts[name]
    assert texts["by_length"] == mixed["by_length"]


def test_captions_alone_have_no_scores_of_answers(folders, tmp_path):
    keep(folders, tmp_path, "0", "1")
    run_evaluate(folders, tmp_path / "out")
    text = (tmp_path / "out/metrics.json").read_text()
    assert "exact_match" not in text
    assert "by_kind" not in text
    assert "questions" not in text
    assert "exact_match" not in (tmp_path / "out/headline.json").read_text()
    assert "exact_match" not in pq.read_schema(tmp_path / "out/scores.parquet").names
    page = (tmp_path / "out/report.html").read_text()
    assert 'id="answers"' not in page
    assert "described what changed" in page


def test_short_answers_have_no_metric_of_captions(folders, tmp_path):
    keep(folders, tmp_path, "0?0", "0?1", "one", "none")
    run_evaluate(folders, tmp_path / "out")
    scores = read_scores(tmp_path / "out")
    for name in ("CIDEr", "ROUGE-L"):
        assert scores[name] is None
        assert "short answers" in scores["absent"][name]
    for name in ("change_type_accuracy", "pixel_window_auc"):
        assert scores[name] is None
    assert "questions of their own" in scores["absent"]["pixel_window_auc"]
    assert scores["exact_match"] == 1 / 4
    page = (tmp_path / "out/report.html").read_text()
    assert table(page, "scores")[0] == ["Protocol", "Pairs", "n", "exact_match"]


def test_the_page_shows_questions_history_and_as_many_images_as_a_record_has(folders, tmp_path):
    run_evaluate(folders, tmp_path / "out")
    page = (tmp_path / "out/report.html").read_text()
    entries = {entry["id"].removeprefix("toy/"): entry for entry in gallery_of(page)["pairs"]}
    for name, item in questions.RECORDS.items():
        assert len(entries[name]["images"]) == item.images
        assert entries[name]["question"] == item.question
        assert entries[name]["kind"] == item.kind
        assert entries[name]["history"] == [list(turn) for turn in item.history]
    (answer,) = entries["0?0"]["captions"]
    assert answer["clauses"] == [["There are two.", [["exact match", False], ["number", True]]]]
    assert answer["grade"] == 1
    assert entries["0?1"]["captions"][0]["grade"] == 2
    assert entries["none"]["captions"][0]["grade"] == 0
    assert gallery_of(page)["graded"], "most records have an answer that is right or wrong"
    assert gallery_of(page)["kinds"] == ["colour", "count", "describe", "yes/no"]
    header, *rows = table(page, "answers")
    assert header == ["Question", "n", "exact match", "yes or no", "number", "choice"]
    assert rows == [
        ["all questions", "6", "33.3", "50.0", "50.0", "100.0"],
        ["colour", "1", "0.0", "–", "–", "100.0"],
        ["count", "2", "0.0", "–", "50.0", "–"],
        ["describe", "1", "100.0", "–", "–", "–"],
        ["yes/no", "1", "100.0", "100.0", "–", "–"],
    ]
    assert "33.3% of answers: exact match" in text_of(page)
    assert "3 questions about two images are asked again" in text_of(page)
    assert "Their exact match changes from 66.7% to 33.3%" in text_of(page)
    assert "answered 6 questions about images" in text_of(page)
    assert "described what changed in 2 pairs" in text_of(page)


def test_predictions_of_some_records_only_are_scored_if_predict_counted_them(folders, tmp_path):
    file = folders.predictions / "predictions.json"
    rows = [row for row in json.loads(file.read_text()) if row["image_id"] not in ("toy/one?1", "toy/none")]
    bench.write_json(file, rows)
    bench.write_json(folders.predictions / "report.json", {"rows_out": 6})
    report = run_evaluate(folders, tmp_path / "out", "CIDEr")
    assert report.rows_in == 8
    assert report.rows_out == 6
    assert report.protocols["toy/test"].pairs == 6


def test_answers_of_the_base_are_compared_by_the_chosen_metrics(folders, tmp_path, monkeypatch):
    limits = []
    real_tokenise = run.tokenise
    monkeypatch.setattr(run, "tokenise", lambda texts, limit_s: limits.append(limit_s) or real_tokenise(texts, limit_s))
    rows = [questions.make_row(tmp_path, name, item) for name, item in questions.RECORDS.items()]
    skill = questions.make_row(tmp_path, "0", questions.RECORDS["0"]) | {"id": "skills/0", "dataset": "skills"}
    write_record_table(folders.clean / "records", [*rows, skill])
    bench.write_json(folders.records / "skills.json", {"reader": "pairs"})
    for name, caption in {"retention": "nothing changed", "base": questions.CAPTION}.items():
        bench.write_json(folders.predictions / f"predictions_{name}.json", bench.as_file({"skills/0": caption}))
    counts = {"rows_out": len(questions.RECORDS), "retention": 1}
    bench.write_json(folders.predictions / "report.json", counts)
    scores = run_evaluate(folders, tmp_path / "out", "ROUGE-L").retention["skills/test"].scores
    assert scores["ROUGE-L"].model == 0
    assert scores["ROUGE-L"].base == 1
    assert limits == [bench.compute().scorer_timeout_s] * 2
    rows = pq.read_table(tmp_path / "out/scores.parquet").to_pylist()
    assert [row["prediction"] for row in rows if row["protocol"] == "base:skills/test"] == [questions.CAPTION]


def test_the_table_of_answers_has_intervals_of_each_kind(folders, tmp_path, monkeypatch):
    monkeypatch.setattr(bootstrap, "MIN_PAIRS", 2)
    run_evaluate(folders, tmp_path / "out")
    rows = {row[0]: row[1:] for row in table((tmp_path / "out/report.html").read_text(), "answers")}
    assert rows["count"][3] == "50.0 0.0–100.0"
    assert rows["colour"][4] == "100.0", "one question is too few for an interval"
    assert "–" in rows["all questions"][1]


def test_a_control_of_a_record_with_one_image_is_refused(folders):
    file = folders.predictions / "predictions_shuffled.json"
    bench.write_json(file, [*json.loads(file.read_text()), {"image_id": "toy/one", "caption": "B"}])
    with raises(DataError, "scoring.predictions_unknown", path=file, names=["toy/one"]):
        load_pairs(folders.clean, folders.predictions)


def test_controls_need_no_record_of_one_image_or_none(folders):
    pairs = load_pairs(folders.clean, folders.predictions).pairs
    assert {pair.id.removeprefix("toy/") for pair in pairs if pair.shuffled_prediction is not None} == {
        name for name, item in questions.RECORDS.items() if item.images == 2
    }


def test_a_question_without_its_answer_is_refused(folders):
    file = folders.predictions / "predictions.json"
    bench.write_json(file, [row for row in json.loads(file.read_text()) if row["image_id"] != "toy/0?1"])
    with raises(DataError, "scoring.predictions_missing", path=file, names=["toy/0?1"]):
        load_pairs(folders.clean, folders.predictions)
