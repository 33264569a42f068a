"""The settings of MiniChange's generator: `synthesize.<name>` in params.yaml."""

from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from m3diff.datasets.minichange.scene import Level
from m3diff.records.schemas import SPLITS, ChangeType
from m3diff.settings.section import FrozenMap, Section

Domain = Literal["standard", "shifted"]
"""How scenes look: `render.LOOKS`."""


class MiniChange(Section):
    """How many scenes are drawn, how large, and with which changes."""

    root: Path  # the folder to write
    seed: int = Field(ge=0)
    scenes: FrozenMap[Literal["train", "val", "test"], int]  # each gives two pairs: a change and a distractor
    image_px: int = Field(ge=32)
    references: int = Field(ge=1, le=5)  # captions of a pair
    multi_change_share: float = Field(ge=0, le=1)  # of scenes with two or three changes
    oversample_types: tuple[ChangeType, ...]  # twice as often as the others in training; val and test stay even
    level: Level = "grid"  # free: more objects, anywhere and overlapping, under a camera and light that move more
    domain: Domain = "standard"  # shifted: palette, tables and camera that the standard one does not have

    @field_validator("scenes")
    @classmethod
    def every_split(cls, scenes: dict[str, int]) -> dict[str, int]:
        """All three splits, none below 0, at least one scene."""
        if set(scenes) != set(SPLITS) or min(scenes.values()) < 0 or not any(scenes.values()):
            raise ValueError(f"expected {', '.join(SPLITS)}, each 0 or more and one of them more than 0")
        return scenes
