"""Images and words as BLIP2IDC takes them: one picture of both images, the one before on top, and no question.

The authors resize the image before to the size of the one after (bicubic), stack them, and stretch the stack to the
square of BLIP-2. Here each image is stretched to half of the square by itself and then stacked, so that an image is
prepared once, whatever it is paired with. Where both have one size this is the same picture but for the rows of the
square that the bicubic filter mixes over the seam: two on each side where the images are made smaller, side / height
where they are made larger. Where their sizes differ, the authors resize the one before twice, which blurs it a little.

The prompt is the places of the queries and the token that BLIP-2 begins texts with: the authors' code throws its
question away, and so does this, whatever is asked. A text ends with the end token of the LLM's configuration: with OPT
the line break (50118) that BLIP-2 was pre-trained to end with and its generation stops at, not OPT's </s>.
Pillow is imported where an image is opened: the model and its step need torch, transformers and peft alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoTokenizer, Blip2Processor
from transformers.image_processing_utils import BaseImageProcessor

from m3diff.models.blip2idc.configuration import Blip2IDCConfig

if TYPE_CHECKING:
    from PIL import Image


class Blip2IDCImageProcessor(BaseImageProcessor):
    """Stretch, stack, normalise; read and written as BLIP-2's own.

    Args:
        size: {"height": px, "width": px}, equal and even.
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
        super().__init__()
        side = (size or {}).get("height")
        if side is None or size != {"height": side, "width": side} or side % 2 or not (image_mean and image_std):
            raise ValueError(
                "preprocessor_config.json: size must be a square of an even side, found "
                f"{size}, with image_mean and image_std ({image_mean}, {image_std}); take the file of a BLIP-2"
            )
        self.side = side
        self.image_mean, self.image_std = image_mean, image_std

    def to_dict(self) -> dict[str, Any]:
        """As BLIP-2's processor, which would resize a stacked picture to the same square."""
        return {
            "image_processor_type": "BlipImageProcessor",
            "do_convert_rgb": True,
            "do_resize": True,
            "size": {"height": self.side, "width": self.side},
            "resample": 3,  # bicubic
            "do_rescale": True,
            "rescale_factor": 1 / 255,
            "do_normalize": True,
            "image_mean": list(self.image_mean),
            "image_std": list(self.image_std),
        }

    def prepare_image(self, image: Image.Image) -> np.ndarray:
        """One image as half of the square: [side / 2, side, 3] uint8."""
        from PIL import Image

        return np.asarray(image.convert("RGB").resize((self.side, self.side // 2), Image.Resampling.BICUBIC))

    def to_pixels(self, pictures: Tensor) -> Tensor:
        """[B, side, side, 3] uint8 to [B, 3, side, side] float32, on the device where they are."""
        mean, std = (
            (255 * torch.tensor(values, dtype=torch.float32)[:, None, None]).to(pictures.device, non_blocking=True)
            for values in (self.image_mean, self.image_std)
        )
        return pictures.movedim(-1, -3).to(torch.float32, memory_format=torch.contiguous_format).sub_(mean).div_(std)


class Blip2IDCProcessor:
    """Pairs of images to model inputs, texts to tokens and back (`m3diff.models.family.PairProcessor`)."""

    def __init__(self, image_processor: Blip2IDCImageProcessor, tokenizer: Any, config: Blip2IDCConfig) -> None:
        self.image_processor, self.tokenizer = image_processor, tokenizer
        self.queries = config.num_query_tokens
        self.start_id = first_of(config.text_config.bos_token_id, tokenizer.bos_token_id)
        self.end_id = first_of(config.text_config.eos_token_id, tokenizer.eos_token_id)
        image_id = config.image_token_index
        if image_id is None:
            raise ValueError(
                "the configuration has no image_token_index: a release from before <image>; take a later one"
            )
        self.prompt = (image_id,) * self.queries + (self.start_id,)

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> Blip2IDCProcessor:
        """Load from a BLIP-2 directory, or one that was trained."""
        path = str(folder)
        tokenizer = AutoTokenizer.from_pretrained(path)
        return cls(Blip2IDCImageProcessor.from_pretrained(path), tokenizer, Blip2IDCConfig.on_base(path))

    def save_pretrained(self, folder: str | Path) -> None:
        """Written as BLIP-2's processor, which transformers loads by itself."""
        Blip2Processor(self.image_processor, self.tokenizer, num_query_tokens=self.queries).save_pretrained(folder)

    @property
    def pad_id(self) -> int:
        return self.tokenizer.pad_token_id

    def encode_prompt(self, question: str) -> tuple[int, ...]:
        """The same for every question: the places of the queries and the start token."""
        return self.prompt

    def encode_reference(self, text: str) -> list[int]:
        """Token ids of a reference with its end token: what the loss is taken on."""
        return [*self.tokenizer(text, add_special_tokens=False)["input_ids"], self.end_id]

    def prepare_image(self, image: Image.Image) -> np.ndarray:
        """One image as [side / 2, side, 3] uint8."""
        return self.image_processor.prepare_image(image)

    def image_inputs(self, prepared: Tensor) -> dict[str, Tensor]:
        """`pixel_values` of B pairs of prepared images, uint8 [2 B, side / 2, side, 3], on the device where they are:
        [B, 3, side, side], before on top."""
        return {"pixel_values": self.image_processor.to_pixels(prepared.unflatten(0, (-1, 2)).flatten(1, 2))}

    def prompt_inputs(self, questions: list[str]) -> dict[str, Tensor]:
        """`input_ids` and `attention_mask` of the prompts, [B, tokens]; all alike, so none is padded."""
        ids = torch.tensor([self.encode_prompt(question) for question in questions])
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def decode(self, tokens: Tensor) -> list[str]:
        """The texts of generated token ids [B, tokens], without special tokens and outer blanks."""
        return [text.strip() for text in self.tokenizer.batch_decode(tokens, skip_special_tokens=True)]


def first_of(configured: int | list[int] | None, tokenizers: int | None) -> int:
    """The token of the LLM's configuration, the first of several; else the tokenizer's. Raises ValueError where neither
    names one."""
    if isinstance(configured, list):
        configured = configured[0]
    found = tokenizers if configured is None else configured
    if found is None:
        raise ValueError("neither the LLM's configuration nor the tokenizer names a start and an end token")
    return found
