"""convert: clean records -> question-answer samples, deterministic for a seed, in Parquet shards grouped by pair.

Validation and test keep every pair and every reference, empty ones too. Training leaves out empty captions and repeats
within a pair, draws at most `captions_per_pair` of the rest, and thins no-change pairs. All captions of a pair share
one question, so that they can be packed behind one prefix.
"""

import shutil
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from components.convert.sampling import id_keys
from components.convert.mixture import evaluation_samples, training_samples
from components.convert.params import Convert, Source
from components.section import ParamsError
from components.records import RECORD_SCHEMA, SAMPLE_SCHEMA, SPLITS, DataError
from components.reports import StageReport

SHARD_SAMPLES = 100_000
PUBLISHED = Path(__file__).parent / "published.yaml"
ROW_GROUP = 16_384
"""Small enough that a reader of one pair unpacks little, large enough to compress well."""


TASKS = TypeAdapter(dict[str, Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)]])


class Counts(BaseModel):
    """One dataset: pairs and samples by split, and what training left out."""

    pairs: dict[str, int]
    samples: dict[str, int]
    left_out: dict[str, int]


class Published(BaseModel):
    """Training pairs and captions that the papers give, train alone and with val; null where they give none."""

    train: tuple[int, int | None]
    train_val: tuple[int, int | None]


class ConvertReport(StageReport):
    pairs: dict[str, int]
    samples: dict[str, int]
    datasets: dict[str, Counts]
    published: dict[str, Published]  # by dataset; empty where the datasets are not the paper's


def convert(cfg: Convert, clean: Path, out: Path) -> ConvertReport:
    """Write `out/samples/{train,val,test}-NNNNN.parquet` (SAMPLE_SCHEMA) and `out/report.json`."""
    records = _load(clean / "records.parquet")
    names = records["dataset"].unique().sort().to_list()
    tasks = load_tasks(cfg.templates)
    _check_sources(cfg, tasks, names)
    keyed = records.with_row_index("row").with_columns(id_keys(cfg.seed, records["id"]))
    parts, counts = [], {}
    for name in names:
        pairs = keyed.filter(pl.col("dataset") == name)
        part, counts[name] = _convert_one(pairs, tasks, cfg.sources.get(name, Source()), cfg)
        parts.append(part)
    samples = pl.concat(parts)
    shutil.rmtree(out / "samples", ignore_errors=True)
    for split in SPLITS:
        _write_shards(samples.filter(pl.col("split") == split), split, out / "samples")
    report = ConvertReport(
        stage="convert",
        rows_in=records.height,
        rows_out=samples.height,
        pairs={split: sum(count.pairs[split] for count in counts.values()) for split in SPLITS},
        samples={split: sum(count.samples[split] for count in counts.values()) for split in SPLITS},
        datasets=counts,
        published=_published(names),
    ).write(out / "report.json")
    print_published(report)
    return report


def _published(names: list[str]) -> dict[str, Published]:
    """What the papers give, where all of the paper's datasets are here by their names."""
    training = yaml.safe_load(PUBLISHED.read_text("utf-8"))["training"]
    return {name: Published(**training[name]) for name in names} if set(training) == set(names) else {}


def print_published(report: ConvertReport) -> None:
    """Training pairs and samples of each source beside the published counts, and the sums beside 145k and 896k."""
    if not report.published:
        return
    print(f"{'training':16}{'pairs':>9}{'samples':>10}   {'published: train':>20}{'train and val':>20}")
    for name, given in report.published.items():
        found = report.datasets[name]
        told = [
            f"{pairs:,} / {f'{samples:,}' if samples else '?'}" for pairs, samples in (given.train, given.train_val)
        ]
        print(f"{name:16}{found.pairs['train']:9,}{found.samples['train']:10,}   {told[0]:>20}{told[1]:>20}")
    print(f"{'all':16}{report.pairs['train']:9,}{report.samples['train']:10,}   {'145k / 896k':>20}")


def load_tasks(path: Path) -> dict[str, list[str]]:
    """Questions by task.

    Raises:
        ParamsError: the file is missing, no YAML, or not lists of questions by task.
    """
    try:
        return TASKS.validate_python(yaml.safe_load(path.read_text("utf-8")))
    except (OSError, UnicodeDecodeError, yaml.YAMLError, ValidationError) as error:
        raise ParamsError(f"convert.templates {path}: expected questions by task: {error}") from error


def _load(path: Path) -> pl.DataFrame:
    try:
        schema, records = pq.read_schema(path), pl.read_parquet(path)
    except (OSError, pa.ArrowInvalid, pl.exceptions.PolarsError) as error:
        raise DataError(f"{path}: cannot be read: {error}; run `m3diff validate` again") from error
    if not schema.equals(RECORD_SCHEMA):
        raise DataError(f"{path}: not the columns that validate writes; run `m3diff validate` again")
    if not records.height:
        raise DataError(f"{path}: holds no record, all are in quarantine.parquet beside it; mend the data")
    return records


def _check_sources(cfg: Convert, tasks: dict[str, list[str]], datasets: list[str]) -> None:
    """Raises ParamsError naming every source without a dataset and every task without questions."""
    faults = [
        f"{name}: no such dataset; there are {', '.join(datasets)}" for name in cfg.sources if name not in datasets
    ]
    for name in datasets:
        if (task := cfg.sources.get(name, Source()).task) not in tasks:
            faults.append(f"{name}: no questions for task {task!r}; there are {', '.join(tasks)}")
    if faults:
        raise ParamsError("\n  ".join(["convert.sources:", *faults]))


def _convert_one(
    pairs: pl.DataFrame, tasks: dict[str, list[str]], source: Source, cfg: Convert
) -> tuple[pl.DataFrame, Counts]:
    questions = tasks[source.task]
    trains = pl.col("split") == "train"
    training, left_out = training_samples(pairs.filter(trains), questions, source, cfg)
    samples = pl.concat([training, evaluation_samples(pairs.filter(~trains), questions)])
    by_split = {
        row[0]: row[1:] for row in samples.group_by("split").agg(pl.len(), pl.col("pair").n_unique()).iter_rows()
    }
    counted = {split: by_split.get(split, (0, 0)) for split in SPLITS}
    return samples, Counts(
        pairs={split: pair_count for split, (_, pair_count) in counted.items()},
        samples={split: sample_count for split, (sample_count, _) in counted.items()},
        left_out=left_out._asdict(),
    )


def _write_shards(samples: pl.DataFrame, split: str, folder: Path) -> None:
    """Shards of about SHARD_SAMPLES, cut between pairs; none for an empty split (`datasets` reads no empty one)."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = np.argsort(samples["order"].to_numpy(), kind="stable")
    order = samples["order"].gather(rows).to_numpy()
    ends = np.append(np.flatnonzero(order[1:] != order[:-1]) + 1, len(order))
    cuts = np.unique([0, *ends[np.searchsorted(ends, np.arange(SHARD_SAMPLES, len(order), SHARD_SAMPLES))], len(order)])
    for number, (start, end) in enumerate(pairwise(cuts)):  # one shard at a time: a sorted copy of all would double it
        shard = samples.select(SAMPLE_SCHEMA.names)[rows[start:end]].to_arrow().cast(SAMPLE_SCHEMA)
        pq.write_table(shard, folder / f"{split}-{number:05d}.parquet", compression="zstd", row_group_size=ROW_GROUP)
