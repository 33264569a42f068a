"""What a caption says, read with its dataset's grammar: which changes, of which object, where; or that there is none.

A grammar (JSON) is {"clause_separator": str, "no_change": [sentence], "clauses": [{"type": str, "pattern": regex}]};
a pattern must match a whole clause and may hold the groups `object` and `place`.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, Self

from components.evaluate.pairs import EvalPair
from components.records import CHANGE_TYPES, NO_CHANGE, DataError

UNREADABLE = "unreadable"
"""The type of a clause that no pattern of the grammar matches."""
SEVERAL = "several"
"""The type of a caption of more than one clause, where one type is wanted."""


class Clause(NamedTuple):
    type: str
    object: str | None = None
    place: str | None = None


class Grammar:
    """Compiled patterns of one dataset."""

    def __init__(self, separator: str, no_change: list[str], clauses: list[tuple[str, str]]) -> None:
        self.separator = separator
        self.no_change = {plain(sentence) for sentence in no_change}
        self.clauses = [(kind, re.compile(pattern, re.IGNORECASE)) for kind, pattern in clauses]

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a grammar file.

        Raises:
            DataError: no such file, not JSON, a key missing, or a pattern that does not compile.
        """
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
            return cls(raw["clause_separator"], raw["no_change"], [(c["type"], c["pattern"]) for c in raw["clauses"]])
        except FileNotFoundError:
            raise DataError(f"{path}: no such file; run `m3diff ingest` again") from None
        except (ValueError, KeyError, TypeError, re.error) as error:
            fault = f"{type(error).__name__}: {error}"
            raise DataError(f"{path}: not a grammar (clause_separator, no_change, clauses): {fault}") from error

    def read(self, caption: str) -> list[Clause]:
        """The clauses of a caption in order; none where it says that nothing changed."""
        return [] if plain(caption) in self.no_change else [self._clause(plain(part)) for part in self.parts(caption)]

    def parts(self, caption: str) -> list[str]:
        """The caption cut at the clause separator."""
        return re.split(re.escape(self.separator), " ".join(caption.split()), flags=re.IGNORECASE)

    def _clause(self, text: str) -> Clause:
        for kind, pattern in self.clauses:
            if found := pattern.fullmatch(text):
                groups = found.groupdict()
                return Clause(kind, groups.get("object"), groups.get("place"))
        return Clause(UNREADABLE)


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
    """A pair's prediction beside its references, as clauses. Any wording of an object that a reference has counts."""

    pair: EvalPair
    parts: list[str]  # of the prediction, one to each of its clauses
    predicted_clauses: list[Clause]
    reference_clauses: list[list[Clause]]  # of each reference that the grammar understands

    @property
    def says_no_change(self) -> bool:
        return not self.predicted_clauses

    @cached_property
    def predicted_type(self) -> str:
        """The prediction's change type as one name, for the confusion table."""
        if not self.predicted_clauses:
            return NO_CHANGE
        return self.predicted_clauses[0].type if len(self.predicted_clauses) == 1 else SEVERAL

    @cached_property
    def predicted_types(self) -> Counter[str]:
        return Counter(clause.type for clause in self.predicted_clauses)

    @cached_property
    def true_types(self) -> Counter[str]:
        """How often each change type occurs in a reference; empty for a distractor."""
        return Counter(clause.type for clause in self.reference_clauses[0])

    @cached_property
    def type_right(self) -> bool:
        """Exactly the true change types are named."""
        return self.predicted_types == self.true_types

    @cached_property
    def exact_right(self) -> bool:
        return self.type_right and all(all(self.agrees(clause)) for clause in self.predicted_clauses)

    def agrees(self, clause: Clause) -> tuple[bool, bool, bool]:
        """Is its type among the pair's changes; does some reference name that type's object so; and its place?

        Where a type occurs twice in a pair, object and place must be those of one and the same change.
        """
        same = [known for clauses in self.reference_clauses for known in clauses if known.type == clause.type]
        places = {known.place for known in same}
        if self.true_types[clause.type] > 1:
            same = [known for known in same if known.place == clause.place]
        return bool(places), clause.object in {known.object for known in same}, clause.place in places

    @cached_property
    def changes_found(self) -> tuple[int, int]:
        """Of the pair's changes: how many are named by type, and how many with object and place as well."""
        exact = Counter(clause.type for clause in set(self.predicted_clauses) if all(self.agrees(clause)))
        return (self.predicted_types & self.true_types).total(), (exact & self.true_types).total()


def load_grammars(records: Path, datasets: Iterable[str]) -> dict[str, Grammar]:
    """The grammar of each dataset that has one: `records/<dataset>/grammar.json`, as ingest wrote it."""
    paths = {dataset: records / dataset / "grammar.json" for dataset in datasets}
    return {dataset: Grammar.load(path) for dataset, path in paths.items() if path.is_file()}


def parse_predictions(grammars: Mapping[str, Grammar], pairs: list[EvalPair]) -> dict[str, ParsedCaption]:
    """Every pair whose references its dataset's grammar understands and whose change types are known, by id."""
    parsed = {}
    for pair in pairs:
        if pair.dataset in grammars and pair.change_types:
            grammar = grammars[pair.dataset]
            references = [grammar.read(reference) for reference in pair.references if plain(reference)]
            understood = [clauses for clauses in references if all(clause.type != UNREADABLE for clause in clauses)]
            if understood:
                parts, clauses = grammar.parts(pair.prediction), grammar.read(pair.prediction)
                parsed[pair.id] = ParsedCaption(pair, parts, clauses, understood)
    return parsed
