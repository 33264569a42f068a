"""A judge: another model, asked through an OpenAI-compatible endpoint whether a caption says what its references say.

The score is the share of captions that it calls right, of those that it has a verdict on.

Nothing is asked unless `evaluate.metrics` names it. Texts alone are sent, never an image. Every question is stored with
its answer, so that no text is judged twice and anyone can read why a caption was called wrong.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from pydantic import Field

from m3diff.endpoint import REUSE_OPTION, Answer, Endpoint, EndpointUrl, OtherServerError, Question
from m3diff.scoring.metrics import Metric, MetricScores, Tools, Value, mean_of, of_each_group
from m3diff.scoring.metrics.java import ScorerFailed
from m3diff.scoring.pairs import ALL, EvalPair, Groups
from m3diff.settings.section import ParamsError, Section

PROMPT = """Below are descriptions of what changed from one image to another.

Written by people, all of the same two images:
{references}

Written by a model:
- {prediction}

Does the model's description name the same change or changes as the people's, and nothing that did not happen? Wording
does not count. Answer with JSON alone: {{"right": true or false, "reason": "one short sentence"}}"""
# Right, None where the judge gave no verdict; and what it said, or why there is nothing
Verdict = tuple[bool | None, str]
NO_VERDICT = "the judge gave no verdict that could be read; its answers stand in scores.parquet"


class JudgeSettings(Section):
    """Another model that reads captions beside their references, at an OpenAI-compatible endpoint."""

    url: EndpointUrl  # up to and with /v1
    model: str = Field(min_length=1)
    pairs: int = Field(default=200, ge=1)  # of each protocol at most
    timeout_s: int = Field(default=60, ge=1)
    key_variable: str = "OPENAI_API_KEY"  # the environment variable that holds the key; no key stands in a file
    # Stored answers that are not known to be of this server. null: refuse them; true: use them; false: ask anew
    reuse_answers: bool | None = None


class Judge:
    """The endpoint, with what it has answered so far in `folder`/judge.jsonl."""

    def __init__(self, settings: JudgeSettings, folder: Path) -> None:
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

    def __call__(self, pairs: list[EvalPair]) -> dict[str, Verdict]:
        """The verdicts on a sample of the pairs, by id."""
        chosen = sample(pairs, self.settings.pairs)
        questions = []
        for pair in chosen:
            references = "\n".join(f"- {reference}" for reference in pair.references)
            questions.append(PROMPT.format(prediction=pair.prediction, references=references))
        return dict(zip((pair.id for pair in chosen), self.ask(questions), strict=True))

    def ask(self, questions: Sequence[str]) -> list[Verdict]:
        """The verdict on each question, in order.

        Raises:
            ScorerFailed: the endpoint cannot be reached, or refuses the key or the model.
            OtherServerError: stored answers are of another server. It ends the stage: a score that is absent because
                a parameter is would be published as a result.
        """
        try:
            answers = self.endpoint.ask([Question(text) for text in questions], "evaluate: judge")
        except OtherServerError:
            raise
        except (ParamsError, ConnectionError) as error:
            told = f"see evaluate.judge and the environment variable {self.settings.key_variable}"
            raise ScorerFailed(f"{error}; {told}") from error
        return [read_verdict(answer) for answer in answers]


def read_verdict(answer: Answer) -> Verdict:
    """The judge's verdict; a refusal and anything but the JSON asked for is none."""
    if answer.kind in ("refused", "empty"):
        return None, f"refused: {answer.text}" if answer.kind == "refused" else "no answer"
    said = answer.text
    try:
        right = json.loads(said[said.find("{") : said.rfind("}") + 1])["right"]
    except (ValueError, KeyError, TypeError):
        right = None
    return right if isinstance(right, bool) else None, said or "no answer"


def sample(pairs: list[EvalPair], count: int) -> list[EvalPair]:
    """`count` of the pairs, or all, in their order; by the hash of their ids, so that a run chooses as the last did."""
    ranked = sorted(pairs, key=lambda pair: hashlib.sha256(pair.id.encode()).digest())
    chosen = {pair.id for pair in ranked[:count]}
    return [pair for pair in pairs if pair.id in chosen]


def compute(pairs: list[EvalPair], groups: Groups, tools: Tools) -> MetricScores:
    """Over a sample of at most `evaluate.judge.pairs` pairs of the protocol.

    Raises:
        ScorerFailed: no judge is named, or it cannot be asked.
    """
    if tools.judge is None:
        raise ScorerFailed("no judge is named: set evaluate.judge to {url: ..., model: ...}")
    verdicts = tools.judge(pairs)

    def scores(ids: list[str]) -> dict[str, Value]:
        rights = [verdicts[i][0] for i in ids if i in verdicts]
        known = [right for right in rights if right is not None]
        return {
            "judge": sum(known) / len(known) if known else None,
            "judge_answered": len(known) / len(rights) if rights else None,
        }

    found = of_each_group(groups, scores)
    return MetricScores(
        found,
        {i: {"judge": right, "judge_answer": answer} for i, (right, answer) in verdicts.items()},
        {} if found[ALL]["judge"] is not None else {"judge": NO_VERDICT},
    )


METRIC = Metric(
    compute,
    headline="judge",
    scores=("judge", "judge_answered"),
    columns={"judge": "bool", "judge_answer": "string"},
    resampled={"judge": mean_of("judge")},
    java=False,
    optional=True,
)
