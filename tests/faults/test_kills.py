"""A few random kills; `make kills` has many."""

import os
import signal
import sys
from pathlib import Path

import psutil
import pytest

from flows import dvc
from tests.faults.kills import run
from tests.faults.machine import number_in

KILLS, SEED = 5, 20261122


@pytest.mark.slow(280)
def test_whatever_process_of_a_flow_is_killed_the_next_run_leaves_all_as_if_none_had_been(tmp_path: Path) -> None:
    told = run(tmp_path, KILLS, SEED)
    assert told.broken == []
    assert len(told.kills) == KILLS
    assert told.rounds >= 2


def test_what_dvc_was_asked_dies_with_the_flow_that_asked(tmp_path: Path) -> None:
    """A push may take hours; the next run would push beside it."""
    child = os.fork()
    if child == 0:
        os.chdir(tmp_path)
        say = "import os, time; open('p', 'w').write(str(os.getpid())); os.rename('p', 'pid'); time.sleep(60)"
        dvc.DVC[:] = [sys.executable, "-c", say]
        dvc.ask("push")
        os._exit(0)
    asked = number_in(tmp_path / "pid", 60)
    assert asked is not None
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    _, alive = psutil.wait_procs([psutil.Process(asked)] if psutil.pid_exists(asked) else [], timeout=10)
    assert alive == [], "it outlived its flow"
