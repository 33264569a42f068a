"""A control that reads nothing: a threshold on how much two images differ, as a detector of change.

A benchmark on which it does well can be had by comparing pixels. It is given as the area under its ROC curve: how often
a pair with a change differs more than a pair without one, 0.5 where the difference tells nothing.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from m3diff.images.open import load_image
from m3diff.scoring.metrics.metric import ALL, Groups, Metric, MetricScores, Tools
from m3diff.scoring.pairs import EvalPair

if TYPE_CHECKING:
    from PIL import Image

WINDOW = 16
"""A side of the frame has this many windows (8 x 8 pixels of 128 x 128)."""


def mean_difference(before: "Image.Image", after: "Image.Image") -> float:
    """Mean absolute difference of two images of one size, in grey levels over pixels and channels."""
    return float(_difference(before, after).mean())


def window_difference(before: "Image.Image", after: "Image.Image") -> float:
    """The largest mean absolute difference of a window, where windows overlap by half, in grey levels."""
    difference = _difference(before, after).mean(-1)
    height, width = (max(1, side // WINDOW) for side in difference.shape)
    sums = np.pad(difference.cumsum(0).cumsum(1), ((1, 0), (1, 0)))
    rows = np.arange(0, difference.shape[0] - height + 1, max(1, height // 2))[:, None]
    columns = np.arange(0, difference.shape[1] - width + 1, max(1, width // 2))[None, :]
    totals = (
        sums[rows + height, columns + width]
        - sums[rows, columns + width]
        - sums[rows + height, columns]
        + sums[rows, columns]
    )
    return float(totals.max() / (height * width))


DIFFERENCES: dict[str, Callable[["Image.Image", "Image.Image"], float]] = {
    "mean": mean_difference,
    "window": window_difference,
}


def _difference(before: "Image.Image", after: "Image.Image") -> np.ndarray:
    """Absolute difference [height, width, 3] of two images.

    Raises:
        ValueError: their sizes differ.
    """
    if before.size != after.size:
        raise ValueError(f"images of one size expected, found {before.size} and {after.size}; resize one of them")
    one, two = (np.asarray(image.convert("RGB"), dtype=np.float64) for image in (before, after))
    return np.abs(one - two)


def roc_auc(changed: list[float], unchanged: list[float]) -> float:
    """Area under the ROC curve of a detector's scores on pairs with and without a change; ties count half.

    Raises:
        ValueError: one of the lists is empty.
    """
    if not changed or not unchanged:
        raise ValueError(
            f"scores of pairs with and without a change expected, found {len(changed)} and {len(unchanged)}"
        )
    low = np.sort(np.asarray(unchanged))
    below = np.searchsorted(low, changed, side="left") + np.searchsorted(low, changed, side="right")
    return float(below.mean() / (2 * len(low)))


ONE_KIND = "a threshold tells pairs with a change from those without, and these are all of one kind"


def compute(pairs: list[EvalPair], groups: Groups, tools: Tools) -> MetricScores:
    """The areas over all pairs of which it is known whether something changed; a property of the images, not of the
    model. Absent where images cannot be compared."""
    del groups, tools
    known = [pair for pair in pairs if pair.change_types]
    if len({pair.is_distractor for pair in known}) < 2:
        return _absent(ONE_KIND)
    found: dict[str, dict[str, float]] = {}
    for pair in known:
        try:
            before, after = load_image(pair.before), load_image(pair.after)
            found[pair.id] = {_column(name): differ(before, after) for name, differ in DIFFERENCES.items()}
        except ValueError as error:
            return _absent(f"{pair.id}: {error}")
    areas = {
        _score(name): roc_auc(
            *([found[p.id][_column(name)] for p in known if p.is_distractor is k] for k in (False, True))
        )
        for name in DIFFERENCES
    }
    return MetricScores({ALL: areas}, found)


def _absent(reason: str) -> MetricScores:
    return MetricScores({}, {}, dict.fromkeys(METRIC.overall, reason))


def _score(name: str) -> str:
    return f"pixel_{name}_auc"


def _column(name: str) -> str:
    return f"pixel_{name}_difference"


METRIC = Metric(
    compute,
    headline=_score("window"),
    scores=(),
    overall=tuple(_score(name) for name in DIFFERENCES),
    columns={_column(name): "double" for name in DIFFERENCES},
    java=False,
    optional=True,
)
