"""The share of captions that a judge (`components/evaluate/judge.py`) calls right, of those that it has a verdict on."""

import hashlib

from components.evaluate.judge import question
from components.evaluate.metrics.metric import (
    ALL,
    Groups,
    Metric,
    MetricScores,
    Tools,
    Value,
    mean_of,
    of_each_group,
)
from components.evaluate.metrics.scorer import ScorerFailed
from components.evaluate.pairs import EvalPair

NO_VERDICT = "the judge gave no verdict that could be read; its answers stand in scores.parquet"


def compute(pairs: list[EvalPair], groups: Groups, tools: Tools) -> MetricScores:
    """Over a sample of at most `evaluate.judge.pairs` pairs of the protocol.

    Raises:
        ScorerFailed: no judge is named, or it cannot be asked.
    """
    if tools.judge is None:
        raise ScorerFailed("no judge is named: set evaluate.judge to {url: ..., model: ...}")
    chosen = sample(pairs, tools.judge.settings.pairs)
    verdicts = tools.judge.ask([question(pair.prediction, pair.references) for pair in chosen])
    of_pairs = {pair.id: verdict for pair, verdict in zip(chosen, verdicts, strict=True)}

    def scores(ids: list[str]) -> dict[str, Value]:
        rights = [of_pairs[i].right for i in ids if i in of_pairs]
        known = [right for right in rights if right is not None]
        return {
            "judge": sum(known) / len(known) if known else None,
            "judge_answered": len(known) / len(rights) if rights else None,
        }

    found = of_each_group(groups, scores)
    return MetricScores(
        found,
        {i: {"judge": verdict.right, "judge_answer": verdict.answer} for i, verdict in of_pairs.items()},
        {} if found[ALL]["judge"] is not None else {"judge": NO_VERDICT},
    )


def sample(pairs: list[EvalPair], count: int) -> list[EvalPair]:
    """`count` of the pairs, or all, in their order; by the hash of their ids, so that a run chooses as the last did."""
    ranked = sorted(pairs, key=lambda pair: hashlib.sha256(pair.id.encode()).digest())
    chosen = {pair.id for pair in ranked[:count]}
    return [pair for pair in pairs if pair.id in chosen]


METRIC = Metric(
    compute,
    headline="judge",
    scores=("judge", "judge_answered"),
    columns={"judge": "bool", "judge_answer": "string"},
    resampled={"judge": mean_of("judge")},
    java=False,
    optional=True,
)
