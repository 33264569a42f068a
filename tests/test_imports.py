"""Who may import whom. The rules have no list of exceptions."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.toy import REPOSITORY

COMPONENTS = REPOSITORY / "components"
SHARED = {"records", "params", "progress", "tracking", "model"}
STAGES = sorted(file.parent.name for file in COMPONENTS.glob("*/stage.py"))
MODEL_KNOWS = {"torch", "transformers", "peft", "numpy", "PIL", "safetensors", "tokenizers"}


def imports(file: Path) -> Iterator[str]:
    """Every module that a file imports, wherever in the file, with its full name."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: a relative import hides who imports whom"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imported(folder: Path) -> set[tuple[str, str]]:
    """(file, module) for every Python file under a folder."""
    files = [folder] if folder.is_file() else folder.rglob("*.py")
    return {(str(file.relative_to(REPOSITORY)), module) for file in files for module in imports(file)}


def breaking(folder: Path, forbidden) -> list[str]:
    return sorted(f"{file} imports {module}" for file, module in imported(folder) if forbidden(module.split(".")))


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_imports_itself_and_what_is_shared(stage):
    def foreign(module: list[str]) -> bool:
        return module[0] == "components" and module[1] not in SHARED | {stage}

    assert breaking(COMPONENTS / stage, foreign) == []


@pytest.mark.parametrize("module", sorted(SHARED))
def test_what_is_shared_imports_no_stage(module):
    place = COMPONENTS / module if (COMPONENTS / module).is_dir() else COMPONENTS / f"{module}.py"
    assert breaking(place, lambda name: name[0] == "components" and name[1] in STAGES) == []


def test_components_know_nothing_of_flows_and_of_what_starts_them():
    outside = {"flows", "infra", "tests", "benchmarks", "prefect", "dvc"}
    assert breaking(COMPONENTS, lambda name: name[0] in outside) == []


def test_the_model_knows_its_libraries_and_itself_alone():
    def foreign(module: list[str]) -> bool:
        if module[0] == "components":
            return module[1] != "model"
        return module[0] not in MODEL_KNOWS and module[0] not in sys.stdlib_module_names

    assert breaking(COMPONENTS / "model", foreign) == []


@pytest.mark.parametrize("stage", [stage for stage in STAGES if stage != "register"])
def test_stages_that_dvc_runs_know_nothing_of_mlflow(stage):
    assert (
        breaking(COMPONENTS / stage, lambda name: name[0] == "mlflow" or name[:2] == ["components", "tracking"]) == []
    )


def test_flows_hold_no_science():
    science = {"torch", "transformers", "peft", "ray", "deepspeed", "great_expectations", "polars", "pandas", "numpy"}
    assert breaking(REPOSITORY / "flows", lambda name: name[0] in science) == []
