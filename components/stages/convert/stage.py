"""convert: clean records -> question-answer samples, deterministic for a seed, in Parquet shards grouped by pair.

Validation and test keep every pair and every reference, empty ones too. Training leaves out empty references and
repeats within a pair, samples at most `references_per_pair` of the rest, and thins no-change pairs. All references of a
pair share one question, so that they can be packed behind one prefix.

Random numbers depend on the seed and an id alone. Neither other records nor a library's version change them, which the
hashes of polars and Python do not promise.

Each split has a folder of its own: training depends on `train` and `val`, prediction on `test` alone.
"""

import hashlib
import shutil
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import numpy as np
import polars as pl
import pyarrow.parquet as pq
import yaml
from numpy.typing import NDArray
from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from m3diff.datasets import DATASETS
from m3diff.records.errors import DataError
from m3diff.records.files import StageReport
from m3diff.records.schemas import NO_CHANGE, RECORD_SCHEMA, SAMPLE_SCHEMA, SPLITS, load_table
from m3diff.settings.section import ParamsError
from m3diff.stages.convert.params import Convert, Source
from m3diff.stages.ingest.params import DatasetEntry

COLUMNS = [*SAMPLE_SCHEMA.names, "order"]

# M3Diff's training mixture, as the paper prints it (section 5.2): "145k pairs and 896k question-answer samples"
SAMPLES = 896_000

# Its datasets, by the names that `profiles/paper.yaml` gives them. The paper's table of the counts by source is not
# known to us. What is known: the official splits of each source; train and val together come to 145k pairs
SOURCES = ("omnidiff_real", "omnidiff_render", "spot_the_diff", "iedit", "birds_to_words", "clevr_change", "clevr_dc")

# The numbers of an id's key, by the decision that each takes
QUESTION, NO_CHANGE_KEPT, EXTRA_COPY, MAX_PAIRS, ORDER, REFERENCE = range(6)

SHARD_SAMPLES = 100_000
ROW_GROUP = 16_384  # small enough that a reader of one pair unpacks little, large enough to compress well

IMAGE = "<image>"  # the place of an image in a prompt, which a question would give a second one

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
    published: dict[str, dict[str, tuple[int, int | None]]]  # `training_counts`, where the datasets are the paper's


def convert(cfg: Convert, entries: Mapping[str, DatasetEntry], clean: Path, out: Path) -> ConvertReport:
    """Write `out/{train,val,test}/NNNNN.parquet` (SAMPLE_SCHEMA) and `out/report.json`.

    A split without a sample has an empty folder.

    Args:
        entries: the datasets of the run; their readers tell what their pairs are asked.

    Raises:
        DataError: the clean records cannot be used.
        ParamsError: the file of questions cannot be used.
    """
    path = clean / "records.parquet"
    empty = ", all are in quarantine.parquet beside it; fix the data"
    records = pl.DataFrame(load_table(path, RECORD_SCHEMA, "validate", empty))
    if foreign := set(records["dataset"]) - entries.keys():
        raise DataError(
            f"{path}: has records of {', '.join(sorted(foreign))}, not in ingest.datasets; run `m3diff validate` again"
        )
    names = records["dataset"].unique().sort().to_list()
    questions = load_questions(cfg.questions)
    keyed = records.with_row_index("row").with_columns(id_keys(cfg.seed, records["id"]))
    parts, counts = [], {}
    for name in names:
        pairs, source = keyed.filter(dataset=name), cfg.sources.get(name, Source())
        asked = questions[source.task or DATASETS[entries[name].reader].task]
        train, others = pairs.filter(split="train"), pairs.filter(pl.col("split") != "train")
        if not entries[name].train_on:  # it may have a training split all the same
            source = Source(weight=0)
        training, left_out = training_samples(train, asked, source, cfg)
        part = pl.concat([training, evaluation_samples(others, asked)])
        by_split = {split: part.filter(split=split)["pair"] for split in SPLITS}
        counts[name] = ConvertCounts(
            pairs={split: used.n_unique() for split, used in by_split.items()},
            samples={split: used.len() for split, used in by_split.items()},
            left_out=left_out,
        )
        parts.append(part)
    samples = pl.concat(parts)
    for split in SPLITS:
        _write_shards(samples.filter(split=split), out / split)
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


def evaluation_samples(pairs: pl.DataFrame, questions: list[str]) -> pl.DataFrame:
    """Every reference of every pair, empty ones too, in the records' order; COLUMNS."""
    asked = pairs.with_columns(question=pl.lit(questions[0]), order=pl.col("row").cast(pl.UInt64))
    return _samples(_explode(asked.with_columns(copy=pl.lit(0))))


def training_samples(
    pairs: pl.DataFrame, questions: list[str], source: Source, cfg: Convert
) -> tuple[pl.DataFrame, dict[str, int]]:
    """Samples of the pairs that are sampled, pairs in shuffled order (COLUMNS), and counts of what is left out: pairs,
    and references of the pairs that were sampled."""
    sampled = _sample_pairs(pairs, source, cfg.no_change_share)
    # one question a pair: its references can then share a prefix
    chosen = random_bits(sampled["key"], QUESTION) % len(questions)
    references = _explode(sampled.with_columns(question=pl.Series(questions, dtype=pl.String).gather(chosen)))
    full = references.filter(pl.col("reference") != "")
    distinct = full.filter(pl.struct("row", "copy", "reference").is_first_distinct())
    if joined := source.samples == "joined":  # all references of a pair are the sentences of one
        sentence = pl.col("reference").str.strip_suffix(".").str.join(". ") + "."
        others = pl.all().exclude("reference", "row", "copy", "number").first()
        kept = distinct.group_by("row", "copy", maintain_order=True).agg(sentence, others, number=pl.lit(0).first())
    else:
        kept = _cap(distinct, cfg.most_references(source))
    return _samples(kept), {
        "pairs_not_sampled": pairs.height - sampled["row"].n_unique(),
        "pairs_without_reference": sampled["row"].n_unique() - kept["row"].n_unique(),
        "empty_references": references.height - full.height,
        "repeated_references": full.height - distinct.height,
        "references_over_cap": 0 if joined else distinct.height - kept.height,
    }


def _sample_pairs(pairs: pl.DataFrame, source: Source, no_change_share: float) -> pl.DataFrame:
    """The pairs that train, each as often as its weight says (`copy` counts from 0), with their shuffled `order`."""
    no_change = pairs["change_types"].list.contains(NO_CHANGE).to_numpy()
    thinned = no_change & (uniform(random_bits(pairs["key"], NO_CHANGE_KEPT)) >= no_change_share)
    whole, part = divmod(source.weight, 1)
    copies = whole + (uniform(random_bits(pairs["key"], EXTRA_COPY)) < part)
    rank = random_bits(pairs["key"], MAX_PAIRS)
    kept = pairs.with_columns(copies=pl.Series(np.where(thinned, 0, copies)), rank=rank).filter(pl.col("copies") > 0)
    if source.max_pairs is not None:
        kept = kept.sort("rank", "id").head(source.max_pairs)
    repeated = kept.with_columns(copy=pl.int_ranges(pl.col("copies").cast(pl.Int64))).explode("copy")
    return repeated.with_columns(order=random_bits(random_bits(repeated["key"], ORDER), repeated["copy"]))


def _explode(pairs: pl.DataFrame) -> pl.DataFrame:
    numbered = pairs.with_columns(number=pl.int_ranges(pl.col("references").list.len().cast(pl.Int64)))
    return numbered.explode("references", "number").rename({"references": "reference"})


def _cap(references: pl.DataFrame, most: int | None) -> pl.DataFrame:
    if most is None:
        return references
    bits = random_bits(random_bits(references["key"], REFERENCE), references["number"] + 2**32 * references["copy"])
    place = pl.col("bits").rank("ordinal").over("row", "copy")
    return references.with_columns(bits=bits).filter(place <= most).drop("bits")


def _samples(references: pl.DataFrame) -> pl.DataFrame:
    """COLUMNS, the samples of a pair side by side; a pair's second use has an id of its own."""
    use = pl.when(pl.col("copy") > 0).then(pl.format("x{}", "copy")).otherwise(pl.lit(""))
    return (
        references.sort("order", "row", "copy", "number")
        .with_columns(id=pl.format("{}#{}{}", "id", "number", use), pair="id")
        .select(COLUMNS)
    )


def id_keys(seed: int, ids: Iterable[str]) -> pl.Series:
    """64 bits per id, from blake2b keyed by the seed; UInt64 [ids]."""
    hasher = hashlib.blake2b(digest_size=8, key=str(seed).encode())
    digests = []
    for name in ids:
        one = hasher.copy()
        one.update(name.encode())
        digests.append(one.digest())
    return pl.Series("key", np.frombuffer(b"".join(digests), dtype="<u8"), dtype=pl.UInt64)


def random_bits(keys: pl.Series, number: pl.Series | int) -> pl.Series:
    """Independent 64 bits per key and number: the finalizer of splitmix64 (Steele et al., OOPSLA 2014)."""
    with np.errstate(over="ignore"):
        z = keys.to_numpy() + (np.asarray(number, dtype=np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return pl.Series(z ^ (z >> np.uint64(31)), dtype=pl.UInt64)


def uniform(bits: pl.Series) -> NDArray[np.float64]:
    """64 bits as a number in [0, 1)."""
    return (bits.to_numpy() >> np.uint64(11)).astype(np.float64) / 2.0**53


def training_counts() -> dict[str, dict[str, tuple[int, int | None]]]:
    """Return of each of SOURCES the published `train` and `train_val` (both together) pairs and references with words.

    References are counted, else by the pairs' share of the dataset's published sum to the nearest ten (CLEVR-Change's
    paper gives 493,735 captions in all and none by split), else None (of CLEVR-DC's no count is published).
    """
    specs = {part.part: (spec.references, part) for spec in DATASETS.values() for part in spec.published}
    found: dict[str, dict[str, tuple[int, int | None]]] = {}
    for name in SOURCES:
        total, part = specs[name]
        for splits, counts in (("train", (part.train,)), ("train_val", (part.train, part.val))):
            pairs = sum(count.pairs for count in counts)
            counted = [count.references - count.empty for count in counts if count.references is not None]
            references = sum(counted) if len(counted) == len(counts) else None
            if references is None and total is not None:
                references = 10 * round(total * pairs / sum(part.pairs().values()) / 10)
            found.setdefault(name, {})[splits] = (pairs, references)
    return found
