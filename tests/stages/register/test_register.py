"""Registering the toy's training: what MLflow holds afterwards, and what is refused."""

import base64
import json
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import mlflow
import pyarrow.parquet as pq
import pytest
import yaml
from click.testing import CliRunner
from mlflow.cli import cli
from mlflow.tracking import MlflowClient

from m3diff.__main__ import main
from m3diff.provenance.dvc import Lock
from m3diff.registry import tracking
from m3diff.registry.lineage import read_lineage
from m3diff.registry.tracking import PROCESS, Description, completed, followed
from m3diff.settings.load import load_params
from m3diff.stages.register import stage
from tests import toy
from tests.toy import change, store


def m3diff(root: Path, *arguments: str) -> subprocess.CompletedProcess:
    """The toy's own command line, as a user calls it."""
    return subprocess.run([sys.executable, "-m", "m3diff", *arguments], cwd=root, capture_output=True, text=True)


@pytest.fixture(scope="module")
def registered(trained_once: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("registered") / "toy"
    shutil.copytree(trained_once, root, symlinks=True)
    done = m3diff(root, "register")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("models:/m3diff/1 registered")
    assert "Failed to validate" not in done.stderr
    return root


@pytest.mark.slow(20)
def test_one_training_leaves_one_run_with_parameters_curves_scores_report_and_data(registered):
    client = store(registered)
    (run,) = client.search_runs([client.get_experiment_by_name("m3diff").experiment_id])
    assert run.info.status == "FINISHED"
    params = yaml.safe_load((registered / "params.yaml").read_text())
    assert run.data.params["train.seed"] == str(params["train"]["seed"])
    assert run.data.params["models.m3diff.rates.llm"] == str(params["models"]["m3diff"]["rates"]["llm"])
    assert run.data.params["ingest.datasets.minichange.root"] == "data/01_raw/minichange"
    assert not [name for name in run.data.params if name.startswith(("compute", "models.no_module", "register"))]
    assert [(point.step, point.value) for point in client.get_metric_history(run.info.run_id, "train/loss")] == [
        (1, 1.0),
        (2, 0.5),
        (3, pytest.approx(1 / 3)),
    ]
    for column, value in (("val_loss", 0.5), ("val_loss_minichange", 0.6), ("val_cider", 1.7)):
        (point,) = client.get_metric_history(run.info.run_id, f"train/{column}")
        assert (point.step, point.value) == (3, value)
    assert [point.value for point in client.get_metric_history(run.info.run_id, "train/grad_norm")] == [2, 4, 6]
    assert {"train/epoch", "train/lr_llm"} <= set(run.data.metrics)
    assert run.data.metrics[f"{toy.TOTAL}/CIDEr"] == 1.24
    assert run.data.metrics[f"{toy.TOTAL}/intervals/CIDEr/low"] == 0.5
    assert run.data.metrics[f"{toy.TOTAL}/by_type/color/CIDEr"] == 2.0
    assert f"{toy.TOTAL}/SPICE" not in run.data.metrics
    logged = [artifact.path for artifact in client.list_artifacts(run.info.run_id)]
    assert sorted(logged) == ["images", "report.html", "scores.parquet"]
    assert [artifact.path for artifact in client.list_artifacts(run.info.run_id, "images")] == ["images/0.webp"]
    (data,) = run.inputs.dataset_inputs
    assert data.dataset.digest == Lock(registered / "dvc.lock").hashes(Path("data/04_mixture/train"))["convert outs"]


@pytest.mark.slow(10)
@pytest.mark.fault("24")
def test_registering_again_changes_nothing(registered):
    again = m3diff(registered, "register")
    assert again.stdout.startswith("models:/m3diff/1 unchanged")
    client = store(registered)
    assert len(client.search_model_versions("name = 'm3diff'")) == 1
    assert len(client.search_runs([client.get_experiment_by_name("m3diff").experiment_id])) == 1


@pytest.mark.slow(20)
def test_the_versions_are_listed_with_their_aliases_scores_and_origin(registered):
    told = m3diff(registered, "models").stdout.splitlines()
    assert told[0].split() == ["version", "aliases", "registered", "CIDEr", *GUARDS, "weights", "commit", "run"]
    commit = toy.run(registered, "git", "rev-parse", "HEAD").strip()
    number, alias, _, _, cider, *guards = told[1].split()
    assert (number, alias, cider, guards[:2]) == ("1", "challenger", "124.0", ["–", "–"])
    assert f"  {commit[:8]}  train " in told[1]
    assert told[-1].startswith(f"scores on {toy.TOTAL}, times 100")
    (listed,) = json.loads(m3diff(registered, "models", "--json").stdout)
    (version,) = store(registered).search_model_versions("name = 'm3diff'")
    assert (listed["version"], listed["aliases"], listed["scores"]) == (1, ["challenger"], {"CIDEr": 1.24})
    assert (listed["checkpoint"], listed["commit"]) == (version.tags["dvc.checkpoint"], commit)
    assert listed["weights_bytes"] > 8
    assert not listed["dirty"]


GUARDS = ["change_exact_accuracy", "no_change_recall"]


@pytest.mark.slow(15)
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


@pytest.mark.fault("19")
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
    assert toy.status(trained) == {}


@pytest.mark.fault("09")
def test_what_differs_from_dvc_lock_is_not_registered(trained):
    (trained / "data/07_report/metrics.json").write_text("something else")
    refused = m3diff(trained, "register")
    assert refused.returncode == 3
    assert "dvc.lock has" in refused.stderr
    assert "run `dvc repro` first" in refused.stderr
    assert store(trained).search_model_versions("name = 'm3diff'") == []


# In this process, with the model's files left out


class Opened:
    """A registry over the project's store; `register` stores no files."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.client, self.logged = root, store(root), []
        monkeypatch.setattr(stage, "log_model", self.log_model)

    def log_model(self, client, run_id: str, cfg, paths, max_new_tokens: int, base: Path) -> str:
        name = cfg.model_name
        self.logged.append((name, max_new_tokens))
        experiment = client.get_run(run_id).info.experiment_id
        return mlflow.create_external_model(name=name, source_run_id=run_id, experiment_id=experiment).model_uri

    def register(self) -> stage.Registration:
        return stage.register(load_params())

    def retrain(self, seed: int) -> None:
        change(self.root, "train", seed=seed)
        toy.run(self.root, "dvc", "repro", "-q")

    def challenger(self) -> int:
        return int(self.client.get_registered_model("m3diff").aliases["challenger"])

    def runs(self) -> list:
        return self.client.search_runs([self.client.get_experiment_by_name("m3diff").experiment_id])


@pytest.fixture
def opened(trained, monkeypatch) -> Iterator[Opened]:
    yield Opened(trained, monkeypatch)
    mlflow.set_tracking_uri("")


@pytest.mark.slow(20)
def test_the_challenger_is_the_version_of_the_checkpoint_that_is_there(opened):
    first = opened.register()
    assert (first.outcome, first.version, str(first)) == (
        "registered",
        1,
        f"models:/m3diff/1 registered (MLflow run {first.run_id})",
    )
    lock = Path("dvc.lock").read_text()
    opened.retrain(seed=1)
    second = opened.register()
    assert (second.outcome, second.version, opened.challenger()) == ("registered", 2, 2)
    assert second.run_id != first.run_id
    assert opened.logged == [("m3diff", 64), ("m3diff", 64)]

    Path("dvc.lock").write_text(lock)
    change(opened.root, "train", seed=7407)
    toy.run(opened.root, "dvc", "checkout", "-q", "--force")
    toy.run(opened.root, "dvc", "repro", "-q")
    again = opened.register()
    assert (again.version, again.run_id, opened.challenger()) == (1, first.run_id, 1)
    assert len(opened.runs()) == 2


def test_run_and_version_have_all_tags_of_the_lineage_and_a_readable_name(opened):
    done = opened.register()
    lineage = read_lineage(load_params(), Lock())
    (run,) = opened.runs()
    version = opened.client.get_model_version("m3diff", "1")
    assert version.tags == lineage.tags()
    assert lineage.tags().items() <= run.data.tags.items()
    assert run.info.run_name == f"train {lineage.checkpoint[:8]}"
    assert (version.run_id, run.info.status) == (done.run_id, "FINISHED")


def test_a_new_evaluation_changes_the_tags_of_run_and_version_and_the_report(opened, monkeypatch):
    with monkeypatch.context() as flow:
        flow.setenv("M3DIFF_FLOW_RUN", "the first")
        run = opened.register().run_id
    opened.client.set_model_version_tag("m3diff", "1", "dvc.raw.gone", "a dataset that left")
    opened.client.set_tag(run, "dvc.raw.gone", "a dataset that left")
    change(opened.root, "evaluate", gallery=76)
    toy.run(opened.root, "dvc", "repro", "-q")
    assert opened.register().outcome == "updated"
    tags = read_lineage(load_params(), Lock()).tags()
    (run,) = opened.runs()
    assert opened.client.get_model_version("m3diff", "1").tags == tags
    assert tags.items() <= run.data.tags.items()
    assert "prefect.flow_run" not in run.data.tags
    assert run.data.metrics[f"{toy.TOTAL}/CIDEr"] == 1.76
    (of_pairs,) = pq.read_table(opened.client.download_artifacts(run.info.run_id, "scores.parquet"))["CIDEr"].unique()
    assert of_pairs.as_py() == 1.76
    assert opened.register().outcome == "unchanged"


def test_a_version_of_before_scores_were_kept_pair_by_pair_gets_them(opened, monkeypatch):
    with monkeypatch.context() as before:
        before.setattr(stage, "has_artifact", lambda *_: True)
        before.setattr(stage, "SCORES", "report.html")
        opened.register()
    assert opened.register().outcome == "updated"
    (run,) = opened.runs()
    assert {"report.html", "scores.parquet"} <= {found.path for found in opened.client.list_artifacts(run.info.run_id)}
    assert opened.register().outcome == "unchanged"


@pytest.mark.fault("T10")
@pytest.mark.parametrize("what", ["experiment", "run"])
def test_what_was_deleted_in_mlflow_is_said_and_registered_when_it_is_mended(opened, capsys, what):
    if what == "run":
        opened.client.delete_run(opened.register().run_id)
        change(opened.root, "evaluate", gallery=76)
        toy.run(opened.root, "dvc", "repro", "-q")
    else:
        opened.client.delete_experiment(tracking.experiment_id(opened.client, "m3diff"))
    capsys.readouterr()
    assert main(["register"]) == 3
    (said,) = capsys.readouterr().err.splitlines()
    address, command = re.search(r"MLFLOW_TRACKING_URI=(\S+) mlflow (\w+ restore \S+ \w+), then", said).groups()
    done = CliRunner().invoke(cli, command.split(), env={"MLFLOW_TRACKING_URI": address})
    assert done.exit_code == 0, done.output
    assert main(["register"]) == 0
    assert f"models:/m3diff/1 {'updated' if what == 'run' else 'registered'}" in capsys.readouterr().out


@pytest.mark.fault("T10")
def test_a_version_whose_run_is_gone_for_good_is_registered_once_more(opened):
    run = opened.register().run_id
    opened.client.delete_run(run)
    store = mlflow.get_tracking_uri()
    done = CliRunner().invoke(cli, ["gc", "--backend-store-uri", store], env={"MLFLOW_TRACKING_URI": store})
    assert done.exit_code == 0, done.output
    again = opened.register()
    assert (again.outcome, again.version, again.run_id != run) == ("registered", 2, True)
    assert opened.register().outcome == "unchanged"


@pytest.mark.fault("T10")
@pytest.mark.parametrize("delete", ["version", "model", "scores"])
def test_a_deleted_version_model_or_score_file_is_made_again(opened, delete):
    run = opened.register().run_id
    if delete == "scores":
        place = opened.client.get_run(run).info.artifact_uri.removeprefix("file://")
        Path(place, "scores.parquet").unlink()
    elif delete == "version":
        opened.client.delete_model_version("m3diff", "1")
    else:
        opened.client.delete_registered_model("m3diff")
    done = opened.register()
    told = {"scores": ("updated", 1), "version": ("registered", 2), "model": ("registered", 1)}
    assert (done.outcome, done.version) == told[delete]
    assert done.run_id == run
    assert opened.challenger() == done.version
    assert stage.has_artifact(opened.client, run, "scores.parquet")


def test_an_artifact_is_found_in_its_folder_and_another_of_like_name_is_none(opened):
    run = opened.register().run_id
    opened.client.log_artifact(run, "params.yaml", "a/b")
    assert stage.has_artifact(opened.client, run, "a/b/params.yaml")
    assert stage.has_artifact(opened.client, run, "scores.parquet")
    assert not stage.has_artifact(opened.client, run, "params.yaml")
    assert not stage.has_artifact(opened.client, run, "a/b/params")
    assert not stage.has_artifact(opened.client, run, "none/scores.parquet")


def test_a_run_that_an_interrupted_registration_left_is_used_again(opened, monkeypatch):
    with monkeypatch.context() as cut:
        cut.setattr(stage, "log_model", lambda *_: (_ for _ in ()).throw(OSError("no space")))
        with pytest.raises(OSError, match="no space"):
            opened.register()
    (left,) = opened.runs()
    assert opened.register().run_id == left.info.run_id
    (run,) = opened.runs()
    assert len(opened.client.get_metric_history(run.info.run_id, "train/loss")) == 3


def test_the_run_that_the_training_opened_becomes_the_version_s(opened):
    params = load_params()
    limit, model = params.predict.max_new_tokens, params.paths.model
    opened_by_train = Description(params.register_.tracking_uri, "m3diff", "m3diff", {"train": {"seed": 5}}, limit)
    with followed(opened_by_train, model, "key", model / "curves.csv"):
        pass
    completed(opened_by_train, model, params.paths.report / "metrics.json")
    (trained,) = opened.runs()
    assert opened.register().run_id == trained.info.run_id
    (run,) = opened.runs()
    assert run.info.run_name == trained.info.run_name
    assert len(opened.client.get_metric_history(run.info.run_id, "train/loss")) == 3
    assert run.data.params["train.seed"] == "5", "MLflow takes a parameter once"
    assert run.data.params["evaluate.gallery"], "what the training did not know"


def test_a_run_that_a_version_is_made_of_is_no_other_version_s(opened):
    first = opened.register()
    client = opened.client
    lineage = read_lineage(load_params(), Lock())
    other = stage.open_run(client, tracking.experiment_id(client, "m3diff"), lineage.model_copy(update={"code": "c"}))
    assert other != first.run_id


@pytest.mark.parametrize(
    ("process", "begun", "taken_up"),
    [("{host}:1", 0, False), ("another:7", 0, False), ("another:7", -2 * 3600_000, True)],
)
def test_a_run_that_another_process_writes_to_is_its_own(opened, process, begun, taken_up):
    lineage = read_lineage(load_params(), Lock())
    experiment = tracking.experiment_id(opened.client, "m3diff")
    tags = lineage.tags() | {PROCESS: process.format(host=socket.gethostname())}
    now = int(time.time() * 1000)
    other = opened.client.create_run(experiment, tags=tags, start_time=now + begun).info.run_id
    assert (opened.register().run_id == other) == taken_up


@pytest.mark.fault("m1")
def test_who_loses_the_race_for_a_version_takes_back_its_version_model_and_run(opened, monkeypatch):
    """Another machine makes the same version after this one looked for it, and before this one makes its own."""
    really, theirs = mlflow.register_model, []

    def overtaken(uri: str, name: str, tags: dict[str, str]) -> object:
        run = opened.client.create_run(tracking.experiment_id(opened.client, "m3diff"), tags=tags).info.run_id
        model = opened.log_model(opened.client, run, load_params().register_, None, 64, Path())
        opened.client.set_terminated(run)
        theirs.append(really(model, name, tags=tags))
        return really(uri, name, tags=tags)

    monkeypatch.setattr(mlflow, "register_model", overtaken)
    done = opened.register()
    assert (done.version, done.run_id, opened.challenger()) == (1, theirs[0].run_id, 1)
    assert [int(version.version) for version in opened.client.search_model_versions("name = 'm3diff'")] == [1]
    assert [run.info.run_id for run in opened.runs()] == [theirs[0].run_id]
    experiment = tracking.experiment_id(opened.client, "m3diff")
    assert [model.model_uri for model in opened.client.search_logged_models([experiment])] == [theirs[0].source]


def test_of_several_versions_of_one_checkpoint_the_first_is_found(opened):
    run = opened.register().run_id
    lineage = read_lineage(load_params(), Lock())
    for _ in range(10):
        opened.client.create_model_version("m3diff", "file:///nowhere", run, tags=lineage.identity())
    opened.client.create_model_version("m3diff", "file:///nowhere", run, tags={"dvc.checkpoint": "another"})
    for first in (1, 2):
        found = stage.find_version(opened.client, "m3diff", lineage)
        assert found is not None
        assert int(found.version) == first
        opened.client.delete_model_version("m3diff", str(first))


def test_an_alias_that_is_right_already_is_not_written_again(opened, monkeypatch):
    opened.register()
    monkeypatch.setattr(MlflowClient, "set_registered_model_alias", lambda *_: pytest.fail("written again"))
    stage.put_alias(opened.client, "m3diff", "challenger", 1)
    with pytest.raises(pytest.fail.Exception):
        stage.put_alias(opened.client, "m3diff", "another", 1)


def test_the_code_that_travels_with_a_version_is_the_models_package_and_the_opener_of_images_nothing_compiled(
    trained, tmp_path
):
    (trained / "components/models/__pycache__").mkdir(exist_ok=True)
    package = stage.copy_code(tmp_path)
    assert package == tmp_path / "m3diff"
    files = {str(path.relative_to(package)) for path in package.rglob("*") if path.is_file()}
    models = trained / "components" / "models"
    here = {str(path.relative_to(models.parent)) for path in models.rglob("*") if path.suffix != ".pyc"}
    assert files == {*stage.SHARED_CODE} | {path for path in here if (models.parent / path).is_file()}


def test_the_example_of_a_version_is_the_first_captioned_pair(trained):
    (row,) = stage.example(load_params().paths).to_dict("records")
    root = trained / "data/01_raw/minichange"
    assert base64.b64decode(row["before"]) == (root / "images/2.png").read_bytes()
    assert base64.b64decode(row["after"]) == (root / "sc_images/2.png").read_bytes()
