"""Readers: example rows of every dataset, rows that cannot be read, and the published counts."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from m3diff.datasets import DATASETS, levir_cc, omnidiff, pairs
from m3diff.datasets.files import Embedded, columns_in, describe, look_up, pick, read_text
from m3diff.records.errors import DataError, Fault
from m3diff.settings.load import load_params
from m3diff.settings.section import ParamsError
from m3diff.stages.validate.stage import ValidateReport
from tests import layouts
from tests.errors import raises
from tests.layouts import WRITERS, edit_json, run_ingest, run_validate, save_picture, write_json

REAL = Path("../shared/real")
OTHER_TESTS = {"llava_instruct", "llava_pretrain", "minichange", "sidecar"}  # have files of their own
# Readers of a published layout of files
PUBLISHED = sorted(WRITERS.keys() - OTHER_TESTS - {"omnidiff", "pairs"})
DEFAULT = "CLEVR_default_000003.png"
FIVE = "CLEVR_default_000005.png"
ROWS: dict[str, list[tuple[str, str, str, str, str, list[str]]]] = {  # split, name, scene, images, references
    "birds_to_words": [
        ("train", "11_22", "11_22", "images/11.jpg", "images/22.jpg", ['Animal 1 is "bigger"', "a tab\tand\nlines"]),
        ("train", "22_11", "22_11", "images/22.jpg", "images/11.jpg", ["other way"]),
        ("val", "1_2", "1_2", "images/1.jpg", "images/2.jpg", ["d"]),
        ("test", "1_2", "1_2", "images/1.jpg", "images/2.jpg", ["e"]),
    ],
    "changechat": [
        (split, f"{name}{end}", name, f"images/{split}/A/{name}", f"images/{split}/B/{name}", references)
        for split, name, end, references in (
            ("train", "train_000001.png", "?binary-0", ["Yes"]),
            ("train", "train_000001.png", "?count-0", ["There are 2 new roads and 10 new buildings."]),
            (
                "train",
                "train_000001.png",
                "?localisation-0",
                ["roads ['top-left'] buildings ['center-center', 'top-left']"],
            ),
            ("train", "train_000001.png", "", [f"{n} villas are built along the road." for n in range(5)]),
            ("train", "train_000001.png", "?open-0", ["Yes, a lane appears on the left."]),
            ("train", "train_000001.png", "?open-1", ["They are at the top."]),
            ("train", "train_000001.png", "?dialogue-0", ["0 villas are built along the road."]),
        )
    ],
    "clevr_change": [
        ("train", f"000003.png{end}", "000003", f"images/{DEFAULT}", f"{after}_000003.png", references)
        for end, after, references in (
            ("", "sc_images/CLEVR_semantic", ["the cube of 000003 turned red", "it became red"]),
            ("_n", "nsc_images/CLEVR_nonsemantic", ["nothing has changed", "no change was made"]),
        )
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
        (split, name, name, f"images/{split}/A/{name}", f"images/{split}/B/{name}", references)
        for split, name, references in (
            ("train", "train_000001.png", [f"{n} villas are built" for n in range(5)]),
            ("val", "val_000001.png", layouts.SAME),
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
        (split, name, scene, f"images/{folder}/{name}-img0.png", f"images/{folder}/{name}-img1.png", references)
        for split, name, scene, folder, references in (
            ("train", "train-1-0", "train-1", "train/38", ["two dogs"]),
            ("val", "dev-850-0", "dev-850", "dev", ["a bus"]),
            ("test", "test1-0-1", "test1-0", "test1", ["a cup", "a mug"]),
            ("test", "test1-7-0", "test1-7", "test1", ["x"]),
        )
    ],
    "rsrcc": [
        (split, f"{pair}?{number}", pair, f"{start}_before.png", f"{start}_after.png", [text])
        for split, pair, number, text, start in (
            ("train", "1a_2b", 0, "Yes", "train/images/0000/1a_2b"),
            ("train", "1a_2b", 1, "C", "train/images/0000/1a_2b"),
            ("val", "3c_4d", 0, "No", "val/images/0000/3c_4d"),
            ("test", "5e_6f", 0, "Yes", "test/images/0000/5e_6f"),
            ("test", "7a_8b", 0, "No", "test/images/0000/7a_8b"),
            ("test", "5e_6f", 1, "Yes", "test/images/0000/5e_6f"),
        )
    ],
    "spot_the_diff": [
        (split, name, name, f"resized_images/{name}", f"resized_images/{name[:-4]}_2.png", references)
        for split, name, references in (
            ("train", "235.png", ["the suv is gone", "a man left", "", "it is dark"]),
            ("train", "76.png", [""]),
            ("val", "8.png", ["there are no differences"]),
            ("test", "9.png", [""]),
        )
    ],
    "syned": [
        (split, name, name, "<.png>", "<.jpg>", references)
        for split, name, references in (
            ("train", "validation-0", ["make the sky night"]),
            ("val", "validation-10", ["add a duck."]),
            ("train", "validation-2", ["zip it up"]),
            ("test", "test-0", ["a goat", "I'm just an AI, I cannot", "add a goat"]),
            ("test", "test-10", ["add a bag"]),
            ("test", "test-2", ["a fork", "a fork by it", "f", "g", "h", "add a fork"]),
        )
    ],
}
# Source of the first row. If the row is merged, the source names all of its annotation rows
SOURCES = {
    "birds_to_words": "birds-to-words-v1.0.tsv, line 2 and birds-to-words-v1.0.tsv, line 5",
    "changechat": "annotations/changechat_105k_train.json, record 0",
    "clevr_change": f"change_captions.json, {DEFAULT}",
    "clevr_dc": "captions.json, 9",
    "emu_edit": "validation-00000-of-00002-2f1a.parquet, row 0",
    "iedit": "train.json, record 0",
    "levir_cc": "LevirCCcaptions.json, image 0",
    "magicbrush": "train-00000-of-00002-2f1a.parquet, row 0",
    "nlvr2": "train.json, line 1",
    "rsrcc": "train/metadata.csv, line 2",
    "spot_the_diff": "annotations/train.json, record 0 and 2 and 3",
    "syned": "instructions_with_idx_train_split.txt, line 1",
}


def path_or_suffix(image: Any) -> str:
    """Return the path of an image, or the suffix of an embedded image in angle brackets."""
    return f"<{image.name[-4:]}>" if isinstance(image, Embedded) else image


@pytest.mark.parametrize("reader", PUBLISHED)
def test_example_rows_are_read_as_they_stand(tmp_path, reader):
    rows = list(DATASETS[reader].read(WRITERS[reader](tmp_path)))
    values_of_rows = []
    for row in rows[: len(ROWS[reader])]:
        images = [path_or_suffix(image) for image in row.images] or [None, None]
        values_of_rows.append((row.split, row.name, row.scene, *images, row.references))
    assert values_of_rows == ROWS[reader]
    assert rows[0].source == SOURCES[reader]
    assert rows[0].raw_rows == 1 + SOURCES[reader].count(" and ")
    assert not any(row.fault for row in rows)


def test_change_types_are_those_of_the_annotations(tmp_path):
    clevr = [row.change_types for row in DATASETS["clevr_change"].read(WRITERS["clevr_change"](tmp_path / "clevr"))]
    assert clevr[:4] == [["color", "size"], ["none"], ["color"], ["none"]]
    root = WRITERS["levir_cc"](tmp_path / "levir")
    for flag in (0, 1):  # sentences say whether a pair changed, and not the flag
        edit_json(root / LEVIR, lambda file, flag=flag: [image.update(changeflag=flag) for image in file["images"]])
        assert [row.change_types for row in levir_cc.read(root)] == [["change"], ["none"], ["change"], ["none"]]
    texts = ["a\\almost nothing has changed", *layouts.SAME[:4]]
    write_json(root / LEVIR, {"images": [layouts.levir_record("val", 9, texts)]})
    assert [row.change_types for row in levir_cc.read(root)] == [["none"]]
    assert set(layouts.SAME) == levir_cc.NO_CHANGE_SENTENCES


@pytest.mark.parametrize(
    ("reader", "options", "before", "after"),
    [
        ("birds_to_words", {"images": "photos", "suffix": ".png"}, "photos/11.png", "photos/22.png"),
        ("spot_the_diff", {"images": "original", "suffix": ".jpg"}, "original/235.jpg", "original/235_2.jpg"),
        ("iedit", {"images": "photos"}, "photos/a.jpg", "photos/b.gif"),
        ("nlvr2", {"images": "p"}, "p/train/38/train-1-0-img0.png", "p/train/38/train-1-0-img1.png"),
        ("changechat", {"images": "c"}, "c/train/A/train_000001.png", "c/train/B/train_000001.png"),
        ("levir_cc", {"images": "c"}, "c/train/A/train_000001.png", "c/train/B/train_000001.png"),
    ],
)
def test_images_are_where_the_options_say(tmp_path, reader, options, before, after):
    row = next(iter(DATASETS[reader].read(WRITERS[reader](tmp_path), **options)))
    assert row.images == (before, after)


Change = Callable[[Path], Any]


def update(file: str, change: Callable[[Any], Any]) -> Change:
    return lambda root: edit_json(root / file, change)


def lines(file: str, *texts: str) -> Change:
    return lambda root: (root / file).write_text("\n".join(texts))


def shard(split: str, *rows: dict[str, Any]) -> Change:
    return lambda root: layouts.write_shards(root, split, rows)


def put(file: str, value: Any) -> Change:
    return lines(file, json.dumps(value))


def cut(file: str, keep: int) -> Change:
    return lambda root: (root / file).write_bytes((root / file).read_bytes()[:keep])


def without(pattern: str) -> Change:
    return lambda root: sorted(root.glob(pattern))[0].unlink()


def spoil_levir(file: dict) -> None:
    del file["images"][0]["filename"]
    file["images"][1]["sentences"][3] = "no change"
    file["images"][2]["sentences"][0]["tokens"] = ["a", 7]
    file["images"].append("val_000002.png")


EMU = "test-00000-of-00001-2f1a.parquet"
LEVIR = "LevirCCcaptions.json"
VARIANTS = "gt_augmented_test_clean.json"
TRAIN, TEST = (f"instructions_with_idx_{part}_split.txt" for part in ("train", "test"))
PIXELS = {"image": layouts.stored(1), "edited_image": layouts.stored(1)}
DEV = [("dev-1-0-0", "x", True), ("dev-1-0", "x", "True"), ("train-1-0-0", "x", "False"), ("dev-1-0-0", "x", "true")]
BIRDS = "birds-to-words-v1.0.tsv"
SESSION = "test/edit_sessions.json"
BAD_BIRDS = [("1", "no", "val", "a"), ("3/", "4", "val", "d")]
BAD_RSRCC = {
    "val": [
        ("p", ""),
        ("p", " "),
        ("p", "Was a house built? Yes"),
        ("p", layouts.rsrcc_text("Was a house built?", " ")),
        ("p", layouts.rsrcc_text("What was built?", "E", *layouts.ROAD_OPTIONS)),
        ("p", layouts.rsrcc_text("What was built?", "Yes", *layouts.ROAD_OPTIONS)),
        ("p", layouts.rsrcc_text("Was a house built?", "A")),
        ("p", layouts.rsrcc_text("Was a house built?", "I am not sure")),
        ("p", layouts.rsrcc_text("What was built?", "A", "A house.", "")),
        ("p", layouts.rsrcc_text("What was built?", "A", "A house.", "A road.").replace("B)", "C)")),
        ("p", layouts.rsrcc_text("", "Yes")),
    ],
}
CHATS = "annotations/changechat_105k"


def spoil_chats(records: list[Any]) -> None:
    """Spoil the questions of test_count.json, and add invalid ones."""
    del records[0]["conversations"][1]
    records[1]["image"] = records[1]["image"][:1]
    chat = layouts.changechat_record("test", 4, 1, "How many?", "2")
    records += [
        7,
        {"image": chat["image"]},
        chat | {"image": ["test/A/test_000004.png", "test/B/test_000005.png"]},
        chat | {"image": [chat["image"][0]] * 2},
        chat | {"changeflag": 0},
        chat | {"changeflag": "1"},
        chat | {"conversations": ["How many?", "2"]},
        chat | {"conversations": [{"from": "human", "value": "Is <image> new?"}, {"from": "gpt", "value": "2"}]},
        chat | {"conversations": [{"from": "tool", "value": "x"}]},
    ]


BROKEN: dict[str, list[Change]] = {
    "birds_to_words": [lambda root: layouts.write_birds(root / BIRDS, BAD_BIRDS)],
    "changechat": [
        update(f"{CHATS}_test.json", lambda rows: (rows[1].pop("image_B"), rows[0].update(captions="a road"))),
        update(f"{CHATS}_test_count.json", spoil_chats),
    ],
    "clevr_change": [
        update("splits.json", lambda splits: (splits["val"].append("9"), splits["train"].remove(5))),
        update("change_captions.json", lambda captions: (captions.pop(DEFAULT), captions.update({"photo.png": ["x"]}))),
    ],
    "clevr_dc": [
        update("split.json", lambda splits: splits["val"].extend([True, 11])),
        update("captions.json", lambda captions: captions.update({"12": ["x"]})),
    ],
    "emu_edit": [shard("test", {"idx": None, "instruction": "x"} | PIXELS, {"idx": 1, "instruction": ""} | PIXELS)],
    "iedit": [update("train.json", lambda rows: (rows.extend([7, {"img0": "a.jpg"}]), rows[0].update(uid="")))],
    "levir_cc": [update(LEVIR, spoil_levir)],
    "magicbrush": [
        update(SESSION, lambda sessions: sessions.update({"7": 3, "8": [{"input": "8-input.png"}]})),
        shard("dev", layouts.brush_row("17", 1, "x", 1) | {"turn_index": None}),
    ],
    "nlvr2": [
        lines("data/dev.json", *(json.dumps(layouts.nlvr_line(*line)) for line in DEV), "{"),
        put("data/train.json", {**layouts.nlvr_line("train-5-0-0", "x", "True"), "directory": "38"}),
    ],
    "rsrcc": [lambda root: layouts.write_rsrcc(root, BAD_RSRCC)],
    "spot_the_diff": [update("annotations/val.json", lambda rows: rows[0].update(sentences="gone"))],
    "syned": [
        lines(TRAIN, "0 <INSTRUCT> a", "5 <INSTRUCT> b", "x <INSTRUCT> c", "10 d"),
        lines(TEST, "3 <INSTRUCT> a", "add a goat", "0 <INSTRUCT> b"),
        update(VARIANTS, lambda texts: texts.update({"0": texts.pop("0 ")})),
        update("splits.json", lambda splits: splits["validation"].extend(["1", 64])),
    ],
}
# One line per fault: reader, name, split, source, code, key, and the value or the file
FAULTS = f"""
birds_to_words: None val {BIRDS}, line 2: unexpected_value img2ObservationURL text 'https://www.inaturalist.org/photos/no'
changechat: None test {CHATS}_test.json, record 0: unexpected_value captions text 'a road'
changechat: None test {CHATS}_test.json, record 1: missing_value image_B
changechat: None test {CHATS}_test_count.json, record 0: question_without_answer conversations
changechat: None test {CHATS}_test_count.json, record 1: unexpected_value image a list ['test/A/test_000005.png']
changechat: None test {CHATS}_test_count.json, record 2: unexpected_value record a whole number 7
changechat: None test {CHATS}_test_count.json, record 3: missing_value conversations
changechat: None test {CHATS}_test_count.json, record 4: unexpected_value image a list ['test/A/test_000004.png'
changechat: None test {CHATS}_test_count.json, record 5: unexpected_value image a list ['test/A/test_000004.png'
changechat: None test {CHATS}_test_count.json, record 6: flags_contradict changeflag 0
changechat: None test {CHATS}_test_count.json, record 7: unexpected_value changeflag text '1'
changechat: None test {CHATS}_test_count.json, record 8: unexpected_value conversations a list ['How many?', '2']
changechat: None test {CHATS}_test_count.json, record 9: marks_differ_from_images conversations
changechat: None test {CHATS}_test_count.json, record 10: unknown_role conversations.0 text 'tool'
clevr_change: 000003.png train change_captions.json, {DEFAULT}: no_captions_of_scene captions {DEFAULT}
clevr_change: None val splits.json, val[1]: unexpected_value scene text '9'
clevr_change: {FIVE} None change_captions.json, {FIVE}: scene_without_split split splits.json
clevr_change: photo.png None change_captions.json, photo.png: scene_without_split split splits.json
clevr_change: {FIVE}_n None no_change_captions.json, {FIVE}: scene_without_split split splits.json
clevr_dc: None val split.json, val[0]: unexpected_value scene true
clevr_dc: 000011.png val captions.json, 11: no_captions_of_scene captions 11 captions.json
clevr_dc: 12 None captions.json, 12: scene_without_split split split.json
emu_edit: None test {EMU}, row 0: missing_value idx
emu_edit: None test {EMU}, row 1: empty_value instruction
iedit: None train train.json, record 0: empty_value uid
iedit: None train train.json, record 3: unexpected_value record a whole number 7
iedit: None train train.json, record 4: missing_value img1
levir_cc: None train {LEVIR}, image 0: missing_value filename
levir_cc: None val {LEVIR}, image 1: unexpected_value sentences a list
levir_cc: None test {LEVIR}, image 2: unexpected_value sentences a list
levir_cc: None None {LEVIR}, image 4: unexpected_value record text 'val_000002.png'
magicbrush: None val dev-00000-of-00001-2f1a.parquet, row 0: missing_value turn_index
magicbrush: None test {SESSION}, 7: unexpected_value turns a whole number 3
magicbrush: None test {SESSION}, 8, turn 1: missing_value instruction
nlvr2: None train train.json, line 1: unexpected_value directory text '38'
nlvr2: None val dev.json, line 1: unexpected_value label true
nlvr2: None val dev.json, line 2: unexpected_value identifier text 'dev-1-0'
nlvr2: None val dev.json, line 3: unexpected_value identifier text 'train-1-0-0'
nlvr2: None val dev.json, line 4: unexpected_value label text 'true'
nlvr2: None val dev.json, line 5: invalid_json_in_row row
rsrcc: p?0 val val/metadata.csv, line 2: empty_value text
rsrcc: p?1 val val/metadata.csv, line 3: no_question_in_text text text ' '
rsrcc: p?2 val val/metadata.csv, line 4: no_question_in_text text text 'Was a house built? Yes'
rsrcc: p?3 val val/metadata.csv, line 5: no_answer_in_text text
rsrcc: p?4 val val/metadata.csv, line 6: answer_names_no_option text E
rsrcc: p?5 val val/metadata.csv, line 7: answer_of_other_kind text text 'Yes'
rsrcc: p?6 val val/metadata.csv, line 8: answer_of_other_kind text text 'A'
rsrcc: p?7 val val/metadata.csv, line 9: answer_of_other_kind text text 'I am not sure'
rsrcc: p?8 val val/metadata.csv, line 10: options_out_of_order text
rsrcc: p?9 val val/metadata.csv, line 11: options_out_of_order text
rsrcc: p?10 val val/metadata.csv, line 12: no_question_in_text text
spot_the_diff: None val annotations/val.json, record 0: unexpected_value sentences text 'gone'
syned: None validation splits.json, validation[1]: unexpected_value scene text '1'
syned: validation-5 None {TRAIN}, line 2: scene_without_split split splits.json
syned: None None {TRAIN}, line 3: unexpected_value line text 'x <INSTRUCT> c'
syned: None None {TRAIN}, line 4: unexpected_value line text '10 d'
syned: validation-2 train splits.json, 2: no_line_for_pair instruction {TRAIN}
syned: validation-10 val splits.json, 10: no_line_for_pair instruction {TRAIN}
syned: validation-64 val splits.json, 64: no_line_for_pair instruction {TRAIN}
syned: test-3 test {TEST}, line 1: unexpected_value {VARIANTS} '3 ' null
syned: None test {TEST}, line 2: unexpected_value line text 'add a goat'
syned: test-0 test {TEST}, line 3: unexpected_value {VARIANTS} '0 ' null
"""


def summary_of(fault: Fault) -> str:
    """Return the code of a fault, its key, and the value or the file that it names."""
    fields = [str(fault.fields[name]) for name in ("key", "value", "file") if name in fault.fields]
    return " ".join([fault.code.removeprefix("datasets."), *fields])


@pytest.mark.parametrize("reader", BROKEN)
def test_what_cannot_be_read_stays_with_its_place_and_what_is_wrong(tmp_path, reader):
    root = WRITERS[reader](tmp_path)
    for change in BROKEN[reader]:
        change(root)
    rows = [row for row in DATASETS[reader].read(root) if row.fault]
    lines = [f"{reader}: {row.name} {row.split} {row.source}: {summary_of(row.fault)}" for row in rows]
    expected_lines = [line for line in FAULTS.splitlines() if line.startswith(f"{reader}: ")]
    assert len(lines) == len(expected_lines)
    assert [line for line, start in zip(lines, expected_lines, strict=True) if not line.startswith(start)] == []


CAPTIONS = "change_captions.json"
TYPES = "type_mapping.json"
WITHOUT_EDITED = shard("test", layouts.emu_row("test", 0, "x", is_edited=False))
# Reader, what is changed, code of the error, file, and other fields
REFUSED: list[tuple[str, Change, str, str, dict[str, Any]]] = [
    ("changechat", without(f"{CHATS}_test_open.json"), "missing_file", f"{CHATS}_test_open.json", {}),
    ("changechat", put(f"{CHATS}_train.json", {}), "other_json", f"{CHATS}_train.json", {"expected": "a list"}),
    ("clevr_change", put(TYPES, {"color": "a.png"}), "unexpected_value", TYPES, {"value": "text 'a.png'"}),
    ("clevr_change", put(TYPES, {"color": [3]}), "unexpected_value", TYPES, {"key": "color", "value": "a list [3]"}),
    ("clevr_change", cut(CAPTIONS, 0), "empty_file", CAPTIONS, {}),
    ("clevr_change", lines(CAPTIONS, "\N{ZERO WIDTH NO-BREAK SPACE} ", ""), "empty_file", CAPTIONS, {}),
    *(("clevr_change", cut(CAPTIONS, keep), "invalid_json", CAPTIONS, {"line": 1}) for keep in (1, 40, -1)),
    ("levir_cc", put(LEVIR, {"image": []}), "no_list_of_images", LEVIR, {"key": "images", "value": "null"}),
    ("emu_edit", WITHOUT_EDITED, "missing_columns", f"data/{EMU}", {"names": ["edited_image"]}),
    (
        "emu_edit",
        without("data/val*"),
        "missing_shards",
        "data/validation-*.parquet",
        {"value": 1, "expected": 2},
    ),
    ("emu_edit", without("data/test-*"), "missing_file", "data/test-*.parquet", {}),
    ("emu_edit", cut(f"data/{EMU}", 3), "unreadable_parquet", f"data/{EMU}", {}),
    ("magicbrush", without(SESSION), "missing_file", SESSION, {}),
    ("rsrcc", without("val/metadata.csv"), "missing_file", "val/metadata.csv", {}),
    ("rsrcc", lines("test/metadata.csv", "file_name,text"), "missing_columns", "test/metadata.csv", {}),
    ("spot_the_diff", without("annotations/val.json"), "missing_file", "annotations/val.json", {}),
    (
        "syned",
        put("splits.json", {"train": [0], "val": [1]}),
        "no_list_of_split",
        "splits.json",
        {"names": ["validation"], "expected": ["train", "validation"]},
    ),
]


def test_own_data_in_levir_ccs_layout_are_refused_with_an_entry_for_them(tmp_path):
    root = layouts.write_own_levir(tmp_path)
    fields = {"pairs": 2, "unchanged": 0, "example": "val_000001.png"}
    with raises(DataError, "datasets.own_data_like_levir_cc", path=root / LEVIR, **fields) as refused:
        list(levir_cc.read(root, images="pictures"))
    columns = yaml.safe_load(refused.value.fields["options"])["options"]["columns"]
    assert columns["after"] == "pictures/{split}/B/{filename}"
    edit_json(root / LEVIR, lambda file: [image.update(changeflag=None) for image in file["images"]])
    assert [row.change_types for row in levir_cc.read(root)] == 4 * [["change"]]


@pytest.mark.parametrize(("reader", "change", "code", "file", "fields"), REFUSED)
def test_a_file_that_cannot_be_trusted_is_refused_by_name(tmp_path, reader, change, code, file, fields):
    root = WRITERS[reader](tmp_path)
    change(root)
    with raises(DataError, f"datasets.{code}", path=root / file, **fields):
        list(DATASETS[reader].read(root))


@pytest.mark.parametrize(
    ("start", "code", "command"),
    [
        (b"version https://git-lfs.github.com/spec/v1\n", "files.pointer_of_git_lfs", "git -C '{folder}' lfs pull"),
        (b"PAR1", "files.parquet", "mv '{file}' '{file}'.parquet"),
        (b"\x1f\x8b", "files.gzip", "mv '{file}' '{file}'.gz && gunzip '{file}'.gz"),
        (b"PK\3\4", "files.archive_or_spreadsheet", ""),
    ],
)
def test_a_file_of_another_kind_is_refused_with_the_command_that_mends_it(tmp_path, start, code, command):
    file = tmp_path / "of 2026" / "pairs.csv"
    file.parent.mkdir()
    file.write_bytes(start + b"...")
    with raises(DataError, code, path=file, command=command.format(file=file, folder=file.parent)):
        read_text(file)


# Pairs of each toy that validate finds good; one of IEdit's is a test pair's, and Syned's images are Emu Edit's
CLEAN_PAIRS = {
    "birds_to_words": 3,
    "changechat": 4,
    "clevr_change": 12,
    "clevr_dc": 3,
    "emu_edit": 5,
    "iedit": 6,
    "levir_cc": 4,
    "magicbrush": 5,
    "nlvr2": 4,
    "rsrcc": 4,
    "spot_the_diff": 4,
    "syned": 6,
}


@pytest.fixture(scope="module")
def validated(tmp_path_factory) -> tuple[Path, ValidateReport]:
    """Ingest small examples of all datasets, and validate them in one run."""
    folder = tmp_path_factory.mktemp("validated")
    with pytest.MonkeyPatch.context() as monkeypatch:
        layouts.judge_by_polars_alone(monkeypatch)
        for reader in PUBLISHED:
            run_ingest(WRITERS[reader](folder / reader), reader, reader)
        return folder, run_validate(folder, near_duplicate_max_diff=None)


@pytest.mark.slow
def test_every_dataset_is_validated_in_one_run_without_a_bad_image(validated):
    _, report = validated
    assert list(report.datasets) == PUBLISHED
    assert report.bad_images == 0


@pytest.mark.slow
@pytest.mark.parametrize("reader", PUBLISHED)
def test_validate_keeps_the_good_pairs_of_a_dataset(validated, reader):
    _, report = validated
    assert sum(report.datasets[reader].pairs.values()) == CLEAN_PAIRS[reader]


@pytest.mark.slow
def test_the_only_leaked_pair_of_iedit_is_quarantined_with_its_reason(validated):
    folder, _ = validated
    rows = pl.read_parquet(folder / "clean/quarantine").select("id", "rules", "reason").rows()
    reason = "leak: test pair iedit/Reddit_6 has the same images, so this pair is not used for training"
    assert [row for row in rows if row[0].startswith("iedit")] == [("iedit/Reddit_3", ["not_in_test"], reason)]


def test_without_emu_edit_a_pair_of_syned_names_where_its_images_should_be(tmp_path):
    root = WRITERS["syned"](tmp_path)
    shutil.rmtree(root / "emu_edit")
    row = next(iter(DATASETS["syned"].read(root)))
    assert row.images[0] == "emu_edit/data/validation-*.parquet, idx 0, image"


def test_without_the_zip_of_magicbrush_s_test_an_option_leaves_it_out(tmp_path):
    root = WRITERS["magicbrush"](tmp_path)
    without(SESSION)(root)
    assert [row.split for row in DATASETS["magicbrush"].read(root, test=None)] == ["train", "train", "val"]


def test_a_pair_without_the_bytes_of_an_image_stands_alone_and_the_others_stay(tmp_path):
    root = WRITERS["emu_edit"](tmp_path)
    rows = [layouts.emu_row("test", number, "x") for number in range(3)]
    rows[0]["edited_image"] = {"bytes": None, "path": "a.png"}
    rows[2]["edited_image"] = None
    layouts.write_shards(root, "test", rows)
    row_with_path, complete_row, row_without_image = list(DATASETS["emu_edit"].read(root))[3:]
    assert row_with_path.images[1] == "a.png"
    assert complete_row.fault is None
    assert row_without_image.fault == Fault("datasets.missing_value", key="edited_image")


def copy_real(reader: str, root: Path) -> None:
    if reader == "birds_to_words":
        rows = []
        for split in ("train", "val"):
            text = (REAL / f"birds_to_words/cwj1412_{split}.json").read_text()
            for row in map(json.loads, filter(None, text.split("\n"))):
                descriptions = [row["description"]] if split == "train" else row["description"]
                rows += [(row["img1"], row["img2"], split, " ".join(tokens)) for tokens in descriptions]
        layouts.write_birds(root / "birds-to-words-v1.0.tsv", rows)
        return
    for name in DATASETS[reader].files:
        (root / name).parent.mkdir(exist_ok=True)
        file = REAL / reader / Path(name).name
        (root / name).write_text("[]" if file.stem == "test" else file.read_text())


@pytest.mark.skipif(not REAL.is_dir(), reason="the real annotations are not beside the project")
def test_the_real_annotations_count_to_the_unit(tmp_path):
    for reader in ("spot_the_diff", "iedit", "birds_to_words"):
        copy_real(reader, tmp_path)
        rows = list(DATASETS[reader].read(tmp_path))
        (published,) = DATASETS[reader].published
        assert not any(row.fault for row in rows)
        for split in ("train", "val"):
            rows_of_split = [row for row in rows if row.split == split]
            count = getattr(published, split)
            references = [text for row in rows_of_split for text in row.references]
            assert len(rows_of_split) == count.pairs
            assert len(references) == count.references
            assert references.count("") == count.empty
            distinct = sum(len({" ".join(text.split()) for text in row.references} - {""}) for row in rows_of_split)
            assert len(references) - count.empty - distinct == count.repeated
            assert sum({*row.references} == {""} for row in rows_of_split) == count.wordless
            assert count.records is None or sum(row.raw_rows for row in rows_of_split) == count.records
            assert count.image_pairs is None or len({row.images for row in rows_of_split}) == count.image_pairs
    for reader, file, pairs_of_a_scene in (("clevr_change", "splits.json", 2), ("clevr_dc", "split.json", 1)):
        scenes = json.loads((REAL / reader / file).read_text())
        pair_counts = {split: pairs_of_a_scene * len(numbers) for split, numbers in scenes.items()}
        assert pair_counts == DATASETS[reader].published[0].pairs()


PAIR = {"before": "a/1.png", "after": "b/1.png", "captions": ["it fell", "down"], "split": "train"}
PAIRS = [PAIR, {"before": "a/2.png", "after": "b/2.png", "captions": ["gone"], "split": "test"}]


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".json", ".jsonl", ".parquet"])
def test_a_collection_of_ones_own_reads_the_same_in_every_format(tmp_path, suffix):
    frame = pl.DataFrame(PAIRS)
    path = tmp_path / f"p{suffix}"
    flat = frame.with_columns(captions=pl.Series([json.dumps(row["captions"]) for row in PAIRS]))
    writers = {".parquet": frame.write_parquet, ".jsonl": frame.write_ndjson, ".csv": flat.write_csv}
    writers |= {".json": lambda to: write_json(to, PAIRS), ".tsv": lambda to: flat.write_csv(to, separator="\t")}
    writers[suffix](path)
    assert [(row.name, row.split, row.references, row.fault) for row in pairs.read(tmp_path, path.name)] == [
        ("a/1.png|b/1.png", "train", ["it fell", "down"], None),
        ("a/2.png|b/2.png", "test", ["gone"], None),
    ]


@pytest.mark.parametrize("field", ["split", "scene", "before", "after"])
def test_rows_of_one_id_are_merged_and_must_agree_in_split_scene_and_images(tmp_path, field):
    row = PAIR | {"id": 7, "scene": "s", "captions": ["x"]}
    write_json(tmp_path / "m.json", [row, row | {field: "other"}, row | {"captions": ["y"]}])
    bad, good = pairs.read(tmp_path, "m.json")
    assert bad.source == "m.json, record 1"
    assert bad.fault == Fault("datasets.repeated_id", key="id", source="m.json, record 0")
    assert good.name == "7"
    assert good.source == "m.json, record 0 and m.json, record 2"
    assert good.raw_rows == 2
    assert good.references == ["x", "y"]
    assert good.fault is None


def test_fields_are_taken_as_they_are_and_no_name_or_caption_stands_alone(tmp_path):
    rows = [
        {"before": "a.png", "after": "b.png", "captions": "x", "id": 7, "scene": "s1", "change_types": "color"},
        {"before": "c.png", "after": "d.png", "captions": '["y", "z"]', "id": "", "scene": ""},
        {"before": "e.png", "after": "f.png", "captions": "[open", "change_types": [3]},
        {"before": "g.png", "after": 1, "captions": ["x"]},
        {"before": "h.png", "after": "i.png", "captions": {"x": 1}},
    ]
    write_json(tmp_path / "m.json", rows)
    read_rows = sorted(pairs.read(tmp_path, "m.json", split="test"), key=lambda row: row.images[0])
    assert [(row.name, row.scene, row.split, row.references, row.change_types) for row in read_rows] == [
        ("7", "s1", "test", ["x"], ["color"]),
        ("c.png|d.png", "c.png|d.png", "test", ["y", "z"], []),
        ("e.png|f.png", "e.png|f.png", "test", ["[open"], []),
        (None, None, "test", ["x"], []),
        ("h.png|i.png", "h.png|i.png", "test", {"x": 1}, []),
    ]
    faults = [row.fault for row in read_rows]
    assert summary_of(faults.pop(2)) == "unexpected_value change_types a list [3]"
    assert faults == [None] * 4


def test_omnidiff_takes_columns_from_params_and_types_from_the_paper_in_any_case(tmp_path):
    types = [["OCR", "Color"], [" Color", "ocr "], ["None"], []]
    rows = [{"image1": f"{n}.jpg", "image2": "b.jpg", "caption": "x", "types": types[n]} for n in range(4)]
    write_json(tmp_path / "real.json", [*rows, rows[0] | {"image1": "9.jpg", "types": ["magic"]}, {"types": ["size"]}])
    columns = {"before": "image1", "after": "image2", "captions": "caption", "change_types": "types"}
    read_rows = omnidiff.read(tmp_path, "real.json", columns, split="val")
    *good, bad, lost = sorted(read_rows, key=lambda row: str(row.images[0]))
    assert {(row.split, row.fault) for row in good} == {("val", None)}
    assert [row.change_types for row in good] == [["ocr", "color"], ["color", "ocr"], ["none"], []]
    assert bad.fault.code == "datasets.unknown_change_types"
    assert bad.fault.fields["names"] == ["magic"]
    assert bad.change_types == []
    assert lost.fault == Fault("datasets.missing_value", key="image1, image2, caption")
    assert lost.change_types == ["size"]


def test_values_are_described_with_their_kind_and_cut():
    shown = "null", "true", "a whole number 3", "a number 2.5", "text 'a'", "a list [1]", "an object {}"
    assert tuple(describe(value) for value in (None, True, 3, 2.5, "a", [1], {})) == shown
    assert describe("x" * 58) == f"text '{'x' * 58}'"
    assert describe("x" * 59) == f"text '{'x' * 56}..."


# The options of the reader `pairs`: each layout is read as the same two pairs

Write = Callable[[Path], Any]


def as_json(value: Any) -> Write:
    return lambda root: write_json(root / "p.json", value)


def as_lines(name: str, rows: list[Any]) -> Write:
    def write(root: Path) -> None:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("".join(json.dumps(row) + "\n" for row in rows))

    return write


def as_text(**files: str) -> Write:
    return lambda root: [(root / name.replace("__", ".")).write_text(text) for name, text in files.items()]


def write_files(*writes: Write) -> Write:
    return lambda root: [write(root) for write in writes]


def two_rows(make: Callable[[str, str, str], dict[str, Any]]) -> list[dict[str, Any]]:
    return [make("a/1.png", "b/1.png", "train"), make("a/2.png", "b/2.png", "val")]


PLAIN = two_rows(lambda before, after, split: {"before": before, "after": after, "captions": "it fell", "split": split})
OF_DEV = [row | {"split": {"train": "Train", "val": "validation"}[row["split"]]} for row in PLAIN]
IMAGES = {"images": "images", "split": "split", "id": None}

PARTS = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": [{"type": "image"}, {"type": "image"}]},
    {"role": "assistant", "content": [{"type": "text", "text": "it fell"}]},
]
LLAVA = [{"from": "human", "value": "<image><image>\nWhat changed?"}, {"from": "gpt", "value": "it fell"}]
COLUMNS = IMAGES | {"images": "image", "captions": "conversations"}
BY_KEY = {"before": "a/{key}.png", "after": "b/{key}.png", "captions": "value"}
NESTED = {"before": "x.files.0", "after": "x.files.-1", "captions": "t.*.raw", "split": "m.s"}
SPOT = {"dataset": "Spot-the-Diff"}
HEADER = "before,after,captions\n"
LAYOUTS: dict[str, tuple[Write, dict[str, Any]]] = {
    "a pattern": (
        write_files(as_lines("p-0.jsonl", PLAIN[:1]), as_lines("p-1.jsonl", PLAIN[1:])),
        {"manifest": "p-*.jsonl"},
    ),
    "a pattern of folders": (
        write_files(as_lines("x/p.jsonl", PLAIN[:1]), as_lines("y/p.jsonl", PLAIN[1:])),
        {"manifest": "*/p.jsonl"},
    ),
    "a file for each split": (
        as_text(train__csv=f"{HEADER}a/1.png,b/1.png,it fell\n", dev__csv=f"{HEADER}a/2.png,b/2.png,it fell\n"),
        {"manifest": {"train": "train.csv", "val": "dev.csv"}},
    ),
    "splits of other names": (as_json(OF_DEV), {"splits": {"Train": "train", "validation": "val"}}),
    "templates": (
        as_text(p__csv="number,captions,split\n1,it fell,train\n2,it fell,val\n"),
        {"manifest": "p.csv", "columns": {"before": "a/{number}.png", "after": "b/{number}.png"}},
    ),
    "captions by key": (as_json({"1": ["it fell"], "2": ["it fell"]}), {"columns": BY_KEY, "split": "test"}),
    "records by key": (
        as_json({row["before"]: {k: v for k, v in row.items() if k != "before"} for row in PLAIN}),
        {"columns": {"before": "key"}},
    ),
    "rows below a key, nested": (
        as_json(
            {
                "data": {
                    "of": two_rows(lambda a, b, s: {"x": {"files": [a, b]}, "m": {"s": s}, "t": [{"raw": "it fell"}]})
                }
            }
        ),
        {"rows": "data.of", "columns": NESTED},
    ),
    "a filter": (as_json([PLAIN[0], {"lang": "fr", "split": "train"}, PLAIN[1]]), {"where": {"lang": [None, "en"]}}),
    "semicolons": (
        as_text(p__csv="before;after;captions;split\na/1.png;b/1.png;it fell;train\na/2.png;b/2.png;it fell;val\n"),
        {"manifest": "p.csv", "delimiter": ";"},
    ),
    "LLaVA": (
        as_json(two_rows(lambda a, b, s: {"id": f"{a}#0", "image": [a, b], "conversations": LLAVA})),
        {"columns": {**COLUMNS, "split": "split"}, "split": "train"},
    ),
    "M4-Instruct": (
        as_json(
            two_rows(lambda a, b, s: {"image": [a, b], "conversations": LLAVA, "metadata": SPOT | {"split": s}})
            + [{"image": ["c.png"], "conversations": [], "metadata": {"dataset": "VQA"}}]
        ),
        {"columns": COLUMNS | {"split": "metadata.split"}, "where": {"metadata.dataset": "Spot-the-Diff"}},
    ),
    "messages in parts, as of ms-swift and LLaMA-Factory": (
        as_json(two_rows(lambda a, b, s: {"images": [a, b], "messages": PARTS, "split": s})),
        {"columns": IMAGES | {"captions": "messages"}},
    ),
    "nested Parquet": (
        lambda root: pl.DataFrame(
            two_rows(lambda a, b, s: {"images": [a, b], "meta": {"s": s}, "sentences": [{"raw": "it fell"}]})
        ).write_parquet(root / "p.parquet"),
        {"manifest": "p.parquet", "columns": {"images": "images", "captions": "sentences.*.raw", "split": "meta.s"}},
    ),
}
for _, options in LAYOUTS.values():
    options.setdefault("manifest", "p.json")


def read(root: Path, **options: Any) -> list[Any]:
    return list(pairs.read(root, **options))


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_is_read_as_the_same_two_pairs(tmp_path, name):
    write, options = LAYOUTS[name]
    write(tmp_path)
    rows = read(tmp_path, **options)
    assert [(*row.images, row.references, row.fault) for row in rows] == [
        ("a/1.png", "b/1.png", ["it fell"], None),
        ("a/2.png", "b/2.png", ["it fell"], None),
    ]
    assert [row.split for row in rows] == ([options["split"]] * 2 if "split" in options else ["train", "val"])
    assert len({row.name for row in rows}) == 2


def test_params_take_the_options_that_the_reader_takes_and_no_others(tmp_path):
    raw = yaml.safe_load(Path("params.yaml").read_text())
    for number, (_, options) in enumerate(LAYOUTS.values()):
        raw["ingest"]["datasets"][f"own{number}"] = {"reader": "pairs", "root": f"data/own{number}", "options": options}
    (tmp_path / "p.yaml").write_text(yaml.safe_dump(raw))
    assert load_params(tmp_path / "p.yaml").ingest.datasets["own0"].options == {"manifest": "p-*.jsonl"}
    columns = {"befor": "x", "after": "{x"}
    options = {"splits": {"dev": "valid"}, "columns": columns, "manifest": {"dev": "a"}, "rows": 3}
    raw["ingest"]["datasets"]["own"] = {"reader": "pairs", "root": "data/own", "options": options}
    (tmp_path / "p.yaml").write_text(yaml.safe_dump(raw))
    with raises(ParamsError, "settings.faults") as caught:
        load_params(tmp_path / "p.yaml")
    keys = {fault.fields["key"].removeprefix("ingest.datasets.own.options.") for fault in caught.value.fields["faults"]}
    assert keys == {"columns.after", "columns.befor", "manifest.dev", "splits.dev", "rows"}


NO_PAIRS = [
    (
        {"images": ["a", "b", "c"], "x": "t"},
        Fault("datasets.not_two_images", key="images", count=3, value="a list ['a', 'b', 'c']"),
    ),
    ({"images": "a", "x": "t"}, Fault("datasets.not_two_images", key="images", count=1, value="text 'a'")),
    ({"x": "t"}, Fault("datasets.not_two_images", key="images", count=0, value="null")),
    ({"images": ["a", "b"]}, Fault("datasets.missing_value", key="x")),
]


def test_a_row_that_is_no_pair_stands_alone_with_what_is_wrong(tmp_path):
    write_json(tmp_path / "m.json", [row for row, _ in NO_PAIRS])
    rows = read(tmp_path, manifest="m.json", columns={"images": "images", "captions": "x"}, split="train")
    assert [row.fault for row in rows] == [fault for _, fault in NO_PAIRS]


def test_rows_are_marked_joined_and_filtered_as_the_options_say(tmp_path):
    write_json(tmp_path / "m.json", [PLAIN[0] | {"change_types": "none"}, PLAIN[1] | {"changeflag": 0}])
    assert [row.change_types for row in read(tmp_path, manifest="m.json")] == [["none"], []]
    marked = read(tmp_path, manifest="m.json", no_change={"changeflag": 0})
    assert [row.change_types for row in marked] == [["none"]] * 2
    write_json(tmp_path / "m.json", [PLAIN[0] | {"id": "1#0"}, PLAIN[0] | {"id": "1#1", "captions": "it broke"}])
    assert len(read(tmp_path, manifest="m.json")) == 2
    (row,) = read(tmp_path, manifest="m.json", columns={"id": None})
    assert row.name == "a/1.png|b/1.png"
    assert row.references == ["it fell", "it broke"]
    assert row.raw_rows == 2
    write_json(tmp_path / "m.json", [PLAIN[0] | {"captions": [" N/A ", "it fell"]}, PLAIN[1] | {"captions": "n/a"}])
    row_with_caption, row_without_caption = read(tmp_path, manifest="m.json", no_caption=["n/a"])
    assert row_with_caption.references == ["it fell"]
    assert not row_with_caption.without_caption
    assert row_without_caption.without_caption
    (tmp_path / "m.jsonl").write_text(json.dumps(PLAIN[0] | {"lang": "en"}) + '\n{"lang": \n')
    bad, good = read(tmp_path, manifest="m.jsonl", where={"lang": "en"})
    assert bad.source == "m.jsonl, line 2", "a line that cannot be parsed is not left out"
    assert good.fault is None


def test_files_of_a_pattern_are_named_with_their_folder(tmp_path):
    write, options = LAYOUTS["a pattern of folders"]
    write(tmp_path)
    assert [row.source for row in read(tmp_path, **options)] == ["x/p.jsonl, line 1", "y/p.jsonl, line 1"]
    (tmp_path / "p[1].jsonl").write_text(json.dumps(PLAIN[0]))
    assert len(read(tmp_path, manifest="p[1].jsonl")) == 1


def test_files_of_a_pattern_are_read_in_the_order_of_their_names(tmp_path):
    names = [f"{number:02}.csv" for number in range(20)]
    for name in names[10:] + names[:10]:
        (tmp_path / name).touch()
    assert [path.name for path in pairs.files_called(tmp_path, "*.csv")] == names


def test_one_pair_in_two_splits_is_a_contradiction(tmp_path):
    as_lines("x.jsonl", PLAIN[:1])(tmp_path)
    as_lines("p[1].jsonl", PLAIN[:1])(tmp_path)
    rows = read(tmp_path, manifest={"train": "p[1].jsonl", "test": "x.jsonl"})
    assert [row.fault for row in rows] == [Fault("datasets.repeated_id", key="id", source="p[1].jsonl, line 1"), None]


@pytest.mark.parametrize(
    ("name", "content", "options", "code", "fields"),
    [
        ("m.json", '{"data": 3}', {"rows": "data"}, "no_rows_at_path", {"rows": "data", "value": "a whole number 3"}),
        ("m.txt", "x", {}, "unknown_kind_of_table", {}),
        (
            "m.csv",
            "before\na\n",
            {},
            "missing_columns",
            {"names": ["after", "captions", "split"], "columns": ["before"]},
        ),
        (
            "m.csv",
            "n,captions,split\n",
            {"columns": {"before": "{x}", "after": "{n}"}},
            "missing_columns",
            {"names": ["x"], "columns": ["n", "captions", "split"]},
        ),
        ("m.parquet", None, {}, "missing_manifest", {}),
        ("*.tsv", None, {}, "pattern_without_file", {}),
    ],
)
def test_a_manifest_that_cannot_be_used_is_named(tmp_path, name, content, options, code, fields):
    if content:
        (tmp_path / name).write_text(content)
    with raises(DataError, f"datasets.{code}", path=tmp_path / name, **fields):
        read(tmp_path, manifest=name, **options)


def test_paths_lead_into_nested_values_and_a_column_of_the_whole_name_comes_first():
    row = {"a.b": 1, "a": {"b": 2, "c": [{"d": 3}, {"d": 4}]}}
    paths = ("a.b", "a.c.0.d", "a.c.-1.d", "a.c.*.d", "a.c.2.d", "a.c.--1", "z.y", "a.b.c")
    assert [pick(row, path) for path in paths] == [1, 3, 4, [3, 4], None, None, None, None]
    assert pick(row, "") == row


def test_templates_are_filled_and_numbers_padded():
    row = {"n": "7", "m": {"s": "val"}, "k": 12}
    assert look_up(row, "{m.s}/{n:06}_{k:03}.png") == "val/000007_012.png"
    assert look_up(row, "{m.s}/{gone}.png") is None
    assert look_up({"{x}": 1}, "{x}") == 1
    assert columns_in("{m.s}/{n:06}.png") == ["m.s", "n"]
    with raises(DataError, "datasets.value_does_not_fit_template", key="columns", value="text 'val'", format="06d"):
        look_up(row, "{m.s:06d}")


IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def test_images_inside_parquet_are_written_beside_the_records_byte_by_byte(tmp_path, monkeypatch):
    layouts.judge_by_polars_alone(monkeypatch)
    numbers = [(1, 2), (3, 4), (5, 1), (1, 2), (6, 7)]
    root = tmp_path / "raw"
    data = {n: save_picture(tmp_path / f"{n}.png", n).read_bytes() for n in range(8)}
    values = {"captions": list("abdce")}
    paths = {"before": None, "after": "x.png"}
    for index, (side, path) in enumerate(paths.items()):
        images_of_side = [{"bytes": data[pair[index]], "path": path} for pair in numbers]
        values[side] = pa.array(images_of_side, IMAGE)
    root.mkdir()
    pq.write_table(pa.table(values), root / "p.parquet", row_group_size=2)
    options = {"manifest": "p.parquet", "split": "train"}
    rows = read(root, **options)
    assert [(row.references, row.fault) for row in rows] == [([*texts], None) for texts in ("ac", "b", "d", "e")]
    for _ in range(2):
        run_ingest(root, "pairs", "own", **options)
        records = pl.read_parquet(tmp_path / "records/own/records")
        assert records["fault"].to_list() == [None] * 4
        for pair, images_of_pair in zip(((1, 2), (3, 4), (5, 1), (6, 7)), records["images"], strict=True):
            assert [Path(image["uri"]).read_bytes() for image in images_of_pair] == [data[number] for number in pair]
        images = list((tmp_path / "records/own/images").iterdir())
        assert len(images) == 7
        assert {path.suffix for path in images} == {".png"}
    assert run_validate(tmp_path, max_quarantined_share=0).quarantined == 0


def test_a_list_of_embedded_images_is_a_pair_and_one_without_bytes_is_its_path(tmp_path):
    data = save_picture(tmp_path / "1.png", 1).read_bytes()
    images = [{"bytes": data, "path": None}, {"bytes": None, "path": "b/2.png"}]
    table = {"images": pa.array([images], pa.list_(IMAGE)), "captions": ["it fell"], "split": ["val"]}
    pq.write_table(pa.table(table), tmp_path / "p.parquet")
    (row,) = read(tmp_path, manifest="p.parquet", columns={"images": "images"})
    assert row.images[0].read() == data
    assert row.images[1] == "b/2.png"
    assert row.fault is None
