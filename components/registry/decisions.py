"""The record of decisions: which version became champion, or was refused, when, by whom, from what and why.

Each decision is a commit on the branch `runs/history`, with an empty tree and the decision as JSON for a message. git
chains them; files, index and HEAD stay as they are, and what is deleted in MLflow does not reach them. A move of the
champion is recorded before it is made, and pending until then. Earlier releases wrote a line of JSON a decision to a
file of that branch: such a record is read, and continued by commits.

A person may delete, reset or fork the branch. MLflow therefore keeps the number of decisions and the last one's commit
as a tag of the model: a record without that commit lacks decisions, and nothing is decided by it.
"""

import json
import os
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

from mlflow.tracking import MlflowClient
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from m3diff.provenance.git import commit_at, git, main_tree, run, who, words
from m3diff.records.errors import DataError, redacted
from m3diff.records.progress import aligned
from m3diff.registry.tracking import registered

NAME = "runs/history"
FILE = "decisions.jsonl"  # of earlier releases
BRANCH, PENDING = f"refs/heads/{NAME}", "refs/m3diff/pending"
TAG = "decisions"  # of the registered model in MLflow: `12 3f2a...`, the number and the commit of the twelfth
EMPTY = "4b825dc642cb6eb9a060e54bf8d69288fbee4904"  # git's hash of a tree without files
FETCH_S, PUSH_S = 4, 10  # a rollback does not wait for a remote that is gone
DURABLE = ("-c", "core.fsync=all", "-c", "gc.auto=0", "-c", "core.filesRefLockTimeout=10000")  # ms
DAMAGED = (
    f"the record of decisions is damaged: see `git log {NAME}` and `git fsck`, and put the branch back to its last "
    f"good commit: git update-ref {BRANCH} COMMIT"
)

MOVES = ("promoted", "first", "rolled back", "moved elsewhere")


class Identity(BaseModel):
    """A version beyond its number, which MLflow gives again where its store or the registered model is made anew."""

    model_config = ConfigDict(frozen=True)

    run: str | None  # MLflow's id of the run that it was made by
    content: str | None  # see `promote.identity_of`; None: register did not make it

    def is_of(self, other: "Identity") -> bool:
        """True where both are the same model, be it registered twice."""
        return (self.run is not None and self.run == other.run) or (
            self.content is not None and self.content == other.content
        )


class Entry(BaseModel):
    """A decision before it is recorded. `noticed`: somebody else moved the champion."""

    model_config = ConfigDict(frozen=True, populate_by_name=True)

    action: Literal["promote", "rollback", "noticed"]
    model: str
    from_: int | None = Field(validation_alias="from", serialization_alias="from")  # the champion before
    to: int | None  # the version that became champion; where it was refused, that would have
    outcome: Literal["promoted", "first", "refused", "rolled back", "moved elsewhere", "not done"]
    why: str
    previous: int | None = None  # the version that the alias `previous` names after the move
    of: int | None = None  # of the outcome `not done`: the number of the entry that did not take place
    gate: dict[str, Any] = {}  # the numbers behind it
    registry: int | None = None  # when MLflow made the registered model, in ms; None in early releases
    versions: dict[int, Identity] = {}  # of each version that is named here


class Decision(Entry):
    number: int  # from 1
    at: str  # UTC
    who: str  # user@host
    flow_run: str | None
    commit: str | None  # that was checked out

    def __str__(self) -> str:
        why = f": {self.why}" if self.why else ""
        return f"{self.model}: champion {self.from_ or '-'} -> {self.to or '-'}, {self.outcome}{why}"


def decisions(repository: Path = Path(".")) -> list[Decision]:
    """The record, oldest first; empty where nothing was decided yet.

    Raises:
        DataError: no git repository, or a part of the record is missing, damaged, or no decision.
    """
    return _read(repository, _tip(repository))


def faults(repository: Path = Path(".")) -> list[str]:
    """Decisions whose number is not that of their place, as where commits were taken out or put in."""
    return [
        f"decision {place}: it bears the number {found.number}: decisions were taken out or put in"
        for place, found in enumerate(decisions(repository), start=1)
        if found.number != place
    ]


def _tip(repository: Path) -> str | None:
    """The newest decision's commit, be it there or lost; None where there is no branch yet."""
    return run("rev-parse", "--quiet", "--verify", BRANCH, cwd=repository).stdout.decode().strip() or None


def _read(repository: Path, tip: str | None) -> list[Decision]:
    if tip is None:
        return []
    done = run("log", "-z", "--first-parent", "--no-show-signature", "--format=%H %T%n%B", tip, cwd=repository)
    if done.returncode:
        raise DataError(f"{NAME}: cannot be read ({words(done)}); {DAMAGED}")
    found: list[Decision] = []
    for number, entry in enumerate(done.stdout.decode(errors="replace").strip("\0").split("\0")):
        head, _, message = entry.partition("\n")
        commit, tree = head.split()
        if tree != EMPTY and (there := git("ls-tree", commit, FILE, cwd=repository)):
            file = run("cat-file", "blob", there.split()[2], cwd=repository)
            if file.returncode:
                raise DataError(f"{NAME}:{FILE}: cannot be read ({words(file)}); {DAMAGED}")
            lines = file.stdout.decode().splitlines()
            return [_parsed(line, f"{FILE} line {n}") for n, line in enumerate(lines, start=1)] + found[::-1]
        found.append(_parsed(message, f"commit {commit:.12}, {number} before the last"))
    return found[::-1]


def _parsed(text: str, place: str) -> Decision:
    try:
        return Decision.model_validate_json(text)
    except ValidationError as error:
        raise DataError(f"{NAME}: {place}: no decision ({error.errors()[0]['msg']}); {DAMAGED}") from error


def append(repository: Path, entry: Entry, pending: bool = False) -> Decision:
    """Add a decision to the record, durably; `pending`: a move that is still to be made, until `settled`.

    Raises:
        BlockingIOError: another process wrote in between; try again.
        DataError: git refuses.
    """
    tip = _tip(repository)
    decision = Decision(
        **dict(entry),
        number=len(_read(repository, tip)) + 1,
        at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        who=who(),
        flow_run=os.environ.get("M3DIFF_FLOW_RUN"),
        commit=commit_at("HEAD", repository),
    )
    message = json.dumps(decision.model_dump(mode="json", by_alias=True), allow_nan=False).encode()
    tree = git(*DURABLE, "hash-object", "-w", "-t", "tree", "--stdin", cwd=repository)
    commit = git(*DURABLE, "commit-tree", tree, *(("-p", tip) if tip else ()), cwd=repository, stdin=message)
    if pending:
        write_ref(repository, PENDING, commit)
    if not write_ref(repository, BRANCH, commit, tip or "0" * 40):
        raise BlockingIOError(f"{NAME}: another process wrote in between; try again")
    return decision


def pending(repository: Path) -> Decision | None:
    """The move that was recorded and perhaps not made, since its process was killed."""
    commit = commit_at(PENDING, repository)
    recorded = commit is not None and holds(repository, BRANCH, commit)  # else it was killed before, and moved nothing
    return _read(repository, commit)[-1] if recorded else None


def settled(repository: Path) -> None:
    """The pending move, if there is one, was made, or recorded as not done."""
    write_ref(repository, PENDING)


def write_ref(repository: Path, ref: str, commit: str = "", expected: str = "") -> bool:
    """Let a ref name a commit, or remove it where none is given. False where it is not at `expected`.

    Raises:
        DataError: git refuses for another reason, such as a lock that a killed git left.
    """
    change = [ref, commit, *([expected] if expected else [])] if commit else ["-d", ref]
    done = run(*DURABLE, "update-ref", "-m", "m3diff", *change, cwd=repository)
    overtaken = b"but expected" in done.stderr or b"reference already exists" in done.stderr
    if done.returncode and not overtaken:
        raise DataError(f"git update-ref {ref}: {words(done)}")
    return done.returncode == 0


def holds(repository: Path, tip: str, commit: str) -> bool:
    """True where a commit is part of the history of a ref or another commit."""
    return run("merge-base", "--is-ancestor", commit, tip, cwd=repository).returncode == 0


# What the record says of a model


def moves(found: Iterable[Decision], model: str) -> list[Decision]:
    ours = [decision for decision in found if decision.model == model]
    not_done = {decision.of for decision in ours if decision.outcome == "not done"}
    return [decision for decision in ours if decision.outcome in MOVES and decision.number not in not_done]


def champions(found: Iterable[Decision], model: str) -> tuple[list[int], dict[int, Decision]]:
    """Follow a model's moves. A version that a rollback leaves behind is taken back until it is champion again.

    Returns:
        the champion, last, after those that it can go back to, oldest first; and the versions taken back, by number.
    """
    line: list[int] = []
    taken_back: dict[int, Decision] = {}
    for move in moves(found, model):
        if move.from_ is not None and line[-1:] != [move.from_]:
            line.append(move.from_)
        back = move.action == "rollback"
        if move.action == "noticed":  # somebody moved it elsewhere: the numbers tell
            back = move.to is not None and move.from_ is not None and move.to < move.from_
        if back:
            left = 0 if move.from_ is None else 1  # none where the alias was gone
            kept = line.index(move.to) if move.to in line else len(line) - left
            taken_back |= {version: move for version in line[kept:]}
            line = line[:kept]
        if move.to is not None:
            line = [*(version for version in line if version != move.to), move.to]
            taken_back.pop(move.to, None)
    return line, taken_back


def taken_back(found: Sequence[Decision], model: str, version: Identity) -> Decision | None:
    """The decision by which a version was taken back, whatever its number was and in whichever registry it was."""
    for registry in reversed(dict.fromkeys(decision.registry for decision in found if decision.model == model)):
        of_this = [decision for decision in found if (decision.model, decision.registry) == (model, registry)]
        named = {number: identity for decision in of_this for number, identity in decision.versions.items()}
        same = [number for number, identity in named.items() if identity.is_of(version)]
        line, back = champions(of_this, model)
        if any(number in line for number in same):
            return None
        if decisions_on := [back[number] for number in same if number in back]:
            return decisions_on[-1]
    return None


# Other clones, and what MLflow knows


def share(repository: Path) -> None:
    """Push the record to the remote that `git config m3diff.runs` names. A failure is said, and the next time tried."""
    if (remote := remote_of(repository)) is None or _tip(repository) is None:
        return
    push = ("push", "--no-verify", "--quiet", remote, f"{BRANCH}:{BRANCH}")
    done = run(*push, cwd=main_tree(repository), seconds=PUSH_S)
    if done.returncode:
        warn(
            f"not pushed to {remote!r} ({words(done)}); the next decision tries again. If it was rejected, another "
            f"clone decided at once, and nothing is overwritten: git fetch {remote} {NAME}, then compare git log {NAME}"
            f" and git log FETCH_HEAD. To go on from theirs: git update-ref {BRANCH} FETCH_HEAD"
        )


def catch_up(repository: Path, remote: str | None = None) -> None:
    """Take over what other clones decided, by default from the remote of `m3diff.runs`; git does not where both sides
    have new decisions, nor where this one has more."""
    if (remote := remote or remote_of(repository)) is None:
        return
    fetch = ("fetch", "--no-tags", "--no-write-fetch-head", remote, f"{BRANCH}:{BRANCH}")
    done = run(*DURABLE, *fetch, cwd=main_tree(repository), seconds=FETCH_S)
    if done.returncode and b"[rejected]" not in done.stderr and b"couldn't find remote ref" not in done.stderr:
        warn(f"not fetched from {remote!r} ({words(done)}); going on with what this clone knows")


def remote_of(repository: Path) -> str | None:
    return run("config", "--get", "m3diff.runs", cwd=repository).stdout.decode().strip() or None


def agree(client: MlflowClient, repository: Path, model: str) -> None:
    """Check that the record has every decision that MLflow knows of, asking git's remotes where it has not; tell MLflow
    those that it does not know, as after a kill between the two.

    Raises:
        DataError: decisions are missing; both ends are named.
    """
    there = registered(client, model)
    number, _, commit = (there.tags.get(TAG, "") if there else "").partition(" ")
    known = number.isdecimal() and len(commit) == 40  # else a person wrote it
    if known and not holds(repository, BRANCH, commit):
        for remote in git("remote", cwd=repository).split():
            catch_up(repository, remote)
    if known and not holds(repository, BRANCH, commit):
        raise DataError(
            f"decisions are missing: MLflow knows {number} of model {model!r}, the last one in commit {commit}; the "
            f"branch {NAME} of {repository.resolve()} ends at {_tip(repository) or 'nothing'}, and git's remotes do "
            f"not have it. Nothing is decided; fetch it from the clone that decided: git fetch CLONE +{BRANCH}:{BRANCH}"
            f". If none has it any more, delete the tag {TAG!r} of the model on MLflow's page: what was rolled back is "
            f"then judged anew. If that commit is in this clone: git update-ref {BRANCH} {commit}"
        )
    let_know(client, repository, model)


def let_know(client: MlflowClient, repository: Path, model: str) -> None:
    tip, there = _tip(repository), registered(client, model)
    if tip is not None and there is not None:
        known = f"{len(_read(repository, tip))} {tip}"
        if there.tags.get(TAG) != known:
            client.set_registered_model_tag(model, TAG, known)


def warn(text: str) -> None:
    print(f"warning: record of decisions: {redacted(text)}", file=sys.stderr, flush=True)


def table(found: Sequence[Decision]) -> str:
    """The record for a terminal, one line a decision, its reason below."""
    rows = [("", "at", "who", "model", "champion", "outcome", "flow run")]
    for one in found:
        moved = f"{one.from_ or '-'} -> {one.to or '-'}"
        rows.append((str(one.number), one.at, one.who, one.model, moved, one.outcome, one.flow_run or "-"))
    first, *lines = aligned(rows)
    indent = " " * (len(str(len(found))) + 2)
    why = (f"{line}\n{indent}{one.why or 'no reason was given'}" for line, one in zip(lines, found, strict=True))
    return "\n".join([first, *why])
