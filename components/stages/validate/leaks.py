"""Pairs of one split that are also in another, of their own dataset or any, under whatever name.

Two pairs are the same when both their images are: by content (sha256, and so by path), or by look (their 8x8 grey
thumbnails differ nowhere by more than some levels: re-encoding and resizing change 1 or 2 levels, an object that moved
changes more). The direction does not matter. A single shared image is no leak: datasets share them between splits.
"""

import numpy as np
import polars as pl
from numpy.typing import NDArray
from scipy.spatial import cKDTree

from m3diff.images.check import OK

Thumbs = NDArray[np.int16]
"""[pairs, 128]: the grey levels of the image before, then of the image after."""

COMPARED_AT_ONCE = 200_000
"""Candidate pairs that are held side by side; 150 MB with their thumbnails."""


def find_twins(pairs: pl.DataFrame, split: str, other: str, max_diff: int | None) -> pl.DataFrame:
    """`row`, `twin`, `how` of the rows of `split` with a twin in `other`; by content only where max_diff is None."""
    ours, theirs = pairs.filter(split=split), pairs.filter(split=other)
    twins = theirs.unique(["low", "high"], keep="first", maintain_order=True).select("low", "high", twin="id")
    found = ours.join(twins, on=["low", "high"])
    same = found.select("row", "twin", how=pl.lit("has the same images")).sort("row")
    ours = ours.join(same, on="row", how="anti")
    if max_diff is None or not (ours.height and theirs.height):
        return same
    return pl.concat([same, _same_look(ours, theirs, max_diff)]).sort("row")


def sound_pairs(records: pl.DataFrame, images: pl.DataFrame) -> pl.DataFrame:
    """Rows whose images are both sound, with a number for each content (`low`, `high`) and both thumbnails."""
    sound = images.filter(verdict=OK).select("path", "thumb", content=pl.col("digest").rank("dense"))
    both = ("content", "content_after")
    return (
        records.with_row_index("row")
        .select("row", "id", "split", "before", "after")
        .join(sound, left_on="before", right_on="path")
        .join(sound, left_on="after", right_on="path", suffix="_after")
        .with_columns(low=pl.min_horizontal(both), high=pl.max_horizontal(both))
        .sort("row")
    )


def _same_look(ours: pl.DataFrame, theirs: pl.DataFrame, max_diff: int) -> pl.DataFrame:
    """Candidates by the mean levels of the quarters, which differ no more than single levels do; then all levels.

    Thumbnails that repeat are compared once, and rows in slices whose candidates number COMPARED_AT_ONCE at most
    (unless one row has more), so that a fixed camera's memory is bounded.
    """
    look = ["thumb", "thumb_after"]
    some, others = (pairs.unique(look, keep="first", maintain_order=True) for pairs in (ours, theirs))
    our_thumbs, thumbs = _thumbs(some), _thumbs(others)
    both_ways = np.concatenate([thumbs, np.roll(thumbs, 64, axis=1)])
    tree, quarters = cKDTree(_quarters(both_ways)), _quarters(our_thumbs)
    counts = tree.query_ball_point(quarters, max_diff, p=np.inf, return_length=True)
    rows = np.flatnonzero(counts)
    cuts = np.flatnonzero(np.diff(np.cumsum(counts[rows]) // COMPARED_AT_ONCE)) + 1
    at: list[int] = []
    twin: list[int] = []
    for part in np.split(rows, cuts) if len(rows) else []:
        near = tree.query_ball_point(quarters[part], max_diff, p=np.inf, return_sorted=True)
        a, b = np.repeat(part, counts[part]), np.concatenate([np.asarray(one, dtype=np.int64) for one in near])
        close = np.abs(our_thumbs[a] - both_ways[b]).max(axis=1) <= max_diff
        found, first = np.unique(a[close], return_index=True)
        at += found.tolist()
        twin += (b[close][first] % others.height).tolist()
    twins = some[at].select(*look, twin=others["id"].gather(twin))
    return ours.join(twins, on=look).select("row", "twin", how=pl.lit("looks the same")).sort("row")


def _thumbs(pairs: pl.DataFrame) -> Thumbs:
    joined = b"".join(half for pair in pairs.select("thumb", "thumb_after").iter_rows() for half in pair)
    return np.frombuffer(joined, dtype=np.uint8).reshape(-1, 128).astype(np.int16)


def _quarters(thumbs: Thumbs) -> NDArray[np.float64]:
    """Mean level of each quarter of both images, [pairs, 8]."""
    return thumbs.reshape(-1, 2, 2, 4, 2, 4).mean(axis=(3, 5)).reshape(-1, 8)
