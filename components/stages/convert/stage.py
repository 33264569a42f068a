"""convert: clean records -> question-answer samples, deterministic for a seed, in Parquet shards grouped by pair.

Validation and test keep every pair and every reference, empty ones too. Training leaves out empty references and
repeats within a pair, samples at most `references_per_pair` of the rest, and thins no-change pairs. All references of a
pair share one question, so that they can be packed behind one prefix.

Each split has a folder of its own: training depends on `train` and `val`, prediction on `test` alone.
"""

import shutil
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import numpy as np
import polars as pl
import pyarrow.parquet as pq
import yaml
from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from m3diff.datasets import DATASETS
from m3diff.records.errors import DataError
from m3diff.records.files import StageReport
from m3diff.records.schemas import RECORD_SCHEMA, SAMPLE_SCHEMA, SPLITS
from m3diff.records.tables import load_table
from m3diff.settings.section import ParamsError
from m3diff.stages.convert.mixture import SOURCES, evaluation_samples, id_keys, training_counts, training_samples
from m3diff.stages.convert.params import Convert, Source
from m3diff.stages.ingest.params import DatasetEntry

SHARD_SAMPLES = 100_000
ROW_GROUP = 16_384
"""Small enough that a reader of one pair unpacks little, large enough to compress well."""

NOTHING_TRAINS = Source(weight=0)
"""The source of a dataset whose `train_on` is empty, though it has a training split."""

IMAGE = "<image>"
"""The place of an image in a prompt, which a question would give a second one."""

Questions = TypeAdapter(dict[str, Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)]])


class ConvertCounts(BaseModel):
    """Counts of a dataset: pairs and samples by split, and what training left out."""

    pairs: dict[str, int]
    samples: dict[str, int]
    left_out: dict[str, int]


class ConvertReport(StageReport):
    pairs: dict[str, int]
    samples: dict[str, int]
    datasets: dict[str, ConvertCounts]
    published: dict[
        str, dict[str, tuple[int, int | None]]
    ]  # `training_counts`; empty unless the datasets are the paper's


def convert(cfg: Convert, entries: Mapping[str, DatasetEntry], clean: Path, out: Path) -> ConvertReport:
    """Write `out/{train,val,test}/NNNNN.parquet` (SAMPLE_SCHEMA) and `out/report.json`.

    A split without a sample has an empty folder.

    Args:
        entries: the datasets of the run; their readers tell what their pairs are asked.

    Raises:
        DataError: the clean records cannot be used.
        ParamsError: `convert.sources` names no dataset of the run, or a task without questions.
    """
    path = clean / "records.parquet"
    records = load_table(path, RECORD_SCHEMA, "validate", ", all are in quarantine.parquet beside it; fix the data")
    if foreign := set(records["dataset"]) - entries.keys():
        raise DataError(
            f"{path}: has records of {', '.join(sorted(foreign))}, not in ingest.datasets; run `m3diff validate` again"
        )
    names = records["dataset"].unique().sort().to_list()
    questions = _questions_by_dataset(cfg, entries)
    keyed = records.with_row_index("row").with_columns(id_keys(cfg.seed, records["id"]))
    parts, counts = [], {}
    for name in names:
        pairs = keyed.filter(pl.col("dataset") == name)
        source = cfg.sources.get(name, Source()) if entries[name].train_on else NOTHING_TRAINS
        part, counts[name] = _convert_one(pairs, questions[name], source, cfg)
        parts.append(part)
    samples = pl.concat(parts)
    for split in SPLITS:
        _write_shards(samples.filter(pl.col("split") == split), out / split)
    return ConvertReport(
        stage="convert",
        rows_in=records.height,
        rows_out=samples.height,
        pairs={split: sum(count.pairs[split] for count in counts.values()) for split in SPLITS},
        samples={split: sum(count.samples[split] for count in counts.values()) for split in SPLITS},
        datasets=counts,
        published={name: training_counts()[name] for name in names} if set(SOURCES) == set(names) else {},
    ).write(out / "report.json")


def load_questions(path: Path) -> dict[str, list[str]]:
    """Return the questions by task.

    Raises:
        ParamsError: the file is missing, no YAML, or not lists of questions by task, or a question has the mark of an
            image's place.
    """
    try:
        questions = Questions.validate_python(yaml.safe_load(path.read_text("utf-8")))
    except (OSError, UnicodeDecodeError, yaml.YAMLError, ValidationError) as error:
        raise ParamsError(f"convert.questions {path}: expected questions by task: {error}") from error
    if marked := [question for asked in questions.values() for question in asked if IMAGE in question]:
        raise ParamsError(
            f"convert.questions {path}: {marked[0]!r} has {IMAGE}, the mark of an image's place in a prompt; write it "
            "without: both images come before the question by themselves"
        )
    return questions


def _questions_by_dataset(cfg: Convert, entries: Mapping[str, DatasetEntry]) -> dict[str, list[str]]:
    """Raises ParamsError naming every source without a dataset and every task without questions."""
    by_task = load_questions(cfg.questions)
    tasks = {
        name: cfg.sources.get(name, Source()).task or DATASETS[entry.reader].task for name, entry in entries.items()
    }
    faults = [f"{name}: no such dataset; there are {', '.join(entries)}" for name in cfg.sources if name not in entries]
    faults += [
        f"{name}: no questions for task {task!r}; there are {', '.join(by_task)}"
        for name, task in tasks.items()
        if task not in by_task
    ]
    if faults:
        raise ParamsError("\n  ".join(["convert.sources:", *faults]))
    return {name: by_task[task] for name, task in tasks.items()}


def _convert_one(
    pairs: pl.DataFrame, questions: list[str], source: Source, cfg: Convert
) -> tuple[pl.DataFrame, ConvertCounts]:
    trains = pl.col("split") == "train"
    training, left_out = training_samples(pairs.filter(trains), questions, source, cfg)
    samples = pl.concat([training, evaluation_samples(pairs.filter(~trains), questions)])
    by_split = {split: samples.filter(pl.col("split") == split)["pair"] for split in SPLITS}
    return samples, ConvertCounts(
        pairs={split: pairs.n_unique() for split, pairs in by_split.items()},
        samples={split: pairs.len() for split, pairs in by_split.items()},
        left_out=left_out,
    )


def _write_shards(samples: pl.DataFrame, folder: Path) -> None:
    """A new folder with shards of about SHARD_SAMPLES, cut between pairs; none for no sample."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    rows = np.argsort(samples["order"].to_numpy(), kind="stable")
    order = samples["order"].gather(rows).to_numpy()
    ends = np.append(np.flatnonzero(order[1:] != order[:-1]) + 1, len(order))
    cuts = np.unique([0, *ends[np.searchsorted(ends, np.arange(SHARD_SAMPLES, len(order), SHARD_SAMPLES))], len(order)])
    for number, (start, end) in enumerate(pairwise(cuts)):  # one shard at a time: a sorted copy of all would double it
        shard = samples.select(SAMPLE_SCHEMA.names)[rows[start:end]].to_arrow().cast(SAMPLE_SCHEMA)
        pq.write_table(shard, folder / f"{number:05d}.parquet", compression="zstd", row_group_size=ROW_GROUP)
