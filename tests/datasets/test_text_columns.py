"""Find the text columns with captions of a change, in tables like those of published edit datasets."""

import json
from pathlib import Path
from typing import Any

import pytest

from m3diff.commands.inspect import check
from m3diff.datasets.guess import TableGuess, guess_table
from m3diff.datasets.text_columns import find_text_columns
from tests.layouts import run_ingest, save_picture

ROWS = 8
EDITS = [f"remove the car near house {number}" for number in range(ROWS)]
INVERSE_EDITS = [f"add a car near house {number}" for number in range(ROWS)]
SOURCES = [f"a street with a car and house {number}" for number in range(ROWS)]
TARGETS = [f"a street with house {number}" for number in range(ROWS)]
CHANGES = [f"the car near house {number} is gone" for number in range(ROWS)]
LABELS = ["remove object", "add object"] * (ROWS // 2)
QUESTIONS = ["What has changed?"] * ROWS


def write(root: Path, before: str = "before", after: str = "after", **texts: Any) -> TableGuess:
    """Write a table of pairs with columns of texts, and return the guess of how to read it."""
    rows = []
    for number in range(ROWS):
        for shade, side in enumerate("pq"):
            save_picture(root / side / f"{number}.png", number, 90 * shade)
        images = {before: f"p/{number}.png", after: f"q/{number}.png"}
        rows.append(images | {name: column[number] for name, column in texts.items()} | {"split": "train"})
    (root / "data.json").write_text(json.dumps(rows))
    return guess_table(root)


def answers_of(guessed: TableGuess) -> list[Any]:
    return [answer["columns"]["captions"] for doubt in guessed.doubts for answer in doubt.answers]


CORPORA = {
    "a target caption and an edit": {"target_caption": TARGETS, "edit": EDITS},
    "HQ-Edit": {"input": SOURCES, "edit": EDITS, "inverse_edit": INVERSE_EDITS, "output": TARGETS},
    "UltraEdit": {"source_caption": SOURCES, "target_caption": TARGETS, "edit_instruction": EDITS},
    "InstructPix2Pix": {"original_prompt": SOURCES, "edit_prompt": EDITS, "edited_prompt": TARGETS},
    "InstructPix2Pix of the web": {"input": SOURCES, "edit": EDITS, "output": TARGETS},
    "SEED-Data-Edit": {"source_caption": SOURCES, "instruction": EDITS, "target_caption": TARGETS},
    "AnyEdit": {"edit": EDITS, "input": SOURCES, "output": TARGETS, "edit_type": LABELS},
    "a description of one image and a change": {"image_description": TARGETS, "change": CHANGES},
    "captions by side and a request": {"caption_before": SOURCES, "caption_after": TARGETS, "request": EDITS},
    "sides first": {"before_caption": SOURCES, "after_caption": TARGETS, "modification": EDITS},
    "texts by side": {"src_text": SOURCES, "tgt_text": TARGETS, "edit_text": EDITS},
    "a bare text": {"text": TARGETS, "edit": EDITS},
    "a bare caption": {"caption": TARGETS, "instruction": EDITS},
    "a bare caption and a prompt": {"caption": TARGETS, "prompt": EDITS},
    "an answer and an instruction": {"instruction": EDITS, "response": TARGETS},
    "a change caption": {"change_caption": CHANGES, "source_caption": SOURCES},
    "one prompt in all rows": {"edit_prompt": ["remove the lamp"] * ROWS, "target_caption": TARGETS},
    "a change under a name of its own": {"target_caption": TARGETS, "what_happened": CHANGES},
    "an image's caption and a change under a name of its own": {"image_caption": TARGETS, "what_happened": CHANGES},
    "a delta": {"caption": TARGETS, "delta": CHANGES},
    "a bare caption and a short word for an instruction": {"output": TARGETS, "instr": EDITS},
    "an edit that is called a query": {"query": EDITS, "answer": TARGETS},
    "differences": {"diff": CHANGES, "original_caption": SOURCES},
}
DATA = {"edit_type"}


@pytest.mark.parametrize("name", CORPORA)
def test_a_column_of_a_change_beside_descriptions_is_among_the_answers(tmp_path, name):
    texts = CORPORA[name]
    answers = answers_of(write(tmp_path, **texts))
    assert {*texts} - DATA <= {answer for answer in answers if isinstance(answer, str)}
    lines, is_sound = check(tmp_path, {})
    assert not is_sound
    assert all(any(text in line for line in lines) for text in texts)


@pytest.mark.parametrize(
    ("name", "likeliest"),
    [
        ("a target caption and an edit", "edit"),
        ("HQ-Edit", "edit"),
        ("UltraEdit", "edit_instruction"),
        ("InstructPix2Pix", "edit_prompt"),
        ("AnyEdit", "edit"),
        ("a description of one image and a change", "change"),
        ("one prompt in all rows", "edit_prompt"),
        ("a bare text", "edit"),
    ],
)
def test_the_first_answer_is_the_change(tmp_path, name, likeliest):
    assert answers_of(write(tmp_path, **CORPORA[name]))[0] == likeliest


CLEAR = {
    "MagicBrush": ({"instruction": EDITS}, "instruction", []),
    "OmniEdit": ({"edited_prompt_list": [[edit, edit.upper()] for edit in EDITS]}, "edited_prompt_list", []),
    "a caption alone": ({"caption": CHANGES}, "caption", []),
    "a caption and notes": (
        {"caption": CHANGES, "notes": SOURCES, "weather": TARGETS},
        "caption",
        ["notes", "weather"],
    ),
    "a caption and the type of its change": ({"caption": CHANGES, "change_type": LABELS}, "caption", ["change_type"]),
    "a caption and labels of changes": ({"caption": CHANGES, "change": LABELS}, "caption", ["change"]),
    "a caption and a flag": ({"caption": CHANGES, "changed": ["yes", "no"] * (ROWS // 2)}, "caption", []),
    "a caption and the object": ({"caption": CHANGES, "edit_object": LABELS}, "caption", ["edit_object"]),
    "the documented name": ({"captions": CHANGES, "source_caption": SOURCES}, "captions", ["source_caption"]),
    "the task's question": ({"instruction": QUESTIONS, "output": CHANGES}, "output", []),
    "the task's question as a query": ({"query": QUESTIONS, "answer": CHANGES}, "answer", []),
    "several questions as queries": (
        {"query": ["What changed?", "What has changed?"] * (ROWS // 2), "answer": CHANGES},
        "answer",
        [],
    ),
    "the task's question as a prompt": ({"prompt": QUESTIONS, "caption": CHANGES}, "caption", []),
    "an edit and its object": ({"edit": EDITS, "object": ["car"] * ROWS}, "edit", []),
    "a system message": (
        {"instruction": QUESTIONS, "output": CHANGES, "system": ["You are helpful."] * ROWS},
        "output",
        [],
    ),
    "numbered": ({"caption_1": CHANGES, "caption_2": EDITS}, ["caption_1", "caption_2"], []),
}


@pytest.mark.parametrize("name", CLEAR)
def test_a_table_with_one_column_of_captions_needs_no_question(tmp_path, name):
    texts, captions, unread = CLEAR[name]
    guessed = write(tmp_path, **texts)
    lines, is_sound = check(tmp_path, {})
    assert is_sound, lines
    assert guessed.doubts == []
    assert guessed.options.get("columns", {}).get("captions", "captions") == captions
    notes = [note for note in guessed.notes if "text columns that are not read" in note]
    assert [note.split(": ")[-1].split(", ") for note in notes] == ([unread] if unread else [])
    assert run_ingest(tmp_path, "pairs", "own", **guessed.options).faults == 0


def test_the_columns_of_captions_are_named_without_paths_to_the_texts_inside_them():
    lists = [[{"caption": text}] for text in CHANGES]
    text_columns = find_text_columns({"change_caption": lists, "edit": EDITS})
    assert text_columns.answers == [{"captions": "change_caption.*.caption"}, {"captions": "edit"}]
    assert list(text_columns.names()) == ["change_caption", "edit"]


def test_empty_cells_say_nothing_about_a_column_of_questions():
    prompts = ["What changed?", *[" "] * (ROWS - 1)]
    text_columns = find_text_columns({"prompt": prompts, "caption": CHANGES})
    assert text_columns.answers == [{"captions": "caption", "question": "prompt"}]


@pytest.mark.parametrize("name", ["caption", "output"])
def test_an_instruction_is_the_question_of_the_other_answer_alone(tmp_path, name):
    guessed = write(tmp_path, **{name: TARGETS, "instruction": EDITS})
    columns = {str(entry["columns"]["captions"]): entry["columns"] for entry in guessed.entries()}
    assert "question" not in columns["instruction"]
    assert columns[name]["question"] == "instruction"


def test_the_order_of_images_and_of_texts_is_asked_in_all_combinations(tmp_path):
    guessed = write(tmp_path, "damaged", "repaired", **CORPORA["HQ-Edit"])
    entries = {(entry["columns"]["before"], entry["columns"]["captions"]) for entry in guessed.entries()}
    assert entries == {(side, name) for side in ("damaged", "repaired") for name in CORPORA["HQ-Edit"]}


def test_of_very_many_combinations_each_answer_is_shown(tmp_path):
    texts = {f"{word}_caption": SOURCES for word in ("source", "target", "global", "other", "short")}
    root = tmp_path
    write(root, "damaged", "repaired", edit=EDITS, **texts)
    rows = json.loads((root / "data.json").read_text())
    (root / "data.json").write_text(
        json.dumps([row | {"ruined": row["damaged"], "kept": row["damaged"]} for row in rows])
    )
    guessed = guess_table(root)
    shown = {
        entry["columns"]["captions"] for entry in guessed.entries() if isinstance(entry["columns"]["captions"], str)
    }
    assert shown == {"edit", *texts}
    pairs = {(entry["columns"]["before"], entry["columns"]["after"]) for entry in guessed.entries()}
    assert len(pairs) == 12
