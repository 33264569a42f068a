"""MagicBrush: photos that people edited with a series of instructions. Each pair is one turn of an editing session.

Page: https://github.com/OSU-NLP-Group/MagicBrush (Zhang et al., NeurIPS 2023), CC BY 4.0. Two downloads share one root:

    data/train-*.parquet, data/dev-*.parquet    osunlp/MagicBrush on the Hugging Face Hub: one row per turn, with the
                                                image before (`source_img`) and after (`target_img`)
    test/edit_sessions.json                     the unpacked zip file of the test split (option `test`; null: left out)
    test/images/242679/242679-input.png         before the first turn
    test/images/242679/242679-output1.png       after the first turn, and before the second

    {"img_id": "242679", "turn_index": 1, "source_img": ..., "mask_img": ..., "instruction": "Put a cat on the seat.",
     "target_img": ...}
    {"242679": [{"input": "242679-input.png", "instruction": "Put a cat on the seat.", ...}, ...], ...}

Each turn starts from the result of the previous turn, so the pairs of a photo share images. `img_id` is their scene,
and pairs of a scene must be in the same split. dev is the validation split. The authors ask that benchmark data never
be used for training, so this project only trains on train. Masks and local_captions.json are not read. The
number of turns is published both as "10K" and as 10,308, so the files are not compared with a published count.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from m3diff.datasets.files import read_json, read_shards
from m3diff.datasets.spec import (
    DatasetSpec,
    Licence,
    Permission,
    Protocol,
    Row,
    broken_row,
    find_fault,
    has_record,
    make_rows,
    unexpected,
)

FILES = {"train": "data/train-*.parquet", "val": "data/dev-*.parquet"}
BEFORE = "source_img"
AFTER = "target_img"
FIELDS = {"img_id": str, "turn_index": int, "instruction": str, BEFORE: object, AFTER: object}
SESSIONS = "edit_sessions.json"
TURN_FIELDS = {"input": str, "instruction": str}


def read(root: Path, test: str | None = "test") -> Iterator[Row]:
    """Yield one row per turn: first the train split, then val, then test.

    Args:
        test: folder of the unpacked test files. If it is None, the test split is left out.
    """
    for split, pattern in FILES.items():
        yield from make_rows(split, read_shards(root, pattern, list(FIELDS)), FIELDS, _row_of_turn)
    if test is not None:
        for img_id, turns in read_json(root / test / SESSIONS, dict).items():
            yield from _rows_of_session(test, img_id, turns)


def recognise(root: Path) -> bool:
    """Return whether the files are MagicBrush's.

    The Parquet files of many other datasets on the Hugging Face Hub have the same names.
    """
    return (root / "test" / SESSIONS).is_file() or has_record(root, FILES.values(), FIELDS)


def _row_of_turn(split: str, source: str, turn: dict[str, Any]) -> Row:
    return Row(
        name=f"{turn['img_id']}-{turn['turn_index']}",
        split=split,
        scene=turn["img_id"],
        images=(turn[BEFORE], turn[AFTER]),
        references=[turn["instruction"]],
        source=source,
    )


def _rows_of_session(test: str, img_id: str, turns: Any) -> Iterator[Row]:
    """Yield one row per turn of an editing session of the test split."""
    session_source = f"{test}/{SESSIONS}, {img_id}"
    if not isinstance(turns, list):
        yield broken_row("test", session_source, unexpected("turns", "a list", turns), img_id)
        return
    for number, turn in enumerate(turns, 1):
        source = f"{session_source}, turn {number}"
        fault = find_fault(turn, TURN_FIELDS)
        if fault:
            yield broken_row("test", source, fault, img_id)
            continue
        folder = f"{test}/images/{img_id}"
        yield Row(
            name=f"{img_id}-{number}",
            split="test",
            scene=img_id,
            images=(f"{folder}/{turn['input']}", f"{folder}/{img_id}-output{number}.png"),
            references=[turn["instruction"]],
            source=source,
        )


WITH_CREDIT = Permission("conditions", "credit the authors; do not train on dev or test")
SPEC = DatasetSpec(
    title="MagicBrush",
    page="https://github.com/OSU-NLP-Group/MagicBrush",
    paper="MagicBrush: A Manually Annotated Dataset for Instruction-Guided Image Editing (Zhang et al., NeurIPS 2023)",
    licence=Licence(
        name="CC BY 4.0",
        url="https://creativecommons.org/licenses/by/4.0/",
        train=WITH_CREDIT,
        redistribute=Permission("conditions", "credit the authors; do not publish the unzipped test files"),
        show=Permission("conditions", "credit the authors"),
    ),
    read=read,
    files=(*FILES.values(), f"test/{SESSIONS}"),
    recognise=recognise,
    task="edit",
    never_train=("val",),
    protocols=(Protocol("test", published_pairs=None),),
)
