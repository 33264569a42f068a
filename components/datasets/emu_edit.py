"""The test set of Emu Edit: a photo, the photo as edited by Emu Edit, and the instruction for the edit.

Page: https://huggingface.co/datasets/facebook/emu_edit_test_set_generations (Sheynin et al., CVPR 2024), CC BY-NC 4.0.

    data/validation-*.parquet, data/test-*.parquet    one row per edit; `image` and `edited_image` contain the images

    {"instruction": "Add a goat outside the fence", "image": ..., "task": "add", "split": ..., "idx": 0, "hash": ...,
     "input_caption": ..., "output_caption": ..., "edited_image": ..., "model": ...}

The split is taken from the file name: 3,589 pairs in validation and 2,022 in test. The dataset without edits,
emu_edit_test_set, swaps the two split names; it is refused because it has no column `edited_image`. `idx` is only
unique within a split, so pairs have names such as "validation-0". Because this is a benchmark, none of its pairs are
used for training. (Syned divides the validation split into a training and a validation split.) No published scores for
exactly these pairs are known, so this project defines the protocol: the pairs, references and metrics of a score.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from m3diff.datasets.files import read_shards
from m3diff.datasets.spec import (
    DatasetSpec,
    Licence,
    Permission,
    Protocol,
    Published,
    Row,
    SplitCount,
    has_record,
    make_rows,
)

FILES = {"val": "data/validation-*.parquet", "test": "data/test-*.parquet"}
BEFORE = "image"
AFTER = "edited_image"
FIELDS = {"idx": int, "instruction": str, BEFORE: object, AFTER: object}


def read(root: Path) -> Iterator[Row]:
    """Yield one row per edit, beginning with the validation split."""
    for split, pattern in FILES.items():
        yield from make_rows(split, read_shards(root, pattern, list(FIELDS)), FIELDS, _make_row)


def recognise(root: Path) -> bool:
    """Return whether the files have Emu Edit's columns, with or without edits.

    The files of many other datasets on the Hugging Face Hub have the same names.
    """
    return has_record(root, FILES.values(), ("idx", "hash", "instruction", BEFORE))


def _make_row(split: str, source: str, edit: dict[str, Any]) -> Row:
    split_name = "validation" if split == "val" else split
    name = f"{split_name}-{edit['idx']}"
    return Row(
        name=name,
        split=split,
        scene=name,
        images=(edit[BEFORE], edit[AFTER]),
        references=[edit["instruction"]],
        source=source,
    )


PUBLISHED = Published("emu_edit", "Emu Edit", SplitCount(0, 0), SplitCount(3_589, 3_589), SplitCount(2_022, 2_022))
NON_COMMERCIAL = Permission("conditions", "credit the authors; no commercial use")
SPEC = DatasetSpec(
    title="Emu Edit",
    page="https://huggingface.co/datasets/facebook/emu_edit_test_set_generations",
    paper="Emu Edit: Precise Image Editing via Recognition and Generation Tasks (Sheynin et al., CVPR 2024)",
    licence=Licence.for_every_use("CC BY-NC 4.0", "https://creativecommons.org/licenses/by-nc/4.0/", NON_COMMERCIAL),
    read=read,
    files=tuple(FILES.values()),
    recognise=recognise,
    task="edit",
    published=(PUBLISHED,),
    protocols=(Protocol("test", published_pairs=None),),
)
