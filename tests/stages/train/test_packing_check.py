"""Test how much packed and separate passes may differ. tests/models/test_cached_prompts.py tests the comparison."""

import pytest

from m3diff.stages.train.packing_check import Differences, PackingComparison


@pytest.mark.parametrize(
    ("difference_of_orders", "limit"), [(0.0, 1e-5), (3e-5, 3e-4)], ids=["rounding", "ten times that of two orders"]
)
def test_a_loss_may_differ_by_the_larger_limit(difference_of_orders, limit):
    order = Differences(difference_of_orders, {"llm": 0.0})
    assert PackingComparison(Differences(0.999 * limit, {"llm": 0.0}), order).excesses() == []
    (excess,) = PackingComparison(Differences(1.001 * limit, {"llm": 0.0}), order).excesses()
    assert excess.startswith("loss ")


@pytest.mark.parametrize(
    ("difference_of_orders", "limit"), [(0.0, 1e-3), (2e-4, 2e-3)], ids=["rounding", "ten times that of two orders"]
)
def test_the_gradients_of_a_part_may_differ_by_the_larger_limit(difference_of_orders, limit):
    order = Differences(0.0, {"llm": difference_of_orders})
    assert PackingComparison(Differences(0.0, {"llm": 0.999 * limit}), order).excesses() == []
    (excess,) = PackingComparison(Differences(0.0, {"llm": 1.001 * limit}), order).excesses()
    assert excess.startswith("gradients of llm ")


def test_a_difference_that_is_not_a_number_exceeds_the_limit():
    not_a_number = Differences(float("nan"), {"llm": float("nan")})
    assert len(PackingComparison(not_a_number, Differences(0.0, {"llm": 0.0})).excesses()) == 2
