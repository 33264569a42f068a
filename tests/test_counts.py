"""The numbers of a stage's report as its command prints them."""

from m3diff.commands.usage import told
from m3diff.stages.ingest.stage import IngestReport
from m3diff.stages.validate.stage import ValidateCounts, ValidateReport

INGESTED = {"stage": "ingest", "rows_in": 9, "rows_out": 9, "dataset": "mini", "reader": "pairs", "images": 15000}
INGESTED |= {"pairs": {"test": 500, "train": 7000, "val": 0}, "references": {"train": 9000, "val": 0, "test": 500}}
INGESTED |= dict.fromkeys(("empty_references", "faults", "unread_images"), 0)


def test_a_report_is_told_in_numbers_without_zeros_and_each_of_its_datasets_in_a_line():
    start = "ingest: mini: rows in 9, rows out 9, pairs 7,500 (test 500, train 7,000), references 9,500 (train 9,000, "
    assert told(IngestReport(**INGESTED)) == f"{start}test 500), images 15,000"
    assert told(IngestReport(**INGESTED | {"faults": 2})) == f"{start}test 500), faults 2, images 15,000"
    counts = {"pairs": {"train": 8}, "references": {"train": 16}, "lost_test_pairs": ["a"]}
    mini = ValidateCounts(**counts, quarantined=3, broken_rules={"no_leak": 2, "unique": 1})
    datasets = {"mini": mini, "other": ValidateCounts(**counts, quarantined=0, broken_rules={})}
    none = dict.fromkeys(("references_respaced", "bad_images", "mislabelled_images"), 0)
    read = {"stage": "validate", "rows_in": 19, "rows_out": 16, "quarantined": 3, "leaks": 2, "overlaps": {}}
    pairs = "pairs 8 (train 8), references 16 (train 16)"
    assert told(ValidateReport(**read, **none, images=38, datasets=datasets)).split("\n") == [
        "validate: rows in 19, rows out 16, quarantined 3, leaks 2, images 38",
        f"validate: mini: {pairs}, quarantined 3, broken rules 3 (no_leak 2, unique 1)",
        f"validate: other: {pairs}",
    ]
