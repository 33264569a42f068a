"""M3Diff's processor as others call it."""

from typing import Any

from PIL import Image

from m3diff.commands.export.hub.called import CalledWithPairs
from m3diff.models.m3diff.processing import M3DiffImageProcessor, M3DiffProcessor

AUTO_MAP = {"AutoProcessor": "processing_m3diff.ImagePairProcessor"}
IMAGE_AUTO_MAP = {"AutoImageProcessor": f"processing_m3diff.{M3DiffImageProcessor.__name__}"}


class ImagePairProcessor(CalledWithPairs, M3DiffProcessor):  # type: ignore[misc]  # as others call it
    """Pairs of images and questions to what `generate` takes: pixel_values [2 P, 3, side, side], image_sizes [2 P, 2]
    and batch_num_images [P] beside the tokens.

    Attributes:
        question: what is asked of a pair where nothing else is.
    """

    written_as = AUTO_MAP, IMAGE_AUTO_MAP

    def __init__(
        self,
        image_processor: M3DiffImageProcessor | None = None,
        tokenizer: Any = None,
        num_image_tokens: int | None = None,
        question: str | None = None,
        chat_template: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(image_processor, tokenizer, num_image_tokens, chat_template)
        self.question = question

    def inputs(self, pairs: list[tuple[Image.Image, Image.Image]], questions: list[str]) -> dict[str, Any]:
        return M3DiffProcessor.__call__(self, pairs, questions)


def shared_processor(known: M3DiffProcessor, question: str) -> ImagePairProcessor:
    """The one that was trained with, to be written to a shared folder."""
    template = known.chat_template
    assert isinstance(template, str), "one template"
    return ImagePairProcessor(known.image_processor, known.tokenizer, known.num_image_tokens, question, template)
