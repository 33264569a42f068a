"""Image files as every part of the project opens them: by their content, upright, in RGB of 8 bits a channel."""

from __future__ import annotations

import hashlib
import io
from pathlib import Path
from typing import IO, TYPE_CHECKING

import numpy as np

from m3diff.images.colour import to_srgb
from m3diff.images.jpeg import decode_jpeg
from m3diff.records.contents import describe_no_image
from m3diff.records.errors import DataError, command_to_read_again

if TYPE_CHECKING:
    from PIL import Image

# The formats that are read, by any part. Pillow knows more: for some it starts other programs (EPS: Ghostscript).
FORMATS = ("AVIF", "BMP", "DIB", "GIF", "HEIF", "JPEG", "JPEG2000", "PNG", "PPM", "TIFF", "WEBP")

MAX_PIXELS = 178_956_970  # Pillow refuses an image of more pixels; here the padded square counts

# Brands of files that need a plugin; iPhones write them
HEIF = (b"heic", b"heix", b"hevc", b"heim", b"heis", b"mif1", b"msf1")


BITS, COLOR_MAP, TILE_WIDTH, TILE_LENGTH, EXTRA_SAMPLES = 258, 320, 322, 323, 338  # tags of a TIFF

# The standard deviation in levels below which a picture shows nothing, and the alpha below which no pixel does
BLANK, FAINT = 4, 26

NO_IMAGE = (
    f"is of no known image format ({', '.join(FORMATS)}), or of bands or bits that Pillow does not read; save it as "
    "a PNG of 8 bits"
)

# A picture of 16 bits with this share of its values in their lowest 16th is nearly black in 8 bits: it has at most 16
# levels there. Saturated pixels and pixels without data do not count: they say nothing about the scale.
DARK_SHARE = 0.999
MAX_WHITE_SHARE = 0.75  # more white than this is paper, not missing data
NO_DATA = (32767, 65536 - 9999)  # as writers of signed 16 bits mark it; unsigned ones take the highest value
MARK_SHARE = 0.02  # a single bright value of at most so many pixels is a mark, such as a column of a sensor
GDAL_NODATA = 42113  # tag of a TIFF

FEW_BITS = (
    "is nearly black once decoded: {share} of its values are at most {most:,} of {white:,}{rest}; save it with 8 bits, "
    "all images by one scale: divide by the value that is to be white, such as {most:,}, and cut off what is above"
)

DAMAGED = "is a damaged JPEG, parts of which decode as grey or wrong colours ({}); restore it or fetch it again"


class ImageError(DataError):
    """An image file that is missing, cannot be read, or is not the one that was meant; names it with a remedy."""


def load_image(
    source: str | Path | IO[bytes], sha256: bytes | None = None, max_pixels: int = MAX_PIXELS
) -> Image.Image:
    """An image file as `to_rgb` makes it. Its bytes are read once.

    Args:
        source: a path, or a stream of the file's bytes.
        sha256: the digest (32 bytes) that the file must have; `validate` has judged the size of such a file.
        max_pixels: of the padded square of a file without a digest.

    Raises:
        ImageError: unreadable or too large, or the digest differs.
    """
    name = str(source) if isinstance(source, str | Path) else "image"
    try:
        data = Path(source).read_bytes() if isinstance(source, str | Path) else source.read()
        if sha256 and (digest := hashlib.sha256(data).digest()) != sha256:
            found = f"sha256 {digest.hex()[:12]} but the samples say {sha256.hex()[:12]}"
            raise ImageError(f"{found}; the file changed since ingest; run {command_to_read_again(name)}")
        with open_image(data) as image:
            if not sha256 and (fault := too_large(image, max_pixels)):
                raise ImageError(fault)
            return decode_to_rgb(image, data)
    except ImageError as error:
        raise ImageError(f"{name}: {error}") from error
    except Exception as error:  # Pillow raises some ten kinds for broken files, KeyError and struct.error among them
        told = error if isinstance(error, OSError | SyntaxError | ValueError) and str(error) else repr(error)
        raise ImageError(f"{name}: cannot be read as an image ({told}); restore it or save it anew") from error


def open_image(data: bytes) -> Image.Image:
    """The file of these bytes, known by its header; no pixel is decoded yet.

    Raises:
        UnidentifiedImageError: none of FORMATS; or HEIC, and the plugin is not there: names it.
        ImageError: it has no pixels; or it is known to be something else than an image, such as a web page.
    """
    from PIL import Image, UnidentifiedImageError

    if data[4:8] == b"ftyp" and data[8:12] in HEIF:
        try:
            from pillow_heif import register_heif_opener
        except ImportError:
            told = "is HEIC, for which Pillow needs a plugin: `pip install pillow-heif`, or save it as JPEG or PNG"
            raise UnidentifiedImageError(told) from None
        register_heif_opener()
    try:
        Image.init()  # which names the formats of this Pillow
        image = Image.open(io.BytesIO(data), formats=[kind for kind in FORMATS if kind in Image.OPEN])
    except UnidentifiedImageError:  # its message holds a memory address
        if description := describe_no_image(data):
            raise ImageError(description) from None
        raise UnidentifiedImageError(NO_IMAGE) from None
    if not all(image.size):
        raise ImageError(f"has {image.width}x{image.height} pixels, so it shows nothing")
    return image


def decode_strictly(image: Image.Image, data: bytes) -> Image.Image:
    """The open image of these bytes; the pixels of a JPEG are there, and sound.

    Raises:
        ImageError: the decoder warns that a JPEG's scan is damaged.
    """
    from PIL import Image
    from PIL.JpegImagePlugin import JpegImageFile

    if not isinstance(image, JpegImageFile):
        return image
    pixels, damage = decode_jpeg(data, image.mode)
    if damage:
        raise ImageError(DAMAGED.format(damage))
    if pixels is None or pixels.shape[:2] != (image.height, image.width):
        return image
    sound = Image.fromarray(pixels[..., 0] if image.mode == "L" else pixels)
    sound.info = dict(image.info)  # orientation and colour profile
    sound.format = image.format
    return sound


def decode_to_rgb(image: Image.Image, data: bytes) -> Image.Image:
    """The open image of these bytes, decoded strictly, as `to_rgb` makes it.

    Raises:
        ImageError: as `decode_strictly` and `to_rgb`.
    """
    decoded = decode_strictly(image, data)
    return to_rgb(decoded, may_overwrite=decoded is not image)


def too_large(image: Image.Image, max_pixels: float) -> str | None:
    """The reason not to decode an image of which only the header was read; None for at most `max_pixels`.

    The padded square counts, since that is what models take; so does a tile of a TIFF, which is decoded as a whole.
    """
    width, height = image.size
    tags = getattr(image, "tag_v2", {})
    tile = tags.get(TILE_WIDTH, 1) * tags.get(TILE_LENGTH, 1)
    if tile > max_pixels:
        return f"has tiles of {tile:,} pixels, more than {max_pixels:,.0f}; save it without tiles"
    pixels = max(width, height) ** 2
    padded = f"has {width}x{height} pixels, {pixels:,} padded to a square, more than {max_pixels:,.0f}; save it smaller"
    return padded if pixels > max_pixels else None


def to_rgb(image: Image.Image, may_overwrite: bool = False) -> Image.Image:
    """The first frame in RGB of 8 bits, turned as its EXIF says. 16 bits are scaled, what is transparent is white.

    A band of a TIFF or JPEG 2000 that its writer took for transparency, though it holds measured values (near
    infrared, a second polarisation), is left out.

    Args:
        may_overwrite: the image is used for nothing else, so it need not be copied.

    Raises:
        ImageError: its numbers have no known scale; or it is blank once decoded though the file is not.
    """
    from PIL import ImageOps

    tags = getattr(image, "tag_v2", {})  # of a TIFF
    bits = tags.get(BITS, (8,))
    raw = str(getattr(image, "tile", None) or "")
    deep = image.mode[0] != "I" and (";16" in raw or COLOR_MAP in tags)
    # where colours premultiplied by alpha are declared, Pillow divides them, so their alpha must be right
    may_measure = image.format in ("TIFF", "JPEG2000") and tags.get(EXTRA_SAMPLES, (0,))[0] != 1
    if may_overwrite:
        ImageOps.exif_transpose(image, in_place=True)
    else:
        image = ImageOps.exif_transpose(image)
    if image.mode in ("I", "F"):
        kind = "32-bit integers" if image.mode == "I" else "floating-point numbers"
        raise ImageError(f"holds {kind}, whose black and white are not known; save it with 8 or 16 bits")
    if image.mode in ("RGB", "RGBA") and bits[0] == 16 and raw and not deep:
        raise ImageError("holds bands of 16 bits one after another, which Pillow misreads; save it with 8 bits")
    profile = image.info.get("icc_profile")
    if image.mode.startswith("I;16"):
        image = _grey(image, 4095 if bits == (12,) else 65535, str(tags.get(GDAL_NODATA, "")))
        image.info["icc_profile"] = profile
    image = to_srgb(image)
    if image.has_transparency_data or image.mode == "La":
        image = _on_white(image, may_measure)
    image = image if image.mode == "RGB" else image.convert("RGB")  # a copy, or may be overwritten
    image.info.pop("icc_profile", None)  # a copy that is saved must not be converted once more
    if deep:
        _refuse_dark_colours(image)
    return image


def _grey(image: Image.Image, white: int, nodata: str) -> Image.Image:
    """Grey of more than 8 bits in 8.

    Args:
        white: the highest value, which becomes 255.
        nodata: the value that the file declares for pixels without data; empty if it declares none.

    Raises:
        ImageError: nearly black once decoded, though in the range of its own values it is not.
    """
    from PIL import Image

    values = np.asarray(image).astype(np.uint32)
    counted = _without_mark(values[~_is_no_data(values, white, nodata)], white // 16)
    dark = counted[counted <= white // 16]
    most = int(dark.max(initial=0))
    if dark.size >= DARK_SHARE * counted.size and 255 * dark.std() > BLANK * most:
        raise ImageError(_few_bits(dark.size, values.size, most, white))
    return Image.fromarray(((255 * values + white // 2) // white).astype(np.uint8))


def _is_no_data(values: np.ndarray, white: int, nodata: str) -> np.ndarray:
    """True for values that say nothing about a picture's scale: saturated, or without data."""
    marks = [*NO_DATA, white - 1, white]
    if nodata.strip(" \0").isdecimal():
        marks.append(int(nodata.strip(" \0")))
    is_mark = np.isin(values, marks)
    return is_mark if is_mark.mean() <= MAX_WHITE_SHARE else np.zeros_like(is_mark)


def _without_mark(values: np.ndarray, most: int) -> np.ndarray:
    """The values without those above `most`, if these are few and all the same."""
    bright = values[values > most]
    if bright.size <= MARK_SHARE * values.size and bright.size and bright.min() == bright.max():
        return values[values <= most]
    return values


def _refuse_dark_colours(image: Image.Image) -> None:
    """Refuse 16-bit colours that are nearly black: Pillow keeps the high byte alone.

    Raises:
        ImageError: nearly black once decoded.
    """
    levels = np.asarray(image)
    most = 15
    dark = levels[levels <= most]
    if dark.size < (1 - MAX_WHITE_SHARE) * levels.size:
        return
    high_bytes = [value >> 8 for value in NO_DATA]
    counted = _without_mark(levels[~np.isin(levels, [*high_bytes, 255])], most).size
    # black and white alone, as in a mask, lose nothing; colours whose range is too small have several dark levels
    varies = 255 * dark.std() > BLANK * max(1, int(dark.max(initial=0)))
    if dark.size >= DARK_SHARE * levels.size or (dark.size >= DARK_SHARE * counted and varies):
        raise ImageError(_few_bits(dark.size, levels.size, 256 * int(dark.max(initial=0)) + 255, 65535))


def _few_bits(dark: int, total: int, most: int, white: int) -> str:
    share = "all" if dark == total else f"{np.floor(1000 * dark / total) / 10:.1f} %"
    rest = "" if dark == total else " (the rest is saturated, or marks pixels without data)"
    return FEW_BITS.format(share=share, most=most, white=white, rest=rest)


def _on_white(image: Image.Image, may_measure: bool) -> Image.Image:
    """The image with white where it is transparent.

    Raises:
        ImageError: nearly nothing of the picture is left.
    """
    from PIL import Image, ImageStat

    band = {"RGBA": "fourth band", "LA": "second band", "La": "second band"}.get(image.mode, "transparency")
    image = image.convert("LA") if image.mode == "La" else image
    image = image if image.mode == "RGBA" else image.convert("RGBA")
    alpha = image.getchannel("A")
    counts = alpha.histogram()
    if may_measure and 4 * counts[255] < sum(counts[1:]):  # most of what alpha shows, it shows whole
        return image.convert("RGB")
    shown = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    most, stored = max(value for value in range(256) if counts[value]), ImageStat.Stat(image)
    faint = most < FAINT and (most > 0 or max(stored.stddev[:3]) >= 1)
    mostly_hidden = stored.mean[3] < 128 and max(stored.stddev) > 8 * BLANK
    if faint or (mostly_hidden and max(ImageStat.Stat(shown).stddev) < BLANK):
        raise ImageError(
            f"is blank once decoded: its {band} is read as transparency (at most {most} of 255), which hides the "
            "picture; save it without"
        )
    return shown
