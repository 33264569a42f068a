"""The plan in words: units that fit, digits that are known, what decides first."""

from dataclasses import replace

import pytest

from m3diff.commands.plan import print_plan
from m3diff.commands.plan.fit import GpuMemory
from m3diff.commands.plan.speed import Duration, UnknownDuration
from m3diff.commands.plan.text import PAPER_ROW, format_amount, format_duration, format_estimate, plan_lines
from m3diff.commands.plan.unknown_words import WordCount
from m3diff.commands.plan.warnings import short_run_warning, warnings_before_training, warnings_of_plan
from m3diff.commands.plan.workload import DatasetShare, SampleGroup
from m3diff.stages.predict.stage import CONTROL_PAIRS
from m3diff.stages.train.params import ENOUGH_STEPS, FEW_STEPS
from tests.commands.plan.conftest import ALIGN, GPU, PAPER, ToySettings, compute_section, write_mixture
from tests.errors import Message

DURATION = Duration(device_hours=88.07, flops_per_s=1e14, basis="assumed")


def lines(plan, duration=DURATION, gpu_memory=None, warnings=()):
    return list(plan_lines(plan, duration, gpu_memory, warnings))


def line_of(plan, word, **options):
    return next(line for line in lines(plan, **options) if line.strip().startswith(word))


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (51.124e12, "51.12 TFLOP"),
        (3e18, "3.00 EFLOP"),
        (3e21, "3,000.00 EFLOP"),
        (2.5e9, "2.50 GFLOP"),
        (999_000, "999.00 kFLOP"),
        (1e6, "1.00 MFLOP"),
        (12, "12.00 FLOP"),
        (0, "0.00 FLOP"),
    ],
)
def test_a_value_is_printed_in_the_unit_that_fits(value, words):
    assert format_amount(value, "FLOP") == words


@pytest.mark.parametrize(
    ("value", "words"), [(88.07, "88"), (4.731, "4.7"), (4.96, "5.0"), (0.0449, "0.045"), (1234, "1,200"), (0, "0")]
)
def test_an_estimate_has_two_digits(value, words):
    assert format_estimate(value) == words


@pytest.mark.parametrize(
    ("hours", "words"),
    [(88.07, "88 GPU-hours"), (4.731, "4.7 GPU-hours"), (0.5, "30 GPU-minutes"), (0.005, "18 GPU-seconds")],
)
def test_a_duration_has_the_unit_that_fits(hours, words):
    assert format_duration(hours, "GPU") == words


def test_time_cost_and_memory_come_before_the_details(plan):
    counted = plan({"gpu_hour_price": 2.5, "gpu_hour_currency": "EUR"})
    headings = [
        line.strip().partition(":")[0] for line in lines(counted, gpu_memory=GpuMemory("A", 40), warnings=["short"])
    ]
    summary = [heading for heading in headings if heading in ("time", "cost", "warning", "memory", "data")]
    assert summary == ["time", "cost", "warning", "memory", "data", "data"]
    flops_heading = next(heading for heading in headings if heading.startswith("FLOPs"))
    assert headings.index("memory") < headings.index(flops_heading)


def test_hours_are_those_of_all_gpus_and_of_one(plan):
    line = line_of(plan(), "time:")
    assert "about 22 hours on 4 GPUs" in line
    assert "88 GPU-hours" in line


@pytest.mark.parametrize(
    ("compute", "cost"),
    [
        pytest.param({"gpu_hour_price": 2.5, "gpu_hour_currency": "EUR"}, "about 220 EUR, at 2.5 EUR", id="a price"),
        pytest.param({"gpu_hour_price": 1e-6}, "under 0.01 USD", id="less than a cent"),
        pytest.param({}, None, id="no price"),
        pytest.param({"gpu_hour_price": 2.5, "gpu": False}, None, id="no GPU"),
    ],
)
def test_a_cost_is_named_if_an_hour_of_a_gpu_has_a_price(plan, compute, cost):
    costs = [line for line in lines(plan(compute)) if line.startswith("  cost:")]
    assert len(costs) == (cost is not None)
    assert cost is None or cost in costs[0]


@pytest.mark.parametrize(("memory_gb", "verdict"), [(40.0, ": fits into 36.8"), (20.0, ": DOES NOT FIT into 18.4")])
def test_the_memory_has_a_verdict(plan, memory_gb, verdict):
    counted = replace(plan(), memory_gb={"weights": 30.0})
    assert verdict in line_of(counted, "memory:", gpu_memory=GpuMemory("A-40GB", memory_gb))


def test_the_memory_of_a_small_model_is_not_zero(plan):
    counted = plan({"gpu": False})
    assert "kB" in line_of(counted, "memory:")
    assert all(float(line.split()[-1]) > 0 for line in lines(counted) if line.startswith("  weights"))


def test_the_terms_of_a_small_model_are_not_zero(plan):
    terms = line_of(plan(), "linears").split()
    assert terms == ["linears", "5.400", "10.800"], "kFLOP"


def test_captioning_counts_both_controls_and_excludes_writing(plan):
    counted = replace(plan(), test_pairs=10)
    line = line_of(counted, "captioning")
    assert line.strip().startswith("captioning 10 test pairs and 20 control pairs")
    assert format_duration(DURATION.caption_hours(counted, 30)) in line
    assert "most of the time" in line


def test_the_controls_are_a_sample_of_many_test_pairs(plan):
    assert f"and {2 * CONTROL_PAIRS:,} control pairs" in line_of(replace(plan(), test_pairs=7970), "captioning")


def test_a_time_that_is_unknown_names_the_remedy(plan):
    line = line_of(plan(), "time:", duration=UnknownDuration("name a kind"))
    assert line == "  time: unknown; name a kind"


def test_test_pairs_have_the_time_in_which_they_are_read(plan):
    counted = replace(plan(), test_pairs=1000, caption_flops=6e12)
    line = line_of(counted, "captioning")
    assert "1,000 test pairs and 1,200 control pairs" in line
    assert "about 2.2 minutes on one GPU" in line
    assert not any("test pairs" in line for line in lines(replace(counted, test_pairs=None)))


def test_pairs_captions_and_steps_of_an_epoch_are_named(plan):
    line = line_of(plan(epochs=2), "data:")
    assert "4 pairs with 7 captions" in line
    assert "2 steps of 4 sequences per epoch" in line
    assert "4 steps in 2 epochs" in line


def test_lora_is_explained(plan):
    assert line_of(plan(), "llm,").split(",")[1].split()[:2] == ["LoRA", "adapters"]
    assert any(line.startswith("  LoRA adapters are ") for line in lines(plan()))


def test_parameters_that_are_not_trained_are_marked(plan):
    groups = [line[2:30].strip() for line in lines(plan()) if line.startswith("  projector")]
    assert groups == ["projector, frozen"]


def test_the_paper_s_own_counts_follow_those_of_its_datasets(plan):
    def paper_rows(shares):
        workload = replace(plan().workload, groups=[SampleGroup(shares, 29, 15, {})])
        return [line for line in lines(replace(plan(), workload=workload)) if line.strip().startswith(PAPER_ROW)]

    paper = [DatasetShare(name, 10, 20) for name in PAPER]
    (row,) = paper_rows(paper)
    assert row.split()[-4:] == ["145k", "pairs", "896k", "references"]
    assert paper_rows(paper[1:]) == []


def test_a_run_of_few_steps_gets_a_warning_with_enough_epochs():
    assert short_run_warning(FEW_STEPS, 1, "train.epochs") is None
    warning = short_run_warning(11, 2.7, "train.epochs")
    assert warning.code == "plan.few_steps"
    assert warning.fields["steps"] == 11
    assert warning.fields["field"] == "train.epochs"
    assert warning.fields["expected"] == -(-27 * ENOUGH_STEPS // 110)


@pytest.mark.parametrize("gpu", [True, False], ids=["the run uses GPUs", "the run uses none"])
def test_a_plan_for_a_kind_of_gpu_has_its_memory_and_hours(gpu, plan, capsys):
    compute = compute_section(gpu=gpu)
    print_plan(plan({"gpu": gpu}), compute, GPU, hfu=0.5)
    printed = capsys.readouterr().out
    assert f"fits into {GpuMemory(GPU.name, GPU.memory_gb).usable_gb:.1f} GB ({GPU.name} has 40 GB" in printed
    assert "on 4 GPUs" in printed
    assert "process" not in printed


@pytest.mark.parametrize(
    ("gpu", "memory_gb", "has_verdict"),
    [(True, 24.0, True), (True, None, False), (False, 24.0, False)],
    ids=["a GPU", "no GPU here", "the run uses none"],
)
def test_a_plan_without_a_kind_of_gpu_is_for_this_machines(gpu, memory_gb, has_verdict, plan, monkeypatch, capsys):
    monkeypatch.setattr("m3diff.commands.plan.text.smallest_gpu_gb", lambda: memory_gb)
    print_plan(plan({"gpu": gpu, "gpu_kind": None}), compute_section(gpu=gpu, gpu_kind=None), None, hfu=0.5)
    assert ("this machine's GPU has 24 GB" in capsys.readouterr().out) == has_verdict


UNKNOWN_WORDS = WordCount(vocabulary=9, words=10, spelled=9, examples=("villa",))


@pytest.fixture
def unknown_words(monkeypatch):
    """Let the tokenizer of the base lack most words."""
    monkeypatch.setattr("m3diff.commands.plan.warnings.count_words", lambda base, mixture: UNKNOWN_WORDS)


def test_a_training_is_warned_of_few_steps_and_of_unknown_words(run, unknown_words):
    assert warnings_before_training(run()) == [
        Message("plan.few_steps", steps=2, field="train.epochs"),
        Message("plan.unknown_words", names=["villa"]),
    ]


def test_the_samples_of_the_alignment_are_no_steps_of_the_fine_tuning(run, unknown_words, tmp_path):
    rows = [(f"{dataset}/{number}", dataset, "what changed", "a box") for number in range(6) for dataset in "ab"]
    mixture = write_mixture(tmp_path / "more", sorted(rows))
    for settings, steps in ((ToySettings(), 3), (ToySettings(align=ALIGN), 2)):
        few_steps, *_ = warnings_before_training(run(settings=settings, mixture=mixture))
        assert few_steps == Message("plan.few_steps", steps=steps)


def test_a_training_of_the_alignment_alone_is_only_warned_of_words(run, unknown_words, tmp_path):
    mixture = write_mixture(tmp_path / "aligned", [("b/1", "b", "what changed", "a box")])
    warnings = warnings_before_training(run(settings=ToySettings(align=ALIGN), mixture=mixture))
    assert warnings == [Message("plan.unknown_words")]


def test_a_training_without_a_mixture_gets_no_warning(run, unknown_words, tmp_path):
    assert warnings_before_training(run(mixture=tmp_path / "none")) == []


def test_only_the_plan_of_the_fine_tuning_warns_of_words(plan, unknown_words):
    fine_tuning = plan()
    assert [warning.code for warning in warnings_of_plan(fine_tuning)] == ["plan.few_steps", "plan.unknown_words"]
    alignment = replace(fine_tuning, epochs_parameter="models.toy.align.epochs")
    assert [warning.code for warning in warnings_of_plan(alignment)] == ["plan.few_steps"]


def test_a_printed_plan_warns_of_few_steps(plan, capsys):
    print_plan(plan(), compute_section(), None, hfu=0.5)
    warnings = [line.strip().removeprefix("warning: ") for line in capsys.readouterr().out.splitlines()]
    assert Message("plan.few_steps", steps=2) in warnings
