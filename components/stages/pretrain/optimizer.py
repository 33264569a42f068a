"""The optimizer of a tiny base: Muon, on processors without products in bf16 too, and AdamW.

torch orthogonalises every update of Muon in bf16. Where a processor has to emulate it, that takes 24 times as long as
in fp32 (54 and 2.3 ms for a matrix of 128 x 256 on an AMD EPYC), five sixths of a step of the tiny base.
"""

import math
from functools import partial

import torch
from torch import Tensor
from torch.optim import _muon as theirs

from m3diff.stages.pretrain.params import Pretrain


def has_bf16_products() -> bool:
    """Return whether this processor multiplies in bf16 by itself."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def orthogonalised(grad: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Return the Newton-Schulz iteration of torch's Muon, in the precision of `grad`, [rows, columns]."""
    a, b, c = coefficients
    wide = grad.T if grad.size(0) > grad.size(1) else grad
    found = wide / wide.norm().clamp(min=eps)
    for _ in range(steps):
        gram = found @ found.T
        found = torch.addmm(found, torch.addmm(gram, gram, gram, beta=b, alpha=c), found, beta=a)
    return found.T if grad.size(0) > grad.size(1) else found


class Muon(torch.optim.Muon):
    """torch's own where the processor has products in bf16; else with `orthogonalised` in the place of its."""

    def step(self, closure: object = None) -> None:  # type: ignore[override]  # no loss is asked for
        assert closure is None, "a step takes no closure here"
        if has_bf16_products():
            super().step()
            return
        own = theirs._zeropower_via_newtonschulz
        theirs._zeropower_via_newtonschulz = orthogonalised  # type: ignore[assignment]  # its parameters' names
        try:
            super().step()
        finally:
            theirs._zeropower_via_newtonschulz = own


class Optimizer:
    """Muon for the matrices and AdamW for the rest, with warm-up, a plateau and cosine to the end. From nothing, Muon
    gets as far in half the steps (see LOG.md)."""

    def __init__(self, model: torch.nn.Module, cfg: Pretrain, steps: int) -> None:
        self.model, self.steps = model, steps
        matrices: list[Tensor] = []  # of linear layers; the rest: embeddings, convolutions, norms and biases
        rest: list[Tensor] = []
        for name, p in model.named_parameters():
            (matrices if p.ndim == 2 and "embed" not in name else rest).append(p)
        decay, shape = cfg.weight_decay, partial(plateau, cfg.warmup_steps, steps)
        muon = Muon(matrices, lr=cfg.lr_matrices, weight_decay=decay, adjust_lr_fn="match_rms_adamw")
        adamw = torch.optim.AdamW(rest, lr=cfg.lr, betas=(0.9, 0.98), weight_decay=decay)
        self.optimizers = (muon, adamw)
        self.schedules = [torch.optim.lr_scheduler.LambdaLR(optimizer, shape) for optimizer in self.optimizers]

    def __call__(self, loss: Tensor) -> float:
        """Take one step; the loss as a number."""
        self.model.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer, schedule in zip(self.optimizers, self.schedules, strict=True):
            optimizer.step()
            schedule.step()
        return float(loss.detach())


def plateau(warmup: int, steps: int, step: int) -> float:
    """Return the factor of the learning rate: up to 1, there for half the run, then down a cosine to 0.01."""
    if step < warmup:
        return (step + 1) / warmup
    done = max(0.0, 2 * step / steps - 1)
    return 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
