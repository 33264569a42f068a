"""`make docs`: every Markdown file is a page, and every link of a page leads to something that is there."""

import os
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from infra import pages
from tests.toy import REPOSITORY


class Links(HTMLParser):
    """Where a page leads, what it loads, and which anchors it has."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.leads: list[str] = []
        self.loads: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.leads += [found["href"]] if tag == "a" else []
        self.loads += [found[name] for name in ("src", "href") if name in found and tag != "a"]
        self.anchors |= {found["id"]} if "id" in found else set()


@pytest.fixture(scope="module")
def built() -> dict[Path, Links]:
    out = REPOSITORY / "runs" / f"docs-of-a-test-{os.getpid()}"  # several workers may build at once
    try:
        first = pages.build(out)
        assert first == out / "index.html"
        yield {path: Links(path.read_text("utf-8")) for path in out.iterdir()}
    finally:
        shutil.rmtree(out)


def test_every_markdown_file_is_a_page_and_in_the_menu(built):
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert sorted(pages.PAGES) == sorted(listed.stdout.split())
    files = [pages.file_of(source) for source in pages.PAGES]
    assert {path.name for path in built} == set(files)
    assert len(files) == len(set(files))
    assert all(page.leads[: len(files)] == files for page in built.values())


def test_every_link_leads_to_a_page_a_heading_or_a_file_that_is_there(built):
    broken = []
    for path, page in built.items():
        for link in page.leads:
            target, _, place = link.partition("#")
            if not link.startswith("https:"):
                file = (path.parent / target).resolve() if target else path
                anchors = built[file].anchors if place and file in built else {place}
                broken += [(path.name, link)] if not file.exists() or place not in anchors else []
    assert broken == []


def test_a_page_loads_nothing_from_elsewhere(built):
    loaded = [one for page in built.values() for one in page.loads]
    assert [one for one in loaded if re.match(r"[a-z]+:|//", one)] == []


def test_a_link_between_two_files_is_one_between_their_pages(tmp_path, monkeypatch):
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text("# A b, c!\n[more](docs/more.md#two-words) [code](run.py) [out](https://a.b)\n")
    (tmp_path / "docs/more.md").write_text(
        "## Two words\n[back](../README.md#a-b-c) ![plot](plot.svg)\n<script>x</script>\n"
    )
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    monkeypatch.setattr(pages, "PAGES", {"README.md": "m3diff", "docs/more.md": "More & more"})
    pages.build(tmp_path / "runs/docs")
    index, more = (Links((tmp_path / "runs/docs" / name).read_text()) for name in ("index.html", "docs-more.html"))
    menu = ["index.html", "docs-more.html"]
    assert index.leads == [*menu, "docs-more.html#two-words", "../../run.py", "https://a.b"]
    assert more.leads == [*menu, "index.html#a-b-c"]
    assert more.loads == ["../../docs/plot.svg"]
    assert (index.anchors, more.anchors) == ({"a-b-c"}, {"two-words"})
    text = (tmp_path / "runs/docs/docs-more.html").read_text()
    assert "<title>More &amp; more · m3diff</title>" in text
    assert "<script>" not in text
    assert text.count('aria-current="page"') == 1
