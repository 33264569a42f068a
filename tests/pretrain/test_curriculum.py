"""The base's tasks: true answers, never about a difference."""

from pathlib import Path

import numpy as np
import pytest
import yaml

from components.datasets.minichange.language import describe_cells, describe_scene
from components.datasets.minichange.scene import PLACES, Scene, sample_scene
from components.pretrain.curriculum import ASKED_FOR, QUESTIONS, asked_for, curriculum, side_by_side, whole


def scenes(count: int, seed: int) -> list[Scene]:
    rng = np.random.default_rng(seed)
    return [sample_scene(rng) for _ in range(count)]


@pytest.mark.parametrize("images", [1, 2])
def test_what_is_asked_for_is_where_the_answer_says_or_nowhere(images: int) -> None:
    rng = np.random.default_rng(0)
    seen = set()
    for seed in range(40):
        shown = scenes(images, seed)
        here = {f"{PLACES[cell]} {text}" for scene in shown for cell, text in describe_cells(scene).items()}
        question, answer = asked_for(rng, shown)
        looks = question.removeprefix("Describe the ").removesuffix(".").split(", the ")
        answers = answer.split(", ")
        assert len(looks) == len(answers) == ASKED_FOR
        for asked, said in zip(looks, answers, strict=True):
            fitting = {text for text in here if set(asked.split()) <= set(text.split(" a ", 1)[1].split()[:3])}
            assert fitting == (set() if said == "nothing" else {said}), (asked, said)
            seen.add(said == "nothing")
    assert seen == {True, False}


def test_side_by_side_names_every_place_that_holds_something_in_either_image() -> None:
    first, second = scenes(2, 4)
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
