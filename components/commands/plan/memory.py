"""The memory that a training step holds for its backward pass, counted on a model without storage (torch's meta
device).

The forward pass of one sequence runs on shapes alone. A storage that is alive afterwards is one that backward keeps, so
hooks, recomputation and products in place count as they are. Attention and RMS norm keep what a GPU's fused kernels do.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.module_tracker import ModuleTracker

from m3diff.models.family import Family

LOGITS, BETWEEN, ONE_LAYER = "logits", "between parts", "one layer recomputed"


def count_activations(
    model: Any, family: Family, activation_checkpointing: str, tokens: int, supervised: int
) -> dict[str, int]:
    """Bytes that one sequence of one pair takes for backward, by part.

    Beside the family's parts: `logits`, which cross-entropy holds in fp32 as softmax and two gradients; `between
    parts`; and with full recomputation the most that one layer holds while it is computed again.

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
    model.train()
    family.fuse(model, activation_checkpointing)
    with OnShapes():
        held = held_for_backward(model, inputs, parts_of_modules(model, family))
    if layers := recomputed_layers(model):
        family.fuse(model, "none")
        with OnShapes():
            alone = held_for_backward(model, inputs, {name: name for name in layers})
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


def held_for_backward(model: Any, inputs: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, int]:
    """Return the bytes that are alive between forward and backward, by the name of the module that made them.

    Args:
        inputs: of the model. Neither they nor its weights count.
        names: module -> name to count under; inside a named module the innermost name counts.
    """
    head = next(name for name, module in model.named_modules() if module is model.get_output_embeddings())
    with ModuleTracker() as running, Storages(model, inputs, {**names, head: LOGITS}, running) as storages:
        logits = model(**inputs).logits
        held = storages.alive() | {LOGITS: 3 * 4 * logits.numel()}
    return {name: size for name, size in held.items() if size}


class Storages(TorchDispatchMode):
    """Every storage that is made within, under the name of the innermost named module that runs."""

    def __init__(
        self, model: nn.Module, inputs: Mapping[str, Any], names: Mapping[str, str], running: ModuleTracker
    ) -> None:
        super().__init__()
        self.names, self.running = names, running
        there = [*model.parameters(), *model.buffers(), *(value for value in inputs.values() if torch.is_tensor(value))]
        self.before = {StorageWeakRef(tensor.untyped_storage()) for tensor in there}
        self.made: dict[StorageWeakRef, tuple[str, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        paths = (path.partition(".")[2] for path in self.running.parents)  # after the model's class
        innermost = max((path for path in paths if path in self.names), key=len, default=None)
        name = BETWEEN if innermost is None else self.names[innermost]
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if StorageWeakRef(storage) not in self.before:
                    self.made.setdefault(StorageWeakRef(storage), (name, storage.nbytes()))
        return result

    def alive(self) -> dict[str, int]:
        sizes: dict[str, int] = {}
        for reference, (name, size) in self.made.items():
            if not reference.expired():
                sizes[name] = sizes.get(name, 0) + size
        return sizes


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
