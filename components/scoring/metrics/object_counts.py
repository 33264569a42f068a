"""Score the numbers of changed roads and buildings in answers: mean absolute and root mean squared error.

DeltaVLM computes both errors over all test questions, for roads and for buildings. Its program splits an answer at the
word "new", takes the first number or "no" of each part, and stops at any other wording. Here, the number of an object
is the first one before its name: "There are 2 new roads and no new buildings", "one villa was built". An object that is
not named has changed 0 times, and so has an object without a number if the answer says that something did not change.

If no number can be read from an answer, it counts as 0, and `unreadable_counts` is the share of such answers. A
question whose first reference cannot be read is not scored. All tables show the errors times 100, like other scores.
"""

import re
from dataclasses import dataclass

import numpy as np

from m3diff.scoring.metrics import Metric, MetricInputs, MetricScores, Resampled
from m3diff.scoring.metrics.answers import NUMBER_WORDS, read_bare_number
from m3diff.scoring.metrics.sums import StatisticsColumn
from m3diff.scoring.pairs import EvalPair, Groups

NAME_OF_OBJECT = {
    "roads": r"(?:road|lane|street|path)s?",
    "buildings": r"(?:building|house|villa|home|residence)s?",
}
ANY_NAME = "|".join(NAME_OF_OBJECT.values())
NUMBER = rf"(?P<number>\d{{1,3}}(?:,\d{{3}})+|\d+|no|an?|(?:{'|'.join(NUMBER_WORDS)})(?:-[a-z]+)?)"
# A number, up to three words such as adjectives, and the name of an object
OTHER_WORD = rf"and|or|nor|but|of|in|on|at|to|by|near|along|with|from|for|{ANY_NAME}"
WORD_BETWEEN = rf"(?:\s+(?!(?:{OTHER_WORD})\b)[a-z-]+)"
COUNT_OF_OBJECT = {
    name: re.compile(rf"\b{NUMBER}\b{WORD_BETWEEN}{{0,3}}?\s+{noun}\b", re.IGNORECASE)
    for name, noun in NAME_OF_OBJECT.items()
}
NEGATION = re.compile(r"\b(?:no|not|none|nothing|same|identical|unchanged)\b", re.IGNORECASE)
NO_COUNT = "no reference names numbers of roads and buildings"


@dataclass(frozen=True)
class CountErrors:
    """The errors of an answer.

    Attributes:
        answers: always 1.
        roads, buildings: difference between the predicted and the true number, without its sign.
        roads_squared, buildings_squared: its square.
        unreadable: 1 if no number can be read for at least one of the objects.
    """

    answers: float
    roads: float
    roads_squared: float
    buildings: float
    buildings_squared: float
    unreadable: float


COLUMN = StatisticsColumn("count_statistics", CountErrors)


def compute(pairs: list[EvalPair], groups: Groups, inputs: MetricInputs) -> MetricScores:
    """Score the questions whose first reference names numbers of roads and buildings."""
    del inputs
    rows = COLUMN.rows(pairs, count_errors)
    absent = {} if rows else {METRIC.main_score: NO_COUNT}
    return MetricScores(COLUMN.score_groups(groups, rows, RESAMPLED), COLUMN.values(rows), absent)


def count_errors(pair: EvalPair) -> CountErrors | None:
    """Return the errors of an answer. None if the numbers of its first reference cannot be read."""
    true_roads = read_count(pair.references[0], "roads")
    true_buildings = read_count(pair.references[0], "buildings")
    if true_roads is None or true_buildings is None:
        return None
    roads = read_count(pair.prediction, "roads")
    buildings = read_count(pair.prediction, "buildings")
    roads_error = abs((roads or 0) - true_roads)
    buildings_error = abs((buildings or 0) - true_buildings)
    return CountErrors(
        answers=1.0,
        roads=float(roads_error),
        roads_squared=float(roads_error**2),
        buildings=float(buildings_error),
        buildings_squared=float(buildings_error**2),
        unreadable=float(roads is None or buildings is None),
    )


def read_count(text: str, name: str) -> int | None:
    """Return the number of changed objects that a text names. None if it names no number.

    Args:
        name: "roads" or "buildings".
    """
    match = COUNT_OF_OBJECT[name].search(text)
    if match is not None:
        return read_number_word(match["number"].lower())
    if NEGATION.search(text):
        return 0
    names_object = re.search(rf"\b{NAME_OF_OBJECT[name]}\b", text, re.IGNORECASE) is not None
    names_another = re.search(rf"\b(?:{ANY_NAME})\b", text, re.IGNORECASE) is not None
    return None if names_object or not names_another else 0


def read_number_word(word: str) -> int:
    """Return the number that a word means: a and an are 1, no is 0."""
    if word == "no":
        return 0
    number = read_bare_number(word)
    return 1 if number is None else int(number)


def root_mean_squared_error(name: str) -> Resampled:
    """Return how to compute the root of the mean squared error of an object."""
    mean_squared_error = COLUMN.share(f"{name}_squared", "answers").score

    def score(sums: np.ndarray) -> np.ndarray:
        root: np.ndarray = np.sqrt(mean_squared_error(sums))
        return root

    return Resampled(COLUMN.name, score)


RESAMPLED = {
    "roads_mae": COLUMN.share("roads", "answers"),
    "roads_rmse": root_mean_squared_error("roads"),
    "buildings_mae": COLUMN.share("buildings", "answers"),
    "buildings_rmse": root_mean_squared_error("buildings"),
    "unreadable_counts": COLUMN.share("unreadable", "answers"),
}
METRIC = Metric(
    compute,
    main_score="buildings_mae",
    scores=tuple(RESAMPLED),
    columns={COLUMN.name: "list<double>"},
    resampled=RESAMPLED,
    lower_is_better=tuple(RESAMPLED),
    java=False,
    records="questions",
    protocol_only=True,
)
