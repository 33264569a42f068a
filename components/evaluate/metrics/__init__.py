"""Metrics: the only list, in the order of the files and the page. A new metric is a file beside these and a line here.

Light to import: packages that compute are imported inside `compute`.
"""

from collections.abc import Iterable

from components.evaluate.metrics.metric import Metric
from components.lazy import Lazy

FILES = {
    "CIDEr": "cider",
    "METEOR": "meteor",
    "ROUGE-L": "rouge_l",
    "BLEU": "bleu",
    "SPICE": "spice",
    "change_accuracy": "change_accuracy",
    "judge": "judge",
    "pixel_threshold": "pixel_threshold",
}

METRICS: Lazy[Metric] = Lazy("METRIC", {name: f"components.evaluate.metrics.{file}" for name, file in FILES.items()})
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
