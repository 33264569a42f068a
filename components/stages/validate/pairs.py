"""Compare the two images of a pair, to find pairs that do not show the change that their captions describe.

A pair whose captions describe a change but whose images are the same is a bad row. Other unusual properties are
findings: they are counted and reported, but pairs are not quarantined because of them, because valid data may have
these properties, too.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray
from pydantic import BaseModel

from m3diff.images.check import COLOR, GREY
from m3diff.images.compare import EQUAL, FAINT, NOISE, compare_pairs
from m3diff.records.errors import format_count
from m3diff.stages.validate.no_change import captions_describe_change

# Two images are compared in full only if no grey level of their thumbnails differs by more than this. JPEG of quality
# 30 changes levels by 4
ALIKE_LEVELS = 6

# Placeholders are usually plain: at least PLAIN_CELLS of the 64 cells of the thumbnail are within PLAIN_LEVELS of their
# median. Scenes drawn on a coloured background are plain, too, so a colour picture must be nearly uniform
PLAIN_CELLS = 48
PLAIN_LEVELS = 8
UNIFORM_CELLS = 60
UNIFORM_LEVELS = 2
# Some placeholders, such as a logo, are not plain. A picture counts as frequent if it is the after image in at least
# this share of a dataset's pairs and in at least FREQUENT_PAIRS pairs
FREQUENT_SHARE = 0.1
FREQUENT_PAIRS = 5
# A plain or frequent picture is a placeholder if it is paired with at least this many different, dissimilar images.
# Images are dissimilar if the grey levels of their thumbnails differ by more than UNLIKE_LEVELS on average
PLACEHOLDER_PAIRS = 3
UNLIKE_LEVELS = 16

ASPECT_TOLERANCE = 0.02  # relative difference; smaller differences come from rounding when an image is resized

LISTED_ROWS = 5  # maximum number of rows that a finding lists

REMEDY = (
    "although a caption describes a change; correct the path of the image, or mark pairs without a change: "
    "change_types: none, or options: {no_change: {COLUMN: VALUE}} (reader pairs)"
)
SAME_BYTES = "same bytes"
REASONS = {
    SAME_BYTES: "after: {} has the same bytes as the image before, {}",
    EQUAL: "after: {} has the same pixels as the image before, {}",
    NOISE: "after: {} differs from the image before, {}, only by compression noise",
}


class Finding(BaseModel):
    """An unusual property of a dataset. It is counted and reported, but does not cause data to be rejected.

    Attributes:
        dataset: name of the dataset.
        kind: hidden_changes, placeholders, sides_differ or before_in_several_splits.
        count: number of pairs; for before_in_several_splits, number of images.
        sentence: description of the finding, with numbers and a remedy.
        first: file and row of the first rows with this property.
    """

    dataset: str
    kind: str
    count: int
    sentence: str
    first: list[str]


def compare_images_of_pairs(
    pairs: pl.DataFrame, table: pl.DataFrame, compare_px: int, cache: Path, stage: str
) -> pl.DataFrame:
    """Compare the images of pairs whose captions describe a change and whose thumbnails are similar.

    Args:
        pairs: as `select_valid_pairs` returns them.
        table: all records, with RAW_SCHEMA and the columns of `add_image_columns`.
        compare_px: side of the square image that the model sees, in pixels.
        cache: Parquet file that caches comparisons by content.
        stage: name of the stage, for the progress line.

    Returns:
        One row per compared pair, with the columns `row`, `likeness` (as `compare_pairs` returns it) and
        `no_change_reason`, which is the reason why the pair does not show a change, or null if it shows one.
    """
    similar_pairs = pairs.filter(_have_similar_thumbnails(pairs))
    # The columns are selected first, because gathering the rows of nested columns takes long
    texts = table.select("references", "change_types", "question")[similar_pairs["row"]]
    # The answer to a question, such as "yes", does not say whether anything changed
    describes_change = [
        question is None and captions_describe_change(references, types)
        for references, types, question in texts.iter_rows()
    ]
    candidates = similar_pairs.filter(pl.Series(describes_change, dtype=pl.Boolean))
    digests = table.select(before_sha256="image_1_sha256", after_sha256="image_2_sha256")[candidates["row"]]
    compared_pairs = candidates.select("row", "before", "after").hstack(digests)
    likeness = compare_pairs(compared_pairs, compare_px, cache, stage)
    has_same_bytes = compared_pairs["before_sha256"] == compared_pairs["after_sha256"]
    kind = pl.when(has_same_bytes).then(pl.lit(SAME_BYTES)).otherwise(likeness)
    reasons = []
    for unchanged_kind, reason in REASONS.items():
        reason_with_remedy = pl.format(f"{reason}, {{}}", "after", "before", pl.lit(REMEDY))
        reasons.append(pl.when(kind == unchanged_kind).then(reason_with_remedy))
    return compared_pairs.select("row", likeness=likeness, no_change_reason=pl.coalesce(reasons))


def _have_similar_thumbnails(pairs: pl.DataFrame) -> pl.Series:
    """Return for each pair whether the thumbnails of its images differ by at most ALIKE_LEVELS."""
    difference = np.abs(_grey_levels(pairs["thumb"]) - _grey_levels(pairs["thumb_after"]))
    return pl.Series(difference.max(axis=1, initial=0) <= ALIKE_LEVELS, dtype=pl.Boolean)


def _grey_levels(thumbs: pl.Series) -> NDArray[np.int16]:
    """Return the grey levels of thumbnails, [thumbnails, 64]."""
    return np.frombuffer(b"".join(thumbs), dtype=np.uint8).reshape(-1, 64).astype(np.int16)


def list_findings(
    pairs: pl.DataFrame,
    likeness: pl.DataFrame,
    quarantined_rows: pl.DataFrame,
    table: pl.DataFrame,
    images: pl.DataFrame,
) -> list[Finding]:
    """Return the findings of all kinds, in the order of the datasets.

    Args:
        pairs: as `select_valid_pairs` returns them.
        likeness: as `compare_images_of_pairs` returns it.
        quarantined_rows: the quarantined rows. Their images are examined, too, except in the search for images that
            occur in several splits.
        table: all records, with RAW_SCHEMA and the columns of `add_image_columns`.
        images: verdicts on image files, as `check_images` returns them.
    """
    columns = ["dataset", "source", "question", "image_set"]
    pairs = pairs.hstack(table.select(*columns, before_sha256="image_1_sha256")[pairs["row"]])
    # Several questions about a pair are one pair
    pairs = pairs.filter(pl.col("question").is_null() | pl.col("image_set").is_first_distinct())
    unchanged_pairs = likeness.filter(pl.col("no_change_reason").is_not_null())
    changed_pairs = pairs.join(unchanged_pairs, on="row", how="anti", maintain_order="left")
    clean_pairs = pairs.join(quarantined_rows, on="row", how="anti", maintain_order="left")
    all_findings = list(_hidden_changes(pairs.join(likeness, on="row")))
    all_findings += _placeholders(changed_pairs, images)
    all_findings += _different_sides(changed_pairs, images)
    all_findings += _before_in_several_splits(clean_pairs)
    order = {name: number for number, name in enumerate(table["dataset"].unique(maintain_order=True))}
    return sorted(all_findings, key=lambda finding: order[finding.dataset])


def _hidden_changes(pairs: pl.DataFrame) -> Iterator[Finding]:
    """Yield a finding per dataset with changes that are invisible at the model's resolution."""
    for (dataset,), faint_pairs in pairs.filter(likeness=FAINT).group_by("dataset", maintain_order=True):
        yield Finding(
            dataset=str(dataset),
            kind="hidden_changes",
            count=faint_pairs.height,
            sentence=(
                f"the change in {format_count(faint_pairs.height, 'pair')} cannot be seen at validate.compare_px, the "
                "resolution of the model; crop their images around the change, or train a model with a higher "
                "resolution"
            ),
            first=faint_pairs["source"].head(LISTED_ROWS).to_list(),
        )


def _placeholders(pairs: pl.DataFrame, images: pl.DataFrame) -> Iterator[Finding]:
    """Yield a finding for each plain or frequent picture that is paired with several different, dissimilar images.

    Pictures that look like the images that they are paired with are not placeholders. Examples are a background with
    several edits, a frame of a fixed camera and a template.
    """
    sides = _list_sides(pairs)
    suspects = pl.concat([_plain_thumbs(sides, images), _frequent_thumbs(sides)]).unique(maintain_order=True)
    sides = sides.filter(pl.col("thumb").is_in(suspects.implode()))
    mean_difference = np.abs(_grey_levels(sides["thumb"]) - _grey_levels(sides["other_thumb"])).mean(axis=1)
    dissimilar_sides = sides.filter(pl.Series(mean_difference > UNLIKE_LEVELS, dtype=pl.Boolean))
    for (dataset, _), uses in dissimilar_sides.group_by(["dataset", "thumb"], maintain_order=True):
        if uses["other_content"].n_unique() < PLACEHOLDER_PAIRS:
            continue
        count = uses["row"].n_unique()
        yield Finding(
            dataset=str(dataset),
            kind="placeholders",
            count=count,
            sentence=(
                f"{format_count(count, 'pair has', 'pairs share')} the same picture, such as {uses['path'][0]}, "
                "which may be a placeholder for a missing image; download the images again or remove these rows"
            ),
            first=uses["source"].unique(maintain_order=True).head(LISTED_ROWS).to_list(),
        )


def _list_sides(pairs: pl.DataFrame) -> pl.DataFrame:
    """Return one row per image of each pair. Each row also has the content and thumbnail of the pair's other image."""
    columns = ["row", "dataset", "source"]
    before = pairs.select(
        *columns,
        path="before",
        content="content",
        thumb="thumb",
        other_content="content_after",
        other_thumb="thumb_after",
        side=pl.lit("before"),
    )
    after = pairs.select(
        *columns,
        path="after",
        content="content_after",
        thumb="thumb_after",
        other_content="content",
        other_thumb="thumb",
        side=pl.lit("after"),
    )
    return pl.concat([before, after])


def _plain_thumbs(sides: pl.DataFrame, images: pl.DataFrame) -> pl.Series:
    """Return the thumbnails of plain grey pictures and of nearly uniform colour pictures."""
    thumbs = sides["thumb"].unique(maintain_order=True)
    levels = _grey_levels(thumbs)
    from_median = np.abs(levels - np.median(levels, axis=1, keepdims=True))
    is_colored = thumbs.is_in(images.filter(color=COLOR)["thumb"].implode()).to_numpy()
    is_plain = (from_median <= PLAIN_LEVELS).sum(axis=1) >= PLAIN_CELLS
    is_uniform = (from_median <= UNIFORM_LEVELS).sum(axis=1) >= UNIFORM_CELLS
    return thumbs.filter(pl.Series((is_plain & ~is_colored) | is_uniform, dtype=pl.Boolean))


def _frequent_thumbs(sides: pl.DataFrame) -> pl.Series:
    """Return the thumbnails of pictures that are frequent after images in a dataset, but never before images.

    A frequent before image is not a placeholder, but a scene with several edits.
    """
    uses = sides.group_by("dataset", "content", maintain_order=True).agg(
        count=pl.len(), is_always_after=(pl.col("side") == "after").all(), thumb=pl.col("thumb").first()
    )
    pairs = sides.group_by("dataset", maintain_order=True).agg(pairs=pl.len() / 2)
    frequent_count = pl.max_horizontal(pl.lit(FREQUENT_PAIRS), FREQUENT_SHARE * pl.col("pairs"))
    is_frequent = pl.col("is_always_after") & (pl.col("count") >= frequent_count)
    return uses.join(pairs, on="dataset", maintain_order="left").filter(is_frequent)["thumb"]


def _different_sides(pairs: pl.DataFrame, images: pl.DataFrame) -> Iterator[Finding]:
    """Yield a finding per dataset with pairs whose images differ in size, aspect ratio, colour or bit depth."""
    shapes = images.select("path", "width", "height", "bits", "color")
    pairs = pairs.join(shapes, left_on="before", right_on="path", maintain_order="left")
    pairs = pairs.join(shapes, left_on="after", right_on="path", suffix="_after", maintain_order="left")
    aspect = pl.col("width") / pl.col("height")
    aspect_after = pl.col("width_after") / pl.col("height_after")
    before_is_grey = (pl.col("color") == GREY) & (pl.col("color_after") == COLOR)
    after_is_grey = (pl.col("color") == COLOR) & (pl.col("color_after") == GREY)
    is_different = {
        "size": (pl.col("width") != pl.col("width_after")) | (pl.col("height") != pl.col("height_after")),
        "aspect": (aspect - aspect_after).abs() > ASPECT_TOLERANCE * pl.max_horizontal(aspect, aspect_after),
        "mode (one in colour, one grey)": before_is_grey | after_is_grey,
        "bit depth": pl.col("bits") != pl.col("bits_after"),
    }
    flagged_pairs = pairs.with_columns(**is_different).filter(pl.any_horizontal(*is_different))
    for (dataset,), rows in flagged_pairs.group_by("dataset", maintain_order=True):
        differences = []
        for property_name in is_different:
            count = int(rows[property_name].sum())
            if count:
                differences.append(f"{count:,} in {property_name}")
        yield Finding(
            dataset=str(dataset),
            kind="sides_differ",
            count=rows.height,
            sentence=(
                f"the two images of {format_count(rows.height, 'pair')} differ: {', '.join(differences)}; "
                "a model may learn this as the change"
            ),
            first=rows["source"].head(LISTED_ROWS).to_list(),
        )


def _before_in_several_splits(pairs: pl.DataFrame) -> Iterator[Finding]:
    """Yield a finding per dataset that uses the same before image in several splits."""
    images = pairs.group_by("dataset", "before_sha256", maintain_order=True).agg(
        splits=pl.col("split").n_unique(),
        train=(pl.col("split") == "train").sum(),
        test=(pl.col("split") == "test").sum(),
    )
    repeated_images = images.filter(pl.col("splits") > 1)
    for (dataset,), before_images in repeated_images.group_by("dataset", maintain_order=True):
        rows = pairs.join(before_images, on=["dataset", "before_sha256"], how="semi", maintain_order="left")
        leaked_images = before_images.filter(pl.col("train") > 0, pl.col("test") > 0)
        train_pairs = int(leaked_images["train"].sum())
        test_pairs = int(leaked_images["test"].sum())
        yield Finding(
            dataset=str(dataset),
            kind="before_in_several_splits",
            count=before_images.height,
            sentence=(
                f"{format_count(before_images.height, 'image is', 'images are')} the before-image of pairs in several "
                f"splits, of which {format_count(leaked_images.height, 'image is', 'images are')} in both train "
                f"({format_count(train_pairs, 'pair')}) and test ({format_count(test_pairs, 'pair')}). "
                "Give the pairs of an image the same `scene`, so that they share a split"
            ),
            first=rows["source"].head(LISTED_ROWS).to_list(),
        )
