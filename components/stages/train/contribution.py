"""What the model's module contributes: numbers that the family names, measured at some steps, and a warning where the
module changes nothing.

They are taken over the whole global batch, of all workers, so that how a step is dealt changes none; sequences that
only fill up a batch count too. They belong to the forward of their step, as its loss does: before the weights move.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from m3diff.models.family import MODULE_UPDATE_RATIO, Family, Settings
from m3diff.models.tuning import unwrapped
from m3diff.stages.train.curve import Curve
from m3diff.stages.train.loss import sum_over_ranks

NOTHING = 2.0**-8
"""Half the relative distance of neighbouring numbers in bf16: a feature in bf16 to which less is added stays the same.
A module in use is far from it: the embedded one starts at 0.5 and ends there."""


class ModuleContribution:
    """The numbers of one run. `names` is empty where the family measures none, or the model has no module."""

    def __init__(self, family: Family, settings: Settings, ranks: int) -> None:
        self.measures, self.ranks = family.contribution, ranks
        self.names = self.measures.names(settings) if self.measures else ()

    @contextmanager
    def measured(self, model: Any, wanted: bool) -> Iterator[Callable[[], dict[str, float]]]:
        """Around a step's forwards; gives what reads their numbers, which waits for the device. Nothing is measured and
        nothing waited for where it is not `wanted`, which all workers must agree on."""
        if not self.measures or not self.names or not wanted:
            yield dict
            return
        figures = self.measures.figures
        with self.measures.recorded(unwrapped(model)) as recorded:

            def read() -> dict[str, float]:
                sums = sum_over_ranks(torch.stack(recorded).double().sum(dim=0).cpu(), self.ranks)
                return dict(zip(self.names, figures(sums), strict=True))

            yield read

    def latest(self, curve: Curve) -> dict[str, float]:
        """The numbers that were measured last; nothing where none was."""
        return {name: value for name, value in curve.latest(self.names).items() if name in self.names}

    def warning(self, curve: Curve, steps: int, warm: int) -> str | None:
        """In words, where the numbers measured last are of a step after `warm`, the last of any part's warm-up, and the
        module changes nothing."""
        latest = curve.latest(self.names)
        ratios = update_ratios(latest)
        if not self.measures or not ratios or max(ratios.values()) >= NOTHING:
            return None
        if latest["step"] <= warm:
            return None
        told = ", ".join(f"{name} {value:.2g}" for name, value in ratios.items())
        return (
            f"the module changes nothing: at step {latest['step']:.0f} of {steps}, after the warm-up, each of its "
            f"updates is under {NOTHING:.2g} of the features that it changes ({told}), less than bf16 resolves, so the "
            f"model captions as its base would without the module. {self.measures.remedy}"
        )


def update_ratios(values: Mapping[str, float]) -> dict[str, float]:
    """Among named numbers, the sizes of the module's updates."""
    return {name: value for name, value in values.items() if name.startswith(MODULE_UPDATE_RATIO)}
