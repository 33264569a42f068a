"""The files of a run's scores: metrics.json, headline.json and scores.parquet.

metrics.json contains the scores by protocol and group of pairs. headline.json contains the few scores that are used to
compare runs. scores.parquet contains one row per protocol and pair.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import pyarrow as pa
from pydantic import BaseModel, ConfigDict, model_serializer

from m3diff.records.files import StageReport
from m3diff.scoring.bootstrap import Interval
from m3diff.scoring.metrics import HEADLINE_SCORES, Metric, MetricScores
from m3diff.scoring.pairs import ALL_PAIRS
from m3diff.scoring.protocols import ProtocolPairs

Scores = dict[str, int | float | None]
# Folders in the names of groups. In metrics.json, a group "<folder>/<name>" is the object <name> in the object <folder>
FOLDERS = ("by_type", "by_changes", "by_length")
KINDS = "by_kind"  # folder of the kinds of questions, which metrics.json has only if a kind is known


class ProtocolScores(BaseModel):
    """Scores of one dataset under one protocol, on the scale of pycocoevalcap. Papers print them times 100.

    In metrics.json, the scores over all pairs are next to the objects that hold the scores of groups. An absent score
    is null.
    """

    model_config = ConfigDict(frozen=True)

    pairs: int
    published_pairs: int | None
    """Number of pairs that papers score, or None if it is not known."""
    scores: Scores
    intervals: dict[str, Interval]
    """Intervals by score."""
    groups: dict[str, Scores]
    """Scores by group, including the numbers of `pairs` and `changes`."""
    absent: dict[str, str]
    """Absent scores, with the reason why each one is null."""
    kind_intervals: dict[str, dict[str, Interval]] = {}
    """Intervals of the scores of answers, by kind of question and score."""

    @model_serializer
    def as_file(self) -> dict[str, Any]:
        """Return the scores in the nested form that is written to metrics.json."""
        content: dict[str, Any] = {"pairs": self.pairs, "published_pairs": self.published_pairs}
        content |= self.scores
        content["intervals"] = {score: interval.model_dump() for score, interval in self.intervals.items()}
        content |= {name: scores for name, scores in self.groups.items() if "/" not in name}
        content |= {folder: self.groups_in_folder(folder) for folder in FOLDERS}
        kinds: dict[str, dict[str, Any]] = {}
        for kind, scores in self.groups_in_folder(KINDS).items():
            intervals = self.kind_intervals.get(kind, {})
            kinds[kind] = scores | {"intervals": {name: interval.model_dump() for name, interval in intervals.items()}}
        if kinds:
            content[KINDS] = kinds
        content["absent"] = self.absent
        return content

    def groups_in_folder(self, folder: str) -> dict[str, Scores]:
        """Return the scores of all groups named "<folder>/<name>", by <name>."""
        prefix = f"{folder}/"
        return {name.removeprefix(prefix): scores for name, scores in self.groups.items() if name.startswith(prefix)}

    @property
    def is_partial(self) -> bool:
        """Whether this run scores fewer pairs than papers do."""
        return self.published_pairs is not None and self.pairs < self.published_pairs


class ModelAndBaseScore(BaseModel):
    """A score of the model and of its base, on the scale of pycocoevalcap.

    Attributes:
        interval: interval of the change. None if there are too few records, or the score has no statistics per record.
    """

    model_config = ConfigDict(frozen=True)

    model: float
    base: float
    interval: Interval | None = None

    @property
    def change(self) -> float:
        """The model's score minus the base's."""
        return self.model - self.base

    @model_serializer
    def as_file(self) -> dict[str, float | None]:
        """Return the form that is written to metrics.json."""
        interval = self.interval
        return {
            "model": self.model,
            "base": self.base,
            "change": self.change,
            "low": None if interval is None else interval.low,
            "high": None if interval is None else interval.high,
        }


class RetentionScores(BaseModel):
    """The scores of one protocol of a retention dataset. Scores that only one of the two models has are left out.

    Attributes:
        records: number of records.
        scores: scores over all records.
        records_by_kind: number of records by kind of question. Empty if no kind is known.
        by_kind: scores by kind of question.
    """

    model_config = ConfigDict(frozen=True)

    records: int
    scores: dict[str, ModelAndBaseScore]
    records_by_kind: dict[str, int] = {}
    by_kind: dict[str, dict[str, ModelAndBaseScore]] = {}

    @model_serializer
    def as_file(self) -> dict[str, object]:
        """Return the nested form that is written to metrics.json, in which scores and kinds are next to each other."""
        content: dict[str, object] = {"records": self.records}
        content |= {name: score.as_file() for name, score in self.scores.items()}
        kinds: dict[str, dict[str, object]] = {}
        for kind, scores in self.by_kind.items():
            kinds[kind] = {"records": self.records_by_kind[kind]}
            kinds[kind] |= {name: score.as_file() for name, score in scores.items()}
        return content | ({KINDS: kinds} if kinds else {})


class EvaluateReport(StageReport):
    """Content of metrics.json. `rows_in` is the number of test pairs, `rows_out` the number of scored pairs."""

    protocols: dict[str, ProtocolScores]
    """Scores by "<dataset>/<protocol>"."""
    retention: dict[str, RetentionScores] = {}
    """Scores of the model and its base by "<dataset>/<protocol>", for datasets with the role `retention`."""


def summarise(
    test_pairs: int,
    captioned_pairs: int,
    protocols: Iterable[ProtocolPairs],
    scores: Mapping[str, MetricScores],
    intervals: Mapping[str, Mapping[str, Interval]],
    kind_intervals: Mapping[str, Mapping[str, Mapping[str, Interval]]] | None = None,
    retention: Mapping[str, RetentionScores] | None = None,
) -> EvaluateReport:
    """Combine all scores into the report that is written to metrics.json.

    Args:
        scores, intervals: scores and intervals by protocol.
        kind_intervals: intervals by protocol, kind of question and score. None if there are none.
        retention: scores of the model and its base by protocol. None without datasets with the role `retention`.
    """
    protocol_scores = {}
    for protocol in protocols:
        group_scores = scores[protocol.name].groups
        groups = {
            group: {"pairs": len(ids), **group_scores[group]}
            for group, ids in protocol.groups.items()
            if group != ALL_PAIRS
        }
        protocol_scores[protocol.name] = ProtocolScores(
            pairs=len(protocol.pairs),
            published_pairs=protocol.rules.published_pairs,
            scores=dict(group_scores[ALL_PAIRS]),
            intervals=dict(intervals.get(protocol.name, {})),
            groups=groups,
            absent=dict(scores[protocol.name].absent),
            kind_intervals={
                kind: dict(kind_scores) for kind, kind_scores in (kind_intervals or {}).get(protocol.name, {}).items()
            },
        )
    return EvaluateReport(
        stage="evaluate",
        rows_in=test_pairs,
        rows_out=captioned_pairs,
        protocols=protocol_scores,
        retention=dict(retention or {}),
    )


def headline_scores(report: EvaluateReport) -> dict[str, dict[str, float]]:
    """Return the scores for comparing runs, times 100, by the first protocol of each dataset.

    They are written to headline.json, which `dvc metrics diff` and `dvc exp show` display.
    """
    protocol_by_dataset: dict[str, str] = {}
    for protocol in report.protocols:
        dataset = protocol.partition("/")[0]
        protocol_by_dataset.setdefault(dataset, protocol)
    scores_by_protocol = {}
    for protocol in protocol_by_dataset.values():
        values = report.protocols[protocol].scores
        scores = {name: values.get(name) for name in HEADLINE_SCORES}
        scores_by_protocol[protocol] = {
            name: round(100 * value, 2) for name, value in scores.items() if value is not None
        }
    return scores_by_protocol


def score_table(
    metrics: Mapping[str, Metric], protocols: Iterable[ProtocolPairs], scores: Mapping[str, MetricScores]
) -> pa.Table:
    """Return the table for scores.parquet, with one row per protocol and pair in the order of the records.

    A row contains the prediction in the form in which the protocol scored it, and the pair's scores. The question and
    its kind are null for a caption.
    """
    columns = {
        "protocol": "string",
        "id": "string",
        "dataset": "string",
        "question": "string",
        "kind": "string",
        "change_types": "list<string>",
        "prediction": "string",
    }
    for metric in metrics.values():
        columns |= metric.columns
    rows = []
    for protocol in protocols:
        for pair in protocol.pairs:
            row: dict[str, Any] = {
                "protocol": protocol.name,
                "id": pair.id,
                "dataset": pair.dataset,
                "question": pair.question,
                "kind": pair.kind,
                "change_types": pair.change_types,
                "prediction": pair.prediction,
            }
            rows.append(row | dict(scores[protocol.name].pairs[pair.id]))
    schema = pa.schema([(name, arrow_type(type_name)) for name, type_name in columns.items()])
    return pa.Table.from_pylist(rows, schema=schema)


def arrow_type(name: str) -> pa.DataType:
    """Return the Arrow type for a name such as `double` or `list<double>`. pyarrow cannot parse names of list types."""
    if name.startswith("list<"):
        return pa.list_(pa.type_for_alias(name.removeprefix("list<").removesuffix(">")))
    return pa.type_for_alias(name)
