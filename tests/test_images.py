"""Image files are opened upright, in RGB, and only if their content is the expected one."""

import ast
import contextlib
import hashlib
import io
import random
import struct
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import EpsImagePlugin, Image

from m3diff.images.check import check_image
from m3diff.images.open import FORMATS, ImageError, load_image, read_image_size
from tests.errors import Message, raises
from tests.tiny import noise_image
from tests.toy import REPOSITORY


@pytest.fixture
def file(tmp_path: Path) -> Path:
    noise_image(1, (6, 4)).save(tmp_path / "a.png")
    return tmp_path / "a.png"


def test_an_image_is_opened_by_path_or_stream_with_a_matching_digest_or_none(file: Path) -> None:
    digest = hashlib.sha256(file.read_bytes()).digest()
    for source in (file, str(file)):
        for want in (digest, None):
            assert np.array_equal(np.asarray(load_image(source, want)), np.asarray(noise_image(1, (6, 4))))
    assert load_image(io.BytesIO(file.read_bytes()), digest).size == (6, 4)


def test_a_changed_image_is_refused_with_both_digests(file: Path) -> None:
    was = hashlib.sha256(file.read_bytes())
    noise_image(2, (6, 4)).save(file)
    now = hashlib.sha256(file.read_bytes())
    digests = {"value": now.hexdigest()[:12], "expected": was.hexdigest()[:12]}
    command = f"`touch -c {file} && dvc repro`"
    with raises(ImageError, "images.changed_since_ingest", path=str(file), command=command, **digests):
        load_image(file, was.digest())


@pytest.mark.fault("15")
def test_a_photograph_is_turned_as_its_exif_says(tmp_path: Path) -> None:
    image = noise_image(1, (6, 4))
    exif = Image.Exif()
    exif[274] = 6  # turn by 270 degrees
    image.save(tmp_path / "turned.png", exif=exif)
    turned = load_image(tmp_path / "turned.png")
    assert turned.size == (4, 6)
    assert np.array_equal(np.asarray(turned), np.rot90(np.asarray(image), -1))


@pytest.mark.parametrize(("orientation", "size"), [(1, (6, 4)), (3, (6, 4)), (5, (4, 6)), (8, (4, 6))])
def test_the_size_of_an_image_is_read_from_its_header_as_upright(orientation, size, tmp_path):
    exif = Image.Exif()
    exif[274] = orientation
    noise_image(1, (6, 4)).save(tmp_path / "a.png", exif=exif)
    data = (tmp_path / "a.png").read_bytes()
    (tmp_path / "a.png").write_bytes(data[: data.index(b"IDAT") + 6])  # nothing of a pixel is there
    assert read_image_size(tmp_path / "a.png") == size
    assert read_image_size(str(tmp_path / "a.png")).aspect_ratio == 1.5
    assert read_image_size(tmp_path / "a.png").area == 24


@pytest.mark.parametrize(
    ("content", "code"), [(None, "images.unreadable"), (b"<html></html>", "images.web_page")], ids=["missing", "a page"]
)
def test_the_size_of_a_file_that_is_no_image_is_refused_by_name(content, code, tmp_path):
    if content is not None:
        (tmp_path / "a.png").write_bytes(content)
    with raises(ImageError, code, path=str(tmp_path / "a.png")):
        read_image_size(tmp_path / "a.png")


def png_chunks(width: int, height: int, bits: int, colour: int, pixels: bytes) -> bytes:
    """Return a PNG file with correct checksums. The compressed pixels may be invalid."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def png(bits: int, colour: int, rows: list[bytes]) -> bytes:
    """Return a PNG file. Its colour is 0: grey, 2: RGB, 4: grey with alpha, or 6: RGB with alpha."""
    width = len(rows[0]) // ({0: 1, 2: 3, 4: 2, 6: 4}[colour] * bits // 8)
    return png_chunks(width, len(rows), bits, colour, zlib.compress(b"".join(b"\0" + row for row in rows)))


@pytest.mark.parametrize("format", ["PNG", "TIFF"])
def test_grey_of_16_bits_is_scaled_to_8(format: str) -> None:
    ramp = np.arange(0, 65536, 16, dtype=np.uint16).reshape(64, 64)
    file = io.BytesIO()
    Image.fromarray(ramp).save(file, format)
    file.seek(0)
    image = np.asarray(load_image(file))
    assert np.array_equal(image, np.round(ramp / 257).astype(np.uint8)[..., None].repeat(3, axis=2))


@pytest.mark.parametrize(
    ("colour", "values", "rgb"),
    [
        (2, (0xFFFF, 0x8000, 0x0100), (255, 128, 1)),
        (6, (0xFFFF, 0x8000, 0, 0), (255,) * 3),
        (4, (0x8000, 0xFFFF), (128,) * 3),
    ],
)
def test_colours_of_16_bits_keep_their_high_byte(colour: int, values: tuple[int, ...], rgb: tuple[int, ...]) -> None:
    row = struct.pack(f">{len(values)}H", *values)
    assert load_image(io.BytesIO(png(16, colour, [row]))).getpixel((0, 0)) == rgb


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
    with raises(ImageError, "images.unknown_scale", path=str(tmp_path / "a.tif"), kind=kind):
        load_image(tmp_path / "a.tif")
    assert check_image(str(tmp_path / "a.tif"), 100)["verdict"] == Message("images.unknown_scale", kind=kind)


HEIC = b"\0\0\0\x18ftypheic\0\0\0\0mif1heic"


def test_heic_without_its_plugin_names_the_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    (tmp_path / "a.heic").write_bytes(HEIC)
    with raises(ImageError, "images.heic_without_plugin", path=str(tmp_path / "a.heic")):
        load_image(tmp_path / "a.heic")
    assert check_image(str(tmp_path / "a.heic"), 100)["verdict"] == Message("images.heic_without_plugin")
    Image.new("RGB", (8, 8)).save(tmp_path / "a.avif")
    assert load_image(tmp_path / "a.avif").size == (8, 8), "of the same container, and read by Pillow itself"


def test_heic_is_opened_by_the_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "OPEN", dict(Image.OPEN))
    monkeypatch.setattr(Image, "ID", list(Image.ID))

    def register() -> None:
        Image.register_open("HEIF", lambda file, name: Image.new("RGB", (8, 6)))

    monkeypatch.setitem(sys.modules, "pillow_heif", SimpleNamespace(register_heif_opener=register))
    (tmp_path / "a.heic").write_bytes(HEIC)
    assert load_image(tmp_path / "a.heic").size == (8, 6)


def test_the_first_image_of_a_process_may_have_any_format(tmp_path, monkeypatch):
    """Pillow registers most formats only when `Image.init` is called."""
    Image.new("RGB", (8, 6)).save(tmp_path / "a.webp")
    monkeypatch.delitem(Image.OPEN, "WEBP")
    monkeypatch.setattr(Image, "ID", [name for name in Image.ID if name != "WEBP"])
    monkeypatch.setattr(Image, "_initialized", 1)
    monkeypatch.delitem(sys.modules, "PIL.WebPImagePlugin")
    assert load_image(tmp_path / "a.webp").size == (8, 6)


@pytest.mark.fault("15")
def test_the_first_frame_is_taken_as_rgb(tmp_path: Path) -> None:
    frames = [Image.new("RGB", (3, 3), colour) for colour in ((255, 0, 0), (0, 255, 0))]
    frames[0].save(tmp_path / "moving.gif", save_all=True, append_images=frames[1:])
    assert load_image(tmp_path / "moving.gif").mode == "RGB"
    assert load_image(tmp_path / "moving.gif").getpixel((1, 1)) == (255, 0, 0)


CODES_OF_UNREADABLE = {"empty": "images.unknown_format", "noise": "images.unknown_format"}


@pytest.mark.parametrize("fault", ["missing", "empty", "noise", "truncated", "a folder"])
def test_an_unreadable_file_is_named(fault: str, file: Path) -> None:
    data = file.read_bytes()
    file.unlink()
    if fault == "a folder":
        file.mkdir()
    elif fault != "missing":
        file.write_bytes({"empty": b"", "noise": bytes(range(256)), "truncated": data[: len(data) // 2]}[fault])
    with raises(ImageError, CODES_OF_UNREADABLE.get(fault, "images.unreadable"), path=str(file)):
        load_image(file)


@pytest.mark.fault("15")
def test_a_decompression_bomb_is_refused(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    with raises(ImageError, "images.unreadable", path=str(file)) as caught:
        load_image(file)
    assert "decompression bomb" in caught.value.fields["cause"], "Pillow's own words"


PICTURE = np.random.default_rng(4).integers(20, 230, (12, 12, 3))


def tiff(bands: np.ndarray, *extra: int, **tags: list[int]) -> bytes:
    """Return a TIFF file with bands [height, width, band].

    Args:
        bands: the pixels.
        extra: kinds of the extra bands; 0: unspecified, 1: premultiplied, 2: alpha.
        tags: other tags by name.
    """
    height, width, count = bands.shape
    size = bands.dtype.itemsize
    data = (np.moveaxis(bands, 2, 0) if tags.get("planar") == [2] else bands).astype(bands.dtype.newbyteorder("<"))
    parts = count if tags.get("planar") == [2] else 1
    tags |= {"tile_length": tags["tile"]} if "tile" in tags else {}
    length = height * width * count * size // parts
    tag_numbers = {"photometric": 262, "planar": 284, "palette": 320, "width": 256, "bits": 258}
    tag_numbers |= {"tile": 322, "tile_length": 323}
    fields: dict[int, list[int]] = {256: [width], 257: [height], 258: [8 * size] * count, 259: [1], 277: [count]}
    fields |= {262: [2 if count > 2 else 1], 278: [height], 279: [length] * parts, 273: [0] * parts}
    fields |= {tag_numbers[name]: value for name, value in tags.items()} | ({338: list(extra)} if extra else {})
    far = {tag: 4 * len(values) for tag, values in fields.items() if len(values) > 1}
    start = 8 + 2 + 12 * len(fields) + 4
    pixels = start + sum(far.values())
    fields[273] = [pixels + number * length for number in range(parts)]
    entries = b""
    after = b""
    for tag, values in sorted(fields.items()):
        packed = struct.pack(f"<{len(values)}L", *values)
        entries += struct.pack("<HHL", tag, 4, len(values))
        entries += struct.pack("<L", start + len(after)) if tag in far else packed
        after += packed if tag in far else b""
    return b"II*\0" + struct.pack("<LH", 8, len(fields)) + entries + bytes(4) + after + data.tobytes()


def with_band(band: object, colours: np.ndarray = PICTURE, bits: int = 8) -> np.ndarray:
    band = np.broadcast_to(np.asarray(band), PICTURE.shape[:2])[..., None]
    return np.concatenate([colours, band], axis=2).astype(np.uint8 if bits == 8 else np.uint16)


NEAR_INFRARED = np.random.default_rng(5).integers(30, 256, (12, 12))
CUT_OUT = np.where(np.arange(12) < 8, 255, 0)  # of columns
CORNER = np.where(np.arange(144).reshape(12, 12), 255, 0)
WHITE_OUT = np.where(CUT_OUT[:, None] == 255, PICTURE, 255)
GREY = PICTURE[..., :1]
TWO = GREY.reshape(12, 6, 2) * 4095 // 255  # pixels of 12 bits in three bytes
PACKED = np.stack([TWO[..., 0] >> 4, (TWO[..., 0] & 15) << 4 | TWO[..., 1] >> 8, TWO[..., 1] & 255], axis=2)
PACKED = PACKED.astype(np.uint8).reshape(12, 18, 1)


def saved(kind: str, mode: str, bands: np.ndarray, **options: object) -> bytes:
    file = io.BytesIO()
    assert Image.fromarray(bands.astype(np.uint8)).mode == mode
    Image.fromarray(bands.astype(np.uint8)).save(file, kind, **options)
    return file.getvalue()


# Files and the pixels that are read from them. If the pixels are None, the file only must not be refused
READ: dict[str, tuple[bytes, np.ndarray | None]] = {
    "near infrared without a tag": (tiff(with_band(NEAR_INFRARED)), PICTURE),
    "near infrared said to be alpha, as GDAL and tifffile write": (tiff(with_band(NEAR_INFRARED), 2), PICTURE),
    "near infrared, nothing at the edges": (tiff(with_band(NEAR_INFRARED * (CUT_OUT > 0)), 2), PICTURE),
    "near infrared of 16 bits": (tiff(with_band(NEAR_INFRARED, PICTURE, 16) * 257, 2), PICTURE),
    "near infrared in JPEG 2000": (saved("JPEG2000", "RGBA", with_band(NEAR_INFRARED)), PICTURE),
    "two polarisations": (tiff(with_band(NEAR_INFRARED, GREY), 2), GREY.repeat(3, axis=2)),
    "two bands more": (tiff(np.concatenate([with_band(NEAR_INFRARED), GREY], axis=2).astype(np.uint8), 2, 0), PICTURE),
    "alpha": (tiff(with_band(CUT_OUT), 2), WHITE_OUT),
    "alpha without a tag": (tiff(with_band(CUT_OUT)), WHITE_OUT),
    "premultiplied alpha": (tiff(with_band(CUT_OUT, PICTURE * (CUT_OUT[:, None] > 0)), 1), WHITE_OUT),
    "half of it, premultiplied": (tiff(with_band(128, PICTURE // 4), 1), PICTURE // 4 + 127),
    "half of it, premultiplied, and one band more": (
        tiff(np.concatenate([with_band(128, PICTURE // 4), GREY], axis=2).astype(np.uint8), 1, 0),
        PICTURE // 4 + 127,
    ),
    "half of grey, premultiplied": (tiff(with_band(128, GREY // 4), 1), GREY.repeat(3, axis=2) // 4 + 127),
    "12 bits, packed": (tiff(PACKED, width=[12], bits=[12]), GREY.repeat(3, axis=2)),
    "an empty canvas": (saved("PNG", "RGBA", with_band(0, PICTURE * 0)), PICTURE * 0 + 255),
    "a page with round corners": (saved("PNG", "RGBA", with_band(CORNER, PICTURE * 0 + 255)), None),
    "a mask in alpha": (saved("PNG", "RGBA", with_band(CUT_OUT, PICTURE * 0)), np.where(CUT_OUT[:, None], 0, 255)),
    "an even picture of 16 bits": (tiff(GREY.astype(np.uint16) * 0 + 3000), PICTURE * 0 + 12),
    "a dim picture of 16 bits": (tiff(GREY.astype(np.uint16) * 64), None),
}


@pytest.mark.parametrize(("data", "pixels"), READ.values(), ids=READ)
def test_a_picture_is_read_by_its_bands(data: bytes, pixels: np.ndarray | None) -> None:
    image = np.asarray(load_image(io.BytesIO(data))).astype(int)
    if pixels is not None:
        assert np.abs(image - pixels).max() <= 1


DEEP = PICTURE.astype(np.uint16)
FOURTH_BAND = {"band": "fourth band"}
BLACK = "images.all_nearly_black"
ROWS_OF_16_BITS = [row.astype(">u2").tobytes() for row in DEEP[..., 0]]
ROWS_OF_12_BITS_IN_COLOUR = [(row * 16).astype(">u2").tobytes() for row in DEEP]
PALETTE_OF_8_BITS = [*range(256)] * 3
# Files, and the code and the fields of the error by which they are refused
LOST: dict[str, tuple[bytes, str, dict[str, object]]] = {
    "nothing opaque": (saved("PNG", "RGBA", with_band(0)), "images.blank", {**FOURTH_BAND, "highest_alpha": 0}),
    "next to nothing": (
        saved("PNG", "RGBA", with_band(PICTURE[..., 0] % 6)),
        "images.blank",
        {**FOURTH_BAND, "highest_alpha": 5},
    ),
    "white on nothing": (
        saved("PNG", "RGBA", with_band(255 - CUT_OUT, PICTURE * 0 + 255)),
        "images.blank",
        FOURTH_BAND,
    ),
    "grey": (saved("PNG", "LA", with_band(3, GREY)), "images.blank", {"band": "second band", "highest_alpha": 3}),
    "12 bits of 16": (
        tiff(GREY.astype(np.uint16) * 16),
        BLACK,
        {"brightest_dark": 16 * int(GREY.max()), "white": 65535},
    ),
    "8 bits in 16, PNG": (png(16, 0, ROWS_OF_16_BITS), BLACK, {}),
    "8 bits in 16 in colour": (tiff(DEEP), BLACK, {}),
    "12 bits of 16 in colour, PNG": (png(16, 2, ROWS_OF_12_BITS_IN_COLOUR), BLACK, {}),
    "12 bits and near infrared": (tiff(with_band(NEAR_INFRARED, PICTURE, 16) * 16, 2), BLACK, {}),
    "8 bits in a palette": (tiff(GREY.astype(np.uint8), photometric=[3], palette=PALETTE_OF_8_BITS), BLACK, {}),
    "four bands of no colour": (tiff(with_band(9), 0, 0, 0, photometric=[1]), "images.unknown_format", {}),
    "16 bits stored apart": (tiff(DEEP * 257, planar=[2]), "images.separate_16_bit_bands", {}),
}


@pytest.mark.parametrize("case", LOST)
def test_a_picture_that_loses_its_content_is_refused_with_the_cause(case: str, tmp_path: Path) -> None:
    data, code, fields = LOST[case]
    (tmp_path / "a.png").write_bytes(data)
    with raises(ImageError, code, path=str(tmp_path / "a.png"), **fields) as refused:
        load_image(tmp_path / "a.png")
    assert refused.value.fault.remedy
    check = check_image(str(tmp_path / "a.png"), 1000)
    assert check["code"] == code
    assert check["verdict"] == Message(code, **fields)


KINDS = ("AVIF", "BMP", "DIB", "GIF", "JPEG", "JPEG2000", "PNG", "PPM", "TIFF", "WEBP")
COMPRESSIONS = ("jpeg", "packbits", "tiff_lzw", "tiff_adobe_deflate")
DAMAGES = 60


def damaged(kind: str) -> Iterator[bytes]:
    """Yield damaged copies of an image file. They are cut off, or some bytes, mostly in the header, are replaced.

    Args:
        kind: a format, or a compression of TIFF.
    """
    options = {"compression": kind} if kind in COMPRESSIONS else {}
    file = io.BytesIO()
    rng = random.Random(kind)
    noise_image(1, (24, 20)).save(file, "TIFF" if options else kind, **options)
    for number in range(DAMAGES):
        data = bytearray(file.getvalue())
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
        assert "format" not in check or check.get("code") != "images.undecodable"
        with contextlib.suppress(ImageError):
            load_image(tmp_path / "a.png")


POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n/x 1 def\nshowpage\n%%EOF\n"


def test_postscript_that_is_called_png_starts_no_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *_: pytest.fail("Ghostscript was started"))
    (tmp_path / "a.png").write_bytes(POSTSCRIPT)
    assert check_image(str(tmp_path / "a.png"), 1000)["verdict"] == Message("images.unknown_format", formats=FORMATS)
    with raises(ImageError, "images.unknown_format", path=str(tmp_path / "a.png")):
        load_image(tmp_path / "a.png")


def test_no_file_is_opened_without_the_formats_that_it_may_have() -> None:
    """Without this argument, Pillow accepts any format that it knows, and starts other programs for some of them."""
    names_formats = {}
    for folder in ("components", "benchmarks", "flows", "infra"):
        for path in (REPOSITORY / folder).rglob("*.py"):
            text = path.read_text()
            assert "from PIL.Image import open" not in text, path
            if "Image.open" not in text:
                continue  # parsing all files takes seconds
            calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
            for call in calls:
                if ast.unparse(call.func).endswith("Image.open"):
                    has_formats = any(keyword.arg == "formats" for keyword in call.keywords)
                    names_formats[f"{path}:{call.lineno}"] = has_formats
    assert names_formats
    assert [location for location, has_formats in names_formats.items() if not has_formats] == []


@pytest.mark.parametrize(("size", "limit"), [((1, 300), 89_999), ((300, 1), 89_999), ((300, 300), 89_999)])
def test_an_image_with_a_large_padded_square_is_refused_before_decoding(size, limit, tmp_path):
    Image.new("1", size).save(tmp_path / "a.png")
    data = (tmp_path / "a.png").read_bytes()
    (tmp_path / "a.png").write_bytes(data[: data.index(b"IDAT") + 6])  # nothing of a pixel is there
    figures = {"width": size[0], "height": size[1], "value": 90_000, "limit": 89_999}
    assert check_image(str(tmp_path / "a.png"), limit)["verdict"] == Message("images.too_large", **figures)
    with raises(ImageError, "images.too_large", path=str(tmp_path / "a.png"), **figures):
        load_image(tmp_path / "a.png", max_pixels=limit)
    (tmp_path / "a.png").write_bytes(data)
    assert load_image(tmp_path / "a.png", max_pixels=limit + 1).size == size
    assert load_image(tmp_path / "a.png", hashlib.sha256(data).digest(), limit).size == size, "validate has judged it"


def test_an_image_whose_tiles_are_too_large_is_refused_before_decoding(tmp_path):
    (tmp_path / "a.tif").write_bytes(tiff(with_band(255), tile=[300]))
    figures = {"value": 90_000, "limit": 89_999}
    assert check_image(str(tmp_path / "a.tif"), 89_999)["verdict"] == Message("images.tiles_too_large", **figures)
    with raises(ImageError, "images.tiles_too_large", path=str(tmp_path / "a.tif"), **figures):
        load_image(tmp_path / "a.tif", max_pixels=89_999)
    assert check_image(str(tmp_path / "a.tif"), 90_000).get("code") != "images.tiles_too_large"
