"""Read conversations about images, in the forms of LLaVA, ShareGPT, OpenAI, ms-swift and LLaMA-Factory.

    [{"from": "human", "value": "<image>\\n<image>\\nWhat changed?"}, {"from": "gpt", "value": "the lamp is out"}]
    [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What changed?"}]},
     {"role": "assistant", "content": "the lamp is out"}]

In a CSV file, the list is a JSON text in a cell. A Parquet file may also contain such texts.

A conversation becomes a question, the answers to it, and the turns before it. A system message is not kept, because the
template of a model has its own. An image mark (`<image>`) says where in the text an image is. Marks at the start of the
first question are removed, because images come first by default. Marks elsewhere stay in the text.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from m3diff.datasets.files import describe, parse_json
from m3diff.datasets.spec import unexpected
from m3diff.records.errors import DataError
from m3diff.records.sample import IMAGE_MARK

LEADING_MARKS = re.compile(rf"(?:\s*{IMAGE_MARK})+\s*")
# Columns that contain conversations in all of these forms, so that each of their cells must be one
CONVERSATION_COLUMNS = ("conversations", "messages")
# The beginning of a list of objects, as JSON or as Python prints it
LIST_OF_OBJECTS = re.compile(r"\s*\[\s*\{")
USER_ROLES = ("human", "user")
ASSISTANT_ROLES = ("gpt", "assistant")
SYSTEM_ROLES = ("system",)
# The column of LLaMA-Factory and ms-swift with the system message of a conversation, or of a question and an answer
SYSTEM_COLUMN = "system"


@dataclass(frozen=True)
class Conversation:
    """A question about images, with the turns before it. The values are not yet checked to be text.

    Attributes:
        history: questions and answers before the question.
        question: the last question.
        answers: the answer to the last question, or a list of answers to it.
        systems: system messages.
    """

    history: tuple[tuple[Any, Any], ...]
    question: Any
    answers: Any
    systems: tuple[str, ...] = ()


def parse_conversation(cell: Any, column: str) -> Any:
    """Return the list of messages that a table cell contains as JSON text. Return any other cell unchanged.

    A text in one of the CONVERSATION_COLUMNS must be JSON; if it is empty, the cell has no value, and None is returned.
    A text in another column may also be a caption, so it is parsed only if it begins as a list of objects.

    Raises:
        DataError: the text is not valid JSON.
    """
    if not isinstance(cell, str):
        return cell
    must_be_conversation = column.split(".")[-1] in CONVERSATION_COLUMNS
    if must_be_conversation and not cell.strip():
        return None
    if must_be_conversation or begins_as_conversation(cell):
        return parse_json(cell, column=column)
    return cell


def begins_as_conversation(cell: Any) -> bool:
    """Return whether a table cell is a text that begins as a list of objects, even if it cannot be read."""
    return isinstance(cell, str) and LIST_OF_OBJECTS.match(cell) is not None


def is_message(value: Any) -> bool:
    """Return whether a value is a message of a conversation: an object with a role."""
    return isinstance(value, Mapping) and ("from" in value or "role" in value)


def is_turn(value: Any) -> bool:
    """Return whether a value is a turn in a column `history`: a list with the texts of a question and its answer."""
    return isinstance(value, list) and len(value) == 2 and all(isinstance(text, str) for text in value)


def is_conversation(value: Any) -> bool:
    """Return whether a value is a list of messages."""
    return isinstance(value, list) and bool(value) and all(isinstance(message, Mapping) for message in value)


def role_of(message: Mapping[str, Any]) -> Any:
    """Return the role of a message as it is written, such as "human" or "user"."""
    return message.get("from", message.get("role"))


def read_conversation(messages: Sequence[Mapping[str, Any]], key: str) -> Conversation:
    """Return the turns of a conversation.

    Args:
        messages: the messages in order, each with a role (`from` or `role`) and a text (`value` or `content`).
        key: name of the column, for the error.

    Raises:
        DataError: a message has an unknown role, the messages do not alternate between the user and the assistant,
            or there is no answer, or a turn before the last has several.
    """
    systems = []
    turns: list[tuple[Any, Any]] = []
    question = None
    is_answer_expected = False
    for number, message in enumerate(messages):
        role = role_of(message)
        text = text_of_content(message.get("value", message.get("content")))
        if role in SYSTEM_ROLES:
            if isinstance(text, str) and text.strip():
                systems.append(text.strip())
            continue
        if role not in USER_ROLES + ASSISTANT_ROLES:
            raise DataError("datasets.unknown_role", key=f"{key}.{number}", value=describe(role))
        is_answer = role in ASSISTANT_ROLES
        if is_answer != is_answer_expected:
            expected = "an answer" if is_answer_expected else "a question"
            raise DataError("datasets.turns_do_not_alternate", key=f"{key}.{number}", role=role, expected=expected)
        if is_answer:
            turns.append((question, text))
        else:
            question = text
        is_answer_expected = not is_answer
    if not turns or is_answer_expected:
        raise DataError("datasets.question_without_answer", key=key, turn=len(turns))
    history = turns[:-1]
    question, answers = turns[-1]
    # An answer that depends on earlier turns continues one dialogue. Several answers would be several dialogues
    for number, (_, answer) in enumerate(turns if history else []):
        if isinstance(answer, list):
            raise DataError("datasets.several_answers_in_dialogue", key=key, turn=number, count=len(answer))
    return Conversation(tuple(history), question, answers, tuple(systems))


def read_history(value: Any, key: str) -> tuple[tuple[Any, Any], ...]:
    """Return the turns in a column `history` of LLaMA-Factory and ms-swift: a list of [question, answer], or its JSON.

    Raises:
        DataError: the value is not such a list.
    """
    if isinstance(value, str):
        value = parse_json(value, column=key) if value.strip() else None
    if not value:
        return ()
    turns = value if isinstance(value, list) else [value]
    if not all(isinstance(turn, list | tuple) and len(turn) == 2 for turn in turns):
        raise DataError(unexpected(key, "a list of [question, answer]", value))
    return tuple((question, answer) for question, answer in turns)


def text_of_content(content: Any) -> Any:
    """Return the text of a message. If its content is a list of parts, join their texts, with a mark for each image.

    Return a list of texts unchanged, because it lists several answers.
    """
    if not isinstance(content, list) or not all(isinstance(part, Mapping) for part in content):
        return content
    texts = []
    for part in content:
        kind = part.get("type")
        if kind in ("image", "image_url") or "image" in part or "image_url" in part:
            texts.append(IMAGE_MARK)
        elif part.get("text"):
            texts.append(str(part["text"]))
    return "\n".join(texts)


def count_marks(conversation: Conversation) -> int:
    """Return the number of image marks in the questions of a conversation."""
    questions = [question for question, _ in conversation.history] + [conversation.question]
    return sum(question.count(IMAGE_MARK) for question in questions if isinstance(question, str))


def without_leading_marks(conversation: Conversation) -> Conversation:
    """Remove the image marks of a conversation if all of them are at the start of its first question.

    White space around every question is removed, too.
    """
    first_question = _first_question(conversation)
    if isinstance(first_question, str):
        leading_marks = LEADING_MARKS.match(first_question)
        if leading_marks and leading_marks[0].count(IMAGE_MARK) == count_marks(conversation):
            first_question = first_question[leading_marks.end() :]
    return _with_first_question(conversation, first_question)


def without_marks_of_first_question(conversation: Conversation) -> Conversation:
    """Remove the image marks of the first question wherever they are, as LLaVA's code does.

    White space around every question is removed, too.
    """
    first_question = _first_question(conversation)
    if isinstance(first_question, str):
        first_question = first_question.replace(IMAGE_MARK, "")
    return _with_first_question(conversation, first_question)


def _first_question(conversation: Conversation) -> Any:
    return conversation.history[0][0] if conversation.history else conversation.question


def _with_first_question(conversation: Conversation, first_question: Any) -> Conversation:
    """Return the conversation with another first question, and without white space around its questions."""
    questions = [question for question, _ in conversation.history] + [conversation.question]
    questions[0] = first_question
    questions = [question.strip() if isinstance(question, str) else question for question in questions]
    answers = [answer for _, answer in conversation.history]
    return Conversation(
        history=tuple(zip(questions[:-1], answers, strict=True)),
        question=questions[-1],
        answers=conversation.answers,
        systems=conversation.systems,
    )
