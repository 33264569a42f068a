"""Registering the toy's training: what MLflow holds afterwards, and what is refused."""

import base64
import hashlib
import json
import random
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlflow
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from click.testing import CliRunner
from mlflow.cli import cli
from mlflow.entities import LoggedModelStatus, Run
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient
from PIL import Image

from m3diff.__main__ import main
from m3diff.models import generation
from m3diff.provenance.code import digest_code
from m3diff.provenance.dvc import Lock, dvc_hash
from m3diff.records.errors import DataError, Fault, ValueFault
from m3diff.registry import lineage, tracking, versions
from m3diff.registry.lineage import captioned_records, find_adapters, hash_test_set
from m3diff.registry.tracking import PROCESS, RunDescription, log_curves_while_training, log_evaluation
from m3diff.settings.load import load_params
from m3diff.stages.register import stage
from m3diff.stages.register.params import Register
from m3diff.stages.register.pyfunc import BATCH_PAIRS, PyfuncCaptioner, read
from tests import toy
from tests.errors import Message, raises
from tests.servers import free_port
from tests.stages.register.forks import KILLED, Forks
from tests.toy import change, store


class Opened:
    """A registry over the project's store; `register` stores no files."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        self.client = store(root)
        self.logged = []
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
        return read_lineage()

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
def test_one_training_leaves_one_run_and_one_version_with_all_its_results(opened, capsys):
    opened.register()
    client = opened.client
    (run,) = opened.runs()
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
    commit = toy.run(opened.root, "git", "rev-parse", "HEAD").strip()
    number, alias, _, _, cider, *_ = row.split()
    assert number == "1"
    assert alias == "challenger"
    assert cider == "124.0"
    assert f"  {commit[:8]}  train " in row
    assert listed["version"] == 1
    assert listed["aliases"] == ["challenger"]
    assert listed["scores"] == {"CIDEr": 1.24}
    assert listed["checkpoint"] == opened.tags()["dvc.checkpoint"]
    assert listed["commit"] == commit
    assert listed["dirty"] is False


@pytest.mark.fault("09", "19")
def test_a_silent_server_and_differences_from_dvc_lock_are_refused(opened, capsys):
    uri = f"http://127.0.0.1:{free_port()}"
    kept = Path("params.yaml").read_text()
    change(opened.root, "register", tracking_uri=uri)
    assert main(["register"]) == 75
    assert Message("registry.mlflow_not_answering", value=uri).in_text(capsys.readouterr().err)
    Path("params.yaml").write_text(kept)
    Path("data/07_report/metrics.json").write_text("something else")
    assert main(["register"]) == 3
    metrics = Path("data/07_report/metrics.json")
    assert Message("dvc.differs_from_lock", path=metrics).in_text(capsys.readouterr().err)
    assert opened.client.search_model_versions("name = 'm3diff'") == []


@pytest.mark.slow(20)
def test_the_challenger_is_the_version_of_the_checkpoint_that_is_there(opened):
    first = opened.register()
    assert str(first) == f"models:/m3diff/1 registered (MLflow run {first.run_id})"
    lock = Path("dvc.lock").read_text()
    opened.repro("train", seed=1)
    second = opened.register()
    assert second.outcome == "registered"
    assert second.version == 2
    assert opened.challenger() == 2
    assert second.run_id != first.run_id
    assert opened.logged == [64, 64]
    Path("dvc.lock").write_text(lock)
    change(opened.root, "train", seed=7407)
    toy.run(opened.root, "dvc", "checkout", "-q", "--force")
    toy.run(opened.root, "dvc", "repro", "-q")
    again = opened.register()
    assert again.version == 1
    assert again.run_id == first.run_id
    assert opened.challenger() == 1
    assert len(opened.runs()) == 2


def test_run_and_version_have_all_tags_of_the_lineage_which_a_new_evaluation_changes(opened, monkeypatch):
    with monkeypatch.context() as flow:
        flow.setenv("M3DIFF_FLOW_RUN", "the first")
        tags = opened.tags()
        done = opened.register()
    (run,) = opened.runs()
    described = opened.client.get_model_version("m3diff", "1").description
    assert described.startswith(f"CIDEr 124.0 on {toy.TOTAL}.")
    assert opened.client.get_model_version("m3diff", "1").tags == tags
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

    opened.client.set_model_version_tag("m3diff", "1", "dvc.raw.gone", "a dataset that left")
    opened.client.set_tag(done.run_id, "dvc.raw.gone", "a dataset that left")
    opened.client.set_model_version_tag("m3diff", "1", "note", "a person's, which stays")
    opened.repro("evaluate", gallery=76)
    assert opened.register().outcome == "updated"
    tags = opened.tags()
    (run,) = opened.runs()
    assert opened.client.get_model_version("m3diff", "1").tags == tags | {"note": "a person's, which stays"}
    assert tags.items() <= run.data.tags.items()
    assert not {"prefect.flow_run", "dvc.raw.gone"} & run.data.tags.keys()
    assert run.data.metrics[f"{toy.TOTAL}/CIDEr"] == 1.76
    assert run.data.metrics[f"x100/{toy.TOTAL}/CIDEr"] == 176.0
    described = opened.client.get_model_version("m3diff", "1").description
    assert described.startswith(f"CIDEr 176.0 on {toy.TOTAL}.")
    (of_pairs,) = pq.read_table(opened.client.download_artifacts(done.run_id, "scores.parquet"))["CIDEr"].unique()
    assert of_pairs.as_py() == 1.76
    monkeypatch.setattr(MlflowClient, "set_registered_model_alias", lambda *_: pytest.fail("written again"))
    opened.client.set_model_version_tag("m3diff", "1", "git.commit", "another, which no result depends on")
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
    address, command = re.search(r"MLFLOW_TRACKING_URI=(\S+) mlflow (\w+ restore \S+ \w+)", said).groups()
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
    elif what == "scores":
        Path(opened.client.get_run(run).info.artifact_uri.removeprefix("file://"), "scores.parquet").unlink()
    elif what == "version":
        opened.client.delete_model_version("m3diff", "1")
    else:
        opened.client.delete_registered_model("m3diff")
    done = opened.register()
    assert done.outcome == outcome
    assert done.version == version
    assert opened.challenger() == version
    assert (done.run_id == run) == (what != "run")
    assert opened.register().outcome == "unchanged"


@pytest.fixture
def training_run(opened) -> Run:
    """The run that the training opened and evaluate added scores to."""
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
    (run,) = opened.runs()
    return run


def test_the_run_that_the_training_opened_becomes_that_of_the_version(opened, training_run):
    assert opened.register().run_id == training_run.info.run_id
    (run,) = opened.runs()
    assert run.info.run_name == training_run.info.run_name
    assert len(opened.client.get_metric_history(run.info.run_id, "train/loss")) == 3
    assert run.data.params["train.seed"] == "5", "MLflow does not change a parameter"
    assert run.data.params["evaluate.gallery"], "which the training did not log"


def test_the_run_of_a_version_is_no_other_version_s(opened, training_run):
    opened.register()
    other_run = stage.open_run(opened.client, opened.experiment, opened.tags() | {"dvc.code": "c"})
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
def test_a_run_of_another_process_is_resumed_once_it_is_abandoned(process, age_ms, is_resumed, opened):
    ended = subprocess.Popen(["true"])
    ended.wait()
    tags = opened.tags()
    other_tags = tags | {PROCESS: process.format(here=socket.gethostname(), ended=ended.pid)}
    started_ms = int(time.time() * 1000) - age_ms
    other_run = opened.client.create_run(opened.experiment, tags=other_tags, start_time=started_ms).info.run_id
    own_run = stage.open_run(opened.client, opened.experiment, tags)
    assert (own_run == other_run) == is_resumed


@pytest.mark.fault("m1")
def test_who_loses_the_race_for_a_version_takes_back_its_version_model_and_run(opened, monkeypatch):
    """Another machine makes the same version after this one looked for it, and before this one makes its own."""
    really = mlflow.register_model
    theirs = []

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
    assert done.outcome == "registered"
    assert done.version == 1
    assert opened.challenger() == 1
    assert done.run_id == theirs[0].run_id
    assert [int(version.version) for version in opened.client.search_model_versions("name = 'm3diff'")] == [1]
    assert [run.info.run_id for run in opened.runs()] == [theirs[0].run_id]
    models = opened.client.search_logged_models([opened.experiment])
    assert [model.model_uri for model in models] == [theirs[0].source]
    tags = opened.tags()
    for _ in range(10):
        opened.client.create_model_version("m3diff", "file:///nowhere", done.run_id, tags=tags)
    assert int(stage.find_version(opened.client, "m3diff", tags).version) == 1, "of several the first"


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
    (row,) = stage.example(load_params().paths).to_dict("records")
    images = [base64.b64decode(row[side]) for side in ("before", "after")]
    root = trained / "data/01_raw/minichange"
    assert images == [(root / folder / "2.png").read_bytes() for folder in ("images", "sc_images")]


# Registrations at the same moment, and one that is killed before each of its durable writes, N of N

NEEDED = ("INTO runs", "INTO logged_models", "INTO model_versions", "file report.html", "INTO registered_model")
SOME = pytest.mark.slow(45)
ALL = pytest.mark.slow(240)


@pytest.fixture(scope="module")
def warm(trained_once: Path) -> Iterator[Forks]:
    forks = Forks(trained_once)
    yield forks
    forks.process.communicate()


@pytest.fixture(scope="module")
def undisturbed(warm: Forks, copy: Callable[[Path], Path], tmp_path_factory) -> tuple[dict, list[str]]:
    """What one registration leaves, and its durable writes."""
    root = copy(tmp_path_factory.mktemp("undisturbed"))
    assert warm.register(root) == [0]
    return left(root), (root / "services/writes.txt").read_text().splitlines()


def left(root: Path) -> dict[str, Any]:
    """What a store holds, without what differs from one registration to the next: ids, times, the process."""
    client = store(root)
    (experiment,) = [found for found in client.search_experiments() if found.name == "m3diff"]
    runs = client.search_runs([experiment.experiment_id])
    models = client.search_logged_models([experiment.experiment_id])
    versions = client.search_model_versions("name = 'm3diff'")
    assert {version.run_id for version in versions} == {run.info.run_id for run in runs}
    assert {version.source for version in versions} == {model.model_uri for model in models}
    folders = root / "services/mlflow/artifacts/m3diff"
    stored = {path.parent.name: path for path in folders.glob("models/*/artifacts")}
    assert set(stored) == {model.model_id for model in models}, "no files of a model that is gone"
    (files,) = [sorted(str(file.relative_to(path)) for file in path.rglob("*")) for path in stored.values()]
    return {
        "runs": [(run.info.status, run.info.run_name, run.data.params, sorted(run.data.metrics)) for run in runs],
        "tags": [{tag: run.data.tags[tag] for tag in versions[0].tags} for run in runs],
        "inputs": [[data.dataset.digest for data in run.inputs.dataset_inputs] for run in runs],
        "artifacts": [sorted(found.path for found in client.list_artifacts(run.info.run_id)) for run in runs],
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
    assert left(root) == undisturbed[0]


@pytest.mark.fault("m2")
@pytest.mark.parametrize("sample", [pytest.param(5, marks=SOME), pytest.param(0, marks=ALL)], ids=["some", "all"])
def test_killed_before_any_of_its_writes_it_leaves_nothing_pending(warm, undisturbed, copy, tmp_path, sample):
    """Killed after a write is killed before the next one: nothing durable is between the two."""
    expected, writes = undisturbed
    assert len(writes) > 20
    assert all(any(needed in name for name in writes) for needed in NEEDED), writes
    kills = list(range(1, len(writes)))
    wrong = {}
    for at in sorted(random.Random(20261122).sample(kills, sample)) if sample else kills:
        root = copy(tmp_path / str(at))
        assert warm.register(root, kill_at=at) == [KILLED]
        assert warm.register(root) == [0]
        if (found := left(root)) != expected:
            wrong[f"{at}: before {writes[at]}"] = {key: found[key] for key in found if found[key] != expected[key]}
        shutil.rmtree(root)
    assert wrong == {}, wrong


# The registered model's own code


class Recorder:
    """A captioner that says the colours it sees and keeps what it was asked."""

    def __init__(self) -> None:
        self.batches: list[tuple[int, dict[str, str]]] = []

    def caption(self, pairs, **asked: str) -> list[str]:
        self.batches.append((len(pairs), asked))
        return [f"{before.getpixel((0, 0))[0]}>{after.getpixel((0, 0))[0]}" for before, after in pairs]


def test_rows_of_one_question_share_batches_and_the_captions_keep_the_rows_order(tmp_path):
    images = [str(tmp_path / f"{red}.png") for red in range(40)]
    for red, image in enumerate(images):
        Image.new("RGB", (2, 2), (red, 0, 0)).save(image)
    images[9] = base64.b64encode(Path(images[9]).read_bytes()).decode()
    model = PyfuncCaptioner()
    asked = {"question": "Which colour?"}
    model.captioner = Recorder()
    questions = [None, "", "Which colour?"]
    rows = [{"before": images[n], "after": images[-n], "question": questions[n % 3]} for n in range(40)]
    assert model.predict(None, pd.DataFrame(rows, index=range(7, 47))) == [f"{n}>{-n % 40}" for n in range(40)]
    assert model.captioner.batches == [(BATCH_PAIRS, {}), (11, {}), (13, asked)]
    assert model.predict(None, pd.DataFrame([{"before": images[3], "after": images[5]}])) == ["3>5"]


@pytest.mark.parametrize("base", [{}, {"base": "over/here"}])
def test_the_checkpoint_is_loaded_with_predicts_limit_and_adapters_with_a_base(base, monkeypatch):
    monkeypatch.setattr(generation, "load_captioner", lambda *arguments, **more: (arguments, more))
    model = PyfuncCaptioner()
    cfg = {"max_new_tokens": 7} | base
    model.load_context(SimpleNamespace(artifacts={"checkpoint": "some/where"}, model_config=cfg))
    assert model.captioner == ((Path("some/where"), 7), {name: Path(folder) for name, folder in base.items()})


# A PNG of one pixel
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


@pytest.mark.parametrize("value", ["no/such.png", base64.b64encode(b"no image").decode(), "A" * 5000, f"#{PIXEL}"])
def test_what_is_neither_a_path_nor_an_image_in_base64_is_named(value):
    assert read(PIXEL).size == (1, 1)
    with raises(ValueFault, "registry.neither_path_nor_base64", value=value[:60]):
        read(value)


RAW = ("minichange", "minichange_free", "minichange_shifted")


# The lineage of a version: every hash by hand, and what is refused because the working tree is something else


@pytest.fixture(scope="module")
def project_once(trained_once: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(trained_once, tmp_path_factory.mktemp("lineage") / "toy", symlinks=True))


@pytest.fixture
def project(project_once: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Tests leave it as it is."""
    monkeypatch.chdir(project_once)
    return project_once


def read_lineage() -> dict[str, str]:
    return lineage.read_lineage(load_params(), Lock())


def changed(path: str, text: str) -> dict[str, str] | Fault:
    """The lineage while a file holds this, or why there is none; the file is put back, or taken away again."""
    file = Path(path)
    before = file.read_bytes() if file.is_file() else None
    new = not file.parent.is_dir()
    file.parent.mkdir(parents=True, exist_ok=True)
    file.unlink(missing_ok=True)  # it may be a link into DVC's cache
    file.write_text(text)
    try:
        return read_lineage()
    except DataError as error:
        return error.fault
    finally:
        file.unlink()
        if before is not None:
            file.write_bytes(before)
        if new:
            shutil.rmtree(file.parent)


def sha256(text: bytes | str) -> str:
    return hashlib.sha256(text if isinstance(text, bytes) else text.encode()).hexdigest()


@pytest.mark.slow(35)
def test_every_part_of_the_lineage_is_the_hash_of_what_it_names(project):
    stages = yaml.safe_load(Path("dvc.lock").read_text())["stages"]
    recorded = {entry["path"]: entry["md5"] for stage in stages.values() for entry in stage["outs"]}
    records = pq.read_table("data/03_clean/records.parquet").to_pylist()
    tests = [row for row in records if row["split"] == "test"]
    both = [[row[f"{side}_sha256"].hex() for side in ("before", "after")] for row in tests]
    seen = [json.dumps([row["id"], row["references"], *hashes]) for row, hashes in zip(tests, both, strict=True)]
    content = sha256(Path("data/00_base/config.json").read_bytes())
    word = sha256(Path("data/05_model/checkpoint/word.txt").read_bytes())
    assert read_lineage() == {
        "dvc.checkpoint": recorded["data/05_model/checkpoint"],
        "dvc.code": dvc_hash(Path("code/predict.json")),
        "predict.max_new_tokens": "64",
        "dvc.data": recorded["data/04_mixture/train"],
        "dvc.val_data": recorded["data/04_mixture/val"],
        "dvc.metrics": recorded["data/07_report/metrics.json"],
        "dvc.lock.sha256": sha256(Path("dvc.lock").read_bytes()),
        "test_set.sha256": sha256("".join(seen)),
        "dvc.base": recorded["data/00_base"],
        "base.sha256": sha256(f"config.json\0{content}\n"),
        "git.commit": toy.run(project, "git", "rev-parse", "HEAD").strip(),
        "git.dirty": "false",
        "weights.sha256": sha256(json.dumps({"model.safetensors": word})),
    } | {f"dvc.raw.{name}": recorded[f"data/01_raw/{name}"] for name in RAW}


def test_a_flow_run_and_changed_code_are_named_and_what_dvc_writes_is_not(project, monkeypatch):
    before = read_lineage()
    with monkeypatch.context() as flow:
        flow.setenv("M3DIFF_FLOW_RUN", "a1b2")
        assert read_lineage() == before | {"prefect.flow_run": "a1b2"}
    for path in ("data/note", "data/01_raw/minichange/images/new.txt"):  # raw data is named as it was ingested
        assert changed(path, "new") == before
    for path in ("toy.py", "components/settings/tree.py", "new.py", "data/01_raw/real.dvc", "data/new/folder/real.dvc"):
        text = Path(path).read_text() if Path(path).is_file() else ""
        assert changed(path, f"{text}\n# a comment\n") == before | {"git.dirty": "true"}, path


def test_what_differs_from_dvc_lock_or_was_never_there_has_no_lineage(project):
    for path in (
        *("data/00_base/config.json", "data/04_mixture/train/00000.parquet", "data/04_mixture/val/00000.parquet"),
        *("data/05_model/checkpoint/word.txt", "data/05_model/curves.csv", "data/06_predictions/predictions.json"),
        *("data/07_report/metrics.json", "data/07_report/scores.parquet", "data/07_report/report.html"),
    ):
        refused = changed(path, "something else")
        assert refused.code == "dvc.differs_from_lock"
        assert path.startswith(str(refused.fields["path"]))
    generation = "components/models/generation.py"
    assert isinstance(changed(generation, Path(generation).read_text() + "\n# a comment\n"), dict)
    refused = changed(generation, "something = 1\n")
    assert refused == Fault("registry.code_changed", path=generation)
    params = yaml.safe_load(Path("params.yaml").read_text())
    params["ingest"]["datasets"]["real"] = {"reader": "pairs", "root": "data/01_raw/real"}
    refused = changed("params.yaml", yaml.safe_dump(params, sort_keys=False))
    assert refused == Fault("dvc.not_recorded", path=Path("data/01_raw/real"), entry="ingest@real deps")
    with raises(DataError, "dvc.not_in_lock", path=Path("nowhere")):
        Lock().verified_hash(Path("nowhere"))


def test_adapters_are_find_adapters_where_asked(tmp_path):
    plain = {"tracking_uri": "sqlite:///mlflow.db", "experiment": "m3diff", "model_name": "m3diff"}
    both = [Register(**plain, keeps=keeps) for keeps in ("adapters", "merged")]
    assert [find_adapters(cfg, tmp_path) for cfg in both] == [None, None]
    (tmp_path / "adapters").mkdir()
    assert [find_adapters(cfg, tmp_path) for cfg in both] == [tmp_path / "adapters", None]


def write_test_set(root: Path, captioned: tuple[str, ...] = ("b", "a"), **changed: Any) -> Any:
    """Three clean records, of which some were captioned; `changed` is written over record a."""
    row = {"before": "1.png", "after": "2.png", "before_sha256": b"1", "after_sha256": b"2", "references": ["x", "y"]}
    rows = [{"id": name, **row} for name in "cba"]
    rows[2] |= changed
    pq.write_table(pa.Table.from_pylist(rows), root / "records.parquet")
    (root / "predictions.json").write_text(json.dumps([{"image_id": name, "caption": ""} for name in captioned]))
    return SimpleNamespace(clean=root, predictions=root)


@pytest.mark.parametrize(
    ("changed", "same"),
    [
        ({"captioned": ("a",)}, False),
        ({"captioned": ("a", "c")}, False),
        ({"references": ["y", "x"]}, False),
        ({"before_sha256": b"3"}, False),
        ({"after_sha256": b"3"}, False),
        ({"captioned": ("a", "b"), "before": "elsewhere/1.png"}, True),
    ],
)
def test_a_test_set_depends_on_pairs_references_and_images_not_on_paths_or_order(tmp_path, changed, same):
    paths = write_test_set(tmp_path)
    assert [record["id"] for record in captioned_records(paths)] == ["a", "b"]
    first = hash_test_set(paths)
    assert (hash_test_set(write_test_set(tmp_path, **changed)) == first) == same


def test_the_hash_of_a_folder_is_dvcs_and_compiled_files_are_no_part_of_it(project):
    records = Path("data/02_records/minichange")
    predictions = Path("data/06_predictions/predictions.json")
    (records / "x.pyc").touch()
    assert Lock().hashes(records) == {"ingest@minichange outs": dvc_hash(records)}
    (records / "x.pyc").unlink()
    md5 = hashlib.md5(predictions.read_bytes()).hexdigest()
    assert Lock().hashes(predictions) == {"predict outs": md5, "evaluate deps": md5}


def test_parameters_and_hashes_are_those_of_the_last_run_in_dvc_lock(tmp_path):
    watched = tmp_path / "code" / "watched.py"
    free = tmp_path / "code" / "free.py"
    watched.parent.mkdir()
    for file in (watched, free):
        file.write_text(file.name)
    here = {"ingest.datasets.here": {"root": "h"}}
    gone = {"ingest.datasets.gone": {"root": "g"}}
    trained = {"train": {"seed": 1}, "models.m": {"rank": 2}}
    ran = {"ingest@here": here, "ingest@gone": gone, "train": trained}
    stages: dict[str, Any] = {stage: {"params": {"params.yaml": sections}} for stage, sections in ran.items()}
    stages["predict"] = {"deps": [{"path": str(watched), "md5": hashlib.md5(b"watched.py").hexdigest()}]}
    (tmp_path / "dvc.lock").write_text(yaml.safe_dump({"stages": stages}))
    lock = Lock(tmp_path / "dvc.lock")
    assert lock.params(["here"]) == here | trained
    before = lock.verified_hash(tmp_path / "code")
    free.write_text("changed")
    assert lock.verified_hash(tmp_path / "code") == dvc_hash(tmp_path / "code") != before
    watched.write_text("changed")
    with raises(DataError, "dvc.differs_from_lock", path=watched, entry="predict deps"):
        lock.verified_hash(tmp_path / "code")
