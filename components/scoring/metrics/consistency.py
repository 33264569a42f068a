"""Score whether a statement is judged rightly about all of its pairs, as NLVR2 does (nlvr2/eval/metrics.py).

A statement is made about up to four pairs of a set and is true of some of them. Consistency is the share of
statements whose judgements are right about every pair. A judgement is right if it equals the label, in any case and
without punctuation. The identifier `<split>-<set>-<pair>-<sentence>` of a question names its set and statement.

Scores of single questions do not add up to consistency, so it has no interval, and the gate cannot use it.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping

from m3diff.scoring.metrics import Metric, MetricInputs, MetricScores, Value
from m3diff.scoring.metrics.answers import is_exact_match, share_of_right
from m3diff.scoring.pairs import EvalPair, Groups

IDENTIFIER = re.compile(r"(?P<set>.+-\d+)-\d+-(?P<sentence>\d+)")
NO_IDENTIFIER = "no question has an identifier of the form <split>-<set>-<pair>-<sentence>"


def compute(pairs: list[EvalPair], groups: Groups, inputs: MetricInputs) -> MetricScores:
    """Score the statements of each group, as far as their pairs are in the group. Other questions are not scored."""
    del inputs
    rights = {pair.id: is_exact_match(pair.prediction, pair.references) for pair in pairs}
    scores: dict[str, dict[str, Value]] = {
        group: {METRIC.main_score: share_of_right(judge_statements(ids, rights))} for group, ids in groups.items()
    }
    has_statement = any(IDENTIFIER.fullmatch(pair_id) for pair_id in rights)
    return MetricScores(scores, {}, {} if has_statement else {METRIC.main_score: NO_IDENTIFIER})


def judge_statements(ids: Iterable[str], rights: Mapping[str, bool]) -> list[bool]:
    """Return for each statement whether all of its judgements are right.

    Args:
        ids: ids of the questions.
        rights: id -> whether the judgement is right.
    """
    rights_of_statement: dict[tuple[str, str], list[bool]] = defaultdict(list)
    for pair_id in ids:
        match = IDENTIFIER.fullmatch(pair_id)
        if match is not None:
            rights_of_statement[match["set"], match["sentence"]].append(rights[pair_id])
    return [all(judgements) for judgements in rights_of_statement.values()]


METRIC = Metric(
    compute,
    main_score="consistency",
    scores=("consistency",),
    java=False,
    records="questions",
    protocol_only=True,
)
