"""Late runs of a deployment are one run: the first that starts cancels the others that are due and ask for the same.
And a run that crashes is started again by itself (`flows/worker.py`), but not for ever."""

import inspect
from collections.abc import Mapping
from datetime import UTC, datetime
from itertools import takewhile
from pathlib import Path
from typing import Any

import httpx
from prefect import get_run_logger
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterDeploymentId,
    FlowRunFilterExpectedStartTime,
    FlowRunFilterState,
    FlowRunFilterStateName,
)
from prefect.client.schemas.objects import FlowRun
from prefect.context import FlowRunContext
from prefect.exceptions import PrefectException
from prefect.flows import Flow
from prefect.states import Cancelled, State

from flows import notices
from m3diff.records.errors import DataError

MOST_CRASHES = 3
WAITING = ["Scheduled", "Late", "AwaitingConcurrencySlot"]
"""The states of a run that did not begin. AwaitingRetry is not among them: a person or Prefect asked for that one."""


def deployed_run() -> FlowRun | None:
    """The flow run that this is, where a deployment made it; None for a flow that was called as a function."""
    context = FlowRunContext.get()
    run = context.flow_run if context else None
    return run if run and run.deployment_id else None


def count_crashes(checkout: Path) -> None:
    """Tell of the crash that this run was started again after; so often in a row, it is the run's own fault.

    Raises:
        DataError: it crashed MOST_CRASHES times in a row, with nothing else in between.
    """
    run = deployed_run()
    if run is None:
        return
    try:
        with get_client(sync_client=True) as client:
            ended = [state for state in client.read_flow_run_states(run.id) if state.is_final()]
    except (httpx.HTTPError, PrefectException) as error:
        get_run_logger().warning(f"crashes of this run were not counted: {type(error).__name__}: {error}")
        return
    crashes = [*takewhile(lambda state: state.is_crashed(), reversed(ended))]
    if len(crashes) >= MOST_CRASHES:
        raise DataError(
            f"crashed {len(crashes)} times in a row, the last time: {crashes[0].message}; look at services/worker.log "
            "and at the memory of this machine, then run it again"
        )
    if crashes:
        assert (context := FlowRunContext.get()) is not None
        assert context.flow is not None
        notices.tell_of_end(context.flow.fn.__name__, run, crashes[0], get_run_logger().warning, checkout)


def coalesce_late() -> list[str]:
    """Cancel the other runs of this deployment that are due by now and ask for the same as this one.

    Call it before anything is read, so that this run sees what those would have seen. That the server does not answer
    is logged: the others then follow one by one, and find nothing to do.

    Returns:
        the reasons that they had.
    """
    run = deployed_run()
    if run is None:
        return []
    reasons, log = [], get_run_logger()
    try:
        for other in due(run):
            if take_over(run, other):
                log.info(
                    f"flow run {other.name}, due at {other.expected_start_time}, is coalesced: this one does its work"
                )
                reasons.append(other.parameters.get("reason") or "")
    except (httpx.HTTPError, PrefectException) as error:
        log.warning(f"late runs were not coalesced: {type(error).__name__}: {error}")
    return [text for text in dict.fromkeys(reasons) if text]


def due(run: FlowRun) -> list[FlowRun]:
    """The other runs of the deployment of `run` that wait, are due, and ask for the same."""
    context = FlowRunContext.get()
    assert context is not None
    assert context.flow is not None
    assert run.deployment_id is not None
    condition = FlowRunFilter(
        deployment_id=FlowRunFilterDeploymentId(any_=[run.deployment_id]),
        state=FlowRunFilterState(name=FlowRunFilterStateName(any_=WAITING)),
        expected_start_time=FlowRunFilterExpectedStartTime.model_validate({"before_": datetime.now(UTC)}),
    )
    with get_client(sync_client=True) as client:
        found = client.read_flow_runs(flow_run_filter=condition)
    ours = asked(context.flow, run.parameters)
    return [other for other in found if other.id != run.id and asked(context.flow, other.parameters) == ours]


def asked(flow: Flow[..., Any], parameters: Mapping[str, Any]) -> dict[str, Any]:
    """What a run is asked to do, its reason aside; what it does not say is the flow's default."""
    defaults = {name: value.default for name, value in inspect.signature(flow.fn).parameters.items()}
    return {name: value or None for name, value in (defaults | dict(parameters)).items() if name != "reason"}


def take_over(run: FlowRun, other: FlowRun) -> bool:
    """Cancel `other`; false where it began meanwhile."""
    state: State[Any] = Cancelled(name="Coalesced", message=f"flow run {run.name} ({run.id}) does this work")
    with get_client(sync_client=True) as client:
        return client.set_flow_run_state(other.id, state).status.value == "ACCEPT"
