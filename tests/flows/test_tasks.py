"""The tasks of a flow: what each outcome is called, what is tried again, in which order and where a run ends."""

from types import SimpleNamespace

import pytest
from prefect.states import Completed, Failed

from components.promote.promote import Promotion
from components.register.stage import Registration
from components.tracking import TrackingUnavailableError
from flows import dvc, tasks
from flows.dvc import DvcError
from flows.full import full


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


@pytest.mark.parametrize(("outcome", "name"), [("registered", "Ran"), ("updated", "Ran"), ("unchanged", "Skipped")])
def test_registering_what_is_registered_already_is_skipped(monkeypatch, outcome, name):
    done = Registration(outcome=outcome, model="m", version=3, run_id="r")
    monkeypatch.setattr(tasks, "load_params", lambda path: ("params of", str(path)))
    monkeypatch.setattr(tasks, "register", lambda params: done if params == ("params of", "params.yaml") else None)
    state = tasks.register_model.fn()
    assert (state.name, state.message, state.result()) == (name, str(done), name)


@pytest.mark.parametrize(
    ("outcome", "name"), [("promoted", "Ran"), ("first", "Ran"), ("refused", "Refused"), ("unchanged", "Skipped")]
)
def test_to_be_refused_by_the_gate_is_no_failure(monkeypatch, outcome, name):
    gate = {"protocol": "d/p", "metric": "CIDEr", "min_gain": 0.0, "confidence": 0.95, "reason": "why"}
    done = Promotion(outcome=outcome, model="m", challenger=2, champion=1, **gate)
    monkeypatch.setattr(tasks, "load_params", lambda path: ("params of", str(path)))
    monkeypatch.setattr(tasks, "promote", lambda params: done if params == ("params of", "params.yaml") else None)
    state = tasks.promote_model.fn()
    assert (state.name, state.message, state.result()) == (name, f"m version 2 {outcome}: why", name)
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
    for task in (tasks.register_model, tasks.promote_model):
        assert (task.retries, task.retry_delay_seconds) == (3, [5, 20, 60])
    for task in (tasks.reproduce, tasks.register_model, tasks.promote_model):
        assert task.retry_condition_fn is tasks.worth_retrying


def test_in_prefects_page_a_task_has_the_name_of_its_stage():
    assert [task.task_run_name for task in (tasks.reproduce, tasks.register_model, tasks.promote_model)] == [
        "{stage}",
        "register",
        "promote",
    ]


def test_the_end_of_a_task_is_logged_and_its_failure_raised(logged):
    assert tasks.finish(Completed(name="Restored", message="train: restored", data="Restored")) == "Restored"
    assert tasks.finish(Completed(name="Ran", data="Ran")) == "Ran"
    assert logged == ["train: restored", "Ran"]
    with pytest.raises(DvcError, match="stage train exited with 3"):
        tasks.finish(Failed(data=DvcError("stage train", 3, [])))


class Pipeline:
    """The tasks, recorded instead of run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fails: str = "") -> None:
        self.done: list[str] = []
        self.fails = fails
        monkeypatch.setattr(dvc, "stages", lambda: ["ingest@a", "train"])
        monkeypatch.setattr(tasks, "reproduce", self.task)
        monkeypatch.setattr(tasks, "register_model", lambda return_state: self.task("register", return_state))
        monkeypatch.setattr(tasks, "promote_model", lambda return_state: self.task("promote", return_state))

    def task(self, stage: str, return_state: bool):
        assert return_state
        self.done.append(stage)
        if stage == self.fails:
            return Failed(data=DvcError(f"stage {stage}", 3, []))
        outcome = {"train": "Restored", "promote": "Refused"}.get(stage, "Ran")
        return Completed(name=outcome, data=outcome)


def test_the_pipeline_is_every_stage_in_order_then_register_and_promote(monkeypatch, logged):
    pipeline = Pipeline(monkeypatch)
    state = tasks.run_pipeline()
    assert pipeline.done == ["ingest@a", "train", "register", "promote"]
    assert state.is_completed()
    assert state.message == "ingest@a ran, train restored, register ran, promote refused"


@pytest.mark.parametrize(
    ("fails", "done"),
    [("ingest@a", ["ingest@a"]), ("train", ["ingest@a", "train"]), ("register", ["ingest@a", "train", "register"])],
)
def test_the_first_failure_ends_the_run(monkeypatch, logged, fails, done):
    pipeline = Pipeline(monkeypatch, fails)
    with pytest.raises(DvcError, match=f"stage {fails}"):
        tasks.run_pipeline()
    assert pipeline.done == done


def test_the_flow_full_is_the_pipeline(monkeypatch):
    monkeypatch.setattr("flows.full.run_pipeline", lambda: "the pipeline's state")
    assert full.fn() == "the pipeline's state"
