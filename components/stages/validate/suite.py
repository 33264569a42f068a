"""The great-expectations side: one suite, one validation, SUMMARY results, and the Data Docs pages made private.

Bad rows are found by polars; here the same rules are judged by an independent engine and shown to people. A COMPLETE
result would cost seconds on a tenth of bad rows, and an empty table would pass every column rule, hence the row count.
"""

import datetime
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import polars as pl
import polars.selectors as cs

from m3diff.stages.validate.pages import write_pages
from m3diff.stages.validate.rules import Rule

RUN_TIME = datetime.datetime(2000, 1, 1, tzinfo=datetime.UTC)
"""Data Docs show the time of the run; a fixed one, so that equal inputs give equal bytes; `pages.py` removes it."""


ExpectedPairs = Mapping[str, Mapping[Any, int]]
"""Pairs by dataset and split, as the dataset's own files call it."""


def run_suite(
    found: pl.DataFrame, rules: list[Rule], expected: ExpectedPairs, site: Path
) -> tuple[set[str], list[str]]:
    """Validate the facts, with their column `counts` (1 where a row counts as there), and write GX's pages to `site`.

    Returns:
        The names of the rules that some row breaks, and a sentence for each expected count that does not hold.
    """
    os.environ["GX_ANALYTICS_ENABLED"] = "false"
    import great_expectations as gx  # seconds of import
    from great_expectations.core.run_identifier import RunIdentifier

    columns = dict.fromkeys(["dataset", "own_split", "counts", *(rule.column for rule in rules)])
    frame = found.select(*columns).with_columns(cs.string().cast(pl.Categorical)).to_pandas()  # conditions copy rows
    with tempfile.TemporaryDirectory() as folder:
        context: Any = gx.get_context(mode="file", project_root_dir=folder)
        context.variables.progress_bars = {"globally": False}
        data = context.data_sources.add_pandas("records").add_dataframe_asset("records")
        batch = data.add_batch_definition_whole_dataframe("all")
        suite = context.suites.add(
            gx.ExpectationSuite(name="records", expectations=_expectations(found, rules, expected))
        )
        validation = context.validation_definitions.add(
            gx.ValidationDefinition(name="records", data=batch, suite=suite)
        )
        result = validation.run(
            batch_parameters={"dataframe": frame},
            result_format="SUMMARY",
            run_id=RunIdentifier(run_name="records", run_time=RUN_TIME),
        )
        context.build_data_docs()
        write_pages(Path(folder) / "gx/uncommitted/data_docs/local_site", site)
    return _verdicts(result.results)


def _expectations(found: pl.DataFrame, rules: list[Rule], expected: ExpectedPairs) -> list[Any]:
    """One suite per dataset (a condition on its rows), all in one suite, so that GX computes shared metrics once."""
    import great_expectations.expectations as gxe
    from great_expectations.expectations.row_conditions import Column

    datasets = found["dataset"].unique().sort().to_list()
    conditions = {name: Column("dataset") == name for name in datasets} if len(datasets) > 1 else {datasets[0]: None}
    expectations: list[Any] = [gxe.ExpectTableRowCountToBeBetween(min_value=1)]
    for dataset, condition in conditions.items():
        for rule in rules:
            meta = {"rule": rule.name, "dataset": dataset}
            build = getattr(gxe, rule.expectation)
            expectations.append(build(column=rule.column, row_condition=condition, meta=meta, **rule.arguments))
    for dataset, splits in expected.items():
        for split, pairs in splits.items():
            rows = (Column("dataset") == dataset) & (Column("own_split") == split) & (Column("counts") == 1)
            meta = {"dataset": dataset, "split": split}
            expectations.append(gxe.ExpectTableRowCountToEqual(value=pairs, row_condition=rows, meta=meta))
    return expectations


def _verdicts(results: list[Any]) -> tuple[set[str], list[str]]:
    broken, counts = set(), []
    for result in results:
        meta, config = result.expectation_config.meta or {}, result.expectation_config.kwargs
        assert not result.exception_info.get("raised_exception"), (meta, result.exception_info)
        if result.success:
            continue
        if "split" in meta:
            found = result.result["observed_value"]
            counts.append(f"{meta['dataset']} {meta['split']}: {found} pairs, but {config['value']} are expected")
        else:
            broken.add(meta["rule"])
    return broken, counts
