"""The processor of BLIP2IDC in an exported folder. transformers' processor for BLIP-2 cannot stack images."""

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import ProcessorMixin

from m3diff.commands.export.callable_processor import CallableWithPairs
from m3diff.models.blip2idc_model import Blip2IDCImageProcessor, Blip2IDCProcessor
from m3diff.records.errors import ValueFault


class ImagePairProcessor(CallableWithPairs, ProcessorMixin, Blip2IDCProcessor):  # type: ignore[misc]  # ProcessorMixin saves the files
    """Converts image pairs into the inputs of `generate`.

    The inputs are the tokens and pixel_values [P, 3, side, side]. Each pair is one picture with the image before on
    top.

    Attributes:
        prompt: token ids of the prompt: one placeholder per query, followed by the start token.
    """

    family = "blip2idc"
    question = ""  # the model does not read a question

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
        """Return an empty question for each pair. Raises ValueFault if `text` is set, as the model would ignore it."""
        if text is not None:
            raise ValueFault("export.no_question_read", value=text)
        return super().questions(text, pairs)


def shared_processor(
    family: str, trained_processor: Any, question: str, config: Mapping[str, Any]
) -> ImagePairProcessor:
    """Return the processor for an exported folder, based on the processor that the model was trained with."""
    return ImagePairProcessor(trained_processor.image_processor, trained_processor.tokenizer, trained_processor.prompt)
