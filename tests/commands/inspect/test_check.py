import os
from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest
import yaml

from m3diff.commands.inspect.check import Finding, check, recognise
from m3diff.datasets import DATASETS
from m3diff.datasets.minichange.language import grammar
from m3diff.datasets.spec import SplitCount
from m3diff.records.errors import DataError
from m3diff.stages.ingest.params import DatasetEntry
from tests.layouts import (
    edit_json,
    save_picture,
    write_birds,
    write_clevr,
    write_clevr_dc,
    write_emu,
    write_iedit,
    write_json,
    write_levir,
    write_magicbrush,
    write_nlvr,
    write_spot,
    write_syned,
)


def write_bird_folder(root: Path) -> Path:
    write_birds(root / "birds-to-words-v1.0.tsv", [("11", "22", "train", "Animal 1 is bigger")])
    for photo in (11, 22):
        save_picture(root / f"images/{photo}.jpg", photo)
    return root


def write_manifest(root: Path, name: str, **renamed: str) -> Path:
    row = {"before": "a.png", "after": "b.png", "captions": "the mug left", "split": "train"}
    for number, image in enumerate(("a.png", "b.png")):
        save_picture(root / image, number)
    row = {renamed.get(field, field): value for field, value in row.items()}
    if name.endswith(".csv"):
        (root / name).write_text(f"{','.join(row)}\n{','.join(row.values())}\n")
    else:
        write_json(root / name, [row])
    return root


def write_minichange(root: Path) -> Path:
    write_json(write_clevr(root) / "grammar.json", grammar())
    return root


WRITERS = {
    "minichange": write_minichange,
    "clevr_change": write_clevr,
    "clevr_dc": write_clevr_dc,
    "spot_the_diff": write_spot,
    "iedit": write_iedit,
    "emu_edit": write_emu,
    "levir_cc": write_levir,
    "magicbrush": write_magicbrush,
    "nlvr2": write_nlvr,
    "syned": write_syned,
    "birds_to_words": write_bird_folder,
    "omnidiff": lambda root: write_manifest(root, "annotations.json"),
    "pairs": lambda root: write_manifest(root, "pairs.csv"),
}


def look(root: Path) -> Finding:
    return check(root, {})


def test_every_dataset_has_a_layout_here():
    assert set(WRITERS) == set(DATASETS)


@pytest.mark.parametrize("reader", sorted(DATASETS))
def test_every_layout_is_known_by_its_files_and_found_sound_with_an_entry_for_params(tmp_path, reader):
    root = WRITERS[reader](tmp_path / "raw")
    lines, sound = look(root)
    assert sound
    assert lines[0] == f"{root} looks like {reader}"
    assert lines[1].startswith(f"  licence: {DATASETS[reader].licence.name} (train: ")
    assert [line for line in lines if "found   " in line] == [f"  found   {file}" for file in DATASETS[reader].files]
    assert any(line.endswith("of them 0 missing and 0 empty") for line in lines)
    assert lines[-2] == "the entry for ingest.datasets in params.yaml:"
    assert lines[-1].startswith(f"    {'raw' if reader == 'pairs' else reader}: {{")
    ((name, entry),) = yaml.safe_load(lines[-1]).items()
    assert (name, DatasetEntry.model_validate(entry)) == recognise(root)[:2]


@pytest.mark.parametrize("reader", sorted(DATASETS.keys() - {"emu_edit", "magicbrush", "syned"}))
def test_a_missing_and_an_empty_image_file_are_named_and_refused(tmp_path, reader):
    root = WRITERS[reader](tmp_path / "raw")
    images = sorted(path for path in root.rglob("*") if path.suffix.lower() in (".png", ".jpg", ".jpeg", ".gif"))
    gone, hollow = images[:2]
    gone.unlink()
    hollow.write_bytes(b"")
    lines, sound = look(root)
    assert not sound
    assert f"  images {len(images)}, of them 1 missing and 1 empty" in lines
    assert lines[lines.index("  missing images: 1") + 1] == f"    {gone}"
    assert lines[lines.index("  images without a byte: 1") + 1] == f"    {hollow}"


SEVERAL = [(name, file) for name, spec in DATASETS.items() if len(spec.files) > 1 for file in spec.files]


@pytest.mark.parametrize(("reader", "file"), SEVERAL)
def test_a_layout_is_known_though_an_annotation_file_is_missing(tmp_path, reader, file):
    if (reader, file) == ("minichange", "grammar.json"):
        pytest.skip("without its grammar MiniChange is CLEVR-Change's layout")
    root = WRITERS[reader](tmp_path / "raw")
    for path in root.glob(file):
        path.unlink()
    lines, sound = look(root)
    assert not sound
    assert lines[0] == f"{root} looks like {reader}"
    found = [f"  {'MISSING' if each == file else 'found  '} {each}" for each in DATASETS[reader].files]
    assert lines[2:] == [*found, "  fetch the missing files again; nothing was read"]


def test_counts_stand_beside_the_published_ones(tmp_path):
    lines = look(write_spot(tmp_path)).lines
    start = lines.index("  split     pairs  references   published:    pairs  references (Spot-the-Diff)")
    assert lines[start + 1 : start + 5] == [
        "  train         2           5                 8,566      17,676  differs",
        "  val           1           1                 1,493       3,310  differs",
        "  test          1           1                 1,270       2,107  differs",
        "  not the release of Spot-the-Diff: a part, another version, or other data in its layout",
    ]


def test_a_whole_release_differs_in_nothing_and_an_unpublished_count_is_no_difference(tmp_path, monkeypatch):
    root = write_clevr_dc(tmp_path)
    spec = DATASETS["clevr_dc"]
    (part,) = spec.published
    exact = replace(part, train=SplitCount(2, 3), val=SplitCount(0), test=SplitCount(1))
    monkeypatch.setitem(DATASETS, "clevr_dc", replace(spec, published=(exact,)))
    lines = look(root).lines
    assert "  train         2           3                     2           3" in lines
    assert "  test          1           1                     1           ?" in lines
    assert not any(line.endswith("  differs") or line.startswith("  not the release") for line in lines)
    wrong = replace(exact, train=SplitCount(2, 4))
    monkeypatch.setitem(DATASETS, "clevr_dc", replace(spec, published=(wrong,)))
    assert "  train         2           3                     2           4  differs" in look(root).lines


def test_omnidiff_is_held_against_the_part_of_its_name_else_of_its_size(tmp_path, monkeypatch):
    root = write_manifest(tmp_path, "annotations.json")
    entry = DatasetEntry(reader="omnidiff", root=root)
    for part, title in (("omnidiff_real", "OmniDiff-Real"), ("omnidiff_render", "OmniDiff-Render")):
        assert any(f"({title})" in line for line in check(root, {part: entry}).lines)
    assert any("(OmniDiff-Render)" in line for line in look(root).lines)
    real, render = DATASETS["omnidiff"].published
    small = replace(real, train=SplitCount(1), val=SplitCount(0), test=SplitCount(0))
    monkeypatch.setitem(DATASETS, "omnidiff", replace(DATASETS["omnidiff"], published=(small, render)))
    assert any("(OmniDiff-Real)" in line for line in look(root).lines)


def test_rows_that_cannot_be_read_are_shown_five_at_most_and_counted(tmp_path):
    root = write_clevr_dc(tmp_path)
    edit_json(root / "split.json", lambda splits: splits["train"].extend(f"scene {n}" for n in range(7)))
    lines, sound = look(root)
    assert not sound
    start = lines.index("  rows that cannot be read: 7")
    assert lines[start + 1].startswith("    split.json, train[2]: scene: expected a number from 0, found text")
    assert lines[start + 5].startswith("    split.json, train[6]: ")
    assert lines[start + 6] == "    and 2 more"


def test_a_manifest_without_a_split_is_suggested_for_training_and_one_without_captions_is_no_manifest(tmp_path):
    write_json(tmp_path / "list.json", [{"source": "a.png", "target": "b.png"}])
    with pytest.raises(DataError, match="looks like none of the layouts"):
        recognise(tmp_path)
    write_json(tmp_path / "list.json", [{"source": "a.png", "target": "b.png", "text": "it fell"}])
    _, entry, *_ = recognise(tmp_path)
    assert entry.options["split"] == "train"
    assert entry.options["columns"] == {"before": "source", "after": "target", "captions": "text"}


def test_a_parquet_manifest_is_known_by_its_schema_and_a_broken_file_is_passed_over(tmp_path):
    (tmp_path / "a.json").write_text("{")
    (tmp_path / "b.parquet").write_text("no parquet")
    pl.DataFrame({"img1": ["a"], "img2": ["b"], "caption": ["c"], "subset": ["val"]}).write_parquet(
        tmp_path / "m.parquet"
    )
    _, entry, *_ = recognise(tmp_path)
    assert entry.options["manifest"] == "m.parquet"
    assert entry.options["columns"]["split"] == "subset"


def test_odd_names_come_out_as_exact_yaml(tmp_path):
    root = write_manifest(tmp_path / "it's: #1", "yes.json", captions="text")
    _, entry, *_ = recognise(root)
    ((name, given),) = yaml.safe_load(look(root).lines[-1]).items()
    assert DatasetEntry.model_validate(given) == entry
    assert name == "it_s_1"


def test_a_dataset_of_params_is_read_with_its_own_options_and_its_own_splits(tmp_path):
    root = write_manifest(tmp_path, "list.json", before="first", after="second")
    edit_json(root / "list.json", lambda rows: rows[0].update(split="val"))
    options = {"manifest": "list.json", "columns": {"before": "first", "after": "second"}}
    assert look(root).lines[0] == f"{root} looks like pairs"
    entry = DatasetEntry(reader="pairs", root=Path(os.path.relpath(root)), options=options, train_on=("train", "val"))
    other = DatasetEntry(reader="iedit", root=tmp_path / "elsewhere")
    lines, sound = check(root, {"other": other, "own": entry})
    assert sound
    assert lines[0] == f"{root} is own (pairs)"
    assert "  val           1           1" in lines
    assert "params.yaml" not in "".join(lines)


def test_a_folder_above_or_without_data_is_refused_with_the_place_to_look(tmp_path):
    write_spot(tmp_path / "repository/data")
    with pytest.raises(DataError) as error:
        look(tmp_path / "repository")
    assert f"it holds data. Perhaps you mean {tmp_path / 'repository/data'}. Expected one of: " in str(error.value)
    assert "iedit: train.json, valid.json, test.json" in str(error.value)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"it holds nothing\. Expected one of"):
        look(tmp_path / "empty")
    with pytest.raises(DataError, match="no such folder; name the folder that holds a dataset's annotation files"):
        look(tmp_path / "nowhere")
