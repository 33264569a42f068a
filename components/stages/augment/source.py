"""The rows of a raw dataset that synthetic data are made from; rows that are not usable are counted by reason.

A made pair stays in the split of what it is made from. Where a source has a scene in two splits, the higher one (test,
val, train) keeps it, as validate decides.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import polars as pl

from m3diff.datasets import DATASETS
from m3diff.datasets.files import describe, fault_of_path, is_inside
from m3diff.datasets.spec import Row, Single
from m3diff.datasets.tables import unpacked
from m3diff.images.cache import check_images
from m3diff.images.check import OK
from m3diff.records.errors import DataError
from m3diff.records.schemas import NO_CHANGE, SPLITS
from m3diff.stages.augment.params import Source, Split

MAX_PIXELS = 100_000_000
"""A larger image is not used."""

TWO = object()
"""In the place of the one image of a row that has two."""


class Rejected(Counter[str]):
    """Counts of pairs that were not made, by reason. `examples`: for each reason in the source, the first row or image,
    and its fault."""

    def __init__(self, counts: Mapping[str, int] | None = None) -> None:
        super().__init__(counts)
        self.examples: dict[str, str] = dict(getattr(counts, "examples", {}))

    def add(self, reason: str, example: str) -> None:
        self[reason] += 1
        self.examples.setdefault(reason, example)

    def times(self, pairs: int) -> "Rejected":
        """The same, where each counts for so many pairs."""
        found = Rejected(self)
        for reason in found:
            found[reason] *= pairs
        return found


class Original(NamedTuple):
    """An image with the instruction to edit it by."""

    name: str
    split: Split
    scene: str
    image: Path
    digest: str  # of the image file
    instruction: str
    change_types: list[str]
    caption: str | None  # of the image, where the source has one


class Captioned(NamedTuple):
    """An image with a caption of its own."""

    name: str
    split: str
    scene: str
    image: Path
    digest: str
    caption: str


def read_originals(source: Source, unpack_to: Path, image_cache: Path, rejected: Rejected) -> list[Original]:
    """The usable originals, one for each row of the source's splits; of each other row a reason is counted.

    Args:
        unpack_to: the folder for images that are in a Parquet file.
        image_cache: what is known of images by content; it changes nothing of what is found.

    Raises:
        DataError: the source is not there, or its annotation files cannot be used.
    """
    captions = {place_of(source, each.image): _first(each.captions) for each in _singles(source)}
    found = []
    for row in _usable(_rows(source, unpack_to), source, rejected):
        text = _first(row.references)
        if row.change_types == [NO_CHANGE]:
            rejected.add("nothing is to change", row.source)
        elif not text:
            rejected.add("no instruction", row.source)
        else:
            found.append((row, row.before, text))
    return [
        Original(row.name, row.split, row.scene, image, digest, text, row.change_types, captions.get(image))
        for row, image, digest, text in _readable(found, source, image_cache, rejected)
    ]


def read_captioned(source: Source, unpack_to: Path, image_cache: Path, rejected: Rejected) -> list[Captioned]:
    """The usable images with their first captions: those that the source's dataset describes, else its pairs of an
    image with itself (the reader `pairs` with one column for both images). Of each other a reason is counted.

    Raises:
        DataError: the source is not there, its annotation files cannot be used, or it has no captions of single images.
    """
    rows: list[Any] = list(_singles(source))
    if not rows:
        for row in _rows(source, unpack_to):
            image = row.before if row.fault or row.before == row.after else TWO
            rows.append(Single(row.name, row.split, row.scene, image, row.references, row.source, row.fault))
    if all(row.image is TWO for row in rows):
        raise DataError(
            f"{source.root}: has no captions of single images; read a list of images with captions by the reader pairs "
            "with options {columns: {before: image, after: image, captions: caption}}"
        )
    found = []
    for single in _usable(rows, source, rejected):
        if single.image is TWO:
            rejected.add("is a pair of two images", single.source)
        elif text := _first(single.captions):
            found.append((single, single.image, text))
        else:
            rejected.add("no caption", single.source)
    return [
        Captioned(single.name, single.split, single.scene, image, digest, text)
        for single, image, digest, text in _readable(found, source, image_cache, rejected)
    ]


def known_pairs(source: Source, unpack_to: Path) -> set[frozenset[Path]]:
    """The two images of each pair that the source has already."""
    pairs = ((place_of(source, row.before), place_of(source, row.after)) for row in _rows(source, unpack_to))
    return {frozenset((before, after)) for before, after in pairs if before and after and before != after}


def _rows(source: Source, unpack_to: Path) -> Iterator[Row]:
    if not source.root.is_dir():
        raise DataError(f"{source.root}: is no folder; fetch the source or correct its root")
    rows = DATASETS[source.reader].read(source.root, **source.options)
    return unpacked((row for row in rows if not row.without_caption), unpack_to)


def _singles(source: Source) -> Iterator[Single]:
    singles = DATASETS[source.reader].singles
    return singles(source.root) if singles else iter(())


def _usable(rows: Iterable[Any], source: Source, rejected: Rejected) -> Iterator[Any]:
    """The rows of the source's splits that can be read and whose scene is in no higher split."""
    rows = [_with_whole_names(row) for row in rows]
    highest: dict[Any, int] = {}
    for row in rows:
        if row.split in SPLITS and isinstance(row.scene, str):
            highest[row.scene] = max(SPLITS.index(row.split), highest.get(row.scene, 0))
    for row in rows:
        fault = row.fault
        if row.split not in SPLITS:  # readers leave this to ingest
            fault = fault or f"split: expected one of {', '.join(SPLITS)}, found {describe(row.split)}"
        elif row.split not in source.splits:
            continue
        wrong = [field for field in ("name", "scene") if not isinstance(getattr(row, field), str)]
        if wrong and not fault:
            fault = f"{wrong[0]}: expected a text, found {describe(getattr(row, wrong[0]))}"
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
    named = isinstance(image, str) and image and image == _whole(image)
    if not named or fault_of_path(image, source.root):
        return None
    path = source.root / image
    return path if source.follow_links or is_inside(path, source.root) else None


def _readable(
    found: list[tuple[Any, Any, str]], source: Source, image_cache: Path, rejected: Rejected
) -> Iterator[tuple[Any, Path, str, str]]:
    """Row, image, digest and text of those (row, image as the row names it, text) whose image can be read to its end;
    the others are counted."""
    places = [place_of(source, named) for _, named, _ in found]
    paths = pl.Series([str(image) for image in places if image], dtype=pl.String)
    checked = check_images(paths, MAX_PIXELS, image_cache, "augment").select("path", "verdict", "digest")
    known = {Path(path): (verdict, digest) for path, verdict, digest in checked.iter_rows()}
    for (row, named, text), image in zip(found, places, strict=True):
        if image is None:
            fault = f"{describe(named)} is no path inside {source.root}; correct the path"
            fault += "; a link out of the root needs follow_links in the source"
        elif known[image][0] == OK:
            yield row, image, known[image][1].hex(), text
            continue
        else:
            remedy = "restore it or save it anew" if image.exists() else "fetch it"
            fault = f"{image}: {known[image][0]}; {remedy}"
        rejected.add("image cannot be read", f"{row.source}: {fault}")


def _first(texts: Any) -> str:
    """The first text that is not blank; "" where there is none."""
    found = texts if isinstance(texts, list) else []
    return next((_whole(" ".join(text.split())) for text in found if isinstance(text, str) and text.strip()), "")


def _whole(text: str) -> str:
    """The text with ? for half a character, as a cut JSON escape leaves it ("\\ud83d"): no file can hold that."""
    return text.encode("utf-8", "replace").decode()


def _with_whole_names(row: Any) -> Any:
    names = {field: getattr(row, field) for field in ("name", "scene")}
    whole: dict[str, Any] = {field: _whole(name) for field, name in names.items() if isinstance(name, str)}
    if isinstance(row, Row):
        whole["change_types"] = [_whole(kind) for kind in row.change_types]
    return row._replace(**whole)
