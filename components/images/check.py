"""Compute digests of image files and check the images. Each file is read once, and all cores are used.

ingest uses the digests, and validate uses the verdicts, which say whether an image is valid. Digests and verdicts are
cached, so validate does not read the files again. A cache entry is valid while the file's path, size, modification
time, change time, inode and device stay the same. The cache does not change any output.
"""

import hashlib
import io
import os
import stat
import warnings
from collections import deque
from collections.abc import Iterator
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import polars as pl
import simplejpeg
from PIL import Image

from m3diff.images.open import ImageError, decode_to_rgb, open_image, size_fault
from m3diff.images.workers import worker_pool
from m3diff.records.errors import Fault
from m3diff.records.files import write_atomic
from m3diff.records.progress import progress
from m3diff.runtime import prepare

OK = "ok"
# Part of the cache's key, because verdicts from other versions of the decoders must not be used
DECODER = (
    f"Pillow {PIL.__version__}, simplejpeg {simplejpeg.__version__} strict, checksums of PNG, listed formats, "
    "sRGB by profile, RGB by its bands, range by percentile, thumbnail 8x8 Hamming, shape"
)

GREY = "grey"  # stored in greyscale
COLOR = "color"
COLORLESS = "colorless"  # stored in colour, but all pixels are grey
GREY_MODES = ("1", "L", "LA", "La", "I;16", "I;16B", "I;16L", "I;16N")
EXIF_ORIENTATION = 0x0112
COLOR_SAMPLE_PX = 64  # side of the square sample of pixels that is checked for colours
MAX_CAUSE_CHARS = 180  # maximum length of a message from Pillow in a verdict
COLOR_LEVELS = 16  # minimum difference between channels in a coloured pixel; JPEG noise in grey pixels is smaller

# Up to this number, files are read in this process, because starting workers would take longer
MIN_FILES_FOR_WORKERS = 32

Schema = dict[str, type[pl.DataType]]
STAT: Schema = {
    "path": pl.String,
    "size": pl.Int64,
    "mtime_ns": pl.Int64,
    "ctime_ns": pl.Int64,  # only the kernel sets it, so it reveals an edit that keeps size and mtime
    "inode": pl.UInt64,
    "device": pl.UInt64,
}
CHECK: Schema = {
    "digest": pl.Binary,  # SHA-256 of the bytes; null if the file could not be read
    "verdict": pl.String,  # OK, or a description of what is wrong
    "format": pl.String,
    "width": pl.Int64,  # after EXIF rotation
    "height": pl.Int64,
    "bits": pl.Int64,  # bits per channel in the file
    "color": pl.String,  # GREY, COLOR or COLORLESS
    "thumb": pl.Binary,  # 8x8 grey levels, row by row
    "code": pl.String,  # code of the fault that the verdict describes; null if the verdict is OK
}

# Only valid images are cached, so the cache does not need a column for the code of a fault
CACHE: Schema = {**STAT, **{name: kind for name, kind in CHECK.items() if name != "code"}, "decoder": pl.String}
BATCH = 256  # images per task
TASKS_IN_FLIGHT = 64  # maximum number of tasks that are submitted to the cluster at once


def check_images(paths: pl.Series, max_pixels: int, cache: Path, stage: str) -> pl.DataFrame:
    """Check image files, and return one row per distinct path with `path` and the columns of CHECK.

    The column `verdict` is OK or describes what is wrong with the image.

    Args:
        paths: paths of image files. Nulls and duplicates are ignored.
        max_pixels: maximum number of pixels of an image after padding to a square. A larger image is not decoded, and
            its verdict says that it is too large.
        cache: Parquet file that caches verdicts. The file is read and then replaced. It may be missing or damaged.
        stage: name of the stage, for the progress line.
    """
    rows = [(path, *_read_stat(path)) for path in paths.drop_nulls().unique().sort()]
    stats = pl.DataFrame(rows, schema=STAT | {"verdict": pl.String, "code": pl.String}, orient="row")
    unusable_paths = stats.filter(pl.col("verdict").is_not_null())
    files = stats.filter(pl.col("verdict").is_null()).drop("verdict", "code")
    cached_checks = _load_cache(cache, max_pixels)
    unchanged_files = files.join(cached_checks, on=list(STAT), how="inner")
    changed_files = files.join(cached_checks, on=list(STAT), how="anti")
    new_checks = _check_files(changed_files, cached_checks, max_pixels, stage)
    if new_checks.height:
        _store_cache(cache, cached_checks, new_checks)
    columns = ["path", *CHECK]
    parts = [
        unchanged_files.select(columns),
        new_checks.select(columns),
        unusable_paths.select("path", "verdict", "code"),
    ]
    all_checks = pl.concat(parts, how="diagonal")
    assert all_checks.height == stats.height, (all_checks.height, stats.height)
    return all_checks.sort("path")


def _read_stat(path: str) -> tuple[int | str | None, ...]:
    """Return the file's values for the columns of STAT except the path, followed by a verdict and a code.

    If the file is missing, inaccessible or not a regular file, the verdict and the code say so. Otherwise, both are
    None.
    """
    try:
        status = os.stat(path)
    except FileNotFoundError:
        fault = Fault("images.missing")
    except OSError as error:
        fault = Fault("images.unreadable_file", cause=error.strerror)
    else:
        if stat.S_ISREG(status.st_mode):
            return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_dev, None, None
        fault = Fault("images.no_regular_file")
    no_values = (None,) * (len(STAT) - 1)
    return *no_values, str(fault), fault.code


def _check_files(files: pl.DataFrame, cached_checks: pl.DataFrame, max_pixels: int, stage: str) -> pl.DataFrame:
    """Check the files and return them with the results.

    A file whose content is cached under another path is hashed, but not decoded again.
    """
    if files.is_empty():
        return cached_checks.clear()
    check_by_digest = {row["digest"]: row for row in cached_checks.select(*CHECK).iter_rows(named=True)}
    paths = files["path"].to_list()
    batches = [paths[start : start + BATCH] for start in range(0, len(paths), BATCH)]
    check_batches = _check_on_cluster if "RAY_ADDRESS" in os.environ else _check_on_cores
    checked_batches = check_batches(batches, frozenset(check_by_digest), max_pixels)
    checks = progress(chain.from_iterable(checked_batches), f"{stage} images", total=len(paths), unit="image")
    rows = [check | check_by_digest.get(check.get("digest"), {}) for check in checks]
    return files.join(pl.from_dicts(rows, schema={"path": pl.String, **CHECK}), on="path")


def _check_on_cores(
    batches: list[list[str]], known_digests: frozenset[bytes], max_pixels: int
) -> Iterator[list[dict[str, Any]]]:
    """Check images on all cores of this machine, or in this process if there are only a few images."""
    if len(batches) == 1 and len(batches[0]) <= MIN_FILES_FOR_WORKERS:
        yield _check_here(batches[0], known_digests, max_pixels)
        return
    with worker_pool() as pool:
        yield from pool.map(check_batch, batches, repeat(known_digests), repeat(max_pixels))


def _check_here(paths: list[str], known_digests: frozenset[bytes], max_pixels: int) -> list[dict[str, Any]]:
    """Check a batch in this process, and restore the settings that `check_batch` changes."""
    pixel_limit = Image.MAX_IMAGE_PIXELS
    try:
        with warnings.catch_warnings():
            return check_batch(paths, known_digests, max_pixels)
    finally:
        Image.MAX_IMAGE_PIXELS = pixel_limit


def _check_on_cluster(
    batches: list[list[str]], known_digests: frozenset[bytes], max_pixels: int
) -> Iterator[list[dict[str, Any]]]:
    """Check images on the Ray cluster at RAY_ADDRESS. Every node must be able to read the images at the same paths."""
    import ray

    ray.init(os.environ["RAY_ADDRESS"], ignore_reinit_error=True, log_to_driver=False)
    task = ray.remote(check_batch_on_node)
    digests_on_cluster = ray.put(known_digests)
    pending_results: deque[ray.ObjectRef] = deque()
    for batch in batches:
        pending_results.append(task.remote(batch, digests_on_cluster, max_pixels))
        if len(pending_results) > TASKS_IN_FLIGHT:
            yield ray.get(pending_results.popleft())
    yield from ray.get(list(pending_results))


def _load_cache(cache: Path, max_pixels: int) -> pl.DataFrame:
    """Load the cached checks of valid images. Invalid images are not cached, because a limit may change."""
    try:
        entries = pl.read_parquet(cache).select(*CACHE).match_to_schema(CACHE)
    except (pl.exceptions.PolarsError, OSError):
        # Ignore a missing, truncated or outdated cache, because the images can be checked again
        return pl.DataFrame(schema=STAT | CHECK)
    is_usable = (pl.col("decoder") == DECODER) & (pl.max_horizontal("width", "height").pow(2) <= max_pixels)
    return entries.filter(is_usable).drop("decoder").with_columns(code=pl.lit(None, dtype=pl.String))


def _store_cache(cache: Path, cached_checks: pl.DataFrame, new_checks: pl.DataFrame) -> None:
    """Add the new checks of valid images to the cache. They replace the cached checks of the same paths."""
    valid_checks = new_checks.filter(pl.col("verdict") == OK)
    entries = pl.concat([valid_checks, cached_checks]).unique("path", keep="first", maintain_order=True)
    buffer = io.BytesIO()
    entries.drop("code").with_columns(decoder=pl.lit(DECODER)).write_parquet(buffer)
    write_atomic(cache, buffer.getvalue())


def check_batch_on_node(paths: list[str], known_digests: frozenset[bytes], max_pixels: int) -> list[dict[str, Any]]:
    """Prepare a Ray worker process, which does not inherit any settings, and check images in it."""
    prepare()
    return check_batch(paths, known_digests, max_pixels)


def check_batch(paths: list[str], known_digests: frozenset[bytes], max_pixels: int) -> list[dict[str, Any]]:
    """Check images in a worker process. This changes Pillow's pixel limit and the warning filters of the process.

    Args:
        paths: paths of image files.
        known_digests: digests of contents that do not have to be decoded.
        max_pixels: maximum number of pixels after padding to a square.
    """
    Image.MAX_IMAGE_PIXELS = None  # `check_image` applies its own limit before it decodes any pixels
    warnings.simplefilter("ignore")
    return [check_image(path, max_pixels, known_digests) for path in paths]


def check_image(path: str, max_pixels: int, known_digests: frozenset[bytes] = frozenset()) -> dict[str, Any]:
    """Read and hash an image file, and decode all pixels of its first frame. Never raise an error for an invalid file.

    Args:
        path: path of the file.
        max_pixels: maximum number of pixels after padding to a square.
        known_digests: digests of contents that do not have to be decoded.

    Returns:
        `path` and those fields of CHECK that could be determined. For content in `known_digests`, these are only `path`
        and `digest`.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        return {"path": path} | _describe_fault(Fault("images.unreadable_file", cause=error.strerror))
    content = {"path": path, "digest": hashlib.sha256(data).digest()}
    if content["digest"] in known_digests:
        return content
    if not data:
        return content | _describe_fault(Fault("images.empty"))
    shape: dict[str, Any] = {}
    try:
        with open_image(data) as image:
            shape = {"format": image.format, "width": image.width, "height": image.height}
            fault = size_fault(image, max_pixels)
            if fault is not None:
                return content | shape | _describe_fault(fault)
            shape["bits"] = _bits_per_channel(image)
            rgb = decode_to_rgb(image, data)
            shape["color"] = GREY if image.mode in GREY_MODES else _classify_color(rgb)
            shape |= _upright_size(image)
            thumb = rgb.convert("L").resize((8, 8), Image.Resampling.HAMMING).tobytes()
    except ImageError as error:
        return content | shape | _describe_fault(error.fault)
    except Exception as error:  # Pillow raises about ten types for broken files, including SyntaxError and struct.error
        reason = (str(error) or type(error).__name__).replace("\n", " ")
        return content | _describe_fault(Fault("images.undecodable", cause=reason[:MAX_CAUSE_CHARS]))
    return content | shape | {"verdict": OK, "thumb": thumb}


def _describe_fault(fault: Fault) -> dict[str, Any]:
    """Return the columns of CHECK that describe a fault."""
    return {"verdict": str(fault), "code": fault.code}


def _bits_per_channel(image: Image.Image) -> int:
    """Return the number of bits per channel in the file. Must be called before decoding, which discards this number."""
    if image.mode == "1":
        return 1
    return 16 if image.mode.startswith("I;16") or ";16" in str(getattr(image, "tile", "")) else 8


def _upright_size(image: Image.Image) -> dict[str, int]:
    """Return the width and height after EXIF rotation.

    The image must be decoded, because the EXIF data of a PNG may come after the pixels.
    """
    is_rotated = image.getexif().get(EXIF_ORIENTATION, 1) in (5, 6, 7, 8)
    if is_rotated:
        return {"width": image.height, "height": image.width}
    return {"width": image.width, "height": image.height}


def _classify_color(rgb: Image.Image) -> str:
    """Return COLOR if any pixel in a sample is coloured, otherwise COLORLESS."""
    sample_size = (min(rgb.width, COLOR_SAMPLE_PX), min(rgb.height, COLOR_SAMPLE_PX))
    sample = rgb.resize(sample_size, Image.Resampling.NEAREST)
    red, green, blue = (np.asarray(channel) for channel in sample.split())
    # Computing two pairwise maximums is ten times as fast as a maximum over an axis of length 3
    highest = np.maximum(np.maximum(red, green), blue)
    lowest = np.minimum(np.minimum(red, green), blue)
    return COLOR if int((highest - lowest).max()) > COLOR_LEVELS else COLORLESS
