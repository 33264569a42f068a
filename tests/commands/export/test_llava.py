import json
from pathlib import Path

import datasets
import pytest

from m3diff.commands.export.llava import export_llava
from m3diff.records.errors import DataError
from m3diff.stages.convert import stage
from tests.layouts import make_entry
from tests.stages.convert.test_convert import record, run

OWN = {"d": make_entry("pairs", Path())}


def build(folder: Path) -> Path:
    run(folder, [record("a", references=('say "hi"', "ünïcode → ok")), record("b", "test", ("", "gone"))])
    return folder / "mixture"


@pytest.mark.parametrize("lines", [False, True])
def test_records_have_the_form_of_llava_next(tmp_path, lines):
    written = export_llava(OWN, build(tmp_path), tmp_path / "llava", lines)
    assert written == {"train": 2, "test": 1}
    text = (tmp_path / f"llava/train.{'jsonl' if lines else 'json'}").read_text("utf-8")
    records = [json.loads(line) for line in text.splitlines()] if lines else json.loads(text)
    first = records[0]
    assert first["image"] == first["images"] == ["a.png", "a_2.png"]
    assert [turn["from"] for turn in first["conversations"]] == ["human", "gpt"]
    assert first["conversations"][0]["value"].startswith("<image><image>\n")
    assert first["conversations"][0]["value"].count("<image>") == len(first["image"])
    assert [r["conversations"][1]["value"] for r in records] == ['say "hi"', "ünïcode → ok"]
    assert first["metadata"] == {"dataset": "d", "split": "train"}


def test_image_paths_are_absolute_where_that_is_asked_for(tmp_path, monkeypatch):
    mixture = build(tmp_path)
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path / "project")
    export_llava(OWN, mixture, tmp_path / "llava", absolute=True)
    (first, *_) = json.loads((tmp_path / "llava/train.json").read_text("utf-8"))
    root = str(tmp_path / "project")
    assert first["image"] == first["images"] == [f"{root}/a.png", f"{root}/a_2.png"]


def test_dataset_info_tells_llama_factory_the_columns(tmp_path):
    export_llava(OWN, build(tmp_path), tmp_path / "llava")
    info = json.loads((tmp_path / "llava/dataset_info.json").read_text())
    assert info["m3diff_train"] == {
        "file_name": "train.json",
        "formatting": "sharegpt",
        "columns": {"messages": "conversations", "images": "images"},
    }
    loaded = datasets.load_dataset("json", data_files=str(tmp_path / "llava/train.json"), cache_dir=str(tmp_path / "c"))
    assert set(info["m3diff_train"]["columns"].values()) <= set(loaded["train"].column_names)
    assert loaded["train"].num_rows == 2


def test_without_samples_the_remedy_is_named(tmp_path):
    with pytest.raises(DataError, match="run `m3diff convert` first"):
        export_llava(OWN, tmp_path / "nowhere", tmp_path / "llava")


def test_empty_references_are_left_out_of_their_split_alone(tmp_path):
    assert export_llava(OWN, build(tmp_path), tmp_path / "llava", lines=True) == {"train": 2, "test": 1}
    (line,) = (tmp_path / "llava/test.jsonl").read_text("utf-8").splitlines()
    assert json.loads(line)["id"] == "d/b#1"
    (tmp_path / "empty").mkdir()
    run(tmp_path / "empty", [record("a", "test", ("",))])
    assert export_llava(OWN, tmp_path / "empty" / "mixture", tmp_path / "none") == {"test": 0}
    assert json.loads((tmp_path / "none/test.json").read_text()) == []
    assert not (tmp_path / "llava/val.jsonl").exists()
    assert list(json.loads((tmp_path / "llava/dataset_info.json").read_text())) == ["m3diff_train", "m3diff_test"]


def test_every_record_of_every_shard_is_exported_in_order(tmp_path, monkeypatch):
    monkeypatch.setattr(stage, "SHARD_SAMPLES", 2)
    samples, _ = run(tmp_path, [record(str(n), references=("a", "b")) for n in range(4)])
    export_llava(OWN, tmp_path / "mixture", tmp_path / "llava")
    records = json.loads((tmp_path / "llava/train.json").read_text())
    assert [each["id"] for each in records] == samples["id"].to_list()
    assert len(list((tmp_path / "mixture/train").iterdir())) == 4


def test_a_dataset_whose_page_states_no_licence_is_refused_unless_asked_for_and_conditions_are_told(tmp_path, capsys):
    run(tmp_path, [record("a"), record("a", dataset="spot"), record("a", dataset="birds")])
    entries = OWN | {"spot": make_entry("spot_the_diff", Path()), "birds": make_entry("birds_to_words", Path())}
    with pytest.raises(DataError, match=r"Spot-the-Diff \(licence: none stated\): redistribute: .* refused"):
        export_llava(entries, tmp_path / "mixture", tmp_path / "llava")
    assert not (tmp_path / "llava").exists()
    assert export_llava(entries, tmp_path / "mixture", tmp_path / "llava", allow_unlicensed=True) == {"train": 3}
    birds, spot = capsys.readouterr().out.splitlines()
    assert birds.startswith("birds: Birds-to-Words (licence: CC BY-SA 4.0): redistribute: texts: credit")
    assert spot.startswith("spot: Spot-the-Diff (licence: none stated): redistribute: ")


def test_a_dataset_of_unknown_licence_is_refused(tmp_path):
    run(tmp_path, [record("a")])
    with pytest.raises(DataError, match=r"d: in the mixture, but not in ingest\.datasets; run `m3diff convert` again"):
        export_llava({}, tmp_path / "mixture", tmp_path / "llava")
