"""The section `promote`: what a challenger must be better at, how surely, and what must not suffer."""

from collections.abc import Mapping
from typing import Annotated

from pydantic import Field

from m3diff.settings.section import Section


class Promote(Section):
    protocol: str  # "<dataset>/<protocol>", as metrics.json names it
    metric: str  # a score of m3diff.scoring.metrics.METRICS; greater is better
    min_gain: float = Field(ge=0)  # which the lower bound of the gain must exceed
    confidence: float = Field(ge=0.5, lt=1)  # of the gain's interval; 0.95: equal models pass in 2.5 % of cases
    guards: Mapping[str, Annotated[float, Field(ge=0, strict=True)]]  # score -> by how much it may be worse
