"""Every remedy that `m3diff data check` prints is applied as printed to the folder that provoked it, and mends it."""

import bz2
import gzip
import io
import json
import lzma
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unicodedata import normalize

import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
import yaml

from m3diff.__main__ import DATA_REFUSED
from m3diff.commands.inspect.check import check
from m3diff.records.errors import DataError
from m3diff.stages.ingest.params import DatasetEntry
from m3diff.stages.ingest.stage import ingest
from tests.commands.inspect.test_mistakes import HEADER, LLAVA, PAIR, ROW, images, put, row, rows, say, table
from tests.layouts import save_picture, write_iedit, write_json

Write = Callable[[Path], Any]
AWKWARD = "it's #1 & 100% Köln [x] $HOME"
"""A folder's name that a shell, sed and a pattern each take for something else."""

PROGRAMS = ("sed", "iconv", "unzip", "tar", "gunzip", "bunzip2", "unxz", "mv", "python", "(echo", "m3diff")
LINES = [HEADER, PAIR]
TEXT = "".join(f"{line}\n" for line in LINES)


def by(*writes: Write) -> Write:
    return lambda root: [write(root) for write in writes]


def text(name: str, data: str, encoding: str = "utf-8") -> Write:
    return by(images, put(name, data.encode(encoding)))


def moved(path: str, name: str = "pairs.csv", data: str | None = None) -> Write:
    """A table that names an image by `path`, which lies in the folder a b."""
    return by(
        text(name, data or f"{HEADER}\n{path},0_2.png,it fell,train\n"),
        lambda root: save_picture(root / "a b/0.png", 7),
    )


def packed(name: str, inside: str = "pairs.csv", kind: str = "w:gz") -> Write:
    def write(root: Path) -> None:
        images(root)
        with tarfile.open(root / name, kind) as file:
            info = tarfile.TarInfo(inside)
            info.size = len(TEXT)
            file.addfile(info, io.BytesIO(TEXT.encode()))

    return write


def zipped(root: Path) -> None:
    images(root)
    with zipfile.ZipFile(root / "pairs.csv.zip", "w") as file:
        file.writestr("pairs.csv", TEXT)


def arrow(name: str, write: Callable[[pa.Table, str], Any]) -> Write:
    return by(images, lambda root: write(pa.table({key: [value] for key, value in ROW.items()}), str(root / name)))


def stream(found: pa.Table, path: str) -> None:
    with pa.ipc.new_stream(path, found.schema) as file:
        file.write_table(found)


def parquet(name: str, found: dict[str, Any]) -> Write:
    return by(images, lambda root: pq.write_table(pa.table(found), root / name))


def two_forms(form: str) -> Write:
    """The table has one Unicode form, the files and their folder have the other."""

    def write(root: Path) -> None:
        name, other = (normalize(each, "Köln/é 1.png") for each in ((form, "NFD") if form == "NFC" else (form, "NFC")))
        text("pairs.csv", f"{HEADER}\n{name},0_2.png,der Käse fiel,train\n")(root)
        save_picture(root / other, 7)

    return write


def linked(root: Path) -> None:
    table(*LINES)(root)
    (root / "0.png").rename(root.parent / "0.png")
    (root / "0.png").symlink_to(root.parent / "0.png")


def beside(root: Path) -> None:
    images(root.parent)
    put("pairs.csv", TEXT.encode())(root)


def below(write: Write) -> Write:
    """The images are in folders below that the rows do not name."""

    def written(root: Path) -> None:
        write(root)
        for path in list(root.glob("*.png")):
            folder = root / ("a {b}" if "_" in path.name else "c d")
            folder.mkdir(exist_ok=True)
            path.rename(folder / path.name)

    return written


def levir(root: Path) -> None:
    for side in "AB":
        save_picture(root / f"images/train/{side}/1.png", ord(side))
    record = {"filename": "1.png", "split": "train", "changeflag": 0}
    sentence = {"raw": " nothing differs .", "tokens": ["nothing", "differs", "."]}
    write_json(root / "LevirCCcaptions.json", {"images": [record | {"sentences": [sentence]}]})


def own_edits(*names: str) -> Write:
    """A file for each split, each with a name of its own for the captions."""

    def write(root: Path) -> None:
        images(root)
        for number, (file, name) in enumerate(zip(("train", "valid"), ("instruction", "prompt"), strict=True)):
            fields = {"before": f"{number}.png", "after": f"{number}_2.png", name: "move the box"}
            if names:
                lines = [",".join(fields), ",".join(fields.values())]
                put(f"{file}.csv", "\n".join(lines).encode())(root)
            else:
                write_json(root / f"{file}.json", [fields])

    return write


def splits(*values: Any) -> Write:
    return rows([ROW | {"split": value, "id": str(number)} for number, value in enumerate(values)])


TURNS = LLAVA["conversations"]
COUNTS = [
    LLAVA,
    LLAVA | {"id": "1", "image": ["0.png"]},
    LLAVA | {"id": "2", "image": "0.png"},
    {"id": "3", "conversations": TURNS},
    LLAVA | {"id": "4", "image": []},
    LLAVA | {"id": "5", "image": ["0.png"] * 3},
    LLAVA | {"id": "6", "conversations": TURNS * 2},
]

REMEDIES: dict[str, tuple[Write, str]] = {
    "Latin-1": (text("pairs.csv", TEXT.replace("it", "die Tür"), "latin-1"), "`iconv -f WINDOWS-1252"),
    "Latin-1 in JSON": (
        text("pairs.json", json.dumps([ROW | {"captions": "die Tür"}], ensure_ascii=False), "latin-1"),
        "`iconv",
    ),
    "a byte unused": (by(images, put("pairs.csv", TEXT.encode().replace(b"it", b"t\xfcr \x81"))), "`iconv -f LATIN1"),
    "UTF-16": (text("pairs.csv", TEXT, "utf-16"), "`iconv -f UTF-16 "),
    "UTF-16 without its mark": (text("pairs.csv", TEXT, "utf-16-le"), "`iconv -f UTF-16LE "),
    "UTF-16, big end first": (text("pairs.jsonl", json.dumps(ROW), "utf-16-be"), "`iconv -f UTF-16BE "),
    "gzip called CSV": (by(images, put("pairs.csv", gzip.compress(TEXT.encode()))), "`mv "),
    "Parquet called CSV": (
        by(parquet("p.parquet", {k: [v] for k, v in ROW.items()}), lambda r: (r / "p.parquet").rename(r / "p.csv")),
        "`mv ",
    ),
    "no header": (text("pairs.csv", f"{PAIR}\n"), "`(echo "),
    "no header, BOM and CRLF": (text("pairs.csv", f"\ufeff{PAIR}\r\n"), "tail -c +4"),
    "no header, semicolons": (text("pairs.csv", f"{PAIR}\n".replace(",", ";")), "`(echo 'before;after"),
    "comments": (text("pairs.csv", f"# by us\n# 2024, second\n{TEXT}"), "`sed -i.bak '1,2d'"),
    "an absolute path elsewhere": (moved("/mnt/x.y/a b/0.png"), "/mnt/x"),
    "letters of patterns": (moved("/a&b (1)+[x]$|{2}*#?/a b/0.png"), "`sed "),
    "an absolute path in JSON": (moved("", "p.json", json.dumps([ROW | {"before": "/mnt/ö/a b/0.png"}])), "u00f6"),
    "escaped slashes": (
        moved("", "p.jsonl", json.dumps(ROW | {"before": "/mnt/q/a b/0.png"}).replace("/", r"\/")),
        "`sed ",
    ),
    "a home": (moved("~/data/a b/0.png"), "`sed "),
    "a variable": (moved("$HOME/data/a b/0.png"), "`sed "),
    "a drive": (moved(r"C:\data\a b\0.png"), "`sed "),
    "a bucket": (moved("s3://ours/data/a b/0.png"), "`sed "),
    "an address of what is here": (moved("https://x.example/a b/0.png"), "`sed "),
    "another machine's file://": (moved("file:///mnt/x/a%20b/0.png"), "`sed "),
    "out of the root and in again": (moved("../a b/0.png"), "`sed "),
    "backslashes": (moved(r"a b\0.png"), "`sed "),
    "backslashes in JSON": (moved("", "p.json", json.dumps([ROW | {"before": r"a b\0.png"}])), "`sed "),
    "blanks": (text("pairs.csv", f'{HEADER}\n 0.png , 0_2.png ,"it fell, then broke",train\n'), "`sed "),
    "blanks between tabs": (text("p.tsv", f"{HEADER}\n 0.png, 0_2.png ,it fell ,train\n".replace(",", "\t")), "`sed "),
    "blanks in JSON": (row(before=" 0.png", after="0_2.png "), "`sed "),
    "another suffix": (text("pairs.csv", f"{HEADER}\n0.jpg,0_2.jpg,it fell,train\n"), "`sed "),
    "a suffix in capitals": (text("pairs.csv", f"{HEADER}\r\n0.PNG,0_2.PNG,it fell,train\r\n"), "`sed "),
    "NFC": (two_forms("NFC"), "another Unicode form"),
    "NFD": (two_forms("NFD"), "another Unicode form"),
    ".csv.gz": (by(images, put("pairs.csv.gz", gzip.compress(TEXT.encode()))), "`gunzip "),
    ".jsonl.gz": (by(images, put("p.jsonl.gz", gzip.compress(json.dumps(ROW).encode()))), "`gunzip "),
    ".json.bz2": (by(images, put("p.json.bz2", bz2.compress(json.dumps([ROW]).encode()))), "`bunzip2 "),
    ".csv.xz": (by(images, put("p.csv.xz", lzma.compress(TEXT.encode()))), "`unxz "),
    ".csv.zip": (zipped, "`unzip "),
    ".tar": (packed("pairs.tar", kind="w"), "`tar -C "),
    ".tar.gz": (packed("pairs.tar.gz"), "`tar -C "),
    ".tgz": (packed("pairs.TGZ"), "`tar -C "),
    "a tar called .gz": (packed("pairs.gz"), "`tar -C "),
    ".tar.bz2": (packed("pairs.tar.bz2", kind="w:bz2"), "`tar -C "),
    ".ndjson": (text("pairs.ndjson", json.dumps(ROW)), "`mv "),
    ".tab": (text("pairs.tab", TEXT.replace(",", "\t")), "`mv "),
    ".pq": (parquet("p.pq", {key: [value] for key, value in ROW.items()}), "`mv "),
    ".arrow": (arrow("data-00000-of-00001.arrow", stream), "`python -c"),
    ".feather": (arrow("pairs.feather", pyarrow.feather.write_feather), "`python -c"),
    "a folder too high": (
        lambda root: table(*LINES)(by(lambda r: (r / "my own").mkdir())(root) and root / "my own"),
        "`m3diff data check ",
    ),
    "a folder too deep": (by(images, lambda root: put("pairs.csv", TEXT.encode())(root.parent)), "`m3diff data check "),
    "images in folders below": (below(table(*LINES)), "columns: {before: 'c d/{before}', after: 'a {{b}}/{after}'}"),
    "a list of images, below": (below(rows([LLAVA])), "{image.0}"),
    "templates, below": (
        below(
            by(
                images,
                lambda root: write_json(
                    root / "p.json",
                    [{"before": "0.png", "after": "0_2.png"} | {"captions": "it fell", "split": "train"}],
                ),
            )
        ),
        "options: {columns: ",
    ),
    "images beside the folder": (beside, "as root: options: {manifest: "),
    "an id twice": (rows([ROW | {"id": 1}, ROW | {"id": 1, "before": "1.png"}]), "{columns: {id: null}}"),
    "a link out of the root": (linked, "follow_links: true"),
    "splits 0, 1, 2": (splits("0", "1", "2"), "options: {splits: {'0': train, '1': val, '2': test}}"),
    "splits that are numbers": (splits(0, 1, 2, 0), "options: {splits: {'0': train"),
    "is_train": (splits(True, False), "options: {splits: {'False': train, 'True': val}}"),
    "one split of no known name": (splits("train", "val", "holdout"), "options: {splits: {holdout: test}}"),
    "0, 1, 2, 3 images and 2 answers": (rows(COUNTS, "sft.json"), "1 with 2 answers, 1 with 3 images"),
    "captions called differently": (own_edits(), "options: {columns: {captions: [instruction, prompt]}}"),
    "captions called differently, CSV": (own_edits("csv"), "options: {columns: {captions: [instruction, prompt]}}"),
    "LEVIR-CC's layout": (levir, "no_change: {changeflag: "),
}


def follow(printed: str, root: Path, more: int = 1) -> bool:
    """Whether the folder is sound once the printed command or option is applied, and `more` that are printed then."""
    commands = [part for part in re.findall(r"`([^`]+)`", printed) if part.startswith(PROGRAMS)]
    if commands and commands[0].startswith("m3diff data check "):
        words = subprocess.run(f"printf '%s\\n' {commands[0]}", shell=True, capture_output=True, text=True, check=True)
        root = Path(words.stdout.splitlines()[-1])
    elif commands:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        ran = subprocess.run(commands[0], shell=True, capture_output=True, text=True, env={**os.environ, "PATH": path})
        if ran.returncode == 127:
            pytest.skip(ran.stderr)
        assert ran.returncode == 0, (commands[0], ran.stderr)
    if commands:
        found = check(root, {})
        return found.sound or (more > 0 and follow("\n".join(found.lines), root, more - 1))
    *lines, last = printed.splitlines()
    ((name, entry),) = yaml.safe_load(last).items()
    line = next((line for line in lines if "options: {" in line), "")
    if option := re.search(r"options: (\{.*\})", line):
        entry["options"] = entry.get("options", {}) | yaml.safe_load(option[1])
    if above := re.search(r"take (.*) as root", line):
        entry["root"] = above[1]
    if "by the reader pairs" in line:
        entry["reader"] = "pairs"
    if "follow_links: true" in printed:
        entry["follow_links"] = True
    return check(Path(entry["root"]), {name: DatasetEntry.model_validate(entry)}).sound


@pytest.mark.parametrize("folder", ["raw", AWKWARD])
@pytest.mark.parametrize("name", REMEDIES)
def test_a_remedy_that_is_printed_mends_the_folder_as_printed(tmp_path, capsys, name, folder):
    write, words = REMEDIES[name]
    root = tmp_path / "up" / folder
    root.mkdir(parents=True)
    write(root)
    code, printed = say(capsys, root)
    assert (code, words in printed) == (DATA_REFUSED, True), printed
    assert follow(printed.strip(), root), (printed, capsys.readouterr())


IMAGE = pa.struct([("bytes", pa.large_binary()), ("path", pa.null())])


def inside(kind: Callable[[pa.DataType], pa.DataType], listed: bool = True) -> Write:
    """Images in a Parquet file, as a column of this type holds them."""

    def write(root: Path) -> None:
        images(root.parent)
        found = [{"bytes": (root.parent / name).read_bytes(), "path": None} for name in ("0.png", "0_2.png")]
        sides = {"images": pa.array([found], kind(IMAGE))} if listed else {}
        for side, image in zip(() if listed else ("before", "after"), found, strict=not listed):
            sides[side] = pa.array([image["bytes"]], kind(IMAGE))
        rest = {"captions": pa.array(["it fell"], pa.large_string()), "split": pa.array(["train"]).dictionary_encode()}
        pq.write_table(pa.table(sides | rest), root / "data.parquet")

    return write


def numbered(*numbers: Any, suffix: str = "") -> Write:
    """A table whose column `id` pandas has made floats."""
    sides = {side: [f"{n}{end}.png" for n in (0, 1)] for side, end in (("before", ""), ("after", "_2"))}
    return parquet("p.parquet", sides | {"id": [*numbers], "captions": ["it fell"] * 2, "split": ["train"] * 2})


def from_top(form: str) -> Write:
    return lambda root: moved(form.format(root=root, quoted=root.as_uri()))(root)


READ: dict[str, Write] = {
    "sep=;": text("pairs.csv", f"sep=;\r\n{TEXT.replace(',', ';')}"),
    "sep=; behind a mark": text("pairs.csv", f"\ufeffsep=;\n{TEXT.replace(',', ';')}"),
    "sep=; between quotes": text("pairs.csv", f'"SEP=;"\r\n{TEXT.replace(",", ";")}'),
    "sep= and a tab": text("pairs.csv", "sep=\t\n" + TEXT.replace(",", "\t")),
    "sep=, in a .tsv": text("pairs.tsv", f"sep=,\n{TEXT}"),
    "decimal commas": text("p.csv", "before;after;score;captions;split\n0.png;0_2.png;0,5;it fell, then;train\n"),
    "blank lines above": text("pairs.csv", f"\n\n{TEXT}"),
    "lines of an old Macintosh": text("pairs.csv", TEXT.replace("\n", "\r")),
    "brackets": text("pairs[final].csv", TEXT),
    "a question mark": text("pairs?.csv", TEXT),
    "large lists": inside(pa.large_list),
    "lists of a fixed size": inside(lambda each: pa.list_(each, 2)),
    "lists": inside(pa.list_),
    "bytes alone": inside(lambda _: pa.binary(), listed=False),
    "large bytes alone": inside(lambda _: pa.large_binary(), listed=False),
    "ids as floats": numbered(1.0, None),
    "ids as floats and NaN": numbered(1.0, float("nan")),
    "absolute, into the root": from_top("{root}/a b/0.png"),
    "file:///": from_top("{quoted}/a%20b/0.png"),
    "file:///, not escaped": from_top("file://{root}/a b/0.png"),
    "file://localhost": from_top("file://localhost{root}/a b/0.png"),
    "file:/": from_top("file:{root}/a b/0.png"),
    "restval": splits("train", "restval", "val", "test"),
    "splits in other letters": splits("Train ", "TRAIN", "validation_1", "dev-clean", "test-other", "val2017"),
}


@pytest.mark.parametrize("name", READ)
def test_what_programs_really_write_is_read(tmp_path, capsys, name):
    root = tmp_path / "up" / "raw"
    root.mkdir(parents=True)
    READ[name](root)
    code, printed = say(capsys, root)
    assert (code, " 0 missing and 0 empty" in printed) == (0, True), printed


def names(root: Path) -> list[Any]:
    """Ids as ingest has them, in the table's order."""
    ((_, entry),) = yaml.safe_load(check(root, {}).lines[-1]).items()
    ingest("mine", DatasetEntry.model_validate(entry), root.parent / "cache", root.parent / "out")
    return [
        each.removeprefix("mine/") for each in pq.read_table(root.parent / "out/mine/records.parquet")["id"].to_pylist()
    ]


@pytest.mark.parametrize(
    ("write", "ids"),
    [
        (numbered(1.0, None), ["1", "1.png|1_2.png"]),
        (numbered(2.0**53, 3.0), ["9007199254740992", "3"]),
        (numbered(0.5, 1.0), [None, "1"]),
        (numbered("1.0", "2"), ["1.0", "2"]),
        (from_top("{quoted}/a%20b/0.png"), ["a b/0.png|0_2.png"]),
        (text("pairs.csv", f"sep=,\n{TEXT}"), ["0.png|0_2.png"]),
    ],
)
def test_names_are_those_of_the_same_table_in_plain_form(tmp_path, write, ids):
    root = tmp_path / "raw"
    root.mkdir()
    write(root)
    if None in ids:
        assert "id: expected text, found a number 0.5" in "\n".join(check(root, {}).lines)
    else:
        assert names(root) == ids


@pytest.mark.parametrize("number", [7, 7.0, "7", "7.0"])
def test_a_number_in_a_template_is_whole(tmp_path, number):
    save_picture(tmp_path / "000007.png", 1)
    save_picture(tmp_path / "b/7.png", 2)
    write_json(tmp_path / "m.json", [{"n": number, "captions": "it fell"}])
    options = {"manifest": "m.json", "split": "train", "columns": {"before": "{n:06}.png", "after": "b/{n:d}.png"}}
    assert check(tmp_path, {"mine": DatasetEntry(reader="pairs", root=tmp_path, options=options)}).sound


def test_rows_that_are_no_pair_are_counted_when_they_are_passed_over(tmp_path):
    rows(COUNTS, "sft.json")(tmp_path)
    columns = {"images": "image", "captions": "conversations", "id": None}
    options = {"manifest": "sft.json", "split": "train", "columns": columns, "pairs_only": True}
    found = check(tmp_path, {"mine": DatasetEntry(reader="pairs", root=tmp_path, options=options)})
    line = "  passed over by pairs_only: 2 with 0 images, 2 with 1 images, 1 with 2 answers, 1 with 3 images"
    assert (found.sound, line in found.lines) == (True, True), found.lines
    assert any(re.match(r"  train +1 +1$", each) for each in found.lines)


def test_a_partly_fetched_dataset_stays_what_it_is(tmp_path):
    root = write_iedit(tmp_path)
    (root / "test.json").unlink()
    assert check(root, {}).lines[0].endswith("looks like iedit")


@pytest.mark.parametrize("where", ["recognised", "given", "second of two"])
@pytest.mark.parametrize("kept", [0, 3, 4, 11, 300, -1, -8, -40])
def test_a_parquet_file_that_is_cut_short_is_named(tmp_path, capsys, kept, where):
    root = tmp_path / "raw"
    root.mkdir()
    inside(pa.list_)(root)
    data = (root / "data.parquet").read_bytes()
    (root / "data.parquet").rename(root / "whole.parquet")
    name = "zcut.parquet" if where == "second of two" else "cut.parquet"
    (root / name).write_bytes(data[:kept])
    if where != "second of two":
        (root / "whole.parquet").unlink()
    options = {"manifest": "*.parquet", "columns": {"images": "images"}}
    entry = DatasetEntry(reader="pairs", root=root, options=options)
    if where == "recognised":
        assert say(capsys, root)[0] == DATA_REFUSED
        printed = say(capsys, root)[1]
    else:
        found = check(root, {"mine": entry})
        printed = "\n".join(found.lines)
        assert not found.sound
    assert name in printed
    assert "fetch it again" in printed or "write it again" in printed
    with pytest.raises(DataError, match=name):
        ingest("mine", entry, tmp_path / "cache", tmp_path / "out")


def test_a_parquet_file_that_is_damaged_inside_is_named(tmp_path, capsys):
    """Each part of the file in turn is written over: it is read as before, or refused by name."""
    root = tmp_path / "raw"
    root.mkdir()
    inside(pa.list_)(root)
    data = (root / "data.parquet").read_bytes()
    for start in range(4, len(data) - 8, len(data) // 24):
        (root / "data.parquet").write_bytes(data[:start] + b"\xff" * 8 + data[start + 8 :])
        code, printed = say(capsys, root)
        assert code in (0, DATA_REFUSED)
        assert "data.parquet" in printed
        entry = DatasetEntry(
            reader="pairs", root=root, options={"manifest": "data.parquet", "columns": {"images": "images"}}
        )
        try:
            ingest("mine", entry, tmp_path / "cache", tmp_path / "out")
        except DataError as error:
            assert "data.parquet" in str(error)  # noqa: PT017
