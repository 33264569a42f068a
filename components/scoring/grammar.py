"""Parse captions into changes: their type, object and place, and the states before and after.

A clause is the part of a caption that describes one change. A dataset may have a grammar that reads its clauses. A
grammar is a JSON object:

    {
        "clause_separator": text between two clauses,
        "no_change": [sentences that say that nothing has changed],
        "clauses": [{"type": change type, "pattern": regular expression}],
        "inverse": {change type: {"type": change type, "words": {word: word}}}
    }

A pattern must match a whole clause. It may contain the groups `object`, `place`, `before` and `after`. `before` and
`after` are the states before and after the change, such as two colours, letters or numbers. The optional key "inverse"
says what each change looks like if the two images are swapped: its type, and words to replace.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Self

from m3diff.records.errors import data_error_if_unreadable
from m3diff.records.schemas import CHANGE_TYPES, NO_CHANGE
from m3diff.scoring.pairs import EvalPair

UNREADABLE = "unreadable"  # type of a clause that does not match any pattern of the grammar
SEVERAL = "several"  # type of a caption with several clauses, where a table has room for only one type


class Clause(NamedTuple):
    """A change as described by a caption. Parts that the caption does not mention are None."""

    type: str
    object: str | None = None
    place: str | None = None
    before: str | None = None
    after: str | None = None


class Agreement(NamedTuple):
    """Whether a clause's type, object and place agree with the references."""

    type: bool
    object: bool
    place: bool


class Correctness(NamedTuple):
    """Whether a prediction is right, at three levels of increasing strictness.

    type: it names exactly the true change types.
    place: it also names the right object and place of every change.
    exact: it also names the right states before and after every change.
    """

    type: bool
    place: bool
    exact: bool


class ChangeCounts(NamedTuple):
    """How many of a pair's changes a prediction names, at the three levels of `Correctness`."""

    type: int
    place: int
    exact: int


@dataclass(frozen=True)
class InverseRule:
    """What a change of one type looks like if the two images are swapped.

    type: type of the inverse change.
    words: word of the change -> word of the inverse change, such as "left" -> "right". If empty, the states before and
        after are swapped instead.
    """

    type: str
    words: Mapping[str, str]

    def translate(self, word: str | None) -> str | None:
        """Return the inverse of a word, or the word itself if it does not have one."""
        return None if word is None else self.words.get(word, word)


class Grammar:
    """A parser for the captions of one dataset."""

    def __init__(self, rules: Mapping[str, Any]) -> None:
        """Compile the rules of a grammar file.

        Raises:
            KeyError, TypeError, AttributeError, re.error: the rules do not have the format that the module's docstring
                describes.
        """
        self.separator = re.compile(re.escape(rules["clause_separator"]), re.IGNORECASE)
        self.no_change_sentences = {normalise_caption(sentence) for sentence in rules["no_change"]}
        self.patterns = [(rule["type"], re.compile(rule["pattern"], re.IGNORECASE)) for rule in rules["clauses"]]
        self.inverse_rules: dict[str, InverseRule] = {}
        for change_type, rule in rules.get("inverse", {}).items():
            words = {
                normalise_caption(word): normalise_caption(inverse) for word, inverse in rule.get("words", {}).items()
            }
            self.inverse_rules[change_type] = InverseRule(rule["type"], words)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a grammar file.

        Raises:
            DataError: the file is missing or not valid JSON, a key is missing, or a pattern is invalid.
        """
        with data_error_if_unreadable(path, "scoring.unreadable_grammar"):
            return cls(json.loads(path.read_text(encoding="utf-8")))

    def parse_clauses(self, caption: str) -> list[Clause]:
        """Parse a caption and return its clauses in order. The list is empty if it says that nothing changed."""
        if normalise_caption(caption) in self.no_change_sentences:
            return []
        return [self._parse_clause(normalise_caption(text)) for text in self.split_clauses(caption)]

    def split_clauses(self, caption: str) -> list[str]:
        """Split a caption into the texts of its clauses."""
        return self.separator.split(" ".join(caption.split()))

    def _parse_clause(self, text: str) -> Clause:
        for change_type, pattern in self.patterns:
            if match := pattern.fullmatch(text):
                groups = match.groupdict()
                return Clause(
                    type=change_type,
                    object=groups.get("object"),
                    place=groups.get("place"),
                    before=groups.get("before"),
                    after=groups.get("after"),
                )
        return Clause(UNREADABLE)

    def invert(self, clause: Clause) -> Clause | None:
        """Return the change that is visible if the images are swapped, or None if the clause's type has no inverse.

        If the object is named by its earlier state, it is renamed by its later state: for "the red box" that turned
        blue, the inverse change is about "the blue box".
        """
        if clause.type not in self.inverse_rules:
            return None
        rule = self.inverse_rules[clause.type]
        if rule.words:
            return Clause(
                type=rule.type,
                object=clause.object,
                place=rule.translate(clause.place),
                after=rule.translate(clause.after),
            )
        object_name = clause.object
        before = clause.before
        after = clause.after
        if object_name and before and after:
            # a function, because re.sub would read a backslash in a replacement text as a group reference
            object_name = re.sub(rf"\b{re.escape(before)}\b", lambda _: after, object_name)
        return Clause(type=rule.type, object=object_name, place=clause.place, before=after, after=before)


def normalise_caption(caption: str) -> str:
    """Return a caption in lowercase, with single spaces and without spaces or full stops at its ends."""
    return " ".join(caption.split()).strip(" .").casefold()


def change_type_order(change_type: str) -> tuple[int, str]:
    """Return a sort key for change types.

    OmniDiff's twelve types come first, in the order of CHANGE_TYPES. Other types follow in alphabetical order. The last
    are "none", "several" and "unreadable".
    """
    final_types = (NO_CHANGE, SEVERAL, UNREADABLE)
    if change_type in final_types:
        return 100 + final_types.index(change_type), change_type
    return CHANGE_TYPES.index(change_type) if change_type in CHANGE_TYPES else 50, change_type


@dataclass(frozen=True)
class ParsedCaption:
    """A prediction and the references of its pair, parsed into clauses.

    An object or a place is right if one of the references uses the same wording.

    Attributes:
        pair: the pair with its texts.
        clause_texts: the text of each predicted clause.
        predicted_clauses: clauses of the prediction. Empty if the prediction says that nothing changed.
        reference_clauses: clauses of each reference that the grammar can read. A distractor's references have none.
        reversed_caption: the parsed caption of the swapped images, with the inverse change as reference. None if the
            swapped images have no caption or the inverse change is not known.
    """

    pair: EvalPair
    clause_texts: list[str]
    predicted_clauses: list[Clause]
    reference_clauses: list[list[Clause]]
    reversed_caption: "ParsedCaption | None" = None

    @property
    def says_no_change(self) -> bool:
        """Whether the prediction says that nothing changed."""
        return not self.predicted_clauses

    @property
    def is_unreadable(self) -> bool:
        """Whether the grammar cannot read at least one clause of the prediction."""
        return UNREADABLE in self.predicted_types

    @property
    def predicted_type(self) -> str:
        """Change type that the prediction names, or "none", "several" or "unreadable", for the confusion table."""
        types = [clause.type for clause in self.predicted_clauses] or [NO_CHANGE]
        return types[0] if len(types) == 1 else SEVERAL

    @cached_property
    def predicted_types(self) -> Counter[str]:
        """Number of times that the prediction names each change type."""
        return Counter(clause.type for clause in self.predicted_clauses)

    @cached_property
    def true_types(self) -> Counter[str]:
        """Number of times that the first reference names each change type. Empty for a distractor."""
        return Counter(clause.type for clause in self.reference_clauses[0])

    @cached_property
    def correctness(self) -> Correctness:
        """Whether the prediction is right: it must name all changes of the pair and no others."""
        has_true_types = self.predicted_types == self.true_types
        true_changes = self.true_types.total()
        return Correctness(
            type=has_true_types,
            place=has_true_types and self.named_changes.place == true_changes,
            exact=has_true_types and self.named_changes.exact == true_changes,
        )

    def compare_with_references(self, clause: Clause) -> Agreement:
        """Compare the type, object and place of a clause with the references' changes of that type.

        If a pair has several changes of the type, the object must match the change at the clause's place.
        """
        true_places = {change.place for change in self._changes_of_type(clause.type)}
        true_objects = {change.object for change in self._comparable_changes(clause)}
        return Agreement(
            type=bool(true_places),
            object=clause.object in true_objects,
            place=clause.place in true_places,
        )

    def agrees_on_before_and_after(self, clause: Clause) -> bool:
        """Return True if the states before and after in a clause agree with one of the references.

        A caption may leave out the state before. States that the references do not mention are not judged. A clause is
        wrong if the state after is the same as the state before.
        """
        changes = self._comparable_changes(clause)
        true_before = {change.before for change in changes}
        true_after = {change.after for change in changes}
        has_new_state = clause.after is None or clause.after not in {clause.before, *true_before}
        is_before_right = clause.before is None or clause.before in true_before or true_before == {None}
        is_after_right = clause.after in true_after or true_after == {None}
        return bool(changes) and has_new_state and is_before_right and is_after_right

    def _changes_of_type(self, change_type: str) -> list[Clause]:
        """Return the references' changes of a type."""
        changes = []
        for clauses in self.reference_clauses:
            changes += [clause for clause in clauses if clause.type == change_type]
        return changes

    def _comparable_changes(self, clause: Clause) -> list[Clause]:
        """Return the references' changes of a clause's type. If there are several, only those at the clause's place."""
        changes = self._changes_of_type(clause.type)
        if self.true_types[clause.type] > 1:
            return [change for change in changes if change.place == clause.place]
        return changes

    @cached_property
    def named_changes(self) -> ChangeCounts:
        """How many of the pair's changes the prediction names. A change that is named twice counts only once."""
        placed_clauses = [clause for clause in self.predicted_clauses if all(self.compare_with_references(clause))]
        exact_clauses = [clause for clause in placed_clauses if self.agrees_on_before_and_after(clause)]
        return ChangeCounts(
            type=(self.predicted_types & self.true_types).total(),
            place=(count_distinct(placed_clauses) & self.true_types).total(),
            exact=(count_distinct(exact_clauses) & self.true_types).total(),
        )

    @property
    def claimed_changes(self) -> int:
        """Number of changes that the prediction claims, whether true or not. Unreadable clauses do not count."""
        return len(self.predicted_clauses) - self.predicted_types[UNREADABLE]


def count_distinct(clauses: Iterable[Clause]) -> Counter[str]:
    """Count the distinct changes of each type. Clauses with the same type, object and place are one change."""
    changes = {(clause.type, clause.object, clause.place) for clause in clauses}
    return Counter(change_type for change_type, _, _ in changes)


def load_grammars(records: Path, datasets: Iterable[str]) -> dict[str, Grammar]:
    """Load the grammar of each dataset that has one, from the `records/<dataset>/grammar.json` written by ingest."""
    paths = {dataset: records / dataset / "grammar.json" for dataset in datasets}
    return {dataset: Grammar.load(path) for dataset, path in paths.items() if path.is_file()}


def parse_predictions(grammars: Mapping[str, Grammar], pairs: Iterable[EvalPair]) -> dict[str, ParsedCaption]:
    """Parse the predictions of all pairs whose change types are known and that have a readable reference.

    A pair with a question of its own is left out, because its references need not describe the change.

    Args:
        grammars: grammars by dataset.

    Returns:
        Parsed predictions by pair id. They contain only references that the grammar can read.
    """
    parsed = {}
    for pair in pairs:
        if pair.dataset not in grammars or not pair.change_types or pair.question is not None:
            continue
        grammar = grammars[pair.dataset]
        references = [grammar.parse_clauses(reference) for reference in pair.references if normalise_caption(reference)]
        readable_references = [clauses for clauses in references if is_readable(clauses)]
        if readable_references:
            parsed[pair.id] = ParsedCaption(
                pair=pair,
                clause_texts=grammar.split_clauses(pair.prediction),
                predicted_clauses=grammar.parse_clauses(pair.prediction),
                reference_clauses=readable_references,
                reversed_caption=parse_reversed(grammar, pair, readable_references),
            )
    return parsed


def is_readable(clauses: Iterable[Clause]) -> bool:
    """Return True if the grammar could read every clause."""
    return all(clause.type != UNREADABLE for clause in clauses)


def parse_reversed(grammar: Grammar, pair: EvalPair, references: list[list[Clause]]) -> ParsedCaption | None:
    """Parse the caption of the swapped images, with the inverse of the change as reference.

    Returns:
        The parsed caption. None if the swapped images have no caption, if the pair does not have exactly one change, or
        if this change does not have an inverse.
    """
    caption = pair.reversed_prediction
    if caption is None or any(len(clauses) != 1 for clauses in references):
        return None
    inverse_references = []
    for clauses in references:
        inverse = grammar.invert(clauses[0])
        if inverse is None:
            return None
        inverse_references.append([inverse])
    return ParsedCaption(
        pair=pair,
        clause_texts=grammar.split_clauses(caption),
        predicted_clauses=grammar.parse_clauses(caption),
        reference_clauses=inverse_references,
    )
