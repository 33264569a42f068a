"""MagicBrush: photos edited by people, instruction after instruction; a pair is one turn of such a session.

Page: https://github.com/OSU-NLP-Group/MagicBrush (Zhang et al., NeurIPS 2023), CC BY 4.0; two downloads into one root:

    data/train-*.parquet, data/dev-*.parquet    osunlp/MagicBrush on the Hugging Face hub: a row for each turn, with the
                                                image before (`source_img`) and after (`target_img`)
    test/edit_sessions.json                     the zip of the test split, unpacked (option `test`; null: left out)
    test/images/242679/242679-input.png         before the first turn
    test/images/242679/242679-output1.png       after it, and before the second

    {"img_id": "242679", "turn_index": 1, "source_img": ..., "mask_img": ..., "instruction": "Put a cat on the seat.",
     "target_img": ...}
    {"242679": [{"input": "242679-input.png", "instruction": "Put a cat on the seat.", ...}, ...], ...}

A turn begins with what the turn before it made, so pairs of one photo share images, and `img_id` is their scene: they
must share a split. dev is the validation split. The authors ask that benchmark data never appear in what a model is
trained on, so neither dev nor test may train. Masks and the descriptions in local_captions.json are not read. How many
turns there are is given as "10K" and, elsewhere, as 10,308: no count is held against the files.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from m3diff.datasets.files import describe, read_json, read_shards
from m3diff.datasets.spec import DatasetSpec, Licence, Permission, Protocol, Row, as_rows, broken, fault_in

FILES = {"train": "data/train-*.parquet", "val": "data/dev-*.parquet"}
BEFORE, AFTER = "source_img", "target_img"
FIELDS = {"img_id": str, "turn_index": int, "instruction": str, BEFORE: object, AFTER: object}
SESSIONS = "edit_sessions.json"
TURN_FIELDS = {"input": str, "instruction": str}


def read(root: Path, test: str | None = "test") -> Iterator[Row]:
    for split, pattern in FILES.items():
        yield from as_rows(split, read_shards(root, pattern, list(FIELDS)), FIELDS, _turn)
    if test is not None:
        for img_id, turns in read_json(root / test / SESSIONS, dict).items():
            yield from _session(test, img_id, turns)


def _turn(split: str, where: str, turn: dict[str, Any]) -> Row:
    name, scene = f"{turn['img_id']}-{turn['turn_index']}", turn["img_id"]
    return Row(name, split, scene, turn[BEFORE], turn[AFTER], [turn["instruction"]], [], where)


def _session(test: str, img_id: str, turns: Any) -> Iterator[Row]:
    source = f"{test}/{SESSIONS}, {img_id}"
    if not isinstance(turns, list):
        yield broken("test", source, f"turns: expected a list, found {describe(turns)}", img_id)
        return
    for number, turn in enumerate(turns, 1):
        where = f"{source}, turn {number}"
        if fault := fault_in(turn, TURN_FIELDS):
            yield broken("test", where, fault, img_id)
        else:
            folder = f"{test}/images/{img_id}"
            pair = f"{folder}/{turn['input']}", f"{folder}/{img_id}-output{number}.png"
            yield Row(f"{img_id}-{number}", "test", img_id, *pair, [turn["instruction"]], [], where)


CITED = Permission("conditions", "credit the authors; dev and test must not appear in what a model is trained on")
SPEC = DatasetSpec(
    title="MagicBrush",
    page="https://github.com/OSU-NLP-Group/MagicBrush",
    paper="MagicBrush: A Manually Annotated Dataset for Instruction-Guided Image Editing (Zhang et al., NeurIPS 2023)",
    licence=Licence(
        name="CC BY 4.0",
        url="https://creativecommons.org/licenses/by/4.0/",
        train=CITED,
        redistribute=Permission("conditions", "credit the authors; the unzipped test files must not be put online"),
        show=Permission("conditions", "credit the authors"),
    ),
    read=read,
    files=(*FILES.values(), f"test/{SESSIONS}"),
    task="edit",
    never_train=("val",),
    protocols=(Protocol("test", n=None),),
)
