"""The plan of the family `auto`, whose FLOPs cannot be counted: parameters, known memory, and measured tokens."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from m3diff.commands.plan import BasicPlan, Plan, Run, check_fits, check_memory, plan_run, print_plan
from m3diff.commands.plan.figures import FROZEN
from m3diff.commands.plan.fit import RESERVE
from m3diff.commands.plan.without_flops import UNUSED, measure_tokens
from m3diff.models import FAMILIES
from m3diff.models.auto import AutoSettings
from m3diff.models.device import Device
from m3diff.models.settings import Lora
from m3diff.models.tuning import parameter_counts, prepare_for_training
from m3diff.records.schemas import SAMPLE_SCHEMA
from m3diff.settings.section import ParamsError
from m3diff.stages.train.batches import Loader, read_samples
from tests.commands.plan.conftest import compute_section, convert_section, entries, train_section
from tests.errors import raises
from tests.tiny_vlm import minichange_pairs, tiny_vlm

RATES = {"vision": 1e-3, "projector": None, "llm": 1e-3}
SETTINGS = AutoSettings(family="auto", module=None, lora=Lora(rank=2, alpha=4), rates=RATES)
PAIRS = 3
CAPTIONS = 3  # of each pair


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_vlm("qwen3_vl", tmp_path_factory.mktemp("qwen3_vl"))


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixture")
    (folder / "train").mkdir()
    rows: list[dict[str, Any]] = []
    for number, pair in enumerate(minichange_pairs()[:PAIRS]):
        images = []
        for name, image in zip(("before", "after"), pair.images, strict=True):
            image.save(folder / f"{number}-{name}.png")
            images.append({"uri": str(folder / f"{number}-{name}.png"), "sha256": None})
        row = {"record": f"a/{number}", "image_set": f"a/{number}", "dataset": "a", "split": "train"}
        row |= {"images": images, "history": [], "question": "What has changed?"}
        rows += [row | {"id": f"a/{number}#{caption}", "answer": text} for caption, text in enumerate(pair.captions)]
    pq.write_table(pa.Table.from_pylist(rows, SAMPLE_SCHEMA), folder / "train/00000.parquet")
    return folder


@pytest.fixture
def run(base: Path, mixture: Path) -> Run:
    return Run(
        train=train_section(base=base, max_captions_per_sequence=None),
        settings=SETTINGS,
        compute=compute_section(zero_stage=2),
        entries=entries("a=pairs"),
        convert=convert_section(),
        mixture=mixture,
    )


def test_steps_samples_and_sequences_are_counted(run):
    plan = plan_run(run)
    assert not isinstance(plan, Plan)
    assert plan.workload.pairs == PAIRS
    assert plan.workload.references == PAIRS * CAPTIONS
    assert plan.sequences == PAIRS
    assert plan.steps == 1
    assert plan_run(replace(run, train=train_section(base=run.train.base))).sequences == PAIRS * CAPTIONS


def test_parameters_are_those_of_the_model_that_trains(run, base):
    family = FAMILIES["auto"]
    model = family.load_base(base, SETTINGS, torch.float32, None)
    counts = parameter_counts(prepare_for_training(model, family, SETTINGS), family)
    planned = plan_run(run).parameters
    assert {part: planned.get(part, 0) for part in family.parts} == {part: counts[part] for part in family.parts}
    frozen = sum(count for group, count in planned.items() if group.endswith(FROZEN))
    assert frozen == counts["frozen"]
    assert planned[f"projector{FROZEN}"]
    assert f"{UNUSED}{FROZEN}" not in planned


def test_memory_is_that_of_weights_gradients_and_optimizer(run):
    plan = plan_run(run)
    total = sum(plan.parameters.values())
    trained = plan.parameters["vision"] + plan.parameters["llm"]
    workers = run.compute.workers
    assert plan.memory_gb == pytest.approx(
        {
            "weights": 2 * total / 1e9,
            "gradients": 4 * trained / workers / 1e9,
            "optimizer": 12 * trained / workers / 1e9,
        }
    )


def test_tokens_are_those_that_training_reads(run):
    """The last token of a branch is only a label, and is counted all the same."""
    tokens = measure_tokens(run)
    assert tokens is not None
    family = FAMILIES["auto"]
    processor: Any = family.load_processor(run.train.base)
    samples = read_samples(run.mixture / "train")
    packing = family.packing()
    device = Device(False, "fp32")
    loader = Loader(samples, processor, packing, 1, device)
    packed = 0
    separate = 0
    for rows in samples.image_sets():
        (sequence,) = loader.read([(rows, 1)])
        (unit,) = packing.batch([sequence], processor, device).units
        branch_tokens = sum(len(branch.ids) - unit.prefix_ids.shape[1] for branch in sequence.branches)
        packed += unit.prefix_ids.shape[1] + branch_tokens
        separate += sum(len(branch.ids) for branch in sequence.branches)
    assert tokens.sequences == PAIRS
    assert tokens.packed_tokens == packed / PAIRS
    assert tokens.separate_tokens == separate / PAIRS
    assert tokens.image_tokens == pytest.approx((18 + 16 + 18) / PAIRS)


def printed_lines(capsys: pytest.CaptureFixture[str], plan: BasicPlan) -> list[str]:
    print_plan(plan, plan.run.compute, None, 0.4)
    return capsys.readouterr().out.splitlines()


def test_one_line_says_how_the_base_is_packed_and_what_that_saves(run, capsys):
    tokens = measure_tokens(run)
    assert tokens is not None
    (line,) = (line for line in printed_lines(capsys, plan_run(run)) if "cache" in line)
    times = tokens.separate_tokens / tokens.packed_tokens
    assert f"{tokens.packed_tokens:.0f} tokens per sequence in place of {tokens.separate_tokens:.0f} " in line
    assert f"({times:.1f} times fewer)" in line


def test_the_plan_says_what_is_not_estimated(run, capsys):
    lines = printed_lines(capsys, plan_run(run))
    assert lines[0] == "  FLOPs, activations and hours are not estimated for models of the family auto"
    assert not any("FLOP" in line or "hour" in line for line in lines[1:])


@pytest.mark.parametrize("missing", ["base", "mixture"])
def test_without_a_base_or_a_mixture_the_plan_says_what_is_missing(run, tmp_path, capsys, missing):
    planned_run = replace(run, mixture=tmp_path / "none", entries=entries("spot_the_diff"))
    if missing == "base":
        planned_run = replace(run, train=train_section(base=tmp_path / "none"))
    plan = plan_run(planned_run)
    (line,) = (line for line in printed_lines(capsys, plan) if "cache" in line)
    assert f"there is no {missing}" in line
    assert str(tmp_path / "none") in line
    assert bool(plan.parameters) == (missing == "mixture")
    assert plan.sequences > 0


def test_a_run_whose_weights_fill_a_gpu_is_refused(run):
    plan = plan_run(run)
    needed_gb = plan.memory_total_gb
    check_fits(run.compute, plan, needed_gb / (1 - RESERVE) * 1.01)
    with raises(ParamsError, "plan.weights_do_not_fit_into_memory", needed_gb=needed_gb) as refusal:
        check_fits(run.compute, plan, needed_gb)
    codes = [remedy.code for remedy in refusal.value.fields["remedies"]]
    assert codes == ["plan.raise_zero_stage", "plan.take_larger_gpus"]


def test_training_checks_the_known_memory_without_preparing_images(run, monkeypatch):
    monkeypatch.setattr("m3diff.commands.plan.text.measure_tokens", None)
    monkeypatch.setattr("m3diff.commands.plan.fit.smallest_gpu_gb", lambda: 1e-4)
    with raises(ParamsError, "plan.weights_do_not_fit_into_memory"):
        check_memory(run)
