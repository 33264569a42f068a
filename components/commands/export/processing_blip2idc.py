"""BLIP2IDC's processor as others call it: transformers' own would not stack the images."""

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import ProcessorMixin

from m3diff.commands.export.called import CalledWithPairs
from m3diff.models.blip2idc_model import Blip2IDCImageProcessor, Blip2IDCProcessor


class ImagePairProcessor(CalledWithPairs, ProcessorMixin, Blip2IDCProcessor):  # type: ignore[misc]  # ProcessorMixin's files
    """Pairs of images to what `generate` takes: pixel_values [P, 3, side, side] of both, before on top, and the tokens.

    Attributes:
        prompt: token ids before a caption: the places of the queries and the start token.
    """

    family = "blip2idc"
    question = ""  # none is read

    def __init__(
        self,
        image_processor: Blip2IDCImageProcessor | None = None,
        tokenizer: Any = None,
        prompt: Sequence[int] = (),
        **kwargs: Any,
    ) -> None:
        ProcessorMixin.__init__(self, image_processor, tokenizer)
        self.prompt = tuple(prompt)

    def questions(self, text: str | list[str] | None, pairs: int) -> list[str]:
        """Raises ValueError for a question: it would be answered as if it had not been asked."""
        if text is not None:
            raise ValueError(f"text: BLIP2IDC reads no question, it says what changed; leave it out (found {text!r})")
        return super().questions(text, pairs)


def shared_processor(family: str, known: Any, question: str, config: Mapping[str, Any]) -> ImagePairProcessor:
    """The processor of a shared folder, from the one that was trained with."""
    return ImagePairProcessor(known.image_processor, known.tokenizer, known.prompt)
