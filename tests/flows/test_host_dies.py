"""A real Prefect server, and a host that dies while a stage runs: a new worker is all that the run needs to go on."""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests import toy
from tests.faults.test_prefect import SLOW
from tests.flows.test_services import Machine
from tests.flows.test_unattended import until
from tests.register.conftest import store

CRASHED_S, GOES_ON_S = 120, 300


@pytest.fixture
def machine(project: Path, tmp_path: Path) -> Iterator[Machine]:
    """A project whose last stage waits to be let go on."""
    text = (project / "toy.py").read_text()
    (project / "toy.py").write_text(text.replace("def evaluate(", SLOW, 1))
    toy.commit(project, "a slow stage")
    machine = Machine(project)
    machine.environment["TOY_MARKS"] = str(tmp_path)
    started = machine.make("up")
    assert started.returncode == 0, started.stdout + started.stderr
    yield machine
    machine.make("down")


def states(machine: Machine, run: str) -> list[str]:
    """The states that the run was in, by name."""
    api = f"{machine.environment['PREFECT_API_URL']}/flow_run_states/"
    return [state["name"] for state in httpx.get(api, params={"flow_run_id": run}).raise_for_status().json()]


def one(machine: Machine, name: str) -> dict[str, Any]:
    (run,) = machine.ask("flow_runs", {"flow_runs": {"name": {"any_": [name]}}})
    return run


def host_dies(machine: Machine, run: str, marks: Path) -> None:
    """In the middle of a stage, which then begins again on a new worker and is let go on."""
    until((marks / "began").exists)
    worker = machine.process("worker")
    family = [worker, *worker.children(recursive=True)]
    died = time.monotonic()
    for process in family:
        process.kill()
    psutil.wait_procs(family, timeout=20)
    (marks / "began").unlink()
    assert machine.make("up").returncode == 0
    until(lambda: "Crashed" in states(machine, run))
    assert time.monotonic() - died < CRASHED_S
    until((marks / "began").exists)
    assert time.monotonic() - died < GOES_ON_S
    (marks / "go").touch()


@pytest.mark.fault("04")
@pytest.mark.slow(200)
def test_a_run_whose_host_dies_is_crashed_within_two_minutes_and_goes_on_within_five_by_itself(machine, tmp_path):
    command = [sys.executable, "-m", "prefect", "deployment", "run", "m3diff/full", "--flow-run-name", "first"]
    subprocess.run(command, cwd=machine.root, env=machine.environment, capture_output=True, check=True)
    host_dies(machine, one(machine, "first")["id"], tmp_path)
    until(lambda: one(machine, "first")["state_name"] == "Completed")
    assert one(machine, "first")["run_count"] == 2
    assert (tmp_path / "ended").read_text() == "once "
    assert len(store(machine.root).search_model_versions("name = 'm3diff'")) == 1
