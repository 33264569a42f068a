"""The control that reads nothing: differences by hand, and areas under the curve by counting pairs."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from m3diff.scoring.metrics.metric import ALL
from m3diff.scoring.metrics.pixel_threshold import METRIC, ONE_KIND, mean_difference, roc_auc, window_difference


def grey(pixels: np.ndarray) -> Image.Image:
    return Image.fromarray(np.repeat(pixels[..., None], 3, axis=-1).astype(np.uint8))


def test_the_mean_is_over_all_pixels_and_channels_without_sign():
    before = np.full((4, 4), 100)
    after = before.copy()
    after[0, 0], after[0, 1] = 116, 84
    assert mean_difference(grey(before), grey(after)) == 2.0
    red = Image.new("RGB", (4, 4), (130, 100, 100))
    assert mean_difference(grey(before), red) == 10.0


def test_the_window_is_the_worst_one_of_a_sixteenth_of_the_frame():
    before = np.zeros((64, 64))
    after = before.copy()
    after[60:64, 60:64] = 48
    assert window_difference(grey(before), grey(after)) == 48.0
    after = before.copy()
    after[2:6, 10:14] = 48
    assert window_difference(grey(before), grey(after)) == 48.0, "windows overlap by half"
    after = before.copy()
    after[1:5, 8:12] = 48
    assert window_difference(grey(before), grey(after)) == 36.0


def test_a_small_or_narrow_image_has_windows_of_one_pixel():
    before, after = np.zeros((3, 8)), np.zeros((3, 8))
    after[2, 7] = 30
    assert window_difference(grey(before), grey(after)) == 30.0


@pytest.mark.parametrize("differ", [mean_difference, window_difference])
def test_images_of_two_sizes_are_refused(differ):
    with pytest.raises(ValueError, match=r"found \(4, 4\) and \(5, 4\); resize one of them"):
        differ(grey(np.zeros((4, 4))), grey(np.zeros((4, 5))))


def test_the_area_is_how_often_a_changed_pair_differs_more():
    rng = np.random.default_rng(0)
    changed, unchanged = list(rng.integers(0, 9, 40) + 2.0), list(rng.integers(0, 9, 25) + 0.0)
    counted = np.mean([(a > b) + 0.5 * (a == b) for a in changed for b in unchanged])
    assert roc_auc(changed, unchanged) == pytest.approx(counted)
    assert roc_auc([2.0, 3.0], [0.0, 1.0]) == 1.0
    assert roc_auc([0.0], [0.0]) == 0.5


@pytest.mark.parametrize(("changed", "unchanged"), [([], [1.0]), ([1.0], [])])
def test_an_area_needs_pairs_of_both_kinds(changed, unchanged):
    with pytest.raises(ValueError, match=f"found {len(changed)} and {len(unchanged)}"):
        roc_auc(changed, unchanged)


def pair(folder: Path, name: str, types: list[str], brighter: int) -> Any:
    """Two grey images, of which the second is brighter by so much."""
    for side, value in (("before", 100), ("after", 100 + brighter)):
        Image.new("RGB", (8, 8), (value,) * 3).save(folder / f"{name}_{side}.png")
    return SimpleNamespace(
        id=name,
        change_types=types,
        is_distractor=types == ["no_change"],
        before=folder / f"{name}_before.png",
        after=folder / f"{name}_after.png",
    )


def test_the_score_is_the_area_over_the_pairs_whose_truth_is_known(tmp_path):
    pairs = [
        pair(tmp_path, "a", ["color"], 5),
        pair(tmp_path, "b", ["no_change"], 3),
        pair(tmp_path, "c", ["size", "ocr"], 4),
        pair(tmp_path, "d", ["color"], 1),
        pair(tmp_path, "unknown", [], 200),
    ]
    found = METRIC.compute(pairs, {}, None)
    assert found.groups == {ALL: {"pixel_mean_auc": pytest.approx(2 / 3), "pixel_window_auc": pytest.approx(2 / 3)}}
    assert found.pairs["c"] == {"pixel_mean_difference": 4.0, "pixel_window_difference": 4.0}
    assert "unknown" not in found.pairs
    assert not found.absent


def test_pairs_of_one_kind_and_images_that_cannot_be_compared_give_no_area_but_the_reason(tmp_path):
    changed, distractor = pair(tmp_path, "a", ["color"], 5), pair(tmp_path, "b", ["no_change"], 3)
    assert METRIC.compute([changed], {}, None).absent == dict.fromkeys(METRIC.overall, ONE_KIND)
    Image.new("RGB", (9, 8)).save(distractor.after)
    assert "b: images of one size expected" in METRIC.compute([changed, distractor], {}, None).absent[METRIC.headline]
    changed.before.unlink()
    assert "a: " in METRIC.compute([changed, distractor], {}, None).absent[METRIC.headline]
