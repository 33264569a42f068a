"""The flow watch: changed drop folders and imported sources start one training."""

import json
import os
import shutil
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flows import dvc, watch
from flows.watch import DATA_MESSAGE_PREFIX, STATE_FILE, compute_fingerprint, drop_folders, imported_files
from flows.workspace import (
    DATA_BRANCH,
    workspace,
)
from m3diff.provenance.git import git, has_branch
from m3diff.records.errors import DataError, Fault
from m3diff.settings.section import ParamsError
from tests import toy
from tests.errors import Message, raises


class WatchRuns:
    """Runs the flow watch with a fake clock, and records the trainings that it starts and its log."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.started = []
        self.logged = []
        self.is_killed = False
        self.seconds_later = 61.0
        now = time.time
        logger = SimpleNamespace(info=self.logged.append, warning=self.logged.append)
        monkeypatch.setattr(watch, "get_run_logger", lambda: logger)
        monkeypatch.setattr(watch, "start_retrain", self.start)
        monkeypatch.setattr(watch, "require_own_code", lambda: None)  # the toy project has its own code
        monkeypatch.setattr(watch.time, "time", lambda: now() + self.seconds_later)

    def start(self, reason: str, commit: str) -> None:
        assert commit == git("rev-parse", DATA_BRANCH)
        if self.is_killed:
            raise RuntimeError("killed")
        self.started.append(reason)

    def __call__(self) -> Any:
        return watch.watch.fn()


@pytest.fixture
def imported(project: Path, tmp_path: Path) -> Path:
    """Return a folder outside the project that the project imports as data/theirs."""
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "a.csv").write_text("1")
    toy.run(project, "dvc", "import-url", "-q", str(tmp_path / "source"), "data/theirs")
    toy.commit(project, "theirs")
    return tmp_path / "source"


@pytest.fixture
def run_watch(project: Path, monkeypatch: pytest.MonkeyPatch) -> WatchRuns:
    monkeypatch.setenv("M3DIFF_DROP", "")
    return WatchRuns(monkeypatch)


@pytest.fixture
def drop(run_watch: WatchRuns, project: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a drop folder with one file, which is tracked by DVC and committed."""
    monkeypatch.setenv("M3DIFF_DROP", "data/mine")
    (project / "data/mine").mkdir()
    (project / "data/mine/a.csv").write_text("1")
    toy.run(project, "dvc", "add", "-q", "data/mine")
    toy.commit(project, "mine")
    return project / "data/mine"


def is_clean(project: Path) -> bool:
    trees = git("worktree", "list").splitlines()
    branches = git("for-each-ref", "--format=%(refname:short)", "refs/heads/runs/").split()
    return len(trees) == 1 and set(branches) <= {DATA_BRANCH}


@pytest.mark.slow(20)
@pytest.mark.fault("S6")
def test_a_new_file_in_a_drop_folder_starts_retrain_once_and_changes_nothing(project, run_watch, drop):
    assert run_watch().name == "Skipped"
    (drop / "b.csv").write_text("2")

    def read_state() -> list[object]:  # everything that a write, a link or a new file would change
        statuses = [(path, path.stat()) for path in [*drop.rglob("*"), project / "data/mine.dvc"]]
        files = [
            (path, status.st_ino, status.st_nlink, status.st_size, status.st_mtime_ns) for path, status in statuses
        ]
        return [files, git("status", "--porcelain"), git("rev-parse", "HEAD")]

    state_before = read_state()
    state = run_watch()
    assert state.is_completed()
    assert run_watch.started == ["data/mine changed"]
    assert state.message == "retrain, because data/mine changed"
    assert git("rev-parse", f"{DATA_BRANCH}^") == git("rev-parse", "HEAD")
    assert git("diff", "--name-only", f"{DATA_BRANCH}^", DATA_BRANCH) == "data/mine.dvc"
    assert read_state() == state_before
    assert is_clean(project)
    assert run_watch().name == "Skipped"
    assert len(run_watch.started) == 1
    with workspace("a-run", "HEAD", [], data=True):
        dvc.link_data()
        assert sorted(path.name for path in Path("data/mine").iterdir()) == ["a.csv", "b.csv"]
        with dvc.repository() as repo:
            assert repo.status(["data/mine.dvc"]) == {}


def test_a_check_without_settled_changes_creates_no_worktree(project, run_watch, drop, monkeypatch):
    def check_skipped(*lines: str, worktree: bool = False) -> None:
        with monkeypatch.context() as patch:
            if not worktree:
                patch.setattr(
                    watch, "workspace", lambda *arguments, **options: pytest.fail("a worktree was created for nothing")
                )
            state = run_watch()
        assert state.name == "Skipped"
        assert state.message == "no source changed"
        assert run_watch.logged == [*lines]
        run_watch.logged.clear()

    (drop / "b.csv").write_text("half")
    run_watch.seconds_later = 1
    check_skipped("data/mine does not exist or is being written to; the next check looks at it again")
    drop.rename(project / "away")
    check_skipped("data/mine does not exist or is being written to; the next check looks at it again")
    (project / "away").rename(drop)
    (drop / "b.csv").unlink()
    run_watch.seconds_later = 61
    check_skipped(worktree=True)
    check_skipped()
    assert not has_branch(DATA_BRANCH)
    assert run_watch.started == []


def test_the_training_gets_the_reason_of_the_latest_data_commit(project, run_watch, monkeypatch):
    git("commit", "--quiet", "--allow-empty", "-m", f"{DATA_MESSAGE_PREFIX}data/mine changed")
    git("branch", DATA_BRANCH)
    monkeypatch.setattr(watch, "update_changed_sources", lambda watch_state, log: [])
    assert run_watch().message == "retrain, because data/mine changed"
    assert run_watch().name == "Skipped"
    assert run_watch.started == ["data/mine changed"]


def test_a_check_that_cannot_update_sources_fails_and_names_them(project, run_watch, monkeypatch):
    failures = [
        Fault("flows.source_not_updated", path=path, fault="it does not exist")
        for path in ("data/mine", "data/theirs.dvc")
    ]
    monkeypatch.setattr(watch, "update_changed_sources", lambda watch_state, log: failures)
    names = ["data/mine", "data/theirs.dvc"]
    with raises(DataError, "flows.sources_not_updated", count=2, names=names, faults=failures):
        run_watch()
    assert run_watch.started == []


@pytest.mark.slow(40)
def test_each_content_starts_retrain_once_whatever_happens_between(project, run_watch, drop):
    (drop / "b.csv").write_text("2")
    run_watch.is_killed = True
    with pytest.raises(RuntimeError):
        run_watch()
    run_watch.is_killed = False
    for count, change in enumerate((lambda: None, lambda: (drop / "a.csv").write_text("x"), (drop / "b.csv").unlink)):
        change()
        run_watch()
        run_watch()
        assert run_watch.started == ["data/mine changed"] * (count + 1)
    assert git("rev-list", "--count", f"HEAD..{DATA_BRANCH}") == "1"
    git("branch", "-D", DATA_BRANCH)
    time.sleep(1)  # a commit in the same second would have the same hash
    run_watch()
    assert len(run_watch.started) == 4, "a branch that somebody removed is created again"
    git("branch", "-D", DATA_BRANCH)
    toy.run(project, "dvc", "add", "-q", "data/mine")
    toy.commit(project, "by hand")
    assert run_watch().name == "Skipped"
    assert not has_branch(DATA_BRANCH)


@pytest.mark.slow(20)
def test_a_file_that_comes_while_others_are_copied_waits_with_them(project, run_watch, drop, monkeypatch):
    copytree = shutil.copytree

    def copy_and_write(source: Path, *target: str) -> None:
        copytree(source, *target)
        (drop / "c.csv").write_text("3")

    (drop / "b.csv").write_text("2")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copytree", copy_and_write)
        assert run_watch().name == "Skipped"
    assert not has_branch(DATA_BRANCH)
    run_watch()
    assert run_watch.started == ["data/mine changed"]


@pytest.mark.slow(30)
def test_an_imported_source_starts_retrain_and_one_that_is_gone_fails_the_look(project, run_watch, drop, imported):
    assert run_watch().name == "Skipped"
    assert not has_branch(DATA_BRANCH)
    (imported / "b.csv").write_text("2")
    run_watch()
    assert run_watch.started == ["data/theirs changed"]
    assert git("diff", "--name-only", "HEAD", DATA_BRANCH) == "data/theirs.dvc"
    assert run_watch().name == "Skipped"
    imported.rename(imported.with_name("elsewhere"))
    (drop / "b.csv").write_text("2")
    with raises(DataError, "flows.sources_not_updated", names=["data/theirs.dvc"]) as failed:
        run_watch()
    (source,) = failed.value.fields["faults"]
    assert source.fields["fault"].fields["command"] == "dvc update data/theirs.dvc"
    assert "does not exist" in source.fields["fault"].fields["output"]
    assert run_watch.started[1:] == ["data/mine changed"]
    assert git("status", "--porcelain") == ""
    assert is_clean(project)
    assert json.loads(STATE_FILE.read_text())["started"] == git("rev-parse", DATA_BRANCH)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine" / "images").mkdir(parents=True)
    for name in ("a.csv", "images/0.png"):
        (tmp_path / "mine" / name).write_text(name)
    return tmp_path / "mine"


def test_content_is_settled_a_minute_after_its_last_change_at_any_file_times(folder, monkeypatch):
    for times in (None, (1, 1), (4e9, 4e9)):  # now, long ago, and in the future
        os.utime(folder / "a.csv", times)
        now = time.time()
        for seconds, is_settled in ((0, False), (59, False), (61, True), (-3600, True)):
            with monkeypatch.context() as patch:
                patch.setattr(watch.time, "time", lambda: now + seconds)  # noqa: B023
                assert bool(compute_fingerprint(folder)) == is_settled
    monkeypatch.setattr(Path, "rglob", lambda self, pattern: [folder / "gone"])
    assert not compute_fingerprint(folder), "a file was removed in the meantime"


def test_any_change_of_its_files_changes_the_fingerprint(folder, monkeypatch):
    monkeypatch.setattr(watch, "SETTLED_S", -1)

    def replace() -> None:  # by a file with the same size and time
        status = (folder / "b.csv").stat()
        (folder / "c").write_text("A.csv")
        os.utime(folder / "c", ns=(status.st_atime_ns, status.st_mtime_ns))
        (folder / "c").rename(folder / "b.csv")

    fingerprints = [compute_fingerprint(folder)]
    rename = partial((folder / "a.csv").rename, folder / "b.csv")
    remove = (folder / "images/0.png").unlink
    for change in (rename, replace, partial((folder / "b.csv").write_text, "other"), remove, (folder / "new").touch):
        assert compute_fingerprint(folder) == fingerprints[-1]
        change()
        fingerprints.append(compute_fingerprint(folder))
    assert len(set(fingerprints)) == len(fingerprints)


def test_drop_folders_are_named_and_tracked_and_imports_have_a_source(project, drop, imported, monkeypatch):
    assert imported_files() == ["data/theirs.dvc"]
    for text, expected_folders in (("", set()), (f" data/mine/ ,{os.pathsep}./data/mine", {"data/mine"})):
        monkeypatch.setenv("M3DIFF_DROP", text)
        assert set(drop_folders()) == expected_folders
    monkeypatch.setenv("M3DIFF_DROP", "data/mine,data/other")
    with raises(ParamsError, "flows.drop_folder_not_tracked", key="M3DIFF_DROP", folder="data/other"):
        drop_folders()


def test_a_check_with_a_wrong_setting_is_refused_in_one_sentence(run_watch, monkeypatch):
    monkeypatch.setenv("M3DIFF_DROP", "data/other")
    monkeypatch.setattr("flows.pipeline.get_run_logger", lambda: SimpleNamespace(error=run_watch.logged.append))
    state = run_watch()
    assert state.is_failed()
    assert state.name.startswith("Refused: ")
    assert Message("flows.drop_folder_not_tracked", key="M3DIFF_DROP", folder="data/other") == state.message
    assert run_watch.started == []
