"""A team: a project that trains and registers, each run committed to a branch of its own, and what it pushes to."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from mlflow.tracking import MlflowClient

from tests import toy


class Team:
    """`project` trains; `origin` and `remote` are what others see of its commits and data; `database` is MLflow's."""

    def __init__(self, folder: Path, trained: Path, store: Path) -> None:
        self.folder, self.project, self.remote = folder, folder / "project", folder / "remote"
        self.origin, self.database = folder / "origin.git", folder / "mlflow" / "mlflow.db"
        shutil.copytree(trained, self.project, symlinks=True)
        self.database.parent.mkdir()
        shutil.copy(store, self.database)
        self.uri = f"sqlite:///{self.database}"
        self.set("register", tracking_uri=self.uri)
        toy.run(self.project, "dvc", "remote", "add", "--default", "store", str(self.remote))
        toy.run(self.project, "git", "stash", "--include-untracked", "--quiet", "--", "dvc.lock")
        toy.commit(self.project, "a remote")
        toy.run(self.project, "git", "stash", "pop", "--quiet")
        toy.run(self.project, "git", "branch", "--move", "main")
        toy.run(folder, "git", "init", "--quiet", "--bare", "--initial-branch", "main", str(self.origin))
        toy.run(self.project, "git", "remote", "add", "origin", str(self.origin))
        toy.run(self.project, "git", "push", "--quiet", "origin", "main")

    def set(self, section: str, **values: object) -> None:
        file = self.project / "params.yaml"
        params = yaml.safe_load(file.read_text())
        params[section] |= values
        file.write_text(yaml.safe_dump(params, sort_keys=False))

    def run(self, name: str, seed: int | None = None) -> None:
        """Train, commit to runs/<name>, push commit and data, register; as a flow does."""
        toy.run(self.project, "git", "checkout", "--quiet", "-b", f"runs/{name}", "main")
        if seed is not None:
            self.set("train", seed=seed)
            toy.run(self.project, "dvc", "repro", "--quiet")
        toy.commit(self.project, f"run {name}")
        toy.run(self.project, "dvc", "push", "--quiet")
        toy.run(self.project, "git", "push", "--quiet", "origin", f"runs/{name}")
        self.m3diff("register", flow_run=name)

    def m3diff(self, *arguments: str, flow_run: str | None = None) -> None:
        environment = os.environ | ({"M3DIFF_FLOW_RUN": flow_run} if flow_run else {})
        command = [sys.executable, "-m", "m3diff", *arguments]
        done = subprocess.run(command, cwd=self.project, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    def clone(self, folder: Path) -> Path:
        """A fresh clone with a cache of its own, that knows of no run's branch yet."""
        toy.run(folder, "git", "clone", "--quiet", "--single-branch", str(self.origin), "clone")
        return folder / "clone"

    @property
    def client(self) -> MlflowClient:
        return MlflowClient(tracking_uri=self.uri, registry_uri=self.uri)


@pytest.fixture(scope="session")
def team(trained_once: Path, empty_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Team:
    """One version, of the branch runs/first. Tests leave it as it is."""
    made = Team(tmp_path_factory.mktemp("team"), trained_once, empty_store)
    made.run("first")
    return made
