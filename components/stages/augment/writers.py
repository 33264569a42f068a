"""Writers: facts to texts. A new one has its settings in `params.py`, a class here and a line in `stage.py`. Its
`identity` names what decides its texts in addition to the parameters; `write` gives at most `n` texts for each of the
facts, in order.

`GrammarWriter` has MiniChange's templates: exact, and silent about what is not in MiniChange's words. `LanguageModel`
asks an endpoint, whose answers are kept by their content (components/endpoint.py), and uses those texts of an answer
that are usable; others are counted by reason. The papers' prompts are not published but for Syned's, in sense; these
are the project's own.
"""

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from m3diff.endpoint import REUSE_OPTION, Answer, Endpoint, Question, in_unicode
from m3diff.stages.augment.minichange import difference, paraphrase
from m3diff.stages.augment.params import Remote

# *paraphrase*: {"text": an instruction} in other words, as Syned's references; {"first": a caption of the image before}
# may be there, too. *difference*: {"first", "second": captions of two images} -> how the second image differs, as
# DiffCap's
Task = Literal["paraphrase", "difference"]

Facts = Mapping[str, str]
SYSTEM: dict[Task, str] = {
    "paraphrase": (
        "You vary instructions for an image editing model. Keep their meaning and every object, colour, number, text "
        "and place; be neutral and concise. Answer with a JSON list of strings alone."
    ),
    "difference": (
        "You say how a second image differs from a first one, of which you are told what each shows. Name the content "
        "that changed, from what and to what, and nothing that is not told. Answer with a JSON list of strings alone."
    ),
}
ASKED: dict[Task, str] = {
    "paraphrase": "INSTRUCTION: {text}\n\nWrite {n} variations of it, each worded in another way.",
    "difference": "FIRST IMAGE: {first}\nSECOND IMAGE: {second}\n\nWrite {n} descriptions of the difference.",
}
NUMBERED = re.compile(r"^\s*(?:\d+[.)]|[-*])\s+(.+?)\s*$", re.MULTILINE)


class Written(NamedTuple):
    """A writer's texts for one set of facts, all different, in order; and how many others were dropped, by reason."""

    texts: tuple[str, ...]
    dropped: Counter[str]


class GrammarWriter:
    identity = ""  # the parameters decide all

    def write(self, task: Task, facts: Sequence[Facts], n: int) -> list[Written]:
        if task == "paraphrase":
            texts = [paraphrase(each["text"], each.get("first")) for each in facts]
        else:
            texts = [difference(each["first"], each["second"], n) for each in facts]
        return [Written(tuple(of[:n]), Counter()) for of in texts]


class LanguageModel:
    def __init__(self, cfg: Remote, seed: int, store: Path) -> None:
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
        self.seed, self.identity = seed, cfg.model

    def write(self, task: Task, facts: Sequence[Facts], n: int) -> list[Written]:
        texts = [ASKED[task].format_map({**each, "n": n}) for each in facts]
        questions = [Question(text, system=SYSTEM[task], seed=self.seed) for text in texts]
        answers = self.endpoint.ask(questions, "augment: writer")
        return [usable(answer, n, each.get("text", "")) for answer, each in zip(answers, facts, strict=True)]


Writer = GrammarWriter | LanguageModel


def usable(answer: Answer, n: int, given: str) -> Written:
    """The texts of an answer, and how many were dropped: one that is empty, repeats another or what was given, or the
    whole of an answer that is refused, truncated or in no form that can be read."""
    dropped: Counter[str] = Counter()
    texts = read_texts(answer.text) if answer.kind == "text" else []
    if not texts:
        dropped["unreadable" if answer.kind == "text" else answer.kind] += 1
    kept: dict[str, str] = {}
    for text in texts:
        plain = _plain(text)
        if not plain:
            dropped["empty"] += 1
        elif plain in kept or plain == _plain(given):
            dropped["repeated"] += 1
        elif len(kept) == n:
            dropped["more than asked for"] += 1
        else:
            kept[plain] = " ".join(in_unicode(text).split())
    return Written(tuple(kept.values()), dropped)


def _plain(text: str) -> str:
    return " ".join(re.findall(r"\w+", text.lower()))


def read_texts(said: str) -> list[str]:
    """The first list of texts in JSON, wherever it is; else the lines of a numbered list."""
    for bracket in re.finditer(r"\[", said):
        try:
            found, _ = json.JSONDecoder().raw_decode(said, bracket.start())
        except (ValueError, RecursionError):
            continue
        if isinstance(found, list) and found and all(isinstance(text, str) for text in found):
            return found
    return [line.strip('"') for line in NUMBERED.findall(said)]
