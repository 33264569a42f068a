"""Two phases: an alignment on datasets of its own, and the fine-tuning that begins with its weights."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from m3diff.models.checkpoint import load_model
from m3diff.models.settings import Align, Rates
from m3diff.records.errors import DataError
from m3diff.stages.train.batches import read_samples, read_training_samples
from m3diff.stages.train.job import DatasetFilter
from m3diff.stages.train.stage import join_curves
from tests.stages.train.toy import Recipe, Trained, assert_same_run, interrupted, recipe, run, write_mixture
from tests.tiny import SEPARATE, onediff_settings, tiny_base

ALIGN = Align(("couples",), epochs=2, global_batch=2, rates=Rates(None, 1e-2, 1e-2, None))
SPLITS = {"train": {"toy": 10, "couples": 6}, "val": {"toy": 3, "couples": 2}, "test": {"toy": 3}}
STEPS, FIRST_STEPS = 6, 6


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mixture(tmp_path_factory.mktemp("mixture"), SPLITS)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    base = tiny_base(tmp_path_factory.mktemp("base") / "base")
    return recipe(base, model=replace(onediff_settings(SEPARATE), align=ALIGN), micro_batch=2)


@pytest.fixture(scope="module")
def whole(made: Recipe, mixture: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return run(made, mixture, tmp_path_factory.mktemp("whole"))


def test_the_curves_are_of_both_phases_and_the_fine_tuning_begins_at_step_1(whole):
    steps = [int(row["step"]) for row in whole.curve]
    assert steps == list(range(1 - FIRST_STEPS, STEPS + 1))
    first, second = whole.curve[:FIRST_STEPS], whole.curve[FIRST_STEPS:]
    assert all(row["lr_llm"] == "" or float(row["lr_llm"]) == 0 for row in first)
    assert all(float(row["lr_llm"]) > 0 for row in second[:-1])
    assert max(float(row["lr_module"]) for row in first) == pytest.approx(1e-2, rel=0.1)
    assert [row["step"] for row in first if row["val_loss_couples"]] == ["-4", "-2", "0"]
    assert not any(row["val_loss_couples"] for row in second)
    assert not any(row["val_loss_toy"] for row in first)
    assert whole.report.rows_in == sum(1 + n % 4 for n in range(10)), "samples of the fine-tuning"
    loss = pytest.approx(float(first[-1]["loss"]), abs=1e-5)
    assert whole.report.alignment == {"steps": FIRST_STEPS, "captions": 2 * 13, "loss": loss}


@pytest.mark.parametrize("saved", [2, 3, 5], ids=["first", "its end", "second"])
def test_a_training_killed_in_either_phase_ends_the_same_and_aligns_once(saved, made, mixture, whole, tmp_path, capfd):
    interrupted(made, mixture, tmp_path, saved)
    capfd.readouterr()
    assert_same_run(run(made, mixture, tmp_path), whole)
    assert f"resumed after step {min(2 * saved, FIRST_STEPS)} of {FIRST_STEPS}" in capfd.readouterr().out


def test_the_alignment_trains_its_parts_alone(made, mixture, tmp_path):
    interrupted(made, mixture, tmp_path, 4)
    (aligned,) = (tmp_path / "runs" / "train").glob("*/alignment/out/checkpoint")
    after, base = load_file(aligned / "model.safetensors"), load_file(made.cfg.base / "model.safetensors")
    moved = {name for name, weight in base.items() if not torch.equal(weight, after[name])}
    assert moved == {name for name in base if name.startswith(("multi_modal_projector", "image_newline"))}
    assert any(".vdm." in name for name in after.keys() - base.keys())


def test_adapters_lie_on_the_base_that_was_trained_on(made, whole, tmp_path):
    adapters = whole.folder / "out" / "checkpoint" / "adapters"
    manifest = json.loads((adapters / "manifest.json").read_text())
    assert (adapters / manifest["base"]).resolve() == made.cfg.base.resolve()
    model, _ = load_model(adapters)
    model.save_pretrained(tmp_path / "merged")
    for name, weight in load_file(tmp_path / "merged" / "model.safetensors").items():
        torch.testing.assert_close(weight, whole.weights[name], rtol=0, atol=1e-6)


def test_a_phase_takes_the_samples_of_its_datasets_and_without_one_is_refused_by_name(mixture):
    chosen = [DatasetFilter(("couples",), others=False), DatasetFilter(("couples",)), DatasetFilter()]
    held = [read_samples(mixture / "train", each) for each in chosen]
    assert [(set(each.table["dataset"]), len(each)) for each in held[:2]] == [
        ({"couples"}, 13),
        ({"toy"}, 23),
    ]
    assert (len(held[2]), len(held[0].pairs())) == (36, 6)
    with pytest.raises(DataError, match="no sample of split 'train' of other; run `m3diff convert`"):
        read_training_samples(mixture, DatasetFilter(("other",), others=False))
    with pytest.raises(DataError, match="of datasets other than toy, couples"):
        read_training_samples(mixture, DatasetFilter(("toy", "couples")))


def test_curves_of_two_phases_are_one_file(tmp_path):
    (tmp_path / "a.csv").write_text("step,loss,val_loss_x\n1,3,\n2,2,2.5\n")
    (tmp_path / "b.csv").write_text("step,loss,val_loss_y\n1,1.5,\n2,1,1.2\n")
    join_curves(tmp_path / "a.csv", tmp_path / "b.csv")
    rows = ["step,loss,val_loss_y,val_loss_x", "-1,3,,", "0,2,,2.5", "1,1.5,,", "2,1,1.2,"]
    assert (tmp_path / "b.csv").read_text().splitlines() == rows


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"datasets": ()}, "datasets must name at least one"),
        ({"epochs": 0}, "epochs must be above 0, found 0"),
        ({"rates": Rates(1e-3, 1e-3, 1e-3, None)}, "align: rates.vision: trains, so it must have a rate"),
        ({"rates": Rates(None, 1e-3, 1e-3, 1e-3)}, "align: rates.llm must be null"),
    ],
)
def test_an_alignment_that_cannot_be_is_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        replace(onediff_settings(vision=None), align=replace(ALIGN, **changes))
