"""A trained toy project with an empty MLflow store. Both are created once and copied for each test."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def copy(trained_once: Path, empty_store: Path) -> Callable[[Path], Path]:
    def copy(folder: Path) -> Path:
        root = Path(shutil.copytree(trained_once, folder / "toy", symlinks=True))
        (root / "services" / "mlflow").mkdir(parents=True)
        shutil.copy(empty_store, root / "services" / "mlflow" / "mlflow.db")
        return root

    return copy


@pytest.fixture
def trained(copy: Callable[[Path], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a copy of the project, which is the current directory."""
    root = copy(tmp_path)
    monkeypatch.chdir(root)
    return root
