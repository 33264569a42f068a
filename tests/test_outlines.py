"""Test what people see: the outlines of a saliency map around the right cells, and small images without blur."""

import numpy as np
import pytest
from PIL import Image

from m3diff.images.enlarge import enlarge
from m3diff.images.saliency import OUTLINE_COLOURS, draw_outlines, region_borders, segment_in_pixels
from tests.tiny import noise_image

GROUND = (90, 120, 90)
THIN_LINE, MEDIUM_LINE, THICK_LINE = OUTLINE_COLOURS.values()


def even(rows: int = 5, columns: int = 5) -> np.ndarray:
    return np.full((rows, columns), 1 / (rows * columns))


def with_shares(row: int, column: int, shares: float) -> np.ndarray:
    grid = even()
    grid[row, column] *= shares
    return grid


def drawn(grid: np.ndarray, size: tuple[int, int] = (100, 100)) -> np.ndarray:
    return np.asarray(draw_outlines(Image.new("RGB", size, GROUND), grid))


def has(picture: np.ndarray, colour: tuple[int, int, int]) -> bool:
    return bool((picture == colour).all(axis=-1).any())


def extent(picture: np.ndarray) -> tuple[int, int, int, int]:
    rows, columns = np.nonzero((picture != GROUND).any(axis=-1))
    return columns.min(), rows.min(), columns.max(), rows.max()


def test_a_map_that_is_even_outlines_nothing():
    assert (drawn(even()) == GROUND).all()
    assert (drawn(with_shares(1, 3, 1.9)) == GROUND).all()
    image = Image.new("RGB", (20, 20), GROUND)
    draw_outlines(image, with_shares(0, 0, 5))
    assert (np.asarray(image) == GROUND).all(), "what is given is not drawn on"


def test_the_outline_is_around_its_cell_and_the_image_stays_inside_and_outside():
    picture = drawn(with_shares(1, 3, 2.5))
    assert extent(picture) == pytest.approx((60, 20, 80, 40), abs=3)
    assert (picture[24:36, 64:76] == GROUND).all()


@pytest.mark.parametrize(
    ("shares", "colours"),
    [(2.0, {THIN_LINE}), (2.9, {THIN_LINE}), (3.1, {MEDIUM_LINE}), (4.0, {THICK_LINE}), (9.0, {THICK_LINE})],
)
def test_the_colour_says_how_many_shares_a_cell_has(shares, colours):
    picture = drawn(with_shares(2, 2, shares))
    assert {colour for colour in OUTLINE_COLOURS.values() if has(picture, colour)} - colours <= {THIN_LINE, MEDIUM_LINE}
    assert all(has(picture, colour) for colour in colours)
    assert has(picture, THICK_LINE) == (THICK_LINE in colours)


def test_neighbours_share_one_outline():
    grid = even()
    grid[1, 1:3] *= 2.5
    sides = list(region_borders(grid * grid.size >= 2))
    assert len(sides) == 6
    assert ((0.4, 0.2), (0.4, 0.4)) not in sides
    inside = np.zeros((2, 4), bool)
    inside[1, 3] = True
    a = (0.75, 0.5)
    b = (1.0, 0.5)
    c = (0.75, 1.0)
    d = (1.0, 1.0)
    assert set(region_borders(inside)) == {(a, b), (c, d), (a, c), (b, d)}


@pytest.mark.parametrize(
    ("size", "grid", "cell", "box"),
    [
        ((100, 50), (5, 5), (2, 4), (80, 15, 100, 35)),
        ((50, 100), (5, 5), (4, 2), (15, 80, 35, 100)),
        *((size, (2, 4), (1, 3), (0.75 * size[0], 0.5 * size[1], *size)) for size in ((100, 50), (50, 100), (80, 80))),
    ],
)
def test_a_square_map_covers_the_padded_square_and_any_other_map_the_image(size, grid, cell, box):
    shares = even(*grid)
    shares[cell] *= 2.5
    assert extent(drawn(shares, size)) == pytest.approx(box, abs=3)


def test_at_the_edge_the_whole_line_is_seen():
    assert segment_in_pixels(((0.0, 0.0), (0.2, 0.0)), (100, 100), 3) == ((2, 2), (20, 2))
    assert segment_in_pixels(((0.8, 1.0), (1.0, 1.0)), (100, 100), 3) == ((80, 97), (97, 97))


@pytest.mark.parametrize(
    ("size", "options", "enlarged_size"),
    [
        ((128, 128), {}, (512, 512)),
        ((40, 60), {}, (520, 780)),
        ((16, 128), {}, (256, 2048)),
        ((100, 4000), {}, (100, 4000)),
        ((300, 10), {"longest_px": 700}, (600, 20)),
    ],
    ids=["128 px", "a portrait", "a strip", "a long strip", "a strip for a narrow page"],
)
def test_a_small_image_is_enlarged_by_whole_pixels(size, options, enlarged_size):
    image = noise_image(1, size)
    enlarged_image = enlarge(image, **options)
    factor = enlarged_size[0] // size[0]
    assert enlarged_image.size == enlarged_size
    assert np.array_equal(np.asarray(enlarged_image), np.asarray(image).repeat(factor, axis=0).repeat(factor, axis=1))


def test_a_large_image_is_not_enlarged():
    image = noise_image(1, (600, 512))
    assert enlarge(image) is image
