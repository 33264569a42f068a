"""Two runs compared: the table of differences, and what cannot be compared."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from m3diff.commands.compare import compare, format_table
from m3diff.records.errors import DataError
from m3diff.report.tables import Table
from m3diff.scoring import run as scoring_run
from m3diff.stages.evaluate.stage import evaluate
from tests.errors import raises
from tests.scoring import bench, questions
from tests.scoring.bench import gallery_of, page_content, table, write_scores


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs: the second says of every pair that nothing changed."""
    root = tmp_path_factory.mktemp("runs")
    bench.write(root)
    write_scores(page_content(root, bench.pairs(root)), root / "first")
    silent = [replace(pair, prediction="nothing changed") for pair in bench.pairs(root)]
    write_scores(page_content(root, silent), root / "second")
    return root


def run(root: Path, out: Path, first_name: str = "first", second_name: str = "second"):
    return compare(root / first_name, root / second_name, root / "records", root / "clean", out / "compare.html")


def texts_by_score(table: Table) -> dict[str, list[str]]:
    return {row.name: [cell.text for cell in row.cells] for row in table.rows}


def test_each_score_of_both_runs_stands_beside_the_gain_of_the_second(runs, tmp_path):
    tables = run(runs, tmp_path)
    assert list(tables) == ["toy/test"]
    assert tables["toy/test"].columns == ("Score", "first", "second", "difference")
    scores = texts_by_score(tables["toy/test"])
    assert scores["change_type_accuracy"] == ["66.7", "0.0", "-66.7"]
    assert scores["no_change_recall"] == ["50.0", "100.0", "+50.0"]


def test_the_gain_changes_its_sign_with_the_order_of_the_runs(runs, tmp_path):
    scores = texts_by_score(run(runs, tmp_path, "second", "first")["toy/test"])
    assert scores["change_type_accuracy"][2] == "+66.7"
    assert scores["no_change_recall"][2] == "-50.0"


def test_the_page_has_the_table_and_the_captions_of_both_runs(runs, tmp_path):
    run(runs, tmp_path)
    page = (tmp_path / "compare.html").read_text()
    assert ["no_change_recall", "50.0", "100.0", "+50.0"] in table(page, "toy-test")
    gallery = gallery_of(page)
    assert gallery["runs"] == ["first", "second"]
    captions = {pair["id"]: [caption["clauses"][0][0] for caption in pair["captions"]] for pair in gallery["pairs"]}
    assert captions["toy/2"] == ["nothing changed", "nothing changed"]
    assert captions["toy/5"] == ["the red cube at the left turned blue", "nothing changed"]


def test_the_page_of_few_pairs_holds_its_images(runs, tmp_path):
    run(runs, tmp_path)
    pairs = gallery_of((tmp_path / "compare.html").read_text())["pairs"]
    assert all(image.startswith("data:") for pair in pairs for image in pair["images"] if image)
    assert [path.name for path in tmp_path.iterdir()] == ["compare.html"]


def test_a_terminal_gets_the_table_in_columns(runs, tmp_path):
    lines = format_table("toy/test", run(runs, tmp_path)["toy/test"]).splitlines()
    assert lines[0] == "toy/test"
    assert lines[1].split() == ["Score", "first", "second", "difference"]
    starts = {line.index(re.search(r"(?<=  )[\d.]+", line)[0]) for line in lines[2:]}  # type: ignore[index]
    assert starts == {lines[1].index("first")}


def refuse(runs: Path, first_folder: Path, second_folder: Path, tmp_path: Path, code: str, **fields: Any) -> None:
    with raises(DataError, code, **fields):
        compare(first_folder, second_folder, runs / "records", runs / "clean", tmp_path / "x.html")


def test_a_missing_run_is_named(runs, tmp_path):
    second = runs / "nowhere"
    refuse(runs, runs / "first", second, tmp_path, "compare.unreadable_scores", path=second)


def test_runs_on_different_pairs_are_refused(runs, tmp_path):
    fewer = write_scores(page_content(runs, bench.pairs(runs)[1:]), tmp_path / "fewer")
    counts = {"pairs": 6, "other_pairs": 5, "unshared": 1}
    names = {"protocol": "toy/test", "name": "toy/0"}
    refuse(runs, runs / "first", fewer, tmp_path, "compare.pairs_differ", **counts, **names)


def test_pairs_that_are_no_test_pairs_here_are_refused(runs, tmp_path):
    unknown = [replace(pair, id=pair.id.replace("toy/", "toy/9")) for pair in bench.pairs(runs)]
    first_folder, second_folder = (write_scores(page_content(runs, unknown), tmp_path / name) for name in ("a", "b"))
    path = runs / "clean" / "records"
    refuse(runs, first_folder, second_folder, tmp_path, "compare.unknown_pairs", path=path, name="toy/90")


def test_runs_without_a_shared_protocol_are_refused(runs, tmp_path):
    scores = pq.read_table(runs / "first" / "scores.parquet")
    (tmp_path / "other").mkdir()
    renamed = scores.set_column(0, "protocol", pa.array(["other/test"] * 6))
    pq.write_table(renamed, tmp_path / "other" / "scores.parquet")
    names = {"names": ["other/test"], "other_names": ["toy/test"]}
    refuse(runs, runs / "first", tmp_path / "other", tmp_path, "compare.no_shared_protocol", **names)


def test_a_file_without_the_columns_of_scores_is_refused(runs, tmp_path):
    (tmp_path / "other").mkdir()
    pq.write_table(pa.table({"id": ["toy/0"]}), tmp_path / "other" / "scores.parquet")
    path = tmp_path / "other" / "scores.parquet"
    refuse(runs, runs / "first", tmp_path / "other", tmp_path, "compare.unreadable_scores", path=path)


def test_answers_are_compared_by_kind_of_question(tmp_path, monkeypatch):
    monkeypatch.setattr(scoring_run, "tokenise", lambda texts, limit_s: {text: text for text in texts})
    folders = questions.write(tmp_path)
    evaluate(bench.config(metrics=("CIDEr",)), bench.compute(), *folders, tmp_path / "first")
    answers = {f"toy/{name}": item.references[0] for name, item in questions.RECORDS.items()}
    bench.write_json(folders.predictions / "predictions.json", bench.as_file(answers))
    evaluate(bench.config(metrics=("CIDEr",)), bench.compute(), *folders, tmp_path / "second")
    scores = texts_by_score(run(tmp_path, tmp_path)["toy/test"])
    assert scores["exact_match"] == ["33.3", "100.0", "+66.7"]
    assert scores["exact_match, count"] == ["0.0", "100.0", "+100.0"]
    assert scores["number_accuracy, count"] == ["50.0", "100.0", "+50.0"]
    assert "yes_no_accuracy, count" not in scores
    assert "CIDEr, describe" not in scores
    entries = {entry["id"]: entry for entry in gallery_of((tmp_path / "compare.html").read_text())["pairs"]}
    assert entries["toy/0?0"]["question"] == "How many cubes are there?"
    assert [caption["grade"] for caption in entries["toy/0?0"]["captions"]] == [1, 2]
    assert entries["toy/none"]["images"] == []


def test_a_run_of_an_earlier_release_has_no_kinds(runs, tmp_path):
    for name in ("first", "second"):
        scores = pq.read_table(runs / name / "scores.parquet").drop_columns(["question", "kind"])
        (tmp_path / name).mkdir()
        pq.write_table(scores, tmp_path / name / "scores.parquet")
    tables = compare(
        tmp_path / "first", tmp_path / "second", runs / "records", runs / "clean", tmp_path / "compare.html"
    )
    assert texts_by_score(tables["toy/test"])["change_type_accuracy"] == ["66.7", "0.0", "-66.7"]
