"""Notices: who is told, once, in a paragraph that gives nothing away."""

from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import pytest
from prefect.settings import PREFECT_API_URL, PREFECT_UI_URL, temporary_settings
from prefect.states import Crashed, Failed

from flows import notices
from flows.notices import notify_decision, notify_failure, reason_of, send_notice
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
    monkeypatch.setattr(notices, "MAX_REMEMBERED", 2)
    for key in ("a", "a", "b", "c", "c", "b"):
        send_notice(pytest.fail, key, f"title {key}", "the text", checkout)
    assert [(told["title"], told["message"]) for told in listener.got] == [(f"title {k}", "the text") for k in "abc"]
    monkeypatch.delenv("M3DIFF_NOTIFY")
    send_notice(pytest.fail, "d", "nobody is told", "and nothing waits")
    monkeypatch.setenv("M3DIFF_NOTIFY", listener.address)
    send_notice(pytest.fail)
    assert len(listener.got) == 3


def test_what_was_not_taken_is_a_warning_and_goes_out_at_the_next_occasion(checkout, listener: Listener, caplog, capfd):
    said: list[str] = []
    listener.code = 500
    send_notice(said.append, "a", "first", "text")
    send_notice(said.append, "b", "second", "text")
    assert "first: the notice was not sent, because M3DIFF_NOTIFY does not work" in said[0]
    assert "2 notice(s) wait" in said[1]
    listener.code = 200
    for _ in range(2):
        send_notice(said.append, checkout=checkout)
    send_notice(said.append, "a", "first", "text")
    assert [notice["title"] for notice in listener.got] == ["first", "second"]
    everything = "".join(
        [*said, caplog.text, *capfd.readouterr(), (checkout / FLOWS_FOLDER / "notices.json").read_text()]
    )
    assert "secret-word" not in everything


@pytest.mark.parametrize("fault", ["nonsense://secret-word", "json://", "no-address/secret-word", "a full disk"])
def test_a_wrong_address_and_a_full_disk_fail_nothing(checkout, monkeypatch, caplog, capfd, fault):
    def refuse(*words: object) -> None:
        raise OSError(f"secret-word, {words}")

    said: list[str] = []
    monkeypatch.setenv("M3DIFF_NOTIFY", fault if "disk" not in fault else "json://")
    if "disk" in fault:
        monkeypatch.setattr(notices, "write_atomic", refuse)
    send_notice(said.append, "a", "the title", "the text")
    assert len(said) == 1 + ("disk" in fault)
    assert "secret-word" not in "".join([*said, caplog.text, *capfd.readouterr()])


@pytest.fixture
def told(checkout, monkeypatch) -> list[tuple[str, str, str]]:
    found: list[tuple[str, str, str]] = []
    monkeypatch.setattr(notices, "send_notice", lambda log, key, title, text, *rest: found.append((key, title, text)))
    return found


RUN = SimpleNamespace(id="0123", name="quiet-owl")


STAGE = Failed(
    message="Flow run encountered an exception: DvcError: stage validate exited with 3\nRunning stage 'validate':\n"
    "rows 7, 9: reference is empty\nERROR: failed to reproduce 'validate': failed to run: x, exited with 3"
)


def test_a_notice_of_a_failure_or_crash_names_run_reason_place_and_next_step(told):
    for flow in (full, retrain, watch):
        assert flow.on_failure_hooks == flow.on_crashed_hooks == [notify_failure]
    with temporary_settings({PREFECT_UI_URL: "http://ui:4200", PREFECT_API_URL: "http://api:4200/api"}):
        notify_failure(retrain, RUN, STAGE)
    notify_failure(full, RUN, Crashed(message="no heartbeat for 90 s"))
    (key, title, text), (crash, crashed, goes_on) = told
    assert key == "0123 failed"
    assert title == "m3diff/retrain failed"
    assert text.startswith(
        "Run 'quiet-owl' of m3diff/retrain failed: DvcError: stage validate exited with 3 "
        "rows 7, 9: reference is empty. http://ui:4200/runs/flow-run/0123 . "
    )
    assert f"worktree {FLOWS_FOLDER}/0123" in text
    assert "prefect deployment run m3diff/retrain" in text
    assert "\n" not in text
    assert crash == "0123 crashed"
    assert crashed == "m3diff/full crashed"
    assert "crashed: no heartbeat for 90 s. " in goes_on
    assert "started again by itself" in goes_on


def test_the_notice_of_a_refused_run_promises_no_worktree(told):
    notify_failure(
        full, RUN, Failed(name="Refused: not committed: params.yaml", message="not committed: params.yaml; commit it")
    )
    _, _, text = told[0]
    assert "Nothing was started" in text
    assert "worktree" not in text


def test_looks_that_fail_for_one_reason_send_one_notice_and_long_errors_are_cut(told):
    for number, why in enumerate(["a.dvc: gone", "a.dvc: gone", "b.dvc: gone"]):
        notify_failure(watch, SimpleNamespace(id=number, name="x"), Failed(message=why))
    keys = [key for key, _, _ in told]
    assert keys[0] == keys[1] != keys[2]
    assert all(key.endswith(f" {datetime.now(UTC).date()}") for key in keys), "again on another day"
    assert len(reason_of(Failed(message="x" * 10000))) < 500
    assert reason_of(Failed()) == "failed: "


@pytest.mark.fault("T10")
@pytest.mark.parametrize(
    ("outcome", "champion", "word", "then"),
    [
        ("refused", 1, "rejected", "The champion is unchanged: 1"),
        ("refused", None, "rejected", "The champion is unchanged: none"),
        ("promoted", 1, "promoted", "The previous champion was 1. To restore it, run `m3diff rollback"),
        ("first", None, "promoted", "m3diff rollback"),
        ("unchanged", 1, "", ""),
    ],
)
def test_a_decision_of_the_gate_is_told_with_its_numbers_and_the_reason_of_the_run(told, outcome, champion, word, then):
    work = Workspace("0123", Path("w"), Path("checkout"), "abc", "tree", (), ())
    notify_decision(RunRecord(work, ["new data"], decision=decision(outcome, champion)), print)
    notify_decision(RunRecord(work, []), print)
    if not word:
        assert told == []
        return
    ((key, title, text),) = told
    assert key == f"0123 {word}"
    assert title == f"m3diff: a model was {word}"
    assert f"m version 7 {outcome}: why. The run was started because new data. " in text
    assert then in text
    assert ("stays" in text) == ("stays" in then)
