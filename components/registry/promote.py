"""Promote and roll back: which version bears the alias `champion`.

A version becomes champion where it surely beats the champion on the same test set. Every decision is in the record
(`components/registry/decisions.py`), since MLflow keeps no history of aliases: a move is recorded before it is made,
and finished where a process was killed in between. The champion may be moved while a version is judged: then it is
judged again, against the champion of then.
"""

import calendar
import hashlib
import json
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
from mlflow.entities.model_registry import ModelVersion
from mlflow.tracking import MlflowClient

from m3diff.provenance.git import alone
from m3diff.records.errors import DataError
from m3diff.registry import decisions as record
from m3diff.registry import tracking, versions
from m3diff.registry.decisions import Decision, Entry, Identity
from m3diff.registry.gate import Verdict, can_be_judged, judge, judge_first, refused
from m3diff.registry.lineage import IDENTITY
from m3diff.registry.versions import CHALLENGER, CHAMPION, PREVIOUS, SCORES, alias_of, exists, find_version
from m3diff.settings.tree import Params

ATTEMPTS = 5  # to judge a version, each time against another champion


class CannotScoreAgain(Exception):
    """A version cannot be captioned and scored on the test set that is here; the text says why."""


class Promotion(Verdict):
    """A decision of the gate. `first`: accepted because there was no champion to beat. `refused` is no failure."""

    model: str
    challenger: int
    champion: int | None  # before the decision
    protocol: str
    metric: str
    min_gain: float
    confidence: float
    scored_again: bool = False  # the champion, on the challenger's test set

    def __str__(self) -> str:
        return f"{self.model} version {self.challenger} {self.outcome}: {self.reason}"


# Scores a version on a test set, given by its sha256; `components/commands/rescore.py` has the only one
Rescore = Callable[[MlflowClient, Params, ModelVersion, str], pa.Table]


def promote(
    params: Params, rescore: Rescore, version: int | None = None, again: bool = False, repository: Path = Path(".")
) -> Promotion:
    """Decide on a version, or on the challenger where none is named, and move the aliases.

    Args:
        rescore: called where the champion has no scores on the challenger's test set.
        version: the one that the caller registered; the alias `challenger` may name another one's by now.
        again: also where it was champion and was rolled back.
        repository: the git repository that keeps the record of decisions.

    Raises:
        DataError: nothing is registered, no such version, no git repository, or decisions are missing there.
        TrackingUnavailableError: MLflow does not answer.
        BlockingIOError: the champion was moved again and again meanwhile.
    """
    with alone("promote", repository), tracking.connected(params.register_.tracking_uri) as client:
        record.catch_up(repository)
        for fault in record.faults(repository):
            record.warn(f"{fault}; see `m3diff history`")
        attempts = (attempt(client, params, rescore, version, again, repository) for _ in range(ATTEMPTS))
        decision = next(filter(None, attempts), None)
        record.let_know(client, repository, params.register_.model_name)
    record.share(repository)
    if decision is None:
        raise BlockingIOError(
            f"the champion was moved {ATTEMPTS} times while the version was judged, see `m3diff history`; try again"
        )
    return decision


def rollback(params: Params, to: int | None = None, why: str = "", repository: Path = Path(".")) -> Decision:
    """Make the previous champion, or the version `to`, champion; `promote` does not take the other one again. With `to`
    the alias may be gone: then the version gets it. The gate is not asked.

    Raises:
        DataError: there is no champion, nothing to go back to, no such version, no git repository, or decisions are
            missing there.
        TrackingUnavailableError: MLflow does not answer.
        BlockingIOError: the champion was moved meanwhile; try again.
    """
    model = params.register_.model_name
    with alone("record", repository), tracking.connected(params.register_.tracking_uri) as client:
        record.catch_up(repository)
        record.agree(client, repository, model)
        settle(client, repository, model)
        made = make_move(client, repository, going_back(client, repository, model, to, why))
        record.let_know(client, repository, model)
    record.share(repository)
    if made is None:
        raise BlockingIOError(f"the champion of {model!r} was moved meanwhile, see `m3diff history`; try again")
    return made


# Promotion


def attempt(
    client: MlflowClient, params: Params, rescore: Rescore, version: int | None, again: bool, repository: Path
) -> Promotion | None:
    """Judge once. None: the champion was moved meanwhile, or something else decided."""
    name = params.register_.model_name
    with alone("record", repository):
        record.agree(client, repository, name)
        finished = settle(client, repository, name)
        if version is None and alias_of(client, name, CHALLENGER) is None:
            raise DataError(f"model {name!r} has no version with the alias {CHALLENGER!r}; run `m3diff register` first")
        challenger = find_version(client, name, CHALLENGER if version is None else str(version))
        if finished is not None and finished.action == "promote" and finished.to == int(challenger.version):
            return Promotion(**finished.gate, **{ours: getattr(finished, theirs) for ours, theirs in NAMED.items()})
        seen, known = record.decisions(repository), alias_of(client, name, CHAMPION)
    champion = client.get_model_version(name, str(known)) if known is not None else None
    _, taken_back = record.champions(of_registry(client, seen, name), name)  # under this number, or another one
    back = taken_back.get(int(challenger.version)) or record.taken_back(seen, name, identity_of(challenger))
    rescored = False
    if back is not None and not again:
        why = f" ({back.why})" if back.why else ""
        by = f"{back.who} rolled it back" if back.action == "rollback" else "it was found rolled back"
        verdict = refused(f"{by} at {back.at}{why}; to let the gate judge it all the same: m3diff promote --again")
    elif lost := champion_lost(client, seen, name):
        unseen = f"or make this version champion without a comparison: {accept(challenger)}"
        verdict = refused(f"there is nothing to compare with: {lost}; {unseen}")
    else:
        verdict, rescored = verdict_on(client, params, rescore, challenger, champion)
    decision = Promotion(
        **dict(verdict),
        model=name,
        challenger=int(challenger.version),
        champion=known,
        scored_again=rescored,
        **params.promote.model_dump(include={"protocol", "metric", "min_gain", "confidence"}),
    )
    with alone("record", repository):
        if alias_of(client, name, CHAMPION) != known or record.decisions(repository) != seen:
            return None
        return decision if recorded(client, repository, decision, seen) else None


def verdict_on(
    client: MlflowClient, params: Params, rescore: Rescore, challenger: ModelVersion, champion: ModelVersion | None
) -> tuple[Verdict, bool]:
    """The gate's verdict, and whether the champion was scored again for it."""
    cfg, on = params.promote, versions.tested_on(challenger)
    if champion is not None and champion.version == challenger.version:
        return Verdict(outcome="unchanged", reason="it is the champion already"), False
    ours = versions.stored_scores(client, challenger, on)
    if ours is None:
        return refused(f"MLflow has no {SCORES} of it; run `m3diff register` again"), False
    if champion is None:
        return judge_first(cfg, ours), False
    theirs = versions.stored_scores(client, champion, on)
    try:
        if theirs is not None and can_be_judged(cfg, ours, theirs):
            return judge(cfg, ours, theirs), False
        return judge(cfg, ours, rescore(client, params, champion, on)), True
    except (CannotScoreAgain, ValueError) as error:
        return refused(
            f"champion {champion.version} has no scores on its test set ({on:.12}) and cannot be "
            f"scored there: {error}. To accept the challenger unseen: {accept(challenger)}"
        ), False


def accept(version: ModelVersion) -> str:
    """The command that makes a version champion without the gate."""
    return f"m3diff rollback --to {version.version} --why 'accepted without a comparison'"


# Fields of a promotion that an entry of the record has itself; the rest of a promotion is its numbers
NAMED = {"outcome": "outcome", "reason": "why", "model": "model", "challenger": "to", "champion": "from_"}


def recorded(client: MlflowClient, repository: Path, decision: Promotion, seen: list[Decision]) -> bool:
    """Record a decision and carry it out; a refusal that is the model's last decision already is not repeated.

    False: the champion was moved meanwhile.
    """
    if decision.outcome == "unchanged":
        return True
    entry = Entry(
        action="promote",
        previous=decision.champion if decision.champion is not None else alias_of(client, decision.model, PREVIOUS),
        gate=json.loads(decision.model_dump_json(exclude=set(NAMED))),
        **{theirs: getattr(decision, ours) for ours, theirs in NAMED.items()},
    )
    if decision.outcome != "refused":
        return make_move(client, repository, entry) is not None
    last = of_registry(client, seen, decision.model)[-1:]
    if [(made.from_, made.to, made.why) for made in last] != [(entry.from_, entry.to, entry.why)]:
        record.append(repository, identified(client, entry))
    return True


# Rollback


def going_back(client: MlflowClient, repository: Path, model: str, to: int | None, why: str) -> Entry:
    now, seen = alias_of(client, model, CHAMPION), record.decisions(repository)
    if now is None and to is None:
        lost = champion_lost(client, seen, model) or f"model {model!r} has no version with the alias {CHAMPION!r}"
        raise DataError(f"there is nothing to roll back: {lost}")
    target = alias_of(client, model, PREVIOUS) if to is None else int(find_version(client, model, str(to)).version)
    if target is None:
        raise DataError(
            f"model {model!r} has no version with the alias {PREVIOUS!r}: no earlier champion is known. Name a version "
            "(`m3diff history` lists them): m3diff rollback --to VERSION"
        )
    if target == now:
        raise DataError(f"version {target} of {model!r} is the champion already")
    line, _ = record.champions(of_registry(client, seen, model), model)
    older = line[: line.index(target)] if target in line else [version for version in line if version != now]
    before = next((version for version in reversed(older) if exists(client, model, version)), None)
    why = why.encode(errors="replace").decode()
    return Entry(action="rollback", model=model, from_=now, to=target, outcome="rolled back", why=why, previous=before)


# Moves of the alias


def make_move(client: MlflowClient, repository: Path, entry: Entry) -> Decision | None:
    """Record a move and make it. None: the champion was another by then, which is recorded too."""
    decision = record.append(repository, identified(client, entry), pending=True)
    return decision if carry_out(client, repository, decision) else None


def settle(client: MlflowClient, repository: Path, model: str) -> Decision | None:
    """Let record and aliases agree: finish the move of a killed process, which is returned, or record it as not done;
    record a champion that was moved by hand or from another clone."""
    left = record.pending(repository)
    finished = left if left is not None and carry_out(client, repository, left) else None
    made = record.moves(of_registry(client, record.decisions(repository), model), model)
    now = alias_of(client, model, CHAMPION)
    if made and made[-1].to != now:
        last, said = made[-1], f"names version {now}" if now is not None else "is gone"
        why = (
            f"the alias {CHAMPION!r} {said}, and no decision of this record moved it there: by hand, or from "
            f"another clone; the last one, {last.number}, made version {last.to} champion"
        )
        noticed = Entry(action="noticed", model=model, from_=last.to, to=now, outcome="moved elsewhere", why=why)
        noticed = noticed.model_copy(update={"previous": alias_of(client, model, PREVIOUS)})
        record.append(repository, identified(client, noticed))
    return finished


def carry_out(client: MlflowClient, repository: Path, decision: Decision) -> bool:
    """Make a recorded move, or what is left of it. False: the champion is neither as before it nor as after it.

    Promotion sets `previous` before `champion`, so a rollback target always exists. Rollback moves `champion` first, to
    stop the bad model sooner.
    """
    model, before, after = decision.model, decision.from_, decision.to
    assert after is not None, f"decision {decision.number} moves nothing"
    now, there = alias_of(client, model, CHAMPION), exists(client, model, after)
    if of_registry(client, [decision], model) and there and now in (before, after):
        aliases = [(CHAMPION, after), (PREVIOUS, decision.previous)]
        for alias, version in reversed(aliases) if decision.action == "promote" else aliases:
            versions.put_alias(client, model, alias, version)
        record.settled(repository)
        return True
    gone = "" if there else f"version {after} is gone; "
    if decision.registry not in (None, made_at(client, model)):
        gone = "the registered model is another one now; "
    number, previous = decision.number, alias_of(client, model, PREVIOUS)
    why = f"decision {number} was not carried out: {gone}it was to follow version {before}, and the champion is {now}"
    about = decision.model_dump(include={"action", "model", "from_", "to", "registry", "versions"})
    record.append(repository, Entry(outcome="not done", why=why, previous=previous, of=number, **about))
    record.settled(repository)
    return False


# Which versions a decision is about: numbers begin again where a registered model or a store is made anew


def identified(client: MlflowClient, entry: Entry) -> Entry:
    """The entry with what tells its versions from others of the same numbers."""
    named = (entry.from_, entry.to, entry.previous)
    there = {int(version.version): version for version in versions.versions_of(client, entry.model)}
    identities = {number: identity_of(there[number]) for number in named if number in there}
    return entry.model_copy(update={"registry": made_at(client, entry.model), "versions": identities})


def identity_of(version: ModelVersion) -> Identity:
    """The version's run, and its content in one word: the same for the same checkpoint, code and length limit in any
    registry; None where register did not make it."""
    parts = [version.tags.get(tag) for tag in IDENTITY]
    content = hashlib.sha256(json.dumps(parts).encode()).hexdigest() if parts[0] else None
    return Identity(run=version.run_id or None, content=content)


def made_at(client: MlflowClient, model: str) -> int | None:
    """When MLflow made the registered model, in ms: with it version numbers begin. None: there is none."""
    found = versions.registered(client, model)
    return int(found.creation_timestamp) if found else None


def of_registry(client: MlflowClient, found: list[Decision], model: str) -> list[Decision]:
    """The decisions about the versions that MLflow has today. Left out are those about others of the same numbers: of
    a registered model that was there before this one, or of runs that a store put back to a backup has not. Early
    releases recorded neither: theirs are of today's if they are younger."""
    if (registry := made_at(client, model)) is None:
        return []
    runs = {int(version.version): version.run_id for version in versions.versions_of(client, model)}

    def is_ours(decision: Decision) -> bool:
        if decision.registry is None:
            return calendar.timegm(time.strptime(decision.at, "%Y-%m-%dT%H:%M:%SZ")) >= registry // 1000
        identities = decision.versions.items()
        return decision.registry == registry and all(runs.get(n, named.run) == named.run for n, named in identities)

    return [decision for decision in found if decision.model == model and is_ours(decision)]


def champion_lost(client: MlflowClient, found: list[Decision], model: str) -> str | None:
    """The remedy where the record knows champions of this registry, but the alias is gone; None where it is not."""
    line, _ = record.champions(of_registry(client, found, model), model)
    if not line or alias_of(client, model, CHAMPION) is not None:
        return None
    said = f"the alias {CHAMPION!r} is gone from model {model!r}, whose champion was version {line[-1]}"
    if (kept := next((version for version in reversed(line) if exists(client, model, version)), None)) is None:
        return f"{said}; no champion of before is left in MLflow"
    return f"{said}; set it again: m3diff rollback --to {kept} --why 'the alias was gone'"
