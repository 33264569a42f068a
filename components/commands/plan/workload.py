"""The pairs and references of an epoch, and the lengths of their texts."""

import math
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import NamedTuple

import polars as pl

from m3diff.models.contract import Processor
from m3diff.records.sample import Turn

# Numbers of tokens to assume if there is no tokenizer. PROMPT_TOKENS covers the chat template and a question, without
# images. REFERENCE_TOKENS covers a reference and its end token. Families that do not read a question set their own
# prompt length
PROMPT_TOKENS = 29.0
REFERENCE_TOKENS = 15.0

MAX_TOKENIZED_TEXTS = 20_000  # maximum number of distinct texts that are tokenised; larger mixtures are sampled evenly


class DatasetCounts(NamedTuple):
    """The number of pairs and references of a dataset in an epoch."""

    pairs: int
    references: int


@dataclass(frozen=True)
class DatasetShare:
    """The share of a dataset, or of one of its splits, in an epoch. A pair that is used twice counts twice.

    Attributes:
        split: the dataset's split, as named in `train_on`; empty if samples were counted, because samples do not name
            it.
        published_pairs: number of published pairs in the split. Pairs without any words are not used for training.
        is_counted: whether the references were counted rather than estimated.
    """

    dataset: str
    pairs: int
    references: int
    split: str = ""
    published_pairs: int = 0
    is_counted: bool = True


@dataclass(frozen=True)
class Workload:
    """The pairs and references of an epoch.

    Attributes:
        origin: text that says where the counts come from.
        prompt_tokens: mean number of tokens of the chat template and the question per pair, without the images.
        reference_tokens: mean number of tokens per reference, including its end token.
        pairs_by_references: number of pairs for each number of references; empty if only sums are known.
    """

    origin: str
    shares: Sequence[DatasetShare]
    prompt_tokens: float
    reference_tokens: float
    pairs_by_references: Mapping[int, int]

    @property
    def counts_by_dataset(self) -> dict[str, DatasetCounts]:
        """Number of pairs and references of each dataset, summed over its splits."""
        counts: dict[str, DatasetCounts] = {}
        for share in self.shares:
            pairs, references = counts.get(share.dataset, (0, 0))
            counts[share.dataset] = DatasetCounts(pairs + share.pairs, references + share.references)
        return counts

    @property
    def pairs(self) -> int:
        """Number of pairs in an epoch, over all datasets."""
        return sum(share.pairs for share in self.shares)

    @property
    def references(self) -> int:
        """Number of references in an epoch, over all datasets."""
        return sum(share.references for share in self.shares)

    def max_references(self, max_captions: int | None) -> int | None:
        """Return the number of references in the longest sequence, or None if only sums are known.

        Args:
            max_captions: maximum number of references per sequence; None allows all references of a pair.
        """
        if not self.pairs_by_references:
            return None
        most_references = max(self.pairs_by_references)
        return min(most_references, max_captions or most_references)

    def sequences(self, max_captions: int | None) -> int:
        """Return the number of sequences per epoch. All references in a sequence belong to the same pair.

        The last sequence of a pair may have fewer references than the others. If only sums are known, every sequence is
        assumed to be full.

        Args:
            max_captions: maximum number of references per sequence; None allows all references of a pair.
        """
        if max_captions is None:
            return self.pairs
        if self.pairs_by_references:
            return sum(
                pairs * math.ceil(references / max_captions) for references, pairs in self.pairs_by_references.items()
            )
        sequences = 0.0
        for counts in self.counts_by_dataset.values():
            mean_references = counts.references / counts.pairs
            sequences += counts.references / min(max_captions, mean_references)
        return round(sequences)


@dataclass(frozen=True)
class TokenCounter:
    """Counts the tokens of prompts and references.

    Attributes:
        processor: processor with the tokenizer; None if the base is not on this machine, in which case lengths are
            estimated.
        image_tokens: number of image tokens in a prompt.
    """

    processor: Processor | None
    image_tokens: int

    def prompt_tokens(self, questions: pl.Series) -> float:
        """Return the mean number of tokens of the chat template and the question, without the images."""
        if self.processor is None:
            return PROMPT_TOKENS
        processor = self.processor
        marks = processor.marks(2)
        return _mean_length(questions, lambda text: processor.encode_prompt((Turn(text),), marks)) - self.image_tokens

    def reference_tokens(self, references: pl.Series) -> float:
        """Return the mean number of tokens of a reference, including its end token."""
        if self.processor is None:
            return REFERENCE_TOKENS
        return _mean_length(references, self.processor.encode_answer)

    def __str__(self) -> str:
        return "lengths by its tokenizer" if self.processor else "lengths estimated"


def _mean_length(texts: pl.Series, encode: Callable[[str], Sized]) -> float:
    """Return the mean number of tokens per text. A text that occurs twice counts twice."""
    occurrences = texts.value_counts().sort(texts.name)
    sample = occurrences.gather_every(math.ceil(len(occurrences) / MAX_TOKENIZED_TEXTS))
    total_tokens = 0
    total_texts = 0
    for text, count in sample.rows():
        total_tokens += len(encode(text)) * count
        total_texts += count
    return total_tokens / total_texts
