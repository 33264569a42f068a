"""What an epoch of training holds: the mixture counted where `convert` has made it, else the datasets' published counts."""

import math
from collections.abc import Callable, Iterable, Mapping, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components.convert.params import Convert, Source
from components.datasets import DATASETS
from components.datasets.spec import Published
from components.ingest.params import DatasetEntry
from components.models.family import PairProcessor
from components.section import ParamsError

PROMPT_TOKENS, REFERENCE_TOKENS = 29.0, 15.0
"""Estimates where no tokenizer is at hand: chat template and question without the images; one reference with its end."""
UNPUBLISHED_REFERENCES = 9.2
"""References of a pair where a dataset publishes no count. It is CLEVR-DC's: what the other datasets of the paper leave of
its 896k samples (section 5.2), over its 43,200 pairs of train and val."""


@dataclass(frozen=True)
class SourceCount:
    """One dataset's share of an epoch. A pair that is used twice counts twice."""

    pairs: int
    references: int


@dataclass(frozen=True)
class Workload:
    """What an epoch holds.

    Attributes:
        counted: what was counted, in words.
        sources: by dataset.
        prompt_tokens: chat template and question, without the images; mean over pairs.
        reference_tokens: mean over references, each with its end token.
        sizes: number of pairs by their number of references; empty where only sums are known.
    """

    counted: str
    sources: Mapping[str, SourceCount]
    prompt_tokens: float
    reference_tokens: float
    sizes: Mapping[int, int]

    @property
    def pairs(self) -> int:
        return sum(source.pairs for source in self.sources.values())

    @property
    def references(self) -> int:
        return sum(source.references for source in self.sources.values())

    @property
    def references_per_pair(self) -> float:
        return self.references / self.pairs

    def sequences(self, max_captions: int | None) -> int:
        """Sequences with at most so many references of one pair (None: all).

        A mixture is counted pair by pair, so a pair's last sequence may hold fewer. From sums alone every sequence is
        taken to be full, which no fewer sequences can be.
        """
        if max_captions is None:
            return self.pairs
        if self.sizes:
            return sum(count * math.ceil(size / max_captions) for size, count in self.sizes.items())
        return round(self.references / min(max_captions, self.references_per_pair))


def counted_workload(folder: Path, processor: PairProcessor | None, image_tokens: int) -> Workload:
    """The training split of the mixture; token lengths by the processor's tokenizer, where there is one."""
    import polars as pl

    samples = pl.read_parquet(folder / "*.parquet", columns=["pair", "dataset", "question", "reference"])
    used = pl.col("pair").rle_id().alias("use")  # the samples of a pair are neighbours
    pairs = samples.group_by(used).agg(pl.len().alias("size"), pl.col("dataset").first(), pl.col("question").first())
    by_dataset = pairs.group_by("dataset").agg(pl.len(), pl.col("size").sum()).sort("dataset")
    prompt, reference = PROMPT_TOKENS, REFERENCE_TOKENS
    if processor is not None:
        questions, texts = pairs["question"].value_counts(), samples["reference"].value_counts()
        prompt = _mean_length(questions.iter_rows(), processor.encode_prompt) - image_tokens
        reference = _mean_length(texts.iter_rows(), processor.encode_reference)
    return Workload(
        counted=f"{folder}, {'lengths by its tokenizer' if processor else 'lengths estimated'}",
        sources={name: SourceCount(count, references) for name, count, references in by_dataset.iter_rows()},
        prompt_tokens=prompt,
        reference_tokens=reference,
        sizes=dict(pairs["size"].value_counts().sort("size").iter_rows()),
    )


def _mean_length(texts: Iterable[tuple[Any, ...]], encode: Callable[[str], Sized]) -> float:
    """Mean number of tokens over (text, how often it occurs)."""
    lengths = [(len(encode(text)), count) for text, count in texts]
    return sum(length * count for length, count in lengths) / sum(count for _, count in lengths)


def published_workload(entries: Mapping[str, DatasetEntry], convert: Convert) -> Workload:
    """The published counts of the datasets, with convert's weights and caps. What validate will remove (leaks, faults) and what
    `no_change_share` leaves out is not known before, so it is counted.

    Raises:
        ParamsError: a dataset has no published counts; names it and the remedy.
    """
    known = {name: DATASETS[entry.reader].part(name) for name, entry in entries.items()}
    if unknown := [name for name, published in known.items() if published is None]:
        raise ParamsError(
            f"plan: {', '.join(unknown)}: no published counts, and no mixture yet; run `dvc repro convert` first"
        )
    sources, tokens = {}, 0.0
    for name, published in known.items():
        source = convert.sources.get(name, Source())
        assert published is not None, name
        sources[name], length = _published_source(published, entries[name].train_on, source, convert.references_per_pair)
        tokens += sources[name].references * length
    return Workload(
        counted="published counts of the datasets, lengths estimated",
        sources=sources,
        prompt_tokens=PROMPT_TOKENS,
        reference_tokens=tokens / sum(source.references for source in sources.values()),
        sizes={},
    )


def _published_source(
    published: Published, train_on: Iterable[str], source: Source, most: int
) -> tuple[SourceCount, float]:
    """Uses of pairs and references, and tokens of a reference; `most` references of a pair train."""
    counts = [getattr(published, split) for split in train_on]
    found = sum(count.pairs for count in counts)
    references = sum(
        count.pairs * UNPUBLISHED_REFERENCES if count.references is None else count.references - count.empty
        for count in counts
    )
    each = references / found
    chosen = found * min(1.0, source.weight)
    if source.max_pairs is not None:
        chosen = min(chosen, source.max_pairs)
    uses = chosen * max(1.0, source.weight)
    taken = min(each, most) if source.samples == "each" else min(each, 1.0)
    length = REFERENCE_TOKENS * max(1.0, each) if source.samples == "joined" else REFERENCE_TOKENS
    return SourceCount(round(uses), round(uses * taken)), length
