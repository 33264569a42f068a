"""The record of decisions: which version became champion, or was refused, when, by whom, from what and why.

It is one file on a branch of the project's repository, `runs/history`: a JSON object a line, each with the sha256 of
the line before it. What is deleted in MLflow does not reach it. It is written with git's plumbing, so that working
tree, index and HEAD stay as they are. A move of the champion is recorded before it is made, and pending until then.
"""

import fcntl
import getpass
import hashlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from m3diff.records.errors import DataError, redacted

NAME, FILE = "runs/history", "decisions.jsonl"
BRANCH, PENDING, THEIRS = f"refs/heads/{NAME}", "refs/m3diff/pending", "refs/m3diff/theirs"
REMOTE = "m3diff.runs"  # git's setting that names the remote which keeps the branch; none by default
FOLDER = "040000"  # git's mode of one
NO_COMMIT, NO_LINE = "0" * 40, "0" * 64  # what stands in the place of a hash
FETCH_S, PUSH_S = 4, 10  # a rollback does not wait for a remote that is gone
ATTEMPTS = 20
STALE_S = 10  # git holds the lock of a ref for milliseconds: an older one was left by a killed process
CONFIG = ("core.hooksPath=/dev/null", "core.fsync=all", "gc.auto=0", "user.name=m3diff", "user.email=m3diff@localhost")
IDENTITY = {
    f"GIT_{who}_{what}": value
    for who in ("AUTHOR", "COMMITTER")
    for what, value in (("NAME", "m3diff"), ("EMAIL", "m3diff@localhost"))
}

Action = Literal["promote", "rollback", "noticed"]
Outcome = Literal["promoted", "first", "refused", "rolled back", "moved elsewhere", "not done"]
BEGUN_AGAIN = "(another registry: version numbers begin again) "
MOVES = ("promoted", "first", "rolled back", "moved elsewhere")


class Identity(BaseModel):
    """A version beyond its number, which MLflow gives again where its store or the registered model is made anew."""

    model_config = ConfigDict(frozen=True)

    run: str | None  # MLflow's id of the run that it was made by
    content: str | None  # what `m3diff.registry.lineage` knows the same version by; None: register did not make it

    def is_of(self, other: "Identity") -> bool:
        """Whether both are the same model, be it registered twice."""
        return (self.run is not None and self.run == other.run) or (
            self.content is not None and self.content == other.content
        )


class Entry(BaseModel):
    """A decision, as who makes it says it. `noticed`: somebody else moved the champion."""

    model_config = ConfigDict(frozen=True, populate_by_name=True)

    action: Action
    model: str
    from_: int | None = Field(validation_alias="from", serialization_alias="from")  # the champion before
    to: int | None  # the version that became champion; where it was refused, that would have
    outcome: Outcome
    why: str
    previous: int | None = None  # which version the alias `previous` names after the move
    of: int | None = None  # of the outcome `not done`: the number of the entry that did not take place
    gate: dict[str, Any] = {}  # the numbers behind it
    registry: int | None = None  # when MLflow made the registered model, in ms; None in lines of earlier releases
    versions: dict[int, Identity] = {}  # of each version that is named here


class Decision(Entry):
    """A line of the record."""

    number: int  # from 1
    at: str  # UTC
    who: str  # user@host
    flow_run: str | None
    commit: str | None  # that was checked out
    before: str  # sha256 of the line before; of the first line 64 zeros

    def __str__(self) -> str:
        why = f": {self.why}" if self.why else ""
        return f"{self.model}: champion {self.from_ or '-'} -> {self.to or '-'}, {self.outcome}{why}"


class Champions(NamedTuple):
    """What the record says of a model: the champion with those that it can go back to, and the versions taken back."""

    line: list[int]  # oldest first; the last one is champion
    taken_back: dict[int, Decision]


def decisions(repository: Path = Path(".")) -> list[Decision]:
    """The record, oldest first; empty where nothing was decided yet.

    Raises:
        DataError: no git repository, or a line that is no decision.
    """
    return [_parsed(number, line) for number, line in enumerate(_lines(repository, BRANCH), start=1)]


def _parsed(number: int, line: bytes) -> Decision:
    try:
        return Decision.model_validate_json(line)
    except ValidationError as error:
        raise DataError(
            f"{NAME}:{FILE} line {number}: no decision ({error.errors()[0]['msg']}). See `git log -p {NAME}`, and put "
            f"the branch back to its last good commit: git update-ref {BRANCH} COMMIT"
        ) from error


def faults(repository: Path = Path(".")) -> list[str]:
    """What is wrong with the record, line by line: a number, the chain of hashes, the last line against its commit."""
    lines, found, before = _lines(repository, BRANCH), [], NO_LINE
    for number, line in enumerate(lines, start=1):
        decision = _parsed(number, line)
        if decision.number != number:
            found.append(f"line {number}: it bears the number {decision.number}: lines were taken out or put in")
        if decision.before != before:
            found.append(
                f"line {number}: the line before has sha256 {before:.12}, but it names {decision.before:.12}: "
                f"line {max(1, number - 1)} was edited, or lines were taken out or put in"
            )
        before = _sha256(line)
    tip = git(repository, "log", "-1", "--format=%B", BRANCH, "--", FILE).strip() if lines else ""
    if lines and not tip.endswith(before):
        found.append(f"line {len(lines)}: its sha256 is {before:.12}, which its commit does not name: it was edited")
    return found


def moves(found: Iterable[Decision], model: str) -> list[Decision]:
    """The moves of a model's champion that took place."""
    ours = [decision for decision in found if decision.model == model]
    not_done = {decision.of for decision in ours if decision.outcome == "not done"}
    return [decision for decision in ours if decision.outcome in MOVES and decision.number not in not_done]


def champions(found: Iterable[Decision], model: str) -> Champions:
    """Follow a model's moves. What a rollback leaves behind counts as taken back until it is champion again."""
    line: list[int] = []
    taken_back: dict[int, Decision] = {}
    for move in moves(found, model):
        if move.from_ is not None and line[-1:] != [move.from_]:
            line.append(move.from_)
        if goes_back(move):
            left = 0 if move.from_ is None else 1  # none where the alias was gone
            kept = line.index(move.to) if move.to in line else len(line) - left
            taken_back |= {version: move for version in line[kept:]}
            line = line[:kept]
        if move.to is not None:
            line = [*(version for version in line if version != move.to), move.to]
            taken_back.pop(move.to, None)
    return Champions(line, taken_back)


def taken_back(found: Iterable[Decision], model: str, version: Identity) -> Decision | None:
    """The decision by which a version was taken back, whatever its number was and in whichever registry it was."""
    registries: dict[int | None, list[Decision]] = {}
    for decision in found:
        if decision.model == model:
            registries.setdefault(decision.registry, []).append(decision)
    for registry in reversed(registries.values()):
        named = {number: identity for decision in registry for number, identity in decision.versions.items()}
        same = [number for number, identity in named.items() if identity.is_of(version)]
        line, back = champions(registry, model)
        if any(number in line for number in same):
            return None
        if decisions_on := [back[number] for number in same if number in back]:
            return decisions_on[-1]
    return None


def goes_back(move: Decision) -> bool:
    """Whether a move takes the champion back. Of one that somebody made elsewhere, the numbers tell."""
    if move.action == "noticed":
        return move.to is not None and move.from_ is not None and move.to < move.from_
    return move.action == "rollback"


def append(repository: Path, entry: Entry, pending: bool = False) -> Decision:
    """Add a line to the record, durably; `pending`: a move that is still to be made, until `settled`.

    Raises:
        BlockingIOError: other processes wrote again and again in between; try again.
        DataError: git refuses.
    """
    for _ in range(ATTEMPTS):
        tip = tip_of(repository, BRANCH)
        lines = _lines(repository, tip) if tip else []
        decision = Decision(
            **dict(entry),
            number=len(lines) + 1,
            at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            who=who(),
            flow_run=os.environ.get("M3DIFF_FLOW_RUN"),
            commit=tip_of(repository, "HEAD"),
            before=_sha256(lines[-1]) if lines else NO_LINE,
        )
        line = json.dumps(decision.model_dump(mode="json", by_alias=True), allow_nan=False).encode()
        commit = _commit(repository, tip, [*lines, line], f"{decision}\n\nsha256 {_sha256(line)}")
        if pending:
            write_ref(repository, PENDING, commit)
        if write_ref(repository, BRANCH, commit, tip or NO_COMMIT):
            return decision
    raise BlockingIOError(f"{NAME}: other processes wrote {ATTEMPTS} times in between; try again")


def _commit(repository: Path, tip: str | None, lines: Sequence[bytes], message: str) -> str:
    """A commit on top of `tip` with these lines; other files of the branch stay."""
    blob = git(repository, "hash-object", "-w", "--stdin", stdin=b"".join(line + b"\n" for line in lines))
    files = {FILE: ("100644", blob)}
    for row in git(repository, "ls-tree", "-z", tip).split("\0")[:-1] if tip else []:
        facts, _, name = row.partition("\t")
        mode, _, content = facts.split()
        files.setdefault(name, (mode, content))
    made = git(repository, "hash-object", "-w", "-t", "tree", "--stdin", stdin=_tree(files))
    return git(repository, "commit-tree", made, *(("-p", tip) if tip else ()), stdin=message.encode(errors="replace"))


def _tree(files: dict[str, tuple[str, str]]) -> bytes:
    """git's own form of a folder, name -> (mode, hash). `git mktree` would not flush it to disk, whatever is asked."""

    def place(entry: tuple[str, tuple[str, str]]) -> bytes:
        name, (mode, _) = entry
        return f"{name}{'/' if mode == FOLDER else ''}".encode()

    rows = sorted(files.items(), key=place)
    return b"".join(f"{mode.lstrip('0')} {name}\0".encode() + bytes.fromhex(content) for name, (mode, content) in rows)


def pending(repository: Path) -> Decision | None:
    """The move that was recorded and perhaps not made, since its process was killed."""
    commit = tip_of(repository, PENDING)
    if commit is None or not _holds(repository, BRANCH, commit):
        return None  # killed before it was recorded: then nothing was moved
    lines = _lines(repository, commit)
    return _parsed(len(lines), lines[-1])


def settled(repository: Path) -> None:
    """The pending move was made, or recorded as not done."""
    if tip_of(repository, PENDING) is not None:
        write_ref(repository, PENDING, "-d")


def share(repository: Path) -> None:
    """Push the record to the remote that `git config m3diff.runs` names. A failure is said, and the next time tried."""
    if (remote := remote_of(repository)) is None or tip_of(repository, BRANCH) is None:
        return
    push = ("push", "--no-verify", "--quiet", remote, f"{BRANCH}:{BRANCH}")
    done = _run(main_tree(repository), *push, seconds=PUSH_S)
    if done.returncode == 0:
        return
    if b"rejected" not in done.stderr or catch_up(repository):
        warn(f"not pushed to {remote!r} ({_words(done)}); the next decision tries again")


def catch_up(repository: Path, remote: str | None = None) -> bool:
    """Take over what other clones decided, by default from the remote of `m3diff.runs`. False: warned that both have
    new lines."""
    if (remote := remote or remote_of(repository)) is None:
        return True
    fetch = ("fetch", "--quiet", "--no-tags", "--no-write-fetch-head", remote, f"+{BRANCH}:{THEIRS}")
    done = _run(main_tree(repository), *fetch, seconds=FETCH_S)
    if done.returncode:
        if b"couldn't find remote ref" not in done.stderr:
            warn(f"not fetched from {remote!r} ({_words(done)}); going on with what this clone knows")
        return True
    ours, theirs = tip_of(repository, BRANCH), tip_of(repository, THEIRS)
    assert theirs is not None, f"git fetched no {THEIRS}"
    if ours is None or _holds(repository, theirs, ours):
        return ours == theirs or write_ref(repository, BRANCH, theirs, ours or NO_COMMIT)
    if _holds(repository, ours, theirs):
        return True
    new = [git(repository, "rev-list", "--count", f"{a}..{b}") for a, b in ((ours, theirs), (theirs, ours))]
    warn(
        f"{remote!r} has {new[0]} decisions that this clone has not, and this clone {new[1]} that {remote!r} has not: "
        f"two clones decided at once. Nothing is overwritten and nothing more is pushed from here. Compare: git log "
        f"{NAME} and git log {THEIRS}. To go on from theirs: git update-ref {BRANCH} {THEIRS}"
    )
    return False


@contextmanager
def alone(repository: Path, what: str) -> Iterator[None]:
    """One process of this machine at a time, in whatever worktree of the repository; the others wait, and say so.

    Raises:
        DataError: no git repository.
    """
    folder = common_dir(repository) / "m3diff"
    folder.mkdir(exist_ok=True)
    with (folder / f"{what}.lock").open("a+") as lock:
        os.set_inheritable(lock.fileno(), True)  # a git that outlives this process holds the lock until it ends
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            print(f"{what}: waiting for another one to end ({lock.read().strip()})", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        lock.truncate(0)
        lock.write(f"pid {os.getpid()} of {who()}")
        lock.flush()
        yield


def table(found: Sequence[Decision]) -> str:
    """The record for a terminal, one line a decision, its reason below."""
    rows = [("", "at", "who", "model", "champion", "outcome", "flow run")]
    for decision in found:
        move = f"{decision.from_ or '-'} -> {decision.to or '-'}"
        rows.append(
            (
                str(decision.number),
                decision.at,
                decision.who,
                decision.model,
                move,
                decision.outcome,
                decision.flow_run or "-",
            )
        )
    registries: dict[str, int] = {}
    begun = []  # the decisions with which version numbers begin again
    for decision in found:
        if decision.registry is not None:
            if registries.get(decision.model, decision.registry) != decision.registry:
                begun.append(decision.number)
            registries[decision.model] = decision.registry
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    whys = [
        f"{' ' * widths[0]}  {BEGUN_AGAIN if decision.number in begun else ''}{decision.why or 'no reason was given'}"
        for decision in found
    ]
    return "\n".join([lines[0], *(text for pair in zip(lines[1:], whys, strict=True) for text in pair)])


def who() -> str:
    """user@host; a user without a name by its number."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = f"uid{os.getuid()}"
    return f"{user}@{socket.gethostname()}"


def warn(text: str) -> None:
    print(f"warning: record of decisions: {redacted(text)}", file=sys.stderr, flush=True)


def remote_of(repository: Path) -> str | None:
    return _run(repository, "config", "--get", REMOTE).stdout.decode().strip() or None


def tip_of(repository: Path, ref: str) -> str | None:
    return _run(repository, "rev-parse", "--verify", "--quiet", f"{ref}^{{commit}}").stdout.decode().strip() or None


def write_ref(repository: Path, ref: str, *change: str) -> bool:
    """Let a ref name a commit: `commit`, `commit expected`, or none by `-d`. False where it is not at `expected`.

    Raises:
        DataError: git refuses for another reason.
    """
    for _ in range(ATTEMPTS):
        words = ("-d", ref) if change == ("-d",) else (ref, *change)
        done = _run(repository, "update-ref", "-m", "m3diff", *words)
        if done.returncode == 0:
            return True
        if b"but expected" in done.stderr or b"reference already exists" in done.stderr:
            return False
        if b".lock': File exists" not in done.stderr:
            break
        _wait_for_ref(repository, ref)
    raise DataError(f"git update-ref {ref}: {_words(done)}")


def _wait_for_ref(repository: Path, ref: str) -> None:
    """Another process holds git's lock of a ref, or was killed while it did: then the lock is taken away."""
    lock = common_dir(repository) / f"{ref}.lock"
    if lock.exists() and abs(time.time() - lock.stat().st_mtime) > STALE_S:  # of the future: the clock was set back
        warn(f"{lock} was left by a process that was killed; removed")
        lock.unlink(missing_ok=True)
    time.sleep(1)


def common_dir(repository: Path) -> Path:
    """The folder `.git` that all worktrees of a repository share."""
    return Path(git(repository, "rev-parse", "--path-format=absolute", "--git-common-dir"))


def main_tree(repository: Path) -> Path:
    """The first working tree of a repository: from there a remote's relative path is meant, which git takes from
    whichever it runs in."""
    common = common_dir(repository)
    return common.parent if common.name == ".git" else repository


def git(repository: Path, *arguments: str, stdin: bytes = b"") -> str:
    """What a git command answers.

    Raises:
        DataError: git refuses, as where there is no repository.
    """
    done = _run(repository, *arguments, stdin=stdin)
    if b"not a git repository" in done.stderr:
        raise DataError(
            f"{repository.resolve()}: no git repository, but the record of decisions is its branch {NAME}; run this "
            "in a clone of the project, or make one: git init"
        )
    if done.returncode:
        raise DataError(f"git {' '.join(arguments)}: {_words(done)}; the record of decisions is the branch {NAME}")
    return done.stdout.decode().rstrip("\n")


def _lines(repository: Path, commit: str) -> list[bytes]:
    """Of a commit or of BRANCH; none where there is no such branch yet.

    Raises:
        DataError: a part of it is missing or damaged, as after a power loss: that is no empty record.
    """
    if commit == BRANCH and not _has_branch(repository):
        return []
    if not git(repository, "ls-tree", commit, FILE):
        return []
    done = _run(repository, "cat-file", "blob", f"{commit}:{FILE}")
    if done.returncode:
        raise DataError(
            f"{NAME}:{FILE}: cannot be read ({_words(done)}); the record of decisions is damaged: see `git fsck`, and "
            f"put the branch back to its last good commit: git update-ref {BRANCH} COMMIT"
        )
    return done.stdout.split(b"\n")[:-1]


def _has_branch(repository: Path) -> bool:
    """Whether there is a branch of the record, be it a damaged one."""
    file = common_dir(repository) / BRANCH  # git takes an empty one for none
    return file.exists() or _run(repository, "show-ref", "--verify", "--quiet", BRANCH).returncode != 1


def holds(repository: Path, ref: str, commit: str) -> bool:
    """Whether a ref is there and its history has this commit."""
    tip = tip_of(repository, ref)
    return tip is not None and _holds(repository, tip, commit)


def _holds(repository: Path, tip: str, commit: str) -> bool:
    """Whether a commit is part of the history of another."""
    return _run(repository, "merge-base", "--is-ancestor", commit, tip).returncode == 0


def _run(
    repository: Path, *arguments: str, stdin: bytes = b"", seconds: float | None = None
) -> subprocess.CompletedProcess[bytes]:
    """git, as itself and not as the person: own name, no hooks, no questions, everything flushed to disk."""
    config = [word for setting in CONFIG for word in ("-c", setting)]
    environment = os.environ | IDENTITY | {"GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}
    command = ["git", "-C", str(repository), *config, *arguments]
    apart = seconds is not None  # what waits for a remote holds no lock of `alone`
    try:
        return subprocess.run(
            command, input=stdin, capture_output=True, env=environment, timeout=seconds, close_fds=apart
        )
    except FileNotFoundError as error:
        raise DataError("git: not installed, but the record of decisions is a branch of the repository") from error
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 124, b"", f"no answer in {seconds:g} s".encode())


def _words(done: subprocess.CompletedProcess[bytes]) -> str:
    return redacted(" ".join(done.stderr.decode(errors="replace").split())) or f"exit code {done.returncode}"


def _sha256(line: bytes) -> str:
    return hashlib.sha256(line).hexdigest()
