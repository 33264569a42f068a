"""Metrics: the only list, in the order of the files and the page. A new metric is a file beside these and a line here.

Light to import: packages that compute are imported inside `compute`.
"""

from collections.abc import Iterable

from m3diff.records.lazy import Lazy
from m3diff.scoring.metrics.metric import Metric

METRICS: Lazy[Metric] = Lazy(
    "METRIC",
    {
        "CIDEr": "m3diff.scoring.metrics.cider",
        "METEOR": "m3diff.scoring.metrics.meteor",
        "ROUGE-L": "m3diff.scoring.metrics.rouge_l",
        "BLEU": "m3diff.scoring.metrics.bleu",
        "SPICE": "m3diff.scoring.metrics.spice",
        "change_accuracy": "m3diff.scoring.metrics.change_accuracy",
        "judge": "m3diff.scoring.metrics.judge",
        "pixel_threshold": "m3diff.scoring.metrics.pixel_threshold",
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
