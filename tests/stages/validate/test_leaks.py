import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from PIL import Image, ImageFilter

from m3diff.records.errors import DataError
from m3diff.stages.validate.leaks import find_twins, sound_pairs
from m3diff.stages.validate.rules import LEAK
from m3diff.stages.validate.stage import too_many_bad, too_many_leaked
from tests.layouts import run_ingest, run_validate, write_json


def scene(number: int, moved: bool = False) -> Image.Image:
    """160x120: soft ground and four discs, whose places follow the number; `moved` shifts one of them."""
    random = np.random.default_rng(number)
    image = Image.new("RGB", (160, 120), tuple(int(v) for v in random.integers(60, 200, 3)))
    for disc in range(4):
        x, y = (int(v) for v in random.integers(0, 90, 2))
        x += 30 if moved and disc == 0 else 0
        image.paste(tuple(int(v) for v in random.integers(0, 255, 3)), (x, y, x + 28, y + 28))
    return image.filter(ImageFilter.GaussianBlur(1))


def write_own(root: Path, pairs: dict[str, tuple[Image.Image, Image.Image, str]], suffix: str = "png", **save) -> Path:
    """A collection of pairs (before, after, split) by name, its images saved with the options `save`."""
    root.mkdir(parents=True)
    rows = []
    for name, (before, after, split) in pairs.items():
        paths = [f"{name}_{side}.{suffix}" for side in ("a", "b")]
        for image, path in zip((before, after), paths, strict=True):
            image.save(root / path, **save)
        rows.append({"id": name, "before": paths[0], "after": paths[1], "captions": ["it moved"], "split": split})
    write_json(root / "pairs.json", rows)
    return root


def ingest_own(*roots: Path) -> None:
    for root in roots:
        run_ingest(root, "pairs", root.name, manifest="pairs.json")


def quarantined(folder: Path, *roots: Path, **changes) -> dict[str, str]:
    ingest_own(*roots)
    report = run_validate(folder, max_quarantined_share=0, **changes)
    frame = pl.read_parquet(folder / "clean/quarantine.parquet")
    assert report.leaks == report.quarantined == frame.height
    assert frame["split"].unique().to_list() in ([], ["train"])
    return dict(frame.select("id", "reason").iter_rows())


HELD_OUT = {str(n): (scene(n), scene(n, moved=True), "test") for n in range(3)}


@pytest.mark.fault("16")
def test_the_same_files_under_other_names_in_another_dataset_do_not_train(tmp_path):
    official = write_own(tmp_path / "official", HELD_OUT)
    mine = write_own(
        tmp_path / "mine",
        {"copy": (scene(1), scene(1, moved=True), "train"), "own": (scene(7), scene(7, moved=True), "train")},
    )
    assert quarantined(tmp_path, mine, official) == {
        "mine/copy": "leak: test pair official/1 has the same images, so this one may not train"
    }


@pytest.mark.fault("16")
def test_the_direction_does_not_hide_a_pair(tmp_path):
    official = write_own(tmp_path / "official", HELD_OUT)
    mine = write_own(tmp_path / "mine", {"back": (scene(2, moved=True), scene(2), "train")})
    assert quarantined(tmp_path, mine, official).keys() == {"mine/back"}


@pytest.mark.fault("16")
@pytest.mark.parametrize(("suffix", "size", "save"), [("jpg", (160, 120), {"quality": 75}), ("png", (107, 80), {})])
def test_a_pair_encoded_or_resized_anew_is_found_by_its_look(tmp_path, suffix, size, save):
    official = write_own(tmp_path / "official", HELD_OUT)
    again = {"1": tuple(image.resize(size) for image in HELD_OUT["1"][:2]) + ("train",)}
    mine = write_own(tmp_path / "mine", again, suffix, **save)
    assert quarantined(tmp_path, mine, official) == {
        "mine/1": "leak: test pair official/1 looks the same, so this one may not train"
    }


def test_look_alikes_may_train_where_only_contents_count(tmp_path):
    official = write_own(tmp_path / "official", HELD_OUT)
    mine = write_own(tmp_path / "mine", {"1": HELD_OUT["1"][:2] + ("train",)}, "jpg")
    assert quarantined(tmp_path, mine, official, near_duplicate_max_diff=None) == {}


def test_one_shared_image_or_another_change_of_a_scene_is_no_leak(tmp_path):
    official = write_own(tmp_path / "official", HELD_OUT)
    mine = write_own(
        tmp_path / "mine", {"shared": (scene(1), scene(5), "train"), "none": (scene(1), scene(1), "train")}
    )
    assert quarantined(tmp_path, mine, official) == {}


def test_leaks_may_be_kept_and_are_counted_all_the_same(tmp_path):
    official = write_own(tmp_path / "official", HELD_OUT | {"v": HELD_OUT["1"][:2] + ("val",)})
    mine = write_own(tmp_path / "mine", {"copy": HELD_OUT["1"][:2] + ("train",)})
    ingest_own(official, mine)
    report = run_validate(tmp_path, allow_test_leakage=True)
    assert (report.quarantined, report.leaks) == (0, 0)
    assert report.overlaps == {"train in test": 1, "val in test": 1, "train in val": 1}


def test_exactly_the_share_of_leaked_or_bad_rows_is_allowed_where_floats_round_it_down():
    for share, count in ((0.29, 29), (0.07, 7), (0.57, 57), (0.58, 58)):
        rows = [{"dataset": "a", "split": "train", "own_split": "train", "source": "", "reason": ""}] * 100
        for rule, faults in (("leak", too_many_leaked), ("empty", too_many_bad)):
            quarantine = pl.DataFrame(rows[:count]).with_columns(rules=pl.lit([LEAK if rule == "leak" else rule]))
            assert [*faults(share, pl.DataFrame(rows[count:]), quarantine)] == []
            assert len([*faults(share - 0.001, pl.DataFrame(rows[count:]), quarantine)]) == 1


@pytest.mark.parametrize(("leaked", "split", "train_on"), [(1, "train", ["train"]), (1, "val", ["train", "val"])])
def test_above_their_own_share_leaked_pairs_stop_the_stage_with_one_remedy(leaked, split, train_on, tmp_path):
    """A share of what trains, whatever the files call it; what the limit of bad rows lets through is no excuse."""
    own = {f"own{n}": (scene(9 + n), scene(9 + n, moved=True), "train") for n in range(4 - leaked)}
    copies = {f"copy{n}": HELD_OUT[str(n)][:2] + (split,) for n in range(leaked)}
    mine = write_own(tmp_path / "mine", HELD_OUT | own | copies)
    run_ingest(mine, "pairs", "mine", manifest="pairs.json", train_on=train_on)
    assert run_validate(tmp_path, max_leaked_share=0.25, max_quarantined_share=0).leaks == 1
    with pytest.raises(DataError) as refused:
        run_validate(tmp_path, max_leaked_share=0.24)
    told = str(refused.value)
    assert "mine: 1 of 4 training pairs are in a test set, more than validate.max_leaked_share = 0.24" in told
    assert "remove these pairs from its training split" in told
    assert "test pair mine/0 has the same images" in told
    assert "allow_test_leakage" not in told
    assert pl.read_parquet(tmp_path / "clean/quarantine.parquet")["id"].to_list() == ["mine/copy0"]
    write_json(
        mine / "pairs.json", [row for row in json.loads((mine / "pairs.json").read_text()) if row["id"] != "copy0"]
    )
    run_ingest(mine, "pairs", "mine", manifest="pairs.json", train_on=train_on)
    assert run_validate(tmp_path, max_leaked_share=0).rows_out == 6


def test_validation_pairs_may_be_in_test(tmp_path):
    official = write_own(tmp_path / "official", HELD_OUT | {"v": HELD_OUT["1"][:2] + ("val",)})
    assert quarantined(tmp_path, official) == {}


def pairs_of(thumbs: np.ndarray, tests: int) -> pl.DataFrame:
    """Sound pairs of these thumbnails [pairs, 128], all of different content; the first are the test pairs."""
    halves = [half.tobytes() for pair in thumbs.astype(np.uint8) for half in (pair[:64], pair[64:])]
    paths = [f"{n}.png" for n in range(len(halves))]
    digests = [n.to_bytes(4) for n in range(len(halves))]
    images = pl.DataFrame({"path": paths, "digest": digests, "thumb": halves, "verdict": ["ok"] * len(halves)})
    split = ["test" if n < tests else "train" for n in range(len(thumbs))]
    records = pl.DataFrame({"id": paths[::2], "split": split, "before": paths[::2], "after": paths[1::2]})
    return sound_pairs(records, images)


def fixed_camera(pairs: int, noise: int) -> np.ndarray:
    """Thumbnails of a scene that differ by this noise alone, so that nearly all pairs are candidates."""
    random = np.random.default_rng(0)
    return np.tile(random.integers(60, 200, 64), 2) + random.integers(-noise, noise + 1, (pairs, 128))


@pytest.mark.parametrize("at_once", [1, 50, 200_000])
@pytest.mark.parametrize("kind", ["a fixed camera", "all alike", "scenes, some of them turned round"])
def test_each_row_has_the_first_test_pair_that_looks_the_same(kind, at_once, monkeypatch):
    """Compared with every pair against every other, whatever the number of candidates that are held at once."""
    monkeypatch.setattr("m3diff.stages.validate.leaks.COMPARED_AT_ONCE", at_once)
    random = np.random.default_rng(1)
    if kind == "scenes, some of them turned round":
        scenes = random.integers(0, 200, (9, 128))
        thumbs = scenes[random.integers(0, 9, 200)] + random.integers(0, 2, (200, 128))
        thumbs[::3] = np.roll(thumbs[::3], 64, axis=1)
    else:
        thumbs = fixed_camera(200, noise=0 if kind == "all alike" else 1)
        thumbs[::4] += random.integers(0, 2, (50, 128))
    tests = thumbs[:60]
    wanted = []
    for row in range(60, 200):
        for turned in (tests, np.roll(tests, 64, axis=1)):
            close = np.flatnonzero(np.abs(turned - thumbs[row]).max(axis=1) <= 2)
            if len(close):
                wanted.append((row, f"{2 * close[0]}.png", "looks the same"))
                break
    assert 20 < len(wanted) <= 140
    assert find_twins(pairs_of(thumbs, 60), "train", "test", 2).rows() == wanted


@pytest.mark.parametrize("noise", [0, 2])
def test_the_pairs_of_a_fixed_camera_are_compared_in_little_memory(noise):
    """Eight million candidates: in one piece they take a gigabyte."""
    code = (
        "import resource\nfrom tests.stages.validate.test_leaks import find_twins, fixed_camera, pairs_of\n"
        f"pairs = pairs_of(fixed_camera(5_000, {noise}), 1_000)\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "found = find_twins(pairs, 'train', 'test', 2).height\n"
        "print(found, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    found, megabytes = map(int, done.stdout.split())
    assert found == (0 if noise else 4_000)
    assert megabytes < 300


def test_hundred_thousand_pairs_are_compared_in_seconds():
    random = np.random.default_rng(0)
    grounds = random.integers(90, 110, (120_000, 1)) + random.integers(-9, 10, (120_000, 64))
    thumbs = [row.tobytes() for row in np.clip(grounds, 0, 255).astype(np.uint8)]
    paths = [f"{n}.png" for n in range(120_000)]
    digests = [n.to_bytes(4) for n in range(120_000)]
    images = pl.DataFrame({"path": paths, "digest": digests, "thumb": thumbs, "verdict": ["ok"] * 120_000})
    split = ["test" if n % 15 == 0 else "train" for n in range(60_000)]
    records = pl.DataFrame({"id": paths[::2], "split": split, "before": paths[::2], "after": paths[1::2]})
    start = time.perf_counter()
    assert find_twins(sound_pairs(records, images), "train", "test", 2).height == 0
    assert time.perf_counter() - start < 20
