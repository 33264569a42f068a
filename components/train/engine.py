"""The DeepSpeed engine around M3Diff: ZeRO stage and precision from `params.yaml`, AdamW with its groups."""

import math
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cuda" if os.path.exists("/proc/driver/nvidia/version") else "cpu")

import deepspeed  # noqa: E402
import torch  # noqa: E402
from peft import PeftModel  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from components.models.m3diff.tuning import (  # noqa: E402
    ADAPTERS,
    TrainableGroup,
    merge,
    save_adapters,
    verify_manifest,
    write_manifest,
)
from components.models.m3diff.processing import M3DiffProcessor  # noqa: E402
from components.params import Train  # noqa: E402

STATE = "state"


def deepspeed_config(cfg: Train, ranks: int) -> dict[str, Any]:
    """DeepSpeed's configuration. No optimizer or scheduler in it: those of DeepSpeed would merge the groups."""
    return {
        "train_micro_batch_size_per_gpu": cfg.micro_batch,
        "gradient_accumulation_steps": cfg.global_batch // (cfg.micro_batch * ranks),
        "gradient_clipping": cfg.max_grad_norm,
        "bf16": {"enabled": cfg.precision == "bf16"},
        "zero_optimization": {"stage": cfg.zero_stage, "stage3_gather_16bit_weights_on_model_save": True},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 2**31,
    }


def build_engine(cfg: Train, model: nn.Module, groups: list[TrainableGroup], ranks: int) -> deepspeed.DeepSpeedEngine:
    """Wrap the model; `torch.distributed` must be up."""
    # DeepSpeed would compile a collective for shared memory at first use; gloo serves CPU ranks without a compiler
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    parameters = [{"params": group.parameters, "lr": group.lr, "name": group.name} for group in groups]
    optimizer = torch.optim.AdamW(parameters, betas=(0.9, 0.999), weight_decay=cfg.weight_decay)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=deepspeed_config(cfg, ranks), dist_init_required=False
    )
    return engine


def end_distributed() -> None:
    """End `torch.distributed`. DeepSpeed keeps groups of its own, which outlive torch's unless it ends them itself."""
    (deepspeed.comm if deepspeed.comm.is_initialized() else torch.distributed).destroy_process_group()


def cosine_with_warmup(step: int, steps: int, warmup_share: float) -> float:
    """The factor on every group's learning rate at `step` of `steps`: linear up, then a half cosine to zero."""
    warmup = max(1, round(warmup_share * steps))
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def set_learning_rates(engine: deepspeed.DeepSpeedEngine, groups: list[TrainableGroup], factor: float) -> None:
    for slot, group in zip(engine.optimizer.param_groups, groups, strict=True):
        slot["lr"] = group.lr * factor


def save_state(engine: deepspeed.DeepSpeedEngine, folder: Path, step: int, rank: int) -> None:
    """Write what a resumed run needs, on every rank; the frozen base is not part of it."""
    engine.save_checkpoint(str(folder), tag=STATE, client_state={"step": step}, exclude_frozen_parameters=True)
    if rank == 0:
        write_manifest(folder / STATE, step=step)


def load_state(engine: deepspeed.DeepSpeedEngine, folder: Path) -> int:
    """Restore a state and return the step it was saved after. Raises CheckpointError where it is incomplete."""
    verify_manifest(folder / STATE)
    path, client_state = engine.load_checkpoint(str(folder), tag=STATE, load_module_strict=False)
    assert path is not None, f"DeepSpeed found no checkpoint in {folder}"
    return int(client_state["step"])


def full_tensor(parameter: Tensor) -> Tensor:
    """A parameter's whole value on this rank, whatever the ZeRO stage."""
    with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
        return parameter.detach().clone().cpu()


def export(engine: deepspeed.DeepSpeedEngine, processor: M3DiffProcessor, folder: Path, base: Path, rank: int) -> None:
    """Write the trained model with its adapters folded in and, in `adapters/`, what trained alone.

    Every rank calls it: ZeRO 3 brings the weights together.
    """
    model = engine.module
    partitioned = [p for p in model.parameters() if hasattr(p, "ds_id")]
    with deepspeed.zero.GatheredParameters(partitioned, enabled=bool(partitioned)):
        if rank:
            return
        folder.mkdir(parents=True, exist_ok=True)
        if isinstance(model, PeftModel):
            (folder / ADAPTERS).mkdir(exist_ok=True)
            save_adapters(model, folder / ADAPTERS, base)
            processor.save_pretrained(folder / ADAPTERS)
        merge(model).save_pretrained(folder)
        processor.save_pretrained(folder)
        write_manifest(folder, base=os.path.relpath(base, folder))
