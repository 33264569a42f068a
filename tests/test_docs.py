"""Test docs/extending.md: its code blocks run in the named files, and its examples pass through every stage.

The notebook of docs runs, too.
"""

import ast
import importlib.util
import json
import re
import sys
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any

import nbformat
import polars as pl
import pyarrow as pa
import pytest
import yaml
from jupyter_client import AsyncKernelManager
from nbclient import NotebookClient
from pydantic import TypeAdapter

from m3diff import __main__ as command_line
from m3diff.__main__ import main
from m3diff.command_line.parser import make_parser
from m3diff.datasets import DATASETS
from m3diff.datasets.spec import DatasetSpec
from m3diff.models import FAMILIES
from m3diff.records.schemas import RECORD_SCHEMA
from m3diff.records.tables import write_table
from m3diff.scoring.metrics import METRICS
from m3diff.settings.load import load_params
from m3diff.stages.ingest.params import DatasetEntry
from tests.errors import Message
from tests.layouts import list_images, write_record_table
from tests.tiny import noise_image, tiny_base, tiny_checkpoint
from tests.toy import REPOSITORY

BLOCK = re.compile(r"```(?:python|yaml)\n# (?P<file>[^\s,]+)[^\n]*\n(?P<code>.*?)```", re.DOTALL)


@pytest.fixture(scope="module")
def page() -> str:
    return (REPOSITORY / "docs" / "extending.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def blocks(page) -> list[tuple[str, str]]:
    """Return each code block as a tuple of the file in its first line and the code."""
    files = [(match["file"], match["code"]) for match in BLOCK.finditer(page)]
    assert len(files) == page.count("```") // 2, "every block names its file in its first line"
    return files


@pytest.fixture
def code(blocks, tmp_path, monkeypatch):
    """Return a function that loads the module of a block until the end of the test."""

    def load(file: str) -> ModuleType:
        path = tmp_path / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(block_of(blocks, file))
        name = file.removesuffix(".py").replace("components/", "m3diff/").replace("/", ".")
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        return module

    return load


def block_of(blocks: list[tuple[str, str]], file: str) -> str:
    """Return the first code block for a file."""
    return next(text for name, text in blocks if name == file)


def line(blocks: list[tuple[str, str]], file: str) -> dict[str, str]:
    """Return the single line that is added to a dictionary in a file."""
    text = block_of(blocks, file)
    assert len(text.splitlines()) == 1
    return ast.literal_eval(f"{{{text}}}")


def section(blocks: list[tuple[str, str]], key: str) -> dict[str, Any]:
    """Return the block for params.yaml that has a key."""
    sections = [yaml.safe_load(text) for file, text in blocks if file == "params.yaml"]
    return next(entry for entry in sections if key in entry)


@pytest.fixture
def kitchen(code, blocks, monkeypatch) -> DatasetSpec:
    code("components/datasets/kitchen.py")
    ((name, module),) = line(blocks, "components/datasets/__init__.py").items()
    monkeypatch.setitem(DATASETS.data, name, module)
    return DATASETS[name]


@pytest.fixture
def entry(kitchen, blocks, tmp_path) -> DatasetEntry:
    from PIL import Image

    root = tmp_path / "kitchen"
    root.mkdir()
    splits = ("train", "train", "val", "test", "test")
    lines: list[dict[str, Any]] = [
        {"id": 4 + n, "split": split, "images": [f"{n}a.png", f"{n}b.png"]} for n, split in enumerate(splits)
    ]
    for n, pair in enumerate(lines):
        pair["captions"] = ["the cup is gone", "it left"][: 2 - n % 2]
    for n in range(len(splits)):
        for side, red in (("a", 10), ("b", 200)):
            Image.new("RGB", (8, 8), (red, n, 0)).save(root / f"{n}{side}.png")
    (root / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in [*lines, {"id": "nine"}]))
    return DatasetEntry.model_validate(section(blocks, "kitchen")["kitchen"] | {"root": root})


def test_the_stage_of_the_page_counts_words(code, blocks, tmp_path):
    cfg = code("components/stages/vocabulary/params.py").Vocabulary(**section(blocks, "vocabulary")["vocabulary"])
    references = [["The cup is gone", "the cup left"], ["it IS gone"]]
    columns = {name: references if name == "references" else [None, None] for name in RECORD_SCHEMA.names}
    write_table(pa.table(columns, schema=RECORD_SCHEMA), tmp_path / "records")
    code("components/stages/vocabulary/stage.py").vocabulary(cfg, tmp_path, tmp_path)
    assert (tmp_path / "words.csv").read_text().split() == ["word,count", "cup,2", "gone,2", "is,2", "the,2"]


@pytest.fixture
def settings(code, blocks, monkeypatch) -> Any:
    code("components/models/adapted_vision.py")
    ((name, module),) = line(blocks, "components/models/__init__.py").items()
    monkeypatch.setitem(FAMILIES.data, name, module)
    return TypeAdapter(FAMILIES[name].settings).validate_python(section(blocks, "small_gpu")["small_gpu"])


def test_the_command_of_the_page_has_a_help_that_names_its_section(code, blocks):
    code("components/command_line/vocabulary.py")
    entry_text = block_of(blocks, "components/__main__.py")
    entry = eval(f"{{{entry_text}}}", dict(vars(command_line)))["vocabulary"]
    shown = make_parser("vocabulary", entry.summary, entry.load()).format_help()
    assert entry.summary in shown
    assert "parameters  vocabulary in params.yaml" in shown
    assert shown.endswith("m3diff vocabulary\n")


def test_every_file_that_the_page_names_exists(page):
    names = set(re.findall(r"`((?:components|tests|datasets|metrics|models)/[\w./]*\w[\w./]*)`", page))
    folders = [REPOSITORY, REPOSITORY / "components", REPOSITORY / "components" / "scoring"]
    assert [name for name in sorted(names) if not any((folder / name).exists() for folder in folders)] == []


# All stages run in a row through the command line, without fakes in between


STAGES = ("ingest", "validate", "convert", "train", "predict", "evaluate")


@pytest.fixture
def metric(code, blocks, monkeypatch):
    code("components/scoring/metrics/length.py")
    ((name, module),) = line(blocks, "components/scoring/metrics/__init__.py").items()
    monkeypatch.setitem(METRICS.data, name, module)


@pytest.fixture
def parameters(entry, kitchen, metric, settings, blocks, tmp_path) -> Path:
    """Write a small profile like the embedded one, with the dataset, metric and family of the page."""
    model = section(blocks, "small_gpu")["small_gpu"]
    model["module"] |= {"vision_feature_layers": [1, 2], "heads": 2}
    folders = ("base", "records", "clean", "mixture", "model", "predictions", "report")
    profile = {
        "extends": str(REPOSITORY / "profiles" / "embedded"),
        "paths": {name: str(tmp_path / "data" / name) for name in folders},
        "models": {"small_gpu": model},
        "ingest": {"datasets": {"kitchen": {"reader": "kitchen", "root": str(entry.root)}}},
        "validate": {"max_quarantined_share": 0.5, "near_duplicate_max_diff": None},
        "convert": {"questions": str(REPOSITORY / "profiles" / "questions.yaml")},
        "train": {"model": "small_gpu", "base": str(tiny_base(tmp_path / "base")), "epochs": 2, "global_batch": 2},
        "predict": {"max_new_tokens": 4},
        "evaluate": {"metrics": ["CIDEr", "length"], "gallery": 2},
        # a relative path would be the store of this checkout
        "register": {"tracking_uri": f"sqlite:///{tmp_path}/mlflow.db"},
        "promote": {"protocol": "kitchen/test", "guards": {}},
        "compute": {"scratch": str(tmp_path / "runs"), "workers": 0, "micro_batch": 1, "caption_val_pairs": 0},
    }
    path = tmp_path / "outside.yaml"
    path.write_text(yaml.safe_dump(profile))
    return path


def test_the_metrics_of_the_page_are_accepted_beside_the_embedded_run_s_gate(metric, blocks, tmp_path):
    path = tmp_path / "outside.yaml"
    evaluate = section(blocks, "metrics")
    path.write_text(yaml.safe_dump({"extends": str(REPOSITORY / "profiles" / "embedded"), "evaluate": evaluate}))
    params = load_params(path)
    assert params.evaluate.metrics[-1] == "length"
    assert params.promote == load_params(REPOSITORY / "params.yaml").promote


def test_a_dataset_a_metric_and_a_family_from_outside_go_through_every_stage(parameters):
    for stage in STAGES:
        assert main(["--params", str(parameters), stage]) == 0, stage
    paths = load_params(parameters).paths
    quarantine = pl.read_parquet(paths.clean / "quarantine")
    assert quarantine.height == 1
    message = Message("datasets.unexpected_value", key="id", expected="a whole number")
    assert message.in_text(quarantine["reason"][0])
    trained = pl.read_parquet(paths.mixture / "train" / "*.parquet")
    assert sorted(trained["answer"]) == ["it left", "the cup is gone", "the cup is gone"]
    manifest = json.loads((paths.model / "checkpoint" / "manifest.json").read_text())
    assert manifest["family"] == "adapted_vision"
    predictions = json.loads((paths.predictions / "predictions.json").read_text())
    assert [row["image_id"] for row in predictions] == ["kitchen/7", "kitchen/8"]
    metrics = json.loads((paths.report / "metrics.json").read_text())
    scores = pl.read_parquet(paths.report / "scores.parquet")
    assert scores["prediction"].to_list() == [row["caption"] for row in predictions]
    assert metrics["rows_out"] == 2
    metrics = metrics["protocols"]["kitchen/test"]
    assert metrics["CIDEr"] == pytest.approx(scores["CIDEr"].mean())
    assert metrics["length"] == pytest.approx(scores["length"].mean())
    assert "length" in (paths.report / "report.html").read_text()


NOTEBOOK = REPOSITORY / "docs" / "notebook.ipynb"
PAIRS = 14


def outputs(cell: nbformat.NotebookNode) -> str:
    return "".join(out.get("text", "") or str(out.get("data", {}).get("text/plain", "")) for out in cell.outputs)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a small project as `make run` leaves it."""
    root = tmp_path_factory.mktemp("project")
    (root / "params.yaml").touch()
    tiny_checkpoint(tiny_base(root / "base"), root / "data/05_model/checkpoint")
    rows = []
    for number in range(PAIRS):
        sides = [root / f"{number}-{side}.png" for side in (0, 1)]
        for side, path in enumerate(sides):
            noise_image(2 * number + side, (64, 48)).save(path)
        row: dict[str, Any] = {"id": f"mini/{number:02d}.png", "split": "test" if number else "train"}
        row["images"] = list_images(*sides)
        row |= {"references": ["a noise became another", f"noise {number}"]}
        rows.append(row | {"change_types": ["none"] if number == 1 else ["colour"]})
    write_record_table(root / "data/03_clean/records", rows)
    (root / "docs").mkdir()
    return root


@pytest.mark.slow(35)
def test_every_cell_runs_and_gives_captions_an_overlay_and_scores(project):
    notebook = nbformat.read(NOTEBOOK, 4)
    kernel = AsyncKernelManager(transport="ipc", ip=str(project / "kernel"))  # sockets there; no port is opened
    NotebookClient(notebook, km=kernel, timeout=200, resources={"metadata": {"path": str(project / "docs")}}).execute()
    texts = [outputs(cell) for cell in notebook.cells if cell.cell_type == "code"]
    table = next(text for text in texts if "first reference" in text)
    scores = next(text for text in texts if "CIDEr" in text)
    captions = json.loads((project / "runs/notebook/predictions.json").read_text())
    assert len(captions) == 12
    assert not {"mini/00.png"} & captions.keys(), "a pair that trains"
    assert all(name in table for name in captions)
    assert table.count("a noise became another") == 12
    assert "12 pairs, 2.00 references per pair" in scores
    outputs_of_cells = chain.from_iterable(cell.get("outputs", []) for cell in notebook.cells)
    shown = [output.data for output in outputs_of_cells if "data" in output]
    assert sum("image/png" in data for data in shown) == 1
    sheets = sorted(str(path.relative_to(project / "runs/notebook")) for path in project.rglob("notebook/**/*.png"))
    assert sheets == sorted(f"{name}.png" for name in captions)
