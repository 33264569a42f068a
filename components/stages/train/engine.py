"""The DeepSpeed engine around a model: ZeRO stage and precision from the parameters, AdamW with its groups.

DeepSpeed takes its accelerator when it is imported: `accelerator.py` tells it which, before this module is.
"""

import math
from collections.abc import Sequence
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from torch import nn

from m3diff.models.tuning import TrainableGroup
from m3diff.settings.compute import Compute
from m3diff.stages.train.params import Train


def accumulation(cfg: Train, compute: Compute, ranks: int) -> int:
    """Micro-batches of one worker in a step."""
    steps, rest = divmod(cfg.global_batch, compute.micro_batch * ranks)
    assert not rest, f"global_batch {cfg.global_batch} is no multiple of micro_batch {compute.micro_batch} x {ranks}"
    return steps


def deepspeed_config(cfg: Train, compute: Compute, ranks: int) -> dict[str, Any]:
    """DeepSpeed's configuration. No optimizer or scheduler in it: those of DeepSpeed would merge the groups."""
    return {
        "train_micro_batch_size_per_gpu": compute.micro_batch,
        "gradient_accumulation_steps": accumulation(cfg, compute, ranks),
        "gradient_clipping": cfg.max_grad_norm or 0.0,  # 0: none
        "bf16": {"enabled": cfg.precision == "bf16"},
        "zero_optimization": {"stage": compute.zero_stage, "stage3_gather_16bit_weights_on_model_save": True},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "data_types": {"grad_accum_dtype": "fp32" if accumulates_in_fp32(cfg, compute) else None},
        "steps_per_print": 2**31,
        "timers": {"throughput": {"enabled": False}},  # it would wait for the GPU twice a micro-batch
    }


def accumulates_in_fp32(cfg: Train, compute: Compute) -> bool:
    """Whether gradients of micro-batches in bf16 are added up in fp32: with ZeRO 2 and 3, on one GPU too. DeepSpeed
    knows no such sum without ZeRO, and for ZeRO 1 it takes another optimizer (`BF16_Optimizer`), whose state is held
    otherwise and whose sums are whole on every GPU. In bf16 a sum loses each gradient below 1/512 of it."""
    return cfg.precision == "bf16" and compute.zero_stage >= 2


def build_engine(
    cfg: Train, compute: Compute, model: nn.Module, groups: list[TrainableGroup], ranks: int
) -> deepspeed.DeepSpeedEngine:
    """Wrap the model; `torch.distributed` must be up."""
    # DeepSpeed would compile a collective for shared memory at first use; gloo serves CPU ranks without a compiler
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # each rate is set before each step; 0 until then
    parameters = [{"params": group.parameters, "lr": 0.0, "name": group.name} for group in groups]
    optimizer = torch.optim.AdamW(parameters, betas=(0.9, 0.999), weight_decay=cfg.weight_decay, fused=True)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=deepspeed_config(cfg, compute, ranks), dist_init_required=False
    )
    if isinstance(engine.optimizer, FP16_UnfusedOptimizer):  # it has taken a step of no gradient, which AdamW counts
        engine.basic_optimizer.state.clear()
    return engine


def end_distributed() -> None:
    """End `torch.distributed`. DeepSpeed keeps groups of its own, which outlive torch's unless it ends them itself."""
    (deepspeed.comm if deepspeed.comm.is_initialized() else torch.distributed).destroy_process_group()


def warmup_steps(steps: int, warmup_share: float) -> int:
    return max(1, round(warmup_share * steps))


def delayed_steps(steps: int, delay: float) -> int:
    """The first step of a part that waits for a share `delay` of `steps`."""
    return round(delay * steps)


def cosine_with_warmup(step: int, steps: int, warmup_share: float, delay: float = 0.0) -> float:
    """The factor on a group's learning rate at `step` of `steps`: linear up, then a half cosine to zero. A group with a
    `delay` has 0 until then, and its own warm-up under the same cosine."""
    warmup = warmup_steps(steps, warmup_share)
    cosine = 0.5 * (1 + math.cos(math.pi * max(0, step - warmup) / max(1, steps - warmup)))
    return cosine * constant_with_warmup(step, steps, warmup_share, delay)


def constant_with_warmup(step: int, steps: int, warmup_share: float, delay: float = 0.0) -> float:
    """The same without the cosine: 0 until the delay is over, linear up, then 1."""
    own = step - delayed_steps(steps, delay)
    return 0.0 if own < 0 else min(1.0, (own + 1) / warmup_steps(steps, warmup_share))


SCHEDULES = {"cosine": cosine_with_warmup, "constant": constant_with_warmup}


def set_learning_rates(engine: deepspeed.DeepSpeedEngine, rates: Sequence[float]) -> None:
    """`rates`: of each of the optimizer's groups, in their order."""
    for slot, rate in zip(engine.optimizer.param_groups, rates, strict=True):
        slot["lr"] = rate


def apply_step(engine: deepspeed.DeepSpeedEngine) -> float:
    """`engine.step()` after the last backward of a step; the gradient's norm over all groups and workers, unclipped.

    DeepSpeed's optimizers keep the norm that they clip by, infinite where the gradient is not finite. With ZeRO 0 in
    fp32 the optimizer is torch's own, which knows none: there every worker holds the whole gradient, summed over the
    workers.
    """
    plain = isinstance(engine.optimizer, torch.optim.Optimizer)
    if plain:
        gradients = [p.grad for p in engine.module.parameters() if p.grad is not None]
        norm = float(torch.nn.utils.get_total_norm(gradients))
    engine.step()
    return norm if plain else float(engine.get_global_grad_norm())
