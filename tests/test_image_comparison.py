"""Test the comparison of a pair's images: what is a copy, a change, or a change that the model cannot see."""

import hashlib
import io
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from PIL import Image, ImageDraw

from m3diff.images import compare
from m3diff.images.compare import CHANGED, EQUAL, FAINT, NOISE, compare_images, compare_pairs

Edit = Callable[[Image.Image], Image.Image]


def draw_scene(number: int, size: tuple[int, int] = (160, 120)) -> Image.Image:
    """Draw an image like a photo: a gradient with noise, and boxes at positions that depend on the number."""
    random = np.random.default_rng(number)
    width, height = size
    slope = np.add.outer(np.linspace(40, 140, height), np.linspace(0, 60, width))
    grain = random.normal(0, 4, (height, width, 3))
    image = Image.fromarray(np.clip(slope[..., None] + random.integers(0, 40, 3) + grain, 0, 255).astype(np.uint8))
    draw = ImageDraw.Draw(image)
    for _ in range(5):
        box_left, box_top = (int(value) for value in random.integers(0, (width - 30, height - 30)))
        draw.rectangle(
            (box_left, box_top, box_left + 24, box_top + 20),
            fill=tuple(int(value) for value in random.integers(0, 256, 3)),
        )
    return image


def save_image(image: Image.Image, path: Path, **options: object) -> str:
    image.save(path, **options)
    return str(path)


def reencode(image: Image.Image, kind: str, **options: object) -> Image.Image:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return Image.open(buffer).convert("RGB")


SAVED_AGAIN: dict[str, tuple[str, dict[str, object], Edit]] = {
    "PNG of another compression": ("png", {"compress_level": 1}, lambda image: image),
    "BMP": ("bmp", {}, lambda image: image),
    "JPEG of quality 30": ("jpg", {"quality": 30}, lambda image: image),
    "JPEG of quality 75, progressive": ("jpg", {"quality": 75, "progressive": True}, lambda image: image),
    "JPEG of quality 95": ("jpg", {"quality": 95}, lambda image: image),
    "JPEG without subsampling": ("jpg", {"quality": 80, "subsampling": 0}, lambda image: image),
    "JPEG of a JPEG": ("jpg", {"quality": 60}, lambda image: reencode(image, "JPEG", quality=90)),
    "WebP": ("webp", {"quality": 80}, lambda image: image),
    "GIF": ("gif", {}, lambda image: image),
    "one level lighter": ("png", {}, lambda image: image.point(lambda value: min(255, value + 1))),
    "90 % of the size": ("png", {}, lambda image: image.resize((144, 108), Image.Resampling.BICUBIC)),
    "70 % of the size as JPEG": (
        "jpg",
        {"quality": 85},
        lambda image: image.resize((112, 84), Image.Resampling.LANCZOS),
    ),
}


@pytest.mark.parametrize("case", SAVED_AGAIN)
def test_an_image_that_was_only_saved_again_shows_no_change(tmp_path, case):
    suffix, options, edit = SAVED_AGAIN[case]
    before = draw_scene(1)
    if case == "JPEG of a JPEG":
        before = edit(before)
    original = save_image(before, tmp_path / "before.png")
    copy = save_image(before if case == "JPEG of a JPEG" else edit(before), tmp_path / f"after.{suffix}", **options)
    assert compare_images(original, copy, 100) in (EQUAL, NOISE)
    assert compare_images(copy, original, 100) in (EQUAL, NOISE)


def shift_region(region_left: int, region_top: int, width: int, height: int, shift: int) -> Edit:
    def edit(image: Image.Image) -> Image.Image:
        pixels = np.asarray(image).astype(np.int16)
        region = pixels[region_top : region_top + height, region_left : region_left + width]
        pixels[region_top : region_top + height, region_left : region_left + width] = region + (
            shift if region.mean() < 128 else -shift
        )
        return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))

    return edit


def draw_text(text: str) -> Edit:
    def edit(image: Image.Image) -> Image.Image:
        copy = image.copy()
        ImageDraw.Draw(copy).text((20, 20), text, fill="white")
        return copy

    return edit


def recolor(image: Image.Image) -> Image.Image:
    """Paint a box of 6x6 pixels in another colour of the same brightness."""
    bands = list(image.split())
    bands[0].paste(200, (70, 50, 76, 56))
    bands[2].paste(20, (70, 50, 76, 56))
    return Image.merge("RGB", bands)


CHANGES: dict[str, Edit] = {
    "an object of 5x5 pixels": shift_region(71, 43, 5, 5, 60),
    "a thin line": shift_region(30, 61, 60, 1, 60),
    "a faint object of 10x10": shift_region(50, 50, 10, 10, 12),
    "another colour": recolor,
    "a letter": draw_text("F"),
    "three levels lighter": lambda image: image.point(lambda value: min(255, value + 3)),
    "a faint shadow on a half": shift_region(0, 0, 80, 120, 5),
    "without its colours": lambda image: image.convert("L").convert("RGB"),
    "half the size": lambda image: image.resize((80, 60)),
    "cut at a side": lambda image: image.crop((20, 0, 160, 120)),
    "turned": lambda image: image.transpose(Image.Transpose.ROTATE_90),
    "smeared": lambda image: image.resize((40, 30)).resize((160, 120)),
}


@pytest.mark.parametrize("suffixes", ["png png", "png jpg", "jpg jpg", "png webp"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_small_change_is_not_mistaken_for_noise(tmp_path, change, suffixes):
    before_suffix, after_suffix = suffixes.split()
    before = save_image(
        draw_scene(1), tmp_path / f"before.{before_suffix}", **({"quality": 80} if before_suffix != "png" else {})
    )
    after = save_image(
        CHANGES[change](draw_scene(1)),
        tmp_path / f"after.{after_suffix}",
        **({"quality": 60} if after_suffix != "png" else {}),
    )
    assert compare_images(before, after, 100) in (FAINT, CHANGED)


def test_a_grey_jpeg_of_a_coloured_image_is_a_change(tmp_path):
    before = save_image(draw_scene(1), tmp_path / "before.png")
    after = save_image(draw_scene(1).convert("L"), tmp_path / "after.jpg", quality=80)
    assert compare_images(before, after, 100) == CHANGED


def test_a_jpeg_of_low_quality_is_a_visible_change(tmp_path):
    before = save_image(draw_scene(1), tmp_path / "before.png")
    after = save_image(draw_scene(1), tmp_path / "after.jpg", quality=25)
    assert compare_images(before, after, 100) == CHANGED


@pytest.mark.parametrize(
    ("edit", "likenesses"),
    [
        (shift_region(70, 101, 6, 6, 60), (FAINT, CHANGED)),
        (lambda image: image.point(lambda value: min(255, value + 1)), (NOISE,)),
    ],
    ids=["a change in the last strip", "one level lighter"],
)
def test_an_image_is_compared_in_all_its_strips_of_rows(edit, likenesses, tmp_path, monkeypatch):
    monkeypatch.setattr(compare, "STRIP_ROWS", 32)
    before = save_image(draw_scene(1), tmp_path / "before.png")
    after = save_image(edit(draw_scene(1)), tmp_path / "after.png")
    assert compare_images(before, after, 100) in likenesses


@pytest.mark.parametrize(
    ("size", "likenesses"),
    [((64, 32), (CHANGED,)), ((32, 64), (CHANGED,)), ((60, 60), (NOISE,)), ((45, 44), (NOISE,))],
    ids=["half as high", "half as wide", "smaller", "rounded"],
)
def test_an_image_of_another_shape_is_a_change_whatever_its_pixels(size, likenesses, tmp_path):
    grey = (120, 120, 120)
    before = save_image(Image.new("RGB", (64, 64), grey), tmp_path / "before.png")
    after = save_image(Image.new("RGB", size, grey), tmp_path / "after.png")
    assert compare_images(before, after, 64) in likenesses
    assert compare_images(after, before, 64) in likenesses


@pytest.mark.parametrize("is_upright", [False, True], ids=["wide", "high"])
def test_the_short_side_of_a_smaller_strip_may_be_rounded(is_upright, tmp_path):
    """The long side of a strip then differs by many pixels from the one that the short side suggests."""
    paths = []
    for size in ((400, 6), (300, 4)):
        strip = Image.new("RGB", size[::-1] if is_upright else size, (120, 120, 120))
        paths.append(save_image(strip, tmp_path / f"{size[0]}.png"))
    assert compare_images(*paths, 64) == NOISE


@pytest.mark.parametrize("size", [(4, 4), (160, 3)], ids=str)
def test_an_image_of_a_few_pixels_is_compared_as_a_whole(tmp_path, size):
    noise = np.random.default_rng(1).integers(0, 240, (*size, 3), dtype=np.uint8)
    before = save_image(Image.fromarray(noise), tmp_path / "before.png")
    lighter = save_image(Image.fromarray(noise + 1), tmp_path / "lighter.png")
    brighter = save_image(Image.fromarray(noise + 9), tmp_path / "brighter.png")
    assert compare_images(before, lighter, 100) == NOISE
    assert compare_images(before, brighter, 100) == CHANGED


@pytest.mark.parametrize(("compare_px", "likeness"), [(25, FAINT), (250, CHANGED)])
def test_a_change_is_faint_only_at_the_resolution_of_the_model(tmp_path, compare_px, likeness):
    image = Image.new("RGB", (500, 375), (90, 60, 30))
    before = save_image(image, tmp_path / "before.png")
    after = save_image(shift_region(250, 250, 3, 3, 120)(image), tmp_path / "after.png")
    assert compare_images(before, after, compare_px) == likeness


# Differences of a patch in levels, for 4x4 of its pixels. The mean exceeds the bound of noise for a window of its size
FAINT_PATCHES = {
    4: [[3, 3, 2, 2]] * 4,
    8: [[1, 2, 1, 2]] * 4,
    16: [[2, 1, 2, 1], *[[1, 1, 1, 1]] * 3],
}


@pytest.mark.parametrize(("side", "differences"), FAINT_PATCHES.items(), ids=FAINT_PATCHES)
def test_a_small_faint_patch_is_no_noise(side, differences, tmp_path):
    """A window of its size exceeds the bound of noise. Smaller and larger windows are within theirs."""
    before = np.full((96, 96, 3), 120, dtype=np.uint8)
    after = before.copy()
    after[::2, ::2] += 1
    patch = np.tile(np.array(differences, dtype=np.uint8), (side // 4, side // 4))
    after[40 : 40 + side, 40 : 40 + side] = 120 + patch[..., None]
    paths = [
        save_image(Image.fromarray(image), tmp_path / name) for name, image in (("a.png", before), ("b.png", after))
    ]
    assert compare_images(*paths, 96) == FAINT


@pytest.mark.parametrize(("differences", "likeness"), [([[0, 1], [1, 2]], NOISE), ([[1, 1], [1, 2]], FAINT)], ids=str)
def test_even_noise_has_a_mean_of_at_most_one_level(differences, likeness, tmp_path):
    before = np.full((96, 96, 3), 120, dtype=np.uint8)
    after = before + np.tile(np.array(differences, dtype=np.uint8), (48, 48))[..., None]
    paths = [
        save_image(Image.fromarray(image), tmp_path / name) for name, image in (("a.png", before), ("b.png", after))
    ]
    assert compare_images(*paths, 96) == likeness


# Pairs of a table, and the cache of their results


@pytest.fixture
def comparisons(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, int]]:
    """Return the comparisons that are made: the names of both images, and the resolution."""
    made_comparisons: list[tuple[str, str, int]] = []

    def compare_and_record(before: str, after: str, compare_px: int) -> str:
        made_comparisons.append((Path(before).name, Path(after).name, compare_px))
        return compare_images(before, after, compare_px)

    monkeypatch.setattr(compare, "compare_images", compare_and_record)
    return made_comparisons


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Return a folder with a plain image, a copy of it, one with a faint speck, and one with a box."""
    plain = Image.new("RGB", (64, 64), (90, 60, 30))
    plain.save(tmp_path / "plain.png")
    (tmp_path / "copy.png").write_bytes((tmp_path / "plain.png").read_bytes())
    shift_region(30, 30, 2, 2, 40)(plain).save(tmp_path / "speck.png")
    shift_region(8, 8, 40, 40, 90)(plain).save(tmp_path / "box.png")
    return tmp_path


def likenesses_of(folder: Path, *pairs: str, compare_px: int = 8) -> list[str]:
    """Return the results for pairs such as "plain box"."""
    rows = []
    for pair in pairs:
        paths = [folder / f"{name}.png" for name in pair.split()]
        rows.append([*map(str, paths), *(hashlib.sha256(path.read_bytes()).digest() for path in paths)])
    table = pl.DataFrame(rows, schema=["before", "after", "before_sha256", "after_sha256"], orient="row")
    return compare_pairs(table, compare_px, folder / "cache.parquet", "test").to_list()


def test_each_pair_has_its_result_in_the_order_of_the_pairs(images, comparisons):
    pairs = ("plain box", "plain copy", "speck plain", "box plain", "plain speck", "copy box")
    assert likenesses_of(images, *pairs) == [CHANGED, EQUAL, FAINT, CHANGED, FAINT, CHANGED]
    assert comparisons == [("plain.png", "box.png", 8), ("speck.png", "plain.png", 8)], "contents once, in any order"


def test_many_pairs_are_compared_by_workers_in_the_same_order(images, monkeypatch):
    monkeypatch.setattr(compare, "MIN_PAIRS_FOR_WORKERS", 2)
    monkeypatch.setattr(compare, "worker_pool", lambda: ThreadPoolExecutor(2))
    assert likenesses_of(images, "speck plain", "plain box") == [FAINT, CHANGED]


def test_a_result_is_reused_for_the_same_contents_and_resolution(images, comparisons):
    assert likenesses_of(images, "plain speck") == [FAINT]
    assert likenesses_of(images, "box plain", "speck copy") == [CHANGED, FAINT]
    assert likenesses_of(images, "plain speck", compare_px=64) == [CHANGED]
    assert likenesses_of(images, "plain speck", "plain box") == [FAINT, CHANGED]
    assert [resolution for _, _, resolution in comparisons] == [8, 8, 64]


@pytest.mark.parametrize("fault", ["another rule", "no parquet", "another column"])
def test_results_that_cannot_be_used_are_computed_again(fault, images, comparisons, monkeypatch):
    likenesses_of(images, "plain speck")
    if fault == "another rule":
        monkeypatch.setattr(compare, "RULE", "another")
    elif fault == "no parquet":
        (images / "cache.parquet").write_bytes(b"PAR1")
    else:
        pl.DataFrame({"low": [1]}).write_parquet(images / "cache.parquet")
    for _ in range(2):
        assert likenesses_of(images, "plain speck") == [FAINT]
    assert len(comparisons) == 2
