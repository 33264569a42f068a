"""Rollback: the champion goes back to the version before it, in seconds and without a question to the gate."""

from pathlib import Path

from mlflow.tracking import MlflowClient

from m3diff.records.errors import DataError
from m3diff.registry import tracking
from m3diff.registry.decisions import Decision, Entry, alone, catch_up, champions, decisions, share
from m3diff.registry.known import agree, let_know
from m3diff.registry.moves import (
    CHAMPION,
    PREVIOUS,
    alias_of,
    champion_lost,
    check_exists,
    exists,
    make_move,
    of_registry,
    rolled_back_by,
    settle,
)
from m3diff.settings.tree import Params


def rollback(params: Params, to: int | None = None, why: str = "", repository: Path = Path(".")) -> Decision:
    """Make the previous champion, or the version `to`, champion; `promote` does not take the other one again. With `to`
    the alias may be gone: then the version gets it.

    Raises:
        DataError: there is no champion, nothing to go back to, no such version, no git repository, or decisions are
            missing there.
        TrackingUnavailableError: MLflow does not answer.
        BlockingIOError: the champion was moved meanwhile; try again.
    """
    model = params.register_.model_name
    with alone(repository, "record"), tracking.connected(params.register_.tracking_uri) as client:
        catch_up(repository)
        agree(client, repository, model)
        settle(client, repository, model)
        made = make_move(client, repository, going_back(client, repository, model, to, why))
        let_know(client, repository, model)
    share(repository)
    if made is None:
        raise BlockingIOError(f"the champion of {model!r} was moved meanwhile, see `m3diff history`; try again")
    return made


def going_back(client: MlflowClient, repository: Path, model: str, to: int | None, why: str) -> Entry:
    now, seen = alias_of(client, model, CHAMPION), decisions(repository)
    if now is None and to is None:
        lost = champion_lost(client, seen, model) or f"model {model!r} has no version with the alias {CHAMPION!r}"
        raise DataError(f"there is nothing to roll back: {lost}")
    target = to if to is not None else version_before(client, repository, model)
    check_exists(client, model, target)
    if target == now:
        raise DataError(f"version {target} of {model!r} is the champion already")
    line = champions(of_registry(client, seen, model), model).line
    older = line[: line.index(target)] if target in line else [version for version in line if version != now]
    return Entry(
        action="rollback",
        model=model,
        from_=now,
        to=target,
        outcome="rolled back",
        why=why.encode(errors="replace").decode(),
        previous=next((version for version in reversed(older) if exists(client, model, version)), None),
    )


def version_before(client: MlflowClient, repository: Path, model: str) -> int:
    """The version that the alias `previous` names; never one that was taken back."""
    found = alias_of(client, model, PREVIOUS)
    if found is None:
        raise DataError(
            f"model {model!r} has no version with the alias {PREVIOUS!r}: no earlier champion is known. Name a version "
            "(`m3diff history` lists them): m3diff rollback --to VERSION"
        )
    version = client.get_model_version(model, str(found))
    if (back := rolled_back_by(client, decisions(repository), version)) is not None:
        raise DataError(
            f"the alias {PREVIOUS!r} names version {found}, which {back.who} rolled back at {back.at}; name a "
            "version (`m3diff history` lists them): m3diff rollback --to VERSION"
        )
    return found
