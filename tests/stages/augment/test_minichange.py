"""Parse MiniChange's sentences, carry out instructions on scenes, and compare two descriptions."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from m3diff.datasets.minichange import image_paths, read_scenes
from m3diff.datasets.minichange.language import NO_CHANGE_SENTENCES, describe_scene, references
from m3diff.datasets.minichange.render import render
from m3diff.datasets.minichange.scene import (
    FULL_BRIGHTNESS,
    MIN_VISIBLE_SHARE,
    PLACE_NAMES,
    SAMPLERS,
    ZOOM_FACTORS,
    Change,
    Mark,
    Scene,
    Thing,
    are_uncovered,
    sample_types,
)
from m3diff.records.errors import DataError
from m3diff.records.schemas import CHANGE_TYPES
from m3diff.stages.augment.minichange import (
    DrawnEditor,
    carry_out,
    describe_difference,
    paraphrase,
    read_description,
    read_instruction,
)
from tests.stages.augment.toys import draw

TYPES_NOT_IN_DESCRIPTIONS = {"viewpoint", "illumination"}
each_level = pytest.mark.parametrize("level", SAMPLERS)


def pairs(level: str) -> list[tuple[Scene, Scene, tuple[Change, ...]]]:
    scene_pairs = []
    for number in range(60):
        rng = np.random.default_rng([7, number])
        sample = SAMPLERS[level].sample_pair(rng, sample_types(rng, number, 0.3))
        scene_pairs.append((sample.before, sample.after, sample.changes))
    return scene_pairs


def looks(thing: Thing) -> tuple:
    return (thing.kind, thing.size, thing.color, thing.cell)


def assert_describes(described: Thing | None, thing: Thing | None) -> None:
    """Check that a parsed object has the looks of an object, and its state if the text mentions it."""
    if described is None or thing is None:
        assert described == thing
        return
    assert looks(described) == looks(thing)
    assert described.state in (None, thing.state)


@each_level
def test_every_reference_is_read_back_as_its_changes_and_has_other_wordings(level):
    for before, _, changes in pairs(level):
        texts = references(changes, 5)
        for text in texts:
            parsed_changes = read_instruction(text) or ()
            assert [change.type for change in parsed_changes] == [change.type for change in changes]
            assert [change.word for change in parsed_changes] == [change.word for change in changes]
            for parsed_change, change in zip(parsed_changes, changes, strict=True):
                assert_describes(parsed_change.before, change.before)
                assert_describes(parsed_change.after, change.after)
            other_texts = [other_text for other_text in texts if other_text != text]
            assert paraphrase(text, describe_scene(before)) == other_texts


def looks_and_states(things: Sequence[Thing]) -> list[tuple]:
    return sorted([(*looks(thing), thing.state) for thing in things], key=str)


@each_level
def test_descriptions_are_read_back_and_two_give_all_changes_but_camera_and_lamp(level):
    exact = 0
    for before, after, changes in pairs(level):
        for scene in (before, after):
            description = read_description(describe_scene(scene))
            assert description is not None
            things, marks = description
            assert looks_and_states(things) == looks_and_states(scene.things)
            assert sorted(marks) == sorted(mark.cell for mark in scene.marks)
        texts = describe_difference(describe_scene(before), describe_scene(after), 5)
        described_changes = tuple(change for change in changes if change.type not in TYPES_NOT_IN_DESCRIPTIONS)
        exact += texts == (references(described_changes, 5) if described_changes else [])
    assert exact >= 58, "two objects at one place may be taken for a change of one object"


def test_without_a_description_only_what_the_instruction_says_is_describe_with_star():
    text = "at the left the small red arrow points up now"
    assert paraphrase(text) == [
        "at the left the small red arrow points up after a turn",
        "at the left the small red arrow points up in the second image",
    ]
    two_arrows = "at the left a small red arrow pointing down, at the left a small red arrow pointing left"
    assert paraphrase(text, two_arrows) == paraphrase(text), "either arrow may be meant"
    assert len(paraphrase(text, "at the left a small red arrow pointing down")) == 4


@pytest.mark.parametrize("text", [*NO_CHANGE_SENTENCES, "make it red", "at the left the red arrow points up now", ""])
def test_what_is_not_in_minichanges_words_has_no_other_wording(text):
    assert read_instruction(text) is None
    assert paraphrase(text) == []


def describe_with_star(*things: Thing) -> str:
    things = (*things, Thing("star", "white", "small", 6))
    return ", ".join(f"{PLACE_NAMES[thing.cell]} a {thing.size} {thing.color} {thing.kind}" for thing in things)


BALL = Thing("ball", "red", "small", 0)
BOX = Thing("box", "blue", "large", 4)
CONES = tuple(Thing("cone", "red", "small", cell) for cell in range(4))
MARK = "at the top left a mark"


@pytest.mark.parametrize(
    ("text_before", "text_after", "sentence"),
    [
        (describe_with_star(BALL), describe_with_star(BALL, BOX), "in the centre a large blue box appeared"),
        (describe_with_star(BALL, BOX), describe_with_star(BALL), "in the centre the large blue box disappeared"),
        (describe_with_star(BALL), describe_with_star(BALL), None),
        (
            describe_with_star(BALL),
            describe_with_star(Thing("ball", "blue", "large", 0)),
            None,
        ),  # more than one clause can say
        (
            describe_with_star(BALL),
            describe_with_star(replace(BALL, cell=8), BOX),
            "at the top left the small red ball disappeared, and in",
        ),
        (describe_with_star(), describe_with_star(*CONES), None),  # more than three changes
        (
            describe_with_star(BALL),
            f"{MARK}, {describe_with_star()}",
            "at the top left the small red ball was removed and left a mark",
        ),
        (describe_with_star(BALL), f"at the top a mark, {describe_with_star(BALL)}", None),  # a mark from nowhere
        (f"at the top a mark, {describe_with_star(BALL)}", describe_with_star(BALL), None),
        (describe_with_star(BALL), "a cat on a mat", None),
    ],
)
def test_two_descriptions_give_a_sentence_about_their_difference(text_before, text_after, sentence):
    texts = describe_difference(text_before, text_after, 1)
    if sentence is None:
        assert texts == []
    else:
        assert texts[0].startswith(sentence)


@each_level
def test_an_instruction_gives_the_scene_that_it_describes(level):
    same = 0
    for number, (before, after, changes) in enumerate(pairs(level)):
        for text in references(changes, 3):
            edited = carry_out(before, text, np.random.default_rng(number))
            assert edited is not None, text
            if all(change.type not in ("addition", "substitution") for change in changes):
                assert describe_scene(edited) == describe_scene(after), text
                same += 1
            for word in {change.word for change in changes if change.type == "viewpoint"} & ZOOM_FACTORS.keys():
                assert edited.view.zoom == pytest.approx(before.view.zoom * ZOOM_FACTORS[word], rel=0.08)
            for word in {change.word for change in changes if change.type == "illumination"}:
                brightness = FULL_BRIGHTNESS if word == "on" else SAMPLERS[level].dark_brightness
                assert edited.view.brightness == pytest.approx(brightness, rel=0.12)
    assert same > 60


@pytest.mark.parametrize("change_type", CHANGE_TYPES)
@each_level
def test_each_type_of_change_leaves_all_other_things_where_they_are(level, change_type):
    for number in range(4):
        rng = np.random.default_rng([3, number])
        sample = SAMPLERS[level].sample_pair(rng, (change_type,))
        before = sample.before
        (change,) = sample.changes
        edited = carry_out(before, references(sample.changes, 1)[0], rng)
        assert edited is not None
        missing_things = [thing for thing in before.things if thing not in edited.things]
        new_things = [thing for thing in edited.things if thing not in before.things]
        assert missing_things == ([change.before] if change.before else [])
        assert [looks(thing) for thing in new_things] == ([looks(change.after)] if change.after else [])
        assert are_uncovered(edited.things, MIN_VISIBLE_SHARE)
        assert len(edited.marks) - len(before.marks) == (change_type == "removal")
        assert edited.view != before.view, "another photograph"


SCENE = Scene((BALL, Thing("arrow", "blue", "large", 4, "up")), (Mark(8),))
TURNED = "at the top left the small red ball turned blue"


@pytest.mark.parametrize(
    ("scene", "text"),
    [
        (SCENE, "at the top the small red ball turned blue"),  # not there
        (SCENE, "at the top left the large red ball turned blue"),  # nor so
        (SCENE, "in the centre the large blue arrow points left instead of down"),  # it points up
        (SCENE, "in the centre a small red cone appeared"),  # the place is taken
        (SCENE, "at the bottom right a small red cone appeared"),  # by a mark
        (SCENE, "the lamp came on"),  # it is
        (SCENE, "nothing changed"),
        (SCENE, "make the ball blue"),
        (Scene((BALL, replace(BALL, dx=0.1)), level="free"), TURNED),  # either may be meant
    ],
)
def test_what_cannot_be_carried_out_is_not(scene, text):
    assert carry_out(SCENE, TURNED, np.random.default_rng(0)) is not None
    assert carry_out(scene, text, np.random.default_rng(0)) is None


@pytest.mark.parametrize("changes", [{}, {"level": "free"}, {"domain": "shifted"}], ids=str)
def test_written_scenes_draw_the_images_and_the_seed_decides_open_details(changes, tmp_path):
    root = draw(tmp_path / "raw", **changes)
    scenes = read_scenes(root)
    same = 0
    for path, scene in scenes.scene_by_path.items():
        if not scene.view.noise:
            drawn = render(scene, scenes.image_px, np.random.default_rng(0), scenes.domain)
            assert drawn.tobytes() == Image.open(root / path).convert("RGB").tobytes(), path
            same += 1
    assert same > 40
    assert len(scenes.scene_by_path) == 120
    editor = DrawnEditor(root)
    path = root / image_paths(0)[0]
    edit = editor.edit(path, "the camera moved up", 1)
    assert edit.tobytes() == editor.edit(path, "the camera moved up", 1).tobytes()
    assert edit.tobytes() != editor.edit(path, "the camera moved up", 2).tobytes()
    assert edit.size == Image.open(path).size
    assert editor.edit(root / "images/other.png", "the camera moved up", 0) is None, "an image without a scene"
    with pytest.raises(DataError, match=r"scenes\.json"):
        DrawnEditor(tmp_path)
