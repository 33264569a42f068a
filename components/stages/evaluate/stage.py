"""evaluate: score the predictions for the test pairs, each dataset by its own protocols, and draw the report.

Predictions and references -> metrics.json (scores by protocol), headline.json (those that runs are compared by),
scores.parquet (one row per protocol and pair), report.html and its images.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from m3diff.records.errors import DataError
from m3diff.records.files import atomic, write_atomic
from m3diff.scoring.bootstrap import intervals
from m3diff.scoring.grammar import load_grammars, parse_predictions
from m3diff.scoring.marks import OTHER_SCRIPT, notes_of_marks
from m3diff.scoring.metrics import Metric, MetricScores, choose_metrics, needs_java
from m3diff.scoring.metrics.java import require_java
from m3diff.scoring.metrics.judge import Judge
from m3diff.scoring.pairs import ProtocolPairs, load_pairs, load_specs, note_of_scripts, select
from m3diff.scoring.run import EvaluateReport, compute_metrics, headline, metrics_of_all, summarise
from m3diff.settings.compute import Compute
from m3diff.stages.evaluate.params import Evaluate
from m3diff.stages.evaluate.report import Evidence, write_report


def evaluate(
    cfg: Evaluate, compute: Compute, records: Path, clean: Path, predictions: Path, out: Path
) -> EvaluateReport:
    """Score `predictions` against `clean` and draw the page.

    Raises:
        JavaMissing: a chosen metric needs Java and there is none; said before any work.
        DataError: records, predictions, grammar or images cannot be used; a protocol has fewer pairs than papers
            score, where `cfg.allow_fewer_pairs` does not allow it.
        ScorerFailed: the tokenizer gave up.
    """
    metrics = choose_metrics(cfg.metrics)
    if needs_java(metrics):
        require_java()
    pairs, test_pairs = load_pairs(clean, predictions)
    specs = load_specs(records, pairs)
    parsed = parse_predictions(load_grammars(records, specs), pairs)
    protocols = select(pairs, specs)
    if not cfg.allow_fewer_pairs:
        check_complete(protocols)
    notes = [note for one in protocols for note in note_of_scripts(one)]
    # letters of these scripts are what the references ask for
    usual = [OTHER_SCRIPT] if any(one.counts_characters for one in protocols) else []
    notes += notes_of_marks((pair.prediction for pair in pairs), without=usual)
    for note in notes:
        print(f"evaluate: note: {note}", flush=True)
    judge = Judge(cfg.judge, compute.scratch) if cfg.judge and "judge" in metrics else None
    scores = compute_metrics(metrics, protocols, parsed, compute.spice_dir, compute.scorer_timeout_s, judge)
    metrics = metrics_of_all(metrics, protocols)
    table = score_table(metrics, protocols, scores)
    bounds = {one.name: intervals(table, metrics, one.name) for one in protocols}
    report = summarise(test_pairs, len(pairs), protocols, scores, bounds).write(out / "metrics.json")
    write_atomic(out / "headline.json", json.dumps(headline(report), indent=1) + "\n")
    with atomic(out / "scores.parquet") as file:
        pq.write_table(table, file, compression="zstd")
    evidence = Evidence(
        metrics=metrics,
        report=report,
        protocols=protocols,
        pair_scores={name: of.pairs for name, of in scores.items()},
        parsed=parsed,
        specs=specs,
        saliency=predictions / "saliency.npz",
        notes=notes,
    )
    write_report(evidence, out, cfg.gallery)
    return report


def check_complete(protocols: Iterable[ProtocolPairs]) -> None:
    """Raises DataError where a protocol has fewer pairs than papers score: its scores do not compare with theirs."""
    short = [
        f"{one.name}: {len(one.pairs)} pairs, papers score {one.protocol.n}"
        for one in protocols
        if one.protocol.n is not None and len(one.pairs) < one.protocol.n
    ]
    if short:
        raise DataError(
            f"{'; '.join(short)}: such scores stand beside no published ones. See quarantine.parquet of validate "
            "and predict.limit; or set evaluate.allow_fewer_pairs to true, and every table will say so"
        )


def score_table(
    metrics: Mapping[str, Metric], protocols: Iterable[ProtocolPairs], scores: Mapping[str, MetricScores]
) -> pa.Table:
    """scores.parquet: a row per protocol and pair, in the records' order: the prediction as the protocol scored it,
    and what each metric gives of a pair."""
    known = {"id": "string", "dataset": "string", "change_types": "list<string>", "prediction": "string"}
    columns = {"protocol": "string"} | known
    columns |= {name: arrow for metric in metrics.values() for name, arrow in metric.columns.items()}
    rows = [
        {"protocol": one.name} | {name: getattr(pair, name) for name in known} | dict(scores[one.name].pairs[pair.id])
        for one in protocols
        for pair in one.pairs
    ]
    lists = {f"list<{name}>": pa.list_(pa.type_for_alias(name)) for name in ("string", "double")}  # pyarrow has none
    types = [(name, lists.get(arrow) or pa.type_for_alias(arrow)) for name, arrow in columns.items()]
    return pa.Table.from_pylist(rows, schema=pa.schema(types))
