"""The section `convert`: how clean records become question-answer samples."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from m3diff.settings.section import Section


class Source(Section):
    """A dataset's way into the training mixture; validation and test splits always enter whole."""

    task: str | None = None  # which questions of the file `questions`; null: the dataset's own task
    weight: float = Field(default=1.0, ge=0)  # how often each pair is used: 0.5 half of the pairs, 2 each pair twice
    max_pairs: int | None = Field(default=None, ge=0)
    samples: Literal["each", "one", "joined"] = "each"  # of a pair: each reference, one sampled, or all joined
    references_per_pair: Annotated[int, Field(ge=1)] | Literal["all"] | None = None  # null: as the section says


class Convert(Section):
    seed: int = Field(ge=0)
    questions: Path
    references_per_pair: int | None = Field(ge=1)  # at most so many training samples of one pair; null: all
    no_change_share: float = Field(ge=0, le=1)  # share of no-change pairs that train
    sources: Mapping[str, Source]  # by dataset; one that is not named enters with the defaults

    def most_references(self, source: Source) -> int | None:
        """Return the most training samples of a pair of this dataset; None: all."""
        if source.samples == "one":
            return 1
        own = self.references_per_pair if source.references_per_pair is None else source.references_per_pair
        return None if own == "all" else own
