"""Lines that a stage prints of its report when it has succeeded: counts, and what was left out."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from m3diff.records.schemas import SPLITS

if TYPE_CHECKING:
    from m3diff.stages.augment.stage import AugmentReport
    from m3diff.stages.convert.stage import ConvertReport
    from m3diff.stages.ingest.stage import IngestReport
    from m3diff.stages.validate.stage import ValidateReport

LEFT_OUT = {
    "pairs_not_sampled": "pairs by weight, max_pairs or no_change_share",
    "pairs_without_reference": "pairs without a reference",
    "empty_references": "empty references",
    "repeated_references": "references that repeat another of their pair",
    "references_over_cap": "references over references_per_pair",
}


def by_split(counts: Mapping[str, int]) -> str:
    """`7,500 (train 7,000, test 500)`: in the order of SPLITS, without the empty ones."""
    parts = ", ".join(f"{split} {counts[split]:,}" for split in SPLITS if counts.get(split))
    return f"{sum(counts.values()):,}" + (f" ({parts})" if parts else "")


def told_of_made(report: "AugmentReport") -> Iterator[str]:
    """Lines on what augment made, and of what it made none."""
    yield (
        f"augment: {report.dataset}: {by_split(report.pairs)} pairs of {report.rows_in:,} tried, "
        f"{by_split(report.references)} references"
    )
    for reason in report.reasons():
        yield f"augment: {report.dataset}: rejected: {reason}"
    if report.dropped_texts:
        dropped = ", ".join(f"{reason} {count:,}" for reason, count in report.dropped_texts.items())
        yield f"augment: {report.dataset}: texts of the writer that are not used: {dropped}"


def told(report: "IngestReport") -> str:
    """A line on what ingest read of one dataset."""
    text = (
        f"ingest: {report.dataset}: {by_split(report.pairs)} pairs, {by_split(report.references)} references, "
        f"{report.images:,} images"
    )
    faults = {
        "rows cannot be read": report.faults,
        "images are missing or cannot be read": report.unread_images,
        "references are empty": report.empty_references,
    }
    found = ", ".join(f"{count:,} {what}" for what, count in faults.items() if count)
    return f"{text}; {found}" if found else text


def told_of_clean(report: "ValidateReport", out: Path) -> Iterator[str]:
    """Lines on what validate let through and what it did not."""
    page = out / "docs" / "index.html"
    yield f"validate: {report.rows_out:,} of {report.rows_in:,} pairs are clean; the page: {page}"
    for name, of in report.datasets.items():
        yield f"validate: {name}: {by_split(of.pairs)} pairs, {by_split(of.references)} references"
        if of.quarantined:
            rules = ", ".join(f"{rule} {count:,}" for rule, count in of.broken_rules.items())
            yield f"validate: {name}: {of.quarantined:,} in quarantine, by the rule that they break: {rules}"
    if report.leaks:
        yield f"validate: {report.leaks:,} of them only because they are in a test set, too (leaks)"


def told_of_samples(report: "ConvertReport") -> Iterator[str]:
    """The mixture, and what of each dataset did not enter it."""
    yield f"convert: {by_split(report.samples)} samples of {by_split(report.pairs)} pairs"
    for name, of in report.datasets.items():
        left = ", ".join(f"{of.left_out[key]:,} {what}" for key, what in LEFT_OUT.items() if of.left_out.get(key))
        yield f"convert: {name}: {by_split(of.samples)} samples" + (f"; left out: {left}" if left else "")
