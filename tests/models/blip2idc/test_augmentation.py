"""Blur and JPEG: what they do, to which pairs, and that the same random numbers give the same pixels."""

import io

import numpy as np
import pytest
from PIL import Image

from m3diff.models import FAMILIES
from m3diff.models.blip2idc import Augment
from m3diff.models.blip2idc_model import augmented, blurred, compressed
from tests.tiny_blip2 import blip2_settings

ALWAYS, NEVER = Augment(blur=1.0, jpeg=1.0), Augment(blur=0.0, jpeg=0.0)


def pair(seed: int = 0, rows: int = 16, columns: int = 24) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (2, rows, columns, 3), dtype=np.uint8)


def visit(*numbers: int) -> np.random.Generator:
    return np.random.default_rng(numbers)


def test_a_visit_gives_the_same_pixels_again_and_another_visit_others() -> None:
    images = pair()
    kept = images.copy()
    first, again, other = (augmented(ALWAYS, images, visit(3, epoch, 7)) for epoch in (0, 0, 1))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
    assert (first.shape, first.dtype) == (images.shape, np.uint8)
    assert np.array_equal(images, kept), "what is cached stays as it is"
    assert np.array_equal(augmented(NEVER, images, visit(1)), images)


def test_about_the_asked_share_is_blurred_and_compressed_each_by_itself() -> None:
    seen = (0.4, 0.5)  # a narrower Gaussian may leave every pixel as it is
    smooth, hard = Augment(blur=0.3, sigma=seen, jpeg=0.0), Augment(blur=0.0, jpeg=0.6)
    for augment, share in ((smooth, 0.3), (hard, 0.6)):
        changed = [not np.array_equal(augmented(augment, pair(), visit(2, row)), pair()) for row in range(300)]
        assert abs(np.mean(changed) - share) < 0.08
    # of what is drawn, neither choice moves the other's
    both = Augment(blur=0.3, sigma=seen, jpeg=0.6)
    for row in range(40):
        is_smooth, is_hard = (
            not np.array_equal(augmented(one, pair(), visit(2, row)), pair()) for one in (smooth, hard)
        )
        assert (not np.array_equal(augmented(both, pair(), visit(2, row)), pair())) == (is_smooth or is_hard)


def test_both_images_are_changed_alike_as_one_picture() -> None:
    """Two images that are the same stay the same but near the seam and the frame, where the filter reads beyond."""
    same = np.stack([pair()[0]] * 2)
    found = augmented(Augment(blur=1.0, jpeg=0.0), same, visit(5)).astype(int)
    assert np.abs(found - same).max() > 0
    assert np.array_equal(found[0, 1:-1], found[1, 1:-1])


@pytest.mark.parametrize("sigma", [0.1, 0.3, 0.5])
def test_the_blur_is_a_gaussian_of_three_pixels_mirrored_at_the_edges(sigma: float) -> None:
    picture = pair()[0]
    weights = np.exp(-0.5 * (np.array([-1, 0, 1]) / sigma) ** 2)
    weights /= weights.sum()
    rows, columns, _ = picture.shape
    want = np.zeros_like(picture)
    for row in range(rows):
        for column in range(columns):
            total = np.zeros(3)
            for down in (-1, 0, 1):
                for right in (-1, 0, 1):
                    y, x = abs(row + down), abs(column + right)
                    y, x = min(y, 2 * (rows - 1) - y), min(x, 2 * (columns - 1) - x)
                    total += weights[down + 1] * weights[right + 1] * picture[y, x]
            want[row, column] = np.rint(total)
    found = blurred(picture, sigma)
    assert np.abs(found.astype(int) - want).max() <= 1
    assert (found != want).mean() < 0.01
    if sigma == 0.1:
        assert np.array_equal(found, picture), "a Gaussian so narrow leaves the pixels alone"


def test_compression_is_a_jpeg_file_of_the_quality() -> None:
    picture = pair(rows=32, columns=32)[0]
    file = io.BytesIO()
    Image.fromarray(picture).save(file, "JPEG", quality=70)
    assert np.array_equal(compressed(picture, 70), np.asarray(Image.open(file)))
    error = [np.abs(compressed(picture, quality).astype(int) - picture).mean() for quality in (95, 75, 50)]
    assert error == sorted(error)
    assert error[0] > 0


def test_strengths_are_within_their_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    from m3diff.models import blip2idc_model as augmentation

    seen: dict[str, list[float]] = {"sigma": [], "quality": []}

    def note(name: str):
        return lambda picture, strength: (seen[name].append(strength), picture)[1]

    monkeypatch.setattr(augmentation, "blurred", note("sigma"))
    monkeypatch.setattr(augmentation, "compressed", note("quality"))
    augment = Augment(blur=1.0, sigma=(0.2, 0.4), jpeg=1.0, quality=(80, 82))
    for row in range(200):
        augmented(augment, pair(), visit(row))
    assert 0.2 <= min(seen["sigma"]) < 0.22
    assert 0.38 < max(seen["sigma"]) <= 0.4
    assert set(seen["quality"]) == {80, 81, 82}


def test_the_family_augments_as_its_settings_say_and_m3diff_not_at_all() -> None:
    augment = FAMILIES["blip2idc"].augment
    assert augment is not None
    images = pair()
    assert augment(blip2_settings(), images, visit(1)) is images, "null: not at all"
    found = augment(blip2_settings(augment=ALWAYS), images, visit(1))
    assert np.array_equal(found, augmented(ALWAYS, images, visit(1)))
    assert FAMILIES["m3diff"].augment is None
