"""Save and load the checkpoints of a run.

A run can resume from them with any number of workers, micro-batch size and ZeRO stage. DeepSpeed's own ZeRO checkpoints
can only be loaded on the number of workers that wrote them. The checkpoints here store whole tensors by parameter name
in safetensors files: the fp32 master weights and AdamW's two moments, without the frozen base. Each checkpoint also has
the curves and a manifest of file hashes. The first worker writes them. Folders are named `step-<steps done>`; AdamW's
step count is the same number.
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
from m3diff.records.errors import CodedError
from m3diff.records.files import flush_to_disk, write_atomic
from m3diff.stages.train.job import CURVES_FILE
from m3diff.stages.train.params import MOMENTS

logger = logging.getLogger(__name__)

# Tensor files of a checkpoint, and the moment that each file holds; None stands for the weights
MOMENT_BY_FILE: dict[str, str | None] = {"weights.safetensors": None}
MOMENT_BY_FILE |= {f"{moment}.safetensors": moment for moment in MOMENTS}

VALIDATION_FILE = "validation.json"
FOLDER_PREFIX = "step-"

# Number of checkpoints to keep: the newest two, and the one with the highest CIDEr
NEWEST_TO_KEEP = 2
BEST_TO_KEEP = 1

MAX_EXAMPLES = 3  # maximum number of parameter names in an error message


class Curve:
    """The curves of a run: one row of text values per step, with an empty string for each missing value.

    The curves are saved with each checkpoint, so that a resumed run keeps all rows.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self.rows = list[dict[str, str]]()

    def add(self, values: Mapping[str, float | None]) -> None:
        """Add a row with the given values by column name."""
        self.rows.append(dict.fromkeys(self.names, ""))
        self.set_values(values)

    def set_values(self, values: Mapping[str, float | None]) -> None:
        """Set values in the last row by column name. Values that are None are left out."""
        self.rows[-1] |= {name: f"{value:.6g}" for name, value in values.items() if value is not None}

    def last_value(self, column: str) -> float:
        """Return the last value of a column, or NaN if the column is empty or missing."""
        for row in reversed(self.rows):
            if row.get(column):
                return float(row[column])
        return float("nan")

    def last_values(self, columns: Iterable[str]) -> dict[str, float]:
        """Return the values of `step` and of the columns in the last row that has all of them.

        Return an empty dictionary if there is no such row.
        """
        names = ("step", *columns)
        for row in reversed(self.rows):
            if all(row[name] for name in names):
                return {name: float(row[name]) for name in names}
        return {}

    def read(self, path: Path) -> None:
        """Replace the rows with the rows of a file. Columns that this run does not have are dropped."""
        with path.open(newline="", encoding="utf-8") as file:
            self.rows = [{name: row.get(name, "") for name in self.names} for row in csv.DictReader(file)]

    def write(self, path: Path) -> None:
        """Write the rows as CSV. The file is replaced atomically."""
        text = io.StringIO()
        writer = csv.DictWriter(text, self.names, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.rows)
        write_atomic(path, text.getvalue())


class MasterState:
    """Reads and writes the fp32 weights and AdamW moments of an engine as whole tensors, for every ZeRO stage.

    Every worker must call each method. Create the object only when the optimizer has moments: after a step, or after
    `start_moments`.

    Attributes:
        parameters: trained parameters by name.
        masters: fp32 weight of each parameter. Empty with ZeRO, because no worker then holds all weights.
    """

    def __init__(self, engine: deepspeed.DeepSpeedEngine) -> None:
        self.engine = engine
        optimizer = engine.optimizer
        self.parameters = {name: p for name, p in engine.module.named_parameters() if p.requires_grad}
        self.masters: dict[nn.Parameter, Tensor] = {}
        if isinstance(optimizer, FP16_UnfusedOptimizer):  # ZeRO 0 in bf16
            for parameters, fp32_weights in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
                self.masters |= zip(parameters, fp32_weights, strict=True)
        elif isinstance(optimizer, torch.optim.Optimizer):  # ZeRO 0 in fp32
            self.masters = {parameter: parameter for parameter in self.parameters.values()}
        elif hasattr(optimizer, "single_partition_of_fp32_groups") and engine.basic_optimizer.state:
            # ZeRO 1 and 2: DeepSpeed 0.19 links parameters to their moments after the first step of the first group,
            # when the other groups do not have moments yet
            flat_weights = optimizer.single_partition_of_fp32_groups
            for parameters, flat in zip(optimizer.bit16_groups, flat_weights, strict=True):
                lazy_init_hp_params_optimizer_state(parameters, flat, engine.basic_optimizer.state)

    def get_tensor(self, parameter: nn.Parameter, moment: str | None = None) -> Tensor:
        """Return the whole tensor of a parameter's fp32 weight or, if `moment` is given, of that moment."""
        if parameter in self.masters:
            master = self.masters[parameter]
            tensor = self.engine.basic_optimizer.state[master][moment] if moment else master
            return tensor.detach()
        tensor = safe_get_full_optimizer_state(parameter, moment) if moment else safe_get_full_fp32_param(parameter)
        assert tensor is not None, "DeepSpeed has no state of a trained parameter"
        return tensor

    @torch.no_grad()
    def set_tensor(self, parameter: Any, value: Tensor, moment: str | None = None) -> None:
        """Set a parameter's `moment`.

        If `moment` is None, set the fp32 weight and the weight used in the forward pass instead.
        """
        is_partitioned = hasattr(parameter, "ds_id")  # ZeRO 3
        rank = torch.distributed.get_rank()
        if parameter in self.masters:
            self.get_tensor(parameter, moment).copy_(value)
        elif not is_partitioned:
            set_full_hp_param(parameter, value, moment)
        else:
            # DeepSpeed's `safe_set_full_*` functions fail with ZeRO 3. The end of this worker's partition is padded
            # with zeros.
            size = parameter.ds_tensor.numel()
            own_values = value.flatten()[rank * size : (rank + 1) * size]
            own_part = torch.zeros(size)
            own_part[: own_values.numel()] = own_values
            self.engine.optimizer.set_local_hp_param(own_part, parameter, moment)
        if moment is None:
            with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0, enabled=is_partitioned):
                if not is_partitioned or rank == 0:
                    parameter.data.copy_(value)


def start_moments(engine: deepspeed.DeepSpeedEngine, steps: int) -> None:
    """Set AdamW's moments to zero, as its first step does, and its step count to `steps`."""
    adamw = engine.basic_optimizer
    weights: list[Tensor] = []
    for group in adamw.param_groups:
        weights += group["params"]
    # ZeRO 3 keeps its flat weights in a separate attribute
    for weight in getattr(engine.optimizer, "fp32_partitioned_groups_flat", weights):
        # fused AdamW requires the count on the same device as the weights
        count = torch.tensor(float(steps), device=weight.device)
        moments = {name: torch.zeros_like(weight) for name in MOMENTS}
        adamw.state[weight] = {"step": count, **moments}


def gather_state(engine: deepspeed.DeepSpeedEngine, keep: bool) -> dict[str, dict[str, Tensor]]:
    """Return the tensors of a checkpoint on the CPU, by file and parameter name.

    Every worker must call this function, because with ZeRO each worker holds a part of the tensors.

    Args:
        engine: the engine whose weights and moments are gathered.
        keep: whether this worker gets the tensors. If false, the dictionary of each file is empty.
    """
    state = MasterState(engine)
    tensors: dict[str, dict[str, Tensor]] = {file: {} for file in MOMENT_BY_FILE}
    for file, moment in MOMENT_BY_FILE.items():
        for name, parameter in state.parameters.items():
            tensor = state.get_tensor(parameter, moment)
            if keep:
                tensors[file][name] = tensor.cpu().contiguous()
    return tensors


def write_state(run_dir: Path, step: int, tensors: Mapping[str, Mapping[str, Tensor]], curve: Curve) -> None:
    """Write and verify a checkpoint, then remove all checkpoints except the newest two and the best.

    Args:
        tensors: tensors by file and parameter.

    Raises:
        CheckpointError: the new checkpoint cannot be verified. No older checkpoint was removed.
    """
    folder = folder_of(run_dir, step)
    temporary = run_dir / "writing"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    for file, file_tensors in tensors.items():
        save_file(dict(file_tensors), temporary / file)
    curve.write(temporary / CURVES_FILE)
    write_manifest(temporary, step=step)
    for path in (*temporary.iterdir(), temporary):
        _flush(path)
    shutil.rmtree(folder, ignore_errors=True)
    temporary.rename(folder)
    _flush(run_dir)
    verify_manifest(folder)
    newest_checkpoints = checkpoints(run_dir)[-NEWEST_TO_KEEP:]
    best_checkpoints = checkpoints_by_score(run_dir)[:BEST_TO_KEEP]
    for checkpoint in checkpoints(run_dir):
        if checkpoint not in newest_checkpoints and checkpoint not in best_checkpoints:
            shutil.rmtree(checkpoint)


def _flush(path: Path) -> None:
    """Flush a file, or the entries of a folder, to the disk, so that they survive a power failure."""
    handle = os.open(path, os.O_RDONLY)
    try:
        flush_to_disk(handle)
    finally:
        os.close(handle)


def load_state(engine: deepspeed.DeepSpeedEngine, folder: Path) -> int:
    """Restore a verified checkpoint on every worker and return the number of steps it was saved after.

    Raises:
        CheckpointError: the checkpoint's parameters differ from the trained parameters of the model.
    """
    step = step_of(folder)
    start_moments(engine, step)
    state = MasterState(engine)
    for file, moment in MOMENT_BY_FILE.items():
        with safe_open(folder / file, framework="pt") as tensors:
            unmatched_names = sorted({*tensors.keys()} ^ state.parameters.keys())
            if unmatched_names:
                raise CheckpointError(
                    "train.other_parameters",
                    path=folder / file,
                    value=len(unmatched_names),
                    names=unmatched_names[:MAX_EXAMPLES],
                )
            for name, parameter in state.parameters.items():
                device = state.get_tensor(parameter).device
                state.set_tensor(parameter, tensors.get_tensor(name).to(device), moment)
    return step


def folder_of(run_dir: Path, step: int) -> Path:
    """Return the folder of the checkpoint that is saved after `step` steps."""
    return run_dir / f"{FOLDER_PREFIX}{step:08d}"


def step_of(folder: Path) -> int:
    """Return the number of steps after which a checkpoint was saved, as given by its folder name."""
    return int(folder.name.removeprefix(FOLDER_PREFIX))


def checkpoints(run_dir: Path) -> list[Path]:
    """Return the checkpoint folders, oldest first."""
    return sorted(path for path in run_dir.glob(f"{FOLDER_PREFIX}*") if path.is_dir())


def latest_valid_checkpoint(run_dir: Path) -> Path | None:
    """Return the newest intact checkpoint, or None. Damaged checkpoints that are newer are removed with a warning."""
    for folder in reversed(checkpoints(run_dir)):
        if _is_intact(folder, "it is removed, and the run continues from an older checkpoint or starts again"):
            return folder
        shutil.rmtree(folder)
    return None


def _is_intact(folder: Path, consequence: str) -> bool:
    """Return whether a checkpoint matches its manifest. If not, log a warning that ends with `consequence`."""
    try:
        verify_manifest(folder)
    except (ValueError, KeyError) as error:
        cause = str(error)
        if isinstance(error, CodedError):  # leave out the remedy, which does not apply to checkpoints of a run
            cause = error.fault.summary
        logger.warning("train: checkpoint %s is damaged (%s); %s", folder.name, cause, consequence)
        return False
    return True


def read_validation(folder: Path) -> dict[str, float] | None:
    """Return the validation scores of a checkpoint, or None if the run ended before it was validated."""
    file = folder / VALIDATION_FILE
    return json.loads(file.read_text()) if file.is_file() else None


def checkpoints_by_score(run_dir: Path) -> list[Path]:
    """Return the checkpoints whose answers have a score, best first. Equal scores are sorted by step.

    The score is the CIDEr of captions or, if the validation split has no captions, the share of answers that match a
    reference.
    """
    scores: dict[Path, float] = {}
    for folder in checkpoints(run_dir):
        validation = read_validation(folder) or {}
        score = validation.get("val_cider", validation.get("val_match"))
        if score is not None:
            scores[folder] = score
    return sorted(scores, key=lambda folder: -scores[folder])


def checkpoint_to_export(run_dir: Path, export: str) -> Path | None:
    """Return the checkpoint to export, or None to export the engine's current weights.

    The result is None if `export` is `last` or if no intact checkpoint has a score.
    """
    if export == "last":
        return None
    for folder in checkpoints_by_score(run_dir):
        if _is_intact(folder, "the checkpoint with the next best score is exported"):
            return folder
    logger.warning(
        "train: no checkpoint has a score, so the last one is exported; check that the mixture has a validation split"
    )
    return None
