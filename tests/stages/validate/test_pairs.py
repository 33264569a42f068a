"""Pairs that do not show the change in their captions are quarantined, or counted in a finding."""

import csv
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from PIL import Image, ImageDraw

from m3diff.images.check import COLOR, GREY, OK
from m3diff.stages.validate.no_change import captions_describe_change, says_nothing_changed
from m3diff.stages.validate.pairs import (
    LISTED_ROWS,
    PLAIN_CELLS,
    PLAIN_LEVELS,
    UNIFORM_CELLS,
    UNIFORM_LEVELS,
    UNLIKE_LEVELS,
    Finding,
    list_findings,
)
from m3diff.stages.validate.twins import select_valid_pairs
from tests.layouts import run_ingest, run_validate
from tests.test_image_comparison import draw_scene, shift_region


@pytest.mark.parametrize(
    "caption",
    [
        *("there is no difference", "the two scenes seem identical", "the scene is the same as before"),
        *("no change has occurred", "almost nothing has changed", "nothing has changed", "no change was made"),
        *("there are no differences", "I don't see any difference.", "Nothing changed!", "The images are identical"),
        *("the scene remains the same", "everything stayed the same", "no visible changes", "same scene"),
        *("The image has not changed", "it didn't change", "There isn\u2019t any change, no difference", "unchanged"),
        *("There isn't any difference.", "I cannot see any differences", "both pictures match", "both are same"),
        *(
            "no objects have moved",
            "Nothing is missing",
            "not a single thing has changed",
            "there is barely any change",
        ),
        *("the images are indistinguishable", "the changes are negligible", "nothing was added or removed"),
        *("no objects were added, removed or moved", "the two images are the same, with no objects added"),
        *("The scene is the same: a cube and a sphere", "it now looks the same as before", "no new houses appeared"),
        *("there are two cars in both images, nothing has changed", "the trees remain and the road has not changed"),
        *("None.", "Same!", '"The images are identical."', "'n/a'"),
    ],
)
def test_sentences_that_deny_a_change_are_recognized(caption):
    assert says_nothing_changed(caption)


@pytest.mark.parametrize(
    "caption",
    [
        *(
            "the lamp is gone",
            "nothing else changed but the lamp is gone",
            "the cube became the same color as the ball",
        ),
        *("there is no longer a car", "no one is on the street now", "the man without a hat left", "it changed"),
        *("identical except for the red car", "the only difference is a missing chair", "the sign now says no entry"),
        *("the door is not open any more", "change the cat into a dog", "es hat sich nichts ge\u00e4ndert", ""),
        *("the scene is not the same", "the images are not identical", "they do not look alike", "nothing is the same"),
        *("the image is no longer the same", "the two boxes are now identical", "no trees are the same"),
        *("two identical houses were built", "one of two identical chairs is missing", "unchanged houses, new trees"),
        *("the road is not changed, and a pool was added", "the building is unchanged and a new road was built"),
        *("There are no differences in the left half. In the right half a bus appears.", "same scene, now with snow"),
        *("the lamp is not in the same place", "the bus is gone and the remaining cars are the same"),
        *("make the car red, keep everything unchanged", 'a banner that reads "nothing changed" has appeared'),
        *("there is one more person in the same scene", "the man has moved; the background is the same"),
    ],
)
def test_sentences_that_describe_a_change_are_not_mistaken_for_denials(caption):
    assert not says_nothing_changed(caption)


@pytest.mark.parametrize(
    ("references", "types", "tells"),
    [
        (["a car left"], [], True),
        (["no change", "a car left"], [], True),
        (["no change", ""], [], False),
        (["", " "], [], False),
        ([], [], False),
        (["a car left"], ["none"], False),
        (["es ist gleich"], ["none"], False),
    ],
)
def test_a_pair_describes_a_change_if_one_caption_does(references, types, tells):
    assert captions_describe_change(references, types) is tells


def write_pairs(root: Path, edit: Callable[[int, Image.Image], Image.Image], caption: str = "it moved") -> Path:
    """Write twelve pairs, with the image after `edit(number, image)`. Every fourth pair is a test pair."""
    root.mkdir(parents=True)
    with (root / "pairs.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["before", "after", "captions", "split"])
        for number in range(12):
            before = draw_scene(number)
            before.save(root / f"{number}.png")
            edit(number, before).save(root / f"{number}_2.png")
            table.writerow([f"{number}.png", f"{number}_2.png", caption, "train" if number % 4 else "test"])
    return root


def paint_box(number: int, image: Image.Image) -> Image.Image:
    copy = image.copy()
    copy.paste((255, 255, 0), (50, 40, 90, 80))
    return copy


def judge_folder(root: Path, **limits: object) -> tuple[list[tuple[str, int]], list[str]]:
    """Return the kinds and counts of the findings, and the ids of pairs that are quarantined without a change."""
    run_ingest(root, "pairs", "own")
    report = run_validate(root.parent, **limits)
    frame = pl.read_parquet(root.parent / "clean/quarantine")
    unshown = frame.filter(pl.col("rules").list.contains("shows_a_change"))
    return [(finding.kind, finding.count) for finding in report.findings], unshown["id"].to_list()


def test_both_engines_send_copies_under_a_caption_of_a_change_to_quarantine(tmp_path):
    root = write_pairs(tmp_path / "own", lambda n, image: image if n < 2 else paint_box(n, image))
    kinds, unshown = judge_folder(root)
    assert kinds == []
    assert unshown == ["own/0.png|0_2.png", "own/1.png|1_2.png"]


def test_copies_under_captions_of_no_change_stay(tmp_path, quick):
    root = write_pairs(tmp_path / "own", lambda n, image: image, caption="there is no difference")
    kinds, unshown = judge_folder(root)
    assert kinds == unshown == []


def test_sound_pairs_have_no_finding(tmp_path, quick):
    kinds, unshown = judge_folder(write_pairs(tmp_path / "own", paint_box))
    assert kinds == unshown == []


def draw_logo() -> Image.Image:
    """Draw a picture that is neither plain nor similar to a scene."""
    levels = np.random.default_rng(7).integers(0, 256, (3, 4, 3), dtype=np.uint8)
    return Image.fromarray(levels).resize((160, 120), Image.Resampling.NEAREST)


def draw_placeholder(color: object) -> Callable[[int, Image.Image], Image.Image]:
    def edit(number: int, image: Image.Image) -> Image.Image:
        picture = Image.new("RGB", (160, 120), color)
        ImageDraw.Draw(picture).text((60, 50), "n/a", fill=(60, 60, 60))
        return picture if number < 5 else paint_box(number, image)

    return edit


FINDINGS: dict[str, tuple[Callable[[int, Image.Image], Image.Image], list[tuple[str, int]]]] = {
    "a grey placeholder": (draw_placeholder((205, 205, 205)), [("placeholders", 5)]),
    "a black placeholder": (draw_placeholder("black"), [("placeholders", 5)]),
    "two of one placeholder": (lambda n, i: draw_placeholder("white")(0, i) if n < 2 else paint_box(n, i), []),
    "cut": (lambda n, i: i.crop((40, 0, 160, 120)) if n < 3 else paint_box(n, i), [("sides_differ", 3)]),
    "turned": (
        lambda n, i: i.transpose(Image.Transpose.ROTATE_90) if n < 3 else paint_box(n, i),
        [("sides_differ", 3)],
    ),
    "larger": (lambda n, i: paint_box(n, i).resize((320, 240)) if n < 3 else paint_box(n, i), [("sides_differ", 3)]),
    "grey": (lambda n, i: paint_box(n, i).convert("L") if n < 3 else paint_box(n, i), [("sides_differ", 3)]),
    "another band of transparency": (lambda n, i: paint_box(n, i).convert("RGBA"), []),
    "one picture in colour": (lambda n, i: draw_logo() if n < 5 else paint_box(n, i), [("placeholders", 5)]),
    "a picture in colour after few images": (lambda n, i: draw_logo() if n < 4 else paint_box(n, i), []),
    "a speck": (lambda n, i: shift_region(80, 60, 1, 1, 15)(i) if n < 3 else paint_box(n, i), [("hidden_changes", 3)]),
}


@pytest.mark.parametrize("case", FINDINGS)
def test_findings_are_counted_and_their_pairs_stay(tmp_path, quick, case):
    edit, expected = FINDINGS[case]
    kinds, unshown = judge_folder(write_pairs(tmp_path / "own", edit))
    assert kinds == expected
    assert unshown == []


def test_a_finding_counts_the_pairs_by_the_property_that_differs(tmp_path, quick):
    def edit(number: int, image: Image.Image) -> Image.Image:
        if number < 2:
            return paint_box(number, image).resize((320, 240))
        return paint_box(number, image).convert("L") if number == 2 else paint_box(number, image)

    root = write_pairs(tmp_path / "own", edit)
    run_ingest(root, "pairs", "own")
    (finding,) = run_validate(root.parent).findings
    assert finding.count == 3
    assert "2 in size" in finding.sentence
    assert "1 in mode" in finding.sentence
    assert "aspect" not in finding.sentence
    assert finding.first == ["pairs.csv, line 2", "pairs.csv, line 3", "pairs.csv, line 4"]


DRAWINGS = [drawing.tobytes() for drawing in np.random.default_rng(5).integers(0, 256, (121, 64), dtype=np.uint8)]


def findings_of_thumbs(thumbs: Sequence[tuple[bytes, bytes]], color: str = GREY) -> list[Finding]:
    """Return the findings of pairs with these thumbnails.

    All images before are different files. Images after with equal thumbnails are the same file.
    """
    images = []
    records = []
    for number, (before, after) in enumerate(thumbs):
        shape = {"verdict": OK, "width": 80, "height": 80, "bits": 8, "color": color}
        images.append({"path": f"{number}.png", "digest": number.to_bytes(32), "thumb": before, **shape})
        images.append({"path": f"{after.hex()}.png", "digest": after, "thumb": after, **shape})
        record = {"id": str(number), "image_set": str(number), "dataset": "own", "split": "train", "question": None}
        paths = {"image_1": f"{number}.png", "image_2": f"{after.hex()}.png", "image_1_sha256": number.to_bytes(32)}
        records.append({**record, **paths, "source": f"row {number}"})
    image_table = pl.DataFrame(images).unique("path", maintain_order=True)
    table = pl.DataFrame(records, schema_overrides={"question": pl.String})
    likeness = pl.DataFrame(schema={"row": pl.UInt32, "likeness": pl.String, "no_change_reason": pl.String})
    no_rows = pl.DataFrame(schema={"row": pl.UInt32})
    pairs = select_valid_pairs(table, image_table)
    return list_findings(pairs, likeness, no_rows, table, image_table)


@pytest.mark.parametrize(("count", "counts"), [(6, [6]), (5, [])])
def test_a_picture_after_a_tenth_of_the_pairs_is_frequent(count, counts):
    logo = DRAWINGS[60]
    thumbs = [(DRAWINGS[n], logo if n < count else DRAWINGS[61 + n]) for n in range(60)]
    assert [finding.count for finding in findings_of_thumbs(thumbs)] == counts


@pytest.mark.parametrize(("difference", "counts"), [(UNLIKE_LEVELS, []), (UNLIKE_LEVELS + 1, [3])])
def test_a_plain_picture_after_images_of_about_its_level_is_no_placeholder(difference, counts):
    findings = findings_of_thumbs([(bytes([100 + difference] * 64), bytes([100] * 64))] * 3)
    assert [finding.count for finding in findings] == counts


def test_a_finding_lists_its_first_rows():
    thumbs = [(before, bytes([100] * 64)) for before in DRAWINGS[: 2 * LISTED_ROWS]]
    (finding,) = findings_of_thumbs(thumbs)
    assert finding.kind == "placeholders"
    assert finding.count == 2 * LISTED_ROWS
    assert finding.first == [f"row {number}" for number in range(LISTED_ROWS)]


PLAIN = {
    "grey": (GREY, PLAIN_CELLS, PLAIN_LEVELS, True),
    "grey, of fewer equal cells": (GREY, PLAIN_CELLS - 1, PLAIN_LEVELS, False),
    "grey, of levels further apart": (GREY, PLAIN_CELLS, PLAIN_LEVELS + 1, False),
    "coloured": (COLOR, PLAIN_CELLS, PLAIN_LEVELS, False),
    "uniform in colour": (COLOR, UNIFORM_CELLS, UNIFORM_LEVELS, True),
    "coloured, of fewer equal cells": (COLOR, UNIFORM_CELLS - 1, UNIFORM_LEVELS, False),
    "coloured, of levels further apart": (COLOR, UNIFORM_CELLS, UNIFORM_LEVELS + 1, False),
}


@pytest.mark.parametrize(("color", "cells", "levels", "is_plain"), PLAIN.values(), ids=PLAIN)
def test_a_placeholder_is_plain_and_a_coloured_one_is_nearly_uniform(color, cells, levels, is_plain):
    picture = bytes([100] * 40 + [100 + levels] * (cells - 40) + [250] * (64 - cells))
    thumbs = [(before, picture) for before in DRAWINGS[:3]]
    assert [finding.count for finding in findings_of_thumbs(thumbs, color)] == [3] * is_plain


def test_one_before_image_in_train_and_test_is_counted(tmp_path, quick):
    root = write_pairs(tmp_path / "own", paint_box)
    for number in (1, 2, 5):
        (root / f"{number}.png").write_bytes((root / "0.png").read_bytes())
    run_ingest(root, "pairs", "own")
    (finding,) = run_validate(root.parent).findings
    assert finding.kind == "before_in_several_splits"
    assert finding.count == 1
    assert "1 image is in both train (3 pairs) and test (1 pair)" in finding.sentence
    assert finding.first == [f"pairs.csv, line {line}" for line in (2, 3, 4, 7)]


def test_comparisons_are_cached_by_content_and_a_broken_cache_changes_nothing(tmp_path, quick, monkeypatch):
    root = write_pairs(tmp_path / "own", lambda n, i: shift_region(80, 60, 1, 1, 15)(i))
    first_judgement = judge_folder(root)
    cache = tmp_path / "pairs_of_image_cache.parquet"
    with monkeypatch.context() as patch:
        patch.setattr("m3diff.images.compare.compare_images", None)
        assert judge_folder(root) == first_judgement
    cache.write_bytes(b"PAR1")
    assert judge_folder(root) == first_judgement
