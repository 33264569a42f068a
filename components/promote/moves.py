"""Moves of the alias `champion`: recorded before they are made, and finished where a process was killed in between."""

from pathlib import Path

from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from components.decisions import Decision, Entry, append, decisions, moves, pending, settled
from components.records import DataError

CHAMPION, PREVIOUS = "champion", "previous"


def make_move(client: MlflowClient, repository: Path, entry: Entry) -> Decision | None:
    """Record a move and make it. None: the champion was another by then, which is recorded too."""
    decision = append(repository, entry, pending=True)
    return decision if carry_out(client, repository, decision) else None


def settle(client: MlflowClient, repository: Path, model: str) -> Decision | None:
    """Let record and aliases agree: finish the move of a killed process, which is the answer, or record it as not done;
    record a champion that was moved by hand or from another clone."""
    left = pending(repository)
    finished = left if left is not None and carry_out(client, repository, left) else None
    made = moves(decisions(repository), model)
    now = alias_of(client, model, CHAMPION)
    if made and made[-1].to != now:
        append(repository, moved_elsewhere(client, model, made[-1], now))
    return finished


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
    if exists(client, model, after) and alias_of(client, model, CHAMPION) in (before, after):
        if decision.action == "promote":
            put_alias(client, model, PREVIOUS, decision.previous)
        if (now := alias_of(client, model, CHAMPION)) in (before, after):
            if now != after:
                client.set_registered_model_alias(model, CHAMPION, str(after))
            put_alias(client, model, PREVIOUS, decision.previous)
            settled(repository)
            return True
        put_alias(client, model, PREVIOUS, known)
    append(repository, not_done(client, decision))
    settled(repository)
    return False


def not_done(client: MlflowClient, decision: Decision) -> Entry:
    model, now = decision.model, alias_of(client, decision.model, CHAMPION)
    gone = "" if decision.to is None or exists(client, model, decision.to) else f"version {decision.to} is gone; "
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
    )


def alias_of(client: MlflowClient, model: str, alias: str) -> int | None:
    """Which version an alias names."""
    found = client.search_registered_models(f"name = '{model}'")
    version = found[0].aliases.get(alias) if found else None
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
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        return False
    return True


def check_exists(client: MlflowClient, model: str, version: int) -> None:
    """
    Raises:
        DataError: the model has no such version.
    """
    if not exists(client, model, version):
        known = sorted(int(found.version) for found in client.search_model_versions(f"name = '{model}'"))
        raise DataError(f"model {model!r} has no version {version}; it has {', '.join(map(str, known)) or 'none'}")
