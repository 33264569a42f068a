"""The worker's decisions about the runs that the server names, beside the processes that are here.
tests/flows/test_unattended.py has a real server and worker."""

import asyncio
import contextlib
import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Coroutine, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import httpx
import pytest
from prefect.client.schemas.objects import FlowRun
from prefect.states import Cancelling, Completed, Crashed, Pending, Running, State, Submitting

from flows import notices
from flows.worker import Worker
from tests.toy import REPOSITORY

DEPLOYED = {name: SimpleNamespace(id=uuid.uuid4(), name=name) for name in ("full", "retrain", "watch")}
HERE, OTHER = {"prefect.worker.name": "here"}, {"prefect.worker.name": "another"}


class Server:
    """Prefect's API with one run, in this state for so many minutes. `heard`: its process tells that it works."""

    def __init__(
        self,
        state: State[Any],
        deployment: str,
        labels: dict[str, Any],
        minutes: float,
        crashes: int,
        heard: bool = False,
    ) -> None:
        self.set: list[State[Any]] = []
        self.crashes, self.gone, self.heard = crashes, False, heard
        since = datetime.now(UTC) - timedelta(minutes=minutes)
        of_state = {"state": state.model_copy(update={"timestamp": since}), "state_type": state.type}
        deployed = DEPLOYED[deployment].id if deployment else None
        ids = {"id": uuid.uuid4(), "flow_id": uuid.uuid4(), "deployment_id": deployed}
        self.run = FlowRun(name="one", state_name=state.name, labels=labels, **of_state, **ids)

    async def read_deployments(self, flow_filter: Any) -> list[Any]:
        return [*DEPLOYED.values()]

    async def read_flow_runs(self, flow_filter: Any, flow_run_filter: Any, sort: Any) -> list[FlowRun]:
        return [self.run] if self.run.state_type in flow_run_filter.state.type.any_ else []

    async def read_events(self, asked: Any, limit: int) -> Any:
        assert asked.resource.id == [f"prefect.flow-run.{self.run.id}"]
        return SimpleNamespace(events=[1] * self.heard)

    async def read_flow_run_states(self, flow_run_id: uuid.UUID) -> list[State[Any]]:
        return [*([Running(), Crashed()] * self.crashes)]

    async def set_flow_run_state(self, flow_run_id: uuid.UUID, state: State[Any]) -> Any:
        self.set.append(state)
        return SimpleNamespace(status=SimpleNamespace(value="ACCEPT"))

    async def get_scheduled_flow_runs_for_work_pool(self, **asked: Any) -> list[Any]:
        if self.gone:
            raise httpx.ConnectError("no answer")
        return [SimpleNamespace(flow_run=self.run)]


def ask(server: Server, what: Callable[[Worker], Coroutine[Any, Any, Any]], in_hand: bool = False) -> Any:
    """The answer of a worker that has the run in hand, or not."""

    async def work() -> Any:
        worker = Worker(work_pool_name="m3diff", name="here", limit=2)
        worker._client, worker._limiter = server, anyio.CapacityLimiter(2)  # type: ignore[assignment]
        worker._has_successfully_synced, worker._runs_task_group = True, SimpleNamespace(start_soon=print)  # type: ignore[assignment]
        if in_hand:
            worker._limiter.acquire_on_behalf_of_nowait(server.run.id)
        return await what(worker)

    return asyncio.run(work())


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    monkeypatch.setattr(notices, "tell", lambda log, key, title, *rest: found.append(title))
    return found


@pytest.fixture
def process() -> Iterator[Callable[[uuid.UUID], None]]:
    """Starts a process that works for a run."""
    with contextlib.ExitStack() as stack:

        def start(run: uuid.UUID) -> None:
            code = "print(1, flush=True); import time; time.sleep(60)"
            given = os.environ | {"PREFECT__FLOW_RUN_ID": str(run)}
            one = stack.enter_context(subprocess.Popen([sys.executable, "-c", code], env=given, stdout=subprocess.PIPE))
            stack.callback(one.kill)
            assert one.stdout is not None
            assert one.stdout.readline()

        yield start


LOST = {
    "killed before it began": (Pending(), "watch", HERE, 2, 0, "CRASHED"),
    "killed as it began": (Submitting(), "retrain", HERE, 2, 0, "CRASHED"),
    "killed at work": (Running(), "full", HERE, 2, 0, "CRASHED"),
    "killed at once, before it put its name to it": (Pending(), "retrain", {}, 2, 0, "CRASHED"),
    "killed while it was cancelled": (Cancelling(), "full", HERE, 2, 0, "CANCELLED"),
    "crashed": (Crashed(), "full", HERE, 0, 1, "SCHEDULED"),
    "crashed a moment after it told that it works": (Crashed(), "full", HERE, 0, 1, True, "SCHEDULED"),
    "crashed on another machine": (Crashed(), "retrain", OTHER, 30, 1, "SCHEDULED"),
    "crashed twice": (Crashed(), "full", HERE, 0, 2, "SCHEDULED"),
    "crashed thrice": (Crashed(), "full", HERE, 0, 3, "FAILED"),
}
LEFT = {
    "another may be about to begin it": (Pending(), "retrain", {}, 0.5, 0),
    "one of the same name is about to begin it": (Submitting(), "retrain", HERE, 0.5, 0),
    "one of the same name has just begun it": (Running(), "full", HERE, 0.5, 0),
    "one of the same name is at work on it": (Running(), "full", HERE, 600, 0, True),
    "one of the same name ends it": (Cancelling(), "full", HERE, 10, 0, True),
    "crashed, and its machine slept only": (Crashed(), "full", OTHER, 10, 1, True),
    "another machine's, about to begin": (Submitting(), "watch", OTHER, 30, 0),
    "another machine's, at work": (Running(), "full", OTHER, 600, 0),
    "another machine's, being cancelled": (Cancelling(), "full", OTHER, 30, 0),
    "its schedule starts it again": (Crashed(), "watch", HERE, 0, 1),
    "of the day before": (Crashed(), "full", HERE, 1500, 1),
    "no deployment's: a person's own process": (Running(), "", {}, 0, 0),
    "at an end": (Completed(), "full", HERE, 0, 0),
}


@pytest.mark.fault("W2", "W4")
@pytest.mark.parametrize("case", LOST)
def test_a_run_whose_process_is_gone_ends_or_begins_again(
    case: str, told: list[str], process: Callable[[uuid.UUID], None]
) -> None:
    *given, want = LOST[case]
    server = Server(*given)
    for in_hand in (True, False):
        assert server.set == [], "it is in hand"
        ask(server, Worker.look_after_runs, in_hand)
    assert [state.type.value for state in server.set] == [want]
    ends = [state.lower() for state in (given[0].type.value, want) if state in ("CRASHED", "FAILED")]
    assert told == [f"m3diff/{given[1]} {end}" for end in ends]
    process(server.run.id)
    ask(server, Worker.look_after_runs)
    assert len(server.set) == 1, "a process of it is at work"


@pytest.mark.parametrize("case", LEFT)
def test_a_run_that_is_not_lost_is_left_alone(case: str, told: list[str]) -> None:
    server = Server(*LEFT[case])
    ask(server, Worker.look_after_runs)
    assert server.set == []
    assert told == (["m3diff/watch crashed"] if "its schedule" in case else [])


@pytest.mark.fault("W1")
@pytest.mark.parametrize("how", ["free", "in hand", "a process of it is left", "the server is gone"])
def test_a_run_that_is_here_still_is_not_begun_again_and_the_worker_goes_on(how: str, process) -> None:
    server = Server(Pending(), "full", {}, 0, 0)
    server.gone = how == "the server is gone"
    if how == "a process of it is left":
        process(server.run.id)
    begun = ask(server, Worker.get_and_submit_flow_runs, in_hand=how == "in hand")
    assert [run.id for run in begun] == ([server.run.id] if how == "free" else [])


def test_prefects_own_command_starts_this_worker() -> None:
    from prefect.cli._worker_utils import _load_worker_class

    assert _load_worker_class("process") is Worker


@pytest.mark.fault("W4")
@pytest.mark.parametrize("set_up", [True, False])
def test_a_server_that_is_gone_ends_no_worker(set_up: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(self: Any) -> None:
        raise httpx.ConnectError("no answer")

    async def report(worker: Worker) -> str:
        worker.is_setup = set_up
        try:
            await worker.sync_with_backend()
        except httpx.ConnectError:
            return "ended"
        return "goes on"

    monkeypatch.setattr("prefect.workers.base.BaseWorker.sync_with_backend", refuse)
    assert ask(Server(Running(), "full", HERE, 0, 0), report) == ("goes on" if set_up else "ended")


PRINTS = "import sys, flows; sys.stdin.readline(); print('printed'); print('told', file=sys.stderr)"


@pytest.mark.fault("W4")
def test_a_flow_goes_on_where_the_worker_that_reads_what_it_prints_was_killed(tmp_path: Path) -> None:
    log = tmp_path / "services/worker.log"
    log.parent.mkdir()
    log.write_text("before\n")
    given = os.environ | {"PREFECT__FLOW_RUN_ID": str(uuid.uuid4()), "PYTHONPATH": str(REPOSITORY)}
    command, pipes = [sys.executable, "-c", PRINTS], {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    flow = subprocess.Popen(command, env=given, cwd=tmp_path, stderr=subprocess.STDOUT, **pipes)
    assert flow.stdin is not None
    assert flow.stdout is not None
    flow.stdout.close()
    flow.communicate(b"\n", 60)
    assert (flow.returncode, sorted(log.read_text().splitlines())) == (0, ["before", "printed", "told"])
