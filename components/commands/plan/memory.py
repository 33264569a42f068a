"""The memory that a training step holds for its backward pass, counted on a model without storage (torch's meta
device).

Forward pass and loss of one sequence run on shapes alone. A storage that is alive afterwards is one that backward
keeps, so hooks, recomputation and products in place count as they are. Attention and RMS norm keep what the fused
kernels of a GPU keep.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from m3diff.models.family import Family

LOGITS, BETWEEN, ONE_LAYER = "logits", "between parts", "one layer recomputed"


def count_activations(
    model: Any, family: Family, activation_checkpointing: str, tokens: int, supervised: int
) -> dict[str, int]:
    """Bytes that one sequence of one pair takes for backward, by part.

    Beside the family's parts: `logits`, the most that head and cross-entropy hold at a time; `between parts`; and with
    full recomputation the most that one layer holds while it is computed again.

    Args:
        model: on the meta device and as it trains: with adapters, in the precision of its weights.
        tokens: of the sequence, with the places of the images.
        supervised: how many of them have a loss.
    """
    place = torch.zeros(1, tokens, dtype=torch.long, device="meta")
    inputs = {
        "input_ids": place,
        "position_ids": place,
        "attention_mask": None,
        "logits_to_keep": (torch.arange(tokens) >= tokens - supervised)[None],  # its values are read
        "use_cache": False,
        **model.blank_images(model.config, "meta"),
    }
    labels = torch.zeros(supervised, dtype=torch.long, device="meta")
    model.train()
    family.fuse(model, activation_checkpointing)
    with OnShapes():
        held = held_for_backward(model, inputs, labels, parts_of_modules(model, family))
    if layers := recomputed_layers(model):
        family.fuse(model, "none")
        with OnShapes():
            alone = held_for_backward(model, inputs, labels, {name: name for name in layers})
        held[ONE_LAYER] = max(alone.get(name, 0) for name in layers)
        family.fuse(model, activation_checkpointing)
    return held


def parts_of_modules(model: nn.Module, family: Family) -> dict[str, str]:
    """Module -> part, of every module inside one."""
    prefixes = [(prefix, part) for part, prefixes in family.parts.items() for prefix in prefixes]
    names = [name for name, _ in model.named_modules()]
    return {name: part for name in names for prefix, part in prefixes if f"{name}.".startswith(prefix)}


def recomputed_layers(model: nn.Module) -> list[str]:
    """Layers that backward computes again from their inputs; transformers marks their containers too."""
    marked = [name for name, module in model.named_modules() if getattr(module, "gradient_checkpointing", False)]
    return [name for name in marked if not any(other.startswith(f"{name}.") for other in marked)]


def held_for_backward(
    model: Any, inputs: Mapping[str, Any], labels: Tensor, names: Mapping[str, str]
) -> dict[str, int]:
    """Bytes that are alive between forward and backward, by the name of the module that made them.

    Args:
        inputs: of the model. Neither they nor its weights count.
        labels: [supervised tokens]
        names: module -> name to count under; inside a named module the innermost name counts.
    """
    head = next(name for name, module in model.named_modules() if module is model.get_output_embeddings())
    named = {**names, head: LOGITS}
    with Storages(model, inputs) as storages:
        with storages.named(model, named):
            logits = model(**inputs).logits
        storages.name = LOGITS
        loss, logits = F.cross_entropy(logits.float(), labels, reduction="none").sum(), get_gradient_edge(logits)
        held = storages.alive()
        torch.autograd.grad(loss, logits)
    return {name: size for name, size in (held | {LOGITS: storages.most_logits}).items() if size}


class Storages(TorchDispatchMode):
    """Every storage that is made within, under the name that is current then.

    Attributes:
        name: what is made now belongs to it.
        most_logits: the most bytes that were alive under LOGITS at a time.
    """

    def __init__(self, model: nn.Module, inputs: Mapping[str, Any]) -> None:
        super().__init__()
        self.name, self.most_logits = BETWEEN, 0
        there = [*model.parameters(), *model.buffers(), *(value for value in inputs.values() if torch.is_tensor(value))]
        self.before = {StorageWeakRef(tensor.untyped_storage()) for tensor in there}
        self.made: dict[StorageWeakRef, tuple[str, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                reference = StorageWeakRef(storage)
                if reference not in self.before:
                    self.made.setdefault(reference, (self.name, storage.nbytes()))
        if self.name == LOGITS:
            self.most_logits = max(self.most_logits, self.alive().get(LOGITS, 0))
        return result

    def alive(self) -> dict[str, int]:
        """Bytes by name."""
        sizes: dict[str, int] = {}
        for reference, (name, size) in self.made.items():
            if not reference.expired():
                sizes[name] = sizes.get(name, 0) + size
        return sizes

    @contextmanager
    def named(self, model: nn.Module, names: Mapping[str, str]) -> Iterator[None]:
        """Within, a module's forward pass sets the name that it has in `names`."""
        outer: list[str] = []

        def enter(name: str, *_: Any) -> None:
            outer.append(self.name)
            self.name = name

        def leave(*_: Any) -> None:
            self.name = outer.pop()

        with ExitStack() as hooks:
            for path, module in model.named_modules():
                if path in names:
                    hooks.callback(module.register_forward_pre_hook(partial(enter, names[path])).remove)
                    hooks.callback(module.register_forward_hook(leave).remove)
            yield


class OnShapes(TorchFunctionMode):
    """Lets a model run without values: checks of values hold, a mask on the CPU selects as many tokens as it marks, and
    attention and RMS norm keep what a GPU's kernels keep."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            return KeptAttention.apply(*args[:3])
        if func is F.rms_norm:
            return _kept_norm(*args, **kwargs or {})
        if func in (Tensor.item, Tensor.__bool__) and args[0].is_meta and args[0].dtype == torch.bool:
            return True
        index = args[1] if func is Tensor.__getitem__ else None
        if isinstance(index, Tensor) and index.dtype == torch.bool and index.device.type == "cpu":
            return args[0].flatten(0, index.dim() - 1)[index.flatten().nonzero().flatten().to(args[0].device)]
        return func(*args, **kwargs or {})


class KeptAttention(torch.autograd.Function):
    """A fused attention kernel, which keeps queries, keys, values, its output and a float a query. No values."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        output, log_sum_exp = torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(q, k, v, output, log_sum_exp)
        return output


class KeptNorm(torch.autograd.Function):
    """RMS norm in one kernel, which keeps its input and a float a row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, scale)
        normed = (x * scale).to(x.dtype)
        return normed if weight is None else normed * weight


def _kept_norm(x: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Any:
    return KeptNorm.apply(x, weight, torch.finfo(x.dtype).eps if eps is None else eps)
