"""Tables of pairs: how a file is divided into rows, and which columns name the images."""

import json
from pathlib import Path

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from m3diff.commands.score.predictions import read_predictions
from m3diff.datasets.guess import guess_table
from m3diff.datasets.tables import (
    delimiter_of,
    find_image_columns,
    images_of,
    names_of,
    read_image_pairs,
    read_sample,
)
from m3diff.records.errors import DataError, Fault
from m3diff.serving.caption import find_inputs
from tests.errors import raises

# A German table, by the separator of its columns
FIELDS = [["Vorher", "Nachher", "Beschreibung", "Teil"], ["v/1.png", "n/1.png", "die Lampe, links, ist aus", "train"]]


def write_table(path: Path, separator: str, first_line: str = "", encoding: str = "utf-8") -> Path:
    rows = [separator.join(f'"{field}"' if separator in field else field for field in row) for row in FIELDS]
    path.write_text(first_line + "\n".join(rows) + "\n", encoding=encoding)
    return path


TABLES = {
    "commas": ("a.csv", ",", "", "utf-8"),
    "semicolons": ("a.csv", ";", "", "utf-8"),
    "tabs in a CSV file": ("a.csv", "\t", "", "utf-8"),
    "bars": ("a.csv", "|", "", "utf-8"),
    "a TSV file": ("a.tsv", "\t", "", "utf-8"),
    "semicolons in a TSV file": ("a.tsv", ";", "", "utf-8"),
    "a byte order mark": ("a.csv", ";", "", "utf-8-sig"),
    "Excel's line": ("a.csv", ";", "sep=;\n", "utf-8"),
    "an empty first line": ("a.csv", ";", "\n", "utf-8"),
    "a suffix in capitals": ("a.CSV", ";", "", "utf-8"),
}


@pytest.mark.parametrize(("name", "separator", "first_line", "encoding"), TABLES.values(), ids=TABLES)
def test_data_check_and_caption_read_the_same_tables(name, separator, first_line, encoding, tmp_path):
    table = write_table(tmp_path / name, separator, first_line, encoding)
    assert guess_table(tmp_path).options["columns"]["before"] == "Vorher"
    (pair,) = find_inputs(table, None)
    assert pair.images[0] == tmp_path / "v/1.png"
    assert pair.images[1] == tmp_path / "n/1.png"
    assert pair.name == "1"


@pytest.mark.parametrize(("name", "separator", "first_line", "encoding"), TABLES.values(), ids=TABLES)
def test_score_reads_what_data_check_reads(name, separator, first_line, encoding, tmp_path):
    table = tmp_path / name
    text = separator.join(("Image ID", "Caption")) + "\n" + separator.join(("7", "it fell"))
    table.write_text(first_line + text + "\n", encoding=encoding)
    assert read_predictions(table).captions == [("7", "it fell")]


def test_a_separator_between_quotes_separates_nothing(tmp_path):
    (tmp_path / "a.csv").write_text('"Bild, vorher";"Bild, nachher, neu"\na.png;b.png\n')
    assert delimiter_of(tmp_path / "a.csv") == {"delimiter": ";"}


def test_the_suffix_decides_between_separators_of_as_many_columns(tmp_path):
    for name in ("a.csv", "b.tsv"):
        (tmp_path / name).write_text("before,after\told\n")
        assert delimiter_of(tmp_path / name) == {}


@pytest.fixture
def table_in_windows_1252(tmp_path: Path) -> Path:
    """Write a table that is not UTF-8."""
    (tmp_path / "a.csv").write_text("Vorher;Nachher\nküche.png;bad.png\n", encoding="cp1252")
    return tmp_path / "a.csv"


def test_another_encoding_is_refused_by_caption(table_in_windows_1252):
    with raises(DataError, "datasets.not_utf8", path=table_in_windows_1252, encoding="WINDOWS-1252"):
        find_inputs(table_in_windows_1252, None)


def test_another_encoding_is_refused_by_data_check(table_in_windows_1252):
    with raises(DataError, "datasets.no_table_of_pairs", path=table_in_windows_1252.parent) as refused:
        guess_table(table_in_windows_1252.parent)
    (fault,) = refused.value.fields["faults"]
    assert fault.code == "datasets.not_utf8"
    assert fault.fields["command"].startswith("iconv -f WINDOWS-1252 ")


def test_images_inside_a_parquet_file_are_pairs_without_a_file_name(tmp_path):
    embedded = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    images = [{"bytes": b"\x89PNG" + bytes([number]), "path": None} for number in range(4)]
    sides = {"input_image": images[::2], "edited_image": images[1::2]}
    columns = {name: pa.array(values, embedded) for name, values in sides.items()}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    pairs = find_inputs(tmp_path / "a.parquet", None)
    assert [pair.name for pair in pairs] == ["00001", "00002"]
    assert [pair.images[0].read()[-1] for pair in pairs] == [0, 2]
    assert [pair.images[1].read()[-1] for pair in pairs] == [1, 3]


LISTED = {
    "a JSON list": ("a.json", '[{"before": "x.png", "after": "y.png"}]'),
    "rows under a key": ("a.json", '{"meta": 1, "data": [{"before": "x.png", "after": "y.png"}]}'),
    "JSON Lines": ("a.jsonl", '{"before": "x.png", "after": "y.png"}\n'),
    "a list of both images": ("a.jsonl", '{"images": ["x.png", "y.png"], "messages": []}\n'),
    "nested columns": ("a.jsonl", '{"img": {"before": "x.png", "after": "y.png"}}\n'),
}


@pytest.mark.parametrize(("name", "text"), LISTED.values(), ids=LISTED)
def test_tables_in_json_are_read_as_data_check_reads_them(name, text, tmp_path):
    (tmp_path / name).write_text(text)
    (pair,) = find_inputs(tmp_path / name, None)
    assert pair.images[0] == tmp_path / "x.png"
    assert pair.images[1] == tmp_path / "y.png"


def test_a_column_that_names_an_image_in_each_of_two_folders_is_a_template(tmp_path):
    for folder in ("before", "after"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "kitchen.png").touch()
    (tmp_path / "a.csv").write_text("scene;caption\nkitchen;the lamp is out\n")
    (pair,) = find_inputs(tmp_path / "a.csv", None)
    assert pair.images[0] == tmp_path / "before/kitchen.png"
    assert pair.images[1] == tmp_path / "after/kitchen.png"


@pytest.mark.parametrize(
    ("text", "line", "code", "fields"),
    [
        ("before,after\na.png,\n", "line 2", "no_image_in_row", {"key": "after", "side": "after"}),
        (
            "before,after\na.png,b.png\nc.png\n",
            "line 3",
            "wrong_number_of_fields",
            {"value": 1, "expected": 2, "delimiter": ","},
        ),
    ],
    ids=["an empty field", "a field too few"],
)
def test_a_row_that_names_no_pair_is_named(text, line, code, fields, tmp_path):
    (tmp_path / "a.csv").write_text(text)
    with raises(DataError, f"datasets.{code}", **fields) as refused:
        list(read_image_pairs(tmp_path / "a.csv", {"before": "before", "after": "after"}))
    assert str(refused.value.fields["path"]) == str(tmp_path / f"a.csv, {line}")


def test_columns_whose_order_no_name_tells_are_a_question_with_both_answers(tmp_path):
    (tmp_path / "a.csv").write_text("left;right\na.png;b.png\n")
    columns = find_image_columns(tmp_path, read_sample(tmp_path / "a.csv").values())
    assert columns.answers == [{"before": "left", "after": "right"}, {"before": "right", "after": "left"}]
    assert columns.question == Fault("datasets.order_of_columns", names=["left", "right"])


def write_two_folders(root: Path, count: int) -> None:
    for folder in ("before", "after"):
        (root / folder).mkdir()
        for number in range(count):
            (root / folder / f"{number}.png").touch()


def test_several_columns_of_names_of_images_are_a_question_with_the_likeliest_first(tmp_path):
    """In COCO's annotations, the numbers in `id` and `image_id` often overlap."""
    write_two_folders(tmp_path, 4)
    columns = find_image_columns(tmp_path, {"id": [3, 2, 1], "image_id": [0, 0, 1], "caption": ["a", "b", "c"]})
    assert columns.answers == [
        {"before": f"before/{{{name}}}.png", "after": f"after/{{{name}}}.png"} for name in ("image_id", "id")
    ]
    assert columns.question == Fault("datasets.columns_of_image_names", columns=["image_id", "id"])


@pytest.mark.parametrize(("names", "is_template"), [(["gone", 1], True), (["gone", "lost"], False)])
def test_a_column_is_a_template_if_one_of_its_values_names_an_image_in_both_folders(names, is_template, tmp_path):
    write_two_folders(tmp_path, 2)
    template = {"before": "before/{name}.png", "after": "after/{name}.png"}
    columns = find_image_columns(tmp_path, {"caption": ["a"], "name": names})
    assert columns.answers == [template] * is_template


@pytest.mark.parametrize("cell", [["a.png", "b.png"], '["a.png", "b.png"]'], ids=["list", "JSON"])
def test_a_list_of_both_images_may_be_a_json_text(cell):
    assert images_of("t.csv, line 2", {"images": cell}, {"images": "images"}) == ("a.png", "b.png")


def test_a_list_of_images_that_is_not_json_is_refused_with_its_row():
    with raises(DataError, "datasets.invalid_json_in_cell", path="t.csv, line 2", key="images", position=10):
        images_of("t.csv, line 2", {"images": '["a.png" "b.png"]'}, {"images": "images"})


def test_only_known_lists_in_json_are_lists_in_a_sample(tmp_path):
    cells = {
        "talk": [{"from": "human", "value": "A?"}],
        "history": [["A?", "x"]],
        "images": ["a.png"],
        "box": [0.1, 0.2],
        "sentences": [{"raw": "it fell"}],
        "captions": ["it fell"],
        "none": [],
    }
    texts = {name: json.dumps(cell) for name, cell in cells.items()}
    pl.DataFrame([texts]).write_csv(tmp_path / "t.csv")
    values = read_sample(tmp_path / "t.csv").values()
    known_lists = ["talk", "history", "images"]
    assert values == {name: [cells[name] if name in known_lists else texts[name]] for name in cells}


NAMES = {
    "the images before": (["x/1.png y/1.png", "x/2.png y/2.png"], ["1", "2"]),
    "with the folders that tell them apart": (
        ["/data/a/1.png /data/b/1.png", "/data/c/1.png /data/b/1.png", "2.png 3.png"],
        ["a/1", "c/1", "2"],
    ),
    "with the image after": (["x/1.png y/2.png", "x/1.png y/3.png"], ["1-2", "1-3"]),
    "with the row of a pair that occurs twice": (["1.png 2.png"] * 2, ["1-2-row-00001", "1-2-row-00002"]),
    "without names that differ only in case": (["x/A.png b.png", "y/a.png b.png"], ["x/A", "y/a"]),
    "without names of other pairs": (
        ["a-b.png c.png", "a.png b.png", "a.png c.png"],
        ["a-b", "a-b-row-00002", "a-c"],
    ),
    "without the way to the folder": (["../1.png 2.png", "../x/1.png 2.png"], ["1-2", "x/1"]),
}


@pytest.mark.parametrize(("pairs", "names"), NAMES.values(), ids=NAMES)
def test_each_pair_has_the_shortest_name_that_no_other_pair_has(pairs, names):
    before_and_after = [pair.split(" ") for pair in pairs]
    assert names_of([(Path(before), Path(after)) for before, after in before_and_after]) == names
