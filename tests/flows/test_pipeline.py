"""A flow run as a whole: the order of its tasks, what each is given, where it ends, and what it leaves behind."""

import os
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prefect.states import Completed, Failed

from flows import archive, dvc, notices, pipeline, raw, report, tasks
from flows.dvc import DvcError
from flows.full import full
from flows.pipeline import FLOW_RUN, run_pipeline
from flows.report import Done
from flows.retrain import retrain
from flows.warm import NothingNewError
from flows.workspace import Workspace
from m3diff.registry.promote import Promotion
from m3diff.stages.register.stage import Registration

REGISTRATION = Registration(outcome="registered", model="m", version=7, run_id="r")
GATE = {"protocol": "d/p", "metric": "CIDEr", "min_gain": 0.0, "confidence": 0.95, "reason": "why"}


def decision(outcome: str) -> Promotion:
    return Promotion(outcome=outcome, model="m", challenger=7, champion=1, **GATE)


class Pipeline:
    """The tasks, recorded instead of run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
        self.done: list[Any] = []
        self.fails, self.status = "", {"ingest@a": [], "ingest@b": [], "train": []}
        self.outcomes = {"train": "Restored", "promote": "Rejected"}
        self.pages: list[tuple[str, str | None]] = []
        self.deleted: list[tuple[str, ...]] = []
        self.opened: list[Any] = []
        self.logged: list[str] = []
        self.root, self.data = root, ()
        logger = SimpleNamespace(info=self.logged.append, warning=self.logged.append)
        monkeypatch.setattr(pipeline, "get_run_logger", lambda: logger)
        stages = {"ingest@a": set(), "ingest@b": set(), "train": {"ingest@a", "ingest@b"}}
        monkeypatch.setattr(dvc, "stages", lambda: stages)
        monkeypatch.setattr(raw, "in_place", self.in_place)
        monkeypatch.setattr(pipeline, "workspace", self.workspace)
        monkeypatch.setattr(pipeline, "git", lambda *arguments: self.deleted.append(arguments))
        self.champion: Registration | None = None
        monkeypatch.setattr(pipeline, "load_params", lambda path: "the parameters")
        monkeypatch.setattr(pipeline, "current_champion", lambda params: self.champion)
        monkeypatch.setattr(dvc, "link_data", lambda: self.done.append("link"))
        monkeypatch.setattr(tasks, "look_before", lambda tree: self.status if tree == "tree" else None)
        monkeypatch.setattr(tasks, "reproduce", self.reproduce)
        monkeypatch.setattr(tasks, "push_data", lambda return_state: self.task("push"))
        monkeypatch.setattr(tasks, "register_model", self.register)
        monkeypatch.setattr(tasks, "promote_model", self.promote)
        monkeypatch.setattr(archive, "commit", lambda message, links: self.done.append(message.split("\n")[0]))
        self.told: list[str] = []
        monkeypatch.setattr(notices, "decided", lambda done, log: self.told.append(done.state))
        monkeypatch.setattr(report, "publish", lambda done, message: self.pages.append((done.state, done.error)))

    @contextmanager
    def workspace(self, *arguments: Any):
        self.opened.append(arguments)
        (self.root / "runs/flows").mkdir(parents=True, exist_ok=True)
        yield Workspace(
            arguments[0], self.root / "tree", self.root, "commit", "tree", tuple(arguments[2]), (), self.data
        )

    @contextmanager
    def in_place(self, checkout: Path, changed: Any):
        assert checkout == self.root
        self.done.append(("raw data for", *changed))
        yield
        self.done.append("raw data no more")

    def reproduce(self, stage: str, current: bool, return_state: bool):
        return self.task((stage, current), name=stage)

    def register(self, known: Registration | None, return_state: bool):
        self.known = known
        return self.task("register", REGISTRATION)

    def promote(self, version: int, return_state: bool):
        outcome = {"Rejected": "refused", "Skipped": "unchanged"}.get(self.outcomes.get("promote", ""), "promoted")
        return self.task(("promote", version), decision(outcome), name="promote")

    def task(self, what: Any, result: Any = "a result", name: str = ""):
        self.done.append(what)
        name = name or what
        if name == self.fails:
            return Failed(data=DvcError(f"stage {name}", 3, []))
        return Completed(name=self.outcomes.get(name, "Ran"), data=result)


@pytest.fixture
def recorded(monkeypatch, tmp_path) -> Pipeline:
    return Pipeline(monkeypatch, tmp_path)


def run(**changes: Any):
    asked: dict[str, Any] = {"ref": None, "overrides": [], "dirty": False, "reason": "asked for"}
    return run_pipeline(**(asked | changes))


def test_every_stage_in_order_then_push_then_the_commit_then_register_and_the_gate_on_that_version(recorded):
    state = run()
    assert recorded.done == [
        ("raw data for", "ingest@a", "ingest@b", "train"),
        ("ingest@a", False),
        ("ingest@b", False),
        ("train", False),
        "push",
        f"Run {recorded.opened[0][0][:8]}: 3 ran, 1 restored",
        "register",
        ("promote", 7),
        "raw data no more",
    ]
    assert state.is_completed()
    assert state.name == "Rejected"
    assert state.message == ("ingest@a ran, ingest@b ran, train restored, push ran, register ran, promote rejected")
    assert recorded.pages == [("Rejected", None)]
    assert recorded.deleted == []


def test_dvc_is_not_asked_for_a_stage_that_is_current_unless_one_before_it_was_asked_for(recorded):
    recorded.status = {"ingest@a": []}
    recorded.outcomes |= {"ingest@b": "Skipped"}
    run()
    assert recorded.done[1:4] == [("ingest@a", False), ("ingest@b", True), ("train", False)]


def test_what_follows_a_stage_that_was_made_before_its_command_was_killed_is_asked_for(recorded):
    """The second try finds it recorded: DVC says that nothing changed, and what follows is out of date all the same."""
    recorded.status = {"ingest@a": []}
    recorded.outcomes = {"ingest@a": "Skipped", "ingest@b": "Skipped"}
    run()
    assert recorded.done[1:4] == [("ingest@a", False), ("ingest@b", True), ("train", False)]


def test_where_all_is_current_and_champion_no_data_are_linked(recorded):
    recorded.status, recorded.champion = {}, REGISTRATION
    recorded.outcomes = dict.fromkeys(("ingest@a", "ingest@b", "train"), "Skipped")
    run()
    assert recorded.done[:3] == [("ingest@a", True), ("ingest@b", True), ("train", True)]
    assert recorded.known == REGISTRATION


def test_where_all_is_current_and_no_champion_the_data_are_linked_for_register_and_the_gate(recorded):
    recorded.status = {}
    run()
    assert recorded.done[:3] == ["link", ("raw data for",), ("ingest@a", True)]
    assert recorded.known is None


def test_a_run_from_the_champion_that_has_seen_all_data_is_skipped(recorded, monkeypatch):
    @contextmanager
    def refuse(*arguments: Any):
        recorded.opened.append(arguments)
        raise NothingNewError("no dataset changed")
        yield

    monkeypatch.setattr(pipeline, "workspace", refuse)
    state = run(replay=0.5)
    assert (state.name, state.message, state.is_completed()) == ("Skipped", "no dataset changed", True)
    assert recorded.opened[0][5] == 0.5
    assert recorded.done == recorded.deleted == recorded.pages == []


@pytest.mark.parametrize("flow", [full, retrain])
@pytest.mark.parametrize(("asked", "replay"), [({}, None), ({"warm_start": True}, 0.25), ({"replay": 0.5}, None)])
def test_a_flow_begins_with_the_base_unless_it_is_asked_for_the_champion(monkeypatch, flow, asked, replay):
    got: dict[str, Any] = {}
    module = sys.modules[flow.fn.__module__]
    monkeypatch.setattr(module, "run_pipeline", lambda *_, **more: got.update(more))
    if flow is retrain:
        monkeypatch.setattr(module, "coalesce_late", list)
    flow.fn(**asked)
    assert got["replay"] == replay


def test_a_champion_is_not_asked_for_where_a_stage_is_out_of_date(recorded):
    recorded.champion = REGISTRATION
    run()
    assert recorded.known is None
    assert "link" not in recorded.done, "they are linked already"


def test_a_run_that_made_nothing_is_skipped_and_leaves_no_branch(recorded):
    recorded.outcomes = dict.fromkeys(("ingest@a", "ingest@b", "train", "push", "register", "promote"), "Skipped")
    state = run()
    assert state.name == "Skipped"
    assert recorded.deleted == [("branch", "--quiet", "-D", f"runs/{recorded.opened[0][0]}")]


def test_what_is_promoted_is_a_completed_run(recorded):
    recorded.outcomes = {"promote": "Ran"}
    assert run().name == "Completed"


@pytest.mark.fault("21")
@pytest.mark.parametrize(
    ("fails", "last", "whole"),
    [
        ("ingest@a", ("ingest@a", False), False),
        ("train", ("train", False), False),
        ("push", "push", True),
        ("register", "register", True),
    ],
)
def test_the_first_failure_ends_the_run_with_a_page_that_says_why(recorded, monkeypatch, fails, last, whole):
    """Later runs take up a lock only where it has every stage."""
    recorded.fails = fails
    messages: list[str] = []
    publish = report.publish
    monkeypatch.setattr(report, "publish", lambda done, message: publish(done, message) or messages.append(message))
    with pytest.raises(DvcError, match=f"stage {fails}"):
        run()
    assert recorded.done[-1] == last
    ((state, error),) = recorded.pages
    assert state == "Failed"
    assert error is not None
    assert error.startswith(f"DvcError: stage {fails} exited with 3")
    assert ("\nTree: tree\n" in messages[0] + "\n") == whole


def test_what_fails_before_any_stage_is_on_the_page_too(recorded, monkeypatch):
    def refuses(tree: str) -> None:
        raise ValueError("no room")

    monkeypatch.setattr(tasks, "look_before", refuses)
    with pytest.raises(ValueError, match="no room"):
        run()
    assert recorded.pages == [("Failed", "ValueError: no room")]
    assert recorded.done == []


def test_the_version_and_the_record_know_the_flow_run(recorded, monkeypatch):
    seen: list[str | None] = []
    monkeypatch.setattr(tasks, "register_model", lambda known, return_state: seen.append(os.environ.get(FLOW_RUN)))
    with pytest.raises(AttributeError):
        run()
    assert seen == [recorded.opened[0][0]]
    assert FLOW_RUN not in os.environ


def test_one_that_waited_for_the_same_work_is_skipped(recorded, monkeypatch):
    @contextmanager
    def waited(work: Workspace, log: Any):
        yield "the other"

    monkeypatch.setattr(pipeline, "alone", waited)
    state = run()
    assert (state.name, state.message) == ("Skipped", "flow run the other did the same work meanwhile")
    assert recorded.done == []
    assert len(recorded.deleted) == 1


def test_a_run_that_ended_well_says_so_to_those_that_wait_and_a_failed_one_does_not(recorded, monkeypatch):
    finished: list[str] = []
    monkeypatch.setattr(pipeline, "finish", lambda work: finished.append(work.flow_run))
    run()
    recorded.fails = "train"
    with pytest.raises(DvcError):
        run()
    assert finished == [recorded.opened[0][0]]


def test_without_a_reason_nothing_runs_and_with_one_it_is_kept(recorded):
    def reasons(status: Any, params: Any) -> list[str]:
        assert (status, params) == (recorded.status, "the parameters")
        return found

    found: list[str] = []
    state = run(reason="", worthwhile=reasons)
    assert (state.name, state.message) == ("Skipped", pipeline.NO_REASON)
    assert (recorded.done, recorded.pages) == ([], [])
    found = ["new data"]
    assert run(reason="the schedule", worthwhile=reasons).name == "Rejected"
    assert recorded.logged.count("because the schedule") == recorded.logged.count("because new data") == 1


def test_the_data_that_watch_found_are_taken_up_where_asked_and_the_log_says_so(recorded):
    recorded.data = ("a.dvc: as on runs/data",)
    run()
    run(data=True)
    assert [arguments[4] for arguments in recorded.opened] == [False, True]
    assert recorded.logged.count("a.dvc: as on runs/data") == 2


def test_a_decision_of_the_gate_is_told_and_a_failure_is_left_to_the_hook_of_the_flow(recorded):
    run()
    assert recorded.told == ["Rejected"]
    recorded.fails = "train"
    with pytest.raises(DvcError):
        run()
    assert recorded.told == ["Rejected"]


def test_the_commit_says_what_ran_from_what_and_why(recorded):
    work = Workspace("0123456789", Path("w"), Path("c"), "abc", "tree", ("train.epochs=6",), ())
    done = Done(work, ["new data"], outcomes={"ingest@a": "Skipped", "train": "Ran"}, whole=True)
    assert pipeline.message_of(done).split("\n") == [
        "Run 01234567: 1 skipped, 1 ran",
        "",
        "ingest@a skipped",
        "train ran",
        "",
        "Flow-Run: 0123456789",
        "From: abc",
        "Tree: tree",
        "Overrides: train.epochs=6",
        "Reason: new data",
    ]


def test_the_flows_hand_on_what_they_are_asked(monkeypatch):
    asked: list[Any] = []
    for place in ("flows.full.run_pipeline", "flows.retrain.run_pipeline"):
        monkeypatch.setattr(place, lambda *arguments, **named: asked.append((arguments, named)))
    full.fn()
    full.fn("main", ["train.epochs=6"], True, "why")
    retrain.fn()
    assert [arguments for arguments, _ in asked[:2]] == [
        (None, [], False, "asked for"),
        ("main", ["train.epochs=6"], True, "why"),
    ]
    (arguments, named) = asked[2]
    assert arguments == ("HEAD", [])
    assert named["reason"] == ""
    assert named["worthwhile"].__name__ == "look_for_changes"
    assert named["dirty"] is False
