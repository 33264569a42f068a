"""Image files that would lose content: damaged, with too small a range of values, in other colours, or no image."""

import io
import itertools
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageCms
from PIL.PngImagePlugin import PngInfo

from m3diff.images import jpeg
from m3diff.images.check import OK, check_image
from m3diff.images.open import ImageError, load_image
from m3diff.records.errors import Fault
from tests.errors import Message, raises
from tests.test_images import png

RANDOM = np.random.default_rng(3)
SIDE = 120
EVEN_GROUND = np.kron(RANDOM.integers(0, 255, (SIDE // 8, SIDE // 8, 3)), np.ones((8, 8, 1))).astype(np.uint8)


def checked(data: bytes, folder: Path) -> dict[str, Any]:
    path = folder / "a.png"
    path.write_bytes(data)
    return check_image(str(path), 1_000_000)


def verdict(data: bytes, folder: Path) -> str:
    return checked(data, folder)["verdict"]


def encode(pixels: np.ndarray, kind: str = "PNG", mode: str | None = None, **options: object) -> bytes:
    buffer = io.BytesIO()
    image = Image.fromarray(pixels)
    (image.convert(mode) if mode else image).save(buffer, kind, **options)
    return buffer.getvalue()


# Damaged JPEGs

WRITERS: dict[str, dict[str, object]] = {
    "baseline": {"quality": 90},
    "progressive": {"progressive": True},
    "optimised": {"optimize": True},
    "4:4:4": {"subsampling": 0},
    "4:2:2": {"subsampling": 1},
    "grey": {"mode": "L"},
    "CMYK": {"mode": "CMYK"},
    "restart marks": {"restart_marker_rows": 1},
    "RGB without a transform": {"keep_rgb": True},
    "with a comment": {"comment": b"x" * 300},
}
TRAILERS = {
    "nothing": b"",
    "zero bytes": bytes(4096),
    "Samsung": b"\0\0\1\x0a\x0e\0\0\0Image_UTC_Data1600000000000SEFHj\0\0\0SEFT",
    "a motion photo": b"\0\0\0\x18ftypmp42" + bytes(range(256)),
    "a second picture": encode(EVEN_GROUND, "JPEG"),
    "a line end": b"\r\n",
}


def scan_start(data: bytes) -> int:
    return data.rindex(b"\xff\xda") + 14


def cut_scan(data: bytes) -> bytes:
    start = scan_start(data)
    return data[: start + 40] + data[start + 40 + (len(data) - start) * 7 // 10 :]


def zero_scan(data: bytes) -> bytes:
    middle = (scan_start(data) + len(data)) // 2
    return data[:middle] + bytes(64) + data[middle + 64 :]


@pytest.mark.parametrize("trailer", TRAILERS)
@pytest.mark.parametrize("writer", WRITERS)
def test_a_sound_jpeg_has_the_pixels_that_pillow_reads(writer: str, trailer: str, tmp_path: Path) -> None:
    data = encode(EVEN_GROUND, "JPEG", **WRITERS[writer]) + TRAILERS[trailer]
    assert verdict(data, tmp_path) == OK
    plain = Image.open(io.BytesIO(data)).convert("RGB")
    assert np.array_equal(np.asarray(load_image(io.BytesIO(data))), np.asarray(plain))


def test_black_ink_of_a_jpeg_is_dark() -> None:
    buffer = io.BytesIO()
    Image.new("CMYK", (8, 8), (0, 0, 0, 200)).save(buffer, "JPEG")
    assert load_image(io.BytesIO(buffer.getvalue())).getpixel((4, 4)) == (55, 55, 55)


@pytest.mark.parametrize("damage", [cut_scan, zero_scan])
@pytest.mark.parametrize("writer", ["baseline", "4:4:4", "4:2:2", "grey", "CMYK", "restart marks", "optimised"])
def test_a_damaged_jpeg_is_refused_with_its_name(writer: str, damage, tmp_path: Path) -> None:
    data = damage(encode(EVEN_GROUND, "JPEG", **WRITERS[writer]))
    assert verdict(data, tmp_path) == Message("images.damaged_jpeg")
    with raises(ImageError, "images.damaged_jpeg", path=str(tmp_path / "a.png")):
        load_image(tmp_path / "a.png")


def silently_zeroed_scans(data: bytes) -> Iterator[bytes]:
    """Yield copies of a JPEG in which a part of the scan is zero bytes that decode without a warning."""
    for start in range(scan_start(data), len(data) - 70, 10):
        damaged = data[:start] + bytes(64) + data[start + 64 :]
        try:
            jpeg.simplejpeg.decode_jpeg(damaged)
        except ValueError:
            continue
        yield damaged


def with_one_segment_of_tables(data: bytes) -> bytes:
    """Return a copy of a JPEG with all Huffman tables in one segment, the chroma tables first."""
    tables = []
    while b"\xff\xc4" in data:
        start = data.index(b"\xff\xc4")
        end = start + 2 + int.from_bytes(data[start + 2 : start + 4], "big")
        tables.append(data[start + 4 : end])
        data = data[:start] + data[end:]
    content = b"".join(reversed(tables))
    scan = data.rindex(b"\xff\xda")
    return data[:scan] + b"\xff\xc4" + struct.pack(">H", 2 + len(content)) + content + data[scan:]


def test_zero_bytes_that_decode_without_a_warning_are_damage(tmp_path: Path) -> None:
    silent = list(silently_zeroed_scans(encode(EVEN_GROUND, "JPEG", quality=90)))
    assert silent
    refusal = Message("images.damaged_jpeg", cause="zero bytes in its scan")
    assert all(verdict(damaged, tmp_path) == refusal for damaged in silent)


def test_zero_bytes_are_damage_whichever_segment_has_the_tables(tmp_path: Path) -> None:
    data = with_one_segment_of_tables(encode(EVEN_GROUND, "JPEG", quality=90))
    assert verdict(data, tmp_path) == OK
    damaged = next(silently_zeroed_scans(data))
    assert verdict(damaged, tmp_path) == Message("images.damaged_jpeg", cause="zero bytes in its scan")


@pytest.mark.parametrize("writer", ["baseline", "4:4:4", "4:2:2", "grey", "restart marks", "optimised", "progressive"])
def test_zero_bytes_in_place_of_the_end_are_damage(writer: str, tmp_path: Path) -> None:
    data = encode(EVEN_GROUND, "JPEG", **WRITERS[writer])
    middle = (scan_start(data) + len(data)) // 2 if writer != "progressive" else len(data) // 2
    verdict_of_cut = verdict(data[:middle] + bytes(len(data) - middle), tmp_path)
    assert verdict_of_cut != OK


def test_zero_bytes_after_a_whole_picture_whose_end_mark_is_missing_are_no_damage(tmp_path: Path) -> None:
    data = encode(EVEN_GROUND, "JPEG", quality=90)
    assert verdict(data[:-2] + bytes(600), tmp_path) == OK


@pytest.mark.parametrize("options", [{}, {"optimize": True}, {"progressive": True}, {"quality": 1}, {"mode": "L"}])
@pytest.mark.parametrize("level", [0, 128, 255])
def test_an_even_picture_is_no_damage(level: int, options: dict[str, object], tmp_path: Path) -> None:
    assert verdict(encode(np.full((200, 300, 3), level, np.uint8), "JPEG", **options), tmp_path) == OK


@pytest.mark.parametrize(("padding", "is_sound"), [(b"\0", True), (b"\0" * 4, True), (b"abcdefgh" * 9, False)])
def test_a_few_equal_bytes_before_the_end_mark_are_padding(padding: bytes, is_sound: bool, tmp_path: Path) -> None:
    data = encode(EVEN_GROUND, "JPEG")
    assert (verdict(data[:-2] + padding + data[-2:], tmp_path) == OK) == is_sound


def test_a_warning_about_the_header_hides_no_damage(tmp_path: Path) -> None:
    data = encode(EVEN_GROUND, "JPEG")
    version = data.index(b"JFIF\0") + 5
    odd = data[:version] + b"\x07" + data[version + 1 :]
    assert verdict(odd, tmp_path) == OK
    assert verdict(cut_scan(odd), tmp_path) == Message("images.damaged_jpeg")


def test_a_copy_without_simplejpeg_reads_jpegs_by_pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jpeg, "simplejpeg", None)
    data = encode(EVEN_GROUND, "JPEG")
    assert np.array_equal(np.asarray(load_image(io.BytesIO(data))), np.asarray(Image.open(io.BytesIO(data))))


# Damaged PNGs


def flip_bit(data: bytes, position: int) -> bytes:
    return data[:position] + bytes([data[position] ^ 16]) + data[position + 1 :]


def png_with_pixels_that_pillow_decodes_to_wrong_colours() -> bytes:
    data = encode(EVEN_GROUND)
    start = data.index(b"IDAT") + 4
    for position in range(start + 200, len(data) - 20):
        damaged_data = flip_bit(data, position)
        try:
            pixels = np.asarray(Image.open(io.BytesIO(damaged_data)))
        except OSError:
            continue
        if not np.array_equal(pixels, EVEN_GROUND):
            return damaged_data
    raise AssertionError("Pillow notices every damage, so that the check of the checksum is not needed")


def test_a_png_with_damaged_pixels_is_refused_with_its_name(tmp_path: Path) -> None:
    data = png_with_pixels_that_pillow_decodes_to_wrong_colours()
    assert verdict(data, tmp_path) == Message("images.undecodable")
    with raises(ImageError, "images.unreadable", path=str(tmp_path / "a.png")):
        load_image(tmp_path / "a.png")


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "P"])
def test_a_png_with_several_pixel_chunks_and_another_one_is_sound(mode: str, tmp_path: Path) -> None:
    other_chunk = PngInfo()
    other_chunk.add(b"teSt", b"after the pixels", after_idat=True)
    pixels = np.random.default_rng(7).integers(0, 255, (300, 300, 3)).astype(np.uint8)
    data = encode(pixels, mode=mode, pnginfo=other_chunk)
    assert data.count(b"IDAT") > 1
    assert verdict(data + b"trailing bytes", tmp_path) == OK


# Ranges of 16 bits

GROUND = RANDOM.integers(300, 3000, (64, 64)).astype(np.uint16)
NIGHT = (RANDOM.integers(0, 200, (64, 64)) + 60000 * np.exp(-((np.indices((64, 64)) - 30) ** 2) / 60).prod(0)).astype(
    np.uint16
)


def marked(rows: slice, columns: slice, value: int, ground: np.ndarray = GROUND) -> np.ndarray:
    levels = ground.copy()
    levels[rows, columns] = value
    return levels


ALL_LINES = slice(None)
FIRST_LINE = slice(0, 1)
DARK = {
    "one saturated pixel": marked(FIRST_LINE, FIRST_LINE, 65535),
    "a saturated column": marked(ALL_LINES, FIRST_LINE, 65535),
    "a third without data": marked(slice(0, 21), ALL_LINES, 65535),
    "no data is 0": marked(slice(0, 8), ALL_LINES, 0, marked(FIRST_LINE, FIRST_LINE, 65535)),
    "no data is 32,767": marked(slice(0, 9), ALL_LINES, 32767),
    "no data is -9,999": marked(slice(0, 9), ALL_LINES, 65536 - 9999),
    "a border one below saturation": marked(ALL_LINES, slice(60, 64), 65534),
    "a bright column below saturation": marked(ALL_LINES, FIRST_LINE, 52000),
    "two hot pixels of other values": marked(FIRST_LINE, slice(0, 2), 40000),
    "8 bits in 16 and a saturated pixel": marked(FIRST_LINE, FIRST_LINE, 65535, GROUND // 12),
    "12 bits in 16 and a saturated border": marked(ALL_LINES, slice(60, 64), 65535, (GROUND * 1.3).astype(np.uint16)),
}
IN_RANGE = {
    "a night with a lamp": NIGHT,
    "black and white alone": marked(slice(0, 21), ALL_LINES, 65535, GROUND * 0),
    "two bright lines": marked(slice(0, 2), ALL_LINES, 52000),
    "a white page": marked(slice(0, 60), ALL_LINES, 65535),
    "an even dark picture": GROUND * 0 + 2000,
    "the whole range": GROUND * 20,
    "14 bits": GROUND * 5,
}


def as_colours(levels: np.ndarray) -> bytes:
    return png(16, 2, [row.repeat(3).astype(">u2").tobytes() for row in levels])


@pytest.mark.parametrize("encoding", ["PNG", "TIFF", "colour"])
@pytest.mark.parametrize("case", DARK)
def test_a_picture_that_turns_nearly_black_is_refused_with_range_and_scale(case, encoding, tmp_path):
    data = as_colours(DARK[case]) if encoding == "colour" else encode(DARK[case], encoding)
    check = checked(data, tmp_path)
    assert check["code"] in ("images.nearly_black", "images.all_nearly_black")
    assert check["verdict"] == Message(check["code"], white=65535)


@pytest.mark.parametrize("encoding", ["PNG", "TIFF", "colour"])
@pytest.mark.parametrize("case", IN_RANGE)
def test_a_picture_that_keeps_its_content_passes(case: str, encoding: str, tmp_path: Path) -> None:
    if case == "an even dark picture" and encoding == "colour":
        pytest.skip("colours of no more than 16 levels are refused, even ones too, since Pillow keeps no low byte")
    data = as_colours(IN_RANGE[case]) if encoding == "colour" else encode(IN_RANGE[case], encoding)
    assert verdict(data, tmp_path) == OK


# Colour profiles

SRGB = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
P3 = {
    b"rXYZ": (0.51512, 0.24120, -0.00105),
    b"gXYZ": (0.29198, 0.69225, 0.04189),
    b"bXYZ": (0.15710, 0.06657, 0.78407),
}


def wide_profile() -> bytes:
    """Return the sRGB profile with the colorants of Display P3, as iPhones write it."""
    data = bytearray(SRGB)
    for number in range(int.from_bytes(data[128:132], "big")):
        entry = 132 + 12 * number
        name = bytes(data[entry : entry + 4])
        start = int.from_bytes(data[entry + 4 : entry + 8], "big") + 8
        for axis, value in enumerate(P3.get(name, ())):
            data[start + 4 * axis : start + 4 * axis + 4] = round(value * 65536).to_bytes(4, "big", signed=True)
    return bytes(data)


WIDE = wide_profile()
SOFT = np.asarray(Image.fromarray(RANDOM.integers(70, 180, (6, 6, 3)).astype(np.uint8)).resize((48, 48)))


def in_wide_colours(image: Image.Image) -> Image.Image:
    to_wide = ImageCms.buildTransform(io.BytesIO(SRGB), io.BytesIO(WIDE), "RGB", "RGB")
    return to_wide.apply(image)


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "JPEG", "WEBP", "AVIF", "palette", "alpha"])
def test_colours_of_a_wide_profile_are_those_of_srgb(kind: str) -> None:
    wide = in_wide_colours(Image.fromarray(SOFT))
    buffer = io.BytesIO()
    if kind == "palette":
        wide = wide.quantize(256)
    if kind == "alpha":
        wide.putalpha(255)
    options = {"quality": 100, "subsampling": 0} if kind == "JPEG" else {"quality": 100, "lossless": kind == "WEBP"}
    wide.save(buffer, kind if kind.isupper() else "PNG", icc_profile=WIDE, **options)
    image = load_image(io.BytesIO(buffer.getvalue()))
    limit = {"palette": 20, "JPEG": 6, "AVIF": 8}.get(kind, 2)
    assert np.abs(np.asarray(image).astype(int) - SOFT).max() <= limit
    assert "icc_profile" not in image.info


def linear_grey() -> bytes:
    """Return a grey profile whose levels are proportional to light."""
    tags = {
        b"wtpt": b"XYZ " + bytes(4) + struct.pack(">3i", 63190, 65536, 54061),
        b"kTRC": b"curv" + bytes(8),
    }
    return profile_of_tags(b"mntrGRAYXYZ ", tags)


def grey_inks() -> bytes:
    """Return a profile of a printer whose four inks are grey. One ink alone has the lightness 50, more are black."""
    colours = b""
    for inks in itertools.product((0, 1), repeat=4):
        lightness = (255, 128, 0, 0, 0)[sum(inks)]
        colours += bytes((lightness, 128, 128))
    identity = struct.pack(">9i", 65536, 0, 0, 0, 65536, 0, 0, 0, 65536)
    curve = bytes(range(256))
    table = b"mft1" + bytes(4) + bytes((4, 3, 2, 0)) + identity + curve * 4 + colours + curve * 3
    return profile_of_tags(b"prtrCMYKLab ", {b"A2B0": table})


def profile_of_tags(kind: bytes, tags: dict[bytes, bytes]) -> bytes:
    """Return an ICC profile. Its kind is the class of device, its colour space, and the space that it converts to."""
    table = struct.pack(">I", len(tags))
    contents = b""
    for name, content in tags.items():
        table += name + struct.pack(">II", 132 + 12 * len(tags) + len(contents), len(content))
        contents += content
    size = 128 + len(table) + len(contents)
    light = struct.pack(">3i", 63190, 65536, 54061)
    head = struct.pack(">I4sI", size, b"lcms", 0x02100000) + kind + bytes(12) + b"acsp" + bytes(28)
    return head + light + bytes(128 - len(head) - len(light)) + table + contents


@pytest.mark.parametrize("kind", ["PNG", "16 bits"])
def test_grey_of_a_linear_profile_becomes_brighter(kind: str) -> None:
    levels = np.full((4, 4), 55, np.uint8) if kind == "PNG" else np.full((4, 4), 55 * 257, np.uint16)
    data = encode(levels, "PNG", icc_profile=linear_grey())
    assert load_image(io.BytesIO(data)).getpixel((0, 0)) == (128, 128, 128)


@pytest.mark.parametrize("kind", ["JPEG", "TIFF"])
def test_inks_have_the_colours_of_their_profile(kind: str) -> None:
    buffer = io.BytesIO()
    Image.new("CMYK", (8, 8), (255, 0, 0, 0)).save(buffer, kind, icc_profile=grey_inks())
    red, green, blue = load_image(io.BytesIO(buffer.getvalue())).getpixel((4, 4))
    assert red == pytest.approx(119, abs=4)
    assert green == pytest.approx(red, abs=2)
    assert blue == pytest.approx(red, abs=2)


PROFILES = {
    "none": None,
    "sRGB": SRGB,
    "broken": b"no profile" * 20,
    "cut off": WIDE[:200],
    "empty": b"",
}


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "TIFF"])
def test_pixels_stay_where_the_profile_is_srgb_or_cannot_be_used(kind: str, profile: str) -> None:
    options = {"icc_profile": PROFILES[profile]} if PROFILES[profile] else {}
    data = encode(EVEN_GROUND, kind, **options)
    plain = Image.open(io.BytesIO(encode(EVEN_GROUND, kind))).convert("RGB")
    assert np.array_equal(np.asarray(load_image(io.BytesIO(data))), np.asarray(plain))


def test_a_profile_of_another_colour_space_is_ignored() -> None:
    grey = encode(EVEN_GROUND[..., 0], "PNG", icc_profile=WIDE)
    assert np.array_equal(np.asarray(load_image(io.BytesIO(grey)))[..., 0], EVEN_GROUND[..., 0])


def test_a_turned_photograph_is_converted_and_upright() -> None:
    exif = Image.Exif()
    exif[274] = 6
    buffer = io.BytesIO()
    in_wide_colours(Image.fromarray(SOFT)).save(buffer, "PNG", icc_profile=WIDE, exif=exif)
    turned = np.rot90(SOFT, -1).astype(int)
    assert np.abs(np.asarray(load_image(io.BytesIO(buffer.getvalue()))) - turned).max() <= 2


# Files that are no picture

NO_PICTURES = {
    "Git LFS": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
        Fault("images.pointer", kind="Git LFS", command="git lfs pull"),
    ),
    "DVC": (b"outs:\n- md5: 0123\n  size: 3\n", Fault("images.pointer", kind="DVC", command="dvc pull")),
    "git-annex": (
        b"/annex/objects/SHA256E-s1--0.png\n",
        Fault("images.pointer", kind="git-annex", command="git annex get ."),
    ),
    "a web page": (b"<html><head><title>Sign in</title></head></html>", Fault("images.web_page")),
    "a web page with a type": (b"\xef\xbb\xbf \n<!DOCTYPE HTML><html></html>", Fault("images.web_page")),
    "a web page after a comment": (b"<!-- saved -->\n<html></html>", Fault("images.web_page")),
    "JSON": (b'{"error": "not found"}', Fault("images.text", kind="JSON", excerpt='{"error": "not found"}')),
    "a list in JSON": (b"[1, 2]", Fault("images.text", kind="JSON", excerpt="[1, 2]")),
    "a long list in JSON": (
        b"[" + 5000 * b"1, " + b"2]",
        Fault("images.text", kind="JSON", excerpt="[" + 13 * "1, " + "..."),
    ),
    "an answer of S3": (
        b'<?xml version="1.0"?><Error><Code>AccessDenied</Code></Error>',
        Fault("images.server_error", answer="AccessDenied"),
    ),
    "text": (b"404: Not Found", Fault("images.text", kind="text", excerpt="404: Not Found")),
    "a long text, examined up to the middle of a letter": (
        b"a" + 5000 * "é".encode(),
        Fault("images.text", kind="text", excerpt="a" + 39 * "é" + "..."),
    ),
    "a link as text": (b"../images/1.png", Fault("images.text", kind="text", excerpt="../images/1.png")),
    "UTF-16": ("Not found".encode("utf-16"), Fault("images.text", kind="text", excerpt="Not found")),
    "UTF-16 cut within a letter": (
        "Not found".encode("utf-16") + b"!",
        Fault("images.text", kind="text", excerpt="Not found"),
    ),
    "SVG": (b'<svg xmlns="http://www.w3.org/2000/svg"></svg>', Fault("images.format_not_read", kind="an SVG drawing")),
    "SVG with a head": (b'<?xml version="1.0"?>\n<svg></svg>', Fault("images.format_not_read", kind="an SVG drawing")),
    "PDF": (b"%PDF-1.7\n%\xe2\xe3", Fault("images.document", kind="a PDF document")),
    "zip": (b"PK\3\4" + bytes(30), Fault("images.archive", kind="a zip archive or an Office document")),
    "gzip": (b"\x1f\x8b\x08" + bytes(30), Fault("images.archive", kind="compressed by gzip")),
    "a video": (b"\0\0\0\x20ftypisom" + bytes(30), Fault("images.video")),
    "AVI": (b"RIFF" + bytes(4) + b"AVI " + bytes(30), Fault("images.video")),
    "tar": (b"a.png" + bytes(252) + b"ustar\x0000" + bytes(30), Fault("images.archive", kind="a tar archive")),
    "DICOM": (bytes(128) + b"DICM" + bytes(30), Fault("images.format_not_read", kind="DICOM")),
    "XML": (b'<?xml version="1.0"?><a></a>', Fault("images.xml")),
    "JSON cut off": (b'{"error": ', Fault("images.text", kind="JSON", excerpt='{"error":')),
    "text in brackets": (b"[not found]", Fault("images.text", kind="text", excerpt="[not found]")),
    "Matroska": (b"\x1aE\xdf\xa3" + bytes(30), Fault("images.video")),
    "NumPy": (b"\x93NUMPY\1\0" + bytes(30), Fault("images.format_not_read", kind="an array of NumPy")),
    "zero bytes": (bytes(5000), Fault("images.only_zero_bytes")),
    "Git LFS after a byte order mark": (
        b"\xef\xbb\xbfversion https://git-lfs.github.com/spec/v1\n",
        Fault("images.pointer", kind="Git LFS", command="git lfs pull"),
    ),
    "a PNG of other line ends": (b"\x89PNG\n\x1a\n" + bytes(30), Fault("images.transferred_as_text")),
    "a PNG decoded as UTF-8": (
        b"\x89PNG\r\n\x1a\n".decode("utf-8", "replace").encode() + bytes(30),
        Fault("images.transferred_as_text"),
    ),
    "a JPEG decoded as UTF-8": (
        b"\xff\xd8\xff\xe0\0\x10".decode("utf-8", "replace").encode(),
        Fault("images.transferred_as_text"),
    ),
    "a JPEG decoded as Latin 1": (
        b"\xff\xd8\xff\xe0\0\x10".decode("latin-1").encode(),
        Fault("images.transferred_as_text"),
    ),
    "a Mac's side file": (b"\0\5\x16\7\0\2\0\0Mac OS X        ", Fault("images.resource_fork")),
    "Photoshop": (b"8BPS\0\1" + bytes(30), Fault("images.format_not_read", kind="a Photoshop document")),
}


@pytest.mark.parametrize("content", NO_PICTURES)
def test_a_file_that_is_no_picture_is_called_what_it_is(content: str, tmp_path: Path) -> None:
    data, fault = NO_PICTURES[content]
    check = checked(data, tmp_path)
    assert check["code"] == fault.code
    assert check["verdict"] == str(fault)
    assert fault.remedy
    with raises(ImageError, fault.code) as refused:
        load_image(tmp_path / "a.png")
    assert refused.value.fault == fault.at(path=str(tmp_path / "a.png"))


UNKNOWN = {
    "sound in the container of AVI": b"RIFF" + bytes(4) + b"WAVE" + bytes(30),
    "a picture cut off in the container of AVI": b"RIFF" + bytes(4) + b"WEBP",
    "numbers": bytes(range(256)),
    "text with a control character": b"Not\x01found",
    "white space": b" \n",
}


@pytest.mark.parametrize("content", UNKNOWN)
def test_a_file_of_an_unknown_kind_is_called_nothing_in_particular(content: str, tmp_path: Path) -> None:
    assert checked(UNKNOWN[content], tmp_path)["code"] == "images.unknown_format"


def test_what_is_transparent_is_white_under_a_profile_too() -> None:
    wide = in_wide_colours(Image.fromarray(SOFT))
    wide.putalpha(Image.linear_gradient("L").resize(wide.size).point(lambda level: 255 * (level > 60)))
    buffer = io.BytesIO()
    wide.save(buffer, "PNG", icc_profile=WIDE)
    image = load_image(io.BytesIO(buffer.getvalue()))
    assert image.getpixel((0, 0)) == (255, 255, 255)
