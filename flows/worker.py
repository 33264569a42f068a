"""Prefect's worker for processes, which also looks after the runs of this machine: `python -m flows.worker worker start
--pool m3diff ...` takes the options of `prefect worker start`.

Events tell of what happened, and one that is lost with a killed server is never told again. So each time that the
worker reports to the server it compares what the server calls at work with the processes that are here, and starts
crashed runs again.
"""

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
from prefect.workers.process import ProcessWorker

from flows import FLOW_RUN, processes_by, report

# At most: from the moment that a worker took a run to its process; from one heartbeat of that to the next
BEGINS_S, SILENCE_S = 60, 90
OURS = FlowFilter(name=FlowFilterName(any_=["m3diff"]))
# What is started again after a crash, unless that is older, or the third in a row: then it is the run's own fault
AGAIN, AGAIN_DAYS, MOST_CRASHES = ("full", "retrain"), 1, 3

CRASHED, PENDING, CANCELLING = StateType.CRASHED, StateType.PENDING, StateType.CANCELLING

warnings.filterwarnings("ignore", "Type 'Worker' ")  # it takes the place of its base, as it shall


class Worker(ProcessWorker):
    """A worker that neither a run that it holds already nor a server that is gone ends."""

    async def get_and_submit_flow_runs(self) -> list[FlowRun]:
        try:
            return await super().get_and_submit_flow_runs()
        except httpx.HTTPError as error:
            self._logger.warning(f"the server was not asked for runs: {type(error).__name__}: {error}")
            return []

    async def _get_scheduled_flow_runs(self) -> list[WorkerFlowRunResponse]:
        """The runs that are due. A run whose process is still here waits until that is gone."""
        found = await super()._get_scheduled_flow_runs()
        here = await self.held(entry.flow_run for entry in found)
        for id_ in here:
            self._logger.info(f"flow run {id_} waits until what is left of it here is gone")
        return [entry for entry in found if entry.flow_run.id not in here]

    async def sync_with_backend(self) -> None:
        try:
            await super().sync_with_backend()
            await self.look_after_runs()
        except (httpx.HTTPError, PrefectException) as error:
            if not self.is_setup:
                raise
            self._logger.warning(f"the server was not reported to: {type(error).__name__}: {error}")

    async def held(self, runs: Iterable[FlowRun]) -> set[UUID]:
        """Return the runs that this worker has in hand or that a process here works for."""
        ids = {str(run.id): run.id for run in runs}
        found = await anyio.to_thread.run_sync(processes_by, FLOW_RUN) if ids else {}
        return {ids[id_] for id_ in found if id_ in ids} | ({*ids.values()} & {*self.limiter.statistics().borrowers})

    async def look_after_runs(self) -> None:
        """Say of runs whose process is gone that they crashed, and start the crashed ones again."""
        before = set(self.limiter.statistics().borrowers)
        found = await self.client.read_deployments(flow_filter=OURS)
        names: dict[UUID | None, str] = {deployment.id: deployment.name for deployment in found}
        states = {"type": {"any_": [PENDING, StateType.RUNNING, CANCELLING, CRASHED]}}
        wanted = FlowRunFilter.model_validate({"state": states})
        newest = FlowRunSort.EXPECTED_START_TIME_DESC
        runs = await self.client.read_flow_runs(flow_filter=OURS, flow_run_filter=wanted, sort=newest)
        runs = [run for run in runs if run.deployment_id in names and run.id not in before]
        here = await self.held(runs)
        for run in [run for run in runs if run.id not in here and await self.is_lost(run)]:
            assert run.state is not None
            what = names[run.deployment_id]
            await self.tell(run, what, run.state)
            state = await self.next_state(run, what)
            if state and (await self.client.set_flow_run_state(run.id, state)).status.value == "ACCEPT":
                self._logger.warning(f"{run.name} is {state.name} now: {state.message}")
                await self.tell(run, what, state)

    async def is_lost(self, run: FlowRun) -> bool:
        """Return whether a run that no process here works for has none anywhere, and its own worker does not begin
        it. Another worker may have the same name, on another machine or in another container."""
        assert run.state is not None
        whose, age = run.labels.get("prefect.worker.name"), datetime.now(UTC) - run.state.timestamp
        if run.state_type == CRASHED:
            return age < timedelta(days=AGAIN_DAYS) and (whose == self.name or not await self.is_heard(run))
        if run.state_type == PENDING:
            return whose in (None, self.name) and age > timedelta(seconds=BEGINS_S)
        return age > timedelta(seconds=SILENCE_S) and not await self.is_heard(run)

    async def is_heard(self, run: FlowRun) -> bool:
        """Return whether a process on any machine still sends heartbeats for this run."""
        asked = {
            "event": {"name": ["prefect.flow-run.heartbeat"]},
            "resource": {"id": [f"prefect.flow-run.{run.id}"]},
            "occurred": {"since": datetime.now(UTC) - timedelta(seconds=SILENCE_S)},
        }
        return bool((await self.client.read_events(EventFilter.model_validate(asked), limit=1)).events)

    async def next_state(self, run: FlowRun, what: str) -> State[Any] | None:
        """The state of a lost run from now on; None where it stays as it is."""
        if run.state_type == CANCELLING:
            return Cancelled(message="its worker was killed while it was being cancelled")
        if run.state_type != CRASHED:
            return Crashed(message=f"its worker was killed while it was {(run.state_name or '').lower()}")
        if what not in AGAIN:
            return None
        ended = [state for state in await self.client.read_flow_run_states(run.id) if state.is_final()]
        crashes = [*takewhile(lambda state: state.is_crashed(), reversed(ended))]
        if len(crashes) >= MOST_CRASHES:
            return Failed(
                message=f"crashed {len(crashes)} times in a row, the last time: {crashes[0].message}; look at "
                "services/worker.log and at the memory of this machine, then run it again"
            )
        return AwaitingRetry(message="it crashed, and goes on where it was")

    async def tell(self, run: FlowRun, what: str, state: State[Any]) -> None:
        """Tell of a crash or a failure; a notice is sent once, whoever tells and however often."""
        if state.is_crashed() or state.is_failed():
            await anyio.to_thread.run_sync(report.tell_of_end, what, run, state, self._logger.warning)


if __name__ == "__main__":
    app()
