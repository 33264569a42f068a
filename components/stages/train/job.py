"""The work that a training worker is sent. Light: a worker unpickles it before it imports torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

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

    @property
    def takes_all(self) -> bool:
        return self.others and not self.names

    def __str__(self) -> str:
        return f"{'datasets other than ' if self.others else ''}{', '.join(self.names)}"


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
