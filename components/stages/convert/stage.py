"""Stage `convert`: turn clean records into question-answer samples in Parquet shards.

A sample has one question and one answer. The samples of an image set are consecutive, so that training can process its
images once for all of its questions, and an image set is used or left out with all of its questions. The same seed
gives the same samples. The validation and test splits keep every record and every reference, even empty ones. The
training split omits empty and repeated references of a record, draws at most `references_per_question` of the remaining
references, and keeps only a share of the pairs without a change. Captions have no question of their own. They are
answers to one of the questions of the dataset's task, which is the same for all captions of a pair.

Random numbers depend only on the seed and an id, not on other records or the version of a library. The hash functions
of polars and Python do not guarantee that, so this module implements a hash function.

The samples of a dataset with `couple` are marked in an additional column, from which training makes the couples of each
epoch (see `records/schemas.py`).

Each split has a separate folder, so that DVC can track that training depends on `train` and `val`, and prediction on
`test`. The test split of datasets with the role `retention` is in a folder of its own, because the base answers it,
too.
"""

import hashlib
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import IntEnum
from itertools import chain
from pathlib import Path
from typing import Annotated

import numpy as np
import polars as pl
import pyarrow as pa
import yaml
from numpy.typing import NDArray
from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from m3diff.datasets import DATASETS
from m3diff.datasets.spec import SplitCount
from m3diff.records.errors import DataError, ParamsError, cause_of, format_count
from m3diff.records.files import StageReport
from m3diff.records.sample import IMAGE_MARK
from m3diff.records.schemas import (
    COUPLE_QUESTION,
    COUPLED_SAMPLE_SCHEMA,
    NO_CHANGE,
    RECORD_SCHEMA,
    RETENTION,
    SAMPLE_SCHEMA,
    SPLITS,
)
from m3diff.records.tables import iterate_parts, load_table, part_bounds, part_paths, write_parts
from m3diff.stages.convert.params import Convert, MixtureSource
from m3diff.stages.ingest.params import DatasetEntry

# Images and turns of a record. A sample refers to them by the `row` of its record until it is written, to save memory
NESTED_COLUMNS = ["images", "history"]
COLUMNS = [*(name for name in SAMPLE_SCHEMA.names if name not in NESTED_COLUMNS), "row", "order"]

# Size of M3Diff's training mixture according to the paper (section 5.2): "145k pairs and 896k question-answer samples"
PAPER_SAMPLES = 896_000

# Datasets of the paper's mixture, by their names in `profiles/paper.yaml`. The paper does not give counts per dataset.
# The official training and validation splits of these datasets add up to the paper's 145k pairs
PAPER_DATASETS = (
    "omnidiff_real",
    "omnidiff_render",
    "spot_the_diff",
    "iedit",
    "birds_to_words",
    "clevr_change",
    "clevr_dc",
)


class Draw(IntEnum):
    """Numbers that identify the random draws for an id. Draws with different numbers are independent."""

    QUESTION = 0
    NO_CHANGE_PAIR = 1
    EXTRA_COPY = 2
    MAX_PAIRS = 3
    ORDER = 4
    REFERENCE = 5


SHARD_SAMPLES = 100_000

Questions = TypeAdapter(dict[str, Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)]])


class ConvertCounts(BaseModel):
    """Counts of one dataset.

    Attributes:
        pairs: number of image sets per split. Several questions about a pair count once.
        samples: number of samples per split.
        left_out: number of training pairs and references that are left out, by reason. A question without a usable
            answer counts as a pair without a reference. `val_pairs_of_retention` counts validation pairs.
        samples_by_kind: number of training samples by kind of question. This and the next two fields are left out of
            the report if the dataset consists of captions.
        samples_by_images: number of training samples by their number of images.
        samples_by_turns: number of training samples by their number of turns.
        couples: number of couples that training makes in each epoch. It is left out of the report if it is 0.
    """

    pairs: dict[str, int]
    samples: dict[str, int]
    left_out: dict[str, int]
    samples_by_kind: dict[str, int] = Field(default={}, exclude_if=operator.not_)
    samples_by_images: dict[str, int] = Field(default={}, exclude_if=operator.not_)
    samples_by_turns: dict[str, int] = Field(default={}, exclude_if=operator.not_)
    couples: int = Field(default=0, exclude_if=operator.not_)


class ConvertReport(StageReport):
    """The stage's report.json.

    Attributes:
        pairs: number of image sets per split.
        samples: number of samples per split.
        datasets: counts per dataset.
        published: `published_mixture_counts` if the mixture consists of exactly the paper's datasets, otherwise empty.
    """

    pairs: dict[str, int]
    samples: dict[str, int]
    datasets: dict[str, ConvertCounts]
    published: dict[str, dict[str, tuple[int, int | None]]]


def convert(cfg: Convert, entries: Mapping[str, DatasetEntry], clean: Path, out: Path) -> ConvertReport:
    """Write `out/{train,val,test,retention}/NNNNN.parquet` (SAMPLE_SCHEMA) and `out/report.json`.

    The folder of a split without samples is empty.

    Args:
        cfg: the section `convert`.
        entries: the datasets of the run. A dataset's reader determines its task, and thereby the questions, unless
            `cfg.sources` sets a task for the dataset.
        clean: folder with the clean records that validate wrote.
        out: folder to write to.

    Raises:
        DataError: the clean records cannot be used.
        ParamsError: the file of questions cannot be used.
    """
    records = _load_records(clean / "records", entries)
    names = records["dataset"].unique().sort().to_list()
    questions = load_questions(cfg.questions)
    pairs = records.drop(NESTED_COLUMNS).with_row_index("row").hstack(draw_keys(cfg.seed, records))
    images_and_turns = records.select(
        "question", "kind", images=pl.col("images").list.len(), turns=pl.col("history").list.len() + 1
    )
    samples_by_dataset = []
    counts = {}
    for name in names:
        source = cfg.sources.get(name, MixtureSource())
        task = source.task_for(DATASETS[entries[name].reader].task)
        if not entries[name].train_on:  # do not train on this dataset, even if its files contain a training split
            source = MixtureSource(weight=0)
        if source.couple:
            require_single_images(name, records.filter(dataset=name, split="train"))
        pairs_of_dataset = pairs.filter(dataset=name)
        if entries[name].role == RETENTION:  # the validation split chooses the weights that are best for the task
            pairs_of_dataset = pairs_of_dataset.filter(pl.col("split") != "val")
        samples_of_dataset, omissions = _convert_dataset(pairs_of_dataset, questions[task], source, cfg)
        if entries[name].role == RETENTION:
            omissions["val_pairs_of_retention"] = pairs.filter(dataset=name, split="val")["image_set"].n_unique()
        counts[name] = _count_samples(samples_of_dataset, omissions, images_and_turns)
        samples_by_dataset.append(samples_of_dataset)
    # only the samples of a dataset with couples have the column COUPLE_QUESTION
    samples = pl.concat(samples_by_dataset, how="diagonal")
    retention_datasets = [name for name in names if entries[name].role == RETENTION]
    for name, samples_of_folder in samples_by_folder(samples, retention_datasets).items():
        _write_split(samples_of_folder, records.select(NESTED_COLUMNS), out / name)
    is_paper_mixture = set(PAPER_DATASETS) == set(names)
    published = {name: published_mixture_counts()[name] for name in names} if is_paper_mixture else {}
    return ConvertReport(
        stage="convert",
        rows_in=records.height,
        rows_out=samples.height,
        pairs={split: sum(count.pairs[split] for count in counts.values()) for split in SPLITS},
        samples={split: sum(count.samples[split] for count in counts.values()) for split in SPLITS},
        datasets=counts,
        published=published,
    ).write(out / "report.json")


def samples_by_folder(samples: pl.DataFrame, retention_datasets: Sequence[str]) -> dict[str, pl.DataFrame]:
    """Return the samples of each folder of the mixture: one per split, and one for the tests of retention datasets."""
    is_retention_test = (pl.col("split") == "test") & pl.col("dataset").is_in(retention_datasets)
    folders = {split: samples.filter((pl.col("split") == split) & ~is_retention_test) for split in SPLITS}
    return folders | {RETENTION: samples.filter(is_retention_test)}


def _convert_dataset(
    pairs: pl.DataFrame, questions: list[str], source: MixtureSource, cfg: Convert
) -> tuple[pl.DataFrame, dict[str, int]]:
    """Return all samples of a dataset, the training samples first, and counts of what is left out of training."""
    training_pairs = pairs.filter(split="train")
    evaluation_pairs = pairs.filter(pl.col("split") != "train")
    samples_for_training, omissions = training_samples(training_pairs, questions, source, cfg)
    samples_for_evaluation = evaluation_samples(evaluation_pairs, questions)
    return pl.concat([samples_for_training, samples_for_evaluation], how="diagonal"), omissions


def require_single_images(name: str, records: pl.DataFrame) -> None:
    """Check that all training records of a dataset with couples have one image and one turn.

    Raises:
        ParamsError: a record has another number of images, or earlier turns.
    """
    images = pl.col("images").list.len()
    turns = pl.col("history").list.len() + 1
    other_records = records.filter((images != 1) | (turns != 1))
    if other_records.is_empty():
        return
    counts = other_records.group_by(images=images, turns=turns).len("count").sort("images", "turns")
    kinds = [
        f"{format_count(row['images'], 'image')} and {format_count(row['turns'], 'turn')} ({row['count']:,})"
        for row in counts.iter_rows(named=True)
    ]
    raise ParamsError(
        "convert.records_cannot_be_coupled",
        key=f"convert.sources.{name}.couple",
        value=other_records.height,
        total=records.height,
        kinds=kinds,
        name=other_records["id"][0],
    )


def _count_samples(samples: pl.DataFrame, omissions: dict[str, int], records: pl.DataFrame) -> ConvertCounts:
    """Return the numbers of pairs and samples of a dataset per split.

    Args:
        samples: samples of the dataset.
        omissions: counts of what is left out of training.
        records: question, kind, and numbers of images and turns of all records. The `row` of a sample is the number of
            its record.
    """
    image_sets = {split: samples.filter(split=split)["image_set"] for split in SPLITS}
    couples = 0
    if COUPLE_QUESTION in samples.columns:
        # training starts a new image set wherever the name changes
        coupled_image_sets = samples.filter(split="train").sort("order")["image_set"]
        couples = coupled_image_sets.rle_id().n_unique() // 2
    return ConvertCounts(
        pairs={split: names.n_unique() for split, names in image_sets.items()},
        samples={split: names.len() for split, names in image_sets.items()},
        left_out=omissions,
        **_count_questions(samples.filter(split="train")["row"], records),
        couples=couples,
    )


def _count_questions(rows: pl.Series, records: pl.DataFrame) -> dict[str, dict[str, int]]:
    """Return the numbers of training samples by kind of question, images and turns, or no numbers if all are captions.

    Args:
        rows: the `row` of each training sample.
        records: see `_count_samples`.
    """
    if records["question"].gather(rows).null_count() == rows.len():
        return {}
    records_of_samples = records[rows]
    kinds = records_of_samples["kind"].fill_null("no kind").value_counts()
    kinds = kinds.sort(["count", "kind"], descending=[True, False])
    images = records_of_samples["images"].value_counts().sort("images")
    turns = records_of_samples["turns"].value_counts().sort("turns")
    return {
        "samples_by_kind": dict(kinds.iter_rows()),
        "samples_by_images": {format_count(number, "image"): count for number, count in images.iter_rows()},
        "samples_by_turns": {format_count(number, "turn"): count for number, count in turns.iter_rows()},
    }


def _load_records(path: Path, entries: Mapping[str, DatasetEntry]) -> pl.DataFrame:
    """Return the clean records, and check that all of them belong to datasets of the run."""
    records = pl.DataFrame(load_table(path, RECORD_SCHEMA, "validate", if_empty="convert.no_clean_record"))
    foreign_datasets = set(records["dataset"]) - entries.keys()
    if foreign_datasets:
        raise DataError("convert.foreign_datasets", path=path, names=sorted(foreign_datasets))
    return records


def require_test_pairs(mixture: Path, protocol: str) -> None:
    """Check before a training run that its model can be evaluated.

    A mixture without a folder `test` passes, because it may be on a machine that is only used for training.

    Args:
        mixture: folder that convert wrote.
        protocol: name of the protocol with which the gate scores models, as "<dataset>/<protocol>".

    Raises:
        DataError: the mixture contains no test pairs of the protocol's dataset.
    """
    folder = mixture / "test"
    dataset = protocol.partition("/")[0]
    if not folder.is_dir():
        return
    if part_paths(folder):
        for part in iterate_parts(folder, columns=["dataset"]):
            if dataset in part["dataset"].unique().to_pylist():
                return
    raise DataError("ingest.no_test_pair", path=folder, dataset=dataset, protocol=protocol)


def load_questions(path: Path) -> dict[str, list[str]]:
    """Read the questions from a YAML file and return them by task.

    Raises:
        ParamsError: the file is missing, is not valid YAML or does not list questions by task, or a question contains
            the placeholder for an image.
    """
    try:
        questions = Questions.validate_python(yaml.safe_load(path.read_text("utf-8")))
    except (OSError, UnicodeDecodeError, yaml.YAMLError, ValidationError) as error:
        raise ParamsError("convert.no_questions_by_task", path=path, cause=cause_of(error)) from error
    for question in chain.from_iterable(questions.values()):
        if IMAGE_MARK in question:
            raise ParamsError("convert.image_mark_in_question", path=path, value=question, mark=IMAGE_MARK)
    return questions


def _write_split(samples: pl.DataFrame, nested: pl.DataFrame, table: Path) -> None:
    """Write the samples of a split as a table. Each part has about SHARD_SAMPLES samples. Without samples, it is empty.

    Args:
        samples: samples with the columns in COLUMNS, and COUPLE_QUESTION if any are coupled.
        nested: NESTED_COLUMNS of all records, in the order of their `row`.
        table: folder of the split.
    """
    order = np.argsort(samples["order"].to_numpy(), kind="stable")
    has_couples = COUPLE_QUESTION in samples.columns and samples[COUPLE_QUESTION].null_count() < samples.height
    schema = COUPLED_SAMPLE_SCHEMA if has_couples else SAMPLE_SCHEMA

    # Gather one part at a time, because a sorted copy of all samples would double the memory
    def parts() -> Iterator[pa.Table]:
        for start, end in part_bounds(samples["image_set"].gather(order).to_arrow(), SHARD_SAMPLES):
            part = samples[order[start:end]]
            part = part.hstack(nested[part["row"]])
            yield part.select(schema.names).to_arrow().cast(schema)

    write_parts(parts(), table)


def evaluation_samples(pairs: pl.DataFrame, questions: list[str]) -> pl.DataFrame:
    """Return one sample per reference of every pair, including empty references, in the order of the records.

    The samples have the columns in COLUMNS.

    Args:
        pairs: records with their `row` and the columns of `draw_keys`.
        questions: questions of the task. Only the first is asked, where a record has no question of its own.
    """
    first_row_of_image_set = pl.col("row").min().over("image_set")
    pairs_with_question = pairs.with_columns(
        question=pl.coalesce("question", pl.lit(questions[0])),
        order=first_row_of_image_set.cast(pl.UInt64),
        copy=pl.lit(0),
    )
    return _to_samples(_one_row_per_reference(pairs_with_question))


def training_samples(
    pairs: pl.DataFrame, questions: list[str], source: MixtureSource, cfg: Convert
) -> tuple[pl.DataFrame, dict[str, int]]:
    """Return a dataset's training samples in shuffled order, and counts of the pairs and references that are left out.

    The samples have the columns in COLUMNS, and COUPLE_QUESTION if the source has couples.

    Args:
        pairs: records with their `row` and the columns of `draw_keys`.
        questions: questions of the task.
        source: settings of the dataset.
        cfg: the section `convert`.

    Returns:
        The samples, and counts of what is left out, by reason. The counts cover pairs, and references of sampled pairs.
    """
    sampled_pairs = _sample_pairs(pairs, source, cfg.no_change_share)
    # All references of a pair get the same question, so that they can share one prompt
    question_numbers = random_bits(sampled_pairs["image_set_key"], Draw.QUESTION) % len(questions)
    task_question = pl.Series(questions, dtype=pl.String).gather(question_numbers)
    pairs_with_question = sampled_pairs.with_columns(question=pl.coalesce("question", pl.lit(task_question)))
    if source.couple:
        pairs_with_question = pairs_with_question.with_columns(task_question.alias(COUPLE_QUESTION))
    references = _one_row_per_reference(pairs_with_question)
    nonempty_references = references.filter(pl.col("answer") != "")
    is_first_occurrence = pl.struct("row", "copy", "answer").is_first_distinct()
    distinct_references = nonempty_references.filter(is_first_occurrence)
    if source.samples == "joined":
        answers = _join_references(distinct_references)
        references_over_cap = 0
    else:
        answers = _sample_references(distinct_references, cfg.most_references(source))
        references_over_cap = distinct_references.height - answers.height
    omissions = {
        "pairs_not_sampled": pairs["image_set"].n_unique() - sampled_pairs["image_set"].n_unique(),
        "pairs_without_reference": sampled_pairs["row"].n_unique() - answers["row"].n_unique(),
        "empty_references": references.height - nonempty_references.height,
        "repeated_references": nonempty_references.height - distinct_references.height,
        "references_over_cap": references_over_cap,
    }
    return _to_samples(answers), omissions


def _join_references(references: pl.DataFrame) -> pl.DataFrame:
    """Return one row per copy of a pair. All references of the pair are joined into one text, as sentences."""
    joined_text = pl.col("answer").str.strip_suffix(".").str.join(". ") + "."
    other_columns = pl.all().exclude("answer", "row", "copy", "number").first()
    number = pl.lit(0).first()
    return references.group_by("row", "copy", maintain_order=True).agg(joined_text, other_columns, number=number)


def _sample_pairs(pairs: pl.DataFrame, source: MixtureSource, no_change_share: float) -> pl.DataFrame:
    """Return the pairs to train on, one row per copy.

    The dataset's weight determines the number of copies. The column `copy` numbers the copies of a pair from 0, and the
    column `order` contains random numbers. Sorting by `order` shuffles the rows.
    """
    has_no_change = pairs["change_types"].list.contains(NO_CHANGE).to_numpy()
    no_change_draw = uniform(random_bits(pairs["image_set_key"], Draw.NO_CHANGE_PAIR))
    is_left_out = has_no_change & (no_change_draw >= no_change_share)
    full_copies, extra_copy_share = divmod(source.weight, 1)
    extra_copy_draw = uniform(random_bits(pairs["image_set_key"], Draw.EXTRA_COPY))
    has_extra_copy = extra_copy_draw < extra_copy_share
    copies = pl.Series(np.where(is_left_out, 0, full_copies + has_extra_copy))
    rank = random_bits(pairs["image_set_key"], Draw.MAX_PAIRS)
    training_pairs = pairs.with_columns(copies=copies, rank=rank).filter(pl.col("copies") > 0)
    if source.max_pairs is not None:
        image_sets = training_pairs.select("rank", "image_set").unique().sort("rank", "image_set")
        training_pairs = training_pairs.join(image_sets.head(source.max_pairs), on="image_set", how="semi")
    copy_numbers = pl.int_ranges(pl.col("copies").cast(pl.Int64))
    pair_copies = training_pairs.with_columns(copy=copy_numbers).explode("copy")
    order = random_bits(random_bits(pair_copies["image_set_key"], Draw.ORDER), pair_copies["copy"])
    return pair_copies.with_columns(order=order)


def _one_row_per_reference(pairs: pl.DataFrame) -> pl.DataFrame:
    """Return one row per reference of each pair. The column `number` counts the references of a pair from 0."""
    reference_numbers = pl.int_ranges(pl.col("references").list.len().cast(pl.Int64))
    return pairs.with_columns(number=reference_numbers).explode("references", "number").rename({"references": "answer"})


def _sample_references(references: pl.DataFrame, limit: int | None) -> pl.DataFrame:
    """Draw at most `limit` references per copy of a pair. If `limit` is None, return all references."""
    if limit is None:
        return references
    copy_and_number = references["number"] + 2**32 * references["copy"]
    bits = random_bits(random_bits(references["record_key"], Draw.REFERENCE), copy_and_number)
    rank = pl.col("bits").rank("ordinal").over("row", "copy")
    return references.with_columns(bits=bits).filter(rank <= limit).drop("bits")


def _to_samples(references: pl.DataFrame) -> pl.DataFrame:
    """Convert references to samples with the columns in COLUMNS. The samples of a pair are consecutive.

    If a pair is used several times, the ids of the second copy end in `x1`, those of the third in `x2`, and so on.
    """
    copy_suffix = pl.when(pl.col("copy") > 0).then(pl.format("x{}", "copy")).otherwise(pl.lit(""))
    return (
        references.sort("order", "row", "copy", "number")
        .with_columns(id=pl.format("{}#{}{}", "id", "number", copy_suffix), record="id")
        .select(*COLUMNS, *(name for name in references.columns if name == COUPLE_QUESTION))
    )


def draw_keys(seed: int, records: pl.DataFrame) -> pl.DataFrame:
    """Return the keys of the random draws for each record: `image_set_key` and `record_key`.

    Whether, how often and where an image set is trained on is drawn for all of its records together, so they share a
    key. References are drawn for each record. The two keys of a record without a question of its own are equal.
    """
    image_set_key = id_keys(seed, records["image_set"])
    has_own_ids = not records["id"].equals(records["image_set"])
    record_key = id_keys(seed, records["id"]) if has_own_ids else image_set_key
    return pl.DataFrame({"image_set_key": image_set_key, "record_key": record_key})


def id_keys(seed: int, ids: Iterable[str]) -> pl.Series:
    """Return a 64-bit hash of each id as a series of UInt64. The hash is BLAKE2b, with the seed as its key."""
    keyed_hash = hashlib.blake2b(digest_size=8, key=str(seed).encode())
    digests = []
    for sample_id in ids:
        id_hash = keyed_hash.copy()
        id_hash.update(sample_id.encode())
        digests.append(id_hash.digest())
    return pl.Series("key", np.frombuffer(b"".join(digests), dtype="<u8"), dtype=pl.UInt64)


def random_bits(keys: pl.Series, number: pl.Series | int) -> pl.Series:
    """Return 64 random bits for each combination of a key and a number.

    The bits are computed by the finalizer of splitmix64 (Steele et al., OOPSLA 2014).

    Args:
        keys: keys as UInt64.
        number: a single number for all keys, or a series with one number per key.
    """
    with np.errstate(over="ignore"):
        numbers = np.asarray(number, dtype=np.uint64) + np.uint64(1)
        bits = keys.to_numpy() + numbers * np.uint64(0x9E3779B97F4A7C15)
        bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return pl.Series(bits ^ (bits >> np.uint64(31)), dtype=pl.UInt64)


def uniform(bits: pl.Series) -> NDArray[np.float64]:
    """Convert each value of 64 random bits to a number in [0, 1)."""
    return (bits.to_numpy() >> np.uint64(11)).astype(np.float64) / 2.0**53


def published_mixture_counts() -> dict[str, dict[str, tuple[int, int | None]]]:
    """Return how many pairs and non-empty references each dataset in PAPER_DATASETS has according to its paper.

    Returns:
        For each dataset, the counts of pairs and references for `train` and for `train_val` (the training and
        validation splits together). Some papers give only a total number of references, such as 493,735 for
        CLEVR-Change. The number per split is then estimated from the share of pairs and rounded to the nearest ten. If
        a paper does not count references at all, as for CLEVR-DC, the number is None.
    """
    published_counts = {}
    total_references = {}
    for spec in DATASETS.values():
        for part in spec.published:
            published_counts[part.part] = part
            total_references[part.part] = spec.references
    counts: dict[str, dict[str, tuple[int, int | None]]] = {}
    for name in PAPER_DATASETS:
        part = published_counts[name]
        total_pairs = sum(part.pairs().values())
        counts[name] = {
            "train": _count_references([part.train], total_references[name], total_pairs),
            "train_val": _count_references([part.train, part.val], total_references[name], total_pairs),
        }
    return counts


def _count_references(
    splits: Sequence[SplitCount], total_references: int | None, total_pairs: int
) -> tuple[int, int | None]:
    """Return the total numbers of pairs and non-empty references in the given splits.

    If the number of references is not published per split, it is estimated from the totals of the dataset. The number
    is None if no total is published either.
    """
    pairs = sum(split.pairs for split in splits)
    references = [split.references - split.empty for split in splits if split.references is not None]
    if len(references) == len(splits):
        return pairs, sum(references)
    if total_references is None:
        return pairs, None
    return pairs, 10 * round(total_references * pairs / total_pairs / 10)
