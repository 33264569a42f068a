"""A trained toy project, and an empty MLflow store: both made once, copied for each test."""

import shutil
from pathlib import Path

import pytest
import yaml
from mlflow.tracking import MlflowClient

from tests import toy


def store(root: Path) -> MlflowClient:
    uri = f"sqlite:///{root}/services/mlflow/mlflow.db"
    return MlflowClient(tracking_uri=uri, registry_uri=uri)


@pytest.fixture(scope="session")
def trained_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = toy.build(tmp_path_factory.mktemp("trained") / "toy")
    toy.run(root, "dvc", "repro", "-q")
    return root


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    database = tmp_path_factory.mktemp("store") / "mlflow.db"
    MlflowClient(f"sqlite:///{database}").search_experiments()
    return database


@pytest.fixture
def trained(trained_once: Path, empty_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The project, current directory, with a store that has its tables and nothing in them."""
    root = tmp_path / "toy"
    shutil.copytree(trained_once, root, symlinks=True)
    (root / "services" / "mlflow").mkdir(parents=True)
    shutil.copy(empty_store, root / "services" / "mlflow" / "mlflow.db")
    monkeypatch.chdir(root)
    return root


def change(root: Path, section: str, **values: object) -> None:
    """Set parameters of the project."""
    params = yaml.safe_load((root / "params.yaml").read_text())
    params[section] |= values
    (root / "params.yaml").write_text(yaml.safe_dump(params, sort_keys=False))
