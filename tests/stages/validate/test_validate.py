"""The clean records, the quarantine and the report of validate."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import polars as pl
import pyarrow.parquet as pq
import pytest
from PIL import Image
from pydantic import ValidationError

from m3diff.commands.inspect.judgement import RULES_BETWEEN_SPLITS
from m3diff.records.errors import Fault
from m3diff.records.schemas import RECORD_SCHEMA
from m3diff.stages.validate.params import Validate
from m3diff.stages.validate.rule_texts import RULE_TEXTS
from m3diff.stages.validate.rules import build_rules
from m3diff.stages.validate.stage import SplitRows, _build_report
from m3diff.stages.validate.suite import run_suite
from tests.errors import Message
from tests.layouts import (
    edit_json,
    make_entry,
    run_ingest,
    run_validate,
    save_picture,
    write_clevr,
    write_json,
    write_spot,
)
from tests.stages.validate.conftest import KEY, ingest_and_validate, quarantine


def read_outputs(folder: Path) -> dict[str, bytes]:
    files = sorted(path for path in (folder / "clean").rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.mark.fault("15", "16", "17")
def test_each_bad_row_is_quarantined_with_its_reason_and_all_others_stay(tmp_path):
    """A fourth band may be near-infrared and not transparency. Images that became white would look like twins."""
    separators = ["\u2028", "\u2029", "\r\n", "\v", "\f", "\x85", "\x1c", "\x00", "\ufeff", " \t "]
    raw = write_clevr(tmp_path / "raw", {"train": [3, 5, 12, 20], "val": [9], "test": [1, 12, 40]})
    for scene, alpha in ((5, 5), (9, 9), (40, 40)):
        for folder, kind in (("images", "default"), ("nsc_images", "nonsemantic")):
            path = raw / f"{folder}/CLEVR_{kind}_{scene:06d}.png"
            image = Image.open(path).convert("RGB")
            image.putalpha(alpha)
            image.save(path, "PNG" if scene == 5 else "TIFF")
    path = raw / "images/CLEVR_default_000020.png"
    path.write_bytes(path.read_bytes()[:60])
    texts = {3: ["see <b>this</b>"], 1: [f"the{separator}cube " for separator in separators], 9: ["fine", ""]}
    captions_by_image = {f"CLEVR_default_{scene:06d}.png": captions for scene, captions in texts.items()}
    edit_json(raw / "change_captions.json", lambda references: references.update(captions_by_image))
    reasons = ingest_and_validate(raw)
    blank = Message("images.blank", band="fourth band", highest_alpha=5)
    truncated = Message("images.undecodable")
    expected = {
        "3.png": r"references: 1 .*",
        **dict.fromkeys(("20.png", "20.png_n"), rf"before: .*20\.png {truncated.pattern}"),
        "5.png": rf"before: .*5\.png {blank.pattern}",
        "5.png_n": rf"before: .*5\.png {blank.pattern}; after: .*5\.png {blank.pattern}",
        **dict.fromkeys(("12.png", "12.png_n"), r"id: mini/000012\.png.*; split: .*mini/000012 .*"),
    }
    assert reasons.keys() == {f"mini/{name.zfill(10 + 2 * name.endswith('_n'))}" for name in expected}
    for name, reason in expected.items():
        pair_id = f"mini/{name.zfill(10 + 2 * name.endswith('_n'))}"
        assert re.fullmatch(reason, reasons[pair_id]), pair_id
    clean = pl.read_parquet(tmp_path / "clean/records")
    references = dict(clean.select("id", "references").iter_rows())
    assert references["mini/000001.png"] == ["the cube"] * len(separators)
    assert references["mini/000009.png"] == ["fine", ""]
    assert clean.filter(scene="mini/000012")["split"].to_list() == ["test", "test"]
    assert json.loads((tmp_path / "clean/report.json").read_text())["references_respaced"] == len(separators)


def test_sound_data_passes_unchanged_and_no_image_is_read_twice(raw, monkeypatch):
    run_ingest(raw)
    os.utime(raw / "images" / KEY, ns=(1, 1))
    assert run_validate(raw.parent, max_quarantined_share=0.0).bad_images == 0
    assert quarantine(raw.parent) == {}
    page = (raw.parent / "clean/docs/index.html").read_text("utf-8")
    assert "<h1>All 12 rows are clean</h1>" in page
    assert "all met" in page
    table = pq.read_table(raw.parent / "clean/records")
    assert table.schema.equals(RECORD_SCHEMA)
    before = pq.read_table(raw.parent / "records/mini/records").drop_columns(["own_split", "fault"])
    assert table.to_pylist() == before.to_pylist()
    monkeypatch.setattr("m3diff.images.check._check_on_cores", None)
    assert run_validate(raw.parent).images == 18


def test_every_count_of_the_report(raw, quick):
    texts = {KEY: ["<b>", "x"], "CLEVR_default_000009.png": ["a\nb", "c  d", ""]}
    edit_json(raw / "change_captions.json", lambda references: references.update(texts))
    (raw / "sc_images/CLEVR_semantic_000003.png").write_bytes(b"no image")
    image = Image.open(raw / "sc_images/CLEVR_semantic_000008.png")
    image.save(raw / "sc_images/CLEVR_semantic_000008.png", "JPEG")  # the format does not match the name
    for folder, kind in (("images", "default"), ("nsc_images", "nonsemantic")):  # a training pair that is also in test
        shutil.copy(raw / f"{folder}/CLEVR_{kind}_000012.png", raw / f"{folder}/CLEVR_{kind}_000008.png")
    run_ingest(raw)
    run_ingest(write_spot(raw.parent / "spot"), "spot_the_diff", "other")
    run_ingest(raw, name="removed")
    entries = {name: make_entry("pairs", raw) for name in ("other", "mini")}
    report_of_both = run_validate(raw.parent, entries, near_duplicate_max_diff=None)
    assert report_of_both.datasets["other"].references == {"train": 5, "val": 1, "test": 1}
    datasets = pl.read_parquet(raw.parent / "clean/records")["dataset"].to_list()
    assert datasets == ["other"] * 4 + ["mini"] * 9, "datasets are in the order of their entries"
    report = run_validate(raw.parent, {"mini": entries["mini"]}, near_duplicate_max_diff=None)
    (finding,) = report.findings
    assert finding.dataset == "mini"
    assert finding.kind == "before_in_several_splits"
    assert finding.count == 1
    assert report.model_dump(exclude={"findings"}) == {
        **{"stage": "validate", "rows_in": 12, "rows_out": 9, "quarantined": 3, "leaks": 1, "references_respaced": 2},
        **{"images": 18, "bad_images": 1, "mislabelled_images": 1},
        "overlaps": {"train in test": 1, "val in test": 0, "train in val": 0},
        "datasets": {
            "mini": {
                "pairs": {"test": 4, "train": 3, "val": 2},
                "references": {"test": 8, "train": 6, "val": 5},
                "questions": {},
                "quarantined": 3,
                "broken_rules": {"image_2_decodes": 1, "no_markup": 1, "not_in_test": 1},
                "lost_test_pairs": [],
            }
        },
    }
    assert json.loads((raw.parent / "clean/report.json").read_text()) == report.model_dump()


def test_the_report_lists_datasets_splits_and_rules_by_name():
    names = [f"set{number}" for number in (7, 2, 9, 1, 8, 3, 6, 0, 5, 4)]
    fields = {"image_set": "a", "references": ["x", "y"], "id": "a", "own_split": "train", "source": "", "reason": ""}
    rows = []
    for name in names:
        for split, question in (("val", "How many?"), ("train", None), ("train", None), ("test", None)):
            rows.append(fields | {"dataset": name, "split": split, "question": question, "rules": ["readable", "id"]})
    frame = pl.DataFrame(rows)
    images = pl.DataFrame(schema={"path": pl.String, "verdict": pl.String, "format": pl.String})
    results: Any = SimpleNamespace(images=images, overlaps={}, findings=[])
    report = _build_report(results, SplitRows(clean=frame, quarantine=frame, respaced=0))
    assert list(report.datasets) == sorted(names)
    for counts in report.datasets.values():
        assert list(counts.references.items()) == [("test", 2), ("train", 4), ("val", 2)]
        assert list(counts.pairs.items()) == [("test", 1), ("train", 1), ("val", 1)]
        assert counts.questions == {"val": 1}
        assert list(counts.broken_rules.items()) == [("id", 4), ("readable", 4)]


@pytest.mark.fault("14")
def test_both_engines_agree_on_the_rows_that_break_each_rule(tmp_path):
    """The dataset has a row for each rule. great-expectations and polars must find the same broken rules."""
    save_picture(tmp_path / "raw/a.png", 1)
    save_picture(tmp_path / "raw/b.png", 2)
    sound = {"before": "a.png", "after": "b.png", "captions": ["x"]}
    rows = [
        {**sound, "id": "kept", "split": "test"},
        {**sound, "id": "kept", "split": "train", "scene": "s"},
        {**sound, "id": "leak", "split": "train"},
        {**sound, "id": "dev", "split": "dev", "after": "a.png"},
        {**sound, "id": "none", "split": "val", "captions": []},
        {**sound, "id": "long", "split": "val", "captions": ["x" * 31]},
        {**sound, "id": "markup", "split": "val", "captions": ["ok", "a &amp; b", "<b>"]},
        {**sound, "id": "images", "split": "val", "before": "gone.png", "after": "/b.png"},
        {**sound, "id": "s1", "split": "val", "scene": "one", "after": "a.png"},
        {**sound, "id": "s2", "split": "test", "scene": "one", "before": "b.png", "after": "a.png"},
        {**sound, "id": None, "split": None, "before": None},
    ]
    write_json(tmp_path / "raw/pairs.json", rows)
    run_ingest(tmp_path / "raw", "pairs", manifest="pairs.json")
    report = run_validate(tmp_path, max_caption_chars=30)
    frame = pl.read_parquet(tmp_path / "clean/quarantine")
    assert {row["id"]: row["rules"] for row in frame.iter_rows(named=True)} == {
        "mini/kept": ["readable", "id_unique", "not_in_test"],
        "mini/leak": ["not_in_test"],
        "mini/dev": ["split_known", "shows_a_change"],
        "mini/none": ["references_given"],
        "mini/long": ["reference_length"],
        "mini/markup": ["no_markup"],
        "mini/images": ["readable", "images_present"],
        "mini/s1": ["scene_in_one_split", "shows_a_change"],
        None: ["readable", "id_given", "split_given", "images_present"],
    }
    reasons = dict(frame.select("id", "reason").iter_rows())
    for name, words in {
        "markup": r"references: 2 ",
        "long": r"references: .*31 .* validate\.max_caption_chars = 30",
        "s1": r"split: .*mini/one",
    }.items():
        assert re.match(words, reasons[f"mini/{name}"])
    assert reasons["mini/images"].endswith(f"gone.png {Fault('images.missing')}")
    assert reasons[None].startswith("before, split: ")
    assert not any(reason.endswith("; ") for reason in reasons.values()), "a rule without a reason of its own"
    assert report.quarantined == 9
    assert report.leaks == 1
    assert report.bad_images == 1


def test_great_expectations_counts_pairs_and_shows_no_progress(capsys):
    facts = pl.DataFrame({"dataset": ["a", "a"], "own_split": ["train", "test"], "is_counted": [1, 0]})
    results, miscounts = run_suite(facts, [], {"a": {"train": 1, "test": 2}})
    assert [(result.dataset, result.rule, result.row_count) for result in results if result.is_met] == [
        ("all", "rows", 2),
        ("a", "pairs of train", 1),
    ]
    assert miscounts == [Fault("validate.unexpected_count", dataset="a", split="test", value=0, expected=2)]
    assert capsys.readouterr().err == ""


def test_a_missing_file_and_a_broken_file_break_different_rules(raw):
    (raw / "sc_images/CLEVR_semantic_000008.png").unlink()
    (raw / "sc_images/CLEVR_semantic_000003.png").write_bytes(b"no image")
    ingest_and_validate(raw)
    frame = pl.read_parquet(raw.parent / "clean/quarantine")
    broken = {row["id"]: row["rules"] for row in frame.iter_rows(named=True)}
    assert sorted(broken.values()) == [["image_2_decodes"], ["images_present"]]
    assert all("; ;" not in reason and not reason.endswith("; ") for reason in frame["reason"])
    text = (raw.parent / "clean/docs/index.html").read_text("utf-8")
    assert "An image file is missing: 1 row</h3>" in text
    assert "The second image cannot be opened: 1 row</h3>" in text


def test_every_rule_has_a_text_and_every_text_has_a_rule():
    rules = {rule.name for rule in build_rules(2000)}
    assert sorted(rules - RULE_TEXTS.keys()) == [], "rules without a text in RULE_TEXTS"
    assert sorted(RULE_TEXTS.keys() - rules) == [], "texts in RULE_TEXTS without a rule"
    assert sorted(set(RULES_BETWEEN_SPLITS) - rules) == [], "names in RULES_BETWEEN_SPLITS without a rule"


@pytest.mark.slow(25)
def test_every_output_is_equal_in_another_process_with_and_without_cache(raw):
    (raw / "sc_images/CLEVR_semantic_000008.png").write_bytes(b"no image")
    ingest_and_validate(raw)
    code = (
        "from pathlib import Path; from tests.layouts import run_validate\n"
        f"if __name__ == '__main__': run_validate(Path({str(raw.parent)!r}), cache=Path({str(raw / 'other')!r}))"
    )
    first_outputs = read_outputs(raw.parent)
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    assert read_outputs(raw.parent) == first_outputs


def test_values_outside_the_limits_of_the_section_are_refused():
    fields = {"max_quarantined_share": 0, "max_caption_chars": 1, "max_image_pixels": 1, "allow_test_leakage": False}
    fields |= {"near_duplicate_max_diff": 255, "allow_lost_test_pairs": False, "max_leaked_share": 1, "compare_px": 8}
    Validate.model_validate(fields)
    wrong = {"max_caption_chars": 0, "max_image_pixels": 0, "near_duplicate_max_diff": 256}
    wrong |= {"max_quarantined_share": 1.1, "max_leaked_share": 1.1, "compare_px": 7}
    with pytest.raises(ValidationError) as refused:
        Validate.model_validate(fields | wrong)
    assert {error["loc"] for error in refused.value.errors()} == {(name,) for name in wrong}
