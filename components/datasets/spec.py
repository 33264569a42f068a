"""The schema of a dataset's file, the rows that its reader yields, and the check of its licence."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from m3diff.datasets.files import Embedded, describe, describe_kind, read_splits
from m3diff.records.errors import DataError
from m3diff.records.schemas import SPLITS


class Question(NamedTuple):
    """A question that a pair's captions answer, and the column (or path) that holds it."""

    column: str
    text: str


class Row(NamedTuple):
    """A pair as the reader found it, unchecked. Image paths are relative to the dataset's root."""

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


class NotedRows(Iterator[Row]):
    """A dataset's rows, and notes on what its options did, which are complete once every row is read."""

    def __init__(self, rows: Iterable[Row], notes: list[str]) -> None:
        self._rows = iter(rows)
        self.notes = notes

    def __next__(self) -> Row:
        return next(self._rows)


def read_with_notes(spec: "DatasetSpec", root: Path, options: Mapping[str, Any]) -> tuple[list[Row], list[str]]:
    """Every row of a dataset, and a reader's notes on its options.

    Raises:
        DataError: a file cannot be read, or an option does not fit the dataset.
    """
    reading = spec.read(root, **options)
    rows = list(reading)
    return rows, reading.notes if isinstance(reading, NotedRows) else []


def broken(split: Any, source: str, fault: str | None, scene: Any = None, name: Any = None) -> Row:
    """A row that cannot be read, where it stands, and why."""
    return Row(name, split, scene, None, None, [], [], source, fault)


def as_rows(
    split: Any,
    found: Iterable[tuple[str, Any]],
    fields: Mapping[str, type],
    make: Callable[[Any, str, dict[str, Any]], Row],
) -> Iterator[Row]:
    """A row of `make(split, place, record)` for each record that has these fields, a broken one for the others."""
    for where, record in found:
        fault = fault_in(record, fields)
        yield broken(split, where, fault) if fault else make(split, where, record)


def merged(rows: Iterable[Row], shared: str = "", across_splits: bool = False) -> Iterator[Row]:
    """Rows of one name and split as one, at the place of the first; before them, each alone, rows that have a fault or
    contradict an earlier one of their name.

    Args:
        shared: what the sources of all rows begin with; it is said once.
        across_splits: a name stands for one pair whatever the split.
    """
    found: dict[tuple[str, Any], Row] = {}
    for row in rows:
        if row.fault or not isinstance(row.references, list) or not isinstance(row.name, str):
            yield row
            continue
        key = row.name, None if across_splits else row.split
        same = found.setdefault(key, row)
        if row[:5] != same[:5]:
            first = same.source.split(" and ")[0]
            yield row._replace(fault=f"id: {first} has the same id, but other images, split or scene")
        elif row is not same:
            found[key] = same._replace(
                references=same.references + row.references,
                source=f"{same.source} and {row.source.removeprefix(shared)}",
                raw_rows=same.raw_rows + row.raw_rows,
                questions=same.questions + row.questions,
            )
    yield from found.values()


def unpacked(rows: Iterable[Row], folder: Path) -> Iterator[Row]:
    """The rows with each embedded image as the path of a file in `folder`, written where it is not there yet."""
    for row in rows:
        images = [folder / side.name if isinstance(side, Embedded) else side for side in (row.before, row.after)]
        for image, path in zip((row.before, row.after), images, strict=True):
            if isinstance(image, Embedded) and not path.exists():
                folder.mkdir(parents=True, exist_ok=True)
                path.write_bytes(image.read())
        yield row._replace(before=images[0], after=images[1])


def by_scene(path: Path, make: Callable[[str, int], Iterable[Row]], names: Sequence[str] = SPLITS) -> Iterator[Row]:
    """The rows of `make(split, scene)` for each scene of a file of splits, a broken one where that is no number."""
    for split, scenes in read_splits(path, names).items():
        for position, scene in enumerate(scenes):
            if isinstance(scene, int) and not isinstance(scene, bool) and scene >= 0:
                yield from make(split, scene)
            else:
                fault = f"scene: expected a number from 0, found {describe(scene)}"
                yield broken(split, f"{path.name}, {split}[{position}]", fault)


def fault_in(record: Any, fields: Mapping[str, type]) -> str | None:
    """The first fault of an annotation record, or of the line that holds it; None where it has these fields with these
    types."""
    if isinstance(record, DataError):
        return str(record)
    if not isinstance(record, dict):
        return f"record: expected an object, found {describe(record)}"
    for field, kind in fields.items():
        if record.get(field) is None:
            return f"{field}: is missing"
        if not isinstance(record[field], kind):
            return f"{field}: expected {describe_kind(kind)}, found {describe(record[field])}"
        if record[field] == "":
            return f"{field}: is empty"
    return None


Use = Literal["train", "redistribute", "show"]


@dataclass(frozen=True)
class Permission:
    """The answer of a licence to one use, with its reason; `conditions`: allowed as the reason says."""

    answer: Literal["yes", "conditions", "no", "unstated"]
    reason: str


@dataclass(frozen=True)
class Licence:
    """The licence as the dataset's page states it, and what it allows."""

    name: str
    url: str | None
    train: Permission
    redistribute: Permission
    show: Permission

    @classmethod
    def of(cls, name: str, url: str | None, permission: Permission) -> "Licence":
        """A licence that says the same of each use."""
        return cls(name, url, train=permission, redistribute=permission, show=permission)


@dataclass(frozen=True)
class SplitCount:
    """Pairs and references of one split, counted in the published annotation files."""

    pairs: int
    references: int | None = None  # empty ones among them; None: no count is published
    empty: int = 0  # references without a word
    repeated: int = 0  # others that their pair has already; of train and val, where they were counted
    wordless: int = 0  # pairs of which every reference is empty
    records: int | None = None  # of the annotation file, where several of them are one pair
    image_pairs: int | None = None  # where several pairs have the same two images


@dataclass(frozen=True)
class Published:
    """The counts of a dataset, or of one part of it where the parts are datasets of their own in `params.yaml`."""

    part: str  # as `params.yaml` calls it
    title: str  # as papers print it
    train: SplitCount
    val: SplitCount
    test: SplitCount

    def pairs(self) -> dict[str, int]:
        return {"train": self.train.pairs, "val": self.val.pairs, "test": self.test.pairs}


# Metrics of the benchmarks for which papers print SPICE too
WITH_SPICE = ("BLEU", "METEOR", "ROUGE-L", "CIDEr", "SPICE")


@dataclass(frozen=True)
class Protocol:
    """The pairs, references and metrics that papers score a dataset by. A dataset's first protocol is its headline."""

    name: str
    n: int | None  # pairs that papers score; None: no paper does
    part: str | None = None  # of `published`; None: the dataset has one
    ids: str = ".*"  # regular expression of the pairs' names, without the dataset's
    change_types: tuple[str, ...] = ()  # pairs with one of them alone; none: whatever changed
    references: Literal["all", "joined"] = "all"  # every one of a pair, empty ones too; or as one text, by ". "
    max_words: int | None = None  # after which predictions and references are cut
    tokenizer: Literal["ptb", "whitespace"] = "ptb"
    metrics: tuple[str, ...] = ("BLEU", "METEOR", "ROUGE-L", "CIDEr")
    headline: str = "CIDEr"
    source: str | None = None  # where it is described or carried out; None: it is the project's own


@dataclass(frozen=True)
class DatasetSpec:
    """All that is known of one dataset; its layout on disk and an example row stand in its file's docstring."""

    title: str  # as papers print it
    page: str | None
    paper: str | None
    licence: Licence
    read: Callable[..., Iterator[Row]]  # root and the reader's own options -> one Row per pair
    files: tuple[str, ...]  # annotation files or patterns of them in the root: `m3diff data check` knows the layout so
    task: str = "difference"  # what its pairs are asked: a task of the file `convert.questions`
    published: tuple[Published, ...] = ()
    references: int | None = None  # that the paper counts in all, where no split's are published
    protocols: tuple[Protocol, ...] = ()
    grammar: Callable[[Path], Mapping[str, Any]] | None = None  # root -> rules that read a caption back into changes
    generate: Callable[[Any], None] | None = None  # settings with a `root` -> the dataset, written there
    never_train: tuple[Literal["val"], ...] = ()  # splits beside test that its authors ask to keep out of training
    singles: Callable[[Path], Iterator[Row]] | None = None  # root -> its images with captions of their own, as pairs

    def part(self, name: str) -> Published | None:
        """The published counts for a dataset called `name` in `params.yaml`; None where there are none for it."""
        if len(self.published) == 1:
            return self.published[0]
        return next((part for part in self.published if part.part == name), None)


# Of a dataset without a licence: all rights stay with its authors
UNSTATED = Licence.of("none stated", None, Permission("unstated", "its repository or page states no licence"))


def check_licence(spec: DatasetSpec, use: Use, allow_unlicensed: bool = False) -> str | None:
    """A notice on this use of the dataset; None where the licence allows it without a condition.

    Where the page states no licence, to train and to show pages on one's own machine is the user's decision: it is
    told, not refused. To hand the data on is refused, and so is every use that a licence excludes, unless the user
    asks for it with `allow_unlicensed`; then the notice remains.

    Raises:
        DataError: the use is refused; the text names dataset, licence, reason and remedy.
    """
    permission: Permission = getattr(spec.licence, use)
    if permission.answer == "yes":
        return None
    notice = f"{spec.title} (licence: {spec.licence.name}): {use}: {permission.reason}"
    refused = permission.answer == "no" or (permission.answer == "unstated" and use == "redistribute")
    if refused and not allow_unlicensed:
        raise DataError(f"{notice}; refused: ask the authors, leave the dataset out, or pass --allow-unlicensed")
    return notice
