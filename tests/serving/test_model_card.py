"""The card of a served model describes the model's own training, not the checkout's latest one."""

import hashlib
import json
import shutil
import sqlite3
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import polars as pl
import pytest
import yaml
from PIL import Image

from m3diff.provenance.dvc import Lock, dvc_hash
from m3diff.records.errors import DataError
from m3diff.records.tables import part_paths
from m3diff.registry.model_source import Source
from m3diff.serving import model_card
from m3diff.serving.model_card import (
    ModelCard,
    TrainingData,
    TrainingRecord,
    build_model_card,
    is_drawn,
    note_on_training,
    rows_of_test_split,
)
from tests.errors import Message, raises
from tests.layouts import write_record_table
from tests.serving.toy import PARAMS

RECORDS = "data/03_clean/records"
MIXTURE = "data/04_mixture"
CHECKPOINT = "data/05_model/checkpoint"


def write_pair(root: Path, number: int, shade: int) -> dict[str, Any]:
    """Write the images of a pair and return its fields in the table of records."""
    images = []
    for side in ("before", "after"):
        path = f"data/01_raw/mini/{side}_{number}.png"
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (number, shade, len(side))).save(root / path)
        images.append({"uri": path, "sha256": hashlib.sha256((root / path).read_bytes()).digest()})
    return {"images": images}


def write_records(root: Path, shade: int = 0, pairs: int = 8) -> None:
    rows = []
    for number in range(pairs):
        split = "train" if number == 0 else "test"
        rows.append({"id": f"mini/{number}", "dataset": "mini", "split": split, "references": [f"{number} fell"]})
        rows[-1] |= write_pair(root, number, shade)
    write_record_table(root / RECORDS, rows)


def write_project(root: Path, reader: str = "minichange") -> Path:
    """Write a project whose dvc.lock records a training, and return its checkpoint."""
    write_records(root)
    report = {"datasets": {"mini": {"pairs": {"train": 2564}}, "probe": {"pairs": {"train": 0}}}}
    files = {
        f"{MIXTURE}/report.json": json.dumps(report),
        f"{MIXTURE}/train/0.parquet": "samples",
        f"{CHECKPOINT}/manifest.json": json.dumps({"family": "m3diff", "files": {}}),
        f"{CHECKPOINT}/model.safetensors": "weights",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)

    def outs(*paths: str) -> list[dict[str, str]]:
        return [{"path": path, "md5": dvc_hash(root / path)} for path in paths]

    datasets = {name: {"reader": reader, "root": "data/01_raw/mini"} for name in ("mini", "probe")}
    stages = {
        "validate": {"outs": outs(RECORDS)},
        "convert": {
            "params": {"params.yaml": {"ingest.datasets": datasets}},
            "outs": outs(f"{MIXTURE}/report.json", f"{MIXTURE}/train"),
        },
        "train": {"outs": outs(CHECKPOINT)},
    }
    (root / "dvc.lock").write_text(yaml.safe_dump({"schema": "2.0", "stages": stages}))
    return root / CHECKPOINT


def card_of(checkpoint: Path) -> ModelCard:
    return build_model_card(PARAMS, Source("m3diff/sha256-0123456789ab", checkpoint, 16, None))


def test_a_folder_is_described_by_the_project_that_contains_it(tmp_path):
    card = card_of(write_project(tmp_path))
    assert card.notes == ()
    assert card.family == "m3diff"
    assert card.trained_on == (TrainingData(dataset="mini", is_drawn=True, pairs=2564),)
    assert card.date is not None


def test_a_model_of_drawn_scenes_says_that_it_knows_no_photographs(tmp_path):
    card = card_of(write_project(tmp_path))
    assert card.as_dict()["knows_photographs"] is False
    assert "never seen a photograph" in " ".join(card.sentences())
    assert "2,564 pairs: mini (2,564)" in card.sentences()[0]


def test_a_model_of_other_data_says_nothing_of_photographs(tmp_path):
    card = card_of(write_project(tmp_path, reader="spot_the_diff"))
    assert card.knows_photographs is True
    assert len(card.sentences()) == 1


def test_a_model_without_a_record_says_so(tmp_path):
    (tmp_path / "manifest.json").write_text('{"family": "onediff", "files": {}}')
    card = card_of(tmp_path)
    assert card.family == "onediff"
    assert card.as_dict()["knows_photographs"] is None
    assert "not recorded" in card.sentences()[0]


def test_the_example_pairs_are_test_pairs_with_their_references(tmp_path):
    examples = card_of(write_project(tmp_path)).examples
    assert [example.id for example in examples] == [f"mini/{number}" for number in range(1, 7)]
    assert examples[0].reference == "1 fell"
    assert examples[0].before == tmp_path / "data/01_raw/mini/before_1.png"
    assert len({example.key for example in examples}) == 6


def test_a_dataset_that_must_not_be_shown_has_no_example_pairs(tmp_path, monkeypatch):
    checkpoint = write_project(tmp_path)
    monkeypatch.setattr(model_card, "may_be_shown", lambda reader: False)
    assert card_of(checkpoint).examples == ()


def test_a_dataset_may_be_shown_if_its_licence_allows_it(monkeypatch):
    assert model_card.may_be_shown("minichange")

    def refuse(spec: Any, purpose: str) -> None:
        assert purpose == "show"
        raise DataError("datasets.licence_refuses_use")

    monkeypatch.setattr(model_card, "check_licence", refuse)
    assert not model_card.may_be_shown("minichange")


def test_an_image_that_changed_since_the_training_is_not_shown(tmp_path):
    checkpoint = write_project(tmp_path)
    write_pair(tmp_path, 1, shade=99)
    (tmp_path / "data/01_raw/mini/after_2.png").unlink()
    ids = [example.id for example in card_of(checkpoint).examples]
    assert ids == [f"mini/{number}" for number in range(3, 8)]


def test_a_table_of_other_test_pairs_is_not_read(tmp_path):
    checkpoint = write_project(tmp_path)
    write_records(tmp_path, pairs=3)
    card = card_of(checkpoint)
    assert card.examples == ()
    assert len(card.notes) == 1
    assert card.notes[0].startswith(f"{card.name}: ")
    assert card.trained_on[0].pairs == 2564


def test_a_table_that_is_neither_on_disk_nor_in_the_cache_is_noted(tmp_path, monkeypatch):
    checkpoint = write_project(tmp_path)
    shutil.rmtree(tmp_path / RECORDS)
    monkeypatch.setattr(TrainingRecord, "_cache_folder", lambda record: tmp_path / "cache")
    (note,) = card_of(checkpoint).notes
    assert Message("serving.content_not_fetched", path=RECORDS).in_text(note)


def test_a_table_that_changed_is_read_from_dvcs_cache(tmp_path, monkeypatch):
    checkpoint = write_project(tmp_path)
    (part,) = part_paths(tmp_path / RECORDS)
    file_list = json.dumps([{"md5": dvc_hash(part), "relpath": part.name}])
    for hash_, content in ((dvc_hash(tmp_path / RECORDS), file_list.encode()), (dvc_hash(part), part.read_bytes())):
        cached = tmp_path / "cache/files/md5" / hash_[:2] / hash_[2:]
        cached.parent.mkdir(parents=True)
        cached.write_bytes(content)
    part.write_text("another run's")
    monkeypatch.setattr(model_card, "run_dvc", lambda folder, *words: f"{tmp_path}/cache\n")
    assert len(card_of(checkpoint).examples) == 6


def test_a_checkpoint_that_is_not_the_recorded_one_has_no_record(tmp_path):
    checkpoint = write_project(tmp_path)
    (checkpoint / "model.safetensors").write_text("others")
    card = card_of(checkpoint)
    assert card.trained_on == ()
    assert card.examples == ()


def test_a_copy_of_a_checkpoint_beside_the_recorded_one_has_no_record(tmp_path):
    checkpoint = write_project(tmp_path)
    copy = shutil.copytree(checkpoint, tmp_path / "data/old/checkpoint")
    assert card_of(copy).trained_on == ()


def write_file_list(root: Path, checkpoint: Path) -> None:
    """Write the list of a checkpoint's files to the cache of DVC."""
    hash_ = dvc_hash(checkpoint)
    files = [{"md5": dvc_hash(file), "relpath": file.name} for file in sorted(checkpoint.iterdir())]
    cached = root / ".dvc/cache/files/md5" / hash_[:2] / hash_[2:]
    cached.parent.mkdir(parents=True)
    cached.write_text(json.dumps(files))


def test_a_large_checkpoint_is_recognised_by_its_manifest_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(model_card, "MAX_HASHED_BYTES", 10)
    checkpoint = write_project(tmp_path)
    write_file_list(tmp_path, checkpoint)
    (checkpoint / "model.safetensors").write_text("not read, because it is large")
    assert card_of(checkpoint).trained_on[0].pairs == 2564
    (checkpoint / "manifest.json").write_text('{"family": "m3diff", "files": {"a": "another"}}')
    assert card_of(checkpoint).trained_on == ()


def test_a_report_of_another_mixture_gives_no_counts(tmp_path):
    checkpoint = write_project(tmp_path)
    (tmp_path / MIXTURE / "report.json").write_text('{"datasets": {"mini": {"pairs": {"train": 1}}}}')
    assert card_of(checkpoint).trained_on == ()


def test_a_synthetic_dataset_has_the_reader_of_its_source():
    augment_settings = {"root": "raw/made", "source": {"reader": "minichange", "root": "raw/mini"}}
    entry = {"reader": "pairs", "root": "./raw/made"}
    stages = {
        "augment@made": {"params": {"params.yaml": {"augment.made": augment_settings}}},
        "convert": {"params": {"params.yaml": {"ingest.datasets": {"mine": entry}}}},
    }
    lock = Lock(text=yaml.safe_dump({"stages": stages}).encode())
    readers = TrainingRecord(lock, Path(), lambda path: None).readers()
    assert readers == {"mine": "minichange"}
    assert is_drawn(readers["mine"])
    assert not is_drawn(None)


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Return version 7 of a store. A test may change its tags and its run. Its records are in `tmp_path`."""
    from contextlib import nullcontext

    from m3diff.registry import tracking, versions

    checkpoint = write_project(tmp_path)
    lock = Lock(tmp_path / "dvc.lock")
    tags = {
        "dvc.data": lock.hashes(Path(MIXTURE) / "train")["convert outs"],
        "dvc.checkpoint": lock.hashes(Path(CHECKPOINT))["train outs"],
        "dvc.raw.mini": "x",
        "git.commit": "0" * 40,
    }
    run = SimpleNamespace(data=SimpleNamespace(params={"ingest.datasets.mini.reader": "minichange"}))
    version = SimpleNamespace(tags=tags, run_id="r", creation_timestamp=1_790_000_000_000)
    monkeypatch.setattr(tracking, "connect", lambda uri: nullcontext())
    monkeypatch.setattr(tracking, "find_run", lambda client, run_id: run)
    monkeypatch.setattr(versions, "find_version", lambda client, name, number: {"7": version}[number])
    monkeypatch.chdir(tmp_path)
    return SimpleNamespace(version=version, run=run, source=Source("m3diff/7", checkpoint, 16, None))


def test_a_version_is_described_by_the_record_with_its_hashes(registered):
    card = build_model_card(PARAMS, registered.source)
    assert card.notes == ()
    assert card.as_dict()["version"] == "7"
    assert card.date == "2026-09-21"
    assert card.trained_on == (TrainingData(dataset="mini", is_drawn=True, pairs=2564),)
    assert len(card.examples) == 6


def test_a_version_is_described_by_the_record_in_its_commit(registered, tmp_path, monkeypatch):
    lock = Lock(tmp_path / "dvc.lock")
    report = (tmp_path / MIXTURE / "report.json").read_bytes()
    files = {("f" * 40, Path(MIXTURE) / "report.json"): report}
    monkeypatch.setattr(model_card.git, "commit_at", {"0" * 40: "f" * 40}.get)
    monkeypatch.setattr(model_card.git, "read_from_commit", lambda commit, path: files.get((commit, path)))
    monkeypatch.setattr(model_card, "read_lock", {"f" * 40: lock}.get)
    (tmp_path / "dvc.lock").unlink()
    (tmp_path / MIXTURE / "report.json").unlink()
    card = build_model_card(PARAMS, registered.source)
    assert card.trained_on == (TrainingData(dataset="mini", is_drawn=True, pairs=2564),)


@pytest.mark.parametrize("tag", ["dvc.data", "dvc.checkpoint"])
def test_a_version_of_another_training_has_no_examples_from_the_checkout(tag, registered):
    registered.version.tags[tag] = "another"
    card = build_model_card(PARAMS, registered.source)
    assert card.examples == ()
    assert card.trained_on == (TrainingData(dataset="mini", is_drawn=True, pairs=None),)
    assert card.sentences()[0] == "Trained on pairs of mini."


def test_the_datasets_of_a_version_without_a_record_are_in_alphabetical_order(registered):
    registered.version.tags |= {"dvc.data": "another", "dvc.raw.clevr": "x", "dvc.raw.birds": "x"}
    card = build_model_card(PARAMS, registered.source)
    assert [data.dataset for data in card.trained_on] == ["birds", "clevr", "mini"]


def test_a_version_whose_record_cannot_be_looked_up_is_served_with_its_name(registered, monkeypatch):
    def refuse(*arguments: Any) -> Any:
        raise ConnectionError("MLflow is away")

    monkeypatch.setattr("m3diff.registry.versions.find_version", refuse)
    card = build_model_card(PARAMS, registered.source)
    assert card.name == "m3diff/7"
    assert card.family == "m3diff"
    assert "MLflow is away" in card.notes[0]


def source_of(checkpoint: Path) -> Source:
    return Source("m3diff/sha256-0123456789ab", checkpoint, 16, None)


def test_a_model_of_drawn_scenes_gets_a_note_before_its_captions(tmp_path):
    note = note_on_training(PARAMS, source_of(write_project(tmp_path)))
    assert note is not None
    assert "mini (2,564)" in note
    assert "never seen a photograph" in note
    assert "\n" not in note


def test_a_model_of_other_data_or_without_a_record_gets_no_note(tmp_path):
    assert note_on_training(PARAMS, source_of(write_project(tmp_path / "other", reader="spot_the_diff"))) is None
    (tmp_path / "alone").mkdir()
    assert note_on_training(PARAMS, source_of(tmp_path / "alone")) is None


def test_a_checkpoint_that_changed_since_the_training_gets_no_note(tmp_path):
    checkpoint = write_project(tmp_path)
    (checkpoint / "model.safetensors").write_text("others")
    assert note_on_training(PARAMS, source_of(checkpoint)) is None


def test_the_note_about_a_version_needs_only_the_tags_in_its_store(registered, monkeypatch):
    monkeypatch.setattr(model_card, "read_stored_tags", lambda uri, name, number: registered.version.tags)
    monkeypatch.setattr("m3diff.registry.tracking.connect", None)
    assert "never seen a photograph" in str(note_on_training(PARAMS, registered.source))
    registered.version.tags["dvc.data"] = "another"
    assert note_on_training(PARAMS, registered.source) is None


def test_a_damaged_store_gives_no_note_and_no_error(registered, monkeypatch):
    def refuse(*arguments: Any) -> Any:
        raise sqlite3.DatabaseError("file is not a database")

    monkeypatch.setattr(model_card, "read_stored_tags", refuse)
    assert note_on_training(PARAMS, registered.source) is None


def test_datasets_take_turns_and_one_that_must_not_be_shown_is_left_out(tmp_path):
    rows = []
    for name in ("a", "b", "withheld"):
        for number, split in enumerate(("train", "test", "val", "test")):
            row = {"id": f"{name}/{number}", "dataset": name, "split": split, "references": []}
            rows.append(row | write_pair(tmp_path, number, 0))
    write_record_table(tmp_path / "records", rows)
    test_rows = rows_of_test_split(part_paths(tmp_path / "records"), ["a", "b"])
    assert [row["id"] for row in test_rows] == ["a/1", "b/1", "a/3", "b/3"]


def test_a_version_from_before_records_had_a_list_of_images_has_examples(tmp_path):
    row = {"id": "a/1", "dataset": "a", "split": "test", "references": ["it fell"]}
    old_images = {"before": "1.png", "after": "2.png", "before_sha256": b"1", "after_sha256": b"2"}
    pl.DataFrame([row | old_images]).write_parquet(tmp_path / "records.parquet")
    (example,) = rows_of_test_split([tmp_path / "records.parquet"], ["a"])
    assert example["images"] == [{"uri": "1.png", "sha256": b"1"}, {"uri": "2.png", "sha256": b"2"}]
    assert example["reference"] == "it fell"


def test_a_damaged_table_is_named(tmp_path):
    part = tmp_path / "00000.parquet"
    part.write_text("cut off")
    with raises(DataError, "files.unreadable_output", path=part):
        list(rows_of_test_split([part], ["a"]))
