"""Image files as every model family takes them, known by their content."""

from __future__ import annotations

import hashlib
import io
from pathlib import Path
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from PIL import Image


class ImageError(ValueError):
    """An image file that is missing, cannot be read, or is not the one that was meant; names it with a remedy."""


def load_image(source: str | Path | IO[bytes], sha256: bytes | None = None) -> Image.Image:
    """An image file as upright RGB: the first frame, turned as its EXIF says. Its bytes are read once.

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


def _decode(name: str, data: bytes) -> Image.Image:
    from PIL import Image, ImageOps

    try:
        with Image.open(io.BytesIO(data)) as image:
            return ImageOps.exif_transpose(image).convert("RGB")
    except (OSError, EOFError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise _unreadable(name, error) from error


def _unreadable(name: str, error: Exception) -> ImageError:
    return ImageError(f"{name}: cannot be read as an image ({error}); run `m3diff validate` again")


def _check_digest(name: str, data: bytes, want: bytes) -> None:
    if (got := hashlib.sha256(data).digest()) != want:
        raise ImageError(
            f"{name}: sha256 {got.hex()[:12]} but the samples say {want.hex()[:12]}; "
            "the file changed since ingest; run `dvc repro`"
        )
