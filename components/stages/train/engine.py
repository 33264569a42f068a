"""Create the DeepSpeed engine, compute the loss of a micro-batch, and take an optimizer step over a global batch.

The loss is summed over the supervised tokens and divided by the number of supervised tokens in the global batch, so
neither the size of a micro-batch nor the number of workers changes the gradient.

DeepSpeed chooses its accelerator when it is imported, so call `job.choose_accelerator` before importing this module.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed import DeepSpeedEngine
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.utils import safe_get_full_grad
from torch import Tensor, nn

from m3diff.models.contract import PackedBatch, Packing, Processor
from m3diff.models.device import Device
from m3diff.models.family import Family
from m3diff.models.tuning import TrainableGroup, unwrap_model
from m3diff.settings.compute import Compute
from m3diff.stages.train.params import Train


def deepspeed_config(cfg: Train, compute: Compute) -> dict[str, Any]:
    """Return DeepSpeed's configuration. It does not set an optimizer or a learning rate schedule.

    `build_optimizer` creates the optimizer, because the one that DeepSpeed builds would merge the parameter groups.
    `rate_factor` computes the schedule.

    With ZeRO 2 and 3, the bf16 gradients of micro-batches are accumulated in fp32, even on one GPU: a bf16 sum does not
    change if the gradient added to it is smaller than 1/512 of the sum. DeepSpeed does not support fp32 accumulation
    without ZeRO. With ZeRO 1, it would use `BF16_Optimizer`, which has a different state layout and keeps the whole sum
    on every GPU.
    """
    accumulates_in_fp32 = cfg.precision == "bf16" and compute.zero_stage >= 2
    return {
        # DeepSpeed derives the number of micro-batches per worker from these two
        "train_batch_size": cfg.global_batch,
        "train_micro_batch_size_per_gpu": compute.micro_batch,
        "gradient_clipping": cfg.max_grad_norm or 0.0,  # 0 disables clipping
        "bf16": {"enabled": cfg.precision == "bf16"},
        "zero_optimization": {"stage": compute.zero_stage, "stage3_gather_16bit_weights_on_model_save": True},
        # with ZeRO, `build_optimizer` may return any optimizer, not only one of those that DeepSpeed lists as tested
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "data_types": {"grad_accum_dtype": "fp32" if accumulates_in_fp32 else None},
        "steps_per_print": 2**31,
        # the timer would wait for the GPU twice per micro-batch
        "timers": {"throughput": {"enabled": False}},
    }


def build_optimizer(cfg: Train, groups: list[TrainableGroup]) -> torch.optim.Optimizer:
    """Return the optimizer of a training run: AdamW with one parameter group for each group of `groups`.

    To train with another optimizer or other betas, edit this function. `take_step` sets the learning rate of each
    parameter group before each step, and `deepspeed_config` sets the clipping of gradients. If the optimizer does not
    keep AdamW's two moments, also change `MOMENTS` in `params.py` and `start_moments` in `state.py`. The files of a
    checkpoint and the memory that `m3diff plan` and preflight expect follow from `MOMENTS`.
    """
    parameter_groups = [{"params": group.parameters, "lr": 0.0} for group in groups]
    return torch.optim.AdamW(parameter_groups, betas=(0.9, 0.999), weight_decay=cfg.weight_decay, fused=True)


def build_engine(cfg: Train, compute: Compute, model: nn.Module, groups: list[TrainableGroup]) -> DeepSpeedEngine:
    """Return a DeepSpeed engine that trains the parameter groups of the model with the optimizer of `build_optimizer`.

    `torch.distributed` must be initialized.
    """
    # Otherwise DeepSpeed 0.19 would compile a shared-memory collective on first use. On CPUs, gloo is used instead,
    # which does not need a compiler
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=build_optimizer(cfg, groups),
        config=deepspeed_config(cfg, compute),
        dist_init_required=False,
    )
    if isinstance(engine.optimizer, FP16_UnfusedOptimizer):
        # the constructor of this optimizer calls `step` without gradients, which AdamW would count as a step
        engine.basic_optimizer.state.clear()
    return engine


def warmup_steps(steps: int, warmup_share: float) -> int:
    """Return the number of warm-up steps of a run, at least one."""
    return max(1, round(warmup_share * steps))


def rate_factor(cfg: Train, step: int, steps: int, delay: float = 0.0) -> float:
    """Return the factor that scales a parameter group's learning rate at `step` of `steps`, counted from 0.

    The factor rises linearly during the warm-up. After that, it stays at 1 (`constant`) or falls to 0 along a half
    cosine (`cosine`).

    Args:
        delay: share of `steps` before the group starts to train. The group's warm-up begins then, and its cosine is the
            same as for the other groups.
    """
    warmup = warmup_steps(steps, cfg.warmup_share)
    steps_since_delay = step - round(delay * steps)
    warmup_factor = 0.0 if steps_since_delay < 0 else min(1.0, (steps_since_delay + 1) / warmup)
    if cfg.schedule == "constant":
        return warmup_factor
    progress = max(0, step - warmup) / max(1, steps - warmup)
    return 0.5 * (1 + math.cos(math.pi * progress)) * warmup_factor


def take_step(
    engine: DeepSpeedEngine,
    micro_batches: Sequence[PackedBatch],
    packing: Packing,
    processor: Processor,
    device: Device,
    rates: Sequence[float],
    ranks: int,
    before_update: Callable[[], None] | None = None,
) -> tuple[float, float]:
    """Take one optimizer step and return the mean loss per supervised token and the gradient norm.

    Args:
        micro_batches: this worker's part of the global batch.
        packing: packing of the model's family, which made the micro-batches.
        rates: learning rates of the optimizer's groups, in the optimizer's order.
        ranks: number of workers.
        before_update: function that is called on every worker when the gradient of the step is complete.
    """
    for group, rate in zip(engine.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    own_tokens = sum(float(batch.weights.sum()) for batch in micro_batches)
    tokens = sum_over_ranks(torch.tensor(own_tokens), ranks)
    # the sum stays on the device because reading it after each micro-batch would wait for the GPU
    loss_sum = torch.zeros((), device=device.torch)
    grad_norm = 0.0
    for number, batch in enumerate(micro_batches, start=1):
        loss = token_loss(engine, batch, packing, processor, device)
        loss_sum += loss.detach()
        # DeepSpeed divides the gradient by the number of workers and the number of micro-batches
        engine.backward(loss * (ranks * len(micro_batches)) / float(tokens))
        if number < len(micro_batches):
            engine.step()
            continue
        if before_update is not None:
            before_update()
        grad_norm = apply_step(engine)
    return float(sum_over_ranks(loss_sum.cpu(), ranks) / tokens), grad_norm


def apply_step(engine: DeepSpeedEngine) -> float:
    """Call `engine.step()` after the last backward pass of a step and return the norm of the gradient before clipping.

    DeepSpeed's optimizers compute the norm in order to clip the gradient. The norm is infinite if the gradient is not
    finite. With ZeRO 0 in fp32, torch's optimizer is used, which does not compute a norm. In that case, the norm is
    computed here from the full gradient, which every worker holds.
    """
    if not isinstance(engine.optimizer, torch.optim.Optimizer):
        engine.step()
        return float(engine.get_global_grad_norm())
    gradients = [parameter.grad for parameter in engine.module.parameters() if parameter.grad is not None]
    grad_norm = float(torch.nn.utils.get_total_norm(gradients))
    engine.step()
    return grad_norm


def gradient_norms(engine: DeepSpeedEngine, family: Family) -> dict[str, float]:
    """Return the norm of the gradient of each part that is trained. Call this on every worker before `apply_step`."""
    squares: dict[str, float] = {}
    for name, parameter in unwrap_model(engine.module).named_parameters():
        if not parameter.requires_grad:
            continue
        part = family.part_of(name)
        gradient = parameter.grad
        if not isinstance(engine.optimizer, torch.optim.Optimizer):
            gradient = safe_get_full_grad(parameter)  # gathers what ZeRO partitions among the workers
        square = 0.0 if gradient is None else float(gradient.double().square().sum())
        squares[part] = squares.get(part, 0.0) + square
    return {part: math.sqrt(square) for part, square in squares.items()}


def token_loss(model: nn.Module, batch: PackedBatch, packing: Packing, processor: Processor, device: Device) -> Tensor:
    """Return the weighted cross-entropy of a micro-batch, summed over its supervised tokens.

    The micro-batch is copied to the device here. Logits are computed only for the supervised tokens.
    """
    logits = packing.logits(model, batch, processor, device)
    losses = nn.functional.cross_entropy(logits.float(), device.move(batch.labels), reduction="none")
    return (losses * device.move(batch.weights)).sum()


def sum_over_ranks(value: Tensor, ranks: int) -> Tensor:
    """Sum a CPU tensor over all workers in place and return it."""
    if ranks > 1:
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        total = value.to(device)
        dist.all_reduce(total)
        value.copy_(total)
    return value
