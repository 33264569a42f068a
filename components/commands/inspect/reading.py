"""Read a dataset's folder with its reader, and report its content, its problems and their remedies."""

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, repeat
from pathlib import Path
from typing import Any

from m3diff.commands.inspect.layout import TABLE_READERS
from m3diff.commands.inspect.lines import list_problems
from m3diff.commands.inspect.missing_images import remedies_for_missing_images
from m3diff.commands.inspect.other_columns import remedy_for_missing_columns
from m3diff.datasets import DATASETS
from m3diff.datasets.doubts import Doubt, as_yaml, find_doubts, first_source
from m3diff.datasets.drawn_split import SplitShares, describe_shares, propose_shares
from m3diff.datasets.files import Embedded
from m3diff.datasets.odd_captions import OddCaptions
from m3diff.datasets.spec import Published, Row, SplitCount, read_with_notes
from m3diff.records.errors import DataError, Fault, format_count
from m3diff.records.sample import IMAGE_MARK
from m3diff.records.schemas import NO_CHANGE, SPLITS
from m3diff.stages.ingest.params import DatasetEntry
from m3diff.stages.ingest.stage import odd_captions_of, to_records

# Kinds of problems, as they are printed
UNREADABLE_ROWS = "rows that cannot be read"
UNKNOWN_SPLITS = "unknown splits (expected train, val or test)"
MISSING_IMAGES = "missing images"
EMPTY_IMAGES = "empty image files"
SAME_IMAGE_TWICE = "pairs with the same image twice"
CAPTIONS_TO_CHECK = "captions to check"
# Problems of single rows. If there are no other problems, validate can check the remaining rows
PROBLEMS_OF_ROWS = {UNREADABLE_ROWS, MISSING_IMAGES, EMPTY_IMAGES, SAME_IMAGE_TWICE}

OFFERED_SHARES = SplitShares(test=0.15, val=0.1)  # proposed for tables without test pairs
TOO_FEW_TO_DRAW = "too few pairs have their own scene and images to draw test pairs from them: add test pairs"

MAX_KINDS = 20  # number of kinds of questions that are listed

EMBEDDED_MARK = "#bytes="  # separates a table's path from the name of an image embedded in it

# Remedies for faults of rows whose messages do not contain a remedy, by error code
REMEDY_OF_FAULT = {
    "datasets.repeated_id": Fault("check.ids_of_several_pairs", options="{columns: {id: null}}"),
    "datasets.not_two_images": Fault("check.rows_without_pair", options="{pairs_only: true}"),
    "datasets.marks_differ_from_images": Fault("check.rows_without_pair", options="{pairs_only: true}"),
    "datasets.too_many_images": Fault("check.rows_without_pair", options="{pairs_only: true}"),
    "datasets.question_without_answer": Fault("check.rows_without_pair", options="{pairs_only: true}"),
}


@dataclass(frozen=True)
class FolderReading:
    """The result of reading a dataset's folder.

    lines: lines to print.
    is_sound: whether the folder contains pairs and no problem was found.
    can_be_judged: whether ingest accepts the rows, so that validate can check them. Some rows may be invalid.
    doubts: questions about captions that the entry does not answer.
    names_other_entry: whether a line names an entry to use instead of this one.
    """

    lines: list[str]
    is_sound: bool = False
    can_be_judged: bool = False
    doubts: list[Doubt] = field(default_factory=list)
    names_other_entry: bool = False


@dataclass(frozen=True)
class FolderContent:
    """The content of a dataset's folder.

    rows, records: the rows and the records made from them, in the same order. Rows without a caption have no record.
    images: the distinct image paths, including embedded images.
    missing_images, empty_images: paths of files that do not exist, and of files without content.
    """

    rows: list[Row]
    records: list[dict[str, Any]]
    option_notes: list[str]
    odd_captions: list[OddCaptions]
    doubts: list[Doubt]
    images: list[str]
    missing_images: list[str]
    empty_images: list[str]

    @property
    def faults(self) -> list[str]:
        """The faults of rows that cannot be read, each with the location of its row."""
        return [f"{record['source']}: {record['fault']}" for record in self.records if record["fault"]]

    @property
    def records_of_unknown_splits(self) -> list[dict[str, Any]]:
        """The records with a split that is not in SPLITS. Records without a split are not included."""
        return [record for record in self.records if record["split"] and record["split"] not in SPLITS]

    @property
    def are_most_records_wrong(self) -> bool:
        """Whether at least half of the records have a fault or an unusable image."""
        unusable = {*self.missing_images, *self.empty_images}
        wrong = [
            record
            for record in self.records
            if record["fault"] or any(image["uri"] in unusable for image in record["images"])
        ]
        return 2 * len(wrong) >= len(self.records)


def read_folder(name: str, entry: DatasetEntry) -> FolderReading:
    """Read a dataset's folder, and describe its content and problems. All annotation files must exist."""
    try:
        content = _read_content(name, entry)
    except DataError as error:
        lines = [f"  CANNOT BE READ {error}"]
        remedy = remedy_for_missing_columns(entry) if error.code == "datasets.missing_columns" else None
        return FolderReading(
            [*lines, *_list_remedies([remedy] if remedy else [])],
            names_other_entry=error.code == "datasets.own_data_like_levir_cc",
        )
    problems = _problems(content)
    lines = _overview_lines(name, entry, content)
    for kind, examples in problems.items():
        lines += list_problems(kind, examples)
    lines += _caption_lines(content)
    lines += _remedy_lines(entry, content)
    if not content.records:
        lines.append("  NO PAIRS; download the dataset again")

    has_problem_of_folder = any(examples and kind not in PROBLEMS_OF_ROWS for kind, examples in problems.items())
    return FolderReading(
        lines,
        is_sound=bool(content.records) and not any(problems.values()),
        # If most rows are invalid, a single option usually fixes all of them, so validate would not find out more
        can_be_judged=not content.are_most_records_wrong and not has_problem_of_folder,
        doubts=content.doubts,
    )


def _read_content(name: str, entry: DatasetEntry) -> FolderContent:
    """Read the rows and records, and look for their images.

    Raises:
        DataError: a file cannot be read, or an option does not fit the dataset.
    """
    rows, option_notes = read_with_notes(DATASETS[entry.reader], entry.root, entry.options)
    # Count the splits that the dataset names, regardless of which splits the entry uses for training
    entry_of_own_splits = entry.model_copy(update={"train_on": ("train",)})
    records, _ = to_records(name, entry_of_own_splits, map(_with_paths, rows))
    images: dict[str, None] = {}
    for record in records:
        images |= dict.fromkeys(image["uri"] for image in record["images"] if image["uri"])
    files = [path for path in images if EMBEDDED_MARK not in path]
    odd_captions = odd_captions_of(entry, rows)
    doubts = find_doubts(rows, entry.options, is_user_dataset=entry.reader == "pairs", odd_captions=odd_captions)
    return FolderContent(
        rows=rows,
        records=records,
        option_notes=option_notes,
        odd_captions=odd_captions,
        doubts=list(doubts),
        images=list(images),
        missing_images=[path for path in files if not os.path.isfile(path)],
        empty_images=[path for path in files if os.path.isfile(path) and os.path.getsize(path) == 0],
    )


def _with_paths(row: Row) -> Row:
    """Replace each embedded image in a row by a path that consists of the table's path and the image's name."""
    return replace(row, images=tuple(_path_of(image) for image in row.images))


def _path_of(image: Any) -> Any:
    return Path(f"{image.manifest}{EMBEDDED_MARK}{image.name}") if isinstance(image, Embedded) else image


def _is_one_image_twice(images: tuple[Any, ...]) -> bool:
    return len(images) == 2 and bool(images[0]) and images[0] == images[1]


def _problems(content: FolderContent) -> dict[str, list[str]]:
    """Return one line per problem, grouped by kind of problem."""
    rows_of_one_image = [
        row for row in content.rows if _is_one_image_twice(row.images) and row.change_types != [NO_CHANGE]
    ]
    return {
        UNREADABLE_ROWS: content.faults,
        UNKNOWN_SPLITS: [
            f"{record['source']}: split {record['split']!r}" for record in content.records_of_unknown_splits
        ],
        MISSING_IMAGES: content.missing_images,
        EMPTY_IMAGES: content.empty_images,
        SAME_IMAGE_TWICE: [
            f"{row.source}: both images are {_path_of(row.images[0])}; name two images" for row in rows_of_one_image
        ],
        CAPTIONS_TO_CHECK: [str(doubt.question) for doubt in content.doubts if not doubt.answers],
    }


def _overview_lines(name: str, entry: DatasetEntry, content: FolderContent) -> list[str]:
    """Return lines about the numbers of pairs, references and images, and about the effect of the options."""
    spec = DATASETS[entry.reader]
    nearest_part = min(
        spec.published, key=lambda part: abs(sum(part.pairs().values()) - len(content.records)), default=None
    )
    lines = _count_lines(spec.part(name) or nearest_part, content.records)
    lines += _lines_without_test_pairs(entry, content.rows)
    lines.append(
        f"  {format_count(len(content.images), 'image')}, {len(content.missing_images):,} of them missing and "
        f"{len(content.empty_images):,} empty"
    )
    lines += [f"  {note}" for note in content.option_notes]
    questions = "\n".join(str(doubt.question) for doubt in content.doubts)
    for captions in content.odd_captions:
        if str(captions) not in questions:
            lines.append(f"  {captions}; {captions.remedy}")
    return lines + list(_question_lines(content.rows))


def _question_lines(rows: Sequence[Row]) -> Iterator[str]:
    """Yield lines about the questions, images and turns of a dataset. Yield none if all rows are captions of pairs."""
    readable_rows = [row for row in rows if row.fault is None]
    if all(row.question is None for row in readable_rows):
        return
    rows_with_question = [row for row in readable_rows if row.question is not None]
    yield f"  questions of their own: {len(rows_with_question):,} of {format_count(len(readable_rows), 'row')}"
    kinds = Counter(row.kind or "no kind" for row in rows_with_question)
    kind_counts = [f"{kind} ({count:,})" for kind, count in kinds.most_common(MAX_KINDS)]
    yield f"  kinds of questions: {', '.join(kind_counts)}"
    yield f"  images a row: {_count_with_first(readable_rows, lambda row: len(row.images))}"
    yield f"  turns a row: {_count_with_first(readable_rows, lambda row: len(row.history) + 1)}"
    marked_rows = [row for row in rows_with_question if _has_mark(row)]
    if marked_rows:
        location = first_source(marked_rows[0])
        count = format_count(len(marked_rows), "row")
        yield f"  <image> inside the text of a question: {count}, the first is {location}"


def _count_with_first(rows: Sequence[Row], number_of: Callable[[Row], int]) -> str:
    """Return how many rows have each number, with the first row of each but the most common."""
    rows_of_number: dict[int, list[Row]] = {}
    for row in rows:
        rows_of_number.setdefault(number_of(row), []).append(row)
    groups = sorted(rows_of_number.items(), key=lambda item: -len(item[1]))
    texts = [f"{groups[0][0]} ({len(groups[0][1]):,})"]
    texts += [f"{number} ({len(group):,}, the first is {first_source(group[0])})" for number, group in groups[1:]]
    return ", ".join(texts)


def _has_mark(row: Row) -> bool:
    questions = [question for question, _ in row.history] + [row.question]
    return any(isinstance(question, str) and IMAGE_MARK in question for question in questions)


def _count_lines(published: Published | None, records: list[dict[str, Any]]) -> list[str]:
    """Return the lines of a table with the numbers of pairs and references per split, next to the published numbers."""
    heading = f"  {'split':6}{'pairs':>9}{'references':>12}"
    if published:
        heading += f"   published: {'pairs':>8}{'references':>12} ({published.title})"
    lines = [heading]
    differs_anywhere = False
    for split in SPLITS:
        records_of_split = [record for record in records if record["split"] == split]
        pairs = _count_pairs(records_of_split)
        references = sum(len(record["references"]) for record in records_of_split)
        line = f"  {split:6}{pairs:9,}{references:12,}"
        if published:
            expected: SplitCount = getattr(published, split)
            differs = expected.pairs != pairs or expected.references not in (None, references)
            differs_anywhere = differs_anywhere or differs
            expected_references = "?" if expected.references is None else f"{expected.references:,}"
            line += f"{expected.pairs:22,}{expected_references:>12}{'  differs' if differs else ''}"
        lines.append(line)
    if published and differs_anywhere:
        lines.append(
            f"  not the published {published.title}, but a part of it, another version or other data in its layout"
        )
    return lines


def _count_pairs(records: Sequence[Mapping[str, Any]]) -> int:
    """Return the number of pairs. Several questions about a pair count once. A record without a name is a pair."""
    if all(record["question"] is None for record in records):
        return len(records)
    image_sets = [record["image_set"] for record in records]
    return len({name for name in image_sets if name is not None}) + image_sets.count(None)


def _lines_without_test_pairs(entry: DatasetEntry, rows: list[Row]) -> list[str]:
    """If there are no test pairs, return a line with the consequence and, for tables, a remedy. Otherwise return []."""
    if not rows or any(row.split == "test" for row in rows):
        return []
    options = entry.options
    line = "  no test pairs: no model can be evaluated or promoted with this dataset"
    if entry.reader == "sidecar" and isinstance(options.get("split", ""), str):
        proposal = propose_shares(rows, OFFERED_SHARES)
        remedy = TOO_FEW_TO_DRAW
        if proposal is not None:
            remedy = f"`split: {{{describe_shares(proposal.shares)}}}` in its options draws {proposal.counts}"
        return [f"{line}; name a folder of pairs `test`, or {remedy}"]
    if entry.reader not in TABLE_READERS:
        return [line]
    if not isinstance(options.get("manifest", ""), str):
        return [f"{line}; add a file with test pairs to the option `manifest`: {{test: FILE}}"]
    has_column = not isinstance(options.get("split"), str)
    if has_column:
        line += "; name the split of some pairs `test` in the column of the split"
    proposal = propose_shares(rows, OFFERED_SHARES)
    if proposal is None:
        return [line if has_column else f"{line}; {TOO_FEW_TO_DRAW}"]
    split_option = f"split: {{{describe_shares(proposal.shares)}}}"
    if not has_column:
        return [
            f"{line}; `{split_option}` in its options, in place of `split: {options['split']}`, draws {proposal.counts}"
        ]

    replaced_options = []
    # Without a name in `columns`, the reader uses the column `split`, unless the entry sets it to null
    column = (options.get("columns") or {}).get("split")
    if column:
        replaced_options.append(f"`columns: {{split: {column}}}`")
    if options.get("splits"):
        replaced_options.append(f"`splits: {as_yaml(options['splits'])}`")
    replacement = f", in place of {' and '.join(replaced_options)}," if replaced_options else ""
    without_column = "" if column else " with `columns: {split: null}`"
    return [f"{line}; or `{split_option}`{without_column} in its options{replacement} draws {proposal.counts}"]


def _caption_lines(content: FolderContent) -> list[str]:
    """Return lines about questions with a sure answer, pairs without a caption, and empty captions."""
    lines = [f"  {doubt.question}; the entry uses the first answer" for doubt in content.doubts if doubt.is_sure]
    lines += list_problems(
        "pairs without a caption, which are skipped", [row.source for row in content.rows if row.without_caption]
    )
    empty_captions = sum(
        not str(text).strip() for text in chain.from_iterable(record["references"] for record in content.records)
    )
    if empty_captions:
        lines.append(f"  empty captions: {empty_captions:,}, which are not used for training")
    return lines


def _remedy_lines(entry: DatasetEntry, content: FolderContent) -> list[str]:
    """Return lines with the remedies for the problems of the folder, or no lines if no remedy is known."""
    codes = {row.fault.code for row in content.rows if row.fault}
    remedies = [remedy for code, remedy in REMEDY_OF_FAULT.items() if code in codes]
    sources = {row.source for row in content.rows if row.fault and row.fault.code == "datasets.missing_value"}
    remedy_of_columns = remedy_for_missing_columns(entry, sources) if sources else None
    if remedy_of_columns:
        remedies.append(remedy_of_columns)
    if content.faults or content.missing_images:
        remedies += remedies_for_missing_images(entry, content.rows, {*content.missing_images})
    if content.records_of_unknown_splits:
        remedies.append(_remedy_for_unknown_splits(content.rows))
    return _list_remedies(remedies)


def _list_remedies(remedies: Sequence[Fault]) -> list[str]:
    """Return lines with the remedies, each only once, or [] if there are none."""
    if not remedies:
        return []
    lines = ["  remedies:"]
    lines += [f"    {remedy}" for remedy in dict.fromkeys(remedies)]
    return lines


def _remedy_for_unknown_splits(rows: Sequence[Row]) -> Fault:
    """Return the remedy for unknown split names, with an example of the option `splits`."""
    names = {str(row.split) for row in rows} - {"None"}
    unused_splits = [split for split in SPLITS if split not in names]
    example = dict(zip(sorted(names - {*SPLITS}), chain(unused_splits, repeat("train")), strict=False))
    return Fault("check.unknown_splits", names=sorted(names - {*SPLITS}), options=as_yaml({"splits": example}))
