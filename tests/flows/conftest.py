"""The toy project before any stage has run, for tests that run it with DVC and Prefect."""

import shutil
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from flows.workspace import Workspace, workspace
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


@pytest.fixture
def listener(monkeypatch: pytest.MonkeyPatch) -> Iterator[Listener]:
    """Run the server to which M3DIFF_NOTIFY points."""
    listener = Listener()
    monkeypatch.setenv("M3DIFF_NOTIFY", listener.address)
    yield listener
    listener.server.shutdown()
