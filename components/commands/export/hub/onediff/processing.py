"""OneDiff's processor as others call it."""

from collections.abc import Sequence
from typing import Any

from PIL import Image

from m3diff.commands.export.hub.called import CalledWithPairs
from m3diff.models.m3diff.processing import M3DiffImageProcessor, M3DiffProcessor
from m3diff.models.onediff.processing import OneDiffProcessor

AUTO_MAP = {"AutoProcessor": "processing_onediff.ImagePairProcessor"}
IMAGE_AUTO_MAP = {"AutoImageProcessor": f"processing_onediff.{M3DiffImageProcessor.__name__}"}

OF_PAIRS = ("image_sizes", "batch_num_images")
"""Inputs of LLaVA-OneVision that LLaVA-1.5's own class does not take."""


class ImagePairProcessor(CalledWithPairs, OneDiffProcessor):  # type: ignore[misc]  # as others call it
    """Pairs of images and questions to what `generate` takes: pixel_values [2 P, 3, side, side] beside the tokens, and
    where `tells_pairs` is set image_sizes [2 P, 2] and batch_num_images [P].

    Attributes:
        question: what is asked of a pair where nothing else is.
        places: tokens in the places of the image before and of the image after.
        begin_ids: what the tokenizer puts before a text.
        tells_pairs: whether the model is told which images are a pair; LLaVA-1.5 without a module is not.
    """

    written_as = AUTO_MAP, IMAGE_AUTO_MAP

    def __init__(
        self,
        image_processor: M3DiffImageProcessor | None = None,
        tokenizer: Any = None,
        num_image_tokens: int | None = None,
        question: str | None = None,
        places: Sequence[int] = (0, 0),
        begin_ids: Sequence[int] = (),
        tells_pairs: bool = True,
        chat_template: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(image_processor, tokenizer, num_image_tokens, chat_template)
        before, after = places
        self.question, self.places, self.begin_ids = question, (before, after), tuple(begin_ids)
        self.tells_pairs = tells_pairs

    def inputs(self, pairs: list[tuple[Image.Image, Image.Image]], questions: list[str]) -> dict[str, Any]:
        found = M3DiffProcessor.__call__(self, pairs, questions)
        return {name: value for name, value in found.items() if self.tells_pairs or name not in OF_PAIRS}


def shared_processor(known: OneDiffProcessor, question: str, tells_pairs: bool) -> ImagePairProcessor:
    """The one that was trained with, to be written to a shared folder."""
    template = known.chat_template
    assert isinstance(template, str), "one template"
    return ImagePairProcessor(
        known.image_processor,
        known.tokenizer,
        known.num_image_tokens,
        question,
        known.places,
        known.begin_ids,
        tells_pairs,
        template,
    )
