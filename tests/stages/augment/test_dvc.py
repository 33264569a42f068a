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
    assert ran(project) == ["code", "augment@made"], "what it made is the same"
    change(project, "augment.made.seed", 4)
    assert ran(project) == ["code", "augment@made", *LATER]
    change(project, "synthesize.minichange.seed", 4)
    again = ran(project)
    assert "augment@made" in again
    assert "ingest@made" not in again, "the source has the same splits, so what is made is the same"
    (project / "data/01_raw/note.txt").write_text("no part of it")
    assert toy.status(project) == {}


MADE_ALONE = ("repro", "--single-item", "augment@made")


@pytest.mark.slow(15)
def test_a_made_dataset_comes_from_the_run_cache_and_its_folder_is_dvcs_alone(project: Path):
    """Why the stage's output is not `persist`, by which DVC would leave the folder and never restore it."""
    root = project / "data/01_raw/made"
    toy.run(project, "dvc", "repro", "augment@made")
    made = sorted(path.name for path in root.rglob("*"))
    set_params(project, "augment.made.seed", 4)
    assert "Running stage 'augment@made'" in toy.run(project, "dvc", *MADE_ALONE)
    set_params(project, "augment.made.seed", MADE["seed"])
    assert "Stage 'augment@made' is cached - skipping run" in toy.run(project, "dvc", *MADE_ALONE)
    assert sorted(path.name for path in root.rglob("*")) == made
    (root / "mine.txt").write_text("mine")
    set_params(project, "augment.made.seed", 5)
    assert "Running stage 'augment@made'" in toy.run(project, "dvc", *MADE_ALONE)
    assert not (root / "mine.txt").exists(), "as docs/made-data.md warns"


@pytest.mark.slow(15)
def test_dvc_itself_replaces_no_folder_that_dvc_add_tracks(tmp_path: Path):
    project = toy.build(tmp_path / "toy")
    mine = project / "data/01_raw/made/mine.txt"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    toy.run(project, "dvc", "add", "data/01_raw/made")
    set_params(project, "augment.made", MADE)
    set_params(project, "ingest.datasets.made", INGESTED)
    with pytest.raises(AssertionError, match=r"output 'data/01_raw/made' is specified in:"):
        toy.run(project, "dvc", "repro", "augment@made")
    assert mine.read_text() == "mine"


def outs(root: Path) -> dict[str, Any]:
    lock = yaml.safe_load((root / "dvc.lock").read_text())
    return {out["path"]: out for out in lock["stages"]["augment@made"]["outs"]}
