"""Test that any records pass through ingest, validate, convert and export, and are read back unchanged."""

import json
import re
import tempfile
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from m3diff.commands.export.llava import export_llava
from m3diff.datasets.odd_captions import ODD_KINDS
from m3diff.stages.convert.params import Convert
from m3diff.stages.convert.stage import convert
from tests.layouts import ingested, run_ingest, run_validate, save_picture

TRICKY = ["", " ", "a\u2028b", "x" * 2001, "<b>", '"quoted", [1]', "[1, 2]", "plain words"]
CAPTION = st.one_of(st.text(st.characters(codec="utf-8"), max_size=30), st.sampled_from(TRICKY))
PAIR = st.fixed_dictionaries(
    {
        "image": st.integers(0, 30),
        "split": st.sampled_from(["train", "train", "val", "test", "dev"]),
        "captions": st.lists(CAPTION, max_size=4),
        "change_types": st.sampled_from([[], ["color"], ["none"], ["size", "ocr"]]),
    }
)


PHASES = [Phase.explicit, Phase.generate]  # an example takes half a second: shrinking one would take minutes


@pytest.mark.fault("17")
@pytest.mark.slow
@settings(max_examples=30, deadline=None, derandomize=True, suppress_health_check=[*HealthCheck], phases=PHASES)
@given(pairs=st.lists(PAIR, min_size=1, max_size=12))
def test_any_records_come_through_the_pipeline(pairs):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_manifest(folder / "raw", pairs)
        # random text may look like text in a wrong encoding, or like any other odd caption
        options = {"no_caption": [], "separator": "", "confirmed": list(ODD_KINDS)}
        run_ingest(folder / "raw", "pairs", manifest="pairs.jsonl", **options)
        report = run_validate(folder, near_duplicate_max_diff=None)
        clean = pl.read_parquet(folder / "clean/records")
        quarantine = pl.read_parquet(folder / "clean/quarantine")
        assert report.rows_in == len(pairs) == clean.height + quarantine.height
        assert all(row["reason"] and row["rules"] for row in quarantine.iter_rows(named=True))
        for record in clean.iter_rows(named=True):
            pair = pairs[int(record["id"].removeprefix("mini/"))]
            assert record["references"] == [collapse_spaces(caption) for caption in pair["captions"]]
            assert record["split"] == pair["split"]
            assert record["change_types"] == pair["change_types"]
        if clean.height:
            check_samples(folder, clean)


def write_manifest(root: Path, pairs: list[dict[str, Any]]) -> None:
    root.mkdir()
    with (root / "pairs.jsonl").open("w", encoding="utf-8") as file:
        for number, pair in enumerate(pairs):
            images = {side: f"{pair['image']}_{side}.png" for side in ("before", "after")}
            file.write(json.dumps({"id": number, **images, **pair}, ensure_ascii=bool(number % 2)) + "\n")
            for shade, path in enumerate(images.values()):
                save_picture(root / path, pair["image"], 90 * shade)


def collapse_spaces(caption: str) -> str:
    """Replace every run of white, control or invisible characters by one space, as ingest promises."""
    return re.sub(r"[\s\x00-\x1f\x7f-\x9f\u200b\ufeff]+", " ", caption).strip(" ")


def check_samples(folder: Path, clean: pl.DataFrame) -> None:
    """Check that training has the distinct references, evaluation has all, and the export has all with words."""
    fields = {"seed": 1, "questions": Path("profiles/questions.yaml"), "sources": {}}
    cfg = Convert(references_per_question=9, no_change_share=1, **fields)
    convert(cfg, ingested(folder), folder / "clean", folder / "mixture")
    shards = sorted((folder / "mixture").glob("*/*.parquet"))
    samples = [row for shard in shards for row in pl.read_parquet(shard).iter_rows(named=True)]
    references: dict[str, list[str]] = {}
    for sample in samples:
        references.setdefault(sample["record"], []).append(sample["answer"])
    for record in clean.iter_rows(named=True):
        distinct = [caption for caption in dict.fromkeys(record["references"]) if caption]
        assert references.get(record["id"], []) == (distinct if record["split"] == "train" else record["references"])
    if samples:
        written = export_llava(ingested(folder), folder / "mixture", folder / "llava")
        texts = [(folder / "llava" / f"{split}.json").read_text("utf-8") for split in written]
        exported = {record["id"]: record for text in texts for record in json.loads(text)}
        assert exported.keys() == {sample["id"] for sample in samples if sample["answer"]}
        for sample in samples:
            if sample["answer"]:
                assert exported[sample["id"]]["conversations"][1]["value"] == sample["answer"]
                assert exported[sample["id"]]["image"] == [image["uri"] for image in sample["images"]]
