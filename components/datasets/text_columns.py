"""Decide which text columns of a table contain captions of a change, which contain questions, and which are not read.

Edit datasets have separate columns that describe both images and the edit (source_caption, target_caption,
edit_prompt). Only the edit is a caption of the change. For this reason, the user is always asked about a column of
descriptions or answers if the table also has a column of instructions or changes. The question offers all text columns.
"""

import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from m3diff.datasets.order import ORDER_WORDS, words_in
from m3diff.datasets.questions import asks_what_changed

# Words in the names of columns that describe an image or a change
DESCRIPTION_WORDS = {
    "captions", "caption", "description", "descriptions", "desc", "sentences", "sentence", "sents", "text", "texts",
}  # fmt: skip
# Words in the names of columns that contain captions
CAPTION_WORDS = DESCRIPTION_WORDS | {
    "differences", "difference", "conversations", "messages", "answer", "answers", "output", "response",
    "completion", "reference", "references", "target",
}  # fmt: skip
# Words in the names of columns that contain captions only if no other column does
WEAK_CAPTION_WORDS = {
    "label", "value", "instruction", "prompt", "edit", "annotation", "transcription", "change", "diff",
}  # fmt: skip
# Words in the names of columns that describe what changes or changed
EDIT_WORDS = {
    "change", "changes", "diff", "diffs", "difference", "differences", "modification", "modifications",
    "edit", "edits", "editing", "modify", "transformation", "transformations", "operation", "operations",
    "delta", "deltas", "mod", "mods", "manipulation", "alteration", "alterations", "adjustment", "adjustments",
}  # fmt: skip
# Words of EDIT_WORDS in the names of columns that may contain categories of changes ("object added", "color")
WORDS_OF_KINDS = EDIT_WORDS - {"edit", "edits", "editing", "modify"}
# Words in the names of columns that describe what changes, or what a model is asked to do
CHANGE_WORDS = EDIT_WORDS | {
    "instruction", "instructions", "request", "requests", "command", "commands", "prompt", "prompts",
    "instr", "instruct", "directive", "directives",
}  # fmt: skip
# Words in the names of columns that contain the questions that captions answer. The first set is certain
CERTAIN_QUESTION_WORDS = {"question", "query"}
QUESTION_WORDS = CERTAIN_QUESTION_WORDS | {"instruction", "prompt", "input", "user", "human"}
# Names of columns that end in these words contain data about a caption, but no caption
DATA_WORDS = {
    "id", "ids", "key", "type", "types", "count", "number", "length", "score", "language", "model", "source", "date",
}  # fmt: skip
# Names of columns that end in these words contain data about an edit, but do not say what the edit changes
EDIT_DATA_WORDS = {
    "object", "objects", "region", "area", "category", "class", "task", "turn", "index", "step", "level", "flag",
    "split", "subset", "status",
}  # fmt: skip
# Words in the names of columns that describe one image: image_description, global_caption
IMAGE_WORDS = {"image", "img", "photo", "picture", "scene", "global"}

NUMBER = re.compile(r"[-+\d.,:\s]+")
# Several letters of a script that does not put spaces between words
UNSPACED_TEXT = re.compile(r"[\u0e00-\u0eff\u3040-\u30ff\u3400-\u9fff]{4}")
MIN_VALUES_FOR_LABELS = 8  # repeated texts count as labels only if the column has at least this many values
MAX_SHARE_OF_LABELS = 0.25  # texts count as repeated if the ratio of distinct texts to values is at most this
MIN_VALUES_FOR_PROMPT = 4  # a constant text counts as a prompt only if the column has at least this many values
TEXT_KEYS = ("raw", "text", "caption", "sentence")  # if a sentence is an object, its text has one of these keys


@dataclass
class TextColumns:
    """The text columns of a table.

    answers: columns by field, the most likely first. There are several if the user has to choose, and none if no
        column contains captions.
    unread: text columns that are not part of any answer.
    """

    answers: list[dict[str, Any]] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)

    def names(self) -> list[str]:
        """Return the columns that contain captions in any of the answers."""
        names: dict[str, None] = {}
        for answer in self.answers:
            names |= dict.fromkeys(_column_names(answer["captions"]))
        return list(names)


def find_text_columns(values: Mapping[str, Sequence[Any]], columns_in_use: Container[Any] = ()) -> TextColumns:
    """Find the columns with captions, and the columns with the questions that these captions answer.

    Args:
        values: the first values of each column that does not contain images. A key may be a path into objects.
        columns_in_use: columns that have another meaning, or about which the user is already asked.
    """
    free_values = {name: list(column) for name, column in values.items() if name not in columns_in_use}
    answers: list[dict[str, Any]] = []
    for names in _caption_columns(free_values):
        answers.append({"captions": names[0] if len(names) == 1 else names})
    columns = TextColumns(answers)
    caption_columns = columns.names()
    for answer in answers:
        question = _question_of(_column_names(answer["captions"]), values, caption_columns)
        if question is not None:
            answer["question"] = question

    questions = [answer.get("question", "") for answer in answers]
    for name, column in free_values.items():
        is_question = any(name == question or f"{{{name}}}" in question for question in questions)
        if name not in caption_columns and not is_question and (is_text(column) or _has_text_header(name, column)):
            columns.unread.append(name)
    return columns


def is_text(column: Sequence[Any]) -> bool:
    """Return True if a column contains texts of several words, or lists of such texts."""
    for value in column:
        texts = value if isinstance(value, list) else [value]
        if any(map(_has_several_words, texts)):
            return True
    return False


def _has_several_words(text: Any) -> bool:
    if not isinstance(text, str) or NUMBER.fullmatch(text):
        return False
    return " " in text.strip() or UNSPACED_TEXT.search(text) is not None


def _question_of(
    captions: Sequence[str], values: Mapping[str, Sequence[Any]], caption_columns: Sequence[str]
) -> str | None:
    """Return the column with the questions that captions answer, or None if there is no such column.

    If there are several such columns, return a template that joins them.

    Args:
        captions: the columns with the captions.
        caption_columns: all columns that may contain captions.
    """
    # Descriptions and answers may reply to a question, but edits do not
    if not any(CAPTION_WORDS.intersection(words_in(name)) for name in captions):
        return None
    questions = [
        name
        for name, column in values.items()
        if name not in captions and _may_hold_questions(name, column, caption_columns)
    ]
    if len(questions) > 1:
        return " ".join(f"{{{name}}}" for name in questions)
    return questions[0] if questions else None


def _column_names(captions: str | list[str]) -> list[str]:
    """Return the column names in an answer, without paths to the texts inside them."""
    names = [captions] if isinstance(captions, str) else captions
    return [name.split(".*.")[0] for name in names]


def _has_text_header(name: str, column: Sequence[Any]) -> bool:
    """Return True if a column's name is typical of captions or changes, and at least one value is not a number."""
    words = words_in(name)
    if not {*words} & (CAPTION_WORDS | CHANGE_WORDS) or words[-1] in DATA_WORDS | EDIT_DATA_WORDS:
        return False
    return any(isinstance(value, str) and not NUMBER.fullmatch(value) for value in column)


def _may_hold_questions(name: str, column: Sequence[Any], caption_columns: Sequence[str]) -> bool:
    """Return True if a column may contain questions. If the table has a column of changes, fewer names are accepted."""
    words = words_in(name)
    has_values = any(str(value).strip() for value in column)
    if not {*words} & QUESTION_WORDS or words[-1] in DATA_WORDS or not has_values:
        return False
    if {*words} & CERTAIN_QUESTION_WORDS or name not in caption_columns:
        return True
    has_change_column = any(map(_has_change_header, caption_columns))
    return not {*words} & EDIT_WORDS and not (has_change_column and "input" in words)


def _has_change_header(name: str) -> bool:
    words = words_in(name)
    return bool({*words} & CHANGE_WORDS) and words[-1] not in DATA_WORDS | EDIT_DATA_WORDS


def _holds_questions(name: str, column: Sequence[Any]) -> bool:
    """Return True if a column contains questions, judging by its name and texts."""
    words = {*words_in(name)}
    texts = [value for value in column if isinstance(value, str) and value.strip()]
    # In image retrieval, a query is an edit: it differs between rows and is not a question
    is_edit = "query" in words and len({*texts}) > 1
    if words & CERTAIN_QUESTION_WORDS and not is_edit:
        return True
    if not words & QUESTION_WORDS or not texts:
        return False
    question_count = sum(text.rstrip().endswith(("?", "？")) or asks_what_changed(text) for text in texts)
    return 2 * question_count >= len(texts)


def _holds_labels(name: str, column: Sequence[Any]) -> bool:
    """Return True if a column repeats a few texts, which are then probably categories of changes and not captions.

    Columns with names such as "edit" or "instruction" are excluded, because edits themselves may be repeated.
    """
    texts = [str(value) for value in column if value not in (None, "")]
    are_repeated = len(texts) >= MIN_VALUES_FOR_LABELS and len({*texts}) <= MAX_SHARE_OF_LABELS * len(texts)
    return are_repeated and {*words_in(name)}.isdisjoint(CHANGE_WORDS - WORDS_OF_KINDS)


def _is_description_of_one_image(name: str) -> bool:
    """Return True for names such as source_caption and image_description."""
    return _names_one_image(name) and bool({*words_in(name)} & DESCRIPTION_WORDS)


def _names_one_image(name: str) -> bool:
    return bool({*words_in(name)} & (ORDER_WORDS - {"edit"} | IMAGE_WORDS))


def _rank_column(name: str, column: Sequence[Any]) -> int:
    """Return a rank for how likely a column contains captions of the change, from 0 (most likely) to 4."""
    words = {*words_in(name)}
    is_constant = len(column) >= MIN_VALUES_FOR_PROMPT and len({str(value) for value in column}) == 1
    if is_constant and not words & EDIT_WORDS:
        return 4  # the text is a prompt, which is the same for all rows
    if words & {"inverse", "reverse"}:
        return 2
    if _names_one_image(name):
        return 3
    return 0 if words & EDIT_WORDS else 1


def _caption_columns(values: Mapping[str, list[Any]]) -> list[list[str]]:
    """Return the columns that may contain the captions, as possible answers to a question. The most likely is first.

    An answer is one column, or several columns that together contain the captions. If there is only one answer, the
    user is not asked.
    """
    if "captions" in values and not any(isinstance(value, dict) for value in values["captions"]):
        return [[_path_to_texts("captions", values["captions"])]]
    candidates = _candidate_columns(values)
    if len(candidates) < 2:
        return [[_path_to_texts(name, values[name])] for name in candidates]

    has_caption_header = any(CAPTION_WORDS.intersection(words_in(name)) for name in _columns_without_questions(values))
    names_without_numbers = set()
    for name in candidates:
        names_without_numbers.add(tuple(word for word in words_in(name) if not word.isdecimal()))
    if has_caption_header and len(names_without_numbers) == 1:
        # caption_1, caption_2
        return [sorted(candidates, key=lambda name: [int(number) for number in re.findall(r"\d+", name)])]

    rank = {name: _rank_column(name, values[name]) for name in candidates}
    candidates.sort(key=lambda name: rank[name])
    further_texts = [
        name for name in _columns_without_questions(values) if is_text(values[name]) and name not in candidates
    ]
    answers = [[_path_to_texts(name, values[name])] for name in [*candidates, *further_texts]]
    # An edit and its inverse, or an edit and a description, are not captions of the same change
    joint_columns = candidates
    if rank[candidates[0]] < 2:
        joint_columns = [name for name in candidates if rank[name] < 2]
    joint_values = chain.from_iterable(values[name] for name in joint_columns)
    if len(joint_columns) > 1 and all(isinstance(value, str) for value in joint_values):
        answers.append(joint_columns)
    return answers


def _columns_without_questions(values: Mapping[str, list[Any]]) -> list[str]:
    """Return the columns that may contain captions and do not contain questions."""
    return [
        name
        for name, column in values.items()
        if _may_hold_captions(name, column) and not _holds_questions(name, column)
    ]


def _candidate_columns(values: Mapping[str, list[Any]]) -> list[str]:
    """Return the columns that may contain the captions, based on their names and values."""
    possible_columns = _columns_without_questions(values)
    caption_columns = [name for name in possible_columns if CAPTION_WORDS.intersection(words_in(name))]
    text_columns = [name for name in possible_columns if is_text(values[name])]
    if caption_columns:
        change_columns = [name for name in text_columns if _has_change_header(name) or "query" in words_in(name)]
        if not any(map(_names_one_image, caption_columns)):
            change_columns = [name for name in change_columns if not _holds_labels(name, values[name])]
        candidates = list(dict.fromkeys([*caption_columns, *change_columns]))
        if all(map(_is_description_of_one_image, caption_columns)):
            # The change may be described in another text column with any name
            candidates = list(dict.fromkeys([*candidates, *text_columns]))
        return candidates
    if text_columns:
        return text_columns
    return [
        name
        for name, column in values.items()
        if _may_hold_captions(name, column) and (is_text(column) or WEAK_CAPTION_WORDS.intersection(words_in(name)))
    ]


def _may_hold_captions(name: str, column: Sequence[Any]) -> bool:
    """Return True if neither the name nor the values of a column rule out captions."""
    words = words_in(name)
    if not _may_be_text(column) or not words:
        return False
    # Columns such as prompt_source and caption_source may contain descriptions
    may_be_description = words[-1] == "source" and len(words) > 1 and is_text(column)
    return words[-1] not in DATA_WORDS or may_be_description


def _path_to_texts(name: str, column: Sequence[Any]) -> str:
    """Return the path to the texts if a column contains lists of objects. Otherwise, return the column's name."""
    value = next(iter(column), None)
    if not isinstance(value, list) or not value or not isinstance(value[0], dict):
        return name
    key = next((key for key in TEXT_KEYS if key in value[0]), None)
    return f"{name}.*.{key}" if key else name


def _may_be_text(column: Sequence[Any]) -> bool:
    """Return True if a column is empty or contains a text or list that does not consist of numbers."""
    values = [value for value in column if value != ""]
    return not values or any(map(_may_be_text_value, values))


def _may_be_text_value(value: Any) -> bool:
    if isinstance(value, list):
        return not all(isinstance(element, int | float) for element in value)
    return isinstance(value, str) and not NUMBER.fullmatch(value)
