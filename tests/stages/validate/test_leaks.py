"""Training pairs that are also in a test set."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from PIL import Image, ImageFilter

from m3diff.images.check import OK
from m3diff.records.errors import DataError
from m3diff.stages.validate.twins import LOOKS_THE_SAME, find_twins, select_valid_pairs, select_valid_singles
from tests.errors import raises
from tests.layouts import (
    judge_by_polars_alone,
    run_ingest,
    run_validate,
    write_json,
)


def scene(number: int, moved: bool = False) -> Image.Image:
    """Draw four blurred boxes at positions that depend on the number. `moved` shifts one of them."""
    random = np.random.default_rng(number)
    image = Image.new("RGB", (160, 120), tuple(int(v) for v in random.integers(60, 200, 3)))
    for disc in range(4):
        x, y = (int(v) for v in random.integers(0, 90, 2))
        x += 30 if moved and disc == 0 else 0
        image.paste(tuple(int(v) for v in random.integers(0, 255, 3)), (x, y, x + 28, y + 28))
    return image.filter(ImageFilter.GaussianBlur(1))


def write_own(root: Path, pairs: dict[str, tuple[Image.Image, Image.Image, str]], suffix: str = "png", **save) -> Path:
    """Write and ingest a dataset of pairs (before, after, split) by name. Images are saved with the options `save`."""
    root.mkdir(parents=True)
    rows = []
    for name, (before, after, split) in pairs.items():
        paths = [f"{name}_{side}.{suffix}" for side in ("a", "b")]
        for image, path in zip((before, after), paths, strict=True):
            image.save(root / path, **save)
        rows.append({"id": name, "before": paths[0], "after": paths[1], "captions": ["it moved"], "split": split})
        if name == "none":
            rows[-1]["captions"] = ["nothing moved"]
    write_json(root / "pairs.json", rows)
    run_ingest(root, "pairs", root.name, manifest="pairs.json")
    return root


HELD_OUT = {str(n): (scene(n), scene(n, moved=True), "test") for n in range(3)}


def test_one_leaked_pair_of_few_is_left_out_and_does_not_stop_the_stage(tmp_path, quick, capsys):
    copy = {"copy": HELD_OUT["0"][:2] + ("train",), "own": (scene(9), scene(9, moved=True), "train")}
    write_own(tmp_path / "mine", HELD_OUT | copy)
    report = run_validate(tmp_path, max_leaked_share=0.05, max_quarantined_share=0.01)
    assert report.leaks == 1
    assert report.datasets["mine"].pairs == {"test": 3, "train": 1}
    assert "pairs.json, record 3: leak: " in capsys.readouterr().out


@pytest.mark.fault("16")
def test_a_test_pair_does_not_train_under_another_name_direction_encoding_or_size(tmp_path):
    """Validation pairs may be in test. A shared image, or another change in the same scene, is not a leak."""
    held_pairs = {name: pair[:2] for name, pair in HELD_OUT.items()}
    write_own(tmp_path / "official", HELD_OUT | {"v": (*held_pairs["1"], "val")})
    mine = {"copy": held_pairs["1"], "back": held_pairs["2"][::-1], "own": (scene(7), scene(7, moved=True))}
    mine |= {"small": tuple(image.resize((107, 80)) for image in held_pairs["0"])}
    mine |= {"shared": (scene(1), scene(5)), "none": (scene(1), scene(1))}
    write_own(tmp_path / "mine", {name: (*pair, "train") for name, pair in mine.items()})
    write_own(tmp_path / "jpeg", {"1": (*held_pairs["1"], "train")}, "jpg", quality=75)
    report = run_validate(tmp_path, max_quarantined_share=0)
    frame = pl.read_parquet(tmp_path / "clean/quarantine")
    twins = {"mine/copy": 1, "mine/back": 2, "mine/small": 0, "jpeg/1": 1}
    reasons = dict(frame.select("id", "reason").iter_rows())
    assert reasons.keys() == twins.keys()
    for name, pair in twins.items():
        is_alike = name in ("mine/small", "jpeg/1")
        assert reasons[name].startswith(f"leak: test pair official/{pair} ")
        assert (LOOKS_THE_SAME in reasons[name]) == is_alike
    assert report.leaks == 4
    assert report.quarantined == 4
    by_content = run_validate(tmp_path, near_duplicate_max_diff=None)
    assert by_content.leaks == 2
    assert by_content.overlaps["train in test"] == 2
    allowed = run_validate(tmp_path, allow_test_leakage=True)
    assert allowed.quarantined == 0
    assert allowed.leaks == 0
    assert allowed.overlaps == {"train in test": 4, "val in test": 1, "train in val": 2}


@pytest.mark.parametrize(("split", "train_on"), [("train", ["train"]), ("val", ["train", "val"])])
def test_leaked_pairs_above_their_own_limit_stop_the_stage(split, train_on, tmp_path, monkeypatch):
    """The share is computed over the rows that are trained on. The limit for bad rows does not allow leaks."""
    judge_by_polars_alone(monkeypatch)
    own_pairs = {f"own{n}": (scene(9 + n), scene(9 + n, moved=True), "train") for n in range(3)}
    copies = {f"copy{n}": HELD_OUT[n][:2] + (split,) for n in "01"}
    mine = write_own(tmp_path / "mine", HELD_OUT | own_pairs | copies)
    run_ingest(mine, "pairs", "mine", manifest="pairs.json", train_on=train_on)
    assert run_validate(tmp_path, max_leaked_share=0.4, max_quarantined_share=0).leaks == 2
    with raises(DataError, "validate.data_refused") as refused:
        run_validate(tmp_path, max_leaked_share=0.39)
    (fault,) = refused.value.fields["faults"]
    assert fault.code == "validate.too_many_leaks"
    assert fault.fields["group"] == "mine"
    assert fault.fields["value"] == 2
    assert fault.fields["total"] == 5
    assert fault.fields["limit"] == 0.39
    assert any("test pair mine/0 " in row for row in fault.fields["rows"])
    assert "allow_test_leakage" not in str(fault)


def pairs_of(thumbs: np.ndarray, tests: int) -> pl.DataFrame:
    """Return valid pairs with these thumbnails, [pairs, 128], and different contents. The first are test pairs."""
    halves = [half.tobytes() for pair in thumbs.astype(np.uint8) for half in (pair[:64], pair[64:])]
    paths = [f"{n}.png" for n in range(len(halves))]
    digests = [n.to_bytes(4) for n in range(len(halves))]
    images = pl.DataFrame({"path": paths, "digest": digests, "thumb": halves, "verdict": ["ok"] * len(halves)})
    split = ["test" if n < tests else "train" for n in range(len(thumbs))]
    records = pl.DataFrame({"id": paths[::2], "split": split, "image_1": paths[::2], "image_2": paths[1::2]})
    return select_valid_pairs(records, images)


def test_valid_pairs_and_single_images_stay_in_the_order_of_their_records():
    order = np.random.default_rng(0).permutation(60).tolist()
    images = pl.DataFrame({"path": [f"{n}.png" for n in order], "digest": [bytes([n]) for n in order]})
    images = images.with_columns(thumb=pl.lit(bytes(64)), verdict=pl.lit(OK))
    names = [f"{n}.png" for n in range(10)]
    records = pl.DataFrame({"id": names, "image_1": names, "image_2": names[::-1]})
    records = records.with_columns(split=pl.lit("train"), image_count=1)
    assert select_valid_pairs(records, images)["id"].to_list() == names
    assert select_valid_singles(records, images)["id"].to_list() == names


def fixed_camera(pairs: int, noise: int) -> np.ndarray:
    """Return thumbnails of one scene that differ only by noise, so that nearly all pairs are candidates."""
    random = np.random.default_rng(0)
    return np.tile(random.integers(60, 200, 64), 2) + random.integers(-noise, noise + 1, (pairs, 128))


@pytest.mark.parametrize("at_once", [1, 50, 200_000])
@pytest.mark.parametrize("kind", ["a fixed camera", "all alike", "scenes, some of them turned round"])
def test_each_row_has_the_first_test_pair_that_looks_the_same(kind, at_once, monkeypatch):
    """The result is the same as if all pairs were compared, for any number of comparisons that are made at once."""
    monkeypatch.setattr("m3diff.stages.validate.twins.COMPARED_AT_ONCE", at_once)
    random = np.random.default_rng(1)
    if kind == "scenes, some of them turned round":
        scenes = random.integers(0, 200, (9, 128))
        thumbs = scenes[random.integers(0, 9, 200)] + random.integers(0, 2, (200, 128))
        thumbs[::3] = np.roll(thumbs[::3], 64, axis=1)
    else:
        thumbs = fixed_camera(200, noise=0 if kind == "all alike" else 1)
        thumbs[::4] += random.integers(0, 2, (50, 128))
    tests = thumbs[:60]
    expected_twins = []
    for row in range(60, 200):
        for turned in (tests, np.roll(tests, 64, axis=1)):
            close = np.flatnonzero(np.abs(turned - thumbs[row]).max(axis=1) <= 2)
            if len(close):
                expected_twins.append((row, f"{2 * close[0]}.png", LOOKS_THE_SAME))
                break
    assert 20 < len(expected_twins) <= 140
    assert find_twins(pairs_of(thumbs, 60), "train", "test", 2).rows() == expected_twins


@pytest.mark.slow(10)
def test_pairs_of_a_fixed_camera_are_compared_in_little_memory():
    """There are eight million candidates, which would take a gigabyte if they were compared at once."""
    code = (
        "import resource\nfrom tests.stages.validate.test_leaks import find_twins, fixed_camera, pairs_of\n"
        "pairs = pairs_of(fixed_camera(5_000, 2), 1_000)\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "found = find_twins(pairs, 'train', 'test', 2).height\n"
        "print(found, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    twins, megabytes = map(int, done.stdout.split())
    assert twins == 0
    assert megabytes < 300
