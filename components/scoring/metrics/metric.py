"""What a metric is: the type of the entries of METRICS, what they are computed from and what they give."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from m3diff.scoring.grammar import ParsedCaption
from m3diff.scoring.metrics.ngrams import Ngrams, Shared
from m3diff.scoring.metrics.scorer import Scorer
from m3diff.scoring.metrics.verdicts import Judge
from m3diff.scoring.pairs import EvalPair

T = TypeVar("T")

ALL = "all"
"""The group of all pairs of a protocol."""

Groups = dict[str, list[str]]
"""Name of a group -> ids of its pairs: `ALL`, "change", "by_type/color", ..."""
Value = int | float | None
PairValue = float | str | bool | list[float] | None

Item = tuple[str, tuple[str, ...]]
"""Tokens of a prediction and of its references: all that a caption metric knows of a pair."""


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


@dataclass(frozen=True)
class Program:
    """What a metric's program in a process of its own is started with."""

    start: Callable[[str, float], Scorer]  # a worker by name, with more seconds; killed when the metrics are done
    items: Callable[[], list[Item]]  # the distinct ones of every protocol; waits for the tokenizer
    spice_dir: Path | None


@dataclass(frozen=True)
class Tools:
    """What a metric may use beside the pairs of a protocol."""

    tokens: Callable[[], Tokens]  # waits for the tokenizer, which runs once for all metrics and protocols
    answers: Callable[[], Mapping[Item, Any]]  # what the metric's `program` gave; raises ScorerFailed where it failed
    parsed: Mapping[str, ParsedCaption]  # by pair id; only pairs whose references a grammar understands
    judge: Judge | None = None


@dataclass(frozen=True)
class MetricScores:
    """What `compute` gives. A score that is not there is null; `absent` says why, by the score's name."""

    groups: Mapping[str, Mapping[str, Value]]
    pairs: Mapping[str, Mapping[str, PairValue]]
    absent: Mapping[str, str] = field(default_factory=dict)


class Resampled(NamedTuple):
    """How a score of any set of pairs follows from a column of scores.parquet, summed over the set."""

    column: str  # list<double>: a row of k statistics per pair
    score: Callable[[np.ndarray], np.ndarray]  # sums [..., k] -> score [...]; NaN where the set has none


@dataclass(frozen=True)
class Metric:
    """One metric. Every table of the report and every column of scores.parquet follows from these fields.

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
    program: Callable[[Program], Mapping[Item, Any]] | None = None  # runs once for all protocols, beside the others
    needs_grammar: bool = False  # reads captions: there is no score of a dataset without a grammar
    optional: bool = False  # left out of the page's tables where it is absent


def of_each_group(groups: Groups, compute: Callable[[list[str]], T]) -> dict[str, T]:
    """What `compute` makes of the ids of every group that has pairs."""
    return {name: compute(ids) for name, ids in groups.items() if ids}


def mean_of(column: str) -> Resampled:
    """The mean over the pairs of a column of [value, 1], or of plain values."""
    return Resampled(column, ratio(0, 1))


def ratio(part: int, whole: int) -> Callable[[np.ndarray], np.ndarray]:
    """One sum over another; NaN where the other is 0."""

    def of(sums: np.ndarray) -> np.ndarray:
        wholes = sums[..., whole]
        return np.divide(sums[..., part], wholes, where=wholes != 0, out=np.full(wholes.shape, np.nan))

    return of
