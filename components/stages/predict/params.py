"""The section `predict`: how the test split is captioned."""

from pydantic import Field

from m3diff.settings.section import Section


class Predict(Section):
    """Settings for captioning the test split.

    All pairs of a batch have the same question, so the batch size does not change any caption.
    """

    batch_pairs: int = Field(default=48, ge=1)
    """Number of pairs that one worker captions together. Larger batches are faster and take more memory."""

    max_new_tokens: int = Field(default=64, ge=1)
    """Maximum length of a caption, in tokens. Longer captions are cut off. A batch takes as long as its longest
    caption."""

    limit: int = Field(default=0, ge=0)
    """Number of test pairs to caption; 0 captions all. Scores on fewer pairs are not comparable to published scores."""
