"""The section `evaluate`: which metrics, and what the report shows."""

from typing import Annotated

from pydantic import Field

from m3diff.scoring.metrics import METRICS
from m3diff.scoring.metrics.judge import JudgeSettings
from m3diff.settings.section import Section, one_of


class Evaluate(Section):
    metrics: tuple[Annotated[str, one_of(METRICS)], ...] = Field(min_length=1)
    gallery: int = Field(ge=0)  # MB of images that report.html holds; of more, all are files of the folder images
    judge: JudgeSettings | None  # asked where `metrics` has judge, and then only
    allow_fewer_pairs: bool  # score a protocol that has fewer pairs than papers score, marked in every table
