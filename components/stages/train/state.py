"""Checkpoints that a run resumes from, on any number of workers, with any micro-batch and ZeRO stage.

DeepSpeed's own ZeRO checkpoints load on as many workers as wrote them and no other number. These hold whole tensors by
parameter name: the fp32 master weights and AdamW's two moments, in safetensors, next to AdamW's count of steps, the
curves and a manifest of hashes. The first worker writes while the next steps are taken; the frozen base is no part of
it. Folders are called `step-<steps done>`.
"""

import json
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Set
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.utils import (
    lazy_init_hp_params_optimizer_state,
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    set_full_hp_param,
)
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from m3diff.models.checkpoint import CheckpointError, verify_manifest, write_manifest
from m3diff.models.tuning import TrainableGroup
from m3diff.records.files import write_atomic
from m3diff.stages.train.attempts import full_disk_explained
from m3diff.stages.train.job import CURVES
from m3diff.stages.train.progress import Curve

logger = logging.getLogger(__name__)

MOMENTS = ("exp_avg", "exp_avg_sq")
FILES = {f"{moment or 'weights'}.safetensors": moment for moment in (None, *MOMENTS)}
OPTIMIZER, VALIDATION, PREFIX = "optimizer.json", "validation.json", "step-"

NEWEST, BEST = 2, 1
"""Checkpoints that are kept: the newest, and of those with a CIDEr the best."""


class MasterState:
    """Fp32 weights and AdamW moments of an engine, whole, whatever the ZeRO stage. Every worker calls each method."""

    def __init__(self, engine: deepspeed.DeepSpeedEngine) -> None:
        self.engine, self.optimizer = engine, engine.optimizer
        self.parameters = {name: p for name, p in engine.module.named_parameters() if p.requires_grad}
        self.whole = _whole_masters(engine)  # where each worker holds them so, without ZeRO

    def get(self, parameter: nn.Parameter, moment: str | None = None) -> Tensor:
        """Return the whole fp32 weight, or one of MOMENTS of it."""
        if parameter in self.whole:
            master = self.whole[parameter]
            return (self.engine.basic_optimizer.state[master][moment] if moment else master).detach()
        found = safe_get_full_optimizer_state(parameter, moment) if moment else safe_get_full_fp32_param(parameter)
        assert found is not None, "DeepSpeed holds no state of a parameter that trains"
        return found

    def set(self, parameter: nn.Parameter, value: Tensor, moment: str | None = None) -> None:
        if parameter in self.whole:
            self.get(parameter, moment).copy_(value)
        elif hasattr(parameter, "ds_id"):
            self._set_partition(parameter, value, moment)
        else:
            set_full_hp_param(parameter, value, moment)

    def _set_partition(self, parameter: Any, value: Tensor, moment: str | None) -> None:
        """Set this worker's part under ZeRO 3, zeros behind the last element, where `safe_set_full_*` fails."""
        size = parameter.ds_tensor.numel()
        rank = torch.distributed.get_rank()
        part = torch.zeros(size)
        mine = value.flatten()[rank * size : (rank + 1) * size]
        part[: mine.numel()] = mine
        self.optimizer.set_local_hp_param(part, parameter, moment)

    def link(self) -> None:
        """Tell each parameter where its moments are, under ZeRO 1 and 2. DeepSpeed does so after the first group's
        first step, before the other groups have any."""
        if hasattr(self.optimizer, "single_partition_of_fp32_groups"):
            groups = zip(self.optimizer.bit16_groups, self.optimizer.single_partition_of_fp32_groups, strict=True)
            for parameters, flat in groups:
                lazy_init_hp_params_optimizer_state(parameters, flat, self.engine.basic_optimizer.state)

    def optimizer_steps(self) -> float:
        """Return AdamW's own count, by which it corrects its moments."""
        return float(next(iter(self.engine.basic_optimizer.state.values()))["step"])

    def start_moments(self, steps: float) -> None:
        """Set moments of zero, as AdamW makes them at its first step, and its count of steps: fused, it reads the count
        on the weights' device."""
        masters = [master for group in self.engine.basic_optimizer.param_groups for master in group["params"]]
        for flat in getattr(self.optimizer, "fp32_partitioned_groups_flat", masters):
            moments = {name: torch.zeros_like(flat) for name in MOMENTS}
            count = torch.tensor(steps, dtype=torch.float32, device=flat.device)
            self.engine.basic_optimizer.state[flat] = {"step": count, **moments}
        self.link()


def _whole_masters(engine: deepspeed.DeepSpeedEngine) -> dict[nn.Parameter, Tensor]:
    optimizer = engine.optimizer
    if isinstance(optimizer, FP16_UnfusedOptimizer):  # ZeRO 0 in bf16
        groups = zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True)
        return {p: master for low, high in groups for p, master in zip(low, high, strict=True)}
    if isinstance(optimizer, torch.optim.Optimizer):  # ZeRO 0 in fp32
        return {p: p for group in optimizer.param_groups for p in group["params"]}
    return {}


class Writer:
    """A thread that writes beside the next steps, in the order of what was submitted.

    After an error nothing more is written, and every later call raises it. Leaving a `with` waits for what is left.

    Args:
        require: called before each work; what it raises is such an error.
    """

    def __init__(self, require: Callable[[], object] = lambda: None) -> None:
        self._require = require
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="writer")
        self._last: Future[None] | None = None

    def submit(self, work: Callable[..., object], *arguments: Any) -> None:
        """Have `work(*arguments)` done; the arguments belong to the thread from now on."""
        if self._last is not None and self._last.done():
            self.finish()
        self._last = self._thread.submit(self._do, self._last, work, *arguments)

    def finish(self) -> None:
        """Wait until everything is written."""
        if self._last is not None:
            self._last.result()

    def _do(self, before: Future[None] | None, work: Callable[..., object], *arguments: Any) -> None:
        if before is not None:
            before.result()  # its error is this one's, too
        self._require()
        work(*arguments)

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, _: object, raised: BaseException | None, __: TracebackType | None) -> None:
        self._thread.shutdown(wait=True)
        error = self._last and self._last.exception()
        if raised is None:
            self.finish()
        elif error not in (None, raised):  # the run's own error goes on; this one would be lost
            logger.warning("train: nor was the newest checkpoint written (%s)", error)


def trained_names(module: nn.Module, groups: Iterable[TrainableGroup]) -> frozenset[str]:
    """Return the names of the optimizer's parameters, whatever each says of its own gradient."""
    trained = {id(parameter) for group in groups for parameter in group.parameters}
    return frozenset(name for name, parameter in module.named_parameters() if id(parameter) in trained)


def save_state(
    engine: deepspeed.DeepSpeedEngine,
    trained: frozenset[str],
    run_dir: Path,
    step: int,
    rank: int,
    curve: Curve,
    writer: Writer,
) -> Path:
    """Take the state after `step` steps, whole, and have the first worker's `writer` write it as `write_state` does.

    Waits for what `writer` has still to write, so that no more than one state is held beside the engine's.
    """
    if rank == 0:
        writer.finish()
    state = MasterState(engine)
    state.link()
    tensors: dict[str, dict[str, Tensor]] = {file: {} for file in FILES}
    for file, moment in FILES.items():
        for name, parameter in state.parameters.items():
            whole = state.get(parameter, moment)
            if rank == 0:  # a copy on a CPU too, where training goes on in place
                tensors[file][name] = whole.to("cpu", copy=True).contiguous()
    if rank == 0:
        writer.submit(write_state, run_dir, step, trained, tensors, curve.copy(), state.optimizer_steps())
    return folder_of(run_dir, step)


def write_state(
    run_dir: Path,
    step: int,
    trained: frozenset[str],
    tensors: Mapping[str, Mapping[str, Tensor]],
    curve: Curve,
    optimizer_steps: float,
) -> None:
    """Write a state, read it back, and only then remove all but the newest two checkpoints and the best.

    Args:
        trained: the names of what trains.
        tensors: by file and by parameter.

    Raises:
        CheckpointError: what was written does not read back, or has not the names of what trains; nothing older was
            removed.
        NotWrittenError: the disk is full; nothing older was removed.
    """
    folder, writing = folder_of(run_dir, step), run_dir / "writing"
    shutil.rmtree(writing, ignore_errors=True)
    with full_disk_explained(writing, sum(t.nbytes for named in tensors.values() for t in named.values())):
        writing.mkdir(parents=True)
        for file, named in tensors.items():
            save_file(dict(named), writing / file)
        curve.write(writing / CURVES)
        write_atomic(writing / OPTIMIZER, json.dumps({"steps": optimizer_steps}) + "\n")
        write_manifest(writing, step=step)
        for path in (*writing.iterdir(), writing):
            _flush(path)
    shutil.rmtree(folder, ignore_errors=True)
    writing.rename(folder)
    _flush(run_dir)
    verify_manifest(folder)
    _check_names(folder, trained)
    keep = {*checkpoints(run_dir)[-NEWEST:], *best_first(run_dir)[:BEST]}
    for older in checkpoints(run_dir):
        if older not in keep:
            shutil.rmtree(older)


def _check_names(folder: Path, trained: Set[str]) -> None:
    """Raise CheckpointError where a file has other parameters than those that train."""
    for name in FILES:
        with safe_open(folder / name, framework="pt") as file:
            odd = sorted(set(file.keys()) ^ trained)
        if odd:
            raise CheckpointError(f"{folder / name}: {len(odd)} parameters are not those that train: {odd[:3]}")


def _flush(path: Path) -> None:
    """Have a file, or the names in a folder, on disk before what follows."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def load_state(engine: deepspeed.DeepSpeedEngine, folder: Path) -> int:
    """Restore a verified checkpoint on every worker; return the number of steps it was saved after.

    Raises:
        CheckpointError: it holds other parameters than the model trains, or no count of steps.
    """
    state = MasterState(engine)
    _check_names(folder, state.parameters.keys())
    count = folder / OPTIMIZER
    if not count.is_file():
        raise CheckpointError(
            f"{folder}: has no {OPTIMIZER}, AdamW's count of steps, so an earlier version of m3diff wrote it; remove "
            f"{folder.parent}, and the run starts over"
        )
    state.start_moments(float(json.loads(count.read_text())["steps"]))
    for file, moment in FILES.items():
        with safe_open(folder / file, framework="pt") as tensors:
            for name, parameter in state.parameters.items():
                value = tensors.get_tensor(name)
                state.set(parameter, value.to(state.get(parameter).device), moment)
                if moment is None:
                    _set_weight(parameter, value)
    return step_of(folder)


@torch.no_grad()
def _set_weight(parameter: nn.Parameter, value: Tensor) -> None:
    """Set the weight that the model computes with, in its own precision."""
    partitioned = hasattr(parameter, "ds_id")
    with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0, enabled=partitioned):
        if not partitioned or torch.distributed.get_rank() == 0:
            parameter.data.copy_(value)


def folder_of(run_dir: Path, step: int) -> Path:
    return run_dir / f"{PREFIX}{step:08d}"


def step_of(folder: Path) -> int:
    return int(folder.name.removeprefix(PREFIX))


def checkpoints(run_dir: Path) -> list[Path]:
    """Return the folders of checkpoints, oldest first."""
    return sorted(path for path in run_dir.glob(f"{PREFIX}*") if path.is_dir())


def latest_valid_checkpoint(run_dir: Path) -> Path | None:
    """Return the newest checkpoint whose manifest verifies. Newer ones are removed; a warning names both."""
    damaged: list[tuple[Path, Exception]] = []
    valid = None
    for folder in reversed(checkpoints(run_dir)):
        fault = _fault(folder)
        if fault is None:
            valid = folder
            break
        damaged.append((folder, fault))
    then = f"going on from {valid.name}" if valid else "no older one is there, so the run starts over"
    for folder, fault in damaged:
        why = str(fault).partition(";")[0]  # a remedy is of no use for what is removed
        logger.warning("train: checkpoint %s is damaged and removed (%s); %s", folder.name, why, then)
        shutil.rmtree(folder)
    return valid


def _fault(folder: Path) -> Exception | None:
    try:
        verify_manifest(folder)
    except (CheckpointError, ValueError, KeyError) as error:
        return error
    return None


def read_validation(folder: Path) -> dict[str, float] | None:
    """Return the scores of the validation after a checkpoint; None where the run ended between the two."""
    file = folder / VALIDATION
    return json.loads(file.read_text()) if file.is_file() else None


def best_first(run_dir: Path) -> list[Path]:
    """Return the checkpoints with a CIDEr, highest first; of equal ones the earlier."""
    scores = {folder: (read_validation(folder) or {}).get("val_cider") for folder in checkpoints(run_dir)}
    scored = {folder: score for folder, score in scores.items() if score is not None}
    return sorted(scored, key=lambda folder: (-scored[folder], step_of(folder)))


def checkpoint_to_export(run_dir: Path, export: str) -> Path | None:
    """Return the checkpoint whose weights become the output: None for the last, which the engine holds."""
    if export == "last":
        return None
    for folder in best_first(run_dir):
        fault = _fault(folder)
        if fault is None:
            return folder
        logger.warning("train: the best checkpoint %s is damaged (%s); the next best is exported", folder.name, fault)
    logger.warning("train: no checkpoint has a CIDEr, so the last is exported; has the mixture a validation split?")
    return None
