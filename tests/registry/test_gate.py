"""The gate on models of known quality, and on scores that cannot be compared."""

import numpy as np
import pyarrow as pa
import pytest

from m3diff.registry.gate import (
    Verdict,
    compare_with_champion,
    faults_of_scores,
    has_comparable_scores,
    judge_without_champion,
)
from m3diff.scoring.bootstrap import percentile_interval, resample
from m3diff.scoring.metrics.change_accuracy import COUNTS
from m3diff.stages.register.params import Promote

PROTOCOL = "minichange/total"
PAIRS = 1200
RUNS = 200
EXACT_ACCURACY = "change_exact_accuracy"
PHI = 0.5
"""Correlation between the correct pairs of two models. Two embedded runs with different recipes, both 90 % exact, have
0.54 on their 480 test pairs, because the same pairs are hard for both."""
NO_NUMBERS = [float("nan"), float("inf"), float("-inf"), None]


def make_gate(**changes) -> Promote:
    plain = {"protocol": PROTOCOL, "metric": EXACT_ACCURACY, "min_gain": 0.0, "confidence": 0.95, "guards": {}}
    return Promote(**plain | changes)


def draw_correct_pairs(
    rng: np.random.Generator, shares: tuple[float, float], phi: float, pairs: int, runs: int
) -> np.ndarray:
    """Draw which pairs two models have right, as bool [2, pairs, runs].

    Args:
        shares: the share of correct pairs of each model.
        phi: the correlation between the correct pairs of the two models.
    """
    first_share, second_share = shares
    share_of_both = first_share * second_share + phi * np.sqrt(
        first_share * (1 - first_share) * second_share * (1 - second_share)
    )
    uniform = rng.random((pairs, runs))
    is_correct_in_first = uniform < first_share
    is_correct_in_second = (uniform < share_of_both) | (
        ~is_correct_in_first & (uniform < first_share + second_share - share_of_both)
    )
    return np.stack([is_correct_in_first, is_correct_in_second])


def lower_bounds_of_gain(challenger: np.ndarray, champion: np.ndarray) -> np.ndarray:
    """Return the lower bound of the gain of each run: values [pairs, runs] -> [runs]. All runs share one resampling."""
    challenger_sums, champion_sums = resample(challenger.astype(float), champion.astype(float))
    gains = (challenger_sums - champion_sums) / len(challenger)
    return np.array([percentile_interval(gain, 0.95).low for gain in gains.T])


def make_scores(exact: np.ndarray, **columns: list) -> pa.Table:
    """Return a scores.parquet for pairs with one change. `exact` says for each pair whether it is correct."""
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
        difficulty = rng.exponential(4.0, (PAIRS, RUNS))
        noise = rng.exponential(2.0, (2, PAIRS, RUNS))
        challenger, champion = np.where(rng.random(noise.shape) < 0.1, 0, difficulty + noise)
    else:
        challenger, champion = draw_correct_pairs(rng, (share, share), phi, PAIRS, RUNS)
    assert 0 < (lower_bounds_of_gain(challenger, champion) > 0).sum() <= RUNS / 20


@pytest.mark.parametrize(("champion_share", "phi"), [(0.86, PHI), (0.9, PHI), (0.86, 0.3)])
def test_a_gain_of_four_points_over_1200_pairs_is_promoted_nine_times_in_ten(champion_share, phi):
    shares = (champion_share + 0.04, champion_share)
    challenger, champion = draw_correct_pairs(np.random.default_rng(3), shares, phi, PAIRS, RUNS)
    assert challenger.mean() - champion.mean() == pytest.approx(0.04, abs=0.003)
    assert (lower_bounds_of_gain(challenger, champion) > 0).sum() >= 0.9 * RUNS


def test_the_gate_says_of_one_run_what_the_simulation_says():
    challengers, champions = draw_correct_pairs(np.random.default_rng(4), (0.89, 0.86), PHI, PAIRS, 12)
    verdicts = []
    for challenger, champion in zip(challengers.T, champions.T, strict=True):
        verdicts.append(compare_with_champion(make_gate(), make_scores(challenger), make_scores(champion)))
    lower_bounds = lower_bounds_of_gain(challengers, champions)
    assert [verdict.low for verdict in verdicts] == lower_bounds.tolist()
    is_promoted = [verdict.outcome == "promoted" for verdict in verdicts]
    assert is_promoted == (lower_bounds > 0).tolist()
    assert 0 < sum(is_promoted) < len(verdicts)


@pytest.fixture(scope="module")
def models() -> np.ndarray:
    """Return a challenger and a champion, right on 0.9 and 0.8 of 600 pairs. The gain is 0.07 to 0.13."""
    return draw_correct_pairs(np.random.default_rng(5), (0.9, 0.8), PHI, 600, 1)[:, :, 0]


def test_a_verdict_has_gain_interval_and_pairs_and_its_bound_decides(models):
    challenger_mean, champion_mean = models.mean(axis=1)
    verdict = compare_with_champion(make_gate(), *map(make_scores, models))
    assert verdict.outcome == "promoted"
    assert verdict.pairs == 600
    assert verdict.challenger_score == pytest.approx(challenger_mean)
    assert verdict.champion_score == pytest.approx(champion_mean)
    assert verdict.gain == pytest.approx(challenger_mean - champion_mean)
    assert verdict.low < verdict.gain < verdict.high
    assert verdict.reason == (
        f"{EXACT_ACCURACY} on {PROTOCOL} {challenger_mean:.4f}, the champion's {champion_mean:.4f}: "
        f"gain {verdict.gain:+.4f}, 95 % interval {verdict.low:+.4f} to {verdict.high:+.4f} over 600 pairs; "
        "the lower bound exceeds 0"
    )
    for min_gain, outcome in ((verdict.low - 1e-6, "promoted"), (verdict.low, "refused")):
        assert compare_with_champion(make_gate(min_gain=min_gain), *map(make_scores, models)).outcome == outcome
    first_verdict = judge_without_champion(make_gate(guards={"SPICE": 0.1}), make_scores(models[0]))
    reason = f"there was no champion. {EXACT_ACCURACY} {challenger_mean:.4f} over 600 pairs of {PROTOCOL}"
    assert first_verdict == Verdict(
        outcome="first", reason=reason, pairs=600, challenger_score=verdict.challenger_score
    )
    stricter_verdict = compare_with_champion(make_gate(confidence=0.999), *map(make_scores, models))
    assert stricter_verdict.low < verdict.low
    assert "99.9 %" in stricter_verdict.reason


@pytest.mark.fault("23", "T13")
@pytest.mark.parametrize("case", ["the other way round", "equal pair by pair", "ten pairs"])
def test_what_is_worse_equal_or_of_few_pairs_is_refused(models, case):
    ten_pairs = np.stack([np.ones(10), np.zeros(10)])
    compared_models = {
        "the other way round": models[::-1],
        "equal pair by pair": models[[0, 0]],
        "ten pairs": ten_pairs,
    }[case]
    verdict = compare_with_champion(make_gate(), *map(make_scores, compared_models))
    assert verdict.outcome == "refused"
    assert verdict.pairs == len(compared_models[0])
    assert (verdict.low is None) == (case == "ten pairs")
    assert verdict.low is None or verdict.low <= 0


# Guards


@pytest.mark.fault("S2", "T13")
@pytest.mark.parametrize(
    ("challenger_spice", "champion_spice", "tolerance", "outcome"),
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
def test_a_guarded_score_may_be_worse_by_exactly_its_tolerance_and_no_more(
    models, challenger_spice, champion_spice, tolerance, outcome
):
    tables = []
    for exact, spice in zip(models, (challenger_spice, champion_spice), strict=True):
        tables.append(make_scores(exact, SPICE=[spice] * 600))
    verdict = compare_with_champion(make_gate(guards={"SPICE": tolerance}), *tables)
    assert verdict.outcome == outcome
    assert verdict.low > 0
    guard = verdict.guards["SPICE"]
    assert guard.challenger == pytest.approx(challenger_spice)
    assert guard.champion == pytest.approx(champion_spice)
    assert guard.tolerance == tolerance
    assert f"SPICE {challenger_spice:.4f}" in verdict.reason
    assert f"{champion_spice:.4f}" in verdict.reason


@pytest.mark.fault("T13")
@pytest.mark.parametrize("pairs", [10, 100, 600])
def test_a_guard_that_is_better_if_smaller_may_grow_by_exactly_its_tolerance(models, pairs):
    challenger, champion = (make_scores(exact) for exact in models)
    statistics = np.array(challenger["change_statistics"].to_pylist())
    statistics[:pairs, COUNTS.index("changed_called_unchanged")] = 1  # says "no change" of these pairs
    challenger = challenger.set_column(2, "change_statistics", pa.array(statistics.tolist()))
    increase = round(pairs / 600, 6)
    gate_at_limit = make_gate(guards={"false_no_change": increase})
    assert compare_with_champion(gate_at_limit, challenger, champion).outcome == "promoted"
    verdict = compare_with_champion(make_gate(guards={"false_no_change": increase - 0.001}), challenger, champion)
    assert verdict.outcome == "refused"
    assert f"false_no_change {increase:.4f}" in verdict.reason


@pytest.mark.fault("18", "23")
def test_a_model_without_a_score_of_the_gate_is_refused_or_not_comparable(models):
    champion_without_spice = make_scores(models[1])
    champion = make_scores(models[1], SPICE=[0.5] * 600)
    challenger = make_scores(models[0], SPICE=[0.6] * 600)
    verdict = compare_with_champion(
        make_gate(metric="SPICE", guards={"METEOR": 0.1, EXACT_ACCURACY: 0.1}), champion_without_spice, champion
    )
    assert verdict.outcome == "refused"
    for name in ("SPICE", "METEOR", PROTOCOL):
        assert name in verdict.reason
    assert EXACT_ACCURACY not in verdict.reason
    assert judge_without_champion(make_gate(metric="SPICE"), champion_without_spice).outcome == "refused"
    gates = [
        make_gate(guards={"SPICE": 0.1}),
        make_gate(metric="SPICE"),
        make_gate(metric="SPICE", guards={EXACT_ACCURACY: 0.1}),
    ]
    assert [has_comparable_scores(cfg, challenger, champion_without_spice) for cfg in gates] == [False, False, False]
    assert [has_comparable_scores(cfg, challenger, champion) for cfg in gates] == [True, True, True]
    for cfg in gates[:2]:
        verdict = compare_with_champion(cfg, challenger, champion_without_spice)
        assert verdict.outcome == "refused"
        assert "champion" in verdict.reason
        assert "SPICE" in verdict.reason


# Files that are not over the same pairs, and what is no number


def make_spice_scores(values: list[float | None]) -> pa.Table:
    names = [f"minichange/{n:06d}" for n in range(len(values))]
    column = pa.array(values, pa.float64())
    return pa.table({"protocol": [PROTOCOL] * len(values), "id": names, "SPICE": column})


SPREAD = [n / 200 for n in range(200)]
WORST_NULL = [None] * 40 + SPREAD[40:]
DIFFERENT_PAIRS = {
    "the same scores, the worst of them null": (
        make_spice_scores(WORST_NULL),
        make_spice_scores(SPREAD),
        "the challenger has no SPICE for 40 pairs",
    ),
    "the champion's worst scores null": (
        make_spice_scores(SPREAD),
        make_spice_scores(WORST_NULL),
        "the champion has no SPICE for 40 pairs",
    ),
    "as many nulls of other pairs": (
        make_spice_scores(WORST_NULL),
        make_spice_scores(SPREAD[:160] + [None] * 40),
        "the challenger has no SPICE for 40",
    ),
    "one null": (make_spice_scores([None, *SPREAD[1:]]), make_spice_scores([0.0] * 200), "such as minichange/000000"),
}


@pytest.mark.fault("T13", "S2")
@pytest.mark.parametrize("case", DIFFERENT_PAIRS)
def test_scores_that_are_not_over_the_same_pairs_are_refused(case):
    challenger, champion, words = DIFFERENT_PAIRS[case]
    verdict = compare_with_champion(make_gate(metric="SPICE"), challenger, champion)
    assert verdict.outcome == "refused", verdict.reason
    assert words in verdict.reason, verdict.reason
    tables = [
        table.append_column("CIDEr", pa.array([value] * len(table)))
        for table, value in ((challenger, 2.0), (champion, 1.0))
    ]
    assert compare_with_champion(make_gate(metric="CIDEr", guards={"SPICE": 1.0}), *tables).outcome == "refused"
    assert has_comparable_scores(make_gate(metric="SPICE"), challenger, champion) == (
        "the champion has" not in verdict.reason
    )


@pytest.mark.fault("T13")
def test_nulls_of_equal_pairs_in_any_order_are_compared_and_other_pairs_not(models):
    better_values = [value and value + 0.1 for value in WORST_NULL]
    order = np.random.default_rng(7).permutation(200)
    spice_gate = make_gate(metric="SPICE")
    verdict = compare_with_champion(
        spice_gate, make_spice_scores(better_values).take(order), make_spice_scores(WORST_NULL)
    )
    assert verdict.outcome == "promoted"
    assert verdict.gain == pytest.approx(0.1)
    for challenger, champion in ((WORST_NULL, WORST_NULL), ([], []), ([1.0], [0.0])):
        verdict = compare_with_champion(spice_gate, make_spice_scores(challenger), make_spice_scores(champion))
        assert verdict.outcome == "refused"
    challenger, champion = map(make_scores, models)
    assert has_comparable_scores(make_gate(), challenger, champion.take(np.arange(600)[::-1]))
    assert not has_comparable_scores(make_gate(), challenger, champion.slice(1))
    with pytest.raises(ValueError, match=r"600\D+599"):
        compare_with_champion(make_gate(), challenger, champion.slice(1))


@pytest.mark.fault("S2")
@pytest.mark.parametrize(
    ("value", "pairs"), [*((value, 600) for value in NO_NUMBERS), *((value, 1) for value in NO_NUMBERS[:3])]
)
@pytest.mark.parametrize("settings", [{"metric": "SPICE"}, {"guards": {"SPICE": 1e9}}], ids=["metric", "guard"])
def test_nan_infinity_and_missing_scores_are_refused_of_any_model(models, settings, value, pairs):
    column_without_score = pa.array([value] * pairs + [0.5] * (600 - pairs), pa.float64())
    challenger_without_score = make_scores(models[0], SPICE=column_without_score)
    champion_without_score = make_scores(models[1], SPICE=column_without_score)
    challenger = make_scores(models[0], SPICE=[0.6] * 600)
    champion = make_scores(models[1], SPICE=[0.4] * 600)
    cfg = make_gate(**settings)
    for bad_challenger, any_champion, reason in (
        (challenger_without_score, champion, "it has no SPICE"),
        (challenger_without_score, champion_without_score, "it has no SPICE"),
        (challenger, champion_without_score, "the champion has no SPICE"),
    ):
        verdict = compare_with_champion(cfg, bad_challenger, any_champion)
        assert verdict.outcome == "refused", verdict.reason
        assert reason in verdict.reason, verdict.reason
    assert not has_comparable_scores(cfg, challenger, champion_without_score), "the champion is scored again first"
    assert judge_without_champion(cfg, challenger_without_score).reason.startswith("it has no SPICE on")


def make_answers(is_right: np.ndarray) -> pa.Table:
    """Return a scores.parquet of a test set in which every second record is a question for a number."""
    ids = [f"minichange/{n:06d}" for n in range(2 * len(is_right))]
    exact_match: list[bool | None] = []
    for right in is_right.tolist():
        exact_match += [right, None]
    return pa.table({"protocol": [PROTOCOL] * len(ids), "id": ids, "exact_match": exact_match})


def test_the_gate_compares_the_answers_to_questions(models):
    gate = make_gate(metric="exact_match", guards={"exact_match": 0.01})
    tables = [make_answers(is_right) for is_right in models]
    verdict = compare_with_champion(gate, *tables)
    assert verdict.outcome == "promoted"
    assert verdict.challenger_score == pytest.approx(models[0].mean())
    assert verdict.champion_score == pytest.approx(models[1].mean())
    refused = compare_with_champion(gate, *tables[::-1])
    assert refused.outcome == "refused"
    assert "exact_match" in refused.reason
    assert "more than 0.01 worse" in refused.reason
    assert judge_without_champion(gate, tables[0]).outcome == "first"


def test_a_champion_that_was_scored_without_questions_is_scored_again(models):
    gate = make_gate(metric="exact_match")
    challenger = make_answers(models[0])
    champion = challenger.drop_columns(["exact_match"])
    assert not has_comparable_scores(gate, challenger, champion)
    assert has_comparable_scores(gate, challenger, make_answers(models[1]))


def with_answers(scores: pa.Table, model: list[bool], base: list[bool]) -> pa.Table:
    """Add the rows of a retention dataset with the answers of the model and of its base. True is a right answer."""
    tables = [scores]
    for protocol, right in (("skills/test", model), ("base:skills/test", base)):
        ids = [f"skills/{number}" for number in range(len(right))]
        exact_match = [float(value) for value in right]
        tables.append(pa.table({"protocol": [protocol] * len(ids), "id": ids, "exact_match": exact_match}))
    return pa.concat_tables(tables, promote_options="default")


ALL_RIGHT = [True] * 10
SEVEN_RIGHT = [True] * 7 + [False] * 3


@pytest.mark.parametrize(
    ("tolerance", "outcome", "first_outcome"), [(0.3, "promoted", "first"), (0.25, "refused", "refused")]
)
def test_a_version_that_lost_more_of_its_base_than_allowed_is_refused(models, tolerance, outcome, first_outcome):
    challenger, champion = map(make_scores, models)
    challenger = with_answers(challenger, model=SEVEN_RIGHT, base=ALL_RIGHT)
    gate = make_gate(retention={"exact_match": tolerance})
    for verdict, expected in (
        (compare_with_champion(gate, challenger, champion), outcome),
        (judge_without_champion(gate, challenger), first_outcome),
    ):
        assert verdict.outcome == expected
        is_named = "exact_match 0.7000 is more than 0.25 worse than the base's 1.0000" in verdict.reason
        assert is_named == (expected == "refused")


def test_a_version_that_gained_on_its_base_is_promoted_without_tolerance(models):
    challenger, champion = map(make_scores, models)
    challenger = with_answers(challenger, model=ALL_RIGHT, base=SEVEN_RIGHT)
    assert compare_with_champion(make_gate(retention={"exact_match": 0.0}), challenger, champion).outcome == "promoted"


def test_without_a_limit_a_loss_does_not_count(models):
    challenger, champion = map(make_scores, models)
    challenger = with_answers(challenger, model=[False] * 10, base=ALL_RIGHT)
    assert compare_with_champion(make_gate(), challenger, champion).outcome == "promoted"


@pytest.mark.parametrize(
    ("score", "has_answers", "reason"),
    [
        ("exact_match", False, "its scores contain no answers of its base"),
        ("CIDEr", True, "there is no CIDEr on skills/test"),
    ],
)
def test_a_loss_that_cannot_be_compared_refuses_the_version(models, score, has_answers, reason):
    challenger, champion = map(make_scores, models)
    if has_answers:
        challenger = with_answers(challenger, model=ALL_RIGHT, base=ALL_RIGHT)
    verdict = compare_with_champion(make_gate(retention={score: 1.0}), challenger, champion)
    assert verdict.outcome == "refused"
    assert reason in verdict.reason


def with_no_change(pairs: int, called_unchanged: int, protocol: str) -> pa.Table:
    """Return the scores of changed pairs if a model calls `called_unchanged` of them unchanged."""
    counts = np.zeros((pairs, len(COUNTS)))
    for name, values in {"captions": 1, "changed": 1, "changed_called_unchanged": np.arange(pairs)}.items():
        counts[:, COUNTS.index(name)] = values if name != "changed_called_unchanged" else values < called_unchanged
    ids = [f"skills/{number}" for number in range(pairs)]
    return pa.table({"protocol": [protocol] * pairs, "id": ids, "change_statistics": counts.tolist()})


@pytest.mark.parametrize(("model", "base", "outcome"), [(1, 4, "first"), (4, 3, "first"), (5, 3, "refused")])
def test_a_score_of_the_base_that_is_better_if_smaller_may_grow_by_its_tolerance(models, model, base, outcome):
    tables = [make_scores(models[0])]
    tables += [with_no_change(10, model, "skills/test"), with_no_change(10, base, "base:skills/test")]
    verdict = judge_without_champion(make_gate(retention={"false_no_change": 0.1}), pa.concat_tables(tables))
    assert verdict.outcome == outcome


def test_a_column_of_equally_long_lists_is_no_fault_of_the_file(models):
    assert faults_of_scores(make_gate(), make_scores(models[0])) == []


def test_a_list_that_is_null_is_no_fault_of_the_file(models):
    scores = make_scores(models[0])
    statistics = [None, *scores["change_statistics"].to_pylist()[1:]]
    scores = scores.set_column(2, "change_statistics", pa.array(statistics))
    assert faults_of_scores(make_gate(), scores) == []


def test_lists_from_which_no_score_can_be_computed_are_a_fault_of_the_file(models):
    scores = make_scores(models[0]).set_column(2, "change_statistics", pa.array([[1.0, 2.0]] * 600))
    (fault,) = faults_of_scores(make_gate(), scores)
    assert fault.code == "registry.scores_no_statistics"
    assert fault.fields["name"] == "change_statistics"
    assert fault.fields["score"] == EXACT_ACCURACY


def test_texts_that_have_only_scores_of_characters_are_compared_by_them(models):
    tables = []
    for exact, cider in zip(models, (1.5, 1.0), strict=True):
        scores = make_scores(exact, **{"CIDEr-char": [cider] * 600})
        tables.append(scores)
    gate = make_gate(metric="CIDEr", guards={"CIDEr": 0.1, EXACT_ACCURACY: 0.1})
    verdict = compare_with_champion(gate, *tables)
    assert verdict.outcome == "promoted"
    assert verdict.gain == pytest.approx(0.5)
    assert verdict.guards.keys() == {"CIDEr-char", EXACT_ACCURACY}
    assert verdict.reason.startswith("CIDEr-char on ")
    assert judge_without_champion(gate, tables[1]).challenger_score == pytest.approx(1.0)
    assert has_comparable_scores(gate, *tables)
    words_too = [scores.append_column("CIDEr", pa.array([0.5] * 600)) for scores in tables]
    assert judge_without_champion(gate, words_too[0]).challenger_score == pytest.approx(0.5)
