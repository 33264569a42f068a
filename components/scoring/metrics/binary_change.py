"""Score answers to the question whether anything changed, with changed pairs as positives, as DeltaVLM does.

A prediction counts as "changed" if its first word is yes or true. Any other text counts as "not changed", even an empty
one, because the authors compare the text with "Yes". Answers such as "yes." or "Yes, a road is new" are accepted here,
too. `yes_no_accuracy` of answers.py counts texts that say neither as wrong.

Precision is undefined if no prediction says that a pair changed, and recall if no pair changed. The score is then
absent; scikit-learn prints 0.
"""

from m3diff.scoring.metrics import Metric, MetricInputs, MetricScores, Resampled, divide_sums
from m3diff.scoring.metrics.answers import read_bare_truth_value, read_truth_value
from m3diff.scoring.metrics.sums import f1_of_sums, score_groups_by_sums
from m3diff.scoring.pairs import EvalPair, Groups

STATISTICS = "binary_statistics"  # column of scores.parquet
# Names of the numbers in the column, each 0 or 1
COUNTS = ("answers", "right", "changed_and_said", "said", "changed")
NO_TRUTH = "no reference is yes or no"


def compute(pairs: list[EvalPair], groups: Groups, inputs: MetricInputs) -> MetricScores:
    """Score the questions whose references say yes or no."""
    del inputs
    rows = {}
    for pair in pairs:
        row = count_answer(pair)
        if row is not None:
            rows[pair.id] = row
    scores = score_groups_by_sums(groups, rows, RESAMPLED, len(COUNTS))
    absent = {} if rows else {METRIC.main_score: NO_TRUTH}
    return MetricScores(scores, {pair_id: {STATISTICS: row} for pair_id, row in rows.items()}, absent)


def count_answer(pair: EvalPair) -> list[float] | None:
    """Return the numbers of a question in the order of COUNTS. None if its references do not agree on yes or no."""
    truths = {read_bare_truth_value(reference) for reference in pair.references}
    if truths not in ({True}, {False}):
        return None
    is_changed = truths == {True}
    says_changed = read_truth_value(pair.prediction) is True
    counts = (1, is_changed == says_changed, is_changed and says_changed, says_changed, is_changed)
    return [float(count) for count in counts]


def share(part: str, total: str) -> Resampled:
    """Return how to divide the sum of a number by the sum of another."""
    return Resampled(STATISTICS, divide_sums(COUNTS.index(part), COUNTS.index(total)))


RESAMPLED = {
    "binary_accuracy": share("right", "answers"),
    "binary_precision": share("changed_and_said", "said"),
    "binary_recall": share("changed_and_said", "changed"),
    "binary_f1": Resampled(STATISTICS, f1_of_sums(*map(COUNTS.index, ("changed_and_said", "said", "changed")))),
}
METRIC = Metric(
    compute,
    main_score="binary_f1",
    scores=tuple(RESAMPLED),
    columns={STATISTICS: "list<double>"},
    resampled=RESAMPLED,
    java=False,
    records="questions",
    protocol_only=True,
)
