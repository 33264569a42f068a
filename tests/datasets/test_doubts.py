"""Questions about the captions of a dataset: which are asked, with which answers, and which options answer them."""

from dataclasses import replace
from typing import Any

import pytest

from m3diff.datasets.doubts import Doubt, as_yaml, find_doubts
from m3diff.datasets.odd_captions import OddCaptions
from m3diff.datasets.spec import Row
from m3diff.records.errors import Fault


def rows_of(*captions: str | list[str], split: str = "train", question: str | None = None) -> list[Row]:
    """Return a row for each caption or list of captions, in a file with a header."""
    rows = []
    for number, caption in enumerate(captions):
        fields = {"name": str(number), "split": split, "images": ("a", "b"), "question": question}
        references = caption if isinstance(caption, list) else [caption]
        rows.append(Row(**fields, references=references, source=f"a.csv, line {number + 2}"))
    return rows


def doubts_about(rows: list[Row], is_user_dataset: bool = True, odd_captions: Any = (), **options: Any) -> list[Doubt]:
    return list(find_doubts(rows, options, is_user_dataset, odd_captions))


PLAIN = ("the lamp is gone", "a car left", "it says 'exit'", "two trees were cut")


def test_captions_of_a_person_raise_no_doubt():
    assert doubts_about(rows_of(*PLAIN)) == []


@pytest.mark.parametrize("is_user_dataset", [True, False], ids=["own", "published"])
@pytest.mark.parametrize(
    ("code", "printed_caption", "other_caption"),
    [
        ("datasets.captions_are_printed_lists", "['it  fell', 'it broke']", '["a car left"]'),
        ("datasets.captions_are_python_literals", "b'it  fell' ", "u'a car left'"),
    ],
    ids=["lists", "literals"],
)
def test_captions_that_a_program_printed_are_shown_with_the_first(
    code, printed_caption, other_caption, is_user_dataset
):
    (doubt,) = doubts_about(rows_of("it fell", [printed_caption] * 2, other_caption), is_user_dataset)
    example = " ".join(printed_caption.split())
    assert doubt.question == Fault(code, path="a.csv, line 3", example=example, rows=2)
    assert doubt.answers == [], "the file has to be mended"


def test_a_sentence_that_begins_like_a_literal_is_none_unless_half_of_captions_do():
    sentence = "b's car is near the boys'"
    assert doubts_about(rows_of(sentence, *PLAIN)) == []
    (doubt,) = doubts_about(rows_of(sentence, *PLAIN[:1]))
    assert doubt.question.code == "datasets.captions_are_python_literals"


WORDS = ["the", "lamp", "was", "red,", "too!"]


def test_captions_in_single_words_are_a_doubt_if_most_rows_have_them():
    (doubt,) = doubts_about(rows_of("it fell", WORDS, WORDS))
    fields = {"path": "a.csv, line 3", "words": WORDS[:4], "rows": 2}
    assert doubt.question == Fault("datasets.captions_are_single_words", **fields)
    assert doubt.answers == []
    assert doubts_about(rows_of("it fell", "it broke", WORDS, WORDS)) == [], "half of the rows"
    assert doubts_about(rows_of(["red", "blue", "gone"])) == [], "three short captions"


def test_a_separator_in_many_captions_is_a_doubt_until_the_option_answers_it():
    rows = rows_of("it fell", "it fell|it broke", "a|b", "it stood")
    (doubt,) = doubts_about(rows)
    fields = {"path": "a.csv, line 3", "value": "|", "captions": 2, "example": "it fell|it broke"}
    assert doubt.question == Fault("datasets.possible_separator", **fields)
    assert doubt.answers == [{"separator": "|"}, {"separator": ""}]
    assert doubts_about(rows, separator="") == []
    assert doubts_about(rows, is_user_dataset=False) == []


@pytest.mark.parametrize(
    "captions",
    [["it fell; broken"] * 4, ["it fell|"] * 4, ["it fell|it broke", *["it fell"] * 5]],
    ids=["one word after a semicolon", "nothing after it", "a sixth of the captions"],
)
def test_a_character_that_does_not_separate_captions_is_no_doubt(captions):
    assert doubts_about(rows_of(*captions)) == []


def test_texts_that_stand_for_no_caption_are_counted_and_may_be_listed():
    rows = rows_of("n/a", "it fell", "todo", "n/a", "")
    (doubt,) = doubts_about(rows)
    fields = {"path": "a.csv, line 2", "value": "n/a", "texts": "'n/a' (2); 'todo' (1)", "tested": 0}
    assert doubt.question == Fault("datasets.captions_say_nothing", **fields)
    assert doubt.answers == [{"no_caption": ["n/a", "todo"]}, {"no_caption": []}]
    assert doubt.is_sure, "no test pair is lost by it"
    (doubt,) = doubts_about(rows, no_caption=["N/A "])
    assert doubt.answers[0] == {"no_caption": ["N/A ", "todo"]}
    assert doubts_about(rows, no_caption=["n/a", "todo"]) == []
    assert doubts_about(rows, no_caption=[]) == []
    assert doubts_about(rows, is_user_dataset=False) == []


def test_an_empty_text_in_the_test_split_is_asked_about():
    (doubt,) = doubts_about(rows_of("", "it fell", split="test"))
    assert doubt.question.fields["tested"] == 1
    assert not doubt.is_sure


def test_of_many_different_texts_the_most_common_are_listed():
    texts = [f"{number}%" for number in range(8)]
    (doubt,) = doubts_about(rows_of("7%", *texts))
    assert doubt.question.fields["texts"].startswith("'7%' (2); ")
    assert doubt.question.fields["texts"].endswith("; and 3 more")


def odd(kind: str, test_count: int = 1) -> OddCaptions:
    return OddCaptions(kind, count=3, test_count=test_count, total=9, source="a.csv, line 2", example="I'm sorry")


def test_odd_captions_of_the_test_split_are_a_doubt_until_they_are_confirmed():
    rows = rows_of(*PLAIN)
    odd_captions = [odd("refusals"), odd("chat", test_count=0), odd("roles")]
    (doubt,) = doubts_about(rows, odd_captions=odd_captions, confirmed=["roles"])
    assert doubt.question.code == "datasets.odd_references_of_test"
    (description,) = doubt.question.fields["captions"]
    assert description.startswith(str(odd("refusals")))
    assert description.endswith(odd("refusals").remedy)
    assert doubt.answers == [{"confirmed": ["roles", "refusals"]}]
    assert doubts_about(rows, odd_captions=odd_captions, confirmed=["refusals", "roles"]) == []
    assert doubts_about(rows, is_user_dataset=False, odd_captions=odd_captions) == []


def test_quotes_and_escapes_of_printed_captions_are_no_doubt_of_their_own():
    odd_captions = [odd("literals"), odd("escapes"), odd("refusals")]
    doubt_about_list, doubt_about_refusals = doubts_about(rows_of("['a', 'b']"), odd_captions=odd_captions)
    assert doubt_about_list.question.code == "datasets.captions_are_printed_lists"
    assert doubt_about_refusals.answers == [{"confirmed": ["refusals"]}]
    (doubt,) = doubts_about(rows_of(*PLAIN), odd_captions=odd_captions)
    assert doubt.answers == [{"confirmed": ["literals", "escapes", "refusals"]}]


def test_answers_to_questions_and_values_that_are_no_captions_are_not_examined():
    rows = rows_of("none", "[1, 2]", WORDS, question="Which?")
    (row,) = rows_of("none")
    rows += [replace(row, references=references) for references in (None, "none", [None, 7])]
    assert doubts_about(rows) == []


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"separator": "\n", "columns": {"captions": "a"}}, r'{separator: "\n", columns: {captions: a}}'),
        ({"no_caption": ["für später", "-"]}, "{no_caption: [für später, '-']}"),
        ({"no_caption": ["a word " * 40]}, "{no_caption: ['" + "a word " * 40 + "']}"),
    ],
    ids=["a line break", "letters beyond ASCII", "a long text"],
)
def test_an_answer_is_one_line_of_yaml_in_the_order_of_its_options(value, text):
    assert as_yaml(value) == text
