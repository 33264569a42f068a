"""An image file is opened upright, and only where its bytes are the ones that were meant."""

import hashlib
import io
import struct
import sys
import zlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from components.image_check import check_image
from components.images import ImageError, load_image
from tests.tiny import noise_image


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
    assert "changed since ingest; run `dvc repro`" in text


@pytest.mark.fault("15")
def test_a_photograph_is_turned_as_its_exif_says(tmp_path: Path) -> None:
    image, exif = noise_image(1, (6, 4)), Image.Exif()
    exif[274] = 6  # turn by 270 degrees
    image.save(tmp_path / "turned.png", exif=exif)
    turned = load_image(tmp_path / "turned.png")
    assert turned.size == (4, 6)
    assert np.array_equal(np.asarray(turned), np.rot90(np.asarray(image), -1))


def png(bits: int, colour: int, rows: list[bytes]) -> bytes:
    """A PNG file by hand; colour 0: grey, 2: RGB, 4: grey with alpha, 6: RGB with alpha."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    width = len(rows[0]) // ({0: 1, 2: 3, 4: 2, 6: 4}[colour] * bits // 8)
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, len(rows), bits, colour, 0, 0, 0))
    data = chunk(b"IDAT", zlib.compress(b"".join(b"\0" + row for row in rows)))
    return b"\x89PNG\r\n\x1a\n" + head + data + chunk(b"IEND", b"")


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
        (6, (0xFFFF, 0x8000, 0, 0), (255, 255, 255)),
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


def test_half_transparent_is_half_white(tmp_path: Path) -> None:
    Image.new("RGBA", (1, 1), (100, 0, 0, 128)).save(tmp_path / "a.png")
    assert load_image(tmp_path / "a.png").getpixel((0, 0)) == (177, 127, 127)


@pytest.mark.parametrize("mode", ["1", "L", "P", "CMYK", "YCbCr", "LAB"])
def test_every_kind_of_colour_becomes_rgb(mode: str, tmp_path: Path) -> None:
    Image.new("RGB", (4, 4), "white").convert("L" if mode == "LAB" else mode).convert(mode).save(tmp_path / "a.tif")
    image = load_image(tmp_path / "a.tif")
    assert image.mode == "RGB"
    assert min(image.getpixel((2, 2))) >= 250


@pytest.mark.parametrize(("mode", "kind"), [("I", "32-bit integers"), ("F", "floating-point numbers")])
def test_numbers_of_no_known_scale_are_refused_in_words(mode: str, kind: str, tmp_path: Path) -> None:
    Image.new(mode, (2, 2)).save(tmp_path / "a.tif")
    with pytest.raises(ImageError, match=rf"a\.tif: .*its pixels are {kind}.*save it with 8 or 16 bits"):
        load_image(tmp_path / "a.tif")
    assert kind in (check_image(str(tmp_path / "a.tif"), 100).verdict or "")


HEIC = b"\0\0\0\x18ftypheic\0\0\0\0mif1heic"


def test_heic_without_its_plugin_names_the_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    (tmp_path / "a.heic").write_bytes(HEIC)
    with pytest.raises(ImageError, match=r"a\.heic: .*`pip install pillow-heif`"):
        load_image(tmp_path / "a.heic")
    assert "pip install pillow-heif" in (check_image(str(tmp_path / "a.heic"), 100).verdict or "")


def test_heic_is_opened_by_its_plugin_where_it_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def register() -> None:
        monkeypatch.setattr(Image, "open", lambda _: noise_image(1, (6, 4)))

    monkeypatch.setitem(sys.modules, "pillow_heif", SimpleNamespace(register_heif_opener=register))
    (tmp_path / "a.heic").write_bytes(HEIC)
    assert load_image(tmp_path / "a.heic").size == (6, 4)


@pytest.mark.fault("15")
def test_the_first_frame_is_taken_as_rgb(tmp_path: Path) -> None:
    frames = [Image.new("RGB", (3, 3), colour) for colour in ((255, 0, 0), (0, 255, 0))]
    frames[0].save(tmp_path / "moving.gif", save_all=True, append_images=frames[1:])
    assert load_image(tmp_path / "moving.gif").mode == "RGB"
    assert load_image(tmp_path / "moving.gif").getpixel((1, 1)) == (255, 0, 0)


@pytest.mark.parametrize("fault", ["missing", "empty", "text", "truncated", "a folder"])
def test_an_unreadable_file_is_named(fault: str, file: Path) -> None:
    data = file.read_bytes()
    file.unlink()
    if fault == "a folder":
        file.mkdir()
    elif fault != "missing":
        file.write_bytes({"empty": b"", "text": b"no image", "truncated": data[: len(data) // 2]}[fault])
    with pytest.raises(ImageError, match=r"a\.png: cannot be read as an image \(.*restore it or save it anew"):
        load_image(file)


@pytest.mark.fault("15")
def test_a_decompression_bomb_is_refused(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    with pytest.raises(ImageError, match="decompression bomb"):
        load_image(file)
