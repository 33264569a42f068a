"""Score answers to the question whether anything changed, with changed pairs as positives, as DeltaVLM does.

A prediction counts as "changed" if its first word is yes or true. Any other text counts as "not changed", even an empty
one, because the authors compare the text with "Yes". Answers such as "yes." or "Yes, a road is new" are accepted here,
too. `yes_no_accuracy` of answers.py counts texts that say neither as wrong.

Precision is undefined if no prediction says that a pair changed, and recall if no pair changed. The score is then
absent; scikit-learn prints 0.
"""

from dataclasses import dataclass

from m3diff.scoring.metrics import Metric, MetricInputs, MetricScores
from m3diff.scoring.metrics.answers import read_bare_truth_value, read_truth_value
from m3diff.scoring.metrics.sums import StatisticsColumn
from m3diff.scoring.pairs import EvalPair, Groups

NO_TRUTH = "no reference is yes or no"


@dataclass(frozen=True)
class BinaryCounts:
    """The numbers of an answer, each 0 or 1.

    Attributes:
        answers: always 1.
        right: whether the answer is right.
        changed_and_said: whether the pair changed and the prediction says so.
        said: whether the prediction says that the pair changed.
        changed: whether the pair changed.
    """

    answers: int
    right: int
    changed_and_said: int
    said: int
    changed: int


COLUMN = StatisticsColumn("binary_statistics", BinaryCounts)


def compute(pairs: list[EvalPair], groups: Groups, inputs: MetricInputs) -> MetricScores:
    """Score the questions whose references say yes or no."""
    del inputs
    rows = COLUMN.rows(pairs, count_answer)
    absent = {} if rows else {METRIC.main_score: NO_TRUTH}
    return MetricScores(COLUMN.score_groups(groups, rows, RESAMPLED), COLUMN.values(rows), absent)


def count_answer(pair: EvalPair) -> BinaryCounts | None:
    """Return the numbers of an answer. None if the references do not agree on yes or no."""
    truths = {read_bare_truth_value(reference) for reference in pair.references}
    if truths not in ({True}, {False}):
        return None
    is_changed = truths == {True}
    says_changed = read_truth_value(pair.prediction) is True
    return BinaryCounts(
        answers=1,
        right=int(is_changed == says_changed),
        changed_and_said=int(is_changed and says_changed),
        said=int(says_changed),
        changed=int(is_changed),
    )


RESAMPLED = {
    "binary_accuracy": COLUMN.share("right", "answers"),
    "binary_precision": COLUMN.share("changed_and_said", "said"),
    "binary_recall": COLUMN.share("changed_and_said", "changed"),
    "binary_f1": COLUMN.f1("changed_and_said", "said", "changed"),
}
METRIC = Metric(
    compute,
    main_score="binary_f1",
    scores=tuple(RESAMPLED),
    columns={COLUMN.name: "list<double>"},
    resampled=RESAMPLED,
    java=False,
    records="questions",
    protocol_only=True,
)
