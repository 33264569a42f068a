"""A registered model to which a test adds versions that hold nothing but scores, in an MLflow store of its own."""

import shutil
import subprocess
from collections.abc import Iterator
from copy import copy
from pathlib import Path

import mlflow
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from mlflow.entities.model_registry import ModelVersion
from mlflow.tracking import MlflowClient

from m3diff.commands.rescore import rescore
from m3diff.registry.decisions import Decision, decisions, faults
from m3diff.registry.promote import Promotion, promote, rollback
from m3diff.registry.versions import CHALLENGER, SCORES
from m3diff.settings.load import load_params
from m3diff.settings.tree import Params
from tests.registry.team import team  # noqa: F401  # a fixture
from tests.toy import REPOSITORY

PROTOCOL, PAIRS = "minichange/total", 200


def scores(cider: float, pairs: int = PAIRS, seed: int = 0, protocol: str = PROTOCOL, **columns: float) -> pa.Table:
    """scores.parquet of a model with this mean CIDEr: pairs differ, and two models differ on each by a little."""
    hard, own = np.random.default_rng(99).normal(0, 0.5, pairs), np.random.default_rng(seed).normal(0, 0.1, pairs)
    values = cider + hard - hard.mean() + own - own.mean()
    ids = [f"minichange/{number:06d}.png" for number in range(pairs)]
    more = {name: [value] * pairs for name, value in columns.items()}
    return pa.table({"protocol": [protocol] * pairs, "id": ids, "CIDEr": values.tolist(), **more})


class Registry:
    """The project's registered model."""

    def __init__(self, root: Path) -> None:
        self.root, uri = root, f"sqlite:///{root}/mlflow.db"
        self.client = MlflowClient(tracking_uri=uri, registry_uri=uri)
        self.plain = load_params(REPOSITORY / "params.yaml")
        self.params = self.of(root)
        self.experiment = self.client.create_experiment("m3diff", artifact_location=(root / "artifacts").as_uri())
        self.client.create_registered_model("m3diff")
        self.gate(guards={})

    def of(self, root: Path) -> Params:
        """Parameters of the store in a folder."""
        store, scratch = {"tracking_uri": f"sqlite:///{root}/mlflow.db"}, {"scratch": root / "scratch"}
        register, compute = self.plain.register_, self.plain.compute
        changes = {"register_": register.model_copy(update=store), "compute": compute.model_copy(update=scratch)}
        return self.plain.model_copy(update=changes)

    def copy(self, root: Path) -> "Registry":
        """Store and record once more, for a test to break."""
        root.mkdir()
        shutil.copy(self.root / "mlflow.db", root)
        shutil.copytree(self.root / ".git", root / ".git")
        made = copy(self)
        made.root, made.params = root, self.of(root).model_copy(update={"promote": self.params.promote})
        uri = made.params.register_.tracking_uri
        made.client = MlflowClient(tracking_uri=uri, registry_uri=uri)
        return made

    def gate(self, **changes: object) -> None:
        cfg = type(self.params.promote).model_validate(self.params.promote.model_dump() | changes)
        self.params = self.params.model_copy(update={"promote": cfg})

    def add(self, table: pa.Table | None = None, test_set: str = "one", **tags: str) -> ModelVersion:
        """A version with these scores becomes the challenger."""
        run = self.client.create_run(self.experiment).info.run_id
        if table is not None:
            pq.write_table(table, self.root / SCORES)
            self.client.log_artifact(run, str(self.root / SCORES))
        facts = {"test_set.sha256": test_set} | {name.replace("__", "."): value for name, value in tags.items()}
        version = self.client.create_model_version("m3diff", "file:///nowhere", run, tags=facts)
        self.client.set_registered_model_alias("m3diff", CHALLENGER, version.version)
        return version

    def decide(self, version: int | None = None, again: bool = False) -> Promotion:
        return promote(self.params, rescore, version, again)

    def rollback(self, to: int | None = None, why: str = "") -> Decision:
        return rollback(self.params, to, why)

    def point(self, alias: str, version: int) -> None:
        """By hand, as on MLflow's page."""
        self.client.set_registered_model_alias("m3diff", alias, str(version))

    def aliases(self) -> dict[str, int]:
        return {alias: int(version) for alias, version in self.client.get_registered_model("m3diff").aliases.items()}

    def entries(self) -> list[Decision]:
        assert faults() == []
        return decisions()

    def record(self) -> list[str]:
        return [entry.outcome for entry in self.entries()]


@pytest.fixture(autouse=True)
def elsewhere() -> Iterator[None]:
    yield
    mlflow.set_tracking_uri("")


@pytest.fixture
def registry(empty_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Registry:
    """In a git repository without a commit, the current directory."""
    shutil.copy(empty_store, tmp_path / "mlflow.db")
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    monkeypatch.chdir(tmp_path)
    return Registry(tmp_path)
