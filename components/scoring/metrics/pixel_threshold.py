"""A control that reads nothing: a threshold on how much two images differ, as a detector of change.

A benchmark on which it does well can be had by comparing pixels. It is given as the area under its ROC curve: how often
a pair with a change differs more than a pair without one, 0.5 where the difference tells nothing.
"""

import numpy as np

from m3diff.images.open import load_image
from m3diff.scoring.metrics import Metric, MetricScores, Tools
from m3diff.scoring.pairs import ALL, EvalPair, Groups

KINDS = ("mean", "window")
ONE_KIND = "a threshold tells pairs with a change from those without, and these are all of one kind"
WINDOW = 16  # a side of the frame has this many windows (8 x 8 pixels of 128 x 128)


def differences(before: np.ndarray, after: np.ndarray) -> dict[str, float]:
    """The mean absolute difference of two RGB images in grey levels, over pixels and channels: `mean` of the frame, and
    the largest of a `window`, where windows overlap by half.

    Raises:
        ValueError: the sizes of the images differ.
    """
    if before.shape != after.shape:
        sizes = f"{before.shape[1::-1]} and {after.shape[1::-1]}"
        raise ValueError(f"images of one size expected, found {sizes}; resize one of them")
    difference = np.abs(before.astype(np.float64) - after)
    by_pixel = difference.mean(-1)
    height, width = (max(1, side // WINDOW) for side in by_pixel.shape)
    sums = np.pad(by_pixel.cumsum(0).cumsum(1), ((1, 0), (1, 0)))
    top = np.arange(0, by_pixel.shape[0] - height + 1, max(1, height // 2))[:, None]
    left = np.arange(0, by_pixel.shape[1] - width + 1, max(1, width // 2))[None, :]
    bottom, right = top + height, left + width
    totals = sums[bottom, right] - sums[top, right] - sums[bottom, left] + sums[top, left]
    return {"mean": float(difference.mean()), "window": float(totals.max() / (height * width))}


def roc_auc(changed: list[float], unchanged: list[float]) -> float:
    """Area under the ROC curve of a detector's scores on pairs with and without a change, some of each; ties count
    half."""
    low = np.sort(np.asarray(unchanged))
    below = np.searchsorted(low, changed, side="left") + np.searchsorted(low, changed, side="right")
    return float(below.mean() / (2 * len(low)))


def compute(pairs: list[EvalPair], groups: Groups, tools: Tools) -> MetricScores:
    """The areas over all pairs of which it is known whether something changed; a property of the images, not of the
    model. Absent where images cannot be compared."""
    del groups, tools
    known = [pair for pair in pairs if pair.change_types]
    if len({pair.is_distractor for pair in known}) < 2:
        return MetricScores({}, {}, dict.fromkeys(METRIC.overall, ONE_KIND))
    found: dict[str, dict[str, float]] = {}
    for pair in known:
        try:
            differ = differences(*(np.asarray(load_image(path)) for path in (pair.before, pair.after)))
        except ValueError as error:
            return MetricScores({}, {}, dict.fromkeys(METRIC.overall, f"{pair.id}: {error}"))
        found[pair.id] = {f"pixel_{name}_difference": value for name, value in differ.items()}
    areas = {}
    for name in KINDS:
        values: dict[bool, list[float]] = {False: [], True: []}
        for pair in known:
            values[pair.is_distractor].append(found[pair.id][f"pixel_{name}_difference"])
        areas[f"pixel_{name}_auc"] = roc_auc(values[False], values[True])
    return MetricScores({ALL: areas}, found)


METRIC = Metric(
    compute,
    headline="pixel_window_auc",
    scores=(),
    overall=tuple(f"pixel_{name}_auc" for name in KINDS),
    columns={f"pixel_{name}_difference": "double" for name in KINDS},
    java=False,
    optional=True,
)
