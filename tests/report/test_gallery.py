"""The gallery: marks for right and wrong, scores of several protocols."""

from dataclasses import replace
from pathlib import Path

import pytest

from m3diff.datasets import DATASETS
from m3diff.datasets.spec import Protocol
from m3diff.report.gallery import list_number_columns, make_caption_entry, round_score, sort_by_similarity
from m3diff.scoring.metrics import METRICS
from tests.scoring import bench
from tests.scoring.bench import draw, gallery_of, page_content

COLOUR = "the red cube at the left turned blue"


RIGHT = [("color", True), ("object", True), ("place", True), ("change", True)]


@pytest.mark.parametrize(
    ("pair", "clauses", "missed", "grade"),
    [
        (bench.pairs()[0], [RIGHT], 0, 2),
        (bench.pairs()[1], [[("removal", True), ("object", True), ("place", False)]], 0, 1),
        (bench.pairs()[2], [[("nothing changed", False)]], 1, 0),
        (bench.pairs()[3], [RIGHT, [("illumination", False)]], 1, 0),
        (bench.pairs()[4], [[("nothing changed", True)]], 0, 2),
        (bench.pairs()[5], [[("color", False)]], 0, 0),
        (bench.pair(COLOUR.replace("blue", "green"), [COLOUR], ["color"]), [[*RIGHT[:3], ("change", False)]], 0, 1),
        (bench.pair("the the cube", [COLOUR], ["color"]), [[("not understood", False)]], 1, 0),
    ],
)
def test_marks_say_which_part_of_each_clause_is_right(pair, clauses, missed, grade):
    entry = make_caption_entry(pair, bench.parse([pair])[pair.id])
    assert [marks for _, marks in entry["clauses"]] == clauses
    assert " ".join(text for text, _ in entry["clauses"]) == pair.prediction.replace(", and ", " ")
    assert entry["missed"] == missed
    assert entry["grade"] == grade
    assert make_caption_entry(pair, None) == {"clauses": [(pair.prediction, [])], "missed": 0, "grade": None}


def test_a_pair_of_two_protocols_has_the_scores_of_both_and_one_entry(root: Path, tmp_path: Path):
    protocols = (
        Protocol("some", published_pairs=None, ids="[45]"),
        Protocol("total", published_pairs=None, max_words=3, references="joined"),
    )
    specs = {"toy": replace(DATASETS["pairs"], protocols=protocols)}
    data = gallery_of(draw(page_content(root, bench.pairs(root), specs), tmp_path))
    assert [pair["id"] for pair in data["pairs"]] == [f"toy/{number}" for number in (4, 5, 0, 1, 2, 3)]
    assert [list(pair["scores"]) for pair in data["pairs"]] == [["0", "1"]] * 2 + [["1"]] * 4
    assert data["pairs"][1]["captions"][0]["clauses"][0][0] == COLOUR, "as its first protocol scores it"
    assert [len(pair["references"]) for pair in data["pairs"]] == [2, 2, 1, 1, 1, 1]


@pytest.mark.parametrize(("mumbled", "graded"), [(0, True), (2, True), (3, False), (6, False)])
def test_right_and_wrong_are_told_where_a_grammar_reads_most_captions(mumbled, graded, root: Path, tmp_path: Path):
    pairs = [replace(pair, prediction="x") if n < mumbled else pair for n, pair in enumerate(bench.pairs(root))]
    assert gallery_of(draw(page_content(root, pairs), tmp_path))["graded"] is graded


ANSWERS = {
    "a match": (["two"], "Two.", "How many?", [("exact match", True), ("number", True)], 2),
    "right in form": (["2"], "There are two.", "How many?", [("exact match", False), ("number", True)], 1),
    "a wrong number": (["2"], "3", "How many?", [("exact match", False), ("number", False)], 0),
    "yes or no": (["yes"], "No.", "Is it red?", [("exact match", False), ("yes or no", False)], 0),
    "a choice": (["B"], "B. blue", "Which? A. red B. blue", [("exact match", False), ("choice", True)], 1),
    "no form": (["a red cube"], "the lamp", "What is new?", [("exact match", False)], 0),
}


@pytest.mark.parametrize("case", ANSWERS)
def test_an_answer_is_marked_by_its_match_and_by_its_form(case):
    references, prediction, question, marks, grade = ANSWERS[case]
    pair = replace(bench.pair(prediction, references, []), question=question)
    assert make_caption_entry(pair, None) == {"clauses": [(prediction, marks)], "missed": 0, "grade": grade}


def test_the_reference_that_shares_most_words_with_the_prediction_comes_first():
    references = ["a lamp", "The red ball moved to the left", "the red ball"]
    assert sort_by_similarity("the Red ball moved", references) == [references[2], references[1], references[0]]
    assert sort_by_similarity("", ["b", "", "a"]) == ["b", "", "a"], "nothing is shared"


def test_the_main_scores_come_first_among_the_columns():
    metrics = {name: METRICS[name] for name in ("BLEU", "CIDEr", "change_accuracy")}
    columns = list_number_columns(metrics)
    main_scores = [metric.main_score for metric in metrics.values() if metric.main_score in columns]
    assert main_scores
    assert columns[: len(main_scores)] == main_scores
    assert "change_statistics" not in columns, "its values are lists"


def test_a_score_has_five_decimals_and_what_is_no_number_has_none():
    assert [round_score(value) for value in (1 / 3, True, None, [1.0])] == [0.33333, 1.0, None, None]
