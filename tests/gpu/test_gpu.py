"""Test on a GPU what a CPU cannot show: kernels, memory, recompilations, pinned copies, NCCL (`make test-gpu`)."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from m3diff.models import FAMILIES
from m3diff.models.contract import Branch, PackedBatch
from m3diff.models.device import Device, process_environment
from m3diff.models.generation import load_captioner
from m3diff.models.masks import MaskedRows
from m3diff.models.tuning import unwrap_model
from m3diff.stages.train.batches import Loader, Schedule, read_training_samples
from m3diff.stages.train.engine import token_loss
from m3diff.stages.train.loop import prepare_model
from tests.stages.train.toy import Recipe, Trained, recipe, run
from tests.tiny import BASE, colour_image, tiny_base, tiny_checkpoint, tiny_settings

pytestmark = pytest.mark.gpu

ATTENTION = ("sdpa", "flex")
CHECKPOINTING = ("none", "selective", "full")
MDP = {"vision_feature_layers": [2, 4], "layers": 2, "heads": 4}
MICRO_BATCH = 4
PACKING = MaskedRows()


def small(device: Device, **changes: Any) -> Recipe:
    """Return a training of the embedded base. Its heads have 32 dimensions; FlexAttention on a GPU needs 16."""
    device_settings = {"gpu": device.gpu, "precision": device.precision, "attention": device.attention}
    model = tiny_settings(mdp=MDP, rank=8, vision=1e-4, projector=3e-4, module=3e-4, llm=3e-4)
    return recipe(BASE, **{"model": model, "micro_batch": MICRO_BATCH, **device_settings, **changes})


def first_batch(training: Recipe, mixture: Path, processor: Any, device: Device) -> PackedBatch:
    """Return the first micro-batch of the run, as the loader builds it."""
    samples = read_training_samples(mixture)
    cfg = training.cfg
    schedule = Schedule(samples, cfg.max_captions_per_sequence, cfg.seed, MICRO_BATCH, MICRO_BATCH, cfg.epochs)
    return Loader(samples, processor, PACKING, threads=1, device=device).build(schedule.micro_batches(0, 0)[0])


def loss_and_gradients(device: Device, mixture: Path, **changes: Any) -> tuple[float, dict[str, Tensor]]:
    """Return the loss of the first micro-batch, and the gradients of the trained parameters on the CPU in fp32.

    All trained parameters are moved first, since some of them start at zero.
    """
    training = small(device, **changes)
    model, processor = prepare_model(training.cfg, training.model, training.compute, FAMILIES["m3diff"])
    move_trained_parameters(model)
    model.to(device.torch)
    loss = token_loss(model, first_batch(training, mixture, processor, device), PACKING, processor, device)
    loss.backward()
    gradients = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            gradients[name] = parameter.grad.float().cpu()
    return float(loss), gradients


@torch.no_grad()
def move_trained_parameters(model: torch.nn.Module) -> None:
    """Add the same random numbers in every precision, apart from rounding."""
    torch.manual_seed(11)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.add_(0.02 * torch.randn(parameter.shape).to(parameter.dtype))


def cosine(gradients: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Return the cosine between two sets of gradients, each of them joined to one vector."""
    assert gradients.keys() == expected.keys()
    vector = torch.cat([gradients[name].flatten() for name in expected]).double()
    expected_vector = torch.cat([expected[name].flatten() for name in expected]).double()
    return float(vector @ expected_vector / (vector.norm() * expected_vector.norm()))


PAIRS = [(colour_image(n), colour_image(n + 1)) for n in range(3)]


def test_a_process_computes_on_the_requested_gpu_or_sees_none():
    script = (
        "import m3diff.stages.train.engine, torch\n"
        "from deepspeed.accelerator import get_accelerator\n"
        "from m3diff.models.device import Device\n"
        "device = Device(torch.cuda.is_available(), 'bf16')\n"
        "print(get_accelerator().device_name(), device.move(torch.ones(2)).device)"
    )
    assert last_line_of(script, gpu=True) == "cuda cuda:0"
    assert last_line_of(script, gpu=False) == "cpu cpu"


def last_line_of(script: str, gpu: bool) -> str:
    """Run a script in a fresh process and return the last line that it prints."""
    command = [sys.executable, "-W", "ignore", "-c", script]
    done = subprocess.run(command, env=os.environ | process_environment(gpu), text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


@pytest.mark.parametrize("captions", [None, 1])
@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
@pytest.mark.parametrize("attention", ATTENTION)
def test_loss_and_gradients_are_the_cpus(attention, checkpointing, captions, mixture, cpu):
    cpu_loss, cpu_gradients = loss_and_gradients(cpu, mixture, max_captions_per_sequence=captions)
    changes = {"activation_checkpointing": checkpointing, "max_captions_per_sequence": captions}
    loss, gradients = loss_and_gradients(Device(True, "fp32", attention), mixture, **changes)
    assert loss == pytest.approx(cpu_loss, rel=1e-4)
    assert cosine(gradients, cpu_gradients) > 0.9999


@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
@pytest.mark.parametrize("attention", ATTENTION)
def test_bf16_is_close_to_fp32(attention, checkpointing, mixture, cpu):
    cpu_loss, cpu_gradients = loss_and_gradients(cpu, mixture)
    device = Device(True, "bf16", attention)
    loss, gradients = loss_and_gradients(device, mixture, activation_checkpointing=checkpointing)
    assert loss == pytest.approx(cpu_loss, rel=2e-2)
    assert cosine(gradients, cpu_gradients) > 0.995


@pytest.mark.parametrize("attention", ATTENTION)
def test_a_micro_batch_is_trained_on_without_waiting_for_the_gpu(attention, mixture):
    """CUDA raises an error if the CPU would wait, except in the first pass, which compiles."""
    device = Device(True, "bf16", attention)
    training = small(device)
    family = FAMILIES["m3diff"]
    model, processor = prepare_model(training.cfg, training.model, training.compute, family)
    model.to(device.torch)
    batch = first_batch(training, mixture, processor, device)
    assert family.contribution is not None
    for mode in ("default", "error"):
        torch.cuda.set_sync_debug_mode(mode)
        try:
            with family.contribution.record(unwrap_model(model)):
                token_loss(model, batch, PACKING, processor, device).backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
def test_peak_memory_is_what_the_planner_counts(checkpointing):
    """Two LLM layers with the width of 7B and the whole encoder exceed the overhead of the allocator."""
    from benchmarks.levers import Bench, Variant, planned_activations_gb, seven_b

    bench = Bench(seven_b(layers=2, pairs=1), gpu=True, precision="bf16")
    variant = Variant("packed", packed=True, attention="flex", activation_checkpointing=checkpointing)
    bench.use_variant(variant)
    bench.run(variant)  # compiles
    bench.model.zero_grad(set_to_none=True)
    static = torch.cuda.memory_allocated()
    gradients = sum(2 * weight.numel() for weight in bench.optimizer.weights)
    torch.cuda.reset_peak_memory_stats()
    bench.run(variant)
    activations_gb = (torch.cuda.max_memory_allocated() - static) / 1e9
    planned_gb = planned_activations_gb(bench.size, variant, "bf16")
    assert planned_gb * 0.8 < activations_gb < (planned_gb + gradients / 1e9) * 1.15


def test_no_graph_is_made_after_two_steps_over_fifty_lengths():
    from benchmarks.levers import Bench, Size, Variant, tiny

    bench = Bench(tiny(pairs=1), gpu=True, precision="bf16")
    variant = Variant("p", packed=True, attention="flex")
    bench.use_variant(variant)
    branch = bench.size.groups[0][0]
    last_token = branch.ids[-1]
    graphs = []
    for extra in range(52):
        ((start, end),) = branch.spans
        longer = Branch([*branch.ids, *[last_token] * extra], [(start, end + extra)])
        group = [branch, longer]
        size = Size("lengths", bench.size.config, bench.size.lora_rank, [group], bench.size.micro, 1)
        (sequences,) = size.micro_batches(variant)
        batch = bench.packing.batch(sequences, bench.processor, bench.device)
        token_loss(bench.adapted, batch, bench.packing, bench.processor, bench.device).backward()
        bench.model.zero_grad(set_to_none=True)
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert 0 < graphs[1] == graphs[-1]


def test_captions_in_bf16(tmp_path):
    checkpoint = tiny_checkpoint(tiny_base(tmp_path / "base"), tmp_path / "checkpoint")
    captioner = load_captioner(checkpoint, 6, Device(gpu=True, precision="bf16"))
    captions = captioner.caption(PAIRS)
    prepared = [captioner.processor.prepare(pair) for pair in PAIRS]
    dialogues = [(captioner.ask(None),)] * len(PAIRS)
    captions_with_maps, maps = captioner.answer(prepared, dialogues, saliency=True)
    assert captions_with_maps == captions
    assert maps is not None
    assert maps.astype(float).sum((1, 2)) == pytest.approx(1.0, abs=1e-2)
    # Neither the batch size nor the device changes a token in fp32. In bf16, rounding errors may do so
    fp32_captioner = load_captioner(checkpoint, 6, Device(gpu=True, precision="fp32"))
    fp32_captions = fp32_captioner.caption(PAIRS)
    assert fp32_captions == [fp32_captioner.caption([pair])[0] for pair in PAIRS]
    assert fp32_captions == load_captioner(checkpoint, 6, Device(gpu=False, precision="fp32")).caption(PAIRS)


def train_small(mixture: Path, folder: Path, gpu: bool = True, **changes: Any) -> Trained:
    folder.mkdir(exist_ok=True)
    precision = changes.pop("precision", "fp32")
    attention = "flex" if gpu else "sdpa"
    return run(small(Device(gpu, precision, attention), **changes), mixture, folder)


def test_a_run_on_the_gpu_trains_as_one_on_the_cpu(mixture, tmp_path):
    gpu_run = train_small(mixture, tmp_path / "gpu")
    # In a separate process, because DeepSpeed keeps the first accelerator that it used
    script = (
        "import json\nfrom pathlib import Path\nfrom tests.gpu.test_gpu import train_small\n"
        f"run = train_small(Path({str(mixture)!r}), Path({str(tmp_path / 'cpu')!r}), gpu=False)\n"
        "print(json.dumps([run.column('loss'), run.report.parameters]))"
    )
    losses, parameters = json.loads(last_line_of(script, gpu=False))
    assert gpu_run.column("loss") == pytest.approx(losses, rel=1e-3)
    assert gpu_run.report.parameters == parameters


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_killed_run_resumes_with_the_same_weights(precision, mixture, tmp_path, monkeypatch):
    from m3diff.stages.train import loop

    uninterrupted_run = train_small(mixture, tmp_path / "whole", precision=precision)
    step_of_loop = loop.Training.train_step

    def die_at_third_step(state: Any, step: int, batches: Any) -> None:
        if step == 3:
            raise KeyboardInterrupt
        step_of_loop(state, step, batches)

    with monkeypatch.context() as patched:
        patched.setattr(loop.Training, "train_step", die_at_third_step)
        with pytest.raises(KeyboardInterrupt):
            train_small(mixture, tmp_path / "killed", precision=precision)
    resumed_run = train_small(mixture, tmp_path / "killed", precision=precision)
    tolerance = 1e-5 if precision == "fp32" else 1e-2
    assert resumed_run.column("loss") == pytest.approx(uninterrupted_run.column("loss"), rel=tolerance)
    tolerances = {"rtol": 1e-4, "atol": 1e-6} if precision == "fp32" else {"rtol": 2e-2, "atol": 1e-3}
    for name, weight in uninterrupted_run.weights.items():
        torch.testing.assert_close(resumed_run.weights[name], weight, **tolerances)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("stage", [1, 3])
def test_two_gpus_train_as_one(stage, mixture, tmp_path):
    single_run = train_small(mixture, tmp_path / "one", micro_batch=2)
    double_run = train_small(mixture, tmp_path / "two", micro_batch=2, workers=2, zero_stage=stage)
    assert double_run.column("loss") == pytest.approx(single_run.column("loss"), rel=1e-3)
