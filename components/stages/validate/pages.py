"""great-expectations' Data Docs made private, self-contained and equal from run to run.

As built, the pages load nine content networks, carry a tracking image with the context's id, advertise, and show clock
times and random ids. Here they keep their text and tables, under one small style sheet of our own and no script. Beside
them stand a page of what there is by dataset, and one of the rows in quarantine by the rule that they break.
"""

import re
from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path

import polars as pl
from pydantic import BaseModel

from m3diff.records.files import StageReport

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
    (r"\d{8}T\d{6}\.\d{6}Z", "run"),
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
    """One dataset: clean pairs and references by split, rows in quarantine, by rule (a row may break several)."""

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


def write_pages(built: Path, site: Path) -> None:
    """From GX's site in `built`, write `results.html` and `suite.html` to `site`."""
    (results,) = (built / "validations").rglob("*.html")
    (suite,) = (built / "expectations").rglob("*.html")
    _write(site, "results", _body(results))
    _write(site, "suite", _body(suite))


def write_summary(report: ValidateReport, quarantine: pl.DataFrame, site: Path) -> None:
    """Write `index.html`, and `quarantine.html` with the first rows of each broken rule.

    Args:
        quarantine: as `quarantine.parquet`.
    """
    link = '<a href="quarantine.html">{} in quarantine</a>' if report.quarantined else "none"
    rows = "\n".join(
        _row(
            escape(name),
            _by_split(of.pairs),
            _by_split(of.references),
            f"{of.quarantined:,}",
            ", ".join(f'<a href="quarantine.html#{rule}">{rule}</a> {n:,}' for rule, n in of.broken_rules.items()),
        )
        for name, of in report.datasets.items()
    )
    _write(site, "index", INDEX.format(quarantine=link.format(f"{report.quarantined:,}"), rows=rows))
    _write(site, "quarantine", "\n".join(_quarantine(quarantine)))


def _by_split(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{split} {count:,}" for split, count in counts.items())


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
