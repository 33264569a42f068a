from pathlib import Path

import pytest

from components.evaluate.grammar import Clause, Grammar, ParsedCaption, parse_predictions, type_order
from components.records import DataError
from tests.evaluate import bench


def reading(caption: str, *references: str, types: tuple[str, ...] = ("color",)) -> ParsedCaption:
    pair = bench.pair(caption, list(references), list(types))
    return parse_predictions(bench.grammar(), [pair])[pair.id]


RED, BLUE = "the red cube at the left turned blue", "the blue ball at the top turned red"


def test_a_caption_is_read_clause_by_clause():
    said = bench.grammar().read(f"{RED}, and the lamp went out")
    assert said == [Clause("color", "red cube", "at the left"), Clause("illumination")]


@pytest.mark.parametrize("caption", ["nothing changed", " Nothing  changed. ", "NO CHANGE WAS MADE"])
def test_a_caption_of_no_change_has_no_clause(caption: str):
    assert bench.grammar().read(caption) == []


@pytest.mark.parametrize("caption", ["", "the the cube", "the lamp went out, and then some"])
def test_what_no_pattern_matches_is_unreadable(caption: str):
    assert "unreadable" in [clause.type for clause in bench.grammar().read(caption)]


def test_a_caption_counts_whatever_reference_names_the_object_so():
    caption = "the red cube at the left became blue"
    found = reading(caption, "the red box at the left turned blue", "the red cube at the top turned blue")
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
    found = reading(caption, RED)
    assert (found.type_right, found.exact_right) == (type_right, exact_right)


def test_of_two_changes_of_one_type_object_and_place_must_belong_together():
    crossed = "the red cube at the top turned blue, and the blue ball at the left turned red"
    assert not reading(crossed, f"{RED}, and {BLUE}").exact_right
    assert reading(f"{BLUE}, and {RED}", f"{RED}, and {BLUE}").exact_right


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
    assert reading(caption, f"{RED}, and the lamp went out", types=("color", "illumination")).found == found


def test_pairs_that_the_grammar_cannot_judge_are_left_out():
    foreign = bench.pair(RED, ["somebody left the car park"], ["color"], name="8")
    unknown = bench.pair(RED, [RED], [], name="9")
    assert parse_predictions(bench.grammar(), [foreign, unknown]) == {}


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


def test_a_missing_grammar_says_how_to_go_without(tmp_path: Path):
    with pytest.raises(DataError, match="evaluate.grammar to null"):
        Grammar.load(tmp_path / "none.json")
