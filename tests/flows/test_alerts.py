"""Alerts: they are sent once, with a text that contains no secret."""

from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import pytest
from prefect.settings import PREFECT_API_URL, PREFECT_UI_URL, temporary_settings
from prefect.states import Crashed, Failed

from flows import alerts
from flows.alerts import alert_decision, alert_failure, format_reason, send_alert
from flows.pipeline import full, retrain
from flows.report import RunRecord
from flows.watch import watch
from flows.workspace import FLOWS_FOLDER, Workspace
from tests.flows.conftest import decision
from tests.servers import Listener


@pytest.fixture
def checkout(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("M3DIFF_NOTIFY", raising=False)
    return tmp_path


def test_a_notice_goes_to_an_address_of_apprise_once_and_the_latest_are_remembered(checkout, listener, monkeypatch):
    monkeypatch.setattr(alerts, "MAX_REMEMBERED", 2)
    for key in ("a", "a", "b", "c", "c", "b"):
        send_alert(pytest.fail, key, f"title {key}", "the text", checkout)
    assert [(alert["title"], alert["message"]) for alert in listener.got] == [
        (f"title {key}", "the text") for key in "abc"
    ]
    monkeypatch.delenv("M3DIFF_NOTIFY")
    send_alert(pytest.fail, "d", "not sent", "and not kept")
    monkeypatch.setenv("M3DIFF_NOTIFY", listener.address)
    send_alert(pytest.fail)
    assert len(listener.got) == 3


@pytest.mark.parametrize("address", ["", " "])
def test_without_an_address_no_alert_is_sent_or_kept(address, checkout, monkeypatch):
    monkeypatch.setenv("M3DIFF_NOTIFY", address)
    waiting_alerts = {"a": ["title", "text"]}
    sending_times: dict[str, str] = {}
    alerts.send_waiting_alerts(sending_times, waiting_alerts, pytest.fail)
    assert waiting_alerts == {}
    assert sending_times == {}


def test_what_was_not_taken_is_a_warning_and_goes_out_at_the_next_occasion(checkout, listener: Listener, caplog, capfd):
    log_lines: list[str] = []
    listener.code = 500
    send_alert(log_lines.append, "a", "first", "text")
    send_alert(log_lines.append, "b", "second", "text")
    assert "first: the alert was not sent, because M3DIFF_NOTIFY does not work" in log_lines[0]
    assert "2 alerts are kept" in log_lines[1]
    listener.code = 200
    for _ in range(2):
        send_alert(log_lines.append, checkout=checkout)
    send_alert(log_lines.append, "a", "first", "text")
    assert [alert["title"] for alert in listener.got] == ["first", "second"]
    output = "".join(
        [*log_lines, caplog.text, *capfd.readouterr(), (checkout / FLOWS_FOLDER / "alerts.json").read_text()]
    )
    assert "secret-word" not in output


@pytest.mark.parametrize("fault", ["nonsense://secret-word", "json://", "no-address/secret-word", "a full disk"])
def test_a_wrong_address_and_a_full_disk_fail_nothing(checkout, monkeypatch, caplog, capfd, fault):
    def refuse(*words: object) -> None:
        raise OSError(f"secret-word, {words}")

    log_lines: list[str] = []
    monkeypatch.setenv("M3DIFF_NOTIFY", fault if "disk" not in fault else "json://")
    if "disk" in fault:
        monkeypatch.setattr(alerts, "write_atomic", refuse)
    send_alert(log_lines.append, "a", "the title", "the text")
    assert len(log_lines) == 1 + ("disk" in fault)
    assert "secret-word" not in "".join([*log_lines, caplog.text, *capfd.readouterr()])


@pytest.fixture
def sent_notices(checkout, monkeypatch) -> list[tuple[str, str, str]]:
    alerts_of_test: list[tuple[str, str, str]] = []
    monkeypatch.setattr(
        alerts, "send_alert", lambda log, key, title, text, *checkout: alerts_of_test.append((key, title, text))
    )
    return alerts_of_test


RUN = SimpleNamespace(id="0123", name="quiet-owl")


STAGE = Failed(
    message="Flow run encountered an exception: DvcError: stage validate exited with 3\nRunning stage 'validate':\n"
    "  rows 7, 9: reference is empty\nERROR: failed to reproduce 'validate': failed to run: x, exited with 3"
)


def test_a_notice_of_a_failure_or_crash_names_run_reason_place_and_next_step(sent_notices):
    for flow in (full, retrain, watch):
        assert flow.on_failure_hooks == flow.on_crashed_hooks == [alert_failure]
    with temporary_settings({PREFECT_UI_URL: "http://ui:4200", PREFECT_API_URL: "http://api:4200/api"}):
        alert_failure(retrain, RUN, STAGE)
    alert_failure(full, RUN, Crashed(message="no heartbeat for 90 s"))
    (key, title, text), (crash_key, crash_title, crash_text) = sent_notices
    assert key == "0123 failed"
    assert title == "m3diff/retrain failed"
    assert text.startswith(
        "Run 'quiet-owl' of m3diff/retrain failed: DvcError: stage validate exited with 3 "
        "rows 7, 9: reference is empty. http://ui:4200/runs/flow-run/0123 . "
    )
    assert f"worktree {FLOWS_FOLDER}/0123" in text
    assert "prefect deployment run m3diff/retrain" in text
    assert "\n" not in text
    assert crash_key == "0123 crashed"
    assert crash_title == "m3diff/full crashed"
    assert "crashed: no heartbeat for 90 s. " in crash_text
    assert "restarts automatically" in crash_text


def test_the_notice_of_a_refused_run_promises_no_worktree(sent_notices):
    alert_failure(
        full, RUN, Failed(name="Refused: not committed: params.yaml", message="not committed: params.yaml; commit it")
    )
    _, _, text = sent_notices[0]
    assert "Nothing was started" in text
    assert "worktree" not in text


def test_looks_that_fail_for_one_reason_send_one_notice_and_long_errors_are_cut(sent_notices):
    for number, message in enumerate(["a.dvc: gone", "a.dvc: gone", "b.dvc: gone"]):
        alert_failure(watch, SimpleNamespace(id=number, name="x"), Failed(message=message))
    keys = [key for key, _, _ in sent_notices]
    assert keys[0] == keys[1] != keys[2]
    assert all(key.endswith(f" {datetime.now(UTC).date()}") for key in keys), "again on another day"
    assert len(format_reason(Failed(message="x" * 10000))) < 500
    assert format_reason(Failed()) == "failed: "


@pytest.mark.fault("T10")
@pytest.mark.parametrize(
    ("outcome", "champion", "word", "consequence"),
    [
        ("refused", 1, "rejected", "The champion is unchanged: 1"),
        ("refused", None, "rejected", "The champion is unchanged: none"),
        ("promoted", 1, "promoted", "The previous champion was 1. To restore it, run `m3diff rollback"),
        ("first", None, "promoted", "m3diff rollback"),
        ("unchanged", 1, "", ""),
    ],
)
def test_a_decision_of_the_gate_is_told_with_its_numbers_and_the_reason_of_the_run(
    sent_notices, outcome, champion, word, consequence
):
    work = Workspace("0123", Path("w"), Path("checkout"), "abc", "tree", (), ())
    alert_decision(RunRecord(work, ["new data"], decision=decision(outcome, champion)), print)
    alert_decision(RunRecord(work, []), print)
    if not word:
        assert sent_notices == []
        return
    ((key, title, text),) = sent_notices
    assert key == f"0123 {word}"
    assert title == f"m3diff: a model was {word}"
    assert f"m version 7 {outcome}: why. The run was started because new data. " in text
    assert consequence in text
    assert ("is unchanged" in text) == ("is unchanged" in consequence)
