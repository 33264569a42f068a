"""Whether the base knows the words of the references: a tokenizer spells from pieces what its model has hardly seen."""

import re
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from m3diff.commands.plan.workload import read_columns
from m3diff.records.errors import readable

if TYPE_CHECKING:
    from tokenizers import Tokenizer

WORD = re.compile(r"[^\W\d_]+")
PIECES = 3
"""A word of so many tokens or more counts as spelled."""
TOO_MANY = 0.15  # share of the words; the embedded base spells 31 % of Spot-the-Diff's, and none of MiniChange's
EXAMPLES = 5


class Words(NamedTuple):
    """How the base's tokenizer takes the words of the references, each as often as it occurs."""

    vocabulary: int  # tokens
    words: int
    spelled: int
    examples: tuple[str, ...]  # the most frequent that are spelled

    @property
    def share(self) -> float:
        return self.spelled / self.words if self.words else 0.0

    def warning(self) -> str | None:
        """What is wrong with training on them; None where the base knows the words."""
        if self.share <= TOO_MANY:
            return None
        told = ", ".join(self.examples)
        return (
            f"the base does not know {self.share:.0%} of the words of the references ({told}): its vocabulary of "
            f"{self.vocabulary:,} tokens spells them from {PIECES} pieces or more. Fine-tuning teaches no language: "
            "name in train.base one that was pre-trained on such text (`m3diff profile small`, `one-gpu`, `paper` do)"
        )


def count_words(base: Path, mixture: Path) -> Words | None:
    """Count over the training samples; None where there are none, or the base has no `tokenizer.json`."""
    from tokenizers import Tokenizer

    shards = sorted((mixture / "train").glob("*.parquet"))
    if not shards or not (base / "tokenizer.json").is_file():
        return None
    with readable(base / "tokenizer.json", "fetch it again"):
        tokenizer = Tokenizer.from_file(str(base / "tokenizer.json"))
    counts: Counter[str] = Counter()
    references = read_columns(shards, "reference")["reference"]
    for reference, times in references.value_counts().iter_rows():
        for word in WORD.findall(reference):
            counts[word] += times
    found = [word for word, _ in counts.most_common() if is_spelled(tokenizer, word)]
    return Words(
        vocabulary=tokenizer.get_vocab_size(),
        words=counts.total(),
        spelled=sum(counts[word] for word in found),
        examples=tuple(found[:EXAMPLES]),
    )


def is_spelled(tokenizer: "Tokenizer", word: str) -> bool:
    """Within a sentence, so with the space before it."""
    return len(tokenizer.encode(f" {word}", add_special_tokens=False).tokens) >= PIECES
