"""metrics.json: what evaluate measured, by group of pairs."""

from typing import Any

from pydantic import model_serializer

from components.evaluate.metrics.metric import ALL, Groups, MetricScores, Value
from components.reports import StageReport

FOLDERS = ("by_type", "by_dataset")
"""Groups called "<folder>/<name>" stand in the file as an object of objects."""


class EvaluateReport(StageReport):
    """metrics.json. rows_in: test pairs; rows_out: pairs captioned and scored.

    Scores are as pycocoevalcap gives them; papers print them times 100. In the file those of all pairs stand at the
    top level, beside an object for each group. None is absent.
    """

    scores: dict[str, Value]  # of all pairs; `pairs`, `changes`: how many
    groups: dict[str, dict[str, Value]]
    absent: dict[str, str]  # score -> why it is null

    @model_serializer
    def as_file(self) -> dict[str, Any]:
        head = {"stage": self.stage, "rows_in": self.rows_in, "rows_out": self.rows_out}
        folders: dict[str, Any] = {folder: self.folder(folder) for folder in FOLDERS}
        plain = {name: values for name, values in self.groups.items() if "/" not in name}
        return {**head, **self.scores, **plain, **folders, "absent": self.absent}

    def folder(self, folder: str) -> dict[str, dict[str, Value]]:
        """The groups called "<folder>/<name>", by name."""
        start = f"{folder}/"
        return {name.removeprefix(start): values for name, values in self.groups.items() if name.startswith(start)}


def summarise(test_pairs: int, groups: Groups, scores: MetricScores) -> EvaluateReport:
    """Everything that is measured, in the shape of metrics.json."""
    captioned = len(scores.pairs)
    return EvaluateReport(
        stage="evaluate",
        rows_in=test_pairs,
        rows_out=captioned,
        scores={"pairs": captioned, **scores.groups[ALL]},
        groups={group: {"pairs": len(ids), **scores.groups[group]} for group, ids in groups.items()},
        absent=dict(scores.absent),
    )
