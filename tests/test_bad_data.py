"""Ways in which a dataset can be bad. Each is refused with file, place and rule named, or its rows go to
quarantine with their source and reason and nothing is lost, or it is taken as it was meant. Nothing crashes."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from PIL import Image

from m3diff.records.errors import DataError
from tests.layouts import WRITERS, edit_json, judge_by_polars_alone, run_ingest, run_validate, save_picture

KEY, IMAGE = "CLEVR_default_000005.png", "sc_images/CLEVR_semantic_000005.png"
CAPTIONS, SPLITS = "change_captions.json", "splits.json"
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


REFUSED: list[tuple[str, str, Change, str]] = [
    ("captions are a list", "clevr", put(CAPTIONS, b"[]"), r"expected an object at the top, found a list"),
    ("captions in Latin-1", "clevr", put(CAPTIONS, b'{"\xe9": []}'), r"byte 2 is not UTF-8.*iconv -f WINDOWS-1252 "),
    ("captions in UTF-16", "clevr", put(CAPTIONS, "{}".encode("utf-16")), r"byte 0 is not UTF-8.*iconv -f UTF-16 "),
    ("a key twice", "clevr", put(CAPTIONS, b'{"a": ["x"], "a": ["y"]}'), r"key 'a' occurs twice"),
    ("NaN for captions", "clevr", put(CAPTIONS, b'{"a": NaN}'), r"NaN is no JSON value"),
    ("JSON nested 100,000 deep", "clevr", put(SPLITS, b"[" * 100_000), r"splits\.json: not usable JSON"),
    ("a number of 5,000 digits", "clevr", put(SPLITS, b'{"train": [' + b"9" * 5000 + b"]}"), r"not usable JSON"),
    ("a split missing", "clevr", edit(SPLITS, lambda splits: splits.pop("val")), r"splits\.json: no list val"),
    ("a column missing", "csv", replace("pairs.csv", b"after", b"later"), r"pairs\.csv: no column after; found before"),
    ("a column twice", "csv", replace("pairs.csv", b"split", b"split,split"), r"column split occurs twice"),
    ("a quote never closed", "csv", put("pairs.csv", HEADER + b'a,b,"c,d\n'), r"line 2: not valid CSV"),
    ("a header alone", "csv", put("pairs.csv", HEADER), r"holds no pair"),
    ("a Parquet file cut short", "parquet", cut("pairs.parquet", 300), r"pairs\.parquet: cannot be read as Parquet"),
]

QUARANTINED: list[tuple[str, str, Change, str]] = [
    ("captions are a number", "clevr", caption(7), r"references: expected a list of text, found a whole number 7"),
    ("no caption", "clevr", caption([]), r"references: there is none"),
    ("a caption is a number", "clevr", caption([3.5]), r"reference 0: expected text, found a number 3\.5"),
    ("half a surrogate pair", "clevr", caption(["\ud83d"]), r"reference 0: holds half a surrogate pair"),
    ("HTML in a caption", "clevr", caption(["a <a href='x'>link</a>"]), r"references: 1 hold HTML"),
    ("a chat token", "clevr", caption(["bye<|im_end|>"]), r"references: 1 hold HTML or a special token"),
    ("a caption of 1 MB", "clevr", caption(["x" * 1_000_000]), r"one has 1000000 characters, more than"),
    ("a scene in two splits", "clevr", edit(SPLITS, lambda s: s["train"].append(9)), r"also in a higher split"),
    ("a scene twice in a split", "dc", edit("split.json", lambda s: s["train"].append(9)), r"occurs more than once"),
    ("an image of zero bytes", "clevr", put(IMAGE, b""), r"after: .*000005\.png is empty \(0 bytes\)"),
    ("an image cut short", "clevr", cut(IMAGE, 70), r"000005\.png does not decode"),
    ("an image missing", "clevr", without, r"png is missing"),
    ("too many pixels", "clevr", save_large, r"has 3000x2000 pixels, 9,000,000 padded to a square, more"),
    ("a symbolic link to itself", "clevr", lambda r: without(r).symlink_to(r / IMAGE), r"Too many levels of symbolic"),
    (
        "a link out of the root",
        "clevr",
        lambda r: without(r).symlink_to(r.parent / "elsewhere.png"),
        "symbolic link out",
    ),
    ("a pipe for an image", "clevr", lambda r: os.mkfifo(without(r)), r"000005\.png is no regular file"),
    ("a path that climbs out", "iedit", edit("train.json", lambda r: r[0].update(img0="../../x")), r"leads out of the"),
    ("an absolute path", "csv", replace("pairs.csv", b"1.png", b"/etc/passwd"), r"leads out of the dataset's root"),
    ("a NUL in a path", "jsonl", replace("pairs.jsonl", b"1.png", b"1\\u0000.png"), r"leads out of the dataset's root"),
    ("a field too many", "csv", replace("pairs.csv", b"it fell", b"it, fell"), r"row: has 5 fields, the header 4"),
    ("a line of broken JSON", "jsonl", replace("pairs.jsonl", b'{"before":"1', b'{"before:"1'), r"row: line 1 column"),
    ("a split of another name", "csv", replace("pairs.csv", b"train", b"dev"), r"split: dev is none of train, val, te"),
    ("null for an image", "jsonl", replace("pairs.jsonl", b'"1.png"', b"null"), r"before: is missing"),
]


def bom(root: Path) -> None:
    path = root / "pairs.csv"
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())


def crlf(root: Path) -> None:
    for name in ("pairs.csv", "pairs.jsonl"):
        (root / name).write_bytes((root / name).read_bytes().replace(b"\n", b"\r\n"))


def turned(root: Path) -> None:
    """A JPEG that is stored lying and says so (EXIF orientation 6), under a name that says PNG."""
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (20, 10)).save(root / "0.png", "JPEG", exif=exif)


TAKEN: list[tuple[str, str, Change]] = [
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
@pytest.mark.parametrize(("layout", "change", "message"), [c[1:] for c in REFUSED], ids=[c[0] for c in REFUSED])
def test_what_cannot_be_read_is_refused_by_name(tmp_path, layout, change, message):
    ingest = build(tmp_path, layout, change)
    with pytest.raises(DataError, match=message) as refused:
        ingest()
    assert str(tmp_path / "raw") in str(refused.value)


@pytest.mark.fault("14", "31")
@pytest.mark.parametrize(("layout", "change", "message"), [c[1:] for c in QUARANTINED], ids=[c[0] for c in QUARANTINED])
def test_bad_rows_are_quarantined_and_none_is_lost(tmp_path, layout, change, message):
    read = build(tmp_path, layout, change)()
    report = run_validate(tmp_path)
    quarantine = pl.read_parquet(tmp_path / "clean/quarantine.parquet").filter(pl.col("rules") != ["not_in_test"])
    clean = pl.read_parquet(tmp_path / "clean/records.parquet")
    assert read.rows_out == report.rows_in == clean.height + report.quarantined
    assert clean.height > 0
    assert quarantine.height > 0
    assert quarantine["source"].str.contains(r"\.(json|jsonl|csv|tsv|parquet), ").all()
    assert quarantine["rules"].list.len().min() >= 1
    assert quarantine["reason"].str.contains(message).any(), quarantine["reason"].to_list()


@pytest.mark.fault("17")
@pytest.mark.parametrize(("layout", "change"), [c[1:] for c in TAKEN], ids=[c[0] for c in TAKEN])
def test_harmless_forms_are_read_as_they_were_meant(tmp_path, layout, change):
    build(tmp_path, layout, change)()
    report = run_validate(tmp_path)
    clean = pl.read_parquet(tmp_path / "clean/records.parquet")
    assert report.quarantined == 0
    assert clean["references"].to_list() == [["it fell"]] * 3
