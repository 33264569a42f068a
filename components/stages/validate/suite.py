"""great-expectations: one suite, one validation with SUMMARY results, and its Data Docs pages made private.

Bad rows are found by polars; here the same rules are judged by an independent engine and shown to people. A COMPLETE
result would cost seconds on a tenth of bad rows, and an empty table would pass every column rule, hence the row count.

As built, the pages load nine content networks, carry a tracking image with the context's id, advertise, and show clock
times and random ids. Here they keep their text and tables, under one small style sheet and no script, and are equal
from run to run. With them go a page of the counts by dataset, and one of the rows in quarantine by broken rule.
"""

import datetime
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path
from typing import Any

import polars as pl
import polars.selectors as cs
from pydantic import BaseModel

from m3diff.records.files import StageReport
from m3diff.stages.validate.rules import Rule

RUN_TIME = datetime.datetime(2000, 1, 1, tzinfo=datetime.UTC)
"""Data Docs show the time of the run; a fixed one, so that equal inputs give equal bytes; `_body` removes it."""


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
        built = Path(folder) / "gx/uncommitted/data_docs/local_site"
        for name, part in (("results", "validations"), ("suite", "expectations")):
            (page,) = (built / part).rglob("*.html")
            _write(site, name, _body(page))
    return _verdicts(result.results)


def _expectations(found: pl.DataFrame, rules: list[Rule], expected: ExpectedPairs) -> list[Any]:
    """The rules of each dataset (a condition on its rows) in one suite, so that GX computes shared metrics once."""
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


STYLE = """
body{font:15px/1.45 system-ui,sans-serif;color:#1d2430;background:#fff;margin:0 auto;max-width:1100px;padding:1.2rem}
h1,h2,h3,h4,h5{line-height:1.2;margin:1.2em 0 .4em}a{color:#0b5cad}nav ol{display:flex;gap:.6rem}
nav ol{list-style:none;padding:0}table{border-collapse:collapse;width:100%;margin:.4rem 0 1rem}
td,th{border-bottom:1px solid #dfe4ea;padding:.35rem .6rem;text-align:left;vertical-align:top}
.badge,.alert{border-radius:4px;padding:.1rem .4rem;background:#eef1f5}
.text-success,.alert-success{color:#12703a}.text-danger,.alert-danger{color:#b3261e}.ge-section{margin-bottom:1.5rem}
.fa-check-circle:before{content:"\\2714"}.fa-times:before{content:"\\2718"}.fa-exclamation-triangle:before{content:"!"}
ul{padding-left:1.1rem}.list-unstyled,.ge-navigation-sidebar-content{list-style:none;padding:0}
.ge-navigation-sidebar-content{display:flex;flex-wrap:wrap;gap:.3rem 1rem}
"""

REMOVED = (
    r"<script\b.*?</script>",
    r"<style\b.*?</style>",
    r"<link\b[^>]*>",
    r"<img\b[^>]*>",
    r"<footer\b.*?</footer>",
    r"<!--.*?-->",
    r"<button\b.*?</button>",
    r'<a data-toggle="collapse".*?</a>',
    r'<div id="[^"]*-header"\s*>\s*<div>\s*<h6[^>]*>\s*Batch (?:Markers|Parameters|Spec)\s*</h6>.*?</table>',
    r"<tr>\s*<td[^>]*><div[^>]*>Run (?:Name|Time)</div>.*?</tr>",
    r'<div class="card mb-3">\s*<div class="card-header p-2">\s*<strong>Actions</strong>.*?(</div>\s*){4}',
)
UNSTABLE = (
    (r" / records / 2000-01-01T00:00:00Z", ""),
    (r"-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", ""),
)
INDEX = """<h1>Records</h1>
<p>great-expectations checked the facts of every record (a row is a pair). Rows that break a rule are in quarantine,
with their reasons: {quarantine}. These pages bear no time, so that equal data give equal pages: the commit of
<code>dvc.lock</code> says when the stage ran.</p>
<ul><li><a href="results.html">Results</a>: what was found</li>
<li><a href="suite.html">Suite</a>: what is expected</li></ul>
<table><tr><th>dataset</th><th>pairs</th><th>references</th><th>quarantined</th><th>rules broken</th></tr>
{rows}</table>
"""
SHOWN = 200  # rows of the quarantine's page for each rule


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


def write_summary(report: ValidateReport, quarantine: pl.DataFrame, site: Path) -> None:
    """Write `index.html`, and `quarantine.html` with the first rows of each broken rule.

    Args:
        quarantine: as `quarantine.parquet`.
    """
    link = '<a href="quarantine.html">{} in quarantine</a>' if report.quarantined else "none"
    rows = []
    for name, of in report.datasets.items():
        rules = {f'<a href="quarantine.html#{rule}">{rule}</a>': count for rule, count in of.broken_rules.items()}
        counts = (", ".join(f"{key} {n:,}" for key, n in each.items()) for each in (of.pairs, of.references, rules))
        pairs, references, broken = counts
        rows.append(_row(escape(name), pairs, references, f"{of.quarantined:,}", broken))
    _write(site, "index", INDEX.format(quarantine=link.format(f"{report.quarantined:,}"), rows="\n".join(rows)))
    _write(site, "quarantine", "\n".join(_quarantine(quarantine)))


def _quarantine(rows: pl.DataFrame) -> Iterator[str]:
    yield '<nav><a href="index.html">Records</a></nav><h1>Quarantine</h1>'
    yield f"<p>{rows.height:,} rows; <code>quarantine.parquet</code>, beside this folder, has all their columns.</p>"
    for rule in rows["rules"].explode().drop_nulls().unique().sort():
        found = rows.filter(pl.col("rules").list.contains(rule))
        more = f", the first {SHOWN}" if found.height > SHOWN else ""
        yield f'<h2 id="{rule}">{rule}</h2><p>{found.height:,} rows{more}</p>'
        yield "<table>" + _row("id", "dataset", "split", "where it stands", "reason", tag="th")
        for row in found.head(SHOWN).iter_rows(named=True):
            yield _row(*(escape(str(row[name] or "–")) for name in ("id", "dataset", "split", "source", "reason")))
        yield "</table>"


def _row(*cells: str, tag: str = "td") -> str:
    return "<tr>" + "".join(f"<{tag}>{cell}</{tag}>" for cell in cells) + "</tr>"


def _write(site: Path, name: str, body: str) -> None:
    site.mkdir(parents=True, exist_ok=True)
    page = f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>Records: {name}</title>'
    text = f"{page}<style>{STYLE}</style></head>\n<body>{body}</body></html>\n"
    (site / f"{name}.html").write_text(text, "utf-8")


def _body(path: Path) -> str:
    """The page's body without scripts, pictures, addresses outside, clock times and random ids."""
    html = path.read_text("utf-8")
    html = html[html.index("<body>") + len("<body>") : html.rindex("</body>")]
    for pattern in REMOVED:
        html = re.sub(pattern, "", html, flags=re.DOTALL)
    for pattern, stable in UNSTABLE:
        html = re.sub(pattern, stable, html)
    html = re.sub(r'href="(?!#)[^"]*"', 'href="index.html"', html)
    return re.sub(r"\n\s*\n+", "\n", html)
