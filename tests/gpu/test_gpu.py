"""What no CPU can show: real kernels, memory, recompilations, pinned copies, NCCL. `make test-gpu`, in minutes."""

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
from m3diff.models.device import Device, process_environment
from m3diff.models.generation import load_captioner
from m3diff.models.tuning import unwrap_model
from m3diff.stages.train.batches import Loader, MicroBatch, Schedule, complete, read_training_samples
from m3diff.stages.train.engine import token_loss
from m3diff.stages.train.loop import prepare_model
from tests.stages.train.toy import Recipe, Trained, recipe, run
from tests.tiny import BASE, colour_image, tiny_base, tiny_checkpoint, tiny_settings

pytestmark = pytest.mark.gpu

ATTENTION = ("sdpa", "flex")
CHECKPOINTING = ("none", "selective", "full")
MDP = {"vision_feature_layers": [2, 4], "layers": 2, "heads": 4}
MICRO_BATCH = 4


def small(device: Device, **changes: Any) -> Recipe:
    """Training of the embedded base, whose heads are of 32: FlexAttention on a GPU takes none below 16."""
    how = {"gpu": device.gpu, "precision": device.precision, "attention": device.attention}
    model = tiny_settings(mdp=MDP, rank=8, vision=1e-4, projector=3e-4, module=3e-4, llm=3e-4)
    return recipe(BASE, **{"model": model, "micro_batch": MICRO_BATCH, **how, **changes})


def first_batch(made: Recipe, mixture: Path, processor: Any, device: Device) -> MicroBatch:
    """The first micro-batch of the run, as the loader builds it."""
    samples = read_training_samples(mixture)
    cfg = made.cfg
    schedule = Schedule(samples, cfg.max_captions_per_sequence, cfg.seed, MICRO_BATCH, MICRO_BATCH, cfg.epochs)
    return Loader(samples, processor, threads=1, device=device).build(schedule.micro_batches(0, 0)[0])


def loss_and_gradients(device: Device, mixture: Path, **changes: Any) -> tuple[float, dict[str, Tensor]]:
    """Loss of the first micro-batch and the gradients of what trains, all of which has moved, on the CPU in fp32."""
    made = small(device, **changes)
    model, processor = prepare_model(made.cfg, made.model, made.compute, FAMILIES["m3diff"])
    move_what_trains(model)
    model.to(device.torch)
    loss = token_loss(model, first_batch(made, mixture, processor, device), processor, device)
    loss.backward()
    found = {name: p.grad.float().cpu() for name, p in model.named_parameters() if p.grad is not None}
    return float(loss), found


@torch.no_grad()
def move_what_trains(model: torch.nn.Module) -> None:
    """The same in every precision, but for its rounding."""
    torch.manual_seed(11)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.add_(0.02 * torch.randn(parameter.shape).to(parameter.dtype))


def cosine(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> float:
    """Between two sets of gradients, taken as one vector each."""
    assert found.keys() == wanted.keys(), f"gradients of one alone: {sorted(found.keys() ^ wanted.keys())[:5]}"
    ours, theirs = (torch.cat([part[name].flatten() for name in wanted]).double() for part in (found, wanted))
    return float(ours @ theirs / (ours.norm() * theirs.norm()))


PAIRS = [(colour_image(n), colour_image(n + 1)) for n in range(3)]


def test_a_process_computes_on_the_gpu_that_it_is_asked_for_and_else_sees_none():
    script = (
        "import m3diff.stages.train.engine, torch\n"
        "from deepspeed.accelerator import get_accelerator\n"
        "from m3diff.models.device import Device\n"
        "device = Device(torch.cuda.is_available(), 'bf16')\n"
        "print(get_accelerator().device_name(), device.move(torch.ones(2)).device)"
    )
    assert said(script, gpu=True) == "cuda cuda:0"
    assert said(script, gpu=False) == "cpu cpu"


def said(script: str, gpu: bool) -> str:
    command = [sys.executable, "-W", "ignore", "-c", script]
    done = subprocess.run(command, env=os.environ | process_environment(gpu), text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


@pytest.mark.parametrize("captions", [None, 1])
@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
@pytest.mark.parametrize("attention", ATTENTION)
def test_loss_and_gradients_are_the_cpus(attention, checkpointing, captions, mixture, cpu):
    wanted, wanted_gradients = loss_and_gradients(cpu, mixture, max_captions_per_sequence=captions)
    changes = {"activation_checkpointing": checkpointing, "max_captions_per_sequence": captions}
    found, gradients = loss_and_gradients(Device(True, "fp32", attention), mixture, **changes)
    assert found == pytest.approx(wanted, rel=1e-4)
    assert cosine(gradients, wanted_gradients) > 0.9999


@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
@pytest.mark.parametrize("attention", ATTENTION)
def test_bf16_is_close_to_fp32(attention, checkpointing, mixture, cpu):
    wanted, wanted_gradients = loss_and_gradients(cpu, mixture)
    found, gradients = loss_and_gradients(
        Device(True, "bf16", attention), mixture, activation_checkpointing=checkpointing
    )
    assert found == pytest.approx(wanted, rel=2e-2)
    assert cosine(gradients, wanted_gradients) > 0.995


@pytest.mark.parametrize("attention", ATTENTION)
def test_a_micro_batch_is_trained_on_without_waiting_for_the_gpu(attention, mixture):
    """CUDA raises where the CPU would wait, but for the first pass, which compiles."""
    device = Device(True, "bf16", attention)
    made = small(device)
    family = FAMILIES["m3diff"]
    model, processor = prepare_model(made.cfg, made.model, made.compute, family)
    model.to(device.torch)
    batch = first_batch(made, mixture, processor, device)
    assert family.contribution is not None
    for mode in ("default", "error"):
        torch.cuda.set_sync_debug_mode(mode)
        try:
            with family.contribution.record(unwrap_model(model)):
                token_loss(model, batch, processor, device).backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
def test_peak_memory_is_what_the_planner_counts(checkpointing):
    """Two LLM layers of 7B's width with the whole encoder: above what the allocator keeps for itself."""
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
    taken = (torch.cuda.max_memory_allocated() - static) / 1e9
    counted = planned_activations_gb(bench.size, variant, "bf16")
    assert counted * 0.8 < taken < (counted + gradients / 1e9) * 1.15


def test_no_graph_is_made_after_two_steps_over_fifty_lengths():
    from benchmarks.levers import PAD, Bench, Size, Variant, tiny

    bench = Bench(tiny(pairs=1), gpu=True, precision="bf16")
    variant = Variant("p", packed=True, attention="flex")
    bench.use_variant(variant)
    prompt, reference = bench.size.groups[0][0]
    graphs = []
    for extra in range(52):
        group = [(prompt, reference), (prompt, [*reference, *[reference[0]] * extra])]
        size = Size("lengths", bench.size.config, bench.size.lora_rank, [group], bench.size.micro, 1)
        ((batch, _),) = size.micro_batches(variant)
        token_loss(bench.adapted, complete(batch, bench.device, PAD), bench.processor, bench.device).backward()
        bench.model.zero_grad(set_to_none=True)
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert 0 < graphs[1] == graphs[-1]


def test_captions_in_bf16(tmp_path):
    checkpoint = tiny_checkpoint(tiny_base(tmp_path / "base"), tmp_path / "checkpoint")
    captioner = load_captioner(checkpoint, 6, Device(gpu=True, precision="bf16"))
    captions = captioner.caption(PAIRS)
    images = [captioner.processor.prepare_image(image) for pair in PAIRS for image in pair]
    same, maps = captioner.answer(images, saliency=True)
    assert same == captions
    assert maps is not None
    assert maps.astype(float).sum((1, 2)) == pytest.approx(1.0, abs=1e-2)
    # a batch and a CPU change no token in fp32; in bf16, whose spacing is wider than what parts two tokens, they may
    exact = load_captioner(checkpoint, 6, Device(gpu=True, precision="fp32"))
    alike = exact.caption(PAIRS)
    assert alike == [exact.caption([pair])[0] for pair in PAIRS]
    assert alike == load_captioner(checkpoint, 6, Device(gpu=False, precision="fp32")).caption(PAIRS)


def trained(mixture: Path, folder: Path, gpu: bool = True, **changes: Any) -> Trained:
    folder.mkdir(exist_ok=True)
    precision = changes.pop("precision", "fp32")
    attention = "flex" if gpu else "sdpa"
    return run(small(Device(gpu, precision, attention), **changes), mixture, folder)


def test_a_run_on_the_gpu_trains_as_one_on_the_cpu(mixture, tmp_path):
    there = trained(mixture, tmp_path / "gpu")
    here = (  # in a process of its own: DeepSpeed keeps the accelerator that it took first
        "import json\nfrom pathlib import Path\nfrom tests.gpu.test_gpu import trained\n"
        f"run = trained(Path({str(mixture)!r}), Path({str(tmp_path / 'cpu')!r}), gpu=False)\n"
        "print(json.dumps([run.column('loss'), run.report.parameters]))"
    )
    losses, parameters = json.loads(said(here, gpu=False))
    assert there.column("loss") == pytest.approx(losses, rel=1e-3)
    assert there.report.parameters == parameters


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_killed_run_resumes_with_the_same_weights(precision, mixture, tmp_path, monkeypatch):
    from m3diff.stages.train import loop

    whole = trained(mixture, tmp_path / "whole", precision=precision)
    step_of_loop = loop.Training.train_step

    def dies(state: Any, step: int, batches: Any) -> None:
        if step == 3:
            raise KeyboardInterrupt
        step_of_loop(state, step, batches)

    with monkeypatch.context() as patched:
        patched.setattr(loop.Training, "train_step", dies)
        with pytest.raises(KeyboardInterrupt):
            trained(mixture, tmp_path / "killed", precision=precision)
    resumed = trained(mixture, tmp_path / "killed", precision=precision)
    assert resumed.column("loss") == pytest.approx(whole.column("loss"), rel=1e-5 if precision == "fp32" else 1e-2)
    for name, weight in whole.weights.items():
        close = {"rtol": 1e-4, "atol": 1e-6} if precision == "fp32" else {"rtol": 2e-2, "atol": 1e-3}
        torch.testing.assert_close(resumed.weights[name], weight, **close)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("stage", [1, 3])
def test_two_gpus_train_as_one(stage, mixture, tmp_path):
    one = trained(mixture, tmp_path / "one", micro_batch=2)
    two = trained(mixture, tmp_path / "two", micro_batch=2, workers=2, zero_stage=stage)
    assert two.column("loss") == pytest.approx(one.column("loss"), rel=1e-3)
