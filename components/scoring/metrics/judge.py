"""A judge: another model, asked through an OpenAI-compatible endpoint whether a caption says what its references say.

The score is the share of captions that it calls right, of those that it has a verdict on.

Nothing is asked unless `evaluate.metrics` names it. Texts alone are sent, never an image. Every question is stored with
its answer, so that no text is judged twice and anyone can read why a caption was called wrong.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Self

from m3diff.endpoint import Answer, Endpoint, Question
from m3diff.scoring.metrics.metric import ALL, Groups, Metric, MetricScores, Tools, Value, mean_of, of_each_group
from m3diff.scoring.metrics.scorer import ScorerFailed
from m3diff.scoring.pairs import EvalPair
from m3diff.settings.section import ParamsError
from m3diff.stages.evaluate.params import JudgeSettings

NO_VERDICT = "the judge gave no verdict that could be read; its answers stand in scores.parquet"
PROMPT = """Below are descriptions of what changed from one image to another.

Written by people, all of the same two images:
{references}

Written by a model:
- {prediction}

Does the model's description name the same change or changes as the people's, and nothing that did not happen? Wording
does not count. Answer with JSON alone: {{"right": true or false, "reason": "one short sentence"}}"""
ATTEMPTS = 2  # at an answer that is JSON


class Verdict(NamedTuple):
    """`right` is None where the judge gave none; `answer` is what it said, or why there is nothing."""

    right: bool | None
    answer: str


UNKNOWN = Verdict(None, "")


def question(prediction: str, references: Sequence[str]) -> str:
    return PROMPT.format(prediction=prediction, references="\n".join(f"- {reference}" for reference in references))


class Judge:
    """The endpoint, with what it has answered so far in `store`."""

    def __init__(self, settings: JudgeSettings, store: Path) -> None:
        self.settings = settings
        self.endpoint = Endpoint(settings.url, settings.model, settings.key_variable, settings.timeout_s, store)

    @classmethod
    def in_folder(cls, settings: JudgeSettings, folder: Path) -> Self:
        return cls(settings, folder / "judge.jsonl")

    def ask(self, questions: Sequence[str]) -> list[Verdict]:
        """The verdict on each question, in order.

        Raises:
            ScorerFailed: the endpoint cannot be reached, or refuses the key or the model.
        """
        verdicts: dict[str, Verdict] = {}
        try:
            for attempt in range(ATTEMPTS):
                texts = [text for text in dict.fromkeys(questions) if verdicts.get(text, UNKNOWN).right is None]
                answers = self.endpoint.ask([Question(text, n=attempt) for text in texts], "evaluate: judge")
                verdicts |= {text: read_verdict(answer) for text, answer in zip(texts, answers, strict=True)}
        except (ParamsError, ConnectionError) as error:
            told = f"see evaluate.judge and the environment variable {self.settings.key_variable}"
            raise ScorerFailed(f"{error}; {told}") from error
        return [verdicts[text] for text in questions]


def read_verdict(answer: Answer) -> Verdict:
    """What the judge says; a refusal and anything but the JSON asked for is no verdict."""
    if answer.kind == "refused":
        return Verdict(None, f"refused: {answer.text}")
    if answer.kind == "empty":
        return Verdict(None, "no answer")
    said = answer.text
    start, end = said.find("{"), said.rfind("}")
    try:
        right = json.loads(said[start : end + 1])["right"]
    except (ValueError, KeyError, TypeError):
        return Verdict(None, said or "no answer")
    return Verdict(right, said) if isinstance(right, bool) else Verdict(None, said)


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
