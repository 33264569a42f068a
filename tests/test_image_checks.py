"""Test the checks of image files and the cache of their results."""

import hashlib
import io
import os
import sys
import warnings
import zlib
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import polars as pl
import pytest
from PIL import Image

from m3diff.images import check as image_check
from m3diff.images import workers
from m3diff.images.check import check_image, check_images
from tests.errors import Message
from tests.layouts import save_picture
from tests.test_images import png, png_chunks
from tests.tiny import noise_image


def frame_of(folder: Path, *names: str) -> pl.DataFrame:
    return check_images(pl.Series([str(folder / name) for name in names]), 10_000, folder / "cache.parquet", "test")


def verdicts(folder: Path, *names: str, max_pixels: int = 10_000) -> list[str]:
    paths = pl.Series([str(folder / name) for name in names])
    frame = check_images(paths, max_pixels, folder / "cache.parquet", "test")
    verdict_of = dict(frame.select("path", "verdict").iter_rows())
    return [verdict_of[path] for path in paths]


def encoded(format: str, **options) -> bytes:
    buffer = io.BytesIO()
    Image.effect_noise((48, 48), 90).convert("RGB").save(buffer, format, **options)
    return buffer.getvalue()


@pytest.mark.fault("15")
def test_broken_files_are_told_apart(tmp_path):
    noise = encoded("PNG")
    flipped = noise[:200] + bytes([noise[200] ^ 1]) + noise[201:]
    few_pixels = zlib.compress(b"\0" * 100)
    cases = {
        "empty.png": (b"", "images.empty", ""),
        "text.png": (b"<html>404</html>", "images.web_page", ""),
        "half.jpg": (encoded("JPEG")[:700], "images.undecodable", "image file is truncated"),
        "half.gif": (encoded("GIF")[:900], "images.undecodable", ""),
        # Pillow calls it a broken stream or unrecognized data, by the size of the blocks in which it reads
        "flipped.png": (flipped, "images.undecodable", "data stream"),
        "short.png": (png_chunks(16, 16, 8, 0, few_pixels), "images.undecodable", "image file is truncated"),
        "bomb.png": (png_chunks(60_000, 60_000, 8, 0, few_pixels), "images.too_large", "3,600,000,000"),
    }
    for name, (data, _, _) in cases.items():
        (tmp_path / name).write_bytes(data)
    for check in frame_of(tmp_path, *cases).iter_rows(named=True):
        _, code, words = cases[Path(check["path"]).name]
        assert check["code"] == code
        assert words in check["verdict"]
        assert check["verdict"] == Message(code)


def test_a_path_that_is_listed_twice_has_one_check_and_a_missing_one_has_none(tmp_path):
    names = ["b.png", "a.png"]
    for number, name in enumerate(names):
        save_picture(tmp_path / name, number)
    paths = pl.Series([str(tmp_path / "b.png"), None, str(tmp_path / "a.png"), str(tmp_path / "b.png")])
    checks = check_images(paths, 10_000, tmp_path / "cache.parquet", "test")
    assert [Path(path).name for path in checks["path"]] == ["a.png", "b.png"]


@pytest.mark.fault("15")
def test_only_regular_files_are_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "loop.png").symlink_to(tmp_path / "loop.png")
    checks = frame_of(tmp_path, "pipe.png", "folder.png", "loop.png", "gone.png", "folder.png/a.png")
    codes = {str(Path(path).relative_to(tmp_path)): code for path, code in checks.select("path", "code").iter_rows()}
    assert codes == {
        "pipe.png": "images.no_regular_file",
        "folder.png": "images.no_regular_file",
        "loop.png": "images.unreadable_file",
        "gone.png": "images.missing",
        "folder.png/a.png": "images.missing",
    }
    assert all(Message(code) == verdict for code, verdict in checks.select("code", "verdict").iter_rows())


def test_a_check_has_digest_format_size_and_thumbnail_of_the_file(tmp_path):
    image = Image.linear_gradient("L").resize((40, 24)).rotate(180)
    image.save(tmp_path / "a.jpg", quality=90)
    data = (tmp_path / "a.jpg").read_bytes()
    check = check_image(str(tmp_path / "a.jpg"), 1600)
    thumb = check.pop("thumb")
    content = {"path": str(tmp_path / "a.jpg"), "digest": hashlib.sha256(data).digest()}
    shape = {"format": "JPEG", "width": 40, "height": 24}
    assert check == content | shape | {"verdict": "ok", "bits": 8, "color": "grey"}
    assert thumb == Image.open(tmp_path / "a.jpg").convert("L").resize((8, 8), Image.Resampling.HAMMING).tobytes()
    assert thumb[0] > 200 > 50 > thumb[63]
    too_large = Message("images.too_large", width=40, height=24, value=1600, limit=1599)
    fault = {"verdict": too_large, "code": "images.too_large"}
    assert check_image(str(tmp_path / "a.jpg"), 1599) == content | shape | fault


@pytest.mark.parametrize(
    ("mode", "suffix", "bits", "color"),
    [
        ("RGB", "png", 8, "color"),
        ("RGBA", "png", 8, "color"),
        ("P", "png", 8, "color"),
        ("L", "png", 8, "grey"),
        ("1", "png", 1, "grey"),
        ("I;16", "png", 16, "grey"),
        ("grey as RGB", "jpg", 8, "colorless"),
    ],
)
def test_a_check_has_bits_colour_and_upright_size(tmp_path, mode, suffix, bits, color):
    picture = noise_image(1, (12, 8))
    if mode == "grey as RGB":
        picture = picture.convert("L").convert("RGB")
    elif mode == "I;16":
        picture = Image.fromarray(np.linspace(0, 65535, 96).astype(np.uint16).reshape(8, 12))
    else:
        picture = picture.convert(mode)
    exif = Image.Exif()
    exif[274] = 6  # turn by 270 degrees
    picture.save(tmp_path / f"a.{suffix}", exif=exif)
    check = check_image(str(tmp_path / f"a.{suffix}"), 1600)
    assert check["verdict"] == "ok"
    assert check["width"] == 8
    assert check["height"] == 12
    assert check["bits"] == bits
    assert check["color"] == color


def test_colours_of_16_bits_are_counted_as_16_bits(tmp_path):
    (tmp_path / "a.png").write_bytes(png(16, 2, [bytes(range(60, 84))] * 4))
    assert check_image(str(tmp_path / "a.png"), 1600)["bits"] == 16


@pytest.mark.parametrize(("blue", "color"), [(116, "colorless"), (117, "color")])
def test_pixels_that_are_grey_but_for_the_noise_of_jpeg_have_no_colour(blue, color, tmp_path):
    picture = Image.new("RGB", (80, 80), (100, 100, 100))
    picture.paste((104, 100, blue), (0, 0, 40, 40))
    picture.save(tmp_path / "a.png")
    assert check_image(str(tmp_path / "a.png"), 6400)["color"] == color


@pytest.fixture
def read_paths(monkeypatch) -> list[list[str]]:
    read_names: list[list[str]] = []
    check_on_cores = image_check._check_on_cores

    def record(batches, *arguments):
        read_names.append([Path(path).name for path in chain.from_iterable(batches)])
        return check_on_cores(batches, *arguments)

    monkeypatch.setattr(image_check, "_check_on_cores", record)
    return read_names


def test_only_new_and_changed_files_are_read_again_unless_the_decoder_changed(tmp_path, read_paths, monkeypatch):
    names = [f"{number}.png" for number in range(4)]
    for number, name in enumerate(names):
        save_picture(tmp_path / name, number)
    first_checks = frame_of(tmp_path, *names)
    assert frame_of(tmp_path, *names).equals(first_checks)
    save_picture(tmp_path / "2.png", 40, mode="RGBA")
    os.utime(tmp_path / "1.png", ns=(1, 1))
    save_picture(tmp_path / "4.png", 4)
    again = frame_of(tmp_path, *names, "4.png")
    assert read_paths == [names, ["1.png", "2.png", "4.png"]]
    changed = [old != new for old, new in zip(first_checks["digest"], again["digest"], strict=False)]
    assert changed == [False, False, True, False]
    monkeypatch.setattr(image_check, "DECODER", "another")
    verdicts(tmp_path, "0.png", "2.png")
    assert read_paths[2:] == [["0.png", "2.png"]]


def test_a_file_put_in_place_of_another_with_its_time_and_size_is_read(tmp_path):
    save_picture(tmp_path / "a.bmp", 1)
    save_picture(tmp_path / "b.bmp", 2)
    os.utime(tmp_path / "b.bmp", ns=(5, 5))
    os.utime(tmp_path / "a.bmp", ns=(5, 5))
    (first_digest,) = frame_of(tmp_path, "a.bmp")["digest"]
    os.replace(tmp_path / "b.bmp", tmp_path / "a.bmp")
    (second_digest,) = frame_of(tmp_path, "a.bmp")["digest"]
    assert first_digest != second_digest == hashlib.sha256((tmp_path / "a.bmp").read_bytes()).digest()


def test_a_moved_image_is_known_by_its_content(tmp_path):
    save_picture(tmp_path / "a.png", 1)
    first_checks = frame_of(tmp_path, "a.png")
    (tmp_path / "b.png").write_bytes((tmp_path / "a.png").read_bytes())
    assert frame_of(tmp_path, "b.png").drop("path").equals(first_checks.drop("path"))
    cached = pl.read_parquet(tmp_path / "cache.parquet")
    assert [Path(path).name for path in cached["path"].sort()] == ["a.png", "b.png"]
    assert cached["decoder"].unique().to_list() == [image_check.DECODER]


def test_after_a_change_of_the_pixel_limit_cached_images_are_judged_again(tmp_path):
    (tmp_path / "bad.png").write_bytes(b"no image")
    save_picture(tmp_path / "a.png", 1)
    large = Message("images.too_large", width=16, height=16, value=256, limit=255)
    for limit, verdict in ((255, large), (256, "ok"), (255, large), (256, "ok")):
        assert verdicts(tmp_path, "a.png", "bad.png", max_pixels=limit)[0] == verdict
        cached = pl.read_parquet(tmp_path / "cache.parquet")["path"].to_list()
        assert str(tmp_path / "bad.png") not in cached


def test_an_image_as_large_as_the_pixel_limit_is_read_once(tmp_path, read_paths):
    save_picture(tmp_path / "a.png", 1)
    for _ in range(2):
        assert verdicts(tmp_path, "a.png", max_pixels=16 * 16) == ["ok"]
    assert read_paths == [["a.png"]]


@pytest.mark.parametrize("damage", [b"", b"PAR1 not parquet", "other columns", "other types"])
def test_a_damaged_cache_is_replaced(tmp_path, damage):
    save_picture(tmp_path / "a.png", 1)
    verdicts(tmp_path, "a.png")
    cache = tmp_path / "cache.parquet"
    if damage == "other columns":
        pl.read_parquet(cache).drop("thumb").write_parquet(cache)
    elif damage == "other types":
        pl.read_parquet(cache).with_columns(pl.col("size").cast(pl.String)).write_parquet(cache)
    else:
        cache.write_bytes(damage)
    assert verdicts(tmp_path, "a.png") == ["ok"]


def test_images_are_dealt_to_a_cluster_in_batches_and_none_is_lost(tmp_path, monkeypatch):
    """The cluster is simulated in this process. A slow test uses a real one."""

    class Task:
        def __init__(self, function):
            self.function = function

        def remote(self, *arguments):
            batches.append(len(arguments[0]))
            return self.function(*arguments)

    batches: list[int] = []
    addresses: list[str] = []

    def connect(address: str, **_: object) -> None:
        addresses.append(address)

    ray = SimpleNamespace(init=connect, remote=Task, put=lambda value: value, get=lambda value: value)
    names = [f"{number}.png" for number in range(8)]
    for number, name in enumerate(names):
        save_picture(tmp_path / name, number)
    local_checks = frame_of(tmp_path, *names)
    (tmp_path / "cache.parquet").unlink()
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setenv("RAY_ADDRESS", "anywhere")
    monkeypatch.setattr(image_check, "BATCH", 3)
    monkeypatch.setattr(image_check, "TASKS_IN_FLIGHT", 1)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", Image.MAX_IMAGE_PIXELS)  # which a worker sets
    assert frame_of(tmp_path, *names).equals(local_checks)
    assert batches == [3, 3, 2]
    assert addresses == ["anywhere"]


def test_many_images_are_dealt_to_workers_in_batches_and_none_is_lost(tmp_path, monkeypatch):
    names = [f"{number}.png" for number in range(8)]
    for number, name in enumerate(names):
        save_picture(tmp_path / name, number)
    checks_in_this_process = frame_of(tmp_path, *names)
    (tmp_path / "cache.parquet").unlink()
    monkeypatch.setattr(image_check, "MIN_FILES_FOR_WORKERS", 7)
    monkeypatch.setattr(image_check, "worker_pool", lambda: ThreadPoolExecutor(2))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", Image.MAX_IMAGE_PIXELS)  # which a worker sets
    assert frame_of(tmp_path, *names).equals(checks_in_this_process)
    assert Image.MAX_IMAGE_PIXELS is None, "workers have checked them"


def test_a_few_images_are_checked_in_this_process_whose_settings_stay(tmp_path, monkeypatch):
    names = [f"{number}.png" for number in range(3)]
    for number, name in enumerate(names):
        save_picture(tmp_path / name, number)
    pixel_limit = Image.MAX_IMAGE_PIXELS
    warning_filters = list(warnings.filters)
    monkeypatch.setattr(image_check, "MIN_FILES_FOR_WORKERS", 3)
    monkeypatch.setattr(image_check, "worker_pool", lambda: pytest.fail("workers were started"))
    assert verdicts(tmp_path, *names) == ["ok"] * 3
    assert pixel_limit == Image.MAX_IMAGE_PIXELS
    assert warning_filters == warnings.filters


@pytest.mark.parametrize("has_sockets", [True, False])
def test_workers_are_started_without_a_fork_of_this_process(has_sockets, monkeypatch):
    """A fork would copy the locks of polars. A file system without sockets does not allow a server of forks."""

    def ensure_running() -> None:
        if not has_sockets:
            raise OSError("no sockets")

    monkeypatch.setattr(workers.forkserver, "ensure_running", ensure_running)
    monkeypatch.setattr(workers, "usable_cpus", lambda: 3)
    monkeypatch.setattr(workers, "ProcessPoolExecutor", lambda size, context: {size: context.get_start_method()})
    assert workers.worker_pool() == {3: "forkserver" if has_sockets else "spawn"}
