"""A trained toy project with an empty MLflow store: both made once, copied for each test."""

import shutil
from pathlib import Path

import pytest


def project(trained_once: Path, empty_store: Path, folder: Path) -> Path:
    root = Path(shutil.copytree(trained_once, folder / "toy", symlinks=True))
    (root / "services" / "mlflow").mkdir(parents=True)
    shutil.copy(empty_store, root / "services" / "mlflow" / "mlflow.db")
    return root


@pytest.fixture
def trained(trained_once: Path, empty_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The project, current directory."""
    root = project(trained_once, empty_store, tmp_path)
    monkeypatch.chdir(root)
    return root
