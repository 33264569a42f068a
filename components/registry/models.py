"""The versions of the registered model: aliases, scores, size and origin of each: `m3diff models`."""

import time
from collections.abc import Iterable, Iterator, Sequence

from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient
from pydantic import BaseModel, ConfigDict

from m3diff.registry import tracking
from m3diff.registry.lineage import FLOW_RUN
from m3diff.registry.prune import aliases, all_versions, in_words, stored_bytes
from m3diff.stages.register.params import Register

NONE = "–"


class Listed(BaseModel):
    """A version. `scores` as the scorers give them; one that its run has not is left out."""

    model_config = ConfigDict(frozen=True)

    version: int
    aliases: list[str]
    registered: str  # UTC
    scores: dict[str, float]
    weights_bytes: int  # as MLflow keeps them
    hours: dict[str, float]  # of training, by device
    commit: str | None
    dirty: bool  # whether parameters or code differed from the commit
    run: str | None  # MLflow's name of the training's run
    flow_run: str | None
    checkpoint: str | None  # DVC's hash


def models(cfg: Register, protocol: str, scores: Sequence[str]) -> list[Listed]:
    """Every version, newest first.

    Args:
        protocol: "<dataset>/<protocol>" that the scores are of.

    Raises:
        TrackingUnavailableError: MLflow does not answer.
    """
    with tracking.connected(cfg.tracking_uri) as client:
        versions = all_versions(client, cfg.model_name)
        named = aliases(client, versions)
        return [listed(client, one, sorted(named.get(int(one.version), [])), protocol, scores) for one in versions]


def listed(
    client: MlflowClient, version: ModelVersion, named: list[str], protocol: str, scores: Sequence[str]
) -> Listed:
    tags = version.tags
    try:
        run = client.get_run(version.run_id) if version.run_id else None
    except MlflowException:  # a person removed it
        run = None
    found = run.data.metrics if run else {}
    stamp = time.strftime("%Y-%m-%d %H:%M", time.gmtime(version.creation_timestamp / 1000))
    return Listed(
        version=int(version.version),
        aliases=named,
        registered=stamp,
        scores={name: found[key] for name in scores if (key := f"{protocol}/{name}") in found},
        weights_bytes=stored_bytes(client, version),
        hours={tag.removeprefix("hours."): float(value) for tag, value in tags.items() if tag.startswith("hours.")},
        commit=tags.get("git.commit"),
        dirty=tags.get("git.dirty") == "true",
        run=run.info.run_name if run else None,
        flow_run=tags.get(FLOW_RUN),
        checkpoint=tags.get("dvc.checkpoint"),
    )


def table(found: Iterable[Listed], protocol: str, scores: Sequence[str]) -> str:
    """A line for each version; scores of the protocol, times 100."""
    head = ("version", "aliases", "registered", *scores, "weights", "commit", "run")
    rows = [head, *(tuple(cells(one, scores)) for one in found)]
    if len(rows) == 1:
        return "no version is registered; `m3diff register` does, after `dvc repro`"
    widths = [max(len(row[place]) for row in rows) for place in range(len(head))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "\n".join([*lines, f"\nscores on {protocol}, times 100; the chain behind a version: m3diff lineage VERSION"])


def cells(one: Listed, scores: Sequence[str]) -> Iterator[str]:
    yield str(one.version)
    yield ", ".join(one.aliases) or NONE
    yield one.registered
    for name in scores:
        yield NONE if (value := one.scores.get(name)) is None else f"{100 * value:.1f}"
    yield in_words(one.weights_bytes)
    yield f"{one.commit[:8]}{'+' if one.dirty else ''}" if one.commit else NONE
    yield one.run or NONE
