import json
from pathlib import Path

import datasets
import pytest

from components.export.llava import export_llava
from components.records import DataError
from tests.convert.test_convert import record, run


def build(folder: Path) -> Path:
    run(folder, [record("a", references=('say "hi"', "ünïcode → ok")), record("b", "test", ("", "gone"))])
    return folder / "mixture"


@pytest.mark.parametrize("lines", [False, True])
def test_records_have_the_form_of_llava_next(tmp_path, lines):
    written = export_llava(build(tmp_path), tmp_path / "llava", lines)
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


def test_dataset_info_tells_llama_factory_the_columns(tmp_path):
    export_llava(build(tmp_path), tmp_path / "llava")
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
        export_llava(tmp_path / "nowhere", tmp_path / "llava")
