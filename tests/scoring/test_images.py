import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from m3diff.datasets import DATASETS
from m3diff.datasets.spec import Licence, Permission
from m3diff.images.saliency import outlined
from m3diff.records.errors import DataError
from m3diff.stages.evaluate.report.figures import SaliencyMaps, load_small
from m3diff.stages.evaluate.report.images import ImageRights, ImageStore, as_webp, draw_images, rights_of
from tests.scoring import bench

OPEN = {"toy": ImageRights(True, None)}


def test_an_encoded_image_reads_back():
    image = Image.new("RGB", (40, 30), (200, 30, 30))
    back = Image.open(io.BytesIO(as_webp(image)))
    assert (back.format, back.size) == ("WEBP", image.size)
    assert np.abs(np.asarray(back.convert("RGB"), int) - np.asarray(image, int)).max() < 6


def test_images_stay_inside_while_they_fit_and_equal_ones_count_once(tmp_path: Path):
    store = ImageStore(tmp_path / "images", 12)
    names = [store.add(content) for content in (b"abc", b"abc", b"defghi")]
    assert names[0] == names[1] != names[2]
    assert store.url(names[0]) == "data:image/webp;base64,YWJj"
    assert not (tmp_path / "images").exists()


def test_one_image_too_many_and_all_are_files(tmp_path: Path):
    store = ImageStore(tmp_path / "images", 11)
    names = [store.add(content) for content in (b"abc", b"defghi", b"jkl")]
    assert [store.url(name) for name in names] == [f"images/{name}.webp" for name in names]
    assert [(tmp_path / "images" / f"{name}.webp").read_bytes() for name in names] == [b"abc", b"defghi", b"jkl"]
    assert not store.is_inside


def test_images_of_an_earlier_page_are_gone_and_other_files_stay(tmp_path: Path):
    (tmp_path / "old.webp").write_bytes(b"old")
    (tmp_path / "mine.txt").write_text("mine")
    ImageStore(tmp_path, 11)
    assert [file.name for file in tmp_path.iterdir()] == ["mine.txt"]


def test_each_pair_has_its_own_images_in_order(tmp_path: Path):
    bench.write(tmp_path)
    pairs = bench.pairs(tmp_path)
    maps = SaliencyMaps(tmp_path / "predictions" / "saliency.npz")
    for pair, drawn in zip(pairs, draw_images(pairs, OPEN, maps), strict=True):
        after = load_small(pair.after, pair.after_sha256)
        grid = maps.of(pair.id)
        assert grid is not None
        assert drawn == (
            as_webp(load_small(pair.before, pair.before_sha256)),
            as_webp(after),
            as_webp(outlined(after, grid)),
        )


def test_without_maps_there_is_no_overlay_and_without_permission_no_image_is_opened(tmp_path: Path):
    bench.write(tmp_path)
    first, *_ = bench.pairs(tmp_path)
    (drawn,) = draw_images([first], OPEN, None)
    assert drawn is not None
    assert drawn.saliency is None
    gone = bench.pair("x", ["y"], ["color"], "nowhere")
    assert list(draw_images([gone], {"toy": ImageRights(False, "no")}, None)) == [None]
    with pytest.raises(DataError, match="nowhere"):
        list(draw_images([gone], OPEN, None))


@pytest.mark.parametrize(("answer", "show"), [("yes", True), ("conditions", True), ("unstated", True), ("no", False)])
def test_a_licence_says_whether_images_are_shown(answer, show: bool):
    permission = Permission(answer, "as its page says")
    licence = Licence("CC of a kind", None, permission, permission, permission)
    rights = rights_of(replace(DATASETS["pairs"], licence=licence))
    assert rights.show is show
    assert (rights.note is None) is (answer == "yes")
