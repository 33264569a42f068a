"""`m3diff caption BEFORE AFTER`: captions of one's own images. No server is needed."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from PIL import Image

from m3diff.datasets.files import describe, fault_of_path, is_inside, read_values
from m3diff.images.open import MAX_PIXELS, ImageError, load_image
from m3diff.images.saliency import outlined
from m3diff.provenance.cache import is_cached_object
from m3diff.records.errors import DataError
from m3diff.records.progress import progress
from m3diff.settings.section import ParamsError

if TYPE_CHECKING:
    from m3diff.models.generation import Captioner

SIDES = ("before", "after")
SUFFIXES = {".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".heic", ".heif"}
MOST_NAMED = 5
WANTED = "give two images, two folders of images with the same names, or a CSV file with the columns before and after"
BATCH = 8
GAP_PX = 12


class AskedPair(NamedTuple):
    """A pair; `name` is unlike every other's."""

    name: str
    before: Path
    after: Path


def find_pairs(before: Path, after: Path | None, image_root: Path | None = None) -> list[AskedPair]:
    """The pairs that two paths, or one of a table, stand for.

    Args:
        image_root: a folder beside the table's own that paths in the table may lead into.

    Raises:
        DataError: a path is missing, the two do not fit each other, or a row of the table says too little.
    """
    for path in filter(None, (before, after)):
        if not path.exists():
            raise DataError(f"{path}: no such file or folder; {WANTED}")
    if after is None and not before.is_dir():
        return list(_of_table(before, [before.parent, *([image_root] if image_root else [])]))
    if after is None or before.is_dir() != after.is_dir():
        raise DataError(f"{before}{f', {after}' if after else ''}: no pair; {WANTED}")
    return _of_folders(before, after) if before.is_dir() else [AskedPair(before.stem, before, after)]


def _of_folders(before: Path, after: Path) -> list[AskedPair]:
    one, other = (_images(folder) for folder in (before, after))
    if alone := sorted(one.keys() ^ other.keys()):
        named = ", ".join(alone[:MOST_NAMED]) + (", ..." if alone[MOST_NAMED:] else "")
        raise DataError(f"{before}, {after}: {len(alone)} image(s) in one folder alone: {named}; name both sides alike")
    if not one:
        raise DataError(f"{before}: no image ({', '.join(sorted(SUFFIXES))}); {WANTED}")
    return [AskedPair(name, one[name], other[name]) for name in sorted(one)]


def _images(folder: Path) -> dict[str, Path]:
    found: dict[str, list[Path]] = {}
    for path in sorted(folder.iterdir()):
        if path.name[0] != "." and path.suffix.lower() in SUFFIXES and path.is_file():
            found.setdefault(path.stem, []).append(path)
    return {(stem if len(paths) == 1 else path.name): path for stem, paths in found.items() for path in paths}


def _of_table(table: Path, roots: list[Path]) -> Iterator[AskedPair]:
    """Rows of a table; paths are relative to its folder and stay in the roots."""
    number = 0
    for number, (where, row) in enumerate(read_values(table, SIDES), 1):
        if isinstance(row, DataError):
            raise DataError(f"{table.parent / where}: {row}")
        for side in SIDES:
            fault = fault_of_path(str(row[side]), table.parent, roots, "--image-root")
            path = table.parent / str(row[side])
            if not fault and not (is_inside(path, *roots) or is_cached_object(str(path))):
                fault = "is a symbolic link out of the table's folder; name the folder that it leads to by --image-root"
            if fault:
                raise DataError(f"{table.parent / where}: {side}: {describe(row[side])} {fault}")
        yield AskedPair(f"{number:05}", *(table.parent / str(row[side]) for side in SIDES))
    if not number:
        raise DataError(f"{table}: no row; {WANTED}")


class Answer(NamedTuple):
    """The caption of a pair, or why there is none."""

    pair: AskedPair
    caption: str | None
    fault: str | None = None

    def as_dict(self) -> dict[str, str | None]:
        said = {"error": self.fault} if self.fault else {"caption": self.caption}
        return {"name": self.pair.name, "before": str(self.pair.before), "after": str(self.pair.after), **said}


def caption_pairs(
    captioner: "Captioner",
    pairs: Sequence[AskedPair],
    question: str | None,
    overlay: Path | None,
    max_pixels: int = MAX_PIXELS,
) -> Iterator[Answer]:
    """An answer to each pair, in order; one whose images cannot be read keeps no other from its caption.

    Args:
        question: None: what has changed.
        overlay: where both images are drawn with what the model looked at outlined: a file for one pair, a folder for
            several.
        max_pixels: of the padded square of an image.

    Raises:
        DataError: an overlay is asked for, and the model has no saliency maps.
        ParamsError: the model cannot be asked this question.
    """
    from m3diff.models.generation import QUESTION

    check_question(captioner, question)
    batches = [pairs[start : start + BATCH] for start in range(0, len(pairs), BATCH)]
    for batch in progress(batches, "caption", unit="batch") if len(batches) > 1 else batches:
        images: dict[AskedPair, tuple[Image.Image, Image.Image]] = {}
        answers: dict[AskedPair, Answer] = {}
        for pair in batch:
            try:
                before, after = (load_image(path, max_pixels=max_pixels) for path in (pair.before, pair.after))
                images[pair] = before, after
            except ImageError as error:
                answers[pair] = Answer(pair, None, str(error))
        if images:
            prepared = [captioner.processor.prepare_image(image) for both in images.values() for image in both]
            texts, maps = captioner.answer(prepared, question or QUESTION, overlay is not None)
            answers |= {pair: Answer(pair, text) for pair, text in zip(images, texts, strict=True)}
            if overlay is not None:
                if maps is None:
                    raise DataError("overlay: this model has no saliency maps; leave it out")
                for pair, grid in zip(images, maps, strict=True):
                    _draw(images[pair], grid, overlay if len(pairs) == 1 else overlay / f"{pair.name}.png")
        yield from (answers[pair] for pair in batch)


def check_question(captioner: "Captioner", question: str | None) -> None:
    """Raises ParamsError if the model cannot be asked this."""
    if not question:
        return
    if not captioner.family.reads_question:
        raise ParamsError(
            f"--question {question!r}: this model reads no question and says of every pair what changed; leave it out"
        )
    try:
        captioner.processor.encode_prompt(question)
    except ValueError as error:
        raise ParamsError(f"--question {question!r}: {error}") from error


def _draw(images: tuple[Image.Image, Image.Image], grid: np.ndarray, file: Path) -> None:
    sides = [outlined(image, grid.astype(np.float32)) for image in images]
    sheet = Image.new("RGB", (sum(side.width for side in sides) + GAP_PX, max(side.height for side in sides)), "white")
    sheet.paste(sides[0], (0, 0))
    sheet.paste(sides[1], (sides[0].width + GAP_PX, 0))
    file.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(file)
