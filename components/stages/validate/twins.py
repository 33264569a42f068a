"""Find twins, which are pairs with the same images in different splits. A training pair with a twin in test is a leak.

Two pairs are twins if both of their images are the same, in the same or the reverse order, even in different datasets.
A single image is compared with single images, as if it were a pair of itself. Two images are the same if their files
have the same SHA-256, or if they look the same: no grey level of their 8x8 thumbnails differs by more than a limit.
Re-encoding and resizing change a grey level by 1 or 2, and a moved object changes it by more. Two pairs that share only
one image are not twins, because datasets share images between splits.
"""

import numpy as np
import polars as pl
from numpy.typing import NDArray
from scipy.spatial import cKDTree

from m3diff.images.check import OK

# Number of comparisons that are made at once. They take 150 MB of memory
COMPARED_AT_ONCE = 200_000

# Array [pairs, 128] with 64 grey levels of the before image, followed by 64 of the after image
PairThumbs = NDArray[np.int16]

LOOKS_THE_SAME = "looks the same"  # value of `twin_similarity` if the image files of the twins differ

THUMBS = ["thumb", "thumb_after"]


def select_valid_pairs(records: pl.DataFrame, images: pl.DataFrame) -> pl.DataFrame:
    """Return the pairs whose two images are valid, with thumbnails and a number for each distinct image content.

    Args:
        records: records with RAW_SCHEMA and the columns of `add_image_columns`.
        images: as `check_images` returns them.

    Returns:
        A table with `row`, `id`, `split`, the paths `before` and `after`, the thumbnails `thumb` and `thumb_after`, and
        the numbers of the image contents `content` and `content_after`. `low` and `high` are the same two numbers in
        ascending order.
    """
    valid_images = _number_contents(images)
    contents = ("content", "content_after")
    return (
        records.select("id", "split", before="image_1", after="image_2")
        .with_row_index("row")
        .filter(pl.col("after").is_not_null())
        .join(valid_images, left_on="before", right_on="path")
        .join(valid_images, left_on="after", right_on="path", suffix="_after")
        .with_columns(low=pl.min_horizontal(contents), high=pl.max_horizontal(contents))
        .sort("row")
    )


def select_valid_singles(records: pl.DataFrame, images: pl.DataFrame) -> pl.DataFrame:
    """Return the records with a single image that is valid, as pairs of this image, in the form of `find_twins`."""
    singles = (
        records.select("id", "split", "image_count", before="image_1", after="image_1")
        .with_row_index("row")
        .filter(pl.col("image_count") == 1)
        .drop("image_count")
    )
    valid_images = _number_contents(images.filter(pl.col("path").is_in(singles["before"].implode())))
    contents = {name: pl.col("content") for name in ("content_after", "low", "high")}
    return (
        singles.join(valid_images, left_on="before", right_on="path")
        .with_columns(thumb_after="thumb", **contents)
        .sort("row")
    )


def _number_contents(images: pl.DataFrame) -> pl.DataFrame:
    """Return `path` and `thumb` of the valid images, and `content`, a number for each distinct image content."""
    return images.filter(verdict=OK).select("path", "thumb", content=pl.col("digest").rank("dense"))


def find_twins(pairs: pl.DataFrame, split: str, searched_split: str, max_diff: int | None) -> pl.DataFrame:
    """Find the rows of `split` that have a twin in `searched_split`.

    Return a table with the columns `row`, `twin` (the id of the twin) and `twin_similarity` (a phrase such as "looks
    the same").

    Args:
        pairs: as `select_valid_pairs` returns them.
        split: the split whose pairs are looked up.
        searched_split: the split that is searched for twins.
        max_diff: maximum difference between two thumbnails, in grey levels. None compares contents only.
    """
    candidates = pairs.filter(split=split)
    references = pairs.filter(split=searched_split)
    contents = references.unique(["low", "high"], keep="first", maintain_order=True).select("low", "high", twin="id")
    same_content = candidates.join(contents, on=["low", "high"])
    same_content = same_content.select("row", "twin", twin_similarity=pl.lit("has the same images")).sort("row")
    candidates = candidates.join(same_content, on="row", how="anti")
    if max_diff is None or candidates.is_empty() or references.is_empty():
        return same_content
    return pl.concat([same_content, _twins_by_look(candidates, references, max_diff)]).sort("row")


def _twins_by_look(candidates: pl.DataFrame, references: pl.DataFrame, max_diff: int) -> pl.DataFrame:
    """Return the twins whose thumbnails differ by at most `max_diff` levels.

    A k-d tree of the mean levels of each quarter preselects the references to compare. This cannot miss any twin,
    because the means of two thumbnails never differ by more than their levels do. Equal thumbnails are compared only
    once. Rows are processed in slices of about COMPARED_AT_ONCE comparisons, which limits the memory if many images
    come from a fixed camera.
    """
    distinct_candidates = candidates.unique(THUMBS, keep="first", maintain_order=True)
    distinct_references = references.unique(THUMBS, keep="first", maintain_order=True)
    candidate_thumbs = _pair_thumbs(distinct_candidates)
    reference_thumbs = _pair_thumbs(distinct_references)
    # add each reference again with its images swapped, because their order does not matter
    reference_thumbs = np.concatenate([reference_thumbs, np.roll(reference_thumbs, 64, axis=1)])
    tree = cKDTree(_quarters(reference_thumbs))
    quarters = _quarters(candidate_thumbs)
    counts = tree.query_ball_point(quarters, max_diff, p=np.inf, return_length=True)
    twin_of: dict[int, int] = {}
    for rows in _slices(counts):
        neighbours_of_candidates = tree.query_ball_point(quarters[rows], max_diff, p=np.inf, return_sorted=True)
        candidate_rows = np.repeat(rows, counts[rows])
        reference_rows = np.concatenate(
            [np.asarray(neighbours, dtype=np.int64) for neighbours in neighbours_of_candidates]
        )
        differences = np.abs(candidate_thumbs[candidate_rows] - reference_thumbs[reference_rows])
        is_alike = differences.max(axis=1) <= max_diff
        alike_rows, first_match = np.unique(candidate_rows[is_alike], return_index=True)
        alike_references = reference_rows[is_alike][first_match] % distinct_references.height
        twin_of.update(zip(alike_rows.tolist(), alike_references.tolist(), strict=True))
    twin_ids = distinct_references["id"].gather(list(twin_of.values()))
    twins = distinct_candidates[list(twin_of)].select(*THUMBS, twin=twin_ids)
    return candidates.join(twins, on=THUMBS).select("row", "twin", twin_similarity=pl.lit(LOOKS_THE_SAME)).sort("row")


def _slices(counts: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Return the numbers of the rows that need comparisons, in slices of about COMPARED_AT_ONCE comparisons."""
    rows = np.flatnonzero(counts)
    if not len(rows):
        return []
    cuts = np.flatnonzero(np.diff(np.cumsum(counts[rows]) // COMPARED_AT_ONCE)) + 1
    return np.split(rows, cuts)


def _pair_thumbs(pairs: pl.DataFrame) -> PairThumbs:
    """Return the thumbnails of both images of each pair as one array."""
    joined = b"".join(before + after for before, after in pairs.select(THUMBS).iter_rows())
    return np.frombuffer(joined, dtype=np.uint8).reshape(-1, 128).astype(np.int16)


def _quarters(thumbs: PairThumbs) -> NDArray[np.float64]:
    """Return the mean grey level of each quarter of both thumbnails, [pairs, 8]."""
    return thumbs.reshape(-1, 2, 2, 4, 2, 4).mean(axis=(3, 5)).reshape(-1, 8)
