"""Promote: a version becomes champion where it surely beats the champion on the same test set.

Every decision is in the record (`components/registry/decisions.py`), since MLflow keeps no history of aliases. The
champion may be moved while a version is judged: then it is judged again, against the champion of then.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
from mlflow.entities.model_registry import ModelVersion
from mlflow.tracking import MlflowClient

from m3diff.records.errors import DataError
from m3diff.registry import tracking
from m3diff.registry.decisions import Decision, Entry, alone, append, catch_up, decisions, faults, share, warn
from m3diff.registry.gate import Verdict, can_be_judged, judge, judge_first
from m3diff.registry.known import agree, let_know
from m3diff.registry.moves import (
    CHAMPION,
    PREVIOUS,
    alias_of,
    champion_lost,
    check_exists,
    identified,
    make_move,
    of_registry,
    rolled_back_by,
    settle,
)
from m3diff.registry.versions import CHALLENGER, SCORES, CannotScoreAgain, stored_scores, test_set
from m3diff.settings.tree import Params

ATTEMPTS = 5  # to judge a version, each time against another champion


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

    @property
    def champion_now(self) -> int | None:
        return self.challenger if self.outcome in ("promoted", "first") else self.champion

    def __str__(self) -> str:
        return f"{self.model} version {self.challenger} {self.outcome}: {self.reason}"


Rescore = Callable[[MlflowClient, Params, ModelVersion, str], pa.Table]
"""Scores a version on a test set, given by its sha256; `components/commands/score_again.py` has the only one."""


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
    with alone(repository, "promote"), tracking.connected(params.register_.tracking_uri) as client:
        catch_up(repository)
        for fault in faults(repository):
            warn(f"{fault}; see `m3diff history`")
        decision = next(
            filter(None, (attempt(client, params, rescore, version, again, repository) for _ in range(ATTEMPTS))), None
        )
        let_know(client, repository, params.register_.model_name)
    share(repository)
    if decision is None:
        raise BlockingIOError(
            f"the champion was moved {ATTEMPTS} times while the version was judged, see `m3diff history`; try again"
        )
    return decision


def attempt(
    client: MlflowClient, params: Params, rescore: Rescore, version: int | None, again: bool, repository: Path
) -> Promotion | None:
    """Judge once. None: the champion was moved meanwhile, or something else decided."""
    name = params.register_.model_name
    with alone(repository, "record"):
        agree(client, repository, name)
        finished = settle(client, repository, name)
        challenger = asked_for(client, name, version)
        if finished is not None and finished.action == "promote" and finished.to == int(challenger.version):
            return promotion_of(finished)
        seen, known = decisions(repository), alias_of(client, name, CHAMPION)
    champion = client.get_model_version(name, str(known)) if known is not None else None
    back = rolled_back_by(client, seen, challenger)
    if back is not None and not again:
        decision = promotion(params, challenger, champion, refused(rolled_back(back)))
    elif lost := champion_lost(client, seen, name):
        unseen = f"; or make this version champion without a comparison: {accept(challenger)}"
        decision = promotion(params, challenger, None, refused(f"there is nothing to compare with: {lost}{unseen}"))
    else:
        verdict, scored_again = verdict_on(client, params, rescore, challenger, champion)
        decision = promotion(params, challenger, champion, verdict, scored_again)
    with alone(repository, "record"):
        if alias_of(client, name, CHAMPION) != known or decisions(repository) != seen:
            return None
        return decision if recorded(client, repository, decision, seen) else None


def asked_for(client: MlflowClient, name: str, version: int | None) -> ModelVersion:
    """The version of a number, or the challenger."""
    if version is not None:
        check_exists(client, name, version)
        return client.get_model_version(name, str(version))
    challenger = alias_of(client, name, CHALLENGER)
    if challenger is None:
        raise DataError(f"model {name!r} has no version with the alias {CHALLENGER!r}; run `m3diff register` first")
    return client.get_model_version(name, str(challenger))


def accept(version: ModelVersion) -> str:
    """The command that makes a version champion without the gate."""
    return f"m3diff rollback --to {version.version} --why 'accepted without a comparison'"


def rolled_back(decision: Decision) -> str:
    """Why a version that was taken back is not promoted again."""
    said = f" ({decision.why})" if decision.why else ""
    by = f"{decision.who} rolled it back" if decision.action == "rollback" else "it was found rolled back"
    return f"{by} at {decision.at}{said}; to let the gate judge it all the same: m3diff promote --again"


def promotion(
    params: Params,
    challenger: ModelVersion,
    champion: ModelVersion | None,
    verdict: Verdict,
    scored_again: bool = False,
) -> Promotion:
    return Promotion(
        **dict(verdict),
        model=challenger.name,
        challenger=int(challenger.version),
        champion=int(champion.version) if champion is not None else None,
        scored_again=scored_again,
        **params.promote.model_dump(include={"protocol", "metric", "min_gain", "confidence"}),
    )


NAMED = {"outcome": "outcome", "reason": "why", "model": "model", "challenger": "to", "champion": "from_"}
"""What an entry of the record names itself; the rest of a decision of the gate is its numbers."""


def entry_of(client: MlflowClient, decision: Promotion) -> Entry:
    previous = decision.champion if decision.champion is not None else alias_of(client, decision.model, PREVIOUS)
    return Entry(
        action="promote",
        previous=previous,
        gate=json.loads(decision.model_dump_json(exclude=set(NAMED))),
        **{theirs: getattr(decision, ours) for ours, theirs in NAMED.items()},
    )


def promotion_of(decision: Decision) -> Promotion:
    """A decision of the gate, as the record has it."""
    return Promotion(**decision.gate, **{ours: getattr(decision, theirs) for ours, theirs in NAMED.items()})


def recorded(client: MlflowClient, repository: Path, decision: Promotion, seen: list[Decision]) -> bool:
    """Record a decision and carry it out; a refusal that is the model's last decision already is not repeated.

    False: the champion was moved meanwhile.
    """
    if decision.outcome == "unchanged":
        return True
    entry = entry_of(client, decision)
    if decision.champion_now == decision.challenger:
        return make_move(client, repository, entry) is not None
    ours = of_registry(client, seen, decision.model)
    if not ours or told(ours[-1]) != told(entry):
        append(repository, identified(client, entry))
    return True


def told(entry: Entry) -> tuple[object, ...]:
    """What makes a decision: not when it was made, nor when the champion was scored."""
    numbers = {key: value for key, value in entry.gate.items() if key != "scored_again"}
    return entry.action, entry.from_, entry.to, entry.outcome, entry.why, numbers


def verdict_on(
    client: MlflowClient, params: Params, rescore: Rescore, challenger: ModelVersion, champion: ModelVersion | None
) -> tuple[Verdict, bool]:
    """The gate's verdict, and whether the champion was scored again for it."""
    cfg = params.promote
    if champion is not None and champion.version == challenger.version:
        return Verdict(outcome="unchanged", reason="it is the champion already"), False
    ours = stored_scores(client, challenger, test_set(challenger))
    if ours is None:
        return refused(f"MLflow has no {SCORES} of it; run `m3diff register` again"), False
    if champion is None:
        return judge_first(cfg, ours), False
    try:
        theirs, scored_again = champion_scores(client, params, rescore, champion, ours, test_set(challenger))
        return judge(cfg, ours, theirs), scored_again
    except (CannotScoreAgain, ValueError) as error:
        return refused(
            f"champion {champion.version} has no scores on its test set ({test_set(challenger):.12}) and cannot be "
            f"scored there: {error}. To accept the challenger unseen: {accept(challenger)}"
        ), False


def champion_scores(
    client: MlflowClient, params: Params, rescore: Rescore, champion: ModelVersion, ours: pa.Table, on: str
) -> tuple[pa.Table, bool]:
    """The champion's scores on the test set `on`, and whether they were made now."""
    try:
        stored = stored_scores(client, champion, on)
    except DataError as damaged:
        print(f"promote: champion {champion.version}: {damaged}", flush=True)
        stored = None
    if stored is not None and can_be_judged(params.promote, ours, stored):
        return stored, False
    return rescore(client, params, champion, on), True


def refused(reason: str) -> Verdict:
    return Verdict(outcome="refused", reason=reason)
