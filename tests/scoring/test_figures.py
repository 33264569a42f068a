import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from m3diff.records.errors import DataError
from m3diff.stages.evaluate.report.figures import (
    BOTTOM,
    HEIGHT,
    LEFT,
    MAX_POINTS,
    MAX_PX,
    RIGHT,
    TOP,
    WIDTH,
    Line,
    SaliencyMaps,
    chart,
    load_small,
    log_ticks,
    short,
    smooth,
    thin,
    ticks,
)
from tests.scoring import bench


def saliency(tmp_path: Path, *maps: np.ndarray) -> SaliencyMaps:
    np.savez(tmp_path / "a.npz", ids=np.array([str(i) for i in range(len(maps))]), maps=np.float16(maps))
    return SaliencyMaps(tmp_path / "a.npz")


def spot(row: int, column: int, value: float = 1.0) -> np.ndarray:
    grid = np.zeros((8, 8))
    grid[row, column] = value
    return grid


def test_a_large_image_is_shown_small_and_upright(tmp_path: Path):
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    Image.new("RGB", (1000, 500)).save(tmp_path / "large.jpg", exif=exif)
    path = tmp_path / "large.jpg"
    assert load_small(path, bench.digest(path)).size == (MAX_PX // 2, MAX_PX)
    path = bench.paint(tmp_path / "small.png", (1, 2, 3))
    assert load_small(path, bench.digest(path)).getpixel((0, 0)) == (1, 2, 3)


def test_an_image_that_changed_since_ingest_is_refused(tmp_path: Path):
    path = bench.paint(tmp_path / "a.png", (1, 2, 3))
    known = bench.digest(path)
    bench.paint(path, (1, 2, 4))
    with pytest.raises(DataError, match=r"a.png: .* changed since ingest; run `dvc repro`"):
        load_small(path, known)


def test_an_image_that_cannot_be_shown_is_named(tmp_path: Path):
    (tmp_path / "broken.png").write_bytes(b"\x89PNG")
    for name in ("broken.png", "missing.png"):
        with pytest.raises(DataError, match=name):
            load_small(tmp_path / name, bench.digest(tmp_path / name))


@pytest.mark.parametrize(
    ("low", "high", "count", "expected"),
    [(0, 100, 5, [0, 20, 40, 60, 80, 100]), (0, 0.0011, 4, [0, 0.0005, 0.001]), (0, 7, 4, [0, 2, 4, 6])],
)
def test_ticks_are_round(low: float, high: float, count: int, expected: list[float]):
    assert ticks(low, high, count) == pytest.approx(expected)


def test_log_ticks_are_ones_twos_and_fives():
    assert log_ticks(0.09, 3) == pytest.approx([0.1, 0.2, 0.5, 1, 2])


def test_a_chart_draws_each_line_within_its_frame():
    svg = chart([Line("a", [(1, 3.0), (2, 0.3)], "main"), Line("b", [(2, 0.5)], "second", dots=True)], "Loss", log=True)
    (first,) = re.findall(r'class="line main" d="M([\d.]+) ([\d.]+)L([\d.]+) ([\d.]+)"', svg)
    x1, y1, x2, y2 = map(float, first)
    assert x1 < x2
    assert y1 < y2  # a falling loss goes down the page
    assert svg.count("<circle") == 1


@pytest.mark.parametrize("log", [True, False])
def test_curves_of_one_step_or_of_noughts_can_be_drawn(log: bool):
    assert "svg" in chart([Line("a", [(1, 0.5)], "main")], "Loss", log)
    drawn = chart([Line("a", [(1, 0.0), (2, 0.0)], "main")], "Loss", log)
    assert bool(drawn) is not log  # nothing of it can stand on a log scale


def test_many_points_are_thinned_to_means():
    points = [(float(x), float(x % 2)) for x in range(10 * MAX_POINTS)]
    thinned = thin(points)
    assert len(thinned) == MAX_POINTS
    assert thinned[0] == (9.0, 0.5)


def test_smoothing_is_the_mean_of_the_last_points():
    assert smooth([(1, 1.0), (2, 3.0), (3, 5.0), (4, 7.0)], fraction=0.5) == [(1, 1.0), (2, 2.0), (3, 4.0), (4, 6.0)]


def test_smoothing_takes_three_in_a_hundred_points_and_at_least_one():
    points = [(float(x), float(x)) for x in range(100)]
    assert smooth(points)[50] == (50.0, 49.0)
    assert smooth(points[:3]) == points[:3]


def test_a_file_without_maps_has_none(tmp_path: Path):
    np.savez(tmp_path / "a.npz", ids=np.array([], dtype=str), maps=np.zeros((0, 4, 4), np.float16))
    maps = SaliencyMaps(tmp_path / "a.npz")
    assert len(maps) == 0
    assert maps.of("0") is None
    assert len(saliency(tmp_path, spot(1, 1), spot(2, 2))) == 2


def test_each_pair_has_its_own_map_and_another_has_none(tmp_path: Path):
    maps = saliency(tmp_path, spot(0, 0), spot(7, 7), spot(0, 7))
    for pair, place in (("0", (0, 0)), ("1", (7, 7)), ("2", (0, 7))):
        grid = maps.of(pair)
        assert grid is not None
        assert grid.shape == (8, 8)
        assert grid[place] == grid.sum() == 1
    assert maps.of("unknown") is None


def places(svg: str, kind: str) -> list[tuple[float, float]]:
    (path,) = re.findall(rf'class="line {kind}" d="M([^"]+)"', svg)
    return [tuple(map(float, point.split())) for point in path.split("L")]


def test_points_of_a_chart_stand_where_their_values_are():
    svg = chart([Line("a", [(0, 0.0), (5, 50.0), (10, 100.0)], "main")], "Rate")
    (x0, y0), (x1, y1), (x2, y2) = places(svg, "main")
    assert (x0, x2, y0) == (LEFT, WIDTH - RIGHT, HEIGHT - BOTTOM)
    assert x1 == pytest.approx((x0 + x2) / 2)
    assert y1 == pytest.approx((y0 + y2) / 2, abs=0.1)
    assert y2 == pytest.approx(TOP + (1 - 1 / 1.05) * (HEIGHT - BOTTOM - TOP), abs=0.1)  # a little air above


def test_on_a_log_scale_equal_factors_are_equal_ways():
    svg = chart([Line("a", [(0, 100.0), (1, 10.0), (2, 1.0), (3, 0.0)], "main")], "Loss", log=True)
    points = places(svg, "main")
    assert len(points) == 3  # zero has no place
    assert [y for _, y in points] == pytest.approx([TOP, (TOP + HEIGHT - BOTTOM) / 2, HEIGHT - BOTTOM])
    assert re.findall(r'class="tick end"[^>]*>([^<]+)<', svg) == ["1", "2", "5", "10", "20", "50", "100"]


def test_only_a_line_with_dots_has_them_and_the_chart_has_its_name():
    svg = chart([Line("a", [(1, 1.0), (2, 2.0)], "main"), Line("b", [(1, 1.0)], "third", dots=True)], "Loss")
    assert re.findall(r'<circle class="(\w+)"', svg) == ["third"]
    assert 'aria-label="Loss"' in svg
    assert chart([], "Loss") == chart([Line("a", [], "main")], "Loss") == ""


@pytest.mark.parametrize(("value", "text"), [(0, "0"), (0.0005, "0.0005"), (0.00002, "2e-5"), (1.5, "1.5"), (20, "20")])
def test_tick_labels_are_short(value: float, text: str):
    assert short(value) == text


def test_few_points_are_not_thinned():
    points = [(float(x), float(x)) for x in range(MAX_POINTS)]
    assert thin(points) == points
    assert len(thin([*points, (400.0, 0.0)])) == MAX_POINTS / 2 + 1


CHART = """
<svg viewBox="0 0 560 260" role="img" aria-label="Rate" class="chart">
<line class="grid" x1="52" x2="544" y1="230.0" y2="230.0"/>
<text class="tick end" x="44" y="234.0">0</text>
<line class="grid" x1="52" x2="544" y1="127.1" y2="127.1"/>
<text class="tick end" x="44" y="131.1">1</text>
<line class="grid" x1="52" x2="544" y1="24.3" y2="24.3"/>
<text class="tick end" x="44" y="28.3">2</text>
<text class="tick mid" x="52.0" y="252">0</text>
<text class="tick mid" x="175.0" y="252">1</text>
<text class="tick mid" x="298.0" y="252">2</text>
<text class="tick mid" x="421.0" y="252">3</text>
<text class="tick mid" x="544.0" y="252">4</text>
<path class="line main" d="M175.0 178.6L544.0 24.3"/>
<path class="line second" d="M544.0 127.1"/>
<circle class="second" cx="544.0" cy="127.1" r="3"/>
</svg>
"""


def test_a_small_chart_is_drawn_stroke_by_stroke():
    svg = chart([Line("a", [(1, 0.5), (4, 2.0)], "main"), Line("b", [(4, 1.0)], "second", dots=True)], "Rate")
    assert svg.replace("><", ">\n<") == CHART.strip()
