"""The record of decisions: a branch of its own that only grows, by whoever writes at once, and shows every edit."""

import calendar
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from m3diff.__main__ import main
from m3diff.provenance.git import alone, who
from m3diff.records.errors import DataError
from m3diff.registry import decisions as record
from m3diff.registry.decisions import (
    Entry,
    append,
    catch_up,
    champions,
    decisions,
    faults,
    moves,
    pending,
    settled,
    share,
)


def git(root: Path, *arguments: str, stdin: bytes = b"") -> str:
    config = ("-c", "user.name=a person", "-c", "user.email=person@example.org", "-c", "commit.gpgsign=false")
    command = ["git", "-C", str(root), *config, *arguments]
    return subprocess.run(command, input=stdin, capture_output=True, check=True).stdout.decode().strip()


def clone(root: Path) -> Path:
    root.mkdir(exist_ok=True)
    git(root, "init", "-q", "-b", "main")
    return root


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with a commit and an edit under way, the current directory."""
    root = clone(tmp_path / "clone")
    (root / "code.py").write_text("1")
    git(root, "add", ".")
    git(root, "commit", "-q", "-m", "code")
    (root / "code.py").write_text("2")
    monkeypatch.chdir(root)
    return root


def moved(to: int | None, before: int | None = None, **changes: object) -> Entry:
    plain = {"action": "promote", "model": "m", "from_": before, "to": to, "outcome": "promoted", "why": "better"}
    return Entry(**plain | changes)


def back(to: int, before: int) -> Entry:
    return moved(to, before, action="rollback", outcome="rolled back", why="it says no")


def commits_of(root: Path) -> list[str]:
    return git(root, "rev-list", "--reverse", record.BRANCH).split()


def rewrite(root: Path, commits: list[str]) -> None:
    """Decide by hand which commits the branch has, as somebody does who edits it."""
    tip: str | None = None
    for commit in commits:
        tree, message = git(root, "rev-parse", f"{commit}^{{tree}}"), git(root, "log", "-1", "--format=%B", commit)
        tip = git(root, "commit-tree", tree, *(("-p", tip) if tip else ()), stdin=message.encode())
    assert tip is not None
    git(root, "update-ref", record.BRANCH, tip)


def of_an_earlier_release(root: Path, *lines: dict[str, object], more: str = "") -> str:
    """A record as earlier releases wrote it, a line a decision in a file; its commit."""
    plain = {"action": "promote", "model": "m", "outcome": "promoted", "why": "better", "previous": None, "of": None}
    plain |= {"gate": {}, "at": "2026-01-02T03:04:05Z", "who": "a@b", "flow_run": None, "commit": None}
    text = "".join(f"{json.dumps(plain | {'before': '0' * 64} | line)}\n" for line in lines) + more
    blob = git(root, "hash-object", "-w", "--stdin", stdin=text.encode())
    tree = git(root, "mktree", stdin=f"100644 blob {blob}\t{record.FILE}".encode())
    commit = git(root, "commit-tree", tree, "-m", "m: champion - -> 1, first")
    git(root, "update-ref", record.BRANCH, commit)
    return commit


def test_an_entry_says_who_when_what_why_from_which_flow_run_and_at_which_commit(here, monkeypatch):
    monkeypatch.setenv("M3DIFF_FLOW_RUN", "f-1")
    written = append(Path("."), moved(2, 1, previous=1, gate={"gain": 0.5}))
    assert decisions() == [written]
    assert git(here, "ls-tree", "-r", record.BRANCH) == "", "no file, so that nothing else of git reads it"
    assert json.loads(git(here, "log", "-1", "--format=%B", record.BRANCH)) == {
        "number": 1,
        "at": written.at,
        "who": who(),
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
    assert abs(time.time() - calendar.timegm(time.strptime(written.at, "%Y-%m-%dT%H:%M:%SZ"))) < 60
    assert "@" in written.who


def test_writing_touches_neither_files_nor_index_nor_head_runs_no_hook_and_signs_nothing(here):
    hook = here / ".git" / "hooks" / "reference-transaction"
    hook.write_text(f"#!/bin/sh\ntouch {here}/hook-ran\n")
    hook.chmod(0o755)
    git(here, "config", "commit.gpgsign", "true")
    (here / "staged.py").write_text("3")
    git(here, "add", "staged.py")
    (here / "hook-ran").unlink(missing_ok=True)
    before = git(here, "status", "--porcelain"), git(here, "rev-parse", "HEAD"), (here / ".git/index").read_bytes()
    append(Path("."), moved(1), pending=True)
    settled(Path("."))
    after = git(here, "status", "--porcelain"), git(here, "rev-parse", "HEAD"), (here / ".git/index").read_bytes()
    assert after == before
    assert git(here, "log", "--format=%an <%ae> %cn", record.NAME) == "m3diff <m3diff@localhost> m3diff"


def test_without_a_repository_the_remedy_is_said(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    for asked in (
        decisions,
        faults,
        lambda: append(Path("."), moved(1)),
        lambda: alone("x").__enter__(),
    ):
        with pytest.raises(DataError, match="no git repository.*or make one: git init"):
            asked()
    assert main(["history"]) == 3


def test_in_a_worktree_the_record_is_the_repositorys(here, tmp_path):
    git(here, "worktree", "add", "-q", "--detach", str(tmp_path / "tree"))
    append(tmp_path / "tree", moved(1))
    assert [entry.to for entry in decisions(here)] == [1]


# A record that somebody edited, that is damaged, or that an earlier release wrote


@pytest.mark.fault("S2")
@pytest.mark.parametrize(
    ("places", "found"),
    [([0, 2], ["decision 2: it bears the number 3"]), ([0, 1, 2, 2], ["decision 4: it bears the number 3"])],
    ids=["taken out", "put in"],
)
def test_decisions_taken_out_or_put_in_are_named_and_history_exits_with_three(here, places, found, capsys):
    for version in (1, 2, 3):
        append(Path("."), moved(version, version - 1 or None))
    assert faults() == []
    assert main(["history"]) == 0
    commits = commits_of(here)
    rewrite(here, [commits[place] for place in places])
    assert [text.partition(":")[0] + ":" + text.split(":")[1] for text in faults()] == found
    capsys.readouterr()
    assert main(["history"]) == 3
    assert f"m3diff history: {found[0]}" in capsys.readouterr().err


def test_what_is_no_decision_is_refused_with_the_way_back(here, capsys):
    append(Path("."), moved(1))
    git(here, "update-ref", record.BRANCH, git(here, "commit-tree", record.EMPTY, "-p", record.BRANCH, "-m", "a note"))
    with pytest.raises(
        DataError, match=r"runs/history: commit \w{12}, .*: no decision.*git update-ref refs/heads/runs"
    ):
        decisions()
    assert main(["history"]) == 3
    of_an_earlier_release(here, {"number": 1, "from": None, "to": 1}, more="{}\n")
    with pytest.raises(DataError, match="decisions.jsonl line 2: no decision"):
        decisions()


def test_a_record_of_an_earlier_release_is_read_and_continued(here):
    old = of_an_earlier_release(here, {"number": 1, "from": None, "to": 1}, {"number": 2, "from": 1, "to": 2})
    git(here, "update-ref", record.PENDING, old)
    assert pending(here) == decisions()[1], "its process was killed before this release was installed"
    settled(here)
    append(here, back(1, 2))
    append(here, moved(3, 1))
    assert [(one.number, one.from_, one.to) for one in decisions()] == [(1, None, 1), (2, 1, 2), (3, 2, 1), (4, 1, 3)]
    assert (faults(), decisions()[0].at) == ([], "2026-01-02T03:04:05Z")
    assert git(here, "rev-parse", f"{record.BRANCH}~2") == old


@pytest.mark.parametrize("lost", ["tip", "parent", "file", "ref"])
def test_a_record_of_which_a_part_is_gone_is_no_empty_record(here, lost):
    """Taken for empty, the next decision would begin it anew, and what was decided would be lost without a word."""
    of_an_earlier_release(here, {"number": 1, "from": None, "to": 1})
    append(here, moved(2, 1))
    name = {"tip": record.BRANCH, "parent": f"{record.BRANCH}^", "file": f"{record.BRANCH}^:{record.FILE}"}
    if lost == "ref":
        (here / ".git" / record.BRANCH).write_bytes(b"")
    else:
        gone = git(here, "rev-parse", name[lost])
        (here / ".git/objects" / gone[:2] / gone[2:]).unlink()
    for asked in (decisions, lambda: append(here, moved(3, 2))):
        with pytest.raises(DataError, match="runs/history.*git update-ref refs/heads/runs/history COMMIT"):
            asked()


def test_history_is_a_table_for_people_and_json_for_machines(here, capsys):
    append(Path("."), moved(1, outcome="first", why="there was no champion"))
    append(Path("."), moved(2, 1))
    append(Path("."), moved(1, 2, action="rollback", outcome="rolled back", why=""))
    assert main(["history"]) == 0
    lines = capsys.readouterr().out.splitlines()
    person = who()
    assert lines[0].split() == ["at", "who", "model", "champion", "outcome", "flow", "run"]
    assert [line.split()[:1] + line.split()[2:] for line in lines[1::2]] == [
        ["1", person, "m", "-", "->", "1", "first", "-"],
        ["2", person, "m", "1", "->", "2", "promoted", "-"],
        ["3", person, "m", "2", "->", "1", "rolled", "back", "-"],
    ]
    assert [line.strip() for line in lines[2::2]] == ["there was no champion", "better", "no reason was given"]
    assert main(["history", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(entry["from"], entry["to"], entry["outcome"]) for entry in found] == [
        (None, 1, "first"),
        (1, 2, "promoted"),
        (2, 1, "rolled back"),
    ]


def test_an_empty_record_is_sound(here, capsys):
    assert main(["history", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []


# What the record says of a model


def made(here: Path, *entries: Entry) -> record.Champions:
    for entry in entries:
        append(here, entry)
    return champions(decisions(here), "m")


def test_champions_follow_each_other_and_a_rollback_takes_back_what_it_leaves(here):
    found = made(here, moved(1), moved(2, 1), moved(3, 2), moved(9, 3, outcome="refused"), moved(5, 4, model="other"))
    assert (found.line, found.taken_back) == ([1, 2, 3], {})
    found = made(here, back(2, 3))
    assert (found.line, list(found.taken_back)) == ([1, 2], [3])
    found = made(here, moved(4, 2), back(1, 4))
    assert (found.line, sorted(found.taken_back)) == ([1], [2, 3, 4])
    assert found.taken_back[4].number == 8
    found = made(here, moved(3, 1))
    assert (found.line, sorted(found.taken_back)) == ([1, 3], [2, 4])


def test_a_version_that_is_champion_a_second_time_has_the_other_before_it(here):
    assert made(here, moved(1), moved(2, 1), moved(1, 2)).line == [2, 1]


def test_a_rollback_of_a_champion_from_before_the_record_is_known(here):
    found = made(here, back(2, 3))
    assert (found.line, list(found.taken_back)) == ([2], [3])


def test_a_move_elsewhere_to_an_older_version_is_a_rollback_and_to_a_newer_one_is_none(here):
    noticed = {"action": "noticed", "outcome": "moved elsewhere"}
    assert list(made(here, moved(1), moved(2, 1), moved(1, 2, **noticed)).taken_back) == [2]
    assert list(made(here, moved(7, 1, **noticed)).taken_back) == [2]
    assert made(here, moved(None, 7, **noticed), moved(8)).line == [1, 7, 8]


def test_a_move_that_was_not_done_is_no_move(here):
    append(here, moved(1))
    second = append(here, moved(2, 1))
    append(here, moved(2, 1, outcome="not done", of=second.number))
    assert [move.to for move in moves(decisions(here), "m")] == [1]


# Many writers, killed writers


def test_writers_at_once_lose_nothing_and_keep_the_chain(here, monkeypatch):
    monkeypatch.setattr(record, "ATTEMPTS", 200)
    failed: list[BaseException] = []

    def write(model: str) -> None:
        try:
            for version in range(1, 6):
                append(here, moved(version, model=model))
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=write, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert faults() == []
    for model in "abc":
        assert [entry.to for entry in decisions() if entry.model == model] == [1, 2, 3, 4, 5]


def test_a_writer_that_is_overtaken_again_and_again_asks_to_try_again(here, monkeypatch):
    monkeypatch.setattr(record, "write_ref", lambda *given: False)
    with pytest.raises(BlockingIOError, match="other processes wrote 20 times in between; try again"):
        append(here, moved(1))


def test_a_move_is_pending_from_before_it_is_recorded_until_it_is_settled(here, monkeypatch, capsys):
    assert pending(here) is None
    written = append(here, moved(1), pending=True)
    assert pending(here) == written
    append(here, moved(2, outcome="refused"))
    assert pending(here) == written, "the entry, not the newest"
    assert main(["history"]) == 0
    assert "m3diff history: decision 1 may still be under way; promote finishes it" in capsys.readouterr().err
    settled(here)
    settled(here)
    assert pending(here) is None
    with monkeypatch.context() as cut:
        real = record.write_ref
        cut.setattr(record, "write_ref", lambda root, ref, *c: real(root, ref, *c) if ref == record.PENDING else 1 / 0)
        with pytest.raises(ZeroDivisionError):
            append(here, moved(3), pending=True)
    assert pending(here) is None, "killed before it was recorded"
    assert append(here, moved(4), pending=True) == pending(here)


def test_a_lock_of_git_that_a_killed_process_left_is_removed_and_a_fresh_one_waited_for(here, capsys):
    append(here, moved(1))
    lock = here / ".git" / f"{record.BRANCH}.lock"
    lock.touch()
    os.utime(lock, (0, 0))
    append(here, moved(2, 1))
    assert "was left by a process that was killed; removed" in capsys.readouterr().err
    lock.touch()
    threading.Timer(1.5, lock.unlink).start()
    append(here, moved(3, 2))
    assert [entry.to for entry in decisions()] == [1, 2, 3]
    assert capsys.readouterr().err == ""


def test_what_git_refuses_is_said_in_gits_words(here):
    with pytest.raises(DataError, match="git update-ref refs/heads/x: .*not a valid"):
        record.write_ref(here, "refs/heads/x", "nonsense")


HOLD = """
import sys, threading, time
from m3diff.provenance.git import alone, run
with alone("promote"):
    if sys.argv[1:] != ["none"]:
        slow = ("-c", "alias.slow=!sleep 2", "slow")
        limit = {"seconds": 10} if sys.argv[1:] == ["remote"] else {}
        threading.Thread(target=run, args=slow, kwargs=limit, daemon=True).start()
        time.sleep(0.3)
    print("held", flush=True)
    time.sleep(1.5)
"""


def hold(git_command: str = "none") -> subprocess.Popen[str]:
    """A process that holds the lock for 1.5 seconds, perhaps with a git command of 2 seconds below it."""
    held = subprocess.Popen([sys.executable, "-c", HOLD, git_command], stdout=subprocess.PIPE, text=True)
    assert held.stdout is not None
    assert held.stdout.readline() == "held\n"
    return held


def test_one_process_at_a_time_and_the_other_waits_and_says_for_whom(here, capsys):
    first = hold()
    started = time.monotonic()
    with alone("record", here):
        assert time.monotonic() - started < 1, "another lock"
    with alone("promote", here):
        assert time.monotonic() - started > 1
    assert f"promote: waiting for another one to end (pid {first.pid} of {who()})" in capsys.readouterr().out
    first.wait()


@pytest.mark.parametrize(("git_command", "waits"), [("none", False), ("local", True), ("remote", False)])
def test_a_killed_process_holds_nothing_but_until_its_git_command_is_through(here, capsys, git_command, waits):
    first = hold(git_command)
    first.kill()
    first.wait()
    with alone("promote", here):
        assert ("waiting" in capsys.readouterr().out) == waits


# Other clones


@pytest.fixture
def there(here: Path, tmp_path: Path) -> Path:
    """A bare remote of `here` and of a second clone."""
    remote = tmp_path / "remote.git"
    git(here, "init", "-q", "--bare", str(remote))
    for root in (here, clone(tmp_path / "second")):
        git(root, "remote", "add", "team", str(remote))
        git(root, "config", "m3diff.runs", "team")
    return remote


def decide(root: Path, entry: Entry) -> None:
    catch_up(root)
    append(root, entry)
    share(root)


def test_without_the_setting_nothing_is_pushed(here, there):
    git(here, "config", "--unset", "m3diff.runs")
    decide(here, moved(1))
    assert git(there, "for-each-ref") == ""


def test_clones_that_decide_in_turn_have_one_record(here, there, tmp_path, capsys):
    for version, root in ((1, here), (2, tmp_path / "second"), (3, here)):
        decide(root, moved(version, version - 1 or None))
    assert [entry.to for entry in decisions(here)] == [1, 2, 3]
    assert faults(here) == []
    assert git(there, "rev-parse", record.BRANCH) == git(here, "rev-parse", record.BRANCH)
    assert capsys.readouterr().err == ""


def test_a_remote_that_is_gone_is_a_warning_and_the_next_decision_pushes_again(here, there, capsys):
    there.rename(there.with_name("away"))
    decide(here, moved(1))
    said = capsys.readouterr().err
    assert "not fetched from 'team'" in said
    assert "not pushed to 'team'" in said
    there.with_name("away").rename(there)
    decide(here, moved(2, 1))
    assert capsys.readouterr().err == ""
    assert git(there, "rev-parse", record.BRANCH) == git(here, "rev-parse", record.BRANCH)


def test_clones_that_decided_at_once_keep_both_records_and_say_so_plainly(here, there, tmp_path, capsys):
    decide(here, moved(1))
    catch_up(tmp_path / "second")
    append(tmp_path / "second", moved(2, 1))
    append(here, moved(3, 1))
    append(here, moved(4, 3))
    share(tmp_path / "second")
    assert capsys.readouterr().err == ""
    share(here)
    said = capsys.readouterr().err
    assert "'team' has 1 decisions that this clone has not, and this clone 2 that 'team' has not" in said
    assert "Nothing is overwritten" in said
    assert [entry.to for entry in decisions(here)] == [1, 3, 4]
    assert [entry.to for entry in decisions(tmp_path / "second")] == [1, 2]


def test_a_remote_that_does_not_answer_keeps_nobody_waiting(here, monkeypatch, capsys):
    git(here, "config", "m3diff.runs", "ext::sleep 30")
    git(here, "config", "protocol.ext.allow", "always")
    monkeypatch.setattr(record, "FETCH_S", 0.5)
    started = time.monotonic()
    assert catch_up(here)
    assert time.monotonic() - started < 3
    assert "no answer in 0.5 s" in capsys.readouterr().err
    append(here, moved(1, why=""))
    monkeypatch.setattr(record, "PUSH_S", 0.6)
    monkeypatch.setattr(record, "FETCH_S", 30)
    started = time.monotonic()
    share(here)
    assert time.monotonic() - started < 3, "it is not asked a second time"
    assert "not pushed to 'ext::sleep 30' (no answer in 0.6 s)" in capsys.readouterr().err
