"""Compute BLEU-1 to BLEU-4 (Papineni et al., ACL 2002), bit-identical to pycocoevalcap.

The brevity penalty is based on the reference whose length is closest to the prediction's.
"""

import math
from dataclasses import dataclass

import numpy as np

from m3diff.scoring.metrics import Metric, MetricInputs, MetricScores, PairValue, Resampled, score_each_group
from m3diff.scoring.metrics.ngrams import ORDERS, SharedNgrams, sum_by_order
from m3diff.scoring.pairs import ALL_PAIRS, EvalPair, Groups

SCORES = ("BLEU-1", "BLEU-2", "BLEU-3", "BLEU-4")
STATISTICS = "BLEU_statistics"
# pycocoevalcap adds these constants to avoid division by 0
SMALL = 1e-9
TINY = 1e-15


@dataclass(frozen=True)
class BleuStatistics:
    """Counts to sum over pairs. scores.parquet stores them as a list in the order of these fields.

    matches: number of predicted n-grams that also occur in a reference, for n = 1 to 4.
    totals: number of all predicted n-grams, for n = 1 to 4.
    words: number of words of the prediction.
    reference_words: number of words of the reference whose length is closest to the prediction's. If two are equally
        close, the shorter one counts.
    """

    matches: list[int]
    totals: list[int]
    words: int
    reference_words: int

    @classmethod
    def from_row(cls, row: list[int]) -> "BleuStatistics":
        """Create the statistics from a row of `count_statistics` or a sum of rows."""
        return cls(
            matches=row[:ORDERS],
            totals=row[ORDERS : 2 * ORDERS],
            words=row[2 * ORDERS],
            reference_words=row[2 * ORDERS + 1],
        )


def compute(pairs: list[EvalPair], groups: Groups, inputs: MetricInputs) -> MetricScores:
    """Score each group as a corpus, because BLEU is not a mean over pairs. For a single pair, store only BLEU-4."""
    shared = inputs.tokens.shared
    rows = count_statistics(shared)

    def score_corpus(pair_ids: list[str]) -> dict[str, float]:
        sums = rows[shared.pair_numbers(pair_ids)].sum(axis=0)
        return dict(zip(SCORES, bleu(BleuStatistics.from_row(sums.tolist())), strict=True))

    pair_scores: dict[str, dict[str, PairValue]] = {}
    rows_of_pairs = rows[shared.pair_numbers(groups[ALL_PAIRS])].tolist()
    for pair_id, row in zip(groups[ALL_PAIRS], rows_of_pairs, strict=True):
        pair_bleu = bleu(BleuStatistics.from_row(row))
        pair_scores[pair_id] = {"BLEU-4": pair_bleu[-1], STATISTICS: [float(count) for count in row]}
    return MetricScores(score_each_group(groups, score_corpus), pair_scores)


def count_statistics(shared: SharedNgrams) -> np.ndarray:
    """Return the statistics of each pair as integers [pairs, 10], in the order of `BleuStatistics`."""
    ngrams = shared.ngrams
    pairs = len(shared.predictions)
    predicted = ngrams.entries(shared.predictions)
    first_entries = np.searchsorted(predicted.owners, np.arange(pairs))
    # for each predicted n-gram, the highest count in a single reference
    greatest_counts = np.zeros(len(predicted.entries), np.int64)
    pair = shared.pair[shared.row]
    positions = first_entries[pair] + shared.prediction_entry - ngrams.starts[shared.predictions[pair]]
    np.maximum.at(greatest_counts, positions, ngrams.count[shared.reference_entry])
    clipped_counts = np.minimum(greatest_counts, ngrams.count[predicted.entries])
    matches = sum_by_order(predicted.owners, ngrams.order[predicted.entries], clipped_counts, pairs)
    words = ngrams.lengths[shared.predictions]
    totals = np.maximum(0, words[:, None] - np.arange(ORDERS))
    reference_lengths = ngrams.lengths[shared.reference]
    length_differences = np.abs(reference_lengths - words[shared.pair])
    # sort by pair, then by difference in length, then by length
    closest_first = np.lexsort((reference_lengths, length_differences, shared.pair))
    first_rows = np.cumsum(shared.reference_counts) - shared.reference_counts
    closest_lengths = reference_lengths[closest_first[first_rows]]
    return np.column_stack([matches.astype(np.int64), totals, words, closest_lengths])


def bleu(sums: BleuStatistics) -> list[float]:
    """Return BLEU-1 to BLEU-4 for summed statistics, with the same order of operations as pycocoevalcap."""
    product = 1.0
    scores = []
    for order in range(ORDERS):
        product *= (float(sums.matches[order]) + TINY) / (float(sums.totals[order]) + SMALL)
        scores.append(product ** (1.0 / (order + 1)))
    length_ratio = (sums.words + TINY) / (sums.reference_words + SMALL)
    if length_ratio < 1:
        brevity_penalty = math.exp(1 - 1 / length_ratio)
        return [score * brevity_penalty for score in scores]
    return scores


def resampled_bleu(order: int) -> Resampled:
    """Return how to compute a BLEU score from summed statistics, for many sets of pairs at once.

    Args:
        order: 0 for BLEU-1 to 3 for BLEU-4.
    """

    def score(sums: np.ndarray) -> np.ndarray:
        matches = sums[..., : order + 1]
        totals = sums[..., ORDERS : ORDERS + order + 1]
        precisions = (matches + TINY) / (totals + SMALL)
        length_ratio = (sums[..., -2] + TINY) / (sums[..., -1] + SMALL)
        brevity_penalty = np.exp(np.minimum(0.0, 1 - 1 / length_ratio))
        scores = precisions.prod(axis=-1) ** (1 / (order + 1)) * brevity_penalty
        has_words = sums[..., -2:].sum(axis=-1) > 0
        return np.where(has_words, scores, np.nan)

    return Resampled(STATISTICS, score)


METRIC = Metric(
    compute,
    main_score="BLEU-4",
    scores=SCORES,
    columns={"BLEU-4": "double", STATISTICS: "list<double>"},
    resampled={name: resampled_bleu(order) for order, name in enumerate(SCORES)},
    reads="tokens",
)
