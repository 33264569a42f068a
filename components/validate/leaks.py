"""Pairs of one split that are also in another, of their own dataset or any, under whatever name.

Two pairs are the same when both their images are: by content (sha256, and so by path), or by look (their 8x8 grey
thumbnails differ nowhere by more than some levels: re-encoding and resizing change 1 or 2 levels, an object that moved
changes more). The direction does not matter. A single shared image is no leak: datasets share them between splits.
"""

import numpy as np
import polars as pl
from numpy.typing import NDArray
from scipy.spatial import cKDTree

from components.image_check import OK

Thumbs = NDArray[np.int16]
"""[pairs, 128]: the grey levels of the image before, then of the image after."""

COMPARED_AT_ONCE = 200_000
"""Candidate pairs whose thumbnails are held side by side; 100 MB."""


def find_twins(pairs: pl.DataFrame, split: str, other: str, max_diff: int | None) -> pl.DataFrame:
    """`row`, `twin`, `how` of the rows of `split` with a twin in `other`; by content only where max_diff is None."""
    ours, theirs = pairs.filter(split=split), pairs.filter(split=other)
    same = _same_content(ours, theirs)
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


def _same_content(ours: pl.DataFrame, theirs: pl.DataFrame) -> pl.DataFrame:
    twins = theirs.unique(["low", "high"], keep="first", maintain_order=True).select("low", "high", twin="id")
    found = ours.join(twins, on=["low", "high"])
    return found.select("row", "twin", how=pl.lit("has the same images")).sort("row")


def _same_look(ours: pl.DataFrame, theirs: pl.DataFrame, max_diff: int) -> pl.DataFrame:
    """Candidates by the mean levels of the quarters, which differ no more than single levels do; then all levels."""
    our_thumbs, thumbs = _thumbs(ours), _thumbs(theirs)
    both_ways = np.concatenate([thumbs, np.roll(thumbs, 64, axis=1)])
    near = cKDTree(_quarters(both_ways)).query_ball_point(_quarters(our_thumbs), max_diff, p=np.inf, return_sorted=True)
    a = np.repeat(np.arange(len(near)), [len(candidates) for candidates in near])
    b = np.concatenate([np.asarray(candidates, dtype=np.int64) for candidates in near])
    close = np.zeros(len(a), dtype=bool)
    for start in range(0, len(a), COMPARED_AT_ONCE):
        some = slice(start, start + COMPARED_AT_ONCE)
        close[some] = np.abs(our_thumbs[a[some]] - both_ways[b[some]]).max(axis=1) <= max_diff
    found, first = np.unique(a[close], return_index=True)
    twins = theirs["id"].gather(b[close][first] % theirs.height)
    return pl.DataFrame({"row": ours["row"].gather(found), "twin": twins}).with_columns(how=pl.lit("looks the same"))


def _thumbs(pairs: pl.DataFrame) -> Thumbs:
    joined = b"".join(half for pair in pairs.select("thumb", "thumb_after").iter_rows() for half in pair)
    return np.frombuffer(joined, dtype=np.uint8).reshape(-1, 128).astype(np.int16)


def _quarters(thumbs: Thumbs) -> NDArray[np.float64]:
    """Mean level of each quarter of both images, [pairs, 8]."""
    return thumbs.reshape(-1, 2, 2, 4, 2, 4).mean(axis=(3, 5)).reshape(-1, 8)
