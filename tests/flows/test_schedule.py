"""Late runs of a deployment are one run: which are cancelled, and which never."""

import uuid
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from prefect.states import Crashed, Failed, Pending, Running

from flows import schedule
from flows.retrain import retrain
from flows.schedule import coalesce_late, count_crashes
from m3diff.records.errors import DataError

DEPLOYMENT = uuid.uuid4()


class Server:
    """Prefect's API as far as coalescing goes: the runs that it has, and the states that they were set to."""

    def __init__(self, runs: list[Any]) -> None:
        self.runs, self.states, self.began = runs, {}, set()
        self.gone = False
        self.history: list[Any] = []

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def read_flow_runs(self, flow_run_filter: Any) -> list[Any]:
        if self.gone:
            raise httpx.ConnectError("no answer")
        wanted = flow_run_filter
        return [
            run
            for run in self.runs
            if run.deployment_id in wanted.deployment_id.any_
            and run.state_name in wanted.state.name.any_
            and run.expected_start_time <= wanted.expected_start_time.before_
        ]

    def read_flow_run_states(self, flow_run_id: uuid.UUID) -> list[Any]:
        if self.gone:
            raise httpx.ConnectError("no answer")
        return self.history

    def set_flow_run_state(self, flow_run_id: uuid.UUID, state: Any) -> Any:
        (run,) = [run for run in self.runs if run.id == flow_run_id]
        if run.name in self.began:
            return SimpleNamespace(status=SimpleNamespace(value="ABORT"))
        self.states[run.name] = state
        return SimpleNamespace(status=SimpleNamespace(value="ACCEPT"))


def run(
    name: str, state: str = "Late", hours: float = -1, deployment: uuid.UUID = DEPLOYMENT, **parameters: Any
) -> Any:
    due = datetime.now(UTC) + timedelta(hours=hours)
    return SimpleNamespace(
        id=uuid.uuid4(),
        name=name,
        deployment_id=deployment,
        state_name=state,
        expected_start_time=due,
        parameters=parameters,
    )


@pytest.fixture
def logged(monkeypatch) -> list[str]:
    lines: list[str] = []
    logger = SimpleNamespace(info=lines.append, warning=lines.append)
    monkeypatch.setattr(schedule, "get_run_logger", lambda: logger)
    return lines


def begins(monkeypatch: pytest.MonkeyPatch, ours: Any, *others: Any) -> Server:
    """The flow retrain begins as the run `ours`, where the server has these others too."""
    server = Server([ours, *others])
    context = SimpleNamespace(flow_run=ours, flow=retrain)
    monkeypatch.setattr(schedule, "FlowRunContext", SimpleNamespace(get=lambda: context))
    monkeypatch.setattr(schedule, "get_client", lambda sync_client: server)
    return server


def test_runs_that_are_due_are_cancelled_whatever_they_wait_for_and_their_reasons_are_taken_over(monkeypatch, logged):
    ours = run("ours", "Running")
    server = begins(
        monkeypatch,
        ours,
        run("late"),
        run("due", "Scheduled", reason="new data"),
        run("queued", "AwaitingConcurrencySlot", reason="new data"),
        run("asked", reason="by hand"),
    )
    assert coalesce_late() == ["new data", "by hand"]
    assert set(server.states) == {"late", "due", "queued", "asked"}
    for state in server.states.values():
        assert (state.type.value, state.name) == ("CANCELLED", "Coalesced")
        assert f"flow run ours ({ours.id}) does this work" in state.message
    assert len(logged) == 4


@pytest.mark.parametrize(
    "other",
    [
        run("future", "Scheduled", hours=1),
        run("future", "AwaitingConcurrencySlot", hours=1),
        run("another deployment", deployment=uuid.uuid4()),
        run("running", "Running"),
        run("retried", "AwaitingRetry"),
        run("with overrides", overrides=["train.epochs=6"]),
        run("of another commit", ref="main"),
    ],
    ids=lambda other: f"{other.name}, {other.state_name}",
)
def test_what_is_not_due_or_does_not_wait_or_asks_for_something_else_is_left(monkeypatch, logged, other):
    server = begins(monkeypatch, run("ours", "Running", reason="the schedule"), other)
    assert coalesce_late() == []
    assert server.states == {}


def test_equal_is_what_comes_to_the_same_with_the_defaults_of_the_flow(monkeypatch, logged):
    server = begins(monkeypatch, run("ours", overrides=[], ref="HEAD"), run("plain"), run("spelt out", overrides=None))
    coalesce_late()
    assert set(server.states) == {"plain", "spelt out"}
    server = begins(monkeypatch, run("ours", overrides=["a=1"]), run("same", overrides=["a=1"]), run("plain"))
    coalesce_late()
    assert set(server.states) == {"same"}


def test_one_that_began_meanwhile_keeps_its_work_and_its_reason(monkeypatch, logged):
    server = begins(monkeypatch, run("ours"), run("quick", reason="its own"))
    server.began = {"quick"}
    assert coalesce_late() == []


def test_a_server_that_does_not_answer_stops_no_run(monkeypatch, logged):
    server = begins(monkeypatch, run("ours"), run("late"))
    server.gone = True
    assert coalesce_late() == []
    assert logged == ["late runs were not coalesced: ConnectError: no answer"]


def test_a_flow_that_is_no_run_of_a_deployment_asks_nobody(monkeypatch):
    monkeypatch.setattr(schedule, "get_client", lambda sync_client: pytest.fail("asked"))
    assert coalesce_late() == []
    begins(monkeypatch, SimpleNamespace(deployment_id=None))
    monkeypatch.setattr(schedule, "get_client", lambda sync_client: pytest.fail("asked"))
    assert coalesce_late() == []


def test_retrain_looks_for_late_runs_first_and_runs_for_their_reasons_too(monkeypatch):
    steps: list[Any] = []
    monkeypatch.setattr("flows.retrain.coalesce_late", lambda: steps.append("coalesced") or ["new data", "asked for"])
    monkeypatch.setattr("flows.retrain.run_pipeline", lambda *words, **named: steps.append((words[0], named)))
    retrain.fn(reason="asked for")
    retrain.fn(ref="main")
    (_, (head, first), _, (ref, second)) = steps
    assert steps[0] == steps[2] == "coalesced"
    assert (head, first["reason"], first["data"]) == ("HEAD", "asked for; new data", True)
    assert (ref, second["reason"], second["data"]) == ("main", "new data; asked for", False)


CRASHED, FAILED = Crashed(message="no heartbeat for 90 s"), Failed()


@pytest.fixture
def told(monkeypatch) -> list[tuple[str, str]]:
    notes: list[tuple[str, str]] = []
    monkeypatch.setattr(schedule.notices, "tell", lambda key, title, *_: notes.append((key, title)))
    return notes


@pytest.mark.parametrize("history", [[], [FAILED], [CRASHED, FAILED], [CRASHED, CRASHED, CRASHED, FAILED]])
def test_a_run_that_did_not_crash_last_is_no_news(monkeypatch, tmp_path, logged, told, history):
    begins(monkeypatch, run("ours")).history = [Running(), *history, Pending(), Running()]
    count_crashes(tmp_path)
    assert told == []


@pytest.mark.parametrize("history", [[CRASHED], [CRASHED, CRASHED], [CRASHED, CRASHED, FAILED, CRASHED]])
def test_a_crash_is_told_when_the_run_goes_on(monkeypatch, tmp_path, logged, told, history):
    ours = run("ours")
    begins(monkeypatch, ours).history = [*history, Running()]
    count_crashes(tmp_path)
    assert told == [(f"{ours.id} crashed", "m3diff/retrain crashed")]


def test_three_crashes_in_a_row_are_the_end(monkeypatch, tmp_path, logged, told):
    begins(monkeypatch, run("ours")).history = [FAILED, Running(), CRASHED, Running(), CRASHED, Pending(), CRASHED]
    with pytest.raises(DataError, match="crashed 3 times in a row, the last time: no heartbeat for 90 s"):
        count_crashes(tmp_path)
    assert told == []


def test_a_server_that_does_not_answer_keeps_no_run_from_going_on(monkeypatch, tmp_path, logged, told):
    begins(monkeypatch, run("ours")).gone = True
    count_crashes(tmp_path)
    assert "crashes of this run were not counted: ConnectError" in logged[0]
