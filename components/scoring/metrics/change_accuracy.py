"""Compute the accuracy of predictions that a grammar can read, at three levels of increasing strictness.

type: the change types are right.
place: the object and place of every change are also right.
exact: the states before and after every change are also right (colour, size, kind, direction, pose, letter, count).
"""

from collections.abc import Iterable
from dataclasses import astuple, dataclass, fields

import numpy as np

from m3diff.scoring.grammar import Correctness, ParsedCaption
from m3diff.scoring.metrics import Metric, MetricInputs, MetricScores, PairValue, Resampled, Value, divide_sums
from m3diff.scoring.pairs import ALL_PAIRS, EvalPair, Groups

NO_GRAMMAR = (
    "no dataset of these pairs has a grammar that reads its references (records/<dataset>/grammar.json), so captions "
    "cannot be read for change type, object and place"
)
NO_REVERSED = (
    "there are no predictions of swapped images (predictions_reversed.json) for pairs of one change that has an inverse"
)
# If the grammar cannot read more than this share of the captions, the remaining captions are not scored either
MAX_UNREADABLE_SHARE = 0.5
READINGS = Correctness._fields
STATISTICS = "change_statistics"  # column of scores.parquet that holds `PairStatistics`


@dataclass(frozen=True)
class PairStatistics:
    """Counts of one pair. The scores of all pairs are computed from the sums of these counts.

    scores.parquet stores the counts in the order of the fields.

    Attributes:
        captions: always 1, so that the sum is the number of captions.
        unreadable: 1 if the grammar cannot read at least one clause of the prediction.
        single: 1 for a pair with exactly one change. `single_*_right` is 1 if its prediction is also right.
        distractors: 1 for a pair without a change.
        distractors_called_unchanged: 1 for a pair without a change if the prediction says that nothing changed.
        changed: 1 for a pair with at least one change.
        changed_called_unchanged: 1 for a pair with a change if the prediction says that nothing changed.
        multi_clauses: number of predicted clauses, for a pair with several changes.
        multi_changes: number of changes, for a pair with several changes. `multi_*_right` is how many of these
            changes the prediction names.
        claimed_changes: number of changes that the prediction claims in clauses that the grammar can read.
        false_changes: how many claimed changes have a wrong type, object or place, or repeat an earlier change.
        reversed_captions: 1 if the caption of the swapped images is scored. `reversed_exact_right` is 1 if it is right.
    """

    captions: int = 1
    unreadable: int = 0
    single: int = 0
    single_type_right: int = 0
    single_place_right: int = 0
    single_exact_right: int = 0
    distractors: int = 0
    distractors_called_unchanged: int = 0
    changed: int = 0
    changed_called_unchanged: int = 0
    multi_clauses: int = 0
    multi_changes: int = 0
    multi_place_right: int = 0
    multi_exact_right: int = 0
    claimed_changes: int = 0
    false_changes: int = 0
    reversed_captions: int = 0
    reversed_exact_right: int = 0

    def as_row(self) -> list[float]:
        """Return the counts in the format of scores.parquet."""
        return [float(count) for count in astuple(self)]


COUNTS = [field.name for field in fields(PairStatistics)]


def compute(pairs: list[EvalPair], groups: Groups, inputs: MetricInputs) -> MetricScores:
    """Score the pairs whose references a grammar can read. Which scores a group has depends on the kind of group.

    If the grammar cannot read most captions, all scores except `unreadable` are absent. Otherwise, captions that the
    grammar cannot read would count as wrong.
    """
    parsed = {pair_id: inputs.parsed[pair_id] for pair_id in groups[ALL_PAIRS] if pair_id in inputs.parsed}
    unreadable_share = share_of_true(caption.is_unreadable for caption in parsed.values())
    is_judged = unreadable_share is None or unreadable_share <= MAX_UNREADABLE_SHARE
    judged = parsed if is_judged else {}
    scores: dict[str, dict[str, Value]] = {
        group: group_scores(group, [judged[pair_id] for pair_id in ids if pair_id in judged])
        for group, ids in groups.items()
        if group != ALL_PAIRS
    }
    scores[ALL_PAIRS] = overall_scores(judged.values()) | {"unreadable": unreadable_share}
    pair_scores = {pair_id: pair_values(caption, is_judged) for pair_id, caption in parsed.items()}
    absent = {"reversal": NO_REVERSED} if scores[ALL_PAIRS]["reversal"] is None else {}
    if unreadable_share is None:
        absent = {METRIC.main_score: NO_GRAMMAR}
    elif not is_judged:
        unreadable_captions = f"{100 * unreadable_share:.0f} % of the captions"
        reason = f"the grammar does not know the words of {unreadable_captions}, so nothing can be read from them"
        absent = {score: reason for score in METRIC.overall if score != "unreadable"}
    return MetricScores(scores, pair_scores, absent)


def share_of_true(flags: Iterable[bool]) -> float | None:
    """Return the share of flags that are true, or None if there are no flags."""
    values = list(flags)
    return sum(values) / len(values) if values else None


def overall_scores(captions: Iterable[ParsedCaption]) -> dict[str, Value]:
    """Return the scores of all pairs of a protocol. A score is None if no pair counts towards it."""
    rows = [count_pair_statistics(caption).as_row() for caption in captions]
    sums = np.sum(rows or np.zeros((1, len(COUNTS))), axis=0)
    values = {name: float(resampled.score(sums)) for name, resampled in RESAMPLED.items()}
    return {name: None if np.isnan(value) else value for name, value in values.items()}


def group_scores(group: str, captions: list[ParsedCaption]) -> dict[str, Value]:
    """Return the scores of a group of pairs. The group's name decides which scores it has.

    The group of pairs with several changes has precision, recall and F1 over clauses, and the shares of pairs that are
    entirely right. Groups by change type, number of changes and length have accuracies. Every group has the share of
    false changes: claims that match no change of the pair in type, object and place, or that repeat an earlier claim.
    """
    right_shares = {
        "type": share_of_true(caption.correctness.type for caption in captions),
        "place": share_of_true(caption.correctness.place for caption in captions),
        "exact": share_of_true(caption.correctness.exact for caption in captions),
    }
    scores: dict[str, Value] = {}
    if group == "multi_change":
        scores |= clause_scores(captions)
        scores["all_types_right"] = right_shares["type"]
        scores["all_places_right"] = right_shares["place"]
        scores["all_exact_right"] = right_shares["exact"]
    elif group not in ("change", "distractors"):
        scores |= {f"{reading}_accuracy": share for reading, share in right_shares.items()}
    claimed_changes = sum(caption.claimed_changes for caption in captions)
    false_changes = sum(count_false_changes(caption) for caption in captions)
    scores["false_changes"] = false_changes / claimed_changes if claimed_changes else None
    scores["false_changes_per_pair"] = false_changes / len(captions) if captions else None
    return scores


def clause_scores(captions: list[ParsedCaption]) -> dict[str, Value]:
    """Return the number of changes, and precision, recall and F1 over clauses, for pairs with several changes."""
    clauses = sum(len(caption.predicted_clauses) for caption in captions)
    changes = sum(caption.true_types.total() for caption in captions)
    named_changes = {
        "type": sum(caption.named_changes.type for caption in captions),
        "place": sum(caption.named_changes.place for caption in captions),
        "exact": sum(caption.named_changes.exact for caption in captions),
    }
    scores: dict[str, Value] = {"changes": changes}
    for reading, count in named_changes.items():
        scores[f"{reading}_precision"] = count / clauses if clauses else None
        scores[f"{reading}_recall"] = count / changes if changes else None
        scores[f"{reading}_f1"] = 2 * count / (clauses + changes) if changes else None
    return scores


def count_false_changes(caption: ParsedCaption) -> int:
    """Count the changes that a prediction claims although they did not happen or it has already named them."""
    return caption.claimed_changes - caption.named_changes.place


def pair_values(caption: ParsedCaption, is_judged: bool) -> dict[str, PairValue]:
    """Return the columns of scores.parquet for a pair.

    `predicted_type` is the change type that the prediction names, or "none", "several" or "unreadable". If the
    predictions are not judged, the columns that say whether they are right are null, and only unreadable predictions
    are counted.
    """
    statistics = count_pair_statistics(caption) if is_judged else PairStatistics(unreadable=caption.is_unreadable)
    return {
        "predicted_type": caption.predicted_type,
        "type_right": caption.correctness.type if is_judged else None,
        "place_right": caption.correctness.place if is_judged else None,
        "exact_right": caption.correctness.exact if is_judged else None,
        STATISTICS: statistics.as_row(),
    }


def count_pair_statistics(caption: ParsedCaption) -> PairStatistics:
    """Return the counts of a pair from which the scores of all pairs are computed."""
    changes = len(caption.pair.changes)
    is_single = changes == 1
    is_multi = changes > 1
    is_distractor = caption.pair.is_distractor
    return PairStatistics(
        unreadable=caption.is_unreadable,
        single=is_single,
        single_type_right=is_single and caption.correctness.type,
        single_place_right=is_single and caption.correctness.place,
        single_exact_right=is_single and caption.correctness.exact,
        distractors=is_distractor,
        distractors_called_unchanged=is_distractor and caption.says_no_change,
        changed=changes > 0,
        changed_called_unchanged=changes > 0 and caption.says_no_change,
        multi_clauses=len(caption.predicted_clauses) if is_multi else 0,
        multi_changes=caption.true_types.total() if is_multi else 0,
        multi_place_right=caption.named_changes.place if is_multi else 0,
        multi_exact_right=caption.named_changes.exact if is_multi else 0,
        claimed_changes=caption.claimed_changes,
        false_changes=count_false_changes(caption),
        reversed_captions=caption.reversed_caption is not None,
        reversed_exact_right=caption.reversed_caption is not None and caption.reversed_caption.correctness.exact,
    )


def resampled_share(part: str, total: str) -> Resampled:
    """Return how to compute a ratio: the sum of the count `part` divided by the sum of the count `total`."""
    return Resampled(STATISTICS, divide_sums(COUNTS.index(part), COUNTS.index(total)))


def resampled_f1(right: str) -> Resampled:
    """Return how to compute F1 over the clauses of pairs with several changes.

    Args:
        right: name of the count of `PairStatistics` for correctly named changes.
    """
    right_column = COUNTS.index(right)
    clauses_column = COUNTS.index("multi_clauses")
    changes_column = COUNTS.index("multi_changes")

    def score(sums: np.ndarray) -> np.ndarray:
        clauses_and_changes = sums[..., clauses_column] + sums[..., changes_column]
        fractions = np.stack([2 * sums[..., right_column], clauses_and_changes], axis=-1)
        return np.where(sums[..., changes_column] > 0, divide_sums(0, 1)(fractions), np.nan)

    return Resampled(STATISTICS, score)


RESAMPLED = {
    "change_type_accuracy": resampled_share("single_type_right", "single"),
    "change_place_accuracy": resampled_share("single_place_right", "single"),
    "change_exact_accuracy": resampled_share("single_exact_right", "single"),
    "no_change_recall": resampled_share("distractors_called_unchanged", "distractors"),
    "false_no_change": resampled_share("changed_called_unchanged", "changed"),
    "multi_change_place_f1": resampled_f1("multi_place_right"),
    "multi_change_exact_f1": resampled_f1("multi_exact_right"),
    "false_changes": resampled_share("false_changes", "claimed_changes"),
    "unreadable": resampled_share("unreadable", "captions"),
    "reversal": resampled_share("reversed_exact_right", "reversed_captions"),
}
METRIC = Metric(
    compute,
    main_score="change_type_accuracy",
    scores=(),
    overall=tuple(RESAMPLED),
    columns={"predicted_type": "string"}
    | {f"{reading}_right": "bool" for reading in READINGS}
    | {STATISTICS: "list<double>"},
    resampled=RESAMPLED,
    lower_is_better=("false_no_change", "false_changes", "unreadable"),
    java=False,
    records="captions",
    needs_grammar=True,
)
