"""What changes a pair while it trains and leaves its meaning alone: a Gaussian blur and JPEG compression.

Both work on the stacked picture, as the authors' blur does, so that both images of a pair are changed alike and no
difference is made between them. Which pairs, and how much, follows from the random numbers that training hands over.
"""

import io

import numpy as np

from m3diff.models.blip2idc.settings import Augment


def augmented(augment: Augment, pair: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """A pair of prepared images, uint8 [2, rows, columns, 3], as it trains."""
    is_blurred, is_compressed = rng.random(2) < (augment.blur, augment.jpeg)
    sigma, quality = rng.uniform(*augment.sigma), int(rng.integers(*augment.quality, endpoint=True))
    picture = pair.reshape(-1, *pair.shape[2:])
    if is_blurred:
        picture = blurred(picture, sigma)
    if is_compressed:
        picture = compressed(picture, quality)
    return picture.reshape(pair.shape)


def blurred(picture: np.ndarray, sigma: float) -> np.ndarray:
    """uint8 [rows, columns, 3] through a Gaussian of 3 x 3 pixels, mirrored at the edges."""
    beside = np.exp(-0.5 / sigma**2)
    middle, beside = 1 / (1 + 2 * beside), beside / (1 + 2 * beside)
    framed = np.pad(picture.astype(np.float64), [(1, 1), (1, 1), (0, 0)], mode="reflect")
    rows = middle * framed[1:-1] + beside * (framed[:-2] + framed[2:])
    smooth = middle * rows[:, 1:-1] + beside * (rows[:, :-2] + rows[:, 2:])
    return np.rint(smooth).astype(np.uint8)


def compressed(picture: np.ndarray, quality: int) -> np.ndarray:
    """uint8 [rows, columns, 3] as a JPEG file of this quality gives it back."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(picture).save(file, "JPEG", quality=quality)
    return np.asarray(Image.open(file, formats=["JPEG"]).convert("RGB"))
