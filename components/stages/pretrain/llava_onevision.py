"""The tiny base of M3Diff and OneDiff: a LLaVA-OneVision of 1.4 M parameters, its tokenizer and how it is taught."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import LlavaOnevisionConfig, LlavaOnevisionForConditionalGeneration, Qwen2Tokenizer

from m3diff.datasets.minichange.language import references
from m3diff.datasets.minichange.levels import LEVELS
from m3diff.datasets.minichange.scene import Level
from m3diff.models.processing import M3DiffImageProcessor, M3DiffProcessor
from m3diff.records.schemas import CHANGE_TYPES
from m3diff.stages.pretrain.curriculum import curriculum
from m3diff.stages.pretrain.params import Pretrain

if TYPE_CHECKING:
    from PIL import Image

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<image>", "<video>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }} "
    "{% for part in message['content'] if part['type'] == 'image' %}<image>{% endfor %}"
    "{% for part in message['content'] if part['type'] == 'text' %}\n{{ part['text'] }}{% endfor %}"
    "<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class LlavaOneVision:
    """How a LLaVA-OneVision is made, fed and written (`architecture.Architecture`)."""

    cfg: Pretrain
    processor: M3DiffProcessor

    def make_model(self) -> LlavaOnevisionForConditionalGeneration:
        config = make_config(self.cfg, self.processor)
        return LlavaOnevisionForConditionalGeneration._from_config(config, attn_implementation="sdpa")

    def encoder(self, model: Any) -> nn.Module:
        return model.model.vision_tower

    @property
    def pad_id(self) -> int:
        return self.processor.pad_id

    def prepare_image(self, image: Image.Image) -> np.ndarray:
        """[side, side, 3] uint8."""
        return self.processor.prepare_image(image)

    def images_of_a_picture(self, step: int) -> int:
        """Each image is encoded by itself."""
        return 1

    def patches(self, encoder: nn.Module, prepared: np.ndarray, images: int) -> Tensor:
        """[pictures, patches, width], as the LLM gets them."""
        return encoder(pixel_values=self.pixels(prepared), output_hidden_states=True).hidden_states[-1]

    def encode_prompt(self, question: str, images: int) -> tuple[int, ...]:
        return self.processor.encode_prompt(question, images)

    def encode_reference(self, answer: str) -> list[int]:
        return self.processor.encode_reference(answer)

    def logits(self, model: Any, prepared: np.ndarray | None, images: int, ids: Tensor, supervised: Tensor) -> Tensor:
        """[supervised tokens, vocabulary]."""
        inputs: dict[str, object] = {}
        if prepared is not None:
            inputs["pixel_values"] = self.pixels(prepared)
            inputs["image_sizes"] = torch.full((len(prepared), 2), self.processor.image_processor.side)
            inputs["batch_num_images"] = [len(prepared)]  # the multi-image path: one crop an image
        return model(input_ids=ids, logits_to_keep=supervised, use_cache=False, **inputs).logits

    def pixels(self, prepared: np.ndarray) -> Tensor:
        return self.processor.image_processor.to_pixels(torch.from_numpy(prepared))

    def write(self, model: Any, folder: Path) -> None:
        model.save_pretrained(folder)
        write_processor(self.processor, model.config, folder)


def make_processor(cfg: Pretrain) -> M3DiffProcessor:
    """The processor with a tokenizer of its own."""
    processor = M3DiffProcessor(
        M3DiffImageProcessor(size={"height": cfg.vision_px, "width": cfg.vision_px}),
        train_tokenizer(cfg.seed, cfg.levels),
        num_image_tokens=(cfg.vision_px // cfg.patch_px) ** 2,
        chat_template=CHAT_TEMPLATE,
    )
    processor.tokenizer.chat_template = CHAT_TEMPLATE
    return processor


def write_processor(processor: M3DiffProcessor, config: LlavaOnevisionConfig, folder: Path) -> None:
    """Tokenizer, chat template, and the files of LLaVA-OneVision's own processor, which `AutoProcessor` then finds; the
    project's reads the same files."""
    processor.tokenizer.save_pretrained(folder)
    images = processor.image_processor
    pixels = {"size": images.size, "image_mean": images.image_mean, "image_std": images.image_std}
    grid = {"image_grid_pinpoints": config.image_grid_pinpoints}
    tokens = {"num_image_tokens": processor.num_image_tokens, "vision_feature_select_strategy": "full"}
    files: dict[str, dict[str, Any]] = {
        "preprocessor_config.json": {"image_processor_type": "LlavaOnevisionImageProcessor", **grid, **pixels},
        "video_preprocessor_config.json": {"video_processor_type": "LlavaOnevisionVideoProcessor", **pixels},
        "processor_config.json": tokens,
    }
    for name, content in files.items():
        content["processor_class"] = "LlavaOnevisionProcessor"
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")


def train_tokenizer(seed: int, levels: tuple[Level, ...]) -> Qwen2Tokenizer:
    """A byte-level BPE of Qwen2's kind on MiniChange's sentences: its words are single tokens, all text has tokens.

    It is the same whichever tasks the base is taught.
    """
    tasks = curriculum(levels)
    rng = np.random.default_rng(seed)
    texts = ["system user assistant"] * 50
    texts += references((), 5) * 50
    for number in range(6_000):
        task, level = tasks[number % len(tasks)], LEVELS[levels[number // len(tasks) % len(levels)]]
        question, answer = task.ask(rng, [level.sample_scene(rng) for _ in range(task.images)])
        changes = level.sample_pair(rng, (CHANGE_TYPES[number % 12],))[3]
        texts += [f"{question} {answer}", references(changes, 5)[number % 5]]
    bpe = Tokenizer(models.BPE())
    stock: Any = Qwen2Tokenizer().backend_tokenizer
    bpe.normalizer, bpe.pre_tokenizer, bpe.decoder = stock.normalizer, stock.pre_tokenizer, stock.decoder
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        min_frequency=20,
        special_tokens=[],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    trained: dict[str, Any] = json.loads(bpe.to_str())["model"]
    merges: Any = [tuple(merge) for merge in trained["merges"]]
    return Qwen2Tokenizer(
        vocab=trained["vocab"],
        merges=merges,
        eos_token="<|im_end|>",
        additional_special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL],
    )


def make_config(cfg: Pretrain, processor: M3DiffProcessor) -> LlavaOnevisionConfig:
    """A SigLIP vision encoder, a projector and a Qwen2 language model, all of one width."""
    token = processor.tokenizer.convert_tokens_to_ids
    width = cfg.width
    return LlavaOnevisionConfig(
        vision_config={
            "model_type": "siglip_vision_model",
            "hidden_size": width,
            "intermediate_size": 2 * width,
            "num_hidden_layers": cfg.vision_layers,
            "num_attention_heads": 4,
            "image_size": cfg.vision_px,
            "patch_size": cfg.patch_px,
            "vision_use_head": False,
        },
        text_config={
            "model_type": "qwen2",
            "vocab_size": len(processor.tokenizer),
            "hidden_size": width,
            "intermediate_size": 2 * width,
            "num_hidden_layers": cfg.text_layers,
            "num_attention_heads": 4,
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
