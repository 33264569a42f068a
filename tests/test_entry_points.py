"""Test that a stage has the same name in params.yaml, dvc.yaml, the command line, its folder and the flow."""

import ast
import subprocess
import sys
from pathlib import Path

import yaml

from m3diff.__main__ import COMMANDS
from m3diff.settings.tree import Params
from tests.toy import REPOSITORY

GRAPH = yaml.safe_load((REPOSITORY / "dvc.yaml").read_text())["stages"]
STAGES = [stage for stage in GRAPH if stage != "code"]  # which has no section, and knows those of all
LOOPS = {"synthesize": "synthesize.${key}", "augment": "augment.${key}", "ingest": "ingest.datasets.${key}"}
"""Stages that run once for each dataset (`ingest@minichange`), with the parameters of one run."""

ACTIONS = ["register", "promote"]  # act outside the repository: no stages of DVC
LONGEST_FUNCTION = 60


def functions(file: Path) -> dict[str, ast.FunctionDef]:
    return {node.name: node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef)}


def test_the_sections_of_params_yaml_follow_the_order_of_the_stages():
    sections = list(yaml.safe_load((REPOSITORY / "params.yaml").read_text()))
    assert sections == ["paths", "models", *STAGES, *ACTIONS, "serve", "compute"]
    assert [field.alias or name for name, field in Params.model_fields.items()] == sections


def test_each_stage_of_dvc_calls_its_command_and_watches_its_section_and_code():
    loops = {"synthesize": "${synthesize}", "augment": "${augment}", "ingest": "${ingest.datasets}"}
    assert {stage: entry["foreach"] for stage, entry in GRAPH.items() if "foreach" in entry} == loops
    for stage in STAGES:
        run = GRAPH[stage].get("do", GRAPH[stage])
        assert run["cmd"] == f"${{py}} {stage}" + (" ${key}" if stage in LOOPS else "")
        assert LOOPS.get(stage, stage) in run["params"]
        assert f"code/{stage}" + ("@${key}" if stage in LOOPS else "") + ".json" in run["deps"]
        assert not {key.partition(".")[0] for key in run["params"]} & {"compute", "paths", "serve", *ACTIONS}


def test_the_command_of_a_stage_calls_the_function_of_its_name_in_its_folder():
    assert [name for name in COMMANDS if name in [*STAGES, *ACTIONS]] == [*STAGES, *ACTIONS]
    folders = {folder.name for folder in (REPOSITORY / "components" / "stages").iterdir() if folder.is_dir()}
    assert folders - {"__pycache__"} == {*STAGES, "register"}
    for stage in [*STAGES, "register"]:
        assert stage in functions(REPOSITORY / "components" / "stages" / stage / "stage.py")
        command = (REPOSITORY / "components" / "command_line" / f"{stage}.py").read_text()
        assert f"from m3diff.stages.{stage}.stage import {stage}\n" in command


def test_help_loads_no_heavy_library():
    code = (
        "import atexit, sys; from m3diff.__main__ import main;"
        "atexit.register(lambda: print(*{name.partition('.')[0] for name in sys.modules})); main()"
    )
    done = subprocess.run([sys.executable, "-c", code, "--help"], capture_output=True, text=True, check=True)
    heavy = {"torch", "transformers", "ray", "mlflow", "pandas", "polars", "great_expectations", "prefect", "dvc"}
    heavy |= {"matplotlib", "ruamel", "pycocoevalcap", "PIL"}
    assert heavy.isdisjoint(done.stdout.split())


def test_no_function_is_longer_than_sixty_lines():
    long = [
        f"{file.relative_to(REPOSITORY)}:{node.lineno} {node.name}"
        for folder in ("components", "flows", "infra", "benchmarks")
        for file in (REPOSITORY / folder).rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno - node.lineno >= LONGEST_FUNCTION
    ]
    assert long == []
