"""What people do wrong with a folder of their own, and what `m3diff data check` says of it: found, wrong, remedy."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from m3diff.__main__ import DATA_REFUSED, main
from m3diff.commands.inspect.check import check
from m3diff.stages.ingest.params import DatasetEntry
from tests.layouts import save_picture, write_iedit, write_json, write_spot

Write = Callable[[Path], Any]
HEADER = "before,after,captions,split"
PAIR = "0.png,0_2.png,it fell,train"
ROW = dict(zip(HEADER.split(","), PAIR.split(","), strict=True))
OK = 0


def images(root: Path) -> None:
    for number in range(2):
        save_picture(root / f"{number}.png", number)
        save_picture(root / f"{number}_2.png", number, 99)


def table(*lines: str, name: str = "pairs.csv", encoding: str = "utf-8") -> Write:
    """Four images, and a table with these lines."""

    def write(root: Path) -> None:
        images(root)
        (root / name).write_bytes("".join(f"{line}\n" for line in lines).encode(encoding))

    return write


def rows(value: Any, name: str = "pairs.json") -> Write:
    def write(root: Path) -> None:
        images(root)
        write_json(root / name, value)

    return write


def row(**fields: Any) -> Write:
    """A list of one pair with other values."""
    return rows([ROW | fields])


def after(write: Write, *changes: Write) -> Write:
    return lambda root: [change(root) for change in (write, *changes)]


def put(name: str, data: bytes) -> Write:
    def write(root: Path) -> None:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)

    return write


def two_folders(names: tuple[str, ...] = ("1.png", "2.png"), others: tuple[str, ...] = ("1.png", "2.png")) -> Write:
    def write(root: Path) -> None:
        for folder, each in (("before", names), ("after", others)):
            for number, name in enumerate(each):
                save_picture(root / folder / name, number)

    return write


def absolute(root: Path) -> None:
    table(HEADER, f"{root}/0.png,{root}/0_2.png,it fell,train")(root)


def loop(root: Path) -> None:
    table(HEADER, PAIR)(root)
    (root / "0.png").unlink()
    (root / "0.png").symlink_to("0.png")


def embedded(root: Path) -> None:
    """As `datasets` writes MagicBrush."""
    images(root.parent)
    image = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    sides = [{"bytes": (root.parent / name).read_bytes(), "path": name} for name in ("0.png", "0_2.png")]
    columns = dict(zip(("source_img", "target_img"), (pa.array([side], image) for side in sides), strict=True))
    pq.write_table(pa.table(columns | {"instruction": ["let it fall"]}), root / "train.parquet")


TALK = [{"from": "human", "value": "<image><image>\nWhat changed?"}, {"from": "gpt", "value": "it fell"}]
LLAVA = {"id": "7", "image": ["0.png", "0_2.png"], "conversations": TALK}
EXPORT = LLAVA | {"images": LLAVA["image"], "metadata": {"dataset": "minichange", "split": "train"}}
SYNED = {"train": [0], "validation": [1]}

MISTAKES: dict[str, tuple[Write, int, list[str]]] = {
    "semicolons": (
        table(HEADER.replace(",", ";"), PAIR.replace(",", ";")),
        OK,
        ["columns are separated by ';': option `delimiter`", "options: {manifest: pairs.csv, delimiter: ;}"],
    ),
    "tabs": (
        table(HEADER.replace(",", "\t"), PAIR.replace(",", "\t")),
        OK,
        [r"columns are separated by '\t'", r'delimiter: "\t"'],
    ),
    "a byte order mark": (table(HEADER, PAIR, encoding="utf-8-sig"), OK, ["train         1           1"]),
    "capitals in the header": (
        table("Before,After,Captions,Split", PAIR),
        OK,
        ["before is Before", "columns: {before: Before, after: After, captions: Captions, split: Split}"],
    ),
    "columns of other names": (
        table("vorher,nachher,Änderung", "0.png,0_2.png,it fell"),
        OK,
        [
            "columns vorher, nachher, Änderung, read as: before is vorher, after is nachher, captions is Änderung",
            "columns: {before: vorher, after: nachher, captions: Änderung}",
        ],
    ),
    "columns that tell nothing": (
        table("x,y", "1,2"),
        DATA_REFUSED,
        ["has the columns x, y; none names two images: add `before` and `after`", "options: {columns: {before: "],
    ),
    "commas that are not quoted": (
        table(HEADER, "0.png,0_2.png,it fell, then broke,train"),
        DATA_REFUSED,
        ["pairs.csv, line 2: row: has 5 fields, the header 4", "put captions between double quotes"],
    ),
    "a quote that is never closed": (
        table(HEADER, '0.png,0_2.png,"it fell,train'),
        DATA_REFUSED,
        ["pairs.csv: line ", "not valid CSV", "correct the quotes there"],
    ),
    "no column for the split": (
        table("before,after,captions", "0.png,0_2.png,it fell"),
        OK,
        [
            "no column tells the split, so all pairs are train: option `split`",
            "options: {manifest: pairs.csv, split: train}",
        ],
    ),
    "splits of other names": (
        rows([ROW | {"split": split, "id": split} for split in ("Train", "validation", "dev", "testing")]),
        OK,
        ["its splits have other names", "splits: {Train: train, dev: val, testing: test, validation: val}"],
    ),
    "a split that says nothing": (
        row(split="part 3"),
        DATA_REFUSED,
        [
            "pairs.json, record 0: split 'part 3'",
            "say which splits part 3 are, for example options: {splits: {part 3: train}}",
        ],
    ),
    "a file for each split": (
        after(
            table("before,after,captions", "0.png,0_2.png,it fell", name="train.csv"),
            table("before,after,captions", "1.png,1_2.png,it broke", name="dev.csv"),
        ),
        OK,
        ["train.csv, dev.csv: a file for each split", "manifest: {train: train.csv, val: dev.csv}"],
    ),
    "several files for each split": (
        after(
            images,
            *(
                put(f"{name}.jsonl", json.dumps(ROW | {"id": name}).encode())
                for name in ("train-0", "train-1", "val-0")
            ),
        ),
        OK,
        ["manifest: {train: train-*.jsonl, val: val-0.jsonl}", "train         2           2"],
    ),
    "several tables": (
        after(images, *(put(f"part-{n}.jsonl", json.dumps(ROW).encode()) for n in range(2))),
        OK,
        ["part-*.jsonl: numbered parts of one table", "manifest: part-*.jsonl", "train         1           2"],
    ),
    "an empty table": (put("pairs.csv", b""), DATA_REFUSED, ["pairs.csv: the file is empty; fetch it again"]),
    "a header alone": (table(HEADER), DATA_REFUSED, ["NO PAIR at all"]),
    "an Excel file": (
        put("pairs.xlsx", b"PK\3\4"),
        DATA_REFUSED,
        ["pairs.xlsx: is a spreadsheet", "save it as CSV (UTF-8)"],
    ),
    "an Excel file that is called CSV": (
        put("pairs.csv", b"PK\3\4" + bytes(99)),
        DATA_REFUSED,
        ["pairs.csv: is an archive or a spreadsheet by its content", "save it as CSV (UTF-8)"],
    ),
    "a text file": (put("pairs.txt", PAIR.encode()), DATA_REFUSED, ["pairs.txt: is no table that is read; write .csv"]),
    "a video": (put("clip.mp4", b""), DATA_REFUSED, ["clip.mp4: is a video, and pairs are images", "`ffmpeg -i "]),
    "a pointer of DVC": (put("images.dvc", b"outs:"), DATA_REFUSED, ["images.dvc: is DVC's pointer", "`dvc pull "]),
    "a table that Git LFS keeps": (
        put("pairs.csv", b"version https://git-lfs.github.com/spec/v1\n"),
        DATA_REFUSED,
        ["pairs.csv: is a pointer of Git LFS, not the file; fetch it: `git -C ", "lfs pull`"],
    ),
    "one folder of images": (
        lambda root: images(root / "images"),
        DATA_REFUSED,
        ["images/: holds images, but no file says which are a pair and what changed; write ", f"the header {HEADER}"],
    ),
    "two folders and no captions": (
        two_folders(),
        DATA_REFUSED,
        ["before/ and after/ hold 2 pairs of images, but no file has captions; write "],
    ),
    "two folders whose names differ": (
        two_folders(others=("1.png", "3.png")),
        DATA_REFUSED,
        ["before/ and after/ hold 2 and 2 images, 1 of the same name", "(2.png has no partner of the same name)"],
    ),
    "two folders whose suffixes differ": (
        two_folders(others=("1.jpg", "2.jpg")),
        DATA_REFUSED,
        ["0 of the same name and 2 under other suffixes (1.jpg has no partner under other suffixes)"],
    ),
    "captions by the name of both images": (
        after(two_folders(), lambda root: write_json(root / "texts.json", {"1": ["it fell"], "2": ["it broke"]})),
        OK,
        ["columns: {before: 'before/{key}.png', after: 'after/{key}.png', captions: value}"],
    ),
    "captions in another file": (
        after(table("before,after", "0.png,0_2.png"), put("captions.txt", b"it fell")),
        DATA_REFUSED,
        [
            "has the columns before, after; none holds captions",
            "captions that stand in another file belong in this one",
        ],
    ),
    "an image missing": (
        table(HEADER, "9.png,0_2.png,it fell,train"),
        DATA_REFUSED,
        ["missing images: 1", "9.png: is nowhere below", "fetch the images"],
    ),
    "an absolute path": (absolute, OK, ["images 2, of them 0 missing"]),
    "an address": (
        table(HEADER, "https://x.example/9.png,0_2.png,it fell,train"),
        DATA_REFUSED,
        ["https://x.example/9.png: is an address; download the images into"],
    ),
    "a path of 5,000 letters": (row(before="a" * 5_000), DATA_REFUSED, ["missing images: 1", "is nowhere below"]),
    "braces in the header": (
        table("{x},y}", "0.png,0_2.png"),
        DATA_REFUSED,
        ["pairs.csv: has the columns nothing; none names two images"],
    ),
    "a symbolic link to itself": (loop, DATA_REFUSED, ["0.png: is a symbolic link to 0.png, which leads to no file"]),
    "captions that are a number": (
        row(captions=7),
        DATA_REFUSED,
        [
            "references: expected a list of text, found a whole number 7",
            "captions are a text, a list of texts, or a JSON",
        ],
    ),
    "a list in Python's form": (
        table(HEADER, "0.png,0_2.png,\"['it fell', 'it broke']\",train"),
        DATA_REFUSED,
        ["line 2: captions are a list written as text", "write JSON: `json.dumps(captions)`"],
    ),
    "a JSON list in quotes": (
        table(HEADER, '0.png,0_2.png,"[""it fell"", ""it broke""]",train'),
        OK,
        ["train         1           2"],
    ),
    "JSON Lines cut in the middle": (
        put("pairs.jsonl", f'{json.dumps(ROW)}\n{{"before": "0.p'.encode()),
        DATA_REFUSED,
        ["pairs.jsonl, line 2: row: line 1 column", "the file is cut off there: fetch or write it again"],
    ),
    "JSON cut in the middle": (
        put("pairs.json", b'[{"before": "0.p'),
        DATA_REFUSED,
        ["pairs.json: line 1 column 13: not valid JSON", "it ends too early, fetch it again"],
    ),
    "one image on both sides": (row(after="0.png"), DATA_REFUSED, ["both images are 0.png (1 such pairs); name both"]),
    "an image without a byte": (after(row(), put("0.png", b"")), DATA_REFUSED, ["images without a byte: 1"]),
    "a web page for an image": (
        after(row(), put("0.png", b"<!DOCTYPE html><html>404")),
        DATA_REFUSED,
        ["files that are no images: 1", "0.png: is a web page; download the image again"],
    ),
    "an image that Git LFS keeps": (
        after(row(), put("0.png", b"version https://git-lfs.github.com/spec/v1\n")),
        DATA_REFUSED,
        ["0.png: is a pointer of Git LFS; fetch it: `git lfs pull`"],
    ),
    "a video for an image": (
        after(row(), put("0.png", b"\0\0\0\x18ftypmp42")),
        DATA_REFUSED,
        ["0.png: is a video or HEIC; convert it to PNG or JPEG"],
    ),
    "rows below a key": (
        rows({"info": {}, "data": [ROW]}),
        OK,
        ["its rows stand under 'data': option `rows`", "rows: data"],
    ),
    "LLaVA's records": (
        rows([LLAVA]),
        OK,
        ["columns: {images: image, captions: conversations, id: null}", "split: train"],
    ),
    "LLaVA's records, called as IEdit's files": (
        rows([LLAVA], "train.json"),
        OK,
        ["looks like pairs", "manifest: train.json, columns: {images: image, captions: conversations, id: null}"],
    ),
    "ms-swift's records": (
        rows([{"images": LLAVA["image"], "messages": [{"role": "assistant", "content": "it fell"}]}]),
        OK,
        ["columns: {images: images, captions: messages}"],
    ),
    "M4-Instruct's records": (
        rows([{"sample_id": 0} | {key: EXPORT[key] for key in ("image", "conversations", "metadata")}]),
        OK,
        ["columns: {images: image, captions: conversations, split: metadata.split}"],
    ),
    "images inside Parquet": (
        embedded,
        OK,
        ["images 2, of them 0 missing", "columns: {before: source_img, after: target_img, captions: instruction}"],
    ),
    "the project's own export": (
        after(rows([EXPORT], "train.json"), lambda root: write_json(root / "dataset_info.json", {"m3diff_train": {}})),
        DATA_REFUSED,
        [
            "this is what `m3diff export-llava` wrote of datasets that are in ingest.datasets already",
            "split: metadata.split",
        ],
    ),
    "Syned's folder, not whole": (
        after(rows(SYNED, "splits.json"), put("instructions_with_idx_train_split.txt", b"")),
        DATA_REFUSED,
        ["looks like syned", "MISSING gt_augmented_test_clean.json", "fetch the missing files again"],
    ),
    "CARD's folder": (
        after(rows(SYNED, "splits.json"), rows({}, "change_multi_captions.json")),
        DATA_REFUSED,
        ["this is CARD's folder of Spot-the-Diff", "reader spot_the_diff"],
    ),
    "an empty folder": (lambda root: None, DATA_REFUSED, ["it holds nothing", "Expected one of: "]),
}


def say(capsys: pytest.CaptureFixture[str], *arguments: Any) -> tuple[int, str]:
    """Exit code of `m3diff data check`, and all that it prints."""
    code = main(["data", "check", *map(str, arguments)])
    printed = capsys.readouterr()
    return code, printed.out + printed.err


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_named_with_what_is_wrong_and_what_mends_it(tmp_path, capsys, name):
    write, code, words = MISTAKES[name]
    root = tmp_path / "up/raw"
    root.mkdir(parents=True)
    write(root)
    found, text = say(capsys, root)
    for each in words:
        assert each in text, text
    assert found == code, text


SUGGESTED = [name for name, (_, code, _) in MISTAKES.items() if code == OK]


@pytest.mark.parametrize("name", SUGGESTED)
def test_the_line_of_parameters_that_is_shown_reads_the_folder(tmp_path, name):
    """What is suggested is read as it was checked, once it stands in params.yaml."""
    write, _, _ = MISTAKES[name]
    (tmp_path / "raw").mkdir()
    write(tmp_path / "raw")
    lines = check(tmp_path / "raw", {}).lines
    ((given, entry),) = yaml.safe_load(lines[-1]).items()
    again = check(tmp_path / "raw", {given: DatasetEntry.model_validate(entry)})
    assert again.sound
    assert again.lines[0] == f"{tmp_path / 'raw'} is raw (pairs)"
    assert [line for line in again.lines if line.startswith(("  train ", "  val ", "  test ", "  images "))] == [
        line for line in lines if line.startswith(("  train ", "  val ", "  test ", "  images "))
    ]


def test_a_file_in_place_of_a_folder_and_a_folder_that_may_not_be_read_are_named(tmp_path, capsys, monkeypatch):
    table(HEADER, PAIR)(tmp_path)
    code, text = say(capsys, tmp_path / "pairs.csv")
    assert (code, f"pairs.csv: is a file; name its folder: `m3diff data check {tmp_path}`" in text) == (
        DATA_REFUSED,
        True,
    )

    def refuse(path: Path, *_: Any) -> Any:
        raise PermissionError(13, "Permission denied", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "iterdir", refuse)
        code, text = say(capsys, tmp_path)
    assert (code, "cannot be read: Permission denied; check its rights: `chmod u+rx " in text) == (DATA_REFUSED, True)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", refuse)
        code, text = say(capsys, tmp_path)
    assert (code, "pairs.csv: cannot be read: Permission denied; check its permissions" in text) == (DATA_REFUSED, True)


def test_the_reader_is_what_the_user_says(tmp_path, capsys):
    root = write_iedit(tmp_path / "raw")
    assert say(capsys, root)[1].startswith(f"{root} looks like iedit")
    code, text = say(capsys, root, "--reader", "pairs")
    assert text.startswith(f"{root} is read as pairs")
    assert "read as: before is img0, after is img1, captions is sents" in text
    code, text = say(capsys, root, "--reader", "spot_the_diff")
    assert (code, "  MISSING annotations/train.json" in text) == (DATA_REFUSED, True)
    with pytest.raises(SystemExit):
        say(capsys, root, "--reader", "pears")
    assert "invalid choice: 'pears'" in capsys.readouterr().err


def test_the_reader_that_is_said_goes_before_the_one_of_the_parameters(tmp_path):
    root = write_iedit(tmp_path / "raw")
    entries = {"mine": DatasetEntry(reader="iedit", root=root)}
    assert check(root, entries).lines[0] == f"{root} is mine (iedit)"
    assert check(root, entries, "iedit").lines[0] == f"{root} is mine (iedit)"
    assert check(root, entries, "pairs").lines[0] == f"{root} is read as pairs"


def test_collections_of_ones_own_get_names_of_their_own(tmp_path):
    entries: dict[str, DatasetEntry] = {}
    for folder in ("kitchen/raw", "garden/raw", "my street"):
        root = tmp_path / folder
        root.mkdir(parents=True)
        table(HEADER, PAIR)(root)
        ((name, entry),) = yaml.safe_load(check(root, entries).lines[-1]).items()
        entries[name] = DatasetEntry.model_validate(entry)
    assert list(entries) == ["raw", "raw_2", "my_street"]
    spot = write_spot(tmp_path / "second")
    taken = {"spot_the_diff": DatasetEntry(reader="spot_the_diff", root=tmp_path / "first")}
    assert check(spot, taken).lines[-1].startswith("    second: {reader: spot_the_diff")
