"""Check the rules with great-expectations, independently of polars.

Results have great-expectations' SUMMARY format, because the COMPLETE format takes seconds if a tenth of the rows are
bad. The suite also checks the number of rows, because an empty table satisfies every rule about a column.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import polars as pl

from m3diff.records.errors import Fault
from m3diff.stages.validate.rules import Rule

# Number of pairs per dataset and split. Splits are named as in the dataset's own files
ExpectedPairs = Mapping[str, Mapping[Any, int]]


@dataclass(frozen=True)
class ExpectationResult:
    """The result of one expectation.

    Attributes:
        dataset: name of the dataset, or "all".
        rule: name of the rule, "rows", or "pairs of <split>".
        expectation: type of the expectation in great-expectations.
        is_met: true if no row breaks the rule, or if the count is as expected.
        row_count: number of rows that break the rule. For an expectation about a count, the actual count.
    """

    dataset: str
    rule: str
    expectation: str
    is_met: bool
    row_count: int


def run_suite(
    row_facts: pl.DataFrame, all_rules: list[Rule], expected: ExpectedPairs
) -> tuple[list[ExpectationResult], list[Fault]]:
    """Check the facts about all rows with great-expectations.

    Args:
        row_facts: as `compute_facts` returns them, with a column `is_counted` that is 1 if the row counts towards the
            expected pairs.
        all_rules: as `build_rules` returns them.
        expected: expected number of pairs per dataset and split. Splits that are not listed may have any number.

    Returns:
        The result of each expectation, and a fault for each count that differs from the expected count.
    """
    os.environ["GX_ANALYTICS_ENABLED"] = "false"
    import great_expectations as gx  # takes seconds to import

    columns = dict.fromkeys(["dataset", "own_split", "is_counted", *(rule.column for rule in all_rules)])
    # great-expectations copies the rows for each condition, and categories are cheaper to copy than strings
    frame = row_facts.select(*columns).with_columns(pl.selectors.string().cast(pl.Categorical)).to_pandas()
    context: Any = gx.get_context(mode="ephemeral")
    context.variables.progress_bars = {"globally": False}
    asset = context.data_sources.add_pandas("records").add_dataframe_asset("records")
    batch = asset.add_batch_definition_whole_dataframe("all").get_batch({"dataframe": frame})
    suite = gx.ExpectationSuite(name="records", expectations=_expectations(all_rules, expected))
    results = []
    miscounts = []
    for outcome in batch.validate(suite, result_format="SUMMARY").results:
        config = outcome.expectation_config
        assert not outcome.exception_info.get("raised_exception"), (config.meta, outcome.exception_info)
        row_count = outcome.result.get("unexpected_count", outcome.result.get("observed_value"))
        result = ExpectationResult(
            dataset=config.meta["dataset"],
            rule=config.meta["rule"],
            expectation=config.type,
            is_met=outcome.success,
            row_count=row_count,
        )
        results.append(result)
        if not result.is_met and result.expectation == "expect_table_row_count_to_equal":
            split = result.rule.removeprefix("pairs of ")
            miscounts.append(unexpected_count_fault(result.dataset, split, row_count, expected=config.kwargs["value"]))
    return results, miscounts


def unexpected_count_fault(dataset: str, split: str, pairs: int, expected: int) -> Fault:
    """Return the fault for a split that does not have the expected number of pairs."""
    return Fault("validate.unexpected_count", dataset=dataset, split=split, value=pairs, expected=expected)


def _expectations(all_rules: list[Rule], expected: ExpectedPairs) -> list[Any]:
    """Return the expectations for all rules and for the expected number of pairs in each split.

    All expectations are in one suite, because great-expectations then computes shared metrics only once. Each rule is
    one expectation for all datasets. With one expectation per dataset, great-expectations would copy the rows for every
    condition and rebuild the expectation's configuration at every access. This took two thirds of the time of
    `validate` on seven datasets. The report's numbers of bad rows per dataset are therefore computed by polars.
    """
    import great_expectations.expectations as gxe
    from great_expectations.expectations.row_conditions import Column

    expectations: list[Any] = [gxe.ExpectTableRowCountToBeBetween(min_value=1, meta={"dataset": "all", "rule": "rows"})]
    for rule in all_rules:
        expectation_class = getattr(gxe, rule.expectation)
        meta = {"rule": rule.name, "dataset": "all"}
        expectations.append(expectation_class(column=rule.column, meta=meta, **rule.arguments))
    for dataset, splits in expected.items():
        for split, pairs in splits.items():
            counted_rows = (Column("dataset") == dataset) & (Column("own_split") == split) & (Column("is_counted") == 1)
            meta = {"dataset": dataset, "rule": f"pairs of {split}"}
            expectations.append(gxe.ExpectTableRowCountToEqual(value=pairs, row_condition=counted_rows, meta=meta))
    return expectations
