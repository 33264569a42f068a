"""Parts that need no weights and note what they are asked, for tests of what is made with them."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from m3diff.stages.augment.source import Captioned, Original
from m3diff.stages.augment.writers import Written


class ToyEditor:
    """Paints the seed; what an instruction names in `refuses` it cannot carry out, what it names in `same` shows the
    original."""

    identity = "toy"

    def __init__(self, refuses: str = "never", same: str = "never") -> None:
        self.refuses, self.same = refuses, same
        self.asked: list[tuple[str, str, int]] = []

    def edit(self, image: Path, instruction: str, seed: int) -> Image.Image | None:
        self.asked.append((image.name, instruction, seed))
        if self.refuses in instruction:
            return None
        if self.same in instruction:
            return Image.open(image).convert("RGB")
        return Image.new("RGB", (8, 8), (seed & 255, seed >> 8 & 255, seed >> 16 & 255))


class ToyWriter:
    """Numbered texts; of facts with a word in `short` one fewer than asked for."""

    identity = "toy"

    def __init__(self, short: str = "never") -> None:
        self.short = short
        self.asked: list[tuple[str, dict[str, str], int]] = []

    def write(self, task: str, facts: Sequence[Mapping[str, str]], n: int) -> list[Written]:
        self.asked += [(task, dict(each), n) for each in facts]
        return [self.of(task, each, n) for each in facts]

    def of(self, task: str, facts: Mapping[str, str], n: int) -> Written:
        fewer = any(self.short in text for text in facts.values())
        told = " / ".join(facts.values())
        return Written(
            tuple(f"{task} {number}: {told}" for number in range(n - fewer)), Counter({"refused": 1} if fewer else {})
        )


class ToyFeatures:
    """Directions in a plane: an image's angle in degrees is its name's number."""

    identity = "toy"

    def features(self, images: Sequence[Path]) -> np.ndarray:
        angles = np.deg2rad([float(image.stem) for image in images])
        return np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)


def original(folder: Path, name: str, text: str, split: str = "train", caption: str | None = None) -> Original:
    image = folder / f"{name}.png"
    if not image.exists():
        Image.new("RGB", (8, 8), (len(name), 255, 255)).save(image)
    return Original(name, split, f"scene {name}", image, f"digest of {name}", text, ["color"], caption)


def captioned(number: float, caption: str, split: str = "train", scene: str | None = None) -> Captioned:
    return Captioned(f"n{number}", split, scene or f"s{number}", Path(f"{number}.png"), f"d{number}", caption)
