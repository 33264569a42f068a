"""Intervals against what statistics says they are: coverage, width, pairing, and scores that some resamples lack."""

from statistics import NormalDist

import numpy as np
import pyarrow as pa
import pytest

from m3diff.scoring import bootstrap
from m3diff.scoring.bootstrap import compare, intervals, score_of, statistics
from m3diff.scoring.metrics import Metric, MetricScores, Resampled, mean_of, ratio

P = "toy/test"
MEAN = mean_of("score")


def table(protocol: str = P, **columns: list) -> pa.Table:
    size = len(next(iter(columns.values())))
    return pa.table({"protocol": [protocol] * size, "id": [f"toy/{n:05d}" for n in range(size)], **columns})


def metric(**resampled: Resampled) -> Metric:
    return Metric(lambda pairs, groups, tools: MetricScores({}, {}), "score", ("score",), resampled=resampled)


def test_a_plain_column_counts_as_value_and_one_a_list_as_it_is_and_null_as_nothing():
    rows = table(score=[2.0, None, 0.0], right=[True, False, None])
    assert statistics(rows, "score").tolist() == [[2, 1], [0, 0], [0, 1]]
    assert statistics(rows, "right").tolist() == [[1, 1], [0, 1], [0, 0]]
    rows = table(counts=[[1.0, 2.0, 3.0], None, [4.0, 5.0, 6.0]])
    assert statistics(rows, "counts").tolist() == [[1, 2, 3], [0, 0, 0], [4, 5, 6]]
    assert statistics(pa.concat_tables([rows, rows.slice(2)]), "counts").tolist()[2:] == [[4, 5, 6]] * 2
    assert statistics(rows.slice(1), "counts").tolist() == [[0, 0, 0], [4, 5, 6]]
    nothing = table(counts=pa.array([None, None], pa.list_(pa.float64())))
    assert statistics(table(score=[1.0]), "counts") is statistics(nothing, "counts") is None


def test_the_interval_of_a_mean_is_that_of_the_normal_distribution_and_confidence_widens_it():
    values = np.random.default_rng(0).normal(3.0, 2.0, 1500)
    for confidence in (0.95, 0.5):
        (found,) = intervals(table(score=values.tolist()), {"m": metric(score=MEAN)}, P, confidence).values()
        half = NormalDist().inv_cdf((1 + confidence) / 2) * values.std() / np.sqrt(1500)
        assert found.low == pytest.approx(values.mean() - half, abs=0.05 * half)
        assert found.high == pytest.approx(values.mean() + half, abs=0.05 * half)


def test_each_score_has_its_own_columns_and_each_protocol_its_own_rows():
    left, right = np.random.default_rng(2).normal(0, 1, (2, 400)), np.random.default_rng(3).normal(9, 3, (2, 400))
    counts = np.stack([right[0], np.ones(400), left[0]], axis=1)
    rows = table(score=left[0].tolist(), counts=counts.tolist())
    other = table("toy/other", score=left[1].tolist(), counts=(counts + 5).tolist())
    metrics = {"a": metric(one=MEAN), "b": metric(two=Resampled("counts", ratio(0, 1)))}
    found = intervals(pa.concat_tables([other, rows]), metrics, P)
    assert list(found) == ["one", "two"]
    assert found["one"].low < left[0].mean() < found["one"].high < 1 < 8 < found["two"].low < right[0].mean()
    assert found == intervals(rows, metrics, P), "the same draws for the same pairs"
    assert intervals(rows, {"b": metrics["b"]}, P)["two"] == found["two"]


def test_of_few_pairs_of_no_pair_and_of_a_score_that_many_resamples_lack_there_is_no_interval():
    values, of = np.arange(40.0).tolist(), {"m": metric(score=MEAN)}
    assert intervals(table(score=values[: bootstrap.MIN_PAIRS - 1]), of, P) == {}
    assert intervals(table(score=values), of, "toy/none") == {}
    assert intervals(table(score=[1.0, None] * 20), of, P)["score"].low == 1.0
    assert intervals(table(score=[1.0] + [None] * 39), of, P) == {}, "a third of them lack it"
    found = intervals(table(score=[1.0, 2.0, 1.0, 2.0] + [None] * 36), of, P)["score"]
    assert (found.low, found.high) == (1.0, 2.0), "one in a hundred lacks it, the others count"


def test_the_gain_of_two_models_is_that_of_the_same_pairs_in_whatever_order():
    rng = np.random.default_rng(4)
    hard = rng.normal(0, 5, 500)
    ours, theirs = table(score=(hard + 1).tolist()), table(score=hard.tolist()).take(rng.permutation(500))
    found = compare(ours, theirs, P, MEAN)
    assert (found.first, found.second) == (pytest.approx(hard.mean() + 1), pytest.approx(hard.mean()))
    assert (found.gain, found.interval.low, found.interval.high) == (pytest.approx(1), 1.0, 1.0)
    back = compare(theirs, ours, P, MEAN)
    assert (back.gain, back.interval.low) == (pytest.approx(-1), -1.0)
    wholes = rng.integers(1, 9, 300)  # a score that is no mean is compared by its sums
    parts = [rng.binomial(wholes, share) for share in (0.7, 0.5)]
    ours, theirs = (table(counts=np.stack([part, wholes], axis=1).astype(float).tolist()) for part in parts)
    found = compare(ours, theirs, P, Resampled("counts", ratio(0, 1)))
    assert found.first == pytest.approx(parts[0].sum() / wholes.sum())
    assert found.gain == pytest.approx(0.2, abs=0.06)
    assert 0.1 < found.interval.low < found.gain < found.interval.high < 0.3


def test_other_pairs_are_refused_and_a_model_without_the_score_is_not_compared():
    ours, theirs = table(score=[1.0] * 30), table(score=[1.0] * 31)
    with pytest.raises(ValueError, match="30 and 31 pairs, not the same ones"):
        compare(ours, theirs, P, MEAN)
    assert compare(ours, table(other=[1.0] * 30), P, MEAN) is None
    assert score_of(ours, "toy/none", MEAN) is None
    few = compare(table(score=[1.0] * 5), table(score=[0.0] * 5), P, MEAN)
    assert (few.gain, few.interval) == (1.0, None)
