"""Find captions that were probably not written by a person.

Examples are phrases of a chat model, role names, wrong encodings, and one caption that many pairs share. The captions
are counted by kind. In a training split, odd captions are only reported, with a remedy. In a test split, every model is
scored against them, so the dataset's entry in `params.yaml` must confirm that they are intended.
"""

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import polars as pl

from m3diff.datasets.odd_captions import ODD_KINDS, OddCaptions
from m3diff.datasets.spec import Row
from m3diff.records.schemas import NO_CHANGE
from m3diff.scoring.marks import SUSPECT, find_mark

# A caption counts as repeated under three conditions. At least MIN_REPEATS pairs with a change have the caption, these
# pairs are at least MIN_REPEATED_SHARE of all pairs with a change, and the caption is at least MIN_TIMES_THE_MEAN times
# as frequent as the average caption. The last condition spares datasets with a small vocabulary, which repeat all of
# their captions. It does not apply if the share is at least DOMINANT_SHARE. With fewer than MIN_PAIRS pairs, nothing is
# reported
MIN_PAIRS = 16
MIN_REPEATS = 6
MIN_REPEATED_SHARE = 0.2
MIN_TIMES_THE_MEAN = 3
DOMINANT_SHARE = 0.5
SAYS_NO_CHANGE = re.compile(
    r"\b(?:no|not|nothing|none|never|without|same|identical|unchanged|alike|similar|\w+n['’]t|keine?|nichts|unverändert"
    r"|aucune?|pas|rien|sin|ningún|ninguna?|nenhuma?|nessuna?|без|нет|ничего)\b|没有|没|无|不变|変化な|なし|없",
    re.IGNORECASE,
)


def find_odd_captions(rows: Sequence[Row]) -> list[OddCaptions]:
    """Count the captions that were probably not written by a person, by kind.

    A caption with several suspicious marks, such as role names or broken characters, is counted only once.
    """
    rows_with_captions = [row for row in rows if isinstance(row.references, list)]
    texts: list[Any] = []
    row_of_text: list[Row] = []
    for row in rows_with_captions:
        texts += row.references
        row_of_text += [row] * len(row.references)

    # One search over all captions finds the suspects. Matching every pattern with every caption takes ten times as long
    suspect_indices = _as_series(texts).str.contains(SUSPECT).arg_true().to_list()
    suspect_texts = {texts[index] for index in suspect_indices}
    kind_of_text = {text: find_mark(text) for text in suspect_texts}
    captions_of_kind: dict[str, list[tuple[Row, str]]] = {}
    for index in suspect_indices:
        kind = kind_of_text[texts[index]]
        if kind:
            captions_of_kind.setdefault(kind, []).append((row_of_text[index], texts[index]))

    odd_captions = []
    for kind in ODD_KINDS:
        if kind in captions_of_kind:
            odd_captions.append(_count_kind(kind, captions_of_kind[kind], total=len(texts)))
    repeated_captions = _find_repeated_caption(rows_with_captions)
    if repeated_captions is not None:
        odd_captions.append(repeated_captions)
    return odd_captions


def _as_series(texts: Sequence[Any]) -> pl.Series:
    """Return the texts as a series, with null for a value that is not a string.

    Lone surrogates become "?". Ingest reports both kinds of values as faults of their rows.
    """
    try:
        return pl.Series(texts, dtype=pl.String)
    except (TypeError, UnicodeEncodeError):
        # Polars rejects a text with a lone surrogate, so the surrogate becomes "?"
        valid_texts = [text.encode("utf-8", "replace").decode() if isinstance(text, str) else None for text in texts]
        return pl.Series(valid_texts, dtype=pl.String)


def _count_kind(kind: str, captions: Sequence[tuple[Row, str]], total: int) -> OddCaptions:
    """Count the captions of one kind and choose an example, from a test split if possible.

    Args:
        kind: kind of the captions.
        captions: tuples of a row and a caption of that row.
        total: number of all captions that were searched, as in `OddCaptions`.
    """
    test_captions = [(row, text) for row, text in captions if row.split == "test"]
    example_row, example = (test_captions or captions)[0]
    return OddCaptions(
        kind=kind,
        count=len(captions),
        test_count=len(test_captions),
        total=total,
        source=example_row.source.split(" and ")[0],
        example=example,
    )


def _find_repeated_caption(rows: Sequence[Row]) -> OddCaptions | None:
    """Return the most common caption that too many pairs share, or None. Only pairs with a change are examined.

    Captions that say that nothing changed are ignored, because they may repeat.
    """
    # Answers to questions repeat: "yes", "2"
    changed_pairs = [row for row in rows if NO_CHANGE not in row.change_types and row.question is None]
    if len(changed_pairs) < MIN_PAIRS:
        return None
    pairs_by_spelling = Counter[str]()
    for row in changed_pairs:
        pairs_by_spelling.update(_distinct_texts(row.references))
    pairs_by_text = _merge_spellings(pairs_by_spelling)
    mean = pairs_by_text.total() / len(pairs_by_text) if pairs_by_text else 0.0
    for text, pairs in pairs_by_text.most_common(10):
        if pairs < MIN_REPEATS or pairs < MIN_REPEATED_SHARE * len(changed_pairs):
            return None
        is_repeated = pairs >= DOMINANT_SHARE * len(changed_pairs) or pairs >= MIN_TIMES_THE_MEAN * mean
        if is_repeated and text.strip() and not SAYS_NO_CHANGE.search(text):
            spellings = {spelling for spelling in pairs_by_spelling if _plain_text(spelling) == _plain_text(text)}
            captions = [
                (row, text) for row in changed_pairs if not spellings.isdisjoint(_distinct_texts(row.references))
            ]
            return _count_kind("repeats", captions, total=len(changed_pairs))
    return None


def _merge_spellings(pairs_by_spelling: Counter[str]) -> Counter[str]:
    """Add up the counts of texts that differ only in case, white space or punctuation at the ends.

    Texts that occur in only one pair are not compared, which saves most of the time.
    """
    spellings_of_text: dict[str, list[str]] = {}
    for spelling, pairs in pairs_by_spelling.items():
        if pairs > 1:
            spellings_of_text.setdefault(_plain_text(spelling), []).append(spelling)
    pairs_by_text = pairs_by_spelling.copy()
    for main_spelling, *variants in spellings_of_text.values():
        for variant in variants:
            pairs_by_text[main_spelling] += pairs_by_text.pop(variant)
    return pairs_by_text


def _plain_text(text: str) -> str:
    """Return the text in lowercase with single spaces, and without punctuation at the ends."""
    return " ".join(text.casefold().split()).strip(" .!\"'")


def _distinct_texts(references: Sequence[Any]) -> set[str]:
    return {text for text in references if isinstance(text, str)}
