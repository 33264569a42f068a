"""Guesses about a folder with tables: which file is the table, what its columns mean, and what the user is asked."""

import json
from pathlib import Path
from typing import Any

import pytest

from m3diff.datasets.doubts import Doubt
from m3diff.datasets.guess import MAX_COMBINATIONS, combine_answers, guess_table, table_files
from m3diff.records.errors import DataError, Fault
from tests.errors import raises

PAIR = {"before": "a.png", "after": "b.png", "captions": "the lamp is gone", "split": "train"}


def write_rows(path: Path, *rows: dict[str, Any]) -> None:
    path.write_text(json.dumps([PAIR | row for row in rows]))


def without(*names: str) -> dict[str, Any]:
    return {name: value for name, value in PAIR.items() if name not in names}


def test_of_several_tables_the_user_chooses_one(tmp_path):
    write_rows(tmp_path / "first.json", {})
    write_rows(tmp_path / "second.json", {})
    guess = guess_table(tmp_path)
    answers = [{"manifest": "first.json"}, {"manifest": "second.json"}]
    assert guess.doubts == [Doubt(Fault("datasets.several_tables", names=["first.json", "second.json"]), answers)]
    assert guess.options == answers[0]


def test_questions_about_one_of_several_tables_are_asked_with_the_choice(tmp_path):
    write_rows(tmp_path / "first.json", {"task": "edit"}, {"task": "count"})
    write_rows(tmp_path / "second.json", {})
    (doubt,) = guess_table(tmp_path).doubts
    assert doubt.question.code == "datasets.several_tables_with_questions"
    (question,) = doubt.question.fields["questions"]
    assert question.code == "datasets.several_tasks"
    manifests = [answer["manifest"] for answer in doubt.answers]
    assert manifests == ["first.json"] * 3 + ["second.json"]
    assert [answer.get("where") for answer in doubt.answers] == [{"task": "edit"}, {"task": "count"}, None, None]


def test_a_folder_without_a_table_names_what_is_wrong_with_each_file(tmp_path):
    (tmp_path / "images.json").write_text(json.dumps([without("captions")]))
    (tmp_path / "texts.json").write_text(json.dumps([without("before", "after")]))
    with raises(DataError, "datasets.no_table_of_pairs", path=tmp_path) as refused:
        guess_table(tmp_path)
    fault_of_images, fault_of_texts = refused.value.fields["faults"]
    assert fault_of_images == Fault(
        "datasets.no_column_of_captions", path=tmp_path / "images.json", columns=["before", "after", "split"]
    )
    assert fault_of_texts == Fault(
        "datasets.no_columns_of_images", path=tmp_path / "texts.json", columns=["captions", "split"]
    )


def test_names_of_images_in_folders_that_do_not_exist_are_no_columns_of_images(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps([without("before", "after") | {"file": "1.png"}]))
    with raises(DataError, "datasets.no_table_of_pairs") as refused:
        guess_table(tmp_path)
    (fault,) = refused.value.fields["faults"]
    assert fault.code == "datasets.no_columns_of_images"


def test_a_documented_table_is_read_without_a_question_and_other_files_are_named(tmp_path):
    write_rows(tmp_path / "annotations.json", {})
    write_rows(tmp_path / "a.json", {})
    guess = guess_table(tmp_path)
    assert guess.options == {"manifest": "annotations.json"}
    assert guess.doubts == []
    (note,) = (note for note in guess.notes if "a.json" in note.split())
    assert "annotations.json" not in note


def notes_of(folder: Path, *rows: dict[str, Any]) -> list[str]:
    write_rows(folder / "a.json", *rows)
    return guess_table(folder).notes


def test_columns_that_no_field_reads_are_named(tmp_path):
    *_, note = notes_of(tmp_path, {"camera": 3, "weather": 4}, {"camera": 5, "height": 6})
    assert note.startswith("a.json: ")
    assert note.endswith(": camera, weather, height")


def test_a_column_of_tasks_that_the_user_is_asked_about_is_not_called_unread(tmp_path):
    notes = notes_of(tmp_path, {"task": "edit", "camera": 3}, {"task": "count"})
    assert notes[-1].endswith(": camera")


def test_a_table_with_the_documented_columns_needs_no_note(tmp_path):
    assert notes_of(tmp_path, {}) == []


def test_a_column_of_a_few_tasks_asks_which_rows_describe_changes(tmp_path):
    write_rows(tmp_path / "a.json", {"task": "edit"}, {"task": "count"}, {"task": "edit"})
    guess = guess_table(tmp_path)
    answers = [{"where": {"task": "edit"}}, {"where": {"task": "count"}}, {}]
    assert guess.doubts == [Doubt(Fault("datasets.several_tasks", path="a.json", column="task"), answers)]


@pytest.mark.parametrize("tasks", [["edit"], [f"task {number}" for number in range(8)]], ids=["one", "eight"])
def test_one_task_or_many_different_texts_ask_nothing(tasks, tmp_path):
    write_rows(tmp_path / "a.json", *({"task": task} for task in tasks))
    assert guess_table(tmp_path).doubts == []


TALK = [{"role": "user", "content": "How many?"}, {"role": "assistant", "content": "two"}]


@pytest.mark.parametrize(
    ("fields", "images"),
    [({}, None), ({"picture": "a.png"}, "picture")],
    ids=["text alone", "one image"],
)
def test_conversations_may_have_one_image_or_none(fields, images, tmp_path):
    (tmp_path / "a.json").write_text(json.dumps([{"messages": TALK, "split": "train", **fields}]))
    columns = guess_table(tmp_path).options["columns"]
    assert columns["images"] == images
    assert columns["captions"] == "messages"


def test_conversations_whose_images_are_not_named_are_refused(tmp_path):
    talk = [{"role": "user", "content": "<image>How many?"}, TALK[1]]
    (tmp_path / "a.json").write_text(json.dumps([{"messages": talk, "split": "train"}]))
    with raises(DataError, "datasets.no_table_of_pairs"):
        guess_table(tmp_path)


def test_the_files_of_a_dataset_that_was_saved_to_disk_are_no_tables(tmp_path):
    for name in ("state.json", "dataset_info.json", ".hidden.json", "notes.txt"):
        (tmp_path / name).write_text("[]")
    assert table_files(tmp_path) == []
    (tmp_path / "state.json").unlink()
    assert table_files(tmp_path) == [tmp_path / "dataset_info.json"]
    assert table_files(tmp_path / "missing") == []


def doubt_of(name: str, count: int) -> Doubt:
    return Doubt(Fault("datasets.several_tasks"), [{"columns": {name: f"{name}{number}"}} for number in range(count)])


def test_every_combination_of_answers_is_an_entry(tmp_path):
    options = {"manifest": "a.json", "columns": {"id": "key"}}
    entries = combine_answers(options, [doubt_of("captions", 2), doubt_of("question", 2)])
    columns = [entry["columns"] for entry in entries]
    assert columns == [
        {"id": "key", "captions": captions, "question": question}
        for captions in ("captions0", "captions1")
        for question in ("question0", "question1")
    ]
    assert {entry["manifest"] for entry in entries} == {"a.json"}
    assert options["columns"] == {"id": "key"}


def test_of_many_combinations_those_with_one_other_answer_are_shown():
    doubts = [doubt_of("captions", 5), doubt_of("question", 6)]
    assert MAX_COMBINATIONS < 5 * 6
    entries = combine_answers({}, doubts)
    changed = [sorted(name for name in entry["columns"].values() if name[-1] != "0") for entry in entries]
    expected = [[], *([f"captions{number}"] for number in range(1, 5)), *([f"question{n}"] for n in range(1, 6))]
    assert changed == expected
