"""Score the first answer in a text, as the authors of RSRCC do (Roie-k/RSRCC: gemma_evaluation.py).

A yes/no question is answered by the first word Yes or No of the prediction, and a question with options by its first
letter from A to D that is a word of its own. Upper and lower case are alike, and a prediction without such a word is
wrong. The rule also takes words that are no answers: "It is a house" is read as A, and "There is no doubt: yes" as No.
`answers.py` reads answers more strictly.

A question has one of the two forms if all of its references have it. Other questions are not scored.
"""

import re
from collections.abc import Sequence
from typing import Literal

from m3diff.scoring.metrics import Metric, MetricInputs, MetricScores, PairValue, Value, mean_of
from m3diff.scoring.metrics.answers import share_of_right
from m3diff.scoring.pairs import EvalPair, Groups

FirstAnswerForm = Literal["choice", "yes_no"]

ANSWER_OF_FORM: dict[FirstAnswerForm, re.Pattern[str]] = {
    "choice": re.compile(r"\b[ABCD]\b", re.IGNORECASE),
    "yes_no": re.compile(r"\b(?:Yes|No)\b", re.IGNORECASE),
}
COLUMN_OF_SCORE = {
    "first_answer_accuracy": "first_answer_right",
    "first_choice_accuracy": "first_choice_right",
    "first_yes_no_accuracy": "first_yes_no_right",
}
NO_FORM = "no question is answered by yes or no, or by a letter from A to D"


def compute(pairs: list[EvalPair], groups: Groups, inputs: MetricInputs) -> MetricScores:
    """Score the questions of both forms. A score of a group is the share of right answers."""
    del inputs
    values_by_id = {pair.id: judge_first_answer(pair.prediction, pair.references) for pair in pairs}
    scores: dict[str, dict[str, Value]] = {}
    for group, ids in groups.items():
        scores[group] = {
            score: share_of_right([bool(values_by_id[i][column]) for i in ids if column in values_by_id[i]])
            for score, column in COLUMN_OF_SCORE.items()
        }
    absent = {} if any(values_by_id.values()) else {METRIC.main_score: NO_FORM}
    return MetricScores(scores, values_by_id, absent)


def judge_first_answer(prediction: str, references: Sequence[str]) -> dict[str, PairValue]:
    """Return the columns of scores.parquet for a question. The result is empty if its references have neither form."""
    for form, pattern in ANSWER_OF_FORM.items():
        if references and all(pattern.fullmatch(reference.strip()) for reference in references):
            first_answer = pattern.search(prediction)
            right_answers = {reference.strip().lower() for reference in references}
            is_right = first_answer is not None and first_answer[0].lower() in right_answers
            return {"first_answer_right": is_right, f"first_{form}_right": is_right}
    return {}


METRIC = Metric(
    compute,
    main_score="first_answer_accuracy",
    scores=tuple(COLUMN_OF_SCORE),
    columns=dict.fromkeys(COLUMN_OF_SCORE.values(), "bool"),
    resampled={score: mean_of(column) for score, column in COLUMN_OF_SCORE.items()},
    java=False,
    records="questions",
    protocol_only=True,
)
