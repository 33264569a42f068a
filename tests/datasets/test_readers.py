"""Readers: example rows of every dataset, what cannot be read, and the published counts."""

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import yaml

from m3diff.datasets import DATASETS, levir_cc, omnidiff, pairs
from m3diff.datasets.files import describe, parse_json, read_splits, read_text
from m3diff.datasets.spec import Published, fault_in, fault_of_scene
from m3diff.datasets.tables import Embedded, read_table, texts
from m3diff.records.errors import DataError
from m3diff.scoring.pairs import EvalPair
from m3diff.scoring.protocols import apply
from m3diff.settings.load import load_params
from m3diff.settings.profiles import resolve
from m3diff.settings.section import ParamsError
from tests.layouts import (
    SAME,
    brush_row,
    edit_json,
    emu_row,
    levir_record,
    nlvr_line,
    run_ingest,
    run_validate,
    save_picture,
    stored,
    write_birds,
    write_clevr,
    write_clevr_dc,
    write_emu,
    write_iedit,
    write_json,
    write_levir,
    write_magicbrush,
    write_nlvr,
    write_shards,
    write_spot,
    write_syned,
)

REPOSITORY = Path.cwd()
REAL = Path("../shared/real")
real = pytest.mark.skipif(not REAL.is_dir(), reason="the real annotations are not beside the project")
BIRDS = [
    ("11", "22", "train", 'Animal 1 is "bigger"'),
    ("22", "11", "train", "other way"),
    ("11", "22", "train", "a tab\tand\nlines"),
    ("1", "2", "val", "d"),
    ("1", "2", "test", "e"),
]


def write_bird_folder(root: Path) -> Path:
    write_birds(root / "birds-to-words-v1.0.tsv", BIRDS)
    for photo in (1, 2, 11, 22):
        save_picture(root / f"images/{photo}.jpg", photo)
    return root


WRITERS: dict[str, Callable[[Path], Path]] = {
    "birds_to_words": write_bird_folder,
    "clevr_change": write_clevr,
    "clevr_dc": write_clevr_dc,
    "emu_edit": write_emu,
    "iedit": write_iedit,
    "levir_cc": write_levir,
    "magicbrush": write_magicbrush,
    "nlvr2": write_nlvr,
    "spot_the_diff": write_spot,
    "syned": write_syned,
}
DEFAULT = "CLEVR_default_000003.png"
ROWS: dict[str, list[tuple[str, str, str, str, str, list[str]]]] = {  # split, name, scene, images, references
    "birds_to_words": [
        ("train", "11_22", "11_22", "images/11.jpg", "images/22.jpg", ['Animal 1 is "bigger"', "a tab\tand\nlines"]),
        ("train", "22_11", "22_11", "images/22.jpg", "images/11.jpg", ["other way"]),
        ("val", "1_2", "1_2", "images/1.jpg", "images/2.jpg", ["d"]),
        ("test", "1_2", "1_2", "images/1.jpg", "images/2.jpg", ["e"]),
    ],
    "clevr_change": [
        (
            "train",
            "000003.png",
            "000003",
            f"images/{DEFAULT}",
            "sc_images/CLEVR_semantic_000003.png",
            ["the cube of 000003 turned red", "it became red"],
        ),
        (
            "train",
            "000003.png_n",
            "000003",
            f"images/{DEFAULT}",
            "nsc_images/CLEVR_nonsemantic_000003.png",
            ["nothing has changed", "no change was made"],
        ),
    ],
    "clevr_dc": [  # names are not padded, ids are
        ("train", "000009.png", "000009.png", "bef/9.png", "aft/9.png", ["a"]),
        ("train", "000010.png", "000010.png", "bef/10.png", "aft/10.png", ["b", "b2"]),
        ("test", "047999.png", "047999.png", "bef/47999.png", "aft/47999.png", ["c"]),
    ],
    "emu_edit": [
        ("val", "validation-2", "validation-2", "<.png>", "<.jpg>", ["add a spatula"]),
        ("val", "validation-1", "validation-1", "<.png>", "<.jpg>", [" add a rainbow"]),
        ("val", "validation-0", "validation-0", "<.png>", "<.jpg>", ["make it night"]),
        ("test", "test-1", "test-1", "<.png>", "<.jpg>", ["add a fork"]),
    ],
    "iedit": [
        ("train", "Zhopped_1", "Zhopped_1", "images/a.jpg", "images/b.gif", ["edit  of Zhopped_1 "]),
        ("train", "Zhopped_2", "Zhopped_2", "images/a.jpg", "images/b.gif", ["edit  of Zhopped_2 "]),
        ("train", "Reddit_3", "Reddit_3", "images/e.JPG", "images/f.png", ["edit  of Reddit_3 "]),
        ("val", "Reddit_4", "Reddit_4", "images/e.JPG", "images/f.png", ["edit  of Reddit_4 "]),
    ],
    "levir_cc": [
        (split, name, name, f"images/{split}/A/{name}", f"images/{split}/B/{name}", found)
        for split, name, found in (
            ("train", "train_000001.png", [f"{n} villas are built" for n in range(5)]),
            ("val", "val_000001.png", SAME),
            ("test", "test_000004.png", ["trees are removed", "an arc road is built", "a road", "villas", "a villa"]),
        )
    ],
    "magicbrush": [
        ("train", "242679-1", "242679", "<.png>", "<.png>", ["add a cat"]),
        ("train", "242679-2", "242679", "<.png>", "<.png>", ["make it black"]),
        ("val", "17-1", "17", "<.png>", "<.png>", ["remove the cup"]),
        *(
            ("test", f"139306-{n}", "139306", f"{BRUSH}-{before}.png", f"{BRUSH}-output{n}.png", [text])
            for BRUSH in ["test/images/139306/139306"]
            for n, before, text in ((1, "input", "add a dog"), (2, "output1", "put a hat on it"))
        ),
    ],
    "nlvr2": [
        (split, name, scene, f"images/{folder}/{name}-img0.png", f"images/{folder}/{name}-img1.png", found)
        for split, name, scene, folder, found in (
            ("train", "train-1-0", "train-1", "train/38", ["two dogs"]),
            ("val", "dev-850-0", "dev-850", "dev", ["a bus"]),
            ("test", "test1-0-1", "test1-0", "test1", ["a cup", "a mug"]),
            ("test", "test1-7-0", "test1-7", "test1", ["x"]),
        )
    ],
    "spot_the_diff": [
        (split, name, name, f"resized_images/{name}", f"resized_images/{name[:-4]}_2.png", found)
        for split, name, found in (
            ("train", "235.png", ["the suv is gone", "a man left", "", "it is dark"]),
            ("train", "76.png", [""]),
            ("val", "8.png", ["there are no differences"]),
            ("test", "9.png", [""]),
        )
    ],
    "syned": [
        (split, name, name, "<.png>", "<.jpg>", found)
        for split, name, found in (
            ("train", "validation-0", ["make the sky night"]),
            ("val", "validation-10", ["add a duck."]),
            ("train", "validation-2", ["zip it up"]),
            ("test", "test-0", ["a goat", "I'm just an AI, I cannot", "add a goat"]),
            ("test", "test-10", ["add a bag"]),
            ("test", "test-2", ["a fork", "a fork by it", "f", "g", "h", "add a fork"]),
        )
    ],
}
SOURCES = {  # of the first row, and of one that is merged
    "birds_to_words": "birds-to-words-v1.0.tsv, line 2 and birds-to-words-v1.0.tsv, line 5",
    "clevr_change": f"change_captions.json, {DEFAULT}",
    "clevr_dc": "captions.json, 9",
    "emu_edit": "validation-00000-of-00002-2f1a.parquet, row 0",
    "iedit": "train.json, record 0",
    "levir_cc": "LevirCCcaptions.json, image 0",
    "magicbrush": "train-00000-of-00002-2f1a.parquet, row 0",
    "nlvr2": "train.json, line 1",
    "spot_the_diff": "annotations/train.json, record 0 and 2 and 3",
    "syned": "instructions_with_idx_train_split.txt, line 1",
}


def named(image: Any) -> str:
    return f"<{image.name[-4:]}>" if isinstance(image, Embedded) else image


@pytest.mark.parametrize("reader", WRITERS)
def test_example_rows_are_read_as_they_stand(tmp_path, reader):
    rows = list(DATASETS[reader].read(WRITERS[reader](tmp_path)))
    wanted = ROWS[reader]
    found = [(row.split, row.name, row.scene, named(row.before), named(row.after), row.references) for row in rows]
    assert found[: len(wanted)] == wanted
    assert rows[0].source == SOURCES[reader]
    assert rows[0].raw_rows == 1 + SOURCES[reader].count(" and ")
    assert not any(row.fault for row in rows)


def test_change_types_are_those_of_the_annotations(tmp_path):
    clevr = [row.change_types for row in DATASETS["clevr_change"].read(write_clevr(tmp_path / "clevr"))]
    assert clevr[:4] == [["color", "size"], ["none"], ["color"], ["none"]]
    root = write_levir(tmp_path / "levir")
    for flag in (0, 1):  # sentences say whether a pair changed, and not the flag
        edit_json(
            root / "LevirCCcaptions.json",
            lambda file, flag=flag: [one.update(changeflag=flag) for one in file["images"]],
        )
        assert [row.change_types for row in levir_cc.read(root)] == [["change"], ["none"], ["change"], ["none"]]
    misspelt = levir_record("val", 9, ["a\\almost nothing has changed", *SAME[:4]])
    write_json(root / "LevirCCcaptions.json", {"images": [misspelt]})
    assert [row.change_types for row in levir_cc.read(root)] == [["none"]]
    assert set(SAME) == levir_cc.SAME


def test_images_in_parquet_are_those_of_their_row(tmp_path):
    turns = [brush_row("242679", turn, "x", turn) for turn in (1, 2)]
    write_shards(write_magicbrush(tmp_path), "train", turns[::-1], 2)
    rows = {row.name: row for row in DATASETS["magicbrush"].read(tmp_path)}
    for turn in turns:
        row = rows[f"242679-{turn['turn_index']}"]
        assert (row.before.read(), row.after.read()) == (turn["source_img"]["bytes"], turn["target_img"]["bytes"])


@pytest.mark.parametrize(
    ("reader", "options", "before", "after"),
    [
        ("birds_to_words", {"images": "photos", "suffix": ".png"}, "photos/11.png", "photos/22.png"),
        ("spot_the_diff", {"images": "original", "suffix": ".jpg"}, "original/235.jpg", "original/235_2.jpg"),
        ("iedit", {"images": "photos"}, "photos/a.jpg", "photos/b.gif"),
        ("nlvr2", {"images": "p"}, "p/train/38/train-1-0-img0.png", "p/train/38/train-1-0-img1.png"),
        ("levir_cc", {"images": "c"}, "c/train/A/train_000001.png", "c/train/B/train_000001.png"),
    ],
)
def test_images_are_where_the_options_say(tmp_path, reader, options, before, after):
    row = next(iter(DATASETS[reader].read(WRITERS[reader](tmp_path), **options)))
    assert (row.before, row.after) == (before, after)


def update(file: str, change: Callable[[Any], Any]) -> Callable[[Path], None]:
    return lambda root: edit_json(root / file, change)


def lines(file: str, *texts: str) -> Callable[[Path], Any]:
    return lambda root: (root / file).write_text("".join(f"{text}\n" for text in texts))


def shard(split: str, *rows: dict[str, Any]) -> Callable[[Path], None]:
    return lambda root: write_shards(root, split, rows)


def spoil_levir(file: dict) -> None:
    del file["images"][0]["filename"]
    file["images"][1]["sentences"][3] = "no change"
    file["images"][2]["sentences"][0]["tokens"] = ["a", 7]
    file["images"].append("val_000002.png")


EMU = "test-00000-of-00001-2f1a.parquet, row"
PIXELS = {"image": stored(1), "edited_image": stored(1)}
LINE = "line: expected '<number> <INSTRUCT> <text>', found text"
SYNED_TRAIN, SYNED_TEST = (f"instructions_with_idx_{part}_split.txt" for part in ("train", "test"))
NLVR = "identifier: expected dev-<set>-<pair>-<sentence>, found text"
LOST = {key: value for key, value in nlvr_line("train-5-0-0", "x", "True").items() if key != "directory"}
NO_SPLIT = "split: the scene is in no list of split"
BROKEN: dict[str, tuple[str, list[Callable[[Path], Any]], list[tuple[Any, Any, str, str]]]] = {
    "a bird without a photo's number": (
        "birds_to_words",
        [
            lambda root: write_birds(
                root / "birds-to-words-v1.0.tsv", [("1", "gone", "val", "a"), ("3/", "4", "val", "d")]
            )
        ],
        [
            (
                None,
                "val",
                "birds-to-words-v1.0.tsv, line 2",
                "image URL: expected https://www.inaturalist.org/photos/<number>",
            )
        ],
    ),
    "scenes of CLEVR-Change": (
        "clevr_change",
        [
            update("splits.json", lambda splits: (splits["val"].append("9"), splits["train"].remove(5))),
            update(
                "change_captions.json", lambda captions: (captions.pop(DEFAULT), captions.update({"photo.png": ["x"]}))
            ),
        ],
        [
            (
                "000003.png",
                "train",
                f"change_captions.json, {DEFAULT}",
                f"captions: change_captions.json has no key '{DEFAULT}'",
            ),
            (None, "val", "splits.json, val[1]", "scene: expected a number from 0, found text '9'"),
            ("CLEVR_default_000005.png", None, "change_captions.json, CLEVR_default_000005.png", f"{NO_SPLIT}s.json"),
            (
                "photo.png",
                None,
                "change_captions.json, photo.png",
                "key: expected 'CLEVR_default_<six digits>.png', found 'photo.png'",
            ),
            (
                "CLEVR_default_000005.png_n",
                None,
                "no_change_captions.json, CLEVR_default_000005.png",
                f"{NO_SPLIT}s.json",
            ),
        ],
    ),
    "scenes of CLEVR-DC": (
        "clevr_dc",
        [
            update("split.json", lambda splits: splits["val"].extend([True, 11])),
            update("captions.json", lambda captions: captions.update({"12": ["x"]})),
        ],
        [
            (None, "val", "split.json, val[0]", "scene: expected a number from 0, found true"),
            ("000011.png", "val", "captions.json, 11", "captions: captions.json has no key '11'"),
            ("12", None, "captions.json, 12", f"{NO_SPLIT}.json"),
        ],
    ),
    "rows of Emu Edit": (
        "emu_edit",
        [shard("test", {"idx": None, "instruction": "x"} | PIXELS, {"idx": 1, "instruction": ""} | PIXELS)],
        [(None, "test", f"{EMU} 0", "idx: is missing"), (None, "test", f"{EMU} 1", "instruction: is empty")],
    ),
    "records of IEdit": (
        "iedit",
        [
            update("train.json", lambda rows: rows.extend([7, {"img0": "a.jpg"}])),
            update("train.json", lambda rows: rows[0].update(uid="")),
        ],
        [
            (None, "train", "train.json, record 0", "uid: is empty"),
            (None, "train", "train.json, record 3", "record: expected an object, found a whole number 7"),
            (None, "train", "train.json, record 4", "img1: is missing"),
        ],
    ),
    "records of LEVIR-CC": (
        "levir_cc",
        [update("LevirCCcaptions.json", spoil_levir)],
        [
            (None, "train", "LevirCCcaptions.json, image 0", "filename: is missing"),
            (
                None,
                "val",
                "LevirCCcaptions.json, image 1",
                "sentence 3: record: expected an object, found text 'no change'",
            ),
            (
                None,
                "test",
                "LevirCCcaptions.json, image 2",
                "sentence 0: tokens: expected text, found a whole number 7",
            ),
            (None, None, "LevirCCcaptions.json, image 4", "record: expected an object, found text 'val_000002.png'"),
        ],
    ),
    "turns of MagicBrush": (
        "magicbrush",
        [
            update("test/edit_sessions.json", lambda found: found["139306"][1].update(input="139306-input.png")),
            update("test/edit_sessions.json", lambda found: found.update({"7": 3, "8": [{"input": "8-input.png"}]})),
            shard("dev", brush_row("17", 1, "x", 1) | {"turn_index": None}),
        ],
        [
            (None, "val", "dev-00000-of-00001-2f1a.parquet, row 0", "turn_index: is missing"),
            (
                None,
                "test",
                "test/edit_sessions.json, 139306, turn 2",
                "input: expected '139306-output1.png', what the turn before it made, found '139306-input.png'",
            ),
            (None, "test", "test/edit_sessions.json, 7", "turns: expected a list, found a whole number 3"),
            (None, "test", "test/edit_sessions.json, 8, turn 1", "instruction: is missing"),
        ],
    ),
    "lines of NLVR2": (
        "nlvr2",
        [
            lines(
                "data/dev.json",
                json.dumps(nlvr_line("dev-1-0-0", "x", True)),
                json.dumps(nlvr_line("dev-1-0", "x", "True")),
                json.dumps(nlvr_line("train-1-0-0", "x", "False")),
                json.dumps(nlvr_line("dev-1-0-0", "x", "true")),
                "{",
            ),
            lines("data/train.json", json.dumps(LOST)),
        ],
        [
            (None, "train", "train.json, line 1", "directory: is missing"),
            (None, "val", "dev.json, line 1", "label: expected text, found true"),
            (None, "val", "dev.json, line 2", f"{NLVR} 'dev-1-0'"),
            (None, "val", "dev.json, line 3", f"{NLVR} 'train-1-0-0'"),
            (None, "val", "dev.json, line 4", "label: expected 'True' or 'False', found text 'true'"),
            (None, "val", "dev.json, line 5", "row: line 1 column 2: not valid JSON"),
        ],
    ),
    "a record of Spot-the-Diff": (
        "spot_the_diff",
        [update("annotations/val.json", lambda rows: rows[0].update(sentences="gone"))],
        [(None, "val", "annotations/val.json, record 0", "sentences: expected a list, found text 'gone'")],
    ),
    "lines of Syned": (
        "syned",
        [
            lines(SYNED_TRAIN, "0 <INSTRUCT> a", "5 <INSTRUCT> b", "x <INSTRUCT> c", "10 d"),
            lines(SYNED_TEST, "3 <INSTRUCT> a", "add a goat"),
        ],
        [
            ("validation-5", None, f"{SYNED_TRAIN}, line 2", "split: the number is in no list of splits.json"),
            (None, None, f"{SYNED_TRAIN}, line 3", f"{LINE} 'x <INSTRUCT> c'"),
            (None, None, f"{SYNED_TRAIN}, line 4", f"{LINE} '10 d'"),
            ("validation-2", "train", "splits.json, 2", f"instruction: {SYNED_TRAIN} has no line for it"),
            ("validation-10", "val", "splits.json, 10", f"instruction: {SYNED_TRAIN} has no line for it"),
            (
                "test-3",
                "test",
                f"{SYNED_TEST}, line 1",
                "gt_augmented_test_clean.json '3 ': expected a list, found null",
            ),
            (None, "test", f"{SYNED_TEST}, line 2", f"{LINE} 'add a goat'"),
        ],
    ),
    "a key of Syned's without its space": (
        "syned",
        [update("gt_augmented_test_clean.json", lambda found: found.update({"0": found.pop("0 ")}))],
        [("test-0", "test", f"{SYNED_TEST}, line 1", "gt_augmented_test_clean.json '0 ': expected a list, found null")],
    ),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_what_cannot_be_read_stays_with_its_place_and_what_is_wrong(tmp_path, kind):
    reader, changes, wanted = BROKEN[kind]
    root = WRITERS[reader](tmp_path)
    for change in changes:
        change(root)
    found = [(row.name, row.split, row.source, row.fault) for row in DATASETS[reader].read(root) if row.fault]
    assert [row[:3] for row in found] == [row[:3] for row in wanted]
    for (*_, fault), (*_, start) in zip(found, wanted, strict=True):
        assert fault.startswith(start)


def without(*patterns: str) -> Callable[[Path], None]:
    return lambda root: [path.unlink() for pattern in patterns for path in sorted(root.glob(pattern))[:1]]


REFUSED: list[tuple[str, Callable[[Path], Any], str]] = [
    (
        "clevr_change",
        lambda root: write_json(root / "type_mapping.json", {"color": "a.png"}),
        "type_mapping.json: 'color': expected a list of image names",
    ),
    (
        "clevr_change",
        lambda root: write_json(root / "type_mapping.json", {"color": [3]}),
        "type_mapping.json: 'color': expected a list of image names",
    ),
    *(
        ("clevr_change", lambda root, keep=keep: cut(root / "change_captions.json", keep), "fetch it again")
        for keep in (0, 1, 40, -1)
    ),
    (
        "levir_cc",
        lambda root: write_json(root / "LevirCCcaptions.json", {"image": []}),
        "expected a list `images`, found null; fetch it again",
    ),
    (
        "emu_edit",
        shard("test", emu_row("test", 0, "x", edited=False)),
        "no column edited_image: it is of emu_edit_test_set, in which validation and test are swapped; fetch",
    ),
    (
        "emu_edit",
        without("data/validation-*"),
        "data/validation-*.parquet: not each file of one release is there once, but 1 of 2; fetch it again",
    ),
    ("emu_edit", without("data/test-*"), "data/test-*.parquet: no such file; the dataset is incomplete"),
    (
        "emu_edit",
        lambda root: (root / "data/test-00000-of-00001-2f1a.parquet").write_bytes(b"PAR"),
        "test-00000-of-00001-2f1a.parquet: cannot be read as Parquet",
    ),
    ("magicbrush", without("test/edit_sessions.json"), "test/edit_sessions.json: no such file"),
    ("spot_the_diff", without("annotations/val.json"), "annotations/val.json: no such file"),
    (
        "spot_the_diff",
        lambda root: [(root / "annotations/val.json").unlink(), (root / "annotations/val.json").mkdir()],
        "annotations/val.json: cannot be read: Is a directory",
    ),
    (
        "syned",
        lambda root: write_json(root / "splits.json", {"train": [0], "val": [1]}),
        "splits.json: no list validation; expected train and validation; fetch it again",
    ),
    (
        "syned",
        lambda root: write_json(root / "splits.json", {"train": [0], "validation": ["1"]}),
        "splits.json: validation[0]: expected a number from 0, found text '1'",
    ),
    (
        "syned",
        lambda root: write_json(root / "splits.json", {"train": [0, 1], "validation": [1]}),
        "splits.json: validation[0]: 1 stands there twice; keep one",
    ),
]


def cut(path: Path, keep: int) -> None:
    path.write_bytes(path.read_bytes()[:keep])


@pytest.mark.parametrize(("reader", "change", "message"), REFUSED)
def test_a_file_that_cannot_be_trusted_is_refused_with_its_name_and_remedy(tmp_path, reader, change, message):
    root = WRITERS[reader](tmp_path)
    change(root)
    with pytest.raises(DataError, match=re.escape(message)):
        list(DATASETS[reader].read(root))


def test_every_dataset_is_ingested_and_validated_whole(tmp_path):
    """In one run; their toys have only IEdit's pair in train and test, and Syned's images, which are Emu Edit's."""
    for reader, write in WRITERS.items():
        run_ingest(write(tmp_path / reader), reader, reader)
    report = run_validate(tmp_path, near_duplicate_max_diff=None)
    found = {name: " ".join(f"{split} {n}" for split, n in of.pairs.items()) for name, of in report.datasets.items()}
    assert found == WHOLE
    assert report.bad_images == 0
    leaked = pl.read_parquet(tmp_path / "clean/quarantine.parquet").select("id", "rules", "reason").rows()
    assert [row for row in leaked if row[0].startswith("iedit")] == [
        (
            "iedit/Reddit_3",
            ["not_in_test"],
            "leak: test pair iedit/Reddit_6 has the same images, so this one may not train",
        )
    ]


WHOLE = {
    "birds_to_words": "test 1 train 2",
    "clevr_change": "test 4 train 6 val 2",
    "clevr_dc": "test 1 train 2",
    "emu_edit": "test 2 val 3",
    "iedit": "test 2 train 2 val 2",
    "levir_cc": "test 2 train 1 val 1",
    "magicbrush": "test 2 train 2 val 1",
    "nlvr2": "test 2 train 1 val 1",
    "spot_the_diff": "test 1 train 2 val 1",
    "syned": "test 3 train 2 val 1",
}


def test_a_validation_split_that_trains_is_held_against_the_test_set_too(tmp_path):
    run_ingest(write_iedit(tmp_path / "raw"), "iedit", "iedit", train_on=["train", "val"])
    report = run_validate(tmp_path)
    assert report.leaks == 2
    assert report.datasets["iedit"].pairs == {"train": 3, "test": 2}


def test_turns_of_a_photo_that_is_also_tested_do_not_train(tmp_path):
    root = write_magicbrush(tmp_path / "raw")
    edit_json(root / "test/edit_sessions.json", lambda sessions: sessions.update({"17": sessions.pop("139306")}))
    edit_json(root / "test/edit_sessions.json", lambda sessions: sessions["17"].pop())
    edit_json(root / "test/edit_sessions.json", lambda sessions: sessions["17"][0].update(input="17-input.png"))
    write_shards(root, "dev", [brush_row("17", 4, "remove the cup", 10)])
    for end in ("input", "output1"):
        save_picture(root / f"test/images/17/17-{end}.png", 3, 90 * (end == "input"))
    run_ingest(root, "magicbrush", "magicbrush")
    assert run_validate(tmp_path).datasets["magicbrush"].pairs == {"train": 2, "test": 1}


def test_dev_may_not_train_as_its_authors_ask(tmp_path, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    values, _ = resolve(Path("profiles/levir-cc.yaml"))
    entry = {"reader": "magicbrush", "root": "data/01_raw/magicbrush"}
    write_to = tmp_path / "params.yaml"

    def with_splits(splits: list[str]) -> Path:
        values["ingest"]["datasets"]["mine"] = entry | {"train_on": splits}
        write_to.write_text(yaml.safe_dump(values))
        return write_to

    load_params(with_splits(["train"]))
    wanted = "ingest.datasets.mine.train_on: MagicBrush's authors ask that val never trains; write [train]"
    with pytest.raises(ParamsError, match=re.escape(wanted)):
        load_params(with_splits(["train", "val"]))


def test_without_the_zip_of_magicbrush_s_test_an_option_leaves_it_out(tmp_path):
    root = write_magicbrush(tmp_path)
    without("test/edit_sessions.json")(root)
    assert [row.split for row in DATASETS["magicbrush"].read(root, test=None)] == ["train", "train", "val"]


def test_a_pair_without_the_bytes_of_an_image_goes_to_quarantine_and_the_others_stay(tmp_path):
    root = write_emu(tmp_path / "raw")
    rows = [emu_row("test", 0, "x") | {"edited_image": {"bytes": None, "path": "a.png"}}, emu_row("test", 1, "y")]
    write_shards(root, "test", [*rows, emu_row("test", 2, "z") | {"edited_image": None}])
    run_ingest(root, "emu_edit", "emu_edit")
    report = run_validate(tmp_path, max_quarantined_share=0.7, allow_lost_test_pairs=True)
    assert report.datasets["emu_edit"].pairs == {"val": 3, "test": 1}


def published_levir(root: Path) -> None:
    """The annotation file, as large as it is published."""
    same = {"train": 3_408, "val": 666, "test": 965}
    records = [
        levir_record(split, n, SAME if n < same[split] else [f"road {m} of {n}" for m in range(5)])
        for split, count in levir_cc.PUBLISHED.pairs().items()
        for n in range(count)
    ]
    write_json(root / "LevirCCcaptions.json", {"images": records})


def published_syned(root: Path) -> None:
    """Lines sorted as text, 0 to 8 paraphrases, without Emu Edit's files."""
    for part, count, stray in (("train", 3_589, 368), ("test", 2_022, 170)):
        found = [f"{n} <INSTRUCT> {' ' * (n < stray)}add {n} goats" for n in sorted(range(count), key=str)]
        lines(f"instructions_with_idx_{part}_split.txt", *found)(root)
    write_json(root / "splits.json", {"train": [*range(3_588, 538, -1)], "validation": [*range(539)]})
    lengths = {4: 1_974, 3: 17, 2: 13, 5: 6, 1: 5, 0: 4, 8: 2, 7: 1}
    each = [length for length, count in lengths.items() for _ in range(count)]
    variants = {f"{n} ": [f"goats {m}" for m in range(length)] for n, length in enumerate(each)}
    write_json(root / "gt_augmented_test_clean.json", variants)


def published_emu(root: Path) -> None:
    """The split is the file's, whatever the column says."""
    image = {"bytes": b"x", "path": None}
    for split, count, own in (("validation", 3_589, "test"), ("test", 2_022, "validation")):
        rows = [emu_row(own, n, "add a goat") | {"image": image, "edited_image": image} for n in range(count)]
        write_shards(root, split, rows, 2)


@pytest.mark.parametrize(
    ("reader", "write"), [("levir_cc", published_levir), ("syned", published_syned), ("emu_edit", published_emu)]
)
def test_a_release_of_the_published_size_counts_to_the_unit(tmp_path, reader, write):
    write(tmp_path)
    rows, (published,) = list(DATASETS[reader].read(tmp_path)), DATASETS[reader].published
    assert not any(row.fault for row in rows)
    assert len({row.name for row in rows}) == len(rows)
    for split, pairs_of in published.pairs().items():
        own = [row for row in rows if row.split == split]
        assert (len(own), sum(len(row.references) for row in own)) == (pairs_of, getattr(published, split).references)
    if reader == "syned":
        row = {row.name: row for row in rows}["validation-3000"]
        assert row.references == ["add 3000 goats"]
        assert row.before == "emu_edit/data/validation-*.parquet, idx 3000, image", "Emu Edit's files are not there"
    if reader == "levir_cc":
        test = [row for row in rows if row.split == "test"]
        nothing = Path(), Path(), b"", b""
        scored = [EvalPair(row.name, reader, *nothing, row.references, row.change_types, "", None) for row in test]
        protocols = DATASETS[reader].protocols
        assert {one.name: len(apply(one, scored)) for one in protocols} == {one.name: one.n for one in protocols}
        assert {one.tokenizer for one in protocols} == {"whitespace"}


def test_the_true_sentences_of_dev_are_counted(tmp_path):
    """6,982 lines, 3,551 of them true; labels are text, of which no one is false by itself."""
    root = write_nlvr(tmp_path)
    labels = ["True"] * 3_551 + ["False"] * 3_431
    lines = [nlvr_line(f"dev-{n // 4}-{n % 4}-0", f"sentence {n}", label) for n, label in enumerate(labels)]
    assert len(lines) == 6_982
    (root / "data/dev.json").write_text("".join(json.dumps(line) + "\n" for line in lines))
    dev = [row for row in DATASETS["nlvr2"].read(root) if row.split == "val"]
    assert not any(row.fault for row in dev)
    assert sum(len(row.references) for row in dev) == 3_551
    assert {text for row in dev for text in row.references} == {f"sentence {n}" for n in range(3_551)}


def link_real(folder: Path, root: Path, **names: str) -> Path:
    """The real files of a dataset under other names, e.g. train="annotations/train.json"."""
    for name, target in names.items():
        (root / target).parent.mkdir(parents=True, exist_ok=True)
        (root / target).write_bytes((folder / f"{name}.json").read_bytes())
    return root


def assert_published(rows: list, published: Published) -> None:
    """Pairs, references and empty references of the splits that are beside the project are the published ones."""
    assert not any(row.fault for row in rows)
    for split in ("train", "val"):
        own, count = [row for row in rows if row.split == split], getattr(published, split)
        texts_of = [text for row in own for text in row.references]
        assert (len(own), len(texts_of), texts_of.count("")) == (count.pairs, count.references, count.empty)
        distinct = sum(len(set(_respaced(row.references)) - {""}) for row in own)
        assert len(texts_of) - count.empty - distinct == count.repeated


def _respaced(texts: list[str]) -> list[str]:
    """As validate leaves them."""
    return [" ".join(text.split()) for text in texts]


@real
def test_the_real_splits_of_clevr_change_count_to_the_unit(tmp_path):
    for name in ("splits.json", "type_mapping.json"):
        (tmp_path / name).write_bytes((REAL / "clevr_change" / name).read_bytes())
    splits = json.loads((tmp_path / "splits.json").read_text())
    keys = [f"CLEVR_default_{scene:06d}.png" for scenes in splits.values() for scene in scenes]
    for name in ("change_captions.json", "no_change_captions.json"):
        write_json(tmp_path / name, {key: ["words"] for key in keys})
    counts: dict[tuple[str, str], int] = {}
    for row in DATASETS["clevr_change"].read(tmp_path):
        assert row.fault is None
        (change_type,) = row.change_types
        counts[row.split, change_type] = counts.get((row.split, change_type), 0) + 1
    kinds = ("color", "material", "add", "drop", "move", "none")
    assert [counts["train", kind] for kind in kinds] == [6764, 6768, 6771, 6766, 6761, 33830]
    assert [counts["val", kind] for kind in kinds] == [397, 398, 398, 398, 397, 1988]
    assert [counts["test", kind] for kind in kinds] == [797, 797, 797, 797, 797, 3985]
    pairs = {
        split: sum(count for (own, _), count in counts.items() if own == split) for split in ("train", "val", "test")
    }
    assert pairs == DATASETS["clevr_change"].published[0].pairs()


@real
def test_clevr_dc_counts_to_the_unit(tmp_path):
    link_real(REAL / "clevr_dc", tmp_path, split="split.json")
    scenes = [scene for split in json.loads((tmp_path / "split.json").read_text()).values() for scene in split]
    write_json(tmp_path / "captions.json", {str(scene): ["words"] for scene in scenes})
    rows = list(DATASETS["clevr_dc"].read(tmp_path))
    assert Counter(row.split for row in rows) == DATASETS["clevr_dc"].published[0].pairs()
    assert not any(row.fault for row in rows)


@real
def test_spot_counts_to_the_unit(tmp_path):
    files = {split: f"annotations/{split}.json" for split in ("train", "val")}
    link_real(REAL / "spot_the_diff", tmp_path, **files)
    write_json(tmp_path / "annotations/test.json", [])
    rows = list(DATASETS["spot_the_diff"].read(tmp_path))
    assert_published(rows, DATASETS["spot_the_diff"].published[0])
    assert sum(row.raw_rows for row in rows) == 9_524 + 1_634
    only_empty = Counter(row.split for row in rows if set(row.references) == {""})
    assert only_empty == {"train": 37, "val": 4}


@real
def test_iedit_counts_to_the_unit(tmp_path):
    link_real(REAL / "iedit", tmp_path, train="train.json", valid="valid.json")
    write_json(tmp_path / "test.json", [])
    rows = list(DATASETS["iedit"].read(tmp_path))
    assert_published(rows, DATASETS["iedit"].published[0])
    pairs = {split: Counter((r.before, r.after) for r in rows if r.split == split) for split in ("train", "val")}
    assert (len(pairs["train"]), len(pairs["val"])) == (2_507, 357)
    assert sum(1 for count in pairs["train"].values() if count > 1) == 460
    assert len(pairs["train"].keys() & pairs["val"].keys()) == 2


@real
def test_birds_count_to_the_unit(tmp_path):
    rows = []
    for split in ("train", "val"):
        for line in (REAL / f"birds_to_words/cwj1412_{split}.json").read_text().split("\n"):
            if line:
                row = json.loads(line)
                found = [row["description"]] if split == "train" else row["description"]
                rows += [(row["img1"], row["img2"], split, " ".join(tokens)) for tokens in found]
    write_birds(tmp_path / "birds-to-words-v1.0.tsv", rows)
    found = list(DATASETS["birds_to_words"].read(tmp_path))
    assert_published(found, DATASETS["birds_to_words"].published[0])
    assert sum(row.raw_rows for row in found) == 12_890 + 1_556
    per_pair = {split: Counter(len(r.references) for r in found if r.split == split) for split in ("train", "val")}
    assert per_pair["train"] == {3: 2, 4: 682, 5: 1_969, 8: 2, 9: 5, 10: 25}
    assert per_pair["val"] == {4: 84, 5: 238, 10: 3}


PAIRS = [
    {"before": "a/1.png", "after": "b/1.png", "captions": ["it fell", "down"], "split": "train"},
    {"before": "a/2.png", "after": "b/2.png", "captions": ["gone"], "split": "test"},
]


def write_pairs(root: Path, manifest: str) -> Path:
    frame = pl.DataFrame(PAIRS)
    if manifest.endswith(".parquet"):
        frame.write_parquet(root / manifest)
    elif manifest.endswith(".jsonl"):
        frame.write_ndjson(root / manifest)
    elif manifest.endswith(".json"):
        write_json(root / manifest, PAIRS)
    else:
        flat = frame.with_columns(captions=pl.Series([json.dumps(row["captions"]) for row in PAIRS]))
        flat.write_csv(root / manifest, separator="\t" if manifest.endswith(".tsv") else ",")
    return root


@pytest.mark.parametrize("manifest", ["p.csv", "p.tsv", "p.json", "p.jsonl", "p.parquet"])
def test_a_collection_of_ones_own_reads_the_same_in_every_format(tmp_path, manifest):
    rows = list(pairs.read(write_pairs(tmp_path, manifest), manifest))
    assert [(row.name, row.split, row.references, row.fault) for row in rows] == [
        ("a/1.png|b/1.png", "train", ["it fell", "down"], None),
        ("a/2.png|b/2.png", "test", ["gone"], None),
    ]


def test_rows_of_one_pair_are_merged_and_contradictions_kept_apart(tmp_path):
    lines = [
        "id,img_a,img_b,text,split",
        "7,x.png,y.png,one,train",
        "7,x.png,y.png,two,train",
        "7,x.png,z.png,three,train",
    ]
    (tmp_path / "m.csv").write_text("\n".join(lines))
    columns = {"before": "img_a", "after": "img_b", "captions": "text"}
    bad, good = pairs.read(tmp_path, "m.csv", columns)
    assert (good.name, good.references, good.raw_rows) == ("7", ["one", "two"], 2)
    assert bad.fault == "id: m.csv, line 2 has the same id, but other images, split or scene"


@pytest.mark.parametrize("field", ["split", "scene", "before", "after"])
def test_rows_of_one_id_must_agree_in_split_scene_and_images(tmp_path, field):
    row = {"id": "7", "scene": "s", "before": "a.png", "after": "b.png", "captions": ["x"], "split": "train"}
    write_json(tmp_path / "m.json", [row, row | {field: "other"}, row | {"captions": ["y"]}])
    bad, good = pairs.read(tmp_path, "m.json")
    assert bad.fault == "id: m.json, record 0 has the same id, but other images, split or scene"
    assert (bad.source, good.source, good.raw_rows) == ("m.json, record 1", "m.json, record 0 and m.json, record 2", 2)
    assert (good.references, good.fault) == (["x", "y"], None)


def test_a_pair_without_two_image_names_or_with_captions_that_are_no_text_stands_alone(tmp_path):
    rows = [
        {"before": 1, "after": "b.png", "captions": ["x"], "split": "train"},
        {"before": "a.png", "after": "b.png", "captions": {"x": 1}, "split": "train"},
    ]
    write_json(tmp_path / "m.json", rows)
    one, two = pairs.read(tmp_path, "m.json")
    assert (one.name, one.before, two.name, two.references) == (None, 1, "a.png|b.png", {"x": 1})


def test_a_manifest_without_splits_takes_the_option_and_its_own_ids_and_scenes_where_it_has_them(tmp_path):
    rows = [
        {"before": "a.png", "after": "b.png", "captions": "x", "id": 7, "scene": "s1", "change_types": "color"},
        {"before": "c.png", "after": "d.png", "captions": '["y", "z"]', "id": "", "scene": ""},
        {"before": "e.png", "after": "f.png", "captions": "[open", "change_types": [3]},
    ]
    write_json(tmp_path / "m.json", rows)
    one, two, three = sorted(pairs.read(tmp_path, "m.json", split="test"), key=lambda row: row.before)
    assert (one.name, one.scene, one.split, one.references, one.change_types) == ("7", "s1", "test", ["x"], ["color"])
    assert (two.name, two.scene, two.references) == ("c.png|d.png", "c.png|d.png", ["y", "z"])
    assert (two.source, two.raw_rows) == ("m.json, record 1", 1)
    assert (three.references, three.change_types) == (["[open"], [])
    assert three.fault == "change_types: expected a list of names"


def test_omnidiff_takes_its_columns_from_params_and_its_types_from_the_paper(tmp_path):
    rows = [
        {
            "image1": "s/a.jpg",
            "image2": "s/b.jpg",
            "caption": "The mug left.",
            "types": ["OCR", "Colour"],
            "split": "val",
        },
        {"image1": "s/c.jpg", "image2": "s/d.jpg", "caption": "The cup left.", "types": ["magic"], "split": "val"},
    ]
    write_json(tmp_path / "real.json", rows)
    columns = {"before": "image1", "after": "image2", "captions": "caption", "change_types": "types"}
    good, bad = omnidiff.read(tmp_path, "real.json", columns)
    assert (good.references, good.change_types, good.fault) == (["The mug left."], ["ocr", "color"], None)
    assert bad.fault.startswith("change_types: magic is none of viewpoint, ")


def test_omnidiff_names_types_in_the_paper_s_words_whatever_the_case(tmp_path):
    types = [[" Color", "TEXT"], ["count", "no change"], ["Add", "remove", "disappear"], ["distractor"], []]
    rows = [
        {"before": f"{n}.jpg", "after": "b.jpg", "captions": "x", "split": "val", "change_types": each}
        for n, each in enumerate(types)
    ]
    write_json(tmp_path / "annotations.json", rows)
    found = list(omnidiff.read(tmp_path))
    assert not any(row.fault for row in found)
    assert [row.change_types for row in found] == [
        ["color", "ocr"],
        ["counting", "none"],
        ["addition", "removal", "disappearance"],
        ["none"],
        [],
    ]


def test_omnidiff_passes_the_split_on_and_keeps_a_fault_of_the_table(tmp_path):
    rows = [
        {"before": "a.jpg", "after": "b.jpg", "captions": "x"},
        {"before": "c.jpg", "captions": "y", "change_types": ["size"]},
    ]
    write_json(tmp_path / "annotations.json", rows)
    found = {row.before: row for row in omnidiff.read(tmp_path, split="test")}
    assert (found["a.jpg"].split, found["a.jpg"].fault) == ("test", None)
    assert (found["c.jpg"].fault, found["c.jpg"].change_types) == ("after: is missing", ["size"])


def test_images_are_read_in_every_format_that_the_datasets_use(tmp_path):
    root = write_iedit(tmp_path / "raw")
    save_picture(root / "images/f.png", 3, mode="RGBA")
    run_ingest(root, "iedit")
    assert run_validate(tmp_path).bad_images == 0


def test_a_scene_is_a_whole_number_from_0():
    assert [fault_of_scene(value) is None for value in (0, 7, -1, True, "3", 2.0, None)] == [True, True] + 5 * [False]


def test_fields_are_checked_in_order_for_presence_type_and_content():
    fields = {"uid": str, "sents": list}
    assert fault_in({"uid": "a", "sents": []}, fields) is None
    assert fault_in(["a"], fields) == "record: expected an object, found a list ['a']"
    assert fault_in({"sents": 3}, fields) == "uid: is missing"
    assert fault_in({"uid": "a", "sents": "b"}, fields) == "sents: expected a list, found text 'b'"
    assert fault_in({"uid": "", "sents": []}, fields) == "uid: is empty"


def test_rows_that_lost_a_column_are_faults_at_their_place_and_the_rest_is_read(tmp_path):
    (tmp_path / "m.jsonl").write_text(
        '{"before": "a.png", "after": "b.png", "captions": ["x"]}\n'
        "not json\n\n"
        '{"before": "a.png", "after": "b.png", "captions": ["x\u2028y"], "split": "val"}\n'
    )
    found = {row.source: row for row in pairs.read(tmp_path, "m.jsonl")}
    assert found["m.jsonl, line 1"].fault == "split: is missing"
    assert "not valid JSON" in found["m.jsonl, line 2"].fault
    assert (found["m.jsonl, line 4"].fault, found["m.jsonl, line 4"].references) == (None, ["x\u2028y"])
    assert len(found) == 3


def test_a_table_s_row_with_too_many_fields_is_a_fault_and_blank_lines_are_none(tmp_path):
    (tmp_path / "m.csv").write_text("before,after\na,b\n\na,b,c\nd,e\n")
    found = list(read_table(tmp_path / "m.csv", ("before", "after")))
    assert [(where, row["before"], fault) for where, row, fault in found] == [
        ("m.csv, line 2", "a", None),
        ("m.csv, line 4", None, "row: has 3 fields, the header 2; quote fields that hold ','"),
        ("m.csv, line 5", "d", None),
    ]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("m.csv", "before\na\n", r"m\.csv: no column after; found before"),
        ("m.csv", "before,after,after\n", r"m\.csv: column after occurs twice; rename one"),
        ("m.csv", 'before,after\n"a,b\n', r"m\.csv: line \d+: not valid CSV: .*; correct the quotes there"),
        ("m.txt", "x", r"m\.txt: unknown kind of manifest; use \.csv"),
        ("m.parquet", "x", r"m\.parquet: cannot be read as Parquet: .*; write it again"),
        ("m.json", '{"a": 1}', r"m\.json: expected a list at the top, found an object"),
    ],
)
def test_a_manifest_that_cannot_be_used_is_named_with_its_remedy(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=message):
        list(read_table(tmp_path / name, ("before", "after")))


def test_a_parquet_manifest_that_is_missing_or_has_not_the_columns_is_named(tmp_path):
    with pytest.raises(DataError, match=r"m\.parquet: no such file; correct `manifest` or the root"):
        list(read_table(tmp_path / "m.parquet", ("before",)))
    pl.DataFrame({"a": [1]}).write_parquet(tmp_path / "m.parquet")
    with pytest.raises(DataError, match=r"m\.parquet: no column before; found a"):
        list(read_table(tmp_path / "m.parquet", ("before",)))
    assert list(read_table(tmp_path / "m.parquet", ("a",))) == [("m.parquet, row 0", {"a": 1}, None)]


def test_texts_are_lists_json_lists_or_one_caption():
    assert [texts(value) for value in (["a"], "a", ' ["a", "b"]', "[a", '{"a": 1}', None)] == [
        ["a"],
        ["a"],
        ["a", "b"],
        ["[a"],
        ['{"a": 1}'],
        None,
    ]


def test_text_loses_its_byte_order_mark_and_nothing_else(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf a\r\n")
    assert read_text(tmp_path / "a.txt") == " a\r\n"
    assert parse_json("[1, null]", "here") == [1, None]


def test_splits_are_all_three_in_order_and_one_may_be_empty(tmp_path):
    write_json(tmp_path / "s.json", {"test": [3], "val": [], "train": [1], "dev": [9]})
    assert list(read_splits(tmp_path / "s.json").items()) == [("train", [1]), ("val", []), ("test", [3])]
    write_json(tmp_path / "s.json", {"test": [3], "val": 4})
    with pytest.raises(DataError, match=r"s\.json: no list train or val; expected train, val and test"):
        read_splits(tmp_path / "s.json")


def test_values_are_described_with_their_kind_and_cut():
    assert [describe(value) for value in (None, True, 3, 2.5, "a", [1], {})] == [
        "null",
        "true",
        "a whole number 3",
        "a number 2.5",
        "text 'a'",
        "a list [1]",
        "an object {}",
    ]
    assert describe("x" * 58) == f"text '{'x' * 58}'"
    assert describe("x" * 59) == f"text '{'x' * 56}..."
