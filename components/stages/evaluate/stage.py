"""evaluate: score the predictions for the test pairs with the protocols of each dataset, and write the report.

Predictions and references -> metrics.json (scores by protocol), headline.json (the scores for comparing runs),
scores.parquet (one row per protocol and pair), report.html and its images. Datasets with the role `retention` compare
the model with its base. They are in a part of their own in metrics.json and on the page, and not in headline.json.
"""

import json
from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from m3diff.records.errors import DataError, Fault
from m3diff.records.files import open_atomically, write_atomic
from m3diff.report.origin import Origin
from m3diff.report.page import PageContent, write_report
from m3diff.scoring.bootstrap import intervals, intervals_by_kind
from m3diff.scoring.grammar import load_grammars, parse_predictions
from m3diff.scoring.metrics import choose_metrics, needs_java
from m3diff.scoring.metrics.java import require_java
from m3diff.scoring.metrics.judge import Judge
from m3diff.scoring.notes import note_texts
from m3diff.scoring.pairs import load_pairs
from m3diff.scoring.protocols import ProtocolPairs, list_protocol_metrics, load_specs, select_protocols
from m3diff.scoring.results import EvaluateReport, headline_scores, score_table, summarise
from m3diff.scoring.retention import compare_with_base
from m3diff.scoring.run import compute_metrics, list_metrics_of_protocols
from m3diff.settings.compute import Compute
from m3diff.stages.evaluate.params import Evaluate


def evaluate(
    cfg: Evaluate,
    compute: Compute,
    records: Path,
    clean: Path,
    predictions: Path,
    out: Path,
    origin: Origin | None = None,
) -> EvaluateReport:
    """Score `predictions` against the references in `clean` and write the scores and the report to `out`.

    Args:
        origin: the model that wrote the captions, for the top of the page. None if it is not known.

    Raises:
        JavaMissing: a chosen metric needs Java, which is not installed. This is checked first.
        DataError: records, predictions, grammars or images cannot be used; or a protocol has fewer pairs than in
            papers, and `cfg.allow_fewer_pairs` is false.
        ScorerFailed: the tokenizer failed.
    """
    metrics = choose_metrics(cfg.metrics)
    if needs_java(metrics):
        require_java()
    captioned = load_pairs(clean, predictions)
    pairs = captioned.pairs
    specs = load_specs(records, pairs)
    parsed = parse_predictions(load_grammars(records, specs), pairs)
    protocols = select_protocols(pairs, specs)
    metrics = choose_metrics([*cfg.metrics, *list_protocol_metrics(protocol.rules for protocol in protocols)])
    if not cfg.allow_fewer_pairs:
        check_complete(protocols)
    notes = note_texts(protocols, metrics, predictions=[pair.prediction for pair in pairs])
    for note in notes:
        print(f"evaluate: note: {note}", flush=True)
    judge = Judge(cfg.judge, compute.scratch) if cfg.judge and "judge" in metrics else None
    scores = compute_metrics(metrics, protocols, parsed, compute.spice_dir, compute.scorer_timeout_s, judge)
    retention_specs = load_specs(records, captioned.retention)
    retention = compare_with_base(captioned, retention_specs, cfg.metrics, compute.spice_dir, compute.scorer_timeout_s)
    metrics = list_metrics_of_protocols(metrics, protocols)
    table = score_table(metrics, protocols, scores)
    bounds = {protocol.name: intervals(table, metrics, protocol.name) for protocol in protocols}
    kind_bounds = {protocol.name: intervals_by_kind(table, metrics, protocol.name) for protocol in protocols}
    report = summarise(captioned.test_pairs, len(pairs), protocols, scores, bounds, kind_bounds, retention.protocols)
    write_scores(report, table, retention.table, out)
    content = PageContent(
        metrics=metrics,
        report=report,
        protocols=protocols,
        pair_scores={name: protocol_scores.pairs for name, protocol_scores in scores.items()},
        parsed=parsed,
        specs=specs | retention_specs,
        saliency=predictions / "saliency.npz",
        notes=notes,
        origin=origin or Origin(),
        retention=captioned.retention,
        retention_of_base=captioned.retention_of_base,
    )
    write_report(content, out, cfg.gallery)
    return report


def write_scores(report: EvaluateReport, table: pa.Table, retention_table: pa.Table | None, out: Path) -> None:
    """Write metrics.json, headline.json and scores.parquet to `out`.

    Args:
        table: rows of the protocols of the task.
        retention_table: rows of retention datasets. None if there are no such datasets.
    """
    report.write(out / "metrics.json")
    write_atomic(out / "headline.json", json.dumps(headline_scores(report), indent=1) + "\n")
    if retention_table is not None:
        table = pa.concat_tables([table, retention_table], promote_options="default")
    with open_atomically(out / "scores.parquet") as file:
        pq.write_table(table, file, compression="zstd")


def check_complete(protocols: Iterable[ProtocolPairs]) -> None:
    """Check that every protocol has as many pairs as in papers, so that its scores can be compared with published ones.

    Raises:
        DataError: a protocol has fewer pairs than in papers.
    """
    incomplete = []
    for protocol in protocols:
        published_pairs = protocol.rules.published_pairs
        if published_pairs is not None and len(protocol.pairs) < published_pairs:
            incomplete.append(
                Fault(
                    "evaluate.incomplete_protocol",
                    protocol=protocol.name,
                    value=len(protocol.pairs),
                    expected=published_pairs,
                )
            )
    if incomplete:
        raise DataError("evaluate.incomplete_protocols", faults=incomplete)
