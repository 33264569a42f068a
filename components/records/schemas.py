"""The schemas of records and samples, the two kinds of tables that stages pass on.

The stages `ingest` and `validate` turn raw files into *records*. A record is a pair of images with references (captions
of the difference), dataset, split and change types. The stage `convert` turns records into question-answer *samples*.
Records and samples are stored as Parquet, so that 896k rows can be read by column and opened by any tool (DuckDB,
polars, `datasets`). They contain the SHA-256 of each image file. A stage that reads samples therefore depends on the
bytes of their images, but not on anything else in the image folder.
"""

from pathlib import Path
from typing import Literal, get_args

import pyarrow as pa
import pyarrow.parquet as pq

from m3diff.records.errors import DataError, data_error_if_unreadable

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
# The twelve change types of OmniDiff (paper, section 3)
CHANGE_TYPES: tuple[ChangeType, ...] = get_args(ChangeType)

NO_CHANGE = "none"  # change type of a distractor, a pair in which only camera, light or noise differ slightly

IMAGE = pa.struct([("uri", pa.string()), ("sha256", pa.binary())])  # an `ImageRef`
TURN = pa.struct([("question", pa.string()), ("answer", pa.string())])  # a `Turn`

RECORD_SCHEMA = pa.schema(
    [
        ("id", pa.string()),  # "<dataset>/<name>", unique in the whole mixture
        ("dataset", pa.string()),
        ("split", pa.string()),  # one of SPLITS
        ("scene", pa.string()),  # "<dataset>/<scene>"; all pairs of a scene must be in the same split
        # The image before, then the image after. In raw records, a path or digest that cannot be read is null
        ("images", pa.list_(IMAGE)),
        ("references", pa.list_(pa.string())),  # all references in the dataset's order, including empty references
        ("change_types", pa.list_(pa.string())),  # CHANGE_TYPES, types of the dataset, [NO_CHANGE], or [] if unknown
        ("source", pa.string()),  # file and row or key of the record, for messages
    ]
)

RAW_SCHEMA = pa.schema(  # schema of the files that ingest writes
    [
        *RECORD_SCHEMA,
        ("own_split", pa.string()),  # split in the dataset's files; if `train_on` contains it, `split` is "train"
        ("fault", pa.string()),  # why the row cannot be read (validate quarantines it), or null
    ]
)

SAMPLE_SCHEMA = pa.schema(
    [
        ("id", pa.string()),  # "<record id>#<reference number>"; for a repeated pair, followed by "x<copy number>"
        ("record", pa.string()),  # the record's id; the samples of a record are consecutive
        ("image_set", pa.string()),  # the record's image set; its samples are consecutive, too
        ("dataset", pa.string()),
        ("split", pa.string()),
        ("images", pa.list_(IMAGE)),  # of two images, the image before, then the image after
        ("history", pa.list_(TURN)),  # the turns before the question
        ("question", pa.string()),  # the record's, or one of the dataset's task
        ("answer", pa.string()),  # the answer to train on: one reference of the record, or all references joined
    ]
)


def load_table(path: Path, schema: pa.Schema, writer: str, if_empty: str) -> pa.Table:
    """Read a Parquet file that a stage wrote, and check its columns.

    Args:
        path: the file.
        schema: the columns that the file must have.
        writer: name of the stage that writes the file, for messages.
        if_empty: code of the error if the file has no rows.

    Raises:
        DataError: the file cannot be read, has unexpected columns, or has no rows.
    """
    with data_error_if_unreadable(path, "files.unreadable_stage_output", writer=writer):
        table = pq.read_table(path)
    if not table.schema.equals(schema):
        raise DataError("files.other_columns", path=path, writer=writer)
    if not table.num_rows:
        raise DataError(if_empty, path=path)
    return table
