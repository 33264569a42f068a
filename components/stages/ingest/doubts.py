"""Captions that are probably none, and questions that are probably others: what a person must say before they train.

A doubt is answered once, in the options of the dataset's entry; `m3diff data check` prints the entries. Texts that are
lists in a programming language's form are no doubt: their file is to be written anew.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import yaml

from m3diff.datasets.spec import Row

SAY_NOTHING = {
    *("nan", "none", "null", "nil", "n/a", "n.a", "k.a", "na", "<na>", "nat", "undefined", "missing", "empty"),
    *("blank", "unknown", "unlabeled", "string", "tbd", "todo", "fixme", "xxx", "test", "caption", "skip", "skipped"),
    *("true", "false", "keine", "aucun", "ninguno", "нет", "无", "なし", "없음", "\\n", "to do", "no caption"),
    *("no captions", "no description", "not available", "not applicable", "no text", "without caption", "no answer"),
    *("not annotated", "keine angabe"),
}
LIST = re.compile(
    r"""\s*(
        [A-Za-z_][\w.]*\(.*[,"'].*\)                       # array(["..."]), c("..."), WrappedArray(..., ...)
        | \(?1[.):]\s.*\s\(?2[.):]\s.*                     # 1. ... 2. ...
        | \[\s*(?:[bur]*["']|\[|\{).* | \[.*,.*\]         # [ '..., cut off or not; [a, b]
        | <(?:ul|ol|li|p|div)\b.* | [•▪‣]\s.*[•▪‣]\s.*
        | \{.*\} | \(\s*[bur]*["'].*["']\s*,?\s*\) | b(["']).*\2
    )\s*""",
    re.VERBOSE | re.DOTALL,
)
"""A list, tuple, set or object as a programming language prints it."""
WORD = re.compile(r"[^\W\d_]+[.,;:!?]*|[.,;:!?]")
SEPARATORS = ("<sep>", "[SEP]", "<br>", "|", "##", "\n", "\\n", ";", "；", "\t", " / ")
MANY = 0.2
"""Share of captions from which on a sign may separate; below it, it belongs to a sentence."""
PLACEHOLDER = re.compile(
    r"<[^<>]*(?:image|img|vision|video)[^<>]*>|\[/?(?:IMG|INST)\]|\b(?:image|picture|img)[- ]?\d+:", re.I
)

BETWEEN = ("", " between the two images", " between these two images")
ASK_WHAT_CHANGED = {
    f"{asked}{end}"
    for asks in (
        "what changed|what has changed|what has been changed|what is different|what differs|list the differences",
        "what is the change|what are the changes|what is the difference|what are the differences|list the changes",
        "describe the change|describe the changes|describe the difference|describe the differences",
        "describe what changed|find the difference|find the differences|spot the difference|spot the differences",
        "identify the changes|identify the differences|please describe the changes|please describe the differences",
    )
    for asked in asks.split("|")
    for end in BETWEEN
} | {
    "what has changed from the first image to the second",
    "what is different in the second image",
    "what difference happened from image1 to image2",
    "describe in detail every change from the first image to the second",
    "compare the two images and describe the changes",
    "compare the two images and describe the differences",
    "compare the two images and say what changed",
    "look at the image before and the image after what changed",
    "say in words how the second image differs from the first",
    "which objects changed between the two images where are they and how did they change",
    "list all changes from the image before to the image after with their places",
    "give a full account of what differs between the two images",
}
"""Questions that are the task's own, in small letters without signs: those of profiles/questions.yaml that ask what
changed, and the shortest ways to ask it. A question that is not here is never taken for one that is."""


class Doubt(NamedTuple):
    """A question to the user, and the options of each answer, the likeliest first; a fault of the files has none.

    `sure`: the first answer needs no confirmation before it is written into an entry.
    """

    question: str
    answers: list[dict[str, Any]]
    sure: bool = False


def doubts(rows: Sequence[Row], options: Mapping[str, Any], own: bool) -> Iterator[Doubt]:
    """Yield the questions that the entry's options leave open.

    Args:
        own: the dataset is a collection of the user's own (reader `pairs`), whose texts nobody has looked at.
    """
    usable = [row for row in rows if isinstance(row.references, list)]
    yield from _lists(usable)
    asked = list(_questions(rows)) if own and not options.get("all_ask_what_changed") else []
    yield from asked
    if own and not asked:
        if options.get("separator") is None:
            yield from _separators(usable)
        yield from _nothing(usable, options.get("no_caption"))


def says_nothing(text: Any) -> bool:
    """True if a text has no letter or digit, is a single number, or a word that programs and people write for none."""
    if not isinstance(text, str):
        return False
    bare = text.strip().strip("\"'`()[]{}<>.!* ").casefold()
    error = re.fullmatch(r"\s*#[A-ZÄÖÜ0-9/_]+[!?]?\s*", text)  # of a spreadsheet: #N/A, #WERT!
    return bool(error) or {text.strip().casefold(), bare} & SAY_NOTHING != set() or not re.search(r"[^\W\d_]", bare)


def _lists(rows: Sequence[Row]) -> Iterator[Doubt]:
    """Lists that are written as text, and captions that are cut into their words."""
    texts = [(row, text) for row in rows for text in row.references if isinstance(text, str)]
    found = [(row, text.strip()) for row, text in texts if LIST.fullmatch(text) and not says_nothing(text)]
    if found:
        (row, text), many = found[0], len({row.source for row, _ in found})
        is_object = text[0] == "{"
        kind = "an object" if is_object else "a list" if text[0] in "[(1" else "a list in a programming language's form"
        remedy = (
            "write the one of its values that is the caption" if is_object else "write JSON: `json.dumps(captions)`"
        )
        yield Doubt(
            f"{place(row)}: captions are {kind} written as text ({text[:60]}), so in {many:,} rows; {remedy}", []
        )
    cut = [row for row in rows if len(row.references) > 3 and all(WORD.fullmatch(str(text)) for text in row.references)]
    if 2 * len(cut) > len(rows):
        words = ", ".join(map(str, cut[0].references[:4]))
        yield Doubt(
            f"{place(cut[0])}: captions are a list of single words ({words}, ...), so in {len(cut):,} rows; write each "
            "caption as one text: `' '.join(words)`",
            [],
        )


def _separators(rows: Sequence[Row]) -> Iterator[Doubt]:
    """The first sign that stands between texts in many captions."""
    texts = [(row, text) for row in rows for text in row.references if isinstance(text, str)]
    for sign in SEPARATORS:
        least = 2 if sign in (";", "\n", "\t", " / ") else 1  # words of a part
        cut = [(each, [part.split() for part in each[1].split(sign) if part.strip()]) for each in texts]
        found = [each for each, parts in cut if len(parts) > 1 and min(map(len, parts)) >= least]
        if found and len(found) >= MANY * len(texts):
            row, text = found[0]
            yield Doubt(
                f"{place(row)}: {sign!r} stands between words of {len(found):,} captions ({text[:60]!r}); does it "
                "separate several captions?",
                [{"separator": sign}, {"separator": ""}],
            )
            return


def _nothing(rows: Sequence[Row], known: Sequence[str] | None) -> Iterator[Doubt]:
    """Texts that say nothing: to be confirmed in a test split, where an empty one is a reference, too."""
    if known is not None and not known:
        return
    told = {text.strip().casefold() for text in known or ()}
    found = [
        (row, text)
        for row in rows
        for text in row.references
        if says_nothing(text) and text.strip().casefold() not in told and (text.strip() or row.split == "test")
    ]
    if not found:
        return
    counts = Counter(text.strip() for _, text in found)
    row, first = found[0]
    tested = sum(row.split == "test" for row, _ in found)
    which = ", ".join(f"{text!r} ({count:,})" for text, count in counts.most_common(5))
    none = sorted({*(known or ()), *counts})
    yield Doubt(
        f"{place(row)}: the caption {first!r} says nothing; such texts: {which}, {tested:,} of them in test. Do they "
        "stand for no caption (`no_caption`; a pair without any other is passed over), or are they captions ([])? If "
        "they mean that nothing changed, `no_change` says so",
        [{"no_caption": none}, {"no_caption": []}],
        sure=not tested,
    )


def _questions(rows: Sequence[Row]) -> Iterator[Doubt]:
    """The questions that references answer, unless each one is known to ask what changed."""
    asked = Counter(clean(question.text) for row in rows for question in row.questions)
    if not asked or all(_plain(text) in ASK_WHAT_CHANGED for text in asked):
        return
    first = next(row for row in rows if row.questions)
    listed = "; ".join(f"{text[:80]!r} ({count:,})" for text, count in asked.most_common(5))
    more = f"; and {len(asked) - 5:,} more" if len(asked) > 5 else ""
    alone = {
        question.column: question.text
        for row in rows
        for question in row.questions
        if _plain(clean(question.text)) in ASK_WHAT_CHANGED and "{" not in question.column
    }
    yield Doubt(
        f"{place(first)}: captions answer questions, which are not kept: {listed}{more}. Do all of them ask what "
        "changed?",
        [*({"where": {column: text}} for column, text in alone.items()), {"all_ask_what_changed": True}],
    )


def place(row: Row) -> str:
    """The first of the rows of a file that the pair is made of."""
    return row.source.split(" and ")[0]


def clean(question: str) -> str:
    """A question without what stands for the images in it."""
    return " ".join(PLACEHOLDER.sub(" ", question).split())


def _plain(question: str) -> str:
    return " ".join(re.sub(r"[^\w\s]", " ", question.casefold()).split())


class _OneLine(yaml.SafeDumper):
    """Writes a text with a line break between double quotes, on one line."""

    def represent_str(self, data: str) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:str", data, style='"' if "\n" in data else None)


_OneLine.add_representer(str, _OneLine.represent_str)


def as_yaml(value: Any) -> str:
    """A value on one line, as it goes into `params.yaml`."""
    plain = json.loads(json.dumps(value))
    return yaml.dump(
        plain, Dumper=_OneLine, default_flow_style=True, sort_keys=False, width=10_000, allow_unicode=True
    ).strip()
