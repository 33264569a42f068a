"""A judge: another model, asked through an OpenAI-compatible endpoint whether a caption says what its references say.

The score is the share of captions that it calls right, of those that it has a verdict on.

Nothing is asked unless `evaluate.metrics` names it. Texts alone are sent, never an image. Every question is stored with
its answer, so that no text is judged twice and anyone can read why a caption was called wrong.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, Self

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
from components.evaluate.params import JudgeSettings
from components.progress import progress

NO_VERDICT = "the judge gave no verdict that could be read; its answers stand in scores.parquet"
PROMPT = """Below are descriptions of what changed from one image to another.

Written by people, all of the same two images:
{references}

Written by a model:
- {prediction}

Does the model's description name the same change or changes as the people's, and nothing that did not happen? Wording
does not count. Answer with JSON alone: {{"right": true or false, "reason": "one short sentence"}}"""
ATTEMPTS = 2  # at an answer that is JSON
RETRIES = 5  # of a request that the server puts off (429) or fails (5xx); the client waits as the server asks
CONCURRENT = 8


class Verdict(NamedTuple):
    """`right` is None where the judge gave none; `answer` is what it said, or why there is nothing."""

    right: bool | None
    answer: str


def question(prediction: str, references: Sequence[str]) -> str:
    return PROMPT.format(prediction=prediction, references="\n".join(f"- {reference}" for reference in references))


class Judge:
    """The endpoint, with what it has answered so far in `store`, a line of JSON for each question."""

    def __init__(self, settings: JudgeSettings, store: Path) -> None:
        self.settings, self.store = settings, store
        self.known: dict[str, Verdict] = {}
        for line in store.read_text(encoding="utf-8").splitlines() if store.is_file() else ():
            entry = json.loads(line)
            if entry["model"] == settings.model and entry["url"] == settings.url:
                self.known[entry["question"]] = Verdict(entry["right"], entry["answer"])

    @classmethod
    def in_folder(cls, settings: JudgeSettings, folder: Path) -> Self:
        return cls(settings, folder / "judge.jsonl")

    def ask(self, questions: Sequence[str]) -> list[Verdict]:
        """The verdict on each question, in order.

        Raises:
            ScorerFailed: the endpoint cannot be reached, or refuses the key or the model.
        """
        import openai

        new = list(dict.fromkeys(text for text in questions if text not in self.known))
        if new:
            client = openai.OpenAI(
                base_url=self.settings.url,
                api_key=os.environ.get(self.settings.key_variable) or "none",
                max_retries=RETRIES,
                timeout=self.settings.timeout_s,
            )
            with client, ThreadPoolExecutor(CONCURRENT) as pool:
                try:
                    asked = pool.map(lambda text: self._verdict(client, text), new)
                    for text, verdict in zip(new, progress(asked, "evaluate: judge", len(new), "pair"), strict=True):
                        self._keep(text, verdict)
                except openai.OpenAIError as error:
                    pool.shutdown(cancel_futures=True)
                    raise ScorerFailed(
                        f"{self.settings.url}, model {self.settings.model!r}: {type(error).__name__}: {error}; see "
                        f"evaluate.judge and the environment variable {self.settings.key_variable}"
                    ) from error
        return [self.known[text] for text in questions]

    def _keep(self, text: str, verdict: Verdict) -> None:
        self.known[text] = verdict
        self.store.parent.mkdir(parents=True, exist_ok=True)
        entry = {"url": self.settings.url, "model": self.settings.model, "question": text, **verdict._asdict()}
        with self.store.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry, ensure_ascii=False) + "\n")

    def _verdict(self, client: Any, text: str) -> Verdict:
        verdict = Verdict(None, "")
        for _ in range(ATTEMPTS):
            reply = client.chat.completions.create(
                model=self.settings.model, messages=[{"role": "user", "content": text}], temperature=0
            )
            verdict = read_verdict(reply)
            if verdict.right is not None:
                break
        return verdict


def read_verdict(reply: Any) -> Verdict:
    """What a chat completion says; a refusal and anything but the JSON asked for is no verdict."""
    if not reply.choices:
        return Verdict(None, "no answer")
    message = reply.choices[0].message
    if getattr(message, "refusal", None):
        return Verdict(None, f"refused: {message.refusal}")
    said = message.content or ""
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
