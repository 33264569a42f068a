"""Training curves as pictures: which trainings curves.csv holds, what each chart shows, and values that are odd."""

import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path

import pytest

from m3diff.records.errors import DataError
from m3diff.report import curves
from m3diff.report.curves import (
    LEFT_MARGIN,
    MAX_RANGES,
    NAME_LETTERS,
    PLOT_HEIGHT,
    RIGHT_MARGIN,
    TOP_MARGIN,
    WIDTH,
    Chart,
    Point,
    Series,
    choose_log_ticks,
    choose_round_ticks,
    combine_into_ranges,
    draw_chart,
    draw_phase,
    draw_picture,
    first_and_last_loss,
    further_charts,
    main_charts,
    make_line,
    read_phases,
    tick_label,
)
from tests.errors import raises

HEAD = "step,epoch,loss,lr_vision,lr_module,lr_llm,grad_norm,module_score/4,val_loss,val_loss_a,val_loss_b,val_cider"
ROWS = [
    "1,0.3,4.0,0.1,0,0.1,2.0,0.5,,,,",
    "2,0.7,2.0,0.2,0,0.2,1.0,,3.0,2.5,3.5,",
    "3,1.0,0.5,0.1,0,0.1,1.0,0.6,1.0,0.5,1.5,0.25",
]


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    def write_file(*rows: str, head: str = HEAD) -> Path:
        path = tmp_path / "curves.csv"
        path.write_text("\n".join([head, *rows]) + "\n")
        return path

    return write_file


def chart_of(phase: curves.Phase, title: str) -> curves.Chart:
    (chart,) = [chart for chart in (*main_charts(phase), *further_charts(phase)) if chart.title == title]
    return chart


def test_a_run_of_one_training_has_its_points_by_column(write):
    (phase,) = read_phases(write(*ROWS))
    assert phase.name == "Fine-tuning"
    assert phase.steps == 3
    assert phase.points("loss") == [Point(1, 4.0), Point(2, 2.0), Point(3, 0.5)]
    assert phase.points("val_cider") == [Point(3, 0.25)]


def test_an_alignment_before_the_fine_tuning_is_a_training_of_its_own(write):
    alignment = ["-2,0.3,9.0,,,,,,,,,", "-1,0.6,8.0,,,,,,,,,", "0,1.0,7.0,,,,,,,,,"]
    alignment_phase, fine_tuning_phase = read_phases(write(*alignment, *ROWS))
    assert alignment_phase.name == "Alignment"
    assert alignment_phase.steps == 3
    assert alignment_phase.points("loss") == [Point(1, 9.0), Point(2, 8.0), Point(3, 7.0)]
    assert fine_tuning_phase.name == "Fine-tuning"
    assert fine_tuning_phase.steps == 3
    assert fine_tuning_phase.points("loss")[0] == Point(1, 4.0)


def test_the_loss_has_training_validation_and_each_dataset_on_a_logarithmic_scale(write):
    (phase,) = read_phases(write(*ROWS))
    chart = chart_of(phase, "Loss")
    assert [line.name for line in chart.series] == ["training", "validation", "validation, a", "validation, b"]
    assert chart.is_log


@pytest.mark.parametrize(
    ("losses", "is_log"), [((4, 0.5), True), ((2, 1), False), ((4, 0), False), ((4, -0.5), False)], ids=str
)
def test_a_loss_that_is_not_positive_or_hardly_falls_has_a_linear_scale(write, losses, is_log):
    (phase,) = read_phases(write(*(f"{step},{loss}" for step, loss in enumerate(losses, 1)), head="step,loss"))
    assert chart_of(phase, "Loss").is_log is is_log
    assert draw_phase(phase).charts


def test_the_cider_of_validation_is_shown_times_100_with_dots(write):
    (phase,) = read_phases(write(*ROWS))
    (line,) = chart_of(phase, "CIDEr of validation pairs").series
    assert line.points == [Point(3, 25.0)]
    assert line.has_dots


def test_the_exact_match_of_validation_answers_is_shown_in_percent(write):
    (phase,) = read_phases(write("1,2.0,", "2,1.0,0.25", head="step,loss,val_match"))
    (line,) = chart_of(phase, "Exact match of answers").series
    assert line.points == [Point(2, 25.0)]
    assert chart_of(phase, "CIDEr of validation pairs").series == []
    assert draw_phase(phase).numbers == [("step", "training loss", "exact match, %"), ("2", "1.0000", "25.0")]


def test_parts_of_equal_rates_share_a_line_and_a_frozen_part_has_none(write):
    (phase,) = read_phases(write(*ROWS))
    assert [line.name for line in chart_of(phase, "Learning rate").series] == ["vision and llm"]


def test_values_of_every_step_are_lines_without_dots_on_a_linear_scale(write):
    (phase,) = read_phases(write(*ROWS))
    for title in ("Learning rate", "Norm of the gradients"):
        chart = chart_of(phase, title)
        assert not chart.is_log
        assert [line.has_dots for line in chart.series] == [False]


def test_a_column_without_values_has_no_chart(write):
    (phase,) = read_phases(write("1,2.0", "2,1.0", head="step,loss"))
    drawn = draw_phase(phase)
    assert len(drawn.charts) == 1
    assert drawn.more_charts == []
    assert drawn.numbers == []


def test_a_long_training_is_drawn_in_ranges_that_keep_every_peak(write):
    losses = [1.0] * 20_000
    losses[12_345] = 50.0
    losses[777] = 0.01
    (phase,) = read_phases(write(*(f"{step},{loss}" for step, loss in enumerate(losses, 1)), head="step,loss"))
    (line,) = chart_of(phase, "Loss").series
    assert len(line.ranges) <= MAX_RANGES
    assert max(part.high for part in line.ranges) == 50.0
    assert min(part.low for part in line.ranges) == 0.01
    (svg,) = draw_phase(phase).charts
    assert len(svg) < 12_000
    assert "highest 50 at step" in svg


@pytest.mark.parametrize("count", [1, 2, MAX_RANGES, MAX_RANGES + 1, 10 * MAX_RANGES + 7])
def test_ranges_hold_all_points_in_order(count):
    points = [Point(step, float(step % 7)) for step in range(1, count + 1)]
    ranges = combine_into_ranges(points)
    assert len(ranges) <= MAX_RANGES
    assert max(part.high for part in ranges) == max(point.value for point in points)
    steps = [part.step for part in ranges]
    assert steps == sorted(steps)


@pytest.mark.parametrize("odd", ["nan", "inf", "-inf"])
def test_a_value_that_is_no_finite_number_is_counted_and_not_drawn(write, odd):
    (phase,) = read_phases(write("1,2.0", f"2,{odd}", "3,1.0", head="step,loss"))
    assert phase.points("loss") == [Point(1, 2.0), Point(3, 1.0)]
    drawn = draw_phase(phase)
    assert drawn.not_finite == 1
    assert "nan" not in str(drawn.charts).lower()
    assert "inf " not in str(drawn.charts).lower()


def test_a_training_whose_every_loss_is_nan_has_no_chart(write):
    path = write("1,nan", "2,nan", head="step,loss")
    (phase,) = read_phases(path)
    assert draw_phase(phase).charts == []
    assert draw_picture(path).svg == ""


@pytest.mark.parametrize("value", ["0", "1", "-3", "1e-9", "1e12"])
def test_a_training_of_one_step_is_a_dot(write, value):
    (phase,) = read_phases(write(f"1,{value}", head="step,loss"))
    drawn = draw_phase(phase)
    assert drawn.title == "Fine-tuning, 1 step"
    (svg,) = drawn.charts
    positions = {
        circle.get("cx"): float(circle.get("cy") or "nan") for circle in ElementTree.fromstring(svg).iter("circle")
    }
    assert len(positions) == 2, "the dot and the one of the legend"
    assert all(0 < y < 400 for y in positions.values())
    assert list(ElementTree.fromstring(svg).iter("path")) == [], "one point is no line"


def test_a_file_without_rows_has_no_training(write):
    path = write()
    assert read_phases(path) == []
    assert draw_picture(path).svg == ""


@pytest.mark.parametrize(
    ("row", "column"), [("x,1.0", "step"), (",1.0", "step"), ("nan,1.0", "step"), ("1,lots", "loss")], ids=str
)
def test_a_cell_that_is_no_number_is_named_with_file_line_and_column(write, row, column):
    path = write("1,2.0", row, head="step,loss")
    value = row.split(",")[0 if column == "step" else 1]
    with raises(DataError, "scoring.curve_value_no_number", path=path, line=3, field=column, value=value):
        read_phases(path)


def test_names_of_datasets_cannot_become_markup(write):
    name = '<script>alert("1")</script>&'
    path = write("1,2.0,1.0,1.0,1.0", head=f"""step,loss,val_loss,val_loss_b,"val_loss_{name.replace('"', '""')}\"""")
    (phase,) = read_phases(path)
    (svg,) = draw_phase(phase).charts
    assert "<script" not in svg
    assert any(name in (text.text or "") for text in ElementTree.fromstring(svg).iter("text"))


def test_each_chart_says_its_first_last_and_extreme_values_in_words(write):
    (phase,) = read_phases(write(*ROWS))
    svg = draw_phase(phase).charts[0]
    words = ElementTree.fromstring(svg).get("aria-label") or ""
    assert "training: 4 at step 1, 0.5 at step 3, lowest 0.5 at step 3, highest 4 at step 1." in words
    assert ElementTree.fromstring(svg).get("role") == "img"


def test_the_table_of_validations_ends_with_the_last_one_however_many_there_are(write):
    rows = [f"{step},{1 / step},{2 / step},{step / 1000}" for step in range(1, 101)]
    (phase,) = read_phases(write(*rows, head="step,loss,val_loss,val_cider"))
    head, *table = draw_phase(phase).numbers
    assert head == ("step", "training loss", "validation loss", "CIDEr, times 100")
    assert len(table) <= curves.MAX_ROWS
    assert table[-1] == ("100", "0.0100", "0.0200", "10.0")


def test_the_table_of_validations_follows_the_steps_and_leaves_absent_scores_open(write):
    steps = (8, 64, 100, 1000, 20_000)
    rows = [f"{step},2.0,{step / 1000}," for step in steps]
    (phase,) = read_phases(write(*rows, "200,,,0.5", head="step,loss,val_loss,val_cider"))
    _, *table = draw_phase(phase).numbers
    assert [cells[0] for cells in table] == ["8", "64", "100", "200", "1,000", "20,000"]
    assert table[2] == ("100", "2.0000", "0.1000", "–")
    assert table[3] == ("200", "–", "–", "50.0")


def test_the_picture_alone_has_its_colours_for_light_and_dark_and_fetches_nothing(write):
    path = write("0,1.0,9.0,,,,,,,,,", *ROWS)
    drawn = draw_picture(path)
    root = ElementTree.fromstring(drawn.svg)
    style = next(root.iter("{http://www.w3.org/2000/svg}style")).text or ""
    assert "prefers-color-scheme: dark" in style
    charts = [svg for svg in root.iter("{http://www.w3.org/2000/svg}svg") if svg.get("role") == "img"]
    assert len(charts) == 4, "the loss of the alignment; loss, CIDEr and learning rate of the fine-tuning"
    assert "http" not in drawn.svg.replace("http://www.w3.org/2000/svg", "")
    assert drawn.words.index("Alignment: Loss") < drawn.words.index("Fine-tuning: Loss")


def test_the_first_and_last_tenth_say_how_far_the_loss_fell(write):
    rows = [f"{step},{4 if step <= 10 else 1}" for step in range(1, 101)]
    (phase,) = read_phases(write(*rows, head="step,loss"))
    assert first_and_last_loss(phase) == (4.0, 1.0)
    (empty,) = read_phases(write("1,", head="step,loss"))
    assert first_and_last_loss(empty) is None


# Where the lines of a chart are


def coordinates(path: str) -> list[tuple[float, float]]:
    """Return the points of an SVG path that consists of straight lines."""
    points = path.removeprefix("M").removesuffix("Z").split("L")
    return [(float(x), float(y)) for x, y in (point.split() for point in points)]


def path_of(chart: Chart, kind: str) -> list[tuple[float, float]]:
    """Return the points of the only line or band of a chart."""
    elements = ElementTree.fromstring(draw_chart(chart)).iter("path")
    (path,) = [element.get("d") or "" for element in elements if (element.get("class") or "").startswith(kind)]
    return coordinates(path)


BOTTOM = TOP_MARGIN + PLOT_HEIGHT
MIDDLE = TOP_MARGIN + PLOT_HEIGHT / 2
RIGHT = WIDTH - RIGHT_MARGIN
CENTRE = (LEFT_MARGIN + RIGHT) / 2


def test_a_line_goes_from_the_first_step_at_the_left_to_the_last_at_the_right():
    chart = Chart("a", "b", [make_line("c", [Point(1, 0.0), Point(2, 1.0), Point(3, 2.0)])], steps=3)
    start, centre, end = path_of(chart, "line s0")[:3]
    assert [x for x, _ in (start, centre, end)] == [LEFT_MARGIN, CENTRE, RIGHT]
    assert start[1] == BOTTOM, "zero is at the bottom"
    assert TOP_MARGIN < end[1] < TOP_MARGIN + 0.1 * PLOT_HEIGHT
    assert centre[1] == pytest.approx((start[1] + end[1]) / 2, abs=0.1)


def test_a_value_and_its_tick_have_the_same_height():
    points = [Point(1, 0.0), Point(2, 2.0), Point(3, 4.0)]
    chart = Chart("a", "b", [make_line("c", points)], steps=3)
    svg = ElementTree.fromstring(draw_chart(chart))
    grid = [float(line.get("y1") or "nan") for line in svg.iter("line") if line.get("class") == "grid"]
    assert grid == [y for _, y in path_of(chart, "line s0")]
    labels = {float(text.get("y") or "nan"): text.text for text in svg.iter("text")}
    assert [labels[y + 4] for y in grid] == ["0", "2", "4"]


def test_two_points_are_a_line_and_the_values_of_a_loss_fill_the_height():
    chart = Chart("a", "b", [make_line("c", [Point(1, 8.0), Point(2, 6.0)])], steps=2, starts_at_zero=False)
    (_, top), (_, bottom) = path_of(chart, "line s0")
    assert top - TOP_MARGIN == pytest.approx(BOTTOM - bottom, abs=0.1)
    assert bottom - top > 0.9 * PLOT_HEIGHT


def test_equal_factors_have_equal_distances_on_a_logarithmic_scale():
    points = [Point(1, 100.0), Point(2, 10.0), Point(3, 1.0)]
    chart = Chart("a", "b", [make_line("c", points)], steps=3, is_log=True, starts_at_zero=False)
    assert path_of(chart, "line s0")[:3] == [(LEFT_MARGIN, TOP_MARGIN), (CENTRE, MIDDLE), (RIGHT, BOTTOM)]


def test_a_band_goes_along_the_highest_values_and_back_along_the_lowest():
    points = [Point(step, float(step % 2)) for step in range(1, 2 * MAX_RANGES + 1)]
    line = make_line("c", points, has_dots=True)
    assert not line.has_dots, "too many points for dots"
    corners = path_of(Chart("a", "b", [line], steps=len(points)), "band")
    upper_edge = corners[:MAX_RANGES]
    lower_edge = corners[MAX_RANGES:]
    assert [x for x, _ in upper_edge] == sorted(x for x, _ in upper_edge)
    assert [x for x, _ in lower_edge] == [x for x, _ in reversed(upper_edge)]
    assert {y for _, y in lower_edge} == {BOTTOM}
    assert max(y for _, y in upper_edge) < TOP_MARGIN + 0.1 * PLOT_HEIGHT


def test_a_long_name_is_cut_in_the_legend_and_a_short_one_is_not():
    names = ["x" * NAME_LETTERS, "y" * (NAME_LETTERS + 1)]
    svg = draw_chart(Chart("a", "b", [make_line(name, [Point(1, 1.0), Point(2, 2.0)]) for name in names], steps=2))
    texts = [element.text or "" for element in ElementTree.fromstring(svg).iter("text")]
    assert [text for text in texts if text[0] in "xy"] == [names[0], f"{names[1][: NAME_LETTERS - 1]}…"]


def test_a_series_of_one_point_is_described_once():
    svg = draw_chart(Chart("a", "b", [Series("c", [Point(1, 0.25)])], steps=1))
    assert (ElementTree.fromstring(svg).get("aria-label") or "").endswith(". c: 0.25 at step 1.")


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0, 1, [0, 0.5, 1]),
        (1, 1000, [500, 1000]),
        (0, 4, [0, 1, 2, 3, 4]),
        (-2, 2, [-2, -1, 0, 1, 2]),
        (0, 7e-5, [0, 2e-5, 4e-5, 6e-5]),
    ],
    ids=str,
)
def test_linear_ticks_are_round_values_within_the_axis(low, high, ticks):
    assert choose_round_ticks(low, high, 4) == pytest.approx(ticks)


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0.4, 6, [0.5, 1, 2, 5]),
        (1, 1000, [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000]),
        (0.02, 3000, [0.1, 1, 10, 100, 1000]),
    ],
    ids=str,
)
def test_logarithmic_ticks_are_powers_of_ten_and_few_of_them_have_ticks_between(low, high, ticks):
    assert choose_log_ticks(low, high) == pytest.approx(ticks)


TICK_LABELS = {0: "0", 0.2: "0.2", 999: "999", 1000: "1,000", 99_500: "99,500", 100_000: "100k", -2000: "-2,000"}
TICK_LABELS |= {0.0125: "0.0125", 1.5e-4: "1.5e-4", 1.5e-5: "1.5e-5", 2e-5: "2e-5"}


@pytest.mark.parametrize(("value", "label"), TICK_LABELS.items())
def test_the_label_of_a_tick_is_short(value, label):
    assert tick_label(value) == label


def test_the_charts_of_a_picture_stand_in_rows_by_training_without_overlap(write):
    drawn = draw_picture(write("0,1.0,9.0,,,,,,,,,", *ROWS))
    root = ElementTree.fromstring(drawn.svg)
    boxes = []
    for svg in root.iter("{http://www.w3.org/2000/svg}svg"):
        if svg.get("role") == "img":
            boxes.append([float(svg.get(name) or "nan") for name in ("x", "y", "width", "height")])
    alignment, *fine_tuning = boxes
    assert alignment[:2] == [20, 20]
    assert [x for x, *_ in fine_tuning] == [20 + number * (WIDTH + 20) for number in range(3)]
    assert {y for _, y, *_ in fine_tuning} == {alignment[1] + alignment[3] + 20}
    assert max(x + width for x, _, width, _ in boxes) + 20 == float(root.get("width") or "nan")
    assert max(y + height for _, y, _, height in boxes) + 20 == float(root.get("height") or "nan")


def test_the_levels_of_a_module_have_a_line_each(write):
    head = "step,loss,module_update_ratio,module_score/4,module_score/17"
    (phase,) = read_phases(write("1,2.0,0.1,0.2,0.3", head=head))
    assert [line.name for line in chart_of(phase, "Update of the module").series] == ["module"]
    assert [line.name for line in chart_of(phase, "Score of the module").series] == ["level 4", "level 17"]
