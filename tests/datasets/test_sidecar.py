"""Pairs whose caption is in a text file next to the two images: matching by names, splits, and bad folders.

Musubi-tuner (`docs/dataset_config.md`, `multiple_target`) and fal.ai's trainers read this layout.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from m3diff.commands.inspect import check
from m3diff.datasets import DATASETS, sidecar
from m3diff.datasets.sidecar import FolderFiles, find_ends
from m3diff.datasets.spec import Row, read_with_notes
from m3diff.records.errors import DataError, Fault
from tests.commands.inspect.folders import check_folder
from tests.errors import raises
from tests.layouts import judge_by_polars_alone, run_ingest, run_validate, save_picture, write_sidecars

CAPTION = "the lamp is out"


def write(root: Path, *names: str, text: str = CAPTION) -> Path:
    """Write files: an image, each with another block, or a text for a name that ends with .txt."""
    for number, name in enumerate(names):
        path = root / name
        if name.endswith(".txt"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        else:
            save_picture(path, number, 40 * number % 256)
    return root


def read(root: Path, **options: Any) -> list[Row]:
    return list(sidecar.read(root, **options))


def names_of(rows: Sequence[Row]) -> list[tuple[str, tuple[str, ...]]]:
    assert [row.fault for row in rows] == [None] * len(rows)
    return [(row.name, row.images) for row in rows]


def test_a_text_and_two_images_of_its_name_are_a_pair(tmp_path):
    write(tmp_path, "b/2.png", "b/2_1.jpg", "b/2.txt", "1.jpg", "1_1.png", "1.txt")
    rows = read(tmp_path)
    assert names_of(rows) == [("1", ("1.jpg", "1_1.png")), ("b/2", ("b/2.png", "b/2_1.jpg"))]
    assert [row.references for row in rows] == [[CAPTION]] * 2
    assert [row.source for row in rows] == ["1.txt", "b/2.txt"]
    assert {row.question for row in rows} == {None}


@pytest.mark.parametrize("after", ["x_0.png", "x_01.png", "x_2.png", "x_0001.png"])
def test_the_second_image_may_have_any_number(tmp_path, after):
    assert names_of(read(write(tmp_path, "x.png", after, "x.txt"))) == [("x", ("x.png", after))]


def test_an_image_with_a_text_of_its_own_is_no_second_image(tmp_path):
    write(tmp_path, "a.png", "a_1.png", "a_1.txt", "a_1_1.png", "a_2.png", "a.txt")
    rows = read(tmp_path)
    assert names_of(rows) == [("a", ("a.png", "a_2.png")), ("a_1", ("a_1.png", "a_1_1.png"))]


@pytest.mark.parametrize(
    ("ends", "names"),
    [
        (("_start", "_end"), ("x_start.png", "x_end.jpg")),
        (("_0", "_1"), ("x_0.png", "x_1.png")),
        (("", "_after"), ("x.png", "x_after.png")),
        (("_1", ""), ("x_1.png", "x.png")),
    ],
)
def test_the_ends_of_the_names_are_options(tmp_path, ends, names):
    before, after = ends
    write(tmp_path, *names, "x.txt")
    assert names_of(read(tmp_path, before=before, after=after)) == [("x", names)]


@pytest.mark.parametrize(
    ("text", "caption"),
    [
        ("the lamp\nis out\n", "the lamp is out"),
        ("\ufeff  a cup \r\n\r\n left ", "a cup left"),
        ("une tasse a été prise", "une tasse a été prise"),
    ],
    ids=["lines", "a byte order mark and empty lines", "accents"],
)
def test_the_whole_text_is_one_caption(tmp_path, text, caption):
    (row,) = read(write(tmp_path, "x.png", "x_1.png", "x.txt", text=text))
    assert row.references == [caption]


def test_a_text_may_have_a_suffix_in_upper_case(tmp_path):
    write(tmp_path, "x.PNG", "x_1.PNG", "x.txt")
    (tmp_path / "x.txt").rename(tmp_path / "x.TXT")
    (row,) = read(tmp_path)
    assert row.fault is None
    assert row.references == [CAPTION]
    assert row.source == "x.TXT"
    output, _ = check(tmp_path, {})
    assert output[0] == f"{tmp_path} looks like sidecar"


FAULTS: dict[str, tuple[list[str], str, Fault]] = {
    "no image after": (["x.png", "x.txt"], CAPTION, Fault("datasets.text_without_image", key="images", names=["x_1"])),
    "no image": (["y.png", "x.txt"], CAPTION, Fault("datasets.text_without_image", key="images", names=["x", "x_1"])),
    "two images after": (
        ["x.png", "x_1.png", "x_2.png", "x.txt"],
        CAPTION,
        Fault("datasets.several_images_of_text", key="after", names=["x_1.png", "x_2.png"]),
    ),
    "two images before": (
        ["x.jpg", "x.png", "x_1.png", "x.txt"],
        CAPTION,
        Fault("datasets.several_images_of_text", key="before", names=["x.jpg", "x.png"]),
    ),
    "an empty text": (["x.png", "x_1.png", "x.txt"], " \n ", Fault("datasets.text_without_word", key="caption")),
    "white space": (["x.png", "x_1.png", "x.txt"], "\u00a0\n", Fault("datasets.text_without_word", key="caption")),
}


@pytest.mark.parametrize("case", FAULTS)
def test_a_text_that_is_no_pair_is_a_fault_of_its_row(tmp_path, case):
    names, text, fault = FAULTS[case]
    write(tmp_path, "z.png", "z_1.png", "z.txt")
    write(tmp_path, *names, text=text)
    bad_row, good_row = read(tmp_path)
    assert bad_row.source == "x.txt"
    assert bad_row.name == "x"
    assert bad_row.fault == fault
    assert good_row.fault is None


def test_two_texts_of_the_same_images_are_a_fault(tmp_path):
    write(tmp_path, "x.png", "x_1.png", "x.txt")
    (tmp_path / "x.TXT").write_text(CAPTION)
    (row,) = read(tmp_path)
    assert row.fault == Fault("datasets.several_texts_of_images", key="caption", names=["x.TXT", "x.txt"])
    files = FolderFiles.match(["x.TXT", "x.png", "x.txt", "x_1.png"], "", "_1")
    assert files.count_complete_pairs() == 0


def test_a_text_in_another_encoding_is_a_fault_with_the_command_that_converts_it(tmp_path):
    write(tmp_path, "x.png", "x_1.png", "x.txt")
    (tmp_path / "x.txt").write_bytes("été".encode("latin-1"))
    (row,) = read(tmp_path)
    assert row.fault is not None
    assert row.fault.code == "datasets.not_utf8"
    assert str(tmp_path / "x.txt") in row.fault.fields["command"]


def test_files_that_no_pair_uses_are_counted_and_hidden_ones_are_not_read(tmp_path):
    write(tmp_path, "a/x.png", "a/x_1.png", "a/x.txt", "a/x_mask.png", "a/y.png", "a/y_1.png", "readme.txt")
    write(tmp_path, "a/._x.txt", ".cache/q.txt", ".cache/q.png")
    rows, notes = read_with_notes(DATASETS["sidecar"], tmp_path, {})
    assert names_of(rows) == [("a/x", ("a/x.png", "a/x_1.png"))]
    assert notes == [
        "texts in folders without images, which are not read: 1; the first is readme.txt",
        "images that belong to no text, which are not read: 3; the first is a/x_mask.png",
    ]


def pair_in(folder: str, name: str) -> list[str]:
    return [f"{folder}/{name}.png", f"{folder}/{name}_1.png", f"{folder}/{name}.txt"]


def test_folders_name_the_splits_and_other_pairs_are_counted(tmp_path):
    folders = ("train/a", "Validation", "b/test", "testing/train", "test_site_3")
    write(tmp_path, *(name for number, folder in enumerate(folders) for name in pair_in(folder, str(number))))
    rows, notes = read_with_notes(DATASETS["sidecar"], tmp_path, {})
    splits = {row.name: row.split for row in rows}
    assert splits == {
        "train/a/0": "train",
        "Validation/1": "val",
        "b/test/2": "test",
        "testing/train/3": "test",
        "test_site_3/4": "train",
    }
    assert notes == ["pairs in no folder that names a split, which are train: 1; the first is test_site_3/4.txt"]


def test_without_folders_of_splits_the_option_names_or_draws_them(tmp_path):
    write(tmp_path, *(name for number in range(40) for name in pair_in("a", str(number))))
    assert {row.split for row in read(tmp_path)} == {"train"}
    assert {row.split for row in read(tmp_path, split="test")} == {"test"}
    rows, notes = read_with_notes(DATASETS["sidecar"], tmp_path, {"split": {"test": 0.3, "val": 0.2}})
    assert {row.split for row in rows} == {"train", "val", "test"}
    assert len(notes) == 1


def test_splits_are_not_drawn_if_a_folder_names_one(tmp_path):
    write(tmp_path, *pair_in("a", "1"), *pair_in("b/test", "2"))
    with raises(DataError, "datasets.draw_beside_split_folders", path=tmp_path / "b/test", value="test"):
        read(tmp_path, split={"test": 0.5})


def test_equal_ends_are_refused(tmp_path):
    with raises(DataError, "datasets.equal_ends_of_names", value="_1"):
        read(tmp_path, before="_1", after="_1")


# What `m3diff data check` says


@pytest.mark.parametrize(
    ("ends", "options"),
    [
        (("", "_1"), {}),
        (("_start", "_end"), {"before": "_start", "after": "_end"}),
        (("_before", "_after"), {"before": "_before", "after": "_after"}),
        ((".before", ".after"), {"before": ".before", "after": ".after"}),
    ],
)
def test_the_check_recognises_the_layout_and_its_entry_works(tmp_path, ends, options, monkeypatch):
    judge_by_polars_alone(monkeypatch)
    root = write_sidecars(tmp_path / "my pairs", ends)
    output, is_sound = check(root, {})
    assert is_sound, output
    assert output[0] == f"{root} looks like sidecar"
    entry = yaml.safe_load(output[-1])
    expected = {"reader": "sidecar", "root": str(root)} | ({"options": options} if options else {})
    assert entry == {"my_pairs": expected}
    report = run_ingest(root, "sidecar", **options)
    assert report.pairs == {"test": 1, "train": 2, "val": 1}
    assert run_validate(tmp_path, near_duplicate_max_diff=None).rows_out == 4


def test_the_check_offers_to_draw_test_pairs(tmp_path, monkeypatch):
    judge_by_polars_alone(monkeypatch)
    write(tmp_path / "p", *(name for number in range(20) for name in pair_in("a", str(number))))
    _, output = check_folder(tmp_path / "p", {"reader": "sidecar", "root": str(tmp_path / "p")})
    assert "name a folder of pairs `test`, or `split: {test: 0.15, val: 0.1" in output


@pytest.mark.parametrize(
    "names",
    [["readme.txt", "a.png"], ["a.txt", "b/a.png", "b/a_1.png"], ["a.png", "a_1.png"], ["a.txt", "a.png"]],
    ids=["a readme", "images in another folder", "no text", "one image"],
)
def test_other_folders_are_not_taken_for_this_layout(tmp_path, names):
    assert find_ends(write(tmp_path, *names)) is None


def test_a_table_beside_texts_is_read_as_a_table(tmp_path):
    write(tmp_path / "p", *pair_in("a", "1"))
    (tmp_path / "p/pairs.csv").write_text("before,after,captions,split\na/1.png,a/1_1.png,it fell,train\n")
    output, _ = check(tmp_path / "p", {})
    assert output[0] == f"{tmp_path / 'p'} looks like pairs"


def test_a_name_with_signs_of_a_pattern_is_matched_as_it_is(tmp_path):
    names = ["a+(1).png", "a+(1)_1.png", "a+(1).txt"]
    files = FolderFiles.match(sorted(names), "", "_1")
    assert files.images_of_text == {"a+(1)": (["a+(1).png"], ["a+(1)_1.png"])}
    assert files.count_complete_pairs() == 1
