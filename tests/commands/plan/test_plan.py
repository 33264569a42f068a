"""The planner's arithmetic on a model counted by hand, what it prints, and what it refuses or warns of."""

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from m3diff.commands.plan.plan import (
    RESERVE,
    DoesNotFit,
    Run,
    check_fits,
    check_memory,
    found_memory_gb,
    make_plan,
    plan_alignment,
)
from m3diff.commands.plan.words import Words, alignment_lines, count_words, print_plan, short_run
from m3diff.models.settings import Align, Lora
from m3diff.settings.gpus import GPUS, Gpu
from tests.commands.plan.conftest import (
    ToySettings,
    compute_section,
    convert_section,
    entries,
    train_section,
    write_mixture,
)
from tests.tiny import BASE
from tests.toy import REPOSITORY

GB = 1e9
TRAINED, FROZEN = 20 + 28, 8 + 32 + 448
"""Vision encoder and adapters (2 x (8 + 6)); the norm never run, the frozen projector, the LLM below its adapters."""
GPU = Gpu("A-40GB", 40, 2, "nobody")


@pytest.fixture
def run(toy_family, tmp_path):
    """Runs of the toy family on the mixture of seven references: (compute, settings and train fields) -> Run."""
    mixture = write_mixture(tmp_path / "mixture")

    def make(compute: dict | None = None, settings: Any = None, mixture: Path = mixture, **train: Any) -> Run:
        cfg = train_section(**{"base": tmp_path / "no_base"} | train)
        sections = cfg, settings or ToySettings(), compute_section(**compute or {})
        return Run(*sections, entries("a=pairs", "b=pairs"), convert_section(), mixture)

    return make


@pytest.fixture
def plan(run):
    return lambda *given, **named: make_plan(run(*given, **named))


def test_parameters_are_those_that_train_and_those_that_are_frozen_by_part(plan):
    frozen = {"vision (frozen)": 8, "projector (frozen)": 32, "llm (frozen)": 48 + 400}
    assert plan().parameters == {"vision": 20, "llm": 28} | frozen
    whole = ToySettings(lora=Lora(0, 1), rates={"vision": None, "projector": 1e-3, "llm": 1e-3})
    assert plan(settings=whole).parameters == {"vision (frozen)": 28, "projector": 32, "llm": 48, "llm (frozen)": 400}


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
    for epochs, way, again in ((1, "none", 0), (3, "none", 0), (1, "selective", 0), (1, "full", 5400 + 20)):
        made = plan({"activation_checkpointing": way}, epochs=epochs)
        assert made.run_flops == epochs * 7 * (sequence + again)
        assert made.model_flops == epochs * 7 * sequence
    assert replace(made, model_flops=2e12, run_flops=3e12).mfu(0.45) == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("stage", "workers", "precision", "weights", "gradients", "optimizer"),
    [
        (0, 4, "bf16", 2, 4, 12),
        (1, 4, "bf16", 2, 4, 3),
        (2, 4, "bf16", 2, 1, 3),
        (3, 4, "bf16", 0.5, 1, 3),
        (3, 0, "bf16", 2, 4, 12),
        (0, 4, "fp32", 4, 4, 12),
    ],
)
def test_bytes_of_a_parameter_on_one_gpu(plan, stage, workers, precision, weights, gradients, optimizer):
    made = plan({"zero_stage": stage, "workers": workers}, precision=precision)
    assert made.gpus == max(1, workers)
    assert made.memory_gb["weights"] * GB == pytest.approx(weights * (TRAINED + FROZEN))
    assert made.memory_gb["gradients"] * GB == pytest.approx(gradients * TRAINED)
    assert made.memory_gb["optimizer"] * GB == pytest.approx(optimizer * TRAINED)


def test_activations_are_those_of_the_longest_sequence_for_each_of_a_micro_batch(plan, run, tmp_path):
    made = plan({"micro_batch": 5}, max_captions_per_sequence=None, precision="fp32")
    assert made.longest == 3
    supervised = 3 * 15
    places = 10 * 4 * 4  # of the images, under the sigmoid
    chosen = supervised * (8 * 4 + 8)  # what the head reads, and its index
    wanted = {"between parts": places + chosen, "llm": supervised * 2 * 4, "logits": 3 * supervised * 6 * 4 + 8}
    assert {name: size * GB / 5 for name, size in made.activations_gb.items()} == pytest.approx(wanted)
    assert made.memory_gb["activations"] == pytest.approx(sum(made.activations_gb.values()))
    assert plan({"micro_batch": 1}, max_captions_per_sequence=2).longest == 2
    published = run({"micro_batch": 1}, mixture=tmp_path, max_captions_per_sequence=None)
    made = make_plan(published._replace(entries=entries("birds_to_words")))
    assert made.longest is None, "of published counts the memory is for the mean sequence"
    assert made.activations_gb["llm"] * GB == pytest.approx(math.ceil(15 * 12_867 / 2_685) * 2 * 2)


BATCH, ZERO, GPUS_WAY = "lower compute.micro_batch (now 3)", "raise compute.zero_stage (now 0)", "take larger GPUs"
WAY = "set compute.activation_checkpointing to"


@pytest.mark.parametrize(
    ("compute", "changes", "remedies"),
    [
        ({}, {}, [BATCH, ZERO, f"{WAY} selective or full (now none)", GPUS_WAY]),
        ({"micro_batch": 1, "zero_stage": 3, "activation_checkpointing": "full"}, {}, [GPUS_WAY]),
        ({"activation_checkpointing": "full"}, {"gpus": 1}, [BATCH, GPUS_WAY]),
        (
            {"micro_batch": 1, "activation_checkpointing": "selective"},
            {"branches": 2.5},
            [ZERO, f"{WAY} full (now selective)", "lower train.max_captions_per_sequence", GPUS_WAY],
        ),
    ],
    ids=["all", "none", "one gpu", "captions"],
)
def test_what_does_not_fit_is_refused_with_what_to_lower_and_nothing_that_has_no_effect(
    plan, compute, changes, remedies
):
    made = replace(plan(), memory_gb={"weights": 60.0, "activations": 14.0}, **changes)
    check_fits(compute_section(), made, 74 / (1 - RESERVE) + 0.01)
    with pytest.raises(DoesNotFit) as refused:
        check_fits(compute_section(**compute), made, 80)
    needs = "compute: needs 74.0 GB a GPU (weights 60.0, activations 14.0) but 80 GB hold 73.6"
    assert str(refused.value) == f"{needs}; {' or '.join(remedies)}"


@pytest.mark.parametrize(
    ("found", "compute", "told"),
    [
        (2e-6, {}, "but 2e-06 GB hold"),
        (80.0, {"gpu_kind": "A10-24GB"}, None),
        (None, {}, None),
        (None, {"gpu_kind": "A10-24GB", "micro_batch": 10**8}, "but 24 GB hold 22.1; lower compute.micro_batch"),
        (1e-6, {"gpu": False}, None),
        (None, {"gpu_kind": None, "micro_batch": 10**8}, None),
    ],
)
def test_a_run_is_checked_against_the_memory_that_is_found_else_of_the_kind(run, monkeypatch, found, compute, told):
    monkeypatch.setattr("m3diff.commands.plan.plan.found_memory_gb", lambda: found)
    if told is None:
        check_memory(run(compute))
        return
    with pytest.raises(DoesNotFit, match=told):
        check_memory(run(compute))


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
    train = train_section(max_captions_per_sequence=None, epochs=2)
    compute = compute_section(activation_checkpointing="full")
    print_plan(train, compute, replace(made, terms=terms), Gpu("A-40GB", 40, 100, "nobody"), hfu=0.25)
    assert capsys.readouterr().out.splitlines() == [
        f"parameters: published shapes of the toy, {tmp_path / 'no_base'} is not here",
        *(f"  {name:<28} {0:>12.2f} M" for name in made.parameters),
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


@pytest.mark.parametrize(
    ("train", "hours", "gpu", "line"),
    [
        ({"epochs": 7200}, 6, GPU, "  6.0 GPU-hours, 1.5 h on 4 GPU(s), 2.3 captions/s a GPU"),
        ({}, 0.06, GPU, "  3.60 GPU-minutes, 0.90 min on 4 GPU(s), "),
        ({}, 1, None, "time: name a kind of GPU by --gpu or compute.gpu_kind: A100-40GB, A100-80GB, H100-80GB"),
        ({"precision": "fp32"}, 1, GPUS["A10-24GB"], "time: peaks are known for bf16, and train.precision is fp32"),
        ({"max_captions_per_sequence": 2}, 1, GPU, "  max_captions_per_sequence 2: 7 sequences"),
    ],
    ids=["hours", "minutes", "no kind", "fp32", "captions"],
)
def test_time_and_speed_are_for_all_epochs_and_gpus_where_a_peak_is_known(plan, capsys, train, hours, gpu, line):
    print_plan(train_section(**train), compute_section(), replace(plan(), run_flops=hours * 3600e12), gpu, hfu=0.5)
    printed = capsys.readouterr().out
    assert f"\n{line}" in printed
    assert ("GPU-" in printed) == (gpu is GPU)


def test_a_run_of_few_steps_is_warned_of_with_the_epochs_that_would_do(plan):
    cfg = train_section(epochs=2)
    assert short_run(cfg, replace(plan(), steps=100)) is None
    said = short_run(cfg, replace(plan(), steps=6))
    assert said.startswith("the run takes 6 optimizer step(s)")
    assert said.endswith("train.epochs 100 is about 300 steps")


ALIGN = Align(("b",), epochs=3.0, global_batch=2, rates={"vision": None, "projector": 1e-3, "llm": None})
ALIGNED = ToySettings(align=ALIGN)


def test_each_phase_is_counted_on_its_own_datasets_with_its_own_rates_batches_and_epochs(run):
    (made, (before, uncounted)) = make_plan(run(settings=ALIGNED)), plan_alignment(run(settings=ALIGNED))
    assert (set(made.workload.sources), set(before.workload.sources), uncounted) == ({"a"}, {"b"}, "")
    assert before.parameters == {"vision (frozen)": 28, "projector": 32, "llm (frozen)": 448}
    assert before.sequences == before.workload.references == 3
    assert before.steps == 6  # 3 epochs of 2 steps
    assert before.run_flops == 3 * 3 * sum(term.total for term in before.terms)
    assert (made.parameters["llm"], made.steps) == (28, 1)
    assert (set(make_plan(run()).workload.sources), plan_alignment(run())[0]) == ({"a", "b"}, None)
    assert alignment_lines(train_section(), ToySettings(), None, "", None, 0.5) == []


def test_an_alignment_is_named_with_what_it_trains_and_costs_or_why_it_is_not_counted(run, tmp_path):
    took = replace(plan_alignment(run(settings=ALIGNED))[0], run_flops=3600e12)
    first, second = alignment_lines(train_section(), ALIGNED, took, "", GPU, 0.5)
    assert first == "before it an alignment: 3 epoch(s) of b, 2 sequences a step (projector 0.001)"
    assert second.startswith(
        "  2 pairs, 3 references, 6 steps; 0.00 EFLOP, 1.0 GPU-hours, 0.2 h on 4 GPU(s); memory of"
    )
    for train, gpu in ((train_section(), None), (train_section(precision="fp32"), GPU)):
        assert "GPU-hours" not in alignment_lines(train, ALIGNED, took, "", gpu, 0.5)[1], "no peak is known"
    other = write_mixture(tmp_path / "other", [("a/1", "a", "what", "one")], shards=1)
    assert make_plan(run(settings=ALIGNED, mixture=other)).workload.references == 1
    before, uncounted = plan_alignment(run(settings=ALIGNED, mixture=other))
    assert before is None
    assert uncounted == f"{other}/train has no samples but of a; run `dvc repro convert` again"
    assert alignment_lines(train_section(), ALIGNED, None, uncounted, None, 0.5)[1] == f"  not counted: {uncounted}"


def test_an_alignment_that_does_not_fit_is_refused_before_anything_is_loaded(run, monkeypatch):
    def sizes(given: Run) -> list[float]:
        return [made.memory_total_gb for made in (plan_alignment(given)[0], make_plan(given))]

    rates = {"vision": 1e-3, "projector": 1e-3, "llm": 1e-3}  # more trains than in the fine-tuning
    wide = run(settings=ToySettings(align=replace(ALIGN, rates=rates)))
    (narrow, made), (before, same) = sizes(run(settings=ALIGNED)), sizes(wide)
    assert narrow < made == same < before
    monkeypatch.setattr("m3diff.commands.plan.plan.found_memory_gb", lambda: (before + made) / 2 / (1 - RESERVE))
    with pytest.raises(DoesNotFit):
        check_memory(wide)


KNOWN = ["the red ball moved", "a big star moved"]


def of_words(folder: Path, references: list[str], split: str = "train") -> Path:
    (folder / split).mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"reference": references}), folder / split / "00000.parquet")
    return folder


def test_words_that_the_base_does_not_know_are_counted_as_often_as_they_occur_and_the_commonest_named(tmp_path):
    words = count_words(BASE, of_words(tmp_path, [*KNOWN, ""]))
    assert (words.words, words.spelled, words.warning()) == (8, 0, None)
    words = count_words(BASE, of_words(tmp_path, [*KNOWN, "the villa", "the villa and the crosswalk", "villa 1234"]))
    assert (words.words, words.spelled, words.examples, words.share) == (16, 4, ("villa", "crosswalk"), 0.25)
    warning = words.warning()
    assert "does not know 25% of the words of the references (villa, crosswalk)" in warning
    assert f"vocabulary of {words.vocabulary:,} tokens" in warning
    assert "train.base" in warning
    few = [Words(1000, 100, 15, ("villa",)), Words(1000, 0, 0, ())]
    assert [words.warning() for words in few] == [None, None]
    assert Words(1000, 100, 16, ("villa",)).warning() is not None


def test_only_what_trains_is_read_and_a_base_without_a_tokenizer_is_not_judged(tmp_path):
    assert count_words(BASE, of_words(tmp_path / "a", ["villa"], "test")) is None
    assert count_words(tmp_path, of_words(tmp_path / "b", KNOWN)) is None


REAL = REPOSITORY.parent / "shared" / "real" / "spot_the_diff" / "val.json"


@pytest.mark.skipif(not REAL.is_file(), reason="the real annotations are not in the repository")
def test_the_embedded_base_does_not_know_a_third_of_a_real_dataset_s_words(tmp_path):
    references = [text for pair in json.loads(REAL.read_text()) for text in pair["sentences"]]
    assert 0.25 < count_words(BASE, of_words(tmp_path, references)).share < 0.4
