"""A real Prefect server, and a host that dies or sleeps while a stage runs: nobody has to do anything."""

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
from tests.flows.test_notices import Listener, listener  # noqa: F401
from tests.flows.test_services import Machine
from tests.flows.test_unattended import until
from tests.toy import store

CRASHED_S, GOES_ON_S = 120, 300


@pytest.fixture
def machine(project: Path, tmp_path: Path, listener: Listener) -> Iterator[Machine]:  # noqa: F811
    """A project whose last stage waits to be let go on."""
    text = (project / "toy.py").read_text()
    (project / "toy.py").write_text(text.replace("def evaluate(", SLOW, 1))
    toy.commit(project, "a slow stage")
    machine = Machine(project)
    machine.environment |= {"TOY_MARKS": str(tmp_path), "M3DIFF_NOTIFY": listener.address}
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


def of_worker(machine: Machine) -> list[psutil.Process]:
    """The worker and all that runs under it."""
    worker = machine.process("worker")
    return [worker, *worker.children(recursive=True)]


def begin(machine: Machine, deployment: str, name: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "prefect", "deployment", "run", deployment, "--flow-run-name", name]
    subprocess.run(command, cwd=machine.root, env=machine.environment, capture_output=True, check=True)
    return one(machine, name)


def host_dies(machine: Machine, run: str, marks: Path) -> None:
    """In the middle of a stage, which then begins again on a new worker and is let go on."""
    until((marks / "began").exists)
    family, died = of_worker(machine), time.monotonic()
    for process in family:
        process.kill()
    psutil.wait_procs(family, timeout=20)
    (marks / "began").unlink()
    until(lambda: "Crashed" in states(machine, run))
    assert time.monotonic() - died < CRASHED_S
    until((marks / "began").exists)
    assert time.monotonic() - died < GOES_ON_S
    (marks / "go").touch()


@pytest.mark.fault("04")
@pytest.mark.slow(200)
def test_a_run_whose_host_dies_is_crashed_within_two_minutes_and_goes_on_within_five_by_itself(machine, tmp_path):
    host_dies(machine, begin(machine, "m3diff/full", "first")["id"], tmp_path)
    until(lambda: one(machine, "first")["state_name"] == "Completed")
    assert one(machine, "first")["run_count"] == 2
    assert (tmp_path / "ended").read_text() == "once "
    assert len(store(machine.root).search_model_versions("name = 'm3diff'")) == 1


@pytest.mark.fault("W1")
@pytest.mark.slow(250)
def test_a_worker_whose_machine_slept_goes_on_with_what_it_has_in_hand(machine, tmp_path):
    run = begin(machine, "m3diff/full", "first")["id"]
    until((tmp_path / "began").exists)
    family = of_worker(machine)
    for process in family:
        process.suspend()
    until(lambda: "Crashed" in states(machine, run))
    for process in family:
        process.resume()
    time.sleep(40)  # the worker asks for runs, and looks after them
    assert all(process.is_running() for process in family)
    assert states(machine, run)[-1] == "Crashed", "it was started again beside itself"
    (tmp_path / "go").touch()
    until(lambda: one(machine, "first")["state_name"] == "Completed")
    assert (tmp_path / "ended").read_text() == "once "
    assert len(store(machine.root).search_model_versions("name = 'm3diff'")) == 1


@pytest.mark.fault("W2")
@pytest.mark.slow(120)
def test_a_run_whose_worker_is_killed_before_it_began_crashes_is_told_and_keeps_no_place(machine, listener):  # noqa: F811
    """The keeper starts the worker; m3diff/watch, one at a time, cancels what comes while one is at work."""
    run = begin(machine, "m3diff/watch", "first")["id"]
    until(lambda: one(machine, "first")["state_type"] == "PENDING")
    for process in of_worker(machine):
        process.kill()
    until(lambda: one(machine, "first")["state_type"] == "CRASHED")
    begin(machine, "m3diff/watch", "second")
    until(lambda: one(machine, "second")["state_name"] in ("Completed", "Skipped"))
    assert [told["title"] for told in listener.got if run in told["message"]] == ["m3diff/watch crashed"]
    assert machine.make("status").returncode == 0
