"""A training's run in MLflow: written to while it trains, also by a later attempt, and completed by its scores."""

import json
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import mlflow
import pytest
from mlflow.entities import Run
from mlflow.tracking import MlflowClient

from m3diff.registry import tracking
from m3diff.registry.lineage import weights_sha256
from m3diff.registry.tracking import Description, completed, followed

PARAMS = {"train": {"seed": 7, "epochs": 2.5}, "models": {"m3diff": {"lora": {"rank": 8}}}}
FIRST, SECOND = "step,loss,val_loss\n1,2.5,\n2,1.5,1.75\n", "3,1.25,\n"


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with its tables, which take seconds to make."""
    database = tmp_path_factory.mktemp("store") / "mlflow.db"
    MlflowClient(f"sqlite:///{database}").search_experiments()
    return database


@pytest.fixture
def project(empty: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    shutil.copy(empty, tmp_path / "mlflow.db")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tracking, "EVERY_S", 0.1)
    write_model(tmp_path / "model", "a")
    metrics = {"protocols": {"toy/all": {"CIDEr": 1.25}}}
    (tmp_path / "metrics.json").write_text(json.dumps(metrics))
    yield tmp_path
    mlflow.set_tracking_uri("")


def write_model(model: Path, weights: str) -> None:
    (model / "checkpoint").mkdir(parents=True, exist_ok=True)
    manifest = {"files": {"model.safetensors": weights, "config.json": "same"}}
    (model / "checkpoint" / "manifest.json").write_text(json.dumps(manifest))
    (model / "curves.csv").write_text(FIRST + SECOND)


def description(uri: str = "sqlite:///mlflow.db", max_new_tokens: int = 32) -> Description:
    return Description(uri, "m3diff", "m3diff", PARAMS, max_new_tokens)


def store() -> MlflowClient:
    return MlflowClient(f"sqlite:///{Path.cwd()}/mlflow.db")


def found() -> list[Run]:
    client = store()
    experiment = client.get_experiment_by_name("m3diff")
    return client.search_runs([experiment.experiment_id]) if experiment else []


def points(run: Run, name: str) -> list[tuple[int, float]]:
    history = store().get_metric_history(run.info.run_id, name)
    return [(point.step, point.value) for point in history]


def wait_for(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < until, "not within a minute"
        time.sleep(0.05)


def one() -> Run:
    (run,) = found()
    return run


def test_curves_are_in_the_run_after_a_checkpoint_and_the_rest_when_it_ends(project: Path) -> None:
    curves = project / "curves.csv"
    with followed(description(), project / "model", "key", curves):
        wait_for(lambda: bool(found()))
        curves.write_text(FIRST)
        wait_for(lambda: points(one(), "train/val_loss") == [(2, 1.75)])
        assert points(one(), "train/loss") == [(1, 2.5), (2, 1.5)]
        assert one().info.status == "RUNNING"
        assert one().data.params == {"train.seed": "7", "train.epochs": "2.5", "models.m3diff.lora.rank": "8"}
    assert one().info.status == "FINISHED"
    assert points(one(), "train/loss") == [(1, 2.5), (2, 1.5), (3, 1.25)]
    assert points(one(), "train/val_loss") == [(2, 1.75)]
    assert one().data.tags["weights.sha256"] == weights_sha256(project / "model" / "checkpoint" / "manifest.json")


def test_a_run_is_named_by_the_experiment_else_by_model_and_time(project: Path, monkeypatch) -> None:
    completed(description(), project / "model", project / "metrics.json")
    assert one().info.run_name.startswith("m3diff 20")
    store().delete_run(one().info.run_id)
    monkeypatch.setenv("DVC_EXP_NAME", "lower-rate")
    monkeypatch.setenv("M3DIFF_FLOW_RUN", "4711")
    completed(description(), project / "model", project / "metrics.json")
    assert one().info.run_name == "lower-rate"
    assert one().data.tags["prefect.flow_run"] == "4711"


@pytest.mark.parametrize(("how", "status"), [(SystemExit(143), "KILLED"), (ValueError("no"), "FAILED")])
def test_a_run_that_was_ended_goes_on_as_the_same_run_and_logs_no_point_twice(
    how: BaseException, status: str, project: Path
) -> None:
    curves = project / "curves.csv"

    def ended() -> None:
        with followed(description(), project / "model", "key", curves):
            curves.write_text(FIRST)
            raise how

    with pytest.raises(type(how)):
        ended()
    assert one().info.status == status
    assert "weights.sha256" not in one().data.tags
    assert points(one(), "train/loss") == [(1, 2.5), (2, 1.5)]
    with followed(description(), project / "model", "key", curves):
        pass
    assert one().info.status == "FINISHED"
    assert points(one(), "train/loss") == [(1, 2.5), (2, 1.5), (3, 1.25)]


def test_another_training_is_another_run(project: Path) -> None:
    for key in ("one", "other"):
        with followed(description(), project / "model", key, project / "curves.csv"):
            pass
    assert len(found()) == 2


def test_the_scores_go_to_the_run_of_the_training_and_of_another_length_limit_to_another(project: Path) -> None:
    with followed(description(), project / "model", "key", project / "curves.csv"):
        pass
    completed(description(), project / "model", project / "metrics.json")
    completed(description(), project / "model", project / "metrics.json")
    assert one().data.metrics["toy/all/CIDEr"] == 1.25
    assert one().info.status == "FINISHED"
    completed(description(max_new_tokens=8), project / "model", project / "metrics.json")
    assert sorted(run.data.tags["predict.max_new_tokens"] for run in found()) == ["32", "8"]
    write_model(project / "model", "b")
    completed(description(), project / "model", project / "metrics.json")
    assert len(found()) == 3, "other weights"


def test_a_store_that_does_not_answer_hinders_no_training_and_is_caught_up_with(project: Path, capsys) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        gone = description(f"http://127.0.0.1:{free.getsockname()[1]}")
    with followed(gone, project / "model", "key", project / "curves.csv"):
        time.sleep(0.5)
    completed(gone, project / "model", project / "metrics.json")
    said = capsys.readouterr().out.splitlines()
    assert [line.partition(" (")[0] for line in said] == [
        "train: MLflow does not take the curves now",
        "evaluate: MLflow does not take the scores now",
    ]
    assert "does not answer" in said[0]
    completed(description(), project / "model", project / "metrics.json")
    assert points(one(), "train/loss") == [(1, 2.5), (2, 1.5), (3, 1.25)]
    assert one().data.metrics["toy/all/CIDEr"] == 1.25
