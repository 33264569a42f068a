"""The table of faults is whole, and `--all` takes a sample of the longest tests."""

import ast
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import FAULTS, LONG_S, SAMPLE_S, beyond_sample, is_sampled
from tests.faults.table import KEYS

TESTS = Path(__file__).parents[1]


def marked() -> set[str]:
    """The keys that some test is marked with."""
    return {
        ast.literal_eval(key)
        for file in TESTS.rglob("test_*.py")
        for node in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef)
        for mark in node.decorator_list
        if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.fault"
        for key in mark.args
    }


def test_every_row_has_a_test_and_a_marker_names_a_row_of_the_table_which_has_each_fault_once():
    assert marked() == {*KEYS}
    numbers = [f"{number:02}" for number in range(1, 33)]
    found_here = ["B1", "B2", *(f"S{number}" for number in range(1, 8)), *(f"P{number}" for number in range(1, 15))]
    found_here += [*(f"m{number}" for number in range(1, 10)), *(f"W{number}" for number in range(1, 6))]
    found_here += [f"T{number}" for number in (5, 9, 10, 12, 13, 14, 15, 17)]
    assert sorted([*numbers, *found_here, "see"]) == sorted(KEYS)


def item(nodeid: str, seconds: float, mark: str = "slow") -> Any:
    marks = {"slow": pytest.mark.slow(seconds).mark if seconds else None, "fault": None}
    marks[mark] = pytest.mark.slow(seconds).mark
    return SimpleNamespace(nodeid=nodeid, path=Path(nodeid), get_closest_marker=marks.get)


def test_a_sample_lasts_as_long_as_it_may_is_the_same_for_a_seed_and_leaves_none_out_for_ever():
    files = (f"{FAULTS}/test_a.py", f"{FAULTS.parent}/flows/test_b.py")
    slow, quick = [item(file, LONG_S - 1) for file in files], item(files[0], 0)
    assert [is_sampled(one) for one in (*slow, quick, item(files[1], 10, "fault"), item(files[1], LONG_S))] == [
        *(True, False, False, True, True)
    ]
    longest = [item(f"{files[number % 2]}::{number}", LONG_S + number) for number in range(10)]
    taken = [{one.nodeid for one in longest} - beyond_sample([*longest, *slow, quick], seed) for seed in range(100)]
    assert taken[0] == {one.nodeid for one in longest} - beyond_sample([quick, *slow, *longest], 0)
    assert all(0 < sum(LONG_S + int(name.rpartition("::")[2]) for name in names) <= SAMPLE_S for names in taken)
    assert set().union(*taken) == {one.nodeid for one in longest}
