"""The module's contribution: the numbers against what hooks see, where they are measured, when they are an alarm."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from m3diff.models import FAMILIES
from m3diff.models import m3diff_model as module_of
from m3diff.models.settings import Delays
from m3diff.models.tuning import unwrapped
from m3diff.stages.train import loop
from m3diff.stages.train.progress import NOTHING, module_warning
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
    run.step(0, [run.loader.build(batch) for batch in run.schedule.micro_batches(0, 0)])
    (row,) = run.curve.rows
    for number, forwards in seen.items():
        assert len(forwards) == 8 // run.job.compute.micro_batch
        updates, scores, last = (list(parts) for parts in zip(*forwards, strict=True))
        assert float(row[f"module_update_ratio/{number}"]) == pytest.approx(rms(updates) / rms(last), rel=1e-5)
        assert float(row[f"module_score/{number}"]) == pytest.approx(float(torch.cat(scores).mean()), rel=1e-5)
    for figure in ("module_update_ratio", "module_score"):
        assert float(row[f"{figure}/1"]) != pytest.approx(float(row[f"{figure}/2"]), rel=1e-4)


@pytest.mark.usefixtures("alone")
def test_nothing_is_computed_in_other_steps(
    mixture: Path, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = started(recipe(base), mixture, tmp_path)
    monkeypatch.setattr(module_of, "sums_of", lambda *_: pytest.fail("measured"))
    run.step(1, [run.loader.build(batch) for batch in run.schedule.micro_batches(1, 0)])
    (row,) = run.curve.rows
    assert row["loss"]
    assert [row[name] for name in run.module] == ["", "", "", ""]


@pytest.mark.usefixtures("alone")
def test_workers_sums_are_added_before_they_are_divided(
    mixture: Path, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of two workers has large features: a mean of the ratios would be 0.3125 for the first level."""
    ours = torch.tensor([[4.0, 1.0], [0.0, 4.0], [64.0, 4.0]], dtype=torch.float64)  # ratio 0.25
    theirs = torch.tensor([[36.0, 3.0], [0.0, 4.0], [256.0, 4.0]], dtype=torch.float64)  # ratio 0.375
    run = started(recipe(base), mixture, tmp_path)

    def sum_over_ranks(sums: Tensor, ranks: int) -> Tensor:
        assert torch.equal(sums, ours)
        return sums + theirs

    assert M3DIFF.contribution is not None
    recorded = nullcontext([ours.float() / 4, 3 * ours.float() / 4])
    run.family = replace(M3DIFF, contribution=replace(M3DIFF.contribution, recorded=lambda model: recorded))
    monkeypatch.setattr(loop, "sum_over_ranks", sum_over_ranks)
    run.step(0, [run.loader.build(batch) for batch in run.schedule.micro_batches(0, 0)])
    assert run.curve.latest(run.module) == {
        "step": 1,
        "module_update_ratio/1": pytest.approx((40 / 320) ** 0.5, rel=1e-5),
        "module_update_ratio/2": 0.0,
        "module_score/1": 0.5,
        "module_score/2": 1.0,
    }


def warning(step: int, *ratios: float) -> str | None:
    """After a warm-up of three of ten steps."""
    assert M3DIFF.contribution is not None
    latest = {f"module_update_ratio/{level}": ratio for level, ratio in enumerate(ratios, start=1)}
    return module_warning({"step": step, **latest, "module_score/1": 0.0}, 10, 3, M3DIFF.contribution.remedy)


def test_a_module_that_changes_nothing_after_the_warm_up_is_an_alarm() -> None:
    small, large = NOTHING * 0.99, NOTHING * 1.01
    told = warning(4, small, 1e-6)
    assert told is not None
    assert "at step 4 of 10, after the warm-up, each of its updates is under 0.0039" in told
    assert "(module_update_ratio/1 0.0039, module_update_ratio/2 1e-06)" in told
    assert told.endswith("Raise the module's rate (rates.module), or start it above zero (module.init_gain).")
    assert warning(4, small, large) is None, "one level is enough"
    assert warning(4, large, small) is None
    assert warning(3, 0.0, 0.0) is None, "the warm-up is not over"
    assert module_warning({}, 10, 3, "") is None


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
