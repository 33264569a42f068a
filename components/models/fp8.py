"""The frozen products of a model's adapted linears in FP8 (e4m3: three bits of mantissa) instead of bf16.

Every row of an activation, of a gradient and of a weight has its own scale, a power of two, so that scaling rounds
nothing and a token's outputs do not depend on what else is in its batch. Gradients are e4m3 too, as in torchao's
row-wise recipe: a scale a row makes e5m2's range needless. Adapters, sums and what passes between layers stay as they
are. In `eval()` a linear computes by its bf16 weight, which is also what is saved and merged.

Memory: two copies of a byte a weight beside the two bytes of bf16, one for x W' and one for dy W, since the kernel of
a Hopper GPU reads both factors along the summed dimension. On a CPU the same operator gives the same numbers, slowly.
"""

from typing import Any, NamedTuple

import torch
from peft.tuners.lora.layer import Linear as LoraLinear
from torch import Tensor, nn

from components.models.device import Device
from components.models.fused import FoldedDecoderLayer, FusedLora, fused_on_gpu, is_partitioned

FLOAT8 = torch.float8_e4m3fn
MULTIPLE = 16  # the kernel takes no other sizes of a weight


class Rounded(NamedTuple):
    """A matrix in FP8: `values` [rows, columns] times `scales` [rows, 1] in fp32."""

    values: Tensor
    scales: Tensor


def rounded(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Values and scales of a matrix in FP8, a scale a row; the products of a row with an infinity or NaN are NaN."""
    largest = torch.finfo(FLOAT8).max  # here: torch.compile would take a module's float for a variable
    most = matrix.abs().amax(dim=1, keepdim=True).float()
    scales = (most / largest).log2().ceil().exp2().clamp(min=2.0**-100)  # a product of two is still a normal number
    return (matrix.float() / scales).clamp(-largest, largest).to(FLOAT8), scales


def fp8_product(matrix: Tensor, weight: Rounded, bias: Tensor | None = None, fast: bool = False) -> Tensor:
    """matrix weight' + bias, the matrix rounded here.

    Args:
        matrix: [T, n], bf16.
        weight: [m, n].
        bias: [m], bf16.
        fast: a GPU adds up with fewer bits, as TransformerEngine does in forward and not in backward.

    Returns: [T, m], bf16.
    """
    values, scales = fused_on_gpu(rounded, matrix)(matrix)
    return torch._scaled_mm(
        values,
        weight.values.t(),
        scale_a=scales,
        scale_b=weight.scales.t(),
        bias=bias,
        out_dtype=torch.bfloat16,
        use_fast_accum=fast,
    )


class Fp8AdaptedLinear(torch.autograd.Function):
    """`AdaptedLinear` with its two frozen products in FP8.

    x: [T, in]; along_in: W [out, in]; along_out: W' [in, out]; lora_a: [r, in]; lora_b: [out, r].
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        along_in: Rounded,
        along_out: Rounded,
        bias: Tensor | None,
        lora_a: Tensor,
        lora_b: Tensor,
        scaling: float,
    ) -> Tensor:
        low = nn.functional.linear(x, lora_a)
        ctx.save_for_backward(x, low, lora_a, lora_b)
        ctx.along_out, ctx.scaling = along_out, scaling
        return fp8_product(x, along_in, bias, fast=True).addmm_(low, lora_b.t(), alpha=scaling)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, Tensor, Tensor, None]:
        x, low, lora_a, lora_b = ctx.saved_tensors
        of_low = torch.mm(grad, lora_b).mul_(ctx.scaling)
        of_x = fp8_product(grad, ctx.along_out).addmm_(of_low, lora_a)
        return of_x, None, None, None, of_low.t() @ x, (grad.t() @ low).mul_(ctx.scaling), None


class Fp8Lora(FusedLora):
    """One linear with its adapter. Its copies are no buffers: nobody saves them or turns them into bf16."""

    copies: tuple[Rounded, Rounded]

    def adapted(self, x: Tensor, base: Any, lora_a: Tensor, lora_b: Tensor, scaling: float) -> Tensor:
        return Fp8AdaptedLinear.apply(x, *self.copies, base.bias, lora_a, lora_b, scaling)


def use_fp8(model: nn.Module, device: Device) -> int:
    """Let the adapted linears compute in FP8 from now on, in place, from copies of their weights as these are now; how
    many do. Where a side of a weight is no multiple of 16 it stays in bf16.

    Raises:
        DeviceError: the GPU computes no FP8.
        ValueError: the precision is not bf16, or no linear can take FP8; says what to change.
    """
    device.require_fp8()
    if device.precision != "bf16":
        raise ValueError(f"train.fp8: is for train.precision bf16, found {device.precision}; write fp8: false")
    if any(isinstance(module, FoldedDecoderLayer) for module in model.modules()):
        raise ValueError("train.fp8: the adapters are folded into the weights, which then are not frozen")
    if any(is_partitioned(linear.base_layer) for linear in adapted_linears(model)):
        raise ValueError("train.fp8: ZeRO 3 holds the weights in parts; set compute.zero_stage to 2, or fp8: false")
    chosen = fp8_linears(model)
    if not chosen:
        raise ValueError(
            f"train.fp8: no linear of the model has an adapter and sides that are multiples of {MULTIPLE}; write "
            "fp8: false"
        )
    for linear in chosen:
        linear.__class__ = Fp8Lora
        linear.copies = _copies(linear.base_layer.weight)
    return len(chosen)


def without_fp8(model: nn.Module) -> None:
    """Undo `use_fp8` and give the copies' memory back."""
    linears: list[Any] = [module for module in model.modules() if isinstance(module, Fp8Lora)]
    for linear in linears:
        del linear.copies
        linear.__class__ = FusedLora


@torch.no_grad()
def _copies(weight: Tensor) -> tuple[Rounded, Rounded]:
    return Rounded(*rounded(weight)), Rounded(*rounded(weight.t().contiguous()))


def adapted_linears(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, LoraLinear)]


def fp8_linears(model: nn.Module) -> list[Any]:
    """The linears with adapters that compute in FP8: the kernel takes the sides of their weights."""
    return [
        linear
        for linear in adapted_linears(model)
        if linear.in_features % MULTIPLE == 0 and linear.out_features % MULTIPLE == 0
    ]


def copies_bytes(model: nn.Module) -> int:
    """What `use_fp8` would take of a GPU's memory; for a model on the meta device too."""
    sizes = [(linear.in_features, linear.out_features) for linear in fp8_linears(model)]
    return sum(2 * columns * rows + 4 * (columns + rows) for columns, rows in sizes)
