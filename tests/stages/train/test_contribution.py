"""The module's contribution: the numbers against what hooks see, where they are measured, when they are an alarm."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from m3diff.models import FAMILIES
from m3diff.models.family import Delays
from m3diff.models.m3diff import mdp as module_of
from m3diff.models.tuning import unwrapped
from m3diff.stages.train import contribution, loop
from m3diff.stages.train.contribution import NOTHING, ModuleContribution
from m3diff.stages.train.curve import Curve, columns
from m3diff.stages.train.loop import is_measured, train_step
from tests.stages.train.test_step import started
from tests.stages.train.toy import Trained, recipe, run
from tests.tiny import MDP, tiny_settings

M3DIFF = FAMILIES["m3diff"]
USED = MDP | {"init_gain": 2.0}


@pytest.fixture
def every_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are logged as often as checkpoints are written here."""
    monkeypatch.setattr(loop, "LOGGED_STEPS", 2)


def seen_by_hooks(model: Any) -> dict[int, list[tuple[Tensor, Tensor, Tensor]]]:
    """By layer of the vision encoder, of each forward: the update of equation (8), the score, the last features."""
    states: dict[int, Tensor] = {}
    seen: dict[int, list[tuple[Tensor, Tensor, Tensor]]] = {1: [], 2: []}

    def layer(number: int) -> Any:
        return lambda module, given, output: states.__setitem__(number, output.detach())

    def level(module: Any, given: tuple[Any, ...], result: tuple[Tensor, Tensor]) -> None:
        f, (ft, score) = given[0].detach(), (x.detach() for x in result)
        number = next(n for n, state in states.items() if torch.equal(f, torch.cat([state[0::2], state[1::2]])))
        update = score.repeat(2, 1, 1) * (ft - f)
        seen[number].append((update.double(), score.double(), states[2].double()))

    for number, encoder_layer in enumerate(model.model.vision_tower.encoder.layers, start=1):
        encoder_layer.register_forward_hook(layer(number))
    model.model.mdp.levels[0].register_forward_hook(level)
    return seen


def rms(parts: list[Tensor]) -> float:
    return float(torch.cat(parts).square().mean().sqrt())


@pytest.mark.parametrize(
    ("fields", "changes"),
    [
        ({}, {"micro_batch": 2}),
        ({"score": "channel"}, {"precision": "bf16", "zero_stage": 2}),
        ({}, {"activation_checkpointing": "full", "max_captions_per_sequence": 1}),
    ],
    ids=["accumulated", "bf16", "recomputed"],
)
@pytest.mark.usefixtures("alone")
def test_the_numbers_are_those_that_hooks_see(
    fields: dict, changes: dict, mixture: Path, base: Path, tmp_path: Path
) -> None:
    run = started(recipe(base, global_batch=8, model=tiny_settings(USED | fields), **changes), mixture, tmp_path)
    model = unwrapped(run.engine.module)
    with torch.no_grad():
        for parameter in model.model.mdp.parameters():  # the score's last layer is zero-initialised
            parameter.add_(0.2 * torch.randn_like(parameter))
    seen = seen_by_hooks(model)
    train_step(run, 0, [run.loader.build(batch) for batch in run.schedule.micro_batches(0, 0)])
    (row,) = run.curve.rows
    for number, forwards in seen.items():
        assert len(forwards) == 8 // run.job.compute.micro_batch
        updates, scores, last = (list(parts) for parts in zip(*forwards, strict=True))
        assert float(row[f"module_update_ratio/{number}"]) == pytest.approx(rms(updates) / rms(last), rel=1e-5)
        assert float(row[f"module_score/{number}"]) == pytest.approx(float(torch.cat(scores).mean()), rel=1e-5)
    for figure in ("module_update_ratio", "module_score"):
        assert float(row[f"{figure}/1"]) != pytest.approx(float(row[f"{figure}/2"]), rel=1e-4)


def test_the_first_step_the_logged_ones_and_the_last_are_measured() -> None:
    assert [step for step in range(1, 52) if is_measured(step, 51)] == [1, 20, 40, 51]


@pytest.mark.usefixtures("alone")
def test_nothing_is_computed_in_other_steps(
    mixture: Path, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = started(recipe(base), mixture, tmp_path)
    monkeypatch.setattr(module_of, "sums_of", lambda *_: pytest.fail("measured"))
    train_step(run, 1, [run.loader.build(batch) for batch in run.schedule.micro_batches(1, 0)])
    (row,) = run.curve.rows
    assert row["loss"]
    assert [row[name] for name in run.contribution.names] == ["", "", "", ""]


@pytest.mark.usefixtures("alone")
def test_validation_between_the_steps_is_not_in_the_numbers(mixture: Path, base: Path, tmp_path: Path) -> None:
    run = started(recipe(base, model=tiny_settings(USED)), mixture, tmp_path)
    batches = [run.loader.build(batch) for batch in run.schedule.micro_batches(0, 0)]
    with run.contribution.measured(run.engine.module, True) as read:
        loop.take_step(run.engine, batches, run.processor, run.device, 1)
    want = read()
    run.validation.losses(run.engine)
    assert read() == want
    with run.contribution.measured(run.engine.module, True) as read:
        run.validation.losses(run.engine)
    assert read() != want, "other weights and other pairs have other numbers"


def test_workers_sums_are_added_before_they_are_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two workers one has large features: a mean of the ratios would be 0.3125 for the first level."""
    ours = torch.tensor([[4.0, 1.0], [0.0, 4.0], [64.0, 4.0]], dtype=torch.float64)  # ratio 0.25
    theirs = torch.tensor([[36.0, 3.0], [0.0, 4.0], [256.0, 4.0]], dtype=torch.float64)  # ratio 0.375

    def sum_over_ranks(sums: Tensor, ranks: int) -> Tensor:
        assert torch.equal(sums, ours)
        return sums + (theirs if ranks == 2 else 0)

    monkeypatch.setattr(contribution, "sum_over_ranks", sum_over_ranks)
    monkeypatch.setattr(contribution, "unwrapped", lambda model: model)
    measures = replace(M3DIFF.contribution, recorded=lambda model: model)
    two = ModuleContribution(replace(M3DIFF, contribution=measures), tiny_settings(), ranks=2)

    class Model:
        def __enter__(self) -> list[Tensor]:
            return [ours.float() / 4, 3 * ours.float() / 4]

        def __exit__(self, *_: object) -> None: ...

    with two.measured(Model(), True) as read:
        got = read()
    assert got == {
        "module_update_ratio/1": pytest.approx((40 / 320) ** 0.5),
        "module_update_ratio/2": 0.0,
        "module_score/1": 0.5,
        "module_score/2": 1.0,
    }


def test_a_family_that_measures_nothing_has_no_numbers_and_no_warning() -> None:
    none = ModuleContribution(replace(M3DIFF, contribution=None), tiny_settings(), ranks=1)
    assert none.names == ()
    with none.measured(None, True) as read:
        assert read() == {}
    curve = Curve(columns(["llm"], none.names, []))
    curve.add({"step": 1, "loss": 1.0})
    assert none.latest(curve) == {}
    assert none.warning(curve, 1, 0) is None


def warning(*rows: tuple[int, float, float], steps: int = 10) -> str | None:
    """With a warm-up of three of ten steps; each row: step, and the ratio of both levels."""
    numbers = ModuleContribution(M3DIFF, tiny_settings(), ranks=1)
    curve = Curve(columns(["llm"], numbers.names, []))
    for step, one, two in rows:
        curve.add({"step": step, **dict(zip(numbers.names, (one, two, 0.5, 0.5), strict=True))})
    curve.add({"step": rows[-1][0] + 1 if rows else 1})
    return numbers.warning(curve, steps, 3)


def test_a_module_that_changes_nothing_after_the_warm_up_is_an_alarm() -> None:
    small, large = NOTHING * 0.99, NOTHING * 1.01
    told = warning((1, 0.5, 0.5), (4, small, 1e-6))
    assert told is not None
    assert "at step 4 of 10, after the warm-up, each of its updates is under 0.0039" in told
    assert "(module_update_ratio/1 0.0039, module_update_ratio/2 1e-06)" in told
    assert told.endswith("Raise the module's rate (rates.module), or start it above zero (module.init_gain).")
    assert warning((4, small, large)) is None, "one level is enough"
    assert warning((4, large, small)) is None
    assert warning((4, small, small), (6, large, small)) is None, "it woke up"
    assert warning((3, 0.0, 0.0)) is None, "the warm-up is not over"
    assert warning() is None


WARNED = "train: warning: the module changes nothing"


def finished(mixture: Path, base: Path, folder: Path, **settings: Any) -> Trained:
    """Six steps, three of them warm-up, with checkpoints after 2, 4 and 6."""
    return run(recipe(base, warmup_share=0.5, model=tiny_settings(**settings)), mixture, folder)


@pytest.mark.usefixtures("every_second")
def test_a_module_that_never_trains_raises_the_alarm_at_checkpoints_and_in_the_report(
    mixture: Path, base: Path, tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    done = finished(mixture, base, tmp_path, mdp=MDP | {"init_gain": 0.0}, module=1e-10)
    told = [line for line in capfd.readouterr().out.splitlines() if WARNED in line]
    assert ["step 4 of 6" in told[0], "step 6 of 6" in told[1]] == [True, True]
    assert len(told) == 2, "not within the warm-up"
    assert done.report.warnings == [told[1].removeprefix("train: warning: ")]
    assert done.report.module["module_update_ratio/1"] < NOTHING
    assert done.report.module["module_score/1"] == pytest.approx(0.5, abs=1e-3)


@pytest.mark.usefixtures("every_second")
def test_a_module_that_begins_later_has_its_own_warm_up_before_the_alarm(
    mixture: Path, base: Path, tmp_path: Path
) -> None:
    """Half of six steps' delay and three of warm-up are the whole run."""
    settings = tiny_settings(MDP | {"init_gain": 0.0}, module=1e-10)
    delayed = replace(settings, delays=Delays(module=0.5))
    done = run(recipe(base, warmup_share=0.5, model=delayed), mixture, tmp_path)
    assert done.report.warnings == []
    assert done.report.module["module_update_ratio/1"] < NOTHING


@pytest.mark.usefixtures("every_second")
def test_a_module_in_use_raises_none_and_its_ratios_are_printed(
    mixture: Path, base: Path, tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    done = finished(mixture, base, tmp_path, mdp=USED)
    said = capfd.readouterr().out
    assert "warning" not in said
    assert done.report.warnings == []
    first, second = (done.report.module[f"module_update_ratio/{level}"] for level in (1, 2))
    assert f"  module_update_ratio {first:.2g} {second:.2g}  lr_vision" in said
    assert [bool(value) for value in done.column("module_score/2")] == [True, True, False, True, False, True]
