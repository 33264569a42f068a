"""MiniChange's words read back: what the benchmark writes, an instruction and two descriptions tell again."""

import numpy as np
import pytest

from m3diff.datasets.minichange.language import NO_CHANGE_SENTENCES, describe_scene, references
from m3diff.datasets.minichange.levels import LEVELS, sample_types
from m3diff.datasets.minichange.scene import PLACES, Change, Scene, Thing
from m3diff.stages.augment.words import difference, paraphrase, read_description, read_instruction

NOT_TOLD = {"viewpoint", "illumination"}
"""What the description of a scene does not say."""


def pairs(level: str, count: int = 60) -> list[tuple[Scene, Scene, tuple[Change, ...]]]:
    made = []
    for number in range(count):
        rng = np.random.default_rng([7, number])
        before, after, _, changes = LEVELS[level].sample_pair(rng, sample_types(rng, number, 0.3))
        made.append((before, after, changes))
    return made


@pytest.mark.parametrize("level", LEVELS)
def test_every_reference_is_read_as_its_changes(level: str):
    for _, _, changes in pairs(level):
        for text in references(changes, 5):
            read = read_instruction(text) or ()
            assert [change.type for change in read] == [change.type for change in changes]
            for found, true in zip(read, changes, strict=True):
                assert found.word == true.word
                for told, thing in ((found.before, true.before), (found.after, true.after)):
                    assert (told is None) == (thing is None)
                    if told and thing:
                        assert (told.kind, told.size, told.cell) == (thing.kind, thing.size, thing.cell)
                        assert told.color == thing.color
                        assert told.state in (None, thing.state)


@pytest.mark.parametrize("level", LEVELS)
def test_every_description_is_read_as_its_scene(level: str):
    for before, after, _ in pairs(level):
        for scene in (before, after):
            read = read_description(describe_scene(scene))
            assert read is not None
            looks = [(t.cell, t.size, t.color, t.kind, t.state) for t in read.things]
            assert sorted(looks, key=str) == sorted(
                ((t.cell, t.size, t.color, t.kind, t.state) for t in scene.things), key=str
            )
            assert sorted(read.marks) == sorted(mark.cell for mark in scene.marks)


@pytest.mark.parametrize("level", LEVELS)
def test_an_instruction_has_four_other_wordings_all_true_where_its_image_is_described(level: str):
    for before, _, changes in pairs(level):
        texts = references(changes, 5)
        for text in texts:
            assert paraphrase(text, describe_scene(before)) == [other for other in texts if other != text]


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
def test_what_is_not_in_minichanges_words_has_no_other_wording(text: str):
    assert read_instruction(text) is None
    assert paraphrase(text) == []


@pytest.mark.parametrize("level", LEVELS)
def test_two_descriptions_tell_every_change_but_camera_and_lamp(level: str):
    exact = 0
    for before, after, changes in pairs(level):
        told = difference(describe_scene(before), describe_scene(after), 5)
        seen = tuple(change for change in changes if change.type not in NOT_TOLD)
        exact += told == (references(seen, 5) if seen else [])
    assert exact >= 58, "two objects of one place may be told as each other's change"


BALL, BOX = Thing("ball", "red", "small", 0), Thing("box", "blue", "large", 4)


@pytest.mark.parametrize(
    ("first", "second", "told"),
    [
        ((BALL,), (BALL, BOX), "in the centre a large blue box appeared"),
        ((BALL, BOX), (BALL,), "in the centre the large blue box disappeared"),
        ((BALL,), (BALL,), None),
        ((BALL,), (Thing("ball", "blue", "large", 0),), None),  # more than one clause can say
        ((BALL,), (Thing("ball", "red", "small", 8), BOX), "at the top left the small red ball disappeared, and in"),
        ((), tuple(Thing("cone", "red", "small", cell) for cell in range(4)), None),  # more than three changes
    ],
)
def test_the_second_description_is_told_from_the_first(first: tuple, second: tuple, told: str | None):
    texts = difference(said(first), said(second), 1)
    assert (texts == []) if told is None else texts[0].startswith(told)


def said(things: tuple[Thing, ...]) -> str:
    return ", ".join(f"{PLACES[thing.cell]} a {thing.size} {thing.color} {thing.kind}" for thing in (*things, CORNER))


CORNER = Thing("star", "white", "small", 6)


def test_a_mark_makes_a_removal_and_one_from_nowhere_is_not_told():
    ball = said((BALL,))
    assert difference(ball, f"at the top left a mark, {said(())}", 1) == [
        "at the top left the small red ball was removed and left a mark"
    ]
    assert difference(ball, f"at the top a mark, {ball}", 1) == []
    assert difference(f"at the top a mark, {ball}", ball, 1) == []
    assert difference(ball, "a cat on a mat", 1) == []
