"""What no run can tell of itself: crashes of the last days, each once, and silence."""

import uuid
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from prefect.states import Crashed

from flows import lookback, notices
from flows.lookback import look_back, silence_days
from m3diff.settings.section import ParamsError

NOW = datetime.now(UTC)
DEPLOYED = [
    SimpleNamespace(id=uuid.uuid4(), name=name, created=NOW - timedelta(days=days))
    for name, days in (("full", 30), ("retrain", 30), ("watch", 40))
]


class Server:
    """Prefect's API: the runs that crashed and those that completed, as it would answer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.runs: list[Any] = []
        self.gone = False
        monkeypatch.setattr(lookback, "get_client", lambda sync_client: self)

    def __enter__(self) -> "Server":
        if self.gone:
            raise httpx.ConnectError("no answer")
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def add(self, state: str, days: float, deployment: int = 1) -> str:
        crashed = Crashed(message="no heartbeat for 90 s")
        name = f"{state} {days}"
        run = SimpleNamespace(
            id=uuid.uuid4(), name=name, deployment_id=DEPLOYED[deployment].id, state=crashed, state_type=state
        )
        run.end_time = NOW - timedelta(days=days)
        self.runs.append(run)
        return str(run.id)

    def read_deployments(self, flow_filter: Any, deployment_filter: Any = None) -> list[Any]:
        assert flow_filter.name.any_ == ["m3diff"]
        wanted = deployment_filter.name.any_ if deployment_filter else [found.name for found in DEPLOYED]
        return [found for found in DEPLOYED if found.name in wanted]

    def read_flow_runs(
        self, flow_filter: Any, flow_run_filter: Any, sort: Any, deployment_filter: Any = None, limit: int = 200
    ) -> list[Any]:
        ids = {found.id for found in self.read_deployments(flow_filter, deployment_filter)}
        (kind,) = flow_run_filter.state.type.any_
        after = flow_run_filter.end_time.after_ if flow_run_filter.end_time else NOW - timedelta(days=10**4)
        found = [
            run
            for run in self.runs
            if run.state_type == kind.value and run.deployment_id in ids and run.end_time >= after
        ]
        assert sort.value == "END_TIME_DESC"
        return sorted(found, key=lambda run: run.end_time, reverse=True)[:limit]


@pytest.fixture
def server(monkeypatch) -> Server:
    monkeypatch.delenv("M3DIFF_SILENCE_DAYS", raising=False)
    return Server(monkeypatch)


@pytest.fixture
def told(monkeypatch) -> list[tuple[str, str, str]]:
    found: list[tuple[str, str, str]] = []
    monkeypatch.setattr(notices, "tell", lambda key, title, text, *rest: found.append((key, title, text)))
    return found


def test_a_run_whose_host_was_killed_is_told_by_the_key_that_its_own_hook_would_use(server, told, tmp_path):
    crashed = server.add("CRASHED", 0.5)
    server.add("CRASHED", 8)
    server.add("FAILED", 0.5)
    look_back(tmp_path, print)
    ((key, title, text),) = told
    assert (key, title) == (f"{crashed} crashed", "m3diff/retrain crashed")
    assert "no heartbeat for 90 s" in text


@pytest.mark.parametrize(
    ("days", "last", "silent"), [("3", 4, True), ("3", 2, False), ("", 400, False), ("0.5", 0.6, True)]
)
def test_silence_is_told_where_nothing_ended_well_for_so_many_days(
    server, told, tmp_path, monkeypatch, days, last, silent
):
    monkeypatch.setenv("M3DIFF_SILENCE_DAYS", days)
    server.add("COMPLETED", last)
    server.add("COMPLETED", last + 1)
    server.add("FAILED", 0)
    server.add("COMPLETED", 0, deployment=2)  # a look of watch, which says nothing of training
    look_back(tmp_path, print)
    assert [title for _, title, _ in told] == (["m3diff: nothing ran well for days"] if silent else [])


def test_silence_after_another_run_is_another_silence(server, told, tmp_path, monkeypatch):
    monkeypatch.setenv("M3DIFF_SILENCE_DAYS", "3")
    look_back(tmp_path, print)
    look_back(tmp_path, print)
    server.add("COMPLETED", 4)
    look_back(tmp_path, print)
    keys = [key for key, _, _ in told]
    assert keys[0] == keys[1] != keys[2]
    assert "30 days" in told[0][2], "before the first run time counts from the deployment"


def test_a_server_that_does_not_answer_stops_no_look(server, told, tmp_path):
    said: list[str] = []
    server.gone = True
    look_back(tmp_path, said.append)
    assert said == ["warning: earlier runs were not looked at: ConnectError: no answer"]


@pytest.mark.parametrize("text", ["three", "0", "-1", "nan", "inf"])
def test_a_number_of_days_that_is_none_is_named(monkeypatch, text):
    monkeypatch.setenv("M3DIFF_SILENCE_DAYS", text)
    with pytest.raises(ParamsError, match=f"M3DIFF_SILENCE_DAYS='{text}': expected a number of days above 0"):
        silence_days()
