"""What the two images of a pair can show: a change or none, one that the model sees, a picture or a placeholder.

A pair that shows no change under a caption of one is a bad row. Everything else here is counted and shown, since sound
data may have it: no pair goes to quarantine for it.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray
from pydantic import BaseModel

from m3diff.images.check import COLOR, GREY
from m3diff.images.compare import EQUAL, FAINT, NOISE, compare_pairs
from m3diff.stages.validate.no_change import tell_a_change

# Levels by which thumbnails may differ for the images to be compared: JPEG of quality 30 changes them by 4
ALIKE_LEVELS = 6

# A placeholder is plain: so many of its 64 cells are within so many levels of the median. Drawn scenes on a coloured
# ground are plain, too, so a picture in colour must be nearly uniform
PLAIN_CELLS = 48
PLAIN_LEVELS = 8
UNIFORM_CELLS = 60
UNIFORM_LEVELS = 2
# A picture that is not plain, such as a logo, may be one if it is after this share of all pairs, and after so many
# pairs at least
FREQUENT_SHARE = 0.1
FREQUENT_PAIRS = 5
# It is on one side of so many pairs, and looks unlike the other side: the mean of the cells' differences in levels
PLACEHOLDER_PAIRS = 3
UNLIKE_LEVELS = 16

ASPECT_TOLERANCE = 0.02  # a share: less comes from rounding when an image is resized

FIRST = 5  # places that a finding names

REMEDY = (
    "under a caption of a change; name the right image, or mark pairs without a change: change_types: none, or "
    "options: {no_change: {COLUMN: VALUE}} (reader pairs)"
)
SAME_BYTES = "same bytes"
REASONS = {
    SAME_BYTES: "after: {} is the image before, {}, byte for byte",
    EQUAL: "after: {} has the pixels of the image before, {}",
    NOISE: "after: {} is the image before, {}, saved anew and nothing else",
}


class Finding(BaseModel):
    """Something of a dataset that is counted and not refused."""

    dataset: str
    kind: str  # hidden_changes, placeholders, sides_differ or before_in_several_splits
    count: int
    sentence: str  # what was found, with its numbers and a remedy
    first: list[str]  # places of the first rows


def likeness_of(pairs: pl.DataFrame, table: pl.DataFrame, compare_px: int, cache: Path, stage: str) -> pl.DataFrame:
    """`row`, `likeness` (as `compare_pairs` says) and `unshown`, why a pair shows no change, else null.

    Only pairs whose captions tell a change and whose thumbnails are alike are compared, and only they have a row.

    Args:
        pairs: as `sound_pairs` makes them.
        table: all records.
    """
    alike = pairs.filter(_thumbnails_alike(pairs))
    texts = table[alike["row"]].select("references", "change_types")
    tells = [tell_a_change(references, types) for references, types in texts.iter_rows()]
    candidates = alike.filter(pl.Series(tells, dtype=pl.Boolean))
    digests = table[candidates["row"]].select("before_sha256", "after_sha256")
    compared = candidates.select("row", "before", "after").hstack(digests)
    likeness = compare_pairs(compared, compare_px, cache, stage)
    same_bytes = compared["before_sha256"] == compared["after_sha256"]
    key = pl.when(same_bytes).then(pl.lit(SAME_BYTES)).otherwise(likeness)
    reasons = [
        pl.when(key == kind).then(pl.format(f"{reason}, {{}}", "after", "before", pl.lit(REMEDY)))
        for kind, reason in REASONS.items()
    ]
    return compared.select("row", likeness=likeness, unshown=pl.coalesce(reasons))


def _thumbnails_alike(pairs: pl.DataFrame) -> pl.Series:
    difference = np.abs(_levels(pairs["thumb"]) - _levels(pairs["thumb_after"]))
    return pl.Series(difference.max(axis=1, initial=0) <= ALIKE_LEVELS, dtype=pl.Boolean)


def _levels(thumbs: pl.Series) -> NDArray[np.int16]:
    """Grey levels, [thumbnails, 64]."""
    return np.frombuffer(b"".join(thumbs), dtype=np.uint8).reshape(-1, 64).astype(np.int16)


def findings(
    pairs: pl.DataFrame, likeness: pl.DataFrame, bad: pl.DataFrame, table: pl.DataFrame, images: pl.DataFrame
) -> list[Finding]:
    """What is counted and shown, in the order of the datasets.

    Args:
        pairs: as `sound_pairs` makes them.
        likeness: as `likeness_of` makes it.
        bad: the rows in quarantine. Of their pairs, too, the images are looked at; only clean ones repeat an image.
    """
    places = table[pairs["row"]].select("dataset", "source", "before_sha256")
    placed = pairs.hstack(places)
    shown = placed.join(likeness.filter(pl.col("unshown").is_not_null()), on="row", how="anti", maintain_order="left")
    listed = [
        *_hidden_changes(placed.join(likeness, on="row")),
        *_placeholders(shown, images),
        *_sides_that_differ(shown, images),
        *_before_in_several_splits(placed.join(bad, on="row", how="anti", maintain_order="left")),
    ]
    order = {name: number for number, name in enumerate(table["dataset"].unique(maintain_order=True))}
    return sorted(listed, key=lambda finding: order[finding.dataset])


def _hidden_changes(pairs: pl.DataFrame) -> Iterator[Finding]:
    for (dataset,), faint in pairs.filter(likeness=FAINT).group_by("dataset", maintain_order=True):
        yield Finding(
            dataset=str(dataset),
            kind="hidden_changes",
            count=faint.height,
            sentence=(
                f"{faint.height:,} pairs differ by nothing that is seen at validate.compare_px, the resolution of the "
                "model; crop their images around the change, or train a model of more pixels"
            ),
            first=faint["source"].head(FIRST).to_list(),
        )


def _placeholders(pairs: pl.DataFrame, images: pl.DataFrame) -> Iterator[Finding]:
    """One plain or very frequent picture beside several others that it has nothing in common with.

    A background with several edits, a still of a fixed camera and a template look like their other side.
    """
    shared = ["row", "dataset", "source"]
    before = pairs.select(
        *shared, path="before", thumb="thumb", own="content", other="content_after", other_thumb="thumb_after"
    )
    after = pairs.select(
        *shared, path="after", thumb="thumb_after", own="content_after", other="content", other_thumb="thumb"
    )
    sides = pl.concat([before.with_columns(side=pl.lit("before")), after.with_columns(side=pl.lit("after"))])
    thumbs = sides["thumb"].unique(maintain_order=True)
    levels = _levels(thumbs)
    from_median = np.abs(levels - np.median(levels, axis=1, keepdims=True))
    in_color = thumbs.is_in(images.filter(color=COLOR)["thumb"].implode()).to_numpy()
    is_plain = ((from_median <= PLAIN_LEVELS).sum(axis=1) >= PLAIN_CELLS) & ~in_color
    is_plain |= (from_median <= UNIFORM_LEVELS).sum(axis=1) >= UNIFORM_CELLS
    plain = thumbs.filter(pl.Series(is_plain, dtype=pl.Boolean))
    plain = pl.concat([plain, _frequent_thumbs(sides)]).unique(maintain_order=True)
    sides = sides.filter(pl.col("thumb").is_in(plain.implode()))
    unlike = np.abs(_levels(sides["thumb"]) - _levels(sides["other_thumb"])).mean(axis=1) > UNLIKE_LEVELS
    sides = sides.filter(pl.Series(unlike, dtype=pl.Boolean))
    for (dataset, _), uses in sides.group_by(["dataset", "thumb"], maintain_order=True):
        if uses["other"].n_unique() >= PLACEHOLDER_PAIRS:
            count = uses["row"].n_unique()
            yield Finding(
                dataset=str(dataset),
                kind="placeholders",
                count=count,
                sentence=(
                    f"{count:,} pairs have one picture on a side, such as {uses['path'][0]}: perhaps a "
                    "placeholder for an image that was not there; fetch the images again or leave these rows out"
                ),
                first=uses["source"].unique(maintain_order=True).head(FIRST).to_list(),
            )


def _frequent_thumbs(sides: pl.DataFrame) -> pl.Series:
    """Thumbnails of the pictures that are after a large share of a dataset's pairs, and before none.

    One image before many others is a scene with several edits.
    """
    uses = sides.group_by("dataset", "own", maintain_order=True).agg(
        count=pl.len(), is_after=(pl.col("side") == "after").all(), thumb=pl.col("thumb").first()
    )
    pairs = sides.group_by("dataset", maintain_order=True).agg(pairs=pl.len() / 2)
    least = pl.max_horizontal(pl.lit(FREQUENT_PAIRS), FREQUENT_SHARE * pl.col("pairs"))
    is_frequent = pl.col("is_after") & (pl.col("count") >= least)
    return uses.join(pairs, on="dataset", maintain_order="left").filter(is_frequent)["thumb"]


def _sides_that_differ(pairs: pl.DataFrame, images: pl.DataFrame) -> Iterator[Finding]:
    shape = images.select("path", "width", "height", "bits", "color")
    shaped = pairs.join(shape, left_on="before", right_on="path", maintain_order="left")
    shaped = shaped.join(shape, left_on="after", right_on="path", suffix="_2", maintain_order="left")
    aspect = pl.col("width") / pl.col("height")
    aspect_after = pl.col("width_2") / pl.col("height_2")
    larger_aspect = pl.max_horizontal(aspect, aspect_after)
    differs = {
        "size": pl.any_horizontal(pl.col("width") != pl.col("width_2"), pl.col("height") != pl.col("height_2")),
        "aspect": (aspect - aspect_after).abs() > ASPECT_TOLERANCE * larger_aspect,
        "mode (one in colour, one grey)": (pl.min_horizontal("color", "color_2") == COLOR)
        & (pl.max_horizontal("color", "color_2") == GREY),
        "bit depth": pl.col("bits") != pl.col("bits_2"),
    }
    flagged = shaped.with_columns(**differs).filter(pl.any_horizontal(*differs))
    for (dataset,), rows in flagged.group_by("dataset", maintain_order=True):
        numbers = {name: int(rows[name].sum()) for name in differs}
        counts = ", ".join(f"{number:,} in {name}" for name, number in numbers.items() if number)
        yield Finding(
            dataset=str(dataset),
            kind="sides_differ",
            count=rows.height,
            sentence=f"the sides of {rows.height:,} pairs differ: {counts}; a model takes that for the change",
            first=rows["source"].head(FIRST).to_list(),
        )


def _before_in_several_splits(pairs: pl.DataFrame) -> Iterator[Finding]:
    by_image = pairs.group_by("dataset", "before_sha256", maintain_order=True).agg(
        splits=pl.col("split").n_unique(),
        train=(pl.col("split") == "train").sum(),
        test=(pl.col("split") == "test").sum(),
    )
    repeated = by_image.filter(pl.col("splits") > 1)
    for (dataset,), befores in repeated.group_by("dataset", maintain_order=True):
        rows = pairs.join(befores, on=["dataset", "before_sha256"], how="semi", maintain_order="left")
        tested = befores.filter(pl.col("train") > 0, pl.col("test") > 0)
        yield Finding(
            dataset=str(dataset),
            kind="before_in_several_splits",
            count=befores.height,
            sentence=(
                f"{befores.height:,} images are before pairs of several splits, {tested.height:,} of them of "
                f"{tested['train'].sum():,} train and {tested['test'].sum():,} test pairs; give such pairs one "
                "`scene`, so that they share a split"
            ),
            first=rows["source"].head(FIRST).to_list(),
        )
