"""A run takes all tests of faults where they are asked for, else the quick ones and some of the rest."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import FAULTS, LONG_S, SAMPLE_OF_ALL_S, SAMPLE_S, beyond_sample, is_run_of_all, is_sampled

SECONDS = {
    f"{FAULTS if number % 2 else FAULTS.parent}/test_a.py::test_{number}": (50 if number % 2 else LONG_S) + number
    for number in range(10)
}


def item(nodeid: str, seconds: float) -> Any:
    mark = pytest.mark.slow(seconds).mark if seconds else None
    path = Path(nodeid.partition("::")[0])
    return SimpleNamespace(nodeid=nodeid, path=path, get_closest_marker=lambda name: mark if name == "slow" else None)


QUICK, SLOW = f"{FAULTS}/test_a.py::test_quick", f"{FAULTS.parent}/flows/test_b.py::test_slow"


def taken(seed: int, every: bool) -> set[str]:
    items = [item(*entry) for entry in (SECONDS | {QUICK: 0, SLOW: LONG_S - 1}).items()]
    left_out = beyond_sample(items, seed, every)
    assert QUICK not in left_out
    return {one.nodeid for one in items} - left_out - {QUICK}


def test_a_sample_of_the_longest_and_slow_faults_lasts_as_long_as_it_may_is_the_same_for_a_seed_and_leaves_none():
    marked = item(SLOW, 10)
    marked.get_closest_marker = lambda name: pytest.mark.slow(10).mark
    sampled = [is_sampled(one) for one in (marked, item(SLOW, LONG_S), item(SLOW, LONG_S - 1))]
    assert sampled == [True, True, False]
    seconds = SECONDS | {SLOW: LONG_S - 1}
    for seed in range(20):
        assert 0 < sum(seconds[test] for test in taken(seed, every=False)) <= SAMPLE_S
        assert 0 < sum(seconds[test] for test in taken(seed, every=True) - {SLOW}) <= SAMPLE_OF_ALL_S
        assert SLOW in taken(seed, every=True)
        assert taken(seed, every=False) == taken(seed, every=False)
    for every in (False, True):
        assert set().union(*(taken(seed, every) for seed in range(100))) == {*SECONDS, SLOW}


@pytest.mark.parametrize(
    ("place", "marks", "all_of_them"),
    [
        ("", "not gpu", True),
        ("tests", "not gpu", True),
        ("", "fault and not gpu", False),
        ("tests/faults", "not gpu", False),
        ("tests/faults/test_a.py::test_1", "not gpu", False),
        ("tests/flows", "not gpu", False),
    ],
)
def test_who_asks_for_faults_gets_all(monkeypatch, place, marks, all_of_them):
    monkeypatch.chdir(FAULTS.parents[1])
    config: Any = SimpleNamespace(option=SimpleNamespace(file_or_dir=[place] if place else [], markexpr=marks))
    assert is_run_of_all(config) == all_of_them
