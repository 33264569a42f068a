"""What a caption says by its dataset's grammar, and whether that is what its references say."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from m3diff.datasets.minichange.language import grammar as minichange_grammar
from m3diff.records.errors import DataError
from m3diff.scoring.grammar import Clause, Grammar, ParsedCaption, change_type_order, load_grammars, parse_predictions
from tests.errors import raises
from tests.scoring import bench

RED = "the red cube at the left turned blue"
BLUE = "the blue ball at the top turned red"
LAMP = "the lamp went out"
RED_CLAUSE = Clause("color", "red cube", "at the left", None, "blue")
MINI = Grammar(minichange_grammar())


def parsed(prediction: str, *references: str, types: tuple[str, ...] = ("color",)) -> ParsedCaption:
    pair = bench.pair(prediction, list(references), list(types))
    return bench.parse([pair])[pair.id]


def strictly(kind: str, prediction: str, *references: str, swapped: str | None = None) -> ParsedCaption:
    """In MiniChange's words."""
    pair = replace(bench.pair(prediction, list(references), [kind]), reversed_prediction=swapped)
    return parse_predictions({"toy": MINI}, [pair])[pair.id]


@pytest.mark.parametrize(
    ("caption", "clauses", "name"),
    [
        (f"{RED}, and {LAMP}", [RED_CLAUSE, Clause("illumination")], "several"),
        (f" {RED.upper()} . ", [RED_CLAUSE], "color"),
        (" Nothing  changed. ", [], "none"),
        ("NO CHANGE WAS MADE", [], "none"),
        ("", [Clause("unreadable")], "unreadable"),
        (f"{LAMP}, and then some", [Clause("illumination"), Clause("unreadable")], "several"),
    ],
)
def test_a_caption_is_read_clause_by_clause(caption: str, clauses: list[Clause], name: str):
    assert bench.grammar().parse_clauses(caption) == clauses
    parsed_caption = parsed(caption, RED)
    assert parsed_caption.predicted_type == name
    assert parsed_caption.is_unreadable == (Clause("unreadable") in clauses)
    assert parsed_caption.claimed_changes == sum(clause.type != "unreadable" for clause in clauses)


@pytest.mark.parametrize(
    ("caption", "verdicts"),
    [
        (RED, (True, True, True)),
        ("the red cube at the left turned green", (True, True, False)),
        ("the red ball at the left turned blue", (True, False, False)),
        ("the red cube at the left was removed", (False, False, False)),
        (f"{RED}, and {LAMP}", (False, False, False)),
        (f"{RED}, and {RED}", (False, False, False)),
    ],
)
def test_type_place_and_exact_verdicts(caption: str, verdicts: tuple[bool, bool, bool]):
    assert parsed(caption, RED).correctness == verdicts


def test_whatever_reference_names_the_object_counts_but_each_part_for_itself():
    caption = "the red cube at the left became blue"
    references = ("the red box at the left turned blue", "the red cube at the top turned blue")
    assert parsed(caption, *references).correctness.exact
    parsed_caption = parsed(RED, RED)
    assert parsed_caption.compare_with_references(Clause("color", "red cube", "at the top")) == (True, True, False)
    assert parsed_caption.compare_with_references(Clause("color", "red ball", "at the left")) == (True, False, True)
    assert parsed_caption.compare_with_references(Clause("removal", "red cube", "at the left")) == (False, False, False)


SIGN = "at the top the small red sign reads"
DIE = "at the top the small red die shows"
ARROW = "at the top the small red arrow points"
BOX = "at the top the small red box"
DOLL = "at the top the small red doll"
MARK = "leaving a mark"
REPLACED = f"{BOX} was replaced by a small blue die"

WRONG = {
    "letter": ("ocr", f"{SIGN} A instead of K", f"{SIGN} E instead of K"),
    "letter before": ("ocr", f"{SIGN} A instead of K", f"{SIGN} A and read S before"),
    "count": ("counting", f"{DIE} two dots instead of six", f"{DIE} three dots instead of six"),
    "direction": ("orientation", f"{ARROW} left instead of up", f"{ARROW} right now"),
    "direction before": ("orientation", f"{ARROW} left instead of up", f"{ARROW} left instead of down"),
    "colour": ("color", f"{BOX} turned blue", f"{BOX} turned green"),
    "size before": ("size", f"{BOX} became large", f"{BOX} became large instead of large"),
    "kind's colour": ("substitution", REPLACED, f"{BOX} was replaced by a small red die"),
    "same kind": ("substitution", REPLACED, f"{BOX} was replaced by a small red box"),
    "pose": ("pose", f"{DOLL} raised its arms", f"{DOLL} lowered its arms"),
}
ELSEWHERE = {
    "viewpoint": ("viewpoint", "the camera moved to the left", "the camera moved to the right"),
    "illumination": ("illumination", LAMP, "the lamp came on"),
    "addition": ("addition", "at the top a small red box appeared", "at the top a small blue box appeared"),
    "disappearance": ("disappearance", f"{BOX} disappeared", "at the top the small blue box disappeared"),
    "removal": ("removal", f"{BOX} was removed {MARK}", f"at the top the large red box was removed {MARK}"),
}


@pytest.mark.parametrize("fault", [*WRONG, *ELSEWHERE])
def test_a_caption_that_is_wrong_in_one_thing_is_wrong_exactly(fault: str):
    """By place too where object and place say all that changed."""
    kind, reference, prediction = (WRONG | ELSEWHERE)[fault]
    assert strictly(kind, prediction, reference).correctness == (True, fault in WRONG, False)
    assert strictly(kind, reference, reference).correctness.exact


@pytest.mark.parametrize(
    ("caption", "references", "right"),
    [
        (f"{ARROW} left now", ("left now", "left instead of up"), True),
        (f"{ARROW} left instead of up", ("left now", "left instead of up"), True),
        (f"{ARROW} left instead of right", ("left now", "left instead of up"), False),
        (f"{ARROW} left now", ("left instead of up",), True),
        (f"{ARROW} up now", ("left instead of up",), False),
        (f"{ARROW} left instead of up", ("left now",), True),
        (f"{ARROW} left instead of left", ("left now",), False),
    ],
)
def test_what_it_was_need_not_be_said_and_is_not_judged_where_no_reference_tells(caption, references, right: bool):
    parsed_caption = strictly("orientation", caption, *(f"{ARROW} {reference}" for reference in references))
    assert parsed_caption.correctness.exact is right


SWAPPED = {
    "the camera moved to the left": "the camera moved to the right",
    LAMP: "the lamp came on",
    "at the top a small red box appeared": f"{BOX} disappeared",
    f"{BOX} disappeared": "at the top a small red box appeared",
    f"{BOX} was replaced by a large blue cone": "at the top the large blue cone was replaced by a small red box",
    f"{BOX} became large": "at the top the large red box became small",
    f"{BOX} turned blue": "at the top the small blue box turned red instead of blue",
    f"{ARROW} left instead of up": f"{ARROW} up and pointed left before",
    f"{DIE} two dots instead of six": f"{DIE} six dots where it had two",
    f"{DOLL} raised its arms": f"{DOLL} started to wave",  # what it was no caption says
}


@pytest.mark.parametrize("reference", SWAPPED)
def test_swapped_images_show_the_inverse_change(reference: str):
    (clause,) = MINI.parse_clauses(reference)
    for swapped, right in ((SWAPPED[reference], True), (reference, False), ("nothing changed", False)):
        parsed_caption = strictly(clause.type, reference, reference, swapped=swapped).reversed_caption
        assert parsed_caption is not None
        assert parsed_caption.correctness.exact is right


def test_only_pairs_of_one_change_with_an_inverse_have_a_reversal():
    one_change = f"{BOX} turned blue"
    two_changes = f"{BOX} turned blue, and {LAMP}"
    gone = f"{BOX} was removed and left a mark"
    for kind, text, swapped in (
        ("color", one_change, None),
        ("color", two_changes, two_changes),
        ("removal", gone, gone),
    ):
        assert strictly(kind, text, text, swapped=swapped).reversed_caption is None
    assert strictly("none", "nothing changed", "nothing changed", swapped="nothing changed").reversed_caption is None
    pair = replace(bench.pair(RED, [RED], ["color"]), reversed_prediction=RED)
    assert bench.parse([pair])[pair.id].reversed_caption is None
    parsed_caption = strictly(
        "color", one_change, one_change, swapped="at the top the small blue box turned green"
    ).reversed_caption
    assert parsed_caption is not None
    assert parsed_caption.correctness == (True, True, False), "it is judged as strictly"


def test_of_two_changes_of_one_type_object_place_and_colour_must_belong_together():
    crossed = "the red cube at the top turned blue, and the blue ball at the left turned red"
    assert not parsed(crossed, f"{RED}, and {BLUE}").correctness.place
    assert parsed(f"{BLUE}, and {RED}", f"{RED}, and {BLUE}").correctness.exact
    colours = "the red cube at the left turned red, and the blue ball at the top turned blue"
    assert parsed(colours, f"{RED}, and {BLUE}").correctness == (True, True, False)


@pytest.mark.parametrize(
    ("caption", "second_reference", "counts"),
    [
        (f"{RED}, and {LAMP}", LAMP, (2, 2, 2)),
        (f"the red cube at the left turned green, and {LAMP}", LAMP, (2, 2, 1)),
        ("the red ball at the left turned blue", LAMP, (1, 0, 0)),
        (f"{RED}, and {RED}", LAMP, (1, 1, 1)),
        ("nothing changed", LAMP, (0, 0, 0)),
        (f"{RED}, and {RED}", BLUE, (2, 1, 1)),
    ],
)
def test_named_changes_are_counted_among_several(caption: str, second_reference: str, counts: tuple[int, int, int]):
    assert parsed(caption, f"{RED}, and {second_reference}", types=("color", "illumination")).named_changes == counts


def test_a_prediction_is_read_with_its_datasets_grammar_if_that_reads_a_reference(tmp_path: Path):
    shouted = {"clause_separator": " ", "no_change": ["calm"], "clauses": [{"type": "loud", "pattern": "HEY"}]}
    for name, rules in {"toy": bench.GRAMMAR, "loud": shouted}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "grammar.json").write_text(json.dumps(rules))
    pairs = [
        bench.pair(RED, [RED], ["color"]),
        replace(bench.pair("hey", ["hey", "somebody", "", " . "], ["loud"], "1"), dataset="loud"),
        replace(bench.pair("hey", ["hey"], ["loud"], "2"), dataset="other"),
        bench.pair(RED, ["somebody left the car park"], ["color"], "3"),
        bench.pair(RED, [RED], [], "4"),  # nobody knows what changed
    ]
    captions = parse_predictions(load_grammars(tmp_path, ["other", "loud", "toy"]), pairs)
    assert {i: caption.predicted_type for i, caption in captions.items()} == {"toy/0": "color", "toy/1": "loud"}
    assert captions["toy/1"].reference_clauses == [[Clause("loud")]]
    ordered = ["viewpoint", "color", "drop", "none", "several", "unreadable"]  # OmniDiff's, a dataset's own, the rest
    assert sorted(reversed(ordered), key=change_type_order) == ordered


RULES = '"clause_separator": ", ", "no_change": []'


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("[]", "list indices"),
        (f"{{{RULES}}}", "'clauses'"),
        (f'{{{RULES}, "clauses": [{{"type": "x", "pattern": "("}}]}}', "unterminated"),
        (f'{{{RULES}, "clauses": [], "inverse": {{"x": {{}}}}}}', "'type'"),
        (None, "No such file"),
    ],
)
def test_a_bad_or_missing_grammar_is_refused_by_name(text: str | None, cause: str, tmp_path: Path):
    path = tmp_path / "grammar.json"
    if text is not None:
        path.write_text(text)
    with raises(DataError, "scoring.unreadable_grammar", path=path) as refused:
        Grammar.load(path)
    assert cause in refused.value.fields["cause"]
