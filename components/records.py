"""The record that flows: a pair of images, its captions, its dataset, split and change types; and what a stage reports.

Raw files become *records* (ingest, validate); records become question-answer *samples* (convert). Both live in Parquet
with the schemas below, so that 896k rows are read by column and any tool (DuckDB, polars, `datasets`) can open them.
"""

import json
import os
import tempfile
from pathlib import Path
from typing import Literal, Self, get_args

import pyarrow as pa
from pydantic import BaseModel, ConfigDict

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
CHANGE_TYPES: tuple[ChangeType, ...] = get_args(ChangeType)
"""The twelve change types of OmniDiff (paper section 3)."""

NO_CHANGE = "none"
"""The change type of a distractor pair: only camera, light or noise differ a little."""

RECORD_SCHEMA = pa.schema(
    [
        ("id", pa.string()),  # "<dataset>/<name>", unique over the whole mixture
        ("dataset", pa.string()),
        ("split", pa.string()),  # one of SPLITS
        ("scene", pa.string()),  # "<dataset>/<scene>": pairs of one scene must share a split
        ("before", pa.string()),  # image path, relative to the project or absolute
        ("after", pa.string()),
        ("captions", pa.list_(pa.string())),  # every reference, in the dataset's order; an empty one is kept
        ("change_types", pa.list_(pa.string())),  # CHANGE_TYPES, [NO_CHANGE], a dataset's own, or [] where unknown
        ("source", pa.string()),  # file and row or key that this record came from, for messages
    ]
)

RAW_SCHEMA = RECORD_SCHEMA.append(pa.field("fault", pa.string()))
"""What ingest writes: `fault` says why a row could not be read (validate quarantines it), null where it could."""

SAMPLE_SCHEMA = pa.schema(
    [
        ("id", pa.string()),  # "<record id>#<caption number>"
        ("pair", pa.string()),  # the record's id; the samples of one pair are neighbours
        ("dataset", pa.string()),
        ("split", pa.string()),
        ("before", pa.string()),
        ("after", pa.string()),
        ("question", pa.string()),
        ("answer", pa.string()),
    ]
)


class DataError(ValueError):
    """Something in the user's data is wrong. The text names file, row, field, rule, value and remedy."""


class StageReport(BaseModel):
    """What a stage did, in counts. No clock time in it: equal inputs must give equal bytes (DVC's run cache)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    stage: str
    rows_in: int
    rows_out: int

    def write(self, path: Path) -> Self:
        """Write as indented JSON, whole or not at all."""
        write_atomic(path, json.dumps(self.model_dump(mode="json"), indent=2, ensure_ascii=False) + "\n")
        return self


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write to a temporary neighbour, flush to disk, rename: a reader sees the old file or the new, never a half."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = content.encode() if isinstance(content, str) else content
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
