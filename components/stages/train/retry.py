"""What follows a failed attempt of training, the same in this process and in Ray's workers.

What the next attempt would meet again ends the run. Out of memory is tried again at half the micro-batch and the same
global batch. Anything else, such as a dead worker, is tried again `compute.max_failures` times. Every attempt goes on
from the newest checkpoint. Light to import: the parent of Ray's workers needs no torch.
"""

import gc
import textwrap
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from m3diff.cluster import NoRoomError, logs, on_one_machine
from m3diff.models.device import DeviceError
from m3diff.records.errors import DataError
from m3diff.settings.section import ParamsError
from m3diff.stages.train.disk import NotWrittenError, is_disk_full
from m3diff.stages.train.generation import SupersededError, begin
from m3diff.stages.train.job import Job
from m3diff.stages.train.stopping import StoppedError


class DivergedError(ParamsError):
    """The loss or the gradient is no finite number any more."""


FINAL = (DataError, ParamsError, DeviceError, NotWrittenError, StoppedError, SupersededError, NoRoomError)
"""What another attempt would meet again, or shall not make."""

NOT_STARTED = ("WorkerGroupStartupTimeoutError", "WorkerGroupStartupFailedError")
"""What Ray raises where its workers do not start: on one machine the next attempt's would not either."""

TOO_MANY_GRAPHS = "FailOnRecompileLimitHit"
"""What dynamo raises where shapes do not recur (`components/models/attention.py`)."""

NO_MEMORY = ("out of memory", "can't allocate memory", "running low on memory")
"""What CUDA and NCCL, torch's allocator on a CPU, and Ray's watch of a node's memory say, in errors of any type."""


def with_retries(run: Callable[[Job], dict[str, Any]], job: Job) -> dict[str, Any]:
    """`run(job)`, attempted as often as this module says; what it returns in the end.

    Raises:
        DataError, ParamsError: an attempt, or a worker of it, met one; one sequence at a time is out of memory; or
            torch.compile reaches its limit of graphs.
        NotWrittenError: a disk is full.
        StoppedError: the run was asked to end.
        SupersededError: another process makes a later attempt.
        NoRoomError: Ray's nodes cannot take the workers, or these do not start.
        Exception: of the attempt after which none was left.
    """
    failures = 0
    while True:
        try:
            return run(replace(job, generation=begin(job.run_dir)))
        except Exception as error:
            job, failures = _after(error, job, failures)
        _free(job)  # not before the error is gone: it holds the frames that hold the model


def _after(error: Exception, job: Job, failures: int) -> tuple[Job, int]:
    """The next attempt's job and the failures so far; raises where there is no next attempt."""
    met = causes(error)
    for cause in met:
        if cause is error and isinstance(cause, FINAL):
            raise cause
        if isinstance(cause, FINAL):
            raise cause from error
    for cause in met:
        if is_disk_full(cause):
            raise NotWrittenError(f"{_first_line(cause)}: a disk is full; make room and run again") from error
    if on_one_machine() and any(type(cause).__name__ in NOT_STARTED for cause in met):
        raise NoRoomError(f"Ray's workers do not start: {_first_line(met[-1])}; see {logs()}/worker-*.err") from error
    if any(type(cause).__name__ == TOO_MANY_GRAPHS for cause in met):
        raise ParamsError(
            "torch.compile makes a graph for each length; set compute.attention to sdpa, and report it"
        ) from error
    if any(is_out_of_memory(cause) for cause in met):
        smaller = with_smaller_micro_batch(job, error)
        _say(
            f"out of memory with {job.compute.micro_batch} sequences a micro-batch; goes on from the newest checkpoint "
            f"with {smaller.compute.micro_batch} and the same {job.cfg.global_batch} a step "
            f"(compute.micro_batch: {smaller.compute.micro_batch} starts so)"
        )
        return smaller, failures
    if failures == job.compute.max_failures:
        raise error
    _say(
        f"{_first_line(met[-1])}; goes on from the newest checkpoint (failure {failures + 1} of "
        f"{job.compute.max_failures} that compute.max_failures allows)"
    )
    return job, failures + 1


def causes(error: BaseException) -> list[BaseException]:
    """The error, what Ray's workers raised, and what each of these was raised from."""
    found: list[BaseException] = []
    waiting: list[BaseException | None] = [error]
    while waiting:
        cause = waiting.pop(0)
        if cause is not None and all(cause is not other for other in found):
            found.append(cause)
            waiting += getattr(cause, "worker_failures", {}).values()
            waiting.append(getattr(cause, "controller_failure", None))
            waiting.append(getattr(cause, "_base_exc", None))  # Ray wraps an exception with its traceback
            waiting.append(cause.__cause__ or cause.__context__)
    return found


def is_out_of_memory(error: BaseException) -> bool:
    """Of a GPU or of the machine. torch's own error for it is a RuntimeError, whose text tells."""
    text = str(error).lower()
    return isinstance(error, MemoryError) or any(said in text for said in NO_MEMORY)


def with_smaller_micro_batch(job: Job, error: BaseException) -> Job:
    """The job with the largest micro-batch of at most half that divides a worker's share of the global batch.

    Raises:
        ParamsError: it is 1 already; names what else to change.
    """
    cfg, compute = job.cfg, job.compute
    share = cfg.global_batch // max(compute.workers, 1)
    sizes = [size for size in range(1, compute.micro_batch // 2 + 1) if share % size == 0]
    if not sizes:
        captions = "null" if cfg.max_captions_per_sequence is None else cfg.max_captions_per_sequence
        raise ParamsError(
            f"out of memory with one sequence a micro-batch; raise compute.zero_stage (now {compute.zero_stage}), set "
            f"compute.activation_checkpointing to full (now {compute.activation_checkpointing}) or lower "
            f"train.max_captions_per_sequence (now {captions})"
        ) from error
    return replace(job, compute=compute.model_copy(update={"micro_batch": sizes[-1]}))


def _free(job: Job) -> None:
    """Give back what the failed attempt held in this process."""
    gc.collect()
    if not job.compute.workers:
        from deepspeed.accelerator import get_accelerator

        get_accelerator().empty_cache()


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {textwrap.shorten(str(error).strip().partition(chr(10))[0], 160)}"


def _say(text: str) -> None:
    print(f"train: {text}", flush=True)
