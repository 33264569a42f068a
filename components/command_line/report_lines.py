"""Format a stage's report for printing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from m3diff.records.files import StageReport


def format_report(report: StageReport) -> str:
    """Return one line with the numbers in a report, and one line with the numbers of each dataset in the report."""
    fields = report.model_dump()
    heading = f"{report.stage}: {fields['dataset']}" if "dataset" in fields else report.stage
    lines = [f"{heading}: {format_numbers(fields)}"]
    for name, dataset_fields in fields.get("datasets", {}).items():
        lines.append(f"{report.stage}: {name}: {format_numbers(dataset_fields)}")
    return "\n".join(lines)


def format_numbers(fields: Mapping[str, Any]) -> str:
    """Format the fields that are integers or dicts of integers: `pairs 7,500 (train 7,000, test 500), faults 2`.

    Zeros and all other fields are left out.
    """
    phrases = []
    for name, value in fields.items():
        label = name.replace("_", " ")
        if isinstance(value, dict):
            counts = {key: count for key, count in value.items() if isinstance(count, int) and count}
            if sum(counts.values()):
                details = ", ".join(f"{key} {count:,}" for key, count in counts.items())
                phrases.append(f"{label} {sum(counts.values()):,} ({details})")
        elif isinstance(value, int) and value:
            phrases.append(f"{label} {value:,}")
    return ", ".join(phrases)
