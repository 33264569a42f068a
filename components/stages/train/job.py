"""The work that a training worker is sent, what ends its attempt early, and the process group that it computes in.

Light: a worker unpickles it before it imports torch.
"""

import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from m3diff.models.device import environment
from m3diff.models.settings import Settings
from m3diff.records.files import write_atomic
from m3diff.settings.compute import Compute
from m3diff.stages.train.params import Train

CURVES = "curves.csv"

# Files in the run's folder: the number of the newest attempt, and the request to end
GENERATION, STOP = "generation", "stop"

# Seconds between two looks at the generation; a network file system may show a new number some seconds later
LOOK_S = 2.0

GRACE_S = 18.0  # seconds for the current step and its checkpoint; a cancelled flow is killed after 20

TERMINATED = 128 + signal.SIGTERM  # exit code of a process that SIGTERM ended


class StoppedError(Exception):
    """The run was asked to end and has written its checkpoint."""


class SupersededError(BlockingIOError):
    """A later attempt trains this run, or the run has ended; this one writes nothing more."""


@dataclass(frozen=True)
class DatasetFilter:
    """The datasets whose samples a phase takes: `names`, or, with `others`, all but these."""

    names: tuple[str, ...] = ()
    others: bool = True

    def __str__(self) -> str:
        return f" of {'datasets other than ' if self.others else ''}{', '.join(self.names)}" if self.names else ""


@dataclass(frozen=True)
class Job:
    """A phase of a training. `run_dir` is on storage that every worker sees.

    Attributes:
        weights: the folder that the phase begins with; None: the base, `cfg.base`.
        datasets: the datasets whose samples it takes.
        generation: the attempt's number (`begin`).
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
    generation: int = 0


@dataclass(frozen=True)
class Runtime:
    """A worker's place among the workers."""

    rank: int = 0
    ranks: int = 1

    def say(self, text: str) -> None:
        if self.rank == 0:
            print(f"train: {text}", flush=True)

    def agree(self, value: Any) -> Any:
        """Return the first worker's `value` on every worker."""
        if self.ranks == 1:
            return value
        import torch.distributed as dist

        values = [value]
        dist.broadcast_object_list(values, src=0)
        return values[0]


def of_alignment(cfg: Train, settings: Settings) -> tuple[Train, Settings]:
    """Return the section `train` and the model's settings with which the alignment of `settings` trains."""
    align = settings.align
    assert align is not None, "a model without an alignment"
    own = {"epochs": align.epochs, "global_batch": align.global_batch, "export": "last"}
    changes: dict[str, Any] = {"rates": align.rates, "delays": type(settings.delays)(), "align": None}
    return cfg.model_copy(update=own), replace(settings, **changes)  # type: ignore[type-var]


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

    The signal reaches the process that began the run; its workers, on other machines too, see the file STOP.
    """
    file = run_dir / STOP
    file.unlink(missing_ok=True)

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


def choose_accelerator(gpu: bool) -> None:
    """Tell DeepSpeed where this process computes, and a GPU's allocator how, before DeepSpeed chooses by itself."""
    there = environment(gpu)
    os.environ.update(there if gpu else {"DS_ACCELERATOR": there["DS_ACCELERATOR"]})
    from deepspeed.accelerator import get_accelerator

    chosen = get_accelerator().device_name()
    assert chosen == os.environ["DS_ACCELERATOR"], f"DeepSpeed took {chosen} before compute.gpu was read"


def loopback() -> dict[str, str]:
    """Return environment variables by which torch's workers of one machine listen on its loopback interface alone."""
    name = next(name for _, name in socket.if_nameindex() if name in ("lo", "lo0"))  # Linux, macOS
    return {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": name}


@contextmanager
def only_worker(gpu: bool) -> Iterator[None]:
    """Bring up `torch.distributed` with this process alone, and the environment that says so. Afterwards the process
    computes as before: ZeRO 3 puts a linear of DeepSpeed's in the place of torch's, which rounds otherwise."""
    choose_accelerator(gpu)
    import deepspeed
    import torch.distributed as dist
    from torch.nn import functional

    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", **loopback()}
    before, linear = {name: os.environ.pop(name) for name in place if name in os.environ}, functional.linear
    os.environ.update(place)
    # in memory: a file's name would be the next group's, and is removed when this group's store is collected
    dist.init_process_group("nccl" if gpu else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        # DeepSpeed keeps groups of its own, which outlive torch's unless it ends them itself
        (deepspeed.comm if deepspeed.comm.is_initialized() else dist).destroy_process_group()
        functional.linear = linear
        for name in place:
            os.environ.pop(name)
        os.environ.update(before)
