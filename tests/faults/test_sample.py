"""`--all` takes a sample of the longest tests and of the slow ones of faults."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import FAULTS, LONG_S, SAMPLE_S, beyond_sample, is_sampled


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
