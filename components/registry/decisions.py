"""Keep a record of decisions about the champion, which is the version of a model that is in use.

The record says which version became champion or was refused, when, by whom, after which champion and why.

Each decision is a commit on the branch `runs/history` with an empty tree and the decision as JSON in the commit
message. Recording a decision does not change files, the index or HEAD, and deletions in MLflow do not affect the
record. A decision that changes the champion is called a move. A move is recorded before it is made, and is pending
until it is made.

Somebody may delete, reset or fork the branch. Therefore a tag of the registered model in MLflow contains the number of
decisions about the model and the commit of the last one. If the record does not contain that commit, decisions are
missing, and no new decision is made.
"""

import json
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mlflow.tracking import MlflowClient
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from m3diff.provenance.git import GitError, commit_at, error_text, git, main_tree, run_git, user_and_host
from m3diff.records.errors import CodedError, DataError, Fault, redact
from m3diff.records.progress import align_columns
from m3diff.registry.tracking import find_registered_model

BRANCH_NAME = "runs/history"
BRANCH = f"refs/heads/{BRANCH_NAME}"
PENDING_REF = "refs/m3diff/pending"
# Tag of a registered model in MLflow: the number of decisions about the model, and the commit of the last one, such as
# `12 3f2a...`
COUNT_TAG = "decisions"
COUNT_TAG_FORM = re.compile(r"([1-9][0-9]*) ([0-9a-f]{40})")
NO_COMMIT = "0" * 40  # tells git that a ref must not exist yet

# Time limits in seconds. A rollback must not wait for a remote that does not respond
FETCH_S = 4
PUSH_S = 10

# Git options. They flush every object and ref, because a power loss could otherwise leave a branch without its commits.
# They also turn off garbage collection, and make git wait up to ten seconds for the lock of a ref
DURABLE_OPTIONS = ("-c", "core.fsync=all", "-c", "gc.auto=0", "-c", "core.filesRefLockTimeout=10000")
FETCH_COMMAND = f"git fetch CLONE +{BRANCH}:{BRANCH}"  # shown to the user. CLONE is the clone that has the decisions

MOVE_OUTCOMES = ("promoted", "first", "rolled back", "moved elsewhere")  # outcomes that change the champion


class OvertakenError(CodedError, BlockingIOError):
    """Another process recorded a decision or changed the champion in the meantime. Trying again may help."""


class Identity(BaseModel):
    """The identity of a version, which stays unique even if version numbers are reused.

    MLflow reuses version numbers if its store or the registered model is recreated.
    """

    model_config = ConfigDict(frozen=True)

    run: str | None  # id of the MLflow run that created the version
    content: str | None  # digest from `moves.read_identity`; None if the version was not created by register

    def matches(self, identity: "Identity") -> bool:
        """Return whether two identities refer to the same model, even if it was registered twice."""
        if self.run is not None and self.run == identity.run:
            return True
        return self.content is not None and self.content == identity.content


class Entry(BaseModel):
    """A decision before it is recorded. In the record, the aliases of the fields are the JSON keys.

    Attributes:
        action: what led to the decision; `noticed` if somebody changed the champion without m3diff.
        champion_before: the champion when the decision was made, or None if there was no champion.
        target: the version that became champion or that the gate refused, or None if somebody deleted the alias.
        previous: the version that the alias `previous` points to after the move.
        abandoned_move: the number of the move that was not made if the outcome is `not done`, otherwise None.
        gate: the scores and parameters of the gate's comparison. Empty for other actions.
        model_created_ms: when the registered model was created, in ms since 1970. None until `moves.add_identities`
            adds it.
        identities: the identity of each version in this entry, by version number.
    """

    model_config = ConfigDict(frozen=True, populate_by_name=True)

    action: Literal["promote", "rollback", "noticed"]
    model: str
    champion_before: int | None = Field(validation_alias="from", serialization_alias="from")
    target: int | None = Field(validation_alias="to", serialization_alias="to")
    outcome: Literal["promoted", "first", "refused", "rolled back", "moved elsewhere", "not done"]
    reason: str = Field(validation_alias="why", serialization_alias="why")
    previous: int | None = None
    abandoned_move: int | None = Field(default=None, validation_alias="of", serialization_alias="of")
    gate: dict[str, Any] = {}
    model_created_ms: int | None = Field(default=None, validation_alias="registry", serialization_alias="registry")
    identities: dict[int, Identity] = Field(default={}, validation_alias="versions", serialization_alias="versions")


class Decision(Entry):
    """A recorded decision.

    Attributes:
        number: the position in the record, counted from 1.
        decided_at: the time in UTC, such as `2026-01-02T03:04:05Z`.
        author: `user@host`.
        flow_run: the id of the Prefect flow run, or None if no flow made the decision.
        commit: the commit that was checked out, or None if the repository had no commits yet.
    """

    number: int
    decided_at: str = Field(validation_alias="at", serialization_alias="at")
    author: str = Field(validation_alias="who", serialization_alias="who")
    flow_run: str | None
    commit: str | None

    def __str__(self) -> str:
        reason = f": {self.reason}" if self.reason else ""
        return f"{self.model}: champion {self.champion_before or '-'} -> {self.target or '-'}, {self.outcome}{reason}"


def read_decisions(repository: Path = Path(".")) -> list[Decision]:
    """Return all recorded decisions, oldest first.

    Raises:
        DataError: `repository` is not a git repository, or part of the record is missing or damaged.
    """
    return _read_up_to(repository, _find_tip(repository))


def numbering_faults(repository: Path = Path(".")) -> list[Fault]:
    """Return a fault for each decision whose number differs from its position.

    Numbers and positions differ if somebody removed or inserted commits.
    """
    return [
        Fault("registry.decision_misnumbered", position=position, value=decision.number)
        for position, decision in enumerate(read_decisions(repository), start=1)
        if decision.number != position
    ]


def _find_tip(repository: Path) -> str | None:
    """Return the hash of the newest decision's commit, or None if the branch does not exist.

    The hash is returned even if git has lost the commit.
    """
    return run_git("rev-parse", "--quiet", "--verify", BRANCH, cwd=repository).stdout.decode().strip() or None


def _read_up_to(repository: Path, tip: str | None) -> list[Decision]:
    """Return the decisions up to the commit `tip`, oldest first."""
    return list(_read_with_commits(repository, tip).values())


def _read_with_commits(repository: Path, tip: str | None) -> dict[str, Decision]:
    """Return the decisions up to the commit `tip` by the commit that records each of them, oldest first."""
    if tip is None:
        return {}
    log = run_git("log", "-z", "--first-parent", "--no-show-signature", "--format=%H%n%B", tip, cwd=repository)
    if log.returncode:
        raise DataError("registry.damaged_record", branch=BRANCH_NAME, cause=error_text(log))
    newest_first: dict[str, Decision] = {}
    for age, entry in enumerate(log.stdout.decode(errors="replace").strip("\0").split("\0")):
        commit, _, message = entry.partition("\n")
        try:
            newest_first[commit] = Decision.model_validate_json(message)
        except ValidationError as error:
            cause = error.errors()[0]["msg"]
            raise DataError("registry.no_decision", branch=BRANCH_NAME, commit=commit, age=age, cause=cause) from error
    return dict(reversed(newest_first.items()))


def append_decision(repository: Path, entry: Entry, is_pending: bool = False) -> Decision:
    """Add a decision to the record and flush it to disk.

    Args:
        is_pending: whether the decision is a move that is still to be made. Call `clear_pending_move` after the move.

    Raises:
        OvertakenError: another process wrote to the record in the meantime; try again.
        DataError: a git command failed.
    """
    tip = _find_tip(repository)
    decision = Decision(
        **dict(entry),
        number=len(_read_up_to(repository, tip)) + 1,
        decided_at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        author=user_and_host(),
        flow_run=os.environ.get("M3DIFF_FLOW_RUN"),
        commit=commit_at("HEAD", repository),
    )
    message = json.dumps(decision.model_dump(mode="json", by_alias=True), allow_nan=False).encode()
    # Create the empty tree with hash-object, because `git mktree` ignores core.fsync and would not flush the tree
    tree = git(*DURABLE_OPTIONS, "hash-object", "-w", "-t", "tree", "--stdin", cwd=repository)
    parent = ("-p", tip) if tip else ()
    commit = git(*DURABLE_OPTIONS, "commit-tree", tree, *parent, cwd=repository, stdin=message)
    if is_pending:
        # Write this ref before the branch. If the process is killed in between, the pending commit is not on the branch
        # and is ignored
        write_ref(repository, PENDING_REF, commit)
    if not write_ref(repository, BRANCH, commit, expected=tip or NO_COMMIT):
        raise OvertakenError("registry.record_changed", branch=BRANCH_NAME)
    return decision


def find_pending_move(repository: Path) -> Decision | None:
    """Return the recorded move that a killed process may not have made, or None if all recorded moves were made."""
    commit = commit_at(PENDING_REF, repository)
    if commit is None or not is_in_history(repository, BRANCH, commit):
        return None
    return _read_up_to(repository, commit)[-1]


def clear_pending_move(repository: Path) -> None:
    """Clear the pending move, if any, after it was made or recorded as not done."""
    write_ref(repository, PENDING_REF)


def write_ref(repository: Path, ref: str, commit: str = "", expected: str = "") -> bool:
    """Point a ref to a commit, or delete the ref if `commit` is empty.

    Args:
        expected: the commit that the ref must point to now. Empty if it may point to any commit.

    Returns:
        False if the ref points to a commit other than `expected`.

    Raises:
        GitError: git failed for another reason, such as a lock file that a killed git process left behind.
    """
    change = ["-d", ref]
    if commit:
        change = [ref, commit, expected] if expected else [ref, commit]
    update = run_git(*DURABLE_OPTIONS, "update-ref", "-m", "m3diff", *change, cwd=repository)
    is_overtaken = b"but expected" in update.stderr or b"reference already exists" in update.stderr
    if update.returncode and not is_overtaken:
        raise GitError("git.command_failed", command=f"git update-ref {ref}", cause=error_text(update))
    return update.returncode == 0


def is_in_history(repository: Path, tip: str, commit: str) -> bool:
    """Return whether `commit` is an ancestor of the ref or commit `tip`, or `tip` itself."""
    return run_git("merge-base", "--is-ancestor", commit, tip, cwd=repository).returncode == 0


# The champions of a model, according to the record


@dataclass(frozen=True)
class ChampionHistory:
    """The champions of a registered model.

    Attributes:
        champions: the current champion, preceded by the versions that a rollback can return to, oldest first.
        rolled_back: the versions that were rolled back and not promoted since, with the decision that rolled them back.
    """

    champions: list[int]
    rolled_back: dict[int, Decision]


def select_moves(decisions: Iterable[Decision], model: str) -> list[Decision]:
    """Return the decisions that changed the champion of a model. Moves that were recorded but not made are left out."""
    model_decisions = [decision for decision in decisions if decision.model == model]
    moves = [decision for decision in model_decisions if decision.outcome in MOVE_OUTCOMES]
    abandoned_numbers = {decision.abandoned_move for decision in model_decisions if decision.outcome == "not done"}
    return [move for move in moves if move.number not in abandoned_numbers]


def follow_champions(decisions: Iterable[Decision], model: str) -> ChampionHistory:
    """Return the history of a model's champions by following its moves from the first to the last.

    A rollback also rolls back every champion that came after the version that becomes champion again.
    """
    champions: list[int] = []
    rolled_back: dict[int, Decision] = {}
    for move in select_moves(decisions, model):
        if move.champion_before is not None and champions[-1:] != [move.champion_before]:
            champions.append(move.champion_before)
        if is_rollback(move):
            remaining_count = count_remaining(champions, move)
            rolled_back |= dict.fromkeys(champions[remaining_count:], move)
            champions = champions[:remaining_count]
        if move.target is not None:
            champions = [version for version in champions if version != move.target]
            champions.append(move.target)
            rolled_back.pop(move.target, None)
    return ChampionHistory(champions=champions, rolled_back=rolled_back)


def is_rollback(move: Decision) -> bool:
    """Return whether a move is a rollback. A move by hand counts as a rollback if the new version number is lower."""
    if move.action != "noticed":
        return move.action == "rollback"
    if move.target is None or move.champion_before is None:
        return False
    return move.target < move.champion_before


def count_remaining(champions: Sequence[int], move: Decision) -> int:
    """Return how many champions, counted from the oldest, stay in the history after a rollback."""
    if move.target in champions:
        return champions.index(move.target)
    # The target was never champion, so only the current champion, if there is one, is rolled back
    return len(champions) if move.champion_before is None else len(champions) - 1


def find_rollback(decisions: Sequence[Decision], model: str, identity: Identity) -> Decision | None:
    """Return the decision that rolled a version back, or None if the version was not rolled back.

    The version is found by its identity, even if it had another number in an earlier registered model with the same
    name. These models are searched from newest to oldest.
    """
    model_decisions = [decision for decision in decisions if decision.model == model]
    creation_times = dict.fromkeys(decision.model_created_ms for decision in model_decisions)
    for model_created_ms in reversed(creation_times):
        registry_decisions = [decision for decision in model_decisions if decision.model_created_ms == model_created_ms]
        identities: dict[int, Identity] = {}
        for decision in registry_decisions:
            identities |= decision.identities
        numbers = [number for number, recorded_identity in identities.items() if recorded_identity.matches(identity)]
        history = follow_champions(registry_decisions, model)
        if any(number in history.champions for number in numbers):
            return None
        rollbacks = [history.rolled_back[number] for number in numbers if number in history.rolled_back]
        if rollbacks:
            return rollbacks[-1]
    return None


# Synchronization with other clones and with MLflow


def push_record(repository: Path) -> None:
    """Push the record to the remote set in `git config m3diff.runs`. Warn if this fails; the next call tries again."""
    remote = read_configured_remote(repository)
    if remote is None or _find_tip(repository) is None:
        return
    command = ["push", "--no-verify", "--quiet", remote, f"{BRANCH}:{BRANCH}"]
    push = run_git(*command, cwd=main_tree(repository), seconds=PUSH_S)
    if push.returncode:
        print_warning(
            f"not pushed to {remote!r} ({error_text(push)}). The next decision tries again. If the push was rejected, "
            "another clone made a decision at the same time, and nothing is overwritten. To see its decisions: "
            f"git fetch {remote} {BRANCH_NAME}, then compare git log {BRANCH_NAME} and git log FETCH_HEAD. To continue "
            f"from its decisions: git update-ref {BRANCH} FETCH_HEAD"
        )


def fetch_record(repository: Path, remote: str | None = None) -> None:
    """Fetch the decisions of other clones. The record is not changed if it has decisions that the remote lacks.

    Args:
        remote: the remote to fetch from, by default the one set in `git config m3diff.runs`.
    """
    remote = remote or read_configured_remote(repository)
    if remote is None:
        return
    command = [*DURABLE_OPTIONS, "fetch", "--no-tags", "--no-write-fetch-head", remote, f"{BRANCH}:{BRANCH}"]
    fetch = run_git(*command, cwd=main_tree(repository), seconds=FETCH_S)
    # git rejects updates that are not fast-forward, and a remote without the branch has no decisions yet
    is_expected = b"[rejected]" in fetch.stderr or b"couldn't find remote ref" in fetch.stderr
    if fetch.returncode and not is_expected:
        print_warning(f"not fetched from {remote!r} ({error_text(fetch)}). Only the decisions in this clone are used")


def read_configured_remote(repository: Path) -> str | None:
    """Return the remote set in `git config m3diff.runs`, or None if it is not set."""
    return run_git("config", "--get", "m3diff.runs", cwd=repository).stdout.decode().strip() or None


def require_complete_record(client: MlflowClient, repository: Path, model: str) -> None:
    """Check that the record has all decisions counted in the model's tag. Fetch missing decisions from the git remotes.

    If the record has more decisions about the model than the tag, for example because a process was killed, the tag is
    updated.

    Raises:
        DataError: decisions are still missing, or somebody edited the tag, so that the record cannot be checked.
    """
    registered_model = find_registered_model(client, model)
    tag = registered_model.tags.get(COUNT_TAG) if registered_model else None
    if tag is not None:
        form = COUNT_TAG_FORM.fullmatch(tag)
        if form is None:
            raise edited_tag_error(repository, model, tag)
        count, commit = form.groups()
        if not is_in_history(repository, BRANCH, commit):
            for remote in git("remote", cwd=repository).split():
                fetch_record(repository, remote)
        if not is_in_history(repository, BRANCH, commit):
            raise missing_decisions_error(repository, model, count, commit)
        # A model that was renamed on MLflow's page keeps the tag with the decisions about its former name
        counts = Counter(decision.model for decision in _read_up_to(repository, commit))
        if int(count) not in counts.values():
            raise edited_tag_error(repository, model, tag)
    update_tag(client, repository, model)


def missing_decisions_error(repository: Path, model: str, count: str, commit: str) -> DataError:
    """Return the error for a record that ends before the last decision in MLflow's tag."""
    tip = _find_tip(repository)
    record_here = Fault("registry.record_absent", branch=BRANCH_NAME, repository=repository.resolve())
    if tip is not None:
        record_here = Fault("registry.record_ends", branch=BRANCH_NAME, repository=repository.resolve(), commit=tip)
    return DataError(
        "registry.missing_decisions",
        model=model,
        count=int(count),
        commit=commit,
        record=record_here,
        tag=COUNT_TAG,
        fetch_command=FETCH_COMMAND,
        command=f"git update-ref {BRANCH} {commit}",
    )


def edited_tag_error(repository: Path, model: str, tag: str) -> DataError:
    """Return the error for a tag that somebody edited. Without the tag, missing decisions cannot be detected."""
    commits = _commits_about(repository, model)
    record_here = Fault("registry.no_decisions_here")
    if commits:
        record_here = Fault("registry.decisions_here", count=len(commits), commit=commits[-1])
    return DataError(
        "registry.edited_tag", model=model, tag=COUNT_TAG, value=tag, record=record_here, command=FETCH_COMMAND
    )


def update_tag(client: MlflowClient, repository: Path, model: str) -> None:
    """Write the number of decisions about a model and the commit of the last one to the model's tag in MLflow.

    Nothing is written if the tag already has this value, or if the record has no decision about the model.
    """
    commits = _commits_about(repository, model)
    registered_model = find_registered_model(client, model)
    if not commits or registered_model is None:
        return
    tag = f"{len(commits)} {commits[-1]}"
    if registered_model.tags.get(COUNT_TAG) != tag:
        client.set_registered_model_tag(model, COUNT_TAG, tag)


def _commits_about(repository: Path, model: str) -> list[str]:
    """Return the commits that record the decisions about a model, oldest first."""
    decisions = _read_with_commits(repository, _find_tip(repository))
    return [commit for commit, decision in decisions.items() if decision.model == model]


def print_warning(text: str) -> None:
    """Print a warning about the record to stderr."""
    print(f"warning: record of decisions: {redact(text)}", file=sys.stderr, flush=True)


def format_table(decisions: Sequence[Decision]) -> str:
    """Format the record for a terminal: one line per decision, with its reason on the line below."""
    rows = [("", "at", "who", "model", "champion", "outcome", "flow run")]
    for decision in decisions:
        row = (
            str(decision.number),
            decision.decided_at,
            decision.author,
            decision.model,
            f"{decision.champion_before or '-'} -> {decision.target or '-'}",
            decision.outcome,
            decision.flow_run or "-",
        )
        rows.append(row)
    header, *table_lines = align_columns(rows)
    indent = " " * (len(str(len(decisions))) + 2)
    lines = [header]
    for decision, line in zip(decisions, table_lines, strict=True):
        lines.append(line)
        lines.append(f"{indent}{decision.reason or 'no reason was given'}")
    return "\n".join(lines)
