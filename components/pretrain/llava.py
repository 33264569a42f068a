"""The tiny base of OneDiff on the parts that the paper has: a LLaVA-1.5 of 1.5 M parameters (CLIP, two-layer MLP, LLM)
that starts from the tiny LLaVA-OneVision.

Projector, LLM, tokenizer and chat template are those of the LLaVA-OneVision, and so are the encoder's layers but the
last: the LLM of a LLaVA-1.5 reads the penultimate one, so the last is new, and is taught by the segmentation alone, as
CLIP's is by another objective. What CLIP has and SigLIP has not is new, too: the class token, which the LLM does not
read, the norm before the first layer, and quick GELU.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from transformers import LlavaConfig, LlavaForConditionalGeneration, LlavaOnevisionForConditionalGeneration
from transformers.image_utils import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD

from components.models.m3diff.processing import M3DiffImageProcessor, M3DiffProcessor
from components.pretrain.llava_onevision import LlavaOneVision
from components.pretrain.params import Llava, Pretrain
from components.section import ParamsError

PENULTIMATE = -2
CLASS_TOKEN_DROPPED: Literal["default"] = "default"
"""What the LLM of a LLaVA-1.5 reads of its encoder: that hidden state, by that strategy."""


class Processor(M3DiffProcessor):
    """Of a LLaVA-1.5: each image takes as many tokens as it has patches; there is no newline."""

    def expanded(self, text: str) -> str:
        assert self.num_image_tokens is not None, "a processor without num_image_tokens encodes no prompt"
        return text.replace("<image>", "<image>" * self.num_image_tokens)


@dataclass(frozen=True)
class LlavaBase(LlavaOneVision):
    """How a LLaVA-1.5 is made, fed and written (`architecture.Architecture`)."""

    start: LlavaOnevisionForConditionalGeneration

    def make_model(self) -> LlavaForConditionalGeneration:  # type: ignore[override]  # another LLaVA
        model = LlavaForConditionalGeneration._from_config(make_config(self.start.config), attn_implementation="sdpa")
        images, known = self.processor.image_processor, self.start.model
        take_vision_encoder(model.model.vision_tower, known.vision_tower, images)
        model.model.multi_modal_projector.load_state_dict(known.multi_modal_projector.state_dict())
        model.model.language_model.load_state_dict(known.language_model.state_dict())
        model.tie_weights()
        return model

    def patches(self, encoder: nn.Module, prepared: np.ndarray, images: int) -> Tensor:
        """[images, patches, width] of the last layer, without the class token."""
        return encoder(pixel_values=self.pixels(prepared)).last_hidden_state[:, 1:]

    def logits(self, model: Any, prepared: np.ndarray | None, images: int, ids: Tensor, supervised: Tensor) -> Tensor:
        """[supervised tokens, vocabulary]."""
        inputs = {} if prepared is None else {"pixel_values": self.pixels(prepared)}
        return model(input_ids=ids, logits_to_keep=supervised, use_cache=False, **inputs).logits

    def write(self, model: Any, folder: Path) -> None:
        model.save_pretrained(folder)
        write_processor(self.processor, model.config, folder)


def load(cfg: Pretrain, own: Llava) -> LlavaBase:
    """Raises ParamsError where `start` is no LLaVA-OneVision of the recipe's sizes."""
    if not (own.start / "config.json").is_file():
        raise ParamsError(f"pretrain.llava.start: {own.start} has no config.json; name a base as `make base` makes it")
    start: Any = LlavaOnevisionForConditionalGeneration.from_pretrained(own.start)
    vision = start.config.vision_config
    sizes = {"width": vision.hidden_size, "vision_px": vision.image_size, "patch_px": vision.patch_size}
    if faults := [f"pretrain.{name}: write {size}" for name, size in sizes.items() if getattr(cfg, name) != size]:
        raise ParamsError(f"{own.start} is of other sizes: {', '.join(faults)}")
    known = M3DiffProcessor.from_pretrained(own.start)
    images = M3DiffImageProcessor({"shortest_edge": cfg.vision_px}, OPENAI_CLIP_MEAN, OPENAI_CLIP_STD)
    processor = Processor(images, known.tokenizer, known.num_image_tokens, known.tokenizer.chat_template)
    return LlavaBase(cfg, processor, start)


def make_config(start: Any) -> LlavaConfig:
    """A CLIP of one layer more before the projector and the LLM of the LLaVA-OneVision."""
    vision = start.vision_config
    return LlavaConfig(
        vision_config={
            "model_type": "clip_vision_model",
            "hidden_size": vision.hidden_size,
            "intermediate_size": vision.intermediate_size,
            "num_hidden_layers": vision.num_hidden_layers + 1,
            "num_attention_heads": vision.num_attention_heads,
            "image_size": vision.image_size,
            "patch_size": vision.patch_size,
        },
        text_config=start.text_config.to_dict(),
        image_token_index=start.image_token_id,
        vision_feature_layer=PENULTIMATE,
        vision_feature_select_strategy=CLASS_TOKEN_DROPPED,
        image_seq_length=(vision.image_size // vision.patch_size) ** 2,
        tie_word_embeddings=start.tie_word_embeddings,
    )


@torch.no_grad()
def take_vision_encoder(mine: Any, theirs: Any, images: M3DiffImageProcessor) -> None:
    """Copy a SigLIP into a CLIP of one layer more, whose pixels come with other means and deviations: filters and
    positions take that up, so that the same image has the same embeddings but for the norm behind them."""
    filters = theirs.embeddings.patch_embedding
    mean, std = (torch.tensor(values)[:, None, None] for values in (images.image_mean, images.image_std))
    brighter, scaled = (mean - 0.5) / 0.5, std / 0.5  # SigLIP's pixels are (colour - 0.5) / 0.5
    mine.embeddings.patch_embedding.weight.copy_(scaled * filters.weight)
    bias = filters.bias + (brighter * filters.weight).sum(dim=(1, 2, 3))
    mine.embeddings.position_embedding.weight[1:] = theirs.embeddings.position_embedding.weight + bias
    for layer, other in zip(mine.encoder.layers, theirs.encoder.layers, strict=False):  # the last is new
        layer.load_state_dict(other.state_dict())


def write_processor(processor: M3DiffProcessor, config: LlavaConfig, folder: Path) -> None:
    """Tokenizer, chat template, and the files of LLaVA-1.5's own processor, which `AutoProcessor` then finds."""
    processor.tokenizer.save_pretrained(folder)
    encoder: Any = config.vision_config
    images, px = processor.image_processor, encoder.image_size
    resized = {"do_resize": True, "size": {"shortest_edge": px}, "resample": 3}
    cropped = {"do_center_crop": True, "crop_size": {"height": px, "width": px}}
    pixels = {"image_mean": list(images.image_mean), "image_std": list(images.image_std)}
    tokens = {"patch_size": encoder.patch_size, "num_additional_image_tokens": 1, "image_token": "<image>"}
    files: dict[str, dict[str, Any]] = {
        "preprocessor_config.json": {"image_processor_type": "CLIPImageProcessor"} | resized | cropped | pixels,
        "processor_config.json": tokens | {"vision_feature_select_strategy": config.vision_feature_select_strategy},
    }
    for name, content in files.items():
        content["processor_class"] = "LlavaProcessor"
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")
