"""Convert images and texts into model inputs: base classes for all processors, and the processor of LLaVA's families.

Only LLaVA's multi-image mode is used. Every image is padded to a square with the mean colour and resized to the vision
encoder's size (bicubic), as a single crop without anyres. Texts use the chat template in the model's folder. Pillow is
imported only where an image is opened, because a model and its training step need only torch, transformers and peft.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoTokenizer, ProcessorMixin
from transformers.image_processing_utils import BaseImageProcessor, BatchFeature

from m3diff.records.errors import DataError, ValueFault

if TYPE_CHECKING:
    from PIL import Image


IMAGE = "<image>"  # marks the position of an image in a prompt

HALF = (0.5, 0.5, 0.5)


class NormalisedImages(BaseImageProcessor):
    """Base class of image processors, which prepare images (as uint8 arrays of a fixed size) and normalise them.

    Attributes:
        image_mean: mean of each channel, in [0, 1].
        image_std: standard deviation of each channel, in [0, 1].
    """

    model_input_names = ["pixel_values"]
    image_mean: list[float]
    image_std: list[float]

    def to_pixels(self, prepared: Tensor) -> Tensor:
        """Normalise images, [..., rows, columns, 3] uint8, to [..., 3, rows, columns] float32 on the same device."""
        mean, std = (
            (255 * torch.tensor(values, dtype=torch.float32)[:, None, None]).to(prepared.device, non_blocking=True)
            for values in (self.image_mean, self.image_std)
        )
        return prepared.movedim(-1, -3).to(torch.float32, memory_format=torch.contiguous_format).sub_(mean).div_(std)


class PairProcessor:
    """Base class of processors. Converts image pairs and texts into model inputs, and generated tokens into texts."""

    tokenizer: Any
    image_processor: Any
    end_id: int
    save_pretrained: Any  # function that writes the processor to a folder

    def encode_prompt(self, question: str) -> tuple[int, ...]:
        """Return the token ids of the prompt up to the answer, with placeholders for the visual tokens."""
        raise NotImplementedError

    def image_inputs(self, prepared: Tensor) -> dict[str, Tensor]:
        """Normalise prepared images and return the model inputs, on the same device as the images.

        Args:
            prepared: uint8 [2 B, rows, columns, 3], ordered before, after, before, after, ...
        """
        raise NotImplementedError

    def encode_reference(self, text: str) -> list[int]:
        """Return the token ids of a reference caption and the end token. The loss is computed on these tokens."""
        return [*self.tokenizer(text, add_special_tokens=False)["input_ids"], self.end_id]

    @property
    def pad_id(self) -> int:
        """Id of the padding token."""
        return self.tokenizer.pad_token_id

    def prepare_image(self, image: Image.Image) -> np.ndarray:
        """Prepare an image as uint8 [rows, columns, 3]. The shape does not depend on the size of the image."""
        return self.image_processor.prepare_image(image)

    def prompt_inputs(self, questions: list[str]) -> dict[str, Tensor]:
        """Return `input_ids` and `attention_mask` of the prompts, [B, tokens], left-padded."""
        prompts = [list(self.encode_prompt(question)) for question in questions]
        text = self.tokenizer.pad({"input_ids": prompts}, padding=True, padding_side="left", return_tensors="pt")
        return {"input_ids": text["input_ids"], "attention_mask": text["attention_mask"]}

    def decode(self, tokens: Tensor) -> list[str]:
        """Decode generated token ids, [B, tokens], into texts without special tokens and surrounding whitespace."""
        return [text.strip() for text in self.tokenizer.batch_decode(tokens, skip_special_tokens=True)]


class M3DiffImageProcessor(NormalisedImages):
    """Pads images to a square, resizes and normalises them.

    Args:
        size: {"height": px, "width": px} with equal values, or {"shortest_edge": px}.
        image_mean: mean of each RGB channel, in [0, 1].
        image_std: standard deviation of each RGB channel, in [0, 1].
    """

    def __init__(
        self, size: dict[str, int], image_mean: Sequence[float] = HALF, image_std: Sequence[float] = HALF, **kwargs: Any
    ) -> None:
        super().__init__(**{key: value for key, value in kwargs.items() if key == "processor_class"})
        self.side = size.get("height") or size["shortest_edge"]
        self.size = {"height": self.side, "width": self.side}
        self.image_mean = list(image_mean)
        self.image_std = list(image_std)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields that transformers saves for this image processor."""
        return {
            "image_processor_type": type(self).__name__,
            "size": self.size,
            "image_mean": self.image_mean,
            "image_std": self.image_std,
        }

    def prepare_image(self, image: Image.Image) -> np.ndarray:
        """Pad and resize an image, and return it as uint8 [side, side, 3]."""
        from PIL import Image

        image = image.convert("RGB")
        longest = max(image.size)
        if image.width != image.height:
            ground = Image.new("RGB", (longest, longest), tuple(int(mean * 255) for mean in self.image_mean))
            ground.paste(image, ((longest - image.width) // 2, (longest - image.height) // 2))
            image = ground
        if longest != self.side:
            image = image.resize((self.side, self.side), Image.Resampling.BICUBIC)
        return np.asarray(image)

    def preprocess(self, images: list[Image.Image], **kwargs: Any) -> BatchFeature:
        """Prepare and normalise images, and return them as `pixel_values`, float32 [images, 3, side, side]."""
        prepared = torch.from_numpy(np.stack([self.prepare_image(image) for image in images]))
        return BatchFeature({"pixel_values": self.to_pixels(prepared)})


class M3DiffProcessor(PairProcessor, ProcessorMixin):  # type: ignore[misc]  # `decode` takes a batch
    """Converts image pairs and questions into model inputs.

    Attributes:
        num_image_tokens: number of patches per image.
        places: number of placeholder tokens for the image before and for the image after. If empty, each image has one
            token per patch and one newline token.
        begin_ids: ids of the tokens that the tokenizer puts before a text: <s> for LLaVA-1.5, none for Qwen2.
    """

    places: tuple[int, ...] = ()
    begin_ids: tuple[int, ...] = ()

    def __init__(
        self,
        image_processor: M3DiffImageProcessor | None = None,
        tokenizer: Any = None,
        num_image_tokens: int | None = None,
        chat_template: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(image_processor, tokenizer, chat_template=chat_template)
        self.num_image_tokens: Any = num_image_tokens
        end = tokenizer.convert_tokens_to_ids("<|im_end|>")  # the end token of Qwen2's chats
        end = tokenizer.eos_token_id if end in (None, tokenizer.unk_token_id) else end
        if end is None or tokenizer.convert_tokens_to_ids(IMAGE) is None:
            raise DataError("models.not_a_tokenizer_of_llava", path=tokenizer.name_or_path, value=IMAGE)
        self.end_id = end

    @classmethod
    def of_folder(cls, folder: str, config: Any) -> M3DiffProcessor:
        """Load the processor from the folder of a trained model or a LLaVA base.

        Args:
            folder: the folder.
            config: configuration of the model, which determines the number of visual tokens.
        """
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        template = chat_template_of(Path(folder)) or tokenizer.chat_template
        images = M3DiffImageProcessor.from_pretrained(folder, trust_remote_code=False)
        processor = cls(images, tokenizer, num_image_tokens=config.patches, chat_template=template)
        processor.places = config.visual_token_counts()
        processor.begin_ids = tuple(tokenizer("")["input_ids"])
        processor.encode_prompt = lru_cache(maxsize=4096)(processor.encode_prompt)  # type: ignore[method-assign]
        return processor

    def encode_prompt(self, question: str, images: int = 2) -> tuple[int, ...]:
        """Return the token ids of the chat prompt up to the assistant's turn.

        The images come first, each with one placeholder per visual token.

        Raises:
            ValueFault: the question contains the text of the placeholder.
        """
        places = self.places[:images] or (self.num_image_tokens + 1,) * images  # patches and newline
        if IMAGE in question:
            raise ValueFault("models.question_with_image_mark", value=IMAGE)
        content: list[Any] = [{"type": "image"}] * images + [{"type": "text", "text": question}]
        turn: dict[str, Any] = {"role": "user", "content": content}
        text = self.apply_chat_template([turn], add_generation_prompt=True, tokenize=False)
        head, *rest = text.split(IMAGE)
        for count, after in zip(places, rest, strict=True):
            head += IMAGE * count + after
        return self.begin_ids + tuple(self.tokenizer(head, add_special_tokens=False)["input_ids"])

    def image_inputs(self, prepared: Tensor) -> dict[str, Tensor]:
        """Normalise B pairs of prepared images, uint8 [2 B, side, side, 3], and return the model inputs."""
        return {
            "pixel_values": self.image_processor.to_pixels(prepared),
            # on the CPU, because transformers reads the values
            "batch_num_images": torch.full((len(prepared) // 2,), 2),
        }


class OneDiffProcessor(M3DiffProcessor):
    """An `M3DiffProcessor` under the class name that OneDiff's checkpoints contain."""


def chat_template_of(folder: Path) -> str | None:
    """Read the chat template from chat_template.jinja, or from chat_template.json as in LLaVA's first releases.

    Returns None if the folder has neither file.
    """
    own = folder / "chat_template.jinja"
    first = folder / "chat_template.json"
    if own.is_file():
        return own.read_text(encoding="utf-8")
    return json.loads(first.read_text(encoding="utf-8"))["chat_template"] if first.is_file() else None
