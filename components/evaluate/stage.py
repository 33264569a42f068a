"""evaluate: score the predictions for the test pairs, and draw the report.

Predictions and references -> metrics.json (scores by group), scores.parquet (one row per pair), report.html.
"""

from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from components.compute import Compute
from components.evaluate.grammar import load_grammars, parse_predictions
from components.evaluate.metrics import choose_metrics
from components.evaluate.metrics.java import require_java
from components.evaluate.metrics.metric import Metric, PairValue
from components.evaluate.metrics.run import compute_metrics, needs_java
from components.evaluate.pairs import EvalPair, load_pairs
from components.evaluate.params import Evaluate
from components.evaluate.protocols import group_pairs, load_specs, protocol_of
from components.evaluate.report.report import Evidence, render
from components.evaluate.summary import EvaluateReport, summarise
from components.files import write_atomic


def evaluate(
    cfg: Evaluate, compute: Compute, records: Path, clean: Path, predictions: Path, model: Path, out: Path
) -> EvaluateReport:
    """Score `predictions` against `clean` and draw the page, with the training curves of `model`.

    Raises:
        JavaMissing: a chosen metric needs Java and there is none; said before any work.
        DataError: records, predictions, grammar or images cannot be used.
        ScorerFailed: the tokenizer gave up.
    """
    metrics = choose_metrics(cfg.metrics)
    if needs_java(metrics):
        require_java()
    pairs, test_pairs = load_pairs(clean, predictions)
    specs = load_specs(records, dict.fromkeys(pair.dataset for pair in pairs))
    parsed = parse_predictions(load_grammars(records, specs), pairs)
    groups = group_pairs(pairs, {dataset: protocol_of(dataset, spec) for dataset, spec in specs.items()})
    scores = compute_metrics(metrics, pairs, groups, parsed, compute.spice_dir, compute.scorer_timeout_s)
    report = summarise(test_pairs, groups, scores).write(out / "metrics.json")
    write_scores(metrics, pairs, scores.pairs, out / "scores.parquet")
    evidence = Evidence(
        metrics=metrics,
        report=report,
        pairs=pairs,
        pair_scores=scores.pairs,
        parsed=parsed,
        specs=specs,
        saliency=existing(predictions / "saliency.npz"),
        curves=existing(model / "curves.csv"),
    )
    write_atomic(out / "report.html", render(evidence, cfg.gallery))
    return report


def existing(path: Path) -> Path | None:
    return path if path.is_file() else None


def score_schema(metrics: Mapping[str, Metric]) -> pa.Schema:
    """The columns of scores.parquet: the pair, its prediction, and what each metric gives of a pair."""
    columns = {name: arrow for metric in metrics.values() for name, arrow in metric.columns.items()}
    return pa.schema(
        [
            ("id", pa.string()),
            ("dataset", pa.string()),
            ("change_types", pa.list_(pa.string())),
            ("prediction", pa.string()),
            *((name, pa.type_for_alias(arrow)) for name, arrow in columns.items()),
        ]
    )


def write_scores(
    metrics: Mapping[str, Metric], pairs: list[EvalPair], scores: Mapping[str, Mapping[str, PairValue]], path: Path
) -> None:
    """One row per pair, in the records' order."""
    rows = [
        {
            "id": pair.id,
            "dataset": pair.dataset,
            "change_types": pair.change_types,
            "prediction": pair.prediction,
            **scores[pair.id],
        }
        for pair in pairs
    ]
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(rows, schema=score_schema(metrics)), sink, compression="zstd")
    write_atomic(path, sink.getvalue().to_pybytes())
