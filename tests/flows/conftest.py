"""The toy project with nothing run yet, for the tests that run it through DVC and Prefect."""

import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import toy
from tests.servers import Listener


@pytest.fixture(scope="session")
def built_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy.build(tmp_path_factory.mktemp("built") / "toy")


@pytest.fixture
def project(built_once: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the project, current directory."""
    root = tmp_path / "toy"
    shutil.copytree(built_once, root, symlinks=True)
    monkeypatch.chdir(root)
    return root


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path, Callable[[], None]], None]:
    """`kept(project, make)`: what `make` leaves in `project`, where the test is; made once a module, then copied."""
    folder = tmp_path_factory.mktemp("kept") / "toy"

    def put(project: Path, make: Callable[[], None]) -> None:
        if not folder.exists():
            make()
            subprocess.run(["cp", "-a", str(project), str(folder)], check=True)  # hard links stay such
            return
        for child in project.iterdir():
            if child.is_dir() and not child.is_symlink():
                shutil.rmtree(child)
            else:
                child.unlink()
        subprocess.run(["cp", "-a", f"{folder}/.", str(project)], check=True)

    return put


@pytest.fixture
def listener(monkeypatch: pytest.MonkeyPatch) -> Iterator[Listener]:
    """The server that M3DIFF_NOTIFY names."""
    listener = Listener()
    monkeypatch.setenv("M3DIFF_NOTIFY", listener.address)
    yield listener
    listener.server.shutdown()
