"""The mixture as LLaVA records, for training elsewhere: `m3diff export-llava FOLDER`.

    {"id": "...", "image": [before, after], "images": [before, after],
     "conversations": [{"from": "human", "value": "<image><image>\\nWhat changed?"}, {"from": "gpt", "value": "..."}],
     "metadata": {"dataset": "...", "split": "train"}}

LLaVA-NeXT reads `image` (as many as there are `<image>`), ms-swift reads `images`, LLaMA-Factory reads `images` as the
`dataset_info.json` beside the files tells it. Image paths stay relative to the project: name it as the image folder.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import polars as pl

from components.progress import progress
from components.records import SPLITS, DataError


def export_llava(samples: Path, out: Path, lines: bool = False) -> dict[str, int]:
    """Write `out/<split>.json` (one array) or `.jsonl`, and `out/dataset_info.json`; returns the records by split.

    Samples with an empty answer are left out: they count in evaluation only, and ms-swift refuses them.

    Raises:
        DataError: there are no samples.
    """
    shards = {split: sorted(samples.glob(f"{split}-*.parquet")) for split in SPLITS}
    if not any(shards.values()):
        raise DataError(f"{samples}: holds no samples; run `m3diff convert` first")
    out.mkdir(parents=True, exist_ok=True)
    suffix = "jsonl" if lines else "json"
    written = {split: _write(found, out / f"{split}.{suffix}", lines) for split, found in shards.items() if found}
    info = {f"m3diff_{split}": _dataset_info(f"{split}.{suffix}") for split in written}
    (out / "dataset_info.json").write_text(json.dumps(info, indent=2) + "\n", "utf-8")
    return written


def _write(shards: list[Path], path: Path, lines: bool) -> int:
    """One record a line; as an array with brackets around and commas between."""
    count = 0
    with path.open("w", encoding="utf-8", newline="\n") as file:
        for record in _records(shards, path.name):
            file.write(("" if lines else ",\n" if count else "[\n") + record + ("\n" if lines else ""))
            count += 1
        if not lines:
            file.write("\n]\n" if count else "[]\n")
    return count


def _records(shards: list[Path], name: str) -> Iterator[str]:
    for shard in progress(shards, f"export {name}", total=len(shards), unit="shard"):
        samples = pl.read_parquet(shard).filter(pl.col("answer") != "")
        yield from samples.select(_record()).write_ndjson().rstrip("\n").split("\n") if samples.height else ()


def _record() -> list[pl.Expr]:
    human = pl.struct(pl.lit("human").alias("from"), pl.format("<image><image>\n{}", "question").alias("value"))
    model = pl.struct(pl.lit("gpt").alias("from"), pl.col("answer").alias("value"))
    images = pl.concat_list("before", "after")
    return [
        pl.col("id"),
        images.alias("image"),
        images.alias("images"),
        pl.concat_list(human, model).alias("conversations"),
        pl.struct("dataset", "split").alias("metadata"),
    ]


def _dataset_info(file: str) -> dict[str, object]:
    columns = {"messages": "conversations", "images": "images"}
    return {"file_name": file, "formatting": "sharegpt", "columns": columns}
