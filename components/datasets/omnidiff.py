"""OmniDiff-Real and -Render: changes in real and rendered scenes, with one paragraph per pair and twelve change types.

Page: https://yuan-liu-omnidiff.github.io (Liu et al., ICCV 2025, arXiv 2503.11093). The licence is unknown. The
annotation files were not available, so no layout is assumed: the option `manifest` names the file (CSV, TSV, JSON, JSON
Lines or Parquet) and `columns` its columns. Image paths are relative to the root. Write a separate entry for each part:

    omnidiff_real:
      reader: omnidiff
      root: data/omnidiff/real
      options: {manifest: real.json, columns: {before: image1, after: image2, captions: caption, change_types: types}}

    {"image1": "s1/a.jpg", "image2": "s1/b.jpg", "caption": "The mug ...", "types": ["addition"], "split": "train"}

It is not documented whether pairs of the same scene share a split. If you name a column for `scene`, validate checks
this. Change types must be among the twelve types in the paper. Upper and lower case are not distinguished.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from m3diff.datasets import pairs, spec
from m3diff.records.errors import Fault
from m3diff.records.schemas import CHANGE_TYPES, NO_CHANGE

TYPE_NAMES = (*CHANGE_TYPES, NO_CHANGE)


def read(
    root: Path,
    manifest: pairs.Manifest = "annotations.json",
    columns: pairs.Columns | None = None,
    split: pairs.OwnSplit | None = None,
    confirmed: Sequence[Literal["columns"]] = (),
) -> spec.RowsWithNotes:
    """Read a table as `pairs` does, and check that the change types are among the paper's twelve types."""
    rows = pairs.read(root, manifest, columns, split, confirmed=confirmed)
    return spec.RowsWithNotes(map(_check_types, rows), rows.notes)


def _check_types(row: spec.Row) -> spec.Row:
    """Return the row with its change types in lowercase. If a type is unknown, the row has a fault and no types."""
    types = [name.strip().lower() for name in row.change_types]
    unknown_types = [name for name in types if name not in TYPE_NAMES]
    if not unknown_types:
        return replace(row, change_types=types)
    fault = Fault("datasets.unknown_change_types", key="change_types", names=unknown_types, expected=list(TYPE_NAMES))
    return replace(row, change_types=[], fault=fault)


REAL = spec.Published(
    "omnidiff_real",
    "OmniDiff-Real",
    spec.SplitCount(7_007, 7_007),
    spec.SplitCount(799, 799),
    spec.SplitCount(803, 803),
)
RENDER = spec.Published(
    "omnidiff_render",
    "OmniDiff-Render",
    spec.SplitCount(5_445, 5_445),
    spec.SplitCount(777, 777),
    spec.SplitCount(767, 767),
)
PAPER = "arXiv 2503.11093, the multi-change setting: a paragraph against its single reference"
SPEC = spec.DatasetSpec(
    title="OmniDiff",
    page="https://yuan-liu-omnidiff.github.io",
    paper="OmniDiff: A Comprehensive Benchmark for Fine-grained Image Difference Captioning (Liu et al., ICCV 2025)",
    licence=spec.UNSTATED_LICENCE,
    read=read,
    files=("annotations.json",),
    task="detail",
    published=(REAL, RENDER),
    protocols=(
        spec.Protocol("real", published_pairs=REAL.test.pairs, part=REAL.part, source=PAPER),
        spec.Protocol("render", published_pairs=RENDER.test.pairs, part=RENDER.part, source=PAPER),
    ),
)
