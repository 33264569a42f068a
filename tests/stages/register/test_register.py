"""Registering the toy's training: what MLflow holds afterwards, and what is refused."""

import base64
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import mlflow
import pyarrow.parquet as pq
import pytest
import yaml
from click.testing import CliRunner
from mlflow.cli import cli
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from m3diff.__main__ import main
from m3diff.provenance.dvc import Lock
from m3diff.registry import tracking, versions
from m3diff.registry.lineage import read_lineage
from m3diff.registry.tracking import PROCESS, Description, completed, followed
from m3diff.settings.load import load_params
from m3diff.stages.register import stage
from tests import toy
from tests.servers import free_port, started
from tests.toy import change, store


@pytest.mark.slow(35)
@pytest.mark.fault("24")
def test_in_a_fresh_process_outside_the_checkout_the_version_says_what_predict_wrote(trained, tmp_path):
    for outcome in ("registered", "unchanged"):
        command = [sys.executable, "-m", "m3diff", "register"]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.stdout.startswith(f"models:/m3diff/1 {outcome}"), done.stderr
        assert "Failed to validate" not in done.stderr
    (row, *_) = table_of_models()
    assert row["weights_bytes"] > 8
    rows = json.loads(Path("data/06_predictions/predictions.json").read_text())
    wrote = {row["image_id"]: row["caption"] for row in rows}["minichange/000002.png"]
    sides = [trained / "data/01_raw/minichange" / folder / "2.png" for folder in ("images", "sc_images")]
    forms = [[str(side) for side in sides], [base64.b64encode(side.read_bytes()).decode() for side in sides]]
    pairs = [dict(zip(("before", "after"), form, strict=True)) for form in forms]
    code, captions = toy.load_and_caption(f"sqlite:///{trained}/services/mlflow/mlflow.db", pairs, tmp_path)
    assert captions == [wrote, wrote]
    assert "services/mlflow/artifacts" in code


def table_of_models() -> list[dict[str, Any]]:
    params = load_params()
    return versions.models(params.register_, toy.TOTAL, ["CIDEr"])


# In this process, with the model's files left out


class Opened:
    """A registry over the project's store; `register` stores no files."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.client, self.logged = root, store(root), []
        monkeypatch.setattr(stage, "log_model", self.log_model)

    def log_model(self, client, run_id: str, cfg, paths, max_new_tokens: int, base: Path) -> str:
        self.logged.append(max_new_tokens)
        experiment = client.get_run(run_id).info.experiment_id
        made = mlflow.create_external_model(name=cfg.model_name, source_run_id=run_id, experiment_id=experiment)
        return made.model_uri

    def register(self) -> stage.Registration:
        return stage.register(load_params())

    def repro(self, section: str, **values: object) -> None:
        change(self.root, section, **values)
        toy.run(self.root, "dvc", "repro", "-q")

    def tags(self) -> dict[str, str]:
        return read_lineage(load_params(), Lock())

    def challenger(self) -> int:
        return int(self.client.get_registered_model("m3diff").aliases["challenger"])

    @property
    def experiment(self) -> str:
        return tracking.experiment_id(self.client, "m3diff")

    def runs(self) -> list:
        return self.client.search_runs([self.experiment])

    def mlflow(self, *command: str, at: str) -> None:
        done = CliRunner().invoke(cli, command, env={"MLFLOW_TRACKING_URI": at})
        assert done.exit_code == 0, done.output


@pytest.fixture
def opened(trained, monkeypatch) -> Iterator[Opened]:
    yield Opened(trained, monkeypatch)
    mlflow.set_tracking_uri("")


@pytest.mark.fault("24")
def test_one_training_leaves_one_run_and_one_version_with_parameters_curves_scores_report_and_data(opened, capsys):
    opened.register()
    client, (run,) = opened.client, opened.runs()
    params = yaml.safe_load(Path("params.yaml").read_text())
    assert run.data.params["train.seed"] == str(params["train"]["seed"])
    assert run.data.params["models.m3diff.rates.llm"] == str(params["models"]["m3diff"]["rates"]["llm"])
    assert run.data.params["ingest.datasets.minichange.root"] == "data/01_raw/minichange"
    assert not [name for name in run.data.params if name.startswith(("compute", "models.no_module", "register"))]
    found = {name: client.get_metric_history(run.info.run_id, f"train/{name}") for name in ("loss", "val_cider")}
    points = {name: [(point.step, point.value) for point in history] for name, history in found.items()}
    assert points == {"loss": [(1, 1.0), (2, 0.5), (3, pytest.approx(1 / 3))], "val_cider": [(3, 1.7)]}
    assert {"train/epoch", "train/lr_llm", "train/grad_norm", "train/val_loss"} <= set(run.data.metrics)
    scores = {"CIDEr": 1.24, "intervals/CIDEr/low": 0.5, "by_type/color/CIDEr": 2.0, "SPICE": None}
    assert {name: run.data.metrics.get(f"{toy.TOTAL}/{name}") for name in scores} == scores
    logged = [artifact.path for artifact in client.list_artifacts(run.info.run_id)]
    assert sorted(logged) == ["images", "report.html", "scores.parquet"]
    assert [artifact.path for artifact in client.list_artifacts(run.info.run_id, "images")] == ["images/0.webp"]
    capsys.readouterr()
    assert main(["models"]) == 0
    head, row, *_ = capsys.readouterr().out.splitlines()
    guards = ["change_exact_accuracy", "no_change_recall"]
    assert head.split() == ["version", "aliases", "registered", "CIDEr", *guards, "weights", "commit", "run"]
    (listed,) = table_of_models()
    commit = toy.run(opened.root, "git", "rev-parse", "HEAD").strip()
    number, alias, _, _, cider, *guarded = row.split()
    assert (number, alias, cider, guarded[:2]) == ("1", "challenger", "124.0", ["–", "–"])
    assert f"  {commit[:8]}  train " in row
    assert (listed["version"], listed["aliases"], listed["scores"]) == (1, ["challenger"], {"CIDEr": 1.24})
    assert (listed["checkpoint"], listed["commit"]) == (opened.tags()["dvc.checkpoint"], commit)
    assert listed["dirty"] is False


@pytest.mark.fault("09", "19")
def test_a_server_that_is_gone_and_what_differs_from_dvc_lock_are_refused_with_the_remedy(opened, capsys):
    uri = f"http://127.0.0.1:{free_port()}"
    kept = Path("params.yaml").read_text()
    change(opened.root, "register", tracking_uri=uri)
    assert main(["register"]) == 75
    said = capsys.readouterr().err
    assert f"MLflow at {uri} does not answer" in said
    assert "make up" in said
    Path("params.yaml").write_text(kept)
    Path("data/07_report/metrics.json").write_text("something else")
    assert main(["register"]) == 3
    assert re.search("dvc.lock has .*run `dvc repro` first", capsys.readouterr().err)
    assert opened.client.search_model_versions("name = 'm3diff'") == []


@pytest.mark.slow(20)
def test_the_challenger_is_the_version_of_the_checkpoint_that_is_there(opened):
    first = opened.register()
    assert str(first) == f"models:/m3diff/1 registered (MLflow run {first.run_id})"
    lock = Path("dvc.lock").read_text()
    opened.repro("train", seed=1)
    second = opened.register()
    assert (second.outcome, second.version, opened.challenger()) == ("registered", 2, 2)
    assert second.run_id != first.run_id
    assert opened.logged == [64, 64]
    Path("dvc.lock").write_text(lock)
    change(opened.root, "train", seed=7407)
    toy.run(opened.root, "dvc", "checkout", "-q", "--force")
    toy.run(opened.root, "dvc", "repro", "-q")
    again = opened.register()
    assert (again.version, again.run_id, opened.challenger()) == (1, first.run_id, 1)
    assert len(opened.runs()) == 2


def test_run_and_version_have_all_tags_of_the_lineage_which_a_new_evaluation_changes(opened, monkeypatch):
    with monkeypatch.context() as flow:
        flow.setenv("M3DIFF_FLOW_RUN", "the first")
        tags, done = opened.tags(), opened.register()
    (run,) = opened.runs()
    assert opened.client.get_model_version("m3diff", "1").tags == tags
    assert tags.items() <= run.data.tags.items()
    assert run.info.run_name == f"train {tags['dvc.checkpoint'][:8]}"
    assert (done.outcome, done.run_id, run.info.status) == ("registered", run.info.run_id, "FINISHED")
    (data,) = run.inputs.dataset_inputs
    dataset = data.dataset
    assert (dataset.name, dataset.digest, dataset.source_type) == ("04_mixture", tags["dvc.data"], "dvc")
    assert json.loads(dataset.source) == {"path": "data/04_mixture/train", "md5": tags["dvc.data"]}

    opened.client.set_model_version_tag("m3diff", "1", "dvc.raw.gone", "a dataset that left")
    opened.client.set_tag(done.run_id, "dvc.raw.gone", "a dataset that left")
    opened.repro("evaluate", gallery=76)
    assert opened.register().outcome == "updated"
    tags = opened.tags()
    (run,) = opened.runs()
    assert opened.client.get_model_version("m3diff", "1").tags == tags
    assert tags.items() <= run.data.tags.items()
    assert not {"prefect.flow_run", "dvc.raw.gone"} & run.data.tags.keys()
    assert run.data.metrics[f"{toy.TOTAL}/CIDEr"] == 1.76
    (of_pairs,) = pq.read_table(opened.client.download_artifacts(done.run_id, "scores.parquet"))["CIDEr"].unique()
    assert of_pairs.as_py() == 1.76
    monkeypatch.setattr(MlflowClient, "set_registered_model_alias", lambda *_: pytest.fail("written again"))
    assert opened.register().outcome == "unchanged"


@pytest.mark.fault("T10")
@pytest.mark.parametrize("what", ["experiment", "run"])
def test_what_was_deleted_in_mlflow_is_said_and_registered_when_it_is_mended(opened, capsys, what):
    if what == "run":
        opened.client.delete_run(opened.register().run_id)
        opened.repro("evaluate", gallery=76)
    else:
        opened.client.delete_experiment(opened.experiment)
    capsys.readouterr()
    assert main(["register"]) == 3
    (said,) = capsys.readouterr().err.splitlines()
    address, command = re.search(r"MLFLOW_TRACKING_URI=(\S+) mlflow (\w+ restore \S+ \w+), then", said).groups()
    opened.mlflow(*command.split(), at=address)
    assert main(["register"]) == 0
    assert f"models:/m3diff/1 {'updated' if what == 'run' else 'registered'}" in capsys.readouterr().out


@pytest.mark.fault("T10")
@pytest.mark.parametrize(
    ("what", "outcome", "version"),
    [("run", "registered", 2), ("version", "registered", 2), ("model", "registered", 1), ("scores", "updated", 1)],
)
def test_a_deleted_run_version_model_or_score_file_is_made_again(opened, what, outcome, version):
    run = opened.register().run_id
    if what == "run":
        opened.client.delete_run(run)
        opened.mlflow("gc", "--backend-store-uri", mlflow.get_tracking_uri(), at=mlflow.get_tracking_uri())
    elif what == "scores":  # as in versions of before scores were kept pair by pair
        Path(opened.client.get_run(run).info.artifact_uri.removeprefix("file://"), "scores.parquet").unlink()
    elif what == "version":
        opened.client.delete_model_version("m3diff", "1")
    else:
        opened.client.delete_registered_model("m3diff")
    done = opened.register()
    assert (done.outcome, done.version, opened.challenger()) == (outcome, version, version)
    assert (done.run_id == run) == (what != "run")
    assert opened.register().outcome == "unchanged"


def test_the_run_that_the_training_opened_becomes_the_version_s_and_no_other_version_s(opened):
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
    other = stage.open_run(opened.client, opened.experiment, opened.tags() | {"dvc.code": "c"})
    assert other != run.info.run_id


def test_a_run_that_another_process_writes_to_is_its_own_until_it_is_over(opened):
    tags, now, here = opened.tags(), int(time.time() * 1000), socket.gethostname()
    gone = subprocess.Popen(["true"])
    gone.wait()
    hour = 3600_000
    for process, begun, taken_up in (
        (f"{here}:1", -2 * hour, False),
        (f"{here}:{gone.pid}", 0, True),
        ("another:7", 0, False),
        ("another:7", -2 * hour, True),
    ):
        own = tags | {PROCESS: process}
        other = opened.client.create_run(opened.experiment, tags=own, start_time=now + begun).info.run_id
        found = stage.open_run(opened.client, opened.experiment, tags)
        assert (found == other) == taken_up, process
        for run in {found, other}:
            opened.client.delete_run(run)


@pytest.mark.fault("m1")
def test_who_loses_the_race_for_a_version_takes_back_its_version_model_and_run(opened, monkeypatch):
    """Another machine makes the same version after this one looked for it, and before this one makes its own."""
    really, theirs = mlflow.register_model, []

    def overtaken(uri: str, name: str, tags: dict[str, str]) -> object:
        run = opened.client.create_run(opened.experiment, tags=tags).info.run_id
        model = opened.log_model(opened.client, run, load_params().register_, None, 64, Path())
        opened.client.set_terminated(run)
        theirs.append(really(model, name, tags=tags))
        return really(uri, name, tags=tags)

    move = MlflowClient.set_registered_model_alias

    def at_once(*given: object) -> None:
        move(*given)
        raise MlflowException("UNIQUE constraint failed: registered_model_aliases")

    monkeypatch.setattr(mlflow, "register_model", overtaken)
    monkeypatch.setattr(MlflowClient, "set_registered_model_alias", at_once)
    done = opened.register()
    assert (done.outcome, done.version, opened.challenger()) == ("registered", 1, 1)
    assert done.run_id == theirs[0].run_id
    assert [int(version.version) for version in opened.client.search_model_versions("name = 'm3diff'")] == [1]
    assert [run.info.run_id for run in opened.runs()] == [theirs[0].run_id]
    models = opened.client.search_logged_models([opened.experiment])
    assert [model.model_uri for model in models] == [theirs[0].source]
    tags = opened.tags()
    for _ in range(10):
        opened.client.create_model_version("m3diff", "file:///nowhere", done.run_id, tags=tags)
    opened.client.create_model_version("m3diff", "file:///nowhere", done.run_id, tags={"dvc.checkpoint": "another"})
    assert int(stage.find_version(opened.client, "m3diff", tags).version) == 1, "of several the first"


def test_what_travels_with_a_version_is_the_code_of_its_model_and_the_first_captioned_pair(trained, tmp_path):
    (trained / "components/models/__pycache__").mkdir(exist_ok=True)
    package = stage.copy_code(tmp_path)
    assert package == tmp_path / "m3diff"
    files = {str(path.relative_to(package)) for path in package.rglob("*") if path.is_file()}
    models = trained / "components" / "models"
    code = [path for path in models.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    assert files == {*stage.SHARED_CODE, *(str(path.relative_to(models.parent)) for path in code)}
    (row,) = stage.example(load_params().paths).to_dict("records")
    images = [base64.b64decode(row[side]) for side in ("before", "after")]
    root = trained / "data/01_raw/minichange"
    assert images == [(root / folder / "2.png").read_bytes() for folder in ("images", "sc_images")]


@pytest.mark.fault("19")
@pytest.mark.slow
def test_a_server_that_ends_in_the_middle_leaves_one_run_and_one_version_when_register_runs_again(trained, monkeypatch):
    port, kept = free_port(), trained / "services" / "mlflow"
    uri = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "mlflow", "server", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{kept}/mlflow.db", "--no-serve-artifacts"]
    command += ["--default-artifact-root", (kept / "artifacts").as_uri()]
    environment = os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    log_model = stage.log_model

    def answers() -> bool:
        with suppress(tracking.TrackingUnavailableError):
            tracking.check_alive(uri)
            return True
        return False

    change(trained, "register", tracking_uri=uri)
    with ExitStack() as first, monkeypatch.context() as cut:
        first.enter_context(started(command, kept / "log", answers, env=environment))
        cut.setattr(stage, "log_model", lambda *given: (first.close(), log_model(*given))[1])
        with pytest.raises(tracking.TrackingUnavailableError, match="run `m3diff register` again: nothing was lost"):
            stage.register(load_params())
    with started(command, kept / "log", answers, env=environment):
        assert stage.register(load_params()).outcome == "registered"
        client = MlflowClient(uri)
        (version,) = client.search_model_versions("name = 'm3diff'")
        (run,) = client.search_runs([client.get_experiment_by_name("m3diff").experiment_id])
        assert (version.run_id, run.info.status) == (run.info.run_id, "FINISHED")
        assert len(client.get_metric_history(run.info.run_id, "train/loss")) == 3
    mlflow.set_tracking_uri("")
