"""Bootstrap intervals for the scores of one model and for the difference between two models.

Pairs are drawn with replacement (Efron, 1979). Two models are compared on the same drawn pairs (Koehn, EMNLP 2004).
Statistics of the whole test set, such as CIDEr's document frequencies, are not recomputed for the drawn pairs. An
interval therefore shows how much a score would vary on other pairs of this kind, not between training runs.

Pairs of the same scene are drawn independently. The effect was measured on MiniChange, where each scene has one pair
with a change and one without. If whole scenes are drawn instead, the interval of the difference between two models,
which the gate uses, is 0.91 to 1.02 times as wide. The interval of one model's score is 0.76 to 1.03 times as wide,
because the share of pairs without a change then stays fixed. The effect may differ for datasets with many similar pairs
per scene.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import BaseModel, ConfigDict

from m3diff.records.errors import DataError
from m3diff.scoring.metrics import Metric, Resampled

RESAMPLES = 10_000
CONFIDENCE = 0.95
SEED = 1979
MIN_PAIRS = 20  # with fewer pairs, an interval would be far too narrow and is not computed
MIN_SCORED = 0.95  # minimum share of resamples in which the score is defined
CELLS = 2_000_000  # maximum number of counts in memory at a time, 8 bytes each
MAX_AHEAD = 200_000_000  # maximum number of counts that are drawn ahead, 1 byte each
DECIMALS = 6


class Interval(BaseModel):
    """Bootstrap interval of a score."""

    model_config = ConfigDict(frozen=True)

    low: float
    high: float


class ScoreComparison(NamedTuple):
    """A score of two models.

    interval: interval of the first score minus the second score. None if there are too few pairs.
    """

    first_score: float
    second_score: float
    interval: Interval | None


def intervals(
    table: pa.Table,
    metrics: Mapping[str, Metric],
    protocol: str,
    confidence: float = CONFIDENCE,
    counts: Sequence[np.ndarray] | None = None,
) -> dict[str, Interval]:
    """Return the intervals of the metrics' scores, by score. A score without an interval is left out.

    Args:
        table: scores.parquet.
        protocol: "<dataset>/<protocol>".
        counts: result of `draw_ahead` for the protocol's pairs. None to draw the pairs now.
    """
    scores = resampled_scores(metrics)
    rows = rows_of(table, protocol)
    numbers_by_column: dict[str, np.ndarray] = {}
    for column in dict.fromkeys(score.column for score in scores.values()):
        numbers = statistics(rows, column)
        if numbers is not None:
            numbers_by_column[column] = numbers
    if not numbers_by_column or rows.num_rows < MIN_PAIRS:
        return {}
    # one call for all columns, so that all scores use the same resamples
    resampled_sums = resample(*numbers_by_column.values(), counts=counts)
    sums_by_column = dict(zip(numbers_by_column, resampled_sums, strict=True))
    score_intervals = {}
    for name, score in scores.items():
        if score.column in sums_by_column:
            interval = percentile_interval(score.score(sums_by_column[score.column]), confidence)
            if interval is not None:
                score_intervals[name] = interval
    return score_intervals


def intervals_by_kind(table: pa.Table, metrics: Mapping[str, Metric], protocol: str) -> dict[str, dict[str, Interval]]:
    """Return the intervals of the scores of answers, by kind of question and score. Kinds without any are left out.

    Args:
        table: scores.parquet.
        metrics: the computed metrics. Other metrics than those of answers are ignored, because the scores of a kind may
            depend on its other records (as CIDEr does), which the per-pair scores do not show.
        protocol: "<dataset>/<protocol>".
    """
    answer_metrics = {name: metric for name, metric in metrics.items() if metric.records == "questions"}
    if not answer_metrics:
        return {}
    kind_intervals = {}
    for kind in sorted(pc.unique(rows_of(table, protocol)["kind"]).drop_null().to_pylist()):
        rows_of_kind = table.filter(pc.equal(table["kind"], kind))
        kind_intervals[kind] = intervals(rows_of_kind, answer_metrics, protocol)
    return {kind: scores for kind, scores in kind_intervals.items() if scores}


def score_of(table: pa.Table, protocol: str, score: Resampled) -> float | None:
    """Return a score over all pairs of a protocol, or None if scores.parquet does not contain it."""
    numbers = statistics(rows_of(table, protocol), score.column)
    if numbers is None:
        return None
    value = float(score.score(numbers.sum(axis=0)))
    return value if np.isfinite(value) else None


def compare(
    first_table: pa.Table,
    second_table: pa.Table,
    protocol: str,
    score: Resampled,
    confidence: float = CONFIDENCE,
    counts: Sequence[np.ndarray] | None = None,
) -> ScoreComparison | None:
    """Compare a score of two models on the same pairs.

    Args:
        first_table, second_table: scores.parquet of each model. The pairs may be in any order.
        counts: result of `draw_ahead` for the protocol's pairs. None to draw the pairs now.

    Returns:
        The comparison, or None if one of the models does not have the score.

    Raises:
        DataError: the two files do not contain the same pairs.
    """
    first_rows = rows_of(first_table, protocol).sort_by("id")
    second_rows = rows_of(second_table, protocol).sort_by("id")
    if not first_rows["id"].equals(second_rows["id"]):
        first_pairs = first_rows.num_rows
        second_pairs = second_rows.num_rows
        raise DataError("scoring.pairs_differ", protocol=protocol, first=first_pairs, second=second_pairs)
    first_score = score_of(first_rows, protocol, score)
    second_score = score_of(second_rows, protocol, score)
    first_numbers = statistics(first_rows, score.column)
    second_numbers = statistics(second_rows, score.column)
    if first_score is None or second_score is None or first_numbers is None or second_numbers is None:
        return None
    interval = None
    if first_rows.num_rows >= MIN_PAIRS:
        first_sums, second_sums = resample(first_numbers, second_numbers, counts=counts)
        interval = percentile_interval(score.score(first_sums) - score.score(second_sums), confidence)
    return ScoreComparison(first_score, second_score, interval)


def resampled_scores(metrics: Mapping[str, Metric]) -> dict[str, Resampled]:
    """Return the scores that can be computed from sums over pairs, in the order of the metrics."""
    scores: dict[str, Resampled] = {}
    for metric in metrics.values():
        scores |= metric.resampled
    return scores


def rows_of(table: pa.Table, protocol: str) -> pa.Table:
    """Return the rows of scores.parquet that belong to a protocol."""
    return table.filter(pc.equal(table["protocol"], protocol))


def statistics(rows: pa.Table, column: str) -> np.ndarray | None:
    """Return a column of scores.parquet as numbers that can be summed, [pairs, k].

    A list becomes its k numbers, a plain value becomes [value, 1], and a null becomes zeros. The result is None if the
    column is missing or contains only nulls.
    """
    if column not in rows.column_names or rows[column].null_count == rows.num_rows:
        return None
    values = rows[column].combine_chunks()
    is_valid = values.is_valid().to_numpy(zero_copy_only=False)
    if not pa.types.is_list(values.type):
        plain_values = values.cast(pa.float64()).fill_null(0).to_numpy(zero_copy_only=False)
        return np.stack([plain_values, is_valid.astype(np.float64)], axis=1)
    lists = values.drop_null()
    flat = lists.flatten().to_numpy(zero_copy_only=False).astype(np.float64)
    numbers = np.zeros((len(values), len(flat) // len(lists)))
    numbers[is_valid] = flat.reshape(len(lists), -1)
    return numbers


def resample(*columns: np.ndarray, counts: Iterable[np.ndarray] | None = None) -> list[np.ndarray]:
    """Sum each column over resamples of the pairs: [pairs, k] -> [resamples, k].

    A resample is as many pairs as there are, drawn with replacement. All columns are summed over the same resamples.

    Args:
        counts: result of `draw_ahead`. None to draw the pairs now.
    """
    values = np.hstack(columns)
    if counts is None:
        counts = draw_counts(len(values))
    sums = [counts_of_resamples.astype(np.float64) @ values for counts_of_resamples in counts]
    ends = np.cumsum([column.shape[-1] for column in columns])
    return np.split(np.concatenate(sums), ends[:-1], axis=-1)


def draw_counts(pairs: int) -> Iterator[np.ndarray]:
    """Draw RESAMPLES resamples, each of `pairs` pairs with replacement, and count how often each pair is drawn.

    Yields:
        [resamples, pairs] counts of some of the resamples.
    """
    rng = np.random.default_rng(SEED)
    resamples_at_once = max(1, CELLS // pairs)
    for start in range(0, RESAMPLES, resamples_at_once):
        resamples = min(resamples_at_once, RESAMPLES - start)
        drawn_pairs = rng.integers(0, pairs, (resamples, pairs))
        # number the cells of all resamples consecutively, so that a single call counts them all
        cells = drawn_pairs + np.arange(resamples)[:, None] * pairs
        yield np.bincount(cells.ravel(), minlength=resamples * pairs).reshape(resamples, pairs)


def draw_ahead(pairs: int) -> list[np.ndarray] | None:
    """Draw the counts of all resamples before there are scores to sum, for example while Java computes METEOR.

    Returns:
        Counts as from `draw_counts`, one byte each. None if they need more than MAX_AHEAD bytes.
    """
    if pairs * RESAMPLES > MAX_AHEAD:
        return None
    counts = []
    for counts_of_resamples in draw_counts(pairs):
        assert counts_of_resamples.max() <= np.iinfo(np.uint8).max, "a pair was drawn more than 255 times"
        counts.append(counts_of_resamples.astype(np.uint8))
    return counts


def percentile_interval(scores: np.ndarray, confidence: float) -> Interval | None:
    """Return the percentile interval of resampled scores.

    The result is None if the score is undefined in more than 1 - MIN_SCORED of the resamples.
    """
    finite_scores = scores[np.isfinite(scores)]
    if len(finite_scores) < MIN_SCORED * len(scores):
        return None
    tail = (1 - confidence) / 2
    low, high = np.quantile(finite_scores, [tail, 1 - tail])
    return Interval(low=round(float(low), DECIMALS), high=round(float(high), DECIMALS))
