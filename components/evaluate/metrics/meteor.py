"""METEOR 1.5 (Denkowski and Lavie, 2014), pycocoevalcap's Java program. Its JVM takes 10 to 30 s to start."""

from components.evaluate.metrics.metric import Groups, Metric, MetricScores, Tools
from components.evaluate.metrics.scorer import from_worker
from components.evaluate.pairs import EvalPair


def compute(pairs: list[EvalPair], groups: Groups, tools: Tools) -> MetricScores:
    """A group's score is aggregated from its pairs' statistics, as METEOR does; it is no mean."""
    worker = tools.start("METEOR")  # before the tokens are there: both take long
    references, predictions, _ = tools.tokens()
    worker.send({"references": references, "predictions": predictions, "groups": groups})
    return MetricScores(*from_worker(worker.result(), "METEOR"))


METRIC = Metric(compute, headline="METEOR", scores=("METEOR",), columns={"METEOR": "double"}, beside=True)
