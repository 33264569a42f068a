"""What the lessons need of an architecture, and which one a recipe is for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from m3diff.stages.pretrain import blip2, llava_onevision
from m3diff.stages.pretrain.params import Pretrain

if TYPE_CHECKING:
    import numpy as np
    from PIL import Image
    from torch import Tensor, nn


class Architecture(Protocol):
    """How a base is made, fed and written."""

    @property
    def pad_id(self) -> int: ...

    def make_model(self) -> nn.Module: ...

    def encoder(self, model: Any) -> nn.Module:
        """The vision encoder in it."""

    def prepare_image(self, image: Image.Image) -> np.ndarray:
        """uint8 pixels, [height, width, 3], that the lessons keep of an image."""

    def images_of_a_picture(self, step: int) -> int:
        """How many images one picture shows in a step of the segmentation."""

    def patches(self, encoder: nn.Module, prepared: np.ndarray, images: int) -> Tensor:
        """[pictures, patches, width] of prepared images, of which so many make a picture."""

    def encode_prompt(self, question: str, images: int) -> tuple[int, ...]:
        """Token ids, with the places of so many images."""

    def encode_reference(self, answer: str) -> list[int]:
        """Token ids with the end token."""

    def logits(self, model: Any, prepared: np.ndarray | None, images: int, ids: Tensor, supervised: Tensor) -> Tensor:
        """[supervised tokens, vocabulary] of samples [samples, tokens] with so many prepared images each."""

    def write(self, model: Any, folder: Path) -> None:
        """Weights, configuration, tokenizer and processor, in the layout of the published ones."""


def architecture_of(cfg: Pretrain) -> Architecture:
    """Raises ParamsError where a BLIP-2 cannot start from its `start`."""
    if cfg.blip2 is not None:
        return blip2.load(cfg, cfg.blip2)
    return llava_onevision.LlavaOneVision(cfg, llava_onevision.make_processor(cfg))
