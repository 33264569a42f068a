"""Fine-tune a model on the mixture, with the loop of `loop.py` in Ray Train workers or in this process.

A run is named after the hash of everything that determines its weights: samples, parameters, base and code. A killed
run therefore resumes from its newest valid checkpoint, even after `compute` has changed, and no other run uses that
checkpoint.

If an attempt fails, the next one starts from the newest checkpoint. After an out-of-memory error, the next attempt uses
half the micro-batch size and the same global batch. After other errors that may not recur, such as a dead worker, up to
`compute.max_failures` further attempts are made. Run: `m3diff train`.
"""

import gc
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import polars as pl
from tokenizers import Tokenizer

from m3diff.cluster import NoRoomError, on_one_machine, ray_log_folder
from m3diff.models import FAMILIES
from m3diff.models.device import DeviceError
from m3diff.models.settings import Settings
from m3diff.provenance.code import compute_key
from m3diff.records.errors import CodedError, DataError, Fault, data_error_if_unreadable
from m3diff.records.files import StageReport, lock_exclusively, sha256, sha256_of_folder, write_atomic
from m3diff.records.tables import part_paths
from m3diff.settings.compute import Compute
from m3diff.settings.section import ParamsError
from m3diff.stages.train.job import (
    CURVES_FILE,
    SPEED_FILE,
    TERMINATED,
    DatasetFilter,
    DiskFullError,
    Job,
    StoppedError,
    SupersededError,
    WorkerContext,
    alignment_sections,
    begin_attempt,
    describe_error,
    disk_full_error,
    is_disk_full,
    name_full_disk,
    single_worker_group,
    stop_on_sigterm,
)
from m3diff.stages.train.params import Train
from m3diff.stages.train.verdict import TrainingEnd, judge_learning

# Figures over all attempts of a run, written to SPEED_FILE. They are not in the report because a resumed run must write
# the same report as an uninterrupted one.
SPEED_FIGURES = (
    "seconds",
    "captions_per_s",
    "waiting_share",
    "device_hours",
    "device",
    "devices",
    "flops",  # on all devices, excluding recomputation
    "model_parameters",
)

# Folder of the alignment phase inside the run's folder
ALIGNMENT_FOLDER = "alignment"

# Runs the loop of one attempt to its end and returns its figures
RunAttempt = Callable[[Job], dict[str, Any]]


class RunInProgressError(CodedError, BlockingIOError):
    """Another process is training the same run."""


# Errors that are not retried: they would recur, or the run was asked to end
FINAL_ERRORS = (DataError, ParamsError, DeviceError, DiskFullError, StoppedError, SupersededError, NoRoomError)

# Errors that Ray raises if workers do not start. On one machine, the next attempt would fail in the same way.
STARTUP_ERRORS = {"WorkerGroupStartupTimeoutError", "WorkerGroupStartupFailedError"}

# Phrases in out-of-memory errors of CUDA, NCCL, torch's CPU allocator and Ray's memory monitor
OUT_OF_MEMORY_PHRASES = ("out of memory", "can't allocate memory", "running low on memory")


class TrainReport(StageReport):
    """Counts and final losses of a training run.

    Attributes:
        rows_in: number of training samples.
        rows_out: number of samples trained on, over all epochs.
        parameters: number of trained parameters of each part.
        val_cider: CIDEr of the validation captions; null if nothing was captioned.
        val_match: share of exact answers to validation questions; null if no dataset has questions of its own.
        exported_step: step whose weights are the output.
        module: last measured contribution of the family's module, by column of the curves; empty without a module.
        alignment: steps, captions and final loss of the alignment phase; empty without an alignment phase.
        warnings: warnings about risks known before the run, then warnings about problems found at its end.
        settings: settings that determined the weights, for human readers; empty in reports of earlier versions.
    """

    steps: int
    parameters_trainable: int
    parameters_frozen: int
    parameters: dict[str, int]
    loss: float
    val_loss: float | None
    val_loss_by_dataset: dict[str, float]
    val_cider: float | None
    val_match: float | None = None
    exported_step: int
    module: dict[str, float]
    alignment: dict[str, float]
    warnings: list[str]
    settings: dict[str, Any] = {}


# Shows the curves of a run. The function takes the run's key and the path of the curves up to the newest checkpoint,
# and returns a context manager that is entered for the duration of the run
FollowCurves = Callable[[str, Path], AbstractContextManager[object]]


def train(
    cfg: Train,
    model: Settings,
    compute: Compute,
    mixture: Path,
    out: Path,
    follow: FollowCurves = lambda key, curves: nullcontext(),
    warnings: Sequence[str] = (),
) -> TrainReport:
    """Train on `mixture`/train and write checkpoint/, curves.csv and report.json to `out`.

    Args:
        follow: shows the curves during training; see `FollowCurves`.
        warnings: warnings known before the run, to include in the report.

    Raises:
        RunInProgressError: another process is training the same run; try again later.
        DiskFullError: a disk is full; free some space on it and try again.
        DataError: the mixture has no training samples, an image has changed since ingest, or the base's tokenizer is
            damaged.
        ParamsError: `train.export` is best, but no checkpoint would be scored.
        NoRoomError: Ray's nodes do not have enough resources for the workers.
        SystemExit: SIGTERM asked the run to end; the next call resumes it.
    """
    if cfg.export == "best" and not compute.caption_val_pairs:
        raise ParamsError("train.best_without_captions", key="train.export")
    reported_settings = settings_in_report(cfg, model)
    cfg = cfg.model_copy(update={"base": cfg.base.resolve()})
    mixture = mixture.resolve()
    out = out.resolve()
    scratch = compute.scratch.resolve()
    base_sha256 = sha256_of_folder(cfg.base)
    _require_readable_tokenizer(cfg.base / "tokenizer.json")
    run_dir = scratch / "train" / run_key(cfg, model, mixture, base_sha256)
    with name_full_disk(scratch):
        run_dir.mkdir(parents=True, exist_ok=True)
    job = Job(
        cfg=cfg,
        model=model,
        compute=compute,
        mixture=mixture,
        out=out,
        run_dir=run_dir,
        base_sha256=base_sha256,
    )
    with _run_lock(run_dir), follow(run_dir.name, run_dir / CURVES_FILE):
        try:
            figures, alignment_figures = run_phases(job)
        except StoppedError as stopped:
            print(f"train: {stopped}", flush=True)
            raise SystemExit(TERMINATED) from stopped
        warning = nothing_learned_warning(cfg, compute, figures, mixture)
        report = make_report(figures, alignment_figures, reported_settings, warnings, warning)
        speed = rounded_speed(figures)
        _write_results(report, speed, out, scratch)
        print(f"train: {report.steps} steps in {figures['seconds']:.0f} s, {speed['captions_per_s']:.0f} captions/s")
        if warning is not None:
            print(f"train: warning: {warning}", flush=True)
    shutil.rmtree(run_dir)
    return report


def _write_results(report: TrainReport, speed: Mapping[str, Any], out: Path, scratch: Path) -> None:
    """Write report.json to `out`, and the run's speed, which `m3diff plan` reads, to the scratch folder.

    Raises:
        DiskFullError: the disk of one of the folders is full.
    """
    with name_full_disk(out):
        report.write(out / "report.json")
    with name_full_disk(scratch):
        write_atomic(scratch / SPEED_FILE, json.dumps(speed) + "\n")


def _require_readable_tokenizer(tokenizer: Path) -> None:
    """Raise DataError if the base's tokenizer file exists but cannot be read.

    The error that transformers would raise does not name the file.
    """
    if tokenizer.is_file():
        with data_error_if_unreadable(tokenizer, "files.unreadable"):
            Tokenizer.from_file(str(tokenizer))


def make_report(
    figures: Mapping[str, Any],
    alignment_figures: Mapping[str, Any],
    settings: dict[str, Any],
    warnings: Sequence[str],
    learning_warning: Fault | None,
) -> TrainReport:
    """Return the report of a training run.

    Args:
        figures: figures that the loop returned.
        alignment_figures: figures of the alignment phase; empty without an alignment phase.
        settings: result of `settings_in_report`.
        warnings: risks known before the run.
        learning_warning: warning that the model has not learned anything yet, or None.
    """
    report_warnings = [*warnings, *figures["warnings"]]
    if learning_warning is not None:
        report_warnings.append(str(learning_warning))
    alignment: dict[str, Any] = {}
    if alignment_figures:
        alignment = {
            "steps": alignment_figures["steps"],
            "captions": alignment_figures["rows_out"],
            "loss": alignment_figures["loss"],
        }
    fields = {name: figures[name] for name in TrainReport.model_fields if name in figures}
    fields["warnings"] = report_warnings
    return TrainReport(stage="train", alignment=alignment, settings=settings, **fields)


def rounded_speed(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Return the SPEED_FIGURES of a run, rounded for SPEED_FILE."""
    speed = {}
    for name in SPEED_FIGURES:
        value = figures[name]
        speed[name] = round(value, 4) if isinstance(value, float) else value
    return speed


def nothing_learned_warning(cfg: Train, compute: Compute, figures: Mapping[str, Any], mixture: Path) -> Fault | None:
    """Return a warning if the model has not learned anything yet, else None."""
    end = TrainingEnd(
        steps=figures["steps"],
        epochs=cfg.epochs,
        loss=figures["loss"] if figures["val_loss"] is None else figures["val_loss"],
        val_cider=figures["val_cider"],
        model=cfg.model,
    )
    return judge_learning(end, mixture, cfg.base / "tokenizer.json", compute.caption_val_pairs)


def settings_in_report(cfg: Train, model: Settings) -> dict[str, Any]:
    """Return the settings that the report shows beside the scores: model, base, epochs, batch, adapters and rates."""
    return {
        "model": cfg.model,
        "family": model.family,
        "base": str(cfg.base),
        "seed": cfg.seed,
        "epochs": cfg.epochs,
        "global_batch": cfg.global_batch,
        "lora": asdict(model.lora),
        "rates": {part: rate for part, rate in model.rates.items() if rate is not None},
    }


def run_phases(job: Job) -> tuple[dict[str, Any], dict[str, Any]]:
    """Run the alignment, if the model has one, and then the fine-tuning.

    Each phase runs the loop on different datasets, with a separate folder, checkpoints and schedule, and resumes
    independently. If a run resumes after its alignment has ended, the alignment exports its last checkpoint again and
    the fine-tuning loads it.

    Returns:
        The figures of the fine-tuning, then the figures of the alignment. If there is no alignment, the second
        dictionary is empty. If there is one, the seconds, device hours and FLOPs of the fine-tuning include those of
        the alignment.

    Raises: see `run_with_retries`.
    """
    run_attempt: RunAttempt = run_local
    if job.compute.workers:
        from m3diff.stages.train.on_ray import run_on_ray as run_attempt
    align = job.model.align
    if align is None:
        return run_with_retries(run_attempt, job), {}
    folder = job.run_dir / ALIGNMENT_FOLDER
    folder.mkdir(exist_ok=True)
    cfg, settings = alignment_sections(job.cfg, job.model)
    alignment_job = replace(
        job,
        cfg=cfg,
        model=settings,
        out=folder / "out",
        run_dir=folder,
        datasets=DatasetFilter(align.datasets, excludes=False),
    )
    alignment_figures = run_with_retries(run_attempt, alignment_job)
    fine_tuning_job = replace(
        job,
        weights=alignment_job.out / "checkpoint",
        datasets=DatasetFilter(align.datasets, excludes=True),
    )
    figures = run_with_retries(run_attempt, fine_tuning_job)
    with name_full_disk(job.out):
        join_curves(alignment_job.out / CURVES_FILE, job.out / CURVES_FILE)
    totals = {name: figures[name] + alignment_figures[name] for name in ("seconds", "device_hours")}
    if figures["flops"] is not None:
        totals["flops"] = figures["flops"] + alignment_figures["flops"]
    return figures | totals, alignment_figures


def join_curves(alignment: Path, curves: Path) -> None:
    """Insert the alignment's rows at the start of the file `curves`.

    The alignment's steps are shifted so that its last step is 0.
    """
    alignment_rows = pl.read_csv(alignment, infer_schema=False)
    rows = pl.read_csv(curves, infer_schema=False)
    step = pl.col("step").cast(int)
    alignment_rows = alignment_rows.with_columns((step - step.last()).cast(str))
    # the empty table comes first so that its columns come first
    all_rows = pl.concat([rows.clear(), alignment_rows, rows], how="diagonal")
    write_atomic(curves, all_rows.write_csv())


def run_with_retries(run_attempt: RunAttempt, job: Job) -> dict[str, Any]:
    """Run attempts until one succeeds, as described at the top of this file, and return its figures.

    Raises:
        DataError, ParamsError: an attempt or one of its workers raised this error, or memory is not sufficient even for
            one sequence at a time.
        DiskFullError: a disk is full.
        StoppedError: the run was asked to end.
        SupersededError: another process has started a later attempt.
        NoRoomError: Ray's nodes do not have enough resources for the workers, or the workers do not start.
        Exception: the error of the last attempt.
    """
    failures = 0
    while True:
        try:
            attempt_job = replace(job, attempt=begin_attempt(job.run_dir))
            return run_attempt(attempt_job)
        except Exception as error:
            job, failures = _next_attempt(error, job, failures)
        # This must come after the `except` block, in which the error keeps the frames alive that hold the model
        gc.collect()
        if not job.compute.workers:
            from deepspeed.accelerator import get_accelerator

            get_accelerator().empty_cache()


def _next_attempt(error: Exception, job: Job, failures: int) -> tuple[Job, int]:
    """Return the job of the next attempt and the number of failures so far.

    Raises the error if it must not be retried.
    """
    causes = causes_of(error)
    _raise_if_final(error, causes, job)
    if any(is_out_of_memory(cause) for cause in causes):
        smaller_job = with_smaller_micro_batch(job, error)
        old_size = job.compute.micro_batch
        new_size = smaller_job.compute.micro_batch
        print(
            f"train: out of memory with micro-batches of {old_size}; continues from the newest checkpoint with "
            f"micro-batches of {new_size} and the same global batch of {job.cfg.global_batch} (to start future runs "
            f"like this, set compute.micro_batch to {new_size})",
            flush=True,
        )
        return smaller_job, failures
    if failures == job.compute.max_failures:
        raise error
    print(
        f"train: {describe_error(causes[-1])}; continues from the newest checkpoint "
        f"(failure {failures + 1} of {job.compute.max_failures} that compute.max_failures allows)",
        flush=True,
    )
    return job, failures + 1


def _raise_if_final(error: Exception, causes: list[BaseException], job: Job) -> None:
    """Raise the error that ends the run if one of `causes` must not be retried."""
    for cause in causes:
        if isinstance(cause, FINAL_ERRORS):
            raise cause from (error if cause is not error else error.__cause__)
    for cause in causes:
        if is_disk_full(cause):  # a library wrote the file, so the error may not name it
            raise disk_full_error(cause, fullest_folder(job)) from error
    class_names = {type(cause).__name__ for cause in causes}
    if on_one_machine() and class_names & STARTUP_ERRORS:
        raise NoRoomError(
            "train.workers_do_not_start", cause=describe_error(causes[-1]), logs=ray_log_folder()
        ) from error
    if "FailOnRecompileLimitHit" in class_names:
        # dynamo recompiles for every length if shapes do not recur; `compile_once` in models/fused.py turns this into
        # an error
        raise ParamsError("train.graph_for_each_length", key="compute.attention") from error


def fullest_folder(job: Job) -> Path:
    """Return the folder with the least free space among the folders that an attempt writes to.

    These are the run's folder, the output folder and the folder for temporary files.
    """
    folders = [folder for folder in (job.run_dir, job.out, Path(tempfile.gettempdir())) if folder.exists()]
    return min(folders, key=lambda folder: shutil.disk_usage(folder).free)


def causes_of(error: BaseException) -> list[BaseException]:
    """Return the error, the errors of Ray workers that it contains, and the causes of all these errors."""
    causes: list[BaseException] = []
    queue: list[Any] = [error]
    while queue:
        cause = queue.pop(0)
        if cause is None or cause in causes:
            continue
        causes.append(cause)
        queue += getattr(cause, "worker_failures", {}).values()
        # attributes of Ray's wrapper exceptions
        queue.append(getattr(cause, "controller_failure", None))
        queue.append(getattr(cause, "_base_exc", None))
        queue.append(cause.__cause__ or cause.__context__)
    return causes


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that the GPU or the machine is out of memory.

    torch raises a plain RuntimeError, which is recognised by its text.
    """
    if isinstance(error, MemoryError):
        return True
    text = str(error).lower()
    return any(phrase in text for phrase in OUT_OF_MEMORY_PHRASES)


def with_smaller_micro_batch(job: Job, error: BaseException) -> Job:
    """Return the job with a micro-batch of at most half the current size.

    The new size is the largest one that divides a worker's share of the global batch.

    Raises:
        ParamsError: the micro-batch is already 1. The error names other settings to change.
    """
    cfg = job.cfg
    compute = job.compute
    sequences_per_worker = cfg.global_batch // max(compute.workers, 1)
    sizes = [size for size in range(1, compute.micro_batch // 2 + 1) if sequences_per_worker % size == 0]
    if not sizes:
        raise ParamsError(
            "train.out_of_memory",
            zero_stage=compute.zero_stage,
            activation_checkpointing=compute.activation_checkpointing,
            max_captions_per_sequence=cfg.max_captions_per_sequence or "null",
        ) from error
    return replace(job, compute=compute.model_copy(update={"micro_batch": sizes[-1]}))


def run_local(job: Job) -> dict[str, Any]:
    """Run the loop in this process as the only worker and return its figures."""
    with single_worker_group(job.compute.gpu), stop_on_sigterm(job.run_dir):
        from m3diff.stages.train.loop import Training

        return Training(job, WorkerContext()).run()


def run_key(cfg: Train, model: Settings, mixture: Path, base_sha256: str) -> str:
    """Return the name of a run: a hash of the parameters, samples, base and code that determine its weights.

    The hash does not depend on any path.
    """
    files = part_paths(mixture / "train") + part_paths(mixture / "val")
    inputs = {
        "train": cfg.model_dump(mode="json", exclude={"base"}),
        "model": asdict(model),  # type: ignore[call-overload]  # every family's settings are a dataclass
        "base": base_sha256,
        "samples": [f"{file.parent.name}/{file.name} {sha256(file)}" for file in files],
    }
    return compute_key(inputs, Path(__file__), [FAMILIES.modules[model.family]])


@contextmanager
def _run_lock(run_dir: Path) -> Iterator[None]:
    """Hold the run's lock while the block runs. Raise RunInProgressError if another process holds the lock."""
    with (run_dir.parent / f"{run_dir.name}.lock").open("a") as lock:
        try:
            lock_exclusively(lock, wait=False)
        except BlockingIOError as error:
            raise RunInProgressError("train.run_in_progress", path=lock.name) from error
        yield
