"""All images of the records, looked at once: over every core, and cached by content, so that a later run touches
only what changed. The memory changes no output."""

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

from components.progress import progress
from components.files import write_atomic
from components.validate.decode import DECODER, OK, ImageCheck, look, check_all, start_worker

Schema = dict[str, type[pl.DataType]]
STAT: Schema = {
    "path": pl.String,
    "size": pl.Int64,
    "mtime_ns": pl.Int64,
    "inode": pl.UInt64,
    "device": pl.UInt64,
}
FACTS: Schema = {
    "digest": pl.Binary,
    "verdict": pl.String,
    "format": pl.String,
    "width": pl.Int64,
    "height": pl.Int64,
    "thumb": pl.Binary,
}
SHARE, IN_FLIGHT = 256, 64
"""Images to a task of the cluster, and tasks at a time."""

MEMORY = {**STAT, **FACTS, "decoder": pl.String}


def check_images(paths: pl.Series, max_pixels: int, memory: Path) -> pl.DataFrame:
    """One row per distinct path: `path`, FACTS. `verdict` is OK or says what is wrong."""
    stats = _stat(paths.drop_nulls().unique().sort())
    absent = stats.filter(pl.col("verdict").is_not_null())
    files = stats.filter(pl.col("verdict").is_null()).drop("verdict")
    cached = _cached(memory, max_pixels)
    unchanged = files.join(cached, on=list(STAT), how="inner")
    looked = _look(files.join(cached, on=list(STAT), how="anti"), cached, max_pixels)
    if looked.height:
        _store(memory, cached, looked)
    columns = ["path", *FACTS]
    judged = pl.concat(
        [unchanged.select(columns), looked.select(columns), absent.select("path", "verdict")], how="diagonal"
    )
    assert judged.height == stats.height, (judged.height, stats.height)
    return judged.sort("path")


def _stat(paths: pl.Series) -> pl.DataFrame:
    """STAT of every path, or a `verdict` on one that is no file."""
    rows = [(path, *_stat_one(path)) for path in paths]
    return pl.DataFrame(rows, schema=STAT | {"verdict": pl.String}, orient="row")


def _stat_one(path: str) -> tuple[int | None, int | None, int | None, int | None, str | None]:
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None, None, None, None, "is missing"
    except OSError as error:
        return None, None, None, None, f"cannot be read: {error.strerror}"
    if not stat.S_ISREG(found.st_mode):
        return None, None, None, None, "is no regular file"
    return found.st_size, found.st_mtime_ns, found.st_ino, found.st_dev, None


def _look(files: pl.DataFrame, cached: pl.DataFrame, max_pixels: int) -> pl.DataFrame:
    """Look at new or changed files, each inode once; columns STAT and FACTS."""
    inode = ["inode", "device", "size", "mtime_ns"]
    once = files.unique(inode, keep="first", maintain_order=True)
    by_digest = cached.select(*FACTS).unique("digest", keep="first", maintain_order=True)
    spread = _over_cluster if "RAY_ADDRESS" in os.environ else _over_cores
    results = spread(once["path"].to_list(), frozenset(by_digest["digest"]), max_pixels)
    looked = pl.DataFrame(list(results) if once.height else [], schema={"path": pl.String, **FACTS}, orient="row")
    known = looked.filter(pl.col("verdict").is_null()).select("path", "digest").join(by_digest, on="digest", how="left")
    facts = pl.concat([looked.drop_nulls("verdict"), known.select(looked.columns)])
    return files.join(once.join(facts, on="path").drop("path"), on=inode).select(*STAT, *FACTS)


def _over_cores(paths: list[str], known: frozenset[bytes], max_pixels: int) -> Iterator[ImageCheck]:
    context = multiprocessing.get_context("forkserver")  # plain fork would copy polars' threads half-way
    cores = len(os.sched_getaffinity(0))
    with ProcessPoolExecutor(cores, context, initializer=start_worker, initargs=(known,)) as pool:
        looked: Iterable[ImageCheck] = pool.map(partial(look, max_pixels=max_pixels), paths, chunksize=32)
        yield from progress(looked, "validate images", total=len(paths), unit="image")


def _over_cluster(paths: list[str], known: frozenset[bytes], max_pixels: int) -> Iterator[ImageCheck]:
    """As `_over_cores`, on the Ray cluster that RAY_ADDRESS names; every node must see the images under their paths."""
    import ray

    ray.init(os.environ["RAY_ADDRESS"], ignore_reinit_error=True, log_to_driver=False)
    look_share, contents = ray.remote(check_all), ray.put(known)
    shares = [paths[start : start + SHARE] for start in range(0, len(paths), SHARE)]
    waiting: deque[ray.ObjectRef] = deque()
    for share in progress(shares, "validate images", total=len(shares), unit=f"{SHARE} images"):
        waiting.append(look_share.remote(share, contents, max_pixels))
        if len(waiting) > IN_FLIGHT:
            yield from ray.get(waiting.popleft())
    while waiting:
        yield from ray.get(waiting.popleft())


def _cached(memory: Path, max_pixels: int) -> pl.DataFrame:
    """Sound images of earlier runs, as this decoder judged them. Bad ones are not cached: a limit may change."""
    nothing = pl.DataFrame(schema=STAT | FACTS)
    try:
        known = (
            pl.read_parquet(memory).select(*MEMORY) if memory.is_file() else nothing.with_columns(decoder=pl.lit(""))
        )
    except (pl.exceptions.PolarsError, OSError):
        return nothing  # half written or of another version: it is only a memory
    sound = (pl.col("decoder") == DECODER) & (pl.col("width") * pl.col("height") <= max_pixels)
    return known.filter(sound).drop("decoder")


def _store(memory: Path, cached: pl.DataFrame, looked: pl.DataFrame) -> None:
    sound = looked.filter(pl.col("verdict") == OK)
    kept = pl.concat([sound, cached]).unique("path", keep="first", maintain_order=True)
    buffer = io.BytesIO()
    kept.with_columns(decoder=pl.lit(DECODER)).write_parquet(buffer)
    write_atomic(memory, buffer.getvalue())
