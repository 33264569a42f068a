"""The repository's Markdown as pages that link each other: `make docs` -> runs/docs/index.html.

Nothing is fetched and nothing is run; links to what is no page lead to the file in this checkout.
"""

import argparse
import html
import os
import re
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    "README.md": "m3diff",
    "docs/your-data.md": "Your data in six steps",
    "docs/made-data.md": "Made data",
    "docs/serving.md": "Captions over HTTP",
    "docs/sharing.md": "Share a model",
    "docs/extending.md": "Extend",
    "docs/storage.md": "Storage",
    "docs/deviations.md": "What the paper leaves open",
    "infra/README.md": "For a team",
    "infra/data.md": "Data on other machines",
    "CONTRIBUTING.md": "Contribute",
    "SECURITY.md": "Security",
    "CHANGELOG.md": "Changes",
    "LOG.md": "Log of experiments",
    "benchmarks/results/ablation.md": "Ablation, all scores",
    "benchmarks/results/compare.md": "The models compared",
    "benchmarks/results/ablation-onediff.md": "Ablation of OneDiff, all scores",
    "benchmarks/results/ablation-diffcap.md": "Ablation of DiffCap, all scores",
    "benchmarks/results/ablation-syned.md": "Ablation of Syned, all scores",
}
"""Every Markdown file, in the order of the menu, with its name there."""

STYLE = """\
body { margin: 0; font: 16px/1.6 system-ui, sans-serif; color: #1c2430; display: flex; }
nav { flex: 0 0 15rem; padding: 2rem 1.5rem; position: sticky; top: 0; height: 100vh; box-sizing: border-box;
  overflow: auto; border-right: 1px solid #e3e6eb; }
nav a { display: block; break-inside: avoid; padding: .2rem 0; color: #38465a; text-decoration: none; }
nav a[aria-current] { color: #0b5fc1; font-weight: 600; }
main { flex: 1; min-width: 0; max-width: 62rem; padding: 1rem 2.5rem 4rem; }
a { color: #0b5fc1; }
code, pre { font: .875em/1.5 ui-monospace, monospace; background: #f4f6f8; border-radius: 4px; }
code { padding: .1em .3em; overflow-wrap: anywhere; }
th code { white-space: nowrap; }
pre { padding: .8rem 1rem; overflow-x: auto; }
pre code { padding: 0; background: none; overflow-wrap: normal; }
.table { overflow-x: auto; }
table { border-collapse: collapse; }
th, td { text-align: left; vertical-align: top; padding: .35rem .8rem .35rem 0; border-bottom: 1px solid #e3e6eb; }
img { max-width: 100%; }
@media (max-width: 50rem) {
  body { display: block; }
  nav { position: static; height: auto; border: 0; padding: 1rem 1rem 0; columns: 2; }
  main { padding: 0 1rem 3rem; }
}
"""

PAGE = """\
<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
{style}</style>
<nav>
{menu}
</nav>
<main>
{body}</main>
"""


def build(out: Path) -> Path:
    """Write a page for each Markdown file of the repository.

    Args:
        out: a folder inside the checkout.
    Returns: the first page.
    """
    out.mkdir(parents=True, exist_ok=True)
    for source, name in PAGES.items():
        title = name if name == "m3diff" else f"{name} · m3diff"
        menu = "\n".join(entry(other, source) for other in PAGES)
        text = PAGE.format(title=html.escape(title), style=STYLE, menu=menu, body=body(source, out))
        (out / file_of(source)).write_text(text, encoding="utf-8")
    return out / file_of("README.md")


def file_of(source: str) -> str:
    """`docs/serving.md` -> `docs-serving.html`; the README is the index."""
    return "index.html" if source == "README.md" else source.removesuffix(".md").replace("/", "-") + ".html"


def entry(source: str, shown: str) -> str:
    here = ' aria-current="page"' if source == shown else ""
    return f'<a href="{file_of(source)}"{here}>{html.escape(PAGES[source])}</a>'


def body(source: str, out: Path) -> str:
    reader = MarkdownIt("commonmark", {"html": False}).enable("table")
    tokens = reader.parse((ROOT / source).read_text(encoding="utf-8"))
    for token, follower in zip(tokens, tokens[1:], strict=False):
        if token.type == "heading_open":
            token.attrSet("id", anchor(follower.content))
        for child in follower.children or []:
            redirect(child, source, out)
    text = reader.renderer.render(tokens, reader.options, {})
    return text.replace("<table>", '<div class="table"><table>').replace("</table>", "</table></div>")


def anchor(heading: str) -> str:
    """As code hosts name it: `Your data, your GPUs` -> `your-data-your-gpus`."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def redirect(token: Token, source: str, out: Path) -> None:
    """Where a link or an image of a Markdown file leads from its page."""
    for name in ("href", "src"):
        target = token.attrGet(name)
        if target is None or re.match(r"[a-z]+:|#", str(target)):
            continue
        path, mark, place = str(target).partition("#")
        file = os.path.relpath((ROOT / source).parent / path, ROOT)
        to = file_of(file) if file in PAGES else os.path.relpath(ROOT / file, out.resolve())
        token.attrSet(name, to + mark + place)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "docs")
    print(f"written: {build(parser.parse_args().out)}")
