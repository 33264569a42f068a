"""Metrics: the only list, in the order of the files and the page. A new metric is a file beside these and a line here.

Light to import: packages that compute are imported inside `compute`.
"""

from collections.abc import Iterable

from components.evaluate.metrics import bleu, change_accuracy, cider, judge, meteor, pixel_threshold, rouge_l, spice
from components.evaluate.metrics.metric import Metric

METRICS: dict[str, Metric] = {
    "CIDEr": cider.METRIC,
    "METEOR": meteor.METRIC,
    "ROUGE-L": rouge_l.METRIC,
    "BLEU": bleu.METRIC,
    "SPICE": spice.METRIC,
    "change_accuracy": change_accuracy.METRIC,
    "judge": judge.METRIC,
    "pixel_threshold": pixel_threshold.METRIC,
}
"""By the name that `evaluate.metrics` gives."""


def choose_metrics(names: Iterable[str]) -> dict[str, Metric]:
    """The named metrics, in the order of METRICS."""
    wanted = set(names)
    assert wanted <= METRICS.keys(), f"unknown metrics {sorted(wanted - METRICS.keys())}; known: {', '.join(METRICS)}"
    return {name: metric for name, metric in METRICS.items() if name in wanted}


def gate_metrics(chosen: Iterable[str] | None = None) -> list[str]:
    """Scores that may stand in `promote.metric` where `evaluate.metrics` is `chosen` (None: all of METRICS).

    The gate takes the greater score for the better one, and compares two models pair by pair.
    """
    metrics = choose_metrics(METRICS if chosen is None else chosen).values()
    return [
        score
        for metric in metrics
        for score in metric.scores + metric.overall
        if score in metric.resampled and score not in metric.lower_is_better
    ]
