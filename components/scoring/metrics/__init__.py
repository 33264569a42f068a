"""Metrics: the only list, the types of its entries, and what they are computed from.

A new metric is a file beside this one and a line in METRICS. Light to import: packages that compute are imported inside
`compute`.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np

from m3diff.records import Lazy
from m3diff.scoring.grammar import ParsedCaption
from m3diff.scoring.pairs import EvalPair, Groups

T = TypeVar("T")

ORDERS = 4  # n-grams have one to so many words
BY_CHARACTERS = "-char"  # ends the name of every score whose tokens are characters
ENGLISH_ONLY = "it reads English alone, and the references are in a script without spaces between words"

Value = int | float | None
PairValue = float | str | bool | list[float] | None

# Tokens of a prediction and of its references: all that a caption metric knows of a pair
Item = tuple[str, tuple[str, ...]]


class Ngrams:
    """Counts of each distinct caption's n-grams: one entry per caption and n-gram, by caption.

    `lengths` [captions] in words; of each entry its caption, n-gram (numbered over all n), order (n - 1) and count;
    `starts` [captions + 1] says where a caption's entries begin.
    """

    def __init__(self, captions: Iterable[str]) -> None:
        self.number = {caption: number for number, caption in enumerate(dict.fromkeys(captions))}
        split = [caption.split() for caption in self.number]
        self.lengths = np.array([len(words) for words in split], np.int64)
        known: dict[str, int] = {}
        words = np.array([known.setdefault(word, len(known)) for caption in split for word in caption], np.int64)
        caption = np.repeat(np.arange(len(split)), self.lengths)
        left = np.repeat(np.cumsum(self.lengths), self.lengths) - np.arange(len(words))  # words to the caption's end
        entries, self.size, ngram = [], 0, words
        for order in range(ORDERS):
            at = np.flatnonzero(left > order)
            if order:
                _, numbers = np.unique(ngram[at] * len(known) + words[at + order], return_inverse=True)
                ngram = np.zeros(len(words), np.int64)
                ngram[at] = numbers
            of_order = int(ngram[at].max(initial=-1)) + 1
            keys, counts = np.unique(caption[at] * max(1, of_order) + ngram[at], return_counts=True)
            found, ngrams = np.divmod(keys, max(1, of_order))
            entries.append((found, ngrams + self.size, np.full(len(keys), order), counts))
            self.size += of_order
        columns = [np.concatenate(column) for column in zip(*entries, strict=True)]
        by_caption = np.argsort(columns[0], kind="stable")
        self.caption, self.ngram, self.order, self.count = (column[by_caption] for column in columns)
        self.starts = np.searchsorted(self.caption, np.arange(len(split) + 1))

    def entries(self, captions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The entries of each caption, one caption after another, and whose they are: an index into `captions`."""
        sizes = self.starts[captions + 1] - self.starts[captions]
        owner = np.repeat(np.arange(len(captions)), sizes)
        first = np.cumsum(sizes) - sizes
        return np.arange(len(owner)) - first[owner] + self.starts[captions][owner], owner


class Shared:
    """The n-grams that each pair's prediction shares with each of its references.

    Row r compares pair `pair[r]`'s prediction with one reference: `prediction[r]`, `reference[r]` are captions of
    `ngrams`. Of each shared n-gram: its row, its entries in the prediction and in the reference.
    """

    def __init__(self, ngrams: Ngrams, predictions: Mapping[str, str], references: Mapping[str, list[str]]) -> None:
        number = ngrams.number
        self.ngrams, self.pairs = ngrams, {pair: place for place, pair in enumerate(predictions)}
        self.predictions = np.array([number[text] for text in predictions.values()], np.int64)
        self.reference = np.array([number[text] for pair in predictions for text in references[pair]], np.int64)
        self.references = np.array([len(references[pair]) for pair in predictions], np.int64)
        self.pair = np.repeat(np.arange(len(self.pairs)), self.references)
        self.prediction = self.predictions[self.pair]
        of_prediction, row = ngrams.entries(self.prediction)
        keys = ngrams.caption * ngrams.size + ngrams.ngram  # ascending
        wanted = self.reference[row] * ngrams.size + ngrams.ngram[of_prediction]
        place = np.minimum(np.searchsorted(keys, wanted), max(0, len(keys) - 1))
        shared = keys[place] == wanted if len(keys) else np.zeros(0, bool)
        self.row, self.of_prediction, self.of_reference = row[shared], of_prediction[shared], place[shared]

    def places(self, pairs: Iterable[str]) -> np.ndarray:
        return np.array([self.pairs[pair] for pair in pairs], np.int64)


def sum_by_order(rows: np.ndarray, orders: np.ndarray, values: np.ndarray, size: int) -> np.ndarray:
    """Values added up by row and order: [size, ORDERS]."""
    cells = rows * ORDERS + orders
    return np.bincount(cells, values.astype(float), minlength=size * ORDERS).astype(float).reshape(-1, ORDERS)


@dataclass(frozen=True)
class Tokens:
    """Tokens joined by spaces, by pair id; `shuffled` of some or all pairs, None where there are none."""

    references: dict[str, list[str]]
    predictions: dict[str, str]
    shuffled: dict[str, str] | None

    @cached_property
    def shared(self) -> Shared:
        """The n-grams of all captions, counted once for every metric, and what predictions share with references."""
        references = chain.from_iterable(self.references.values())
        ngrams = Ngrams([*self.predictions.values(), *references, *(self.shuffled or {}).values()])
        return Shared(ngrams, self.predictions, self.references)

    def item(self, pair: str) -> Item:
        return self.predictions[pair], tuple(self.references[pair])


class Tools(NamedTuple):
    """Inputs of a metric beside the pairs of a protocol."""

    tokens: Tokens  # none where no metric needs Java
    answers: Mapping[Item, Any]  # what the metric's `program` gave
    parsed: Mapping[str, ParsedCaption]  # by pair id; only pairs whose references a grammar understands
    judge: Callable[[list[EvalPair]], Mapping[str, tuple[bool | None, str]]] | None = None  # id -> verdict, answer


class MetricScores(NamedTuple):
    """The result of `compute`. A score that is not there is null; `absent` says why, by the score's name."""

    groups: Mapping[str, Mapping[str, Value]]
    pairs: Mapping[str, Mapping[str, PairValue]]
    absent: Mapping[str, str] = {}


class Resampled(NamedTuple):
    """The way from a column of scores.parquet, summed over a set of pairs, to a score of that set."""

    column: str  # list<double>: a row of k statistics per pair
    score: Callable[[np.ndarray], np.ndarray]  # sums [..., k] -> score [...]; NaN where the set has none


@dataclass(frozen=True)
class Metric:
    """A metric. Every table of the report and every column of scores.parquet follows from these fields.

    `compute` and `program` raise ScorerFailed where they can give no score at all; that costs the other metrics
    nothing.
    """

    compute: Callable[[list[EvalPair], Groups, Tools], MetricScores]  # of one protocol's pairs
    headline: str  # the score that stands for the metric where there is room for one
    scores: tuple[str, ...]  # of every group of pairs, as papers print them divided by 100
    overall: tuple[str, ...] = ()  # of all pairs of a protocol together only
    columns: Mapping[str, str] = field(default_factory=dict)  # of scores.parquet: score of a pair -> Arrow type
    resampled: Mapping[str, Resampled] = field(default_factory=dict)  # score -> its statistics, for intervals
    lower_is_better: tuple[str, ...] = ()  # no score for the gate
    java: bool = True  # uses tokens or a Java program
    # runs once for the distinct items of all protocols, with SPICE's folder and seconds for each Java program
    program: Callable[[list[Item], Path | None, int], Mapping[Item, Any]] | None = None
    needs_grammar: bool = False  # reads captions: there is no score of a dataset without a grammar
    optional: bool = False  # left out of the page's tables where it is absent
    # what it is made of: tokens of any language, English ones, or something else than tokens
    reads: Literal["tokens", "English", "other"] = "other"


def of_each_group(groups: Groups, compute: Callable[[list[str]], T]) -> dict[str, T]:
    """Results of `compute` on the ids of every group that has pairs."""
    return {name: compute(ids) for name, ids in groups.items() if ids}


def mean_of(column: str) -> Resampled:
    """The mean over the pairs of a column of [value, 1], or of plain values."""
    return Resampled(column, ratio(0, 1))


def ratio(part: int, whole: int) -> Callable[[np.ndarray], np.ndarray]:
    """A sum over another; NaN where the other is 0."""

    def of(sums: np.ndarray) -> np.ndarray:
        wholes = sums[..., whole]
        return np.divide(sums[..., part], wholes, where=wholes != 0, out=np.full(wholes.shape, np.nan))

    return of


METRICS: Lazy[Metric] = Lazy(  # by the name that `evaluate.metrics` gives, in the order of the files and the page
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


def by_characters(metric: Metric) -> Metric:
    """The same metric of tokens that are characters: each of its scores and columns has a name that ends so."""

    def renamed(values: Mapping[str, T]) -> dict[str, T]:
        return {f"{name}{BY_CHARACTERS}": value for name, value in values.items()}

    def compute(pairs: list[EvalPair], groups: Groups, tools: Tools) -> MetricScores:
        scores = metric.compute(pairs, groups, tools)
        of_groups = {group: renamed(values) for group, values in scores.groups.items()}
        of_pairs = {pair: renamed(values) for pair, values in scores.pairs.items()}
        return MetricScores(of_groups, of_pairs, renamed(scores.absent))

    resampled = {name: of._replace(column=f"{of.column}{BY_CHARACTERS}") for name, of in metric.resampled.items()}
    return replace(
        metric,
        compute=compute,
        headline=f"{metric.headline}{BY_CHARACTERS}",
        scores=tuple(f"{name}{BY_CHARACTERS}" for name in metric.scores),
        overall=tuple(f"{name}{BY_CHARACTERS}" for name in metric.overall),
        columns=renamed(metric.columns),
        resampled=renamed(resampled),
        lower_is_better=tuple(f"{name}{BY_CHARACTERS}" for name in metric.lower_is_better),
    )


def with_characters(metrics: Mapping[str, Metric]) -> dict[str, Metric]:
    """These metrics, and after each that reads tokens of any language the one of characters."""
    chosen = {}
    for name, metric in metrics.items():
        chosen[name] = metric
        if metric.reads == "tokens":
            chosen[f"{name}{BY_CHARACTERS}"] = by_characters(metric)
    return chosen


def choose_metrics(names: Iterable[str]) -> dict[str, Metric]:
    """The named metrics, in the order of METRICS."""
    wanted = set(names)
    assert wanted <= METRICS.keys(), f"unknown metrics {sorted(wanted - METRICS.keys())}; known: {', '.join(METRICS)}"
    return {name: METRICS[name] for name in METRICS if name in wanted}


def needs_java(metrics: Mapping[str, Metric]) -> bool:
    return any(metric.java for metric in metrics.values())


def gate_metrics(chosen: Iterable[str] | None = None) -> list[str]:
    """Scores that may stand in `promote.metric` where `evaluate.metrics` is `chosen` (None: all of METRICS).

    The gate takes the greater score for the better one, and compares two models pair by pair.
    """
    return [
        score
        for metric in with_characters(choose_metrics(METRICS if chosen is None else chosen)).values()
        for score in metric.scores + metric.overall
        if score in metric.resampled and score not in metric.lower_is_better
    ]
