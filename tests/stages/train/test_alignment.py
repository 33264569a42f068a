"""Runs with two phases: an alignment on some datasets, and the fine-tuning that starts from its weights."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from m3diff.models.checkpoint import load_model
from m3diff.models.settings import Align
from m3diff.records.errors import DataError, ValueFault
from m3diff.stages.train import stage
from m3diff.stages.train.batches import read_samples, read_training_samples
from m3diff.stages.train.job import DatasetFilter, Job, alignment_sections
from m3diff.stages.train.stage import join_curves
from tests.errors import raises
from tests.stages.train.toy import Recipe, Trained, assert_same_run, interrupted, job, recipe, run, write_mixture
from tests.tiny import SEPARATE, onediff_settings, tiny_base
from tests.toy import REPOSITORY

ALIGN = Align(("couples",), epochs=2, global_batch=2, rates={"projector": 1e-2, "module": 1e-2})
SPLITS = {"train": {"toy": 10, "couples": 6}, "val": {"toy": 3, "couples": 2}, "test": {"toy": 3}}
STEPS = 6
FIRST_STEPS = 6


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mixture(tmp_path_factory.mktemp("mixture"), SPLITS)


@pytest.fixture(scope="module")
def run_recipe(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    base = tiny_base(tmp_path_factory.mktemp("base") / "base")
    return recipe(base, model=replace(onediff_settings(SEPARATE), align=ALIGN), micro_batch=2)


@pytest.fixture(scope="module")
def undisturbed(run_recipe: Recipe, mixture: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return run(run_recipe, mixture, tmp_path_factory.mktemp("whole"))


def test_the_fine_tuning_begins_at_step_1_after_the_alignment(undisturbed):
    steps = [int(row["step"]) for row in undisturbed.curve]
    assert steps == list(range(1 - FIRST_STEPS, STEPS + 1))


def test_the_alignment_has_its_own_epochs_batch_and_rates_and_no_part_waits():
    model = replace(onediff_settings(SEPARATE), align=ALIGN, delays={"module": 0.5, "llm": 0.25})
    parameters = recipe(REPOSITORY, model=model, epochs=5)
    cfg, settings = alignment_sections(parameters.cfg, parameters.model)
    assert cfg == parameters.cfg.model_copy(update={"epochs": 2, "global_batch": 2, "export": "last"})
    assert settings == replace(model, align=None, rates=ALIGN.rates, delays={"module": 0.0, "llm": 0.0})


def test_each_phase_has_its_own_rates(undisturbed):
    alignment = undisturbed.curve[:FIRST_STEPS]
    fine_tuning = undisturbed.curve[FIRST_STEPS:]
    assert all(row["lr_llm"] == "" or float(row["lr_llm"]) == 0 for row in alignment)
    assert all(float(row["lr_llm"]) > 0 for row in fine_tuning[:-1])
    assert max(float(row["lr_module"]) for row in alignment) == pytest.approx(1e-2, rel=0.1)


def test_each_phase_validates_its_own_datasets(undisturbed):
    alignment = undisturbed.curve[:FIRST_STEPS]
    fine_tuning = undisturbed.curve[FIRST_STEPS:]
    assert [row["step"] for row in alignment if row["val_loss_couples"]] == ["-4", "-2", "0"]
    assert not any(row["val_loss_couples"] for row in fine_tuning)
    assert not any(row["val_loss_toy"] for row in alignment)


def test_the_report_counts_the_fine_tuning_and_names_the_alignment(undisturbed):
    assert undisturbed.report.rows_in == sum(1 + number % 4 for number in range(10))
    loss = pytest.approx(float(undisturbed.curve[FIRST_STEPS - 1]["loss"]), abs=1e-5)
    assert undisturbed.report.alignment == {"steps": FIRST_STEPS, "captions": 2 * 13, "loss": loss}


@pytest.mark.parametrize(
    "saved",
    [
        pytest.param(2, id="first", marks=pytest.mark.slow(8)),
        pytest.param(3, id="its end", marks=pytest.mark.slow(8)),
        pytest.param(5, id="second"),
    ],
)
def test_a_training_killed_in_either_phase_ends_the_same_and_aligns_once(
    saved, run_recipe, mixture, undisturbed, tmp_path, capfd
):
    interrupted(run_recipe, mixture, tmp_path, saved)
    capfd.readouterr()
    assert_same_run(run(run_recipe, mixture, tmp_path), undisturbed)
    assert f"resumed after step {min(2 * saved, FIRST_STEPS)} of {FIRST_STEPS}" in capfd.readouterr().out


def test_the_alignment_trains_its_parts_alone(run_recipe, mixture, tmp_path):
    interrupted(run_recipe, mixture, tmp_path, 4)
    (aligned,) = (tmp_path / "runs" / "train").glob("*/alignment/out/checkpoint")
    after = load_file(aligned / "model.safetensors")
    base = load_file(run_recipe.cfg.base / "model.safetensors")
    moved = {name for name, weight in base.items() if not torch.equal(weight, after[name])}
    assert moved == {name for name in base if name.startswith(("multi_modal_projector", "image_newline"))}
    assert any(".vdm." in name for name in after.keys() - base.keys())


def test_adapters_lie_on_the_base_that_was_trained_on(run_recipe, undisturbed, tmp_path):
    adapters = undisturbed.folder / "out" / "checkpoint" / "adapters"
    manifest = json.loads((adapters / "manifest.json").read_text())
    assert (adapters / manifest["base"]).resolve() == run_recipe.cfg.base.resolve()
    model, _ = load_model(adapters)
    model.save_pretrained(tmp_path / "merged")
    for name, weight in load_file(tmp_path / "merged" / "model.safetensors").items():
        torch.testing.assert_close(weight, undisturbed.weights[name], rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("chosen", "datasets", "count"),
    [
        (DatasetFilter(("couples",), excludes=False), {"couples"}, 13),
        (DatasetFilter(("couples",)), {"toy"}, 23),
        (DatasetFilter(), {"couples", "toy"}, 36),
    ],
    ids=["one", "all but one", "all"],
)
def test_a_phase_takes_the_samples_of_its_datasets(chosen, datasets, count, mixture):
    samples = read_samples(mixture / "train", chosen)
    assert set(samples.table["dataset"]) == datasets
    assert len(samples) == count


def test_a_phase_has_the_pairs_of_its_datasets(mixture):
    couples = read_samples(mixture / "train", DatasetFilter(("couples",), excludes=False))
    assert len(couples.image_sets()) == 6


@pytest.mark.parametrize(
    ("chosen", "code"),
    [
        (DatasetFilter(("other",), excludes=False), "train.no_sample_of_datasets"),
        (DatasetFilter(("toy", "couples")), "train.no_sample_of_other_datasets"),
    ],
    ids=["unknown", "none left"],
)
def test_a_phase_without_a_sample_is_refused_by_name(chosen, code, mixture):
    with raises(DataError, code, path=mixture / "train", names=chosen.names):
        read_training_samples(mixture, chosen)


@pytest.mark.parametrize("flops", [4e9, None], ids=["counted", "not counted"])
def test_the_figures_of_a_training_include_what_its_alignment_took(flops, run_recipe, mixture, tmp_path, monkeypatch):
    jobs: list[Job] = []

    def take_phase(phase: Job) -> dict[str, Any]:
        jobs.append(phase)
        phase.out.mkdir(exist_ok=True)
        (phase.out / "curves.csv").write_text("step,loss\n1,2\n")
        number = len(jobs)
        figures = {"steps": number, "seconds": 10 * number, "device_hours": 20 * number}
        return figures | {"flops": flops and flops * number}

    monkeypatch.setattr(stage, "run_local", take_phase)
    figures, alignment_figures = stage.run_phases(job(run_recipe, mixture, tmp_path))
    assert alignment_figures["steps"] == 1
    assert figures == {"steps": 2, "seconds": 30, "device_hours": 60, "flops": flops and 3 * flops}
    alignment, fine_tuning = jobs
    assert alignment.weights is None
    assert fine_tuning.weights == alignment.out / "checkpoint"
    assert alignment.datasets == DatasetFilter(("couples",), excludes=False)
    assert fine_tuning.datasets == DatasetFilter(("couples",), excludes=True)
    assert alignment.run_dir != fine_tuning.run_dir
    assert (fine_tuning.out / "curves.csv").read_text() == "step,loss\n0,2\n1,2\n"


def test_curves_of_two_phases_are_one_file(tmp_path):
    (tmp_path / "a.csv").write_text("step,loss,val_loss_x\n1,3,\n2,2,2.5\n")
    (tmp_path / "b.csv").write_text("step,loss,val_loss_y\n1,1.5,\n2,1,1.2\n")
    join_curves(tmp_path / "a.csv", tmp_path / "b.csv")
    rows = ["step,loss,val_loss_y,val_loss_x", "-1,3,,", "0,2,,2.5", "1,1.5,,", "2,1,1.2,"]
    assert (tmp_path / "b.csv").read_text().splitlines() == rows


@pytest.mark.parametrize(
    ("changes", "code", "field"),
    [
        ({"datasets": ()}, "models.alignment_without_dataset", "datasets"),
        ({"epochs": 0}, "models.not_positive", "epochs"),
        (
            {"rates": {"vision": 1e-3, "projector": 1e-3, "module": 1e-3}},
            "models.part_of_alignment_frozen",
            "align.rates.vision",
        ),
        (
            {"rates": {"projector": 1e-3, "module": 1e-3, "llm": 1e-3}},
            "models.llm_trains_in_alignment",
            "align.rates.llm",
        ),
    ],
)
def test_an_alignment_that_cannot_be_is_refused(changes, code, field):
    with raises(ValueFault, code, field=field):
        replace(onediff_settings(vision=None), align=replace(ALIGN, **changes))
