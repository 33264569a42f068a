import hashlib
import io
import os
import sys
import zlib
from pathlib import Path
from types import SimpleNamespace

import polars as pl
import pytest
from PIL import Image

from m3diff.images import cache as image_cache
from m3diff.images import check as image_check
from m3diff.images.cache import check_images
from m3diff.images.check import check_image
from tests.layouts import save_picture
from tests.test_images import png_chunks


def frame_of(folder: Path, *names: str) -> pl.DataFrame:
    return check_images(pl.Series([str(folder / name) for name in names]), 10_000, folder / "cache.parquet", "test")


def verdicts(folder: Path, *names: str, max_pixels: int = 10_000) -> list[str]:
    paths = pl.Series([str(folder / name) for name in names])
    frame = check_images(paths, max_pixels, folder / "cache.parquet", "test")
    found = dict(frame.select("path", "verdict").iter_rows())
    return [found[path] for path in paths]


def encoded(format: str, **options) -> bytes:
    buffer = io.BytesIO()
    Image.effect_noise((48, 48), 90).convert("RGB").save(buffer, format, **options)
    return buffer.getvalue()


@pytest.mark.fault("15")
def test_broken_files_are_told_apart(tmp_path):
    noise = encoded("PNG")
    cases = {
        "empty.png": (b"", "is empty (0 bytes)"),
        "text.png": (b"<html>404</html>", "does not decode: is of no known image format"),
        "half.jpg": (encoded("JPEG")[:700], "does not decode: image file is truncated"),
        "half.gif": (encoded("GIF")[:900], "does not decode"),
        "flipped.png": (noise[:200] + bytes([noise[200] ^ 1]) + noise[201:], "does not decode: broken PNG file"),
        "short.png": (png_chunks(16, 16, 8, 0, zlib.compress(b"\0" * 100)), "does not decode: image file is truncated"),
        "bomb.png": (
            png_chunks(60_000, 60_000, 8, 0, zlib.compress(b"\0" * 100)),
            "has 60000x60000 pixels, 3,600,000,000 padded to a square, more than 10,000",
        ),
    }
    for name, (data, _) in cases.items():
        (tmp_path / name).write_bytes(data)
    wanted = [want for _, want in cases.values()]
    found = verdicts(tmp_path, *cases)
    assert [verdict[: len(want)] for verdict, want in zip(found, wanted, strict=True)] == wanted


@pytest.mark.fault("15")
def test_what_is_no_file_is_never_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "loop.png").symlink_to(tmp_path / "loop.png")
    found = verdicts(tmp_path, "pipe.png", "folder.png", "loop.png", "gone.png", "folder.png/a.png")
    loop = "cannot be read: Too many levels of symbolic links"
    assert found == ["is no regular file", "is no regular file", loop, "is missing", "is missing"]


def test_a_check_has_digest_format_size_and_thumbnail_of_the_file(tmp_path):
    image = Image.linear_gradient("L").resize((40, 24)).rotate(180)
    image.save(tmp_path / "a.jpg", quality=90)
    data = (tmp_path / "a.jpg").read_bytes()
    check = check_image(str(tmp_path / "a.jpg"), 1600)
    assert check[:6] == (str(tmp_path / "a.jpg"), hashlib.sha256(data).digest(), "ok", "JPEG", 40, 24)
    assert check.thumb == Image.open(tmp_path / "a.jpg").convert("L").resize((8, 8), Image.Resampling.HAMMING).tobytes()
    assert check.thumb[0] > 200 > 50 > check.thumb[63]
    too_large = check_image(str(tmp_path / "a.jpg"), 1599)
    told = "has 40x24 pixels, 1,600 padded to a square, more than 1,599; save it smaller"
    assert too_large == (*check[:2], told, "JPEG", 40, 24, None)


@pytest.fixture
def read_paths(monkeypatch) -> list[list[str]]:
    """The file names of every batch that is read, and not found in the cache."""
    asked: list[list[str]] = []
    real = image_cache._over_cores

    def note(paths, *rest):
        asked.append([Path(path).name for path in paths])
        return real(paths, *rest)

    monkeypatch.setattr(image_cache, "_over_cores", note)
    return asked


def test_only_new_and_changed_files_are_read_again_and_all_by_another_decoder(tmp_path, read_paths, monkeypatch):
    names = [f"{number}.png" for number in range(4)]
    for number, name in enumerate(names):
        save_picture(tmp_path / name, number)
    first = frame_of(tmp_path, *names)
    assert frame_of(tmp_path, *names).equals(first)
    save_picture(tmp_path / "2.png", 40, mode="RGBA")
    os.utime(tmp_path / "1.png", ns=(1, 1))
    save_picture(tmp_path / "4.png", 4)
    again = frame_of(tmp_path, *names, "4.png")
    assert read_paths == [names, ["1.png", "2.png", "4.png"]]
    changed = [old != new for old, new in zip(first["digest"], again["digest"], strict=False)]
    assert changed == [False, False, True, False]
    monkeypatch.setattr(image_cache, "DECODER", "another")
    verdicts(tmp_path, "0.png", "2.png")
    assert read_paths[2:] == [["0.png", "2.png"]]


def test_a_file_put_in_place_of_another_with_its_time_and_size_is_read(tmp_path):
    save_picture(tmp_path / "a.bmp", 1)
    save_picture(tmp_path / "b.bmp", 2)
    os.utime(tmp_path / "b.bmp", ns=(5, 5))
    os.utime(tmp_path / "a.bmp", ns=(5, 5))
    (first,) = frame_of(tmp_path, "a.bmp")["digest"]
    os.replace(tmp_path / "b.bmp", tmp_path / "a.bmp")
    (second,) = frame_of(tmp_path, "a.bmp")["digest"]
    assert first != second == hashlib.sha256((tmp_path / "a.bmp").read_bytes()).digest()


def test_a_moved_image_is_known_by_its_content(tmp_path):
    save_picture(tmp_path / "a.png", 1)
    first = frame_of(tmp_path, "a.png")
    (tmp_path / "b.png").write_bytes((tmp_path / "a.png").read_bytes())
    assert frame_of(tmp_path, "b.png").drop("path").equals(first.drop("path"))
    cached = pl.read_parquet(tmp_path / "cache.parquet")
    assert [Path(path).name for path in cached["path"].sort()] == ["a.png", "b.png"]
    assert cached["decoder"].unique().to_list() == [image_check.DECODER]


def test_a_limit_of_pixels_may_change_bad_files_are_not_cached_and_sound_ones_are_judged_again(tmp_path):
    (tmp_path / "bad.png").write_bytes(b"no image")
    save_picture(tmp_path / "a.png", 1)
    large = "has 16x16 pixels, 256 padded to a square, more than 255; save it smaller"
    for limit, verdict in ((255, large), (256, "ok"), (255, large), (256, "ok")):
        assert verdicts(tmp_path, "a.png", "bad.png", max_pixels=limit)[0] == verdict
        cached = pl.read_parquet(tmp_path / "cache.parquet")["path"].to_list()
        assert str(tmp_path / "bad.png") not in cached


def test_hard_links_are_read_once(tmp_path, read_paths):
    save_picture(tmp_path / "a.png", 1)
    save_picture(tmp_path / "c.png", 2)
    os.link(tmp_path / "a.png", tmp_path / "b.png")
    digests = frame_of(tmp_path, "a.png", "b.png", "c.png")["digest"].to_list()
    assert read_paths == [["a.png", "c.png"]]
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.parametrize("damage", [b"", b"PAR1 not parquet", "other columns", "other types"])
def test_a_damaged_cache_is_only_read_anew(tmp_path, damage):
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
    """With a cluster of this process, which keeps order and counts; a real one is in the slow test."""

    class Task:
        def __init__(self, function):
            self.function = function

        def remote(self, *arguments):
            batches.append(len(arguments[0]))
            return self.function(*arguments)

    batches: list[int] = []
    ray = SimpleNamespace(init=lambda *_, **__: None, remote=Task, put=lambda value: value, get=lambda value: value)
    names = [f"{number}.png" for number in range(8)]
    for number, name in enumerate(names):
        save_picture(tmp_path / name, number)
    here = frame_of(tmp_path, *names)
    (tmp_path / "cache.parquet").unlink()
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setenv("RAY_ADDRESS", "anywhere")
    monkeypatch.setattr(image_cache, "BATCH", 3)
    monkeypatch.setattr(image_cache, "IN_FLIGHT", 1)
    monkeypatch.setattr(image_check, "known_digests", frozenset())
    assert frame_of(tmp_path, *names).equals(here)
    assert batches == [3, 3, 2]


@pytest.mark.slow
def test_a_ray_cluster_gives_the_same_verdicts(tmp_path, monkeypatch):
    import ray

    for number in range(20):
        save_picture(tmp_path / f"{number}.png", number)
    (tmp_path / "7.png").write_bytes(b"no image")
    names = [f"{number}.png" for number in range(20)]
    here = verdicts(tmp_path, *names)
    (tmp_path / "cache.parquet").unlink()
    monkeypatch.setattr(image_cache, "BATCH", 3)
    monkeypatch.setattr(image_cache, "IN_FLIGHT", 2)
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        monkeypatch.setenv("RAY_ADDRESS", ray.get_runtime_context().gcs_address)
        monkeypatch.setattr(image_cache, "_over_cores", None)
        assert verdicts(tmp_path, *names) == here
    finally:
        ray.shutdown()
    assert here.count("ok") == 19
