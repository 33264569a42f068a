"""Create tiny vision-language models with random weights, in the folders that transformers publishes for their bases.

Each base has the files of the published folders: config.json, weights, tokenizer, chat template, and the configuration
of the image processor and of the video processor. The files of the processor are written by hand, because the classes
of some processors cannot be constructed without torchvision.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers.feature_extraction_utils import BatchFeature
from transformers.image_processing_utils import BaseImageProcessor
from transformers.processing_utils import ImagesKwargs

from m3diff.datasets.minichange.language import references
from m3diff.datasets.minichange.render import render
from m3diff.datasets.minichange.scene import SAMPLERS, Change

WIDTH = 64
HALF = [0.5, 0.5, 0.5]
VOCABULARY = 600
BYTES = pre_tokenizers.ByteLevel.alphabet()
WORDS_OF_TEMPLATES = "What has changed from the first image to the second? user assistant model User Assistant : . "

TEXT = {
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "bos_token_id": None,
}
VISION = {
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "image_size": 64,
    "patch_size": 8,
}

# Chat templates, shortened, but with the order of images and texts and the end tokens of the published ones

QWEN_TEMPLATE = (
    "{% for m in messages %}{{'<|im_start|>'+m.role+'\n'}}"
    "{% if m.content is string %}{{m.content}}{% else %}{% for c in m.content %}"
    "{% if c.type=='image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif c.type=='video' %}<|vision_start|><|video_pad|><|vision_end|>{% else %}{{c.text}}{% endif %}"
    "{% endfor %}{% endif %}{{'<|im_end|>\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{'<|im_start|>assistant\n'}}{% endif %}"
)
THINKING = (
    "{% if enable_thinking is defined and enable_thinking is false %}{{'<think>\n\n</think>\n\n'}}"
    "{% else %}{{'<think>\n'}}{% endif %}"
)
# The last answer has an empty thought, and earlier answers have none
QWEN_THINKING_TEMPLATE = (QWEN_TEMPLATE.removesuffix("{% endif %}") + THINKING + "{% endif %}").replace(
    "{% if m.content is string %}",
    "{% if m.role=='assistant' and loop.last %}{{'<think>\n\n</think>\n\n'}}{% endif %}{% if m.content is string %}",
)
SMOLVLM_TEMPLATE = (
    "<|im_start|>{% for m in messages %}{{m.role|capitalize}}"
    "{% if m.content[0]['type']=='image' %}{{':'}}{% else %}{{': '}}{% endif %}"
    "{% for c in m.content %}{% if c.type=='text' %}{{c.text}}{% elif c.type=='image' %}{{'<image>'}}{% endif %}"
    "{% endfor %}<end_of_utterance>\n{% endfor %}{% if add_generation_prompt %}{{'Assistant:'}}{% endif %}"
)
INTERNVL_TEMPLATE = (
    "{% for m in messages %}{{'<|im_start|>'+m.role+'\n'}}"
    "{% if m.content is string %}{{m.content}}{% else %}{% for c in m.content %}"
    "{% if c.type=='image' %}{{'<IMG_CONTEXT>\n'}}{% else %}{{c.text}}{% endif %}{% endfor %}{% endif %}"
    "{{'<|im_end|>\n'}}{% endfor %}{% if add_generation_prompt %}{{'<|im_start|>assistant\n'}}{% endif %}"
)
GEMMA3_TEMPLATE = (
    "{{bos_token}}{% for m in messages %}{% set r = 'model' if m.role=='assistant' else m.role %}"
    "{{'<start_of_turn>'+r+'\n'}}{% if m.content is string %}{{m.content|trim}}{% else %}{% for c in m.content %}"
    "{% if c.type=='image' %}{{'<start_of_image>'}}{% else %}{{c.text|trim}}{% endif %}{% endfor %}{% endif %}"
    "{{'<end_of_turn>\n'}}{% endfor %}{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"
)
GEMMA4_TEMPLATE = (
    "{{bos_token}}{% for m in messages %}{% set r = 'model' if m.role=='assistant' else m.role %}"
    "{{'<|turn>'+r+'\n'}}{% if m.content is string %}{{m.content|trim}}{% else %}{% for c in m.content %}"
    "{% if c.type=='image' %}{{'<|image|>'}}{% else %}{{c.text|trim}}{% endif %}{% endfor %}{% endif %}"
    "{{'<turn|>\n'}}{% endfor %}{% if add_generation_prompt %}{{'<|turn>model\n'}}{% endif %}"
)
LFM2_TEMPLATE = (
    "{{bos_token}}{% for m in messages %}{{'<|im_start|>'+m.role+'\n'}}"
    "{% if m.content is string %}{{m.content}}{% else %}{% for c in m.content %}"
    "{% if c.type=='image' %}<image>{% else %}{{c.text}}{% endif %}{% endfor %}{% endif %}"
    "{{'<|im_end|>\n'}}{% endfor %}{% if add_generation_prompt %}{{'<|im_start|>assistant\n'}}{% endif %}"
)
ONEVISION_TEMPLATE = (
    "{% for m in messages %}{{'<|im_start|>'+m.role+' '}}{% if m.content is string %}{{'\n'+m.content}}{% else %}"
    "{% for c in m.content %}{% if c.type=='image' %}<image>{% endif %}{% endfor %}"
    "{% for c in m.content %}{% if c.type=='text' %}{{'\n'+c.text}}{% endif %}{% endfor %}{% endif %}"
    "{{'<|im_end|>'}}{% endfor %}{% if add_generation_prompt %}{{'<|im_start|>assistant\n'}}{% endif %}"
)


# Pairs


class TinyPair(NamedTuple):
    """A pair of MiniChange.

    Attributes:
        images: the image before and the image after.
        captions: paraphrases of the change.
        inverse_captions: paraphrases of the change from the second image to the first.
    """

    images: tuple[Image.Image, Image.Image]
    captions: list[str]
    inverse_captions: list[str]


@functools.cache
def minichange_pairs(count: int = 8) -> tuple[TinyPair, ...]:
    """Return pairs in which an object changes its colour. They are 96 x 96 and 128 x 80 pixels large by turns."""
    rng = np.random.default_rng(20261124)
    pairs = []
    for number in range(count):
        sample = SAMPLERS["grid"].sample_pair(rng, ("color",))
        (change,) = sample.changes
        before, after = (render(scene, 96, rng) for scene in (sample.before, sample.after))
        if number % 2:
            before = before.resize((128, 80))
            after = after.resize((128, 80))
        inverse_change = Change(change.type, before=change.after, after=change.before, word=change.word)
        pairs.append(TinyPair((before, after), references((change,), 3), references((inverse_change,), 3)))
    return tuple(pairs)


# Bases


@dataclass
class TinyBase:
    """The content of a base's folder.

    Attributes:
        config: configuration of the model.
        tokenizer: the tokenizer.
        template: the chat template.
        template_file: the file that contains it.
        files: content of the JSON files of the processor.
    """

    config: Any
    tokenizer: Any
    template: str
    template_file: str = "chat_template.jinja"
    files: dict[str, Any] = field(default_factory=dict)


def train_tokenizer(
    special_tokens: Sequence[str],
    eos: str,
    pad: str,
    named_tokens: dict[str, str] | None = None,
    bos: str | None = None,
) -> Any:
    """Return a byte-level BPE tokenizer that was trained on the captions of the pairs.

    Args:
        special_tokens: the special tokens.
        eos, pad, bos: which of them end a text, fill it and begin it.
        named_tokens: special tokens that are attributes of the tokenizer, such as `image_token`.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    texts = [WORDS_OF_TEMPLATES]
    for pair in minichange_pairs():
        texts += pair.captions + pair.inverse_captions
    all_tokens = [*special_tokens, *(named_tokens or {}).values()]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=all_tokens, initial_alphabet=BYTES, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    attributes: dict[str, Any] = {"eos_token": eos, "pad_token": pad}
    if bos is not None:
        attributes["bos_token"] = bos
        # as in the published tokenizers: a text gets the token unless `add_special_tokens` is False
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    if named_tokens:
        attributes["extra_special_tokens"] = named_tokens
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **attributes)


def text_config(tokenizer: Any, **fields: Any) -> dict[str, Any]:
    """Return the configuration of an LLM with this tokenizer."""
    ids = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    return TEXT | ids | fields


QWEN_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|image_pad|>", "<|video_pad|>"]
QWEN_TOKENS += ["<|vision_start|>", "<|vision_end|>"]
QWEN_ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
QWEN_IMAGES = {
    "size": {"shortest_edge": 32 * 32, "longest_edge": 160 * 160},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": HALF,
    "image_std": HALF,
    "processor_class": "Qwen3VLProcessor",
    "image_processor_type": "Qwen2VLImageProcessorFast",
}
QWEN_VIDEOS = QWEN_IMAGES | {"fps": 2, "max_frames": 8, "video_processor_type": "Qwen3VLVideoProcessor"}
del QWEN_VIDEOS["image_processor_type"]
QWEN_FILES = {"preprocessor_config.json": QWEN_IMAGES, "video_preprocessor_config.json": QWEN_VIDEOS}
QWEN_VISION = {
    "depth": 4,
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_heads": 4,
    "out_hidden_size": WIDTH,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 64,
}


def qwen_ids(tokenizer: Any) -> dict[str, int]:
    names = ("image", "video", "vision_start", "vision_end")
    tokens = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
    return {
        f"{name}_token_id": tokenizer.convert_tokens_to_ids(token) for name, token in zip(names, tokens, strict=True)
    }


def qwen3_vl() -> TinyBase:
    tokenizer = train_tokenizer(QWEN_TOKENS, "<|im_end|>", "<|endoftext|>")
    config = transformers.Qwen3VLConfig(
        text_config=text_config(tokenizer, rope_parameters=QWEN_ROPE, rope_scaling=QWEN_ROPE, tie_word_embeddings=True),
        vision_config=QWEN_VISION | {"deepstack_visual_indexes": [0, 1]},
        tie_word_embeddings=True,
        **qwen_ids(tokenizer),
    )
    return TinyBase(config, tokenizer, QWEN_TEMPLATE, "chat_template.json", QWEN_FILES)


def qwen3_5() -> TinyBase:
    tokenizer = train_tokenizer([*QWEN_TOKENS, "<think>", "</think>"], "<|im_end|>", "<|endoftext|>")
    linear_attention = {
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "layer_types": ["linear_attention", "full_attention"] * 2,
    }
    rope = QWEN_ROPE | {"partial_rotary_factor": 1.0}
    config = transformers.Qwen3_5Config(
        text_config=text_config(tokenizer, rope_parameters=rope, tie_word_embeddings=True, **linear_attention),
        vision_config=QWEN_VISION,
        tie_word_embeddings=True,
        **qwen_ids(tokenizer),
    )
    return TinyBase(config, tokenizer, QWEN_THINKING_TEMPLATE, files=QWEN_FILES)


TILE_TOKENS = [f"<row_{row}_col_{column}>" for row in range(1, 4) for column in range(1, 4)]
SMOLVLM_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<end_of_utterance>", "<image>"]
SMOLVLM_TOKENS += ["<fake_token_around_image>", "<global-img>", *TILE_TOKENS]
SMOLVLM_IMAGES = {
    "size": {"longest_edge": 128},
    "max_image_size": {"longest_edge": 64},
    "do_image_splitting": True,
    "image_mean": HALF,
    "image_std": HALF,
}


def smolvlm() -> TinyBase:
    tokenizer = train_tokenizer(SMOLVLM_TOKENS, "<end_of_utterance>", "<|im_end|>")
    config = transformers.SmolVLMConfig(
        text_config=text_config(tokenizer, model_type="llama"),
        vision_config=VISION,
        scale_factor=2,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=False,
    )
    # the configuration of the videos is a field of the configuration of the images
    videos = {"fps": 1, "max_frames": 8, "video_size": {"longest_edge": 64}}
    images = SMOLVLM_IMAGES | {
        "image_processor_type": "SmolVLMImageProcessor",
        "processor_class": "SmolVLMProcessor",
        "video_sampling": videos,
    }
    files = {
        "preprocessor_config.json": images,
        "processor_config.json": {"image_seq_len": 16, "processor_class": "SmolVLMProcessor"},
    }
    return TinyBase(config, tokenizer, SMOLVLM_TEMPLATE, "chat_template.json", files)


def idefics3() -> TinyBase:
    tokenizer = train_tokenizer(SMOLVLM_TOKENS, "<end_of_utterance>", "<|im_end|>")
    config = transformers.Idefics3Config(
        text_config=text_config(tokenizer, model_type="llama"),
        vision_config=VISION,
        scale_factor=2,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=False,
    )
    images = SMOLVLM_IMAGES | {"image_processor_type": "Idefics3ImageProcessor", "processor_class": "Idefics3Processor"}
    files = {
        "preprocessor_config.json": images,
        "processor_config.json": {"image_seq_len": 16, "processor_class": "Idefics3Processor"},
    }
    return TinyBase(config, tokenizer, SMOLVLM_TEMPLATE, "chat_template.json", files)


def internvl() -> TinyBase:
    named_tokens = {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    }
    special_tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer = train_tokenizer(special_tokens, "<|im_end|>", "<|endoftext|>", named_tokens)
    config = transformers.InternVLConfig(
        text_config=text_config(tokenizer, model_type="qwen3"),
        vision_config=VISION | {"image_size": [64, 64], "patch_size": [8, 8]},
        image_token_id=tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>"),
        image_seq_length=16,
        downsample_ratio=0.5,
    )
    images = {
        "image_processor_type": "GotOcr2ImageProcessorFast",
        "processor_class": "InternVLProcessor",
        "size": {"height": 64, "width": 64},
        "crop_to_patches": True,
        "min_patches": 1,
        "max_patches": 4,
        "image_mean": HALF,
        "image_std": HALF,
    }
    videos = {"video_processor_type": "InternVLVideoProcessor", "size": {"height": 64, "width": 64}}
    files = {
        "preprocessor_config.json": images,
        "processor_config.json": {"image_seq_length": 16, "processor_class": "InternVLProcessor"},
        "video_preprocessor_config.json": videos,
    }
    return TinyBase(config, tokenizer, INTERNVL_TEMPLATE, files=files)


def gemma3() -> TinyBase:
    named_tokens = {
        "image_token": "<image_soft_token>",
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
    }
    special_tokens = ["<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"]
    tokenizer = train_tokenizer(special_tokens, "<end_of_turn>", "<pad>", named_tokens, bos="<bos>")
    token_id = tokenizer.convert_tokens_to_ids
    layers = {
        "sliding_window": 24,
        "query_pre_attn_scalar": 16,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    }
    config = transformers.Gemma3Config(
        text_config=text_config(tokenizer, bos_token_id=tokenizer.bos_token_id, **layers),
        vision_config=VISION | {"vision_use_head": False},
        mm_tokens_per_image=16,
        image_token_index=token_id("<image_soft_token>"),
        boi_token_index=token_id("<start_of_image>"),
        eoi_token_index=token_id("<end_of_image>"),
        tie_word_embeddings=True,
    )
    images = {
        "image_processor_type": "Gemma3ImageProcessor",
        "processor_class": "Gemma3Processor",
        "do_pan_and_scan": None,
        "size": {"height": 64, "width": 64},
        "image_mean": HALF,
        "image_std": HALF,
    }
    files = {
        "preprocessor_config.json": images,
        "processor_config.json": {"image_seq_length": 16, "processor_class": "Gemma3Processor"},
    }
    return TinyBase(config, tokenizer, GEMMA3_TEMPLATE, "chat_template.json", files)


def gemma4() -> TinyBase:
    named_tokens = {
        "image_token": "<|image|>",
        "boi_token": "<|image>",
        "eoi_token": "<image|>",
        "audio_token": "<|audio|>",
        "boa_token": "<|audio>",
        "eoa_token": "<audio|>",
    }
    special_tokens = ["<pad>", "<eos>", "<bos>", "<|turn>", "<turn|>", "<|video|>"]
    tokenizer = train_tokenizer(special_tokens, "<turn|>", "<pad>", named_tokens, bos="<bos>")
    token_id = tokenizer.convert_tokens_to_ids
    layers = {
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "global_head_dim": 32,
        "vocab_size_per_layer_input": len(tokenizer),
        "hidden_size_per_layer_input": 16,
        "num_kv_shared_layers": 0,
    }
    vision = {
        "hidden_size": WIDTH,
        "intermediate_size": 2 * WIDTH,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "patch_size": 4,
        "pooling_kernel_size": 2,
        "position_embedding_size": 64,
    }
    config = transformers.Gemma4Config(
        text_config=text_config(tokenizer, bos_token_id=tokenizer.bos_token_id, **layers),
        vision_config=vision,
        audio_config=None,
        image_token_id=token_id("<|image|>"),
        boi_token_id=token_id("<|image>"),
        eoi_token_id=token_id("<image|>"),
        video_token_id=token_id("<|video|>"),
        audio_token_id=token_id("<|audio|>"),
        boa_token_id=token_id("<|audio>"),
        eoa_token_index=token_id("<audio|>"),
        tie_word_embeddings=True,
    )
    images = {
        "image_processor_type": "Gemma4ImageProcessor",
        "patch_size": 4,
        "pooling_kernel_size": 2,
        "max_soft_tokens": 70,
    }
    videos = images | {"video_processor_type": "Gemma4VideoProcessor", "num_frames": 8}
    del videos["image_processor_type"]
    processor = {
        "processor_class": "Gemma4Processor",
        "image_seq_length": 70,
        "image_processor": images,
        "video_processor": videos,
        "feature_extractor": {"feature_extractor_type": "Gemma4AudioFeatureExtractor", "feature_size": 128},
    }
    return TinyBase(config, tokenizer, GEMMA4_TEMPLATE, files={"processor_config.json": processor})


ONEVISION_GRIDS = [[64, 64], [64, 128], [128, 64], [128, 128]]


def llava_onevision() -> TinyBase:
    special_tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<image>", "<video>"]
    tokenizer = train_tokenizer(special_tokens, "<|im_end|>", "<|endoftext|>")
    config = transformers.LlavaOnevisionConfig(
        text_config=text_config(tokenizer, model_type="qwen2", tie_word_embeddings=True),
        vision_config=VISION | {"model_type": "siglip_vision_model", "vision_use_head": False},
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        video_token_index=tokenizer.convert_tokens_to_ids("<video>"),
        image_grid_pinpoints=ONEVISION_GRIDS,
        tie_word_embeddings=True,
    )
    images = {
        "image_processor_type": "LlavaOnevisionImageProcessor",
        "processor_class": "LlavaOnevisionProcessor",
        "size": {"height": 64, "width": 64},
        "image_grid_pinpoints": ONEVISION_GRIDS,
        "image_mean": HALF,
        "image_std": HALF,
    }
    videos = {"video_processor_type": "LlavaOnevisionVideoProcessor", "size": {"height": 64, "width": 64}}
    files = {
        "preprocessor_config.json": images,
        "video_preprocessor_config.json": videos,
        "processor_config.json": {
            "num_image_tokens": 64,
            "processor_class": "LlavaOnevisionProcessor",
            "vision_feature_select_strategy": "full",
        },
    }
    return TinyBase(config, tokenizer, ONEVISION_TEMPLATE, "chat_template.json", files)


def lfm2_vl() -> TinyBase:
    named_tokens = {
        "image_token": "<image>",
        "image_start_token": "<|image_start|>",
        "image_end_token": "<|image_end|>",
        "image_thumbnail": "<|img_thumbnail|>",
    }
    special_tokens = ["<|pad|>", "<|startoftext|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    special_tokens += [f"<|img_row_{row}_col_{column}|>" for row in range(1, 4) for column in range(1, 4)]
    tokenizer = train_tokenizer(special_tokens, "<|im_end|>", "<|pad|>", named_tokens, bos="<|startoftext|>")
    layers = {
        "layer_types": ["conv", "full_attention"] * 2,
        "block_ff_dim": 2 * WIDTH,
        "block_auto_adjust_ff_dim": False,
        "tie_word_embeddings": True,
    }
    vision = {name: value for name, value in VISION.items() if name != "image_size"} | {"num_patches": 64}
    config = transformers.Lfm2VlConfig(
        text_config=text_config(tokenizer, bos_token_id=tokenizer.bos_token_id, **layers),
        vision_config=vision,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        projector_hidden_size=2 * WIDTH,
        tie_word_embeddings=True,
    )
    images = {
        "image_processor_type": "Lfm2VlImageProcessorFast",
        "processor_class": "Lfm2VlProcessor",
        "encoder_patch_size": 8,
        "tile_size": 64,
        "min_image_tokens": 4,
        "max_image_tokens": 16,
        "max_num_patches": 64,
        "do_image_splitting": False,
        "image_mean": HALF,
        "image_std": HALF,
    }
    return TinyBase(config, tokenizer, LFM2_TEMPLATE, files={"preprocessor_config.json": images})


BASES: dict[str, Callable[[], TinyBase]] = {
    "qwen3_vl": qwen3_vl,
    "qwen3_5": qwen3_5,
    "gemma3": gemma3,
    "gemma4": gemma4,
    "internvl": internvl,
    "smolvlm": smolvlm,
    "idefics3": idefics3,
    "llava_onevision": llava_onevision,
    "lfm2_vl": lfm2_vl,
}
# Arguments that the chat template of a base needs
TEMPLATES = {"qwen3_5": {"enable_thinking": False}}


@torch.no_grad()
def scale_weights(model: torch.nn.Module) -> None:
    """Scale weights that are initialised for models a hundred times as wide, so that features are not all zero."""
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2 and not parameter.any():
            parameter.normal_(0, 0.125)  # the projector of Gemma 3 is zero at first
        elif "embed_tokens" in name:
            parameter.mul_(15)
        elif parameter.dim() > 1:
            parameter.mul_(5)


def tiny_vlm(name: str, folder: Path, seed: int = 0) -> Path:
    """Write the base with this name to a folder, and return the folder."""
    torch.manual_seed(seed)
    base = BASES[name]()
    model = transformers.AutoModelForImageTextToText.from_config(base.config)
    scale_weights(model)
    model.generation_config = transformers.GenerationConfig(
        eos_token_id=base.tokenizer.eos_token_id, pad_token_id=base.tokenizer.pad_token_id, do_sample=False
    )
    model.save_pretrained(folder)
    write_processor(base, folder)
    return folder


def write_processor(base: TinyBase, folder: Path) -> None:
    """Write the files of a base's processor."""
    base.tokenizer.save_pretrained(folder)
    template = base.template
    if base.template_file.endswith(".json"):
        template = json.dumps({"chat_template": template})
    (folder / base.template_file).write_text(template)
    for file, content in base.files.items():
        (folder / file).write_text(json.dumps(content, indent=2))


# A stand-in for the image processor of LFM2-VL, which needs torchvision


class Lfm2VlArguments(ImagesKwargs, total=False):
    """The arguments of the image processor that the processor passes to it."""

    return_row_col_info: bool


class Lfm2VlPatches(BaseImageProcessor):
    """Resizes each image to 64 x 64 pixels and cuts it into 64 patches, for the inputs of LFM2-VL."""

    model_input_names = ["pixel_values", "pixel_attention_mask", "spatial_shapes"]
    valid_kwargs = Lfm2VlArguments
    side = 64
    encoder_patch_size = 8
    tile_size = 64
    downsample_factor = 2
    use_thumbnail = True

    def preprocess(self, images: Any, **kwargs: Any) -> BatchFeature:
        """Return patches [I, 64, 192] in [-1, 1], their mask [I, 64], and rows and columns of the patches [I, 2]."""
        cells = self.side // self.encoder_patch_size
        all_patches = []
        for image in [image for image_set in images for image in image_set]:
            pixels = np.asarray(image.resize((self.side, self.side)), dtype=np.float32) / 127.5 - 1
            grid = pixels.reshape(cells, self.encoder_patch_size, cells, self.encoder_patch_size, 3).swapaxes(1, 2)
            all_patches.append(grid.reshape(cells * cells, -1))
        count = len(all_patches)
        data = {
            "pixel_values": np.stack(all_patches),
            "pixel_attention_mask": np.ones((count, cells * cells), dtype=np.int64),
            "spatial_shapes": np.full((count, 2), cells),
            "image_rows": [1] * count,
            "image_cols": [1] * count,
            "image_sizes": [[self.side, self.side]] * count,
        }
        return BatchFeature(data, tensor_type=kwargs.get("return_tensors"))


def lfm2_vl_processor(folder: Path) -> Any:
    """Return the processor of LFM2-VL with the stand-in."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    return transformers.Lfm2VlProcessor(Lfm2VlPatches(), tokenizer, chat_template=LFM2_TEMPLATE)
