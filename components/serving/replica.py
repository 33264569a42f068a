"""One process that holds the model: it decodes images, gathers pairs into batches and captions them.

Ray Serve runs it as the replicas of a deployment. Decoding has threads of its own, so that the next batch is ready when
the model is.
"""

import asyncio
import io
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from ray import serve

from m3diff.images.open import ImageError, load_image
from m3diff.images.saliency import outlined
from m3diff.records.errors import DataError
from m3diff.registry.model_source import Source, load
from m3diff.serving.asked import Asked

if TYPE_CHECKING:
    from PIL import Image

    from m3diff.models.generation import Captioner

DECODERS = 2
OVERLAY_PX = 1024
"""The longer side of an overlay at most: an image for a page, not an archive."""


class Facts(NamedTuple):
    """What the server needs to know of the model before it passes a question on.

    Attributes:
        special_tokens: marks of the prompt, which no question may hold.
        reads_question: whether it reads a question at all.
    """

    name: str
    max_new_tokens: int
    special_tokens: tuple[str, ...]
    reads_question: bool


class Answer(NamedTuple):
    """What the model says of one pair.

    Attributes:
        model: the version that said it.
        overlay: before and after as PNG files with the outlines of the saliency map; None where it was not asked for or
            the model has none.
        prompt_tokens, completion_tokens: counts, with the end token.
        batch: how many pairs shared its batch.
    """

    caption: str
    model: str
    overlay: tuple[bytes, bytes] | None
    prompt_tokens: int
    completion_tokens: int
    batch: int


class Undecodable(NamedTuple):
    """An image whose header was right and whose rest is not. A value, since Ray logs an error for what is raised."""

    why: str


class Unloadable(NamedTuple):
    """A checkpoint that is damaged. A value, since Ray would start the replica again and bury what is raised."""

    why: str


class Prepared(NamedTuple):
    """A pair as the model takes it.

    Attributes:
        inputs: before, after, each as the processor prepares it.
        shown: both images no larger than an overlay; None where none is asked for.
    """

    question: str
    inputs: tuple[np.ndarray, np.ndarray]
    shown: "tuple[Image.Image, Image.Image] | None"


class Replica:
    """Args:
    source: the checkpoint.
    batch_pairs: of the section `serve`.
    batch_wait_s: that a pair waits for others to share its batch.
    threads: that the model computes with on a CPU.
    before_listening: called in this process before Ray Serve opens a port in it.
    """

    def __init__(
        self,
        source: Source,
        batch_pairs: int,
        batch_wait_s: float,
        threads: int,
        before_listening: Callable[[], None] | None = None,
    ) -> None:
        import torch

        if before_listening is not None:
            before_listening()
        torch.set_num_threads(threads)
        self.name, self.fault = source.name, ""
        try:
            self.captioner = load(source)
        except DataError as error:
            self.fault = str(error)
        self.decoders, self.computer = ThreadPoolExecutor(DECODERS), ThreadPoolExecutor(1)
        together = serve.batch(max_batch_size=batch_pairs, batch_wait_timeout_s=batch_wait_s)
        self.batched = together(self._batched)  # a queue of this object's own
        self.free = asyncio.Event()
        self.free.set()

    async def facts(self) -> Facts | Unloadable:
        if self.fault:
            return Unloadable(self.fault)
        tokenizer: Any = self.captioner.processor.tokenizer  # type: ignore[attr-defined]  # every family has one
        tokens = {*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()}
        reads = self.captioner.family.reads_question
        return Facts(self.name, self.captioner.max_new_tokens, tuple(sorted(tokens)), reads)

    async def __call__(self, asked: Asked) -> Answer | Undecodable:
        loop = asyncio.get_running_loop()
        try:
            prepared = await loop.run_in_executor(self.decoders, prepare, self.captioner, asked)
        except (ImageError, MemoryError) as error:
            return Undecodable(str(error).partition(";")[0])
        await self.free.wait()  # else Serve makes a small batch of each moment while the model computes
        caption, grid, batch = await self.batched(prepared)
        overlay = None
        if prepared.shown is not None and grid is not None:
            overlay = await loop.run_in_executor(self.decoders, draw, prepared.shown, grid)
        processor = self.captioner.processor
        lengths = len(processor.encode_prompt(prepared.question)), len(processor.encode_reference(caption))
        return Answer(caption, self.name, overlay, *lengths, batch)

    async def _batched(self, pairs: list[Prepared]) -> list[tuple[str, np.ndarray | None, int]]:
        """(caption, saliency map, size of the batch) of each pair, in order."""
        loop = asyncio.get_running_loop()
        self.free.clear()
        try:
            found = await loop.run_in_executor(self.computer, captions, self.captioner, pairs)
        finally:
            self.free.set()
        return [(caption, grid, len(pairs)) for caption, grid in found]


def prepare(captioner: "Captioner", asked: Asked) -> Prepared:
    """Raises ImageError where an image cannot be decoded. One image of the pair is in memory at a time."""
    from m3diff.models.generation import QUESTION

    inputs: list[np.ndarray] = []
    shown: list[Image.Image] = []
    for data in (asked.before, asked.after):
        image = load_image(io.BytesIO(data))
        inputs.append(captioner.processor.prepare_image(image))
        if asked.overlay:
            image.thumbnail((OVERLAY_PX, OVERLAY_PX))
            shown.append(image)
        del image
    before, after = inputs
    return Prepared(asked.question or QUESTION, (before, after), (shown[0], shown[1]) if shown else None)


def captions(captioner: "Captioner", pairs: Sequence[Prepared]) -> list[tuple[str, np.ndarray | None]]:
    """Caption and map of each pair, in order. Pairs of one question go through the model together; those with a map
    apart, so that nobody's caption depends on what another asks for."""
    groups: dict[tuple[str, bool], list[int]] = {}
    for place, pair in enumerate(pairs):
        groups.setdefault((pair.question, pair.shown is not None), []).append(place)
    found: dict[int, tuple[str, np.ndarray | None]] = {}
    for (question, saliency), places in groups.items():
        images = [image for place in places for image in pairs[place].inputs]
        texts, maps = captioner.answer(images, question, saliency)
        grids = [None] * len(texts) if maps is None else maps
        found |= dict(zip(places, zip(texts, grids, strict=True), strict=True))
    return [found[place] for place in range(len(pairs))]


def draw(images: "tuple[Image.Image, Image.Image]", grid: np.ndarray) -> tuple[bytes, bytes]:
    """Both images as PNG with the outlines of the pair's map."""
    return _png(outlined(images[0], grid.astype(np.float32))), _png(outlined(images[1], grid.astype(np.float32)))


def _png(image: "Image.Image") -> bytes:
    held = io.BytesIO()
    image.save(held, "PNG")
    return held.getvalue()
