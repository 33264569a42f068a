"""LLaVA's own data: rows in the form of the two published files, images under other names, and bad rows.

The rows have the form that the files' pages and LLaVA's code describe (haotian-liu/LLaVA, `docs/Data.md` and
`llava/train/train.py`). The texts are our own.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from m3diff.datasets import DATASETS, llava_instruct, llava_pretrain
from m3diff.datasets.spec import read_with_notes
from m3diff.records.errors import DataError
from m3diff.stages.ingest.stage import to_records
from tests.errors import Message, raises
from tests.layouts import (
    BUS,
    DOG,
    LLAVA_INSTRUCT,
    LLAVA_PRETRAIN,
    WRITERS,
    conversation,
    judge_by_polars_alone,
    make_entry,
    run_ingest,
    run_validate,
    save_picture,
    write_json,
    write_llava,
)


def write_pretrain(root: Path) -> Path:
    return WRITERS["llava_pretrain"](root)


def write_instruct(root: Path, rows: Sequence[Mapping[str, Any]] = LLAVA_INSTRUCT) -> Path:
    return write_llava(root, llava_instruct.FILE, rows)


def test_captions_of_single_images_are_read_as_questions_with_the_image_first(tmp_path):
    rows = list(llava_pretrain.read(write_pretrain(tmp_path)))
    values = [(row.name, row.images, row.image_set, row.question, row.references, row.fault) for row in rows]
    assert values == [
        (
            "0",
            ("images/00453/004539375.jpg",),
            "00453/004539375.jpg",
            "Say briefly what is shown.",
            ["a grey mattress"],
            None,
        ),
        ("1", ("images/00223/002239345.jpg",), "00223/002239345.jpg", "Describe it.", ["a red kite"], None),
    ]
    assert {row.split for row in rows} == {"train"}
    assert rows[1].source == f"{llava_pretrain.FILE}, record 1"


def test_dialogues_text_alone_and_repeated_ids_are_read_row_by_row(tmp_path):
    rows = list(llava_instruct.read(write_instruct(tmp_path)))
    assert [row.fault for row in rows] == [None] * 4
    assert [row.name for row in rows] == ["0", "1", "2", "3"], "ids are repeated, and numbers and texts"
    assert [row.images for row in rows] == [(BUS,), (BUS,), (), (DOG,)]
    assert [row.image_set for row in rows] == [BUS, BUS, "no image 2", DOG]
    turns = (("What colour is it?", "It is blue."), ("Who is in it?", "Nobody."))
    assert rows[0].history == turns
    assert rows[0].question == "Where is it?"
    assert rows[1].question == "Is it day?\nAnswer in one word."
    assert rows[2].history == (("A rhyme?", "Sun, fun."),)
    assert rows[3].references == ["[0.1, 0.2]"], "an answer that is a JSON list is one answer"


def test_every_record_has_a_question_of_its_own_and_a_dialogue_is_one_record(tmp_path):
    entry = make_entry("llava_instruct", write_instruct(tmp_path))
    records, _ = to_records("d", entry, llava_instruct.read(tmp_path))
    assert [record["fault"] for record in records] == [None] * 4
    assert all(record["id"] != record["image_set"] for record in records)
    assert [len(record["history"]) for record in records] == [2, 0, 1, 0]


def test_splits_are_drawn_by_image_if_the_option_asks_for_it(tmp_path):
    rows = [
        {"image": f"coco/{number // 2}.jpg", "conversations": conversation("A?", str(number))} for number in range(80)
    ]
    rows += [{"conversations": conversation("B?", str(number))} for number in range(80)]
    write_json(tmp_path / llava_instruct.FILE, rows)
    read_rows, notes = read_with_notes(
        DATASETS["llava_instruct"], tmp_path, {"split": {"test": 0.2, "val": 0.2, "seed": 1}}
    )
    assert Counter(row.split for row in read_rows).keys() == {"train", "val", "test"}
    splits_of_image: dict[Any, set[Any]] = {}
    for row in read_rows:
        splits_of_image.setdefault(row.image_set, set()).add(row.split)
    assert {len(splits) for splits in splits_of_image.values()} == {1}
    assert len(notes) == 1


@pytest.mark.parametrize("option", [{"images": ""}, {"images": "photos"}, {"manifest": "part.json", "images": ""}])
def test_file_and_folder_of_the_images_are_options(tmp_path, option):
    write_json(tmp_path / option.get("manifest", llava_pretrain.FILE), LLAVA_PRETRAIN)
    first_row = next(iter(llava_pretrain.read(tmp_path, **option)))
    folder = f"{option['images']}/" if option["images"] else ""
    assert first_row.images == (f"{folder}00453/004539375.jpg",)


OCR = [
    {
        "image": f"ocr_vqa/images/{number}.jpg",
        "conversations": conversation("<image>\nWho wrote it?", f"Author {number}"),
    }
    for number in range(5)
]


def test_an_image_under_another_suffix_is_read_and_counted(tmp_path):
    write_instruct(tmp_path, OCR)
    folder = tmp_path / "ocr_vqa/images"
    (folder / "1.jpg").rename(folder / "1.gif")
    (folder / "2.jpg").unlink()
    save_picture(folder / "2.png", 2)
    (folder / "3.jpg").unlink()
    rows, notes = read_with_notes(DATASETS["llava_instruct"], tmp_path, {})
    names = [row.images[0].removeprefix("ocr_vqa/images/") for row in rows]
    assert names == ["0.jpg", "1.gif", "2.png", "3.jpg", "4.jpg"]
    assert [row.image_set for row in rows] == [row["image"] for row in OCR], "the name does not depend on the download"
    assert notes == [
        "2 rows name a file that exists with another suffix, which is read; the first is ocr_vqa/images/1.gif"
    ]


def test_rows_without_their_image_go_to_quarantine_up_to_the_allowed_share(tmp_path, monkeypatch):
    judge_by_polars_alone(monkeypatch)
    write_instruct(tmp_path / "raw", OCR)
    for number in (1, 3):
        (tmp_path / f"raw/ocr_vqa/images/{number}.jpg").unlink()
    run_ingest(tmp_path / "raw", "llava_instruct")
    report = run_validate(tmp_path, max_quarantined_share=0.5, near_duplicate_max_diff=None)
    assert report.rows_out == 3
    quarantine = pl.read_parquet(tmp_path / "clean/quarantine")
    assert quarantine["id"].to_list() == ["mini/1", "mini/3"]
    assert quarantine["rules"].to_list() == [["images_present"]] * 2
    with raises(DataError, "validate.data_refused") as refused:
        run_validate(tmp_path, max_quarantined_share=0.3, near_duplicate_max_diff=None)
    (fault,) = refused.value.fields["faults"]
    assert fault.code == "validate.too_many_bad_rows"
    assert "record 1: image: " in fault.fields["rows"][0]
    assert "ocr_vqa/images/1.jpg" in fault.fields["rows"][0]


FAULTS: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "the assistant begins": (
        {"image": BUS, "conversations": conversation("A?", "x", "B?", "y")[1:]},
        "dialogue_begins_with_answer",
        {"key": "conversations.0", "role": "gpt"},
    ),
    "no answer": ({"image": BUS, "conversations": conversation("<image>\nA?")}, "question_without_answer", {"turn": 0}),
    "no turn": ({"image": BUS, "conversations": []}, "question_without_answer", {"turn": 0}),
    "no conversation": ({"id": 3, "image": BUS}, "missing_value", {"key": "conversations"}),
    "a text": ({"conversations": ["A?", "x"]}, "unexpected_value", {"key": "conversations"}),
    "a list of images": (
        {"image": [BUS], "conversations": conversation("A?", "x")},
        "unexpected_value",
        {"key": "image"},
    ),
    "an empty name": ({"image": "", "conversations": conversation("A?", "x")}, "empty_value", {"key": "image"}),
    "a mark without an image": (
        {"conversations": conversation("<image>\nA?", "x")},
        "marks_differ_from_images",
        {"marks": 1, "images": 0},
    ),
    "two marks": (
        {"image": BUS, "conversations": conversation("<image>\nA?", "x", "<image>B?", "y")},
        "marks_differ_from_images",
        {"marks": 2, "images": 1},
    ),
    "no object": (7, "unexpected_value", {"key": "record"}),
}


@pytest.mark.parametrize("case", FAULTS)
def test_a_row_that_cannot_be_read_is_a_fault_of_its_own(tmp_path, case):
    bad_row, code, fields = FAULTS[case]
    write_json(tmp_path / llava_instruct.FILE, [LLAVA_INSTRUCT[0], bad_row, LLAVA_INSTRUCT[2]])
    first_row, row, last_row = llava_instruct.read(tmp_path)
    assert (first_row.fault, last_row.fault) == (None, None)
    assert row.source == f"{llava_instruct.FILE}, record 1"
    assert row.name == "1"
    assert row.fault.code == f"datasets.{code}"
    assert {name: row.fault.fields[name] for name in fields} == fields


def test_system_messages_are_counted(tmp_path):
    rows = [{"conversations": [{"from": "system", "value": "be brief"}, *conversation("A?", "x")]}] * 2
    write_json(tmp_path / llava_instruct.FILE, rows)
    read_rows, notes = read_with_notes(DATASETS["llava_instruct"], tmp_path, {})
    assert [row.question for row in read_rows] == ["A?", "A?"]
    assert notes == ["the template of the model replaces 2 system messages of the conversations"]


def test_an_image_outside_the_root_is_a_fault_and_no_folder_there_is_listed(tmp_path):
    save_picture(tmp_path / "other/1.png", 1)
    root = write_instruct(tmp_path / "raw", [])
    write_json(
        root / llava_instruct.FILE, [{"image": "../other/1.jpg", "conversations": conversation("<image>\nA?", "x")}]
    )
    (record,), _ = to_records("d", make_entry("llava_instruct", root), llava_instruct.read(root))
    assert Message("ingest.unusable_image_path", key="image", value="text '../other/1.jpg'").in_text(record["fault"])


def test_published_rows_of_the_larger_file_are_the_sum_of_its_folders():
    sources_of_coco = (157_712, 82_783, 66_160, 48_447, 8_998)  # LLaVA-Instruct, VQAv2, A-OKVQA, RefCOCO, OKVQA
    assert llava_instruct.ROWS_BY_FOLDER["coco"] == sum(sources_of_coco)
    assert llava_instruct.ROWS == 665_298
