"""Images and words as models take them: what all processors of pairs share, and those of LLaVA's families.

LLaVA's multi-image path and nothing else: every image is padded to a square with the mean colour and resized
bicubically to the vision encoder's size, one crop, no anyres. The text is the folder's own chat template.
Pillow is imported where an image is opened: the model and its step need torch, transformers and peft alone.
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

if TYPE_CHECKING:
    from PIL import Image


IMAGE = "<image>"  # the place of an image in a prompt

HALF = (0.5, 0.5, 0.5)


class NormalisedImages(BaseImageProcessor):
    """Base of image processors: normalises prepared images with `image_mean` and `image_std`, per channel in [0, 1]."""

    model_input_names = ["pixel_values"]
    image_mean: list[float]
    image_std: list[float]

    def to_pixels(self, prepared: Tensor) -> Tensor:
        """[..., rows, columns, 3] uint8 to [..., 3, rows, columns] float32, on the device where they are."""
        mean, std = (
            (255 * torch.tensor(values, dtype=torch.float32)[:, None, None]).to(prepared.device, non_blocking=True)
            for values in (self.image_mean, self.image_std)
        )
        return prepared.movedim(-1, -3).to(torch.float32, memory_format=torch.contiguous_format).sub_(mean).div_(std)


class PairProcessor:
    """Base of processors: pairs of images and texts to what the model takes, and back."""

    tokenizer: Any
    image_processor: Any
    end_id: int
    save_pretrained: Any  # to a folder

    def encode_prompt(self, question: str) -> tuple[int, ...]:
        """Token ids of the prompt up to where the answer starts, with the places of the images."""
        raise NotImplementedError

    def image_inputs(self, prepared: Tensor) -> dict[str, Tensor]:
        """Model inputs of prepared images, uint8 [2 B, rows, columns, 3]: before, after, before, after, ... On a GPU
        where the images are; normalising is done there."""
        raise NotImplementedError

    def encode_reference(self, text: str) -> list[int]:
        """Token ids of a reference with its end token: what the loss is taken on."""
        return [*self.tokenizer(text, add_special_tokens=False)["input_ids"], self.end_id]

    @property
    def pad_id(self) -> int:
        return self.tokenizer.pad_token_id

    def prepare_image(self, image: Image.Image) -> np.ndarray:
        """The image as uint8 [rows, columns, 3], of the same shape whatever its size."""
        return self.image_processor.prepare_image(image)

    def prompt_inputs(self, questions: list[str]) -> dict[str, Tensor]:
        """`input_ids` and `attention_mask` of the prompts, [B, tokens], left-padded."""
        prompts = [list(self.encode_prompt(question)) for question in questions]
        text = self.tokenizer.pad({"input_ids": prompts}, padding=True, padding_side="left", return_tensors="pt")
        return {"input_ids": text["input_ids"], "attention_mask": text["attention_mask"]}

    def decode(self, tokens: Tensor) -> list[str]:
        """The texts of generated token ids [B, tokens], without special tokens and outer blanks."""
        return [text.strip() for text in self.tokenizer.batch_decode(tokens, skip_special_tokens=True)]


class M3DiffImageProcessor(NormalisedImages):
    """Pad to a square, resize, normalise.

    Args:
        size: {"height": px, "width": px}, equal, or {"shortest_edge": px}.
        image_mean, image_std: per RGB channel, in [0, 1].
    """

    def __init__(
        self, size: dict[str, int], image_mean: Sequence[float] = HALF, image_std: Sequence[float] = HALF, **kwargs: Any
    ) -> None:
        super().__init__(**{key: value for key, value in kwargs.items() if key == "processor_class"})
        self.side = size.get("height") or size["shortest_edge"]
        self.size = {"height": self.side, "width": self.side}
        self.image_mean, self.image_std = list(image_mean), list(image_std)

    def to_dict(self) -> dict[str, Any]:
        return {
            "image_processor_type": type(self).__name__,
            "size": self.size,
            "image_mean": self.image_mean,
            "image_std": self.image_std,
        }

    def prepare_image(self, image: Image.Image) -> np.ndarray:
        """The image as [side, side, 3] uint8."""
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
        prepared = torch.from_numpy(np.stack([self.prepare_image(image) for image in images]))
        return BatchFeature({"pixel_values": self.to_pixels(prepared)})


class M3DiffProcessor(PairProcessor, ProcessorMixin):  # type: ignore[misc]  # decodes a batch
    """Pairs of images and questions to model inputs.

    Attributes:
        num_image_tokens: patches of one image.
        places: tokens in the place of each image of a pair; by default its patches and newline.
        begin_ids: what the tokenizer puts before a text: LLaVA-1.5's <s>, nothing of Qwen2.
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
        end = tokenizer.convert_tokens_to_ids("<|im_end|>")  # of Qwen2's chat
        end = tokenizer.eos_token_id if end in (None, tokenizer.unk_token_id) else end
        if end is None or tokenizer.convert_tokens_to_ids(IMAGE) is None:
            raise ValueError("the tokenizer has no end token or no <image>: not LLaVA's")
        self.end_id = end

    @classmethod
    def of_folder(cls, folder: str, config: Any) -> M3DiffProcessor:
        """Load from the folder of a trained model or of a LLaVA; the places of images follow from its `config`."""
        tokenizer = AutoTokenizer.from_pretrained(folder)
        template = chat_template_of(Path(folder)) or tokenizer.chat_template
        images = M3DiffImageProcessor.from_pretrained(folder)
        processor = cls(images, tokenizer, num_image_tokens=config.patches, chat_template=template)
        processor.places = config.places()
        processor.begin_ids = tuple(tokenizer("")["input_ids"])
        processor.encode_prompt = lru_cache(maxsize=4096)(processor.encode_prompt)  # type: ignore[method-assign]
        return processor

    def encode_prompt(self, question: str, images: int = 2) -> tuple[int, ...]:
        """Token ids of the chat prompt up to the assistant's turn, images first, their placeholders expanded. Raises
        ValueError where the question has a placeholder of its own."""
        places = self.places[:images] or (self.num_image_tokens + 1,) * images  # patches and newline
        if IMAGE in question:
            raise ValueError(f"the question has {IMAGE}, the mark of an image's place in a prompt: write it without")
        content: list[Any] = [{"type": "image"}] * images + [{"type": "text", "text": question}]
        turn: dict[str, Any] = {"role": "user", "content": content}
        text = self.apply_chat_template([turn], add_generation_prompt=True, tokenize=False)
        head, *rest = text.split(IMAGE)
        for count, after in zip(places, rest, strict=True):
            head += IMAGE * count + after
        return self.begin_ids + tuple(self.tokenizer(head, add_special_tokens=False)["input_ids"])

    def image_inputs(self, prepared: Tensor) -> dict[str, Tensor]:
        """Model inputs of B pairs of prepared images, uint8 [2 B, side, side, 3], on the device where they are."""
        return {
            "pixel_values": self.image_processor.to_pixels(prepared),
            "batch_num_images": torch.full((len(prepared) // 2,), 2),  # read on the CPU, so it stays there
        }


class OneDiffProcessor(M3DiffProcessor):
    """The same, by the name that files of OneDiff bear."""


def chat_template_of(folder: Path) -> str | None:
    """The processor's template: a file of its own, or, in the first release's layout, one of JSON."""
    own, first = folder / "chat_template.jinja", folder / "chat_template.json"
    if own.is_file():
        return own.read_text(encoding="utf-8")
    return json.loads(first.read_text(encoding="utf-8"))["chat_template"] if first.is_file() else None
