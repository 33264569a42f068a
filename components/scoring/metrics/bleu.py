"""BLEU-1 to BLEU-4 (Papineni et al., ACL 2002), to the bit as pycocoevalcap computes them, with the closest length."""

import math

import numpy as np

from m3diff.scoring.metrics import ORDERS, Metric, MetricScores, Resampled, Shared, Tools, of_each_group, sum_by_order
from m3diff.scoring.pairs import ALL, EvalPair, Groups

NAMES = ("BLEU-1", "BLEU-2", "BLEU-3", "BLEU-4")
STATISTICS = "BLEU_statistics"
SMALL, TINY = 1e-9, 1e-15  # pycocoevalcap's, against division by 0


def compute(pairs: list[EvalPair], groups: Groups, tools: Tools) -> MetricScores:
    """BLEU of a group is of its corpus, not a mean over pairs; a pair has BLEU-4 alone."""
    shared = tools.tokens.shared
    counts = statistics(shared)
    corpora = of_each_group(groups, lambda ids: bleu(counts[shared.places(ids)].sum(axis=0).tolist()))
    of_pairs = zip(groups[ALL], counts[shared.places(groups[ALL])].tolist(), strict=True)
    return MetricScores(
        {name: dict(zip(NAMES, corpus, strict=True)) for name, corpus in corpora.items()},
        {pair: {"BLEU-4": bleu(sums)[-1], STATISTICS: [float(value) for value in sums]} for pair, sums in of_pairs},
    )


def statistics(shared: Shared) -> np.ndarray:
    """[pairs, 10] whole numbers to sum: for n = 1 to 4 the n-grams that a reference has too, then the prediction's
    n-grams; its words; the words of the reference of the closest length, the shorter one of two.
    """
    ngrams = shared.ngrams
    entries, owner = ngrams.entries(shared.predictions)
    first = np.searchsorted(owner, np.arange(len(shared.predictions)))  # a pair's first entry
    most = np.zeros(len(entries), np.int64)  # the most that one reference has of each n-gram
    pair = shared.pair[shared.row]
    at = first[pair] + shared.of_prediction - ngrams.starts[shared.predictions[pair]]
    np.maximum.at(most, at, ngrams.count[shared.of_reference])
    matched = np.minimum(most, ngrams.count[entries])
    matches = sum_by_order(owner, ngrams.order[entries], matched, len(shared.predictions))
    words = ngrams.lengths[shared.predictions]
    totals = np.maximum(0, words[:, None] - np.arange(ORDERS))
    lengths = ngrams.lengths[shared.reference]
    closest_first = np.lexsort((lengths, np.abs(lengths - words[shared.pair]), shared.pair))
    closest = lengths[closest_first[np.cumsum(shared.references) - shared.references]]
    return np.column_stack([matches.astype(np.int64), totals, words, closest])


def bleu(sums: list[int]) -> list[float]:
    """BLEU-1..4 of summed statistics, in pycocoevalcap's order of operations."""
    matches, totals, (words, reference_words) = sums[:ORDERS], sums[ORDERS : 2 * ORDERS], sums[2 * ORDERS :]
    product, scores = 1.0, []
    for order in range(ORDERS):
        product *= (float(matches[order]) + TINY) / (float(totals[order]) + SMALL)
        scores.append(product ** (1.0 / (order + 1)))
    ratio = (words + TINY) / (reference_words + SMALL)
    return [score * math.exp(1 - 1 / ratio) for score in scores] if ratio < 1 else scores


def resampled(order: int) -> Resampled:
    """BLEU of one order from the statistics, for many sets of pairs at once."""

    def score(sums: np.ndarray) -> np.ndarray:
        precisions = (sums[..., : order + 1] + TINY) / (sums[..., ORDERS : ORDERS + order + 1] + SMALL)
        ratio = (sums[..., -2] + TINY) / (sums[..., -1] + SMALL)
        product = precisions.prod(axis=-1) ** (1 / (order + 1)) * np.exp(np.minimum(0.0, 1 - 1 / ratio))
        return np.where(sums[..., -2:].sum(axis=-1) > 0, product, np.nan)

    return Resampled(STATISTICS, score)


METRIC = Metric(
    compute,
    headline="BLEU-4",
    scores=NAMES,
    columns={"BLEU-4": "double", STATISTICS: "list<double>"},
    resampled={name: resampled(order) for order, name in enumerate(NAMES)},
    reads="tokens",
)
