"""The DeepSpeed engine around a model, the loss of a micro-batch, and one optimizer step over a global batch.

The loss is the sum over the supervised tokens divided by their number in the whole global batch, over all micro-batches
and workers, so that neither changes the gradient. DeepSpeed takes its accelerator when it is imported:
`job.choose_accelerator` tells it which, before this module is.
"""

import math
from collections.abc import Sequence
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed import DeepSpeedEngine
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from torch import Tensor, nn

from m3diff.models.device import Device
from m3diff.models.fused import fused_attention
from m3diff.models.processing import PairProcessor
from m3diff.models.tuning import TrainableGroup
from m3diff.settings.compute import Compute
from m3diff.stages.train.batches import MicroBatch
from m3diff.stages.train.params import Train


def deepspeed_config(cfg: Train, compute: Compute) -> dict[str, Any]:
    """Return DeepSpeed's configuration, without an optimizer or scheduler: DeepSpeed's own would merge the groups.

    With ZeRO 2 and 3, gradients of micro-batches in bf16 are added up in fp32, on one GPU too: in bf16 a sum loses each
    gradient below 1/512 of it. DeepSpeed knows no such sum without ZeRO, and for ZeRO 1 it takes another optimizer
    (`BF16_Optimizer`), whose state is held otherwise and whose sums are whole on every GPU.
    """
    sums_in_fp32 = cfg.precision == "bf16" and compute.zero_stage >= 2
    return {
        "train_batch_size": cfg.global_batch,  # of which follows how many micro-batches a worker adds up
        "train_micro_batch_size_per_gpu": compute.micro_batch,
        "gradient_clipping": cfg.max_grad_norm or 0.0,  # 0: none
        "bf16": {"enabled": cfg.precision == "bf16"},
        "zero_optimization": {"stage": compute.zero_stage, "stage3_gather_16bit_weights_on_model_save": True},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "data_types": {"grad_accum_dtype": "fp32" if sums_in_fp32 else None},
        "steps_per_print": 2**31,
        "timers": {"throughput": {"enabled": False}},  # it would wait for the GPU twice a micro-batch
    }


def build_engine(cfg: Train, compute: Compute, model: nn.Module, groups: list[TrainableGroup]) -> DeepSpeedEngine:
    """Wrap the model with AdamW over its groups; `torch.distributed` must be up."""
    # DeepSpeed would compile a collective for shared memory at first use; gloo serves CPU ranks without a compiler
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # each rate is set before each step; 0 until then
    parameters = [{"params": group.parameters, "lr": 0.0} for group in groups]
    optimizer = torch.optim.AdamW(parameters, betas=(0.9, 0.999), weight_decay=cfg.weight_decay, fused=True)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=deepspeed_config(cfg, compute), dist_init_required=False
    )
    if isinstance(engine.optimizer, FP16_UnfusedOptimizer):  # it has taken a step of no gradient, which AdamW counts
        engine.basic_optimizer.state.clear()
    return engine


def warmup_steps(steps: int, warmup_share: float) -> int:
    return max(1, round(warmup_share * steps))


def rate_factor(cfg: Train, step: int, steps: int, delay: float = 0.0) -> float:
    """Return the factor on a group's learning rate at `step` of `steps`: linear up, then 1, or a half cosine to zero.

    A group with a `delay`, a share of `steps`, has 0 until then, and its own warm-up under the same cosine.
    """
    warmup, own = warmup_steps(steps, cfg.warmup_share), step - round(delay * steps)
    rise = 0.0 if own < 0 else min(1.0, (own + 1) / warmup)
    if cfg.schedule == "constant":
        return rise
    return 0.5 * (1 + math.cos(math.pi * max(0, step - warmup) / max(1, steps - warmup))) * rise


def take_step(
    engine: DeepSpeedEngine,
    batches: list[MicroBatch],
    processor: PairProcessor,
    device: Device,
    rates: Sequence[float],
    ranks: int,
) -> tuple[float, float]:
    """Take one optimizer step over a global batch; return its mean loss per supervised token and the gradient's norm.

    Args:
        rates: learning rates of the optimizer's groups, in their order.
    """
    for slot, rate in zip(engine.optimizer.param_groups, rates, strict=True):
        slot["lr"] = rate
    tokens = sum_over_ranks(torch.tensor(float(sum(batch.supervised_tokens for batch in batches))), ranks)
    total, norm = torch.zeros((), device=device.torch), 0.0  # stays there: reading it would wait for the GPU
    for number, batch in enumerate(batches, start=1):
        loss = token_loss(engine, batch, processor, device)
        total += loss.detach()
        engine.backward(loss * (ranks * len(batches)) / float(tokens))  # DeepSpeed divides by both
        if number < len(batches):
            engine.step()
        else:
            norm = apply_step(engine)
    return float(sum_over_ranks(total.cpu(), ranks) / tokens), norm


def apply_step(engine: DeepSpeedEngine) -> float:
    """Call `engine.step()` after the last backward of a step; return the gradient's norm over all groups and workers,
    unclipped.

    DeepSpeed's optimizers keep the norm that they clip by, infinite where the gradient is not finite. With ZeRO 0 in
    fp32 the optimizer is torch's own, which knows none: there every worker holds the whole gradient, summed over the
    workers.
    """
    if not isinstance(engine.optimizer, torch.optim.Optimizer):
        engine.step()
        return float(engine.get_global_grad_norm())
    norm = float(torch.nn.utils.get_total_norm([p.grad for p in engine.module.parameters() if p.grad is not None]))
    engine.step()
    return norm


def token_loss(model: nn.Module, batch: MicroBatch, processor: PairProcessor, device: Device) -> Tensor:
    """Return the summed cross-entropy over the weighted supervised tokens of a complete micro-batch, which is copied to
    the device here; the model computes logits on those positions alone."""
    packed = batch.packed
    with fused_attention():
        logits = model(
            input_ids=device.move(packed.input_ids),
            position_ids=device.move(packed.position_ids),
            tokens=packed.input_ids,  # on the CPU, as the next: places are known without waiting for a GPU
            logits_to_keep=packed.supervised,
            use_cache=False,
            **attention_inputs(batch, device),
            **processor.image_inputs(device.move(batch.images)),
        ).logits
    losses = nn.functional.cross_entropy(logits.float(), device.move(packed.labels), reduction="none")
    return (losses * device.move(batch.weights)).sum()


def attention_inputs(batch: MicroBatch, device: Device) -> dict[str, Any]:
    """Return the mask, which chooses the kernel (`m3diff.models.fused`), and the layout that SDPA needs."""
    if device.attention == "flex":
        return {"attention_mask": batch.packed.block_mask(device)}
    assert batch.layout is not None, "a micro-batch that is not complete"
    layout = batch.layout.each(device.move)
    return {"attention_mask": layout.attention_mask(), "layout": layout}


def sum_over_ranks(value: Tensor, ranks: int) -> Tensor:
    """Add up `value`, on the CPU, in place over the workers, and return it."""
    if ranks > 1:
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        summed = value.to(device)
        dist.all_reduce(summed)
        value.copy_(summed)
    return value
