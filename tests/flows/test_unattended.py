"""A real Prefect server and nobody there: late runs become one, new data start a run, hosts die or sleep, and a day of
it all. The supervisor's part (systemd starts again what died) is played by `make up`."""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from flows.watch import SETTLED_S
from m3diff.provenance.git import git
from m3diff.registry.decisions import decisions
from tests import toy
from tests.faults.kills import SCORE_OF_CAPTIONS, one_dataset
from tests.servers import Listener, Machine, services_of, until
from tests.toy import store

MINE = Path("data/01_raw/mine")
CRASHED_S, GOES_ON_S = 120, 300
OVER = {"Completed", "Failed", "Crashed", "Cancelled", "Coalesced", "Skipped", "Rejected"}


@contextmanager
def without_schedules(root: Path, **environment: str) -> Iterator[Machine]:
    """`make up`, and no runs of the schedules beside those that the test asks for."""
    with services_of(root, **environment) as machine:
        for name in ("retrain", "watch"):
            found = machine.ask(f"/deployments/name/m3diff/{name}")
            (schedule,) = found["schedules"]
            machine.ask(f"/deployments/{found['id']}/schedules/{schedule['id']}", {"active": False}, "PATCH")
        yield machine


def missed(machine: Machine, deployment: str, *runs: str) -> Callable[[], list[str]]:
    """Let the server have runs of a schedule that were due an hour ago and later; the states of all once they ended."""
    hour, id_ = datetime.now(UTC) - timedelta(hours=1), machine.ask(f"/deployments/name/m3diff/{deployment}")["id"]
    for minute, run in enumerate(runs):
        due = (hour + timedelta(minutes=minute)).isoformat()
        state = {"type": "SCHEDULED", "name": "Late", "state_details": {"scheduled_time": due}}
        machine.ask(f"/deployments/{id_}/create_flow_run", {"name": run, "state": state, "tags": ["auto-scheduled"]})
    return lambda: states if (states := machine.states(*runs)) and set(states) <= OVER else []


@pytest.mark.slow(120)
def test_late_runs_become_one_and_new_data_start_one_and_each_failure_is_told_once(project, listener: Listener):
    """A stage checks a folder that people put files into; one file is bad."""
    (project / MINE).mkdir(parents=True)
    (project / MINE / "bad.csv").write_text("1")
    toy.run(project, "dvc", "add", "-q", str(MINE))
    check = f"for path in pathlib.Path('{MINE}').glob('bad*'): sys.exit(f'{{path.name}} row 7: no image')"
    (project / "check.py").write_text(f"import pathlib, sys\n{check}\n")
    add_first_stage(project, "check", {"cmd": "python check.py", "deps": [str(MINE)]})
    toy.commit(project, "a dataset of our own")
    (project / MINE / "bad.csv").rename(project / MINE / "bad2.csv")  # in the checkout alone, until a look
    renamed = time.monotonic()
    with without_schedules(project, M3DIFF_DROP=str(MINE), M3DIFF_NOTIFY=listener.address) as machine:
        machine.ask("/work_pools/m3diff", {"is_paused": True}, "PATCH")  # as where the machine was off
        ended = missed(machine, "retrain", "one", "two", "three")
        machine.ask("/work_pools/m3diff", {"is_paused": False}, "PATCH")
        assert until(ended) == ["Coalesced", "Coalesced", "Failed"]
        (first,) = until(lambda: listener.got)
        (run,) = [run for run in machine.runs("one", "two", "three") if run["state_name"] == "Failed"]
        assert first["title"] == "m3diff/retrain failed"
        assert "stage check exited with 1 bad.csv row 7: no image. " in first["message"]
        assert f"http://127.0.0.1:{machine.prefect}/runs/flow-run/{run['id']} " in first["message"]
        assert run["name"] == "three", "the latest does the work"

        time.sleep(max(0.0, renamed + SETTLED_S + 1 - time.monotonic()))
        assert until(missed(machine, "watch", "look")) == ["Completed"]
        assert git("diff", "--name-only", "HEAD", "runs/data", cwd=project) == f"{MINE}.dvc"
        second = until(lambda: listener.got[1:])[0]
        assert "stage check exited with 1 bad2.csv row 7: no image. " in second["message"]
        assert until(missed(machine, "watch", "another look")) == ["Skipped"]
        assert len(listener.got) == 2
        assert "secret-word" not in (project / "services/worker.log").read_text()


def add_first_stage(root: Path, name: str, stage: dict[str, Any], *also: str) -> None:
    """Add a stage before the others; `also` depend on the same."""
    graph = yaml.safe_load((root / "dvc.yaml").read_text())
    for reader in also:
        graph["stages"][reader]["deps"] += stage["deps"]
    graph["stages"] = {name: stage} | graph["stages"]
    (root / "dvc.yaml").write_text(yaml.safe_dump(graph, sort_keys=False))


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


# A day of the schedule in minutes: 24 looks at a drop folder, and everything that may happen


CHECK = f"""import pathlib, sys
if pathlib.Path("{MINE}/score.txt").read_text() == "bad":
    sys.exit("score.txt row 1, field reference: is empty; write a caption or leave the row out")
"""
TRAIN = f"""    import os, time
    mine = Path("{MINE}/score.txt").read_text()
    if mine == "nan":
        sys.exit("train: loss is nan at step 3, rate 1e-3; the last checkpoint is kept")
    marks = Path(os.environ["TOY_MARKS"])
    while mine == "4.0" and not (marks / "go").exists():
        (marks / "began").touch()
        time.sleep(0.1)
"""
DROPS = {2: "2.0", 5: "3.0", 9: "bad", 12: "1.5", 15: "nan", 20: "4.0"}
"""By the hour: what the dropped file says."""
OUTAGE, HOST_DIES = 17, 20


def scored_by_a_drop(root: Path) -> Path:
    """A project with a drop folder, which a stage of its own checks, training reads, and the score follows."""
    one_dataset(root)
    (root / MINE).mkdir(parents=True)
    (root / MINE / "score.txt").write_text("1.0")
    toy.run(root, "dvc", "add", "-q", str(MINE))
    code = (root / "toy.py").read_text()
    head = "def train(params: dict[str, Any], paths: dict[str, Path]) -> dict[str, Any]:\n"
    for old, new in (
        (head, head + TRAIN),
        ("    word = hashlib.sha256(json.dumps([cfg,", "    word = hashlib.sha256(json.dumps([mine, cfg,"),
        (f"1.0 + {SCORE_OF_CAPTIONS}", f'float(Path("{MINE}/score.txt").read_text())'),
    ):
        assert old in code
        code = code.replace(old, new)
    (root / "toy.py").write_text(code)
    (root / "check.py").write_text(CHECK)
    add_first_stage(root, "check", {"cmd": "python check.py", "deps": [str(MINE)]}, "train", "evaluate")
    toy.commit(root, "a dataset of our own")
    return root


def retrainings(machine: Machine) -> list[dict[str, Any]]:
    """The runs that looks started, in their order."""
    runs = machine.ask("/flow_runs/filter", {"deployments": {"name": {"any_": ["retrain"]}}})
    ours = [run for run in runs if run["parameters"].get("reason", "").startswith("data/")]
    return sorted(ours, key=lambda run: run["created"])


@pytest.mark.fault("04", "S5", "S6", "see")
@pytest.mark.slow(900)
@pytest.mark.timeout(2400)
def test_a_day_of_looks_leaves_the_record_that_it_should_and_nobody_did_anything(tmp_path, listener, monkeypatch):
    root = scored_by_a_drop(tmp_path / "toy")
    monkeypatch.chdir(root)
    given = {"M3DIFF_DROP": str(MINE), "M3DIFF_NOTIFY": listener.address, "TOY_MARKS": str(tmp_path)}
    with without_schedules(root, **given) as machine:
        before = git("status", "--porcelain", cwd=root)
        for hour in range(24):
            if hour in DROPS:
                new = root / "services" / "score.txt"
                new.write_text(DROPS[hour])
                new.replace(root / MINE / "score.txt")
                time.sleep(SETTLED_S + 1)
            if hour == OUTAGE:
                machine.process("prefect").kill()
                machine.up()
            until(missed(machine, "watch", f"look {hour}"))
            if hour == HOST_DIES:
                run = until(lambda: [run for run in retrainings(machine) if run["state_name"] == "Running"])[-1]
                host_dies(machine, run["id"], tmp_path)
            until(lambda: {run["state_name"] for run in retrainings(machine)} <= OVER)
        assert until(missed(machine, "retrain", "at night")) == ["Skipped"]

        looks = Counter(machine.states(*(f"look {hour}" for hour in range(24))))
        assert looks == {"Completed": len(DROPS), "Skipped": 24 - len(DROPS)}
        runs = retrainings(machine)
        how = ["Completed", "Completed", "Failed", "Rejected", "Failed", "Completed"]
        assert [run["state_name"] for run in runs] == how
        assert [run["run_count"] for run in runs] == [1, 1, 1, 1, 1, 2]
        assert [(entry.outcome, entry.from_, entry.to, entry.flow_run) for entry in decisions(root)] == [
            ("first", None, 1, runs[0]["id"]),
            ("promoted", 1, 2, runs[1]["id"]),
            ("refused", 2, 3, runs[3]["id"]),
            ("promoted", 2, 4, runs[5]["id"]),
        ]
        client = store(root)
        aliases = {name: int(version) for name, version in client.get_registered_model("m3diff").aliases.items()}
        assert (aliases["champion"], aliases["previous"]) == (4, 2)
        assert len(client.search_model_versions("name = 'm3diff'")) == 4
        assert Counter(note["title"] for note in listener.got) == {
            "m3diff: a model was promoted": 3,
            "m3diff: a model was rejected": 1,
            "m3diff/retrain failed": 2,
            "m3diff/retrain crashed": 1,
        }
        failures = [note["message"] for note in listener.got if note["title"].endswith("failed")]
        assert "row 1, field reference: is empty" in failures[0]
        assert "loss is nan at step 3" in failures[1]
        assert git("status", "--porcelain", cwd=root) == before
        history = machine.run("-m", "m3diff", "history")
        assert history.returncode == 0, history.stderr
