"""A small MiniChange on disk, and entries of the section `augment` over it."""

from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from m3diff.datasets.minichange.generate import generate
from m3diff.datasets.minichange.scene import MiniChange
from m3diff.settings.compute import Compute
from m3diff.stages.augment.params import MadeDataset
from tests.scoring import bench

SETTINGS = {
    "seed": 5,
    "scenes": {"train": 24, "val": 4, "test": 12},
    "image_px": 64,
    "references": 2,
    "multi_change_share": 0.2,
    "oversample_types": [],
}
SCENES = 40


def draw(root: Path, **changes: Any) -> Path:
    generate(MiniChange.model_validate(SETTINGS | {"root": root} | changes))
    return root


def entry(kind: str, source: Path, root: Path, /, **changes: Any) -> Any:
    """An entry of the section, typed."""
    values = {"kind": kind, "source": {"reader": "minichange", "root": source}, "root": root, "seed": 3} | changes
    return TypeAdapter(MadeDataset).validate_python(values)


def edits(source: Path, root: Path, /, **changes: Any) -> Any:
    defaults = {
        "editor": {"kind": "drawn"},
        "writer": {"kind": "grammar"},
        "edits": 2,
        "paraphrases": {"test": 4},
    }
    return entry("edits", source, root, **(defaults | changes))


def compute(scratch: Path) -> Compute:
    return bench.compute(scratch=scratch)
