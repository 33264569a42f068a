import json
from dataclasses import replace
from pathlib import Path

import pytest

from m3diff.datasets import DATASETS
from m3diff.datasets.spec import Protocol
from m3diff.scoring.metrics import METRICS
from m3diff.stages.evaluate.report.gallery import (
    Mark,
    RunPairs,
    as_script,
    gallery,
    mark,
    most_similar_first,
    pair_columns,
    reads_most,
)
from m3diff.stages.evaluate.report.images import ImageRights, ImageStore
from tests.scoring import bench
from tests.scoring.pages import SHOWN, draw, evidence, gallery_of

COLOUR = "the red cube at the left turned blue"


def marks_of(number: int) -> list[list[Mark]]:
    pair = bench.pairs()[number]
    parsed = bench.parse([pair])[pair.id]
    return [marks for _, marks in mark(pair, parsed)]


def test_marks_say_which_part_of_each_clause_is_right():
    assert marks_of(0) == [[Mark("color", True), Mark("object", True), Mark("place", True), Mark("change", True)]]
    assert marks_of(1) == [[Mark("removal", True), Mark("object", True), Mark("place", False)]]
    assert marks_of(2) == [[Mark("nothing changed", False)]]
    assert marks_of(3) == [
        [Mark("color", True), Mark("object", True), Mark("place", True), Mark("change", True)],
        [Mark("illumination", False)],
    ]
    assert marks_of(4) == [[Mark("nothing changed", True)]]
    assert marks_of(5) == [[Mark("color", False)]]
    wrong = bench.pair("the red cube at the left turned green", ["the red cube at the left turned blue"], ["color"])
    ((_, marks),) = mark(wrong, bench.parse([wrong])[wrong.id])
    assert marks[-1] == Mark("change", False)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("gallery")
    bench.write(root)
    return root


@pytest.fixture(scope="module")
def toy(root: Path, tmp_path_factory: pytest.TempPathFactory) -> dict:
    return gallery_of(draw(evidence(root, bench.pairs(root)), tmp_path_factory.mktemp("images")))


def test_every_test_pair_is_in_the_gallery_in_the_order_of_the_records(toy: dict):
    assert [pair["id"] for pair in toy["pairs"]] == [f"toy/{number}" for number in range(6)]
    assert toy["types"] == ["illumination", "removal", "color", "none"]
    assert (toy["runs"], toy["protocols"], toy["datasets"]) == (["this run"], ["toy/test"], ["toy"])


def test_a_pair_holds_type_score_prediction_marks_and_references(toy: dict):
    pair = toy["pairs"][1]
    assert pair["types"] == ["removal"]
    assert pair["captions"] == [
        {
            "clauses": [
                ["the green ball at the left was removed", [["removal", True], ["object", True], ["place", False]]]
            ],
            "missed": 0,
            "grade": 1,
        }
    ]
    assert pair["references"] == ["the green ball at the top was removed", "the green ball at the top is gone"]
    assert toy["columns"][0] == "CIDEr"
    assert pair["scores"]["0"][0][0] == 1.0


def test_a_pair_is_graded_all_right_type_right_or_wrong(toy: dict):
    assert [pair["captions"][0]["grade"] for pair in toy["pairs"]] == [2, 1, 0, 0, 2, 0]
    assert toy["graded"] is True


def test_changes_that_are_not_named_are_counted(toy: dict):
    assert [pair["captions"][0]["missed"] for pair in toy["pairs"]] == [0, 0, 1, 1, 0, 0]


def test_a_pair_of_two_protocols_has_the_scores_of_both_and_one_entry(root: Path, tmp_path: Path):
    protocols = (Protocol("some", n=None, ids="[45]"), Protocol("total", n=None, max_words=3, references="joined"))
    specs = {"toy": replace(DATASETS["pairs"], protocols=protocols)}
    data = gallery_of(draw(evidence(root, bench.pairs(root), specs), tmp_path))
    assert [pair["id"] for pair in data["pairs"]] == [f"toy/{number}" for number in (4, 5, 0, 1, 2, 3)]
    assert [list(pair["scores"]) for pair in data["pairs"]] == [["0", "1"]] * 2 + [["1"]] * 4
    words = [pair["captions"][0]["clauses"][0][0] for pair in data["pairs"]]
    assert words[1] == "the red cube at the left turned blue"  # as its first protocol scores it
    assert [len(pair["references"]) for pair in data["pairs"]] == [2, 2, 1, 1, 1, 1]


def test_of_two_runs_each_pair_has_both_captions_and_scores(root: Path, tmp_path: Path):
    pairs = {pair.id: pair for pair in bench.pairs(root)}
    other = {i: replace(pair, prediction="nothing changed") for i, pair in pairs.items()}
    runs = [
        RunPairs(name, {"toy/test": of}, {"toy/test": {i: {"CIDEr": score} for i in of}}, bench.parse([*of.values()]))
        for name, of, score in (("a", pairs, 0.25), ("b", other, 0.75))
    ]
    store = ImageStore(tmp_path, 10**6)
    data = gallery(runs, {"CIDEr": METRICS["CIDEr"]}, {"toy": ImageRights(True, None)}, None, store)
    first = data["pairs"][0]
    assert [caption["clauses"][0][0] for caption in first["captions"]] == [pairs["toy/0"].prediction, "nothing changed"]
    assert [caption["grade"] for caption in first["captions"]] == [2, 0]
    assert first["scores"] == {"0": [[0.25], [0.75]]}
    assert data["runs"] == ["a", "b"]


def test_the_columns_of_a_pair_are_single_numbers_the_headlines_first():
    assert pair_columns({name: METRICS[name] for name in SHOWN}) == [
        "CIDEr",
        "METEOR",
        "ROUGE-L",
        "BLEU-4",
        "SPICE",
        "type_right",
        "place_right",
        "exact_right",
    ]


def test_right_and_wrong_are_told_where_a_grammar_reads_most_captions():
    pairs = bench.pairs()
    parsed = bench.parse(pairs)
    assert reads_most(parsed, 6)
    assert not reads_most(parsed, 12)
    mumbled = bench.parse([replace(pair, prediction="it is the the") for pair in pairs])
    assert not reads_most(mumbled, 6)


def test_without_a_grammar_the_prediction_has_no_marks():
    pair = bench.pairs()[0]
    assert mark(pair, None) == [(pair.prediction, [])]


def test_marks_stand_beside_the_words_of_their_clause():
    pair = bench.pairs()[3]
    texts = [text for text, _ in mark(pair, bench.parse([pair])[pair.id])]
    assert texts == ["the red ball at the top turned green", "the lamp went out"]


def test_what_no_pattern_matches_is_marked_as_not_understood():
    pair = bench.pair("the the cube", [COLOUR], ["color"])
    assert mark(pair, bench.parse([pair])[pair.id]) == [("the the cube", [Mark("not understood", False)])]


def test_the_reference_most_like_the_prediction_comes_first_and_the_others_follow():
    references = ["it vanished", "the cube is gone", "the red cube is gone away now my friend"]
    assert most_similar_first("the red cube is gone", references) == [references[1], references[2], references[0]]


def test_the_reference_of_a_prediction_without_words_is_the_first():
    assert most_similar_first("", ["", "a"]) == ["", "a"]


def test_no_text_can_end_the_script_that_holds_it():
    text = "</script><!--\u2028\ud800"
    assert "<" not in as_script([text])
    assert json.loads(as_script([text])) == [text]
