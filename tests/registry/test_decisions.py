"""The record of decisions, which only grows, whoever writes and whatever is killed."""

import calendar
import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from m3diff.__main__ import main
from m3diff.provenance.git import GitError, find_commit, process_lock, user_and_host
from m3diff.records.errors import DataError, Fault
from m3diff.registry import decisions as record
from m3diff.registry.decisions import (
    Entry,
    OvertakenError,
    append,
    clear_pending_move,
    fetch_record,
    numbering_faults,
    pending_move,
    push_record,
    read_decisions,
)
from tests.errors import raises

EMPTY_TREE = "4b825dc642cb6eb9a060e54bf8d69288fbee4904"  # git's hash of a tree without files


def git(root: Path, *arguments: str, stdin: bytes = b"") -> str:
    """Run git as a person with signing and hooks of their own; return its output."""
    config = ("-c", "user.name=a person", "-c", "user.email=person@example.org", "-c", "commit.gpgsign=false")
    command = ["git", "-C", str(root), *config, *arguments]
    return subprocess.run(command, input=stdin, capture_output=True, check=True).stdout.decode().strip()


@pytest.fixture(scope="module")
def here_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with a commit and an uncommitted edit."""
    root = tmp_path_factory.mktemp("clone")
    git(root, "init", "-q", "-b", "main")
    (root / "code.py").write_text("1")
    git(root, "add", ".")
    git(root, "commit", "-q", "-m", "code")
    (root / "code.py").write_text("2")
    return root


@pytest.fixture
def here(here_once: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the repository, current directory."""
    root = Path(shutil.copytree(here_once, tmp_path / "clone"))
    monkeypatch.chdir(root)
    return root


def promotion(target: int | None, champion_before: int | None = None, **changes: Any) -> Entry:
    """A promotion of the model `m` to a version; `changes` replace its fields."""
    fields: dict[str, Any] = {
        "action": "promote",
        "model": "m",
        "champion_before": champion_before,
        "target": target,
        "outcome": "promoted",
        "reason": "better",
    }
    return Entry(**fields | changes)


def rollback(target: int, champion_before: int | None) -> Entry:
    """A rollback of the model `m` to a version."""
    return promotion(target, champion_before, action="rollback", outcome="rolled back", reason="")


# The commit of a decision


def test_the_message_of_a_decision_s_commit_is_its_json(here, monkeypatch):
    monkeypatch.setenv("M3DIFF_FLOW_RUN", "f-1")
    decision = append(Path("."), promotion(2, 1, previous=1, gate={"gain": 0.5}))
    assert json.loads(git(here, "log", "-1", "--format=%B", record.BRANCH)) == {
        "number": 1,
        "at": decision.decided_at,
        "who": user_and_host(),
        "action": "promote",
        "model": "m",
        "from": 1,
        "to": 2,
        "outcome": "promoted",
        "why": "better",
        "previous": 1,
        "of": None,
        "gate": {"gain": 0.5},
        "registry": None,
        "versions": {},
        "flow_run": "f-1",
        "commit": git(here, "rev-parse", "HEAD"),
    }


def test_a_decision_is_read_as_it_was_written(here):
    decision = append(Path("."), promotion(2, 1, previous=1, gate={"gain": 0.5}))
    assert read_decisions() == [decision]


def test_a_decision_has_the_time_in_utc_and_its_author_with_the_host(here):
    decision = append(Path("."), promotion(1))
    decided_at = calendar.timegm(time.strptime(decision.decided_at, "%Y-%m-%dT%H:%M:%SZ"))
    assert abs(time.time() - decided_at) < 60
    assert "@" in decision.author


def test_a_decision_adds_no_file_to_its_branch(here):
    append(Path("."), promotion(1))
    assert git(here, "ls-tree", "-r", record.BRANCH) == "", "nothing else of git reads it"


def test_writing_changes_no_file_index_or_head_and_runs_no_hook(here):
    hook = here / ".git" / "hooks" / "reference-transaction"
    hook.write_text(f"#!/bin/sh\ntouch {here}/hook-ran\n")
    hook.chmod(0o755)
    (here / "staged.py").write_text("3")
    git(here, "add", "staged.py")
    (here / "hook-ran").unlink(missing_ok=True)

    def state() -> tuple[str, str, bytes]:
        return git(here, "status", "--porcelain"), git(here, "rev-parse", "HEAD"), (here / ".git/index").read_bytes()

    before = state()
    append(here, promotion(1), pending=True)
    clear_pending_move(Path("."))
    assert state() == before


def test_a_decision_is_by_m3diff_and_not_signed_even_if_the_person_signs(here):
    git(here, "config", "commit.gpgsign", "true")
    append(here, promotion(1))
    assert git(here, "log", "--format=%an <%ae> %cn", record.BRANCH_NAME) == "m3diff <m3diff@localhost> m3diff"


def test_the_record_of_a_worktree_is_that_of_the_repository(here, tmp_path):
    git(here, "worktree", "add", "-q", "--detach", str(tmp_path / "tree"))
    append(tmp_path / "tree", promotion(1))
    assert [decision.target for decision in read_decisions(here)] == [1]


def test_an_empty_record_is_sound(here, capsys):
    assert main(["history", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []


def test_a_commit_that_is_nowhere_is_refused_with_a_remedy(here):
    with raises(DataError, "git.commit_not_in_clone", value="0" * 40):
        find_commit("0" * 40)


@pytest.mark.parametrize(
    "use_git",
    [lambda: append(Path("."), promotion(1)), lambda: process_lock("x").__enter__()],
    ids=["append", "lock"],
)
def test_without_a_repository_the_error_says_how_to_make_one(use_git, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    with raises(GitError, "git.no_repository", path=tmp_path):
        use_git()


# A record that somebody edited, or that is damaged


@pytest.mark.fault("S2")
@pytest.mark.parametrize(
    ("positions", "misnumbered"),
    [([0, 2], 2), ([0, 1, 2, 2], 4)],
    ids=["taken out", "put in"],
)
def test_decisions_taken_out_or_put_in_are_named_and_history_exits_with_three(here, positions, misnumbered, capsys):
    for version in (1, 2, 3):
        append(Path("."), promotion(version, version - 1 or None))
    assert numbering_faults() == []
    assert main(["history"]) == 0
    commits = git(here, "rev-list", "--reverse", record.BRANCH).split()
    parent: tuple[str, ...] = ()
    for position in positions:  # as a person edits the branch
        message = git(here, "log", "-1", "--format=%B", commits[position]).encode()
        parent = ("-p", git(here, "commit-tree", EMPTY_TREE, *parent, stdin=message))
    git(here, "update-ref", record.BRANCH, parent[1])
    fault = Fault("registry.decision_misnumbered", position=misnumbered, value=3)
    assert numbering_faults() == [fault]
    capsys.readouterr()
    assert main(["history"]) == 3
    printed = capsys.readouterr()
    assert f"m3diff history: {fault}" in printed.err
    assert " ".join(printed.out.splitlines()[-2].split()).endswith(f"{user_and_host()} m 2 -> 3 promoted -")
    assert printed.out.splitlines()[-1].strip() == "better"


def remove_object(root: Path, revision: str) -> None:
    name = git(root, "rev-parse", revision)
    (root / ".git/objects" / name[:2] / name[2:]).unlink()


def add_note(root: Path) -> None:
    note = git(root, "commit-tree", EMPTY_TREE, "-p", record.BRANCH, "-m", "a note")
    git(root, "update-ref", record.BRANCH, note)


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "the last commit is gone": (lambda root: remove_object(root, record.BRANCH), "registry.damaged_record"),
    "its parent is gone": (lambda root: remove_object(root, f"{record.BRANCH}^"), "registry.damaged_record"),
    "a commit is no decision": (add_note, "registry.no_decision"),
}


@pytest.mark.parametrize(("damage", "code"), DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_record_is_an_error_and_not_an_empty_record(damage, code, here):
    """If it were read as empty, the next decision would start it anew, and the decisions in it would be lost."""
    append(here, promotion(1))
    append(here, promotion(2, 1))
    damage(here)
    with raises(DataError, code, branch="runs/history"):
        read_decisions()
    with raises(DataError, code, branch="runs/history"):
        append(here, promotion(3, 2))
    assert main(["history"]) == 3


# The champions of a model

NOTICED = {"action": "noticed", "outcome": "moved elsewhere"}
REFUSED = {"outcome": "refused"}
OTHER = {"model": "other"}
ABANDONED = {"outcome": "not done", "abandoned_move": 2}
TWO_PROMOTIONS = (promotion(1), promotion(2, 1))
THREE_PROMOTIONS = (*TWO_PROMOTIONS, promotion(3, 2))

# Entries, the champions that follow from them, and the versions that are rolled back
HISTORIES: dict[str, tuple[tuple[Entry, ...], list[int], list[int]]] = {
    "one after the other": (
        (*THREE_PROMOTIONS, promotion(9, 3, **REFUSED), promotion(5, 4, **OTHER)),
        [1, 2, 3],
        [],
    ),
    "rolled back": ((*THREE_PROMOTIONS, rollback(2, 3)), [1, 2], [3]),
    "rolled back over another": (
        (*THREE_PROMOTIONS, rollback(2, 3), promotion(4, 2), rollback(1, 4)),
        [1],
        [2, 3, 4],
    ),
    "champion again": (
        (*TWO_PROMOTIONS, rollback(1, 2), promotion(3, 1), rollback(1, 3), promotion(2, 1)),
        [1, 2],
        [3],
    ),
    "a second time without rollback": ((*TWO_PROMOTIONS, promotion(1, 2)), [2, 1], []),
    "a champion from before the record": ((rollback(2, 3),), [2], [3]),
    "moved by hand to a lower number": ((*TWO_PROMOTIONS, promotion(1, 2, **NOTICED)), [1], [2]),
    "moved by hand to a higher number": ((promotion(1), promotion(7, 1, **NOTICED)), [1, 7], []),
    "the alias gone": ((promotion(1), promotion(None, 1, **NOTICED), promotion(8)), [1, 8], []),
    "the alias gone, and another accepted": (
        (promotion(1), promotion(None, 1, **NOTICED), rollback(7, None)),
        [1, 7],
        [],
    ),
    "not done": ((*TWO_PROMOTIONS, promotion(2, 1, **ABANDONED)), [1], []),
}


@pytest.mark.parametrize(("entries", "champions", "rolled_back"), HISTORIES.values(), ids=HISTORIES)
def test_champions_follow_each_other_and_a_rollback_takes_back_later_ones(entries, champions, rolled_back):
    facts: dict[str, Any] = {"decided_at": "", "author": "", "flow_run": None, "commit": None}
    decisions = [
        record.Decision(**dict(entry), number=number, **facts) for number, entry in enumerate(entries, start=1)
    ]
    history = record.follow_champions(decisions, "m")
    assert history.champions == champions
    assert sorted(history.rolled_back) == rolled_back
    assert record.moves_of(decisions, "m")[-1].target == champions[-1]


# Many writers, killed writers


def test_writers_at_once_lose_no_decision(here):
    def write(model: str) -> None:
        for version in range(1, 6):
            with process_lock("record"):
                append(here, promotion(version, model=model))

    threads = [threading.Thread(target=write, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert numbering_faults() == []
    assert len(read_decisions()) == 15
    for model in "abc":
        targets = [decision.target for decision in read_decisions() if decision.model == model]
        assert targets == [1, 2, 3, 4, 5]


def test_a_writer_that_another_one_overtook_is_asked_to_try_again(here, monkeypatch):
    for version in (1, 2):
        append(here, promotion(version))
    older_tip = git(here, "rev-parse", f"{record.BRANCH}^")
    with monkeypatch.context() as overtaken:
        overtaken.setattr(record, "_tip", lambda repository: older_tip)
        with raises(OvertakenError, "registry.record_changed", branch="runs/history"):
            append(here, promotion(3))
    assert len(read_decisions()) == 2


def test_a_move_is_pending_until_it_is_cleared(here):
    assert pending_move(here) is None
    move = append(here, promotion(1), pending=True)
    assert pending_move(here) == move
    append(here, promotion(2, outcome="refused"))
    assert pending_move(here) == move, "and not the newest decision"
    clear_pending_move(here)
    assert pending_move(here) is None


def test_clearing_a_pending_move_twice_is_no_error(here):
    append(here, promotion(1), pending=True)
    clear_pending_move(here)
    clear_pending_move(here)
    assert pending_move(here) is None


def test_history_says_which_move_is_pending(here, capsys):
    append(here, promotion(1), pending=True)
    assert main(["history"]) == 0
    assert "m3diff history: decision 1 " in capsys.readouterr().err


def test_a_move_of_a_process_killed_before_it_was_recorded_is_not_pending(here, monkeypatch):
    real = record.write_ref

    def killed_at_the_branch(repository: Path, ref: str, *commits: str, **named: str) -> bool:
        if ref != record.PENDING:
            raise KeyboardInterrupt
        return real(repository, ref, *commits, **named)

    with monkeypatch.context() as cut:
        cut.setattr(record, "write_ref", killed_at_the_branch)
        with pytest.raises(KeyboardInterrupt):
            append(here, promotion(3), pending=True)
    assert pending_move(here) is None
    assert append(here, promotion(4), pending=True) == pending_move(here)


HOLD = """
import sys, threading, time
from m3diff.provenance.git import process_lock, run_git
with process_lock("promote"):
    if sys.argv[1:] != ["none"]:
        slow = ("-c", "alias.slow=!sleep 2", "slow")
        limit = {"seconds": 10} if sys.argv[1:] == ["remote"] else {}
        threading.Thread(target=run_git, args=slow, kwargs=limit, daemon=True).start()
        time.sleep(0.3)
    print("held", flush=True)
    time.sleep(1.5)
"""


@pytest.mark.parametrize(
    ("git_command", "killed", "waits"),
    [("none", False, True), ("none", True, False), ("local", True, True), ("remote", True, False)],
)
def test_a_lock_admits_one_process_and_a_killed_one_keeps_it_for_its_git(here, capsys, git_command, killed, waits):
    first: Any = subprocess.Popen([sys.executable, "-c", HOLD, git_command], stdout=subprocess.PIPE, text=True)
    assert first.stdout.readline() == "held\n"
    if killed:
        first.kill()
        first.wait()
    with process_lock("record", here):
        assert capsys.readouterr().out == "", "another lock"
    with process_lock("promote", here):
        assert ("promote: waiting until another promote" in capsys.readouterr().out) == waits
        assert killed or not waits or first.poll() is not None or first.wait(5) == 0
    first.wait()


# Other clones


@pytest.fixture
def second(here: Path, tmp_path: Path) -> Path:
    """Another clone; both know the bare remote `remote.git` as `team`."""
    git(here, "init", "-q", "--bare", str(tmp_path / "remote.git"))
    git(tmp_path, "init", "-q", "second")
    for root in (here, tmp_path / "second"):
        git(root, "remote", "add", "team", str(tmp_path / "remote.git"))
        git(root, "config", "m3diff.runs", "team")
    return tmp_path / "second"


def decide(root: Path, entry: Entry) -> None:
    """Append an entry as promote and rollback do."""
    fetch_record(root)
    append(root, entry)
    push_record(root)


def targets(root: Path) -> list[int | None]:
    return [decision.target for decision in read_decisions(root)]


def test_without_a_remote_in_git_config_the_record_is_not_pushed(here, second):
    git(here, "config", "--unset", "m3diff.runs")
    decide(here, promotion(1))
    assert git(second, "ls-remote", "team") == ""


def test_clones_that_decide_in_turn_have_one_record(here, second, capsys):
    decide(here, promotion(1))
    for version, root in ((2, here), (3, second), (4, here)):
        decide(root, promotion(version, version - 1))
    assert targets(here) == [1, 2, 3, 4]
    assert numbering_faults(here) == []
    assert capsys.readouterr().err == ""


def test_a_remote_that_is_away_is_a_warning_and_gets_the_record_later(here, second, capsys):
    decide(here, promotion(1))
    remote = second.with_name("remote.git")
    remote.rename(remote.with_name("away"))
    decide(here, promotion(2, 1))
    warnings = capsys.readouterr().err
    assert "not fetched from 'team'" in warnings
    assert "not pushed to 'team'" in warnings
    remote.with_name("away").rename(remote)
    decide(here, promotion(3, 2))
    assert capsys.readouterr().err == ""
    assert git(remote, "rev-parse", record.BRANCH) == git(here, "rev-parse", record.BRANCH)


@pytest.fixture
def forked(here: Path, second: Path) -> Path:
    """The second clone, which pushed version 2 after 1; `here` decided on version 3 at the same time."""
    decide(here, promotion(1))
    fetch_record(second)
    append(second, promotion(2, 1))
    append(here, promotion(3, 1))
    push_record(second)
    fetch_record(here)
    return second


def test_clones_that_decided_at_once_keep_both_records_and_say_so(here, forked, capsys):
    assert capsys.readouterr().err == ""
    push_record(here)
    assert "git fetch team runs/history" in capsys.readouterr().err
    assert targets(here) == [1, 3]


def test_the_commands_in_the_warning_go_on_from_the_other_clone_s_record(here, forked, capsys):
    push_record(here)
    warning = capsys.readouterr().err
    for command in ("git fetch team runs/history", f"git update-ref {record.BRANCH} FETCH_HEAD"):
        assert command in warning
        git(here, *command.split()[1:])
    assert targets(here) == [1, 2]
    assert targets(forked) == [1, 2]


def test_a_remote_that_does_not_answer_keeps_nobody_waiting(here, monkeypatch, capsys):
    git(here, "config", "m3diff.runs", "ext::sleep 30")
    git(here, "config", "protocol.ext.allow", "always")
    append(here, promotion(1, reason=""))
    monkeypatch.setattr(record, "FETCH_S", 0.5)
    monkeypatch.setattr(record, "PUSH_S", 0.6)
    fetch_record(here)
    assert "no answer in 0.5 s" in capsys.readouterr().err
    push_record(here)
    assert "not pushed to 'ext::sleep 30' (no answer in 0.6 s)" in capsys.readouterr().err
