"""`m3diff data check` opens the images and judges as ingest and validate do: what it calls sound passes both."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import yaml
from PIL import Image

from m3diff.__main__ import DATA_REFUSED, main
from m3diff.commands.inspect import StageLimits, check
from m3diff.records.errors import DataError
from m3diff.settings.load import load_params
from m3diff.stages.ingest.params import DatasetEntry
from m3diff.stages.ingest.stage import ingest
from m3diff.stages.validate.stage import validate
from tests.layouts import WRITERS, judge_by_polars_alone
from tests.stages.validate.test_pairs import paint_box, write_pairs
from tests.test_image_comparison import draw_scene, shift_region
from tests.toy import REPOSITORY

Spoil = Callable[[Path], Any]


def replace(number: int, data: bytes) -> Spoil:
    return lambda root: (root / f"{number}_2.png").write_bytes(data)


def copy(source: str, target: str) -> Spoil:
    return lambda root: shutil.copy(root / source, root / target)


def leak(root: Path) -> None:
    """Two training pairs, 1 and 2, with the images of the test pairs 0 and 4."""
    for train, test in ((1, 0), (2, 4)):
        for side in ("", "_2"):
            shutil.copy(root / f"{test}{side}.png", root / f"{train}{side}.png")


def caption(text: str) -> Spoil:
    def write(root: Path) -> None:
        table = root / "pairs.csv"
        table.write_text(table.read_text().replace("it moved", text, 1))

    return write


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12345\n"
SPOILED: dict[str, Spoil] = {
    "a pointer of Git LFS": replace(3, POINTER),
    "a web page": replace(3, b"<!DOCTYPE html><html><title>Sign in</title></html>"),
    "JSON": replace(3, b'{"error": "not found"}'),
    "a PNG cut short": lambda root: replace(3, (root / "3_2.png").read_bytes()[:300])(root),
    "no pixel decodes": replace(3, b"\x89PNG\r\n\x1a\n" + bytes(50)),
    "a copy of the image before": copy("3.png", "3_2.png"),
    "a copy in a test pair": copy("4.png", "4_2.png"),
    "saved anew": lambda root: Image.open(root / "3.png").save(root / "3_2.png", "JPEG", quality=70),
    "too many pixels": lambda root: Image.new("1", (11_000, 10)).save(root / "3_2.png"),
    "32-bit floats": lambda root: Image.new("F", (160, 120)).save(root / "3_2.png", "TIFF"),
    "test pairs that train": leak,
    "markup": caption("<b>it moved</b>"),
    "a caption of 3,000 letters": caption("a" * 3000),
    "an image missing": lambda root: (root / "3_2.png").unlink(),
    "an image of zero bytes": replace(3, b""),
}


@pytest.mark.parametrize("case", SPOILED)
def test_a_folder_that_validate_refuses_is_not_called_sound(tmp_path, case):
    root = write_pairs(tmp_path / "own", paint_box)
    assert check(root, {})[1]
    SPOILED[case](root)
    lines, sound = check(root, {})
    assert not sound, lines
    assert any("pairs.csv, line " in line or "images" in line for line in lines)


def split_once(root: Path) -> None:
    """The first image is before a training pair and a test pair."""
    shutil.copy(root / "0.png", root / "1.png")


SOUND: dict[str, Callable[[Path], Any]] = {
    "pairs": lambda root: write_pairs(root, paint_box),
    "no change": lambda root: write_pairs(root, lambda number, image: image, "nothing has changed"),
    "a change below a pixel": lambda root: write_pairs(
        root, lambda number, image: shift_region(80, 60, 1, 1, 15)(image)
    ),
    "other sizes": lambda root: write_pairs(root, lambda number, image: paint_box(number, image).resize((80, 60))),
    "one image before in two splits": lambda root: split_once(write_pairs(root, paint_box)),
    **{reader: write for reader, write in WRITERS.items() if reader not in ("birds_to_words", "iedit")},
}
"""The two that are left out have a single pair in two splits, which is shown: more than any share of a handful."""


@pytest.mark.parametrize("case", SOUND)
def test_a_folder_that_is_called_sound_passes_both_stages_with_the_printed_entry(tmp_path, monkeypatch, case):
    judge_by_polars_alone(monkeypatch)
    limits = load_params(REPOSITORY / "params.yaml").validate_
    root = tmp_path / "raw"
    SOUND[case](root)
    lines, sound = check(root, {}, stage_limits=StageLimits(limits, tmp_path / "cache.parquet"))
    assert sound, lines
    ((name, printed),) = yaml.safe_load(lines[-1]).items()
    entry = DatasetEntry.model_validate(printed)
    monkeypatch.setattr("m3diff.images.check._check_on_cores", None)  # ingest finds every image in the cache
    if case not in ("emu_edit", "magicbrush", "syned"):  # their images are unpacked to another folder
        ingest(name, entry, tmp_path / "cache.parquet", tmp_path / "records")
        validate(limits, {name: entry}, tmp_path / "cache.parquet", tmp_path / "records", tmp_path / "clean")


def test_images_embedded_in_parquet_are_opened(tmp_path):
    rows = []
    for number in range(4):
        sides = {"before": tmp_path / "a.png", "after": tmp_path / "b.png"}
        draw_scene(number).save(sides["before"])
        paint_box(number, draw_scene(number)).save(sides["after"])
        images = {side: {"bytes": path.read_bytes(), "path": f"{side}{number}.png"} for side, path in sides.items()}
        rows.append({**images, "captions": "it moved", "split": "test" if number == 3 else "train"})
    for folder in ("sound", "spoiled"):
        (tmp_path / folder).mkdir()
        pl.DataFrame(rows).write_parquet(tmp_path / folder / "pairs.parquet")
        rows[1]["after"]["bytes"] = POINTER
    assert check(tmp_path / "sound", {})[1]
    lines, sound = check(tmp_path / "spoiled", {})
    assert not sound
    assert "pairs.parquet, row 1: after: embedded image " in "\n".join(lines)


def test_equal_images_embedded_in_parquet_are_called_by_their_table(tmp_path):
    draw_scene(1).save(tmp_path / "a.png")
    image = {"bytes": (tmp_path / "a.png").read_bytes(), "path": "a.png"}
    (tmp_path / "own").mkdir()
    table = pl.DataFrame([{"before": image, "after": image, "captions": "it moved", "split": "train"}])
    table.write_parquet(tmp_path / "own" / "pairs.parquet")
    lines, sound = check(tmp_path / "own", {})
    text = "\n".join(lines)
    assert not sound
    assert "pairs.parquet, row 0: both images are" in text
    assert "Embedded(" not in text


def test_the_command_exits_3_and_shows_what_is_counted(tmp_path, capsys, monkeypatch):
    root = write_pairs(tmp_path / "own", paint_box)
    monkeypatch.setattr("m3diff.commands.inspect.EMBEDDED_LIMITS", None)
    params = tmp_path / "params.yaml"
    profile = {"extends": str(REPOSITORY / "profiles/embedded"), "compute": {"scratch": str(tmp_path / "runs")}}
    params.write_text(yaml.safe_dump(profile))
    shutil.copy(root / "0.png", root / "1.png")
    assert main(["--params", str(params), "data", "check", str(root)]) == 0
    assert "1 image is the before-image of pairs in several splits" in capsys.readouterr().out
    assert (tmp_path / "runs/image_cache.parquet").is_file()
    (root / "5.png").write_bytes(POINTER)
    assert main(["--params", str(params), "data", "check", str(root)]) == DATA_REFUSED
    with pytest.raises(DataError):
        check(tmp_path / "none", {})


@pytest.mark.parametrize("folder", ["no", "007", "1e3", "null", "2024-01-05"])
def test_the_printed_entry_keeps_the_name_of_its_folder(tmp_path, folder):
    lines, sound = check(write_pairs(tmp_path / folder, paint_box), {})
    assert sound
    (name,) = yaml.safe_load(lines[-1])
    assert name == folder


def test_a_few_pairs_that_only_look_like_those_of_another_split_are_refused(tmp_path):
    root = tmp_path / "own"
    root.mkdir()
    rows = ["before,after,captions,split"]
    for number, split in enumerate(("train", "val", "test")):
        picture = Image.new("L", (400, 400), 40 + number)
        picture.save(root / f"{number}.png")
        picture.paste(255, (100, 100, 105, 105))
        picture.save(root / f"{number}_2.png")
        rows.append(f"{number}.png,{number}_2.png,a dot has appeared,{split}")
    (root / "pairs.csv").write_text("\n".join(rows))
    lines, sound = check(root, {})
    assert not sound
    assert any("pairs.csv, line 2" in line and "looks the same" in line for line in lines)
