"""Read the conversations of LLaVA's own training data, with one image or none, for the readers of its two files.

A file is a JSON list of rows:

    {"id": "004539375", "image": "00453/004539375.jpg", "conversations": [
        {"from": "human", "value": "Say briefly what the photo shows.\\n<image>"}, {"from": "gpt", "value": "a sofa"}]}

- `id` is not unique, and is a number in some rows and a text in others, so a record is named by the number of its row.
- A row without `image` is text alone.
- `<image>` is before or after the first question. As in LLaVA's code, the image comes first in both cases.
- A conversation of several turns is a dialogue: all of its answers are trained on.
- Rows with the same image are one image set.
- System messages are not read, because the template of a model has its own. A note counts them.
- LLaVA's code silently drops a message of the assistant before the first question. Here such a row has a fault.
- Files of OCR-VQA are all named `.jpg` in the rows, but some of its addresses give a GIF or a PNG, which some downloads
  name by their content. If only such a file exists, it is read, and a note counts these images.
"""

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from m3diff.datasets.conversations import (
    ASSISTANT_ROLES,
    count_marks,
    is_conversation,
    read_conversation,
    role_of,
    without_marks_of_first_question,
)
from m3diff.datasets.drawn_split import as_shares, draw_splits
from m3diff.datasets.files import enumerate_records, read_json
from m3diff.datasets.pairs import OwnSplit
from m3diff.datasets.spec import Published, Row, RowsWithNotes, SplitCount, broken_row, find_fault, unexpected
from m3diff.records.errors import DataError, Fault, format_count

CONVERSATIONS = "conversations"
OTHER_SUFFIXES = (".gif", ".png", ".jpeg", ".webp")  # of a file that a row names .jpg


def count_training_rows(part: str, title: str, rows: int, texts: int = 0) -> Published:
    """Return the published counts of a file, all of whose rows are for training.

    Args:
        part: name of the dataset in `params.yaml`.
        title: name of the dataset in papers.
        rows: number of rows.
        texts: number of rows without an image.
    """
    no_rows = SplitCount(pairs=0, references=0)
    return Published(part, title, SplitCount(rows, rows, texts=texts), val=no_rows, test=no_rows, images=1)


def read_llava(root: Path, manifest: str, images: str, split: OwnSplit) -> RowsWithNotes:
    """Return one row per row of the file, in its order.

    Args:
        manifest: name of the file.
        images: folder of the images, relative to the root. "" is the root.
        split: the split of all rows, or the shares by which splits are drawn at random (see `drawn_split.py`).

    Raises:
        DataError: the file cannot be read, or no rows are drawn for testing or training.
    """
    shares = as_shares(split)
    image_files = _ImageFiles(root)
    systems = Counter[str]()
    notes: list[str] = []

    def read_rows() -> Iterator[Row]:
        for number, (source, record) in enumerate(enumerate_records(manifest, read_json(root / manifest, list))):
            yield _make_row(number, source, record, images, None if shares else split, image_files, systems)
        notes.extend(image_files.notes())
        if systems:
            count = format_count(systems.total(), "system message")
            notes.append(f"the template of the model replaces {count} of the conversations")

    def draw_rows() -> Iterator[Row]:
        assert shares is not None
        yield from draw_splits(root, list(read_rows()), shares, notes)

    return RowsWithNotes(read_rows() if shares is None else draw_rows(), notes)


def _make_row(
    number: int,
    source: str,
    record: Any,
    folder: str,
    split: Any,
    image_files: "_ImageFiles",
    systems: Counter[str],
) -> Row:
    """Return the row of a record, with a fault if the record cannot be read.

    Args:
        number: number of the row, which is its name.
        folder: folder of the images, relative to the root.
        image_files: finds the files of the images.
        systems: counts the system messages.
    """
    name = str(number)
    fault = find_fault(record, {CONVERSATIONS: list}) or _fault_of_image(record)
    if fault is not None:
        return broken_row(split, source, fault, name=name)
    try:
        messages = record[CONVERSATIONS]
        if messages and not is_conversation(messages):
            raise DataError(unexpected(CONVERSATIONS, "a list of messages", messages))
        if messages and role_of(messages[0]) in ASSISTANT_ROLES:
            raise DataError("datasets.dialogue_begins_with_answer", key=f"{CONVERSATIONS}.0", role=role_of(messages[0]))
        conversation = read_conversation(messages, CONVERSATIONS)
        images = () if record.get("image") is None else (record["image"],)
        marks = count_marks(conversation)
        if marks not in (0, len(images)):
            raise DataError("datasets.marks_differ_from_images", key=CONVERSATIONS, marks=marks, images=len(images))
    except DataError as error:
        return broken_row(split, source, error.fault, name=name)
    systems.update(conversation.systems)
    conversation = without_marks_of_first_question(conversation)
    paths = tuple(image_files.find(f"{folder}/{image}" if folder else image) for image in images)
    # An image set and its records have different names, because several records may ask about the same image
    image_set = images[0] if images else f"no image {name}"
    return Row(
        name=name,
        split=split,
        scene=image_set,
        images=paths,
        image_set=image_set,
        question=conversation.question,
        history=conversation.history,
        references=conversation.answers if isinstance(conversation.answers, list) else [conversation.answers],
        source=source,
    )


def _fault_of_image(record: dict[str, Any]) -> Fault | None:
    """Return a fault if a row has an image that is not a path."""
    if record.get("image") is None:
        return None
    return find_fault(record, {"image": str})


class _ImageFiles:
    """Finds the files of images that may have another suffix than the rows say. Each folder is listed once."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._files_of_folder: dict[str, set[str]] = {}
        self._first_renamed = ""
        self._renamed_count = 0

    def find(self, image: str) -> str:
        """Return the path of an image. If its file does not exist, but one with another suffix does, return that."""
        path = PurePosixPath(image)
        if path.is_absolute() or ".." in path.parts:
            return image  # ingest refuses a path that may point out of the root
        files = self._list(str(path.parent))
        if path.name in files:
            return image
        for suffix in OTHER_SUFFIXES:
            other_name = f"{path.stem}{suffix}"
            if other_name in files:
                self._renamed_count += 1
                existing_image = str(path.with_name(other_name))
                self._first_renamed = self._first_renamed or existing_image
                return existing_image
        return image

    def _list(self, folder: str) -> set[str]:
        if folder not in self._files_of_folder:
            try:
                self._files_of_folder[folder] = set(os.listdir(self._root / folder))
            except (OSError, ValueError):  # there is no such folder, or its name contains a null byte
                self._files_of_folder[folder] = set()
        return self._files_of_folder[folder]

    def notes(self) -> Iterator[str]:
        """Yield a sentence with the number of images whose files have another suffix than the rows say."""
        if self._renamed_count:
            rows = format_count(self._renamed_count, "row names", "rows name")
            yield f"{rows} a file that exists with another suffix, which is read; the first is {self._first_renamed}"
