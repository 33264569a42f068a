"""ROUGE-L (Lin, 2004), to the bit as pycocoevalcap computes it: F of the longest common subsequence.

Recall is weighed 1.2 times. Best precision and best recall may come from different references.
"""

import numpy as np

from m3diff.scoring.metrics import Metric, MetricScores, Tools, mean_of, of_each_group
from m3diff.scoring.pairs import EvalPair, Groups

BETA = 1.2


def compute(pairs: list[EvalPair], groups: Groups, tools: Tools) -> MetricScores:
    """A group's score is the mean of its pairs'."""
    tokens = tools.tokens
    rouge = {pair: rouge_l(prediction, tokens.references[pair]) for pair, prediction in tokens.predictions.items()}
    means = of_each_group(groups, lambda ids: {"ROUGE-L": float(np.mean([rouge[pair] for pair in ids]))})
    return MetricScores(means, {pair: {"ROUGE-L": value} for pair, value in rouge.items()})


def rouge_l(prediction: str, references: list[str]) -> float:
    """ROUGE-L of captions of words joined by single spaces; one without words counts as one empty word."""
    words = prediction.split(" ")
    masks: dict[str, int] = {}  # of each word a number whose bits are its places
    for place, word in enumerate(words):
        masks[word] = masks.get(word, 0) | 1 << place
    precision = recall = 0.0
    for reference in references:
        others = reference.split(" ")
        common = common_subsequence(masks, len(words), others)
        precision, recall = max(precision, common / len(words)), max(recall, common / len(others))
    if precision == 0 or recall == 0:
        return 0.0
    return ((1 + BETA**2) * precision * recall) / (recall + BETA**2 * precision)


def common_subsequence(masks: dict[str, int], size: int, others: list[str]) -> int:
    """Length of the longest common subsequence with `size` words whose places are `masks` (Hyyro, 2004).

    A row of the table of lengths is one number: a bit is 0 where the length grows by one.
    """
    full = row = (1 << size) - 1
    for word in others:
        hits = row & masks.get(word, 0)
        row = ((row + hits) | (row - hits)) & full
    return size - row.bit_count()


METRIC = Metric(
    compute,
    headline="ROUGE-L",
    scores=("ROUGE-L",),
    columns={"ROUGE-L": "double"},
    resampled={"ROUGE-L": mean_of("ROUGE-L")},
    reads="tokens",
)
