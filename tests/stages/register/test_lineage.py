"""The lineage of a version: every hash by hand, and what is refused because the working tree is something else."""

import hashlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from m3diff.provenance.dvc import Lock, dvc_hash
from m3diff.records.errors import DataError
from m3diff.registry.lineage import (
    captioned_records,
    hash_test_set,
    kept_alone,
    read_base_sha256,
    read_lineage,
    training_hours,
)
from m3diff.settings.load import load_params
from m3diff.stages.register.params import Register
from tests import toy


@pytest.mark.parametrize(
    ("keeps", "trained", "alone"), [("adapters", True, True), ("adapters", False, False), ("merged", True, False)]
)
def test_adapters_are_kept_alone_where_asked_and_where_there_are_some(tmp_path, keeps, trained, alone):
    if trained:
        (tmp_path / "adapters").mkdir()
    cfg = Register(tracking_uri="sqlite:///mlflow.db", experiment="m3diff", model_name="m3diff", keeps=keeps)
    assert kept_alone(cfg, tmp_path) == (tmp_path / "adapters" if alone else None)


@pytest.mark.slow(35)
def test_every_part_of_the_lineage_is_the_hash_of_what_it_names(trained):
    stages = yaml.safe_load(Path("dvc.lock").read_text())["stages"]
    recorded = {entry["path"]: entry["md5"] for stage in stages.values() for entry in stage["outs"]}
    records = pq.read_table("data/03_clean/records.parquet").to_pylist()
    seen = [
        json.dumps([row["id"], row["references"], row["before_sha256"].hex(), row["after_sha256"].hex()])
        for row in records
        if row["split"] == "test"
    ]
    content = hashlib.sha256(Path("data/00_base/config.json").read_bytes()).hexdigest()
    assert read_lineage(load_params(), Lock()).tags() == {
        "dvc.checkpoint": recorded["data/05_model/checkpoint"],
        "dvc.code": dvc_hash(Path("code/predict.json")),
        "predict.max_new_tokens": "64",
        "dvc.data": recorded["data/04_mixture/train"],
        "dvc.val_data": recorded["data/04_mixture/val"],
        "dvc.metrics": recorded["data/07_report/metrics.json"],
        "dvc.lock.sha256": hashlib.sha256(Path("dvc.lock").read_bytes()).hexdigest(),
        "test_set.sha256": hashlib.sha256("".join(seen).encode()).hexdigest(),
        "dvc.base": recorded["data/00_base"],
        "base.sha256": hashlib.sha256(f"config.json\0{content}\n".encode()).hexdigest(),
        "git.commit": toy.run(trained, "git", "rev-parse", "HEAD").strip(),
        "git.dirty": "false",
        "weights.sha256": hashlib.sha256(json.dumps({"model.safetensors": of_word()}).encode()).hexdigest(),
    } | {f"dvc.raw.{name}": recorded[f"data/01_raw/{name}"] for name in RAW}


RAW = ("minichange", "minichange_free", "minichange_shifted")


def of_word() -> str:
    return hashlib.sha256(Path("data/05_model/checkpoint/word.txt").read_bytes()).hexdigest()


def test_a_flow_run_and_the_hours_of_each_device_are_named_where_they_are_known(trained, monkeypatch):
    monkeypatch.setenv("M3DIFF_FLOW_RUN", "a1b2")
    Path("runs").mkdir()
    speed = {"seconds": 5400, "device_hours": 6.0, "device": "NVIDIA H200 (x)", "devices": 4}
    Path("runs/train_speed.json").write_text(json.dumps(speed))
    tags = read_lineage(load_params(), Lock()).tags()
    assert (tags["prefect.flow_run"], tags["hours.NVIDIA H200 _x_"]) == ("a1b2", "6")


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"seconds": 3}', '{"device_hours": 3, "devices": 1}', '{"device_hours": "x", "device": "cpu"}'],
)
def test_a_measurement_that_is_not_whole_is_none(tmp_path, text):
    (tmp_path / "speed.json").write_text(text)
    assert training_hours(tmp_path / "speed.json") == training_hours(tmp_path / "none.json") == {}


def test_raw_data_that_changed_after_ingest_do_not_change_what_was_ingested(trained):
    before = read_lineage(load_params(), Lock()).raw
    Path("data/01_raw/minichange/images/new.txt").write_text("new")
    assert read_lineage(load_params(), Lock()).raw == before


def test_a_dataset_that_was_never_ingested_has_no_lineage(trained):
    params = yaml.safe_load(Path("params.yaml").read_text())
    params["ingest"]["datasets"]["real"] = {"reader": "pairs", "root": "data/01_raw/real"}
    Path("params.yaml").write_text(yaml.safe_dump(params, sort_keys=False))
    with pytest.raises(DataError, match=r"data/01_raw/real: not in dvc.lock \(ingest@real deps\)"):
        read_lineage(load_params(), Lock())


@pytest.mark.parametrize(
    ("path", "dirty"),
    [
        ("toy.py", True),
        ("components/settings/tree.py", True),
        ("new.py", True),
        ("data/01_raw/real.dvc", True),
        ("data/new/folder/real.dvc", True),
        ("dvc.lock", False),
        ("data/note", False),
    ],
)
def test_changed_code_makes_the_commit_dirty_and_what_dvc_writes_does_not(trained, path, dirty):
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with Path(path).open("a") as file:
        file.write("\n# a comment\n")
    assert read_lineage(load_params(), Lock()).git_dirty == dirty


@pytest.mark.parametrize(
    "path",
    [
        "data/00_base/config.json",
        "data/04_mixture/train/00000.parquet",
        "data/04_mixture/val/00000.parquet",
        "data/05_model/checkpoint/word.txt",
        "data/05_model/curves.csv",
        "data/06_predictions/predictions.json",
        "data/07_report/metrics.json",
        "data/07_report/scores.parquet",
        "data/07_report/report.html",
    ],
)
def test_what_differs_from_dvc_lock_has_no_lineage(trained, path):
    Path(path).unlink()  # it may be a link into DVC's cache
    Path(path).write_text("something else")
    with pytest.raises(DataError, match="dvc.lock has .*, on disk is .*; run `dvc repro` first") as refused:
        read_lineage(load_params(), Lock())
    assert path.startswith(str(refused.value).partition(":")[0])


def test_code_that_changed_since_the_captions_has_no_lineage_and_a_comment_changes_none(trained):
    file = Path("components/models/generation.py")
    file.write_text(file.read_text() + "\n# a comment\n")
    read_lineage(load_params(), Lock())
    file.write_text("something = 1\n")
    with pytest.raises(DataError, match=rf"{file}: has changed since `dvc repro` ran; run it again"):
        read_lineage(load_params(), Lock())


def test_what_no_stage_wrote_and_what_is_gone_are_told_apart(trained):
    with pytest.raises(DataError, match="nowhere: not in dvc.lock; run `dvc repro` first"):
        Lock().current(Path("nowhere"))
    Path("data/07_report/report.html").unlink()
    with pytest.raises(DataError, match="report.html: not on disk; run `dvc repro` first"):
        read_lineage(load_params(), Lock())


def test_outside_a_git_repository_there_is_no_lineage(trained):
    (trained / ".git").rename(trained / "no.git")
    with pytest.raises(DataError, match="no git repository.*git init"):
        read_lineage(load_params(), Lock())


# The hash of files and folders


def test_the_hash_of_a_folder_is_dvcs_and_compiled_files_are_no_part_of_it(trained):
    lock = Lock()
    folders = {"data/02_records/minichange": "ingest@minichange outs", "components/stages/evaluate": "evaluate deps"}
    for folder, where in folders.items():
        (Path(folder) / "__pycache__").mkdir(exist_ok=True)
        (Path(folder) / "__pycache__" / "x.pyc").touch()
        recorded = lock.hashes(Path(folder))
        assert recorded == {} or recorded[where] == dvc_hash(Path(folder))
    assert lock.hashes(Path("data/02_records/minichange")) == {
        "ingest@minichange outs": dvc_hash(Path("data/02_records/minichange"))
    }
    assert lock.hashes(Path("data/06_predictions/predictions.json")) == {
        "predict outs": dvc_hash(Path("data/06_predictions/predictions.json")),
        "evaluate deps": dvc_hash(Path("data/06_predictions/predictions.json")),
    }


# The base


def base_and_checkpoint(root: Path, named: str | None = None) -> tuple[Path, Path]:
    base, checkpoint = root / "base", root / "checkpoint"
    base.mkdir()
    (base / "weights").write_text("w")
    weights = hashlib.sha256(b"w").hexdigest()
    content = hashlib.sha256(f"weights\0{weights}\n".encode()).hexdigest()
    checkpoint.mkdir()
    (checkpoint / "manifest.json").write_text(json.dumps({"base_sha256": named or content}))
    return base, checkpoint


def test_the_bases_hash_is_the_one_in_the_checkpoints_manifest(tmp_path):
    base, checkpoint = base_and_checkpoint(tmp_path)
    found = read_base_sha256(checkpoint, base)
    assert json.loads((checkpoint / "manifest.json").read_text())["base_sha256"] == found


def test_a_checkpoint_of_another_base_is_refused(tmp_path):
    base, checkpoint = base_and_checkpoint(tmp_path, named="f" * 64)
    with pytest.raises(DataError, match="was trained from ffffffffffff"):
        read_base_sha256(checkpoint, base)


def test_a_checkpoint_without_a_manifest_is_refused(tmp_path):
    base, checkpoint = base_and_checkpoint(tmp_path)
    (checkpoint / "manifest.json").unlink()
    with pytest.raises(DataError, match="the checkpoint is incomplete"):
        read_base_sha256(checkpoint, base)


# The test set


def write_test_set(root: Path, captioned: tuple[str, ...] = ("b", "a"), **changed: Any) -> Any:
    """Three clean records, of which some were captioned; `changed` is written over record a."""
    paths = SimpleNamespace(clean=root, predictions=root)
    row = {"before": "1.png", "after": "2.png", "before_sha256": b"1", "after_sha256": b"2", "references": ["x", "y"]}
    rows = [{"id": name, **row} for name in "cba"]
    rows[2] |= changed
    pq.write_table(pa.Table.from_pylist(rows), root / "records.parquet")
    (root / "predictions.json").write_text(json.dumps([{"image_id": name, "caption": ""} for name in captioned]))
    return paths


def test_the_captioned_records_come_in_the_order_of_their_ids(tmp_path):
    assert [record["id"] for record in captioned_records(write_test_set(tmp_path))] == ["a", "b"]


@pytest.mark.parametrize(
    "changed",
    [
        {"captioned": ("a",)},
        {"captioned": ("a", "c")},
        {"references": ["y", "x"]},
        {"before_sha256": b"3"},
        {"after_sha256": b"3"},
    ],
)
def test_another_pair_reference_or_image_is_another_test_set(tmp_path, changed):
    assert hash_test_set(write_test_set(tmp_path)) != hash_test_set(write_test_set(tmp_path, **changed))


def test_the_places_of_the_images_and_the_order_of_the_predictions_are_no_part_of_the_test_set(tmp_path):
    first = hash_test_set(write_test_set(tmp_path))
    assert first == hash_test_set(write_test_set(tmp_path, captioned=("a", "b"), before="elsewhere/1.png"))


# dvc.lock


@pytest.mark.fault("08")
@pytest.mark.parametrize("text", ["", "<<<<<<< HEAD\nstages: {}\n", "stages", "\udcff"])
def test_a_lock_file_that_is_no_lock_file_says_how_to_restore_it(tmp_path, text):
    (tmp_path / "dvc.lock").write_text(text, errors="surrogateescape")
    with pytest.raises(DataError, match="git checkout -- "):
        Lock(tmp_path / "dvc.lock")


def test_without_a_lock_file_there_is_nothing_to_register(tmp_path):
    with pytest.raises(DataError, match="run `dvc repro` first"):
        Lock(tmp_path / "dvc.lock")


def write_lock(root: Path, stages: dict[str, Any]) -> Lock:
    (root / "dvc.lock").write_text(yaml.safe_dump({"stages": stages}))
    return Lock(root / "dvc.lock")


def test_parameters_are_those_of_the_last_run_without_datasets_that_left(tmp_path):
    def ran_with(**sections: Any) -> dict[str, Any]:
        return {"params": {"params.yaml": sections}}

    stages = {
        "ingest@here": ran_with(**{"ingest.datasets.here": {"root": "h"}}),
        "ingest@gone": ran_with(**{"ingest.datasets.gone": {"root": "g"}}),
        "train": ran_with(train={"seed": 1}, **{"models.m": {"rank": 2}}),
        "predict": {},
    }
    lock = write_lock(tmp_path, stages)
    assert lock.params(["here"]) == {
        "ingest.datasets.here": {"root": "h"},
        "train": {"seed": 1},
        "models.m": {"rank": 2},
    }


def test_a_folder_of_which_stages_watch_files_is_current_when_all_of_these_are(tmp_path):
    (tmp_path / "code").mkdir()
    for name in ("watched.py", "free.py"):
        (tmp_path / "code" / name).write_text(name)
    watched = tmp_path / "code" / "watched.py"
    entry = {"path": str(watched), "md5": hashlib.md5(b"watched.py").hexdigest()}
    lock = write_lock(tmp_path, {"train": {"deps": [entry]}})
    before = lock.current(tmp_path / "code")
    (tmp_path / "code" / "free.py").write_text("changed")
    assert lock.current(tmp_path / "code") == dvc_hash(tmp_path / "code") != before
    watched.write_text("changed")
    with pytest.raises(DataError, match=r"watched\.py: dvc\.lock has .* \(train deps\)"):
        lock.current(tmp_path / "code")
