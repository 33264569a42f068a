"""The pipeline, only when data or parameters changed: `prefect deployment run m3diff/retrain`, or its schedule."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prefect import flow, get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.states import Completed, State

from components import tracking
from components.params import Params, load_params
from components.register.lineage import LOCK, Lock
from components.register.stage import CHALLENGER, find_alias
from flows import dvc
from flows.tasks import PARAMS, run_pipeline, worth_retrying

CODE = "components"


@flow(name="m3diff", persist_result=False)
def retrain() -> State:
    """Look for changes; none: say so and end. Any: run the whole pipeline."""
    reasons = look_for_changes()
    if not reasons:
        return Completed(
            name="Skipped", message="neither the data nor the parameters changed since the last registration"
        )
    for reason in reasons:
        get_run_logger().info(reason)
    return run_pipeline()


@task(cache_policy=NO_CACHE, retries=3, retry_delay_seconds=[5, 20, 60], retry_condition_fn=worth_retrying)
def look_for_changes() -> list[str]:
    """Why to train again: what DVC calls changed, and what was never registered."""
    return [*changes(dvc.status()), *unregistered(load_params(PARAMS))]


def changes(status: dict[str, Any]) -> Iterator[str]:
    """The changed data and parameters in `dvc status`; changed code alone is no reason, nor is section `compute`."""
    for stage, entries in status.items():
        for entry in entries:
            if not isinstance(entry, dict):
                continue  # "changed command": the graph, which is code
            for kind, items in entry.items():
                for path, how in items.items():
                    if Path(path).parts[0] != CODE:
                        what = f"{path} {', '.join(how)}" if isinstance(how, dict) else f"{path} {how}"
                        yield f"{stage}: {kind}: {what}"


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
