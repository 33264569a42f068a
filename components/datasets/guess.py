"""Guess how to read a table of pairs: propose options of the reader `pairs`, based on column names and first rows.

The user sees the proposal before it is used. If no proposal is possible, a DataError says what the table contains, what
is wrong with it, and how to fix it.

Other modules handle the parts: `tables.py` finds the image columns, `order.py` decides which of two images is before,
`text_columns.py` finds the columns with captions and questions, and `split_column.py` finds the split column.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice, product
from pathlib import Path
from typing import Any

from m3diff.datasets.conversations import SYSTEM_COLUMN, begins_as_conversation, is_conversation
from m3diff.datasets.doubts import Doubt
from m3diff.datasets.files import columns_in
from m3diff.datasets.filters import SPLIT_ALIASES, plain_name, readings_of_splits, split_in_name, split_of_cell
from m3diff.datasets.order import words_in
from m3diff.datasets.split_column import SplitChoice, choose_split_column, documented_columns
from m3diff.datasets.tables import TABLE_SUFFIXES, find_image_columns, holds_images, is_image, read_sample
from m3diff.datasets.text_columns import find_text_columns
from m3diff.records.errors import DataError, Fault
from m3diff.records.sample import IMAGE_MARK
from m3diff.records.schemas import SPLITS

# Notes on the options that define how a file is divided into rows
NOTE_OF_OPTION = {"delimiter": "its columns are separated by {!r}", "rows": "its rows are at the path {!r}"}
MAX_COMBINATIONS = 24  # maximum number of combinations of answers to show; if there are more, a selection is shown
MAX_TASKS = 7  # a column with more distinct texts does not name tasks
PLAIN_FIELDS = ("id", "scene", "change_types")  # columns that the reader finds by name, so no option has to name them
# Tables that are tried first. If one of them has the documented columns, no other tables are tried
DOCUMENTED_FILES = ("pairs.csv", "annotations.json")
DATASET_DICT_FILE = "dataset_dict.json"  # lists the splits of a DatasetDict that `save_to_disk` wrote
IMAGE_FIELDS = {"before", "after", "images"}


@dataclass(frozen=True)
class TableGuess:
    """A proposal of how to read a table.

    options: options of the reader `pairs`, including those of the first answer to each question in `doubts`.
    notes: lines about differences from a table in the documented format, and about data that are not read.
    doubts: questions that the user has to answer before the table is read.
    """

    options: dict[str, Any]
    notes: list[str] = field(default_factory=list)
    doubts: list[Doubt] = field(default_factory=list)

    def entries(self) -> list[dict[str, Any]]:
        """Return the options for each combination of answers to the questions; see `combine_answers`."""
        return combine_answers(self.options, self.doubts)


def combine_answers(options: dict[str, Any], doubts: Sequence[Doubt]) -> list[dict[str, Any]]:
    """Return the options for each combination of one answer to each question.

    If there are more than `MAX_COMBINATIONS`, return only the combinations with at most one answer that is not the
    first answer to its question.

    Args:
        options: the options that do not depend on an answer.
        doubts: the questions with their answers.
    """
    answers_of_doubts = [doubt.answers for doubt in doubts]
    combinations = list(islice(product(*answers_of_doubts), MAX_COMBINATIONS + 1))
    if len(combinations) > MAX_COMBINATIONS:
        first_answers = [answers[0] for answers in answers_of_doubts]
        combinations = [tuple(first_answers)]
        for index, answers in enumerate(answers_of_doubts):
            for answer in answers[1:]:
                combination = first_answers.copy()
                combination[index] = answer
                combinations.append(tuple(combination))
    return [_add_answers(options, combination) for combination in combinations]


def _add_answers(options: dict[str, Any], answers: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return the options with those of the answers added. An answer's `columns` are added to the option `columns`."""
    for answer in answers:
        columns = {**options.get("columns", {}), **answer.get("columns", {})}
        options = options | answer
        if columns:
            options["columns"] = columns
    return options


def guess_table(root: Path) -> TableGuess:
    """Guess which file in a folder is the table of pairs, and how to read it.

    If several files are possible, a question asks the user to choose. A file with a documented name and documented
    columns is chosen without asking.

    Raises:
        DataError: no file is a table of pairs. The error has a fault for each file that was tried.
    """
    faults: list[Fault] = []
    guesses: dict[str, TableGuess] = {}
    read_files = set[str]()
    for path in sorted(table_files(root), key=lambda path: path.name not in DOCUMENTED_FILES):
        if path.name in read_files:
            continue
        try:
            manifests = _manifests_with(root, path)
            guess = _guess_table_file(root, path, manifests)
        except DataError as error:
            faults.append(error.fault)
            continue
        guesses[path.name] = guess
        for manifest in manifests:
            read_files |= {manifest} if isinstance(manifest, str) else {*manifest.values()}
        if path.name in DOCUMENTED_FILES and IMAGE_FIELDS.isdisjoint(guess.options.get("columns", {})):
            break

    if not guesses:
        raise DataError("datasets.no_table_of_pairs", path=root, faults=faults)
    if len(guesses) > 1:
        return _combine_guesses(guesses)
    (guess,) = guesses.values()
    unread_files = [path.name for path in table_files(root) if path.name not in read_files]
    if unread_files:
        guess.notes.append(f"not read: {', '.join(unread_files)}")
    return guess


def _combine_guesses(guesses: Mapping[str, TableGuess]) -> TableGuess:
    """Combine the guesses for several files into one guess that asks which file is the table.

    Args:
        guesses: the guess for each file name.
    """
    notes: list[str] = []
    questions: list[Fault] = []
    answers: list[dict[str, Any]] = []
    for guess in guesses.values():
        notes += guess.notes
        questions += [doubt.question for doubt in guess.doubts]
        answers += guess.entries()
    question = Fault("datasets.several_tables", names=list(guesses))
    if questions:
        question = Fault("datasets.several_tables_with_questions", names=list(guesses), questions=questions)
    return TableGuess(answers[0], notes, [Doubt(question, answers)])


def is_saved_by_datasets(folder: Path) -> bool:
    """Return True if a folder was written by `save_to_disk` of the library `datasets`: a Dataset or a DatasetDict."""
    is_dataset = all((folder / name).is_file() for name in ("state.json", "dataset_info.json"))
    return is_dataset or (folder / DATASET_DICT_FILE).is_file()


def table_files(root: Path) -> list[Path]:
    """Return the files in a folder that could be tables, except hidden ones. Return [] if the folder is unreadable."""
    if is_saved_by_datasets(root):
        return []  # its JSON files describe the data in its Arrow files
    try:
        tables = (path for path in root.iterdir() if path.suffix.lower() in TABLE_SUFFIXES)
        return sorted(path for path in tables if path.name[0] not in "._")
    except OSError:
        return []


def _select_named_columns(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns that the option `columns` must name: by field, the columns that the reader would not find."""
    always_named_fields = ("images", "question", "history")
    return {field: name for field, name in columns.items() if field != name or field in always_named_fields}


def _guess_table_file(root: Path, path: Path, manifests: Sequence[str | dict[str, str]]) -> TableGuess:
    """Guess how to read one table.

    Args:
        manifests: possible values of the option `manifest`: one file name, or the files by split.
    """
    manifest = manifests[0]
    is_file_by_split = not isinstance(manifest, str)
    notes: list[str] = []
    if not isinstance(manifest, str):
        notes.append(f"{', '.join(manifest.values())}: a file for each split")
    sample = read_sample(path)
    for option, value in sample.options.items():
        notes.append(f"{path.name}: {NOTE_OF_OPTION[option].format(value)}: option `{option}`")

    values = sample.values()
    image_columns_by_field, doubts = _image_columns(root, path, values)
    image_columns = {name for name in image_columns_by_field.values() if name is not None}
    image_columns |= {name.split(".")[0] for name in image_columns}
    other_values = {
        name: column for name, column in values.items() if name not in image_columns and not holds_images(column)
    }
    split_of_all, split_doubts = _split_of_all(root, path)
    if is_file_by_split:
        split_choice = SplitChoice(occupied=documented_columns(list(other_values)))
    else:
        split_choice = choose_split_column(path, sample.options, other_values, split_of_all)
    text_columns, text_doubts, unread_columns = _text_columns(path, values, other_values, split_choice.occupied)
    columns = image_columns_by_field | text_columns
    if "question" in columns and any(isinstance(value, list) for value in values.get("history", [])):
        columns["history"] = "history"
    if split_choice.column:
        columns["split"] = split_choice.column
    doubts += text_doubts
    doubts += split_choice.doubts
    if len(manifests) > 1:
        answers = [{"manifest": manifest} for manifest in manifests]
        doubts.append(Doubt(Fault("datasets.split_of_files", path=path.name), answers))
    notes += _describe_columns(path, sample.rows, columns, doubts, split_choice.occupied, unread_columns)
    notes += split_choice.notes

    has_conversations = any(isinstance(value, list) for value in values.get(str(columns["captions"]), []))
    if "images" in columns and "id" in values and has_conversations:
        # In tables of conversations, an id names a conversation, and several conversations may be about the same pair
        columns["id"] = None
    options: dict[str, Any] = {"manifest": manifest}
    renamed_columns = _select_named_columns(columns)
    if renamed_columns:
        options["columns"] = renamed_columns
    options |= sample.options
    if split_choice.splits:
        options["splits"] = dict(split_choice.splits)
    if not is_file_by_split and not split_choice.column and not split_choice.doubts:
        options |= split_of_all
        doubts += split_doubts
        notes.append(
            f"{path.name}: no column names the split, so all pairs are {options['split']}: option `split`; "
            "if a column does, name it with the option columns: {split: NAME}"
        )
    return TableGuess(options, notes, doubts)


def _split_of_all(root: Path, path: Path) -> tuple[dict[str, Any], list[Doubt]]:
    """Return the option `split` of a table whose columns do not name the split, and a question about it.

    The name of the file or of the folder names the split. If it is the folder, the user is asked: a folder may be
    called `test` for another reason.
    """
    folder = root.resolve().name
    split = split_in_name(path.stem)
    split_of_folder = split_of_cell(folder)
    if split or split_of_folder in (None, "train"):
        return {"split": split or "train"}, []
    question = Fault("datasets.split_of_folder", folder=folder, split=split_of_folder)
    answers: list[dict[str, Any]] = [{"split": split_of_folder}, {"split": "train"}]
    return answers[0], [Doubt(question, answers)]


def _describe_columns(
    path: Path,
    rows: Sequence[Mapping[str, Any]],
    columns: Mapping[str, Any],
    doubts: Sequence[Doubt],
    split_columns: Sequence[str],
    unread_texts: Sequence[str],
) -> list[str]:
    """Return notes on the meaning of columns, and on columns that are not read.

    Args:
        columns: the column or list of columns of each field.
        split_columns: columns that name a split or may name one.
        unread_texts: text columns that are not read.
    """
    # A column that depends on an open question is not described, because its meaning is not certain
    open_fields = set[str]()
    for answer in _answers_of(doubts):
        open_fields |= answer.get("columns", {}).keys()
    meanings = []
    for field_name, names in columns.items():
        name = names if isinstance(names, str) else " and ".join(names or ["no column"])
        if field_name not in open_fields and field_name != name:
            meanings.append(f"{field_name} is {name}")
    unused_columns = _unused_columns(rows, columns, doubts, [*split_columns, *unread_texts])

    notes = []
    if meanings or open_fields or unused_columns:
        read_as = f", read as: {', '.join(meanings)}" if meanings else ""
        notes.append(f"{path.name}: has the columns {', '.join(rows[0])}{read_as}")
    if unread_texts:
        notes.append(f"{path.name}: text columns that are not read: {', '.join(unread_texts)}")
    if unused_columns:
        notes.append(f"{path.name}: other columns that are not read: {', '.join(unused_columns)}")
    return notes


def _answers_of(doubts: Sequence[Doubt]) -> list[dict[str, Any]]:
    """Return the answers to all questions in one list."""
    return list(chain.from_iterable(doubt.answers for doubt in doubts))


def _unused_columns(
    rows: Sequence[Mapping[str, Any]],
    columns: Mapping[str, Any],
    doubts: Sequence[Doubt],
    mentioned_columns: Sequence[str],
) -> list[str]:
    """Return the columns that no field reads and no question mentions.

    Args:
        mentioned_columns: columns, or paths into objects, that another note or question mentions.
    """
    used_columns = {*mentioned_columns, *PLAIN_FIELDS}
    columns_by_field: list[Mapping[str, Any]] = [columns]
    for answer in _answers_of(doubts):
        columns_by_field.append(answer.get("columns", {}))
        used_columns |= answer.get("where", {}).keys()
    for mapping in columns_by_field:
        for names in mapping.values():
            listed_names = [names] if isinstance(names, str) else list(names or ())
            for name in listed_names:
                used_columns.update(columns_in(name))
    # If a path into an object is used, the column that contains the object is used, too
    used_columns |= {name.split(".")[0] for name in used_columns}
    all_columns = dict.fromkeys(chain.from_iterable(rows))
    return [name for name in all_columns if name not in used_columns]


def _manifests_with(root: Path, path: Path) -> list[str | dict[str, str]]:
    """Return the possible values of the option `manifest` for a file.

    Usually, the only value is the file's name. If the folder has files whose names differ only in the name of a split,
    such as train.csv and test.csv, the value is a mapping from split to file. An ambiguous split name gives two values.
    """
    words = _words_without_split(path)
    split_of_file = {}
    for sibling in table_files(root):
        split = split_in_name(sibling.stem)
        if split is not None and _words_without_split(sibling) == words:
            split_of_file[sibling.name] = split
    if path.name not in split_of_file:
        return [path.name]
    manifests: list[str | dict[str, str]] = []
    for reading in readings_of_splits(split_of_file):
        file_of_split = {split: name for name, split in reading.items()}
        manifest: dict[str, str] = {split: file_of_split[split] for split in SPLITS if split in file_of_split}
        if len(manifest) > 1 and manifest not in manifests:
            manifests.append(manifest)
    return manifests or [path.name]


def _words_without_split(path: Path) -> list[str]:
    """Return the words, numbers and signs of a file name, without names of splits."""
    names_of_splits = {*chain(*SPLIT_ALIASES.values())}
    words = re.findall(r"[^\W\d_]+|\d+|[^\w\s.-]", plain_name(path.name))
    return [word for word in words if word not in names_of_splits]


def _choose_first(answers: Sequence[dict[str, Any]], question: Fault | None) -> tuple[dict[str, Any], list[Doubt]]:
    """Return the first answer, which maps fields to columns, and a question if there are several answers."""
    if not answers:
        return {}, []
    if len(answers) == 1 or question is None:
        return answers[0], []
    return answers[0], [Doubt(question, [{"columns": answer} for answer in answers])]


def _image_columns(root: Path, path: Path, values: Mapping[str, list[Any]]) -> tuple[dict[str, Any], list[Doubt]]:
    """Return the image columns or path templates by field, and the questions about them.

    Raises:
        DataError: no columns name the two images.
    """
    image_columns = find_image_columns(root, values)
    images, doubts = _choose_first(image_columns.answers, image_columns.question)
    images = images or _images_of_conversations(values)
    if not images:
        raise DataError("datasets.no_columns_of_images", path=path, columns=list(values))
    return images, doubts


def _columns_of_conversations(values: Mapping[str, list[Any]]) -> list[str]:
    """Return the columns that contain conversations, or texts that are meant to be conversations but cannot be read."""
    return [
        name
        for name, column in values.items()
        if any(is_conversation(value) or begins_as_conversation(value) for value in column)
    ]


def _images_of_conversations(values: Mapping[str, list[Any]]) -> dict[str, Any]:
    """Return the column with the single images of conversations, `{images: null}` if they have no images, or {}.

    Rows of such a table may have no image.
    """
    conversations = _columns_of_conversations(values)
    if not conversations:
        return {}
    columns_of_images = [name for name, column in values.items() if any(map(is_image, column))]
    if len(columns_of_images) == 1:
        return {"images": columns_of_images[0]}
    messages = str([values[name] for name in conversations])
    return {} if columns_of_images or IMAGE_MARK in messages else {"images": None}


def _text_columns(
    path: Path, values: Mapping[str, list[Any]], candidates: Mapping[str, list[Any]], split_columns: Sequence[str]
) -> tuple[dict[str, Any], list[Doubt], list[str]]:
    """Find the columns with captions, questions and system messages.

    Return these columns by field, the questions to the user about them, and the text columns that are not read.

    Args:
        values: the first values of each column.
        candidates: the same values without image columns.
        split_columns: columns that name a split or may name one.

    Raises:
        DataError: no column contains captions.
    """
    task_doubts = _task_doubts(path, candidates)
    columns_in_use = {*PLAIN_FIELDS, *split_columns, *task_doubts}
    text_columns = find_text_columns(candidates, columns_in_use)
    has_questions = any("question" in answer for answer in text_columns.answers)
    has_systems = SYSTEM_COLUMN in candidates and bool(has_questions or _columns_of_conversations(values))
    if has_systems:
        text_columns = find_text_columns(candidates, {*columns_in_use, SYSTEM_COLUMN})
    if not text_columns.answers:
        raise DataError("datasets.no_column_of_captions", path=path, columns=list(values))
    columns, caption_doubts = _choose_first(
        text_columns.answers,
        Fault("datasets.several_columns_of_captions", path=path.name, columns=list(text_columns.names())),
    )
    if caption_doubts:
        # Which column contains the questions depends on the answer that the user chooses
        columns = {"captions": columns["captions"]}
    if has_systems:
        columns = {**columns, SYSTEM_COLUMN: SYSTEM_COLUMN}
    return columns, [*task_doubts.values(), *caption_doubts], text_columns.unread


def _task_doubts(path: Path, values: Mapping[str, list[Any]]) -> dict[str, Doubt]:
    """Return a question for each column that names a few tasks: the rows of which task describe changes?"""
    doubts = {}
    for name, column in values.items():
        tasks = list(dict.fromkeys(value for value in column if isinstance(value, str)))
        if "task" in words_in(name) and 1 < len(tasks) <= MAX_TASKS:
            question = Fault("datasets.several_tasks", path=path.name, column=name)
            answers: list[dict[str, Any]] = [{"where": {name: task}} for task in tasks]
            answers.append({})
            doubts[name] = Doubt(question, answers)
    return doubts
