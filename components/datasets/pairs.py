"""Read your own table of pairs with captions, or of images with questions and answers.

A pair is an image before and an image after a change. The table has one row per pair, or several rows per pair with one
caption each:

    pairs.csv          before,after,captions,split      (or .tsv, .json, .jsonl, .parquet: option `manifest`)
    a/1.png, b/1.png   images, relative to the root

    a/1.png,b/1.png,the lamp is out,train
    {"before": "a/1.png", "after": "b/1.png", "captions": ["the lamp is out", "it is dark"], "split": "train"}

`captions` is a list, a text with a JSON list, or a single caption. These columns are optional: `id` (the default is the
two image paths), `scene` (pairs of the same scene must share a split) and `change_types`, where `none` alone marks a
pair without a change. Options describe other layouts; `m3diff data check ROOT` suggests them:

    manifest   a file, a pattern (`part-*.jsonl`), or one of these per split: {train: train.csv, val: dev.csv}
    columns    the column names: {before: img_a}. {id: null} means that the table has no such column. A name may be a
               path into nested values (`meta.split`, `images.0`, `sentences.*.raw`) or a template of these
               (`B/{name}.png`, `{number:06}.png`). `images` names a list of images. If several names are listed,
               the first one that a row contains is read: {captions: [instruction, prompt]}
    no_caption texts that stand for a missing caption: [nan, n/a, "-"]. Pairs that have only such texts are skipped. []
               means that such texts are captions. Without this option they are refused
    separator  the separator between several captions in one text: "|". "" means that each text is one caption
    split      the split of all pairs, if no column names it; or the shares by which splits are drawn at random:
               {test: 0.15, val: 0.1, seed: 0}; see `drawn_split.py`
    splits     the split names in the table: {validation: val, dev: val}, {0: train, 1: test}
    rows       the path to the rows in a JSON file: `data`. The rows may be an object: {"7": ["it fell"]} has the
               columns `key` and `value`
    where      the rows to read: {label: "True", lang: [en, de]}. All other rows are skipped
    image_counts  the numbers of images that a row may have: [1, 2]. All other rows are skipped and counted
    pairs_only true: rows without exactly two images and one answer are skipped and counted
    no_change  the rows without a change: {changeflag: 0}
    delimiter  the delimiter of a CSV file, if it is not a comma
    confirmed  options and findings that look like mistakes but are intended: [where, encoding]

A caption answers the question what changed, which training asks in several wordings. A row with a question of its own
asks that question. It is in a conversation (LLaVA, ShareGPT, OpenAI, ms-swift, LLaMA-Factory; see `conversations.py`)
or in a column that `columns` names, or in several columns that a template joins:

    {images: image, captions: conversations}   {images: images, captions: messages}
    {question: query, captions: answer, kind: question_type}
    {images: images, question: "{instruction}\\n{input}", captions: output, history: history}

Such a row may have zero, one or two images, in the column `images`. {images: null} means that no row has an image.
`kind` names the kind of question, such as "count", for scores by kind. `history` lists the earlier questions and
answers of a dialogue. Rows with the same images are one image set. If they also have the same question and history,
they are one record whose answers are all right. A column `system` has the system message of a row with a question;
{system: null} means that the column has another meaning.

In a CSV file, the lists in the columns of images, histories and conversations are JSON texts. An empty cell of `images`
means that the row has no image.

`where`, `no_change` and `splits` compare values by meaning (`filters.py`): `no` matches "no", "FALSE", 0 and "0.0", and
`0` matches "0.0", but a quoted "no" is a text. An option that is probably a mistake is refused unless it is listed in
`confirmed`. For example, `where` or `no_change` may match no row or every row. Or the table may not contain the
`separator`, a name in `splits`, or a name in `columns` that is optional or one of several. Or its conversations have
different system messages, which are counted but not read (`systems`). Captions that were probably not written by a
person are counted by kind (refusals, roles, chat, tokens, literals, markup, encoding, escapes, repeats). Each kind that
occurs in a test split must be confirmed. Change types such as "unchanged" or "No change" are read as `none`.

Paths are relative to the root. An absolute path or a file:// URL must point into the root. A Parquet file may contain
the images, in the format of the `datasets` library (`Image`, or a list of these); ingest writes them to files next to
its records.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import unquote

from pydantic import AfterValidator, Discriminator, Field, Tag

from m3diff.datasets.conversations import (
    SYSTEM_COLUMN,
    Conversation,
    count_marks,
    is_conversation,
    parse_conversation,
    read_conversation,
    read_history,
    without_leading_marks,
)
from m3diff.datasets.drawn_split import SplitShares, as_shares, draw_splits
from m3diff.datasets.files import (
    Embedded,
    columns_in,
    describe,
    fault_of_images,
    look_up,
    parse_captions,
    parse_images,
    read_values,
)
from m3diff.datasets.filters import (
    ColumnNames,
    NoChangeNames,
    RowFilter,
    SplitNames,
    columns_to_find,
    refuse_faults,
)
from m3diff.datasets.spec import (
    DatasetSpec,
    Licence,
    Permission,
    Protocol,
    Row,
    RowsWithNotes,
    merge_rows,
    unexpected,
)
from m3diff.datasets.tables import SIDES
from m3diff.records.errors import DataError, Fault, ValueFault, format_count
from m3diff.records.sample import MOST_IMAGES
from m3diff.records.schemas import NO_CHANGE, Split

REQUIRED = ("before", "after", "captions", "split")
OPTIONAL = ("id", "scene", "change_types")
QUESTION_FIELDS = ("question", "history", "kind")  # fields that only a named column has

Manifest = Annotated[
    Annotated[str, Tag("[file]")] | Annotated[Mapping[Split, str], Tag("[files]")],
    Discriminator(lambda value: "[files]" if isinstance(value, Mapping) else "[file]"),
]


# The split of all pairs, or the shares by which the splits are drawn
OwnSplit = Annotated[
    Annotated[Split, Tag("[split]")] | Annotated[SplitShares, Tag("[shares]")],
    Discriminator(lambda value: "[shares]" if isinstance(value, Mapping | SplitShares) else "[split]"),
]


def _check_template(column: str) -> str:
    """Return the column name or template. Raise a ValueFault if its braces do not match."""
    try:
        columns_in(column)
    except ValueError as error:
        raise ValueFault("datasets.invalid_template", value=column, cause=str(error)) from error
    return column


Column = Annotated[str, AfterValidator(_check_template)]
Columns = Mapping[
    Literal[
        "before",
        "after",
        "images",
        "captions",
        "split",
        "id",
        "scene",
        "change_types",
        "question",
        "history",
        "kind",
        "system",
    ],
    Annotated[
        Annotated[Column, Tag("[column]")] | Annotated[tuple[Column, ...], Tag("[columns]")],
        Discriminator(lambda value: "[columns]" if isinstance(value, list | tuple) else "[column]"),
    ]
    | None,
]
# For each column, a value or a list of values that a row may have. Values are compared by meaning
Values = Mapping[str, Any]
# The numbers of images that a row may have
ImageCounts = Annotated[tuple[Annotated[int, Field(ge=0, le=MOST_IMAGES)], ...], Field(min_length=1)]
# Values of the option `confirmed`: options that match no row or every row, and kinds of odd captions in a test split
Confirmable = Literal[
    "where",
    "no_change",
    "splits",
    "columns",
    "separator",
    "systems",
    "refusals",
    "roles",
    "chat",
    "tokens",
    "literals",
    "markup",
    "encoding",
    "escapes",
    "repeats",
]


def read(
    root: Path,
    manifest: Manifest = "pairs.csv",
    columns: Columns | None = None,
    split: OwnSplit | None = None,
    splits: Mapping[Any, Split] | None = None,
    rows: str = "",
    where: Values | None = None,
    no_change: Values | None = None,
    delimiter: Annotated[str, Field(min_length=1, max_length=1)] | None = None,
    image_counts: ImageCounts | None = None,
    pairs_only: bool = False,
    no_caption: Sequence[str] | None = None,
    separator: str | None = None,
    confirmed: Sequence[Confirmable] = (),
) -> RowsWithNotes:
    """Return one row per pair or question. Rows of the table with the same id are merged.

    A row that contradicts an earlier row with the same id is returned with a fault.

    Raises:
        DataError: a file cannot be read. Or an option matches no row or every row and is not confirmed. Or splits
            should be drawn, but the table names them, or no pairs are drawn for testing or training.
    """
    named_columns = dict(columns or {})
    columns_of_field = _columns_of_fields(named_columns)
    shares = as_shares(split)
    if shares is not None:
        _refuse_named_splits(root, manifest, named_columns, splits)
        columns_of_field["split"] = ()
    split_of_all = split if isinstance(split, str) else None
    root_names = (f"{root.absolute()}/", f"{root.resolve()}/")
    checks = _OptionChecks(root, named_columns, splits or {}, where or {}, no_change or {}, separator, confirmed)
    skipped_rows = _SkippedRows((len(SIDES),) if pairs_only else image_counts, pairs_only)
    names = _QuestionNames()

    def read_rows() -> Iterator[Row]:
        for path, folder, file_split in _manifest_files(root, manifest, split_of_all):
            split_columns = () if file_split else columns_of_field["split"]
            required_fields = _required_fields(columns_of_field, with_split=not file_split and not shares)
            header = _required_columns(required_fields, columns_of_field)
            for location, value in read_values(path, header, delimiter, rows):
                if shares:
                    _refuse_split_column(path.parent / location, value, named_columns)
                if not checks.selects(value, split_columns):
                    continue
                fields, fault = _read_fields(value, columns_of_field, required_fields)
                if isinstance(value, dict) and skipped_rows.skips(folder + location, fields, fault):
                    continue
                checks.count_systems(path, fields)
                if checks.is_unchanged(value):
                    fields["change_types"] = [NO_CHANGE]
                fields["images"] = tuple(relative_to_root(image, root_names) for image in fields["images"])
                row = _make_row(folder + location, fields, file_split, checks, names)
                yield replace(row, fault=fault or row.fault)
        checks.finish()
        checks.notes.extend(skipped_rows.notes())

    pairs = _drop_placeholders(merge_rows(read_rows(), across_splits=True), no_caption or (), checks.notes)
    return RowsWithNotes(pairs if shares is None else _draw_lazily(root, pairs, shares, checks.notes), checks.notes)


def _columns_of_fields(columns: Mapping[Any, Any]) -> dict[str, tuple[str, ...]]:
    """Return the columns of each field according to the option `columns`; an empty tuple if a field has no column."""
    documented_columns = {field: field for field in (*REQUIRED, *OPTIONAL, SYSTEM_COLUMN)}
    columns_of_field: dict[str, tuple[str, ...]] = {}
    for field, names in (documented_columns | dict(columns)).items():
        columns_of_field[field] = (names,) if isinstance(names, str) else tuple(names or ())
    return columns_of_field


def _required_fields(columns_of_field: Mapping[str, tuple[str, ...]], with_split: bool) -> list[str]:
    """Return the fields that every row must have."""
    image_fields = list(SIDES)
    if "images" in columns_of_field:
        image_fields = ["images"] if columns_of_field["images"] else []
    return [*image_fields, "captions", "split"] if with_split else [*image_fields, "captions"]


def _required_columns(fields: Sequence[str], columns_of_field: Mapping[str, tuple[str, ...]]) -> list[str]:
    """Return the columns that a table must have. If a field lists several columns, each of them is optional."""
    required_columns = []
    for field in fields:
        names = columns_of_field[field]
        if len(names) < 2:
            required_columns += columns_in(names[0] if names else field)
    return required_columns


def _refuse_named_splits(root: Path, manifest: Manifest, columns: Mapping[Any, Any], splits: Any) -> None:
    """Check that no other option names splits, which would contradict an option `split` that draws them.

    Raises:
        DataError: another option names the splits.
    """
    fault = fault_of_drawn_split(manifest, columns, splits)
    if fault is not None:
        raise DataError(fault.at(path=root))


def fault_of_drawn_split(manifest: Any, columns: Mapping[Any, Any], splits: Any) -> Fault | None:
    """Return a fault if an option names splits although the splits are drawn, otherwise None."""
    if isinstance(manifest, Mapping):
        return Fault("datasets.draw_beside_manifest")
    if columns.get("split"):
        return Fault("datasets.draw_beside_columns", value=columns["split"])
    if splits:
        return Fault("datasets.draw_beside_splits")
    return None


def _refuse_split_column(location: Path, value: Any, columns: Mapping[Any, Any]) -> None:
    """If splits are drawn, check that a row does not name one in the documented column `split`.

    Raises:
        DataError: the row has a value in `split`, and the option `columns` does not mention this column.
    """
    if isinstance(value, dict) and value.get("split") is not None and "split" not in columns:
        raise DataError("datasets.draw_beside_column_split", path=location, value=describe(value["split"]))


def _draw_lazily(root: Path, rows: Iterable[Row], shares: SplitShares, notes: list[str]) -> Iterator[Row]:
    """Yield the rows with drawn splits. This is a generator, so the table is only read when the first row is needed."""
    yield from draw_splits(root, list(rows), shares, notes)


def _drop_placeholders(rows: Iterable[Row], no_caption: Sequence[str], notes: list[str]) -> Iterator[Row]:
    """Remove texts that stand for a missing caption from the rows. If no row has such a text, add a note."""
    dropped_texts = {text.strip().casefold() for text in no_caption}
    caption_count = 0
    dropped_count = 0
    for row in rows:
        captions = row.references
        if dropped_texts and not row.fault and isinstance(row.references, list):
            captions = [
                text
                for text in row.references
                if not (isinstance(text, str) and text.strip().casefold() in dropped_texts)
            ]
            caption_count += len(row.references)
            dropped_count += len(row.references) - len(captions)
        yield replace(row, references=captions, without_caption=bool(row.references) and not captions)
    if caption_count and not dropped_count:
        # This is a note and not an error, because an entry may list texts for files that will be added later
        notes.append(
            f"no_caption: none of {format_count(caption_count, 'caption')} is {' or '.join(map(repr, no_caption))}"
        )


class _OptionChecks:
    """Applies options such as `where` to each row, and checks after the last row whether the table has their values."""

    def __init__(
        self,
        root: Path,
        columns: Mapping[Any, Any],
        splits: Mapping[Any, Split],
        where: Values,
        no_change: Values,
        separator: str | None,
        confirmed: Sequence[str],
    ) -> None:
        self.root = root
        self.separator = separator
        self.confirmed = confirmed
        self.notes: list[str] = []
        self.splits = SplitNames(splits)
        self.change_types = NoChangeNames()
        self._where = RowFilter("where", where)
        self._no_change = RowFilter("no_change", no_change)
        self._columns = ColumnNames(columns_to_find(columns, REQUIRED + ("images",)))
        self._systems: dict[Path, Counter[str]] = {}
        self._text_count = 0
        self._separated_count = 0

    def selects(self, value: Any, split_columns: Sequence[str]) -> bool:
        """Return True if `where` selects the row. An invalid row is also selected, so that its fault is reported.

        Args:
            split_columns: columns that may name the row's split.
        """
        if not isinstance(value, dict):
            return True
        self._columns.add(value)
        if self.splits.splits:
            for column in split_columns:
                # If a row does not fit a template, the fault is reported when its fields are read
                with suppress(DataError):
                    self.splits.add(look_up(value, column))
        return not self._where.accepted_values or self._where.matches(value)

    def is_unchanged(self, value: Any) -> bool:
        """Return True if `no_change` matches the row."""
        return isinstance(value, dict) and bool(self._no_change.accepted_values) and self._no_change.matches(value)

    def count_systems(self, path: Path, fields: Mapping[str, Any]) -> None:
        """Count the system messages of a row. They are not read."""
        self._systems.setdefault(path, Counter()).update(fields["systems"])

    def _system_faults(self) -> Iterator[Fault]:
        """Yield a fault for each file whose conversations have different system messages."""
        for path, counts in self._systems.items():
            if len(counts) > 1:
                examples = [f"{text[:60]!r} ({count:,})" for text, count in counts.most_common(3)]
                yield Fault("datasets.several_systems", file=path.name, value=len(counts), texts=examples)

    def _system_notes(self) -> Iterator[str]:
        """Yield a sentence with the number of system messages that are not read."""
        count = sum(counts.total() for counts in self._systems.values())
        if count:
            yield f"the template of the model replaces {format_count(count, 'system message')} of the conversations"

    def separate(self, captions: Any) -> Any:
        """Split each text in a list of captions at the separator. Return any other value unchanged."""
        if not self.separator or not isinstance(captions, list):
            return captions
        if not all(isinstance(text, str) for text in captions):
            return captions
        self._text_count += len(captions)
        self._separated_count += sum(self.separator in text for text in captions)
        separated_captions = []
        for text in captions:
            parts = [part.strip() for part in text.split(self.separator) if part.strip()]
            separated_captions += parts or [""]
        return separated_captions

    def finish(self) -> None:
        """Check the options and complete the notes after the last row.

        Raises:
            DataError: an option matches no row or every row, and the entry does not confirm it.
        """
        separator_fault = Fault(
            "datasets.separator_in_no_caption", key="separator", value=self.separator, captions=self._text_count
        )
        faults = {
            "columns": self._columns.faults("columns"),
            "where": self._where.faults(),
            "no_change": self._no_change.faults(),
            "splits": self.splits.faults(),
            "separator": [separator_fault] if self._text_count and not self._separated_count else [],
            "systems": list(self._system_faults()),
        }
        refuse_faults(self.root, faults, self.confirmed)
        self.notes.extend([*self._where.notes(), *self._no_change.notes(), *self.change_types.notes()])
        self.notes.extend(self._system_notes())


def _manifest_files(root: Path, manifest: Manifest, split: Split | None) -> Iterator[tuple[Path, str, Split | None]]:
    """Yield the files that the option `manifest` names.

    Yields:
        The path of a file, the folder to show before the file's name in messages, and the split of all pairs in the
        file. The split is None if each row names it.
    """
    file_of_split: Iterable[tuple[Split | None, str]]
    file_of_split = [(split, manifest)] if isinstance(manifest, str) else manifest.items()
    for file_split, name in file_of_split:
        for path in files_called(root, name):
            folder = path.relative_to(root).parent if path != root / name else Path()
            yield path, "" if folder == Path() else f"{folder}/", file_split


def files_called(root: Path, name: str) -> list[Path]:
    """Return the file with this name, or the files that match it as a pattern.

    Raises:
        DataError: no file matches the pattern.
    """
    if (root / name).exists() or not any(letter in name for letter in "*?["):
        return [root / name]
    paths = sorted(root.glob(name))
    if not paths:
        raise DataError("datasets.pattern_without_file", path=root / name)
    return paths


def relative_to_root(image: Any, root_names: tuple[str, str]) -> Any:
    """Convert an absolute path or file:// URL of an image in the root to a path relative to the root.

    Other values are returned unchanged.

    Args:
        root_names: absolute paths of the root with a trailing slash, without and with links resolved.
    """
    if not isinstance(image, str):
        return image
    file_address = re.match("file:(//(localhost)?)?(?=/)", image, re.IGNORECASE)
    path = unquote(image[file_address.end() :]) if file_address else image
    for root_name in root_names:
        if path.startswith(root_name):
            return path.removeprefix(root_name)
    return image


def _read_fields(
    value: Any, columns_of_field: Mapping[str, tuple[str, ...]], required_fields: list[str]
) -> tuple[dict[str, Any], Fault | None]:
    """Return the values of a row by field, and the fault that makes the row unusable, or None.

    Besides the fields of the option `columns`, `images` are all images of the row, `image_column` is the value of the
    column with the list of images, `question` is None if the row has captions, and `systems` are the different system
    messages in the conversation and in the column `system`.
    """
    fields: dict[str, Any] = dict.fromkeys((*REQUIRED, *OPTIONAL, *QUESTION_FIELDS, SYSTEM_COLUMN))
    fields |= {"images": (None, None), "image_column": None, "history": (), "systems": ()}
    if isinstance(value, DataError):
        return fields, value.fault
    if not isinstance(value, dict):
        return fields, unexpected("row", "an object", value)
    try:
        cells_of_field: dict[str, list[Any]] = {}
        for field, columns in columns_of_field.items():
            cells_of_field[field] = [look_up(value, column) for column in columns]
            fields[field] = next((cell for cell in cells_of_field[field] if cell is not None), None)
        image_cell = fields["images"] if "images" in columns_of_field else None
        fields["image_column"] = parse_images(image_cell, " or ".join(columns_of_field.get("images", ())))
    except DataError as error:
        # `captions` may be a conversation that is not yet read
        values = {"images": (fields["before"], fields["after"]), "captions": None, "history": ()}
        return fields | values, error.fault
    # before the question, so that a row is skipped by its number of images whatever else is wrong with it
    fields["images"] = _list_images(fields, columns_of_field)
    try:
        fields["captions"] = _read_captions(columns_of_field["captions"], cells_of_field["captions"])
        _read_question(fields, columns_of_field)
    except DataError as error:
        return fields | {"captions": None, "history": ()}, error.fault
    fault = _fault_of_number_of_images(fields, columns_of_field)
    if fault:
        return fields, fault
    missing_fields = [field for field in required_fields if field != "images" and fields[field] is None]
    missing_columns = [" or ".join(columns_of_field[field]) or field for field in missing_fields]
    if missing_columns:
        return fields, Fault("datasets.missing_value", key=", ".join(missing_columns))
    return fields, None


def _list_images(fields: Mapping[str, Any], columns_of_field: Mapping[str, tuple[str, ...]]) -> tuple[Any, ...]:
    """Return the images of a row. A single image in the column `images` need not be in a list."""
    if "images" not in columns_of_field:
        return (fields["before"], fields["after"])
    images = fields["image_column"]
    if images is None:
        return ()
    return tuple(images) if isinstance(images, list) else (images,)


def _read_captions(columns: Sequence[str], cells: Sequence[Any]) -> Any:
    """Return the captions or the conversation in the columns of a row. Captions of several columns are combined.

    Raises:
        DataError: a cell contains a conversation as a text that is not valid JSON.
    """
    values = [parse_conversation(cell, column) for column, cell in zip(columns, cells, strict=True)]
    values = [value for value in values if value is not None]
    if len(values) > 1:
        return _join_captions(values)
    return values[0] if values else None


def _read_question(fields: dict[str, Any], columns_of_field: Mapping[str, tuple[str, ...]]) -> None:
    """Read the question, history and answers of a row into its fields. A row of captions has no question.

    Raises:
        DataError: a conversation or history cannot be read, or has another number of image marks than images.
    """
    caption_column = "".join(columns_of_field["captions"][:1])
    conversation: Conversation | None = None
    if is_conversation(fields["captions"]):
        conversation = read_conversation(fields["captions"], caption_column)
    elif fields["question"] is not None:
        history = read_history(fields["history"], "".join(columns_of_field.get("history", ())))
        conversation = Conversation(history, fields["question"], fields["captions"])
    fields["history"] = ()
    if conversation is None:
        return
    marks = count_marks(conversation)
    conversation = without_leading_marks(conversation)
    fields |= {
        "history": conversation.history,
        "question": conversation.question,
        "captions": _list_answers(conversation.answers, is_conversation(fields["captions"])),
        "systems": tuple(dict.fromkeys([*_list_systems(fields[SYSTEM_COLUMN]), *conversation.systems])),
    }
    images = len(fields["images"])
    if marks not in (0, images) and images <= MOST_IMAGES:
        raise DataError("datasets.marks_differ_from_images", key=caption_column, marks=marks, images=images)


def _list_systems(cell: Any) -> list[str]:
    """Return the system message in the column `system` as a list, which is empty if the cell has no text."""
    return [cell.strip()] if isinstance(cell, str) and cell.strip() else []


def _list_answers(answers: Any, is_message: bool) -> Any:
    """Return the answers to a question as a list. The text of a message is one answer, even if it is a JSON list."""
    if is_message:
        return answers if isinstance(answers, list) else [answers]
    parsed_answers = parse_captions(answers)
    is_list_of_texts = isinstance(parsed_answers, list) and all(isinstance(text, str) for text in parsed_answers)
    return parsed_answers if is_list_of_texts or not isinstance(answers, str) else [answers]


def _fault_of_number_of_images(
    fields: Mapping[str, Any], columns_of_field: Mapping[str, tuple[str, ...]]
) -> Fault | None:
    """Return a fault if a row has too many images, or captions that do not describe two images. Otherwise, None."""
    if "images" not in columns_of_field:
        return None
    key = " or ".join(columns_of_field["images"]) or "images"
    if fields["question"] is None:
        return fault_of_images(fields["image_column"], key)
    if len(fields["images"]) > MOST_IMAGES:
        return Fault("datasets.too_many_images", key=key, limit=MOST_IMAGES, count=len(fields["images"]))
    return None


def _join_captions(values: Sequence[Any]) -> list[Any]:
    """Combine the captions of several columns. Empty cells are ignored. If all are empty, return one empty caption."""
    captions: list[Any] = []
    for value in values:
        if value != "":
            captions_of_column = parse_captions(value)
            captions += captions_of_column if isinstance(captions_of_column, list) else [captions_of_column]
    return captions if any(value != "" for value in values) else [""]


class _SkippedRows:
    """Skips the rows that do not have an accepted number of images or answers, and counts them.

    Args:
        image_counts: accepted numbers of images; None accepts every number.
        one_answer: whether only conversations with exactly one answer are accepted.
    """

    def __init__(self, image_counts: Sequence[int] | None, one_answer: bool) -> None:
        self.image_counts = image_counts
        self.one_answer = one_answer
        self.reasons: Counter[str] = Counter()
        self.first_location = ""

    def skips(self, location: str, fields: Mapping[str, Any], fault: Fault | None) -> bool:
        """Return whether a row is skipped, and count it."""
        reason = self._reason(fields, fault)
        if reason is None:
            return False
        self.first_location = self.first_location or location
        self.reasons[reason] += 1
        return True

    def _reason(self, fields: Mapping[str, Any], fault: Fault | None) -> str | None:
        images = len(fields["images"])
        if self.image_counts is not None and images not in self.image_counts:
            return format_count(images, "image")
        if not self.one_answer:
            return None
        if fault is not None and fault.code == "datasets.question_without_answer":
            return "no answer"
        return f"{len(fields['history']) + 1} answers" if fields["history"] else None

    def notes(self) -> Iterator[str]:
        """Yield a sentence with the number of skipped rows by reason."""
        if self.reasons:
            option = "pairs_only" if self.one_answer else "image_counts"
            reasons = ", ".join(f"{reason} ({count:,})" for reason, count in self.reasons.most_common())
            yield f"rows skipped by {option}: {self.reasons.total():,}: {reasons}; the first is {self.first_location}"


class _QuestionNames:
    """Names the questions about each image set by their order of appearance. Equal questions have the same name."""

    def __init__(self) -> None:
        self._numbers: dict[str, dict[str, int]] = {}

    def name(self, image_set: str, fields: Mapping[str, Any], split: Any) -> str:
        """Return the name of a row's question: the image set, and a number."""
        numbers = self._numbers.setdefault(image_set, {})
        key = fields["question"] if not fields["history"] else repr((fields["history"], fields["question"]))
        if not fields["images"]:
            # Images must be in one split, but the same question without images may be in several
            key = repr((split, key))
        return f"{image_set}?{numbers.setdefault(str(key), len(numbers))}"


def _make_row(
    location: str, fields: dict[str, Any], file_split: str | None, checks: _OptionChecks, names: _QuestionNames
) -> Row:
    """Return the row of a pair or question, made from its fields and the options."""
    images = fields["images"]
    has_question = fields["question"] is not None
    image_set = _join_image_names(images)
    split = file_split or fields["split"]
    split = checks.splits.translate(split, _as_name(split))
    name = _as_name(fields["id"])
    if not name:
        name = image_set
        if has_question and image_set is not None:
            name = names.name(image_set, fields, split)
    # A caption, and a question without images, has an image set of its own
    is_shared = has_question and images and image_set is not None
    captions = checks.separate(parse_captions(fields["captions"]))
    types = parse_captions(fields["change_types"] or [])
    fault = None
    if isinstance(types, list) and all(isinstance(name_of_type, str) for name_of_type in types):
        types = checks.change_types.unify(types)
    else:
        fault = unexpected("change_types", "a list of names", types)
        types = []
    return Row(
        name=name,
        split=split,
        scene=_as_name(fields["scene"]) or (image_set if is_shared else name),
        images=images,
        image_set=image_set if is_shared else None,
        history=fields["history"],
        question=fields["question"],
        references=captions,
        change_types=types,
        kind=_as_name(fields["kind"]) or None,
        source=location,
        fault=fault,
    )


def _join_image_names(images: Sequence[Any]) -> str | None:
    """Return the names of the images of a row as one name, or None if an image has no name."""
    image_names = [image.name if isinstance(image, Embedded) else image for image in images]
    if not images:
        return "no image"
    return "|".join(image_names) if all(isinstance(image, str) for image in image_names) else None


def _as_name(value: Any) -> Any:
    """Return an id, scene or split as text, or None for NaN. 1.0 becomes "1", as pandas writes integers as floats."""
    if isinstance(value, float) and math.isnan(value):
        return None
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value) if isinstance(value, int) else value


PERMISSION = Permission("yes", "the user collected the pairs and decides about their use")
SPEC = DatasetSpec(
    title="own pairs",
    page=None,
    paper=None,
    licence=Licence.for_every_use("the owner's", None, PERMISSION),
    read=read,
    files=("pairs.csv",),
    protocols=(Protocol("test", published_pairs=None),),
)
