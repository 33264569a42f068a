"""Estimate the time of a run from a GPU's peak, the last training run on this machine, or a timed sequence.

If the user specifies a kind of GPU, its peak is used, because this machine may have a different GPU or no GPU.
"""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from m3diff.commands.plan.figures import TERA, Plan, Run, SequenceFigures
from m3diff.models import FAMILIES
from m3diff.models.tuning import prepare_for_training
from m3diff.records.errors import format_count
from m3diff.settings.compute import GPUS, Compute, Gpu, gpu_of
from m3diff.stages.train.job import SPEED_FILE

# If a sequence of the model takes at most this many FLOPs, it is timed, which takes seconds on a core. For a larger
# model, a matrix product is timed instead, because the model runs at about the same speed
MAX_TIMED_FLOPS = 1e11

REPEATS = 5  # number of timed runs; only the fastest counts, because others may be delayed on a busy machine
MATRIX_SIDE = 1024


@dataclass(frozen=True)
class Duration:
    """The estimated time of a run.

    Attributes:
        device_hours: hours of one GPU, or of one process on a CPU.
        flops_per_s: FLOP/s of one device.
        basis: explanation for the user of how the speed was determined.
    """

    device_hours: float
    flops_per_s: float
    basis: str

    def caption_hours(self, plan: Plan, pairs: int) -> float:
        """Return the hours that one device needs to read the images and prompts of `pairs` pairs."""
        return pairs * plan.caption_flops / self.flops_per_s / 3600


@dataclass(frozen=True)
class UnknownDuration:
    """The time of the run cannot be estimated. `remedy` tells the user what to set."""

    remedy: str


def estimate_duration(plan: Plan, gpu: Gpu | None, hfu: float) -> Duration | UnknownDuration:
    """Estimate the time of a run.

    Args:
        gpu: kind of GPU that the user specified, if any.
        hfu: assumed share of the GPU's peak (hardware FLOPs utilisation).
    """
    if gpu is not None:
        return duration_by_peak(plan, gpu, hfu, f"assumes that a GPU of the kind {gpu.name}")
    last_training = duration_of_last_training(plan)
    if last_training is not None:
        return last_training
    if not plan.run.compute.gpu:
        return duration_by_timing(plan)
    machine_gpu = kind_of_machine_gpu()
    if machine_gpu is not None:
        assumption = f"assumes that this machine's GPU, of the kind {machine_gpu.name},"
        return duration_by_peak(plan, machine_gpu, hfu, assumption)
    return UnknownDuration(f"set a kind of GPU with --gpu or compute.gpu_kind: {', '.join(GPUS)}")


def duration_by_peak(plan: Plan, gpu: Gpu, hfu: float, assumption: str) -> Duration | UnknownDuration:
    """Estimate the time from a share of the GPU's peak, which is known only for bf16.

    Args:
        assumption: beginning of the text that explains how the speed was determined.
    """
    if plan.train.precision != "bf16":
        return UnknownDuration(f"peaks of GPUs are only known for bf16, but train.precision is {plan.train.precision}")
    hfu_explanation = ""
    if plan.run_flops > plan.model_flops:
        hfu_explanation = (
            f" (HFU, hardware FLOPs utilisation, which includes recomputation by activation checkpointing; MFU, which "
            f"does not include it, is {plan.mfu(hfu):.1%})"
        )
    return Duration(
        device_hours=plan.gpu_hours(gpu.bf16_tflops, hfu),
        flops_per_s=gpu.bf16_tflops * TERA * hfu,
        basis=f"{assumption} computes at {hfu:.0%} of its peak of {gpu.bf16_tflops:g} TFLOP/s in bf16"
        f"{hfu_explanation}; --utilisation sets the share",
    )


def kind_of_machine_gpu() -> Gpu | None:
    """Return the kind of this machine's first GPU, or None if torch finds no GPU or its kind is unknown."""
    return gpu_of(torch.cuda.get_device_name()) if torch.cuda.is_available() else None


def duration_of_last_training(plan: Plan) -> Duration | None:
    """Estimate the time from the speed of the last training run on this machine.

    Returns None unless that run trained a model with the same number of parameters on the same type of device (GPU or
    CPU).
    """
    speed_file = plan.run.compute.scratch / SPEED_FILE
    speed = read_speed(speed_file)
    if not all(speed.get(field) for field in ("flops", "model_parameters", "seconds", "devices", "device")):
        return None
    was_on_cpu = speed["device"] == "cpu"
    is_same_model = speed["model_parameters"] == sum(plan.parameters.values())
    is_same_device = was_on_cpu != plan.run.compute.gpu
    if not is_same_model or not is_same_device:
        return None
    flops_per_s = speed["flops"] / speed["seconds"] / speed["devices"]
    devices = format_devices(speed["devices"], is_gpu=not was_on_cpu)
    return Duration(
        device_hours=plan.model_flops / flops_per_s / 3600,
        flops_per_s=flops_per_s,
        basis=f"speed of the last training on this machine, with a model of this size on {devices} ({speed_file}); "
        "validation and checkpoints are included",
    )


def read_speed(file: Path) -> dict[str, Any]:
    """Return the recorded speed of the last training run, or an empty dictionary if the file is missing or damaged."""
    try:
        speed = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return speed if isinstance(speed, dict) else {}


def duration_by_timing(plan: Plan) -> Duration:
    """Estimate the time by timing a sequence on this machine's CPU, or a matrix product if the model is large."""
    sequence = plan.most_frequent_sequence
    flops_per_sequence = sum(term.total for term in sequence.terms)
    with threads_of_worker(plan.run.compute):
        if flops_per_sequence <= MAX_TIMED_FLOPS:
            flops_per_s = flops_per_sequence / time_sequence(plan.run, sequence)
            basis = "timed on this machine: forward and backward of one sequence of this model"
        else:
            flops_per_s = 2 * MATRIX_SIDE**3 / time_matrix_product()
            basis = f"timed on this machine: a product of {MATRIX_SIDE} x {MATRIX_SIDE} matrices"
    return Duration(
        device_hours=plan.model_flops / flops_per_s / 3600,
        flops_per_s=flops_per_s,
        basis=f"{basis}; validation and checkpoints are not included",
    )


@contextmanager
def threads_of_worker(compute: Compute) -> Iterator[None]:
    """Use the number of threads of a training worker, and restore torch's threads and random state afterwards."""
    threads = torch.get_num_threads()
    random_state = torch.get_rng_state()
    torch.set_num_threads(compute.cpus_per_worker)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.set_rng_state(random_state)


def time_sequence(run: Run, sequence: SequenceFigures) -> float:
    """Return the seconds that the forward and backward pass of one sequence take on this CPU, with random weights."""
    family = FAMILIES[run.settings.family]
    config = family.planned_config(run.train.base, run.settings)
    model = family.build(config)
    prepare_for_training(model, family, run.settings)
    model = model.to(torch.bfloat16 if run.train.precision == "bf16" else torch.float32).train()
    family.fuse(model, run.compute.activation_checkpointing)
    length = round(sequence.tokens)
    supervised_length = max(1, min(length - 1, round(sequence.supervised_tokens)))
    ids = torch.zeros(1, length, dtype=torch.long)
    ids[:, : config.image_tokens_of(sequence.images)] = config.image_token_index
    positions = torch.arange(length)[None]
    inputs = {
        "input_ids": ids,
        "position_ids": positions,
        "attention_mask": None,
        "logits_to_keep": positions >= length - supervised_length,
        "use_cache": False,
        **model.blank_images(config, "cpu", sequence.images),
    }
    if sequence.images:
        inputs["tokens"] = ids  # tells where the visual tokens are

    def train_sequence() -> None:
        logits = model(**inputs).logits.reshape(supervised_length, -1)
        F.cross_entropy(logits.float(), torch.zeros(supervised_length, dtype=torch.long)).backward()

    return _least_seconds(train_sequence)


def time_matrix_product() -> float:
    """Return the seconds that multiplying two square fp32 matrices takes."""
    matrix = torch.rand(MATRIX_SIDE, MATRIX_SIDE)
    return _least_seconds(lambda: matrix @ matrix)


def _least_seconds(work: Callable[[], object]) -> float:
    work()  # the first run warms up caches
    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def format_devices(count: int, is_gpu: bool) -> str:
    """Return a number of GPUs or processes as text, such as "1 GPU" or "4 processes"."""
    return format_count(count, "GPU") if is_gpu else format_count(count, "process", "processes")
