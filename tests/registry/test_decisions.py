"""The record of decisions: its format, its damages, and writers that compete or are killed."""

import calendar
import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from m3diff.__main__ import main
from m3diff.provenance.git import GitError, find_commit, process_lock, user_and_host
from m3diff.records.errors import DataError, Fault
from m3diff.registry import decisions as decision_record
from m3diff.registry.decisions import (
    BRANCH,
    BRANCH_NAME,
    PENDING_REF,
    Decision,
    Entry,
    Identity,
    OvertakenError,
    append_decision,
    clear_pending_move,
    fetch_record,
    find_pending_move,
    numbering_faults,
    push_record,
    read_decisions,
)
from tests.errors import raises

EMPTY_TREE = "4b825dc642cb6eb9a060e54bf8d69288fbee4904"  # git's hash of a tree without files


def git(root: Path, *arguments: str, stdin: bytes = b"") -> str:
    """Run git as a person with an own name and email. Return its output."""
    config = ("-c", "user.name=a person", "-c", "user.email=person@example.org", "-c", "commit.gpgsign=false")
    command = ["git", "-C", str(root), *config, *arguments]
    return subprocess.run(command, input=stdin, capture_output=True, check=True).stdout.decode().strip()


@pytest.fixture(scope="module")
def clone_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a repository with a commit and an uncommitted edit."""
    root = tmp_path_factory.mktemp("clone")
    git(root, "init", "-q", "-b", "main")
    (root / "code.py").write_text("1")
    git(root, "add", ".")
    git(root, "commit", "-q", "-m", "code")
    (root / "code.py").write_text("2")
    return root


@pytest.fixture
def clone(clone_once: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a copy of the repository, which is the current directory."""
    root = Path(shutil.copytree(clone_once, tmp_path / "clone"))
    monkeypatch.chdir(root)
    return root


def make_promotion(target: int | None, champion_before: int | None = None, **changes: Any) -> Entry:
    """Return the promotion of a version of the model `m`. `changes` replace its fields."""
    fields: dict[str, Any] = {
        "action": "promote",
        "model": "m",
        "champion_before": champion_before,
        "target": target,
        "outcome": "promoted",
        "reason": "better",
    }
    return Entry(**fields | changes)


def make_rollback(target: int, champion_before: int | None) -> Entry:
    """Return a rollback of the model `m` to a version."""
    return make_promotion(target, champion_before, action="rollback", outcome="rolled back", reason="")


# The commit of a decision


def test_the_commit_message_of_a_decision_is_its_json(clone, monkeypatch):
    monkeypatch.setenv("M3DIFF_FLOW_RUN", "f-1")
    decision = append_decision(Path("."), make_promotion(2, 1, previous=1, gate={"gain": 0.5}))
    assert json.loads(git(clone, "log", "-1", "--format=%B", BRANCH)) == {
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
        "commit": git(clone, "rev-parse", "HEAD"),
    }


def test_a_decision_is_read_as_it_was_written(clone):
    decision = append_decision(Path("."), make_promotion(2, 1, previous=1, gate={"gain": 0.5}))
    assert read_decisions() == [decision]


def test_a_decision_has_the_time_in_utc_and_its_author_with_the_host(clone):
    decision = append_decision(Path("."), make_promotion(1))
    decided_at = calendar.timegm(time.strptime(decision.decided_at, "%Y-%m-%dT%H:%M:%SZ"))
    assert abs(time.time() - decided_at) < 60
    assert "@" in decision.author


def test_a_decision_adds_no_file_to_its_branch(clone):
    append_decision(Path("."), make_promotion(1))
    assert git(clone, "ls-tree", "-r", BRANCH) == "", "the decision is only in the commit message"


def test_writing_changes_no_file_index_or_head_and_runs_no_hook(clone):
    hook = clone / ".git" / "hooks" / "reference-transaction"
    hook.write_text(f"#!/bin/sh\ntouch {clone}/hook-ran\n")
    hook.chmod(0o755)
    (clone / "staged.py").write_text("3")
    git(clone, "add", "staged.py")
    (clone / "hook-ran").unlink(missing_ok=True)

    def read_state() -> tuple[str, str, bytes]:
        return git(clone, "status", "--porcelain"), git(clone, "rev-parse", "HEAD"), (clone / ".git/index").read_bytes()

    state_before = read_state()
    append_decision(clone, make_promotion(1), is_pending=True)
    clear_pending_move(Path("."))
    assert read_state() == state_before


def test_a_decision_is_by_m3diff_and_not_signed_even_if_the_person_signs(clone):
    git(clone, "config", "commit.gpgsign", "true")
    append_decision(clone, make_promotion(1))
    assert git(clone, "log", "--format=%an <%ae> %cn", BRANCH_NAME) == "m3diff <m3diff@localhost> m3diff"


def test_the_record_of_a_worktree_is_that_of_the_repository(clone, tmp_path):
    git(clone, "worktree", "add", "-q", "--detach", str(tmp_path / "tree"))
    append_decision(tmp_path / "tree", make_promotion(1))
    assert [decision.target for decision in read_decisions(clone)] == [1]


def test_an_empty_record_is_valid(clone, capsys):
    assert main(["history", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []


def test_a_commit_that_does_not_exist_is_refused_with_a_remedy(clone):
    with raises(DataError, "git.commit_not_in_clone", value="0" * 40):
        find_commit("0" * 40)


@pytest.mark.parametrize(
    "use_git",
    [lambda: append_decision(Path("."), make_promotion(1)), lambda: process_lock("x").__enter__()],
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
def test_decisions_taken_out_or_put_in_are_named_and_history_exits_with_three(clone, positions, misnumbered, capsys):
    for version in (1, 2, 3):
        append_decision(Path("."), make_promotion(version, version - 1 or None))
    assert numbering_faults() == []
    assert main(["history"]) == 0
    commits = git(clone, "rev-list", "--reverse", BRANCH).split()
    parent: tuple[str, ...] = ()
    for position in positions:  # as a person edits the branch
        message = git(clone, "log", "-1", "--format=%B", commits[position]).encode()
        parent = ("-p", git(clone, "commit-tree", EMPTY_TREE, *parent, stdin=message))
    git(clone, "update-ref", BRANCH, parent[1])
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
    note = git(root, "commit-tree", EMPTY_TREE, "-p", BRANCH, "-m", "a note")
    git(root, "update-ref", BRANCH, note)


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "the last commit is missing": (lambda root: remove_object(root, BRANCH), "registry.damaged_record"),
    "its parent is missing": (lambda root: remove_object(root, f"{BRANCH}^"), "registry.damaged_record"),
    "a commit is not a decision": (add_note, "registry.no_decision"),
}


@pytest.mark.parametrize(("damage", "code"), DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_record_is_an_error_and_not_an_empty_record(damage, code, clone):
    """If the record were read as empty, the next decision would start a new record, and its decisions would be lost."""
    append_decision(clone, make_promotion(1))
    append_decision(clone, make_promotion(2, 1))
    damage(clone)
    with raises(DataError, code, branch="runs/history"):
        read_decisions()
    with raises(DataError, code, branch="runs/history"):
        append_decision(clone, make_promotion(3, 2))
    assert main(["history"]) == 3


# The champions of a model

NOTICED = {"action": "noticed", "outcome": "moved elsewhere"}
REFUSED = {"outcome": "refused"}
OTHER_MODEL = {"model": "other"}
ABANDONED = {"outcome": "not done", "abandoned_move": 2}
TWO_PROMOTIONS = (make_promotion(1), make_promotion(2, 1))
THREE_PROMOTIONS = (*TWO_PROMOTIONS, make_promotion(3, 2))

# Entries, the champions that follow from them, and the versions that are rolled back
HISTORIES: dict[str, tuple[tuple[Entry, ...], list[int], list[int]]] = {
    "one after the other": (
        (*THREE_PROMOTIONS, make_promotion(9, 3, **REFUSED), make_promotion(5, 4, **OTHER_MODEL)),
        [1, 2, 3],
        [],
    ),
    "rolled back": ((*THREE_PROMOTIONS, make_rollback(2, 3)), [1, 2], [3]),
    "rolled back over another": (
        (*THREE_PROMOTIONS, make_rollback(2, 3), make_promotion(4, 2), make_rollback(1, 4)),
        [1],
        [2, 3, 4],
    ),
    "champion again": (
        (*TWO_PROMOTIONS, make_rollback(1, 2), make_promotion(3, 1), make_rollback(1, 3), make_promotion(2, 1)),
        [1, 2],
        [3],
    ),
    "a second time without rollback": ((*TWO_PROMOTIONS, make_promotion(1, 2)), [2, 1], []),
    "a champion from before the record": ((make_rollback(2, 3),), [2], [3]),
    "moved by hand to a lower number": ((*TWO_PROMOTIONS, make_promotion(1, 2, **NOTICED)), [1], [2]),
    "moved by hand to a higher number": ((make_promotion(1), make_promotion(7, 1, **NOTICED)), [1, 7], []),
    "the alias gone": ((make_promotion(1), make_promotion(None, 1, **NOTICED), make_promotion(8)), [1, 8], []),
    "the alias gone, and another accepted": (
        (make_promotion(1), make_promotion(None, 1, **NOTICED), make_rollback(7, None)),
        [1, 7],
        [],
    ),
    "not done": ((*TWO_PROMOTIONS, make_promotion(2, 1, **ABANDONED)), [1], []),
}


@pytest.mark.parametrize(("entries", "champions", "rolled_back"), HISTORIES.values(), ids=HISTORIES)
def test_champions_follow_each_other_and_a_rollback_takes_back_later_ones(entries, champions, rolled_back):
    facts: dict[str, Any] = {"decided_at": "", "author": "", "flow_run": None, "commit": None}
    decisions = [Decision(**dict(entry), number=number, **facts) for number, entry in enumerate(entries, start=1)]
    history = decision_record.follow_champions(decisions, "m")
    assert history.champions == champions
    assert sorted(history.rolled_back) == rolled_back
    assert decision_record.select_moves(decisions, "m")[-1].target == champions[-1]


def identified(number: int, content: str) -> dict[int, Identity]:
    """Return the identity of a version by its number. The name of its run contains its content."""
    return {number: Identity(run=f"run of {content}", content=content)}


def decisions_of_two_registries(*later_entries: Entry) -> list[Decision]:
    """Return the decisions about the model `m`, which was created again with other versions under the same numbers.

    The version with content b was rolled back as number 2 of the first registry.
    """
    first_registry = {"model_created_ms": 1, "identities": identified(1, "a") | identified(2, "b")}
    entries = [entry.model_copy(update=first_registry) for entry in (*TWO_PROMOTIONS, make_rollback(1, 2))]
    entries.append(make_promotion(1, model_created_ms=2, identities=identified(1, "c")))
    entries += [entry.model_copy(update={"model_created_ms": 2}) for entry in later_entries]
    facts: dict[str, Any] = {"decided_at": "", "author": "", "flow_run": None, "commit": None}
    return [Decision(**dict(entry), number=number, **facts) for number, entry in enumerate(entries, start=1)]


PROMOTED_AGAIN = make_promotion(5, 1, identities=identified(5, "b"))
ROLLED_BACK_AGAIN = make_rollback(1, 5).model_copy(update={"identities": identified(5, "b")})


@pytest.mark.parametrize(
    ("later_entries", "identity", "number"),
    [
        ((), Identity(run="run of b", content=None), 3),
        ((), Identity(run="another", content="b"), 3),
        ((), Identity(run="run of a", content="a"), None),
        ((), Identity(run="run of c", content="c"), None),
        ((), Identity(run=None, content=None), None),
        ((PROMOTED_AGAIN,), Identity(run="run of b", content="b"), None),
        ((PROMOTED_AGAIN, ROLLED_BACK_AGAIN), Identity(run="run of b", content="b"), 6),
    ],
    ids=[
        "its run",
        "its content",
        "the champion of then",
        "its number",
        "unknown",
        "promoted again",
        "and rolled back",
    ],
)
def test_the_rollback_of_a_version_is_found_by_its_run_or_content(later_entries, identity, number):
    decisions = decisions_of_two_registries(*later_entries)
    rollback = decision_record.find_rollback(decisions, "m", identity)
    assert (rollback.number if rollback else None) == number
    assert decision_record.find_rollback(decisions, "other", identity) is None


def test_identities_that_are_unknown_are_not_equal():
    unknown = Identity(run=None, content=None)
    assert not unknown.matches(unknown)


# Many writers, killed writers


@pytest.mark.parametrize(
    ("message", "is_overtaken"),
    [
        (b"fatal: cannot lock ref: is at 1 but expected 2", True),
        (b"fatal: cannot lock ref: reference already exists", True),
        (b"fatal: Unable to create 'history.lock': File exists", False),
    ],
    ids=["another commit", "a new branch", "a lock file"],
)
def test_a_ref_that_cannot_be_written_is_an_error_unless_somebody_was_faster(message, is_overtaken, monkeypatch):
    result = subprocess.CompletedProcess([], 128, b"", message)
    monkeypatch.setattr(decision_record, "run_git", lambda *arguments, **options: result)
    with nullcontext() if is_overtaken else raises(GitError, "git.command_failed", command=f"git update-ref {BRANCH}"):
        assert not decision_record.write_ref(Path("."), BRANCH, "1" * 40, "2" * 40)


def test_writers_at_once_lose_no_decision(clone):
    def write(model: str) -> None:
        for version in range(1, 6):
            with process_lock("record"):
                append_decision(clone, make_promotion(version, model=model))

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


def test_a_writer_that_another_one_overtook_is_asked_to_try_again(clone, monkeypatch):
    for version in (1, 2):
        append_decision(clone, make_promotion(version))
    older_tip = git(clone, "rev-parse", f"{BRANCH}^")
    with monkeypatch.context() as patch:
        patch.setattr(decision_record, "_find_tip", lambda repository: older_tip)
        with raises(OvertakenError, "registry.record_changed", branch="runs/history"):
            append_decision(clone, make_promotion(3))
    assert len(read_decisions()) == 2


def test_a_move_is_pending_until_it_is_cleared(clone):
    assert find_pending_move(clone) is None
    move = append_decision(clone, make_promotion(1), is_pending=True)
    assert find_pending_move(clone) == move
    append_decision(clone, make_promotion(2, outcome="refused"))
    assert find_pending_move(clone) == move, "and not the newest decision"
    clear_pending_move(clone)
    assert find_pending_move(clone) is None


def test_clearing_a_pending_move_twice_is_no_error(clone):
    append_decision(clone, make_promotion(1), is_pending=True)
    clear_pending_move(clone)
    clear_pending_move(clone)
    assert find_pending_move(clone) is None


def test_history_says_which_move_is_pending(clone, capsys):
    append_decision(clone, make_promotion(1), is_pending=True)
    assert main(["history"]) == 0
    assert "m3diff history: decision 1 " in capsys.readouterr().err


def test_a_move_of_a_process_killed_before_it_was_recorded_is_not_pending(clone, monkeypatch):
    write_ref = decision_record.write_ref

    def write_ref_until_killed(repository: Path, ref: str, *commits: str, **options: str) -> bool:
        if ref != PENDING_REF:
            raise KeyboardInterrupt
        return write_ref(repository, ref, *commits, **options)

    with monkeypatch.context() as patch:
        patch.setattr(decision_record, "write_ref", write_ref_until_killed)
        with pytest.raises(KeyboardInterrupt):
            append_decision(clone, make_promotion(3), is_pending=True)
    assert find_pending_move(clone) is None
    assert append_decision(clone, make_promotion(4), is_pending=True) == find_pending_move(clone)


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
def test_a_lock_admits_one_process_and_is_kept_by_the_local_git_of_a_killed_one(
    clone, capsys, git_command, killed, waits
):
    lock_holder: Any = subprocess.Popen([sys.executable, "-c", HOLD, git_command], stdout=subprocess.PIPE, text=True)
    assert lock_holder.stdout.readline() == "held\n"
    if killed:
        lock_holder.kill()
        lock_holder.wait()
    with process_lock("record", clone):
        assert capsys.readouterr().out == "", "another lock"
    with process_lock("promote", clone):
        assert ("promote: waiting until another promote" in capsys.readouterr().out) == waits
        assert killed or not waits or lock_holder.poll() is not None or lock_holder.wait(5) == 0
    lock_holder.wait()


# Other clones


@pytest.fixture
def other_clone(clone: Path, tmp_path: Path) -> Path:
    """Return another clone. Both clones have the bare remote `remote.git` with the name `team`."""
    git(clone, "init", "-q", "--bare", str(tmp_path / "remote.git"))
    git(tmp_path, "init", "-q", "second")
    for root in (clone, tmp_path / "second"):
        git(root, "remote", "add", "team", str(tmp_path / "remote.git"))
        git(root, "config", "m3diff.runs", "team")
    return tmp_path / "second"


def decide(root: Path, entry: Entry) -> None:
    """Append an entry to the record, and fetch and push like promote and rollback."""
    fetch_record(root)
    append_decision(root, entry)
    push_record(root)


def list_targets(root: Path) -> list[int | None]:
    return [decision.target for decision in read_decisions(root)]


def test_without_a_remote_in_git_config_the_record_is_not_pushed(clone, other_clone):
    git(clone, "config", "--unset", "m3diff.runs")
    decide(clone, make_promotion(1))
    assert git(other_clone, "ls-remote", "team") == ""


def test_clones_that_decide_in_turn_have_one_record(clone, other_clone, capsys):
    decide(clone, make_promotion(1))
    for version, root in ((2, clone), (3, other_clone), (4, clone)):
        decide(root, make_promotion(version, version - 1))
    assert list_targets(clone) == [1, 2, 3, 4]
    assert numbering_faults(clone) == []
    assert capsys.readouterr().err == ""


def test_a_remote_that_is_away_is_a_warning_and_gets_the_record_later(clone, other_clone, capsys):
    decide(clone, make_promotion(1))
    remote = other_clone.with_name("remote.git")
    remote.rename(remote.with_name("away"))
    decide(clone, make_promotion(2, 1))
    warnings = capsys.readouterr().err
    assert "not fetched from 'team'" in warnings
    assert "not pushed to 'team'" in warnings
    remote.with_name("away").rename(remote)
    decide(clone, make_promotion(3, 2))
    assert capsys.readouterr().err == ""
    assert git(remote, "rev-parse", BRANCH) == git(clone, "rev-parse", BRANCH)


@pytest.fixture
def forked_clone(clone: Path, other_clone: Path) -> Path:
    """Return the other clone, which pushed version 2 after 1. The first clone decided on version 3 at the same time."""
    decide(clone, make_promotion(1))
    fetch_record(other_clone)
    append_decision(other_clone, make_promotion(2, 1))
    append_decision(clone, make_promotion(3, 1))
    push_record(other_clone)
    fetch_record(clone)
    return other_clone


def test_clones_that_decided_at_once_keep_both_records_and_say_so(clone, forked_clone, capsys):
    assert capsys.readouterr().err == ""
    push_record(clone)
    assert "git fetch team runs/history" in capsys.readouterr().err
    assert list_targets(clone) == [1, 3]


def test_the_commands_in_the_warning_go_on_from_the_other_clone_s_record(clone, forked_clone, capsys):
    push_record(clone)
    warning = capsys.readouterr().err
    for command in ("git fetch team runs/history", f"git update-ref {BRANCH} FETCH_HEAD"):
        assert command in warning
        git(clone, *command.split()[1:])
    assert list_targets(clone) == [1, 2]
    assert list_targets(forked_clone) == [1, 2]


def test_a_remote_that_does_not_answer_keeps_nobody_waiting(clone, monkeypatch, capsys):
    git(clone, "config", "m3diff.runs", "ext::sleep 30")
    git(clone, "config", "protocol.ext.allow", "always")
    append_decision(clone, make_promotion(1, reason=""))
    monkeypatch.setattr(decision_record, "FETCH_S", 0.5)
    monkeypatch.setattr(decision_record, "PUSH_S", 0.6)
    fetch_record(clone)
    assert "no answer in 0.5 s" in capsys.readouterr().err
    push_record(clone)
    assert "not pushed to 'ext::sleep 30' (no answer in 0.6 s)" in capsys.readouterr().err
