"""The planner's arithmetic on a model counted by hand, what it prints, refuses or warns of; the plans of the profiles
against figures counted by hand (docs of the models: 7B shapes, BLIP-2's)."""

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
    Plan,
    Run,
    check_fits,
    check_memory,
    found_memory_gb,
    make_plan,
    plan_alignment,
    print_plan,
    short_run,
    unknown_words,
)
from m3diff.models.flops import Term
from m3diff.models.settings import Align, Lora
from m3diff.settings.gpus import GPUS, Gpu
from m3diff.settings.load import load_params
from m3diff.settings.section import ParamsError
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

GB, TERA = 1e9, 1e12
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


@pytest.mark.parametrize(
    ("epochs", "global_batch", "steps"), [(1, 7, 1), (1, 6, 2), (2.5, 4, 5), (0.5, 4, 1), (0.6, 4, 2)]
)
def test_steps_are_those_of_the_loop_whose_last_batch_of_an_epoch_is_smaller(plan, epochs, global_batch, steps):
    assert plan(epochs=epochs, global_batch=global_batch).steps == steps


def test_a_base_that_is_there_counts_by_its_tokenizer(plan, tmp_path):
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text("{}")
    made = plan(base=tmp_path / "base")
    assert made.tokens == pytest.approx(10 + 14 / 4 + 23 / 7)
    assert made.base == str(tmp_path / "base")


def test_the_run_takes_the_flops_of_its_sequences_and_full_recomputation_runs_the_marked_terms_again(plan):
    sequence = 2 * 5400 + 3 * 20 + 2 * 105
    for epochs, way, again in ((3, "none", 0), (1, "selective", 0), (1, "full", 5400 + 20)):
        made = plan({"activation_checkpointing": way}, epochs=epochs)
        assert made.run_flops == epochs * 7 * (sequence + again)


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
    wanted = {"between parts": places + chosen, "llm": supervised * 2 * 4, "logits": 3 * supervised * 6 * 4}
    assert {name: size * GB / 5 for name, size in made.activations_gb.items()} == pytest.approx(wanted)
    assert made.memory_gb["activations"] == pytest.approx(sum(made.activations_gb.values()))
    assert plan({"micro_batch": 1}, max_captions_per_sequence=2).longest == 2
    published = run({"micro_batch": 1}, mixture=tmp_path, max_captions_per_sequence=None)
    made = make_plan(published._replace(entries=entries("birds_to_words")))
    assert made.longest is None, "of published counts the memory is for the mean sequence"
    assert made.activations_gb["llm"] * GB == pytest.approx(math.ceil(15 * 12_867 / 2_685) * 2 * 2)


def test_what_does_not_fit_is_refused_with_what_there_is_and_what_to_lower(plan):
    made = replace(plan(), memory_gb={"weights": 60.0, "activations": 14.0})
    check_fits(compute_section(), made, 74 / (1 - RESERVE) + 0.01)
    with pytest.raises(ParamsError) as refused:
        check_fits(compute_section(), made, 80)
    said = str(refused.value)
    assert said.startswith("compute: needs 74.0 GB a GPU (weights 60.0, activations 14.0) but 80 GB hold 73.6; lower ")
    for remedy in ("micro_batch (now 3)", "max_captions", "zero_stage (now 0)", "full (now none)", "larger GPUs"):
        assert remedy in said


@pytest.mark.parametrize(
    ("found", "compute", "told"),
    [
        (2e-6, {}, "but 2e-06 GB hold"),
        (80.0, {"gpu_kind": "A10-24GB", "micro_batch": 10**8}, "but 80 GB hold"),
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
    with pytest.raises(ParamsError, match=told):
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
        plan(max_captions_per_sequence=None, epochs=2),
        parameters={"vision": 1_500_000},
        run_flops=3e18,
        memory_gb={"weights": 1.25, "activations": 2.5},
        activations_gb={"llm": 2.25, "logits": 0.25},
        caption_flops=21.9e12,
    )
    terms = [Term(term.name, *(1e9 * n for n in (term.forward, term.backward, term.recomputed))) for term in made.terms]
    made = replace(made, terms=terms)
    compute = compute_section(activation_checkpointing="full")
    print_plan(made, compute, Gpu("A-40GB", 40, 100, "nobody"), hfu=0.25)
    said = capsys.readouterr().out.splitlines()
    for line in (
        "  vision                               1.50 M",
        f"counted: {tmp_path / 'mixture/train'}, lengths estimated",
        "  b                                    2 pairs         3 references",
        "  sum                                  4 pairs         7 references",
        "  29.0 tokens a prompt, 15.0 a reference",
        "  max_captions_per_sequence all: 4 sequences of 65 tokens, 1.75 references each; 2 steps of 4",
        "  LoRA                             0.020     0.060",
        "  sum of the model                  6.73     13.48",
        "  recomputation, full                         6.54",
        "  the run 3.00 EFLOP; a pair to caption 21.9 TFLOP to read",
        "memory of one GPU, GB; activations counted for the longest sequence, 3 reference(s)",
        "  activations                        2.5",
        "    logits                          0.25",
        "  sum                                3.8 of 36.8, A-40GB less 8%",
        "  33.33 GPU-hours, 8.333 h on 4 GPU(s), 0.0 captions/s a GPU",
    ):
        assert line in said
    assert short_run(replace(made, steps=100)) is None
    assert short_run(replace(made, steps=6)).endswith("train.epochs 100 is about 300 steps")
    for gpu, other, line in (
        (None, made, "time: name a kind of GPU by --gpu or compute.gpu_kind: A100-40GB, A100-80GB, H100-80GB"),
        (GPU, plan(precision="fp32"), "time: peaks are known for bf16, and train.precision is fp32"),
    ):
        print_plan(other, compute, gpu, hfu=0.5)
        printed = capsys.readouterr().out
        assert f"\n{line}" in printed
        assert "GPU-hours" not in printed


ALIGN = Align(("b",), epochs=3.0, global_batch=2, rates={"vision": None, "projector": 1e-3, "llm": None})
ALIGNED = ToySettings(align=ALIGN)


def test_each_phase_is_counted_on_its_own_datasets_with_its_own_rates_batches_and_epochs(run, tmp_path, capsys):
    made, before = make_plan(run(settings=ALIGNED)), plan_alignment(run(settings=ALIGNED))
    assert (set(made.workload.sources), set(before.workload.sources)) == ({"a"}, {"b"})
    assert before.parameters == {"vision (frozen)": 28, "projector": 32, "llm (frozen)": 448}
    assert before.sequences == before.workload.references == 3
    assert (before.steps, before.train.epochs, before.train.global_batch) == (6, 3, 2)  # 3 epochs of 2 steps
    assert before.run_flops == 3 * 3 * sum(term.total for term in before.terms)
    assert (made.parameters["llm"], made.steps) == (28, 1)
    assert (set(make_plan(run()).workload.sources), plan_alignment(run())) == ({"a", "b"}, None)
    other = write_mixture(tmp_path / "other", [("a/1", "a", "what", "one")], shards=1)
    assert make_plan(run(settings=ALIGNED, mixture=other)).workload.references == 1
    assert plan_alignment(run(settings=ALIGNED, mixture=other)) is None
    assert f"not counted: plan: {other}/train has no samples but of a" in capsys.readouterr().out


def test_an_alignment_that_does_not_fit_is_refused_before_anything_is_loaded(run, monkeypatch):
    rates = {"vision": 1e-3, "projector": 1e-3, "llm": 1e-3}  # more trains than in the fine-tuning
    wide = run(settings=ToySettings(align=replace(ALIGN, rates=rates)))
    before, made = plan_alignment(wide).memory_total_gb, make_plan(wide).memory_total_gb
    assert made < before
    monkeypatch.setattr("m3diff.commands.plan.plan.found_memory_gb", lambda: (before + made) / 2 / (1 - RESERVE))
    with pytest.raises(ParamsError, match="GB hold"):
        check_memory(wide)


KNOWN = ["the red ball moved", "a big star moved"]


def of_words(folder: Path, references: list[str], split: str = "train") -> Path:
    (folder / split).mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"reference": references}), folder / split / "00000.parquet")
    return folder


def test_words_that_the_base_does_not_know_are_counted_as_often_as_they_occur_and_the_commonest_named(tmp_path):
    assert unknown_words(BASE, of_words(tmp_path, [*KNOWN, ""])) is None
    few = [*KNOWN, *KNOWN, "the villa"]
    assert unknown_words(BASE, of_words(tmp_path, few)) is None, "up to 15 % are borne"
    of_words(tmp_path, [*KNOWN, "the villa", "the villa and the crosswalk", "villa 1234"])
    said = unknown_words(BASE, tmp_path)
    assert "does not know 25% of the words of the references (villa, crosswalk): its vocabulary of " in said
    assert "train.base" in said
    assert unknown_words(BASE, of_words(tmp_path / "a", ["villa"], "test")) is None, "only what trains is read"
    assert unknown_words(tmp_path, of_words(tmp_path / "b", ["villa"])) is None, "a base without a tokenizer"


TOTALS = {  # TFLOP of one sequence of 1,504 tokens, forward and backward
    "llm": 39.15,
    "llm attention": 1.36,
    "LoRA": 2.91,
    "vision": 3.47,
    "vision attention": 0.38,
    "projector": 0.15,
    "module": 1.65,
    "module attention": 0.47,
}


def plan_of(name: str) -> Plan:
    """The plan of a profile, which fits."""
    params = load_params(REPOSITORY / "profiles" / f"{name}.yaml")
    settings, compute = params.models[params.train.model], params.compute
    made = make_plan(Run(params.train, settings, compute, params.ingest.datasets, params.convert, Path("none")))
    check_fits(compute, made, GPUS[compute.gpu_kind].memory_gb)
    return made


@pytest.fixture(scope="module")
def plans() -> dict[str, Plan]:
    return {name: plan_of(name) for name in ("paper", "one-gpu")}


def total(plan: Plan) -> float:
    return sum(term.total for term in plan.terms) / TERA


def millions(plan: Plan) -> dict[str, float]:
    return {name: count / 1e6 for name, count in plan.parameters.items()}


def test_the_papers_sequence_parameters_and_steps_are_those_counted_by_hand_and_its_epoch_88_hours(plans):
    paper, peak = plans["paper"], GPUS["A100-40GB"].bf16_tflops
    found = {term.name: term.total / TERA for term in paper.terms}
    assert {name: found[name] for name in TOTALS} == pytest.approx(TOTALS, rel=0.02)
    assert total(paper) == pytest.approx(49.6, rel=0.01)
    assert paper.tokens == 1_504
    assert paper.gpu_hours(peak, 0.45) == pytest.approx(88.1, rel=0.01)  # the paper's 26 h on 8 GPUs
    wanted = {"llm": 323, "llm (frozen)": 6_525 + 1_090, "vision": 398, "module": 60}
    assert {name: millions(paper)[name] for name in wanted} == pytest.approx(wanted, rel=0.02)
    assert (paper.workload.pairs, paper.gpus) == (145_336, 8)
    assert paper.steps == pytest.approx(3_500, abs=2)


def test_packing_takes_the_epoch_of_one_gpu_from_44_to_7_6_exaflop_and_both_fit_their_gpus(plans):
    paper, one_gpu = plans["paper"], plans["one-gpu"]
    assert paper.sequences * total(paper) / 1e6 == pytest.approx(44.5, rel=0.05)
    assert one_gpu.run_flops / 1e18 == pytest.approx(7.6, rel=0.05)
    assert total(one_gpu) == pytest.approx(52.2, rel=0.01)
    assert one_gpu.tokens == pytest.approx(1_582, rel=0.01)
    assert one_gpu.gpu_hours(989, 0.45) == pytest.approx(4.7, rel=0.05)
    assert one_gpu.caption_flops / TERA == pytest.approx(21.9, rel=0.01)
    assert paper.memory_total_gb == pytest.approx(31.9, abs=0.6)
    assert one_gpu.memory_total_gb == pytest.approx(58.2, abs=2.3)
