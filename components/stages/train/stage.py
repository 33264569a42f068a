"""Fine-tune a model on the mixture: Ray Train around the loop of `loop.py`, or the loop alone (`compute.workers: 0`).

A run is named by the hash of what decides its weights (samples, parameters, base, code), so a killed run goes on from
its newest valid checkpoint, also after `compute` was changed, and nothing else ever does. An attempt that fails is
followed by another from there: out of memory, at half the micro-batch and the same global batch; after anything else
that the next one may not meet, such as a dead worker, `compute.max_failures` times. Run: `m3diff train`.
"""

import errno
import gc
import json
import shutil
import textwrap
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import polars as pl
from tokenizers import Tokenizer

from m3diff.cluster import NoRoomError, logs, on_one_machine
from m3diff.models import FAMILIES
from m3diff.models.device import DeviceError
from m3diff.models.settings import Settings
from m3diff.provenance.code import key_of
from m3diff.records.errors import DataError, readable
from m3diff.records.files import StageReport, lock_exclusively, sha256, sha256_of_folder, write_atomic
from m3diff.settings.compute import Compute
from m3diff.settings.section import ParamsError
from m3diff.stages.train.job import (
    CURVES,
    TERMINATED,
    DatasetFilter,
    Job,
    Runtime,
    StoppedError,
    SupersededError,
    begin,
    of_alignment,
    only_worker,
    stop_on_sigterm,
)
from m3diff.stages.train.params import Train

# Figures of all attempts of a run. In no report: a resumed run's is that of one that was left alone.
SPEED = ("seconds", "captions_per_s", "waiting_share", "device_hours", "device", "devices")

ALIGNMENT = "alignment"  # the alignment's folder in the run's

# An attempt: runs the loop to its end, where `compute.workers` says, and returns the figures
Run = Callable[[Job], dict[str, Any]]

# Errors that are not retried: another attempt would meet them again, or shall not be made
FINAL = (DataError, ParamsError, DeviceError, StoppedError, SupersededError, NoRoomError)

# Errors of Ray whose workers do not start: on one machine the next attempt's would not either
NOT_STARTED = {"WorkerGroupStartupTimeoutError", "WorkerGroupStartupFailedError"}

# Words of CUDA and NCCL, of torch's allocator on a CPU, and of Ray's watch of a node's memory, in any error
NO_MEMORY = ("out of memory", "can't allocate memory", "running low on memory")

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


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


# Given a run's key and the file of its curves up to the last checkpoint; entered around the training
Follow = Callable[[str, Path], AbstractContextManager[object]]


def train(
    cfg: Train,
    model: Settings,
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
        DataError: the mixture has no training sample, an image is not the one that ingest saw, or the base's tokenizer
            is damaged.
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
    if (tokenizer := cfg.base / "tokenizer.json").is_file():
        with readable(tokenizer, "fetch it again"):  # transformers would not name the file
            Tokenizer.from_file(str(tokenizer))
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
    folder.mkdir(exist_ok=True)
    (cfg, settings), out = of_alignment(job.cfg, job.model), folder / "out"
    chosen = DatasetFilter(align.datasets, others=False)
    before = with_retries(run, replace(job, cfg=cfg, model=settings, out=out, run_dir=folder, datasets=chosen))
    figures = with_retries(run, replace(job, weights=out / "checkpoint", datasets=DatasetFilter(align.datasets)))
    join_curves(out / CURVES, job.out / CURVES)
    return figures | {name: figures[name] + before[name] for name in ("seconds", "device_hours")}, before


def join_curves(alignment: Path, curves: Path) -> None:
    """Put the rows of the alignment's curves before those of `curves`, in place: its last step is 0."""
    first, second = (pl.read_csv(file, infer_schema=False) for file in (alignment, curves))
    step = pl.col("step").cast(int)
    first = first.with_columns((step - step.last()).cast(str))
    write_atomic(curves, pl.concat([second.clear(), first, second], how="diagonal").write_csv())


def with_retries(run: Run, job: Job) -> dict[str, Any]:
    """Return `run(job)`, attempted as often as the head of this file says.

    Raises:
        DataError, ParamsError: an attempt, or a worker of it, met one; or one sequence at a time is out of memory.
        BlockingIOError: a disk is full.
        StoppedError: the run was asked to end.
        SupersededError: another process makes a later attempt.
        NoRoomError: Ray's nodes cannot take the workers, or these do not start.
        Exception: the last attempt's.
    """
    failures = 0
    while True:
        try:
            return run(replace(job, generation=begin(job.run_dir)))
        except Exception as error:
            job, failures = _next_attempt(error, job, failures)
        gc.collect()  # not before the error is gone: it holds the frames that hold the model
        if not job.compute.workers:
            from deepspeed.accelerator import get_accelerator

            get_accelerator().empty_cache()


def _next_attempt(error: Exception, job: Job, failures: int) -> tuple[Job, int]:
    """Return the next attempt's job and the failures so far; raise where there is no next attempt."""
    met = causes(error)
    names = {type(cause).__name__ for cause in met}
    if final := next((cause for cause in met if isinstance(cause, FINAL)), None):
        raise final from (error if final is not error else error.__cause__)
    if full := next(filter(is_disk_full, met), None):
        free = shutil.disk_usage(job.run_dir).free
        raise BlockingIOError(
            f"{_first_line(full)}: a disk is full ({free:,} bytes are free in {job.run_dir}); make room and run again, "
            "which goes on from the newest checkpoint"
        ) from error
    if on_one_machine() and names & NOT_STARTED:
        raise NoRoomError(f"Ray's workers do not start: {_first_line(met[-1])}; see {logs()}/worker-*.err") from error
    if "FailOnRecompileLimitHit" in names:  # shapes do not recur (components/models/fused.py)
        raise ParamsError(
            "torch.compile makes a graph for each length; set compute.attention to sdpa, and report it"
        ) from error
    if any(map(is_out_of_memory, met)):
        smaller = with_smaller_micro_batch(job, error)
        before, after = job.compute.micro_batch, smaller.compute.micro_batch
        print(
            f"train: out of memory with {before} sequences a micro-batch; goes on from the newest checkpoint with "
            f"{after} and the same {job.cfg.global_batch} a step (compute.micro_batch: {after} starts so)",
            flush=True,
        )
        return smaller, failures
    if failures == job.compute.max_failures:
        raise error
    allowed = f"(failure {failures + 1} of {job.compute.max_failures} that compute.max_failures allows)"
    print(f"train: {_first_line(met[-1])}; goes on from the newest checkpoint {allowed}", flush=True)
    return job, failures + 1


def causes(error: BaseException) -> list[BaseException]:
    """Return the error, the errors that Ray's workers raised, and the errors that each of these was raised from."""
    found: list[BaseException] = []
    waiting: list[Any] = [error]
    while waiting:
        cause = waiting.pop(0)
        if cause is not None and cause not in found:
            found.append(cause)
            waiting += getattr(cause, "worker_failures", {}).values()
            waiting += [getattr(cause, name, None) for name in ("controller_failure", "_base_exc")]  # Ray's wrappers
            waiting.append(cause.__cause__ or cause.__context__)
    return found


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether a GPU or the machine has no memory. torch's own error is a RuntimeError, known by its text."""
    return isinstance(error, MemoryError) or any(words in str(error).lower() for words in NO_MEMORY)


def is_disk_full(error: BaseException) -> bool:
    """Return whether a disk, or the user's part of it, is full. Safetensors' error has the number in its text alone."""
    number = getattr(error, "errno", None)
    return number in DISK_FULL or any(f"(os error {full})" in str(error) for full in DISK_FULL)


def with_smaller_micro_batch(job: Job, error: BaseException) -> Job:
    """Return the job with the largest micro-batch of at most half that divides a worker's share of the global batch.

    Raises:
        ParamsError: it is 1 already; names what else to change.
    """
    cfg, compute = job.cfg, job.compute
    share = cfg.global_batch // max(compute.workers, 1)
    sizes = [size for size in range(1, compute.micro_batch // 2 + 1) if share % size == 0]
    if not sizes:
        raise ParamsError(
            f"out of memory with one sequence a micro-batch; raise compute.zero_stage (now {compute.zero_stage}), set "
            f"compute.activation_checkpointing to full (now {compute.activation_checkpointing}) or lower "
            f"train.max_captions_per_sequence (now {cfg.max_captions_per_sequence or 'null'})"
        ) from error
    return replace(job, compute=compute.model_copy(update={"micro_batch": sizes[-1]}))


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {textwrap.shorten(str(error).strip().partition(chr(10))[0], 160)}"


def run_local(job: Job) -> dict[str, Any]:
    """Run the loop as the only worker, in this process, and return its figures."""
    with only_worker(job.compute.gpu), stop_on_sigterm(job.run_dir):
        from m3diff.stages.train.loop import Training

        return Training(job, Runtime()).run()


def run_key(cfg: Train, model: Settings, mixture: Path, base_sha256: str) -> str:
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
            lock_exclusively(lock, wait=False)
        except BlockingIOError as error:
            raise BlockingIOError(f"{lock.name}: another training of this run is alive; wait for its end") from error
        yield
