"""The pairs of a page: marks, grades and scores of each, and its images as the licence allows."""

import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from m3diff.datasets import DATASETS
from m3diff.datasets.spec import Protocol
from m3diff.images.saliency import outlined
from m3diff.records.errors import DataError
from m3diff.stages.evaluate.report.gallery import (
    MAX_PX,
    ImageRights,
    ImageStore,
    as_webp,
    caption_of,
    draw_images,
    load_small,
    most_similar_first,
    read_saliency,
)
from tests.scoring import bench
from tests.scoring.pages import draw, evidence, gallery_of

COLOUR = "the red cube at the left turned blue"
OPEN = {"toy": ImageRights(True, None)}
RIGHT = [("color", True), ("object", True), ("place", True), ("change", True)]


@pytest.mark.parametrize(
    ("pair", "clauses", "missed", "grade"),
    [
        (bench.pairs()[0], [RIGHT], 0, 2),
        (bench.pairs()[1], [[("removal", True), ("object", True), ("place", False)]], 0, 1),
        (bench.pairs()[2], [[("nothing changed", False)]], 1, 0),
        (bench.pairs()[3], [RIGHT, [("illumination", False)]], 1, 0),
        (bench.pairs()[4], [[("nothing changed", True)]], 0, 2),
        (bench.pairs()[5], [[("color", False)]], 0, 0),
        (bench.pair(COLOUR.replace("blue", "green"), [COLOUR], ["color"]), [[*RIGHT[:3], ("change", False)]], 0, 1),
        (bench.pair("the the cube", [COLOUR], ["color"]), [[("not understood", False)]], 1, 0),
    ],
)
def test_marks_say_which_part_of_each_clause_is_right(pair, clauses, missed, grade):
    found = caption_of(pair, bench.parse([pair])[pair.id])
    assert [marks for _, marks in found["clauses"]] == clauses
    assert " ".join(text for text, _ in found["clauses"]) == pair.prediction.replace(", and ", " ")
    assert (found["missed"], found["grade"]) == (missed, grade)
    assert caption_of(pair, None) == {"clauses": [(pair.prediction, [])], "missed": 0, "grade": None}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("gallery")
    bench.write(root)
    return root


def test_every_test_pair_is_in_the_gallery_in_the_order_of_the_records(root: Path, tmp_path: Path):
    toy = gallery_of(draw(evidence(root, bench.pairs(root)), tmp_path))
    assert [pair["id"] for pair in toy["pairs"]] == [f"toy/{number}" for number in range(6)]
    assert toy["types"] == ["illumination", "removal", "color", "none"]
    assert (toy["runs"], toy["protocols"], toy["datasets"]) == (["this run"], ["toy/test"], ["toy"])
    headlines = ["CIDEr", "METEOR", "ROUGE-L", "BLEU-4", "SPICE"]
    assert toy["columns"] == [*headlines, "type_right", "place_right", "exact_right"]
    pair = toy["pairs"][1]
    marks = [["removal", True], ["object", True], ["place", False]]
    clause = ["the green ball at the left was removed", marks]
    assert pair["captions"] == [{"clauses": [clause], "missed": 0, "grade": 1}]
    assert (pair["types"], pair["scores"]["0"][0][0]) == (["removal"], 1.0)
    assert pair["references"] == ["the green ball at the top was removed", "the green ball at the top is gone"]


def test_a_pair_of_two_protocols_has_the_scores_of_both_and_one_entry(root: Path, tmp_path: Path):
    protocols = (Protocol("some", n=None, ids="[45]"), Protocol("total", n=None, max_words=3, references="joined"))
    specs = {"toy": replace(DATASETS["pairs"], protocols=protocols)}
    data = gallery_of(draw(evidence(root, bench.pairs(root), specs), tmp_path))
    assert [pair["id"] for pair in data["pairs"]] == [f"toy/{number}" for number in (4, 5, 0, 1, 2, 3)]
    assert [list(pair["scores"]) for pair in data["pairs"]] == [["0", "1"]] * 2 + [["1"]] * 4
    assert data["pairs"][1]["captions"][0]["clauses"][0][0] == COLOUR, "as its first protocol scores it"
    assert [len(pair["references"]) for pair in data["pairs"]] == [2, 2, 1, 1, 1, 1]


@pytest.mark.parametrize(("mumbled", "graded"), [(0, True), (2, True), (3, False), (6, False)])
def test_right_and_wrong_are_told_where_a_grammar_reads_most_captions(mumbled, graded, root: Path, tmp_path: Path):
    pairs = [replace(pair, prediction="x") if n < mumbled else pair for n, pair in enumerate(bench.pairs(root))]
    assert gallery_of(draw(evidence(root, pairs), tmp_path))["graded"] is graded


def test_the_reference_most_like_the_prediction_comes_first_and_the_others_follow():
    references = ["it vanished", "the cube is gone", "the red cube is gone away now my friend"]
    assert most_similar_first("the red cube is gone", references) == [references[1], references[2], references[0]]
    assert most_similar_first("", ["", "a"]) == ["", "a"]


def test_a_large_image_is_shown_small_and_upright_and_reads_back(tmp_path: Path):
    exif, path = Image.Exif(), tmp_path / "large.jpg"
    exif[0x0112] = 6  # turned by a quarter
    Image.new("RGB", (1000, 500), (200, 30, 30)).save(path, exif=exif)
    image = load_small(path, bench.digest(path))
    assert image.size == (MAX_PX // 2, MAX_PX)
    back = Image.open(io.BytesIO(as_webp(image)))
    assert (back.format, back.size) == ("WEBP", image.size)
    assert np.abs(np.asarray(back.convert("RGB"), int) - np.asarray(image, int)).max() < 6


def test_images_stay_inside_while_they_fit_and_one_too_many_makes_all_of_them_files(tmp_path: Path):
    (tmp_path / "old.webp").write_bytes(b"of an earlier page")
    (tmp_path / "mine.txt").write_text("mine")
    store = ImageStore(tmp_path, 12)
    names = [store.add(content) for content in (b"abc", b"abc", b"defghi")]
    assert names[0] == names[1] != names[2]
    assert store.url(names[0]) == "data:image/webp;base64,YWJj"
    assert [file.name for file in tmp_path.iterdir()] == ["mine.txt"]
    names += [store.add(b"jkl"), store.add(b"mno")]
    assert not store.is_inside
    assert [store.url(name) for name in names] == [f"{tmp_path.name}/{name}.webp" for name in names]
    contents = [(tmp_path / f"{name}.webp").read_bytes() for name in names]
    assert contents == [b"abc", b"abc", b"defghi", b"jkl", b"mno"]


def test_each_pair_has_its_own_images_in_order_as_the_licence_allows(root: Path):
    pairs = bench.pairs(root)
    maps = read_saliency(root / "predictions" / "saliency.npz")
    assert list(maps) == [pair.id for pair in pairs]
    last = pairs[-1].id
    for pair, drawn in zip(pairs, draw_images(pairs, OPEN, {i: maps[i] for i in maps if i != last}), strict=True):
        after = load_small(pair.after, pair.after_sha256)
        overlay = as_webp(outlined(after, maps[pair.id])) if pair.id != last else None
        assert drawn == [as_webp(load_small(pair.before, pair.before_sha256)), as_webp(after), overlay]
    gone = bench.pair("x", ["y"], ["color"], "nowhere")
    assert list(draw_images([gone], {"toy": ImageRights(False, "no")}, {})) == [None]
    with pytest.raises(DataError, match="nowhere"):
        list(draw_images([gone], OPEN, {}))
