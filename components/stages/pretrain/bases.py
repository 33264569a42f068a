"""The tiny bases: a LLaVA-OneVision of 1.4 M parameters for M3Diff and OneDiff, a BLIP-2 of 2 M for BLIP2IDC.

Each says how a base is made, fed and written. As BLIP-2 did, the BLIP-2 joins a vision encoder and an LLM that have
been trained, those of the LLaVA-OneVision, by a Q-Former that has not. Patches of another size and their positions are
resized and learn to see again; unlike BLIP-2's, the LLM trains along, since it has read 25 patches an image and no
query. It captions a picture behind the queries and a start token, without a question, as BLIP2IDC is asked; where a
task asks for something, the question follows the start token. A picture is one image, stretched; of two images, each is
stretched to half of the square and they are stacked, as in `components/models/blip2idc_model.py`.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from transformers import (
    AutoTokenizer,
    Blip2ForConditionalGeneration,
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
)

from m3diff.models.blip2idc_model import Blip2IDCConfig, Blip2IDCImageProcessor, Blip2IDCProcessor
from m3diff.models.processing import M3DiffImageProcessor, M3DiffProcessor
from m3diff.stages.pretrain.params import Pretrain

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<image>", "<video>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }} "
    "{% for part in message['content'] if part['type'] == 'image' %}<image>{% endfor %}"
    "{% for part in message['content'] if part['type'] == 'text' %}\n{{ part['text'] }}{% endfor %}"
    "<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QUESTIONS = (  # what fine-tuning will ask (profiles/questions.yaml, task `difference`; a test compares the two)
    "What has changed from the first image to the second?",
    "Describe the difference between the two images.",
    "Compare the two images and say what changed.",
    "What is different in the second image?",
    "Look at the image before and the image after. What changed?",
    "Say in words how the second image differs from the first.",
)

DESCRIBE = ("Describe the image.", "Describe both images.")

CAPTION = {*DESCRIBE, *QUESTIONS}  # questions that BLIP-2 answers without being asked

# Sizes of a BLIP-2's vision encoder, those of the LLaVA-OneVision's
OF_THE_ENCODER = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "hidden_act")


@dataclass(frozen=True)
class LlavaOneVision:
    """A LLaVA-OneVision: how it is made, fed and written."""

    cfg: Pretrain
    processor: M3DiffProcessor

    def make_model(self) -> LlavaOnevisionForConditionalGeneration:
        config = llava_config(self.cfg, self.processor)
        return LlavaOnevisionForConditionalGeneration._from_config(config, attn_implementation="sdpa")

    def encoder(self, model: Any) -> nn.Module:
        return model.model.vision_tower

    def prepare_image(self, image: Image.Image) -> np.ndarray:
        """[side, side, 3] uint8."""
        return self.processor.prepare_image(image)

    def patches(self, encoder: nn.Module, prepared: np.ndarray, images: int) -> Tensor:
        """[pictures, patches, width], as the LLM gets them."""
        return encoder(pixel_values=self.pixels(prepared), output_hidden_states=True).hidden_states[-1]

    def encode_prompt(self, question: str, images: int) -> tuple[int, ...]:
        return self.processor.encode_prompt(question, images)

    def logits(self, model: Any, prepared: np.ndarray | None, images: int, ids: Tensor, supervised: Tensor) -> Tensor:
        """[supervised tokens, vocabulary]."""
        inputs: dict[str, object] = {}
        if prepared is not None:
            sizes = torch.full((len(prepared), 2), self.processor.image_processor.side)
            inputs = {"pixel_values": self.pixels(prepared), "image_sizes": sizes}
            inputs["batch_num_images"] = [len(prepared)]  # the multi-image path: one crop an image
        return model(input_ids=ids, logits_to_keep=supervised, use_cache=False, **inputs).logits

    def pixels(self, prepared: np.ndarray) -> Tensor:
        return self.processor.image_processor.to_pixels(torch.from_numpy(prepared))

    def write(self, model: Any, folder: Path) -> None:
        """Write the model, the tokenizer with its chat template, and the files of LLaVA-OneVision's own processor:
        `AutoProcessor` then finds it, and the project's reads the same files."""
        model.save_pretrained(folder)
        self.processor.tokenizer.save_pretrained(folder)
        images, count = self.processor.image_processor, self.processor.num_image_tokens
        pixels = {"size": images.size, "image_mean": images.image_mean, "image_std": images.image_std}
        kind, grid = "LlavaOnevisionImageProcessor", model.config.image_grid_pinpoints
        files: dict[str, dict[str, Any]] = {
            "preprocessor_config.json": {"image_processor_type": kind, "image_grid_pinpoints": grid, **pixels},
            "video_preprocessor_config.json": {"video_processor_type": "LlavaOnevisionVideoProcessor", **pixels},
            "processor_config.json": {"num_image_tokens": count, "vision_feature_select_strategy": "full"},
        }
        for name, content in files.items():
            content["processor_class"] = "LlavaOnevisionProcessor"
            (folder / name).write_text(json.dumps(content, indent=2) + "\n")


def llava_config(cfg: Pretrain, processor: M3DiffProcessor) -> LlavaOnevisionConfig:
    """A SigLIP vision encoder, a projector and a Qwen2 language model, all of one width."""
    token = processor.tokenizer.convert_tokens_to_ids
    width = cfg.width
    return LlavaOnevisionConfig(
        vision_config={
            "model_type": "siglip_vision_model",
            **_sizes(width, cfg.vision_layers),
            "image_size": cfg.vision_px,
            "patch_size": cfg.patch_px,
            "vision_use_head": False,
        },
        text_config={
            "model_type": "qwen2",
            "vocab_size": len(processor.tokenizer),
            **_sizes(width, cfg.text_layers),
            "num_key_value_heads": 2,
            "max_position_embeddings": 1024,
            "tie_word_embeddings": True,
            "bos_token_id": None,
            "eos_token_id": token("<|im_end|>"),
            "pad_token_id": token("<|endoftext|>"),
        },
        image_token_index=token("<image>"),
        video_token_index=token("<video>"),
        image_grid_pinpoints=[[cfg.vision_px, cfg.vision_px]],
        tie_word_embeddings=True,
    )


@dataclass(frozen=True)
class Blip2Base:
    """A BLIP-2: how it is made, fed and written."""

    config: Blip2IDCConfig
    llava: LlavaOnevisionForConditionalGeneration
    processor: Blip2IDCProcessor

    def make_model(self) -> Blip2ForConditionalGeneration:
        model = Blip2ForConditionalGeneration._from_config(self.config, attn_implementation="sdpa")
        nn.init.normal_(model.query_tokens, std=0.02)  # transformers starts all alike, and alike they would stay
        take_vision_encoder(model.vision_model, self.llava.model.vision_tower)
        llm = model.language_model
        llm.model.load_state_dict(self.llava.model.language_model.state_dict())
        llm.tie_weights()
        return model

    def encoder(self, model: Any) -> nn.Module:
        return model.vision_model

    def prepare_image(self, image: Image.Image) -> np.ndarray:
        """Return it as it is drawn: a picture of one image and one of two are resized differently."""
        return np.asarray(image.convert("RGB"))

    def patches(self, encoder: nn.Module, prepared: np.ndarray, images: int) -> Tensor:
        """[pictures, patches, width], without the class token."""
        return encoder(pixel_values=self.pixels(prepared, images)).last_hidden_state[:, 1:]

    def encode_prompt(self, question: str, images: int) -> tuple[int, ...]:
        """The places of the queries, if there is a picture, the start token, and what is asked for."""
        start = self.processor.prompt if images else self.processor.prompt[-1:]
        if question in CAPTION:
            return start
        return (*start, *self.processor.tokenizer(f"{question}\n", add_special_tokens=False)["input_ids"])

    def logits(self, model: Any, prepared: np.ndarray | None, images: int, ids: Tensor, supervised: Tensor) -> Tensor:
        """[supervised tokens, vocabulary]."""
        embeds = model.get_input_embeddings()(ids)
        if prepared is not None:
            patches = model.vision_model(pixel_values=self.pixels(prepared, images)).last_hidden_state
            queries = model.query_tokens.expand(len(patches), -1, -1)
            read = model.qformer(query_embeds=queries, encoder_hidden_states=patches).last_hidden_state
            places = ids == model.config.image_token_index
            embeds = embeds.masked_scatter(places[..., None], model.language_projection(read))
        return model.language_model(inputs_embeds=embeds, logits_to_keep=supervised, use_cache=False).logits

    def pixels(self, prepared: np.ndarray, images: int) -> Tensor:
        """[pictures, 3, side, side], of so many images each, the first on top."""
        side = self.processor.image_processor.side
        size = (side, side // images)
        resized = [Image.fromarray(image).resize(size, Image.Resampling.BICUBIC) for image in prepared]
        pictures = np.stack([np.asarray(image) for image in resized]).reshape(-1, side, side, 3)
        return self.processor.image_processor.to_pixels(torch.from_numpy(pictures))

    def write(self, model: Any, folder: Path) -> None:
        model.save_pretrained(folder)
        self.processor.save_pretrained(folder)


@torch.no_grad()
def take_vision_encoder(mine: Any, theirs: Any) -> None:
    """Copy a SigLIP's layers into BLIP-2's, whose queries, keys and values are one linear. Patches and positions are
    resized to BLIP-2's by a bicubic filter, filters so that they are about as large in sum; a class token stays new."""
    for layer, other in zip(mine.encoder.layers, theirs.encoder.layers, strict=True):
        attention = other.self_attn
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        layer.self_attn.qkv.weight.copy_(torch.cat([each.weight for each in projections]))
        layer.self_attn.qkv.bias.copy_(torch.cat([each.bias for each in projections]))
        layer.self_attn.projection.load_state_dict(attention.out_proj.state_dict())
        for name in ("layer_norm1", "layer_norm2", "mlp"):
            getattr(layer, name).load_state_dict(getattr(other, name).state_dict())
    mine.post_layernorm.load_state_dict(theirs.post_layernorm.state_dict())

    def resized(grid: Tensor, side: int) -> Tensor:
        return nn.functional.interpolate(grid, size=(side, side), mode="bicubic", align_corners=False)

    new, filters = mine.embeddings, theirs.embeddings.patch_embedding.weight
    smaller = (filters.shape[-1] / new.patch_size) ** 2
    new.patch_embedding.weight.copy_(smaller * resized(filters, new.patch_size))
    new.patch_embedding.bias.copy_(theirs.embeddings.patch_embedding.bias)
    positions = theirs.embeddings.position_embedding.weight
    side = round(len(positions) ** 0.5)
    grid = resized(positions.T.reshape(1, -1, side, side), new.image_size // new.patch_size)
    new.position_embedding[:, 1:].copy_(grid.flatten(2).transpose(1, 2))


def _sizes(width: int, layers: int) -> dict[str, int]:
    heads = {"num_hidden_layers": layers, "num_attention_heads": 4}
    return {"hidden_size": width, "intermediate_size": 2 * width, **heads}


Architecture = LlavaOneVision | Blip2Base


def architecture_of(cfg: Pretrain, tokenizer: Any) -> Architecture:
    """Return the base that `cfg` asks for, fed with the tokenizer or, a BLIP-2, that of its start.

    A BLIP-2's `start` is a LLaVA-OneVision of the recipe's width, or torch refuses its weights.
    """
    size, own = {"height": cfg.vision_px, "width": cfg.vision_px}, cfg.blip2
    if own is None:
        tokenizer.chat_template, patches = CHAT_TEMPLATE, (cfg.vision_px // cfg.patch_px) ** 2
        images, text = M3DiffImageProcessor(size=size), {"chat_template": CHAT_TEMPLATE}
        return LlavaOneVision(cfg, M3DiffProcessor(images, tokenizer, num_image_tokens=patches, **text))
    llava: Any = LlavaOnevisionForConditionalGeneration.from_pretrained(own.start)
    tokenizer = AutoTokenizer.from_pretrained(own.start)
    vision, text = llava.config.vision_config, llava.config.text_config.to_dict()
    config = Blip2IDCConfig(
        vision_config={
            **{name: getattr(vision, name) for name in OF_THE_ENCODER},
            "image_size": cfg.vision_px,
            "patch_size": cfg.patch_px,
            "initializer_range": 0.02,
        },
        qformer_config={**_sizes(cfg.width, own.qformer_layers), "encoder_hidden_size": vision.hidden_size},
        text_config=text | {"bos_token_id": tokenizer.convert_tokens_to_ids("<|im_start|>")},
        num_query_tokens=own.queries,
        image_token_index=llava.config.image_token_id,
    )
    pixels = Blip2IDCImageProcessor(size=size, image_mean=[0.5] * 3, image_std=[0.5] * 3)
    return Blip2Base(config, llava, Blip2IDCProcessor(pixels, tokenizer, config))
