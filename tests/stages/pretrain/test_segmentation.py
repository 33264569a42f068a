"""What the vision encoder is taught first: the classes of a scene's points, and the head that reads them."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from m3diff.datasets.minichange.levels import LEVELS
from m3diff.datasets.minichange.render import render
from m3diff.datasets.minichange.scene import COLORS, KINDS, Mark, Scene, Thing, View
from m3diff.stages.pretrain.segmentation import CLASSES, MARK, POINTS, SHOWN, SIZES, Segmentation, segment, truth_of

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
