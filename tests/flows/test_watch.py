"""A look of the watcher: drop folders and imported sources that changed start one training."""

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
from flows.watch import STATE_FILE, drop_folders, fingerprint_of, imported_files
from flows.workspace import (
    DATA_BRANCH,
    workspace,
)
from m3diff.provenance.git import git, has_branch
from m3diff.records.errors import DataError
from m3diff.settings.section import ParamsError
from tests import toy
from tests.errors import Message, raises


class Looks:
    """Looks of the watcher, at a time of our own; what was started, and what it logged."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.started = []
        self.logged = []
        self.fails = False
        self.later = 61.0
        now = time.time
        logger = SimpleNamespace(info=self.logged.append, warning=self.logged.append)
        monkeypatch.setattr(watch, "get_run_logger", lambda: logger)
        monkeypatch.setattr(watch, "start_retrain", self.start)
        monkeypatch.setattr(watch, "require_own_code", lambda: None)  # the toy project has code of its own
        monkeypatch.setattr(watch.time, "time", lambda: now() + self.later)

    def start(self, reason: str, commit: str) -> None:
        assert commit == git("rev-parse", DATA_BRANCH)
        if self.fails:
            raise RuntimeError("killed")
        self.started.append(reason)

    def __call__(self) -> Any:
        return watch.watch.fn()


@pytest.fixture
def imported(project: Path, tmp_path: Path) -> Path:
    """A folder elsewhere that the project imports as data/theirs."""
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "a.csv").write_text("1")
    toy.run(project, "dvc", "import-url", "-q", str(tmp_path / "source"), "data/theirs")
    toy.commit(project, "theirs")
    return tmp_path / "source"


@pytest.fixture
def look(project: Path, monkeypatch: pytest.MonkeyPatch) -> Looks:
    monkeypatch.setenv("M3DIFF_DROP", "")
    return Looks(monkeypatch)


@pytest.fixture
def drop(look: Looks, project: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A drop folder with one file, which DVC tracks, and main says so."""
    monkeypatch.setenv("M3DIFF_DROP", "data/mine")
    (project / "data/mine").mkdir()
    (project / "data/mine/a.csv").write_text("1")
    toy.run(project, "dvc", "add", "-q", "data/mine")
    toy.commit(project, "mine")
    return project / "data/mine"


def nothing_left(project: Path) -> bool:
    trees = git("worktree", "list").splitlines()
    branches = git("for-each-ref", "--format=%(refname:short)", "refs/heads/runs/").split()
    return len(trees) == 1 and set(branches) <= {DATA_BRANCH}


@pytest.mark.slow(20)
@pytest.mark.fault("S6")
def test_a_new_file_in_a_drop_folder_starts_retrain_once_and_changes_nothing(project, look, drop):
    assert look().name == "Skipped"
    (drop / "b.csv").write_text("2")

    def theirs() -> list[object]:  # all that a write, a link or a new file would change
        found = [(path, path.stat()) for path in [*drop.rglob("*"), project / "data/mine.dvc"]]
        files = [(path, one.st_ino, one.st_nlink, one.st_size, one.st_mtime_ns) for path, one in found]
        return [files, git("status", "--porcelain"), git("rev-parse", "HEAD")]

    before = theirs()
    state = look()
    assert state.is_completed()
    assert look.started == ["data/mine changed"]
    assert state.message == "retrain, because data/mine changed"
    assert git("rev-parse", f"{DATA_BRANCH}^") == git("rev-parse", "HEAD")
    assert git("diff", "--name-only", f"{DATA_BRANCH}^", DATA_BRANCH) == "data/mine.dvc"
    assert theirs() == before
    assert nothing_left(project)
    assert look().name == "Skipped"
    assert len(look.started) == 1
    with workspace("a-run", "HEAD", [], data=True):
        dvc.link_data()
        assert sorted(path.name for path in Path("data/mine").iterdir()) == ["a.csv", "b.csv"]
        with dvc.repository() as repo:
            assert repo.status(["data/mine.dvc"]) == {}


def test_where_nothing_changed_or_is_whole_a_look_costs_no_worktree(project, look, drop, monkeypatch):
    def looks(*said: str, worktree: bool = False) -> None:
        with monkeypatch.context() as there:
            if not worktree:
                there.setattr(watch, "workspace", lambda *words, **named: pytest.fail("a worktree for nothing"))
            state = look()
        assert state.name == "Skipped"
        assert state.message == "no source changed"
        assert look.logged == [*said]
        look.logged.clear()

    (drop / "b.csv").write_text("half")
    look.later = 1
    looks("data/mine does not exist or is being written to; the next check looks at it again")
    drop.rename(project / "away")
    looks("data/mine does not exist or is being written to; the next check looks at it again")
    (project / "away").rename(drop)
    (drop / "b.csv").unlink()
    look.later = 61
    looks(worktree=True)
    looks()
    assert not has_branch(DATA_BRANCH)
    assert look.started == []


@pytest.mark.slow(40)
def test_each_content_starts_retrain_once_whatever_happens_between(project, look, drop):
    (drop / "b.csv").write_text("2")
    look.fails = True
    with pytest.raises(RuntimeError):
        look()
    look.fails = False
    for count, change in enumerate((lambda: None, lambda: (drop / "a.csv").write_text("x"), (drop / "b.csv").unlink)):
        change()
        look()
        look()
        assert look.started == ["data/mine changed"] * (count + 1)
    assert git("rev-list", "--count", f"HEAD..{DATA_BRANCH}") == "1"
    git("branch", "-D", DATA_BRANCH)
    time.sleep(1)  # a commit of the same second would be the same
    look()
    assert len(look.started) == 4, "a branch that a person removed is made anew"
    git("branch", "-D", DATA_BRANCH)
    toy.run(project, "dvc", "add", "-q", "data/mine")
    toy.commit(project, "by hand")
    assert look().name == "Skipped"
    assert not has_branch(DATA_BRANCH)


@pytest.mark.slow(20)
def test_a_file_that_comes_while_others_are_copied_waits_with_them(project, look, drop, monkeypatch):
    copied = shutil.copytree

    def busy(source: Path, *to: str) -> None:
        copied(source, *to)
        (drop / "c.csv").write_text("3")

    (drop / "b.csv").write_text("2")
    with monkeypatch.context() as there:
        there.setattr(shutil, "copytree", busy)
        assert look().name == "Skipped"
    assert not has_branch(DATA_BRANCH)
    look()
    assert look.started == ["data/mine changed"]


@pytest.mark.slow(30)
def test_an_imported_source_starts_retrain_and_one_that_is_gone_fails_the_look(project, look, drop, imported):
    assert look().name == "Skipped"
    assert not has_branch(DATA_BRANCH)
    (imported / "b.csv").write_text("2")
    look()
    assert look.started == ["data/theirs changed"]
    assert git("diff", "--name-only", "HEAD", DATA_BRANCH) == "data/theirs.dvc"
    assert look().name == "Skipped"
    imported.rename(imported.with_name("elsewhere"))
    (drop / "b.csv").write_text("2")
    with raises(DataError, "flows.sources_not_updated", names=["data/theirs.dvc"]) as failed:
        look()
    (source,) = failed.value.fields["faults"]
    assert source.fields["fault"].fields["command"] == "dvc update data/theirs.dvc"
    assert "does not exist" in source.fields["fault"].fields["output"]
    assert look.started[1:] == ["data/mine changed"]
    assert git("status", "--porcelain") == ""
    assert nothing_left(project)
    assert json.loads(STATE_FILE.read_text())["started"] == git("rev-parse", DATA_BRANCH)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine" / "images").mkdir(parents=True)
    for name in ("a.csv", "images/0.png"):
        (tmp_path / "mine" / name).write_text(name)
    return tmp_path / "mine"


def test_content_is_settled_a_minute_after_its_last_change_at_any_file_times(folder, monkeypatch):
    for times in (None, (1, 1), (4e9, 4e9)):  # now, a copy with its old time, to come
        os.utime(folder / "a.csv", times)
        now = time.time()
        for later, settled in ((0, False), (59, False), (61, True), (-3600, True)):
            with monkeypatch.context() as there:
                there.setattr(watch.time, "time", lambda: now + later)  # noqa: B023
                assert bool(fingerprint_of(folder)) == settled
    monkeypatch.setattr(Path, "rglob", lambda self, pattern: [folder / "gone"])
    assert not fingerprint_of(folder), "a file went away while it was read"


def test_any_change_of_its_files_changes_the_fingerprint(folder, monkeypatch):
    monkeypatch.setattr(watch, "SETTLED_S", -1)

    def replace() -> None:  # by one of equal size and time
        found = (folder / "b.csv").stat()
        (folder / "c").write_text("A.csv")
        os.utime(folder / "c", ns=(found.st_atime_ns, found.st_mtime_ns))
        (folder / "c").rename(folder / "b.csv")

    seen = [fingerprint_of(folder)]
    rename = partial((folder / "a.csv").rename, folder / "b.csv")
    remove = (folder / "images/0.png").unlink
    for change in (rename, replace, partial((folder / "b.csv").write_text, "other"), remove, (folder / "new").touch):
        assert fingerprint_of(folder) == seen[-1]
        change()
        seen.append(fingerprint_of(folder))
    assert len(set(seen)) == len(seen)


def test_drop_folders_are_named_and_tracked_and_imports_have_a_source(project, drop, imported, monkeypatch):
    assert imported_files() == ["data/theirs.dvc"]
    for text, found in (("", set()), (f" data/mine/ ,{os.pathsep}./data/mine", {"data/mine"})):
        monkeypatch.setenv("M3DIFF_DROP", text)
        assert set(drop_folders()) == found
    monkeypatch.setenv("M3DIFF_DROP", "data/mine,data/other")
    with raises(ParamsError, "flows.drop_folder_not_tracked", key="M3DIFF_DROP", folder="data/other"):
        drop_folders()


def test_a_look_with_a_wrong_setting_is_refused_in_one_sentence(look, monkeypatch):
    monkeypatch.setenv("M3DIFF_DROP", "data/other")
    monkeypatch.setattr("flows.pipeline.get_run_logger", lambda: SimpleNamespace(error=look.logged.append))
    state = look()
    assert state.is_failed()
    assert state.name.startswith("Refused: ")
    assert Message("flows.drop_folder_not_tracked", key="M3DIFF_DROP", folder="data/other") == state.message
    assert look.started == []
