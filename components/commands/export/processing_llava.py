"""The processor of M3Diff and OneDiff as others call it."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from PIL import Image

from m3diff.commands.export.called import CalledWithPairs
from m3diff.models.processing import M3DiffImageProcessor, M3DiffProcessor

OF_PAIRS = ("image_sizes", "batch_num_images")  # inputs of LLaVA-OneVision that LLaVA-1.5's own class does not take


class ImagePairProcessor(CalledWithPairs, M3DiffProcessor):  # type: ignore[misc]  # as others call it
    """Pairs of images and questions to what `generate` takes: pixel_values [2 P, 3, side, side] beside the tokens, and
    where `tells_pairs` is set image_sizes [2 P, 2] and batch_num_images [P].

    Attributes:
        question: the default question of a pair.
        places: tokens in the places of the image before and of the image after.
        begin_ids: what the tokenizer puts before a text.
        tells_pairs: whether the model is told which images are a pair; LLaVA-1.5 without a module is not.
        family: whose file this is.
    """

    def __init__(
        self,
        image_processor: M3DiffImageProcessor | None = None,
        tokenizer: Any = None,
        num_image_tokens: int | None = None,
        question: str | None = None,
        places: Sequence[int] = (),
        begin_ids: Sequence[int] = (),
        tells_pairs: bool = True,
        family: str = "m3diff",
        chat_template: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(image_processor, tokenizer, num_image_tokens, chat_template)
        self.question, self.places, self.begin_ids = question, tuple(places), tuple(begin_ids)
        self.tells_pairs, self.family = tells_pairs, family

    def inputs(self, pairs: list[tuple[Image.Image, Image.Image]], questions: list[str]) -> dict[str, Any]:
        sizes = torch.full((2 * len(pairs), 2), self.image_processor.side)
        found = {**super().inputs(pairs, questions), "image_sizes": sizes}
        return {name: value for name, value in found.items() if self.tells_pairs or name not in OF_PAIRS}


def shared_processor(family: str, known: Any, question: str, config: Mapping[str, Any]) -> ImagePairProcessor:
    """The processor of a shared folder, from the one that was trained with and config.json."""
    return ImagePairProcessor(
        known.image_processor,
        known.tokenizer,
        known.num_image_tokens,
        question,
        known.places,
        known.begin_ids,
        config["model_type"] != "llava",
        family,
        known.chat_template,
    )
