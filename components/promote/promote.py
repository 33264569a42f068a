"""Promote: the challenger becomes champion where it surely beats the champion on the same test set.

Every decision is appended to the registered model's tags (`audit.0001`, ...), since MLflow keeps no history of aliases.
"""

import json
import time
from typing import Any

import pyarrow as pa
from mlflow.entities.model_registry import ModelVersion
from mlflow.tracking import MlflowClient

from components import tracking
from components.params import Params
from components.promote.gate import Verdict, can_be_judged, judge, judge_first
from components.promote.versions import CannotScoreAgain, score_again, stored_scores, test_set
from components.records import DataError
from components.register.stage import CHALLENGER, SCORES, find_alias, set_alias

CHAMPION, PREVIOUS = "champion", "previous"


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


def promote(params: Params, version: int | None = None) -> Promotion:
    """Decide on the challenger and move the aliases.

    Raises:
        DataError: nothing is registered.
        TrackingUnavailableError: MLflow does not answer.
    """
    name = params.register_.model_name
    with tracking.connected(params.register_.tracking_uri) as client:
        challenger, champion = (find_alias(client, name, alias) for alias in (CHALLENGER, CHAMPION))
        if challenger is None:
            raise DataError(f"model {name!r} has no version with the alias {CHALLENGER!r}; run `m3diff register` first")
        decision = decide(client, params, challenger, champion)
        if decision.outcome != "unchanged":
            append_audit(client, decision)
        if decision.champion_now == decision.challenger != decision.champion:
            if champion is not None:
                set_alias(client, name, PREVIOUS, champion)
            set_alias(client, name, CHAMPION, challenger)
    return decision


def decide(client: MlflowClient, params: Params, challenger: ModelVersion, champion: ModelVersion | None) -> Promotion:
    verdict, scored_again = verdict_on(client, params, challenger, champion)
    return Promotion(
        **dict(verdict),
        model=challenger.name,
        challenger=int(challenger.version),
        champion=int(champion.version) if champion is not None else None,
        scored_again=scored_again,
        **params.promote.model_dump(include={"protocol", "metric", "min_gain", "confidence"}),
    )


def verdict_on(
    client: MlflowClient, params: Params, challenger: ModelVersion, champion: ModelVersion | None
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
        theirs, scored_again = champion_scores(client, params, champion, ours, test_set(challenger))
        return judge(cfg, ours, theirs), scored_again
    except (CannotScoreAgain, ValueError) as error:
        return refused(
            f"champion {champion.version} has no scores on its test set ({test_set(challenger):.12}) and cannot be "
            f"scored there: {error}. To accept the challenger unseen, take the alias {CHAMPION!r} away on the model's "
            "MLflow page and promote again"
        ), False


def champion_scores(
    client: MlflowClient, params: Params, champion: ModelVersion, ours: pa.Table, on: str
) -> tuple[pa.Table, bool]:
    """The champion's scores on the test set `on`, and whether they were made now."""
    stored = stored_scores(client, champion, on)
    if stored is not None and can_be_judged(params.promote, ours, stored):
        return stored, False
    return score_again(client, params, champion, on), True


def refused(reason: str) -> Verdict:
    return Verdict(outcome="refused", reason=reason)


def append_audit(client: MlflowClient, decision: Promotion) -> None:
    """Append the decision with its time, unless it is the last one again."""
    tags = client.get_registered_model(decision.model).tags
    trail = sorted(tag for tag in tags if tag.startswith("audit."))
    entry: dict[str, Any] = decision.model_dump()
    if trail and told(json.loads(tags[trail[-1]])) == told(entry):
        return
    entry["at"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    client.set_registered_model_tag(decision.model, f"audit.{len(trail) + 1:04d}", json.dumps(entry))


def told(entry: dict[str, Any]) -> dict[str, Any]:
    """What makes a decision: not when it was made, nor when the champion was scored."""
    return {key: value for key, value in entry.items() if key not in ("at", "scored_again")}
