"""The toy project with nothing run yet, for the tests that run it through DVC and Prefect."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.servers import Listener


@pytest.fixture
def project(built_once: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the project, current directory."""
    root = tmp_path / "toy"
    shutil.copytree(built_once, root, symlinks=True)
    monkeypatch.chdir(root)
    return root


@pytest.fixture
def listener(monkeypatch: pytest.MonkeyPatch) -> Iterator[Listener]:
    """The server that M3DIFF_NOTIFY names."""
    listener = Listener()
    monkeypatch.setenv("M3DIFF_NOTIFY", listener.address)
    yield listener
    listener.server.shutdown()
