"""All images of a table, each read and checked once over every core; cached, so that a later run reads what changed.

ingest takes each image's digest from here, validate its verdict: what ingest has read and decoded, validate finds in
the cache. An entry is valid for one path, size, modification time, change time, inode and device. The cache changes no
output.
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

from m3diff.images.open import ImageError, decode_to_rgb, open_image, too_large
from m3diff.images.workers import worker_pool
from m3diff.records.files import write_atomic
from m3diff.records.progress import progress

OK = "ok"
# Verdicts are cached under this name: another decoder judges anew
DECODER = (
    f"Pillow {PIL.__version__}, simplejpeg {simplejpeg.__version__} strict, listed formats, sRGB by profile, "
    "RGB by its bands, range by percentile, thumbnail 8x8 Hamming, shape"
)

GREY = "grey"
COLOR = "color"
COLORLESS = "colorless"
GREY_MODES = ("1", "L", "LA", "La", "I;16", "I;16B", "I;16L", "I;16N")
ORIENTATION = 0x0112  # tag of EXIF
SAMPLED = 64  # pixels of a side, at most, that are looked at for a colour
COLOR_LEVELS = 16  # between the channels of a pixel that has a colour: JPEG leaves less in grey

# Fewer files are read in this process: starting workers would take longer
WORTH_WORKERS = 32

Schema = dict[str, type[pl.DataType]]
STAT: Schema = {
    "path": pl.String,
    "size": pl.Int64,
    "mtime_ns": pl.Int64,
    "ctime_ns": pl.Int64,  # only the kernel sets it: an editor that keeps size and mtime cannot hide its edit
    "inode": pl.UInt64,
    "device": pl.UInt64,
}
CHECK: Schema = {
    "digest": pl.Binary,  # sha256 of the bytes; null where they could not be read
    "verdict": pl.String,  # OK or what is wrong
    "format": pl.String,
    "width": pl.Int64,  # upright, as EXIF says
    "height": pl.Int64,
    "bits": pl.Int64,  # of a channel, in the file
    "color": pl.String,  # GREY, COLOR, or COLORLESS: stored in colour, with none in it
    "thumb": pl.Binary,  # 8x8 grey levels, row by row
}

CACHE: Schema = {**STAT, **CHECK, "decoder": pl.String}
BATCH, IN_FLIGHT = 256, 64  # images in a task, and tasks of the cluster at a time


def check_images(paths: pl.Series, max_pixels: int, cache: Path, stage: str) -> pl.DataFrame:
    """A row per distinct path: `path`, CHECK. `verdict` is OK or says what is wrong.

    Args:
        paths: of image files; nulls and repeats are passed over.
        max_pixels: an image whose padded square has more is not decoded; its verdict says so.
        cache: Parquet file, read and written anew; it may be missing or damaged.
        stage: who asks, for the progress line.
    """
    rows = [(path, *_stat(path)) for path in paths.drop_nulls().unique().sort()]
    stats = pl.DataFrame(rows, schema=STAT | {"verdict": pl.String}, orient="row")
    absent = stats.filter(pl.col("verdict").is_not_null())
    files = stats.filter(pl.col("verdict").is_null()).drop("verdict")
    cached = _load(cache, max_pixels)
    unchanged = files.join(cached, on=list(STAT), how="inner")
    read = _read(files.join(cached, on=list(STAT), how="anti"), cached, max_pixels, stage)
    if read.height:
        _store(cache, cached, read)
    columns = ["path", *CHECK]
    checked = pl.concat(
        [unchanged.select(columns), read.select(columns), absent.select("path", "verdict")], how="diagonal"
    )
    assert checked.height == stats.height, (checked.height, stats.height)
    return checked.sort("path")


def _stat(path: str) -> tuple[int | str | None, ...]:
    """The values of STAT but for the path, and a verdict where the file cannot be read."""
    no_values = (None,) * (len(STAT) - 1)
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return *no_values, "is missing"
    except OSError as error:
        return *no_values, f"cannot be read: {error.strerror}"
    if not stat.S_ISREG(status.st_mode):
        return *no_values, "is no regular file"
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_dev, None


def _read(files: pl.DataFrame, cached: pl.DataFrame, max_pixels: int, stage: str) -> pl.DataFrame:
    if files.is_empty():
        return cached.clear()
    known = {row["digest"]: row for row in cached.select(*CHECK).iter_rows(named=True)}
    paths = files["path"].to_list()
    batches = [paths[start : start + BATCH] for start in range(0, len(paths), BATCH)]
    spread = _over_cluster if "RAY_ADDRESS" in os.environ else _over_cores
    read = chain.from_iterable(spread(batches, frozenset(known), max_pixels))
    checks = progress(read, f"{stage} images", total=len(paths), unit="image")
    rows = [check | known.get(check.get("digest"), {}) for check in checks]
    return files.join(pl.from_dicts(rows, schema={"path": pl.String, **CHECK}), on="path")


def _over_cores(batches: list[list[str]], known: frozenset[bytes], max_pixels: int) -> Iterator[list[dict[str, Any]]]:
    if len(batches) == 1 and len(batches[0]) <= WORTH_WORKERS:
        yield _check_here(batches[0], known, max_pixels)
        return
    with worker_pool() as pool:
        yield from pool.map(check_batch, batches, repeat(known), repeat(max_pixels))


def _check_here(paths: list[str], known: frozenset[bytes], max_pixels: int) -> list[dict[str, Any]]:
    pillows_limit = Image.MAX_IMAGE_PIXELS
    try:
        with warnings.catch_warnings():
            return check_batch(paths, known, max_pixels)
    finally:
        Image.MAX_IMAGE_PIXELS = pillows_limit


def _over_cluster(batches: list[list[str]], known: frozenset[bytes], max_pixels: int) -> Iterator[list[dict[str, Any]]]:
    """Check on the Ray cluster that RAY_ADDRESS names; every node must see the images under their paths."""
    import ray

    ray.init(os.environ["RAY_ADDRESS"], ignore_reinit_error=True, log_to_driver=False)
    task, contents = ray.remote(check_batch), ray.put(known)
    waiting: deque[ray.ObjectRef] = deque()
    for batch in batches:
        waiting.append(task.remote(batch, contents, max_pixels))
        if len(waiting) > IN_FLIGHT:
            yield ray.get(waiting.popleft())
    yield from ray.get(list(waiting))


def _load(cache: Path, max_pixels: int) -> pl.DataFrame:
    """Sound images of earlier runs, as this decoder judged them. Bad ones are not cached: a limit may change."""
    try:
        known = pl.read_parquet(cache).select(*CACHE).match_to_schema(CACHE)
    except (pl.exceptions.PolarsError, OSError):
        return pl.DataFrame(schema=STAT | CHECK)  # none, half written or of another version: it is only a cache
    sound = (pl.col("decoder") == DECODER) & (pl.max_horizontal("width", "height").pow(2) <= max_pixels)
    return known.filter(sound).drop("decoder")


def _store(cache: Path, cached: pl.DataFrame, read: pl.DataFrame) -> None:
    sound = read.filter(pl.col("verdict") == OK)
    kept = pl.concat([sound, cached]).unique("path", keep="first", maintain_order=True)
    buffer = io.BytesIO()
    kept.with_columns(decoder=pl.lit(DECODER)).write_parquet(buffer)
    write_atomic(cache, buffer.getvalue())


def check_batch(paths: list[str], known: frozenset[bytes], max_pixels: int) -> list[dict[str, Any]]:
    """Check images in a worker process, which needs no second decoding of the contents `known`."""
    Image.MAX_IMAGE_PIXELS = None  # the limit is ours, checked before a pixel is decoded
    warnings.simplefilter("ignore")
    return [check_image(path, max_pixels, known) for path in paths]


def check_image(path: str, max_pixels: int, known: frozenset[bytes] = frozenset()) -> dict[str, Any]:
    """Read, hash and, for content not yet known, decode every pixel; of a GIF the first frame. Never raises for a bad
    file.

    Returns: `path` and the fields of CHECK that could be found; for content in `known` its digest alone.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        return {"path": path, "verdict": f"cannot be read: {error.strerror}"}
    found = {"path": path, "digest": hashlib.sha256(data).digest()}
    if found["digest"] in known:
        return found
    if not data:
        return found | {"verdict": "is empty (0 bytes)"}
    shape: dict[str, Any] = {}
    try:
        with open_image(data) as image:
            shape = {"format": image.format, "width": image.width, "height": image.height}
            if fault := too_large(image, max_pixels):
                return found | shape | {"verdict": fault}
            shape["bits"] = _bits(image)
            rgb = decode_to_rgb(image, data)
            shape |= {"color": GREY if image.mode in GREY_MODES else _color_in(rgb), **_upright(image)}
            thumb = rgb.convert("L").resize((8, 8), Image.Resampling.HAMMING).tobytes()
    except ImageError as error:
        return found | shape | {"verdict": str(error)}
    except Exception as error:  # Pillow raises some ten kinds for broken files, SyntaxError and struct.error among them
        told = (str(error) or type(error).__name__).replace("\n", " ")
        return found | {"verdict": f"does not decode: {told}"[:200]}
    return found | shape | {"verdict": OK, "thumb": thumb}


def _bits(image: Image.Image) -> int:
    """Bits of a channel, read from the header before decoding drops them."""
    if image.mode == "1":
        return 1
    return 16 if image.mode.startswith("I;16") or ";16" in str(getattr(image, "tile", "")) else 8


def _upright(image: Image.Image) -> dict[str, int]:
    """Width and height as EXIF says, of a decoded image: a PNG is decoded before its EXIF data can be read."""
    is_turned = image.getexif().get(ORIENTATION, 1) in (5, 6, 7, 8)
    width, height = reversed(image.size) if is_turned else image.size
    return {"width": width, "height": height}


def _color_in(rgb: Image.Image) -> str:
    sample = rgb.resize((min(rgb.width, SAMPLED), min(rgb.height, SAMPLED)), Image.Resampling.NEAREST)
    red, green, blue = (np.asarray(channel) for channel in sample.split())
    # of pairs of arrays: a maximum over an axis of three takes ten times as long
    highest = np.maximum(np.maximum(red, green), blue)
    lowest = np.minimum(np.minimum(red, green), blue)
    return COLOR if int((highest - lowest).max()) > COLOR_LEVELS else COLORLESS
