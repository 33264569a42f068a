"""Emu Edit's test set with Emu Edit's own edits: a photo, its edit, and the instruction that asked for it.

Page: https://huggingface.co/datasets/facebook/emu_edit_test_set_generations (Sheynin et al., CVPR 2024), CC BY-NC 4.0.

    data/validation-*.parquet, data/test-*.parquet    a row for each edit; `image` and `edited_image` hold the images

    {"instruction": "Add a goat outside the fence", "image": ..., "task": "add", "split": ..., "idx": 0, "hash": ...,
     "input_caption": ..., "output_caption": ..., "edited_image": ..., "model": ...}

The split is the one of the file's name, 3,589 of validation and 2,022 of test: in the dataset without edits,
emu_edit_test_set, the two words are swapped, and it is refused for want of the column `edited_image`. `idx` counts
within a split, so a pair is called "validation-0". Nothing trains: it is a benchmark. Syned divides the validation
split into one that trains and one that validates. No paper's scores of these pairs as they are here are known, so the
protocol is the project's own.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from m3diff.datasets.files import read_shards
from m3diff.datasets.spec import DatasetSpec, Licence, Permission, Protocol, Published, Row, SplitCount, as_rows

FILES = {"val": "data/validation-*.parquet", "test": "data/test-*.parquet"}
BEFORE, AFTER = "image", "edited_image"
FIELDS = {"idx": int, "instruction": str, BEFORE: object, AFTER: object}


def read(root: Path) -> Iterator[Row]:
    for split, pattern in FILES.items():
        yield from as_rows(split, read_shards(root, pattern, list(FIELDS)), FIELDS, _row)


def _row(split: str, where: str, edit: dict[str, Any]) -> Row:
    name = f"{'validation' if split == 'val' else split}-{edit['idx']}"
    return Row(name, split, name, edit[BEFORE], edit[AFTER], [edit["instruction"]], [], where)


PUBLISHED = Published("emu_edit", "Emu Edit", SplitCount(0, 0), SplitCount(3_589, 3_589), SplitCount(2_022, 2_022))
NOT_SOLD = Permission("conditions", "credit the authors; no commercial use")
SPEC = DatasetSpec(
    title="Emu Edit",
    page="https://huggingface.co/datasets/facebook/emu_edit_test_set_generations",
    paper="Emu Edit: Precise Image Editing via Recognition and Generation Tasks (Sheynin et al., CVPR 2024)",
    licence=Licence.of("CC BY-NC 4.0", "https://creativecommons.org/licenses/by-nc/4.0/", NOT_SOLD),
    read=read,
    files=tuple(FILES.values()),
    task="edit",
    published=(PUBLISHED,),
    protocols=(Protocol("test", n=None),),
)
