"""Checks before a run: each lack is told with have and need."""

import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlflow
import psutil
import pytest
from click.testing import CliRunner
from mlflow.cli import cli
from mlflow.tracking import MlflowClient

from m3diff.commands import preflight as looks
from m3diff.commands.preflight import GIB, NotReadyError, preflight, size_of
from m3diff.registry.decisions import Entry, append
from m3diff.registry.promote import rollback
from m3diff.scoring.metrics import METRICS
from m3diff.scoring.metrics.spice import JARS, NASHORN
from m3diff.settings.load import load_params
from m3diff.settings.tree import Params
from tests.toy import REPOSITORY, store


@pytest.fixture
def params(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Params:
    """The embedded run in a folder of its own, whose base is one GiB, on a machine that has all that it needs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(looks, "size_of", lambda folder: GIB if folder == Path("data/00_base") else 0)
    has(monkeypatch, disk=100, memory=100)
    return load_params(REPOSITORY / "params.yaml")


@pytest.fixture(autouse=True)
def java(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    program = tmp_path_factory.mktemp("bin") / "java"
    program.write_text("#!/bin/sh\necho 'openjdk version \"17.0.1\"' >&2\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    return program


def has(monkeypatch: pytest.MonkeyPatch, disk: float = 100, memory: float = 100) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=int(disk * GIB)))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=int(memory * GIB)))


def ask(params: Params, **compute: Any) -> Params:
    return params.model_copy(update={"compute": params.compute.model_copy(update=compute)})


def commands(monkeypatch: pytest.MonkeyPatch, **answers: Callable[[], Any]) -> list[list[str]]:
    """Programs that answer as given; any other is not installed."""
    asked: list[list[str]] = []
    run_program = subprocess.run

    def run(command: list[str], **options: Any) -> Any:
        asked.append(command)
        if Path(command[0]).name == "java" or command[0] == sys.executable:  # starts java
            return run_program(command, **options)
        if command[0].replace("-", "_") not in answers:
            raise FileNotFoundError(command[0])
        return answers[command[0].replace("-", "_")]()

    monkeypatch.setattr(subprocess, "run", run)
    return asked


def faults(params: Params) -> str:
    with pytest.raises(NotReadyError) as refused:
        preflight(params)
    return str(refused.value)


def test_a_machine_that_has_everything_is_taken_by_the_disk_of_the_nearest_folder(params, monkeypatch, java, tmp_path):
    places: list[Path] = []
    monkeypatch.setattr(shutil, "disk_usage", lambda place: places.append(place) or SimpleNamespace(free=100 * GIB))
    (tmp_path / "data").mkdir()
    (tmp_path / "data/a").write_bytes(b"12345")
    assert (size_of(tmp_path), size_of(tmp_path / "none")) == (5, 0)
    asked = commands(monkeypatch)
    preflight(params)
    assert asked == [[str(java), "-version"]]
    assert places == [tmp_path, tmp_path / "data"]


@pytest.mark.fault("10")
def test_every_lack_is_told_at_once(params, monkeypatch, java):
    java.write_text("#!/bin/sh\nexit 1\n")
    commands(monkeypatch)
    has(monkeypatch, disk=1.5, memory=7)
    *told, of_java = faults(ask(params, workers=2)).splitlines()
    assert told == [
        "this run cannot start here:",
        "  runs: 1.5 GiB free, 5.0 needed; make room or set compute.scratch",
        "  data/05_model: 1.5 GiB free, 2.0 needed; make room or set compute.scratch",
        "  memory: 7.0 GiB are free, about 8.0 needed by 2 worker(s); lower compute.workers or end other programs",
    ]
    assert of_java.startswith("  evaluate.metrics: CIDEr, METEOR, ROUGE-L, BLEU, SPICE need Java; ")
    assert f"{java}: does not start" in of_java


def silent() -> Any:
    raise subprocess.TimeoutExpired("nvidia-smi", 60)


def listed(count: int, code: int = 0) -> Callable[[], Any]:
    lines = "".join(f"GPU {n}: NVIDIA H200 (UUID: x)\n" for n in range(count))
    return lambda: SimpleNamespace(returncode=code, stdout=lines)


@pytest.mark.fault("11", "m3")
@pytest.mark.parametrize(("answer", "found"), [(listed(1), 1), (silent, 0), (listed(2, 9), 0), (listed(2), 2)])
def test_as_many_gpus_as_workers_and_a_driver_that_does_not_answer_has_none(params, monkeypatch, answer, found):
    commands(monkeypatch, nvidia_smi=answer)
    has(monkeypatch, memory=2)  # a GPU run holds the base in memory once for each worker
    asked = ask(params, gpu=True, workers=2)
    if found == 2:
        preflight(asked)
    else:
        assert f"compute.gpu: 2 GPU(s) asked for, {found} found by nvidia-smi -L" in faults(asked)


@pytest.mark.fault("m7")
def test_memory_and_gpus_of_a_cluster_are_not_those_of_this_machine(params, monkeypatch):
    commands(monkeypatch)
    has(monkeypatch, memory=0)
    with socket.create_server(("127.0.0.1", 0)) as head:
        monkeypatch.setenv("RAY_ADDRESS", f"ray://127.0.0.1:{head.getsockname()[1]}")
        preflight(ask(params, gpu=True, workers=8))


@pytest.mark.fault("P10")
@pytest.mark.parametrize("address", ["127.0.0.1:9", "ray://127.0.0.1:9", "[::1]:9", "head.invalid:6379", "a:99999"])
def test_a_cluster_that_is_gone_is_named_where_workers_would_go_there(params, monkeypatch, address):
    commands(monkeypatch)
    monkeypatch.setenv("RAY_ADDRESS", address)
    said = faults(ask(params, workers=2))
    assert f"RAY_ADDRESS={address}" in said
    assert "unset RAY_ADDRESS" in said
    preflight(ask(params, workers=0))


def scored_by(params: Params, *metrics: str) -> Params:
    return params.model_copy(update={"evaluate": params.evaluate.model_copy(update={"metrics": metrics})})


@pytest.mark.fault("18")
@pytest.mark.parametrize("metric", [name for name, metric in METRICS.items() if metric.java])
def test_each_metric_that_evaluate_refuses_without_java_is_refused_here(params, monkeypatch, java, metric):
    commands(monkeypatch)
    java.write_text("#!/bin/sh\necho 'java version \"1.7.0\"' >&2\n")
    assert f"evaluate.metrics: {metric} need Java; {java}: version not" in faults(scored_by(params, metric))


@pytest.mark.fault("18")
def test_spice_is_tried_where_its_folder_is_named_and_evaluate_computes_it(params, monkeypatch, tmp_path, java):
    commands(monkeypatch)
    folder = tmp_path / "jars"
    named = ask(params, spice_dir=folder)
    preflight(scored_by(named, "CIDEr"))
    asked = commands(monkeypatch)
    preflight(scored_by(params, "pixel_threshold"))
    assert asked == [], "no metric of Java"
    assert f"compute.spice_dir: no SPICE from {folder}: {folder}: has no {next(iter(JARS))} and no " in faults(named)
    folder.mkdir()
    for name in (*JARS, *NASHORN):
        (folder / name).touch()
    java.write_text(java.read_text() + 'case "$*" in *-jar*) echo no models >&2; exit 1;; esac\n')
    assert "its last words: " in faults(named)
    assert "no models" in faults(named)


@pytest.mark.fault("19")
def test_a_server_of_mlflow_that_is_gone_is_named(params, monkeypatch):
    commands(monkeypatch)
    gone = params.register_.model_copy(update={"tracking_uri": "http://127.0.0.1:9"})
    assert "register.tracking_uri: MLflow at http://127.0.0.1:9 does not answer" in faults(
        params.model_copy(update={"register_": gone})
    )


@pytest.fixture
def mlflow_store(params, empty_store, tmp_path) -> Iterator[MlflowClient]:
    """The embedded run's store with a first champion, in a git repository."""
    (tmp_path / "services" / "mlflow").mkdir(parents=True)
    shutil.copy(empty_store, tmp_path / "services" / "mlflow" / "mlflow.db")
    subprocess.run(["git", "init", "-q"], check=True)
    client = store(tmp_path)
    run = client.create_run(client.create_experiment("m3diff")).info.run_id
    client.create_registered_model("m3diff")
    client.create_model_version("m3diff", "file:///nowhere", run)
    move = Entry(action="promote", model="m3diff", from_=None, to=1, outcome="first", why="it is the first")
    append(Path("."), move)
    client.set_registered_model_alias("m3diff", "champion", "1")
    yield client
    mlflow.set_tracking_uri("")


@pytest.mark.fault("T10")
def test_an_experiment_that_was_deleted_is_said_with_the_command_that_restores_it(params, monkeypatch, mlflow_store):
    preflight(params)
    mlflow_store.delete_experiment(mlflow_store.get_experiment_by_name("m3diff").experiment_id)
    (said,) = faults(params).splitlines()[1:]
    assert said.startswith("  register.experiment: 'm3diff' was deleted in MLflow")
    address, command = re.search(r"MLFLOW_TRACKING_URI=(\S+) mlflow (experiments restore \S+ \d+)", said).groups()
    done = CliRunner().invoke(cli, command.split(), env={"MLFLOW_TRACKING_URI": address})
    assert done.exit_code == 0, done.output
    preflight(params)


@pytest.mark.fault("T10", "19")
def test_a_champion_whose_alias_was_taken_away_is_said_with_the_remedy(params, mlflow_store, tmp_path):
    mlflow_store.delete_registered_model_alias("m3diff", "champion")
    (said,) = faults(params).splitlines()[1:]
    assert "the alias 'champion' is gone from model 'm3diff'" in said
    assert "m3diff rollback --to 1 --why" in said
    rollback(params, 1, "the alias was gone")
    preflight(params)
    mlflow_store.delete_registered_model("m3diff")
    preflight(params)  # the next registration is the first of another registry
    (tmp_path / "services" / "mlflow" / "mlflow.db").write_text("no database")
    assert "register.tracking_uri: " in faults(params)
