"""Data that validate refuses: too many bad rows, unexpected counts, lost test pairs and changed images."""

import html
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import polars as pl
import pytest

from m3diff.datasets import DATASETS
from m3diff.datasets.spec import Published, SplitCount
from m3diff.records.errors import DataError, Fault, command_to_read_again
from m3diff.records.tables import read_table, write_table
from m3diff.stages.ingest.params import DatasetEntry
from m3diff.stages.validate import stage
from m3diff.stages.validate.params import Validate
from m3diff.stages.validate.rules import LEAK_RULE
from m3diff.stages.validate.stage import (
    ValidateReport,
    check_records,
    count_allowed_rows,
    find_rejection_faults,
    shares_above_limits,
)
from tests.errors import Message, raises
from tests.layouts import (
    edit_json,
    image_cache,
    make_entry,
    run_ingest,
    run_validate,
    save_picture,
    write_clevr,
)
from tests.stages.validate.conftest import KEY


@pytest.mark.fault("14")
def test_each_split_above_the_limit_is_refused_after_the_quarantine_is_written(raw):
    write_clevr(raw.parent / "more", {"train": list(range(20, 60)), "val": [], "test": [70]})
    for scene in ("000005", "000008"):
        (raw / f"sc_images/CLEVR_semantic_{scene}.png").unlink()
    (raw / "nsc_images/CLEVR_nonsemantic_000009.png").unlink()
    run_ingest(raw)
    run_ingest(raw.parent / "more", name="more")
    with raises(DataError, "validate.data_refused", quarantine=raw.parent / "clean/quarantine") as refused:
        run_validate(raw.parent, max_quarantined_share=0.05)
    (fault,) = refused.value.fields["faults"]  # not of val, as one row of a split is always allowed
    assert fault.code == "validate.too_many_bad_rows"
    assert fault.fields["group"] == "mini train"
    assert fault.fields["value"] == 2
    assert fault.fields["total"] == 6
    assert fault.fields["limit"] == 0.05
    assert any("CLEVR_default_000008.png: after: " in row for row in fault.fields["rows"])
    bad = pl.read_parquet(raw.parent / "clean/quarantine")["id"].to_list()
    assert sorted(bad) == ["mini/000005.png", "mini/000008.png", "mini/000009.png_n"]
    assert (raw.parent / "clean/docs/index.html").is_file()
    run_validate(raw.parent, max_quarantined_share=0.5)


ALLOWED = {
    "a hundredth of sixty is less than a row": (0.01, 60, 1),
    "a hundredth of a hundred": (0.01, 100, 1),
    "a hundredth of two hundred and fifty": (0.01, 250, 2),
    "a share of two rows": (0.01, 2, 1),
    "the only row": (0.01, 1, 0),
    "the only row of a limit that allows all": (1.0, 1, 1),
    "none, as it is written": (0, 60, 0),
    "no row": (0.01, 0, 0),
}


@pytest.mark.parametrize(("share", "rows", "allowed"), ALLOWED.values(), ids=ALLOWED)
def test_one_row_of_a_group_is_allowed_but_not_the_only_one(share, rows, allowed):
    assert count_allowed_rows(share, rows) == allowed


@pytest.mark.parametrize(("protocol", "is_refused"), [("mini/total", True), ("other/total", False), (None, False)])
def test_the_dataset_of_the_gates_protocol_needs_test_pairs(raw, quick, protocol, is_refused):
    edit_json(raw / "splits.json", lambda splits: splits.update(train=[3, 5, 8, 1, 12], test=[]))
    run_ingest(raw)
    cfg = {"max_quarantined_share": 1.0, "max_leaked_share": 1.0, "allow_lost_test_pairs": True}
    cfg |= {"max_caption_chars": 2000, "max_image_pixels": 1_000_000, "allow_test_leakage": False}
    limits = Validate.model_validate(cfg | {"near_duplicate_max_diff": None, "compare_px": 100})
    folders = image_cache(raw.parent), raw.parent / "records", raw.parent / "clean"
    entries = {"mini": make_entry("clevr_change", raw)}
    if is_refused:
        fault = Fault("ingest.no_test_pair", dataset="mini", protocol="mini/total")
        with raises(DataError, "validate.data_refused", faults=[fault]):
            stage.validate(limits, entries, *folders, protocol)
        page = html.unescape((raw.parent / "clean/docs/index.html").read_text("utf-8"))
        assert "<h1>The data is refused</h1>" in page
        assert str(fault) in page
        assert "rows are clean</h1>" not in page
    else:
        assert stage.validate(limits, entries, *folders, protocol).rows_out == 12


COUNTS = {"train": 6, "val": 2, "test": 4}


@pytest.fixture
def without_test_images(raw, quick) -> Path:
    """Records in which an image of every test pair is missing."""
    run_ingest(raw)
    records = pl.read_parquet(raw.parent / "records/mini/records")
    for images in records.filter(own_split="test")["images"]:
        Path(images[1]["uri"]).unlink()
    run_ingest(raw)
    return raw.parent


def test_a_run_whose_test_pairs_are_all_quarantined_says_so_and_where_they_are(without_test_images, capsys):
    run_validate(without_test_images)
    output = capsys.readouterr().out
    clean = without_test_images / "clean"
    lost_pairs = pl.read_parquet(clean / "quarantine").filter(split="test")
    where = {"quarantine": clean / "quarantine", "page": clean / "docs" / "index.html"}
    assert lost_pairs.height > 0
    assert Message("validate.all_test_pairs_quarantined", rows=lost_pairs.height, **where).in_text(output)
    assert not Message("validate.no_test_pairs").in_text(output)


def test_quarantined_test_pairs_of_the_gate_are_no_missing_column_of_the_split(without_test_images):
    with raises(DataError, "validate.data_refused") as refused:
        run_validate(without_test_images, protocol="mini/total")
    (fault,) = [fault for fault in refused.value.fields["faults"] if fault.fields.get("protocol")]
    assert fault.code == "validate.no_clean_test_pair"
    assert fault.fields["dataset"] == "mini"


@pytest.fixture
def expect(raw, monkeypatch) -> Callable[..., ValidateReport]:
    """Return a function that validates with expected pairs, and with `published` as published pairs of CLEVR-Change."""
    run_ingest(raw)

    def check(expected, published=COUNTS, **fields) -> ValidateReport:
        part = Published("mini", "Mini", **{split: SplitCount(pairs) for split, pairs in published.items()})
        monkeypatch.setitem(DATASETS.data, "clevr_change", replace(DATASETS["clevr_change"], published=(part,)))
        return run_validate(raw.parent, {"mini": make_entry("clevr_change", raw, expected_pairs=expected, **fields)})

    return check


@pytest.mark.parametrize(
    ("expected", "published", "fault"),
    [
        ({"train": 6, "test": 4}, {}, None),
        ({"train": 7, "test": 4}, {}, {"split": "train", "value": 6, "expected": 7}),
        ("published", {}, None),
        ("published", {"test": 5}, {"split": "test", "value": 4, "expected": 5}),
        (None, {"test": 5}, None),
    ],
)
def test_records_must_have_the_expected_counts(expect, expected, published, fault):
    if fault is None:
        assert expect(expected, COUNTS | published).rows_out == 12
    else:
        unexpected = Fault("validate.unexpected_count", dataset="mini", **fault)
        with raises(DataError, "validate.data_refused", faults=[unexpected]):
            expect(expected, COUNTS | published)


def test_a_validation_split_that_trains_is_judged_as_a_validation_split(raw, expect):
    run_ingest(raw, train_on=["train", "val"])
    assert expect("published", train_on=["train", "val"]).datasets["mini"].pairs == {"test": 4, "train": 8}
    unexpected = Fault("validate.unexpected_count", dataset="mini", split="val", value=2, expected=3)
    with raises(DataError, "validate.data_refused", faults=[unexpected]):
        expect("published", COUNTS | {"val": 3}, train_on=["train", "val"])
    (raw / "nsc_images/CLEVR_nonsemantic_000009.png").unlink()
    (raw / "sc_images/CLEVR_semantic_000009.png").unlink()
    run_ingest(raw, train_on=["train", "val"])
    with raises(DataError, "validate.data_refused") as refused:
        run_validate(raw.parent, max_quarantined_share=0.2)
    (fault,) = refused.value.fields["faults"]
    assert fault.code == "validate.too_many_bad_rows"
    assert fault.fields["group"] == "mini val"
    assert fault.fields["value"] == fault.fields["total"] == 2


@pytest.mark.fault("16")
def test_a_lost_test_pair_is_refused_unless_allowed_and_counts_exclude_quarantine(raw, expect):
    """A repeated row is not a lost test pair. A training pair that is quarantined because it is in test is counted."""
    (raw / "sc_images/CLEVR_semantic_000001.png").unlink()
    (raw / "sc_images/CLEVR_semantic_000003.png").unlink()
    for folder, kind in (("images", "default"), ("sc_images", "semantic")):
        shutil.copy(raw / f"{folder}/CLEVR_{kind}_000012.png", raw / f"{folder}/CLEVR_{kind}_000008.png")
    run_ingest(raw)
    unexpected = Fault("validate.unexpected_count", dataset="mini", split="train", value=5, expected=6)
    with raises(DataError, "validate.data_refused", faults=[unexpected]):
        expect("published")
    report = expect("published", COUNTS | {"train": 5})  # allowed, so test is not held against what is left of it
    (lost,) = report.datasets["mini"].lost_test_pairs
    assert lost.startswith("mini/000001.png: after: ")
    assert report.leaks == 1
    assert report.datasets["mini"].pairs == {"test": 3, "train": 4, "val": 2}
    edit_json(raw / "splits.json", lambda splits: splits["test"].append(12))
    run_ingest(raw)
    with raises(DataError, "validate.data_refused") as refused:
        run_validate(raw.parent, allow_lost_test_pairs=False)
    (fault,) = refused.value.fields["faults"]
    assert fault.code == "validate.lost_test_pairs"
    assert fault.fields["dataset"] == "mini"
    assert fault.fields["rows"] == [lost]


def check(folder: Path, entry: DatasetEntry, protocol: str | None = None, **changes: Any) -> list[Fault]:
    """Return the faults that `m3diff data check` shows for records of the dataset mini, with the default limits."""
    cfg = Validate(**changes)
    results = check_records(cfg, {"mini": entry}, image_cache(folder), folder / "records")
    return find_rejection_faults(cfg, {"mini": entry}, results, protocol)


def test_a_check_refuses_by_default_what_the_stage_refuses(raw):
    for name in (
        "sc_images/CLEVR_semantic_000001",
        "sc_images/CLEVR_semantic_000003",
        "sc_images/CLEVR_semantic_000012",
    ):
        (raw / f"{name}.png").unlink()
    run_ingest(raw)
    entry = make_entry("clevr_change", raw, expected_pairs={"train": 6, "test": 2})
    miscount, bad_test_rows, lost_pairs = check(raw.parent, entry, "mini/total")
    assert miscount == Fault("validate.unexpected_count", dataset="mini", split="train", value=5, expected=6)
    assert bad_test_rows.code == "validate.too_many_bad_rows"
    assert bad_test_rows.fields["group"] == "mini test"
    assert lost_pairs.code == "validate.lost_test_pairs"
    assert [row.partition(":")[0] for row in lost_pairs.fields["rows"]] == ["mini/000001.png", "mini/000012.png"]
    allowed = check(raw.parent, entry, allow_lost_test_pairs=True, max_quarantined_share=0.5)
    counts_of_lost = Fault("validate.unexpected_count", dataset="mini", split="test", value=4, expected=2)
    assert allowed == [miscount, counts_of_lost], "lost pairs that are allowed count"


def test_a_check_refuses_data_without_test_pairs_of_the_protocol(raw):
    edit_json(raw / "splits.json", lambda splits: splits.update(train=[3, 5, 8, 1, 12], test=[]))
    run_ingest(raw)
    entry = make_entry("clevr_change", raw)
    fault = Fault("ingest.no_test_pair", dataset="mini", protocol="mini/total")
    assert check(raw.parent, entry, "mini/total") == [fault]
    assert check(raw.parent, entry) == []


def test_data_without_any_test_row_and_data_that_lost_all_of_them_are_told_apart(tmp_path):
    rows = pl.DataFrame({"own_split": ["train", "test", "test"], "source": ["a", "b", "c"], "reason": ["x", "y", "z"]})
    without_test_rows = stage.SplitRows(clean=rows, quarantine=rows.head(1), respaced=0)
    assert stage._fault_without_test_pairs(without_test_rows, tmp_path) == Fault("validate.no_test_pairs")
    fault = stage._fault_without_test_pairs(stage.SplitRows(clean=rows, quarantine=rows, respaced=0), tmp_path)
    assert fault.code == "validate.all_test_pairs_quarantined"
    assert fault.fields["rows"] == 2
    assert fault.fields["first"] == "b: y"


@pytest.mark.parametrize(
    ("image_root", "paths", "command"),
    [
        (None, ["raw/a/1.png"], "touch -c raw/a/1.png"),
        (None, ["raw/a/1.png", "raw/a/2.png"], "find -L raw/a -type f -exec touch -c {} +"),
        (None, ["raw/a/1.png", "raw/b/2.png"], "find -L raw -type f -exec touch -c {} +"),
        ("other", ["raw/a/1.png"], "touch -c raw/a/1.png"),
        ("other", ["raw/a/1.png", "other/2.png"], "dvc repro --single-item --force ingest@mini"),
    ],
    ids=["an image", "a folder", "two folders", "an image of two roots", "an image that DVC does not watch"],
)
def test_the_remedy_for_edited_images_makes_dvc_read_them_again(image_root, paths, command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path in paths:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).touch()
    entry = make_entry("pairs", Path("raw"), image_root=image_root)
    assert stage._command_to_ingest_again("mini", entry, paths) == f"`{command} && dvc repro`"


@pytest.mark.fault("14")
def test_missing_empty_or_foreign_records_are_refused_with_a_remedy(raw):
    gone = raw.parent / "records/gone/records"
    with raises(DataError, "files.unreadable_stage_output", path=gone, writer="ingest"):
        run_validate(raw.parent, {"gone": make_entry("pairs", raw)})
    run_ingest(raw)
    table = raw.parent / "records/mini/records"
    part = table / "00000.parquet"
    file_bytes = part.read_bytes()
    write_table(read_table(table).slice(0, 0), table)
    with raises(DataError, "validate.no_record", path=table):
        run_validate(raw.parent)
    part.write_bytes(file_bytes[:100])
    with raises(DataError, "files.unreadable_stage_output", path=part, writer="ingest"):
        run_validate(raw.parent)
    pl.DataFrame({"id": ["a"]}).write_parquet(part)
    with raises(DataError, "files.other_columns", path=table, writer="ingest"):
        run_validate(raw.parent)


@pytest.mark.fault("09")
@pytest.mark.parametrize("change", ["another before", "another after", "without cache", "removed", "restored"])
def test_an_image_that_changed_since_ingest_is_refused(raw, change):
    # two pairs have the same image before
    side = "before" if change == "another before" else "after"
    path = raw / f"{'images/CLEVR_default' if side == 'before' else 'nsc_images/CLEVR_nonsemantic'}_000005.png"
    data = path.read_bytes()
    if change == "restored":
        path.unlink()
    run_ingest(raw)
    if change == "restored":
        path.write_bytes(data)
    elif change == "removed":
        path.unlink()
    else:
        save_picture(path, 99)
    if change == "without cache":
        image_cache(raw.parent).unlink()
    fields = {
        "path": str(path),
        "count": 1,
        "side": side,
        "dataset": "mini",
    }
    code = "validate.image_missing" if change == "removed" else "validate.image_changed"
    with raises(DataError, code, **fields) as refused:
        run_validate(raw.parent)
    assert refused.value.fields["source"].endswith(f"json, {KEY}")
    touched_path = path.parent if change == "removed" else path
    assert refused.value.fields["command"] == command_to_read_again(touched_path)
    assert list((raw.parent / "clean").iterdir()) == []


def limits(share: float) -> Any:
    return SimpleNamespace(max_quarantined_share=share, max_leaked_share=share)


def test_exactly_the_allowed_share_passes_where_floats_would_round_it_down():
    for share, count in ((0.29, 29), (0.07, 7), (0.57, 57), (0.58, 58)):
        rows = [{"dataset": "a", "split": "train", "own_split": "train", "source": "", "reason": ""}] * 100
        for rule in (LEAK_RULE, "empty"):
            quarantine = pl.DataFrame(rows[:count]).with_columns(rules=pl.lit([rule]))
            assert [*shares_above_limits(limits(share), pl.DataFrame(rows[count:]), quarantine)] == []
            assert len([*shares_above_limits(limits(share - 0.001), pl.DataFrame(rows[count:]), quarantine)]) == 1
    lost = pl.DataFrame([rows[0] | {"own_split": None, "rules": ["id"]}] * 2, schema=quarantine.schema)
    # Rows without a split are a share of all 7 rows, of which 2 / 7 = 0.286 are bad
    (fault,) = shares_above_limits(limits(0.28), pl.DataFrame(rows[:5]), lost)
    assert fault.code == "validate.too_many_bad_rows"
    assert fault.fields["group"] == "a without a split"
    assert fault.fields["value"] == 2
    assert fault.fields["total"] == 7
    assert fault.fields["limit"] == 0.28
