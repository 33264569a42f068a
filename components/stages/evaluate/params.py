"""The section `evaluate`: which metrics, and what the report shows."""

from pydantic import Field

from m3diff.endpoint import EndpointUrl
from m3diff.settings.section import Section


class JudgeSettings(Section):
    """Another model that reads captions beside their references, at an OpenAI-compatible endpoint."""

    url: EndpointUrl  # up to and with /v1
    model: str = Field(min_length=1)
    pairs: int = Field(default=200, ge=1)  # of each protocol at most
    timeout_s: int = Field(default=60, ge=1)
    key_variable: str = "OPENAI_API_KEY"  # the environment variable that holds the key; no key stands in a file


class Evaluate(Section):
    metrics: tuple[str, ...] = Field(min_length=1)  # of m3diff.scoring.metrics.METRICS
    gallery: int = Field(ge=0)  # MB of images that report.html holds; of more, all are files of the folder images
    judge: JudgeSettings | None  # asked where `metrics` has judge, and then only
    allow_fewer_pairs: bool  # score a protocol that has fewer pairs than papers score, marked in every table
