"""Detect references that are not in English by their function words, because some metrics support only English.

A text counts as foreign only if it contains a word or letter of another language and no English function word. A
caption such as "remove man", without any function word, counts as English.
"""

import re
from collections.abc import Iterable, Mapping

from m3diff.records.errors import format_count
from m3diff.scoring.metrics import Metric

MIN_FOREIGN_SHARE = 0.1  # minimum share of foreign references for a note
WORD = re.compile(r"[^\W\d_]+")

# English words that are not words of a language below. "is", "of", "on", "no" and "in" are, so they are left out
ENGLISH = frozenset(WORD.findall("the and with has have from there are been this that which its into nothing"))
# Frequent words of other languages that are not English words
FOREIGN = frozenset(
    WORD.findall(
        # German, French, Spanish, Italian, Portuguese
        "der das und ist ein eine einen einem nicht mit auf dem vom zum wurde sind keine "
        "le les une dans avec sur est du qui el los las una del está il gli della nel è uma não foi "
        # Dutch, Swedish, Danish, Norwegian, Polish, Czech
        "het een niet zijn och ett är det inte ikke og på się nie został není je byl "
        # Turkish, Finnish, Hungarian, Vietnamese, Indonesian
        "bir ve değil ja ei egy az nem és không được một yang tidak"
    )
)
# Letters of scripts with spaces between words: Greek, Cyrillic, Hebrew, Arabic, the scripts of India, and Korean
OTHER_LETTERS = re.compile(r"[\u0370-\u052f\u0590-\u06ff\u0900-\u0dff\uac00-\ud7af]")


def is_foreign(text: str) -> bool:
    """Return True if a text contains a word or letter of another language and no English function word."""
    words = set(WORD.findall(text.casefold()))
    if words & ENGLISH:
        return False
    return bool(words & FOREIGN) or OTHER_LETTERS.search(text) is not None


def note_foreign_references(dataset: str, references: Iterable[str], metrics: Mapping[str, Metric]) -> list[str]:
    """Return a note if metrics that support only English score references in another language, otherwise an empty list.

    Args:
        metrics: the computed metrics by name.
    """
    english_metrics = [name for name, metric in metrics.items() if metric.reads == "English"]
    texts = [reference for reference in references if reference.strip()]
    foreign_count = sum(map(is_foreign, texts))
    if not english_metrics or not foreign_count or foreign_count < MIN_FOREIGN_SHARE * len(texts):
        return []
    names = " and ".join(english_metrics)
    counted_references = format_count(len(texts), "reference does", "references do")
    return [
        f"{dataset}: {foreign_count:,} of {counted_references} not seem to be in English. {names} can only "
        "score English; CIDEr, ROUGE-L and BLEU compare the words of any language"
    ]
