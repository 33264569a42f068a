"""Define a training worker's job, the two ways to end an attempt early, and the worker's process group.

A *run* is one training by `m3diff train`, named after the hash of everything that determines its weights. A run has one
or two *phases*: the fine-tuning and, for some models, the alignment that precedes it. Each phase has its own
checkpoints. An *attempt* is one try at a phase. If it fails, the next attempt resumes from the phase's newest
checkpoint. A *job* (`Job`) contains what the workers of an attempt need: the settings and folders of the phase, and the
attempt's number.

This module has no heavy imports, because a worker unpickles its job before it imports torch.
"""

import errno
import os
import shutil
import signal
import socket
import textwrap
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from m3diff.models.device import process_environment
from m3diff.models.settings import Settings
from m3diff.records.errors import CodedError, ParamsError
from m3diff.records.files import write_atomic
from m3diff.settings.compute import Compute
from m3diff.stages.train.params import Train

CURVES_FILE = "curves.csv"

# File in `compute.scratch` with the speed of the last training run, which `m3diff plan` reads
SPEED_FILE = "train_speed.json"

# Files in the folder of a phase (`Job.run_dir`): the number of the newest attempt, and the request to stop
ATTEMPT_FILE = "attempt"
STOP_FILE = "stop"

# Seconds between checks for a newer attempt. On a network file system, the new number may appear a few seconds late.
CHECK_INTERVAL_S = 2.0

# Seconds that a run may take after SIGTERM to finish its step and its checkpoint. A cancelled flow is killed after 20
# seconds.
GRACE_S = 18.0

# Exit code of a process ended by SIGTERM
TERMINATED = 128 + signal.SIGTERM

# Errors of code, such as a missing attribute. They would recur with each attempt
CODE_ERRORS = (AttributeError, NameError, NotImplementedError, TypeError)

# Numbers of the errors that mean a full disk or an exhausted quota
DISK_FULL_NUMBERS = (errno.ENOSPC, errno.EDQUOT)


class StoppedError(CodedError):
    """The run was asked to end and has written its checkpoint."""


class SupersededError(CodedError, BlockingIOError):
    """A later attempt has taken over this run, or the run has ended. This attempt must not write anything more."""


class DiskFullError(CodedError, BlockingIOError):
    """A disk or the user's quota is full. The field `path` is a file or folder on this disk."""


@dataclass(frozen=True)
class DatasetFilter:
    """The datasets that a phase trains on: `names`, or all except `names` if `excludes` is true."""

    names: tuple[str, ...] = ()
    excludes: bool = True


@dataclass(frozen=True)
class Job:
    """What the workers need to train one phase of a run: its settings, its folders and the number of the attempt.

    Attributes:
        run_dir: folder of the phase's checkpoints, on storage that every worker can access.
        base_sha256: digest of the base's content.
        weights: folder to load instead of the base; None loads `cfg.base`.
        datasets: datasets that the phase trains on.
        attempt: number of the attempt, as returned by `begin_attempt`.
    """

    cfg: Train
    model: Settings
    compute: Compute
    mixture: Path
    out: Path
    run_dir: Path
    base_sha256: str
    weights: Path | None = None
    datasets: DatasetFilter = DatasetFilter()
    attempt: int = 0


@dataclass(frozen=True)
class WorkerContext:
    """The rank of a worker and the number of workers."""

    rank: int = 0
    ranks: int = 1

    def print_once(self, text: str) -> None:
        """Print a line on the first worker only."""
        if self.rank == 0:
            print(f"train: {text}", flush=True)

    def broadcast(self, value: Any) -> Any:
        """Return the first worker's `value` on every worker."""
        if self.ranks == 1:
            return value
        import torch.distributed as dist

        values = [value]
        dist.broadcast_object_list(values, src=0)
        return values[0]


def is_disk_full(error: BaseException) -> bool:
    """Return whether an error means that a disk or the user's quota is full.

    Errors of safetensors have the error number only in their text.
    """
    if getattr(error, "errno", None) in DISK_FULL_NUMBERS:
        return True
    return any(f"(os error {number})" in str(error) for number in DISK_FULL_NUMBERS)


def describe_error(error: BaseException) -> str:
    """Return the class and the first line of an error's message, shortened to one line."""
    first_line = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {textwrap.shorten(first_line, 160)}"


def disk_full_error(error: BaseException, folder: Path) -> DiskFullError:
    """Return the DiskFullError for an error of the operating system or of safetensors.

    Args:
        error: the error. If it has a file name, the DiskFullError names this file instead of the folder.
        folder: the folder that was written to.
    """
    file_name = getattr(error, "filename", None)
    path = Path(os.fsdecode(file_name)) if isinstance(file_name, str | bytes) else folder
    existing_path = next(parent for parent in (path, *path.parents) if parent.exists())
    free_bytes = shutil.disk_usage(existing_path).free
    return DiskFullError("train.disk_full", path=path, value=free_bytes, cause=describe_error(error))


@contextmanager
def end_if_code_is_wrong(family: str) -> Iterator[None]:
    """Raise ParamsError, which is not retried, if the block raises an error that only a change of code can remove.

    Use this around code of a model's family that does not depend on other machines or on the state of the run.
    Elsewhere, an AttributeError may follow from the death of a worker.
    """
    try:
        yield
    except CODE_ERRORS as error:
        line = traceback.extract_tb(error.__traceback__)[-1]
        location = f"{Path(line.filename).name}:{line.lineno}"
        raise ParamsError("train.wrong_code", family=family, cause=describe_error(error), location=location) from error


@contextmanager
def name_full_disk(folder: Path) -> Iterator[None]:
    """Raise DiskFullError, which names the folder, if its disk is full while the block writes to it.

    The operating system's error does not name the file if a write fails, and neither does the error of safetensors. The
    run's folder, the output and the scratch folder may be on different disks.
    """
    try:
        yield
    except DiskFullError:
        raise
    except Exception as error:
        if not is_disk_full(error):
            raise
        raise disk_full_error(error, folder) from error


def alignment_sections(cfg: Train, settings: Settings) -> tuple[Train, Settings]:
    """Return the section `train` and the model's settings for the alignment phase described in `settings.align`."""
    align = settings.align
    assert align is not None, "a model without an alignment"
    train_changes = {"epochs": align.epochs, "global_batch": align.global_batch, "export": "last"}
    model_changes: dict[str, Any] = {"rates": align.rates, "delays": dict.fromkeys(settings.delays, 0.0), "align": None}
    return cfg.model_copy(update=train_changes), replace(settings, **model_changes)  # type: ignore[type-var]


def newest_attempt(run_dir: Path) -> int:
    """Return the number of the newest attempt, or 0 if no attempt has begun or the run has ended.

    The number is stored in the run's folder, which is removed when the run ends.
    """
    try:
        return int((run_dir / ATTEMPT_FILE).read_text())
    except FileNotFoundError:
        return 0


def begin_attempt(run_dir: Path) -> int:
    """Record a new attempt and return its number. Older attempts end as soon as they notice the new number."""
    number = newest_attempt(run_dir) + 1
    with name_full_disk(run_dir):
        write_atomic(run_dir / ATTEMPT_FILE, f"{number}\n")
    return number


def require_newest_attempt(run_dir: Path, number: int) -> None:
    """Raise SupersededError unless attempt `number` is the newest one."""
    newest = newest_attempt(run_dir)
    if newest != number:
        code = "train.superseded" if newest else "train.run_has_ended"
        raise SupersededError(code, run=run_dir.name, attempt=number, newest=newest)


@contextmanager
def end_when_superseded(run_dir: Path, number: int) -> Iterator[None]:
    """End this process if a later attempt replaces attempt `number` while the block runs.

    If a host is cut off from the other hosts, its workers keep running while the next attempt trains elsewhere. They
    may wait half an hour in a collective operation for workers that no longer exist, and Ray cannot end them. Therefore
    a thread checks for a later attempt and ends this process even while it waits. The process also ends if the block
    fails because another worker of this attempt was ended first.
    """
    block_ended = threading.Event()

    def exit_if_superseded() -> None:
        try:
            require_newest_attempt(run_dir, number)
        except SupersededError as error:
            print(f"train: {error}", flush=True)
            os._exit(1)
        except OSError:
            return  # the disk is unavailable, so this attempt cannot write anything either

    def watch() -> None:
        while not block_ended.wait(CHECK_INTERVAL_S):
            exit_if_superseded()

    threading.Thread(target=watch, name="newest attempt", daemon=True).start()
    try:
        yield
    except BaseException:
        exit_if_superseded()
        raise
    finally:
        block_ended.set()


@contextmanager
def stop_on_sigterm(run_dir: Path, grace_s: float = GRACE_S) -> Iterator[None]:
    """Turn SIGTERM into a request to end the run, and end this process if it is still training after the grace time.

    Only the process that started the run receives the signal. Its workers, which may be on other machines, check for
    the file STOP_FILE.
    """
    stop_file = run_dir / STOP_FILE
    stop_file.unlink(missing_ok=True)

    def request_stop(*_: Any) -> None:
        if not stop_file.exists():  # a second signal does not extend the grace time
            stop_file.touch()
            signal.setitimer(signal.ITIMER_REAL, grace_s)

    def terminate(*_: Any) -> None:
        raise SystemExit(TERMINATED)

    previous_handlers = {
        signal.SIGTERM: signal.signal(signal.SIGTERM, request_stop),
        signal.SIGALRM: signal.signal(signal.SIGALRM, terminate),
    }
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)
        stop_file.unlink(missing_ok=True)


def choose_accelerator(gpu: bool) -> None:
    """Make DeepSpeed use the GPU or the CPU, and configure the GPU's allocator.

    Call this before anything imports DeepSpeed, which otherwise chooses an accelerator itself at import.
    """
    variables = process_environment(gpu)
    if gpu:
        os.environ.update(variables)
    else:
        # the other variables must be set before torch is imported, so they only take effect in new processes
        os.environ["DS_ACCELERATOR"] = variables["DS_ACCELERATOR"]
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator().device_name()
    assert accelerator == os.environ["DS_ACCELERATOR"], f"DeepSpeed chose {accelerator} before compute.gpu was read"


def loopback_environment() -> dict[str, str]:
    """Return environment variables that make torch's workers on one machine listen on the loopback interface only."""
    interfaces = [name for _, name in socket.if_nameindex()]
    loopback = next(name for name in interfaces if name in ("lo", "lo0"))  # Linux, macOS
    return {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback}


@contextmanager
def single_worker_group(gpu: bool) -> Iterator[None]:
    """Set up `torch.distributed` and its environment variables with this process as the only worker.

    The environment and `torch.nn.functional.linear` are restored afterwards. ZeRO 3 replaces torch's `linear` with a
    version that rounds differently and would change later results in this process.
    """
    choose_accelerator(gpu)
    import deepspeed
    import torch.distributed as dist
    from torch.nn import functional

    variables = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", **loopback_environment()}
    previous_variables = {name: os.environ.pop(name) for name in variables if name in os.environ}
    torch_linear = functional.linear
    os.environ.update(variables)
    # The store is in memory because a file store of the next group would have the same file name, and the file would be
    # deleted when this group's store is garbage-collected
    dist.init_process_group("nccl" if gpu else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        # DeepSpeed has process groups that would outlive torch's if DeepSpeed did not destroy them itself
        (deepspeed.comm if deepspeed.comm.is_initialized() else dist).destroy_process_group()
        functional.linear = torch_linear
        for name in variables:
            os.environ.pop(name)
        os.environ.update(previous_variables)
