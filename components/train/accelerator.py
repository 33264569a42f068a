"""What a process is set up with before it trains: the accelerator that DeepSpeed takes, and a process group."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from components.models.device import environment


def choose_accelerator(gpu: bool) -> None:
    """Tell DeepSpeed in this process where it computes; it must not have chosen another before."""
    os.environ["DS_ACCELERATOR"] = environment(gpu)["DS_ACCELERATOR"]
    from deepspeed.accelerator import get_accelerator

    chosen = get_accelerator().device_name()
    assert chosen == os.environ["DS_ACCELERATOR"], f"DeepSpeed took {chosen} before compute.gpu was read"


@contextmanager
def only_worker(folder: Path, backend: str) -> Iterator[None]:
    """Within, `torch.distributed` is up with this process alone, and the environment says so. `folder` must exist."""
    import torch.distributed as dist

    from components.train.engine import end_distributed

    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    before = {name: os.environ.pop(name, None) for name in place}
    os.environ.update(place)
    store = folder / "store"
    store.unlink(missing_ok=True)
    try:
        dist.init_process_group(backend, init_method=f"file://{store}", rank=0, world_size=1)
        try:
            yield
        finally:
            end_distributed()
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value
