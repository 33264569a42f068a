"""The toy project with nothing run yet, for the tests that run it through DVC and Prefect."""

import shutil
from pathlib import Path

import pytest

from tests import toy


@pytest.fixture(scope="session")
def built_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy.build(tmp_path_factory.mktemp("built") / "toy")


@pytest.fixture
def project(built_once: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the project, current directory."""
    root = tmp_path / "toy"
    shutil.copytree(built_once, root)
    monkeypatch.chdir(root)
    return root
