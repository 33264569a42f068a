"""Attention of the LLM while it trains: one implementation, called NAME, that follows whatever mask it is handed.

The sequences of a micro-batch lie end to end in one row of T tokens. FlexAttention takes the row as it is. SDPA's
kernels take rectangles: queries, keys and values are laid out so around the kernel alone, so that nothing else is
computed on padding. Model and mask cannot disagree: the mask chooses the kernel.

Every path runs on a CPU. There FlexAttention has no backward, so its rule is evaluated for every two tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.nn.attention.flex_attention import BlockMask, create_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

NAME = "m3diff"
KERNELS = {"": "sdpa", "text_config": NAME, "vision_config": "sdpa"}
"""transformers' `attn_implementation` of a model that trains."""

FUSED_ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]

RECURRING = 128
"""FlexAttention's row is a multiple of this many tokens (its block), so that shapes recur from step to step."""


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


class ToRows(torch.autograd.Function):
    """[T, D] to [P, D]; what stands where there is no token is of no consequence, and gets no gradient."""

    @staticmethod
    def forward(ctx: Any, flat: Tensor, rows: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        ctx.tokens = len(flat)
        return flat.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (places,) = ctx.saved_tensors
        return _fill(grad.index_select(0, places), ctx.tokens), None, None


class FromRows(torch.autograd.Function):
    """[P, D] back to [T, D], zeros on the padding at the end of the row."""

    @staticmethod
    def forward(ctx: Any, placed: Tensor, places: Tensor, tokens: int) -> Tensor:
        ctx.save_for_backward(places)
        ctx.shape = placed.shape
        return _fill(placed.index_select(0, places), tokens)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (places,) = ctx.saved_tensors
        return grad.new_zeros(ctx.shape).index_copy_(0, places, grad[: len(places)]), None, None


def _fill(flat: Tensor, tokens: int) -> Tensor:
    return flat if len(flat) == tokens else torch.cat([flat, flat.new_zeros(tokens - len(flat), flat.shape[1])])


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
    tokens, heads = query.shape[2], query.shape[1]
    query, key, value = (
        ToRows.apply(tensor.transpose(1, 2).reshape(tokens, -1), layout.rows, layout.places).unflatten(
            -1, (tensor.shape[1], -1)
        )
        for tensor in (query, key, value)
    )
    return attend_rows(query, key, value, layout, tokens, scaling).unflatten(-1, (heads, -1))[None], None


def attend_rows(
    query: Tensor, key: Tensor, value: Tensor, layout: Layout, tokens: int, scaling: float | None
) -> Tensor:
    """SDPA of each rectangle: [P, heads, d] each to [T, heads d]."""
    sizes = [count * size for count, size in layout.shapes]
    out = []
    for shape, mask, *parts in zip(
        layout.shapes, layout.masks, *(placed.split(sizes) for placed in (query, key, value)), strict=True
    ):
        q, k, v = (part.unflatten(0, shape).transpose(1, 2) for part in parts)
        out.append(sdpa(q, k, v, mask, scaling).flatten(0, 1).flatten(1))
    return FromRows.apply(torch.cat(out) if len(out) > 1 else out[0], layout.places, tokens)


def sdpa(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None) -> Tensor:
    """[B, heads, S, d] each to [B, S, heads, d]; without a mask causal."""
    groups = query.shape[1] // key.shape[1]
    # on a GPU no fused kernel takes a mask, or fp32, together with fewer key heads
    if query.is_cuda and (mask is not None or query.dtype == torch.float32):
        key, value, groups = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1), 1
    out = scaled_dot_product_attention(
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
