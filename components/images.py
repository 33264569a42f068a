"""Image files as every part of the project opens them: by their content, upright, in RGB of 8 bits a channel."""

from __future__ import annotations

import hashlib
import io
from pathlib import Path
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from PIL import Image

HEIF = (b"heic", b"heix", b"hevc", b"heim", b"heis", b"mif1", b"msf1")
"""Brands of files that need a plugin; iPhones write them."""


class ImageError(ValueError):
    """An image file that is missing, cannot be read, or is not the one that was meant; names it with a remedy."""


def load_image(source: str | Path | IO[bytes], sha256: bytes | None = None) -> Image.Image:
    """An image file as `to_rgb` makes it. Its bytes are read once.

    Args:
        source: a path, or a stream of the file's bytes.
        sha256: the digest (32 bytes) that the file must have.

    Raises:
        ImageError: unreadable, or the digest differs.
    """
    name = str(source) if isinstance(source, str | Path) else "image"
    try:
        data = Path(source).read_bytes() if isinstance(source, str | Path) else source.read()
    except OSError as error:
        raise _unreadable(name, error) from error
    if sha256 is not None:
        _check_digest(name, data, sha256)
    return _decode(name, data)


def open_image(data: bytes) -> Image.Image:
    """The file of these bytes, known by its header; no pixel is decoded yet.

    Raises:
        UnidentifiedImageError: of no known format; or HEIC, and the plugin is not there: names it.
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
        return Image.open(io.BytesIO(data))
    except UnidentifiedImageError:  # its message holds a memory address
        raise UnidentifiedImageError("is of no known image format") from None


def to_rgb(image: Image.Image) -> Image.Image:
    """The first frame in RGB of 8 bits, turned as its EXIF says. 16 bits are scaled, what is transparent is white.

    Raises:
        ValueError: its numbers have no known scale.
    """
    from PIL import Image, ImageOps

    image = ImageOps.exif_transpose(image)
    if image.mode in ("I", "F"):
        kind = "32-bit integers" if image.mode == "I" else "floating-point numbers"
        raise ValueError(f"its pixels are {kind}, whose black and white are not known; save it with 8 or 16 bits")
    if image.mode.startswith("I;16"):
        import numpy as np

        image = Image.fromarray(((np.asarray(image).astype(np.uint32) + 128) // 257).astype(np.uint8))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")


def _decode(name: str, data: bytes) -> Image.Image:
    from PIL import Image

    try:
        with open_image(data) as image:
            return to_rgb(image)
    except (OSError, EOFError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise _unreadable(name, error) from error


def _unreadable(name: str, error: Exception) -> ImageError:
    return ImageError(f"{name}: cannot be read as an image ({error}); restore it or save it anew")


def _check_digest(name: str, data: bytes, want: bytes) -> None:
    if (got := hashlib.sha256(data).digest()) != want:
        raise ImageError(
            f"{name}: sha256 {got.hex()[:12]} but the samples say {want.hex()[:12]}; "
            "the file changed since ingest; run `dvc repro`"
        )
