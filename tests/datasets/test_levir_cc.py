"""LEVIR-CC: the annotation file in its schema, of the published counts, and what is easily read wrong."""

import re
from collections import Counter
from pathlib import Path

import pytest

from m3diff.datasets import levir_cc
from m3diff.datasets.levir_cc import PUBLISHED, SPEC, read
from m3diff.records.errors import DataError
from m3diff.scoring.pairs import EvalPair
from m3diff.scoring.protocols import apply
from tests.layouts import SAME, edit_json, levir_record, run_ingest, run_validate, write_json, write_levir

PAIRS = {"train": 6_815, "val": 1_333, "test": 1_929}
NO_CHANGE = {"train": 3_408, "val": 666, "test": 965}


def test_a_pair_is_its_two_times_and_a_reference_its_tokens(tmp_path):
    row = list(read(write_levir(tmp_path)))[2]
    assert (row.name, row.split, row.scene) == ("test_000004.png", "test", "test_000004.png")
    assert (row.before, row.after) == ("images/test/A/test_000004.png", "images/test/B/test_000004.png")
    assert row.references == ["trees are removed", "an arc road is built", "a road", "villas", "a villa"]
    assert (row.source, row.fault, row.raw_rows) == ("LevirCCcaptions.json, image 2", None, 1)
    assert next(read(tmp_path, images="crops")).before == "crops/train/A/train_000001.png"


def test_a_pair_without_a_change_is_known_by_its_sentences_and_not_by_its_flag(tmp_path):
    root = write_levir(tmp_path)
    assert [row.change_types for row in read(root)] == [["change"], ["none"], ["change"], ["none"]]
    edit_json(root / "LevirCCcaptions.json", lambda file: [one.update(changeflag=1) for one in file["images"]])
    assert [row.change_types for row in read(root)] == [["change"], ["none"], ["change"], ["none"]]
    misspelt = levir_record("val", 9, ["a\\\\almost nothing has changed", *SAME[:4]])
    write_json(root / "LevirCCcaptions.json", {"images": [misspelt]})
    assert [row.change_types for row in read(root)] == [["none"]]
    assert set(SAME) == levir_cc.SAME


@pytest.fixture(scope="module")
def release(tmp_path_factory) -> Path:
    """The annotation file, as large as it is published."""
    root = tmp_path_factory.mktemp("levir")
    records = [
        levir_record(split, n, SAME if n < NO_CHANGE[split] else [f"road {m} of {n}" for m in range(5)])
        for split, count in PAIRS.items()
        for n in range(count)
    ]
    write_json(root / "LevirCCcaptions.json", {"images": records})
    return root


def test_the_counts_are_the_published_ones(release):
    rows = list(read(release))
    assert not any(row.fault for row in rows)
    assert len({row.name for row in rows}) == len(rows) == 10_077 == SPEC.table.pairs
    assert Counter(row.split for row in rows) == PAIRS == PUBLISHED.pairs()
    for split in PAIRS:
        own = [row for row in rows if row.split == split]
        assert sum(len(row.references) for row in own) == 5 * PAIRS[split] == getattr(PUBLISHED, split).references
        assert sum(row.change_types == ["none"] for row in own) == NO_CHANGE[split]
    assert sum(NO_CHANGE.values()) == 5_039


def test_each_protocol_scores_its_share_of_the_test_pairs_by_words_between_spaces(release):
    pairs = [
        EvalPair(
            f"levir_cc/{row.name}", "levir_cc", Path(), Path(), b"", b"", row.references, row.change_types, "", None
        )
        for row in read(release)
        if row.split == "test"
    ]
    found = {one.name: len(apply(one, pairs)) for one in SPEC.protocols}
    assert found == {one.name: one.n for one in SPEC.protocols} == {"total": 1_929, "change": 964, "no_change": 965}
    assert {one.tokenizer for one in SPEC.protocols} == {"whitespace"}


def test_records_that_cannot_be_read_stay_with_their_place(tmp_path):
    root = write_levir(tmp_path)

    def spoil(file: dict) -> None:
        del file["images"][0]["filename"]
        file["images"][1]["sentences"][3] = "no change"
        file["images"][2]["sentences"][0]["tokens"] = ["a", 7]
        file["images"].append("val_000002.png")

    edit_json(root / "LevirCCcaptions.json", spoil)
    bad = [(row.name, row.split, row.source, row.fault) for row in read(root) if row.fault]
    assert bad == [
        (None, "train", "LevirCCcaptions.json, image 0", "filename: is missing"),
        (
            None,
            "val",
            "LevirCCcaptions.json, image 1",
            "sentence 3: record: expected an object, found text 'no change'",
        ),
        (None, "test", "LevirCCcaptions.json, image 2", "sentence 0: tokens: expected text, found a whole number 7"),
        (None, None, "LevirCCcaptions.json, image 4", "record: expected an object, found text 'val_000002.png'"),
    ]


def test_a_file_without_the_list_of_images_is_refused(tmp_path):
    write_json(tmp_path / "LevirCCcaptions.json", {"image": []})
    with pytest.raises(DataError, match=re.escape("expected a list `images`, found null; fetch it again")):
        list(read(tmp_path))


def test_it_is_ingested_and_validated_whole(tmp_path):
    run_ingest(write_levir(tmp_path / "raw"), "levir_cc", "levir_cc")
    report = run_validate(tmp_path, max_quarantined_share=0)
    assert report.datasets["levir_cc"].pairs == {"train": 1, "val": 1, "test": 2}
