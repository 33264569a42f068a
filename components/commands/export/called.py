"""Processors as others call them: `processor(images=[before, after], text=question, return_tensors="pt")`."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import ProcessorMixin
from transformers.image_processing_utils import BatchFeature

from m3diff.images.open import load_image, to_rgb
from m3diff.models.processing import IMAGE, PairProcessor

CHANGES_NOTHING = {"padding": (True, "longest"), "padding_side": ("left",), "truncation": (False,)}
CHANGES_NOTHING |= {"add_special_tokens": (False,)}
"""Values of options that others' processors have, which this one keeps to anyway; as does nothing given for any."""


class CalledWithPairs(PairProcessor):
    """Mixin before a family's processor.

    Attributes:
        question: what is asked of a pair where nothing else is.
        family: the family of the model; the file of its processor bears its name.
    """

    question: str | None
    family: str
    decode = ProcessorMixin.decode  # type: ignore[assignment]  # of one text or of several

    def inputs(self, pairs: list[tuple[Image.Image, Image.Image]], questions: list[str]) -> dict[str, Any]:
        """Inputs of `generate` for pairs of RGB images, one question each."""
        prepared = np.stack([self.prepare_image(image) for pair in pairs for image in pair])
        return {**self.prompt_inputs(questions), **self.image_inputs(torch.from_numpy(prepared))}

    def to_dict(self) -> dict[str, Any]:
        """The content of processor_config.json: with the way to the file of this class."""
        fields, file = super().to_dict(), f"processing_{self.family}"  # type: ignore[misc]
        of_images = {"AutoImageProcessor": f"{file}.{type(self.image_processor).__name__}"}
        images = {**fields["image_processor"], "auto_map": of_images}
        return {**fields, "image_processor": images, "auto_map": {"AutoProcessor": f"{file}.{type(self).__name__}"}}

    def __call__(
        self, images: Any, text: str | list[str] | None = None, return_tensors: str = "pt", **options: Any
    ) -> BatchFeature:
        """Inputs of `generate` for P pairs.

        Args:
            images: one pair [before, after], or a list of pairs; each image a PIL image, a path, an array
                [height, width, 3] or a tensor [3, height, width] of uint8. They are turned as their EXIF says; what is
                transparent is white.
            text: the question, or one for each pair; by default the processor's own. What the model reads around it is
                added, or is there already, by `apply_chat_template`.
            options: of other processors, where they change nothing: padding=True, videos=None.
        Returns: input_ids and attention_mask [P, tokens], left-padded; pixel_values, and what else the model takes.

        Raises:
            ValueError: names the argument, what was found and what is meant.
        """
        if return_tensors != "pt":
            raise ValueError(f"return_tensors: {return_tensors!r}; the model takes PyTorch tensors: 'pt'")
        for name, value in options.items():
            if not (value is None or value in ([], {}, *CHANGES_NOTHING.get(name, ()))):
                raise ValueError(f"{name}: {value!r}; leave it out: a processor of pairs of images has no such choice")
        pairs = as_pairs(images)
        opened = [(opened_image(before), opened_image(after)) for before, after in pairs]
        return BatchFeature(self.inputs(opened, self.questions(text, len(pairs))))

    def questions(self, text: str | list[str] | None, pairs: int) -> list[str]:
        """A question for each pair. One with the mark of an image would be read as more images: ValueError."""
        given = self.question if text is None else text
        questions = [self.asked(each) for each in ([given] * pairs if isinstance(given, str) else given or [])]
        if len(questions) != pairs:
            raise ValueError(f"text: one question, or one for each pair; found {len(questions)} for {pairs} pairs")
        if any(IMAGE in question for question in questions):
            raise ValueError(
                "text: the question alone, or what `apply_chat_template` makes of one turn of the user with two images "
                f"and a question, add_generation_prompt=True; found {text!r}"
            )
        return questions

    def asked(self, text: str) -> str:
        """The question of a whole prompt, as the chat template makes it of a pair; any other text as it is."""
        if getattr(self, "chat_template", None) is None:
            return text
        mark = "QUESTION"
        turn = {"role": "user", "content": [*[{"type": "image"}] * 2, {"type": "text", "text": mark}]}
        prompt = self.apply_chat_template([turn], add_generation_prompt=True, tokenize=False)  # type: ignore[attr-defined]
        head, _, tail = prompt.partition(mark)
        whole = len(text) > len(head + tail) and text.startswith(head) and text.endswith(tail)
        return text[len(head) : len(text) - len(tail)] if whole else text


def as_pairs(images: Any) -> list[Any]:
    """A pair, or a list of pairs, as a list of pairs."""
    found = list(images) if isinstance(images, list | tuple) else []
    pairs = [found] if len(found) == 2 and not any(isinstance(image, list | tuple) for image in found) else found
    if not pairs or not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs):
        told = f"a list of {len(found)}" if found else type(images).__name__
        raise ValueError(f"images: one pair [before, after] or a list of such pairs; found {told}")
    return pairs


def opened_image(image: Any) -> Image.Image:
    """The image in RGB, upright."""
    if isinstance(image, str | Path):
        return load_image(image)
    if isinstance(image, torch.Tensor):
        if image.dtype != torch.uint8 or image.ndim != 3 or image.shape[0] != 3:
            raise ValueError(f"images: a tensor is uint8 [3, height, width]; found {image.dtype} {list(image.shape)}")
        image = image.permute(1, 2, 0).cpu().numpy()
    if isinstance(image, np.ndarray):
        if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
            raise ValueError(f"images: an array is uint8 [height, width, 3]; found {image.dtype} {list(image.shape)}")
        return Image.fromarray(image)
    if not isinstance(image, Image.Image):
        raise ValueError(f"images: a PIL image, a path, an array or a tensor of uint8; found {type(image).__name__}")
    return to_rgb(image)
