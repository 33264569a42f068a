"""Compute a control score without captions: detect changes by a threshold on the difference between two images.

If the score is high on a benchmark, comparing pixels is enough to detect changes there. The score is the area under the
ROC curve: how often a pair with a change differs more than a pair without a change. Random guesses score 0.5.
"""

import numpy as np

from m3diff.images.open import load_image
from m3diff.records.errors import ValueFault
from m3diff.scoring.metrics import Metric, MetricInputs, MetricScores
from m3diff.scoring.pairs import ALL_PAIRS, EvalPair, Groups

KINDS = ("mean", "window")
ONE_KIND = "a threshold tells pairs with a change from those without, and these are all of one kind"
WINDOW = 16  # windows per side of the frame (8 x 8 pixels each in a frame of 128 x 128)


def measure_differences(before: np.ndarray, after: np.ndarray) -> dict[str, float]:
    """Return the mean absolute difference of two RGB images, in grey levels, over pixels and channels.

    Returns:
        mean: mean over the frame.
        window: highest mean over any window. Neighbouring windows overlap by half.

    Raises:
        ValueFault: the images have different sizes.
    """
    if before.shape != after.shape:
        raise ValueFault("scoring.image_sizes_differ", before=format_size(before), after=format_size(after))
    difference = np.abs(before.astype(np.float64) - after)
    by_pixel = difference.mean(-1)
    height = max(1, by_pixel.shape[0] // WINDOW)
    width = max(1, by_pixel.shape[1] // WINDOW)
    # a summed-area table gives the sum over any window from four of its values
    sums = np.pad(by_pixel.cumsum(0).cumsum(1), ((1, 0), (1, 0)))
    top_edges = np.arange(0, by_pixel.shape[0] - height + 1, max(1, height // 2))[:, None]
    left_edges = np.arange(0, by_pixel.shape[1] - width + 1, max(1, width // 2))[None, :]
    bottom_edges = top_edges + height
    right_edges = left_edges + width
    totals = (
        sums[bottom_edges, right_edges]
        - sums[top_edges, right_edges]
        - sums[bottom_edges, left_edges]
        + sums[top_edges, left_edges]
    )
    return {"mean": float(difference.mean()), "window": float(totals.max() / (height * width))}


def format_size(image: np.ndarray) -> str:
    """Return the width and height of an image as text, such as "640x480"."""
    return f"{image.shape[1]}x{image.shape[0]}"


def roc_auc(changed: list[float], unchanged: list[float]) -> float:
    """Return the area under the ROC curve of a detector. Ties count half.

    Args:
        changed, unchanged: scores of pairs with and without a change. Neither list is empty.
    """
    ascending = np.sort(np.asarray(unchanged))
    # for each pair with a change, the number of pairs without one that have a lower score, or at most the same score
    lower = np.searchsorted(ascending, changed, side="left")
    lower_or_equal = np.searchsorted(ascending, changed, side="right")
    return float((lower + lower_or_equal).mean() / (2 * len(ascending)))


def compute(pairs: list[EvalPair], groups: Groups, inputs: MetricInputs) -> MetricScores:
    """Compute the areas over all pairs with known change types. The areas depend on the images, not on the model.

    The areas are absent if the two images of a pair cannot be compared.
    """
    del groups, inputs
    judged_pairs = [pair for pair in pairs if pair.change_types and pair.has_two_images]
    if len({pair.is_distractor for pair in judged_pairs}) < 2:
        return MetricScores({}, {}, dict.fromkeys(METRIC.overall, ONE_KIND))
    pair_scores: dict[str, dict[str, float]] = {}
    for pair in judged_pairs:
        try:
            before, after = (np.asarray(load_image(image.uri)) for image in pair.images)
            pair_differences = measure_differences(before, after)
        except ValueError as error:
            return MetricScores({}, {}, dict.fromkeys(METRIC.overall, f"{pair.id}: {error}"))
        pair_scores[pair.id] = {f"pixel_{kind}_difference": value for kind, value in pair_differences.items()}
    areas = {}
    for kind in KINDS:
        column = f"pixel_{kind}_difference"
        changed = [pair_scores[pair.id][column] for pair in judged_pairs if not pair.is_distractor]
        unchanged = [pair_scores[pair.id][column] for pair in judged_pairs if pair.is_distractor]
        areas[f"pixel_{kind}_auc"] = roc_auc(changed, unchanged)
    return MetricScores({ALL_PAIRS: areas}, pair_scores)


METRIC = Metric(
    compute,
    main_score="pixel_window_auc",
    scores=(),
    overall=tuple(f"pixel_{kind}_auc" for kind in KINDS),
    columns={f"pixel_{kind}_difference": "double" for kind in KINDS},
    java=False,
    records="captions",
    extra_input="images",
)
