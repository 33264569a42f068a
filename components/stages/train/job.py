"""What a worker is sent and its place among the workers. Light: a worker unpickles it before it imports torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from m3diff.settings.compute import Compute
from m3diff.stages.train.params import Train
from m3diff.stages.train.phase import DatasetFilter

if TYPE_CHECKING:
    from m3diff.models.family import Settings


CURVES = "curves.csv"


@dataclass(frozen=True)
class Job:
    """What a worker is sent: one phase of a training. `run_dir` is on storage that every worker sees.

    Attributes:
        weights: the folder that the phase begins with; None: the base, `cfg.base`.
        datasets: whose samples it takes.
        generation: the attempt's number, as `generation.py` has it.
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
        """What the first worker says."""
        if self.ranks == 1:
            return value
        import torch.distributed as dist

        told = [value]
        dist.broadcast_object_list(told, src=0)
        return told[0]
