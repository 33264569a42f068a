"""Cells, the best of a column, and a table as LaTeX and CSV."""

import csv
import io

import pytest

from m3diff.report.tables import Cell, Table, TableRow, format_csv, format_latex, format_lines, make_cell, mark_best
from m3diff.scoring.bootstrap import Interval


def test_a_score_is_shown_times_100_with_its_interval_and_a_difference_with_its_sign():
    shown = make_cell
    cells = [shown(0.4567, Interval(low=0.4, high=0.5049)), shown(None, Interval(low=0, high=1))]
    cells.append(shown(0.0123, Interval(low=-0.004, high=0.03), is_difference=True))
    texts = [("45.7", "40.0–50.5"), ("–", ""), ("+1.2", "-0.4 to +3.0")]
    assert [(cell.text, cell.bounds) for cell in cells] == texts
    assert [shown(value, is_difference=True).text for value in (-0.1, 0.0, -0.0001)] == ["-10.0", "0.0", "0.0"]


def row(name: str, *values: float | None, marks: tuple[str, ...] = ()) -> TableRow:
    return TableRow(name, (), tuple(Cell(value) for value in values), marks)


@pytest.mark.parametrize(
    ("rows", "best"),
    [
        ([row("a", 1, 9), row("b", 3, None), row("c", 2, 8)], ["01", "10", "00"]),
        ([row("a", 10.04), row("b", 10.01), row("c", 9.0)], ["1", "1", "0"]),
        ([row("a", 1), row("b", 1)], ["0", "0"]),
        ([row("a", 1), row("b", None)], ["0", "0"]),
        ([row("a", 100.0), row("b", 9.0)], ["1", "0"]),
        ([row("a", 5, marks=("*",)), row("b", 4), row("c", 3)], ["0", "1", "0"]),
        ([row("a", 5, marks=("*",))], ["0"]),
        ([row("a", 5, marks=("†",)), row("b", 4)], ["1", "0"]),
    ],
    ids=["each column", "printed equal", "all equal", "one alone", "numbers, not texts", "partial", "alone", "chosen"],
)
def test_the_best_of_those_that_compare_is_marked(rows: list[TableRow], best: list[str]):
    assert ["".join(str(int(cell.is_best)) for cell in row.cells) for row in mark_best(rows)] == best


TABLE = Table(
    "x",
    ("Method", "venue", "CIDEr", "BLEU-4"),
    [
        TableRow("A_b & 50%", ("ICCV'23",), (Cell(51.26, Interval(low=49.0, high=53.3), True), Cell(None)), ("†",)),
        TableRow("this run", ("",), (Cell(40.0), Cell(3.0)), ("*",)),
    ],
    ["† why."],
)


def test_a_label_that_is_a_number_is_in_no_column_of_words():
    table = Table("x", ("Method", "pairs", "venue", "CIDEr"), [TableRow("a", ("1,234", "ICCV'23"), (Cell(1.0),))])
    assert table.text_columns == [0, 2]


def test_the_terminal_shows_names_with_marks_labels_and_scores_with_bounds():
    assert [" ".join(line.split()) for line in format_lines(TABLE)] == [
        "Method venue CIDEr BLEU-4",
        "A_b & 50%† ICCV'23 51.3 49.0–53.3 –",
        "this run* 40.0 3.0",
    ]


def test_a_table_without_rows_has_no_labels_and_no_intervals():
    table = Table("x", ("Method", "CIDEr"), [])
    assert table.label_count == 0
    assert table.text_columns == [0]
    assert not table.has_intervals
    assert TABLE.has_intervals


def test_latex_marks_the_best():
    assert format_latex(TABLE).splitlines() == [
        r"\begin{tabular}{llrr}",
        r"\toprule",
        r"Method & venue & CIDEr & BLEU-4 \\",
        r"\midrule",
        r"A\_b \& 50\%$^\dagger$ & ICCV'23 & \textbf{51.3} {\scriptsize [49.0, 53.3]} & -- \\",
        r"this run$^*$ &  & 40.0 & 3.0 \\",
        r"\bottomrule",
        r"\end{tabular}",
        "% † why.",
    ]


def test_latex_escapes_special_characters():
    escaped = format_latex(Table("x", ("a",), [TableRow("a\\b {x} a~b^c #$", (), ())])).splitlines()[4]
    assert escaped == r"a\textbackslash{}b \{x\} a\textasciitilde{}b\textasciicircum{}c \#\$ \\"


def test_csv_has_the_bounds_in_columns():
    assert list(csv.reader(io.StringIO(format_csv(TABLE)))) == [
        ["Method", "venue", "marks", "CIDEr", "CIDEr low", "CIDEr high", "BLEU-4"],
        ["A_b & 50%", "ICCV'23", "†", "51.26", "49.00", "53.30", ""],
        ["this run", "", "*", "40.00", "", "", "3.00"],
    ]
