"""The record and the sample: what flows between the stages.

Raw files become *records* (ingest, validate): a pair of images with its references, dataset, split and change types.
Records become question-answer *samples* (convert). Both lie in Parquet with the schemas below, so that 896k rows are
read by column and any tool (DuckDB, polars, `datasets`) can open them. Both carry the SHA-256 of each image file: what
depends on a sample depends on the bytes of its images, and on nothing else in their folder.
"""

from pathlib import Path
from typing import Literal, get_args

import pyarrow as pa
import pyarrow.parquet as pq

from m3diff.records.errors import DataError, readable

Split = Literal["train", "val", "test"]
SPLITS = ("train", "val", "test")

ChangeType = Literal[
    "viewpoint",
    "illumination",
    "addition",
    "disappearance",
    "removal",
    "substitution",
    "size",
    "color",
    "orientation",
    "pose",
    "ocr",
    "counting",
]
CHANGE_TYPES: tuple[ChangeType, ...] = get_args(ChangeType)  # the twelve change types of OmniDiff (paper section 3)

NO_CHANGE = "none"  # the change type of a distractor pair: only camera, light or noise differ a little

RECORD_SCHEMA = pa.schema(
    [
        ("id", pa.string()),  # "<dataset>/<name>", unique over the whole mixture
        ("dataset", pa.string()),
        ("split", pa.string()),  # one of SPLITS
        ("scene", pa.string()),  # "<dataset>/<scene>": pairs of one scene must share a split
        ("before", pa.string()),  # image path, relative to the project or absolute
        ("after", pa.string()),
        ("before_sha256", pa.binary()),  # 32 bytes: the digest of the image file; null where it could not be read
        ("after_sha256", pa.binary()),
        ("references", pa.list_(pa.string())),  # every reference, in the dataset's order; an empty one is kept
        ("change_types", pa.list_(pa.string())),  # CHANGE_TYPES, [NO_CHANGE], a dataset's own, or [] where unknown
        ("source", pa.string()),  # file and row or key that this record came from, for messages
    ]
)

RAW_SCHEMA = pa.schema(  # what ingest writes
    [
        *RECORD_SCHEMA,
        ("own_split", pa.string()),  # as the dataset's files say; `split` is "train" where `train_on` names it
        ("fault", pa.string()),  # why a row could not be read (validate quarantines it), null where it could
    ]
)

SAMPLE_SCHEMA = pa.schema(
    [
        ("id", pa.string()),  # "<record id>#<reference number>"
        ("pair", pa.string()),  # the record's id; the samples of one pair are neighbours
        ("dataset", pa.string()),
        ("split", pa.string()),
        ("before", pa.string()),
        ("after", pa.string()),
        ("before_sha256", pa.binary()),
        ("after_sha256", pa.binary()),
        ("question", pa.string()),
        ("reference", pa.string()),  # the answer that is trained: one reference of the pair
    ]
)


def load_table(path: Path, schema: pa.Schema, writer: str, if_empty: str) -> pa.Table:
    """The rows of a stage's Parquet file.

    Args:
        writer: the stage that writes it.
        if_empty: why it may hold no row, with the remedy.

    Raises:
        DataError: it cannot be read, has other columns, or holds no row.
    """
    with readable(path, f"run `m3diff {writer}` again"):
        table = pq.read_table(path)
    if not table.schema.equals(schema):
        raise DataError(f"{path}: not the columns that {writer} writes; run `m3diff {writer}` again")
    if not table.num_rows:
        raise DataError(f"{path}: holds no record{if_empty}")
    return table
