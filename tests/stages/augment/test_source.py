"""What a source gives: usable originals and images, each in the split of its scene; all else is counted."""

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from m3diff.datasets.minichange.generate import image_paths, read_scenes
from m3diff.datasets.minichange.language import describe_scene
from m3diff.images.open import NO_IMAGE
from m3diff.records.errors import DataError
from m3diff.records.files import sha256
from m3diff.stages.augment.params import Source
from m3diff.stages.augment.source import Rejected, known_pairs, read_captioned, read_originals
from tests.layouts import write_emu
from tests.stages.augment.small import SCENES, draw

ONE_IMAGE = {"manifest": "pairs.jsonl", "columns": {"before": "image", "after": "image", "captions": "caption"}}


def write(root: Path, rows: list[dict[str, Any]], **options: Any) -> Source:
    """A manifest of these rows, with an image a.png to e.png of its own, and one that is none."""
    root.mkdir()
    for number, letter in enumerate("abcde"):
        Image.new("RGB", (8, 8), (number * 40, 0, 0)).save(root / f"{letter}.png")
    (root / "none.png").write_text("none")
    (root / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Source(reader="pairs", root=root, options={"manifest": "pairs.jsonl"} | options)


def places(folder: Path) -> tuple[Path, Path]:
    return folder / "unpacked", folder / "image_cache.parquet"


def row(number: int, **changes: Any) -> dict[str, Any]:
    known = {"id": f"p{number}", "split": "train", "before": "a.png", "after": "b.png", "captions": ["add a cat", "x"]}
    return known | changes


ROWS = [
    row(0, scene="s0", change_types=["add"]),
    row(1, captions=["", "  ", "make it\n red "]),
    row(2, captions=["", " "]),
    row(3, captions=["nothing"], change_types=["none"]),
    row(4, before="gone.png"),
    row(5, before="none.png"),
    row(6, before="../a.png"),
    row(7, scene="s7"),
    row(8, scene="s7", split="test"),
    row(9, split="dev"),
    row(10, split="val"),
    {"id": "p11", "split": "train"},
]


def test_usable_rows_are_originals_and_every_other_row_has_its_reason(tmp_path: Path):
    source, rejected = write(tmp_path / "raw", ROWS), Rejected()
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")  # outside the root, where p6 leads
    found = read_originals(source, *places(tmp_path), rejected)
    assert [(each.name, each.split, each.scene, each.instruction) for each in found] == [
        ("p0", "train", "s0", "add a cat"),
        ("p1", "train", "p1", "make it red"),
        ("p8", "test", "s7", "add a cat"),
        ("p10", "val", "p10", "add a cat"),
    ]
    assert found[0].change_types == ["add"]
    assert found[0].digest == sha256(tmp_path / "raw/a.png")
    assert found[0].caption is None
    assert rejected == {
        "no instruction": 1,
        "nothing is to change": 1,
        "image cannot be read": 3,
        "scene is in a higher split": 1,
        "row cannot be read": 2,
    }
    assert len(found) + rejected.total() == len(ROWS)
    root = source.root
    assert rejected.examples == {
        "no instruction": "pairs.jsonl, line 3",
        "nothing is to change": "pairs.jsonl, line 4",
        "image cannot be read": f"pairs.jsonl, line 5: {root}/gone.png: is missing; fetch it",
        "scene is in a higher split": "pairs.jsonl, line 8: s7 is in test",
        "row cannot be read": "pairs.jsonl, line 12: before, after, captions: is missing",
    }


@pytest.mark.parametrize("path", ["../a.png", "{top}/a.png", "..\\a.png", "http://127.0.0.1/a.png", "link.png"])
def test_an_image_outside_the_source_is_not_used(path: str, tmp_path: Path):
    rejected = Rejected()
    source = write(tmp_path / "raw", [row(0, before=path.format(top=tmp_path))])
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    (tmp_path / "raw/link.png").symlink_to(tmp_path / "a.png")
    assert read_originals(source, *places(tmp_path), rejected) == []
    assert "is no path inside" in rejected.examples["image cannot be read"]
    linked = source.model_copy(update={"follow_links": True})
    assert len(read_originals(linked, *places(tmp_path), Rejected())) == (path == "link.png")


def test_splits_that_are_not_asked_for_are_left_out_and_still_keep_their_scenes(tmp_path: Path):
    source = write(tmp_path / "raw", ROWS).model_copy(update={"splits": ("train",)})
    rejected = Rejected()
    found = read_originals(source, *places(tmp_path), rejected)
    assert [each.name for each in found] == ["p0", "p1"]
    assert rejected["scene is in a higher split"] == 1, "p7 is a test scene"


def test_a_list_of_images_with_captions_is_read_by_the_reader_of_pairs(tmp_path: Path):
    rows = [
        {"id": str(number), "image": image, "caption": text, "split": "train"}
        for number, (image, text) in enumerate([("a.png", "a cat"), ("b.png", ""), ("none.png", "x"), ("c.png", "c")])
    ]
    source, rejected = write(tmp_path / "raw", rows, **ONE_IMAGE), Rejected()
    found = read_captioned(source, *places(tmp_path), rejected)
    assert [(each.name, each.image.name, each.caption) for each in found] == [
        ("0", "a.png", "a cat"),
        ("3", "c.png", "c"),
    ]
    assert rejected == {"no caption": 1, "image cannot be read": 1}
    assert known_pairs(source, tmp_path / "unpacked") == set()


@pytest.mark.parametrize(
    ("named", "told"),
    [
        ("none.png", f"{{root}}/none.png: does not decode: {NO_IMAGE}; restore it or save it anew"),
        (
            "../a.png",
            "text '../a.png' is no path inside {root}; correct the path; a link out of the root needs follow_links in "
            "the source",
        ),
    ],
)
def test_an_image_that_cannot_be_read_is_named_with_a_remedy(named: str, told: str, tmp_path: Path):
    source, rejected = write(tmp_path / "raw", [row(0, before=named)]), Rejected()
    assert read_originals(source, *places(tmp_path), rejected) == []
    assert rejected.examples["image cannot be read"] == f"pairs.jsonl, line 1: {told.format(root=source.root)}"


def test_a_row_of_no_known_split_is_named(tmp_path: Path):
    source, rejected = write(tmp_path / "raw", [row(0, split="dev")]), Rejected()
    assert read_originals(source, *places(tmp_path), rejected) == []
    told = "pairs.jsonl, line 1: split: expected one of train, val, test, found text 'dev'"
    assert rejected.examples == {"row cannot be read": told}


def test_images_inside_parquet_files_are_written_beside_and_used(tmp_path: Path):
    source, rejected = Source(reader="emu_edit", root=write_emu(tmp_path / "emu")), Rejected()
    assert len(read_originals(source, *places(tmp_path), rejected)) == 5
    assert not rejected


def test_a_pair_of_two_images_between_single_ones_is_counted(tmp_path: Path):
    rows = [row(0, after="a.png"), row(1), row(2, scene="p0", split="test")]
    source, rejected = write(tmp_path / "raw", rows), Rejected()
    assert read_captioned(source, *places(tmp_path), rejected) == []
    assert rejected == {"is a pair of two images": 2, "scene is in a higher split": 1}
    assert rejected.examples["is a pair of two images"] == "pairs.jsonl, line 2"


HALF = "\ud83d"
"""Half a character, as a cut JSON escape leaves it; no file can hold it."""


def test_half_a_character_is_a_question_mark_wherever_a_row_has_it(tmp_path: Path):
    whole = row(0, id=f"p{HALF}", scene=f"s{HALF}", captions=[f"add a cup {HALF}"], change_types=[f"add{HALF}"])
    source, rejected = write(tmp_path / "raw", [whole, row(1, before=f"{HALF}.png")]), Rejected()
    (found,) = read_originals(source, *places(tmp_path), rejected)
    assert (found.name, found.scene, found.instruction, found.change_types) == ("p?", "s?", "add a cup ?", ["add?"])
    assert rejected == {"image cannot be read": 1}
    assert len(known_pairs(source, tmp_path / "unpacked")) == 1
    single = {"id": f"p{HALF}", "split": "train", "image": "a.png", "caption": f"a cup {HALF}"}
    (image,) = read_captioned(write(tmp_path / "one", [single], **ONE_IMAGE), *places(tmp_path), rejected)
    assert (image.name, image.caption) == ("p?", "a cup ?")


def test_pairs_of_two_images_have_no_captions_of_single_ones(tmp_path: Path):
    source = write(tmp_path / "raw", [row(0)])
    with pytest.raises(DataError, match="no captions of single images; .*columns: {before: image, after: image"):
        read_captioned(source, *places(tmp_path), Rejected())


def test_a_source_that_is_not_there_is_told(tmp_path: Path):
    source = Source(reader="pairs", root=tmp_path / "gone")
    with pytest.raises(DataError, match="gone: is no folder; fetch the source or correct its root"):
        read_originals(source, *places(tmp_path), Rejected())


def test_minichange_gives_originals_with_what_they_show_and_every_image_with_its_description(tmp_path: Path):
    source, rejected = Source(reader="minichange", root=draw(tmp_path / "raw")), Rejected()
    originals = read_originals(source, *places(tmp_path), rejected)
    scenes = read_scenes(source.root).of
    assert len(originals) == SCENES
    assert rejected == {"nothing is to change": SCENES}
    for each in originals:
        assert each.caption == describe_scene(scenes[each.image.relative_to(source.root).as_posix()])
    images = read_captioned(source, *places(tmp_path), rejected)
    assert len(images) == 3 * SCENES
    pairs = known_pairs(source, tmp_path / "unpacked")
    first, second, third = (source.root / path for path in image_paths(0))
    assert len(pairs) == 2 * SCENES
    assert {frozenset((first, second)), frozenset((first, third))} < pairs
    assert frozenset((second, third)) not in pairs
