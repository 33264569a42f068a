"""Captions matched with references by their ids, and the faults that such files typically have, each by its name."""

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from m3diff.commands.score.files import Prediction
from m3diff.datasets.spec import Protocol, SplitCount
from m3diff.records.errors import DataError
from m3diff.scoring.pairs import EvalPair

EXTENSION = re.compile(r"\.(?:png|jpe?g|gif|webp)", re.IGNORECASE)
SCENE = re.compile(r"(?:CLEVR_(?P<kind>semantic|nonsemantic)_)?0*(?P<number>\d+)(?P<distractor>_n)?")
TOKENISED = re.compile(r"\w (?:[.,;:!?]|'s|n't)(?: |$)")
SENTENCES = re.compile(r"\w\. +\w")
MANY = 0.2
"""Share of captions from which on a way of writing is the file's."""


class Matched(NamedTuple):
    """Captions by the references' ids."""

    captions: dict[str, str]
    unknown: list[str]
    renamed: tuple[str, str] | None  # an id as it was given, and whose it was taken for


def nfc(text: str) -> str:
    return unicodedata.normalize("NFC", text)


def plain(name: str) -> str:
    """An id without folder, extension, padding and the words of CLEVR-Change's file names: "235" of "a/000235.png"."""
    bare = EXTENSION.sub("", re.split(r"[/\\]", name)[-1])
    found = SCENE.fullmatch(bare)
    if not found:
        return bare
    return found["number"] + (found["distractor"] or ("_n" if found["kind"] == "nonsemantic" else ""))


def finder(known: Iterable[str], dataset: str) -> Callable[[str], str | None]:
    """The references' id that an id means, None where it means none. Unicode forms of the same letters are equal."""
    ids = {nfc(name): name for name in known}
    names = Counter(map(plain, ids))
    by_plain = {plain(form): name for form, name in ids.items() if names[plain(form)] == 1}

    def find(given: str) -> str | None:
        form = nfc(given)
        return ids.get(form) or ids.get(form.removeprefix(f"{nfc(dataset)}/")) or by_plain.get(plain(form))

    return find


def match(rows: Sequence[Prediction], known: Iterable[str], dataset: str, counts: SplitCount | None) -> Matched:
    """Every caption under the id of the references that its own id means.

    Raises:
        DataError: two captions of one id, or none of the ids is known.
    """
    ids = list(known)
    find = finder(ids, dataset)
    captions: dict[str, str] = {}
    unknown: list[str] = []
    renamed, times = None, Counter[str]()
    for given, caption in rows:
        name = find(given)
        times[name or given] += 1
        if name is None:
            unknown.append(given)
            continue
        if nfc(name) != nfc(given) and renamed is None:
            renamed = given, name
        captions[name] = caption
    if len(times) < len(rows):
        name, most = times.most_common(1)[0]
        found = f"{len(rows):,} captions for {len(times):,} ids: {name!r} has {most}"
        raise DataError(f"{found}{level(len(rows), counts)}; keep one caption to an id")
    if not captions:
        raise DataError(not_known(unknown, len(rows), ids, counts))
    return Matched(captions, unknown, renamed)


def not_known(unknown: Sequence[str], rows: int, ids: Sequence[str], counts: SplitCount | None) -> str:
    """The unknown ids beside valid ones."""
    found = f"{len(unknown):,} of {rows:,} ids are unknown: {some(unknown)}; valid ones are {some(ids)}"
    return f"{found}: write the ids as the references do{level(rows, counts)}"


def some(names: Sequence[str]) -> str:
    """The first three."""
    return ", ".join(repr(name) for name in names[:3]) + (", ..." if len(names) > 3 else "")


def level(ids: int, counts: SplitCount | None) -> str:
    """The level, if any, that the number of ids gives away."""
    if counts is None or ids == counts.pairs:
        return ""
    if ids == counts.records:
        return (
            f". The annotation file has {ids:,} records: this is the record level. A pair is scored once, against the "
            "references of all its records"
        )
    if ids == counts.image_pairs:
        return (
            f". There are {ids:,} distinct pairs of images: keyed by its images, a pair overwrote others that have the "
            "same; key by the id"
        )
    return ""


def faults_of_predictions(
    rows: int, matched: Matched, taken: Mapping[str, EvalPair], known: Iterable[str], counts: SplitCount | None
) -> list[str]:
    """Unknown and missing ids, with the likely reason."""
    faults = [not_known(matched.unknown, rows, list(known), counts)] if matched.unknown else []
    missing = [name for name in taken if name not in matched.captions]
    wordless = [name for name, pair in taken.items() if not any(text.strip() for text in pair.references)]
    if missing and missing == wordless:
        faults.append(
            f"no caption for {some(missing)}, the {len(missing)} pairs of which every reference is empty: they were "
            f"dropped. They count in every published score; caption all {len(taken):,} pairs"
        )
    elif missing:
        faults.append(f"no caption for {len(missing):,} of {len(taken):,} pairs: {some(missing)}" + level(rows, counts))
    return faults


def fault_of_references(pairs: Mapping[str, EvalPair], counts: SplitCount | None, protocol: Protocol) -> str:
    """The difference of a file of references from those of the benchmark; "" where there is none."""
    texts = [text for pair in pairs.values() for text in pair.references]
    if counts is not None and len(pairs) != counts.pairs:
        fault = f"{len(pairs):,} pairs, the benchmark has {counts.pairs:,}"
        if counts.wordless and len(pairs) == counts.pairs - counts.wordless:
            return f"{fault}: the {counts.wordless} pairs of which every reference is empty were dropped; they count"
        return fault + level(len(pairs), counts)
    if protocol.references == "joined":
        several = sum(len(pair.references) > 1 for pair in pairs.values())
        longest = max(len(text.split()) for text in texts)
        if several:
            return f"{several:,} pairs have several; under {protocol.name!r} all sentences of a pair are one text"
        if protocol.max_words is not None and longest > protocol.max_words:
            return f"untruncated, of up to {longest} words; {protocol.name!r} cuts them after {protocol.max_words}"
    elif counts is not None and counts.references is not None and len(texts) < counts.references:
        if len(texts) == len(pairs) and share(SENTENCES, texts) > 0:
            rule = f"under {protocol.name!r} every sentence is a reference of its own"
            return f"{len(texts):,} of {counts.references:,}: joined text, one reference a pair; {rule}"
        return (
            f"{len(texts):,} of {counts.references:,}: of pairs that stand in several records the last one overwrote "
            "the others; all of them count"
        )
    return ""


def share(pattern: re.Pattern[str], texts: Sequence[str]) -> float:
    return sum(bool(pattern.search(text)) for text in texts) / len(texts) if texts else 0.0


def notes_of_captions(captions: Sequence[str], references: Sequence[str], protocol: Protocol) -> list[str]:
    """Notes on ways of writing that move scores."""
    notes = []
    if empty := sum(not caption.strip() for caption in captions):
        notes.append(f"{empty:,} captions are empty")
    if protocol.max_words is not None:
        if longer := sum(len(caption.split()) > protocol.max_words for caption in captions):
            notes.append(f"{longer:,} captions were cut after {protocol.max_words} words, as the references are")
    elif protocol.references == "all" and share(SENTENCES, captions) > MANY > share(SENTENCES, references):
        notes.append(f"captions hold several sentences: joined text? References of {protocol.name!r} are one each")
    if protocol.tokenizer == "whitespace" and share(TOKENISED, captions) <= MANY < share(TOKENISED, references):
        notes.append("captions are not tokenised, the references are: 'head.' is no 'head'; write 'head .'")
    return notes
