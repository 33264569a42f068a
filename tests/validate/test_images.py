import io
import os
import struct
import zlib
from pathlib import Path

import polars as pl
import pytest
from PIL import Image

from components.validate import images
from components.validate.images import check_images
from tests.layouts import save_picture


def judge(folder: Path, *names: str, max_pixels: int = 10_000) -> list[str]:
    paths = pl.Series([str(folder / name) for name in names])
    frame = check_images(paths, max_pixels, folder / "memory.parquet")
    verdicts = dict(frame.select("path", "verdict").iter_rows())
    return [verdicts[path] for path in paths]


def encoded(format: str, **options) -> bytes:
    buffer = io.BytesIO()
    Image.effect_noise((48, 48), 90).convert("RGB").save(buffer, format, **options)
    return buffer.getvalue()


def png_with(width: int, height: int, pixels: bytes) -> bytes:
    """A PNG whose checksums are right, whatever its pixels are."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(pixels)) + chunk(b"IEND", b"")


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "P", "1", "LA"])
def test_every_png_mode_is_sound(tmp_path, mode):
    save_picture(tmp_path / "a.png", 3, mode=mode)
    assert judge(tmp_path, "a.png") == ["ok"]


def test_broken_files_are_told_apart(tmp_path):
    noise = encoded("PNG")
    cases = {
        "empty.png": (b"", "is empty (0 bytes)"),
        "text.png": (b"<html>404</html>", "does not decode: is of no known image format"),
        "half.jpg": (encoded("JPEG")[:700], "does not decode: image file is truncated"),
        "half.gif": (encoded("GIF")[:900], "does not decode"),
        "flipped.png": (noise[:200] + bytes([noise[200] ^ 1]) + noise[201:], "does not decode: broken PNG file"),
        "short.png": (png_with(16, 16, b"\0" * 100), "does not decode: image file is truncated"),
        "bomb.png": (png_with(60_000, 60_000, b"\0" * 100), "has 60000x60000 pixels, more than 10000"),
    }
    for name, (data, _) in cases.items():
        (tmp_path / name).write_bytes(data)
    verdicts = judge(tmp_path, *cases)
    assert [v[: len(want)] for v, (_, want) in zip(verdicts, cases.values(), strict=True)] == [
        w for _, w in cases.values()
    ]


def test_what_is_no_file_is_never_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "loop.png").symlink_to(tmp_path / "loop.png")
    verdicts = judge(tmp_path, "pipe.png", "folder.png", "loop.png", "gone.png", "folder.png/a.png")
    loop = "cannot be read: Too many levels of symbolic links"
    assert verdicts == ["is no regular file", "is no regular file", loop, "is missing", "is missing"]


def test_an_unreadable_file_is_named(tmp_path, monkeypatch):
    save_picture(tmp_path / "a.png", 1)

    def refuse(path, **options):
        raise PermissionError(13, "Permission denied", path)

    with monkeypatch.context() as patch:
        patch.setattr(images.os, "stat", refuse)
        (verdict,) = images._stat(pl.Series([str(tmp_path / "a.png")]))["verdict"]
    assert verdict == "cannot be read: Permission denied"


def test_only_changed_contents_are_decoded_again(tmp_path, monkeypatch):
    for number in range(4):
        save_picture(tmp_path / f"{number}.png", number)
    names = [f"{number}.png" for number in range(4)]
    assert judge(tmp_path, *names) == ["ok"] * 4
    asked: list[list[str]] = []
    real = images._over_cores
    monkeypatch.setattr(images, "_over_cores", lambda paths, *rest: asked.append(paths) or real(paths, *rest))
    assert judge(tmp_path, *names) == ["ok"] * 4
    save_picture(tmp_path / "2.png", 40, mode="RGBA")
    os.utime(tmp_path / "1.png", ns=(1, 1))
    assert judge(tmp_path, *names) == ["ok"] * 4
    assert [[Path(path).name for path in paths] for paths in asked] == [[], ["1.png", "2.png"]]


def test_a_lower_limit_of_pixels_holds_for_remembered_images(tmp_path):
    save_picture(tmp_path / "a.png", 1)
    assert judge(tmp_path, "a.png") == ["ok"]
    assert judge(tmp_path, "a.png", max_pixels=100) == ["has 16x16 pixels, more than 100"]
    assert judge(tmp_path, "a.png") == ["ok"]


def test_hard_links_are_looked_at_once(tmp_path, monkeypatch):
    save_picture(tmp_path / "a.png", 1)
    os.link(tmp_path / "a.png", tmp_path / "b.png")
    asked: list[list[str]] = []
    real = images._over_cores
    monkeypatch.setattr(images, "_over_cores", lambda paths, *rest: asked.append(paths) or real(paths, *rest))
    assert judge(tmp_path, "a.png", "b.png") == ["ok", "ok"]
    assert len(asked[0]) == 1


@pytest.mark.parametrize("damage", [b"", b"PAR1 not parquet"])
def test_a_damaged_memory_is_only_forgotten(tmp_path, damage):
    save_picture(tmp_path / "a.png", 1)
    judge(tmp_path, "a.png")
    (tmp_path / "memory.parquet").write_bytes(damage)
    assert judge(tmp_path, "a.png") == ["ok"]


@pytest.mark.slow
def test_a_ray_cluster_gives_the_same_verdicts(tmp_path, monkeypatch):
    import ray

    for number in range(20):
        save_picture(tmp_path / f"{number}.png", number)
    (tmp_path / "7.png").write_bytes(b"no image")
    names = [f"{number}.png" for number in range(20)]
    here = judge(tmp_path, *names)
    (tmp_path / "memory.parquet").unlink()
    monkeypatch.setattr(images, "SHARE", 3)
    monkeypatch.setattr(images, "IN_FLIGHT", 2)
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        monkeypatch.setenv("RAY_ADDRESS", ray.get_runtime_context().gcs_address)
        monkeypatch.setattr(images, "_over_cores", None)
        assert judge(tmp_path, *names) == here
    finally:
        ray.shutdown()
    assert here.count("ok") == 19
