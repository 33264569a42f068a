"""The pipeline, only when data or parameters changed: `prefect deployment run m3diff/retrain`, or its schedule."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prefect import flow
from prefect.states import State

from flows import dvc, notices
from flows.pipeline import run_pipeline
from m3diff.provenance.dvc import LOCK, Lock
from m3diff.provenance.guard import require_own_code
from m3diff.registry import tracking
from m3diff.registry.versions import CHALLENGER, find_alias
from m3diff.settings.tree import Params


@flow(name="m3diff", persist_result=False, on_failure=[notices.failed], on_crashed=[notices.failed])
def retrain(
    ref: str = "HEAD",
    overrides: list[str] | None = None,
    reason: str = "",
    warm_start: bool = False,
    replay: float = 0.25,
) -> State:
    """Look for changes; none: say so and end. Any: run the whole pipeline.

    Args:
        ref: what to run; what is not committed is left out. With HEAD go the data that `m3diff/watch` found since.
        overrides: parameters of this run alone, such as `train.epochs=6`.
        reason: why it was asked for; by itself no reason to train.
        warm_start: begin with the champion instead of the base, where data changed since it was trained.
        replay: with `warm_start`, the share of the pairs of unchanged datasets that trains again.
    """
    require_own_code()
    return run_pipeline(
        ref,
        overrides or [],
        dirty=False,
        reason=reason,
        worthwhile=look_for_changes,
        data=ref == "HEAD",
        replay=replay if warm_start else None,
    )


def look_for_changes(status: dict[str, Any], params: Params) -> list[str]:
    """Why to train again: changed data and parameters, and what was never registered. Changed code alone is no reason,
    nor is section `compute`.

    Args:
        status: DVC's, by stage.
    """
    found = []
    for stage, entries in status.items():
        for entry in [entry for entry in entries if stage != "code" and isinstance(entry, dict)]:  # else the graph
            for kind, items in entry.items():
                for path, how in items.items():
                    if Path(path).parts[0] not in dvc.CODE:
                        found.append(f"{stage}: {kind}: {path} {', '.join(how) if isinstance(how, dict) else how}")
    return [*found, *unregistered(params)]


def unregistered(params: Params) -> Iterator[str]:
    """Why the newest registered version is not what `dvc.lock` holds."""
    name = params.register_.model_name
    checkpoint = Lock().hashes(params.paths.model / "checkpoint").get("train outs") if LOCK.is_file() else None
    if checkpoint is None:
        yield "nothing was trained yet"
        return
    with tracking.connected(params.register_.tracking_uri) as client:
        version = find_alias(client, name, CHALLENGER)
    if version is None:
        yield f"no version of {name} is registered yet"
    elif version.tags.get("dvc.checkpoint") != checkpoint:
        yield f"{name} version {version.version} is another checkpoint than the one in {LOCK}"
