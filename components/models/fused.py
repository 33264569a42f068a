"""Fused kernels for a Qwen2 LLM with peft's adapters: the same numbers from less work and memory.

`make_fused` changes the classes of modules in place and can be called again with other choices. With activation
checkpointing `selective` no output of a norm and no SwiGLU product is kept: elementwise work is redone in backward, a
matrix product never.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any

import torch
from peft.tuners.lora.layer import Linear as LoraLinear
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedModel
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2MLP, Qwen2RMSNorm

FUSED_ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]


def fused_attention() -> AbstractContextManager[None]:
    """Within, attention without a fused kernel raises RuntimeError: torch's slow path cannot slip in unseen."""
    return sdpa_kernel(FUSED_ATTENTION)


def attention_kernels(flex: bool) -> dict[str, str]:
    """transformers' `attn_implementation`: SDPA, and FlexAttention for the LLM where asked (branches on a GPU)."""
    return {"": "sdpa", "text_config": "flex_attention" if flex else "sdpa", "vision_config": "sdpa"}


class FusedLora(LoraLinear):
    """One linear with its adapter, added into the linear's output by the second product itself (`addmm`)."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.disable_adapters or self.merged:
            return super().forward(x, *args, **kwargs)
        (adapter,) = self.active_adapters
        base: Any = self.base_layer
        lora_a: Any = self.lora_A[adapter]
        lora_b: Any = self.lora_B[adapter]
        flat = x.flatten(0, -2)  # two dimensions: an in-place product on a view would copy its gradient
        result = F.linear(flat, base.weight, base.bias)
        result.addmm_(F.linear(flat, lora_a.weight), lora_b.weight.t(), alpha=self.scaling[adapter])
        return result.unflatten(0, x.shape[:-1])


class FusedRMSNorm(Qwen2RMSNorm):
    """One kernel that keeps its input, where transformers keeps three copies in fp32."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return F.rms_norm(hidden_states, self.weight.shape, self.weight, self.variance_epsilon)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def swiglu_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    gate_sigmoid = gate.sigmoid()
    silu = gate * gate_sigmoid
    return grad * up * (gate_sigmoid + silu * (1 - gate_sigmoid)), grad * silu


@cache
def _compiled(function: Callable) -> Callable:
    return torch.compile(function, dynamic=True)


def _fused(function: Callable, tensor: Tensor) -> Callable:
    """One kernel on a GPU. On a CPU compiling takes minutes and the plain operations are as fast."""
    return _compiled(function) if tensor.is_cuda else function


class SwiGLU(torch.autograd.Function):
    """silu(gate) * up, keeping the two inputs alone."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return _fused(swiglu, gate)(gate, up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        return _fused(swiglu_backward, gate)(grad, gate, up)


class FusedMLP(Qwen2MLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(SwiGLU.apply(self.gate_proj(x), self.up_proj(x)))


@contextmanager
def recomputing(output: Tensor, function: Callable[..., Tensor], *inputs: Tensor) -> Iterator[None]:
    """Within, whoever keeps `output` for backward keeps `function` and `inputs` in its place."""
    kept = [tensor.detach() for tensor in inputs]
    address, size = output.untyped_storage()._cdata, output.numel()  # the storage's, which has one without memory too

    def pack(saved: Tensor) -> Tensor | torch.Size:
        return saved.shape if saved.untyped_storage()._cdata == address and saved.numel() == size else saved

    def unpack(packed: Tensor | torch.Size) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        with torch.no_grad():
            return function(*kept).view(packed)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


class SelectiveMLP(Qwen2MLP):
    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_proj(x), self.up_proj(x)
        product = SwiGLU.apply(gate, up)
        with recomputing(product, SwiGLU.apply, gate, up):
            return self.down_proj(product)


class SelectiveDecoderLayer(Qwen2DecoderLayer):
    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:  # type: ignore[override]
        normed = self.input_layernorm(hidden_states)
        with recomputing(normed, self.input_layernorm, hidden_states):
            attention_output, _ = self.self_attn(hidden_states=normed, **kwargs)
        middle = hidden_states + attention_output
        normed = self.post_attention_layernorm(middle)
        with recomputing(normed, self.post_attention_layernorm, middle):
            return middle + self.mlp(normed)


STOCK: tuple[type[nn.Module], ...] = (LoraLinear, Qwen2RMSNorm, Qwen2MLP, Qwen2DecoderLayer)


def make_fused(
    model: PreTrainedModel, activation_checkpointing: str = "none", fused: bool = True, lora: bool = True
) -> None:
    """Choose how the LLM computes; everything off is transformers' and peft's own way.

    Args:
        activation_checkpointing: what backward recomputes: "none", "selective" (norms and SwiGLU products) or "full"
            (every layer).
        fused: one kernel for a norm and one for SwiGLU; `selective` needs it.
        lora: adapters added by `addmm`.
    """
    known = ("none", "selective", "full")
    assert activation_checkpointing in known, f"{activation_checkpointing!r} is none of {known}"
    selective = activation_checkpointing == "selective"
    assert fused or not selective, "selective recomputation is of the fused norm and product"
    chosen: dict[type[nn.Module], type[nn.Module]] = {LoraLinear: FusedLora} if lora else {}
    if fused:
        chosen |= {Qwen2RMSNorm: FusedRMSNorm, Qwen2MLP: FusedMLP}
    if selective:
        chosen |= {Qwen2MLP: SelectiveMLP, Qwen2DecoderLayer: SelectiveDecoderLayer}
    for module in model.modules():
        stock = next((kind for kind in STOCK if isinstance(module, kind)), None)
        if stock:
            module.__class__ = chosen.get(stock, stock)
    if activation_checkpointing == "full":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    else:
        model.gradient_checkpointing_disable()
