"""Make the images of a page: small WebP images, embedded or in a folder, shown only if their licence permits it."""

import base64
import hashlib
import io
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from m3diff.datasets.spec import DatasetSpec, check_licence
from m3diff.images.open import load_image
from m3diff.images.saliency import draw_outlines
from m3diff.records.errors import DataError
from m3diff.records.machine import usable_cpus
from m3diff.records.sample import ImageRef
from m3diff.scoring.pairs import EvalPair

MB = 1_000_000
MAX_PX = 384  # maximum length of the longer side
BASE64 = 4 / 3  # bytes of text per byte of an embedded image


class ImageRights(NamedTuple):
    """Whether a dataset's licence permits showing its images.

    note: condition under which the images may be shown, or reason why they may not be shown. None if they may be shown
        without a condition.
    """

    may_show: bool
    note: str | None


def find_image_rights(spec: DatasetSpec) -> ImageRights:
    """Return whether the licence of a dataset permits showing its images, and the condition or reason."""
    try:
        return ImageRights(True, check_licence(spec, "show"))
    except DataError:
        return ImageRights(False, f"{spec.licence.name}: {spec.licence.show.reason}")


def link_images(images: Iterable[bytes], folder: Path, embedded_bytes: int) -> dict[bytes, str]:
    """Return the URL of each WebP image for the page.

    If all images together add at most `embedded_bytes` bytes to the page, they are embedded as data URLs. Otherwise
    they are written to `folder`. Images of an earlier page are removed from the folder.
    """
    for old_image in folder.glob("*.webp"):
        old_image.unlink()
    distinct_images = set(images)
    if BASE64 * sum(map(len, distinct_images)) <= embedded_bytes:
        return {image: "data:image/webp;base64," + base64.b64encode(image).decode() for image in distinct_images}
    folder.mkdir(parents=True, exist_ok=True)
    links = {}
    for image in distinct_images:
        name = f"{hashlib.sha256(image).hexdigest()[:24]}.webp"
        (folder / name).write_bytes(image)
        links[image] = f"{folder.name}/{name}"
    return links


def load_small(reference: ImageRef) -> Image.Image:
    """Load an image upright, in RGB, and with a longer side of at most `MAX_PX` pixels.

    Raises:
        ImageError: the file is missing, is not an image, or has another digest.
    """
    image = load_image(reference.uri, reference.sha256)
    image.thumbnail((MAX_PX, MAX_PX), Image.Resampling.LANCZOS)
    return image


def encode_webp(image: Image.Image) -> bytes:
    """Encode an image as WebP."""
    buffer = io.BytesIO()
    image.save(buffer, "WEBP", quality=88, method=4)
    return buffer.getvalue()


def read_saliency(path: Path) -> dict[str, np.ndarray]:
    """Read predict's saliency maps: arrays [rows, columns] by pair id, each with the sum 1."""
    with np.load(path) as arrays:
        maps = arrays["maps"].astype(np.float32)
        return {str(pair_id): saliency for pair_id, saliency in zip(arrays["ids"], maps, strict=True)}


class DrawnImages(NamedTuple):
    """The images of a record, encoded as WebP.

    images: no image, one image, or the image before and the image after.
    outlined: the last image with the outlines of the saliency map. None if there is no map.
    """

    images: list[bytes]
    outlined: bytes | None


def draw_images(
    pairs: Iterable[EvalPair], rights: Mapping[str, ImageRights], saliency: Mapping[str, np.ndarray]
) -> Iterator[DrawnImages | None]:
    """Yield the images of each record, in order. Yield None for a record whose licence does not permit showing them.

    Args:
        rights: image rights by dataset.
        saliency: saliency maps by pair id.

    Raises:
        DataError: an image is missing or changed since ingest.
    """

    def draw(pair: EvalPair) -> DrawnImages | None:
        if not rights[pair.dataset].may_show:
            return None
        images = [load_small(image) for image in pair.images]
        outlined = None
        if images and pair.id in saliency:
            outlined = encode_webp(draw_outlines(images[-1], saliency[pair.id]))
        return DrawnImages(images=[encode_webp(image) for image in images], outlined=outlined)

    with ThreadPoolExecutor(usable_cpus()) as pool:
        yield from pool.map(draw, pairs)
