"""Stage `validate`: divide records into clean records and quarantined records. Each quarantined record has a reason.

The number of input rows always equals the number of clean rows plus the number of quarantined rows. The stage checks
the images whose digests are in the records, and fails if an image has changed since ingest. Its outputs therefore
depend only on the records, and DVC does not watch image folders.
"""

import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import polars as pl
import pyarrow as pa
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from pydantic import BaseModel

from m3diff.datasets import DATASETS
from m3diff.images.check import OK, check_images
from m3diff.records.errors import DataError, Fault, command_to_read_again, format_count
from m3diff.records.files import StageReport, write_atomic
from m3diff.records.schemas import RAW_SCHEMA, RECORD_SCHEMA
from m3diff.records.tables import load_table, write_table
from m3diff.stages.ingest.params import DatasetEntry
from m3diff.stages.validate.pairs import Finding, compare_images_of_pairs, list_findings
from m3diff.stages.validate.params import Validate
from m3diff.stages.validate.rule_texts import describe_result, describe_rule
from m3diff.stages.validate.rules import (
    IMAGE_COLUMNS,
    LEAK_RULE,
    SPLIT_RANKS,
    Rule,
    build_rules,
    compute_facts,
    find_quarantined_rows,
    name_of_image,
)
from m3diff.stages.validate.suite import ExpectationResult, run_suite, unexpected_count_fault
from m3diff.stages.validate.twins import find_twins, select_valid_pairs, select_valid_singles

QUARANTINE_SCHEMA = pa.schema(
    [*RECORD_SCHEMA, pa.field("rules", pa.list_(pa.string())), pa.field("reason", pa.string())]
)

# For these splits, report how many pairs of the first are also in the second. Only training pairs that are in a test
# set are removed
COMPARED_SPLITS = (("train", "test"), ("val", "test"), ("train", "val"))

# A single bad row in a small split exceeds any share, but does not indicate that other rows are bad. See
# `count_allowed_rows`
MIN_ALLOWED_ROWS = 1

PAGE_ROWS = 200  # maximum number of rows that the page shows per broken rule

# White space, line and paragraph separators, control characters and invisible spaces. Any sequence of these characters
# is replaced by one space. A line separator in a reference would make the tokenizer of the metrics emit an extra line,
# and all later pairs would be scored against the references of other pairs
WHITE_SPACE = r"[\s\p{Cc}\x{200B}\x{FEFF}]+"


class ValidateCounts(BaseModel):
    """Counts of one dataset.

    Attributes:
        pairs: number of clean image sets per split.
        references: number of references of the clean records, per split.
        questions: number of clean records with a question of their own, per split. Reports of earlier versions do not
            contain this field.
        quarantined: number of quarantined rows.
        broken_rules: number of quarantined rows per rule. A row can break several rules.
        lost_test_pairs: "<id or source>: <reason>" for each quarantined test pair.
    """

    pairs: dict[str, int]
    references: dict[str, int]
    questions: dict[str, int] = {}
    quarantined: int
    broken_rules: dict[str, int]
    lost_test_pairs: list[str]


class ValidateReport(StageReport):
    """The stage's report.json.

    Attributes:
        quarantined: number of quarantined rows.
        leaks: number of training pairs that are quarantined only because they are in a test set.
        overlaps: number of pairs in one split that are also in another split, by "<split> in <split>". Clean and
            quarantined pairs are counted.
        references_respaced: number of references whose white space was changed.
        images: number of distinct image files.
        bad_images: number of image files that are missing or invalid.
        mislabelled_images: number of valid image files whose format does not match the file name.
        findings: unusual properties that do not cause rejection. Reports of earlier versions do not contain this field.
        datasets: counts per dataset.
    """

    quarantined: int
    leaks: int
    overlaps: dict[str, int]
    references_respaced: int
    images: int
    bad_images: int
    mislabelled_images: int
    findings: list[Finding] = []
    datasets: dict[str, ValidateCounts]


@dataclass(frozen=True)
class CheckResults:
    """The results of all checks, before anything is written.

    Attributes:
        records: all rows, with RAW_SCHEMA and the columns of `add_image_columns`.
        images: verdicts on image files, as `check_images` returns them.
        facts: facts about each row, as `compute_facts` returns them.
        rules: the rules that were checked.
        quarantined_rows: rows that break a rule, as `find_quarantined_rows` returns them.
        overlaps: numbers of pairs in several splits, as in the report.
        findings: unusual properties, as in the report.
    """

    records: pl.DataFrame
    images: pl.DataFrame
    facts: pl.DataFrame
    rules: list[Rule]
    quarantined_rows: pl.DataFrame
    overlaps: dict[str, int]
    findings: list[Finding]


@dataclass(frozen=True)
class SplitRows:
    """The checked rows, divided into clean and bad rows.

    Attributes:
        clean: clean rows, with normalized white space in the references.
        quarantine: bad rows, with the broken rules and the reason.
        respaced: number of references whose white space was changed.
    """

    clean: pl.DataFrame
    quarantine: pl.DataFrame
    respaced: int


def validate(
    cfg: Validate,
    entries: Mapping[str, DatasetEntry],
    image_cache: Path,
    records: Path,
    out: Path,
    protocol: str | None = None,
) -> ValidateReport:
    """Write the tables `records` (clean rows) and `quarantine`, `docs/index.html` (the web page) and `report.json`.

    Args:
        cfg: the section `validate`.
        entries: the datasets of the run. For each, the table `records/<name>/records` is read, in this order.
        image_cache: Parquet file that caches verdicts by content. It does not change the output.
        records: folder with the records that ingest wrote.
        out: folder to write to.
        protocol: name of the protocol with which the gate scores models, as "<dataset>/<protocol>". Its dataset must
            have test pairs. The protocol does not change the output.

    Raises:
        DataError: an image is missing or has changed since ingest, or the data is rejected. Data is rejected if too
            many rows of a split are bad, too many training rows of a dataset are in a test set, a number of pairs is
            not as expected, a test pair is quarantined, or the dataset of `protocol` has no test pairs. All outputs
            are then written before the error is raised, so that the user can read the page and the quarantine.
    """
    out.mkdir(parents=True, exist_ok=True)
    check_results = check_records(cfg, entries, image_cache, records)
    row_facts = check_results.facts.with_columns(is_counted=flag_counted_rows(check_results, cfg.allow_lost_test_pairs))
    shutil.rmtree(out / "docs", ignore_errors=True)
    with ThreadPoolExecutor(1) as writer:  # polars releases the GIL, so great-expectations runs at the same time
        writing = writer.submit(_split_and_write, check_results, out)
        results, miscounts = run_suite(row_facts, check_results.rules, read_expected_pairs(entries))
    rows = writing.result()
    _require_agreement(results, check_results)
    report = _build_report(check_results, rows)
    assert report.rows_in == check_results.records.height == report.rows_out + report.quarantined, report
    report.write(out / "report.json")
    faults = faults_of_report(cfg, report, rows, miscounts)
    faults += faults_of_test_pairs(protocol, entries, rows)
    write_page(report, results, rows.quarantine, out / "docs", faults)
    for finding in report.findings:
        print(f"validate: {finding.dataset}: {finding.sentence}. The first is {finding.first[0]}")
    if rows.clean.filter(split="test").is_empty():
        print(f"validate: {_fault_without_test_pairs(rows, out)}")
    if faults:
        page = out / "docs" / "index.html"
        raise DataError("validate.data_refused", faults=faults, quarantine=out / "quarantine", page=page)
    if rows.quarantine.height:
        bad_row = rows.quarantine.row(0, named=True)
        count = format_count(rows.quarantine.height, "row is", "rows are")
        print(f"validate: {count} quarantined. The first is {bad_row['source']}: {bad_row['reason']}")
    return report


def _fault_without_test_pairs(rows: SplitRows, out: Path) -> Fault:
    """Return why no clean pair is in the test split: no row is in it, or all of its rows are quarantined."""
    lost_pairs = rows.quarantine.filter(own_split="test")
    if lost_pairs.is_empty():
        return Fault("validate.no_test_pairs")
    return Fault(
        "validate.all_test_pairs_quarantined",
        rows=lost_pairs.height,
        first=_first_reason(lost_pairs),
        quarantine=out / "quarantine",
        page=out / "docs" / "index.html",
    )


def _first_reason(quarantine: pl.DataFrame) -> str:
    """Return the source of the first quarantined row, and why it is quarantined."""
    return f"{quarantine['source'][0]}: {quarantine['reason'][0]}"


def _require_agreement(results: Sequence[ExpectationResult], check_results: CheckResults) -> None:
    """Check that great-expectations and polars agree on which rules are broken."""
    unmet_names = {result.rule for result in results if not result.is_met}
    unmet_rules = unmet_names & {rule.name for rule in check_results.rules}
    broken_rules = set(check_results.quarantined_rows["rules"].explode().drop_nulls())
    assert unmet_rules == broken_rules, (unmet_rules, check_results.quarantined_rows["rules"])


def check_records(cfg: Validate, entries: Mapping[str, DatasetEntry], image_cache: Path, records: Path) -> CheckResults:
    """Check every row in the tables `records/<name>/records`. This writes caches, but no outputs.

    Raises:
        DataError: records cannot be read, or an image is missing or has changed since ingest.
    """
    files = [records / name / "records" for name in entries]
    tables = [load_table(file, RAW_SCHEMA, "ingest", if_empty="validate.no_record") for file in files]
    table = add_image_columns(pl.concat([pl.DataFrame(table) for table in tables]))
    paths = pl.concat([table[column] for column in IMAGE_COLUMNS])
    images = check_images(paths, cfg.max_image_pixels, image_cache, "validate")
    _require_unchanged_images(table, images, entries)
    pairs = select_valid_pairs(table, images)
    singles = select_valid_singles(table, images)
    pair_cache = image_cache.with_name(f"pairs_of_{image_cache.name}")
    likeness = compare_images_of_pairs(pairs, table, cfg.compare_px, pair_cache, "validate")
    twins = {}
    for split, searched_split in COMPARED_SPLITS:
        twins_of_size = [
            find_twins(image_sets, split, searched_split, cfg.near_duplicate_max_diff)
            for image_sets in (pairs, singles)
        ]
        twins[split, searched_split] = pl.concat(twins_of_size)
    leaks = twins["train", "test"]
    if cfg.allow_test_leakage:
        leaks = leaks.clear()
    row_facts = compute_facts(table, images, leaks, likeness)
    all_rules = build_rules(cfg.max_caption_chars)
    quarantined_rows = find_quarantined_rows(row_facts, all_rules)
    return CheckResults(
        records=table,
        images=images,
        facts=row_facts,
        rules=all_rules,
        quarantined_rows=quarantined_rows,
        overlaps={f"{split} in {searched_split}": rows.height for (split, searched_split), rows in twins.items()},
        findings=list_findings(pairs, likeness, quarantined_rows, table, images),
    )


def find_rejection_faults(
    cfg: Validate,
    entries: Mapping[str, DatasetEntry],
    check_results: CheckResults,
    protocol: str | None = None,
    rows_always_allowed: int = MIN_ALLOWED_ROWS,
) -> list[Fault]:
    """Return the faults for which `validate` would reject the checked data.

    Nothing is written, and great-expectations is not used.

    Args:
        cfg: the section `validate`.
        entries: the datasets of the run.
        check_results: the results of all checks, as `check_records` returns them.
        protocol: "<dataset>/<protocol>" with which the gate scores models.
        rows_always_allowed: number of bad rows that is allowed in each group, regardless of their share.
    """
    rows = _split_rows(check_results)
    counted_rows = check_results.facts.filter(flag_counted_rows(check_results, cfg.allow_lost_test_pairs) == 1)
    miscounts = []
    for dataset, splits in read_expected_pairs(entries).items():
        for split, expected in splits.items():
            count = counted_rows.filter(dataset=dataset, own_split=split).height
            if count != expected:
                miscounts.append(unexpected_count_fault(dataset, split, count, expected=expected))
    faults = faults_of_report(cfg, _build_report(check_results, rows), rows, miscounts, rows_always_allowed)
    faults += faults_of_test_pairs(protocol, entries, rows)
    return faults


def flag_counted_rows(check_results: CheckResults, allow_lost_test_pairs: bool) -> pl.Series:
    """Return 1 for each row that counts towards the expected number of pairs, and 0 for each other row.

    A training pair that is quarantined because it is in a test set counts, because it is not missing from the dataset.
    A quarantined test pair counts if `allow_lost_test_pairs` is true. The report lists such pairs.
    """
    missing_rows = check_results.quarantined_rows.filter(pl.col("rules") != [LEAK_RULE])
    is_missing = pl.col("row").is_in(missing_rows["row"].to_list())
    if allow_lost_test_pairs:
        is_missing &= pl.col("own_split").ne_missing("test")
    counted_rows = check_results.facts.select("own_split", "image_set", "question", is_counted=~is_missing)
    if counted_rows["question"].is_not_null().any():
        # The dataset is expected to have a number of pairs, so several questions about a pair count once
        is_first = pl.struct("is_counted", "own_split", "image_set").is_first_distinct()
        counted_rows = counted_rows.with_columns(is_counted=pl.col("is_counted") & is_first)
    return counted_rows["is_counted"].cast(pl.Int64)


def add_image_columns(records: pl.DataFrame) -> pl.DataFrame:
    """Add columns for the images of each record, which the checks read.

    The columns IMAGE_COLUMNS and their digests, such as `image_1_sha256`, contain the paths and digests of `images`.
    They are null if a record has no such image. `image_count` is the number of images that the record should have: two
    if it has captions, and otherwise those that it names.
    """
    columns: dict[str, pl.Expr] = {}
    for position, column in enumerate(IMAGE_COLUMNS):
        image = pl.col("images").list.get(position, null_on_oob=True).struct
        columns |= {column: image.field("uri"), f"{column}_sha256": image.field("sha256")}
    is_caption = pl.col("question").is_null()
    named_images = pl.col("images").list.len().cast(pl.Int64)
    return records.with_columns(
        **columns, image_count=pl.when(is_caption).then(len(IMAGE_COLUMNS)).otherwise(named_images)
    )


def _require_unchanged_images(table: pl.DataFrame, images: pl.DataFrame, entries: Mapping[str, DatasetEntry]) -> None:
    """Raise a DataError if any image is missing or its digest differs from the digest in the records."""
    current_digests = images.select("path", current="digest")
    recorded_images = pl.concat(
        table.select("source", "dataset", side=name_of_image(column), path=column, recorded=f"{column}_sha256")
        for column in IMAGE_COLUMNS
    )
    compared_images = recorded_images.drop_nulls("path").join(
        current_digests, on="path", how="left", maintain_order="left"
    )
    changed_images = compared_images.filter(pl.col("recorded").ne_missing(pl.col("current")))
    if changed_images.is_empty():
        return
    row = changed_images.row(0, named=True)
    dataset = row["dataset"]
    paths = changed_images.filter(dataset=dataset)["path"].unique().to_list()
    raise DataError(
        "validate.image_changed" if os.path.exists(row["path"]) else "validate.image_missing",
        source=row["source"],
        side=row["side"],
        path=row["path"],
        count=changed_images["path"].n_unique(),
        dataset=dataset,
        command=_command_to_ingest_again(dataset, entries[dataset], paths),
    )


def _command_to_ingest_again(name: str, entry: DatasetEntry, paths: list[str]) -> str:
    """Return the command that makes DVC ingest a dataset again after images were edited, deleted or restored.

    The command works even if the size and modification time of the images are unchanged.
    """
    root = os.path.abspath(entry.root)
    is_watched = all(Path(os.path.abspath(path)).is_relative_to(root) for path in paths)
    if entry.image_root and not is_watched:  # DVC does not watch `image_root`, so --force is required
        return f"`dvc repro --single-item --force ingest@{name} && dvc repro`"
    if len(paths) == 1 and os.path.exists(paths[0]):
        return command_to_read_again(paths[0])
    folders = [os.path.dirname(path) for path in paths]
    return command_to_read_again(os.path.commonpath(folders) or ".")


def read_expected_pairs(entries: Mapping[str, DatasetEntry]) -> dict[str, dict[str, int]]:
    """Return the expected number of pairs per dataset and split, as published or as set in `params.yaml`.

    Splits are named as in the dataset's files, before `train_on` is applied.
    """
    expected: dict[str, dict[str, int]] = {}
    for name, entry in entries.items():
        if entry.expected_pairs == "published":
            part = DATASETS[entry.reader].part(name)
            assert part is not None, f"{name}: settings/rules.py should have rejected unpublished counts"
            expected[name] = part.pairs()
        elif entry.expected_pairs is not None:
            expected[name] = {str(split): pairs for split, pairs in entry.expected_pairs.items()}
    return expected


def _split_and_write(check_results: CheckResults, out: Path) -> SplitRows:
    rows = _split_rows(check_results)
    _write_frame(rows.clean, RECORD_SCHEMA, out / "records")
    _write_frame(rows.quarantine, QUARANTINE_SCHEMA, out / "quarantine")
    return rows


def _write_frame(frame: pl.DataFrame, schema: pa.Schema, table: Path) -> None:
    write_table(frame.select(schema.names).to_arrow().cast(schema), table)


def _split_rows(check_results: CheckResults) -> SplitRows:
    """Divide the checked rows into clean and bad rows, and normalize the white space in references of clean rows."""
    rows = check_results.records.with_row_index("row")
    clean = rows.join(check_results.quarantined_rows, on="row", how="anti", maintain_order="left")
    quarantine = rows.join(check_results.quarantined_rows, on="row", how="inner").sort("row")
    references = clean.select("row", "references").explode("references", empty_as_null=False)
    respaced_text = pl.col("references").str.replace_all(WHITE_SPACE, " ").str.strip_chars(" ")
    references = references.with_columns(respaced=respaced_text)
    by_row = references.group_by("row", maintain_order=True).agg(references="respaced")
    assert by_row.height == clean.height, (by_row.height, clean.height)
    return SplitRows(
        clean=clean.with_columns(by_row["references"]),
        quarantine=quarantine,
        respaced=references.select((pl.col("respaced") != pl.col("references")).sum()).item(),
    )


def _build_report(check_results: CheckResults, rows: SplitRows) -> ValidateReport:
    images = check_results.images
    is_valid = pl.col("verdict") == OK
    named_format = pl.col("path").str.extract(r"\.([^./]+)$").str.to_uppercase().replace({"JPG": "JPEG", "TIF": "TIFF"})
    datasets = {}
    for name in pl.concat([rows.clean["dataset"], rows.quarantine["dataset"]]).unique().sort():
        datasets[name] = _count_dataset(rows.clean.filter(dataset=name), rows.quarantine.filter(dataset=name))
    return ValidateReport(
        stage="validate",
        rows_in=rows.clean.height + rows.quarantine.height,
        rows_out=rows.clean.height,
        quarantined=rows.quarantine.height,
        leaks=rows.quarantine.filter(pl.col("rules") == [LEAK_RULE]).height,
        references_respaced=rows.respaced,
        overlaps=check_results.overlaps,
        findings=check_results.findings,
        images=images.height,
        bad_images=images.filter(~is_valid).height,
        mislabelled_images=images.filter(is_valid, named_format.ne_missing(pl.col("format"))).height,
        datasets=datasets,
    )


def _count_dataset(clean: pl.DataFrame, quarantine: pl.DataFrame) -> ValidateCounts:
    """Return the counts of one dataset, from its clean and bad rows."""
    references = pl.col("references").list.len().sum()
    image_sets = pl.col("image_set").n_unique()
    questions = pl.col("question").count()
    by_split = clean.group_by("split").agg(pairs=image_sets, references=references, questions=questions).sort("split")
    return ValidateCounts(
        pairs=dict(by_split.select("split", "pairs").iter_rows()),
        references=dict(by_split.select("split", "references").iter_rows()),
        questions=dict(by_split.filter(pl.col("questions") > 0).select("split", "questions").iter_rows()),
        quarantined=quarantine.height,
        broken_rules=dict(quarantine["rules"].explode().value_counts().sort("rules").iter_rows()),
        lost_test_pairs=list_lost_test_pairs(clean, quarantine),
    )


def write_page(
    report: ValidateReport,
    results: Sequence[ExpectationResult],
    quarantine: pl.DataFrame,
    site: Path,
    faults: Sequence[Fault] = (),
) -> None:
    """Write `site`/index.html with counts per dataset, the results in words, and the first rows that break each rule.

    The page is used instead of the page that great-expectations creates. That page loads files from nine content
    delivery networks, and contains times and random ids.

    Args:
        report: the stage's report.
        results: results of the expectations, as `run_suite` returns them.
        quarantine: the rows of the table `quarantine`.
        site: folder of the page.
        faults: the faults for which the data is rejected. They are listed at the top of the page.
    """
    loader = FileSystemLoader(Path(__file__).parent)
    pages = Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    pages.filters["lower_first"] = lowercase_first_letter
    broken_rules = quarantine["rules"].explode().drop_nulls().unique().sort()
    splits = dict.fromkeys(split for counts in report.datasets.values() for split in counts.pairs)
    page = pages.get_template("docs.html.j2").render(
        report=report,
        faults=faults,
        checks=[describe_result(result) for result in results],
        unmet=sum(not result.is_met for result in results),
        broken={rule: quarantine.filter(pl.col("rules").list.contains(rule)).to_dicts() for rule in broken_rules},
        words={rule: describe_rule(rule) for rule in broken_rules},
        splits=sorted(splits, key=lambda split: SPLIT_RANKS.get(split, len(SPLIT_RANKS))),
        shown=PAGE_ROWS,
    )
    write_atomic(site / "index.html", page)


def lowercase_first_letter(text: str) -> str:
    """Convert the first letter to lowercase, except in abbreviations such as HTML."""
    is_abbreviation = text[1:2].isupper()
    return text if is_abbreviation else text[:1].lower() + text[1:]


def list_lost_test_pairs(clean: pl.DataFrame, quarantine: pl.DataFrame) -> list[str]:
    """Return `<id>: <reason>` for each test pair in quarantine, or `<source>: <reason>` if the row has no id.

    A quarantined row with the same id as a clean row is not listed. The dataset repeats that pair, so it is not lost.
    """
    is_repeated = pl.col("id").is_not_null() & pl.col("id").is_in(clean["id"].to_list())
    lost_rows = quarantine.filter(pl.col("own_split") == "test", ~is_repeated)
    return [f"{row['id'] or row['source']}: {row['reason']}" for row in lost_rows.iter_rows(named=True)]


def faults_of_report(
    cfg: Validate,
    report: ValidateReport,
    rows: SplitRows,
    miscounts: list[Fault],
    rows_always_allowed: int = MIN_ALLOWED_ROWS,
) -> list[Fault]:
    """Return the faults for which the data is rejected, or an empty list if the data is accepted."""
    faults = list(miscounts)
    faults += shares_above_limits(cfg, rows.clean, rows.quarantine, rows_always_allowed)
    if cfg.allow_lost_test_pairs:
        return faults
    for name, counts in report.datasets.items():
        lost_pairs = counts.lost_test_pairs
        if lost_pairs:
            faults.append(Fault("validate.lost_test_pairs", dataset=name, value=len(lost_pairs), rows=lost_pairs))
    return faults


@dataclass(frozen=True)
class ShareLimit:
    """A limit on the share of faulty rows in each group of rows.

    Attributes:
        share: maximum share, from 0 to 1.
        group_by: columns by which the rows are grouped.
        code: code of the fault for a group above the limit.
    """

    share: float
    group_by: tuple[str, ...]
    code: str


def shares_above_limits(
    cfg: Validate, clean: pl.DataFrame, quarantine: pl.DataFrame, rows_always_allowed: int = MIN_ALLOWED_ROWS
) -> Iterator[Fault]:
    """Yield a fault for each share of bad or leaked rows that is above its limit.

    The share of bad rows is limited in each split of each dataset. The share of leaked rows, which are in a test set,
    is limited in all training rows of a dataset. A leaked row does not count as a bad row. Rows without a split are
    always bad, and their share is computed in the whole dataset.
    """
    columns = ["dataset", "split", "own_split"]
    all_rows = pl.concat([clean.select(columns), quarantine.select(columns)])
    bad_limit = ShareLimit(
        share=cfg.max_quarantined_share,
        group_by=("dataset", "own_split"),
        code="validate.too_many_bad_rows",
    )
    leak_limit = ShareLimit(
        share=cfg.max_leaked_share,
        group_by=("dataset",),
        code="validate.too_many_leaks",
    )
    bad_rows = quarantine.filter(pl.col("rules") != [LEAK_RULE])
    leaked_rows = quarantine.filter(pl.col("rules").list.contains(LEAK_RULE))
    yield from _groups_above_limit(bad_limit, bad_rows, all_rows, rows_always_allowed)
    yield from _groups_above_limit(leak_limit, leaked_rows, all_rows.filter(split="train"), rows_always_allowed)


def _groups_above_limit(
    limit: ShareLimit, faulty_rows: pl.DataFrame, all_rows: pl.DataFrame, rows_always_allowed: int
) -> Iterator[Fault]:
    """Yield a fault for each group of rows in which the share of faulty rows is above the limit."""
    for key, group in faulty_rows.group_by(limit.group_by, maintain_order=True):
        values = dict(zip(limit.group_by, key, strict=True))
        is_in_group = [pl.col(column) == value for column, value in values.items() if value is not None]
        total = all_rows.filter(is_in_group).height
        if group.height <= count_allowed_rows(limit.share, total, rows_always_allowed):
            continue
        name = " ".join(str(value) if value else "without a split" for value in key)
        reasons = [f"{row['source']}: {row['reason']}" for row in group.iter_rows(named=True)]
        yield Fault(limit.code, group=name, value=group.height, total=total, limit=limit.share, rows=reasons)


def count_allowed_rows(share: float, rows: int, rows_always_allowed: int = MIN_ALLOWED_ROWS) -> int:
    """Return how many rows of a group may be bad or in a test set.

    At least `rows_always_allowed` rows are allowed, because in a small group a single row exceeds any sensible share,
    and quarantined rows are not used for training. However, at least one row of the group must remain. A share of 0
    does not allow any rows, because a user who sets 0 wants to know about every row.
    """
    rows_by_share = math.floor(Fraction(str(share)) * rows)
    if share > 0 and rows > rows_always_allowed:
        return max(rows_by_share, rows_always_allowed)
    return rows_by_share


def faults_of_test_pairs(protocol: str | None, entries: Mapping[str, DatasetEntry], rows: SplitRows) -> Iterator[Fault]:
    """Yield a fault if the dataset with which the gate scores models has no clean test pairs."""
    if protocol is None:
        return
    dataset = protocol.partition("/")[0]
    if dataset not in entries or not rows.clean.filter(dataset=dataset, split="test").is_empty():
        return
    lost_pairs = rows.quarantine.filter(dataset=dataset, own_split="test")
    if lost_pairs.is_empty():
        yield Fault("ingest.no_test_pair", dataset=dataset, protocol=protocol)
    else:
        yield Fault(
            "validate.no_clean_test_pair",
            dataset=dataset,
            protocol=protocol,
            rows=lost_pairs.height,
            first=_first_reason(lost_pairs),
        )
