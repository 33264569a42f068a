"""A real Prefect server and nobody there: late runs run, new data start one, hosts die or sleep."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import psutil
import pytest
import yaml

from flows.watch import SETTLED_S
from m3diff.provenance.git import git
from tests import toy
from tests.servers import Listener, Machine, services_of, until
from tests.toy import store

MINE = Path("data/01_raw/mine")
CRASHED_S, GOES_ON_S = 120, 300
OVER = {"Completed", "Failed", "Crashed", "Cancelled", "Skipped", "Rejected"}


@contextmanager
def without_schedules(root: Path, **environment: str) -> Iterator[Machine]:
    """`make up`, and no runs of the schedules beside those that the test asks for."""
    with services_of(root, **environment) as machine:
        for name in ("retrain", "watch"):
            found = machine.ask(f"/deployments/name/m3diff/{name}")
            (schedule,) = found["schedules"]
            machine.ask(f"/deployments/{found['id']}/schedules/{schedule['id']}", {"active": False}, "PATCH")
        yield machine


def missed(machine: Machine, deployment: str, run: str) -> Callable[[], str]:
    """Let the server have a run of a schedule that was due an hour ago; its state once it ended."""
    due, id_ = datetime.now(UTC) - timedelta(hours=1), machine.ask(f"/deployments/name/m3diff/{deployment}")["id"]
    state = {"type": "SCHEDULED", "name": "Late", "state_details": {"scheduled_time": due.isoformat()}}
    machine.ask(f"/deployments/{id_}/create_flow_run", {"name": run, "state": state, "tags": ["auto-scheduled"]})
    return lambda: found if (found := machine.states(run)[0]) in OVER else ""


@pytest.mark.slow(120)
def test_a_late_run_runs_new_data_start_one_and_each_failure_is_told_once(project, listener: Listener):
    """A stage checks a folder that people put files into; one file is bad."""
    (project / MINE).mkdir(parents=True)
    (project / MINE / "bad.csv").write_text("1")
    toy.run(project, "dvc", "add", "-q", str(MINE))
    check = f"for path in pathlib.Path('{MINE}').glob('bad*'): sys.exit(f'{{path.name}} row 7: no image')"
    (project / "check.py").write_text(f"import pathlib, sys\n{check}\n")
    graph = yaml.safe_load((project / "dvc.yaml").read_text())
    graph["stages"] = {"check": {"cmd": "python check.py", "deps": [str(MINE)]}} | graph["stages"]
    (project / "dvc.yaml").write_text(yaml.safe_dump(graph, sort_keys=False))
    toy.commit(project, "a dataset of our own")
    (project / MINE / "bad.csv").rename(project / MINE / "bad2.csv")  # in the checkout alone, until a look
    renamed = time.monotonic()
    with without_schedules(project, M3DIFF_DROP=str(MINE), M3DIFF_NOTIFY=listener.address) as machine:
        assert until(missed(machine, "retrain", "night")) == "Failed"
        time.sleep(max(0.0, renamed + SETTLED_S + 1 - time.monotonic()))
        assert until(missed(machine, "watch", "look")) == "Completed"
        assert git("diff", "--name-only", "HEAD", "runs/data", cwd=project) == f"{MINE}.dvc"
        until(lambda: listener.got[1:])
        assert until(missed(machine, "watch", "another look")) == "Skipped"
        for told, file in zip(listener.got, ("bad.csv", "bad2.csv"), strict=True):
            assert told["title"] == "m3diff/retrain failed"
            assert f"stage check exited with 1 {file} row 7: no image. " in told["message"]
            assert f"http://127.0.0.1:{machine.prefect}/runs/flow-run/" in told["message"]
        assert "secret-word" not in (project / "services/worker.log").read_text()


# Hosts that die or sleep


@pytest.fixture
def machine(project: Path, tmp_path: Path, listener: Listener) -> Iterator[Machine]:
    """A project whose last stage waits to be let go on."""
    toy.replace_stage(project, "evaluate", toy.WAITS)
    toy.commit(project, "a slow stage")
    with services_of(project, TOY_MARKS=str(tmp_path), M3DIFF_NOTIFY=listener.address) as machine:
        yield machine


def history_of(machine: Machine, run: str) -> list[str]:
    """The states that the run was in, by name."""
    return [state["name"] for state in machine.ask(f"/flow_run_states/?flow_run_id={run}")]


def of_worker(machine: Machine) -> list[psutil.Process]:
    """The worker and all that runs under it."""
    worker = machine.process("worker")
    return [worker, *worker.children(recursive=True)]


def host_dies(machine: Machine, run: str, marks: Path) -> None:
    """In the middle of a stage, which then begins again on a new worker and is let go on."""
    until((marks / "began").exists)
    family, died = of_worker(machine), time.monotonic()
    for process in family:
        process.kill()
    psutil.wait_procs(family, timeout=20)
    (marks / "began").unlink()
    until(lambda: "Crashed" in history_of(machine, run))
    assert time.monotonic() - died < CRASHED_S
    until((marks / "began").exists)
    assert time.monotonic() - died < GOES_ON_S
    (marks / "go").touch()


@pytest.mark.fault("04")
@pytest.mark.slow(200)
def test_a_run_whose_host_dies_is_crashed_within_two_minutes_and_goes_on_within_five_by_itself(machine, tmp_path):
    host_dies(machine, machine.begin("m3diff/full", "first")["id"], tmp_path)
    until(lambda: machine.states("first") == ["Completed"])
    assert machine.runs("first")[0]["run_count"] == 2
    assert (tmp_path / "ended").read_text() == "once "
    assert len(store(machine.root).search_model_versions("name = 'm3diff'")) == 1


@pytest.mark.fault("W1")
@pytest.mark.slow(250)
def test_a_worker_whose_machine_slept_goes_on_with_what_it_has_in_hand(machine, tmp_path):
    run = machine.begin("m3diff/full", "first")["id"]
    until((tmp_path / "began").exists)
    family = of_worker(machine)
    for process in family:
        process.suspend()
    until(lambda: "Crashed" in history_of(machine, run))
    for process in family:
        process.resume()
    time.sleep(40)  # the worker asks for runs, and looks after them
    assert all(process.is_running() for process in family)
    assert history_of(machine, run)[-1] == "Crashed", "it was started again beside itself"
    (tmp_path / "go").touch()
    until(lambda: machine.states("first") == ["Completed"])
    assert (tmp_path / "ended").read_text() == "once "
    assert len(store(machine.root).search_model_versions("name = 'm3diff'")) == 1


@pytest.mark.fault("W2")
@pytest.mark.slow(120)
def test_a_run_whose_worker_is_killed_before_it_began_crashes_is_told_and_keeps_no_place(machine, listener):
    """The keeper starts the worker; m3diff/watch, one at a time, cancels what comes while one is at work."""
    run = machine.begin("m3diff/watch", "first")["id"]
    until(lambda: machine.runs("first")[0]["state_type"] == "PENDING")
    for process in of_worker(machine):
        process.kill()
    until(lambda: machine.runs("first")[0]["state_type"] == "CRASHED")
    machine.begin("m3diff/watch", "second")
    until(lambda: machine.states("second")[0] in ("Completed", "Skipped"))
    assert [told["title"] for told in listener.got if run in told["message"]] == ["m3diff/watch crashed"]
    assert machine.make("status").returncode == 0
