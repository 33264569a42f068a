"""Emu Edit: the Parquet files of the release, of the published counts, with their images."""

import re
from collections import Counter

import pyarrow.parquet as pq
import pytest

from m3diff.datasets.emu_edit import PUBLISHED, read
from m3diff.records.errors import DataError
from tests.layouts import emu_row, run_ingest, run_validate, stored, write_emu, write_shards


def test_a_pair_is_called_by_its_split_and_its_number_which_counts_in_each_split_anew(tmp_path):
    rows = {row.name: row for row in read(write_emu(tmp_path))}
    assert [(row.name, row.split) for row in rows.values()] == [
        ("validation-2", "val"),
        ("validation-1", "val"),
        ("validation-0", "val"),
        ("test-1", "test"),
        ("test-0", "test"),
    ]
    row = rows["validation-1"]
    raw = pq.read_table(tmp_path / "data/validation-00001-of-00002-2f1a.parquet").to_pylist()[0]
    assert (row.before.read(), row.after.read()) == (raw["image"]["bytes"], raw["edited_image"]["bytes"])
    assert (row.before.name[-4:], row.after.name[-4:]) == (".png", ".jpg")
    assert (row.references, row.scene, row.change_types) == ([" add a rainbow"], "validation-1", [])
    assert row.source == "validation-00001-of-00002-2f1a.parquet, row 0"


def test_the_split_is_the_file_s_and_the_counts_are_the_published_ones(tmp_path):
    for split, count, own in (("validation", 3_589, "test"), ("test", 2_022, "validation")):
        image = {"bytes": b"x", "path": None}
        rows = [emu_row(own, n, "add a goat") | {"image": image, "edited_image": image} for n in range(count)]
        write_shards(tmp_path, split, rows, 2)
    found = list(read(tmp_path))
    assert not any(row.fault for row in found)
    assert len({row.name for row in found}) == len(found)
    assert Counter(row.split for row in found) == {"val": 3_589, "test": 2_022}
    assert PUBLISHED.pairs() == {"train": 0, "val": 3_589, "test": 2_022}
    assert sum(len(row.references) for row in found) == PUBLISHED.val.references + PUBLISHED.test.references


def test_the_dataset_without_edits_whose_splits_are_swapped_is_refused(tmp_path):
    for split, count in (("validation", 2), ("test", 3)):
        write_shards(tmp_path, split, [emu_row(split, n, "add a goat", edited=False) for n in range(count)])
    wanted = "no column edited_image: it is of emu_edit_test_set, in which validation and test are swapped; fetch"
    with pytest.raises(DataError, match=re.escape(wanted)):
        list(read(tmp_path))


def test_a_missing_file_is_named_before_a_pair_is_lost(tmp_path):
    root = write_emu(tmp_path)
    (root / "data/validation-00000-of-00002-2f1a.parquet").unlink()
    wanted = r"data/validation-\*\.parquet: not each file of one release is there once, but 1 of 2; fetch it again"
    with pytest.raises(DataError, match=wanted):
        list(read(root))
    (root / "data/validation-00001-of-00002-2f1a.parquet").unlink()
    with pytest.raises(DataError, match=r"data/validation-\*\.parquet: no such file; the dataset is incomplete"):
        list(read(root))


def test_a_file_that_is_no_parquet_is_named(tmp_path):
    root = write_emu(tmp_path)
    (root / "data/test-00000-of-00001-2f1a.parquet").write_bytes(b"PAR")
    with pytest.raises(DataError, match=r"test-00000-of-00001-2f1a\.parquet: cannot be read as Parquet"):
        list(read(root))


def test_rows_without_a_number_or_an_instruction_stay_with_what_is_wrong(tmp_path):
    root = write_emu(tmp_path)
    image = stored(1)
    rows = [{"idx": None, "instruction": "x", "image": image, "edited_image": image}]
    rows += [{"idx": 1, "instruction": "", "image": image, "edited_image": image}]
    write_shards(root, "test", rows)
    bad = [(row.name, row.split, row.source, row.fault) for row in read(root) if row.split == "test"]
    assert bad == [
        (None, "test", "test-00000-of-00001-2f1a.parquet, row 0", "idx: is missing"),
        (None, "test", "test-00000-of-00001-2f1a.parquet, row 1", "instruction: is empty"),
    ]


def test_a_pair_without_the_bytes_of_an_image_goes_to_quarantine_and_the_others_stay(tmp_path):
    root = write_emu(tmp_path / "raw")
    rows = [emu_row("test", 0, "x") | {"edited_image": {"bytes": None, "path": "a.png"}}, emu_row("test", 1, "y")]
    write_shards(root, "test", [*rows, emu_row("test", 2, "z") | {"edited_image": None}])
    run_ingest(root, "emu_edit", "emu_edit")
    report = run_validate(tmp_path, max_quarantined_share=0.7, allow_lost_test_pairs=True)
    assert report.datasets["emu_edit"].pairs == {"val": 3, "test": 1}


def test_it_is_ingested_and_validated_whole_and_trains_nothing(tmp_path):
    root = write_emu(tmp_path / "raw")
    run_ingest(root, "emu_edit", "emu_edit")
    report = run_validate(tmp_path, max_quarantined_share=0)
    assert report.datasets["emu_edit"].pairs == {"val": 3, "test": 2}
