"""Layers for the modules that compare images: linear layers with special initial weights, attention, norms, positions.

Shapes: B pairs, M queries, N keys, D width.
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
    """Computes x / rms(x) * weight on a CPU with fewer passes over memory than torch's function.

    The weight must be frozen or None. Do not use it for bf16, where every pass would round.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, epsilon: float) -> Tensor:
        """Return the normalised x, [..., D]."""
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        inverse_rms = (norm.square_().div_(x.shape[-1]).add_(epsilon)).rsqrt_()
        ctx.save_for_backward(x, weight, inverse_rms)
        normalised = x * inverse_rms
        return normalised if weight is None else normalised.mul_(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient of x, and None for the frozen weight."""
        x, weight, inverse_rms = ctx.saved_tensors
        grad_normalised = grad.clone() if weight is None else grad * weight
        # d(1 / rms) / dx is -x / (D rms^3)
        factor_of_x = torch.linalg.vecdot(grad_normalised, x)[..., None]
        factor_of_x = factor_of_x.mul_(inverse_rms.pow(3)).div_(-x.shape[-1])
        return grad_normalised.mul_(inverse_rms).addcmul_(x, factor_of_x), None, None


def rms_norm(x: Tensor, weight: Tensor | None = None, epsilon: float | None = None) -> Tensor:
    """Return x / rms(x) * weight.

    This uses `RMSNorm` if x is fp32 or fp64 on a CPU and the weight is frozen or None, and otherwise torch's function.
    """
    is_exact_on_cpu = x.dtype in (torch.float32, torch.float64) and x.device.type == "cpu"
    is_weight_frozen = weight is None or not weight.requires_grad
    if is_exact_on_cpu and is_weight_frozen:
        if epsilon is None:
            epsilon = torch.finfo(x.dtype).eps
        return RMSNorm.apply(x, weight, epsilon)
    return F.rms_norm(x, x.shape[-1:], weight, epsilon)


class SelfInitialisedLayer(nn.Module):
    """A layer that initialises its own parameters when transformers requests it. Sublayers initialise their own."""

    def reset_parameters(self) -> None:
        """Initialise the parameters of this layer, but not those of its sublayers."""
        raise NotImplementedError


class Projection(nn.Linear):
    """A linear layer of a new module, initialised with random weights or zeros.

    Args:
        width_in: width of the input.
        width_out: width of the output.
        gain: factor of the initial weights; 0 initialises them to zero.
    """

    def __init__(self, width_in: int, width_out: int, gain: float = 1.0) -> None:
        self.gain = gain
        super().__init__(width_in, width_out)

    def reset_parameters(self) -> None:
        """Draw random weights with standard deviation gain / sqrt(width_in) and set the bias to zero."""
        init.normal_(self.weight, std=self.gain / self.in_features**0.5)
        init.zeros_(self.bias)


class DifferenceProjection(Projection):
    """A linear layer on [a; b; a - b], such as Wp in equation (3) of M3Diff.

    The initial weights pass the difference a - b through and add small random projections of all inputs.
    """

    def reset_parameters(self) -> None:
        """Draw small random weights and add twice the identity for the difference."""
        width = self.out_features
        weight = torch.randn_like(self.weight) * 0.5 / self.in_features**0.5
        weight[:, 2 * width :] += 2 * torch.eye(width, dtype=weight.dtype, device=weight.device)
        init.copy_(self.weight, weight)
        init.zeros_(self.bias)


class MultiHeadAttention(nn.Module):
    """Multi-head attention CA(q, kv), with biases as in SigLIP. It is self-attention if q and kv are the same.

    Args:
        width: width of the queries and the output.
        heads: number of attention heads.
        gain: gain of the output projection's initial weights.
        qk_norm: whether queries and keys are divided by their root mean square.
        kv_width: width of the inputs for keys and values. By default, the same as `width`.
    """

    def __init__(
        self, width: int, heads: int, gain: float = 1.0, qk_norm: bool = False, kv_width: int | None = None
    ) -> None:
        super().__init__()
        self.heads = heads
        self.qk_norm = qk_norm
        self.q_proj = Projection(width, width)
        self.k_proj = Projection(kv_width or width, width)
        self.v_proj = Projection(kv_width or width, width)
        self.out_proj = Projection(width, width, gain)

    def _split_heads(self, x_BND: Tensor) -> Tensor:
        return x_BND.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def _with_positions(self, x_BND: Tensor, positions_ND: Tensor | None) -> Tensor:
        """Normalise queries or keys, add positions, and split them into heads.

        Keys may come from several grids of patches. The same positions are added to each grid.
        """
        if self.qk_norm:
            x_BND = rms_norm(x_BND)
        if positions_ND is not None:
            grids = x_BND.shape[1] // len(positions_ND)
            x_BND = x_BND + positions_ND.repeat(grids, 1)
        return self._split_heads(x_BND)

    def forward(self, q_BMD: Tensor, kv_BND: Tensor, positions_ND: Tensor | None = None) -> Tensor:
        """Return CA(q, kv), [B, M, D].

        Args:
            q_BMD: inputs for the queries.
            kv_BND: inputs for the keys and values.
            positions_ND: positions of a grid of patches, added to queries and keys, or None for no positions.
        """
        q = self._with_positions(self.q_proj(q_BMD), positions_ND)
        k = self._with_positions(self.k_proj(kv_BND), positions_ND)
        v = self._split_heads(self.v_proj(kv_BND))
        heads = F.scaled_dot_product_attention(q, k, v)
        return self.out_proj(heads.transpose(1, 2).flatten(2))

    def norm_weighted_attention(self, q_BMD: Tensor, kv_BND: Tensor, positions_ND: Tensor | None = None) -> Tensor:
        """Return how much each key's value contributes to each query's output, [B, M, N], for visualisation.

        This is the attention weight times the norm of the projected value (Kobayashi et al. 2020, arXiv 2004.10102),
        summed over the heads.
        """
        value_norms = self.projected_values(kv_BND).norm(dim=-1)  # [B, heads, N]
        weights = self.attention_weights(q_BMD, kv_BND, positions_ND)  # [B, heads, M, N]
        return (weights * value_norms[:, :, None]).sum(1)

    def attention_weights(self, q_BMD: Tensor, kv_BND: Tensor, positions_ND: Tensor | None = None) -> Tensor:
        """Return the attention weights of each query, [B, heads, M, N]. They sum to 1 over the keys."""
        q = self._with_positions(self.q_proj(q_BMD), positions_ND)
        k = self._with_positions(self.k_proj(kv_BND), positions_ND)
        return (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(-1)

    def projected_values(self, kv_BND: Tensor) -> Tensor:
        """Return each key's value after the output projection, [B, heads, N, D]."""
        out_weight = self.out_proj.weight.unflatten(1, (self.heads, -1))
        return torch.einsum("bhnd,ohd->bhno", self._split_heads(self.v_proj(kv_BND)), out_weight)


@lru_cache(maxsize=8)
def sincos_positions(side: int, width: int, heads: int, amplitude: float, dtype: torch.dtype, device: Any) -> Tensor:
    """Return position embeddings of a side x side grid, [side^2, width]: sines and cosines of x and y in each head.

    They are always computed in fp32 on the CPU, even within `torch.device("meta")`, because the result is cached for
    later models with the same precision and device.
    """
    head_width = width // heads
    count = head_width // 4
    frequencies = math.pi * torch.linspace(1, 0, count + 1, device="cpu")[:-1]
    angles = torch.arange(side, device="cpu")[:, None] * frequencies
    axis = torch.cat([angles.sin(), angles.cos()], dim=-1)
    x_positions = axis[None].expand(side, -1, -1)
    y_positions = axis[:, None].expand(-1, side, -1)
    grid = torch.cat([x_positions, y_positions], dim=-1)
    head_positions = F.pad(grid, (0, head_width - 4 * count))
    return (amplitude * head_positions.repeat(1, 1, heads).flatten(0, 1)).to(device, dtype)


def grid_positions(features_BND: Tensor, width: int, heads: int, amplitude: float) -> Tensor | None:
    """Return position embeddings of the square grid of N patches, [N, width], or None if the amplitude is 0.

    They have the same precision and device as the features.
    """
    if not amplitude:
        return None
    side = math.isqrt(features_BND.shape[1])
    return sincos_positions(side, width, heads, amplitude, features_BND.dtype, features_BND.device)


@contextmanager
def record_tensors(modules: Sequence[nn.Module], compute: Callable[..., Tensor]) -> Iterator[list[Tensor]]:
    """Record a tensor for each forward pass of the modules within the block, and return the list of these tensors.

    Args:
        modules: the modules to observe.
        compute: (module, *arguments, result=...) -> the tensor to record.
    """
    tensors: list[Tensor] = []

    def append_tensor(module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any], result: Any) -> None:
        tensors.append(compute(module, *arguments, result=result, **options))

    hooks = [module.register_forward_hook(append_tensor, with_kwargs=True) for module in modules]
    try:
        yield tensors
    finally:
        for hook in hooks:
            hook.remove()


def can_trim_last_layer(llm: Any) -> bool:
    """Return whether the LLM's last layer can compute outputs only for selected positions, as fused layers can."""
    return getattr(llm.layers[-1], "accepts_kept_positions", False)


def insert_visual_tokens(embeds: Tensor, visual: Tensor, tokens: Tensor, image_token: Any) -> Tensor:
    """Put the rows of `visual` in place of the image tokens' embeddings and return the embeddings, [B, T, W].

    The result is the same as with `masked_scatter`, whose backward pass would synchronise with the GPU. Further rows of
    `visual`, which belong to a blank pair, do not change the embeddings. They get a gradient of zero, so that the parts
    of the model that computed them have a gradient.

    Args:
        embeds: embeddings of all tokens, [B, T, W].
        visual: embeddings of the visual tokens, [V, W].
        tokens: token ids, [B, T], on the CPU, where their positions can be found without synchronising with the GPU.
        image_token: id of the image token.
    """
    positions = tokens.flatten().eq(image_token).nonzero().flatten().to(embeds.device, non_blocking=True)
    rows = visual.to(embeds)
    blank_rows = rows[len(positions) :]
    embeds = embeds.flatten(0, -2).index_copy(0, positions, rows[: len(positions)]).view_as(embeds)
    return embeds + 0 * blank_rows.sum() if len(blank_rows) else embeds


def image_pairs(images: int, counts: Tensor | Sequence[int] | None) -> Tensor:
    """Return the numbers of the two images of each pair among all images of a batch, [P, 2] int64 on the CPU.

    Args:
        images: number of images in the batch.
        counts: number of images of each image set, on the CPU. A set of two images is a pair. None if all images are in
            pairs.

    Raises:
        ValueError: the counts do not add up to the number of images.
    """
    count_of_set = torch.as_tensor([2] * (images // 2) if counts is None else counts, device="cpu")
    if int(count_of_set.sum()) != images:
        raise ValueError(f"image sets of {count_of_set.tolist()} images are not {images} images")
    first_images = count_of_set.cumsum(0) - count_of_set
    before = first_images[count_of_set == 2]
    return torch.stack([before, before + 1], dim=1)


class Mlp(nn.Sequential):
    """Two linear layers with GELU between them.

    Args:
        width_in: width of the input.
        out: the second layer. The width of its input is the hidden width.
        approximate: approximation of GELU, "tanh" or "none".
    """

    def __init__(self, width_in: int, out: Projection, approximate: str = "tanh") -> None:
        super().__init__(Projection(width_in, out.in_features), nn.GELU(approximate=approximate), out)


class Detector(Projection):
    """The last linear layer of an MLP, with initial weights that make a new module detect changes.

    In addition to the random projection, it adds the sum of all hidden units along one random direction. This sum grows
    with the size of the difference, regardless of the direction of the difference.
    """

    STRENGTH = 24.0

    def reset_parameters(self) -> None:
        """Draw random weights and add the direction for the sum of the hidden units."""
        super().reset_parameters()
        direction = torch.randn_like(self.weight[:, :1]) * self.STRENGTH / self.in_features
        init.copy_(self.weight, self.weight.detach() + direction)
