"""Ask a judge whether captions match their references. The judge is a model behind an OpenAI-compatible endpoint.

The score is the share of captions that the judge calls right, out of the captions with a verdict.

The endpoint is used only if `evaluate.metrics` contains `judge`. It receives text but no images. Every question is
stored with its answer, so no text is judged twice and you can read why a caption was called wrong.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from pydantic import Field

from m3diff.endpoint.answers import EndpointAnswer, OtherServerError
from m3diff.endpoint.client import REUSE_OPTION, Endpoint
from m3diff.endpoint.questions import EndpointQuestion
from m3diff.endpoint.url import EndpointUrl
from m3diff.records.errors import cause_of
from m3diff.scoring.metrics import (
    JudgeVerdict,
    Metric,
    MetricInputs,
    MetricScores,
    PairValue,
    Value,
    mean_of,
    score_each_group,
)
from m3diff.scoring.metrics.java import ScorerFailed
from m3diff.scoring.pairs import ALL_PAIRS, EvalPair, Groups
from m3diff.settings.section import ParamsError, Section

PROMPT = """Below are descriptions of what changed from one image to another.

Written by people, all of the same two images:
{references}

Written by a model:
- {prediction}

Does the model's description name the same change or changes as the people's, and nothing that did not happen? Wording
does not count. Answer with JSON alone: {{"right": true or false, "reason": "one short sentence"}}"""
NO_VERDICT = "the judge gave no verdict that could be read; its answers stand in scores.parquet"


class JudgeSettings(Section):
    """Settings of the judge, another model that compares captions with their references."""

    url: EndpointUrl
    """URL of the OpenAI-compatible endpoint, up to and including /v1."""

    model: str = Field(min_length=1)
    """Name of the model at the endpoint."""

    pairs: int = Field(default=200, ge=1)
    """Maximum number of pairs to judge per protocol. More pairs give a narrower interval but need more questions."""

    timeout_s: int = Field(default=60, ge=1)
    """Maximum time to wait for an answer, in seconds."""

    key_variable: str = "OPENAI_API_KEY"
    """Name of the environment variable that holds the API key. The key itself is never written to a file."""

    reuse_answers: bool | None = None
    """What to do with stored answers that may come from another server. null stops with an error, true uses them, and
    false asks again."""


class Judge:
    """The judge's endpoint and the answers stored so far."""

    def __init__(self, settings: JudgeSettings, folder: Path) -> None:
        """Prepare the endpoint. Its answers are stored in `folder`/judge.jsonl."""
        self.settings = settings
        self.endpoint = Endpoint(
            url=settings.url,
            model=settings.model,
            key_variable=settings.key_variable,
            timeout_s=settings.timeout_s,
            store=folder / "judge.jsonl",
            reuse=settings.reuse_answers,
            option=f"{REUSE_OPTION} (evaluate.judge)",
        )

    def __call__(self, pairs: list[EvalPair]) -> dict[str, JudgeVerdict]:
        """Judge a sample of the pairs and return the verdicts by pair id."""
        sampled_pairs = sample_pairs(pairs, self.settings.pairs)
        questions = []
        for pair in sampled_pairs:
            references = "\n".join(f"- {reference}" for reference in pair.references)
            questions.append(PROMPT.format(prediction=pair.prediction, references=references))
        pair_ids = [pair.id for pair in sampled_pairs]
        return dict(zip(pair_ids, self.ask(questions), strict=True))

    def ask(self, questions: Sequence[str]) -> list[JudgeVerdict]:
        """Ask the questions and return a verdict for each, in order.

        Raises:
            ScorerFailed: the endpoint cannot be reached, or rejects the key or the model.
            OtherServerError: stored answers come from another server. This stops the stage. Otherwise, the report would
                lack the score only because `reuse_answers` is not set.
        """
        try:
            answers = self.endpoint.ask([EndpointQuestion(text) for text in questions], "evaluate: judge")
        except OtherServerError:
            raise
        except (ParamsError, ConnectionError) as error:
            variable = self.settings.key_variable
            raise ScorerFailed("scoring.judge_not_asked", cause=cause_of(error), variable=variable) from error
        return [read_verdict(answer) for answer in answers]


def read_verdict(answer: EndpointAnswer) -> JudgeVerdict:
    """Return the verdict in the judge's answer. A refusal or an answer without the requested JSON gives no verdict."""
    if answer.kind == "refused":
        return JudgeVerdict(None, f"refused: {answer.text}")
    if answer.kind == "empty":
        return JudgeVerdict(None, "no answer")
    text = answer.text
    try:
        is_right = json.loads(text[text.find("{") : text.rfind("}") + 1])["right"]
    except (ValueError, KeyError, TypeError):
        is_right = None
    return JudgeVerdict(is_right if isinstance(is_right, bool) else None, text or "no answer")


def sample_pairs(pairs: list[EvalPair], count: int) -> list[EvalPair]:
    """Return a sample of `count` pairs in their original order, or all pairs if there are fewer.

    Pairs are chosen by the hash of their ids, so every run judges the same pairs.
    """
    sorted_pairs = sorted(pairs, key=lambda pair: hashlib.sha256(pair.id.encode()).digest())
    sampled_ids = {pair.id for pair in sorted_pairs[:count]}
    return [pair for pair in pairs if pair.id in sampled_ids]


def compute(pairs: list[EvalPair], groups: Groups, inputs: MetricInputs) -> MetricScores:
    """Score a sample of at most `evaluate.judge.pairs` pairs of the protocol.

    Raises:
        ScorerFailed: no judge is configured, or its endpoint fails.
    """
    if inputs.judge is None:
        raise ScorerFailed("scoring.no_judge")
    verdicts = inputs.judge(pairs)

    def score_group(pair_ids: list[str]) -> dict[str, Value]:
        sampled_verdicts = [verdicts[pair_id].is_right for pair_id in pair_ids if pair_id in verdicts]
        readable_verdicts = [is_right for is_right in sampled_verdicts if is_right is not None]
        return {
            "judge": sum(readable_verdicts) / len(readable_verdicts) if readable_verdicts else None,
            "judge_answered": len(readable_verdicts) / len(sampled_verdicts) if sampled_verdicts else None,
        }

    group_scores = score_each_group(groups, score_group)
    pair_scores: dict[str, dict[str, PairValue]] = {
        pair_id: {"judge": verdict.is_right, "judge_answer": verdict.answer} for pair_id, verdict in verdicts.items()
    }
    absent = {} if group_scores[ALL_PAIRS]["judge"] is not None else {"judge": NO_VERDICT}
    return MetricScores(group_scores, pair_scores, absent)


METRIC = Metric(
    compute,
    main_score="judge",
    scores=("judge", "judge_answered"),
    columns={"judge": "bool", "judge_answer": "string"},
    resampled={"judge": mean_of("judge")},
    java=False,
    records="captions",
    extra_input="judge",
)
