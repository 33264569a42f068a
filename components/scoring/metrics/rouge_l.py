"""Compute ROUGE-L (Lin, 2004), the F-score of the longest common subsequence, bit-identical to pycocoevalcap.

Recall is weighted 1.2 times. The best precision and the best recall may come from different references.
"""

import numpy as np

from m3diff.scoring.metrics import Metric, MetricInputs, MetricScores, mean_of, score_each_group
from m3diff.scoring.pairs import EvalPair, Groups

BETA = 1.2


def compute(pairs: list[EvalPair], groups: Groups, inputs: MetricInputs) -> MetricScores:
    """Score the pairs. The score of a group is the mean over its pairs."""
    tokens = inputs.tokens
    pair_scores = {
        pair_id: rouge_l(prediction, tokens.references[pair_id]) for pair_id, prediction in tokens.predictions.items()
    }

    def mean(pair_ids: list[str]) -> dict[str, float]:
        return {"ROUGE-L": float(np.mean([pair_scores[pair_id] for pair_id in pair_ids]))}

    means = score_each_group(groups, mean)
    return MetricScores(means, {pair_id: {"ROUGE-L": value} for pair_id, value in pair_scores.items()})


def rouge_l(prediction: str, references: list[str]) -> float:
    """Return the ROUGE-L of a prediction.

    Args:
        prediction, references: tokens joined by single spaces. An empty caption counts as one empty word.
    """
    words = prediction.split(" ")
    positions: dict[str, int] = {}  # word -> integer whose bits are the positions of the word
    for position, word in enumerate(words):
        positions[word] = positions.get(word, 0) | 1 << position
    precision = 0.0
    recall = 0.0
    for reference in references:
        reference_words = reference.split(" ")
        common = common_subsequence(positions, len(words), reference_words)
        precision = max(precision, common / len(words))
        recall = max(recall, common / len(reference_words))
    if precision == 0 or recall == 0:
        return 0.0
    return ((1 + BETA**2) * precision * recall) / (recall + BETA**2 * precision)


def common_subsequence(positions: dict[str, int], length: int, words: list[str]) -> int:
    """Return the length of the longest common subsequence of two captions (Hyyro, 2004).

    A row of the table of lengths is stored as one integer. A bit is 0 where the length increases by one.

    Args:
        positions: positions of each word in the first caption, as bits.
        length: number of words of the first caption.
        words: words of the second caption.
    """
    all_bits = (1 << length) - 1
    row = all_bits
    for word in words:
        matches = row & positions.get(word, 0)
        row = ((row + matches) | (row - matches)) & all_bits
    return length - row.bit_count()


METRIC = Metric(
    compute,
    main_score="ROUGE-L",
    scores=("ROUGE-L",),
    columns={"ROUGE-L": "double"},
    resampled={"ROUGE-L": mean_of("ROUGE-L")},
    reads="tokens",
)
