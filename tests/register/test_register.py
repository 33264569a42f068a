"""Registering the toy's training: what MLflow holds afterwards, and what is refused."""

import base64
import json
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from components.records import DataError
from components.register.lineage import Lock
from tests import toy
from tests.register.conftest import change, store


def m3diff(root: Path, *arguments: str) -> subprocess.CompletedProcess:
    """The toy's own command line, as a user calls it."""
    return subprocess.run([sys.executable, "-m", "components", *arguments], cwd=root, capture_output=True, text=True)


@pytest.fixture(scope="module")
def registered(trained_once: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("registered") / "toy"
    shutil.copytree(trained_once, root)
    done = m3diff(root, "register")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("models:/m3diff/1 registered")
    assert "Failed to validate" not in done.stderr
    return root


def test_one_training_leaves_one_run_with_parameters_curves_scores_report_and_data(registered):
    client = store(registered)
    (run,) = client.search_runs([client.get_experiment_by_name("m3diff").experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params["train.lr"] == str(yaml.safe_load((registered / "params.yaml").read_text())["train"]["lr"])
    assert [(point.step, point.value) for point in client.get_metric_history(run.info.run_id, "train/loss")] == [
        (1, 1.0),
        (2, 0.5),
        (3, pytest.approx(1 / 3)),
    ]
    assert [point.step for point in client.get_metric_history(run.info.run_id, "train/val_loss")] == [3]
    assert run.data.metrics["CIDEr"] == 1.24
    assert run.data.metrics["change_types/color/CIDEr"] == 2.0
    assert "SPICE" not in run.data.metrics
    assert [artifact.path for artifact in client.list_artifacts(run.info.run_id)] == ["report.html"]
    (data,) = run.inputs.dataset_inputs
    assert data.dataset.digest == Lock(registered / "dvc.lock").hashes(Path("data/04_mixture/samples"))["convert outs"]


def test_the_version_names_the_very_hashes_in_dvc_lock_and_the_commit(registered):
    (version,) = store(registered).search_model_versions("name = 'm3diff'")
    stages = yaml.safe_load((registered / "dvc.lock").read_text())["stages"]
    outs = {out["path"]: out["md5"] for stage in stages.values() for out in stage["outs"]}
    assert version.tags["dvc.checkpoint"] == outs["data/05_model/checkpoint"]
    assert version.tags["dvc.data"] == outs["data/04_mixture/samples"]
    assert version.tags["git.commit"] == toy.run(registered, "git", "rev-parse", "HEAD").strip()
    assert version.tags["git.dirty"] == "false"


def test_registering_again_changes_nothing(registered):
    again = m3diff(registered, "register")
    assert again.stdout.startswith("models:/m3diff/1 unchanged")
    client = store(registered)
    assert len(client.search_model_versions("name = 'm3diff'")) == 1
    assert len(client.search_runs([client.get_experiment_by_name("m3diff").experiment_id])) == 1


@pytest.mark.parametrize("form", ["path", "base64"])
def test_in_a_fresh_process_outside_the_checkout_the_version_says_what_predict_wrote(registered, tmp_path, form):
    wrote = {
        row["image_id"]: row["caption"]
        for row in json.loads((registered / "data/06_predictions/predictions.json").read_text())
    }
    sides = [registered / "data/01_raw/minichange" / folder / "2.png" for folder in ("images", "sc_images")]
    if form == "base64":
        values = [base64.b64encode(side.read_bytes()).decode() for side in sides]
    else:
        values = [str(side) for side in sides]
    uri = f"sqlite:///{registered}/services/mlflow/mlflow.db"
    code, captions = toy.load_and_caption(uri, [dict(zip(("before", "after"), values, strict=True))], tmp_path)
    assert captions == [wrote["minichange/000002.png"]]
    assert "services/mlflow/artifacts" in code


def test_a_new_evaluation_of_the_same_checkpoint_renews_the_scores_and_adds_no_version(trained):
    assert m3diff(trained, "register").returncode == 0
    change(trained, "evaluate", gallery=76)
    toy.run(trained, "dvc", "repro", "-q")
    assert m3diff(trained, "register").stdout.startswith("models:/m3diff/1 updated")
    client = store(trained)
    (version,) = client.search_model_versions("name = 'm3diff'")
    assert client.get_run(version.run_id).data.metrics["CIDEr"] == 1.76
    assert version.tags["dvc.lock.sha256"] == Lock(trained / "dvc.lock").sha256


def test_a_server_that_is_gone_is_named_with_the_remedy_and_nothing_is_lost(trained):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    change(trained, "register", tracking_uri=f"http://127.0.0.1:{port}")
    gone = m3diff(trained, "register")
    assert gone.returncode == 75
    assert f"MLflow at http://127.0.0.1:{port} does not answer" in gone.stderr
    assert "make up" in gone.stderr
    assert "Traceback" not in gone.stderr
    assert toy.run(trained, "dvc", "status").startswith("Data and pipelines are up to date")


@pytest.mark.parametrize(
    "path", ["data/05_model/checkpoint/word.txt", "data/07_report/metrics.json", "components/model/__init__.py"]
)
def test_what_differs_from_dvc_lock_is_not_registered(trained, path):
    (trained / path).chmod(0o644)
    (trained / path).write_text("something else")
    refused = m3diff(trained, "register")
    assert refused.returncode == 3
    assert "dvc.lock has" in refused.stderr
    assert "run `dvc repro` first" in refused.stderr
    assert store(trained).search_model_versions("name = 'm3diff'") == []


@pytest.mark.parametrize("text", ["", "<<<<<<< HEAD\nstages: {}\n", "stages"])
def test_a_lock_file_that_is_no_lock_file_says_how_to_restore_it(tmp_path, text):
    (tmp_path / "dvc.lock").write_text(text)
    with pytest.raises(DataError, match="git checkout -- "):
        Lock(tmp_path / "dvc.lock")


def test_without_a_lock_file_there_is_nothing_to_register(tmp_path):
    with pytest.raises(DataError, match="run `dvc repro` first"):
        Lock(tmp_path / "dvc.lock")
