"""torch's Muon, on processors that have no products in bf16.

torch orthogonalises every update in bf16. Where a processor has to emulate it, that takes 24 times as long as in fp32
(54 and 2.3 ms for a matrix of 128 x 256 on an AMD EPYC), five sixths of a step of the tiny base.
"""

import torch
from torch import Tensor
from torch.optim import _muon as theirs


def has_bf16_products() -> bool:
    """Whether this processor multiplies in bf16 by itself."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def orthogonalised(grad: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """The Newton-Schulz iteration of torch's Muon, in the precision of `grad`, [rows, columns]."""
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
