"""Layers of the modules that compare images: linears with initial weights of their own, attention, norms, positions.

Shapes: B pairs, M queries, N keys, D a width.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization as init


class RMSNorm(torch.autograd.Function):
    """x / rms(x) * weight for a frozen weight or none, in few passes; on a CPU torch's own takes many. Not in bf16,
    where every pass rounds."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, epsilon: float) -> Tensor:
        size = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        inverse = (size.square_().div_(x.shape[-1]).add_(epsilon)).rsqrt_()
        ctx.save_for_backward(x, weight, inverse)
        normed = x * inverse
        return normed if weight is None else normed.mul_(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        x, weight, inverse = ctx.saved_tensors
        of_normed = grad.clone() if weight is None else grad * weight
        along = torch.linalg.vecdot(of_normed, x)[..., None]
        along = along.mul_(inverse.pow(3)).div_(-x.shape[-1])
        return of_normed.mul_(inverse).addcmul_(x, along), None, None


def rms_norm(x: Tensor, weight: Tensor | None = None, epsilon: float | None = None) -> Tensor:
    """torch's own kernel on a GPU, `RMSNorm` on a CPU."""
    exact = x.dtype in (torch.float32, torch.float64) and x.device.type == "cpu"
    if exact and (weight is None or not weight.requires_grad):
        return RMSNorm.apply(x, weight, torch.finfo(x.dtype).eps if epsilon is None else epsilon)
    return F.rms_norm(x, x.shape[-1:], weight, epsilon)


class OwnStart(nn.Module):
    """A module that gives its own parameters, not its children's, their first values when transformers asks."""

    def reset_parameters(self) -> None:
        raise NotImplementedError


class Projection(nn.Linear):
    """A linear layer of a new module; `gain` scales its starting weights, 0 makes it zero-initialised."""

    def __init__(self, width_in: int, width_out: int, gain: float = 1.0) -> None:
        self.gain = gain
        super().__init__(width_in, width_out)

    def reset_parameters(self) -> None:
        init.normal_(self.weight, std=self.gain / self.in_features**0.5)
        init.zeros_(self.bias)


class DifferenceProjection(Projection):
    """A linear on [a; b; a - b], as Wp of equation (3) of M3Diff: it starts out passing the difference through and a
    little of both beside it."""

    def reset_parameters(self) -> None:
        width = self.out_features
        start = torch.randn_like(self.weight) * 0.5 / self.in_features**0.5
        start[:, 2 * width :] += 2 * torch.eye(width, dtype=start.dtype, device=start.device)
        init.copy_(self.weight, start)
        init.zeros_(self.bias)


class MultiHeadAttention(nn.Module):
    """Multi-head attention CA(q, kv); self-attention where both are the same. Biased projections, as in SigLIP; with
    `normed`, queries and keys have size one. `kv_width` is the keys' where it is another than the queries'."""

    def __init__(
        self, width: int, heads: int, gain: float = 1.0, normed: bool = False, kv_width: int | None = None
    ) -> None:
        super().__init__()
        self.heads, self.normed = heads, normed
        self.q_proj = Projection(width, width)
        self.k_proj = Projection(kv_width or width, width)
        self.v_proj = Projection(kv_width or width, width)
        self.out_proj = Projection(width, width, gain)

    def _split(self, x_BND: Tensor) -> Tensor:
        return x_BND.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def _placed(self, x_BND: Tensor, places_ND: Tensor | None) -> Tensor:
        """Queries or keys with the positions of their places; keys may hold several grids one after another."""
        if self.normed:
            x_BND = rms_norm(x_BND)
        if places_ND is not None:
            x_BND = x_BND + places_ND.repeat(x_BND.shape[1] // len(places_ND), 1)
        return self._split(x_BND)

    def forward(self, q_BMD: Tensor, kv_BND: Tensor, places_ND: Tensor | None = None) -> Tensor:
        q, k = self._placed(self.q_proj(q_BMD), places_ND), self._placed(self.k_proj(kv_BND), places_ND)
        attention_output = F.scaled_dot_product_attention(q, k, self._split(self.v_proj(kv_BND)))
        return self.out_proj(attention_output.transpose(1, 2).flatten(2))

    def norm_weighted_attention(self, q_BMD: Tensor, kv_BND: Tensor, places_ND: Tensor | None = None) -> Tensor:
        """The amount of each key's value that reaches each query, [B, M, N]: attention times the size of the projected
        value (Kobayashi et al. 2020, arXiv 2004.10102), summed over heads; for showing, not for training."""
        sizes = self.values(kv_BND).norm(dim=-1)
        return (self.weights(q_BMD, kv_BND, places_ND) * sizes[:, :, None]).sum(1)

    def weights(self, q_BMD: Tensor, kv_BND: Tensor, places_ND: Tensor | None = None) -> Tensor:
        """The attention of each query to each key, [B, heads, M, N]; sums to 1 over the keys."""
        q, k = self._placed(self.q_proj(q_BMD), places_ND), self._placed(self.k_proj(kv_BND), places_ND)
        return (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(-1)

    def values(self, kv_BND: Tensor) -> Tensor:
        """Each key's value as it leaves the output projection, [B, heads, N, D]."""
        out = self.out_proj.weight.unflatten(1, (self.heads, -1))
        return torch.einsum("bhnd,ohd->bhno", self._split(self.v_proj(kv_BND)), out)


@lru_cache(maxsize=8)
def sincos_positions(side: int, width: int, heads: int, amplitude: float, dtype: torch.dtype, device: Any) -> Tensor:
    """Positions of a side x side grid, [side^2, width]: in each head, sines and cosines of x and of y. Computed in fp32
    on the CPU, whatever the device around: they are kept for every later model of that precision and device."""
    pairs = width // heads // 4
    frequencies = math.pi * torch.linspace(1, 0, pairs + 1, device="cpu")[:-1]
    angles = torch.arange(side, device="cpu")[:, None] * frequencies
    axis = torch.cat([angles.sin(), angles.cos()], dim=-1)
    grid = torch.cat([axis[None].expand(side, -1, -1), axis[:, None].expand(-1, side, -1)], dim=-1)
    per_head = F.pad(grid, (0, width // heads - 4 * pairs))
    return (amplitude * per_head.repeat(1, 1, heads).flatten(0, 1)).to(device, dtype)


def grid_positions(like_BND: Tensor, width: int, heads: int, amplitude: float) -> Tensor | None:
    """Positions of the square grid of N patches, in the features' precision and place; None without amplitude."""
    if not amplitude:
        return None
    return sincos_positions(math.isqrt(like_BND.shape[1]), width, heads, amplitude, like_BND.dtype, like_BND.device)


@contextmanager
def recorded(modules: Sequence[nn.Module], taken: Callable[..., Tensor]) -> Iterator[list[Tensor]]:
    """Within it, each forward of a module adds what is `taken` of it, its arguments and its result."""
    found: list[Tensor] = []

    def add(module: nn.Module, given: tuple[Any, ...], named: dict[str, Any], result: Any) -> None:
        found.append(taken(module, *given, result=result, **named))

    hooks = [module.register_forward_hook(add, with_kwargs=True) for module in modules]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def trims(llm: Any) -> bool:
    """True where the LLM's last layer takes `kept`, the places that it is asked for: fused kernels do."""
    return getattr(llm.layers[-1], "takes_kept", False)


def with_visual_tokens(embeds: Tensor, visual: Tensor, tokens: Tensor, image_token: Any) -> Tensor:
    """The embeddings [., T, W] with the rows of `visual` [V, W] in the places of the image token: as `masked_scatter`,
    whose backward would wait for a GPU.

    Args:
        tokens: the token ids, [., T], on the CPU, which therefore knows the places.
    """
    places = tokens.flatten().eq(image_token).nonzero().flatten().to(embeds.device, non_blocking=True)
    return embeds.flatten(0, -2).index_copy(0, places, visual.to(embeds)).view_as(embeds)


class Mlp(nn.Sequential):
    """Into the hidden units of `last`, through GELU and out by it."""

    def __init__(self, width_in: int, last: Projection, approximate: str = "tanh") -> None:
        super().__init__(Projection(width_in, last.in_features), nn.GELU(approximate=approximate), last)


class Detector(Projection):
    """The last layer of an MLP on a difference where a module begins: besides the rest it adds the sum of all hidden
    units, which grows with the size of the difference whatever its direction, in one direction of its own."""

    STRENGTH = 24.0

    def reset_parameters(self) -> None:
        super().reset_parameters()
        direction = torch.randn_like(self.weight[:, :1]) * self.STRENGTH / self.in_features
        init.copy_(self.weight, self.weight.detach() + direction)
