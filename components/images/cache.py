"""All images of a table, each read once over every core, and cached, so that a later run reads only what changed.

ingest takes each image's digest from here, validate its verdict: what ingest has read and decoded, validate finds in
the cache. An entry is valid for one path, size, time of change, inode and device. The cache changes no output.
"""

import io
import multiprocessing
import os
import stat
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import polars as pl

from m3diff.images.check import DECODER, OK, ImageCheck, check_batch, check_image, start_worker
from m3diff.records.files import write_atomic
from m3diff.records.progress import progress

Schema = dict[str, type[pl.DataType]]
STAT: Schema = {"path": pl.String, "size": pl.Int64, "mtime_ns": pl.Int64, "inode": pl.UInt64, "device": pl.UInt64}
CHECK: Schema = {
    "digest": pl.Binary,
    "verdict": pl.String,
    "format": pl.String,
    "width": pl.Int64,
    "height": pl.Int64,
    "thumb": pl.Binary,
}
"""The fields of ImageCheck."""

CACHE: Schema = {**STAT, **CHECK, "decoder": pl.String}
BATCH, IN_FLIGHT = 256, 64
"""Images in a task of the cluster, and tasks at a time."""


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


def _stat(path: str) -> tuple[int | None, int | None, int | None, int | None, str | None]:
    """STAT of a path, or a verdict on one that is no file."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None, None, None, None, "is missing"
    except OSError as error:
        return None, None, None, None, f"cannot be read: {error.strerror}"
    if not stat.S_ISREG(found.st_mode):
        return None, None, None, None, "is no regular file"
    return found.st_size, found.st_mtime_ns, found.st_ino, found.st_dev, None


def _read(files: pl.DataFrame, cached: pl.DataFrame, max_pixels: int, stage: str) -> pl.DataFrame:
    """Read new or changed files, each inode once; columns STAT and CHECK."""
    inode = ["inode", "device", "size", "mtime_ns"]
    once = files.unique(inode, keep="first", maintain_order=True)
    by_digest = cached.select(*CHECK).unique("digest", keep="first", maintain_order=True)
    spread = _over_cluster if "RAY_ADDRESS" in os.environ else _over_cores
    known = frozenset(by_digest["digest"])
    results = spread(once["path"].to_list(), known, max_pixels, f"{stage} images") if once.height else []
    read = pl.DataFrame(list(results), schema={"path": pl.String, **CHECK}, orient="row")
    seen = read.filter(pl.col("verdict").is_null()).select("path", "digest").join(by_digest, on="digest", how="left")
    checks = pl.concat([read.drop_nulls("verdict"), seen.select(read.columns)])
    return files.join(once.join(checks, on="path").drop("path"), on=inode).select(*STAT, *CHECK)


def _over_cores(paths: list[str], known: frozenset[bytes], max_pixels: int, label: str) -> Iterator[ImageCheck]:
    context = multiprocessing.get_context("forkserver")  # plain fork would copy polars' threads half-way
    cores = len(os.sched_getaffinity(0))
    with ProcessPoolExecutor(cores, context, initializer=start_worker, initargs=(known,)) as pool:
        read: Iterable[ImageCheck] = pool.map(partial(check_image, max_pixels=max_pixels), paths, chunksize=32)
        yield from progress(read, label, total=len(paths), unit="image")


def _over_cluster(paths: list[str], known: frozenset[bytes], max_pixels: int, label: str) -> Iterator[ImageCheck]:
    """Check on the Ray cluster that RAY_ADDRESS names; every node must see the images under their paths."""
    import ray

    ray.init(os.environ["RAY_ADDRESS"], ignore_reinit_error=True, log_to_driver=False)
    task, contents = ray.remote(check_batch), ray.put(known)
    batches = [paths[start : start + BATCH] for start in range(0, len(paths), BATCH)]
    waiting: deque[ray.ObjectRef] = deque()
    for batch in progress(batches, label, total=len(batches), unit=f"{BATCH} images"):
        waiting.append(task.remote(batch, contents, max_pixels))
        if len(waiting) > IN_FLIGHT:
            yield from ray.get(waiting.popleft())
    while waiting:
        yield from ray.get(waiting.popleft())


def _load(cache: Path, max_pixels: int) -> pl.DataFrame:
    """Sound images of earlier runs, as this decoder judged them. Bad ones are not cached: a limit may change."""
    nothing = pl.DataFrame(schema=STAT | CHECK)
    if not cache.is_file():
        return nothing
    try:
        known = pl.read_parquet(cache).select(*CACHE).match_to_schema(CACHE)
    except (pl.exceptions.PolarsError, OSError):
        return nothing  # half written or of another version: it is only a cache
    sound = (pl.col("decoder") == DECODER) & (pl.max_horizontal("width", "height").pow(2) <= max_pixels)
    return known.filter(sound).drop("decoder")


def _store(cache: Path, cached: pl.DataFrame, read: pl.DataFrame) -> None:
    sound = read.filter(pl.col("verdict") == OK)
    kept = pl.concat([sound, cached]).unique("path", keep="first", maintain_order=True)
    buffer = io.BytesIO()
    kept.with_columns(decoder=pl.lit(DECODER)).write_parquet(buffer)
    write_atomic(cache, buffer.getvalue())
