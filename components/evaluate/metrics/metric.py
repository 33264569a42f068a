"""What a metric is: the type of the entries of METRICS, what they are computed from and what they give."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeVar

from components.evaluate.grammar import ParsedCaption
from components.evaluate.metrics.scorer import Scorer
from components.evaluate.pairs import EvalPair

T = TypeVar("T")

ALL = "all"
"""The group of all pairs; its scores stand at the top level of metrics.json."""

Groups = dict[str, list[str]]
"""Name of a group -> ids of its pairs: `ALL`, "change", "by_type/color", "by_dataset/minichange", ..."""
Value = int | float | None
PairValue = float | str | bool | None


class Tokens(NamedTuple):
    """PTB tokens joined by spaces, by pair id; `shuffled` of some or all pairs, None where there are none."""

    references: dict[str, list[str]]
    predictions: dict[str, str]
    shuffled: dict[str, str] | None


@dataclass(frozen=True)
class Tools:
    """What a metric may use beside the pairs."""

    tokens: Callable[[], Tokens]  # waits for the tokenizer, which runs once for all metrics
    start: Callable[[str], Scorer]  # a worker process by name; killed when the metrics are done
    parsed: Mapping[str, ParsedCaption]  # by pair id; only pairs whose references a grammar understands
    spice_dir: Path | None


@dataclass(frozen=True)
class MetricScores:
    """What `compute` gives. A score that is not there is null; `absent` says why, by the score's name."""

    groups: Mapping[str, Mapping[str, Value]]
    pairs: Mapping[str, Mapping[str, PairValue]]
    absent: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Metric:
    """One metric. Every table of the report and every column of scores.parquet follows from these fields.

    `compute` raises ScorerFailed where it can give no score at all; that costs the other metrics nothing.
    """

    compute: Callable[[list[EvalPair], Groups, Tools], MetricScores]
    headline: str  # the score that stands for the metric where there is room for one
    scores: tuple[str, ...]  # of every group of pairs, as papers print them divided by 100
    overall: tuple[str, ...] = ()  # of all pairs together only
    columns: Mapping[str, str] = field(default_factory=dict)  # of scores.parquet: score of a pair -> Arrow type
    lower_is_better: tuple[str, ...] = ()  # no score for the gate
    java: bool = True  # uses tokens or a Java program
    beside: bool = False  # waits for a process of its own, while the others compute
    optional: bool = False  # left out of the page's tables where it is absent


def of_each_group(groups: Groups, compute: Callable[[list[str]], T]) -> dict[str, T]:
    """What `compute` makes of the ids of every group that has pairs."""
    return {name: compute(ids) for name, ids in groups.items() if ids}
