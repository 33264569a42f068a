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
from collections.abc import Callable, Iterator

import numpy as np

from m3diff.scoring.metrics import Metric, MetricInputs, MetricScores, PairValue, Resampled, Value, divide_sums
from m3diff.scoring.metrics.sums import f1_of_sums, score_groups_by_sums
from m3diff.scoring.pairs import EvalPair, Groups

OBJECTS = ("roads", "buildings")
LIST_OF_OBJECT = {name: re.compile(rf"\b{name[:-1]}s?\b[^\[\]]*\[([^\]]*)\]", re.IGNORECASE) for name in OBJECTS}
CELL = re.compile(r"\b(?:top|center|bottom)-(?:left|center|right)\b", re.IGNORECASE)
# Numbers of a question in the columns `roads_cells` and `buildings_cells` of scores.parquet
NUMBERS = ("answers", "common", "predicted", "true", "jaccard", "exact", "unreadable")
NO_LIST = "no reference has lists of cells for roads and buildings"


def compute(pairs: list[EvalPair], groups: Groups, inputs: MetricInputs) -> MetricScores:
    """Score the questions whose first reference has a list of cells for each object."""
    del inputs
    rows_by_object: dict[str, dict[str, list[float]]] = {name: {} for name in OBJECTS}
    for pair in pairs:
        true_cells = {name: read_cells(pair.references[0], name) for name in OBJECTS}
        if None in true_cells.values():
            continue
        for name, cells in true_cells.items():
            rows_by_object[name][pair.id] = count_cells(read_cells(pair.prediction, name), cells or frozenset())
    scores: dict[str, dict[str, Value]] = {group: {} for group in groups}
    values: dict[str, dict[str, PairValue]] = {}
    for name, rows in rows_by_object.items():
        for group, group_scores in score_groups_by_sums(groups, rows, RESAMPLED_BY_OBJECT[name], len(NUMBERS)).items():
            scores[group].update(group_scores)
        for pair_id, row in rows.items():
            values.setdefault(pair_id, {})[f"{name}_cells"] = row
    return MetricScores(scores, values, {} if values else {METRIC.main_score: NO_LIST})


def read_cells(text: str, name: str) -> frozenset[str] | None:
    """Return the cells in the first list behind the name of an object. None without a list, or if it has other text.

    Args:
        name: "roads" or "buildings".
    """
    match = LIST_OF_OBJECT[name].search(text)
    if match is None:
        return None
    cells = frozenset(cell[0].lower() for cell in CELL.finditer(match[1]))
    has_other_text = re.search(r"\w", match[1]) is not None and not cells
    return None if has_other_text else cells


def count_cells(predicted: frozenset[str] | None, true_cells: frozenset[str]) -> list[float]:
    """Return the numbers of an answer in the order of NUMBERS.

    Args:
        predicted: the predicted cells. None for an answer without a list.
    """
    cells = predicted or frozenset()
    common = len(cells & true_cells)
    either = len(cells | true_cells)
    return [
        1.0,
        float(common),
        float(len(cells)),
        float(len(true_cells)),
        common / either if either else 0.0,
        float(cells == true_cells),
        float(predicted is None),
    ]


def resampled_of_object(name: str) -> Iterator[tuple[str, Resampled]]:
    """Yield each score of an object with how to compute it from the sums of its numbers."""
    column = f"{name}_cells"
    yield f"{name}_precision", Resampled(column, share("common", "predicted"))
    yield f"{name}_recall", Resampled(column, share("common", "true"))
    yield f"{name}_f1", Resampled(column, f1_of_sums(*map(NUMBERS.index, ("common", "predicted", "true"))))
    yield f"{name}_jaccard", Resampled(column, share("jaccard", "answers"))
    yield f"{name}_exact", Resampled(column, share("exact", "answers"))
    yield f"{name}_unreadable_cells", Resampled(column, share("unreadable", "answers"))


def share(part: str, total: str) -> Callable[[np.ndarray], np.ndarray]:
    """Return how to divide the sum of a number by the sum of another."""
    return divide_sums(NUMBERS.index(part), NUMBERS.index(total))


RESAMPLED_BY_OBJECT = {name: dict(resampled_of_object(name)) for name in OBJECTS}
RESAMPLED = RESAMPLED_BY_OBJECT["roads"] | RESAMPLED_BY_OBJECT["buildings"]
METRIC = Metric(
    compute,
    main_score="buildings_f1",
    scores=tuple(RESAMPLED),
    columns={f"{name}_cells": "list<double>" for name in OBJECTS},
    resampled=RESAMPLED,
    lower_is_better=tuple(f"{name}_unreadable_cells" for name in OBJECTS),
    java=False,
    records="questions",
    protocol_only=True,
)
