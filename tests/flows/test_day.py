"""A day of the schedule in minutes: 24 looks at a drop folder, and everything that may happen, with nobody there.

The supervisor's part (systemd starts again what died) is played by `make up`; time is given by the runs that are due.
"""

import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from flows.watch import SETTLED_S
from m3diff.provenance.git import git
from m3diff.registry.decisions import decisions
from tests import toy
from tests.faults.kills import SCORE_OF_CAPTIONS, one_dataset
from tests.flows.test_host_dies import host_dies
from tests.flows.test_notices import Listener, listener  # noqa: F401
from tests.flows.test_services import Machine
from tests.flows.test_unattended import ended, missed, states, until, up
from tests.toy import store

MINE = Path("data/01_raw/mine")
CHECK = """import pathlib, sys
if pathlib.Path("data/01_raw/mine/score.txt").read_text() == "bad":
    sys.exit("score.txt row 1, field reference: is empty; write a caption or leave the row out")
"""
TRAIN = """    import os, time
    mine = Path("data/01_raw/mine/score.txt").read_text()
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


@pytest.fixture
def machine(tmp_path: Path, listener: Listener, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:  # noqa: F811
    """A project with a drop folder, which a stage of its own checks, training reads, and the score follows."""
    root = one_dataset(tmp_path / "toy")
    monkeypatch.chdir(root)
    (root / MINE).mkdir(parents=True)
    (root / MINE / "score.txt").write_text("1.0")
    toy.run(root, "dvc", "add", "-q", str(MINE))
    code = (root / "toy.py").read_text()
    head = "def train(params: dict[str, Any], paths: dict[str, Path]) -> None:\n"
    code = code.replace(head, head + TRAIN)
    code = code.replace(
        "    word = hashlib.sha256(json.dumps([cfg,", "    word = hashlib.sha256(json.dumps([mine, cfg,"
    )
    score = f"1.0 + {SCORE_OF_CAPTIONS}"
    assert score in code
    code = code.replace(score, 'float(Path("data/01_raw/mine/score.txt").read_text())')
    (root / "toy.py").write_text(code)
    (root / "check.py").write_text(CHECK)
    graph = yaml.safe_load((root / "dvc.yaml").read_text())
    graph["stages"]["check"] = {"cmd": "python check.py", "deps": [str(MINE)]}
    for stage in ("train", "evaluate"):
        graph["stages"][stage]["deps"].append(str(MINE))
    graph["stages"] = {"check": graph["stages"].pop("check")} | graph["stages"]
    (root / "dvc.yaml").write_text(yaml.safe_dump(graph, sort_keys=False))
    toy.commit(root, "a dataset of our own")
    machine = Machine(root)
    machine.environment |= {
        "M3DIFF_DROP": str(MINE),
        "M3DIFF_NOTIFY": listener.address,
        "TOY_MARKS": str(tmp_path),
    }
    up(machine)
    yield machine
    machine.make("down")


def drop(machine: Machine, text: str) -> None:
    """Somebody put a file there, so long ago that it is whole."""
    new = machine.root / "services" / "score.txt"
    new.write_text(text)
    new.replace(machine.root / MINE / "score.txt")
    time.sleep(SETTLED_S + 1)


def retrainings(machine: Machine) -> list[dict[str, Any]]:
    """The runs that looks started, in their order."""
    runs = machine.ask("flow_runs", {"deployments": {"name": {"any_": ["retrain"]}}})
    ours = [run for run in runs if run["parameters"].get("reason", "").startswith("data/")]
    return sorted(ours, key=lambda run: run["created"])


@pytest.mark.fault("04", "S5", "S6", "see")
@pytest.mark.slow(900)
@pytest.mark.timeout(2400)
def test_a_day_of_looks_leaves_the_record_that_it_should_and_nobody_did_anything(machine, listener, tmp_path):  # noqa: F811
    before = git("status", "--porcelain", cwd=machine.root)
    for hour in range(24):
        if hour in DROPS:
            drop(machine, DROPS[hour])
        if hour == OUTAGE:
            machine.process("prefect").kill()
            assert machine.make("up").returncode == 0
        missed(machine, "watch", f"look {hour}")
        until(lambda hour=hour: ended(states(machine, f"look {hour}")))
        if hour == HOST_DIES:
            run = until(lambda: [run for run in retrainings(machine) if run["state_name"] == "Running"])[-1]
            host_dies(machine, run["id"], tmp_path)
        until(lambda: all(ended([run["state_name"]]) for run in retrainings(machine)))
    missed(machine, "retrain", "at night")
    assert until(lambda: ended(states(machine, "at night"))) == ["Skipped"]

    looks = Counter(states(machine, *(f"look {hour}" for hour in range(24))))
    assert looks == {"Completed": len(DROPS), "Skipped": 24 - len(DROPS)}
    runs = retrainings(machine)
    how = ["Completed", "Completed", "Failed", "Rejected", "Failed", "Completed"]
    assert [run["state_name"] for run in runs] == how
    assert [run["run_count"] for run in runs] == [1, 1, 1, 1, 1, 2]
    assert [(entry.outcome, entry.from_, entry.to, entry.flow_run) for entry in decisions(machine.root)] == [
        ("first", None, 1, runs[0]["id"]),
        ("promoted", 1, 2, runs[1]["id"]),
        ("refused", 2, 3, runs[3]["id"]),
        ("promoted", 2, 4, runs[5]["id"]),
    ]
    client = store(machine.root)
    assert int(client.get_model_version_by_alias("m3diff", "champion").version) == 4
    assert int(client.get_model_version_by_alias("m3diff", "previous").version) == 2
    assert len(client.search_model_versions("name = 'm3diff'")) == 4
    told = Counter(note["title"] for note in listener.got)
    assert told == {
        "m3diff: a model was promoted": 3,
        "m3diff: a model was rejected": 1,
        "m3diff/retrain failed": 2,
        "m3diff/retrain crashed": 1,
    }
    failures = [note["message"] for note in listener.got if note["title"].endswith("failed")]
    assert "row 1, field reference: is empty" in failures[0]
    assert "loss is nan at step 3" in failures[1]
    assert git("status", "--porcelain", cwd=machine.root) == before
    history = subprocess.run(
        [sys.executable, "-m", "m3diff", "history"], cwd=machine.root, env=machine.environment, capture_output=True
    )
    assert history.returncode == 0, history.stderr
