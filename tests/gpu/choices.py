"""What a GPU chooses between, as functions of the device, so that the same lines run on a CPU."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from m3diff.models import FAMILIES
from m3diff.models.device import Device
from m3diff.stages.train.batches import Loader, MicroBatch, Schedule, read_training_samples
from m3diff.stages.train.engine import token_loss
from m3diff.stages.train.loop import prepare_model
from tests.stages.train.toy import Recipe, recipe
from tests.tiny import BASE, tiny_settings

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
