"""The lineage of a version: the hashes of its commit, data, code and checkpoint, and refusals if the tree differs."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml

from m3diff.provenance.dvc import Lock, dvc_hash
from m3diff.records.errors import DataError, Fault
from m3diff.registry import lineage
from m3diff.registry.lineage import captioned_records, find_adapters, hash_test_set
from m3diff.settings.load import load_params
from m3diff.stages.register.params import Register
from tests import toy
from tests.errors import raises
from tests.layouts import write_test_set

DATASETS = ("minichange", "minichange_free", "minichange_shifted")


@pytest.fixture(scope="module")
def project_once(trained_once: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(trained_once, tmp_path_factory.mktemp("lineage") / "toy", symlinks=True))


@pytest.fixture
def project(project_once: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the project, which is the current directory. Tests must not change it."""
    monkeypatch.chdir(project_once)
    return project_once


def read_lineage() -> dict[str, str]:
    return lineage.read_lineage(load_params(), Lock())


def lineage_with_change(path: str, text: str) -> dict[str, str] | Fault:
    """Return the lineage, or the fault, while a file has this text. The file is restored or removed afterwards."""
    file = Path(path)
    old_bytes = file.read_bytes() if file.is_file() else None
    is_new_folder = not file.parent.is_dir()
    file.parent.mkdir(parents=True, exist_ok=True)
    file.unlink(missing_ok=True)  # the file may be a link into DVC's cache
    file.write_text(text)
    try:
        return read_lineage()
    except DataError as error:
        return error.fault
    finally:
        file.unlink()
        if old_bytes is not None:
            file.write_bytes(old_bytes)
        if is_new_folder:
            shutil.rmtree(file.parent)


def sha256(text: bytes | str) -> str:
    return hashlib.sha256(text if isinstance(text, bytes) else text.encode()).hexdigest()


@pytest.mark.slow(35)
def test_every_tag_of_the_lineage_is_the_hash_of_its_content(project):
    stages = yaml.safe_load(Path("dvc.lock").read_text())["stages"]
    recorded = {entry["path"]: entry["md5"] for stage in stages.values() for entry in stage["outs"]}
    records = pq.read_table("data/03_clean/records").to_pylist()
    # retention datasets have no part in the test set of the task
    tests = [row for row in records if row["split"] == "test" and row["dataset"] != "minichange_images"]
    image_hashes = [[image["sha256"].hex() for image in row["images"]] for row in tests]
    lines = [
        json.dumps([row["id"], row["references"], *hashes]) for row, hashes in zip(tests, image_hashes, strict=True)
    ]
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
        "test_set.sha256": sha256("".join(lines)),
        "dvc.base": recorded["data/00_base"],
        "base.sha256": sha256(f"config.json\0{content}\n"),
        "git.commit": toy.run(project, "git", "rev-parse", "HEAD").strip(),
        "git.dirty": "false",
        "weights.sha256": sha256(json.dumps({"model.safetensors": word})),
        "dvc.raw.minichange_images": recorded["data/01_raw/minichange"],
    } | {f"dvc.raw.{name}": recorded[f"data/01_raw/{name}"] for name in DATASETS}


def test_a_flow_run_and_changed_code_are_named_and_what_dvc_writes_is_not(project, monkeypatch):
    before = read_lineage()
    with monkeypatch.context() as flow:
        flow.setenv("M3DIFF_FLOW_RUN", "a1b2")
        assert read_lineage() == before | {"prefect.flow_run": "a1b2"}
    for path in (
        "data/note",
        "data/01_raw/minichange/images/new.txt",
    ):  # the lineage has the raw data that was ingested
        assert lineage_with_change(path, "new") == before
    for path in ("toy.py", "components/settings/tree.py", "new.py", "data/01_raw/real.dvc", "data/new/folder/real.dvc"):
        text = Path(path).read_text() if Path(path).is_file() else ""
        assert lineage_with_change(path, f"{text}\n# a comment\n") == before | {"git.dirty": "true"}, path


def test_adapters_of_a_version_have_a_hash_of_their_own(project, monkeypatch):
    before = read_lineage()
    adapters = Path("data/05_model/checkpoint")
    monkeypatch.setattr(lineage, "find_adapters", lambda cfg, checkpoint: checkpoint)
    assert read_lineage() == before | {"dvc.adapters": dvc_hash(adapters)}


def test_what_differs_from_dvc_lock_or_was_never_there_has_no_lineage(project):
    for path in (
        *("data/00_base/config.json", "data/04_mixture/train/00000.parquet", "data/04_mixture/val/00000.parquet"),
        *("data/05_model/checkpoint/word.txt", "data/05_model/curves.csv", "data/06_predictions/predictions.json"),
        *("data/07_report/metrics.json", "data/07_report/scores.parquet", "data/07_report/report.html"),
    ):
        refused = lineage_with_change(path, "something else")
        assert refused.code == "dvc.differs_from_lock"
        assert path.startswith(str(refused.fields["path"]))
    generation = "components/models/generation.py"
    assert isinstance(lineage_with_change(generation, Path(generation).read_text() + "\n# a comment\n"), dict)
    refused = lineage_with_change(generation, "something = 1\n")
    assert refused == Fault("registry.code_changed", path=generation)
    params = yaml.safe_load(Path("params.yaml").read_text())
    params["ingest"]["datasets"]["real"] = {"reader": "pairs", "root": "data/01_raw/real"}
    refused = lineage_with_change("params.yaml", yaml.safe_dump(params, sort_keys=False))
    assert refused == Fault("dvc.not_recorded", path=Path("data/01_raw/real"), entry="ingest@real deps")
    with raises(DataError, "dvc.not_in_lock", path=Path("nowhere")):
        Lock().verified_hash(Path("nowhere"))


def test_adapters_are_found_only_if_versions_keep_adapters(tmp_path):
    fields = {"tracking_uri": "sqlite:///mlflow.db", "experiment": "m3diff", "model_name": "m3diff"}
    settings = [Register(**fields, keeps=keeps) for keeps in ("adapters", "merged")]
    assert [find_adapters(cfg, tmp_path) for cfg in settings] == [None, None]
    (tmp_path / "adapters").mkdir()
    assert [find_adapters(cfg, tmp_path) for cfg in settings] == [tmp_path / "adapters", None]


def test_a_test_set_of_captions_keeps_the_hash_of_earlier_releases(tmp_path):
    value = hash_test_set(write_test_set(tmp_path))
    assert value == "4a18a0975394a669956a0c009f3385153ab56e533a80e8ae58dab8b4bf6d8215"


@pytest.mark.parametrize(
    ("changes", "same"),
    [
        ({"captioned": ("a",)}, False),
        ({"question": "how many?"}, False),
        ({"history": [{"question": "is it a room?", "answer": "yes"}]}, False),
        ({"kind": "count"}, True),
        ({"captioned": ("a", "c")}, False),
        ({"references": ["y", "x"]}, False),
        ({"images": [{"uri": "1.png", "sha256": b"3"}, {"uri": "2.png", "sha256": b"2"}]}, False),
        ({"images": [{"uri": "1.png", "sha256": b"1"}, {"uri": "2.png", "sha256": b"3"}]}, False),
        ({"images": [{"uri": "x/1.png", "sha256": b"1"}, {"uri": "2.png", "sha256": b"2"}]}, True),
        ({"captioned": ("a", "b")}, True),
    ],
)
def test_a_test_set_depends_on_pairs_references_and_images_not_on_paths_or_order(tmp_path, changes, same):
    paths = write_test_set(tmp_path)
    assert [record["id"] for record in captioned_records(paths)] == ["a", "b"]
    first_hash = hash_test_set(paths)
    assert (hash_test_set(write_test_set(tmp_path, **changes)) == first_hash) == same


def test_the_hash_of_a_test_set_is_that_of_earlier_versions(tmp_path):
    text = '["a", ["x", "y"], "31", "32"]["b", ["x", "y"], "31", "32"]'
    assert hash_test_set(write_test_set(tmp_path)) == hashlib.sha256(text.encode()).hexdigest()


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
    present_section = {"ingest.datasets.here": {"root": "h"}}
    removed_section = {"ingest.datasets.gone": {"root": "g"}}
    train_section = {"train": {"seed": 1}, "models.m": {"rank": 2}}
    sections_by_stage = {"ingest@here": present_section, "ingest@gone": removed_section, "train": train_section}
    stages: dict[str, Any] = {
        stage: {"params": {"params.yaml": sections}} for stage, sections in sections_by_stage.items()
    }
    stages["predict"] = {"deps": [{"path": str(watched), "md5": hashlib.md5(b"watched.py").hexdigest()}]}
    (tmp_path / "dvc.lock").write_text(yaml.safe_dump({"stages": stages}))
    lock = Lock(tmp_path / "dvc.lock")
    assert lock.params(["here"]) == present_section | train_section
    before = lock.verified_hash(tmp_path / "code")
    free.write_text("changed")
    assert lock.verified_hash(tmp_path / "code") == dvc_hash(tmp_path / "code") != before
    watched.write_text("changed")
    with raises(DataError, "dvc.differs_from_lock", path=watched, entry="predict deps"):
        lock.verified_hash(tmp_path / "code")
