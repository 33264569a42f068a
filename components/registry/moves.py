"""Move the alias `champion` and keep it consistent with the record of decisions, even if a process is killed.

The alias marks the version of the model that is in use. Pointing it to another version is called a move. A move is
recorded before it is made. If the process is killed in between, the next promotion or rollback finishes the move.
Promotions and rollbacks also record moves that somebody made without m3diff.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from mlflow.entities.model_registry import ModelVersion
from mlflow.tracking import MlflowClient

from m3diff.records.errors import Fault
from m3diff.registry import versions
from m3diff.registry.decisions import (
    Decision,
    Entry,
    Identity,
    append_decision,
    clear_pending_move,
    find_pending_move,
    follow_champions,
    read_decisions,
    select_moves,
)
from m3diff.registry.lineage import IDENTITY_TAGS
from m3diff.registry.tracking import find_registered_model
from m3diff.registry.versions import CHAMPION, PREVIOUS, resolve_alias, version_exists


def make_move(client: MlflowClient, repository: Path, entry: Entry) -> Decision | None:
    """Record a move of the champion, then make it.

    Returns:
        the recorded decision, or None if `carry_out` could not make the move.
    """
    decision = append_decision(repository, add_identities(client, entry), is_pending=True)
    return decision if carry_out(client, repository, decision) else None


def reconcile(client: MlflowClient, repository: Path, model: str) -> Decision | None:
    """Make the record of decisions and the aliases in MLflow consistent.

    If a killed process left a move unfinished, finish the move or record that it was not made. If somebody moved the
    alias `champion` by hand or from another clone, record that.

    Returns:
        the move that was finished, or None if there was no unfinished move or it could not be made.
    """
    move = find_pending_move(repository)
    finished_move = None
    if move is not None and carry_out(client, repository, move):
        finished_move = move
    decisions = select_current_decisions(client, read_decisions(repository), model)
    moves = select_moves(decisions, model)
    champion = resolve_alias(client, model, CHAMPION)
    if moves and moves[-1].target != champion:
        record_noticed_move(client, repository, moves[-1], champion)
    return finished_move


def record_noticed_move(client: MlflowClient, repository: Path, last_move: Decision, champion: int | None) -> None:
    """Record that somebody moved the champion without m3diff.

    Args:
        last_move: the last move on record.
        champion: the version that the alias points to now, or None if somebody deleted the alias.
    """
    change = "was deleted" if champion is None else f"points to version {champion}"
    entry = Entry(
        action="noticed",
        model=last_move.model,
        champion_before=last_move.target,
        target=champion,
        outcome="moved elsewhere",
        reason=(
            f"the alias {CHAMPION!r} {change}, which no decision in this record explains. Somebody changed it by hand "
            f"or in another clone. Decision {last_move.number} had made version {last_move.target} champion"
        ),
        previous=resolve_alias(client, last_move.model, PREVIOUS),
    )
    append_decision(repository, add_identities(client, entry))


def carry_out(client: MlflowClient, repository: Path, decision: Decision) -> bool:
    """Make a recorded move, or finish it if a process was killed halfway.

    A promotion sets the alias `previous` before `champion`, so that there is always a version to roll back to. A
    rollback sets `champion` first, to take the bad model out of use sooner.

    Returns:
        whether the move was made. It is not made if the target no longer exists, if the registered model was recreated,
        or if the alias now points to a version that is neither the champion before the move nor the target. The move is
        then recorded as not done.
    """
    model = decision.model
    target = decision.target
    assert target is not None, f"decision {decision.number} has no target"
    champion = resolve_alias(client, model, CHAMPION)
    target_exists = version_exists(client, model, target)
    is_of_registry = bool(select_current_decisions(client, [decision], model))
    if is_of_registry and target_exists and champion in (decision.champion_before, target):
        aliases = [(CHAMPION, target), (PREVIOUS, decision.previous)]
        if decision.action == "promote":
            aliases.reverse()
        for alias, version in aliases:
            versions.put_alias(client, model, alias, version)
        clear_pending_move(repository)
        return True

    obstacle = f"it expected champion {decision.champion_before}, but the champion is {champion}"
    if decision.model_created_ms not in (None, model_creation_ms(client, model)):
        obstacle = "the registered model was recreated"
    elif not target_exists:
        obstacle = f"version {target} no longer exists"
    elif not is_of_registry:
        obstacle = "its version numbers now belong to other runs"
    entry = Entry(
        action=decision.action,
        model=model,
        champion_before=decision.champion_before,
        target=target,
        outcome="not done",
        reason=f"decision {decision.number} was not carried out, because {obstacle}",
        previous=resolve_alias(client, model, PREVIOUS),
        abandoned_move=decision.number,
        model_created_ms=decision.model_created_ms,
        identities=decision.identities,
    )
    append_decision(repository, entry)
    clear_pending_move(repository)
    return False


# Identities of versions. A number alone is ambiguous, because numbers restart at 1 if a model or store is recreated


def add_identities(client: MlflowClient, entry: Entry) -> Entry:
    """Return a copy of the entry that includes its versions' identities and the registered model's creation time."""
    version_by_number = {int(version.version): version for version in versions.list_versions(client, entry.model)}
    identities: dict[int, Identity] = {}
    for number in (entry.champion_before, entry.target, entry.previous):
        if number is not None and number in version_by_number:
            identities[number] = read_identity(version_by_number[number])
    creation_ms = model_creation_ms(client, entry.model)
    return entry.model_copy(update={"model_created_ms": creation_ms, "identities": identities})


def read_identity(version: ModelVersion) -> Identity:
    """Return the identity of a version: its run and a digest of its content.

    The digest depends only on the checkpoint, the code and the length limit, so it is the same in any registry. If the
    version was not created by register, the digest is None.
    """
    parts = [version.tags.get(tag) for tag in IDENTITY_TAGS]
    content = hashlib.sha256(json.dumps(parts).encode()).hexdigest() if parts[0] else None
    return Identity(run=version.run_id or None, content=content)


def model_creation_ms(client: MlflowClient, model: str) -> int | None:
    """Return the creation time of the registered model in ms since 1970, or None if there is no such model.

    The time distinguishes models that were created with the same name, each with version numbers from 1.
    """
    registered_model = find_registered_model(client, model)
    return int(registered_model.creation_timestamp) if registered_model else None


def select_current_decisions(client: MlflowClient, decisions: list[Decision], model: str) -> list[Decision]:
    """Return the decisions about the model's current versions in MLflow.

    Decisions about other versions that had the same numbers are left out. Such versions belonged to an earlier
    registered model, or were lost when the store was restored from a backup.
    """
    creation_ms = model_creation_ms(client, model)
    if creation_ms is None:
        return []
    run_by_number = {int(version.version): version.run_id for version in versions.list_versions(client, model)}

    def has_same_runs(decision: Decision) -> bool:
        # A version that has been deleted since is treated as the same version
        return all(
            run_by_number.get(number, identity.run) == identity.run for number, identity in decision.identities.items()
        )

    return [
        decision
        for decision in decisions
        if decision.model == model and decision.model_created_ms == creation_ms and has_same_runs(decision)
    ]


# Find the champion if the alias is missing


def find_lost_champion(client: MlflowClient, decisions: list[Decision], model: str) -> Fault | None:
    """Check whether the alias `champion` was lost.

    Somebody may have deleted the alias, deleted or renamed the registered model, or configured another store.

    Returns:
        a fault, if possible with the command that sets the alias again, or None if the alias exists or the model never
        had a champion.
    """
    if resolve_alias(client, model, CHAMPION) is not None:
        return None
    champions = follow_champions(select_current_decisions(client, decisions, model), model).champions
    if champions:
        candidate = find_newest_existing(client, model, champions)
        if candidate is None:
            return Fault("registry.champions_gone", model=model, champion=champions[-1])
        command = command_to_set_champion(candidate)
        return Fault("registry.alias_gone", model=model, champion=champions[-1], version=candidate, command=command)
    elsewhere = find_champion_elsewhere(client, decisions, model)
    if elsewhere is not None:
        return elsewhere
    previous = resolve_alias(client, model, PREVIOUS)
    if previous is None:
        return None
    command = command_to_set_champion(previous)
    return Fault("registry.alias_gone_previous_left", model=model, version=previous, command=command)


def find_newest_existing(client: MlflowClient, model: str, champions: Sequence[int]) -> int | None:
    """Return the last version in `champions` that still exists in MLflow, or None if all of them were deleted."""
    return next((version for version in reversed(champions) if version_exists(client, model, version)), None)


def find_champion_elsewhere(client: MlflowClient, decisions: list[Decision], model: str) -> Fault | None:
    """Look for a recorded champion of an earlier registered model, or of this model under an earlier name.

    Returns:
        a fault that describes that champion, or None if the record does not contain one.
    """
    creation_ms = model_creation_ms(client, model)
    names = {model}
    if creation_ms is not None:
        names |= {decision.model for decision in decisions if decision.model_created_ms == creation_ms}
    moves: list[Decision] = []
    for name in sorted(names):
        moves += [move for move in select_moves(decisions, name) if move.target is not None]
    if not moves:
        return None
    last_move = max(moves, key=lambda move: move.number)
    assert last_move.target is not None
    fields = {
        "model": model,
        "recorded_model": last_move.model,
        "champion": last_move.target,
        "since": last_move.decided_at,
    }
    champion = last_move.identities.get(last_move.target)
    for candidate in versions.list_versions(client, model):
        if champion is not None and read_identity(candidate).matches(champion):
            version = int(candidate.version)
            command = command_to_set_champion(version)
            return Fault("registry.champion_under_other_number", **fields, version=version, command=command)
    return Fault("registry.champion_elsewhere", **fields)


def command_to_set_champion(version: int) -> str:
    """Return the shell command that points the alias `champion` to a version again."""
    return f"m3diff rollback --to {version} --why 'the alias was gone'"
