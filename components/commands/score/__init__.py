"""Score captions from any source under a benchmark's protocol, without images, a model or a parameters file.

Predictions may be COCO results, {id: caption}, JSON Lines, CSV or TSV. They are first checked for the errors that such
files typically have, and then scored against references. These come from a benchmark's annotation files, ingest's
records, the user's own table of pairs, or a COCO file.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np

from m3diff.commands.score.matching import MatchedPairs, find_pairs
from m3diff.commands.score.references import References, find_references
from m3diff.commands.score.report import ScoreReport
from m3diff.commands.score.task import ScoringTask, find_task, require_references
from m3diff.datasets.spec import Protocol
from m3diff.records.errors import DataError
from m3diff.scoring.bootstrap import draw_ahead, intervals, intervals_by_kind
from m3diff.scoring.grammar import parse_predictions
from m3diff.scoring.metrics import BY_CHARACTERS, HEADLINE_SCORES, METRICS, Metric
from m3diff.scoring.metrics.java import ScorerFailed, require_java
from m3diff.scoring.metrics.spice import find_jars
from m3diff.scoring.notes import note_texts
from m3diff.scoring.pairs import ALL_PAIRS
from m3diff.scoring.protocols import ProtocolPairs, apply_protocol
from m3diff.scoring.published import PublishedRow
from m3diff.scoring.results import score_table
from m3diff.scoring.run import compute_metrics, list_metrics_of_protocols

LIMIT_S = 3600  # time limit of a Java scorer in seconds; SPICE gets more, depending on its captions
# Scores that are not reported, because a file of captions has no captions of shuffled pairs
CONTROL_SCORES = {name for name, score in HEADLINE_SCORES.items() if score.is_shuffled_control}
CONTROL_SCORES |= {"exact_match_unshuffled", "shuffled_questions"}


def score(
    predictions: Path,
    benchmark: str | None = None,
    protocol: str | None = None,
    references: Path | None = None,
    data: Path | None = None,
    spice_dir: Path | None = None,
    allow_faults: bool = False,
) -> ScoreReport:
    """Score a file of captions against the references of a benchmark or the user's own references.

    Args:
        predictions: file of captions in a format supported by `predictions.read_predictions`.
        benchmark: name of a benchmark from `task.benchmarks`. None to use the references or ingest's records without
            a benchmark.
        protocol: name of one of the benchmark's protocols. None for its main protocol.
        references: COCO captions, or the user's own table of pairs.
        data: alternative to `references`: the dataset's folder, or ingest's records of the dataset.
        spice_dir: folder with SPICE's jars. None to leave SPICE out.
        allow_faults: if True, score the file even if faults are found, and list them in the report.

    Raises:
        ParamsError: neither a benchmark nor references are given.
        JavaMissing: Java is not installed. Java and the jars of SPICE are checked before any file is read.
        DataError: a file cannot be used; a fault was found and `allow_faults` is False; or `spice_dir` is given and
            SPICE gave no score.
        ScorerFailed: the tokenizer failed.
    """
    require_references(predictions, benchmark, protocol, references, data)
    require_java()
    if spice_dir is not None:
        try:
            find_jars(spice_dir)
        except ScorerFailed as missing:
            raise DataError("score.spice_dir_unusable", cause=missing.fault) from None
    task = find_task(benchmark, protocol, references, data)
    task_references = find_references(task, references, data)
    matched = find_pairs(predictions, task, task_references, allow_faults)
    return score_pairs(matched, task, task_references, spice_dir)


def score_pairs(
    matched: MatchedPairs, task: ScoringTask, references: References, spice_dir: Path | None
) -> ScoreReport:
    """Compute the scores of the matched pairs and the notes about their texts.

    Raises:
        DataError: `spice_dir` is given and SPICE gave no score.
        ScorerFailed: the tokenizer failed.
    """
    rules = task.protocol
    if references.are_as_scored:
        # the texts are already joined and truncated; if not, `find_pairs` has reported a fault
        rules = replace(rules, references="all", max_words=None)
    protocol_pairs = ProtocolPairs(task.dataset, task.protocol, apply_protocol(rules, matched.pairs))
    metrics = find_computable_metrics(references, spice_dir, task.protocol)
    parsed = {}
    if references.grammar is not None:
        parsed = parse_predictions({task.dataset: references.grammar}, protocol_pairs.pairs)
    notes: list[str] = []
    drawn_counts: list[np.ndarray] = []
    shown_metrics = list_metrics_of_protocols(metrics, [protocol_pairs])

    def work_without_scores() -> None:
        predictions = [pair.prediction for pair in matched.pairs]
        references = [reference for pair in matched.pairs for reference in pair.references]
        notes.extend(note_texts([protocol_pairs], shown_metrics, predictions, references))
        drawn_counts.extend(draw_ahead(len(protocol_pairs.pairs)) or [])

    all_scores = compute_metrics(metrics, [protocol_pairs], parsed, spice_dir, LIMIT_S, meanwhile=work_without_scores)
    scores = all_scores[protocol_pairs.name]
    if spice_dir is not None and "SPICE" in scores.absent:
        raise DataError("score.spice_failed", path=spice_dir, cause=scores.absent["SPICE"])
    ranking_score = task.protocol.ranking_score
    if protocol_pairs.counts_characters:
        ranking_score = f"{ranking_score}{BY_CHARACTERS}"
    published = [] if protocol_pairs.counts_characters else sort_published(task)
    table = score_table(shown_metrics, [protocol_pairs], {protocol_pairs.name: scores})
    pairs_by_group = {group: ids for group, ids in protocol_pairs.groups.items() if ids and group != ALL_PAIRS}
    return ScoreReport(
        dataset=task.dataset,
        protocol=task.protocol.name,
        source=task.protocol.source,
        tokenizer=task.protocol.tokenizer,
        counts_characters=protocol_pairs.counts_characters,
        headline=ranking_score,
        pairs=len(protocol_pairs.pairs),
        published_pairs=task.protocol.published_pairs,
        references=sum(len(pair.references) for pair in protocol_pairs.pairs),
        scores={name: value for name, value in scores.groups[ALL_PAIRS].items() if name not in CONTROL_SCORES},
        intervals=intervals(table, shown_metrics, protocol_pairs.name, counts=drawn_counts or None),
        kind_intervals=intervals_by_kind(table, shown_metrics, protocol_pairs.name),
        by_group={group: {"pairs": len(ids), **scores.groups[group]} for group, ids in pairs_by_group.items()},
        absent={name: reason for name, reason in scores.absent.items() if name not in CONTROL_SCORES},
        faults=[str(fault) for fault in matched.faults],
        notes=matched.notes + notes,
        published=[row._asdict() for row in published],
    )


def sort_published(task: ScoringTask) -> list[PublishedRow]:
    """Return the published scores of other methods, which are computed on words. The best ranking score comes first."""
    return sorted(task.published, key=lambda row: -(row.scores.get(task.protocol.ranking_score) or 0.0))


def find_computable_metrics(references: References, spice_dir: Path | None, protocol: Protocol) -> dict[str, Metric]:
    """Return every metric of METRICS whose inputs are available. There are never images or a judge.

    Args:
        references: the references. If they have a grammar, metrics that need one are included.
        spice_dir: folder with SPICE's jars. None to leave SPICE out.
        protocol: the protocol, which may have metrics of its own.
    """
    computable_metrics = {}
    for name, metric in METRICS.items():
        has_grammar = references.grammar is not None or not metric.needs_grammar
        has_extra_input = metric.extra_input is None or (metric.extra_input == "spice_dir" and spice_dir is not None)
        is_of_protocol = not metric.protocol_only or name in protocol.metrics
        if has_grammar and has_extra_input and is_of_protocol:
            computable_metrics[name] = metric
    return computable_metrics
