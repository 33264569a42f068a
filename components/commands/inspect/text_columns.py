"""Which text columns of a table hold captions of a change, which hold questions, and which are not read.

Edit corpora describe both images and the edit in columns of their own (source_caption, target_caption, edit_prompt).
Only the edit is a caption of the change. So a column of descriptions or of answers is never taken without a question
while the table also has a column of instructions or changes, and a question offers every text column.
"""

import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from m3diff.commands.inspect.order import ORDER_WORDS, words_in
from m3diff.stages.ingest.stage import asks_what_changed

DESCRIPTION_WORDS = {  # words in the names of columns that describe an image or a change
    *("captions", "caption", "description", "descriptions", "desc", "sentences", "sentence", "sents", "text", "texts"),
}
CAPTION_WORDS = DESCRIPTION_WORDS | {  # words in the names of columns that hold captions
    *("differences", "difference", "conversations", "messages", "answer", "answers", "output", "response"),
    *("completion", "reference", "references", "target"),
}
# Those that do so where no other column does
WEAK_WORDS = {"label", "value", "instruction", "prompt", "edit", "annotation", "transcription", "change", "diff"}
EDIT_WORDS = {  # words in the names of columns that say what changes or changed
    *("change", "changes", "diff", "diffs", "difference", "differences", "modification", "modifications"),
    *("edit", "edits", "editing", "modify", "transformation", "transformations", "operation", "operations"),
    *("delta", "deltas", "mod", "mods", "manipulation", "alteration", "alterations", "adjustment", "adjustments"),
}
# Those that may also name a kind of change: object added, color
NAMES_OF_LABELS = EDIT_WORDS - {"edit", "edits", "editing", "modify"}
# Words that say what changes, or what a model is asked
CHANGE_WORDS = EDIT_WORDS | {
    *("instruction", "instructions", "request", "requests", "command", "commands", "prompt", "prompts"),
    *("instr", "instruct", "directive", "directives"),
}
# Words in the names of columns that hold what a caption answers; the first two say it, the others may
CERTAIN_QUESTION_WORDS = {"question", "query"}
QUESTION_WORDS = CERTAIN_QUESTION_WORDS | {"instruction", "prompt", "input", "user", "human"}
DATA_WORDS = {  # last words in the names of columns that describe a caption without being one
    *("id", "ids", "key", "type", "types", "count", "number", "length", "score", "language", "model", "source", "date"),
}
# Last words in the names of columns that describe an edit without saying what it changes
EDIT_DATA_WORDS = {
    *("object", "objects", "region", "area", "category", "class", "task", "turn", "index", "step", "level", "flag"),
    *("split", "subset", "status"),
}
# Words in the names of columns that describe one image: image_description, global_caption
IMAGE_WORDS = {"image", "img", "photo", "picture", "scene", "global"}

NUMBER = re.compile(r"[-+\d.,:\s]+")
UNSPACED = re.compile(r"[\u0e00-\u0eff\u3040-\u30ff\u3400-\u9fff]{4}")
FEWEST_FOR_LABELS = 8  # values from which on repeated texts are taken for labels
LABEL_SHARE = 0.25  # distinct texts by values up to which they are
FEWEST_FOR_CONSTANT = 4  # values from which on one text in all of them is probably a prompt


@dataclass
class TextColumns:
    """The text columns of a table.

    answers: columns by field for each answer, the likeliest first; one answer if that is no question.
    unread: names of text columns that no answer reads.
    """

    answers: list[dict[str, Any]] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)

    def names(self) -> list[str]:
        """The columns that hold captions in one of the answers."""
        names: dict[str, None] = {}
        for answer in self.answers:
            names |= dict.fromkeys(_names_of(answer["captions"]))
        return list(names)


def find_text_columns(values: Mapping[str, Sequence[Any]], read: Container[Any] = ()) -> TextColumns:
    """The text columns among columns of values, a path into objects being a column, too.

    Args:
        values: the first values of each column that holds no images.
        read: columns that are read as something else (the split), or that another question names.
    """
    captions = _caption_columns({name: list(column) for name, column in values.items() if name not in read})
    columns = TextColumns([{"captions": names[0] if len(names) == 1 else names} for names in captions])
    candidates = columns.names()
    for answer in columns.answers:
        names = _names_of(answer["captions"])
        # An edit answers no question; an answer or a description may
        asked = [name for name in values if name not in names and _may_ask(name, values[name], candidates)]
        if asked and any({*words_in(name)} & CAPTION_WORDS for name in names):
            answer["question"] = asked[0] if len(asked) == 1 else " ".join(f"{{{name}}}" for name in asked)
    questions = [answer.get("question", "") for answer in columns.answers]
    columns.unread = [
        name
        for name, column in values.items()
        if name not in candidates
        and name not in read
        and not any(name == question or f"{{{name}}}" in question for question in questions)
        and (is_text(column) or _is_named_as_text(name, column))
    ]
    return columns


def is_text(column: Sequence[Any]) -> bool:
    """True if a column holds a text of several words, or lists of these; some scripts put no spaces between words."""
    return any(
        isinstance(text, str) and not NUMBER.fullmatch(text) and (" " in text.strip() or bool(UNSPACED.search(text)))
        for value in column
        for text in (value if isinstance(value, list) else [value])
    )


def _names_of(captions: str | list[str]) -> list[str]:
    names = [captions] if isinstance(captions, str) else captions
    return [name.split(".*.")[0] for name in names]


def _is_named_as_text(name: str, column: Sequence[Any]) -> bool:
    words = words_in(name)
    named = bool({*words} & (CAPTION_WORDS | CHANGE_WORDS)) and words[-1] not in DATA_WORDS | EDIT_DATA_WORDS
    return named and any(isinstance(value, str) and not NUMBER.fullmatch(value) for value in column)


def _may_ask(name: str, column: Sequence[Any], candidates: Sequence[str]) -> bool:
    """True if a column may hold what captions answer. Beside a column of a change, only a column of questions does."""
    words = words_in(name)
    if not {*words} & QUESTION_WORDS or words[-1] in DATA_WORDS or not any(str(value).strip() for value in column):
        return False
    if {*words} & CERTAIN_QUESTION_WORDS or name not in candidates:
        return True
    has_change = any(map(_is_named_as_change, candidates))
    return not {*words} & EDIT_WORDS and not (has_change and "input" in words)


def _is_named_as_change(name: str) -> bool:
    words = words_in(name)
    return bool({*words} & CHANGE_WORDS) and words[-1] not in DATA_WORDS | EDIT_DATA_WORDS


def _is_question(name: str, column: Sequence[Any]) -> bool:
    """True if a column holds questions, by its name or by its texts."""
    words = {*words_in(name)}
    texts = [value for value in column if isinstance(value, str) and value.strip()]
    # A query of image retrieval is an edit: it differs by row and asks nothing
    is_edit = "query" in words and len({*texts}) > 1
    if words & CERTAIN_QUESTION_WORDS and not is_edit:
        return True
    if not words & (QUESTION_WORDS | CERTAIN_QUESTION_WORDS) or not texts:
        return False
    questions = sum(text.rstrip().endswith(("?", "？")) or asks_what_changed(text) for text in texts)
    return 2 * questions >= len(texts)


def _holds_labels(name: str, column: Sequence[Any]) -> bool:
    """True if a column that is called after the change holds a few texts again and again. Edits may be repeated."""
    texts = [str(value) for value in column if value not in (None, "")]
    are_repeated = len(texts) >= FEWEST_FOR_LABELS and len({*texts}) <= LABEL_SHARE * len(texts)
    return are_repeated and {*words_in(name)}.isdisjoint(CHANGE_WORDS - NAMES_OF_LABELS)


def _describes_no_change(name: str) -> bool:
    """True if a column describes one of the two images by its name: source_caption, image_description."""
    return _describes_one_image(name) and bool({*words_in(name)} & DESCRIPTION_WORDS)


def _describes_one_image(name: str) -> bool:
    return bool({*words_in(name)} & (ORDER_WORDS - {"edit"} | IMAGE_WORDS))


def _likelihood(name: str, column: Sequence[Any]) -> int:
    """The place of a column among those that may hold captions of the change: 0 for the likeliest."""
    words = {*words_in(name)}
    is_constant = len(column) >= FEWEST_FOR_CONSTANT and len({str(value) for value in column}) == 1
    if is_constant and not words & EDIT_WORDS:  # one prompt for all rows
        return 4
    if words & {"inverse", "reverse"}:
        return 2
    if _describes_one_image(name):
        return 3
    return 0 if words & EDIT_WORDS else 1


def _caption_columns(values: Mapping[str, list[Any]]) -> list[list[str]]:
    """The columns that could hold the captions, alone or several together; a single list if that is clear."""
    named = [name for name, column in values.items() if _may_hold_captions(name, column)]
    statements = [name for name in named if not _is_question(name, values[name])]
    strong = [name for name in statements if {*words_in(name)} & CAPTION_WORDS]
    if "captions" in values and not any(isinstance(value, dict) for value in values["captions"]):
        return [[_inner("captions", values["captions"])]]
    changes = [
        name
        for name in statements
        if (_is_named_as_change(name) or "query" in words_in(name)) and is_text(values[name])
    ]
    if not any(map(_describes_one_image, strong)):
        changes = [name for name in changes if not _holds_labels(name, values[name])]
    texts = [name for name in statements if is_text(values[name])]
    pool = [*strong, *(name for name in changes if name not in strong)] if strong else texts
    if strong and all(map(_describes_no_change, strong)):  # another column may say the change, whatever its name
        pool += [name for name in texts if name not in pool]
    pool = pool or [name for name in named if is_text(values[name]) or {*words_in(name)} & WEAK_WORDS]
    if len(pool) < 2:
        return [[_inner(name, values[name])] for name in pool]
    words = {tuple(word for word in words_in(name) if not word.isdecimal()) for name in pool}
    if strong and len(words) == 1:  # caption_1, caption_2
        return [sorted(pool, key=lambda name: [int(number) for number in re.findall(r"\d+", name)])]
    rank = {name: _likelihood(name, values[name]) for name in pool}
    pool.sort(key=lambda name: rank[name])
    # An edit and its inverse, or an edit and a description, are no captions of one change
    together = [name for name in pool if rank[name] < 2] if rank[pool[0]] < 2 else pool
    are_plain = all(isinstance(value, str) for name in together for value in values[name])
    answers = [[_inner(name, values[name])] for name in [*pool, *(name for name in texts if name not in pool)]]
    return [*answers, together] if are_plain and len(together) > 1 else answers


def _may_hold_captions(name: str, column: Sequence[Any]) -> bool:
    words = words_in(name)
    is_data = words[-1:] == [] or words[-1] in DATA_WORDS
    # prompt_source and caption_source may be descriptions
    return (not is_data or (words[-1:] == ["source"] and len(words) > 1 and is_text(column))) and _may_be_text(column)


def _inner(name: str, column: Sequence[Any]) -> str:
    """The path to the texts if each sentence is an object; the column itself for anything else."""
    value = next(iter(column), None)
    if not isinstance(value, list) or not value or not isinstance(value[0], dict):
        return name
    inside = next((key for key in ("raw", "text", "caption", "sentence") if key in value[0]), None)
    return f"{name}.*.{inside}" if inside else name


def _may_be_text(column: Sequence[Any]) -> bool:
    """True if a column may hold captions: a text that is no number, a list of more than numbers, or nothing."""
    values = [value for value in column if value != ""]
    usable = (isinstance(v, list) and not all(isinstance(e, int | float) for e in v) for v in values)
    return not values or any(usable) or any(isinstance(v, str) and not NUMBER.fullmatch(v) for v in values)
