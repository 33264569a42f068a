"""Tables of records: folders of parts, cut between image sets."""

from collections.abc import Iterator
from pathlib import Path
from threading import Event

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from m3diff.records import tables
from m3diff.records.errors import DataError
from m3diff.records.tables import (
    iterate_parts,
    load_table,
    part_bounds,
    part_paths,
    read_table,
    write_parts,
    write_table,
)
from tests.errors import raises


def rows_of(*image_sets: str | None) -> pa.Table:
    return pa.table({"image_set": pa.array(image_sets, pa.string()), "number": pa.array(range(len(image_sets)))})


@pytest.mark.parametrize(
    ("image_sets", "bounds"),
    [
        ("", []),
        ("a", [(0, 1)]),
        ("abcd", [(0, 2), (2, 4)]),
        ("abcde", [(0, 2), (2, 4), (4, 5)]),
        ("abbb", [(0, 4)]),
        ("abbbc", [(0, 4), (4, 5)]),
        ("aaaab", [(0, 4), (4, 5)]),
        ("aabba", [(0, 2), (2, 4), (4, 5)]),
    ],
    ids=["no row", "one row", "even", "a short last part", "to the end", "longer", "longer than two parts", "again"],
)
def test_a_part_ends_after_the_image_set_that_completes_it(image_sets, bounds):
    assert part_bounds(pa.array([*image_sets], pa.string()), part_rows=2) == bounds


def test_rows_without_an_image_set_do_not_stay_together():
    assert part_bounds(pa.array([None] * 5, pa.string()), part_rows=2) == [(0, 2), (2, 4), (4, 5)]


def test_image_sets_are_compared_across_the_chunks_of_a_column():
    column = pa.chunked_array([["a", "b"], ["b", "b", "c"]])
    assert part_bounds(column, part_rows=2) == [(0, 4), (4, 5)]


def test_a_table_is_read_as_it_was_written_by_every_program(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "PART_ROWS", 2)
    rows = rows_of("a", "a", "b", None, "c")
    write_table(rows, tmp_path / "x=1")
    assert [path.name for path in part_paths(tmp_path / "x=1")] == ["00000.parquet", "00001.parquet", "00002.parquet"]
    assert read_table(tmp_path / "x=1").equals(rows)
    assert pl.read_parquet(tmp_path / "x=1" / "*.parquet", hive_partitioning=False).to_dict(as_series=False) == (
        rows.to_pydict()
    )
    assert read_table(tmp_path / "x=1", ["number"], [("image_set", "=", "a")]).to_pydict() == {"number": [0, 1]}


def test_a_table_of_no_parts_is_an_empty_folder(tmp_path):
    write_parts([], tmp_path / "records")
    assert list((tmp_path / "records").iterdir()) == []


def test_a_part_is_not_computed_before_the_part_two_before_it_is_on_disk(tmp_path, monkeypatch):
    third_is_computed = Event()
    computed_early = []

    def write_slowly(part: pa.Table, file: Path) -> None:
        if file.name == "00000.parquet":
            computed_early.append(third_is_computed.wait(timeout=0.05))

    def compute_parts() -> Iterator[pa.Table]:
        yield from [rows_of("a"), rows_of("b")]
        third_is_computed.set()
        yield rows_of("c")

    monkeypatch.setattr(tables, "_write_part", write_slowly)
    write_parts(compute_parts(), tmp_path / "records")
    assert computed_early == [False]


def test_a_shorter_table_leaves_no_part_of_the_longer_one(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "PART_ROWS", 2)
    write_table(rows_of(*"abcdef"), tmp_path / "records")
    write_table(rows_of("g"), tmp_path / "records")
    assert [path.name for path in (tmp_path / "records").iterdir()] == ["00000.parquet"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["records"]


def test_a_table_without_rows_has_its_columns(tmp_path):
    write_table(rows_of(), tmp_path / "records")
    assert read_table(tmp_path / "records").schema.equals(rows_of().schema)
    with raises(DataError, "convert.no_clean_record", path=tmp_path / "records"):
        load_table(tmp_path / "records", rows_of().schema, "validate", "convert.no_clean_record")


def test_a_single_file_of_an_earlier_release_is_a_table(tmp_path):
    pq.write_table(rows_of("a"), tmp_path / "records.parquet")
    assert read_table(tmp_path / "records.parquet").equals(rows_of("a"))


@pytest.mark.parametrize("is_folder", [True, False], ids=["a folder without parts", "nothing"])
def test_a_table_that_is_not_there_is_named(tmp_path: Path, is_folder):
    if is_folder:
        (tmp_path / "records").mkdir()
    with raises(DataError, "files.unreadable_stage_output", path=tmp_path / "records", writer="ingest"):
        load_table(tmp_path / "records", rows_of().schema, "ingest", "validate.no_record")


def test_a_reader_that_names_no_writer_names_the_table(tmp_path):
    with raises(DataError, "files.unreadable_output", path=tmp_path / "scores"):
        read_table(tmp_path / "scores")
    with raises(DataError, "files.unreadable_output", path=tmp_path / "scores"):
        next(iterate_parts(tmp_path / "scores"))


def test_a_part_with_other_columns_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "PART_ROWS", 1)
    write_table(rows_of("a", "b"), tmp_path / "records")
    pq.write_table(rows_of("b").drop_columns(["number"]), tmp_path / "records/00001.parquet")
    with raises(DataError, "files.other_columns", path=tmp_path / "records", writer="ingest"):
        load_table(tmp_path / "records", rows_of().schema, "ingest", "validate.no_record")
