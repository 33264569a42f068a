"""Promote: the challenger becomes champion where it beats the champion's score on the same test set.

Every decision is appended to the registered model's tags (`audit.0001`, ...), since MLflow keeps no history of aliases.
"""

import json
import time
from typing import Any, Literal

from mlflow.entities.model_registry import ModelVersion
from mlflow.tracking import MlflowClient
from pydantic import BaseModel, ConfigDict

from components import tracking
from components.params import Params
from components.records import DataError
from components.register.params import Register
from components.register.stage import CHALLENGER, run_of, set_alias

CHAMPION, PREVIOUS = "champion", "previous"
Outcome = Literal["promoted", "first", "refused", "unchanged"]


class Promotion(BaseModel):
    """A decision of the gate. `first`: accepted because there was no champion to beat. `refused` is no failure."""

    model_config = ConfigDict(frozen=True)

    outcome: Outcome
    model: str
    challenger: int
    champion: int | None  # before the decision
    metric: str
    challenger_score: float | None
    champion_score: float | None
    reason: str

    @property
    def champion_now(self) -> int | None:
        return self.challenger if self.outcome in ("promoted", "first") else self.champion

    def __str__(self) -> str:
        return f"{self.model} version {self.challenger} {self.outcome}: {self.reason}"


def promote(params: Params) -> Promotion:
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
        decision = decide(client, params.register_, challenger, champion)
        if decision.outcome != "unchanged":
            append_audit(client, decision)
        if decision.champion_now == decision.challenger != decision.champion:
            if champion is not None:
                set_alias(client, name, PREVIOUS, champion)
            set_alias(client, name, CHAMPION, challenger)
    return decision


def find_alias(client: MlflowClient, name: str, alias: str) -> ModelVersion | None:
    models = client.search_registered_models(f"name = '{name}'")
    version = models[0].aliases.get(alias) if models else None
    return client.get_model_version(name, str(version)) if version is not None else None


def decide(client: MlflowClient, cfg: Register, challenger: ModelVersion, champion: ModelVersion | None) -> Promotion:
    new = metric_of(client, challenger, cfg.gate_metric)
    old = metric_of(client, champion, cfg.gate_metric) if champion is not None else None
    outcome, reason = apply_gate(cfg, challenger, champion, new, old)
    return Promotion(
        outcome=outcome,
        model=challenger.name,
        challenger=int(challenger.version),
        champion=int(champion.version) if champion is not None else None,
        metric=cfg.gate_metric,
        challenger_score=new,
        champion_score=old,
        reason=reason,
    )


def apply_gate(
    cfg: Register, challenger: ModelVersion, champion: ModelVersion | None, new: float | None, old: float | None
) -> tuple[Outcome, str]:
    """The gate: greater is better, and only scores of one test set are compared."""
    metric = cfg.gate_metric
    if champion is not None and champion.version == challenger.version:
        return "unchanged", "it is the champion already"
    if new is None:
        return "refused", f"it has no {metric}"
    if champion is None:
        return "first", f"there was no champion; {metric} {new:.4f}"
    if test_set(champion) != test_set(challenger):
        return "refused", (
            f"champion {champion.version} was scored on another test set ({test_set(champion):.12}, here "
            f"{test_set(challenger):.12}) and must be evaluated on this one first; to accept the challenger unseen, "
            f"take the alias {CHAMPION!r} away on the model's MLflow page and promote again"
        )
    if old is not None and new <= old + cfg.min_gain:
        return (
            "refused",
            f"{metric} {new:.4f} does not exceed champion {champion.version}'s {old:.4f} + {cfg.min_gain:g}",
        )
    return "promoted", f"{metric} {new:.4f}, champion {champion.version} had {'none' if old is None else f'{old:.4f}'}"


def metric_of(client: MlflowClient, version: ModelVersion, metric: str) -> float | None:
    return client.get_run(run_of(version)).data.metrics.get(metric)


def test_set(version: ModelVersion) -> str:
    return version.tags.get("test_set.sha256", "unknown")


def append_audit(client: MlflowClient, decision: Promotion) -> None:
    """Append the decision with its time, unless it is the last one again."""
    tags = client.get_registered_model(decision.model).tags
    trail = sorted(tag for tag in tags if tag.startswith("audit."))
    entry: dict[str, Any] = decision.model_dump()
    if trail and {**json.loads(tags[trail[-1]]), "at": None} == {**entry, "at": None}:
        return
    entry["at"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    client.set_registered_model_tag(decision.model, f"audit.{len(trail) + 1:04d}", json.dumps(entry))
