"""Compare the two images of a pair, to find out whether there is a change and whether the model can see it.

Re-encoding is recognized by repeating it: one image is resized to the size of the other image and saved like the other
image: with the same JPEG tables, with the WebP quality that gives the same file size, or with a GIF palette. A
difference that remains is a change. The remaining difference was measured for photos, screenshots, rendered scenes and
noise. It is 0 for JPEG quality from 30 to 95, WebP quality from 50 to 90, GIF and scale factors from 0.55 to 1. For
real changes, it is larger: in the mean of 8x8 pixels, 12 levels for an object of 5x5 pixels that differs by 40 levels,
and 6 levels for a thin line that differs by 60 levels. A limit on the difference before repeating the encoding could
not separate the two cases, because JPEG of quality 50 alone changes such a mean by up to 12 levels.

Results are cached by the contents of both images, in a file next to the image cache. The cache does not change any
output.
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

# Results of a comparison
EQUAL = "equal"  # no change: all pixels are equal
NOISE = "noise"  # no change: one image is a re-encoded copy of the other
FAINT = "faint"  # a change that is invisible at the model's resolution
CHANGED = "changed"

# Part of the cache's key, because results of other comparison rules must not be used
RULE = f"Pillow {PIL.__version__}, re-encoding repeated, rest by windows, spread"

# A change is visible to the model if any pixel differs by more levels than this at the model's resolution
FAINT_LEVELS = 8
# Re-encoding changes at least this share of the pixels. A difference in fewer pixels is a real change, such as a speck
MIN_NOISE_SHARE = 0.05
# A JPEG with a larger first quantization step than this has a quality below 30. Such a low quality is a visible change,
# and so is scaling to half the size
COARSEST_JPEG_STEP = 28
SMALLEST_FACTOR = 0.55
# Re-encoding does not change a mean of 8x8 pixels by more than this. The largest measured change is 35, by GIF
MAX_NOISE_MEAN = 48

FILTERS = (
    Image.Resampling.LANCZOS,
    Image.Resampling.BICUBIC,
    Image.Resampling.BILINEAR,
    Image.Resampling.HAMMING,
    Image.Resampling.BOX,
)

# Below this number, pairs are compared in this process, because starting workers would take longer
MIN_PAIRS_FOR_WORKERS = 200
WINDOW_PX = 4  # side of the smallest window
STRIP_ROWS = 1024  # number of pixel rows that are subtracted at once, which limits the memory for large images

CACHE = {"low": pl.Binary, "high": pl.Binary, "px": pl.Int64, "rule": pl.String, "likeness": pl.String}

WindowMeans = NDArray[np.float32]  # [rows, columns, 3]: mean differences in Y, Cb and Cr


@dataclass(frozen=True)
class Bounds:
    """Maximum differences, in levels, between two images that differ only by noise.

    Attributes:
        pixel: maximum difference of a single pixel.
        mean_4x4: maximum difference of the mean of a window of 4x4 pixels.
        mean_8x8: maximum difference of the mean of a window of 8x8 pixels.
        mean_16x16: maximum difference of the mean of a window of 16x16 pixels.
        mean_larger: maximum difference of the mean of any larger window, up to the whole image. A change of light
            exceeds this limit.
    """

    pixel: float
    mean_4x4: float
    mean_8x8: float
    mean_16x16: float
    mean_larger: float


# Rounding and JPEG of quality 95 without subsampling stay within these bounds. A change of light by 2 levels exceeds
# them
PLAIN_NOISE = Bounds(pixel=12, mean_4x4=2, mean_8x8=1.25, mean_16x16=1, mean_larger=1)
# Bounds after repeating an encoding. They are wider, because another encoder rounds some coefficients to the
# neighbouring step
REPEATED_NOISE = Bounds(pixel=24, mean_4x4=6, mean_8x8=2.5, mean_16x16=1.25, mean_larger=1)


@dataclass(frozen=True)
class Picture:
    """A decoded image file.

    Attributes:
        rgb: the pixels.
        header: the opened image, which is not decoded. It has the format, quantization tables and mode of the file.
        file_bytes: size of the file, in bytes.
    """

    rgb: Image.Image
    header: Image.Image
    file_bytes: int

    @classmethod
    def load(cls, path: str) -> "Picture":
        """Read and decode a file."""
        data = Path(path).read_bytes()
        # Open the image twice, because decoding may discard the tables in its header
        return cls(rgb=to_rgb(open_image(data)), header=open_image(data), file_bytes=len(data))


def compare_pairs(pairs: pl.DataFrame, compare_px: int, cache: Path, stage: str) -> pl.Series:
    """Compare the images of each pair.

    Args:
        pairs: table with the paths `before` and `after` and the digests `before_sha256` and `after_sha256`. All images
            must be valid.
        compare_px: side of the square image that the model sees, in pixels.
        cache: Parquet file that caches results. The file is read and then replaced. It may be missing or damaged.
        stage: name of the stage, for the progress line.

    Returns:
        EQUAL, NOISE, FAINT or CHANGED for each pair, in the order of the pairs.
    """
    digests = ("before_sha256", "after_sha256")
    pairs = pairs.with_columns(low=pl.min_horizontal(digests), high=pl.max_horizontal(digests))
    cached_results = _load_cache(cache)
    results = cached_results.filter(px=compare_px, rule=RULE)
    has_same_content = pl.col("low") == pl.col("high")
    distinct_pairs = pairs.filter(~has_same_content).unique(["low", "high"], maintain_order=True)
    new_pairs = distinct_pairs.join(results, on=["low", "high"], how="anti")
    if new_pairs.height:
        likeness = pl.Series(_compare_in_parallel(new_pairs, compare_px, stage), dtype=pl.String)
        new_results = new_pairs.select(
            "low", "high", px=pl.lit(compare_px, pl.Int64), rule=pl.lit(RULE), likeness=likeness
        )
        results = pl.concat([results, new_results])
        _store_cache(cache, pl.concat([cached_results, new_results]))
    pairs_with_result = pairs.join(results, on=["low", "high"], how="left", maintain_order="left")
    likeness_of_pair = pl.when(has_same_content).then(pl.lit(EQUAL)).otherwise(pl.col("likeness"))
    return pairs_with_result.select(likeness=likeness_of_pair)["likeness"]


def _compare_in_parallel(pairs: pl.DataFrame, compare_px: int, stage: str) -> list[str]:
    """Return the result for each pair, in order. If there are only a few pairs, compare them in this process."""
    tasks = [(before, after, compare_px) for before, after in pairs.select("before", "after").iter_rows()]

    def comparisons() -> Iterator[str]:
        if len(tasks) < MIN_PAIRS_FOR_WORKERS:
            yield from map(_compare_task, tasks)
            return
        with worker_pool() as pool:
            yield from pool.map(_compare_task, tasks, chunksize=8)

    return list(progress(comparisons(), f"{stage} pairs", total=len(tasks), unit="pair"))


def _compare_task(task: tuple[str, str, int]) -> str:
    before, after, compare_px = task
    return compare_images(before, after, compare_px)


def _load_cache(cache: Path) -> pl.DataFrame:
    try:
        return pl.read_parquet(cache).select(*CACHE).match_to_schema(CACHE)
    except (pl.exceptions.PolarsError, OSError):
        # Ignore a missing, truncated or outdated cache, because the images can be compared again
        return pl.DataFrame(schema=CACHE)


def _store_cache(cache: Path, comparisons: pl.DataFrame) -> None:
    buffer = io.BytesIO()
    comparisons.unique(["low", "high", "px"], keep="last", maintain_order=True).write_parquet(buffer)
    write_atomic(cache, buffer.getvalue())


def compare_images(before: str, after: str, compare_px: int) -> str:
    """Return EQUAL, NOISE, FAINT or CHANGED for two valid image files with similar thumbnails.

    Args:
        before: path of the before image.
        after: path of the after image.
        compare_px: side of the square image that the model sees, in pixels.
    """
    before_picture = Picture.load(before)
    after_picture = Picture.load(after)
    before_rgb = before_picture.rgb
    after_rgb = after_picture.rgb
    if not _have_same_aspect(before_rgb.size, after_rgb.size):
        return CHANGED
    may_be_noise = True
    if before_rgb.size == after_rgb.size:
        differences = _compute_differences(before_rgb, after_rgb)
        if differences.pixel == 0:
            return EQUAL
        is_spread = differences.changed_share >= MIN_NOISE_SHARE
        if is_spread and differences.are_within(PLAIN_NOISE):
            return NOISE
        if _largest_difference_at(before_rgb, after_rgb, max(before_rgb.size)) <= 1:
            return NOISE
        may_be_noise = max(differences.means[1:]) <= MAX_NOISE_MEAN
    if may_be_noise and (_is_resaved(before_picture, after_picture) or _is_resaved(after_picture, before_picture)):
        return NOISE
    return FAINT if _largest_difference_at(before_rgb, after_rgb, compare_px) <= FAINT_LEVELS else CHANGED


def _have_same_aspect(size: tuple[int, int], other_size: tuple[int, int]) -> bool:
    """Return whether two sizes have the same aspect ratio, apart from rounding by one pixel."""
    small_size, large_size = sorted((size, other_size))
    scaled_width = large_size[0] * small_size[1] / large_size[1]
    scaled_height = large_size[1] * small_size[0] / large_size[0]
    return abs(scaled_width - small_size[0]) <= 1 or abs(scaled_height - small_size[1]) <= 1


@dataclass(frozen=True)
class Differences:
    """Differences between two images of the same size, in levels.

    Attributes:
        pixel: maximum absolute difference of a pixel.
        means: maximum absolute mean difference of windows of 4x4, 8x8, 16x16, ... pixels.
        changed_share: share of pixels that differ.
    """

    pixel: float
    means: list[float]
    changed_share: float

    def are_within(self, bounds: Bounds) -> bool:
        """Return whether all differences are within the bounds."""
        limits = [bounds.mean_4x4, bounds.mean_8x8, bounds.mean_16x16]
        limits += [bounds.mean_larger] * (len(self.means) - len(limits))
        are_means_within = all(mean <= limit for mean, limit in zip(self.means, limits, strict=False))
        return self.pixel <= bounds.pixel and are_means_within


def _compute_differences(image: Image.Image, other_image: Image.Image) -> Differences:
    """Compute the differences in luminance and both chroma channels.

    Neighbouring windows overlap by half, so that a small object is completely inside at least one window.
    """
    largest_difference = 0.0
    changed_pixels = 0
    strips: list[WindowMeans] = []
    for top in range(0, image.height, STRIP_ROWS):
        box = (0, top, image.width, min(top + STRIP_ROWS, image.height))
        strip = np.asarray(image.crop(box).convert("YCbCr"), dtype=np.int16)
        other_strip = np.asarray(other_image.crop(box).convert("YCbCr"), dtype=np.int16)
        difference = strip - other_strip
        largest_difference = max(largest_difference, float(np.abs(difference).max(initial=0)))
        changed_pixels += int(np.count_nonzero(difference.any(axis=2)))
        strips.append(_block_means(difference))
    blocks = np.concatenate(strips)
    means = [float(np.abs(blocks).max())]
    while min(blocks.shape[:2]) > 1:
        windows = (blocks[:-1, :-1] + blocks[1:, :-1] + blocks[:-1, 1:] + blocks[1:, 1:]) / 4
        means.append(float(np.abs(windows).max()))
        rows = blocks.shape[0] // 2 * 2
        columns = blocks.shape[1] // 2 * 2
        blocks = blocks[:rows, :columns].reshape(rows // 2, 2, columns // 2, 2, 3).mean(axis=(1, 3))
    means.append(float(np.abs(blocks.mean(axis=(0, 1))).max()))
    changed_share = changed_pixels / (image.width * image.height)
    return Differences(pixel=largest_difference, means=means, changed_share=changed_share)


def _block_means(difference: NDArray[np.int16]) -> WindowMeans:
    """Return the means over blocks of WINDOW_PX x WINDOW_PX pixels.

    Incomplete blocks at the right and lower edges are filled by repeating the last pixels.
    """
    height, width = difference.shape[:2]
    padded_difference = np.pad(difference, ((0, -height % WINDOW_PX), (0, -width % WINDOW_PX), (0, 0)), mode="edge")
    padded_height, padded_width = padded_difference.shape[:2]
    shape = (padded_height // WINDOW_PX, WINDOW_PX, padded_width // WINDOW_PX, WINDOW_PX, 3)
    return padded_difference.reshape(shape).mean(axis=(1, 3), dtype=np.float32)


def _is_resaved(source: Picture, copy: Picture) -> bool:
    """Return whether `copy` shows the same image as `source`, only re-encoded and possibly resized."""
    is_resized = source.rgb.size != copy.rgb.size
    factor = min(copy.rgb.width, source.rgb.width) / max(copy.rgb.width, source.rgb.width)
    if is_resized and factor < SMALLEST_FACTOR:
        return False
    for resampling in FILTERS if is_resized else FILTERS[:1]:
        image = source.rgb.resize(copy.rgb.size, resampling) if is_resized else source.rgb
        resaved_image = _resave_like(image, copy)
        if resaved_image is None and not is_resized:
            return False
        differences = _compute_differences(resaved_image or image, copy.rgb)
        if differences.are_within(REPEATED_NOISE):
            return True
    return False


def _resave_like(image: Image.Image, copy: Picture) -> Image.Image | None:
    """Save the image in the same way as the file `copy`, and return the decoded result.

    Return None if the format of `copy` is lossless, is not supported here, or would change the image visibly.
    """
    header = copy.header
    if header.mode == "L" and header.format == "JPEG":
        return None  # losing all colours is a visible change
    if isinstance(header, JpegImagePlugin.JpegImageFile):
        tables = list(header.quantization.values())
        if tables[0][0] > COARSEST_JPEG_STEP or max(map(max, tables)) > 255:
            return None
        subsampling = JpegImagePlugin.get_sampling(header)
        options: dict[str, Any] = {"qtables": tables, "subsampling": max(subsampling, 0)}
        return _decode(_encode(image, "JPEG", **options))
    if header.format == "WEBP":
        return _decode(_webp_of_length(image, copy.file_bytes))
    if header.format == "GIF":
        return _decode(_encode(image, "GIF"))
    return None


def _webp_of_length(image: Image.Image, length: int) -> bytes:
    """Encode the image as WebP with the quality for which the file size is closest to `length` bytes.

    The quality is found by bisection.
    """
    lowest = 30
    highest = 100
    best_data = b""
    while lowest <= highest:
        quality = (lowest + highest) // 2
        data = _encode(image, "WEBP", quality=quality)
        if not best_data or abs(len(data) - length) < abs(len(best_data) - length):
            best_data = data
        if len(data) == length:
            break
        if len(data) < length:
            lowest = quality + 1
        else:
            highest = quality - 1
    return best_data


def _encode(image: Image.Image, image_format: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, image_format, **options)
    return buffer.getvalue()


def _decode(data: bytes) -> Image.Image:
    return to_rgb(open_image(data))


def _largest_difference_at(image: Image.Image, other_image: Image.Image, compare_px: int) -> int:
    """Return the maximum difference in any channel after scaling both images to the same size.

    The longer side of both images is then `compare_px` pixels, or as long as in the smaller image if that is less.
    """
    longest_side = min(compare_px, max(image.size), max(other_image.size))
    factor = longest_side / max(image.size)
    size = (max(1, round(image.width * factor)), max(1, round(image.height * factor)))
    difference = _levels_at(image, size) - _levels_at(other_image, size)
    return int(np.abs(difference).max())


def _levels_at(image: Image.Image, size: tuple[int, int]) -> NDArray[np.int16]:
    """Return the levels of the image scaled to a size, [height, width, channel]."""
    if image.size != size:
        image = image.resize(size, Image.Resampling.BICUBIC)
    return np.asarray(image, dtype=np.int16)
