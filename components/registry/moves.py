"""Moves of the alias `champion`: recorded before they are made, and finished where a process was killed in between."""

import calendar
import time
from pathlib import Path

from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from m3diff.records.errors import DataError
from m3diff.registry.decisions import (
    Decision,
    Entry,
    Identity,
    append,
    champions,
    decisions,
    moves,
    pending,
    settled,
    taken_back,
)
from m3diff.registry.lineage import content_of
from m3diff.registry.tracking import GONE, registered

CHAMPION, PREVIOUS = "champion", "previous"


def make_move(client: MlflowClient, repository: Path, entry: Entry) -> Decision | None:
    """Record a move and make it. None: the champion was another by then, which is recorded too."""
    decision = append(repository, identified(client, entry), pending=True)
    return decision if carry_out(client, repository, decision) else None


def settle(client: MlflowClient, repository: Path, model: str) -> Decision | None:
    """Let record and aliases agree: finish the move of a killed process, which is the answer, or record it as not done;
    record a champion that was moved by hand or from another clone."""
    left = pending(repository)
    finished = left if left is not None and carry_out(client, repository, left) else None
    made = moves(of_registry(client, decisions(repository), model), model)
    now = alias_of(client, model, CHAMPION)
    if made and made[-1].to != now:
        append(repository, identified(client, moved_elsewhere(client, model, made[-1], now)))
    return finished


def identified(client: MlflowClient, entry: Entry) -> Entry:
    """The entry with what tells its versions from others of the same numbers."""
    there = {int(version.version): version for version in versions_of(client, entry.model)}
    named = {number: there[number] for number in (entry.from_, entry.to, entry.previous) if number in there}
    identities = {number: identity_of(version) for number, version in named.items()}
    return entry.model_copy(update={"registry": made_at(client, entry.model), "versions": identities})


def identity_of(version: ModelVersion) -> Identity:
    return Identity(run=version.run_id or None, content=content_of(version.tags))


def made_at(client: MlflowClient, model: str) -> int | None:
    """When MLflow made the registered model, in ms: with it version numbers begin. None: there is none."""
    found = registered(client, model)
    return int(found.creation_timestamp) if found else None


def versions_of(client: MlflowClient, model: str) -> list[ModelVersion]:
    return list(client.search_model_versions(f"name = '{model}'"))


def of_registry(client: MlflowClient, found: list[Decision], model: str) -> list[Decision]:
    """The decisions about the versions that MLflow has today. Left out are those about others of the same numbers: of
    a registered model that was there before this one, or of runs that a store put back to a backup has not."""
    registry = made_at(client, model)
    if registry is None:
        return []
    runs = {int(version.version): version.run_id for version in versions_of(client, model)}

    def is_ours(decision: Decision) -> bool:
        if decision.registry is None:
            return calendar.timegm(time.strptime(decision.at, "%Y-%m-%dT%H:%M:%SZ")) >= registry // 1000
        identities = decision.versions.items()
        return decision.registry == registry and all(runs.get(n, named.run) == named.run for n, named in identities)

    return [decision for decision in found if decision.model == model and is_ours(decision)]


def rolled_back_by(client: MlflowClient, found: list[Decision], version: ModelVersion) -> Decision | None:
    """The decision that took a version back, be it under this number or another one; None where it holds no more."""
    back = champions(of_registry(client, found, version.name), version.name).taken_back.get(int(version.version))
    return back or taken_back(found, version.name, identity_of(version))


def champion_lost(client: MlflowClient, found: list[Decision], model: str) -> str | None:
    """What to do where the record knows champions of this registry, but the alias is gone; None where it is not."""
    line = champions(of_registry(client, found, model), model).line
    if not line or alias_of(client, model, CHAMPION) is not None:
        return None
    said = f"the alias {CHAMPION!r} is gone from model {model!r}, whose champion was version {line[-1]}"
    if (kept := next((version for version in reversed(line) if exists(client, model, version)), None)) is None:
        return f"{said}; no champion of before is left in MLflow"
    return f"{said}; set it again: m3diff rollback --to {kept} --why 'the alias was gone'"


def moved_elsewhere(client: MlflowClient, model: str, last: Decision, now: int | None) -> Entry:
    said = f"names version {now}" if now is not None else "is gone"
    return Entry(
        action="noticed",
        model=model,
        from_=last.to,
        to=now,
        outcome="moved elsewhere",
        why=f"the alias {CHAMPION!r} {said}, and no decision of this record moved it there: by hand, or from another "
        f"clone; the last one, {last.number}, made version {last.to} champion",
        previous=alias_of(client, model, PREVIOUS),
    )


def carry_out(client: MlflowClient, repository: Path, decision: Decision) -> bool:
    """Make a recorded move, or what is left of it. False: the champion is neither as before it nor as after it.

    A promotion sets `previous` first, so that there is always a way back; a rollback is in a hurry.
    """
    model, before, after = decision.model, decision.from_, decision.to
    assert after is not None, f"decision {decision.number} moves nothing"
    known = alias_of(client, model, PREVIOUS)
    ours = decision in of_registry(client, [decision], model)
    if ours and exists(client, model, after) and alias_of(client, model, CHAMPION) in (before, after):
        if decision.action == "promote":
            put_alias(client, model, PREVIOUS, decision.previous)
        if (now := alias_of(client, model, CHAMPION)) in (before, after):
            if now != after:
                client.set_registered_model_alias(model, CHAMPION, str(after))
            put_alias(client, model, PREVIOUS, decision.previous)
            settled(repository)
            return True
        put_alias(client, model, PREVIOUS, known)
    append(repository, not_done(client, decision))  # it bears the identities of the one that it is about
    settled(repository)
    return False


def not_done(client: MlflowClient, decision: Decision) -> Entry:
    model, now = decision.model, alias_of(client, decision.model, CHAMPION)
    gone = "" if decision.to is None or exists(client, model, decision.to) else f"version {decision.to} is gone; "
    if decision.registry not in (None, made_at(client, model)):
        gone = "the registered model is another one now; "
    return Entry(
        action=decision.action,
        model=model,
        from_=decision.from_,
        to=decision.to,
        outcome="not done",
        why=f"decision {decision.number} was not carried out: {gone}it was to follow version {decision.from_}, and the "
        f"champion is {now}",
        previous=alias_of(client, model, PREVIOUS),
        of=decision.number,
        registry=decision.registry,
        versions=decision.versions,
    )


def alias_of(client: MlflowClient, model: str, alias: str) -> int | None:
    """Which version an alias names."""
    found = registered(client, model)
    version = found.aliases.get(alias) if found else None
    return int(version) if version is not None else None


def put_alias(client: MlflowClient, model: str, alias: str, version: int | None) -> None:
    """Let an alias name a version, or nothing where there is none or none of that number any more."""
    now = alias_of(client, model, alias)
    wanted = version if version is not None and exists(client, model, version) else None
    if wanted is None and now is not None:
        client.delete_registered_model_alias(model, alias)
    elif wanted is not None and wanted != now:
        client.set_registered_model_alias(model, alias, str(wanted))


def exists(client: MlflowClient, model: str, version: int) -> bool:
    try:
        client.get_model_version(model, str(version))
    except MlflowException as error:
        if error.error_code != GONE:
            raise
        return False
    return True


def check_exists(client: MlflowClient, model: str, version: int) -> None:
    """
    Raises:
        DataError: the model has no such version.
    """
    if not exists(client, model, version):
        known = sorted(int(found.version) for found in versions_of(client, model))
        raise DataError(f"model {model!r} has no version {version}; it has {', '.join(map(str, known)) or 'none'}")
