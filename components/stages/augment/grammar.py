"""A writer without weights: MiniChange's templates, exact, and silent about what is not in MiniChange's words."""

from collections import Counter
from collections.abc import Sequence

from m3diff.stages.augment.parts import Facts, Task, Written
from m3diff.stages.augment.words import difference, paraphrase


class GrammarWriter:
    identity = ""

    def write(self, task: Task, facts: Sequence[Facts], n: int) -> list[Written]:
        return [Written(tuple(self._texts(task, each, n)[:n]), Counter()) for each in facts]

    def _texts(self, task: Task, facts: Facts, n: int) -> list[str]:
        if task == "paraphrase":
            return paraphrase(facts["text"], facts.get("first"))
        return difference(facts["first"], facts["second"], n)
