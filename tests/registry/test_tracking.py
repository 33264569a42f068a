"""What goes to MLflow: names, steps, values, sizes of requests; and a store that does not answer."""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import mlflow
import pytest
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from mlflow.utils.validation import _validate_metric_name

from m3diff.records.errors import DataError
from m3diff.registry import tracking
from m3diff.registry.tracking import TrackingUnavailableError, connected, flatten

URI = "sqlite:///services/mlflow/mlflow.db"


class Client:
    """Keeps what it is given, request by request."""

    def __init__(self) -> None:
        self.requests: list[dict] = []

    def log_batch(self, run_id: str, **values) -> None:
        assert run_id == "run"
        self.requests.append(values)

    def get_run(self, run_id: str) -> SimpleNamespace:
        metrics = {metric.key: metric.value for metric in self.logged("metrics")}
        return SimpleNamespace(data=SimpleNamespace(params={"section.known": "as it was"}, metrics=metrics))

    def get_metric_history(self, run_id: str, name: str) -> list:
        return [metric for metric in self.logged("metrics") if metric.key == name]

    def log_inputs(self, run_id: str, datasets) -> None:
        assert run_id == "run"
        self.requests.append({"datasets": datasets})

    def logged(self, kind: str) -> list:
        return [value for request in self.requests for value in request.get(kind, [])]


@pytest.fixture
def client() -> Client:
    return Client()


@pytest.fixture(autouse=True)
def restore(monkeypatch):
    for name in ("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR"):
        monkeypatch.setenv(name, "0")
        monkeypatch.delenv(name)
    yield
    mlflow.set_tracking_uri("")


def test_nested_values_become_one_level():
    assert flatten({"a": {"b": 1, "c": [2, {"d": None}]}, "e": {}}) == {"a.b": 1, "a.c.0": 2, "a.c.1.d": None}
    assert flatten({"a": {"b": 1}}, separator="/") == {"a/b": 1}


def test_params_go_in_batches_that_mlflow_takes(client):
    tracking.log_params(client, "run", {"section": {"known": 1} | {str(number): number for number in range(250)}})
    assert [len(request["params"]) for request in client.requests] == [100, 100, 50]
    assert [(p.key, p.value) for p in client.logged("params")] == [(f"section.{n}", str(n)) for n in range(250)]


def test_every_column_of_the_curves_is_a_metric_by_step_and_an_empty_cell_is_no_point(client, tmp_path):
    curves = tmp_path / "curves.csv"
    names = "step,epoch,loss,lr_vision,module_score/17,val_cider"
    curves.write_text(f"{names}\n1,0.5,2.5,0.1,0.5,\n")
    tracking.log_curves(client, "run", curves)
    first = [("train/epoch", 0.5, 1), ("train/loss", 2.5, 1), ("train/lr_vision", 0.1, 1)]
    first += [("train/module_score/17", 0.5, 1)]
    assert [(m.key, m.value, m.step) for m in client.logged("metrics")] == first
    curves.write_text(f"{names}\n1,0.5,2.5,0.1,0.5,\n2,1.0,1.5,0.2,,0.7\n")
    second = [("train/epoch", 1.0, 2), ("train/loss", 1.5, 2), ("train/lr_vision", 0.2, 2), ("train/val_cider", 0.7, 2)]
    for _ in range(2):
        tracking.log_curves(client, "run", curves)
        assert [(m.key, m.value, m.step) for m in client.logged("metrics")] == first + second, "a point is logged once"


def test_long_curves_go_in_batches_that_mlflow_takes(client, tmp_path):
    rows = "".join(f"{step},{step / 10}\n" for step in range(1, 2502))
    (tmp_path / "curves.csv").write_text(f"step,loss\n{rows}")
    tracking.log_curves(client, "run", tmp_path / "curves.csv")
    assert [len(request["metrics"]) for request in client.requests] == [1000, 1000, 501]
    assert [metric.step for metric in client.logged("metrics")] == list(range(1, 2502))


@pytest.mark.parametrize("folder", [".", ".dvc/tmp/exps/standalone/tmpabc", ".dvc/tmp/exps/tmpabc"])
def test_a_sqlite_store_is_the_project_s_also_where_dvc_runs_an_experiment_in_a_copy(folder, tmp_path, monkeypatch):
    copy = tmp_path / folder
    copy.mkdir(parents=True, exist_ok=True)
    monkeypatch.chdir(copy)
    assert tracking.resolve("sqlite:///services/mlflow/mlflow.db") == f"sqlite:///{tmp_path}/services/mlflow/mlflow.db"
    assert tracking.resolve("sqlite:////elsewhere/mlflow.db") == "sqlite:////elsewhere/mlflow.db"
    assert (tmp_path / "services" / "mlflow").is_dir()
    assert (copy / "services").exists() == (folder == ".")
    assert tracking.resolve("http://host:5000") == "http://host:5000"


def test_scores_are_metrics_and_what_is_no_number_is_left_out(client, tmp_path):
    metrics = tmp_path / "metrics.json"
    metrics.write_text(
        json.dumps(
            {
                "rows_out": 3,
                "note": "n",
                "protocols": {"d/p": {"CIDEr": 1.5, "SPICE": None, "intervals": {"CIDEr": {"low": 1}}}},
            }
        )
    )
    tracking.log_scores(client, "run", metrics, 99)
    assert [(m.key, m.value, m.timestamp, m.step) for m in client.logged("metrics")] == [
        ("rows_out", 3.0, 99, 0),
        ("d/p/CIDEr", 1.5, 99, 0),
        ("d/p/intervals/CIDEr/low", 1.0, 99, 0),
    ]


def test_a_name_that_mlflow_refuses_is_logged_under_one_that_it_takes(client, tmp_path):
    name = "d/p/by_type/less + more (50 %)/CIDEr"
    (tmp_path / "metrics.json").write_text(json.dumps({name: 1.0}))
    tracking.log_scores(client, "run", tmp_path / "metrics.json", 0)
    (logged,) = client.logged("metrics")
    assert logged.key == "d/p/by_type/less _ more _50 __/CIDEr"
    with pytest.raises(MlflowException):
        _validate_metric_name(name)
    _validate_metric_name(logged.key)


def test_the_training_data_is_named_by_dvcs_hash(client):
    tracking.log_dataset(client, "run", "mixture", Path("data/train"), "abc.dir")
    (found,) = client.logged("datasets")
    dataset, (tag,) = found.dataset, found.tags
    assert (dataset.name, dataset.digest, dataset.source_type) == ("mixture", "abc.dir", "dvc")
    assert json.loads(dataset.source) == {"path": "data/train", "md5": "abc.dir"}
    assert (tag.key, tag.value) == ("mlflow.data.context", "training")


class Experiments:
    def __init__(self, known: str | None) -> None:
        self.known, self.created = known, []

    def get_experiment_by_name(self, name: str):
        return SimpleNamespace(experiment_id=self.known, lifecycle_stage="active") if self.known else None

    def create_experiment(self, name: str, **options: str) -> str:
        self.created.append((name, options))
        return "new"


def test_a_new_experiment_has_its_artifacts_beside_a_sqlite_store_or_where_a_server_says_and_a_known_one_is_used(
    tmp_path,
):
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    experiments = Experiments(None)
    assert tracking.experiment_id(experiments, "m3diff") == "new"
    assert experiments.created == [("m3diff", {"artifact_location": (tmp_path / "artifacts" / "m3diff").as_uri()})]
    mlflow.set_tracking_uri("http://127.0.0.1:1")
    served = Experiments(None)
    assert tracking.experiment_id(served, "m3diff") == "new"
    assert served.created == [("m3diff", {})]
    known = Experiments("7")
    assert (tracking.experiment_id(known, "m3diff"), known.created) == ("7", [])


def test_where_only_mlflows_client_is_installed_a_sqlite_store_is_refused_in_words(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tracking.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DataError, match=r"tracking_uri sqlite:///a/b.db: .* -e '\.\[train\]'\); else name a server"):
        tracking.resolve("sqlite:///a/b.db")
    assert not (tmp_path / "a").exists()
    assert tracking.resolve("http://127.0.0.1:5000") == "http://127.0.0.1:5000"


def test_inside_connected_mlflows_own_functions_use_the_store_and_few_retries(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with connected("sqlite:///x.db") as client:
        assert isinstance(client, MlflowClient)
        assert mlflow.get_tracking_uri() == f"sqlite:///{tmp_path}/x.db"
        assert os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] == "2"
        assert os.environ["MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR"] == "false"


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def test_a_server_that_does_not_answer_is_named_with_the_remedy():
    uri = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(TrackingUnavailableError, match=r"make up.*nothing was lost") as refused, connected(uri):
        pytest.fail("entered")
    assert f"MLflow at {uri} does not answer" in str(refused.value)


def test_an_error_inside_is_the_servers_absence_where_it_went_away_and_itself_where_it_is_there(tmp_path, monkeypatch):
    def gone(uri: str) -> None:
        if checks.append(uri) or len(checks) == 2:
            raise TrackingUnavailableError("gone")

    checks: list[str] = []
    with monkeypatch.context() as patched:
        patched.setattr(tracking, "check_alive", gone)
        with pytest.raises(TrackingUnavailableError, match="gone"), connected("http://127.0.0.1:1"):
            raise KeyError("what mlflow raises when a connection breaks")
    assert checks == ["http://127.0.0.1:1"] * 2
    with pytest.raises(KeyError), connected(f"sqlite:///{tmp_path}/mlflow.db"):
        raise KeyError("a bug")


MAKES_TABLES = """
import sys
from m3diff.registry import tracking
with tracking.connected(sys.argv[1]) as client:
    print(len(client.search_experiments()))
"""


@pytest.mark.slow(15)
def test_two_processes_at_once_find_a_new_store_whole(tmp_path):
    command = [sys.executable, "-c", MAKES_TABLES, f"sqlite:///{tmp_path}/new/mlflow.db"]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    for process in both:
        out, err = process.communicate()
        assert (process.returncode, out) == (0, "1\n"), err


@pytest.mark.fault("P14")
@pytest.mark.parametrize("how", ["copied", "moved"])
def test_a_store_that_came_here_with_its_checkout_has_its_artifacts_here_and_none_of_the_original_s(
    how: str,
    empty_store: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    first, there = tmp_path / "first", tmp_path / "there & 50%"
    (first / "services/mlflow").mkdir(parents=True)
    shutil.copy(empty_store, first / "services/mlflow/mlflow.db")
    monkeypatch.chdir(first)
    with tracking.connected(URI) as client:
        run = client.create_run(tracking.experiment_id(client, "m3diff"))
        elsewhere = client.create_experiment("team", artifact_location=(tmp_path / "shared/artifacts").as_uri())
    kept = first / "services/mlflow/artifacts/m3diff" / run.info.run_id / "artifacts"
    assert run.info.artifact_uri == kept.as_uri()
    kept.mkdir(parents=True)
    (kept / "scores.json").write_text("1.1")
    assert capsys.readouterr().err == ""
    (shutil.copytree(first, there) if how == "copied" else first.rename(there))
    monkeypatch.chdir(there)
    with tracking.connected(URI) as client:
        said = capsys.readouterr().err
        client.log_text(run.info.run_id, "1.9", "scores.json")
        assert client.get_experiment(elsewhere).artifact_location == (tmp_path / "shared/artifacts").as_uri()
        assert client.get_experiment_by_name("m3diff").artifact_location.startswith(there.as_uri())
    assert (str(first), said.count("\n")) == (str(first), 1)
    written = {file.read_text() for file in (there / "services").rglob("scores.json")}
    assert written == {"1.9"}
    if how == "copied":
        assert {file.read_text() for file in (first / "services").rglob("scores.json")} == {"1.1"}
    with tracking.connected(URI):
        assert "came from" not in capsys.readouterr().err
