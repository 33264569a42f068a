"""Scores of answers to questions: exact match, and yes/no, numbers and options read from sentences."""

from decimal import Decimal

import pytest

from m3diff.scoring.metrics.answers import (
    FormVerdict,
    compute,
    find_options,
    is_exact_match,
    judge_form,
    normalise_answer,
    read_choice,
    read_numbers,
)
from m3diff.scoring.pairs import ALL_PAIRS, EvalPair
from tests.scoring import bench


@pytest.mark.parametrize(
    ("text", "normal_text"),
    [
        ("  The  red-cube,\n and an apple! ", "redcube and apple"),
        ("“Yes。”", "yes"),
        ("３ Häuser", "3 häuser"),
        ("theatre another", "theatre another"),
        ("A", "a"),
        ("the", "the"),
        ("?", "?"),
        (" ", ""),
    ],
    ids=["English", "other punctuation", "full width", "words that begin like articles", "A", "the", "sign", "blank"],
)
def test_texts_are_normalised_as_in_squad(text, normal_text):
    assert normalise_answer(text) == normal_text


@pytest.mark.parametrize(
    ("prediction", "references", "is_match"),
    [
        ("The dog!", ["cat", "Dog"], True),
        ("two dogs", ["dog"], False),
        ("a", ["A"], True),
        ("", ["A"], False),
        ("", ["", " "], False),
        ("", [], False),
        ("3.5", ["3.5"], True),
    ],
)
def test_an_answer_matches_any_reference_that_is_not_blank(prediction, references, is_match):
    assert is_exact_match(prediction, references) is is_match


@pytest.mark.parametrize(
    ("text", "numbers", "has_other_words"),
    [
        ("2.", ["2"], False),
        ("Two", ["2"], False),
        ("1,200", ["1200"], False),
        ("-0.5", ["-0.5"], False),
        ("\u22123", ["-3"], False),
        (".5", ["0.5"], False),
        ("50%", ["50"], False),
        ("twenty-one", ["21"], False),
        ("one hundred and five", ["105"], False),
        ("two hundred sixteen", ["216"], False),
        ("twenty ten", ["20", "10"], False),
        ("ten five", ["10", "5"], False),
        ("There are two buildings.", ["2"], True),
        ("one of two", ["1", "2"], True),
        ("between 2-3 and 4", ["2", "3", "4"], True),
        ("0_to_10", [], True),
        ("a 3D view", [], True),
        ("hundred", [], True),
    ],
)
def test_numbers_are_read_in_digits_and_words(text, numbers, has_other_words):
    reading = read_numbers(text)
    assert reading.numbers == [Decimal(number) for number in numbers]
    assert reading.has_other_words is has_other_words


OPTIONS = {"A": "red car", "B": "blue car", "C": "nothing"}


@pytest.mark.parametrize(
    ("question", "options"),
    [
        ("Look at image A. What is it?\nA. a red car\nB. the blue car\n(C) Nothing!", OPTIONS),
        ("Which one: (a) a red car, (b) a blue car; (c) nothing", OPTIONS),
        ("A: red car B: blue car C: nothing", OPTIONS),
        ("Is it A. red?", {}),
        ("B. blue C. red", {}),
        ("What changed?", {}),
    ],
    ids=["lines", "brackets", "colons", "one option", "without A", "none"],
)
def test_the_options_of_a_question_have_consecutive_letters_from_a(question, options):
    assert find_options(question) == options


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("B", "B"),
        ("(b)", "B"),
        ("**B**", "B"),
        ("B. blue", "B"),
        ("B: red car", "B"),
        ("The answer is B.", "B"),
        ("answer: c", "C"),
        ("I choose option (A)", "A"),
        ("A red car", "A"),
        ("Blue car.", "B"),
        ("A blue car", "B"),
        ("a", "A"),
        ("D", None),
        ("a car", None),
        ("", None),
    ],
)
def test_an_option_is_named_by_its_letter_or_text(text, letter):
    assert read_choice(text, OPTIONS) == letter


CHOICES = "Which colour? A. red B. blue"


@pytest.mark.parametrize(
    ("question", "references", "prediction", "verdict"),
    [
        (CHOICES, ["B"], "blue", FormVerdict("choice", True)),
        (CHOICES, ["blue"], "The answer is A", FormVerdict("choice", False)),
        (CHOICES, ["A", "B"], "(b)", FormVerdict("choice", True)),
        ("How many? A. 2 B. 3", ["3"], "B", FormVerdict("choice", True)),
        (CHOICES, ["green"], "green", None),
        ("Is it?", ["Yes."], "yes, it is", FormVerdict("yes_no", True)),
        ("Is it?", ["true"], "Yes", FormVerdict("yes_no", True)),
        ("Is it?", ["no"], "It is not", FormVerdict("yes_no", False)),
        ("Is it?", ["no", "yes"], "Yes", FormVerdict("yes_no", True)),
        ("Is it?", ["yes", "it is"], "yes", None),
        ("Is it?", ["no change"], "no", None),
        ("How many?", ["two"], "There are 2.0 of them", FormVerdict("number", True)),
        ("How many?", ["2", "3"], "three", FormVerdict("number", True)),
        ("How many?", ["2"], "2 or 3", FormVerdict("number", False)),
        ("How many?", ["2", ""], "2", FormVerdict("number", True)),
        ("How many?", ["2 cars"], "2", None),
        ("How many?", [""], "", None),
    ],
)
def test_an_answer_is_read_in_the_form_that_all_references_have(question, references, prediction, verdict):
    assert judge_form(question, prediction, references) == verdict


def make_question(number: int, references: list[str], prediction: str, shuffled: str | None = None) -> EvalPair:
    return EvalPair(
        id=f"toy/{number}",
        dataset="toy",
        images=(),
        references=references,
        change_types=[],
        prediction=prediction,
        shuffled_prediction=shuffled,
        question="?",
    )


def test_groups_have_shares_of_right_answers_and_counts_of_questions():
    pairs = [
        make_question(0, ["2"], "two", shuffled="2"),
        make_question(1, ["yes"], "Yes", shuffled="no"),
        make_question(2, ["yes"], "no"),
        make_question(3, ["a red car"], "red car"),
    ]
    groups = {ALL_PAIRS: [pair.id for pair in pairs], "by_kind/count": ["toy/0"], "change": []}
    scores = compute(pairs, groups, bench.metric_inputs())
    assert scores.groups[ALL_PAIRS] == {
        "exact_match": 1 / 2,
        "yes_no_accuracy": 1 / 2,
        "number_accuracy": 1.0,
        "choice_accuracy": None,
        "questions": 4,
        "yes_no_questions": 2,
        "number_questions": 1,
        "choice_questions": 0,
        "exact_match_shuffled": 1 / 2,
        "exact_match_unshuffled": 1 / 2,
        "shuffled_questions": 2,
    }
    assert scores.groups["by_kind/count"]["exact_match"] == 0.0
    assert scores.groups["by_kind/count"]["number_accuracy"] == 1.0
    assert scores.groups["change"]["exact_match"] is None
    assert scores.pairs == {
        "toy/0": {"exact_match": False, "number_right": True},
        "toy/1": {"exact_match": True, "yes_no_right": True},
        "toy/2": {"exact_match": False, "yes_no_right": False},
        "toy/3": {"exact_match": True},
    }
    assert scores.absent == {}


def test_without_shuffled_answers_the_control_is_absent_with_a_reason():
    scores = compute([make_question(0, ["2"], "2")], {ALL_PAIRS: ["toy/0"]}, bench.metric_inputs())
    assert scores.groups[ALL_PAIRS]["exact_match_shuffled"] is None
    assert "predictions_shuffled.json" in scores.absent["exact_match_shuffled"]
