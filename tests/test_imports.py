"""Who may import whom. The rules have no list of exceptions."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.toy import REPOSITORY

COMPONENTS = REPOSITORY / "components"
SHARED = {
    "records",
    "section",
    "code",
    "lazy",
    "compute",
    "endpoint",
    "gpus",
    "files",
    "reports",
    "progress",
    "ray_cluster",
    "image_cache",
    "image_check",
    "images",
    "model_source",
    "readable",
    "redact",
    "saliency",
    "runs",
    "tracking",
    "decisions",
    "datasets",
    "models",
}
TOP = {"code_stage", "params", "counts", "consistency", "profiles", "guard", "preflight", "usage", "__main__"}
"""The parameters as a whole and the command line: they know the stages' sections, and no stage knows them."""

COMMANDS = {"plan", "inspect", "export", "compare", "score", "archive", "caption", "serve", "zero_shot"}
"""Folders of commands: no stage imports them."""

JOINS = {"promote"}
"""Folders that join stages: the gate compares a version with the champion, which it lets predict and evaluate score
again where the test set is another. To be one of the stages it would need another stage's code, to be the stages'
common code it would need theirs; so it stands above them, and only what starts commands knows it."""

RUN_BY_DVC = yaml.safe_load((REPOSITORY / "dvc.yaml").read_text())["stages"].keys()
STAGES = sorted(file.parent.name for file in COMPONENTS.glob("*/stage.py"))
MODELS_KNOW = {"torch", "transformers", "peft", "numpy", "PIL", "safetensors", "tokenizers"}


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


def test_stages_are_the_folders_with_a_stage_and_the_other_folders_are_shared_or_commands():
    folders = {folder.name for folder in COMPONENTS.iterdir() if (folder / "__init__.py").is_file()}
    assert folders == {*STAGES, "datasets", "models"} | COMMANDS | JOINS
    assert {file.stem for file in COMPONENTS.glob("*.py")} == (SHARED - folders) | TOP | {"__init__"}


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_imports_itself_what_is_shared_and_of_other_stages_their_parameters_alone(stage):
    """What acts outside the repository (register) takes the parameters as a whole; what DVC runs must not."""
    known = SHARED | {stage} | (set() if stage in RUN_BY_DVC else {"params"})

    def foreign(module: list[str]) -> bool:
        return module[0] == "components" and module[1] not in known and module[2:3] != ["params"]

    assert breaking(COMPONENTS / stage, foreign) == []


@pytest.mark.parametrize("module", sorted(SHARED))
def test_what_is_shared_imports_no_stage_no_command_and_not_the_parameters_as_a_whole(module):
    place = COMPONENTS / module if (COMPONENTS / module).is_dir() else COMPONENTS / f"{module}.py"
    assert breaking(place, lambda name: name[0] == "components" and name[1] not in SHARED) == []


@pytest.mark.parametrize("folder", sorted(COMMANDS))
def test_a_command_knows_no_other_command_and_not_the_parameters_as_a_whole(folder):
    other = (COMMANDS - {folder}) | TOP
    assert breaking(COMPONENTS / folder, lambda name: name[0] == "components" and name[1] in other) == []


@pytest.mark.parametrize("folder", sorted(JOINS))
def test_what_joins_stages_imports_no_command_and_of_the_top_the_parameters_alone(folder):
    other = COMMANDS | (JOINS - {folder}) | (TOP - {"params"})
    assert breaking(COMPONENTS / folder, lambda name: name[0] == "components" and name[1] in other) == []


@pytest.mark.parametrize("folder", sorted(JOINS))
def test_what_joins_stages_is_known_to_the_command_line_and_its_section_to_the_parameters(folder):
    found = {
        (str(file.relative_to(COMPONENTS)), module.split(".")[2])
        for file in COMPONENTS.rglob("*.py")
        for module in imports(file)
        if module.startswith(f"components.{folder}.") and file.parent != COMPONENTS / folder
    }
    commands = {("__main__.py", name) for name in (folder, "rollback", "score_model")}
    looked_at = {("preflight.py", "moves")}  # before a run: is the champion that the record names still there
    assert found == commands | {("params.py", "params")} | looked_at


@pytest.mark.parametrize("stage", [*STAGES, *sorted(JOINS)])
def test_the_parameters_of_a_stage_are_its_section_and_import_nothing_heavy(stage):
    file = COMPONENTS / stage / "params.py"
    if stage == "synthesize":  # each generator has settings of its own, beside its dataset
        assert not file.exists()
        return
    light = (
        "m3diff.records.schemas",
        "m3diff.settings.section",
        "m3diff.endpoint",
        "pydantic",
        "pathlib",
        "typing",
        "collections",
    )
    assert [module for module in imports(file) if not module.startswith(light)] == []


def test_components_know_nothing_of_flows_and_of_what_starts_them():
    outside = {"flows", "infra", "tests", "benchmarks", "prefect", "dvc"}
    assert breaking(COMPONENTS, lambda name: name[0] in outside) == []


def test_models_know_their_libraries_and_themselves_alone():
    def foreign(module: list[str]) -> bool:
        if module[0] == "components":
            return module[1] not in ("models", "lazy")
        return module[0] not in MODELS_KNOW and module[0] not in sys.stdlib_module_names

    assert breaking(COMPONENTS / "models", foreign) == []


@pytest.mark.parametrize("stage", [stage for stage in STAGES if stage != "register"])
def test_stages_that_dvc_runs_know_nothing_of_mlflow(stage):
    ours = (["components", "tracking"], ["components", "runs"])
    assert breaking(COMPONENTS / stage, lambda name: name[0] == "mlflow" or name[:2] in ours) == []


def test_flows_hold_no_science():
    science = {"torch", "transformers", "peft", "ray", "deepspeed", "great_expectations", "polars", "pandas", "numpy"}
    assert breaking(REPOSITORY / "flows", lambda name: name[0] in science) == []
