"""What people do with folders of their own, and what `m3diff data check` says: read, asked, refused or mended."""

import base64
import gzip
import io
import json
import os
import re
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from PIL import Image

from m3diff.__main__ import DATA_REFUSED, main
from m3diff.commands.inspect import check, recognise
from m3diff.commands.inspect.guess import choose
from m3diff.commands.inspect.statistics import LONG, write_statistics
from m3diff.datasets import DATASETS
from m3diff.datasets.pairs import read
from m3diff.datasets.spec import Permission, SplitCount
from m3diff.records.errors import DataError
from m3diff.records.schemas import NO_CHANGE, RECORD_SCHEMA
from m3diff.stages.ingest.params import DatasetEntry
from tests import layouts
from tests.layouts import WRITERS, edit_json, run_ingest, save_picture, write_clevr_dc, write_json, write_spot

Write = Callable[[Path], Any]
READ, ASKED, REFUSED, IN_DOUBT, MENDED = "read", "asked", "refused", "in doubt", "mended"
"""Read as it is; read once a question is answered by an entry; refused; refused by ingest, too, for what the captions
are; mended by what is printed."""

AWKWARD = "it's #1 & 100% Köln [x] $HOME"
"""A folder's name that a shell and a pattern each take for something else."""
HEADER = "before,after,captions,split"
PAIR = "0.png,0_2.png,it fell,train"
TEXT = f"{HEADER}\n{PAIR}\n"
ROW = dict(zip(HEADER.split(","), PAIR.split(","), strict=True))
SAYS = ("the lamp is gone", "a car left", "the door is open", "a tree was cut")
SPLIT = ("train", "train", "val", "test")
TALK = [{"from": "human", "value": "<image><image>\nWhat changed?"}, {"from": "gpt", "value": "it fell"}]
LLAVA = {"id": "7", "image": ["0.png", "0_2.png"], "conversations": TALK}


def images(root: Path) -> None:
    for number in range(2):
        save_picture(root / f"{number}.png", number)
        save_picture(root / f"{number}_2.png", number, 99)


def pictures(root: Path, *folders: str) -> None:
    for number in range(4):
        for shade, folder in enumerate(folders or ("p", "q")):
            save_picture(root / folder / f"{number}.png", number, 90 * shade)


def by(*writes: Write) -> Write:
    return lambda root: [write(root) for write in writes]


def put(name: str, data: bytes = b"") -> Write:
    def write(root: Path) -> None:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)

    return write


def text(name: str, data: str = TEXT, encoding: str = "utf-8") -> Write:
    return by(images, put(name, data.encode(encoding)))


def table(*lines: str) -> Write:
    return text("pairs.csv", "".join(f"{line}\n" for line in lines))


def rows(value: Any, name: str = "pairs.json") -> Write:
    return text(name, json.dumps(value))


def row(**fields: Any) -> Write:
    return rows([ROW | fields])


def splits(*values: Any) -> Write:
    return rows([ROW | {"split": value, "id": str(number)} for number, value in enumerate(values)])


def four(**columns: Any) -> list[dict[str, Any]]:
    """Four rows; a column is a function of the row's number, a list of four, or one value."""
    return [
        {n: c(i) if callable(c) else c[i] if isinstance(c, list | tuple) else c for n, c in columns.items()}
        for i in range(4)
    ]


P, Q = "p/{}.png".format, "q/{}.png".format
PLAIN = four(before=P, after=Q, captions=SAYS, split=SPLIT)
SIDES = {"before": P, "after": Q}


def store(root: Path, name: str, value: list[dict[str, Any]]) -> None:
    if name.endswith(".csv"):
        pl.DataFrame(value).write_csv(root / name)
    elif name.endswith(".jsonl"):
        (root / name).write_text("".join(json.dumps(row) + "\n" for row in value))
    else:
        write_json(root / name, value)


def files(**named: list[dict[str, Any]]) -> Write:
    return lambda root: (pictures(root), *(store(root, name.replace("__", "."), each) for name, each in named.items()))


def columns(**named: Any) -> Write:
    return files(data__csv=four(**named))


def pairs(split: tuple[str, ...] = SPLIT, **named: Any) -> Write:
    return columns(**SIDES, **named, split=split)


def says(*texts: str, split: tuple[str, ...] = ("train", "train", "train", "val")) -> Write:
    return pairs(split, caption=[*texts, *SAYS][:4])


def lists(caption: Any) -> Write:
    return files(data__json=four(**SIDES, caption=caption, split=SPLIT))


def talk(*questions: str) -> Write:
    turns = [
        [{"from": "human", "value": f"<image>\n<image>\n{question}"}, {"from": "gpt", "value": answer}]
        for question, answer in zip((questions * 4)[:4], SAYS, strict=True)
    ]
    return files(data__json=four(image=lambda n: [P(n), Q(n)], conversations=turns, split=SPLIT))


def moved(path: str, name: str = "pairs.csv", data: str | None = None) -> Write:
    """A table that names an image by `path`, which is in the folder a b."""
    rows = data or f"{HEADER}\n{path},0_2.png,it fell,train\n"
    return by(text(name, rows), lambda root: save_picture(root / "a b/0.png", 7))


def from_top(form: str) -> Write:
    return lambda root: moved(form.format(root=root, quoted=root.as_uri()))(root)


def linked(root: Path) -> None:
    row()(root)
    (root / "0.png").rename(root.parent / "0.png")
    (root / "0.png").symlink_to(root.parent / "0.png")


ENDS = {"train": (0, 2), "val": (2, 3), "test": (3, 4)}
THREE = {f"{split}__csv": four(**SIDES, caption=SAYS)[slice(*ends)] for split, ends in ENDS.items()}
BY_SPLIT = "manifest: {train: train.csv, val: val.csv, test: test.csv}"
CASES: dict[str, tuple[Write, str, list[str]]] = {
    # how a table is written
    "semicolons": (table(HEADER.replace(",", ";"), PAIR.replace(",", ";")), READ, ["by ';': option", "delimiter: ;}"]),
    "a byte order mark": (text("pairs.csv", encoding="utf-8-sig"), READ, ["train         1           1"]),
    "commas not quoted": (table(HEADER, "0.png,0_2.png,a, b,train"), REFUSED, ["line 2: row", "quote fields"]),
    "a header alone": (table(HEADER), REFUSED, ["NO PAIR at all"]),
    "rows below a key": (rows({"info": {}, "data": [ROW]}), READ, ["under 'data': option `rows`", "rows: data"]),
    # names of columns
    "other names": (table("vorher,nachher,Änderung", "0.png,0_2.png,es fiel"), READ, ["captions is Änderung"]),
    "names that tell nothing": (table("x,y", "1,2"), REFUSED, ["columns x, y; none names two", "options: {col"]),
    "a mask beside": (columns(mask=P, after=Q, after_mask=P, before=P, caption=SAYS), READ, ["{captions: caption}"]),
    "images in objects": (
        files(data__json=four(output=lambda n: {"url": Q(n)}, input=lambda n: {"url": P(n)}, text=SAYS, subset=SPLIT)),
        READ,
        ["before: input.url, after: output.url, captions: text, split: subset"],
    ),
    "folders that tell nothing": (
        by(columns(name=str, caption=SAYS), lambda root: pictures(root, "cam_l", "cam_r")),
        ASKED,
        ["before: 'cam_l/{name}.png'", "before: 'cam_r/{name}.png'"],
    ),
    # splits
    "no split": (table("before,after,captions", "0.png,0_2.png,a b"), READ, ["all pairs are train", "split: train}"]),
    "one file of a split": (
        files(my_dev__csv=four(**SIDES, captions=SAYS)),
        READ,
        ["all pairs are val", "split: val}"],
    ),
    "splits of other names": (
        splits("Train", "validation", "dev", "testing"),
        READ,
        ["splits: {Train: train, dev: val, testing: test, validation: val}"],
    ),
    "a split that says nothing": (splits("part 3"), MENDED, ["split 'part 3'", "{splits: {part 3: train}}"]),
    # which table
    "a file for each split": (files(**THREE), READ, ["a file for each split", BY_SPLIT]),
    "the documented table": (files(archive__json=PLAIN, pairs__csv=PLAIN), READ, ["not read: archive.json"]),
    # which captions
    "two columns": (
        pairs(caption=SAYS, description=SAYS),
        ASKED,
        ["captions: caption}", "captions: description}", "captions: [caption, description]"],
    ),
    "numbered columns": (pairs(caption1=SAYS, caption2=["x y", "", "", ""]), READ, ["[caption1, caption2]", "     3"]),
    "an instruction that is the caption": (pairs(instruction=SAYS), READ, ["captions: instruction"]),
    "tasks in a column": (pairs(task=["edit", "vqa"] * 2, caption=SAYS), ASKED, ["where: {task: edit}"]),
    "no captions": (table("before,after", "0.png,0_2.png"), REFUSED, ["none holds captions", "in another file belong"]),
    # captions that are lists, or none
    "mixed quotes": (says("""["the man's hat", 'a car']"""), IN_DOUBT, ["line 2: captions are a list or", "in 1 rows"]),
    "an array": (says("array(['a b', 'c d'], dtype=object)"), IN_DOUBT, ["line 2"]),
    "words of a caption": (lists(lambda n: SAYS[n].split()), IN_DOUBT, ["single words", "' '.join"]),
    "words in half of the rows": (lists(lambda n: [SAYS[n]] if n % 2 else SAYS[n].split()), READ, []),
    "a JSON list in quotes": (table(HEADER, '0.png,0_2.png,"[""a b"", ""c""]",train'), READ, ["1           2"]),
    "brackets in a sentence": (says("(left) it is gone (right)", "it says [EXIT]", "a {red} box", "(off)"), READ, []),
    "a bar between": (says("a b|c d"), ASKED, ["'|'", "separator: '|'", "separator: ''"]),
    "semicolons between": (says("a b; c d", "e; f"), ASKED, ["separator: ;"]),
    "a semicolon in one of six": (
        table(HEADER, *(f"0.png,0_2.png,{text},train" for text in ("it fell; it broke", *["it fell"] * 5))),
        READ,
        ["train         1           6"],
    ),
    "no word in training": (says("nan", "TODO", "?"), READ, ["line 2: ", "no_caption: ['?', TODO, nan]"]),
    "an empty one in training": (says("", "  "), READ, ["empty captions: 2"]),
    "no word in test": (says("None", split=SPLIT[::-1]), ASKED, ["1 of them in test"]),
    "an empty one in test": (says("", split=SPLIT[::-1]), ASKED, ["no_caption: ['']"]),
    "words that say something": (says("none of it moved", "no change", "removed"), READ, ["{captions: caption}"]),
    "captions that are a number": (row(captions=7), REFUSED, ["expected a list of text, found a whole number 7"]),
    # questions
    "the task's question": (talk("What has changed?"), READ, ["captions: conversations"]),
    "several": (
        talk("What changed?", "How many boxes are there?"),
        ASKED,
        ["'What changed?' (2); 'How many boxes are there?' (2)", "where: {conversations.0.value:"],
    ),
    "a question a row": (pairs(question="How many?", answer=SAYS), ASKED, ["How many?' (4)", "question: question"]),
    # what other programs write
    "LLaVA": (rows([LLAVA], "train.json"), READ, ["like pairs", "conversations, id: null}", "split: train"]),
    "no pairs": (rows([LLAVA, *(LLAVA | {"image": ["0.png"] * n} for n in (0, 1, 3))]), MENDED, ["{pairs_only: true}"]),
    "CARD's folder": (rows({}, "change_multi_captions.json"), REFUSED, ["CARD's folder", "reader spot_the_diff"]),
    # what is no table
    "an empty folder": (lambda root: None, REFUSED, ["it holds nothing", "Expected one of: "]),
    "an Excel file called CSV": (put("p.csv", b"PK\3\4" + bytes(99)), REFUSED, ["by its content", "CSV (UTF-8)"]),
    "a pointer of DVC": (put("images.dvc", b"outs:"), REFUSED, ["images.dvc: is DVC's pointer", "`dvc pull`"]),
    "one folder of images": (lambda r: images(r / "images"), REFUSED, ["images without a table: write ", HEADER]),
    # encodings, archives, names of files
    "Latin-1": (text("pairs.csv", TEXT.replace("it", "die Tür"), "latin-1"), MENDED, ["`iconv -f WINDOWS-1252"]),
    "Excel's line": (text("pairs.csv", "sep=;\n" + TEXT.replace(",", ";")), READ, ["train         1           1"]),
    "gzip called CSV": (by(images, put("pairs.csv", gzip.compress(TEXT.encode()))), MENDED, ["`mv "]),
    "an archive": (put("pairs.tar.gz", b"x"), REFUSED, ["pairs.tar.gz: is an archive; unpack it"]),
    "a folder too high": (lambda r: ((r / "my").mkdir(), row()(r / "my")), MENDED, ["`m3diff data "]),
    "a folder too deep": (by(images, lambda r: put("pairs.csv", TEXT.encode())(r.parent)), REFUSED, ["`m3diff data "]),
    # images that are not where the rows say
    "an image missing": (row(before="9.png"), REFUSED, ["missing images: 1", "9.png: is no file below"]),
    "an absolute path": (from_top("{root}/a b/0.png"), READ, ["images 2, of them 0 missing"]),
    **{
        f"elsewhere: {path}": (moved(path), REFUSED, [f"{path!r}: there is 'a b/0.png'; write paths relative to "])
        for path in ("/mnt/x.y/a b/0.png", "C:\\data\\a b\\0.png", "file:///mnt/x/a%20b/0.png", "../a b/0.png")
    },
    "out of the root": (row(before="/mnt/9.png"), REFUSED, ["/mnt/9.png: leads out of the root", "image_root"]),
    "backslashes": (moved(r"a b\0.png"), REFUSED, ["there is 'a b/0.png'; write paths"]),
    "capitals in a name": (row(before="0.PNG"), REFUSED, ["'0.PNG': there is '0.png'; write paths"]),
    "a link out of the root": (linked, MENDED, ["set follow_links"]),
    "an id twice": (rows([ROW | {"id": 1}, ROW | {"id": 1, "before": "1.png"}]), MENDED, ["{columns: {id: null}}"]),
    "one image on both sides": (row(after="0.png"), REFUSED, ["pairs of one image: 1", "both images are 0.png"]),
    "an image without a byte": (by(row(), put("0.png")), REFUSED, ["images without a byte: 1"]),
}


def look(root: Path, entry: Mapping[str, Any] | None = None) -> tuple[bool, str]:
    try:
        lines, sound = check(root, {"own": DatasetEntry.model_validate(entry)} if entry else {})
        return sound, "\n".join(lines)
    except DataError as error:
        return False, str(error)


def entries(told: str) -> list[dict[str, Any]]:
    lines = told[told.index("ingest.datasets in params.yaml:") :].split("\n")[1:]
    return [next(iter(yaml.safe_load(line).values())) for line in lines if line.startswith("    ")]


def counts(told: str) -> list[str]:
    return [line for line in told.split("\n") if re.match("  (train|val|test|images) ", line)]


@pytest.mark.parametrize("name", CASES)
def test_a_folder_is_read_asked_about_refused_or_mended_and_what_is_printed_works(tmp_path, name):
    """Entries read the folder as it was checked, and no question is asked twice; remedies are applied as printed."""
    write, kind, words = CASES[name]
    root = tmp_path / "up" / (AWKWARD if kind == MENDED else "raw")
    root.mkdir(parents=True)
    write(root)
    sound, told = look(root)
    assert [each for each in words if each not in told] == [], told
    assert (sound, "  ASK " in told) == (kind == READ, kind == ASKED), told
    if kind == IN_DOUBT:
        with pytest.raises(DataError, match="captions are in doubt"):
            run_ingest(root, "pairs", "own", **entries(told)[0]["options"])
    if kind == MENDED:
        assert is_mended(told, root), told
    found = entries(told) if kind in (READ, ASKED) else []
    assert len(found) == 1 or kind != READ
    for entry in found:
        again, answered = look(root, entry)
        assert again or (kind == ASKED and "  ASK " in answered), (
            answered
        )  # a second question, of this column's captions
        assert kind != READ or "no_caption" in told or counts(answered) == counts(told)
        if again:
            report = run_ingest(root, "pairs", "own", **entry["options"])
            assert (report.faults, bool(report.pairs)) == (0, True)


def is_mended(told: str, root: Path) -> bool:
    if command := next(
        (part for part in re.findall(r"`([^`]+)`", told) if part.startswith(("iconv", "mv", "m3d"))), ""
    ):
        if not command.startswith("m3diff"):
            subprocess.run(command, shell=True, check=True)
            root = next(path.parent for path in root.rglob("*.csv*"))
        else:
            words = subprocess.run(f"printf '%s\\n' {command}", shell=True, capture_output=True, text=True, check=True)
            root = Path(words.stdout.splitlines()[-1])
        told = look(root)[1]
    (entry,) = entries(told)
    line = next((line for line in told.splitlines()[:-1] if "options: {" in line), "")
    if option := re.search(r"options: (\{.*\})", line):
        entry["options"] = entry.get("options", {}) | yaml.safe_load(option[1])
    entry["follow_links"] = "set follow_links" in told
    return look(Path(entry["root"]), entry)[0]


ORDERED = """before_path after_path, original edited, start end, previous_frame current_frame, current next, t1 t2,
    T0 T1, pre post, img_2019 img_2023, scan_2019_05 scan_2020_01, sourceImg targetImg, first last,
    picture picture_edited, posted_before prepared_after, folder_1 folder_2, image_one image_two, imageA imageB,
    beforeimg afterimg, vorher nachher, avant après, 变化前 变化后, input.url output.url"""
UNORDERED = """left_cam right_cam, x y, photo picture, newspaper prediction, forward starter,
    last_image current_image, before_old before_older, new_before picture, p_12 q_11"""
"""Whole words decide: `new` and `pre` are no words of newspaper and prediction; `last` may be the one before."""


@pytest.mark.parametrize("names", [*ORDERED.split(","), *UNORDERED.split(",")])
def test_whole_words_of_two_names_tell_which_is_before_in_any_order_or_both_orders_are_left_open(names):
    before, after = names.split()
    for given in ((before, after), (after, before)):
        told = [(before, after)] if names in ORDERED.split(",") else [given, given[::-1]]
        assert choose(given) == told
        assert choose([*given, "after_mask"]) == told
    assert choose(["photo", "before", "after"]) == [("before", "after")], "two that say so before one"


def test_a_doubt_of_an_entry_by_hand_is_asked_too_and_refused_by_ingest_with_the_first_row(tmp_path):
    options = {"manifest": "data.csv", "columns": {"captions": "caption"}}
    says("nan")(tmp_path)
    sound, told = look(tmp_path, {"reader": "pairs", "root": str(tmp_path), "options": options})
    assert (sound, "options: {no_caption: [nan]}" in told) == (False, True)
    with pytest.raises(DataError, match=r"(?s)data\.csv, line 2: .*options: \{no_caption: \[nan\]\}"):
        run_ingest(tmp_path, "pairs", "own", **options)
    with pytest.raises(DataError, match=r"no_caption: \['-', nan\]"):
        run_ingest(tmp_path, "pairs", "own", **options, no_caption=["-"])


def test_pairs_whose_captions_stand_for_none_are_passed_over_and_counted(tmp_path, capsys):
    root = tmp_path / "raw"
    pictures(root)
    texts = [["nan"], ["a car left", "NaN "], ["-"], ["a tree was cut"]]
    store(root, "data.json", four(**SIDES, captions=texts, split=SPLIT))
    report = run_ingest(root, "pairs", "own", manifest="data.json", no_caption=["nan", "-"])
    assert (report.rows_in, report.pairs, report.references) == (4, {"test": 1, "train": 1}, {"test": 1, "train": 1})
    assert "2 pairs without a caption are passed over, first data.json, record 0" in capsys.readouterr().out
    report = run_ingest(root, "pairs", "own", manifest="data.json", no_caption=[])
    assert report.references == {"test": 1, "train": 3, "val": 1}


def test_one_text_of_several_captions_is_cut_at_the_separator(tmp_path):
    says("a b | c d |", "e")(tmp_path)
    options = {"manifest": "data.csv", "columns": {"captions": "caption"}}
    assert run_ingest(tmp_path, "pairs", "own", **options, separator="|").references == {"train": 4, "val": 1}
    assert run_ingest(tmp_path, "pairs", "own", **options, separator="").references == {"train": 3, "val": 1}


@pytest.mark.parametrize("number", [7, 7.0, "7", "7.0"])
def test_a_number_in_a_template_is_whole(tmp_path, number):
    save_picture(tmp_path / "000007.png", 1)
    save_picture(tmp_path / "b/7.png", 2)
    write_json(tmp_path / "m.json", [{"n": number, "captions": "it fell"}])
    options = {"manifest": "m.json", "split": "train", "columns": {"before": "{n:06}.png", "after": "b/{n:d}.png"}}
    assert look(tmp_path, {"reader": "pairs", "root": tmp_path, "options": options})[0]


def test_the_command_prints_what_check_says_and_exits_by_it(tmp_path, capsys):
    row()(tmp_path)
    assert main(["data", "check", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith(f"{tmp_path} looks like pairs\n  licence: ")
    (tmp_path / "0.png").unlink()
    assert main(["data", "check", str(tmp_path), "--reader", "pairs"]) == DATA_REFUSED
    assert capsys.readouterr().out.startswith(f"{tmp_path} is read as pairs\n")
    with pytest.raises(SystemExit):
        main(["data", "check", str(tmp_path), "--reader", "pears"])
    with pytest.raises(DataError, match="no such folder; name the folder"):
        check(tmp_path / "pairs.json", {})


@pytest.mark.parametrize(
    ("given", "name"), [(1.0, "1"), (2.0**53, "9007199254740992"), ("1.0", "1.0"), (None, "0.png|0_2.png")]
)
def test_ids_that_pandas_has_made_floats_are_whole(tmp_path, given, name):
    row(id=given)(tmp_path)
    assert [found.name for found in read(tmp_path, "pairs.json")] == [name]


@pytest.mark.parametrize("reader", sorted(DATASETS))
def test_every_layout_is_known_by_its_files_with_an_entry_and_its_missing_images_and_files_are_named(tmp_path, reader):
    root, spec = WRITERS[reader](tmp_path / "raw"), DATASETS[reader]
    lines, sound = check(root, {})
    assert (sound, lines[0]) == (True, f"{root} looks like {reader}")
    assert lines[1].startswith(f"  licence: {spec.licence.name} (train: ")
    assert [line for line in lines if "found   " in line] == [f"  found   {file}" for file in spec.files]
    assert any(line.endswith("of them 0 missing and 0 empty") for line in lines)
    assert lines[-2] == "the entry for ingest.datasets in params.yaml:"
    ((name, entry),) = yaml.safe_load(lines[-1]).items()
    assert (name, DatasetEntry.model_validate(entry)) == recognise(root)[:2]
    assert name == ("raw" if reader == "pairs" else reader)
    if reader not in ("emu_edit", "magicbrush", "syned"):  # their images are in Parquet
        images = sorted(path for path in root.rglob("*") if path.suffix.lower() in (".png", ".jpg", ".jpeg", ".gif"))
        images[0].unlink()
        images[1].write_bytes(b"")
        lines, sound = check(root, {})
        assert not sound
        assert f"  images {len(images)}, of them 1 missing and 1 empty" in lines
        assert lines[lines.index("  missing images: 1") + 1] == f"    {images[0]}"
        assert lines[lines.index("  images without a byte: 1") + 1] == f"    {images[1]}"
    for file in spec.files if len(spec.files) > 1 else ():
        if file == "grammar.json":
            continue  # without it MiniChange is CLEVR-Change's layout
        held = {path: path.read_bytes() for path in root.glob(file)}
        [path.unlink() for path in held]
        lines, sound = check(root, {})
        assert (sound, lines[0]) == (False, f"{root} looks like {reader}")
        found = [f"  {'MISSING' if each == file else 'found  '} {each}" for each in spec.files]
        assert lines[2:] == [*found, "  fetch the missing files again; nothing was read"]
        [path.write_bytes(data) for path, data in held.items()]


def test_counts_are_beside_the_published_ones_and_what_differs_is_said(tmp_path, monkeypatch):
    lines = check(write_spot(tmp_path / "spot"), {})[0]
    start = lines.index("  split     pairs  references   published:    pairs  references (Spot-the-Diff)")
    assert lines[start + 1 : start + 5] == [
        "  train         2           5                 8,566      17,676  differs",
        "  val           1           1                 1,493       3,310  differs",
        "  test          1           1                 1,270       2,107  differs",
        "  not the release of Spot-the-Diff: a part, another version, or other data in its layout",
    ]
    root, spec = write_clevr_dc(tmp_path / "dc"), DATASETS["clevr_dc"]
    exact = replace(spec.published[0], train=SplitCount(2, 3), val=SplitCount(0), test=SplitCount(1))
    monkeypatch.setitem(DATASETS.data, "clevr_dc", replace(spec, published=(exact,)))
    lines = check(root, {})[0]
    assert "  train         2           3                     2           3" in lines
    assert "  test          1           1                     1           ?" in lines
    assert not any(line.endswith("  differs") or line.startswith("  not the release") for line in lines)
    wrong = replace(exact, train=SplitCount(2, 4))
    monkeypatch.setitem(DATASETS.data, "clevr_dc", replace(spec, published=(wrong,)))
    assert "  train         2           3                     2           4  differs" in check(root, {})[0]


def test_a_dataset_of_params_is_read_with_its_own_options_and_splits_and_a_reader_that_is_said_goes_first(tmp_path):
    root = layouts.write_manifest(tmp_path / "own", "list.json", before="first", after="second")
    edit_json(root / "list.json", lambda rows: rows[0].update(split="val"))
    options = {"manifest": "list.json", "columns": {"before": "first", "after": "second"}}
    entry = DatasetEntry(reader="pairs", root=Path(os.path.relpath(root)), options=options, train_on=("train", "val"))
    lines, sound = check(root, {"other": DatasetEntry(reader="iedit", root=tmp_path / "elsewhere"), "own": entry})
    assert (sound, lines[0], "params.yaml" in "".join(lines)) == (True, f"{root} is own (pairs)", False)
    assert "  val           1           1" in lines
    root = layouts.write_iedit(tmp_path / "raw")
    entries = {"mine": DatasetEntry(reader="iedit", root=root)}
    for reader in (None, "iedit"):
        assert check(root, entries, reader)[0][0] == f"{root} is mine (iedit)"
    told = "\n".join(check(root, entries, "pairs")[0])
    assert told.startswith(f"{root} is read as pairs\n")
    assert "read as: before is img0, after is img1, captions is sents" in told
    assert "  MISSING annotations/train.json" in check(root, {}, "spot_the_diff")[0]
    edit_json(root / "train.json", lambda rows: rows[0].pop("sents"))
    assert check(root, {})[0][0] == f"{root} looks like iedit", "a faulty row is no other layout"
    (root / "test.json").unlink()
    assert check(root, {})[0][0] == f"{root} looks like iedit", "a partly fetched dataset stays what it is"


def test_collections_of_ones_own_get_names_of_their_own_as_exact_yaml(tmp_path):
    entries: dict[str, DatasetEntry] = {}
    for folder in ("kitchen/raw", "garden/raw", "it's: #1"):
        root = layouts.write_manifest(tmp_path / folder, "yes.json", captions="text")
        ((name, given),) = yaml.safe_load(check(root, entries)[0][-1]).items()
        entries[name] = DatasetEntry.model_validate(given)
        assert entries[name] == recognise(root)[1]
    assert list(entries) == ["raw", "raw_2", "it_s_1"]
    taken = {"spot_the_diff": DatasetEntry(reader="spot_the_diff", root=tmp_path / "first")}
    assert check(write_spot(tmp_path / "second"), taken)[0][-1].startswith("    second: {reader: spot_the_diff")


def test_a_folder_above_or_without_data_is_refused_with_the_place_to_look(tmp_path):
    write_spot(tmp_path / "repository/data")
    with pytest.raises(DataError, match="perhaps you mean `m3diff data check .*/repository/data`"):
        check(tmp_path / "repository", {})
    (tmp_path / "own").mkdir()
    (tmp_path / "own/b.parquet").write_text("no parquet")
    with pytest.raises(DataError, match=r"(?s)b\.parquet: cannot be read as Parquet.*Or say what it is by --reader"):
        check(tmp_path / "own", {})


# `m3diff data statistics`: figures by hand, and the page


def record(name: str, split: str = "train", references: tuple[str, ...] = ("it moved",), types=("color",), dataset="d"):
    place = f"{dataset}/{name}"
    known = {"id": place, "dataset": dataset, "split": split, "scene": place, "source": f"row {name}"}
    return known | {"references": list(references), "change_types": list(types)}


def write_clean(folder: Path, records: list[dict]) -> Path:
    for number, row in enumerate(records):
        row["before"] = str(save_picture(folder / f"{number}.png", number))
        row["after"] = str(save_picture(folder / f"{number}_2.png", number, 90))
    pq.write_table(pa.Table.from_pylist(records, schema=RECORD_SCHEMA), folder / "records.parquet")
    return folder


@pytest.fixture(scope="module")
def by_hand(tmp_path_factory) -> Path:
    long = " ".join(["word"] * (LONG + 1))
    exact = " ".join(["word"] * LONG)
    references = [("The mug, left. It is gone!", "", "gone"), ("the mug is at 3.5 cm",), (long,), (exact,)]
    types = [("color", "size"), ("color",), ("none",), ()]
    splits = ("train", "val", "test", "train")
    rows = [record(str(n), *each) for n, each in enumerate(zip(splits, references, types, strict=True))]
    folder = write_clean(tmp_path_factory.mktemp("clean"), [*rows, record("e", references=("",), dataset="empty")])
    write_statistics(folder)
    return folder


def test_the_figures_of_the_papers_tables_by_hand(by_hand):
    found = json.loads((by_hand / "statistics.json").read_text())
    one, empty = found["d"], found["empty"]
    assert (empty["pairs"], empty["references"], empty["words"], empty["over_20"]) == (1, 0, 0.0, 0.0)
    assert list(found) == ["d", "empty"]
    words = 6 + 1 + 6 + 21 + 20
    assert (one["pairs"], one["pairs_by_split"]) == (4, {"train": 2, "val": 1, "test": 1})
    assert (one["references"], one["references_per_pair"]) == (5, 5 / 4)
    assert (one["words"], one["words_per_pair"]) == pytest.approx((words / 5, words / 4))
    assert (one["sentences"], one["sentences_per_reference"]) == (6, 6 / 5)
    assert one["over_20"] == pytest.approx(1 / 5)
    assert one["vocabulary"] == len({"the", "mug", "left", "it", "is", "gone", "at", "3", "5", "cm", "word"})
    assert one["change_types"] == [["color", 2], ["none", 1], ["size", 1]]
    lengths = {label: number for label, number in one["lengths"] if number}
    assert lengths == {"1": 1, "6": 2, "20": 1, "21": 1}
    assert [label for label, _ in one["lengths"]] == [str(n) for n in range(22)]


def test_a_part_of_a_dataset_has_its_licence(tmp_path):
    records = [record(name, dataset=f"omnidiff_{name}") for name in ("real", "render")] + [record("x", dataset="z")]
    found = write_statistics(write_clean(tmp_path, records))
    assert {name: one["pairs"] for name, one in found.items()} == dict.fromkeys(
        ("omnidiff_real", "omnidiff_render", "z"), 1
    )
    assert (tmp_path / "statistics.html").read_text().count("OmniDiff (licence: none stated): show:") == 2
    with pytest.raises(DataError, match=r"records\.parquet: no such file; run `m3diff validate` first"):
        write_statistics(tmp_path / "none")


def test_the_page_fetches_nothing_and_is_equal_for_equal_records(tmp_path):
    records = [record(str(n), types=(NO_CHANGE,), dataset="clevr_change") for n in range(9)]
    folder = write_clean(tmp_path, records)
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    for record_of in records:
        Image.new("RGB", (800, 400)).save(record_of["before"], exif=exif)
    write_statistics(folder)
    page = (tmp_path / "statistics.html").read_text()
    first = re.search(r'base64,([^"]+)" alt="before"', page)[1]
    assert Image.open(io.BytesIO(base64.b64decode(first))).size == (160, 320), "small and upright"
    assert not re.search(r"https?:|<script|<link|url\(", page)
    assert page.count("data:image/webp;base64,") == 8
    write_statistics(tmp_path)
    assert (tmp_path / "statistics.html").read_text() == page


def test_what_a_licence_says_of_showing_stands_on_the_page_and_a_no_hides_the_pairs(tmp_path, monkeypatch):
    folder = write_clean(tmp_path, [record("a", dataset="clevr_dc"), record("b", dataset="mine")])
    write_statistics(folder)
    page = (folder / "statistics.html").read_text()
    assert "CLEVR-DC (licence: none stated): show: its repository or page states no licence" in page
    assert page.count('alt="before"') == 2
    spec = DATASETS["clevr_dc"]
    closed = replace(spec, licence=replace(spec.licence, show=Permission("no", "not even one")))
    monkeypatch.setitem(DATASETS.data, "clevr_dc", closed)
    write_statistics(folder)
    page = (folder / "statistics.html").read_text()
    assert "show: not even one; refused" in page
    assert page.count('alt="before"') == 1
    assert "<small>mine/b</small>" in page
