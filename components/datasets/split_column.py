"""Find the column that names the split of each pair, based on its values. The header may be in any language.

A column is used without asking if all of its values are split names, and it either has at least two splits or a header
that means split. This check reads the whole table, because the first rows of a table sorted by split are all `train`.
The user is asked in four other cases: only some values are split names, a column with such a header contains numbers,
two columns contradict each other, or all rows have the same split and it is not train.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import permutations
from pathlib import Path
from typing import Any

from m3diff.datasets.doubts import Doubt
from m3diff.datasets.files import column_names, pick, read_values
from m3diff.datasets.filters import (
    is_short_split_name,
    means_the_same,
    readings_of_splits,
    split_in_name,
    split_of_cell,
)
from m3diff.datasets.order import words_in
from m3diff.records.errors import Fault
from m3diff.records.schemas import Split

DOCUMENTED_HEADERS = (["split"], ["subset"])  # words of headers that mean split whatever the values are
HEADER_WORDS = {  # words that mean split in column headers, without accents
    "split", "splits", "subset", "subsets", "set", "partition", "partitions", "fold", "phase", "usage", "purpose",
    "teil", "teile", "teilmenge", "menge", "satz", "datensatz", "aufteilung", "abschnitt", "verwendung", "zweck",
    "conjunto", "subconjunto", "particion", "particao", "division", "divisao", "jeu", "ensemble", "partie",
    "insieme", "sottoinsieme", "partizione", "suddivisione", "deel", "deelverzameling", "zbior", "podzbior",
    "часть", "выборка", "набор", "разбиение", "划分", "子集", "数据集", "分割", "區分", "区分", "분할",
}  # fmt: skip
MAX_NUMBERS = 3  # a column with more distinct numbers probably contains counts or folds
MAX_VALUES = 1_000  # a column with more distinct values does not name splits
MAX_SHOWN_VALUES = 6  # maximum number of values shown in a question


@dataclass
class CandidateColumn:
    """A column that may name the split.

    counts: number of rows per value.
    splits_of_rows: the split that the value of each row names, or None, in table order.
    """

    name: str
    counts: Counter[Any] = field(default_factory=Counter)
    splits_of_rows: list[Split | None] = field(default_factory=list)

    @property
    def splits(self) -> dict[str, Split]:
        """The values that name a split, in table order, with their splits."""
        split_of_value = {value: split_of_cell(value) for value in self.counts}
        return {value: split for value, split in split_of_value.items() if split is not None}

    @property
    def other_values(self) -> list[Any]:
        """The values that do not name a split."""
        return [value for value in self.counts if split_of_cell(value) is None]

    @property
    def has_documented_header(self) -> bool:
        """Whether the header is in DOCUMENTED_HEADERS. Such a column names the split whatever its values are."""
        return _header_words(self.name) in DOCUMENTED_HEADERS

    @property
    def has_split_header(self) -> bool:
        """Whether the header contains a word for split."""
        return _has_split_header(self.name)

    @property
    def is_sure(self) -> bool:
        """Whether the column certainly names the split, so that the user is not asked.

        This is the case if all values are split names, and either the header means split, or there are at least two
        splits and one of their names is not short.
        """
        if not self.counts or self.other_values:
            return False
        has_long_name = not all(map(is_short_split_name, self.splits))
        return self.has_split_header or (has_long_name and len({*self.splits.values()}) > 1)

    @property
    def holds_numbers(self) -> bool:
        """Whether the values are two or three different numbers."""
        return 1 < len(self.counts) <= MAX_NUMBERS and all(map(_is_number, self.counts))

    @property
    def may_name_splits(self) -> bool:
        """Whether some values look like splits, so that the user has to decide whether they are."""
        splits = {*self.splits.values()}
        if self.has_split_header:
            return bool(splits) or self.holds_numbers
        # A column with only `train` needs no question, because tables without splits are also used for training
        is_one_split = bool(splits - {"train"}) and not self.other_values
        return len(splits) > 1 or is_one_split

    def readings(self) -> list[dict[str, Split]]:
        """Return one `splits` option per possible meaning of the values.

        Values that are already named train, val or test are left out.
        """
        split_of_value = {}
        for value in self.counts:
            if isinstance(value, str):
                split = split_of_cell(value) or split_in_name(value)
                if split is not None:
                    split_of_value[value] = split
        options = []
        for reading in readings_of_splits(dict(sorted(split_of_value.items()))):
            options.append({value: split for value, split in reading.items() if value != split})
        return options

    def __str__(self) -> str:
        common_values = self.counts.most_common(MAX_SHOWN_VALUES)
        descriptions = ", ".join(f"{value!r} ({count:,})" for value, count in common_values)
        hidden_count = len(self.counts) - len(common_values)
        ending = f" and {hidden_count:,} more" if hidden_count else ""
        return f"{self.name} holds {descriptions}{ending}"


@dataclass(frozen=True)
class SplitChoice:
    """The result of looking for the split column.

    column: the column that names the split. None if there is no such column, or if the user has to choose it.
    splits: the option `splits` that translates the values of the column.
    notes: lines that explain the choice.
    doubts: questions for the user.
    occupied: columns that name a split or may name one. They are not read as captions.
    """

    column: str | None = None
    splits: Mapping[str, Split] = field(default_factory=dict)
    notes: Sequence[str] = ()
    doubts: Sequence[Doubt] = ()
    occupied: Sequence[str] = ()


def choose_split_column(
    path: Path,
    table_options: Mapping[str, Any],
    values: Mapping[str, Sequence[Any]],
    options_without_column: Mapping[str, Any],
) -> SplitChoice:
    """Choose the column that names the split of each pair.

    Args:
        path: the table.
        table_options: the options `delimiter` and `rows` of the table.
        values: the first values of each column that does not contain images. A key may be a path into objects.
        options_without_column: the options to use if no column names the split.

    Raises:
        DataError: the table cannot be read.
    """
    candidates = [name for name, column in values.items() if _is_candidate(name, column)]
    columns = _read_columns(path, table_options, candidates)
    columns_with_documented_header = [column for column in columns if column.has_documented_header]
    sure_columns = [column for column in columns if column.is_sure and not column.has_documented_header]
    if columns_with_documented_header:
        return _choose_documented(path, columns_with_documented_header[0], sure_columns)
    if sure_columns:
        chosen_column = sure_columns[0]
        if any(column.splits_of_rows != chosen_column.splits_of_rows for column in sure_columns):
            return _ask_user(path, sure_columns, "datasets.columns_of_different_splits")
        note = f"{path.name}: {chosen_column}, so it is the split: option `columns`"
        return _choose_column(path, chosen_column, [note], [column.name for column in sure_columns])
    possible_columns = [column for column in columns if column.may_name_splits]
    if possible_columns:
        return _ask_user(path, possible_columns, "datasets.columns_of_possible_splits", [dict(options_without_column)])
    return SplitChoice()


def documented_columns(names: Sequence[str]) -> list[str]:
    """Return the columns whose header is in DOCUMENTED_HEADERS."""
    return [name for name in names if _header_words(name) in DOCUMENTED_HEADERS]


def _choose_documented(path: Path, column: CandidateColumn, rivals: list[CandidateColumn]) -> SplitChoice:
    """Choose the column with the documented header. Ask if it contains numbers or if another column contradicts it."""
    contradicting_columns = [rival for rival in rivals if rival.splits_of_rows != column.splits_of_rows]
    if contradicting_columns:
        return _ask_user(path, [column, *contradicting_columns], "datasets.columns_of_different_splits")
    if column.holds_numbers:
        return _ask_user(path, [column], "datasets.split_of_numbers")
    return _choose_column(path, column, [], [column.name, *(rival.name for rival in rivals)])


def _choose_column(path: Path, column: CandidateColumn, notes: list[str], occupied: list[str]) -> SplitChoice:
    """Choose a column as the split column. If a split name in it is ambiguous, add a question for the user."""
    readings = column.readings()
    if len(readings) > 1:
        answers = [{"splits": splits} for splits in readings]
        doubt = Doubt(Fault("datasets.ambiguous_splits", path=path.name, column=str(column)), answers)
        return SplitChoice(column.name, notes=notes, doubts=[doubt], occupied=occupied)
    (splits,) = readings
    if splits:
        notes = [*notes, f"{path.name}: its splits have other names: option `splits`"]
    return SplitChoice(column.name, splits=splits, notes=notes, occupied=occupied)


def _ask_user(
    path: Path, columns: Sequence[CandidateColumn], code: str, further_answers: Sequence[dict[str, Any]] = ()
) -> SplitChoice:
    """Return a choice without a column, with a question that asks the user which column names the split.

    Args:
        code: error code of the question.
    """
    answers: list[dict[str, Any]] = []
    for column in columns:
        answers += _answers_for(column)
    answers += further_answers
    doubt = Doubt(Fault(code, path=path.name, columns=[str(column) for column in columns]), answers)
    return SplitChoice(doubts=[doubt], occupied=[column.name for column in columns])


def _answers_for(column: CandidateColumn) -> Iterator[dict[str, Any]]:
    """Yield the options for each possible meaning of a column's values, as answers to a question.

    If the values are numbers, there are two possible meanings. If some values are not split names, one answer leaves
    out their rows and another answer uses these rows for training.
    """
    column_option: dict[str, Any] = {} if column.name == "split" else {"columns": {"split": column.name}}
    if column.holds_numbers:
        for splits in _likely_meanings(column.counts):
            yield {**column_option, "splits": splits}
        return
    for splits in column.readings():
        options = column_option | ({"splits": splits} if splits else {})
        if not column.other_values or not column.splits:
            yield options
            continue
        yield options | {"where": {column.name: list(column.splits)}}
        # The option `splits` cannot contain an empty cell
        if all(isinstance(value, str) and not means_the_same(None, value) for value in column.other_values):
            yield options | {"splits": {**dict.fromkeys(column.other_values, "train"), **splits}}


def _likely_meanings(counts: Counter[Any]) -> Iterator[dict[str, Split]]:
    """Yield the likely meanings of two or three numbers: the most common is train, the others are val and test."""
    train, *other_numbers = [str(number) for number, _ in counts.most_common()]
    splits: tuple[Split, ...] = ("val", "test") if len(other_numbers) > 1 else ("test", "val")
    for order in permutations(splits, len(other_numbers)):
        yield {train: "train", **dict(zip(sorted(other_numbers), order, strict=True))}


def _is_candidate(name: str, column: Sequence[Any]) -> bool:
    """Return True if the header or the first values of a column suggest that it names splits."""
    if _header_words(name) in DOCUMENTED_HEADERS:
        return True
    if any(isinstance(value, list | dict) for value in column):
        return False
    return _has_split_header(name) or any(split_of_cell(value) for value in column)


def _header_words(name: str) -> list[str]:
    """Return the words of a column's name. For a path into objects, only its last part is used."""
    return words_in(name.split(".")[-1])


def _has_split_header(name: str) -> bool:
    return not HEADER_WORDS.isdisjoint(_header_words(name))


def _is_number(value: Any) -> bool:
    """Return True for a number from 0 to 9 in any spelling, such as "0", "00" and 0.0."""
    return not isinstance(value, bool) and any(means_the_same(number, value) for number in range(10))


def _read_columns(path: Path, table_options: Mapping[str, Any], names: Sequence[str]) -> list[CandidateColumn]:
    """Read the whole table, and return the named columns with the counts of their values.

    Columns with too many distinct values are left out.
    """
    columns = [CandidateColumn(name) for name in names]
    if not columns:
        return []
    parquet_columns: list[str] = []
    if path.suffix.lower() == ".parquet":
        # Reading embedded images would take most of the time
        for column_name in column_names(path):
            if any(f"{name}.".startswith(f"{column_name}.") for name in names):
                parquet_columns.append(column_name)
    delimiter = table_options.get("delimiter")
    for _, row in read_values(path, (), delimiter, table_options.get("rows", ""), parquet_columns or None):
        if not isinstance(row, dict):
            continue
        for column in columns:
            value = pick(row, column.name)
            column.counts[value if isinstance(value, str | int | float | None) else str(value)] += 1
            column.splits_of_rows.append(split_of_cell(value))
        columns = [column for column in columns if column.has_documented_header or len(column.counts) <= MAX_VALUES]
    return columns
