"""Muon on a processor without bf16: the same update, but for what bf16 rounds."""

import pytest
import torch
from torch.optim import _muon as theirs

from m3diff.stages.pretrain import optimizer as muon
from m3diff.stages.pretrain.optimizer import Muon, orthogonalised

COEFFICIENTS = (3.4445, -4.775, 2.0315)


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (32, 32)])
def test_the_iteration_is_torch_s_but_for_rounding(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    grad = torch.randn(shape)
    found = orthogonalised(grad, COEFFICIENTS, 5, 1e-7)
    want = theirs._zeropower_via_newtonschulz(grad, COEFFICIENTS, 5, 1e-7).float()
    assert found.shape == shape
    assert found.dtype == torch.float32
    assert (found - want).norm() < 0.03 * want.norm()
    sizes = torch.linalg.svdvals(found)
    assert 0.6 < sizes.min() <= sizes.max() < 1.3, "about orthogonal"


def test_a_gradient_of_zeros_is_no_division_by_zero() -> None:
    assert torch.equal(orthogonalised(torch.zeros(3, 5), COEFFICIENTS, 5, 1e-7), torch.zeros(3, 5))


@pytest.mark.parametrize("native", [True, False])
def test_the_processor_decides_whose_iteration_runs_and_torch_keeps_its_own(
    native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[torch.dtype] = []
    own = theirs._zeropower_via_newtonschulz

    def counted(grad: torch.Tensor, *args: object) -> torch.Tensor:
        ran.append(grad.dtype)
        return orthogonalised(grad, *args)

    monkeypatch.setattr(muon, "has_bf16_products", lambda: native)
    monkeypatch.setattr(muon, "orthogonalised", counted)
    weight = torch.nn.Parameter(torch.eye(4))
    optimizer = Muon([weight], lr=0.1, adjust_lr_fn="match_rms_adamw")
    weight.grad = torch.randn(4, 4)
    optimizer.step()
    assert ran == ([] if native else [torch.float32])
    assert not torch.equal(weight, torch.eye(4))
    assert theirs._zeropower_via_newtonschulz is own


def test_torch_keeps_its_own_after_a_step_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("a matrix is no matrix")

    own = theirs._zeropower_via_newtonschulz
    monkeypatch.setattr(muon, "has_bf16_products", lambda: False)
    monkeypatch.setattr(muon, "orthogonalised", fail)
    weight = torch.nn.Parameter(torch.eye(4))
    weight.grad = torch.randn(4, 4)
    with pytest.raises(RuntimeError, match="no matrix"):
        Muon([weight], lr=0.1).step()
    assert theirs._zeropower_via_newtonschulz is own
