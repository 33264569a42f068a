"""Compare the values of options with the cells of a table by meaning, and count the matches.

The same value may be written in several ways: YAML reads `no` as False, pandas writes 0 as 0.0, and spreadsheets write
FALSE. For this reason, an option and a cell match if they mean the same. The type of the option's value determines how
a cell is read:

    true, false   a truth value in any spelling: true, yes, y, on, t, 1 and false, no, n, off, f, 0
    a number      a number in any spelling: 0, 0.0, "00". In a column of truth values, 0 is false and 1 is true
    null          a missing value: null, NaN, an empty field, and the words that programs write for it
    text          the same text, ignoring case, white space and Unicode form. If the table contains text, a quoted "0"
                  does not match "0.0", and "no" does not match "false". Numbers and truth values in the table (JSON,
                  Parquet) are compared as described above
    a date        the same date in ISO format

An option that matches no row or every row is probably a mistake. It is refused unless the entry's option `confirmed`
lists it.
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
from m3diff.records.errors import DataError, Fault
from m3diff.records.schemas import NO_CHANGE, Split
from m3diff.settings.section import suggest_name

WORDS_OF_TRUTH = {
    **dict.fromkeys(("true", "yes", "y", "on", "t"), True),
    **dict.fromkeys(("false", "no", "n", "off", "f"), False),
}
WORDS_OF_NOTHING = {"", "none", "null", "nan", "nat", "<na>"}
NUMBER = re.compile(r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]{1,3})?")

# Change types for an unchanged pair, in lowercase with single spaces. All of them are read as NO_CHANGE
NAMES_OF_NO_CHANGE = {
    NO_CHANGE, "no change", "no changes", "nochange", "unchanged", "not changed", "without change",
    "without a change", "no difference", "no differences", "nothing", "nothing changed", "nothing has changed",
    "no changed", "no diff", "no diffs", "same", "the same", "identical", "unmodified", "not modified", "unaltered",
    "no modification", "no modifications", "no edit", "no edits",
}  # fmt: skip

# Common names of the splits, in lowercase and without accents. The option `splits` may list these names even if the
# table does not contain them, because an entry may list them for any table
SPLIT_ALIASES: dict[Split, tuple[str, ...]] = {
    "train": (
        "train", "training", "trn", "trainset", "trainingset", "restval",
        "trainingsdaten", "trainingsmenge", "lernmenge", "entrainement", "apprentissage", "entrenamiento",
        "treino", "treinamento", "addestramento", "trening", "egitim", "обучение", "обучающая",
        "训练", "训练集", "訓練", "訓練集", "学習", "훈련",
    ),
    "val": (
        "val", "valid", "validation", "validate", "vld", "valset", "dev", "devel", "development",
        "eval", "evaluation",
        "validierung", "validierungsdaten", "validierungsmenge", "validacion", "validacao", "validazione",
        "validatie", "walidacja", "dogrulama", "валидация", "проверка", "验证", "验证集", "驗證", "検証", "검증",
    ),
    "test": (
        "test", "testing", "tests", "tst", "testset", "holdout",
        "testdaten", "testmenge", "prueba", "pruebas", "teste", "testes", "тест", "тестовая",
        "测试", "测试集", "測試", "テスト", "테스트",
    ),
}  # fmt: skip
# Aliases of val that mean test if the table has another name for val
AMBIGUOUS_ALIASES = ("eval", "evaluation")
# Names that are only recognised in a split column. In a file name they may be a language
SHORT_SPLIT_ALIASES: dict[Split, tuple[str, ...]] = {"train": ("tr",), "val": ("va",), "test": ("te", "ts")}
# Words that are ignored next to the name of a split: train set, testing data
SPLIT_NOUNS = {"set", "split", "subset", "data", "dataset", "part", "pairs", "images"}
YEAR = re.compile(r"(?:19|20)\d\d")  # as in COCO's train2014
WORD_OF_NAME = re.compile(r"[^\W\d_]+")

MAX_SHOWN_VALUES = 6  # maximum number of a column's values in a message
MAX_COUNTED_VALUES = 1_000  # maximum number of distinct values that are counted separately per column


def plain_text(text: str) -> str:
    """Return a text in lowercase and in Unicode form NFC, stripped and with single spaces."""
    return " ".join(unicodedata.normalize("NFC", text).casefold().split())


def plain_name(text: str) -> str:
    """Return the result of `plain_text` without accents."""
    letters = unicodedata.normalize("NFKD", plain_text(text))
    return unicodedata.normalize("NFC", "".join(letter for letter in letters if not unicodedata.combining(letter)))


def split_in_name(name: str) -> Split | None:
    """Return the split in a name such as `Train`, `validation` or `my_dev`, or None unless it names exactly one."""
    words = WORD_OF_NAME.findall(plain_name(name))
    splits = {split for split, aliases in SPLIT_ALIASES.items() if not {*aliases}.isdisjoint(words)}
    return splits.pop() if len(splits) == 1 else None


def split_of_cell(cell: Any) -> Split | None:
    """Return the split that a table cell names (`Training`, `val2014`, `test set`, `tr`), or None if it names none."""
    if not isinstance(cell, str):
        return None
    words = re.findall(r"[^\W\d_]+|\d+", plain_name(cell))
    names = [word for word in words if word not in SPLIT_NOUNS and not YEAR.fullmatch(word)]
    for split, aliases in SPLIT_ALIASES.items():
        if len(names) == 1 and names[0] in (*aliases, *SHORT_SPLIT_ALIASES[split]):
            return split
    return None


def is_short_split_name(cell: str) -> bool:
    """Return True if a split name is so short that it may mean something else: `tr`."""
    return any(plain_name(cell) in aliases for aliases in SHORT_SPLIT_ALIASES.values())


def readings_of_splits(splits: Mapping[str, Split]) -> list[dict[str, Split]]:
    """Return the possible meanings of split names, the most likely first. If no name is ambiguous, return only one.

    `eval` means test if the table has another name for val, and val if it has another name for test. If it has other
    names for both splits or for neither, `eval` is ambiguous.

    Args:
        splits: maps each name in the table to its split in `SPLIT_ALIASES`.
    """
    ambiguous = [name for name in splits if not {*AMBIGUOUS_ALIASES}.isdisjoint(WORD_OF_NAME.findall(plain_name(name)))]
    certain_splits = {split for name, split in splits.items() if name not in ambiguous}
    if not ambiguous:
        return [dict(splits)]
    possible: tuple[Split, ...] = ("val", "test")
    missing = [split for split in possible if split not in certain_splits]
    if len(missing) == 1:
        return [{**splits, **dict.fromkeys(ambiguous, missing[0])}]
    return [{**splits, **dict.fromkeys(ambiguous, split)} for split in possible]


def means_the_same(option: Any, cell: Any) -> bool:
    """Return True if an option's value and a table cell mean the same, by the rules in the module's docstring."""
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
    """Return the truth value in a cell, or None if the cell does not contain one."""
    if isinstance(cell, bool):
        return cell
    if isinstance(cell, str) and plain_text(cell) in WORDS_OF_TRUTH:
        return WORDS_OF_TRUTH[plain_text(cell)]
    number = _number_of(cell)
    return bool(number) if number in (0, 1) else None


def _number_of(cell: Any) -> Fraction | None:
    """Return the exact number in a cell, or None if the cell does not contain one."""
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


def _describe(cell: Any) -> str:
    """Return a value in YAML notation for a message."""
    if cell is None or isinstance(cell, bool):
        return {None: "null", True: "true", False: "false"}[cell]
    shown = repr(cell)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."


class ColumnValues:
    """Counts the values of a column. Only the first `MAX_COUNTED_VALUES` distinct values are counted separately."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.uncounted = 0  # number of rows whose values are not counted separately

    def add(self, value: str) -> None:
        """Count a value. It is given as text, in the form in which messages show it."""
        if value in self.counts or len(self.counts) < MAX_COUNTED_VALUES:
            self.counts[value] += 1
        else:
            self.uncounted += 1

    def __str__(self) -> str:
        commonest = self.counts.most_common(MAX_SHOWN_VALUES)
        text = ", ".join(f"{value} ({count:,})" for value, count in commonest)
        hidden = self.counts.total() + self.uncounted - sum(count for _, count in commonest)
        return f"{text} and others ({hidden:,})" if hidden else text


class ColumnNames:
    """Collects the columns of all rows, to find required columns that no row has.

    Args:
        required: columns, or paths into nested values.
    """

    def __init__(self, required: Iterable[str]) -> None:
        self.missing = dict.fromkeys(required)
        self.columns: dict[str, None] = {}

    def add(self, row: Mapping[str, Any]) -> None:
        """Record the columns of a row. This does nothing once all required columns have been found."""
        if not self.missing:
            return
        for column in [column for column in self.missing if _has_column(row, column)]:
            del self.missing[column]
        for name, value in row.items():
            self.columns[name] = None
            for key in value if isinstance(value, Mapping) else ():
                self.columns[f"{name}.{key}"] = None

    def faults(self, option: str) -> Iterator[Fault]:
        """Yield a fault for each required column that no row has. It suggests the most similar column name.

        Args:
            option: the option that names the columns.
        """
        for column in self.missing:
            hint = suggest_name(column, self.columns)
            yield Fault("datasets.unknown_column", key=option, value=column, columns=list(self.columns), hint=hint)


def _has_column(row: Mapping[str, Any], path: str) -> bool:
    """Return True if the row has the column or path, even if the value is empty."""
    if path in row or pick(row, path) is not None:
        return True
    head, _, rest = path.partition(".")
    inner = row.get(head)
    return bool(rest) and isinstance(inner, Mapping) and _has_column(inner, rest)


class RowFilter:
    """Finds and counts the rows that an option matches. A row must have one of the wanted values in every column.

    Args:
        option: name of the option for messages: `where` or `no_change`.
        wanted: for each column or path into nested values, a value or a list of values.
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
        """Count a row, and return True if it matches."""
        self.rows += 1
        self._columns.add(row)
        is_match = True
        for column in self.wanted:
            cell = pick(row, column)
            # The key includes the type, because 1, 1.0 and True are equal
            key = (column, type(cell), str(cell) if isinstance(cell, list | dict) else cell)
            if key not in self._verdicts:
                self._verdicts[key] = (self._judge(column, cell), _describe(cell))
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
            f"{column}: {_describe(values[0]) if len(values) == 1 else '[' + ', '.join(map(_describe, values)) + ']'}"
            for column, values in self.wanted.items()
        )
        return f"{self.option}: {{{columns}}}"

    def notes(self) -> Iterator[str]:
        """Yield sentences about the number of matching rows and about wanted values that no row has."""
        if self.rows:
            yield f"{self} matches {self.matched:,} of {self.rows:,} rows"
        for column, values in self._unmatched.items():
            if self.matched and values:
                missing = ", ".join(map(_describe, values))
                yield f"{self.option}: no row has {missing} in the column {column}, which holds {self._values[column]}"

    def faults(self) -> Iterator[Fault]:
        """Yield why the option is probably wrong: a column is missing, or the option matches no row or every row."""
        if not self.rows:
            return
        column_faults = list(self._columns.faults(self.option))
        yield from column_faults
        # A table with a single row does not show whether the filter distinguishes rows
        if not column_faults and (self.matched == 0 or self.matched == self.rows > 1):
            yield Fault(
                "datasets.filter_matches_all_rows" if self.matched else "datasets.filter_matches_no_row",
                filter=str(self),
                option=self.option,
                rows=self.rows,
                columns=[f"{column} ({values})" for column, values in self._values.items()],
            )


class SplitNames:
    """Translates a table's split names by the option `splits`: first by exact spelling, then by meaning."""

    def __init__(self, splits: Mapping[Any, Split]) -> None:
        self.splits = splits
        self._unmatched = dict.fromkeys(splits)
        self._values = ColumnValues()
        self._known: dict[tuple[type, Any], Any] = {}

    def add(self, cell: Any) -> None:
        """Count the value that names the split of a row. Skipped rows are counted, too."""
        if not _is_nothing(cell) and not isinstance(cell, list | dict):
            self._values.add(_describe(cell))
            name = self._name_of(cell)
            if name in self._unmatched:
                del self._unmatched[name]

    def translate(self, cell: Any, spelt: Any) -> Any:
        """Return the project's name of the split, or `spelt` if the option does not contain the value.

        Args:
            cell: the row's value.
            spelt: the same value as text.
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

    def faults(self) -> Iterator[Fault]:
        """Yield a fault for each name in the option that no row has. Common names may be missing from the table."""
        if self._values.counts:
            for name in self._unmatched:
                if plain_name(str(name)) not in SPLIT_ALIASES[self.splits[name]]:
                    values = str(self._values)
                    yield Fault("datasets.unknown_split", key="splits", value=_describe(name), values=values)


class NoChangeNames:
    """Replaces every change type that means "no change" with `NO_CHANGE`, and counts the spellings."""

    def __init__(self) -> None:
        self._spellings: Counter[str] = Counter()
        self._is_no_change: dict[str, bool] = {NO_CHANGE: True}

    def unify(self, types: Sequence[str]) -> list[str]:
        """Return the change types of a pair in order. All types that mean "no change" are merged into `NO_CHANGE`."""
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
        """Yield a sentence with the other spellings of `NO_CHANGE` and their counts, if there are any."""
        if self._spellings:
            counted = ", ".join(f"{name!r} ({count:,})" for name, count in self._spellings.most_common())
            yield f"change_types: {counted} is read as {NO_CHANGE!r}, a pair without a change"


def columns_to_find(columns: Mapping[str, Any], required: Collection[str]) -> list[str]:
    """Return the columns in the option `columns` that may be missing from single rows, but not from all rows.

    These are the columns of optional fields, and the columns of fields for which several columns are listed.

    Args:
        required: fields whose only column is checked in every row.
    """
    columns_of_options: dict[str, None] = {}
    for field, names in columns.items():
        listed_names = [names] if isinstance(names, str) else list(names or ())
        if field not in required or len(listed_names) > 1:
            for name in listed_names:
                columns_of_options |= dict.fromkeys(columns_in(name))
    return list(columns_of_options)


def refuse_faults(root: Any, faults: Mapping[str, Iterable[Fault]], confirmed: Collection[str]) -> None:
    """Check that no option is probably a mistake, unless the entry confirms the option.

    Args:
        faults: the faults of each option, by the name with which `confirmed` confirms the option.

    Raises:
        DataError: an option has a fault and is not confirmed. The fields are the faults and the names to confirm.
    """
    options_to_confirm = list(confirmed)
    unconfirmed_faults: list[Fault] = []
    for option, faults_of_option in faults.items():
        listed_faults = [] if option in confirmed else list(faults_of_option)
        if listed_faults:
            options_to_confirm.append(option)
            unconfirmed_faults += listed_faults
    if unconfirmed_faults:
        raise DataError("datasets.options_do_not_match", path=root, faults=unconfirmed_faults, names=options_to_confirm)
