"""Fixtures: a registered model whose versions have only scores, and a project that trains and registers models."""

import gc
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from copy import copy
from pathlib import Path

import mlflow
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from mlflow.entities.model_registry import ModelVersion
from mlflow.tracking import MlflowClient

from m3diff.commands import rescore as rescoring_of
from m3diff.registry.decisions import (
    COUNT_TAG,
    Decision,
    find_pending_move,
    follow_champions,
    numbering_faults,
    read_decisions,
)
from m3diff.registry.promote import GateDecision, promote, rollback
from m3diff.registry.versions import CHALLENGER, SCORES
from m3diff.settings.load import load_params
from tests import toy
from tests.toy import REPOSITORY

PROTOCOL = "minichange/total"
PAIRS = 200


def make_scores(
    cider: float, pairs: int = PAIRS, seed: int = 0, protocol: str = PROTOCOL, **columns: float
) -> pa.Table:
    """Return a scores.parquet with this mean CIDEr. Pairs differ a lot, and two models differ a little on each pair."""
    difficulty = np.random.default_rng(99).normal(0, 0.5, pairs)
    model_noise = np.random.default_rng(seed).normal(0, 0.1, pairs)
    values = cider + difficulty - difficulty.mean() + model_noise - model_noise.mean()
    ids = [f"minichange/{number:06d}.png" for number in range(pairs)]
    other_columns = {name: [value] * pairs for name, value in columns.items()}
    return pa.table({"protocol": [protocol] * pairs, "id": ids, "CIDEr": values.tolist(), **other_columns})


class Registry:
    """The registered model of the project, and the git repository that contains the record of decisions."""

    def __init__(self, root: Path, store: Path) -> None:
        self.plain = load_params(REPOSITORY / "params.yaml")
        subprocess.run(["git", "init", "-q", str(root)], check=True)
        shutil.copy(store, root / "mlflow.db")
        self.open(root)
        self.experiment = self.client.create_experiment("m3diff", artifact_location=(root / "artifacts").as_uri())
        self.client.create_registered_model("m3diff")
        self.gate(guards={})

    def open(self, root: Path) -> None:
        store = {"tracking_uri": f"sqlite:///{root}/mlflow.db"}
        scratch = {"scratch": root / "scratch"}
        register = self.plain.register_
        compute = self.plain.compute
        changes = {"register_": register.model_copy(update=store), "compute": compute.model_copy(update=scratch)}
        self.root = root
        self.params = self.plain.model_copy(update=changes)
        self.client = MlflowClient(store["tracking_uri"], store["tracking_uri"])

    def copy(self, root: Path) -> "Registry":
        """Copy the store and the record, so that a test can change them. The artifacts are not copied."""
        root.mkdir(exist_ok=True)
        shutil.copy(self.root / "mlflow.db", root)
        shutil.copytree(self.root / ".git", root / ".git")
        copied_registry = copy(self)
        promote = self.params.promote
        copied_registry.open(root)
        copied_registry.params = copied_registry.params.model_copy(update={"promote": promote})
        return copied_registry

    def gate(self, **changes: object) -> None:
        cfg = type(self.params.promote).model_validate(self.params.promote.model_dump() | changes)
        self.params = self.params.model_copy(update={"promote": cfg})

    def add(self, table: pa.Table | float | None = None, test_set: str = "one", seed: int = 0, **tags: str) -> int:
        """Create a version with these scores or this CIDEr, make it the challenger and return its number."""
        run = self.client.create_run(self.experiment).info.run_id
        table = make_scores(table, seed=seed) if isinstance(table, float) else table
        if table is not None:
            pq.write_table(table, self.root / SCORES)
            self.client.log_artifact(run, str(self.root / SCORES))
        facts = {"test_set.sha256": test_set} | {name.replace("__", "."): value for name, value in tags.items()}
        version = self.client.create_model_version("m3diff", "file:///nowhere", run, tags=facts)
        self.client.set_registered_model_alias("m3diff", CHALLENGER, version.version)
        return int(version.version)

    def decide(self, version: int | None = None, again: bool = False) -> GateDecision:
        return promote(self.params, rescoring_of.rescore, version, again, self.root)

    def grow(self, *ciders: float, **tags: str) -> list[str]:
        """Add a version with each CIDEr, let the gate decide on it, and return the outcomes."""
        return [self.decide(self.add(cider, **tags)).outcome for cider in ciders]

    def rollback(self, to: int | None = None, why: str = "") -> Decision:
        return rollback(self.params, to, why, self.root)

    def point(self, alias: str, version: int) -> None:
        """Move an alias by hand, as on MLflow's page."""
        self.client.set_registered_model_alias("m3diff", alias, str(version))

    def version(self, number: int) -> ModelVersion:
        return self.client.get_model_version("m3diff", str(number))

    def aliases(self) -> dict[str, int]:
        return {alias: int(version) for alias, version in self.client.get_registered_model("m3diff").aliases.items()}

    def entries(self) -> list[Decision]:
        assert numbering_faults(self.root) == []
        return read_decisions(self.root)

    def record(self) -> list[str]:
        return [entry.outcome for entry in self.entries()]


@pytest.fixture(autouse=True)
def elsewhere() -> Iterator[None]:
    yield
    mlflow.set_tracking_uri("")


@pytest.fixture
def registry(empty_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Registry:
    """Return a registry in a git repository without commits, which is the current directory."""
    monkeypatch.chdir(tmp_path)
    return Registry(tmp_path, empty_store)


@pytest.fixture(scope="session")
def grown_once(empty_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Registry]:
    registries: dict[str, Registry] = {}

    def build(state: str) -> Registry:
        if state not in registries:
            registries[state] = registry = Registry(tmp_path_factory.mktemp("grown"), empty_store)
            if state == "waiting":
                registry.grow(1.0)
                for cider in (5.0, 4.0, 3.0):
                    registry.add(cider, seed=1)
            elif state == "rolled back":
                registry.grow(1.0, dvc__checkpoint="of 1.0")
                registry.grow(2.0, dvc__checkpoint="of 2.0")
                registry.rollback(why="worse on the new camera")
            else:
                registry.grow(1.0, 2.0, 3.0)
        return registries[state]

    return build


def copied(state: str) -> Callable[..., Registry]:
    @pytest.fixture
    def fixture(grown_once, tmp_path, monkeypatch) -> Registry:
        monkeypatch.chdir(tmp_path)
        return grown_once(state).copy(tmp_path)

    return fixture


three = copied("three")  # versions 1, 2 and 3 were champion one after the other
rolled_back = copied("rolled back")  # version 2 was champion and was rolled back to 1
waiting = copied("waiting")  # champion 1 (1.0); versions 2 (5.0), 3 (4.0) and 4 (3.0) wait


# A champion that was scored on another test set


class Rescoring:
    """Replaces the stages: a checkpoint is a file with its URI, and its captions have a known score."""

    def __init__(self, registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
        self.registry = registry
        self.calls = []
        self.output_folders = []
        self.cider = 1.0
        self.present_test_set = "new"
        self.error = None
        self.download_artifacts = mlflow.artifacts.download_artifacts
        monkeypatch.setattr(rescoring_of, "hash_test_set", lambda paths: self.present_test_set)
        monkeypatch.setattr(rescoring_of, "headline_scores", lambda report: report)
        monkeypatch.setattr(mlflow.artifacts, "download_artifacts", self.download)
        monkeypatch.setattr("m3diff.stages.predict.stage.predict", self.predict)
        monkeypatch.setattr("m3diff.stages.evaluate.stage.evaluate", self.evaluate)

    def download(self, artifact_uri: str | None = None, *, dst_path: str | None = None, **of_run: str) -> str:
        if artifact_uri is None:
            return self.download_artifacts(dst_path=dst_path, **of_run)
        if self.error:
            raise self.error
        checkpoint = Path(dst_path or self.registry.root / "stored") / "artifacts" / "checkpoint"
        checkpoint.mkdir(parents=True, exist_ok=True)
        (checkpoint / "of.txt").write_text(artifact_uri)
        return str(checkpoint)

    def predict(self, cfg, compute, mixture, model, out) -> None:
        assert compute == self.registry.params.compute
        assert mixture == self.registry.params.paths.mixture
        out.mkdir()
        self.output_folders.append(out)
        (out / "captions.txt").write_text((model / "checkpoint" / "of.txt").read_text())
        self.calls.append(((out / "captions.txt").read_text(), cfg.max_new_tokens, cfg.batch_pairs))

    def evaluate(self, cfg, compute, records, clean, predictions, out, origin) -> dict:
        params = self.registry.params
        assert cfg == params.evaluate
        assert records == params.paths.records
        assert clean == params.paths.clean
        assert (predictions / "captions.txt").is_file()
        out.mkdir()
        pq.write_table(make_scores(self.cider), out / SCORES)
        (out / "metrics.json").write_text("{}")
        return {"toy/total": {"CIDEr": 150.0}}


@pytest.fixture
def rescoring(registry, monkeypatch) -> Rescoring:
    """Make version 1 champion with CIDEr 9.0 on the test set "old", and add version 2 with 1.5 on "new"."""
    registry.grow(9.0, test_set="old", predict__max_new_tokens="17")
    registry.add(1.5, seed=1, test_set="new")
    return Rescoring(registry, monkeypatch)


# A project that trains and registers. Each run is committed to its own branch


class Team:
    """A project that trains, with a git remote `origin`, a DVC remote `remote` and the MLflow store `database`."""

    def __init__(self, folder: Path, trained: Path, store: Path) -> None:
        self.folder = folder
        self.project = folder / "project"
        self.remote = folder / "remote"
        self.origin = folder / "origin.git"
        self.database = folder / "mlflow" / "mlflow.db"
        shutil.copytree(trained, self.project, symlinks=True)
        self.database.parent.mkdir()
        shutil.copy(store, self.database)
        self.uri = f"sqlite:///{self.database}"
        self.client = MlflowClient(tracking_uri=self.uri, registry_uri=self.uri)
        toy.change(self.project, "register", tracking_uri=self.uri)
        toy.run(self.project, "dvc", "remote", "add", "--default", "store", str(self.remote))
        toy.run(self.project, "git", "stash", "--include-untracked", "--quiet", "--", "dvc.lock")
        toy.commit(self.project, "a remote")
        toy.run(self.project, "git", "stash", "pop", "--quiet")
        toy.run(self.project, "git", "branch", "--move", "main")
        toy.run(folder, "git", "init", "--quiet", "--bare", "--initial-branch", "main", str(self.origin))
        toy.run(self.project, "git", "remote", "add", "origin", str(self.origin))
        toy.run(self.project, "git", "push", "--quiet", "origin", "main")

    def run(self, name: str, seed: int | None = None) -> None:
        """Train, commit to runs/<name>, push the commit and the data, and register, like a flow."""
        toy.run(self.project, "git", "checkout", "--quiet", "-b", f"runs/{name}", "main")
        if seed is not None:
            toy.change(self.project, "train", seed=seed)
            toy.run(self.project, "dvc", "repro", "--quiet")
        toy.commit(self.project, f"run {name}")
        toy.run(self.project, "dvc", "push", "--quiet")
        toy.run(self.project, "git", "push", "--quiet", "origin", f"runs/{name}")
        command = [sys.executable, "-m", "m3diff", "register"]
        environment = os.environ | {"M3DIFF_FLOW_RUN": name}
        subprocess.run(command, cwd=self.project, env=environment, stdout=subprocess.DEVNULL, check=True)


@pytest.fixture(scope="session")
def team(trained_once: Path, empty_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Team:
    """Return a project with one version from the branch runs/first. Tests must not change it."""
    team = Team(tmp_path_factory.mktemp("team"), trained_once, empty_store)
    team.run("first")
    return team


def recreate_model(registry: Registry) -> None:
    """Delete the registered model, as on MLflow's page, and create it again, as the next registration does."""
    registry.client.delete_registered_model("m3diff")
    time.sleep(0.01)  # the creation time in ms distinguishes the two models
    registry.client.create_registered_model("m3diff")


def versions_in_remedies(text: str) -> list[int]:
    """Return the versions that the commands in a text make champion."""
    return [int(version) for version in re.findall(r"m3diff rollback --to (\d+)", text)]


def read_count_tag(registry: Registry) -> str | None:
    return registry.client.get_registered_model("m3diff").tags.get(COUNT_TAG)


def check_one_champion(registry: Registry) -> None:
    """Check that the champion is the one on record and that no move is pending."""
    assert numbering_faults() == []
    assert find_pending_move(Path(".")) is None
    assert follow_champions(read_decisions(), "m3diff").champions[-1] == registry.aliases()["champion"]


def start_child(work: Callable[[], object]) -> int:
    """Run a function in a child process and return the id of the process.

    Garbage collection is disabled in the child, because objects that tests of training left in this process (torch's
    process groups) wait for threads that do not exist in a fork.
    """
    child = os.fork()
    if child == 0:
        gc.disable()
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    return child


def wait_for_child(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
