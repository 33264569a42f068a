"""Open image files for all parts of the project.

The format is recognized by content. Images are returned upright, in RGB with 8 bits per channel.
"""

from __future__ import annotations

import hashlib
import io
import zlib
from pathlib import Path
from typing import IO, TYPE_CHECKING, NamedTuple

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

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
PNG_PIXELS = b"IDAT"  # type of the chunks with the compressed pixels
PNG_END = b"IEND"

# TIFF tags
BITS = 258
COLOR_MAP = 320
TILE_WIDTH = 322
TILE_LENGTH = 323
EXTRA_SAMPLES = 338
GDAL_NODATA = 42113

# EXIF tag of the orientation, and its values that swap width and height
ORIENTATION = 274
TURNED_ORIENTATIONS = (5, 6, 7, 8)

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
ARTEFACT_SHARE = 0.02


class ImageError(DataError):
    """An image file is missing, cannot be read, or is not the expected file."""


class ImageSize(NamedTuple):
    """Width and height of an image in pixels."""

    width: int
    height: int

    @property
    def area(self) -> int:
        """Number of pixels."""
        return self.width * self.height

    @property
    def aspect_ratio(self) -> float:
        """Longer side divided by the shorter side."""
        return max(self) / min(self)


def read_image_size(path: str | Path) -> ImageSize:
    """Return the size of the upright image in a file, from the file's header.

    Raises:
        ImageError: the file cannot be read, or is not an image in a supported format.
    """
    from PIL import Image, UnidentifiedImageError

    Image.init()
    image: Image.Image
    try:
        try:
            image = Image.open(path, formats=[kind for kind in FORMATS if kind in Image.OPEN])
        except UnidentifiedImageError:
            image = open_image(Path(path).read_bytes())  # may need a plugin
        with image:
            size = ImageSize(*image.size)
            # the method of PNG files would decode the pixels to find an orientation behind them
            is_turned = Image.Image.getexif(image).get(ORIENTATION) in TURNED_ORIENTATIONS
    except ImageError as error:
        raise ImageError(error.fault.at(path=str(path))) from error
    except Exception as error:  # see `load_image`
        raise ImageError("images.unreadable", path=str(path), cause=repr(error)) from error
    return ImageSize(size.height, size.width) if is_turned else size


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
    """Check that a file has the SHA-256 that its record contains.

    Raises:
        ImageError: the file has changed.
    """
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
    """Check a JPEG or PNG for damage that Pillow ignores.

    Return a JPEG decoded if possible, and other images unchanged.

    Args:
        image: an image as `open_image` returns it.
        data: the file's bytes.

    Raises:
        ImageError: the scan of a JPEG is damaged.
        OSError: the compressed pixels of a PNG are damaged. Pillow raises the same type if it notices the damage.
    """
    from PIL import Image
    from PIL.JpegImagePlugin import JpegImageFile

    if image.format == "PNG" and has_damaged_png_pixels(data):
        raise OSError("wrong checksum in the data stream of the pixels")
    if not isinstance(image, JpegImageFile):
        return image
    pixels, damage = decode_jpeg(data, image.mode)
    if damage:
        raise ImageError("images.damaged_jpeg", cause=damage)
    if pixels is None or pixels.shape[:2] != (image.height, image.width):
        return image
    decoded_image = Image.fromarray(pixels[..., 0] if image.mode == "L" else pixels)
    decoded_image.info = dict(image.info)  # keep the orientation and the colour profile
    decoded_image.format = image.format
    return decoded_image


def has_damaged_png_pixels(data: bytes) -> bool:
    """Return True if compressed pixels of a PNG file do not match their checksum (PNG specification, section 5.3).

    Pillow checks only the chunks in front of the pixels. It decodes some damaged pixels to wrong colours without an
    error. Truncated chunks have no checksum here, and Pillow rejects them.

    Args:
        data: the file's bytes.
    """
    offset = len(PNG_SIGNATURE)
    while offset + 12 <= len(data):
        chunk_type = data[offset + 4 : offset + 8]
        content_end = offset + 8 + int.from_bytes(data[offset : offset + 4], "big")
        next_offset = content_end + 4
        if next_offset > len(data) or chunk_type == PNG_END:
            return False
        # The checksum covers the type and the content of a chunk, but not its length
        if chunk_type == PNG_PIXELS:
            checksum = int.from_bytes(data[content_end:next_offset], "big")
            if zlib.crc32(memoryview(data)[offset + 4 : content_end]) != checksum:
                return True
        offset = next_offset
    return False


def decode_to_rgb(image: Image.Image, data: bytes) -> Image.Image:
    """Decode an image, reject damaged JPEG and PNG files, and return the image as `to_rgb` does.

    Args:
        image: an image as `open_image` returns it.
        data: the file's bytes.

    Raises:
        ImageError, OSError: for the same reasons as in `decode_strictly` and `to_rgb`.
    """
    checked_image = decode_strictly(image, data)
    return to_rgb(checked_image, may_overwrite=checked_image is not image)


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
    tile_pixels = tags.get(TILE_WIDTH, 1) * tags.get(TILE_LENGTH, 1)
    if tile_pixels > max_pixels:
        return Fault("images.tiles_too_large", value=tile_pixels, limit=max_pixels)
    padded_pixels = max(width, height) ** 2
    if padded_pixels <= max_pixels:
        return None
    return Fault("images.too_large", width=width, height=height, value=padded_pixels, limit=max_pixels)


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
        image = _paint_on_white(image, may_be_measured)
    if image.mode != "RGB":
        image = image.convert("RGB")
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
    is_no_data = _find_no_data(values, white, nodata)
    picture_values = _drop_artefact(values[~is_no_data], darkest_16th)
    dark_values = picture_values[picture_values <= darkest_16th]
    brightest_dark = int(dark_values.max(initial=0))
    is_dark = dark_values.size >= DARK_SHARE * picture_values.size
    if is_dark and 255 * dark_values.std() > BLANK_STDDEV * brightest_dark:
        raise ImageError(_fault_of_nearly_black(dark_values.size, values.size, brightest_dark, white))
    levels = (255 * values + white // 2) // white
    return Image.fromarray(levels.astype(np.uint8))


def _find_no_data(values: np.ndarray, white: int, nodata: str) -> np.ndarray:
    """Return a mask of saturated pixels and missing data. Their values do not reveal the scale of an image."""
    no_data_values = [*NO_DATA_VALUES, white - 1, white]
    declared_value = nodata.strip(" \0")
    if declared_value.isdecimal():
        no_data_values.append(int(declared_value))
    is_no_data = np.isin(values, no_data_values)
    return is_no_data if is_no_data.mean() <= MAX_WHITE_SHARE else np.zeros_like(is_no_data)


def _drop_artefact(values: np.ndarray, threshold: int) -> np.ndarray:
    """Return the values without those above a threshold, if these are few and all equal."""
    bright_values = values[values > threshold]
    is_rare = 0 < bright_values.size <= ARTEFACT_SHARE * values.size
    if is_rare and bright_values.min() == bright_values.max():
        return values[values <= threshold]
    return values


def _refuse_dark_colours(image: Image.Image) -> None:
    """Reject 16-bit colour images that are nearly black because Pillow keeps only the high bytes.

    Raises:
        ImageError: the decoded image is nearly black.
    """
    levels = np.asarray(image)
    darkest_16th = 15
    dark_levels = levels[levels <= darkest_16th]
    if dark_levels.size < (1 - MAX_WHITE_SHARE) * levels.size:
        return
    no_data_bytes = [value >> 8 for value in NO_DATA_VALUES]
    is_no_data = np.isin(levels, [*no_data_bytes, 255])
    picture_levels = _drop_artefact(levels[~is_no_data], darkest_16th)
    brightest_dark = int(dark_levels.max(initial=0))
    # A black and white mask has few levels and is valid, while a picture with too small a range of values has several
    # dark levels
    has_several_levels = 255 * dark_levels.std() > BLANK_STDDEV * max(1, brightest_dark)
    is_all_dark = dark_levels.size >= DARK_SHARE * levels.size
    is_picture_dark = dark_levels.size >= DARK_SHARE * picture_levels.size
    if is_all_dark or (is_picture_dark and has_several_levels):
        brightest_value = 256 * brightest_dark + 255
        raise ImageError(_fault_of_nearly_black(dark_levels.size, levels.size, brightest_value, 65535))


def _fault_of_nearly_black(dark_count: int, count: int, brightest_dark: int, white: int) -> Fault:
    """Return the fault of an image that is nearly black when decoded.

    Args:
        dark_count: number of dark values.
        count: number of all values.
        brightest_dark: the highest of the dark values.
        white: the value for white.
    """
    if dark_count == count:
        return Fault("images.all_nearly_black", brightest_dark=brightest_dark, white=white)
    share = np.floor(1000 * dark_count / count) / 1000
    return Fault("images.nearly_black", share=share, brightest_dark=brightest_dark, white=white)


def _paint_on_white(image: Image.Image, may_be_measured: bool) -> Image.Image:
    """Replace transparent pixels by white, or ignore the alpha band if it contains measured values.

    Raises:
        ImageError: almost nothing in the result would be visible.
    """
    from PIL import Image, ImageStat

    band = {"RGBA": "fourth band", "LA": "second band", "La": "second band"}.get(image.mode, "transparency")
    if image.mode == "La":
        image = image.convert("LA")  # Pillow cannot convert La to RGBA directly
    if image.mode != "RGBA":
        image = image.convert("RGBA")
    alpha = image.getchannel("A")
    counts = alpha.histogram()
    # With real transparency, most visible pixels are opaque. Measured values are spread over the whole range
    if may_be_measured and 4 * counts[255] < sum(counts[1:]):
        return image.convert("RGB")
    image_on_white = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    highest_alpha = max(value for value in range(256) if counts[value])
    statistics = ImageStat.Stat(image)
    is_faint = highest_alpha < FAINT_ALPHA and (highest_alpha > 0 or max(statistics.stddev[:3]) >= 1)
    is_mostly_hidden = statistics.mean[3] < 128 and max(statistics.stddev) > 8 * BLANK_STDDEV
    if is_faint or (is_mostly_hidden and max(ImageStat.Stat(image_on_white).stddev) < BLANK_STDDEV):
        raise ImageError("images.blank", band=band, highest_alpha=highest_alpha)
    return image_on_white
