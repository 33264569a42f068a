"""great-expectations: one suite and one validation with SUMMARY results; and the page of what was found.

Bad rows are found by polars; here the same rules are judged by an independent engine and shown to people. A COMPLETE
result would cost seconds on a tenth of bad rows, and an empty table would pass every column rule, hence the row count.
The page is our own: that of great-expectations loads nine content networks and shows clock times and random ids.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import polars as pl
import polars.selectors as cs
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from pydantic import BaseModel

from m3diff.records.files import StageReport, write_atomic
from m3diff.stages.validate.rules import Rule

ExpectedPairs = Mapping[str, Mapping[Any, int]]
"""Pairs by dataset and split, as the dataset's own files call it."""

SHOWN = 200
"""Rows of the page for each broken rule."""


class Check(BaseModel):
    """An expectation and what great-expectations found of it: the number of rows that break it, or of those there."""

    dataset: str
    rule: str  # or "pairs of <split>"
    expectation: str
    met: bool
    found: int


class ValidateCounts(BaseModel):
    """Counts of one dataset: clean pairs and references by split, rows in quarantine by rule (some break several)."""

    pairs: dict[str, int]
    references: dict[str, int]
    quarantined: int
    broken_rules: dict[str, int]
    lost_test_pairs: list[str]  # "<id or place>: <reason>" of each test pair that is in quarantine


class ValidateReport(StageReport):
    quarantined: int
    leaks: int  # of them training pairs that are in a test set and are else sound
    overlaps: dict[str, int]  # pairs of one split that are also in another, kept or not
    references_respaced: int
    images: int
    bad_images: int
    mislabelled_images: int  # the content is sound, of another format than the file's name says
    datasets: dict[str, ValidateCounts]


def run_suite(found: pl.DataFrame, rules: list[Rule], expected: ExpectedPairs) -> tuple[list[Check], list[str]]:
    """Validate the facts, with their column `counts` (1 where a row counts as there).

    Returns:
        Each expectation with its result, and a sentence for each expected count that does not hold.
    """
    os.environ["GX_ANALYTICS_ENABLED"] = "false"
    import great_expectations as gx  # seconds of import

    columns = dict.fromkeys(["dataset", "own_split", "counts", *(rule.column for rule in rules)])
    frame = found.select(*columns).with_columns(cs.string().cast(pl.Categorical)).to_pandas()  # conditions copy rows
    context: Any = gx.get_context(mode="ephemeral")
    context.variables.progress_bars = {"globally": False}
    asset = context.data_sources.add_pandas("records").add_dataframe_asset("records")
    batch = asset.add_batch_definition_whole_dataframe("all").get_batch({"dataframe": frame})
    suite = gx.ExpectationSuite(name="records", expectations=_expectations(found, rules, expected))
    checks, miscounts = [], []
    for result in batch.validate(suite, result_format="SUMMARY").results:
        meta, config = result.expectation_config.meta, result.expectation_config
        assert not result.exception_info.get("raised_exception"), (meta, result.exception_info)
        rows = result.result.get("unexpected_count", result.result.get("observed_value"))
        checks.append(Check(**meta, expectation=config.type, met=result.success, found=rows))
        if not result.success and config.type == "expect_table_row_count_to_equal":
            split = meta["rule"].removeprefix("pairs of ")
            wanted = config.kwargs["value"]
            miscounts.append(f"{meta['dataset']} {split}: {rows} pairs, but {wanted} are expected")
    return checks, miscounts


def _expectations(found: pl.DataFrame, rules: list[Rule], expected: ExpectedPairs) -> list[Any]:
    """The rules of each dataset (a condition on its rows) in one suite, so that GX computes shared metrics once."""
    import great_expectations.expectations as gxe
    from great_expectations.expectations.row_conditions import Column

    datasets = found["dataset"].unique().sort().to_list()
    conditions = {name: Column("dataset") == name for name in datasets} if len(datasets) > 1 else {datasets[0]: None}
    whole = {"dataset": "all", "rule": "rows"}
    expectations: list[Any] = [gxe.ExpectTableRowCountToBeBetween(min_value=1, meta=whole)]
    for dataset, condition in conditions.items():
        for rule in rules:
            meta = {"rule": rule.name, "dataset": dataset}
            build = getattr(gxe, rule.expectation)
            expectations.append(build(column=rule.column, row_condition=condition, meta=meta, **rule.arguments))
    for dataset, splits in expected.items():
        for split, pairs in splits.items():
            rows = (Column("dataset") == dataset) & (Column("own_split") == split) & (Column("counts") == 1)
            meta = {"dataset": dataset, "rule": f"pairs of {split}"}
            expectations.append(gxe.ExpectTableRowCountToEqual(value=pairs, row_condition=rows, meta=meta))
    return expectations


def write_page(report: ValidateReport, checks: list[Check], quarantine: pl.DataFrame, site: Path) -> None:
    """Write `site`/index.html: counts by dataset, the expectations, and the first rows that break each rule.

    Args:
        quarantine: as `quarantine.parquet`.
    """
    loader = FileSystemLoader(Path(__file__).parent)
    pages = Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    rules = quarantine["rules"].explode().drop_nulls().unique().sort()
    broken = {rule: quarantine.filter(pl.col("rules").list.contains(rule)).to_dicts() for rule in rules}
    page = pages.get_template("docs.html.j2").render(report=report, checks=checks, broken=broken, shown=SHOWN)
    write_atomic(site / "index.html", page)
