"""`m3diff data check` on sixty photographs of one's own: a German table, a missing file, no test pairs."""

import csv
import json
import random
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image

from m3diff.commands.inspect import EMBEDDED_LIMITS, StageLimits, check
from m3diff.commands.inspect.reading import TOO_FEW_TO_DRAW, read_folder
from m3diff.records.errors import DataError
from m3diff.stages.ingest.params import DatasetEntry
from m3diff.stages.ingest.stage import ingest
from m3diff.stages.validate.stage import validate
from tests.errors import Message
from tests.layouts import judge_by_polars_alone

PAIRS = 60


@pytest.fixture(autouse=True)
def no_worker_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the images in this process. These tests would start 24 pools, in which each worker imports all again."""
    monkeypatch.setattr("m3diff.images.check.MIN_FILES_FOR_WORKERS", 2 * PAIRS)


@pytest.fixture
def photographs(tmp_path: Path) -> Path:
    """vorher/ and nachher/ with sixty pictures of noise each, and fotos.csv with semicolons and a German header."""
    root = tmp_path / "fotos"
    write_photographs(root)
    return root


def write_photographs(root: Path, header: str = "Teil", split: Any = None) -> None:
    rows = [["Vorher", "Nachher", "Beschreibung", header]]
    for number in range(PAIRS):
        name = f"IMG_{number:04}.jpg"
        colours = random.Random(number).randbytes(3 * 64)
        picture = Image.frombytes("RGB", (8, 8), colours).resize((64, 64))
        for side in ("vorher", "nachher"):
            (root / side).mkdir(parents=True, exist_ok=True)
            picture.save(root / side / name, quality=90)
            picture.paste((255, 0, 0), (8, 8, 40, 40))
        own_split = "train" if number < 45 else "val" if number < 52 else "test"
        cell = own_split if split is None else split
        rows.append([f"vorher/{name}", f"nachher/{name}", f"Die Lampe {number} ist aus", cell])
    with (root / "fotos.csv").open("w", newline="", encoding="utf-8-sig") as file:
        csv.writer(file, delimiter=";").writerows(rows)


def look(root: Path, limits: StageLimits = EMBEDDED_LIMITS, **entries: DatasetEntry) -> tuple[str, bool]:
    lines, is_sound = check(root, entries, stage_limits=limits)
    return "\n".join(lines), is_sound


def printed_entry(text: str) -> tuple[str, DatasetEntry]:
    ((name, entry),) = yaml.safe_load(text.split("\n")[-1]).items()
    return name, DatasetEntry.model_validate(entry)


def run_stages(folder: Path, name: str, entry: DatasetEntry, **changes: Any) -> Any:
    ingest(name, entry, folder / "cache.parquet", folder / "records")
    cfg = EMBEDDED_LIMITS.limits.model_copy(update=changes)
    return validate(cfg, {name: entry}, folder / "cache.parquet", folder / "records", folder / "clean", f"{name}/test")


def test_a_german_table_is_read_with_its_splits_and_without_a_question(photographs):
    text, is_sound = look(photographs)
    assert is_sound, text
    assert re.search(r"train +45 +45\n +val +7 +7\n +test +8 +8\n", text)
    assert "ASK" not in text
    assert "no test pairs" not in text


@pytest.fixture
def one_missing(photographs: Path) -> Path:
    (photographs / "nachher/IMG_0020.jpg").unlink()
    return photographs


def test_the_remedy_for_a_missing_image_is_its_row_and_no_image_of_another_field(one_missing):
    text, is_sound = look(one_missing)
    assert not is_sound
    missing = {"value": "nachher/IMG_0020.jpg", "root": one_missing, "source": "fotos.csv, line 22"}
    assert Message("check.image_of_row_is_missing", **missing).in_text(text)
    assert not Message("check.image_at_other_path", file="vorher/IMG_0020.jpg").in_text(text)


def test_a_file_that_no_row_names_is_still_proposed(one_missing):
    shutil.copy(one_missing / "vorher/IMG_0020.jpg", one_missing / "nachher/img_0020.JPG")
    proposal = {"value": "nachher/IMG_0020.jpg", "file": "nachher/img_0020.JPG"}
    assert Message("check.image_at_other_path", **proposal).in_text(look(one_missing)[0])


def test_a_file_that_another_row_names_in_another_spelling_is_not_proposed(one_missing):
    table = one_missing / "fotos.csv"
    text = table.read_text(encoding="utf-8-sig").replace("vorher/IMG_0020.jpg", "./vorher/IMG_0020.jpg")
    table.write_text(text, encoding="utf-8-sig")
    assert not Message("check.image_at_other_path", file="vorher/IMG_0020.jpg").in_text(look(one_missing)[0])


def test_check_says_that_validate_goes_on_without_one_bad_row(one_missing, tmp_path, monkeypatch):
    judge_by_polars_alone(monkeypatch)
    text, _ = look(one_missing)
    assert "NOT ACCEPTED" not in text
    left_out = text[text.index("rows that validate leaves out") :].split("\n")
    assert left_out[0].endswith(": 1")
    assert "fotos.csv, line 22: after: " in left_out[1]
    report = run_stages(tmp_path, *printed_entry(text))
    assert report.rows_out == PAIRS - 1


def test_check_says_that_validate_refuses_two_bad_rows_of_a_split(one_missing, tmp_path, monkeypatch):
    judge_by_polars_alone(monkeypatch)
    (one_missing / "nachher/IMG_0021.jpg").unlink()
    text, _ = look(one_missing)
    bad = {"group": "fotos train", "value": 2, "total": 45}
    assert "NOT ACCEPTED" in text
    assert Message("validate.too_many_bad_rows", **bad).in_text(text)
    refusal = text.partition("NOT ACCEPTED")[2].splitlines()
    assert [line[:4].isspace() for line in refusal[1:3]] == [True, True], "the rows are below their refusal"
    assert "rows that validate leaves out" not in text
    with pytest.raises(DataError) as refused:
        run_stages(tmp_path, *printed_entry(text))
    assert Message("validate.too_many_bad_rows", **bad).in_text(str(refused.value))


def test_check_says_that_validate_refuses_a_lost_test_pair(photographs):
    (photographs / "nachher/IMG_0059.jpg").unlink()
    text, _ = look(photographs)
    assert "NOT ACCEPTED" in text
    assert Message("validate.lost_test_pairs", dataset="fotos", value=1).in_text(text)


@pytest.fixture
def without_split(tmp_path: Path) -> Path:
    write_photographs(tmp_path / "fotos", "Kamera", "k1")
    return tmp_path / "fotos"


def test_a_table_without_a_split_is_offered_drawn_test_pairs_that_ingest_draws(without_split, tmp_path, monkeypatch):
    judge_by_polars_alone(monkeypatch)
    text, is_sound = look(without_split)
    assert is_sound, "no question is asked of a table that needed none"
    offer = re.search(r"no test pairs: .*`split: (\{.*?\})`.* draws (\d+) train, (\d+) val, (\d+) test pairs", text)
    assert offer is not None, text
    name, entry = printed_entry(text)
    assert entry.options["split"] == "train"
    drawn = entry.model_copy(update={"options": {**entry.options, "split": yaml.safe_load(offer[1])}})
    report = run_stages(tmp_path, name, drawn)
    counts = [report.datasets[name].pairs[split] for split in ("train", "val", "test")]
    assert counts == [int(count) for count in offer.groups()[1:]]
    text, is_sound = look(without_split, **{name: drawn})
    assert is_sound, text
    assert "no test pairs" not in text


def test_the_gates_dataset_without_test_pairs_is_not_accepted(without_split):
    _, entry = printed_entry(look(without_split)[0])
    limits = StageLimits(EMBEDDED_LIMITS.limits, protocol="fotos/test")
    text, is_sound = look(without_split, limits, fotos=entry)
    assert not is_sound
    assert "NOT ACCEPTED" in text
    assert Message("ingest.no_test_pair", dataset="fotos", protocol="fotos/test").in_text(text)
    limits_of_other_dataset = StageLimits(EMBEDDED_LIMITS.limits, protocol="minichange/total")
    assert look(without_split, limits_of_other_dataset, fotos=entry)[1]


def test_a_training_whose_gate_has_no_test_pair_is_refused_by_validate(without_split, tmp_path, monkeypatch, capsys):
    judge_by_polars_alone(monkeypatch)
    name, entry = printed_entry(look(without_split)[0])
    with pytest.raises(DataError) as refused:
        run_stages(tmp_path, name, entry)
    assert Message("ingest.no_test_pair", dataset="fotos", protocol="fotos/test").in_text(str(refused.value))
    assert json.loads((tmp_path / "clean/report.json").read_text())["datasets"][name]["pairs"] == {"train": PAIRS}
    assert Message("validate.no_test_pairs").in_text(capsys.readouterr().out)


def test_a_column_of_a_split_without_test_is_told_to_name_test_pairs(tmp_path):
    write_photographs(tmp_path / "fotos", "Teil", "train")
    text, is_sound = look(tmp_path / "fotos")
    assert is_sound
    assert "no test pairs" in text
    assert "in the column of the split" in text


@pytest.mark.parametrize("header", ["Teil", "split"])
def test_a_column_of_a_split_without_test_is_offered_a_draw_in_its_place(header, tmp_path, monkeypatch):
    judge_by_polars_alone(monkeypatch)
    write_photographs(tmp_path / "fotos", header, "train")
    text, _ = look(tmp_path / "fotos")
    offer = re.search(r"or `split: (\{.*?\})`.* draws (\d+) train, (\d+) val, (\d+) test pairs", text)
    assert offer is not None, text
    assert ("in place of `columns: {split: Teil}`" in text) == (header == "Teil")
    assert ("with `columns: {split: null}`" in text) == (header == "split")
    name, entry = printed_entry(text)
    columns = {field: column for field, column in entry.options["columns"].items() if field != "split"}
    if header == "split":
        columns["split"] = None
    options = {**entry.options, "columns": columns, "split": yaml.safe_load(offer[1])}
    report = run_stages(tmp_path, name, entry.model_copy(update={"options": options}))
    counts = [report.datasets[name].pairs[split] for split in ("train", "val", "test")]
    assert counts == [int(count) for count in offer.groups()[1:]]


def test_the_remedy_for_no_test_pair_can_be_added_to_an_entry_with_a_column(tmp_path, monkeypatch):
    judge_by_polars_alone(monkeypatch)
    write_photographs(tmp_path / "fotos", "Teil", "train")
    name, entry = printed_entry(look(tmp_path / "fotos")[0])
    with pytest.raises(DataError) as refused:
        run_stages(tmp_path, name, entry)
    assert Message("ingest.no_test_pair", dataset=name).in_text(str(refused.value))
    drawn = {"columns": {**entry.options["columns"], "split": None}, "split": {"test": 0.15, "val": 0.1}}
    options = {**entry.options, **drawn}
    report = run_stages(tmp_path, name, entry.model_copy(update={"options": options}))
    assert report.datasets[name].pairs["test"] > 0


def write_sidecars(root: Path, count: int) -> DatasetEntry:
    """Write `count` pairs, each with a text. The images are not valid, because they are not opened."""
    root.mkdir()
    for number in range(count):
        (root / f"{number}.txt").write_text(f"the lamp {number} is out")
        for end in ("", "_1"):
            (root / f"{number}{end}.png").write_bytes(b"x")
    return DatasetEntry(reader="sidecar", root=root)


def no_test_pairs_line(entry: DatasetEntry) -> str:
    (line,) = [line for line in read_folder("own", entry).lines if "no test pairs" in line]
    return line


def test_pairs_with_a_text_beside_them_are_offered_drawn_test_pairs(tmp_path):
    entry = write_sidecars(tmp_path / "own", PAIRS)
    offer = re.search(
        r"`split: (\{.*?\})` in its options draws \d+ train, \d+ val, (\d+) test", no_test_pairs_line(entry)
    )
    assert offer is not None
    drawn = entry.model_copy(update={"options": {"split": yaml.safe_load(offer[1])}})
    lines = read_folder("own", drawn).lines
    assert any(re.search(rf"test +{offer[2]} ", line) for line in lines)
    assert not any("no test pairs" in line for line in lines)


def test_too_few_pairs_with_a_text_beside_them_are_offered_no_draw(tmp_path):
    assert no_test_pairs_line(write_sidecars(tmp_path / "own", 1)).endswith(TOO_FEW_TO_DRAW)


def write_rows(root: Path, count: int) -> Path:
    root.mkdir()
    rows = [f"{number}.png,{number}_2.png,the lamp {number} is out" for number in range(count)]
    (root / "pairs.csv").write_text("\n".join(["before,after,captions", *rows]))
    return root


def test_a_table_of_a_named_split_is_offered_a_draw_if_it_has_enough_pairs(tmp_path):
    options = {"split": "train"}
    small_entry = DatasetEntry(reader="pairs", root=write_rows(tmp_path / "few", 1), options=options)
    assert no_test_pairs_line(small_entry).endswith(TOO_FEW_TO_DRAW)
    large_entry = small_entry.model_copy(update={"root": write_rows(tmp_path / "many", PAIRS)})
    assert "in place of `split: train`, draws " in no_test_pairs_line(large_entry)


def test_tables_of_named_splits_are_told_to_add_one_of_test_pairs(tmp_path):
    options = {"manifest": {"train": "pairs.csv"}}
    entry = DatasetEntry(reader="pairs", root=write_rows(tmp_path / "own", 2), options=options)
    assert no_test_pairs_line(entry).endswith("to the option `manifest`: {test: FILE}")


@pytest.mark.parametrize(
    ("address", "code"),
    [("https://a.example/1.png", "check.image_is_address"), ("file:///mnt/1.png", "check.image_outside_root")],
    ids=["a server", "a file"],
)
def test_images_at_addresses_get_the_remedy_for_their_kind(address, code, tmp_path):
    (tmp_path / "pairs.csv").write_text(f"before,after,captions,split\n{address},{address}2,it rains,test\n")
    reading = read_folder("own", DatasetEntry(reader="pairs", root=tmp_path))
    remedies = "\n".join(reading.lines).partition("  remedies:\n")[2]
    assert Message(code, value=address, root=tmp_path).in_text(remedies)


@pytest.mark.parametrize("count", [0, 2], ids=["no row", "two rows"])
def test_a_table_without_a_pair_is_said_to_have_none(count, tmp_path):
    options = {"manifest": "pairs.csv", "split": "test"}
    root = write_rows(tmp_path / "own", count)
    for image in (f"{number}{end}.png" for number in range(count) for end in ("", "_2")):
        (root / image).write_bytes(b"x")
    reading = read_folder("own", DatasetEntry(reader="pairs", root=root, options=options))
    assert any("NO PAIRS" in line for line in reading.lines) == (not count), reading.lines
    assert reading.is_sound == bool(count)
