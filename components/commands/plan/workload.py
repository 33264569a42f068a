"""What an epoch of training holds: the run's mixture, counted, or the published counts of its datasets."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from m3diff.datasets import DATASETS
from m3diff.datasets.spec import DatasetSpec, SplitCount
from m3diff.models.family import PairProcessor
from m3diff.records.errors import readable
from m3diff.settings.section import ParamsError
from m3diff.stages.convert.paper_mixture import SAMPLES, training_counts
from m3diff.stages.convert.params import Convert, Source
from m3diff.stages.ingest.params import DatasetEntry

if TYPE_CHECKING:
    import polars as pl

PROMPT_TOKENS, REFERENCE_TOKENS = 29.0, 15.0
"""Estimates where no tokenizer is at hand: chat template and question without images, but of a family that asks none; a
reference with its end."""


@dataclass(frozen=True)
class SourceCount:
    """One dataset's share of an epoch. A pair that is used twice counts twice."""

    pairs: int
    references: int


@dataclass(frozen=True)
class SplitUse:
    """What a split of a dataset gives to an epoch.

    Attributes:
        split: the dataset's own, which `train_on` names.
        published: its pairs as published; those without a word do not train.
        counted: whether its references were counted; else they are estimated.
    """

    dataset: str
    split: str
    published: int
    used: SourceCount
    counted: bool


@dataclass(frozen=True)
class Workload:
    """What an epoch holds.

    Attributes:
        counted: what was counted, in words.
        sources: by dataset.
        prompt_tokens: chat template and question, without the images; mean over pairs.
        reference_tokens: mean over references, each with its end token.
        sizes: number of pairs by their number of references; empty where only sums are known.
        splits: `sources` by split; empty for a mixture, whose training samples do not tell it.
    """

    counted: str
    sources: Mapping[str, SourceCount]
    prompt_tokens: float
    reference_tokens: float
    sizes: Mapping[int, int]
    splits: Sequence[SplitUse] = ()

    @property
    def pairs(self) -> int:
        return sum(source.pairs for source in self.sources.values())

    @property
    def references(self) -> int:
        return sum(source.references for source in self.sources.values())

    @property
    def references_per_pair(self) -> float:
        return self.references / self.pairs

    def longest(self, max_captions: int | None) -> int | None:
        """References of the longest sequence; None where only sums are known."""
        if not self.sizes:
            return None
        return min(max(self.sizes), max_captions or max(self.sizes))

    def sequences(self, max_captions: int | None) -> int:
        """Sequences with at most so many references of one pair (None: all).

        A mixture is counted pair by pair, so the last sequence of a pair may hold fewer. Of published counts only the
        sums are known, and every sequence is taken to be full.
        """
        if max_captions is None:
            return self.pairs
        if self.sizes:
            return sum(count * math.ceil(size / max_captions) for size, count in self.sizes.items())
        each = [(source.references, source.references / source.pairs) for source in self.sources.values()]
        return round(sum(references / min(max_captions, mean) for references, mean in each))


LENGTHS = 20_000
"""Distinct texts of a mixture whose tokens are counted; evenly spread ones stand for more."""


def find_workload(
    mixture: Path,
    entries: Mapping[str, DatasetEntry],
    convert: Convert,
    processor: PairProcessor | None,
    image_tokens: int,
    left_out: Sequence[str] = (),
) -> Workload:
    """The run's mixture where it is there, else the published counts.

    The mixture of another run, with datasets that this one has not, is not counted.

    Args:
        left_out: datasets whose samples another phase takes.
    """
    entries = {name: entry for name, entry in entries.items() if name not in left_out}
    if not any((mixture / "train").glob("*.parquet")):
        return published_workload(entries, convert)
    found = counted_workload(mixture / "train", processor, image_tokens, left_out)
    if foreign := found.sources.keys() - {name for name, entry in entries.items() if entry.train_on}:
        load = published_workload(entries, convert)
        return replace(load, counted=f"{load.counted}; {mixture} is of another run ({', '.join(sorted(foreign))})")
    return found


def count_test_pairs(mixture: Path, entries: Mapping[str, DatasetEntry]) -> int | None:
    """Pairs to caption: the run's mixture's, counted, else the published ones; None where neither is known."""

    if files := sorted((mixture / "test").glob("*.parquet")):
        samples = read_columns(files, "pair", "dataset")
        if set(samples["dataset"].unique()) <= entries.keys():
            return samples["pair"].n_unique()
    parts = [DATASETS[entry.reader].part(name) for name, entry in entries.items()]
    return None if None in parts else sum(part.test.pairs for part in parts if part is not None)


def read_columns(shards: Sequence[Path], *columns: str) -> "pl.DataFrame":
    """These columns of the mixture's files, in their order. Raises DataError for a file that cannot be read."""
    import polars as pl

    parts = []
    for shard in shards:
        with readable(shard):
            parts.append(pl.read_parquet(shard, columns=list(columns)))
    return pl.concat(parts)


def counted_workload(
    folder: Path, processor: PairProcessor | None, image_tokens: int, left_out: Sequence[str] = ()
) -> Workload:
    """The training split of the mixture without some datasets; token lengths by the processor's tokenizer, where there
    is one."""
    import polars as pl

    samples = read_columns(sorted(folder.glob("*.parquet")), "pair", "dataset", "question", "reference")
    samples = samples.with_columns(pl.col("pair").rle_id().alias("use"))  # the samples of a pair are neighbours
    samples = samples.filter(~pl.col("dataset").is_in(list(left_out)))
    if samples.is_empty():
        without = f" but of {', '.join(left_out)}" if left_out else ""
        raise ParamsError(f"plan: {folder} has no samples{without}; run `dvc repro convert` again")
    pairs = samples.group_by("use").agg(pl.len().alias("size"), pl.col("dataset").first(), pl.col("question").first())
    by_dataset = pairs.group_by("dataset").agg(pl.len(), pl.col("size").sum()).sort("dataset")
    prompt, reference = PROMPT_TOKENS, REFERENCE_TOKENS
    if processor is not None:
        questions, texts = _spread(pairs["question"]), _spread(samples["reference"])
        prompt = _mean_length(questions, processor.encode_prompt) - image_tokens
        reference = _mean_length(texts, processor.encode_reference)
    return Workload(
        counted=f"{folder}, {'lengths by its tokenizer' if processor else 'lengths estimated'}",
        sources={name: SourceCount(count, references) for name, count, references in by_dataset.iter_rows()},
        prompt_tokens=prompt,
        reference_tokens=reference,
        sizes=dict(pairs["size"].value_counts().sort("size").iter_rows()),
    )


def _spread(texts: Any) -> list[tuple[str, int]]:
    """(text, how often it occurs) of at most LENGTHS distinct texts, evenly spread over them in alphabetical order."""
    counts = texts.value_counts().sort(texts.name)
    return counts.gather_every(math.ceil(len(counts) / LENGTHS)).rows()


def _mean_length(texts: Iterable[tuple[Any, ...]], encode: Callable[[str], Sized]) -> float:
    """Mean number of tokens over (text, how often it occurs)."""
    lengths = [(len(encode(text)), count) for text, count in texts]
    return sum(length * count for length, count in lengths) / sum(count for _, count in lengths)


def published_workload(entries: Mapping[str, DatasetEntry], convert: Convert) -> Workload:
    """The published counts of the datasets, with convert's weights and caps, less what convert leaves out: references
    without a word, repeats where they were counted, and pairs of which nothing is left.

    What validate will remove (leaks, faults) and `no_change_share` leave out is not known before, so it is counted.

    Where some of the datasets have no published counts, the others are counted, and the text says of which they are.

    Raises:
        ParamsError: no dataset that trains has published counts, or none trains; names it and the remedy.
    """
    training = {name: DATASETS[entry.reader] for name, entry in entries.items() if entry.train_on}
    unknown = [name for name, spec in training.items() if spec.part(name) is None]
    if unknown and len(unknown) == len(training):
        raise ParamsError(
            f"plan: {', '.join(unknown)}: no published counts, and no mixture yet; run `dvc repro convert` first"
        )
    training = {name: spec for name, spec in training.items() if name not in unknown}
    without = f"; without {', '.join(unknown)}, of which none are published" if unknown else ""
    sources, splits, tokens = {}, list[SplitUse](), 0.0
    for name, spec in training.items():
        counts: dict[str, SplitCount] = {split: getattr(spec.part(name), split) for split in entries[name].train_on}
        pairs = sum(map(_with_words, counts.values()))
        each = sum(_references(spec, count) for count in counts.values()) / pairs
        source = convert.sources.get(name, Source())
        used = _used(pairs, each, source, convert.most_references(source))
        if used.references:
            sources[name] = used
            splits += _by_split(name, spec, counts, used)
            tokens += used.references * REFERENCE_TOKENS * (each if source.samples == "joined" else 1)
    if not sources:
        raise ParamsError(f"plan: none of {', '.join(entries)} trains; see ingest.datasets and convert.sources")
    return Workload(
        counted=f"published counts of the datasets, lengths estimated{without}",
        sources=sources,
        prompt_tokens=PROMPT_TOKENS,
        reference_tokens=tokens / sum(source.references for source in sources.values()),
        sizes={},
        splits=splits,
    )


def _with_words(count: SplitCount) -> int:
    """Pairs that have a reference with a word."""
    return count.pairs - count.wordless


def _by_split(name: str, spec: DatasetSpec, counts: Mapping[str, SplitCount], used: SourceCount) -> Iterator[SplitUse]:
    """A dataset's use, shared out over its splits; their sums are the dataset's."""
    pairs = _shares([_with_words(count) for count in counts.values()], used.pairs)
    references = _shares([_references(spec, count) for count in counts.values()], used.references)
    for (split, count), n, texts in zip(counts.items(), pairs, references, strict=True):
        yield SplitUse(name, split, count.pairs, SourceCount(n, texts), counted=count.references is not None)


def _shares(weights: Sequence[float], total: int) -> list[int]:
    """`total` in parts as the weights are, each rounded where its end lies."""
    ends = [round(total * end / sum(weights)) for end in accumulate(weights)]
    return [end - start for start, end in pairwise([0, *ends])]


def _used(pairs: int, each: float, source: Source, most: int | None) -> SourceCount:
    """Uses of a dataset's pairs, of `each` references, as convert makes them."""
    chosen = pairs * min(1.0, source.weight)
    if source.max_pairs is not None:
        chosen = min(chosen, source.max_pairs)
    uses = chosen * max(1.0, source.weight)
    return SourceCount(round(uses), round(uses * (min(each, most or each) if source.samples == "each" else 1)))


def _references(spec: DatasetSpec, count: SplitCount) -> float:
    """References that convert keeps: counted, or by the share of the papers' sum, or estimated."""
    if count.references is not None:
        return count.references - count.empty - count.repeated
    if spec.table is not None and spec.table.references is not None:
        return count.pairs * spec.table.references / spec.table.pairs
    return count.pairs * unpublished_references()


def unpublished_references() -> float:
    """References of a pair where no count is published: what the other sources leave of the paper's mixture."""
    counts = [count["train_val"] for count in training_counts().values()]
    known = sum(references for _, references in counts if references is not None)
    return (SAMPLES - known) / sum(pairs for pairs, references in counts if references is None)
