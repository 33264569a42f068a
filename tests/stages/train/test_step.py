"""An optimizer step compared with AdamW by hand, gradient norms with autograd, packed losses with unpacked ones."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from m3diff.models import FAMILIES
from m3diff.models.device import Device
from m3diff.settings.section import ParamsError
from m3diff.stages.train.engine import rate_factor, take_step, token_loss
from m3diff.stages.train.loop import Training, prepare_model
from m3diff.stages.train.state import MasterState
from tests.errors import raises
from tests.gpu.test_gpu import small
from tests.models.test_masks import mask_of
from tests.stages.train.toy import Recipe, built, recipe, started, take
from tests.tiny import tiny_settings

pytestmark = pytest.mark.usefixtures("alone")

M3DIFF = FAMILIES["m3diff"]
NO_CLIPPING = None
LAST_STEP = 1  # the second step of an epoch of 10 sequences, 8 a step: two count and six only fill up


def gradients(run_recipe: Recipe, training: Training, step: int) -> dict[str, Tensor]:
    """Return the gradients of the mean loss per supervised token of a step, computed one sequence at a time."""
    model, processor = prepare_model(run_recipe.cfg, run_recipe.model, run_recipe.compute, M3DIFF)
    total = torch.zeros(())
    tokens = 0
    for rows in training.schedule.global_sequences(step):
        batch = training.loader.build([(rows, 1)])
        packed = batch.packed
        text_inputs = {
            "input_ids": packed.input_ids,
            "position_ids": packed.position_ids,
            "attention_mask": mask_of(packed),
        }
        images = processor.image_inputs(batch.images, torch.device("cpu"))
        logits = model(**text_inputs, **images, logits_to_keep=packed.supervised).logits
        chosen = logits.float().log_softmax(-1)[torch.arange(len(packed.labels)), packed.labels]
        total = total - chosen.sum()
        tokens = tokens + len(chosen)
    (total / tokens).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def norm_of(tensors: Any) -> float:
    return float(torch.cat([tensor.flatten() for tensor in tensors]).double().norm())


def adamw(weight: Tensor, gradient: Tensor, lr: float, decay: float) -> Tensor:
    """Return the weight after the first step of AdamW with betas (0.9, 0.999)."""
    first_moment = 0.1 * gradient
    second_moment = 0.001 * gradient**2
    decayed_weight = weight * (1 - lr * decay)
    return decayed_weight - lr * (first_moment / (1 - 0.9)) / ((second_moment / (1 - 0.999)).sqrt() + 1e-8)


@pytest.mark.parametrize(("stage", "micro_batch"), [(0, 2), (0, 8), (1, 4)])
def test_a_step_is_adamw_on_the_mean_over_the_tokens_that_count_and_has_its_row(stage, micro_batch, workspace):
    changes = {"micro_batch": micro_batch, "zero_stage": stage, "max_grad_norm": NO_CLIPPING, "weight_decay": 0.1}
    run_recipe = workspace.recipe(global_batch=8, warmup_share=0.0, **changes)
    training = started(run_recipe, workspace.mixture, workspace.folder)
    expected_gradients = gradients(run_recipe, training, LAST_STEP)
    state = MasterState(training.engine)
    before = {name: state.get_tensor(p).clone() for name, p in state.parameters.items()}
    whole_step = training.loader.build([(rows, 1) for rows in training.schedule.global_sequences(LAST_STEP)])
    with torch.no_grad():
        loss = float(
            token_loss(training.engine.module, whole_step, training.packing, training.processor, training.device)
        )
    take(training, LAST_STEP)
    state = MasterState(training.engine)
    factor = 0.5 * (1 + math.cos(math.pi * (LAST_STEP - 1) / (training.schedule.steps - 1)))
    rates = {id(p): group.lr * factor for group in training.groups for p in group.parameters}
    assert state.parameters.keys() == expected_gradients.keys()
    for name, parameter in state.parameters.items():
        # a gradient times the tokens, or their square, differs by a factor of hundreds
        torch.testing.assert_close(
            state.get_tensor(parameter, "exp_avg"), 0.1 * expected_gradients[name], rtol=1e-3, atol=1e-7
        )
        torch.testing.assert_close(
            state.get_tensor(parameter, "exp_avg_sq"), 0.001 * expected_gradients[name] ** 2, rtol=2e-3, atol=1e-11
        )
        expected = adamw(before[name], expected_gradients[name], rates[id(parameter)], 0.1)
        clear = expected_gradients[name].abs() > 1e-5  # where rounding decides the sign, so it does the step
        torch.testing.assert_close(state.get_tensor(parameter)[clear], expected[clear], rtol=0, atol=2e-6)
    (row,) = training.curve.rows
    assert row["step"] == "2"
    assert row["epoch"] == "1"
    assert row["val_loss"] == ""
    assert float(row["loss"]) == pytest.approx(loss / float(whole_step.weights.sum()), rel=1e-5)
    assert training.usage.captions == sum(len(rows) for rows in training.schedule.global_sequences(LAST_STEP))


@pytest.mark.parametrize(("stage", "limit"), [(0, 0.01), (1, 0.01), (1, NO_CLIPPING)])
def test_grad_norm_is_that_of_the_whole_gradient_before_clipping(stage, limit, workspace):
    run_recipe = workspace.recipe(micro_batch=2, zero_stage=stage, max_grad_norm=limit)
    training = started(run_recipe, workspace.mixture, workspace.folder)
    whole_gradient = gradients(run_recipe, training, 0)
    rates = [1e-3] * len(training.groups)
    _, norm = take_step(
        training.engine, built(training, 0), training.packing, training.processor, training.device, rates, 1
    )
    assert norm == pytest.approx(norm_of(whole_gradient.values()), rel=1e-4)
    assert norm > 0.015, "the smaller limit clips"
    state = MasterState(training.engine)
    scale = 1.0 if limit is NO_CLIPPING else min(1.0, limit / norm)
    name, parameter = next(iter(state.parameters.items()))
    torch.testing.assert_close(
        state.get_tensor(parameter, "exp_avg"), 0.1 * scale * whole_gradient[name], rtol=2e-3, atol=1e-8
    )


@pytest.mark.fault("13", "m4")
@pytest.mark.parametrize(
    ("stage", "precision", "clipped", "bad"),
    [(0, "fp32", None, math.nan), (0, "bf16", 1.0, math.inf), (1, "fp32", 1.0, math.nan), (2, "bf16", None, math.inf)],
)
def test_a_gradient_or_a_loss_that_is_not_finite_stops_with_step_loss_and_rates(
    stage, precision, clipped, bad, workspace
):
    run_recipe = workspace.recipe(zero_stage=stage, precision=precision, max_grad_norm=clipped)
    training = started(run_recipe, workspace.mixture, workspace.folder)
    take(training, 0)
    parameter = next(p for p in training.engine.module.parameters() if p.requires_grad)
    parameter.register_hook(lambda gradient: gradient * bad)
    with raises(ParamsError, "train.diverged", step=2) as refused:
        take(training, 1)
    assert math.isfinite(refused.value.fields["loss"])
    assert not math.isfinite(refused.value.fields["grad_norm"])
    assert any(rate.startswith("lr_vision ") for rate in refused.value.fields["rates"])
    with torch.no_grad():
        for weight in training.engine.module.parameters():
            weight.fill_(bad)
    with raises(ParamsError, "train.diverged", step=4) as refused:
        take(training, 3)
    assert math.isnan(refused.value.fields["loss"])


@pytest.mark.parametrize("stage", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_gradients_in_bf16_are_added_up_in_fp32(stage, workspace):
    run_recipe = workspace.recipe(
        global_batch=8, micro_batch=1, zero_stage=stage, precision="bf16", max_grad_norm=NO_CLIPPING
    )
    training = started(run_recipe, workspace.mixture, workspace.folder)
    added = dict[str, Tensor]()
    for name, parameter in MasterState(training.engine).parameters.items():

        def add(gradient: Tensor, name: str = name) -> None:
            added[name] = added.get(name, torch.zeros(())) + gradient.float()

        parameter.register_hook(add)
    take(training, 0)
    state = MasterState(training.engine)
    for name, parameter in state.parameters.items():
        first_moment = 0.1 * added[name]  # AdamW's first moment; a sum in bf16 is 2e-3 off
        assert (state.get_tensor(parameter, "exp_avg") - first_moment).norm() <= 1e-5 * first_moment.norm(), name


@pytest.fixture
def cosine_factors(base: Any) -> list[float]:
    """Return the factors of twelve steps, of which two are warm-up."""
    cfg = recipe(base, warmup_share=1 / 6).cfg
    return [rate_factor(cfg, step, 12) for step in range(12)]


def test_the_rate_warms_up_and_falls_as_a_half_cosine(cosine_factors):
    assert cosine_factors[:3] == [0.5, 1.0, 1.0]
    assert cosine_factors[7] == pytest.approx(0.5), "half way of the ten steps after the warm-up"
    assert cosine_factors[11] == pytest.approx(0.5 * (1 + math.cos(0.9 * math.pi)))


def test_a_delayed_part_warms_up_and_joins_the_cosine(cosine_factors, base):
    cfg = recipe(base, warmup_share=1 / 6).cfg
    delayed = [rate_factor(cfg, step, 12, 0.25) for step in range(12)]
    assert delayed == [0.0, 0.0, 0.0, 0.5 * cosine_factors[3], *cosine_factors[4:]]


def test_a_constant_rate_stays_after_the_warm_up(base):
    cfg = recipe(base, schedule="constant", warmup_share=1 / 6).cfg
    assert [rate_factor(cfg, step, 12) for step in range(12)] == [0.5] + 11 * [1.0]


def test_a_constant_rate_without_warm_up_begins_after_the_delay(base):
    cfg = recipe(base, schedule="constant", warmup_share=0.0).cfg
    assert [rate_factor(cfg, step, 12, 0.25) for step in range(12)] == 3 * [0.0] + 9 * [1.0]


@pytest.mark.parametrize(
    ("schedule", "last_factor"), [("constant", 1.0), ("cosine", 0.5 * (1 + math.cos(0.8 * math.pi)))]
)
def test_a_delayed_part_stays_as_it_is_until_its_step(schedule, last_factor, workspace):
    model = replace(tiny_settings(), delays={"module": 0.5})
    run_recipe = workspace.recipe(model=model, warmup_share=0.0, weight_decay=0.1, schedule=schedule)
    training = started(run_recipe, workspace.mixture, workspace.folder)
    assert training.schedule.steps == 6
    for step in (0, 2, 3):
        before = {name: p.detach().clone() for name, p in training.engine.module.named_parameters() if p.requires_grad}
        take(training, step)
        after = dict(training.engine.module.named_parameters())
        moved = {name: not torch.equal(after[name], weight) for name, weight in before.items()}
        assert any(moved[name] for name in moved if ".mdp." in name) == (step == 3)
        assert all(moved[name] for name in moved if "lora_B" in name)
        assert (training.curve.last_value("lr_module") > 0) == (step == 3)
    take(training, 5)
    assert training.rates == {
        f"lr_{part}": pytest.approx(last_factor * rate) for part, rate in model.rates.items() if rate
    }


def begun(mixture: Path, folder: Path, **changes: Any) -> Any:
    """Return a run on the embedded base, which was trained, so that the attention matters to the loss."""
    return started(small(Device(False, "fp32"), scratch=folder, **changes), mixture, folder)


@pytest.mark.parametrize(
    ("kernel", "precision", "stage", "rounding"), [("sdpa", "bf16", 1, 1e-2), ("flex", "fp32", 0, 1e-5)]
)
def test_the_loss_of_packed_sequences_is_that_of_their_references(
    kernel, precision, stage, rounding, mixture, tmp_path
):
    training = begun(mixture, tmp_path, attention=kernel, precision=precision, zero_stage=stage)
    chosen = [rows for rows in training.schedule.epoch(0) if len(rows) > 1][:2]

    @torch.no_grad()
    def loss(*sequences: np.ndarray) -> float:
        batch = training.loader.build([(rows, 1) for rows in sequences])
        return float(token_loss(training.engine, batch, training.packing, training.processor, training.device))

    apart = sum(loss(rows[n : n + 1]) for rows in chosen for n in range(len(rows)))
    assert loss(*chosen) == pytest.approx(apart, rel=rounding)
