"""The tiny base models: a LLaVA-OneVision for M3Diff and OneDiff (1.4 M parameters), and a BLIP-2 for BLIP2IDC (2 M).

Each class defines how to create a base, how it reads samples and how to save it.

Like the original, this BLIP-2 connects a trained vision encoder and a trained LLM with a new Q-Former. The encoder and
the LLM are taken from the tiny LLaVA-OneVision. The patch size is different, so the encoder's filters and positions are
resized and trained again. Unlike in the original, the LLM is also trained, because so far it has only read patches, not
queries. To caption a picture, the LLM reads the queries and a start token, without a question, as in BLIP2IDC. Other
questions follow the start token. A picture contains one image, stretched to a square, or two stacked images, each
stretched to half of the square as in `components/models/blip2idc_model.py`.
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
from m3diff.models.foreign_code import refuse_foreign_code
from m3diff.models.processing import M3DiffImageProcessor, M3DiffProcessor
from m3diff.stages.pretrain.params import Pretrain

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<image>", "<video>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }} "
    "{% for part in message['content'] if part['type'] == 'image' %}<image>{% endfor %}"
    "{% for part in message['content'] if part['type'] == 'text' %}\n{{ part['text'] }}{% endfor %}"
    "<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# The questions used in fine-tuning: the task `difference` in profiles/questions.yaml. A test compares the two lists.
QUESTIONS = (
    "What has changed from the first image to the second?",
    "Describe the difference between the two images.",
    "Compare the two images and say what changed.",
    "What is different in the second image?",
    "Look at the image before and the image after. What changed?",
    "Say in words how the second image differs from the first.",
)

DESCRIBE = ("Describe the image.", "Describe both images.")

CAPTION_QUESTIONS = {*DESCRIBE, *QUESTIONS}  # BLIP-2 answers these with a caption and does not read the question

# Fields of the vision encoder's configuration that are copied from the LLaVA-OneVision to the BLIP-2
ENCODER_FIELDS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "hidden_act")


@dataclass(frozen=True)
class LlavaOneVision:
    """Creates a LLaVA-OneVision, runs it on samples and saves it."""

    cfg: Pretrain
    processor: M3DiffProcessor

    def make_model(self) -> LlavaOnevisionForConditionalGeneration:
        """Return a new model with random weights."""
        config = llava_config(self.cfg, self.processor)
        return LlavaOnevisionForConditionalGeneration._from_config(config, attn_implementation="sdpa")

    def encoder(self, model: Any) -> nn.Module:
        """Return the vision encoder of the model."""
        return model.model.vision_tower

    def prepare_image(self, image: Image.Image) -> np.ndarray:
        """Resize an image to the encoder's input size and return it as uint8 [side, side, 3]."""
        return self.processor.prepare_image(image)

    def patches(self, encoder: nn.Module, prepared: np.ndarray, images: int) -> Tensor:
        """Return the patch features that the LLM reads, [pictures, patches, width]. `images` is ignored."""
        return encoder(pixel_values=self.pixels(prepared), output_hidden_states=True).hidden_states[-1]

    def encode_prompt(self, question: str, images: int) -> tuple[int, ...]:
        """Return the token ids of a prompt with this number of images and a question."""
        return self.processor.encode_prompt(question, images)

    def logits(self, model: Any, prepared: np.ndarray | None, images: int, ids: Tensor, supervised: Tensor) -> Tensor:
        """Return the logits at the supervised positions, [supervised tokens, vocabulary]."""
        inputs: dict[str, object] = {}
        if prepared is not None:
            sizes = torch.full((len(prepared), 2), self.processor.image_processor.side)
            inputs = {"pixel_values": self.pixels(prepared), "image_sizes": sizes}
            inputs["batch_num_images"] = [len(prepared)]  # makes transformers use a single crop of each image
        return model(input_ids=ids, logits_to_keep=supervised, use_cache=False, **inputs).logits

    def pixels(self, prepared: np.ndarray) -> Tensor:
        """Normalise prepared images and return them as [pictures, 3, side, side]."""
        return self.processor.image_processor.to_pixels(torch.from_numpy(prepared))

    def write(self, model: Any, folder: Path) -> None:
        """Save the model, the tokenizer with its chat template, and the files of LLaVA-OneVision's processor.

        Both `AutoProcessor` and this project's processor can load these files.
        """
        model.save_pretrained(folder)
        self.processor.tokenizer.save_pretrained(folder)
        images = self.processor.image_processor
        count = self.processor.num_image_tokens
        pixels = {"size": images.size, "image_mean": images.image_mean, "image_std": images.image_std}
        kind = "LlavaOnevisionImageProcessor"
        grid = model.config.image_grid_pinpoints
        files: dict[str, dict[str, Any]] = {
            "preprocessor_config.json": {"image_processor_type": kind, "image_grid_pinpoints": grid, **pixels},
            "video_preprocessor_config.json": {"video_processor_type": "LlavaOnevisionVideoProcessor", **pixels},
            "processor_config.json": {"num_image_tokens": count, "vision_feature_select_strategy": "full"},
        }
        for name, content in files.items():
            content["processor_class"] = "LlavaOnevisionProcessor"
            (folder / name).write_text(json.dumps(content, indent=2) + "\n")


def llava_config(cfg: Pretrain, processor: M3DiffProcessor) -> LlavaOnevisionConfig:
    """Return the configuration of a SigLIP vision encoder, a projector and a Qwen2 LLM, all with the same width."""
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
    """Creates a BLIP-2, runs it on samples and saves it."""

    config: Blip2IDCConfig
    llava: LlavaOnevisionForConditionalGeneration
    processor: Blip2IDCProcessor

    def make_model(self) -> Blip2ForConditionalGeneration:
        """Return a BLIP-2 with a new Q-Former. The vision encoder and the LLM are copied from the LLaVA-OneVision."""
        model = Blip2ForConditionalGeneration._from_config(self.config, attn_implementation="sdpa")
        # transformers initialises all queries to the same values, and identical queries would stay identical
        nn.init.normal_(model.query_tokens, std=0.02)
        copy_vision_encoder(model.vision_model, self.llava.model.vision_tower)
        llm = model.language_model
        llm.model.load_state_dict(self.llava.model.language_model.state_dict())
        llm.tie_weights()
        return model

    def encoder(self, model: Any) -> nn.Module:
        """Return the vision encoder of the model."""
        return model.vision_model

    def prepare_image(self, image: Image.Image) -> np.ndarray:
        """Return an image in its original size. `pixels` resizes it, depending on the images per picture."""
        return np.asarray(image.convert("RGB"))

    def patches(self, encoder: nn.Module, prepared: np.ndarray, images: int) -> Tensor:
        """Return the patch features, without the class token, of pictures with `images` images each.

        The result is [pictures, patches, width].
        """
        return encoder(pixel_values=self.pixels(prepared, images)).last_hidden_state[:, 1:]

    def encode_prompt(self, question: str, images: int) -> tuple[int, ...]:
        """Return the token ids of a prompt: placeholders for the queries, the start token and the question.

        The placeholders are omitted if there are no images. The question is omitted if it asks for a caption.
        """
        start = self.processor.prompt if images else self.processor.prompt[-1:]
        if question in CAPTION_QUESTIONS:
            return start
        return (*start, *self.processor.tokenizer(f"{question}\n", add_special_tokens=False)["input_ids"])

    def logits(self, model: Any, prepared: np.ndarray | None, images: int, ids: Tensor, supervised: Tensor) -> Tensor:
        """Return the logits at the supervised positions, [supervised tokens, vocabulary]."""
        embeds = model.get_input_embeddings()(ids)
        if prepared is not None:
            patches = model.vision_model(pixel_values=self.pixels(prepared, images)).last_hidden_state
            queries = model.query_tokens.expand(len(patches), -1, -1)
            visual_tokens = model.qformer(query_embeds=queries, encoder_hidden_states=patches).last_hidden_state
            is_query = ids == model.config.image_token_index
            embeds = embeds.masked_scatter(is_query[..., None], model.language_projection(visual_tokens))
        return model.language_model(inputs_embeds=embeds, logits_to_keep=supervised, use_cache=False).logits

    def pixels(self, prepared: np.ndarray, images: int) -> Tensor:
        """Stack groups of `images` images into pictures, with the first image on top, and normalise the pictures.

        The result is [pictures, 3, side, side].
        """
        side = self.processor.image_processor.side
        size = (side, side // images)
        resized = [Image.fromarray(image).resize(size, Image.Resampling.BICUBIC) for image in prepared]
        pictures = np.stack([np.asarray(image) for image in resized]).reshape(-1, side, side, 3)
        return self.processor.image_processor.to_pixels(torch.from_numpy(pictures))

    def write(self, model: Any, folder: Path) -> None:
        """Save the model and its processor."""
        model.save_pretrained(folder)
        self.processor.save_pretrained(folder)


@torch.no_grad()
def copy_vision_encoder(target: Any, source: Any) -> None:
    """Copy the weights of a SigLIP encoder to the vision encoder of a BLIP-2, except for the class token.

    BLIP-2 computes queries, keys and values with one linear layer. The patch filters and the positions are resized by
    bicubic interpolation, and the filters are scaled so that their sum stays about the same.

    Args:
        target: vision encoder of the BLIP-2.
        source: the SigLIP encoder.
    """
    for target_layer, source_layer in zip(target.encoder.layers, source.encoder.layers, strict=True):
        attention = source_layer.self_attn
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        target_layer.self_attn.qkv.weight.copy_(torch.cat([projection.weight for projection in projections]))
        target_layer.self_attn.qkv.bias.copy_(torch.cat([projection.bias for projection in projections]))
        target_layer.self_attn.projection.load_state_dict(attention.out_proj.state_dict())
        for name in ("layer_norm1", "layer_norm2", "mlp"):
            getattr(target_layer, name).load_state_dict(getattr(source_layer, name).state_dict())
    target.post_layernorm.load_state_dict(source.post_layernorm.state_dict())

    def resize(grid: Tensor, side: int) -> Tensor:
        return nn.functional.interpolate(grid, size=(side, side), mode="bicubic", align_corners=False)

    embeddings = target.embeddings
    filters = source.embeddings.patch_embedding.weight
    scale = (filters.shape[-1] / embeddings.patch_size) ** 2
    embeddings.patch_embedding.weight.copy_(scale * resize(filters, embeddings.patch_size))
    embeddings.patch_embedding.bias.copy_(source.embeddings.patch_embedding.bias)
    positions = source.embeddings.position_embedding.weight
    side = round(len(positions) ** 0.5)
    grid = resize(positions.T.reshape(1, -1, side, side), embeddings.image_size // embeddings.patch_size)
    embeddings.position_embedding[:, 1:].copy_(grid.flatten(2).transpose(1, 2))


def _sizes(width: int, layers: int) -> dict[str, int]:
    heads = {"num_hidden_layers": layers, "num_attention_heads": 4}
    return {"hidden_size": width, "intermediate_size": 2 * width, **heads}


Architecture = LlavaOneVision | Blip2Base


def architecture_of(cfg: Pretrain, tokenizer: Any) -> Architecture:
    """Return the architecture that the settings describe, which creates, runs and saves the base.

    Args:
        cfg: the section `pretrain`. The LLaVA-OneVision that a BLIP-2 starts from must have the same width.
        tokenizer: tokenizer for a LLaVA-OneVision. For a BLIP-2, this tokenizer is ignored, and the tokenizer of the
            LLaVA-OneVision is used.
    """
    size = {"height": cfg.vision_px, "width": cfg.vision_px}
    blip2 = cfg.blip2
    if blip2 is None:
        tokenizer.chat_template = CHAT_TEMPLATE
        patches = (cfg.vision_px // cfg.patch_px) ** 2
        images = M3DiffImageProcessor(size=size)
        text = {"chat_template": CHAT_TEMPLATE}
        return LlavaOneVision(cfg, M3DiffProcessor(images, tokenizer, num_image_tokens=patches, **text))
    refuse_foreign_code(blip2.start)
    llava: Any = LlavaOnevisionForConditionalGeneration.from_pretrained(
        blip2.start, use_safetensors=True, trust_remote_code=False
    )
    tokenizer = AutoTokenizer.from_pretrained(blip2.start, trust_remote_code=False)
    vision = llava.config.vision_config
    text = llava.config.text_config.to_dict()
    config = Blip2IDCConfig(
        vision_config={
            **{name: getattr(vision, name) for name in ENCODER_FIELDS},
            "image_size": cfg.vision_px,
            "patch_size": cfg.patch_px,
            "initializer_range": 0.02,
        },
        qformer_config={**_sizes(cfg.width, blip2.qformer_layers), "encoder_hidden_size": vision.hidden_size},
        text_config=text | {"bos_token_id": tokenizer.convert_tokens_to_ids("<|im_start|>")},
        num_query_tokens=blip2.queries,
        image_token_index=llava.config.image_token_id,
    )
    pixels = Blip2IDCImageProcessor(size=size, image_mean=[0.5] * 3, image_std=[0.5] * 3)
    return Blip2Base(config, llava, Blip2IDCProcessor(pixels, tokenizer, config))
