"""What `m3diff data check` says of the layouts of published datasets, and the entries that it proposes."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from m3diff.commands.inspect.check import Finding, check, recognise
from m3diff.datasets import DATASETS
from m3diff.datasets.spec import SplitCount
from m3diff.records.errors import DataError
from m3diff.stages.ingest.params import DatasetEntry
from tests.layouts import WRITERS, edit_json, write_clevr_dc, write_iedit, write_manifest, write_spot


def look(root: Path) -> Finding:
    return check(root, {})


@pytest.mark.parametrize("reader", sorted(DATASETS))
def test_every_layout_is_known_by_its_files_with_an_entry_and_its_missing_images_and_files_are_named(tmp_path, reader):
    root, spec = WRITERS[reader](tmp_path / "raw"), DATASETS[reader]
    lines, sound = look(root)
    assert (sound, lines[0]) == (True, f"{root} looks like {reader}")
    assert lines[1].startswith(f"  licence: {spec.licence.name} (train: ")
    assert [line for line in lines if "found   " in line] == [f"  found   {file}" for file in spec.files]
    assert any(line.endswith("of them 0 missing and 0 empty") for line in lines)
    assert lines[-2] == "the entry for ingest.datasets in params.yaml:"
    ((name, entry),) = yaml.safe_load(lines[-1]).items()
    assert (name, DatasetEntry.model_validate(entry)) == recognise(root)[:2]
    assert name == ("raw" if reader == "pairs" else reader)
    if reader not in ("emu_edit", "magicbrush", "syned"):  # their images are in Parquet
        images = sorted(path for path in root.rglob("*") if path.suffix.lower() in (".png", ".jpg", ".jpeg", ".gif"))
        images[0].unlink()
        images[1].write_bytes(b"")
        lines, sound = look(root)
        assert not sound
        assert f"  images {len(images)}, of them 1 missing and 1 empty" in lines
        assert lines[lines.index("  missing images: 1") + 1] == f"    {images[0]}"
        assert lines[lines.index("  images without a byte: 1") + 1] == f"    {images[1]}"
    for file in spec.files if len(spec.files) > 1 else ():
        if file == "grammar.json":
            continue  # without it MiniChange is CLEVR-Change's layout
        held = {path: path.read_bytes() for path in root.glob(file)}
        [path.unlink() for path in held]
        lines, sound = look(root)
        assert (sound, lines[0]) == (False, f"{root} looks like {reader}")
        found = [f"  {'MISSING' if each == file else 'found  '} {each}" for each in spec.files]
        assert lines[2:] == [*found, "  fetch the missing files again; nothing was read"]
        [path.write_bytes(data) for path, data in held.items()]


def test_counts_are_beside_the_published_ones_and_what_differs_is_said(tmp_path, monkeypatch):
    lines = look(write_spot(tmp_path / "spot")).lines
    start = lines.index("  split     pairs  references   published:    pairs  references (Spot-the-Diff)")
    assert lines[start + 1 : start + 5] == [
        "  train         2           5                 8,566      17,676  differs",
        "  val           1           1                 1,493       3,310  differs",
        "  test          1           1                 1,270       2,107  differs",
        "  not the release of Spot-the-Diff: a part, another version, or other data in its layout",
    ]
    root, spec = write_clevr_dc(tmp_path / "dc"), DATASETS["clevr_dc"]
    exact = replace(spec.published[0], train=SplitCount(2, 3), val=SplitCount(0), test=SplitCount(1))
    monkeypatch.setitem(DATASETS, "clevr_dc", replace(spec, published=(exact,)))
    lines = look(root).lines
    assert "  train         2           3                     2           3" in lines
    assert "  test          1           1                     1           ?" in lines
    assert not any(line.endswith("  differs") or line.startswith("  not the release") for line in lines)
    wrong = replace(exact, train=SplitCount(2, 4))
    monkeypatch.setitem(DATASETS, "clevr_dc", replace(spec, published=(wrong,)))
    assert "  train         2           3                     2           4  differs" in look(root).lines


def test_a_dataset_of_params_is_read_with_its_own_options_and_splits_and_a_reader_that_is_said_goes_first(tmp_path):
    root = write_manifest(tmp_path / "own", "list.json", before="first", after="second")
    edit_json(root / "list.json", lambda rows: rows[0].update(split="val"))
    options = {"manifest": "list.json", "columns": {"before": "first", "after": "second"}}
    entry = DatasetEntry(reader="pairs", root=Path(os.path.relpath(root)), options=options, train_on=("train", "val"))
    lines, sound = check(root, {"other": DatasetEntry(reader="iedit", root=tmp_path / "elsewhere"), "own": entry})
    assert (sound, lines[0], "params.yaml" in "".join(lines)) == (True, f"{root} is own (pairs)", False)
    assert "  val           1           1" in lines
    root = write_iedit(tmp_path / "raw")
    entries = {"mine": DatasetEntry(reader="iedit", root=root)}
    for reader in (None, "iedit"):
        assert check(root, entries, reader).lines[0] == f"{root} is mine (iedit)"
    told = "\n".join(check(root, entries, "pairs").lines)
    assert told.startswith(f"{root} is read as pairs\n")
    assert "read as: before is img0, after is img1, captions is sents" in told
    assert "  MISSING annotations/train.json" in check(root, {}, "spot_the_diff").lines
    (root / "test.json").unlink()
    assert look(root).lines[0] == f"{root} looks like iedit", "a partly fetched dataset stays what it is"


def test_collections_of_ones_own_get_names_of_their_own_as_exact_yaml(tmp_path):
    entries: dict[str, DatasetEntry] = {}
    for folder in ("kitchen/raw", "garden/raw", "it's: #1"):
        root = write_manifest(tmp_path / folder, "yes.json", captions="text")
        ((name, given),) = yaml.safe_load(check(root, entries).lines[-1]).items()
        entries[name] = DatasetEntry.model_validate(given)
        assert entries[name] == recognise(root)[1]
    assert list(entries) == ["raw", "raw_2", "it_s_1"]
    taken = {"spot_the_diff": DatasetEntry(reader="spot_the_diff", root=tmp_path / "first")}
    assert check(write_spot(tmp_path / "second"), taken).lines[-1].startswith("    second: {reader: spot_the_diff")


def test_omnidiff_is_held_against_the_part_of_its_name_else_of_its_size_and_five_rows_of_a_fault_are_shown(tmp_path):
    root = write_manifest(tmp_path / "omni", "annotations.json")
    entry = DatasetEntry(reader="omnidiff", root=root)
    for part, title in (("omnidiff_real", "OmniDiff-Real"), ("omnidiff", "OmniDiff-Render")):
        assert any(f"({title})" in line for line in check(root, {part: entry}).lines)
    root = write_clevr_dc(tmp_path / "dc")
    edit_json(root / "split.json", lambda splits: splits["train"].extend(f"scene {n}" for n in range(7)))
    lines, sound = look(root)
    start = lines.index("  rows that cannot be read: 7")
    assert lines[start + 1].startswith("    split.json, train[2]: scene: expected a number from 0, found text")
    assert (sound, lines[start + 5][:26], lines[start + 6]) == (False, "    split.json, train[6]: ", "    and 2 more")


def test_a_folder_above_or_without_data_is_refused_with_the_place_to_look(tmp_path):
    write_spot(tmp_path / "repository/data")
    with pytest.raises(DataError, match="perhaps you mean `m3diff data check .*/repository/data`"):
        look(tmp_path / "repository")
    (tmp_path / "own").mkdir()
    (tmp_path / "own/b.parquet").write_text("no parquet")
    with pytest.raises(DataError, match=r"(?s)b\.parquet: cannot be read as Parquet.*Or say what it is by --reader"):
        look(tmp_path / "own")
