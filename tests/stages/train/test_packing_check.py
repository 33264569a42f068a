"""Test the limits of the check that packing is exact. tests/models/test_cached_prompts.py tests what it compares."""

import pytest

from m3diff.stages.train.packing_check import Differences, PackingComparison

EXACT = Differences(0.0, {"llm": 0.0})


@pytest.mark.parametrize("limit", [1e-5, 10 * 3e-5], ids=["of rounding", "ten times the difference between two orders"])
def test_a_loss_may_differ_by_the_larger_limit(limit):
    order = Differences(3e-5 if limit > 1e-5 else 0.0, {"llm": 0.0})
    assert PackingComparison(Differences(0.999 * limit, {"llm": 0.0}), order).excesses() == []
    (excess,) = PackingComparison(Differences(1.001 * limit, {"llm": 0.0}), order).excesses()
    assert excess.startswith("loss ")


@pytest.mark.parametrize("limit", [1e-3, 10 * 2e-4], ids=["of rounding", "ten times the difference between two orders"])
def test_the_gradients_of_a_part_may_differ_by_the_larger_limit(limit):
    order = Differences(0.0, {"llm": 2e-4 if limit > 1e-3 else 0.0})
    assert PackingComparison(Differences(0.0, {"llm": 0.999 * limit}), order).excesses() == []
    (excess,) = PackingComparison(Differences(0.0, {"llm": 1.001 * limit}), order).excesses()
    assert excess.startswith("gradients of llm ")


def test_a_difference_that_is_no_number_exceeds_the_limit():
    assert len(PackingComparison(Differences(float("nan"), {"llm": float("nan")}), EXACT).excesses()) == 2
