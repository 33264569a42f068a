"""What changed between two images of one's own: `m3diff caption BEFORE AFTER`. No server is needed."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from m3diff.images.open import MAX_PIXELS, ImageError, load_image
from m3diff.images.saliency import outlined
from m3diff.records.errors import DataError
from m3diff.records.progress import progress
from m3diff.serving.pairs import AskedPair
from m3diff.settings.section import ParamsError

if TYPE_CHECKING:
    from PIL import Image

    from m3diff.models.generation import Captioner

BATCH = 8
GAP_PX = 12


class Answer(NamedTuple):
    """Of one pair: its caption, or why there is none."""

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
    check_question(captioner, question)
    batches = [pairs[start : start + BATCH] for start in range(0, len(pairs), BATCH)]
    for batch in progress(batches, "caption", unit="batch") if len(batches) > 1 else batches:
        loaded = [_load(pair, max_pixels) for pair in batch]
        read = [images for images in loaded if not isinstance(images, ImageError)]
        captions, maps = _answer(captioner, read, question, overlay is not None)
        answers = iter(zip(read, captions, maps, strict=True))
        for pair, found in zip(batch, loaded, strict=True):
            if isinstance(found, ImageError):
                yield Answer(pair, None, str(found))
                continue
            images, text, grid = next(answers)
            if overlay is not None:
                _draw(images, grid, overlay if len(pairs) == 1 else overlay / f"{pair.name}.png")
            yield Answer(pair, text)


def check_question(captioner: "Captioner", question: str | None) -> None:
    """Raises ParamsError where the model cannot be asked this."""
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


def _load(pair: AskedPair, max_pixels: int) -> "tuple[Image.Image, Image.Image] | ImageError":
    try:
        return load_image(pair.before, max_pixels=max_pixels), load_image(pair.after, max_pixels=max_pixels)
    except ImageError as error:
        return error


def _answer(
    captioner: "Captioner", pairs: "Sequence[tuple[Image.Image, Image.Image]]", question: str | None, saliency: bool
) -> tuple[list[str], Sequence[np.ndarray | None]]:
    from m3diff.models.generation import QUESTION

    if not pairs:
        return [], []
    prepared = [captioner.processor.prepare_image(image) for pair in pairs for image in pair]
    captions, maps = captioner.answer(prepared, question or QUESTION, saliency)
    if saliency and maps is None:
        raise DataError("overlay: this model has no saliency maps; leave it out")
    return captions, [None] * len(captions) if maps is None else list(maps)


def _draw(images: "tuple[Image.Image, Image.Image]", grid: np.ndarray | None, file: Path) -> None:
    """Both images side by side, with the outlines of the pair's map."""
    from PIL import Image

    assert grid is not None
    sides = [outlined(image, grid.astype(np.float32)) for image in images]
    width = sum(side.width for side in sides) + GAP_PX
    sheet = Image.new("RGB", (width, max(side.height for side in sides)), "white")
    sheet.paste(sides[0], (0, 0))
    sheet.paste(sides[1], (sides[0].width + GAP_PX, 0))
    file.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(file)
