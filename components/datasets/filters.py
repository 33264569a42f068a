"""Filters and marks of an entry's options, matched with the rows of a table by what the values mean, and counted.

YAML's `no` is False, pandas writes 0 as 0.0, and a spreadsheet writes FALSE: an option and a field match if they mean
the same, however they are written. What an option asks for decides how a field is read:

    true, false   a truth value in any spelling: true, yes, y, on, t, 1 and false, no, n, off, f, 0
    a number      a number in any spelling: 0, 0.0, "00"; in a column of truth values 0 is false and 1 is true
    null          nothing: null, NaN, an empty field, and the words that programs write for it
    text          the same text, without regard to case, white space and Unicode form; so "0" between quotes is not
                  "0.0", and "no" is not "false", if the table holds text. Numbers and truth values of the table
                  (JSON, Parquet) are read as above
    a date        the same date, in ISO's form

An option that matches no row does not what its author meant, and one that matches every row does nothing. Both are
refused, unless the entry's option `confirmed` names it.
"""

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from datetime import date
from decimal import Decimal
from fractions import Fraction
from typing import Any

from m3diff.datasets.files import columns_in, pick
from m3diff.records.errors import DataError
from m3diff.records.schemas import NO_CHANGE
from m3diff.settings.section import closest

WORDS_OF_TRUTH = {
    **dict.fromkeys(("true", "yes", "y", "on", "t"), True),
    **dict.fromkeys(("false", "no", "n", "off", "f"), False),
}
WORDS_OF_NOTHING = {"", "none", "null", "nan", "nat", "<na>"}
NUMBER = re.compile(r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]{1,3})?")

# Change types that say that nothing changed, in small letters with single spaces; all of them are read as NO_CHANGE
NAMES_OF_NO_CHANGE = {
    *(NO_CHANGE, "no change", "no changes", "nochange", "unchanged", "not changed", "without change"),
    *("without a change", "no difference", "no differences", "nothing", "nothing changed", "nothing has changed"),
    *("no changed", "no diff", "no diffs", "same", "the same", "identical", "unmodified", "not modified", "unaltered"),
    *("no modification", "no modifications", "no edit", "no edits"),
}

# How train, val and test are called elsewhere. A name of `splits` that only says so needs no row
SPLIT_ALIASES = {
    "train": ("train", "training", "restval"),
    "val": ("val", "valid", "validation", "dev", "development", "eval"),
    "test": ("test", "testing"),
}

SHOWN_VALUES = 6  # values of a column in a message
KEPT_VALUES = 1_000  # distinct values of a column that are counted one by one


def plain_text(text: str) -> str:
    """The text in small letters, in one Unicode form, without white space around it and with single spaces in it."""
    return " ".join(unicodedata.normalize("NFC", text).casefold().split())


def means_the_same(option: Any, cell: Any) -> bool:
    """True if a value of the options and a value of the table mean the same, as the module's head says."""
    if option is None or (isinstance(option, float) and math.isnan(option)):
        return _is_nothing(cell)
    if isinstance(option, bool):
        return _truth_of(cell) is option
    if isinstance(option, int | float | Decimal):
        return _number_of(cell) == _number_of(option)
    if isinstance(option, date):
        return _as_date(str(cell)) == _as_date(str(option))
    if isinstance(option, str):
        return _is_text_of(option, cell)
    return bool(option == cell)


def _is_nothing(cell: Any) -> bool:
    if isinstance(cell, str):
        return plain_text(cell) in WORDS_OF_NOTHING
    return cell is None or (isinstance(cell, float) and math.isnan(cell))


def _truth_of(cell: Any) -> bool | None:
    """The truth value that a cell of the table spells; None if it spells none."""
    if isinstance(cell, bool):
        return cell
    if isinstance(cell, str) and plain_text(cell) in WORDS_OF_TRUTH:
        return WORDS_OF_TRUTH[plain_text(cell)]
    number = _number_of(cell)
    return bool(number) if number in (0, 1) else None


def _number_of(cell: Any) -> Fraction | None:
    """The number that a cell of the table spells, exactly; None if it spells none."""
    if isinstance(cell, str):
        return Fraction(cell.strip()) if NUMBER.fullmatch(cell.strip()) else None
    if not isinstance(cell, int | float | Decimal) or not math.isfinite(cell):
        return None
    return Fraction(str(cell)) if isinstance(cell, float) else Fraction(cell)


def _as_date(text: str) -> str:
    return text.strip().replace("T", " ").removesuffix(" 00:00:00")


def _is_text_of(option: str, cell: Any) -> bool:
    if isinstance(cell, str):
        return plain_text(option) == plain_text(cell)
    if _is_nothing(cell):
        return plain_text(option) in WORDS_OF_NOTHING
    if isinstance(cell, bool):
        return _truth_of(option) is cell
    if isinstance(cell, int | float | Decimal):
        return _number_of(option) == _number_of(cell)
    return plain_text(option) == plain_text(str(cell))


def _described(cell: Any) -> str:
    """A value for a message, as YAML has it."""
    if cell is None or isinstance(cell, bool):
        return {None: "null", True: "true", False: "false"}[cell]
    shown = repr(cell)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."


class ColumnValues:
    """The values of a column, counted: at most `KEPT_VALUES` of them one by one."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.others = 0

    def add(self, shown: str) -> None:
        if shown in self.counts or len(self.counts) < KEPT_VALUES:
            self.counts[shown] += 1
        else:
            self.others += 1

    def __str__(self) -> str:
        shown = [f"{value} ({count:,})" for value, count in self.counts.most_common(SHOWN_VALUES)]
        rest = self.counts.total() + self.others - sum(count for _, count in self.counts.most_common(SHOWN_VALUES))
        return ", ".join(shown) + (f" and others ({rest:,})" if rest else "")


class ColumnNames:
    """The columns that a table has, collected from its rows for as long as a wanted one was in none of them.

    Args:
        wanted: columns, or paths into nested values.
    """

    def __init__(self, wanted: Iterable[str]) -> None:
        self.missing = dict.fromkeys(wanted)
        self.columns: dict[str, None] = {}

    def add(self, row: Mapping[str, Any]) -> None:
        if not self.missing:
            return
        for column in [column for column in self.missing if _has_column(row, column)]:
            del self.missing[column]
        for name, value in row.items():
            self.columns[name] = None
            for key in value if isinstance(value, Mapping) else ():
                self.columns[f"{name}.{key}"] = None

    def faults(self) -> Iterator[str]:
        """A sentence for each wanted column that no row has, with the nearest of those that there are."""
        for column in self.missing:
            yield f"no row has the column {column!r}; {closest(column, self.columns, of='the columns are')}"


def _has_column(row: Mapping[str, Any], path: str) -> bool:
    """True if the row has the column or the path, also with an empty value."""
    if path in row or pick(row, path) is not None:
        return True
    head, _, rest = path.partition(".")
    inner = row.get(head)
    return bool(rest) and isinstance(inner, Mapping) and _has_column(inner, rest)


class RowFilter:
    """The rows that an option matches: in each of its columns, one of the wanted values.

    Args:
        option: its name, for messages: `where` or `no_change`.
        wanted: by column, or path into nested values, a value or a list of them.
    """

    def __init__(self, option: str, wanted: Mapping[str, Any]) -> None:
        self.option = option
        self.wanted = {
            column: list(values) if isinstance(values, list | tuple) else [values] for column, values in wanted.items()
        }
        self.rows = 0
        self.matched = 0
        self._columns = ColumnNames(wanted)
        self._values = {column: ColumnValues() for column in wanted}
        self._unmatched = {column: list(values) for column, values in self.wanted.items()}
        self._verdicts: dict[tuple[str, type, Any], tuple[bool, str]] = {}

    def matches(self, row: Mapping[str, Any]) -> bool:
        """True if the row matches; it is counted."""
        self.rows += 1
        self._columns.add(row)
        is_match = True
        for column in self.wanted:
            cell = pick(row, column)
            # 1, 1.0 and True are equal as keys
            key = (column, type(cell), str(cell) if isinstance(cell, list | dict) else cell)
            if key not in self._verdicts:
                self._verdicts[key] = (self._judge(column, cell), _described(cell))
            is_wanted, shown = self._verdicts[key]
            self._values[column].add(shown)
            is_match = is_match and is_wanted
        self.matched += is_match
        return is_match

    def _judge(self, column: str, cell: Any) -> bool:
        equal = [value for value in self.wanted[column] if means_the_same(value, cell)]
        self._unmatched[column] = [value for value in self._unmatched[column] if value not in equal]
        return bool(equal)

    def __str__(self) -> str:
        columns = ", ".join(
            f"{column}: {_described(values[0]) if len(values) == 1 else '[' + ', '.join(map(_described, values)) + ']'}"
            for column, values in self.wanted.items()
        )
        return f"{self.option}: {{{columns}}}"

    def notes(self) -> Iterator[str]:
        """How many rows match, and which of several wanted values no row has."""
        if self.rows:
            yield f"{self} matches {self.matched:,} of {self.rows:,} rows"
        for column, values in self._unmatched.items():
            if self.matched and values:
                missing = ", ".join(map(_described, values))
                yield f"{self.option}: no row has {missing} in the column {column}, which holds {self._values[column]}"

    def faults(self) -> Iterator[str]:
        """Why the option cannot be meant so: a column is missing, or no row, or every row matches."""
        if not self.rows:
            return
        misspelt = list(self._columns.faults())
        yield from (f"{self.option}: {fault}" for fault in misspelt)
        # one row alone cannot show that a filter tells rows apart
        if not misspelt and (self.matched == 0 or self.matched == self.rows > 1):
            rows = f"every one of {self.rows:,} rows" if self.matched else f"0 of {self.rows:,} rows"
            held = "; ".join(f"the column {column} holds {values}" for column, values in self._values.items())
            yield f"{self} matches {rows}; {held}"


class SplitNames:
    """Translate the table's names of splits: first by the same spelling, then by the same meaning."""

    def __init__(self, splits: Mapping[Any, str]) -> None:
        self.splits = splits
        self._unmatched = dict.fromkeys(splits)
        self._values = ColumnValues()
        self._known: dict[tuple[type, Any], Any] = {}

    def add(self, cell: Any) -> None:
        """Count a row's value, also of a row that is passed over."""
        if not _is_nothing(cell) and not isinstance(cell, list | dict):
            self._values.add(_described(cell))
            name = self._name_of(cell)
            if name in self._unmatched:
                del self._unmatched[name]

    def translate(self, cell: Any, spelt: Any) -> Any:
        """The project's name of the split, or `spelt` if the option does not name it.

        Args:
            cell: the row's value.
            spelt: the value as a name: a number as text.
        """
        if not self.splits or spelt is None or isinstance(cell, list | dict):
            return spelt
        name = self._name_of(cell)
        return spelt if name is None else self.splits[name]

    def _name_of(self, cell: Any) -> Any:
        key = (type(cell), cell)
        if key not in self._known:
            exact = (name for name in self.splits if isinstance(name, str) and name == str(cell))
            alike = (name for name in self.splits if means_the_same(name, cell))
            self._known[key] = next(exact, next(alike, None))
        return self._known[key]

    def faults(self) -> Iterator[str]:
        """The names that no row has. One that is an ordinary other name of its split is not meant for every table."""
        if self._values.counts:
            for name in self._unmatched:
                if plain_text(str(name)) not in SPLIT_ALIASES[self.splits[name]]:
                    yield f"splits: {_described(name)} is no split of the table, which has {self._values}"


class NoChangeNames:
    """Change types with every name of no change read as `NO_CHANGE`; the other spellings are counted."""

    def __init__(self) -> None:
        self._spellings: Counter[str] = Counter()
        self._is_no_change: dict[str, bool] = {NO_CHANGE: True}

    def unify(self, types: Sequence[str]) -> list[str]:
        """The change types of a pair, in order; several names of no change are one."""
        unified = []
        for name in types:
            if name not in self._is_no_change:
                spelt = plain_text(re.sub(r"[\s_-]+", " ", name)).strip(" .!")
                self._is_no_change[name] = spelt in NAMES_OF_NO_CHANGE
            is_no_change = self._is_no_change[name]
            if is_no_change and name != NO_CHANGE:
                self._spellings[name] += 1
            if not is_no_change:
                unified.append(name)
            elif NO_CHANGE not in unified:
                unified.append(NO_CHANGE)
        return unified

    def notes(self) -> Iterator[str]:
        if self._spellings:
            counted = ", ".join(f"{name!r} ({count:,})" for name, count in self._spellings.most_common())
            yield f"change_types: {counted} is read as {NO_CHANGE!r}, a pair without a change"


def columns_to_find(columns: Mapping[str, Any], required: Collection[str]) -> list[str]:
    """The columns that the option `columns` names and without which no row has a fault: those of optional fields, and
    each of several names of one field."""
    wanted: dict[str, None] = {}
    for field, names in columns.items():
        listed = [names] if isinstance(names, str) else list(names or ())
        if field not in required or len(listed) > 1:
            wanted |= dict.fromkeys(column for name in listed for column in columns_in(name))
    return list(wanted)


def refuse_faults(root: Any, faults: Mapping[str, Iterable[str]], confirmed: Collection[str]) -> None:
    """Refuse options that match nothing, or everything.

    Args:
        faults: sentences by the name that `confirmed` has for them.

    Raises:
        DataError: an option has a fault and is not confirmed; the text names option, counts, values and remedy.
    """
    open_faults = {name: list(sentences) for name, sentences in faults.items() if name not in confirmed}
    lines = [sentence for sentences in open_faults.values() for sentence in sentences]
    if lines:
        names = ", ".join([*confirmed, *(name for name, sentences in open_faults.items() if sentences)])
        listed = "\n  ".join(lines)
        raise DataError(
            f"{root}: options do not match the table:\n  {listed}\n"
            f"  correct them; if they are meant so, confirm it in the entry: options: {{confirmed: [{names}]}}"
        )
