"""Make processors callable in the way of transformers: `processor(images=[before, after], text=question)`."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import ProcessorMixin
from transformers.image_processing_utils import BatchFeature

from m3diff.images.open import load_image, to_rgb
from m3diff.models.processing import IMAGE, TextProcessor, pad_prompts
from m3diff.records.errors import ValueFault
from m3diff.records.sample import Turn

# Options of transformers' processors that are accepted, with the values that have no effect here. None and empty values
# are accepted for every option.
OPTIONS_WITHOUT_EFFECT = {
    "padding": (True, "longest"),
    "padding_side": ("left",),
    "truncation": (False,),
    "add_special_tokens": (False,),
}


class CallableWithPairs(TextProcessor):
    """Mixin that makes a family's processor callable. List it before the processor among the base classes.

    Attributes:
        question: the default question.
        family: family of the model. The processor's file is named `processing_<family>.py`.
    """

    question: str | None
    family: str
    decode = ProcessorMixin.decode  # type: ignore[assignment]  # accepts one text or several

    def inputs(self, pairs: list[tuple[Image.Image, Image.Image]], questions: list[str]) -> dict[str, Any]:
        """Return the inputs of `generate` for pairs of RGB images with one question per pair."""
        processor: Any = self
        prepared = [processor.prepare(pair) for pair in pairs]
        marks = processor.marks(2)
        prompts = [processor.encode_prompt([Turn(question)], marks) for question in questions]
        images = processor.image_inputs(processor.collate(prepared), torch.device("cpu"))
        return {**pad_prompts(prompts, self.pad_id), **images}

    def to_dict(self) -> dict[str, Any]:
        """Return the content of processor_config.json. Its `auto_map` refers to the classes in the exported folder."""
        fields = super().to_dict()  # type: ignore[misc]
        module = f"processing_{self.family}"
        image_processor = f"{module}.{type(self.image_processor).__name__}"
        fields["image_processor"] = {**fields["image_processor"], "auto_map": {"AutoImageProcessor": image_processor}}
        fields["auto_map"] = {"AutoProcessor": f"{module}.{type(self).__name__}"}
        return fields

    def __call__(
        self, images: Any, text: str | list[str] | None = None, return_tensors: str = "pt", **options: Any
    ) -> BatchFeature:
        """Return the inputs of `generate` for P pairs.

        Args:
            images: one pair [before, after], or a list of pairs. An image can be a PIL image, a path, a uint8 array
                [height, width, 3] or a uint8 tensor [3, height, width]. Images are rotated according to their EXIF
                orientation, and transparent pixels become white.
            text: one question, or one question per pair. A question may also be a prompt created by
                `apply_chat_template`. If None, the processor's default question is used.
            return_tensors: must be "pt".
            options: options of transformers' processors. Only values that have no effect here are accepted, such as
                padding=True or videos=None.

        Returns:
            `input_ids` and `attention_mask` [P, tokens], left-padded, `pixel_values`, and the model's other inputs.

        Raises:
            ValueFault: an argument is invalid. The message includes the value and says what is expected.
        """
        if return_tensors != "pt":
            raise ValueFault("export.other_tensors", value=return_tensors)
        for name, value in options.items():
            if value is not None and value not in ([], {}, *OPTIONS_WITHOUT_EFFECT.get(name, ())):
                raise ValueFault("export.other_option", key=name, value=value)
        pairs = [(open_image(before), open_image(after)) for before, after in list_pairs(images)]
        return BatchFeature(self.inputs(pairs, self.questions(text, len(pairs))))

    def questions(self, text: str | list[str] | None, pairs: int) -> list[str]:
        """Return one question per pair.

        Raises:
            ValueFault: the number of questions is wrong, or a question contains the image placeholder, which would be
                interpreted as another image.
        """
        if text is None:
            text = self.question
        texts = [text] * pairs if isinstance(text, str) else text or []
        questions = [self.extract_question(prompt) for prompt in texts]
        if len(questions) != pairs:
            raise ValueFault("export.questions_do_not_match_pairs", value=len(questions), expected=pairs)
        if any(IMAGE in question for question in questions):
            raise ValueFault("export.mark_in_question", value=text)
        return questions

    def extract_question(self, text: str) -> str:
        """Extract the question from a prompt that was created by the chat template. Return other texts unchanged."""
        if getattr(self, "chat_template", None) is None:
            return text
        placeholder = "QUESTION"
        content = [{"type": "image"}, {"type": "image"}, {"type": "text", "text": placeholder}]
        turn = {"role": "user", "content": content}
        prompt = self.apply_chat_template([turn], add_generation_prompt=True, tokenize=False)  # type: ignore[attr-defined]
        head, _, tail = prompt.partition(placeholder)
        is_prompt = len(text) > len(head + tail) and text.startswith(head) and text.endswith(tail)
        return text[len(head) : len(text) - len(tail)] if is_prompt else text


def list_pairs(images: Any) -> list[Any]:
    """Return a list of pairs, given either one pair or a list of pairs."""
    items = list(images) if isinstance(images, list | tuple) else []
    is_one_pair = len(items) == 2 and not any(isinstance(item, list | tuple) for item in items)
    pairs = [items] if is_one_pair else items
    if not pairs or not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs):
        description = f"a list of {len(items)}" if items else type(images).__name__
        raise ValueFault("export.images_not_pairs", found=description)
    return pairs


def open_image(image: Any) -> Image.Image:
    """Return an image, path, array or tensor as an RGB image. Images with an EXIF orientation are rotated."""
    if isinstance(image, str | Path):
        return load_image(image)
    if isinstance(image, torch.Tensor):
        if image.dtype != torch.uint8 or image.ndim != 3 or image.shape[0] != 3:
            raise ValueFault("export.other_tensor", kind=str(image.dtype), shape=list(image.shape))
        image = image.permute(1, 2, 0).cpu().numpy()
    if isinstance(image, np.ndarray):
        if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
            raise ValueFault("export.other_array", kind=str(image.dtype), shape=list(image.shape))
        return Image.fromarray(image)
    if not isinstance(image, Image.Image):
        raise ValueFault("export.other_kind_of_image", kind=type(image).__name__)
    return to_rgb(image)
