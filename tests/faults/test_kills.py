"""Many at once, for real: equal work is done once, other work side by side, and a person's is left alone; and a few
random kills (`make kills` has many)."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from m3diff.provenance.git import git
from m3diff.registry.decisions import follow_champions, read_decisions
from tests import toy
from tests.faults.kills import Kills, one_dataset
from tests.servers import prefect_server
from tests.toy import store

PATIENCE_S = 800
AT_ONCE = 10
FLOWS = """
import json, os, sys
import mlflow.pyfunc  # what register would import, as much as the rest together
from flows.pipeline import full

children = []
for number, overrides in enumerate(json.loads(sys.argv[1])):
    children.append(os.fork())
    if children[-1] == 0:
        log = os.open(f"../flow-{number}.log", os.O_WRONLY | os.O_CREAT)
        for stream in (1, 2):
            os.dup2(log, stream)
        state = full(ref="HEAD", overrides=overrides, reason="a test", return_state=True)
        print(state.name, flush=True)
        os._exit(not state.is_completed())
sys.exit(any(os.waitpid(child, 0)[1] for child in children))
"""
"""Flows at once, forked from a process that has imported what they need."""


class FlowProject(NamedTuple):
    root: Path
    environment: dict[str, str]
    trained: Path  # a line for each training: the folder it ran in

    def start(self, *overrides: list[str]) -> Any:
        """A flow for each list of overrides."""
        command = [sys.executable, "-c", FLOWS, json.dumps(overrides)]
        environment = self.environment | {"PYTHONPATH": str(self.root)}
        return subprocess.Popen(command, cwd=self.root, env=environment)

    def ended(self, flows: Any) -> list[str]:
        """The log of each flow, all of which end well."""
        code = flows.wait(PATIENCE_S)
        logs = [log.read_text() for log in sorted(self.root.parent.glob("flow-*.log"))]
        assert code == 0, [log[-2000:] for log in logs]
        return logs

    def trainings(self) -> list[str]:
        return self.trained.read_text().splitlines()


@pytest.fixture
def flow_project(tmp_path: Path) -> Iterator[FlowProject]:
    trained = tmp_path / "trained.txt"
    root = one_dataset(tmp_path / "toy")
    code = (root / "toy.py").read_text()
    head = "def train(params: dict[str, Any], paths: dict[str, Path]) -> dict[str, Any]:\n"
    assert head in code
    noted = f'    with open("{trained}", "a") as file:\n        file.write(str(Path.cwd()) + "\\n")\n'
    (root / "toy.py").write_text(code.replace(head, head + noted))
    toy.commit(root, "trainings are counted")
    with prefect_server(tmp_path / "prefect") as environment:
        yield FlowProject(root, environment, trained)


@pytest.mark.slow(120)
def test_of_ten_runs_of_a_commit_one_trains_and_a_person_works_on_meanwhile(flow_project):
    root = flow_project.root
    flows = flow_project.start(*[[]] * AT_ONCE)
    values = yaml.safe_load((root / "params.yaml").read_text())
    values["train"]["seed"] = 5
    edited = yaml.safe_dump(values, sort_keys=False)
    (root / "params.yaml").write_text(edited)
    toy.run(root, "dvc", "repro", "-q")
    persons_lock = (root / "dvc.lock").read_text()
    assert "seed: 5" in persons_lock
    assert flows.poll() is None, "the runs were over before the person's"
    states = sorted(log.splitlines()[-1] for log in flow_project.ended(flows))
    assert states == ["Completed", *["Skipped"] * (AT_ONCE - 1)]

    assert len(flow_project.trainings()) == 2
    assert [Path(folder) for folder in flow_project.trainings() if "runs/flows" not in folder] == [root]
    assert (root / "params.yaml").read_text() == edited
    assert (root / "dvc.lock").read_text() == persons_lock
    assert toy.status(root) == {}
    assert git("diff", "--name-only", "HEAD", cwd=root).split() == ["dvc.lock", "params.yaml"]
    (version,) = store(root).search_model_versions("name = 'm3diff'")
    branch = f"runs/{version.tags['prefect.flow_run']}"
    assert "seed: 5" not in git("show", f"{branch}:dvc.lock", cwd=root)


@pytest.mark.slow(42)
def test_two_runs_with_other_parameters_run_in_parallel_each_judged_by_its_version(flow_project, monkeypatch):
    logs = flow_project.ended(flow_project.start(["train.seed=1"], ["train.seed=2"]))
    assert {log.splitlines()[-1] for log in logs} <= {"Completed", "Rejected"}
    assert not any("does the same work" in text for text in logs)
    spans = [[line[:12] for line in text.splitlines() if line[2:3] == ":"] for text in logs]
    assert max(span[0] for span in spans) < min(span[-1] for span in spans), "one after the other"
    assert len(flow_project.trainings()) == 2

    client = store(flow_project.root)
    versions = {
        version.tags["prefect.flow_run"]: version for version in client.search_model_versions("name = 'm3diff'")
    }
    assert len(versions) == 2
    monkeypatch.chdir(flow_project.root)
    entries = read_decisions()
    assert {entry.flow_run: entry.target for entry in entries} == {
        run: int(version.version) for run, version in versions.items()
    }
    scores = {int(version.version): client.get_run(version.run_id).data.metrics for version in versions.values()}
    best = max(scores, key=lambda version: scores[version][f"{toy.TOTAL}/CIDEr"])
    assert follow_champions(entries, "m3diff").champions[-1] == best
    assert int(client.get_model_version_by_alias("m3diff", "champion").version) == best
    seeds = {run: yaml.safe_load(git("show", f"runs/{run}:params.yaml"))["train"]["seed"] for run in versions}
    assert set(seeds.values()) == {1, 2}
    for run, version in versions.items():
        assert version.tags["dvc.checkpoint"] in git("show", f"runs/{run}:dvc.lock")


@pytest.mark.slow(300)
def test_whatever_is_killed_the_next_runs_leave_all_as_if_nothing_had_been(tmp_path: Path) -> None:
    kills = Kills(tmp_path, seed=20261122)
    try:
        lines = kills.run(3)
    finally:
        kills.machine.make("down")
    assert [line["how"] for line in lines] == ["registered"] * 3, lines
