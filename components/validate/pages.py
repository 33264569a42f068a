"""great-expectations' Data Docs made private, self-contained and equal from run to run.

As built, the pages load nine content networks, carry a tracking image with the context's id, advertise, and show clock
times and random ids. Here they keep their text and tables, under one small style sheet of our own and no script.
"""

import re
from pathlib import Path

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
    r'<div class="card mb-3">\s*<div class="card-header p-2">\s*<strong>Actions</strong>.*?(</div>\s*){4}',
)
UNSTABLE = (
    (r"\d{8}T\d{6}\.\d{6}Z", "run"),
    (r"-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", ""),
)
INDEX = """<h1>Records</h1>
<p>great-expectations checked the facts of every record (one row per pair). Rows that break a rule are in
<code>quarantine.parquet</code> with their reasons. The run time on the pages is fixed, so that equal data give equal
pages.</p><ul><li><a href="results.html">Results</a>: what was found</li>
<li><a href="suite.html">Suite</a>: what is expected</li></ul>
"""


def write_pages(built: Path, site: Path) -> None:
    """From GX's site in `built`, write `index.html`, `results.html` and `suite.html` to `site`."""
    (results,) = (built / "validations").rglob("*.html")
    (suite,) = (built / "expectations").rglob("*.html")
    site.mkdir(parents=True)
    pages = {"index": INDEX, "results": _body(results), "suite": _body(suite)}
    for name, body in pages.items():
        page = f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>Records: {name}</title>'
        (site / f"{name}.html").write_text(
            f"{page}<style>{STYLE}</style></head>\n<body>{body}</body></html>\n", "utf-8"
        )


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
