"""A small project whose stages ran once, and a flow's run of it in this process, without a server of Prefect."""

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlflow
import pytest
from mlflow.entities.model_registry import ModelVersion
from prefect.states import Completed, Failed, State

from flows import pipeline, report
from m3diff.provenance.git import git
from tests import toy
from tests.toy import store

TASKS = ("prepare_run", "reproduce", "push_data", "register_model", "promote_model")


@pytest.fixture(scope="session")
def committed_once(trained_once: Path, empty_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy project whose stages ran, all of it committed, with an empty store of MLflow."""
    root = tmp_path_factory.mktemp("committed") / "toy"
    shutil.copytree(trained_once, root, symlinks=True)
    toy.commit(root, "all stages ran")
    (root / "services" / "mlflow").mkdir(parents=True)
    shutil.copy(empty_store, root / "services" / "mlflow" / "mlflow.db")
    return root


@pytest.fixture
def project(committed_once: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, current directory."""
    root = tmp_path / "toy"
    shutil.copytree(committed_once, root, symlinks=True)
    monkeypatch.chdir(root)
    return root


class Flow:
    """The flow of `flows.pipeline`, its tasks tried again as Prefect does but at once. What it logged and its pages."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        self.runs = 0
        self.logged: list[str] = []
        self.pages: list[str] = []
        self.tries: list[str] = []
        logger = SimpleNamespace(info=self.logged.append, warning=self.logged.append, error=self.logged.append)
        # the toy project runs the code of this checkout
        monkeypatch.setattr(pipeline, "require_own_code", lambda: None)
        for module in (pipeline, report):
            monkeypatch.setattr(module, "get_run_logger", lambda: logger)
        monkeypatch.setattr(pipeline, "flow_run", SimpleNamespace(get_id=lambda: f"run{self.runs}"))
        monkeypatch.setattr(report, "create_markdown_artifact", lambda markdown, **_: self.pages.append(markdown))
        for name in TASKS:
            monkeypatch.setattr(pipeline, name, self.tried(getattr(pipeline, name)))

    def tried(self, task: Any) -> Callable[..., Any]:
        def call(*arguments: Any, return_state: bool = False) -> Any:
            for _ in range(task.retries + 1):
                self.tries.append(task.name)
                state = attempt(task, arguments)
                if state.is_completed() or not (task.retry_condition_fn or (lambda *_: True))(task, None, state):
                    break
            return state if return_state else state.result()

        return call

    def run(self, *overrides: str) -> tuple[State, dict[str, str]]:
        """The state of a run of HEAD, and how each of its tasks ended."""
        self.runs += 1
        before = len(self.pages)
        try:
            state = pipeline.run_pipeline("HEAD", overrides, reason="a test")
        finally:
            mlflow.set_tracking_uri("")
        assert len(self.pages) == before + 1
        return state, outcomes(self.pages[-1])

    @property
    def versions(self) -> list[ModelVersion]:
        return list(store(self.root).search_model_versions("name = 'm3diff'"))

    @property
    def branches(self) -> set[str]:
        return set(git("for-each-ref", "--format=%(refname:short)", "refs/heads/runs/", cwd=self.root).split())


def attempt(task: Any, arguments: tuple[Any, ...]) -> State:
    try:
        result = task.fn(*arguments)
    except Exception as error:
        return Failed(data=error, message=str(error))
    return result if isinstance(result, State) else Completed(data=result)


def outcomes(page: str) -> dict[str, str]:
    """The end of each task, from the table of a run's page."""
    lines = page.partition("## What ran")[2].partition("##")[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    return {row[0].strip("`"): row[1] for row in rows[2:]}


@pytest.fixture
def flow(project: Path, monkeypatch: pytest.MonkeyPatch) -> Flow:
    return Flow(project, monkeypatch)
