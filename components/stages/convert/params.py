"""The section `convert`: how clean records are turned into question-answer samples."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from m3diff.records import installation
from m3diff.settings.section import Section

COUPLES_TASK = "describe"  # task whose questions are asked about two coupled images


class MixtureSource(Section):
    """How much of a dataset is used for training. Validation and test splits are always used completely."""

    task: str | None = None
    """Name of a task in the file `questions`. The questions of this task are asked about the pairs. null uses the task
    of the dataset's reader, or `describe` for couples."""

    weight: float = Field(default=1.0, ge=0)
    """How often each pair is used: 0.5 uses half of the pairs, 2 uses each pair twice, 0 leaves the dataset out."""

    max_pairs: int | None = Field(default=None, ge=0)
    """Maximum number of training pairs, drawn with the seed. null uses all pairs. The limit applies before `weight`
    repeats pairs."""

    samples: Literal["each", "one", "joined"] = "each"
    """Which samples are made from a pair: `each` makes one sample per reference, `one` makes one sample with a random
    reference, `joined` makes one sample whose answer contains all references."""

    references_per_question: Annotated[int, Field(ge=1)] | Literal["all"] | None = None
    """Maximum number of training samples per question about a pair of this dataset. `all` removes the limit, null uses
    the section's `references_per_question`."""

    couple: Literal["also"] | None = None
    """Whether single images are trained on in couples, too, as in OneDiff's Coupled Sample Training. `also` trains each
    image alone and, once per epoch, together with another one: two unrelated images, the question of `task`, and both
    captions as the answer. Every record of the dataset must have one image and one turn. null makes no couples."""

    def task_for(self, reader_task: str) -> str:
        """Return the task whose questions are asked.

        Single images have questions of their own, so the questions of a dataset with couples are asked about couples.

        Args:
            reader_task: task of the dataset's reader.
        """
        if self.task is not None:
            return self.task
        return COUPLES_TASK if self.couple else reader_task


class Convert(Section):
    """Selection of pairs, references and questions for the training mixture."""

    seed: int = Field(default=11_093, ge=0)
    """Seed of all random draws: pairs, references, questions and order. Each draw depends only on the seed and the
    pair's id, so adding a dataset to the mixture does not change the draws for other datasets."""

    questions: Path = Field(default_factory=installation.questions_file)
    """YAML file with the questions for each task. The default is the file in the package, `profiles/questions.yaml`."""

    references_per_question: int | None = Field(default=None, ge=1)
    """Maximum number of training samples per question about a pair. Captions answer a single question about their pair.
    null makes one sample per reference. Validation and test splits keep all references."""

    no_change_share: float = Field(default=1.0, ge=0, le=1)
    """Share of the pairs without a change that are used for training. 1 uses all of them. With too many such pairs, a
    model learns to deny changes."""

    sources: Mapping[str, MixtureSource] = Field(default_factory=dict)
    """Settings of individual datasets, by name. Datasets that are not listed use the defaults."""

    def most_references(self, source: MixtureSource) -> int | None:
        """Return the maximum number of training samples per question of a dataset, or None for no limit."""
        if source.samples == "one":
            return 1
        limit = source.references_per_question
        if limit is None:
            limit = self.references_per_question
        return None if limit == "all" else limit
