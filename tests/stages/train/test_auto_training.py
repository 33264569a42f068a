"""Training a base of the family `auto`: what a run checks first, ZeRO, workers, and a resume."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from m3diff.models import FAMILIES, cached_prompts
from m3diff.models.checkpoint import load_model
from m3diff.records.errors import ParamsError
from m3diff.stages.train.loop import Training
from m3diff.stages.train.state import checkpoints
from tests.auto_cases import auto_settings
from tests.errors import raises
from tests.stages.train.test_loop import workers
from tests.stages.train.test_mixed_mixture import COMPUTE, mixed_mixture  # noqa: F401  # a fixture
from tests.stages.train.toy import Recipe, assert_same, read_curve, recipe, run
from tests.tiny import tiny_base
from tests.tiny_vlm import tiny_vlm

# Some adapters have gradients of 1e-9. Rounding decides their sign, and Adam makes a whole step of them. With a low
# rate, the weights after such steps still agree
RATES = {"vision": 1.0e-6, "projector": 1.0e-6, "llm": 1.0e-6}


@pytest.fixture(scope="module")
def vlm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_vlm("qwen3_vl", tmp_path_factory.mktemp("qwen3_vl"))


def auto_recipe(vlm: Path, folder: Path, **changes: Any) -> Recipe:
    """Return the recipe of a run on the tiny base."""
    settings = FAMILIES["auto"].complete_settings(auto_settings("qwen3_vl", rates=RATES))
    start = recipe(tiny_base(folder / "base"), **COMPUTE).changed(model=settings, **changes)
    return replace(start, cfg=start.cfg.model_copy(update={"base": vlm}))


def test_a_run_shows_what_trains_and_its_model_loads(vlm, mixed_mixture, tmp_path, capsys):  # noqa: F811
    trained = run(auto_recipe(vlm, tmp_path), mixed_mixture, tmp_path)
    printed = capsys.readouterr().out
    assert "packed and separate passes differ by" in printed
    (norms,) = (line for line in printed.splitlines() if "gradient norms in the first step" in line)
    assert all(f"{part} " in norms for part in RATES)
    parts = trained.report.parameters
    assert all(parts[part] for part in RATES)
    model, _ = load_model(tmp_path / "out" / "checkpoint")
    adapted, _ = load_model(tmp_path / "out" / "checkpoint" / "adapters")
    assert_same(dict(adapted.state_dict()), dict(model.state_dict()), atol=1e-6)
    base_weights = load_file(vlm / "model.safetensors")
    changed = [name for name, weight in trained.weights.items() if not torch.equal(weight, base_weights[name])]
    assert {FAMILIES["auto"].part_of(name) for name in changed} == set(RATES)
    assert all(name.endswith("weight") for name in changed), "adapters change the weights of linear layers alone"


def test_a_cache_that_continues_wrongly_ends_the_run(vlm, mixed_mixture, tmp_path, monkeypatch):  # noqa: F811
    def repeat_first_row(cache: Any, rows: torch.Tensor) -> None:
        cache.reorder_cache(torch.zeros_like(rows))

    # the second sequence of a unit would continue from the cache of the first one
    monkeypatch.setattr(cached_prompts, "repeat_cache", repeat_first_row)
    monkeypatch.setattr("m3diff.stages.train.loop.CHECKED_SEQUENCES", 8)
    with raises(ParamsError, "train.packing_differs"):
        run(auto_recipe(vlm, tmp_path), mixed_mixture, tmp_path)


def test_a_part_without_a_gradient_ends_the_run(vlm, mixed_mixture, tmp_path, monkeypatch):  # noqa: F811
    def without_vision(self: Any, model: Any) -> None:
        for name, parameter in model.get_base_model().named_parameters():
            if ".visual." in name and ".merger." not in name and parameter.requires_grad:
                parameter.register_hook(torch.zeros_like)

    monkeypatch.setattr(Training, "check_packing", without_vision)
    with raises(ParamsError, "train.part_without_gradient", part="vision"):
        run(auto_recipe(vlm, tmp_path, global_batch=8, micro_batch=8), mixed_mixture, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("stage", range(4))
def test_two_workers_of_which_one_has_no_image_train_as_one(stage, vlm, mixed_mixture, tmp_path):  # noqa: F811
    """With ZeRO, the workers must run the same passes although their micro-batches have other kinds of units.

    Otherwise, ZeRO 3 would hang, and ZeRO 2 would add gradients of different weights.
    """
    run_recipe = auto_recipe(vlm, tmp_path, zero_stage=stage)
    workers(2, run_recipe, mixed_mixture, tmp_path / "two")
    workers(1, run_recipe, mixed_mixture, tmp_path / "one")
    curve, curve_of_one = (read_curve(tmp_path / name) for name in ("two", "one"))
    for column, tolerance in (("loss", 1e-5), ("grad_norm", 1e-4)):
        values = [float(row[column]) for row in curve]
        assert values == pytest.approx([float(row[column]) for row in curve_of_one], rel=tolerance), column


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_two_workers_resume_to_the_same_weights(stage, vlm, mixed_mixture, tmp_path):  # noqa: F811
    run_recipe = auto_recipe(vlm, tmp_path, zero_stage=stage)
    workers(2, run_recipe, mixed_mixture, tmp_path / "whole")
    workers(2, run_recipe, mixed_mixture, tmp_path / "resumed", saved=1)
    assert [path.name for path in checkpoints(tmp_path / "resumed")] == ["step-00000002"]
    workers(2, run_recipe, mixed_mixture, tmp_path / "resumed")
    weights, resumed_weights = (
        load_file(tmp_path / name / "checkpoint" / "model.safetensors") for name in ("whole", "resumed")
    )
    assert_same(resumed_weights, weights, atol=0)
