"""A small MiniChange, entries of the section `augment` over it, and parts that need no weights."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from pydantic import TypeAdapter

from m3diff.datasets.minichange.generate import generate
from m3diff.datasets.minichange.scene import MiniChange
from m3diff.settings.compute import Compute
from m3diff.stages.augment.params import MadeDataset
from m3diff.stages.augment.source import Original
from m3diff.stages.augment.writers import Written
from tests.scoring import bench
from tests.toy import REPOSITORY

BASE = REPOSITORY / "data" / "00_base"
SCENES = 40
SETTINGS = {"seed": 5, "scenes": {"train": 24, "val": 4, "test": 12}, "image_px": 64, "references": 2}
SETTINGS |= {"multi_change_share": 0.2, "oversample_types": []}
KINDS: dict[str, dict[str, Any]] = {
    "edits": {
        "editor": {"kind": "drawn"},
        "writer": {"kind": "grammar"},
        "edits": 2,
        "paraphrases": {"val": 1, "test": 4},
    },
    "neighbours": {
        "features": {"kind": "encoder", "model": BASE},
        "writer": {"kind": "grammar"},
        "candidates": 4,
        "band": (0.75, 0.985),
        "max_text_similarity": 0.99,
        "references": 2,
    },
    "coupled_samples": {},
}


def draw(root: Path, **changes: Any) -> Path:
    generate(MiniChange.model_validate(SETTINGS | {"root": root} | changes))
    return root


def entry(kind: str, source: Path, root: Path, /, **changes: Any) -> Any:
    """An entry of the section, typed."""
    values = {"kind": kind, "source": {"reader": "minichange", "root": source}, "root": root, "seed": 3}
    return TypeAdapter(MadeDataset).validate_python(values | KINDS[kind] | changes)


def edits(source: Path, root: Path, /, **changes: Any) -> Any:
    return entry("edits", source, root, **changes)


def compute(scratch: Path) -> Compute:
    return bench.compute(scratch=scratch)


class ToyEditor:
    """Paints the seed, or `paint`; an instruction with `refuses` in it cannot be carried out, with `same` shows the
    original."""

    identity = "toy"

    def __init__(self, refuses: str = "never", same: str = "never", paint: int | None = None) -> None:
        self.refuses, self.same, self.paint = refuses, same, paint
        self.asked: list[tuple[str, str, int]] = []

    def edit(self, image: Path, instruction: str, seed: int) -> Image.Image | None:
        self.asked.append((image.name, instruction, seed))
        if self.refuses in instruction:
            return None
        if self.same in instruction:
            return Image.open(image).convert("RGB")
        paint = seed if self.paint is None else self.paint
        return Image.new("RGB", (8, 8), (paint & 255, paint >> 8 & 255, paint >> 16 & 255))


class ToyWriter:
    """Numbered texts; of facts with a word in `short` one fewer than asked for."""

    identity = "toy"

    def __init__(self, short: str = "never") -> None:
        self.short, self.asked = short, []

    def write(self, task, facts, n) -> list[Written]:
        self.asked += [(task, dict(each), n) for each in facts]
        return [self.of(task, each, n) for each in facts]

    def of(self, task, facts, n) -> Written:
        fewer = any(self.short in text for text in facts.values())
        texts = [f"{task} {number}: {' / '.join(facts.values())}" for number in range(n - fewer)]
        return Written(tuple(texts), Counter({"refused": 1} if fewer else {}))


class ToyFeatures:
    """Directions in a plane: an image's angle in degrees is its name's number."""

    identity = "toy"

    def features(self, images: list[Path]) -> np.ndarray:
        angles = np.deg2rad([float(image.stem) for image in images])
        return np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)


def original(folder: Path, name: str, text: str, split: Any = "train", caption: str | None = None) -> Original:
    image = folder / f"{name}.png"
    if not image.exists():
        Image.new("RGB", (8, 8), (len(name), 255, 255)).save(image)
    return Original(name, split, f"scene {name}", image, f"digest of {name}", text, ["color"], caption)


def captioned(number: float, caption: str, split: Any = "train", scene: str | None = None) -> Original:
    return Original(f"n{number}", split, scene or f"s{number}", Path(f"{number}.png"), f"d{number}", caption)
