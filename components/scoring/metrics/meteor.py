"""METEOR 1.5 (Denkowski and Lavie, 2014): the alignments by pycocoevalcap's Java program, the score from their counts.

The program gives 23 statistics of a pair: words and function words of prediction and reference; four counts for each of
the matchers exact, stem, synonym and paraphrase; chunks and matched words. A group's score follows from their sums, so
it costs nothing and can be resampled.
"""

import os

import numpy as np

from m3diff.scoring.metrics import Groups, Item, Metric, MetricScores, Program, Resampled, Tools, of_each_group
from m3diff.scoring.pairs import EvalPair

ALPHA, BETA, GAMMA, DELTA = 0.85, 0.2, 0.6, 0.75  # the program's for English
WEIGHTS = (1.0, 0.6, 0.8, 0.6)  # of matches that are exact, by stem, by synonym, by paraphrase
MAX_PROCESSES = 4


def program(of: Program) -> dict[Item, list[float]]:
    """The 23 statistics of each item, of its best reference, ready to be summed."""
    worker = of.start("METEOR", 0)  # before the tokens are there: it has a large table to read
    items = {item: without_needless_references(item) for item in of.items()}
    asked = list(dict.fromkeys(items.values()))
    statistics = worker.ask({"items": asked, "shards": min(MAX_PROCESSES, len(os.sched_getaffinity(0)))})
    answers = {item: to_sum(numbers) for item, numbers in zip(asked, statistics, strict=True)}
    return {item: answers[needed] for item, needed in items.items()}


def without_needless_references(item: Item) -> Item:
    """The item with the references that can decide its statistics, which are those of its best reference.

    A reference with the same words scores 1, and so does no other. One without a letter or digit scores nothing.
    """
    prediction, references = item
    same = prediction in references and any(character.isalnum() for character in prediction)
    return (prediction, (prediction,)) if same else item


def to_sum(statistics: list[float]) -> list[float]:
    """METEOR counts no chunk where all words of both sides match in one."""
    words, reference_words = statistics[:2]
    return [*statistics[:20], 0.0, *statistics[21:]] if statistics[20:] == [1.0, words, reference_words] else statistics


def compute(pairs: list[EvalPair], groups: Groups, tools: Tools) -> MetricScores:
    """A group's score is aggregated from its pairs' statistics, as METEOR does; it is no mean."""
    answers, tokens = tools.answers(), tools.tokens()
    statistics = {pair: answers[tokens.item(pair)] for pair in tokens.predictions}
    scores = zip(statistics, meteor(np.array(list(statistics.values()))).tolist(), strict=True)

    def of_group(ids: list[str]) -> dict[str, float]:
        return {"METEOR": float(meteor(np.sum([statistics[pair] for pair in ids], axis=0)))}

    of_pairs = {pair: {"METEOR": score, "METEOR_statistics": statistics[pair]} for pair, score in scores}
    return MetricScores(of_each_group(groups, of_group), of_pairs)


def meteor(sums: np.ndarray) -> np.ndarray:
    """The score of summed statistics [..., 23] -> [...]: weighted F of precision and recall, less for many chunks."""
    words, reference_words, functions, reference_functions = (sums[..., i] for i in range(4))
    matches = sums[..., 4:20].reshape(*sums.shape[:-1], 4, 4)  # matcher; content and function words of both sides
    chunks, matched, reference_matched = (sums[..., i] for i in range(20, 23))
    with np.errstate(divide="ignore", invalid="ignore"):
        precision = weighted(matches[..., 0], matches[..., 2]) / weighted_length(words, functions)
        recall = weighted(matches[..., 1], matches[..., 3]) / weighted_length(reference_words, reference_functions)
        mean = 1.0 / ((1.0 - ALPHA) / precision + ALPHA / recall)
        fragmentation = chunks / ((matched + reference_matched) / 2)
        score = mean * (1.0 - GAMMA * fragmentation**BETA)
    return np.where(np.isnan(score), 0.0, np.maximum(score, 0.0))


def weighted(content: np.ndarray, function: np.ndarray) -> np.ndarray:
    """Matches [..., matcher] of both kinds of words, weighed by matcher and kind, added in METEOR's order."""
    total = np.zeros(content.shape[:-1])
    for kind, weight in ((content, DELTA), (function, 1.0 - DELTA)):
        for matcher, of_matcher in enumerate(WEIGHTS):
            total = total + kind[..., matcher] * of_matcher * weight
    return total


def weighted_length(words: np.ndarray, functions: np.ndarray) -> np.ndarray:
    return DELTA * (words - functions) + (1.0 - DELTA) * functions


METRIC = Metric(
    compute,
    headline="METEOR",
    scores=("METEOR",),
    columns={"METEOR": "double", "METEOR_statistics": "list<double>"},
    resampled={"METEOR": Resampled("METEOR_statistics", meteor)},
    program=program,
)
