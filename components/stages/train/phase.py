"""The phases of a training: an alignment, where the model's settings ask for one, and the fine-tuning.

Each phase is a run of the loop on datasets of its own, with a folder, checkpoints and a schedule of its own, so each
goes on by itself where it was killed. The fine-tuning begins with the alignment's weights. Light to import.
"""

import csv
import io
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from m3diff.records.files import write_atomic

if TYPE_CHECKING:
    from m3diff.models.family import Settings
    from m3diff.stages.train.params import Train

ALIGNMENT, DONE = "alignment", "done.json"
"""In the run's folder the alignment's; in that, what it came to, which says that it has ended."""


@dataclass(frozen=True)
class DatasetFilter:
    """Whose samples a phase takes: those of `names`, or, with `others`, of all but these."""

    names: tuple[str, ...] = ()
    others: bool = True

    @property
    def takes_all(self) -> bool:
        return self.others and not self.names

    def __str__(self) -> str:
        return f"{'datasets other than ' if self.others else ''}{', '.join(self.names)}"


def of_alignment(cfg: "Train", settings: "Settings") -> tuple["Train", "Settings"]:
    """The section `train` and the settings of the model with which the alignment of these trains."""
    align = settings.align
    assert align is not None, "a model without an alignment"
    told = {"epochs": align.epochs, "global_batch": align.global_batch, "export": "last"}
    changes = {"rates": align.rates, "delays": type(settings.delays)(), "align": None}
    return cfg.model_copy(update=told), replace(settings, **changes)  # type: ignore[type-var]


def with_alignment(alignment: Path, curves: Path) -> None:
    """Put the rows of the alignment's curves before those of `curves`, in place: its last step is 0."""
    first, second = _read(alignment), _read(curves)
    names = list(dict.fromkeys([*second[0], *first[0]]))
    last = int(first[-1]["step"])
    told = [row | {"step": str(int(row["step"]) - last)} for row in first]
    text = io.StringIO()
    writer = csv.DictWriter(text, names, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows([*told, *second])
    write_atomic(curves, text.getvalue())


def _read(curves: Path) -> list[dict[str, str]]:
    with curves.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))
