"""Count the memory that a training step holds for its backward pass, using torch's meta device.

The forward pass of one sequence runs without values. Every storage that is alive afterwards is held for the backward
pass, so hooks, recomputation and in-place operations are included. Attention and RMS norm keep the same tensors as the
fused kernels of a GPU.
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
from m3diff.records.sample import PAIR

LOGITS = "logits"
BETWEEN_PARTS = "between parts"
RECOMPUTED_LAYER = "one layer recomputed"


def count_activations(
    model: Any, family: Family, activation_checkpointing: str, tokens: int, supervised: int, images: int = PAIR
) -> dict[str, int]:
    """Return the number of bytes that one sequence holds for the backward pass, by part of the model.

    Besides the parts of the family, the result has the following keys. LOGITS is the size of the softmax and the two
    gradients that cross-entropy holds in fp32. BETWEEN_PARTS is the size of the tensors created outside all parts.
    RECOMPUTED_LAYER, with full recomputation only, is the maximum that one layer holds while it is recomputed.

    Args:
        model: model on the meta device, prepared for training: with adapters and weights in the training precision.
        tokens: number of tokens in the sequence, including visual tokens.
        supervised: number of tokens that count in the loss.
        images: number of images of the sequence.
    """
    token_shape = torch.zeros(1, tokens, dtype=torch.long, device="meta")
    inputs = {
        "input_ids": token_shape,
        "position_ids": token_shape,
        "attention_mask": None,
        # On the CPU because the model reads its values
        "logits_to_keep": (torch.arange(tokens) >= tokens - supervised)[None],
        "use_cache": False,
        **model.blank_images(model.config, "meta", images),
    }
    model.train()
    family.fuse(model, activation_checkpointing)
    with OnShapes():
        held_bytes = held_for_backward(model, inputs, parts_of_modules(model, family))
    layers = recomputed_layers(model)
    if layers:
        family.fuse(model, "none")
        with OnShapes():
            layer_bytes = held_for_backward(model, inputs, {name: name for name in layers})
        held_bytes[RECOMPUTED_LAYER] = max(layer_bytes.get(name, 0) for name in layers)
        family.fuse(model, activation_checkpointing)
    return held_bytes


def parts_of_modules(model: nn.Module, family: Family) -> dict[str, str]:
    """Map the name of each module to the family's part that it belongs to. Modules outside all parts are omitted."""
    parts = {}
    for name, _ in model.named_modules():
        for part, prefixes in family.parts.items():
            if any(f"{name}.".startswith(prefix) for prefix in prefixes):
                parts[name] = part
    return parts


def recomputed_layers(model: nn.Module) -> list[str]:
    """Return the names of the layers that the backward pass recomputes from their inputs."""
    marked = [name for name, module in model.named_modules() if getattr(module, "gradient_checkpointing", False)]
    # transformers also marks the containers of layers
    return [name for name in marked if not any(inner_name.startswith(f"{name}.") for inner_name in marked)]


def held_for_backward(model: Any, inputs: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, int]:
    """Return the number of bytes that are alive between the forward and backward pass, without inputs and weights.

    Args:
        names: maps a module's name to the key under which the result counts its tensors. A tensor that is created in
            nested modules is counted once, for the innermost module.
    """
    head = next(name for name, module in model.named_modules() if module is model.get_output_embeddings())
    names = {**names, head: LOGITS}
    with ModuleTracker() as module_tracker, StorageTracker(model, inputs, names, module_tracker) as storage_tracker:
        logits = model(**inputs).logits
        held_bytes = storage_tracker.alive_bytes()
        held_bytes[LOGITS] = 3 * 4 * logits.numel()
    return {name: size for name, size in held_bytes.items() if size}


class StorageTracker(TorchDispatchMode):
    """Records the size of every storage that is created while this mode is active.

    A storage is recorded under the name of the innermost running module that has a name in `names`.
    """

    def __init__(
        self, model: nn.Module, inputs: Mapping[str, Any], names: Mapping[str, str], module_tracker: ModuleTracker
    ) -> None:
        super().__init__()
        self.names = names
        self.module_tracker = module_tracker
        existing_tensors = [*model.parameters(), *model.buffers()]
        existing_tensors += [value for value in inputs.values() if torch.is_tensor(value)]
        self.existing = {StorageWeakRef(tensor.untyped_storage()) for tensor in existing_tensors}
        self.recorded: dict[StorageWeakRef, tuple[str, int]] = {}  # name and size in bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        running_modules = [path.partition(".")[2] for path in self.module_tracker.parents]  # without the model's class
        named_modules = [module for module in running_modules if module in self.names]
        innermost_module = max(named_modules, key=len, default=None)
        name = BETWEEN_PARTS if innermost_module is None else self.names[innermost_module]
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if StorageWeakRef(storage) not in self.existing:
                    self.recorded.setdefault(StorageWeakRef(storage), (name, storage.nbytes()))
        return result

    def alive_bytes(self) -> dict[str, int]:
        """Return the total size in bytes of the recorded storages that have not been freed, by name."""
        sizes: dict[str, int] = {}
        for reference, (name, size) in self.recorded.items():
            if not reference.expired():
                sizes[name] = sizes.get(name, 0) + size
        return sizes


class OnShapes(TorchFunctionMode):
    """Lets a model run on the meta device, where tensors have shapes but no values.

    Boolean checks of values return true. A mask on the CPU selects as many tokens as it marks. Attention and RMS norm
    keep the same tensors as the fused kernels of a GPU.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            return FusedAttention.apply(*args[:3])
        if func is F.rms_norm:
            return _fused_norm(*args, **kwargs or {})
        if func in (Tensor.item, Tensor.__bool__) and args[0].is_meta and args[0].dtype == torch.bool:
            return True
        index = args[1] if func is Tensor.__getitem__ else None
        if isinstance(index, Tensor) and index.dtype == torch.bool and index.device.type == "cpu":
            return args[0].flatten(0, index.dim() - 1)[index.flatten().nonzero().flatten().to(args[0].device)]
        return func(*args, **kwargs or {})


class FusedAttention(torch.autograd.Function):
    """Imitates the memory use of a fused attention kernel without computing anything.

    The queries, keys, values, output and one float per query are kept for the backward pass.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Save the same tensors as a kernel, and return an uninitialised tensor in the shape of the queries."""
        output = torch.empty_like(q)
        log_sum_exp = q.new_empty(q.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(q, k, v, output, log_sum_exp)
        return output


class FusedNorm(torch.autograd.Function):
    """RMS norm with the memory use of a fused kernel, which keeps only its inputs and one float per row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        """Return x / rms(x) * weight in the dtype of x, [..., D]. The norm is computed in fp32."""
        scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, scale)
        normed = (x * scale).to(x.dtype)
        return normed if weight is None else normed * weight


def _fused_norm(x: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Any:
    return FusedNorm.apply(x, weight, torch.finfo(x.dtype).eps if eps is None else eps)
