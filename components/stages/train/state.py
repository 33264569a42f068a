"""Checkpoints that a run resumes from, on any number of workers, with any micro-batch and ZeRO stage.

DeepSpeed's own ZeRO checkpoints load on as many workers as wrote them and no other number. These hold whole tensors by
parameter name: the fp32 master weights and AdamW's two moments, in safetensors, next to the curves and a manifest of
hashes. The first worker writes them; the frozen base is no part of it. Folders are called `step-<steps done>`, which is
AdamW's count of steps too.
"""

import csv
import io
import json
import logging
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
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
from m3diff.records.files import flush_to_disk, write_atomic
from m3diff.stages.train.job import CURVES

logger = logging.getLogger(__name__)

MOMENTS = ("exp_avg", "exp_avg_sq")
FILES = {f"{moment or 'weights'}.safetensors": moment for moment in (None, *MOMENTS)}
VALIDATION, PREFIX = "validation.json", "step-"

NEWEST, BEST = 2, 1  # checkpoints that are kept: the newest, and of those with a CIDEr the best


class Curve:
    """The run's curves, a row of text per step; what a step does not have stays empty. They travel with each
    checkpoint, so that a resumed run loses none."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names, self.rows = tuple(names), list[dict[str, str]]()

    def add(self, values: Mapping[str, float | None]) -> None:
        self.rows.append({name: "" for name in self.names})
        self.fill(values)

    def fill(self, values: Mapping[str, float | None]) -> None:
        """Fill in more values of the last row."""
        self.rows[-1] |= {name: f"{value:.6g}" for name, value in values.items() if value is not None}

    def last(self, column: str) -> float:
        """Return the last value of a column, NaN where it has none."""
        return next((float(row[column]) for row in reversed(self.rows) if row[column]), float("nan"))

    def latest(self, wanted: Iterable[str]) -> dict[str, float]:
        """Return `step` and the columns of the last row that has a value in all of them; nothing where no row has."""
        wanted = ("step", *wanted)
        found = next((row for row in reversed(self.rows) if all(row[name] for name in wanted)), None)
        return {name: float(found[name]) for name in wanted} if found else {}

    def read(self, path: Path) -> None:
        """Take the rows of an earlier part of the run; columns that are not this run's are left out."""
        with path.open(newline="", encoding="utf-8") as file:
            self.rows = [{name: row.get(name, "") for name in self.names} for row in csv.DictReader(file)]

    def write(self, path: Path) -> None:
        text = io.StringIO()
        writer = csv.DictWriter(text, self.names, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.rows)
        write_atomic(path, text.getvalue())


class MasterState:
    """Fp32 weights and AdamW moments of an engine, whole, whatever the ZeRO stage. Every worker calls each method.

    Moments are those that the engine has when this is made: after a step, or after `start_moments`.
    """

    def __init__(self, engine: deepspeed.DeepSpeedEngine) -> None:
        self.engine, optimizer = engine, engine.optimizer
        self.parameters = {name: p for name, p in engine.module.named_parameters() if p.requires_grad}
        self.whole: dict[nn.Parameter, Tensor] = {}  # masters that each worker holds so, without ZeRO
        if isinstance(optimizer, FP16_UnfusedOptimizer):  # ZeRO 0 in bf16
            for low, high in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
                self.whole |= zip(low, high, strict=True)
        elif isinstance(optimizer, torch.optim.Optimizer):  # ZeRO 0 in fp32
            self.whole = {p: p for group in optimizer.param_groups for p in group["params"]}
        elif hasattr(optimizer, "single_partition_of_fp32_groups") and engine.basic_optimizer.state:
            # ZeRO 1 and 2: DeepSpeed links a parameter to its moments after the first group's first step, before the
            # other groups have any
            for low, flat in zip(optimizer.bit16_groups, optimizer.single_partition_of_fp32_groups, strict=True):
                lazy_init_hp_params_optimizer_state(low, flat, engine.basic_optimizer.state)

    def get(self, parameter: nn.Parameter, moment: str | None = None) -> Tensor:
        """Return the whole fp32 weight, or one of MOMENTS of it."""
        if parameter in self.whole:
            master = self.whole[parameter]
            return (self.engine.basic_optimizer.state[master][moment] if moment else master).detach()
        found = safe_get_full_optimizer_state(parameter, moment) if moment else safe_get_full_fp32_param(parameter)
        assert found is not None, "DeepSpeed holds no state of a parameter that trains"
        return found

    @torch.no_grad()
    def set(self, parameter: Any, value: Tensor, moment: str | None = None) -> None:
        """Set the fp32 weight, and the one that the model computes with, or a moment."""
        partitioned, rank = hasattr(parameter, "ds_id"), torch.distributed.get_rank()
        if parameter in self.whole:
            self.get(parameter, moment).copy_(value)
        elif not partitioned:
            set_full_hp_param(parameter, value, moment)
        else:  # ZeRO 3, where `safe_set_full_*` fails: this worker's part, zeros behind the last element
            size = parameter.ds_tensor.numel()
            mine, part = value.flatten()[rank * size : (rank + 1) * size], torch.zeros(size)
            part[: mine.numel()] = mine
            self.engine.optimizer.set_local_hp_param(part, parameter, moment)
        if moment is None:
            with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0, enabled=partitioned):
                if not partitioned or rank == 0:
                    parameter.data.copy_(value)


def start_moments(engine: deepspeed.DeepSpeedEngine, steps: int) -> None:
    """Set moments of zero, as AdamW makes them at its first step, and its count of steps: fused, it reads the count on
    the weights' device."""
    adamw = engine.basic_optimizer
    masters = [master for group in adamw.param_groups for master in group["params"]]
    for flat in getattr(engine.optimizer, "fp32_partitioned_groups_flat", masters):
        count = torch.tensor(float(steps), device=flat.device)
        adamw.state[flat] = {"step": count, **{name: torch.zeros_like(flat) for name in MOMENTS}}


def whole_state(engine: deepspeed.DeepSpeedEngine, keep: bool) -> dict[str, dict[str, Tensor]]:
    """Return the state by file and parameter, on the CPU, on a worker that is to `keep` it. Every worker calls this."""
    state = MasterState(engine)
    tensors: dict[str, dict[str, Tensor]] = {file: {} for file in FILES}
    for file, moment in FILES.items():
        for name, parameter in state.parameters.items():
            whole = state.get(parameter, moment)
            if keep:
                tensors[file][name] = whole.cpu().contiguous()
    return tensors


def write_state(run_dir: Path, step: int, tensors: Mapping[str, Mapping[str, Tensor]], curve: Curve) -> None:
    """Write a state, read it back, and only then remove all but the newest two checkpoints and the best.

    Args:
        tensors: by file and by parameter.

    Raises:
        CheckpointError: what was written does not read back; nothing older was removed.
    """
    folder, writing = folder_of(run_dir, step), run_dir / "writing"
    shutil.rmtree(writing, ignore_errors=True)
    writing.mkdir(parents=True)
    for file, named in tensors.items():
        save_file(dict(named), writing / file)
    curve.write(writing / CURVES)
    write_manifest(writing, step=step)
    for path in (*writing.iterdir(), writing):
        _flush(path)
    shutil.rmtree(folder, ignore_errors=True)
    writing.rename(folder)
    _flush(run_dir)
    verify_manifest(folder)
    keep = {*checkpoints(run_dir)[-NEWEST:], *best_first(run_dir)[:BEST]}
    for older in checkpoints(run_dir):
        if older not in keep:
            shutil.rmtree(older)


def _flush(path: Path) -> None:
    """Have a file, or the names in a folder, on disk before what follows."""
    handle = os.open(path, os.O_RDONLY)
    try:
        flush_to_disk(handle)
    finally:
        os.close(handle)


def load_state(engine: deepspeed.DeepSpeedEngine, folder: Path) -> int:
    """Restore a verified checkpoint on every worker; return the number of steps it was saved after.

    Raises:
        CheckpointError: it holds other parameters than the model trains.
    """
    start_moments(engine, step_of(folder))
    state = MasterState(engine)
    for file, moment in FILES.items():
        with safe_open(folder / file, framework="pt") as tensors:
            if odd := sorted({*tensors.keys()} ^ state.parameters.keys()):
                raise CheckpointError(f"{folder / file}: {len(odd)} parameters are not those that train: {odd[:3]}")
            for name, parameter in state.parameters.items():
                state.set(parameter, tensors.get_tensor(name).to(state.get(parameter).device), moment)
    return step_of(folder)


def folder_of(run_dir: Path, step: int) -> Path:
    return run_dir / f"{PREFIX}{step:08d}"


def step_of(folder: Path) -> int:
    return int(folder.name.removeprefix(PREFIX))


def checkpoints(run_dir: Path) -> list[Path]:
    """Return the folders of checkpoints, oldest first."""
    return sorted(path for path in run_dir.glob(f"{PREFIX}*") if path.is_dir())


def latest_valid_checkpoint(run_dir: Path) -> Path | None:
    """Return the newest checkpoint whose manifest verifies. Newer ones are removed, with a warning."""
    for folder in reversed(checkpoints(run_dir)):
        if _is_whole(folder, "it is removed, and the run goes on from an older one or starts over"):
            return folder
        shutil.rmtree(folder)
    return None


def _is_whole(folder: Path, then: str) -> bool:
    """Return whether a checkpoint's manifest verifies; warn where it does not."""
    try:
        verify_manifest(folder)
    except (ValueError, KeyError) as error:
        fault = str(error).partition(";")[0]  # a remedy is of no use here
        logger.warning("train: checkpoint %s is damaged (%s); %s", folder.name, fault, then)
        return False
    return True


def read_validation(folder: Path) -> dict[str, float] | None:
    """Return the scores of the validation after a checkpoint; None where the run ended between the two."""
    file = folder / VALIDATION
    return json.loads(file.read_text()) if file.is_file() else None


def best_first(run_dir: Path) -> list[Path]:
    """Return the checkpoints with a CIDEr, highest first; of equal ones the earlier."""
    scores: dict[Path, Any] = {each: (read_validation(each) or {}).get("val_cider") for each in checkpoints(run_dir)}
    return sorted((each for each, score in scores.items() if score is not None), key=lambda each: -scores[each])


def checkpoint_to_export(run_dir: Path, export: str) -> Path | None:
    """Return the checkpoint whose weights become the output: None for the last, which the engine holds."""
    if export == "last":
        return None
    best = next((folder for folder in best_first(run_dir) if _is_whole(folder, "the next best is exported")), None)
    if best is None:
        logger.warning("train: no checkpoint has a CIDEr, so the last is exported; has the mixture a validation split?")
    return best
