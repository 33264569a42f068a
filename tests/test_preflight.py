"""Test the checks before a run: each fault says what the machine has and what the run needs."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlflow
import psutil
import pytest
from click.testing import CliRunner
from mlflow.cli import cli
from mlflow.tracking import MlflowClient

from m3diff.commands import preflight as preflight_module
from m3diff.commands.preflight import (
    NotReadyError,
    faults_of_model,
    notes_on_questions,
    preflight,
    preflight_data,
    samples_by_split,
    size_of,
)
from m3diff.datasets import DATASETS
from m3diff.datasets.spec import Row
from m3diff.models import FAMILIES
from m3diff.models.contract import Takes
from m3diff.records.errors import DataError, Fault
from m3diff.registry.decisions import Entry, append_decision
from m3diff.registry.moves import add_identities
from m3diff.registry.promote import rollback
from m3diff.scoring.metrics import METRICS
from m3diff.scoring.metrics.spice import JARS, NASHORN
from m3diff.settings.load import load_params
from m3diff.settings.section import ParamsError
from m3diff.settings.tree import Params
from m3diff.stages.ingest.params import HOW_TO_TEST, DatasetEntry
from tests.errors import raises
from tests.layouts import write_clevr
from tests.toy import REPOSITORY, store

GIB = 2**30


@pytest.fixture
def params(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Params:
    """Return the embedded run in a new folder, with a base of one GiB, on a machine that has everything it needs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(preflight_module, "size_of", lambda folder: GIB if folder == Path("data/00_base") else 0)
    set_free_gib(monkeypatch, disk=100, memory=100)
    return load_params(REPOSITORY / "params.yaml")


@pytest.fixture(autouse=True)
def java(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    program = tmp_path_factory.mktemp("bin") / "java"
    program.write_text("#!/bin/sh\necho 'openjdk version \"17.0.1\"' >&2\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    return program


def set_free_gib(monkeypatch: pytest.MonkeyPatch, disk: float = 100, memory: float = 100) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=int(disk * GIB)))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=int(memory * GIB)))


def with_compute(params: Params, **compute: Any) -> Params:
    return params.model_copy(update={"compute": params.compute.model_copy(update=compute)})


def commands(monkeypatch: pytest.MonkeyPatch, **answers: Callable[[], Any]) -> list[list[str]]:
    """Let only Java and these programs be installed. Return the commands that are run, as a list that grows.

    Args:
        answers: what a program does, by its name with underscores.
    """
    run_commands: list[list[str]] = []
    run_program = subprocess.run

    def run(command: list[str], **options: Any) -> Any:
        run_commands.append(command)
        if Path(command[0]).name == "java" or command[0] == sys.executable:  # Python starts java
            return run_program(command, **options)
        program = command[0].replace("-", "_")
        if program not in answers:
            raise FileNotFoundError(command[0])
        return answers[program]()

    monkeypatch.setattr(subprocess, "run", run)
    return run_commands


def faults_of(params: Params) -> list[Any]:
    """Return the faults that preflight finds."""
    with raises(NotReadyError, "preflight.cannot_start") as refusal:
        preflight(params)
    faults: list[Any] = refusal.value.fields["faults"]
    assert all(str(fault) in str(refusal.value) for fault in faults)
    return faults


def test_a_machine_that_has_everything_is_accepted(params, monkeypatch, java):
    run_commands = commands(monkeypatch)
    preflight(params)
    assert run_commands == [[str(java), "-version"]]


def test_the_room_is_that_of_the_nearest_folder_that_exists(params, monkeypatch, tmp_path):
    folders: list[Path] = []

    def disk_usage(folder: Path) -> SimpleNamespace:
        folders.append(folder)
        return SimpleNamespace(free=100 * GIB)

    monkeypatch.setattr(shutil, "disk_usage", disk_usage)
    (tmp_path / "data").mkdir()
    commands(monkeypatch)
    preflight(params)
    assert folders == [tmp_path, tmp_path / "data"]


def test_the_size_of_a_folder_is_that_of_all_its_files(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data/a").write_bytes(b"12345")
    assert size_of(tmp_path) == 5


def test_a_folder_that_does_not_exist_has_no_size(tmp_path):
    assert size_of(tmp_path / "none") == 0


@pytest.mark.fault("10")
def test_every_fault_is_named_at_once(params, monkeypatch, java):
    java.write_text("#!/bin/sh\nexit 1\n")
    commands(monkeypatch)
    set_free_gib(monkeypatch, disk=1.5, memory=7)
    *room, java_fault = faults_of(with_compute(params, workers=2))
    assert room == [
        Fault("preflight.disk_too_small", path=Path("runs"), free=1.5, needed=5.0),
        Fault("preflight.disk_too_small", path=Path("data/05_model"), free=1.5, needed=2.0),
        Fault("preflight.memory_too_small", free=7.0, needed=8.0, workers=2),
    ]
    assert java_fault.code == "preflight.no_java"
    assert java_fault.fields["key"] == "evaluate.metrics"
    assert java_fault.fields["names"] == ["CIDEr", "METEOR", "ROUGE-L", "BLEU", "SPICE"]
    assert str(java) in str(java_fault.fields["cause"])


def test_a_training_in_this_process_needs_memory_for_one_model(params, monkeypatch):
    commands(monkeypatch)
    set_free_gib(monkeypatch, disk=100, memory=3)
    needed = Fault("preflight.memory_too_small", free=3.0, needed=4.0, workers=1)
    assert faults_of(with_compute(params, workers=0)) == [needed]


def time_out() -> Any:
    raise subprocess.TimeoutExpired("nvidia-smi", 60)


def list_gpus(count: int, code: int = 0) -> Callable[[], Any]:
    lines = "".join(f"GPU {n}: NVIDIA H200 (UUID: x)\n" for n in range(count))
    return lambda: SimpleNamespace(returncode=code, stdout=lines)


@pytest.mark.fault("11", "m3")
@pytest.mark.parametrize(
    ("answer", "gpus"),
    [
        pytest.param(list_gpus(1), 1, id="one GPU"),
        pytest.param(time_out, 0, id="a driver that does not answer"),
        pytest.param(list_gpus(2, code=9), 0, id="a driver that fails"),
    ],
)
def test_fewer_gpus_than_workers_are_refused(params, monkeypatch, answer, gpus):
    commands(monkeypatch, nvidia_smi=answer)
    two_workers = with_compute(params, gpu=True, workers=2)
    assert faults_of(two_workers) == [Fault("preflight.too_few_gpus", key="compute.gpu", value=gpus, needed=2)]


@pytest.mark.fault("11", "m3")
def test_as_many_gpus_as_workers_are_enough(params, monkeypatch):
    commands(monkeypatch, nvidia_smi=list_gpus(2))
    set_free_gib(monkeypatch, memory=2)  # a GPU run holds the base in memory once for each worker
    preflight(with_compute(params, gpu=True, workers=2))


@pytest.mark.fault("m7")
def test_a_cluster_needs_no_memory_and_gpus_of_this_machine(params, monkeypatch):
    commands(monkeypatch)
    set_free_gib(monkeypatch, memory=0)
    with socket.create_server(("127.0.0.1", 0)) as head:
        monkeypatch.setenv("RAY_ADDRESS", f"ray://127.0.0.1:{head.getsockname()[1]}")
        preflight(with_compute(params, gpu=True, workers=8))


GONE_CLUSTERS = ["127.0.0.1:9", "ray://127.0.0.1:9", "[::1]:9", "head.invalid:6379", "a:99999"]


@pytest.mark.fault("P10")
@pytest.mark.parametrize("address", GONE_CLUSTERS)
def test_a_cluster_that_does_not_answer_is_named_if_workers_would_go_there(params, monkeypatch, address):
    commands(monkeypatch)
    monkeypatch.setenv("RAY_ADDRESS", address)
    (fault,) = faults_of(with_compute(params, workers=2))
    assert address in str(fault)


@pytest.mark.fault("P10")
@pytest.mark.parametrize("address", GONE_CLUSTERS)
def test_a_cluster_that_does_not_answer_is_no_fault_without_workers(params, monkeypatch, address):
    commands(monkeypatch)
    monkeypatch.setenv("RAY_ADDRESS", address)
    preflight(with_compute(params, workers=0))


def scored_by(params: Params, *metrics: str) -> Params:
    return params.model_copy(update={"evaluate": params.evaluate.model_copy(update={"metrics": metrics})})


@pytest.mark.fault("18")
@pytest.mark.parametrize("metric", [name for name, metric in METRICS.items() if metric.java])
def test_each_metric_that_evaluate_refuses_without_java_is_refused_here(params, monkeypatch, java, metric):
    commands(monkeypatch)
    java.write_text("#!/bin/sh\necho 'java version \"1.7.0\"' >&2\n")
    (fault,) = faults_of(scored_by(params, metric))
    assert fault.code == "preflight.no_java"
    assert fault.fields["names"] == [metric]
    assert str(java) in str(fault.fields["cause"])
    assert "1.7.0" in str(fault.fields["cause"])


@pytest.fixture
def with_jars(params: Params, tmp_path: Path) -> Params:
    """Return the run with a folder for the jars of SPICE that does not exist yet."""
    return with_compute(params, spice_dir=tmp_path / "jars")


@pytest.mark.fault("18")
def test_spice_is_not_tried_if_evaluate_does_not_compute_it(with_jars, monkeypatch):
    commands(monkeypatch)
    preflight(scored_by(with_jars, "CIDEr"))


@pytest.mark.fault("18")
def test_java_is_not_started_if_no_metric_needs_it(params, monkeypatch):
    run_commands = commands(monkeypatch)
    preflight(scored_by(params, "pixel_threshold"))
    assert run_commands == []


@pytest.mark.fault("18")
def test_a_folder_without_the_jars_of_spice_is_named(with_jars, monkeypatch):
    commands(monkeypatch)
    folder = with_jars.compute.spice_dir
    (fault,) = faults_of(with_jars)
    assert fault.code == "preflight.no_spice"
    assert fault.fields["folder"] == folder
    assert next(iter(JARS)) in str(fault.fields["cause"])


@pytest.mark.fault("18")
def test_a_spice_that_does_not_score_is_named_with_its_last_words(with_jars, monkeypatch, java):
    commands(monkeypatch)
    with_jars.compute.spice_dir.mkdir()
    for name in (*JARS, *NASHORN):
        (with_jars.compute.spice_dir / name).touch()
    java.write_text(java.read_text() + 'case "$*" in *-jar*) echo no models >&2; exit 1;; esac\n')
    (fault,) = faults_of(with_jars)
    assert fault.code == "preflight.no_spice"
    assert "no models" in str(fault.fields["cause"])


@pytest.mark.fault("19")
def test_a_server_of_mlflow_that_is_gone_is_named(params, monkeypatch):
    commands(monkeypatch)
    gone = params.register_.model_copy(update={"tracking_uri": "http://127.0.0.1:9"})
    (fault,) = faults_of(params.model_copy(update={"register_": gone}))
    assert fault.code == "preflight.no_mlflow"
    assert "http://127.0.0.1:9" in str(fault.fields["cause"])


@pytest.fixture
def mlflow_store(params, empty_store, tmp_path) -> Iterator[MlflowClient]:
    """Return the store of the embedded run with a first champion, in a git repository."""
    (tmp_path / "services" / "mlflow").mkdir(parents=True)
    shutil.copy(empty_store, tmp_path / "services" / "mlflow" / "mlflow.db")
    subprocess.run(["git", "init", "-q"], check=True)
    client = store(tmp_path)
    run = client.create_run(client.create_experiment("m3diff")).info.run_id
    client.create_registered_model("m3diff")
    client.create_model_version("m3diff", "file:///nowhere", run)
    move = Entry(
        action="promote", model="m3diff", champion_before=None, target=1, outcome="first", reason="it is the first"
    )
    append_decision(Path("."), add_identities(client, move))
    client.set_registered_model_alias("m3diff", "champion", "1")
    yield client
    mlflow.set_tracking_uri("")


@pytest.mark.fault("T10")
def test_a_deleted_experiment_is_named_with_the_command_that_restores_it(params, monkeypatch, mlflow_store):
    preflight(params)
    mlflow_store.delete_experiment(mlflow_store.get_experiment_by_name("m3diff").experiment_id)
    (fault,) = faults_of(params)
    remedy = re.search(r"MLFLOW_TRACKING_URI=(\S+) mlflow (experiments restore \S+ \d+)", str(fault))
    assert remedy is not None
    address, command = remedy.groups()
    done = CliRunner().invoke(cli, command.split(), env={"MLFLOW_TRACKING_URI": address})
    assert done.exit_code == 0, done.output
    preflight(params)


@pytest.mark.fault("T10", "19")
def test_a_champion_without_its_alias_is_named_with_the_remedy(params, mlflow_store):
    mlflow_store.delete_registered_model_alias("m3diff", "champion")
    (fault,) = faults_of(params)
    assert "m3diff rollback --to 1 --why" in str(fault)
    rollback(params, 1, "the alias was gone")
    preflight(params)


@pytest.mark.fault("T10", "19")
def test_a_registered_model_that_was_deleted_is_no_fault(params, mlflow_store):
    mlflow_store.delete_registered_model_alias("m3diff", "champion")
    mlflow_store.delete_registered_model("m3diff")
    preflight(params)  # a new version can be registered, and the gate refuses it once


@pytest.mark.fault("T10", "19")
def test_a_store_that_is_no_database_is_a_fault(params, mlflow_store, tmp_path):
    (tmp_path / "services" / "mlflow" / "mlflow.db").write_text("no database")
    assert [fault.code for fault in faults_of(params)] == ["preflight.no_mlflow"]


def with_base(params: Params, base: Path, **datasets: DatasetEntry) -> Params:
    """Return the parameters with this base. The gate uses the first of the datasets, if there are any."""
    changes: dict[str, Any] = {"train": params.train.model_copy(update={"base": base})}
    if datasets:
        protocol = f"{next(iter(datasets))}/test"
        changes["ingest"] = params.ingest.model_copy(update={"datasets": datasets})
        changes["promote"] = params.promote.model_copy(update={"protocol": protocol})
    return params.model_copy(update=changes)


@pytest.fixture
def base_folder(tmp_path: Path) -> Path:
    (tmp_path / "models/small").mkdir(parents=True)
    (tmp_path / "models/small/config.json").write_text("{}")
    return Path("models/small")


def test_a_missing_base_is_named_with_the_command_that_fetches_it(params):
    base = Path("models/llava")
    command = "hf download OWNER/llava --local-dir models/llava"
    fault = Fault("settings.no_base", key="train.base", path=base / "config.json", command=command)
    with raises(NotReadyError, "preflight.cannot_train", faults=[fault]):
        preflight_data(with_base(params, base))


def own_pairs(folder: Path, *splits: str) -> DatasetEntry:
    folder.mkdir(parents=True)
    rows = "".join(f"{n}.png,{n}_2.png,it fell,{split}\n" for n, split in enumerate(splits))
    (folder / "pairs.csv").write_text(f"before,after,captions,split\n{rows}")
    return DatasetEntry(reader="pairs", root=folder)


def test_a_gate_s_dataset_with_a_test_pair_is_accepted(params, base_folder, tmp_path):
    preflight_data(with_base(params, base_folder, own=own_pairs(tmp_path / "own", "train", "test")))


def test_a_gate_s_dataset_without_a_test_pair_is_refused(params, base_folder, tmp_path):
    run = with_base(params, base_folder, own=own_pairs(tmp_path / "own", "train", "val"))
    with raises(NotReadyError, "preflight.cannot_train") as refusal:
        preflight_data(run)
    (fault,) = refusal.value.fields["faults"]
    assert fault.code == "preflight.no_test_pair"
    assert fault.fields["key"] == "promote.protocol"
    assert fault.fields["protocol"] == "own/test"
    assert fault.fields["root"] == tmp_path / "own"
    assert str(HOW_TO_TEST) in str(fault)


def test_a_dataset_that_does_not_exist_is_left_to_the_stages(params, base_folder, tmp_path):
    preflight_data(with_base(params, base_folder, own=DatasetEntry(reader="pairs", root=tmp_path / "none")))


def test_a_gate_s_dataset_that_the_run_does_not_have_is_left_to_the_stages(params, base_folder, tmp_path):
    run = with_base(params, base_folder, own=own_pairs(tmp_path / "own", "train"))
    promote = run.promote.model_copy(update={"protocol": "other/test"})
    preflight_data(run.model_copy(update={"promote": promote}))


def test_a_dataset_that_cannot_be_read_is_left_to_the_stages(params, base_folder, tmp_path):
    broken = own_pairs(tmp_path / "broken")
    (tmp_path / "broken/pairs.csv").write_bytes(b"")
    preflight_data(with_base(params, base_folder, own=broken))


def test_the_test_pairs_of_a_published_layout_are_found(params, base_folder, tmp_path):
    root = write_clevr(tmp_path / "clevr")
    preflight_data(with_base(params, base_folder, clevr=DatasetEntry(reader="clevr_change", root=root)))


# The largest samples


def with_questions(params: Params, **sources: Any) -> Params:
    """Return the parameters with the questions of the repository, and these sources of the mixture."""
    changes = {"questions": REPOSITORY / "profiles/questions.yaml", "sources": sources}
    return params.model_copy(update={"convert": params.convert.model_copy(update=changes)})


def test_the_samples_to_check_are_those_that_convert_makes_of_sound_rows(params, base_folder, tmp_path):
    entry = own_pairs(tmp_path / "own", "train", "train", "val", "test")
    with (tmp_path / "own/pairs.csv").open("a") as table:
        table.write("4.png,,it fell,train\n")
    other_entry = own_pairs(tmp_path / "other", "test")
    unread_entry = own_pairs(tmp_path / "broken")
    (tmp_path / "broken/pairs.csv").write_bytes(b"")
    datasets = {"own": entry, "broken": unread_entry, "other": other_entry}
    datasets["none"] = DatasetEntry(reader="pairs", root=tmp_path / "none")
    samples = samples_by_split(with_questions(with_base(params, base_folder, **datasets)))
    assert {split: len(table) for split, table in samples.items()} == {"test": 2, "train": 2, "val": 1}
    assert list(samples) == sorted(samples)
    assert samples["test"].table["dataset"].to_list() == ["own", "other"]
    images = samples["val"].table["images"].to_list()[0]
    assert [Path(image["uri"]).name for image in images] == ["2.png", "2_2.png"]


def test_a_dataset_that_trains_nothing_has_no_training_samples_to_check(params, base_folder, tmp_path):
    entry = own_pairs(tmp_path / "own", "train", "test").model_copy(update={"train_on": ()})
    samples = samples_by_split(with_questions(with_base(params, base_folder, own=entry)))
    assert "train" not in samples


@pytest.fixture
def family_of_any_size(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Replace the run's family by one whose number of tokens depends on the images. It records its checks."""
    family = SimpleNamespace(
        takes=Takes(fixed_marks=False), base_files=None, error=None, samples_error=None, checked=[]
    )

    def check_base(base: Path, settings: Any) -> str:
        if family.error:
            raise family.error
        return "the processor"

    def check(samples: str, processor: str, max_tokens: int | None, model: str) -> None:
        family.checked.append((samples, processor, max_tokens, model))
        if family.samples_error:
            raise family.samples_error

    family.check_base = check_base
    monkeypatch.setitem(FAMILIES.data, "m3diff", family)
    splits = {split: f"{split} samples" for split in ("test", "train", "val")}
    monkeypatch.setattr(preflight_module, "samples_by_split", lambda params: splits)
    monkeypatch.setattr("m3diff.stages.train.sample_checks.check_largest_images", check)
    return family


def test_only_samples_of_training_and_validation_have_a_limit_of_tokens(params, base_folder, family_of_any_size):
    run = with_base(params, base_folder)
    limited_run = run.model_copy(update={"train": run.train.model_copy(update={"max_tokens": 77})})
    assert list(faults_of_model(limited_run)) == []
    assert family_of_any_size.checked == [
        ("test samples", "the processor", None, "m3diff"),
        ("train samples", "the processor", 77, "m3diff"),
        ("val samples", "the processor", 77, "m3diff"),
    ]


def test_each_split_with_a_sample_that_the_model_cannot_process_is_named(params, base_folder, family_of_any_size):
    fault = Fault("models.image_without_grid", path="a.png")
    for error in (DataError(fault), ParamsError(fault)):
        family_of_any_size.samples_error = error
        assert list(faults_of_model(with_base(params, base_folder))) == [fault] * 3


@pytest.mark.parametrize(
    ("error", "key"), [(DataError, "train.base"), (ParamsError, "models.m3diff")], ids=["a base", "a setting"]
)
def test_a_base_that_cannot_be_trained_is_named_by_its_parameter(error, key, params, base_folder, family_of_any_size):
    family_of_any_size.error = error("models.no_image_features", path=base_folder)
    (fault,) = faults_of_model(with_base(params, base_folder))
    assert fault.code == "models.no_image_features"
    assert fault.fields["key"] == key
    assert family_of_any_size.checked == []


# Retention datasets


def retention_set(folder: Path, *rows: dict[str, Any]) -> DatasetEntry:
    folder.mkdir(parents=True)
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {"manifest": "pairs.jsonl", "columns": {"images": "images", "question": "question"}}
    return DatasetEntry(reader="pairs", root=folder, options=options, role="retention")


def with_retention_set(params: Params, base: Path, entry: DatasetEntry) -> Params:
    datasets = params.ingest.datasets | {"kept": entry}
    run = with_base(params, base)
    return run.model_copy(update={"ingest": params.ingest.model_copy(update={"datasets": datasets})})


def with_family(params: Params, family: str) -> Params:
    return params.model_copy(update={"train": params.train.model_copy(update={"model": family})})


ONE_IMAGE = {"images": ["a.png"], "question": "Is there a box?", "captions": "yes", "split": "test"}
TWO_IMAGES = ONE_IMAGE | {"images": ["b.png", "c.png"]}


@pytest.mark.parametrize(
    ("rows", "codes"),
    [
        ((ONE_IMAGE,), ["preflight.retention_images_not_taken", "preflight.retention_questions_not_read"]),
        ((TWO_IMAGES,), ["preflight.retention_questions_not_read"]),
        ((ONE_IMAGE | {"split": "train"},), []),
    ],
    ids=["one image", "a question about a pair", "no test record"],
)
def test_a_family_that_cannot_process_a_retention_dataset_is_refused(params, base_folder, tmp_path, rows, codes):
    run = with_family(with_retention_set(params, base_folder, retention_set(tmp_path / "kept", *rows)), "blip2idc")
    if not codes:
        preflight_data(run)
        return
    with raises(NotReadyError, "preflight.cannot_train") as refusal:
        preflight_data(run)
    faults = refusal.value.fields["faults"]
    assert [fault.code for fault in faults] == codes
    for fault in faults:
        assert fault.fields["key"] == "ingest.datasets.kept.role"
        assert fault.fields["family"] == "blip2idc"


def test_a_family_that_processes_one_image_takes_a_retention_dataset(params, base_folder, tmp_path):
    preflight_data(with_retention_set(params, base_folder, retention_set(tmp_path / "kept", ONE_IMAGE, TWO_IMAGES)))


# Other questions than the champion's

TRAINED_QUESTION = "What has changed from the first image to the second?"  # the first of task `difference`


@pytest.fixture
def register_champion(params, mlflow_store, tmp_path) -> Callable[[dict[str, Any]], None]:
    """Return a function that makes a version with this manifest the champion."""

    def register(manifest: dict[str, Any]) -> None:
        checkpoint = tmp_path / "stored" / "artifacts" / "checkpoint"
        checkpoint.mkdir(parents=True)
        (checkpoint / "manifest.json").write_text(json.dumps(manifest))
        source = (tmp_path / "stored").as_uri()
        version = mlflow_store.create_model_version("m3diff", source, mlflow_store.search_runs(["1"])[0].info.run_id)
        mlflow_store.set_registered_model_alias("m3diff", "champion", version.version)

    return register


def ask(params: Params, tmp_path: Path, **questions: Sequence[str | None]) -> Params:
    """Return the parameters with a dataset per name, whose records have these questions of their own."""
    datasets = {}
    for name, questions_of_dataset in questions.items():
        rows = [
            Row(name=str(number), split="test", images=(), references=["x"], source="", question=question)
            for number, question in enumerate(questions_of_dataset)
        ]
        READ_ROWS[name] = rows
        (tmp_path / name).mkdir()
        datasets[name] = DatasetEntry(reader="pairs", root=tmp_path / name)
    run = with_base(params, Path("base"), **datasets)
    convert = run.convert.model_copy(update={"questions": REPOSITORY / "profiles" / "questions.yaml"})
    return run.model_copy(update={"convert": convert})


READ_ROWS: dict[str, list[Row]] = {}


@pytest.fixture(autouse=True)
def rows_of_datasets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the reader `pairs` yield READ_ROWS for the datasets of `ask`."""
    spec = DATASETS["pairs"]

    def read(root: Path, **options: Any) -> Iterator[Row]:
        return iter(READ_ROWS[root.name]) if root.name in READ_ROWS else spec.read(root, **options)

    monkeypatch.setitem(DATASETS.data, "pairs", replace(spec, read=read))
    READ_ROWS.clear()


def test_a_note_names_datasets_that_ask_other_questions_than_the_champions(params, register_champion, tmp_path):
    register_champion({"files": {}, "trained_on": {"question": TRAINED_QUESTION}})
    run = ask(params, tmp_path, own=["How many?", "Where?", "How many?"], same=[None], mixed=["Why?", None])
    (note,) = notes_on_questions(run)
    assert f"m3diff version 2, the champion, was trained on the question “{TRAINED_QUESTION}”" in note
    assert "own asks “How many?” and 1 more" in note
    assert "same asks" not in note
    assert "mixed asks" not in note
    assert "own/test (promote.protocol)" in note


def test_a_note_names_the_question_of_the_task_after_another_champion(params, register_champion, tmp_path):
    register_champion({"files": {}, "trained_on": {"question": "Where?"}})
    (note,) = notes_on_questions(ask(params, tmp_path, own=["How?", "Where?"], captions=[None, None]))
    assert f"captions asks “{TRAINED_QUESTION}”. " in note
    assert "own asks" not in note


@pytest.mark.parametrize(
    "manifest",
    [{"files": {}}, {"files": {}, "trained_on": {}}, []],
    ids=["an older checkpoint", "no question", "no object"],
)
def test_a_champion_that_names_no_question_gets_no_note(manifest, params, register_champion, tmp_path):
    register_champion(manifest)
    assert notes_on_questions(ask(params, tmp_path, own=["How many?"])) == []


def test_without_a_champion_or_its_checkpoint_there_is_no_note(params, mlflow_store, tmp_path):
    run = ask(params, tmp_path, own=["How many?"])
    assert notes_on_questions(run) == [], "the checkpoint of version 1 is nowhere"
    mlflow_store.delete_registered_model_alias("m3diff", "champion")
    assert notes_on_questions(run) == []


def test_a_new_store_is_not_created_for_the_note(params, tmp_path):
    assert notes_on_questions(ask(params, tmp_path, own=["How many?"])) == []
    assert not (tmp_path / "services/mlflow/mlflow.db").exists()
