"""Captions read with their dataset's grammar: changes, each with its object and place, from what to what.

A grammar (JSON) is {"clause_separator": str, "no_change": [sentence], "clauses": [{"type": str, "pattern": regex}]};
a pattern must match a whole clause and may hold the groups `object`, `place`, `before` and `after`: what it was and
what it became (a colour, a letter, a number, ...). It may also hold "inverse": {type: {"type": str, "words": {word:
word}}}: what a change of this type is where the two images are swapped, and the words that take the place of others.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Self

from m3diff.records.errors import readable
from m3diff.records.schemas import CHANGE_TYPES, NO_CHANGE
from m3diff.scoring.pairs import EvalPair

UNREADABLE = "unreadable"  # the type of a clause that no pattern of the grammar matches
SEVERAL = "several"  # the type of a caption of more than one clause, where one type is wanted


class Clause(NamedTuple):
    """A change as a caption names it; None: not named."""

    type: str
    object: str | None = None
    place: str | None = None
    before: str | None = None
    after: str | None = None


class Readings(NamedTuple):
    """A prediction read by type alone; with object and place as well; and by what changed from what to what."""

    type: int
    place: int
    exact: int


class Grammar:
    def __init__(self, rules: Mapping[str, Any]) -> None:
        """
        Raises:
            KeyError, TypeError, AttributeError, re.error: the rules are not of the form above.
        """
        self.separator = re.compile(re.escape(rules["clause_separator"]), re.IGNORECASE)
        self.no_change = {plain(sentence) for sentence in rules["no_change"]}
        self.clauses = [(one["type"], re.compile(one["pattern"], re.IGNORECASE)) for one in rules["clauses"]]
        self.inverse = {
            kind: (rule["type"], {plain(word): plain(other) for word, other in rule.get("words", {}).items()})
            for kind, rule in rules.get("inverse", {}).items()
        }

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a grammar file.

        Raises:
            DataError: no such file, not JSON, a key missing, or a pattern that does not compile.
        """
        with readable(path, "it holds clause_separator, no_change and clauses; run `m3diff ingest` again"):
            return cls(json.loads(path.read_text(encoding="utf-8")))

    def read(self, caption: str) -> list[Clause]:
        """The clauses of a caption in order; none where it says that nothing changed."""
        return [] if plain(caption) in self.no_change else [self._clause(plain(part)) for part in self.parts(caption)]

    def parts(self, caption: str) -> list[str]:
        return self.separator.split(" ".join(caption.split()))

    def _clause(self, text: str) -> Clause:
        for kind, pattern in self.clauses:
            if found := pattern.fullmatch(text):
                groups = found.groupdict()
                return Clause(kind, *(groups.get(name) for name in Clause._fields[1:]))
        return Clause(UNREADABLE)

    def inverted(self, clause: Clause) -> Clause | None:
        """The change that is there instead where the images are swapped; None where its type has no such change.

        An object that is named by what it was, such as the red box that turned blue, is named by what it became.
        """
        if clause.type not in self.inverse:
            return None
        kind, words = self.inverse[clause.type]
        _, name, place, before, after = clause
        if words:
            return Clause(kind, name, place and words.get(place, place), None, after and words.get(after, after))
        if name and before and after:
            name = re.sub(rf"\b{re.escape(before)}\b", lambda _: after, name)
        return Clause(kind, name, place, after, before)


def plain(caption: str) -> str:
    return " ".join(caption.split()).strip(" .").casefold()


def type_order(change_type: str) -> tuple[int, str]:
    """The twelve types of OmniDiff in its order, then a dataset's own by name, then none, several, unreadable."""
    last = (NO_CHANGE, SEVERAL, UNREADABLE)
    if change_type in last:
        return 100 + last.index(change_type), change_type
    return CHANGE_TYPES.index(change_type) if change_type in CHANGE_TYPES else 50, change_type


@dataclass(frozen=True)
class ParsedCaption:
    """A pair's prediction beside its references, as clauses. Any wording of an object that a reference has counts.

    The prediction is right by type where exactly the true change types are named, by place where every change is named
    with type, object and place, and no other; exactly right where what changed from what to what is named too.
    """

    pair: EvalPair
    parts: list[str]  # of the prediction, one to each of its clauses
    predicted_clauses: list[Clause]
    reference_clauses: list[list[Clause]]  # of each reference that the grammar understands
    reversed: "ParsedCaption | None" = None  # the caption of the swapped images beside the inverse change, where known

    @property
    def says_no_change(self) -> bool:
        return not self.predicted_clauses

    @property
    def unreadable(self) -> bool:
        """Some clause of the prediction is none that the grammar knows."""
        return UNREADABLE in self.predicted_types

    @property
    def predicted_type(self) -> str:
        """The prediction's change type as one name, for the confusion table."""
        kinds = [clause.type for clause in self.predicted_clauses] or [NO_CHANGE]
        return kinds[0] if len(kinds) == 1 else SEVERAL

    @cached_property
    def predicted_types(self) -> Counter[str]:
        return Counter(clause.type for clause in self.predicted_clauses)

    @cached_property
    def true_types(self) -> Counter[str]:
        """Counts of each change type in a reference; empty for a distractor."""
        return Counter(clause.type for clause in self.reference_clauses[0])

    @cached_property
    def right(self) -> Readings:
        types, total, found = self.predicted_types == self.true_types, self.true_types.total(), self.changes_found
        return Readings(types, types and found.place == total, types and found.exact == total)

    def agrees(self, clause: Clause) -> tuple[bool, bool, bool]:
        """Agreement by type, by object and by place: with the pair's changes, and with references to that type.

        Where a type occurs twice in a pair, object and place must be those of one and the same change.
        """
        places = {known.place for known in self._same_type(clause)}
        return bool(places), clause.object in {known.object for known in self._known(clause)}, clause.place in places

    def says_change(self, clause: Clause) -> bool:
        """True where it says from what to what as some reference does.

        It need not say from what. What no reference tells is not judged; but nothing turns into what it was.
        """
        known = self._known(clause)
        before, after = {one.before for one in known}, {one.after for one in known}
        turned = clause.after is None or clause.after not in {clause.before, *before}
        from_what = clause.before in {None, *before} or before == {None}
        to_what = clause.after in after or after == {None}
        return bool(known) and turned and from_what and to_what

    def _same_type(self, clause: Clause) -> list[Clause]:
        return [known for clauses in self.reference_clauses for known in clauses if known.type == clause.type]

    def _known(self, clause: Clause) -> list[Clause]:
        """The references' changes of this type; those at its place, where there are several."""
        same = self._same_type(clause)
        several = self.true_types[clause.type] > 1
        return [known for known in same if known.place == clause.place] if several else same

    @cached_property
    def changes_found(self) -> Readings:
        """Numbers of the pair's changes that are named, each counted once."""
        placed = [clause for clause in self.predicted_clauses if all(self.agrees(clause))]
        exact = [clause for clause in placed if self.says_change(clause)]
        distinct = [{clause[:3] for clause in clauses} for clauses in (placed, exact)]  # whatever it was and became
        types = [self.predicted_types, *(Counter(kind for kind, *_ in of) for of in distinct)]
        return Readings(*((of & self.true_types).total() for of in types))

    @property
    def changes_told(self) -> int:
        """Changes that the prediction tells in clauses that the grammar reads."""
        return len(self.predicted_clauses) - self.predicted_types[UNREADABLE]


def load_grammars(records: Path, datasets: Iterable[str]) -> dict[str, Grammar]:
    """The grammar of each dataset that has one: `records/<dataset>/grammar.json`, as ingest wrote it."""
    paths = {dataset: records / dataset / "grammar.json" for dataset in datasets}
    return {dataset: Grammar.load(path) for dataset, path in paths.items() if path.is_file()}


def parse_predictions(grammars: Mapping[str, Grammar], pairs: Iterable[EvalPair]) -> dict[str, ParsedCaption]:
    """Every pair whose references its dataset's grammar understands and whose change types are known, by id."""
    parsed = {}
    for pair in pairs:
        if pair.dataset in grammars and pair.change_types:
            grammar = grammars[pair.dataset]
            references = [grammar.read(reference) for reference in pair.references if plain(reference)]
            understood = [clauses for clauses in references if all(clause.type != UNREADABLE for clause in clauses)]
            if understood:
                parts, clauses = grammar.parts(pair.prediction), grammar.read(pair.prediction)
                swapped = parse_reversed(grammar, pair, understood)
                parsed[pair.id] = ParsedCaption(pair, parts, clauses, understood, swapped)
    return parsed


def parse_reversed(grammar: Grammar, pair: EvalPair, references: list[list[Clause]]) -> ParsedCaption | None:
    """The caption of the swapped images beside the inverse of the change; None without a caption, or where the pair has
    not one change, or one without an inverse."""
    text = pair.reversed_prediction
    if text is None or any(len(clauses) != 1 for clauses in references):
        return None
    inverse = [grammar.inverted(clause) for (clause,) in references]
    known = [[clause] for clause in inverse if clause is not None]
    return ParsedCaption(pair, grammar.parts(text), grammar.read(text), known) if len(known) == len(inverse) else None
