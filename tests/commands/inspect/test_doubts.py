"""Guesses about meaning: `m3diff data check` reads what the files' own words tell, and asks where they tell nothing."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from m3diff.__main__ import DATA_REFUSED, main
from m3diff.records.errors import DataError
from tests.layouts import run_ingest, save_picture, write_json

Write = Callable[[Path], Any]
TEXTS = ("the lamp is gone", "a car left", "the door is open", "a tree was cut")
SPLIT = ("train", "train", "val", "test")
HEADING = "ingest.datasets in params.yaml:"


def pictures(root: Path, *folders: str) -> None:
    for number in range(len(TEXTS)):
        for shade, folder in enumerate(folders or ("p", "q")):
            save_picture(root / folder / f"{number}.png", number, 90 * shade)


def rows(**columns: Any) -> list[dict[str, Any]]:
    """Four rows; a column is a function of the row's number, a list of four, or one value."""
    return [
        {n: c(i) if callable(c) else c[i] if isinstance(c, list | tuple) else c for n, c in columns.items()}
        for i in range(len(TEXTS))
    ]


P, Q = "p/{}.png".format, "q/{}.png".format
PLAIN = rows(before=P, after=Q, captions=TEXTS, split=SPLIT)


def put(root: Path, name: str, value: list[dict[str, Any]]) -> None:
    if name.endswith(".csv"):
        pl.DataFrame(value).write_csv(root / name)
    elif name.endswith(".jsonl"):
        (root / name).write_text("".join(json.dumps(row) + "\n" for row in value))
    else:
        write_json(root / name, value)


def files(**named: list[dict[str, Any]]) -> Write:
    """Pictures and tables; __ in a name for a dot."""

    def write(root: Path) -> None:
        pictures(root)
        for name, value in named.items():
            put(root, name.replace("__", "."), value)

    return write


def after(*writes: Write) -> Write:
    return lambda root: [write(root) for write in writes]


def table(**columns: Any) -> Write:
    return files(data__csv=rows(**columns))


def captions(*texts: str, split: tuple[str, ...] = ("train", "train", "train", "val")) -> Write:
    return table(before=P, after=Q, caption=[*texts, *TEXTS][:4], split=split)


def talk(*questions: str, answers: tuple[str, ...] = TEXTS) -> Write:
    """LLaVA's records, a question a row."""
    turns = [
        [{"from": "human", "value": f"<image>\n<image>\n{question}"}, {"from": "gpt", "value": answer}]
        for question, answer in zip((questions * 4)[:4], answers, strict=True)
    ]
    return files(data__json=rows(image=lambda n: [P(n), Q(n)], conversations=turns, split=SPLIT))


def check(root: Path, capsys: pytest.CaptureFixture[str], *more: str) -> tuple[int, str]:
    code = main([*more, "data", "check", str(root)])
    printed = capsys.readouterr()
    return code, printed.out + printed.err


def entries(text: str) -> list[dict[str, Any]]:
    """The entries that are printed for params.yaml, without their names."""
    lines = text[text.index(HEADING) :].split("\n")[1:]
    return [next(iter(yaml.safe_load(line).values())) for line in lines if line.startswith("    ")]


ORDERED = [
    ("before_path", "after_path"),
    ("original", "edited"),
    ("start", "end"),
    ("previous_frame", "current_frame"),
    ("current", "next"),
    ("t1", "t2"),
    ("T0", "T1"),
    ("pre", "post"),
    ("img_2019", "img_2023"),
    ("scan_2019_05", "scan_2020_01"),
    ("sourceImg", "targetImg"),
    ("Old Photo", "New Photo"),
    ("first", "last"),
    ("posted_before", "prepared_after"),
    ("picture", "picture_edited"),
    ("folder_1", "folder_2"),
    ("image_one", "image_two"),
    ("imageA", "imageB"),
    ("beforeimg", "afterimg"),
    ("vorher", "nachher"),
    ("avant", "après"),
    ("变化前", "变化后"),
    ("input.url", "output.url"),
]


@pytest.mark.parametrize("names", ORDERED, ids="-".join)
@pytest.mark.parametrize("turned", [False, True], ids=["before first", "after first"])
def test_whole_words_of_two_columns_tell_which_is_before_whatever_their_order(tmp_path, capsys, names, turned):
    values = dict(zip(names, (P, Q), strict=True))
    order = names[::-1] if turned else names
    table(**{name: values[name] for name in order}, caption=TEXTS, split=SPLIT)(tmp_path)
    code, text = check(tmp_path, capsys)
    assert code == 0, text
    (entry,) = entries(text)
    assert (entry["options"]["columns"]["before"], entry["options"]["columns"]["after"]) == names


UNORDERED = [
    ("left_cam", "right_cam"),
    ("x", "y"),
    ("photo", "picture"),
    ("newspaper", "prediction"),  # "new" and "pre" are no words of these
    ("background", "starter"),
    ("last_image", "current_image"),  # the last one may be the one before
    ("before_old", "before_older"),
    ("new_before", "picture"),  # contradicts itself
    ("p_12", "q_11"),
]


@pytest.mark.parametrize("names", UNORDERED, ids="-".join)
def test_names_that_tell_nothing_are_asked_for_with_both_orders(tmp_path, capsys, names):
    table(**dict(zip(names, (P, Q), strict=True)), caption=TEXTS, split=SPLIT)(tmp_path)
    code, text = check(tmp_path, capsys)
    assert code == DATA_REFUSED
    assert "ASK" in text
    found = [(entry["options"]["columns"]["before"], entry["options"]["columns"]["after"]) for entry in entries(text)]
    assert sorted(found) == sorted([names, names[::-1]])


def test_folders_of_the_files_tell_where_the_columns_do_not_and_are_asked_about_where_they_contradict_them(
    tmp_path, capsys
):
    for name, columns in {
        "told": {"x": "after/{}.png".format, "y": "before/{}.png".format},
        "against": {"before": "after/{}.png".format, "after": "before/{}.png".format},
    }.items():
        pictures(tmp_path / name, "before", "after")
        put(tmp_path / name, "data.csv", rows(**columns, caption=TEXTS, split=SPLIT))
    code, text = check(tmp_path / "told", capsys)
    assert code == 0, text
    assert entries(text)[0]["options"]["columns"] == {"before": "y", "after": "x", "captions": "caption"}
    assert check(tmp_path / "against", capsys)[0] == DATA_REFUSED
    pictures(tmp_path / "list", "before", "after")
    lists = rows(images=lambda n: [f"after/{n}.png", f"before/{n}.png"], caption=TEXTS, split=SPLIT)
    put(tmp_path / "list", "data.json", lists)
    code, text = check(tmp_path / "list", capsys)
    assert code == DATA_REFUSED
    assert entries(text)[0]["options"]["columns"] == {
        "images": None,
        "before": "images.1",
        "after": "images.0",
        "captions": "caption",
    }


def test_two_folders_that_tell_nothing_are_asked_for(tmp_path, capsys):
    pictures(tmp_path, "cam_l", "cam_r")
    put(tmp_path, "data.csv", rows(name=str, caption=TEXTS, split=SPLIT))
    code, text = check(tmp_path, capsys)
    assert code == DATA_REFUSED
    assert {entry["options"]["columns"]["before"] for entry in entries(text)} == {
        "cam_l/{name}.png",
        "cam_r/{name}.png",
    }


def parquet(root: Path) -> None:
    image = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    pictures(root.parent / "pictures")
    columns = {
        name: pa.array(
            [{"bytes": (root.parent / "pictures" / of(n)).read_bytes(), "path": None} for n in range(4)], image
        )
        for name, of in (("end_frame", Q), ("start_frame", P))
    }
    pq.write_table(pa.table(columns | {"caption": TEXTS, "split": SPLIT}), root / "data.parquet")


THREE = {
    f"{split}__csv": rows(before=P, after=Q, caption=TEXTS)[start:end]
    for split, start, end in (("train", 0, 2), ("val", 2, 3), ("test", 3, 4))
}
BY_NAME = rows(image_id=lambda n: f"{n}.png", caption="the camera moved")

CASES: dict[str, tuple[Write, int, list[str]]] = {
    # images inside Parquet, and pictures that belong to one of the two
    "images in Parquet": (parquet, 0, ["before: start_frame, after: end_frame"]),
    "a mask beside": (
        table(mask=P, after=Q, after_mask=P, before=P, caption=TEXTS, split=SPLIT),
        0,
        ["columns: {captions: caption}"],
    ),
    "three frames": (
        after(
            table(frame1=P, frame2=Q, frame3="r/{}.png".format, caption=TEXTS, split=SPLIT),
            lambda root: pictures(root, "p", "q", "r"),
        ),
        DATA_REFUSED,
        ["before: frame1, after: frame2", "before: frame2, after: frame3"],
    ),
    # which table
    "the documented table": (
        after(files(baseline__json=BY_NAME, pairs__csv=PLAIN), lambda root: pictures(root, "before", "after")),
        0,
        ["not read: baseline.json", "manifest: pairs.csv"],
    ),
    "the documented table in Parquet's company": (
        files(pairs__csv=PLAIN, archive__json=PLAIN),
        0,
        ["not read: archive"],
    ),
    "a backup": (files(labels__csv=PLAIN, backup__csv=PLAIN), DATA_REFUSED, ["backup.csv, labels.csv", "which one"]),
    "a second download": (
        after(files(labels__csv=PLAIN), lambda root: put(root, "labels (1).csv", PLAIN)),
        DATA_REFUSED,
        ["manifest: labels (1).csv", "manifest: labels.csv"],
    ),
    "a file for each split": (files(**THREE), 0, ["manifest: {train: train.csv, val: val.csv, test: test.csv}"]),
    "a backup of one split": (
        files(**THREE, train_backup__csv=rows(before=P, after=Q, caption=TEXTS)),
        DATA_REFUSED,
        ["manifest: {train: train.csv, val: val.csv, test: test.csv}", "manifest: train_backup.csv"],
    ),
    "another file of one split": (
        files(train__jsonl=PLAIN[:2], valid__jsonl=PLAIN[2:], itm_valid__jsonl=PLAIN),
        DATA_REFUSED,
        ["manifest: {train: train.jsonl, val: valid.jsonl}", "manifest: itm_valid.jsonl"],
    ),
    "all beside the splits": (files(**THREE, all__csv=PLAIN), DATA_REFUSED, ["manifest: all.csv"]),
    "numbered parts": (files(part_1__csv=PLAIN[:2], part_2__csv=PLAIN[2:]), 0, ["manifest: part_*.csv"]),
    "numbered versions": (files(v1__csv=PLAIN, v2__csv=PLAIN), DATA_REFUSED, ["manifest: v1.csv", "manifest: v2.csv"]),
    "notes beside": (files(labels__csv=PLAIN, notes__csv=rows(who="x", text="it rained")), 0, ["not read: notes.csv"]),
    # which captions
    "two columns": (
        table(before=P, after=Q, caption=TEXTS, description=TEXTS, split=SPLIT),
        DATA_REFUSED,
        ["caption, description", "captions: caption}", "captions: description}", "captions: [caption, description]"],
    ),
    "two languages": (
        table(before=P, after=Q, caption_de=TEXTS, caption_en=TEXTS, split=SPLIT),
        DATA_REFUSED,
        ["caption_de"],
    ),
    "languages in an object": (
        files(data__json=rows(before=P, after=Q, captions=lambda n: {"de": TEXTS[n], "en": TEXTS[n]}, split=SPLIT)),
        DATA_REFUSED,
        ["captions: captions.de", "captions: captions.en"],
    ),
    "numbered columns": (
        table(before=P, after=Q, caption1=TEXTS, caption2=["x y", "", "", ""], split=SPLIT),
        0,
        ["captions: [caption1, caption2]", "train         2           3"],
    ),
    "captions of each image": (
        table(before=P, after=Q, before_caption=TEXTS, change_caption=TEXTS, after_caption=TEXTS, split=SPLIT),
        0,
        ["captions: change_caption", "not read: before_caption, after_caption"],
    ),
    "notes in a column": (
        table(before=P, after=Q, caption=TEXTS, notes="it rained", split=SPLIT),
        0,
        ["not read: notes"],
    ),
    "the kind of change": (
        table(before=P, after=Q, change_type="moved", caption=TEXTS, split=SPLIT),
        0,
        ["is caption"],
    ),
    # texts that are lists
    "mixed quotes": (
        captions("""["the man's hat", 'a car']"""),
        DATA_REFUSED,
        ["line 2: captions are a list", "in 1 rows"],
    ),
    "a tuple": (captions("""("the man's hat", 'a car')"""), DATA_REFUSED, ["line 2"]),
    "an array": (captions("array(['a b', 'c d'], dtype=object)"), DATA_REFUSED, ["line 2"]),
    "NumPy's print": (captions("['a b' 'c d']"), DATA_REFUSED, ["line 2"]),
    "a set": (captions("{'a b', 'c d'}"), DATA_REFUSED, ["line 2"]),
    "an object": (captions(*TEXTS[:2], "{'en': 'a b'}"), DATA_REFUSED, ["line 4: captions are an object"]),
    "PostgreSQL's array": (captions('{"a b","c d"}'), DATA_REFUSED, ["line 2"]),
    "a list without quotes": (captions("[a b, c d]"), DATA_REFUSED, ["line 2"]),
    "a list in a list": (
        files(data__json=rows(before=P, after=Q, caption=lambda n: ['["a b", "c d"]'], split=SPLIT)),
        DATA_REFUSED,
        ["record 0"],
    ),
    "words of a caption": (
        files(data__json=rows(before=P, after=Q, caption=lambda n: TEXTS[n].split(), split=SPLIT)),
        DATA_REFUSED,
        ["single words", "' '.join"],
    ),
    "a bar between": (captions("a b|c d"), DATA_REFUSED, ["'|'", "separator: '|'", "separator: ''"]),
    "semicolons between": (captions("a b; c d", "e; f"), DATA_REFUSED, ["separator: ;"]),
    "lines": (captions("a b\nc d"), DATA_REFUSED, [r'separator: "\n"']),
    "brackets in a sentence": (
        captions("(left) the car is gone (right)", "the sign says [EXIT]", "a {red} box", "(the lamp is off)"),
        0,
        [],
    ),
    # texts that say nothing
    "no word in training": (
        captions("nan", "TODO", "?"),
        0,
        ["line 2: the caption 'nan' says nothing", "'TODO' (1)", "no_caption: ['?', TODO, nan]"],
    ),
    "a number": (captions("1"), 0, ["no_caption: ['1']"]),
    "an empty one in training": (captions("", "  "), 0, ["empty captions: 2"]),
    "no word in test": (
        captions("None", split=("test", "train", "train", "train")),
        DATA_REFUSED,
        ["1 of them in test"],
    ),
    "an empty one in test": (
        captions("", split=("test", "train", "train", "train")),
        DATA_REFUSED,
        ["no_caption: ['']"],
    ),
    "words that say something": (
        captions("none of the cars moved", "nothing changed", "no change", "removed"),
        0,
        ["options: {manifest: data.csv, columns: {captions: caption}}"],
    ),
    # questions
    "the task's question": (talk("What has changed?"), 0, ["captions: conversations"]),
    "the task's question in full": (
        talk("What has changed between the two images?", "Describe the differences between these two images."),
        0,
        ["captions: conversations"],
    ),
    "one of another task": (
        talk("Is there a car in both images?"),
        DATA_REFUSED,
        ["'Is there a car in both images?' (4)"],
    ),
    "several": (
        talk("What changed?", "How many boxes are there?"),
        DATA_REFUSED,
        [
            "'What changed?' (2); 'How many boxes are there?' (2)",
            "where: {conversations.0.value:",
            "all_ask_what_changed",
        ],
    ),
    "a paraphrase": (talk("Which things look unlike before?"), DATA_REFUSED, ["all_ask_what_changed: true"]),
    "a column of questions": (
        table(before=P, after=Q, question="How many?", answer=TEXTS, split=SPLIT),
        DATA_REFUSED,
        ["'How many?' (4)", "question: question", "all_ask_what_changed: true"],
    ),
    "an instruction and its input": (
        table(
            before=P, after=Q, instruction="Look.", input=["Count.", "Count.", "", "Count."], output=TEXTS, split=SPLIT
        ),
        DATA_REFUSED,
        ["question: '{instruction} {input}'"],
    ),
    "an instruction that is the caption": (
        table(before=P, after=Q, instruction=TEXTS, split=SPLIT),
        0,
        ["captions: instruction"],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_the_words_tell_is_read_and_noted_and_what_they_do_not_tell_is_asked(tmp_path, capsys, name):
    write, code, words = CASES[name]
    write(tmp_path)
    found, text = check(tmp_path, capsys)
    assert found == code, text
    for each in words:
        assert each in text, text
    assert ("ASK" in text) <= (code == DATA_REFUSED)


@pytest.mark.parametrize("name", CASES)
def test_each_entry_that_is_printed_settles_what_was_asked(tmp_path, capsys, name):
    """Once it is in params.yaml, check finds the folder sound and ingest reads it; no question is asked twice."""
    write, code, _ = CASES[name]
    root = tmp_path / "raw"
    root.mkdir()
    write(root)
    code, text = check(root, capsys)
    found = entries(text)
    if "ASK" not in text and code == DATA_REFUSED:
        with pytest.raises(DataError, match="captions are in doubt"):
            run_ingest(root, "pairs", "own", **found[0]["options"])
        return
    assert len(found) == 1 or "ASK" in text
    params = yaml.safe_load(Path("params.yaml").read_text())
    for entry in found:
        params["ingest"]["datasets"]["own"] = entry
        (tmp_path / "params.yaml").write_text(yaml.safe_dump(params))
        code, text = check(root, capsys, "--params", str(tmp_path / "params.yaml"))
        if code == 0:
            report = run_ingest(root, "pairs", "own", **entry["options"])
            assert report.faults == 0
            assert report.pairs
        else:  # a second question, of the captions of this column
            assert "ASK" in text, text


def test_what_was_not_confirmed_is_refused_by_ingest_with_the_first_row_and_the_options(tmp_path):
    talk("How many boxes are there?")(tmp_path)
    columns = {"images": "image", "captions": "conversations", "id": None}
    with pytest.raises(DataError, match=r"data\.json, record 0: .*\(4\)") as error:
        run_ingest(tmp_path, "pairs", "own", manifest="data.json", columns=columns)
    assert "options: {all_ask_what_changed: true}" in str(error.value)
    run_ingest(tmp_path, "pairs", "own", manifest="data.json", columns=columns, all_ask_what_changed=True)


def test_pairs_whose_captions_stand_for_none_are_passed_over_and_counted(tmp_path, capsys):
    root = tmp_path / "raw"
    root.mkdir()
    pictures(root)
    texts = [["nan"], ["a car left", "NaN "], ["-"], ["a tree was cut"]]
    put(root, "data.json", rows(before=P, after=Q, captions=texts, split=SPLIT))
    report = run_ingest(root, "pairs", "own", manifest="data.json", no_caption=["nan", "-"])
    assert (report.rows_in, report.pairs, report.references) == (4, {"test": 1, "train": 1}, {"test": 1, "train": 1})
    assert "2 pairs without a caption are passed over, first data.json, record 0" in capsys.readouterr().out
    report = run_ingest(root, "pairs", "own", manifest="data.json", no_caption=[])
    assert report.references == {"test": 1, "train": 3, "val": 1}


def test_one_text_of_several_captions_is_cut_at_the_separator(tmp_path):
    captions("a b | c d |", "e")(tmp_path)
    options = {"manifest": "data.csv", "columns": {"captions": "caption"}}
    assert run_ingest(tmp_path, "pairs", "own", **options, separator="|").references == {"train": 4, "val": 1}
    assert run_ingest(tmp_path, "pairs", "own", **options, separator="").references == {"train": 3, "val": 1}


def test_a_doubt_of_an_entry_in_params_is_asked_too(tmp_path, capsys):
    """An entry by hand says nothing of words in training either, so that ingest and check agree."""
    captions("nan")(tmp_path)
    params = yaml.safe_load(Path("params.yaml").read_text())
    options = {"manifest": "data.csv", "columns": {"captions": "caption"}}
    params["ingest"]["datasets"]["own"] = {"reader": "pairs", "root": str(tmp_path), "options": options}
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(params))
    code, text = check(tmp_path, capsys, "--params", str(tmp_path / "params.yaml"))
    assert code == DATA_REFUSED
    assert "options: {no_caption: [nan]}" in text
    with pytest.raises(DataError, match="line 2"):
        run_ingest(tmp_path, "pairs", "own", **options)
