"""Captions that no person wrote: words of a chat model, roles, wrong encodings, and one caption on many pairs.

They are counted by kind. In training splits they are shown with what mends them; in a test split, where every model is
scored by them, the entry has to confirm them.
"""

import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl

from m3diff.datasets.spec import Row
from m3diff.records.schemas import NO_CHANGE
from m3diff.scoring.marks import SUSPECT, mark_of

REMEDIES = {  # kind -> what it is, and what mends it
    "refusals": ("are a refusal or another answer of a chat model", "write them anew, or take the rows out"),
    "roles": ("hold a role or a prompt of a chat", "keep the answer alone"),
    "chat": ("hold words of a chat model to its user, or a heading", "keep the caption alone"),
    "tokens": ("hold special tokens or tags", "remove them"),
    "literals": ("hold JSON or another literal", "write the text that is in it"),
    "markup": ("hold Markdown, LaTeX or HTML", "write plain text"),
    "encoding": (
        "hold text that was read in a wrong encoding",
        "write the file again from its source as UTF-8; `ftfy` can mend what is left",
    ),
    "escapes": ("hold escape sequences or control characters", "write the sign that is meant"),
    "repeats": ("are one text", "let each caption say what changed in its pair"),
}

# A repeated text: of MIN_PAIRS or more pairs with a change, at least MIN_REPEATS and MIN_SHARE have it, and
# TIMES_THE_MEAN as many as an average text has, since a small vocabulary repeats all its captions. From SHARE_OF_ONE on
# the average does not matter
MIN_PAIRS = 16
MIN_REPEATS = 6
MIN_SHARE = 0.2
TIMES_THE_MEAN = 3
SHARE_OF_ONE = 0.5
SAYS_NO_CHANGE = re.compile(
    r"\b(?:no|not|nothing|none|never|without|same|identical|unchanged|alike|similar|\w+n['’]t|keine?|nichts|unverändert"
    r"|aucune?|pas|rien|sin|ningún|ninguna?|nenhuma?|nessuna?|без|нет|ничего)\b|没有|没|无|不变|変化な|なし|없",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class OddCaptions:
    """Captions of one kind in a dataset."""

    kind: str  # a key of `REMEDIES`, by which an entry confirms it
    captions: int
    tested: int  # of them in a test split
    total: int  # captions of the dataset; of `repeats`, pairs with a change
    source: str  # file and row of the first one
    example: str

    def __str__(self) -> str:
        what, _ = REMEDIES[self.kind]
        counted = "pairs with a change" if self.kind == "repeats" else "captions"
        in_test = f", {self.tested:,} of them in test" if self.tested else ""
        return f"{self.captions:,} of {self.total:,} {counted} {what}{in_test}: {self.source}: {self.example[:70]!r}"

    @property
    def remedy(self) -> str:
        return REMEDIES[self.kind][1]


def find_odd_captions(rows: Sequence[Row]) -> list[OddCaptions]:
    """What of a dataset's captions no person seems to have written, by kind; a caption is counted once."""
    listed = [row for row in rows if isinstance(row.references, list)]
    texts = [text for row in listed for text in row.references]
    owners = [row for row in listed for _ in row.references]
    # words first, for all captions at once: the patterns, one caption after another, take ten times as long
    suspects = _as_series(texts).str.contains(SUSPECT).arg_true().to_list()
    kinds = {text: mark_of(text) for text in {texts[place] for place in suspects}}
    by_kind: dict[str, list[tuple[Row, str]]] = {}
    for place in suspects:
        if kind := kinds[texts[place]]:
            by_kind.setdefault(kind, []).append((owners[place], texts[place]))
    odd = [_counted(kind, by_kind[kind], len(texts)) for kind in REMEDIES if kind in by_kind]
    return [*odd, *_repeats(listed)]


def _as_series(texts: Sequence[Any]) -> pl.Series:
    """The texts; null for what is no text, "?" for half a surrogate pair. Both are faults of their rows."""
    try:
        return pl.Series(texts, dtype=pl.String)
    except (TypeError, UnicodeEncodeError):
        usable = [text.encode("utf-8", "replace").decode() if isinstance(text, str) else None for text in texts]
        return pl.Series(usable, dtype=pl.String)


def _counted(kind: str, captions: Sequence[tuple[Row, str]], total: int) -> OddCaptions:
    tested = [(row, text) for row, text in captions if row.split == "test"]
    row, text = (tested or captions)[0]
    return OddCaptions(
        kind=kind,
        captions=len(captions),
        tested=len(tested),
        total=total,
        source=row.source.split(" and ")[0],
        example=text,
    )


def _repeats(rows: Sequence[Row]) -> Iterator[OddCaptions]:
    """Find a text that many pairs with a change share. A sentence which says that nothing changed may repeat."""
    changed = [row for row in rows if NO_CHANGE not in row.change_types]
    pairs_by_spelling = Counter(text for row in changed for text in _distinct(row.references))
    pairs_by_text = _by_one_spelling(pairs_by_spelling)
    for text, pairs in pairs_by_text.most_common(10) if len(changed) >= MIN_PAIRS else ():
        if pairs < MIN_REPEATS or pairs < MIN_SHARE * len(changed):
            return
        mean = pairs_by_text.total() / len(pairs_by_text)
        is_one = pairs >= SHARE_OF_ONE * len(changed) or pairs >= TIMES_THE_MEAN * mean
        if is_one and isinstance(text, str) and text.strip() and not SAYS_NO_CHANGE.search(text):
            plain = _plain(text)
            spellings = {spelt for spelt in pairs_by_spelling if _plain(spelt) == plain}
            having = [(row, text) for row in changed if not spellings.isdisjoint(_distinct(row.references))]
            yield _counted("repeats", having, len(changed))
            return


def _by_one_spelling(pairs_by_text: Counter[str]) -> Counter[str]:
    """The counts of texts, repeated ones that differ only in capitals, white space and signs at their ends as one.

    A text that stands on one pair is not compared, which saves most of the time.
    """
    spellings: dict[str, list[str]] = {}
    for text, pairs in pairs_by_text.items():
        if pairs > 1:
            spellings.setdefault(_plain(text), []).append(text)
    merged = pairs_by_text.copy()
    for first, *others in spellings.values():
        for text in others:
            merged[first] += merged.pop(text)
    return merged


def _plain(text: str) -> str:
    return " ".join(text.casefold().split()).strip(" .!\"'")


def _distinct(references: Sequence[Any]) -> set[str]:
    return {text for text in references if isinstance(text, str)}


def unconfirmed(odd: Sequence[OddCaptions], confirmed: Collection[str]) -> list[OddCaptions]:
    """Those in a test split that the entry does not confirm."""
    return [captions for captions in odd if captions.tested and captions.kind not in confirmed]
