"""Add a note to answers if the model may have ignored the question, or if its own question is unknown.

A model may answer any other question as if it had been asked the question that it was trained on. The field `note` of
an answer warns about this, both over HTTP and in `m3diff caption --question`.
"""

from m3diff.datasets.questions import asks_what_changed

# Added to an answer to another question, if the model was trained to say what changed
NOTE = "the model was trained to say what changed; it may pass over a question that asks something else"
UNKNOWN_QUESTION_NOTE = (
    "this checkpoint does not name the question that it was trained on, so it was asked what has changed"
)


def note_about(question: str | None, trained_question: str | None) -> str | None:
    """Return the note for an answer to a question, or None if the model was trained to answer it.

    Args:
        question: the question that was asked. None if the model's default question was asked.
        trained_question: the question that the model was trained on. None if it is unknown.
    """
    if question is None:
        return UNKNOWN_QUESTION_NOTE if trained_question is None else None
    has_trained_what_changed = trained_question is None or asks_what_changed(trained_question)
    if question == trained_question or (has_trained_what_changed and asks_what_changed(question)):
        return None
    return NOTE if has_trained_what_changed else NOTE.replace("to say what changed", f"on {trained_question!r}")
