"""The work that a training worker is sent, and the process that takes it: its place, accelerator and process group.
Light: a worker unpickles it before it imports torch."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from m3diff.models.device import environment
from m3diff.settings.compute import Compute
from m3diff.stages.train.params import Train

if TYPE_CHECKING:
    from m3diff.models.family import Settings

CURVES = "curves.csv"


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
        generation: the attempt's number (`attempts.begin`).
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
        """Print from the first worker alone."""
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


def end_distributed() -> None:
    """End `torch.distributed`. DeepSpeed keeps groups of its own, which outlive torch's unless it ends them itself."""
    import deepspeed
    import torch.distributed as dist

    (deepspeed.comm if deepspeed.comm.is_initialized() else dist).destroy_process_group()


@contextmanager
def only_worker(backend: str) -> Iterator[None]:
    """Bring up `torch.distributed` with this process alone, and the environment that says so. Afterwards the process
    computes as before: ZeRO 3 puts a linear of DeepSpeed's in the place of torch's, which rounds otherwise."""
    import torch.distributed as dist
    from torch.nn import functional

    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", **loopback()}
    before = {name: os.environ.pop(name, None) for name in place}
    os.environ.update(place)
    linear = functional.linear
    try:
        # in memory: a file's name would be the next group's, and is removed when this group's store is collected
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        try:
            yield
        finally:
            end_distributed()
    finally:
        functional.linear = linear
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value
