"""Somebody is told, once, in a paragraph that says what to do; and telling fails nothing and gives nothing away."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from prefect.blocks.notifications import AppriseNotificationBlock
from prefect.settings import PREFECT_API_URL, PREFECT_UI_URL, temporary_settings
from prefect.states import Crashed, Failed

from flows import notices
from flows.notices import decided, failed, forget, reason_of, tell
from flows.pipeline import full, retrain
from flows.report import Done
from flows.watch import watch
from flows.workspace import FLOWS, Workspace
from m3diff.registry.promote import Promotion
from tests.servers import Listener

GATE = {"protocol": "d/p", "metric": "CIDEr", "min_gain": 0.0, "confidence": 0.95, "reason": "0.1 less"}


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("M3DIFF_NOTIFY", raising=False)
    return tmp_path


def test_a_notice_goes_to_an_address_of_apprise_once_and_the_latest_are_remembered(checkout, listener, monkeypatch):
    monkeypatch.setattr(notices, "REMEMBERED", 2)
    for key in ("a", "a", "b", "c", "c", "b"):
        tell(pytest.fail, key, f"title {key}", "the text", checkout)
    assert [(told["title"], told["message"]) for told in listener.got] == [(f"title {k}", "the text") for k in "abc"]
    forget("b", checkout)
    for key in ("b", "c"):
        tell(pytest.fail, key, "what is over may be told again", "text", checkout)
    assert len(listener.got) == 4
    monkeypatch.delenv("M3DIFF_NOTIFY")
    tell(pytest.fail, "d", "nobody is told", "and nothing waits")
    monkeypatch.setenv("M3DIFF_NOTIFY", listener.address)
    tell(pytest.fail)
    assert len(listener.got) == 4


def test_what_was_not_taken_is_a_warning_and_goes_out_at_the_next_occasion(checkout, listener: Listener, caplog, capfd):
    said: list[str] = []
    listener.code = 500
    tell(said.append, "a", "first", "text")
    tell(said.append, "b", "second", "text")
    assert "first: nobody was told, for M3DIFF_NOTIFY does not work" in said[0]
    assert "2 notice(s) wait" in said[1]
    listener.code = 200
    for _ in range(2):
        tell(said.append, checkout=checkout)
    tell(said.append, "a", "first", "text")
    assert [notice["title"] for notice in listener.got] == ["first", "second"]
    everything = "".join([*said, caplog.text, *capfd.readouterr(), (checkout / FLOWS / "notices.json").read_text()])
    assert "secret-word" not in everything


@pytest.mark.parametrize("fault", ["nonsense://secret-word", "json://", "no-such-block/secret-word", "a full disk"])
def test_a_wrong_address_and_a_full_disk_fail_nothing(checkout, monkeypatch, caplog, capfd, fault):
    def refuse(*words: object) -> None:
        raise OSError(f"secret-word, {words}")

    said: list[str] = []
    monkeypatch.setattr(notices.Block, "load", refuse)
    monkeypatch.setenv("M3DIFF_NOTIFY", fault if "disk" not in fault else "json://")
    if "disk" in fault:
        monkeypatch.setattr(notices, "write_atomic", refuse)
    tell(said.append, "a", "the title", "the text")
    assert len(said) == 1 + ("disk" in fault)
    assert "secret-word" not in "".join([*said, caplog.text, *capfd.readouterr()])


def test_a_block_of_prefects_is_loaded_by_its_name(checkout, listener, monkeypatch):
    block = AppriseNotificationBlock(url=listener.address)
    monkeypatch.setattr(notices.Block, "load", {"custom-webhook/mine": block}.__getitem__)
    monkeypatch.setenv("M3DIFF_NOTIFY", "custom-webhook/mine")
    tell(pytest.fail, "a", "the title", "the text")
    assert [notice["title"] for notice in listener.got] == ["the title"]


# What is told


@pytest.fixture
def told(checkout, monkeypatch) -> list[tuple[str, str, str]]:
    found: list[tuple[str, str, str]] = []
    monkeypatch.setattr(notices, "tell", lambda log, key, title, text, *rest: found.append((key, title, text)))
    return found


RUN = SimpleNamespace(id="0123", name="quiet-owl")
STAGE = Failed(
    message="Flow run encountered an exception: DvcError: stage validate exited with 3\nRunning stage 'validate':\n"
    "rows 7, 9: reference is empty\nERROR: failed to reproduce 'validate': failed to run: x, exited with 3"
)


def test_a_failure_or_crash_of_every_flow_says_which_run_why_where_to_look_and_what_to_do(told):
    for flow in (full, retrain, watch):
        assert flow.on_failure_hooks == flow.on_crashed_hooks == [failed]
    with temporary_settings({PREFECT_UI_URL: "http://ui:4200", PREFECT_API_URL: "http://api:4200/api"}):
        failed(retrain, RUN, STAGE)
    failed(full, RUN, Crashed(message="no heartbeat for 90 s"))
    (key, title, text), (crash, crashed, goes_on) = told
    assert (key, title) == ("0123 failed", "m3diff/retrain failed")
    assert text.startswith(
        "Run 'quiet-owl' of m3diff/retrain failed: DvcError: stage validate exited with 3 "
        "rows 7, 9: reference is empty. http://ui:4200/runs/flow-run/0123 . "
    )
    assert f"worktree {FLOWS}/0123" in text
    assert "prefect deployment run m3diff/retrain" in text
    assert "\n" not in text
    assert (crash, crashed) == ("0123 crashed", "m3diff/full crashed")
    assert "crashed: no heartbeat for 90 s. " in goes_on
    assert "started again by itself" in goes_on


def test_looks_that_fail_for_the_same_reason_are_one_notice_for_another_one_more_and_a_long_error_is_cut(told):
    for number, why in enumerate(["a.dvc: gone", "a.dvc: gone", "b.dvc: gone"]):
        failed(watch, SimpleNamespace(id=number, name="x"), Failed(message=why))
    keys = [key for key, _, _ in told]
    assert keys[0] == keys[1] != keys[2]
    assert all(key.startswith("watch ") for key in keys)
    assert len(reason_of(Failed(message="x" * 10000))) < 500
    assert reason_of(Failed()) == "failed: "


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
    work = Workspace("0123", Path("w"), Path("checkout"), "abc", "tree", (), ())
    made = Promotion(outcome=outcome, model="m", challenger=7, champion=champion, **GATE)
    decided(Done(work, ["new data"], decision=made), print)
    decided(Done(work, []), print)
    if not word:
        assert told == []
        return
    ((key, title, text),) = told
    assert (key, title) == (f"0123 {word}", f"m3diff: a model was {word}")
    assert f"m version 7 {outcome}: 0.1 less. Run because new data. " in text
    assert then in text
    assert ("nothing to do" in text) == ("nothing to do" in then)
