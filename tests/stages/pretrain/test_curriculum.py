"""The base's tasks: true answers, never about a difference."""

from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import yaml

from m3diff.datasets.minichange.language import describe_cells, describe_scene, describe_things
from m3diff.datasets.minichange.levels import LEVELS
from m3diff.datasets.minichange.scene import PLACES, Level, Scene
from m3diff.stages.pretrain import params
from m3diff.stages.pretrain.curriculum import ASKED_FOR, QUESTIONS, asked_for, curriculum, side_by_side, whole
from m3diff.stages.pretrain.params import TASKS


def scenes(count: int, seed: int, level: Level = "grid") -> list[Scene]:
    rng = np.random.default_rng(seed)
    return [LEVELS[level].sample_scene(rng) for _ in range(count)]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("images", [1, 2])
def test_what_is_asked_for_is_where_the_answer_says_or_nowhere(images: int, level: Level) -> None:
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


@pytest.mark.parametrize("level", LEVELS)
def test_side_by_side_names_every_place_that_holds_something_in_either_image(level: Level) -> None:
    first, second = scenes(2, 4, level)
    _, answer = side_by_side(np.random.default_rng(0), [first, second])
    parts = answer.split(", ")
    told = {place: part for part in parts for place in [max((p for p in PLACES if part.startswith(p)), key=len)]}
    assert told.keys() == {PLACES[cell] for cell in {*describe_cells(first), *describe_cells(second)}}
    for cell in {*describe_cells(first), *describe_cells(second)}:
        one, two = describe_cells(first).get(cell, "nothing"), describe_cells(second).get(cell, "nothing")
        assert told[PLACES[cell]] == f"{PLACES[cell]} {one} then {two}"


def test_two_images_are_described_one_after_the_other() -> None:
    first, second = scenes(2, 9)
    _, answer = whole(np.random.default_rng(0), [first, second])
    assert answer == f"image 1: {describe_scene(first)}; image 2: {describe_scene(second)}"


def test_only_sentences_without_an_image_speak_of_change() -> None:
    rng = np.random.default_rng(0)
    words = ("changed", "different", "turned", "became", "replaced", "removed", "appeared")
    for task in curriculum(("grid",)):
        for seed in range(20):
            _, answer = task.ask(rng, scenes(task.images, seed))
            assert task.images == 0 or not any(word in answer for word in words), answer


def test_sentences_answer_the_questions_of_fine_tuning() -> None:
    templates = yaml.safe_load(Path("profiles/questions.yaml").read_text())
    assert list(QUESTIONS) == templates["difference"]


def test_sentences_are_of_the_levels_that_the_base_learns() -> None:
    for levels, words in ((("grid",), {"small", "large"}), (("free",), {"small", "medium", "large"})):
        task = curriculum(levels)[-1]
        rng = np.random.default_rng(1)
        told = {word for _ in range(120) for word in task.ask(rng, [])[1].split()}
        assert told & {"small", "medium", "large"} == words


def test_a_curriculum_of_fewer_tasks_keeps_their_order() -> None:
    every = [task.name for task in curriculum(("grid",))]
    assert every == [*TASKS[:5], "asked for in two", "side by side", "sentence"]
    one_image = curriculum(("grid",), ("image", "asked for", "sentence"))
    assert [task.name for task in one_image] == ["image", "asked for", "sentence"]
    assert max(task.images for task in one_image) == 1


def test_a_base_may_learn_the_levels_that_there_are() -> None:
    assert get_args(params.Level) == tuple(LEVELS)
