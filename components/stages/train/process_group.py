"""The process group of Ray Train's workers on one machine: they meet over a file. Ray has them meet at a port, which
torch opens on every interface."""

import os
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import ray
import torch.distributed as dist
from ray.train.torch import TorchConfig
from ray.train.torch.config import _set_torch_distributed_env_vars, _TorchBackend


@dataclass
class OneMachineConfig(TorchConfig):
    """Ray's configuration of a process group, for workers that share a file system. `folder` takes the file."""

    folder: str = ""

    @property
    def backend_cls(self) -> type["OneMachineBackend"]:
        return OneMachineBackend


class OneMachineBackend(_TorchBackend):
    """What Ray calls before and after the workers train."""

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        """Bring up one group of all workers, over a file that no group before it had, as a OneMachineConfig says."""
        folder = Path(backend_config.folder)
        folder.mkdir(parents=True, exist_ok=True)
        file, ranks, seconds = folder / f"group-{uuid4().hex}", len(worker_group), backend_config.timeout_s
        worker_group.execute(_set_torch_distributed_env_vars)
        given = (backend_config.backend, str(file), ranks, seconds)
        ray.get([worker_group.execute_single_async(rank, join, rank, *given) for rank in range(ranks)])


def join(rank: int, backend: str, file: str, ranks: int, seconds: int) -> None:
    """Join the group of `ranks` workers that meets over `file`, in a worker."""
    if backend == "nccl":  # a collective that hangs ends its worker, as in Ray's own groups
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    timeout = timedelta(seconds=seconds)
    dist.init_process_group(backend, init_method=f"file://{file}", rank=rank, world_size=ranks, timeout=timeout)
