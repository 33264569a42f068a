"""Enlarge small images without blur, so that people can see them."""

from PIL import Image

READABLE_PX = 512  # minimum length of the shorter side of an image that people can see well, in pixels
MAX_ENLARGED_PX = 2048  # maximum length of the longer side of an enlarged image, in pixels


def enlarge(image: Image.Image, longest_px: int = MAX_ENLARGED_PX) -> Image.Image:
    """Enlarge an image by repeating its pixels, so that its shorter side has at least READABLE_PX pixels.

    Args:
        image: the image. A large image is returned unchanged.
        longest_px: maximum length of the longer side, in pixels. It limits the enlargement of long strips.
    """
    readable_factor = -(-READABLE_PX // min(image.size))  # rounded up
    largest_factor = longest_px // max(image.size)
    factor = max(1, min(readable_factor, largest_factor))
    if factor == 1:
        return image
    return image.resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST)
