import json
from dataclasses import replace
from pathlib import Path

import pytest

from m3diff.datasets.minichange.language import grammar as minichange_grammar
from m3diff.records.errors import DataError
from m3diff.scoring.grammar import Clause, Grammar, ParsedCaption, load_grammars, parse_predictions, type_order
from tests.scoring import bench


def parsed(prediction: str, *references: str, types: tuple[str, ...] = ("color",)) -> ParsedCaption:
    pair = bench.pair(prediction, list(references), list(types))
    return bench.parse([pair])[pair.id]


RED, BLUE = "the red cube at the left turned blue", "the blue ball at the top turned red"


def test_a_caption_is_read_clause_by_clause():
    clauses = bench.grammar().read(f"{RED}, and the lamp went out")
    assert clauses == [Clause("color", "red cube", "at the left", after="blue"), Clause("illumination")]


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
    ("caption", "type_right", "place_right", "exact_right"),
    [
        (RED, True, True, True),
        ("the red cube at the left became blue", True, True, True),
        ("the red cube at the left turned green", True, True, False),
        ("the red ball at the left turned blue", True, False, False),
        ("the red cube at the top turned blue", True, False, False),
        ("the red cube at the left was removed", False, False, False),
        ("nothing changed", False, False, False),
        (f"{RED}, and the lamp went out", False, False, False),
        (f"{RED}, and {RED}", False, False, False),
        ("the the cube", False, False, False),
    ],
)
def test_type_place_and_exact_verdicts(caption: str, type_right: bool, place_right: bool, exact_right: bool):
    found = parsed(caption, RED)
    assert (found.type_right, found.place_right, found.exact_right) == (type_right, place_right, exact_right)


@pytest.fixture(scope="module")
def mini(tmp_path_factory: pytest.TempPathFactory) -> Grammar:
    path = tmp_path_factory.mktemp("mini") / "grammar.json"
    path.write_text(json.dumps(minichange_grammar()))
    return Grammar.load(path)


def strictly(mini: Grammar, kind: str, prediction: str, *references: str, swapped: str | None = None) -> ParsedCaption:
    pair = replace(bench.pair(prediction, list(references), [kind]), reversed_prediction=swapped)
    return parse_predictions({"toy": mini}, [pair])[pair.id]


SIGN = "at the top the small red sign reads"
DIE = "at the top the small red die shows"
ARROW = "at the top the small red arrow points"
BOX = "at the top the small red box"
DOLL = "at the top the small red doll"

WRONG = {
    "letter": ("ocr", f"{SIGN} A instead of K", f"{SIGN} E instead of K"),
    "letter before": ("ocr", f"{SIGN} A instead of K", f"{SIGN} A and read S before"),
    "same letter": ("ocr", f"{SIGN} A instead of K", f"{SIGN} A and read A before"),
    "count": ("counting", f"{DIE} two dots instead of six", f"{DIE} three dots instead of six"),
    "count before": ("counting", f"{DIE} two dots instead of six", f"{DIE} two dots and had five before"),
    "direction": ("orientation", f"{ARROW} left instead of up", f"{ARROW} right now"),
    "direction before": ("orientation", f"{ARROW} left instead of up", f"{ARROW} left instead of down"),
    "colour": ("color", f"{BOX} turned blue", f"{BOX} turned green"),
    "colour before": ("color", f"{BOX} turned blue", f"{BOX} turned blue instead of green"),
    "size": ("size", f"{BOX} became large", f"{BOX} became small"),
    "size before": ("size", f"{BOX} became large", f"{BOX} became large instead of large"),
    "kind": ("substitution", f"{BOX} was replaced by a small blue die", f"{BOX} was replaced by a small blue cone"),
    "kind's colour": (
        "substitution",
        f"{BOX} was replaced by a small blue die",
        f"{BOX} was replaced by a small red die",
    ),
    "same kind": ("substitution", f"{BOX} was replaced by a small blue die", f"{BOX} was replaced by a small red box"),
    "pose": ("pose", f"{DOLL} raised its arms", f"{DOLL} lowered its arms"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_caption_that_is_right_but_for_what_changed_from_what_to_what_is_wrong(what: str, mini: Grammar):
    kind, reference, prediction = WRONG[what]
    found = strictly(mini, kind, prediction, reference)
    assert (found.type_right, found.place_right, found.exact_right) == (True, True, False)
    assert strictly(mini, kind, reference, reference).exact_right


@pytest.mark.parametrize(
    ("kind", "reference", "prediction"),
    [
        ("viewpoint", "the camera moved to the left", "the camera moved to the right"),
        ("illumination", "the lamp went out", "the lamp came on"),
        ("addition", "at the top a small red box appeared", "at the top a small blue box appeared"),
        ("disappearance", f"{BOX} disappeared", "at the top the small blue box disappeared"),
        ("removal", f"{BOX} was removed leaving a mark", "at the top the large red box was removed leaving a mark"),
    ],
)
def test_of_other_types_object_and_place_say_what_changed(kind: str, reference: str, prediction: str, mini: Grammar):
    found = strictly(mini, kind, prediction, reference)
    assert (found.type_right, found.place_right, found.exact_right) == (True, False, False)
    assert strictly(mini, kind, reference, reference).exact_right


def test_to_say_what_it_was_or_not_is_right_either_way_where_references_do_both(mini: Grammar):
    both = [f"{ARROW} left now", f"{ARROW} left instead of up"]
    assert all(strictly(mini, "orientation", text, *both).exact_right for text in both)
    assert not strictly(mini, "orientation", f"{ARROW} left instead of right", *both).exact_right
    assert strictly(mini, "orientation", f"{ARROW} left now", both[1]).exact_right
    assert not strictly(mini, "orientation", f"{ARROW} up now", both[1]).exact_right


def test_what_it_was_is_not_judged_where_no_reference_tells(mini: Grammar):
    told = f"{ARROW} left instead of up"
    assert strictly(mini, "orientation", told, f"{ARROW} left now").exact_right
    assert not strictly(mini, "orientation", f"{ARROW} left instead of left", f"{ARROW} left now").exact_right


SWAPPED = {
    "the camera moved to the left": "the camera moved to the right",
    "the camera zoomed out": "the camera zoomed in",
    "the lamp went out": "the lamp came on",
    "at the top a small red box appeared": f"{BOX} disappeared",
    f"{BOX} disappeared": "at the top a small red box appeared",
    f"{BOX} was replaced by a large blue cone": "at the top the large blue cone was replaced by a small red box",
    f"{BOX} became large": "at the top the large red box became small",
    f"{BOX} turned blue": "at the top the small blue box turned red instead of blue",
    f"{ARROW} left instead of up": f"{ARROW} up and pointed left before",
    f"{SIGN} A instead of K": f"{SIGN} K instead of A",
    f"{DIE} two dots instead of six": f"{DIE} six dots where it had two",
    f"{DOLL} raised its arms": f"{DOLL} started to wave",  # what it was no caption says
}


@pytest.mark.parametrize("reference", SWAPPED)
def test_swapped_images_show_the_inverse_change(reference: str, mini: Grammar):
    (clause,) = mini.read(reference)
    found = strictly(mini, clause.type, reference, reference, swapped=SWAPPED[reference]).reversed
    assert found is not None
    assert found.exact_right
    same = strictly(mini, clause.type, reference, reference, swapped=reference).reversed
    assert same is not None
    assert not same.exact_right


def test_the_caption_of_swapped_images_is_judged_as_strictly(mini: Grammar):
    def right(swapped: str) -> bool:
        found = strictly(mini, "color", f"{BOX} turned blue", f"{BOX} turned blue", swapped=swapped).reversed
        assert found is not None
        return found.exact_right

    assert right("at the top the small blue box turned red")
    assert not right("at the top the small blue box turned green")
    assert not right("at the left the small blue box turned red")
    assert not right("at the top the small red box turned blue")
    assert not right("nothing changed")


def test_only_pairs_of_one_change_with_an_inverse_have_a_reversal(mini: Grammar):
    one, two = f"{BOX} turned blue", f"{BOX} turned blue, and the lamp went out"
    assert strictly(mini, "color", one, one).reversed is None
    assert strictly(mini, "color", two, two, swapped=two).reversed is None
    gone = f"{BOX} was removed and left a mark"
    assert strictly(mini, "removal", gone, gone, swapped="at the top a small red box appeared").reversed is None
    assert strictly(mini, "none", "nothing changed", "nothing changed", swapped="nothing changed").reversed is None
    pair = replace(bench.pair(RED, [RED], ["color"]), reversed_prediction=RED)
    assert bench.parse([pair])[pair.id].reversed is None


def test_a_caption_with_any_clause_that_no_pattern_matches_is_unreadable():
    said = {RED: False, "nothing changed": False, "x": True, f"{RED}, and x": True}
    assert {caption: parsed(caption, RED).unreadable for caption in said} == said
    assert parsed(f"{RED}, and x", RED).changes_told == 1


def test_of_two_changes_of_one_type_object_place_and_colour_must_belong_together():
    crossed = "the red cube at the top turned blue, and the blue ball at the left turned red"
    assert not parsed(crossed, f"{RED}, and {BLUE}").place_right
    assert parsed(f"{BLUE}, and {RED}", f"{RED}, and {BLUE}").exact_right
    colours = "the red cube at the left turned red, and the blue ball at the top turned blue"
    assert parsed(colours, f"{RED}, and {BLUE}").place_right
    assert not parsed(colours, f"{RED}, and {BLUE}").exact_right


def test_one_of_two_changes_of_one_type_named_twice_is_one_found():
    found = parsed(f"{RED}, and {RED}", f"{RED}, and {BLUE}")
    assert found.changes_found == (2, 1, 1)
    assert (found.type_right, found.place_right, found.exact_right) == (True, False, False)


@pytest.mark.parametrize(
    ("caption", "found"),
    [
        (f"{RED}, and the lamp went out", (2, 2, 2)),
        ("the lamp went out", (1, 1, 1)),
        ("the red cube at the left turned green, and the lamp went out", (2, 2, 1)),
        ("the red ball at the left turned blue", (1, 0, 0)),
        (f"{RED}, and {RED}", (1, 1, 1)),
        (f"{RED}, and the red cube at the left turned green", (1, 1, 1)),
        ("nothing changed", (0, 0, 0)),
    ],
)
def test_changes_found_among_several(caption: str, found: tuple[int, int, int]):
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
        ('{"clause_separator": ", ", "no_change": [], "clauses": [], "inverse": {"x": {}}}', "KeyError: 'type'"),
        ('{"clause_separator": ", ", "no_change": [], "clauses": [], "inverse": []}', "not a grammar"),
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
    assert found["toy"].read(RED) == [Clause("color", "red cube", "at the left", None, "blue")]


def test_a_prediction_is_read_with_the_grammar_of_its_own_dataset():
    shouted = Grammar({"clause_separator": " ", "no_change": ["calm"], "clauses": [{"type": "loud", "pattern": "HEY"}]})
    toy = bench.pair(RED, [RED], ["color"])
    loud = replace(bench.pair("hey", ["hey", "somebody"], ["loud"], "1"), dataset="loud")
    other = replace(bench.pair("hey", ["hey"], ["loud"], "2"), dataset="other")
    found = parse_predictions({"toy": bench.grammar(), "loud": shouted}, [toy, loud, other])
    assert {i: caption.predicted_type for i, caption in found.items()} == {"toy/0": "color", "toy/1": "loud"}
    assert found["toy/1"].reference_clauses == [[Clause("loud")]]


def test_an_empty_reference_is_not_read_as_one_of_no_change():
    pair = bench.pair(RED, ["", " . ", RED], ["color"])
    assert bench.parse([pair])[pair.id].reference_clauses == [
        [Clause("color", "red cube", "at the left", None, "blue")]
    ]


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
