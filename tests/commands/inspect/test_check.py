"""`m3diff data check`: known layouts, published counts, entries of params.yaml, and options of tables of one's own."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from m3diff.__main__ import DATA_REFUSED, main
from m3diff.commands.inspect import check, recognise
from m3diff.commands.inspect.layout import OWN_READERS
from m3diff.commands.inspect.other_columns import remedy_for_missing_columns
from m3diff.commands.inspect.reading import EMPTY_IMAGES, MISSING_IMAGES, read_folder
from m3diff.datasets import DATASETS
from m3diff.datasets.odd_captions import ODD_KINDS
from m3diff.datasets.pairs import read
from m3diff.datasets.spec import SplitCount
from m3diff.records.errors import DataError, Fault
from m3diff.stages.ingest.params import DatasetEntry
from tests import layouts
from tests.commands.inspect.folders import (
    FolderCase,
    check_folder,
    draw_images_in_folders,
    draw_numbered_images,
)
from tests.errors import Message, raises
from tests.layouts import WRITERS, edit_json, run_ingest, save_picture, write_clevr_dc, write_json, write_spot

HEADER = "before,after,captions,split"
ROW = {"before": "0.png", "after": "0_2.png", "captions": "it fell", "split": "train"}
SPLITS = ("train", "train", "val", "test")
CAPTION_COLUMN = {"manifest": "data.csv", "columns": {"captions": "caption"}}
# Datasets whose images are in Parquet files
RECOGNISED = sorted(DATASETS.keys() - {"minichange_images"})  # readers of layouts that no other reader reads
EMBEDDED_IMAGES = ("emu_edit", "magicbrush", "syned")


def write_captions(root: Path, *captions: Any) -> None:
    """Four pairs in data.json, one for each caption."""
    draw_images_in_folders(root)
    rows = [
        {"before": f"p/{number}.png", "after": f"q/{number}.png", "captions": caption, "split": split}
        for number, (caption, split) in enumerate(zip(captions, SPLITS, strict=True))
    ]
    write_json(root / "data.json", rows)


def write_one_pair(root: Path, **fields: Any) -> None:
    draw_numbered_images(root)
    write_json(root / "pairs.json", [ROW | fields])


# options of a table of one's own


@pytest.fixture
def placeholder_root(tmp_path) -> Path:
    """A table whose first caption is nan."""
    return FolderCase("placeholder_alone").write(tmp_path / "raw")


def test_a_doubt_about_the_captions_of_an_entry_is_asked_again(placeholder_root):
    entry = {"reader": "pairs", "root": str(placeholder_root), "options": CAPTION_COLUMN}
    is_sound, output = check_folder(placeholder_root, entry)
    assert not is_sound
    assert "options: {no_caption: [nan]}" in output


def test_ingest_refuses_a_doubt_with_its_row_and_the_option_that_answers_it(placeholder_root):
    with pytest.raises(DataError) as refused:
        run_ingest(placeholder_root, "pairs", "own", **CAPTION_COLUMN)
    doubt = Message("datasets.captions_say_nothing", path="data.csv, line 2", value="nan")
    assert doubt.in_text(str(refused.value))
    assert "{no_caption: [nan]}" in str(refused.value)


def test_the_option_that_answers_a_doubt_keeps_the_texts_that_it_has(placeholder_root):
    with pytest.raises(DataError) as refused:
        run_ingest(placeholder_root, "pairs", "own", **CAPTION_COLUMN, no_caption=["-"])
    assert "{no_caption: ['-', nan]}" in str(refused.value)


@pytest.mark.parametrize(("split", "are_asked_about"), [("train", False), ("test", True)])
def test_odd_captions_are_named_once_in_a_line_or_in_the_question_on_test_pairs(split, are_asked_about, tmp_path):
    write_json(tmp_path / "pairs.json", [ROW | {"captions": "Caption: it fell", "split": split}])
    reading = read_folder("own", DatasetEntry(reader="pairs", root=tmp_path, options={"manifest": "pairs.json"}))
    lines = "\n".join(reading.lines)
    questions = "\n".join(str(doubt.question) for doubt in reading.doubts)
    description = ODD_KINDS["chat"].description
    assert lines.count(description) == int(not are_asked_about)
    assert questions.count(description) == int(are_asked_about)


def test_the_option_for_columns_of_other_names_keeps_the_entry_s_columns(tmp_path):
    images = {"vor": "0.png", "after": "1.png", "split": "train"}
    rows = [images | {"caption": "a tree fell"}, images | {"text": "the lamp is out"}]
    write_json(tmp_path / "data.json", rows)
    options = {"manifest": "data.json", "columns": {"before": "vor", "captions": "caption"}}
    remedy = remedy_for_missing_columns(DatasetEntry(reader="pairs", root=tmp_path, options=options))
    assert remedy.code == "check.columns_differ_by_file"
    assert remedy.fields["missing"] == ["caption"]
    assert remedy.fields["names"] == ["text"]
    columns = {"before": "vor", "captions": ["caption", "text"]}
    assert yaml.safe_load(remedy.fields["options"]) == {"columns": columns}


def test_pairs_without_a_caption_are_counted_with_their_rows(placeholder_root):
    options = CAPTION_COLUMN | {"no_caption": ["nan"]}
    _, output = check_folder(placeholder_root, {"reader": "pairs", "root": str(placeholder_root), "options": options})
    assert "  pairs without a caption, which are skipped: 1\n    data.csv, line 2" in output


def test_pairs_whose_captions_stand_for_none_are_passed_over_and_counted(tmp_path, capsys):
    root = tmp_path / "raw"
    write_captions(root, ["nan"], ["a car left", "NaN "], ["-"], ["a tree was cut"])
    report = run_ingest(root, "pairs", "own", manifest="data.json", no_caption=["nan", "-"])
    assert report.rows_in == 4
    assert report.pairs == {"test": 1, "train": 1}
    assert report.references == {"test": 1, "train": 1}
    assert "data.json, record 0" in capsys.readouterr().out


def test_an_empty_option_no_caption_takes_every_text_for_a_caption(tmp_path):
    root = tmp_path / "raw"
    write_captions(root, ["nan"], ["a car left", "NaN "], ["-"], ["a tree was cut"])
    report = run_ingest(root, "pairs", "own", manifest="data.json", no_caption=[])
    assert report.references == {"test": 1, "train": 3, "val": 1}


@pytest.mark.parametrize(
    ("separator", "references"),
    [("|", {"train": 4, "val": 1}), ("", {"train": 3, "val": 1})],
    ids=["a bar separates", "nothing separates"],
)
def test_one_text_of_several_captions_is_cut_at_the_separator(tmp_path, separator, references):
    root = FolderCase("bar_at_the_end").write(tmp_path / "raw")
    report = run_ingest(root, "pairs", "own", **CAPTION_COLUMN, separator=separator)
    assert report.references == references


@pytest.mark.parametrize("number", [7, 7.0, "7", "7.0"])
def test_a_number_in_a_template_is_whole(tmp_path, number):
    save_picture(tmp_path / "000007.png", 1)
    save_picture(tmp_path / "b/7.png", 2)
    write_json(tmp_path / "m.json", [{"n": number, "captions": "it fell"}])
    options = {"manifest": "m.json", "split": "train", "columns": {"before": "{n:06}.png", "after": "b/{n:d}.png"}}
    is_sound, output = check_folder(tmp_path, {"reader": "pairs", "root": tmp_path, "options": options})
    assert is_sound, output


@pytest.mark.parametrize(
    ("pair_id", "name"), [(1.0, "1"), (2.0**53, "9007199254740992"), ("1.0", "1.0"), (None, "0.png|0_2.png")]
)
def test_ids_that_pandas_has_made_floats_are_whole(tmp_path, pair_id, name):
    write_one_pair(tmp_path, id=pair_id)
    assert [row.name for row in read(tmp_path, "pairs.json")] == [name]


# the command


def test_the_command_prints_what_check_says_and_exits_with_0(tmp_path, capsys):
    write_one_pair(tmp_path)
    assert main(["data", "check", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith(f"{tmp_path} looks like pairs\n  licence: ")


def test_the_command_exits_with_its_code_for_refused_data(tmp_path, capsys):
    write_one_pair(tmp_path)
    (tmp_path / "0.png").unlink()
    assert main(["data", "check", str(tmp_path), "--reader", "pairs"]) == DATA_REFUSED
    assert capsys.readouterr().out.startswith(f"{tmp_path} is read as pairs\n")


def test_the_command_refuses_an_unknown_reader(tmp_path):
    with pytest.raises(SystemExit):
        main(["data", "check", str(tmp_path), "--reader", "pears"])


def test_a_file_in_place_of_a_folder_is_refused(tmp_path):
    write_one_pair(tmp_path)
    with raises(DataError, "check.no_folder", path=tmp_path / "pairs.json"):
        check(tmp_path / "pairs.json", {})


# layouts


@pytest.mark.parametrize("reader", RECOGNISED)
def test_every_layout_is_recognised_by_its_files(tmp_path, reader):
    root = WRITERS[reader](tmp_path / "raw")
    spec = DATASETS[reader]
    lines, is_sound = check(root, {})
    assert is_sound
    assert lines[0] == f"{root} looks like {reader}"
    assert lines[1].startswith(f"  licence: {spec.licence.name} (train: ")
    assert [line for line in lines if "found   " in line] == [f"  found   {file}" for file in spec.files]
    assert any(line.endswith("0 of them missing and 0 empty") for line in lines)


@pytest.mark.parametrize("reader", RECOGNISED)
def test_the_entry_of_a_recognised_layout_is_printed(tmp_path, reader):
    root = WRITERS[reader](tmp_path / "raw")
    lines, _ = check(root, {})
    assert lines[-2] == "the entry for ingest.datasets in params.yaml:"
    ((name, entry),) = yaml.safe_load(lines[-1]).items()
    dataset = recognise(root)
    assert dataset.name == name
    assert dataset.entry == DatasetEntry.model_validate(entry)
    assert name == ("raw" if reader in OWN_READERS else reader)


@pytest.mark.parametrize("reader", sorted({*RECOGNISED} - {*EMBEDDED_IMAGES, "sidecar"}))
def test_missing_and_empty_images_of_a_layout_are_named(tmp_path, reader):
    root = WRITERS[reader](tmp_path / "raw")
    images = sorted(path for path in root.rglob("*") if path.suffix.lower() in (".png", ".jpg", ".jpeg", ".gif"))
    images[0].unlink()
    images[1].write_bytes(b"")
    lines, is_sound = check(root, {})
    assert not is_sound
    assert f"  {len(images)} images, 1 of them missing and 1 empty" in lines
    assert lines[lines.index(f"  {MISSING_IMAGES}: 1") + 1] == f"    {images[0]}"
    assert lines[lines.index(f"  {EMPTY_IMAGES}: 1") + 1] == f"    {images[1]}"


@pytest.mark.parametrize("reader", sorted(name for name, spec in DATASETS.items() if len(spec.files) > 1))
def test_each_missing_annotation_file_of_a_layout_is_named(tmp_path, reader):
    root = WRITERS[reader](tmp_path / "raw")
    files = DATASETS[reader].files
    for missing_file in files:
        if missing_file == "grammar.json":
            continue  # without it MiniChange is CLEVR-Change's layout
        contents = {path: path.read_bytes() for path in root.glob(missing_file)}
        for path in contents:
            path.unlink()
        lines, is_sound = check(root, {})
        assert not is_sound
        assert lines[0] == f"{root} looks like {reader}"
        file_lines = [f"  {'MISSING' if file == missing_file else 'found  '} {file}" for file in files]
        assert lines[2:-1] == file_lines, "nothing was read"
        for path, data in contents.items():
            path.write_bytes(data)


def test_a_faulty_row_of_a_layout_is_no_reason_for_another_layout(tmp_path):
    root = layouts.write_iedit(tmp_path / "raw")
    edit_json(root / "train.json", lambda rows: rows[0].pop("sents"))
    assert check(root, {})[0][0] == f"{root} looks like iedit"


def test_a_partly_fetched_dataset_keeps_its_layout(tmp_path):
    root = layouts.write_iedit(tmp_path / "raw")
    edit_json(root / "train.json", lambda rows: rows[0].pop("sents"))
    (root / "test.json").unlink()
    assert check(root, {})[0][0] == f"{root} looks like iedit"


# Files of other data that have the names of a published dataset's annotation files
CAPTIONS_BY_NAME = {"a lamp.png": ["the lamp is gone"]}
RECORDS_OF_OTHERS = [{"picture": "0.png", "text": "the lamp is gone"}]
FILES_OF_OTHERS: dict[str, dict[str, Any]] = {
    "captions by name": {"captions.json": CAPTIONS_BY_NAME},
    "captions of COCO": {"captions.json": {"images": [{"id": 1}], "annotations": [{"image_id": 1, "caption": "x"}]}},
    "captions and splits by name": {"captions.json": CAPTIONS_BY_NAME, "split.json": {"train": ["a lamp.png"]}},
    "splits": {"splits.json": {"train": [1, 2], "val": [3], "test": [4]}},
    "a record per split": {f"{split}.json": RECORDS_OF_OTHERS for split in ("train", "valid", "test")},
    "annotations of train": {"annotations/train.json": RECORDS_OF_OTHERS},
    "data of train": {"data/train.json": RECORDS_OF_OTHERS},
    "a rule": {"grammar.json": {"rules": []}},
}


@pytest.mark.parametrize("files", FILES_OF_OTHERS.values(), ids=FILES_OF_OTHERS)
def test_a_file_name_alone_is_no_published_dataset(tmp_path, files):
    root = tmp_path / "above" / "dataset"
    for name, value in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        write_json(root / name, value)
    with raises(DataError, "check.unknown_layout", path=root):
        check(root, {})


@pytest.mark.parametrize("split", ["train", "dev", "validation", "test"])
def test_the_files_of_the_hub_alone_are_no_published_dataset(tmp_path, split):
    root = tmp_path / "above" / "dataset"
    row = {"before": layouts.stored(1), "after": layouts.stored(2), "caption": "the lamp is gone"}
    layouts.write_shards(root, split, [row])
    with raises(DataError, "check.unknown_layout", path=root) as refused:
        check(root, {})
    *_, fault = refused.value.fields["faults"]
    assert fault.fields["command"] == f"m3diff data check {root / 'data'}"


def test_captions_of_clevr_dc_are_recognised_before_anything_else_is_downloaded(tmp_path):
    write_json(tmp_path / "captions.json", {"10": ["the cube has moved"], "9": ["the cube is gone"]})
    lines, is_sound = check(tmp_path, {})
    assert not is_sound
    assert lines[0] == f"{tmp_path} looks like clevr_dc"
    assert "  MISSING split.json" in lines


def test_a_folder_above_the_data_is_refused_with_the_command_for_it(tmp_path):
    write_spot(tmp_path / "repository/data")
    with raises(DataError, "check.unknown_layout", path=tmp_path / "repository") as refused:
        check(tmp_path / "repository", {})
    *_, fault = refused.value.fields["faults"]
    assert fault.code == "check.table_nearby"
    assert fault.fields["command"] == f"m3diff data check {tmp_path / 'repository/data'}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An empty folder without tables of other tests beside it, of which `data check` would remind."""
    empty_folder = tmp_path / "above" / "dataset"
    empty_folder.mkdir(parents=True)
    return empty_folder


def test_a_damaged_parquet_file_is_named(folder):
    (folder / "b.parquet").write_text("no parquet")
    with raises(DataError, "check.unknown_layout", path=folder) as refused:
        check(folder, {})
    (fault,) = refused.value.fields["faults"]
    assert fault.code == "datasets.unreadable_parquet"
    assert fault.fields["path"] == folder / "b.parquet"


def test_an_unknown_folder_names_the_table_to_write_and_every_reader(folder):
    with raises(DataError, "check.unknown_layout", path=folder) as refused:
        check(folder, {})
    (fault,) = refused.value.fields["faults"]
    assert fault == Fault("check.no_pairs", table=folder / "pairs.csv", header=HEADER)
    assert sorted(refused.value.fields["readers"]) == sorted(DATASETS)
    assert [name for name in DATASETS if name not in str(refused.value)] == []


def test_an_unknown_folder_names_no_annotation_files_of_other_layouts(folder):
    with pytest.raises(DataError) as refused:
        check(folder, {})
    for reader, spec in DATASETS.items():
        if reader != "pairs":
            assert [file for file in spec.files if file in str(refused.value)] == []


def test_folders_that_do_not_match_are_offered_no_table(folder):
    save_picture(folder / "before/lamp.png", 1)
    save_picture(folder / "after/door.png", 2)
    with raises(DataError, "check.unknown_layout", path=folder) as refused:
        check(folder, {})
    (fault,) = refused.value.fields["faults"]
    assert fault == Fault("check.images_without_table", table=folder / "pairs.csv", header=HEADER)


# published counts


def test_counts_are_shown_beside_the_published_ones(tmp_path):
    lines, _ = check(write_spot(tmp_path / "spot"), {})
    start = lines.index("  split     pairs  references   published:    pairs  references (Spot-the-Diff)")
    assert lines[start + 1 : start + 5] == [
        "  train         2           5                 8,566      17,676  differs",
        "  val           1           1                 1,493       3,310  differs",
        "  test          1           1                 1,270       2,107  differs",
        "  not the published Spot-the-Diff, but a part of it, another version or other data in its layout",
    ]


def publish(monkeypatch: pytest.MonkeyPatch, train: SplitCount) -> None:
    """Let the published counts of CLEVR-DC be those of its toy, with this count of train."""
    spec = DATASETS["clevr_dc"]
    published = replace(spec.published[0], train=train, val=SplitCount(0), test=SplitCount(1))
    monkeypatch.setitem(DATASETS.data, "clevr_dc", replace(spec, published=(published,)))


def test_counts_of_a_complete_release_do_not_differ(tmp_path, monkeypatch):
    root = write_clevr_dc(tmp_path / "dc")
    publish(monkeypatch, train=SplitCount(2, 3))
    lines, _ = check(root, {})
    assert "  train         2           3                     2           3" in lines
    assert "  test          1           1                     1           ?" in lines
    assert not any(line.endswith("  differs") or line.startswith("  not the published") for line in lines)


def test_a_count_of_references_that_differs_is_marked(tmp_path, monkeypatch):
    root = write_clevr_dc(tmp_path / "dc")
    publish(monkeypatch, train=SplitCount(2, 4))
    lines, _ = check(root, {})
    assert "  train         2           3                     2           4  differs" in lines


# entries of params.yaml


def test_a_dataset_of_params_is_read_with_its_own_options_and_splits(tmp_path):
    root = layouts.write_manifest(tmp_path / "own", "list.json", before="first", after="second")
    edit_json(root / "list.json", lambda rows: rows[0].update(split="val"))
    options = {"manifest": "list.json", "columns": {"before": "first", "after": "second"}}
    entry = DatasetEntry(reader="pairs", root=Path(os.path.relpath(root)), options=options, train_on=("train", "val"))
    lines, is_sound = check(root, {"other": DatasetEntry(reader="iedit", root=tmp_path / "elsewhere"), "own": entry})
    assert is_sound
    assert lines[0] == f"{root} is own (pairs)"
    assert "params.yaml" not in "".join(lines)
    assert "  val           1           1" in lines


@pytest.mark.parametrize("reader", [None, "iedit"])
def test_a_dataset_of_params_is_known_by_its_root(tmp_path, reader):
    root = layouts.write_iedit(tmp_path / "raw")
    lines, _ = check(root, {"mine": DatasetEntry(reader="iedit", root=root)}, reader)
    assert lines[0] == f"{root} is mine (iedit)"


def test_another_reader_than_that_of_params_goes_first(tmp_path):
    root = layouts.write_iedit(tmp_path / "raw")
    lines, _ = check(root, {"mine": DatasetEntry(reader="iedit", root=root)}, "pairs")
    output = "\n".join(lines)
    assert output.startswith(f"{root} is read as pairs\n")
    assert "before is img0, after is img1, captions is sents" in output


def test_a_reader_whose_files_are_missing_is_told_their_names(tmp_path):
    root = layouts.write_iedit(tmp_path / "raw")
    assert "  MISSING annotations/train.json" in check(root, {}, "spot_the_diff")[0]


def test_tables_of_ones_own_get_distinct_names_as_exact_yaml(tmp_path):
    entries: dict[str, DatasetEntry] = {}
    for folder in ("kitchen/raw", "garden/raw", "(it's: #1)"):
        root = layouts.write_manifest(tmp_path / folder, "yes.json", captions="text")
        lines, _ = check(root, entries)
        ((name, entry),) = yaml.safe_load(lines[-1]).items()
        entries[name] = DatasetEntry.model_validate(entry)
        assert entries[name] == recognise(root).entry
    assert list(entries) == ["raw", "raw_2", "it_s_1"]


def test_a_second_root_of_a_layout_is_named_by_its_folder(tmp_path):
    entries = {"spot_the_diff": DatasetEntry(reader="spot_the_diff", root=tmp_path / "first")}
    lines, _ = check(write_spot(tmp_path / "second"), entries)
    assert lines[-1].startswith("    second: {reader: spot_the_diff")
