"""Add a note to answers if the model may have ignored the question or the turns before it, or if its own question is
unknown.

A model may answer any other question as if it had been asked the question that it was trained on. The field `note` of
an answer warns about this, both over HTTP and in `m3diff caption --question`.
"""

from m3diff.datasets.questions import asks_what_changed
from m3diff.models.contract import Takes
from m3diff.models.sample_limits import TrainedOn

MAY_PASS_OVER = "it may pass over a question that asks something else"
# For the answer to another question of a model that was trained to say what changed
NOTE = f"the model was trained to say what changed; {MAY_PASS_OVER}"
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
    if question == trained_question:
        return None
    if trained_question is not None and not asks_what_changed(trained_question):
        return f"the model was trained on {trained_question!r}; {MAY_PASS_OVER}"
    return None if asks_what_changed(question) else NOTE


def note_about_sample(takes: Takes, trained_on: TrainedOn, question: str | None, turns: int) -> str | None:
    """Return the note for the answer to a question, or None if there is nothing to note.

    A model that does not read questions gives every answer without a note, and so does a model that was trained on
    questions of datasets.

    Args:
        question: the question that was asked. None if the model's default question was asked.
        turns: number of turns of the dialogue, including the question.
    """
    if not takes.questions or trained_on.own_questions:
        return None
    if turns > trained_on.turns:
        return (
            f"the model was trained on dialogues of at most {trained_on.turns} turns; it may pass over some of these "
            f"{turns} turns"
        )
    # A model of dialogues was trained on other questions than the default one, which begins a dialogue
    return note_about(question, trained_on.question) if turns == 1 else None
