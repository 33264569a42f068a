"""The base's tasks: true answers, never about a difference; and first, the classes of a scene's points."""

from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
import yaml
from torch import nn

from m3diff.datasets.minichange.language import describe_cells, describe_scene, describe_things
from m3diff.datasets.minichange.levels import LEVELS
from m3diff.datasets.minichange.render import render
from m3diff.datasets.minichange.scene import COLORS, KINDS, PLACES, Level, Mark, Scene, Thing, View
from m3diff.stages.pretrain import params
from m3diff.stages.pretrain.curriculum import (
    ASKED_FOR,
    CLASSES,
    MARK,
    POINTS,
    QUESTIONS,
    SHOWN,
    SIZES,
    Segmentation,
    asked_for,
    curriculum,
    segment,
    side_by_side,
    truth_of,
    whole,
)
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


def test_two_images_are_described_one_after_the_other_and_only_sentences_speak_of_change() -> None:
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


def test_sentences_are_of_the_levels_that_the_base_learns() -> None:
    for levels, words in ((("grid",), {"small", "large"}), (("free",), {"small", "medium", "large"})):
        task = curriculum(levels)[-1]
        rng = np.random.default_rng(1)
        told = {word for _ in range(120) for word in task.ask(rng, [])[1].split()}
        assert told & {"small", "medium", "large"} == words


def test_a_curriculum_of_fewer_tasks_keeps_their_order_and_the_levels_are_those_that_there_are() -> None:
    every = [task.name for task in curriculum(("grid",))]
    assert every == [*TASKS[:5], "asked for in two", "side by side", "sentence"]
    one_image = curriculum(("grid",), ("image", "asked for", "sentence"))
    assert [(task.name, task.images) for task in one_image] == [("image", 1), ("asked for", 1), ("sentence", 0)]
    assert get_args(params.Level) == tuple(LEVELS)


AT_REST = View()


def test_an_object_covers_its_square_and_nothing_else() -> None:
    box = Thing("box", "blue", "large", cell=2)  # on the grid, 0.285 wide around (0.8, 0.2)
    found = segment(Scene((box,), view=AT_REST), 100, 100)
    rows, columns = np.nonzero(found[..., 0])
    assert (rows.min(), rows.max(), columns.min(), columns.max()) == (6, 33, 66, 93)
    assert (found[20, 80] == (1 + KINDS.index("box"), COLORS.index("blue"), SIZES.index("large"), -1)).all()
    assert (found[80, 20] == (0, -1, -1, -1)).all()


@pytest.mark.parametrize(("kind", "state"), SHOWN)
def test_each_state_of_a_kind_is_a_class(kind: str, state: object) -> None:
    found = segment(Scene((Thing(kind, "red", "small", 4, state),), view=AT_REST), 9, 9)[4, 4]
    assert found[0] == 1 + KINDS.index(kind)
    assert SHOWN[found[3]] == (kind, state)


def test_the_later_of_two_things_covers_the_earlier_and_things_cover_marks() -> None:
    ball, cone = Thing("ball", "red", "large", 4), Thing("cone", "white", "small", 4)
    scene = Scene((ball, cone), (Mark(4), Mark(0)), view=AT_REST)
    assert segment(scene, 9, 9)[4, 4, 0] == 1 + KINDS.index("cone")
    assert segment(replace(scene, things=(cone, ball)), 9, 9)[4, 4, 0] == 1 + KINDS.index("ball")
    assert segment(scene, 9, 9)[1, 1].tolist() == [MARK, -1, -1, -1]


def test_the_camera_moves_and_widens_what_is_seen() -> None:
    scene = Scene((Thing("ball", "red", "large", 4),), view=View(x=0.2, y=-0.1, zoom=2.0))
    rows, columns = np.nonzero(segment(scene, 200, 200)[..., 0])
    left, right, top, bottom = (value / 200 for value in (columns.min(), columns.max() + 1, rows.min(), rows.max() + 1))
    assert (left, right) == (0.0, pytest.approx(0.1 + 0.285, abs=0.01)), "cut at the frame's border"
    assert (top, bottom) == (pytest.approx(0.7 - 0.285, abs=0.01), pytest.approx(0.7 + 0.285, abs=0.01))


@pytest.mark.parametrize("level", ["grid", "free"])
def test_the_classes_lie_where_the_picture_shows_the_objects(level: str) -> None:
    """The colours of the picture inside an object are its own and not the table's."""
    rng = np.random.default_rng(5)
    scene = LEVELS[level].sample_scene(rng)
    scene = replace(scene, view=replace(scene.view, brightness=1.0, noise=0.0))
    picture = np.asarray(render(scene, 128, rng), dtype=float)
    without = np.asarray(render(replace(scene, things=(), marks=()), 128, rng), dtype=float)
    changed = np.abs(picture - without).mean(-1)
    things = (segment(scene, 128, 128)[..., 0] > 0) & (segment(scene, 128, 128)[..., 0] < MARK)
    assert changed[things].mean() > 6 * changed[~things].mean()


PATCHES = torch.arange(9.0).view(1, 9, 1).expand(2, 9, 4)
"""Patch n of an image has the feature n."""


def test_points_stand_where_their_patch_stands() -> None:
    model = Segmentation(nn.Identity(), 4)
    with torch.no_grad():
        model.head.weight.fill_(0.25)
        model.head.bias.copy_(torch.arange(POINTS**2).repeat_interleave(sum(CLASSES)) / 100)
    logits = model(PATCHES)
    assert [each.shape for each in logits] == [(2, 12, 12, count) for count in CLASSES]
    rows, columns = np.mgrid[:12, :12]
    want = 3 * (rows // 4) + columns // 4 + (POINTS * (rows % 4) + columns % 4) / 100
    for each in logits:
        np.testing.assert_allclose(each[1, ..., 0].detach().numpy(), want, rtol=1e-5)


def test_the_loss_adds_the_classes_means_and_the_right_kinds_are_counted_on_objects_alone() -> None:
    scenes = [Scene((Thing("die", "white", "small", 4, 3), Thing("ball", "red", "large", 0)), (Mark(8),), view=AT_REST)]
    truth = torch.from_numpy(segment(scenes[0], 12, 12)).long()[None]

    def answering(sure: float, classes: torch.Tensor) -> Segmentation:
        model = Segmentation(nn.Identity(), 4)
        model.forward = lambda patches: tuple(  # type: ignore[method-assign]
            sure * torch.nn.functional.one_hot(classes[..., k].clamp(min=0), count).float()
            for k, count in enumerate(CLASSES)
        )
        return model

    loss, right = answering(2.0, truth).loss(PATCHES[:1], scenes)
    want = sum(np.log(np.exp(2.0) + count - 1) - 2.0 for count in CLASSES)
    assert float(loss) == pytest.approx(want, rel=1e-5)
    assert right == 1.0
    nothing = truth.clone()
    nothing[..., 0] = 0
    assert answering(2.0, nothing).loss(PATCHES[:1], scenes)[1] == 0.0
    balls = truth.clone()
    balls[balls[..., 0] > 0] = 1 + KINDS.index("ball")
    share = (truth[..., 0] == 1 + KINDS.index("ball")).sum() / (truth[..., 0] > 0).sum()
    assert answering(2.0, balls).loss(PATCHES[:1], scenes)[1] == pytest.approx(float(share))


def test_of_a_stacked_picture_the_first_scene_is_above_and_each_is_half_as_high() -> None:
    first = Scene((Thing("box", "blue", "large", cell=2),), view=AT_REST)
    second = Scene((Thing("ball", "red", "large", cell=6),), view=AT_REST)
    stacked = truth_of([first, second, second, first], 20, images=2)
    assert stacked.shape == (2, 20, 20, 4)
    above, below = segment(first, 10, 20), segment(second, 10, 20)
    assert (stacked[0].numpy() == np.concatenate([above, below])).all()
    assert (stacked[1].numpy() == np.concatenate([below, above])).all()
    rows, columns = np.nonzero(above[..., 0])
    assert (rows.min(), rows.max(), columns.min(), columns.max()) == (1, 2, 13, 18), "as wide as alone, half as high"
