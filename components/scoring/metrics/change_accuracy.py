"""What a dataset's grammar says of the predictions: is the change of the right type, on the right object and place, and
from what to what?

Three readings, each stricter than the one before: *type*; *place*: type, object and place; *exact*: what changed from
what to what as well (colour, size, kind, direction, pose, letter, count).
"""

from collections.abc import Iterable

import numpy as np

from m3diff.scoring.grammar import ParsedCaption
from m3diff.scoring.metrics.metric import ALL, Groups, Metric, MetricScores, PairValue, Resampled, Tools, Value, ratio
from m3diff.scoring.pairs import EvalPair

NO_GRAMMAR = (
    "no dataset of these pairs has a grammar that reads its references (records/<dataset>/grammar.json), so captions "
    "cannot be read for change type, object and place"
)
NO_REVERSED = (
    "there are no predictions of swapped images (predictions_reversed.json) for pairs of one change that has an inverse"
)
MOST = 0.5
"""Above this share of captions that the grammar does not know, no score is made of what it reads."""


def compute(pairs: list[EvalPair], groups: Groups, tools: Tools) -> MetricScores:
    """Fractions over the pairs whose references a grammar understands; each kind of group has its own.

    All but `unreadable` are absent where most captions are written in words that the grammar does not know: it would
    call them wrong without having read them.
    """
    of_protocol = {i: tools.parsed[i] for i in groups[ALL] if i in tools.parsed}
    unreadable = fraction(caption.unreadable for caption in of_protocol.values())
    readable = of_protocol if unreadable is None or unreadable <= MOST else {}
    scores: dict[str, dict[str, Value]] = {}
    for group, ids in groups.items():
        if found := group_scores(group, [readable[i] for i in ids if i in readable]):
            scores[group] = found
    scores[ALL]["unreadable"] = unreadable
    return MetricScores(
        scores,
        {i: verdicts(parsed, i in readable) for i, parsed in of_protocol.items()},
        absences(scores[ALL], bool(readable)),
    )


def absences(scores: dict[str, Value], readable: bool) -> dict[str, str]:
    """Why the scores that follow from the grammar are null, by name."""
    unreadable = scores["unreadable"]
    if unreadable is None:
        return {METRIC.headline: NO_GRAMMAR}
    if not readable:
        return dict.fromkeys(
            (name for name in METRIC.overall if name != "unreadable"),
            f"the grammar does not know the words of {100 * unreadable:.0f} % of the captions, so nothing can be read "
            "from them",
        )
    return {"reversal": NO_REVERSED} if scores["reversal"] is None else {}


def group_scores(group: str, parsed: list[ParsedCaption]) -> dict[str, Value]:
    """What the grammar gives of a group's pairs, by the group's name."""
    if group == ALL:
        return change_scores(parsed)
    if group == "multi_change":
        return clause_scores(parsed) | false_changes(parsed)
    if group in ("change", "distractors"):
        return false_changes(parsed)
    return type_scores(parsed) | false_changes(parsed)


def fraction(flags: Iterable[bool]) -> float | None:
    """How many are true, of all; None of none."""
    known = list(flags)
    return sum(known) / len(known) if known else None


def change_scores(parsed: list[ParsedCaption]) -> dict[str, Value]:
    """The scores over all pairs of a protocol, from the sums of their statistics."""
    sums = np.sum([statistics(caption) for caption in parsed], axis=0) if parsed else np.zeros(len(NAMES))
    found = {name: float(score(sums)) for name, (_, score) in RESAMPLED.items()}
    return {name: None if np.isnan(value) else value for name, value in found.items()}


def type_scores(parsed: list[ParsedCaption]) -> dict[str, Value]:
    return {
        "type_accuracy": fraction(caption.type_right for caption in parsed),
        "place_accuracy": fraction(caption.place_right for caption in parsed),
        "exact_accuracy": fraction(caption.exact_right for caption in parsed),
    }


def clause_scores(parsed: list[ParsedCaption]) -> dict[str, Value]:
    """Precision, recall and F1 over the clauses of pairs of several changes; the fractions of pairs wholly right."""
    told = sum(len(caption.predicted_clauses) for caption in parsed)
    changes = sum(caption.true_types.total() for caption in parsed)
    scores: dict[str, Value] = {"changes": changes}
    for reading in ("type", "place", "exact"):
        found = sum(getattr(caption.changes_found, reading) for caption in parsed)
        scores |= {
            f"{reading}_precision": found / told if told else None,
            f"{reading}_recall": found / changes if changes else None,
            f"{reading}_f1": 2 * found / (told + changes) if changes else None,
        }
    return scores | {
        "all_types_right": fraction(caption.type_right for caption in parsed),
        "all_places_right": fraction(caption.place_right for caption in parsed),
        "all_exact_right": fraction(caption.exact_right for caption in parsed),
    }


def false_changes(parsed: list[ParsedCaption]) -> dict[str, Value]:
    """Of the changes told in words that the grammar knows, those that did not happen: no change of the pair has their
    type, object and place, or one clause before told it. Their share of all, and how many there are to a pair."""
    told = sum(caption.changes_told for caption in parsed)
    false = sum(caption.changes_told - caption.changes_found.place for caption in parsed)
    return {
        "false_changes": false / told if told else None,
        "false_changes_per_pair": false / len(parsed) if parsed else None,
    }


def verdicts(parsed: ParsedCaption, judged: bool) -> dict[str, PairValue]:
    """`predicted_type`: the change type that the prediction names, or "none", "several", "unreadable". The others are
    null where captions are not judged."""
    right = (parsed.type_right, parsed.place_right, parsed.exact_right) if judged else (None, None, None)
    return {
        "predicted_type": parsed.predicted_type,
        **dict(zip(("type_right", "place_right", "exact_right"), right, strict=True)),
        STATISTICS: statistics(parsed) if judged else read_only(parsed),
    }


STATISTICS = "change_statistics"
NAMES = (
    "captions",
    "unreadable",
    "single",
    "single_type",
    "single_place",
    "single_exact",
    "distractors",
    "distractors_unchanged",
    "changed",
    "changed_unchanged",
    "several_told",  # clauses of pairs of several changes
    "several_true",
    "several_place",
    "several_exact",
    "told",  # changes in clauses that the grammar knows
    "false",
    "reversed",
    "reversed_exact",
)
"""Numbers of a pair, to sum over pairs."""


def statistics(parsed: ParsedCaption) -> list[float]:
    """The numbers called `NAMES`."""
    changes = len(parsed.pair.changes)
    single, several, distractor = changes == 1, changes > 1, parsed.pair.is_distractor
    unchanged, found, swapped = parsed.says_no_change, parsed.changes_found, parsed.reversed
    values = (
        True,
        parsed.unreadable,
        single,
        single and parsed.type_right,
        single and parsed.place_right,
        single and parsed.exact_right,
        distractor,
        distractor and unchanged,
        changes > 0,
        changes > 0 and unchanged,
        several * len(parsed.predicted_clauses),
        several * parsed.true_types.total(),
        several * found.place,
        several * found.exact,
        parsed.changes_told,
        parsed.changes_told - found.place,
        swapped is not None,
        swapped is not None and swapped.exact_right,
    )
    return [float(value) for value in values]


def read_only(parsed: ParsedCaption) -> list[float]:
    """Of a protocol whose captions are not judged: only whether the grammar knows the words."""
    return [1.0, float(parsed.unreadable)] + [0.0] * (len(NAMES) - 2)


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
    columns={
        "predicted_type": "string",
        "type_right": "bool",
        "place_right": "bool",
        "exact_right": "bool",
        STATISTICS: "list<double>",
    },
    resampled=RESAMPLED,
    lower_is_better=("false_no_change", "false_changes", "unreadable"),
    java=False,
    needs_grammar=True,
)
