"""The tasks of a flow: what each outcome is called, what is tried again, in which order and where a run ends."""

from types import SimpleNamespace

import pytest
from prefect.states import Completed, Failed

from flows import dvc, tasks
from flows.dvc import DvcError
from m3diff.registry.promote import Promotion
from m3diff.registry.tracking import TrackingUnavailableError
from m3diff.stages.register.stage import Registration


@pytest.fixture
def logged(monkeypatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(tasks, "get_run_logger", lambda: SimpleNamespace(info=lines.append))
    return lines


@pytest.mark.parametrize("outcome", ["Ran", "Restored", "Skipped"])
def test_a_stages_state_is_named_as_what_dvc_did_and_its_lines_are_logged(monkeypatch, logged, outcome):
    def repro(stage, log):
        log(f"line of {stage}")
        return outcome

    monkeypatch.setattr(dvc, "repro", repro)
    state = tasks.reproduce.fn("ingest@minichange")
    assert (state.name, state.message) == (outcome, f"ingest@minichange: {outcome.lower()}")
    assert state.is_completed()
    assert state.result() == outcome
    assert logged == ["line of ingest@minichange"]


def test_dvc_is_not_asked_for_a_stage_that_is_known_to_be_current(monkeypatch):
    monkeypatch.setattr(dvc, "repro", lambda stage, log: pytest.fail("asked"))
    state = tasks.reproduce.fn("train", current=True)
    assert (state.name, state.message) == ("Skipped", "train: skipped")


def test_what_was_sent_to_the_remote_is_said(monkeypatch, logged):
    monkeypatch.setattr(tasks.archive, "push", lambda log: ("Ran", "all of it"))
    state = tasks.push_data.fn()
    assert (state.name, state.message, state.result()) == ("Ran", "all of it", "Ran")


class Looked:
    """What is looked at before a run, in order; DVC's answers are given."""

    def __init__(self, monkeypatch, current: bool, taken_over: bool, taken_up: bool, whole: bool = True) -> None:
        self.seen: list[object] = []
        statuses = iter(({"train": "first"}, {"train": "second"}))
        monkeypatch.setattr(tasks, "load_params", lambda path: f"params of {path}")
        monkeypatch.setattr(tasks, "preflight", self.seen.append)
        monkeypatch.setattr(tasks.archive, "check_remote", lambda: self.seen.append("remote"))
        monkeypatch.setattr(tasks.archive, "can_be_sent", lambda: self.note("send", whole))
        monkeypatch.setattr(dvc, "is_current", lambda: self.note("is it current", current))
        monkeypatch.setattr(dvc, "link_data", lambda: self.seen.append("link"))
        monkeypatch.setattr(dvc, "status", lambda: next(statuses))
        monkeypatch.setattr(tasks.previous, "take_over", lambda tree: self.note(f"over {tree}", taken_over))
        monkeypatch.setattr(tasks.previous, "take_up", lambda tree, new: self.note(f"up {tree} {[*new]}", taken_up))

    def note(self, what: str, answer: bool) -> bool:
        self.seen.append(what)
        return answer


BEFORE = ["params of params.yaml", "remote", "is it current"]


@pytest.mark.parametrize(("taken_up", "status"), [(True, "second"), (False, "first")])
def test_before_anything_runs_the_machine_the_remote_and_earlier_runs_are_looked_at(monkeypatch, taken_up, status):
    looked = Looked(monkeypatch, current=False, taken_over=False, taken_up=taken_up)
    assert tasks.look_before.fn("a tree") == {"train": status}
    assert looked.seen == [*BEFORE, "over a tree", "link", "up a tree ['train']"]


def test_where_all_is_current_no_data_are_linked_and_no_earlier_run_is_looked_at(monkeypatch):
    looked = Looked(monkeypatch, current=True, taken_over=False, taken_up=False)
    assert tasks.look_before.fn("a tree") == {}
    assert looked.seen == [*BEFORE, "send"]


def test_where_the_cache_lost_what_the_remote_needs_the_stages_are_looked_at(monkeypatch):
    looked = Looked(monkeypatch, current=True, taken_over=False, taken_up=False, whole=False)
    assert tasks.look_before.fn("a tree") == {"train": "first"}
    assert looked.seen[3:5] == ["send", "link"]


def test_where_all_is_current_with_the_lock_of_an_earlier_run_no_data_are_linked(monkeypatch):
    looked = Looked(monkeypatch, current=False, taken_over=True, taken_up=False)
    assert tasks.look_before.fn("a tree") == {}
    assert looked.seen == [*BEFORE, "over a tree", "send"]


def test_what_is_registered_already_is_not_registered_again(monkeypatch):
    known = Registration(outcome="unchanged", model="m", version=3, run_id="r")
    monkeypatch.setattr(tasks, "register", lambda params: pytest.fail("no need"))
    state = tasks.register_model.fn(known)
    assert (state.name, state.result()) == ("Skipped", known)


@pytest.mark.parametrize(("outcome", "name"), [("registered", "Ran"), ("updated", "Ran"), ("unchanged", "Skipped")])
def test_registering_what_is_registered_already_is_skipped(monkeypatch, outcome, name):
    done = Registration(outcome=outcome, model="m", version=3, run_id="r")
    monkeypatch.setattr(tasks, "load_params", lambda path: ("params of", str(path)))
    monkeypatch.setattr(tasks, "register", lambda params: done if params == ("params of", "params.yaml") else None)
    state = tasks.register_model.fn(None)
    assert (state.name, state.message, state.result()) == (name, str(done), done)


@pytest.mark.parametrize(
    ("outcome", "name"), [("promoted", "Ran"), ("first", "Ran"), ("refused", "Rejected"), ("unchanged", "Skipped")]
)
def test_the_gate_judges_the_version_of_this_flow_and_to_be_rejected_is_no_failure(monkeypatch, outcome, name):
    gate = {"protocol": "d/p", "metric": "CIDEr", "min_gain": 0.0, "confidence": 0.95, "reason": "why"}
    done = Promotion(outcome=outcome, model="m", challenger=2, champion=1, **gate)
    monkeypatch.setattr(tasks, "load_params", lambda path: ("params of", str(path)))
    asked = (("params of", "params.yaml"), tasks.rescore, 2)
    monkeypatch.setattr(tasks, "promote", lambda *arguments: done if arguments == asked else None)
    state = tasks.promote_model.fn(2)
    assert (state.name, state.message, state.result()) == (name, f"m version 2 {outcome}: why", done)
    assert state.is_completed()


@pytest.mark.parametrize(
    ("error", "again"),
    [
        (DvcError("train", 75, []), True),
        (DvcError("train", -9, []), True),
        (DvcError("train", 137, []), True),
        (DvcError("train", 3, []), False),
        (DvcError("train", 1, []), False),
        (TrackingUnavailableError("gone"), True),
        (ConnectionError("gone"), True),
        (ValueError("a bug"), False),
    ],
)
def test_only_what_may_pass_by_itself_is_tried_again(error, again):
    assert tasks.worth_retrying(None, None, Failed(data=error)) == again


def test_a_completed_task_is_not_tried_again():
    assert not tasks.worth_retrying(None, None, Completed(data="Ran"))


def test_stages_are_tried_twice_and_servers_four_times_with_growing_pauses():
    assert (tasks.reproduce.retries, tasks.reproduce.retry_delay_seconds) == (1, 10)
    for task in (tasks.push_data, tasks.register_model, tasks.promote_model):
        assert (task.retries, task.retry_delay_seconds) == (3, [5, 20, 60])
    assert tasks.push_data.retry_condition_fn is None, "whatever went wrong with the remote may pass"
    for task in (tasks.reproduce, tasks.register_model, tasks.promote_model):
        assert task.retry_condition_fn is tasks.worth_retrying


def test_in_prefects_page_a_task_has_the_name_of_its_stage():
    named = (tasks.look_before, tasks.reproduce, tasks.push_data, tasks.register_model, tasks.promote_model)
    assert [task.task_run_name for task in named] == ["preflight", "{stage}", "push", "register", "promote"]
