"""Images and words as OneDiff takes them: LLaVA's multi-image path, and places for the delta tokens among the images'.

Every image is padded to a square with the mean colour, as LLaVA-1.5 and LLaVA-OneVision were trained, and resized to
the vision encoder's size. The text is the directory's own chat template.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

from transformers import AutoProcessor, AutoTokenizer

from m3diff.models.m3diff.processing import IMAGE, M3DiffImageProcessor, M3DiffProcessor, chat_template_of
from m3diff.models.onediff.configuration import OneDiffConfig


class OneDiffProcessor(M3DiffProcessor):
    """Pairs of images and questions to model inputs.

    Attributes:
        places: tokens in the places of the image before and of the image after.
        begin_ids: what the tokenizer puts before a text: LLaVA-1.5's <s>, and nothing for Qwen2.
    """

    places: tuple[int, int] = (0, 0)
    begin_ids: tuple[int, ...] = ()

    @classmethod
    def from_pretrained(  # type: ignore[override]  # local directories alone
        cls, pretrained_model_name_or_path: str | Path, config: OneDiffConfig | None = None, **kwargs: Any
    ) -> OneDiffProcessor:
        """Load from an OneDiff, LLaVA-OneVision or LLaVA-1.5 directory.

        Args:
            config: of the model; by default the directory's.
        """
        path = str(pretrained_model_name_or_path)
        config = config or OneDiffConfig.of_checkpoint(path)
        tokenizer = AutoTokenizer.from_pretrained(path)
        processor = cls(
            M3DiffImageProcessor.from_pretrained(path),
            tokenizer,
            num_image_tokens=config.patches,
            chat_template=chat_template_of(path) or tokenizer.chat_template,
        )
        processor.places = config.places()
        processor.begin_ids = tuple(tokenizer("")["input_ids"])
        processor.encode_prompt = lru_cache(maxsize=4096)(processor.encode_prompt)  # type: ignore[method-assign]
        return processor

    def encode_prompt(self, question: str, images: int = 2) -> tuple[int, ...]:
        assert images == 2, f"OneDiff reads pairs, not {images} image(s)"
        return self.begin_ids + super().encode_prompt(question)

    def expanded(self, text: str) -> str:
        """The text of a prompt with the places of the images."""
        head, between, rest = text.split(IMAGE)
        before, after = self.places
        return head + IMAGE * before + between + IMAGE * after + rest


AutoProcessor.register(OneDiffConfig, OneDiffProcessor)
