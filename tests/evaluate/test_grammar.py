import json
from dataclasses import replace
from pathlib import Path

import pytest

from components.evaluate.grammar import Clause, Grammar, ParsedCaption, load_grammars, parse_predictions, type_order
from components.records import DataError
from tests.evaluate import bench


def parsed(prediction: str, *references: str, types: tuple[str, ...] = ("color",)) -> ParsedCaption:
    pair = bench.pair(prediction, list(references), list(types))
    return bench.parse([pair])[pair.id]


RED, BLUE = "the red cube at the left turned blue", "the blue ball at the top turned red"


def test_a_caption_is_read_clause_by_clause():
    clauses = bench.grammar().read(f"{RED}, and the lamp went out")
    assert clauses == [Clause("color", "red cube", "at the left"), Clause("illumination")]


@pytest.mark.parametrize("caption", ["nothing changed", " Nothing  changed. ", "NO CHANGE WAS MADE"])
def test_a_caption_of_no_change_has_no_clause(caption: str):
    assert bench.grammar().read(caption) == []


@pytest.mark.parametrize("caption", ["", "the the cube", "the lamp went out, and then some"])
def test_what_no_pattern_matches_is_unreadable(caption: str):
    assert "unreadable" in [clause.type for clause in bench.grammar().read(caption)]


def test_a_caption_counts_whatever_reference_names_the_object_so():
    caption = "the red cube at the left became blue"
    found = parsed(caption, "the red box at the left turned blue", "the red cube at the top turned blue")
    assert found.exact_right


@pytest.mark.parametrize(
    ("caption", "type_right", "exact_right"),
    [
        (RED, True, True),
        ("the red cube at the left became blue", True, True),
        ("the red ball at the left turned blue", True, False),
        ("the red cube at the top turned blue", True, False),
        ("the red cube at the left was removed", False, False),
        ("nothing changed", False, False),
        (f"{RED}, and the lamp went out", False, False),
        (f"{RED}, and {RED}", False, False),
        ("the the cube", False, False),
    ],
)
def test_type_and_exact_verdicts(caption: str, type_right: bool, exact_right: bool):
    found = parsed(caption, RED)
    assert (found.type_right, found.exact_right) == (type_right, exact_right)


def test_of_two_changes_of_one_type_object_and_place_must_belong_together():
    crossed = "the red cube at the top turned blue, and the blue ball at the left turned red"
    assert not parsed(crossed, f"{RED}, and {BLUE}").exact_right
    assert parsed(f"{BLUE}, and {RED}", f"{RED}, and {BLUE}").exact_right


@pytest.mark.parametrize(
    ("caption", "found"),
    [
        (f"{RED}, and the lamp went out", (2, 2)),
        ("the lamp went out", (1, 1)),
        ("the red ball at the left turned blue", (1, 0)),
        (f"{RED}, and {RED}", (1, 1)),
        ("nothing changed", (0, 0)),
    ],
)
def test_changes_found_among_several(caption: str, found: tuple[int, int]):
    assert parsed(caption, f"{RED}, and the lamp went out", types=("color", "illumination")).changes_found == found


def test_pairs_that_the_grammar_cannot_judge_are_left_out():
    foreign = bench.pair(RED, ["somebody left the car park"], ["color"], name="8")
    unknown = bench.pair(RED, [RED], [], name="9")
    assert bench.parse([foreign, unknown]) == {}


def test_types_stand_in_the_order_of_omnidiff_then_a_datasets_own_then_the_rest():
    assert sorted(["unreadable", "none", "several", "drop", "color", "viewpoint"], key=type_order) == [
        "viewpoint",
        "color",
        "drop",
        "none",
        "several",
        "unreadable",
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not a grammar"),
        ("[]", "not a grammar"),
        ('{"clause_separator": ", ", "no_change": []}', "KeyError: 'clauses'"),
        ('{"clause_separator": ", ", "no_change": [], "clauses": [{"type": "x", "pattern": "("}]}', "not a grammar"),
    ],
)
def test_a_bad_grammar_is_refused_by_name(text: str, said: str, tmp_path: Path):
    (tmp_path / "grammar.json").write_text(text)
    with pytest.raises(DataError, match=said) as refused:
        Grammar.load(tmp_path / "grammar.json")
    assert str(tmp_path / "grammar.json") in str(refused.value)


def test_a_missing_grammar_names_the_command_that_writes_it(tmp_path: Path):
    with pytest.raises(DataError, match="none.json: no such file; run `m3diff ingest` again"):
        Grammar.load(tmp_path / "none.json")


def test_each_dataset_has_its_own_grammar_or_none(tmp_path: Path):
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy" / "grammar.json").write_text(json.dumps(bench.GRAMMAR))
    found = load_grammars(tmp_path, ["other", "toy"])
    assert list(found) == ["toy"]
    assert found["toy"].read(RED) == [Clause("color", "red cube", "at the left")]


def test_a_prediction_is_read_with_the_grammar_of_its_own_dataset():
    shouted = Grammar(" ", ["calm"], [("loud", "HEY")])
    toy = bench.pair(RED, [RED], ["color"])
    loud = replace(bench.pair("hey", ["hey", "somebody"], ["loud"], "1"), dataset="loud")
    other = replace(bench.pair("hey", ["hey"], ["loud"], "2"), dataset="other")
    found = parse_predictions({"toy": bench.grammar(), "loud": shouted}, [toy, loud, other])
    assert {i: caption.predicted_type for i, caption in found.items()} == {"toy/0": "color", "toy/1": "loud"}
    assert found["toy/1"].reference_clauses == [[Clause("loud")]]


def test_an_empty_reference_is_not_read_as_one_of_no_change():
    pair = bench.pair(RED, ["", " . ", RED], ["color"])
    assert bench.parse([pair])[pair.id].reference_clauses == [[Clause("color", "red cube", "at the left")]]


@pytest.mark.parametrize(
    ("prediction", "name"),
    [("nothing changed", "none"), (RED, "color"), (f"{RED}, and {RED}", "several"), ("x", "unreadable")],
)
def test_the_predicted_type_is_one_name(prediction: str, name: str):
    assert parsed(prediction, RED).predicted_type == name


def test_a_prediction_agrees_with_type_object_and_place_one_by_one():
    found = parsed(RED, RED)
    assert found.agrees(Clause("color", "red cube", "at the top")) == (True, True, False)
    assert found.agrees(Clause("color", "red ball", "at the left")) == (True, False, True)
    assert found.agrees(Clause("removal", "red cube", "at the left")) == (False, False, False)
