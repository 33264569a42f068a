"""Compare the scores of a model and its base on tasks that the base could do before fine-tuning.

Datasets with the role `retention` have records that the base could answer, such as questions about one image. The model
and its base answered the same records, so each difference has an interval over the same drawn records, as the gate's
comparison of two models has. A negative change means that the model lost some of what the base could do.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from m3diff.datasets.spec import DatasetSpec
from m3diff.scoring.bootstrap import Interval, compare, draw_ahead, resampled_scores
from m3diff.scoring.metrics import Metric, MetricScores, choose_metrics
from m3diff.scoring.pairs import ALL_PAIRS, CaptionedPairs
from m3diff.scoring.protocols import list_protocol_metrics, select_main_protocols, select_protocols
from m3diff.scoring.results import KINDS, ModelAndBaseScore, RetentionScores, score_table
from m3diff.scoring.run import compute_metrics, list_metrics_of_protocols

BASE_PREFIX = "base:"  # prefix of a protocol's name in scores.parquet in rows with predictions of the base


@dataclass(frozen=True)
class Retention:
    """The comparison of a model with its base.

    Attributes:
        protocols: scores by "<dataset>/<protocol>". Empty if no dataset has the role `retention`.
        table: rows for scores.parquet with the predictions and scores of both models. None without such a dataset.
    """

    protocols: dict[str, RetentionScores]
    table: pa.Table | None = None


def compare_with_base(
    captioned: CaptionedPairs,
    specs: Mapping[str, DatasetSpec],
    metric_names: Iterable[str],
    spice_dir: Path | None,
    limit_s: int,
) -> Retention:
    """Score the predictions of the model and of its base with the main protocol of each retention dataset.

    Args:
        captioned: records of retention datasets with the predictions of both models.
        specs: specs of the datasets, by dataset.
        metric_names: names of the metrics in `evaluate.metrics`. A protocol's own metrics are added. The judge is left
            out, because it would be asked about every answer twice.
        spice_dir: folder with SPICE's jars. None without SPICE.
        limit_s: time limit for each Java program, in seconds.

    Raises:
        ScorerFailed: a metric needs the tokenizer, and the tokenizer failed.
    """
    if not captioned.retention:
        return Retention(protocols={})
    protocols = select_main_protocols(select_protocols(captioned.retention, specs))
    own_metrics = list_protocol_metrics(protocol.rules for protocol in protocols)
    chosen_metrics = choose_metrics([*metric_names, *own_metrics])
    metrics = {name: metric for name, metric in chosen_metrics.items() if metric.extra_input != "judge"}
    base_protocols = []
    for protocol in select_main_protocols(select_protocols(captioned.retention_of_base, specs)):
        base_protocols.append(replace(protocol, dataset=f"{BASE_PREFIX}{protocol.dataset}"))
    scores = compute_metrics(metrics, [*protocols, *base_protocols], {}, spice_dir, limit_s)
    listed_metrics = list_metrics_of_protocols(metrics, protocols)
    table = score_table(listed_metrics, [*protocols, *base_protocols], scores)
    scores_by_protocol = {}
    for protocol in protocols:
        model_scores = scores[protocol.name]
        base_scores = scores[f"{BASE_PREFIX}{protocol.name}"]
        intervals = intervals_of_changes(table, protocol.name, listed_metrics)
        by_kind = {}
        records_by_kind = {}
        for group, ids in protocol.groups.items():
            folder, _, kind = group.partition("/")
            if folder == KINDS:
                by_kind[kind] = scores_of_group(group, model_scores, base_scores)
                records_by_kind[kind] = len(ids)
        scores_by_protocol[protocol.name] = RetentionScores(
            records=len(protocol.pairs),
            scores=scores_of_group(ALL_PAIRS, model_scores, base_scores, intervals),
            records_by_kind=records_by_kind,
            by_kind=by_kind,
        )
    return Retention(protocols=scores_by_protocol, table=table)


def scores_of_group(
    group: str, model: MetricScores, base: MetricScores, intervals: Mapping[str, Interval] | None = None
) -> dict[str, ModelAndBaseScore]:
    """Return the scores of a group of records that both models have.

    Args:
        intervals: intervals of the changes by score. None without intervals.
    """
    scores = {}
    for name, score in model.groups[group].items():
        base_score = base.groups[group].get(name)
        # counts, such as the number of questions, are integers
        if isinstance(score, float) and isinstance(base_score, float):
            scores[name] = ModelAndBaseScore(model=score, base=base_score, interval=(intervals or {}).get(name))
    return scores


def intervals_of_changes(table: pa.Table, protocol: str, metrics: Mapping[str, Metric]) -> dict[str, Interval]:
    """Return the intervals of the differences between the model and its base, by score.

    Args:
        table: rows of both models, in the format of scores.parquet.
        protocol: "<dataset>/<protocol>".
        metrics: metrics of the protocol.
    """
    rows_of_base = rows_with_base_answers(table, protocol)
    counts = draw_ahead(rows_of_base.num_rows)  # drawn once for all scores
    intervals = {}
    for name, score in resampled_scores(metrics).items():
        comparison = compare(table, rows_of_base, protocol, score, counts=counts)
        if comparison is not None and comparison.interval is not None:
            intervals[name] = comparison.interval
    return intervals


def rows_with_base_answers(table: pa.Table, protocol: str) -> pa.Table:
    """Return the rows of scores.parquet with a protocol's predictions of the base, under the name of the protocol."""
    rows = table.filter(pc.equal(table["protocol"], f"{BASE_PREFIX}{protocol}"))
    names = pa.array([protocol] * rows.num_rows, pa.string())
    return rows.set_column(rows.column_names.index("protocol"), "protocol", names)


def compared_protocols(protocols: Iterable[str]) -> list[str]:
    """Return the protocols of scores.parquet that have rows with predictions of the base, in alphabetical order."""
    return sorted({name.removeprefix(BASE_PREFIX) for name in protocols if name.startswith(BASE_PREFIX)})
