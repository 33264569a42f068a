"""`m3diff export-llava`: export the mixture as LLaVA records, so that other software can train on it.

    {"id": "...", "image": [before, after], "images": [before, after],
     "conversations": [{"from": "human", "value": "<image><image>\\nWhat changed?"}, {"from": "gpt", "value": "..."}],
     "metadata": {"dataset": "...", "split": "train"}}

There is an `<image>` tag for each image, before the first question unless the questions say where the images are. A
dialogue has all of its turns. A record without images has no `image` and no `images`.

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
from typing import Any

import polars as pl

from m3diff.commands.export.datasets import find_spec, licence_notices
from m3diff.records.errors import DataError
from m3diff.records.progress import progress
from m3diff.records.sample import IMAGE_MARK
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
            for record in records_of_samples(samples, image_root):
                file.write((",\n" if count else "[\n") + record)
                count += 1
        file.write("\n]\n" if count else "[]\n")
    return count


def records_of_samples(samples: pl.DataFrame, image_root: Path | None) -> list[str]:
    """Return the record of each sample as a line of JSON.

    Expressions are fifty times as fast as a loop, but too rigid for dialogues, records without images and tags in the
    text.
    """
    is_plain = (
        (pl.col("history").list.len() == 0)
        & (pl.col("images").list.len() > 0)
        & ~pl.col("question").str.contains(IMAGE_MARK, literal=True)
    )
    if samples.select(is_plain.all()).item():
        return samples.select(record_columns(image_root)).write_ndjson().split("\n")[:-1]
    return [
        json.dumps(make_record(sample, image_root), ensure_ascii=False, separators=(",", ":"))
        for sample in samples.iter_rows(named=True)
    ]


def make_record(sample: Mapping[str, Any], image_root: Path | None) -> dict[str, Any]:
    """Return the record of a sample with any number of images and turns."""
    turns = [(turn["question"], turn["answer"]) for turn in sample["history"]]
    turns.append((sample["question"], sample["answer"]))
    has_tags = any(IMAGE_MARK in question for question, _ in turns)
    tags = "" if has_tags or not sample["images"] else IMAGE_MARK * len(sample["images"]) + "\n"
    messages = []
    for number, (question, answer) in enumerate(turns):
        messages.append({"from": "human", "value": question if number else tags + question})
        messages.append({"from": "gpt", "value": answer})
    paths = [image["uri"] if image_root is None else str(image_root / image["uri"]) for image in sample["images"]]
    return {
        "id": sample["id"],
        **({"image": paths, "images": paths} if paths else {}),
        "conversations": messages,
        "metadata": {"dataset": sample["dataset"], "split": sample["split"]},
    }


def record_columns(image_root: Path | None) -> list[pl.Expr]:
    """Return expressions that compute the fields of a record from the columns of a sample with images and one turn.

    Args:
        image_root: folder to prepend to the image paths, or None to keep them.
    """
    tags = pl.lit(IMAGE_MARK).repeat_by(pl.col("images").list.len()).list.join("")
    question = pl.struct(pl.lit("human").alias("from"), pl.format("{}\n{}", tags, "question").alias("value"))
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
