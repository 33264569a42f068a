"""A trained toy project with an empty MLflow store: both made once, copied for each test."""

import shutil
from pathlib import Path

import pytest


@pytest.fixture
def trained(trained_once: Path, empty_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The project, current directory."""
    root = tmp_path / "toy"
    shutil.copytree(trained_once, root, symlinks=True)
    (root / "services" / "mlflow").mkdir(parents=True)
    shutil.copy(empty_store, root / "services" / "mlflow" / "mlflow.db")
    monkeypatch.chdir(root)
    return root
