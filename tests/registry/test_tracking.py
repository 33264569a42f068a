"""MLflow's store, the connection to it, and the run of a training."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import mlflow
import pytest
from mlflow import MlflowClient
from mlflow.entities import Run
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import INTERNAL_ERROR, RESOURCE_DOES_NOT_EXIST

from m3diff.records.errors import DataError
from m3diff.registry import tracking
from m3diff.registry.tracking import (
    NoRedirect,
    RunDescription,
    TrackingUnavailableError,
    connect,
    experiment_id,
    log_curves,
    log_curves_while_training,
    log_evaluation,
    log_params,
    log_scores,
    weights_sha256,
)
from m3diff.settings.section import ParamsError
from tests.errors import raises
from tests.servers import free_port, until

URI = "sqlite:///services/mlflow/mlflow.db"
LOCAL = "sqlite:///mlflow.db"


@pytest.fixture
def store(empty_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of an empty store, which is the current directory."""
    shutil.copy(empty_store, tmp_path / "mlflow.db")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(autouse=True)
def own_settings(monkeypatch):
    """Restore MLflow's environment variables after each test."""
    for name in ("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR"):
        monkeypatch.setenv(name, "0")
        monkeypatch.delenv(name)


# What is logged


class EmptyRun:
    """A run in the local store, and the sizes of the largest requests."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.client = MlflowClient(mlflow.get_tracking_uri())
        self.id = self.client.create_run(experiment_id(self.client, "m3diff")).info.run_id
        self.largest_requests = {"params": 0, "metrics": 0}
        self.log_batch = MlflowClient.log_batch
        monkeypatch.setattr(MlflowClient, "log_batch", self.count_entries)

    def count_entries(self, run_id: str, **entries: list) -> None:
        ((kind, batch),) = entries.items()
        self.largest_requests[kind] = max(self.largest_requests[kind], len(batch))
        self.log_batch(self.client, run_id, **entries)

    def points(self) -> dict[tuple[str, int], float]:
        """Return the value of each metric at each step. Fail if a point was logged twice."""
        points: dict[tuple[str, int], float] = {}
        for name in self.client.get_run(self.id).data.metrics:
            for point in self.client.get_metric_history(self.id, name):
                assert (name, point.step) not in points
                points[name, point.step] = point.value
        return points


@pytest.fixture
def run(store: Path, monkeypatch: pytest.MonkeyPatch) -> EmptyRun:
    with connect(LOCAL):
        pass
    return EmptyRun(monkeypatch)


def test_nested_parameters_are_logged_by_their_paths(run):
    log_params(run.client, run.id, {"a": {"list": [2, {"d": None}], "empty": {}}})
    assert run.client.get_run(run.id).data.params == {"a.list.0": "2", "a.list.1.d": "None"}


def test_a_parameter_that_the_run_has_stays(run):
    run.client.log_param(run.id, "a.known", "as it was")
    log_params(run.client, run.id, {"a": {"known": 1, "new": 2}})
    assert run.client.get_run(run.id).data.params == {"a.known": "as it was", "a.new": "2"}


def test_more_parameters_than_mlflow_accepts_at_once_are_sent_in_batches(run):
    log_params(run.client, run.id, {str(number): number for number in range(250)})
    assert len(run.client.get_run(run.id).data.params) == 250
    assert run.largest_requests["params"] == 100


HEADER = "step,epoch,loss,module_score/17,val_cider\n"


def test_each_column_of_the_curves_is_a_metric_and_an_empty_cell_no_point(run, store):
    (store / "curves.csv").write_text(f"{HEADER}1,0.5,2.5,0.1,\n2,1,,,0.7\n")
    log_curves(run.client, run.id, store / "curves.csv")
    assert run.points() == {
        ("train/epoch", 1): 0.5,
        ("train/epoch", 2): 1.0,
        ("train/loss", 1): 2.5,
        ("train/module_score/17", 1): 0.1,
        ("train/val_cider", 2): 0.7,
    }
    point = run.client.get_metric_history(run.id, "train/loss")[0]
    assert abs(point.timestamp / 1000 - time.time()) < 600


def test_curves_that_grow_are_logged_in_batches_and_no_point_twice(run, store):
    first_row = "1,0.5,2.5,0.1,\n"
    steps = range(2, 1302)
    later_rows = "".join(f"{step},{step / 2},{1 / step},,\n" for step in steps)
    for rows in (first_row, first_row + later_rows, first_row + later_rows):
        (store / "curves.csv").write_text(HEADER + rows)
        log_curves(run.client, run.id, store / "curves.csv")
    expected_points = {("train/epoch", step): step / 2 for step in range(1, 1302)}
    expected_points |= {("train/loss", step): 1 / step for step in steps}
    expected_points |= {("train/loss", 1): 2.5, ("train/module_score/17", 1): 0.1}
    assert run.points() == expected_points
    assert run.largest_requests["metrics"] == 1000


def test_scores_are_logged_by_protocol_without_those_that_are_no_number(run, store):
    scores = {"CIDEr": 1.5, "SPICE": None, "intervals": {"CIDEr": {"low": 1}}}
    report = {"rows_out": 3, "note": "n", "protocols": {"d/p": scores}}
    (store / "metrics.json").write_text(json.dumps(report))
    log_scores(run.client, run.id, store / "metrics.json", 99)
    assert run.points() == {("rows_out", 0): 3.0, ("d/p/CIDEr", 0): 1.5, ("d/p/intervals/CIDEr/low", 0): 1.0}


def test_characters_that_mlflow_forbids_in_names_become_underscores(run, store):
    scores = {"by_type": {"less + more (50 %)": {"CIDEr": 2.5}}}
    (store / "metrics.json").write_text(json.dumps({"protocols": {"d/p": scores}}))
    log_scores(run.client, run.id, store / "metrics.json", 99)
    assert run.points() == {("d/p/by_type/less _ more _50 __/CIDEr", 0): 2.5}


def test_kinds_of_questions_become_names_that_mlflow_accepts(run, store):
    kinds = {"yes/no": {"exact_match": 0.5}, "..": {"exact_match": 0.25}, "k" * 250: {"exact_match": 1.0}}
    (store / "metrics.json").write_text(json.dumps({"protocols": {"d/p": {"by_kind": kinds, "questions": 3}}}))
    log_scores(run.client, run.id, store / "metrics.json", 99)
    assert run.points() == {
        ("d/p/by_kind/yes/no/exact_match", 0): 0.5,
        ("d/p/by_kind/exact_match", 0): 0.25,
        ("d/p/questions", 0): 3.0,
    }


# The address of the store


@pytest.mark.parametrize("folder", [".dvc/tmp/exps/standalone/tmpabc", ".dvc/tmp/exps/tmpabc", "."])
def test_a_relative_sqlite_store_is_the_project_s_even_in_dvc_s_copy_of_it(folder, tmp_path, monkeypatch):
    (tmp_path / folder).mkdir(parents=True, exist_ok=True)
    monkeypatch.chdir(tmp_path / folder)
    assert tracking.resolve_uri(URI) == f"sqlite:///{tmp_path}/services/mlflow/mlflow.db"
    assert (tmp_path / "services" / "mlflow").is_dir()
    assert Path("services").exists() == (folder == ".")


def test_an_absolute_store_and_a_server_keep_their_address(tmp_path):
    for uri in (f"sqlite:///{tmp_path}/elsewhere/mlflow.db", "http://127.0.0.1:5000"):
        assert tracking.resolve_uri(uri) == uri


def test_a_sqlite_store_without_mlflow_s_server_part_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tracking.importlib.util, "find_spec", lambda name: None)
    with raises(DataError, "registry.needs_extra_train", value="sqlite:///a/b.db") as refused:
        tracking.resolve_uri("sqlite:///a/b.db")
    assert refused.value.fields["command"].endswith(" -e '.[train]'")
    assert not (tmp_path / "a").exists()
    assert tracking.resolve_uri("http://127.0.0.1:5000") == "http://127.0.0.1:5000"


# The connection


def test_mlflow_s_own_functions_use_the_connected_store(store):
    with connect(LOCAL):
        assert mlflow.get_tracking_uri() == f"sqlite:///{store}/mlflow.db"


def test_a_connection_shortens_mlflow_s_retries_and_hides_its_progress_bars(store):
    with connect(LOCAL):
        assert os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] == "2"
        assert os.environ["MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR"] == "false"


def test_a_connection_follows_no_redirect_to_another_address(store, monkeypatch):
    # set first, so that the value that a connection leaves behind is removed after the test
    monkeypatch.setenv("MLFLOW_ALLOW_HTTP_REDIRECTS", "")
    monkeypatch.delenv("MLFLOW_ALLOW_HTTP_REDIRECTS")
    with connect(LOCAL):
        assert os.environ["MLFLOW_ALLOW_HTTP_REDIRECTS"] == "false"


def test_code_of_a_model_does_not_stay_on_the_path_of_modules(store):
    with connect(LOCAL):
        sys.path = ["code of a model", *sys.path]  # as MLflow does when it loads a model
    assert "code of a model" not in sys.path


def test_an_experiment_of_a_sqlite_store_has_its_artifacts_beside_the_store(store):
    with connect(LOCAL) as client:
        experiment = experiment_id(client, "m3diff")
        assert client.get_experiment(experiment).artifact_location == (store / "artifacts" / "m3diff").as_uri()


def test_an_experiment_is_made_once(store):
    with connect(LOCAL) as client:
        experiment = experiment_id(client, "m3diff")
        assert experiment_id(client, "m3diff") == experiment


def test_a_deleted_experiment_is_refused_with_the_command_that_restores_it(store):
    with connect(LOCAL) as client:
        experiment = experiment_id(client, "m3diff")
        client.delete_experiment(experiment)
        with raises(DataError, "registry.deleted_experiment", name="m3diff") as refused:
            experiment_id(client, "m3diff")
    command = f"MLFLOW_TRACKING_URI=sqlite:///{store}/mlflow.db mlflow experiments restore --experiment-id {experiment}"
    assert refused.value.fields["command"] == command


def test_a_command_to_restore_a_run_contains_no_password(monkeypatch):
    monkeypatch.setattr(tracking, "get_tracking_uri", lambda: "https://me:secret@host:5000")
    command = tracking.command_to_restore("runs", "a1")
    assert command == "MLFLOW_TRACKING_URI=https://USER:PASSWORD@host:5000 mlflow runs restore --run-id a1"


@pytest.mark.parametrize(("error_code", "is_lost"), [(RESOURCE_DOES_NOT_EXIST, True), (INTERNAL_ERROR, False)], ids=str)
@pytest.mark.parametrize("find", [tracking.find_run, tracking.find_registered_model])
def test_what_mlflow_lost_is_none_and_another_error_is_raised(find, error_code, is_lost):
    def refuse(name: str) -> None:
        raise MlflowException("no", error_code=error_code)

    client: Any = SimpleNamespace(get_run=refuse, get_registered_model=refuse)
    with nullcontext() if is_lost else pytest.raises(MlflowException):
        assert find(client, "a1") is None


def test_a_version_without_a_run_has_none():
    assert tracking.find_run(cast(Any, None), None) is None


HOST = socket.gethostname()
HOUR_S = 3600


@pytest.mark.parametrize(
    ("process", "age_s", "is_abandoned"),
    [
        (f"{HOST}:1", 2 * HOUR_S, False),
        (f"{HOST}:{os.getpid()}", 0, True),
        (f"{HOST}:{2**22 + 1}", 0, True),
        (f"{HOST}:x", 0, False),
        ("another:1", 0.9 * HOUR_S, False),
        ("another:1", 1.1 * HOUR_S, True),
        (None, 1.1 * HOUR_S, True),
    ],
    ids=["alive", "this process", "ended", "no process", "recent elsewhere", "old elsewhere", "old without a process"],
)
def test_work_is_abandoned_if_its_process_ended_or_elsewhere_after_an_hour(process, age_s, is_abandoned):
    tags = {} if process is None else {tracking.PROCESS_TAG: process}
    assert tracking.is_abandoned(tags, int(1000 * (time.time() - age_s))) == is_abandoned


def test_work_of_this_process_bears_its_name():
    assert tracking.process_tag() == {tracking.PROCESS_TAG: f"{HOST}:{os.getpid()}"}


def test_an_experiment_of_a_server_has_its_artifacts_where_the_server_says(store, monkeypatch):
    monkeypatch.setattr(tracking, "get_tracking_uri", lambda: "http://127.0.0.1:5000")
    created: list[tuple[str, ...]] = []
    client: Any = SimpleNamespace(
        get_experiment_by_name=lambda name: None, create_experiment=lambda *arguments: created.append(arguments)
    )
    experiment_id(client, "m3diff")
    assert created == [("m3diff",)], "no artifact location"


def test_a_damaged_store_is_named_with_a_remedy(store):
    (store / "damaged.db").write_text("no database")
    with raises(DataError, "registry.unreadable_database", path=store / "damaged.db") as refused:
        connect("sqlite:///damaged.db").__enter__()
    assert "not a database" in refused.value.fields["cause"]


def test_a_server_that_does_not_answer_is_named_with_a_remedy():
    uri = f"http://127.0.0.1:{free_port()}"
    with raises(TrackingUnavailableError, "registry.mlflow_not_answering", value=uri):
        connect(uri).__enter__()


@pytest.mark.parametrize("path", ["", "/", "/health", "/health/"])
def test_the_address_of_a_redirect_is_that_of_the_store_and_not_of_the_check(path):
    fields = {"value": "http://old.org", "target": f"https://new.org/mlflow{path}"}
    with raises(ParamsError, "registry.redirected", **fields, address="https://new.org/mlflow"):
        NoRedirect().redirect_request(
            urllib.request.Request("http://old.org/health"), None, 301, "Moved", {}, fields["target"]
        )


def test_an_error_in_the_context_is_raised_if_the_store_answers(store):
    with pytest.raises(KeyError), connect(LOCAL):
        raise KeyError("a bug")


def test_an_error_in_the_context_is_that_of_the_server_if_it_went_away(store, monkeypatch):
    answers = iter([None, TrackingUnavailableError("registry.mlflow_not_answering", value="a", cause="gone")])

    def check_alive(uri: str) -> None:
        error = next(answers)
        if error is not None:
            raise error

    monkeypatch.setattr(tracking, "check_alive", check_alive)
    with (
        raises(TrackingUnavailableError, "registry.mlflow_not_answering", cause="gone"),
        connect("http://127.0.0.1:9"),
    ):
        raise KeyError("what mlflow raises when a connection breaks")


@pytest.mark.slow(15)
def test_two_processes_at_once_find_a_new_store_whole(tmp_path):
    program = "import sys; from m3diff.registry.tracking import connect; connect(sys.argv[1]).__enter__()"
    command = [sys.executable, "-c", program, f"sqlite:///{tmp_path}/new/mlflow.db"]
    processes = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    for process in processes:
        _, errors = process.communicate()
        assert process.returncode == 0, errors


# A store that was copied or moved with its checkout


class MovedStore:
    """Create a store in `original`, with a run with an artifact, and an experiment with artifacts in another folder."""

    def __init__(self, root: Path, empty_store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.original = root / "original"
        self.destination = root / "there & 50%"
        self.shared_artifacts = (root / "shared/artifacts").as_uri()
        (self.original / "services/mlflow").mkdir(parents=True)
        shutil.copy(empty_store, self.original / "services/mlflow/mlflow.db")
        monkeypatch.chdir(self.original)
        with connect(URI) as client:
            self.run = client.create_run(experiment_id(client, "m3diff")).info
            self.shared_experiment = client.create_experiment("team", artifact_location=self.shared_artifacts)
        self.artifacts = self.original / "services/mlflow/artifacts/m3diff" / self.run.run_id / "artifacts"
        self.artifacts.mkdir(parents=True)
        (self.artifacts / "scores.json").write_text("1.1")

    def scores_in(self, folder: Path) -> set[str]:
        return {file.read_text() for file in (folder / "services").rglob("scores.json")}


@pytest.fixture(params=["copied", "moved"])
def moved(request, empty_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> MovedStore:
    """Return the destination of the move, which is the current directory."""
    moved = MovedStore(tmp_path, empty_store, monkeypatch)
    assert capsys.readouterr().err == ""
    if request.param == "copied":
        shutil.copytree(moved.original, moved.destination)
    else:
        moved.original.rename(moved.destination)
    monkeypatch.chdir(moved.destination)
    return moved


@pytest.mark.fault("P14")
def test_a_store_that_came_with_its_checkout_writes_artifacts_beside_itself(moved):
    assert moved.run.artifact_uri == moved.artifacts.as_uri()
    with connect(URI) as client:
        client.log_text(moved.run.run_id, "1.9", "scores.json")
        location = client.get_experiment_by_name("m3diff").artifact_location
    assert location.startswith(moved.destination.as_uri())
    assert moved.scores_in(moved.destination) == {"1.9"}
    if moved.original.exists():
        assert moved.scores_in(moved.original) == {"1.1"}


@pytest.mark.fault("P14")
def test_artifacts_elsewhere_stay_there_after_a_move_of_the_store(moved):
    with connect(URI) as client:
        assert client.get_experiment(moved.shared_experiment).artifact_location == moved.shared_artifacts


@pytest.mark.fault("P14")
def test_a_moved_store_is_announced_once(moved, capsys):
    with connect(URI):
        assert capsys.readouterr().err.count("\n") == 1
    with connect(URI):
        assert "copied or moved" not in capsys.readouterr().err


# The run of a training

PARAMS = {"train": {"seed": 7, "epochs": 2.5}, "models": {"m3diff": {"lora": {"rank": 8}}}}
FIRST_ROWS = "step,loss,val_loss\n1,2.5,\n2,1.5,1.75\n"
LAST_ROW = "3,1.25,\n"
LOSS_POINTS = [(1, 2.5), (2, 1.5), (3, 1.25)]


class Training:
    """A finished training and its contents in the store."""

    def __init__(self, root: Path) -> None:
        self.model = root / "model"
        self.curves = root / "curves.csv"
        self.metrics = root / "metrics.json"
        self.client = MlflowClient(f"sqlite:///{root}/mlflow.db")
        self.metrics.write_text(json.dumps({"protocols": {"toy/all": {"CIDEr": 1.25}}}))
        self.write("a")

    def write(self, weights: str) -> None:
        """Write the outputs of a training with these weights."""
        (self.model / "checkpoint").mkdir(parents=True, exist_ok=True)
        manifest = {"files": {"model.safetensors": weights, "config.json": "same"}}
        (self.model / "checkpoint" / "manifest.json").write_text(json.dumps(manifest))
        (self.model / "curves.csv").write_text(FIRST_ROWS + LAST_ROW)

    def train(self, work: Callable[[], object] = bool, key: str = "key", uri: str = LOCAL) -> None:
        """Run the function as a training whose curves are logged."""
        description = RunDescription(uri, "m3diff", "m3diff", PARAMS, 32)
        with log_curves_while_training(description, self.model, key, self.curves):
            work()

    def evaluate(self, max_new_tokens: int = 32, uri: str = LOCAL) -> None:
        """Log the scores like evaluate."""
        log_evaluation(RunDescription(uri, "m3diff", "m3diff", PARAMS, max_new_tokens), self.model, self.metrics)

    def runs(self) -> list[Run]:
        experiment = self.client.get_experiment_by_name("m3diff")
        return list(self.client.search_runs([experiment.experiment_id])) if experiment else []

    @property
    def run(self) -> Run:
        (run,) = self.runs()
        return run

    def points(self, name: str) -> list[tuple[int, float]]:
        history = self.client.get_metric_history(self.run.info.run_id, f"train/{name}")
        return [(point.step, point.value) for point in history]


@pytest.fixture
def training(store, monkeypatch) -> Training:
    monkeypatch.setattr(tracking, "CHECK_INTERVAL_S", 0.05)
    return Training(store)


def test_curves_are_in_the_run_after_a_checkpoint(training):
    def work() -> None:
        until(training.runs)
        training.curves.write_text(FIRST_ROWS)
        until(lambda: training.points("val_loss") == [(2, 1.75)])
        assert training.points("loss") == LOSS_POINTS[:2]
        assert training.run.info.status == "RUNNING"

    training.train(work)


def test_the_rest_of_the_curves_is_in_the_run_when_the_training_ends(training):
    training.train(lambda: training.curves.write_text(FIRST_ROWS))
    assert training.run.info.status == "FINISHED"
    assert training.points("loss") == LOSS_POINTS
    assert training.points("val_loss") == [(2, 1.75)]


def test_a_run_has_the_parameters_and_the_digest_of_the_weights(training):
    training.train()
    data = training.run.data
    assert data.params == {"train.seed": "7", "train.epochs": "2.5", "models.m3diff.lora.rank": "8"}
    assert data.tags["weights.sha256"] == weights_sha256(training.model / "checkpoint" / "manifest.json")


def test_a_training_of_another_key_has_another_run(training):
    training.train()
    training.train(key="other")
    assert len(training.runs()) == 2


@pytest.mark.parametrize(
    ("error", "status"),
    [(SystemExit(143), "KILLED"), (ValueError("no"), "FAILED")],
    ids=["stopped", "failed"],
)
def test_a_training_that_ended_early_is_resumed_in_its_run(error, status, training):
    def work() -> None:
        training.curves.write_text(FIRST_ROWS)
        raise error

    with pytest.raises(type(error)):
        training.train(work)
    assert training.run.info.status == status
    assert training.points("loss") == LOSS_POINTS[:2]
    assert "weights.sha256" not in training.run.data.tags
    training.train()
    assert training.run.info.status == "FINISHED"
    assert training.points("loss") == LOSS_POINTS, "no point twice"


def test_a_run_is_named_by_model_time_epochs_and_seed(training):
    training.train()
    assert training.run.info.run_name.startswith("m3diff 20")
    assert training.run.info.run_name.endswith(", 2.5 epochs, seed 7")


def test_scores_are_logged_to_the_run_of_the_training_even_twice(training):
    training.train()
    for _ in range(2):
        training.evaluate()
    assert training.run.data.metrics["toy/all/CIDEr"] == 1.25
    assert training.run.info.status == "FINISHED"


def test_scores_with_another_length_limit_get_a_run_of_their_own(training):
    training.train()
    training.evaluate()
    training.evaluate(max_new_tokens=8)
    assert sorted(run.data.tags["predict.max_new_tokens"] for run in training.runs()) == ["32", "8"]


def test_scores_of_other_weights_get_a_run_of_their_own(training):
    training.train()
    training.evaluate()
    training.write("b")
    training.evaluate()
    assert len(training.runs()) == 2


def test_a_run_bears_the_name_of_dvc_s_experiment_and_the_id_of_the_flow_run(training, monkeypatch):
    monkeypatch.setenv("DVC_EXP_NAME", "lower-rate")
    monkeypatch.setenv("M3DIFF_FLOW_RUN", "4711")
    training.evaluate()
    assert training.run.info.run_name == "lower-rate"
    assert training.run.data.tags["prefect.flow_run"] == "4711"


def test_the_few_scores_of_the_headline_are_logged_as_papers_print_them(training):
    headline = training.metrics.with_name("headline.json")
    headline.write_text(json.dumps({"toy/all": {"CIDEr": 125.0}}))
    training.evaluate()
    assert training.run.data.metrics["toy/all/CIDEr"] == 1.25
    assert training.run.data.metrics["x100/toy/all/CIDEr"] == 125.0


def test_two_trainings_of_one_minute_have_different_names(training, monkeypatch):
    monkeypatch.setattr(tracking.time, "gmtime", lambda *_: time.struct_time((2026, 1, 2, 3, 4, 5, 0, 2, 0)))
    first_name = RunDescription(LOCAL, "m3diff", "small", {"train": {"seed": 1, "epochs": 2}}, 32)
    second = RunDescription(LOCAL, "m3diff", "small", {"train": {"seed": 2, "epochs": 0.5}}, 32)
    assert first_name.run_name() == "small 2026-01-02 03:04:05, 2 epochs, seed 1"
    assert second.run_name() == "small 2026-01-02 03:04:05, 0.5 epochs, seed 2"


def test_a_store_that_does_not_answer_hinders_neither_training_nor_evaluation(training, capsys):
    uri = f"http://127.0.0.1:{free_port()}"
    training.train(lambda: time.sleep(0.3), uri=uri)
    training.evaluate(uri=uri)
    *warnings, curves, scores = capsys.readouterr().out.splitlines()
    assert len(warnings) == 1, "at the beginning, at each checkpoint and at the end"
    assert curves.startswith("train: ")
    assert uri in curves
    assert scores.startswith("evaluate: ")
    assert uri in scores


def test_a_run_that_the_store_missed_is_logged_by_the_next_evaluation(training):
    training.train(uri=f"http://127.0.0.1:{free_port()}")
    training.evaluate()
    assert training.points("loss") == LOSS_POINTS
    assert training.run.data.metrics["toy/all/CIDEr"] == 1.25
