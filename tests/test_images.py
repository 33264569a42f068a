"""An image file is opened upright, and only where its bytes are the ones that were meant."""

import ast
import contextlib
import hashlib
import io
import os
import random
import re
import struct
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import polars as pl
import pytest
from PIL import EpsImagePlugin, Image

from m3diff.images import check as image_check
from m3diff.images.check import check_image, check_images
from m3diff.images.open import ImageError, load_image
from m3diff.images.saliency import LEVELS, borders, fitted, outlined
from tests.layouts import save_picture
from tests.tiny import noise_image
from tests.toy import REPOSITORY


@pytest.fixture
def file(tmp_path: Path) -> Path:
    noise_image(1, (6, 4)).save(tmp_path / "a.png")
    return tmp_path / "a.png"


def test_an_image_is_opened_by_path_or_from_a_stream_with_the_right_digest_or_none(file: Path) -> None:
    digest = hashlib.sha256(file.read_bytes()).digest()
    for source in (file, str(file)):
        for want in (digest, None):
            assert np.array_equal(np.asarray(load_image(source, want)), np.asarray(noise_image(1, (6, 4))))
    assert load_image(io.BytesIO(file.read_bytes()), digest).size == (6, 4)


def test_a_changed_image_is_refused_with_both_digests_and_the_remedy(file: Path) -> None:
    was = hashlib.sha256(file.read_bytes())
    noise_image(2, (6, 4)).save(file)
    now = hashlib.sha256(file.read_bytes())
    with pytest.raises(ValueError) as refused:
        load_image(file, was.digest())
    text = str(refused.value)
    assert text.startswith(f"{file}: sha256 {now.hexdigest()[:12]} but the samples say {was.hexdigest()[:12]};")
    assert f"changed since ingest; run `touch -c {file} && dvc repro`" in text


@pytest.mark.fault("15")
def test_a_photograph_is_turned_as_its_exif_says(tmp_path: Path) -> None:
    image, exif = noise_image(1, (6, 4)), Image.Exif()
    exif[274] = 6  # turn by 270 degrees
    image.save(tmp_path / "turned.png", exif=exif)
    turned = load_image(tmp_path / "turned.png")
    assert turned.size == (4, 6)
    assert np.array_equal(np.asarray(turned), np.rot90(np.asarray(image), -1))


def png_chunks(width: int, height: int, bits: int, colour: int, pixels: bytes) -> bytes:
    """A PNG file whose checksums are right, whatever its compressed pixels are."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def png(bits: int, colour: int, rows: list[bytes]) -> bytes:
    """A PNG file by hand; colour 0: grey, 2: RGB, 4: grey with alpha, 6: RGB with alpha."""
    width = len(rows[0]) // ({0: 1, 2: 3, 4: 2, 6: 4}[colour] * bits // 8)
    return png_chunks(width, len(rows), bits, colour, zlib.compress(b"".join(b"\0" + row for row in rows)))


@pytest.mark.parametrize("format", ["PNG", "TIFF"])
def test_grey_of_16_bits_is_scaled_to_8(format: str) -> None:
    ramp, file = np.arange(0, 65536, 16, dtype=np.uint16).reshape(64, 64), io.BytesIO()
    Image.fromarray(ramp).save(file, format)
    file.seek(0)
    image = np.asarray(load_image(file))
    assert np.array_equal(image, np.round(ramp / 257).astype(np.uint8)[..., None].repeat(3, axis=2))


@pytest.mark.parametrize(
    ("colour", "values", "seen"),
    [
        (2, (0xFFFF, 0x8000, 0x0100), (255, 128, 1)),
        (6, (0xFFFF, 0x8000, 0, 0), (255,) * 3),
        (4, (0x8000, 0xFFFF), (128,) * 3),
    ],
)
def test_colours_of_16_bits_keep_their_high_byte(colour: int, values: tuple[int, ...], seen: tuple[int, ...]) -> None:
    row = struct.pack(f">{len(values)}H", *values)
    assert load_image(io.BytesIO(png(16, colour, [row]))).getpixel((0, 0)) == seen


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "RGB"])
def test_what_is_transparent_is_white(mode: str, tmp_path: Path) -> None:
    image = Image.new("RGBA", (2, 1), (200, 0, 0, 255))
    image.putpixel((1, 0), (0, 0, 0, 0))
    if mode == "P":
        image = Image.new("P", (2, 1), 0)
        image.putpalette([200, 0, 0, 0, 0, 0])
        image.putpixel((1, 0), 1)
        image.save(tmp_path / "a.png", transparency=1)
    elif mode == "RGB":
        image.convert("RGB").save(tmp_path / "a.png", transparency=(0, 0, 0))
    else:
        image.convert(mode).save(tmp_path / "a.png")
    opened = load_image(tmp_path / "a.png")
    red = (60, 60, 60) if mode == "LA" else (200, 0, 0)
    assert [opened.getpixel((x, 0)) for x in (0, 1)] == [red, (255, 255, 255)]
    Image.new("RGBA", (1, 1), (100, 0, 0, 128)).save(tmp_path / "half.png")
    assert load_image(tmp_path / "half.png").getpixel((0, 0)) == (177, 127, 127)


@pytest.mark.parametrize("mode", ["1", "L", "P", "CMYK", "YCbCr", "LAB"])
def test_every_kind_of_colour_becomes_rgb(mode: str, tmp_path: Path) -> None:
    Image.new("RGB", (4, 4), "white").convert("L" if mode == "LAB" else mode).convert(mode).save(tmp_path / "a.tif")
    image = load_image(tmp_path / "a.tif")
    assert image.mode == "RGB"
    assert min(image.getpixel((2, 2))) >= 250


@pytest.mark.parametrize(("mode", "kind"), [("I", "32-bit integers"), ("F", "floating-point numbers")])
def test_numbers_of_no_known_scale_are_refused_in_words(mode: str, kind: str, tmp_path: Path) -> None:
    Image.new(mode, (2, 2)).save(tmp_path / "a.tif")
    with pytest.raises(ImageError, match=rf"a\.tif: .*holds {kind}.*save it with 8 or 16 bits"):
        load_image(tmp_path / "a.tif")
    assert kind in check_image(str(tmp_path / "a.tif"), 100)["verdict"]


HEIC = b"\0\0\0\x18ftypheic\0\0\0\0mif1heic"


def test_heic_without_its_plugin_names_the_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    (tmp_path / "a.heic").write_bytes(HEIC)
    with pytest.raises(ImageError, match=r"a\.heic: .*`pip install pillow-heif`"):
        load_image(tmp_path / "a.heic")
    assert "pip install pillow-heif" in check_image(str(tmp_path / "a.heic"), 100)["verdict"]
    Image.new("RGB", (8, 8)).save(tmp_path / "a.avif")
    assert load_image(tmp_path / "a.avif").size == (8, 8), "of the same container, and read by Pillow itself"


@pytest.mark.fault("15")
def test_the_first_frame_is_taken_as_rgb(tmp_path: Path) -> None:
    frames = [Image.new("RGB", (3, 3), colour) for colour in ((255, 0, 0), (0, 255, 0))]
    frames[0].save(tmp_path / "moving.gif", save_all=True, append_images=frames[1:])
    assert load_image(tmp_path / "moving.gif").mode == "RGB"
    assert load_image(tmp_path / "moving.gif").getpixel((1, 1)) == (255, 0, 0)


@pytest.mark.parametrize("fault", ["missing", "empty", "noise", "truncated", "a folder"])
def test_an_unreadable_file_is_named(fault: str, file: Path) -> None:
    data = file.read_bytes()
    file.unlink()
    if fault == "a folder":
        file.mkdir()
    elif fault != "missing":
        file.write_bytes({"empty": b"", "noise": bytes(range(256)), "truncated": data[: len(data) // 2]}[fault])
    with pytest.raises(ImageError, match=r"a\.png: cannot be read as an image \(.*restore it or save it anew"):
        load_image(file)


@pytest.mark.fault("15")
def test_a_decompression_bomb_is_refused(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    with pytest.raises(ImageError, match="decompression bomb"):
        load_image(file)


SEEN = np.random.default_rng(4).integers(20, 230, (12, 12, 3))
"""A picture."""


def tiff(bands: np.ndarray, *extra: int, **tags: list[int]) -> bytes:
    """A TIFF by hand of bands [height, width, band]; extra bands are 0: unspecified, 1: premultiplied, 2: alpha."""
    height, width, count = bands.shape
    size = bands.dtype.itemsize
    data = (np.moveaxis(bands, 2, 0) if tags.get("planar") == [2] else bands).astype(bands.dtype.newbyteorder("<"))
    parts = count if tags.get("planar") == [2] else 1
    tags |= {"tile_length": tags["tile"]} if "tile" in tags else {}
    length = height * width * count * size // parts
    known = {"photometric": 262, "planar": 284, "palette": 320, "width": 256, "bits": 258}
    known |= {"tile": 322, "tile_length": 323}
    fields: dict[int, list[int]] = {256: [width], 257: [height], 258: [8 * size] * count, 259: [1], 277: [count]}
    fields |= {262: [2 if count > 2 else 1], 278: [height], 279: [length] * parts, 273: [0] * parts}
    fields |= {known[name]: value for name, value in tags.items()} | ({338: list(extra)} if extra else {})
    far = {tag: 4 * len(values) for tag, values in fields.items() if len(values) > 1}
    start = 8 + 2 + 12 * len(fields) + 4
    pixels = start + sum(far.values())
    fields[273] = [pixels + number * length for number in range(parts)]
    entries, after = b"", b""
    for tag, values in sorted(fields.items()):
        packed = struct.pack(f"<{len(values)}L", *values)
        entries += struct.pack("<HHL", tag, 4, len(values))
        entries += struct.pack("<L", start + len(after)) if tag in far else packed
        after += packed if tag in far else b""
    return b"II*\0" + struct.pack("<LH", 8, len(fields)) + entries + bytes(4) + after + data.tobytes()


def with_band(band: object, colours: np.ndarray = SEEN, bits: int = 8) -> np.ndarray:
    band = np.broadcast_to(np.asarray(band), SEEN.shape[:2])[..., None]
    return np.concatenate([colours, band], axis=2).astype(np.uint8 if bits == 8 else np.uint16)


NEAR_INFRARED = np.random.default_rng(5).integers(30, 256, (12, 12))
CUT_OUT = np.where(np.arange(12) < 8, 255, 0)  # of columns
CORNER = np.where(np.arange(144).reshape(12, 12), 255, 0)
WHITE_OUT = np.where(CUT_OUT[:, None] == 255, SEEN, 255)
GREY = SEEN[..., :1]
TWO = GREY.reshape(12, 6, 2) * 4095 // 255  # pixels of 12 bits in three bytes
PACKED = np.stack([TWO[..., 0] >> 4, (TWO[..., 0] & 15) << 4 | TWO[..., 1] >> 8, TWO[..., 1] & 255], axis=2)
PACKED = PACKED.astype(np.uint8).reshape(12, 18, 1)


def saved(kind: str, mode: str, bands: np.ndarray, **options: object) -> bytes:
    file = io.BytesIO()
    assert Image.fromarray(bands.astype(np.uint8)).mode == mode
    Image.fromarray(bands.astype(np.uint8)).save(file, kind, **options)
    return file.getvalue()


READ: dict[str, tuple[bytes, np.ndarray | None]] = {
    "near infrared without a tag": (tiff(with_band(NEAR_INFRARED)), SEEN),
    "near infrared said to be alpha, as GDAL and tifffile write": (tiff(with_band(NEAR_INFRARED), 2), SEEN),
    "near infrared, nothing at the edges": (tiff(with_band(NEAR_INFRARED * (CUT_OUT > 0)), 2), SEEN),
    "near infrared of 16 bits": (tiff(with_band(NEAR_INFRARED, SEEN, 16) * 257, 2), SEEN),
    "near infrared in JPEG 2000": (saved("JPEG2000", "RGBA", with_band(NEAR_INFRARED)), SEEN),
    "two polarisations": (tiff(with_band(NEAR_INFRARED, GREY), 2), GREY.repeat(3, axis=2)),
    "two bands more": (tiff(np.concatenate([with_band(NEAR_INFRARED), GREY], axis=2).astype(np.uint8), 2, 0), SEEN),
    "alpha": (tiff(with_band(CUT_OUT), 2), WHITE_OUT),
    "alpha without a tag": (tiff(with_band(CUT_OUT)), WHITE_OUT),
    "premultiplied alpha": (tiff(with_band(CUT_OUT, SEEN * (CUT_OUT[:, None] > 0)), 1), WHITE_OUT),
    "half of it, premultiplied": (tiff(with_band(128, SEEN // 4), 1), SEEN // 4 + 127),
    "12 bits, packed": (tiff(PACKED, width=[12], bits=[12]), GREY.repeat(3, axis=2)),
    "an empty canvas": (saved("PNG", "RGBA", with_band(0, SEEN * 0)), SEEN * 0 + 255),
    "a page with round corners": (saved("PNG", "RGBA", with_band(CORNER, SEEN * 0 + 255)), None),
    "a mask in alpha": (saved("PNG", "RGBA", with_band(CUT_OUT, SEEN * 0)), np.where(CUT_OUT[:, None], 0, 255)),
    "an even picture of 16 bits": (tiff(GREY.astype(np.uint16) * 0 + 3000), SEEN * 0 + 12),
    "a dim picture of 16 bits": (tiff(GREY.astype(np.uint16) * 64), None),
}
"""Files and how they are seen; None: not refused."""


@pytest.mark.parametrize(("data", "wanted"), READ.values(), ids=READ)
def test_a_picture_is_read_by_its_bands(data: bytes, wanted: np.ndarray | None) -> None:
    image = np.asarray(load_image(io.BytesIO(data))).astype(int)
    if wanted is not None:
        assert np.abs(image - wanted).max() <= 1


DEEP = SEEN.astype(np.uint16)


LOST: dict[str, tuple[bytes, str]] = {
    "nothing opaque": (saved("PNG", "RGBA", with_band(0)), "fourth band .* transparency .*at most 0 of 255"),
    "next to nothing": (saved("PNG", "RGBA", with_band(SEEN[..., 0] % 6)), "fourth band .*at most 5 of 255"),
    "white on nothing": (saved("PNG", "RGBA", with_band(255 - CUT_OUT, SEEN * 0 + 255)), "fourth band"),
    "grey": (saved("PNG", "LA", with_band(3, GREY)), "second band .*at most 3 of 255"),
    "12 bits of 16": (tiff(GREY.astype(np.uint16) * 16), "nearly black.* 3,[0-9]{3} of 65,535"),
    "8 bits in 16, PNG": (png(16, 0, [row.astype(">u2").tobytes() for row in DEEP[..., 0]]), "nearly black"),
    "8 bits in 16 in colour": (tiff(DEEP), "nearly black"),
    "12 bits of 16 in colour, PNG": (png(16, 2, [(row * 16).astype(">u2").tobytes() for row in DEEP]), "nearly bl"),
    "12 bits and near infrared": (tiff(with_band(NEAR_INFRARED, SEEN, 16) * 16, 2), "nearly black"),
    "8 bits in a palette": (tiff(GREY.astype(np.uint8), photometric=[3], palette=[*range(256)] * 3), "nearly black"),
    "four bands of no colour": (tiff(with_band(9), 0, 0, 0, photometric=[1]), "of bands or bits"),
    "16 bits stored apart": (tiff(DEEP * 257, planar=[2]), "one after another"),
}
"""Files and why they are refused."""


@pytest.mark.parametrize(("data", "cause"), LOST.values(), ids=LOST)
def test_a_picture_that_loses_its_content_is_refused_with_the_cause(data: bytes, cause: str, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(data)
    with pytest.raises(ImageError, match=rf"a\.png: .*{cause}.*; save it "):
        load_image(tmp_path / "a.png")
    assert re.search(f"{cause}.*; save it ", check_image(str(tmp_path / "a.png"), 1000)["verdict"])


KINDS = ("AVIF", "BMP", "DIB", "GIF", "JPEG", "JPEG2000", "PNG", "PPM", "TIFF", "WEBP")
COMPRESSIONS = ("jpeg", "packbits", "tiff_lzw", "tiff_adobe_deflate")
DAMAGES = 60


def damaged(kind: str) -> Iterator[bytes]:
    """One picture's file in a format or a compression of TIFF, cut off or with other bytes, mostly in its header."""
    options = {"compression": kind} if kind in COMPRESSIONS else {}
    whole, rng = io.BytesIO(), random.Random(kind)
    noise_image(1, (24, 20)).save(whole, "TIFF" if options else kind, **options)
    for number in range(DAMAGES):
        data = bytearray(whole.getvalue())
        if number % 3 == 0:
            del data[rng.randrange(len(data)) :]
        for _ in range(1 + number % 4 if number % 3 else 0):
            data[rng.randrange(min(len(data), 200 if number % 3 == 1 else len(data)))] = rng.randrange(256)
        yield bytes(data)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [*KINDS, *COMPRESSIONS])
def test_a_damaged_file_is_told_whatever_its_decoder_raises(kind: str, tmp_path: Path) -> None:
    for data in damaged(kind):
        (tmp_path / "a.png").write_bytes(data)
        check = check_image(str(tmp_path / "a.png"), 1_000_000)
        assert check["verdict"]
        assert "format" not in check or not check["verdict"].startswith("does not decode")
        with contextlib.suppress(ImageError):
            load_image(tmp_path / "a.png")


POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n/x 1 def\nshowpage\n%%EOF\n"


def test_postscript_that_is_called_png_starts_no_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *_: pytest.fail("Ghostscript was started"))
    (tmp_path / "a.png").write_bytes(POSTSCRIPT)
    assert "is of no known image format (AVIF, BMP" in check_image(str(tmp_path / "a.png"), 1000)["verdict"]
    with pytest.raises(ImageError, match=r"a\.png: .*is of no known image format \(AVIF, BMP"):
        load_image(tmp_path / "a.png")


def test_no_file_is_opened_without_the_formats_that_it_may_have() -> None:
    """Pillow alone takes any format that it knows, and starts other programs for some."""
    opened = {}
    for folder in ("components", "benchmarks", "flows", "infra"):
        for path in (REPOSITORY / folder).rglob("*.py"):
            calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
            for call in calls:
                if ast.unparse(call.func).endswith("Image.open"):
                    opened[f"{path}:{call.lineno}"] = any(keyword.arg == "formats" for keyword in call.keywords)
            assert "from PIL.Image import open" not in path.read_text(), path
    assert opened
    assert [place for place, named in opened.items() if not named] == []


@pytest.mark.parametrize(("size", "limit"), [((1, 300), 89_999), ((300, 1), 89_999), ((300, 300), 89_999)])
def test_the_square_that_an_image_is_padded_to_counts_and_is_seen_before_a_pixel_is_decoded(size, limit, tmp_path):
    Image.new("1", size).save(tmp_path / "a.png")
    data = (tmp_path / "a.png").read_bytes()
    (tmp_path / "a.png").write_bytes(data[: data.index(b"IDAT") + 6])  # nothing of a pixel is there
    told = f"has {size[0]}x{size[1]} pixels, 90,000 padded to a square, more than 89,999; save it smaller"
    assert check_image(str(tmp_path / "a.png"), limit)["verdict"] == told
    with pytest.raises(ImageError, match=re.escape(f"a.png: {told}")):
        load_image(tmp_path / "a.png", max_pixels=limit)
    (tmp_path / "a.png").write_bytes(data)
    assert load_image(tmp_path / "a.png", max_pixels=limit + 1).size == size
    assert load_image(tmp_path / "a.png", hashlib.sha256(data).digest(), limit).size == size, "validate has judged it"


# The cache of checks


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
        "text.png": (b"<html>404</html>", "is a web page, not an image; fetch it again"),
        "half.jpg": (encoded("JPEG")[:700], "does not decode: image file is truncated"),
        "half.gif": (encoded("GIF")[:900], "does not decode"),
        "flipped.png": (noise[:200] + bytes([noise[200] ^ 1]) + noise[201:], "does not decode: broken data stream"),
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
    thumb = check.pop("thumb")
    told = {"path": str(tmp_path / "a.jpg"), "digest": hashlib.sha256(data).digest()}
    shape = {"format": "JPEG", "width": 40, "height": 24}
    assert check == told | shape | {"verdict": "ok", "bits": 8, "color": "grey"}
    assert thumb == Image.open(tmp_path / "a.jpg").convert("L").resize((8, 8), Image.Resampling.HAMMING).tobytes()
    assert thumb[0] > 200 > 50 > thumb[63]
    too_large = "has 40x24 pixels, 1,600 padded to a square, more than 1,599; save it smaller"
    assert check_image(str(tmp_path / "a.jpg"), 1599) == told | shape | {"verdict": too_large}


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
def test_a_check_says_bits_and_colour_and_the_upright_size(tmp_path, mode, suffix, bits, color):
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
    assert (check["width"], check["height"]) == (8, 12)
    assert check["bits"] == bits
    assert check["color"] == color


@pytest.fixture
def read_paths(monkeypatch) -> list[list[str]]:
    asked: list[list[str]] = []
    real = image_check._over_cores

    def note(batches, *rest):
        asked.append([Path(path).name for batch in batches for path in batch])
        return real(batches, *rest)

    monkeypatch.setattr(image_check, "_over_cores", note)
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
    monkeypatch.setattr(image_check, "DECODER", "another")
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
    monkeypatch.setattr(image_check, "BATCH", 3)
    monkeypatch.setattr(image_check, "IN_FLIGHT", 1)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", Image.MAX_IMAGE_PIXELS)  # which a worker sets
    assert frame_of(tmp_path, *names).equals(here)
    assert batches == [3, 3, 2]


# Outlines of a saliency map: around the right cells, on one scale, with the image under them as it was

GROUND = (90, 120, 90)
THIN, SOME, THICK = LEVELS.values()


def even(rows: int = 5, columns: int = 5) -> np.ndarray:
    return np.full((rows, columns), 1 / (rows * columns))


def with_shares(row: int, column: int, shares: float) -> np.ndarray:
    grid = even()
    grid[row, column] *= shares
    return grid


def drawn(grid: np.ndarray, size: tuple[int, int] = (100, 100)) -> np.ndarray:
    return np.asarray(outlined(Image.new("RGB", size, GROUND), grid))


def has(picture: np.ndarray, colour: tuple[int, int, int]) -> bool:
    return bool((picture == colour).all(axis=-1).any())


def extent(picture: np.ndarray) -> tuple[int, int, int, int]:
    rows, columns = np.nonzero((picture != GROUND).any(axis=-1))
    return columns.min(), rows.min(), columns.max(), rows.max()


def test_a_map_that_is_even_outlines_nothing():
    assert (drawn(even()) == GROUND).all()
    assert (drawn(with_shares(1, 3, 1.9)) == GROUND).all()
    image = Image.new("RGB", (20, 20), GROUND)
    outlined(image, with_shares(0, 0, 5))
    assert (np.asarray(image) == GROUND).all(), "what is given is not drawn on"


def test_the_outline_is_around_its_cell_and_the_image_stays_inside_and_outside():
    picture = drawn(with_shares(1, 3, 2.5))
    left, top, right, bottom = extent(picture)
    assert (left, top, right, bottom) == pytest.approx((60, 20, 80, 40), abs=3)
    assert (picture[24:36, 64:76] == GROUND).all()


@pytest.mark.parametrize(
    ("shares", "colours"), [(2.0, {THIN}), (2.9, {THIN}), (3.1, {SOME}), (4.0, {THICK}), (9.0, {THICK})]
)
def test_the_colour_says_how_many_shares_a_cell_has(shares, colours):
    picture = drawn(with_shares(2, 2, shares))
    assert {colour for colour in LEVELS.values() if has(picture, colour)} - colours <= {THIN, SOME}
    assert all(has(picture, colour) for colour in colours)
    assert has(picture, THICK) == (THICK in colours)


def test_neighbours_share_one_outline():
    grid = even()
    grid[1, 1:3] *= 2.5
    sides = list(borders(grid * grid.size >= 2))
    assert len(sides) == 6
    assert ((0.4, 0.2), (0.4, 0.4)) not in sides
    inside = np.zeros((2, 4), bool)
    inside[1, 3] = True
    a, b, c, d = (0.75, 0.5), (1.0, 0.5), (0.75, 1.0), (1.0, 1.0)
    assert set(borders(inside)) == {(a, b), (c, d), (a, c), (b, d)}


@pytest.mark.parametrize(
    ("size", "grid", "cell", "wanted"),
    [
        ((100, 50), (5, 5), (2, 4), (80, 15, 100, 35)),
        ((50, 100), (5, 5), (4, 2), (15, 80, 35, 100)),
        *((size, (2, 4), (1, 3), (0.75 * size[0], 0.5 * size[1], *size)) for size in ((100, 50), (50, 100), (80, 80))),
    ],
)
def test_a_square_map_covers_the_square_that_the_image_is_padded_to_and_any_other_the_image(size, grid, cell, wanted):
    shares = even(*grid)
    shares[cell] *= 2.5
    assert extent(drawn(shares, size)) == pytest.approx(wanted, abs=3)


def test_at_the_edge_the_whole_line_is_seen():
    assert fitted(((0.0, 0.0), (0.2, 0.0)), (100, 100), 3) == ((2, 2), (20, 2))
    assert fitted(((0.8, 1.0), (1.0, 1.0)), (100, 100), 3) == ((80, 97), (97, 97))
