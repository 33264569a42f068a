"""Stage `ingest`: convert a dataset from its layout on disk to records.

A record is a question about up to two images, with its answers and the SHA-256 of the image files. Most records are a
pair of images with captions, and have no question of their own.

A dialogue of several turns is one record if it is used for training. In the test split, each turn is a record, with the
true turns before it. Every test record therefore has one question, and gets one prediction.

No other stage reads a dataset's folder. Later stages depend only on the records, which identify each image by its
content. In DVC, each dataset has a separate stage, so adding a dataset does not rerun the others.
"""

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa

from m3diff.datasets import DATASETS
from m3diff.datasets.doubts import as_yaml, find_doubts
from m3diff.datasets.files import describe, fault_of_path, is_inside, require_utf8
from m3diff.datasets.odd_captions import OddCaptions
from m3diff.datasets.spec import Row, read_with_notes, tested_rows, unexpected, unpack_images
from m3diff.datasets.tables import SIDES
from m3diff.images.check import check_images
from m3diff.provenance.cache import is_cached_object
from m3diff.records.errors import DataError, Fault, format_count, is_utf8
from m3diff.records.files import StageReport, remove_folder, write_atomic
from m3diff.records.sample import MOST_IMAGES
from m3diff.records.schemas import RAW_SCHEMA
from m3diff.records.tables import write_table
from m3diff.stages.ingest.captions import find_odd_captions
from m3diff.stages.ingest.params import DatasetEntry

# Larger images are hashed but not decoded here. The stage `validate` compares them with `validate.max_image_pixels`
MAX_DECODED_PIXELS = 100_000_000


class IngestReport(StageReport):
    """Counts of one dataset. `pairs` and `references` are counted per split. Each question counts as a pair.

    `rows_in` is the number of rows in the dataset's annotation files.
    """

    dataset: str
    reader: str
    pairs: dict[str, int]
    references: dict[str, int]  # including empty references
    empty_references: int
    faults: int  # rows that could not be read; validate quarantines them
    repeated_questions: int  # rows that ask a question again about the same images, and are answers of its record
    images: int  # number of distinct paths
    unread_images: int  # missing or unreadable; validate quarantines their pairs


def ingest(name: str, entry: DatasetEntry, image_cache: Path, out: Path) -> IngestReport:
    """Write the records of a dataset to the table `out/<name>/records` and its report to `out/<name>.json`.

    The folder `out/<name>` is emptied first. The records (`RAW_SCHEMA`) include faulty annotation rows. If the dataset
    has a grammar, it is written to `out/<name>/grammar.json`. Images that are embedded in the dataset's table are
    written to `out/<name>/images`.

    Args:
        name: the dataset's name in `params.yaml`, which is the prefix of its ids.
        entry: the dataset's entry in `params.yaml`.
        image_cache: file that caches digests and verdicts of images. It saves time and does not change the output.
        out: folder to write to.

    Raises:
        DataError: an annotation file cannot be used, the dataset has no pairs, or its captions need to be confirmed.
    """
    require_utf8(entry.root)
    rows, option_notes = read_with_notes(DATASETS[entry.reader], entry.root, entry.options)
    odd_captions = odd_captions_of(entry, rows)
    _refuse_doubts(name, entry, rows, odd_captions)
    _print_notes(name, rows, option_notes, odd_captions)

    folder = out / name
    remove_folder(folder)
    records, _ = to_records(name, entry, unpack_images(rows, folder / "images"))
    if not records:
        code = "ingest.no_captioned_pair" if rows else "ingest.no_pair"
        raise DataError(code, dataset=name, path=entry.root)
    images = _add_digests(name, records, image_cache)

    write_table(pa.Table.from_pylist(records, RAW_SCHEMA), folder / "records")
    grammar = DATASETS[entry.reader].grammar
    if grammar:
        write_atomic(folder / "grammar.json", json.dumps(grammar(entry.root), indent=1) + "\n")
    report = _make_report(name, entry.reader, rows, records, images)
    return report.write(out / f"{name}.json")


def odd_captions_of(entry: DatasetEntry, rows: Sequence[Row]) -> list[OddCaptions]:
    """Return the captions that were probably not written by a person.

    The list is empty if the dataset has a grammar, because its captions are then generated on purpose.
    """
    return [] if DATASETS[entry.reader].grammar else find_odd_captions(rows)


def _refuse_doubts(name: str, entry: DatasetEntry, rows: list[Row], odd_captions: Sequence[OddCaptions]) -> None:
    """Check that the entry's options answer every question about the captions.

    For example, the options may have to confirm that odd captions are intended.

    Raises:
        DataError: a question is open. The message lists the open questions with the options for each answer.
    """
    questions = []
    for doubt in find_doubts(rows, entry.options, is_user_dataset=entry.reader == "pairs", odd_captions=odd_captions):
        answers = [f"\n  options: {as_yaml(answer)}" for answer in doubt.answers]
        questions.append(f"{doubt.question}{''.join(answers)}")
    if questions:
        raise DataError("ingest.captions_in_doubt", dataset=name, path=entry.root, questions=questions)


def _print_notes(
    name: str, rows: Sequence[Row], option_notes: Sequence[str], odd_captions: Sequence[OddCaptions]
) -> None:
    """Print the pairs without captions, the effects of the dataset's options, and the kinds of odd captions."""
    rows_without_caption = [row for row in rows if row.without_caption]
    if rows_without_caption:
        pairs = format_count(len(rows_without_caption), "pair without a caption is", "pairs without a caption are")
        print(f"ingest {name}: {pairs} left out; the first is {rows_without_caption[0].source}")
    for note in option_notes:
        print(f"ingest {name}: {note}")
    for captions in odd_captions:
        print(f"ingest {name}: {captions}; {captions.remedy}")


def _add_digests(name: str, records: list[dict[str, Any]], image_cache: Path) -> pl.DataFrame:
    """Add the SHA-256 of each image to the records, and return the results of `check_images`."""
    paths = [image["uri"] for record in records for image in record["images"]]
    images = check_images(pl.Series(paths, dtype=pl.String), MAX_DECODED_PIXELS, image_cache, f"ingest {name}")
    digests = dict(images.select("path", "digest").iter_rows())
    for record in records:
        for image in record["images"]:
            image["sha256"] = digests.get(image["uri"])
    return images


def _make_report(
    name: str, reader: str, rows: Sequence[Row], records: Sequence[dict[str, Any]], images: pl.DataFrame
) -> IngestReport:
    """Return the report of a dataset. Records without a split are counted under "?"."""
    pairs = Counter[str]()
    references = Counter[str]()
    for record in sorted(records, key=lambda record: record["split"] or "?"):
        split = record["split"] or "?"
        pairs[split] += 1
        references[split] += len(record["references"])
    return IngestReport(
        stage="ingest",
        rows_in=sum(row.raw_rows for row in rows),
        rows_out=len(records),
        dataset=name,
        reader=reader,
        pairs=pairs,
        references=references,
        empty_references=sum(record["references"].count("") for record in records),
        faults=sum(record["fault"] is not None for record in records),
        repeated_questions=sum(row.raw_rows - 1 for row in rows if row.question is not None),
        images=images.height,
        unread_images=images["digest"].null_count(),
    )


def to_records(name: str, entry: DatasetEntry, rows: Iterable[Row]) -> tuple[list[dict[str, Any]], int]:
    """Convert the rows of a dataset to records. The records follow `RAW_SCHEMA`, but do not have image digests yet.

    The order of the rows is kept. Rows that are marked as pairs without a caption are skipped.

    Args:
        name: the dataset's name.
        entry: the dataset's entry in `params.yaml`.
        rows: rows as the reader returns them.

    Returns:
        The records, and the number of annotation rows from which the reader made the rows.
    """
    rows = list(rows)

    # Many images share a folder, and resolving its links again for each image would be slow
    @cache
    def is_in_roots(path: str) -> bool:
        roots = filter(None, [entry.root, entry.image_root])
        return entry.follow_links or is_inside(path, *roots) or is_cached_object(path)

    records = []
    for row in rows:
        if not row.without_caption:
            records += [_to_record(name, entry, tested_row, is_in_roots) for tested_row in tested_rows(row)]
    return records, sum(row.raw_rows for row in rows)


def _to_record(dataset: str, entry: DatasetEntry, row: Row, is_in_roots: Callable[[str], bool]) -> dict[str, Any]:
    """Convert a row to a record.

    If a value has the wrong type, the record contains null instead (an empty list for references), and `fault`
    describes the problem.
    """
    faults = [row.fault] if row.fault else []
    name = _usable_text("id", row.name, faults)
    image_set = name if row.image_set is None else _usable_text("image_set", row.image_set, faults)
    scene = image_set if row.scene is None and not faults else _usable_text("scene", row.scene, faults)
    split = _usable_text("split", row.split, faults)
    images = []
    # The number of images in a row with a fault may be a consequence of that fault
    if not row.fault and row.question is None and len(row.images) != len(SIDES):
        faults.append(unexpected("images", "two images", list(row.images)))
    elif not row.fault and len(row.images) > MOST_IMAGES:
        faults.append(Fault("datasets.too_many_images", key="images", limit=MOST_IMAGES, count=len(row.images)))
    names = SIDES if len(row.images) == len(SIDES) else ("image",)
    for name_of_image, image in zip(names, row.images, strict=False):
        images.append({"uri": _image_path(name_of_image, entry, image, faults, is_in_roots), "sha256": None})
    return {
        "id": name and f"{dataset}/{name}",
        "image_set": image_set and f"{dataset}/{image_set}",
        "dataset": dataset,
        "split": "train" if split in entry.train_on else split,
        "own_split": split,
        "scene": scene and f"{dataset}/{scene}",
        "images": images,
        "history": [_to_turn(number, turn, faults) for number, turn in enumerate(row.history)],
        "question": None if row.question is None else _usable_text("question", row.question, faults, may_be_empty=True),
        "references": _usable_references(row.references, faults),
        "change_types": row.change_types,
        "kind": None if row.kind is None else _usable_text("kind", row.kind, faults),
        "source": _escape_surrogates(row.source),
        "fault": "; ".join(_escape_surrogates(str(fault)) for fault in faults) or None,
    }


def _to_turn(number: int, turn: tuple[Any, Any], faults: list[Fault]) -> dict[str, str | None]:
    """Return an earlier turn of a dialogue. Its texts may be empty, because validate has rules for them."""
    question, answer = turn
    return {
        "question": _usable_text(f"turn {number}: question", question, faults, may_be_empty=True),
        "answer": _usable_text(f"turn {number}: answer", answer, faults, may_be_empty=True),
    }


def _usable_text(field: str, value: Any, faults: list[Fault], may_be_empty: bool = False) -> str | None:
    """Return the value if it is usable text. Otherwise, add a fault to `faults` and return None."""
    if not isinstance(value, str):
        # A null in a row that already has a fault is a consequence of that fault, so it is not reported again
        if value is not None or not faults:
            faults.append(unexpected(field, "text", value))
    elif not value and not may_be_empty:
        faults.append(Fault("datasets.empty_value", key=field))
    elif not is_utf8(value):
        faults.append(Fault("ingest.half_surrogate_pair", key=field, value=describe(value)))
    else:
        return value
    return None


def _usable_references(value: Any, faults: list[Fault]) -> list[str]:
    """Return the usable texts in a list of references, including empty texts."""
    if not isinstance(value, list):
        if value is not None or not faults:
            faults.append(unexpected("references", "a list of text", value))
        return []
    usable_texts = []
    for number, text in enumerate(value):
        if text == "" or _usable_text(f"reference {number}", text, faults) is not None:
            usable_texts.append(text)
    return usable_texts


def _image_path(
    field: str, entry: DatasetEntry, value: Any, faults: list[Fault], is_in_roots: Callable[[str], bool]
) -> str | None:
    """Return the path of an image, `root/value`, or None if the path is not usable.

    If the path or a symbolic link in the path leads out of the roots, a fault is added to `faults`.

    Args:
        field: name of the field, for the fault.
        entry: the dataset's entry in `params.yaml`.
        value: the path in the annotations. A `Path` object is returned unchanged, because ingest wrote that file.
        faults: list to which a fault is added.
        is_in_roots: function that returns whether a path is inside the entry's roots after links are resolved.
    """
    if isinstance(value, Path):
        return str(value)
    image_name = _usable_text(field, value, faults)
    if image_name is None:
        return None
    further_roots = [entry.image_root] if entry.image_root else []
    fault = fault_of_path(image_name, entry.root, further_roots)
    if fault:
        faults.append(Fault("ingest.unusable_image_path", key=field, value=describe(value), cause=fault))
        return None
    path = os.path.join(entry.root, image_name)
    if entry.image_root:
        path = os.path.normpath(path)
    is_file_in_roots = not os.path.islink(path) or is_in_roots(path)
    if is_in_roots(os.path.dirname(path)) and is_file_in_roots:
        return path
    faults.append(Fault("ingest.link_out_of_root", key=field, path=path))
    return None


def _escape_surrogates(value: str) -> str:
    """Return the text in a form that Arrow can store: lone surrogates become escape sequences."""
    return value if value.isascii() else value.encode("utf-8", "backslashreplace").decode()
