import os
from pathlib import Path

import pytest
import yaml

from components.__main__ import DATA_REFUSED, main
from components.inspect.check import LAYOUTS, check, recognise
from components.ingest.stage import READERS
from components.ingest.params import DatasetEntry
from components.records import DataError
from tests.layouts import (
    edit_json,
    save_picture,
    write_birds,
    write_clevr,
    write_clevr_dc,
    write_iedit,
    write_json,
    write_spot,
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


WRITERS = {
    "clevr_change": write_clevr,
    "clevr_dc": write_clevr_dc,
    "spot_the_diff": write_spot,
    "iedit": write_iedit,
    "birds_to_words": write_bird_folder,
    "omnidiff": lambda root: write_manifest(root, "annotations.json"),
    "pairs": lambda root: write_manifest(root, "pairs.csv"),
}


@pytest.mark.parametrize("reader", sorted(READERS))
def test_every_layout_is_known_by_its_files_and_found_sound(tmp_path, reader, capsys):
    root = WRITERS[reader](tmp_path / "raw")
    assert main(["data", "check", str(root)]) == 0
    told = capsys.readouterr().out
    assert f"looks like {reader}\n" in told
    assert "missing and 0 empty" in told
    entry = yaml.safe_load(told.splitlines()[-1])[0]
    assert Dataset.model_validate(entry).reader == reader


@pytest.mark.parametrize("reader", sorted(READERS))
def test_an_image_that_lacks_is_named_and_refused(tmp_path, reader, capsys):
    root = WRITERS[reader](tmp_path / "raw")
    gone, hollow = sorted(path for path in root.rglob("*") if path.suffix in (".png", ".jpg", ".jpeg", ".gif"))[:2]
    gone.unlink()
    hollow.write_bytes(b"")
    assert main(["data", "check", str(root)]) == DATA_REFUSED
    told = capsys.readouterr().out
    assert f"images that lack: 1\n    {gone}\n" in told
    assert f"images without a byte: 1\n    {hollow}\n" in told


@pytest.mark.parametrize("reader", [name for name, layout in LAYOUTS.items() if len(layout.files) > 1])
def test_a_layout_is_known_though_an_annotation_file_lacks(tmp_path, reader):
    root = WRITERS[reader](tmp_path / "raw")
    lacking = LAYOUTS[reader].files[-1]
    (root / lacking).unlink()
    found = check(root)
    assert not found.sound
    assert found.lines[0] == f"{root} looks like {reader}"
    assert f"  LACKS  {lacking}" in found.lines


def test_counts_stand_beside_the_published_ones(tmp_path):
    told = check(write_spot(tmp_path)).lines
    assert "  train         2         5             8,566  differs" in told
    assert any(line.startswith("  not the release of Spot-the-Diff") for line in told)


def test_rows_that_cannot_be_read_are_told_five_at_most_and_counted(tmp_path):
    root = write_clevr_dc(tmp_path)
    edit_json(root / "split.json", lambda splits: splits["train"].extend(f"scene {n}" for n in range(7)))
    found = check(root)
    assert not found.sound
    start = found.lines.index("  rows that cannot be read: 7")
    assert found.lines[start + 1].startswith("    split.json, train[2]: scene: expected a number from 0, found text")
    assert found.lines[start + 6] == "    and 2 more"


def test_a_truncated_annotation_file_is_told_not_raised(tmp_path):
    root = write_iedit(tmp_path)
    (root / "valid.json").write_text('[{"img0": "a.jpg"')
    found = check(root)
    assert not found.sound
    assert "valid.json: line 1 column 18: not valid JSON" in found.lines[-3]


def test_columns_with_other_names_are_suggested_as_options(tmp_path):
    root = write_manifest(tmp_path, "mine.json", before="image1", after="image2", captions="caption")
    dataset = recognise(root)
    columns = {"before": "image1", "after": "image2", "captions": "caption"}
    assert (dataset.reader, dataset.options) == ("pairs", {"manifest": "mine.json", "columns": columns})
    assert check(root).sound


def test_a_split_that_is_none_of_three_is_told(tmp_path):
    root = write_manifest(tmp_path, "annotations.json")
    edit_json(root / "annotations.json", lambda rows: rows[0].update(split="dev"))
    found = check(root)
    assert not found.sound
    assert "    annotations.json, record 0: split 'dev'" in found.lines


def test_a_dataset_of_params_is_read_with_its_own_options(tmp_path):
    root = write_manifest(tmp_path, "list.json", before="first", after="second")
    options = {"manifest": "list.json", "columns": {"before": "first", "after": "second"}}
    with pytest.raises(DataError, match="looks like none of the layouts"):
        check(root)
    dataset = Dataset(name="own", reader="pairs", root=Path(os.path.relpath(root)), options=options)
    found = check(root, (dataset,))
    assert found.sound
    assert found.lines[0] == f"{root} is own (pairs)"


def test_a_folder_above_or_without_data_is_refused_with_the_place_to_look(tmp_path, capsys):
    write_spot(tmp_path / "repository/data")
    assert main(["data", "check", str(tmp_path / "repository")]) == DATA_REFUSED
    assert f"Perhaps you mean {tmp_path / 'repository/data'}." in capsys.readouterr().err
    assert main(["data", "check", str(tmp_path / "nowhere")]) == DATA_REFUSED
    assert "no such folder" in capsys.readouterr().err
