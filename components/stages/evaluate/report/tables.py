"""The tables of the report as values, from which the page, LaTeX and CSV are written."""

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from m3diff.scoring.metrics.metric import Value
from m3diff.scoring.protocols import ProtocolPairs
from m3diff.scoring.published.published import SCORES, PublishedRow, published_rows, published_rows_by_type
from m3diff.scoring.summary import Interval, ProtocolScores

BEST, SECOND = 1, 2
GROUP_NAMES = {"change": "with a change", "multi_change": "with several changes", "distractors": "distractors"}
ABSENT = "–"
LATEX = str.maketrans({
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
    **{character: f"\\{character}" for character in "&%$#_"},
})  # fmt: skip


class Cell(NamedTuple):
    """One score of a table, in the units of papers; None is absent."""

    value: float | None
    interval: Interval | None = None
    rank: int = 0  # BEST or SECOND among the rows that compare
    bar: bool = False  # a fraction of all, drawn as one
    signed: bool = False  # a difference

    @property
    def text(self) -> str:
        return ABSENT if self.value is None else one_digit(self.value, self.signed)

    @property
    def bounds(self) -> str:
        """The interval as text: a dash between two positive bounds, else "to"."""
        if self.interval is None:
            return ""
        low, high = (one_digit(bound, self.signed) for bound in (self.interval.low, self.interval.high))
        return f"{low} to {high}" if self.signed else f"{low}–{high}"


def one_digit(value: float, signed: bool = False) -> str:
    """As papers print it; with its sign where that is asked for and it is not 0.0."""
    text = f"{value:+.1f}" if signed else f"{value:.1f}"
    return "0.0" if text in ("+0.0", "-0.0") else text


@dataclass(frozen=True)
class Row:
    name: str
    labels: tuple[str, ...]  # what stands between the name and the scores
    cells: tuple[Cell, ...]
    marks: tuple[str, ...] = ()  # beside the name: "†", "*"; the table's notes say what they mean
    ours: bool = False


@dataclass(frozen=True)
class Table:
    """`columns` names the row's name, then its labels, then its cells."""

    name: str  # of the files that are saved
    columns: tuple[str, ...]
    rows: list[Row]
    notes: list[str] = field(default_factory=list)

    @property
    def labels(self) -> int:
        return len(self.rows[0].labels) if self.rows else 0

    @property
    def has_intervals(self) -> bool:
        return any(cell.interval for row in self.rows for cell in row.cells)


def in_papers_units(value: Value, interval: Interval | None = None, bar: bool = False) -> Cell:
    """A score times 100, with its interval."""
    if value is None:
        return Cell(None)
    scaled = None if interval is None else Interval(low=100 * interval.low, high=100 * interval.high)
    return Cell(100 * value, scaled, bar=bar)


def count_of(scores: ProtocolScores) -> str:
    """How many pairs are scored, beside how many papers score."""
    return f"{scores.pairs:,}" if scores.published_pairs is None else f"{scores.pairs:,} of {scores.published_pairs:,}"


def partial_note(scores: Iterable[ProtocolScores]) -> list[str]:
    if any(one.is_partial for one in scores):
        return ["* Fewer pairs than papers score: not comparable with published figures."]
    return []


def overview(protocols: dict[str, ProtocolScores], columns: Sequence[str], notes: Sequence[str] = ()) -> Table:
    """A row to each protocol, its scores with their intervals; `notes` below."""
    rows = [
        Row(
            name,
            (count_of(of),),
            tuple(in_papers_units(of.scores.get(score), of.intervals.get(score)) for score in columns),
            marks=("*",) if of.is_partial else (),
        )
        for name, of in protocols.items()
    ]
    return Table("scores", ("Protocol", "n", *columns), rows, [*partial_note(protocols.values()), *notes])


def group_table(protocol: str, scores: ProtocolScores, columns: Sequence[str]) -> Table:
    """All pairs of a protocol, and its groups that have pairs, but for those of one change type."""
    everything = Row(
        "all",
        (count_of(scores),),
        tuple(in_papers_units(scores.scores.get(score), scores.intervals.get(score)) for score in columns),
        marks=("*",) if scores.is_partial else (),
    )
    groups = [
        Row(title, (f"{values['pairs']:,}",), tuple(in_papers_units(values.get(score)) for score in columns))
        for name, title in GROUP_NAMES.items()
        if (values := scores.groups.get(name)) and values["pairs"]
    ]
    return Table(f"{plain(protocol)}-groups", ("Pairs", "n", *columns), [everything, *groups], partial_note([scores]))


def type_table(protocol: str, scores: ProtocolScores, types: Sequence[str], columns: Sequence[str]) -> Table:
    """Pairs of exactly one change, by its type; how many were named right where a grammar reads captions."""
    groups = scores.folder("by_type")
    right = {"type right": "type_accuracy", "place right": "place_accuracy", "all right": "exact_accuracy"}
    read = {
        title: name for title, name in right.items() if any(values.get(name) is not None for values in groups.values())
    }
    rows = [
        Row(
            name,
            (f"{groups[name]['pairs']:,}",),
            (
                *(in_papers_units(groups[name].get(score), bar=True) for score in read.values()),
                *(in_papers_units(groups[name].get(score)) for score in columns),
            ),
        )
        for name in types
    ]
    return Table(f"{plain(protocol)}-types", ("Type", "n", *read, *columns), rows)


def published_of(one: ProtocolPairs, is_headline: bool) -> list[PublishedRow]:
    """The published rows of a protocol: those of its benchmark are of the headline's, or of one change type."""
    if is_headline:
        return published_rows(one.dataset)
    return (
        published_rows_by_type(one.dataset, *one.protocol.change_types) if len(one.protocol.change_types) == 1 else []
    )


def published_table(protocol: str, scores: ProtocolScores, known: list[PublishedRow]) -> Table | None:
    """This run among the published rows of a protocol, best CIDEr first; None where nothing is published.

    The best and second best of each column are marked. A run over fewer pairs than papers score is not ranked.
    """
    if not known:
        return None
    rows = [
        Row(
            row.method,
            (row.venue, "" if scores.published_pairs is None else f"{scores.published_pairs:,}"),
            tuple(Cell(value) for value in row.scores.values()),
            marks=("†",) if row.chosen_on_test else (),
        )
        for row in known
    ]
    ours = Row(
        "this run",
        ("", f"{scores.pairs:,}"),
        tuple(in_papers_units(scores.scores.get(name), scores.intervals.get(name)) for name in SCORES.values()),
        marks=("*",) if scores.is_partial else (),
        ours=True,
    )
    by = list(SCORES.values()).index("CIDEr")
    ranked = rank(sorted([ours, *rows], key=lambda row: -(row.cells[by].value or 0.0)))
    evidence = sorted({f"{row.method}: {row.chosen_on_test}" for row in known if row.chosen_on_test})
    notes = [f"† Epoch chosen on the test split. {'; '.join(evidence)}."] if evidence else []
    sources = "; ".join(sorted({row.source for row in known}))
    notes += [*partial_note([scores]), f"Published figures as given by {sources}."]
    return Table(f"{plain(protocol)}-published", ("Method", "venue", "n", *SCORES.values()), ranked, notes)


def rank(rows: list[Row]) -> list[Row]:
    """The rows with the best and the second best value of each column marked, as printed; rows marked * do not count.

    Equal values have equal marks; where all that compare are equal, or one alone has a value, none is marked.
    """
    columns = zip(*([cell.text for cell in row.cells] for row in rows if "*" not in row.marks), strict=True)
    places = []
    for column in columns:
        values = sorted({float(text) for text in column if text != ABSENT}, reverse=True)
        places.append({f"{value:.1f}": place for place, value in enumerate(values[:2], BEST)} if values[1:] else {})
    if not places:
        return rows
    return [
        row
        if "*" in row.marks
        else replace(
            row,
            cells=tuple(
                cell._replace(rank=place.get(cell.text, 0)) for cell, place in zip(row.cells, places, strict=True)
            ),
        )
        for row in rows
    ]


def plain(name: str) -> str:
    """A protocol's name as part of a file's."""
    return name.replace("/", "-")


def difference(value: float, interval: Interval | None) -> Cell:
    """The difference of two scores times 100, with its interval."""
    return in_papers_units(value, interval)._replace(signed=True)


def as_csv(table: Table) -> str:
    """Scores times 100 with two digits, those with an interval followed by its two bounds."""
    text, bounded = io.StringIO(), set()
    for row in table.rows:
        bounded |= {place for place, cell in enumerate(row.cells) if cell.interval}
    head, names = table.columns[: 1 + table.labels], table.columns[1 + table.labels :]
    columns = [
        [name, f"{name} low", f"{name} high"] if place in bounded else [name] for place, name in enumerate(names)
    ]
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*head, *(name for group in columns for name in group), *(["marks"] if has_marks(table) else [])])
    for row in table.rows:
        values = [value for place, cell in enumerate(row.cells) for value in digits(cell, place in bounded)]
        writer.writerow([row.name, *row.labels, *values, *(["".join(row.marks)] if has_marks(table) else [])])
    return text.getvalue()


def has_marks(table: Table) -> bool:
    return any(row.marks for row in table.rows)


def digits(cell: Cell, bounded: bool) -> list[str]:
    bounds = (cell.interval.low, cell.interval.high) if cell.interval else (None, None)
    values = [cell.value, *bounds] if bounded else [cell.value]
    return ["" if value is None else f"{value:.2f}" for value in values]


def as_latex(table: Table) -> str:
    """A tabular of booktabs: best bold, second best underlined, the intervals small behind their scores."""
    columns = "l" * (1 + table.labels) + "r" * (len(table.columns) - 1 - table.labels)
    lines = [rf"\begin{{tabular}}{{{columns}}}", r"\toprule", latex_line(map(latex, table.columns)), r"\midrule"]
    for row in table.rows:
        name = latex(row.name) + "".join({"†": r"$^\dagger$", "*": "$^*$"}[mark] for mark in row.marks)
        lines.append(latex_line([name, *map(latex, row.labels), *map(latex_cell, row.cells)]))
    lines += [r"\bottomrule", r"\end{tabular}"]
    return "\n".join([*lines, *(f"% {note}" for note in table.notes)]) + "\n"


def latex_line(cells: Iterable[str]) -> str:
    return " & ".join(cells) + r" \\"


def latex(text: str) -> str:
    return text.translate(LATEX)


def latex_cell(cell: Cell) -> str:
    if cell.value is None:
        return "--"
    text = {BEST: rf"\textbf{{{cell.text}}}", SECOND: rf"\underline{{{cell.text}}}"}.get(cell.rank, cell.text)
    return text + (rf" {{\scriptsize [{cell.interval.low:.1f}, {cell.interval.high:.1f}]}}" if cell.interval else "")
