"""Fused kernels for a Qwen2 or Llama LLM with peft's adapters: the same numbers from less work and memory.

`make_fused` changes the classes of modules in place and can be called again with other choices. While training, the
last layer computes its outputs only where a token is supervised: of the other tokens only keys and values matter there.
With activation checkpointing `selective` no output of a norm and no SwiGLU product is kept: elementwise work is redone
in backward, a matrix product never.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from peft.tuners.lora.layer import Linear as LoraLinear
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import sdpa_kernel
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaMLP, LlamaRMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2MLP, Qwen2RMSNorm, apply_rotary_pos_emb
from transformers.models.siglip.modeling_siglip import SiglipEncoderLayer

from m3diff.models.attention import FUSED_ATTENTION, Layout, attend, attend_rows, compiled
from m3diff.models.layers import rms_norm


def fused_attention() -> AbstractContextManager[None]:
    """Within, attention without a fused kernel raises RuntimeError: torch's slow path cannot slip in unseen."""
    return sdpa_kernel(FUSED_ATTENTION)


class AdaptedLinear(torch.autograd.Function):
    """x W' + b + s (x A') B', with fewer passes over the gradients than autograd takes of the same.

    x: [T, in]; weight: [out, in], frozen; lora_a: [r, in]; lora_b: [out, r].
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, lora_a: Tensor, lora_b: Tensor, scaling: float
    ) -> Tensor:
        low = F.linear(x, lora_a)
        ctx.save_for_backward(x, weight, low, lora_a, lora_b)
        ctx.scaling = scaling
        return F.linear(x, weight, bias).addmm_(low, lora_b.t(), alpha=scaling)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, Tensor, Tensor, None]:
        x, weight, low, lora_a, lora_b = ctx.saved_tensors
        of_low = torch.mm(grad, lora_b).mul_(ctx.scaling)
        of_x = torch.mm(grad, weight).addmm_(of_low, lora_a)
        return of_x, None, None, of_low.t() @ x, (grad.t() @ low).mul_(ctx.scaling), None


class FusedLora(LoraLinear):
    """A linear with its adapter."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.disable_adapters or self.merged or not self.training:
            return super().forward(x, *args, **kwargs)
        (adapter,) = self.active_adapters
        base: Any = self.base_layer
        a, b = self.lora_A[adapter].weight, self.lora_B[adapter].weight
        result = AdaptedLinear.apply(x.flatten(0, -2), base.weight, base.bias, a, b, self.scaling[adapter])
        return result.unflatten(0, x.shape[:-1])


def folded(linears: Sequence[Any]) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of one linear that gives the outputs of all, with the adapters in the weights."""
    weights: list[Tensor] = []
    biases: list[Any] = []
    for linear in linears:
        base = getattr(linear, "base_layer", linear)
        weight = base.weight
        if base is not linear:
            (adapter,) = linear.active_adapters
            a, b = linear.lora_A[adapter].weight, linear.lora_B[adapter].weight
            weight = torch.addmm(weight, b, a, alpha=linear.scaling[adapter])
        weights.append(weight)
        biases.append(base.bias)
    return torch.cat(weights), None if biases[0] is None else torch.cat(biases)


class FusedRMSNorm(Qwen2RMSNorm):
    """A norm in one kernel that keeps its input, where transformers keeps three copies in fp32."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return rms_norm(hidden_states, self.weight, self.variance_epsilon)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def swiglu_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return torch.ops.aten.silu_backward(grad * up, gate), grad * F.silu(gate)


def fused_on_gpu(function: Callable, tensor: Tensor) -> Callable:
    """The function as one kernel on a GPU. On a CPU compiling takes minutes and the plain operations are as fast."""
    return compiled(function) if tensor.is_cuda else function


class SwiGLU(torch.autograd.Function):
    """silu(gate) * up, keeping the two inputs alone."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return fused_on_gpu(swiglu, gate)(gate, up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        return fused_on_gpu(swiglu_backward, gate)(grad, gate, up)


class FusedMLP(Qwen2MLP):
    """While training alone: the shapes of validation and captions would each take one of the compiler's few graphs."""

    def forward(self, x: Tensor) -> Tensor:
        product = SwiGLU.apply if self.training else swiglu
        return self.down_proj(product(self.gate_proj(x), self.up_proj(x)))


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


class FusedDecoderLayer(Qwen2DecoderLayer):
    """A layer whose outputs, in the last layer, are those of the supervised tokens alone.

    Attributes:
        selective: norms and SwiGLU products are recomputed in backward.
        folds: the adapters are in the weights, so that a product takes the place of three: quicker where the linears
            are hardly wider than the adapters' rank (`folding_pays`). In fp32 alone: bf16 would round the adapters
            away.
    """

    selective = folds = False
    takes_kept = True  # see `trims` of layers.py

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        position_embeddings: Any = None,
        attention_mask: Any = None,
        layout: Layout | None = None,
        kept: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """[1, T, D] to [1, T, D], or to [1, supervised, D] where `kept` holds the places of these in the last layer."""
        if not self.training:
            rest = {"position_embeddings": position_embeddings, "attention_mask": attention_mask, "layout": layout}
            return super().forward(hidden_states, **rest, **kwargs)
        attention, mlp, x = self.self_attn, self.mlp, hidden_states[0]
        folds = self.folds and layout is not None and not is_partitioned(attention.o_proj)
        normed = self.input_layernorm(x)
        linears = [attention.q_proj, attention.k_proj, attention.v_proj]
        if folds and layout is not None:
            cos, sin = (table[0] for table in position_embeddings)
            projected = F.linear(normed, *folded(linears))
            heads_of_queries = attention.config.num_attention_heads
            query, key, value = RotatedRows.apply(projected, cos, sin, layout, heads_of_queries)
            heads = attend_rows(query, key, value, layout, len(x), attention.scaling)
        else:
            with self.keeping(normed, self.input_layernorm, x):
                shape = (1, len(x), -1, attention.head_dim)
                query, key, value = (project(normed).view(shape).transpose(1, 2) for project in linears)
            query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
            heads, _ = attend(attention, query, key, value, attention_mask, layout, attention.scaling)
            heads = heads[0].flatten(1)
        if kept is not None and attention.layer_idx == attention.config.num_hidden_layers - 1:
            x, heads = x.index_select(0, kept), heads.index_select(0, kept)
        x = plus_product(x, heads, attention.o_proj, folds)
        normed = self.post_attention_layernorm(x)
        if folds:
            gate, up = F.linear(normed, folded([mlp.gate_proj, mlp.up_proj])[0]).chunk(2, dim=-1)
        else:
            with self.keeping(normed, self.post_attention_layernorm, x):
                gate, up = mlp.gate_proj(normed), mlp.up_proj(normed)
        product = SwiGLU.apply(gate, up)
        with self.keeping(product, SwiGLU.apply, gate, up):
            return plus_product(x, product, mlp.down_proj, folds)[None]

    def keeping(self, output: Tensor, function: Callable[..., Tensor], *inputs: Tensor) -> AbstractContextManager[None]:
        """Context in which `function` is recomputed in backward, where the layer is selective."""
        return recomputing(output, function, *inputs) if self.selective else nullcontext()


def plus_product(x: Tensor, inputs: Tensor, linear: nn.Module, folds: bool) -> Tensor:
    """x plus the outputs of a linear without a bias."""
    return torch.addmm(x, inputs, folded([linear])[0].t()) if folds else x + linear(inputs)


class FusedEncoderLayer(SiglipEncoderLayer):
    """A layer of the vision encoder with one product for queries, keys and values: quicker where it is narrow. Backward
    keeps the joined weights."""

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor:
        attention = self.self_attn
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        stock = any(type(one) is not nn.Linear for one in projections) or is_partitioned(attention.q_proj)
        if not self.training or stock:
            return super().forward(hidden_states, attention_mask, **kwargs)
        joined = F.linear(self.layer_norm1(hidden_states), *folded(projections))
        shape = (*hidden_states.shape[:-1], 3, -1, attention.head_dim)
        query, key, value = (part.transpose(1, 2) for part in joined.view(shape).unbind(2))
        heads = F.scaled_dot_product_attention(query, key, value, attention_mask, scale=attention.scale)
        middle = hidden_states + attention.out_proj(heads.transpose(1, 2).flatten(2))
        return middle + self.mlp(self.layer_norm2(middle))


def is_partitioned(linear: nn.Module) -> bool:
    """True where ZeRO 3 holds the weights: they are together only while the linear itself runs."""
    return any(hasattr(parameter, "ds_id") for parameter in linear.parameters())


class RotatedRows(torch.autograd.Function):
    """Queries, keys and values [T, (heads + 2 key heads) d] to [P, heads, d] each of the layout, the first two with
    rotary positions."""

    @staticmethod
    def forward(
        ctx: Any, projected: Tensor, cos: Tensor, sin: Tensor, layout: Layout, heads: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        split = projected.view(len(projected), -1, cos.shape[-1])
        key_heads = (split.shape[1] - heads) // 2
        turned = rotated(split[:, : heads + key_heads], cos, sin)
        ctx.layout, ctx.cos, ctx.sin = layout, cos, sin
        query, key, value = turned[:, :heads], turned[:, heads:], split[:, heads + key_heads :]
        placed = [part.index_select(0, layout.rows) for part in (query, key, value)]
        return placed[0], placed[1], placed[2]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        query, key, value = (grad.index_select(0, ctx.layout.places) for grad in grads)
        turned = rotated(torch.cat([query, key], dim=1), ctx.cos, -ctx.sin)
        return torch.cat([turned, value], dim=1).flatten(1), None, None, None, None


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions on [T, heads, d]; `cos` and `sin` are [T, d], each half alike."""
    half = x.shape[-1] // 2
    turned = x * cos[:, None]
    turned[..., :half].addcmul_(x[..., half:], sin[:, None, :half], value=-1)
    turned[..., half:].addcmul_(x[..., :half], sin[:, None, half:])
    return turned


def folding_pays(model: nn.Module) -> bool:
    """True where one product with the adapters in the weights takes fewer FLOPs than the frozen product and the two of
    the adapter: in a step 6 in out against 4 in out + 6 r (in + out) a token; only weights in fp32."""
    adapted: list[Any] = [module for module in model.modules() if isinstance(module, LoraLinear)]
    if not adapted or any(module.weight.dtype != torch.float32 for module in adapted):
        return False
    sizes = [(one.in_features, one.out_features, one.r[one.active_adapters[0]]) for one in adapted]
    return sum(2 * i * o for i, o, _ in sizes) < sum(6 * r * (i + o) for i, o, r in sizes)


FUSED: dict[type[nn.Module], type[nn.Module]] = {
    LoraLinear: FusedLora,
    Qwen2RMSNorm: FusedRMSNorm,
    Qwen2MLP: FusedMLP,
    Qwen2DecoderLayer: FusedDecoderLayer,
    SiglipEncoderLayer: FusedEncoderLayer,
}
STOCK: dict[type[nn.Module], type[nn.Module]] = {
    **{fused: stock for stock, fused in FUSED.items()},
    LlamaRMSNorm: Qwen2RMSNorm,
    LlamaMLP: Qwen2MLP,
    LlamaDecoderLayer: Qwen2DecoderLayer,
}
"""Llama's modules compute the same on the same parts; biases of the linears are the linears' own."""


def make_fused(model: PreTrainedModel, activation_checkpointing: str = "none", stock: bool = False) -> None:
    """Choose how the LLM computes.

    Adapters are folded into the weights where that is less work and nothing is recomputed; else they are added to the
    linears' outputs.

    Args:
        activation_checkpointing: what backward recomputes: "none", "selective" (norms and SwiGLU products; not with
            `stock`) or "full" (every layer).
        stock: everything is transformers' and peft's own way.
    """
    known = ("none", "selective", "full")
    assert activation_checkpointing in known, f"{activation_checkpointing!r} is none of {known}"
    folds = not stock and activation_checkpointing == "none" and folding_pays(model)
    for module in model.modules():
        kind = STOCK.get(type(module), type(module))
        is_left = stock or (kind is SiglipEncoderLayer and not folds)
        module.__class__ = kind if is_left else FUSED.get(kind, kind)
        if isinstance(module, FusedDecoderLayer):
            module.selective, module.folds = activation_checkpointing == "selective", folds
    if activation_checkpointing == "full":
        model.activation_checkpointing_enable({"use_reentrant": False})
    else:
        model.activation_checkpointing_disable()
