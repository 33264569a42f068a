"""The images of the page: inside it while they are few, else files of the folder `images` beside it."""

import base64
import hashlib
import io
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from PIL import Image

from m3diff.datasets.spec import DatasetSpec, check_licence
from m3diff.images.saliency import outlined
from m3diff.records.errors import DataError
from m3diff.scoring.pairs import EvalPair
from m3diff.stages.evaluate.report.figures import SaliencyMaps, load_small

BASE64 = 4 / 3
"""Bytes in the page to a byte of an image."""


class ImageRights(NamedTuple):
    """Whether the licence of a dataset lets its images stand on the page, and what it says; None: no condition."""

    show: bool
    note: str | None


def rights_of(spec: DatasetSpec) -> ImageRights:
    try:
        condition = check_licence(spec, "show")
    except DataError:
        return ImageRights(False, f"{spec.licence.name}: {spec.licence.show.reason}")
    return ImageRights(True, condition)


class ImageStore:
    """Images by the digest of their content. Those of an earlier page are taken from the folder at once.

    Args:
        folder: `images` beside the page.
        limit: bytes of images that the page may hold; of more, all are files of the folder.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder, self.limit = folder, limit
        self.held: dict[str, bytes] = {}
        self.size = 0.0
        self.is_inside = True
        for old in folder.glob("*.webp"):
            old.unlink()

    def add(self, content: bytes) -> str:
        """Keep a WebP image; returns its name for `url`."""
        name = hashlib.sha256(content).hexdigest()[:24]
        if not self.is_inside:
            self._write(name, content)
        elif name not in self.held:
            self.held[name] = content
            self.size += BASE64 * len(content)
            if self.size > self.limit:
                self._move_out()
        return name

    def url(self, name: str) -> str:
        """Where the page finds an image, once all are added."""
        if self.is_inside:
            return "data:image/webp;base64," + base64.b64encode(self.held[name]).decode()
        return f"{self.folder.name}/{name}.webp"

    def _move_out(self) -> None:
        self.is_inside = False
        self.folder.mkdir(parents=True, exist_ok=True)
        for name, content in self.held.items():
            self._write(name, content)
        self.held.clear()

    def _write(self, name: str, content: bytes) -> None:
        (self.folder / f"{name}.webp").write_bytes(content)


class PairImages(NamedTuple):
    """WebP files; `saliency` is the after-image with the outlines of its map, None where there is none."""

    before: bytes
    after: bytes
    saliency: bytes | None


def draw_images(
    pairs: Iterable[EvalPair], rights: Mapping[str, ImageRights], saliency: SaliencyMaps | None
) -> Iterator[PairImages | None]:
    """The images of each pair in order, several drawn at once; None where the licence does not let them be shown.

    Raises:
        DataError: an image is missing or changed since ingest.
    """

    def draw(pair: EvalPair) -> PairImages | None:
        return draw_pair(pair, saliency) if rights[pair.dataset].show else None

    with ThreadPoolExecutor() as pool:
        yield from pool.map(draw, pairs)


def draw_pair(pair: EvalPair, saliency: SaliencyMaps | None) -> PairImages:
    after = load_small(pair.after, pair.after_sha256)
    grid = saliency.of(pair.id) if saliency else None
    before = load_small(pair.before, pair.before_sha256)
    return PairImages(as_webp(before), as_webp(after), None if grid is None else as_webp(outlined(after, grid)))


def as_webp(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "WEBP", quality=88, method=4)
    return buffer.getvalue()
