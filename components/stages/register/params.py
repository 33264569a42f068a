"""The sections `register`, where versions are kept, and `promote`, what a challenger must be better at."""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field

from m3diff.settings.section import Section


class Register(Section):
    tracking_uri: str
    experiment: str = Field(min_length=1, max_length=500)
    model_name: str = Field(pattern=r"""^[^/:.%"']+$""")  # what MLflow takes
    keeps: Literal["merged", "adapters"]  # what a version holds: all weights, or those that trained, beside the base


class Promote(Section):
    protocol: str  # "<dataset>/<protocol>", as metrics.json names it
    metric: str  # a score of m3diff.scoring.metrics.METRICS; greater is better
    min_gain: float = Field(ge=0)  # which the lower bound of the gain must exceed
    confidence: float = Field(ge=0.5, lt=1)  # of the gain's interval; 0.95: equal models pass in 2.5 % of cases
    guards: Mapping[str, Annotated[float, Field(ge=0, strict=True)]]  # score -> by how much it may be worse
