"""Convert images and texts into model inputs: base classes for all processors, and the processor of LLaVA's families.

Only LLaVA's multi-image mode is used. Every image is padded to a square with the mean colour and resized to the vision
encoder's size (bicubic), as a single crop without anyres. Texts use the chat template in the model's folder. Pillow is
imported only where an image is opened, because a model and its training step need only torch, transformers and peft.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from torch import Tensor
from transformers import AutoTokenizer, ProcessorMixin
from transformers.image_processing_utils import BaseImageProcessor, BatchFeature

from m3diff.models.prepared import Prepared
from m3diff.records.errors import DataError, ValueFault
from m3diff.records.sample import Turn

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


class TextProcessor:
    """The part of a processor that most families share: prepared images, answers and generated tokens."""

    tokenizer: Any
    image_processor: Any
    end_id: int
    places_images = False  # the chat templates of LLaVA move all images to the front

    @property
    def pad_id(self) -> int:
        """Id of the padding token."""
        return self.tokenizer.pad_token_id

    def encode_answer(self, text: str) -> list[int]:
        """Return the token ids of an answer, including the end token."""
        return [*self.tokenizer(text, add_special_tokens=False)["input_ids"], self.end_id]

    def token_types(self, input_ids: Tensor) -> dict[str, Tensor]:
        """Return no argument, because the models take none with one value per token besides the ids."""
        return {}

    def decode(self, tokens: Tensor) -> list[str]:
        """Decode generated token ids, [B, tokens], into texts without special tokens and surrounding whitespace."""
        return [text.strip() for text in self.tokenizer.batch_decode(tokens, skip_special_tokens=True)]

    def marks(self, images: int) -> tuple[str, ...]:
        """Return the marks of an image set with this number of images."""
        raise NotImplementedError

    def prepare(self, images: Iterable[Image.Image]) -> Prepared:
        """Prepare the images of one image set, each by itself, and return them as `pixels`.

        Their shape, [images, rows, columns, 3] uint8, does not depend on the sizes of the images.
        """
        prepared_images = [self.image_processor.prepare_image(image) for image in images]
        marks = self.marks(len(prepared_images))
        return Prepared({"pixels": torch.from_numpy(np.stack(prepared_images))} if marks else {}, marks)


def pad_prompts(prompts: Sequence[Sequence[int]], pad_id: int) -> dict[str, Tensor]:
    """Return `input_ids` and `attention_mask` of prompts, [B, tokens], padded on the left."""
    length = max(len(prompt) for prompt in prompts)
    ids = torch.full((len(prompts), length), pad_id)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, length - len(prompt) :] = torch.tensor(prompt)
        mask[row, length - len(prompt) :] = 1
    return {"input_ids": ids, "attention_mask": mask}


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

        if image.mode != "RGB":
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


class M3DiffProcessor(TextProcessor, ProcessorMixin):  # type: ignore[misc]  # `decode` takes a batch
    """Converts images and dialogues into model inputs.

    Attributes:
        num_image_tokens: number of patches per image.
        tokens_per_image: number of placeholder tokens for an image that is not in a pair. None for one token per patch
            and one newline token.
        pair_tokens: number of placeholder tokens for each image of a pair. If empty, an image has as many tokens in a
            pair as alone.
        begin_ids: ids of the tokens that the tokenizer puts before a text: <s> for LLaVA-1.5, none for Qwen2.
    """

    tokens_per_image: int | None = None
    pair_tokens: tuple[int, ...] = ()
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
    def of_folder(cls, folder: str, config: Any) -> Self:
        """Load the processor from the folder of a trained model or a LLaVA base.

        Args:
            folder: the folder.
            config: configuration of the model, which determines the number of visual tokens.
        """
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        template = chat_template_of(Path(folder)) or tokenizer.chat_template
        images = M3DiffImageProcessor.from_pretrained(folder, trust_remote_code=False)
        processor = cls(images, tokenizer, num_image_tokens=config.patches, chat_template=template)
        processor.tokens_per_image = config.patches + config.newline
        processor.pair_tokens = config.visual_token_counts()
        processor.begin_ids = tuple(tokenizer("")["input_ids"])
        return processor

    def blank_pair(self) -> Prepared:
        """Return a prepared pair of black images."""
        side = self.image_processor.side
        return Prepared({"pixels": torch.zeros(2, side, side, 3, dtype=torch.uint8)}, self.marks(2))

    def marks(self, images: int) -> tuple[str, ...]:
        """Return, for each image of an image set, one placeholder per visual token."""
        tokens_per_image = self.tokens_per_image
        if tokens_per_image is None:
            tokens_per_image = self.num_image_tokens + 1  # patches and newline
        counts = (tokens_per_image,) * images
        if self.pair_tokens and images == len(self.pair_tokens):
            counts = self.pair_tokens
        return tuple(IMAGE * count for count in counts)

    def encode_prompt(self, turns: Sequence[Turn], marks: Sequence[str]) -> tuple[int, ...]:
        """Return the token ids of the chat prompt up to the assistant's last turn. The images come first.

        Raises:
            ValueFault: a text contains the text of the placeholder.
        """
        messages: list[dict[str, Any]] = []
        for turn in turns:
            if IMAGE in turn.question + turn.answer:
                raise ValueFault("models.question_with_image_mark", value=IMAGE)
            images = [] if messages else [{"type": "image"}] * len(marks)
            messages.append({"role": "user", "content": [*images, {"type": "text", "text": turn.question}]})
            messages.append({"role": "assistant", "content": [{"type": "text", "text": turn.answer}]})
        text = self.apply_chat_template(messages[:-1], add_generation_prompt=True, tokenize=False)
        prompt, *following_texts = text.split(IMAGE)
        for mark, following_text in zip(marks, following_texts, strict=True):
            prompt += mark + following_text
        return self.begin_ids + tuple(self.tokenizer(prompt, add_special_tokens=False)["input_ids"])

    def collate(self, prepared: Sequence[Prepared]) -> dict[str, Tensor]:
        """Combine the images of B image sets.

        Returns:
            `pixels`, [images, side, side, 3] uint8, and `batch_num_images`, the number of images of each image set,
            [B]. Empty if there are no images.
        """
        pixels = [images.tensors["pixels"] for images in prepared if images.marks]
        if not pixels:
            return {}
        counts = [len(images.marks) for images in prepared]
        return {"pixels": torch.cat(pixels), "batch_num_images": torch.tensor(counts)}

    def image_inputs(self, images: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
        """Return `pixel_values`, [images, 3, side, side], normalised on the device, and `batch_num_images`."""
        if not images:
            return {}
        return {
            "pixel_values": self.image_processor.to_pixels(images["pixels"].to(device, non_blocking=True)),
            # on the CPU, because the model and transformers read the values
            "batch_num_images": images["batch_num_images"],
        }


class OneDiffProcessor(M3DiffProcessor):
    """An `M3DiffProcessor` under the class name that OneDiff's checkpoints contain."""


def chat_template_of(folder: Path) -> str | None:
    """Read the chat template from chat_template.jinja, or from chat_template.json as in LLaVA's first releases.

    Returns None if the folder has neither file.
    """
    template_file = folder / "chat_template.jinja"
    json_file = folder / "chat_template.json"
    if template_file.is_file():
        return template_file.read_text(encoding="utf-8")
    return json.loads(json_file.read_text(encoding="utf-8"))["chat_template"] if json_file.is_file() else None
