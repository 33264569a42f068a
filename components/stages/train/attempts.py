"""Attempts of a training: each has a number, ends early on SIGTERM or a full disk, and may be followed by another.

An error that the next attempt would meet again ends the run. Out of memory is tried again at half the micro-batch and
the same global batch. Anything else, such as a dead worker, is tried again `compute.max_failures` times. Every attempt
goes on from the newest checkpoint. Light to import: the parent of Ray's workers needs no DeepSpeed.
"""

import errno
import gc
import os
import shutil
import signal
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from m3diff.cluster import NoRoomError, logs, on_one_machine
from m3diff.models.device import DeviceError
from m3diff.records.errors import DataError
from m3diff.records.files import write_atomic
from m3diff.settings.section import ParamsError
from m3diff.stages.train.job import Job

Run = Callable[[Job], dict[str, Any]]
"""An attempt: runs the loop to its end, where `compute.workers` says, and returns the figures."""


class StoppedError(Exception):
    """The run was asked to end and has written its checkpoint."""


class SupersededError(BlockingIOError):
    """A later attempt trains this run, or the run has ended; this one writes nothing more."""


FINAL = (DataError, ParamsError, DeviceError, StoppedError, SupersededError, NoRoomError)
"""Errors that are not retried: another attempt would meet them again, or shall not be made."""

NOT_STARTED = {"WorkerGroupStartupTimeoutError", "WorkerGroupStartupFailedError"}
"""Errors of Ray whose workers do not start: on one machine the next attempt's would not either."""

NO_MEMORY = ("out of memory", "can't allocate memory", "running low on memory")
"""Words of CUDA and NCCL, of torch's allocator on a CPU, and of Ray's watch of a node's memory, in any error."""

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)

GENERATION, STOP = "generation", "stop"
"""Files in the run's folder: the number of the newest attempt, and the request to end."""

LOOK_S = 2.0
"""Seconds between two looks at the generation; a network file system may show a new number some seconds later."""

GRACE_S = 18.0
"""Seconds for the current step and its checkpoint; a cancelled flow is killed after 20."""

TERMINATED = 128 + signal.SIGTERM
"""Exit code of a process that SIGTERM ended."""


def with_retries(run: Run, job: Job) -> dict[str, Any]:
    """Return `run(job)`, attempted as often as this module says.

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
    if "FailOnRecompileLimitHit" in names:  # shapes do not recur (components/models/attention.py)
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
    text = str(error).lower()
    return isinstance(error, MemoryError) or any(words in text for words in NO_MEMORY)


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


def newest(run_dir: Path) -> int:
    """Return the newest attempt's number; 0 where none has begun, or the run has ended and its folder is gone."""
    try:
        return int((run_dir / GENERATION).read_text())
    except FileNotFoundError:
        return 0


def begin(run_dir: Path) -> int:
    """Number a new attempt; from here on older ones end."""
    number = newest(run_dir) + 1
    write_atomic(run_dir / GENERATION, f"{number}\n")
    return number


def require_newest(run_dir: Path, number: int) -> None:
    """Raise SupersededError where attempt `number` is not the newest."""
    if (found := newest(run_dir)) != number:
        then = f"attempt {found} goes on" if found else "the run has ended"
        raise SupersededError(f"{run_dir.name}: attempt {number} ends here and writes nothing more: {then}")


@contextmanager
def ended_when_superseded(run_dir: Path, number: int) -> Iterator[None]:
    """End this process within the block when attempt `number` is no longer the newest, whatever it waits for.

    An attempt whose host is cut off from the others lives on there while the next one trains elsewhere; a collective
    operation with workers that are gone would hold it for half an hour, and Ray cannot end it. It is also ended where
    another worker ended first and an operation with that one fails.
    """
    over = threading.Event()

    def look() -> None:
        try:
            require_newest(run_dir, number)
        except SupersededError as error:
            print(f"train: {error}", flush=True)
            os._exit(1)
        except OSError:
            return  # the disk is away, and this attempt can write nothing either

    def watch() -> None:
        while not over.wait(LOOK_S):
            look()

    threading.Thread(target=watch, name="generation", daemon=True).start()
    try:
        yield
    except BaseException:
        look()
        raise
    finally:
        over.set()


@contextmanager
def stop_on_sigterm(run_dir: Path, grace_s: float = GRACE_S) -> Iterator[None]:
    """Let SIGTERM ask the run to end, and end this process where it has not ended within the grace time.

    The signal reaches the process that began the run; its workers, on other machines too, see the file STOP. In another
    thread than the main one signals are as they were.
    """
    file = run_dir / STOP
    file.unlink(missing_ok=True)
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ask(*_: Any) -> None:
        if not file.exists():  # a second signal gives no more time
            file.touch()
            signal.setitimer(signal.ITIMER_REAL, grace_s)

    def end(*_: Any) -> None:
        raise SystemExit(TERMINATED)

    before = {number: signal.signal(number, on) for number, on in ((signal.SIGTERM, ask), (signal.SIGALRM, end))}
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)
        file.unlink(missing_ok=True)
