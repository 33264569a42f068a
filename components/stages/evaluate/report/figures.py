"""What the report draws: images made small, saliency maps, and training curves."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from m3diff.images.open import ImageError, load_image
from m3diff.records.errors import DataError

MAX_PX = 384
MAX_POINTS = 400
STYLES = ("main", "second", "third", "fourth", "fifth")


def load_small(path: Path, sha256: bytes) -> Image.Image:
    """The image upright, in RGB, its longer side at most `MAX_PX`.

    Raises:
        DataError: the file is missing, is no image, or is not the one of this digest.
    """
    try:
        image = load_image(path, sha256)
    except ImageError as error:
        raise DataError(f"the report cannot show an image: {error}") from error
    image.thumbnail((MAX_PX, MAX_PX), Image.Resampling.LANCZOS)
    return image


class SaliencyMaps:
    """Where the model looks for the difference: a map to each pair id."""

    def __init__(self, path: Path) -> None:
        with np.load(path) as arrays:
            self.maps = arrays["maps"].astype(np.float32)
            self.rows = {str(i): row for row, i in enumerate(arrays["ids"])}

    def __len__(self) -> int:
        return len(self.rows)

    def of(self, pair: str) -> np.ndarray | None:
        """[rows, columns], sums to 1; None where the pair has no map."""
        return self.maps[self.rows[pair]] if pair in self.rows else None


@dataclass(frozen=True)
class Line:
    """One series of a chart. `style` is a CSS class of the template: faint, or one of `STYLES`."""

    name: str
    points: Sequence[tuple[float, float]]
    style: str
    dots: bool = False


WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 560, 260, 52, 16, 14, 30


def chart(lines: Sequence[Line], label: str, log: bool = False) -> str:
    """An inline SVG line chart over training steps; its colours come from the page."""
    lines = [Line(line.name, thin(line.points), line.style, line.dots) for line in lines if line.points]
    xs = [x for line in lines for x, _ in line.points]
    ys = [y for line in lines for _, y in line.points if not log or y > 0]
    if not ys:
        return ""
    x_of = scale(0, max(xs), LEFT, WIDTH - RIGHT)
    low, high = (min(ys), max(ys)) if log else (0.0, max(ys) * 1.05)
    y_of = scale(low, high, HEIGHT - BOTTOM, TOP, log)
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}" class="chart">']
    for tick in log_ticks(low, high) if log else ticks(low, high, 4):
        y = y_of(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick end" x="{LEFT - 8}" y="{y + 4:.1f}">{short(tick)}</text>')
    for tick in ticks(0, max(xs), 5):
        parts.append(f'<text class="tick mid" x="{x_of(tick):.1f}" y="{HEIGHT - 8}">{tick:,.0f}</text>')
    for line in lines:
        places = [(x_of(x), y_of(y)) for x, y in line.points if not log or y > 0]
        path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
        parts.append(f'<path class="line {line.style}" d="{path}"/>')
        parts += [f'<circle class="{line.style}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in places if line.dots]
    return "".join([*parts, "</svg>"])


def scale(low: float, high: float, start: float, end: float, log: bool = False) -> Callable[[float], float]:
    """A function from values in [low, high] to places in [start, end]."""
    if log:
        low, high = math.log(low), math.log(high)
    span = (high - low) or 1.0
    return lambda value: start + ((math.log(value) if log else value) - low) / span * (end - start)


def ticks(low: float, high: float, count: int) -> list[float]:
    """About `count` round values within [low, high]."""
    raw = (high - low) / count or 1.0
    power = 10 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * 0.999)
    return [k * step for k in range(math.ceil(low / step), math.floor(high / step * 1.0001) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten in [low, high], with 2 and 5 between them."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [m * 10**p for p in powers for m in (1, 2, 5) if low <= m * 10**p <= high]


def short(value: float) -> str:
    return f"{value:g}" if value == 0 or abs(value) >= 0.0001 else f"{value:.0e}".replace("e-0", "e-")


def thin(points: Sequence[tuple[float, float]]) -> Sequence[tuple[float, float]]:
    """At most `MAX_POINTS` points, each the mean of its neighbours."""
    size = math.ceil(len(points) / MAX_POINTS)
    parts = [points[k : k + size] for k in range(0, len(points), size)]
    return [(part[-1][0], sum(y for _, y in part) / len(part)) for part in parts]


def smooth(points: Sequence[tuple[float, float]], fraction: float = 0.03) -> list[tuple[float, float]]:
    """The running mean over `fraction` of all points, towards the past."""
    window = max(1, round(len(points) * fraction))
    values = np.array([y for _, y in points])
    sums = np.concatenate([[0.0], np.cumsum(values)])
    ends = np.arange(1, len(points) + 1)
    starts = np.maximum(ends - window, 0)
    means = (sums[ends] - sums[starts]) / (ends - starts)
    return [(x, float(mean)) for (x, _), mean in zip(points, means, strict=True)]
