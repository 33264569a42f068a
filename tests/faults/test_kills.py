"""Many at once, for real: equal work is done once, other work side by side, and a person's is left alone; and a few
random kills (`make kills` has many)."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from m3diff.provenance.git import git
from m3diff.registry.decisions import champions, decisions
from tests import toy
from tests.faults import kills
from tests.faults.kills import branches, one_dataset
from tests.faults.machine import Flow, Starter, starter
from tests.servers import prefect_server
from tests.toy import store

PATIENCE_S = 800
AT_ONCE = 10


class Place(NamedTuple):
    root: Path
    flows: Starter
    trained: Path  # a line for each training: the folder it ran in

    def start(self, *overrides: str) -> Flow:
        return self.flows.start(ref="HEAD", overrides=list(overrides), reason="a test")

    def trainings(self) -> list[str]:
        return self.trained.read_text().splitlines()


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    trained = tmp_path / "trained.txt"
    root = one_dataset(tmp_path / "toy")
    code = (root / "toy.py").read_text()
    head = "def train(params: dict[str, Any], paths: dict[str, Path]) -> dict[str, Any]:\n"
    assert head in code
    noted = f'    with open("{trained}", "a") as file:\n        file.write(str(Path.cwd()) + "\\n")\n'
    (root / "toy.py").write_text(code.replace(head, head + noted))
    toy.commit(root, "trainings are counted")
    with prefect_server(tmp_path / "prefect") as environment, starter(root, environment) as flows:
        yield Place(root, flows, trained)


def ended(flow: Flow) -> str:
    assert flow.ended(PATIENCE_S), flow.log.read_text()[-2000:]
    assert flow.code == 0, flow.log.read_text()[-2000:]
    assert flow.quiet() == []
    return flow.state()


@pytest.mark.slow(60)
def test_of_ten_runs_of_a_commit_one_trains_and_a_person_works_on_meanwhile(place):
    root = place.root
    flows = [place.start() for _ in range(AT_ONCE)]
    values = yaml.safe_load((root / "params.yaml").read_text())
    values["train"]["seed"] = 5
    edited = yaml.safe_dump(values, sort_keys=False)
    (root / "params.yaml").write_text(edited)
    toy.run(root, "dvc", "repro", "-q")
    theirs = (root / "dvc.lock").read_text()
    assert "seed: 5" in theirs
    assert not all(flow.ended(0) for flow in flows), "the runs were over before the person's"
    assert sorted(ended(flow) for flow in flows) == ["Completed", *["Skipped"] * (AT_ONCE - 1)]

    assert len(place.trainings()) == 2
    assert [Path(folder) for folder in place.trainings() if "runs/flows" not in folder] == [root]
    assert (root / "params.yaml").read_text() == edited
    assert (root / "dvc.lock").read_text() == theirs
    assert toy.status(root) == {}
    assert git("diff", "--name-only", "HEAD", cwd=root).split() == ["dvc.lock", "params.yaml"]
    (branch,) = branches(root)
    assert "seed: 5" not in git("show", f"{branch}:dvc.lock", cwd=root)
    (version,) = store(root).search_model_versions("name = 'm3diff'")
    assert f"runs/{version.tags['prefect.flow_run']}" == branch


@pytest.mark.slow(80)
def test_two_runs_with_other_parameters_go_side_by_side_each_judged_by_its_own_version(place, monkeypatch):
    flows = [place.start(f"train.seed={seed}") for seed in (1, 2)]
    assert {ended(flow) for flow in flows} <= {"Completed", "Rejected"}
    logs = [flow.log.read_text() for flow in flows]
    assert not any("does the same work" in text for text in logs)
    spans = [[line[:12] for line in text.splitlines() if line[2:3] == ":"] for text in logs]
    assert max(span[0] for span in spans) < min(span[-1] for span in spans), "one after the other"
    assert len(place.trainings()) == 2

    client = store(place.root)
    versions = {
        version.tags["prefect.flow_run"]: version for version in client.search_model_versions("name = 'm3diff'")
    }
    assert len(versions) == 2
    monkeypatch.chdir(place.root)
    made_by = decisions()
    assert {entry.flow_run: entry.to for entry in made_by} == {run: int(made.version) for run, made in versions.items()}
    scores = {int(made.version): client.get_run(made.run_id).data.metrics for made in versions.values()}
    best = max(scores, key=lambda version: scores[version][f"{toy.TOTAL}/CIDEr"])
    assert champions(made_by, "m3diff").line[-1] == best
    assert int(client.get_model_version_by_alias("m3diff", "champion").version) == best
    seeds = {run: yaml.safe_load(git("show", f"runs/{run}:params.yaml"))["train"]["seed"] for run in versions}
    assert set(seeds.values()) == {1, 2}
    for run, made in versions.items():
        assert made.tags["dvc.checkpoint"] in git("show", f"runs/{run}:dvc.lock")


KILLS, SEED = 5, 20261122


@pytest.mark.slow(280)
def test_whatever_process_of_a_flow_is_killed_the_next_run_leaves_all_as_if_none_had_been(tmp_path: Path) -> None:
    told = kills.run(tmp_path, KILLS, SEED)
    assert told.broken == []
    assert len(told.kills) == KILLS
    assert told.rounds >= 2
