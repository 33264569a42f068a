"""A tiny llava-hf/llava-1.5-7b-hf with the same weight names, shards, parts (CLIP and Llama) and kind of tokenizer."""

import json
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors
from transformers import LlavaConfig, LlavaForConditionalGeneration

from tests.tiny_blip2 import CLIP_MEAN, CLIP_STD

WIDTH = 16
SIDE = 28
PATCH = 14
LAYERS = 4
TEXTS = "the red ball moved is gone a small blue star appeared at left nothing changed What ? USER: ASSISTANT: : ."
CHAT = (
    "{% for message in messages %}{% if message['role'] != 'system' %}{{ message['role'].upper() + ': '}}{% endif %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\n' }}{% endfor %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}{{ content['text'] + ' '}}"
    "{% endfor %}{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)


def write_tokenizer(folder: Path) -> int:
    """Write a tokenizer of bytes, a few words and Llama's special tokens. Return its number of tokens."""
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    letters = sorted(set(TEXTS) - {" "})
    for piece in ["\u2581", *letters]:
        vocabulary.setdefault(piece, len(vocabulary))
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    special = ("<unk>", "<s>", "</s>", "<image>", "<pad>")
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    (folder / "special_tokens_map.json").write_text(json.dumps(names))
    (folder / "tokenizer_config.json").write_text(json.dumps(names | {"tokenizer_class": "LlamaTokenizer"}))
    return tokenizer.get_vocab_size()


def tiny_config(vocabulary: int, image: int, pad: int) -> LlavaConfig:
    size = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_attention_heads": 2}
    llama = {"model_type": "llama", "num_hidden_layers": 2, "vocab_size": vocabulary, "rms_norm_eps": 1e-05}
    clip = {"model_type": "clip_vision_model", "num_hidden_layers": LAYERS, "image_size": SIDE, "patch_size": PATCH}
    return LlavaConfig(
        text_config={**llama, **size, "num_key_value_heads": 2, "max_position_embeddings": 4096},
        vision_config={**clip, **size, "projection_dim": 12},
        image_token_index=image,
        pad_token_id=pad,
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
    )


def write_llava15(folder: Path) -> Path:
    """Write the whole folder of the model, with random weights."""
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = write_tokenizer(folder)
    token = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    ids = {added_token["content"]: added_token["id"] for added_token in token}
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": CHAT}))
    processing = {"do_center_crop": True, "do_resize": True, "resample": 3, "size": {"shortest_edge": SIDE}}
    processing |= {"crop_size": {"height": SIDE, "width": SIDE}, "image_mean": CLIP_MEAN, "image_std": CLIP_STD}
    processing |= {"image_processor_type": "CLIPImageProcessor", "processor_class": "LlavaProcessor"}
    (folder / "preprocessor_config.json").write_text(json.dumps(processing))
    names = {"patch_size": PATCH, "vision_feature_select_strategy": "default", "processor_class": "LlavaProcessor"}
    (folder / "processor_config.json").write_text(json.dumps(names))
    torch.manual_seed(0)
    model = LlavaForConditionalGeneration(tiny_config(vocabulary, ids["<image>"], ids["<pad>"]))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder, max_shard_size="30KB")  # by the names of the release
    (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": 2}))
    return folder
