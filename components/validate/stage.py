"""validate: records -> clean records and a quarantine with reasons; rows in = rows out + quarantined, always."""

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel

from components.validate.params import Validate
from components.records import RAW_SCHEMA, RECORD_SCHEMA, DataError
from components.reports import StageReport
from components.validate.images import check_images
from components.validate.leaks import find_twins, sound_pairs
from components.validate.rules import LEAK, bad_rows, facts, rules
from components.validate.suite import judge

QUARANTINE_SCHEMA = RECORD_SCHEMA.append(pa.field("rules", pa.list_(pa.string()))).append(
    pa.field("reason", pa.string())
)

LINKS = (("train", "test"), ("val", "test"), ("train", "val"))
"""Which splits are held against which. Only what trains and is in a test set is removed."""

SPACE = r"[\s\p{Cc}\x{200B}\x{FEFF}]+"
"""White space, line and paragraph separators, control characters and invisible spaces: any run becomes one space. One
line separator in a caption makes the reference tokenizer emit an extra line, and later captions meet the wrong pair."""


class Counts(BaseModel):
    """One dataset: clean pairs and captions by split, rows in quarantine, by rule (a row may break several)."""

    pairs: dict[str, int]
    captions: dict[str, int]
    quarantined: int
    broken_rules: dict[str, int]


class ValidateReport(StageReport):
    quarantined: int
    leaks: int  # of them training pairs that are in a test set and are else sound
    overlaps: dict[str, int]  # pairs of one split that are also in another, kept or not
    captions_respaced: int
    images: int
    bad_images: int
    mislabelled_images: int  # the content is sound, of another format than the file's name says
    datasets: dict[str, Counts]


def validate(cfg: Validate, records: Path, out: Path) -> ValidateReport:
    """Write `records.parquet` (clean), `quarantine.parquet`, `docs/` (pages of great-expectations) and `report.json`.

    Raises:
        DataError: more than `cfg.max_quarantined_share` of the rows are bad, or declared counts do not hold. All
            outputs are written before, so that the pages and the quarantine can be read.
    """
    out.mkdir(parents=True, exist_ok=True)
    table = _load(records / "records.parquet")
    images = check_images(pl.concat([table["before"], table["after"]]), cfg.max_image_pixels, cfg.image_cache)
    pairs = sound_pairs(table, images)
    twins = {link: find_twins(pairs, *link, cfg.near_duplicate_max_diff) for link in LINKS}
    overlaps = {f"{split} in {other}": twins[split, other].height for split, other in LINKS}
    leaks = twins["train", "test"].clear() if cfg.allow_test_leakage else twins["train", "test"]
    found, all_rules = facts(table, images, leaks), rules(cfg.max_caption_chars)
    bad = bad_rows(found, all_rules)
    shutil.rmtree(out / "docs", ignore_errors=True)
    with ThreadPoolExecutor(1) as beside:  # polars leaves the interpreter to great-expectations meanwhile
        parts = beside.submit(_split_and_write, table, bad, out)
        broken, miscounts = judge(found, all_rules, cfg.expected_pairs, out / "docs")
    assert broken == set(bad["rules"].explode().drop_nulls()), (broken, bad["rules"])  # two engines, one judgement
    clean, quarantine, respaced = parts.result()
    report = _report(clean, quarantine, images, captions_respaced=respaced, overlaps=overlaps)
    assert report.rows_in == table.height == report.rows_out + report.quarantined, report
    report.write(out / "report.json")
    _refuse(cfg, report, quarantine, miscounts, out)
    return report


def _load(path: Path) -> pl.DataFrame:
    try:
        schema, table = pq.read_schema(path), pl.read_parquet(path)
    except (OSError, pa.ArrowInvalid, pl.exceptions.PolarsError) as error:
        raise DataError(f"{path}: cannot be read: {error}; run `m3diff ingest` again") from error
    if not schema.equals(RAW_SCHEMA):
        raise DataError(f"{path}: not the columns that ingest writes; run `m3diff ingest` again")
    if not table.height:
        raise DataError(f"{path}: holds no record; look at ingest.datasets in params.yaml")
    return table


def _split_and_write(table: pl.DataFrame, bad: pl.DataFrame, out: Path) -> tuple[pl.DataFrame, pl.DataFrame, int]:
    clean, quarantine, respaced = _split(table, bad)
    _write(clean, RECORD_SCHEMA, out / "records.parquet")
    _write(quarantine, QUARANTINE_SCHEMA, out / "quarantine.parquet")
    return clean, quarantine, respaced


def _split(table: pl.DataFrame, bad: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame, int]:
    """Clean records with respaced captions, quarantined ones as they were read, and how many captions were respaced."""
    rows = table.with_row_index("row")
    clean = rows.join(bad, on="row", how="anti").sort("row")
    captions = clean.select("row", "captions").explode("captions", empty_as_null=False)
    spaced = captions.with_columns(new=pl.col("captions").str.replace_all(SPACE, " ").str.strip_chars(" "))
    grouped = spaced.group_by("row", maintain_order=True).agg(captions="new")
    assert grouped.height == clean.height, (grouped.height, clean.height)
    respaced = spaced.select((pl.col("new") != pl.col("captions")).sum()).item()
    quarantine = rows.join(bad, on="row", how="inner").sort("row")
    return clean.with_columns(grouped["captions"]), quarantine, respaced


def _report(clean: pl.DataFrame, quarantine: pl.DataFrame, images: pl.DataFrame, **counted: Any) -> ValidateReport:
    names = pl.concat([clean["dataset"], quarantine["dataset"]]).unique().sort()
    suffix = pl.col("path").str.extract(r"\.([^./]+)$").str.to_uppercase().replace({"JPG": "JPEG", "TIF": "TIFF"})
    return ValidateReport(
        stage="validate",
        rows_in=clean.height + quarantine.height,
        rows_out=clean.height,
        quarantined=quarantine.height,
        leaks=quarantine.filter(pl.col("rules") == [LEAK]).height,
        **counted,
        images=images.height,
        bad_images=images.filter(pl.col("verdict") != "ok").height,
        mislabelled_images=images.filter(pl.col("verdict") == "ok", suffix.ne_missing(pl.col("format"))).height,
        datasets={
            name: _counts(clean.filter(pl.col("dataset") == name), quarantine.filter(pl.col("dataset") == name))
            for name in names
        },
    )


def _counts(clean: pl.DataFrame, quarantine: pl.DataFrame) -> Counts:
    by_split = clean.group_by("split").agg(pairs=pl.len(), captions=pl.col("captions").list.len().sum()).sort("split")
    broken = quarantine["rules"].explode().value_counts().sort("rules")
    return Counts(
        pairs=dict(by_split.select("split", "pairs").iter_rows()),
        captions=dict(by_split.select("split", "captions").iter_rows()),
        quarantined=quarantine.height,
        broken_rules=dict(broken.iter_rows()),
    )


def _write(frame: pl.DataFrame, schema: pa.Schema, path: Path) -> None:
    pq.write_table(frame.select(schema.names).to_arrow().cast(schema), path, compression="zstd")


def _refuse(cfg: Validate, report: ValidateReport, quarantine: pl.DataFrame, miscounts: list[str], out: Path) -> None:
    faults = [f"{count}; fetch the dataset again or correct validate.expected_pairs" for count in miscounts]
    bad = quarantine.filter(pl.col("rules") != [LEAK])
    if bad.height > cfg.max_quarantined_share * report.rows_in:
        examples = [f"    {row['source']}: {row['reason']}" for row in bad.head(5).iter_rows(named=True)]
        faults.append(
            f"{bad.height} of {report.rows_in} rows are bad, more than validate.max_quarantined_share = "
            f"{cfg.max_quarantined_share}; the first:\n" + "\n".join(examples)
        )
    if faults:
        where = f"all rows with reasons: {out / 'quarantine.parquet'}; as pages: {out / 'docs/index.html'}"
        raise DataError("\n  ".join(["the data is refused:", *faults, where]))
