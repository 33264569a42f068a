"""Training pairs that are in a test set, of their own dataset or another, under whatever name.

Two pairs are the same when both their images are: by content (sha256, and so by path), or by look (their 8x8 grey
thumbnails differ nowhere by more than some levels: re-encoding and resizing change 1 or 2 levels, an object that moved
changes more). The direction does not matter. A single shared image is no leak: datasets share them between splits.
"""

import numpy as np
import polars as pl
from numpy.typing import NDArray
from scipy.spatial import cKDTree

from components.validate.decode import OK

Thumbs = NDArray[np.int16]
"""[pairs, 128]: the grey levels of the image before, then of the image after."""

COMPARED_AT_ONCE = 200_000
"""Candidate pairs whose thumbnails are held side by side; 100 MB."""


def find_twins(records: pl.DataFrame, images: pl.DataFrame, levels: int | None) -> pl.DataFrame:
    """`row`, `twin`, `how` of every training row with a twin in a test split; by content only where levels is None."""
    pairs = _pairs(records, images)
    train, test = pairs.filter(split="train"), pairs.filter(split="test")
    same = _same_content(train, test)
    train = train.join(same, on="row", how="anti")
    if levels is None or not (train.height and test.height):
        return same
    return pl.concat([same, _same_look(train, test, levels)]).sort("row")


def _pairs(records: pl.DataFrame, images: pl.DataFrame) -> pl.DataFrame:
    """Rows whose images are both sound, with a number for each content (`low`, `high`) and both thumbnails."""
    sound = images.filter(verdict=OK).select("path", "thumb", content=pl.col("digest").rank("dense"))
    both = ("content", "content_after")
    return (
        records.with_row_index("row")
        .select("row", "id", "split", "before", "after")
        .filter(pl.col("split").is_in(["train", "test"]))
        .join(sound, left_on="before", right_on="path")
        .join(sound, left_on="after", right_on="path", suffix="_after")
        .with_columns(low=pl.min_horizontal(both), high=pl.max_horizontal(both))
        .sort("row")
    )


def _same_content(train: pl.DataFrame, test: pl.DataFrame) -> pl.DataFrame:
    twins = test.unique(["low", "high"], keep="first", maintain_order=True).select("low", "high", twin="id")
    found = train.join(twins, on=["low", "high"])
    return found.select("row", "twin", how=pl.lit("has the same images")).sort("row")


def _same_look(train: pl.DataFrame, test: pl.DataFrame, levels: int) -> pl.DataFrame:
    """Candidates by the mean levels of the quarters, which differ no more than single levels do; then all levels."""
    train_thumbs, test_thumbs = _thumbs(train), _thumbs(test)
    both_ways = np.concatenate([test_thumbs, np.roll(test_thumbs, 64, axis=1)])
    near = cKDTree(_quarters(both_ways)).query_ball_point(_quarters(train_thumbs), levels, p=np.inf, return_sorted=True)
    ours = np.repeat(np.arange(len(near)), [len(candidates) for candidates in near])
    theirs = np.concatenate([np.asarray(candidates, dtype=np.int64) for candidates in near])
    close = np.zeros(len(ours), dtype=bool)
    for start in range(0, len(ours), COMPARED_AT_ONCE):
        some = slice(start, start + COMPARED_AT_ONCE)
        close[some] = np.abs(train_thumbs[ours[some]] - both_ways[theirs[some]]).max(axis=1) <= levels
    ours, first = np.unique(ours[close], return_index=True)
    twins = test["id"].gather(theirs[close][first] % test.height)
    return pl.DataFrame({"row": train["row"].gather(ours), "twin": twins}).with_columns(how=pl.lit("looks the same"))


def _thumbs(pairs: pl.DataFrame) -> Thumbs:
    joined = b"".join(half for pair in pairs.select("thumb", "thumb_after").iter_rows() for half in pair)
    return np.frombuffer(joined, dtype=np.uint8).reshape(-1, 128).astype(np.int16)


def _quarters(thumbs: Thumbs) -> NDArray[np.float64]:
    """Mean level of each quarter of both images, [pairs, 8]."""
    return thumbs.reshape(-1, 2, 2, 4, 2, 4).mean(axis=(3, 5)).reshape(-1, 8)
