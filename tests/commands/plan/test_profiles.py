"""The plans of the shipped profiles agree with figures that were counted by hand."""

import pickle
from dataclasses import replace
from pathlib import Path

import pytest

from m3diff.commands.plan import Plan, Run, check_fits, make_plan, plan_alignment
from m3diff.settings.compute import GPUS
from m3diff.settings.load import load_params
from tests.commands.plan.conftest import TERA
from tests.conftest import MadeOnce
from tests.toy import REPOSITORY

PAPER_TFLOPS = {  # of one sequence of 1,504 tokens, forward and backward
    "llm": 39.15,
    "llm attention": 1.36,
    "LoRA": 2.91,
    "vision": 3.47,
    "vision attention": 0.38,
    "projector": 0.15,
    "module": 1.65,
    "module attention": 0.47,
}


def plan_of_profile(name: str) -> Plan:
    params = load_params(REPOSITORY / "profiles" / f"{name}.yaml")
    plan = make_plan(replace(Run.from_params(params), mixture=Path("none")))
    check_fits(params.compute, plan, GPUS[params.compute.gpu_kind].memory_gb)
    return plan


def plan_once(name: str, made_once: MadeOnce) -> Plan:
    """Return the plan of a profile, which takes ten seconds and is made by one of pytest's workers."""
    file = made_once(f"plan-{name}", lambda file: file.write_bytes(pickle.dumps(plan_of_profile(name))))
    return pickle.loads(file.read_bytes())


@pytest.fixture(scope="module")
def paper(made_once: MadeOnce) -> Plan:
    return plan_once("paper", made_once)


@pytest.fixture(scope="module")
def one_gpu(made_once: MadeOnce) -> Plan:
    return plan_once("one-gpu", made_once)


def tflops_per_sequence(plan: Plan) -> float:
    return sum(term.total for term in plan.terms) / TERA


def test_a_sequence_of_the_paper_takes_the_flops_counted_by_hand(paper):
    tflops = {term.name: term.total / TERA for term in paper.terms}
    assert {name: tflops[name] for name in PAPER_TFLOPS} == pytest.approx(PAPER_TFLOPS, rel=0.02)
    assert tflops_per_sequence(paper) == pytest.approx(49.6, rel=0.01)
    assert paper.tokens_per_sequence == 1_504


def test_the_paper_trains_the_parameters_counted_by_hand(paper):
    expected = {"llm": 323, "llm (frozen)": 6_525 + 1_090, "vision": 398, "module": 60}
    millions = {name: paper.parameters[name] / 1e6 for name in expected}
    assert millions == pytest.approx(expected, rel=0.02)


def test_the_paper_takes_3500_steps_and_88_hours_of_a_gpu(paper):
    assert paper.gpu_hours(GPUS["A100-40GB"].bf16_tflops, 0.45) == pytest.approx(88.1, rel=0.01)  # 26 h on 8 GPUs
    assert paper.devices == 8
    assert paper.workload.pairs == 145_336
    assert paper.steps == pytest.approx(3_500, abs=2)


def test_packing_takes_an_epoch_from_44_to_7_6_exaflop(paper, one_gpu):
    assert paper.sequences * tflops_per_sequence(paper) / 1e6 == pytest.approx(44.5, rel=0.05)
    assert one_gpu.run_flops / 1e18 == pytest.approx(7.6, rel=0.05)
    assert tflops_per_sequence(one_gpu) == pytest.approx(52.2, rel=0.01)
    assert one_gpu.tokens_per_sequence == pytest.approx(1_582, rel=0.01)
    assert one_gpu.gpu_hours(989, 0.45) == pytest.approx(4.7, rel=0.05)


@pytest.mark.slow
def test_onediff_s_stages_take_the_hours_that_the_page_prints():
    params = load_params(REPOSITORY / "profiles" / "onediff.yaml")
    run = replace(Run.from_params(params), mixture=Path("none"))
    stage_one = plan_alignment(run)
    assert stage_one is not None
    assert stage_one.workload.references == 837_192
    assert stage_one.steps == 3_271  # 3,270 of 256 and one of 72
    page = (REPOSITORY / "docs" / "deviations.md").read_text(encoding="utf-8")
    hours = [plan.gpu_hours(GPUS["A100-80GB"].bf16_tflops, 0.45) / plan.devices for plan in (stage_one, make_plan(run))]
    assert f"{hours[0]:.1f} hours for stage I and {hours[1]:.1f} for" in " ".join(page.split())


def test_a_pair_to_caption_takes_21_9_tflop(one_gpu):
    assert one_gpu.caption_flops / TERA == pytest.approx(21.9, rel=0.01)


def test_both_profiles_fit_into_their_gpus(paper, one_gpu):
    assert paper.memory_total_gb == pytest.approx(31.9, abs=0.6)
    assert one_gpu.memory_total_gb == pytest.approx(58.2, abs=2.3)
