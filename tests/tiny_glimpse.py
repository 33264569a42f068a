"""Add the toy family Glimpse to the families, and create a tiny base of it with random weights."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from m3diff.models import FAMILIES
from m3diff.models.settings import Lora
from tests.glimpse import MARK, GlimpseSettings, classes

WIDTH = 32  # a multiple of the width of the attention's square weights, whose transposition no shape would show


@contextmanager
def added_family() -> Iterator[None]:
    """Add the line of Glimpse to the families within the block."""
    FAMILIES.data["glimpse"] = "tests.glimpse"
    try:
        yield
    finally:
        del FAMILIES.data["glimpse"]


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per byte."""
    specials = ["<pad>", "</s>", MARK]
    names = [*specials, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({name: number for number, name in enumerate(names)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in specials])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", pad_token="<pad>")


def tiny_glimpse(folder: Path, seed: int = 1) -> Path:
    """Write a Glimpse with random weights."""
    torch.manual_seed(seed)
    tokenizer = byte_tokenizer()
    model_class, processor_class = classes()
    text = {"n_embd": WIDTH, "n_head": 2, "n_layer": 2, "n_positions": 256, "vocab_size": len(tokenizer)}
    text |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    text |= {"bos_token_id": tokenizer.eos_token_id, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": 0}
    config = model_class.config_class(text_config=text, image_token_index=tokenizer.convert_tokens_to_ids(MARK))
    model = model_class(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(5)
    model.save_pretrained(folder)
    processor_class(tokenizer, config.patch, config.side).save_pretrained(folder)
    return folder


def glimpse_settings(rank: int = 2) -> GlimpseSettings:
    """Return settings that train all parts of a tiny Glimpse."""
    rates = {"vision": 3e-3, "projector": 3e-3, "llm": 3e-3}
    return GlimpseSettings("glimpse", Lora(rank, 2 * rank or 1), rates)
