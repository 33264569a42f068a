"""What a model family is: the few functions that the rest of the project needs of it.

The training loop, prediction, planning and registration name no family: they take one from `components.models.FAMILIES`.
This module and the `family.py` of each family import nothing heavy; the functions import torch when they are called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PretrainedConfig, PreTrainedModel


@dataclass(frozen=True)
class Lora:
    """Low-rank adapters. Rank 0 adds none: the linears that would bear them train in full."""

    rank: int
    alpha: int

    def __post_init__(self) -> None:
        faults = [f"rank must be 0 or more, found {self.rank}"] if self.rank < 0 else []
        faults += [f"alpha must be 1 or more, found {self.alpha}"] if self.alpha < 1 else []
        if faults:
            raise ValueError("; ".join(faults))

    __pydantic_config__ = {"extra": "forbid"}
