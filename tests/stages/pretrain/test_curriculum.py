"""The base's tasks: true answers, never about a difference; and first, the classes of a scene's points."""

from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import yaml

from m3diff.datasets.minichange.language import describe_scene, describe_things
from m3diff.datasets.minichange.levels import LEVELS
from m3diff.datasets.minichange.render import render
from m3diff.datasets.minichange.scene import COLORS, KINDS, PLACES, Level, Mark, Scene, Thing, View
from m3diff.stages.pretrain import params
from m3diff.stages.pretrain.curriculum import ASKED_FOR, MARK, QUESTIONS, SIZES, asked_for, curriculum, segment, whole
from m3diff.stages.pretrain.params import TASKS


def scenes(count: int, seed: int, level: Level = "grid") -> list[Scene]:
    rng = np.random.default_rng(seed)
    return [LEVELS[level].sample_scene(rng) for _ in range(count)]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("images", [1, 2])
def test_what_is_asked_for_is_where_the_answer_says_or_nowhere(images, level):
    rng = np.random.default_rng(0)
    seen = set()
    for seed in range(40):
        shown = scenes(images, seed, level)
        here = [f"{PLACES[cell]} {text}" for scene in shown for cell, text in describe_things(scene)]
        question, answer = asked_for(rng, shown)
        looks = question.removeprefix("Describe the ").removesuffix(".").split(", the ")
        answers = answer.split(", ")
        assert len(looks) == len(answers) == ASKED_FOR
        for asked, said in zip(looks, answers, strict=True):
            fitting = [text for text in here if set(asked.split()) <= set(text.split(" a ", 1)[1].split()[:3])]
            assert fitting == ([] if said == "nothing" else [said]), (asked, said)
            seen.add(said == "nothing")
    assert seen == {True, False}


def test_two_images_are_described_one_after_the_other_and_only_sentences_speak_of_change():
    first, second = scenes(2, 9)
    rng = np.random.default_rng(0)
    _, answer = whole(rng, [first, second])
    assert answer == f"image 1: {describe_scene(first)}; image 2: {describe_scene(second)}"
    words = ("changed", "different", "turned", "became", "replaced", "removed", "appeared")
    for task in curriculum(("grid",)):
        for seed in range(20):
            _, answer = task.ask(rng, scenes(task.images, seed))
            assert task.images == 0 or not any(word in answer for word in words), answer
    assert list(QUESTIONS) == yaml.safe_load(Path("profiles/questions.yaml").read_text())["difference"]


def test_a_curriculum_of_fewer_tasks_keeps_their_order_and_the_levels_are_those_that_there_are():
    every = [task.name for task in curriculum(("grid",))]
    assert every == [*TASKS[:5], "asked for in two", "side by side", "sentence"]
    one_image = curriculum(("grid",), ("image", "asked for", "sentence"))
    assert [(task.name, task.images) for task in one_image] == [("image", 1), ("asked for", 1), ("sentence", 0)]
    assert get_args(params.Level) == tuple(LEVELS)


def test_a_thing_covers_its_square_and_marks_and_nothing_else_and_the_camera_moves_it():
    box = Thing("box", "blue", "large", cell=2)  # on the grid, 0.285 wide around (0.8, 0.2)
    found = segment(Scene((box,), (Mark(0), Mark(2)), view=View()), 100, 100)
    rows, columns = np.nonzero((found[..., 0] > 0) & (found[..., 0] < MARK))
    assert (rows.min(), rows.max(), columns.min(), columns.max()) == (6, 33, 66, 93)
    assert (found[20, 80] == (1 + KINDS.index("box"), COLORS.index("blue"), SIZES.index("large"), -1)).all()
    assert [found[place].tolist() for place in ((80, 20), (20, 20))] == [[0, -1, -1, -1], [MARK, -1, -1, -1]]
    scene = Scene((Thing("ball", "red", "large", 4),), view=View(x=0.2, y=-0.1, zoom=2.0))
    rows, columns = np.nonzero(segment(scene, 200, 200)[..., 0])
    left, right, top, bottom = (value / 200 for value in (columns.min(), columns.max() + 1, rows.min(), rows.max() + 1))
    assert (left, right) == (0.0, pytest.approx(0.1 + 0.285, abs=0.01)), "cut at the frame's border"
    assert (top, bottom) == (pytest.approx(0.7 - 0.285, abs=0.01), pytest.approx(0.7 + 0.285, abs=0.01))


@pytest.mark.parametrize("level", ["grid", "free"])
def test_the_classes_lie_where_the_picture_shows_the_objects(level):
    """The colours of the picture inside an object are its own and not the table's."""
    rng = np.random.default_rng(5)
    scene = LEVELS[level].sample_scene(rng)
    scene = replace(scene, view=replace(scene.view, brightness=1.0, noise=0.0))
    picture = np.asarray(render(scene, 128, rng), dtype=float)
    without = np.asarray(render(replace(scene, things=(), marks=()), 128, rng), dtype=float)
    changed = np.abs(picture - without).mean(-1)
    things = (segment(scene, 128, 128)[..., 0] > 0) & (segment(scene, 128, 128)[..., 0] < MARK)
    assert changed[things].mean() > 6 * changed[~things].mean()
