"""Two images of a pair compared pixel by pixel: is there a change between them, and does it reach the model?

A re-encoding is recognised by repeating it: one image is saved as the other was (the other's JPEG tables, the WebP
quality that gives its length, GIF's palette; resized to its size first), and what then differs is the rest that no
re-encoding explains. Measured on photos, screenshots, rendered scenes and noise: for JPEG of quality 30 to 95, WebP 50
to 90, GIF and sizes from 0.55 to 1 the rest is 0, while an object of 5x5 pixels that differs by 40 levels leaves 12
levels in the mean of 8x8 pixels, and a thin line of 60 levels 6. A bound on the plain difference could not tell them
apart: JPEG of quality 50 alone changes such a mean by up to 12.

Comparisons are cached by the contents of both images beside the image cache. The cache changes no output.
"""

import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import polars as pl
from numpy.typing import NDArray
from PIL import Image, JpegImagePlugin

from m3diff.images.open import open_image, to_rgb
from m3diff.images.workers import worker_pool
from m3diff.records.files import write_atomic
from m3diff.records.progress import progress

# What a comparison can say. EQUAL and NOISE: no change. FAINT: one that is gone at the model's resolution
EQUAL = "equal"
NOISE = "noise"
FAINT = "faint"
CHANGED = "changed"

# Comparisons are cached under this name: another rule compares anew
RULE = f"Pillow {PIL.__version__}, re-encoding repeated, rest by windows, spread"

# Levels by which pixels may differ at the model's resolution before the change counts as visible there
FAINT_LEVELS = 8
# Share of the pixels that noise touches at least: a speck is local
SPREAD = 0.05
# JPEG below quality 30 and an image of half the size are visible changes
COARSEST_JPEG_STEP = 28
SMALLEST_FACTOR = 0.55
# Mean difference of 8x8 pixels that no re-encoding made in the measurements: 35 at most, by GIF
TOO_LARGE = 48

FILTERS = (
    Image.Resampling.LANCZOS,
    Image.Resampling.BICUBIC,
    Image.Resampling.BILINEAR,
    Image.Resampling.HAMMING,
    Image.Resampling.BOX,
)

# Fewer comparisons are made in this process: starting workers would take longer
WORTH_WORKERS = 200
SIDE = 4  # pixels of the smallest window
ROWS_AT_ONCE = 1024  # of two images that are subtracted, so that a large one takes little memory

CACHE = {"low": pl.Binary, "high": pl.Binary, "px": pl.Int64, "rule": pl.String, "likeness": pl.String}

Windows = NDArray[np.float32]  # [rows, columns, 3]: mean differences in Y, Cb and Cr


@dataclass(frozen=True)
class Bounds:
    """Largest differences, in levels, of a picture that only noise tells from another."""

    pixel: float
    mean_4x4: float
    mean_8x8: float
    mean_16x16: float
    mean_larger: float  # of every larger window, up to the whole picture: a change of light exceeds it


# Rounding, and JPEG of quality 95 without subsampling; a change of light by 2 levels is more
PLAIN_NOISE = Bounds(pixel=12, mean_4x4=2, mean_8x8=1.25, mean_16x16=1, mean_larger=1)
# Another encoder rounds some coefficients to the neighbouring step
REPEATED_NOISE = Bounds(pixel=24, mean_4x4=6, mean_8x8=2.5, mean_16x16=1.25, mean_larger=1)


@dataclass(frozen=True)
class Picture:
    """An image file with its decoded pixels."""

    rgb: Image.Image
    header: Image.Image  # as opened: format, tables, mode
    file_bytes: int

    @classmethod
    def load(cls, path: str) -> "Picture":
        data = Path(path).read_bytes()
        header = open_image(data)
        # the tables are read with the header, and decoding may drop them
        return cls(rgb=to_rgb(header), header=open_image(data), file_bytes=len(data))


def compare_pairs(pairs: pl.DataFrame, compare_px: int, cache: Path, stage: str) -> pl.Series:
    """Compare the images of each pair.

    Args:
        pairs: paths `before` and `after`, digests `before_sha256` and `after_sha256`; all images are sound.
        compare_px: longest side, in pixels, of the square that the model sees.
        cache: Parquet file, read and written anew; it may be missing or damaged.
        stage: who asks, for the progress line.

    Returns:
        EQUAL, NOISE, FAINT or CHANGED for each pair.
    """
    sides = ("before_sha256", "after_sha256")
    keyed = pairs.with_columns(low=pl.min_horizontal(sides), high=pl.max_horizontal(sides))
    cached = _load(cache)
    usable = cached.filter(px=compare_px, rule=RULE)
    distinct = keyed.filter(pl.col("low") != pl.col("high")).unique(["low", "high"], maintain_order=True)
    waiting = distinct.join(usable, on=["low", "high"], how="anti")
    if waiting.height:
        likeness = pl.Series(_compare_all(waiting, compare_px, stage), dtype=pl.String)
        fresh = waiting.select("low", "high", px=pl.lit(compare_px, pl.Int64), rule=pl.lit(RULE), likeness=likeness)
        usable = pl.concat([usable, fresh])
        _store(cache, pl.concat([cached, fresh]))
    joined = keyed.join(usable, on=["low", "high"], how="left", maintain_order="left")
    return joined.select(
        pl.when(pl.col("low") == pl.col("high")).then(pl.lit(EQUAL)).otherwise(pl.col("likeness")).alias("likeness")
    )["likeness"]


def _compare_all(pairs: pl.DataFrame, compare_px: int, stage: str) -> list[str]:
    tasks = [(before, after, compare_px) for before, after in pairs.select("before", "after").iter_rows()]

    def comparisons() -> Iterator[str]:
        if len(tasks) < WORTH_WORKERS:
            yield from map(_compare_task, tasks)
            return
        with worker_pool() as pool:
            yield from pool.map(_compare_task, tasks, chunksize=8)

    return list(progress(comparisons(), f"{stage} pairs", total=len(tasks), unit="pair"))


def _compare_task(task: tuple[str, str, int]) -> str:
    before, after, compare_px = task
    return compare_images(before, after, compare_px)


def _load(cache: Path) -> pl.DataFrame:
    try:
        return pl.read_parquet(cache).select(*CACHE).match_to_schema(CACHE)
    except (pl.exceptions.PolarsError, OSError):
        return pl.DataFrame(schema=CACHE)  # none, half written or of another version: it is only a cache


def _store(cache: Path, comparisons: pl.DataFrame) -> None:
    buffer = io.BytesIO()
    comparisons.unique(["low", "high", "px"], keep="last", maintain_order=True).write_parquet(buffer)
    write_atomic(cache, buffer.getvalue())


def compare_images(before: str, after: str, compare_px: int) -> str:
    """EQUAL pixels, NOISE, FAINT or CHANGED, for two sound image files whose thumbnails are alike."""
    first = Picture.load(before)
    second = Picture.load(after)
    if not _same_aspect(first.rgb.size, second.rgb.size):
        return CHANGED
    may_be_noise = True
    if first.rgb.size == second.rgb.size:
        windows = _differences(first.rgb, second.rgb)
        if windows.pixel == 0:
            return EQUAL
        may_be_noise = max(windows.means[1:]) <= TOO_LARGE
        is_spread = windows.touched >= SPREAD
        if (is_spread and windows.within(PLAIN_NOISE)) or _largest_difference(
            first.rgb, second.rgb, max(first.rgb.size)
        ) <= 1:
            return NOISE
    if may_be_noise and (_is_saved_anew(first, second) or _is_saved_anew(second, first)):
        return NOISE
    return FAINT if _largest_difference(first.rgb, second.rgb, compare_px) <= FAINT_LEVELS else CHANGED


def _same_aspect(first: tuple[int, int], second: tuple[int, int]) -> bool:
    """True if one size is the other times a factor, up to a pixel of rounding."""
    small, large = sorted((first, second))
    width = large[0] * small[1] / large[1]
    height = large[1] * small[0] / large[0]
    return abs(width - small[0]) <= 1 or abs(height - small[1]) <= 1


@dataclass(frozen=True)
class Differences:
    """Largest absolute difference of pixels, and of means over windows of 4x4, 8x8, 16x16, ... pixels."""

    pixel: float
    means: list[float]
    touched: float  # share of the pixels that differ

    def within(self, bounds: Bounds) -> bool:
        limits = [bounds.mean_4x4, bounds.mean_8x8, bounds.mean_16x16]
        limits += [bounds.mean_larger] * (len(self.means) - len(limits))
        return self.pixel <= bounds.pixel and all(
            mean <= limit for mean, limit in zip(self.means, limits, strict=False)
        )


def _differences(first: Image.Image, second: Image.Image) -> Differences:
    """Differences in luminance and both chromas. Windows overlap by half, so that an object lies within one."""
    largest = 0.0
    touched = 0
    strips: list[Windows] = []
    for top in range(0, first.height, ROWS_AT_ONCE):
        box = (0, top, first.width, min(top + ROWS_AT_ONCE, first.height))
        strip = [np.asarray(image.crop(box).convert("YCbCr"), dtype=np.int16) for image in (first, second)]
        difference = strip[0] - strip[1]
        largest = max(largest, float(np.abs(difference).max(initial=0)))
        touched += int(np.count_nonzero(difference.any(axis=2)))
        strips.append(_halved_twice(difference))
    blocks = np.concatenate(strips)
    means = [float(np.abs(blocks).max())]
    while min(blocks.shape[:2]) > 1:
        windows = (blocks[:-1, :-1] + blocks[1:, :-1] + blocks[:-1, 1:] + blocks[1:, 1:]) / 4
        means.append(float(np.abs(windows).max()))
        rows = blocks.shape[0] // 2 * 2
        columns = blocks.shape[1] // 2 * 2
        blocks = blocks[:rows, :columns].reshape(rows // 2, 2, columns // 2, 2, 3).mean(axis=(1, 3))
    means.append(float(np.abs(blocks.mean(axis=(0, 1))).max()))
    return Differences(pixel=largest, means=means, touched=touched / (first.width * first.height))


def _halved_twice(difference: NDArray[np.int16]) -> Windows:
    """Means over blocks of SIDE x SIDE pixels; the last row and column of blocks repeat the edge."""
    height, width = difference.shape[:2]
    padded = np.pad(difference, ((0, -height % SIDE), (0, -width % SIDE), (0, 0)), mode="edge")
    shape = (padded.shape[0] // SIDE, SIDE, padded.shape[1] // SIDE, SIDE, 3)
    return padded.reshape(shape).mean(axis=(1, 3), dtype=np.float32)


def _is_saved_anew(source: Picture, copy: Picture) -> bool:
    """True if `copy` is `source` resized by a small factor and saved in the format of `copy`."""
    resized = source.rgb.size != copy.rgb.size
    factor = min(copy.rgb.width, source.rgb.width) / max(copy.rgb.width, source.rgb.width)
    if resized and factor < SMALLEST_FACTOR:
        return False
    for resampling in FILTERS if resized else FILTERS[:1]:
        image = source.rgb.resize(copy.rgb.size, resampling) if resized else source.rgb
        saved = _saved_like(image, copy)
        if saved is None and not resized:
            return False
        if _differences(saved or image, copy.rgb).within(REPEATED_NOISE):
            return True
    return False


def _saved_like(image: Image.Image, copy: Picture) -> Image.Image | None:
    """The image after being saved as `copy` was; None for a format without loss and for one that is not repeated."""
    header = copy.header
    if header.mode == "L" and header.format == "JPEG":
        return None  # colours that are gone are a change
    if isinstance(header, JpegImagePlugin.JpegImageFile):
        tables = list(header.quantization.values())
        if tables[0][0] > COARSEST_JPEG_STEP or max(map(max, tables)) > 255:
            return None
        subsampling = JpegImagePlugin.get_sampling(header)
        options: dict[str, Any] = {"qtables": tables, "subsampling": max(subsampling, 0)}
        return _decoded(_encoded(image, "JPEG", **options))
    if header.format == "WEBP":
        return _decoded(_webp_of_length(image, copy.file_bytes))
    if header.format == "GIF":
        return _decoded(_encoded(image, "GIF"))
    return None


def _webp_of_length(image: Image.Image, length: int) -> bytes:
    """The image in WebP of the quality that gives `length` bytes, or nearly so: length grows with quality."""
    lowest = 30
    highest = 100
    best = b""
    while lowest <= highest:
        quality = (lowest + highest) // 2
        data = _encoded(image, "WEBP", quality=quality)
        best = data if abs(len(data) - length) < abs(len(best) - length) or not best else best
        if len(data) == length:
            break
        lowest = quality + 1 if len(data) < length else lowest
        highest = quality - 1 if len(data) > length else highest
    return best


def _encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def _decoded(data: bytes) -> Image.Image:
    return to_rgb(open_image(data))


def _largest_difference(first: Image.Image, second: Image.Image, compare_px: int) -> int:
    """The largest difference in a channel once both images are scaled to `compare_px`, or to the smaller one."""
    longest = min(compare_px, max(first.size), max(second.size))
    factor = longest / max(first.size)
    size = (max(1, round(first.width * factor)), max(1, round(first.height * factor)))
    small = [
        np.asarray(image if image.size == size else image.resize(size, Image.Resampling.BICUBIC), dtype=np.int16)
        for image in (first, second)
    ]
    return int(np.abs(small[0] - small[1]).max())
