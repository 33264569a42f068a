"""Register the training of the toy project: the contents of MLflow afterwards, and refusals."""

import base64
import json
import os
import random
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlflow
import pandas as pd
import pyarrow.parquet as pq
import pytest
import yaml
from click.testing import CliRunner
from mlflow.cli import cli
from mlflow.entities import LoggedModelStatus, Run
from mlflow.exceptions import MlflowException
from mlflow.models.utils import _enforce_schema
from mlflow.store.entities import PagedList
from mlflow.tracking import MlflowClient
from PIL import Image

from m3diff.__main__ import main
from m3diff.models import generation
from m3diff.models.contract import Prepared, Takes
from m3diff.models.generation import Captioner
from m3diff.models.sample_limits import TrainedOn
from m3diff.provenance.code import digest_code
from m3diff.provenance.dvc import Lock
from m3diff.records.errors import DataError, ValueFault
from m3diff.registry import lineage, tracking, versions
from m3diff.registry.tracking import PROCESS_TAG, RunDescription, log_curves_while_training, log_evaluation
from m3diff.settings.load import load_params
from m3diff.stages.register import stage
from m3diff.stages.register.pyfunc import BATCH_ROWS, PyfuncCaptioner, open_image
from tests import toy
from tests.errors import Message, raises
from tests.layouts import write_test_set
from tests.prepared_sets import SET_BYTES, PreparedSets
from tests.servers import free_port
from tests.stages.register.forks import KILLED, Forks
from tests.tiers import slow_except
from tests.toy import change, store


class OpenRegistry:
    """The registry of the project. `register` does not store the files of the model."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        self.client = store(root)
        self.logged = []
        monkeypatch.setattr(stage, "log_model", self.log_model)

    def log_model(self, client, run_id: str, cfg, paths, max_new_tokens: int, base: Path) -> str:
        self.logged.append(max_new_tokens)
        experiment = client.get_run(run_id).info.experiment_id
        model = mlflow.create_external_model(name=cfg.model_name, source_run_id=run_id, experiment_id=experiment)
        return model.model_uri

    def register(self) -> stage.Registration:
        return stage.register(load_params())

    def repro(self, section: str, **values: object) -> None:
        change(self.root, section, **values)
        toy.run(self.root, "dvc", "repro", "-q")

    def tags(self) -> dict[str, str]:
        return lineage.read_lineage(load_params(), Lock())

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
def open_registry(trained, monkeypatch) -> Iterator[OpenRegistry]:
    yield OpenRegistry(trained, monkeypatch)
    mlflow.set_tracking_uri("")


@pytest.mark.fault("24")
def test_one_training_leaves_one_run_and_one_version_with_all_its_results(open_registry, capsys):
    open_registry.register()
    client = open_registry.client
    (run,) = open_registry.runs()
    params = yaml.safe_load(Path("params.yaml").read_text())
    assert run.data.params["train.seed"] == str(params["train"]["seed"])
    assert run.data.params["models.m3diff.rates.llm"] == str(params["models"]["m3diff"]["rates"]["llm"])
    assert run.data.params["ingest.datasets.minichange.root"] == "data/01_raw/minichange"
    assert not [name for name in run.data.params if name.startswith(("compute", "models.no_module", "register"))]
    points = [(point.step, point.value) for point in client.get_metric_history(run.info.run_id, "train/loss")]
    assert points == [(1, 1.0), (2, 0.5), (3, pytest.approx(1 / 3))]
    assert {"train/epoch", "train/lr_llm", "train/grad_norm", "train/val_loss"} <= set(run.data.metrics)
    scores = {"CIDEr": 1.24, "intervals/CIDEr/low": 0.5, "by_type/color/CIDEr": 2.0, "SPICE": None}
    assert {name: run.data.metrics.get(f"{toy.TOTAL}/{name}") for name in scores} == scores
    logged = [artifact.path for artifact in client.list_artifacts(run.info.run_id)]
    assert sorted(logged) == ["images", "report.html", "scores.parquet"]
    capsys.readouterr()
    assert main(["models"]) == 0
    head, row, *_ = capsys.readouterr().out.splitlines()
    assert head.split()[:4] == ["version", "aliases", "registered", "CIDEr"]
    (listed,) = versions.list_models(load_params().register_, toy.TOTAL, ["CIDEr"])
    commit = toy.run(open_registry.root, "git", "rev-parse", "HEAD").strip()
    number, alias, _, _, cider, *_ = row.split()
    assert number == "1"
    assert alias == "challenger"
    assert cider == "124.0"
    assert f"  {commit[:8]}  train " in row
    assert listed["version"] == 1
    assert listed["aliases"] == ["challenger"]
    assert listed["scores"] == {"CIDEr": 1.24}
    assert listed["checkpoint"] == open_registry.tags()["dvc.checkpoint"]
    assert listed["commit"] == commit
    assert listed["dirty"] is False


@pytest.mark.fault("09", "19")
def test_a_silent_server_and_differences_from_dvc_lock_are_refused(open_registry, capsys):
    uri = f"http://127.0.0.1:{free_port()}"
    original_params = Path("params.yaml").read_text()
    change(open_registry.root, "register", tracking_uri=uri)
    assert main(["register"]) == 75
    assert Message("registry.mlflow_not_answering", value=uri).in_text(capsys.readouterr().err)
    Path("params.yaml").write_text(original_params)
    Path("data/07_report/metrics.json").write_text("something else")
    assert main(["register"]) == 3
    metrics = Path("data/07_report/metrics.json")
    assert Message("dvc.differs_from_lock", path=metrics).in_text(capsys.readouterr().err)
    assert open_registry.client.search_model_versions("name = 'm3diff'") == []


@pytest.mark.slow(20)
def test_the_challenger_is_the_version_of_the_checkpoint_that_is_there(open_registry):
    first_registration = open_registry.register()
    assert str(first_registration) == f"models:/m3diff/1 registered (MLflow run {first_registration.run_id})"
    lock = Path("dvc.lock").read_text()
    open_registry.repro("train", seed=1)
    second_registration = open_registry.register()
    assert second_registration.outcome == "registered"
    assert second_registration.version == 2
    assert open_registry.challenger() == 2
    assert second_registration.run_id != first_registration.run_id
    assert open_registry.logged == [64, 64]
    Path("dvc.lock").write_text(lock)
    change(open_registry.root, "train", seed=7407)
    toy.run(open_registry.root, "dvc", "checkout", "-q", "--force")
    toy.run(open_registry.root, "dvc", "repro", "-q")
    third_registration = open_registry.register()
    assert third_registration.version == 1
    assert third_registration.run_id == first_registration.run_id
    assert open_registry.challenger() == 1
    assert len(open_registry.runs()) == 2


def test_run_and_version_have_all_tags_of_the_lineage_which_a_new_evaluation_changes(open_registry, monkeypatch):
    with monkeypatch.context() as flow:
        flow.setenv("M3DIFF_FLOW_RUN", "the first")
        tags = open_registry.tags()
        done = open_registry.register()
    (run,) = open_registry.runs()
    described = open_registry.client.get_model_version("m3diff", "1").description
    assert described.startswith(f"CIDEr 124.0 on {toy.TOTAL}.")
    assert open_registry.client.get_model_version("m3diff", "1").tags == tags
    assert tags.items() <= run.data.tags.items()
    assert run.info.run_name == f"train {tags['dvc.checkpoint'][:8]}"
    assert done.outcome == "registered"
    assert done.run_id == run.info.run_id
    assert run.info.status == "FINISHED"
    (data,) = run.inputs.dataset_inputs
    dataset = data.dataset
    assert dataset.name == "04_mixture"
    assert dataset.digest == tags["dvc.data"]
    assert dataset.source_type == "dvc"
    assert json.loads(dataset.source) == {"path": "data/04_mixture/train", "md5": tags["dvc.data"]}

    open_registry.client.set_model_version_tag("m3diff", "1", "dvc.raw.gone", "a dataset that left")
    open_registry.client.set_tag(done.run_id, "dvc.raw.gone", "a dataset that left")
    open_registry.client.set_model_version_tag("m3diff", "1", "note", "a person's, which stays")
    open_registry.repro("evaluate", gallery=76)
    assert open_registry.register().outcome == "updated"
    tags = open_registry.tags()
    (run,) = open_registry.runs()
    assert open_registry.client.get_model_version("m3diff", "1").tags == tags | {"note": "a person's, which stays"}
    assert tags.items() <= run.data.tags.items()
    assert not {"prefect.flow_run", "dvc.raw.gone"} & run.data.tags.keys()
    assert run.data.metrics[f"{toy.TOTAL}/CIDEr"] == 1.76
    assert run.data.metrics[f"x100/{toy.TOTAL}/CIDEr"] == 176.0
    described = open_registry.client.get_model_version("m3diff", "1").description
    assert described.startswith(f"CIDEr 176.0 on {toy.TOTAL}.")
    (of_pairs,) = pq.read_table(open_registry.client.download_artifacts(done.run_id, "scores.parquet"))[
        "CIDEr"
    ].unique()
    assert of_pairs.as_py() == 1.76
    monkeypatch.setattr(MlflowClient, "set_registered_model_alias", lambda *_: pytest.fail("written again"))
    open_registry.client.set_model_version_tag("m3diff", "1", "git.commit", "another, which no result depends on")
    assert open_registry.register().outcome == "unchanged"


@pytest.mark.fault("T10")
@pytest.mark.parametrize("deletion", slow_except(["experiment", "run"], "experiment"))
def test_a_deleted_experiment_or_run_is_an_error_until_it_is_restored(open_registry, capsys, deletion):
    if deletion == "run":
        open_registry.client.delete_run(open_registry.register().run_id)
        open_registry.repro("evaluate", gallery=76)
    else:
        open_registry.client.delete_experiment(open_registry.experiment)
    capsys.readouterr()
    assert main(["register"]) == 3
    (error_line,) = capsys.readouterr().err.splitlines()
    address, command = re.search(r"MLFLOW_TRACKING_URI=(\S+) mlflow (\w+ restore \S+ \w+)", error_line).groups()
    open_registry.mlflow(*command.split(), at=address)
    assert main(["register"]) == 0
    assert f"models:/m3diff/1 {'updated' if deletion == 'run' else 'registered'}" in capsys.readouterr().out


@pytest.mark.fault("T10")
@pytest.mark.parametrize(
    ("deletion", "outcome", "version"),
    [("run", "registered", 2), ("version", "registered", 2), ("model", "registered", 1), ("scores", "updated", 1)],
)
def test_a_deleted_run_version_model_or_score_file_is_created_again(open_registry, deletion, outcome, version):
    run = open_registry.register().run_id
    if deletion == "run":
        open_registry.client.delete_run(run)
        open_registry.mlflow("gc", "--backend-store-uri", mlflow.get_tracking_uri(), at=mlflow.get_tracking_uri())
    elif deletion == "scores":
        Path(open_registry.client.get_run(run).info.artifact_uri.removeprefix("file://"), "scores.parquet").unlink()
    elif deletion == "version":
        open_registry.client.delete_model_version("m3diff", "1")
    else:
        open_registry.client.delete_registered_model("m3diff")
    registration = open_registry.register()
    assert registration.outcome == outcome
    assert registration.version == version
    assert open_registry.challenger() == version
    assert (registration.run_id == run) == (deletion != "run")
    assert open_registry.register().outcome == "unchanged"


def test_a_registration_that_mlflow_keeps_refusing_is_tried_three_times(open_registry, monkeypatch):
    tries = []

    def refuse(*arguments: Any) -> None:
        tries.append(arguments)
        raise MlflowException("another machine creates the same entry")

    monkeypatch.setattr(stage, "find_or_create", refuse)
    with pytest.raises(MlflowException):
        open_registry.register()
    assert len(tries) == 3


def test_no_further_try_is_made_once_mlflow_is_silent(open_registry, monkeypatch):
    tries = []

    def lose_connection(*arguments: Any) -> None:
        tries.append(arguments)
        mlflow.set_tracking_uri(f"http://127.0.0.1:{free_port()}")
        raise MlflowException("the connection was lost")

    monkeypatch.setattr(stage, "find_or_create", lose_connection)
    with raises(tracking.TrackingUnavailableError, "registry.mlflow_not_answering"):
        open_registry.register()
    assert len(tries) == 1


@pytest.fixture
def training_run(open_registry) -> Run:
    """Return the run that training created and to which evaluate logged scores."""
    params = load_params()
    model = params.paths.model
    description = RunDescription(
        tracking_uri=params.register_.tracking_uri,
        experiment="m3diff",
        model="m3diff",
        params={"train": {"seed": 5}},
        max_new_tokens=params.predict.max_new_tokens,
    )
    with log_curves_while_training(description, model, "key", model / "curves.csv"):
        pass
    log_evaluation(description, model, params.paths.report / "metrics.json")
    (run,) = open_registry.runs()
    return run


def test_the_run_that_the_training_opened_becomes_that_of_the_version(open_registry, training_run):
    assert open_registry.register().run_id == training_run.info.run_id
    (run,) = open_registry.runs()
    assert run.info.run_name == training_run.info.run_name
    assert len(open_registry.client.get_metric_history(run.info.run_id, "train/loss")) == 3
    assert run.data.params["train.seed"] == "5", "MLflow does not change a parameter"
    assert run.data.params["evaluate.gallery"], "the training did not log this parameter"


def test_the_run_of_a_version_is_not_used_for_another_version(open_registry, training_run):
    open_registry.register()
    other_run = stage.open_run(open_registry.client, open_registry.experiment, open_registry.tags() | {"dvc.code": "c"})
    assert other_run != training_run.info.run_id


HOUR_MS = 3600_000


@pytest.mark.parametrize(
    ("process", "age_ms", "is_resumed"),
    [
        ("{here}:1", 2 * HOUR_MS, False),
        ("{here}:{ended}", 0, True),
        ("another:7", 0, False),
        ("another:7", 2 * HOUR_MS, True),
    ],
    ids=["alive here", "ended here", "recent elsewhere", "old elsewhere"],
)
def test_a_run_of_another_process_is_resumed_once_it_is_abandoned(process, age_ms, is_resumed, open_registry):
    ended = subprocess.Popen(["true"])
    ended.wait()
    tags = open_registry.tags()
    other_tags = tags | {PROCESS_TAG: process.format(here=socket.gethostname(), ended=ended.pid)}
    started_ms = int(time.time() * 1000) - age_ms
    other_run = open_registry.client.create_run(
        open_registry.experiment, tags=other_tags, start_time=started_ms
    ).info.run_id
    own_run = stage.open_run(open_registry.client, open_registry.experiment, tags)
    assert (own_run == other_run) == is_resumed


@pytest.mark.fault("m1")
def test_the_loser_of_a_race_removes_its_version_model_and_run(open_registry, monkeypatch):
    """Another machine creates the same version after this one looked for it and before it creates its own."""
    register_model = mlflow.register_model
    other_versions = []

    def register_after_other(uri: str, name: str, tags: dict[str, str]) -> object:
        run = open_registry.client.create_run(open_registry.experiment, tags=tags).info.run_id
        model = open_registry.log_model(open_registry.client, run, load_params().register_, None, 64, Path())
        open_registry.client.set_terminated(run)
        other_versions.append(register_model(model, name, tags=tags))
        return register_model(uri, name, tags=tags)

    set_alias = MlflowClient.set_registered_model_alias

    def move_and_fail(*arguments: object) -> None:
        set_alias(*arguments)
        raise MlflowException("UNIQUE constraint failed: registered_model_aliases")

    monkeypatch.setattr(mlflow, "register_model", register_after_other)
    monkeypatch.setattr(MlflowClient, "set_registered_model_alias", move_and_fail)
    registration = open_registry.register()
    assert registration.outcome == "registered"
    assert registration.version == 1
    assert open_registry.challenger() == 1
    assert registration.run_id == other_versions[0].run_id
    assert [int(version.version) for version in open_registry.client.search_model_versions("name = 'm3diff'")] == [1]
    assert [run.info.run_id for run in open_registry.runs()] == [other_versions[0].run_id]
    models = open_registry.client.search_logged_models([open_registry.experiment])
    assert [model.model_uri for model in models] == [other_versions[0].source]
    tags = open_registry.tags()
    for _ in range(10):
        open_registry.client.create_model_version("m3diff", "file:///nowhere", registration.run_id, tags=tags)
    assert int(stage.find_registered_version(open_registry.client, "m3diff", tags).version) == 1, (
        "the oldest of several versions"
    )


@pytest.mark.fault("m1")
def test_the_run_of_the_oldest_version_stays_if_a_later_version_has_it_too(open_registry, monkeypatch):
    register_model = mlflow.register_model

    def register_twice(*arguments: Any, **options: Any) -> object:
        register_model(*arguments, **options)
        return register_model(*arguments, **options)

    monkeypatch.setattr(mlflow, "register_model", register_twice)
    registration = open_registry.register()
    assert registration.version == 1
    assert [run.info.run_id for run in open_registry.runs()] == [registration.run_id]
    assert len(open_registry.client.search_logged_models([open_registry.experiment])) == 1


def test_a_version_brings_every_file_that_its_model_can_import():
    components = toy.REPOSITORY / "components"
    models = [f"m3diff.models.{path.stem}" for path in (components / "models").glob("*.py") if path.stem != "__init__"]
    imported = digest_code(components / "stages" / "register" / "pyfunc.py", models)
    files = {name.removeprefix("components/") for name in imported}
    shared = {name for name in files if not name.startswith("models/")} - {"stages/register/pyfunc.py"}
    assert shared | {"records/messages.toml"} == set(stage.SHARED_CODE)


def test_a_version_contains_the_code_of_its_model_and_the_first_captioned_pair(trained, tmp_path):
    (trained / "components/models/__pycache__").mkdir(exist_ok=True)
    package = stage.copy_code(tmp_path)
    assert package == tmp_path / "m3diff"
    files = {str(path.relative_to(package)) for path in package.rglob("*") if path.is_file()}
    models = trained / "components" / "models"
    code = [path for path in models.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    assert files == {*stage.SHARED_CODE, *(str(path.relative_to(models.parent)) for path in code)}
    (row,) = stage.build_example(load_params().paths).to_dict("records")
    images = [base64.b64decode(row[side]) for side in ("before", "after")]
    root = trained / "data/01_raw/minichange"
    assert images == [(root / folder / "2.png").read_bytes() for folder in ("images", "sc_images")]


# Registrations at the same time, and a registration that is killed before each of its durable writes

REQUIRED_WRITES = (
    "INTO runs",
    "INTO logged_models",
    "INTO model_versions",
    "file report.html",
    "INTO registered_model",
)
SAMPLED_KILLS = pytest.mark.slow(45)
ALL_KILLS = pytest.mark.slow(240)


@pytest.fixture(scope="module")
def warm(trained_once: Path) -> Iterator[Forks]:
    forks = Forks(trained_once)
    yield forks
    forks.process.communicate()


@pytest.fixture(scope="module")
def undisturbed(warm: Forks, copy: Callable[[Path], Path], tmp_path_factory) -> tuple[dict, list[str]]:
    """Return the contents of the store after one registration, and the names of its durable writes."""
    root = copy(tmp_path_factory.mktemp("undisturbed"))
    assert warm.register(root) == [0]
    return read_store(root), (root / "services/writes.txt").read_text().splitlines()


def read_store(root: Path) -> dict[str, Any]:
    """Return the contents of a store without ids, times and processes, which differ between registrations."""
    client = store(root)
    (experiment,) = [entry for entry in client.search_experiments() if entry.name == "m3diff"]
    runs = client.search_runs([experiment.experiment_id])
    models = client.search_logged_models([experiment.experiment_id])
    versions = client.search_model_versions("name = 'm3diff'")
    assert {version.run_id for version in versions} == {run.info.run_id for run in runs}
    assert {version.source for version in versions} == {model.model_uri for model in models}
    folders = root / "services/mlflow/artifacts/m3diff"
    stored = {path.parent.name: path for path in folders.glob("models/*/artifacts")}
    assert set(stored) == {model.model_id for model in models}, "files of a removed model are left"
    (files,) = [sorted(str(file.relative_to(path)) for file in path.rglob("*")) for path in stored.values()]
    return {
        "runs": [(run.info.status, run.info.run_name, run.data.params, sorted(run.data.metrics)) for run in runs],
        "tags": [{tag: run.data.tags[tag] for tag in versions[0].tags} for run in runs],
        "inputs": [[data.dataset.digest for data in run.inputs.dataset_inputs] for run in runs],
        "artifacts": [sorted(entry.path for entry in client.list_artifacts(run.info.run_id)) for run in runs],
        "models": [(model.name, model.status == LoggedModelStatus.READY) for model in models],
        "files": files,
        "versions": [version.tags for version in versions],
        "described": [bool(version.description) for version in versions],
        "aliases": dict(client.get_registered_model("m3diff").aliases),
    }


@pytest.mark.fault("m1")
@pytest.mark.slow(30)
@pytest.mark.parametrize("lock", [True, False], ids=["one machine", "three machines"])
def test_three_registrations_at_once_make_one_version_of_one_run(warm, copy, tmp_path, undisturbed, lock):
    root = copy(tmp_path)
    assert warm.register(root, at_once=3, lock=lock) == [0, 0, 0]
    assert read_store(root) == undisturbed[0]


@pytest.mark.fault("m2")
@pytest.mark.parametrize(
    "sample", [pytest.param(5, marks=SAMPLED_KILLS), pytest.param(0, marks=ALL_KILLS)], ids=["some", "all"]
)
def test_killed_before_any_of_its_writes_it_leaves_nothing_pending(warm, undisturbed, copy, tmp_path, sample):
    """A kill after a write is the same as a kill before the next write."""
    expected, writes = undisturbed
    assert len(writes) > 20
    assert all(any(needed in name for name in writes) for needed in REQUIRED_WRITES), writes
    kills = list(range(1, len(writes)))
    differences = {}
    for write in sorted(random.Random(20261122).sample(kills, sample)) if sample else kills:
        root = copy(tmp_path / str(write))
        assert warm.register(root, kill_at=write) == [KILLED]
        assert warm.register(root) == [0]
        if (contents := read_store(root)) != expected:
            differences[f"{write}: before {writes[write]}"] = {
                key: contents[key] for key in contents if contents[key] != expected[key]
            }
        shutil.rmtree(root)
    assert differences == {}, differences


# The code of the registered model


class Recorder(Captioner):
    """Replaces the captioner. An answer is the colours of the images, and the questions of each batch are recorded."""

    def __init__(self, trained_on: TrainedOn | None = None, takes: Takes | None = None) -> None:
        self.batches: list[list[str]] = []
        self.family: Any = SimpleNamespace(takes=takes or Takes(), maps=None)
        self.trained_on = trained_on or TrainedOn("What changed?")
        self.question = "What changed?"
        self.processor: Any = SimpleNamespace(
            prepare=lambda images: Prepared({}, tuple(str(image.getpixel((0, 0))[0]) for image in images)),
            marks=lambda images: ("<image>",) * images,
            encode_prompt=lambda turns, marks: tuple("".join(text for turn in turns for text in turn)) + marks,
        )

    def answer(self, prepared: Any, dialogues: Any, saliency: bool = False) -> Any:
        self.batches.append([" ".join(text for turn in turns for text in turn if text) for turns in dialogues])
        return [">".join(images.marks) for images in prepared], None


def write_reds(folder: Path, count: int) -> list[str]:
    """Write images whose colour is their number, and return their paths."""
    paths = [str(folder / f"{red}.png") for red in range(count)]
    for red, path in enumerate(paths):
        Image.new("RGB", (2, 2), (red, 0, 0)).save(path)
    return paths


def pyfunc_with(captioner: Recorder) -> PyfuncCaptioner:
    model = PyfuncCaptioner()
    model.captioner = captioner
    return model


def test_rows_of_one_length_share_batches_and_the_captions_keep_the_rows_order(tmp_path):
    images = write_reds(tmp_path, 40)
    images[9] = base64.b64encode(Path(images[9]).read_bytes()).decode()
    model = pyfunc_with(Recorder())
    questions = [None, "", "Which colour?"]
    rows = [{"before": images[n], "after": images[-n], "question": questions[n % 3]} for n in range(40)]
    answers = model.predict(None, pd.DataFrame(rows, index=range(7, 47)))
    assert answers == [f"{n}>{-n % 40}" for n in range(40)]
    lengths = [(len(batch), set(batch)) for batch in model.captioner.batches]
    default_question = {"What changed?"}
    # both questions have 13 letters, so their rows share batches
    assert lengths[0] == (BATCH_ROWS, default_question | {"Which colour?"})
    assert [length for length, _ in lengths] == [BATCH_ROWS, BATCH_ROWS, 8]
    assert model.predict(None, pd.DataFrame([{"before": images[3], "after": images[5]}])) == ["3>5"]


def test_rows_of_different_samples_are_answered_apart(tmp_path):
    images = write_reds(tmp_path, 3)
    model = pyfunc_with(Recorder(TrainedOn(images=(0, 1, 2), turns=2)))
    turn = {"question": "Is it red?", "answer": "Yes."}
    rows = [
        {"images": images[:2], "question": "Why?", "history": []},
        # its prompt is as long as the prompts of the pairs
        {"images": images[2:], "question": "Where", "history": None},
        {"images": images[1:], "question": "Why?", "history": [turn]},
        {"images": [], "question": "Who?", "history": []},
        {"images": [images[2], images[0]], "question": "When", "history": []},
    ]
    assert model.predict(None, pd.DataFrame(rows)) == ["0>1", "2", "1>2", "", "2>0"]
    assert model.captioner.batches == [["Why?", "When"], ["Where"], ["Is it red? Yes. Why?"], ["Who?"]]


def test_rows_whose_images_take_much_memory_are_answered_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(generation, "MAX_PREPARED_BYTES", 2 * SET_BYTES)
    model = pyfunc_with(Recorder())
    sets = PreparedSets()
    model.captioner.processor.prepare = sets.prepare
    before, after = write_reds(tmp_path, 2)
    assert len(model.predict(None, pd.DataFrame([{"before": before, "after": after}] * 5))) == 5
    assert [len(batch) for batch in model.captioner.batches] == [2, 2, 1]
    assert sets.peak_bytes == 2 * SET_BYTES


TURN = {"question": "a", "answer": "b"}
REFUSED_ROWS = {
    "one image, trained on pairs": ({"images": ["a.png"]}, None, "models.images_not_trained"),
    "three images": ({"images": ["a.png"] * 3}, None, "models.images_not_taken"),
    "history, trained on one turn": (
        {"before": "a.png", "after": "b.png", "question": "c", "history": [TURN]},
        None,
        "models.history_not_trained",
    ),
    "a question, a family without questions": (
        {"before": "a.png", "after": "b.png", "question": "c"},
        Takes(images=(2,), questions=False, turns=False),
        "models.question_not_read",
    ),
    "only one side": ({"before": "a.png"}, None, "registry.one_side_of_a_pair"),
    "no image": ({"question": "a"}, None, "models.images_not_trained"),
}


@pytest.mark.parametrize(("row", "takes", "code"), REFUSED_ROWS.values(), ids=REFUSED_ROWS)
def test_a_row_that_the_model_cannot_answer_is_refused(row, takes, code):
    model = pyfunc_with(Recorder(takes=takes))
    with raises(ValueFault, code):
        model.predict(None, pd.DataFrame([row]))


@pytest.mark.parametrize(("side", "missing_side"), [("before", "after"), ("after", "before")])
def test_the_side_that_a_pair_lacks_is_named(side, missing_side):
    with raises(ValueFault, "registry.one_side_of_a_pair", key=missing_side):
        pyfunc_with(Recorder()).predict(None, pd.DataFrame([{side: "a.png"}]))


SIGNED_ROWS = {
    "a pair": [{"before": "a", "after": "b"}],
    "a pair with a question": [{"before": "a", "after": "b", "question": "q"}],
    "images": [{"images": ["a"], "question": "q"}, {"images": ["a", "b"], "question": "q"}],
    "a dialogue": [{"images": ["a", "b"], "question": "q", "history": [TURN]}],
}


@pytest.mark.parametrize("rows", SIGNED_ROWS.values(), ids=SIGNED_ROWS)
def test_the_signature_accepts_the_rows_of_every_kind_of_sample(rows):
    table = _enforce_schema(pd.DataFrame(rows), stage.MODEL_SIGNATURE.inputs)
    assert table.to_dict("records") == rows


@pytest.mark.parametrize("base", [{}, {"base": "over/here"}])
def test_the_checkpoint_is_loaded_with_predicts_limit_and_adapters_with_a_base(base, monkeypatch):
    monkeypatch.setattr(generation, "load_captioner", lambda *arguments, **options: (arguments, options))
    model = PyfuncCaptioner()
    cfg = {"max_new_tokens": 7} | base
    model.load_context(SimpleNamespace(artifacts={"checkpoint": "some/where"}, model_config=cfg))
    assert model.captioner == ((Path("some/where"), 7), {name: Path(folder) for name, folder in base.items()})


@pytest.mark.parametrize("keeps", ["merged", "adapters"])
def test_a_stored_model_has_predicts_limit_and_adapters_their_base(keeps, tmp_path, monkeypatch):
    adapters = tmp_path / "model/checkpoint/adapters"
    adapters.mkdir(parents=True)
    params = load_params(toy.REPOSITORY / "params.yaml")
    cfg = params.register_.model_copy(update={"keeps": keeps})
    paths = params.paths.model_copy(update={"model": tmp_path / "model"})
    stored: dict[str, Any] = {}

    def log_model(**options: Any) -> SimpleNamespace:
        stored.update(options)
        return SimpleNamespace(model_uri="models:/m-1")

    monkeypatch.setattr(mlflow, "start_run", lambda run_id: nullcontext())
    monkeypatch.setattr(mlflow.pyfunc, "log_model", log_model)
    monkeypatch.setattr(stage, "build_example", lambda paths: None)
    run = SimpleNamespace(info=SimpleNamespace(experiment_id="0"))
    client = SimpleNamespace(
        get_run=lambda run_id: run, search_logged_models=lambda *conditions: PagedList([], token=None)
    )
    assert stage.log_model(client, "run", cfg, paths, 7, tmp_path / "base") == "models:/m-1"
    base = {"base": str(tmp_path / "base")} if keeps == "adapters" else {}
    assert stored["model_config"] == {"max_new_tokens": 7} | base


def test_the_complete_model_that_a_run_has_is_used_and_an_incomplete_one_is_not(monkeypatch):
    models = [
        SimpleNamespace(model_uri="models:/m-1", status=LoggedModelStatus.PENDING),
        SimpleNamespace(model_uri="models:/m-2", status=LoggedModelStatus.READY),
    ]
    run = SimpleNamespace(info=SimpleNamespace(experiment_id="0"))
    conditions: list[tuple[Any, ...]] = []

    def search(*condition: Any) -> PagedList:
        conditions.append(condition)
        return PagedList(models, token=None)

    client: Any = SimpleNamespace(get_run=lambda run_id: run, search_logged_models=search)
    params = load_params(toy.REPOSITORY / "params.yaml")
    assert stage.log_model(client, "a", params.register_, params.paths, 7, Path("base")) == "models:/m-2"
    assert conditions == [(["0"], "source_run_id = 'a'")]


def test_a_loaded_version_prepares_its_process_before_it_loads_the_checkpoint(monkeypatch):
    steps: list[str] = []
    monkeypatch.setattr("m3diff.runtime.prepare", lambda: steps.append("prepare"))
    monkeypatch.setattr(generation, "load_captioner", lambda *arguments: steps.append("load"))
    context = SimpleNamespace(artifacts={"checkpoint": "some/where"}, model_config={"max_new_tokens": 7})
    PyfuncCaptioner().load_context(context)
    assert steps == ["prepare", "load"]


@pytest.mark.parametrize(
    ("images", "columns"), [(2, {"before": 0, "after": 1}), (1, {"images": [0]}), (0, {"images": []})], ids=str
)
def test_the_example_of_a_model_is_a_record_with_its_images_question_and_history(images, columns, tmp_path):
    reds = write_reds(tmp_path, images)
    encoded = [base64.b64encode(Path(path).read_bytes()).decode() for path in reds]
    turn = {"question": "Is it a room?", "answer": "yes"}
    record = {"images": [{"uri": path, "sha256": b"1"} for path in reds], "question": "How many?", "history": [turn]}
    (row,) = stage.build_example(write_test_set(tmp_path, **record)).to_dict("records")
    contents = {
        name: [encoded[number] for number in numbers] if isinstance(numbers, list) else encoded[numbers]
        for name, numbers in columns.items()
    }
    assert row == {**contents, "question": "How many?", "history": [turn]}


# A PNG of one pixel
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


@pytest.mark.parametrize("value", ["no/such.png", base64.b64encode(b"no image").decode(), "A" * 5000, f"#{PIXEL}"])
def test_a_value_that_is_neither_a_path_nor_a_base64_image_is_refused(value):
    assert open_image(PIXEL).size == (1, 1)
    with raises(ValueFault, "registry.neither_path_nor_base64", value=value[:60]):
        open_image(value)


# Work that earlier registrations left behind


def test_only_runs_that_no_version_and_no_other_process_uses_are_removed():
    def make_run(run_id: str, status: str) -> SimpleNamespace:
        info = SimpleNamespace(run_id=run_id, status=status, start_time=1000 * time.time())
        return SimpleNamespace(info=info, data=SimpleNamespace(tags={}))

    runs = [make_run("used", "FINISHED"), make_run("left behind", "FAILED"), make_run("being written", "RUNNING")]
    removed: list[str] = []
    client = SimpleNamespace(
        search_runs=lambda *arguments: PagedList(runs, None),
        search_logged_models=lambda *arguments: PagedList([], None),
        delete_run=removed.append,
    )
    identity = dict.fromkeys(lineage.IDENTITY_TAGS, "1")
    stage.remove_other_runs(client, "1", identity, SimpleNamespace(run_id="used"))
    assert removed == ["left behind"]


class LeftoverStore:
    """A store with runs and stored models of killed and of running registrations. It records what is removed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        host = socket.gethostname()
        ended = {PROCESS_TAG: f"{host}:{os.getpid()}"}  # work of this process is work of an earlier attempt
        running = {PROCESS_TAG: f"{host}:1"}
        self.models = [
            self.make_model("killed", LoggedModelStatus.PENDING, ended),
            self.make_model("complete", LoggedModelStatus.READY, ended),
            self.make_model("being written", LoggedModelStatus.PENDING, running),
        ]
        self.runs = [self.make_run("killed", ended), self.make_run("being written", running)]
        self.runs.append(self.make_run("a training, which has no such tag", {}))
        self.removed_models: list[str] = []
        self.ended_runs: list[tuple[str, str]] = []
        self.deleted_runs: list[str] = []
        monkeypatch.setattr(stage, "delete_model", lambda client, model: self.removed_models.append(model.name))

    @staticmethod
    def make_model(name: str, status: LoggedModelStatus, tags: dict[str, str]) -> SimpleNamespace:
        return SimpleNamespace(name=name, status=status, tags=tags, creation_timestamp=0)

    @staticmethod
    def make_run(run_id: str, tags: dict[str, str]) -> SimpleNamespace:
        info = SimpleNamespace(run_id=run_id, status="RUNNING", start_time=0)
        return SimpleNamespace(info=info, data=SimpleNamespace(tags=tags))

    def search_logged_models(self, experiments: list[str], condition: str) -> PagedList:
        return PagedList(self.models, None)

    def search_runs(self, experiments: list[str], condition: str, kind: int) -> PagedList:
        return PagedList(self.runs, None)

    def set_terminated(self, run_id: str, status: str) -> None:
        self.ended_runs.append((run_id, status))

    def delete_run(self, run_id: str) -> None:
        self.deleted_runs.append(run_id)


def test_incomplete_models_of_killed_registrations_are_removed_and_their_runs_ended(monkeypatch):
    store = LeftoverStore(monkeypatch)
    stage.remove_leftovers(store, "1", "m3diff")
    assert store.removed_models == ["killed"]
    assert store.ended_runs == [("killed", "KILLED")]


def test_a_run_that_a_version_does_not_use_is_removed_with_its_models(monkeypatch):
    store = LeftoverStore(monkeypatch)
    del store.runs[1:], store.models[1:]
    identity = dict.fromkeys(lineage.IDENTITY_TAGS, "1")
    stage.remove_other_runs(store, "1", identity, SimpleNamespace(run_id="used"))
    assert store.removed_models == ["killed"]
    assert store.deleted_runs == ["killed"]


def test_the_results_of_a_version_whose_run_was_deleted_are_not_logged(monkeypatch):
    monkeypatch.setattr(stage, "log_results", lambda *arguments: pytest.fail("logged"))
    run = SimpleNamespace(info=SimpleNamespace(lifecycle_stage="deleted"))
    client: Any = SimpleNamespace(get_run=lambda run_id: run)
    version: Any = SimpleNamespace(name="m3diff", version="4", run_id="a1", tags={})
    with raises(DataError, "registry.deleted_run", model="m3diff", version=4) as error:
        stage.update_results(client, load_params(toy.REPOSITORY / "params.yaml").paths, version, {})
    assert error.value.fields["command"].endswith("mlflow runs restore --run-id a1")


def test_a_model_requires_the_installed_versions_without_local_labels(monkeypatch):
    installed_versions = {"m3diff": "0.1.0", "torch": "2.13.0+cpu"}
    monkeypatch.setattr(stage, "REQUIREMENTS", tuple(installed_versions))
    monkeypatch.setattr(stage, "installed_version", installed_versions.get)
    assert stage.pin_requirements() == ["m3diff==0.1.0", "torch==2.13.0"]
