"""FLOPs of a training sequence, counted while a model without storage runs forward once.

Linears, convolutions and attention count: the rest is under 1 %. What backward computes is autograd's: the gradient of
an input where something before it trains, and that of a weight where it trains.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.overrides import TorchFunctionMode
from transformers.modeling_layers import GradientCheckpointingLayer

ADAPTERS = "LoRA"  # the term of a sequence's adapters, which a merged model has not


@dataclass
class Term:
    """FLOPs of a part for one sequence. One multiply-add is 2 FLOP; causal attention counts half its square.

    Attributes:
        recomputed: the forward that activation checkpointing `full` runs again, which `total` leaves out.
    """

    name: str
    forward: float = 0.0
    backward: float = 0.0
    recomputed: float = 0.0

    @property
    def total(self) -> float:
        return self.forward + self.backward


class Counter(TorchFunctionMode):
    """Counts each product of a model into the term of its part; attention is of the linears before it."""

    def __init__(self, model: Any, family: Any) -> None:
        super().__init__()
        names = [name for part in family.parts for name in (part, f"{part} attention")]
        self.terms = {name: Term(name) for name in (*names, ADAPTERS, "head")}
        self.part, self.is_recomputed = "", False
        self.linears: dict[nn.Module, tuple[str, str, bool]] = {}
        modules = dict(model.named_modules())
        layers = tuple(f"{name}." for name, one in modules.items() if isinstance(one, GradientCheckpointingLayer))
        for name, module in modules.items():
            if isinstance(module, nn.Linear | nn.Conv2d):
                part = family.part_of(f"{name}.")
                term = "head" if module is model.get_output_embeddings() else part
                term = ADAPTERS if ".lora_" in name else term
                self.linears[module] = term, part, name.startswith(layers)

    def product(self, module: Any, given: Sequence[Tensor], output: Tensor) -> None:
        """Count the product of a linear; afterwards its part is the current one."""
        if module not in self.linears:
            return
        term, self.part, self.is_recomputed = self.linears[module]
        rows = output.numel() / len(module.weight)
        self.add(term, 2 * module.weight.numel() * rows, given[0].requires_grad + module.weight.requires_grad)

    def add(self, name: str, flops: float, gradients: int) -> None:
        term = self.terms[name]
        term.forward += flops
        term.backward += gradients * flops
        term.recomputed += flops if self.is_recomputed and gradients else 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is nn.functional.scaled_dot_product_attention:
            query, key = args[:2]
            square = 4 * query.numel() * key.shape[-2]
            square = square if kwargs.get("attn_mask") is None else square / 2  # the LLM's alone has a mask
            self.add(f"{self.part} attention", square, 2 * key.requires_grad)
        return func(*args, **kwargs)


def count_flops(model: Any, family: Any, tokens: float, supervised: float) -> list[Term]:
    """The terms of one sequence of one pair, by part.

    Args:
        model: of `meta_model`, of a `Family`.
        tokens: of the sequence, with the places of the images.
        supervised: how many of them meet the head.
    """
    count, config = round(tokens), model.config
    ids = torch.zeros(1, count, dtype=torch.long)
    ids[:, : config.image_tokens] = config.image_token_index
    place = ids.to("meta")
    mask = torch.ones((), dtype=torch.bool, device="meta").expand(1, 1, count, count)  # of four dimensions: passed on
    inputs = {"input_ids": place, "position_ids": place, "attention_mask": mask, "tokens": ids, "use_cache": False}
    with Counter(model.train(), family) as counter, register_module_forward_hook(counter.product):
        model(**inputs, **model.blank_images(config, "meta"), logits_to_keep=math.ceil(supervised))
    return [term for term in counter.terms.values() if term.forward]
