"""Colours by the profile that a file carries (ICC), converted to sRGB, which models and pages take colours for."""

from __future__ import annotations

import io
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from PIL import Image

COLOUR_SPACES = {"L": "GRAY", "RGB": "RGB", "CMYK": "CMYK"}  # of a profile, by the mode of what it describes
COLOURS_OF = {"P": "RGB", "PA": "RGB", "RGBA": "RGB", "LA": "L"}  # the mode without palette and alpha

# A profile that moves no colour by more levels than this is sRGB under one of its many names: its pixels stay as they
# are. Writers round the colorants differently, which moves colours by 1 or 2 levels.
SAME_COLOUR = 2

STEPS = 6  # levels of each channel in the grid of colours by which a profile is compared with sRGB


def to_srgb(image: Image.Image) -> Image.Image:
    """The image with its colours converted from its own profile to sRGB; alpha stays.

    The same image if it has no profile, one that is sRGB, or one that cannot be used: broken, or of another colour
    space than the pixels. Viewers ignore those, too.
    """
    profile = image.info.get("icc_profile")
    mode = COLOURS_OF.get(image.mode, image.mode)
    if not isinstance(profile, bytes) or mode not in COLOUR_SPACES:
        return image
    transform = _transform(profile, mode)
    if transform is None:
        return image
    alpha = None
    if image.has_transparency_data:
        image = image.convert("LA" if mode == "L" else "RGBA")
        alpha = image.getchannel("A")
    converted: Image.Image = transform.apply(image if image.mode == mode else image.convert(mode))
    if alpha is not None:
        converted.putalpha(alpha)
    return converted


@lru_cache(maxsize=16)
def _transform(profile: bytes, mode: str) -> Any:
    """Pillow's transform of a profile's colours to sRGB; None if there is nothing to do, or no way to do it."""
    from PIL import ImageCms

    try:
        own = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        if own.profile.xcolor_space.strip() != COLOUR_SPACES[mode]:
            return None
        srgb = ImageCms.createProfile("sRGB")
        transform = ImageCms.buildTransform(own, srgb, mode, "RGB")
        if mode == "CMYK":
            return transform
        probe = _probe(mode)
        moved = np.asarray(transform.apply(probe), dtype=int) - np.asarray(probe.convert("RGB"), dtype=int)
    except (ImageCms.PyCMSError, OSError, TypeError, ValueError):
        return None
    return transform if np.abs(moved).max() > SAME_COLOUR else None


def _probe(mode: str) -> Image.Image:
    """Colours by which a profile is compared with sRGB: every level of grey, and a grid of RGB."""
    from PIL import Image

    greys = np.arange(256, dtype=np.uint8)
    if mode == "L":
        return Image.fromarray(greys[None])
    levels = np.linspace(0, 255, STEPS).astype(np.uint8)
    grid = np.stack(np.meshgrid(levels, levels, levels), axis=-1).reshape(-1, 3)
    return Image.fromarray(np.concatenate([greys[:, None].repeat(3, axis=1), grid])[None])
