"""Read an image file once and check it strictly, in a worker process: this module imports nothing heavy."""

import hashlib
import os
import stat
import warnings
from typing import NamedTuple

import PIL
from PIL import Image

from m3diff.images.open import ImageError, open_image, to_rgb, too_large

OK = "ok"
DECODER = f"Pillow {PIL.__version__}, listed formats, RGB by its bands, thumbnail 8x8 Hamming"
"""Verdicts are cached under this name: another decoder judges anew."""

PNG_END = b"\0\0\0\0IEND\xaeB`\x82"
"""The whole last chunk: Pillow accepts a file in which only this checksum is missing."""

known_digests: frozenset[bytes] = frozenset()


class ImageCheck(NamedTuple):
    """The result of one reading. `verdict` is OK or what is wrong; None where the content is in the cache."""

    path: str
    digest: bytes | None  # sha256 of the bytes; None where they could not be read
    verdict: str | None
    format: str | None = None
    width: int | None = None
    height: int | None = None
    thumb: bytes | None = None  # 8x8 grey levels, row by row


def start_worker(known: frozenset[bytes]) -> None:
    """Tell a fresh worker which contents need no second decoding."""
    global known_digests
    known_digests = known
    Image.MAX_IMAGE_PIXELS = None  # the limit is ours, checked before a pixel is decoded
    warnings.simplefilter("ignore")


def check_image(path: str, max_pixels: int) -> ImageCheck:
    """Read, hash and, for content not yet known, decode every pixel. Never raises for a bad file."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            return ImageCheck(path, None, "is no regular file")
        with open(path, "rb") as file:
            data = file.read()
    except OSError as error:
        return ImageCheck(path, None, f"cannot be read: {error.strerror}")
    digest = hashlib.sha256(data).digest()
    return ImageCheck(path, digest, None) if digest in known_digests else _decode(path, digest, data, max_pixels)


def check_batch(paths: list[str], known: frozenset[bytes], max_pixels: int) -> list[ImageCheck]:
    """Check the images of a cluster's task, whose workers start without `start_worker`."""
    start_worker(known)
    return [check_image(path, max_pixels) for path in paths]


def _decode(path: str, digest: bytes, data: bytes, max_pixels: int) -> ImageCheck:
    """PNG: the checksum of every chunk, then all pixels; others: all pixels. A GIF is judged by its first frame."""
    if not data:
        return ImageCheck(path, digest, "is empty (0 bytes)")
    kind = width = height = None
    try:
        with open_image(data) as image:
            kind, (width, height) = image.format, image.size
            if fault := too_large(image, max_pixels):
                return ImageCheck(path, digest, fault, kind, width, height)
            if kind == "PNG":
                image.verify()
                if PNG_END not in data:
                    return ImageCheck(path, digest, "does not decode: PNG ends before its last chunk")
        with open_image(data) as image:
            thumb = to_rgb(image).convert("L").resize((8, 8), Image.Resampling.HAMMING).tobytes()
    except ImageError as error:
        return ImageCheck(path, digest, str(error), kind, width, height)
    except Exception as error:  # Pillow raises some ten kinds for broken files, SyntaxError and struct.error among them
        told = (str(error) or type(error).__name__).replace("\n", " ")
        return ImageCheck(path, digest, f"does not decode: {told}"[:200])
    return ImageCheck(path, digest, OK, kind, width, height, thumb)
