"""Create a tiny BLIP-2 with OPT or Qwen2, in a folder like those of the published models."""

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import Blip2ForConditionalGeneration, PreTrainedTokenizerFast

from m3diff.models.blip2idc import Augment, Blip2IDCSettings
from m3diff.models.blip2idc_model import Blip2IDCConfig
from m3diff.models.settings import Lora

WIDTH = 16
SIDE = 32
PATCH = 8
QUERIES = 5
RATES = {"vision": 3e-3, "projector": None, "module": 3e-3, "llm": 3e-3}
CLIP_MEAN = [0.48145466, 0.4578275, 0.40821073]
CLIP_STD = [0.26862954, 0.26130258, 0.27577711]
WORDS = ("Ġthe", "Ġred", "Ġball", "Ġmoved", "Ġis", "Ġgone", "the", "Ġa", "Ġblue", "Ġstar", "nothing", "Ġchanged")


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Return a small OPT tokenizer: bytes and a few words, as in GPT-2.

    The token <pad> is 1, </s> (2) starts and ends a text, and <image> is the last token.
    """
    specials = ["<s>", "<pad>", "</s>", "<unk>"]
    names = [*specials, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    merges: list[tuple[str, str]] = []
    for word in WORDS:
        for end in range(2, len(word) + 1):
            if word[:end] not in names:
                names.append(word[:end])
                merges.append((word[: end - 1], word[end - 1]))
    tokenizer = Tokenizer(models.BPE({name: number for number, name in enumerate(names)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing("</s> $A", "</s> $A $B", [("</s>", 2)])
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in (*specials, "<image>")])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="</s>", eos_token="</s>", unk_token="</s>", pad_token="<pad>"
    )


SIZES = {"hidden_size": WIDTH, "num_attention_heads": 2, "num_hidden_layers": 2}


def opt_text(tokenizer: Any) -> dict[str, Any]:
    """Return the published configuration of OPT with small sizes. It has the same fields as the published one."""
    llm_fields = {
        "model_type": "opt",
        "eos_token_id": tokenizer.convert_tokens_to_ids("Ċ"),
        "word_embed_proj_dim": WIDTH,
    }
    vocabulary = -(-len(tokenizer) // 32) * 32
    return SIZES | llm_fields | {"ffn_dim": 2 * WIDTH, "max_position_embeddings": 128, "vocab_size": vocabulary}


def qwen2_text(tokenizer: Any) -> dict[str, Any]:
    llm_fields = {
        "model_type": "qwen2",
        "bos_token_id": 2,
        "eos_token_id": 2,
        "pad_token_id": 1,
        "num_key_value_heads": 1,
    }
    vocabulary = -(-len(tokenizer) // 32) * 32
    return (
        SIZES | llm_fields | {"intermediate_size": 2 * WIDTH, "max_position_embeddings": 128, "vocab_size": vocabulary}
    )


TEXTS = {"opt": opt_text, "qwen2": qwen2_text}


def published_config(llm: str = "opt") -> dict[str, Any]:
    """Return config.json of Salesforce/blip2-opt-2.7b with small sizes and the original dropout of the Q-Former."""
    tokenizer = tiny_tokenizer()
    qformer = {"hidden_size": 2 * WIDTH, "intermediate_size": 4 * WIDTH, "model_type": "blip_2_qformer"}
    vision = {"attention_dropout": 0.1, "dropout": 0.0, "image_size": SIDE, "intermediate_size": 2 * WIDTH}
    return {
        "architectures": ["Blip2ForConditionalGeneration"],
        "image_token_index": tokenizer.convert_tokens_to_ids("<image>"),
        "model_type": "blip-2",
        "num_query_tokens": QUERIES,
        "qformer_config": qformer | {"num_attention_heads": 4, "num_hidden_layers": 3},
        "text_config": TEXTS[llm](tokenizer),
        "torch_dtype": "float32",
        "vision_config": SIZES | vision | {"model_type": "blip_2_vision_model", "patch_size": PATCH},
    }


def tiny_config(llm: str = "opt") -> Blip2IDCConfig:
    fields = {name: value for name, value in published_config(llm).items() if name not in ("model_type", "torch_dtype")}
    return Blip2IDCConfig(**fields)


def randomised(model: torch.nn.Module) -> torch.nn.Module:
    """Randomise all weights so that each affects the output. transformers initialises a vision encoder with 1e-10."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            norm = "norm" in name.lower() and name.endswith("weight")
            parameter.copy_(norm + torch.randn_like(parameter) * (0.1 if parameter.dim() < 2 else 0.25))
        if hasattr(model, "language_model"):
            model.language_model.tie_weights()
    return model


def tiny_blip2(folder: Path, llm: str = "opt", seed: int = 0) -> Path:
    """Write a BLIP-2 with random weights and the files of the published model, including shards with an index."""
    folder.mkdir(parents=True)
    torch.manual_seed(seed)
    randomised(Blip2ForConditionalGeneration(tiny_config(llm))).save_pretrained(folder, max_shard_size="60KB")
    (folder / "config.json").write_text(json.dumps(published_config(llm), indent=2))
    write_processor(folder)
    eos = published_config(llm)["text_config"]["eos_token_id"]
    generation = {"_from_model_config": True, "bos_token_id": 2, "eos_token_id": eos, "pad_token_id": 1}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def write_processor(folder: Path) -> None:
    """Write preprocessor_config.json, processor_config.json and the files of the tokenizer."""
    size = {"height": SIDE, "width": SIDE}
    does = ("do_convert_rgb", "do_normalize", "do_rescale", "do_resize")
    preprocessor = {**dict.fromkeys(does, True), "image_mean": CLIP_MEAN, "image_std": CLIP_STD, "size": size}
    preprocessor |= {"image_processor_type": "BlipImageProcessor", "processor_class": "Blip2Processor"}
    preprocessor |= {"resample": 3, "rescale_factor": 0.00392156862745098}
    image = {"__type": "AddedToken", "content": "<image>", "lstrip": False, "normalized": False, "rstrip": False}
    image |= {"single_word": False, "special": True}
    processor = {"image_token": image, "num_query_tokens": QUERIES, "processor_class": "Blip2Processor"}
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(folder)
    bpe = json.loads((folder / "tokenizer.json").read_text())["model"]
    (folder / "vocab.json").write_text(json.dumps(bpe["vocab"]))
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *(" ".join(pair) for pair in bpe["merges"])]))
    specials = {"bos_token": "</s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "</s>"}
    (folder / "special_tokens_map.json").write_text(json.dumps(specials))
    tokenizer_config = json.loads((folder / "tokenizer_config.json").read_text())
    tokenizer_config |= {
        "processor_class": "Blip2Processor",
        "tokenizer_class": "GPT2Tokenizer",
        "add_prefix_space": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    (folder / "preprocessor_config.json").write_text(json.dumps(preprocessor))
    (folder / "processor_config.json").write_text(json.dumps(processor))


def blip2_settings(rank: int = 2, augment: Augment | None = None, **rates: float | None) -> Blip2IDCSettings:
    """Return the settings of a tiny BLIP2IDC. `rates` changes the learning rates of its parts."""
    return Blip2IDCSettings("blip2idc", Lora(rank, 2 * rank or 1), RATES | rates, augment=augment)
