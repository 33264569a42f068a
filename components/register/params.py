"""The section `register`: where versions are kept, and what a new one must exceed."""

from pydantic import Field

from components.section import Section


class Register(Section):
    tracking_uri: str
    experiment: str = Field(min_length=1)
    model_name: str = Field(min_length=1)
    gate_metric: str  # of components.evaluate.metrics.METRICS, or a share that evaluate computes
    min_gain: float = Field(ge=0)  # challenger must exceed champion by so much
