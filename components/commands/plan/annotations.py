"""Create training samples from the annotation files of datasets that are not ingested yet.

The stage convert would create the same samples after ingest.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import polars as pl
import pyarrow as pa

from m3diff.commands.plan.mixture import SAMPLE_COLUMNS
from m3diff.datasets import DATASETS
from m3diff.datasets.files import Embedded
from m3diff.datasets.spec import Row, read_with_notes
from m3diff.records.errors import DataError, Fault, cause_of
from m3diff.records.schemas import COUPLE_QUESTION, RAW_SCHEMA
from m3diff.stages.convert.params import Convert, MixtureSource
from m3diff.stages.convert.stage import draw_keys, load_questions, require_single_images, training_samples
from m3diff.stages.ingest.params import DatasetEntry
from m3diff.stages.ingest.stage import to_records


@dataclass(frozen=True)
class PlannedSamples:
    """Training samples of datasets that are not ingested yet.

    Attributes:
        samples: table with SAMPLE_COLUMNS, `use`, a number for each use of a pair, and COUPLE_QUESTION if any samples
            are coupled. None if no dataset has samples.
        unread: for each dataset without samples, the reason.
    """

    samples: pl.DataFrame | None
    unread: Mapping[str, Fault | str]


def plan_samples(entries: Mapping[str, DatasetEntry], convert: Convert) -> PlannedSamples:
    """Create the training samples of the datasets without opening their images.

    They are the samples that convert would create if the stage validate removed exactly the rows with a fault.
    """
    tables = []
    unread: dict[str, Fault | str] = {}
    for name, entry in entries.items():
        try:
            samples = samples_of_dataset(name, entry, convert)
        except (DataError, OSError) as error:
            unread[name] = cause_of(error)
            continue
        if samples.is_empty():
            unread[name] = Fault("plan.no_sample_is_left", key="convert.sources")
        else:
            tables.append(samples)
    if not tables:
        return PlannedSamples(samples=None, unread=unread)
    use = pl.struct("dataset", "image_set", "copy").rle_id().alias("use")
    return PlannedSamples(samples=pl.concat(tables, how="diagonal").with_columns(use), unread=unread)


def samples_of_dataset(name: str, entry: DatasetEntry, convert: Convert) -> pl.DataFrame:
    """Create the training samples of a dataset from its annotation files.

    Returns:
        Table with SAMPLE_COLUMNS, `copy`, which is empty for the first use of a pair and differs for further uses, and
        COUPLE_QUESTION if the samples are coupled.

    Raises:
        DataError: an annotation file cannot be used, the root folder does not exist, or no row can be used for
            training.
        ParamsError: the file of questions cannot be used, or the dataset should be coupled but is not only single
            images.
    """
    if not entry.root.is_dir():
        raise DataError("plan.no_root", path=entry.root)
    spec = DATASETS[entry.reader]
    rows, _ = read_with_notes(spec, entry.root, entry.options)
    records, _ = to_records(name, entry, map(_without_embedded_images, rows))
    training_records = [record for record in records if record["fault"] is None and record["split"] == "train"]
    if not training_records:
        raise DataError("plan.no_training_pair", path=entry.root)
    pairs = pl.DataFrame(pa.Table.from_pylist(training_records, RAW_SCHEMA))
    pairs = pairs.unique("id", keep="first", maintain_order=True)
    keyed_pairs = pairs.with_row_index("row").hstack(draw_keys(convert.seed, pairs))
    source = convert.sources.get(name, MixtureSource())
    if source.couple:
        require_single_images(name, pairs)
    questions = load_questions(convert.questions)[source.task_for(spec.task)]
    samples, _ = training_samples(keyed_pairs, questions, source, convert)
    nested = pairs.select(pl.col("images").list.len(), "history")
    samples = samples.hstack(nested[samples["row"]])
    # The sample ids of a pair's second use end in x1
    copy = pl.col("id").str.extract(r"#\d+(x\d+)?$", 1).fill_null("")
    couple_columns = [name for name in samples.columns if name == COUPLE_QUESTION]
    return samples.select(*SAMPLE_COLUMNS, *couple_columns, copy=copy)


def _without_embedded_images(row: Row) -> Row:
    """Return the row with paths in place of embedded images, because planning does not write images to files."""
    images = (Path(image.name) if isinstance(image, Embedded) else image for image in row.images)
    return replace(row, images=tuple(images))
