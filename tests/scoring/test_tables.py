import csv
import io

import pytest

from m3diff.datasets.spec import Protocol
from m3diff.scoring.protocols import ProtocolPairs
from m3diff.scoring.published.published import published_rows, published_rows_by_type
from m3diff.scoring.summary import Interval, ProtocolScores
from m3diff.stages.evaluate.report.tables import (
    BEST,
    SECOND,
    Cell,
    Row,
    Table,
    as_csv,
    as_latex,
    count_of,
    difference,
    group_table,
    in_papers_units,
    overview,
    published_of,
    published_table,
    rank,
    type_table,
)


def scores(pairs: int = 4, of: int | None = None, groups: dict | None = None, **values: float | None) -> ProtocolScores:
    interval = {"CIDEr": Interval(low=0.25, high=0.75)}
    named = {name.replace("_", "-"): value for name, value in values.items()}
    return ProtocolScores(
        pairs=pairs, published_pairs=of, scores=named, intervals=interval, groups=groups or {}, absent={}
    )


def texts(table: Table) -> list[list[str]]:
    return [[row.name, *row.labels, *(cell.text for cell in row.cells), "".join(row.marks)] for row in table.rows]


def test_a_score_is_shown_times_100_with_its_interval():
    cell = in_papers_units(0.4567, Interval(low=0.4, high=0.5049))
    assert (cell.text, cell.bounds) == ("45.7", "40.0–50.5")
    assert (in_papers_units(None).text, in_papers_units(None, Interval(low=0, high=1)).bounds) == ("–", "")


def test_a_difference_has_its_sign():
    cell = difference(0.0123, Interval(low=-0.004, high=0.03))
    assert (cell.text, cell.bounds) == ("+1.2", "-0.4 to +3.0")
    assert [difference(value, None).text for value in (-0.1, 0.0, -0.0001)] == ["-10.0", "0.0", "0.0"]


def test_the_number_of_pairs_stands_beside_the_published_number():
    assert [count_of(scores(1270, of)) for of in (None, 1270, 7970)] == ["1,270", "1,270 of 1,270", "1,270 of 7,970"]


def test_a_partial_protocol_is_marked_and_a_full_one_is_not():
    table = overview({"a/x": scores(3, 4, CIDEr=0.5), "b/y": scores(4, 4, CIDEr=0.25)}, ["CIDEr", "SPICE"])
    assert table.columns == ("Protocol", "n", "CIDEr", "SPICE")
    assert texts(table) == [["a/x", "3 of 4", "50.0", "–", "*"], ["b/y", "4 of 4", "25.0", "–", ""]]
    assert table.notes == ["* Fewer pairs than papers score: not comparable with published figures."]
    assert table.rows[0].cells[0].interval == Interval(low=25, high=75)
    assert overview({"b/y": scores(4, 4)}, []).notes == []


def test_groups_without_pairs_and_change_types_have_no_row_among_groups():
    groups = {
        "distractors": {"pairs": 2, "CIDEr": 0.1},
        "change": {"pairs": 3, "CIDEr": 0.2},
        "multi_change": {"pairs": 0},
        "by_type/color": {"pairs": 3, "CIDEr": 0.3},
    }
    table = group_table("toy/all", scores(5, CIDEr=0.5, groups=groups), ["CIDEr"])
    assert texts(table) == [
        ["all", "5", "50.0", ""],
        ["with a change", "3", "20.0", ""],
        ["distractors", "2", "10.0", ""],
    ]
    assert table.name == "toy-all-groups"
    assert table.rows[0].cells[0].interval


def test_types_show_how_many_are_right_where_a_grammar_reads():
    groups = {"by_type/color": {"pairs": 3, "CIDEr": 0.3, "type_accuracy": 0.5, "exact_accuracy": 0.25}}
    table = type_table("toy/all", scores(groups=groups), ["color"], ["CIDEr"])
    assert table.columns == ("Type", "n", "type right", "all right", "CIDEr")
    assert texts(table) == [["color", "3", "50.0", "25.0", "30.0", ""]]
    assert [cell.bar for cell in table.rows[0].cells] == [True, True, False]
    unread = {"by_type/color": {"pairs": 3, "CIDEr": 0.3, "type_accuracy": None}}
    assert type_table("toy/all", scores(groups=unread), ["color"], ["CIDEr"]).columns == ("Type", "n", "CIDEr")


def row(name: str, *values: float | None, marks: tuple[str, ...] = ()) -> Row:
    return Row(name, (), tuple(Cell(value) for value in values), marks)


def ranks(*rows: Row) -> list[list[int]]:
    return [[cell.rank for cell in row.cells] for row in rank(list(rows))]


def test_the_best_and_second_best_of_each_column_are_marked():
    assert ranks(row("a", 1, 9), row("b", 3, None), row("c", 2, 8)) == [[0, BEST], [BEST, 0], [SECOND, SECOND]]


def test_what_prints_equal_is_marked_equal():
    assert ranks(row("a", 10.04), row("b", 10.01), row("c", 9.0)) == [[BEST], [BEST], [SECOND]]
    assert ranks(row("a", 1), row("b", 1)) == [[0], [0]]
    assert ranks(row("a", 1), row("b", None)) == [[0], [0]]


def test_a_hundred_is_better_than_nine():
    assert ranks(row("a", 100.0), row("b", 9.0)) == [[BEST], [SECOND]]


def test_a_run_over_fewer_pairs_is_not_ranked_and_takes_no_rank_from_others():
    assert ranks(row("a", 5, marks=("*",)), row("b", 4), row("c", 3)) == [[0], [BEST], [SECOND]]
    assert ranks(row("a", 5, marks=("*",))) == [[0]]
    assert ranks(row("a", 5, marks=("†",)), row("b", 4)) == [[BEST], [SECOND]]


def test_this_run_stands_among_the_published_rows_by_its_cider():
    table = published_table("iedit/test", scores(495, 495, CIDEr=0.6, BLEU_4=0.99), published_rows("iedit"))
    assert table is not None
    names = [row.name for row in table.rows]
    ours = names.index("this run")
    values = [row.cells[3].value or 0 for row in table.rows]
    assert values == sorted(values, reverse=True)
    assert values[ours] == 60
    assert table.rows[ours].ours
    assert table.rows[ours].cells[0].rank == BEST
    assert table.rows[ours].labels == ("", "495")
    assert table.rows[0].labels[1] == "495"
    assert [row.name for row in table.rows if row.cells[3].rank == BEST] == [names[0]]
    assert published_table("unknown/test", scores(), published_rows("unknown")) is None


def test_a_partial_run_among_published_rows_is_marked_and_not_ranked():
    table = published_table("iedit/test", scores(300, 495, CIDEr=9.0), published_rows("iedit"))
    assert table is not None
    assert (table.rows[0].name, table.rows[0].marks, table.rows[0].cells[3].rank) == ("this run", ("*",), 0)
    assert table.rows[1].cells[3].rank == BEST
    assert table.notes[0].startswith("* Fewer pairs")


def test_a_method_whose_epoch_was_chosen_on_test_is_marked_with_the_evidence():
    table = published_table("spot_the_diff/test", scores(CIDEr=0.3), published_rows("spot_the_diff"))
    assert table is not None
    marked = [row.name for row in table.rows if row.marks == ("†",)]
    assert set(marked) == {"CLIP4IDC"}
    assert table.notes[0] == (
        "† Epoch chosen on the test split. CLIP4IDC: sushizixin/CLIP4IDC: the validation loader is the test loader."
    )
    iedit = published_table("iedit/test", scores(CIDEr=0.3), published_rows("iedit"))
    assert iedit is not None
    assert not any("chosen" in note for note in iedit.notes)


def test_a_protocol_stands_beside_the_figures_of_its_own_pairs_alone():
    whole, colour = Protocol("total", n=7970), Protocol("color", n=None, change_types=("color",))
    both = Protocol("semantic", n=None, change_types=("color", "move"))
    of = {one.name: ProtocolPairs("clevr_change", one, []) for one in (whole, colour, both)}
    assert published_of(of["total"], True) == published_rows("clevr_change") != []
    assert published_of(of["color"], False) == published_rows_by_type("clevr_change", "color") != []
    assert published_of(of["total"], False) == published_of(of["semantic"], False) == []


TABLE = Table(
    "x",
    ("Method", "venue", "CIDEr", "BLEU-4"),
    [
        Row("A_b & 50%", ("ICCV'23",), (Cell(51.26, Interval(low=49.0, high=53.3), BEST), Cell(None)), ("†",)),
        Row("this run", ("",), (Cell(40.0, None, SECOND), Cell(3.0)), ("*",)),
    ],
    ["† why."],
)


def test_latex_marks_the_best_and_escapes_what_is_special():
    assert as_latex(TABLE).splitlines() == [
        r"\begin{tabular}{llrr}",
        r"\toprule",
        r"Method & venue & CIDEr & BLEU-4 \\",
        r"\midrule",
        r"A\_b \& 50\%$^\dagger$ & ICCV'23 & \textbf{51.3} {\scriptsize [49.0, 53.3]} & -- \\",
        r"this run$^*$ &  & \underline{40.0} & 3.0 \\",
        r"\bottomrule",
        r"\end{tabular}",
        "% † why.",
    ]


def test_csv_has_the_bounds_in_columns_of_their_own():
    assert list(csv.reader(io.StringIO(as_csv(TABLE)))) == [
        ["Method", "venue", "CIDEr", "CIDEr low", "CIDEr high", "BLEU-4", "marks"],
        ["A_b & 50%", "ICCV'23", "51.26", "49.00", "53.30", "", "†"],
        ["this run", "", "40.00", "", "", "3.00", "*"],
    ]


@pytest.mark.parametrize("text", ["a\\b", "{x}", "a~b^c", "#$"])
def test_no_special_character_of_latex_is_left_bare(text: str):
    import re

    escaped = as_latex(Table("x", ("a",), [Row(text, (), ())])).splitlines()[4]
    bare = re.sub(r"\\textbackslash\{\}|\\textasciitilde\{\}|\\textasciicircum\{\}|\\[{}&%$#_]", "", escaped)
    assert not re.search(r"[\\{}&%$#_~^]", bare.removesuffix(r" \\"))
