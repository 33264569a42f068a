"""A judge: another model, asked through an OpenAI-compatible endpoint whether a caption says what its references say.

Texts alone are sent, never an image. Every question is stored with its answer, so that no text is judged twice and
anyone can read why a caption was called wrong.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Self

from pydantic import Field

from m3diff.endpoint import Answer, Endpoint, EndpointUrl, Question
from m3diff.scoring.metrics.scorer import ScorerFailed
from m3diff.settings.section import ParamsError, Section

PROMPT = """Below are descriptions of what changed from one image to another.

Written by people, all of the same two images:
{references}

Written by a model:
- {prediction}

Does the model's description name the same change or changes as the people's, and nothing that did not happen? Wording
does not count. Answer with JSON alone: {{"right": true or false, "reason": "one short sentence"}}"""
ATTEMPTS = 2  # at an answer that is JSON


class JudgeSettings(Section):
    """Another model that reads captions beside their references, at an OpenAI-compatible endpoint."""

    url: EndpointUrl  # up to and with /v1
    model: str = Field(min_length=1)
    pairs: int = Field(default=200, ge=1)  # of each protocol at most
    timeout_s: int = Field(default=60, ge=1)
    key_variable: str = "OPENAI_API_KEY"  # the environment variable that holds the key; no key stands in a file


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
