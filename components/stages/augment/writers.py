"""Writers, which paraphrase instructions or describe the difference between two captioned images.

To add a writer, add its settings to `params.py`, a class to this module and a line to `stage.py`. The class needs an
attribute `identity`, which identifies everything besides the parameters that determines the texts, and a method
`write`, which returns at most `count` texts per set of facts, in order.

`GrammarWriter` uses MiniChange's sentence templates. Its texts are always correct, but it does not write any about
facts outside MiniChange's vocabulary. `LanguageModel` asks an endpoint, stores the answers (components/endpoint) and
uses the valid texts in them. Invalid texts are counted by reason. We wrote the prompts ourselves, because only one of
the papers (Syned) describes its prompt.
"""

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from m3diff.endpoint.answers import EndpointAnswer
from m3diff.endpoint.client import REUSE_OPTION, Endpoint
from m3diff.endpoint.questions import EndpointQuestion, replace_surrogates
from m3diff.stages.augment.minichange import describe_difference, paraphrase
from m3diff.stages.augment.params import EndpointWriterSettings

# paraphrase: reword the instruction `text`, as in Syned. `first` may be a caption of the before image.
# difference: describe how the second image differs from the first, as in DiffCap, given their captions `first` and
# `second`
WriterTask = Literal["paraphrase", "difference"]

Facts = Mapping[str, str]
SYSTEM_PROMPTS: dict[WriterTask, str] = {
    "paraphrase": (
        "You vary instructions for an image editing model. Keep their meaning and every object, colour, number, text "
        "and place; be neutral and concise. Answer with a JSON list of strings alone."
    ),
    "difference": (
        "You say how a second image differs from a first one, of which you are told what each shows. Name the content "
        "that changed, from what and to what, and nothing that is not told. Answer with a JSON list of strings alone."
    ),
}
PROMPTS: dict[WriterTask, str] = {
    "paraphrase": "INSTRUCTION: {text}\n\nWrite {n} variations of it, each worded in another way.",
    "difference": "FIRST IMAGE: {first}\nSECOND IMAGE: {second}\n\nWrite {n} descriptions of the difference.",
}
NUMBERED = re.compile(r"^\s*(?:\d+[.)]|[-*])\s+(.+?)\s*$", re.MULTILINE)


class WriterOutput(NamedTuple):
    """A writer's texts for one set of facts, without repetitions, and the number of dropped texts by reason."""

    texts: tuple[str, ...]
    dropped_texts: Counter[str]


class GrammarWriter:
    """Writes texts with MiniChange's sentence templates."""

    identity = ""  # the texts depend only on the parameters

    def write(self, task: WriterTask, facts: Sequence[Facts], count: int) -> list[WriterOutput]:
        """Return at most `count` texts per set of facts."""
        if task == "paraphrase":
            all_texts = [paraphrase(entry["text"], entry.get("first")) for entry in facts]
        else:
            all_texts = [describe_difference(entry["first"], entry["second"], count) for entry in facts]
        return [WriterOutput(texts=tuple(texts[:count]), dropped_texts=Counter()) for texts in all_texts]


class LanguageModel:
    """Writes texts with a language model behind an OpenAI-compatible endpoint. Its answers are stored in a file."""

    def __init__(self, cfg: EndpointWriterSettings, seed: int, store: Path) -> None:
        self.endpoint = Endpoint(
            url=cfg.url,
            model=cfg.model,
            key_variable=cfg.key_variable,
            timeout_s=cfg.timeout_s,
            store=store,
            max_tokens=cfg.max_tokens,
            reuse=cfg.reuse_answers,
            option=f"{REUSE_OPTION} (the entry's writer in `augment`)",
        )
        self.seed = seed
        self.identity = cfg.model

    def write(self, task: WriterTask, facts: Sequence[Facts], count: int) -> list[WriterOutput]:
        """Return at most `count` texts per set of facts.

        Raises:
            ParamsError: the endpoint rejects the key or the model.
            OtherServerError: stored answers may come from another server, and the settings do not specify what to do
                with them.
            ConnectionError: the endpoint cannot be reached or does not answer in time.
        """
        questions = []
        for entry in facts:
            prompt = PROMPTS[task].format_map({**entry, "n": count})
            questions.append(EndpointQuestion(prompt, system=SYSTEM_PROMPTS[task], seed=self.seed))
        answers = self.endpoint.ask(questions, "augment: writer")
        return [
            select_texts(answer, count, original=entry.get("text", ""))
            for answer, entry in zip(answers, facts, strict=True)
        ]


Writer = GrammarWriter | LanguageModel


def select_texts(answer: EndpointAnswer, count: int, original: str) -> WriterOutput:
    """Select the valid texts in an answer, and count the dropped texts by reason.

    A text is dropped if it is empty, or if it repeats the original or another text. No texts are taken from an answer
    that is a refusal, is truncated or has an unknown format.

    Args:
        answer: answer of an endpoint.
        count: maximum number of texts to return.
        original: the text to paraphrase, or an empty string if there is none.
    """
    dropped_texts: Counter[str] = Counter()
    texts = read_texts(answer.text) if answer.kind == "text" else []
    if not texts:
        dropped_texts["unreadable" if answer.kind == "text" else answer.kind] += 1
    valid_texts: dict[str, str] = {}  # keys are the texts in lowercase without punctuation
    for text in texts:
        words = _plain_words(text)
        if not words:
            dropped_texts["empty"] += 1
        elif words in valid_texts or words == _plain_words(original):
            dropped_texts["repeated"] += 1
        elif len(valid_texts) == count:
            dropped_texts["more than asked for"] += 1
        else:
            valid_texts[words] = " ".join(replace_surrogates(text).split())
    return WriterOutput(texts=tuple(valid_texts.values()), dropped_texts=dropped_texts)


def _plain_words(text: str) -> str:
    """Return the text in lowercase and without punctuation."""
    return " ".join(re.findall(r"\w+", text.lower()))


def read_texts(answer: str) -> list[str]:
    """Return the strings in the first JSON list of an answer, or else the items of a numbered or bulleted list."""
    for bracket in re.finditer(r"\[", answer):
        try:
            value, _ = json.JSONDecoder().raw_decode(answer, bracket.start())
        except (ValueError, RecursionError):
            continue
        if isinstance(value, list) and value and all(isinstance(text, str) for text in value):
            return value
    return [line.strip('"') for line in NUMBERED.findall(answer)]
