"""One optimizer step against AdamW computed by hand, and the gradient's norm against autograd."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from m3diff.models import FAMILIES
from m3diff.models.settings import Delays
from m3diff.models.tuning import TrainableGroup
from m3diff.settings.load import load_params
from m3diff.stages.train.attempts import DivergedError
from m3diff.stages.train.engine import build_engine, rate_factor, take_step
from m3diff.stages.train.job import Job, Runtime
from m3diff.stages.train.loop import Training, prepare_model
from m3diff.stages.train.state import MasterState
from tests.stages.train.toy import Recipe, recipe
from tests.tiny import tiny_settings
from tests.toy import REPOSITORY

pytestmark = pytest.mark.usefixtures("alone")

NO_CLIPPING = None
LAST = 1
"""The second step of an epoch of 10 sequences, 8 a step: two count and six only fill up."""


def started(made: Recipe, mixture: Path, folder: Path) -> Training:
    return Training(Job(made.cfg, made.model, made.compute, mixture, folder, folder, ""), Runtime())


def gradients(made: Recipe, run: Training, step: int) -> dict[str, Tensor]:
    """By plain autograd: the mean over the step's supervised tokens, every sequence by itself."""
    model, processor = prepare_model(made.cfg, made.model, made.compute, FAMILIES["m3diff"])
    sequences = run.schedule.global_sequences(step)
    total, tokens = torch.zeros(()), 0
    for rows in sequences:
        batch = run.loader.build([(rows, 1)])
        logits = model(
            input_ids=batch.packed.input_ids,
            position_ids=batch.packed.position_ids,
            attention_mask=batch.packed.mask(),
            logits_to_keep=batch.packed.supervised,
            **processor.image_inputs(batch.images),
        ).logits
        chosen = logits.float().log_softmax(-1)[torch.arange(len(batch.packed.labels)), batch.packed.labels]
        total, tokens = total - chosen.sum(), tokens + len(chosen)
    (total / tokens).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def norm_of(found: dict[str, Tensor]) -> float:
    return float(torch.cat([g.flatten() for g in found.values()]).double().norm())


def adamw(weight: Tensor, gradient: Tensor, lr: float, decay: float) -> Tensor:
    """The first step of AdamW, betas (0.9, 0.999)."""
    first, second = 0.1 * gradient, 0.001 * gradient**2
    decayed = weight * (1 - lr * decay)
    return decayed - lr * (first / (1 - 0.9)) / ((second / (1 - 0.999)).sqrt() + 1e-8)


@pytest.mark.parametrize(("stage", "micro_batch"), [(0, 2), (0, 8), (1, 4)])
def test_a_step_is_adamw_on_the_mean_over_the_tokens_that_count(
    stage: int, micro_batch: int, mixture: Path, base: Path, tmp_path: Path
) -> None:
    made = recipe(
        base,
        global_batch=8,
        micro_batch=micro_batch,
        zero_stage=stage,
        max_grad_norm=NO_CLIPPING,
        weight_decay=0.1,
        warmup_share=0.0,
    )
    run = started(made, mixture, tmp_path)
    want = gradients(made, run, LAST)
    state = MasterState(run.engine)
    before = {name: state.get(p).clone() for name, p in state.parameters.items()}
    batches = [run.loader.build(batch) for batch in run.schedule.micro_batches(LAST, 0)]
    run.step(LAST, batches)
    state.link()
    factor = 0.5 * (1 + torch.cos(torch.tensor(torch.pi * (LAST - 1) / (run.schedule.steps - 1))))
    rates = {id(p): group.lr * float(factor) for group in run.groups for p in group.parameters}
    assert state.parameters.keys() == want.keys()
    for name, parameter in state.parameters.items():
        # a gradient times the tokens, or their square, differs by a factor of hundreds
        torch.testing.assert_close(state.get(parameter, "exp_avg"), 0.1 * want[name], rtol=1e-3, atol=1e-7)
        torch.testing.assert_close(state.get(parameter, "exp_avg_sq"), 0.001 * want[name] ** 2, rtol=2e-3, atol=1e-11)
        expected = adamw(before[name], want[name], rates[id(parameter)], 0.1)
        clear = want[name].abs() > 1e-5  # where rounding decides the sign, so it does the step
        torch.testing.assert_close(state.get(parameter)[clear], expected[clear], rtol=0, atol=2e-6)


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("limit", [NO_CLIPPING, 0.01])
def test_grad_norm_is_that_of_the_whole_gradient_before_clipping(
    stage: int, limit: float | None, mixture: Path, base: Path, tmp_path: Path
) -> None:
    made = recipe(base, micro_batch=2, zero_stage=stage, max_grad_norm=limit)
    run = started(made, mixture, tmp_path)
    found = gradients(made, run, 0)
    batches = [run.loader.build(batch) for batch in run.schedule.micro_batches(0, 0)]
    _, norm = take_step(run.engine, batches, run.processor, run.device, [1e-3] * len(run.groups), 1)
    assert norm == pytest.approx(norm_of(found), rel=1e-4)
    assert norm > 0.015, "the smaller limit clips"
    state = MasterState(run.engine)
    state.link()
    scale = 1.0 if limit is NO_CLIPPING else min(1.0, limit / norm)
    name, parameter = next(iter(state.parameters.items()))
    torch.testing.assert_close(state.get(parameter, "exp_avg"), 0.1 * scale * found[name], rtol=2e-3, atol=1e-8)


def test_a_step_reports_the_mean_loss_per_token_and_its_row(mixture: Path, base: Path, tmp_path: Path) -> None:
    made = recipe(base, global_batch=8, micro_batch=2, warmup_share=0.5)
    run = started(made, mixture, tmp_path)
    batches = [run.loader.build(batch) for batch in run.schedule.micro_batches(LAST, 0)]
    one = run.loader.build([(rows, 1) for rows in run.schedule.global_sequences(LAST)])
    with torch.no_grad():
        from m3diff.stages.train.engine import token_loss

        want = float(token_loss(run.engine.module, one, run.processor, run.device)) / one.supervised_tokens
    run.step(LAST, batches)
    (row,) = run.curve.rows
    assert float(row["loss"]) == pytest.approx(want, rel=1e-5)
    assert (row["step"], row["epoch"], row["val_loss"]) == ("2", "1", "")
    assert float(row["lr_vision"]) == pytest.approx(1e-3, rel=1e-5), (
        "the second of two warm-up steps is at the full rate"
    )
    assert float(row["lr_llm"]) == float(row["lr_projector"]) == pytest.approx(3e-3, rel=1e-5)
    assert run.captions == sum(len(rows) for rows in run.schedule.global_sequences(LAST))


@pytest.mark.fault("13", "m4")
def test_a_loss_that_is_not_finite_stops_with_step_loss_and_rates(mixture: Path, base: Path, tmp_path: Path) -> None:
    run = started(recipe(base), mixture, tmp_path)
    with torch.no_grad():
        for parameter in run.engine.module.parameters():
            parameter.fill_(float("nan"))
    batches = [run.loader.build(batch) for batch in run.schedule.micro_batches(3, 0)]
    with pytest.raises(DivergedError, match=r"step 4: the loss is nan and .* with lr_vision [\d.e-]+, .*warmup_share"):
        run.step(3, batches)


@pytest.mark.fault("13")
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize(
    ("stage", "precision", "clipped"),
    [
        (0, "fp32", NO_CLIPPING),
        (0, "fp32", 1.0),
        (0, "bf16", 1.0),
        (1, "fp32", NO_CLIPPING),
        (1, "bf16", 1.0),
        (2, "bf16", NO_CLIPPING),
        pytest.param(3, "bf16", 1.0, marks=pytest.mark.slow),
    ],
)
def test_a_gradient_that_is_not_finite_stops_though_the_loss_is(
    stage: int, precision: str, clipped: float | None, bad: float, mixture: Path, base: Path, tmp_path: Path
) -> None:
    run = started(recipe(base, zero_stage=stage, precision=precision, max_grad_norm=clipped), mixture, tmp_path)
    batches = [[run.loader.build(batch) for batch in run.schedule.micro_batches(step, 0)] for step in (0, 1)]
    run.step(0, batches[0])
    parameter = next(p for p in run.engine.module.parameters() if p.requires_grad)
    parameter.register_hook(lambda gradient: gradient * bad)
    with pytest.raises(DivergedError, match=r"step 2: the loss is [\d.]+ and the gradient's norm (nan|inf) with lr_"):
        run.step(1, batches[1])


@pytest.mark.parametrize("stage", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_gradients_in_bf16_are_added_up_in_fp32(stage: int, mixture: Path, base: Path, tmp_path: Path) -> None:
    made = recipe(base, global_batch=8, micro_batch=1, zero_stage=stage, precision="bf16", max_grad_norm=NO_CLIPPING)
    run = started(made, mixture, tmp_path)
    state, added = MasterState(run.engine), dict[str, Tensor]()
    for name, parameter in state.parameters.items():

        def add(gradient: Tensor, name: str = name) -> None:
            added[name] = added.get(name, torch.zeros(())) + gradient.float()

        parameter.register_hook(add)
    batches = [run.loader.build(batch) for batch in run.schedule.micro_batches(0, 0)]
    take_step(run.engine, batches, run.processor, run.device, [1e-3] * len(run.groups), 1)
    state.link()
    for name, parameter in state.parameters.items():
        first = 0.1 * added[name]  # AdamW's first moment; a sum in bf16 is 2e-3 off
        assert (state.get(parameter, "exp_avg") - first).norm() <= 1e-5 * first.norm(), name


def test_the_rate_warms_up_and_falls_as_a_half_cosine_and_a_delayed_part_joins_it(base: Path) -> None:
    cosine = recipe(base, warmup_share=1 / 6).cfg
    factors = [rate_factor(cosine, step, 12) for step in range(12)]
    assert factors[:3] == [0.5, 1.0, 1.0]
    assert factors[7] == pytest.approx(0.5)  # half way of the ten steps after the warm-up
    assert factors[11] == pytest.approx(0.5 * (1 + math.cos(0.9 * math.pi)))
    delayed = [rate_factor(cosine, step, 12, 0.25) for step in range(12)]
    assert delayed == [0.0, 0.0, 0.0, 0.5 * factors[3], *factors[4:]]
    constant, at_once = (recipe(base, schedule="constant", warmup_share=share).cfg for share in (1 / 6, 0.0))
    assert [rate_factor(constant, step, 12) for step in range(12)] == [0.5] + 11 * [1.0]
    assert [rate_factor(at_once, step, 12, 0.25) for step in range(12)] == 3 * [0.0] + 9 * [1.0]


@pytest.mark.parametrize(("schedule", "last"), [("constant", 1.0), ("cosine", 0.5 * (1 + math.cos(0.8 * math.pi)))])
def test_the_schedule_of_the_parameters_is_the_one_of_the_steps(
    schedule: str, last: float, mixture: Path, base: Path, tmp_path: Path
) -> None:
    run = started(recipe(base, schedule=schedule, warmup_share=0.0), mixture, tmp_path)
    assert run.schedule.steps == 6
    run.step(5, [run.loader.build(batch) for batch in run.schedule.micro_batches(5, 0)])
    for part, rate in tiny_settings().rates.items():
        assert rate is not None
        assert run.rates[f"lr_{part}"] == pytest.approx(last * rate)


def test_a_part_that_is_delayed_stays_as_it_is_until_its_step(mixture: Path, base: Path, tmp_path: Path) -> None:
    model = replace(tiny_settings(), delays=Delays(module=0.5))
    run = started(recipe(base, model=model, warmup_share=0.0, weight_decay=0.1), mixture, tmp_path)
    assert run.schedule.steps >= 4
    begins = round(run.schedule.steps / 2)
    for step in range(begins + 1):
        before = {name: p.detach().clone() for name, p in run.engine.module.named_parameters() if p.requires_grad}
        run.step(step, [run.loader.build(batch) for batch in run.schedule.micro_batches(step, 0)])
        after = dict(run.engine.module.named_parameters())
        moved = {name: not torch.equal(after[name], weight) for name, weight in before.items()}
        assert any(moved[name] for name in moved if ".mdp." in name) == (step == begins)
        assert all(moved[name] for name in moved if "lora_B" in name)
        assert (run.curve.last("lr_module") > 0) == (step == begins)
        assert run.curve.last("lr_llm") > 0


@pytest.mark.parametrize("profile", ["paper", "paper-letter", "one-gpu", "small", "levir-cc", "blip2idc"])
def test_a_profile_in_bf16_loses_no_small_gradient_of_many_micro_batches(profile: str) -> None:
    """1 + 256 * 2**-9 is 1.5; added up in bf16, each of the 256 would be rounded away."""
    params = load_params(REPOSITORY / "profiles" / f"{profile}.yaml")
    train = params.train.model_copy(update={"global_batch": 257, "max_grad_norm": NO_CLIPPING})
    compute = params.compute.model_copy(update={"micro_batch": 1})
    assert train.precision == "bf16"
    model = torch.nn.Linear(4, 1, bias=False, dtype=torch.bfloat16)
    group = TrainableGroup("llm", ("llm",), 0.0, [model.weight])
    engine = build_engine(train, compute, model, [group], ranks=1)
    for number in range(257):
        gradient = 1.0 if number == 0 else 2.0**-9
        engine.backward(257 * gradient * engine(torch.ones(1, 4, dtype=torch.bfloat16)).float().sum())
        engine.step()
    state = MasterState(engine)
    state.link()
    first = state.get(model.weight, "exp_avg").flatten()  # a tenth of the gradient
    torch.testing.assert_close(first, torch.full((4,), 0.15), rtol=1e-4, atol=0)
