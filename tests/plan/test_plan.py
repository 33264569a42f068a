"""The planner's arithmetic on a model counted by hand, and its figures for the paper's run and for one GPU."""

from dataclasses import replace
from pathlib import Path

import pytest

from components.models.family import Lora
from components.plan.plan import DoesNotFit, Plan, check_fits, make_plan, print_plan
from tests.plan.conftest import ToySettings, compute_section, convert_section, train_section
from tests.plan.test_workload import entries, write_mixture

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
    assert plan().base == f"published shapes, {tmp_path / 'no_base'} is not here"


@pytest.mark.parametrize(
    ("epochs", "global_batch", "steps"), [(1, 7, 1), (1, 6, 2), (2.5, 4, 5), (0.5, 4, 1), (0.6, 4, 2)]
)
def test_steps_are_those_of_the_loop_whose_last_batch_of_an_epoch_is_smaller(plan, epochs, global_batch, steps):
    assert plan(epochs=epochs, global_batch=global_batch).steps == steps


def test_the_run_takes_the_flops_of_its_sequences_and_full_recomputation_runs_all_but_the_head_again(plan):
    sequence = 2 * 5400 + 3 * 20 + 2 * 105
    assert plan().run_flops == 7 * sequence
    assert plan(epochs=3).run_flops == 3 * 7 * sequence
    assert plan({"activation_checkpointing": "selective"}).run_flops == 7 * sequence
    assert plan({"activation_checkpointing": "full"}).run_flops == 7 * (sequence + 5400 + 20)


@pytest.mark.parametrize(("peak", "mfu", "hours"), [(1.0, 0.5, 2.0), (2.0, 0.5, 1.0), (1.0, 1.0, 1.0)])
def test_hours_are_flops_over_the_share_of_the_peak_that_is_reached(plan, peak, mfu, hours):
    assert replace(plan(), run_flops=1e12 * 3600).gpu_hours(peak, mfu) == pytest.approx(hours)


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


@pytest.mark.parametrize(("recomputation", "factor"), [("none", 34), ("selective", 15), ("full", 1)])
def test_activations_grow_with_micro_batch_tokens_layers_and_width(plan, recomputation, factor):
    memory = plan({"activation_checkpointing": recomputation, "micro_batch": 5}).memory_gb
    assert memory["activations"] * GB == pytest.approx(5 * 54 * factor * 3 * 4 * 2)


def test_float32_doubles_weights_and_activations_and_nothing_else(plan):
    narrow, wide = plan().memory_gb, plan(precision="fp32").memory_gb
    ratios = {name: wide[name] / narrow[name] for name in narrow}
    assert ratios == pytest.approx({"weights": 2, "gradients": 1, "optimizer": 1, "activations": 2})


def test_what_does_not_fit_is_refused_with_what_to_lower(plan):
    made = replace(plan(), memory_gb={"weights": 60.0, "activations": 14.0})
    check_fits(compute_section(gpu_memory_gb=74 / 0.92 + 0.01), made)
    with pytest.raises(DoesNotFit) as refused:
        check_fits(compute_section(gpu_memory_gb=80, micro_batch=3, zero_stage=1), made)
    assert str(refused.value) == (
        "compute: needs 74.0 GB a GPU (weights 60.0, activations 14.0) but 80 GB hold 73.6; lower compute.micro_batch "
        "(now 3), raise compute.zero_stage (now 1) or set compute.activation_checkpointing to selective or full "
        "(now none)"
    )


def test_without_a_gpu_nothing_is_refused(plan):
    check_fits(compute_section(gpu=False, gpu_memory_gb=0), plan())


def test_the_plan_is_printed_as_counted(plan, capsys, tmp_path):
    made = replace(plan(max_captions_per_sequence=None), run_flops=9e15, memory_gb={"weights": 1.25, "optimizer": 2.5})
    terms = [replace(term, forward=term.forward * 1e9) for term in made.terms]
    train, compute = (
        train_section(tmp_path, max_captions_per_sequence=None, epochs=2),
        compute_section(gpu_memory_gb=40),
    )
    print_plan(train, compute, replace(made, terms=terms), peak_tflops=100, mfu=0.25)
    assert capsys.readouterr().out.splitlines() == [
        f"parameters: published shapes, {tmp_path / 'no_base'} is not here",
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
        "  sum without recomputation         6.73     13.48",
        "  sum, full recomputation                    20.02",
        "  per reference 7.70 TFLOP; the run 0.01 EFLOP",
        "memory of one GPU, GB",
        "  weights                            1.2",
        "  optimizer                          2.5",
        "  sum                                3.8 of 40",
        "time at 25% of 100 TFLOP/s: 0.1 GPU-hours, 0.0 h on 4 GPU(s), 0.0 captions/s a GPU",
    ]


def test_time_and_speed_are_for_all_epochs_and_gpus(plan, capsys, tmp_path):
    made = replace(plan(), run_flops=6 * 3600e12)
    print_plan(train_section(tmp_path, epochs=7200), compute_section(), made, peak_tflops=2, mfu=0.5)
    line = capsys.readouterr().out.splitlines()[-1]
    assert line == "time at 50% of 2 TFLOP/s: 6.0 GPU-hours, 1.5 h on 4 GPU(s), 2.3 captions/s a GPU"


def test_a_number_of_captions_to_a_sequence_is_printed_as_it_is(plan, capsys, tmp_path):
    print_plan(train_section(tmp_path, max_captions_per_sequence=2), compute_section(), plan(), 1, 1)
    assert "  max_captions_per_sequence 2: 7 sequences" in capsys.readouterr().out
