"""Fine-tune a model on the mixture: Ray Train around the loop of `loop.py`, or the loop alone (`compute.workers: 0`).

A run is named by the hash of what decides its weights (samples, parameters, base, code), so a killed run goes on from
its newest valid checkpoint, also after `compute` was changed, and nothing else ever does. Run: `m3diff train`.
"""

import fcntl
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from m3diff.models import FAMILIES
from m3diff.models.device import Device
from m3diff.provenance.code import key_of
from m3diff.records.files import StageReport, sha256, sha256_of_folder, write_atomic
from m3diff.settings.compute import Compute
from m3diff.settings.section import ParamsError
from m3diff.stages.train.attempts import TERMINATED, Run, StoppedError, stop_on_sigterm, with_retries
from m3diff.stages.train.job import (
    CURVES,
    DatasetFilter,
    Job,
    Runtime,
    choose_accelerator,
    of_alignment,
    only_worker,
)
from m3diff.stages.train.params import Train

if TYPE_CHECKING:
    from m3diff.models.family import Settings

SPEED = ("seconds", "captions_per_s", "waiting_share", "device_hours", "device", "devices")
"""Figures of all attempts of a run. In no report: a resumed run's is that of one that was left alone."""

ALIGNMENT = "alignment"
"""The alignment's folder in the run's."""


class TrainReport(StageReport):
    """Counts and final losses of a training run. `rows_in` are training samples, `rows_out` samples trained on.

    `parameters` that train by part. `val_cider` is null where nothing was captioned; `exported_step` is the step whose
    weights are the output. `module`: what the family's module contributed when it was measured last, by the names of
    the curve's columns; empty without one. `alignment`: steps, samples and final loss of the phase before; empty
    without one. `warnings`: what the end of the run found wrong, in sentences.
    """

    steps: int
    parameters_trainable: int
    parameters_frozen: int
    parameters: dict[str, int]
    loss: float
    val_loss: float | None
    val_loss_by_dataset: dict[str, float]
    val_cider: float | None
    exported_step: int
    module: dict[str, float]
    alignment: dict[str, float]
    warnings: list[str]


Follow = Callable[[str, Path], AbstractContextManager[object]]
"""Given a run's key and the file of its curves up to the last checkpoint; entered around the training."""


def train(
    cfg: Train,
    model: "Settings",
    compute: Compute,
    mixture: Path,
    out: Path,
    follow: Follow = lambda key, curves: nullcontext(),
) -> TrainReport:
    """Train on `mixture`/train and write `out`: checkpoint/, curves.csv, report.json.

    Args:
        follow: shows the curves while it trains.

    Raises:
        BlockingIOError: the same run is being trained elsewhere, or a disk is full; try again.
        DataError: the mixture has no training sample, or an image is not the one that ingest saw.
        ParamsError: the best checkpoint is asked for and none would be scored.
        NoRoomError: Ray's nodes have no room for the workers.
        SystemExit: SIGTERM asked the run to end; the next call goes on from where it was.
    """
    if cfg.export == "best" and not compute.caption_val_pairs:
        raise ParamsError(
            "train.export: best needs captions of validation pairs; set compute.caption_val_pairs above 0"
        )
    cfg = cfg.model_copy(update={"base": cfg.base.resolve()})
    mixture, out, scratch = mixture.resolve(), out.resolve(), compute.scratch.resolve()
    base_sha256 = sha256_of_folder(cfg.base)
    run_dir = scratch / "train" / run_key(cfg, model, mixture, base_sha256)
    run_dir.mkdir(parents=True, exist_ok=True)
    with _only_trainer(run_dir), follow(run_dir.name, run_dir / CURVES):
        try:
            figures, before = run_phases(Job(cfg, model, compute, mixture, out, run_dir, base_sha256))
        except StoppedError as stopped:
            print(f"train: {stopped}", flush=True)
            raise SystemExit(TERMINATED) from stopped
        fields = {name: figures[name] for name in TrainReport.model_fields if name in figures}
        alignment = {"steps": before["steps"], "captions": before["rows_out"], "loss": before["loss"]} if before else {}
        report = TrainReport(stage="train", alignment=alignment, **fields).write(out / "report.json")
        speed = {name: round(value, 4) if isinstance(value := figures[name], float) else value for name in SPEED}
        write_atomic(scratch / "train_speed.json", json.dumps(speed) + "\n")
        print(f"train: {report.steps} steps in {figures['seconds']:.0f} s, {speed['captions_per_s']:.0f} captions/s")
    shutil.rmtree(run_dir)
    return report


def run_phases(job: Job) -> tuple[dict[str, Any], dict[str, Any]]:
    """Run the fine-tuning, and before it the alignment where the model has one; return the figures of both, `{}`
    without it. Times and hours are of both.

    Each phase is a run of the loop on datasets of its own, with a folder, checkpoints and a schedule of its own, so
    each goes on by itself where it was killed: an alignment that had ended exports its last checkpoint again. The
    fine-tuning begins with its weights.

    Raises: as `with_retries`.
    """
    run: Run = run_local
    if job.compute.workers:
        from m3diff.stages.train.on_ray import run_on_ray as run
    align, folder = job.model.align, job.run_dir / ALIGNMENT
    if align is None:
        return with_retries(run, job), {}
    from m3diff.stages.train.progress import with_alignment

    folder.mkdir(exist_ok=True)
    (cfg, settings), out = of_alignment(job.cfg, job.model), folder / "out"
    chosen = DatasetFilter(align.datasets, others=False)
    before = with_retries(run, replace(job, cfg=cfg, model=settings, out=out, run_dir=folder, datasets=chosen))
    figures = with_retries(run, replace(job, weights=out / "checkpoint", datasets=DatasetFilter(align.datasets)))
    with_alignment(out / CURVES, job.out / CURVES)
    return figures | {name: figures[name] + before[name] for name in ("seconds", "device_hours")}, before


def run_local(job: Job) -> dict[str, Any]:
    """Run the loop as the only worker, in this process, and return its figures."""
    choose_accelerator(job.compute.gpu)  # before DeepSpeed is imported
    from m3diff.stages.train.loop import run_loop

    with only_worker(Device(job.compute.gpu, job.cfg.precision).backend), stop_on_sigterm(job.run_dir):
        return run_loop(job, Runtime())


def run_key(cfg: Train, model: "Settings", mixture: Path, base_sha256: str) -> str:
    """Name a run: the hash of the parameters, samples, base and code that decide its weights, and of no path."""
    samples = [file for split in ("train", "val") for file in sorted((mixture / split).glob("*.parquet"))]
    facts = {
        "train": cfg.model_dump(mode="json", exclude={"base"}),
        "model": asdict(model),  # type: ignore[call-overload]  # every family's settings are a dataclass
        "base": base_sha256,
        "samples": [f"{file.parent.name}/{file.name} {sha256(file)}" for file in samples],
    }
    return key_of(facts, Path(__file__), [FAMILIES.modules[model.family]])


@contextmanager
def _only_trainer(run_dir: Path) -> Iterator[None]:
    with (run_dir.parent / f"{run_dir.name}.lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise BlockingIOError(f"{lock.name}: another training of this run is alive; wait for its end") from error
        yield
