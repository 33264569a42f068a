"""A flow run: the order of its tasks, its final state, its messages, and which errors are retried."""

import os
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prefect import Flow
from prefect._internal import analytics
from prefect.states import Completed, Failed

from flows import dvc, pipeline
from flows.dvc import DvcError
from flows.pipeline import M3DIFF_FLOW_RUN_VARIABLE, full, retrain, run_pipeline
from flows.prepared_flow import flow as prepared_flow
from flows.report import RunRecord
from flows.workspace import NothingNewError, Workspace
from m3diff.provenance.git import GitError
from m3diff.records.errors import DataError
from m3diff.registry.tracking import TrackingUnavailableError
from m3diff.settings.section import ParamsError
from m3diff.stages.register.stage import Registration
from tests.errors import raises
from tests.flows.conftest import REGISTRATION, decision


class Pipeline:
    """Replaces the tasks of the pipeline and records their calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
        self.finished_tasks = []
        self.pages = []
        self.git = []
        self.workspace_arguments = []
        self.log_lines = []
        self.alerted_states = []
        log = self.log_lines.append
        self.logger = SimpleNamespace(info=log, warning=log, error=log)
        self.failing_task = ""
        self.status = {"ingest@a": [], "ingest@b": [], "train": []}
        self.outcomes = {"train": "Restored", "promote": "Rejected"}
        self.root = root
        self.is_prepared = False
        self.data = ()
        stages = {"ingest@a": set(), "ingest@b": set(), "train": {"ingest@a", "ingest@b"}}
        for attribute, fake in {
            "get_run_logger": lambda: self.logger,
            "prepare": lambda: setattr(self, "is_prepared", True),
            "require_own_code": lambda: None,
            "workspace": self.workspace,
            "git": lambda *arguments: self.git.append(arguments),
            "load_params": lambda path: "the parameters",
            "prepare_run": self.prepare_run,
            "notes_on_questions": lambda params: ["other questions"],
            "reproduce": lambda stage, current, return_state: self.task((stage, current), name=stage),
            "push_data": lambda return_state: self.task("push"),
            "register_model": self.register,
            "promote_model": self.promote,
            "dvc.stages": lambda: stages,
            "dvc.commit": lambda message, links: self.finished_tasks.append(message),
            "alerts.alert_decision": lambda record, log: self.alerted_states.append(record.state),
            "report.publish": lambda record, message: self.pages.append((record.state, record.error)),
        }.items():
            monkeypatch.setattr(f"flows.pipeline.{attribute}", fake)

    @contextmanager
    def workspace(self, *arguments: Any):
        assert self.is_prepared
        self.workspace_arguments.append(arguments)
        (self.root / "runs/flows").mkdir(parents=True, exist_ok=True)
        folders = (self.root / "tree", self.root, "commit", "tree")
        yield Workspace(arguments[0], *folders, tuple(arguments[2]), (), self.data)

    def prepare_run(self) -> Any:
        if self.failing_task == "preflight":
            raise DvcError.of_command("stage preflight", 3, [])
        return self.status

    def register(self, return_state: bool):
        self.flow_run_of_register = os.environ.get(M3DIFF_FLOW_RUN_VARIABLE)
        return self.task("register", REGISTRATION)

    def promote(self, version: int, return_state: bool):
        outcome = {"Rejected": "refused", "Skipped": "unchanged"}.get(self.outcomes.get("promote", ""), "promoted")
        return self.task(("promote", version), decision(outcome), name="promote")

    def task(self, task: Any, result: Any = "a result", name: str = ""):
        self.finished_tasks.append(task)
        name = name or task
        if name == self.failing_task:
            return Failed(data=DvcError.of_command(f"stage {name}", 3, []))
        return Completed(name=self.outcomes.get(name, "Ran"), data=result)


@pytest.fixture
def fake_pipeline(monkeypatch, tmp_path) -> Pipeline:
    return Pipeline(monkeypatch, tmp_path)


def run(**changes: Any):
    arguments: dict[str, Any] = {"ref": None, "overrides": [], "reason": "asked for"}
    return run_pipeline(**(arguments | changes))


def test_a_run_does_stages_push_commit_register_and_gate_in_this_order(fake_pipeline):
    state = run(overrides=["train.epochs=6"])
    name = fake_pipeline.workspace_arguments[0][0]
    message = f"""Run {name[:8]}: 3 ran, 1 restored

ingest@a ran
ingest@b ran
train restored
push ran

Flow-Run: {name}
From: commit
Overrides: train.epochs=6
Reason: asked for"""
    ran = [("ingest@a", False), ("ingest@b", False), ("train", False), "push", message, "register", ("promote", 7)]
    assert fake_pipeline.finished_tasks == ran
    assert state.is_completed()
    assert state.name == "Rejected"
    assert state.message == "ingest@a ran, ingest@b ran, train restored, push ran, register ran, promote rejected"
    assert fake_pipeline.pages == [("Rejected", None)]
    assert "preflight: note: other questions" in fake_pipeline.log_lines
    assert fake_pipeline.flow_run_of_register == name, "the version and the record know the flow run"
    assert M3DIFF_FLOW_RUN_VARIABLE not in os.environ


def test_runs_with_the_same_content_share_a_lock_and_a_run_that_waits_says_so(fake_pipeline, tmp_path, monkeypatch):
    locks: list[Path] = []

    @contextmanager
    def wait_for_lock(file: Path, on_wait: Callable[[], None]):
        locks.append(file)
        on_wait()
        assert fake_pipeline.finished_tasks == []
        yield

    monkeypatch.setattr(pipeline, "hold_lock", wait_for_lock)
    run()
    assert locks == [tmp_path / "runs/flows/tree-tree.lock"]
    assert any("this run waits for it" in line for line in fake_pipeline.log_lines)


@pytest.mark.parametrize("state", [Completed(name="Ran", data="done"), Failed(data=ValueError("wrong"))], ids=str)
def test_the_duration_of_a_task_is_recorded_even_if_it_fails(state, fake_pipeline, monkeypatch):
    clock = iter((100.0, 102.5))
    monkeypatch.setattr(pipeline, "time", SimpleNamespace(monotonic=lambda: next(clock)))

    def train(stage: str, return_state: bool) -> Any:
        """Like a task of Prefect, return the state only if it is asked for."""
        return state if return_state else state.result()

    record = RunRecord(Workspace("0123", *[Path()] * 2, "commit", "tree", (), ()), [])
    with nullcontext() if state.is_completed() else pytest.raises(ValueError, match="wrong"):
        assert pipeline.run_task(record, "train", train, "train") == "done"
    assert record.seconds == {"train": 2.5}
    assert record.outcomes == {"train": state.name}


ALL_SKIPPED = dict.fromkeys(("ingest@a", "ingest@b", "train", "push", "register", "promote"), "Skipped")


@pytest.mark.parametrize(
    ("outcomes", "overrides", "name", "git"),
    [
        ({"promote": "Ran"}, [], "Completed", ["update-ref"]),
        ({"promote": "Rejected"}, ["train.epochs=6"], "Rejected", []),  # a run with overrides is not the latest
        (ALL_SKIPPED, [], "Skipped", ["update-ref", "branch"]),
    ],
)
def test_the_state_has_a_name_and_a_run_without_results_leaves_no_branch(fake_pipeline, outcomes, overrides, name, git):
    fake_pipeline.outcomes = outcomes
    fake_pipeline.data = ("a.dvc: as on runs/data",)
    assert run(overrides=overrides, data=bool(overrides)).name == name
    commands = {
        "update-ref": ("update-ref", "refs/heads/runs/latest", "HEAD"),
        "branch": ("branch", "--quiet", "-D", f"runs/{fake_pipeline.workspace_arguments[0][0]}"),
    }
    assert fake_pipeline.git == [commands[word] for word in git]
    assert fake_pipeline.alerted_states == [name]
    assert fake_pipeline.workspace_arguments[0][3] == bool(overrides)
    assert "a.dvc: as on runs/data" in fake_pipeline.log_lines


@pytest.mark.parametrize("outcome", ["Ran", "Skipped"], ids=["runs now", "ran before its command was killed"])
def test_dvc_skips_a_current_stage_unless_an_earlier_one_was_out_of_date(fake_pipeline, outcome):
    """If a killed stage is tried again, DVC may skip it. The stages that depend on it are still out of date."""
    fake_pipeline.status = {"ingest@a": []}
    fake_pipeline.outcomes |= {"ingest@a": outcome, "ingest@b": "Skipped"}
    run()
    assert fake_pipeline.finished_tasks[:3] == [("ingest@a", False), ("ingest@b", True), ("train", False)]


def test_a_run_from_a_champion_trained_on_all_data_is_skipped(fake_pipeline, monkeypatch):
    @contextmanager
    def refuse(*arguments: Any):
        fake_pipeline.workspace_arguments.append(arguments)
        raise NothingNewError("no dataset changed")
        yield

    monkeypatch.setattr(pipeline, "workspace", refuse)
    state = run(replay=0.5)
    assert state.name == "Skipped"
    assert state.message == "no dataset changed"
    assert state.is_completed()
    assert fake_pipeline.workspace_arguments[0][4] == 0.5
    assert fake_pipeline.finished_tasks == fake_pipeline.git == fake_pipeline.pages == []


REFUSALS = {
    "something is not committed": ParamsError("flows.not_committed", names=["params.yaml"], command="git add --all"),
    "no such commit": DataError("flows.no_such_ref", key="ref", value="x", checkout=Path("/checkout")),
    "git refuses": GitError("git.no_repository", path=Path("/folder")),
}


@pytest.mark.parametrize("error", REFUSALS.values(), ids=REFUSALS)
def test_a_refused_run_has_the_reason_as_its_message_and_raises_nothing(error, fake_pipeline, monkeypatch):
    @contextmanager
    def refuse(*arguments: Any):
        raise error
        yield

    monkeypatch.setattr(pipeline, "workspace", refuse)
    state = run()
    assert state.is_failed()
    assert state.name == f"Refused: {str(error).removesuffix(f'; {error.fault.remedy}')}"
    assert state.message == str(error)
    assert fake_pipeline.log_lines == [str(error)]
    assert fake_pipeline.finished_tasks == []
    assert M3DIFF_FLOW_RUN_VARIABLE not in os.environ


def test_a_run_with_the_code_of_another_checkout_is_refused_at_once(fake_pipeline, monkeypatch):
    error = DataError("dvc.code_of_other_checkout", code=Path("/a"), folder=Path("/b"))

    def refuse() -> None:
        raise error

    monkeypatch.setattr(pipeline, "require_own_code", refuse)
    state = run()
    assert state.name == f"Refused: {error.fault.problem}"
    assert state.message == str(error)
    assert fake_pipeline.workspace_arguments == []


def test_an_error_of_a_stage_is_not_a_refusal(fake_pipeline):
    fake_pipeline.failing_task = "train"
    with pytest.raises(DvcError):
        run()
    assert [state for state, _ in fake_pipeline.pages] == ["Failed"]


@pytest.mark.fault("21")
@pytest.mark.parametrize("failing_task", ["preflight", "ingest@a", "train", "push", "register"])
def test_the_first_failure_ends_the_run_with_a_page_that_says_why(fake_pipeline, failing_task):
    """Later runs reuse a lock only if it has every stage and the remote has its outputs."""
    fake_pipeline.failing_task = failing_task
    with raises(DvcError, "flows.command_failed", command=f"stage {failing_task}", exit_code=3) as failure:
        run()
    last_task: dict[str, list[Any]] = {"preflight": [], "push": ["push"], "register": ["register"]}
    assert fake_pipeline.finished_tasks[-1:] == last_task.get(failing_task, [(failing_task, False)])
    ((state, error),) = fake_pipeline.pages
    assert state == "Failed"
    assert error == f"DvcError: {failure.value}"
    assert bool(fake_pipeline.git) == (failing_task == "register")
    assert fake_pipeline.alerted_states == [], "the hook of the flow sends this alert"


def test_without_a_reason_nothing_runs_and_with_one_it_is_kept(fake_pipeline, monkeypatch):
    calls: list[Any] = []
    reasons: list[str] = []
    monkeypatch.setattr(pipeline, "reasons_to_train", lambda *arguments: calls.append(arguments) or reasons)
    state = run(reason="", if_changed=True)
    assert state.name == "Skipped"
    assert state.message == pipeline.NO_REASON
    assert fake_pipeline.finished_tasks == []
    assert fake_pipeline.pages == []
    reasons = ["new data"]
    assert run(reason="the schedule", if_changed=True).name == "Rejected"
    assert (
        fake_pipeline.log_lines.count("because the schedule") == fake_pipeline.log_lines.count("because new data") == 1
    )
    assert calls == [(fake_pipeline.status, "the parameters")] * 2


SCHEDULED = {"if_changed": True, "data": True, "replay": None}


@pytest.mark.parametrize(
    ("flow", "parameters", "expected_arguments"),
    [
        (full, {}, [None, [], "asked for", {"replay": None}]),
        (full, {"ref": "main", "reason": "why", "replay": 0.5}, ["main", [], "why", {"replay": None}]),
        (full, {"overrides": ["a=1"], "warm_start": True}, [None, ["a=1"], "asked for", {"replay": 0.25}]),
        (retrain, {}, ["HEAD", [], "", SCHEDULED]),
        (retrain, {"ref": "main"}, ["main", [], "", SCHEDULED | {"data": False}]),
        (retrain, {"warm_start": True, "replay": 0.5}, ["HEAD", [], "", SCHEDULED | {"replay": 0.5}]),
    ],
)
def test_the_flows_pass_their_parameters_on(monkeypatch, flow, parameters, expected_arguments):
    monkeypatch.setattr(pipeline, "run_pipeline", lambda *arguments, **options: [*arguments, options])
    assert flow.fn(**parameters) == expected_arguments


# The tasks


def test_the_machine_is_checked_before_the_data_are_checked_out_and_the_data_after(monkeypatch):
    actions: list[Any] = []
    monkeypatch.setattr(pipeline, "load_params", lambda path: f"the parameters in {path}")
    monkeypatch.setattr(pipeline, "preflight", lambda params: actions.append(("machine", params)))
    monkeypatch.setattr(dvc, "check_remotes", lambda: actions.append("remotes"))
    monkeypatch.setattr(dvc, "reuse_latest_run", lambda: actions.append("data") or {"train": []})
    monkeypatch.setattr(pipeline, "preflight_data", lambda params: actions.append(("data", params)))
    params = "the parameters in params.yaml"
    assert pipeline.prepare_run.fn() == {"train": []}
    assert actions == [("machine", params), "remotes", "data", ("data", params)]


def test_a_call_of_a_flow_prepares_the_process_before_prefect_looks_for_a_server(monkeypatch):
    actions: list[Any] = []
    monkeypatch.setattr("flows.prepared_flow.prepare", lambda: actions.append("prepared"))
    monkeypatch.setattr(Flow, "__call__", lambda self, *words, **options: actions.append((words, options)) or "a state")
    assert prepared_flow(name="first")(lambda word: word)("word", return_state=True) == "a state"
    assert actions == ["prepared", (("word",), {"return_state": True})]


def test_the_definition_of_a_flow_is_not_reported_to_prefect(monkeypatch):
    """A module defines its flows when it is imported, before `prepare` switches telemetry off."""
    monkeypatch.delenv("DO_NOT_TRACK", raising=False)
    reports: dict[str, str | None] = {}
    monkeypatch.setattr(
        analytics, "try_mark_milestone", lambda name: reports.update({name: os.environ.get("DO_NOT_TRACK")})
    )
    prepared_flow(name="first")(lambda: None)
    assert reports == {"first_flow_defined": "true"}
    assert "DO_NOT_TRACK" not in os.environ


def test_a_stages_state_is_named_as_what_dvc_did_and_its_lines_are_logged(monkeypatch):
    logged: list[str] = []
    monkeypatch.setattr(pipeline, "get_run_logger", lambda: SimpleNamespace(info=logged.append))
    for outcome in ("Ran", "Restored", "Skipped"):
        monkeypatch.setattr(dvc, "repro", lambda stage, log, outcome=outcome: log(f"line of {stage}") or outcome)
        state = pipeline.reproduce.fn("ingest@a")
        assert state.name == outcome
        assert state.message == f"ingest@a: {outcome.lower()}"
        assert state.result() == outcome
    assert logged == ["line of ingest@a"] * 3
    monkeypatch.setattr(dvc, "repro", lambda stage, log: pytest.fail("asked"))
    assert pipeline.reproduce.fn("train", current=True).name == "Skipped"


@pytest.mark.parametrize(
    ("task", "outcome", "name", "expected_arguments"),
    [
        ("register", "registered", "Ran", ["params"]),
        ("register", "updated", "Ran", ["params"]),
        ("register", "unchanged", "Skipped", ["params"]),
        ("promote", "promoted", "Ran", ["params", pipeline.rescore, 7]),
        ("promote", "first", "Ran", ["params", pipeline.rescore, 7]),
        ("promote", "unchanged", "Skipped", ["params", pipeline.rescore, 7]),
        ("promote", "refused", "Rejected", ["params", pipeline.rescore, 7]),
        ("dvc.push", ("Ran", "all of it"), "Ran", []),
    ],
)
def test_the_state_of_push_register_and_promote_tells_their_outcome(
    monkeypatch, task, outcome, name, expected_arguments
):
    result = {"register": lambda: Registration(outcome=outcome, model="m", version=3, run_id="r")}
    result |= {"promote": lambda: decision(outcome), "dvc.push": lambda: outcome}
    done = result[task]()
    received_arguments = []
    monkeypatch.setattr(pipeline, "load_params", lambda path: "params")
    monkeypatch.setattr(f"flows.pipeline.{task}", lambda *arguments: received_arguments.extend(arguments) or done)
    task_functions = {"register": pipeline.register_model.fn, "dvc.push": pipeline.push_data.fn}
    state = task_functions[task]() if task in task_functions else pipeline.promote_model.fn(7)
    assert state.message == ("all of it" if task == "dvc.push" else str(done))
    assert state.result() == ("Ran" if task == "dvc.push" else done)
    assert state.name == name
    assert state.is_completed()
    assert received_arguments == expected_arguments


def test_only_transient_errors_are_retried_stages_once_and_servers_three_times():
    transient_errors = [DvcError.of_command("train", exit_code, []) for exit_code in (75, -9, 137)]
    transient_errors += [
        TrackingUnavailableError("registry.mlflow_not_answering", value="http://a", cause="gone"),
        dvc.RemoteError("flows.missing_in_remote", remote="store", count=1, names=["a"]),
        ConnectionError("gone"),
    ]
    lasting_errors = [DvcError.of_command("train", exit_code, []) for exit_code in (3, 1)]
    lasting_errors += [DataError("dvc.no_lock", path=Path("dvc.lock")), ValueError("a bug")]
    for error in (*transient_errors, *lasting_errors):
        assert pipeline.is_transient(None, None, Failed(data=error)) == (error in transient_errors)
    assert not pipeline.is_transient(None, None, Completed(data="Ran"))
    servers = (pipeline.push_data, pipeline.register_model, pipeline.promote_model)
    assert pipeline.reproduce.retries == 1
    assert pipeline.reproduce.retry_delay_seconds == 10
    assert [(task.retries, task.retry_delay_seconds) for task in servers] == [(3, [5, 20, 60])] * 3
    tasks = (pipeline.prepare_run, pipeline.reproduce, *servers)
    is_transient = pipeline.is_transient
    assert [task.retry_condition_fn for task in tasks] == [None, is_transient, None, is_transient, is_transient], (
        "a remote's error may pass"
    )
