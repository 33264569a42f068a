"""The list of all metrics, the types that describe a metric, and the inputs of metrics.

To add a metric, write a file next to this one and add a line to METRICS. That is enough for `m3diff score`, which
computes every metric whose inputs it has. `evaluate` computes the metrics in `evaluate.metrics` of params.yaml, the
metric ANSWERS if records have questions of their own, and the metrics that a protocol names. To show a score wherever
runs are compared (in headline.json, the report, the model card and MLflow), add a line to HEADLINE_SCORES. Importing
this file is cheap because metrics import the packages they need inside `compute`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np

from m3diff.records import LazyMapping
from m3diff.scoring.grammar import ParsedCaption
from m3diff.scoring.metrics.ngrams import Ngrams, SharedNgrams
from m3diff.scoring.pairs import EvalPair, Groups, SelectedRecords

T = TypeVar("T")

ANSWERS = "answers"  # metric of answers to questions of their own, which is computed without being chosen

BY_CHARACTERS = "-char"  # suffix of the names of scores that are computed on characters
ENGLISH_ONLY = "it reads English alone, and the references are in a script without spaces between words"

Value = int | float | None
PairValue = float | str | bool | list[float] | None

# Tokens of a prediction, and tokens of each of its references: all that a caption metric needs to score a pair
Item = tuple[str, tuple[str, ...]]


@dataclass(frozen=True)
class Tokens:
    """The tokens of captions by pair id. The tokens of one caption are joined by spaces.

    shuffled: captions written for the before-image and another pair's after-image, for some or all pairs. None if
        predict did not write such captions.
    """

    references: dict[str, list[str]]
    predictions: dict[str, str]
    shuffled: dict[str, str] | None

    @cached_property
    def shared(self) -> SharedNgrams:
        """N-grams of all captions, and n-grams that predictions share with references. Counted once for all metrics."""
        captions = list(self.predictions.values())
        for references in self.references.values():
            captions += references
        if self.shuffled is not None:
            captions += self.shuffled.values()
        return SharedNgrams(Ngrams(captions), self.predictions, self.references)

    def item(self, pair_id: str) -> Item:
        """Return the tokens of a pair's prediction and references."""
        return self.predictions[pair_id], tuple(self.references[pair_id])


class Program(ABC):
    """A metric's Java program. It is created before captions are tokenised, so that it can read its files meanwhile."""

    @abstractmethod
    def start(self, items: Sequence[Item]) -> None:
        """Start scoring the distinct items of all protocols. Other metrics are computed in the meantime.

        Raises:
            ScorerFailed: the program cannot be started.
        """

    @abstractmethod
    def answers(self) -> Mapping[Item, Any]:
        """Wait for the program and return its answer for each item.

        Raises:
            ScorerFailed: the program did not start or gave no answer.
        """

    @abstractmethod
    def close(self) -> None:
        """Stop all processes that are still running and remove their files."""


class JudgeVerdict(NamedTuple):
    """A judge's verdict on a prediction.

    is_right: whether the prediction is right. None if the judge gave no verdict.
    answer: text of the judge's answer, or the reason why there is no answer.
    """

    is_right: bool | None
    answer: str


class MetricInputs(NamedTuple):
    """Inputs of a metric in addition to the pairs of a protocol.

    tokens: tokens of the pairs' captions. Empty if no metric needs Java.
    answers: answers of the metric's `program`.
    parsed: parsed predictions by pair id, for pairs whose references a grammar can read.
    judge: function that returns verdicts by pair id for some of the pairs. None if no judge is configured.
    """

    tokens: Tokens
    answers: Mapping[Item, Any]
    parsed: Mapping[str, ParsedCaption]
    judge: Callable[[list[EvalPair]], Mapping[str, JudgeVerdict]] | None = None


class MetricScores(NamedTuple):
    """The result of `Metric.compute`.

    groups: group -> score -> value. A missing score is null in the files.
    pairs: pair id -> column of scores.parquet -> value.
    absent: score -> reason why it is null.
    """

    groups: Mapping[str, Mapping[str, Value]]
    pairs: Mapping[str, Mapping[str, PairValue]]
    absent: Mapping[str, str] = {}


class Resampled(NamedTuple):
    """How to compute a score of a set of pairs from a column of scores.parquet, summed over the pairs.

    column: name of the column, which holds k statistics per pair (list<double>) or a plain value.
    score: function from sums [..., k] to scores [...]. A score is NaN if it is undefined for the set.
    """

    column: str
    score: Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Metric:
    """A metric. The report's tables and the columns of scores.parquet are derived from these fields.

    `compute` and `program` raise ScorerFailed if they cannot produce any score. The other metrics are still computed.

    Attributes:
        compute: function that scores the pairs of one protocol.
        main_score: score that is shown where there is room for only one score per metric.
        scores: names of the scores of every group of pairs. Papers print them times 100.
        overall: names of the scores that exist only for all pairs of a protocol together.
        columns: columns of scores.parquet for the scores of a pair: name -> Arrow type.
        resampled: score -> how to compute it from summed statistics, which its bootstrap interval requires.
        lower_is_better: scores for which a lower value is better. The gate can guard them, but none can be its
            metric.
        java: whether the metric needs Java, for its tokens or for its program.
        program: function that creates the metric's Java program. Its arguments are SPICE's folder and the time limit in
            seconds. None if the metric does not have a Java program.
        needs_grammar: whether the metric needs a grammar to read the captions. A dataset without one has no score.
        extra_input: input that a user may not have: the images, a judge, or the folder with SPICE's jars. None for a
            metric of captions. `m3diff score` has no images and no judge, so it leaves such metrics out. Tables of the
            report leave a metric with an extra input out if it was not computed.
        reads: the texts that the metric reads: tokens of any language, tokens of English captions only, or none of
            these. Metrics for English are not computed for scripts without spaces between words, and a note names them
            if references are in another language.
        records: the records of a protocol that the metric scores; see `ProtocolPairs.select`.
        protocol_only: whether only the protocols that name the metric in `Protocol.metrics` have it. Such a metric is
            computed without being chosen.
    """

    compute: Callable[[list[EvalPair], Groups, MetricInputs], MetricScores]
    main_score: str
    scores: tuple[str, ...]
    overall: tuple[str, ...] = ()
    columns: Mapping[str, str] = field(default_factory=dict)
    resampled: Mapping[str, Resampled] = field(default_factory=dict)
    lower_is_better: tuple[str, ...] = ()
    java: bool = True
    program: Callable[[Path | None, int], Program] | None = None
    needs_grammar: bool = False
    extra_input: Literal["images", "judge", "spice_dir"] | None = None
    reads: Literal["tokens", "English", "other"] = "other"
    records: SelectedRecords = "texts"
    protocol_only: bool = False


def score_each_group(groups: Groups, compute: Callable[[list[str]], T]) -> dict[str, T]:
    """Call `compute` on the pair ids of each group that is not empty, and return the results by group."""
    return {name: compute(ids) for name, ids in groups.items() if ids}


def mean_of(column: str) -> Resampled:
    """Return how to compute the mean of a column over pairs. The column holds plain values or lists [value, 1]."""
    return Resampled(column, divide_sums(0, 1))


def divide_sums(dividend: int, divisor: int) -> Callable[[np.ndarray], np.ndarray]:
    """Return a function that divides one sum by another. The result is NaN where the divisor is 0.

    Args:
        dividend, divisor: indices of the two sums in the last dimension of the sums.
    """

    def divide(sums: np.ndarray) -> np.ndarray:
        divisors = sums[..., divisor]
        return np.divide(sums[..., dividend], divisors, where=divisors != 0, out=np.full(divisors.shape, np.nan))

    return divide


# Metrics by their names in `evaluate.metrics`, in the order in which the files and the page list them
METRICS: LazyMapping[Metric] = LazyMapping(
    "METRIC",
    {
        ANSWERS: "m3diff.scoring.metrics.answers",  # first, because short answers have no other score
        "first_answer": "m3diff.scoring.metrics.first_answer",
        "binary_change": "m3diff.scoring.metrics.binary_change",
        "object_counts": "m3diff.scoring.metrics.object_counts",
        "grid_cells": "m3diff.scoring.metrics.grid_cells",
        "consistency": "m3diff.scoring.metrics.consistency",
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


@dataclass(frozen=True)
class HeadlineScore:
    """A score for comparing runs, and its title in each output. An output leaves out a score whose title is None.

    Attributes:
        metric: name in METRICS of the metric that computes the score.
        report_title: title of the row in the report's table of headline scores.
        tile_title: title of the percentage at the top of the report. The headline scores of metrics of captions are
            shown there by name and need no title.
        card_title: title of the row in the model card that `m3diff export --hub` writes.
        registry_title: title of the row in the description of a registered version on MLflow's page.
        is_shuffled_control: whether the score needs captions of shuffled pairs, which `m3diff score` does not have.
    """

    metric: str
    report_title: str
    tile_title: str | None = None
    card_title: str | None = None
    registry_title: str | None = None
    is_shuffled_control: bool = False


# Scores for comparing runs, in the order of headline.json and of the report
HEADLINE_SCORES = {
    "exact_match": HeadlineScore(
        ANSWERS,
        report_title="questions: answer equals a reference, %",
        tile_title="Exact match",
        card_title="answers to questions that equal a reference, %",
        registry_title="answers that equal a reference, %",
    ),
    "yes_no_accuracy": HeadlineScore(
        ANSWERS,
        report_title="yes/no questions: answered rightly, %",
        card_title="yes/no questions answered rightly, %",
    ),
    "number_accuracy": HeadlineScore(
        ANSWERS,
        report_title="questions for a number: answered rightly, %",
        card_title="questions for a number answered rightly, %",
    ),
    "choice_accuracy": HeadlineScore(
        ANSWERS,
        report_title="questions with options: answered rightly, %",
        card_title="questions with options answered rightly, %",
    ),
    "first_answer_accuracy": HeadlineScore(
        "first_answer",
        report_title="questions: first word or letter of the answer right, %",
        tile_title="First answer right",
        card_title="questions whose first answer is right, as RSRCC's authors read it, %",
    ),
    "first_choice_accuracy": HeadlineScore(
        "first_answer", report_title="questions with options: first letter of the answer right, %"
    ),
    "first_yes_no_accuracy": HeadlineScore(
        "first_answer", report_title="yes/no questions: first yes or no of the answer right, %"
    ),
    "binary_accuracy": HeadlineScore("binary_change", report_title="changed or not: answered rightly, %"),
    "binary_f1": HeadlineScore("binary_change", report_title="changed or not: F1 of “changed”"),
    "roads_mae": HeadlineScore("object_counts", report_title="number of roads: mean absolute error times 100"),
    "buildings_mae": HeadlineScore("object_counts", report_title="number of buildings: mean absolute error times 100"),
    "roads_f1": HeadlineScore("grid_cells", report_title="cells with changed roads: F1"),
    "buildings_f1": HeadlineScore("grid_cells", report_title="cells with changed buildings: F1"),
    "consistency": HeadlineScore(
        "consistency",
        report_title="statements judged rightly about all of their pairs, %",
        tile_title="Statements right about all pairs",
        card_title="statements judged correctly about all of their pairs, %",
    ),
    "exact_match_shuffled": HeadlineScore(
        ANSWERS,
        report_title="control with shuffled after-images: answer equals a reference, %",
        is_shuffled_control=True,
    ),
    "BLEU-4": HeadlineScore("BLEU", "BLEU-4", card_title="BLEU-4", registry_title="BLEU-4"),
    "METEOR": HeadlineScore("METEOR", "METEOR", card_title="METEOR", registry_title="METEOR"),
    "ROUGE-L": HeadlineScore("ROUGE-L", "ROUGE-L", card_title="ROUGE-L", registry_title="ROUGE-L"),
    "CIDEr": HeadlineScore("CIDEr", "CIDEr", card_title="CIDEr", registry_title="CIDEr"),
    "SPICE": HeadlineScore("SPICE", "SPICE", card_title="SPICE", registry_title="SPICE"),
    "change_type_accuracy": HeadlineScore(
        "change_accuracy",
        report_title="one change: its type right, %",
        tile_title="Type of change right",
        card_title="type of a single change named correctly, %",
        registry_title="type of a single change correct, %",
    ),
    "change_place_accuracy": HeadlineScore(
        "change_accuracy", report_title="one change: type, object and place right, %"
    ),
    "change_exact_accuracy": HeadlineScore(
        "change_accuracy",
        report_title="one change: all of it right, %",
        tile_title="All of the change right",
        card_title="single change: type, object, place, what became what, %",
        registry_title="single change fully correct, %",
    ),
    "multi_change_exact_f1": HeadlineScore(
        "change_accuracy",
        report_title="several changes: F1 of those that are all right",
        card_title="several changes, all of each correct: F1 times 100",
    ),
    "no_change_recall": HeadlineScore(
        "change_accuracy",
        report_title="pairs without a change: “nothing changed” said, %",
        tile_title="“Nothing changed”, rightly",
        card_title='"nothing changed" of pairs without a change, %',
        registry_title="pairs without a change recognized, %",
    ),
    "false_no_change": HeadlineScore(
        "change_accuracy",
        report_title="pairs with a change: “nothing changed” said, %",
        tile_title="“Nothing changed”, wrongly",
        card_title='"nothing changed" of pairs with a change, %',
    ),
    "reversal": HeadlineScore(
        "change_accuracy",
        report_title="images swapped: the inverse change named, %",
        card_title="the images swapped: the inverse change named, %",
    ),
    "CIDEr_shuffled": HeadlineScore(
        "CIDEr", report_title="CIDEr of the control: after-images shuffled", is_shuffled_control=True
    ),
    "pixel_window_auc": HeadlineScore(
        "pixel_threshold", report_title="change found by comparing pixels alone, area under the curve"
    ),
    "BLEU-4-char": HeadlineScore("BLEU", "BLEU-4-char", card_title="BLEU-4 of characters"),
    "ROUGE-L-char": HeadlineScore("ROUGE-L", "ROUGE-L-char", card_title="ROUGE-L of characters"),
    "CIDEr-char": HeadlineScore(
        "CIDEr", "CIDEr-char", card_title="CIDEr of characters", registry_title="CIDEr of characters"
    ),
    "CIDEr_shuffled-char": HeadlineScore(
        "CIDEr", report_title="CIDEr-char of the control: after-images shuffled", is_shuffled_control=True
    ),
}


def headline_scores_by_metric() -> dict[str, HeadlineScore]:
    """Return HEADLINE_SCORES in the order of METRICS, in which the model card and MLflow list them."""
    positions = list(METRICS)
    # scores of the same metric keep their order, so a score on characters follows the score on words
    return dict(sorted(HEADLINE_SCORES.items(), key=lambda item: positions.index(item[1].metric)))


def make_character_variant(metric: Metric) -> Metric:
    """Return a variant of the metric that is computed on characters. Its scores and columns have names with -char."""

    def compute(pairs: list[EvalPair], groups: Groups, inputs: MetricInputs) -> MetricScores:
        scores = metric.compute(pairs, groups, inputs)
        return MetricScores(
            groups={group: add_character_suffix(values) for group, values in scores.groups.items()},
            pairs={pair_id: add_character_suffix(values) for pair_id, values in scores.pairs.items()},
            absent=add_character_suffix(scores.absent),
        )

    resampled = {
        name: statistics._replace(column=f"{statistics.column}{BY_CHARACTERS}")
        for name, statistics in metric.resampled.items()
    }
    return replace(
        metric,
        compute=compute,
        main_score=f"{metric.main_score}{BY_CHARACTERS}",
        scores=tuple(f"{name}{BY_CHARACTERS}" for name in metric.scores),
        overall=tuple(f"{name}{BY_CHARACTERS}" for name in metric.overall),
        columns=add_character_suffix(metric.columns),
        resampled=add_character_suffix(resampled),
        lower_is_better=tuple(f"{name}{BY_CHARACTERS}" for name in metric.lower_is_better),
    )


def add_character_suffix(values: Mapping[str, T]) -> dict[str, T]:
    """Append -char to the names of the values."""
    return {f"{name}{BY_CHARACTERS}": value for name, value in values.items()}


def add_character_variants(metrics: Mapping[str, Metric]) -> dict[str, Metric]:
    """Return the metrics, each followed by its variant for characters if it reads tokens of any language."""
    all_metrics = {}
    for name, metric in metrics.items():
        all_metrics[name] = metric
        if metric.reads == "tokens":
            all_metrics[f"{name}{BY_CHARACTERS}"] = make_character_variant(metric)
    return all_metrics


def choose_metrics(names: Iterable[str]) -> dict[str, Metric]:
    """Return the named metrics and the metric ANSWERS, in the order of METRICS."""
    chosen_names = {*names, ANSWERS}
    unknown_names = chosen_names - METRICS.keys()
    assert not unknown_names, f"unknown metrics {sorted(unknown_names)}; known: {', '.join(METRICS)}"
    return {name: METRICS[name] for name in METRICS if name in chosen_names}


def needs_java(metrics: Mapping[str, Metric]) -> bool:
    """Return True if any of the metrics needs Java."""
    return any(metric.java for metric in metrics.values())


def gate_scores(chosen: Iterable[str] | None = None) -> list[str]:
    """Return the names of the scores that the gate can use, which are the valid values of `promote.metric`.

    The gate compares two models pair by pair and treats a higher score as better.

    Args:
        chosen: names of `evaluate.metrics`, or None for all metrics.
    """
    scores: list[str] = []
    for metric in add_character_variants(choose_metrics(METRICS if chosen is None else chosen)).values():
        for score in metric.scores + metric.overall:
            if score in metric.resampled and score not in metric.lower_is_better:
                scores.append(score)
    return scores
