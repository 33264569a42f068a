"""Describe the supported datasets (`DatasetSpec`) and the rows that their readers yield, and check their licences."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

from m3diff.datasets.files import (
    Embedded,
    column_names,
    describe,
    describe_kind,
    parse_json,
    read_lines,
    read_splits,
    read_text,
)
from m3diff.records.errors import DataError, Fault
from m3diff.records.sample import PAIR
from m3diff.records.schemas import SPLITS

RECORDS_TO_RECOGNISE = 5  # number of records in a file by which a dataset is recognised; a few may be broken


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A question about images with its answers, as a reader yields it. Its values are not yet checked.

    Attributes:
        name: the record's id without the dataset's name.
        scene: image sets of the same scene must be in the same split. None: each image set is a scene.
        images: each as a path relative to the dataset's root or as an `Embedded` image. Of two images, the first is the
            image before. Empty in a row that cannot be read.
        image_set: name of the images. Rows with the same images have the same. None: the images are those of this row
            alone, and are called as the row.
        question: question that the references answer. None: they answer the question of the dataset's task, what
            changed.
        history: questions and answers before the question.
        kind: kind of the question, such as "count", or "caption" for a caption beside questions. None if it is unknown.
        source: file and row or key, with the file's path relative to the root.
        fault: why the row is unusable. None if the reader found no fault.
        raw_rows: number of annotation rows that were merged into this row.
        without_caption: whether all texts stand for a missing caption, so that the pair is skipped.
    """

    name: Any
    split: Any
    images: tuple[Any, ...]
    references: Any
    source: str
    scene: Any = None
    image_set: Any = None
    question: Any = None
    history: Sequence[tuple[Any, Any]] = ()
    kind: Any = None
    change_types: list[str] = field(default_factory=list)
    fault: Fault | None = None
    raw_rows: int = 1
    without_caption: bool = False


# Returns the fields of a `Row` that all rows of a record must agree on. It runs for every row, so it is one call into C
record_fields = attrgetter("name", "split", "scene", "images", "image_set", "question", "history")


class RowsWithNotes(Iterator[Row]):
    """Iterates over the rows of a dataset. After the last row, `notes` describes the effect of the reader's options."""

    def __init__(self, rows: Iterable[Row], notes: list[str]) -> None:
        self._rows = iter(rows)
        self.notes = notes

    def __next__(self) -> Row:
        return next(self._rows)


def read_with_notes(spec: "DatasetSpec", root: Path, options: Mapping[str, Any]) -> tuple[list[Row], list[str]]:
    """Read a dataset. Return all of its rows, and the reader's notes on the effect of the options.

    Raises:
        DataError: a file cannot be read, or an option does not fit the dataset.
    """
    reading = spec.read(root, **options)
    rows = list(reading)
    return rows, reading.notes if isinstance(reading, RowsWithNotes) else []


def broken_row(split: Any, source: str, fault: Fault | None, scene: Any = None, name: Any = None) -> Row:
    """Return a row for a record that cannot be read. The row has a location and a fault, but no images or captions."""
    return Row(name=name, split=split, scene=scene, images=(), references=[], source=source, fault=fault)


def make_rows(
    split: Any,
    records: Iterable[tuple[str, Any]],
    fields: Mapping[str, type],
    make: Callable[[Any, str, dict[str, Any]], Row],
) -> Iterator[Row]:
    """Yield `make(split, location, record)` for each valid record, and a broken row for each invalid one.

    Args:
        records: the records with their locations.
        fields: the required fields and their types.
    """
    for location, record in records:
        fault = find_fault(record, fields)
        yield broken_row(split, location, fault) if fault else make(split, location, record)


def merge_rows(rows: Iterable[Row], shared_source: str = "", across_splits: bool = False) -> Iterator[Row]:
    """Merge the rows of each record. Rows with the same name and split belong to the same record.

    Rows with a fault are not merged, and neither are rows that contradict an earlier row of their record. These rows
    are yielded first, then the merged rows in the order of their first rows.

    Args:
        shared_source: prefix of all sources. A merged source contains it only once.
        across_splits: whether rows with the same name belong to the same record even if their splits differ.
    """
    row_of_pair: dict[tuple[str, Any], Row] = {}
    for row in rows:
        if row.fault or not isinstance(row.references, list) or not isinstance(row.name, str):
            yield row
            continue
        pair = (row.name, None if across_splits else row.split)
        merged = row_of_pair.setdefault(pair, row)
        if record_fields(row) != record_fields(merged):
            first_source = merged.source.split(" and ")[0]
            yield replace(row, fault=Fault("datasets.repeated_id", key="id", source=first_source))
        elif row is not merged:
            row_of_pair[pair] = replace(
                merged,
                references=merged.references + row.references,
                source=f"{merged.source} and {row.source.removeprefix(shared_source)}",
                raw_rows=merged.raw_rows + row.raw_rows,
            )
    yield from row_of_pair.values()


def tested_rows(row: Row) -> list[Row]:
    """Return the rows with a prediction of their own: each turn of a dialogue in the test split, and any other row."""
    is_tested_dialogue = bool(row.history) and row.split == "test" and row.fault is None
    return rows_of_turns(row) if is_tested_dialogue else [row]


def rows_of_turns(row: Row) -> list[Row]:
    """Return one row per turn of a dialogue, with the true turns before it."""
    turns = [*row.history, (row.question, row.references)]
    rows = []
    for number, (question, answers) in enumerate(turns):
        turn = replace(
            row,
            name=f"{row.name}@{number}" if isinstance(row.name, str) else row.name,
            image_set=row.name if row.image_set is None else row.image_set,
            history=row.history[:number],
            question=question,
            references=answers if isinstance(answers, list) else [answers],
        )
        rows.append(turn)
    return rows


def unpack_images(rows: Iterable[Row], folder: Path) -> Iterator[Row]:
    """Write embedded images to files in `folder`, and yield the rows with their paths. Existing files are kept."""
    for row in rows:
        yield replace(row, images=tuple(_unpack_image(image, folder) for image in row.images))


def _unpack_image(image: Any, folder: Path) -> Any:
    if not isinstance(image, Embedded):
        return image
    path = folder / image.name
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        path.write_bytes(image.read())
    return path


def rows_by_scene(
    path: Path, make: Callable[[str, int], Iterable[Row]], names: Sequence[str] = SPLITS
) -> Iterator[Row]:
    """Yield the rows of `make(split, scene)` for each scene in a file that lists the scenes of each split.

    The order is that of the file. A scene that is not a number becomes a broken row.

    Args:
        names: names of the splits in the file.
    """
    for split, scenes in read_splits(path, names).items():
        for position, scene in enumerate(scenes):
            if isinstance(scene, int) and not isinstance(scene, bool) and scene >= 0:
                yield from make(split, scene)
            else:
                fault = unexpected("scene", "a number from 0", scene)
                yield broken_row(split, f"{path.name}, {split}[{position}]", fault)


def unexpected(key: str, expected: str, value: Any) -> Fault:
    """Return a fault that says what was expected and which value was found.

    Args:
        key: field or column of the value.
        expected: description of valid values, such as "a list of names".
    """
    return Fault("datasets.unexpected_value", key=key, expected=expected, value=describe(value))


def find_fault(record: Any, fields: Mapping[str, type]) -> Fault | None:
    """Check that an annotation record has all fields with the right types. Return the first fault, or None.

    Args:
        record: the record, or a DataError if its line could not be read.
    """
    if isinstance(record, DataError):
        return record.fault
    if not isinstance(record, dict):
        return unexpected("record", "an object", record)
    for name, kind in fields.items():
        if record.get(name) is None:
            return Fault("datasets.missing_value", key=name)
        if not isinstance(record[name], kind):
            return unexpected(name, describe_kind(kind), record[name])
        if record[name] == "":
            return Fault("datasets.empty_value", key=name)
    return None


def has_other_file(root: Path, files: Iterable[str], common_name: str) -> bool:
    """Return True if the folder has one of the files, apart from one whose name much other data has, too."""
    return any((root / file).is_file() for file in files if file != common_name)


def has_record(root: Path, patterns: Iterable[str], fields: Iterable[str]) -> bool:
    """Return True if one of the first records in the annotation files has all of these fields.

    Files that do not exist or cannot be read are skipped.

    Args:
        patterns: JSON files with a list of records, files with one JSON record per line, or Parquet files.
    """
    paths = chain.from_iterable(sorted(root.glob(pattern)) for pattern in patterns)
    first_records = chain.from_iterable(map(_first_records, paths))
    return any(isinstance(record, Mapping) and record.keys() >= set(fields) for record in first_records)


def _first_records(path: Path) -> list[Any]:
    """Return the first records of a file, or [] if it cannot be read. A Parquet file has one record of only nulls."""
    try:
        if path.suffix == ".parquet":
            return [dict.fromkeys(column_names(path))]
        text = read_text(path)
        try:
            value = parse_json(text, path)
        except DataError:  # not one JSON value, so probably one per line
            return [record for _, record in islice(read_lines(path), RECORDS_TO_RECOGNISE)]
        return value[:RECORDS_TO_RECOGNISE] if isinstance(value, list) else []
    except DataError:
        return []


Use = Literal["train", "redistribute", "show"]


@dataclass(frozen=True)
class Permission:
    """Whether a licence allows a use, and why. `conditions` means that `reason` names conditions for the use."""

    answer: Literal["yes", "conditions", "no", "unstated"]
    reason: str


@dataclass(frozen=True)
class Licence:
    """The licence that the dataset's page states, and the uses that it allows."""

    name: str
    url: str | None
    train: Permission
    redistribute: Permission
    show: Permission

    @classmethod
    def for_every_use(cls, name: str, url: str | None, permission: Permission) -> "Licence":
        """Return a licence with the same permission for every use."""
        return cls(name, url, train=permission, redistribute=permission, show=permission)


@dataclass(frozen=True)
class SplitCount:
    """The numbers of pairs and references in one split, counted in the published annotation files."""

    pairs: int
    references: int | None = None  # number of references, with empty ones; None if no count is published
    empty: int = 0  # number of references without any word
    repeated: int = 0  # number of references that repeat another one of their pair; only counted in train and val
    wordless: int = 0  # number of pairs whose references are all empty
    records: int | None = None  # number of records in the annotation file, if several records describe one pair
    image_pairs: int | None = None  # number of distinct image pairs, if several pairs have the same images
    # Number of questions, if pairs have several. The captions of a pair, and a turn of a test dialogue, count as one
    questions: int | None = None
    texts: int = 0  # number of pairs that are text without any image


@dataclass(frozen=True)
class Published:
    """The published counts of a dataset, or of one of its parts if each part is a separate dataset in `params.yaml`."""

    part: str  # name of the dataset in `params.yaml`
    title: str  # name of the dataset in papers
    train: SplitCount
    val: SplitCount
    test: SplitCount
    images: int = PAIR  # number of images of a row. What is called a pair here may be a single image

    def pairs(self) -> dict[str, int]:
        """Return the number of pairs in each split."""
        return {"train": self.train.pairs, "val": self.val.pairs, "test": self.test.pairs}


@dataclass(frozen=True)
class Protocol:
    """The pairs and references with which papers score a dataset. The first protocol is the main one.

    Every protocol has the metrics in `evaluate.metrics`, or for `m3diff score`, those that its inputs allow. A protocol
    can have further metrics of its own.
    """

    name: str
    published_pairs: int | None  # number of pairs that papers score; None if no paper scores them
    part: str | None = None  # `part` of the counts in `DatasetSpec.published`; None if the dataset has only one part
    ids: str = ".*"  # regular expression for the names of pairs, without the dataset's name
    pairs: str = ""  # description of the pairs; empty if `ids`, `kinds` and `change_types` select all pairs
    kinds: tuple[str, ...] = ()  # only records of these kinds are scored; if empty, all records
    change_types: tuple[str, ...] = ()  # only pairs with at least one of these types are scored; if empty, all pairs
    references: Literal["all", "joined"] = "all"  # all references separately, with empty ones, or joined by ". "
    max_words: int | None = None  # number of words after which predictions and references are cut off
    # ptb: in lower case and without punctuation. whitespace: as written. lowercase: in lower case, without full stops
    tokenizer: Literal["ptb", "whitespace", "lowercase"] = "ptb"
    metrics: tuple[str, ...] = ()  # names of further metrics in `components/scoring/metrics` with `protocol_only`
    ranking_score: str = "CIDEr"  # score by which tables of published results are sorted
    source: str | None = None  # paper or program that defines the protocol; None if this project defines it


@dataclass(frozen=True)
class DatasetSpec:
    """A supported dataset. The docstring of its module shows the files on disk and an example row."""

    title: str  # name of the dataset in papers
    page: str | None
    paper: str | None
    licence: Licence
    read: Callable[..., Iterator[Row]]  # takes the root and the reader's options; yields one Row per pair
    files: tuple[str, ...]  # annotation files or patterns in the root, by which `m3diff data check` detects the layout
    # Takes the root; returns whether the content of the files is this dataset's. None if no other data have files with
    # these names
    recognise: Callable[[Path], bool] | None = None
    # Takes the root; returns the options with which to read it. None if the defaults read every folder of this layout
    options_of: Callable[[Path], Mapping[str, Any]] | None = None
    task: str = "difference"  # task in the file `convert.questions` whose questions are used
    published: tuple[Published, ...] = ()
    references: int | None = None  # number of references in the paper, if no numbers per split are published
    protocols: tuple[Protocol, ...] = ()
    grammar: Callable[[Path], Mapping[str, Any]] | None = None  # takes the root; returns rules that parse captions
    generate: Callable[[Any], None] | None = None  # writes the dataset to the folder `root` in its settings
    never_train: tuple[Literal["val"], ...] = ()  # splits besides test that the authors ask not to train on
    singles: Callable[[Path], Iterator[Row]] | None = None  # takes the root; yields captioned single images as pairs

    def part(self, name: str) -> Published | None:
        """Return the published counts for the dataset `name` in `params.yaml`, or None if there are none."""
        if len(self.published) == 1:
            return self.published[0]
        return next((part for part in self.published if part.part == name), None)


# Without a licence, the authors of a dataset keep all rights
UNSTATED_LICENCE = Licence.for_every_use(
    "none stated", None, Permission("unstated", "its repository or page states no licence")
)


def check_licence(spec: DatasetSpec, use: Use, allow_unlicensed: bool = False) -> str | None:
    """Check whether the licence of a dataset allows a use.

    A use that the licence forbids is refused. If the dataset's page does not state a licence, redistribution is also
    refused. The other uses only return a notice, because users can decide for themselves whether to train on such a
    dataset and show pages on their own machine. With `allow_unlicensed`, a notice is returned in place of the error.

    Returns:
        A notice for the user about conditions or a missing licence, or None if the use is allowed without conditions.

    Raises:
        DataError: the use is refused. The fields are dataset, licence, use and reason.
    """
    permission: Permission = getattr(spec.licence, use)
    if permission.answer == "yes":
        return None
    notice = f"{spec.title} (licence: {spec.licence.name}): {use}: {permission.reason}"
    is_refused = permission.answer == "no" or (permission.answer == "unstated" and use == "redistribute")
    if is_refused and not allow_unlicensed:
        raise DataError(
            "datasets.licence_refuses_use",
            dataset=spec.title,
            licence=spec.licence.name,
            use=use,
            reason=permission.reason,
        )
    return notice
