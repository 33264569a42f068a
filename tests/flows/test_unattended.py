"""A real Prefect server: late runs become one, a failure is told, and new data start a run that fails once."""

import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest

from m3diff.provenance.git import git
from tests import toy
from tests.flows.test_notices import Listener, listener  # noqa: F401
from tests.flows.test_services import Machine

PATIENCE_S = 400


def until(condition: Callable[[], Any]) -> Any:
    """Wait for what is true in the end, and give it."""
    deadline = time.monotonic() + PATIENCE_S
    while not (found := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.5)
    return found


def missed(machine: Machine, name: str, *runs: str) -> None:
    """Let the server have runs of a deployment's schedule that were due an hour ago and later."""
    hour = datetime.now(UTC) - timedelta(hours=1)
    api = f"{machine.environment['PREFECT_API_URL']}/deployments/{deployment(machine, name)['id']}/create_flow_run"
    for minute, run in enumerate(runs):
        due = (hour + timedelta(minutes=minute)).isoformat()
        state = {"type": "SCHEDULED", "name": "Late", "state_details": {"scheduled_time": due}}
        body = {"name": run, "state": state, "tags": ["auto-scheduled"]}
        until(lambda body=body: is_done(httpx.post(api, json=body, timeout=60)))


def states(machine: Machine, *names: str) -> list[str]:
    runs = machine.ask("flow_runs", {"flow_runs": {"name": {"any_": list(names)}}})
    return sorted(run["state_name"] for run in runs)


@pytest.fixture
def machine(project: Path, listener: Listener) -> Iterator[Machine]:  # noqa: F811
    """A project with a folder that people put files into, which its first stage checks; one file is bad."""
    mine = project / "data/01_raw/mine"
    mine.mkdir(parents=True)
    (mine / "bad.csv").write_text("1")
    toy.run(project, "dvc", "add", "-q", "data/01_raw/mine")
    (project / "check.py").write_text(
        "import pathlib, sys\n"
        "for path in pathlib.Path('data/01_raw/mine').glob('bad*'):\n"
        "    sys.exit(f'{path.name} row 7: no image')\n"
    )
    first = "  synthesize:\n    foreach"
    check = f"  check:\n    cmd: {sys.executable} check.py\n    deps: [data/01_raw/mine]\n\n"
    graph = project / "dvc.yaml"
    graph.write_text(graph.read_text().replace(first, check + first))
    toy.commit(project, "a dataset of our own")
    machine = Machine(project)
    machine.environment |= {"M3DIFF_DROP": "data/01_raw/mine", "M3DIFF_NOTIFY": listener.address}
    up(machine)
    yield machine
    machine.make("down")


@pytest.mark.slow(120)
def test_late_runs_become_one_and_new_data_start_one_and_each_failure_is_told_once(machine, listener):  # noqa: F811
    mine = machine.root / "data/01_raw/mine"
    (mine / "bad.csv").rename(mine / "bad2.csv")  # in the checkout alone, until a look takes it up

    pause_pool(machine, True)  # as where the machine was off
    missed(machine, "retrain", "one", "two", "three")
    pause_pool(machine, False)
    assert until(lambda: ended(states(machine, "one", "two", "three"))) == ["Coalesced", "Coalesced", "Failed"]
    (first,) = until(lambda: listener.got)
    (run,) = [run for run in runs_of(machine, "one", "two", "three") if run["state_name"] == "Failed"]
    assert first["title"] == "m3diff/retrain failed"
    assert "stage check exited with 1 bad.csv row 7: no image. " in first["message"]
    assert f"http://127.0.0.1:{machine.prefect}/runs/flow-run/{run['id']} " in first["message"]
    assert run["name"] == "three", "the latest does the work"

    missed(machine, "watch", "look")
    assert until(lambda: ended(states(machine, "look"))) == ["Completed"]
    assert git("diff", "--name-only", "HEAD", "runs/data", cwd=machine.root) == "data/01_raw/mine.dvc"
    second = until(lambda: listener.got[1:])[0]
    assert "stage check exited with 1 bad2.csv row 7: no image. " in second["message"]
    missed(machine, "watch", "another look")
    assert until(lambda: ended(states(machine, "another look"))) == ["Skipped"]
    assert len(listener.got) == 2
    assert "secret-word" not in (machine.root / "services/worker.log").read_text()


def up(machine: Machine) -> None:
    """`make up`, and then no runs of the schedules beside those that the test asks for."""
    started = machine.make("up")
    assert started.returncode == 0, started.stdout + started.stderr
    for name in ("retrain", "watch"):
        found = deployment(machine, name)
        (schedule,) = found["schedules"]
        api = f"{machine.environment['PREFECT_API_URL']}/deployments/{found['id']}/schedules/{schedule['id']}"
        until(lambda api=api: is_done(httpx.patch(api, json={"active": False}, timeout=60)))


def pause_pool(machine: Machine, paused: bool) -> None:
    api = f"{machine.environment['PREFECT_API_URL']}/work_pools/m3diff"
    until(lambda: is_done(httpx.patch(api, json={"is_paused": paused}, timeout=60)))


def is_done(answer: httpx.Response) -> bool:
    """Whether the server did it; not where it says that it is busy."""
    if answer.status_code == httpx.codes.SERVICE_UNAVAILABLE:
        return False
    answer.raise_for_status()
    return True


def deployment(machine: Machine, name: str) -> dict[str, Any]:
    api = f"{machine.environment['PREFECT_API_URL']}/deployments/name/m3diff/{name}"
    return httpx.get(api).raise_for_status().json()


def runs_of(machine: Machine, *names: str) -> list[dict[str, Any]]:
    return machine.ask("flow_runs", {"flow_runs": {"name": {"any_": list(names)}}})


def ended(names: list[str]) -> list[str]:
    """The names of the states where all are of runs that ended."""
    over = {"Completed", "Failed", "Crashed", "Cancelled", "Coalesced", "Skipped", "Rejected"}
    return names if names and set(names) <= over else []
