"""Questions of a table's own: conversations in the forms of other programs, question columns, and bad rows."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from m3diff.datasets import pairs
from m3diff.records.errors import DataError, Fault
from m3diff.stages.ingest.stage import to_records
from tests.errors import Message, raises
from tests.layouts import make_entry, write_json


def llava(*texts: str) -> list[dict[str, Any]]:
    """Return a conversation in which the user begins."""
    return [{"from": ("human", "gpt")[number % 2], "value": text} for number, text in enumerate(texts)]


def messages(*texts: Any) -> list[dict[str, Any]]:
    return [{"role": ("user", "assistant")[number % 2], "content": text} for number, text in enumerate(texts)]


def read(root: Path, rows: list[dict[str, Any]], **options: Any) -> list[Any]:
    write_json(root / "m.json", rows)
    return list(pairs.read(root, manifest="m.json", **({"split": "train"} | options)))


IMAGES = {"images": "images"}
CONVERSATION = {"columns": IMAGES | {"captions": "conversations"}}
PICTURES = ["a.png", "b.png"]
PARTS = [{"type": "text", "text": "How many?"}, {"type": "text", "text": "Count."}]
MARKED_PARTS = [{"type": "image"}, {"type": "image_url", "image_url": {"url": "b.png"}}, *PARTS]


FORMS = {
    "LLaVA": ({"conversations": llava("<image>\n<image>\nHow many?\nCount.", "two")}, {}),
    "ShareGPT": ({"conversations": [{"from": "system", "value": "be brief"}, *llava("How many?\nCount.", "two")]}, {}),
    "OpenAI": ({"messages": messages(MARKED_PARTS, "two")}, {"captions": "messages"}),
    "ms-swift": ({"messages": messages("<image><image>How many?\nCount.", "two")}, {"captions": "messages"}),
    "parts without images": (
        {"messages": messages(PARTS, [{"type": "text", "text": "two"}])},
        {"captions": "messages"},
    ),
    "alpaca": (
        {"instruction": "How many?", "input": "Count.", "output": "two"},
        {"question": "{instruction}\n{input}", "captions": "output"},
    ),
    "a question column": ({"q": "How many?\nCount.", "a": ["two"]}, {"question": "q", "captions": "a"}),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_read_as_the_same_question(tmp_path, form):
    fields, columns = FORMS[form]
    (row,) = read(tmp_path, [fields | {"images": PICTURES}], columns=CONVERSATION["columns"] | columns)
    assert row.fault is None
    assert row.question == "How many?\nCount."
    assert row.references == ["two"]
    assert row.history == ()
    assert row.images == ("a.png", "b.png")
    assert row.image_set == row.scene == "a.png|b.png"
    assert row.name == "a.png|b.png?0"


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_conversations_are_read_from_json_lines_and_parquet(tmp_path, suffix):
    row = {"images": PICTURES, "conversations": llava("How many?", "two", "Where?", "left"), "kind": "count"}
    if suffix == "jsonl":
        (tmp_path / "m.jsonl").write_text(json.dumps(row))
    else:
        pl.DataFrame([row]).write_parquet(tmp_path / "m.parquet")
    columns = CONVERSATION["columns"] | {"kind": "kind"}
    (record,) = pairs.read(tmp_path, manifest=f"m.{suffix}", split="train", columns=columns)
    assert record.history == (("How many?", "two"),)
    assert record.question == "Where?"
    assert record.references == ["left"]
    assert record.kind == "count"


def write_table(root: Path, suffix: str, rows: list[dict[str, Any]]) -> Path:
    """Write a table whose cells are texts."""
    path = root / f"m.{suffix}"
    if suffix == "parquet":
        pl.DataFrame(rows).write_parquet(path)
    else:
        pl.DataFrame(rows).write_csv(path, separator="\t" if suffix == "tsv" else ",")
    return path


@pytest.mark.parametrize("talk", [llava, messages])
@pytest.mark.parametrize("suffix", ["csv", "tsv", "parquet"])
def test_a_conversation_that_is_a_json_text_is_read_like_a_list(tmp_path, suffix, talk):
    conversation = talk("<image><image>How many?", "two", 'Where,\n"exactly"?', "left")
    row = {"images": PICTURES, "conversations": conversation}
    (expected,) = read(tmp_path, [row], **CONVERSATION)
    table = write_table(tmp_path, suffix, [{name: json.dumps(cell) for name, cell in row.items()}])
    (record,) = pairs.read(tmp_path, manifest=table.name, split="train", **CONVERSATION)
    assert record.history == (("How many?", "two"),)
    assert replace(record, source="") == replace(expected, source="")


@pytest.mark.parametrize("column", ["conversations", "talk"])
def test_columns_of_before_and_after_may_stand_beside_a_json_text(tmp_path, column):
    cells = {"before": "a.png", "after": "b.png", column: json.dumps(llava("<image><image>How many?", "two"))}
    write_table(tmp_path, "csv", [cells])
    (row,) = pairs.read(tmp_path, manifest="m.csv", split="train", columns={"captions": column})
    assert (row.images, row.question, row.references) == (("a.png", "b.png"), "How many?", ["two"])


@pytest.mark.parametrize(
    ("cell", "images"),
    [
        ('["a.png", "b.png"]', ("a.png", "b.png")),
        ('["a.png"]', ("a.png",)),
        ("a.png", ("a.png",)),
        ("[1] a.png", ("[1] a.png",)),
        ("[]", ()),
        ("", ()),
        (" ", ()),
        (None, ()),
    ],
    ids=repr,
)
def test_a_cell_of_images_is_a_list_in_json_a_name_or_empty(tmp_path, cell, images):
    write_table(tmp_path, "parquet", [{"images": cell, "conversations": json.dumps(llava("How many?", "two"))}])
    (row,) = pairs.read(tmp_path, manifest="m.parquet", split="train", image_counts=[len(images)], **CONVERSATION)
    assert row.fault is None
    assert row.images == images
    assert row.question == "How many?"


def test_a_table_without_images_is_read_if_the_column_of_images_is_null(tmp_path):
    rows = [{"messages": json.dumps(messages(*texts))} for texts in (("A?", "x"), ("A?", "x", "B?", "y"))]
    write_table(tmp_path, "csv", rows)
    columns = {"images": None, "captions": "messages"}
    entry = make_entry("pairs", tmp_path, manifest="m.csv", split="test", columns=columns)
    records, _ = to_records("d", entry, pairs.read(tmp_path, **entry.options))
    assert [record["fault"] for record in records] == [None] * 3
    assert [record["images"] for record in records] == [[]] * 3
    assert [record["references"] for record in records] == [["x"], ["x"], ["y"]]
    assert [len(record["history"]) for record in records] == [0, 0, 1]


def test_a_caption_in_a_table_without_images_is_a_fault(tmp_path):
    write_table(tmp_path, "csv", [{"talk": "it fell"}])
    (row,) = pairs.read(tmp_path, manifest="m.csv", split="train", columns={"images": None, "captions": "talk"})
    assert row.fault == Fault("datasets.not_two_images", key="images", count=0, value="null")


CELLS = {"images": json.dumps(PICTURES), "talk": json.dumps(llava("A?", "x"))}
CELLS_THAT_ARE_NOT_JSON = {
    "printed by Python": ("talk", "[{'from': 'human', 'value': 'A?'}]", "invalid_json_in_cell", 3),
    "cut off": ("talk", CELLS["talk"][:-2], "invalid_json_in_cell", len(CELLS["talk"]) - 1),
    "a key twice": ("talk", '[{"from": "human", "from": "gpt"}]', "repeated_json_key", None),
    "not a number": ("talk", '[{"from": "human", "value": NaN}]', "no_json_value", None),
    "images printed by Python": ("images", "['a.png', 'b.png']", "invalid_json_in_cell", 2),
}


@pytest.mark.parametrize("case", CELLS_THAT_ARE_NOT_JSON)
def test_a_cell_that_is_not_json_is_a_fault_with_its_row_and_column(tmp_path, case):
    column, cell, code, position = CELLS_THAT_ARE_NOT_JSON[case]
    write_table(tmp_path, "csv", [CELLS, CELLS | {column: cell}])
    entry = make_entry("pairs", tmp_path, manifest="m.csv", split="train", columns=IMAGES | {"captions": "talk"})
    row, sound_row = pairs.read(tmp_path, **entry.options)
    assert sound_row.fault is None
    assert row.source == "m.csv, line 3"
    assert row.fault.code == f"datasets.{code}"
    assert row.fault.fields["key"] == column
    assert row.fault.fields.get("position") == position
    (record,), _ = to_records("d", entry, [row])
    assert record["fault"] == str(row.fault)


def test_every_cell_of_a_column_of_conversations_must_be_json(tmp_path):
    write_table(tmp_path, "csv", [{"images": CELLS["images"], "conversations": text} for text in ("it fell", " ")])
    words, empty = pairs.read(tmp_path, manifest="m.csv", split="train", **CONVERSATION)
    assert words.fault.code == "datasets.invalid_json_in_cell"
    assert words.fault.fields["key"] == "conversations"
    assert empty.fault == Fault("datasets.missing_value", key="conversations")


def test_a_text_in_brackets_stays_a_caption(tmp_path):
    texts = ["[a lamp] is out", '["a", "b"]', "{it} fell"]
    write_table(tmp_path, "csv", [{"before": "a.png", "after": f"{text}.png", "captions": text} for text in texts])
    rows = pairs.read(tmp_path, manifest="m.csv", split="train")
    assert [row.references for row in rows] == [["[a lamp] is out"], ["a", "b"], ["{it} fell"]]


def test_a_history_may_be_a_json_text(tmp_path):
    cells = {"images": '["a.png"]', "q": "Where?", "a": "left"}
    texts = ('[["How many?", "two"]]', "[]", "", '[["How many?", "two"')
    write_table(tmp_path, "csv", [cells | {"history": text} for text in texts])
    columns = IMAGES | {"question": "q", "captions": "a", "history": "history"}
    cut_off, with_turn, without_turn = pairs.read(tmp_path, manifest="m.csv", split="train", columns=columns)
    assert cut_off.fault.code == "datasets.invalid_json_in_cell"
    assert cut_off.fault.fields["key"] == "history"
    assert with_turn.history == (("How many?", "two"),)
    assert without_turn.history == ()
    assert without_turn.raw_rows == 2


def test_a_csv_with_a_column_of_questions_is_read(tmp_path):
    (tmp_path / "m.csv").write_text("before,after,query,reply,type\na.png,b.png,<image><image>How many?,2,count\n")
    columns = {"question": "query", "captions": "reply", "kind": "type"}
    (row,) = pairs.read(tmp_path, manifest="m.csv", split="train", columns=columns)
    assert (row.question, row.references, row.kind) == ("How many?", ["2"], "count")
    assert row.image_set == "a.png|b.png"


def test_a_column_history_has_the_earlier_turns(tmp_path):
    fields = {"images": PICTURES, "query": "Where?", "response": "left", "history": [["How many?", "two"]]}
    columns = IMAGES | {"question": "query", "captions": "response", "history": "history"}
    (row,) = read(tmp_path, [fields], columns=columns)
    assert row.history == (("How many?", "two"),)
    (bad,) = read(tmp_path, [fields | {"history": [["How many?"]]}], columns=columns)
    assert bad.fault.code == "datasets.unexpected_value"
    assert bad.fault.fields["key"] == "history"


@pytest.mark.parametrize(
    ("texts", "question", "history"),
    [
        (("<image> <image>\nWhich?", "x"), "Which?", ()),
        (("Which of <image> and <image>?", "x"), "Which of <image> and <image>?", ()),
        (("<image> or <image>?", "x"), "<image> or <image>?", ()),
        ((" Which? ", "x"), "Which?", ()),
        (("<image>\n<image>\nWhich?", "x", "Why?", "y"), "Why?", (("Which?", "x"),)),
        (("<image>\nWhich?", "x", "And <image>?", "y"), "And <image>?", (("<image>\nWhich?", "x"),)),
        (("<image><image>", "x"), "", ()),
    ],
    ids=["at the start", "in the text", "around a word", "none", "of a dialogue", "in two turns", "alone"],
)
def test_only_marks_at_the_start_of_the_first_question_are_removed(tmp_path, texts, question, history):
    (row,) = read(tmp_path, [{"images": PICTURES, "conversations": llava(*texts)}], **CONVERSATION)
    assert row.fault is None
    assert row.question == question
    assert row.history == history


def test_a_row_has_zero_one_or_two_images(tmp_path):
    talk = llava("Hello?", "hi")
    rows = [{"conversations": talk}, {"images": "a.png", "conversations": talk}]
    rows += [{"images": [*PICTURES[:number]], "conversations": talk} for number in range(3)]
    read_rows = read(tmp_path, rows, **CONVERSATION)
    assert [row.images for row in read_rows] == [(), ("a.png",), ("a.png", "b.png")]
    assert [row.raw_rows for row in read_rows] == [2, 2, 1]
    assert [row.image_set for row in read_rows] == [None, "a.png", "a.png|b.png"]
    assert read_rows[0].name == "no image?0"


def test_questions_about_the_same_images_are_records_of_one_image_set(tmp_path):
    rows = [
        {"images": PICTURES, "conversations": llava(*texts)}
        for texts in (("A?", "1"), ("B?", "2"), ("A?", "3"), ("A?", "1", "B?", "2"), ("B?", "4", "B?", "2"))
    ]
    records = read(tmp_path, rows, **CONVERSATION)
    assert [row.name for row in records] == [f"a.png|b.png?{number}" for number in range(4)]
    assert {row.image_set for row in records} == {"a.png|b.png"}
    assert [row.references for row in records] == [["1", "3"], ["2"], ["2"], ["2"]]


def test_an_id_names_one_question(tmp_path):
    rows = [{"id": "7", "images": PICTURES, "conversations": llava(text, "x")} for text in ("A?", "B?")]
    contradiction, record = read(tmp_path, rows, **CONVERSATION)
    assert record.name == "7"
    assert record.image_set == "a.png|b.png"
    assert contradiction.fault == Fault("datasets.repeated_id", key="id", source="m.json, record 0")


def test_an_answer_that_is_a_json_list_stays_one_answer(tmp_path):
    (row,) = read(tmp_path, [{"images": PICTURES, "conversations": llava("Where?", "[0.1, 0.2]")}], **CONVERSATION)
    assert row.references == ["[0.1, 0.2]"]
    columns = {"columns": IMAGES | {"question": "q", "captions": "a"}}
    cells = ["[0.1, 0.2]", '["left", "west"]']
    rows = read(tmp_path, [{"images": PICTURES, "q": f"{cell}?", "a": cell} for cell in cells], **columns)
    assert [row.references for row in rows] == [["[0.1, 0.2]"], ["left", "west"]]


def several(count: int) -> list[str]:
    return [f"answer {number}" for number in range(count)]


FAULTS = {
    "three images": (["a", "b", "c"], llava("A?", "x"), "too_many_images", {"limit": 2, "count": 3}),
    "one mark for two images": (
        PICTURES,
        llava("<image>A?", "x"),
        "marks_differ_from_images",
        {"marks": 1, "images": 2},
    ),
    "a mark without an image": ([], llava("<image>A?", "x"), "marks_differ_from_images", {"marks": 1, "images": 0}),
    "two user turns": (
        PICTURES,
        [*llava("A?"), *llava("B?", "x")],
        "turns_do_not_alternate",
        {"key": "conversations.1", "role": "human", "expected": "an answer"},
    ),
    "an answer first": (
        PICTURES,
        llava("A?", "x")[1:],
        "turns_do_not_alternate",
        {"key": "conversations.0", "role": "gpt", "expected": "a question"},
    ),
    "a tool": (
        PICTURES,
        [*messages("A?"), {"role": "tool", "content": "{}"}],
        "unknown_role",
        {"key": "conversations.1", "value": "text 'tool'"},
    ),
    "no answer": (PICTURES, llava("A?"), "question_without_answer", {"turn": 0}),
    "no answer at the end": (PICTURES, llava("A?", "x", "B?"), "question_without_answer", {"turn": 1}),
    "only a system message": (
        PICTURES,
        [{"role": "system", "content": "be brief"}],
        "question_without_answer",
        {"turn": 0},
    ),
    "several answers in a dialogue": (
        PICTURES,
        messages("A?", several(3), "B?", "x"),
        "several_answers_in_dialogue",
        {"turn": 0, "count": 3},
    ),
}


@pytest.mark.parametrize("case", FAULTS)
def test_a_conversation_that_cannot_be_read_is_a_fault_of_its_row(tmp_path, case):
    images, conversation, code, fields = FAULTS[case]
    sound = {"images": PICTURES, "conversations": llava("Z?", "z")}
    row, sound_row = read(tmp_path, [{"images": images, "conversations": conversation}, sound], **CONVERSATION)
    assert row.fault.code == f"datasets.{code}"
    assert {name: row.fault.fields[name] for name in fields} == fields
    assert sound_row.fault is None


def test_a_row_with_a_fault_has_no_fault_about_its_number_of_images(tmp_path):
    write_json(tmp_path / "m.json", [{"images": ["a.png"], "conversations": llava("A?")}])
    entry = make_entry("pairs", tmp_path, manifest="m.json", split="train", **CONVERSATION)
    (record,), _ = to_records("d", entry, pairs.read(tmp_path, **entry.options))
    assert Message("datasets.question_without_answer", key="conversations", turn=0).in_text(record["fault"])
    assert not Message("datasets.unexpected_value", key="images").in_text(record["fault"])


def test_a_list_of_answers_in_one_turn_is_its_references(tmp_path):
    (row,) = read(tmp_path, [{"images": PICTURES, "conversations": messages("A?", several(3))}], **CONVERSATION)
    assert row.references == several(3)


MIXED = [
    {"images": PICTURES, "conversations": llava("A?", "x")},
    {"images": ["a.png"], "conversations": llava("A?", "x")},
    {"conversations": llava("A?", "x")},
    {"images": ["a.png", "b.png", "c.png"], "conversations": llava("A?", "x")},
    {"images": PICTURES, "conversations": llava("A?", "x", "B?", "y")},
    {"images": PICTURES, "conversations": llava("C?")},
]


@pytest.mark.parametrize(
    ("options", "sources", "notes"),
    [
        (
            {"pairs_only": True},
            [0],
            [
                "rows skipped by pairs_only: 5: 1 image (1), 0 images (1), 3 images (1), 2 answers (1), no answer (1); "
                "the first is m.json, record 1"
            ],
        ),
        (
            {"image_counts": [0, 1, 2]},
            [5, 0, 1, 2, 4],
            ["rows skipped by image_counts: 1: 3 images (1); the first is m.json, record 3"],
        ),
        ({}, [3, 5, 0, 1, 2, 4], []),
    ],
    ids=["pairs only", "counts of images", "all"],
)
def test_rows_are_skipped_by_their_images_and_counted(tmp_path, options, sources, notes):
    write_json(tmp_path / "m.json", MIXED)
    rows = pairs.read(tmp_path, manifest="m.json", split="train", **CONVERSATION, **options)
    assert [row.source for row in rows] == [f"m.json, record {number}" for number in sources]
    assert rows.notes == notes


def test_different_system_messages_in_a_file_need_a_decision(tmp_path):
    systems = [[{"from": "system", "value": text}] for text in ("be brief", "be long", "be brief")]
    rows = [
        {"images": PICTURES, "conversations": [*system, *llava(f"{number}?", "x")]}
        for number, system in enumerate(systems)
    ]
    with raises(DataError, "datasets.options_do_not_match", names=["systems"]) as refused:
        read(tmp_path, rows, **CONVERSATION)
    (fault,) = refused.value.fields["faults"]
    assert fault.code == "datasets.several_systems"
    assert fault.fields["value"] == 2
    assert len(read(tmp_path, rows, confirmed=["systems"], **CONVERSATION)) == 3
    assert len(read(tmp_path, [rows[0], rows[2]], **CONVERSATION)) == 2


SYSTEM_LAYOUTS = {
    "LLaMA-Factory": ({"images": PICTURES, "conversations": llava("A?", "x")}, CONVERSATION["columns"]),
    "ms-swift": (
        {"images": PICTURES, "query": "A?", "response": "x", "history": [["B?", "y"]]},
        IMAGES | {"question": "query", "captions": "response", "history": "history"},
    ),
    "alpaca": (
        {"images": PICTURES, "instruction": "A?", "input": "B.", "output": "x"},
        IMAGES | {"question": "{instruction}\n{input}", "captions": "output"},
    ),
}


@pytest.mark.parametrize("layout", SYSTEM_LAYOUTS)
def test_a_column_of_system_messages_is_counted_and_not_stored(tmp_path, layout):
    fields, columns = SYSTEM_LAYOUTS[layout]
    (expected,) = read(tmp_path, [fields], columns=columns)
    rows = [fields | {"system": text} for text in ("be brief", " be brief ", "", None, 7)]
    write_json(tmp_path / "m.json", rows)
    reading = pairs.read(tmp_path, manifest="m.json", split="train", columns=columns)
    (row,) = reading
    assert replace(row, source="") == replace(
        expected, source="", references=expected.references * 5, raw_rows=5 * expected.raw_rows
    )
    assert reading.notes == ["the template of the model replaces 2 system messages of the conversations"]


@pytest.mark.parametrize("layout", SYSTEM_LAYOUTS)
def test_different_system_messages_in_a_column_need_a_decision(tmp_path, layout):
    fields, columns = SYSTEM_LAYOUTS[layout]
    rows = [fields | {"system": text} for text in ("be brief", "be long")]
    with raises(DataError, "datasets.options_do_not_match", names=["systems"]) as refused:
        read(tmp_path, rows, columns=columns)
    (fault,) = refused.value.fields["faults"]
    assert fault.code == "datasets.several_systems"
    assert fault.fields["value"] == 2
    assert read(tmp_path, rows, columns=columns, confirmed=["systems"])


def test_the_same_message_in_a_conversation_and_in_the_column_counts_once(tmp_path):
    talk = [{"from": "system", "value": "be brief"}, *llava("A?", "x")]
    write_json(tmp_path / "m.json", [{"images": PICTURES, "conversations": talk, "system": "be brief"}])
    reading = pairs.read(tmp_path, manifest="m.json", split="train", **CONVERSATION)
    assert [row.fault for row in reading] == [None]
    assert reading.notes == ["the template of the model replaces 1 system message of the conversations"]
    with raises(DataError, "datasets.options_do_not_match", names=["systems"]):
        read(tmp_path, [{"images": PICTURES, "conversations": talk, "system": "be long"}], **CONVERSATION)


@pytest.mark.parametrize(
    ("column", "counted"),
    [({"system": "prompt"}, True), ({}, False), ({"system": None}, False)],
    ids=["named", "not named", "null"],
)
def test_another_column_has_system_messages_only_if_the_entry_names_it(tmp_path, column, counted):
    rows = [{"images": PICTURES, "conversations": llava("A?", "x"), "prompt": text} for text in ("be brief", "be long")]
    columns = CONVERSATION["columns"] | column
    if counted:
        with raises(DataError, "datasets.options_do_not_match", names=["systems"]):
            read(tmp_path, rows, columns=columns)
    else:
        assert len(read(tmp_path, rows, columns=columns)) == 1


def test_a_column_system_has_another_meaning_if_the_entry_says_null(tmp_path):
    rows = [{"images": PICTURES, "conversations": llava("A?", "x"), "system": text} for text in ("solar", "sound")]
    assert len(read(tmp_path, rows, columns=CONVERSATION["columns"] | {"system": None})) == 1


def test_a_column_system_beside_captions_is_not_a_system_message(tmp_path):
    rows = [{"before": "a.png", "after": f"{text}.png", "captions": "x", "system": text} for text in ("one", "two")]
    write_json(tmp_path / "m.json", rows)
    reading = pairs.read(tmp_path, manifest="m.json", split="train")
    assert [row.references for row in reading] == [["x"], ["x"]]
    assert reading.notes == []


def test_a_column_of_system_messages_that_no_row_has_is_refused(tmp_path):
    rows = [{"images": PICTURES, "conversations": llava("A?", "x")}]
    with raises(DataError, "datasets.options_do_not_match", names=["columns"]) as refused:
        read(tmp_path, rows, columns=CONVERSATION["columns"] | {"system": "sytem"})
    assert [fault.code for fault in refused.value.fields["faults"]] == ["datasets.unknown_column"]
