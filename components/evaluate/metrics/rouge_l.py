"""ROUGE-L (Lin, 2004), by pycocoevalcap: F of the longest common subsequence, recall weighed 1.2 times."""

import math

from components.evaluate.metrics.metric import Groups, Metric, MetricScores, Tools, of_each_group
from components.evaluate.pairs import EvalPair


def compute(pairs: list[EvalPair], groups: Groups, tools: Tools) -> MetricScores:
    """A group's score is the mean of its pairs'."""
    from pycocoevalcap.rouge.rouge import Rouge

    references, predictions, _ = tools.tokens()
    values = Rouge().compute_score(references, {i: [prediction] for i, prediction in predictions.items()})[1]
    rouge = dict(zip(references, map(float, values), strict=True))
    means = of_each_group(groups, lambda ids: {"ROUGE-L": math.fsum(rouge[i] for i in ids) / len(ids)})
    return MetricScores(means, {i: {"ROUGE-L": value} for i, value in rouge.items()})


METRIC = Metric(compute, headline="ROUGE-L", scores=("ROUGE-L",), columns={"ROUGE-L": "double"})
