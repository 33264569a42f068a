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

from m3diff.datasets.minichange.questions import DESCRIBE_ONE_IMAGE, DESCRIBE_TWO_IMAGES
from m3diff.models.blip2idc_model import Blip2IDCConfig, Blip2IDCImageProcessor, Blip2IDCProcessor
from m3diff.models.foreign_code import refuse_foreign_code
from m3diff.models.processing import M3DiffImageProcessor, M3DiffProcessor
from m3diff.records.sample import Turn
from m3diff.stages.pretrain.params import Blip2, Pretrain

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<image>", "<video>")
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

# BLIP-2 answers these questions with a caption and does not read the question
CAPTION_QUESTIONS = {DESCRIBE_ONE_IMAGE, DESCRIBE_TWO_IMAGES, *QUESTIONS}

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

    def vision_encoder(self, model: Any) -> nn.Module:
        """Return the vision encoder of the model."""
        return model.model.vision_tower

    def prepare_image(self, image: Image.Image) -> np.ndarray:
        """Resize an image to the encoder's input size and return it as uint8 [side, side, 3]."""
        return self.processor.image_processor.prepare_image(image)

    def encode_patches(self, encoder: nn.Module, images: np.ndarray, images_per_picture: int) -> Tensor:
        """Return the patch features that the LLM reads, [pictures, patches, width].

        `images_per_picture` is ignored, because every picture is a single image.
        """
        return encoder(pixel_values=self.to_pixels(images), output_hidden_states=True).hidden_states[-1]

    def encode_prompt(self, question: str, image_count: int) -> tuple[int, ...]:
        """Return the token ids of a prompt with this number of images and a question."""
        return self.processor.encode_prompt((Turn(question),), self.processor.marks(image_count))

    def compute_logits(
        self, model: Any, images: np.ndarray | None, images_per_sample: int, ids: Tensor, is_supervised: Tensor
    ) -> Tensor:
        """Return the logits at the supervised positions, [supervised tokens, vocabulary].

        Args:
            images: images of all samples as returned by `prepare_image`, or None if the samples have no images.
            images_per_sample: ignored, because the prompts in `ids` have a placeholder for each image.
            ids: token ids of prompts and answers, [samples, tokens].
            is_supervised: true at the positions whose logits are computed, [samples, tokens].
        """
        image_inputs: dict[str, object] = {}
        if images is not None:
            image_inputs = {
                "pixel_values": self.to_pixels(images),
                "image_sizes": torch.full((len(images), 2), self.processor.image_processor.side),
                "batch_num_images": [len(images)],  # makes transformers use a single crop of each image
            }
        return model(input_ids=ids, logits_to_keep=is_supervised, use_cache=False, **image_inputs).logits

    def to_pixels(self, images: np.ndarray) -> Tensor:
        """Normalise prepared images and return them as [pictures, 3, side, side]."""
        return self.processor.image_processor.to_pixels(torch.from_numpy(images))

    def save(self, model: Any, folder: Path) -> None:
        """Save the model, the tokenizer with its chat template, and the files of LLaVA-OneVision's processor.

        Both `AutoProcessor` and this project's processor can load these files.
        """
        model.save_pretrained(folder)
        self.processor.tokenizer.save_pretrained(folder)
        image_processor = self.processor.image_processor
        image_settings = {
            "size": image_processor.size,
            "image_mean": image_processor.image_mean,
            "image_std": image_processor.image_std,
        }
        files: dict[str, dict[str, Any]] = {
            "preprocessor_config.json": {
                "image_processor_type": "LlavaOnevisionImageProcessor",
                "image_grid_pinpoints": model.config.image_grid_pinpoints,
                **image_settings,
            },
            "video_preprocessor_config.json": {
                "video_processor_type": "LlavaOnevisionVideoProcessor",
                **image_settings,
            },
            "processor_config.json": {
                "num_image_tokens": self.processor.num_image_tokens,
                "vision_feature_select_strategy": "full",
            },
        }
        for name, content in files.items():
            content["processor_class"] = "LlavaOnevisionProcessor"
            (folder / name).write_text(json.dumps(content, indent=2) + "\n")


def llava_config(cfg: Pretrain, processor: M3DiffProcessor) -> LlavaOnevisionConfig:
    """Return the configuration of a SigLIP vision encoder, a projector and a Qwen2 LLM, all with the same width."""
    token_id = processor.tokenizer.convert_tokens_to_ids
    width = cfg.width
    return LlavaOnevisionConfig(
        vision_config={
            "model_type": "siglip_vision_model",
            **_transformer_sizes(width, cfg.vision_layers),
            "image_size": cfg.vision_px,
            "patch_size": cfg.patch_px,
            "vision_use_head": False,
        },
        text_config={
            "model_type": "qwen2",
            "vocab_size": len(processor.tokenizer),
            **_transformer_sizes(width, cfg.text_layers),
            "num_key_value_heads": 2,
            "max_position_embeddings": 1024,
            "tie_word_embeddings": True,
            "bos_token_id": None,
            "eos_token_id": token_id("<|im_end|>"),
            "pad_token_id": token_id("<|endoftext|>"),
        },
        image_token_index=token_id("<image>"),
        video_token_index=token_id("<video>"),
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

    def vision_encoder(self, model: Any) -> nn.Module:
        """Return the vision encoder of the model."""
        return model.vision_model

    def prepare_image(self, image: Image.Image) -> np.ndarray:
        """Return an image in its original size. `to_pixels` resizes it, depending on the images per picture."""
        return np.asarray(image.convert("RGB"))

    def encode_patches(self, encoder: nn.Module, images: np.ndarray, images_per_picture: int) -> Tensor:
        """Return the patch features, without the class token, of pictures with `images_per_picture` images each.

        The result is [pictures, patches, width].
        """
        return encoder(pixel_values=self.to_pixels(images, images_per_picture)).last_hidden_state[:, 1:]

    def encode_prompt(self, question: str, image_count: int) -> tuple[int, ...]:
        """Return the token ids of a prompt: placeholders for the queries, the start token and the question.

        The placeholders are omitted if there are no images. The question is omitted if it asks for a caption.
        """
        start = self.processor.prompt if image_count else self.processor.prompt[-1:]
        if question in CAPTION_QUESTIONS:
            return start
        question_ids = self.processor.tokenizer(f"{question}\n", add_special_tokens=False)["input_ids"]
        return (*start, *question_ids)

    def compute_logits(
        self, model: Any, images: np.ndarray | None, images_per_sample: int, ids: Tensor, is_supervised: Tensor
    ) -> Tensor:
        """Return the logits at the supervised positions, [supervised tokens, vocabulary].

        Args:
            images: images of all samples as returned by `prepare_image`, or None if the samples have no images.
            images_per_sample: number of images in the picture of each sample.
            ids: token ids of prompts and answers, [samples, tokens].
            is_supervised: true at the positions whose logits are computed, [samples, tokens].
        """
        embeddings = model.get_input_embeddings()(ids)
        if images is not None:
            patches = model.vision_model(pixel_values=self.to_pixels(images, images_per_sample)).last_hidden_state
            queries = model.query_tokens.expand(len(patches), -1, -1)
            outputs = model.qformer(query_embeds=queries, encoder_hidden_states=patches).last_hidden_state
            is_image_token = ids == model.config.image_token_index
            embeddings = embeddings.masked_scatter(is_image_token[..., None], model.language_projection(outputs))
        return model.language_model(inputs_embeds=embeddings, logits_to_keep=is_supervised, use_cache=False).logits

    def to_pixels(self, images: np.ndarray, images_per_picture: int) -> Tensor:
        """Stack each `images_per_picture` images into a picture, the first on top, and normalise the pictures.

        The result is [pictures, 3, side, side].
        """
        side = self.processor.image_processor.side
        size = (side, side // images_per_picture)
        resized_images = [Image.fromarray(image).resize(size, Image.Resampling.BICUBIC) for image in images]
        pictures = np.stack([np.asarray(image) for image in resized_images]).reshape(-1, side, side, 3)
        return self.processor.image_processor.to_pixels(torch.from_numpy(pictures))

    def save(self, model: Any, folder: Path) -> None:
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


def _transformer_sizes(width: int, layers: int) -> dict[str, int]:
    """Return the configuration fields with the sizes of a transformer that has four attention heads."""
    return {
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
    }


Architecture = LlavaOneVision | Blip2Base


def create_architecture(cfg: Pretrain, tokenizer: Any) -> Architecture:
    """Return the architecture that the settings describe, which creates, runs and saves the base.

    Args:
        cfg: the section `pretrain`.
        tokenizer: tokenizer for a LLaVA-OneVision. For a BLIP-2, this tokenizer is ignored, and the tokenizer of the
            LLaVA-OneVision is used.
    """
    if cfg.blip2 is None:
        return _create_llava_onevision(cfg, tokenizer)
    return _create_blip2(cfg, cfg.blip2)


def _create_llava_onevision(cfg: Pretrain, tokenizer: Any) -> LlavaOneVision:
    tokenizer.chat_template = CHAT_TEMPLATE
    image_processor = M3DiffImageProcessor(size={"height": cfg.vision_px, "width": cfg.vision_px})
    patches = (cfg.vision_px // cfg.patch_px) ** 2
    processor = M3DiffProcessor(image_processor, tokenizer, num_image_tokens=patches, chat_template=CHAT_TEMPLATE)
    return LlavaOneVision(cfg, processor)


def _create_blip2(cfg: Pretrain, blip2: Blip2) -> Blip2Base:
    """Load the LLaVA-OneVision in `blip2.start` and return a BLIP-2 that starts from it.

    The LLaVA-OneVision must have the width `cfg.width`.
    """
    refuse_foreign_code(blip2.start)
    llava: Any = LlavaOnevisionForConditionalGeneration.from_pretrained(
        blip2.start, use_safetensors=True, trust_remote_code=False
    )
    tokenizer = AutoTokenizer.from_pretrained(blip2.start, trust_remote_code=False)
    encoder_config = llava.config.vision_config
    encoder_fields = {name: getattr(encoder_config, name) for name in ENCODER_FIELDS}
    qformer_sizes = _transformer_sizes(cfg.width, blip2.qformer_layers)
    llm_fields = llava.config.text_config.to_dict()
    config = Blip2IDCConfig(
        vision_config={
            **encoder_fields,
            "image_size": cfg.vision_px,
            "patch_size": cfg.patch_px,
            "initializer_range": 0.02,
        },
        qformer_config={**qformer_sizes, "encoder_hidden_size": encoder_config.hidden_size},
        text_config=llm_fields | {"bos_token_id": tokenizer.convert_tokens_to_ids("<|im_start|>")},
        num_query_tokens=blip2.queries,
        image_token_index=llava.config.image_token_id,
    )
    image_processor = Blip2IDCImageProcessor(
        size={"height": cfg.vision_px, "width": cfg.vision_px}, image_mean=[0.5] * 3, image_std=[0.5] * 3
    )
    return Blip2Base(config, llava, Blip2IDCProcessor(image_processor, tokenizer, config))
