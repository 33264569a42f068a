"""The version that is read from MLflow's sqlite file is the version that MLflow finds."""

import hashlib
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from mlflow.tracking import MlflowClient

from m3diff.models import generation
from m3diff.models.checkpoint import write_manifest
from m3diff.records.errors import DataError, Fault
from m3diff.registry import model_source
from m3diff.registry.local_store import NoSuchVersionError, StoredVersion, find_stored_version, read_stored_tags
from m3diff.registry.tracking import connect, experiment_id
from tests.errors import raises

MODEL = "m3diff"
URI = "sqlite:///services/mlflow/mlflow.db"
STORE_FOLDER = Path("services/mlflow")


class Store:
    """The store of a project with one run. MLflow's client creates its versions."""

    def __init__(self, root: Path, empty: Path) -> None:
        self.root = root
        self.database = root / STORE_FOLDER / "mlflow.db"
        self.database.parent.mkdir(parents=True)
        shutil.copy(empty, self.database)
        with connect(URI) as client:
            self.client: MlflowClient = client
            client.create_registered_model(MODEL)
            self.experiment = experiment_id(client, "m3diff")

    def add(self, *aliases: str, limit: str | None = "32", folder: str = "a model & 50%") -> int:
        """Create a version with a checkpoint and these aliases, and return its number."""
        artifact_folder = self.root / STORE_FOLDER / "artifacts" / "m3diff" / folder
        checkpoint = artifact_folder / "artifacts" / "checkpoint"
        checkpoint.mkdir(parents=True, exist_ok=True)
        (checkpoint / "config.json").write_text("{}")
        write_manifest(checkpoint, family="m3diff", base="x", base_sha256="y")
        tags = {} if limit is None else {"predict.max_new_tokens": limit}
        version = self.client.create_model_version(MODEL, artifact_folder.as_uri(), tags=tags)
        for alias in aliases:
            self.client.set_registered_model_alias(MODEL, alias, version.version)
        return int(version.version)

    def execute(self, statement: str) -> None:
        with closing(sqlite3.connect(self.database)) as connection, connection:
            connection.execute(statement)


@pytest.fixture
def store(empty_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.chdir(tmp_path)
    return Store(tmp_path, empty_store)


def source(model: str) -> model_source.Source:
    return model_source.find(URI, MODEL, model, Path("base"), 64)


def by_mlflow(model: str, monkeypatch: pytest.MonkeyPatch) -> model_source.Source:
    with monkeypatch.context() as patch:
        patch.setattr(model_source, "find_stored_version", lambda *_: None)
        return source(model)


@pytest.mark.parametrize("model", ["1", "2", "champion", "challenger"])
def test_the_source_of_a_number_or_alias_is_the_one_that_mlflow_finds(model, store, monkeypatch):
    store.add("champion", limit="32", folder="first")
    store.add("challenger", limit=None, folder="second é")
    quick = find_stored_version(URI, MODEL, model)
    assert quick is not None
    assert source(model) == by_mlflow(model, monkeypatch)
    assert source(model).folder == quick.checkpoint


def test_a_moved_alias_is_followed_at_once(store, monkeypatch):
    store.add("champion", folder="first")
    second = store.add("champion", folder="second")
    assert find_stored_version(URI, MODEL, "champion") == StoredVersion(
        number=second,
        checkpoint=store.root / STORE_FOLDER / "artifacts/m3diff/second/artifacts/checkpoint",
        max_new_tokens=32,
    )
    store.client.set_registered_model_alias(MODEL, "champion", "1")
    assert model_source.resolve_version(URI, MODEL, "champion") == "m3diff/1"
    monkeypatch.setattr(model_source, "find_stored_version", lambda *_: None)
    assert model_source.resolve_version(URI, MODEL, "champion") == "m3diff/1", "as MLflow finds it"


@pytest.mark.parametrize("model", ["7", "champion", "Challenger", "m3diff"])
def test_a_version_or_alias_that_is_not_there_is_refused_as_mlflow_refuses_it(model, store, monkeypatch):
    store.add("challenger", folder="first")
    store.add(folder="second")
    with raises(DataError, "registry.name_another_model") as quick:
        source(model)
    with raises(DataError, "registry.name_another_model") as slow:
        by_mlflow(model, monkeypatch)
    assert quick.value.fault == slow.value.fault
    assert quick.value.fields["fault"] == Fault("registry.no_such_version", model="m3diff", value=model, numbers=[2, 1])


def test_a_deleted_version_is_none(store):
    store.add("challenger", folder="first")
    store.add(folder="second")
    store.client.delete_model_version(MODEL, "1")
    for model in ("1", "challenger"):
        with raises(NoSuchVersionError, "registry.no_such_version", value=model, numbers=[2]):
            find_stored_version(URI, MODEL, model)


def test_another_model_s_alias_is_not_this_one_s(store):
    store.add(folder="first")
    store.client.create_registered_model("other")
    source = (store.root / STORE_FOLDER / "artifacts/m3diff/first").as_uri()
    version = store.client.create_model_version("other", source)
    store.client.set_registered_model_alias("other", "champion", version.version)
    with raises(NoSuchVersionError, "registry.no_such_version", model=MODEL, value="champion"):
        find_stored_version(URI, MODEL, "champion")


def test_the_tags_of_a_version_are_those_that_mlflow_reads(store):
    number = store.add(limit="32")
    store.client.set_model_version_tag(MODEL, str(number), "git.commit", "abc")
    tags = read_stored_tags(URI, MODEL, number)
    assert tags == store.client.get_model_version(MODEL, str(number)).tags
    assert tags["git.commit"] == "abc"


@pytest.mark.parametrize("uri", ["http://127.0.0.1:9", "sqlite:///none.db"], ids=["a server", "no file"])
def test_without_a_file_no_tags_are_read(uri, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert read_stored_tags(uri, MODEL, 1) == {}
    assert list(tmp_path.iterdir()) == []


def test_a_store_that_does_not_exist_is_not_made(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with raises(DataError, "registry.no_model_yet") as refused:
        source("champion")
    fault = refused.value.fields["fault"]
    assert fault.code == "registry.no_database"
    assert fault.fields["database"] == tmp_path / STORE_FOLDER / "mlflow.db"
    assert list(tmp_path.iterdir()) == []


def test_reading_changes_no_byte_and_leaves_no_file(store):
    store.add("champion")
    before = {path: path.read_bytes() for path in (store.root / STORE_FOLDER).rglob("*") if path.is_file()}
    assert find_stored_version(URI, MODEL, "champion") is not None
    assert {path: path.read_bytes() for path in (store.root / STORE_FOLDER).rglob("*") if path.is_file()} == before


def test_an_experiment_that_dvc_runs_in_a_copy_reads_the_project_s_store(store, monkeypatch):
    store.add("champion")
    copy = store.root / ".dvc/tmp/exps/standalone/tmpabc"
    copy.mkdir(parents=True)
    monkeypatch.chdir(copy)
    assert find_stored_version(URI, MODEL, "champion") is not None


READ_BY_MLFLOW = {
    "an alias with a meaning of MLflow's own": ("latest", lambda store: None),
    "a table of another MLflow": (
        "champion",
        lambda store: store.execute("ALTER TABLE registered_model_aliases RENAME TO aliases"),
    ),
    "files elsewhere": (
        "champion",
        lambda store: store.execute("UPDATE model_versions SET storage_location = 's3://bucket/first', source = 's3:'"),
    ),
    "a location that is a model's": (
        "champion",
        lambda store: store.execute("UPDATE model_versions SET storage_location = NULL, source = 'models:/m-1'"),
    ),
    "files that are gone": ("champion", lambda store: shutil.rmtree(store.root / STORE_FOLDER / "artifacts")),
    "a file that is no database": ("champion", lambda store: store.database.write_text("no database " * 99)),
}


@pytest.mark.parametrize("reason", READ_BY_MLFLOW)
def test_what_a_plain_read_cannot_answer_is_left_to_mlflow(reason, store):
    model, change = READ_BY_MLFLOW[reason]
    store.add("champion")
    change(store)
    assert find_stored_version(URI, MODEL, model) is None


def test_a_name_in_several_of_mlflow_s_workspaces_is_left_to_mlflow(store):
    store.add("champion")
    copied = "name, version, current_stage, source, storage_location"
    store.execute(f"INSERT INTO model_versions ({copied}, workspace) SELECT {copied}, 'b' FROM model_versions")
    assert find_stored_version(URI, MODEL, "champion") is None


@pytest.mark.parametrize("address", ["http://127.0.0.1:9", "postgresql://h/d", "sqlite:///:memory:"])
def test_a_store_that_is_no_file_is_left_to_mlflow(address):
    assert find_stored_version(address, MODEL, "champion") is None


def test_a_store_that_was_moved_is_mended_by_mlflow_and_then_read(store, tmp_path, monkeypatch, capsys):
    store.add("champion")
    new_project = tmp_path / "there"
    shutil.copytree(tmp_path / "services", new_project / "services")
    monkeypatch.chdir(new_project)
    assert find_stored_version(URI, MODEL, "champion") is None
    mended_source = source("champion")
    assert mended_source.folder.is_relative_to(new_project)
    quick = find_stored_version(URI, MODEL, "champion")
    assert quick is not None
    assert quick.checkpoint == mended_source.folder


def test_a_version_is_found_without_importing_mlflow(store):
    store.add("champion")
    code = (
        "import sys; from pathlib import Path; from m3diff.registry.model_source import find, resolve_version;"
        f"find({URI!r}, 'm3diff', 'champion', Path('base'), 64); resolve_version({URI!r}, 'm3diff', 'champion');"
        "print(*{name.partition('.')[0] for name in sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert {"mlflow", "sqlalchemy", "alembic", "ray", "peft", "polars", "pyarrow"}.isdisjoint(done.stdout.split())


def test_a_path_that_is_no_folder_is_no_version(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with raises(DataError, "registry.no_such_folder", value="runs/nowhere"):
        source("runs/nowhere")


def test_a_file_of_a_checkpoint_leads_to_its_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.safetensors").touch()
    with raises(DataError, "registry.model_is_file", value="model.safetensors", folder=Path(".")):
        source("model.safetensors")


def test_a_folder_and_the_checkpoint_in_it_are_one_model_with_the_given_limit(tmp_path):
    checkpoint = tmp_path / "model" / "checkpoint"
    checkpoint.mkdir(parents=True)
    (checkpoint / "config.json").write_text("{}")
    write_manifest(checkpoint, family="m3diff", base="x", base_sha256="y")
    digest = hashlib.sha256((checkpoint / "manifest.json").read_bytes()).hexdigest()
    expected = model_source.Source(f"m3diff/sha256-{digest[:12]}", checkpoint, 64, None)
    assert source(str(checkpoint)) == expected
    assert source(str(checkpoint.parent)) == expected


def test_a_model_is_loaded_with_its_length_limit_and_the_base_of_its_adapters(monkeypatch):
    loaded: list[tuple[Any, ...]] = []
    monkeypatch.setattr(generation, "load_captioner", lambda folder, limit, base: loaded.append((folder, limit, base)))
    model_source.load(model_source.Source("m3diff/1", Path("checkpoint"), 17, Path("base")))
    assert loaded == [(Path("checkpoint"), 17, Path("base"))]


def test_a_registry_without_a_version_says_how_to_make_one(store):
    with raises(DataError, "registry.no_model_yet") as refused:
        source("champion")
    assert refused.value.fields["fault"].code == "registry.no_versions"
