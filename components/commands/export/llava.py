"""The mixture as LLaVA records, for training elsewhere: `m3diff export-llava FOLDER`.

    {"id": "...", "image": [before, after], "images": [before, after],
     "conversations": [{"from": "human", "value": "<image><image>\\nWhat changed?"}, {"from": "gpt", "value": "..."}],
     "metadata": {"dataset": "...", "split": "train"}}

LLaVA-NeXT reads `image` (as many as there are `<image>`), ms-swift reads `images`, LLaMA-Factory reads `images` as the
`dataset_info.json` beside the files tells it. Image paths stay relative to the project: name it as the image folder, or
ask for absolute ones.

Found by running them: ms-swift reads the file as it is, but crops each image at any resolution (3,672 visual tokens a
pair for 1,460): another recipe. LLaMA-Factory 0.9.5 takes the data and has no LLaVA-OneVision.
The files are made to be passed on, so a dataset whose licence does not allow that is refused.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import polars as pl

from m3diff.commands.export import licence_notices, spec_of
from m3diff.records.errors import DataError, readable
from m3diff.records.progress import progress
from m3diff.records.schemas import SPLITS
from m3diff.stages.ingest.params import DatasetEntry


def export_llava(
    entries: Mapping[str, DatasetEntry],
    mixture: Path,
    out: Path,
    allow_unlicensed: bool = False,
    absolute: bool = False,
) -> dict[str, int]:
    """Write `out/<split>.json` and `out/dataset_info.json`; returns the records by split.

    Samples with an empty reference are left out: they count in evaluation only, and ms-swift refuses them.

    Args:
        entries: the datasets of the run, whose readers tell the licences.
        mixture: the output of convert: `<split>/*.parquet`.
        allow_unlicensed: also what no licence allows to pass on; conditions are printed in any case.
        absolute: image paths from the root of this machine; else as the samples have them.

    Raises:
        DataError: there are no samples, or a licence does not allow to pass a dataset on.
    """
    shards = {split: sorted((mixture / split).glob("*.parquet")) for split in SPLITS}
    if not any(shards.values()):
        raise DataError(f"{mixture}: holds no samples; run `m3diff convert` first")
    names: set[str] = set()
    for shard in (shard for found in shards.values() for shard in found):
        with readable(shard):
            names |= set(pl.read_parquet(shard, columns=["dataset"])["dataset"])
    specs = {name: spec_of(name, entries) for name in sorted(names)}
    print("".join(f"{notice}\n" for notice in licence_notices(specs, ["redistribute"], allow_unlicensed)), end="")
    out.mkdir(parents=True, exist_ok=True)
    root = Path.cwd() if absolute else None
    written = {split: _write(found, out / f"{split}.json", root) for split, found in shards.items() if found}
    form = {"formatting": "sharegpt", "columns": {"messages": "conversations", "images": "images"}}
    info = {f"m3diff_{split}": {"file_name": f"{split}.json", **form} for split in written}
    (out / "dataset_info.json").write_text(json.dumps(info, indent=2) + "\n", "utf-8")
    return written


def _write(shards: list[Path], path: Path, root: Path | None) -> int:
    """Write an array with one record a line."""
    count = 0
    with path.open("w", encoding="utf-8", newline="\n") as file:
        for shard in progress(shards, f"export {path.name}", total=len(shards), unit="shard"):
            samples = pl.read_parquet(shard).filter(pl.col("reference") != "")
            for record in samples.select(_record(root)).write_ndjson().split("\n")[:-1]:
                file.write((",\n" if count else "[\n") + record)
                count += 1
        file.write("\n]\n" if count else "[]\n")
    return count


def _record(root: Path | None) -> list[pl.Expr]:
    """A sample as a record; relative image paths below `root`, where there is one."""
    human = pl.struct(pl.lit("human").alias("from"), pl.format("<image><image>\n{}", "question").alias("value"))
    model = pl.struct(pl.lit("gpt").alias("from"), pl.col("reference").alias("value"))
    images = pl.concat_list("before", "after")
    if root is not None:
        images = images.list.eval(pl.element().map_elements(lambda name: str(root / name), return_dtype=pl.String))
    return [
        pl.col("id"),
        images.alias("image"),
        images.alias("images"),
        pl.concat_list(human, model).alias("conversations"),
        pl.struct("dataset", "split").alias("metadata"),
    ]
