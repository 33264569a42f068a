"""The lineage of a version: every hash by hand, and what is refused because the working tree is something else."""

import hashlib
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from m3diff.provenance.dvc import Lock, dvc_hash
from m3diff.records.errors import DataError
from m3diff.registry import lineage
from m3diff.registry.lineage import captioned_records, hash_test_set, kept_alone, read_base_sha256
from m3diff.settings.load import load_params
from m3diff.stages.register.params import Register
from tests import toy

RAW = ("minichange", "minichange_free", "minichange_shifted")


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


def changed(path: str, text: str) -> dict[str, str] | str:
    """The lineage while a file holds this, or why there is none; the file is put back, or taken away again."""
    file = Path(path)
    before, new = file.read_bytes() if file.is_file() else None, not file.parent.is_dir()
    file.parent.mkdir(parents=True, exist_ok=True)
    file.unlink(missing_ok=True)  # it may be a link into DVC's cache
    file.write_text(text)
    try:
        return read_lineage()
    except DataError as error:
        return str(error)
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
    seen = [
        json.dumps([row["id"], row["references"], row["before_sha256"].hex(), row["after_sha256"].hex()])
        for row in records
        if row["split"] == "test"
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
        assert path.startswith(refused.partition(":")[0])
        assert re.search("dvc.lock has .*, on disk is .*; run `dvc repro` first", refused)
    generation = "components/models/generation.py"
    assert isinstance(changed(generation, Path(generation).read_text() + "\n# a comment\n"), dict)
    refused = changed(generation, "something = 1\n")
    assert refused == f"{generation}: has changed since `dvc repro` ran; run it again"
    params = yaml.safe_load(Path("params.yaml").read_text())
    params["ingest"]["datasets"]["real"] = {"reader": "pairs", "root": "data/01_raw/real"}
    refused = changed("params.yaml", yaml.safe_dump(params, sort_keys=False))
    assert "data/01_raw/real: not in dvc.lock (ingest@real deps)" in refused
    with pytest.raises(DataError, match="nowhere: not in dvc.lock; run `dvc repro` first"):
        Lock().current(Path("nowhere"))


def test_without_a_report_or_a_repository_there_is_no_lineage(trained):
    Path("data/07_report/report.html").unlink()
    with pytest.raises(DataError, match="report.html: not on disk; run `dvc repro` first"):
        read_lineage()
    toy.run(trained, "dvc", "checkout", "-q")
    (trained / ".git").rename(trained / "no.git")
    with pytest.raises(DataError, match="no git repository.*git init"):
        read_lineage()


def test_adapters_are_kept_alone_where_asked_and_where_there_are_some(tmp_path):
    both = [
        Register(tracking_uri="sqlite:///mlflow.db", experiment="m3diff", model_name="m3diff", keeps=keeps)
        for keeps in ("adapters", "merged")
    ]
    assert [kept_alone(cfg, tmp_path) for cfg in both] == [None, None]
    (tmp_path / "adapters").mkdir()
    assert [kept_alone(cfg, tmp_path) for cfg in both] == [tmp_path / "adapters", None]


def test_the_bases_hash_is_the_one_in_the_checkpoints_manifest(tmp_path):
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "weights").write_text("w")
    content = sha256(f"weights\0{sha256('w')}\n")
    with pytest.raises(DataError, match="the checkpoint is incomplete"):
        read_base_sha256(tmp_path, tmp_path / "base")
    (tmp_path / "manifest.json").write_text(json.dumps({"base_sha256": content}))
    assert read_base_sha256(tmp_path, tmp_path / "base") == content
    (tmp_path / "manifest.json").write_text(json.dumps({"base_sha256": "f" * 64}))
    with pytest.raises(DataError, match="was trained from ffffffffffff"):
        read_base_sha256(tmp_path, tmp_path / "base")


# The test set


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
def test_another_pair_reference_or_image_is_another_test_set_and_places_and_order_are_none(tmp_path, changed, same):
    paths = write_test_set(tmp_path)
    assert [record["id"] for record in captioned_records(paths)] == ["a", "b"]
    first = hash_test_set(paths)
    assert (hash_test_set(write_test_set(tmp_path, **changed)) == first) == same


# dvc.lock


def test_the_hash_of_a_folder_is_dvcs_and_compiled_files_are_no_part_of_it(project):
    records, predictions = Path("data/02_records/minichange"), Path("data/06_predictions/predictions.json")
    (records / "x.pyc").touch()
    assert Lock().hashes(records) == {"ingest@minichange outs": dvc_hash(records)}
    (records / "x.pyc").unlink()
    md5 = hashlib.md5(predictions.read_bytes()).hexdigest()
    assert Lock().hashes(predictions) == {"predict outs": md5, "evaluate deps": md5}


@pytest.mark.fault("08")
@pytest.mark.parametrize("text", ["", "<<<<<<< HEAD\nstages: {}\n", "stages", "\udcff", None])
def test_a_lock_file_that_is_none_says_how_to_restore_it(tmp_path, text):
    if text is not None:
        (tmp_path / "dvc.lock").write_text(text, errors="surrogateescape")
    with pytest.raises(DataError, match="run `dvc repro` first" if text is None else "git checkout -- "):
        Lock(tmp_path / "dvc.lock")


def test_parameters_are_those_of_the_last_run_without_datasets_that_left_and_a_folder_is_current_as_its_parts(tmp_path):
    watched, free = tmp_path / "code" / "watched.py", tmp_path / "code" / "free.py"
    watched.parent.mkdir()
    for file in (watched, free):
        file.write_text(file.name)
    here, gone = {"ingest.datasets.here": {"root": "h"}}, {"ingest.datasets.gone": {"root": "g"}}
    trained = {"train": {"seed": 1}, "models.m": {"rank": 2}}
    ran = {"ingest@here": here, "ingest@gone": gone, "train": trained}
    stages: dict[str, Any] = {stage: {"params": {"params.yaml": sections}} for stage, sections in ran.items()}
    stages["predict"] = {"deps": [{"path": str(watched), "md5": hashlib.md5(b"watched.py").hexdigest()}]}
    (tmp_path / "dvc.lock").write_text(yaml.safe_dump({"stages": stages}))
    lock = Lock(tmp_path / "dvc.lock")
    assert lock.params(["here"]) == here | trained
    before = lock.current(tmp_path / "code")
    free.write_text("changed")
    assert lock.current(tmp_path / "code") == dvc_hash(tmp_path / "code") != before
    watched.write_text("changed")
    with pytest.raises(DataError, match=r"watched\.py: dvc\.lock has .* \(predict deps\)"):
        lock.current(tmp_path / "code")
