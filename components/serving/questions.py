"""Add a note to answers if the model may have ignored the question.

Every training sample asks what changed, in one of several wordings. A model may answer any other question as if it had
been asked what changed. The field `note` of an answer warns about this, both over HTTP and in
`m3diff caption --question`.
"""

from m3diff.datasets.questions import asks_what_changed

NOTE = "the model was trained to say what changed; it may pass over a question that asks something else"


def note_about(question: str | None) -> str | None:
    """Return the note for an answer to this question, or None if the question asks what changed."""
    if question is None:
        return None
    return None if asks_what_changed(question) else NOTE
