"""The tree in README.md is the tree on disk, and its commands are the Makefile's."""

import re
import subprocess

import pytest

from tests.toy import REPOSITORY

ENTRY = re.compile(r"^(?P<indent>[\s│├└─]*)(?P<name>[\w.-]+/?)(?:\s|$)")


@pytest.fixture(scope="module")
def readme() -> str:
    return (REPOSITORY / "README.md").read_text(encoding="utf-8")


def tree(readme: str) -> dict[str, set[str]]:
    """Names at the top of the tree (under "") and one level below each folder, folders with a slash.

    The tree is the first code block that has a line starting with `components/`.
    """
    block = next(
        block for block in re.findall(r"```\w*\n(.*?)```", readme, re.DOTALL) if "\ncomponents/" in "\n" + block
    )
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
    """What git tracks (or would) directly in a folder; hidden names and package markers left out."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", folder or "."],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    names = set()
    for path in listed:
        head, slash, _ = path.removeprefix(folder).partition("/")
        if (REPOSITORY / path).exists() and not head.startswith((".", "__init__")):
            names.add(head + slash)
    return names


def test_the_top_of_the_tree_is_what_is_there(readme):
    assert tree(readme)[""] == on_disk("")


def test_the_parts_of_components_are_what_is_there(readme):
    assert tree(readme)["components/"] == on_disk("components/")


def test_every_other_name_in_the_tree_exists(readme):
    named = [folder + name for folder, names in tree(readme).items() for name in names]
    assert [path for path in named if not (REPOSITORY / path).exists()] == []


def test_every_make_target_that_the_readme_names_is_there(readme):
    targets = set(re.findall(r"^([a-z-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"`make ([a-z-]+)", readme)) <= targets
    assert {"run", "test"} <= set(re.findall(r"\bmake ([a-z-]+)", readme))
