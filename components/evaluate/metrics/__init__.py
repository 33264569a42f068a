"""Metrics: the only list, in the order of the files and the page. A new metric is a file beside these and a line here.

Light to import: packages that compute are imported inside `compute`.
"""

from collections.abc import Iterable

from components.evaluate.metrics.metric import Metric
from components.lazy import Lazy

METRICS: Lazy[Metric] = Lazy(
    "METRIC",
    {
        "CIDEr": "components.evaluate.metrics.cider",
        "METEOR": "components.evaluate.metrics.meteor",
        "ROUGE-L": "components.evaluate.metrics.rouge_l",
        "BLEU": "components.evaluate.metrics.bleu",
        "SPICE": "components.evaluate.metrics.spice",
        "change_accuracy": "components.evaluate.metrics.change_accuracy",
        "judge": "components.evaluate.metrics.judge",
        "pixel_threshold": "components.evaluate.metrics.pixel_threshold",
    },
)
"""By the name that `evaluate.metrics` gives."""


def choose_metrics(names: Iterable[str]) -> dict[str, Metric]:
    """The named metrics, in the order of METRICS."""
    wanted = set(names)
    assert wanted <= METRICS.keys(), f"unknown metrics {sorted(wanted - METRICS.keys())}; known: {', '.join(METRICS)}"
    return {name: METRICS[name] for name in METRICS if name in wanted}


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
