"""What a process is set up with before it trains: the accelerator that DeepSpeed takes, and a process group."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from m3diff.models.device import environment


def choose_accelerator(gpu: bool) -> None:
    """Tell DeepSpeed in this process where it computes, and a GPU's allocator how; DeepSpeed must not have chosen
    another before."""
    there = environment(gpu)
    os.environ.update(there if gpu else {"DS_ACCELERATOR": there["DS_ACCELERATOR"]})
    from deepspeed.accelerator import get_accelerator

    chosen = get_accelerator().device_name()
    assert chosen == os.environ["DS_ACCELERATOR"], f"DeepSpeed took {chosen} before compute.gpu was read"


def loopback() -> dict[str, str]:
    """Environment variables by which torch's workers of one machine listen on its loopback interface alone."""
    name = next(name for _, name in socket.if_nameindex() if name in ("lo", "lo0"))  # Linux, macOS
    return {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": name}


@contextmanager
def only_worker(backend: str) -> Iterator[None]:
    """Within, `torch.distributed` is up with this process alone, and the environment says so. After it the process
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
