"""The rows of a raw dataset that synthetic data are made from; rows that are not usable are counted by reason.

A made pair stays in the split of what it is made from. Where a source has a scene in two splits, the higher one (test,
val, train) keeps it, as validate decides.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import polars as pl

from m3diff.datasets import DATASETS
from m3diff.datasets.files import describe, fault_of_path, is_inside
from m3diff.datasets.spec import Row
from m3diff.datasets.tables import unpacked
from m3diff.images.cache import check_images
from m3diff.images.check import OK
from m3diff.records.errors import DataError
from m3diff.records.schemas import NO_CHANGE, SPLITS
from m3diff.stages.augment.params import Source, Split

MAX_PIXELS = 100_000_000
"""A larger image is not used."""


class Rejected(Counter[str]):
    """Counts of pairs that were not made, by reason. `examples`: for each reason in the source, the first row or image,
    and its fault. `each`: the pairs that a row of the source would have given."""

    def __init__(self, each: int = 1) -> None:
        super().__init__()
        self.each, self.examples = each, dict[str, str]()

    def add(self, reason: str, example: str) -> None:
        self[reason] += self.each
        self.examples.setdefault(reason, example)


class Original(NamedTuple):
    """An image of the source with its text: the instruction to edit it by, or a caption of its own."""

    name: str
    split: Split
    scene: str
    image: Path
    digest: str  # of the image file
    text: str
    change_types: Sequence[str] = ()
    caption: str | None = None  # of the image, where the text is an instruction and the source has one


def read_originals(
    source: Source, unpack_to: Path, image_cache: Path, rejected: Rejected, use: Literal["instruction", "caption"]
) -> list[Original]:
    """The usable images of the source's splits with their first texts; of each other row a reason is counted.

    An instruction is a reference of a pair, whose image before it edits. Captions are those of single images that the
    source's dataset describes, else of its pairs of an image with itself (the reader `pairs` with one column for both
    images).

    Args:
        unpack_to: the folder for images that are in a Parquet file.
        image_cache: what is known of images by content; it changes nothing of what is found.

    Raises:
        DataError: the source is not there, its annotation files cannot be used, or captions are wanted and it has none
            of single images.
    """
    singles = DATASETS[source.reader].singles
    rows = list(singles(source.root)) if singles else []
    captions = {place_of(source, row.before): _first(row.references) for row in rows}
    if use == "instruction" or not rows:
        rows = list(_rows(source, unpack_to))
    is_caption = use == "caption"
    if is_caption and not any(row.fault or row.before == row.after for row in rows):
        raise DataError(
            f"{source.root}: has no captions of single images; read a list of images with captions by the reader pairs "
            "with options {columns: {before: image, after: image, captions: caption}}"
        )
    found = []
    for row in _usable(rows, source, rejected):
        text = _first(row.references)
        if is_caption and row.before != row.after:
            rejected.add("is a pair of two images", row.source)
        elif not is_caption and row.change_types == [NO_CHANGE]:
            rejected.add("nothing is to change", row.source)
        elif not text:
            rejected.add(f"no {use}", row.source)
        else:
            found.append((row, text, place_of(source, row.before)))
    paths = pl.Series([str(image) for _, _, image in found if image], dtype=pl.String)
    checked = check_images(paths, MAX_PIXELS, image_cache, "augment").select("path", "verdict", "digest")
    known = {Path(path): (verdict, digest) for path, verdict, digest in checked.iter_rows()}
    originals = []
    for row, text, image in found:
        fault = f"{describe(row.before)} is no path inside {source.root}; correct the path; a link needs follow_links"
        if image is not None:
            verdict, digest = known[image]
            if verdict == OK:
                caption = captions.get(image)
                originals.append(Original(*row[:3], image, digest.hex(), text, row.change_types, caption))
                continue
            fault = f"{image}: {verdict}; {'restore it or save it anew' if image.exists() else 'fetch it'}"
        rejected.add("image cannot be read", f"{row.source}: {fault}")
    return originals


def known_pairs(source: Source, unpack_to: Path) -> set[frozenset[Path | None]]:
    """The two images of each pair that the source has already."""
    return {frozenset((place_of(source, row.before), place_of(source, row.after))) for row in _rows(source, unpack_to)}


def _rows(source: Source, unpack_to: Path) -> Iterator[Row]:
    if not source.root.is_dir():
        raise DataError(f"{source.root}: is no folder; fetch the source or correct its root")
    rows = DATASETS[source.reader].read(source.root, **source.options)
    described = (Row._make(map(_whole, row)) for row in rows if not row.without_caption)
    return unpacked(described, unpack_to)


def _whole(value: Any) -> Any:
    """The value with ? for half a character, as a cut JSON escape leaves it ("\\ud83d"): no file can hold that."""
    if isinstance(value, list):
        return [*map(_whole, value)]
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value


def _usable(rows: Sequence[Row], source: Source, rejected: Rejected) -> Iterator[Row]:
    """The rows of the source's splits that can be read and whose scene is in no higher split."""
    highest: dict[str, int] = {}
    for row in rows:
        if row.split in SPLITS and isinstance(row.scene, str):
            highest[row.scene] = max(SPLITS.index(row.split), highest.get(row.scene, 0))
    for row in rows:
        fault = row.fault
        if row.split not in SPLITS:  # readers leave this to ingest
            fault = fault or f"split: expected one of {', '.join(SPLITS)}, found {describe(row.split)}"
        elif row.split not in source.splits:
            continue
        for field, value in (("name", row.name), ("scene", row.scene)):
            if not isinstance(value, str):
                fault = fault or f"{field}: expected a text, found {describe(value)}"
        if fault:
            rejected.add("row cannot be read", f"{row.source}: {fault}")
        elif SPLITS.index(row.split) < highest[row.scene]:
            rejected.add("scene is in a higher split", f"{row.source}: {row.scene} is in {SPLITS[highest[row.scene]]}")
        else:
            yield row


def place_of(source: Source, image: Any) -> Path | None:
    """The path of an image; None where it would be outside the root, or no file can be called so."""
    if isinstance(image, Path):
        return image
    if not isinstance(image, str) or not image or fault_of_path(image, source.root):
        return None
    path = source.root / image
    return path if source.follow_links or is_inside(path, source.root) else None


def _first(texts: Any) -> str:
    """The first text that is not blank; "" where there is none."""
    found = texts if isinstance(texts, list) else []
    return next((" ".join(text.split()) for text in found if isinstance(text, str) and text.strip()), "")
