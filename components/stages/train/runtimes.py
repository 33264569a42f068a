"""The loop in this process (`compute.workers: 0`): the accelerator that DeepSpeed takes, and a group of one worker."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from m3diff.models.device import Device, environment
from m3diff.stages.train.attempts import stop_on_sigterm
from m3diff.stages.train.job import Job, Runtime


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
def only_worker(backend: str) -> Iterator[None]:
    """Bring up `torch.distributed` with this process alone, and the environment that says so. Afterwards the process
    computes as before: ZeRO 3 puts a linear of DeepSpeed's in the place of torch's, which rounds otherwise."""
    import torch.distributed as dist
    from torch.nn import functional

    from m3diff.stages.train.engine import end_distributed

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


def run_local(job: Job) -> dict[str, Any]:
    """Run the loop as the only worker and return its figures."""
    choose_accelerator(job.compute.gpu)  # before DeepSpeed is imported
    from m3diff.stages.train.loop import run_loop

    with only_worker(Device(job.compute.gpu, job.cfg.precision).backend), stop_on_sigterm(job.run_dir):
        return run_loop(job, Runtime())
