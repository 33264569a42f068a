r"""RSRCC: questions on what changed in a region between two satellite images, answered by yes or no or by an option.

Page: https://huggingface.co/datasets/google/RSRCC (Kazoom et al., arXiv 2604.20623; code: Roie-k/RSRCC). We read the
README of an older revision, which has no licence line. Third parties write that the page labels the dataset apache-2.0.
The terms of the images are not stated, either. Layout:

    train/metadata.csv, val/metadata.csv, test/metadata.csv    one row per question; paths are relative to its folder
    test/images/0003/8d867bbe_24b2_before.png                  before, 512x512
    test/images/0003/8d867bbe_24b2_after.png                   after; all questions about a pair name the same two files

    before_file_name,after_file_name,text
    images/../.._before.png,images/../.._after.png,"**Question:** Was a tree planted at the corner?

**Answer:** Yes"
    images/../.._before.png,images/../.._after.png,"**Question:** What happened to the road?

**A)** It was paved.

**B)** It was dug up.
**C)** A tree fell on it.
**D)** Nothing.

**Answer:** A"

The line breaks in `text` are stored as two characters, a backslash and an n. Real line breaks are read, too. A question
is answered by yes or no, or it has options; its kind is `yes/no` or `choice`. There are no open questions. The question
of a record has one line per option, such as "A) It was paved.", as in the authors' evaluation.

The Parquet files that the `datasets` library makes have the columns `before`, `after` (images inside) and `text`. The
option `manifest` names them: {train: data/train-*.parquet, val: data/validation-*.parquet, test: data/test-*.parquet}.
It also selects splits: {test: test/metadata.csv}.

A record is called by its pair and the number of its row among the rows of the pair: 8d867bbe_24b2?0. Every row is a
record. The question that occurs twice in test therefore counts twice, as in the published number of 21,999 questions.
Some rows are said to have no readable text or answer. They become faults, and if one of them is in test, scores need
`validate.allow_lost_test_pairs` and `evaluate.allow_fewer_pairs`. Regions were found by models, and a language model
wrote the questions and answers. It is not known whether the images are LEVIR-CC's in a larger format.

The authors' evaluation takes the first word Yes or No in an answer, or the first letter from A to D that is a word, in
upper or lower case. "It is a house" therefore counts as A. The protocol `published` does the same. Its scores are
`first_answer_accuracy`, `first_choice_accuracy` and `first_yes_no_accuracy`. The scores `exact_match`,
`yes_no_accuracy` and `choice_accuracy` read answers more strictly.
"""

import csv
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from m3diff.datasets.files import Embedded, describe, read_shards, read_values
from m3diff.datasets.spec import (
    UNSTATED_LICENCE,
    DatasetSpec,
    Protocol,
    Published,
    Row,
    SplitCount,
    broken_row,
    find_fault,
)
from m3diff.records.errors import DataError
from m3diff.records.schemas import SPLITS, Split

METADATA = {split: f"{split}/metadata.csv" for split in SPLITS}
TEXT = "text"
# Columns of the image before and the image after: their paths in a metadata.csv, the images in a Parquet file
COLUMNS_OF_PATHS = ("before_file_name", "after_file_name")
COLUMNS_OF_IMAGES = ("before", "after")

YES_NO = "yes/no"
CHOICE = "choice"
TEXT_PARTS = re.compile(r"\s*\*\*Question:(?P<question>.*?)\*\*Answer:(?P<answer>.*)", re.DOTALL)
OPTION_MARK = re.compile(r"\*\*([A-Z])\)\*\*")
LETTER = re.compile(r"\(?([A-Z])(?:[).:].*)?", re.IGNORECASE | re.DOTALL)
MARKDOWN_EDGES = " \t\r\n*"


@dataclass(frozen=True)
class ParsedText:
    """A question with its options, one per line, its kind, and its answer."""

    question: str
    kind: str
    answer: str


def read(root: Path, manifest: Mapping[Split, str] | None = None) -> Iterator[Row]:
    """Yield one row per question, in the order of the files.

    Args:
        manifest: the file of each split to read, or a pattern of its Parquet files. None reads `<split>/metadata.csv`
            of every split.
    """
    for split, file in (manifest or METADATA).items():
        rows_of_pair = Counter[str]()
        image_columns = COLUMNS_OF_IMAGES if file.endswith(".parquet") else COLUMNS_OF_PATHS
        for source, record in _read_records(root, file, [*image_columns, TEXT]):
            fault = find_fault(record, dict.fromkeys(image_columns, object))
            if fault:
                yield broken_row(split, source, fault)
                continue
            images = tuple(record[column] for column in image_columns)
            pair = _name_of_pair(*images)
            # A row without a usable text counts, too, so that the names of the others do not depend on it
            name = f"{pair}?{rows_of_pair[pair]}"
            rows_of_pair[pair] += 1
            try:
                parsed = _parse_record(record)
            except DataError as error:
                yield broken_row(split, source, error.fault, pair, name)
                continue
            folder = PurePosixPath(file).parent
            yield Row(
                name=name,
                split=split,
                scene=pair,
                images=tuple(str(folder / image) if isinstance(image, str) else image for image in images),
                image_set=pair,
                question=parsed.question,
                references=[parsed.answer],
                kind=parsed.kind,
                source=source,
            )


def _read_records(root: Path, file: str, columns: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield the source and the values of each row of a file, or of all Parquet files that match a pattern."""
    if file.endswith(".parquet"):
        yield from read_shards(root, file, columns)
        return
    for location, record in read_values(root / file, columns):
        yield str(PurePosixPath(file).parent / location), record


def recognise(root: Path) -> bool:
    """Return whether a metadata.csv has RSRCC's columns. Many other folders of images have files with this name."""
    for file in METADATA.values():
        try:
            with (root / file).open(encoding="utf-8-sig", newline="") as lines:
                header = next(csv.reader(lines), [])
        except (OSError, UnicodeDecodeError, csv.Error):
            continue
        if set(header) >= {*COLUMNS_OF_PATHS, TEXT}:
            return True
    return False


def _parse_record(record: Mapping[str, Any]) -> ParsedText:
    """Parse the text of a row. Raise a DataError if it is missing or cannot be parsed."""
    fault = find_fault(record, {TEXT: str})
    if fault:
        raise DataError(fault)
    return parse_text(record[TEXT])


def parse_text(text: str) -> ParsedText:
    r"""Return the question, kind and answer in a value of the column `text`.

    Raises:
        DataError: the text has no question or no answer, the options are not in order, or the answer is not a
            possible one.
    """
    plain_text = text.replace("\\n", "\n")
    parts = TEXT_PARTS.fullmatch(plain_text)
    if parts is None:
        raise DataError("datasets.no_question_in_text", key=TEXT, value=describe(text))
    # The text before the first option, then a letter and a text for each option
    pieces = [piece.strip(MARKDOWN_EDGES) for piece in OPTION_MARK.split(parts["question"])]
    question = pieces[0]
    letters = pieces[1::2]
    option_texts = [" ".join(piece.split()) for piece in pieces[2::2]]
    if not question:
        raise DataError("datasets.no_question_in_text", key=TEXT, value=describe(text))
    answer = parts["answer"].strip(MARKDOWN_EDGES)
    if not answer:
        raise DataError("datasets.no_answer_in_text", key=TEXT)
    if not letters:
        return ParsedText(question, YES_NO, _read_yes_or_no(answer))
    if letters != [chr(ord("A") + number) for number in range(len(letters))] or not all(option_texts):
        raise DataError("datasets.options_out_of_order", key=TEXT, names=letters)
    lines = [question]
    for letter, option_text in zip(letters, option_texts, strict=True):
        lines.append(f"{letter}) {option_text}")
    return ParsedText("\n".join(lines), CHOICE, _read_letter(answer, letters))


def _read_yes_or_no(answer: str) -> str:
    """Return Yes or No. Raise a DataError for another answer."""
    word = answer.rstrip(".").capitalize()
    if word not in ("Yes", "No"):
        raise DataError("datasets.answer_of_other_kind", key=TEXT, value=describe(answer), expected="Yes or No")
    return word


def _read_letter(answer: str, letters: list[str]) -> str:
    """Return the letter of an option. Raise a DataError if the answer is no letter or names no option."""
    match = LETTER.fullmatch(answer)
    if match is None:
        expected = "the letter of an option"
        raise DataError("datasets.answer_of_other_kind", key=TEXT, value=describe(answer), expected=expected)
    letter = match[1].upper()
    if letter not in letters:
        raise DataError("datasets.answer_names_no_option", key=TEXT, value=letter, names=letters)
    return letter


def _name_of_pair(before: Any, after: Any) -> str:
    """Return the name that two files called `<name>_before.png` and `<name>_after.png` share.

    Images inside a Parquet file are called by their content. Two other names are joined.
    """
    before_stem = _stem(before).removesuffix("_before")
    after_stem = _stem(after).removesuffix("_after")
    return before_stem if before_stem == after_stem else f"{before_stem}|{after_stem}"


def _stem(image: Any) -> str:
    """Return the name of an image without folder and suffix."""
    return PurePosixPath(image.name if isinstance(image, Embedded) else str(image)).stem


PUBLISHED = Published(
    "rsrcc",
    "RSRCC",
    SplitCount(6_417, 87_016, records=87_016, questions=87_016),
    SplitCount(1_260, 17_116, records=17_116, questions=17_116),
    SplitCount(1_826, 21_999, records=21_999, questions=21_999),
)
SPEC = DatasetSpec(
    title="RSRCC",
    page="https://huggingface.co/datasets/google/RSRCC",
    paper="A Remote Sensing Regional Change Comprehension Benchmark Constructed via Retrieval-Augmented Best-of-N "
    "Ranking (Kazoom et al., arXiv 2604.20623)",
    licence=UNSTATED_LICENCE,
    read=read,
    files=tuple(METADATA.values()),
    recognise=recognise,
    published=(PUBLISHED,),
    protocols=(
        Protocol(
            "published",
            published_pairs=21_999,
            metrics=("first_answer",),
            source="Roie-k/RSRCC: gemma_evaluation.py, gemini_evaluation.py",
        ),
    ),
)
