"""Which tests of faults a run takes: all where they are asked for, else the quick ones and some of the rest."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import FAULTS, LONG_S, SAMPLE_S, beyond_sample, is_run_of_all, is_sampled

SECONDS = {
    f"{FAULTS if number % 2 else FAULTS.parent}/test_a.py::test_{number}": (50 if number % 2 else LONG_S) + number
    for number in range(10)
}


def item(nodeid: str, seconds: float) -> Any:
    mark = pytest.mark.slow(seconds).mark if seconds else None
    path = Path(nodeid.partition("::")[0])
    return SimpleNamespace(nodeid=nodeid, path=path, get_closest_marker=lambda name: mark if name == "slow" else None)


def taken(seed: int) -> set[str]:
    others = {f"{FAULTS}/test_a.py::test_quick": 0, f"{FAULTS.parent}/flows/test_b.py::test_slow": LONG_S - 1}
    items = [item(*entry) for entry in (SECONDS | others).items()]
    left_out = beyond_sample(items, seed)
    assert not left_out & others.keys()
    return SECONDS.keys() - left_out


def test_the_longest_and_the_slow_ones_of_faults_are_sampled():
    flows = FAULTS.parent / "flows/test_b.py"
    of_faults = item(f"{flows}::test_fault", 10)
    of_faults.get_closest_marker = lambda name: pytest.mark.slow(10).mark
    assert is_sampled(of_faults)
    assert is_sampled(item(f"{flows}::test_long", LONG_S))
    assert not is_sampled(item(f"{flows}::test_slow", LONG_S - 1))


def test_a_sample_lasts_three_minutes_at_most_and_is_the_same_for_a_seed():
    for seed in range(20):
        assert 0 < sum(SECONDS[test] for test in taken(seed)) <= SAMPLE_S
        assert taken(seed) == taken(seed)


def test_every_test_has_its_turn():
    assert set().union(*(taken(seed) for seed in range(100))) == set(SECONDS)


@pytest.mark.parametrize(
    ("places", "marks", "all_of_them"),
    [
        ([], "not gpu", True),
        (["tests"], "not gpu", True),
        ([], "fault and not gpu", False),
        (["tests/faults"], "not gpu", False),
        (["tests/faults/test_a.py::test_1"], "not gpu", False),
        (["tests/flows"], "not gpu", False),
    ],
)
def test_who_asks_for_faults_gets_all(monkeypatch, places, marks, all_of_them):
    monkeypatch.chdir(FAULTS.parents[1])
    config: Any = SimpleNamespace(option=SimpleNamespace(file_or_dir=places, markexpr=marks))
    assert is_run_of_all(config) == all_of_them
