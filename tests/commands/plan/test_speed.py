"""The time of a run: by a kind of GPU, by the last training here, by a sequence that is timed."""

import json
from dataclasses import replace

import pytest
import torch

from m3diff.commands.plan import speed
from m3diff.commands.plan.speed import Duration, UnknownDuration, estimate_duration, threads_of_worker
from m3diff.settings.compute import GPUS
from tests.commands.plan.conftest import FROZEN, GPU, TRAINED, compute_section

A100 = GPUS["A100-40GB"]
CPU = {"gpu": False, "gpu_kind": None}


def record(folder, **changes):
    """What a training of the toy's size recorded: 8e6 FLOPs in 2 s on two processes, so 2e6 FLOP/s each."""
    recorded = {"flops": 8e6, "seconds": 2.0, "devices": 2, "device": "cpu", "model_parameters": TRAINED + FROZEN}
    (folder / "train_speed.json").write_text(json.dumps(recorded | changes))


@pytest.fixture
def timed(monkeypatch):
    """The kinds of timing that were taken."""
    timings = []
    monkeypatch.setattr(speed, "time_sequence", lambda *arguments: timings.append("sequence") or 0.5)
    monkeypatch.setattr(speed, "time_matrix_product", lambda: timings.append("matrix product") or 0.25)
    return timings


def test_a_kind_of_gpu_computes_at_a_share_of_its_peak(plan):
    counted = replace(plan(), run_flops=3e18, model_flops=2e18)
    duration = estimate_duration(counted, replace_peak(100), 0.25)
    assert duration.device_hours == pytest.approx(3e18 / 25e12 / 3600)
    assert duration.flops_per_s == 25e12
    assert counted.mfu(0.25) == pytest.approx(0.25 * 2 / 3)


def replace_peak(tflops):
    return GPU._replace(bf16_tflops=tflops)


@pytest.mark.parametrize(
    ("run_flops", "explained"), [pytest.param(2e18, False, id="nothing"), pytest.param(3e18, True, id="a part")]
)
def test_hfu_is_explained_where_a_part_is_computed_again(plan, run_flops, explained):
    duration = estimate_duration(replace(plan(), run_flops=run_flops, model_flops=2e18), A100, 0.45)
    assert "45%" in duration.basis
    assert "312 TFLOP/s" in duration.basis
    assert ("hardware FLOPs utilisation" in duration.basis) == explained


def test_a_peak_is_known_for_bf16_alone(plan):
    duration = estimate_duration(plan(precision="fp32"), A100, 0.45)
    assert isinstance(duration, UnknownDuration)
    assert "train.precision is fp32" in duration.remedy


def test_without_a_kind_the_last_training_of_such_a_model_here_decides(plan, tmp_path, timed):
    record(tmp_path)
    counted = plan(CPU | {"scratch": tmp_path})
    duration = estimate_duration(counted, None, 0.45)
    assert duration.flops_per_s == 2e6
    assert duration.device_hours == pytest.approx(counted.model_flops / 2e6 / 3600)
    assert duration.caption_hours(counted, 10) == pytest.approx(10 * counted.caption_flops / 2e6 / 3600)
    assert str(tmp_path / "train_speed.json") in duration.basis
    assert timed == []


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"model_parameters": 7}, id="another model"),
        pytest.param({"device": "NVIDIA H100"}, id="another kind of device"),
        pytest.param({"flops": 0}, id="a run that was resumed at its end"),
        pytest.param({"flops": None}, id="a record without FLOPs"),
    ],
)
def test_a_record_of_another_training_says_nothing(plan, tmp_path, timed, changes):
    record(tmp_path, **changes)
    estimate_duration(plan(CPU | {"scratch": tmp_path}), None, 0.45)
    assert timed == ["sequence"]


@pytest.mark.parametrize("text", ["", "[1]", "{"])
def test_a_damaged_record_is_as_none(plan, tmp_path, timed, text):
    (tmp_path / "train_speed.json").write_text(text)
    assert isinstance(estimate_duration(plan(CPU | {"scratch": tmp_path}), None, 0.45), Duration)
    assert timed == ["sequence"]


def test_a_sequence_is_timed_and_of_a_large_model_a_matrix_product(plan, tmp_path, timed, monkeypatch):
    counted = plan(CPU | {"scratch": tmp_path})
    sequence_flops = sum(term.total for term in counted.terms)
    assert estimate_duration(counted, None, 0.45).flops_per_s == sequence_flops / 0.5
    monkeypatch.setattr(speed, "MAX_TIMED_FLOPS", sequence_flops / 2)
    assert estimate_duration(counted, None, 0.45).flops_per_s == 2 * 1024**3 / 0.25
    assert timed == ["sequence", "matrix product"]


def test_a_sequence_of_exactly_the_limit_is_timed(plan, tmp_path, timed, monkeypatch):
    counted = plan(CPU | {"scratch": tmp_path})
    monkeypatch.setattr(speed, "MAX_TIMED_FLOPS", sum(term.total for term in counted.terms))
    estimate_duration(counted, None, 0.45)
    assert timed == ["sequence"]


def test_timing_takes_time_and_leaves_threads_and_random_numbers_alone(plan, tmp_path):
    torch.manual_seed(7)
    state = torch.get_rng_state()
    threads = torch.get_num_threads()
    duration = estimate_duration(plan(CPU | {"scratch": tmp_path, "cpus_per_worker": 1}), None, 0.45)
    assert duration.device_hours > 0
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads


def test_a_sequence_is_timed_with_the_threads_of_a_worker():
    threads = torch.get_num_threads()
    with threads_of_worker(compute_section(cpus_per_worker=threads + 1)):
        assert torch.get_num_threads() == threads + 1
    assert torch.get_num_threads() == threads


def test_the_gpu_of_this_machine_decides_if_none_is_named(plan, tmp_path, monkeypatch):
    counted = plan({"gpu": True, "gpu_kind": None, "scratch": tmp_path})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100-SXM4-40GB")
    assert estimate_duration(counted, None, 0.5).flops_per_s == 156e12


def test_without_any_gpu_the_kinds_are_named(plan, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    duration = estimate_duration(plan({"gpu": True, "gpu_kind": None, "scratch": tmp_path}), None, 0.5)
    assert isinstance(duration, UnknownDuration)
    assert "A100-40GB" in duration.remedy
