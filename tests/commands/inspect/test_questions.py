"""What `m3diff data check` and the statistics say about questions, images and turns."""

import json
import re
from pathlib import Path

import pytest
import yaml

from m3diff.commands.inspect.statistics import write_statistics
from m3diff.datasets import pairs
from m3diff.records.schemas import NO_CHANGE
from tests.commands.inspect.folders import check_folder, printed_entries
from tests.layouts import save_picture, write_json, write_own_levir, write_record_table, write_rsrcc


def test_a_check_counts_kinds_images_turns_and_marks_with_their_first_rows(tmp_path):
    for number in range(4):
        save_picture(tmp_path / f"{number}.png", number)
    talks = [("A?", "x"), ("B?", "x", "C?", "y"), ("Is it <image>?", "x"), ("Is <image> red?", "x")]
    images = [["0.png", "1.png"], ["0.png", "1.png"], ["2.png"], ["3.png"]]
    rows = []
    for number, (texts, names) in enumerate(zip(talks, images, strict=True)):
        roles = ("user", "assistant") * 2
        messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
        kind = "count" if number else None
        rows.append({"images": names, "messages": messages, "kind": kind, "split": "train"})
    write_json(tmp_path / "m.json", rows)
    columns = {"images": "images", "captions": "messages", "kind": "kind"}
    entry = {"reader": "pairs", "root": tmp_path, "options": {"manifest": "m.json", "columns": columns}}
    _, output = check_folder(tmp_path, entry)
    lines = [line.strip() for line in output.split("\n")]
    assert "questions of their own: 4 of 4 rows" in lines
    assert "kinds of questions: count (3), no kind (1)" in lines
    assert "images a row: 2 (2), 1 (2, the first is m.json, record 2)" in lines
    assert "turns a row: 1 (3), 2 (1, the first is m.json, record 1)" in lines
    assert "<image> inside the text of a question: 2 rows, the first is m.json, record 2" in lines


def test_a_column_history_is_proposed_with_the_question(tmp_path):
    save_picture(tmp_path / "a.png", 1)
    save_picture(tmp_path / "b.png", 2)
    turns = [{"query": "Where?", "response": "left", "history": [["How many?", "two"]]}]
    write_json(tmp_path / "m.json", [{"images": ["a.png", "b.png"], "split": "train"} | turn for turn in turns])
    _, output = check_folder(tmp_path)
    (entry,) = printed_entries(output)
    assert entry["options"]["columns"] == {
        "images": "images",
        "captions": "response",
        "question": "query",
        "history": "history",
    }
    assert "turns a row: 2 (1)" in output


@pytest.mark.parametrize(
    "talk",
    [
        {"messages": [{"role": "user", "content": "How?"}, {"role": "assistant", "content": "like this"}]},
        {"query": "Where is it?", "response": "on the left"},
    ],
    ids=["messages", "columns"],
)
def test_a_column_of_system_messages_is_counted_and_not_proposed_as_captions(tmp_path, talk):
    save_picture(tmp_path / "a.png", 1)
    save_picture(tmp_path / "b.png", 2)
    row = {"before": "a.png", "after": "b.png", "system": "You are a helpful assistant.", "split": "train"}
    write_json(tmp_path / "m.json", [row | talk])
    is_sound, output = check_folder(tmp_path)
    assert is_sound, output
    assert "not read" not in output
    assert "replaces 1 system message" in output
    (entry,) = printed_entries(output)
    assert "system" not in entry["options"]["columns"]


def test_a_text_column_system_beside_captions_is_listed_as_not_read(tmp_path):
    save_picture(tmp_path / "a.png", 1)
    save_picture(tmp_path / "b.png", 2)
    row = {"before": "a.png", "after": "b.png", "captions": "it fell", "system": "the solar system"}
    write_json(tmp_path / "m.json", [row | {"split": "train"}])
    _, output = check_folder(tmp_path)
    assert "text columns that are not read: system" in output


def test_a_table_of_captions_has_no_lines_about_questions(tmp_path):
    save_picture(tmp_path / "a.png", 1)
    save_picture(tmp_path / "b.png", 2)
    write_json(tmp_path / "pairs.json", [{"before": "a.png", "after": "b.png", "captions": "x", "split": "train"}])
    _, output = check_folder(tmp_path)
    assert "questions of their own" not in output


def test_own_data_in_levir_ccs_layout_are_read_with_the_entry_of_the_check(tmp_path):
    root = write_own_levir(tmp_path / "mine")
    is_sound, output = check_folder(root)
    assert not is_sound
    assert "reader: levir_cc" not in output, "the entry that was refused"
    entry = yaml.safe_load(re.search(r"`(\{reader: .*?\})`", output)[1])
    assert entry["reader"] == "pairs"
    rows = list(pairs.read(Path(entry["root"]), **entry["options"]))
    assert [row.change_types == [NO_CHANGE] for row in rows] == [False, True, False, True]
    assert [row.split for row in rows] == ["train", "val", "test", "test"]
    is_sound, output = check_folder(root, entry)
    assert is_sound, output


def test_statistics_count_image_sets_and_questions(tmp_path):
    image = {"uri": str(save_picture(tmp_path / "a.png", 1)), "sha256": bytes(32)}
    fields = {"dataset": "d", "split": "train", "scene": "d/a", "change_types": [], "source": "row"}
    question = fields | {"image_set": "d/a", "images": [image], "references": ["one two"]}
    records = [
        question | {"id": "d/a?0", "question": "A?", "kind": "count"},
        question | {"id": "d/a?1", "question": "B?", "history": [{"question": "A?", "answer": "x"}]},
        fields | {"id": "d/b", "images": [image, image], "references": ["three"]},
    ]
    write_record_table(tmp_path / "records", records)
    figures = write_statistics(tmp_path)["d"]
    assert figures["pairs"] == 2
    assert figures["references_per_pair"] == 1.5
    assert figures["questions"] == 2
    assert figures["kinds"] == [("count", 1), ("no kind", 1)]
    assert figures["images"] == [(1, 2), (2, 1)]
    assert figures["turns"] == [(1, 1), (2, 1)]
    page = (tmp_path / "statistics.html").read_text()
    assert "2 questions of their own: count (1), no kind (1); turns: 1 (1), 2 (1); images: 1 (2), 2 (1)" in page
    assert json.loads((tmp_path / "statistics.json").read_text())["d"]["questions"] == 2


def test_questions_about_a_pair_count_as_one_pair_beside_the_published_number(tmp_path):
    _, output = check_folder(write_rsrcc(tmp_path))
    lines = [line.split() for line in output.split("\n")]
    assert ["train", "1", "2", "6,417", "87,016", "differs"] in lines
    assert ["test", "2", "3", "1,826", "21,999", "differs"] in lines
    assert ["kinds", "of", "questions:", "yes/no", "(5),", "choice", "(1)"] in lines
