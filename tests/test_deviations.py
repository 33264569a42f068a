"""Test docs/deviations.md: the parameters have the named values, the files exist, and the counts equal the plan's."""

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from m3diff.commands.plan.published import published_workload
from m3diff.models.settings import MDPConfig, VDMConfig
from m3diff.settings.load import complete_values, list_differences, load_params
from m3diff.settings.tree import Params
from tests.toy import REPOSITORY

PAGE = REPOSITORY / "docs" / "deviations.md"
PROFILES = {"The profile paper": "paper", "By the letter": "paper-letter", "The embedded run": "embedded"}
PROFILES |= {"OneDiff": "onediff", "BLIP2IDC": "blip2idc"}
SECTIONS = ("paths", "models", "pretrain", "ingest", "validate", "convert", "train", "predict", "evaluate", "compute")


def section(title: str) -> str:
    return PAGE.read_text(encoding="utf-8").split(f"\n## {title}\n")[1].split("\n## ")[0]


def profile(name: str) -> Path:
    return REPOSITORY / "profiles" / f"{name}.yaml"


def parameters_in(title: str) -> list[tuple[str, Any]]:
    """Return each parameter that a section of the page names, with its value."""
    codes = re.findall(rf"`((?:{'|'.join(SECTIONS)})\.[\w.]+): ([^`]+)`", section(title))
    return [(path, yaml.safe_load(value)) for path, value in codes]


def value_of(params: Params, path: str) -> Any:
    value: Any = params
    for key in path.split("."):
        value = value[key] if isinstance(value, dict) or hasattr(value, "keys") else getattr(value, key)
    if isinstance(value, Path):
        return str(value.relative_to(REPOSITORY) if value.is_absolute() else value)
    if isinstance(value, tuple):
        return list(value)
    return dict(value) if hasattr(value, "keys") else value


@pytest.mark.parametrize("title", PROFILES)
def test_every_parameter_that_the_page_names_has_its_value_in_the_profile(title: str) -> None:
    params = load_params(profile(PROFILES[title]))
    expected = parameters_in(title)
    assert [(path, value_of(params, path.replace("validate.", "validate_."))) for path, _ in expected] == expected
    assert len(expected) >= 2


@pytest.mark.parametrize(
    ("title", "model", "module"), [("The profile paper", "m3diff", MDPConfig), ("OneDiff", "onediff", VDMConfig)]
)
def test_every_field_of_the_module_is_in_the_table(title: str, model: str, module: type) -> None:
    names = {path.removeprefix(f"models.{model}.module.") for path, _ in parameters_in(title)}
    assert [field.name for field in fields(module) if field.name not in names] == []


def test_every_training_parameter_is_in_the_table() -> None:
    names = {path.split(".")[1] for path, _ in parameters_in("The profile paper") if path.startswith("train.")}
    assert set(complete_values(profile("paper"))["train"]) - names == {"model"}


def test_the_page_names_every_parameter_that_the_letter_changes() -> None:
    changes = list_differences(complete_values(profile("paper")), complete_values(profile("paper-letter")))
    changed_parameters = {line.split(":")[0] for line in changes}
    assert changed_parameters == {path for path, _ in parameters_in("By the letter")}


def test_all_seven_sources_train_on_the_splits_that_the_page_names() -> None:
    ((_, splits),) = [(path, value) for path, value in parameters_in("The profile paper") if path.endswith("train_on")]
    written = yaml.safe_load(profile("paper").read_text())["ingest"]["datasets"]
    assert [entry.get("train_on") for entry in written.values()] == [splits] * 7, "written out for each of them"


def test_the_table_of_pairs_and_samples_is_what_the_plan_counts() -> None:
    params = load_params(profile("paper"))
    workload = published_workload(params.ingest.datasets, params.convert)
    expected = []
    for share in workload.shares:
        samples = f"{share.references:,}{'' if share.is_counted else ' (estimated)'}"
        expected.append([share.dataset, share.split, f"{share.published_pairs:,}", f"{share.pairs:,}", samples])
    expected.append(["sum", "", "145,377", f"{workload.pairs:,}", f"{workload.references:,}"])
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in section("Pairs and samples").splitlines()]
    assert [row for row in rows if len(row) == 5][2:] == expected


def samples_of_onediff(stage: str) -> list[list[str]]:
    """Return the rows of a stage in the page's table of OneDiff's samples, computed from the published counts."""
    params = load_params(profile("onediff"))
    align = params.models["onediff"].align
    assert align is not None
    names = [name for name in params.ingest.datasets if (name in align.datasets) == (stage == "I")]
    entries = {name: params.ingest.datasets[name] for name in names}
    workload = published_workload(entries, params.convert)
    rows = []
    for dataset in names:
        for share in workload.shares:
            if share.dataset == dataset:
                kind = "couples" if share.are_couples else {0: "texts", 1: "images", 2: "pairs"}[share.images]
                published = f"{share.published_pairs:,}" if share.published_pairs else ""
                rows.append([stage, dataset, published, f"{share.pairs:,} {kind}", f"{share.references:,}"])
    published_rows = sum(share.published_pairs for share in workload.shares)
    return [*rows, [stage, "sum", f"{published_rows:,}", f"{workload.pairs:,}", f"{workload.references:,}"]]


def test_the_table_of_onediff_s_samples_is_what_the_plan_counts() -> None:
    lines = section("OneDiff's samples and hours").splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    assert [row for row in rows if len(row) == 5][2:] == [*samples_of_onediff("I"), *samples_of_onediff("II")]


def test_every_file_that_the_page_names_exists() -> None:
    text = PAGE.read_text(encoding="utf-8")
    files = set(re.findall(r"`((?:components|profiles|tests|docs)/[\w./-]+)`", text))
    assert [name for name in sorted(files) if not (REPOSITORY / name).is_file()] == []
    assert len(files) > 10
    assert "docs/deviations.md" in profile("paper").read_text()
