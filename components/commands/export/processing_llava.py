"""The processor of M3Diff and OneDiff in an exported folder."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from PIL import Image

from m3diff.commands.export.callable_processor import CallableWithPairs
from m3diff.models.processing import M3DiffImageProcessor, M3DiffProcessor

# Inputs of LLaVA-OneVision that LLaVA-1.5's class does not accept
ONEVISION_INPUTS = ("image_sizes", "batch_num_images")


class ImagePairProcessor(CallableWithPairs, M3DiffProcessor):  # type: ignore[misc]  # `__call__` differs
    """Converts image pairs and questions into the inputs of `generate`.

    The inputs are the tokens, pixel_values [2 P, 3, side, side] and, if `tells_pairs` is true, image_sizes [2 P, 2] and
    batch_num_images [P].

    Attributes:
        question: the default question.
        pair_tokens: number of placeholder tokens for the image before and for the image after.
        begin_ids: ids of the tokens that the tokenizer puts before a text.
        tells_pairs: whether the model accepts the inputs that specify which images form a pair. LLaVA-1.5 without a
            module does not.
        family: family of the model, `m3diff` or `onediff`.
    """

    def __init__(
        self,
        image_processor: M3DiffImageProcessor | None = None,
        tokenizer: Any = None,
        num_image_tokens: int | None = None,
        question: str | None = None,
        pair_tokens: Sequence[int] = (),
        begin_ids: Sequence[int] = (),
        tells_pairs: bool = True,
        family: str = "m3diff",
        chat_template: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(image_processor, tokenizer, num_image_tokens, chat_template)
        self.question = question
        self.pair_tokens = tuple(pair_tokens)
        self.begin_ids = tuple(begin_ids)
        self.tells_pairs = tells_pairs
        self.family = family

    def inputs(self, pairs: list[tuple[Image.Image, Image.Image]], questions: list[str]) -> dict[str, Any]:
        inputs = super().inputs(pairs, questions)
        inputs["image_sizes"] = torch.full((2 * len(pairs), 2), self.image_processor.side)
        if self.tells_pairs:
            return inputs
        return {name: value for name, value in inputs.items() if name not in ONEVISION_INPUTS}


def shared_processor(
    family: str, trained_processor: Any, question: str, config: Mapping[str, Any]
) -> ImagePairProcessor:
    """Return the processor for an exported folder.

    Args:
        family: family of the model.
        trained_processor: the processor that the model was trained with.
        question: the default question.
        config: content of the checkpoint's config.json.
    """
    return ImagePairProcessor(
        image_processor=trained_processor.image_processor,
        tokenizer=trained_processor.tokenizer,
        num_image_tokens=trained_processor.num_image_tokens,
        question=question,
        pair_tokens=trained_processor.pair_tokens,
        begin_ids=trained_processor.begin_ids,
        tells_pairs=config["model_type"] != "llava",
        family=family,
        chat_template=trained_processor.chat_template,
    )
