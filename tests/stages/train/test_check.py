"""The check at first use: it passes where packing is right, ends the run where it is not, and leaves no trace."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from m3diff.models.device import Device
from m3diff.settings.section import ParamsError
from m3diff.stages.train import batches, packing
from m3diff.stages.train.engine import check_packing
from tests.gpu.choices import small
from tests.stages.train.toy import run, started


def begun(mixture: Path, folder: Path, **changes: Any) -> Any:
    """On the embedded base: it was trained, so that what a token sees matters to its loss."""
    return started(small(Device(False, "fp32"), scratch=folder, **changes), mixture, folder)


def check(made: Any) -> str | None:
    return check_packing(made.engine, made.schedule, made.loader, made.processor, made.device)


def seeing_siblings(segments: torch.Tensor) -> Callable[..., torch.Tensor]:
    """The rule without the branches."""

    def sees(batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        there = segments[batch, key] != packing.PAD
        return ((key <= query) & there) | (key == query)

    return sees


def positions_that_go_on(groups: Any) -> packing.Packed:
    """Positions that do not restart where a branch does."""
    packed = packing.pack(groups)
    return replace(packed, position_ids=torch.arange(packed.tokens)[None])


def sequences_that_see_each_other(sequences: torch.Tensor, segments: torch.Tensor) -> Callable[..., torch.Tensor]:
    within = packing.prefix_rule(segments[None])
    return lambda batch, head, query, key: within(batch * 0, head, query, key)


FAULTS = {
    "siblings": (packing, "prefix_rule", seeing_siblings),
    "positions": (batches, "pack", positions_that_go_on),
    "sequences": (packing, "row_rule", sequences_that_see_each_other),
}


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(("kernel", "precision", "stage"), [("sdpa", "bf16", 1), ("flex", "fp32", 0)])
def test_a_right_run_passes_and_keeps_its_mode_and_random_state(
    kernel: str, precision: str, stage: int, mixture: Path, tmp_path: Path
) -> None:
    made = begun(mixture, tmp_path, attention=kernel, precision=precision, zero_stage=stage)
    state, training = torch.get_rng_state(), [module.training for module in made.engine.module.modules()]
    assert (check(made) or "").startswith(f"packing checked, attention {kernel}: loss ")
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in made.engine.module.modules()] == training
    assert made.engine.module.training, "checked as it trains"
    assert all(p.grad is None for p in made.engine.module.parameters())
    made.schedule = replace(made.schedule, max_captions=1)
    assert check(made) is None, "one caption a sequence needs no check"


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("kernel", "faults", "remedy"),
    [
        ("flex", ["siblings", "positions", "sequences"], "set compute.attention to sdpa"),
        ("sdpa", ["siblings", "positions"], "set train.max_captions_per_sequence to 1"),
    ],
)
def test_a_fault_ends_the_run_with_both_numbers_the_kernel_and_the_way_out(
    kernel: str, faults: list[str], remedy: str, mixture: Path, tmp_path: Path
) -> None:
    made = begun(mixture, tmp_path, attention=kernel)
    words = rf"[\d.]+ packed, [\d.]+ as \d+ sequences of one reference \(attention {kernel}, fp32; .*{remedy}"
    for fault in faults:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(*FAULTS[fault])
            with pytest.raises(ParamsError, match=words):
                check(made)


def test_the_run_ends_before_its_first_step_and_is_not_tried_again(
    mixture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    monkeypatch.setattr(*FAULTS["siblings"])
    monkeypatch.setattr("m3diff.stages.train.loop.Training.step", lambda *_: pytest.fail("a step was taken"))
    with pytest.raises(ParamsError, match="packed"):
        run(small(Device(False, "fp32")), mixture, tmp_path)
    assert "goes on from the newest checkpoint" not in capfd.readouterr().out
