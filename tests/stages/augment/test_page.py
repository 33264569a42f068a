"""docs/made-data.md is true: its entries are right, its sources are read, its counts are those of the last run."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image

from m3diff.settings.load import load_params
from m3diff.stages.augment.params import Edits, Source
from m3diff.stages.augment.source import Rejected, read_captioned
from tests.toy import REPOSITORY

PAGE = REPOSITORY / "docs" / "made-data.md"


@pytest.fixture(scope="module")
def blocks() -> list[dict[str, Any]]:
    return [yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)]


def test_the_entry_of_the_page_is_right(blocks: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(REPOSITORY)
    values = yaml.safe_load((REPOSITORY / "profiles" / "embedded.yaml").read_text())
    values["augment"] = blocks[0]["augment"]
    values["ingest"]["datasets"] |= blocks[0]["ingest"]["datasets"]
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    (entry,) = load_params(tmp_path / "params.yaml").augment.values()
    assert isinstance(entry, Edits)
    assert (entry.edits, entry.paraphrases, entry.source.splits) == (8, {"val": 4}, ("val",))


def picture(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (8, 8)).save(path)


def captions(source: Source, folder: Path) -> dict[str, str]:
    rejected = Rejected()
    found = read_captioned(source, folder / "unpacked", folder / "cache.parquet", rejected)
    assert not rejected
    return {each.image.relative_to(source.root).as_posix(): each.caption for each in found}


def source_at(blocks: list[dict[str, Any]], number: int, root: Path) -> Source:
    return Source.model_validate(blocks[number]["source"] | {"root": root})


def test_llavas_images_with_captions_are_read(blocks: list[dict[str, Any]], tmp_path: Path):
    source = source_at(blocks, 1, tmp_path / "llava")
    said = [{"from": "human", "value": "<image>\nDescribe it."}, {"from": "gpt", "value": "a red cup"}]
    picture(source.root / "00453/1.jpg")
    row = {"id": "1", "image": "00453/1.jpg", "conversations": said}
    (source.root / source.options["manifest"]).write_text(json.dumps([row]))
    assert captions(source, tmp_path) == {"00453/1.jpg": "a red cup"}


def test_cocos_captions_are_read(blocks: list[dict[str, Any]], tmp_path: Path):
    source = source_at(blocks, 2, tmp_path / "coco")
    picture(source.root / "train2017/000000000009.jpg")
    rows = [{"image_id": 9, "id": number, "caption": text} for number, text in enumerate(["a cat", "one cat"])]
    (source.root / "annotations").mkdir()
    (source.root / source.options["manifest"]).write_text(json.dumps({"images": [], "annotations": rows}))
    assert captions(source, tmp_path) == {"train2017/000000000009.jpg": "a cat"}


def test_the_profile_makes_one_of_each_kind(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(REPOSITORY)
    made = load_params(REPOSITORY / "profiles" / "made-data.yaml").augment
    assert [entry.kind for entry in made.values()] == ["edits", "neighbours", "coupled_samples"]
    for name in made:
        assert f"`{name}`" in PAGE.read_text("utf-8")
