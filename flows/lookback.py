"""What no flow run can tell of itself: that its host was killed, and that nothing ended well for days."""

import os
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import UUID

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import (
    DeploymentFilter,
    DeploymentFilterName,
    FlowFilter,
    FlowFilterName,
    FlowRunFilter,
    FlowRunFilterEndTime,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import StateType
from prefect.client.schemas.sorting import FlowRunSort
from prefect.exceptions import PrefectException

from flows import notices
from m3diff.settings.section import ParamsError

SILENCE = "M3DIFF_SILENCE_DAYS"
OURS = FlowFilter(name=FlowFilterName(any_=["m3diff"]))
TRAINS = DeploymentFilter(name=DeploymentFilterName(any_=["full", "retrain"]))
CRASHED_DAYS = 7  # older crashes are no news


def look_back(checkout: Path, log: Callable[[str], None]) -> None:
    """Tell of crashed runs and of silence. That the server does not answer is logged.

    Raises:
        ParamsError: the number of days is none.
    """
    days = silence_days()
    now = datetime.now(UTC)
    try:
        with get_client(sync_client=True) as client:
            tell_of_crashes(client, now, checkout, log)
            if days:
                tell_of_silence(client, now, days, checkout, log)
    except (httpx.HTTPError, PrefectException) as error:
        log(f"warning: earlier runs were not looked at: {type(error).__name__}: {error}")


def silence_days() -> float | None:
    """After how many days without a run that ended well somebody is told; None: never.

    Raises:
        ParamsError: no number, or none above 0.
    """
    text = os.environ.get(SILENCE, "").strip()
    if not text:
        return None
    try:
        days = float(text)
    except ValueError:
        days = 0.0
    if not 0 < days < 36500:
        raise ParamsError(f"{SILENCE}={text!r}: expected a number of days above 0, such as 3")
    return days


def tell_of_crashes(client: SyncPrefectClient, now: datetime, checkout: Path, log: Callable[[str], None]) -> None:
    crashed = FlowRunFilter(
        state=FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.CRASHED])),
        end_time=FlowRunFilterEndTime.model_validate({"after_": now - timedelta(days=CRASHED_DAYS)}),
    )
    names: dict[UUID | None, str] = {found.id: found.name for found in client.read_deployments(flow_filter=OURS)}
    for run in client.read_flow_runs(flow_filter=OURS, flow_run_filter=crashed, sort=FlowRunSort.END_TIME_DESC):
        what = names.get(run.deployment_id)
        if what is not None and run.state is not None:
            notices.tell_of_end(what, run, run.state, log, checkout)


def tell_of_silence(
    client: SyncPrefectClient, now: datetime, days: float, checkout: Path, log: Callable[[str], None]
) -> None:
    """A run that ended well is one that completed: Completed, Rejected or Skipped. Before the first one, time counts
    from the deployment."""
    done = FlowRunFilter(state=FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.COMPLETED])))
    runs = client.read_flow_runs(
        flow_filter=OURS, deployment_filter=TRAINS, flow_run_filter=done, sort=FlowRunSort.END_TIME_DESC, limit=1
    )
    deployed = client.read_deployments(flow_filter=OURS, deployment_filter=TRAINS)
    times = [run.end_time for run in runs] or [found.created for found in deployed]
    since = min((time for time in times if time), default=None)
    if since is None or now - since < timedelta(days=days):
        return
    text = (
        f"No run of m3diff/full or m3diff/retrain ended well since {since:%Y-%m-%d %H:%M} UTC, for "
        f"{(now - since).days} days. Look whether the worker is up (`make up`) and the schedule is active "
        "(`prefect deployment ls`), and at the runs that failed (`prefect flow-run ls`)."
    )
    notices.tell(f"silence since {since.isoformat()}", "m3diff: nothing ran well for days", text, log, checkout)
