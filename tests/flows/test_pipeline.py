"""A flow run as a whole: its tasks in order, its end, what each says and when it is tried again; its page; when the
schedule trains again; and who is told: once, in a paragraph that gives nothing away."""

import contextlib
import json
import os
import shutil
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from prefect.settings import PREFECT_API_URL, PREFECT_UI_URL, temporary_settings
from prefect.states import Completed, Crashed, Failed

from flows import dvc, pipeline, report
from flows.dvc import DvcError
from flows.pipeline import FLOW_RUN, full, look_for_changes, retrain, run_pipeline, unregistered
from flows.report import Done, decided, failed, reason_of, tell
from flows.watch import watch
from flows.workspace import FLOWS, NothingNewError, Workspace
from m3diff.provenance.dvc import Lock
from m3diff.records.errors import DataError
from m3diff.registry import tracking
from m3diff.registry.promote import Promotion
from m3diff.registry.tracking import TrackingUnavailableError
from m3diff.settings.load import load_params
from m3diff.stages.register.stage import Registration
from tests import toy
from tests.servers import Listener
from tests.toy import REPOSITORY

REGISTRATION = Registration(outcome="registered", model="m", version=7, run_id="r")


def decision(outcome: str, champion: int | None = 1) -> Promotion:
    gate = {"protocol": "d/p", "metric": "CIDEr", "min_gain": 0.0, "confidence": 0.95, "reason": "why"}
    return Promotion(outcome=outcome, model="m", challenger=7, champion=champion, **gate)


class Pipeline:
    """The tasks, recorded instead of run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
        self.done, self.pages, self.git, self.opened, self.logged, self.told = [], [], [], [], [], []
        self.fails, self.status = "", {"ingest@a": [], "ingest@b": [], "train": []}
        self.outcomes = {"train": "Restored", "promote": "Rejected"}
        self.root, self.data = root, ()
        stages = {"ingest@a": set(), "ingest@b": set(), "train": {"ingest@a", "ingest@b"}}
        for place, fake in {
            "get_run_logger": lambda: SimpleNamespace(info=self.logged.append, warning=self.logged.append),
            "workspace": self.workspace,
            "git": lambda *arguments: self.git.append(arguments),
            "load_params": lambda path: "the parameters",
            "look_before": self.look_before,
            "reproduce": lambda stage, current, return_state: self.task((stage, current), name=stage),
            "push_data": lambda return_state: self.task("push"),
            "register_model": self.register,
            "promote_model": self.promote,
            "dvc.stages": lambda: stages,
            "dvc.commit": lambda message, links: self.done.append(message),
            "report.decided": lambda done, log: self.told.append(done.state),
            "report.publish": lambda done, message: self.pages.append((done.state, done.error)),
        }.items():
            monkeypatch.setattr(f"flows.pipeline.{place}", fake)

    @contextmanager
    def workspace(self, *arguments: Any):
        self.opened.append(arguments)
        (self.root / "runs/flows").mkdir(parents=True, exist_ok=True)
        place = (self.root / "tree", self.root, "commit", "tree")
        yield Workspace(arguments[0], *place, tuple(arguments[2]), (), self.data)

    def look_before(self) -> Any:
        if self.fails == "preflight":
            raise DvcError("stage preflight", 3, [])
        return self.status

    def register(self, return_state: bool):
        self.known_as = os.environ.get(FLOW_RUN)
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
    asked: dict[str, Any] = {"ref": None, "overrides": [], "reason": "asked for"}
    return run_pipeline(**(asked | changes))


def test_every_stage_in_order_then_push_then_the_commit_then_register_and_the_gate_on_that_version(recorded):
    state = run(overrides=["train.epochs=6"])
    name = recorded.opened[0][0]
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
    assert recorded.done == ran
    assert (state.is_completed(), state.name) == (True, "Rejected")
    assert state.message == "ingest@a ran, ingest@b ran, train restored, push ran, register ran, promote rejected"
    assert recorded.pages == [("Rejected", None)]
    assert recorded.known_as == name, "the version and the record know the flow run"
    assert FLOW_RUN not in os.environ


NOTHING_MADE = dict.fromkeys(("ingest@a", "ingest@b", "train", "push", "register", "promote"), "Skipped")


@pytest.mark.parametrize(
    ("outcomes", "overrides", "name", "git"),
    [
        ({"promote": "Ran"}, [], "Completed", ["update-ref"]),
        ({"promote": "Rejected"}, ["train.epochs=6"], "Rejected", []),  # with parameters of its own not the latest
        (NOTHING_MADE, [], "Skipped", ["update-ref", "branch"]),
    ],
)
def test_a_run_ends_in_a_word_and_one_that_made_nothing_leaves_no_branch(recorded, outcomes, overrides, name, git):
    recorded.outcomes, recorded.data = outcomes, ("a.dvc: as on runs/data",)
    assert run(overrides=overrides, data=bool(overrides)).name == name
    assert [words[0] for words in recorded.git] == git
    assert recorded.git[1:] in ([], [("branch", "--quiet", "-D", f"runs/{recorded.opened[0][0]}")])
    assert recorded.told == [name]
    assert recorded.opened[0][3] == bool(overrides)
    assert "a.dvc: as on runs/data" in recorded.logged


@pytest.mark.parametrize("made", ["Ran", "Skipped"], ids=["made now", "made before its command was killed"])
def test_dvc_is_not_asked_for_a_stage_that_is_current_unless_one_before_it_was_asked_for(recorded, made):
    """The second try of a killed stage finds it recorded, and what follows is out of date all the same."""
    recorded.status = {"ingest@a": []}
    recorded.outcomes |= {"ingest@a": made, "ingest@b": "Skipped"}
    run()
    assert recorded.done[:3] == [("ingest@a", False), ("ingest@b", True), ("train", False)]


def test_a_run_from_the_champion_that_has_seen_all_data_is_skipped(recorded, monkeypatch):
    @contextmanager
    def refuse(*arguments: Any):
        recorded.opened.append(arguments)
        raise NothingNewError("no dataset changed")
        yield

    monkeypatch.setattr(pipeline, "workspace", refuse)
    state = run(replay=0.5)
    assert (state.name, state.message, state.is_completed()) == ("Skipped", "no dataset changed", True)
    assert recorded.opened[0][4] == 0.5
    assert recorded.done == recorded.git == recorded.pages == []


@pytest.mark.fault("21")
@pytest.mark.parametrize("fails", ["preflight", "ingest@a", "train", "push", "register"])
def test_the_first_failure_ends_the_run_with_a_page_that_says_why(recorded, fails):
    """Later runs take up a lock only where it has every stage and the remote what it names."""
    recorded.fails = fails
    with pytest.raises(DvcError, match=f"stage {fails}"):
        run()
    last: dict[str, list[Any]] = {"preflight": [], "push": ["push"], "register": ["register"]}
    assert recorded.done[-1:] == last.get(fails, [(fails, False)])
    ((state, error),) = recorded.pages
    assert state == "Failed"
    assert error.startswith(f"DvcError: stage {fails} exited with 3")
    assert bool(recorded.git) == (fails == "register")
    assert recorded.told == [], "that is left to the hook of the flow"


def test_without_a_reason_nothing_runs_and_with_one_it_is_kept(recorded, monkeypatch):
    asked: list[Any] = []
    found: list[str] = []
    monkeypatch.setattr(pipeline, "look_for_changes", lambda *given: asked.append(given) or found)
    state = run(reason="", if_changed=True)
    assert (state.name, state.message) == ("Skipped", pipeline.NO_REASON)
    assert (recorded.done, recorded.pages) == ([], [])
    found = ["new data"]
    assert run(reason="the schedule", if_changed=True).name == "Rejected"
    assert recorded.logged.count("because the schedule") == recorded.logged.count("because new data") == 1
    assert asked == [(recorded.status, "the parameters")] * 2


SCHEDULED = {"if_changed": True, "data": True, "replay": None}


@pytest.mark.parametrize(
    ("flow", "given", "asked"),
    [
        (full, {}, [None, [], "asked for", {"replay": None}]),
        (full, {"ref": "main", "reason": "why", "replay": 0.5}, ["main", [], "why", {"replay": None}]),
        (full, {"overrides": ["a=1"], "warm_start": True}, [None, ["a=1"], "asked for", {"replay": 0.25}]),
        (retrain, {}, ["HEAD", [], "", SCHEDULED]),
        (retrain, {"ref": "main"}, ["main", [], "", SCHEDULED | {"data": False}]),
        (retrain, {"warm_start": True, "replay": 0.5}, ["HEAD", [], "", SCHEDULED | {"replay": 0.5}]),
    ],
)
def test_the_flows_hand_on_what_they_are_asked(monkeypatch, flow, given, asked):
    monkeypatch.setattr(pipeline, "require_own_code", lambda: None)
    monkeypatch.setattr(pipeline, "run_pipeline", lambda *got, **named: [*got, named])
    assert flow.fn(**given) == asked


# The tasks


def test_a_stages_state_is_named_as_what_dvc_did_and_its_lines_are_logged(monkeypatch):
    logged: list[str] = []
    monkeypatch.setattr(pipeline, "get_run_logger", lambda: SimpleNamespace(info=logged.append))
    for outcome in ("Ran", "Restored", "Skipped"):
        monkeypatch.setattr(dvc, "repro", lambda stage, log, outcome=outcome: log(f"line of {stage}") or outcome)
        state = pipeline.reproduce.fn("ingest@a")
        assert (state.name, state.message, state.result()) == (outcome, f"ingest@a: {outcome.lower()}", outcome)
    assert logged == ["line of ingest@a"] * 3
    monkeypatch.setattr(dvc, "repro", lambda stage, log: pytest.fail("asked"))
    assert pipeline.reproduce.fn("train", current=True).name == "Skipped"


@pytest.mark.parametrize(
    ("task", "made", "name", "asked"),
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
def test_the_state_of_what_acts_outside_says_what_came_of_it(monkeypatch, task, made, name, asked):
    result = {"register": lambda: Registration(outcome=made, model="m", version=3, run_id="r")}
    result |= {"promote": lambda: decision(made), "dvc.push": lambda: made}
    done, given = result[task](), []
    monkeypatch.setattr(pipeline, "load_params", lambda path: "params")
    monkeypatch.setattr(f"flows.pipeline.{task}", lambda *arguments: given.extend(arguments) or done)
    does = {"register": pipeline.register_model.fn, "dvc.push": pipeline.push_data.fn}
    state = does[task]() if task in does else pipeline.promote_model.fn(7)
    told = ("all of it", "Ran") if task == "dvc.push" else (str(done), done)
    assert (state.message, state.result()) == told
    assert (state.name, state.is_completed(), given) == (name, True, asked)


def test_only_what_may_pass_by_itself_is_tried_again_stages_twice_and_servers_four_times():
    passing = [DvcError("train", code, []) for code in (75, -9, 137)]
    passing += [TrackingUnavailableError("gone"), ConnectionError("gone")]
    lasting = [DvcError("train", 3, []), DvcError("train", 1, []), DataError("the same again"), ValueError("a bug")]
    for error in (*passing, *lasting):
        assert pipeline.worth_retrying(None, None, Failed(data=error)) == (error in passing)
    assert not pipeline.worth_retrying(None, None, Completed(data="Ran"))
    servers = (pipeline.push_data, pipeline.register_model, pipeline.promote_model)
    assert (pipeline.reproduce.retries, pipeline.reproduce.retry_delay_seconds) == (1, 10)
    assert [(task.retries, task.retry_delay_seconds) for task in servers] == [(3, [5, 20, 60])] * 3
    tasks, worth = (pipeline.look_before, pipeline.reproduce, *servers), pipeline.worth_retrying
    assert [task.retry_condition_fn for task in tasks] == [None, worth, None, worth, worth], "a remote's error may pass"


# The page


PARAMS = load_params(REPOSITORY / "params.yaml")


@pytest.fixture
def done(tmp_path, monkeypatch) -> Done:
    """A run that was evaluated; the current directory holds its files."""
    monkeypatch.chdir(tmp_path)
    work = Workspace("0123456789ab", tmp_path, tmp_path / "checkout", "c" * 40, "tree", (), ("runs",))
    scores = PARAMS.paths.report / "headline.json"
    scores.parent.mkdir(parents=True)
    scores.write_text(json.dumps({"d/p": {"CIDEr": 125.04}}))
    ran = {"outcomes": {"train": "Ran", "promote": "Rejected"}, "seconds": {"train": 3725.0, "promote": 1.25}}
    return Done(work, ["new data"], started=0.0, registration=REGISTRATION, decision=decision("refused"), **ran)


@pytest.mark.fault("see")
def test_the_page_says_what_came_out_why_it_ran_how_long_it_took_and_where_to_look(done):
    served = PARAMS.register_.model_copy(update={"tracking_uri": "http://127.0.0.1:5000"})
    found = "\n".join(report.page(done, PARAMS.model_copy(update={"register_": served})))
    assert found.startswith(f"# Rejected: run `01234567` of commit `{'c' * 12}`")
    for words in (
        "- because new data",
        "began 1970-01-01 00:00:00 UTC, took 1:02:06; branch `runs/0123456789ab`",
        "m version 7 refused: why",
        "| train | Ran | 1:02:05 |\n| promote | Rejected | 0:00:01 |",
        "| d/p | CIDEr | 125.0 |",
        "m version 7, MLflow run `r`",
        "[the version](http://127.0.0.1:5000/#/models/m/versions/7)",
    ):
        assert words in found
    (PARAMS.paths.report / "headline.json").unlink()
    done.error, done.decision, done.registration = "DvcError: stage train exited with 3", None, None
    found = "\n".join(report.page(done, PARAMS))
    assert (found.startswith("# Failed"), "## Scores" in found) == (True, False)
    assert "DvcError: stage train exited with 3" in found
    assert f"Its worktree is kept: `{done.work.root}`" in found


def test_the_page_is_an_artifact_and_where_the_run_made_something_a_commit(done, monkeypatch):
    kept: list[Any] = []

    def refuse(**artifact: str) -> None:
        raise ConnectionError("the server is gone")

    monkeypatch.setattr(report, "load_params", lambda path: PARAMS)
    monkeypatch.setattr(report, "create_markdown_artifact", lambda **artifact: kept.append(artifact))
    monkeypatch.setattr(dvc, "commit", lambda *given: kept.append(given))
    monkeypatch.setattr(report, "publish_branch", lambda work, log: kept.append(work.branch))
    monkeypatch.setattr(report, "get_run_logger", lambda: SimpleNamespace(info=pytest.fail, warning=kept.append))
    report.publish(done, "Run 01234567")
    artifact, *others = kept
    assert others == [("Report: Run 01234567", ("runs",)), "runs/0123456789ab"]
    assert artifact["key"] == "run-report"
    assert Path("reports/19700101-000000-01234567.md").read_text() == artifact["markdown"] + "\n"
    done.outcomes = dict.fromkeys(done.outcomes, "Skipped")
    report.publish(done, "Run 89abcdef")
    assert len(kept) == 4, "no commit"
    monkeypatch.setattr(report, "create_markdown_artifact", refuse)
    report.publish(done, "Run 01234567")
    assert kept[4:] == ["the page of this run could not be kept: ConnectionError: the server is gone"]


# When the schedule trains again


def changes(status: dict[str, Any]) -> list[str]:
    """The reasons in DVC's status, without the last: a version that is not registered."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "unregistered", lambda params: ["unregistered"])
        found = look_for_changes(status, None)
    assert found.pop() == "unregistered"
    return found


DEPS, CHANGED = "train: changed deps:", {"params.yaml": {"models.m3diff": "x", "train.seed": "new"}}


@pytest.mark.parametrize(
    ("status", "found"),
    [
        ({}, []),
        ({"convert": [{"changed deps": {"components/stages/convert": "modified"}}]}, []),
        ({"train": [{"changed deps": {"code/train.json": "modified", "components/models": "new"}}]}, []),
        ({"train": ["changed command"]}, []),
        ({"code": [{"changed outs": {"data/x": "deleted"}}]}, []),
        ({"train": [{"changed deps": {"data/a": "modified", "components/x": "new"}}]}, [f"{DEPS} data/a modified"]),
        ({"train": ["changed command", {"changed deps": CHANGED}]}, [f"{DEPS} params.yaml models.m3diff, train.seed"]),
        ({"train": [{"changed outs": {"data/05": "deleted"}}]}, ["train: changed outs: data/05 deleted"]),
    ],
)
def test_changed_data_and_parameters_are_reasons_and_changed_code_alone_is_none(status, found):
    assert changes(status) == found


def test_dvcs_own_words_are_understood_and_how_a_run_is_computed_is_no_reason(trained_once, tmp_path, monkeypatch):
    project = Path(shutil.copytree(trained_once, tmp_path / "toy", symlinks=True))
    monkeypatch.chdir(project)
    assert changes(dvc.status()) == []
    toy.change(project, "compute", workers=7)
    plan, base = project / "components/stages/convert/stage.py", project / "data/00_base/config.json"
    plan.write_text(plan.read_text() + "\n# a comment\n")
    assert changes(dvc.status()) == []
    models = yaml.safe_load(Path("params.yaml").read_text())["models"]
    models["m3diff"]["rates"]["llm"] = 0.5
    toy.change(project, "models", **models)
    base.write_text("another base")
    found = sorted(changes(dvc.status()))
    assert found == [f"{DEPS} data/00_base modified", f"{DEPS} params.yaml models.m3diff"]


@pytest.mark.parametrize(
    ("trained", "newest", "reason"),
    [
        ("data/00_base", None, "nothing was trained yet"),
        (None, None, "nothing was trained yet"),
        ("data/05_model/checkpoint", None, "no version of m3diff is registered yet"),
        ("data/05_model/checkpoint", "older", "m3diff version 3 is another checkpoint than the one in"),
        ("data/05_model/checkpoint", "here", None),
    ],
)
def test_what_was_trained_and_not_registered_is_a_reason(monkeypatch, tmp_path, trained, newest, reason):
    lock = tmp_path / "dvc.lock"
    entry = {"path": trained, "md5": "here"}
    stages = {"train": {"outs": [entry]}, "predict": {"deps": [entry | {"md5": "older"}]}}
    if trained:
        lock.write_text(yaml.safe_dump({"stages": stages if "model" in trained else {"pretrain": {"outs": [entry]}}}))
    version = newest and SimpleNamespace(version="3", tags={"dvc.checkpoint": newest})
    asked = {} if reason == "nothing was trained yet" else {("client", "m3diff", "challenger"): version}
    monkeypatch.setattr(pipeline, "LOCK", lock)
    monkeypatch.setattr(pipeline, "Lock", lambda: Lock(lock))
    monkeypatch.setattr(tracking, "connected", lambda uri: contextlib.nullcontext("client"))
    monkeypatch.setattr(pipeline, "find_alias", lambda *arguments: asked[arguments])
    found = list(unregistered(PARAMS))
    assert len(found) == bool(reason)
    assert all(text.startswith(reason) for text in found)


# Notices


@pytest.fixture
def checkout(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("M3DIFF_NOTIFY", raising=False)
    return tmp_path


def test_a_notice_goes_to_an_address_of_apprise_once_and_the_latest_are_remembered(checkout, listener, monkeypatch):
    monkeypatch.setattr(report, "REMEMBERED", 2)
    for key in ("a", "a", "b", "c", "c", "b"):
        tell(pytest.fail, key, f"title {key}", "the text", checkout)
    assert [(told["title"], told["message"]) for told in listener.got] == [(f"title {k}", "the text") for k in "abc"]
    monkeypatch.delenv("M3DIFF_NOTIFY")
    tell(pytest.fail, "d", "nobody is told", "and nothing waits")
    monkeypatch.setenv("M3DIFF_NOTIFY", listener.address)
    tell(pytest.fail)
    assert len(listener.got) == 3


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


@pytest.mark.parametrize("fault", ["nonsense://secret-word", "json://", "no-address/secret-word", "a full disk"])
def test_a_wrong_address_and_a_full_disk_fail_nothing(checkout, monkeypatch, caplog, capfd, fault):
    def refuse(*words: object) -> None:
        raise OSError(f"secret-word, {words}")

    said: list[str] = []
    monkeypatch.setenv("M3DIFF_NOTIFY", fault if "disk" not in fault else "json://")
    if "disk" in fault:
        monkeypatch.setattr(report, "write_atomic", refuse)
    tell(said.append, "a", "the title", "the text")
    assert len(said) == 1 + ("disk" in fault)
    assert "secret-word" not in "".join([*said, caplog.text, *capfd.readouterr()])


@pytest.fixture
def told(checkout, monkeypatch) -> list[tuple[str, str, str]]:
    found: list[tuple[str, str, str]] = []
    monkeypatch.setattr(report, "tell", lambda log, key, title, text, *rest: found.append((key, title, text)))
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
    assert all(key.endswith(f" {datetime.now(UTC).date()}") for key in keys), "again on another day"
    assert len(reason_of(Failed(message="x" * 10000))) < 500
    assert reason_of(Failed()) == "failed: "


@pytest.mark.fault("T10")
@pytest.mark.parametrize(
    ("outcome", "champion", "word", "then"),
    [
        ("refused", 1, "rejected", "The champion stays: 1"),
        ("refused", None, "rejected", "The champion stays: none"),
        ("promoted", 1, "promoted", "The champion before was 1; `m3diff rollback"),
        ("first", None, "promoted", "m3diff rollback"),
        ("unchanged", 1, "", ""),
    ],
)
def test_a_decision_of_the_gate_is_told_with_its_numbers_and_the_reason_of_the_run(told, outcome, champion, word, then):
    work = Workspace("0123", Path("w"), Path("checkout"), "abc", "tree", (), ())
    decided(Done(work, ["new data"], decision=decision(outcome, champion)), print)
    decided(Done(work, []), print)
    if not word:
        assert told == []
        return
    ((key, title, text),) = told
    assert (key, title) == (f"0123 {word}", f"m3diff: a model was {word}")
    assert f"m version 7 {outcome}: why. Run because new data. " in text
    assert then in text
    assert ("stays" in text) == ("stays" in then)
