"""The toy project before any stage has run, for tests that run it with DVC and Prefect."""

import hashlib
import shutil
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import yaml

from flows.workspace import Workspace, workspace
from m3diff.provenance.dvc import object_file
from m3diff.provenance.git import git
from m3diff.registry.promote import GateDecision
from m3diff.stages.register.stage import Registration
from tests.servers import Listener

REGISTRATION = Registration(outcome="registered", model="m", version=7, run_id="r")


def decision(outcome: str, champion: int | None = 1) -> GateDecision:
    gate = {"protocol": "d/p", "metric": "CIDEr", "min_gain": 0.0, "confidence": 0.95, "reason": "why"}
    return GateDecision(outcome=outcome, model="m", challenger=7, champion=champion, **gate)


def opened(
    flow_run: str = "one", ref: str | None = None, overrides: Sequence[str] = (), **options: Any
) -> AbstractContextManager[Workspace]:
    """Open the workspace of a flow run at `ref`, by default HEAD."""
    return workspace(flow_run, ref, overrides, **options)


def worktrees() -> list[str]:
    """Return the folders of git's working trees except the main one."""
    return [line.split()[0] for line in git("worktree", "list").splitlines()[1:]]


@pytest.fixture
def project(built_once: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a copy of the project, which is the current directory."""
    root = tmp_path / "toy"
    shutil.copytree(built_once, root, symlinks=True)
    monkeypatch.chdir(root)
    return root


class SmallRepository:
    """A repository of git and DVC without stages. Its files are written without DVC's command, which takes a second."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / ".dvc").mkdir(parents=True)
        (root / ".gitignore").write_text("/runs\n/.dvc/cache\n/.dvc/tmp\n")
        self.configure(remotes={})
        git("init", "--quiet", str(root))

    def configure(self, remotes: dict[str, Path], default: str = "") -> None:
        """Write DVC's settings with these remotes."""
        text = f"[core]\n    analytics = false\n    remote = {default}\n" if default else ""
        text += "".join(f"['remote \"{name}\"']\n    url = {folder}\n" for name, folder in remotes.items())
        (self.root / ".dvc/config").write_text(text)

    def track(self, name: str, content: str, is_cached: bool = True, **options: Any) -> str:
        """Write `NAME.dvc` for a file with this content, and the file in DVC's cache. Return the file's MD5."""
        md5 = hashlib.md5(content.encode()).hexdigest()
        entry = {"path": name, "hash": "md5", "md5": md5, "size": len(content)} | options
        (self.root / f"{name}.dvc").write_text(yaml.safe_dump({"outs": [entry]}))
        if is_cached:
            file = object_file(self.root / ".dvc/cache", md5)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(content)
        return md5

    def commit(self) -> str:
        """Commit all files and return the commit."""
        git("add", "--all")
        git("commit", "--quiet", "--message", "all files")
        return git("rev-parse", "HEAD")


@pytest.fixture
def small_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SmallRepository:
    """Return an empty repository, which is the current directory."""
    repository = SmallRepository(tmp_path / "small")
    monkeypatch.chdir(repository.root)
    return repository


@pytest.fixture
def listener(monkeypatch: pytest.MonkeyPatch) -> Iterator[Listener]:
    """Run the server to which M3DIFF_NOTIFY points."""
    listener = Listener()
    monkeypatch.setenv("M3DIFF_NOTIFY", listener.address)
    yield listener
    listener.server.shutdown()
