"""Estimate the workload of a run from the published counts of its datasets."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from m3diff.commands.plan.workload import (
    LENGTHS_ESTIMATED,
    PROMPT_TOKENS,
    REFERENCE_TOKENS,
    DatasetShare,
    SampleGroup,
    Workload,
)
from m3diff.datasets import DATASETS
from m3diff.datasets.spec import DatasetSpec, SplitCount
from m3diff.records.errors import Fault
from m3diff.records.sample import PAIR
from m3diff.settings.section import ParamsError
from m3diff.stages.convert.params import Convert, MixtureSource
from m3diff.stages.convert.stage import PAPER_SAMPLES, published_mixture_counts
from m3diff.stages.ingest.params import DatasetEntry


def published_workload(
    entries: Mapping[str, DatasetEntry], convert: Convert, unread: Mapping[str, Fault | str] | None = None
) -> Workload:
    """Return the workload from the published counts of the datasets, with convert's weights and caps.

    Pairs and references that convert leaves out are subtracted: references without a word, repeated references if they
    were counted, and pairs without a reference. Pairs that validate will remove or `no_change_share` will leave out are
    not known in advance, so they are included.

    Datasets without published counts are omitted and listed in the workload's origin.

    Args:
        unread: for each dataset whose annotation files could not be read either, the reason.

    Raises:
        ParamsError: no dataset is used for training, or no training dataset has published counts.
    """
    unread = unread or {}
    specs = {name: DATASETS[entry.reader] for name, entry in entries.items() if entry.train_on}
    unpublished = [name for name, spec in specs.items() if spec.part(name) is None]
    if unpublished and len(unpublished) == len(specs):
        if unread:
            cause = next(iter(unread.values()))
            raise ParamsError("plan.no_counts_but_unread_files", key="ingest.datasets", names=unpublished, cause=cause)
        raise ParamsError("plan.no_counts", key="ingest.datasets", names=unpublished)
    datasets: list[PublishedShare] = []
    for name, spec in specs.items():
        if name not in unpublished:
            datasets += _published_dataset(name, spec, entries[name].train_on, convert)
    if not datasets:
        raise ParamsError("plan.no_dataset_trains", names=list(entries))
    omitted = list(dict.fromkeys([*unpublished, *unread]))
    omission = f"; without {', '.join(omitted)}, whose counts are not published" if omitted else ""
    return Workload(
        origin=f"published counts of the datasets, {LENGTHS_ESTIMATED}{omission}",
        groups=list(_group_by_images(datasets)),
    )


@dataclass(frozen=True)
class PublishedShare:
    """A published dataset's share of an epoch, and the estimated number of tokens of each of its references."""

    share: DatasetShare
    reference_tokens: float


def _group_by_images(published_shares: Sequence[PublishedShare]) -> Iterator[SampleGroup]:
    """Yield the groups of image sets with the same number of images, pairs first and couples last."""
    kinds = {(published.share.are_couples, -published.share.images) for published in published_shares}
    for are_couples, negative_images in sorted(kinds):
        chosen = [
            published
            for published in published_shares
            if (published.share.are_couples, -published.share.images) == (are_couples, negative_images)
        ]
        tokens = sum(published.share.references * published.reference_tokens for published in chosen)
        yield SampleGroup(
            shares=[published.share for published in chosen],
            prompt_tokens=PROMPT_TOKENS,
            reference_tokens=tokens / sum(published.share.references for published in chosen),
            pairs_by_references={},
        )


def _published_dataset(name: str, spec: DatasetSpec, train_on: Sequence[str], convert: Convert) -> list[PublishedShare]:
    """Return the shares of a published dataset, one per split and number of images, and one for its couples."""
    published = spec.part(name)
    assert published is not None, f"{name}: no published counts"
    counts: dict[str, SplitCount] = {split: getattr(published, split) for split in train_on}
    pairs = [count.pairs - count.wordless for count in counts.values()]
    references = [_published_references(spec, count) for count in counts.values()]
    mean_references = sum(references) / sum(pairs)

    source = convert.sources.get(name, MixtureSource())
    questions = [count.questions or count.pairs - count.wordless for count in counts.values()]
    questions_per_pair = sum(questions) / sum(pairs)
    references_per_question = convert.most_references(source)
    max_references = mean_references if not references_per_question else references_per_question * questions_per_pair
    max_pairs = math.inf if source.max_pairs is None else source.max_pairs
    # A weight below 1 samples pairs before the cap is applied. A weight above 1 repeats pairs after the cap is applied
    used_pairs = min(sum(pairs) * min(1.0, source.weight), max_pairs) * max(1.0, source.weight)
    has_sample_per_reference = source.samples == "each"
    samples_per_pair = min(mean_references, max_references) if has_sample_per_reference else questions_per_pair
    used_references = round(used_pairs * samples_per_pair)
    if not used_references:
        return []

    pairs_by_split = _split_total(round(used_pairs), pairs)
    references_by_split = _split_total(used_references, references if has_sample_per_reference else pairs)
    shares: list[DatasetShare] = []
    for (split, count), split_pairs, split_references in zip(
        counts.items(), pairs_by_split, references_by_split, strict=True
    ):
        share = DatasetShare(
            dataset=name,
            pairs=split_pairs,
            references=split_references,
            split=split,
            published_pairs=count.pairs,
            is_counted=count.references is not None,
            images=published.images,
        )
        shares += _separate_texts(share, count)
    reference_tokens = REFERENCE_TOKENS * (mean_references if source.samples == "joined" else 1)
    published_shares = [PublishedShare(share, reference_tokens) for share in shares]
    couples = round(used_pairs) // 2
    if source.couple and couples:
        share = DatasetShare(name, pairs=couples, references=couples, images=PAIR, are_couples=True)
        published_shares.append(PublishedShare(share, 2 * reference_tokens))
    return published_shares


def _separate_texts(share: DatasetShare, count: SplitCount) -> list[DatasetShare]:
    """Return the share of rows with images and, if the dataset has texts without an image, a share of these."""
    if not count.texts:
        return [share]
    published_pairs = [count.pairs - count.texts, count.texts]
    pairs_with_images, texts = _split_total(share.pairs, published_pairs)
    references_with_images, references_of_texts = _split_total(share.references, published_pairs)
    return [
        replace(
            share,
            pairs=pairs_with_images,
            references=references_with_images,
            published_pairs=count.pairs - count.texts,
        ),
        replace(share, pairs=texts, references=references_of_texts, published_pairs=count.texts, images=0),
    ]


def _split_total(total: int, weights: Sequence[float]) -> list[int]:
    """Split a total in proportion to the weights, into whole numbers that add up to it."""
    ends = [round(total * weight_sum / sum(weights)) for weight_sum in accumulate(weights)]
    return [end - start for start, end in pairwise([0, *ends])]


def _published_references(spec: DatasetSpec, count: SplitCount) -> float:
    """Return the number of a split's references that convert keeps.

    If the references were not counted, their number is estimated. If the dataset's paper prints a total, the split gets
    a share of it in proportion to its pairs. Otherwise, the references of the M3Diff paper's mixture that do not belong
    to a counted dataset are divided evenly among the uncounted pairs.
    """
    if count.references is not None:
        return count.references - count.empty - count.repeated
    if spec.references is not None:
        published_pairs = sum(sum(part.pairs().values()) for part in spec.published)
        return count.pairs * spec.references / published_pairs
    counted_references = 0
    uncounted_pairs = 0
    for splits in published_mixture_counts().values():
        pairs, references = splits["train_val"]
        if references is None:
            uncounted_pairs += pairs
        else:
            counted_references += references
    return count.pairs * ((PAPER_SAMPLES - counted_references) / uncounted_pairs)
