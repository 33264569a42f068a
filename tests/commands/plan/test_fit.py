"""A run that does not fit into its GPUs is refused, with what to lower."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from m3diff.commands.plan import check_fits, check_memory, make_plan, plan_alignment
from m3diff.commands.plan.fit import RESERVE, smallest_gpu_gb
from m3diff.records.errors import Fault
from m3diff.settings.section import ParamsError
from tests.commands.plan.conftest import ALIGN, ToySettings, compute_section
from tests.errors import raises

DOES_NOT_FIT = "plan.does_not_fit_into_memory"


@pytest.fixture
def machine_gpu_gb(monkeypatch):
    """Gives this machine a GPU of so many GB, or none."""

    def set_memory(memory_gb):
        monkeypatch.setattr("m3diff.commands.plan.fit.smallest_gpu_gb", lambda: memory_gb)

    return set_memory


def test_what_fits_below_the_reserve_is_not_refused(plan):
    counted = replace(plan(), memory_gb={"weights": 60.0, "activations": 14.0})
    check_fits(compute_section(), counted, 74 / (1 - RESERVE) + 0.01)


def test_a_refusal_names_the_memory_and_what_to_lower(plan):
    counted = replace(plan(), memory_gb={"weights": 60.0, "activations": 14.0})
    with raises(ParamsError, DOES_NOT_FIT, needed_gb=74.0, parts=["weights 60.0", "activations 14.0"]) as refusal:
        check_fits(compute_section(), counted, 80)
    assert refusal.value.fields["memory_gb"] == 80
    assert refusal.value.fields["usable_gb"] == pytest.approx(73.6)
    remedies = refusal.value.fields["remedies"]
    assert Fault("plan.lower_micro_batch", value=3) in remedies
    assert Fault("plan.raise_zero_stage", value=0) in remedies
    assert Fault("plan.checkpoint_activations", value="none", expected="selective or full") in remedies
    assert Fault("plan.take_larger_gpus") in remedies


def test_a_refusal_names_several_captions_per_sequence_but_no_sharding_on_one_gpu(plan):
    counted = replace(plan({"workers": 1}, max_captions_per_sequence=None), memory_gb={"weights": 60.0})
    with raises(ParamsError, DOES_NOT_FIT) as refusal:
        check_fits(compute_section(workers=1), counted, 24)
    codes = [remedy.code for remedy in refusal.value.fields["remedies"]]
    assert "plan.lower_captions_per_sequence" in codes
    assert "plan.raise_zero_stage" not in codes


def test_a_refusal_names_no_remedy_that_has_no_effect_on_the_run(plan):
    smallest = {"micro_batch": 1, "zero_stage": 3, "activation_checkpointing": "full"}
    counted = replace(plan(smallest), memory_gb={"weights": 60.0})
    with raises(ParamsError, DOES_NOT_FIT, remedies=[Fault("plan.take_larger_gpus")]):
        check_fits(compute_section(**smallest), counted, 24)


@pytest.mark.parametrize(
    ("memory_gb", "compute", "expected_gb"),
    [
        pytest.param(2e-6, {}, 2e-6, id="the machine's GPU is too small"),
        pytest.param(
            80.0,
            {"gpu_kind": "A10-24GB", "micro_batch": 10**8},
            80.0,
            id="the machine's GPU comes before the kind",
        ),
        pytest.param(None, {"gpu_kind": "A10-24GB", "micro_batch": 10**8}, 24, id="the kind is too small"),
    ],
)
def test_a_run_is_refused_if_its_gpu_is_too_small(run, machine_gpu_gb, memory_gb, compute, expected_gb):
    machine_gpu_gb(memory_gb)
    with raises(ParamsError, DOES_NOT_FIT, key="compute", memory_gb=expected_gb):
        check_memory(run(compute))


@pytest.mark.parametrize(
    ("memory_gb", "compute"),
    [
        pytest.param(1e-6, {"gpu": False}, id="it trains on no GPU"),
        pytest.param(None, {"gpu_kind": None, "micro_batch": 10**8}, id="the memory is unknown"),
    ],
)
def test_a_run_is_not_refused_if_no_memory_limits_it(run, machine_gpu_gb, memory_gb, compute):
    machine_gpu_gb(memory_gb)
    check_memory(run(compute))


def test_an_alignment_that_does_not_fit_is_refused_as_well(run, machine_gpu_gb):
    rates = {"vision": 1e-3, "projector": 1e-3, "llm": 1e-3}  # more trains than in the fine-tuning
    planned_run = run(settings=ToySettings(align=replace(ALIGN, rates=rates)))
    alignment_gb = plan_alignment(planned_run).memory_total_gb
    training_gb = make_plan(planned_run).memory_total_gb
    assert training_gb < alignment_gb
    machine_gpu_gb((alignment_gb + training_gb) / 2 / (1 - RESERVE))
    with raises(ParamsError, DOES_NOT_FIT):
        check_memory(planned_run)


def test_the_memory_of_the_machine_is_that_of_its_smallest_gpu(monkeypatch):
    sizes = [80_000_000_000, 24_000_000_000]
    monkeypatch.setattr("torch.cuda.device_count", lambda: len(sizes))
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda n: SimpleNamespace(total_memory=sizes[n]))
    assert smallest_gpu_gb() == 24


def test_a_machine_without_a_gpu_has_no_memory(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert smallest_gpu_gb() is None
