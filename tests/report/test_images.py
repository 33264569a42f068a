"""Images of a page: drawn, linked, and shown as the licence allows."""

from pathlib import Path

import pytest
from PIL import Image

from m3diff.images.saliency import draw_outlines
from m3diff.records.errors import DataError
from m3diff.records.sample import ImageRef
from m3diff.report.images import (
    MAX_PX,
    DrawnImages,
    ImageRights,
    draw_images,
    encode_webp,
    link_images,
    load_small,
    read_saliency,
)
from tests.errors import raises
from tests.scoring import bench

OPEN = {"toy": ImageRights(True, None)}


def test_images_stay_inside_while_they_fit_and_one_too_many_makes_all_of_them_files(tmp_path: Path):
    (tmp_path / "old.webp").write_bytes(b"of an earlier page")
    (tmp_path / "mine.txt").write_text("mine")
    images = [b"abc", b"abc", b"defghi"]
    inside = {b"abc": "data:image/webp;base64,YWJj", b"defghi": "data:image/webp;base64,ZGVmZ2hp"}
    assert link_images(images, tmp_path, 12) == inside
    assert [file.name for file in tmp_path.iterdir()] == ["mine.txt"]
    links = link_images([*images, b"jkl"], tmp_path, 12)
    assert {image: (tmp_path.parent / link).read_bytes() for image, link in links.items()} == {i: i for i in links}
    assert links.keys() == {*images, b"jkl"}


@pytest.mark.parametrize(
    ("size", "shown_size"),
    [((2 * MAX_PX, MAX_PX), (MAX_PX, MAX_PX // 2)), ((10, 2 * MAX_PX), (5, MAX_PX)), ((24, 16), (24, 16))],
    ids=["wide", "high", "small"],
)
def test_a_large_image_is_shown_smaller_in_its_proportions(size, shown_size, tmp_path: Path):
    Image.new("RGB", size).save(tmp_path / "a.png")
    assert load_small(ImageRef(str(tmp_path / "a.png"), bench.digest(tmp_path / "a.png"))).size == shown_size


def test_each_pair_has_its_own_images_in_order_as_the_licence_allows(root: Path):
    pairs = bench.pairs(root)
    maps = read_saliency(root / "predictions" / "saliency.npz")
    assert list(maps) == [pair.id for pair in pairs]
    last_id = pairs[-1].id
    for pair, drawn in zip(pairs, draw_images(pairs, OPEN, {i: maps[i] for i in maps if i != last_id}), strict=True):
        images = [load_small(image) for image in pair.images]
        overlay = encode_webp(draw_outlines(images[1], maps[pair.id])) if pair.id != last_id else None
        assert drawn == DrawnImages(images=[encode_webp(image) for image in images], outlined=overlay)
    gone = bench.pair("x", ["y"], ["color"], "nowhere")
    assert list(draw_images([gone], {"toy": ImageRights(False, "no")}, {})) == [None]
    with raises(DataError, "images.unreadable", path=gone.images[0].uri):
        list(draw_images([gone], OPEN, {}))
