"""Where data come from: what a drop folder's content is, how it gets into a worktree, and what DVC asks a source."""

import os
import time
from pathlib import Path

import pytest

from flows import dvc, sources
from flows.sources import bring, content, drop_folders, imports, take_up, update
from m3diff.provenance.git import git
from m3diff.settings.section import ParamsError
from tests import toy


def aged(folder: Path, monkeypatch: pytest.MonkeyPatch, seconds: float = 61) -> None:
    """Let it be later by so much than it is: when a file changed cannot be set."""
    later = time.time() + seconds
    monkeypatch.setattr(sources.time, "time", lambda: later)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine" / "images").mkdir(parents=True)
    for name in ("a.csv", "images/0.png"):
        (tmp_path / "mine" / name).write_text(name)
    return tmp_path / "mine"


def test_the_content_is_settled_once_nothing_changed_for_a_minute(folder, monkeypatch):
    assert not content(folder).settled
    aged(folder, monkeypatch, 59)
    assert not content(folder).settled
    aged(folder, monkeypatch, 61)
    assert content(folder).settled


def test_a_copy_that_keeps_the_time_of_its_original_is_new_all_the_same(folder, monkeypatch):
    os.utime(folder / "a.csv", (1, 1))
    assert not content(folder).settled


def test_a_time_to_come_does_not_keep_a_folder_from_being_looked_at(folder, monkeypatch):
    os.utime(folder / "a.csv", (4e9, 4e9))
    aged(folder, monkeypatch)
    assert content(folder).settled


@pytest.mark.parametrize("change", ["new", "changed", "removed", "replaced", "renamed"])
def test_any_change_of_its_files_changes_the_fingerprint(folder, change):
    before = content(folder).fingerprint
    assert content(folder).fingerprint == before
    if change == "new":
        (folder / "b.csv").write_text("")
    if change == "changed":
        (folder / "a.csv").write_text("other")
    if change == "removed":
        (folder / "images/0.png").unlink()
    if change == "replaced":
        found = (folder / "a.csv").stat()
        (folder / "b").write_text("A.csv")
        os.utime(folder / "b", ns=(found.st_atime_ns, found.st_mtime_ns))
        (folder / "b").rename(folder / "a.csv")
    if change == "renamed":
        (folder / "a.csv").rename(folder / "b.csv")
    assert content(folder).fingerprint != before


def test_a_folder_whose_files_go_away_while_it_is_read_is_not_settled(folder, monkeypatch):
    aged(folder, monkeypatch)
    monkeypatch.setattr(Path, "rglob", lambda self, pattern: [folder / "gone"])
    assert not content(folder).settled


def test_files_are_copied_where_they_differ_and_no_link_is_written_to(folder, tmp_path):
    cache, target = tmp_path / "cache", tmp_path / "worktree"
    (target / "images").mkdir(parents=True)
    cache.write_text("a.csw")  # of equal length
    (target / "a.csv").hardlink_to(cache)
    (target / "images/0.png").write_text("images/0.png")
    (target / "old.csv").write_text("old")
    (folder / "b.csv").write_text("b")
    kept = (target / "images/0.png").stat().st_ino
    assert bring(folder, target) == {"new": ["b.csv"], "changed": ["a.csv"], "removed": ["old.csv"]}
    assert sorted(sources.files(target)) == ["a.csv", "b.csv", "images/0.png"]
    assert (target / "a.csv").read_text() == "a.csv"
    assert cache.read_text() == "a.csw"
    assert (target / "images/0.png").stat().st_ino == kept
    assert bring(folder, target) == {"new": [], "changed": [], "removed": []}


def test_a_file_may_become_a_folder_and_a_folder_a_file(folder, tmp_path):
    target = tmp_path / "worktree"
    (target / "a.csv").mkdir(parents=True)
    (target / "a.csv" / "x").write_text("x")
    (target / "images").write_text("a file")
    bring(folder, target)
    assert sorted(sources.files(target)) == ["a.csv", "images/0.png"]


# In a project


@pytest.fixture
def dropped(project: Path) -> Path:
    """A folder of the project that DVC tracks, and main says so."""
    (project / "data/mine").mkdir()
    (project / "data/mine/a.csv").write_text("1")
    toy.run(project, "dvc", "add", "-q", "data/mine")
    toy.commit(project, "mine")
    return project / "data/mine"


@pytest.fixture
def imported(project: Path, tmp_path: Path) -> Path:
    """A folder elsewhere that the project imports as data/theirs."""
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "a.csv").write_text("1")
    toy.run(project, "dvc", "import-url", "-q", str(tmp_path / "source"), "data/theirs")
    toy.commit(project, "theirs")
    return tmp_path / "source"


def test_drop_folders_are_those_named_and_tracked(project, dropped, monkeypatch):
    assert drop_folders() == []
    for text in ("data/mine", " data/mine/ ,", f"data/mine{os.pathsep}./data/mine"):
        monkeypatch.setenv("M3DIFF_DROP", text)
        assert set(drop_folders()) == {"data/mine"}
    monkeypatch.setenv("M3DIFF_DROP", "data/mine,data/other")
    with pytest.raises(ParamsError, match=r"M3DIFF_DROP: data/other is tracked by no .dvc file.*`dvc add data/other`"):
        drop_folders()


def test_imports_are_the_data_with_a_source(project, dropped, imported):
    assert imports() == ["data/theirs.dvc"]


@pytest.mark.slow(15)
def test_what_is_in_a_drop_folder_is_added_and_said(project, dropped, tmp_path):
    theirs = tmp_path / "checkout"
    (theirs / "data/mine").mkdir(parents=True)
    for number in range(7):
        (theirs / f"data/mine/{number}.csv").write_text(str(number))
    reason = take_up("data/mine", theirs)
    assert reason == "data/mine: 7 new, 1 removed (0.csv, 1.csv, 2.csv, 3.csv, 4.csv, ...)"
    assert git("status", "--porcelain", "--", "data") == " M data/mine.dvc"
    take_up("data/mine", theirs)
    (theirs / "data/mine/0.csv").write_text("9")
    assert take_up("data/mine", theirs) == "data/mine: 1 changed (0.csv)"


def test_a_source_that_is_as_it_was_leaves_its_file_and_one_that_changed_or_went_is_seen(project, imported):
    reason = update("data/theirs.dvc")
    assert reason == f"data/theirs: its source {imported} changed"
    assert git("status", "--porcelain", "--", "data") == ""
    (imported / "b.csv").write_text("2")
    update("data/theirs.dvc")
    assert git("status", "--porcelain", "--", "data") == " M data/theirs.dvc"
    imported.rename(imported.with_name("elsewhere"))
    with pytest.raises(dvc.DvcError, match="does not exist"):
        update("data/theirs.dvc")
