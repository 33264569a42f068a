"""MiniChange's words read back, and carried out: instructions as changes of a scene, and two descriptions compared."""

from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from m3diff.datasets.minichange import image_paths, read_scenes
from m3diff.datasets.minichange.language import NO_CHANGE_SENTENCES, describe_scene, references
from m3diff.datasets.minichange.render import render
from m3diff.datasets.minichange.scene import (
    FULL_BRIGHTNESS,
    PLACE_NAMES,
    SAMPLERS,
    ZOOM_FACTORS,
    Change,
    Mark,
    Scene,
    Thing,
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

NOT_TOLD = {"viewpoint", "illumination"}  # by the description of a scene
each_level = pytest.mark.parametrize("level", SAMPLERS)


def pairs(level: str) -> list[tuple[Scene, Scene, tuple[Change, ...]]]:
    made = []
    for number in range(60):
        rng = np.random.default_rng([7, number])
        before, after, _, changes = SAMPLERS[level].sample_pair(rng, sample_types(rng, number, 0.3))
        made.append((before, after, changes))
    return made


def looks(thing: Thing) -> tuple:
    return (thing.kind, thing.size, thing.color, thing.cell)


@each_level
def test_every_reference_is_read_back_as_its_changes_and_has_other_wordings(level):
    for before, _, changes in pairs(level):
        texts = references(changes, 5)
        for text in texts:
            read = read_instruction(text) or ()
            assert [(change.type, change.word) for change in read] == [(each.type, each.word) for each in changes]
            for found, true in zip(read, changes, strict=True):
                for told, thing in ((found.before, true.before), (found.after, true.after)):
                    assert (told and looks(told)) == (thing and looks(thing))
                    assert told is None or thing is None or told.state in (None, thing.state)
            assert paraphrase(text, describe_scene(before)) == [other for other in texts if other != text]


@each_level
def test_descriptions_are_read_back_and_two_give_all_changes_but_camera_and_lamp(level):
    exact = 0
    for before, after, changes in pairs(level):
        for scene in (before, after):
            read = read_description(describe_scene(scene))
            assert read is not None
            found, true = ([(*looks(each), each.state) for each in of] for of in (read[0], scene.things))
            assert sorted(found, key=str) == sorted(true, key=str)
            assert sorted(read[1]) == sorted(mark.cell for mark in scene.marks)
        told = describe_difference(describe_scene(before), describe_scene(after), 5)
        visible = tuple(change for change in changes if change.type not in NOT_TOLD)
        exact += told == (references(visible, 5) if visible else [])
    assert exact >= 58, "two objects of one place may be told as each other's change"


def test_without_a_description_only_what_the_instruction_says_is_said():
    text = "at the left the small red arrow points up now"
    assert paraphrase(text) == [
        "at the left the small red arrow points up after a turn",
        "at the left the small red arrow points up in the second image",
    ]
    two = "at the left a small red arrow pointing down, at the left a small red arrow pointing left"
    assert paraphrase(text, two) == paraphrase(text), "either arrow may be meant"
    assert len(paraphrase(text, "at the left a small red arrow pointing down")) == 4


@pytest.mark.parametrize("text", [*NO_CHANGE_SENTENCES, "make it red", "at the left the red arrow points up now", ""])
def test_what_is_not_in_minichanges_words_has_no_other_wording(text):
    assert read_instruction(text) is None
    assert paraphrase(text) == []


def said(*things: Thing) -> str:
    told = (*things, Thing("star", "white", "small", 6))
    return ", ".join(f"{PLACE_NAMES[thing.cell]} a {thing.size} {thing.color} {thing.kind}" for thing in told)


BALL = Thing("ball", "red", "small", 0)
BOX = Thing("box", "blue", "large", 4)
CONES = tuple(Thing("cone", "red", "small", cell) for cell in range(4))
MARK = "at the top left a mark"


@pytest.mark.parametrize(
    ("first", "second", "told"),
    [
        (said(BALL), said(BALL, BOX), "in the centre a large blue box appeared"),
        (said(BALL, BOX), said(BALL), "in the centre the large blue box disappeared"),
        (said(BALL), said(BALL), None),
        (said(BALL), said(Thing("ball", "blue", "large", 0)), None),  # more than one clause can say
        (said(BALL), said(replace(BALL, cell=8), BOX), "at the top left the small red ball disappeared, and in"),
        (said(), said(*CONES), None),  # more than three changes
        (said(BALL), f"{MARK}, {said()}", "at the top left the small red ball was removed and left a mark"),
        (said(BALL), f"at the top a mark, {said(BALL)}", None),  # a mark from nowhere
        (f"at the top a mark, {said(BALL)}", said(BALL), None),
        (said(BALL), "a cat on a mat", None),
    ],
)
def test_the_second_description_is_told_from_the_first(first, second, told):
    texts = describe_difference(first, second, 1)
    assert (texts == []) if told is None else texts[0].startswith(told)


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
                wanted = FULL_BRIGHTNESS if word == "on" else SAMPLERS[level].dark
                assert edited.view.brightness == pytest.approx(wanted, rel=0.12)
    assert same > 60


@pytest.mark.parametrize("change_type", CHANGE_TYPES)
@each_level
def test_each_type_of_change_leaves_all_other_things_where_they_are(level, change_type):
    for number in range(4):
        rng = np.random.default_rng([3, number])
        before, _, _, changes = SAMPLERS[level].sample_pair(rng, (change_type,))
        edited = carry_out(before, references(changes, 1)[0], rng)
        assert edited is not None
        assert [each for each in before.things if each not in edited.things] == [each.before for each in changes
                                                                                 if each.before]  # fmt: skip
        came = [thing for thing in edited.things if thing not in before.things]
        assert len(came) == (1 if changes[0].after else 0)
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
    first, again, other = (editor.edit(path, "the camera moved up", seed) for seed in (1, 1, 2))
    assert first.tobytes() == again.tobytes() != other.tobytes()
    assert first.size == Image.open(path).size
    assert editor.edit(root / "images/other.png", "the camera moved up", 0) is None, "an image without a scene"
    with pytest.raises(DataError, match=r"scenes\.json"):
        DrawnEditor(tmp_path)
