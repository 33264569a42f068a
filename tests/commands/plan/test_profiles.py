"""The plans of the profiles against figures counted by hand (docs of the models: 7B shapes, BLIP-2's)."""

from pathlib import Path

import pytest

from m3diff.commands.plan.plan import Plan, Run, check_fits, make_plan
from m3diff.commands.plan.words import print_plan
from m3diff.models import FAMILIES
from m3diff.settings.gpus import GPUS
from m3diff.settings.load import load_params
from tests.tiny_blip2 import blip2_settings, tiny_blip2
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


def plan_of(name: str, **changes: object) -> Plan:
    """The plan of a profile, `changes` of its section compute made; it fits."""
    params = load_params(REPOSITORY / "profiles" / f"{name}.yaml")
    settings, compute = params.models[params.train.model], params.compute.model_copy(update=changes)
    made = make_plan(Run(params.train, settings, compute, params.ingest.datasets, params.convert, Path("none")))
    check_fits(compute, made, GPUS[compute.gpu_kind].memory_gb)
    return made


@pytest.fixture(scope="module")
def plans() -> dict[str, Plan]:
    return {name: plan_of(name) for name in ("paper", "one-gpu", "small", "blip2idc")}


def total(plan: Plan) -> float:
    return sum(term.total for term in plan.terms) / TERA


def millions(plan: Plan) -> dict[str, float]:
    return {name: count / 1e6 for name, count in plan.parameters.items()}


def test_the_papers_sequence_takes_the_flops_counted_by_hand_and_its_epoch_88_or_128_hours_of_an_a100(plans):
    paper, peak = plans["paper"], GPUS["A100-40GB"].bf16_tflops
    found = {term.name: term.total / TERA for term in paper.terms}
    assert {name: found[name] for name in TOTALS} == pytest.approx(TOTALS, rel=0.02)
    assert total(paper) == pytest.approx(49.6, rel=0.01)
    assert paper.tokens == 1_504
    assert paper.run_flops == paper.model_flops, "norms and products that are computed again count as none"
    hours = paper.gpu_hours(peak, 0.45)
    assert hours == pytest.approx(88.1, rel=0.01)
    assert paper.mfu(0.45) == pytest.approx(0.45)
    assert 0.19 < paper.mfu(0.45) * hours / 208 < 0.20  # the paper's 26 h on 8 GPUs
    full = plan_of("paper", activation_checkpointing="full", micro_batch=4)
    again = full.run_flops / full.sequences / TERA - total(full)
    assert again == pytest.approx((39.15 / 2) + (1.36 + 2.91 + 3.85) / 3, rel=0.01)  # module, projector, head: once
    assert full.gpu_hours(peak, 0.45) == pytest.approx(128.5, rel=0.015)
    assert full.mfu(0.45) == pytest.approx(0.31, abs=0.005)


def test_the_papers_parameters_are_those_of_7b_and_its_epoch_its_3500_steps(plans):
    paper = plans["paper"]
    wanted = {"llm": 323, "llm (frozen)": 6_525 + 1_090, "vision": 398}
    assert {name: millions(paper)[name] for name in wanted} == pytest.approx(wanted, rel=0.01)
    assert millions(paper)["module"] == pytest.approx(60, rel=0.05)
    assert (paper.workload.pairs, paper.gpus) == (145_336, 8)
    assert paper.steps == pytest.approx(3_500, abs=2)


def test_packing_takes_the_epoch_of_one_gpu_from_44_to_7_6_exaflop(plans):
    paper, one_gpu = plans["paper"], plans["one-gpu"]
    assert paper.sequences * total(paper) / 1e6 == pytest.approx(44.5, rel=0.05)
    assert one_gpu.run_flops / 1e18 == pytest.approx(7.6, rel=0.05)
    assert total(one_gpu) == pytest.approx(52.2, rel=0.01)
    assert one_gpu.tokens == pytest.approx(1_582, rel=0.01)
    assert one_gpu.gpu_hours(989, 0.45) == pytest.approx(4.7, rel=0.05)
    # 7,970 of CLEVR-Change, 4,800 of CLEVR-DC, 1,270 of Spot-the-Diff, 495 of IEdit, and the others' published counts
    assert one_gpu.test_pairs == 16_442
    assert one_gpu.caption_flops / TERA == pytest.approx(21.9, rel=0.01)
    minutes = one_gpu.caption_minutes(GPUS["H100-80GB"].bf16_tflops, 0.45, one_gpu.test_pairs)
    assert minutes == pytest.approx(13.5, abs=0.2)


@pytest.mark.parametrize(
    ("name", "gb", "abs_gb"),
    [("paper", 31.9, 0.6), ("one-gpu", 58.2, 2.3), ("small", 16.8, 2.4), ("blip2idc", 14.5, 0.05)],
)
def test_the_memory_of_the_plans_is_what_their_gpus_hold(plans, name, gb, abs_gb):
    assert plans[name].memory_total_gb == pytest.approx(gb, abs=abs_gb)


def test_small_is_planned_with_the_shapes_of_the_small_base(plans):
    small = plans["small"]
    linears = 2 * 896**2 + 2 * 896 * 128 + 3 * 896 * 4864
    vectors = 896 + 2 * 128 + 2 * 896  # biases of queries, keys and values; two norms
    llm = (24 * (linears + vectors) + 896 + 152_000 * 896) / 1e6  # the head's weights are the embeddings
    assert millions(small)["llm (frozen)"] == pytest.approx(llm, rel=1e-6)
    assert millions(small)["llm"] == pytest.approx(24 * 64 * (2 * 1792 + 2 * 1024 + 3 * 5760) / 1e6)
    assert millions(small)["vision"] == pytest.approx(398, rel=0.01)
    assert small.base.startswith("published shapes of llava-hf/llava-onevision-qwen2-0.5b-ov-hf, models/llava")
    assert small.gpus == 1


def test_blip2idc_is_planned_with_the_published_shapes_as_one_gpu_s_run_and_is_printed(plans, tmp_path, capsys):
    plan = plans["blip2idc"]
    assert plan.base.startswith("published shapes of Salesforce/blip2-opt-2.7b, models/blip2-opt-2.7b is not here")
    frozen = sum(count for name, count in plan.parameters.items() if name.endswith("(frozen)"))
    assert frozen == 3_744_761_856
    assert "projector" not in plan.parameters
    assert (plan.workload.prompt_tokens, plan.tokens) == (1, 32 + 1 + 15)  # queries, a start token, a reference
    family, base = FAMILIES["blip2idc"], tiny_blip2(tmp_path / "base", "opt")
    prompt = family.load_processor(base).encode_prompt("What has changed from the first image to the second?")
    assert family.prompt_tokens == len(prompt) - family.planned_config(base, blip2_settings()).image_tokens
    params = load_params(REPOSITORY / "profiles" / "blip2idc.yaml")
    assert plan.gpus == 1
    assert plan.steps == 20 * 368 == 20 * params.compute.checkpoint_every_steps
    print_plan(params.train, params.compute, plan, GPUS[params.compute.gpu_kind], 0.45)
    said = capsys.readouterr().out
    for part in ("vision (frozen)", "module", "Q-Former attention", "Salesforce/blip2-opt-2.7b", "RTX-4090-24GB"):
        assert part in said
