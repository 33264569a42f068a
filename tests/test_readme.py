"""Test README.md and the guides: the tree of files, the commands of make, the figures of results, and every link."""

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
    """Return the names in the tree of docs/reading.md by folder, "" for the top. Names of folders end with a slash."""
    blocks = re.findall(r"```\w*\n(.*?)```", text("docs/reading.md"), re.DOTALL)
    block = next(block for block in blocks if "\ncomponents/" in block)
    names_by_folder: dict[str, set[str]] = {"": set()}
    folder = ""
    for line in block.splitlines():
        entry = ENTRY.match(line)
        if entry is None:
            continue
        if not entry["indent"]:
            folder = entry["name"]
            names_by_folder[""].add(folder)
        else:
            names_by_folder.setdefault(folder, set()).add(entry["name"])
    return names_by_folder


def on_disk(folder: str) -> set[str]:
    """Return the names in a folder that git tracks or would track, except hidden files and `__init__.py`."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", folder or "."]
    listed = subprocess.check_output(command, cwd=REPOSITORY, text=True).splitlines()
    names = set()
    for path in listed:
        head, slash, _ = path.removeprefix(folder).partition("/")
        if (REPOSITORY / path).exists() and not head.startswith((".", "__init__")):
            names.add(head + slash)
    return names


def test_the_tree_lists_the_files_of_the_repository():
    names_by_folder = tree()
    assert names_by_folder[""] == on_disk("")
    assert names_by_folder["components/"] == on_disk("components/")
    paths = [folder + name for folder, names in names_by_folder.items() for name in names]
    assert [path for path in paths if not (REPOSITORY / path).exists()] == []


def test_every_make_target_that_readme_and_the_commands_name_exists():
    targets = set(re.findall(r"^([a-z-]+):", text("Makefile"), re.MULTILINE))
    readme = text("README.md")
    assert set(re.findall(r"`make ([a-z-]+)", readme + text("docs/commands.md"))) <= targets
    assert set(re.findall(r"^make ([a-z-]+)", readme, re.MULTILINE)) <= targets


def test_readme_is_short():
    assert len(text("README.md").split()) <= 1500


def test_readme_has_rows_of_the_table_of_results(results):
    rows = [line for line in text("README.md").splitlines() if re.match(r"\| (CIDEr|all correct|control)", line)]
    assert len(rows) == 3
    assert [row for row in rows if row not in results.splitlines()] == []


SCORES = ("CIDEr", "change_exact_accuracy", "no_change_recall")


def test_the_table_of_the_ablation_has_the_figures_of_the_ablation(results):
    ablation = json.loads((REPOSITORY / "benchmarks/results/ablation.json").read_text())
    assert ablation["left_out"] == {}
    parts = [ablation["protocols"][protocol] for protocol in ("minichange/total", "minichange_free/total")]
    for rows in zip(*parts, strict=True):
        cells = [
            f"{100 * row['scores'][score]['mean']:.0f} ± {100 * row['scores'][score]['sd']:.0f}"
            for row in rows
            for score in SCORES
        ]
        assert f"\n| {rows[0]['row']} | {' | '.join(cells)} |\n" in results


def test_the_table_of_targets_has_the_figures_of_the_new_scenes(results):
    targets = json.loads((REPOSITORY / "benchmarks/results/targets.json").read_text())["targets"]
    means = {(row["protocol"], row["score"]): row["mean"] for row in targets}
    grid = "fresh_grid/total"
    free = "fresh_free/total"
    single = ("change_type_accuracy", "change_exact_accuracy", "by_type/*/exact_accuracy")
    type_, exact, worst = (f"{100 * means[grid, score]:.0f} %" for score in single)
    assert f"| {type_} / {exact} / {worst} (colour, camera) |" in results
    f1 = means[grid, "multi_change_exact_f1"]
    reversal = means[grid, "reversal"]
    assert f"| {100 * f1:.0f} / {100 * reversal:.0f} % |" in results
    right = means[free, "no_change_recall"]
    wrong = means[free, "false_no_change"]
    assert f"| {100 * right:.0f} % / {100 * wrong:.1f} % |" in results
    assert f"| free: type of a single change | {100 * means[free, 'change_type_accuracy']:.0f} % |" in results
    assert f"of the whole | {100 * means[free, 'CIDEr_shuffled/CIDEr']:.0f} % |" in results


def test_the_table_of_the_models_has_the_figures_of_the_comparison(results):
    comparison = json.loads((REPOSITORY / "benchmarks/results/compare.json").read_text())
    lines = results.partition("## Model families")[2].partition("\n## ")[0].splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("|")][2:]
    assert len(rows) == len(comparison["scores"])
    grid = "minichange/total"
    free = "minichange_free/total"
    measured = iter(comparison["measured"].values())
    for cells, scores in zip(equal_seconds_last(rows), comparison["scores"].values(), strict=True):
        assert cells[1] == interval(scores[grid]["CIDEr"])
        assert cells[6] == interval(scores[free]["CIDEr"])
        if cells[7]:  # a row for equal seconds was not measured again
            cost = next(measured)
            assert cells[5] == f"{100 * cost['no_change_auc'][grid]:.1f}"
            assert cells[7] == f"{cost['parameters'] / 1e6:.2f} M"
            assert cells[8] == f"{cost['captions_per_s']:.0f}"
    assert next(measured, None) is None
    assert {row["row"] for row in comparison["protocols"][grid]} == comparison["scores"].keys()
    for cells, row in zip(equal_seconds_last(rows), comparison["protocols"][grid], strict=True):
        shown = [f"{100 * row['scores'][name]['mean']:.0f}" for name in ("change_type_accuracy", *SCORES[1:])]
        assert cells[2:5] == shown, row["row"]


def equal_seconds_last(rows: list[list[str]]) -> list[list[str]]:
    """Return the rows of the table in the order of compare.json. The rows for equal seconds come last."""
    equal_seconds = [cells for cells in rows if cells[0].startswith("the same")]
    return [cells for cells in rows if cells not in equal_seconds] + equal_seconds


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
    broken = []
    link_count = 0
    for name in listed.stdout.split():
        file = REPOSITORY / name
        for link in LINK.findall(prose(file)):
            if re.match(r"[a-z]+:", link):
                continue
            path, _, heading = link.partition("#")
            target = (file.parent / path).resolve() if path else file
            link_count += 1
            if not target.exists() or (heading and heading not in anchors(target)):
                broken.append((name, link))
    assert broken == []
    assert link_count > 40
