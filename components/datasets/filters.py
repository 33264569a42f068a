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
from m3diff.records.errors import DataError, Fault, format_count
from m3diff.records.schemas import NO_CHANGE, Split
from m3diff.settings.section import suggest_name

WORDS_FOR_TRUTH_VALUES = {
    **dict.fromkeys(("true", "yes", "y", "on", "t"), True),
    **dict.fromkeys(("false", "no", "n", "off", "f"), False),
}
WORDS_FOR_MISSING_VALUES = {"", "none", "null", "nan", "nat", "<na>"}
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
    if len(names) != 1:
        return None
    for split, aliases in SPLIT_ALIASES.items():
        if names[0] in (*aliases, *SHORT_SPLIT_ALIASES[split]):
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
    ambiguous_names = [name for name in splits if _is_ambiguous_split_name(name)]
    certain_splits = {split for name, split in splits.items() if name not in ambiguous_names}
    if not ambiguous_names:
        return [dict(splits)]
    possible_splits: tuple[Split, ...] = ("val", "test")
    missing_splits = [split for split in possible_splits if split not in certain_splits]
    if len(missing_splits) == 1:
        possible_splits = (missing_splits[0],)
    return [{**splits, **dict.fromkeys(ambiguous_names, split)} for split in possible_splits]


def _is_ambiguous_split_name(name: str) -> bool:
    """Return True if a split name contains a word that may mean val or test: `eval`, `evaluation_set`."""
    words = WORD_OF_NAME.findall(plain_name(name))
    return not {*AMBIGUOUS_ALIASES}.isdisjoint(words)


def means_the_same(option: Any, cell: Any) -> bool:
    """Return True if an option's value and a table cell mean the same, by the rules in the module's docstring."""
    if option is None or (isinstance(option, float) and math.isnan(option)):
        return _is_missing(cell)
    if isinstance(option, bool):
        return _truth_value_of(cell) is option
    if isinstance(option, int | float | Decimal):
        return _number_of(cell) == _number_of(option)
    if isinstance(option, date):
        return _plain_date(str(cell)) == _plain_date(str(option))
    if isinstance(option, str):
        return _matches_text(option, cell)
    return bool(option == cell)


def _is_missing(cell: Any) -> bool:
    """Return True if a cell is empty, null or NaN, or contains a word that programs write for a missing value."""
    if isinstance(cell, str):
        return plain_text(cell) in WORDS_FOR_MISSING_VALUES
    return cell is None or (isinstance(cell, float) and math.isnan(cell))


def _truth_value_of(cell: Any) -> bool | None:
    """Return the truth value in a cell, or None if the cell does not contain one."""
    if isinstance(cell, bool):
        return cell
    if isinstance(cell, str) and plain_text(cell) in WORDS_FOR_TRUTH_VALUES:
        return WORDS_FOR_TRUTH_VALUES[plain_text(cell)]
    number = _number_of(cell)
    return bool(number) if number in (0, 1) else None


def _number_of(cell: Any) -> Fraction | None:
    """Return the exact number in a cell, or None if the cell does not contain one."""
    if isinstance(cell, str):
        return Fraction(cell.strip()) if NUMBER.fullmatch(cell.strip()) else None
    if not isinstance(cell, int | float | Decimal) or not math.isfinite(cell):
        return None
    return Fraction(str(cell)) if isinstance(cell, float) else Fraction(cell)


def _plain_date(text: str) -> str:
    """Return a date in ISO format without the time, if the time is midnight."""
    return text.strip().replace("T", " ").removesuffix(" 00:00:00")


def _matches_text(option: str, cell: Any) -> bool:
    """Return True if an option's text and a cell mean the same. The type of the cell determines the comparison."""
    if isinstance(cell, str):
        return plain_text(option) == plain_text(cell)
    if _is_missing(cell):
        return plain_text(option) in WORDS_FOR_MISSING_VALUES
    if isinstance(cell, bool):
        return _truth_value_of(option) is cell
    if isinstance(cell, int | float | Decimal):
        return _number_of(option) == _number_of(cell)
    return plain_text(option) == plain_text(str(cell))


def _describe(cell: Any) -> str:
    """Return a value in YAML notation for a message."""
    if cell is None or isinstance(cell, bool):
        return {None: "null", True: "true", False: "false"}[cell]
    text = repr(cell)
    return text if len(text) <= 60 else f"{text[:57]}..."


class ColumnValues:
    """Counts the values of a column. Only the first `MAX_COUNTED_VALUES` distinct values are counted separately."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.uncounted_rows = 0  # number of rows whose values are not counted separately

    def add(self, value: str) -> None:
        """Count a value. It is given as text, in the form in which messages show it."""
        if value in self.counts or len(self.counts) < MAX_COUNTED_VALUES:
            self.counts[value] += 1
        else:
            self.uncounted_rows += 1

    def __str__(self) -> str:
        common_values = self.counts.most_common(MAX_SHOWN_VALUES)
        text = ", ".join(f"{value} ({count:,})" for value, count in common_values)
        shown_rows = sum(count for _, count in common_values)
        other_rows = self.counts.total() + self.uncounted_rows - shown_rows
        return f"{text} and others ({other_rows:,})" if other_rows else text


class ColumnNames:
    """Collects the columns of all rows, to find required columns that no row has.

    Args:
        required: columns, or paths into nested values.
    """

    def __init__(self, required: Iterable[str]) -> None:
        self.missing_columns = dict.fromkeys(required)
        self.columns: dict[str, None] = {}

    def add(self, row: Mapping[str, Any]) -> None:
        """Record the columns of a row. This does nothing after all required columns have occurred."""
        if not self.missing_columns:
            return
        columns_of_row = [column for column in self.missing_columns if _has_column(row, column)]
        for column in columns_of_row:
            del self.missing_columns[column]
        for name, value in row.items():
            self.columns[name] = None
            if isinstance(value, Mapping):
                for key in value:
                    self.columns[f"{name}.{key}"] = None

    def faults(self, option: str) -> Iterator[Fault]:
        """Yield a fault for each required column that no row has. It suggests the most similar column name.

        Args:
            option: the option that names the columns.
        """
        for column in self.missing_columns:
            hint = suggest_name(column, self.columns)
            yield Fault("datasets.unknown_column", key=option, value=column, columns=list(self.columns), hint=hint)


def _has_column(row: Mapping[str, Any], path: str) -> bool:
    """Return True if the row has the column or path, even if the value is empty."""
    if path in row or pick(row, path) is not None:
        return True
    name, _, inner_path = path.partition(".")
    value = row.get(name)
    return bool(inner_path) and isinstance(value, Mapping) and _has_column(value, inner_path)


class RowFilter:
    """Finds and counts the rows that an option matches. A row must have one of the accepted values in every column.

    Args:
        option: name of the option for messages: `where` or `no_change`.
        conditions: for each column or path into nested values, an accepted value or a list of accepted values.
    """

    def __init__(self, option: str, conditions: Mapping[str, Any]) -> None:
        self.option = option
        self.accepted_values: dict[str, list[Any]] = {}
        for column, values in conditions.items():
            self.accepted_values[column] = list(values) if isinstance(values, list | tuple) else [values]
        self.row_count = 0
        self.match_count = 0
        self._columns = ColumnNames(conditions)
        self._values = {column: ColumnValues() for column in conditions}
        self._absent_values = {column: list(values) for column, values in self.accepted_values.items()}
        self._verdicts: dict[tuple[str, type, Any], tuple[bool, str]] = {}

    def matches(self, row: Mapping[str, Any]) -> bool:
        """Count a row, and return True if it matches."""
        self.row_count += 1
        self._columns.add(row)
        is_match = True
        for column in self.accepted_values:
            cell = pick(row, column)
            # The key includes the type, because 1, 1.0 and True are equal
            key = (column, type(cell), str(cell) if isinstance(cell, list | dict) else cell)
            if key not in self._verdicts:
                self._verdicts[key] = (self._accepts(column, cell), _describe(cell))
            is_accepted, description = self._verdicts[key]
            self._values[column].add(description)
            is_match = is_match and is_accepted
        self.match_count += is_match
        return is_match

    def _accepts(self, column: str, cell: Any) -> bool:
        """Return True if a column accepts the value of a cell, and record that this value occurs."""
        equal_values = [value for value in self.accepted_values[column] if means_the_same(value, cell)]
        absent_values = [value for value in self._absent_values[column] if value not in equal_values]
        self._absent_values[column] = absent_values
        return bool(equal_values)

    def __str__(self) -> str:
        conditions = []
        for column, values in self.accepted_values.items():
            description = ", ".join(map(_describe, values))
            if len(values) != 1:
                description = f"[{description}]"
            conditions.append(f"{column}: {description}")
        return f"{self.option}: {{{', '.join(conditions)}}}"

    def notes(self) -> Iterator[str]:
        """Yield sentences about the number of matching rows and about accepted values that no row has."""
        if self.row_count:
            yield f"{self} matches {self.match_count:,} of {format_count(self.row_count, 'row')}"
        for column, values in self._absent_values.items():
            if self.match_count and values:
                absent_values = ", ".join(map(_describe, values))
                values_in_table = self._values[column]
                yield f"{self.option}: no row has {absent_values} in the column {column}, which holds {values_in_table}"

    def faults(self) -> Iterator[Fault]:
        """Yield why the option is probably wrong: a column is missing, or the option matches no row or every row."""
        if not self.row_count:
            return
        column_faults = list(self._columns.faults(self.option))
        yield from column_faults
        # A table with a single row does not show whether the filter distinguishes rows
        matches_all_rows = self.match_count == self.row_count > 1
        if not column_faults and (self.match_count == 0 or matches_all_rows):
            code = "datasets.filter_matches_all_rows" if matches_all_rows else "datasets.filter_matches_no_row"
            yield Fault(
                code,
                filter=str(self),
                option=self.option,
                rows=self.row_count,
                columns=[f"{column} ({values})" for column, values in self._values.items()],
            )


class SplitNames:
    """Translates a table's split names by the option `splits`: first by exact spelling, then by meaning."""

    def __init__(self, splits: Mapping[Any, Split]) -> None:
        self.splits = splits
        self._absent_names = dict.fromkeys(splits)
        self._values = ColumnValues()
        self._name_by_cell: dict[tuple[type, Any], Any] = {}

    def add(self, cell: Any) -> None:
        """Count the value that names the split of a row. Skipped rows are counted, too."""
        if not _is_missing(cell) and not isinstance(cell, list | dict):
            self._values.add(_describe(cell))
            name = self._name_of(cell)
            if name in self._absent_names:
                del self._absent_names[name]

    def translate(self, cell: Any, text: Any) -> Any:
        """Return the project's name of the split, or `text` if the option does not contain the value.

        Args:
            cell: the row's value.
            text: the same value as text.
        """
        if not self.splits or text is None or isinstance(cell, list | dict):
            return text
        name = self._name_of(cell)
        return text if name is None else self.splits[name]

    def _name_of(self, cell: Any) -> Any:
        """Return the name in the option `splits` that a cell means, or None. An exact match comes before the others."""
        # The key includes the type, because 1, 1.0 and True are equal
        key = (type(cell), cell)
        if key not in self._name_by_cell:
            exact_names = (name for name in self.splits if isinstance(name, str) and name == str(cell))
            names_by_meaning = (name for name in self.splits if means_the_same(name, cell))
            self._name_by_cell[key] = next(exact_names, next(names_by_meaning, None))
        return self._name_by_cell[key]

    def faults(self) -> Iterator[Fault]:
        """Yield a fault for each name in the option that no row has. Common names may be missing from the table."""
        if self._values.counts:
            for name in self._absent_names:
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
        unified_types = []
        for name in types:
            if name not in self._is_no_change:
                plain_spelling = plain_text(re.sub(r"[\s_-]+", " ", name)).strip(" .!")
                self._is_no_change[name] = plain_spelling in NAMES_OF_NO_CHANGE
            is_no_change = self._is_no_change[name]
            if is_no_change and name != NO_CHANGE:
                self._spellings[name] += 1
            if not is_no_change:
                unified_types.append(name)
            elif NO_CHANGE not in unified_types:
                unified_types.append(NO_CHANGE)
        return unified_types

    def notes(self) -> Iterator[str]:
        """Yield a sentence with the other spellings of `NO_CHANGE` and their counts, if there are any."""
        if self._spellings:
            spellings = ", ".join(f"{name!r} ({count:,})" for name, count in self._spellings.most_common())
            yield f"change_types: {spellings} is read as {NO_CHANGE!r}, a pair without a change"


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
        if option in confirmed:
            continue
        new_faults = list(faults_of_option)
        if new_faults:
            options_to_confirm.append(option)
            unconfirmed_faults += new_faults
    if unconfirmed_faults:
        raise DataError("datasets.options_do_not_match", path=root, faults=unconfirmed_faults, names=options_to_confirm)
