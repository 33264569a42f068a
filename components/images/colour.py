"""Convert colours from a file's ICC profile to sRGB, the colour space that models and web pages assume."""

from __future__ import annotations

import io
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from PIL import Image

COLOUR_SPACES = {"L": "GRAY", "RGB": "RGB", "CMYK": "CMYK"}  # Pillow's mode -> colour space of a profile
MODE_OF_COLOURS = {"P": "RGB", "PA": "RGB", "RGBA": "RGB", "LA": "L"}  # mode -> mode without palette and alpha

# If a profile does not change any colour by more levels than this, it is treated as sRGB, and the pixels are kept.
# Programs round the values in profiles differently, which changes colours by 1 or 2 levels
SAME_COLOUR_LEVELS = 2

GRID_LEVELS = 6  # levels per channel in the grid of colours that is used to compare a profile with sRGB


def to_srgb(image: Image.Image) -> Image.Image:
    """Convert the colours of an image from its ICC profile to sRGB. Transparency is kept.

    The image is returned unchanged if it has no profile or its profile is sRGB. A profile that is broken or does not
    match the colour space of the pixels is ignored, as in image viewers.
    """
    profile = image.info.get("icc_profile")
    mode = MODE_OF_COLOURS.get(image.mode, image.mode)
    if not isinstance(profile, bytes) or mode not in COLOUR_SPACES:
        return image
    transform = _transform_to_srgb(profile, mode)
    if transform is None:
        return image
    alpha = None
    if image.has_transparency_data:
        image = image.convert("LA" if mode == "L" else "RGBA")
        alpha = image.getchannel("A")
    colours = image if image.mode == mode else image.convert(mode)
    srgb_image: Image.Image = transform.apply(colours)
    if alpha is not None:
        srgb_image.putalpha(alpha)
    return srgb_image


@lru_cache(maxsize=16)
def _transform_to_srgb(profile: bytes, mode: str) -> Any:
    """Return Pillow's transform from a profile to sRGB, or None if no transform is needed or possible.

    No transform is needed if the profile is practically sRGB. It is not possible if the profile cannot be used.
    """
    from PIL import ImageCms

    try:
        file_profile = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        if file_profile.profile.xcolor_space.strip() != COLOUR_SPACES[mode]:
            return None
        srgb_profile = ImageCms.createProfile("sRGB")
        transform = ImageCms.buildTransform(file_profile, srgb_profile, mode, "RGB")
        if mode == "CMYK":
            return transform
        colours = _test_colours(mode)
        srgb_values = np.asarray(transform.apply(colours), dtype=int)
        values = np.asarray(colours.convert("RGB"), dtype=int)
        difference = srgb_values - values
    except (ImageCms.PyCMSError, OSError, TypeError, ValueError):
        return None
    return transform if np.abs(difference).max() > SAME_COLOUR_LEVELS else None


def _test_colours(mode: str) -> Image.Image:
    """Return the colours that are used to compare a profile with sRGB.

    For the mode "L", these are all grey levels. For other modes, a grid of RGB colours is added.
    """
    from PIL import Image

    grey_levels = np.arange(256, dtype=np.uint8)
    if mode == "L":
        return Image.fromarray(grey_levels[None])
    greys = grey_levels[:, None].repeat(3, axis=1)
    levels = np.linspace(0, 255, GRID_LEVELS).astype(np.uint8)
    grid = np.stack(np.meshgrid(levels, levels, levels), axis=-1).reshape(-1, 3)
    colours = np.concatenate([greys, grid])
    return Image.fromarray(colours[None])  # one row of pixels
