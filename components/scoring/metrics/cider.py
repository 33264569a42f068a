"""Compute CIDEr-D (Vedantam et al., CVPR 2015) as in pycocoevalcap, and a control with shuffled after-images."""

import numpy as np

from m3diff.scoring.metrics import Metric, MetricInputs, MetricScores, Value, mean_of
from m3diff.scoring.metrics.ngrams import SharedNgrams, distinct, sum_by_order
from m3diff.scoring.pairs import ALL_PAIRS, EvalPair, Groups

NO_SHUFFLED = "there are no predictions of shuffled pairs (predictions_shuffled.json), or only one pair"
ONE_PAIR = "there is one pair: CIDEr weighs a word by how few of the pairs' references hold it"
SIGMA = 6.0


def compute(pairs: list[EvalPair], groups: Groups, inputs: MetricInputs) -> MetricScores:
    """Score each group from 0 to 10.

    N-grams are weighted by the references of the group, so the groups' scores do not average to the score of all pairs.
    """
    tokens = inputs.tokens
    shared = tokens.shared
    pair_scores = {group: cider(shared, shared.pair_numbers(ids)) for group, ids in groups.items() if ids}
    scores: dict[str, dict[str, Value]] = {
        group: {"CIDEr": corpus_score(values)} for group, values in pair_scores.items()
    }
    shuffled_score = None
    if tokens.shuffled and len(groups[ALL_PAIRS]) > 1:
        shared_of_shuffled = SharedNgrams(shared.ngrams, tokens.shuffled, tokens.references)
        idf = inverse_frequencies(shared, shared.pair_numbers(groups[ALL_PAIRS]))
        shuffled_score = corpus_score(cider(shared_of_shuffled, np.arange(len(tokens.shuffled)), idf))
    scores[ALL_PAIRS]["CIDEr_shuffled"] = shuffled_score
    absent = {}
    if shuffled_score is None:
        absent["CIDEr_shuffled"] = NO_SHUFFLED
        if len(pairs) == 1:
            absent["CIDEr"] = ONE_PAIR
    values_of_pairs = zip(groups[ALL_PAIRS], pair_scores[ALL_PAIRS].tolist(), strict=True)
    return MetricScores(scores, {pair_id: {"CIDEr": value} for pair_id, value in values_of_pairs}, absent)


def corpus_score(pair_scores: np.ndarray) -> float | None:
    """Return the mean of the pairs' scores. It is None for a single pair, where all n-grams have weight 0."""
    return float(np.mean(pair_scores)) if len(pair_scores) > 1 else None


def inverse_frequencies(shared: SharedNgrams, pairs: np.ndarray) -> np.ndarray:
    """Return the weight of each n-gram, [n-grams]: log(pairs / pairs with the n-gram in a reference).

    All weights are 0 for a single pair.

    Args:
        pairs: numbers of the pairs.
    """
    is_chosen = np.zeros(len(shared.pairs), bool)
    is_chosen[pairs] = True
    rows = np.flatnonzero(is_chosen[shared.pair])
    in_references = shared.ngrams.entries(shared.reference[rows])
    pair = shared.pair[rows][in_references.owners]
    # a pair counts only once, even if several of its references contain the n-gram
    keys = distinct(pair * shared.ngrams.size + shared.ngrams.ngram[in_references.entries])
    pairs_with_ngram = np.bincount(keys % max(1, shared.ngrams.size), minlength=shared.ngrams.size)
    return np.log(float(len(pairs))) - np.log(np.maximum(1.0, pairs_with_ngram))


def cider(shared: SharedNgrams, pairs: np.ndarray, idf: np.ndarray | None = None) -> np.ndarray:
    """Return the CIDEr-D of each pair, [pairs].

    Args:
        pairs: numbers of the pairs.
        idf: weights of n-grams. If None, they are computed from the references of these pairs.
    """
    ngrams = shared.ngrams
    if idf is None:
        idf = inverse_frequencies(shared, pairs)
    squares = (ngrams.count * idf[ngrams.ngram]) ** 2
    norms = np.sqrt(sum_by_order(ngrams.caption, ngrams.order, squares, len(ngrams.lengths)))
    reference_counts = ngrams.count[shared.reference_entry]
    # CIDEr-D clips n-grams that the prediction repeats more often than the reference
    products = np.minimum(ngrams.count[shared.prediction_entry], reference_counts) * reference_counts
    products = products * idf[ngrams.ngram[shared.reference_entry]] ** 2
    similarities = sum_by_order(shared.row, ngrams.order[shared.reference_entry], products, len(shared.pair))
    norm_products = norms[shared.prediction] * norms[shared.reference]
    similarities = np.divide(similarities, norm_products, where=norm_products != 0, out=similarities)
    bigrams = np.maximum(0, ngrams.lengths - 1)  # pycocoevalcap measures length in bigrams
    length_differences = (bigrams[shared.prediction] - bigrams[shared.reference]).astype(float)
    similarities = similarities.mean(axis=1) * np.exp(-(length_differences**2) / (2 * SIGMA**2))
    totals = np.bincount(shared.pair, similarities, minlength=len(shared.pairs))
    scores: np.ndarray = 10.0 * totals / shared.reference_counts
    return scores[pairs]


METRIC = Metric(
    compute,
    main_score="CIDEr",
    scores=("CIDEr",),
    overall=("CIDEr_shuffled",),
    columns={"CIDEr": "double"},
    resampled={"CIDEr": mean_of("CIDEr")},
    lower_is_better=("CIDEr_shuffled",),
    reads="tokens",
)
