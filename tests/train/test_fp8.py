"""Training with `train.fp8` through the loop, on a CPU by the same operator."""

from pathlib import Path
from typing import Any

import pytest

from components.models import fp8
from components.train.job import Job, Runtime
from components.train.loop import check, start
from tests.gpu.choices import small
from tests.models.test_fp8 import IN_FP8
from tests.train.toy import recipe, run

GPU_CHOICES = {"precision": "bf16", "attention": "flex", "zero_stage": 1}


def test_a_run_in_fp8_trains_nearly_as_one_in_bf16(mixture: Path, base: Path, tmp_path: Path, capfd: Any) -> None:
    made = recipe(base, **GPU_CHOICES, epochs=1, global_batch=8)
    want = run(made, mixture, tmp_path / "bf16")
    assert "FP8" not in capfd.readouterr().out
    got = run(made.changed(fp8=True), mixture, tmp_path / "fp8")
    assert f"train: {IN_FP8} frozen linears compute in FP8" in capfd.readouterr().out
    assert len(got.curve) == 2
    assert got.column("loss") == pytest.approx(want.column("loss"), rel=1e-3)
    assert got.column("loss") != want.column("loss")
    assert got.column("grad_norm") == pytest.approx(want.column("grad_norm"), rel=0.05)
    assert got.report.parameters == want.report.parameters
    assert {name: (w.shape, w.dtype) for name, w in got.weights.items()} == {
        name: (w.shape, w.dtype) for name, w in want.weights.items()
    }


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
@pytest.mark.parametrize("kernel", ["sdpa", "flex"])
def test_packing_is_checked_in_fp8_by_bf16s_bound(
    kernel: str, checkpointing: str, mixture: Path, tmp_path: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = small_in_fp8(kernel, checkpointing, tmp_path)
    ready = start(Job(made.cfg, made.model, made.compute, mixture, tmp_path, tmp_path, ""), Runtime())
    products: list[int] = []
    product = fp8.fp8_product
    monkeypatch.setattr(fp8, "fp8_product", lambda *a, **k: products.append(1) or product(*a, **k))
    check(ready)
    assert f"train: packing checked, attention {kernel}: loss " in capfd.readouterr().out
    assert products


def small_in_fp8(kernel: Any, checkpointing: str, folder: Path) -> Any:
    """Of the embedded base, which was trained: what a token sees matters to its loss."""
    from components.models.device import Device

    how = {"activation_checkpointing": checkpointing, "zero_stage": 1, "scratch": folder}
    return small(Device(False, "bf16", kernel), fp8=True, **how)
