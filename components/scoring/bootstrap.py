"""Intervals of scores by the bootstrap over pairs, of one model and of the difference of two.

Pairs are drawn with replacement (Efron, 1979), for two models the same pairs (Koehn, EMNLP 2004). Statistics of the
whole test set, such as CIDEr's document frequencies, stay fixed: only the pairs that count are drawn. So an interval
says how a score would move on other pairs of this kind, not how it moves from one training to another.

Pairs of one scene are drawn independently. For MiniChange, whose scenes have a pair with a change and one without, the
effect was measured: if scenes are drawn, the interval of the difference of two models, by which the gate decides, is
0.91 to 1.02 times as wide. That of one model's score is 0.76 to 1.03 times as wide, since the share of pairs without a
change then stays fixed. Datasets with many similar pairs in a scene may differ.
"""

from collections.abc import Mapping

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import BaseModel, ConfigDict

from m3diff.scoring.metrics import Metric, Resampled

RESAMPLES, CONFIDENCE, SEED = 10_000, 0.95, 1979
MIN_PAIRS = 20  # of fewer no interval is given: it would be far too narrow
MIN_SCORED = 0.95  # share of the resamples that must have the score
CELLS = 2_000_000  # counts that are held at a time, 8 bytes each
DECIMALS = 6


class Interval(BaseModel):
    """Bounds within which a score lies, by the bootstrap over pairs."""

    model_config = ConfigDict(frozen=True)

    low: float
    high: float


def intervals(
    table: pa.Table, metrics: Mapping[str, Metric], protocol: str, confidence: float = CONFIDENCE
) -> dict[str, Interval]:
    """The interval of each score of these metrics that has one.

    Args:
        table: scores.parquet.
        protocol: of its column `protocol`.
    """
    scores = resampled_scores(metrics)
    values = rows_of(table, protocol)
    parts = {column: statistics(values, column) for column in {of.column: None for of in scores.values()}}
    known = {column: part for column, part in parts.items() if part is not None}
    if not known or values.num_rows < MIN_PAIRS:
        return {}
    sums = dict(zip(known, resample(*known.values()), strict=True))
    found = {name: bounds(of.score(sums[of.column]), confidence) for name, of in scores.items() if of.column in sums}
    return {name: interval for name, interval in found.items() if interval is not None}


def score_of(table: pa.Table, protocol: str, score: Resampled) -> float | None:
    """A score of all pairs of a protocol; None where scores.parquet holds nothing of it."""
    part = statistics(rows_of(table, protocol), score.column)
    value = float("nan") if part is None else float(score.score(part.sum(axis=0)))
    return value if np.isfinite(value) else None


def compare(
    first: pa.Table, second: pa.Table, protocol: str, score: Resampled, confidence: float = CONFIDENCE
) -> tuple[float, float, Interval | None] | None:
    """A score of two models on the same pairs, and the interval of the first minus the second, None of too few pairs;
    None where a model has no score.

    Args:
        first, second: scores.parquet of each, of the same pairs in whatever order.

    Raises:
        ValueError: the pairs are not the same.
    """
    ours, theirs = (rows_of(table, protocol).sort_by("id") for table in (first, second))
    if not ours["id"].equals(theirs["id"]):
        raise ValueError(
            f"{protocol}: the two files hold {ours.num_rows} and {theirs.num_rows} pairs, not the same ones"
        )
    parts = [statistics(rows, score.column) for rows in (ours, theirs)]
    wholes = [score_of(rows, protocol, score) for rows in (ours, theirs)]
    if parts[0] is None or parts[1] is None or wholes[0] is None or wholes[1] is None:
        return None
    interval = None
    if ours.num_rows >= MIN_PAIRS:
        a, b = resample(parts[0], parts[1])
        interval = bounds(score.score(a) - score.score(b), confidence)
    return wholes[0], wholes[1], interval


def resampled_scores(metrics: Mapping[str, Metric]) -> dict[str, Resampled]:
    """The scores that follow from sums over pairs, in the metrics' order."""
    return {name: of for metric in metrics.values() for name, of in metric.resampled.items()}


def rows_of(table: pa.Table, protocol: str) -> pa.Table:
    return table.filter(pc.equal(table["protocol"], protocol))


def statistics(rows: pa.Table, column: str) -> np.ndarray | None:
    """A column as numbers to sum, [pairs, k]: a list as it is, a plain value as [value, 1], zeros where it is null.

    None where the column is not there or holds nothing but nulls.
    """
    if column not in rows.column_names or rows[column].null_count == rows.num_rows:
        return None
    values = rows[column].combine_chunks()
    valid = values.is_valid().to_numpy(zero_copy_only=False)
    if not pa.types.is_list(values.type):
        plain = values.cast(pa.float64()).fill_null(0).to_numpy(zero_copy_only=False)
        return np.stack([plain, valid.astype(np.float64)], axis=1)
    kept = values.drop_null()
    flat = kept.flatten().to_numpy(zero_copy_only=False).astype(np.float64)
    found = np.zeros((len(values), len(flat) // len(kept)))
    found[valid] = flat.reshape(len(kept), -1)
    return found


def resample(*parts: np.ndarray) -> list[np.ndarray]:
    """Sums over pairs drawn with replacement, as many as there are, of columns that are drawn alike: each [pairs, k] ->
    [resamples, k]."""
    values, sums, rng = np.hstack(parts), [], np.random.default_rng(SEED)
    pairs = len(values)
    size = max(1, CELLS // pairs)
    for start in range(0, RESAMPLES, size):
        rows = min(size, RESAMPLES - start)
        places = rng.integers(0, pairs, (rows, pairs)) + np.arange(rows)[:, None] * pairs
        counts = np.bincount(places.ravel(), minlength=rows * pairs).reshape(rows, pairs)
        sums.append(counts.astype(np.float64) @ values)
    return np.split(np.concatenate(sums), np.cumsum([part.shape[-1] for part in parts])[:-1], axis=-1)


def bounds(scores: np.ndarray, confidence: float) -> Interval | None:
    """The percentile interval of resampled scores; None where too many resamples have no score."""
    known = scores[np.isfinite(scores)]
    if len(known) < MIN_SCORED * len(scores):
        return None
    tail = (1 - confidence) / 2
    low, high = np.quantile(known, [tail, 1 - tail])
    return Interval(low=round(float(low), DECIMALS), high=round(float(high), DECIMALS))
