"""An LLM while it trains: attention by the kernel of the mask it is handed, and fused kernels for a Qwen2 or Llama with
peft's adapters, which give the same numbers from less work and memory.

`attend` is transformers' attention interface, called NAME. The sequences of a micro-batch lie end to end in one row of
T tokens. FlexAttention takes the row as it is. SDPA's kernels take rectangles: queries, keys and values are laid out so
around the kernel alone, so that nothing else is computed on padding. Model and mask cannot disagree: the mask chooses
the kernel. Every path runs on a CPU, where FlexAttention has no backward: its rule is evaluated for every two tokens.

`make_fused` changes the classes of modules in place and can be called again with other choices. While training, the
last layer computes its outputs only where a token is supervised: of the other tokens only keys and values matter there.
With activation checkpointing `selective` no output of a norm and no SwiGLU product is kept: elementwise work is redone
in backward, a matrix product never.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from peft.tuners.lora.layer import Linear as LoraLinear
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_mask, flex_attention
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RMSNorm, apply_rotary_pos_emb
from transformers.models.siglip.modeling_siglip import SiglipEncoderLayer

from m3diff.models.layers import rms_norm

NAME = "m3diff"
# transformers' `attn_implementation` of a model that trains
KERNELS = {"": "sdpa", "text_config": NAME, "vision_config": "sdpa"}

FUSED_ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]

# FlexAttention's row is a multiple of this many tokens (its block), so that shapes recur from step to step
RECURRING = 128


def attention_of(
    asked: Literal["auto", "flex", "sdpa"], gpu: bool, max_captions: int | None
) -> Literal["flex", "sdpa"]:
    """The kernel of a run. On a GPU branches want FlexAttention; one caption a sequence is plain causal attention,
    for which SDPA has the quickest kernel."""
    if asked == "auto":
        return "flex" if gpu and max_captions != 1 else "sdpa"
    return asked


@dataclass(frozen=True)
class Layout:
    """The row of T tokens as rectangles of sequences of about one length, a sequence a row, laid end to end.

    Attributes:
        rows: [P]; the token at each place of the rectangles, 0 where there is none.
        places: [tokens without padding]; each token's place.
        shapes: (B, S) of each rectangle; P is the sum of their products.
        masks: of each rectangle, who attends to whom, [B, 1, S, S] bool; None: each sequence causally.
    """

    rows: Tensor
    places: Tensor
    shapes: tuple[tuple[int, int], ...]
    masks: tuple[Tensor | None, ...]

    def each(self, taken: Callable[[Tensor], Tensor]) -> "Layout":
        """The same of what `taken` makes of each tensor: pinned, or on another device."""
        masks = tuple(None if mask is None else taken(mask) for mask in self.masks)
        return Layout(taken(self.rows), taken(self.places), self.shapes, masks)

    def attention_mask(self) -> Tensor:
        """A stand-in for the masks, [1, 1, T, T]: transformers passes on a mask of four dimensions."""
        tokens = len(self.places)
        return torch.ones((), dtype=torch.bool, device=self.rows.device).expand(1, 1, tokens, tokens)


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: "Tensor | BlockMask | None",
    layout: Layout | None = None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: [1, heads, T, d] each to [1, T, heads, d].

    A BlockMask asks for FlexAttention, a `layout` for SDPA over its rows; without either it is transformers' SDPA, as
    while captioning.
    """
    if isinstance(attention_mask, BlockMask):
        return flex(query, key, value, attention_mask, scaling).transpose(1, 2).contiguous(), None
    if layout is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    tokens, width = query.shape[2:]
    sizes = [count * size for count, size in layout.shapes]
    rectangles = [
        tensor.transpose(1, 2).reshape(tokens, -1).index_select(0, layout.rows).split(sizes)
        for tensor in (query, key, value)
    ]
    out = []
    for shape, mask, *parts in zip(layout.shapes, layout.masks, *rectangles, strict=True):
        q, k, v = (part.unflatten(0, shape).unflatten(-1, (-1, width)).transpose(1, 2) for part in parts)
        out.append(sdpa(q, k, v, mask, scaling).flatten(0, 1).flatten(1))
    flat = F.pad(torch.cat(out).index_select(0, layout.places), (0, 0, 0, tokens - len(layout.places)))
    return flat.unflatten(-1, (-1, width))[None], None


def sdpa(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None) -> Tensor:
    """[B, heads, S, d] each to [B, S, heads, d]; without a mask causal."""
    groups = query.shape[1] // key.shape[1]
    # on a GPU no fused kernel takes a mask, or fp32, together with fewer key heads
    if query.is_cuda and (mask is not None or query.dtype == torch.float32):
        key, value, groups = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1), 1
    out = F.scaled_dot_product_attention(
        query, key, value, mask, is_causal=mask is None, scale=scaling, enable_gqa=groups > 1
    )
    return out.transpose(1, 2)


def flex(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, scaling: float | None) -> Tensor:
    """FlexAttention [1, heads, T, d], with fewer key and value heads than queries."""
    if query.is_cuda:
        return compiled(flex_attention)(query, key, value, block_mask=mask, scale=scaling, enable_gqa=True)
    tokens = query.shape[2]
    dense = create_mask(mask.mask_mod, None, None, tokens, tokens, device=str(query.device))
    return sdpa(query, key, value, dense, scaling).transpose(1, 2)


@cache
def compiled(function: Callable) -> Callable:
    """The function as a kernel for all lengths. More graphs than dynamo's limit are an error from now on; else it would
    go on without compiling, slowly, and FlexAttention with T x T of memory."""
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    return torch.compile(function, dynamic=True)


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, sdpa_mask)


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
        with self.keeping(normed, self.input_layernorm, x):
            projected = products(normed, [attention.q_proj, attention.k_proj, attention.v_proj], folds)
        shape = (1, len(x), -1, attention.head_dim)
        query, key, value = (part.view(shape).transpose(1, 2) for part in projected)
        turned = Rotary.apply if folds else apply_rotary_pos_emb
        query, key = turned(query, key, *position_embeddings)
        heads, _ = attend(attention, query, key, value, attention_mask, layout, attention.scaling)
        heads = heads[0].flatten(1)
        if kept is not None and attention.layer_idx == attention.config.num_hidden_layers - 1:
            x, heads = x.index_select(0, kept), heads.index_select(0, kept)
        x = plus_product(x, heads, attention.o_proj, folds)
        normed = self.post_attention_layernorm(x)
        with self.keeping(normed, self.post_attention_layernorm, x):
            gate, up = products(normed, [mlp.gate_proj, mlp.up_proj], folds)
        product = SwiGLU.apply(gate, up)
        with self.keeping(product, SwiGLU.apply, gate, up):
            return plus_product(x, product, mlp.down_proj, folds)[None]

    def keeping(self, output: Tensor, function: Callable[..., Tensor], *inputs: Tensor) -> AbstractContextManager[None]:
        """Context in which `function` is recomputed in backward, where the layer is selective."""
        return recomputing(output, function, *inputs) if self.selective else nullcontext()


def products(x: Tensor, linears: Sequence[Any], folds: bool) -> Sequence[Tensor]:
    """The outputs of each linear, or with `folds` the parts of one product."""
    if not folds:
        return [linear(x) for linear in linears]
    return F.linear(x, *folded(linears)).split([linear.out_features for linear in linears], dim=-1)


def plus_product(x: Tensor, inputs: Tensor, linear: nn.Module, folds: bool) -> Tensor:
    """x plus the outputs of a linear without a bias."""
    return torch.addmm(x, inputs, folded([linear])[0].t()) if folds else x + linear(inputs)


class FusedEncoderLayer(SiglipEncoderLayer):
    """A layer of the vision encoder with one product for queries, keys and values: quicker where it is narrow. Backward
    keeps the joined weights."""

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor:
        attention = self.self_attn
        if not self.training or is_partitioned(attention.q_proj):
            return super().forward(hidden_states, attention_mask, **kwargs)
        projections = [attention.q_proj, attention.k_proj, attention.v_proj]
        query, key, value = (
            part.unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)
            for part in products(self.layer_norm1(hidden_states), projections, folds=True)
        )
        heads = F.scaled_dot_product_attention(query, key, value, attention_mask, scale=attention.scale)
        middle = hidden_states + attention.out_proj(heads.transpose(1, 2).flatten(2))
        return middle + self.mlp(self.layer_norm2(middle))


def is_partitioned(linear: nn.Module) -> bool:
    """True where ZeRO 3 holds the weights: they are together only while the linear itself runs."""
    return any(hasattr(parameter, "ds_id") for parameter in linear.parameters())


class Rotary(torch.autograd.Function):
    """Rotary positions on queries and keys [1, heads, T, d], in fewer passes than transformers' own."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        return rotated(query, cos, sin), rotated(key, cos, sin)

    @staticmethod
    def backward(ctx: Any, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return rotated(query, cos, -sin), rotated(key, cos, -sin), None, None


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions on [1, heads, T, d]; `cos` and `sin` are [1, T, d], each half alike."""
    half = x.shape[-1] // 2
    turned = x * cos[:, None]
    turned[..., :half].addcmul_(x[..., half:], sin[:, None, :, :half], value=-1)
    turned[..., half:].addcmul_(x[..., :half], sin[:, None, :, half:])
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
    Qwen2DecoderLayer: FusedDecoderLayer,
    SiglipEncoderLayer: FusedEncoderLayer,
}
STOCK: dict[type[nn.Module], type[nn.Module]] = {  # Llama's modules compute the same on the same parts
    **{fused: stock for stock, fused in FUSED.items()},
    LlamaRMSNorm: Qwen2RMSNorm,
    LlamaDecoderLayer: Qwen2DecoderLayer,
}


def make_fused(model: PreTrainedModel, activation_checkpointing: str = "none", stock: bool = False) -> None:
    """Choose how the LLM computes.

    Adapters are folded into the weights where that is less work and nothing is recomputed; else they are added to the
    linears' outputs.

    Args:
        activation_checkpointing: what backward recomputes: "none", "selective" (norms and SwiGLU products; not with
            `stock`) or "full" (every layer).
        stock: everything is transformers' and peft's own way.
    """
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
