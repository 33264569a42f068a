"""Damaged datasets.

Each damage has one of three effects: the dataset is refused with an error that names the file; the damaged rows go to
quarantine with their source and reason, and the other rows are kept; or the data are read as their author meant them.
"""

import errno
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from PIL import Image

from m3diff.datasets.files import describe
from m3diff.records.errors import DataError
from tests.errors import Message, raises
from tests.layouts import WRITERS, edit_json, judge_by_polars_alone, run_ingest, run_validate, save_picture

KEY = "CLEVR_default_000005.png"
IMAGE = "sc_images/CLEVR_semantic_000005.png"
CAPTIONS = "change_captions.json"
SPLITS = "splits.json"
HEADER = b"before,after,captions,split\n"
Change = Callable[[Path], Any]


def write_own(root: Path) -> Path:
    rows = [{"before": f"{n}.png", "after": f"{n}_2.png", "captions": "it fell", "split": "train"} for n in range(3)]
    for number in range(3):
        save_picture(root / f"{number}.png", number)
        save_picture(root / f"{number}_2.png", number, 99)
    pl.DataFrame(rows).write_csv(root / "pairs.csv")
    pl.DataFrame(rows).write_ndjson(root / "pairs.jsonl")
    pl.DataFrame(rows).write_parquet(root / "pairs.parquet")
    return root


LAYOUTS: dict[str, tuple[Callable[[Path], Path], str, dict[str, Any]]] = {
    "clevr": (WRITERS["clevr_change"], "clevr_change", {}),
    "dc": (WRITERS["clevr_dc"], "clevr_dc", {}),
    "iedit": (WRITERS["iedit"], "iedit", {}),
    **{kind: (write_own, "pairs", {"manifest": f"pairs.{kind}"}) for kind in ("csv", "jsonl", "parquet")},
}


def put(name: str, data: bytes) -> Change:
    return lambda root: (root / name).write_bytes(data)


def cut(name: str, keep: int) -> Change:
    return lambda root: (root / name).write_bytes((root / name).read_bytes()[:keep])


def replace(name: str, old: bytes, new: bytes) -> Change:
    def change(root: Path) -> None:
        data = (root / name).read_bytes()
        assert old in data
        (root / name).write_bytes(data.replace(old, new, 1))

    return change


def edit(name: str, change: Callable[[Any], Any]) -> Change:
    return lambda root: edit_json(root / name, change)


def caption(value: Any) -> Change:
    return edit(CAPTIONS, lambda captions: captions.update({KEY: value}))


def without(root: Path) -> Path:
    (root / IMAGE).rename(root.parent / "elsewhere.png")
    return root / IMAGE


def save_large(root: Path) -> None:
    Image.new("1", (3000, 2000)).save(root / IMAGE)


REFUSED: list[tuple[str, str, Change, str, str, dict[str, Any]]] = [
    ("captions are a list", "clevr", put(CAPTIONS, b"[]"), "datasets.other_json", CAPTIONS, {"expected": "an object"}),
    (
        "captions in Latin-1",
        "clevr",
        put(CAPTIONS, b'{"\xe9": []}'),
        "datasets.not_utf8",
        CAPTIONS,
        {"position": 2, "encoding": "WINDOWS-1252"},
    ),
    (
        "captions in UTF-16",
        "clevr",
        put(CAPTIONS, "{}".encode("utf-16")),
        "datasets.not_utf8",
        CAPTIONS,
        {"position": 0, "encoding": "UTF-16"},
    ),
    (
        "a key twice",
        "clevr",
        put(CAPTIONS, b'{"a": ["x"], "a": ["y"]}'),
        "datasets.repeated_json_key",
        CAPTIONS,
        {"value": "a"},
    ),
    ("NaN for captions", "clevr", put(CAPTIONS, b'{"a": NaN}'), "datasets.no_json_value", CAPTIONS, {"value": "NaN"}),
    ("JSON nested 100,000 deep", "clevr", put(SPLITS, b"[" * 100_000), "datasets.unusable_json", SPLITS, {}),
    (
        "a number of 5,000 digits",
        "clevr",
        put(SPLITS, b'{"train": [' + b"9" * 5000 + b"]}"),
        "datasets.unusable_json",
        SPLITS,
        {},
    ),
    (
        "a split missing",
        "clevr",
        edit(SPLITS, lambda splits: splits.pop("val")),
        "datasets.no_list_of_split",
        SPLITS,
        {"names": ["val"]},
    ),
    (
        "a column missing",
        "csv",
        replace("pairs.csv", b"after", b"later"),
        "datasets.missing_columns",
        "pairs.csv",
        {"names": ["after"]},
    ),
    (
        "a column twice",
        "csv",
        replace("pairs.csv", b"split", b"split,split"),
        "datasets.repeated_columns",
        "pairs.csv",
        {"names": ["split"]},
    ),
    (
        "a quote never closed",
        "csv",
        put("pairs.csv", HEADER + b'a,b,"c,d\n'),
        "datasets.invalid_csv",
        "pairs.csv",
        {"line": 2},
    ),
    ("a header alone", "csv", put("pairs.csv", HEADER), "ingest.no_pair", ".", {"dataset": "mini"}),
    (
        "a Parquet file cut short",
        "parquet",
        cut("pairs.parquet", 300),
        "datasets.unreadable_parquet",
        "pairs.parquet",
        {},
    ),
]


def no_list(value: Any) -> Message:
    return Message("datasets.unexpected_value", key="references", expected="a list of text", value=describe(value))


def image_path(side: str, value: str) -> Message:
    return Message("ingest.unusable_image_path", key=side, value=describe(value))


LARGE = Message("images.too_large", width=3000, height=2000)
LOOP = Message("images.unreadable_file", cause=os.strerror(errno.ELOOP))
NO_TEXT = Message("datasets.unexpected_value", key="reference 0", expected="text", value=describe(3.5))
HALF_PAIR = Message("ingest.half_surrogate_pair", key="reference 0")
TOO_MANY_FIELDS = Message("datasets.wrong_number_of_fields", value=5, expected=4)

# With the rule that the row breaks, and the fault in its reason or words of that
QUARANTINED: list[tuple[str, str, Change, str, Message | str]] = [
    ("captions are a number", "clevr", caption(7), "readable", no_list(7)),
    ("no caption", "clevr", caption([]), "references_given", "references: "),
    ("a caption is a number", "clevr", caption([3.5]), "readable", NO_TEXT),
    ("half a surrogate pair", "clevr", caption(["\ud83d"]), "readable", HALF_PAIR),
    ("HTML in a caption", "clevr", caption(["a <a href='x'>link</a>"]), "no_markup", "references: 1 "),
    ("a chat token", "clevr", caption(["bye<|im_end|>"]), "no_markup", "references: 1 "),
    ("a caption of 1 MB", "clevr", caption(["x" * 1_000_000]), "reference_length", "1000000"),
    (
        "a scene in two splits",
        "clevr",
        edit(SPLITS, lambda s: s["train"].append(9)),
        "scene_in_one_split",
        "split: scene mini/000009",
    ),
    ("a scene twice in a split", "dc", edit("split.json", lambda s: s["train"].append(9)), "id_unique", "id: mini/"),
    ("an image of zero bytes", "clevr", put(IMAGE, b""), "image_2_decodes", Message("images.empty")),
    ("an image cut short", "clevr", cut(IMAGE, 70), "image_2_decodes", Message("images.undecodable")),
    ("an image missing", "clevr", without, "images_present", Message("images.missing")),
    ("too many pixels", "clevr", save_large, "image_2_decodes", LARGE),
    ("a symbolic link to itself", "clevr", lambda r: without(r).symlink_to(r / IMAGE), "image_2_decodes", LOOP),
    (
        "a link out of the root",
        "clevr",
        lambda r: without(r).symlink_to(r.parent / "elsewhere.png"),
        "readable",
        Message("ingest.link_out_of_root", key="after"),
    ),
    (
        "a pipe for an image",
        "clevr",
        lambda r: os.mkfifo(without(r)),
        "image_2_decodes",
        Message("images.no_regular_file"),
    ),
    (
        "a path that climbs out",
        "iedit",
        edit("train.json", lambda r: r[0].update(img0="../../x")),
        "readable",
        Message("ingest.unusable_image_path", key="before"),
    ),
    (
        "an absolute path",
        "csv",
        replace("pairs.csv", b"1.png", b"/etc/passwd"),
        "readable",
        image_path("before", "/etc/passwd"),
    ),
    (
        "a NUL in a path",
        "jsonl",
        replace("pairs.jsonl", b"1.png", b"1\\u0000.png"),
        "readable",
        image_path("before", "1\0.png"),
    ),
    ("a field too many", "csv", replace("pairs.csv", b"it fell", b"it, fell"), "readable", TOO_MANY_FIELDS),
    (
        "a line of broken JSON",
        "jsonl",
        replace("pairs.jsonl", b'{"before":"1', b'{"before:"1'),
        "readable",
        Message("datasets.invalid_json_in_row"),
    ),
    ("a split of another name", "csv", replace("pairs.csv", b"train", b"dev"), "split_known", "split: dev "),
    (
        "null for an image",
        "jsonl",
        replace("pairs.jsonl", b'"1.png"', b"null"),
        "readable",
        Message("datasets.missing_value", key="before"),
    ),
]


def bom(root: Path) -> None:
    path = root / "pairs.csv"
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())


def crlf(root: Path) -> None:
    for name in ("pairs.csv", "pairs.jsonl"):
        (root / name).write_bytes((root / name).read_bytes().replace(b"\n", b"\r\n"))


def turned(root: Path) -> None:
    """Save a JPEG that is rotated by its EXIF orientation, under a file name that ends in .png."""
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (20, 10)).save(root / "0.png", "JPEG", exif=exif)


ACCEPTED: list[tuple[str, str, Change]] = [
    ("a byte order mark", "csv", bom),
    ("CRLF in CSV", "csv", crlf),
    ("CRLF in JSON Lines", "jsonl", crlf),
    ("U+2028 in JSON Lines", "jsonl", replace("pairs.jsonl", b"it fell", "it\u2028fell".encode())),
    ("a line end in a quoted field", "csv", replace("pairs.csv", b"it fell", b'"it\nfell"')),
    ("a blank last line", "csv", lambda root: (root / "pairs.csv").open("a").write("\n\n")),
    ("a JPEG under the name of a PNG, turned", "csv", turned),
]


def build(tmp_path: Path, layout: str, change: Change) -> Callable[[], Any]:
    write, reader, options = LAYOUTS[layout]
    root = write(tmp_path / "raw")
    change(root)
    return lambda: run_ingest(root, reader, **options)


@pytest.fixture(autouse=True)
def quick_suite(monkeypatch) -> None:
    judge_by_polars_alone(monkeypatch)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_sound_before_it_is_damaged(tmp_path, layout):
    build(tmp_path, layout, lambda root: None)()
    report = run_validate(tmp_path, max_quarantined_share=0)
    assert report.quarantined == report.leaks


@pytest.mark.fault("14")
@pytest.mark.parametrize("case", REFUSED, ids=[case[0] for case in REFUSED])
def test_what_cannot_be_read_is_refused_by_name(tmp_path, case):
    _, layout, change, code, file, fields = case
    ingest = build(tmp_path, layout, change)
    with raises(DataError, code, path=tmp_path / "raw" / file, **fields):
        ingest()


@pytest.mark.fault("14", "31")
@pytest.mark.parametrize("case", QUARANTINED, ids=[case[0] for case in QUARANTINED])
def test_bad_rows_are_quarantined_and_none_is_lost(tmp_path, case):
    _, layout, change, rule, words = case
    read = build(tmp_path, layout, change)()
    report = run_validate(tmp_path)
    quarantine = pl.read_parquet(tmp_path / "clean/quarantine").filter(pl.col("rules") != ["not_in_test"])
    clean = pl.read_parquet(tmp_path / "clean/records")
    assert read.rows_out == report.rows_in == clean.height + report.quarantined
    assert clean.height > 0
    assert quarantine.height > 0
    assert quarantine["source"].str.contains(r"\.(json|jsonl|csv|tsv|parquet), ").all()
    assert quarantine["rules"].list.len().min() >= 1
    reasons = quarantine.filter(pl.col("rules").list.contains(rule))["reason"].to_list()
    pattern = words.pattern if isinstance(words, Message) else re.escape(words)
    assert any(re.search(pattern, reason) for reason in reasons), reasons


@pytest.mark.fault("17")
@pytest.mark.parametrize(("layout", "change"), [c[1:] for c in ACCEPTED], ids=[c[0] for c in ACCEPTED])
def test_harmless_forms_are_read_as_they_were_meant(tmp_path, layout, change):
    build(tmp_path, layout, change)()
    report = run_validate(tmp_path)
    clean = pl.read_parquet(tmp_path / "clean/records")
    assert report.quarantined == 0
    assert clean["references"].to_list() == [["it fell"]] * 3
