"""M3Diff's processor as others call it: `processor(images=[before, after], text=question, return_tensors="pt")`."""

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from transformers.image_processing_utils import BatchFeature

from components.images import open_image, to_rgb
from components.models.m3diff.processing import M3DiffImageProcessor, M3DiffProcessor

AUTO_MAP = {"AutoProcessor": "processing_m3diff.ImagePairProcessor"}
IMAGE_AUTO_MAP = {"AutoImageProcessor": f"processing_m3diff.{M3DiffImageProcessor.__name__}"}


class ImagePairProcessor(M3DiffProcessor):
    """Pairs of images and questions to what `generate` takes.

    Attributes:
        question: what is asked of a pair where nothing else is.
    """

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

    def to_dict(self) -> dict[str, Any]:
        """As processor_config.json has it: with the way to this file."""
        fields = super().to_dict()
        image_processor = {**fields["image_processor"], "auto_map": IMAGE_AUTO_MAP}
        return {**fields, "image_processor": image_processor, "auto_map": AUTO_MAP}

    def __call__(  # type: ignore[override]
        self, images: Any, text: str | list[str] | None = None, return_tensors: str = "pt"
    ) -> BatchFeature:
        """Inputs of `generate` for P pairs.

        Args:
            images: one pair [before, after], or a list of pairs; each image a PIL image, a path, or an array
                [height, width, 3] of uint8. They are turned as their EXIF says; what is transparent is white.
            text: the question, or one for each pair; by default the processor's own. The chat template and the images'
                places are added to it.
        Returns: input_ids and attention_mask [P, tokens], left-padded; pixel_values [2 P, 3, side, side]; image_sizes
            [2 P, 2]; batch_num_images [P].

        Raises:
            ValueError: names the argument, what was found and what is meant.
        """
        if return_tensors != "pt":
            raise ValueError(f"return_tensors: {return_tensors!r}; the model takes PyTorch tensors: 'pt'")
        pairs = _as_pairs(images)
        opened = [(_opened(before), _opened(after)) for before, after in pairs]
        return BatchFeature(super().__call__(opened, self._questions(text, len(pairs))))

    def _questions(self, text: str | list[str] | None, pairs: int) -> list[str]:
        """One for each pair; a question with a special token would be read as more images, or as another turn."""
        questions = _as_questions(text, pairs, self.question)
        special = [str(token) for token in self.tokenizer.all_special_tokens]
        for question in questions:
            if found := [token for token in special if token in question]:
                raise ValueError(f"text: the question alone, without special tokens; found {found[0]} in {question!r}")
        return questions


def _as_pairs(images: Any) -> list[Any]:
    """One pair, or a list of pairs, as a list of pairs."""
    found = list(images) if isinstance(images, list | tuple) else []
    pairs = [found] if len(found) == 2 and not any(isinstance(image, list | tuple) for image in found) else found
    if not pairs or not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs):
        told = f"a list of {len(found)}" if found else type(images).__name__
        raise ValueError(f"images: one pair [before, after] or a list of such pairs; found {told}")
    return pairs


def _as_questions(text: str | list[str] | None, pairs: int, default: str | None) -> list[str]:
    asked = default if text is None else text
    questions = [asked] * pairs if isinstance(asked, str) else list(asked or [])
    if len(questions) != pairs:
        raise ValueError(f"text: one question, or one for each pair; found {len(questions)} for {pairs} pairs")
    return questions


def _opened(image: Any) -> Image.Image:
    """One image in RGB, upright."""
    if isinstance(image, str | Path):
        with open_image(Path(image).read_bytes()) as file:
            return to_rgb(file)
    if isinstance(image, np.ndarray):
        if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
            raise ValueError(f"images: an array is uint8 [height, width, 3]; found {image.dtype} {list(image.shape)}")
        return Image.fromarray(image)
    if not isinstance(image, Image.Image):
        raise ValueError(f"images: a PIL image, a path or an array of uint8; found {type(image).__name__}")
    return to_rgb(image)
