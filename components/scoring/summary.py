"""What evaluate measured: metrics.json, all of it by protocol and group of pairs; headline.json, the few to compare."""

from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, model_serializer

from m3diff.records.files import StageReport
from m3diff.scoring.metrics.metric import ALL, MetricScores, Value
from m3diff.scoring.protocols import ProtocolPairs

FOLDERS = ("by_type", "by_changes", "by_length")
"""Groups called "<folder>/<name>" stand in the file as an object of objects."""


HEADLINE = (
    "BLEU-4",
    "METEOR",
    "ROUGE-L",
    "CIDEr",
    "SPICE",
    "change_type_accuracy",
    "change_place_accuracy",
    "change_exact_accuracy",
    "multi_change_exact_f1",
    "no_change_recall",
    "false_no_change",
    "reversal",
    "CIDEr_shuffled",
    "pixel_window_auc",
)
"""The scores that runs are compared by, in the order in which they are shown."""


class Interval(BaseModel):
    """Bounds within which a score lies, by the bootstrap over pairs."""

    model_config = ConfigDict(frozen=True)

    low: float
    high: float


class ProtocolScores(BaseModel):
    """The scores of one dataset under one protocol.

    Scores are as pycocoevalcap gives them; papers print them times 100. In the file those of all the protocol's pairs
    stand first, beside an object for each group. None is absent.
    """

    model_config = ConfigDict(frozen=True)

    pairs: int
    published_pairs: int | None  # that papers score
    scores: dict[str, Value]
    intervals: dict[str, Interval]  # by score
    groups: dict[str, dict[str, Value]]  # `pairs`, `changes`: how many
    absent: dict[str, str]  # score -> why it is null

    @model_serializer
    def as_file(self) -> dict[str, Any]:
        head = {"pairs": self.pairs, "published_pairs": self.published_pairs}
        intervals = {score: interval.model_dump() for score, interval in self.intervals.items()}
        folders: dict[str, Any] = {folder: self.folder(folder) for folder in FOLDERS}
        plain = {name: values for name, values in self.groups.items() if "/" not in name}
        return {**head, **self.scores, "intervals": intervals, **plain, **folders, "absent": self.absent}

    def folder(self, folder: str) -> dict[str, dict[str, Value]]:
        """The groups called "<folder>/<name>", by name."""
        start = f"{folder}/"
        return {name.removeprefix(start): values for name, values in self.groups.items() if name.startswith(start)}

    @property
    def is_partial(self) -> bool:
        """Whether papers score more pairs."""
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
    return EvaluateReport(
        stage="evaluate",
        rows_in=test_pairs,
        rows_out=captioned,
        protocols={one.name: _scores_of(one, scores[one.name], intervals.get(one.name, {})) for one in protocols},
    )


def _scores_of(one: ProtocolPairs, scores: MetricScores, intervals: Mapping[str, Interval]) -> ProtocolScores:
    return ProtocolScores(
        pairs=len(one.pairs),
        published_pairs=one.protocol.n,
        scores=dict(scores.groups[ALL]),
        intervals=dict(intervals),
        groups={
            group: {"pairs": len(ids), **scores.groups[group]} for group, ids in one.groups.items() if group != ALL
        },
        absent=dict(scores.absent),
    )


def headline(report: EvaluateReport) -> dict[str, dict[str, float]]:
    """Of each dataset's first protocol the scores of HEADLINE that it has, times 100: what `dvc metrics diff` and
    `dvc exp show` list."""
    first: dict[str, str] = {}
    for name in report.protocols:
        first.setdefault(name.partition("/")[0], name)
    scores = {name: report.protocols[name].scores for name in first.values()}
    return {
        protocol: {name: round(100 * value, 2) for name in HEADLINE if (value := found.get(name)) is not None}
        for protocol, found in scores.items()
    }
