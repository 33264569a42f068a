"""The section `evaluate`: which metrics, and what the report shows."""

from pydantic import Field

from components.section import Section


class Evaluate(Section):
    metrics: tuple[str, ...] = Field(min_length=1)  # of components.evaluate.metrics.METRICS
    gallery: int = Field(ge=0)  # pairs shown in the report
    allow_fewer_pairs: bool  # score a protocol that has fewer pairs than papers score, marked in every table
