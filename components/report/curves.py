"""Draw training curves: train's curves.csv becomes a row of SVG charts for each training phase of the run.

Every run has a fine-tuning phase. An alignment phase may come before it, in which new parts of the model adapt to a
frozen LLM. The alignment's last step has number 0 in the file. The charts of a phase show the training and validation
loss, the CIDEr on captioned validation pairs, and the learning rates. Further charts show the gradient norm and the
contribution of the module, which is the part that the model family adds to the base model.

    curves.csv -> Phase (points by column) -> Chart (series) -> SVG text

Colours are defined in charts.css, which the page includes and `CurvesPicture` embeds. Values that are not finite are
not drawn, and the page reports their number.
"""

import csv
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import NamedTuple

from markupsafe import Markup

from m3diff.records.errors import DataError, data_error_if_unreadable, format_count

ALIGNMENT = "Alignment"
FINE_TUNING = "Fine-tuning"

# A chart is as wide as the screen of a phone, so that its text has the same size as the page's text there
WIDTH = 360
PLOT_HEIGHT = 168
# Margins around the plot in pixels
LEFT_MARGIN = 50  # for the tick labels
RIGHT_MARGIN = 12
TOP_MARGIN = 48  # for the title
BOTTOM_MARGIN = 36  # for the axis of the steps
LEGEND_ROW_HEIGHT = 17  # in pixels
NAME_LETTERS = 46  # maximum number of characters in a row of the legend
MAX_DIGITS = 6  # maximum number of characters of a tick label
STYLES = 5  # number of line styles in charts.css
MAX_RANGES = 120  # maximum number of points of a line; more points are combined into ranges
MAX_DOTS = 40  # a line with more points is drawn without dots
MAX_ROWS = 12  # maximum number of validations in the table of numbers
LOG_SPAN = 5  # a loss that falls by more than this factor is drawn on a logarithmic scale


class Point(NamedTuple):
    """A point of a curve: a training step, and the value of a column at this step."""

    step: float  # starts at 1 in each phase
    value: float


class Range(NamedTuple):
    """Several neighbouring points: their mean step, and the lowest, mean and highest value."""

    step: float
    low: float
    mean: float
    high: float


@dataclass(frozen=True)
class Phase:
    """A training phase of a run. `columns` holds the points with finite values for each column of curves.csv."""

    name: str
    steps: int
    columns: Mapping[str, list[Point]]
    not_finite: int = 0  # number of values that are NaN or infinite

    def points(self, column: str) -> list[Point]:
        """Return the points of a column, or an empty list if curves.csv does not have this column."""
        return self.columns.get(column, [])

    def columns_with_prefix(self, prefix: str) -> dict[str, list[Point]]:
        """Return the columns whose names start with `prefix`, by the rest of their names."""
        return {
            name.removeprefix(prefix): points
            for name, points in self.columns.items()
            if name.startswith(prefix) and points
        }


@dataclass(frozen=True)
class Series:
    """A line of a chart. If the line has many steps, `ranges` is the band around the line."""

    name: str
    points: Sequence[Point]
    ranges: Sequence[Range] = ()
    has_dots: bool = False


@dataclass(frozen=True)
class Chart:
    """A chart of a training phase.

    steps: number of steps of the phase, which is the end of the horizontal axis.
    is_log: whether the vertical axis is logarithmic.
    """

    title: str
    note: str
    series: Sequence[Series]
    steps: int
    is_log: bool = False
    starts_at_zero: bool = True


@dataclass(frozen=True)
class DrawnPhase:
    """The charts and the table of a training phase.

    numbers: header and rows of the table of validations.
    not_finite: number of values that are not drawn because they are NaN or infinite.
    """

    title: str
    charts: list[Markup]
    more_charts: list[Markup]
    numbers: list[tuple[str, ...]]
    not_finite: int = 0


@dataclass
class PhaseRows:
    """The values of a training phase, collected while the file is read."""

    name: str
    steps: list[int] = field(default_factory=list)
    columns: dict[str, list[Point]] = field(default_factory=dict)
    not_finite: int = 0


# Reading


def read_phases(path: Path) -> list[Phase]:
    """Read the training phases of a run, in order, from train's curves.csv.

    Raises:
        DataError: the file cannot be read, or a cell is not a number. The error names file, line and column.
    """
    with (
        data_error_if_unreadable(path, "files.unreadable_stage_output", writer="train"),
        path.open(encoding="utf-8", newline="") as file,
    ):
        rows = list(csv.DictReader(file))
    rows_by_phase: dict[str, PhaseRows] = {}
    for line, row in enumerate(rows, start=2):
        step = int(parse_number(path, line, "step", row.get("step") or ""))
        name = FINE_TUNING if step > 0 else ALIGNMENT
        phase_rows = rows_by_phase.setdefault(name, PhaseRows(name))
        phase_rows.steps.append(step)
        for column, text in row.items():
            if column in (None, "step") or not text:
                continue
            value = parse_number(path, line, column, text)
            if math.isfinite(value):
                phase_rows.columns.setdefault(column, []).append(Point(step, value))
            else:
                phase_rows.not_finite += 1
    return [make_phase(phase_rows) for phase_rows in rows_by_phase.values()]


def parse_number(path: Path, line: int, column: str, text: str) -> float:
    """Return the number in a cell. A step must be finite.

    Raises:
        DataError: the cell does not contain a number. The error names file, line and column.
    """
    try:
        value = float(text)
        if column == "step" and not math.isfinite(value):
            raise ValueError
    except ValueError as error:
        raise DataError("scoring.curve_value_no_number", path=path, line=line, field=column, value=text) from error
    return value


def make_phase(rows: PhaseRows) -> Phase:
    """Convert the collected rows to a training phase with steps counted from 1."""
    offset = min(rows.steps) - 1 if rows.name == ALIGNMENT else 0
    columns = {}
    for name, points in rows.columns.items():
        columns[name] = [Point(point.step - offset, point.value) for point in points]
    return Phase(name=rows.name, steps=max(rows.steps) - offset, columns=columns, not_finite=rows.not_finite)


# Charts


def draw_phase(phase: Phase) -> DrawnPhase:
    """Draw the charts of a training phase, except those without data."""
    return DrawnPhase(
        title=f"{phase.name}, {format_count(phase.steps, 'step')}",
        charts=[draw_chart(chart) for chart in main_charts(phase) if chart.series],
        more_charts=[draw_chart(chart) for chart in further_charts(phase) if chart.series],
        numbers=validation_rows(phase),
        not_finite=phase.not_finite,
    )


def main_charts(phase: Phase) -> list[Chart]:
    """Return the charts of loss, validation scores and learning rates. A chart without data has no series."""
    cider = [Point(point.step, 100 * point.value) for point in phase.points("val_cider")]
    match = [Point(point.step, 100 * point.value) for point in phase.points("val_match")]
    learning_rates = merge_equal_columns(phase.columns_with_prefix("lr_"))
    return [
        loss_chart(phase),
        Chart(
            title="CIDEr of validation pairs",
            note="times 100, at captioned checkpoints",
            series=[make_line("CIDEr", cider, has_dots=True)] if cider else [],
            steps=phase.steps,
        ),
        Chart(
            title="Exact match of answers",
            note="to validation questions, in percent, at captioned checkpoints",
            series=[make_line("exact match", match, has_dots=True)] if match else [],
            steps=phase.steps,
        ),
        Chart(
            title="Learning rate",
            note="by part of the model",
            series=[make_line(name, points) for name, points in learning_rates],
            steps=phase.steps,
        ),
    ]


def loss_chart(phase: Phase) -> Chart:
    """Return the chart of training and validation loss. Its axis is logarithmic if the loss has a wide range."""
    lines = []
    loss = phase.points("loss")
    if loss:
        ranges = combine_into_ranges(loss)
        means = [Point(values.step, values.mean) for values in ranges]
        if len(ranges) < len(loss):
            lines.append(Series("training (band: lowest to highest)", means, ranges))
        else:
            lines.append(Series("training", means, has_dots=len(means) == 1))
    validation = phase.points("val_loss")
    if validation:
        lines.append(make_line("validation", validation, has_dots=True))
    datasets = phase.columns_with_prefix("val_loss_")
    if len(datasets) > 1:  # the line of a single dataset would be the same as the line of all validation pairs
        lines += [make_line(f"validation, {name}", points, has_dots=True) for name, points in datasets.items()]
    values: list[float] = []
    for line in lines:
        values += collect_values(line)
    is_log = bool(values) and min(values) > 0 and max(values) > LOG_SPAN * min(values)
    note = "per supervised token, logarithmic scale" if is_log else "per supervised token"
    return Chart("Loss", note, lines, phase.steps, is_log=is_log, starts_at_zero=False)


def further_charts(phase: Phase) -> list[Chart]:
    """Return the charts of the family's module and of the gradient norm."""
    ratios = phase.columns_with_prefix("module_update_ratio")
    scores = phase.columns_with_prefix("module_score")
    norm = phase.points("grad_norm")
    return [
        Chart(
            title="Update of the module",
            note="size relative to the features that it changes",
            series=[make_line(name_of_level(name), points) for name, points in ratios.items()],
            steps=phase.steps,
        ),
        Chart(
            title="Score of the module",
            note="gate on each level's update, mean of a step",
            series=[make_line(name_of_level(name), points) for name, points in scores.items()],
            steps=phase.steps,
        ),
        Chart(
            title="Norm of the gradients",
            note="before clipping",
            series=[make_line("gradients", norm)] if norm else [],
            steps=phase.steps,
        ),
    ]


def name_of_level(name: str) -> str:
    """Return a line's name in a chart of the module: "level 2" if `name` is "/2", or "module" if it is empty.

    Args:
        name: name of the line's column without the prefix, as returned by `Phase.columns_with_prefix`.
    """
    level = name.strip("/_")
    return f"level {level}" if level else "module"


def merge_equal_columns(columns: Mapping[str, list[Point]]) -> Iterator[tuple[str, list[Point]]]:
    """Yield each line's name and points. Equal columns share a line. Columns of zeros (frozen parts) are left out."""
    names: dict[tuple[Point, ...], list[str]] = {}
    for name, points in columns.items():
        if any(point.value for point in points):
            names.setdefault(tuple(points), []).append(name)
    for shared_points, parts in names.items():
        yield " and ".join(parts), list(shared_points)


def make_line(name: str, points: Sequence[Point], has_dots: bool = False) -> Series:
    """Return a line through the points or, if there are too many, through the means of ranges, with a band."""
    ranges = combine_into_ranges(points)
    if len(ranges) == len(points):
        has_few_points = len(points) <= MAX_DOTS
        return Series(name, points, has_dots=(has_dots and has_few_points) or len(points) == 1)
    means = [Point(values.step, values.mean) for values in ranges]
    return Series(name, means, ranges)


def combine_into_ranges(points: Sequence[Point]) -> list[Range]:
    """Combine points into at most `MAX_RANGES` ranges. Each keeps its lowest and highest value, so no peak is lost."""
    size = max(1, math.ceil(len(points) / MAX_RANGES))
    ranges = []
    for start in range(0, len(points), size):
        neighbours = points[start : start + size]
        values = [point.value for point in neighbours]
        step = statistics.fmean(point.step for point in neighbours)
        ranges.append(Range(step=step, low=min(values), mean=statistics.fmean(values), high=max(values)))
    return ranges


def validation_rows(phase: Phase) -> list[tuple[str, ...]]:
    """Return the header and the rows of the validation table, or an empty list if nothing was validated.

    If there are many validations, they are thinned out evenly.
    """
    columns = {
        "validation loss": phase.points("val_loss"),
        "CIDEr, times 100": phase.points("val_cider"),
        "exact match, %": phase.points("val_match"),
    }
    columns = {name: points for name, points in columns.items() if points}
    steps_with_values: set[float] = set()
    for points in columns.values():
        steps_with_values |= {point.step for point in points}
    steps = sorted(steps_with_values)
    if not steps:
        return []
    stride = math.ceil(len(steps) / MAX_ROWS)
    loss = {point.step: point.value for point in phase.points("loss")}
    rows: list[tuple[str, ...]] = [("step", "training loss", *columns)]
    first_index = (len(steps) - 1) % stride  # so that the last validation is included
    for step in steps[first_index::stride]:
        cells = [f"{step:,.0f}", f"{loss[step]:.4f}" if step in loss else "–"]
        for name, points in columns.items():
            value = next((point.value for point in points if point.step == step), None)
            if value is None:
                cells.append("–")
            elif name == "validation loss":
                cells.append(f"{value:.4f}")
            else:
                cells.append(f"{100 * value:.1f}")
        rows.append(tuple(cells))
    return rows


# Drawing


class Axis(NamedTuple):
    """An axis of a chart: a function from values to positions in pixels, and the values of the ticks."""

    position: Callable[[float], float]
    ticks: list[float]


def draw_chart(chart: Chart, x: float = 0, y: float = 0) -> Markup:
    """Draw a chart as an SVG, either alone or at a position within another SVG.

    Its alternative text contains the first, last and extreme values of each line.
    """
    height = chart_height(chart)
    across = make_step_axis(chart.steps)
    up = make_value_axis(chart)
    parts = [
        f'<svg class="chart" role="img" aria-label="{escape(describe_chart(chart))}" viewBox="0 0 {WIDTH} {height}" '
        f'x="{x:g}" y="{y:g}" width="{WIDTH}" height="{height}">',
        f'<text class="title" x="0" y="16">{escape(chart.title)}</text>',
        f'<text x="0" y="33">{escape(chart.note)}</text>',
        *draw_axes(across, up),
    ]
    for number, series in enumerate(chart.series):
        parts += draw_series(series, number % STYLES, across, up)
    for number, series in enumerate(chart.series):
        parts += draw_legend(series, number)
    return Markup("".join([*parts, "</svg>"]))  # all texts are escaped above


def chart_height(chart: Chart) -> int:
    """Return the height of a chart in pixels, including its legend."""
    return TOP_MARGIN + PLOT_HEIGHT + BOTTOM_MARGIN + LEGEND_ROW_HEIGHT * len(chart.series) + 4


def draw_axes(across: Axis, up: Axis) -> Iterator[str]:
    """Yield the SVG elements of the axes, with grid lines and labels."""
    bottom = TOP_MARGIN + PLOT_HEIGHT
    right = WIDTH - RIGHT_MARGIN
    for tick in up.ticks:
        y = up.position(tick)
        yield f'<line class="grid" x1="{LEFT_MARGIN}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield f'<text text-anchor="end" x="{LEFT_MARGIN - 6}" y="{y + 4:.1f}">{tick_label(tick)}</text>'
    yield f'<line class="axis" x1="{LEFT_MARGIN}" x2="{right}" y1="{bottom}" y2="{bottom}"/>'
    for tick in across.ticks:
        x = across.position(tick)
        anchor = "end" if x > right - 12 else "middle"
        yield f'<text text-anchor="{anchor}" x="{x:.1f}" y="{bottom + 16}">{tick_label(tick)}</text>'
    yield f'<text text-anchor="end" x="{right}" y="{bottom + 31}">step</text>'


def draw_series(series: Series, style: int, across: Axis, up: Axis) -> Iterator[str]:
    """Yield the SVG elements of a series: band, line and dots."""

    def position(step: float, value: float) -> str:
        return f"{across.position(step):.1f} {up.position(value):.1f}"

    if series.ranges:
        upper_edge = [position(values.step, values.high) for values in series.ranges]
        lower_edge = [position(values.step, values.low) for values in reversed(series.ranges)]
        yield f'<path class="band f{style}" d="M{"L".join(upper_edge + lower_edge)}Z"/>'
    line = [position(point.step, point.value) for point in series.points]
    if len(line) > 1:
        yield f'<path class="line s{style}" d="M{"L".join(line)}"/>'
    if series.has_dots:
        for point in series.points:
            centre = f'cx="{across.position(point.step):.1f}" cy="{up.position(point.value):.1f}"'
            yield f'<circle class="f{style}" {centre} r="3"/>'


def draw_legend(series: Series, number: int) -> Iterator[str]:
    """Yield the SVG elements of a line's row in the legend."""
    y = TOP_MARGIN + PLOT_HEIGHT + BOTTOM_MARGIN + LEGEND_ROW_HEIGHT * number + 8
    style = number % STYLES
    name = series.name if len(series.name) <= NAME_LETTERS else series.name[: NAME_LETTERS - 1] + "…"
    yield f'<line class="line s{style}" x1="{LEFT_MARGIN}" x2="{LEFT_MARGIN + 24}" y1="{y}" y2="{y}"/>'
    if series.has_dots:
        yield f'<circle class="f{style}" cx="{LEFT_MARGIN + 12}" cy="{y}" r="3"/>'
    yield f'<text class="name" x="{LEFT_MARGIN + 32}" y="{y + 4}">{escape(name)}</text>'


def make_step_axis(steps: int) -> Axis:
    """Return the horizontal axis, which starts at step 1."""
    last_step = max(steps, 2)
    span = WIDTH - RIGHT_MARGIN - LEFT_MARGIN
    whole_steps = [tick for tick in choose_round_ticks(1, steps, 4) if tick >= 1 and tick == round(tick)]
    return Axis(position=lambda step: LEFT_MARGIN + (step - 1) / (last_step - 1) * span, ticks=whole_steps or [1])


def make_value_axis(chart: Chart) -> Axis:
    """Return the vertical axis, which is logarithmic, starts at zero or covers the range of the values."""
    values: list[float] = []
    for series in chart.series:
        values += collect_values(series)
    bottom = TOP_MARGIN + PLOT_HEIGHT
    if chart.is_log:
        low = math.log(min(values))
        high = math.log(max(values))
        span = (high - low) or 1.0
        return Axis(
            position=lambda value: bottom - (math.log(value) - low) / span * PLOT_HEIGHT,
            ticks=choose_log_ticks(min(values), max(values)),
        )
    lowest = min([*values, 0.0]) if chart.starts_at_zero else min(values)
    highest = max(values)
    margin = 0.05 * (highest - lowest) or abs(highest) * 0.1 or 1.0
    top = highest + margin
    base = lowest if chart.starts_at_zero else lowest - margin
    return Axis(
        position=lambda value: bottom - (value - base) / (top - base) * PLOT_HEIGHT,
        ticks=choose_round_ticks(base, top, 4),
    )


def collect_values(series: Series) -> list[float]:
    """Return all values of a line and its band."""
    values = [point.value for point in series.points]
    for range_values in series.ranges:
        values += [range_values.low, range_values.high]
    return values


def choose_round_ticks(low: float, high: float, count: int) -> list[float]:
    """Return about `count` round values in [low, high]."""
    exact_step = (high - low) / count or 1.0
    power = 10.0 ** math.floor(math.log10(exact_step))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= exact_step * 0.999)
    return [number * step for number in range(math.ceil(low / step), math.floor(high / step * 1.0001) + 1)]


def choose_log_ticks(low: float, high: float) -> list[float]:
    """Return the powers of ten in [low, high]. If there are only a few, also return 2 and 5 times each power."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = (1, 2, 5) if len(powers) <= 4 else (1,)
    values: list[float] = []
    for power in powers:
        values += [factor * 10.0**power for factor in factors]
    return [value for value in values if low <= value <= high]


def tick_label(value: float) -> str:
    """Return a value as the label of a tick, such as 2,000, 150k, 0.2 or 2e-5."""
    if value == 0:
        return "0"
    if abs(value) >= 100_000:
        return f"{value / 1000:g}k"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    digits = f"{value:.4g}"
    if len(digits) > MAX_DIGITS:
        digits = f"{value:.1e}".replace(".0e", "e")
    return digits.replace("e-0", "e-")


def describe_chart(chart: Chart) -> str:
    """Describe the chart in words, for its alternative text."""
    lines = [describe_line(series) for series in chart.series]
    steps = "step 1" if chart.steps == 1 else f"steps 1 to {chart.steps:,}"
    return f"{chart.title}, {chart.note}, {steps}. {' '.join(lines)}"


def describe_line(series: Series) -> str:
    """Describe the first, last and extreme values of a line in words."""
    first_point = series.points[0]
    last_point = series.points[-1]
    if len(series.points) == 1:
        return f"{series.name}: {describe_point(first_point)}."
    lows = [Point(values.step, values.low) for values in series.ranges] or series.points
    highs = [Point(values.step, values.high) for values in series.ranges] or series.points
    lowest_point = min(lows, key=lambda point: point.value)
    highest_point = max(highs, key=lambda point: point.value)
    return (
        f"{series.name}: {describe_point(first_point)}, {describe_point(last_point)}, "
        f"lowest {describe_point(lowest_point)}, highest {describe_point(highest_point)}."
    )


def describe_point(point: Point) -> str:
    """Return the value and the step of a point as text, such as "0.25 at step 1,000"."""
    return f"{point.value:.4g} at step {point.step:,.0f}"


# A separate SVG file


class CurvesPicture(NamedTuple):
    """An SVG file and its alternative text. Both are empty if there is nothing to draw."""

    svg: str
    words: str


def draw_picture(path: Path) -> CurvesPicture:
    """Draw the main charts of all training phases as one SVG file that supports light and dark mode.

    Raises:
        DataError: see `read_phases`.
    """
    rows: list[list[Chart]] = []
    words: list[str] = []
    for phase in read_phases(path):
        charts = [chart for chart in main_charts(phase) if chart.series]
        words += [f"{phase.name}: {describe_chart(chart)}" for chart in charts]
        if charts:
            rows.append(charts)
    if not rows:
        return CurvesPicture("", "")
    gap = 20
    width = gap + max(len(charts) for charts in rows) * (WIDTH + gap)
    parts: list[str] = []
    y = gap
    for charts in rows:
        for column, chart in enumerate(charts):
            parts.append(draw_chart(chart, x=gap + column * (WIDTH + gap), y=y))
        y += max(chart_height(chart) for chart in charts) + gap
    style = (Path(__file__).parent / "charts.css").read_text(encoding="utf-8")
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="chart" viewBox="0 0 {width} {y}" width="{width}" height="{y}">'
        f'<style>{style}</style><rect class="ground" width="{width}" height="{y}"/>{"".join(parts)}</svg>\n'
    )
    return CurvesPicture(svg, " ".join(words))


def first_and_last_loss(phase: Phase) -> tuple[float, float] | None:
    """Return the mean training loss over the first and the last tenth of the steps, or None if there is no loss."""
    values = [point.value for point in phase.points("loss")]
    if not values:
        return None
    count = max(1, len(values) // 10)
    return statistics.fmean(values[:count]), statistics.fmean(values[-count:])
