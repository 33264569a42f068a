"""The planner's arithmetic on a model counted by hand, and its figures for the paper's run and for one GPU."""

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from m3diff.commands.plan.plan import (
    RESERVE,
    DoesNotFit,
    Plan,
    check_fits,
    check_memory,
    found_memory_gb,
    make_plan,
    plan_alignment,
)
from m3diff.commands.plan.words import alignment_lines, print_plan, short_run
from m3diff.models.settings import Align, Lora
from m3diff.settings.gpus import GPUS, Gpu
from tests.commands.plan.conftest import ToySettings, compute_section, convert_section, train_section
from tests.commands.plan.test_workload import entries, write_mixture

GB = 1e9
TRAINED, FROZEN = 20 + 28, 8 + 32 + 448
"""Vision encoder and adapters (2 x (8 + 6)); the norm never run, the frozen projector, the LLM below its adapters."""


@pytest.fixture
def plan(toy_family, tmp_path):
    """Plans of the toy family on the mixture of seven references: (compute, settings and train fields) -> Plan."""
    mixture = write_mixture(tmp_path / "mixture")

    def make(compute: dict | None = None, settings: ToySettings | None = None, **train: object) -> Plan:
        cfg = train_section(Path(train.pop("base", tmp_path / "no_base")), **train)
        sources = entries({"a": "pairs", "b": "pairs"})
        parts = (settings or ToySettings(), compute_section(**compute or {}), sources, convert_section(), mixture)
        return make_plan(cfg, *parts)

    return make


def test_parameters_are_those_that_train_and_those_that_are_frozen_by_part(plan):
    assert plan().parameters == {
        "vision": 20,
        "vision (frozen)": 8,
        "projector (frozen)": 32,
        "llm": 28,
        "llm (frozen)": 48 + 400,
    }


def test_without_adapters_the_linears_train_in_full_and_a_part_with_a_rate_trains(plan):
    settings = ToySettings(lora=Lora(0, 1), rates={"vision": None, "projector": 1e-3, "llm": 1e-3})
    assert plan(settings=settings).parameters == {
        "vision (frozen)": 28,
        "projector": 32,
        "llm": 48,
        "llm (frozen)": 400,
    }


@pytest.mark.parametrize(
    ("most", "sequences", "branches", "tokens", "steps"),
    [(1, 7, 1.0, 54.0, 2), (2, 5, 1.4, 60.0, 2), (3, 4, 1.75, 65.25, 1), (None, 4, 1.75, 65.25, 1)],
)
def test_every_packing_is_counted(plan, most, sequences, branches, tokens, steps):
    made = plan(max_captions_per_sequence=most)
    assert (made.sequences, made.steps) == (sequences, steps)
    assert made.branches == pytest.approx(branches)
    assert made.tokens == pytest.approx(tokens)  # 10 of the images, 29 of the prompt, 15 of each reference
    assert [term.forward for term in made.terms] == pytest.approx([100 * tokens, 10 * 2, 7 * 15 * branches])


def test_a_base_that_is_there_counts_by_its_tokenizer(plan, tmp_path):
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text("{}")
    made = plan(base=tmp_path / "base")
    assert made.tokens == pytest.approx(10 + 14 / 4 + 23 / 7)
    assert made.base == str(tmp_path / "base")
    assert plan().base == f"published shapes of the toy, {tmp_path / 'no_base'} is not here"


@pytest.mark.parametrize(
    ("epochs", "global_batch", "steps"), [(1, 7, 1), (1, 6, 2), (2.5, 4, 5), (0.5, 4, 1), (0.6, 4, 2)]
)
def test_steps_are_those_of_the_loop_whose_last_batch_of_an_epoch_is_smaller(plan, epochs, global_batch, steps):
    assert plan(epochs=epochs, global_batch=global_batch).steps == steps


def test_the_run_takes_the_flops_of_its_sequences_and_full_recomputation_runs_the_marked_terms_again(plan):
    sequence = 2 * 5400 + 3 * 20 + 2 * 105
    assert plan().run_flops == 7 * sequence
    assert plan(epochs=3).run_flops == 3 * 7 * sequence
    assert plan({"activation_checkpointing": "selective"}).run_flops == 7 * sequence
    full = plan({"activation_checkpointing": "full"})
    assert full.run_flops == 7 * (sequence + 5400 + 20)
    assert full.model_flops == 7 * sequence


def test_mfu_is_the_models_share_of_what_is_computed(plan):
    assert replace(plan(), model_flops=2e12, run_flops=3e12).mfu(0.45) == pytest.approx(0.3)


@pytest.mark.parametrize(("peak", "hfu", "hours"), [(1.0, 0.5, 2.0), (2.0, 0.5, 1.0), (1.0, 1.0, 1.0)])
def test_hours_are_flops_over_the_share_of_the_peak_that_is_reached(plan, peak, hfu, hours):
    assert replace(plan(), run_flops=1e12 * 3600).gpu_hours(peak, hfu) == pytest.approx(hours)


@pytest.mark.parametrize(
    ("stage", "weights", "gradients", "optimizer"), [(0, 1, 1, 1), (1, 1, 1, 4), (2, 1, 4, 4), (3, 4, 4, 4)]
)
def test_each_zero_stage_shares_out_one_thing_more(plan, stage, weights, gradients, optimizer):
    memory = plan({"zero_stage": stage, "workers": 4}).memory_gb
    assert memory["weights"] * GB == pytest.approx(2 * (TRAINED + FROZEN) / weights)
    assert memory["gradients"] * GB == pytest.approx(4 * TRAINED / gradients)
    assert memory["optimizer"] * GB == pytest.approx(12 * TRAINED / optimizer)


def test_one_process_without_ray_is_one_gpu_that_holds_everything(plan):
    made = plan({"zero_stage": 3, "workers": 0})
    assert made.gpus == 1
    assert made.memory_gb["weights"] * GB == pytest.approx(2 * (TRAINED + FROZEN))
    assert plan({"workers": 4}).gpus == 4


def test_activations_are_those_of_the_longest_sequence_for_each_of_a_micro_batch(plan):
    made = plan({"micro_batch": 5}, max_captions_per_sequence=None, precision="fp32")
    assert made.longest == 3
    supervised = 3 * 15
    places = 10 * 4 * 4  # of the images, under the sigmoid
    chosen = supervised * (8 * 4 + 8)  # what the head reads, and its index
    found = {name: size * GB for name, size in made.activations_gb.items()}
    assert found == pytest.approx(
        {
            "between parts": 5 * (places + chosen),
            "llm": 5 * supervised * 2 * 4,
            "logits": 5 * (3 * supervised * 6 * 4 + 8),
        }
    )
    assert made.memory_gb["activations"] == pytest.approx(sum(made.activations_gb.values()))
    assert plan({"micro_batch": 1}, max_captions_per_sequence=2).longest == 2


def test_of_published_counts_the_memory_is_for_the_mean_sequence(toy_family, tmp_path):
    sources = (entries({"birds_to_words": "birds_to_words"}), convert_section(), tmp_path / "none")
    train = train_section(tmp_path / "no_base", max_captions_per_sequence=None)
    made = make_plan(train, ToySettings(), compute_section(micro_batch=1), *sources)
    assert made.longest is None
    mean = math.ceil(15 * 12_867 / 2_685)
    assert made.activations_gb["llm"] * GB == pytest.approx(mean * 2 * 2)


def test_float32_doubles_the_weights_and_neither_gradients_nor_optimizer(plan):
    narrow, wide = plan().memory_gb, plan(precision="fp32").memory_gb
    ratios = {name: wide[name] / narrow[name] for name in ("weights", "gradients", "optimizer")}
    assert ratios == pytest.approx({"weights": 2, "gradients": 1, "optimizer": 1})


def test_what_does_not_fit_is_refused_with_what_to_lower(plan):
    made = replace(plan(), memory_gb={"weights": 60.0, "activations": 14.0})
    check_fits(compute_section(), made, 74 / 0.92 + 0.01)
    with pytest.raises(DoesNotFit) as refused:
        check_fits(compute_section(micro_batch=3, zero_stage=1), made, 80)
    assert str(refused.value) == (
        "compute: needs 74.0 GB a GPU (weights 60.0, activations 14.0) but 80 GB hold 73.6; lower compute.micro_batch "
        "(now 3) or raise compute.zero_stage (now 1) or set compute.activation_checkpointing to selective or full "
        "(now none) or take larger GPUs"
    )


def test_nothing_is_proposed_that_would_not_help(plan):
    compute = {"micro_batch": 1, "zero_stage": 3, "activation_checkpointing": "full"}
    made = replace(plan(), memory_gb={"weights": 90.0})
    with pytest.raises(DoesNotFit, match=r"hold 73\.6; take larger GPUs$"):
        check_fits(compute_section(**compute), made, 80)
    packed = replace(made, branches=2.5)
    with pytest.raises(DoesNotFit, match=r"hold 73\.6; lower train.max_captions_per_sequence or take larger GPUs$"):
        check_fits(compute_section(**compute), packed, 80)
    with pytest.raises(DoesNotFit, match="to full \\(now selective\\)"):
        check_fits(compute_section(**compute | {"activation_checkpointing": "selective"}), made, 80)
    with pytest.raises(DoesNotFit, match="checkpointing to selective or full") as one:
        check_fits(compute_section(workers=1), replace(made, gpus=1), 80)
    assert "zero_stage" not in str(one.value)


@pytest.fixture
def check(toy_family, tmp_path, monkeypatch):
    """`check_memory` of the toy on its mixture, on a machine whose GPU has so much memory (None: it has no GPU)."""
    mixture = write_mixture(tmp_path / "mixture")

    def check(found: float | None, **compute: object) -> None:
        monkeypatch.setattr("m3diff.commands.plan.plan.found_memory_gb", lambda: found)
        sources = (entries({"a": "pairs", "b": "pairs"}), convert_section(), mixture)
        train = train_section(tmp_path / "no_base")
        check_memory(train, ToySettings(), compute_section(**compute), *sources)

    return check


def test_a_run_is_checked_against_the_memory_that_is_found_else_of_the_kind(check):
    with pytest.raises(DoesNotFit, match="but 2e-06 GB hold"):
        check(2e-6)
    check(80.0, gpu_kind="A10-24GB")
    check(None, gpu_kind="H100-80GB")
    with pytest.raises(DoesNotFit, match="but 24 GB hold 22.1; lower compute.micro_batch"):
        check(None, gpu_kind="A10-24GB", micro_batch=10**8)


def test_without_a_gpu_or_where_nothing_is_known_of_it_nothing_is_refused(check):
    check(1e-6, gpu=False)
    check(None, gpu_kind=None, micro_batch=10**8)


def test_the_memory_found_is_that_of_the_smallest_gpu(monkeypatch):
    sizes = [80_000_000_000, 24_000_000_000]
    monkeypatch.setattr("torch.cuda.device_count", lambda: len(sizes))
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda n: SimpleNamespace(total_memory=sizes[n]))
    assert found_memory_gb() == 24
    sizes.clear()
    assert found_memory_gb() is None


def test_the_plan_is_printed_as_counted(plan, capsys, tmp_path):
    made = replace(
        plan({"activation_checkpointing": "full"}, max_captions_per_sequence=None),
        run_flops=9e15,
        model_flops=6e15,
        memory_gb={"weights": 1.25, "activations": 2.5},
        activations_gb={"llm": 2.25, "logits": 0.25},
    )
    terms = [replace(term, forward=term.forward * 1e9) for term in made.terms]
    train = train_section(tmp_path, max_captions_per_sequence=None, epochs=2)
    compute = compute_section(activation_checkpointing="full")
    gpu = Gpu("A-40GB", 40, 100, "nobody")
    print_plan(train, compute, replace(made, terms=terms), gpu, hfu=0.25)
    assert capsys.readouterr().out.splitlines() == [
        f"parameters: published shapes of the toy, {tmp_path / 'no_base'} is not here",
        "  vision                               0.00 M",
        "  vision (frozen)                      0.00 M",
        "  projector (frozen)                   0.00 M",
        "  llm                                  0.00 M",
        "  llm (frozen)                         0.00 M",
        f"counted: {tmp_path / 'mixture/train'}, lengths estimated",
        "  a                                    2 pairs         4 references",
        "  b                                    2 pairs         3 references",
        "workload: 4 pairs, 7 references, 1.75 a pair; 29.0 tokens a prompt, 15.0 a reference",
        "  max_captions_per_sequence all: 4 sequences of 65 tokens, 1.75 references each; 1 steps of 4",
        "FLOPs of one sequence, TFLOP     forward     total",
        "  linears                          6.525    13.050",
        "  LoRA                             0.020     0.060",
        "  head                             0.184     0.367",
        "  sum of the model                  6.73     13.48",
        "  recomputation, full                         6.54",
        "  per reference 11.44 TFLOP; the run 0.01 EFLOP, 0.01 of them the model's",
        "memory of one GPU, GB; activations counted for the longest sequence, 3 reference(s)",
        "  weights                            1.2",
        "  activations                        2.5",
        "    llm                             2.25",
        "    logits                          0.25",
        "  sum                                3.8 of 36.8, A-40GB less 8%",
        "time on A-40GB (100 TFLOP/s dense bf16) at 25% HFU, which is 16.7% MFU (without recomputation):",
        "  0.1 GPU-hours, 0.0 h on 4 GPU(s), 0.0 captions/s a GPU",
    ]


def test_time_and_speed_are_for_all_epochs_and_gpus(plan, capsys, tmp_path):
    made = replace(plan(), run_flops=6 * 3600e12)
    gpu = Gpu("A-40GB", 40, 2, "nobody")
    print_plan(train_section(tmp_path, epochs=7200), compute_section(), made, gpu, hfu=0.5)
    line = capsys.readouterr().out.splitlines()[-1]
    assert line == "  6.0 GPU-hours, 1.5 h on 4 GPU(s), 2.3 captions/s a GPU"


def test_without_a_kind_the_plan_says_how_to_name_one_and_without_bf16_it_knows_no_peak(plan, capsys, tmp_path):
    print_plan(train_section(tmp_path), compute_section(), plan(), None, 0.45)
    printed = capsys.readouterr().out
    assert "time: name a kind of GPU by --gpu or compute.gpu_kind: A100-40GB, A100-80GB, H100-80GB" in printed
    assert printed.splitlines()[-2].split()[0] == "sum"
    print_plan(train_section(tmp_path, precision="fp32"), compute_section(), plan(), GPUS["A10-24GB"], 0.45)
    assert capsys.readouterr().out.splitlines()[-1].endswith("peaks are known for bf16, and train.precision is fp32")


def test_a_number_of_captions_to_a_sequence_is_printed_as_it_is(plan, capsys, tmp_path):
    print_plan(train_section(tmp_path, max_captions_per_sequence=2), compute_section(), plan(), None, 1)
    assert "  max_captions_per_sequence 2: 7 sequences" in capsys.readouterr().out


def test_a_run_of_few_steps_is_warned_of_with_the_epochs_that_would_do(plan, tmp_path):
    cfg = train_section(tmp_path, epochs=2)
    assert short_run(cfg, replace(plan(), steps=100)) is None
    said = short_run(cfg, replace(plan(), steps=6))
    assert said.startswith("the run takes 6 optimizer step(s)")
    assert said.endswith("train.epochs 100 is about 300 steps")


def test_a_short_runs_time_is_in_minutes(plan, capsys, tmp_path):
    made = replace(plan(), run_flops=0.06 * 3600e12)
    print_plan(train_section(tmp_path), compute_section(), made, Gpu("A-40GB", 40, 2, "nobody"), hfu=0.5)
    assert "  3.60 GPU-minutes, 0.90 min on 4 GPU(s)" in capsys.readouterr().out


ALIGN = Align(("b",), epochs=3.0, global_batch=2, rates={"vision": None, "projector": 1e-3, "llm": None})  # type: ignore[arg-type]


@pytest.fixture
def phases(toy_family, tmp_path):
    """Plans of the fine-tuning and of the alignment of the toy on the datasets a and b."""

    def make(align: Align | None = ALIGN, mixture: Path | None = None) -> tuple[Plan, Plan | None, str]:
        run = (train_section(tmp_path / "no_base"), ToySettings(align=align), compute_section())
        data = entries({"a": "pairs", "b": "pairs"}), convert_section(), mixture or tmp_path / "mixture"
        return make_plan(*run, *data), *plan_alignment(*run, *data)

    write_mixture(tmp_path / "mixture")
    return make


def test_each_phase_is_counted_on_its_own_datasets_with_its_own_rates_batches_and_epochs(phases):
    made, before, uncounted = phases()
    assert (set(made.workload.sources), set(before.workload.sources), uncounted) == ({"a"}, {"b"}, "")
    assert before.parameters == {"vision (frozen)": 28, "projector": 32, "llm (frozen)": 448}
    assert before.sequences == before.workload.references == 3
    assert before.steps == 6  # 3 epochs of 2 steps
    assert before.run_flops == 3 * 3 * sum(term.total for term in before.terms)
    assert made.parameters["llm"] == 28
    assert made.steps == 1


def test_without_an_alignment_there_is_no_plan_of_one(phases):
    made, before, _ = phases(align=None)
    assert set(made.workload.sources) == {"a", "b"}
    assert before is None
    assert alignment_lines(train_section(Path("base")), ToySettings(), None, "", None, 0.5) == []


def test_an_alignment_is_named_with_what_it_trains_and_costs(phases):
    settings = ToySettings(align=ALIGN)
    _, before, _ = phases()
    took = replace(before, run_flops=3600e12)
    first, second = alignment_lines(
        train_section(Path("base")), settings, took, "", Gpu("A-40GB", 40, 2, "nobody"), 0.5
    )
    assert first == "before it an alignment: 3 epoch(s) of b, 2 sequences a step (projector 0.001)"
    assert second.startswith(
        "  2 pairs, 3 references, 6 steps; 0.00 EFLOP, 1.0 GPU-hours, 0.2 h on 4 GPU(s); memory of"
    )
    assert "on 4 GPU(s)" not in alignment_lines(train_section(Path("base")), settings, took, "", None, 0.5)[1]
    whole = train_section(Path("base"), precision="fp32")
    gpu = Gpu("A-40GB", 40, 2, "nobody")
    assert "GPU-hours" not in alignment_lines(whole, settings, took, "", gpu, 0.5)[1], "no peak is known for fp32"


def test_an_alignment_whose_datasets_cannot_be_counted_says_why(phases, tmp_path):
    write_mixture(tmp_path / "other", [("a/1", "a", "what", "one")], shards=1)
    made, before, uncounted = phases(mixture=tmp_path / "other")
    assert made.workload.references == 1
    assert before is None
    assert uncounted == f"{tmp_path}/other/train has no samples but of a; run `dvc repro convert` again"
    lines = alignment_lines(train_section(Path("base")), ToySettings(align=ALIGN), None, uncounted, None, 0.5)
    assert lines[1] == f"  not counted: {uncounted}"


def test_an_alignment_that_does_not_fit_is_refused_before_anything_is_loaded(phases, toy_family, tmp_path, monkeypatch):
    made, before, _ = phases()
    assert before.memory_total_gb < made.memory_total_gb
    wide = replace(ALIGN, rates={"vision": 1e-3, "projector": 1e-3, "llm": 1e-3})  # more trains than in the fine-tuning
    made, before, _ = phases(align=wide)
    assert before.memory_total_gb > made.memory_total_gb
    between = (before.memory_total_gb + made.memory_total_gb) / 2 / (1 - RESERVE)
    data = entries({"a": "pairs", "b": "pairs"}), convert_section(), tmp_path / "mixture"
    monkeypatch.setattr("m3diff.commands.plan.plan.found_memory_gb", lambda: between)
    with pytest.raises(DoesNotFit):
        check_memory(train_section(tmp_path / "no_base"), ToySettings(align=wide), compute_section(), *data)
