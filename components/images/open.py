"""Open image files for all parts of the project.

The format is recognized by content. Images are returned upright, in RGB with 8 bits per channel.
"""

from __future__ import annotations

import hashlib
import io
from pathlib import Path
from typing import IO, TYPE_CHECKING

import numpy as np

from m3diff.images.colour import to_srgb
from m3diff.images.jpeg import decode_jpeg
from m3diff.records.contents import fault_of_no_image
from m3diff.records.errors import DataError, Fault, command_to_read_again

if TYPE_CHECKING:
    from PIL import Image

# Supported formats. Pillow supports more formats, but starts other programs for some of them (Ghostscript for EPS)
FORMATS = ("AVIF", "BMP", "DIB", "GIF", "HEIF", "JPEG", "JPEG2000", "PNG", "PPM", "TIFF", "WEBP")

MAX_PIXELS = 178_956_970  # Pillow's limit; here, it applies to the image after padding to a square

# Brands of HEIC files, which iPhones write and which require a plugin
HEIC_BRANDS = (b"heic", b"heix", b"hevc", b"heim", b"heis", b"mif1", b"msf1")

# TIFF tags
BITS = 258
COLOR_MAP = 320
TILE_WIDTH = 322
TILE_LENGTH = 323
EXTRA_SAMPLES = 338
GDAL_NODATA = 42113

BLANK_STDDEV = 4  # standard deviation, in levels, below which an image is blank
FAINT_ALPHA = 26  # alpha below which a pixel is invisible

# A 16-bit image is nearly black in 8 bits if this share of its values is in the lowest 16th of the range, because at
# most 16 levels remain. Saturated pixels and pixels without data do not count, because they do not reveal the scale
DARK_SHARE = 0.999
MAX_WHITE_SHARE = 0.75  # a larger share of white pixels is background, such as paper, not missing data
# Values that mark missing data in signed 16-bit files. Unsigned files use the maximum value
NO_DATA_VALUES = (32767, 65536 - 9999)
# A bright value that occurs in at most this share of the pixels, and is the only bright value, is an artefact, such as
# a dead column of a sensor
MARK_SHARE = 0.02


class ImageError(DataError):
    """An image file is missing, cannot be read, or is not the expected file."""


def load_image(
    source: str | Path | IO[bytes], sha256: bytes | None = None, max_pixels: int = MAX_PIXELS
) -> Image.Image:
    """Read an image file and return the image as upright RGB with 8 bits per channel, as `to_rgb` does.

    Args:
        source: a path, or a binary stream.
        sha256: expected SHA-256 of the file (32 bytes). If it is given, the size of the image is not checked, because
            `validate` has already checked it.
        max_pixels: maximum number of pixels after padding to a square. It is ignored if `sha256` is given.

    Raises:
        ImageError: the file cannot be read, is too large, or has an unexpected digest.
    """
    name = str(source) if isinstance(source, str | Path) else "image"
    try:
        data = Path(source).read_bytes() if isinstance(source, str | Path) else source.read()
        if sha256:
            _require_digest(data, sha256, name)
        with open_image(data) as image:
            fault = None if sha256 else size_fault(image, max_pixels)
            if fault is not None:
                raise ImageError(fault)
            return decode_to_rgb(image, data)
    except ImageError as error:
        raise ImageError(error.fault.at(path=name)) from error
    except Exception as error:  # Pillow raises about ten types for broken files, including KeyError and struct.error
        has_text = isinstance(error, OSError | SyntaxError | ValueError) and str(error)
        reason = error if has_text else repr(error)
        raise ImageError("images.unreadable", path=name, cause=reason) from error


def _require_digest(data: bytes, sha256: bytes, name: str) -> None:
    digest = hashlib.sha256(data).digest()
    if digest != sha256:
        raise ImageError(
            "images.changed_since_ingest",
            path=name,
            value=digest.hex()[:12],
            expected=sha256.hex()[:12],
            command=command_to_read_again(name),
        )


def open_image(data: bytes) -> Image.Image:
    """Open an image file and read its header, without decoding any pixels.

    Args:
        data: the file's bytes.

    Raises:
        ImageError: the format is not supported, the plugin for HEIC is not installed, the image has no pixels, or the
            file is recognized as something else, such as a web page.
    """
    from PIL import Image, UnidentifiedImageError

    if data[4:8] == b"ftyp" and data[8:12] in HEIC_BRANDS:
        try:
            from pillow_heif import register_heif_opener
        except ImportError:
            raise ImageError("images.heic_without_plugin") from None
        register_heif_opener()
    try:
        Image.init()  # registers the formats of this build of Pillow in Image.OPEN
        image = Image.open(io.BytesIO(data), formats=[kind for kind in FORMATS if kind in Image.OPEN])
    except UnidentifiedImageError:  # do not use Pillow's message, which contains a memory address
        fault = fault_of_no_image(data) or Fault("images.unknown_format", formats=FORMATS)
        raise ImageError(fault) from None
    if not all(image.size):
        raise ImageError("images.no_pixels", width=image.width, height=image.height)
    return image


def decode_strictly(image: Image.Image, data: bytes) -> Image.Image:
    """Check a JPEG for damage and return the image, decoded if possible. Return other formats unchanged.

    Args:
        image: an image as `open_image` returns it.
        data: the file's bytes.

    Raises:
        ImageError: the scan of a JPEG is damaged.
    """
    from PIL import Image
    from PIL.JpegImagePlugin import JpegImageFile

    if not isinstance(image, JpegImageFile):
        return image
    pixels, damage = decode_jpeg(data, image.mode)
    if damage:
        raise ImageError("images.damaged_jpeg", cause=damage)
    if pixels is None or pixels.shape[:2] != (image.height, image.width):
        return image
    decoded = Image.fromarray(pixels[..., 0] if image.mode == "L" else pixels)
    decoded.info = dict(image.info)  # keep the orientation and the colour profile
    decoded.format = image.format
    return decoded


def decode_to_rgb(image: Image.Image, data: bytes) -> Image.Image:
    """Decode an image, reject damaged JPEG files, and return the image as `to_rgb` does.

    Args:
        image: an image as `open_image` returns it.
        data: the file's bytes.

    Raises:
        ImageError: for the same reasons as in `decode_strictly` and `to_rgb`.
    """
    decoded = decode_strictly(image, data)
    return to_rgb(decoded, may_overwrite=decoded is not image)


def size_fault(image: Image.Image, max_pixels: float) -> Fault | None:
    """Return a fault if an image is too large to be decoded, otherwise None.

    The limit applies to the image after padding to a square, as models see it, and to a TIFF tile, which is decoded as
    a whole.

    Args:
        image: an image as `open_image` returns it, before decoding.
        max_pixels: maximum number of pixels.
    """
    width, height = image.size
    tags = getattr(image, "tag_v2", {})
    tile = tags.get(TILE_WIDTH, 1) * tags.get(TILE_LENGTH, 1)
    if tile > max_pixels:
        return Fault("images.tiles_too_large", value=tile, limit=max_pixels)
    pixels = max(width, height) ** 2
    if pixels <= max_pixels:
        return None
    return Fault("images.too_large", width=width, height=height, value=pixels, limit=max_pixels)


def to_rgb(image: Image.Image, may_overwrite: bool = False) -> Image.Image:
    """Return the first frame as RGB with 8 bits per channel, rotated according to its EXIF data.

    16-bit values are reduced to 8 bits, and transparent pixels become white. Some TIFF and JPEG 2000 files contain a
    band of measured values (near infrared, a second polarisation) that is declared as transparency. Such a band is
    ignored.

    Args:
        image: the image.
        may_overwrite: whether `image` may be modified. True if the caller does not use it again.

    Raises:
        ImageError: the scale of the values is unknown, the bands cannot be read, or the decoded picture would be blank
            or nearly black although the file is not.
    """
    from PIL import ImageOps

    tags = getattr(image, "tag_v2", {})  # only TIFF files have tags
    bits = tags.get(BITS, (8,))
    raw_mode = str(getattr(image, "tile", None) or "")
    has_16_bit_colours = image.mode[0] != "I" and (";16" in raw_mode or COLOR_MAP in tags)
    # If colours are premultiplied (1), Pillow divides them by alpha, so the band must be transparency
    may_be_measured = image.format in ("TIFF", "JPEG2000") and tags.get(EXTRA_SAMPLES, (0,))[0] != 1
    if may_overwrite:
        ImageOps.exif_transpose(image, in_place=True)
    else:
        image = ImageOps.exif_transpose(image)
    if image.mode in ("I", "F"):
        kind = "32-bit integers" if image.mode == "I" else "floating-point numbers"
        raise ImageError("images.unknown_scale", kind=kind)
    if image.mode in ("RGB", "RGBA") and bits[0] == 16 and raw_mode and not has_16_bit_colours:
        raise ImageError("images.separate_16_bit_bands")
    profile = image.info.get("icc_profile")
    if image.mode.startswith("I;16"):
        white = 4095 if bits == (12,) else 65535
        image = _grey_to_8_bits(image, white, str(tags.get(GDAL_NODATA, "")))
        image.info["icc_profile"] = profile
    image = to_srgb(image)
    if image.has_transparency_data or image.mode == "La":
        image = _on_white(image, may_be_measured)
    image = image if image.mode == "RGB" else image.convert("RGB")
    image.info.pop("icc_profile", None)  # otherwise a saved copy would be converted again
    if has_16_bit_colours:
        _refuse_dark_colours(image)
    return image


def _grey_to_8_bits(image: Image.Image, white: int, nodata: str) -> Image.Image:
    """Scale a greyscale image with more than 8 bits to 8 bits.

    Args:
        image: the image.
        white: the value for white, which becomes 255.
        nodata: the value that the file declares for pixels without data, or an empty string.

    Raises:
        ImageError: the result would be nearly black, although the values in the file differ enough to show a picture.
    """
    from PIL import Image

    values = np.asarray(image).astype(np.uint32)
    darkest_16th = white // 16
    picture = _without_mark(values[~_is_no_data(values, white, nodata)], darkest_16th)
    dark = picture[picture <= darkest_16th]
    brightest_dark = int(dark.max(initial=0))
    if dark.size >= DARK_SHARE * picture.size and 255 * dark.std() > BLANK_STDDEV * brightest_dark:
        raise ImageError(_nearly_black(dark.size, values.size, brightest_dark, white))
    return Image.fromarray(((255 * values + white // 2) // white).astype(np.uint8))


def _is_no_data(values: np.ndarray, white: int, nodata: str) -> np.ndarray:
    """Return a mask of saturated pixels and missing data. Their values do not reveal the scale of an image."""
    no_data_values = [*NO_DATA_VALUES, white - 1, white]
    declared = nodata.strip(" \0")
    if declared.isdecimal():
        no_data_values.append(int(declared))
    is_no_data = np.isin(values, no_data_values)
    return is_no_data if is_no_data.mean() <= MAX_WHITE_SHARE else np.zeros_like(is_no_data)


def _without_mark(values: np.ndarray, threshold: int) -> np.ndarray:
    """Return the values without those above a threshold, if these are few and all equal."""
    bright = values[values > threshold]
    is_mark = 0 < bright.size <= MARK_SHARE * values.size and bright.min() == bright.max()
    return values[values <= threshold] if is_mark else values


def _refuse_dark_colours(image: Image.Image) -> None:
    """Reject 16-bit colour images that are nearly black because Pillow keeps only the high bytes.

    Raises:
        ImageError: the decoded image is nearly black.
    """
    levels = np.asarray(image)
    darkest_16th = 15
    dark = levels[levels <= darkest_16th]
    if dark.size < (1 - MAX_WHITE_SHARE) * levels.size:
        return
    no_data_bytes = [value >> 8 for value in NO_DATA_VALUES]
    picture = _without_mark(levels[~np.isin(levels, [*no_data_bytes, 255])], darkest_16th)
    brightest_dark = int(dark.max(initial=0))
    # a black and white mask has few levels and is valid, while a picture with too small a range of values has several
    # dark levels
    has_several_levels = 255 * dark.std() > BLANK_STDDEV * max(1, brightest_dark)
    is_all_dark = dark.size >= DARK_SHARE * levels.size
    if is_all_dark or (dark.size >= DARK_SHARE * picture.size and has_several_levels):
        raise ImageError(_nearly_black(dark.size, levels.size, 256 * brightest_dark + 255, 65535))


def _nearly_black(dark: int, total: int, brightest_dark: int, white: int) -> Fault:
    """Return the fault of an image that is nearly black when decoded."""
    if dark == total:
        return Fault("images.all_nearly_black", brightest_dark=brightest_dark, white=white)
    share = np.floor(1000 * dark / total) / 1000
    return Fault("images.nearly_black", share=share, brightest_dark=brightest_dark, white=white)


def _on_white(image: Image.Image, may_be_measured: bool) -> Image.Image:
    """Replace transparent pixels by white, or ignore the alpha band if it contains measured values.

    Raises:
        ImageError: almost nothing in the result would be visible.
    """
    from PIL import Image, ImageStat

    band = {"RGBA": "fourth band", "LA": "second band", "La": "second band"}.get(image.mode, "transparency")
    image = image.convert("LA") if image.mode == "La" else image
    image = image if image.mode == "RGBA" else image.convert("RGBA")
    alpha = image.getchannel("A")
    counts = alpha.histogram()
    # With real transparency, most visible pixels are opaque. Measured values are spread over the whole range
    if may_be_measured and 4 * counts[255] < sum(counts[1:]):
        return image.convert("RGB")
    composed = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    highest_alpha = max(value for value in range(256) if counts[value])
    stored = ImageStat.Stat(image)
    is_faint = highest_alpha < FAINT_ALPHA and (highest_alpha > 0 or max(stored.stddev[:3]) >= 1)
    is_mostly_hidden = stored.mean[3] < 128 and max(stored.stddev) > 8 * BLANK_STDDEV
    if is_faint or (is_mostly_hidden and max(ImageStat.Stat(composed).stddev) < BLANK_STDDEV):
        raise ImageError("images.blank", band=band, highest_alpha=highest_alpha)
    return composed
