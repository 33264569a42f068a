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
        right: 1 if the answer is right.
        right_claims: 1 if the pair changed and the prediction says so.
        claims: 1 if the prediction says that the pair changed.
        changes: 1 if the pair changed.
    """

    answers: int
    right: int
    right_claims: int
    claims: int
    changes: int


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
        right_claims=int(is_changed and says_changed),
        claims=int(says_changed),
        changes=int(is_changed),
    )


RESAMPLED = {
    "binary_accuracy": COLUMN.share("right", "answers"),
    "binary_precision": COLUMN.share("right_claims", "claims"),
    "binary_recall": COLUMN.share("right_claims", "changes"),
    "binary_f1": COLUMN.f1("right_claims", "claims", "changes"),
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
