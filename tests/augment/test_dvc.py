"""A made dataset in DVC: made after its source and before it is ingested, anew where its source or entry changed."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import toy
from tests.test_dependencies import set_params

MADE = {
    "kind": "edits",
    "source": {"reader": "minichange", "root": "data/01_raw/minichange"},
    "root": "data/01_raw/made",
    "seed": 3,
    "editor": {"kind": "drawn"},
    "writer": {"kind": "grammar"},
    "edits": 2,
    "paraphrases": {},
}
INGESTED = {"reader": "pairs", "root": "data/01_raw/made", "options": {"manifest": "pairs.jsonl"}}
LATER = ["ingest@made", "validate", "convert", "train", "predict", "evaluate"]


def ran(root: Path) -> list[str]:
    return re.findall(r"Running stage '(.+)'", toy.run(root, "dvc", "repro"))


@pytest.fixture
def project(tmp_path: Path) -> Path:
    root = toy.build(tmp_path / "toy")
    set_params(root, "augment.made", MADE)
    set_params(root, "ingest.datasets.made", INGESTED)
    return root


def change(root: Path, place: str, value: Any) -> None:
    assert toy.status(root) == {}
    set_params(root, place, value)


@pytest.mark.slow(30)
def test_a_made_dataset_follows_its_source_and_its_entry(project: Path):
    order = ran(project)
    assert order.index("synthesize@minichange") < order.index("augment@made") < order.index("ingest@made")
    assert {"path": "data/01_raw/made.json", "hash": "md5"}.items() <= outs(project)["data/01_raw/made.json"].items()
    change(project, "augment.made.edits", 3)
    assert ran(project) == ["augment@made"], "what it made is the same"
    change(project, "augment.made.seed", 4)
    assert ran(project) == ["augment@made", *LATER]
    change(project, "synthesize.minichange.seed", 4)
    again = ran(project)
    assert "augment@made" in again
    assert "ingest@made" not in again, "the source has the same splits, so what is made is the same"
    (project / "data/01_raw/note.txt").write_text("no part of it")
    assert toy.status(project) == {}


def outs(root: Path) -> dict[str, Any]:
    lock = yaml.safe_load((root / "dvc.lock").read_text())
    return {out["path"]: out for out in lock["stages"]["augment@made"]["outs"]}
