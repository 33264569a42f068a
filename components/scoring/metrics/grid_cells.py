"""Score the cells of a 3x3 grid in which an answer places changed roads and buildings, as DeltaVLM does.

An answer has a list of cells for each object: "roads ['top-left'] buildings []". A cell is named by its row (top,
center, bottom) and its column (left, center, right). Each object has these scores:

precision, recall, f1: over all cells of all questions together. A score that would divide by 0 is absent.
jaccard: the mean over questions of the cells that both lists have, divided by those that either has. Two empty lists
    count as 0, because scikit-learn's `jaccard_score(average="samples")` returns 0 for them, and the authors print its
    result. If half of the pairs have no change, even a perfect model has at most 50.
exact: the share of questions whose two lists have the same cells. Two empty lists count as right.
unreadable_cells: the share of answers without a list. Such an answer counts as an empty list.

A question whose first reference lacks a list is not scored.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from m3diff.scoring.metrics import Metric, MetricInputs, MetricScores, PairValue, Resampled, Value
from m3diff.scoring.metrics.sums import StatisticsColumn
from m3diff.scoring.pairs import EvalPair, Groups

OBJECTS = ("roads", "buildings")
# Between the name of an object and its list, there is no other name: that list would belong to the other object
TEXT_BEFORE_LIST = r"(?:(?!\b(?:road|building)s?\b)[^\[\]])*"
LIST_OF_OBJECT = {
    name: re.compile(rf"\b{name[:-1]}s?\b{TEXT_BEFORE_LIST}\[([^\]]*)\]", re.IGNORECASE) for name in OBJECTS
}
CELL = re.compile(r"\b(?:top|center|bottom)-(?:left|center|right)\b", re.IGNORECASE)
NO_LIST = "no reference has lists of cells for roads and buildings"


@dataclass(frozen=True)
class CellCounts:
    """The numbers of an answer about one object.

    Attributes:
        answers: always 1.
        common: number of cells that both lists have.
        predicted: number of predicted cells.
        true: number of true cells.
        jaccard: Jaccard index of the two lists.
        exact: 1 if both lists have the same cells.
        unreadable: 1 for an answer without a list.
    """

    answers: int
    common: int
    predicted: int
    true: int
    jaccard: float
    exact: int
    unreadable: int


COLUMN_OF_OBJECT = {name: StatisticsColumn(f"{name}_cells", CellCounts) for name in OBJECTS}


def compute(pairs: list[EvalPair], groups: Groups, inputs: MetricInputs) -> MetricScores:
    """Score the questions whose first reference has a list of cells for each object."""
    del inputs
    readable_pairs = [pair for pair in pairs if has_lists(pair.references[0])]
    scores: dict[str, dict[str, Value]] = {group: {} for group in groups}
    values: dict[str, dict[str, PairValue]] = {pair.id: {} for pair in readable_pairs}
    for name, column in COLUMN_OF_OBJECT.items():
        rows = column.rows(readable_pairs, partial(count_cells, name))
        for group, group_scores in column.score_groups(groups, rows, RESAMPLED_BY_OBJECT[name]).items():
            scores[group].update(group_scores)
        for pair_id, pair_values in column.values(rows).items():
            values[pair_id].update(pair_values)
    return MetricScores(scores, values, {} if values else {METRIC.main_score: NO_LIST})


def has_lists(text: str) -> bool:
    """Return whether a text has a list of cells for each object."""
    return all(read_cells(text, name) is not None for name in OBJECTS)


def read_cells(text: str, name: str) -> frozenset[str] | None:
    """Return the cells in the list behind the name of an object. None without a list, or if it has other text.

    Args:
        name: "roads" or "buildings".
    """
    match = LIST_OF_OBJECT[name].search(text)
    if match is None:
        return None
    cells = frozenset(cell[0].lower() for cell in CELL.finditer(match[1]))
    has_other_text = re.search(r"\w", match[1]) is not None and not cells
    return None if has_other_text else cells


def count_cells(name: str, pair: EvalPair) -> CellCounts:
    """Return the numbers of an answer about one object."""
    true_cells = read_cells(pair.references[0], name) or frozenset()
    predicted_cells = read_cells(pair.prediction, name)
    cells = predicted_cells or frozenset()
    either = len(cells | true_cells)
    return CellCounts(
        answers=1,
        common=len(cells & true_cells),
        predicted=len(cells),
        true=len(true_cells),
        jaccard=len(cells & true_cells) / either if either else 0.0,
        exact=int(cells == true_cells),
        unreadable=int(predicted_cells is None),
    )


def resampled_of_object(name: str) -> Iterator[tuple[str, Resampled]]:
    """Yield each score of an object with how to compute it from the sums of its numbers."""
    column = COLUMN_OF_OBJECT[name]
    yield f"{name}_precision", column.share("common", "predicted")
    yield f"{name}_recall", column.share("common", "true")
    yield f"{name}_f1", column.f1("common", "predicted", "true")
    yield f"{name}_jaccard", column.share("jaccard", "answers")
    yield f"{name}_exact", column.share("exact", "answers")
    yield f"{name}_unreadable_cells", column.share("unreadable", "answers")


RESAMPLED_BY_OBJECT = {name: dict(resampled_of_object(name)) for name in OBJECTS}
RESAMPLED = RESAMPLED_BY_OBJECT["roads"] | RESAMPLED_BY_OBJECT["buildings"]
METRIC = Metric(
    compute,
    main_score="buildings_f1",
    scores=tuple(RESAMPLED),
    columns={column.name: "list<double>" for column in COLUMN_OF_OBJECT.values()},
    resampled=RESAMPLED,
    lower_is_better=tuple(f"{name}_unreadable_cells" for name in OBJECTS),
    java=False,
    records="questions",
    protocol_only=True,
)
