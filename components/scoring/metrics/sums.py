"""Compute scores of groups of records from statistics that are summed over the records of a group."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from m3diff.scoring.metrics import Resampled, Value, divide_sums
from m3diff.scoring.pairs import Groups


def scores_of_sums(rows: Sequence[Sequence[float]], resampled: Mapping[str, Resampled], size: int) -> dict[str, Value]:
    """Compute scores from statistics summed over records. The result is None where a score is undefined.

    Args:
        rows: `size` statistics per record. Without records, all sums are 0.
        resampled: score -> how to compute it from the sums.
    """
    sums = np.sum(np.asarray(rows, dtype=np.float64).reshape(-1, size), axis=0)
    values = {name: float(score.score(sums)) for name, score in resampled.items()}
    return {name: None if np.isnan(value) else value for name, value in values.items()}


def score_groups_by_sums(
    groups: Groups, rows_by_id: Mapping[str, Sequence[float]], resampled: Mapping[str, Resampled], size: int
) -> dict[str, dict[str, Value]]:
    """Return the scores of each group; see `scores_of_sums`. Records without statistics do not count."""
    return {
        group: scores_of_sums([rows_by_id[pair_id] for pair_id in ids if pair_id in rows_by_id], resampled, size)
        for group, ids in groups.items()
    }


def f1_of_sums(common: int, predicted: int, true: int) -> Callable[[np.ndarray], np.ndarray]:
    """Return a function that computes F1 from three sums. The result is NaN if nothing is predicted or true.

    Args:
        common, predicted, true: indices of the sums of predictions that are right, of predictions, and of true values.
    """

    def f1(sums: np.ndarray) -> np.ndarray:
        fractions = np.stack([2 * sums[..., common], sums[..., predicted] + sums[..., true]], axis=-1)
        return divide_sums(0, 1)(fractions)

    return f1
