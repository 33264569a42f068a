"""What is asked for: which model at which endpoint, in which words, about how many pairs."""

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path

from m3diff.endpoint import on_this_machine

PROMPT = (
    "The two images come in order: the first was taken before, the second after. {question} "
    "Answer with one plain sentence of what changed, and nothing else."
)
"""The project's own: the paper whose zero-shot scores are published (arXiv 2503.11093 v2) prints none."""


@dataclass(frozen=True)
class Request:
    """A model behind an endpoint as a captioner."""

    url: str  # up to and with /v1
    model: str
    prompt: str = PROMPT  # {question} stands for the pair's own, which predict asks
    key_variable: str = "OPENAI_API_KEY"  # the environment variable that holds the key; no key stands in a file
    max_tokens: int | None = None  # of an answer; None: as the server has it
    limit: int = 0  # pairs of the test split; 0: all
    timeout_s: int = 120  # of one question
    allow_unlicensed: bool = False

    @property
    def leaves_the_machine(self) -> bool:
        """Whether the images go to another machine than this one."""
        return not on_this_machine(self.url)

    def words(self, question: str) -> str:
        """What is said beside the images of a pair."""
        return self.prompt.replace("{question}", question)

    def place(self, scratch: Path) -> Path:
        """Where the result lies by default: named by the model, and by a hash of all that decides it."""
        decides = [self.model, self.url, self.prompt, self.max_tokens, self.limit]
        digest = hashlib.sha256(json.dumps(decides).encode()).hexdigest()[:8]
        return scratch / "evaluated" / f"zero-shot-{re.sub(r'[^A-Za-z0-9_.]+', '-', self.model)[:80]}-{digest}"
