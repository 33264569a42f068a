"""What a source gives: usable originals and images, each in the split of its scene; all else is counted."""

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from m3diff.datasets.minichange.generate import image_paths, read_scenes
from m3diff.datasets.minichange.language import describe_scene
from m3diff.records.errors import DataError
from m3diff.records.files import sha256
from m3diff.stages.augment.params import Source
from m3diff.stages.augment.source import Original, Rejected, known_pairs, read_originals
from tests.stages.augment.toys import SCENES, draw

ONE_IMAGE = {"columns": {"before": "image", "after": "image", "captions": "caption"}}


def write(root: Path, rows: list[dict[str, Any]], **options: Any) -> Source:
    """A manifest of these rows, with an image a.png to e.png of its own, and one that is none."""
    root.mkdir()
    for number, letter in enumerate("abcde"):
        Image.new("RGB", (8, 8), (number * 40, 0, 0)).save(root / f"{letter}.png")
    (root / "none.png").write_text("none")
    (root / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Source(reader="pairs", root=root, options={"manifest": "pairs.jsonl"} | options)


def read(source: Source, use: Any = "instruction", **changes: Any) -> tuple[list[Original], Rejected]:
    folder, rejected = source.root.parent, Rejected()
    source = source.model_copy(update=changes)
    return read_originals(source, folder / "unpacked", folder / "cache.parquet", rejected, use), rejected


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


def test_usable_rows_are_originals_and_every_other_row_has_its_reason(tmp_path):
    source = write(tmp_path / "raw", ROWS)
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")  # outside the root, where p6 leads
    found, rejected = read(source)
    assert [(each.name, each.split, each.scene, each.text) for each in found] == [
        ("p0", "train", "s0", "add a cat"),
        ("p1", "train", "p1", "make it red"),
        ("p8", "test", "s7", "add a cat"),
        ("p10", "val", "p10", "add a cat"),
    ]
    assert (found[0].change_types, found[0].digest, found[0].caption) == (["add"], sha256(source.root / "a.png"), None)
    reasons = {"no instruction": 1, "nothing is to change": 1, "image cannot be read": 3}
    assert rejected == reasons | {"scene is in a higher split": 1, "row cannot be read": 2}
    assert rejected.examples == {
        "no instruction": "pairs.jsonl, line 3",
        "nothing is to change": "pairs.jsonl, line 4",
        "image cannot be read": f"pairs.jsonl, line 5: {source.root}/gone.png: is missing; fetch it",
        "scene is in a higher split": "pairs.jsonl, line 8: s7 is in test",
        "row cannot be read": "pairs.jsonl, line 12: before, after, captions: is missing",
    }
    found, rejected = read(source, splits=("train",))
    assert [each.name for each in found] == ["p0", "p1"]
    assert rejected["scene is in a higher split"] == 1, "p7 is a test scene"


@pytest.mark.parametrize("path", ["../a.png", "{top}/a.png", "..\\a.png", "http://127.0.0.1/a.png", "link.png"])
def test_an_image_outside_the_source_is_not_used(path, tmp_path):
    source = write(tmp_path / "raw", [row(0, before=path.format(top=tmp_path))])
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    (tmp_path / "raw/link.png").symlink_to(tmp_path / "a.png")
    found, rejected = read(source)
    assert found == []
    assert f"is no path inside {source.root}; correct the path" in rejected.examples["image cannot be read"]
    assert len(read(source, follow_links=True)[0]) == (path == "link.png")


def test_a_list_of_images_with_captions_is_read_by_the_reader_of_pairs(tmp_path):
    texts = [("a.png", "a cat"), ("b.png", ""), ("none.png", "x"), ("c.png", "c")]
    rows = [{"id": str(n), "image": image, "caption": text, "split": "train"} for n, (image, text) in enumerate(texts)]
    source = write(tmp_path / "raw", rows, **ONE_IMAGE)
    found, rejected = read(source, "caption")
    assert [(of.name, of.image.name, of.text) for of in found] == [("0", "a.png", "a cat"), ("3", "c.png", "c")]
    assert rejected == {"no caption": 1, "image cannot be read": 1}


def test_a_pair_of_two_images_between_single_ones_is_counted_and_where_all_are_the_source_refused(tmp_path):
    source = write(tmp_path / "raw", [row(0, after="a.png"), row(1), row(2, scene="p0", split="test")])
    found, rejected = read(source, "caption")
    assert (found, rejected) == ([], {"is a pair of two images": 2, "scene is in a higher split": 1})
    assert rejected.examples["is a pair of two images"] == "pairs.jsonl, line 2"
    with pytest.raises(DataError, match="no captions of single images; .*columns: {before: image, after: image"):
        read(write(tmp_path / "two", [row(0)]), "caption")
    with pytest.raises(DataError, match="gone: is no folder; fetch the source or correct its root"):
        read(Source(reader="pairs", root=tmp_path / "gone"))


def test_half_a_character_is_a_question_mark_wherever_a_row_has_it(tmp_path):
    half = "\ud83d"  # as a cut JSON escape leaves it; no file can hold it
    whole = row(0, id=f"p{half}", scene=f"s{half}", captions=[f"add a cup {half}"], change_types=[f"add{half}"])
    (found,), rejected = read(write(tmp_path / "raw", [whole, row(1, before=f"{half}.png")]))
    assert (found.name, found.scene, found.text, found.change_types) == ("p?", "s?", "add a cup ?", ["add?"])
    assert rejected == {"image cannot be read": 1}


def test_minichange_gives_originals_with_what_they_show_and_every_image_with_its_description(tmp_path):
    source = Source(reader="minichange", root=draw(tmp_path / "raw"))
    originals, rejected = read(source)
    scenes = {source.root / path: scene for path, scene in read_scenes(source.root).of.items()}
    assert (len(originals), rejected) == (SCENES, {"nothing is to change": SCENES})
    images, _ = read(source, "caption")
    assert len(images) == 3 * SCENES
    assert all(each.caption == describe_scene(scenes[each.image]) for each in originals)
    assert all(each.text == describe_scene(scenes[each.image]) and each.scene in each.image.name for each in images)
    pairs = known_pairs(source, tmp_path / "unpacked")
    first, second, third = (source.root / path for path in image_paths(0))
    assert len(pairs) == 2 * SCENES
    assert {frozenset((first, second)), frozenset((first, third))} < pairs
    assert frozenset((second, third)) not in pairs
