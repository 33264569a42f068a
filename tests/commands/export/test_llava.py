"""The mixture as LLaVA records."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from m3diff.commands.export.llava import export_llava
from m3diff.records.errors import DataError
from m3diff.records.tables import read_table
from m3diff.stages.convert import stage as convert_stage
from m3diff.stages.convert.params import Convert
from m3diff.stages.ingest.stage import ingest
from tests.errors import raises
from tests.layouts import make_entry, run_validate, save_picture
from tests.stages.convert.test_convert import LIMITS, QUESTIONS, record
from tests.stages.convert.test_convert import run as convert

ENTRIES = {"d": make_entry("pairs", Path())}


def read_records(file: Path) -> list[dict[str, Any]]:
    return json.loads(file.read_text("utf-8"))


@pytest.fixture
def mixture(tmp_path: Path) -> Path:
    """A training pair with two references, and a test pair with an empty and a full one."""
    convert(tmp_path, [record("a", references=('say "hi"', "ünïcode → ok")), record("b", "test", ("", "gone"))])
    return tmp_path / "mixture"


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "llava"


def test_a_record_has_the_form_of_llava_next(mixture, out):
    export_llava(ENTRIES, mixture, out)
    first_record, second_record = read_records(out / "train.json")
    assert first_record["image"] == ["a.png", "a_2.png"]
    assert first_record["images"] == ["a.png", "a_2.png"]
    assert first_record["metadata"] == {"dataset": "d", "split": "train"}
    question, answer = first_record["conversations"]
    assert question["from"] == "human"
    assert question["value"].startswith("<image><image>\n")
    assert answer["from"] == "gpt"
    answers = [record["conversations"][1]["value"] for record in (first_record, second_record)]
    assert answers == ['say "hi"', "ünïcode → ok"]


def test_empty_references_are_left_out(mixture, out):
    assert export_llava(ENTRIES, mixture, out) == {"train": 2, "test": 1}
    assert [record["id"] for record in read_records(out / "test.json")] == ["d/b#1"]


def test_image_paths_are_absolute_if_that_is_asked_for(mixture, out, tmp_path, monkeypatch):
    project = tmp_path / "project"
    project.mkdir()
    monkeypatch.chdir(project)
    export_llava(ENTRIES, mixture, out, absolute=True)
    first_record = read_records(out / "train.json")[0]
    assert first_record["image"] == [f"{project}/a.png", f"{project}/a_2.png"]
    assert first_record["images"] == [f"{project}/a.png", f"{project}/a_2.png"]


def test_dataset_info_names_the_columns_for_llama_factory(mixture, out):
    export_llava(ENTRIES, mixture, out)
    info = json.loads((out / "dataset_info.json").read_text())
    columns = {"messages": "conversations", "images": "images"}
    assert list(info) == ["m3diff_train", "m3diff_test"]
    assert info["m3diff_train"] == {"file_name": "train.json", "formatting": "sharegpt", "columns": columns}


def test_every_record_of_every_shard_is_written_in_order(out, tmp_path, monkeypatch):
    monkeypatch.setattr(convert_stage, "SHARD_SAMPLES", 2)
    samples, _ = convert(tmp_path, [record(str(n), references=("a", "b")) for n in range(4)])
    assert export_llava(ENTRIES, tmp_path / "mixture", out) == {"train": 8}
    assert len(list((tmp_path / "mixture/train").iterdir())) == 4
    assert [record["id"] for record in read_records(out / "train.json")] == samples["id"].to_list()


def test_a_dialogue_has_a_tag_for_each_image_and_all_turns(out, tmp_path):
    history = [{"question": "How many?", "answer": "two"}]
    one_image = record("a")["images"][:1]
    fields = {"question": "Where?", "history": history}
    records = [
        record("a") | fields,
        record("b") | fields | {"images": one_image},
        record("c") | fields | {"images": []},
        record("e") | fields | {"question": "And in <image>?", "images": one_image},
    ]
    convert(tmp_path, records)
    export_llava(ENTRIES, tmp_path / "mixture", out)
    by_id = {exported["id"]: exported for exported in read_records(out / "train.json")}
    texts = {name: [message["value"] for message in exported["conversations"]] for name, exported in by_id.items()}
    assert texts == {
        "d/a#0": ["<image><image>\nHow many?", "two", "Where?", "it moved"],
        "d/b#0": ["<image>\nHow many?", "two", "Where?", "it moved"],
        "d/c#0": ["How many?", "two", "Where?", "it moved"],
        "d/e#0": ["How many?", "two", "And in <image>?", "it moved"],
    }
    assert by_id["d/a#0"]["images"] == ["a.png", "a_2.png"]
    assert "image" not in by_id["d/c#0"]


def test_a_text_beside_plain_pairs_has_no_tag_and_no_images(mixture, out, tmp_path):
    convert(tmp_path, [record("a"), record("b") | {"question": "What rhymes with cat?", "images": []}])
    export_llava(ENTRIES, tmp_path / "mixture", out)
    pair, text = read_records(out / "train.json")
    assert pair["images"] == ["a.png", "a_2.png"]
    assert text["conversations"][0]["value"] == "What rhymes with cat?"
    assert {"image", "images"}.isdisjoint(text)


def test_what_was_exported_is_read_as_the_same_samples(out, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    root = tmp_path / "raw"
    root.mkdir()
    images = [save_picture(root / f"{number}.png", number).name for number in range(4)]
    turns = [("How many?", "two"), ("Where?", "left"), ("Why <image>?", "x")]
    talk = [{"role": role, "content": text} for turn in turns for role, text in zip(ROLES, turn, strict=True)]
    rows = []
    for split, number in (("train", 0), ("val", 2)):
        pair = images[number : number + 2]
        rows.append({"images": pair, "messages": talk[:4], "split": split})
        rows.append(
            {"images": pair, "messages": [talk[0], {"role": "assistant", "content": ["one", "2"]}], "split": split}
        )
        rows.append({"images": pair[:1], "messages": talk[4:], "split": split})
        rows.append({"images": [], "messages": talk[2:4], "split": split})
    (root / "m.json").write_text(json.dumps(rows))
    columns = {"images": "images", "captions": "messages"}
    samples = samples_of(root, {"manifest": "m.json", "columns": columns}, tmp_path / "first")
    export_llava(ENTRIES, tmp_path / "first/mixture", out)
    options = {
        "manifest": {"train": "llava/train.json", "val": "llava/val.json"},
        "columns": {"images": "image", "captions": "conversations", "id": None},
    }
    samples_read_back = samples_of(tmp_path, options, tmp_path / "second")
    assert len(samples) == 2 * 5
    assert samples_read_back == samples


ROLES = ("user", "assistant")
QUESTIONS_FILE = QUESTIONS.absolute()


def samples_of(root: Path, options: dict[str, Any], folder: Path) -> list[tuple[Any, ...]]:
    """Return what the samples of a table are about, in any order of the image sets."""
    entries = {"d": make_entry("pairs", root.relative_to(Path.cwd()), **options)}
    ingest("d", entries["d"], folder / "cache.parquet", folder / "records")
    run_validate(folder, entries, near_duplicate_max_diff=None)
    convert_stage.convert(
        Convert.model_validate(LIMITS | {"questions": QUESTIONS_FILE}), entries, folder / "clean", folder / "mixture"
    )
    samples = []
    for split in ("train", "val"):
        for sample in read_table(folder / "mixture" / split).to_pylist():
            uris = tuple(os.path.normpath(image["uri"]) for image in sample["images"])
            history = tuple((turn["question"], turn["answer"]) for turn in sample["history"])
            samples.append((split, uris, history, sample["question"], sample["answer"]))
    return sorted(samples)


def test_a_split_without_a_reference_is_an_empty_list(out, tmp_path):
    convert(tmp_path, [record("a"), record("e", "test", ("",))])
    assert export_llava(ENTRIES, tmp_path / "mixture", out)["test"] == 0
    assert read_records(out / "test.json") == []


def test_a_mixture_that_does_not_exist_is_refused(out, tmp_path):
    with raises(DataError, "export.no_samples", path=tmp_path / "nowhere"):
        export_llava(ENTRIES, tmp_path / "nowhere", out)
    assert not out.exists()


def test_a_dataset_that_the_parameters_do_not_name_is_refused(out, tmp_path):
    convert(tmp_path, [record("a"), record("a", dataset="birds")])
    with raises(DataError, "export.dataset_not_in_params", key="birds"):
        export_llava(ENTRIES, tmp_path / "mixture", out)
    assert not out.exists()


@pytest.fixture
def licensed_entries(tmp_path: Path) -> dict[str, Any]:
    """Datasets without a licence and with conditions, beside one of the user; their mixture is in tmp_path."""
    convert(tmp_path, [record("a"), record("a", dataset="spot"), record("a", dataset="birds")])
    spot = make_entry("spot_the_diff", Path())
    birds = make_entry("birds_to_words", Path())
    return ENTRIES | {"spot": spot, "birds": birds}


def test_a_dataset_without_a_licence_is_refused(licensed_entries, out, tmp_path):
    with pytest.raises(DataError, match="Spot-the-Diff"):
        export_llava(licensed_entries, tmp_path / "mixture", out)
    assert not out.exists()


def test_conditions_of_licences_are_printed_if_the_user_allows_all_data(licensed_entries, out, tmp_path, capsys):
    assert export_llava(licensed_entries, tmp_path / "mixture", out, allow_unlicensed=True) == {"train": 3}
    birds, spot = capsys.readouterr().out.splitlines()
    assert birds.startswith("birds: Birds-to-Words (licence: CC BY-SA 4.0): redistribute: texts: credit")
    assert spot.startswith("spot: Spot-the-Diff (licence: none stated): redistribute: ")
