"""evaluate: score the captions of the test pairs, and draw the report.

Captions and references -> metrics.json (scores by group), scores.parquet (one row per pair), report.html.
"""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from components.evaluate import coco
from components.evaluate.grammar import Grammar, ParsedCaption, parse_predictions
from components.evaluate.java import require_java
from components.evaluate.metrics import EvaluateReport, group_pairs, summarise
from components.evaluate.pairs import Pair, load_pairs
from components.evaluate.report import Evidence, render
from components.evaluate.params import Evaluate
from components.files import write_atomic

PAIR_METRICS = ("BLEU-4", "METEOR", "ROUGE-L", "CIDEr", "SPICE")
SCORE_SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("dataset", pa.string()),
        ("change_types", pa.list_(pa.string())),
        ("caption", pa.string()),
        *((metric, pa.float64()) for metric in PAIR_METRICS),
        ("said", pa.string()),  # change type that the caption names, "none", "several" or "unreadable"
        ("type_right", pa.bool_()),
        ("exact_right", pa.bool_()),
    ]
)
NO_GRAMMAR = "evaluate.grammar is null, so captions cannot be read for change type, object and place"


def evaluate(cfg: Evaluate, clean: Path, captions: Path, model: Path, out: Path) -> EvaluateReport:
    """Score `captions` against `clean` and draw the page, with the training curves of `model`.

    Raises:
        JavaMissing: no Java; said before any work.
        DataError: records, captions, grammar or images cannot be used.
        coco.ScorerFailed: the tokenizer gave up.
    """
    require_java()
    grammar = Grammar.load(cfg.grammar) if cfg.grammar else None
    pairs, test_pairs = load_pairs(clean, captions)
    groups = group_pairs(pairs)
    scores = coco.score(
        {pair.id: pair.references for pair in pairs},
        {pair.id: pair.caption for pair in pairs},
        shuffled_captions(pairs),
        groups,
        cfg.spice_dir,
        cfg.scorer_timeout_s,
    )
    parsed = parse_predictions(grammar, pairs) if grammar else {}
    scores.absent |= absent(grammar, scores)
    metrics = summarise(pairs, test_pairs, groups, scores, parsed).write(out / "metrics.json")
    write_scores(pairs, scores, parsed, out / "scores.parquet")
    evidence = Evidence(
        metrics=metrics,
        pairs=pairs,
        cider={i: of_pair["CIDEr"] for i, of_pair in scores.pairs.items()},
        parsed=parsed,
        attention=existing(captions / "saliency.npz"),
        curves=existing(model / "curves.csv"),
    )
    write_atomic(out / "report.html", render(evidence, cfg.gallery))
    return metrics


def shuffled_captions(pairs: list[Pair]) -> dict[str, str] | None:
    said = {pair.id: pair.shuffled for pair in pairs if pair.shuffled is not None}
    return said if len(said) == len(pairs) else None


def absent(grammar: Grammar | None, scores: coco.CocoScores) -> dict[str, str]:
    """Reasons for the nulls that are not a scorer's."""
    reasons = {}
    if grammar is None:
        reasons["change_type_accuracy"] = NO_GRAMMAR
    if scores.shuffled_cider is None:
        reasons["CIDEr_shuffled"] = "there are no captions of shuffled pairs (predictions_shuffled.json), or only one pair"
    return reasons


def existing(path: Path) -> Path | None:
    return path if path.is_file() else None


def write_scores(pairs: list[Pair], scores: coco.CocoScores, parsed: dict[str, ParsedCaption], path: Path) -> None:
    """One row per pair, in the records' order."""
    rows = []
    for pair in pairs:
        row: dict[str, Any] = {
            "id": pair.id,
            "dataset": pair.dataset,
            "change_types": pair.change_types,
            "caption": pair.caption,
        }
        if reading := parsed.get(pair.id):
            row |= {"said": reading.word, "type_right": reading.type_right, "exact_right": reading.exact_right}
        rows.append(row | {metric: scores.pairs[pair.id].get(metric) for metric in PAIR_METRICS})
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(rows, schema=SCORE_SCHEMA), sink, compression="zstd")
    write_atomic(path, sink.getvalue().to_pybytes())
