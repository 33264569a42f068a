"""What a dataset's grammar says of the predictions: is the change of the right type, on the right object and place?"""

from collections.abc import Iterable

from components.evaluate.grammar import ParsedCaption
from components.evaluate.metrics.metric import (
    ALL,
    Groups,
    Metric,
    MetricScores,
    PairValue,
    Resampled,
    Tools,
    Value,
    ratio,
)
from components.evaluate.pairs import EvalPair

NO_GRAMMAR = (
    "no dataset of these pairs has a grammar that reads its references (records/<dataset>/grammar.json), so captions "
    "cannot be read for change type, object and place"
)


def compute(pairs: list[EvalPair], groups: Groups, tools: Tools) -> MetricScores:
    """Fractions over the pairs whose references a grammar understands; each kind of group has its own."""
    scores: dict[str, dict[str, Value]] = {}
    of_protocol = {i: tools.parsed[i] for i in groups[ALL] if i in tools.parsed}
    for group, ids in groups.items():
        parsed = [tools.parsed[i] for i in ids if i in tools.parsed]
        if group == ALL:
            scores[group] = change_scores(parsed)
        elif group == "multi_change":
            scores[group] = clause_scores(parsed)
        elif group.startswith("by_type/"):
            scores[group] = type_scores(parsed)
    return MetricScores(
        scores,
        {i: verdicts(parsed) for i, parsed in of_protocol.items()},
        {} if of_protocol else {"change_type_accuracy": NO_GRAMMAR},
    )


def fraction(flags: Iterable[bool]) -> float | None:
    """How many are true, of all; None of none."""
    known = list(flags)
    return sum(known) / len(known) if known else None


def change_scores(parsed: list[ParsedCaption]) -> dict[str, Value]:
    """The scores over all pairs: accuracies over those of one change, and "no change" where true and where false."""
    single = type_scores([caption for caption in parsed if len(caption.pair.changes) == 1])
    return {
        "change_type_accuracy": single["type_accuracy"],
        "change_exact_accuracy": single["exact_accuracy"],
        "no_change_recall": fraction(caption.says_no_change for caption in parsed if caption.pair.is_distractor),
        "false_no_change": fraction(caption.says_no_change for caption in parsed if caption.pair.changes),
    }


def type_scores(parsed: list[ParsedCaption]) -> dict[str, Value]:
    return {
        "type_accuracy": fraction(caption.type_right for caption in parsed),
        "exact_accuracy": fraction(caption.exact_right for caption in parsed),
    }


def clause_scores(parsed: list[ParsedCaption]) -> dict[str, Value]:
    """Precision and recall over the clauses of pairs of several changes, and the fractions of pairs wholly right."""
    clauses = sum(len(caption.predicted_clauses) for caption in parsed)
    changes = sum(caption.true_types.total() for caption in parsed)
    types, exact = (sum(caption.changes_found[kind] for caption in parsed) for kind in (0, 1))
    return {
        "changes": changes,
        "type_precision": types / clauses if clauses else None,
        "type_recall": types / changes if changes else None,
        "exact_precision": exact / clauses if clauses else None,
        "exact_recall": exact / changes if changes else None,
        "all_types_right": fraction(caption.type_right for caption in parsed),
        "all_exact_right": fraction(caption.exact_right for caption in parsed),
    }


def verdicts(parsed: ParsedCaption) -> dict[str, PairValue]:
    """`predicted_type`: the change type that the prediction names, or "none", "several", "unreadable"."""
    return {
        "predicted_type": parsed.predicted_type,
        "type_right": parsed.type_right,
        "exact_right": parsed.exact_right,
        STATISTICS: statistics(parsed),
    }


STATISTICS = "change_statistics"


def statistics(parsed: ParsedCaption) -> list[float]:
    """Numbers to sum over pairs: of one change, its type right, all right; a distractor, called unchanged; a pair with
    changes, called unchanged."""
    single, changed = len(parsed.pair.changes) == 1, bool(parsed.pair.changes)
    distractor, unchanged = parsed.pair.is_distractor, parsed.says_no_change
    flags = (
        single,
        single and parsed.type_right,
        single and parsed.exact_right,
        distractor,
        distractor and unchanged,
        changed,
        changed and unchanged,
    )
    return [float(flag) for flag in flags]


METRIC = Metric(
    compute,
    headline="change_type_accuracy",
    scores=(),
    overall=("change_type_accuracy", "change_exact_accuracy", "no_change_recall", "false_no_change"),
    columns={"predicted_type": "string", "type_right": "bool", "exact_right": "bool", STATISTICS: "list<double>"},
    resampled={
        "change_type_accuracy": Resampled(STATISTICS, ratio(1, 0)),
        "change_exact_accuracy": Resampled(STATISTICS, ratio(2, 0)),
        "no_change_recall": Resampled(STATISTICS, ratio(4, 3)),
        "false_no_change": Resampled(STATISTICS, ratio(6, 5)),
    },
    lower_is_better=("false_no_change",),
    java=False,
    needs_grammar=True,
)
