"""A look: what changed is on the branch runs/data, retrain is started once for it, and nobody's files are touched."""

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flows import dvc, sources, watch
from flows.watch import STATE
from flows.workspace import DATA, workspace
from m3diff.provenance.git import git, has_branch
from m3diff.records.errors import DataError
from m3diff.settings.section import ParamsError
from tests import toy
from tests.flows.test_sources import dropped, imported  # noqa: F401


class Looks:
    """Looks of the watcher, at a time of our own; what was started, and what it logged."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.started: list[str] = []
        self.logged: list[str] = []
        self.fails = False
        self.later = 61.0
        now = time.time
        logger = SimpleNamespace(info=self.logged.append, warning=self.logged.append)
        monkeypatch.setattr(watch, "get_run_logger", lambda: logger)
        monkeypatch.setattr(watch, "start", self.start)
        monkeypatch.setattr(watch, "require_own_code", lambda: None)  # the toy project has code of its own
        monkeypatch.setattr(sources.time, "time", lambda: now() + self.later)

    def start(self, reason: str, commit: str) -> None:
        assert commit == git("rev-parse", DATA)
        if self.fails:
            raise RuntimeError("killed")
        self.started.append(reason)

    def __call__(self) -> Any:
        return watch.watch.fn()


@pytest.fixture
def look(project: Path, monkeypatch: pytest.MonkeyPatch) -> Looks:
    monkeypatch.setenv("M3DIFF_DROP", "")
    return Looks(monkeypatch)


@pytest.fixture
def drop(look, dropped, monkeypatch) -> Path:  # noqa: F811
    monkeypatch.setenv("M3DIFF_DROP", "data/mine")
    return dropped


def md5(commit: str, file: str) -> str:
    return next(line.split()[-1] for line in git("show", f"{commit}:{file}").splitlines() if "md5:" in line)


def nothing_left(project: Path) -> bool:
    trees = git("worktree", "list").splitlines()
    branches = git("for-each-ref", "--format=%(refname:short)", "refs/heads/runs/").split()
    return len(trees) == 1 and set(branches) <= {DATA}


def test_with_no_source_a_look_is_over_at_once(look, monkeypatch):
    monkeypatch.setattr(watch, "workspace", lambda *words, **named: pytest.fail("a worktree for nothing"))
    state = look()
    assert (state.name, state.message) == ("Skipped", "no source changed")
    assert not has_branch(DATA)


@pytest.mark.slow(20)
@pytest.mark.fault("S6")
def test_a_new_file_in_a_drop_folder_starts_retrain_once_with_a_reason_and_touches_nothing(project, look, drop):
    assert look().name == "Skipped"
    before = (git("status", "--porcelain"), git("rev-parse", "HEAD"), (project / "data/mine.dvc").read_text())
    (drop / "b.csv").write_text("2")
    state = look()
    assert state.is_completed()
    assert look.started == ["data/mine: 1 new (b.csv)"]
    assert state.message == "retrain, because data/mine: 1 new (b.csv)"
    assert git("rev-parse", f"{DATA}^") == git("rev-parse", "HEAD")
    assert git("diff", "--name-only", f"{DATA}^", DATA) == "data/mine.dvc"
    assert (git("status", "--porcelain"), git("rev-parse", "HEAD"), (project / "data/mine.dvc").read_text()) == before
    assert nothing_left(project)
    assert look().name == "Skipped"
    assert len(look.started) == 1
    with workspace("a-run", "HEAD", [], dirty=False, data=True):
        dvc.link_data()
        assert sorted(path.name for path in Path("data/mine").iterdir()) == ["a.csv", "b.csv"]
        assert dvc.ask("status", "--json", "data/mine.dvc").strip() == "{}"


def test_a_folder_that_did_not_change_costs_no_worktree(look, drop, monkeypatch):
    look()
    monkeypatch.setattr(watch, "workspace", lambda *words, **named: pytest.fail("a worktree for nothing"))
    assert look().name == "Skipped"


@pytest.mark.slow(20)
def test_a_change_a_removal_and_a_second_drop_follow_on_each_other(look, drop):
    (drop / "b.csv").write_text("2")
    look()
    (drop / "a.csv").write_text("other")
    look()
    (drop / "b.csv").unlink()
    look()
    assert look.started == [
        "data/mine: 1 new (b.csv)",
        "data/mine: 1 changed (a.csv)",
        "data/mine: 1 removed (b.csv)",
    ]
    assert git("rev-list", "--count", f"HEAD..{DATA}") == "1"


def test_a_file_that_is_still_written_waits_for_the_next_look(look, drop):
    (drop / "b.csv").write_text("half")
    look.later = 1
    assert look().name == "Skipped"
    assert look.started == []
    assert "data/mine is being written to; the next look takes it up" in look.logged
    look.later = 61
    look()
    assert look.started == ["data/mine: 1 new (b.csv)"]


@pytest.mark.slow(20)
def test_a_file_that_comes_while_others_are_copied_waits_with_them(project, look, drop, monkeypatch):
    copied = sources.take_up

    def busy(folder: str, checkout: Path) -> str:
        reason = copied(folder, checkout)
        (drop / "c.csv").write_text("3")
        return reason

    (drop / "b.csv").write_text("2")
    monkeypatch.setattr(sources, "take_up", busy)
    assert look().name == "Skipped"
    assert not has_branch(DATA)
    monkeypatch.setattr(sources, "take_up", copied)
    look()
    assert look.started == ["data/mine: 2 new (b.csv, c.csv)"]


def test_a_folder_that_is_not_there_was_not_emptied(project, look, drop):
    drop.rename(project / "away")
    assert look().name == "Skipped"
    assert "data/mine is not there, and is not looked at; `dvc checkout data/mine.dvc` brings it" in look.logged


@pytest.mark.slow(20)
def test_one_that_was_killed_before_it_started_retrain_does_so_at_the_next_look(look, drop):
    (drop / "b.csv").write_text("2")
    look.fails = True
    with pytest.raises(RuntimeError):
        look()
    look.fails = False
    look()
    look()
    assert look.started == ["data/mine: 1 new (b.csv)"]


@pytest.mark.slow(20)
def test_a_branch_that_a_person_removed_is_made_anew(look, drop):
    (drop / "b.csv").write_text("2")
    look()
    git("branch", "-D", DATA)
    look()
    assert look.started == ["data/mine: 1 new (b.csv)"] * 2


@pytest.mark.slow(20)
def test_a_person_who_adds_the_same_by_hand_starts_nothing(project, look, drop):
    (drop / "b.csv").write_text("2")
    toy.run(project, "dvc", "add", "-q", "data/mine")
    toy.commit(project, "by hand")
    assert look().name == "Skipped"
    assert not has_branch(DATA)


@pytest.mark.slow(20)
def test_an_imported_source_that_changed_starts_retrain(project, look, imported):  # noqa: F811
    assert look().name == "Skipped"
    assert not has_branch(DATA)
    (imported / "b.csv").write_text("2")
    look()
    assert look.started == [f"data/theirs: its source {imported} changed"]
    assert md5(DATA, "data/theirs.dvc") != md5("HEAD", "data/theirs.dvc")
    assert look().name == "Skipped"
    assert len(look.started) == 1
    assert git("status", "--porcelain") == ""
    assert nothing_left(project)


@pytest.mark.slow(20)
def test_a_source_that_is_gone_fails_the_look_after_the_others_had_theirs(project, look, drop, imported):  # noqa: F811
    imported.rename(imported.with_name("elsewhere"))
    (drop / "b.csv").write_text("2")
    with pytest.raises(DataError, match=r"(?s)data/theirs.dvc: dvc update.*does not exist"):
        look()
    assert look.started == ["data/mine: 1 new (b.csv)"]
    assert nothing_left(project)
    assert json.loads(STATE.read_text())["started"] == git("rev-parse", DATA)


def test_a_folder_that_is_not_tracked_is_refused_in_words(look, monkeypatch):
    monkeypatch.setenv("M3DIFF_DROP", "data/other")
    with pytest.raises(ParamsError, match="M3DIFF_DROP: data/other is tracked by no .dvc file"):
        look()


def test_where_a_server_runs_the_deployment_it_is_asked_for_retrain_and_else_this_process_does_it(monkeypatch):
    asked: list[Any] = []
    monkeypatch.setattr(watch, "retrain", lambda **named: asked.append(named))
    monkeypatch.setattr(watch, "run_deployment", lambda name, **named: asked.append((name, named)))
    watch.start("new data", "abc")
    assert asked == [{"reason": "new data", "return_state": True}]
    monkeypatch.setattr(watch, "deployed_run", lambda: "a run")
    watch.start("new data", "abc")
    name, named = asked[1]
    assert name == "m3diff/retrain"
    assert (named["parameters"], named["timeout"], named["as_subflow"]) == ({"reason": "new data"}, 0, False)
    assert "abc" in named["idempotency_key"]
