"""What ingest, validate and convert print of their reports."""

import re
from pathlib import Path

from m3diff.commands.counts import LEFT_OUT, told, told_of_clean, told_of_samples
from m3diff.stages.convert.stage import ConvertCounts, ConvertReport
from m3diff.stages.ingest.stage import IngestReport
from m3diff.stages.validate.stage import ValidateCounts, ValidateReport

INGESTED = {"stage": "ingest", "rows_in": 9, "rows_out": 9, "dataset": "mini", "reader": "pairs", "images": 15000}
INGESTED |= {"pairs": {"test": 500, "train": 7000, "val": 0}, "references": {"train": 9000, "val": 0, "test": 500}}
INGESTED |= dict.fromkeys(("empty_references", "faults", "unread_images"), 0)


def test_ingest_says_what_it_read_and_what_it_could_not():
    counts = "7,500 (train 7,000, test 500) pairs, 9,500 (train 9,000, test 500) references, 15,000 images"
    assert told(IngestReport(**INGESTED)) == f"ingest: mini: {counts}"
    bad = told(IngestReport(**INGESTED | {"faults": 2, "unread_images": 3, "empty_references": 1}))
    assert re.search("mini: 7,500 .* images; 2 rows cannot be read, 3 images .*, 1 references are empty", bad)


def test_validate_says_what_is_clean_and_which_rules_were_broken():
    counts = {"pairs": {"train": 8}, "references": {"train": 16}, "lost_test_pairs": []}
    mini = ValidateCounts(**counts, quarantined=3, broken_rules={"no_leak": 2, "unique": 1})
    none = dict.fromkeys(("references_respaced", "bad_images", "mislabelled_images"), 0)
    datasets = {"mini": mini, "other": ValidateCounts(**counts, quarantined=0, broken_rules={})}
    read = {"stage": "validate", "rows_in": 19, "rows_out": 16, "quarantined": 3, "leaks": 2, "overlaps": {}}
    clean, one, broken, other, leaks = told_of_clean(
        ValidateReport(**read, **none, images=38, datasets=datasets), Path()
    )
    assert clean.startswith("validate: 16 of 19 pairs are clean; ")
    assert (one[:14], other[:15]) == ("validate: mini", "validate: other")
    assert one[14:] == other[15:] == ": 8 (train 8) pairs, 16 (train 16) references"
    assert broken.endswith(": no_leak 2, unique 1")
    assert "2 of them" in leaks


def test_convert_says_what_did_not_enter_the_mixture_and_why():
    none, counts = dict.fromkeys(LEFT_OUT, 0), {"pairs": {"train": 3}, "samples": {"train": 6}}
    left_out = {"a": none | {"references_over_cap": 6, "empty_references": 1}, "b": none}
    datasets = {name: ConvertCounts(**counts, left_out=left) for name, left in left_out.items()}
    read = {"stage": "convert", "rows_in": 9, "rows_out": 12, "pairs": {"train": 6}, "samples": {"train": 12}}
    assert list(told_of_samples(ConvertReport(**read, datasets=datasets, published={}))) == [
        "convert: 12 (train 12) samples of 6 (train 6) pairs",
        "convert: a: 6 (train 6) samples; left out: 1 empty references, 6 references over references_per_pair",
        "convert: b: 6 (train 6) samples",
    ]
