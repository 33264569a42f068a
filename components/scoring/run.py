"""Compute the chosen metrics of all protocols at once, and the files that hold them: metrics.json, by protocol and
group of pairs; headline.json, the few scores to compare runs by.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, model_serializer

from m3diff.records.files import StageReport
from m3diff.records.progress import progress
from m3diff.scoring.bootstrap import Interval
from m3diff.scoring.characters import tokenise_characters
from m3diff.scoring.grammar import ParsedCaption
from m3diff.scoring.metrics import (
    BY_CHARACTERS,
    ENGLISH_ONLY,
    Item,
    Metric,
    MetricScores,
    Tokens,
    Tools,
    by_characters,
    needs_java,
    with_characters,
)
from m3diff.scoring.metrics.java import ScorerFailed, sanitise, tokenise
from m3diff.scoring.metrics.judge import Judge
from m3diff.scoring.pairs import ALL, Groups, ProtocolPairs

Scores = dict[str, int | float | None]
# Groups called "<folder>/<name>" stand in the file as an object of objects
FOLDERS = ("by_type", "by_changes", "by_length")
# The scores that runs are compared by, in the order in which they are shown
HEADLINE = (
    "BLEU-4", "METEOR", "ROUGE-L", "CIDEr", "SPICE", "change_type_accuracy", "change_place_accuracy",
    "change_exact_accuracy", "multi_change_exact_f1", "no_change_recall", "false_no_change", "reversal",
    "CIDEr_shuffled", "pixel_window_auc", "BLEU-4-char", "ROUGE-L-char", "CIDEr-char", "CIDEr_shuffled-char",
)  # fmt: skip


def compute_metrics(
    metrics: Mapping[str, Metric],
    protocols: Sequence[ProtocolPairs],
    parsed: Mapping[str, ParsedCaption],
    spice_dir: Path | None,
    limit_s: int,
    judge: Judge | None = None,
) -> dict[str, MetricScores]:
    """Every score of every group of each protocol, null where there is none. A metric that fails costs its own scores
    only.

    Raises:
        ScorerFailed: the tokenizer gave up, and a metric needs it.
    """
    tokens = tokenise_protocols(protocols, limit_s) if needs_java(metrics) else {}
    found: dict[str, dict[str, MetricScores]] = {one.name: {} for one in protocols}
    for name, metric in progress(list(metrics.items()), "evaluate: metrics", unit="metric"):
        try:
            scored = [one for one in protocols if not (one.counts_characters and metric.reads == "English")]
            items = items_of(tokens[one.name] for one in scored if one.name in tokens)
            answers = metric.program(items, spice_dir, limit_s) if metric.program and scored else {}
            for one in scored:
                tools = Tools(tokens.get(one.name, Tokens({}, {}, None)), answers, parsed, judge)
                if one.counts_characters and metric.reads == "tokens":
                    of_characters = by_characters(metric).compute(one.pairs, one.groups, tools)
                    found[one.name][f"{name}{BY_CHARACTERS}"] = of_characters
                else:
                    found[one.name][name] = metric.compute(one.pairs, one.groups, tools)
        except ScorerFailed as failure:
            for of_metrics in found.values():
                of_metrics.setdefault(name, MetricScores({}, {}, {metric.headline: str(failure)}))
    for one in protocols:
        if one.counts_characters:
            found[one.name] |= without_words(metrics)
    return {one.name: merge(metrics_of(metrics, one), one.groups, found[one.name]) for one in protocols}


def items_of(tokens: Iterable[Tokens]) -> list[Item]:
    """The distinct predictions with their references."""
    return list(dict.fromkeys(of_protocol.item(pair) for of_protocol in tokens for pair in of_protocol.predictions))


def metrics_of(metrics: Mapping[str, Metric], one: ProtocolPairs) -> dict[str, Metric]:
    """The metrics whose scores a protocol's part of metrics.json names: those of characters only if it counts them."""
    return with_characters(metrics) if one.counts_characters else dict(metrics)


def metrics_of_all(metrics: Mapping[str, Metric], protocols: Iterable[ProtocolPairs]) -> dict[str, Metric]:
    """The metrics that any of the protocols has."""
    return with_characters(metrics) if any(one.counts_characters for one in protocols) else dict(metrics)


def without_words(metrics: Mapping[str, Metric]) -> dict[str, MetricScores]:
    """Why a protocol that counts characters has no score of words, by metric."""
    reasons: dict[str, dict[str, str]] = {}
    for name, metric in metrics.items():
        if metric.reads == "English":
            reasons[name] = dict.fromkeys(metric.scores, ENGLISH_ONLY)
        elif metric.reads == "tokens":
            reasons[name] = {
                score: f"the references have no spaces between words; {score}{BY_CHARACTERS} counts characters"
                for score in metric.scores
            }
    return {name: MetricScores({}, {}, absent) for name, absent in reasons.items()}


def tokenise_protocols(protocols: Sequence[ProtocolPairs], limit_s: int) -> dict[str, Tokens]:
    """The tokens of each protocol's pairs, by its name: from PTB or from white space alone, and in scripts without
    spaces characters; each distinct text is tokenised once."""
    found = {}
    for tokenizer, counts_characters in dict.fromkeys(map(tokens_of, protocols)):
        of_tokenizer = [one for one in protocols if tokens_of(one) == (tokenizer, counts_characters)]
        pairs = [pair for one in of_tokenizer for pair in one.pairs]
        said = [(pair.prediction, *pair.references, pair.shuffled_prediction) for pair in pairs]
        texts = [text for of_pair in said for text in of_pair if text is not None]

        def words(of_texts: Iterable[str], tokenizer: str = tokenizer) -> dict[str, str]:
            return tokenise(of_texts, limit_s) if tokenizer == "ptb" else {text: sanitise(text) for text in of_texts}

        tokens = tokenise_characters(texts, words) if counts_characters else words(texts)
        for one in of_tokenizer:
            shuffled = {pair.id: pair.shuffled_prediction for pair in one.pairs}
            found[one.name] = Tokens(
                {pair.id: [tokens[reference] for reference in pair.references] for pair in one.pairs},
                {pair.id: tokens[pair.prediction] for pair in one.pairs},
                {i: tokens[text] for i, text in shuffled.items() if text is not None} or None,
            )
    return found


def tokens_of(one: ProtocolPairs) -> tuple[str, bool]:
    """The tokenizer of a protocol's words, and whether characters are tokens."""
    return one.protocol.tokenizer, one.counts_characters


def merge(metrics: Mapping[str, Metric], groups: Groups, found: Mapping[str, MetricScores]) -> MetricScores:
    """The scores of all metrics side by side, in the metrics' order; null where one gave none."""
    names = [name for metric in metrics.values() for name in metric.scores]
    overall = [name for metric in metrics.values() for name in metric.overall]
    of_groups: dict[str, dict[str, Any]] = {
        group: dict.fromkeys(names + overall if group == ALL else names) for group in groups
    }
    of_pairs: dict[str, dict[str, Any]] = {i: {} for i in groups[ALL]}
    absent: dict[str, str] = {}
    for name in metrics:
        scores = found.get(name, MetricScores({}, {}))
        for group, values in scores.groups.items():
            of_groups[group].update(values)
        for i, of_pair in scores.pairs.items():
            of_pairs[i].update(of_pair)
        absent.update(scores.absent)
    return MetricScores(of_groups, of_pairs, absent)


class ProtocolScores(BaseModel):
    """The scores of one dataset under one protocol.

    Scores are as pycocoevalcap gives them; papers print them times 100. In the file those of all the protocol's pairs
    stand first, beside an object for each group. None is absent.
    """

    model_config = ConfigDict(frozen=True)

    pairs: int
    published_pairs: int | None  # that papers score
    scores: Scores
    intervals: dict[str, Interval]  # by score
    groups: dict[str, Scores]  # `pairs`, `changes`: how many
    absent: dict[str, str]  # score -> why it is null

    @model_serializer
    def as_file(self) -> dict[str, Any]:
        head = {"pairs": self.pairs, "published_pairs": self.published_pairs}
        intervals = {score: interval.model_dump() for score, interval in self.intervals.items()}
        folders: dict[str, Any] = {folder: self.folder(folder) for folder in FOLDERS}
        plain = {name: values for name, values in self.groups.items() if "/" not in name}
        return {**head, **self.scores, "intervals": intervals, **plain, **folders, "absent": self.absent}

    def folder(self, folder: str) -> dict[str, Scores]:
        start = f"{folder}/"
        return {name.removeprefix(start): values for name, values in self.groups.items() if name.startswith(start)}

    @property
    def is_partial(self) -> bool:
        return self.published_pairs is not None and self.pairs < self.published_pairs


class EvaluateReport(StageReport):
    """metrics.json. rows_in: test pairs; rows_out: pairs captioned and scored."""

    protocols: dict[str, ProtocolScores]  # by "<dataset>/<protocol>"


def summarise(
    test_pairs: int,
    captioned: int,
    protocols: Iterable[ProtocolPairs],
    scores: Mapping[str, MetricScores],
    intervals: Mapping[str, Mapping[str, Interval]],
) -> EvaluateReport:
    """Everything that is measured, in the shape of metrics.json; `scores` and `intervals` by protocol."""
    found = {}
    for one in protocols:
        of = scores[one.name]
        found[one.name] = ProtocolScores(
            pairs=len(one.pairs),
            published_pairs=one.protocol.n,
            scores=dict(of.groups[ALL]),
            intervals=dict(intervals.get(one.name, {})),
            groups={
                group: {"pairs": len(ids), **of.groups[group]} for group, ids in one.groups.items() if group != ALL
            },
            absent=dict(of.absent),
        )
    return EvaluateReport(stage="evaluate", rows_in=test_pairs, rows_out=captioned, protocols=found)


def headline(report: EvaluateReport) -> dict[str, dict[str, float]]:
    """The scores of HEADLINE that each dataset's first protocol has, times 100, as `dvc metrics diff` and
    `dvc exp show` list them."""
    first: dict[str, str] = {}
    for name in report.protocols:
        first.setdefault(name.partition("/")[0], name)
    return {
        protocol: {
            name: round(100 * value, 2)
            for name in HEADLINE
            if (value := report.protocols[protocol].scores.get(name)) is not None
        }
        for protocol in first.values()
    }
