"""A training step with the settings of the profile paper-letter, in small."""

import math
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from m3diff.models.tuning import unwrapped
from m3diff.settings.load import load_params
from m3diff.stages.train.job import Job, Runtime
from m3diff.stages.train.loop import Training
from m3diff.stages.train.state import MasterState
from tests.stages.train.toy import Recipe, recipe, run, write_mixture
from tests.tiny import MDP, tiny_settings
from tests.toy import REPOSITORY

TINY = {"global_batch": 8, "micro_batch": 2}


def letter(base: Path) -> Recipe:
    """The profile's module and recipe on the tiny base: its layers, heads, rates and batch are the tiny one's."""
    params = load_params(REPOSITORY / "profiles/paper-letter.yaml")
    module = asdict(params.models["m3diff"].module) | MDP
    recipe_of_paper = {
        name: getattr(params.train, name)
        for name in ("max_captions_per_sequence", "epochs", "warmup_share", "weight_decay", "max_grad_norm")
    }
    return recipe(base, model=tiny_settings(module), **TINY, **recipe_of_paper)


@pytest.mark.usefixtures("alone")
def test_a_step_by_the_letter_has_a_finite_loss_an_unclipped_gradient_and_moves_every_weight_of_the_module(
    mixture: Path, base: Path, tmp_path: Path
) -> None:
    made = letter(base)
    assert (made.model.module.residual, made.cfg.max_grad_norm, made.cfg.max_captions_per_sequence) == (False, None, 1)
    begun = Training(Job(made.cfg, made.model, made.compute, mixture, tmp_path, tmp_path, ""), Runtime())
    module = unwrapped(begun.engine.module).model.mdp
    before = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    batches = [begun.loader.build(batch) for batch in begun.schedule.micro_batches(0, 0)]
    begun.step(0, batches)
    (row,) = begun.curve.rows
    assert math.isfinite(float(row["loss"]))
    state = MasterState(begun.engine)
    state.link()
    firsts = [state.get(parameter, "exp_avg") for parameter in state.parameters.values()]
    whole = torch.cat([first.flatten() for first in firsts]).double().norm() / 0.1  # AdamW's first moment
    assert float(whole) == pytest.approx(float(row["grad_norm"]), rel=1e-3)
    assert begun.engine.gradient_clipping() == 0
    still = [name for name, parameter in module.named_parameters() if torch.equal(parameter, before[name])]
    # a bias of keys moves every weight of a query alike, so softmax gives it no gradient but rounding
    assert [name for name in still if not name.endswith("k_proj.bias")] == []


def test_a_run_by_the_letter_whose_validation_split_trains_ends_with_a_checkpoint_and_no_validation_loss(
    base: Path, tmp_path: Path
) -> None:
    mixture = write_mixture(tmp_path / "mixture", {"train": {"toy": 6, "second": 2}, "val": {}, "test": {"toy": 1}})
    trained = run(letter(base), mixture, tmp_path)
    assert math.isfinite(trained.report.loss)
    assert trained.report.val_loss is None
    assert trained.report.steps == math.ceil(trained.report.rows_in / 8)
    assert any(name.startswith("model.mdp.") for name in trained.weights)
