"""Captions that are Python literals are refused with their row. Sentences that look like literals are accepted."""

import json
import re
from pathlib import Path

import pytest

from m3diff.commands.inspect import check
from m3diff.records.errors import DataError
from tests.errors import raises
from tests.layouts import run_ingest, save_picture, write_json

TEXTS = ("the lamp is gone", "a car left", "the man's door is open", 'it says "exit"', "the café is gone")
FORMS = {
    "bytes": lambda text: repr(text.encode()),
    "bytes between double quotes": lambda text: f'b"{text}"' if '"' not in text else f"b'{text}'",
    "capitals": lambda text: repr(text.encode()).replace("b", "B", 1),
    "unicode of Python 2": lambda text: f"u{text!r}",
    "raw": lambda text: f"r{text!r}",
    "raw bytes": lambda text: f"rb{text!r}",
    "bytes, raw": lambda text: f"bR{text!r}",
    "a format": lambda text: f"f{text!r}",
    "three quotes": lambda text: f"b'''{text}'''",
    "three double quotes": lambda text: f"u'''{text}\n'''",
    "between spaces": lambda text: f" {text.encode()!r}\n",
    "quoted again": lambda text: f'"{text.encode()!r}"' if '"' not in text else repr(text.encode()),
}
OPTIONS = {"manifest": "data.json", "columns": {"captions": "caption"}}


def write(root: Path, captions: list) -> None:
    rows = []
    for number, caption in enumerate(captions):
        for shade, side in enumerate(("before", "after")):
            save_picture(root / side / f"{number}.png", number, 90 * shade)
        images = {side: f"{side}/{number}.png" for side in ("before", "after")}
        rows.append({**images, "caption": caption, "split": "train"})
    write_json(root / "data.json", rows)


@pytest.mark.parametrize("form", FORMS)
def test_a_column_of_literals_is_refused_by_check_and_by_ingest(tmp_path, form):
    captions = [FORMS[form](text) for text in TEXTS]
    write(tmp_path, captions)
    lines, is_sound = check(tmp_path, {})
    assert not is_sound
    assert any("data.json, record 0" in line and re.search(r"\b5\b", line) for line in lines), "in five rows"
    with raises(DataError, "ingest.captions_in_doubt", dataset="own", path=tmp_path) as refused:
        run_ingest(tmp_path, "pairs", "own", **OPTIONS)
    assert "data.json, record 0" in "\n".join(refused.value.fields["questions"])


def test_the_escapes_of_a_literal_have_no_question_of_their_own(tmp_path):
    write(tmp_path, [repr(f"the café {number} is gone".encode()) for number in range(4)])
    rows = [row | {"split": "test"} for row in json.loads((tmp_path / "data.json").read_text())]
    write_json(tmp_path / "data.json", rows)
    lines, is_sound = check(tmp_path, {})
    assert not is_sound
    assert not any("confirmed" in line for line in lines)


def test_one_literal_among_captions_is_named_with_its_row(tmp_path):
    write(tmp_path, [*TEXTS[:3], "b'a tree was cut'", ["it fell", "u'it broke'"]])
    with raises(DataError, "ingest.captions_in_doubt", dataset="own", path=tmp_path) as refused:
        run_ingest(tmp_path, "pairs", "own", **OPTIONS)
    (question,) = refused.value.fields["questions"]
    assert "data.json, record 3" in question
    assert re.search(r"\b2\b", question), "in two rows"


@pytest.mark.parametrize(
    "caption",
    [
        "b'",
        "b's car left",
        "b's car is now near the boys'",
        "b' is where a' was, near c'",
        "b'x' was replaced by 'y'",
        "the sign says b'x'",
        "'it fell'",
        '"it fell"',
        "B 'x' is gone",
        "rub'x' is gone",
        "bob's",
        "u-turn 'left'",
    ],
)
def test_a_sentence_that_looks_like_a_literal_is_read_as_it_is(tmp_path, caption):
    write(tmp_path, [*TEXTS, caption])
    assert check(tmp_path, {})[1]
    assert run_ingest(tmp_path, "pairs", "own", **OPTIONS).references == {"train": 6}
