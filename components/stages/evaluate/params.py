"""The section `evaluate` of the settings: metrics to compute, and limits of the report."""

from typing import Annotated

from pydantic import Field

from m3diff.scoring.metrics import METRICS
from m3diff.scoring.metrics.judge import JudgeSettings
from m3diff.settings.section import Section, name_validator


class Evaluate(Section):
    """Metrics to compute, and limits of the report."""

    metrics: tuple[Annotated[str, name_validator(METRICS)], ...] = Field(
        default=("CIDEr", "METEOR", "ROUGE-L", "BLEU", "SPICE", "change_accuracy", "pixel_threshold"), min_length=1
    )
    """Names of the metrics to compute. SPICE takes the longest and needs the folder `compute.spice_dir`. If it is not
    set, the report marks SPICE as absent."""

    gallery: int = Field(default=24, ge=0)
    """Limit in MB for images embedded in report.html. Above it, all images are written to the folder `images`."""

    judge: JudgeSettings | None = None
    """Endpoint of the language model for the metric `judge`. It is used only if `metrics` contains `judge`."""

    allow_fewer_pairs: bool = False
    """Whether to score protocols with fewer pairs than in papers, and mark them in every table. If false, evaluate
    fails for such a protocol."""
