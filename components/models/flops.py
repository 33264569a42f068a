"""Count the FLOPs of a training sequence in one forward pass on the "meta" device, which needs no memory for weights.

Only linear layers, convolutions and attention are counted. Everything else is less than 1 %. The backward pass is
counted by autograd's rules: a matrix product computes the gradient of its input if an earlier weight is trained, and
the gradient of its weight if this weight is trained.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.overrides import TorchFunctionMode
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.pytorch_utils import Conv1D

from m3diff.records.errors import ParamsError
from m3diff.records.sample import PAIR

# Name of the term for adapters. A merged model does not have them.
ADAPTERS = "LoRA"

# Layers whose product is counted. transformers' Conv1D is GPT-2's linear layer, with a transposed weight.
COUNTED_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, Conv1D)

MAX_EXAMPLES = 5  # maximum number of layers that an error message lists


@dataclass
class Term:
    """FLOPs of one part for one sequence.

    A multiply-add counts as 2 FLOPs, and causal attention as half of full attention.

    Attributes:
        name: what is counted: a part, the attention of a part, the adapters or the head.
        forward: FLOPs of the forward pass.
        backward: FLOPs of the backward pass.
        recomputed: FLOPs of the forward pass that `full` activation checkpointing repeats. They are not included in
            `total`.
    """

    name: str
    forward: float = 0.0
    backward: float = 0.0
    recomputed: float = 0.0

    @property
    def total(self) -> float:
        """FLOPs of the forward and backward pass."""
        return self.forward + self.backward


class CountedLayer(NamedTuple):
    """A linear layer or a convolution whose products are counted.

    Attributes:
        term: name of the term that the FLOPs of the layer are added to.
        part: part of the model that the layer belongs to.
        is_recomputed: whether `full` activation checkpointing repeats the layer's forward pass.
    """

    term: str
    part: str
    is_recomputed: bool


class FlopsCounter(TorchFunctionMode):
    """Adds the FLOPs of each product in a model to the term of its part.

    Attention is assigned to the part of the linear layer that ran last.

    Raises:
        ParamsError: a trained layer is of another class than COUNTED_LAYERS.

    Attributes:
        terms: term name -> FLOPs.
        last_part: part of the linear layer that ran last.
        is_recomputed: whether the forward pass of this layer is repeated.
    """

    def __init__(self, model: Any, family: Any) -> None:
        super().__init__()
        names: list[str] = []
        for part in family.parts:
            names += [part, f"{part} attention"]
        names += [ADAPTERS, "head"]
        self.terms = {name: Term(name) for name in names}
        self.last_part = ""
        self.is_recomputed = False
        self.layers: dict[nn.Module, CountedLayer] = {}
        modules = dict(model.named_modules())
        checkpointed_prefixes = tuple(
            f"{name}." for name, module in modules.items() if isinstance(module, GradientCheckpointingLayer)
        )
        for name, module in modules.items():
            if isinstance(module, COUNTED_LAYERS):
                part = family.part_of(f"{name}.")
                term = "head" if module is model.get_output_embeddings() else part
                if ".lora_" in name:
                    term = ADAPTERS
                self.layers[module] = CountedLayer(term, part, name.startswith(checkpointed_prefixes))
        require_counted_layers(modules)

    def count_product(self, module: Any, inputs: Sequence[Tensor], output: Tensor) -> None:
        """Count the product of a linear layer, and remember the layer's part. Used as a global forward hook."""
        layer = self.layers.get(module)
        if layer is None:
            return
        self.last_part = layer.part
        self.is_recomputed = layer.is_recomputed
        width = module.nf if isinstance(module, Conv1D) else len(module.weight)
        rows = output.numel() / width
        gradients = inputs[0].requires_grad + module.weight.requires_grad
        self.add(layer.term, 2 * module.weight.numel() * rows, gradients)

    def add(self, name: str, flops: float, gradients: int) -> None:
        """Add the FLOPs of a product to a term.

        Args:
            name: name of the term.
            flops: FLOPs of the product in the forward pass. Each gradient takes as many in the backward pass.
            gradients: number of gradients that the backward pass computes, 0 to 2.
        """
        term = self.terms[name]
        term.forward += flops
        term.backward += gradients * flops
        term.recomputed += flops if self.is_recomputed and gradients else 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is nn.functional.scaled_dot_product_attention:
            query, key = args[:2]
            flops = 4 * query.numel() * key.shape[-2]
            is_causal = kwargs.get("attn_mask") is not None  # only the LLM uses an attention mask
            if is_causal:
                flops /= 2
            self.add(f"{self.last_part} attention", flops, gradients=2 * key.requires_grad)
        return func(*args, **kwargs)


def require_counted_layers(modules: Mapping[str, nn.Module]) -> None:
    """Check that the products of all trained layers are counted.

    A layer is recognised by its parameter `weight`. A matrix with another name may be an input, such as the queries of
    a Q-Former. Layers with adapters need no check, because peft supports only counted layers and embeddings.

    Args:
        modules: the modules of a model, by name.

    Raises:
        ParamsError: the product of a layer is not counted.
    """
    names = []
    for name, module in modules.items():
        weight = getattr(module, "weight", None)
        is_trained_matrix = isinstance(weight, nn.Parameter) and weight.requires_grad and weight.dim() > 1
        if is_trained_matrix and not isinstance(module, (*COUNTED_LAYERS, nn.Embedding)):
            names.append(name)
    if names:
        classes = sorted({type(modules[name]).__name__ for name in names})
        raise ParamsError("models.layer_not_counted", value=len(names), names=names[:MAX_EXAMPLES], classes=classes)


def count_flops(model: Any, family: Any, tokens: float, supervised_tokens: float, images: int = PAIR) -> list[Term]:
    """Count the FLOPs of one sequence about one image set, and return the terms that are not zero.

    Args:
        model: model from `meta_model`.
        family: the model's `Family`.
        tokens: length of the sequence in tokens, including visual tokens.
        supervised_tokens: number of tokens for which the head computes logits.
        images: number of images of the image set.

    Raises:
        ParamsError: a trained layer is not counted.
    """
    length = round(tokens)
    config = model.config
    ids = torch.zeros(1, length, dtype=torch.long)
    ids[:, : config.image_tokens_of(images)] = config.image_token_index
    meta_ids = ids.to("meta")
    # transformers does not change a mask that has four dimensions
    mask = torch.ones((), dtype=torch.bool, device="meta").expand(1, 1, length, length)
    with FlopsCounter(model.train(), family) as counter, register_module_forward_hook(counter.count_product):
        model(
            input_ids=meta_ids,
            position_ids=meta_ids,
            attention_mask=mask,
            use_cache=False,
            **({"tokens": ids} if images else {}),  # tells where the visual tokens are
            **model.blank_images(config, "meta", images),
            logits_to_keep=math.ceil(supervised_tokens),
        )
    return [term for term in counter.terms.values() if term.forward]
