"""The originals that a source provides, and the pairs that each kind of synthetic dataset makes or rejects."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from m3diff.datasets.files import describe
from m3diff.datasets.minichange import image_paths, read_scenes
from m3diff.datasets.minichange.language import describe_scene
from m3diff.records.errors import DataError, Fault
from m3diff.records.files import sha256
from m3diff.stages.augment.params import RawSource
from m3diff.stages.augment.stage import (
    AugmentResult,
    Original,
    make_coupled_samples,
    make_edits,
    make_neighbours,
    read_originals,
    read_source_pairs,
)
from tests.errors import Message, raises
from tests.stages.augment.toys import (
    SCENES,
    ToyEditor,
    ToyFeatures,
    ToyWriter,
    captioned_image,
    draw,
    edits_entry,
    entry,
    original,
)


def result_with_rejection(reason: str, pairs_per_row: int = 1) -> AugmentResult:
    """Return a result in which a row of the source is already rejected."""
    result = AugmentResult(pairs_per_row)
    result.reject(reason, "row 1")
    return result


def run_edits(tmp_path: Path, editor: ToyEditor, writer: ToyWriter, **changes: Any) -> AugmentResult:
    texts = {"one": ("make it red",), "two": ("add a cat", "test", "a sofa"), "three": ("add a dog", "val")}
    originals = [original(tmp_path, name, *values) for name, values in texts.items()]
    cfg = edits_entry(tmp_path, tmp_path / "out", **({"edits": 3} | changes))
    result = result_with_rejection("no instruction", 3)
    make_edits(cfg, originals, result, editor, writer, tmp_path / "into")
    return result


def test_each_original_is_edited_by_its_instruction_and_keeps_scene_and_split(tmp_path):
    editor = ToyEditor()
    result = run_edits(tmp_path, editor, ToyWriter())
    assert [pair.id for pair in result.pairs] == [f"{name}-{at}" for name in ("one", "two", "three") for at in range(3)]
    for pair, (image, instruction, seed) in zip(result.pairs, editor.calls, strict=True):
        name = pair.id.partition("-")[0]
        assert pair.scene == f"scene {name}"
        assert pair.before.stem == name
        assert image == f"{name}.png"
        assert pair.captions[0] == instruction
        assert pair.change_types == ["color"]
        assert pair.made == {"of": name, "seed": seed}
        assert Image.open(pair.after).getpixel((0, 0)) == (seed & 255, seed >> 8 & 255, seed >> 16 & 255)
    assert {pair.split for pair in result.pairs if pair.id.startswith("two")} == {"test"}
    assert len({seed for *_, seed in editor.calls}) == 9
    assert result.rejected == {"no instruction": 3}, "a row that is not usable counts for all its edits"


def test_paraphrases_follow_the_instruction_in_the_splits_that_ask_for_them(tmp_path):
    writer = ToyWriter()
    result = run_edits(tmp_path, ToyEditor(), writer, paraphrases={"test": 2, "val": 0})
    assert writer.calls == [("paraphrase", {"text": "add a cat", "first": "a sofa"}, 2)]
    texts = {pair.id: pair.captions for pair in result.pairs}
    assert texts["two-1"] == ["add a cat", "paraphrase 0: add a cat / a sofa", "paraphrase 1: add a cat / a sofa"]
    assert texts["one-0"] == ["make it red"]


@pytest.mark.parametrize(
    ("editor", "short", "ids", "counts"),
    [
        (ToyEditor(), "dog", {"one", "two"}, {"too few paraphrases": 3}),
        (ToyEditor("cat", "dog"), "-", {"one"}, {"cannot be carried out": 3, "shows what another shows": 3}),
        (ToyEditor(paint=7), "-", {"one", "two", "three"}, {"shows what another shows": 6}),
    ],
    ids=["paraphrases", "editor", "equal edits"],
)
def test_a_pair_without_references_or_a_visible_change_is_rejected(editor, short, ids, counts, tmp_path):
    result = run_edits(tmp_path, editor, ToyWriter(short), paraphrases={"test": 2, "val": 2})
    assert {pair.id.partition("-")[0] for pair in result.pairs} == ids
    assert result.rejected == {"no instruction": 3} | counts
    assert result.dropped_texts == ({"refused": 1} if short == "dog" else {})
    if short == "dog":
        assert all("dog" not in instruction for _, instruction, _ in editor.calls), "no edit is wasted"


def test_an_edit_is_repeated_only_for_another_instruction_image_or_seed(tmp_path):
    source_image = original(tmp_path, "one", "make it red")
    changes = [({}, 3, 2), ({}, 3, 0), ({"text": "make it blue"}, 3, 2), ({"digest": "of another image"}, 3, 2)]
    for change, seed, edit_count in [*changes, ({}, 4, 2)]:
        cfg = edits_entry(tmp_path, tmp_path / "out", edits=2, paraphrases={}, seed=seed)
        editor = ToyEditor()
        result = AugmentResult()
        make_edits(cfg, [source_image._replace(**change)], result, editor, ToyWriter(), tmp_path / "into")
        assert len(editor.calls) == edit_count
        assert len(result.pairs) == 2


def run_neighbours(images: list[Original], source_pairs: Any = (), **changes: Any) -> AugmentResult:
    """Make neighbours of images in a plane. The cosine of 10 degrees is 0.98, of 30 degrees 0.87, of 60 degrees 0.5."""
    values = {"candidates": 2, "band": (0.75, 0.94), "max_text_similarity": 0.7, "references": 1}
    cfg = entry("neighbours", Path("source"), Path("out"), **(values | changes))
    result = result_with_rejection("no caption")
    make_neighbours(cfg, images, set(source_pairs), result, ToyFeatures(), ToyWriter(short="dog"))
    return result


def test_images_within_the_band_make_one_pair_with_the_difference_of_their_captions():
    result = run_neighbours(
        [captioned_image(0, "a red cup"), captioned_image(30, "two men"), captioned_image(90, "the sea")]
    )
    (pair,) = result.pairs
    assert pair.id == "n0+n30"
    assert pair.before == Path("0.png")
    assert pair.after == Path("30.png")
    assert pair.captions == ["difference 0: a red cup / two men"]
    assert pair.made == {"cosine": 0.866}
    assert pair.split == "train"
    assert pair.scene == "s0+s30"
    assert pair.change_types == []
    assert result.rejected == {"no caption": 1, "too unlike": 4, "was found the other way round": 1}
    (pair,) = run_neighbours([captioned_image(0, "a", scene="s"), captioned_image(30, "b", scene="s")]).pairs
    assert pair.scene == "s", "a pair of images from one scene keeps the scene"


def test_no_pair_crosses_splits():
    images = [
        captioned_image(0, "a cup"),
        captioned_image(25, "two men", "test"),
        captioned_image(30, "sea"),
        captioned_image(50, "x", "test"),
    ]
    result = run_neighbours(images)
    assert [(pair.id, pair.split) for pair in result.pairs] == [("n0+n30", "train"), ("n25+n50", "test")]
    assert run_neighbours(images[:2]).rejected == {"no caption": 1, "alone in its split": 2}


CUP = "a red cup on a table"
SOURCE_PAIRS = {frozenset((Path("0.png"), Path("30.png")))}


@pytest.mark.parametrize(
    ("caption", "changes", "reason", "count"),
    [
        ("two men", {"band": (0.75, 0.86)}, "too alike", 2),
        ("two men", {"band": (0.87, 0.94)}, "too unlike", 2),
        ("two men", {"band": (0.86, 0.87)}, None, 0),
        ("a red cup on THE table.", {"max_text_similarity": 0.71}, "captions are alike", 2),  # 5 of 7 words
        ("a red cup on the table", {"max_text_similarity": 0.72}, None, 0),
        ("red cup cup table", {"max_text_similarity": 0.44}, None, 0),  # 3 of 7, a word as often as it occurs
        ("red cup cup table", {"max_text_similarity": 0.42}, "captions are alike", 2),
        (CUP, {"max_text_similarity": 1}, "captions are alike", 2),
        ("!", {"max_text_similarity": 0}, None, 0),
        ("two men", {"source_pairs": SOURCE_PAIRS}, "is a pair of the source", 2),
        ("a dog", {}, "too few captions", 1),
    ],
)
def test_two_images_that_make_no_pair_are_counted_by_reason(caption, changes, reason, count):
    result = run_neighbours([captioned_image(0, CUP), captioned_image(30, caption)], **changes)
    assert len(result.pairs) == (reason is None)
    assert reason is None or result.rejected[reason] == count
    assert result.dropped_texts == ({"refused": 1} if caption == "a dog" else {})


@pytest.mark.parametrize(
    ("angle", "cosine", "band"), [(360, 1.0, (0.75, 1)), (180, -1.0, (-1, 0.75))], ids=["maximum", "minimum"]
)
def test_the_band_includes_both_of_its_cosines(angle, cosine, band):
    (pair,) = run_neighbours([captioned_image(0, CUP), captioned_image(angle, "two men")], band=band).pairs
    assert pair.made == {"cosine": cosine}


def test_every_candidate_is_made_or_counted_and_equal_images_make_no_pair():
    images = [captioned_image(angle, f"text {angle}") for angle in range(0, 180, 7)]
    result = run_neighbours(images, candidates=5)
    assert len(result.pairs) + sum(result.rejected.values()) == 5 * len(images) + 1
    same = run_neighbours([captioned_image(0, CUP), captioned_image(30, "two men")._replace(digest="d0")])
    assert same.rejected["same image"] == 2


def run_coupled_samples(images: list[Original], **changes: Any) -> AugmentResult:
    result = AugmentResult()
    make_coupled_samples(entry("coupled_samples", Path("in"), Path("out"), **changes), images, result)
    return result


def test_each_image_is_in_one_couple_of_its_split_with_both_captions_by_the_seed():
    images = [captioned_image(number, f"text {number}", "test" if number % 3 else "train") for number in range(21)]
    result = run_coupled_samples(images, separator=" | ")
    assert set(Counter(path for pair in result.pairs for path in (pair.before, pair.after)).values()) == {1}
    original_of_path = {image.image: image for image in images}
    for pair in result.pairs:
        before = original_of_path[pair.before]
        after = original_of_path[pair.after]
        assert pair.captions == [f"{before.text} | {after.text}"]
        assert pair.split == before.split == after.split
        assert pair.scene == f"{before.scene}+{after.scene}"
    assert len(result.pairs) == 7 + 3
    assert result.rejected == {"no partner is left": 1}
    scene = run_coupled_samples([captioned_image(0, "a", scene="s"), captioned_image(1, "b", scene="s")])
    assert scene.pairs == []
    assert scene.rejected == {"both are of one scene": 1}
    images = [captioned_image(number, "text") for number in range(20)]
    ids = {pair.id for pair in run_coupled_samples(images, seed=1).pairs}
    assert ids == {pair.id for pair in run_coupled_samples(images, seed=1).pairs}
    assert ids != {pair.id for pair in run_coupled_samples(images, seed=2).pairs}
    assert ids != {f"n{number}+n{number + 1}" for number in range(0, 20, 2)}, "not in the order of the source"


ONE_IMAGE = {"columns": {"before": "image", "after": "image", "captions": "caption"}}


def write(root: Path, rows: list[dict[str, Any]], **options: Any) -> RawSource:
    """Write a manifest of these rows, the images a.png to e.png, and none.png, which is not an image."""
    root.mkdir()
    for number, letter in enumerate("abcde"):
        Image.new("RGB", (8, 8), (number * 40, 0, 0)).save(root / f"{letter}.png")
    (root / "none.png").write_text("none")
    (root / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return RawSource(reader="pairs", root=root, options={"manifest": "pairs.jsonl"} | options)


def read(source: RawSource, use: Any = "instruction", **changes: Any) -> tuple[list[Original], AugmentResult]:
    folder = source.root.parent
    result = AugmentResult()
    source = source.model_copy(update=changes)
    return read_originals(source, folder / "unpacked", folder / "cache.parquet", result, use), result


def row(number: int, **changes: Any) -> dict[str, Any]:
    fields = {"id": f"p{number}", "split": "train", "before": "a.png", "after": "b.png", "captions": ["add a cat", "x"]}
    return fields | changes


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
    originals, result = read(source)
    assert [(image.name, image.split, image.scene, image.text) for image in originals] == [
        ("p0", "train", "s0", "add a cat"),
        ("p1", "train", "p1", "make it red"),
        ("p8", "test", "s7", "add a cat"),
        ("p10", "val", "p10", "add a cat"),
    ]
    assert originals[0].change_types == ["add"]
    assert originals[0].digest == sha256(source.root / "a.png")
    assert originals[0].caption is None
    reasons = {"no instruction": 1, "nothing is to change": 1, "image cannot be read": 3}
    assert result.rejected == reasons | {"scene is in a higher split": 1, "row cannot be read": 2}
    row_fault = result.examples.pop("row cannot be read")
    assert row_fault.startswith("pairs.jsonl, line 12: before, after, captions: ")
    verdict = Fault("images.missing")
    assert result.examples == {
        "no instruction": "pairs.jsonl, line 3",
        "nothing is to change": "pairs.jsonl, line 4",
        "image cannot be read": f"pairs.jsonl, line 5: {source.root}/gone.png: {verdict}",
        "scene is in a higher split": "pairs.jsonl, line 8: s7 is in test",
    }
    originals, result = read(source, splits=("train",))
    assert [image.name for image in originals] == ["p0", "p1"]
    assert result.rejected["scene is in a higher split"] == 1, "p7 is a test scene"


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [("split", "dev", "one of train, val, test"), ("name", ["a", "b"], "text"), ("scene", ["a", "b"], "text")],
)
def test_a_row_with_a_wrong_split_name_or_scene_is_counted_with_field_and_value(key, value, expected, tmp_path):
    column = "id" if key == "name" else key
    originals, result = read(write(tmp_path / "raw", [row(0, **{column: value}), row(1)]))
    assert [image.name for image in originals] == ["p1"]
    assert result.rejected == {"row cannot be read": 1}
    fault = Fault("datasets.unexpected_value", key=key, expected=expected, value=describe(value))
    assert result.examples == {"row cannot be read": f"pairs.jsonl, line 1: {fault}"}


@pytest.mark.parametrize("path", ["../a.png", "{top}/a.png", "..\\a.png", "http://127.0.0.1/a.png", "link.png"])
def test_an_image_outside_the_source_is_not_used(path, tmp_path):
    source = write(tmp_path / "raw", [row(0, before=path.format(top=tmp_path))])
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    (tmp_path / "raw/link.png").symlink_to(tmp_path / "a.png")
    originals, result = read(source)
    assert originals == []
    fault = Message("augment.image_outside_source", path=source.root)
    assert fault.in_text(result.examples["image cannot be read"])
    assert len(read(source, follow_links=True)[0]) == (path == "link.png")


def test_a_list_of_images_with_captions_is_read_by_the_reader_of_pairs(tmp_path):
    texts = [("a.png", "a cat"), ("b.png", ""), ("none.png", "x"), ("c.png", "c")]
    rows = [{"id": str(n), "image": image, "caption": text, "split": "train"} for n, (image, text) in enumerate(texts)]
    source = write(tmp_path / "raw", rows, **ONE_IMAGE)
    originals, result = read(source, "caption")
    assert [(image.name, image.image.name, image.text) for image in originals] == [
        ("0", "a.png", "a cat"),
        ("3", "c.png", "c"),
    ]
    assert result.rejected == {"no caption": 1, "image cannot be read": 1}


def test_pairs_of_two_images_are_rejected_and_a_source_without_single_images_refused(tmp_path):
    source = write(tmp_path / "raw", [row(0, after="a.png"), row(1), row(2, scene="p0", split="test")])
    originals, result = read(source, "caption")
    assert originals == []
    assert result.rejected == {"is a pair of two images": 2, "scene is in a higher split": 1}
    assert result.examples["is a pair of two images"] == "pairs.jsonl, line 2"
    with raises(DataError, "augment.no_captions_of_images", path=tmp_path / "two"):
        read(write(tmp_path / "two", [row(0)]), "caption")
    with raises(DataError, "augment.no_source_folder", path=tmp_path / "gone"):
        read(RawSource(reader="pairs", root=tmp_path / "gone"))


def test_half_a_character_is_a_question_mark_wherever_a_row_has_it(tmp_path):
    half = "\ud83d"  # left by a truncated JSON escape; it cannot be written to a file
    odd_row = row(0, id=f"p{half}", scene=f"s{half}", captions=[f"add a cup {half}"], change_types=[f"add{half}"])
    (original_image,), result = read(write(tmp_path / "raw", [odd_row, row(1, before=f"{half}.png")]))
    assert original_image.name == "p?"
    assert original_image.scene == "s?"
    assert original_image.text == "add a cup ?"
    assert original_image.change_types == ["add?"]
    assert result.rejected == {"image cannot be read": 1}


def test_minichange_gives_captions_of_originals_and_of_every_image(tmp_path):
    source = RawSource(reader="minichange", root=draw(tmp_path / "raw"))
    originals, result = read(source)
    scenes = {source.root / path: scene for path, scene in read_scenes(source.root).scene_by_path.items()}
    assert len(originals) == SCENES
    assert result.rejected == {"nothing is to change": SCENES}
    images, _ = read(source, "caption")
    assert len(images) == 3 * SCENES
    for edit_source in originals:
        assert edit_source.caption == describe_scene(scenes[edit_source.image])
    for image in images:
        assert image.text == describe_scene(scenes[image.image])
        assert image.scene in image.image.name
    pairs = read_source_pairs(source, tmp_path / "unpacked")
    before, after, distractor = (source.root / path for path in image_paths(0))
    assert len(pairs) == 2 * SCENES
    assert {frozenset((before, after)), frozenset((before, distractor))} < pairs
    assert frozenset((after, distractor)) not in pairs
