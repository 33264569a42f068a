"""A made dataset in DVC, between its source and its ingestion; and docs/made-data.md, whose sources are read."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from m3diff.settings.load import load_params
from m3diff.stages.augment.params import Edits, Source
from tests import toy
from tests.test_dependencies import set_params
from tests.toy import REPOSITORY

SOURCE = {"reader": "minichange", "root": "data/01_raw/minichange"}
MADE = {"kind": "edits", "source": SOURCE, "root": "data/01_raw/made", "seed": 3, "edits": 2, "paraphrases": {}}
MADE |= {"editor": {"kind": "drawn"}, "writer": {"kind": "grammar"}}
INGESTED = {"reader": "pairs", "root": "data/01_raw/made", "options": {"manifest": "pairs.jsonl"}}
LATER = ["ingest@made", "validate", "convert", "train", "predict", "evaluate"]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    root = toy.build(tmp_path / "toy")
    set_params(root, "augment.made", MADE)
    set_params(root, "ingest.datasets.made", INGESTED)
    return root


def ran(root: Path, place: str | None = None, value: Any = None) -> list[str]:
    """The stages that run, after a change of params.yaml where one is named."""
    if place:
        assert toy.status(root) == {}
        set_params(root, place, value)
    return re.findall(r"Running stage '(.+)'", toy.run(root, "dvc", "repro"))


@pytest.mark.slow(30)
def test_a_made_dataset_follows_its_source_and_its_entry(project):
    order = ran(project)
    assert order.index("synthesize@minichange") < order.index("augment@made") < order.index("ingest@made")
    outs = yaml.safe_load((project / "dvc.lock").read_text())["stages"]["augment@made"]["outs"]
    assert {"data/01_raw/made.json": "md5"}.items() <= {out["path"]: out["hash"] for out in outs}.items()
    assert ran(project, "augment.made.edits", 3) == ["code", "augment@made"], "what it made is the same"
    assert ran(project, "augment.made.seed", 4) == ["code", "augment@made", *LATER]
    again = ran(project, "synthesize.minichange.seed", 4)
    assert "augment@made" in again
    assert "ingest@made" not in again, "the source has the same splits, so what is made is the same"
    (project / "data/01_raw/note.txt").write_text("no part of it")
    assert toy.status(project) == {}


PAGE = (REPOSITORY / "docs" / "made-data.md").read_text("utf-8")
BLOCKS = [yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)]


def test_the_entry_of_the_page_is_right_and_the_profile_makes_one_of_each_kind(tmp_path, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    values = yaml.safe_load((REPOSITORY / "profiles" / "embedded.yaml").read_text())
    values["augment"] = BLOCKS[0]["augment"]
    values["ingest"]["datasets"] |= BLOCKS[0]["ingest"]["datasets"]
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    (entry,) = load_params(tmp_path / "params.yaml").augment.values()
    assert isinstance(entry, Edits)
    assert (entry.edits, entry.paraphrases, entry.source.splits) == (8, {"val": 4}, ("val",))
    made = load_params(REPOSITORY / "profiles" / "made-data.yaml").augment
    assert [entry.kind for entry in made.values()] == ["edits", "neighbours", "coupled_samples"]
    assert all(f"`{name}`" in PAGE for name in made)
    for block in BLOCKS[1:]:
        assert Source.model_validate(block["source"]).options["columns"]["captions"] in ("conversations", "caption")
