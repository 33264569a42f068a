"""Syned: its four files in their forms, of the published counts, and what is easily read wrong."""

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from m3diff.datasets import emu_edit
from m3diff.datasets.syned import PUBLISHED, read
from m3diff.records.errors import DataError
from tests.layouts import edit_json, run_ingest, run_validate, write_json, write_syned


def test_a_pair_s_number_is_its_line_s_and_the_splits_are_of_numbers(tmp_path):
    rows = list(read(write_syned(tmp_path)))
    assert [(row.name, row.split, row.references) for row in rows[:3]] == [
        ("validation-0", "train", ["make the sky night"]),
        ("validation-10", "val", ["add a duck."]),
        ("validation-2", "train", ["zip it up"]),
    ]
    assert [row.name for row in rows[3:]] == ["test-0", "test-10", "test-2"]
    edits = {row.name: (row.before, row.after) for row in emu_edit.read(tmp_path / "emu_edit")}
    assert all((row.before, row.after) == edits[row.name] for row in rows)
    assert len({row.before for row in rows}) == 6
    assert rows[1].source == "instructions_with_idx_train_split.txt, line 2"
    assert rows[4].split == "test"


def test_test_references_are_all_paraphrases_refusals_too_and_the_instruction(tmp_path):
    rows = {row.name: row for row in read(write_syned(tmp_path)) if row.split == "test"}
    assert rows["test-0"].references == ["a goat", "I'm just an AI, I cannot", "add a goat"]
    assert rows["test-10"].references == ["add a bag"], "no paraphrase"
    assert rows["test-2"].references == ["a fork", "a fork by it", "f", "g", "h", "add a fork"]
    assert not any(row.fault for row in rows.values())


@pytest.fixture(scope="module")
def release(tmp_path_factory) -> Path:
    """Its files, as large as they are published: lines sorted as text, 0 to 8 paraphrases."""
    root = tmp_path_factory.mktemp("syned")
    for part, count, stray in (("train", 3_589, 368), ("test", 2_022, 170)):
        lines = [f"{n} <INSTRUCT> {' ' * (n < stray)}add {n} goats" for n in sorted(range(count), key=str)]
        (root / f"instructions_with_idx_{part}_split.txt").write_text("".join(f"{line}\n" for line in lines))
    write_json(root / "splits.json", {"train": [*range(3_588, 538, -1)], "validation": [*range(539)]})
    lengths = {4: 1_974, 3: 17, 2: 13, 5: 6, 1: 5, 0: 4, 8: 2, 7: 1}
    each = [length for length, count in lengths.items() for _ in range(count)]
    found = {f"{n} ": [f"goats {m}" for m in range(length)] for n, length in enumerate(each)}
    write_json(root / "gt_augmented_test_clean.json", found)
    return root


def test_the_counts_are_the_published_ones(release):
    rows = list(read(release))
    assert not any(row.fault for row in rows)
    assert len({row.name for row in rows}) == len(rows)
    assert Counter(row.split for row in rows) == {"train": 3_050, "val": 539, "test": 2_022} == PUBLISHED.pairs()
    for split in ("train", "val", "test"):
        texts = [text for row in rows if row.split == split for text in row.references]
        assert len(texts) == getattr(PUBLISHED, split).references
        assert not any(text != text.strip() for text in texts)
    row = {row.name: row for row in rows}["validation-3000"]
    assert row.references == ["add 3000 goats"]
    assert row.before == "emu_edit/data/validation-*.parquet, idx 3000, image", "Emu Edit's files are not there"


def test_lines_numbers_and_paraphrases_that_do_not_fit_stay_with_their_place(tmp_path):
    root = write_syned(tmp_path)
    (root / "instructions_with_idx_train_split.txt").write_text(
        "0 <INSTRUCT> a\n5 <INSTRUCT> b\nx <INSTRUCT> c\n10 d\n"
    )
    (root / "instructions_with_idx_test_split.txt").write_text("3 <INSTRUCT> a\nadd a goat\n")
    bad = [(row.name, row.split, row.source, row.fault) for row in read(root) if row.fault]
    line = "line: expected '<number> <INSTRUCT> <text>', found text"
    train, test = (f"instructions_with_idx_{part}_split.txt" for part in ("train", "test"))
    assert bad == [
        ("validation-5", None, f"{train}, line 2", "split: the number is in no list of splits.json"),
        (None, None, f"{train}, line 3", f"{line} 'x <INSTRUCT> c'"),
        (None, None, f"{train}, line 4", f"{line} '10 d'"),
        ("validation-2", "train", "splits.json, 2", f"instruction: {train} has no line for it"),
        ("validation-10", "val", "splits.json, 10", f"instruction: {train} has no line for it"),
        ("test-3", "test", f"{test}, line 1", "gt_augmented_test_clean.json '3 ': expected a list, found null"),
        (None, "test", f"{test}, line 2", f"{line} 'add a goat'"),
    ]


@pytest.mark.parametrize(
    ("splits", "message"),
    [
        ({"train": [0], "val": [1]}, "no list validation; expected train and validation; fetch it again"),
        ({"train": [0], "validation": ["1"]}, "validation[0]: expected a number from 0, found text '1'"),
        ({"train": [0, 1], "validation": [1]}, "validation[0]: 1 stands there twice; keep one"),
    ],
)
def test_splits_that_cannot_be_trusted_are_refused(tmp_path, splits, message):
    root = write_syned(tmp_path)
    write_json(root / "splits.json", splits)
    with pytest.raises(DataError, match=re.escape(f"splits.json: {message}")):
        list(read(root))


def test_keys_without_their_space_are_no_paraphrases(tmp_path):
    root = write_syned(tmp_path)
    edit_json(root / "gt_augmented_test_clean.json", lambda found: found.update({"0": found.pop("0 ")}))
    (bad,) = [row for row in read(root) if row.fault]
    assert bad.name == "test-0"
    assert "0 " in json.dumps(bad.fault)


def test_it_is_ingested_and_validated_whole(tmp_path):
    run_ingest(write_syned(tmp_path / "raw"), "syned", "syned")
    report = run_validate(tmp_path, max_quarantined_share=0)
    assert report.datasets["syned"].pairs == {"train": 2, "val": 1, "test": 3}
