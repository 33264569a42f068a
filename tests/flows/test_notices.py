"""Somebody is told, once, in a paragraph that says what to do; and telling fails nothing and gives nothing away."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from prefect.blocks.notifications import AppriseNotificationBlock
from prefect.settings import PREFECT_API_URL, PREFECT_UI_URL, temporary_settings
from prefect.states import Crashed, Failed

from flows import notices
from flows.full import full
from flows.notices import decided, failed, forget, reason_of, send_again, tell, tell_of_silence
from flows.report import Done
from flows.retrain import retrain
from flows.watch import watch
from flows.workspace import FLOWS, Workspace
from m3diff.registry.promote import Promotion
from m3diff.settings.section import ParamsError

GATE = {"protocol": "d/p", "metric": "CIDEr", "min_gain": 0.0, "confidence": 0.95, "reason": "0.1 less"}


class Listener:
    """A web server on this machine that keeps what it is sent, or refuses it."""

    def __init__(self) -> None:
        self.got: list[dict[str, Any]] = []
        self.code = 200
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if outer.code == 200:
                    outer.got.append(json.loads(body))
                self.send_response(outer.code)
                self.end_headers()

            def log_message(self, *words: object) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def address(self) -> str:
        return f"json://user:secret-word@127.0.0.1:{self.server.server_port}/hook"


@pytest.fixture
def listener(monkeypatch) -> Iterator[Listener]:
    listener = Listener()
    monkeypatch.setenv("M3DIFF_NOTIFY", listener.address)
    yield listener
    listener.server.shutdown()


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("M3DIFF_NOTIFY", raising=False)
    return tmp_path


def test_a_notice_goes_to_an_address_of_apprise_once_and_the_latest_are_remembered(checkout, listener, monkeypatch):
    monkeypatch.setattr(notices, "REMEMBERED", 2)
    for key in ("a", "a", "b", "c", "c", "b"):
        tell(key, f"title {key}", "the text", pytest.fail, checkout)
    told = [(notice["title"], notice["message"]) for notice in listener.got]
    assert told == [(f"title {key}", "the text") for key in "abc"]


def test_without_an_address_nobody_is_told_and_nothing_is_kept(checkout):
    tell("a", "the title", "the text", pytest.fail)
    assert not (checkout / FLOWS / "notices.json").exists()


def test_what_was_not_taken_is_a_warning_without_the_address_and_goes_out_at_the_next_occasion_once(
    checkout, listener, caplog, capfd
):
    said: list[str] = []
    listener.code = 500
    tell("a", "first", "text", said.append)
    tell("b", "second", "text", said.append)
    assert [line.split(":")[0] for line in said] == ["warning", "warning"]
    assert "first: nobody was told, for M3DIFF_NOTIFY does not work" in said[0]
    assert "2 notice(s) wait" in said[1]
    listener.code = 200
    send_again(checkout, said.append)
    send_again(checkout, said.append)
    assert [notice["title"] for notice in listener.got] == ["first", "second"]
    tell("a", "first", "text", said.append)
    assert len(listener.got) == 2
    everything = "".join([*said, caplog.text, *capfd.readouterr(), (checkout / FLOWS / "notices.json").read_text()])
    assert "secret-word" not in everything


@pytest.mark.parametrize("address", ["nonsense://secret-word", "json://", "no-such-block/secret-word", "secret-word"])
def test_an_address_that_is_none_is_a_warning_and_fails_nothing(checkout, monkeypatch, caplog, capfd, address):
    def missing(name: str) -> None:
        raise ValueError(f"no block {name}")

    said: list[str] = []
    monkeypatch.setattr(notices.Block, "load", missing)
    monkeypatch.setenv("M3DIFF_NOTIFY", address)
    tell("a", "the title", "the text", said.append)
    assert len(said) == 1
    assert "secret-word" not in "".join([*said, caplog.text, *capfd.readouterr()])


def test_a_disk_that_is_full_fails_no_run(checkout, listener, monkeypatch):
    def full_disk(*words: object) -> None:
        raise OSError("no space left")

    said: list[str] = []
    monkeypatch.setattr(notices, "write_atomic", full_disk)
    tell("a", "the title", "the text", said.append)
    assert said == ["warning: a notice was not sent: OSError"]


def test_a_block_of_prefects_is_loaded_by_its_name(checkout, monkeypatch, listener):
    block = AppriseNotificationBlock(url=listener.address)
    monkeypatch.setattr(notices.Block, "load", {"custom-webhook/mine": block}.__getitem__)
    monkeypatch.setenv("M3DIFF_NOTIFY", "custom-webhook/mine")
    tell("a", "the title", "the text", print)
    assert [notice["title"] for notice in listener.got] == ["the title"]


def test_what_is_over_may_be_told_again(checkout, listener):
    for key in ("watch one", "watch two", "a run"):
        tell(key, key, "text", print)
    forget("watch ", checkout)
    for key in ("watch one", "a run"):
        tell(key, key, "text", print)
    assert [notice["title"] for notice in listener.got] == ["watch one", "watch two", "a run", "watch one"]


# What is told


@pytest.fixture
def told(checkout, monkeypatch) -> list[tuple[str, str, str]]:
    found: list[tuple[str, str, str]] = []
    monkeypatch.setattr(notices, "tell", lambda key, title, text, *rest: found.append((key, title, text)))
    return found


RUN = SimpleNamespace(id="0123", name="quiet-owl")
STAGE = Failed(
    message="Flow run encountered an exception: DvcError: stage validate exited with 3\nRunning stage 'validate':\n"
    "rows 7, 9: reference is empty\nERROR: failed to reproduce 'validate': failed to run: x, exited with 3"
)


@pytest.mark.parametrize("flow", [full, retrain, watch])
def test_every_flow_tells_of_its_failure_and_of_its_crash(flow):
    assert flow.on_failure_hooks == [failed]
    assert flow.on_crashed_hooks == [failed]


def test_a_failure_says_which_run_why_where_to_look_and_what_to_do(told):
    with temporary_settings({PREFECT_UI_URL: "http://ui:4200", PREFECT_API_URL: "http://api:4200/api"}):
        failed(retrain, RUN, STAGE)
    ((key, title, text),) = told
    assert (key, title) == ("0123 failed", "m3diff/retrain failed")
    assert text.startswith(
        "Run 'quiet-owl' of m3diff/retrain failed: DvcError: stage validate exited with 3 "
        "rows 7, 9: reference is empty. "
        "http://ui:4200/runs/flow-run/0123 . "
    )
    assert f"worktree {FLOWS}/0123" in text
    assert "prefect deployment run m3diff/retrain" in text
    assert "\n" not in text


def test_a_crash_says_that_nothing_is_lost(told):
    failed(full, RUN, Crashed(message="no heartbeat for 90 s"))
    ((key, title, text),) = told
    assert (key, title) == ("0123 crashed", "m3diff/full crashed")
    assert "crashed: no heartbeat for 90 s. " in text
    assert "started again by itself and goes on where it was killed" in text


def test_looks_that_fail_for_the_same_reason_are_one_notice_for_another_one_more_and_a_long_error_is_cut(told):
    for number, why in enumerate(["a.dvc: gone", "a.dvc: gone", "b.dvc: gone"]):
        failed(watch, SimpleNamespace(id=number, name="x"), Failed(message=why))
    keys = [key for key, _, _ in told]
    assert keys[0] == keys[1] != keys[2]
    assert all(key.startswith("watch ") for key in keys)
    assert len(reason_of(Failed(message="x" * 10000))) < 500
    assert reason_of(Failed()) == "failed: "


def done(outcome: str, champion: int | None = 1) -> Done:
    work = Workspace("0123", Path("w"), Path("checkout"), "abc", "tree", (), ())
    decision = Promotion(outcome=outcome, model="m", challenger=7, champion=champion, **GATE)
    return Done(work, ["new data"], decision=decision)


@pytest.mark.fault("T10")
@pytest.mark.parametrize(
    ("outcome", "champion", "word", "then"),
    [
        ("refused", 1, "rejected", "The champion is as before (version 1); there is nothing to do"),
        ("refused", None, "rejected", "There is no champion: choose one"),
        ("promoted", 1, "promoted", "The champion before was 1; `m3diff rollback"),
        ("first", None, "promoted", "m3diff rollback"),
        ("unchanged", 1, "", ""),
    ],
)
def test_a_decision_of_the_gate_is_told_with_its_numbers_and_the_reason_of_the_run(told, outcome, champion, word, then):
    decided(done(outcome, champion), print)
    decided(Done(done("first").work, []), print)
    if not word:
        assert told == []
        return
    ((key, title, text),) = told
    assert (key, title) == (f"0123 {word}", f"m3diff: a model was {word}")
    assert f"m version 7 {outcome}: 0.1 less. Run because new data. " in text
    assert then in text
    assert ("nothing to do" in text) == ("nothing to do" in then)


# Silence


@pytest.fixture
def server(monkeypatch) -> dict[str, list[float]]:
    """Prefect's answers: how many days ago trainings completed, and deployments were made."""
    days: dict[str, list[float]] = {"/flow_runs/filter": [], "/deployments/filter": [30, 30]}

    def request(method: str, path: str, json: dict[str, Any]) -> httpx.Response:
        assert json["deployments"] == {"name": {"any_": ["full", "retrain"]}}, "a look says nothing of training"
        times = [(datetime.now(UTC) - timedelta(days=count)).isoformat() for count in days[path]]
        found = [{"end_time": time, "created": time} for time in times][: json.get("limit")]
        return httpx.Response(200, json=found, request=httpx.Request(method, "http://prefect"))

    @contextmanager
    def client(sync_client: bool) -> Iterator[Any]:
        if not days:
            raise httpx.ConnectError("no answer")
        yield SimpleNamespace(request=request)

    monkeypatch.setattr(notices, "get_client", client)
    return days


@pytest.mark.parametrize(
    ("days", "last", "silent"),
    [("3", [4, 5], True), ("3", [2, 5], False), ("", [400], False), ("0.5", [0.6], True), ("3", [], True)],
)
def test_silence_is_told_where_nothing_ended_well_for_so_many_days(
    server, told, tmp_path, monkeypatch, days, last, silent
):
    monkeypatch.setenv("M3DIFF_SILENCE_DAYS", days)
    server["/flow_runs/filter"] = last
    tell_of_silence(tmp_path, print)
    assert [title for _, title, _ in told] == (["m3diff: nothing ran well for days"] if silent else [])
    if silent:
        number = int((last or [30])[0])
        assert f"for {number} days" in told[0][2], "before the first run time counts from the deployment"
        assert told[0][0].startswith("silence since 20"), "another silence after another run"


def test_a_server_that_does_not_answer_stops_no_look(server, told, tmp_path, monkeypatch):
    monkeypatch.setenv("M3DIFF_SILENCE_DAYS", "3")
    server.clear()
    said: list[str] = []
    tell_of_silence(tmp_path, said.append)
    assert said == ["warning: earlier runs were not looked at: ConnectError: no answer"]


@pytest.mark.parametrize("text", ["three", "0", "-1", "nan", "inf"])
def test_a_number_of_days_that_is_none_is_named(monkeypatch, tmp_path, text):
    monkeypatch.setenv("M3DIFF_SILENCE_DAYS", text)
    with pytest.raises(ParamsError, match=f"M3DIFF_SILENCE_DAYS='{text}': expected a number of days above 0"):
        tell_of_silence(tmp_path, print)
