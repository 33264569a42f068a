"""The options `where`, `no_change` and `splits`: the cells that they match, and errors if they match nothing."""

import csv
import datetime
import json
from pathlib import Path
from typing import Any

import pytest

from m3diff.__main__ import DATA_REFUSED, main
from m3diff.datasets import DATASETS, omnidiff, pairs
from m3diff.datasets.filters import means_the_same
from m3diff.datasets.spec import read_with_notes
from m3diff.records.errors import DataError
from m3diff.records.schemas import NO_CHANGE
from tests.errors import Message, raises
from tests.layouts import run_ingest, save_picture

SAME = {
    "YAML's no and the word": (False, "no"),
    "YAML's no and a capital": (False, "No"),
    "false and a spreadsheet's FALSE": (False, "FALSE"),
    "false and pandas' False": (False, "False"),
    "false and a number of a CSV file": (False, "0"),
    "false and a float of a CSV file": (False, "0.0"),
    "false and JSON's false": (False, False),
    "false and JSON's 0": (False, 0),
    "false and one letter": (False, "n"),
    "true and yes": (True, " Yes "),
    "true and 1.0": (True, 1.0),
    "0 and a float's text": (0, "0.0"),
    "0 and padded digits": (0, "00"),
    "0 and JSON's false": (0, False),
    "1 and a float": (1, 1.0),
    "a number with an exponent": (1000, "1e3"),
    "text and another case": ("yes", "YES"),
    "text and white space": ("no change", " no  change "),
    "text in two Unicode forms": ("caf\u00e9", "cafe\u0301"),
    "text and JSON's true": ("True", True),
    "text of a number and JSON's number": ("7", 7.0),
    "null and an empty field": (None, ""),
    "null and NaN": (None, float("nan")),
    "null and the word of pandas": (None, "nan"),
    "null and a missing key": (None, None),
    "a date": (datetime.date(2019, 5, 1), "2019-05-01"),
}
DIFFERENT = {
    "no and yes": (False, "yes"),
    "false and a count": (False, "2"),
    "0 and false as text": (0, "false"),
    "1 and the word true": (1, "true"),
    "quoted text of a number and another spelling": ("1.10", "1.1"),
    "quoted no and false": ("no", "false"),
    "null and zero": (None, 0),
    "0 and an empty field": (0, ""),
    "a number and half of one": (1, "1.5"),
    "large numbers that differ by one": (9007199254740993, "9007199254740992"),
}


@pytest.mark.parametrize(("option", "cell"), SAME.values(), ids=SAME)
def test_values_that_mean_the_same_match(option, cell):
    assert means_the_same(option, cell)


@pytest.mark.parametrize(("option", "cell"), DIFFERENT.values(), ids=DIFFERENT)
def test_values_that_differ_do_not_match(option, cell):
    assert not means_the_same(option, cell)


def write_table(root: Path, count: int = 10, **columns: Any) -> Path:
    """`pairs.csv` with a column for each function of the row's number, and its images."""
    root.mkdir(parents=True, exist_ok=True)
    columns = {"captions": "it fell {}".format, "split": lambda n: ("train", "val", "test")[n % 3]} | columns
    with (root / "pairs.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["before", "after", *columns])
        writer.writerows([f"{n}.png", f"{n}_2.png", *(column(n) for column in columns.values())] for n in range(count))
    return root


def is_odd(yes: Any, no: Any) -> Any:
    return lambda number: yes if number % 2 else no


MARKS = {
    "YAML's no": (is_odd("yes", "no"), False),
    "false of a spreadsheet": (is_odd("TRUE", "FALSE"), False),
    "zero of pandas": (is_odd("1.0", "0.0"), 0),
    "a list of both": (is_odd("true", "false"), [0, False]),
    "another case": (is_odd("Changed", "Unchanged"), "unchanged"),
    "an empty field": (is_odd("fell", ""), None),
}


@pytest.mark.parametrize(("column", "value"), MARKS.values(), ids=MARKS)
def test_rows_without_a_change_are_marked_by_meaning_and_counted(tmp_path, column, value):
    root = write_table(tmp_path, flag=column)
    rows, notes = read_with_notes(DATASETS["pairs"], root, {"no_change": {"flag": value}})
    assert [row.change_types for row in rows] == [[NO_CHANGE], []] * 5
    assert any("5 of 10 rows" in note for note in notes)


FLAG = "flag ('no' (5), 'yes' (5))"
TWIN = "twin ('no' (5), 'yes' (5))"
NO_ROW = "filter_matches_no_row"
ALL_ROWS = "filter_matches_all_rows"
TABLE = ["before", "after", "captions", "split", "flag", "twin"]
SPLITS_OF_TABLE = "'train' (4), 'val' (3), 'test' (3)"
# Options, the code of their fault, and its fields
REFUSED: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "a value that no row has": (
        {"no_change": {"flag": "none"}},
        NO_ROW,
        {"option": "no_change", "rows": 10, "columns": [FLAG]},
    ),
    "a filter that no row matches": (
        {"where": {"flag": "maybe"}},
        NO_ROW,
        {"option": "where", "filter": "where: {flag: 'maybe'}", "rows": 10, "columns": [FLAG]},
    ),
    "a filter that every row matches": (
        {"where": {"flag": [True, False]}},
        ALL_ROWS,
        {"option": "where", "rows": 10, "columns": [FLAG]},
    ),
    "a mark that every row matches": (
        {"no_change": {"flag": ["yes", "no"]}},
        ALL_ROWS,
        {"option": "no_change", "rows": 10},
    ),
    "a misspelt column of a mark": (
        {"no_change": {"falg": "no"}},
        "unknown_column",
        {"key": "no_change", "value": "falg", "columns": TABLE},
    ),
    "a misspelt column of a filter": ({"where": {"flg": "no"}}, "unknown_column", {"key": "where", "value": "flg"}),
    "a misspelt column beside a right one": (
        {"where": {"flag": "no", "spilt": "val"}},
        "unknown_column",
        {"key": "where", "value": "spilt"},
    ),
    "a path into no object": ({"where": {"flag.value": "no"}}, "unknown_column", {"value": "flag.value"}),
    "columns that no row matches together": (
        {"where": {"flag": "no", "twin": "yes"}},
        NO_ROW,
        {"rows": 10, "columns": [FLAG, TWIN]},
    ),
    "a split of another name": (
        {"splits": {"valid": "train"}},
        "unknown_split",
        {"key": "splits", "value": "'valid'", "values": SPLITS_OF_TABLE},
    ),
    "a split by number": ({"splits": {0: "train"}}, "unknown_split", {"value": "0", "values": SPLITS_OF_TABLE}),
    "a misspelt optional column": (
        {"columns": {"scene": "flga"}},
        "unknown_column",
        {"key": "columns", "value": "flga", "columns": TABLE},
    ),
    "a misspelt further column": (
        {"columns": {"captions": ["captions", "flaag"]}},
        "unknown_column",
        {"key": "columns", "value": "flaag"},
    ),
    "a separator that is nowhere": (
        {"separator": "||"},
        "separator_in_no_caption",
        {"key": "separator", "value": "||", "captions": 10},
    ),
}


@pytest.mark.parametrize(("options", "code", "fields"), REFUSED.values(), ids=REFUSED)
def test_an_option_that_matches_nothing_or_everything_is_refused(tmp_path, options, code, fields):
    root = write_table(tmp_path, flag=is_odd("yes", "no"), twin=is_odd("yes", "no"))
    with raises(DataError, "datasets.options_do_not_match", path=root, names=list(options)) as error:
        list(pairs.read(root, **options))
    (fault,) = error.value.fields["faults"]
    assert fault.code == f"datasets.{code}"
    assert {name: fault.fields.get(name) for name in fields} == fields


def test_the_hint_on_a_misspelt_column_is_the_nearest_name(tmp_path):
    root = write_table(tmp_path, flag=is_odd("yes", "no"))
    with raises(DataError, "datasets.options_do_not_match") as error:
        list(pairs.read(root, where={"falg": "no"}))
    (fault,) = error.value.fields["faults"]
    assert "'flag'" in str(fault.fields["hint"])


@pytest.mark.parametrize("options", [options for options, _, _ in REFUSED.values()], ids=REFUSED)
def test_an_option_that_is_confirmed_is_not_refused(tmp_path, options):
    root = write_table(tmp_path, flag=is_odd("yes", "no"), twin=is_odd("yes", "no"))
    list(pairs.read(root, **options, confirmed=list(options)))
    with pytest.raises(DataError):
        list(pairs.read(root, **options, confirmed=["refusals"]))


SPLITS = {
    "numbers of a CSV file": (["0", "1", "2"], {0: "train", 1: "val", 2: "test"}),
    "floats of a CSV file": (["0.0", "1.0", "2.0"], {0: "train", 1: "val", 2: "test"}),
    "names as text": (["0", "1", "2"], {"0": "train", "1": "val", "2": "test"}),
    "another case": (["Training", "Dev", "Held out"], {"training": "train", "dev": "val", "held out": "test"}),
    "an alias that the table does not use": (["train", "validation", "test"], {"validation": "val", "dev": "val"}),
}


@pytest.mark.parametrize(("names", "splits"), SPLITS.values(), ids=SPLITS)
def test_names_of_splits_are_read_by_meaning(tmp_path, names, splits):
    root = write_table(tmp_path, 3, split=lambda number: names[number])
    assert [row.split for row in pairs.read(root, splits=splits)] == ["train", "val", "test"]


def test_a_split_by_truth_value_is_read(tmp_path):
    root = write_table(tmp_path, 4, split=is_odd("True", "False"))
    assert [row.split for row in pairs.read(root, splits={True: "test", False: "train"})] == ["train", "test"] * 2


def test_splits_of_rows_that_a_filter_passes_over_count_as_there(tmp_path):
    root = write_table(tmp_path, 4, split=is_odd("dev7", "fit"), flag=is_odd("no", "yes"))
    rows = list(pairs.read(root, splits={"dev7": "val", "fit": "train"}, where={"flag": "yes"}))
    assert [row.split for row in rows] == ["train"] * 2


def test_a_filter_may_match_every_row_of_one_file_of_several(tmp_path):
    for name, language in (("train", "en"), ("val", "de")):
        row = {"before": f"{name}.png", "after": "b.png", "captions": "it fell", "lang": language}
        (tmp_path / f"{name}.jsonl").write_text(f"{json.dumps(row)}\n" * 2)
    manifest = {"train": "train.jsonl", "val": "val.jsonl"}
    rows = list(pairs.read(tmp_path, manifest, columns={"id": None}, where={"lang": "en"}))
    assert {row.split for row in rows} == {"train"}


def test_a_value_of_a_list_that_no_row_has_is_named(tmp_path):
    root = write_table(tmp_path, flag=is_odd("yes", "no"))
    _, notes = read_with_notes(DATASETS["pairs"], root, {"where": {"flag": ["no", "unsure"]}})
    assert any("'unsure'" in note and "'yes' (5)" in note for note in notes)


@pytest.mark.parametrize(("caption", "count"), [("n/a", 1), ("it fell 3", 0)])
def test_texts_for_no_caption_that_are_nowhere_are_named(tmp_path, caption, count):
    root = write_table(tmp_path, flag=is_odd("yes", "no"))
    _, notes = read_with_notes(DATASETS["pairs"], root, {"no_caption": [caption]})
    assert sum("no_caption" in note and "10 captions" in note for note in notes) == count


@pytest.mark.parametrize(
    "name",
    ["None", "none", "NONE", "unchanged", "Unchanged", "no change", "No Change", "no_change", "no-change", "nochange"]
    + ["no changes", " no change. ", "not changed", "nothing changed", "no difference"]
    + ["no_diff", "same", "identical", "unmodified", "no changed", "No modification", "no-edit"],
)
@pytest.mark.parametrize("read", [pairs.read, omnidiff.read], ids=["pairs", "omnidiff"])
def test_names_of_no_change_are_one_change_type(tmp_path, read, name):
    root = write_table(tmp_path, 4, change_types=is_odd("removal", name))
    reading = read(root, "pairs.csv")
    assert [row.change_types for row in reading] == [[NO_CHANGE], ["removal"]] * 2
    assert any("(2)" in note for note in reading.notes) == (name != NO_CHANGE)


@pytest.mark.parametrize("name", ["none of these", "change", "no", "unknown", "same colour", "nothing left"])
def test_other_change_types_stay(tmp_path, name):
    root = write_table(tmp_path, 1, change_types=lambda number: name)
    assert [row.change_types for row in pairs.read(root)] == [[name]]


def test_ingest_and_check_count_the_rows_or_refuse_with_exit_3(tmp_path, capsys, monkeypatch):
    root = write_table(tmp_path / "raw", flag=is_odd("yes", "no"))
    for number in range(10):
        save_picture(root / f"{number}.png", number)
        save_picture(root / f"{number}_2.png", number, 99)
    report = run_ingest(root, "pairs", "own", no_change={"flag": False})
    assert report.pairs == {"train": 4, "val": 3, "test": 3}
    assert "5 of 10 rows" in capsys.readouterr().out
    with raises(DataError, "datasets.options_do_not_match", path=root) as refused:
        run_ingest(root, "pairs", "own", no_change={"flag": 7})
    (fault,) = refused.value.fields["faults"]
    assert fault.code == "datasets.filter_matches_no_row"
    assert fault.fields["rows"] == 10
    from m3diff.commands.inspect import check
    from m3diff.stages.ingest.params import DatasetEntry

    entry = DatasetEntry(reader="pairs", root=root, options={"no_change": {"flag": False}})
    lines, is_sound = check(root, {"own": entry})
    assert "5 of 10 rows" in "\n".join(lines)
    assert is_sound
    entry = DatasetEntry(reader="pairs", root=root, options={"no_change": {"flag": 7}})
    lines, is_sound = check(root, {"own": entry})
    assert Message("datasets.filter_matches_no_row", rows=10).in_text("\n".join(lines))
    assert not is_sound
    assert main(["data", "check", str(root)]) == 0


def test_the_code_for_refused_data_is_3():
    assert DATA_REFUSED == 3
