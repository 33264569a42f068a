"""Find doubts: questions about the captions of a dataset that the user has to answer before training.

The user answers a question once, by setting an option in the dataset's entry in `ingest.datasets`. `m3diff data check`
prints the entry for each answer.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import yaml

from m3diff.datasets.odd_captions import OddCaptions, select_unconfirmed
from m3diff.datasets.placeholders import is_placeholder
from m3diff.datasets.spec import Row
from m3diff.records.errors import Fault

# A list, tuple, set or object as a programming language prints it
PRINTED_LIST = re.compile(
    r"""\s*(
        [A-Za-z_][\w.]*\(.*[,"'].*\) | \(\s*[bur]*["'].*\)     # array(["..."]), WrappedArray(..., ...), ("...",)
        | \[\s*(?:[bur]*["']|\[|\{).* | \[.*,.*\] | \{.*\}
    )\s*""",
    re.VERBOSE | re.DOTALL,
)
# A Python literal with a prefix, such as bytes printed by str(): b'it fell'. Without a prefix it may be a quotation
PYTHON_LITERAL = re.compile(
    r"""\s*(?P<outer>["']?) (?:[bruf]|br|rb|fr|rf) (?P<quote>\'{3}|"{3}|'|") (?:\\.|(?!(?P=quote))[^\\])* (?P=quote)
    (?P=outer)\s*""",
    re.VERBOSE | re.IGNORECASE | re.DOTALL,
)
# The beginning of a sentence that looks like a literal: b's car is near the boys', b' is where a' was
SENTENCE = re.compile(r"\s*[a-z]'s?\s", re.IGNORECASE)
SINGLE_WORD = re.compile(r"[^\W\d_]+[.,;:!?]*|[.,;:!?]")
SEPARATORS = ("<sep>", "[SEP]", "<br>", "|", "##", "\n", ";", "\t")
# A character counts as a separator if at least this share of the captions contains it. A rarer one is part of the text
MIN_SEPARATED_SHARE = 0.2

Caption = tuple[Row, str]  # a caption, after the row that contains it


class Doubt(NamedTuple):
    """A question to the user, with its possible answers.

    Each answer consists of options for the dataset's entry. The most likely answer is the first. A doubt without
    answers reports a fault that has to be fixed in the files. If `is_sure` is true, the first answer can be written
    into a new entry without asking the user.
    """

    question: Fault
    answers: list[dict[str, Any]]
    is_sure: bool = False


def find_doubts(
    rows: Sequence[Row], options: Mapping[str, Any], is_user_dataset: bool, odd_captions: Sequence[OddCaptions] = ()
) -> Iterator[Doubt]:
    """Check the captions of a dataset, and yield the questions that the options of its entry do not answer.

    Args:
        is_user_dataset: whether the user collected the dataset (reader `pairs`). Its captions get additional checks.
        odd_captions: captions of the dataset that were probably not written by a person.
    """
    # Answers to questions are often single words, lists of numbers, or "none"
    rows_with_captions = [row for row in rows if isinstance(row.references, list) and row.question is None]
    captions: list[Caption] = []
    for row in rows_with_captions:
        captions += [(row, text) for text in row.references if isinstance(text, str)]

    doubts_about_literals = [*_doubts_about_printed_lists(captions), *_doubts_about_literals(captions)]
    yield from doubts_about_literals
    yield from _doubts_about_single_words(rows_with_captions)
    if not is_user_dataset:
        return

    if options.get("separator") is None:
        yield from _doubts_about_separators(captions)
    yield from _doubts_about_placeholders(captions, options.get("no_caption"))

    # The doubts about printed lists and literals already cover the quotes and escapes in them
    covered_kinds = {"literals", "escapes"} if doubts_about_literals else set[str]()
    other_odd_captions = [
        captions_of_kind for captions_of_kind in odd_captions if captions_of_kind.kind not in covered_kinds
    ]
    yield from _doubts_about_odd_captions(other_odd_captions, options.get("confirmed") or ())


def _doubts_about_printed_lists(captions: Sequence[Caption]) -> Iterator[Doubt]:
    """Check for captions that are lists or objects printed as text. If there are any, yield a doubt."""
    printed_lists = [
        (row, text.strip()) for row, text in captions if PRINTED_LIST.fullmatch(text) and not is_placeholder(text)
    ]
    if printed_lists:
        _, example = printed_lists[0]
        yield Doubt(
            Fault(
                "datasets.captions_are_printed_lists",
                path=_first_source(printed_lists),
                example=_excerpt(example),
                rows=_count_rows(printed_lists),
            ),
            [],
        )


def _doubts_about_literals(captions: Sequence[Caption]) -> Iterator[Doubt]:
    """Check for captions that are Python literals. If there are any, yield a doubt.

    A model would learn the quotes and escapes of the literals.
    """
    # Checking the last character first is faster than the pattern, which matters for millions of captions
    quotations = [(row, text.strip()) for row, text in captions if text.rstrip().endswith(("'", '"'))]
    literals = [(row, text) for row, text in quotations if PYTHON_LITERAL.fullmatch(text)]
    if not literals:
        return
    may_be_sentences = all(SENTENCE.match(text) for _, text in literals)
    if may_be_sentences and 2 * len(literals) < len(captions):
        return
    _, example = literals[0]
    yield Doubt(
        Fault(
            "datasets.captions_are_python_literals",
            path=_first_source(literals),
            example=_excerpt(example),
            rows=_count_rows(literals),
        ),
        [],
    )


def _doubts_about_single_words(rows: Sequence[Row]) -> Iterator[Doubt]:
    """Check for captions that are split into single words. If most rows have such captions, yield a doubt.

    Args:
        rows: the rows that have a list of captions.
    """
    rows_of_words = [row for row in rows if _has_only_words(row)]
    if 2 * len(rows_of_words) > len(rows):
        first_row = rows_of_words[0]
        yield Doubt(
            Fault(
                "datasets.captions_are_single_words",
                path=first_source(first_row),
                words=[str(word) for word in first_row.references[:4]],
                rows=len(rows_of_words),
            ),
            [],
        )


def _has_only_words(row: Row) -> bool:
    """Return True if a row has more than three captions, and each of them is a single word or punctuation mark."""
    return len(row.references) > 3 and all(SINGLE_WORD.fullmatch(str(text)) for text in row.references)


def _doubts_about_separators(captions: Sequence[Caption]) -> Iterator[Doubt]:
    """Check whether one of `SEPARATORS` splits many captions into several texts. If so, yield a doubt about it."""
    for separator in SEPARATORS:
        # Semicolons, line breaks and tabs are only separators if each part has several words
        min_words = 2 if separator in ";\n\t" else 1
        separated_captions = [(row, text) for row, text in captions if _is_separated(text, separator, min_words)]
        if separated_captions and len(separated_captions) >= MIN_SEPARATED_SHARE * len(captions):
            _, example = separated_captions[0]
            yield Doubt(
                Fault(
                    "datasets.possible_separator",
                    path=_first_source(separated_captions),
                    value=separator,
                    captions=len(separated_captions),
                    example=example[:60],
                ),
                [{"separator": separator}, {"separator": ""}],
            )
            return


def _is_separated(text: str, separator: str, min_words: int) -> bool:
    """Return True if the separator divides a text into several parts of at least `min_words` words."""
    word_counts = [len(part.split()) for part in text.split(separator) if part.strip()]
    return len(word_counts) > 1 and min(word_counts) >= min_words


def _doubts_about_placeholders(captions: Sequence[Caption], no_caption: Sequence[str] | None) -> Iterator[Doubt]:
    """Check for texts that probably stand for a missing caption. If there are any, yield a doubt.

    The user has to confirm such texts if some are in the test split. There, empty texts are included, because they
    would be used as references.

    Args:
        no_caption: the entry's option that lists such texts; an empty list means that all texts are captions.
    """
    are_all_captions = no_caption is not None and not no_caption
    if are_all_captions:
        return
    listed_texts = {text.strip().casefold() for text in no_caption or ()}
    placeholders: list[Caption] = []
    for row, text in captions:
        plain_text = text.strip()
        is_listed = plain_text.casefold() in listed_texts
        if is_placeholder(text) and not is_listed and (plain_text or row.split == "test"):
            placeholders.append((row, text))
    if not placeholders:
        return
    test_count = sum(row.split == "test" for row, _ in placeholders)
    texts = [text.strip() for _, text in placeholders]
    _, example = placeholders[0]
    yield Doubt(
        Fault(
            "datasets.captions_say_nothing",
            path=_first_source(placeholders),
            value=example,
            texts=_describe_counts(texts),
            tested=test_count,
        ),
        [{"no_caption": sorted({*(no_caption or ()), *texts})}, {"no_caption": []}],
        is_sure=not test_count,
    )


def _doubts_about_odd_captions(odd_captions: Sequence[OddCaptions], confirmed_kinds: Sequence[str]) -> Iterator[Doubt]:
    """Check the test split for odd captions whose kind is not confirmed. If there are any, yield a single doubt."""
    unconfirmed_captions = select_unconfirmed(odd_captions, confirmed_kinds)
    if unconfirmed_captions:
        descriptions = [f"{captions}; {captions.remedy}" for captions in unconfirmed_captions]
        kinds = [*confirmed_kinds, *(captions.kind for captions in unconfirmed_captions)]
        question = Fault("datasets.odd_references_of_test", captions=descriptions)
        yield Doubt(question, [{"confirmed": kinds}])


def _first_source(captions: Sequence[Caption]) -> str:
    """Return the file and row of the first caption."""
    row, _ = captions[0]
    return first_source(row)


def first_source(row: Row) -> str:
    """Return the file and row of a record. If several rows belong to the record, return the first row."""
    return row.source.split(" and ")[0]


def _excerpt(caption: str) -> str:
    """Return the beginning of a caption on one line."""
    return " ".join(caption.split())[:60]


def _count_rows(captions: Sequence[Caption]) -> int:
    """Return the number of rows that contain the captions."""
    return len({row.source for row, _ in captions})


def _describe_counts(texts: Iterable[str]) -> str:
    """Describe the five most common texts with their counts, and the number of other texts."""
    counts = Counter(texts)
    descriptions = [f"{text[:80]!r} ({count:,})" for text, count in counts.most_common(5)]
    if len(counts) > 5:
        descriptions.append(f"and {len(counts) - 5:,} more")
    return "; ".join(descriptions)


class _OneLineDumper(yaml.SafeDumper):
    """A YAML dumper that writes a text with line breaks on one line, in double quotes."""

    def represent_str(self, data: str) -> yaml.ScalarNode:
        """Return the YAML node of a text."""
        style = '"' if "\n" in data else None
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=style)


_OneLineDumper.add_representer(str, _OneLineDumper.represent_str)


def as_yaml(value: Any) -> str:
    """Return a value as one line of YAML for `params.yaml`."""
    plain_value = json.loads(json.dumps(value))
    text = yaml.dump(
        plain_value,
        Dumper=_OneLineDumper,
        default_flow_style=True,
        sort_keys=False,
        width=10_000,
        allow_unicode=True,
    )
    return text.strip()
