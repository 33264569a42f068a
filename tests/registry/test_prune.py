"""Prune removes old versions with everything that only they need."""

import hashlib
import shutil
import subprocess
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlflow
import pytest
from mlflow.entities import LoggedModel
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import INTERNAL_ERROR, RESOURCE_DOES_NOT_EXIST

from m3diff.__main__ import main
from m3diff.provenance.dvc import object_file, read_file_list
from m3diff.records.errors import DataError
from m3diff.registry.prune import (
    branches_to_remove,
    build_gc_arguments,
    delete_branch,
    delete_version,
    find_obstacles_to_gc,
    lock_sha256,
    prune,
    reasons_to_keep,
)
from m3diff.registry.verification import verify_lineage
from m3diff.settings.load import load_params
from m3diff.stages.register.params import Register
from tests import toy
from tests.errors import raises
from tests.registry.conftest import Registry, Team

RUNS = ("first", "second", "third")
BRANCHES = {f"refs/{folder}/runs/{name}" for folder in ("heads", "remotes/origin") for name in RUNS}


@dataclass
class VersionFiles:
    """The folder of a version in MLflow, its files in DVC's cache, and its run."""

    stored_model: Path
    cached_files: set[Path]
    run_id: str

    @classmethod
    def read(cls, team: Team, number: int) -> "VersionFiles":
        version = team.client.get_model_version("m3diff", str(number))
        model = team.client.get_logged_model(version.source.removeprefix("models:/"))
        cache = team.project / ".dvc/cache"
        hashes = read_file_list(cache, version.tags["dvc.checkpoint"]).values()
        return cls(
            stored_model=Path(model.artifact_location.removeprefix("file://")),
            cached_files={object_file(cache, hash_) for hash_ in hashes},
            run_id=version.run_id,
        )


def existing_versions(team: Team) -> list[int]:
    return sorted(int(version.version) for version in team.client.search_model_versions("name = 'm3diff'"))


def existing_branches(team: Team) -> set[str]:
    references = toy.run(team.project, "git", "for-each-ref", "--format=%(refname)").split()
    return {reference for reference in references if "runs/" in reference}


@pytest.mark.slow(65)
def test_old_versions_are_removed_with_all_that_only_they_need(
    trained_once, empty_store, tmp_path, monkeypatch, capsys
):
    """There are three versions on three branches. The first is the champion and the last is the challenger."""
    team = Team(tmp_path, trained_once, empty_store)
    for name, seed in zip(RUNS, (None, 1, 2), strict=True):
        team.run(name, seed)
    team.client.set_registered_model_alias("m3diff", "champion", "1")
    monkeypatch.chdir(team.project)
    champion = VersionFiles.read(team, 1)
    old_version = VersionFiles.read(team, 2)

    for arguments, code in ((["--dry-run"], 0), ([], 2), (["--dry-run", "--yes"], 0)):
        assert main(["prune", "--keep", "1", *arguments]) == code
        plan = capsys.readouterr().out
        for line in ("keep    version 3: challenger", "keep    version 1: champion", "remove  version 2\n"):
            assert line in plan
        assert "remove  branch heads/runs/second" in plan
        assert "data    dvc gc --workspace --all-commits" in plan
        assert "frees   0 GB" not in plan
        assert existing_versions(team) == [1, 2, 3]
        assert existing_branches(team) == BRANCHES
        assert old_version.stored_model.is_dir()

    assert main(["prune", "--keep", "1", "--yes"]) == 0
    assert existing_versions(team) == [1, 3]
    assert existing_branches(team) == {branch for branch in BRANCHES if "second" not in branch}
    assert "second" not in toy.run(team.project, "git", "ls-remote", "origin")
    assert champion.stored_model.is_dir()
    assert not old_version.stored_model.is_dir()
    assert all(file.is_file() for file in champion.cached_files)
    assert not any(file.is_file() for file in old_version.cached_files - champion.cached_files)
    run = team.client.get_run(old_version.run_id)
    assert run.data.tags["pruned"] == "true"
    assert run.data.metrics
    for number in ("1", "3"):
        checks = verify_lineage(load_params().register_, number)
        assert [str(check) for check in checks if check.outcome != "ok"] == []
    assert main(["prune", "--keep", "1"]) == 0, "nothing is left to remove"


@pytest.fixture
def warm_started() -> Any:
    """Return versions 5 to 1 with their checkpoints and bases: 5 was trained from 4, 4 from 3, and 3 from 1."""
    checkpoints_and_bases = {5: ("e", "d"), 4: ("d", "c"), 3: ("c", "a"), 2: ("b", "x"), 1: ("a", "x")}
    return [
        SimpleNamespace(version=str(number), tags={"dvc.checkpoint": checkpoint, "dvc.base": base})
        for number, (checkpoint, base) in checkpoints_and_bases.items()
    ]


def test_the_bases_of_kept_versions_and_the_bases_of_these_stay(warm_started):
    assert reasons_to_keep(warm_started, {4: ["champion", "previous"]}, 1) == {
        5: "one of the newest",
        4: "champion, previous",
        3: "version 4 was trained from it",
        1: "version 3 was trained from it",
    }


def test_kept_versions_are_listed_from_the_newest_to_the_oldest(warm_started):
    aliases = {2: ["previous"], 4: ["champion"]}
    assert list(reasons_to_keep(warm_started, aliases, 1)) == [5, 4, 3, 2, 1]


def test_without_aliases_and_newest_versions_none_stays(warm_started):
    assert reasons_to_keep(warm_started, {}, 0) == {}


# The branches of runs, in a repository with a remote


def git(root: Path, *arguments: str) -> str:
    config = ("-c", "user.name=a", "-c", "user.email=a@localhost", "-c", "commit.gpgsign=false")
    command = ["git", "-C", str(root), *config, *arguments]
    return subprocess.run(command, capture_output=True, check=True, text=True).stdout.strip()


def commit_lock(root: Path, text: str) -> str:
    """Commit a dvc.lock with this text and return the commit."""
    (root / "dvc.lock").write_text(text)
    git(root, "add", ".")
    git(root, "commit", "-q", "-m", "a run")
    return git(root, "rev-parse", "HEAD")


@pytest.fixture(scope="module")
def clone_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the repository `clone`, in which main is checked out, and its remote `origin.git`."""
    folder = tmp_path_factory.mktemp("runs")
    git(folder, "init", "-q", "--bare", "origin.git")
    git(folder, "init", "-q", "-b", "main", "clone")
    root = folder / "clone"
    commit_lock(root, "stages: {}\n")
    for name in "ab":
        git(root, "checkout", "-q", "-b", f"runs/{name}", "main")
        commit_lock(root, f"stages: {{}}  # {name}\n")
    git(root, "checkout", "-q", "main")
    git(root, "remote", "add", "origin", "../origin.git")
    git(root, "push", "-q", "origin", "runs/a")
    git(root, "update-ref", "refs/remotes/origin/runs/b", "runs/b")  # somebody removed the branch from the remote
    return folder


@pytest.fixture
def clone(clone_once: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a copy of the repository, which is the current directory."""
    shutil.copytree(clone_once, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path / "clone")
    return tmp_path / "clone"


def version_of(number: int = 1, flow_run: str | None = None, commit: str = "", lock: str = "") -> Any:
    """Return a version of this flow run, of the commit of a branch, with the sha256 of a dvc.lock."""
    tags = {"git.commit": commit, "dvc.lock.sha256": hashlib.sha256(lock.encode()).hexdigest()}
    if flow_run is not None:
        tags["prefect.flow_run"] = flow_run
    return SimpleNamespace(version=str(number), tags=tags)


BRANCHES_OF_A = ["refs/heads/runs/a", "refs/remotes/origin/runs/a"]
BRANCHES_OF_B = ["refs/heads/runs/b", "refs/remotes/origin/runs/b"]


def test_the_branches_of_old_versions_are_removed_here_and_at_the_remote(clone):
    old_versions = [version_of(flow_run="a"), version_of(), version_of(flow_run="b"), version_of(flow_run="no branch")]
    branches = branches_to_remove(old_versions, [version_of(commit="main"), version_of(commit="lost")])
    assert branches == sorted([*BRANCHES_OF_A, *BRANCHES_OF_B])
    for branch in branches:
        delete_branch(branch)
    assert git(clone, "for-each-ref", "--format=%(refname)") == "refs/heads/main"
    assert git(clone.with_name("origin.git"), "for-each-ref") == ""


def test_a_branch_that_is_checked_out_is_not_removed(clone):
    git(clone, "checkout", "-q", "runs/a")
    assert branches_to_remove([version_of(flow_run="a")], []) == ["refs/remotes/origin/runs/a"]


def test_a_branch_that_alone_holds_the_commit_of_a_kept_version_is_not_removed(clone):
    old_versions = [version_of(flow_run="a"), version_of(flow_run="b")]
    kept_versions = [version_of(commit="runs/a")]
    assert branches_to_remove(old_versions, kept_versions) == BRANCHES_OF_B
    assert branches_to_remove(old_versions[:1], kept_versions) == []
    git(clone, "tag", "release", "runs/a")
    assert branches_to_remove(old_versions[:1], kept_versions) == BRANCHES_OF_A


def test_a_project_in_a_folder_of_a_larger_repository_is_refused(clone, monkeypatch):
    (clone / "project").mkdir()
    monkeypatch.chdir(clone / "project")
    with raises(DataError, "git.larger_repository", folder="project"):
        prune(Register())


# The data


OBSTACLES = {
    "none": (version_of(7, commit="runs/a", lock="stages: {}  # a\n"), []),
    "a commit that is not here": (version_of(7, commit="lost"), ["the commit of version 7", "git fetch"]),
    "a commit without a version": (version_of(7), ["the commit of version 7", "git fetch"]),
    "only on a removed branch": (version_of(7, commit="runs/b"), ["the commit of version 7", "git branch kept-7 "]),
    "another dvc.lock": (version_of(7, commit="runs/a", lock="stages: {}\n"), ["version 7 ", "dvc.lock"]),
}


@pytest.mark.parametrize("case", OBSTACLES)
def test_data_stay_if_no_commit_that_remains_lists_those_of_a_kept_version(case, clone):
    version, words = OBSTACLES[case]
    obstacles = list(find_obstacles_to_gc([version], BRANCHES_OF_B))
    assert len(obstacles) == bool(words)
    assert [word for word in words if word not in obstacles[0]] == []


@pytest.mark.parametrize(("text", "is_obstacle"), [("", True), ("stages: {}\n", False), (None, False)], ids=str)
def test_data_stay_if_the_dvc_lock_of_a_working_tree_is_damaged(text, is_obstacle, clone):
    (clone / "dvc.lock").unlink()
    if text is not None:
        (clone / "dvc.lock").write_text(text)
    assert list(find_obstacles_to_gc([], [])) == [], "it is no project of DVC"
    (clone / ".dvc").mkdir()
    obstacles = list(find_obstacles_to_gc([], []))
    assert [f"git -C {clone} checkout HEAD -- dvc.lock" in obstacle for obstacle in obstacles] == [True] * is_obstacle


def test_the_hash_of_a_dvc_lock_that_cannot_be_read_is_none(clone):
    assert lock_sha256("runs/a") == hashlib.sha256(b"stages: {}  # a\n").hexdigest()
    assert lock_sha256(commit_lock(clone, "stages:")) is not None
    assert lock_sha256(commit_lock(clone, "")) is None
    assert lock_sha256("lost") is None


def test_dvc_keeps_the_data_of_every_commit_and_of_every_working_tree(clone):
    assert build_gc_arguments() == ["gc", "--workspace", "--all-commits"]
    (clone / ".dvc").mkdir()
    (clone / ".dvc" / "config").touch()
    commit_lock(clone, "")
    git(clone, "worktree", "add", "-q", "--detach", "../tree")
    git(clone, "worktree", "add", "-q", "--detach", "../without", "runs/b")
    other_tree = str(clone.with_name("tree"))
    assert build_gc_arguments() == ["gc", "--workspace", "--all-commits", "--skip-failed", "--projects", other_tree]


# The versions and their weights in MLflow


def store_model(registry: Registry, size: int) -> LoggedModel:
    """Store a model whose checkpoint has `size` bytes."""
    model = registry.client.create_logged_model(registry.experiment, name="m3diff")
    checkpoint = Path(model.artifact_location.removeprefix("file://")) / "artifacts" / "checkpoint"
    checkpoint.mkdir(parents=True)
    (checkpoint / "model.safetensors").write_bytes(bytes(size))
    return model


def add_version(registry: Registry, model: LoggedModel, **tags: str) -> None:
    run = registry.client.create_run(registry.experiment).info.run_id
    facts = {name.replace("__", "."): value for name, value in tags.items()}
    registry.client.create_model_version("m3diff", model.model_uri, run, tags=facts)


@dataclass
class StoredVersions:
    """Four versions with stored models. 1 and 2 are old, 3 is champion, and 4 shares the model of 2.

    Attributes:
        models: the stored models of versions 1 and 2.
        dvc_commands: the commands of DVC, which are not run.
    """

    registry: Registry
    models: list[LoggedModel]
    dvc_commands: list[tuple[Any, ...]]

    def prune(self, yes: bool = False) -> tuple[list[int], list[str]]:
        return prune(self.registry.params.register_, keep=1, yes=yes)

    def numbers(self) -> list[int]:
        return sorted(int(version.version) for version in self.registry.client.search_model_versions("name = 'm3diff'"))

    def has_files(self) -> list[bool]:
        """Return whether the files of each model exist."""
        return [(Path(model.artifact_location.removeprefix("file://")) / "artifacts").is_dir() for model in self.models]

    def branches(self) -> list[str]:
        return git(self.registry.root, "for-each-ref", "--format=%(refname:short)").splitlines()


@pytest.fixture
def stored(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> StoredVersions:
    mlflow.set_tracking_uri(registry.params.register_.tracking_uri)  # creating a version of a stored model needs it
    git(registry.root, "checkout", "-q", "-b", "main")
    commit = commit_lock(registry.root, "stages: {}\n")
    git(registry.root, "branch", "runs/old")
    lineage = {"git__commit": commit, "dvc__lock__sha256": hashlib.sha256(b"stages: {}\n").hexdigest()}
    models = [store_model(registry, size) for size in (2_000_000, 1_000_000, 0)]
    add_version(registry, models[0], prefect__flow_run="old")
    add_version(registry, models[1])
    add_version(registry, models[2], **lineage)
    add_version(registry, models[1], **lineage)
    registry.point("champion", 3)
    dvc_commands: list[tuple[Any, ...]] = []
    monkeypatch.setattr("m3diff.registry.prune.run_dvc", lambda *command: dvc_commands.append(command))
    return StoredVersions(registry, models[:2], dvc_commands)


def test_a_plan_lists_what_is_kept_and_removed_and_removes_nothing(stored):
    removed_versions, lines = stored.prune()
    assert removed_versions == [2, 1]
    assert lines == [
        "keep    version 4: one of the newest",
        "keep    version 3: champion",
        "remove  version 2",
        "remove  version 1",
        "remove  branch heads/runs/old",
        "frees   0.002 GB of weights in MLflow",
        "data    dvc gc --workspace --all-commits",
    ]
    stored.registry.client.set_model_version_tag("m3diff", "4", "git.commit", "0" * 40)
    assert stored.prune()[1][-1].startswith("data    kept, because the commit of version 4 ")
    assert stored.numbers() == [1, 2, 3, 4]
    assert stored.dvc_commands == []
    assert stored.branches() == ["main", "runs/old"]
    assert stored.has_files() == [True, True]


def test_a_confirmed_plan_is_carried_out_and_shared_weights_stay(stored):
    old_run = stored.registry.version(1).run_id
    stored.prune(yes=True)
    assert stored.numbers() == [3, 4]
    assert stored.dvc_commands == [(Path(), "gc", "--workspace", "--all-commits", "--force")]
    assert stored.branches() == ["main"]
    assert stored.has_files() == [False, True]
    remaining_models = stored.registry.client.search_logged_models([stored.registry.experiment])
    assert stored.models[0].model_id not in [model.model_id for model in remaining_models]
    assert stored.registry.client.get_run(old_run).data.tags["pruned"] == "true"
    removed_versions, lines = stored.prune()
    assert removed_versions == []
    assert lines[2:] == ["frees   0 GB of weights in MLflow"]


@pytest.mark.parametrize(
    ("error_code", "is_removed"), [(RESOURCE_DOES_NOT_EXIST, True), (INTERNAL_ERROR, False)], ids=["gone", "refused"]
)
def test_a_version_is_removed_if_its_weights_are_gone_and_stays_if_they_cannot_be(error_code, is_removed):
    removed: list[tuple[str, ...]] = []

    def refuse(model_id: str) -> None:
        raise MlflowException("no", error_code=error_code)

    client: Any = SimpleNamespace(get_logged_model=refuse, delete_model_version=lambda *names: removed.append(names))
    version: Any = SimpleNamespace(name="m3diff", version="1", source="models:/m-1", run_id=None)
    with nullcontext() if is_removed else pytest.raises(MlflowException):
        delete_version(client, version, [])
    assert removed == [("m3diff", "1")] * is_removed
