"""ingest: every dataset's own layout on disk -> records. Reads annotations only; images are looked at by validate."""

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pydantic import BaseModel

from components.datasets import birds_to_words, clevr_change, clevr_dc, iedit, omnidiff, pairs, spot_the_diff
from components.ingest.rows import Row, to_table
from components.ingest.params import DatasetEntry, Ingest
from components.section import ParamsError
from components.progress import progress
from components.records import RAW_SCHEMA, DataError
from components.reports import StageReport

READERS: dict[str, Callable[..., Iterator[Row]]] = {
    "clevr_change": clevr_change.read,
    "clevr_dc": clevr_dc.read,
    "spot_the_diff": spot_the_diff.read,
    "iedit": iedit.read,
    "birds_to_words": birds_to_words.read,
    "omnidiff": omnidiff.read,
    "pairs": pairs.read,
}


class Counts(BaseModel):
    """What one dataset gave. Pairs and captions by split, empty captions included."""

    annotation_rows: int
    pairs: dict[str, int]
    captions: dict[str, int]
    empty_captions: int
    faults: int  # rows that could not be read; validate quarantines them


class IngestReport(StageReport):
    datasets: dict[str, Counts]


def ingest(cfg: Ingest, out: Path) -> IngestReport:
    """Write `out/records.parquet` (RAW_SCHEMA, every annotation row kept) and `out/report.json`."""
    out.mkdir(parents=True, exist_ok=True)
    counts: dict[str, Counts] = {}
    tables = []
    for dataset in progress(cfg.datasets, "ingest", total=len(cfg.datasets), unit="dataset"):
        table, annotation_rows = to_table(dataset, _rows(dataset))
        if not table.num_rows:
            raise DataError(f"ingest.datasets {dataset.name!r}: {dataset.root} holds no pair; fetch the dataset again")
        counts[dataset.name] = _count(table, annotation_rows)
        tables.append(table)
    records = pa.concat_tables(tables)
    pq.write_table(records, out / "records.parquet", compression="zstd")
    assert records.schema.equals(RAW_SCHEMA), records.schema
    rows_in = sum(count.annotation_rows for count in counts.values())
    return IngestReport(stage="ingest", rows_in=rows_in, rows_out=records.num_rows, datasets=counts).write(
        out / "report.json"
    )


def _rows(dataset: Dataset) -> Iterator[Row]:
    reader = READERS[dataset.reader]
    if not dataset.root.is_dir():
        raise DataError(
            f"ingest.datasets {dataset.name!r}: root {dataset.root} is no folder; fetch the dataset (MiniChange: "
            "`m3diff synthesize`) or correct `root` in params.yaml"
        )
    try:
        inspect.signature(reader).bind(dataset.root, **dataset.options)
    except TypeError as error:
        raise ParamsError(f"ingest.datasets {dataset.name!r}: options of reader {dataset.reader}: {error}") from error
    return reader(dataset.root, **dataset.options)


def _count(table: pa.Table, annotation_rows: int) -> Counts:
    per_pair = pc.list_value_length(table["captions"])
    by_split = pa.table({"split": table["split"].fill_null("?"), "captions": per_pair}).group_by("split")
    sums = by_split.aggregate([("captions", "count"), ("captions", "sum")]).sort_by("split").to_pylist()
    return Counts(
        annotation_rows=annotation_rows,
        pairs={row["split"]: row["captions_count"] for row in sums},
        captions={row["split"]: row["captions_sum"] for row in sums},
        empty_captions=pc.sum(pc.equal(pc.utf8_length(pc.list_flatten(table["captions"])), 0)).as_py() or 0,
        faults=table.num_rows - table["fault"].null_count,
    )
