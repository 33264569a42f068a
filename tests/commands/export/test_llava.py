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
def test_records_have_the_form_of_llava_next_and_empty_references_are_left_out(tmp_path, lines):
    mixture, out = build(tmp_path), tmp_path / "llava"
    assert export_llava(OWN, mixture, out, lines) == {"train": 2, "test": 1}
    found = {}
    for split in ("train", "test"):
        text = (out / f"{split}.{'jsonl' if lines else 'json'}").read_text("utf-8")
        found[split] = [json.loads(line) for line in text.splitlines()] if lines else json.loads(text)
    first, _ = found["train"]
    assert first["image"] == first["images"] == ["a.png", "a_2.png"]
    assert [turn["from"] for turn in first["conversations"]] == ["human", "gpt"]
    assert first["conversations"][0]["value"].startswith("<image><image>\n")
    assert [each["conversations"][1]["value"] for each in found["train"]] == ['say "hi"', "ünïcode → ok"]
    assert first["metadata"] == {"dataset": "d", "split": "train"}
    assert [each["id"] for each in found["test"]] == ["d/b#1"]


def test_image_paths_are_absolute_where_asked_and_dataset_info_tells_llama_factory_the_columns(tmp_path, monkeypatch):
    mixture, out = build(tmp_path), tmp_path / "llava"
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path / "project")
    export_llava(OWN, mixture, out, absolute=True)
    (first, *_) = json.loads((out / "train.json").read_text("utf-8"))
    root = str(tmp_path / "project")
    assert first["image"] == first["images"] == [f"{root}/a.png", f"{root}/a_2.png"]
    info = json.loads((out / "dataset_info.json").read_text())
    columns = {"messages": "conversations", "images": "images"}
    assert list(info) == ["m3diff_train", "m3diff_test"]
    assert info["m3diff_train"] == {"file_name": "train.json", "formatting": "sharegpt", "columns": columns}
    loaded = datasets.load_dataset("json", data_files=str(out / "train.json"), cache_dir=str(tmp_path / "cache"))
    assert set(columns.values()) <= set(loaded["train"].column_names)
    assert loaded["train"].num_rows == 2


def test_every_record_of_every_shard_is_exported_in_order_and_a_split_without_any_is_an_empty_list(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(stage, "SHARD_SAMPLES", 2)
    samples, _ = run(tmp_path, [*(record(str(n), references=("a", "b")) for n in range(4)), record("e", "test", ("",))])
    assert export_llava(OWN, tmp_path / "mixture", tmp_path / "llava") == {"train": 8, "test": 0}
    assert len(list((tmp_path / "mixture/train").iterdir())) == 4
    ids = [each["id"] for each in json.loads((tmp_path / "llava/train.json").read_text())]
    assert ids == [name for name in samples["id"] if not name.startswith("d/e")]
    assert json.loads((tmp_path / "llava/test.json").read_text()) == []


def test_what_is_missing_or_without_a_licence_is_refused_unless_asked_for_and_conditions_are_told(tmp_path, capsys):
    out = tmp_path / "llava"
    with pytest.raises(DataError, match="run `m3diff convert` first"):
        export_llava(OWN, tmp_path / "nowhere", out)
    run(tmp_path, [record("a"), record("a", dataset="spot"), record("a", dataset="birds")])
    entries = OWN | {"spot": make_entry("spot_the_diff", Path()), "birds": make_entry("birds_to_words", Path())}
    with pytest.raises(DataError, match=r"birds: in the mixture, but not in ingest\.datasets; run `m3diff convert`"):
        export_llava(OWN, tmp_path / "mixture", out)
    with pytest.raises(DataError, match=r"Spot-the-Diff \(licence: none stated\): redistribute: .* refused"):
        export_llava(entries, tmp_path / "mixture", out)
    assert not out.exists()
    assert export_llava(entries, tmp_path / "mixture", out, allow_unlicensed=True) == {"train": 3}
    birds, spot = capsys.readouterr().out.splitlines()
    assert birds.startswith("birds: Birds-to-Words (licence: CC BY-SA 4.0): redistribute: texts: credit")
    assert spot.startswith("spot: Spot-the-Diff (licence: none stated): redistribute: ")
