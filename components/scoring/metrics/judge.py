"""A judge: another model, asked through an OpenAI-compatible endpoint whether a caption says what its references say.

The score is the share of captions that it calls right, of those that it has a verdict on.

Nothing is asked unless `evaluate.metrics` names it. Texts alone are sent, never an image. Every question is stored with
its answer, so that no text is judged twice and anyone can read why a caption was called wrong.
"""

import hashlib

from m3diff.scoring.metrics.metric import ALL, Groups, Metric, MetricScores, Tools, Value, mean_of, of_each_group
from m3diff.scoring.metrics.scorer import ScorerFailed
from m3diff.scoring.metrics.verdicts import question
from m3diff.scoring.pairs import EvalPair


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


NO_VERDICT = "the judge gave no verdict that could be read; its answers stand in scores.parquet"

METRIC = Metric(
    compute,
    headline="judge",
    scores=("judge", "judge_answered"),
    columns={"judge": "bool", "judge_answer": "string"},
    resampled={"judge": mean_of("judge")},
    java=False,
    optional=True,
)
