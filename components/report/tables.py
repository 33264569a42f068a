"""Represent tables of scores, and format them for the terminal, as CSV and as LaTeX."""

import csv
import io
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

from m3diff.records.progress import align_columns
from m3diff.scoring.bootstrap import Interval
from m3diff.scoring.metrics import Value

ABSENT = "–"
# Marks after the name of a row
PARTIAL_MARK = "*"  # the run scores fewer pairs than papers do
CHOSEN_MARK = "†"  # the epoch was chosen on the test split
UNIFORM_MARK = "‡"  # all references use the same words, so CIDEr is 0
LATEX_MARKS = {CHOSEN_MARK: r"$^\dagger$", PARTIAL_MARK: "$^*$", UNIFORM_MARK: r"$^\ddagger$"}
LATEX_ESCAPES = str.maketrans({
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
    **{character: f"\\{character}" for character in "&%$#_"},
})  # fmt: skip


class Cell(NamedTuple):
    """A score in a table, times 100. The value is None if the score is absent."""

    value: float | None
    interval: Interval | None = None
    is_best: bool = False  # whether this is the best value of its column; see `mark_best`
    is_difference: bool = False  # whether the value is a difference, which is shown with a sign

    @property
    def text(self) -> str:
        """Value as text with one decimal, or a dash if the score is absent."""
        return ABSENT if self.value is None else format_value(self.value, self.is_difference)

    @property
    def bounds(self) -> str:
        """Bounds of the interval as text, joined by a dash for a score and by "to" for a difference."""
        if self.interval is None:
            return ""
        low = format_value(self.interval.low, self.is_difference)
        high = format_value(self.interval.high, self.is_difference)
        return f"{low} to {high}" if self.is_difference else f"{low}–{high}"


def format_value(value: float, is_difference: bool = False) -> str:
    """Return the value with one decimal. A difference has a sign, unless it is 0.0."""
    text = f"{value:+.1f}" if is_difference else f"{value:.1f}"
    return "0.0" if text in ("+0.0", "-0.0") else text


class TableRow(NamedTuple):
    """A row of a table: its name, labels (words or counts), scores, and marks such as "*", which the notes explain."""

    name: str
    labels: tuple[str, ...]
    cells: tuple[Cell, ...]
    marks: tuple[str, ...] = ()
    is_this_run: bool = False


class Table(NamedTuple):
    """A table of scores.

    name: name of the files that the table is saved to.
    columns: headings of the row names, the labels and the scores.
    """

    name: str
    columns: tuple[str, ...]
    rows: list[TableRow]
    notes: Sequence[str] = ()

    @property
    def label_count(self) -> int:
        """Number of labels between the name and the scores of a row."""
        return len(self.rows[0].labels) if self.rows else 0

    @property
    def score_columns(self) -> tuple[str, ...]:
        """Headings of the scores."""
        return self.columns[1 + self.label_count :]

    @property
    def text_columns(self) -> list[int]:
        """Indices of the columns that contain words."""
        labels = self.rows[0].labels if self.rows else ()
        indices = [0]
        for index, label in enumerate(labels, start=1):
            is_number = label.replace(",", "")[:1].isdigit()
            if not is_number:
                indices.append(index)
        return indices

    @property
    def has_intervals(self) -> bool:
        """Whether at least one score has an interval."""
        return any(cell.interval for row in self.rows for cell in row.cells)


def make_cell(value: Value, interval: Interval | None = None, is_difference: bool = False) -> Cell:
    """Return the cell for a score or a difference of scores, times 100, with its interval."""
    if value is None:
        return Cell(None)
    scaled = None if interval is None else Interval(low=100 * interval.low, high=100 * interval.high)
    return Cell(100 * value, scaled, is_difference=is_difference)


def mark_best(rows: list[TableRow]) -> list[TableRow]:
    """Mark the best value of each column, ignoring rows with PARTIAL_MARK, which cannot be compared.

    Values that look the same when printed count as equal and share the mark. If all values of a column are equal, none
    is marked.
    """
    comparable_rows = [row for row in rows if PARTIAL_MARK not in row.marks]
    best_texts = []
    for column in zip(*(row.cells for row in comparable_rows), strict=True):
        values = {float(cell.text) for cell in column if cell.text != ABSENT}
        best_texts.append(f"{max(values):.1f}" if len(values) > 1 else "")
    marked_rows = []
    for row in rows:
        cells = row.cells
        if PARTIAL_MARK not in row.marks:
            cells = tuple(
                cell._replace(is_best=cell.text == best_text)
                for cell, best_text in zip(row.cells, best_texts, strict=True)
            )
        marked_rows.append(row._replace(cells=cells))
    return marked_rows


def file_name_of_protocol(protocol: str) -> str:
    """Return the name of a protocol for use in file names and in ids of the page."""
    return protocol.replace("/", "-")


def format_lines(table: Table) -> list[str]:
    """Format a table as lines for the terminal."""
    lines: list[Sequence[str]] = [table.columns]
    for row in table.rows:
        scores = [f"{cell.text}  {cell.bounds}".strip() for cell in row.cells]
        lines.append((row.name + "".join(row.marks), *row.labels, *scores))
    return align_columns(lines)


def format_csv(table: Table) -> str:
    """Format a table as CSV. Scores have two decimals, and bounds of intervals and marks have separate columns."""
    rows = []
    for row in table.rows:
        values = dict(zip(table.columns, (row.name, *row.labels), strict=False))
        values["marks"] = "".join(row.marks)
        for name, cell in zip(table.score_columns, row.cells, strict=True):
            values[name] = "" if cell.value is None else f"{cell.value:.2f}"
            if cell.interval is not None:
                values[f"{name} low"] = f"{cell.interval.low:.2f}"
                values[f"{name} high"] = f"{cell.interval.high:.2f}"
        rows.append(values)
    text = io.StringIO()
    writer = csv.DictWriter(text, dict.fromkeys(chain.from_iterable(rows)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def format_latex(table: Table) -> str:
    """Format a table as a LaTeX tabular for booktabs. Best values are bold, and small intervals follow the scores."""
    alignment = "l" * (1 + table.label_count) + "r" * len(table.score_columns)
    rows = [latex_row(row) for row in table.rows]
    lines = [
        rf"\begin{{tabular}}{{{alignment}}}",
        r"\toprule",
        latex_line([name.translate(LATEX_ESCAPES) for name in table.columns]),
        r"\midrule",
        *rows,
        r"\bottomrule",
        r"\end{tabular}",
        *(f"% {note}" for note in table.notes),
    ]
    return "\n".join(lines) + "\n"


def latex_row(row: TableRow) -> str:
    """Format a row of a LaTeX tabular."""
    name = row.name.translate(LATEX_ESCAPES) + "".join(LATEX_MARKS[mark] for mark in row.marks)
    labels = [label.translate(LATEX_ESCAPES) for label in row.labels]
    return latex_line([name, *labels, *map(latex_cell, row.cells)])


def latex_cell(cell: Cell) -> str:
    """Format a score of a LaTeX tabular."""
    if cell.value is None:
        return "--"
    text = rf"\textbf{{{cell.text}}}" if cell.is_best else cell.text
    if cell.interval is not None:
        text += rf" {{\scriptsize [{cell.interval.low:.1f}, {cell.interval.high:.1f}]}}"
    return text


def latex_line(cells: Sequence[str]) -> str:
    """Join cells into a line of a LaTeX tabular."""
    return " & ".join(cells) + r" \\"
