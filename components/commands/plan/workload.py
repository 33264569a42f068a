"""The image sets and samples of an epoch, and the lengths of their texts."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import polars as pl

from m3diff.models.contract import Processor
from m3diff.models.dialogue import encode_dialogue
from m3diff.models.masks import count_shared_tokens
from m3diff.records.sample import PAIR, Turn

# Numbers of tokens to assume if there is no tokenizer. PROMPT_TOKENS covers the chat template and a question, without
# images. REFERENCE_TOKENS covers a reference and its end token. Families that do not read a question set their own
# prompt length
PROMPT_TOKENS = 29.0
REFERENCE_TOKENS = 15.0

LENGTHS_ESTIMATED = "lengths estimated"  # in the origin of a workload whose texts were not tokenised

# Maximum numbers of distinct texts and of dialogues that are tokenised; larger mixtures are sampled evenly. A dialogue
# takes longer, because its prompts are rendered turn by turn
MAX_TOKENIZED_TEXTS = 20_000
MAX_TOKENIZED_DIALOGUES = 2_000


class DatasetCounts(NamedTuple):
    """The number of image sets (pairs) and samples (references) of a dataset in an epoch."""

    pairs: int
    references: int


@dataclass(frozen=True)
class DatasetShare:
    """The share of a dataset, or of one of its splits, in an epoch. A pair that is used twice counts twice.

    Attributes:
        pairs: number of image sets.
        references: number of samples.
        split: the dataset's split, as named in `train_on`; empty if samples were counted, because samples do not name
            it.
        published_pairs: number of published pairs in the split. Pairs without any words are not used for training.
        is_counted: whether the references were counted rather than estimated.
        images: number of images of each image set.
        are_couples: whether these are couples of single images, each of which is also trained on alone.
    """

    dataset: str
    pairs: int
    references: int
    split: str = ""
    published_pairs: int = 0
    is_counted: bool = True
    images: int = PAIR
    are_couples: bool = False


@dataclass(frozen=True)
class SampleGroup:
    """The image sets of an epoch that have the same number of images, with the samples about them.

    Attributes:
        shares: the shares of datasets. All have the same number of images.
        prompt_tokens: mean number of tokens of a prompt, without the images. A prompt is the chat template and a
            question. The prompt of a dialogue is everything but its answers.
        reference_tokens: mean number of supervised tokens of a sample: its answer, with the end token. In a
            dialogue, all answers are supervised.
        pairs_by_references: number of image sets for each number of samples; empty if only sums are known.
        prompts: number of prompts. None: one for each image set. Captions of an image set share a prompt, and questions
            have their own.
    """

    shares: Sequence[DatasetShare]
    prompt_tokens: float
    reference_tokens: float
    pairs_by_references: Mapping[int, int]
    prompts: int | None = None

    @property
    def images(self) -> int:
        """Number of images of each image set."""
        return self.shares[0].images

    @property
    def pairs(self) -> int:
        """Number of image sets in an epoch."""
        return sum(share.pairs for share in self.shares)

    @property
    def references(self) -> int:
        """Number of samples in an epoch."""
        return sum(share.references for share in self.shares)

    def prompts_per_sequence(self, max_captions: int | None) -> float:
        """Return the mean number of prompts in a sequence. Each sequence has at least one."""
        prompts = self.pairs if self.prompts is None else self.prompts
        return max(1.0, prompts / self.sequences(max_captions))

    def max_references(self, max_captions: int | None) -> int | None:
        """Return the number of samples in the longest sequence, or None if only sums are known.

        Args:
            max_captions: maximum number of samples per sequence; None allows all samples of an image set.
        """
        if not self.pairs_by_references:
            return None
        most_references = max(self.pairs_by_references)
        return min(most_references, max_captions or most_references)

    def sequences(self, max_captions: int | None) -> int:
        """Return the number of sequences per epoch. All samples in a sequence belong to the same image set.

        The last sequence of an image set may have fewer samples than the others. If only sums are known, every sequence
        is assumed to be full.

        Args:
            max_captions: maximum number of samples per sequence; None allows all samples of an image set.
        """
        if max_captions is None:
            return self.pairs
        if self.pairs_by_references:
            return sum(
                pairs * math.ceil(references / max_captions) for references, pairs in self.pairs_by_references.items()
            )
        sequences = 0.0
        for counts in sum_by_dataset(self.shares).values():
            mean_references = counts.references / counts.pairs
            sequences += counts.references / min(max_captions, mean_references)
        return round(sequences)


@dataclass(frozen=True)
class Workload:
    """The image sets and samples of an epoch.

    Attributes:
        origin: text that says where the counts come from.
        groups: the image sets by their number of images. Couples of single images are a group of their own.
    """

    origin: str
    groups: Sequence[SampleGroup]

    @property
    def shares(self) -> list[DatasetShare]:
        """The shares of datasets, group by group."""
        return list(chain.from_iterable(group.shares for group in self.groups))

    @property
    def counts_by_dataset(self) -> dict[str, DatasetCounts]:
        """Number of image sets and samples of each dataset, summed over its splits and groups."""
        return sum_by_dataset(self.shares)

    @property
    def pairs(self) -> int:
        """Number of image sets in an epoch, over all datasets."""
        return sum(group.pairs for group in self.groups)

    @property
    def references(self) -> int:
        """Number of samples in an epoch, over all datasets."""
        return sum(group.references for group in self.groups)

    @property
    def has_only_pairs(self) -> bool:
        """Whether all image sets are pairs of the datasets, so that samples are references."""
        return all(share.images == PAIR and not share.are_couples for share in self.shares)

    @property
    def prompt_tokens(self) -> float:
        """Mean number of tokens of a prompt, without the images. Each image set counts once."""
        return sum(group.pairs * group.prompt_tokens for group in self.groups) / self.pairs

    @property
    def reference_tokens(self) -> float:
        """Mean number of supervised tokens of a sample."""
        return sum(group.references * group.reference_tokens for group in self.groups) / self.references

    def max_references(self, max_captions: int | None) -> int | None:
        """Return the number of samples in the longest sequence, or None if only sums are known for a group."""
        most_references = [group.max_references(max_captions) for group in self.groups]
        counts = [count for count in most_references if count is not None]
        return max(counts) if len(counts) == len(most_references) else None

    def sequences(self, max_captions: int | None) -> int:
        """Return the number of sequences per epoch; see `SampleGroup.sequences`."""
        return sum(group.sequences(max_captions) for group in self.groups)


def sum_by_dataset(shares: Iterable[DatasetShare]) -> dict[str, DatasetCounts]:
    """Return the number of image sets and samples of each dataset."""
    counts: dict[str, DatasetCounts] = {}
    for share in shares:
        pairs, references = counts.get(share.dataset, (0, 0))
        counts[share.dataset] = DatasetCounts(pairs + share.pairs, references + share.references)
    return counts


class DialogueTokens(NamedTuple):
    """The number of tokens of a dialogue without its images: of its answers, and of everything else."""

    prompt: float
    supervised: float


@dataclass(frozen=True)
class TokenCounter:
    """Counts the tokens of prompts and references.

    Attributes:
        processor: processor with the tokenizer; None if the base is not on this machine, in which case lengths are
            estimated.
        image_tokens: (number of images) -> number of image tokens in a prompt.
    """

    processor: Processor | None
    image_tokens: Callable[[int], int]

    def prompt_tokens(self, questions: pl.Series, images: int = PAIR) -> float:
        """Return the mean number of tokens of the chat template and the question, without the images."""
        if self.processor is None:
            return PROMPT_TOKENS
        processor = self.processor
        marks = processor.marks(images)
        mean_length = _mean_length(questions, lambda text: processor.encode_prompt((Turn(text),), marks))
        return mean_length - self.image_tokens(images)

    def reference_tokens(self, references: pl.Series) -> float:
        """Return the mean number of tokens of a reference, including its end token."""
        if self.processor is None:
            return REFERENCE_TOKENS
        return _mean_length(references, self.processor.encode_answer)

    def dialogue_tokens(self, dialogues: Sequence[Sequence[Turn]], images: int) -> DialogueTokens:
        """Return the mean number of tokens of dialogues, packed as in training.

        If the chat template splits a dialogue into several branches, their shared beginning is counted once.
        """
        sample = dialogues[:: math.ceil(len(dialogues) / MAX_TOKENIZED_DIALOGUES)]
        if self.processor is None:
            mean_turns = sum(map(len, sample)) / len(sample)
            return DialogueTokens(mean_turns * PROMPT_TOKENS, mean_turns * REFERENCE_TOKENS)
        processor = self.processor
        marks = processor.marks(images)
        total_tokens = 0
        supervised_tokens = 0
        for turns in sample:
            branches = encode_dialogue(processor.encode_prompt, processor.encode_answer, turns, marks)
            shared_tokens = count_shared_tokens(branches)
            total_tokens += shared_tokens - self.image_tokens(images)
            for branch in branches:
                total_tokens += len(branch.ids) - shared_tokens
                supervised_tokens += sum(end - start for start, end in branch.spans)
        return DialogueTokens((total_tokens - supervised_tokens) / len(sample), supervised_tokens / len(sample))

    def __str__(self) -> str:
        return "lengths by its tokenizer" if self.processor else LENGTHS_ESTIMATED


# Lengths if there is no tokenizer; the number of image tokens is then not needed
ESTIMATED_LENGTHS = TokenCounter(processor=None, image_tokens=lambda images: 0)


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
