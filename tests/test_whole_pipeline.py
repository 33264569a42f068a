"""Every stage in a row through the command line, nothing faked in between, with a dataset, a metric and a model family
that come from outside: the blocks of docs/extending.md, each a file and an entry in its list."""

import json
from pathlib import Path

import polars as pl
import pytest
import yaml

from m3diff.__main__ import main
from m3diff.settings.load import load_params
from tests.test_docs import blocks, code, entry, kitchen, page, section, settings  # noqa: F401  # fixtures
from tests.tiny import tiny_base
from tests.toy import REPOSITORY

STAGES = ("ingest", "validate", "convert", "train", "predict", "evaluate")


@pytest.fixture
def metric(code, blocks, monkeypatch):  # noqa: F811
    from m3diff.scoring.metrics import METRICS

    monkeypatch.setitem(METRICS, "length", code("components/scoring/metrics/length.py").METRIC)


@pytest.fixture
def parameters(entry, kitchen, metric, settings, blocks, tmp_path) -> Path:  # noqa: F811
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
    assert (paths.report / "report.html").is_file()
