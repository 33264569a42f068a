"""A report is printed in numbers."""

from typing import Any

from m3diff.command_line.report_lines import format_report
from m3diff.stages.ingest.stage import IngestReport
from m3diff.stages.validate.stage import ValidateCounts, ValidateReport


def ingest_report(**changes: Any) -> IngestReport:
    fields = {
        "stage": "ingest",
        "dataset": "mini",
        "reader": "pairs",
        "rows_in": 9,
        "rows_out": 9,
        "pairs": {"test": 500, "train": 7000, "val": 0},
        "references": {"train": 9000, "val": 0, "test": 500},
        "images": 15000,
        "empty_references": 0,
        "faults": 0,
        "unread_images": 0,
        "repeated_questions": 0,
    }
    return IngestReport(**fields | changes)


def test_a_report_is_one_line_of_numbers_without_zeros():
    assert format_report(ingest_report()) == (
        "ingest: mini: rows in 9, rows out 9, pairs 7,500 (test 500, train 7,000), references 9,500 (train 9,000, "
        "test 500), images 15,000"
    )


def test_a_number_that_is_not_zero_keeps_its_place():
    assert format_report(ingest_report(faults=2)).endswith("test 500), faults 2, images 15,000")


def test_each_dataset_of_a_report_has_a_line():
    counts = {"pairs": {"train": 8}, "references": {"train": 16}, "lost_test_pairs": ["a"]}
    report = ValidateReport(
        stage="validate",
        rows_in=19,
        rows_out=16,
        quarantined=3,
        leaks=2,
        overlaps={},
        references_respaced=0,
        bad_images=0,
        mislabelled_images=0,
        images=38,
        datasets={
            "mini": ValidateCounts(**counts, quarantined=3, broken_rules={"no_leak": 2, "unique": 1}),
            "other": ValidateCounts(**counts, quarantined=0, broken_rules={}),
        },
    )
    pairs = "pairs 8 (train 8), references 16 (train 16)"
    assert format_report(report).split("\n") == [
        "validate: rows in 19, rows out 16, quarantined 3, leaks 2, images 38",
        f"validate: mini: {pairs}, quarantined 3, broken rules 3 (no_leak 2, unique 1)",
        f"validate: other: {pairs}",
    ]
