"""MLflow's store: its place and its absence, what goes to it, and a training's run, written to while it trains."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import mlflow
import pytest
from mlflow import MlflowClient
from mlflow.entities import Run

from m3diff.records.errors import DataError
from m3diff.registry import tracking
from m3diff.registry.lineage import weights_sha256
from m3diff.registry.tracking import Description, TrackingUnavailableError, completed, connected, followed
from tests.servers import free_port, until

URI, LOCAL = "sqlite:///services/mlflow/mlflow.db", "sqlite:///mlflow.db"


@pytest.fixture
def store(empty_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of an empty store, current directory."""
    shutil.copy(empty_store, tmp_path / "mlflow.db")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(autouse=True)
def own_settings(monkeypatch):
    for name in ("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR"):
        monkeypatch.setenv(name, "0")
        monkeypatch.delenv(name)


def test_what_is_logged_keeps_to_mlflows_names_and_batches_and_no_point_is_logged_twice(store, monkeypatch):
    """MLflow takes 100 parameters or 1000 points in a request, and a parameter once."""
    curves, metrics = store / "curves.csv", store / "metrics.json"
    head, steps = "step,epoch,loss,module_score/17,val_cider\n", range(2, 1302)
    later = "".join(f"{step},{step / 2},{1 / step},,{'0.7' if step == 9 else ''}\n" for step in steps)
    odd = {"by_type": {"less + more (50 %)": {"CIDEr": 2.5}}}
    scores = {"CIDEr": 1.5, "SPICE": None, "intervals": {"CIDEr": {"low": 1}}}
    metrics.write_text(json.dumps({"rows_out": 3, "note": "n", "protocols": {"d/p": scores | odd}}))
    real, largest = MlflowClient.log_batch, {"params": 0, "metrics": 0}

    def log_batch(client: MlflowClient, run_id: str, **entries: list) -> None:
        ((kind, found),) = entries.items()
        largest[kind] = max(largest[kind], len(found))
        real(client, run_id, **entries)

    monkeypatch.setattr(MlflowClient, "log_batch", log_batch)
    with connected(LOCAL) as client:
        run = client.create_run(tracking.experiment_id(client, "m3diff")).info.run_id
        client.log_param(run, "a.known", "as it was")
        many = {str(number): number for number in range(250)}
        tracking.log_params(client, run, {"a": {"known": 1, "list": [2, {"d": None}], "empty": {}} | many})
        for text in ("1,0.5,2.5,0.1,\n", *[f"1,0.5,2.5,0.1,\n{later}"] * 2):
            curves.write_text(head + text)
            tracking.log_curves(client, run, curves)
        tracking.log_scores(client, run, metrics, 99)
        data = client.get_run(run).data
        history = {name: client.get_metric_history(run, name) for name in data.metrics}
    points = {(name, point.step): point.value for name, found in history.items() for point in found}
    params = {"a.known": "as it was", "a.list.0": "2", "a.list.1.d": "None"}
    assert data.params == params | {f"a.{number}": str(number) for number in many.values()}
    assert points == {
        **{("train/epoch", step): step / 2 for step in range(1, 1302)},
        **{("train/loss", step): 1 / step for step in steps},
        **{("train/loss", 1): 2.5, ("train/module_score/17", 1): 0.1, ("train/val_cider", 9): 0.7},
        **{("rows_out", 0): 3.0, ("d/p/CIDEr", 0): 1.5, ("d/p/intervals/CIDEr/low", 0): 1.0},
        **{("d/p/by_type/less _ more _50 __/CIDEr", 0): 2.5},
    }
    assert sum(map(len, history.values())) == len(points)
    assert largest == {"params": 100, "metrics": 1000}


def test_a_sqlite_store_is_the_project_s_also_where_dvc_runs_an_experiment_in_a_copy(tmp_path, monkeypatch):
    for folder in (".dvc/tmp/exps/standalone/tmpabc", ".dvc/tmp/exps/tmpabc", "."):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        monkeypatch.chdir(tmp_path / folder)
        assert tracking.resolve(URI) == f"sqlite:///{tmp_path}/services/mlflow/mlflow.db"
        assert tracking.resolve("sqlite:////elsewhere/mlflow.db") == "sqlite:////elsewhere/mlflow.db"
        assert (Path("services").exists(), (tmp_path / "services" / "mlflow").is_dir()) == (folder == ".", True)
    monkeypatch.setattr(tracking.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DataError, match=r"tracking_uri sqlite:///a/b.db: .* -e '\.\[train\]'\); else name a server"):
        tracking.resolve("sqlite:///a/b.db")
    assert not (tmp_path / "a").exists()
    assert tracking.resolve("http://127.0.0.1:5000") == "http://127.0.0.1:5000"


def test_a_store_has_its_artifacts_beside_it_or_where_a_server_says_and_one_that_is_gone_is_named(store, monkeypatch):
    with connected(LOCAL) as client:
        assert mlflow.get_tracking_uri() == f"sqlite:///{store}/mlflow.db"
        assert os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] == "2"
        assert os.environ["MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR"] == "false"
        made = tracking.experiment_id(client, "m3diff")
        assert client.get_experiment(made).artifact_location == (store / "artifacts" / "m3diff").as_uri()
        assert tracking.experiment_id(client, "m3diff") == made
    uri = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(TrackingUnavailableError, match=rf"MLflow at {uri} does not answer.*make up.*nothing was lost"):
        connected(uri).__enter__()
    with pytest.raises(KeyError), connected(LOCAL):
        raise KeyError("a bug")
    checks = iter([lambda: None, lambda: (_ for _ in ()).throw(TrackingUnavailableError("gone"))])
    monkeypatch.setattr(tracking, "check_alive", lambda uri: list(next(checks)() or ()))
    with pytest.raises(TrackingUnavailableError, match="gone"), connected(uri):
        raise KeyError("what mlflow raises when a connection breaks")
    created = []
    served = SimpleNamespace(get_experiment_by_name=lambda name: None, create_experiment=lambda *a: created.append(a))
    tracking.experiment_id(served, "m3diff")
    assert created == [("m3diff",)]


@pytest.mark.slow(15)
def test_two_processes_at_once_find_a_new_store_whole(tmp_path):
    program = "import sys; from m3diff.registry.tracking import connected; connected(sys.argv[1]).__enter__()"
    command = [sys.executable, "-c", program, f"sqlite:///{tmp_path}/new/mlflow.db"]
    both = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    for process in both:
        _, err = process.communicate()
        assert process.returncode == 0, err


@pytest.mark.fault("P14")
@pytest.mark.parametrize("how", ["copied", "moved"])
def test_a_store_that_came_with_its_checkout_has_its_artifacts_here(how, empty_store, tmp_path, monkeypatch, capsys):
    first, there = tmp_path / "first", tmp_path / "there & 50%"
    (first / "services/mlflow").mkdir(parents=True)
    shutil.copy(empty_store, first / "services/mlflow/mlflow.db")
    monkeypatch.chdir(first)
    with connected(URI) as client:
        run = client.create_run(tracking.experiment_id(client, "m3diff"))
        elsewhere = client.create_experiment("team", artifact_location=(tmp_path / "shared/artifacts").as_uri())
    kept = first / "services/mlflow/artifacts/m3diff" / run.info.run_id / "artifacts"
    assert run.info.artifact_uri == kept.as_uri()
    kept.mkdir(parents=True)
    (kept / "scores.json").write_text("1.1")
    assert capsys.readouterr().err == ""
    (shutil.copytree(first, there) if how == "copied" else first.rename(there))
    monkeypatch.chdir(there)
    with connected(URI) as client:
        assert capsys.readouterr().err.count("\n") == 1
        client.log_text(run.info.run_id, "1.9", "scores.json")
        assert client.get_experiment(elsewhere).artifact_location == (tmp_path / "shared/artifacts").as_uri()
        assert client.get_experiment_by_name("m3diff").artifact_location.startswith(there.as_uri())
    assert {file.read_text() for file in (there / "services").rglob("scores.json")} == {"1.9"}
    if how == "copied":
        assert {file.read_text() for file in (first / "services").rglob("scores.json")} == {"1.1"}
    with connected(URI):
        assert "came from" not in capsys.readouterr().err


PARAMS = {"train": {"seed": 7, "epochs": 2.5}, "models": {"m3diff": {"lora": {"rank": 8}}}}
FIRST, SECOND = "step,loss,val_loss\n1,2.5,\n2,1.5,1.75\n", "3,1.25,\n"
WHOLE = [(1, 2.5), (2, 1.5), (3, 1.25)]


class Training:
    """A training that ended, and what its store holds of it."""

    def __init__(self, root: Path) -> None:
        self.model, self.curves, self.metrics = root / "model", root / "curves.csv", root / "metrics.json"
        self.client = MlflowClient(f"sqlite:///{root}/mlflow.db")
        self.metrics.write_text(json.dumps({"protocols": {"toy/all": {"CIDEr": 1.25}}}))
        self.write("a")

    def write(self, weights: str) -> None:
        (self.model / "checkpoint").mkdir(parents=True, exist_ok=True)
        manifest = {"files": {"model.safetensors": weights, "config.json": "same"}}
        (self.model / "checkpoint" / "manifest.json").write_text(json.dumps(manifest))
        (self.model / "curves.csv").write_text(FIRST + SECOND)

    def followed(self, work: Callable[[], object] = bool, key: str = "key", uri: str = LOCAL) -> None:
        with followed(Description(uri, "m3diff", "m3diff", PARAMS, 32), self.model, key, self.curves):
            work()

    def completed(self, max_new_tokens: int = 32, uri: str = LOCAL) -> None:
        completed(Description(uri, "m3diff", "m3diff", PARAMS, max_new_tokens), self.model, self.metrics)

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
    monkeypatch.setattr(tracking, "EVERY_S", 0.05)
    return Training(store)


def test_curves_are_in_the_run_after_a_checkpoint_and_the_rest_when_it_ends(training):
    def work() -> None:
        until(training.runs)
        training.curves.write_text(FIRST)
        until(lambda: training.points("val_loss") == [(2, 1.75)])
        assert training.points("loss") == WHOLE[:2]
        assert training.run.info.status == "RUNNING"

    training.followed(work)
    run = training.run
    assert (run.info.status, training.points("loss"), training.points("val_loss")) == ("FINISHED", WHOLE, [(2, 1.75)])
    assert run.data.params == {"train.seed": "7", "train.epochs": "2.5", "models.m3diff.lora.rank": "8"}
    assert run.data.tags["weights.sha256"] == weights_sha256(training.model / "checkpoint" / "manifest.json")
    training.followed(key="other")
    assert len(training.runs()) == 2, "another training"


@pytest.mark.parametrize(("how", "status"), [(SystemExit(143), "KILLED"), (ValueError("no"), "FAILED")])
def test_a_run_that_was_ended_goes_on_as_the_same_run_and_logs_no_point_twice(how, status, training):
    def work() -> None:
        training.curves.write_text(FIRST)
        raise how

    with pytest.raises(type(how)):
        training.followed(work)
    assert (training.run.info.status, training.points("loss")) == (status, WHOLE[:2])
    assert "weights.sha256" not in training.run.data.tags
    training.followed()
    assert (training.run.info.status, training.points("loss")) == ("FINISHED", WHOLE)


def test_the_scores_go_to_the_run_of_the_training_and_of_another_length_limit_to_another(training, monkeypatch):
    training.followed()
    assert training.run.info.run_name.startswith("m3diff 20")
    for _ in range(2):
        training.completed()
    assert (training.run.data.metrics["toy/all/CIDEr"], training.run.info.status) == (1.25, "FINISHED")
    training.completed(max_new_tokens=8)
    assert sorted(run.data.tags["predict.max_new_tokens"] for run in training.runs()) == ["32", "8"]
    training.write("b")
    monkeypatch.setenv("DVC_EXP_NAME", "lower-rate")
    monkeypatch.setenv("M3DIFF_FLOW_RUN", "4711")
    training.completed()
    assert len(training.runs()) == 3, "other weights"
    (named,) = [run for run in training.runs() if run.info.run_name == "lower-rate"]
    assert named.data.tags["prefect.flow_run"] == "4711"


def test_a_store_that_does_not_answer_hinders_no_training_and_is_caught_up_with(training, capsys):
    gone = f"http://127.0.0.1:{free_port()}"
    training.followed(lambda: time.sleep(0.3), uri=gone)
    training.completed(uri=gone)
    curves, scores = capsys.readouterr().out.splitlines()
    assert curves.startswith("train: MLflow does not take the curves now (MLflow at")
    assert scores.startswith("evaluate: MLflow does not take the scores now")
    training.completed()
    assert (training.points("loss"), training.run.data.metrics["toy/all/CIDEr"]) == (WHOLE, 1.25)
