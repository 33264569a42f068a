"""The plans of the paper's run and of one GPU against figures counted by hand (docs of the model: 7B shapes)."""

from pathlib import Path

import pytest

from m3diff.commands.plan.plan import Plan, check_fits, make_plan
from m3diff.settings.gpus import GPUS
from m3diff.settings.load import load_params
from tests.toy import REPOSITORY

TERA = 1e12
TOTALS = {  # TFLOP of one sequence of 1,504 tokens, forward and backward
    "LLM linears": 39.15,
    "LLM attention": 1.36,
    "LoRA": 2.91,
    "vision encoder": 3.85,
    "projector": 0.15,
    "MDP": 2.12,
}


def plan_of(name: str, tmp: Path, **changes: object) -> Plan:
    """The plan of a profile, `changes` of its section compute made; it fits."""
    params = load_params(REPOSITORY / "profiles" / f"{name}.yaml")
    settings, compute = params.models[params.train.model], params.compute.model_copy(update=changes)
    made = make_plan(params.train, settings, compute, params.ingest.datasets, params.convert, tmp)
    check_fits(compute, made, GPUS[compute.gpu_kind].memory_gb)
    return made


@pytest.fixture(scope="module")
def paper(tmp_path_factory) -> Plan:
    return plan_of("paper", tmp_path_factory.mktemp("none"))


@pytest.fixture(scope="module")
def one_gpu(tmp_path_factory) -> Plan:
    return plan_of("one-gpu", tmp_path_factory.mktemp("none"))


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Plan:
    return plan_of("small", tmp_path_factory.mktemp("none"))


def total(plan: Plan) -> float:
    return sum(term.total for term in plan.terms) / TERA


def test_the_papers_sequence_takes_the_flops_counted_by_hand(paper, tmp_path):
    found = {term.name: term.total / TERA for term in paper.terms}
    assert {name: found[name] for name in TOTALS} == pytest.approx(TOTALS, rel=0.02)
    assert total(paper) == pytest.approx(49.6, rel=0.01)
    assert paper.tokens == 1_504
    assert paper.run_flops == paper.model_flops, "norms and products that are computed again count as none"
    full = plan_of("paper", tmp_path, activation_checkpointing="full")
    again = full.run_flops / full.sequences / TERA - total(full)
    assert again == pytest.approx((39.15 / 2) + (1.36 + 2.91 + 3.85) / 3, rel=0.01)  # module, projector, head: once


def test_the_test_pairs_are_read_in_13_minutes_of_an_h100(one_gpu):
    # 7,970 of CLEVR-Change, 4,800 of CLEVR-DC, 1,270 of Spot-the-Diff, 495 of IEdit, and the others' published counts
    assert one_gpu.test_pairs == 16_442
    assert one_gpu.caption_flops / TERA == pytest.approx(21.9, rel=0.01)
    minutes = one_gpu.caption_minutes(GPUS["H100-80GB"].bf16_tflops, 0.45, one_gpu.test_pairs)
    assert minutes == pytest.approx(13.5, abs=0.2)


def test_the_papers_epoch_takes_88_hours_of_an_a100_at_45_percent_and_128_where_every_layer_is_recomputed(
    paper, tmp_path
):
    hours = paper.gpu_hours(GPUS["A100-40GB"].bf16_tflops, 0.45)
    assert hours == pytest.approx(88.1, rel=0.01)
    assert paper.mfu(0.45) == pytest.approx(0.45)
    full = plan_of("paper", tmp_path, activation_checkpointing="full", micro_batch=4)
    assert full.gpu_hours(GPUS["A100-40GB"].bf16_tflops, 0.45) == pytest.approx(128.5, rel=0.015)
    assert full.mfu(0.45) == pytest.approx(0.31, abs=0.005)
    the_papers = 208  # 26 h on 8 GPUs
    assert 0.19 < paper.mfu(0.45) * hours / the_papers < 0.20


def test_the_papers_parameters_are_those_of_7b(paper):
    millions = {name: count / 1e6 for name, count in paper.parameters.items()}
    assert millions["llm"] == pytest.approx(323, rel=0.01)
    assert millions["llm (frozen)"] == pytest.approx(6_525 + 1_090, rel=0.01)
    assert millions["vision"] == pytest.approx(398, rel=0.01)
    assert millions["module"] == pytest.approx(60, rel=0.05)


def test_the_papers_epoch_is_its_3500_steps(paper):
    assert paper.workload.pairs == 145_336
    assert paper.steps == pytest.approx(3_500, abs=2)
    assert paper.gpus == 8


def test_packing_takes_the_epoch_of_one_gpu_from_44_to_7_6_exaflop(paper, one_gpu):
    assert paper.sequences * total(paper) / 1e6 == pytest.approx(44.5, rel=0.05)
    assert one_gpu.run_flops / 1e18 == pytest.approx(7.6, rel=0.05)
    assert total(one_gpu) == pytest.approx(52.2, rel=0.01)
    assert one_gpu.tokens == pytest.approx(1_582, rel=0.01)
    assert one_gpu.gpu_hours(989, 0.45) == pytest.approx(4.7, rel=0.05)


def test_the_memory_of_the_plans_is_what_their_gpus_hold(paper, one_gpu, small):
    assert paper.memory_total_gb == pytest.approx(31.9, rel=0.02)
    assert one_gpu.memory_total_gb == pytest.approx(58.2, rel=0.04)
    assert 0.6 < small.memory_total_gb / 24 < 0.8  # with a margin


def test_small_is_planned_with_the_shapes_of_the_small_base(small):
    millions = {name: count / 1e6 for name, count in small.parameters.items()}
    linears = 2 * 896**2 + 2 * 896 * 128 + 3 * 896 * 4864
    vectors = 896 + 2 * 128 + 2 * 896  # biases of queries, keys and values; two norms
    llm = (24 * (linears + vectors) + 896 + 152_000 * 896) / 1e6  # the head's weights are the embeddings
    assert millions["llm (frozen)"] == pytest.approx(llm, rel=1e-6)
    assert millions["llm"] == pytest.approx(24 * 64 * (2 * 1792 + 2 * 1024 + 3 * 5760) / 1e6)
    assert millions["vision"] == pytest.approx(398, rel=0.01)
    assert small.base.startswith("published shapes of llava-hf/llava-onevision-qwen2-0.5b-ov-hf, models/llava")
    assert small.gpus == 1
