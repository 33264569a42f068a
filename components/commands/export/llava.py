"""`m3diff export-llava`: export the mixture as LLaVA records, so that other software can train on it.

    {"id": "...", "image": [before, after], "images": [before, after],
     "conversations": [{"from": "human", "value": "<image><image>\\nWhat changed?"}, {"from": "gpt", "value": "..."}],
     "metadata": {"dataset": "...", "split": "train"}}

LLaVA-NeXT reads `image`, which must have as many paths as there are `<image>` tags in the question. ms-swift reads
`images`. LLaMA-Factory reads the field that `dataset_info.json` specifies, which is `images`. Image paths are relative
to the project's folder. Set the project's folder as the image folder, or export absolute paths.

ms-swift and LLaMA-Factory were tested with these files. ms-swift can read them directly, but uses several crops per
image (anyres), which is a different recipe: 3,672 visual tokens per pair instead of 1,460. LLaMA-Factory 0.9.5 can read
the data, but does not support LLaVA-OneVision.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import polars as pl

from m3diff.commands.export.datasets import find_spec, licence_notices
from m3diff.records.errors import DataError
from m3diff.records.progress import progress
from m3diff.records.schemas import SPLITS
from m3diff.records.tables import iterate_parts, part_paths
from m3diff.stages.ingest.params import DatasetEntry


def export_llava(
    entries: Mapping[str, DatasetEntry],
    mixture: Path,
    out: Path,
    allow_unlicensed: bool = False,
    absolute: bool = False,
) -> dict[str, int]:
    """Write `out/<split>.json` and `out/dataset_info.json`, and return the number of records in each split.

    Samples with an empty reference are omitted, because they are used only for evaluation and ms-swift rejects them.
    The conditions of the licences are printed.

    Args:
        entries: the datasets of the run. Their readers determine the licences.
        mixture: the output folder of convert, which contains a table for each split.
        out: the folder to write to.
        allow_unlicensed: whether to include datasets whose licences do not permit redistribution.
        absolute: whether to write absolute image paths. Otherwise, the paths in the samples are used.

    Raises:
        DataError: there are no samples, or a dataset's licence does not permit redistribution.
    """
    splits = [split for split in SPLITS if part_paths(mixture / split)]
    if not splits:
        raise DataError("export.no_samples", path=mixture)
    dataset_names: set[str] = set()
    for split in splits:
        for part in iterate_parts(mixture / split, columns=["dataset"]):
            dataset_names |= set(part["dataset"].unique().to_pylist())
    specs = {name: find_spec(name, entries) for name in sorted(dataset_names)}
    for notice in licence_notices(specs, ["redistribute"], allow_unlicensed):
        print(notice)
    out.mkdir(parents=True, exist_ok=True)
    image_root = Path.cwd() if absolute else None
    record_counts = {split: write_split(mixture / split, out / f"{split}.json", image_root) for split in splits}
    write_dataset_info(out / "dataset_info.json", record_counts)
    return record_counts


def write_dataset_info(file: Path, splits: Iterable[str]) -> None:
    """Write `dataset_info.json`, which LLaMA-Factory requires to read the records."""
    layout = {"formatting": "sharegpt", "columns": {"messages": "conversations", "images": "images"}}
    info = {f"m3diff_{split}": {"file_name": f"{split}.json", **layout} for split in splits}
    file.write_text(json.dumps(info, indent=2) + "\n", "utf-8")


def write_split(table: Path, path: Path, image_root: Path | None) -> int:
    """Write the records of a split as a JSON list with one record per line, and return the number of records."""
    count = 0
    with path.open("w", encoding="utf-8", newline="\n") as file:
        parts = iterate_parts(table)
        for part in progress(parts, f"export {path.name}", total=len(part_paths(table)), unit="shard"):
            samples = pl.DataFrame(part).filter(pl.col("answer") != "")
            records = samples.select(record_columns(image_root)).write_ndjson().split("\n")[:-1]
            for record in records:
                file.write((",\n" if count else "[\n") + record)
                count += 1
        file.write("\n]\n" if count else "[]\n")
    return count


def record_columns(image_root: Path | None) -> list[pl.Expr]:
    """Return expressions that compute the fields of a record from the columns of a sample.

    Args:
        image_root: folder to prepend to the image paths, or None to keep them.
    """
    question = pl.struct(pl.lit("human").alias("from"), pl.format("<image><image>\n{}", "question").alias("value"))
    answer = pl.struct(pl.lit("gpt").alias("from"), pl.col("answer").alias("value"))
    images = pl.col("images").list.eval(pl.element().struct.field("uri"))
    if image_root is not None:
        absolute_path = pl.element().map_elements(lambda path: str(image_root / path), return_dtype=pl.String)
        images = images.list.eval(absolute_path)
    return [
        pl.col("id"),
        images.alias("image"),
        images.alias("images"),
        pl.concat_list(question, answer).alias("conversations"),
        pl.struct("dataset", "split").alias("metadata"),
    ]
