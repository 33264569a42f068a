"""Describe odd captions: captions that were probably not written by a person, such as the refusals of a chat model."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class OddKind:
    """A kind of odd captions. `description` completes the sentence "3 captions ...", `remedy` says how to fix them."""

    description: str
    remedy: str


ODD_KINDS = {
    "refusals": OddKind(
        "are refusals or other answers of a chat model",
        "write new captions, or remove the rows",
    ),
    "roles": OddKind("contain a role or a prompt of a chat", "keep only the answer"),
    "chat": OddKind(
        "contain words of a chat model to its user, or a heading",
        "keep only the caption",
    ),
    "tokens": OddKind("contain special tokens or tags", "remove the tokens and tags"),
    "literals": OddKind("contain JSON or another literal", "write the text inside the literal"),
    "markup": OddKind("contain Markdown, LaTeX or HTML", "write plain text"),
    "encoding": OddKind(
        "contain text that was read in a wrong encoding",
        "write the file again from its source as UTF-8; `ftfy` can repair text without a source",
    ),
    "escapes": OddKind(
        "contain escape sequences or control characters",
        "write the characters that they stand for",
    ),
    "repeats": OddKind(
        "have the same caption",
        "write captions that say what changed in each pair",
    ),
}


@dataclass(frozen=True)
class OddCaptions:
    """The number of captions of one odd kind in a dataset, with an example.

    kind: key of `ODD_KINDS`. The dataset's entry accepts these captions by listing this key in `confirmed`.
    count, test_count: number of these captions in the dataset and in its test split.
    total: number of all captions in the dataset. The kind `repeats` counts pairs, so its total is the number of pairs
        with a change.
    source: file and row of the example.
    example: the first of these captions in the test split, or in the dataset if the test split has none.
    """

    kind: str
    count: int
    test_count: int
    total: int
    source: str
    example: str

    @property
    def remedy(self) -> str:
        """How to fix captions of this kind."""
        return ODD_KINDS[self.kind].remedy

    def __str__(self) -> str:
        description = ODD_KINDS[self.kind].description
        unit = "pairs with a change" if self.kind == "repeats" else "captions"
        in_test = f", {self.test_count:,} of them in test" if self.test_count else ""
        return f"{self.count:,} of {self.total:,} {unit} {description}{in_test}: {self.source}: {self.example[:70]!r}"


def select_unconfirmed(odd_captions: Sequence[OddCaptions], confirmed_kinds: Collection[str]) -> list[OddCaptions]:
    """Return the odd captions of the test split whose kind the dataset's entry does not confirm."""
    return [captions for captions in odd_captions if captions.test_count and captions.kind not in confirmed_kinds]
