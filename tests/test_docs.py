"""docs/extending.md is true: its blocks are put where they say, in memory, and run; its dataset, metric and family go
through every stage."""

import ast
import dataclasses
import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from pydantic import TypeAdapter

from m3diff.__main__ import main
from m3diff.datasets import DATASETS
from m3diff.datasets.spec import DatasetSpec, Protocol
from m3diff.models import FAMILIES
from m3diff.records.schemas import RECORD_SCHEMA
from m3diff.scoring.metrics import METRICS
from m3diff.scoring.protocols import select
from m3diff.settings.load import load_params
from m3diff.stages.ingest.params import DatasetEntry
from tests.tiny import tiny_base
from tests.toy import REPOSITORY

BLOCK = re.compile(r"```(?:python|yaml)\n# (?P<place>[^\s,]+)[^\n]*\n(?P<code>.*?)```", re.DOTALL)


@pytest.fixture(scope="module")
def page() -> str:
    return (REPOSITORY / "docs" / "extending.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def blocks(page) -> list[tuple[str, str]]:
    """(file, text) of every block."""
    found = [(match["place"], match["code"]) for match in BLOCK.finditer(page)]
    assert len(found) == page.count("```") // 2, "every block names its file in its first line"
    return found


@pytest.fixture
def code(blocks, tmp_path, monkeypatch):
    """The module that a block says, made from it in a temporary folder; gone after the test."""

    def load(place: str) -> ModuleType:
        text = next(text for file, text in blocks if file == place)
        path = tmp_path / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        name = place.removesuffix(".py").replace("components/", "m3diff/").replace("/", ".")
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        return module

    return load


def line(blocks: list[tuple[str, str]], place: str) -> dict[str, str]:
    """The one line of a list, as a dictionary of one entry."""
    text = next(text for file, text in blocks if file == place)
    assert len(text.splitlines()) == 1
    return ast.literal_eval(f"{{{text}}}")


def section(blocks: list[tuple[str, str]], key: str) -> dict[str, Any]:
    """The block of params.yaml that has this key."""
    found = [yaml.safe_load(text) for file, text in blocks if file == "params.yaml"]
    return next(entry for entry in found if key in entry)


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


def test_the_protocol_of_the_page_decides_which_pairs_evaluate_scores(kitchen, blocks):
    from tests.scoring import bench

    text = [text for file, text in blocks if file == "components/datasets/kitchen.py"][1]
    names: dict[str, Any] = {"Protocol": Protocol}
    exec(text, names)
    changed = dataclasses.replace(kitchen, protocols=names["PROTOCOLS"])
    pair = bench.pairs()[0]
    pairs = [dataclasses.replace(pair, id=f"kitchen/{number}", dataset="kitchen") for number in (4, 7, 8)]
    found = {one.name: [pair.id for pair in one.pairs] for one in select(pairs, {"kitchen": changed})}
    assert found == {"kitchen/even": ["kitchen/4", "kitchen/8"], "kitchen/test": [pair.id for pair in pairs]}


def test_the_editor_of_the_page_makes_pairs(code, tmp_path):
    from m3diff.stages.augment.source import Rejected
    from m3diff.stages.augment.stage import make_edits
    from tests.stages.augment.toys import ToyWriter, edits, original

    originals = [original(tmp_path, "one", "make it grey"), original(tmp_path, "two", "add a cat")]
    cfg = edits(tmp_path, tmp_path / "out", edits=1, paraphrases={})
    editor = code("components/stages/augment/faded.py").FadedEditor()
    made = make_edits(cfg, originals, Rejected(), editor, ToyWriter(), tmp_path / "into")
    assert [pair.id for pair in made.pairs] == ["one-0"]
    assert made.rejected == {"cannot be carried out": 1}


def test_the_stage_of_the_page_counts_words(code, blocks, tmp_path):
    cfg = code("components/stages/vocabulary/params.py").Vocabulary(**section(blocks, "vocabulary")["vocabulary"])
    references = [["The cup is gone", "the cup left"], ["it IS gone"]]
    columns = {name: references if name == "references" else [None, None] for name in RECORD_SCHEMA.names}
    pq.write_table(pa.table(columns, schema=RECORD_SCHEMA), tmp_path / "records.parquet")
    code("components/stages/vocabulary/stage.py").vocabulary(cfg, tmp_path, tmp_path)
    assert (tmp_path / "words.csv").read_text().split() == ["word,count", "cup,2", "gone,2", "is,2", "the,2"]


@pytest.fixture
def settings(code, blocks, monkeypatch) -> Any:
    code("components/models/adapted_vision.py")
    ((name, module),) = line(blocks, "components/models/__init__.py").items()
    monkeypatch.setitem(FAMILIES.data, name, module)
    return TypeAdapter(FAMILIES[name].settings).validate_python(section(blocks, "small_gpu")["small_gpu"])


def test_the_family_of_the_page_is_planned_and_trains_adapters_in_both(settings):
    from m3diff.commands.plan.plan import parameters_of
    from m3diff.models.tuning import meta_model

    family = FAMILIES[settings.family]
    base = REPOSITORY / "data" / "00_base"
    config = family.planned_config(base, settings)
    found = parameters_of(meta_model(config, family, settings, "fp32"), family)
    width, layers = config.vision_config.hidden_size, config.vision_config.num_hidden_layers
    assert found["vision"] == layers * 4 * 8 * (width + width)  # four linears a layer, rank 8
    assert found["vision (frozen)"] > found["vision"]
    assert found["llm"] > 0


def test_every_file_that_the_page_names_is_there(page):
    named = set(re.findall(r"`((?:components|tests|datasets|metrics|models)/[\w./]*\w[\w./]*)`", page))
    places = [REPOSITORY, REPOSITORY / "components", REPOSITORY / "components" / "scoring"]
    assert [name for name in sorted(named) if not any((place / name).exists() for place in places)] == []


# Every stage in a row through the command line, nothing faked in between


STAGES = ("ingest", "validate", "convert", "train", "predict", "evaluate")


@pytest.fixture
def metric(code, blocks, monkeypatch):
    code("components/scoring/metrics/length.py")
    ((name, module),) = line(blocks, "components/scoring/metrics/__init__.py").items()
    monkeypatch.setitem(METRICS.data, name, module)


@pytest.fixture
def parameters(entry, kitchen, metric, settings, blocks, tmp_path) -> Path:
    """A profile that differs from the embedded run by what comes from outside, and by being small."""
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
        "promote": {"protocol": "kitchen/test", "guards": {}},
        "compute": {"scratch": str(tmp_path / "runs"), "workers": 0, "micro_batch": 1, "caption_val_pairs": 0},
    }
    path = tmp_path / "outside.yaml"
    path.write_text(yaml.safe_dump(profile))
    return path


def test_a_dataset_a_metric_and_a_family_from_outside_go_through_every_stage(parameters):
    for stage in STAGES:
        assert main(["--params", str(parameters), stage]) == 0, stage
    paths = load_params(parameters).paths
    quarantine = pl.read_parquet(paths.clean / "quarantine.parquet")
    assert quarantine.height == 1
    assert "id: expected a whole number" in quarantine["reason"][0]
    trained = pl.read_parquet(paths.mixture / "train" / "*.parquet")
    assert sorted(trained["reference"]) == ["it left", "the cup is gone", "the cup is gone"]
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
