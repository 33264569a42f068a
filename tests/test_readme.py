"""README.md and the guides are true: the tree, the commands of make, the figures of results and every link."""

import json
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


SCORES = ("CIDEr", "change_exact_accuracy", "no_change_recall")


def test_the_table_of_the_ablation_is_what_the_ablation_found(results):
    found = json.loads((REPOSITORY / "benchmarks/results/ablation.json").read_text())
    assert found["left_out"] == {}
    parts = [found["protocols"][protocol] for protocol in ("minichange/total", "minichange_free/total")]
    for rows in zip(*parts, strict=True):
        cells = [
            f"{100 * row['scores'][score]['mean']:.0f} ± {100 * row['scores'][score]['sd']:.0f}"
            for row in rows
            for score in SCORES
        ]
        assert f"\n| {rows[0]['row']} | {' | '.join(cells)} |\n" in results


def test_the_table_of_fresh_scenes_has_what_was_found(results):
    found = json.loads((REPOSITORY / "benchmarks/results/targets.json").read_text())["targets"]
    means = {(row["protocol"], row["score"]): row["mean"] for row in found}
    grid, free = "fresh_grid/total", "fresh_free/total"
    single = ("change_type_accuracy", "change_exact_accuracy", "by_type/*/exact_accuracy")
    type_, exact, worst = (f"{100 * means[grid, score]:.0f} %" for score in single)
    assert f"| {type_} / {exact} / {worst} (colour, camera) |" in results
    f1, reversal = means[grid, "multi_change_exact_f1"], means[grid, "reversal"]
    assert f"| {100 * f1:.0f} / {100 * reversal:.0f} % |" in results
    right, wrong = means[free, "no_change_recall"], means[free, "false_no_change"]
    assert f"| {100 * right:.0f} % / {100 * wrong:.1f} % |" in results
    assert f"| free: type of a single change | {100 * means[free, 'change_type_accuracy']:.0f} % |" in results
    assert f"of the whole | {100 * means[free, 'CIDEr_shuffled/CIDEr']:.0f} % |" in results


def test_the_table_of_the_models_has_what_the_comparison_found(results):
    found = json.loads((REPOSITORY / "benchmarks/results/compare.json").read_text())
    lines = results.partition("## Model families")[2].partition("\n## ")[0].splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("|")][2:]
    assert len(rows) == len(found["scores"])
    grid, free = "minichange/total", "minichange_free/total"
    measured = iter(found["measured"].values())
    for cells, scores in zip(in_order_of(rows, found), found["scores"].values(), strict=True):
        assert cells[1] == interval(scores[grid]["CIDEr"])
        assert cells[6] == interval(scores[free]["CIDEr"])
        if cells[7]:  # a row for equal seconds was not measured again
            one = next(measured)
            assert cells[5] == f"{100 * one['no_change_auc'][grid]:.1f}"
            assert cells[7] == f"{one['parameters'] / 1e6:.2f} M"
            assert cells[8] == f"{one['captions_per_s']:.0f}"
    assert next(measured, None) is None
    assert {row["row"]: row["scores"] for row in found["protocols"][grid]}.keys() == found["scores"].keys()
    for cells, row in zip(in_order_of(rows, found), found["protocols"][grid], strict=True):
        shown = [f"{100 * row['scores'][name]['mean']:.0f}" for name in ("change_type_accuracy", *SCORES[1:])]
        assert cells[2:5] == shown, row["row"]


def in_order_of(rows: list[list[str]], found: dict) -> list[list[str]]:
    """The table's rows as compare.json has them: those for equal seconds last."""
    again = [cells for cells in rows if cells[0].startswith("the same")]
    return [cells for cells in rows if cells not in again] + again


def interval(score: dict[str, float]) -> str:
    return f"{100 * score['score']:.0f} ({100 * score['low']:.0f} to {100 * score['high']:.0f})"


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
