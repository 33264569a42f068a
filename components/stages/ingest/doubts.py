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
    *("nan", "none", "null", "nil", "n/a", "n.a", "na", "nat", "undefined", "missing", "empty", "blank", "unknown"),
    *("unlabeled", "tbd", "todo", "fixme", "test", "caption", "true", "false", "no caption", "no captions"),
    *("no description", "not available", "not applicable", "no answer", "not annotated"),
}
LIST = re.compile(
    r"""\s*(
        [A-Za-z_][\w.]*\(.*[,"'].*\) | \(\s*[bur]*["'].*\)     # array(["..."]), WrappedArray(..., ...), ("...",)
        | \[\s*(?:[bur]*["']|\[|\{).* | \[.*,.*\] | \{.*\}
    )\s*""",
    re.VERBOSE | re.DOTALL,
)
"""A list, tuple, set or object as a programming language prints it."""
WORD = re.compile(r"[^\W\d_]+[.,;:!?]*|[.,;:!?]")
SEPARATORS = ("<sep>", "[SEP]", "<br>", "|", "##", "\n", ";", "\t")
MANY = 0.2
"""Share of captions from which on a sign may separate; below it, it belongs to a sentence."""
PLACEHOLDER = re.compile(
    r"<[^<>]*(?:image|img|vision|video)[^<>]*>|\[/?(?:IMG|INST)\]|\b(?:image|picture|img)[- ]?\d+:", re.I
)
ASKS = re.compile(
    r"(please )?(what (has )?(been )?changed|what is different|what differs|what (is|are) the (change|difference)s?"
    r"|(describe|list|find|spot|identify) (what changed|the (change|difference)s?))( between (the|these) two images)?"
)
ASK_WHAT_CHANGED = {
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
changed, beside the short ones of `ASKS`. A question that is not here is never taken for one that is."""


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
    bare = text.strip("\"'`()[]{}<>.!*# \t\r\n").casefold() if isinstance(text, str) else "a text"
    return bare in SAY_NOTHING or not re.search(r"[^\W\d_]", bare)


def _lists(rows: Sequence[Row]) -> Iterator[Doubt]:
    """Lists that are written as text, and captions that are cut into their words."""
    texts = [(row, text) for row in rows for text in row.references if isinstance(text, str)]
    found = [(row, text.strip()) for row, text in texts if LIST.fullmatch(text) and not says_nothing(text)]
    if found:
        (row, text), many = found[0], len({row.source for row, _ in found})
        yield Doubt(
            f"{place(row)}: captions are a list or an object written as text ({text[:60]}), so in {many:,} rows; write "
            "the captions as JSON: `json.dumps(captions)`",
            [],
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
    """The first sign that stands between texts in many captions; a semicolon or a line break between several words."""
    texts = [(row, text) for row in rows for text in row.references if isinstance(text, str)]
    for sign in SEPARATORS:
        cut = [[part.split() for part in text.split(sign) if part.strip()] for _, text in texts]
        least = 2 if sign in ";\n\t" else 1
        found = [
            each for each, parts in zip(texts, cut, strict=True) if len(parts) > 1 and min(map(len, parts)) >= least
        ]
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
    yield Doubt(
        f"{place(row)}: the caption {first!r} says nothing; such texts: {which}, {tested:,} of them in test. Do they "
        "stand for no caption (`no_caption`; a pair without any other is passed over), or are they captions ([])? If "
        "they mean that nothing changed, `no_change` says so",
        [{"no_caption": sorted({*(known or ()), *counts})}, {"no_caption": []}],
        sure=not tested,
    )


def _questions(rows: Sequence[Row]) -> Iterator[Doubt]:
    """The questions that references answer, unless each one is known to ask what changed."""
    found = [(row, question, _plain(question.text)) for row in rows for question in row.questions]
    known = {plain for _, _, plain in found if plain in ASK_WHAT_CHANGED or ASKS.fullmatch(plain)}
    if all(plain in known for _, _, plain in found):
        return
    asked = Counter(" ".join(PLACEHOLDER.sub(" ", question.text).split()) for _, question, _ in found)
    listed = "; ".join(f"{text[:80]!r} ({count:,})" for text, count in asked.most_common(5))
    more = f"; and {len(asked) - 5:,} more" if len(asked) > 5 else ""
    alone = {each.column: each.text for _, each, plain in found if plain in known and "{" not in each.column}
    yield Doubt(
        f"{place(found[0][0])}: captions answer questions, which are not kept: {listed}{more}. Do all of them ask what "
        "changed?",
        [*({"where": {column: text}} for column, text in alone.items()), {"all_ask_what_changed": True}],
    )


def _plain(question: str) -> str:
    """A question in small letters without signs and what stands for the images in it."""
    return " ".join(re.sub(r"[^\w\s]", " ", PLACEHOLDER.sub(" ", question).casefold()).split())


def place(row: Row) -> str:
    """The first of the rows of a file that the pair is made of."""
    return row.source.split(" and ")[0]


class _OneLine(yaml.SafeDumper):
    """Writes a text with a line break between double quotes, on one line."""

    def represent_str(self, data: str) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:str", data, style='"' if "\n" in data else None)


_OneLine.add_representer(str, _OneLine.represent_str)


def as_yaml(value: Any) -> str:
    """A value on one line, as it goes into `params.yaml`."""
    form: dict[str, Any] = {"default_flow_style": True, "sort_keys": False, "width": 10_000, "allow_unicode": True}
    return yaml.dump(json.loads(json.dumps(value)), Dumper=_OneLine, **form).strip()
