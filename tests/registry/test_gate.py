"""The gate on models of known quality, and on files of scores that cannot be compared."""

import numpy as np
import pyarrow as pa
import pytest

from m3diff.registry.gate import Verdict, has_comparable_scores, judge, judge_without_champion
from m3diff.scoring.bootstrap import bounds, resample
from m3diff.scoring.metrics.change_accuracy import COUNTS
from m3diff.stages.register.params import Promote

PROTOCOL = "minichange/total"
PAIRS = 1200
RUNS = 200
EXACT = "change_exact_accuracy"
PHI = 0.5
"""How alike two models' errors are, as the correlation of right and wrong over pairs: two embedded runs of other
recipes, both 90 % exact, have 0.54 on their 480 test pairs, since what is hard for one is hard for the other."""
NO_NUMBERS = [float("nan"), float("inf"), float("-inf"), None]


def gate(**changes) -> Promote:
    plain = {"protocol": PROTOCOL, "metric": EXACT, "min_gain": 0.0, "confidence": 0.95, "guards": {}}
    return Promote(**plain | changes)


def right(rng: np.random.Generator, shares: tuple[float, float], phi: float, pairs: int, runs: int) -> np.ndarray:
    """Which pairs two models have right, bool [2, pairs, runs]: each with its share, alike by `phi`."""
    a, b = shares
    both = a * b + phi * np.sqrt(a * (1 - a) * b * (1 - b))
    drawn = rng.random((pairs, runs))
    return np.stack([drawn < a, (drawn < both) | ((drawn >= a) & (drawn < a + b - both))])


def lows(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Lower bounds of the gains of every run at once: values [pairs, runs] -> [runs]. One drawing serves all runs."""
    ours, theirs = resample(first.astype(float), second.astype(float))
    return np.array([bounds(gain, 0.95).low for gain in ((ours - theirs) / len(first)).T])


def scores(exact: np.ndarray, **columns: list) -> pa.Table:
    """scores.parquet of pairs of one change."""
    counts = np.zeros((len(exact), len(COUNTS)))
    for name, values in {"captions": 1, "single": 1, "single_exact_right": exact, "changed": 1}.items():
        counts[:, COUNTS.index(name)] = values
    ids = [f"minichange/{n:06d}" for n in range(len(exact))]
    return pa.table({"protocol": [PROTOCOL] * len(ids), "id": ids, "change_statistics": counts.tolist(), **columns})


@pytest.mark.fault("S2")
@pytest.mark.parametrize(("share", "phi"), [(0.9, PHI), (0.86, 0.0), (0.5, PHI), (0.98, PHI), ("skewed", None)])
def test_of_200_equal_models_at_most_one_in_twenty_is_promoted(share, phi):
    rng = np.random.default_rng(2)
    if share == "skewed":  # as CIDEr's scores are
        hard = rng.exponential(4.0, (PAIRS, RUNS))
        noise = rng.exponential(2.0, (2, PAIRS, RUNS))
        ours, theirs = np.where(rng.random(noise.shape) < 0.1, 0, hard + noise)
    else:
        ours, theirs = right(rng, (share, share), phi, PAIRS, RUNS)
    assert 0 < (lows(ours, theirs) > 0).sum() <= RUNS / 20


@pytest.mark.parametrize(("champion", "phi"), [(0.86, PHI), (0.9, PHI), (0.86, 0.3)])
def test_a_gain_of_four_points_over_1200_pairs_is_promoted_nine_times_in_ten(champion, phi):
    ours, theirs = right(np.random.default_rng(3), (champion + 0.04, champion), phi, PAIRS, RUNS)
    assert ours.mean() - theirs.mean() == pytest.approx(0.04, abs=0.003)
    assert (lows(ours, theirs) > 0).sum() >= 0.9 * RUNS


def test_the_gate_says_of_one_run_what_the_simulation_says():
    ours, theirs = right(np.random.default_rng(4), (0.89, 0.86), PHI, PAIRS, 12)
    found = [judge(gate(), scores(a), scores(b)) for a, b in zip(ours.T, theirs.T, strict=True)]
    assert [verdict.low for verdict in found] == lows(ours, theirs).tolist()
    promoted = [verdict.outcome == "promoted" for verdict in found]
    assert promoted == (lows(ours, theirs) > 0).tolist()
    assert 0 < sum(promoted) < len(found)


@pytest.fixture(scope="module")
def models() -> np.ndarray:
    """A challenger and a champion, right on 0.9 and 0.8 of 600 pairs; the gain's interval is about 0.07 to 0.13."""
    return right(np.random.default_rng(5), (0.9, 0.8), PHI, 600, 1)[:, :, 0]


def test_a_verdict_has_gain_interval_and_pairs_and_its_bound_decides(models):
    ours, theirs = models.mean(axis=1)
    found = judge(gate(), *map(scores, models))
    assert found.outcome == "promoted"
    assert found.pairs == 600
    assert found.challenger_score == pytest.approx(ours)
    assert found.champion_score == pytest.approx(theirs)
    assert found.gain == pytest.approx(ours - theirs)
    assert found.low < found.gain < found.high
    assert found.reason == (
        f"{EXACT} on {PROTOCOL} {ours:.4f}, the champion's {theirs:.4f}: gain {found.gain:+.4f}, "
        f"95 % interval {found.low:+.4f} to {found.high:+.4f} over 600 pairs; the lower bound exceeds 0"
    )
    assert judge(gate(min_gain=found.low - 1e-6), *map(scores, models)).outcome == "promoted"
    assert judge(gate(min_gain=found.low), *map(scores, models)).outcome == "refused"
    first = judge_without_champion(gate(guards={"SPICE": 0.1}), scores(models[0]))
    reason = f"there was no champion; {EXACT} {ours:.4f} over 600 pairs of {PROTOCOL}"
    assert first == Verdict(outcome="first", reason=reason, pairs=600, challenger_score=found.challenger_score)
    surer = judge(gate(confidence=0.999), *map(scores, models))
    assert surer.low < found.low
    assert "99.9 %" in surer.reason


@pytest.mark.fault("23", "T13")
@pytest.mark.parametrize("case", ["the other way round", "equal pair by pair", "ten pairs"])
def test_what_is_worse_equal_or_of_few_pairs_is_refused(models, case):
    few = np.stack([np.ones(10), np.zeros(10)])
    pair = {"the other way round": models[::-1], "equal pair by pair": models[[0, 0]], "ten pairs": few}[case]
    found = judge(gate(), *map(scores, pair))
    assert found.outcome == "refused"
    assert found.pairs == len(pair[0])
    assert (found.low is None) == (case == "ten pairs")
    assert found.low is None or found.low <= 0


# Guards


@pytest.mark.fault("S2", "T13")
@pytest.mark.parametrize(
    ("ours", "theirs", "tolerance", "outcome"),
    [
        (0.5, 0.5, 0.02, "promoted"),
        (0.4801, 0.5, 0.02, "promoted"),
        (0.4799, 0.5, 0.02, "refused"),
        (0.9, 0.5, 0.02, "promoted"),
        (0.87, 0.90, 0.03, "promoted"),  # 0.03 and a little, as floats
        (0.1, 0.3, 0.2, "promoted"),
        (1.07, 1.1, 0.03, "promoted"),
        (0.57, 0.58, 0.01, "promoted"),
        (0.29, 0.29, 0.0, "promoted"),
        (0.869998, 0.90, 0.03, "refused"),
    ],
)
def test_a_guarded_score_may_be_worse_by_exactly_its_tolerance_and_no_more(models, ours, theirs, tolerance, outcome):
    tables = [scores(exact, SPICE=[value] * 600) for exact, value in zip(models, (ours, theirs), strict=True)]
    found = judge(gate(guards={"SPICE": tolerance}), *tables)
    assert found.outcome == outcome
    assert found.low > 0
    guard = found.guards["SPICE"]
    assert guard.challenger == pytest.approx(ours)
    assert guard.champion == pytest.approx(theirs)
    assert guard.tolerance == tolerance
    assert f"SPICE {ours:.4f}" in found.reason
    assert f"{theirs:.4f}" in found.reason


@pytest.mark.fault("T13")
@pytest.mark.parametrize("pairs", [10, 100, 600])
def test_a_guard_that_is_better_if_smaller_may_grow_by_exactly_its_tolerance(models, pairs):
    more, less = (scores(exact) for exact in models)
    silent = np.array(more["change_statistics"].to_pylist())
    silent[:pairs, COUNTS.index("changed_called_unchanged")] = 1  # says "no change" of these pairs
    more = more.set_column(2, "change_statistics", pa.array(silent.tolist()))
    exactly = round(pairs / 600, 6)
    assert judge(gate(guards={"false_no_change": exactly}), more, less).outcome == "promoted"
    refused = judge(gate(guards={"false_no_change": exactly - 0.001}), more, less)
    assert refused.outcome == "refused"
    assert f"false_no_change {exactly:.4f}" in refused.reason


@pytest.mark.fault("18", "23")
def test_a_model_without_a_score_of_the_gate_is_refused_or_not_comparable(models):
    plain = scores(models[1])
    whole = scores(models[1], SPICE=[0.5] * 600)
    ours = scores(models[0], SPICE=[0.6] * 600)
    found = judge(gate(metric="SPICE", guards={"METEOR": 0.1, EXACT: 0.1}), plain, whole)
    assert found.outcome == "refused"
    for name in ("SPICE", "METEOR", PROTOCOL):
        assert name in found.reason
    assert EXACT not in found.reason
    assert judge_without_champion(gate(metric="SPICE"), plain).outcome == "refused"
    asked = [gate(guards={"SPICE": 0.1}), gate(metric="SPICE"), gate(metric="SPICE", guards={EXACT: 0.1})]
    assert [has_comparable_scores(cfg, ours, plain) for cfg in asked] == [False, False, False]
    assert [has_comparable_scores(cfg, ours, whole) for cfg in asked] == [True, True, True]
    for cfg in asked[:2]:
        refused = judge(cfg, ours, plain)
        assert refused.outcome == "refused"
        assert "champion" in refused.reason
        assert "SPICE" in refused.reason


# Files that are not over the same pairs, and what is no number


def spice(values: list[float | None]) -> pa.Table:
    names = [f"minichange/{n:06d}" for n in range(len(values))]
    column = pa.array(values, pa.float64())
    return pa.table({"protocol": [PROTOCOL] * len(values), "id": names, "SPICE": column})


SPREAD = [n / 200 for n in range(200)]
WORST_NULL = [None] * 40 + SPREAD[40:]
UNLIKE = {
    "itself with its worst scores null": (spice(WORST_NULL), spice(SPREAD), "it has no SPICE of 40 pairs"),
    "the champion's are null": (spice(SPREAD), spice(WORST_NULL), "the champion has no SPICE of 40 pairs"),
    "as many nulls of other pairs": (spice(WORST_NULL), spice(SPREAD[:160] + [None] * 40), "it has no SPICE of 40"),
    "one null": (spice([None, *SPREAD[1:]]), spice([0.0] * 200), "such as minichange/000000"),
}


@pytest.mark.fault("T13", "S2")
@pytest.mark.parametrize("case", UNLIKE)
def test_scores_that_are_not_over_the_same_pairs_are_refused(case):
    ours, theirs, words = UNLIKE[case]
    found = judge(gate(metric="SPICE"), ours, theirs)
    assert found.outcome == "refused", found.reason
    assert words in found.reason, found.reason
    guarded = [table.append_column("CIDEr", pa.array([v] * len(table))) for table, v in ((ours, 2.0), (theirs, 1.0))]
    assert judge(gate(metric="CIDEr", guards={"SPICE": 1.0}), *guarded).outcome == "refused"
    assert has_comparable_scores(gate(metric="SPICE"), ours, theirs) == ("the champion has" not in found.reason)


@pytest.mark.fault("T13")
def test_nulls_of_equal_pairs_in_any_order_are_compared_and_other_pairs_not(models):
    better = [value and value + 0.1 for value in WORST_NULL]
    order = np.random.default_rng(7).permutation(200)
    found = judge(gate(metric="SPICE"), spice(better).take(order), spice(WORST_NULL))
    assert found.outcome == "promoted"
    assert found.gain == pytest.approx(0.1)
    for ours, theirs in ((WORST_NULL, WORST_NULL), ([], []), ([1.0], [0.0])):
        assert judge(gate(metric="SPICE"), spice(ours), spice(theirs)).outcome == "refused"
    ours, theirs = map(scores, models)
    assert has_comparable_scores(gate(), ours, theirs.take(np.arange(600)[::-1]))
    assert not has_comparable_scores(gate(), ours, theirs.slice(1))
    with pytest.raises(ValueError, match=r"600\D+599"):
        judge(gate(), ours, theirs.slice(1))


@pytest.mark.fault("S2")
@pytest.mark.parametrize(("value", "pairs"), [*((v, 600) for v in NO_NUMBERS), *((v, 1) for v in NO_NUMBERS[:3])])
@pytest.mark.parametrize("asked", [{"metric": "SPICE"}, {"guards": {"SPICE": 1e9}}], ids=["metric", "guard"])
def test_nan_infinity_and_missing_scores_are_refused_of_any_model(models, asked, value, pairs):
    columns = [pa.array([v] * n + [0.5] * (600 - n), pa.float64()) for v, n in ((value, pairs), (0.6, 600), (0.4, 600))]
    ours, better = (scores(models[0], SPICE=column) for column in columns[:2])
    theirs, plain = (scores(models[1], SPICE=column) for column in columns[::2])
    for challenger, champion, whose in ((ours, plain, "it"), (ours, theirs, "it"), (better, theirs, "the champion")):
        found = judge(gate(**asked), challenger, champion)
        assert found.outcome == "refused", found.reason
        assert f"{whose} has no SPICE" in found.reason, found.reason
    assert not has_comparable_scores(gate(**asked), better, theirs), "first it is scored again"
    assert judge_without_champion(gate(**asked), ours).reason.startswith("it has no SPICE on")
