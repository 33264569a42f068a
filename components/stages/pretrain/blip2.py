"""The tiny base of BLIP2IDC: a BLIP-2 of 2 M parameters that starts from the tiny LLaVA-OneVision.

As BLIP-2 did, it joins a vision encoder and an LLM that have been trained, by a Q-Former that has not: the encoder's
layers, LLM and tokenizer are those of the LLaVA-OneVision. Patches of another size and their positions are resized and
learn to see again; unlike BLIP-2's, the LLM trains along, since it has read 25 patches an image and no query.

It captions a picture behind the queries and a start token, without a question, as BLIP2IDC is asked; where a task asks
for something, the question follows the start token. A picture is one image, stretched; of two images, each is stretched
to half of the square and they are stacked, as `components/models/blip2idc_model.py` does it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoTokenizer, Blip2ForConditionalGeneration, LlavaOnevisionForConditionalGeneration

from m3diff.models.blip2idc_model import Blip2IDCConfig, Blip2IDCImageProcessor, Blip2IDCProcessor
from m3diff.settings.section import ParamsError
from m3diff.stages.pretrain.curriculum import DESCRIBE, QUESTIONS
from m3diff.stages.pretrain.params import Blip2, Pretrain

if TYPE_CHECKING:
    from PIL import Image

START = "<|im_start|>"
CAPTION = {*DESCRIBE, *QUESTIONS}
"""Questions that BLIP-2 answers without being asked."""


@dataclass(frozen=True)
class Blip2Base:
    """How a BLIP-2 is made, fed and written (`architecture.Architecture`)."""

    cfg: Pretrain
    own: Blip2
    llava: LlavaOnevisionForConditionalGeneration
    processor: Blip2IDCProcessor

    def make_model(self) -> Blip2ForConditionalGeneration:
        config = make_config(self.cfg, self.own, self.llava.config, self.processor.tokenizer)
        model = Blip2ForConditionalGeneration._from_config(config, attn_implementation="sdpa")
        nn.init.normal_(model.query_tokens, std=0.02)  # transformers starts all alike, and alike they would stay
        take_vision_encoder(model.vision_model, self.llava.model.vision_tower)
        llm = model.language_model
        llm.model.load_state_dict(self.llava.model.language_model.state_dict())
        llm.tie_weights()
        return model

    def encoder(self, model: Any) -> nn.Module:
        return model.vision_model

    @property
    def pad_id(self) -> int:
        return self.processor.pad_id

    def prepare_image(self, image: Image.Image) -> np.ndarray:
        """As it is drawn: a picture of one image and one of two are resized differently."""
        return np.asarray(image.convert("RGB"))

    def images_of_a_picture(self, step: int) -> int:
        """Pictures of one image and of two in turn, where a recipe stacks them."""
        return 1 + step % 2 if self.own.stacked else 1

    def patches(self, encoder: nn.Module, prepared: np.ndarray, images: int) -> Tensor:
        """[pictures, patches, width], without the class token."""
        return encoder(pixel_values=self.pixels(prepared, images)).last_hidden_state[:, 1:]

    def encode_prompt(self, question: str, images: int) -> tuple[int, ...]:
        """The places of the queries, if there is a picture, the start token, and what is asked for."""
        start = self.processor.prompt if images else self.processor.prompt[-1:]
        if question in CAPTION:
            return start
        return (*start, *self.processor.tokenizer(f"{question}\n", add_special_tokens=False)["input_ids"])

    def encode_reference(self, answer: str) -> list[int]:
        return self.processor.encode_reference(answer)

    def logits(self, model: Any, prepared: np.ndarray | None, images: int, ids: Tensor, supervised: Tensor) -> Tensor:
        """[supervised tokens, vocabulary]."""
        embeds = model.get_input_embeddings()(ids)
        if prepared is not None:
            places = ids == model.config.image_token_index
            embeds = embeds.masked_scatter(places[..., None], self.visual(model, self.pixels(prepared, images)))
        return model.language_model(inputs_embeds=embeds, logits_to_keep=supervised, use_cache=False).logits

    def visual(self, model: Any, pixels: Tensor) -> Tensor:
        """[pictures, queries, width]: what the LLM gets of pictures [pictures, 3, side, side]."""
        patches = model.vision_model(pixel_values=pixels).last_hidden_state
        queries = model.query_tokens.expand(len(patches), -1, -1)
        read = model.qformer(query_embeds=queries, encoder_hidden_states=patches).last_hidden_state
        return model.language_projection(read)

    def pixels(self, prepared: np.ndarray, images: int) -> Tensor:
        """[pictures, 3, side, side], of so many images each, the first on top."""
        from PIL import Image

        side = self.processor.image_processor.side
        size = (side, side // images)
        resized = [Image.fromarray(image).resize(size, Image.Resampling.BICUBIC) for image in prepared]
        pictures = np.stack([np.asarray(image) for image in resized]).reshape(-1, side, side, 3)
        return self.processor.image_processor.to_pixels(torch.from_numpy(pictures))

    def write(self, model: Any, folder: Path) -> None:
        model.save_pretrained(folder)
        self.processor.save_pretrained(folder)


def load(cfg: Pretrain, own: Blip2) -> Blip2Base:
    """Raises ParamsError where `start` is no LLaVA-OneVision of the recipe's width."""
    if not (own.start / "config.json").is_file():
        raise ParamsError(f"pretrain.blip2.start: {own.start} has no config.json; name a base as `make base` makes it")
    llava: Any = LlavaOnevisionForConditionalGeneration.from_pretrained(own.start)
    if (found := llava.config.text_config.hidden_size) != cfg.width:
        raise ParamsError(f"pretrain.width: {own.start} is {found} wide, found {cfg.width}; write {found}")
    tokenizer = AutoTokenizer.from_pretrained(own.start)
    means = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    images = Blip2IDCImageProcessor(size={"height": cfg.vision_px, "width": cfg.vision_px}, **means)
    config = make_config(cfg, own, llava.config, tokenizer)
    return Blip2Base(cfg, own, llava, Blip2IDCProcessor(images, tokenizer, config))


def make_config(cfg: Pretrain, own: Blip2, llava: Any, tokenizer: Any) -> Blip2IDCConfig:
    """The encoder and the LLM of the LLaVA-OneVision, behind a Q-Former of the same width."""
    vision, text = llava.vision_config, llava.text_config.to_dict()
    start = tokenizer.convert_tokens_to_ids(START)
    fields: dict[str, Any] = {
        "vision_config": {
            "hidden_size": vision.hidden_size,
            "intermediate_size": vision.intermediate_size,
            "num_hidden_layers": vision.num_hidden_layers,
            "num_attention_heads": vision.num_attention_heads,
            "hidden_act": vision.hidden_act,
            "image_size": cfg.vision_px,
            "patch_size": cfg.patch_px,
            "initializer_range": 0.02,
        },
        "qformer_config": {
            "hidden_size": cfg.width,
            "intermediate_size": 2 * cfg.width,
            "num_hidden_layers": own.qformer_layers,
            "num_attention_heads": 4,
            "encoder_hidden_size": vision.hidden_size,
        },
        "text_config": text | {"bos_token_id": start},
        "num_query_tokens": own.queries,
        "image_token_index": llava.image_token_id,
    }
    return Blip2IDCConfig(**fields)


@torch.no_grad()
def take_vision_encoder(mine: Any, theirs: Any) -> None:
    """Copy a SigLIP's layers into BLIP-2's, whose queries, keys and values are one linear. Patches and positions are
    resized to BLIP-2's; a class token has no place in SigLIP and stays new."""
    resize_patches(mine.embeddings, theirs.embeddings)
    for layer, other in zip(mine.encoder.layers, theirs.encoder.layers, strict=True):
        attention = other.self_attn
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        layer.self_attn.qkv.weight.copy_(torch.cat([each.weight for each in projections]))
        layer.self_attn.qkv.bias.copy_(torch.cat([each.bias for each in projections]))
        layer.self_attn.projection.load_state_dict(attention.out_proj.state_dict())
        for name in ("layer_norm1", "layer_norm2", "mlp"):
            getattr(layer, name).load_state_dict(getattr(other, name).state_dict())
    mine.post_layernorm.load_state_dict(theirs.post_layernorm.state_dict())


def resize_patches(mine: Any, theirs: Any) -> None:
    """Filters of the patches, about as large in sum over a patch, and positions, both by a bicubic filter."""

    def resized(grid: Tensor, side: int) -> Tensor:
        return nn.functional.interpolate(grid, size=(side, side), mode="bicubic", align_corners=False)

    filters = theirs.patch_embedding.weight
    smaller = (filters.shape[-1] / mine.patch_size) ** 2
    mine.patch_embedding.weight.copy_(smaller * resized(filters, mine.patch_size))
    mine.patch_embedding.bias.copy_(theirs.patch_embedding.bias)
    positions = theirs.position_embedding.weight
    side = round(len(positions) ** 0.5)
    grid = resized(positions.T.reshape(1, -1, side, side), mine.image_size // mine.patch_size)
    mine.position_embedding[:, 1:].copy_(grid.flatten(2).transpose(1, 2))
