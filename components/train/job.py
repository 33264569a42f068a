"""What a worker is sent and its place among the workers. Light: a worker unpickles it before it imports torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.compute import Compute
from components.train.params import Train

if TYPE_CHECKING:
    from components.models.family import Settings


TOLD = "curves.jsonl"
"""In the run's folder: the curves as they come, for who follows the training."""


@dataclass(frozen=True)
class Job:
    """What a worker is sent. `run_dir` is on storage that every worker sees."""

    cfg: Train
    model: Settings
    compute: Compute
    mixture: Path
    out: Path
    run_dir: Path
    base_sha256: str


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
        """What the first worker says."""
        if self.ranks == 1:
            return value
        import torch.distributed as dist

        told = [value]
        dist.broadcast_object_list(told, src=0)
        return told[0]
