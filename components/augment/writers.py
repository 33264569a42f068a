"""Writers: facts -> captions. A new one is a class here and a line in `load_writer`.

Two tasks. *paraphrase*: {"text": an instruction} in other words, as Syned's references; {"first": a caption of the
image before} may be there, too. *difference*: {"first", "second": captions of two images} -> how the second image
differs, as DiffCap's. The papers' prompts are not published but for Syned's, in sense; these are the project's own.

A language model's answers are kept by their content (components/endpoint.py). Of what it says a text is used that is
one; what is dropped is counted by reason.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from components.augment.params import Grammar, Local, Remote
from components.augment.weights import identity
from components.augment.words import difference, paraphrase
from components.endpoint import Answer, Answers, Endpoint, Question, key_of
from components.progress import progress

if TYPE_CHECKING:
    from components.models.device import Device

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
REFUSAL = re.compile(
    r"^\W*(?:(?:I'm|I am) (?:sorry|just an? AI|an? AI|not able|unable)|Sorry\b|I (?:cannot|can't|can not)\b|"
    r"As an? AI\b|I apologi[sz]e)",
    re.IGNORECASE,
)


class Written(NamedTuple):
    """What a writer gives for one set of facts: different texts, in order, and how many others were dropped, why."""

    texts: tuple[str, ...]
    dropped: Counter[str]


class Writer(Protocol):
    @property
    def identity(self) -> str:
        """Names what decides its texts beside the parameters."""

    def write(self, task: Task, facts: Sequence[Facts], n: int) -> list[Written]:
        """At most `n` texts for each of the facts, in order.

        Raises:
            ParamsError: an endpoint refuses the key, the model or the form of a question.
            ConnectionError: it cannot be reached; what it answered is kept.
        """


def load_writer(cfg: Grammar | Remote | Local, seed: int, store: Path, device: Device) -> Writer:
    match cfg:
        case Grammar():
            return GrammarWriter()
        case Remote():
            endpoint = Endpoint(cfg.url, cfg.model, cfg.key_variable, cfg.timeout_s, store, cfg.max_tokens)
            return LanguageModel(lambda questions: endpoint.ask(questions, "augment: writer"), seed, cfg.model)
        case Local():
            model = LocalLanguageModel(cfg, store, device)
            return LanguageModel(model.ask, seed, model.identity)


class GrammarWriter:
    """MiniChange's templates: exact, and silent about what is not in MiniChange's words."""

    identity = ""

    def write(self, task: Task, facts: Sequence[Facts], n: int) -> list[Written]:
        return [Written(tuple(self._texts(task, each, n)[:n]), Counter()) for each in facts]

    def _texts(self, task: Task, facts: Facts, n: int) -> list[str]:
        if task == "paraphrase":
            return paraphrase(facts["text"], facts.get("first"))
        return difference(facts["first"], facts["second"], n)


class LanguageModel:
    """A language model that is asked by `ask`."""

    def __init__(self, ask: Callable[[Sequence[Question]], list[Answer]], seed: int, identity: str) -> None:
        self.ask, self.seed, self.identity = ask, seed, identity

    def write(self, task: Task, facts: Sequence[Facts], n: int) -> list[Written]:
        asked = [ASKED[task].format_map({**each, "n": n}) for each in facts]
        answers = self.ask([Question(text, system=SYSTEM[task], seed=self.seed) for text in asked])
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
            kept[plain] = " ".join(text.split())
    return Written(tuple(kept.values()), dropped)


def _plain(text: str) -> str:
    """The words alone, for comparing."""
    return " ".join(re.findall(r"\w+", text.lower()))


def read_texts(said: str, n: int) -> list[str] | None:
    """A JSON list of texts, wherever it stands; else the lines of a numbered list; of one text, also the text itself.
    None where it is none of these."""
    start, end = said.find("["), said.rfind("]")
    if start >= 0:
        try:
            found = json.loads(said[start : end + 1])
        except ValueError:
            return None
        return found if isinstance(found, list) and all(isinstance(text, str) for text in found) else None
    if lines := NUMBERED.findall(said):
        return [line.strip('"') for line in lines]
    return [said.strip()] if n == 1 and "\n" not in said.strip() and not REFUSAL.search(said) else None


class LocalLanguageModel:
    """A causal language model of transformers in a folder, decoded greedily. Its answers are kept as an endpoint's."""

    def __init__(self, cfg: Local, store: Path, device: Device) -> None:
        self.cfg, self.device, self.identity = cfg, device, identity(cfg)
        self.answers = Answers(store)
        self.model: Any = None
        self.tokenizer: Any = None

    def ask(self, questions: Sequence[Question]) -> list[Answer]:
        facts = [self._facts(question) for question in questions]
        new = {key_of(known): (known, question) for known, question in zip(facts, questions, strict=True)}
        new = {key: value for key, value in new.items() if key not in self.answers.known}
        for key, (known, question) in progress(new.items(), "augment: writer", len(new), "question"):
            self.answers.keep(key, known, self._answer(question))
        return [self.answers.known[key_of(known)] for known in facts]

    def _facts(self, question: Question) -> dict[str, Any]:
        asked = {"system": question.system, "question": question.text}
        return {"model": self.identity, **asked, "max_tokens": self.cfg.max_tokens}

    def _answer(self, question: Question) -> Answer:
        import torch

        if self.model is None:
            self._load()
        ids = self._prompt(question).to(self.device.torch)
        with torch.inference_mode():
            made = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                num_beams=1,
                max_new_tokens=self.cfg.max_tokens,
                pad_token_id=self.tokenizer.pad_token_id or 0,
            )[0, ids.shape[1] :]
        text = self.tokenizer.decode(made, skip_special_tokens=True).strip()
        if len(made) == self.cfg.max_tokens and int(made[-1]) not in self._ends():
            return Answer("cut", text)
        return Answer("text", text) if text else Answer("empty", "")

    def _load(self) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        options: dict[str, Any] = {"local_files_only": True}
        self.tokenizer = AutoTokenizer.from_pretrained(str(self.cfg.model), **options)
        model: Any = AutoModelForCausalLM.from_pretrained(
            str(self.cfg.model), dtype=self.device.dtype, use_safetensors=True, **options
        )
        self.model = model.to(self.device.torch).eval()

    def _prompt(self, question: Question) -> Any:
        """Token ids [1, tokens]: by the tokenizer's chat template, or as plain text where it has none."""
        if self.tokenizer.chat_template is None:
            return self.tokenizer(f"{question.system}\n\n{question.text}\n\n", return_tensors="pt").input_ids
        messages = [{"role": "system", "content": question.system}, {"role": "user", "content": question.text}]
        return self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )["input_ids"]

    def _ends(self) -> set[int]:
        ends = self.model.generation_config.eos_token_id
        return set(ends) if isinstance(ends, list) else {ends}
