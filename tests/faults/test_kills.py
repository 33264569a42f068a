"""A few random kills; `make kills` has many."""

from pathlib import Path

import pytest

from tests.faults.kills import run

KILLS, SEED = 5, 20261122


@pytest.mark.slow(280)
def test_whatever_process_of_a_flow_is_killed_the_next_run_leaves_all_as_if_none_had_been(tmp_path: Path) -> None:
    told = run(tmp_path, KILLS, SEED)
    assert told.broken == []
    assert len(told.kills) == KILLS
    assert told.rounds >= 2
