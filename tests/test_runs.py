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

from components import runs
from components.runs import Description, completed, followed

PARAMS = {"train": {"seed": 7, "epochs": 2.5}, "models": {"m3diff": {"lora": {"rank": 8}}}}
ROWS = [{"step": "1", "loss": "2.5"}, {"step": "2", "loss": "1.5"}, {"step": "2", "val_loss": "1.75"}]


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
    monkeypatch.setattr(runs, "EVERY_S", 0.1)
    write_model(tmp_path / "model", "a")
    metrics = {"protocols": {"toy/all": {"CIDEr": 1.25}}}
    (tmp_path / "metrics.json").write_text(json.dumps(metrics))
    yield tmp_path
    mlflow.set_tracking_uri("")


def write_model(model: Path, weights: str) -> None:
    (model / "checkpoint").mkdir(parents=True, exist_ok=True)
    manifest = {"files": {"model.safetensors": weights, "config.json": "same"}}
    (model / "checkpoint" / "manifest.json").write_text(json.dumps(manifest))
    (model / "curves.csv").write_text("step,loss,val_loss\n1,2.5,\n2,1.5,1.75\n3,1.25,\n")


def description(uri: str = "sqlite:///mlflow.db", max_new_tokens: int = 32) -> Description:
    return Description(uri, "m3diff", "m3diff", PARAMS, max_new_tokens)


def tell(rows: Path, *told: dict[str, str]) -> None:
    with rows.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in told)


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


def test_rows_are_in_the_run_while_it_trains_and_the_rest_when_it_ends(project: Path) -> None:
    rows = project / "rows.jsonl"
    with followed(description(), project / "model", "key", rows):
        tell(rows, *ROWS[:2])
        wait_for(lambda: bool(found()) and points(one(), "train/loss") == [(1, 2.5), (2, 1.5)])
        assert one().info.status == "RUNNING"
        assert one().data.params == {"train.seed": "7", "train.epochs": "2.5", "models.m3diff.lora.rank": "8"}
        with rows.open("a") as file:
            file.write('{"step": "2", "val_l')  # half a line is none yet
        time.sleep(0.3)
    assert one().info.status == "FINISHED"
    assert points(one(), "train/loss") == [(1, 2.5), (2, 1.5), (3, 1.25)]
    assert points(one(), "train/val_loss") == [(2, 1.75)]
    assert one().data.tags["weights.sha256"] == runs.weights_sha256(project / "model" / "checkpoint")


def test_a_run_is_named_by_the_experiment_else_by_model_and_time(project: Path, monkeypatch) -> None:
    assert description().name().startswith("m3diff 20")
    monkeypatch.setenv("DVC_EXP_NAME", "lower-rate")
    monkeypatch.setenv("M3DIFF_FLOW_RUN", "4711")
    completed(description(), project / "model", project / "metrics.json")
    assert one().info.run_name == "lower-rate"
    assert one().data.tags["prefect.flow_run"] == "4711"


@pytest.mark.parametrize(("how", "status"), [(SystemExit(143), "KILLED"), (ValueError("no"), "FAILED")])
def test_a_run_that_was_ended_goes_on_as_the_same_run_and_logs_no_point_twice(
    how: BaseException, status: str, project: Path
) -> None:
    rows = project / "rows.jsonl"

    def ended() -> None:
        with followed(description(), project / "model", "key", rows):
            tell(rows, *ROWS[:2])
            raise how

    with pytest.raises(type(how)):
        ended()
    assert one().info.status == status
    assert "weights.sha256" not in one().data.tags
    with followed(description(), project / "model", "key", rows):
        tell(rows, *ROWS[1:])
    assert one().info.status == "FINISHED"
    assert points(one(), "train/loss") == [(1, 2.5), (2, 1.5), (3, 1.25)]


def test_a_row_that_a_kill_cut_short_hides_no_later_one(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        '{"step": "1", "loss": "2"}\n{"step": "2", "lo{"step": "2", "loss": "1"}\n{"step": "3", "loss": "0.5"}\n'
    )
    assert [row["step"] for row in runs.read_rows(rows)] == ["1", "3"]
    assert runs.read_rows(tmp_path / "none") == []


def test_another_training_is_another_run(project: Path) -> None:
    for key in ("one", "other"):
        with followed(description(), project / "model", key, project / "rows.jsonl"):
            pass
    assert len(found()) == 2


def test_the_scores_go_to_the_run_of_the_training_and_of_another_length_limit_to_another(project: Path) -> None:
    with followed(description(), project / "model", "key", project / "rows.jsonl"):
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
    with followed(gone, project / "model", "key", project / "rows.jsonl"):
        tell(project / "rows.jsonl", *ROWS)
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
