"""Start a Prefect worker that restarts the flow runs that crashed on this machine.

`python -m flows.worker worker start --pool m3diff ...` accepts the options of `prefect worker start`.

Prefect detects crashes by events, and an event that is lost because the server was killed is never sent again.
Therefore, whenever this worker reports to the server, it compares the runs that the server considers running with the
processes on this machine, and restarts crashed runs.
"""

import abc
import warnings
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from itertools import takewhile
from typing import Any
from uuid import UUID

import anyio.to_thread
import httpx
from prefect.cli import app
from prefect.client.schemas.filters import FlowFilter, FlowFilterName, FlowRunFilter
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.client.schemas.responses import WorkerFlowRunResponse
from prefect.client.schemas.sorting import FlowRunSort
from prefect.events.filters import EventFilter
from prefect.exceptions import PrefectException
from prefect.states import AwaitingRetry, Cancelled, Crashed, Failed, State
from prefect.utilities.dispatch import register_type
from prefect.workers.process import ProcessWorker

from flows import PREFECT_FLOW_RUN_VARIABLE, alerts, group_processes_by
from flows.runtime import prepare
from m3diff.records.errors import format_count

MAX_START_S = 60  # maximum time from when a worker takes a run until the run's process starts, in seconds
MAX_SILENCE_S = 90  # maximum time between two heartbeats of a run, in seconds
FLOW_FILTER = FlowFilter(name=FlowFilterName(any_=["m3diff"]))

# Deployments whose runs are restarted after a recent crash. A run that crashes three times in a row fails instead,
# because the cause is probably the run itself
RESTARTED = ("full", "retrain")
RESTART_DAYS = 1
MAX_CRASHES = 3

CRASHED = StateType.CRASHED
PENDING = StateType.PENDING
CANCELLING = StateType.CANCELLING


# Prefect 3.8 registers each worker class when the class is defined. The base class abc.ABC prevents this, so that only
# `main` registers the worker
class Worker(ProcessWorker, abc.ABC):
    """A worker that keeps running while the server is down, and restarts crashed runs.

    Prefect's own worker exits if the server does not respond, or if it gets a run that is already in progress.
    """

    async def get_and_submit_flow_runs(self) -> list[FlowRun]:
        """Submit the runs that are due. Submit nothing while the server does not respond."""
        try:
            return await super().get_and_submit_flow_runs()
        except httpx.HTTPError as error:
            self._logger.warning(f"could not ask the server for runs: {type(error).__name__}: {error}")
            return []

    async def _get_scheduled_flow_runs(self) -> list[WorkerFlowRunResponse]:
        """Return the runs that are due. A run is left out while a process of an earlier attempt is still running."""
        responses = await super()._get_scheduled_flow_runs()
        busy_ids = await self.ids_in_progress(response.flow_run for response in responses)
        for id_ in busy_ids:
            self._logger.info(f"flow run {id_} waits until the processes of its earlier attempt have ended")
        return [response for response in responses if response.flow_run.id not in busy_ids]

    async def sync_with_backend(self) -> None:
        """Report to the server and restart crashed runs. After the first report, server errors are only logged."""
        try:
            await super().sync_with_backend()
            await self.look_after_runs()
        except (httpx.HTTPError, PrefectException) as error:
            if not self.is_setup:
                raise
            self._logger.warning(f"could not report to the server: {type(error).__name__}: {error}")

    async def ids_in_progress(self, runs: Iterable[FlowRun]) -> set[UUID]:
        """Return the ids of the runs that this worker has taken or that have a process on this machine."""
        ids = {str(run.id): run.id for run in runs}
        if not ids:
            return set()
        processes = await anyio.to_thread.run_sync(group_processes_by, PREFECT_FLOW_RUN_VARIABLE)
        ids_with_process = {ids[id_] for id_ in processes if id_ in ids}
        taken_ids = set(ids.values()) & self._taken_ids()
        return ids_with_process | taken_ids

    def _taken_ids(self) -> set[Any]:
        return set(self.limiter.statistics().borrowers)

    async def look_after_runs(self) -> None:
        """Set runs whose process is gone to Crashed, and restart crashed runs."""
        # Read this before the runs, so that a run that ends in the meantime does not count as lost
        taken_ids = self._taken_ids()
        deployments = await self.client.read_deployments(flow_filter=FLOW_FILTER)
        names: dict[UUID | None, str] = {deployment.id: deployment.name for deployment in deployments}
        states = {"type": {"any_": [PENDING, StateType.RUNNING, CANCELLING, CRASHED]}}
        runs = await self.client.read_flow_runs(
            flow_filter=FLOW_FILTER,
            flow_run_filter=FlowRunFilter.model_validate({"state": states}),
            sort=FlowRunSort.EXPECTED_START_TIME_DESC,
        )
        runs = [run for run in runs if run.deployment_id in names and run.id not in taken_ids]
        busy_ids = await self.ids_in_progress(runs)
        lost_runs = [run for run in runs if run.id not in busy_ids and await self.is_lost(run)]
        for run in lost_runs:
            assert run.state is not None
            deployment_name = names[run.deployment_id]
            await self.alert_lost_run(run, deployment_name, run.state)
            state = await self.next_state(run, deployment_name)
            if state is None:
                continue
            response = await self.client.set_flow_run_state(run.id, state)
            if response.status.value == "ACCEPT":
                self._logger.warning(f"{run.name} is {state.name} now: {state.message}")
                await self.alert_lost_run(run, deployment_name, state)

    async def is_lost(self, run: FlowRun) -> bool:
        """Return whether a run has no process on any machine and no worker is about to start it.

        Call this only for a run without a process on this machine. Heartbeats are checked because a worker on another
        machine or in another container may have the same name.
        """
        assert run.state is not None
        worker_name = run.labels.get("prefect.worker.name")
        age = datetime.now(UTC) - run.state.timestamp
        if run.state_type == CRASHED:
            is_recent = age < timedelta(days=RESTART_DAYS)
            return is_recent and (worker_name == self.name or not await self.sends_heartbeats(run))
        if run.state_type == PENDING:
            return worker_name in (None, self.name) and age > timedelta(seconds=MAX_START_S)
        return age > timedelta(seconds=MAX_SILENCE_S) and not await self.sends_heartbeats(run)

    async def sends_heartbeats(self, run: FlowRun) -> bool:
        """Return whether a process on any machine is still sending heartbeats for a run."""
        event_filter = EventFilter.model_validate(
            {
                "event": {"name": ["prefect.flow-run.heartbeat"]},
                "resource": {"id": [f"prefect.flow-run.{run.id}"]},
                "occurred": {"since": datetime.now(UTC) - timedelta(seconds=MAX_SILENCE_S)},
            }
        )
        page = await self.client.read_events(event_filter, limit=1)
        return bool(page.events)

    async def next_state(self, run: FlowRun, deployment_name: str) -> State[Any] | None:
        """Return the state that a lost run should get, or None if its state should not change."""
        if run.state_type == CANCELLING:
            return Cancelled(message="its worker was killed while it was being cancelled")
        if run.state_type != CRASHED:
            return Crashed(message=f"its worker was killed while it was {(run.state_name or '').lower()}")
        if deployment_name not in RESTARTED:
            return None
        states = await self.client.read_flow_run_states(run.id)
        final_states = [state for state in states if state.is_final()]
        crashes = list(takewhile(lambda state: state.is_crashed(), reversed(final_states)))
        if len(crashes) >= MAX_CRASHES:
            return Failed(
                message=f"crashed {format_count(len(crashes), 'time')} in a row, the last time: "
                f"{crashes[0].message}. Check services/worker.log and the memory of this machine, then run it again"
            )
        return AwaitingRetry(message="it crashed and continues where it was killed")

    async def alert_lost_run(self, run: FlowRun, deployment_name: str, state: State[Any]) -> None:
        """Send an alert if the state is a crash or failure. It is sent once, even if other processes try to send it."""
        if state.is_crashed() or state.is_failed():
            await anyio.to_thread.run_sync(alerts.alert_end, deployment_name, run, state, self._logger.warning)


def main() -> None:
    """Run Prefect's command line with this worker in place of Prefect's process worker."""
    prepare()
    with warnings.catch_warnings():
        # Prefect warns that Worker replaces its base class, which is intentional
        warnings.filterwarnings("ignore", "Type 'Worker' ")
        register_type(Worker)
    app()


if __name__ == "__main__":
    main()
