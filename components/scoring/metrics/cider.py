"""CIDEr-D (Vedantam et al., CVPR 2015) as pycocoevalcap computes it, and its control: shuffled pairs' predictions."""

import numpy as np

from m3diff.scoring.metrics import Metric, MetricScores, Shared, Tools, Value, mean_of, sum_by_order
from m3diff.scoring.pairs import ALL, EvalPair, Groups

NO_SHUFFLED = "there are no predictions of shuffled pairs (predictions_shuffled.json), or only one pair"
ONE_PAIR = "there is one pair: CIDEr weighs a word by how few of the pairs' references hold it"
SIGMA = 6.0


def compute(pairs: list[EvalPair], groups: Groups, tools: Tools) -> MetricScores:
    """0 to 10. Word weights come from the references of the group itself, so groups do not average to the whole."""
    tokens = tools.tokens
    shared, shuffled = tokens.shared, tokens.shuffled
    of_groups = {name: cider(shared, shared.places(ids)) for name, ids in groups.items() if ids}
    scores: dict[str, dict[str, Value]] = {name: {"CIDEr": corpus_score(found)} for name, found in of_groups.items()}
    control = None
    if shuffled and len(groups[ALL]) > 1:
        of_shuffled = Shared(shared.ngrams, shuffled, tokens.references)
        idf = weights(shared, shared.places(groups[ALL]))
        control = corpus_score(cider(of_shuffled, np.arange(len(shuffled)), idf))
    scores[ALL]["CIDEr_shuffled"] = control
    absent = {} if control is not None else {"CIDEr_shuffled": NO_SHUFFLED}
    if absent and len(pairs) == 1:
        absent["CIDEr"] = ONE_PAIR
    of_pairs = zip(groups[ALL], of_groups[ALL].tolist(), strict=True)
    return MetricScores(scores, {pair: {"CIDEr": value} for pair, value in of_pairs}, absent)


def corpus_score(of_pairs: np.ndarray) -> float | None:
    """The mean. Word weights come from the set itself, so of one pair there is none."""
    return float(np.mean(of_pairs)) if len(of_pairs) > 1 else None


def weights(shared: Shared, places: np.ndarray) -> np.ndarray:
    """log(pairs / pairs whose references have it) of each n-gram, over the pairs at `places`; 0 of a single pair."""
    chosen = np.zeros(len(shared.pairs), bool)
    chosen[places] = True
    rows = np.flatnonzero(chosen[shared.pair])
    entries, owner = shared.ngrams.entries(shared.reference[rows])
    keys = np.unique(shared.pair[rows][owner] * shared.ngrams.size + shared.ngrams.ngram[entries])
    pairs_with = np.bincount(keys % max(1, shared.ngrams.size), minlength=shared.ngrams.size)
    return np.log(float(len(places))) - np.log(np.maximum(1.0, pairs_with))


def cider(shared: Shared, places: np.ndarray, idf: np.ndarray | None = None) -> np.ndarray:
    """CIDEr-D of the pairs at `places`, by the weights of their own references or by others'."""
    ngrams = shared.ngrams
    idf = weights(shared, places) if idf is None else idf
    squares = (ngrams.count * idf[ngrams.ngram]) ** 2
    norms = np.sqrt(sum_by_order(ngrams.caption, ngrams.order, squares, len(ngrams.lengths)))
    of_reference = ngrams.count[shared.of_reference]
    products = np.minimum(ngrams.count[shared.of_prediction], of_reference) * of_reference
    products = products * idf[ngrams.ngram[shared.of_reference]] ** 2
    similar = sum_by_order(shared.row, ngrams.order[shared.of_reference], products, len(shared.pair))
    both = norms[shared.prediction] * norms[shared.reference]
    similar = np.divide(similar, both, where=both != 0, out=similar)
    bigrams = np.maximum(0, ngrams.lengths - 1)  # pycocoevalcap's length
    apart = (bigrams[shared.prediction] - bigrams[shared.reference]).astype(float)
    similar = similar.mean(axis=1) * np.exp(-(apart**2) / (2 * SIGMA**2))
    total = np.bincount(shared.pair, similar, minlength=len(shared.pairs))
    found: np.ndarray = (10.0 * total / shared.references)[places]
    return found


METRIC = Metric(
    compute,
    headline="CIDEr",
    scores=("CIDEr",),
    overall=("CIDEr_shuffled",),
    columns={"CIDEr": "double"},
    resampled={"CIDEr": mean_of("CIDEr")},
    lower_is_better=("CIDEr_shuffled",),
    reads="tokens",
)
