"""Accuracy of predictions as a dataset's grammar reads them: by the type of change, its object and place, and from what
to what.

Three readings, each stricter than the one before: *type*; *place*: type, object and place; *exact*: what changed from
what to what as well (colour, size, kind, direction, pose, letter, count).
"""

from collections.abc import Iterable

import numpy as np

from m3diff.scoring.grammar import ParsedCaption, Readings
from m3diff.scoring.metrics import Metric, MetricScores, PairValue, Resampled, Tools, Value, ratio
from m3diff.scoring.pairs import ALL, EvalPair, Groups

NO_GRAMMAR = (
    "no dataset of these pairs has a grammar that reads its references (records/<dataset>/grammar.json), so captions "
    "cannot be read for change type, object and place"
)
NO_REVERSED = (
    "there are no predictions of swapped images (predictions_reversed.json) for pairs of one change that has an inverse"
)
MOST = 0.5  # above this share of captions that the grammar does not know, no score is made of what it reads
READINGS = Readings._fields
STATISTICS = "change_statistics"
# Numbers of a pair, to sum over pairs. `several_*` count clauses of pairs of several changes, `told` changes in clauses
# that the grammar knows.
NAMES = (
    "captions", "unreadable", "single", "single_type", "single_place", "single_exact", "distractors",
    "distractors_unchanged", "changed", "changed_unchanged", "several_told", "several_true", "several_place",
    "several_exact", "told", "false", "reversed", "reversed_exact",
)  # fmt: skip


def compute(pairs: list[EvalPair], groups: Groups, tools: Tools) -> MetricScores:
    """Fractions over the pairs whose references a grammar understands; each kind of group has its own.

    All but `unreadable` are absent where most captions are written in words that the grammar does not know: it would
    call them wrong without having read them.
    """
    of_protocol = {i: tools.parsed[i] for i in groups[ALL] if i in tools.parsed}
    unreadable = fraction(caption.unreadable for caption in of_protocol.values())
    readable = of_protocol if unreadable is None or unreadable <= MOST else {}
    scores: dict[str, dict[str, Value]] = {
        group: group_scores(group, [readable[i] for i in ids if i in readable])
        for group, ids in groups.items()
        if group != ALL
    }
    sums = np.sum([statistics(caption) for caption in readable.values()] or np.zeros((1, len(NAMES))), axis=0)
    found = {name: float(score(sums)) for name, (_, score) in RESAMPLED.items()}
    scores[ALL] = {name: None if np.isnan(value) else value for name, value in found.items()}
    scores[ALL]["unreadable"] = unreadable
    of_pairs = {i: pair_values(parsed, i in readable) for i, parsed in of_protocol.items()}
    absent = {"reversal": NO_REVERSED} if scores[ALL]["reversal"] is None else {}
    if unreadable is None:
        absent = {METRIC.headline: NO_GRAMMAR}
    elif not readable:
        share = f"{100 * unreadable:.0f} % of the captions"
        reason = f"the grammar does not know the words of {share}, so nothing can be read from them"
        absent = dict.fromkeys((name for name in METRIC.overall if name != "unreadable"), reason)
    return MetricScores(scores, of_pairs, absent)


def fraction(flags: Iterable[bool]) -> float | None:
    """The share that is true; None of none."""
    known = list(flags)
    return sum(known) / len(known) if known else None


def group_scores(group: str, parsed: list[ParsedCaption]) -> dict[str, Value]:
    """Scores of a group's pairs, by the group's name.

    Of pairs of several changes: precision, recall and F1 over their clauses, and the fractions of pairs wholly right;
    of a change type, a number of changes or a length: the fractions. False changes are those told in words that the
    grammar knows that did not happen: no change of the pair has their type, object and place, or a clause before told
    it; their share of all, and how many there are to a pair.
    """
    right = {reading: fraction(getattr(caption.right, reading) for caption in parsed) for reading in READINGS}
    scores: dict[str, Value] = {}
    if group == "multi_change":
        told = sum(len(caption.predicted_clauses) for caption in parsed)
        scores["changes"] = changes = sum(caption.true_types.total() for caption in parsed)
        for reading in READINGS:
            found = sum(getattr(caption.changes_found, reading) for caption in parsed)
            scores[f"{reading}_precision"] = found / told if told else None
            scores[f"{reading}_recall"] = found / changes if changes else None
            scores[f"{reading}_f1"] = 2 * found / (told + changes) if changes else None
        names = ("all_types_right", "all_places_right", "all_exact_right")
        scores |= dict(zip(names, right.values(), strict=True))
    elif group not in ("change", "distractors"):
        scores |= {f"{reading}_accuracy": value for reading, value in right.items()}
    told = sum(caption.changes_told for caption in parsed)
    false = sum(caption.changes_told - caption.changes_found.place for caption in parsed)
    return scores | {
        "false_changes": false / told if told else None,
        "false_changes_per_pair": false / len(parsed) if parsed else None,
    }


def pair_values(parsed: ParsedCaption, judged: bool) -> dict[str, PairValue]:
    """`predicted_type`: the change type that the prediction names, or "none", "several", "unreadable". Of captions that
    are not judged the others are null, and only two statistics are counted."""
    right = {f"{reading}_right": value if judged else None for reading, value in parsed.right._asdict().items()}
    counts = statistics(parsed)
    counted = counts if judged else counts[:2] + [0.0] * (len(NAMES) - 2)
    return {"predicted_type": parsed.predicted_type, **right, STATISTICS: counted}


def statistics(parsed: ParsedCaption) -> list[float]:
    """The numbers called `NAMES`."""
    changes = len(parsed.pair.changes)
    single, several, distractor = changes == 1, changes > 1, parsed.pair.is_distractor
    unchanged, found, swapped = parsed.says_no_change, parsed.changes_found, parsed.reversed
    values = (
        *(True, parsed.unreadable),
        *(single, *(single and right for right in parsed.right)),
        *(distractor, distractor and unchanged, changes > 0, changes > 0 and unchanged),
        *(several * len(parsed.predicted_clauses), several * parsed.true_types.total()),
        *(several * found.place, several * found.exact),
        *(parsed.changes_told, parsed.changes_told - found.place),
        *(swapped is not None, swapped is not None and swapped.right.exact),
    )
    return [float(value) for value in values]


def share(part: str, whole: str) -> Resampled:
    return Resampled(STATISTICS, ratio(NAMES.index(part), NAMES.index(whole)))


def f1(found: str) -> Resampled:
    """The harmonic mean of precision and recall over the clauses of pairs of several changes, from their sums."""
    part, told, true = (NAMES.index(name) for name in (found, "several_told", "several_true"))

    def of(sums: np.ndarray) -> np.ndarray:
        pairs = np.stack([2 * sums[..., part], sums[..., told] + sums[..., true]], axis=-1)
        return np.where(sums[..., true] > 0, ratio(0, 1)(pairs), np.nan)

    return Resampled(STATISTICS, of)


RESAMPLED = {
    "change_type_accuracy": share("single_type", "single"),
    "change_place_accuracy": share("single_place", "single"),
    "change_exact_accuracy": share("single_exact", "single"),
    "no_change_recall": share("distractors_unchanged", "distractors"),
    "false_no_change": share("changed_unchanged", "changed"),
    "multi_change_place_f1": f1("several_place"),
    "multi_change_exact_f1": f1("several_exact"),
    "false_changes": share("false", "told"),
    "unreadable": share("unreadable", "captions"),
    "reversal": share("reversed_exact", "reversed"),
}
METRIC = Metric(
    compute,
    headline="change_type_accuracy",
    scores=(),
    overall=tuple(RESAMPLED),
    columns={"predicted_type": "string", **{f"{reading}_right": "bool" for reading in READINGS}}
    | {STATISTICS: "list<double>"},
    resampled=RESAMPLED,
    lower_is_better=("false_no_change", "false_changes", "unreadable"),
    java=False,
    needs_grammar=True,
)
