"""Read references from a benchmark's folder, from ingest's records, from a table of pairs or from a COCO file."""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet as pq

from m3diff.commands.score.predictions import ID_FIELDS, describe_columns, find_columns, read_text
from m3diff.commands.score.task import ScoringTask, find_record_table
from m3diff.datasets.files import Embedded, columns_in, describe, look_up, parse_captions, pick, read_json
from m3diff.datasets.filters import SplitNames, split_of_cell
from m3diff.datasets.spec import tested_rows
from m3diff.datasets.split_column import SplitChoice, choose_split_column
from m3diff.datasets.tables import TABLE_SUFFIXES, find_image_columns, images_of, names_of, read_rows, read_sample
from m3diff.records.errors import DataError, Fault, data_error_if_unreadable
from m3diff.records.schemas import SPLITS
from m3diff.records.tables import part_paths, read_table
from m3diff.scoring.grammar import Grammar
from m3diff.scoring.pairs import EvalPair

# Names of the columns that may hold captions in a table of pairs, the most likely first
CAPTION_COLUMNS = (
    "captions", "references", "caption", "reference", "sentences", "sentence", "descriptions", "description", "answers",
    "answer",
)  # fmt: skip
# Names of the columns that may hold the question of a row and its kind
QUESTION_COLUMNS = ("question", "query")
KIND_COLUMNS = ("kind", "question_type", "question_kind")


@dataclass(frozen=True)
class References:
    """Pairs with their references, but without predictions and images.

    pairs: pairs by name. They are the pairs of the split to score.
    grammar: grammar that parses captions into changes. None if the dataset does not have one.
    are_as_scored: True for the user's own file, whose texts should already be joined and truncated by the protocol's
        rules.
    aliases: name assigned to a pair by `m3diff caption` -> name of the pair.
    names_in_other_splits: names and ids of the pairs in other splits of a table. Their captions are left out.
    notes: notes on how the file was read.
    faults: faults of rows that cannot be read. These rows are not among the pairs.
    """

    pairs: dict[str, EvalPair]
    grammar: Grammar | None = None
    are_as_scored: bool = False
    aliases: Mapping[str, str] = field(default_factory=dict)
    names_in_other_splits: Collection[str] = ()
    notes: Sequence[str] = ()
    faults: Sequence[Fault] = ()


def find_references(task: ScoringTask, references: Path | None, data: Path | None) -> References:
    """Read the references of a task.

    Args:
        references: COCO file or table of pairs. None to read `data`.
        data: the dataset's folder, ingest's records of the dataset, or a folder that contains their table.

    Raises:
        DataError: there are no references, or a test pair cannot be read.
    """
    if references is not None:
        if not references.is_file():
            raise DataError("score.references_missing", path=references)
        if is_table(references):
            return read_reference_table(references, task)
        return read_coco_references(references, task)
    record_table = None if data is None else find_record_table(data)
    if record_table is not None:
        return read_record_references(record_table, task)
    assert task.spec is not None
    if data is None:
        raise DataError(
            "score.no_references_of_drawn" if task.spec.generate else "score.no_references_of_benchmark",
            dataset=task.dataset,
            names=task.spec.files,
            page=task.spec.page,
        )
    if not data.is_dir():
        raise DataError("score.data_missing", path=data, names=task.spec.files)
    return read_dataset_references(data, task)


def read_dataset_references(folder: Path, task: ScoringTask) -> References:
    """Read the test pairs from a dataset's folder, with their questions. Each turn of a dialogue is a pair.

    Raises:
        DataError: a file cannot be read, or a reference is not text.
    """
    assert task.spec is not None
    pairs = {}
    faults = []
    for row in task.spec.read(folder):
        if row.split != "test":
            continue
        where = f"{folder}: {row.source}"
        if row.fault or not isinstance(row.references, list):
            cause = row.fault or Fault("score.references_no_list", value=describe(row.references))
            faults.append(Fault("score.dataset_row_unusable", path=where, cause=cause))
            continue
        for tested_row in tested_rows(row):
            captions = [read_text(where, {"caption": text}, ("caption",)) for text in tested_row.references]
            pair = make_bare_pair(task, tested_row.name, captions or [""], row.change_types)
            pairs[tested_row.name] = replace(pair, question=tested_row.question, kind=row.kind)
    grammar = Grammar.load(folder / "grammar.json") if task.spec.grammar else None
    return References(pairs, grammar, faults=faults)


def read_record_references(path: Path, task: ScoringTask) -> References:
    """Read the test pairs from a table of records, and the grammar from the folder that contains the table.

    The records of an earlier release have no column for questions.
    """
    columns = ["id", "dataset", "references", "change_types"]
    columns += [name for name in ("question", "kind") if name in column_names(path)]
    test_rows = [("split", "=", "test")]
    rows = read_table(path, columns, test_rows, "files.unreadable_stage_output", writer="ingest").to_pylist()
    pairs = {}
    for row in rows:
        if row["id"] is not None:
            name = row["id"].removeprefix(f"{row['dataset']}/")
            pair = make_bare_pair(task, name, row["references"] or [""], row["change_types"] or [])
            pairs[name] = replace(pair, question=row.get("question"), kind=row.get("kind"))
    grammar = path.with_name("grammar.json")
    return References(pairs, Grammar.load(grammar) if grammar.is_file() else None)


def column_names(table: Path) -> list[str]:
    """Return the names of the columns of a table of records.

    Raises:
        DataError: the first part cannot be read.
    """
    first_part = part_paths(table)[0]
    with data_error_if_unreadable(first_part, "files.unreadable_stage_output", writer="ingest"):
        names: list[str] = pq.read_schema(first_part).names
    return names


def make_bare_pair(task: ScoringTask, name: str, references: list[str], change_types: list[str]) -> EvalPair:
    """Create a pair without images and without a prediction."""
    return EvalPair(
        id=f"{task.dataset}/{name}",
        dataset=task.dataset,
        images=(),
        references=references,
        change_types=change_types,
    )


def read_coco_references(path: Path, task: ScoringTask) -> References:
    """Read COCO captions: {"images": [{"id"}], "annotations": [{"image_id", "caption"}]}. Ids may be repeated.

    The form {id: [caption, ...]}, in which pycocoevalcap's scorers take references, is read, too.

    Raises:
        DataError: the file does not have this format or lists no images, or an image has no caption.
    """
    content = read_json(path, dict)
    if is_captions_by_id(content):
        return References(make_pairs(task, content), are_as_scored=True)
    captions: dict[str, list[str]] = {}
    for kind, id_field in (("images", "id"), ("annotations", "image_id")):
        if not isinstance(content.get(kind), list):
            raise DataError("score.no_coco_captions", path=path)
        for number, row in enumerate(content[kind]):
            where = f"{path}, {kind[:-1]} {number}"
            captions_of_image = captions.setdefault(read_text(where, row, (id_field,)).strip(), [])
            if kind == "annotations":
                captions_of_image.append(read_text(where, row, ("caption",)))
    uncaptioned = [name for name, captions_of_image in captions.items() if not captions_of_image]
    if not captions:
        raise DataError("score.no_image", path=path)
    if uncaptioned:
        raise DataError(
            "score.images_without_caption",
            path=path,
            value=len(uncaptioned),
            total=len(captions),
            names=uncaptioned,
            name=uncaptioned[0],
        )
    return References(make_pairs(task, captions), are_as_scored=True)


def is_captions_by_id(content: Mapping[str, Any]) -> bool:
    """Return whether a JSON object maps each id to a list of at least one caption."""
    lists = list(content.values())
    has_only_captions = all(
        isinstance(captions, list) and captions and all(isinstance(caption, str) for caption in captions)
        for captions in lists
    )
    return bool(lists) and has_only_captions and "annotations" not in content


def make_pairs(task: ScoringTask, captions: Mapping[str, list[str]]) -> dict[str, EvalPair]:
    """Create pairs whose change types are not known, by name."""
    return {name: make_bare_pair(task, name, references, []) for name, references in captions.items()}


def is_table(path: Path) -> bool:
    """Return True if a file is a table of pairs. A JSON file is a table if it contains a list that is not empty.

    Other JSON files are read as COCO files. Reading them fails if they do not have the COCO format.
    """
    suffix = path.suffix.lower()
    if suffix != ".json":
        return suffix in TABLE_SUFFIXES
    rows = read_json(path, object)
    return isinstance(rows, list) and bool(rows)


@dataclass(frozen=True)
class ReferenceColumns:
    """The columns of a table of pairs that is passed to `--references`.

    images: `{before: ..., after: ...}` or `{images: ...}`. Empty if there are no such columns or the choice is unclear.
    ids: column of ids. None if the pairs are named after their images.
    captions: one or more columns, each with a text or a list of texts.
    split: column that names the split of each pair, and the meaning of its values.
    question: column of questions that the captions answer. None if there is none.
    kind: column of the kinds of questions. None if there is none.
    question_ids: column of ids of questions, which predictions may use in place of `ids`. None if there is none.
    notes: notes on columns that were chosen although their names do not make their meaning clear.
    """

    images: Mapping[str, str]
    ids: str | None
    captions: list[str]
    split: SplitChoice
    question: str | None = None
    kind: str | None = None
    question_ids: str | None = None
    notes: Sequence[str] = ()


def find_reference_columns(path: Path) -> ReferenceColumns:
    """Find the columns of a table of pairs by their names, ignoring case and punctuation.

    Raises:
        DataError: the file cannot be read, or it does not have a column of captions or columns that identify the pairs.
    """
    sample = read_sample(path)
    values = sample.values()
    header: dict[str, None] = {}  # a dict keeps the order of the columns
    for row in sample.rows:
        header |= dict.fromkeys(row)
    image_columns = find_image_columns(path.parent, values)
    images = image_columns.answers[0] if len(image_columns.answers) == 1 else {}
    possible_image_columns: set[str] = set()
    for answer in image_columns.answers:
        for name in answer.values():
            # if several templates are possible, their columns may still contain the ids
            if images or "{" not in name:
                possible_image_columns |= set(columns_in(name))
    columns = [name for name in header if name not in possible_image_columns]
    ids = next(iter(find_columns(columns, ID_FIELDS)), None)
    question = next(iter(find_columns(columns, QUESTION_COLUMNS)), None)
    captions = find_caption_columns(columns)
    used_columns = {ids, question, *captions}
    split_values = {name: values[name] for name in columns if name in values and name not in used_columns}
    split = choose_split_column(path, sample.options, split_values, {})
    notes = []
    if split.column is None and split.occupied:
        names = " and ".join(split.occupied)
        notes.append(f"{path.name}: it is unclear whether {names} names the split of a pair, so all rows are used")
    if not captions:
        unused_columns = [name for name in columns if name not in (ids, question) and name not in split.occupied]
        text_columns = [name for name in unused_columns if has_sentences(values.get(name, []))]
        if len(text_columns) == 1:
            captions = text_columns
            notes.append(f"{path.name}: the column {captions[0]} is used as the column of captions")
    all_columns = describe_columns(header, sample.options.get("delimiter"))
    if not captions:
        raise DataError("score.no_caption_column", path=path, columns=all_columns)
    if ids is None and not images:
        if image_columns.question:
            raise DataError(
                "score.image_columns_unclear", path=path, columns=all_columns, question=image_columns.question
            )
        raise DataError("score.no_id_column", path=path, columns=all_columns)
    return ReferenceColumns(
        images=images,
        ids=ids,
        captions=captions,
        split=split,
        question=question,
        kind=None if question is None else next(iter(find_columns(columns, KIND_COLUMNS)), None),
        question_ids=None if question is None else next(iter(find_columns(columns, ("question_id",))), None),
        notes=notes,
    )


def find_caption_columns(columns: Iterable[str]) -> list[str]:
    """Return the columns with the most likely name for captions.

    Numbers in names are ignored: caption_1 and caption_2 both hold captions of the same pair.
    """
    by_spelling: dict[str, list[str]] = {}
    for name in columns:
        by_spelling.setdefault(re.sub(r"[\W_\d]+", "", name).casefold(), []).append(name)
    return next((by_spelling[name] for name in CAPTION_COLUMNS if name in by_spelling), [])


def has_sentences(column: Sequence[Any]) -> bool:
    """Return True if most values of a column are texts with several words."""
    sentences = sum(isinstance(value, str) and " " in value.strip() for value in column)
    return 2 * sentences > len(column)


@dataclass(frozen=True)
class RowSelection:
    """The rows of a table that are scored.

    is_scored: for each row, whether it belongs to the split to score.
    notes: note on the splits of the table. Empty if all rows are scored.
    """

    is_scored: list[bool]
    notes: Sequence[str] = ()


def select_scored_rows(path: Path, rows: Sequence[tuple[str, Mapping[str, Any]]], split: SplitChoice) -> RowSelection:
    """Select the rows of the test split, or all rows if the table does not have several splits.

    Raises:
        DataError: the table has several splits, and none of them is the test split.
    """
    if split.column is None:
        return RowSelection([True] * len(rows))
    split_names = SplitNames(split.splits)
    splits = []
    for _, row in rows:
        cell = pick(row, split.column)
        name = split_names.translate(cell, cell)
        splits.append(split_of_cell(name) or ("no split" if name in (None, "") else str(name)))
    counts = Counter(splits)
    if len(counts) <= 1 or counts.keys().isdisjoint(SPLITS):
        return RowSelection([True] * len(rows))
    counted_splits = [f"{name} ({count:,})" for name, count in counts.items()]
    if "test" not in counts:
        raise DataError("score.no_test_split", path=path, field=split.column, names=counted_splits)
    note = f"{path.name}: the column {split.column} names the splits {', '.join(counted_splits)}; only test is scored"
    return RowSelection([name == "test" for name in splits], [note])


def read_reference_table(path: Path, task: ScoringTask) -> References:
    """Read references from a table with one row per pair, or with one row per caption and several rows per pair.

    If a column names several splits, only the pairs of the test split are scored. Predictions may identify a pair by
    its id or by the names that `m3diff caption` assigns to it.

    If a column holds questions, each question about a pair is a record. If a pair has several questions, they are
    called "<pair>?0", "<pair>?1", ... in the order of the table, as ingest calls them.

    Raises:
        DataError: the columns cannot be found (see `find_reference_columns`), the table has several splits but no test
            split, a row cannot be read or has no id, two rows have the same id but different images, or a pair has no
            caption.
    """
    columns = find_reference_columns(path)
    rows = list(read_rows(path, columns.captions))
    selection = select_scored_rows(path, rows, columns.split)
    captions: dict[str, list[str]] = {}
    questions: dict[str, RowName] = {}
    aliases: dict[str, str] = {}
    names_in_other_splits: dict[str, None] = {}  # a dict keeps the order
    for number, named_row in enumerate(name_rows(path, rows, columns, selection)):
        if not selection.is_scored[number]:
            names_in_other_splits |= dict.fromkeys([named_row.pair, *named_row.aliases])
            continue
        aliases |= dict.fromkeys(named_row.aliases, named_row.record)
        questions.setdefault(named_row.record, named_row)
        captions.setdefault(named_row.record, []).extend(read_captions(*rows[number], columns.captions))
    uncaptioned = [name for name, captions_of_pair in captions.items() if not captions_of_pair]
    if not captions:
        raise DataError("score.no_pair", path=path)
    if uncaptioned:
        raise DataError(
            "score.pairs_without_caption",
            path=path,
            value=len(uncaptioned),
            total=len(captions),
            names=uncaptioned,
            name=uncaptioned[0],
        )
    pairs = {
        name: replace(pair, question=questions[name].question, kind=questions[name].kind)
        for name, pair in make_pairs(task, captions).items()
    }
    return References(
        pairs=pairs,
        are_as_scored=True,
        aliases={name: pair_id for name, pair_id in aliases.items() if name not in captions},
        # splits may number their pairs separately, so a name may occur in two splits
        names_in_other_splits=[name for name in names_in_other_splits if name not in captions and name not in aliases],
        notes=[*columns.notes, *selection.notes],
    )


class RowName(NamedTuple):
    """The names that predictions may use for a row of a table, and its question.

    pair: name of the pair.
    record: name of the record, which is that of the pair unless the pair has several questions.
    aliases: further names of the record.
    image_name: alias that is the name of the images, which all questions about them share. None without images.
    question, kind: question of the row and its kind. None for a caption.
    """

    pair: str
    record: str
    aliases: list[str]
    image_name: str | None = None
    question: str | None = None
    kind: str | None = None


def name_rows(
    path: Path, rows: Sequence[tuple[str, Any]], columns: ReferenceColumns, selection: RowSelection
) -> list[RowName]:
    """Return the names and the question of each row.

    Raises:
        DataError: a row has no id, two rows have the same id but different images, or a question is not text.
    """
    images = [images_of(location, row, columns.images) for location, row in rows] if columns.images else []
    distinct_images = list(dict.fromkeys(images))
    pair_names = dict(zip(distinct_images, names_of(locate_images(path, distinct_images)), strict=True))
    # repeated rows have names, too, because `m3diff caption` captions them
    row_names = names_of(locate_images(path, images))
    images_by_id: dict[str, tuple[Any, Any]] = {}
    named_rows = []
    for number, (location, row) in enumerate(rows):
        pair = pair_names[images[number]] if columns.ids is None else read_text(location, row, [columns.ids]).strip()
        image_name = pair_names[images[number]] if images else None
        aliases = [] if image_name is None else [image_name, row_names[number]]
        has_known_images = images and selection.is_scored[number]
        if has_known_images and images_by_id.setdefault(pair, images[number]) != images[number]:
            raise DataError("score.id_of_other_images", path=location, field=columns.ids, name=pair)
        if columns.question_ids is not None:
            aliases.append(read_text(location, row, [columns.question_ids]).strip())
        question = None if columns.question is None else read_optional_text(location, row, columns.question)
        kind = None if columns.kind is None else read_optional_text(location, row, columns.kind)
        named_rows.append(RowName(pair, pair, aliases, image_name, question, kind))
    return name_questions(named_rows, selection)


def name_questions(named_rows: Sequence[RowName], selection: RowSelection) -> list[RowName]:
    """Return the rows with the names of their records: the name of the pair, with a number if it has several questions.

    The questions of a pair are counted in the scored rows. The name of a pair with several questions is no alias.
    """
    numbers_by_pair: dict[str, dict[str | None, int]] = {}
    for is_scored, row in zip(selection.is_scored, named_rows, strict=True):
        if is_scored:
            numbers = numbers_by_pair.setdefault(row.pair, {})
            numbers.setdefault(row.question, len(numbers))
    rows_of_records = []
    for row in named_rows:
        numbers = numbers_by_pair.get(row.pair, {})
        if len(numbers) > 1 and row.question in numbers:
            own_aliases = [alias for alias in row.aliases if alias != row.image_name]
            row = row._replace(record=f"{row.pair}?{numbers[row.question]}", aliases=own_aliases)
        rows_of_records.append(row)
    return rows_of_records


def read_optional_text(location: str, row: Any, column: str) -> str | None:
    """Return the text of a cell without white space around it, or None if the cell is empty.

    Raises:
        DataError: the value is not text.
    """
    value = look_up(row, column)
    if value is None:
        return None
    return read_text(location, {column: value}, [column]).strip() or None


def locate_images(table: Path, images: Iterable[tuple[Any, Any]]) -> list[tuple[Path | Embedded, Path | Embedded]]:
    """Return the two images of each row as paths, resolved from the table's folder, or as embedded images."""

    def source(image: Any) -> Path | Embedded:
        return image if isinstance(image, Embedded) else table.parent / str(image)

    return [(source(before), source(after)) for before, after in images]


def read_captions(location: str, row: Any, columns: Iterable[str]) -> list[str]:
    """Return the captions of a row, except for empty ones.

    Raises:
        DataError: a caption is not text.
    """
    captions = []
    for column in columns:
        for text in parse_captions(look_up(row, column)) or ():
            caption = read_text(location, {column: text}, [column])
            if caption.strip():
                captions.append(caption)
    return captions
