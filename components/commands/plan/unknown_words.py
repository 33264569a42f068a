"""Count the words that the base hardly knows because its tokenizer splits them into pieces."""

from dataclasses import dataclass
from pathlib import Path

import polars as pl
from tokenizers import Tokenizer

from m3diff.commands.plan.mixture import has_mixture, read_samples
from m3diff.records.errors import Fault, data_error_if_unreadable

WORD = r"[^\W\d_]+"  # letters only

SPELLED_TOKENS = 3  # a word with at least this many tokens counts as spelled, that is, split into pieces

# Share of spelled words above which the user is warned. The embedded base spells 31 % of the words of Spot-the-Diff and
# none of MiniChange
MAX_SPELLED_SHARE = 0.15

EXAMPLES = 5


@dataclass(frozen=True)
class WordCount:
    """Counts of the words in the references. Repeated words count each time.

    Attributes:
        vocabulary: number of tokens in the tokenizer's vocabulary.
        words: total number of words.
        spelled: number of words that the tokenizer splits into pieces.
        examples: the most frequent words that are split into pieces.
    """

    vocabulary: int
    words: int
    spelled: int
    examples: tuple[str, ...]

    @property
    def spelled_share(self) -> float:
        """Share of the words that the tokenizer splits into pieces, from 0 to 1, or 0 if there are no words."""
        return self.spelled / self.words if self.words else 0.0

    def warning(self) -> Fault | None:
        """Return a warning about training on these words, or None if the base knows enough of them."""
        if self.spelled_share <= MAX_SPELLED_SHARE:
            return None
        return Fault(
            "plan.unknown_words",
            share=self.spelled_share,
            names=self.examples,
            vocabulary=self.vocabulary,
            pieces=SPELLED_TOKENS,
        )


def count_words(base: Path, mixture: Path) -> WordCount | None:
    """Count the words of the mixture's training references.

    Returns None if there is no mixture or the base has no `tokenizer.json`.

    Raises:
        DataError: a file cannot be read.
    """
    file = base / "tokenizer.json"
    if not has_mixture(mixture) or not file.is_file():
        return None
    with data_error_if_unreadable(file, "files.unreadable"):
        tokenizer = Tokenizer.from_file(str(file))
    references = read_samples(mixture / "train", ["answer"])["answer"]
    words = references.str.extract_all(WORD).explode().drop_nulls().alias("word")
    counts = words.value_counts().sort(pl.col("count"), pl.col("word"), descending=[True, False])
    spelled = counts.filter(pl.Series([is_spelled(tokenizer, word) for word in counts["word"]], dtype=pl.Boolean))
    return WordCount(
        vocabulary=tokenizer.get_vocab_size(),
        words=words.len(),
        spelled=int(spelled["count"].sum()),
        examples=tuple(spelled["word"].head(EXAMPLES)),
    )


def is_spelled(tokenizer: Tokenizer, word: str) -> bool:
    """Return whether the tokenizer splits the word into pieces. The word is encoded after a space, as in a text."""
    return len(tokenizer.encode(f" {word}", add_special_tokens=False).tokens) >= SPELLED_TOKENS
