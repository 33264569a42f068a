"""Compute scores of groups of records from statistics that are summed over the records of a group."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from typing import Any

import numpy as np

from m3diff.scoring.metrics import PairValue, Resampled, Value, divide_sums
from m3diff.scoring.pairs import EvalPair, Groups

Rows = Mapping[str, Sequence[float]]  # id of a record -> its statistics


@dataclass(frozen=True)
class StatisticsColumn:
    """A column of scores.parquet with the statistics of a record, in the order of the fields of a dataclass.

    Attributes:
        name: name of the column.
        statistics: the dataclass. Its fields are numbers, and are summed over records.
    """

    name: str
    statistics: type[Any]

    @property
    def fields(self) -> list[str]:
        """Names of the statistics."""
        return [field.name for field in fields(self.statistics)]

    def rows(self, pairs: Iterable[EvalPair], count: Callable[[EvalPair], Any]) -> dict[str, list[float]]:
        """Return the statistics by record, without the records for which `count` returns None."""
        rows = {}
        for pair in pairs:
            statistics = count(pair)
            if statistics is not None:
                rows[pair.id] = [float(number) for number in astuple(statistics)]
        return rows

    def values(self, rows: Rows) -> dict[str, dict[str, PairValue]]:
        """Return the column's values as `MetricScores.pairs` has them."""
        return {pair_id: {self.name: [*row]} for pair_id, row in rows.items()}

    def score_groups(
        self, groups: Groups, rows: Rows, resampled: Mapping[str, Resampled]
    ) -> dict[str, dict[str, Value]]:
        """Return the scores of each group. Records without statistics do not count.

        Args:
            resampled: score -> how to compute it from the sums.
        """
        return {
            group: self.score([rows[pair_id] for pair_id in ids if pair_id in rows], resampled)
            for group, ids in groups.items()
        }

    def score(self, rows: Sequence[Sequence[float]], resampled: Mapping[str, Resampled]) -> dict[str, Value]:
        """Return the scores of the records with these statistics. The value of an undefined score is None."""
        sums = np.sum(np.asarray(rows, dtype=np.float64).reshape(-1, len(self.fields)), axis=0)
        values = {name: float(score.score(sums)) for name, score in resampled.items()}
        return {name: None if np.isnan(value) else value for name, value in values.items()}

    def share(self, part: str, total: str) -> Resampled:
        """Return how to divide the sum of a statistic by the sum of another."""
        return Resampled(self.name, divide_sums(self.fields.index(part), self.fields.index(total)))

    def f1(self, common: str, predicted: str, true: str) -> Resampled:
        """Return how to compute F1. It is NaN if nothing is predicted and nothing is true.

        Args:
            common, predicted, true: the statistics with the numbers of predictions that are right, of predictions, and
                of true values.
        """
        columns = [self.fields.index(name) for name in (common, predicted, true)]

        def score(sums: np.ndarray) -> np.ndarray:
            right, claims, truths = np.moveaxis(sums[..., columns], -1, 0)
            return divide_sums(0, 1)(np.stack([2 * right, claims + truths], axis=-1))

        return Resampled(self.name, score)
