"""validate: records -> clean records and a quarantine with reasons; rows in = rows out + quarantined, always.

It judges the images whose digests the records have. A file that is another one by now is refused: what validate writes
follows from the records alone, so DVC watches them and no image folder.
"""

import os
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from pydantic import BaseModel

from m3diff.datasets import DATASETS
from m3diff.images.check import OK, check_images
from m3diff.records.errors import DataError, command_to_read_again
from m3diff.records.files import StageReport, write_atomic
from m3diff.records.schemas import RAW_SCHEMA, RECORD_SCHEMA, load_table
from m3diff.stages.ingest.params import DatasetEntry
from m3diff.stages.validate.pairs import Finding, findings, likeness_of
from m3diff.stages.validate.params import Validate
from m3diff.stages.validate.rules import LEAK, Check, Rule, bad_rows, facts, find_twins, rules, run_suite, sound_pairs

QUARANTINE_SCHEMA = pa.schema(
    [*RECORD_SCHEMA, pa.field("rules", pa.list_(pa.string())), pa.field("reason", pa.string())]
)

# Which splits are held against which. Only what trains and is in a test set is removed.
LINKS = (("train", "test"), ("val", "test"), ("train", "val"))

EMPTY = "; look at ingest.datasets in params.yaml"

SHOWN, PAGE_ROWS = 5, 200  # rows of a kind that a message shows, and of each broken rule that the page shows

# White space, line and paragraph separators, control characters and invisible spaces: any run becomes one space. One
# line separator in a reference makes the reference tokenizer emit an extra line, and later ones meet the wrong pair
SPACE = r"[\s\p{Cc}\x{200B}\x{FEFF}]+"


class ValidateCounts(BaseModel):
    """Counts of one dataset: clean pairs and references by split, rows in quarantine by rule (some break several)."""

    pairs: dict[str, int]
    references: dict[str, int]
    quarantined: int
    broken_rules: dict[str, int]
    lost_test_pairs: list[str]  # "<id or place>: <reason>" of each test pair that is in quarantine


class ValidateReport(StageReport):
    quarantined: int
    leaks: int  # of them training pairs that are in a test set and are else sound
    overlaps: dict[str, int]  # pairs of one split that are also in another, kept or not
    references_respaced: int
    images: int
    bad_images: int
    mislabelled_images: int  # the content is sound, of another format than the file's name says
    findings: list[Finding] = []  # counted and shown, not refused; reports of earlier versions have none
    datasets: dict[str, ValidateCounts]


@dataclass(frozen=True)
class Judgement:
    """All rows with what is wrong with them, before anything is written."""

    table: pl.DataFrame  # RAW_SCHEMA
    images: pl.DataFrame  # as `check_images` makes it
    facts: pl.DataFrame
    rules: list[Rule]
    bad: pl.DataFrame  # as `bad_rows` makes it
    overlaps: dict[str, int]
    findings: list[Finding]


def validate(
    cfg: Validate, entries: Mapping[str, DatasetEntry], image_cache: Path, records: Path, out: Path
) -> ValidateReport:
    """Write `records.parquet` (clean), `quarantine.parquet`, `docs/index.html` (the page) and `report.json`.

    Args:
        entries: the datasets of the run; `records/<name>/records.parquet` is read of these, in their order.
        image_cache: what is known of images by content; it changes no output.

    Raises:
        DataError: an image changed since ingest; or of some dataset's split more than `cfg.max_quarantined_share` of
            the rows are bad, of some dataset's training rows more than `cfg.max_leaked_share` are in a test set,
            expected counts do not hold once the bad rows are out, or a test pair is lost. In the latter cases all
            outputs are written before, so that the page and the quarantine can be read.
    """
    out.mkdir(parents=True, exist_ok=True)
    judged = judge(cfg, entries, image_cache, records)
    table = judged.table
    bad = judged.bad
    counted = judged.facts.with_columns(counts=counting(judged.facts, bad, cfg.allow_lost_test_pairs))
    shutil.rmtree(out / "docs", ignore_errors=True)
    with ThreadPoolExecutor(1) as meanwhile:  # polars leaves the interpreter to great-expectations
        parts = meanwhile.submit(_split_and_write, table, bad, out)
        checks, miscounts = run_suite(counted, judged.rules, expected_pairs(entries))
    clean, quarantine, respaced = parts.result()
    broken = {check.rule for check in checks if not check.met} & {rule.name for rule in judged.rules}
    assert broken == set(bad["rules"].explode().drop_nulls()), (broken, bad["rules"])  # two engines, one judgement
    report = _report(judged, clean, quarantine, respaced)
    assert report.rows_in == table.height == report.rows_out + report.quarantined, report
    report.write(out / "report.json")
    write_page(report, checks, quarantine, out / "docs")
    for finding in report.findings:
        print(f"validate: {finding.dataset}: {finding.sentence}; first {finding.first[0]}")
    if faults := refusals(cfg, report, clean, quarantine, miscounts):
        where = f"all rows with reasons: {out / 'quarantine.parquet'}; as a page: {out / 'docs/index.html'}"
        raise DataError("\n  ".join(["the data is refused:", *faults, where]))
    return report


def judge(cfg: Validate, entries: Mapping[str, DatasetEntry], image_cache: Path, records: Path) -> Judgement:
    """Judge every row of `records/<name>/records.parquet`; nothing is written but the cache.

    Raises:
        DataError: records cannot be read, or an image changed since ingest.
    """
    files = [records / name / "records.parquet" for name in entries]
    table = pl.concat([pl.DataFrame(load_table(file, RAW_SCHEMA, "ingest", EMPTY)) for file in files])
    images = check_images(pl.concat([table["before"], table["after"]]), cfg.max_image_pixels, image_cache, "validate")
    _refuse_changed(table, images, entries)
    pairs = sound_pairs(table, images)
    pair_cache = image_cache.with_name(f"pairs_of_{image_cache.name}")
    likeness = likeness_of(pairs, table, cfg.compare_px, pair_cache, "validate")
    twins = {link: find_twins(pairs, *link, cfg.near_duplicate_max_diff) for link in LINKS}
    leaks = twins["train", "test"].clear() if cfg.allow_test_leakage else twins["train", "test"]
    row_facts = facts(table, images, leaks, likeness)
    all_rules = rules(cfg.max_caption_chars)
    bad = bad_rows(row_facts, all_rules)
    return Judgement(
        table=table,
        images=images,
        facts=row_facts,
        rules=all_rules,
        bad=bad,
        overlaps={f"{split} in {other}": twins[split, other].height for split, other in LINKS},
        findings=findings(pairs, likeness, bad, table, images),
    )


def refusals_of(cfg: Validate, entries: Mapping[str, DatasetEntry], judged: Judgement) -> list[str]:
    """The reasons for which `validate` refuses these rows. It writes nothing and asks no second engine."""
    clean, quarantine, respaced = _split(judged.table, judged.bad)
    counts = counting(judged.facts, judged.bad, cfg.allow_lost_test_pairs)
    counted = judged.facts.filter(counts == 1)
    miscounts = []
    for dataset, splits in expected_pairs(entries).items():
        for split, expected in splits.items():
            rows = counted.filter(dataset=dataset, own_split=split).height
            if rows != expected:
                miscounts.append(f"{dataset} {split}: {rows} pairs, but {expected} are expected")
    return refusals(cfg, _report(judged, clean, quarantine, respaced), clean, quarantine, miscounts)


def counting(found: pl.DataFrame, bad: pl.DataFrame, lost_may_be_lost: bool) -> pl.Series:
    """1 for every row that counts towards the expected pairs, 0 for a bad one.

    A training pair that is left out because it is in a test set counts: the dataset is whole. So does a test pair
    whose loss the user allows, of which the report tells.
    """
    gone = pl.col("row").is_in(bad.filter(pl.col("rules") != [LEAK])["row"].to_list())
    if lost_may_be_lost:
        gone &= pl.col("own_split").ne_missing("test")
    return found.select((~gone).cast(pl.Int64).alias("counts"))["counts"]


def _refuse_changed(table: pl.DataFrame, images: pl.DataFrame, entries: Mapping[str, DatasetEntry]) -> None:
    digests = images.select("path", found="digest")
    for side in ("before", "after"):
        noted = table.select("source", "dataset", path=side, noted=f"{side}_sha256").drop_nulls("path")
        changed = noted.join(digests, on="path", how="left", maintain_order="left").filter(
            pl.col("noted").ne_missing(pl.col("found"))
        )
        if changed.height:
            first = changed.row(0, named=True)
            of_dataset = changed.filter(dataset=first["dataset"])["path"].unique().to_list()
            command = _command_to_ingest_again(first["dataset"], entries[first["dataset"]], of_dataset)
            raise DataError(
                f"{first['source']}: {side}: {first['path']} changed since ingest, with {changed.height - 1} others; "
                f"run `m3diff ingest {first['dataset']}` again, with DVC: {command}"
            )


def _command_to_ingest_again(name: str, entry: DatasetEntry, paths: list[str]) -> str:
    """The command by which DVC runs ingest again after images were edited, be it with their size and mtime kept."""
    parents = [os.path.dirname(path) for path in paths]
    is_watched = all(Path(os.path.abspath(path)).is_relative_to(os.path.abspath(entry.root)) for path in paths)
    if entry.image_root and not is_watched:  # DVC knows nothing of this folder
        return f"`dvc repro --single-item --force ingest@{name} && dvc repro`"
    return command_to_read_again(paths[0] if len(paths) == 1 else os.path.commonpath(parents) or ".")


def expected_pairs(entries: Mapping[str, DatasetEntry]) -> dict[str, dict[str, int]]:
    """Pairs by dataset and split, as published or as `params.yaml` says, the split as the dataset's files call it."""
    expected: dict[str, dict[str, int]] = {}
    for name, entry in entries.items():
        if entry.expected_pairs == "published":
            part = DATASETS[entry.reader].part(name)
            assert part is not None, f"{name}: rules.py lets no dataset through whose counts are not published"
            expected[name] = part.pairs()
        elif entry.expected_pairs is not None:
            expected[name] = {str(split): pairs for split, pairs in entry.expected_pairs.items()}
    return expected


def _split_and_write(table: pl.DataFrame, bad: pl.DataFrame, out: Path) -> tuple[pl.DataFrame, pl.DataFrame, int]:
    clean, quarantine, respaced = _split(table, bad)
    for name, frame, schema in (("records", clean, RECORD_SCHEMA), ("quarantine", quarantine, QUARANTINE_SCHEMA)):
        pq.write_table(frame.select(schema.names).to_arrow().cast(schema), out / f"{name}.parquet", compression="zstd")
    return clean, quarantine, respaced


def _split(table: pl.DataFrame, bad: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame, int]:
    rows = table.with_row_index("row")
    clean = rows.join(bad, on="row", how="anti").sort("row")
    references = clean.select("row", "references").explode("references", empty_as_null=False)
    spaced = references.with_columns(new=pl.col("references").str.replace_all(SPACE, " ").str.strip_chars(" "))
    grouped = spaced.group_by("row", maintain_order=True).agg(references="new")
    assert grouped.height == clean.height, (grouped.height, clean.height)
    respaced = spaced.select((pl.col("new") != pl.col("references")).sum()).item()
    clean = clean.with_columns(grouped["references"])
    quarantine = rows.join(bad, on="row", how="inner").sort("row")
    return clean, quarantine, respaced


def _report(judged: Judgement, clean: pl.DataFrame, quarantine: pl.DataFrame, respaced: int) -> ValidateReport:
    images = judged.images
    names = pl.concat([clean["dataset"], quarantine["dataset"]]).unique().sort()
    suffix = pl.col("path").str.extract(r"\.([^./]+)$").str.to_uppercase().replace({"JPG": "JPEG", "TIF": "TIFF"})
    datasets = {}
    for name in names:
        some, bad = clean.filter(pl.col("dataset") == name), quarantine.filter(pl.col("dataset") == name)
        counts = (
            some.group_by("split").agg(pairs=pl.len(), references=pl.col("references").list.len().sum()).sort("split")
        )
        datasets[name] = ValidateCounts(
            pairs=dict(counts.select("split", "pairs").iter_rows()),
            references=dict(counts.select("split", "references").iter_rows()),
            quarantined=bad.height,
            broken_rules=dict(bad["rules"].explode().value_counts().sort("rules").iter_rows()),
            lost_test_pairs=lost_test_pairs(some, bad),
        )
    return ValidateReport(
        stage="validate",
        rows_in=clean.height + quarantine.height,
        rows_out=clean.height,
        quarantined=quarantine.height,
        leaks=quarantine.filter(pl.col("rules") == [LEAK]).height,
        references_respaced=respaced,
        overlaps=judged.overlaps,
        findings=judged.findings,
        images=images.height,
        bad_images=images.filter(pl.col("verdict") != OK).height,
        mislabelled_images=images.filter(pl.col("verdict") == OK, suffix.ne_missing(pl.col("format"))).height,
        datasets=datasets,
    )


def write_page(report: ValidateReport, checks: list[Check], quarantine: pl.DataFrame, site: Path) -> None:
    """Write `site`/index.html: counts by dataset, the expectations, and the first rows that break each rule.

    The page is our own: that of great-expectations loads nine content networks and shows clock times and random ids.

    Args:
        quarantine: as `quarantine.parquet`.
    """
    loader = FileSystemLoader(Path(__file__).parent)
    pages = Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    rules = quarantine["rules"].explode().drop_nulls().unique().sort()
    broken = {rule: quarantine.filter(pl.col("rules").list.contains(rule)).to_dicts() for rule in rules}
    page = pages.get_template("docs.html.j2").render(report=report, checks=checks, broken=broken, shown=PAGE_ROWS)
    write_atomic(site / "index.html", page)


def lost_test_pairs(clean: pl.DataFrame, quarantine: pl.DataFrame) -> list[str]:
    """`<id>: <reason>` of every test pair that is not among the clean ones; its place where it has no id.

    A row whose id stands in another row that is clean is no lost pair.
    """
    lost = quarantine.filter(
        pl.col("own_split") == "test", pl.col("id").is_null() | ~pl.col("id").is_in(clean["id"].to_list())
    )
    return [f"{row['id'] or row['source']}: {row['reason']}" for row in lost.iter_rows(named=True)]


def refusals(
    cfg: Validate, report: ValidateReport, clean: pl.DataFrame, quarantine: pl.DataFrame, miscounts: list[str]
) -> list[str]:
    """The reasons for which the data is refused, a sentence with the first rows for each; none: it is accepted."""
    faults = [f"{count}; fetch the dataset again or correct its expected_pairs" for count in miscounts]
    faults += too_many(cfg, clean, quarantine)
    lost = {name: counts.lost_test_pairs for name, counts in report.datasets.items() if counts.lost_test_pairs}
    faults += [
        f"{name}: {len(pairs)} test pairs are lost, and scores of a part of a test set compare with no others; restore "
        f"them, or set validate.allow_lost_test_pairs to true:\n{_first(pairs)}"
        for name, pairs in ({} if cfg.allow_lost_test_pairs else lost).items()
    ]
    return faults


def too_many(cfg: Validate, clean: pl.DataFrame, quarantine: pl.DataFrame) -> Iterator[str]:
    """A sentence for each dataset's split with a larger share of bad rows than `cfg` allows, and for each dataset of
    whose training rows, whatever its files call them, a larger share is in a test set.

    A leak is no fault of a row. Rows of no split, which are all bad, are a share of the dataset's.
    """
    columns = ["dataset", "split", "own_split"]
    every = pl.concat([clean.select(columns), quarantine.select(columns)])
    bad, leaked = quarantine.filter(pl.col("rules") != [LEAK]), quarantine.filter(pl.col("rules").list.contains(LEAK))
    train, leaks = every.filter(split="train"), "training pairs are in a test set"
    remedy = ", so its splits do not hold; remove these pairs from its training split and run `m3diff ingest` again"
    for limit, some, of, by, what, then in (
        ("max_quarantined_share", bad, every, ["dataset", "own_split"], "rows are bad", ""),
        ("max_leaked_share", leaked, train, ["dataset"], leaks, remedy),
    ):
        share = getattr(cfg, limit)
        for key, found in some.group_by(by, maintain_order=True):
            conditions = [pl.col(name) == value for name, value in zip(by, key, strict=True) if value is not None]
            total = of.filter(conditions).height
            if found.height > Fraction(str(share)) * total:
                first = _first([f"{row['source']}: {row['reason']}" for row in found.iter_rows(named=True)])
                name = " ".join(value or "without a split" for value in key)
                count = f"{name}: {found.height} of {total} {what}, more than validate.{limit} = {share}"
                yield f"{count}{then}; the first:\n{first}"


def _first(lines: list[str]) -> str:
    more = [f"    and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
    return "\n".join([*(f"    {line}" for line in lines[:SHOWN]), *more])
