"""Attention and fused kernels for training an LLM (Qwen2 or Llama) with peft's adapters.

These kernels compute the same results as transformers and peft with less work and memory.

`attend` is registered with transformers as the attention interface ATTENTION_NAME. The sequences of a micro-batch are
concatenated to one row of T tokens. FlexAttention can process the row directly. SDPA's kernels require rectangles, so
queries, keys and values are rearranged into rectangles, but only for the kernel. No other computation includes the
padding. The type of the mask selects the kernel, so the model and the mask always agree. All of this also works on a
CPU. FlexAttention does not have a backward pass on a CPU. There, the mask function is evaluated for every pair of
tokens, and SDPA is used instead.

`make_fused` changes the classes of modules in place and can be called again with other options. In training, the last
layer computes outputs only for supervised tokens, which contribute to the loss. For the other tokens, it computes only
keys and values. With "selective" `activation_checkpointing`, the outputs of norms and SwiGLU products are not stored.
The backward pass recomputes these elementwise operations, but never a matrix product.
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

ATTENTION_NAME = "m3diff"

FUSED_ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]

# The row for FlexAttention is padded to a multiple of its block size in tokens, so that fewer different shapes occur
FLEX_BLOCK = 128


def choose_attention(
    choice: Literal["auto", "flex", "sdpa"], gpu: bool, max_captions: int | None
) -> Literal["flex", "sdpa"]:
    """Return the attention kernel to use in a training run.

    On a GPU, `auto` selects FlexAttention for sequences with branches, which are captions that share one prefix.
    Sequences with a single caption need only causal attention, for which SDPA has the fastest kernel.

    Args:
        choice: the parameter `compute.attention`.
        gpu: whether the run uses a GPU.
        max_captions: maximum number of captions per sequence, or None for all captions of a pair.
    """
    if choice == "auto":
        return "flex" if gpu and max_captions != 1 else "sdpa"
    return choice


class PackedAttention:
    """Counts how often attention followed a packed row, so that a model that ignores the packing can be found.

    Attributes:
        calls: number of calls of `attend` with a layout or a BlockMask since the program started.
    """

    calls = 0


@dataclass(frozen=True)
class Layout:
    """Mapping between the row of T tokens and rectangles.

    Each row of a rectangle contains one sequence. Sequences of similar length share a rectangle. The slots of all
    rectangles are numbered consecutively.

    Attributes:
        token_of_slot: index of the token in each slot of the rectangles, [P]. Padding has index 0.
        slot_of_token: index of the slot of each token, [tokens without padding].
        shapes: (B sequences, S slots per sequence) of each rectangle. P is the number of slots of all rectangles.
        masks: attention mask of each rectangle, [B, 1, S, S] bool, or None for causal attention.
    """

    token_of_slot: Tensor
    slot_of_token: Tensor
    shapes: tuple[tuple[int, int], ...]
    masks: tuple[Tensor | None, ...]

    def map_tensors(self, function: Callable[[Tensor], Tensor]) -> "Layout":
        """Return a layout with the function applied to each tensor, for example to copy it to another device."""
        masks = tuple(None if mask is None else function(mask) for mask in self.masks)
        return Layout(function(self.token_of_slot), function(self.slot_of_token), self.shapes, masks)

    def attention_mask(self) -> Tensor:
        """Return a placeholder mask, [1, 1, T, T].

        It has four dimensions because transformers does not change such a mask.
        """
        tokens = len(self.slot_of_token)
        return torch.ones((), dtype=torch.bool, device=self.token_of_slot.device).expand(1, 1, tokens, tokens)


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
    """Compute attention. transformers calls this function for each layer of the LLM.

    A BlockMask selects FlexAttention, and a `layout` selects SDPA over its rectangles. If neither is given, as in
    captioning, transformers' SDPA is used.

    Args:
        module: the attention layer.
        query: [1, heads, T, d].
        key: [1, key heads, T, d].
        value: [1, key heads, T, d].
        attention_mask: a BlockMask for FlexAttention, otherwise transformers' mask.
        layout: mapping between the row of tokens and rectangles.
        scaling: factor of the products of queries and keys. By default, 1 / sqrt(d).

    Returns:
        The output, [1, T, heads, d], and None in place of the attention weights.
    """
    if isinstance(attention_mask, BlockMask):
        PackedAttention.calls += 1
        return flex(query, key, value, attention_mask, scaling).transpose(1, 2).contiguous(), None
    if layout is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    PackedAttention.calls += 1
    return attend_in_rectangles(query, key, value, layout, scaling), None


def attend_in_rectangles(query: Tensor, key: Tensor, value: Tensor, layout: Layout, scaling: float | None) -> Tensor:
    """Apply SDPA to the rectangles of a layout. The inputs are [1, heads, T, d] and the output is [1, T, heads, d]."""
    tokens, width = query.shape[2:]

    # 1. arrange the tokens in rectangles: [1, heads, T, d] to [B S, heads d] for each rectangle
    sizes = [sequences * length for sequences, length in layout.shapes]

    def split_into_rectangles(tensor: Tensor) -> tuple[Tensor, ...]:
        row = tensor.transpose(1, 2).reshape(tokens, -1)
        return row.index_select(0, layout.token_of_slot).split(sizes)

    queries = split_into_rectangles(query)
    keys = split_into_rectangles(key)
    values = split_into_rectangles(value)

    # 2. attend within each rectangle
    outputs = []
    for shape, mask, *rectangle in zip(layout.shapes, layout.masks, queries, keys, values, strict=True):
        q, k, v = (tensor.unflatten(0, shape).unflatten(-1, (-1, width)).transpose(1, 2) for tensor in rectangle)
        outputs.append(sdpa(q, k, v, mask, scaling).flatten(0, 1).flatten(1))

    # 3. put the outputs back into the row, with zeros for padding
    row = torch.cat(outputs).index_select(0, layout.slot_of_token)
    row = F.pad(row, (0, 0, 0, tokens - len(layout.slot_of_token)))
    return row.unflatten(-1, (-1, width))[None]


def sdpa(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None) -> Tensor:
    """Apply torch's SDPA. The inputs are [B, heads, S, d] and the output is [B, S, heads, d].

    Attention is causal if `mask` is None.
    """
    heads_per_key = query.shape[1] // key.shape[1]
    # on a GPU, no fused kernel supports fewer key heads than query heads in combination with a mask or fp32
    if query.is_cuda and (mask is not None or query.dtype == torch.float32):
        key = key.repeat_interleave(heads_per_key, 1)
        value = value.repeat_interleave(heads_per_key, 1)
        heads_per_key = 1
    heads = F.scaled_dot_product_attention(
        query, key, value, mask, is_causal=mask is None, scale=scaling, enable_gqa=heads_per_key > 1
    )
    return heads.transpose(1, 2)


def flex(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, scaling: float | None) -> Tensor:
    """Apply FlexAttention and return [1, heads, T, d]. Keys and values may have fewer heads than queries."""
    if query.is_cuda:
        return compile_once(flex_attention)(query, key, value, block_mask=mask, scale=scaling, enable_gqa=True)
    tokens = query.shape[2]
    dense_mask = create_mask(mask.mask_mod, None, None, tokens, tokens, device=str(query.device))
    return sdpa(query, key, value, dense_mask, scaling).transpose(1, 2)


@cache
def compile_once(function: Callable) -> Callable:
    """Compile the function into one kernel for all sequence lengths.

    The first call also makes dynamo raise an error when it reaches its limit of compiled graphs. By default, it would
    continue without compiling, which is slow and requires T x T memory for FlexAttention (torch 2.13;
    `stage.run_with_retries` explains the error).
    """
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    return torch.compile(function, dynamic=True)


def register_kernels() -> dict[str, str]:
    """Register `attend` with transformers. Return the `attn_implementation` of each part of a model in training."""
    AttentionInterface.register(ATTENTION_NAME, attend)
    AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)
    return {"": "sdpa", "text_config": ATTENTION_NAME, "vision_config": "sdpa"}


@contextmanager
def require_fused_attention() -> Iterator[None]:
    """Make attention raise RuntimeError within the block or function if no fused kernel is available.

    By default, torch would use a slow implementation instead.
    """
    with sdpa_kernel(FUSED_ATTENTION):
        yield


class AdaptedLinear(torch.autograd.Function):
    """Computes x W' + b + s (x A') B' with fewer passes over the gradients than autograd would need.

    Shapes: x [T, in], weight [out, in] (frozen), lora_a [r, in], lora_b [out, r].
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, lora_a: Tensor, lora_b: Tensor, scaling: float
    ) -> Tensor:
        """Return the output of the linear layer and its adapter, [T, out]."""
        low_rank = F.linear(x, lora_a)
        ctx.save_for_backward(x, weight, low_rank, lora_a, lora_b)
        ctx.scaling = scaling
        return F.linear(x, weight, bias).addmm_(low_rank, lora_b.t(), alpha=scaling)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, Tensor, Tensor, None]:
        """Return the gradients of x, lora_a and lora_b, and None for the other inputs of `forward`.

        Args:
            grad: gradient of the output, [T, out].
        """
        x, weight, low_rank, lora_a, lora_b = ctx.saved_tensors
        grad_low_rank = torch.mm(grad, lora_b).mul_(ctx.scaling)
        grad_x = torch.mm(grad, weight).addmm_(grad_low_rank, lora_a)
        grad_a = grad_low_rank.t() @ x
        grad_b = (grad.t() @ low_rank).mul_(ctx.scaling)
        return grad_x, None, None, grad_a, grad_b, None


class FusedLora(LoraLinear):
    """A linear layer with an adapter. In training, `AdaptedLinear` computes the layer and the adapter together."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the outputs, [..., out], for inputs [..., in]. Outside training, use peft's implementation."""
        if self.disable_adapters or self.merged or not self.training:
            return super().forward(x, *args, **kwargs)
        (adapter,) = self.active_adapters
        base: Any = self.base_layer
        lora_a = self.lora_A[adapter].weight
        lora_b = self.lora_B[adapter].weight
        output = AdaptedLinear.apply(x.flatten(0, -2), base.weight, base.bias, lora_a, lora_b, self.scaling[adapter])
        return output.unflatten(0, x.shape[:-1])


def join_weights(linears: Sequence[Any]) -> tuple[Tensor, Tensor | None]:
    """Return the weight and bias of a single linear layer that computes the concatenated outputs of all `linears`.

    The adapters are folded into the weight.
    """
    weights: list[Tensor] = []
    biases: list[Any] = []
    for linear in linears:
        base = getattr(linear, "base_layer", linear)
        weight = base.weight
        if base is not linear:
            (adapter,) = linear.active_adapters
            lora_a = linear.lora_A[adapter].weight
            lora_b = linear.lora_B[adapter].weight
            weight = torch.addmm(weight, lora_b, lora_a, alpha=linear.scaling[adapter])
        weights.append(weight)
        biases.append(base.bias)
    return torch.cat(weights), None if biases[0] is None else torch.cat(biases)


class FusedRMSNorm(Qwen2RMSNorm):
    """An RMS norm in one kernel. It stores only the input for the backward pass, instead of three fp32 copies."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return the normalised states, [..., D]."""
        return rms_norm(hidden_states, self.weight, self.variance_epsilon)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up."""
    return F.silu(gate) * up


def swiglu_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of `gate` and `up`."""
    return torch.ops.aten.silu_backward(grad * up, gate), grad * F.silu(gate)


def compile_on_gpu(function: Callable, tensor: Tensor) -> Callable:
    """Compile the function into one kernel if the tensor is on a GPU. Otherwise, return it unchanged.

    On a CPU, compiling takes minutes and is not faster than the plain operations.
    """
    return compile_once(function) if tensor.is_cuda else function


class SwiGLU(torch.autograd.Function):
    """silu(gate) * up. Only the two inputs are stored for the backward pass."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        """Return silu(gate) * up, which has the same shape as both inputs."""
        ctx.save_for_backward(gate, up)
        return compile_on_gpu(swiglu, gate)(gate, up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of `gate` and `up`."""
        gate, up = ctx.saved_tensors
        return compile_on_gpu(swiglu_backward, gate)(grad, gate, up)


@contextmanager
def recompute_in_backward(output: Tensor, function: Callable[..., Tensor], *inputs: Tensor) -> Iterator[None]:
    """Do not store `output` for the backward pass of operations within the block.

    The backward pass recomputes it as `function(*inputs)`, which saves memory.
    """
    detached_inputs = [tensor.detach() for tensor in inputs]
    # the address of the storage object, which also exists on the "meta" device
    address = output.untyped_storage()._cdata
    size = output.numel()

    def pack(tensor: Tensor) -> Tensor | torch.Size:
        is_output = tensor.untyped_storage()._cdata == address and tensor.numel() == size
        return tensor.shape if is_output else tensor

    def unpack(tensor_or_shape: Tensor | torch.Size) -> Tensor:
        if isinstance(tensor_or_shape, Tensor):
            return tensor_or_shape
        with torch.no_grad():
            return function(*detached_inputs).view(tensor_or_shape)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


class FusedDecoderLayer(Qwen2DecoderLayer):
    """A decoder layer with fused kernels. The last layer computes its outputs only for supervised tokens.

    Attributes:
        is_selective: whether the backward pass recomputes norms and SwiGLU products.
        folds_adapters: whether the adapters are folded into the weights, so that one product replaces three. This is
            faster if the linear layers are not much wider than the adapters' rank (`does_folding_pay`). It is limited
            to fp32, because rounding to bf16 would lose the adapters' small values.
    """

    is_selective = False
    folds_adapters = False
    accepts_kept_positions = True  # for `can_trim_last_layer` of layers.py

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        position_embeddings: Any = None,
        attention_mask: Any = None,
        layout: Layout | None = None,
        kept_positions: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Return the layer's outputs, [1, T, D].

        Args:
            hidden_states: [1, T, D].
            position_embeddings: cosines and sines of the rotary positions.
            attention_mask: see `attend`.
            layout: see `attend`.
            kept_positions: positions of the tokens that the last layer returns, [1, tokens, D]; None for all.
        """
        # This implementation is for a single row. Separate rows (`SeparateRows`) use the stock one
        if not self.training or len(hidden_states) > 1:
            arguments: dict[str, Any] = {
                "position_embeddings": position_embeddings,
                "attention_mask": attention_mask,
                "layout": layout,
            }
            return super().forward(hidden_states, **arguments, **kwargs)
        attention = self.self_attn
        mlp = self.mlp
        x = hidden_states[0]  # [T, D]
        # ZeRO 3 gathers the weights of a linear layer only during the layer's own forward pass
        folds_adapters = self.folds_adapters and layout is not None and not is_partitioned(attention.o_proj)

        # 1. queries, keys and values: [T, D] to [1, heads, T, d]
        normalised = self.input_layernorm(x)
        with self._recompute_if_selective(normalised, self.input_layernorm, x):
            linears = [attention.q_proj, attention.k_proj, attention.v_proj]
            projections = apply_linears(normalised, linears, folds_adapters)
        shape = (1, len(x), -1, attention.head_dim)
        query, key, value = (projection.view(shape).transpose(1, 2) for projection in projections)
        apply_rotary = Rotary.apply if folds_adapters else apply_rotary_pos_emb
        query, key = apply_rotary(query, key, *position_embeddings)

        # 2. attention: [T, heads d]
        heads, _ = attend(attention, query, key, value, attention_mask, layout, attention.scaling)
        heads = heads[0].flatten(1)

        # 3. in the last layer, keep only the supervised tokens
        is_last = attention.layer_idx == attention.config.num_hidden_layers - 1
        if kept_positions is not None and is_last:
            x = x.index_select(0, kept_positions)
            heads = heads.index_select(0, kept_positions)
        x = add_linear(x, heads, attention.o_proj, folds_adapters)

        # 4. the MLP
        normalised = self.post_attention_layernorm(x)
        with self._recompute_if_selective(normalised, self.post_attention_layernorm, x):
            gate, up = apply_linears(normalised, [mlp.gate_proj, mlp.up_proj], folds_adapters)
        activations = SwiGLU.apply(gate, up)
        with self._recompute_if_selective(activations, SwiGLU.apply, gate, up):
            return add_linear(x, activations, mlp.down_proj, folds_adapters)[None]

    def _recompute_if_selective(
        self, output: Tensor, function: Callable[..., Tensor], *inputs: Tensor
    ) -> AbstractContextManager[None]:
        return recompute_in_backward(output, function, *inputs) if self.is_selective else nullcontext()


def apply_linears(x: Tensor, linears: Sequence[Any], folds_adapters: bool) -> Sequence[Tensor]:
    """Return the output of each linear layer. If the adapters are folded, compute all outputs in one product."""
    if not folds_adapters:
        return [linear(x) for linear in linears]
    weight, bias = join_weights(linears)
    widths = [linear.out_features for linear in linears]
    return F.linear(x, weight, bias).split(widths, dim=-1)


def add_linear(x: Tensor, inputs: Tensor, linear: nn.Module, folds_adapters: bool) -> Tensor:
    """Return x plus the output of a linear layer without a bias."""
    if not folds_adapters:
        return x + linear(inputs)
    weight, _ = join_weights([linear])
    return torch.addmm(x, inputs, weight.t())


class FusedEncoderLayer(SiglipEncoderLayer):
    """A SigLIP encoder layer that computes queries, keys and values in one product.

    This is faster if the encoder is narrow. The joined weights are stored for the backward pass.
    """

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor:
        """Return the layer's outputs, [images, N, D]."""
        attention = self.self_attn
        if not self.training or is_partitioned(attention.q_proj):
            return super().forward(hidden_states, attention_mask, **kwargs)
        linears = [attention.q_proj, attention.k_proj, attention.v_proj]
        projections = apply_linears(self.layer_norm1(hidden_states), linears, folds_adapters=True)
        query, key, value = (
            projection.unflatten(-1, (-1, attention.head_dim)).transpose(1, 2) for projection in projections
        )
        heads = F.scaled_dot_product_attention(query, key, value, attention_mask, scale=attention.scale)
        x = hidden_states + attention.out_proj(heads.transpose(1, 2).flatten(2))
        return x + self.mlp(self.layer_norm2(x))


def is_partitioned(linear: nn.Module) -> bool:
    """Return whether ZeRO 3 partitions the weights, which are then available only during the layer's forward pass."""
    return any(hasattr(parameter, "ds_id") for parameter in linear.parameters())


class Rotary(torch.autograd.Function):
    """Apply rotary positions to queries and keys, [1, heads, T, d], in fewer passes than transformers' function."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Return the queries and keys with rotary positions.

        Args:
            query: [1, heads, T, d].
            key: [1, heads, T, d].
            cos: see `rotate`.
            sin: see `rotate`.
        """
        ctx.save_for_backward(cos, sin)
        return rotate(query, cos, sin), rotate(key, cos, sin)

    @staticmethod
    def backward(ctx: Any, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """Return the gradients of the queries and keys, which are the gradients of the outputs rotated back.

        Args:
            query: gradient of the rotated queries, [1, heads, T, d].
            key: gradient of the rotated keys, [1, heads, T, d].
        """
        cos, sin = ctx.saved_tensors
        return rotate(query, cos, -sin), rotate(key, cos, -sin), None, None


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary positions to x, [1, heads, T, d].

    Args:
        x: queries or keys.
        cos: cosines of the rotation angles, [1, T, d]. The two halves of the last dimension are equal.
        sin: sines of the rotation angles, in the same layout.
    """
    half = x.shape[-1] // 2
    result = x * cos[:, None]
    result[..., :half].addcmul_(x[..., half:], sin[:, None, :, :half], value=-1)
    result[..., half:].addcmul_(x[..., :half], sin[:, None, :, half:])
    return result


def does_folding_pay(model: nn.Module) -> bool:
    """Return whether folding the adapters into the weights reduces the FLOPs.

    Always False if an adapted weight is not fp32, or if an adapted layer is not an `nn.Linear`.

    Per token, a training step takes 6 in out FLOPs with folded adapters, and 4 in out + 6 r (in + out) with separate
    adapters.
    """
    linears: list[Any] = [module for module in model.modules() if isinstance(module, LoraLinear)]
    if not linears or any(linear.weight.dtype != torch.float32 for linear in linears):
        return False
    if not all(wraps_linear(linear) for linear in linears):
        return False
    saved_flops = 0
    extra_flops = 0
    for linear in linears:
        rank = linear.r[linear.active_adapters[0]]
        saved_flops += 6 * rank * (linear.in_features + linear.out_features)
        extra_flops += 2 * linear.in_features * linear.out_features
    return extra_flops < saved_flops


def wraps_linear(adapted_layer: Any) -> bool:
    """Return whether a layer with an adapter of peft is an `nn.Linear`.

    peft uses the same class for GPT-2's Conv1D, whose weight is transposed. With a square weight, `AdaptedLinear` would
    compute wrong outputs without an error.
    """
    return isinstance(adapted_layer.base_layer, nn.Linear)


FUSED_CLASSES: dict[type[nn.Module], type[nn.Module]] = {
    LoraLinear: FusedLora,
    Qwen2RMSNorm: FusedRMSNorm,
    Qwen2DecoderLayer: FusedDecoderLayer,
    SiglipEncoderLayer: FusedEncoderLayer,
}
STOCK_CLASSES: dict[type[nn.Module], type[nn.Module]] = {fused: stock for stock, fused in FUSED_CLASSES.items()}
# Llama's layers have the same parts as Qwen2's and compute the same results
STOCK_CLASSES |= {LlamaRMSNorm: Qwen2RMSNorm, LlamaDecoderLayer: Qwen2DecoderLayer}


def make_fused(model: PreTrainedModel, activation_checkpointing: str = "none", stock: bool = False) -> None:
    """Switch the LLM and the vision encoder to fused or stock implementations, in place.

    If folding reduces the FLOPs and nothing is recomputed, the adapters are folded into the weights, and a SigLIP
    encoder computes queries, keys and values in one product. Otherwise, the adapters' outputs are added to the outputs
    of the linear layers, and the vision encoder uses transformers' implementation. An adapter of a layer that is not an
    `nn.Linear` stays peft's.

    Args:
        model: the model to change.
        activation_checkpointing: what the backward pass recomputes: "none", "selective" (norms and SwiGLU products, not
            supported with `stock`) or "full" (every layer).
        stock: whether all modules use the implementations of transformers and peft.
    """
    folds_adapters = not stock and activation_checkpointing == "none" and does_folding_pay(model)
    for module in model.modules():
        stock_class = STOCK_CLASSES.get(type(module), type(module))
        stays_stock = stock or (stock_class is SiglipEncoderLayer and not folds_adapters)
        stays_stock |= stock_class is LoraLinear and not wraps_linear(module)
        module.__class__ = stock_class if stays_stock else FUSED_CLASSES.get(stock_class, stock_class)
        if isinstance(module, FusedDecoderLayer):
            module.is_selective = activation_checkpointing == "selective"
            module.folds_adapters = folds_adapters
    if activation_checkpointing == "full":
        model.activation_checkpointing_enable({"use_reentrant": False})
    else:
        model.activation_checkpointing_disable()
