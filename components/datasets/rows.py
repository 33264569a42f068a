"""What a reader yields: pairs, or single images. A row that cannot be read stays, with a `fault`."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from m3diff.datasets.files import describe, describe_kind


class Question(NamedTuple):
    """A question that a pair's captions answer, and the column (or path) that holds it."""

    column: str
    text: str


class Row(NamedTuple):
    """One pair as the reader found it, unchecked. Image paths are relative to the dataset's root."""

    name: Any
    split: Any
    scene: Any  # pairs of one scene must share a split
    before: Any
    after: Any
    references: Any
    change_types: list[str]
    source: str  # file and row or key, relative to the root
    fault: str | None = None  # what the reader itself found wrong
    raw_rows: int = 1  # rows of the annotation file that were merged into this one
    questions: tuple[Question, ...] = ()  # that the references answer, where the annotations hold any
    without_caption: bool = False  # the dataset's entry says that its texts stand for no caption: it is passed over


class Single(NamedTuple):
    """One image with captions of its own, unchecked. Its path is relative to the dataset's root."""

    name: Any
    split: Any
    scene: Any  # what is made of images of one scene must stay in its split
    image: Any
    captions: Any
    source: str  # file and row or key, relative to the root
    fault: str | None = None  # what the reader itself found wrong


def is_scene(value: Any) -> bool:
    """Whether the value is a scene's number: a whole number from 0."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def fault_in(record: Any, fields: Mapping[str, type]) -> str | None:
    """What keeps an annotation record from having these fields with these types; None where it has them."""
    if not isinstance(record, dict):
        return f"record: expected an object, found {describe(record)}"
    for field, kind in fields.items():
        if field not in record:
            return f"{field}: is missing"
        if not isinstance(record[field], kind):
            return f"{field}: expected {describe_kind(kind)}, found {describe(record[field])}"
        if record[field] == "":
            return f"{field}: is empty"
    return None
