"""A registered model with versions that hold nothing but scores, and a team that trains and registers in earnest."""

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
from m3diff.registry.decisions import TAG, Decision, follow_champions, numbering_faults, pending_move, read_decisions
from m3diff.registry.promote import Promotion, promote, rollback
from m3diff.registry.versions import CHALLENGER, SCORES
from m3diff.settings.load import load_params
from tests import toy
from tests.toy import REPOSITORY

PROTOCOL = "minichange/total"
PAIRS = 200


def scores(cider: float, pairs: int = PAIRS, seed: int = 0, protocol: str = PROTOCOL, **columns: float) -> pa.Table:
    """scores.parquet of a model with this mean CIDEr: pairs differ, and two models differ on each by a little."""
    hard = np.random.default_rng(99).normal(0, 0.5, pairs)
    own = np.random.default_rng(seed).normal(0, 0.1, pairs)
    values = cider + hard - hard.mean() + own - own.mean()
    ids = [f"minichange/{number:06d}.png" for number in range(pairs)]
    more = {name: [value] * pairs for name, value in columns.items()}
    return pa.table({"protocol": [protocol] * pairs, "id": ids, "CIDEr": values.tolist(), **more})


class Registry:
    """The project's registered model, and the git repository that keeps its record."""

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
        """Store and record once more, for a test to change; artifacts of before stay where they are."""
        root.mkdir(exist_ok=True)
        shutil.copy(self.root / "mlflow.db", root)
        shutil.copytree(self.root / ".git", root / ".git")
        made = copy(self)
        promote = self.params.promote
        made.open(root)
        made.params = made.params.model_copy(update={"promote": promote})
        return made

    def gate(self, **changes: object) -> None:
        cfg = type(self.params.promote).model_validate(self.params.promote.model_dump() | changes)
        self.params = self.params.model_copy(update={"promote": cfg})

    def add(self, table: pa.Table | float | None = None, test_set: str = "one", seed: int = 0, **tags: str) -> int:
        """The number of a new version, the challenger, with these scores or this CIDEr."""
        run = self.client.create_run(self.experiment).info.run_id
        table = scores(table, seed=seed) if isinstance(table, float) else table
        if table is not None:
            pq.write_table(table, self.root / SCORES)
            self.client.log_artifact(run, str(self.root / SCORES))
        facts = {"test_set.sha256": test_set} | {name.replace("__", "."): value for name, value in tags.items()}
        version = self.client.create_model_version("m3diff", "file:///nowhere", run, tags=facts)
        self.client.set_registered_model_alias("m3diff", CHALLENGER, version.version)
        return int(version.version)

    def decide(self, version: int | None = None, again: bool = False) -> Promotion:
        return promote(self.params, rescoring_of.rescore, version, again, self.root)

    def grow(self, *ciders: float, **tags: str) -> list[str]:
        """Decide on a new version of each CIDEr; the outcomes."""
        return [self.decide(self.add(cider, **tags)).outcome for cider in ciders]

    def rollback(self, to: int | None = None, why: str = "") -> Decision:
        return rollback(self.params, to, why, self.root)

    def point(self, alias: str, version: int) -> None:
        """By hand, as on MLflow's page."""
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
    """In a git repository without a commit, the current directory."""
    monkeypatch.chdir(tmp_path)
    return Registry(tmp_path, empty_store)


@pytest.fixture(scope="session")
def grown_once(empty_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Registry]:
    made: dict[str, Registry] = {}

    def build(state: str) -> Registry:
        if state not in made:
            made[state] = registry = Registry(tmp_path_factory.mktemp("grown"), empty_store)
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
        return made[state]

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


# A champion of another test set


class Rescoring:
    """What stands in for the stages: the champion's checkpoint is one of a name, its captions have a known score."""

    def __init__(self, registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
        self.registry = registry
        self.calls = []
        self.places = []
        self.cider = 1.0
        self.here = "new"
        self.error = None
        self.really = mlflow.artifacts.download_artifacts
        monkeypatch.setattr(rescoring_of, "hash_test_set", lambda paths: self.here)
        monkeypatch.setattr(rescoring_of, "headline_scores", lambda report: report)
        monkeypatch.setattr(mlflow.artifacts, "download_artifacts", self.download)
        monkeypatch.setattr("m3diff.stages.predict.stage.predict", self.predict)
        monkeypatch.setattr("m3diff.stages.evaluate.stage.evaluate", self.evaluate)

    def download(self, artifact_uri: str | None = None, *, dst_path: str | None = None, **of_run: str) -> str:
        if artifact_uri is None:
            return self.really(dst_path=dst_path, **of_run)
        if self.error:
            raise self.error
        found = Path(dst_path or self.registry.root / "stored") / "artifacts" / "checkpoint"
        found.mkdir(parents=True, exist_ok=True)
        (found / "of.txt").write_text(artifact_uri)
        return str(found)

    def predict(self, cfg, compute, mixture, model, out) -> None:
        assert compute == self.registry.params.compute
        assert mixture == self.registry.params.paths.mixture
        out.mkdir()
        self.places.append(out)
        (out / "captions.txt").write_text((model / "checkpoint" / "of.txt").read_text())
        self.calls.append(((out / "captions.txt").read_text(), cfg.max_new_tokens, cfg.batch_pairs))

    def evaluate(self, cfg, compute, records, clean, predictions, out, origin) -> dict:
        params = self.registry.params
        assert cfg == params.evaluate
        assert records == params.paths.records
        assert clean == params.paths.clean
        assert (predictions / "captions.txt").is_file()
        out.mkdir()
        pq.write_table(scores(self.cider), out / SCORES)
        (out / "metrics.json").write_text("{}")
        return {"toy/total": {"CIDEr": 150.0}}


@pytest.fixture
def rescoring(registry, monkeypatch) -> Rescoring:
    """Version 1 is champion, scored 9.0 on the test set "old"; version 2 is scored 1.5 on the test set "new"."""
    registry.grow(9.0, test_set="old", predict__max_new_tokens="17")
    registry.add(1.5, seed=1, test_set="new")
    return Rescoring(registry, monkeypatch)


# A project that trains and registers, each run committed to a branch of its own, and what it pushes to


class Team:
    """`project` trains; `origin` and `remote` are what others see of its commits and data; `database` is MLflow's."""

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
        """Train, commit to runs/<name>, push commit and data, register; as a flow does."""
        toy.run(self.project, "git", "checkout", "--quiet", "-b", f"runs/{name}", "main")
        if seed is not None:
            toy.change(self.project, "train", seed=seed)
            toy.run(self.project, "dvc", "repro", "--quiet")
        toy.commit(self.project, f"run {name}")
        toy.run(self.project, "dvc", "push", "--quiet")
        toy.run(self.project, "git", "push", "--quiet", "origin", f"runs/{name}")
        command = [sys.executable, "-m", "m3diff", "register"]
        given = os.environ | {"M3DIFF_FLOW_RUN": name}
        subprocess.run(command, cwd=self.project, env=given, stdout=subprocess.DEVNULL, check=True)


@pytest.fixture(scope="session")
def team(trained_once: Path, empty_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Team:
    """One version, of the branch runs/first. Tests leave it as it is."""
    made = Team(tmp_path_factory.mktemp("team"), trained_once, empty_store)
    made.run("first")
    return made


def anew(registry: Registry) -> None:
    """The registered model is deleted on MLflow's page; the next registration makes it again."""
    registry.client.delete_registered_model("m3diff")
    time.sleep(0.01)  # when it was made tells one from the other, in ms
    registry.client.create_registered_model("m3diff")


def remedies(text: str) -> list[int]:
    """The versions that the commands in a text make champion."""
    return [int(version) for version in re.findall(r"m3diff rollback --to (\d+)", text)]


def tag(registry: Registry) -> str | None:
    return registry.client.get_registered_model("m3diff").tags.get(TAG)


def agrees(registry: Registry) -> None:
    """One champion, which is the record's; nothing is left to do."""
    assert numbering_faults() == []
    assert pending_move(Path(".")) is None
    assert follow_champions(read_decisions(), "m3diff").champions[-1] == registry.aliases()["champion"]


def in_child(work: Callable[[], object]) -> int:
    """A process of its own that does this; its id. It collects no garbage: what tests of training left in this process
    (torch's process groups) waits for threads that a fork does not have."""
    child = os.fork()
    if child == 0:
        gc.disable()
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    return child


def ended(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
