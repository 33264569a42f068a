"""README.md and the guides are true: the tree, the commands of make, the figures of results and every link."""

import re
import subprocess
from pathlib import Path

import pytest

from tests.toy import REPOSITORY

ENTRY = re.compile(r"^(?P<indent>[\s│├└─]*)(?P<name>[\w.-]+/?)(?:\s|$)")


def text(name: str) -> str:
    return (REPOSITORY / name).read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def results() -> str:
    return text("docs/results.md")


def tree() -> dict[str, set[str]]:
    """Names at the top of the tree of docs/reading.md (under "") and one level below, folders with a slash."""
    blocks = re.findall(r"```\w*\n(.*?)```", text("docs/reading.md"), re.DOTALL)
    block = next(block for block in blocks if "\ncomponents/" in block)
    found: dict[str, set[str]] = {"": set()}
    folder = ""
    for line in block.splitlines():
        entry = ENTRY.match(line)
        if entry is None:
            continue
        if not entry["indent"]:
            folder = entry["name"]
            found[""].add(folder)
        else:
            found.setdefault(folder, set()).add(entry["name"])
    return found


def on_disk(folder: str) -> set[str]:
    """Names that git tracks (or would) directly in a folder, without hidden ones and package markers."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", folder or "."]
    listed = subprocess.check_output(command, cwd=REPOSITORY, text=True).splitlines()
    names = set()
    for path in listed:
        head, slash, _ = path.removeprefix(folder).partition("/")
        if (REPOSITORY / path).exists() and not head.startswith((".", "__init__")):
            names.add(head + slash)
    return names


def test_the_tree_is_what_is_there():
    found = tree()
    assert found[""] == on_disk("")
    assert found["components/"] == on_disk("components/")
    named = [folder + name for folder, names in found.items() for name in names]
    assert [path for path in named if not (REPOSITORY / path).exists()] == []


def test_every_make_target_that_readme_and_the_commands_name_is_there_and_readme_is_short():
    targets = set(re.findall(r"^([a-z-]+):", text("Makefile"), re.MULTILINE))
    readme = text("README.md")
    assert set(re.findall(r"`make ([a-z-]+)", readme + text("docs/commands.md"))) <= targets
    assert set(re.findall(r"^make ([a-z-]+)", readme, re.MULTILINE)) <= targets
    assert len(readme.split()) <= 1500


def test_the_table_of_readme_is_that_of_the_results(results):
    rows = [line for line in text("README.md").splitlines() if re.match(r"\| (CIDEr|all correct|control)", line)]
    assert len(rows) == 3
    assert [row for row in rows if row not in results.splitlines()] == []


LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


def prose(file: Path) -> str:
    return re.sub(r"^```.*?^```$", "", file.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def anchors(file: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", prose(file), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_link_of_a_markdown_file_leads_to_a_file_and_a_heading():
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    broken, seen = [], 0
    for name in listed.stdout.split():
        file = REPOSITORY / name
        for link in LINK.findall(prose(file)):
            if re.match(r"[a-z]+:", link):
                continue
            path, _, heading = link.partition("#")
            target, seen = (file.parent / path).resolve() if path else file, seen + 1
            if not target.exists() or (heading and heading not in anchors(target)):
                broken.append((name, link))
    assert broken == []
    assert seen > 40
