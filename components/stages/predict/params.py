"""The section `predict`: how the test split is captioned."""

from pydantic import Field

from m3diff.settings.section import Section


class Predict(Section):
    """Batches and lengths. A batch holds pairs of one question, so its size changes no caption."""

    batch_pairs: int = Field(ge=1)
    max_new_tokens: int = Field(ge=1)
    limit: int = Field(ge=0)  # pairs of the test split; 0 is all
