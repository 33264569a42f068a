import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import polars as pl
import pyarrow.parquet as pq
import pytest
from PIL import Image, ImageFilter

from m3diff.datasets import DATASETS
from m3diff.datasets.spec import Published, SplitCount
from m3diff.records.errors import DataError
from m3diff.records.schemas import RECORD_SCHEMA
from m3diff.stages.validate import stage
from m3diff.stages.validate.params import Validate
from m3diff.stages.validate.rules import LEAK, find_twins, sound_pairs
from m3diff.stages.validate.stage import ValidateReport, too_many
from tests.layouts import (
    edit_json,
    image_cache,
    judge_by_polars_alone,
    make_entry,
    run_ingest,
    run_validate,
    save_picture,
    write_clevr,
    write_json,
    write_spot,
)

KEY = "CLEVR_default_000005.png"


@pytest.fixture
def raw(tmp_path) -> Path:
    return write_clevr(tmp_path / "raw")


@pytest.fixture
def quick(monkeypatch) -> None:
    judge_by_polars_alone(monkeypatch)


def quarantine(folder: Path) -> dict[str, str]:
    """Reason by id, after checking that no row was lost."""
    frame = pl.read_parquet(folder / "clean/quarantine.parquet")
    clean = pl.read_parquet(folder / "clean/records.parquet")
    assert clean.height + frame.height == pq.read_metadata(folder / "records/mini/records.parquet").num_rows
    return dict(frame.select("id", "reason").iter_rows())


def outputs(folder: Path) -> dict[str, bytes]:
    files = sorted(path for path in (folder / "clean").rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def ingest_and_validate(raw: Path, **changes) -> dict[str, str]:
    run_ingest(raw)
    run_validate(raw.parent, **changes)
    return quarantine(raw.parent)


@pytest.mark.fault("15", "16", "17")
def test_each_bad_row_is_quarantined_with_its_reason_and_the_others_are_kept_whole(tmp_path):
    """Near-infrared is no transparency: white pictures would also be near to every other, and lose a training pair."""
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
    texts = {3: ["see <b>this</b>"], 1: [f"the{each}cube " for each in separators], 9: ["fine", ""]}
    named = {f"CLEVR_default_{scene:06d}.png": found for scene, found in texts.items()}
    edit_json(raw / "change_captions.json", lambda references: references.update(named))
    found = ingest_and_validate(raw)
    hidden = r"before: .*5\.png is blank once decoded: its fourth band .* 5 of 255.*; save it without(; after: .*)?"
    twice = r"id: .* occurs more than once; .*; split: scene mini/000012 is also in a higher split .*"
    expected = {
        "3.png": "references: 1 hold HTML or a special token; write plain text",
        **dict.fromkeys(("20.png", "20.png_n"), r"before: .*20\.png .*; restore the file"),
        **dict.fromkeys(("5.png", "5.png_n"), hidden),
        **dict.fromkeys(("12.png", "12.png_n"), twice),
    }
    assert found.keys() == {f"mini/{name.zfill(10 + 2 * name.endswith('_n'))}" for name in expected}
    for name, reason in expected.items():
        full = f"mini/{name.zfill(10 + 2 * name.endswith('_n'))}"
        assert re.fullmatch(reason, found[full]), (name, found[full])
    clean = pl.read_parquet(tmp_path / "clean/records.parquet")
    kept = dict(clean.select("id", "references").iter_rows())
    assert kept["mini/000001.png"] == ["the cube"] * len(separators)
    assert kept["mini/000009.png"] == ["fine", ""]
    assert clean.filter(scene="mini/000012")["split"].to_list() == ["test", "test"]
    assert json.loads((tmp_path / "clean/report.json").read_text())["references_respaced"] == len(separators)


@pytest.mark.fault("14")
def test_each_split_of_each_dataset_above_the_threshold_is_refused_and_the_quarantine_is_there(raw):
    write_clevr(raw.parent / "more", {"train": list(range(20, 60)), "val": [], "test": [70]})
    (raw / "sc_images/CLEVR_semantic_000008.png").unlink()
    (raw / "nsc_images/CLEVR_nonsemantic_000009.png").unlink()
    run_ingest(raw)
    run_ingest(raw.parent / "more", name="more")
    with pytest.raises(DataError, match=r"mini train: 1 of 6 rows .*max_quarantined_share = 0\.05") as no:
        run_validate(raw.parent, max_quarantined_share=0.05)
    assert "mini val: 1 of 2 rows are bad" in str(no.value)
    assert "more train" not in str(no.value)
    assert "CLEVR_default_000008.png: after: " in str(no.value)
    bad = pl.read_parquet(raw.parent / "clean/quarantine.parquet")["id"].to_list()
    assert sorted(bad) == ["mini/000008.png", "mini/000009.png_n"]
    assert (raw.parent / "clean/docs/index.html").is_file()
    run_validate(raw.parent, max_quarantined_share=0.5)


COUNTS = {"train": 6, "val": 2, "test": 4}


@pytest.fixture
def expect(raw, monkeypatch) -> Callable[..., ValidateReport]:
    """Validate with these expected pairs, and CLEVR-Change published with `published` pairs under the name mini."""
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
        ({"train": 7, "test": 4}, {}, "mini train: 6 pairs, but 7 are expected; .* correct its expected_pairs"),
        ("published", {}, None),
        ("published", {"test": 5}, "mini test: 4 pairs, but 5 are expected"),
        (None, {"test": 5}, None),
    ],
)
def test_expected_counts_are_held_against_the_records(expect, expected, published, fault):
    if fault is None:
        assert expect(expected, COUNTS | published).rows_out == 12
    else:
        with pytest.raises(DataError, match=fault):
            expect(expected, COUNTS | published)


def test_a_split_that_trains_is_judged_by_what_it_was(raw, expect):
    run_ingest(raw, train_on=["train", "val"])
    assert expect("published", train_on=["train", "val"]).datasets["mini"].pairs == {"test": 4, "train": 8}
    with pytest.raises(DataError, match=r"mini val: 2 pairs, but 3 are expected"):
        expect("published", COUNTS | {"val": 3}, train_on=["train", "val"])
    (raw / "nsc_images/CLEVR_nonsemantic_000009.png").unlink()
    run_ingest(raw, train_on=["train", "val"])
    with pytest.raises(DataError, match=r"mini val: 1 of 2 rows are bad") as refused:
        run_validate(raw.parent, max_quarantined_share=0.2)
    assert "mini train" not in str(refused.value)


@pytest.mark.fault("16")
def test_a_lost_test_pair_is_named_and_refused_unless_allowed_and_counts_are_those_after_quarantine(raw, expect):
    """A repeated row of a test pair that stays is no lost pair; a training pair that is left out for test counts."""
    (raw / "sc_images/CLEVR_semantic_000001.png").unlink()
    (raw / "sc_images/CLEVR_semantic_000003.png").unlink()
    for folder, kind in (("images", "default"), ("sc_images", "semantic")):
        shutil.copy(raw / f"{folder}/CLEVR_{kind}_000012.png", raw / f"{folder}/CLEVR_{kind}_000008.png")
    run_ingest(raw)
    with pytest.raises(DataError, match=r"mini train: 5 pairs, but 6 are expected"):
        expect("published")
    report = expect("published", COUNTS | {"train": 5})  # allowed, so test is not held against what is left of it
    (lost,) = report.datasets["mini"].lost_test_pairs
    assert lost.startswith("mini/000001.png: after: ")
    assert (report.leaks, report.datasets["mini"].pairs) == (1, {"test": 3, "train": 4, "val": 2})
    edit_json(raw / "splits.json", lambda splits: splits["test"].append(12))
    run_ingest(raw)
    with pytest.raises(DataError, match=r"mini: 1 test pairs are lost, .*allow_lost_test_pairs") as refused:
        run_validate(raw.parent, allow_lost_test_pairs=False)
    assert "mini/000001.png: after: " in str(refused.value)


@pytest.mark.fault("14")
def test_records_that_are_missing_empty_or_of_another_program_are_refused_with_the_remedy(raw):
    with pytest.raises(DataError, match=r"records/gone/records\.parquet: cannot be read.*run `m3diff ingest` again"):
        run_validate(raw.parent, {"gone": make_entry("pairs", raw)})
    run_ingest(raw)
    path = raw.parent / "records/mini/records.parquet"
    whole = path.read_bytes()
    pq.write_table(pq.read_table(path).slice(0, 0), path)
    with pytest.raises(DataError, match=r"mini/records\.parquet: holds no record; look at ingest\.datasets"):
        run_validate(raw.parent)
    path.write_bytes(whole[:100])
    with pytest.raises(DataError, match="run `m3diff ingest` again"):
        run_validate(raw.parent)
    pl.DataFrame({"id": ["a"]}).write_parquet(path)
    with pytest.raises(DataError, match="not the columns that ingest writes"):
        run_validate(raw.parent)


CHANGES = [("another before", 1), ("another after", 0), ("without cache", 0), ("removed", 0), ("restored", 0)]


@pytest.mark.fault("09")
@pytest.mark.parametrize(("change", "others"), CHANGES)
def test_an_image_that_changed_since_ingest_is_refused(raw, change, others):
    path = raw / f"{'images/CLEVR_default' if others else 'nsc_images/CLEVR_nonsemantic'}_000005.png"
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
    told = rf"json, {KEY}: (before|after): .*{path.name} changed since ingest, with {others} others; run `m3diff"
    with pytest.raises(DataError, match=told):
        run_validate(raw.parent)
    assert list((raw.parent / "clean").iterdir()) == []


def test_sound_data_passes_whole_also_when_touched_and_what_ingest_decoded_is_not_read_again(raw, monkeypatch):
    run_ingest(raw)
    os.utime(raw / "images" / KEY, ns=(1, 1))
    assert run_validate(raw.parent, max_quarantined_share=0.0).bad_images == 0
    assert quarantine(raw.parent) == {}
    assert "12 of 12 rows (a row is a pair) are clean" in (raw.parent / "clean/docs/index.html").read_text("utf-8")
    table = pq.read_table(raw.parent / "clean/records.parquet")
    assert table.schema.equals(RECORD_SCHEMA)
    before = pq.read_table(raw.parent / "records/mini/records.parquet").drop_columns(["own_split", "fault"])
    assert table.to_pylist() == before.to_pylist()
    monkeypatch.setattr("m3diff.images.check._over_cores", None)
    assert run_validate(raw.parent).images == 18


def test_every_count_of_the_report(raw, quick):
    texts = {KEY: ["<b>", "x"], "CLEVR_default_000009.png": ["a\nb", "c  d", ""]}
    edit_json(raw / "change_captions.json", lambda references: references.update(texts))
    (raw / "sc_images/CLEVR_semantic_000003.png").write_bytes(b"no image")
    image = Image.open(raw / "sc_images/CLEVR_semantic_000008.png")
    image.save(raw / "sc_images/CLEVR_semantic_000008.png", "JPEG")  # of another format than its name says
    for folder, kind in (("images", "default"), ("nsc_images", "nonsemantic")):  # a training pair that is in test
        shutil.copy(raw / f"{folder}/CLEVR_{kind}_000012.png", raw / f"{folder}/CLEVR_{kind}_000008.png")
    run_ingest(raw)
    run_ingest(write_spot(raw.parent / "spot"), "spot_the_diff", "other")
    run_ingest(raw, name="removed")
    entries = {name: make_entry("pairs", raw) for name in ("other", "mini")}
    both = run_validate(raw.parent, entries, near_duplicate_max_diff=None)
    assert both.datasets["other"].references == {"train": 5, "val": 1, "test": 1}
    datasets = pl.read_parquet(raw.parent / "clean/records.parquet")["dataset"].to_list()
    assert datasets == ["other"] * 4 + ["mini"] * 9, "in the order of their entries; others are passed over"
    report = run_validate(raw.parent, {"mini": entries["mini"]}, near_duplicate_max_diff=None)
    (finding,) = report.findings
    assert (finding.dataset, finding.kind, finding.count) == ("mini", "before_in_several_splits", 1)
    assert report.model_dump(exclude={"findings"}) == {
        **{"stage": "validate", "rows_in": 12, "rows_out": 9, "quarantined": 3, "leaks": 1, "references_respaced": 2},
        **{"images": 18, "bad_images": 1, "mislabelled_images": 1},
        "overlaps": {"train in test": 1, "val in test": 0, "train in val": 0},
        "datasets": {
            "mini": {
                "pairs": {"test": 4, "train": 3, "val": 2},
                "references": {"test": 8, "train": 6, "val": 5},
                "quarantined": 3,
                "broken_rules": {"after_decodes": 1, "no_markup": 1, "not_in_test": 1},
                "lost_test_pairs": [],
            }
        },
    }
    assert json.loads((raw.parent / "clean/report.json").read_text()) == report.model_dump()


@pytest.mark.fault("14")
def test_a_row_that_breaks_every_rule_names_all_of_them_and_both_engines_agree(tmp_path):
    """One dataset with a row for each rule; great-expectations must find the very rules that polars finds."""
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
    frame = pl.read_parquet(tmp_path / "clean/quarantine.parquet")
    assert {row["id"]: row["rules"] for row in frame.iter_rows(named=True)} == {
        "mini/kept": ["readable", "id_unique", "not_in_test"],
        "mini/leak": ["not_in_test"],
        "mini/dev": ["split_known", "shows_a_change"],
        "mini/none": ["references_given"],
        "mini/long": ["reference_length"],
        "mini/markup": ["no_markup"],
        "mini/images": ["readable", "before_decodes", "after_decodes"],
        "mini/s1": ["scene_in_one_split", "shows_a_change"],
        None: ["readable", "id_given", "split_given", "before_decodes"],
    }
    reasons = dict(frame.select("id", "reason").iter_rows())
    for name, words in {
        "markup": "references: 2 hold HTML or a special token",
        "long": "one has 31 characters, more than validate.max_caption_chars = 30",
        "s1": "split: scene mini/one is also in a higher split",
    }.items():
        assert words in reasons[f"mini/{name}"]
    assert reasons["mini/images"].endswith("gone.png is missing; restore the file")
    assert reasons[None] == "before, split: is missing"
    assert (report.quarantined, report.leaks, report.bad_images) == (9, 1, 1)


def test_the_page_is_private_and_shows_counts_expectations_and_rows_by_the_rule_that_they_break(raw, monkeypatch):
    monkeypatch.setattr(stage, "PAGE_ROWS", 1)
    save_picture(raw / "sc_images/CLEVR_semantic_000008.png", 5).write_bytes(b"no image")
    texts = {name: ["see <b>this</b>"] for name in (KEY, "CLEVR_default_000003.png")}
    edit_json(raw / "change_captions.json", lambda references: references.update(texts))
    run_ingest(raw)
    run_validate(raw.parent)
    (page,) = (raw.parent / "clean/docs").iterdir()
    text = page.read_text("utf-8")
    assert not re.search("//|<script|<img|src=|<link", text)
    for rule, rows, more in (("after_decodes", 1, ""), ("no_markup", 2, ", the first 1")):
        assert f'<a href="#{rule}">{rule}</a> {rows}' in text
        assert f'<h2 id="{rule}">{rule}</h2><p>{rows} rows{more}</p>' in text
    assert '<td class="met">met</td>' in text
    assert '<td class="broken">not met: 2</td>' in text
    assert text.count("references: 1 hold HTML or a special token; write plain text") == 1


@pytest.mark.slow(25)
def test_every_output_is_equal_in_another_process_with_and_without_cache(raw):
    (raw / "sc_images/CLEVR_semantic_000008.png").write_bytes(b"no image")
    ingest_and_validate(raw)
    code = (
        "from pathlib import Path; from tests.layouts import run_validate\n"
        f"if __name__ == '__main__': run_validate(Path({str(raw.parent)!r}), cache=Path({str(raw / 'other')!r}))"
    )
    first = outputs(raw.parent)
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    assert outputs(raw.parent) == first


def test_the_section_s_limits_are_kept():
    fields = {"max_quarantined_share": 0, "max_caption_chars": 1, "max_image_pixels": 1, "allow_test_leakage": False}
    fields |= {"near_duplicate_max_diff": 255, "allow_lost_test_pairs": False, "max_leaked_share": 1, "compare_px": 8}
    Validate.model_validate(fields)
    wrong = {"max_caption_chars": 0, "max_image_pixels": 0, "near_duplicate_max_diff": 256}
    wrong |= {"max_quarantined_share": 1.1, "max_leaked_share": 1.1, "compare_px": 7}
    with pytest.raises(ValueError, match="6 validation errors"):
        Validate.model_validate(fields | wrong)


def scene(number: int, moved: bool = False) -> Image.Image:
    """160x120: soft ground and four discs, whose places follow the number; `moved` shifts one of them."""
    random = np.random.default_rng(number)
    image = Image.new("RGB", (160, 120), tuple(int(v) for v in random.integers(60, 200, 3)))
    for disc in range(4):
        x, y = (int(v) for v in random.integers(0, 90, 2))
        x += 30 if moved and disc == 0 else 0
        image.paste(tuple(int(v) for v in random.integers(0, 255, 3)), (x, y, x + 28, y + 28))
    return image.filter(ImageFilter.GaussianBlur(1))


def write_own(root: Path, pairs: dict[str, tuple[Image.Image, Image.Image, str]], suffix: str = "png", **save) -> Path:
    """A collection of pairs (before, after, split) by name, its images saved with the options `save`."""
    root.mkdir(parents=True)
    rows = []
    for name, (before, after, split) in pairs.items():
        paths = [f"{name}_{side}.{suffix}" for side in ("a", "b")]
        for image, path in zip((before, after), paths, strict=True):
            image.save(root / path, **save)
        rows.append({"id": name, "before": paths[0], "after": paths[1], "captions": ["it moved"], "split": split})
        if name == "none":
            rows[-1]["captions"] = ["nothing moved"]
    write_json(root / "pairs.json", rows)
    run_ingest(root, "pairs", root.name, manifest="pairs.json")
    return root


HELD_OUT = {str(n): (scene(n), scene(n, moved=True), "test") for n in range(3)}


@pytest.mark.fault("16")
def test_a_pair_of_a_test_set_does_not_train_under_whatever_name_direction_encoding_and_size(tmp_path):
    """Val may be in test, and one shared image or another change of a scene is no leak."""
    held = {name: pair[:2] for name, pair in HELD_OUT.items()}
    write_own(tmp_path / "official", HELD_OUT | {"v": (*held["1"], "val")})
    mine = {"copy": held["1"], "back": held["2"][::-1], "own": (scene(7), scene(7, moved=True))}
    mine |= {"small": tuple(image.resize((107, 80)) for image in held["0"])}
    mine |= {"shared": (scene(1), scene(5)), "none": (scene(1), scene(1))}
    write_own(tmp_path / "mine", {name: (*pair, "train") for name, pair in mine.items()})
    write_own(tmp_path / "jpeg", {"1": (*held["1"], "train")}, "jpg", quality=75)
    report = run_validate(tmp_path, max_quarantined_share=0)
    frame = pl.read_parquet(tmp_path / "clean/quarantine.parquet")
    same, alike = ("has the same images", "looks the same")
    assert dict(frame.select("id", "reason").iter_rows()) == {
        name: f"leak: test pair official/{pair} {how}, so this one may not train"
        for name, pair, how in (
            *(("mine/copy", 1, same), ("mine/back", 2, same)),
            *(("mine/small", 0, alike), ("jpeg/1", 1, alike)),
        )
    }
    assert (report.leaks, report.quarantined) == (4, 4)
    by_content = run_validate(tmp_path, near_duplicate_max_diff=None)
    assert (by_content.leaks, by_content.overlaps["train in test"]) == (2, 2)
    kept = run_validate(tmp_path, allow_test_leakage=True)
    assert (kept.quarantined, kept.leaks) == (0, 0)
    assert kept.overlaps == {"train in test": 4, "val in test": 1, "train in val": 2}


def limits(share: float) -> Any:
    return SimpleNamespace(max_quarantined_share=share, max_leaked_share=share)


def test_exactly_the_share_of_leaked_or_bad_rows_is_allowed_where_floats_round_it_down():
    for share, count in ((0.29, 29), (0.07, 7), (0.57, 57), (0.58, 58)):
        rows = [{"dataset": "a", "split": "train", "own_split": "train", "source": "", "reason": ""}] * 100
        for rule in (LEAK, "empty"):
            quarantine = pl.DataFrame(rows[:count]).with_columns(rules=pl.lit([rule]))
            assert [*too_many(limits(share), pl.DataFrame(rows[count:]), quarantine)] == []
            assert len([*too_many(limits(share - 0.001), pl.DataFrame(rows[count:]), quarantine)]) == 1
    lost = pl.DataFrame([rows[0] | {"own_split": None, "rules": ["id"]}], schema=quarantine.schema)
    (line,) = too_many(limits(0.16), pl.DataFrame(rows[:5]), lost)  # no other split that a row without one is a part of
    assert line.startswith("a without a split: 1 of 6 rows are bad, more than validate.max_quarantined_share = 0.16")


@pytest.mark.parametrize(("split", "train_on"), [("train", ["train"]), ("val", ["train", "val"])])
def test_above_their_own_share_leaked_pairs_stop_the_stage_with_one_remedy(split, train_on, tmp_path, monkeypatch):
    """A share of what trains, whatever the files call it; what the limit of bad rows lets through is no excuse."""
    judge_by_polars_alone(monkeypatch)
    own = {f"own{n}": (scene(9 + n), scene(9 + n, moved=True), "train") for n in range(3)}
    mine = write_own(tmp_path / "mine", HELD_OUT | own | {"copy": HELD_OUT["0"][:2] + (split,)})
    run_ingest(mine, "pairs", "mine", manifest="pairs.json", train_on=train_on)
    assert run_validate(tmp_path, max_leaked_share=0.25, max_quarantined_share=0).leaks == 1
    with pytest.raises(DataError) as refused:
        run_validate(tmp_path, max_leaked_share=0.24)
    told = str(refused.value)
    assert "mine: 1 of 4 training pairs are in a test set, more than validate.max_leaked_share = 0.24" in told
    assert "remove these pairs from its training split" in told
    assert "test pair mine/0 has the same images" in told
    assert "allow_test_leakage" not in told


def pairs_of(thumbs: np.ndarray, tests: int) -> pl.DataFrame:
    """Sound pairs of these thumbnails [pairs, 128], all of different content; the first are the test pairs."""
    halves = [half.tobytes() for pair in thumbs.astype(np.uint8) for half in (pair[:64], pair[64:])]
    paths = [f"{n}.png" for n in range(len(halves))]
    digests = [n.to_bytes(4) for n in range(len(halves))]
    images = pl.DataFrame({"path": paths, "digest": digests, "thumb": halves, "verdict": ["ok"] * len(halves)})
    split = ["test" if n < tests else "train" for n in range(len(thumbs))]
    records = pl.DataFrame({"id": paths[::2], "split": split, "before": paths[::2], "after": paths[1::2]})
    return sound_pairs(records, images)


def fixed_camera(pairs: int, noise: int) -> np.ndarray:
    """Thumbnails of a scene that differ by this noise alone, so that nearly all pairs are candidates."""
    random = np.random.default_rng(0)
    return np.tile(random.integers(60, 200, 64), 2) + random.integers(-noise, noise + 1, (pairs, 128))


@pytest.mark.parametrize("at_once", [1, 50, 200_000])
@pytest.mark.parametrize("kind", ["a fixed camera", "all alike", "scenes, some of them turned round"])
def test_each_row_has_the_first_test_pair_that_looks_the_same(kind, at_once, monkeypatch):
    """Compared with every pair against every other, whatever the number of candidates that are held at once."""
    monkeypatch.setattr("m3diff.stages.validate.rules.COMPARED_AT_ONCE", at_once)
    random = np.random.default_rng(1)
    if kind == "scenes, some of them turned round":
        scenes = random.integers(0, 200, (9, 128))
        thumbs = scenes[random.integers(0, 9, 200)] + random.integers(0, 2, (200, 128))
        thumbs[::3] = np.roll(thumbs[::3], 64, axis=1)
    else:
        thumbs = fixed_camera(200, noise=0 if kind == "all alike" else 1)
        thumbs[::4] += random.integers(0, 2, (50, 128))
    tests = thumbs[:60]
    wanted = []
    for row in range(60, 200):
        for turned in (tests, np.roll(tests, 64, axis=1)):
            close = np.flatnonzero(np.abs(turned - thumbs[row]).max(axis=1) <= 2)
            if len(close):
                wanted.append((row, f"{2 * close[0]}.png", "looks the same"))
                break
    assert 20 < len(wanted) <= 140
    assert find_twins(pairs_of(thumbs, 60), "train", "test", 2).rows() == wanted


@pytest.mark.slow(10)
def test_the_pairs_of_a_fixed_camera_are_compared_in_little_memory():
    """Eight million candidates: in one piece they take a gigabyte."""
    code = (
        "import resource\nfrom tests.stages.validate.test_validate import find_twins, fixed_camera, pairs_of\n"
        "pairs = pairs_of(fixed_camera(5_000, 2), 1_000)\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "found = find_twins(pairs, 'train', 'test', 2).height\n"
        "print(found, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    found, megabytes = map(int, done.stdout.split())
    assert (found, megabytes < 300) == (0, True)
