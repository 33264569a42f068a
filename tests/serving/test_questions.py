"""Test which questions get a note. test_app.py and test_caption.py test the note in answers."""

import pytest

from m3diff.serving.questions import NOTE, note_about


@pytest.mark.parametrize(
    "question",
    ["What has changed from the first image to the second?", "what changed", "Describe the differences.", None],
)
def test_questions_of_training_are_not_noted(question):
    assert note_about(question) is None


@pytest.mark.parametrize("question", ["Is a cup gone?", "What colour has the cup?", "Describe the first image."])
def test_any_other_question_is_noted(question):
    assert note_about(question) == NOTE
