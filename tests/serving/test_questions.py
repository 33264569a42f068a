"""Test which questions get a note. test_app.py and test_caption.py test the note in answers."""

import pytest

from m3diff.serving.questions import NOTE, UNKNOWN_QUESTION_NOTE, note_about

WHAT_CHANGED = "What has changed from the first image to the second?"
COUNT = "How many buildings are new?"


@pytest.mark.parametrize("question", [WHAT_CHANGED, "what changed", "Describe the differences.", None])
def test_a_model_trained_to_say_what_changed_may_be_asked_so_in_any_words(question):
    assert note_about(question, WHAT_CHANGED) is None


@pytest.mark.parametrize("trained_question", [WHAT_CHANGED, None])
@pytest.mark.parametrize("question", ["Is a cup gone?", "What colour has the cup?", "Describe the first image."])
def test_any_other_question_is_noted(question, trained_question):
    assert note_about(question, trained_question) == NOTE


@pytest.mark.parametrize("question", [COUNT, None])
def test_a_models_own_question_is_not_noted(question):
    assert note_about(question, COUNT) is None


def test_a_note_names_the_question_of_the_training_if_it_does_not_ask_what_changed():
    assert repr(COUNT) in note_about(WHAT_CHANGED, COUNT)


def test_a_model_whose_question_is_unknown_is_noted_if_it_is_asked_none():
    assert note_about(None, None) == UNKNOWN_QUESTION_NOTE
    assert note_about(WHAT_CHANGED, None) is None
