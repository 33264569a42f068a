"""Write small datasets in their exact layouts on disk."""

import csv
import hashlib
import io
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from m3diff.datasets import llava_instruct, llava_pretrain
from m3diff.datasets.minichange.language import grammar
from m3diff.records.schemas import RECORD_SCHEMA
from m3diff.records.tables import write_table
from m3diff.stages.ingest.params import DatasetEntry
from m3diff.stages.ingest.stage import IngestReport, ingest
from m3diff.stages.validate import stage
from m3diff.stages.validate.params import Validate
from m3diff.stages.validate.rules import Rule, find_quarantined_rows
from m3diff.stages.validate.stage import ValidateReport, validate
from m3diff.stages.validate.suite import ExpectationResult


def list_images(*paths: Path | str) -> list[dict[str, Any]]:
    """Return the column `images` of a record whose images are these files."""
    return [{"uri": str(path), "sha256": hashlib.sha256(Path(path).read_bytes()).digest()} for path in paths]


def write_record_table(table: Path, rows: Sequence[Mapping[str, Any]], schema: pa.Schema = RECORD_SCHEMA) -> None:
    """Write records as a table. A record without an image set or history gets those of a captioned pair."""
    records = [{"image_set": row.get("id"), "history": [], **row} for row in rows]
    write_table(pa.Table.from_pylist(records, schema=schema), table)


def uris_of(record: Mapping[str, Any]) -> list[str | None]:
    return [image["uri"] for image in record["images"]]


def digests_of(record: Mapping[str, Any]) -> list[bytes | None]:
    return [image["sha256"] for image in record["images"]]


CLEVR_SPLITS = {"train": [3, 5, 8], "val": [9], "test": [1, 12]}


def write_clevr(root: Path, splits: dict[str, list[Any]] | None = None) -> Path:
    """Write CLEVR-Change: scenes with gaps in their numbers, distinct images, and two references per pair."""
    splits = splits or CLEVR_SPLITS
    scenes = sorted({scene for numbers in splits.values() for scene in numbers})
    kinds = (("images", "default", 0), ("sc_images", "semantic", 80), ("nsc_images", "nonsemantic", 160))
    for folder, kind, shade in kinds:
        for scene in scenes:
            save_picture(root / folder / f"CLEVR_{kind}_{scene:06d}.png", scene, shade)
    keys = [f"CLEVR_default_{scene:06d}.png" for scene in scenes]
    change_captions = {key: [f"the cube of {key[14:20]} turned red", "it became red"] for key in keys}
    write_json(root / "change_captions.json", change_captions)
    write_json(root / "no_change_captions.json", {key: ["nothing has changed", "no change was made"] for key in keys})
    write_json(root / "splits.json", splits)
    write_json(root / "type_mapping.json", {"color": [f"{scene:06d}.png" for scene in scenes], "size": ["000003.png"]})
    return root


def save_picture(path: Path, number: int, shade: int = 0, mode: str = "RGB") -> Path:
    """Save an image of 16x16 pixels with a block.

    The number sets the position and the colour of the block, and the shade sets the colour of the background.
    """
    image = Image.new("RGB", (16, 16), (shade, 40, 90))
    x = 2 * (number % 7)
    y = 2 * (number // 7 % 7)
    image.paste((255, 255 - 10 * number % 256, 0), (x, y, x + 3, y + 3))
    path.parent.mkdir(parents=True, exist_ok=True)
    image.convert(mode).save(path)
    return path


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


def edit_json(path: Path, change: Callable[[Any], Any]) -> None:
    """Rewrite a JSON file with a function that changes its value in place."""
    value = json.loads(path.read_text(encoding="utf-8"))
    change(value)
    write_json(path, value)


def make_entry(reader: str, root: Path, **fields: Any) -> DatasetEntry:
    """Return an entry of `ingest.datasets`. Fields that DatasetEntry does not have become options of the reader."""
    entry_names = fields.keys() & {"train_on", "role", "follow_links", "image_root", "expected_pairs"}
    entry_fields = {name: fields.pop(name) for name in entry_names}
    return DatasetEntry.model_validate({"reader": reader, "root": root, "options": fields} | entry_fields)


def run_ingest(root: Path, reader: str = "clevr_change", name: str = "mini", **fields: Any) -> IngestReport:
    """Ingest a dataset into `records/<name>` next to its root. See `make_entry` for `fields`."""
    return ingest(name, make_entry(reader, root, **fields), image_cache(root.parent), root.parent / "records")


def run_validate(
    folder: Path, entries: Any = None, cache: Path | None = None, protocol: str | None = None, **changes: Any
) -> ValidateReport:
    """Validate `folder/records`, or the datasets in `entries`, into `folder/clean`, with any share of bad rows.

    Args:
        protocol: protocol with which the gate scores models.
    """
    fields: dict[str, Any] = {"max_quarantined_share": 1.0, "max_leaked_share": 1.0, "allow_lost_test_pairs": True}
    fields |= {"max_caption_chars": 2000, "max_image_pixels": 1_000_000, "allow_test_leakage": False}
    cfg = Validate.model_validate(fields | {"near_duplicate_max_diff": 2, "compare_px": 100} | changes)
    entries = ingested(folder) if entries is None else entries
    return validate(cfg, entries, cache or image_cache(folder), folder / "records", folder / "clean", protocol)


def judge_by_polars_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Validate without great-expectations, the second engine. Other tests compare both engines."""

    def run_suite(row_facts: pl.DataFrame, rules: list[Rule], _: Any) -> tuple[list[ExpectationResult], list[str]]:
        broken_rules = find_quarantined_rows(row_facts, rules)["rules"].explode().drop_nulls().unique()
        results = [
            ExpectationResult(dataset="all", rule=rule, expectation="", is_met=False, row_count=1)
            for rule in broken_rules
        ]
        return results, []

    monkeypatch.setattr(stage, "run_suite", run_suite)


def ingested(folder: Path) -> dict[str, DatasetEntry]:
    """Return the entries of the datasets that have records in `folder`, by name."""
    reports = sorted((folder / "records").glob("*.json"))
    return {path.stem: make_entry(json.loads(path.read_text())["reader"], folder) for path in reports}


def image_cache(folder: Path) -> Path:
    return folder / "image_cache.parquet"


def write_clevr_dc(root: Path) -> Path:
    """Write CLEVR-DC. Numbers in names are not padded, so that 10 comes before 9 if names are sorted as text."""
    for scene in (9, 10, 47999):
        save_picture(root / f"bef/{scene}.png", scene, 0)
        save_picture(root / f"aft/{scene}.png", scene, 90)
    write_json(root / "captions.json", {"10": ["b", "b2"], "9": ["a"], "47999": ["c"]})
    write_json(root / "split.json", {"train": [9, 10], "val": [], "test": [47999]})
    return root


def write_spot(root: Path) -> Path:
    """Write Spot-the-Diff: an id in three records, an empty sentence, a test pair whose only reference is empty."""
    sentences_by_split = {
        "train": [("235", ["the suv is gone"]), ("76", [""]), ("235", ["a man left", ""]), ("235", ["it is dark"])],
        "val": [("8", ["there are no differences"])],
        "test": [("9", [""])],
    }
    (root / "annotations").mkdir(parents=True, exist_ok=True)
    for split, entries in sentences_by_split.items():
        records = [{"img_id": img_id, "sentences": sentences} for img_id, sentences in entries]
        write_json(root / f"annotations/{split}.json", records)
        for img_id, _ in entries:
            save_picture(root / f"resized_images/{img_id}.png", int(img_id), 10)
            save_picture(root / f"resized_images/{img_id}_2.png", int(img_id), 120)
    return root


def write_iedit(root: Path) -> Path:
    """Write IEdit: a pair with two uids, a valid and a train pair that are also in test, and images in four formats."""
    rows = {
        "train": [("a.jpg", "b.gif", "Zhopped_1"), ("a.jpg", "b.gif", "Zhopped_2"), ("e.JPG", "f.png", "Reddit_3")],
        "valid": [("e.JPG", "f.png", "Reddit_4"), ("g.jpeg", "h.png", "Reddit_5")],
        "test": [("e.JPG", "f.png", "Reddit_6"), ("a.jpg", "h.png", "Reddit_7")],
    }
    root.mkdir(parents=True, exist_ok=True)
    for split, split_rows in rows.items():
        records = [
            {"img0": before, "img1": after, "sents": [f"edit  of {uid} "], "uid": uid}
            for before, after, uid in split_rows
        ]
        write_json(root / f"{split}.json", records)
    for number, name in enumerate(("a.jpg", "b.gif", "e.JPG", "f.png", "g.jpeg", "h.png")):
        save_picture(root / "images" / name, 9 * number, 40 * number)
    return root


BIRD_COLUMNS = ["img1ObservationURL", "img1ImgURL", "img1Species", "img1Selection"]
BIRD_COLUMNS += ["img2ObservationURL", "img2ImgURL", "img2Species", "img2Selection"]
BIRD_COLUMNS += ["split", "annN", "description"]


def write_birds(path: Path, rows: list[tuple[str, str, str, str]]) -> None:
    """Write the TSV of Birds-to-Words from rows of first photo, second photo, split and description."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file, delimiter="\t", quotechar='"', lineterminator="\n")
        table.writerow(BIRD_COLUMNS)
        for number, (first_photo, second_photo, split, description) in enumerate(rows):
            cells: list[Any] = []
            for photo in (first_photo, second_photo):
                cells += [f"{SITE}/{photo}", f"{SITE}/{photo}/medium.jpg?1545", "Larus", "visual"]
            table.writerow([*cells, split, number % 5 + 1, description])


SITE = "https://www.inaturalist.org/photos"

SAME = ["the scene is the same as before", "there is no difference", "the two scenes seem identical"]
SAME += ["no change has occurred", "almost nothing has changed"]


def levir_record(split: str, number: int, texts: Sequence[str]) -> dict[str, Any]:
    """Return a record of LevirCCcaptions.json. `raw` begins with a space and ends with a full stop; `tokens` do not."""
    ids = list(range(5 * number, 5 * number + len(texts)))
    sentences = []
    for sentence_id, text in zip(ids, texts, strict=True):
        sentences.append({"raw": f" {text} .", "tokens": text.split(), "imgid": number, "sentid": sentence_id})
    record = {"filepath": split, "filename": f"{split}_{number:06d}.png", "imgid": number, "split": split}
    return record | {"changeflag": int(list(texts) != SAME), "sentids": ids, "sentences": sentences}


def write_levir(root: Path) -> Path:
    """Write LEVIR-CC: train and test have a pair with a change, val and test have a pair without one."""
    records = [
        levir_record("train", 1, [f"{n} villas are built" for n in range(5)]),
        levir_record("val", 1, SAME),
        levir_record("test", 4, ["trees are removed", "an arc road is built", "a road", "villas", "a villa"]),
        levir_record("test", 5, SAME),
    ]
    for shade, record in enumerate(records):
        for number, side in enumerate("AB"):
            path = root / f"images/{record['split']}/{side}/{record['filename']}"
            save_picture(path, shade, 40 * shade + 20 * number)
    write_json(root / "LevirCCcaptions.json", {"images": records})
    return root


def write_own_levir(root: Path) -> Path:
    """Write data in LEVIR-CC's layout whose pairs without a change have other sentences than LEVIR-CC's."""

    def replace_sentences(file: dict[str, Any]) -> None:
        for image in file["images"]:
            if not image["changeflag"]:
                for number, sentence in enumerate(image["sentences"]):
                    tokens = ["all", "is", "as", "it", "was", str(number)]
                    sentence |= {"raw": f" {' '.join(tokens)} .", "tokens": tokens}

    edit_json(write_levir(root) / "LevirCCcaptions.json", replace_sentences)
    return root


def stored(number: int, kind: str = "PNG") -> dict[str, Any]:
    """Return an image as the Hugging Face hub stores it in Parquet."""
    image = Image.new("RGB", (16, 16), (37 * number % 256, 40, 5 * number % 256))
    data = io.BytesIO()
    image.save(data, kind)
    return {"bytes": data.getvalue(), "path": None}


def write_shards(root: Path, split: str, rows: Sequence[Mapping[str, Any]], count: int = 1) -> None:
    """Write rows to `count` files `data/<split>-NNNNN-of-NNNNN.parquet`."""
    (root / "data").mkdir(parents=True, exist_ok=True)
    table = pa.Table.from_pylist([dict(row) for row in rows])
    for number in range(count):
        start = number * len(rows) // count
        end = (number + 1) * len(rows) // count
        pq.write_table(table.slice(start, end - start), root / f"data/{split}-{number:05d}-of-{count:05d}-2f1a.parquet")


def emu_row(split: str, idx: int, instruction: str, is_edited: bool = True, number: int = 0) -> dict[str, Any]:
    """Return a row of emu_edit_test_set_generations, or without an edit, a row of emu_edit_test_set."""
    row = {"instruction": instruction, "image": stored(number), "task": "add", "split": split, "idx": idx, "hash": "a1"}
    row |= {"input_caption": "a fence", "output_caption": "a goat"}
    if is_edited:
        row |= {"edited_image": stored(number + 1, "JPEG"), "model": "emu"}
    return row


def write_emu(root: Path) -> Path:
    """Write Emu Edit as downloaded: `idx` starts at 0 in each split, and images are only in the Parquet files."""
    texts = {"validation": ["make it night", " add a rainbow", "add a spatula"], "test": ["add a goat", "add a fork"]}
    for split_number, (split, instructions) in enumerate(texts.items()):
        rows = []
        for idx, instruction in enumerate(instructions):
            rows.append(emu_row(split, idx, instruction, number=10 * split_number + 2 * idx))
        write_shards(root, split, rows[::-1], 2 - split_number)
    return root


def brush_row(img_id: str, turn: int, instruction: str, number: int) -> dict[str, Any]:
    """Return a turn of MagicBrush's train or dev. Its source image is the target image of the previous turn."""
    row = {"img_id": img_id, "turn_index": turn, "source_img": stored(number), "mask_img": stored(200)}
    return row | {"instruction": instruction, "target_img": stored(number + 1)}


def write_magicbrush(root: Path) -> Path:
    """Write MagicBrush: two turns of a photo in train, one in dev, and the unpacked zip of test with two turns."""
    turns = [brush_row("242679", 1, "add a cat", 1), brush_row("242679", 2, "make it black", 2)]
    write_shards(root, "train", turns, 2)
    write_shards(root, "dev", [brush_row("17", 1, "remove the cup", 10)])
    session = [
        {"input": "139306-input.png", "mask": "139306-mask1.png", "instruction": "add a dog"},
        {"input": "139306-output1.png", "mask": "139306-mask2.png", "instruction": "put a hat on it"},
    ]
    for number, name in enumerate(("input", "output1", "output2")):
        save_picture(root / f"test/images/139306/139306-{name}.png", number, 60 * number)
    write_json(root / "test/edit_sessions.json", {"139306": session})
    return root


def write_syned(root: Path) -> Path:
    """Write Syned: lines sorted as text, stray spaces (also at the end of keys), and zero to five paraphrases."""
    train = ["0 <INSTRUCT>  make the sky night", "10 <INSTRUCT> add a duck. ", "2 <INSTRUCT> zip it up", ""]
    test = ["0 <INSTRUCT> add a goat", "10 <INSTRUCT>  add a bag ", "2 <INSTRUCT> add a fork", ""]
    root.mkdir(parents=True, exist_ok=True)
    (root / "instructions_with_idx_train_split.txt").write_text("\n".join(train))
    (root / "instructions_with_idx_test_split.txt").write_text("\n".join(test))
    write_json(root / "splits.json", {"train": [2, 0], "validation": [10]})
    paraphrases = {
        "0 ": ["a goat", "I'm just an AI, I cannot"],
        "2 ": ["a fork", "a fork by it", "f", "g", "h"],
        "10 ": [],
    }
    write_json(root / "gt_augmented_test_clean.json", paraphrases)
    for split_number, split in enumerate(("validation", "test")):
        rows = [emu_row(split, idx, "x", number=40 * split_number + 2 * idx) for idx in (0, 10, 2)]
        write_shards(root / "emu_edit", split, rows)
    return root


def nlvr_line(identifier: str, sentence: str, label: Any, **fields: Any) -> dict[str, Any]:
    """Return a line of NLVR2. The label is text."""
    line: dict[str, Any] = {
        "sentence": sentence,
        "left_url": "http://a/1.jpg",
        "right_url": "http://a/2.jpg",
        "label": label,
    }
    line |= {"identifier": identifier, "validation": {"w2": label}, "writer": "w3", "synset": "dog", "query": "dogs7"}
    line |= {"directory": 38} if identifier.startswith("train") else {"extra_validations": {"w1": label}}
    return line | fields


def write_nlvr(root: Path) -> Path:
    """Write NLVR2: pairs with two, one and no true sentences, and a JPEG file that is named .png."""
    lines = {
        "train": [("train-1-0-0", "two dogs", "True"), ("train-1-1-0", "a cat", "False")],
        "dev": [("dev-850-0-0", "a bus", "True"), ("dev-850-0-1", "two buses", "False")],
        "test1": [("test1-0-1-0", "a cup", "True"), ("test1-7-0-0", "x", "True"), ("test1-0-1-1", "a mug", "True")],
    }
    (root / "data").mkdir(parents=True, exist_ok=True)
    for part, arguments in lines.items():
        text = "".join(json.dumps(nlvr_line(*line)) + "\n" for line in arguments)
        (root / f"data/{part}.json").write_text(text, encoding="utf-8")
    for number, pair in enumerate(("train/38/train-1-0", "dev/dev-850-0", "test1/test1-0-1", "test1/test1-7-0")):
        for side in (0, 1):
            save_picture(root / f"images/{pair}-img{side}.png", number, 100 * side)
    with Image.open(root / "images/dev/dev-850-0-img0.png") as image:
        image.save(root / "images/dev/dev-850-0-img0.png", "JPEG")
    return root


def rsrcc_text(question: str, answer: str, *options: str, line_break: str = r"\n") -> str:
    """Return a value of the column `text` of RSRCC, whose line breaks are two characters."""
    parts = [f"**Question:** {question}"]
    if options:
        lettered_options = zip("ABCDEFGH", options, strict=False)
        parts.append(line_break.join(f"**{letter})** {option}" for letter, option in lettered_options))
    parts.append(f"**Answer:** {answer}")
    return (2 * line_break).join(parts)


ROAD_OPTIONS = ("It was paved.", "It was dug up.", "A tree fell on it.", "Nothing.")
RSRCC_ROWS = {
    "train": [
        ("1a_2b", rsrcc_text("Was a house built in the north?", "Yes")),
        ("1a_2b", rsrcc_text("What happened to the road?", "C", *ROAD_OPTIONS)),
    ],
    "val": [("3c_4d", rsrcc_text("Is the pool gone?", "No"))],
    "test": [
        ("5e_6f", rsrcc_text("Was a tree planted?", "Yes")),
        ("7a_8b", rsrcc_text("Was a car park built?", "No")),
        ("5e_6f", rsrcc_text("Was a tree planted?", "Yes")),
    ],
}


def write_rsrcc(root: Path, rows: Mapping[str, Sequence[tuple[str, str]]] = RSRCC_ROWS) -> Path:
    """Write RSRCC: two questions about a pair, and a row that occurs twice.

    Args:
        rows: the pair and the text of each row, by split.
    """
    pairs: dict[str, int] = {}
    for split, rows_of_split in rows.items():
        (root / split).mkdir(parents=True, exist_ok=True)
        with (root / split / "metadata.csv").open("w", encoding="utf-8", newline="") as file:
            table = csv.writer(file)
            table.writerow(["before_file_name", "after_file_name", "text"])
            for pair, text in rows_of_split:
                names = [f"images/0000/{pair}_{side}.png" for side in ("before", "after")]
                number = pairs.setdefault(pair, len(pairs))
                for side, name in enumerate(names):
                    save_picture(root / split / name, number, 40 * number + 20 * side)
                table.writerow([*names, text])
    return root


CHANGECHAT_QUESTIONS = {
    "caption": "Please briefly describe the changes in these two images.",
    "binary": "Please judge whether these two images have changed. Please answer yes or no.",
    "count": "Please determine how many roads and buildings have changed?",
    "localisation": "Please indicate the locations where changes have occurred in the buildings and roads, using a 3x3 "
    "grid (namely, 'top', 'center', and 'bottom' vertically and 'left', 'center', 'right' horizontally).",
}
# Answers about a pair with a change, and about a pair without one
CHANGECHAT_ANSWERS = {
    "caption": [
        [f"{n} villas are built along the road." for n in range(5)],
        [f"{text.capitalize()}." for text in SAME],
    ],
    "binary": ["Yes", "No"],
    "count": ["There are 2 new roads and 10 new buildings.", "There are no new roads and no new buildings."],
    "localisation": ["roads ['top-left'] buildings ['center-center', 'top-left']", "roads [] buildings []"],
    "open": [
        {"Is there a new lane?": "Yes, a lane appears on the left.", "Where are the villas?": "They are at the top."}
    ]
    + [{"Has the forest changed?": "No, the forest is as before."}],
}


def changechat_record(split: str, number: int, flag: int | None, *texts: str) -> dict[str, Any]:
    """Return a record of ChangeChat-105k: questions and answers in turn, with image marks before the first."""
    messages = []
    for position, text in enumerate(texts):
        messages.append({"from": ("human", "gpt")[position % 2], "value": text})
    messages[0]["value"] = f"<image> <image> {texts[0]}"
    images = [f"{split}/{side}/{split}_{number:06d}.png" for side in "AB"]
    record = {"id": 7, "image": images, "conversations": messages}
    return record if flag is None else record | {"changeflag": flag}


def changechat_records(
    split: str, number: int, flag: int, answers_by_kind: Mapping[str, Sequence[Any]]
) -> dict[str, list[dict[str, Any]]]:
    """Return the records of a pair, by kind. Those about places and the dialogues have no `changeflag`."""
    answers = {kind: answers_of_kind[1 - flag] for kind, answers_of_kind in answers_by_kind.items()}
    records = {}
    for kind in ("binary", "count", "localisation"):
        flag_of_row = None if kind == "localisation" else flag
        records[kind] = [changechat_record(split, number, flag_of_row, CHANGECHAT_QUESTIONS[kind], answers[kind])]
    records["caption"] = [
        changechat_record(split, number, flag, CHANGECHAT_QUESTIONS["caption"], text) for text in answers["caption"]
    ]
    records["open"] = [changechat_record(split, number, flag, *turn) for turn in answers["open"].items()]
    turns = [CHANGECHAT_QUESTIONS["binary"], answers["binary"], "How many?", answers["count"], "Describe them."]
    records["dialogue"] = [changechat_record(split, number, None, *turns, answers["caption"][0])]
    return records


def write_changechat(root: Path, answers: Mapping[str, Sequence[Any]] = CHANGECHAT_ANSWERS) -> Path:
    """Write ChangeChat-105k: in train and test, a pair with a change and a pair without one.

    Args:
        answers: by kind, the answer about a pair with a change and about a pair without one.
    """
    (root / "annotations").mkdir(parents=True)
    records: dict[str, list[Any]] = {}
    for shade, (split, number, flag) in enumerate((("train", 1, 1), ("train", 2, 0), ("test", 4, 1), ("test", 5, 0))):
        for side_number, side in enumerate("AB"):
            path = root / f"images/{split}/{side}/{split}_{number:06d}.png"
            save_picture(path, shade, 40 * shade + 20 * side_number)
        records_by_kind = changechat_records(split, number, flag, answers)
        if split == "train":
            for records_of_kind in records_by_kind.values():
                records.setdefault("train", []).extend(records_of_kind)
            continue
        captions = records_by_kind.pop("caption")
        images = dict(zip(("image_A", "image_B"), captions[0]["image"], strict=True))
        texts = [record["conversations"][1]["value"] for record in captions]
        records.setdefault("test", []).append(images | {"captions": texts, "changeflag": flag})
        file_ends = {"localisation": "loc", "dialogue": "dialog"}
        for kind, records_of_kind in records_by_kind.items():
            records.setdefault(f"test_{file_ends.get(kind, kind)}", []).extend(records_of_kind)
    for part, rows in records.items():
        write_json(root / f"annotations/changechat_105k_{part}.json", rows)
    return root


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


def write_manifest(root: Path, name: str, **column_names: str) -> Path:
    """Write a user's dataset with one pair. `column_names` maps fields of the pair to the names of their columns."""
    row = {"before": "a.png", "after": "b.png", "captions": "the mug left", "split": "train"}
    for number, image in enumerate(("a.png", "b.png")):
        save_picture(root / image, number)
    row = {column_names.get(field, field): value for field, value in row.items()}
    if name.endswith(".csv"):
        (root / name).write_text(f"{','.join(row)}\n{','.join(row.values())}\n")
    else:
        write_json(root / name, [row])
    return root


def write_minichange(root: Path) -> Path:
    write_json(write_clevr(root) / "grammar.json", grammar())
    return root


def conversation(*texts: str) -> list[dict[str, Any]]:
    """Return a conversation in LLaVA's form, in which the user begins."""
    return [{"from": ("human", "gpt")[number % 2], "value": text} for number, text in enumerate(texts)]


BUS = "coco/train2017/000000033471.jpg"
DOG = "vg/VG_100K_2/1.jpg"
# Rows in the form of the two published files of LLaVA (docs/Data.md of haotian-liu/LLaVA). The texts are our own
LLAVA_PRETRAIN: list[dict[str, Any]] = [
    {
        "id": "004539375",
        "image": "00453/004539375.jpg",
        "conversations": conversation("Say briefly what is shown.\n<image>", "a grey mattress"),
    },
    {
        "id": "002239345",
        "image": "00223/002239345.jpg",
        "conversations": conversation("<image>\nDescribe it.", "a red kite"),
    },
]
LLAVA_INSTRUCT: list[dict[str, Any]] = [
    {
        "id": "000000033471",
        "image": BUS,
        "conversations": conversation(
            "<image>\nWhat colour is it?", "It is blue.", "Who is in it?", "Nobody.", "Where is it?", "Here."
        ),
    },
    {"id": 33471, "image": BUS, "conversations": conversation("Is it day?\nAnswer in one word.\n<image>", "Yes")},
    {"id": "wgByO4Y_0", "model": "", "conversations": conversation("A rhyme?", "Sun, fun.", "Another?", "Sea, tea.")},
    {"id": "wgByO4Y_0", "image": DOG, "conversations": conversation("Where is the dog?\n<image>", "[0.1, 0.2]")},
]


def write_llava(root: Path, file: str, rows: Sequence[Mapping[str, Any]], images: str = "") -> Path:
    """Write rows in LLaVA's form, and the images that they name to the folder `images`."""
    root.mkdir(parents=True, exist_ok=True)
    write_json(root / file, rows)
    names = [row["image"] for row in rows if "image" in row]
    for number, name in enumerate(dict.fromkeys(names)):
        save_picture(root / images / name, number, 30 * number % 256)
    return root


def write_sidecars(root: Path, ends: Sequence[str] = ("", "_1")) -> Path:
    """Write pairs with a text beside their images, in folders that name their splits."""
    for number, split in enumerate(("train", "train", "val", "test")):
        for side, end in enumerate(ends):
            save_picture(root / f"{split}/{number}{end}.png", number, 90 * side)
        (root / f"{split}/{number}.txt").write_text(f"block {number} turned red\n")
    return root


# Functions that write a small folder of each dataset, by reader
WRITERS: dict[str, Callable[[Path], Path]] = {
    "birds_to_words": write_bird_folder,
    "changechat": write_changechat,
    "clevr_change": write_clevr,
    "clevr_dc": write_clevr_dc,
    "emu_edit": write_emu,
    "iedit": write_iedit,
    "levir_cc": write_levir,
    "llava_instruct": lambda root: write_llava(root, llava_instruct.FILE, LLAVA_INSTRUCT),
    "llava_pretrain": lambda root: write_llava(root, llava_pretrain.FILE, LLAVA_PRETRAIN, images="images"),
    "magicbrush": write_magicbrush,
    "minichange": write_minichange,
    "nlvr2": write_nlvr,
    "omnidiff": lambda root: write_manifest(root, "annotations.json"),
    "pairs": lambda root: write_manifest(root, "pairs.csv"),
    "rsrcc": write_rsrcc,
    "sidecar": write_sidecars,
    "spot_the_diff": write_spot,
    "syned": write_syned,
}


def write_test_set(root: Path, captioned: tuple[str, ...] = ("b", "a"), **changes: Any) -> Any:
    """Write three clean records, and predictions for some of them. `changes` replace fields of record a."""
    images = [{"uri": f"{number}.png", "sha256": number.encode()} for number in "12"]
    rows = [{"id": name, "images": images, "references": ["x", "y"]} for name in "cba"]
    rows[2] |= changes
    write_record_table(root / "records", rows)
    (root / "predictions.json").write_text(json.dumps([{"image_id": name, "caption": ""} for name in captioned]))
    return SimpleNamespace(clean=root, predictions=root)
