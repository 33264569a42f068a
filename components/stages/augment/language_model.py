"""A writer that asks a language model, and what of its answers is a text.

The papers' prompts are not published but for Syned's, in sense; these are the project's own. Answers are kept by their
content (components/endpoint.py). Of an answer a text is used that is one; what is dropped is counted by reason.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Sequence

from m3diff.endpoint import Answer, Question, in_unicode
from m3diff.stages.augment.parts import Facts, Task, Written

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
REFUSAL = re.compile(
    r"^\W*(?:(?:I'm|I am) (?:sorry|just an? AI|an? AI|not able|unable)|Sorry\b|I (?:cannot|can't|can not)\b|"
    r"As an? AI\b|I apologi[sz]e)",
    re.IGNORECASE,
)


class LanguageModel:
    """A language model that is asked by `ask`."""

    def __init__(self, ask: Callable[[Sequence[Question], str], list[Answer]], seed: int, identity: str) -> None:
        self.ask, self.seed, self.identity = ask, seed, identity

    def write(self, task: Task, facts: Sequence[Facts], n: int) -> list[Written]:
        asked = [ASKED[task].format_map({**each, "n": n}) for each in facts]
        answers = self.ask([Question(text, system=SYSTEM[task], seed=self.seed) for text in asked], "augment: writer")
        return [usable(answer, n, each.get("text", "")) for answer, each in zip(answers, facts, strict=True)]


def usable(answer: Answer, n: int, given: str) -> Written:
    """The texts of an answer, and how many were dropped: a refusal, one that is empty, repeats another or what was
    given, or the whole of an answer that is cut or in no form that can be read."""
    dropped: Counter[str] = Counter()
    if answer.kind != "text":
        dropped[answer.kind] += 1
        return Written((), dropped)
    texts = read_texts(answer.text, n)
    if texts is None:
        dropped["refused" if REFUSAL.search(answer.text) else "unreadable"] += 1
        return Written((), dropped)
    kept: dict[str, str] = {}
    for text in texts:
        plain = _plain(text)
        if not plain:
            dropped["empty"] += 1
        elif REFUSAL.search(text):
            dropped["refused"] += 1
        elif plain in kept or plain == _plain(given):
            dropped["repeated"] += 1
        elif len(kept) == n:
            dropped["more than asked for"] += 1
        else:
            kept[plain] = " ".join(in_unicode(text).split())
    return Written(tuple(kept.values()), dropped)


def _plain(text: str) -> str:
    """The words alone, for comparing."""
    return " ".join(re.findall(r"\w+", text.lower()))


def read_texts(said: str, n: int) -> list[str] | None:
    """The first list of texts in JSON, wherever it stands; else the lines of a numbered list; of one text, also the
    text itself. None where it is none of these."""
    for bracket in re.finditer(r"\[", said):
        try:
            found, _ = json.JSONDecoder().raw_decode(said, bracket.start())
        except (ValueError, RecursionError):
            continue
        if isinstance(found, list) and found and all(isinstance(text, str) for text in found):
            return found
    if lines := NUMBERED.findall(said):
        return [line.strip('"') for line in lines]
    plain = said.strip()
    is_text = n == 1 and "\n" not in plain and not plain.startswith(("[", "{"))
    return [plain] if is_text and not REFUSAL.search(said) else None
