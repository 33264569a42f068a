"""A real Prefect server: late runs become one, a failure is told, and new data start a run that fails once."""

import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest

from flows.git import git
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
    """Let the server have runs of a deployment that were due an hour ago."""
    due = (datetime.now(UTC) - timedelta(hours=1)).isoformat()
    api = f"{machine.environment['PREFECT_API_URL']}/deployments/{deployment(machine, name)['id']}/create_flow_run"
    for run in runs:
        state = {"type": "SCHEDULED", "name": "Late", "state_details": {"scheduled_time": due}}
        asked = {} if name == "watch" else {"reason": run}
        httpx.post(api, json={"name": run, "state": state, "parameters": asked}).raise_for_status()


def states(machine: Machine, *names: str) -> list[str]:
    runs = machine.ask("flow_runs", {"flow_runs": {"name": {"any_": list(names)}}})
    return sorted(run["state_name"] for run in runs)


@pytest.mark.slow(150)
def test_late_runs_become_one_new_data_start_a_run_and_its_failure_is_told_once(project, listener: Listener):  # noqa: F811
    mine = project / "data/01_raw/mine"
    mine.mkdir(parents=True)
    (mine / "a.csv").write_text("1")
    toy.run(project, "dvc", "add", "-q", str(mine.relative_to(project)))
    graph = project / "dvc.yaml"
    first = "  synthesize:\n    foreach"
    check = f"  check:\n    cmd: {sys.executable} check.py\n    deps: [data/01_raw/mine]\n\n"
    (project / "check.py").write_text(
        "import pathlib, sys\nif pathlib.Path('data/01_raw/mine/bad.csv').exists():\n"
        "    sys.exit('mine/bad.csv row 7: no image')\n"
    )
    graph.write_text(graph.read_text().replace(first, check + first))
    toy.commit(project, "a dataset of our own")
    (mine / "bad.csv").write_text("1")  # in the checkout alone, until a look takes it up
    machine = Machine(project)
    machine.environment |= {"M3DIFF_DROP": "data/01_raw/mine", "M3DIFF_NOTIFY": listener.address}
    try:
        up(machine)
        missed(machine, "retrain", "one", "two", "three")
        late = until(lambda: ended(states(machine, "one", "two", "three")))
        assert late == ["Coalesced", "Coalesced", "Completed"]
        (run,) = [run for run in runs_of(machine, "one", "two", "three") if run["state_name"] == "Completed"]
        message = git("log", "-2", "--format=%B", f"runs/{run['id']}", cwd=project)
        (reason,) = [line for line in message.splitlines() if line.startswith("Reason: ") and "one" in line][:1]
        assert set(reason.removeprefix("Reason: ").split("; ")) == {"one", "two", "three"}
        until(lambda: [notice for notice in listener.got if "promoted" in notice["title"]])

        missed(machine, "watch", "look")
        until(lambda: ended(states(machine, "look")))
        (failure,) = until(lambda: [notice for notice in listener.got if "failed" in notice["title"]])
        assert failure["title"] == "m3diff/retrain failed"
        assert "stage check exited with 1 mine/bad.csv row 7: no image. " in failure["message"]
        assert f"http://127.0.0.1:{machine.prefect}/runs/flow-run/" in failure["message"]
        missed(machine, "watch", "another look")
        assert until(lambda: ended(states(machine, "another look"))) == ["Skipped"]
        assert len([notice for notice in listener.got if "failed" in notice["title"]]) == 1
        assert "secret-word" not in (project / "services/worker.log").read_text()
    finally:
        machine.make("down")


def up(machine: Machine) -> None:
    """`make up`, and then no runs of the schedules beside those that the test asks for."""
    started = machine.make("up")
    assert started.returncode == 0, started.stdout + started.stderr
    for name in ("retrain", "watch"):
        found = deployment(machine, name)
        (schedule,) = found["schedules"]
        api = f"{machine.environment['PREFECT_API_URL']}/deployments/{found['id']}/schedules/{schedule['id']}"
        httpx.patch(api, json={"active": False}).raise_for_status()


def deployment(machine: Machine, name: str) -> dict[str, Any]:
    api = f"{machine.environment['PREFECT_API_URL']}/deployments/name/m3diff/{name}"
    return httpx.get(api).raise_for_status().json()


def runs_of(machine: Machine, *names: str) -> list[dict[str, Any]]:
    return machine.ask("flow_runs", {"flow_runs": {"name": {"any_": list(names)}}})


def ended(names: list[str]) -> list[str]:
    """The names of the states where all are of runs that ended."""
    over = {"Completed", "Failed", "Crashed", "Cancelled", "Coalesced", "Skipped", "Rejected"}
    return names if names and set(names) <= over else []
