"""The section `evaluate`: which metrics, and what the report shows."""

from pydantic import Field

from m3diff.scoring.metrics.judge import JudgeSettings
from m3diff.settings.section import Section


class Evaluate(Section):
    metrics: tuple[str, ...] = Field(min_length=1)  # of m3diff.scoring.metrics.METRICS
    gallery: int = Field(ge=0)  # MB of images that report.html holds; of more, all are files of the folder images
    judge: JudgeSettings | None  # asked where `metrics` has judge, and then only
    allow_fewer_pairs: bool  # score a protocol that has fewer pairs than papers score, marked in every table
