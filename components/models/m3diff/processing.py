"""Images and words as M3Diff takes them: the multi-image path of LLaVA-OneVision and nothing else.

Every image is padded to a square with the mean colour and resized bicubically to the vision encoder's size, one crop,
no anyres (LLaVA-OneVision, multi-image training). The text is the tokenizer's own chat template.
Pillow is imported where an image is opened: the model and its step need torch, transformers and peft alone.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, AutoImageProcessor, AutoProcessor, AutoTokenizer, ProcessorMixin
from transformers.image_processing_utils import BaseImageProcessor, BatchFeature
from transformers.utils import is_vision_available

from m3diff.models.m3diff.configuration import M3DiffConfig

if TYPE_CHECKING:
    from PIL import Image


IMAGE = "<image>"
"""The place of an image in a prompt."""


class M3DiffImageProcessor(BaseImageProcessor):
    """Pad to a square, resize, normalise.

    Args:
        size: {"height": px, "width": px}, equal, or {"shortest_edge": px}.
        image_mean, image_std: per RGB channel, in [0, 1].
    """

    model_input_names = ["pixel_values"]

    def __init__(
        self,
        size: dict[str, int] | None = None,
        image_mean: list[float] | None = None,
        image_std: list[float] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**{key: value for key, value in kwargs.items() if key == "processor_class"})
        size = size or {"height": 384, "width": 384}
        self.side = size.get("height") or size["shortest_edge"]
        self.size = {"height": self.side, "width": self.side}
        self.image_mean = image_mean or [0.5, 0.5, 0.5]
        self.image_std = image_std or [0.5, 0.5, 0.5]

    def to_dict(self) -> dict[str, Any]:
        return {
            "image_processor_type": type(self).__name__,
            "size": self.size,
            "image_mean": list(self.image_mean),
            "image_std": list(self.image_std),
        }

    def prepare_image(self, image: Image.Image) -> np.ndarray:
        """One image as [side, side, 3] uint8."""
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

    def to_pixels(self, prepared: Tensor) -> Tensor:
        """[..., side, side, 3] uint8 to [..., 3, side, side] float32, on the device where they are."""
        mean, std = (
            (255 * torch.tensor(values, dtype=torch.float32)[:, None, None]).to(prepared.device, non_blocking=True)
            for values in (self.image_mean, self.image_std)
        )
        return prepared.movedim(-1, -3).to(torch.float32, memory_format=torch.contiguous_format).sub_(mean).div_(std)

    def preprocess(self, images: list[Image.Image], **kwargs: Any) -> BatchFeature:
        return BatchFeature({"pixel_values": self.to_pixels(_stacked([self.prepare_image(image) for image in images]))})


class M3DiffProcessor(ProcessorMixin):
    """Pairs of images and questions to model inputs.

    Attributes:
        num_image_tokens: patches of one image; each image takes one token more, its newline.
    """

    def __init__(
        self,
        image_processor: M3DiffImageProcessor | None = None,
        tokenizer: Any = None,
        num_image_tokens: int | None = None,
        chat_template: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(image_processor, tokenizer, chat_template=chat_template)
        self.num_image_tokens = num_image_tokens
        end = _end_id(tokenizer)
        if end is None or tokenizer.convert_tokens_to_ids(IMAGE) is None:
            raise ValueError("the tokenizer has no end token or no <image>: not LLaVA's")
        self.end_id = end

    @classmethod
    def from_pretrained(  # type: ignore[override]  # local directories alone
        cls, pretrained_model_name_or_path: str | Path, **kwargs: Any
    ) -> M3DiffProcessor:
        """Load from an M3Diff or a LLaVA-OneVision directory; the number of image tokens follows from its vision
        encoder."""
        path = str(pretrained_model_name_or_path)
        encoder = AutoConfig.from_pretrained(path).vision_config
        tokenizer = AutoTokenizer.from_pretrained(path)
        processor = cls(
            M3DiffImageProcessor.from_pretrained(path),
            tokenizer,
            num_image_tokens=(encoder.image_size // encoder.patch_size) ** 2,
            chat_template=chat_template_of(path) or tokenizer.chat_template,
        )
        processor.encode_prompt = lru_cache(maxsize=4096)(processor.encode_prompt)  # type: ignore[method-assign]
        return processor

    def encode_prompt(self, question: str, images: int = 2) -> tuple[int, ...]:
        """Token ids of the chat prompt up to the assistant's turn, images first, their placeholders expanded. Raises
        ValueError where the question has a placeholder of its own."""
        if IMAGE in question:
            raise ValueError(f"the question has {IMAGE}, the mark of an image's place in a prompt: write it without")
        content: list[Any] = [{"type": "image"}] * images + [{"type": "text", "text": question}]
        turn: dict[str, Any] = {"role": "user", "content": content}
        text = self.apply_chat_template([turn], add_generation_prompt=True, tokenize=False)
        return tuple(self.tokenizer(self.expanded(text), add_special_tokens=False)["input_ids"])

    def expanded(self, text: str) -> str:
        """The text of a prompt with the places of the images: of each its patches and its newline."""
        assert self.num_image_tokens is not None, "a processor without num_image_tokens encodes no prompt"
        return text.replace(IMAGE, IMAGE * (self.num_image_tokens + 1))

    def encode_reference(self, text: str) -> list[int]:
        """Token ids of a reference with its end token: what the loss is taken on."""
        return [*self.tokenizer(text, add_special_tokens=False)["input_ids"], self.end_id]

    @property
    def pad_id(self) -> int:
        return self.tokenizer.pad_token_id

    def prepare_image(self, image: Image.Image) -> np.ndarray:
        """One image as [side, side, 3] uint8."""
        return self.image_processor.prepare_image(image)

    def image_inputs(self, prepared: Tensor) -> dict[str, Tensor]:
        """Model inputs of B pairs of prepared images, uint8 [2 B, side, side, 3], on the device where they are."""
        return {
            "pixel_values": self.image_processor.to_pixels(prepared),
            "batch_num_images": torch.full((len(prepared) // 2,), 2),  # read on the CPU, so it stays there
        }

    def prompt_inputs(self, questions: list[str]) -> dict[str, Tensor]:
        """`input_ids` and `attention_mask` of the prompts, [B, tokens], left-padded."""
        prompts = [list(self.encode_prompt(question)) for question in questions]
        text = self.tokenizer.pad({"input_ids": prompts}, padding=True, padding_side="left", return_tensors="pt")
        return {"input_ids": text["input_ids"], "attention_mask": text["attention_mask"]}

    def decode(self, tokens: Tensor) -> list[str]:  # type: ignore[override]  # a batch, as the protocol has it
        """The texts of generated token ids [B, tokens], without special tokens and outer blanks."""
        return [text.strip() for text in self.tokenizer.batch_decode(tokens, skip_special_tokens=True)]

    def __call__(self, pairs: list[tuple[Image.Image, Image.Image]], questions: list[str]) -> dict[str, Any]:
        """Left-padded inputs of `generate` for P pairs: pixel_values is [2 P, 3, side, side]."""
        assert len(pairs) == len(questions), f"{len(pairs)} pairs but {len(questions)} questions"
        prepared = _stacked([self.prepare_image(image) for pair in pairs for image in pair])
        return {
            **self.prompt_inputs(questions),
            "image_sizes": torch.full((2 * len(pairs), 2), self.image_processor.side),
            **self.image_inputs(prepared),
        }


def _end_id(tokenizer: Any) -> int | None:
    """Of Qwen2's chat <|im_end|>, of another tokenizer its end of a sequence."""
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    return tokenizer.eos_token_id if end in (None, tokenizer.unk_token_id) else end


def _stacked(prepared: list[np.ndarray]) -> Tensor:
    return torch.from_numpy(np.stack(prepared))


def chat_template_of(path: str) -> str | None:
    """The processor's template: a file of its own, or, in the first release's layout, one of JSON."""
    own, first = Path(path) / "chat_template.jinja", Path(path) / "chat_template.json"
    if own.is_file():
        return own.read_text(encoding="utf-8")
    return json.loads(first.read_text(encoding="utf-8"))["chat_template"] if first.is_file() else None


if is_vision_available():
    AutoImageProcessor.register(M3DiffConfig, slow_image_processor_class=M3DiffImageProcessor)
AutoProcessor.register(M3DiffConfig, M3DiffProcessor)
