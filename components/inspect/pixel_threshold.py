"""A control that reads nothing: a threshold on how much two images differ, as a detector of change.

A benchmark on which it does well can be had by comparing pixels. It is given as the area under its ROC curve: how often
a pair with a change differs more than a pair without one, 0.5 where the difference tells nothing.
"""

from collections.abc import Callable

import numpy as np
from PIL import Image

WINDOW = 16
"""A side of the frame has this many windows (8 x 8 pixels of 128 x 128)."""


def mean_difference(before: Image.Image, after: Image.Image) -> float:
    """Mean absolute difference of two images of one size, in grey levels over pixels and channels."""
    return float(_difference(before, after).mean())


def window_difference(before: Image.Image, after: Image.Image) -> float:
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


DIFFERENCES: dict[str, Callable[[Image.Image, Image.Image], float]] = {
    "mean": mean_difference,
    "window": window_difference,
}


def _difference(before: Image.Image, after: Image.Image) -> np.ndarray:
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
