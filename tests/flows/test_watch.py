"""The flow watch: changed drop folders and imported sources start one training."""

import json
import os
import shutil
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flows import alerts, dvc, watch
from flows.watch import (
    DATA_MESSAGE_PREFIX,
    STATE_FILE,
    commit_data,
    compute_fingerprint,
    drop_folders,
    imported_files,
    update_changed_sources,
    update_sources,
)
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
        self.actions = []
        self.seconds_later = 61.0
        now = time.time
        self.log = self.logged.append
        logger = SimpleNamespace(info=self.log, warning=self.log)
        monkeypatch.setattr(watch, "get_run_logger", lambda: logger)
        monkeypatch.setattr(watch, "start_retrain", self.start)
        monkeypatch.setattr(watch, "prepare", lambda: self.actions.append("prepare"))
        monkeypatch.setattr(alerts, "send_alert", lambda *arguments: self.actions.append(arguments))
        monkeypatch.setattr(watch, "require_own_code", lambda: None)  # the toy project has its own code
        monkeypatch.setattr(watch.time, "time", lambda: now() + self.seconds_later)

    def start(self, reason: str, commit: str) -> None:
        assert commit == git("rev-parse", DATA_BRANCH)
        if self.is_killed:
            raise RuntimeError("killed")
        self.started.append(reason)

    def __call__(self) -> Any:
        self.actions.clear()
        state = watch.watch.fn()
        assert self.actions[0] == "prepare"
        return state


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


def test_only_a_check_with_settled_changes_creates_a_worktree(project, run_watch, drop, monkeypatch):
    created_worktrees: list[Any] = []

    def create_worktree(*arguments: Any, **options: Any) -> Any:
        created_worktrees.append(arguments)
        return workspace(*arguments, **options)

    monkeypatch.setattr(watch, "workspace", create_worktree)

    def check_skipped(*lines: str, worktree: bool = False) -> None:
        created_worktrees.clear()
        state = run_watch()
        assert len(created_worktrees) == worktree
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
    assert run_watch.actions == ["prepare", (run_watch.log,)], "alerts that are waiting are sent"
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


def test_one_source_that_cannot_be_updated_does_not_hinder_the_others(small_repository, tmp_path, monkeypatch):
    monkeypatch.setattr(watch, "SETTLED_S", -1)
    small_repository.track("mine", "an earlier file")
    small_repository.track("busy", "an earlier file")
    commit = small_repository.commit()
    for folder in ("mine", "busy"):
        (tmp_path / "checkout" / folder).mkdir(parents=True)
        (tmp_path / "checkout" / folder / "a.csv").write_text(folder)
    sources = {"gone.dvc": "", "busy.dvc": "a fingerprint before the update"}
    sources["mine.dvc"] = compute_fingerprint(tmp_path / "checkout/mine")
    log_lines: list[str] = []
    work = SimpleNamespace(checkout=tmp_path / "checkout", commit=commit)
    (failure,), updated_sources = update_sources(work, sources, log_lines.append)
    assert failure.code == "flows.source_not_updated"
    assert failure.fields["path"] == "gone.dvc"
    assert failure.fields["fault"].fields["command"] == "dvc update gone.dvc"
    assert updated_sources == {"mine.dvc": sources["mine.dvc"]}
    assert log_lines == ["busy changed during the update; the next check updates it"]
    assert git("rev-parse", f"{DATA_BRANCH}^") == commit
    assert git("diff", "--name-only", commit, DATA_BRANCH) == "mine.dvc"
    assert git("log", "-1", "--format=%s", DATA_BRANCH) == f"{DATA_MESSAGE_PREFIX}mine changed"


def test_the_branch_of_data_has_only_the_newest_data_on_top_of_the_checked_commit(small_repository):
    small_repository.track("mine", "an earlier file")
    commit = small_repository.commit()
    for content in ("a new file", "a newer file"):
        newest_md5 = small_repository.track("mine", content)
        commit_data(SimpleNamespace(commit=commit), ["mine.dvc"])
    assert git("rev-list", f"{commit}..{DATA_BRANCH}").split() == [git("rev-parse", DATA_BRANCH)]
    assert newest_md5 in git("show", f"{DATA_BRANCH}:mine.dvc")


@pytest.fixture
def one_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Replace git and the worktree of a check of one import and one drop folder, and record their use."""
    recorded = SimpleNamespace(flow_runs=[], removed_branches=[])

    def create_worktree(flow_run: Any, *arguments: Any, data: bool) -> Any:
        recorded.flow_runs.append(flow_run)
        return nullcontext(SimpleNamespace(branch="runs/one"))

    monkeypatch.chdir(tmp_path)
    STATE_FILE.parent.mkdir(parents=True)
    monkeypatch.setattr(watch, "imported_files", lambda: ["theirs.dvc"])
    monkeypatch.setattr(watch, "drop_folders", lambda: ["mine"])
    monkeypatch.setattr(watch, "compute_fingerprint", lambda folder: "new")
    monkeypatch.setattr(watch, "find_data_commit", lambda: "a commit")
    monkeypatch.setattr(watch, "workspace", create_worktree)
    monkeypatch.setattr(watch, "git", lambda *arguments: recorded.removed_branches.append(arguments[-1]))
    monkeypatch.setattr(watch, "update_sources", lambda work, sources, log: ([], {}))
    return recorded


def test_a_check_works_in_the_worktree_of_its_flow_run_or_else_in_a_new_one(one_check, monkeypatch):
    for id_ in ("an id", None, None):
        monkeypatch.setattr(watch, "flow_run", SimpleNamespace(get_id=lambda id_=id_: id_))
        update_changed_sources({}, pytest.fail)
    own_name, new_name, other_new_name = one_check.flow_runs
    assert own_name == "an id"
    assert new_name != other_new_name


@pytest.mark.parametrize(
    ("watch_state", "updated_sources"),
    [
        ({}, {"theirs.dvc", "mine.dvc"}),
        ({"folders": {"mine.dvc": "old"}, "data": "a commit"}, {"theirs.dvc", "mine.dvc"}),
        ({"folders": {"mine.dvc": "new"}, "data": "a commit"}, {"theirs.dvc"}),
        ({"folders": {"mine.dvc": "new"}, "data": "another commit"}, {"theirs.dvc", "mine.dvc"}),
    ],
    ids=["first check", "changed folder", "same folder", "runs/data was changed by somebody"],
)
def test_imports_and_changed_folders_are_updated_and_remembered(watch_state, updated_sources, one_check, monkeypatch):
    def update(work: str, sources: dict[str, str], log: Any) -> tuple[list[str], dict[str, str]]:
        assert sources.keys() == updated_sources
        return ["a failure"], {name: fingerprint for name, fingerprint in sources.items() if name == "mine.dvc"}

    monkeypatch.setattr(watch, "update_sources", update)
    assert update_changed_sources(watch_state | {"started": "before"}, pytest.fail) == ["a failure"]
    expected_state = {"started": "before", "folders": {"mine.dvc": "new"}, "data": "a commit"}
    assert json.loads(STATE_FILE.read_text()) == expected_state
    assert one_check.removed_branches == ["runs/one"]


def test_retrain_is_started_by_its_deployment_once_for_the_same_data(monkeypatch):
    started: list[Any] = []
    monkeypatch.setattr(watch, "run_deployment", lambda name, **options: started.append((name, options)))
    monkeypatch.setattr(watch, "retrain", lambda **options: started.append(("in this process", options)))
    monkeypatch.setattr(watch, "deployment", SimpleNamespace(get_id=lambda: "an id"))
    for commit in ("one", "one", "two"):
        watch.start_retrain("new data", commit)
    names = [name for name, _ in started]
    assert names == ["m3diff/retrain"] * 3
    options, options_for_same_data, options_for_other_data = (options for _, options in started)
    assert options == options_for_same_data
    assert options["idempotency_key"] != options_for_other_data["idempotency_key"]
    assert options["parameters"] == {"reason": "new data"}
    assert options["timeout"] == 0, "watch does not wait for the training"
    assert not options["as_subflow"], "the training does not end with watch"
    monkeypatch.setattr(watch, "deployment", SimpleNamespace(get_id=lambda: None))
    watch.start_retrain("new data", "one")
    assert started[3:] == [("in this process", {"reason": "new data", "return_state": True})]


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
    for text, expected_folders in (("", set()), (f" data/mine/ , ,{os.pathsep}./data/mine", {"data/mine"})):
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


def test_a_check_whose_update_fails_is_a_failure_because_its_worktree_stays(run_watch, monkeypatch):
    def fail(*_: Any) -> None:
        raise DataError("git.not_installed")

    monkeypatch.setattr(watch, "update_changed_sources", fail)
    with raises(DataError, "git.not_installed"):
        run_watch()


def test_a_check_with_the_code_of_another_checkout_is_refused_like_a_run(run_watch, monkeypatch):
    error = DataError("dvc.code_of_other_checkout", code=Path("/a"), folder=Path("/b"))

    def refuse() -> None:
        raise error

    monkeypatch.setattr(watch, "require_own_code", refuse)
    monkeypatch.setattr("flows.pipeline.get_run_logger", lambda: SimpleNamespace(error=run_watch.logged.append))
    state = run_watch()
    assert state.name == f"Refused: {error.fault.problem}"
    assert run_watch.logged == [str(error)]
    assert run_watch.started == []
