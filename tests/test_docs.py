"""docs/extending.md is true: its blocks are put where they say, in memory, and run."""

import ast
import dataclasses
import importlib.util
import json
import re
import sys
from types import ModuleType
from typing import Any

import polars as pl
import pyarrow.parquet as pq
import pytest
import yaml
from pydantic import TypeAdapter

from m3diff.datasets import DATASETS
from m3diff.datasets.spec import DatasetSpec, Protocol
from m3diff.models import FAMILIES
from m3diff.scoring.metrics import METRICS
from m3diff.scoring.protocols import select
from m3diff.stages.ingest.params import DatasetEntry
from m3diff.stages.ingest.stage import ingest
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
    monkeypatch.setitem(DATASETS, name, module)
    return DATASETS[name]


@pytest.fixture
def entry(blocks, tmp_path) -> DatasetEntry:
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


def test_the_dataset_of_the_page_is_ingested_and_its_bad_row_is_named(kitchen, entry, tmp_path):
    report = ingest("kitchen", entry, tmp_path / "images.parquet", tmp_path / "records")
    assert report.pairs == {"train": 2, "val": 1, "test": 2, "?": 1}
    assert report.references == {"train": 3, "val": 2, "test": 3, "?": 0}
    rows = pq.read_table(tmp_path / "records" / "kitchen" / "records.parquet").to_pylist()
    assert [row["id"] for row in rows[:5]] == [f"kitchen/{number}" for number in range(4, 9)]
    assert rows[1]["references"] == ["the cup is gone"]
    assert rows[5]["fault"] == "id: expected a whole number, found text 'nine'"
    assert (report.faults, report.unread_images) == (1, 0)
    assert kitchen.part("kitchen").pairs() == {"train": 2, "val": 1, "test": 2}
    assert "Page: " in sys.modules[kitchen.read.__module__].__doc__


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


def test_the_metric_of_the_page_is_scored_by_evaluate(code, blocks, monkeypatch, tmp_path):
    from tests.scoring import bench

    code("components/scoring/metrics/length.py")
    ((name, module),) = line(blocks, "components/scoring/metrics/__init__.py").items()
    monkeypatch.setitem(METRICS, name, module)
    folders = bench.write(tmp_path)
    bench.run(folders, tmp_path / "out", metrics=section(blocks, "metrics")["metrics"])
    rows = {row["id"]: row["length"] for row in pq.read_table(tmp_path / "out" / "scores.parquet").to_pylist()}
    assert rows["toy/2"] == 2 / 4  # "nothing changed" for "the lamp went out"
    metrics = json.loads((tmp_path / "out" / "metrics.json").read_text())["protocols"]["toy/test"]
    assert metrics["length"] == pytest.approx(sum(rows.values()) / len(rows))
    assert "length" in (tmp_path / "out" / "report.html").read_text()


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
    pl.DataFrame({"references": references}).write_parquet(tmp_path / "records.parquet")
    code("components/stages/vocabulary/stage.py").vocabulary(cfg, tmp_path, tmp_path / "words.csv")
    assert (tmp_path / "words.csv").read_text().split() == ["word,count", "cup,2", "gone,2", "is,2", "the,2"]


@pytest.fixture
def settings(code, blocks, monkeypatch) -> Any:
    code("components/models/adapted_vision.py")
    ((name, module),) = line(blocks, "components/models/__init__.py").items()
    monkeypatch.setitem(FAMILIES, name, module)
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


@pytest.mark.slow
def test_the_family_of_the_page_goes_through_train_and_predict(settings, tmp_path):
    from m3diff.settings.compute import Compute
    from m3diff.stages.predict.params import Predict
    from m3diff.stages.predict.stage import predict
    from m3diff.stages.train.params import Train
    from m3diff.stages.train.stage import train
    from tests.stages.train.toy import COMPUTE, TRAIN, write_mixture

    mixture = write_mixture(tmp_path / "mixture")
    cfg = Train(base=REPOSITORY / "data" / "00_base", **TRAIN | {"model": "small_gpu", "epochs": 1})
    compute = Compute(scratch=tmp_path / "runs", **COMPUTE)
    train(cfg, settings, compute, mixture, tmp_path / "model")
    asked = Predict(batch_pairs=2, max_new_tokens=4, limit=0)
    predict(asked, compute, mixture, tmp_path / "model", tmp_path / "predictions")
    assert len(json.loads((tmp_path / "predictions" / "predictions.json").read_text())) == 3


def test_every_file_that_the_page_names_is_there(page):
    named = set(re.findall(r"`((?:components|tests|datasets|metrics|models)/[\w./]*\w[\w./]*)`", page))
    places = [REPOSITORY, REPOSITORY / "components", REPOSITORY / "components" / "scoring"]
    assert [name for name in sorted(named) if not any((place / name).exists() for place in places)] == []
